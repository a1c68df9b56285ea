"""GGUF files: every architecture, quantised types, vocabularies, and files that are damaged."""

from __future__ import annotations

import dataclasses
import json
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from sentencepiece.sentencepiece_model_pb2 import ModelProto

from drafters import rope
from drafters.formats.gguf import GGUFFile
from drafters.formats.huggingface import HuggingFaceFolder
from drafters.formats.tensors import flatten, read_params
from drafters.shapes import Rope
from drafters.tokenizers import Tokenizer
from drafters.vocabularies import SentencePieceVocabulary
from pipeline.core.errors import UserError
from tests.drafters.samples import GOLDEN, byte_level, gguf_writer, sentencepiece_model, write_gguf

LINEAR = {"rope__scaling__type": "linear", "rope__scaling__factor": 8.0}
GEMMA = {
    "attention__sliding_window": 6,
    "attention__sliding_window_pattern": 3,
    "rope__freq_base_swa": 100.0,
    **LINEAR,
}
CASES = [
    ("llama2", "llama", {}),
    ("smollm", "llama", {}),
    ("llama_biases", "llama", {}),
    ("llama_linear", "llama", {**LINEAR, "rope__scaling__factor": 4.0}),
    ("llama_yarn", "llama", {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0,
                             "rope__scaling__original_context_length": 32}),
    ("qwen2", "qwen2", {"attention__key_length": None}),
    ("qwen3", "qwen3", {}),
    ("gemma3", "gemma3", GEMMA),
]  # fmt: skip


def make(path: Path, family: str = "smollm", architecture: str = "llama", **overrides) -> Path:
    write_gguf(gguf_writer(path, family, architecture, **overrides))
    return path


@pytest.mark.parametrize(("family", "architecture", "overrides"), CASES)
def test_a_gguf_and_its_original_import_alike(tmp_path, family, architecture, overrides):
    file = GGUFFile(make(tmp_path / "model.gguf", family, architecture, **overrides))
    original = HuggingFaceFolder(GOLDEN / family)
    expected = original.shape()
    if family == "gemma3":  # llama.cpp scales queries by the head size, whatever the config said
        expected = dataclasses.replace(expected, query_scale=16**-0.5)
    assert file.shape() == expected
    ours = flatten(read_params(expected, "float32", file))
    for path, leaf in flatten(read_params(expected, "float32", original)).items():
        np.testing.assert_allclose(ours[path], leaf, atol=2e-7, err_msg=str(path))


@pytest.mark.parametrize(
    ("kind", "error"), [("F16", 1e-3), ("BF16", 1e-2), ("Q8_0", 0.02), ("Q4_1", 0.3), ("Q5_0", 0.3)]
)
def test_quantised_tensors_come_back_within_their_precision(tmp_path, kind, error):
    file = GGUFFile(make(tmp_path / "model.gguf", "llama2", kind=kind))
    original = HuggingFaceFolder(GOLDEN / "llama2")
    ours = flatten(read_params(file.shape(), "float32", file))
    for path, leaf in flatten(read_params(original.shape(), "float32", original)).items():
        np.testing.assert_allclose(ours[path], leaf, atol=error, rtol=error, err_msg=str(path))


def test_float32_metadata_are_the_numbers_that_were_meant(tmp_path):
    file = GGUFFile(make(tmp_path / "m.gguf", attention__layer_norm_rms_epsilon=1e-5))
    assert file.shape().norm_epsilon == 1e-5


def test_a_pattern_may_list_every_layer(tmp_path):
    flags = {**GEMMA, "attention__sliding_window_pattern": [True, True, False, True]}
    shape = GGUFFile(make(tmp_path / "m.gguf", "gemma3", "gemma3", **flags)).shape()
    assert shape.layer_kinds() == ("local", "local", "global", "local")


def llama3_factors(position: Rope) -> np.ndarray:
    return rope.frequencies(Rope(theta=position.theta), 8) / rope.frequencies(position, 8)


def test_factors_of_llama3_become_its_rope(tmp_path):
    position = Rope(theta=500_000.0, kind="llama3", factor=32.0, original_context=8192)
    writer = gguf_writer(tmp_path / "m.gguf", "llama2", "llama", rope__freq_base=500_000.0)
    writer.add_tensor("rope_freqs.weight", llama3_factors(position))
    write_gguf(writer)
    found = GGUFFile(tmp_path / "m.gguf").shape().rope
    np.testing.assert_allclose(rope.frequencies(found, 8), rope.frequencies(position, 8), rtol=1e-5)
    assert found.kind == "llama3"


def test_factors_of_another_rope_are_refused(tmp_path):
    writer = gguf_writer(tmp_path / "m.gguf", "llama2", "llama")
    writer.add_tensor("rope_freqs.weight", np.array([1, 2, 5, 8], np.float32))
    write_gguf(writer)
    with pytest.raises(UserError, match="not those of a Llama 3 model stretched 8 times"):
        GGUFFile(tmp_path / "m.gguf").shape()


@pytest.mark.parametrize(
    ("overrides", "match"),
    [
        ({"architecture": "mamba"}, "architecture 'mamba' is not supported; supported are llama, qwen2"),
        ({"rope__scaling__type": "longrope", "rope__scaling__factor": 2.0}, "type 'longrope'"),
        ({"rope__scaling__type": "yarn", "rope__scaling__factor": 2.0}, "original_context_length is absent"),
        ({"expert_count": 8}, "mixture of 8 experts"),
        ({"block_count": None}, "llama.block_count is absent"),
        ({"block_count": "two"}, "llama.block_count is 'two', not int"),
        ({"attention__head_count": 0}, "num_heads must be positive, not 0"),
        ({"rope__dimension_count": 4}, "rope.dimension_count = 4 differs from the head size 8"),
        ({"attention__head_count_kv": 2}, "must be a multiple of num_kv_heads = 2"),
    ],
)  # fmt: skip
def test_metadata_that_cannot_be_used_are_refused_by_name(tmp_path, overrides, match):
    path = make(tmp_path / "model.gguf", **overrides)
    with pytest.raises(UserError, match=match):
        GGUFFile(path).shape()


def test_a_missing_layer_is_refused(tmp_path):
    file = GGUFFile(make(tmp_path / "model.gguf", block_count=3))
    with pytest.raises(
        UserError, match=r"tensors blk\.2\.attn_norm\.weight, .* 6 more are missing"
    ):
        read_params(file.shape(), "float32", file)


# --------------------------------------------------------------------------------------- damage


def outcome(path: Path) -> str:
    """`fine`, or the message; anything but a UserError fails the test."""
    try:
        file = GGUFFile(path)
        read_params(file.shape(), "float32", file)
    except UserError as error:
        return str(error)
    return "fine"


def test_a_file_cut_anywhere_is_refused(tmp_path):
    whole = make(tmp_path / "model.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    for kept in [*range(0, 64), *range(64, len(whole), 997), len(whole) - 1]:
        path.write_bytes(whole[:kept])
        message = outcome(path)
        assert "cut.gguf: damaged or not a GGUF" in message, (kept, message)
        assert "\n" not in message


def test_a_header_damaged_anywhere_is_refused_or_read_as_something_else(tmp_path):
    """No bit of the header makes the reader hang, run out of memory or fail without explanation."""
    whole = make(tmp_path / "model.gguf").read_bytes()
    end = whole.index(b"blk.1.ffn_up.weight") + 60
    path = tmp_path / "damaged.gguf"
    rng = np.random.default_rng(0)
    messages = []
    for position in rng.choice(end, 400, replace=False):
        damaged = bytearray(whole)
        damaged[position] ^= int(rng.integers(1, 256))
        path.write_bytes(damaged)
        messages.append(outcome(path))
    assert sum(message != "fine" for message in messages) > 200


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a model at all", b"\x00" * 100])
def test_other_files_are_refused(tmp_path, content):
    path = tmp_path / "other.gguf"
    path.write_bytes(content)
    assert "damaged or not a GGUF" in outcome(path)


def test_other_versions_and_missing_files_are_refused(tmp_path):
    path = tmp_path / "v1.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 1, 0, 0))
    assert "version 1, supported are 2 and 3" in outcome(path)
    assert "cannot read" in outcome(tmp_path / "nowhere.gguf")


def test_text_that_is_not_utf8_is_refused(tmp_path):
    whole = make(tmp_path / "model.gguf").read_bytes()
    path = tmp_path / "latin.gguf"
    path.write_bytes(whole.replace(b"general.architecture", b"general.architectur\xe9", 1))
    assert "damaged or not a GGUF" in outcome(path)


def test_a_type_that_cannot_be_dequantised_is_refused(tmp_path):
    writer = gguf_writer(tmp_path / "m.gguf", "smollm", "llama")
    kind = gguf.GGMLQuantizationType.I32
    writer.tensors[0]["output_norm.weight"].dtype = kind
    write_gguf(writer)
    assert "tensor output_norm.weight has type I32" in outcome(tmp_path / "m.gguf")


# --------------------------------------------------------------------------------- vocabularies


def with_vocabulary(path: Path, model: str, tokens, types, **more) -> GGUFFile:
    writer = gguf_writer(path, "smollm", "llama")
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    for name, value in more.items():
        getattr(writer, f"add_{name}")(value)
    write_gguf(writer)
    return GGUFFile(path)


def byte_pair_file(path: Path, pre: str, **more) -> GGUFFile:
    fast = byte_level()._tokenizer
    vocabulary = fast.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    merges = json.loads(fast.to_str())["model"]["merges"]
    pairs = [" ".join(pair) for pair in merges]
    types = [3 if token.startswith("<|") else 1 for token in tokens]
    return with_vocabulary(
        path, "gpt2", tokens, types, tokenizer_pre=pre, token_merges=pairs, eos_token_id=1, **more
    )


WORDS = {
    "gpt-2": ["in", " 1969", ",", " it", "'s", "\n", "\n", "x", "  ", " y"],
    "smollm": ["in", " ", "1", "9", "6", "9", ",", " it", "'s", "\n", "\n", "x", "  ", " y"],
    "default": ["in", " ", "196", "9", ",", " it", "'", "s", "\n", "\n", "x", "  ", " y"],
    "llama-bpe": ["in", " ", "196", "9", ",", " it", "'s", "\n\n", "x", "  ", " y"],
    "qwen2": ["in", " ", "1", "9", "6", "9", ",", " it", "'s", "\n\n", "x", "  ", " y"],
}


@pytest.mark.parametrize("pre", WORDS)
def test_text_is_cut_as_the_pre_tokenizer_says(tmp_path, pre):
    file = byte_pair_file(tmp_path / "m.gguf", pre)
    fast = file.tokenizer().vocabulary._tokenizer
    words = [text for text, _ in fast.pre_tokenizer.pre_tokenize_str("in 1969, it's\n\nx   y")]
    shown = ["".join({"Ġ": " ", "Ċ": "\n"}.get(c, c) for c in word) for word in words]
    assert shown == WORDS[pre]


def test_a_byte_pair_vocabulary_is_that_of_its_tokenizer_json(tmp_path):
    tokenizer = byte_pair_file(tmp_path / "m.gguf", "gpt-2").tokenizer()
    original = Tokenizer(vocabulary=byte_level())
    assert tokenizer.first_difference(original) is None
    for text in ("the cat sat", "naïve 你好 123", "<|im_end|>"):
        assert tokenizer.encode(text) == original.encode(text)
    assert tokenizer.eos_ids == (1,)
    assert not tokenizer.add_bos


def test_llama3_begins_prompts_unless_the_file_says_otherwise(tmp_path):
    assert byte_pair_file(tmp_path / "a.gguf", "llama-bpe", bos_token_id=0).tokenizer().add_bos
    says_no = byte_pair_file(tmp_path / "b.gguf", "llama-bpe", bos_token_id=0, add_bos_token=False)
    assert not says_no.tokenizer().add_bos


def test_a_sentencepiece_vocabulary_is_rebuilt(tmp_path):
    content = sentencepiece_model()
    proto = SentencePieceVocabulary(content, "")
    pieces = [(p.piece, p.type, p.score) for p in ModelProto.FromString(content).pieces]
    tokens, types, scores = zip(*pieces, strict=True)
    file = with_vocabulary(
        tmp_path / "m.gguf", "llama", list(tokens), list(types), token_scores=list(scores),
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    tokenizer, original = file.tokenizer(), Tokenizer(vocabulary=proto)
    assert tokenizer.first_difference(original) is None
    assert (tokenizer.bos_id, tokenizer.add_bos, tokenizer.eos_ids) == (1, True, (2,))
    for text in ("the cat sat", "  naïve 你好 123", "</s>🎉"):
        assert tokenizer.encode(text, add_bos=False) == original.encode(text)


def test_vocabularies_of_unknown_kinds_are_refused(tmp_path):
    with pytest.raises(
        UserError, match="pre-tokenizer 'tekken' is not supported; supported are gpt-2"
    ):
        byte_pair_file(tmp_path / "a.gguf", "tekken").tokenizer()
    with pytest.raises(UserError, match="vocabulary 'bert' is not supported"):
        with_vocabulary(tmp_path / "b.gguf", "bert", ["a"], [1]).tokenizer()
    with pytest.raises(UserError, match="2 tokens, but 1 types"):
        with_vocabulary(
            tmp_path / "c.gguf", "gpt2", ["a", "b"], [1], token_merges=["a b"]
        ).tokenizer()
    with pytest.raises(UserError, match=r"tokenizer\.ggml\.model is absent"):
        GGUFFile(make(tmp_path / "d.gguf")).tokenizer()
