"""The import and export commands: whole model directories, refusals with exit code 2, nothing
half-written."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from drafters.formats.huggingface import HuggingFaceFolder
from drafters.formats.tensors import flatten, hash_params, leaf_shapes, nest, read_params
from drafters.model_card import Source, read_card, read_draft_ids, read_tokenizer
from drafters.models import read_params_of, write_model
from drafters.shapes import TransformerShape
from drafters.tokenizers import Tokenizer
from drafters.vocabularies import ByteVocabulary
from pipeline.core.errors import UserError, run_cli
from tests.disk import a_full_disk
from tests.drafters.samples import GOLDEN, byte_level, gguf_writer, write_gguf
from tools import export_model, import_model

BYTES = Tokenizer(vocabulary=ByteVocabulary(), bos_id=257, eos_ids=(256,), add_bos=True)
SHAPE = TransformerShape(
    vocab_size=258, num_layers=1, width=8, num_heads=1, num_kv_heads=1, head_dim=8, mlp_width=8
)


def params_for(shape: TransformerShape, seed: int = 0) -> dict:
    rng = np.random.default_rng(seed)
    sizes = leaf_shapes(shape)
    return nest({path: rng.standard_normal(size, np.float32) for path, size in sizes.items()})


def saved(
    path: Path, shape: TransformerShape = SHAPE, tokenizer=BYTES, seed: int = 0, **more
) -> Path:
    source = Source(format="training", name="test")
    params = params_for(shape, seed)
    write_model(path, shape=shape, params=params, source=source, tokenizer=tokenizer, **more)
    return path


def failure(command, arguments, capsys) -> str:
    """The message of a command that must end with exit code 2."""
    assert run_cli(partial(command.main, [str(argument) for argument in arguments])) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert message.count("\n") == 1
    return message


@pytest.fixture
def no_leftovers(tmp_path):
    """A folder that is still empty, hidden files included, when the test ends."""
    folder = tmp_path / "out"
    folder.mkdir()
    yield folder
    assert os.listdir(folder) == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_import_writes_a_model_directory(tmp_path, capsys, dtype):
    destination = tmp_path / "models" / "tiny"
    arguments = [str(GOLDEN / "smollm"), str(destination), f"--dtype={dtype}"]
    assert import_model.main(arguments) == 0
    card = read_card(destination)
    assert (card.dtype, card.source.format, card.source.name) == (dtype, "huggingface", "smollm")
    assert len(card.source.sha256) == 4
    checkpoint = HuggingFaceFolder(GOLDEN / "smollm")
    expected = read_params(checkpoint.shape(), dtype, checkpoint)
    restored = read_params_of(destination, card)
    assert hash_params(restored) == hash_params(expected) == card.weights_hash
    printed = capsys.readouterr().out
    assert card.weights_hash in printed
    assert "M parameters" in printed


def test_a_gguf_is_imported_with_its_tokenizer(tmp_path, capsys):
    fast = byte_level()._tokenizer
    writer = gguf_writer(tmp_path / "a.gguf", "llama2", "llama")
    vocabulary = fast.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)[:63]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*tokens, tokens[2] + tokens[3]])
    writer.add_token_types([3, 3] + [1] * 62)
    writer.add_token_merges([f"{tokens[2]} {tokens[3]}"])
    writer.add_eos_token_id(1)
    write_gguf(writer)
    assert import_model.main([str(tmp_path), str(tmp_path / "model")]) == 0
    card = read_card(tmp_path / "model")
    tokenizer = read_tokenizer(tmp_path / "model", card)
    assert tokenizer.vocab_size == 64
    assert tokenizer.eos_ids == (1,)
    assert card.lineage.tokenizer_hash == tokenizer.content_hash
    assert tokenizer.content_hash in capsys.readouterr().out


def test_a_tokenizer_that_does_not_fit_is_refused(tmp_path, capsys, no_leftovers):
    source = Path(shutil.copytree(GOLDEN / "smollm", tmp_path / "model"))
    (source / "tokenizer.json").write_bytes(byte_level().serialize())
    message = failure(import_model, [source, no_leftovers / "m"], capsys)
    assert "the tokenizer has 314 ids, but the embedding only 64 rows" in message


def test_nothing_importable_is_refused(tmp_path, capsys, no_leftovers):
    message = failure(import_model, [tmp_path / "nowhere", no_leftovers / "m"], capsys)
    assert "nowhere is not a folder" in message
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    message = failure(import_model, [tmp_path, no_leftovers / "m"], capsys)
    assert "several models (a.gguf, b.gguf)" in message


@pytest.mark.parametrize("free_bytes", [200, 10_000])
def test_a_full_disk_leaves_nothing_behind(tmp_path, capsys, no_leftovers, free_bytes):
    model = tmp_path / "model"
    assert import_model.main([str(GOLDEN / "qwen3"), str(model)]) == 0
    capsys.readouterr()
    with a_full_disk(free_bytes):
        message = failure(import_model, [GOLDEN / "qwen3", no_leftovers / "m"], capsys)
        assert str(no_leftovers) in message
        message = failure(export_model, [model, no_leftovers / "m"], capsys)
        assert f"cannot write {no_leftovers}/m: File too large" in message


def test_a_model_that_cannot_fit_is_refused_before_writing(capsys, no_leftovers, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(9, 8, 1000))
    message = failure(import_model, [GOLDEN / "qwen3", no_leftovers / "m"], capsys)
    assert "needs 0 MB, but 0 MB are free" in message


def test_a_failed_import_keeps_what_was_there(tmp_path, capsys):
    model = tmp_path / "model"
    assert import_model.main([str(GOLDEN / "qwen3"), str(model)]) == 0
    before = read_card(model)
    capsys.readouterr()
    with a_full_disk(10_000):
        failure(import_model, [GOLDEN / "smollm", model], capsys)
    assert read_card(model) == before
    assert sorted(os.listdir(tmp_path)) == ["model"]


def test_an_export_imports_again(tmp_path, capsys):
    model = saved(tmp_path / "model")
    assert export_model.main([str(model), str(tmp_path / "hf")]) == 0
    assert "model.safetensors" in capsys.readouterr().out
    assert import_model.main([str(tmp_path / "hf"), str(tmp_path / "again")]) == 0
    first, second = read_card(model), read_card(tmp_path / "again")
    assert first.shape == second.shape
    assert first.weights_hash == second.weights_hash
    assert first.tokenizer is not None
    assert second.tokenizer is not None
    assert first.tokenizer.content_hash == second.tokenizer.content_hash
    assert second.tokenizer.eos_ids == (256,)
    assert second.tokenizer.add_bos


def test_a_trimmed_drafter_is_exported_with_its_target(tmp_path, capsys):
    ids = np.array([3, 7, 256], np.int32)
    trimmed = replace(SHAPE, tied_head=False, head_vocab=3)
    drafter = saved(tmp_path / "drafter", trimmed, draft_ids=ids)
    target = saved(tmp_path / "target", seed=1)
    message = failure(export_model, [drafter, tmp_path / "hf"], capsys)
    assert "give --target" in message
    command = [str(drafter), str(tmp_path / "hf"), f"--target={target}"]
    assert export_model.main(command) == 0
    exported = HuggingFaceFolder(tmp_path / "hf")
    head = flatten(read_params(exported.shape(), "float32", exported))["head",]
    expected = params_for(SHAPE, seed=1)["embedding"]
    expected[ids] = params_for(trimmed)["head"]
    np.testing.assert_array_equal(head, expected)


def test_a_target_of_other_tokens_is_refused(tmp_path, capsys, no_leftovers):
    ids = np.array([3, 7, 256], np.int32)
    trimmed = replace(SHAPE, tied_head=False, head_vocab=3)
    drafter = saved(tmp_path / "drafter", trimmed, draft_ids=ids)
    other = Tokenizer(vocabulary=byte_level())
    wide = replace(SHAPE, vocab_size=314)
    target = saved(tmp_path / "target", wide, other)
    command = [drafter, no_leftovers / "hf", f"--target={target}"]
    assert "different tokenizers: id 0 is" in failure(export_model, command, capsys)


# ----------------------------------------------------------------------------- damaged directories


def test_a_replaced_tokenizer_is_refused(tmp_path):
    shape = replace(SHAPE, vocab_size=314)
    model = saved(tmp_path / "model", shape, Tokenizer(vocabulary=byte_level()))
    other = byte_level(("<s>", "</s>")).serialize()
    (model / "tokenizer.json").write_bytes(other)
    with pytest.raises(UserError, match=r"tokenizer\.json: content .* written for"):
        read_tokenizer(model, read_card(model))
    (model / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"cannot read .*tokenizer\.json"):
        read_tokenizer(model, read_card(model))


def test_a_model_of_ids_only_has_no_tokenizer(tmp_path):
    model = saved(tmp_path / "model", tokenizer=None)
    with pytest.raises(UserError, match="the model has no tokenizer"):
        read_tokenizer(model, read_card(model))
    assert "tokenizer  none: texts cannot be answered" in import_model.describe(read_card(model))


@pytest.mark.parametrize("content", [b"", b"not numpy", None])
def test_draft_ids_that_do_not_fit_are_refused(tmp_path, content):
    trimmed = replace(SHAPE, tied_head=False, head_vocab=3)
    model = saved(tmp_path / "model", trimmed, draft_ids=np.array([3, 7, 256], np.int32))
    card, path = read_card(model), model / "draft_ids.npy"
    np.testing.assert_array_equal(read_draft_ids(model, card), [3, 7, 256])
    if content is None:
        np.save(path, np.array([3, 3, 256], np.int32))
    else:
        path.write_bytes(content)
    with pytest.raises(UserError, match=r"draft_ids\.npy"):
        read_draft_ids(model, card)


def test_a_missing_or_malformed_card_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"model\.json does not exist"):
        read_card(tmp_path)
    (tmp_path / "model.json").write_bytes(b"\xff")
    with pytest.raises(UserError, match=r"model\.json: not a JSON file"):
        read_card(tmp_path)


def test_nothing_but_an_older_one_of_its_kind_is_replaced(tmp_path, capsys):
    model = saved(tmp_path / "model")
    work = tmp_path / "work"
    work.mkdir()
    (work / "thesis.tex").write_text("a year")
    assert "has no config.json" in failure(export_model, [model, work], capsys)
    assert "has no model.json" in failure(import_model, [GOLDEN / "qwen3", work], capsys)
    assert "has no config.json" in failure(export_model, [model, work / "thesis.tex"], capsys)
    assert "is what is read" in failure(export_model, [model, model], capsys)
    assert (work / "thesis.tex").read_text() == "a year"
    for _ in range(2):
        assert export_model.main([str(model), str(tmp_path / "hf")]) == 0


def test_a_target_that_completes_nothing_is_refused(tmp_path, capsys, no_leftovers):
    model = saved(tmp_path / "model")
    message = failure(export_model, [model, no_leftovers / "hf", f"--target={model}"], capsys)
    assert "proposes the whole vocabulary" in message
