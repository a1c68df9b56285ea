"""Hugging Face folders: configs to shapes and back, weights that fit or are refused."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from drafters.formats.huggingface import HuggingFaceFolder, export, with_whole_head
from drafters.formats.huggingface_config import (
    config_from_shape,
    shape_from_config,
    shortest_pattern,
)
from drafters.formats.huggingface_families import FAMILIES
from drafters.formats.tensors import flatten, hash_params, leaf_shapes, nest, read_params
from drafters.shapes import Rope, TransformerShape
from pipeline.core.errors import UserError

GOLDEN = Path(__file__).parents[1] / "golden"
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
SHAPE = TransformerShape(
    vocab_size=64, num_layers=4, width=32, num_heads=4, num_kv_heads=2, head_dim=8, mlp_width=40
)


def shape_of(model_type: str = "llama", **config) -> TransformerShape:
    return shape_from_config("config.json", {"model_type": model_type, **SIZES, **config})


def refused(*, match: str, **config) -> None:
    with pytest.raises(UserError, match=match):
        shape_of(**config)


# ------------------------------------------------------------------------------ config to shape


def test_absent_keys_mean_what_each_family_means():
    assert shape_of().num_kv_heads == 4
    assert shape_of().head_dim == 8
    assert not shape_of().tied_head
    assert shape_of("mistral", num_key_value_heads=2).layer_pattern == ("local",)
    assert shape_of("mistral", num_key_value_heads=2).window == 4096
    assert shape_of("qwen2", num_key_value_heads=2).qkv_bias
    assert shape_of("qwen3", num_key_value_heads=2).head_dim == 128
    gemma = shape_of("gemma3_text")
    assert gemma.tied_head
    assert gemma.head_dim == 256
    assert gemma.local_rope == Rope(theta=10_000.0)
    assert gemma.rope == Rope(theta=1_000_000.0)


def test_null_is_not_absent_where_it_says_something():
    assert shape_of("mistral", num_key_value_heads=2, sliding_window=None).window == 0
    assert shape_of(head_dim=None, num_key_value_heads=None).head_dim == 8
    assert shape_of(rope_scaling=None).rope == Rope()


@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="a yardstick of the `bench` extra"
)
@pytest.mark.filterwarnings("ignore")  # theirs
@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.model_type)
def test_the_table_of_absent_keys_is_that_of_transformers(family):
    import transformers

    sizes = SIZES | {
        "hidden_size": 64,
        "num_attention_heads": 32,
    }  # they divide all key/value defaults
    config = transformers.AutoConfig.for_model(family.model_type, **sizes).to_dict()
    ours = shape_from_config("absent", {"model_type": family.model_type, **sizes})
    theirs = shape_from_config("present", config)
    assert ours == theirs


def test_windows_of_qwen_need_their_switch():
    keys = {"sliding_window": 8, "max_window_layers": 1, "num_key_value_heads": 2}
    assert shape_of("qwen2", **keys).window == 0
    switched = shape_of("qwen2", use_sliding_window=True, **keys)
    assert switched.layer_kinds() == ("global", "local", "local", "local")
    assert switched.window == 8


def test_gemma_counts_its_pattern_or_lists_it():
    counted = shape_of("gemma3_text", sliding_window_pattern=2)
    assert counted.layer_pattern == ("local", "global")
    listed = shape_of("gemma3_text", layer_types=["full_attention"] * 4)
    assert listed.layer_pattern == ("global",)
    refused(model_type="gemma3_text", layer_types=["full_attention"], match="must list 4 layers")
    refused(
        model_type="gemma3_text", layer_types=["linear_attention"] * 4, match="linear_attention"
    )


def test_rope_in_all_three_forms():
    new = {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5}
    expected = Rope(kind="linear", factor=8.0, theta=5e5)
    assert shape_of(rope_parameters=new).rope == expected
    assert shape_of(rope_theta=5e5, rope_scaling={"type": "linear", "factor": 8.0}).rope == expected
    scaling = {"rope_type": "linear", "factor": 8.0}
    gemma = shape_of(
        "gemma3_text", rope_theta=5e5, rope_scaling=scaling, rope_local_base_freq=100.0
    )
    assert (gemma.rope, gemma.local_rope) == (expected, Rope(theta=100.0))
    nested = {"full_attention": new, "sliding_attention": {"rope_theta": 100.0}}
    assert shape_of("gemma3_text", rope_parameters=nested) == gemma


def test_yarn_takes_its_context_and_temperature_as_transformers_does():
    given = {"rope_type": "yarn", "factor": 4.0}
    plain = shape_of(rope_scaling=given, max_position_embeddings=512).rope
    assert (plain.original_context, plain.attention_factor) == (512, 0)
    scales = shape_of(rope_scaling={**given, "mscale": 1.0, "mscale_all_dim": 0.5}).rope
    expected = (0.1 * math.log(4) + 1) / (0.05 * math.log(4) + 1)
    assert scales.attention_factor == pytest.approx(expected)


@pytest.mark.parametrize(
    ("config", "match"),
    [
        (
            {"model_type": "mamba"},
            "model_type 'mamba' is not supported; supported are llama, mistral",
        ),
        ({"model_type": None}, "model_type None"),
        (
            {"rope_scaling": {"rope_type": "longrope"}},
            "rope type 'longrope' .*default, linear, llama3",
        ),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            "needs a number low_freq_factor",
        ),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": "8"}},
            "needs a number factor, not '8'",
        ),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "factor must be at least 1"),
        ({"hidden_act": "relu"}, "hidden_act = 'relu' is not supported; supported are silu"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "32"}, "hidden_size must be a positive number, not '32'"),
        ({"num_key_value_heads": 3}, "must be a multiple of num_kv_heads = 3"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0"),
        ({"attention_bias": "yes"}, "attention_bias must be true or false"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(config, match):
    refused(match=match, **config)


@pytest.mark.parametrize(
    ("kinds", "pattern"), [("GGGG", "G"), ("LLGLLG", "LLG"), ("LLGL", "LLG"), ("GLLL", "GLLL")]
)
def test_shortest_pattern(kinds, pattern):
    names = {"G": "global", "L": "local"}
    assert shortest_pattern([names[k] for k in kinds]) == tuple(names[k] for k in pattern)


# ------------------------------------------------------------------------------ shape to config


def test_the_position_keys_of_both_versions_are_written():
    config = config_from_shape(dataclasses.replace(SHAPE, rope=Rope(kind="linear", factor=2.0)))
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 10_000.0
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}


@pytest.mark.parametrize(
    ("changes", "model_type"),
    [
        ({}, "llama"),
        ({"qkv_bias": True, "output_bias": True, "mlp_bias": True}, "llama"),
        ({"activation": "gelu_tanh"}, "llama"),
        ({"layer_pattern": ("local",), "window": 8}, "mistral"),
        ({"qkv_bias": True}, "qwen2"),
        ({"qkv_bias": True, "layer_pattern": ("local", "global"), "window": 8}, "qwen2"),
        ({"qk_norm": True}, "qwen3"),
        ({"query_scale": 8**-0.5}, "llama"),
        ({"rope": Rope(kind="yarn", factor=4, original_context=32)}, "llama"),
    ],
)
def test_the_family_follows_from_the_shape(changes, model_type):
    assert config_from_shape(dataclasses.replace(SHAPE, **changes))["model_type"] == model_type


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"norm_offset": 1.0}, "norm_offset = 1.0"),
        ({"embedding_scale": 2.0}, "embedding_scale = 2.0"),
        ({"query_scale": 0.3}, "query_scale = 0.3"),
        ({"output_bias": True}, "output_bias = True"),
        ({"layer_pattern": ("local", "global"), "window": 8}, "qwen2 lacks qkv_bias = False"),
        ({"qk_norm": True, "mlp_bias": True}, "llama lacks qk_norm = True; qwen3 lacks mlp_bias"),
    ],
)
def test_a_shape_of_no_family_is_refused_naming_the_field(changes, match):
    with pytest.raises(UserError, match=match):
        config_from_shape(dataclasses.replace(SHAPE, **changes))


def params_for(shape: TransformerShape, seed: int = 0) -> dict:
    rng = np.random.default_rng(seed)
    sizes = leaf_shapes(shape)
    return nest({path: rng.standard_normal(size, np.float32) for path, size in sizes.items()})


def test_a_trimmed_head_is_completed_by_the_target(tmp_path):
    shape = dataclasses.replace(SHAPE, tied_head=False, head_vocab=3)
    params, ids = params_for(shape), np.array([2, 5, 63], np.int32)
    with pytest.raises(UserError, match=r"proposes 3 of 64 tokens.*--target"):
        export(tmp_path / "out", shape, params, None)
    target = np.full((64, 32), 7, np.float32)
    whole, completed = with_whole_head(shape, params, ids, target)
    export(tmp_path / "out", whole, completed, None)
    head = load_file(tmp_path / "out" / "model.safetensors")["lm_head.weight"]
    np.testing.assert_array_equal(head[ids], params["head"])
    assert (np.delete(head, ids, axis=0) == 7).all()
    with pytest.raises(
        UserError, match=r"head is \[64, 48\].*only where vocabulary and width agree"
    ):
        with_whole_head(shape, params, ids, np.zeros((64, 48), np.float32))


# -------------------------------------------------------------------------------------- weights


@pytest.fixture
def folder(tmp_path) -> Path:
    """A sharded checkpoint that may be damaged."""
    return Path(shutil.copytree(GOLDEN / "smollm", tmp_path / "model"))


def read_all(folder: Path) -> dict:
    checkpoint = HuggingFaceFolder(folder)
    return read_params(checkpoint.shape(), "float32", checkpoint)


def reading_is_refused(folder: Path, match: str) -> None:
    with pytest.raises(UserError, match=match) as refusal:
        read_all(folder)
    assert "\n" not in str(refusal.value)


def shard(folder: Path, number: int = 2) -> Path:
    return sorted(folder.glob("*.safetensors"))[number - 1]


def test_a_missing_shard_is_refused_before_anything_is_read(folder):
    shard(folder).unlink()
    reading_is_refused(folder, r"names 3 files, but model-00002-of-00003.safetensors is missing")


@pytest.mark.parametrize("kept", [0, 5, 200, -1])
def test_a_truncated_shard_is_refused(folder, kept):
    path = shard(folder)
    path.write_bytes(path.read_bytes()[:kept])
    reading_is_refused(folder, r"model-00002-of-00003.safetensors: truncated.*fetch it again")


def test_an_index_that_does_not_fit_the_files_is_refused(folder):
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.norm.weight"] = "model-00001-of-00003.safetensors"
    index.write_text(json.dumps(content))
    reading_is_refused(folder, r"places tensor model.norm.weight in model-00001")


def rewrite(folder: Path, change) -> None:
    """Rewrites the first shard with its tensors changed, and drops the index's promises."""
    path = shard(folder, 1)
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    files = {path.name for path in folder.glob("*.safetensors")}
    content["weight_map"] = {f"__{file}": file for file in files}
    for file in files:
        for name in load_file(folder / file):
            content["weight_map"][name] = file
            content["weight_map"].pop(f"__{file}", None)
    index.write_text(json.dumps(content))


def test_a_missing_tensor_is_refused(folder):
    rewrite(folder, lambda tensors: tensors.pop(sorted(tensors)[-1]))
    reading_is_refused(folder, r"tensor model\.layers\.0\..* is missing; the file is incomplete")


def test_an_extra_tensor_is_refused(folder):
    rewrite(folder, lambda tensors: tensors.update(extra=np.zeros(3, np.float32)))
    reading_is_refused(folder, "tensor extra is not used by a model of this config")


def test_a_tensor_of_another_shape_is_refused(folder):
    rewrite(
        folder, lambda tensors: tensors.update({"model.embed_tokens.weight": np.zeros((63, 24))})
    )
    reading_is_refused(
        folder, r"embed_tokens.weight has shape \[63, 24\], but .* asks for \[64, 24\]"
    )


def test_quantised_tensors_are_refused(folder):
    zeros = np.zeros((64, 24), np.int8)
    rewrite(folder, lambda tensors: tensors.update({"model.embed_tokens.weight": zeros}))
    reading_is_refused(folder, "has type I8; quantised checkpoints are not supported")


def test_known_tensors_that_are_no_parameters_are_left_out(folder):
    known = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(4, np.float32),
        "lm_head.weight": np.zeros((64, 24), np.float32),
    }
    rewrite(folder, lambda tensors: tensors.update(known))
    read_all(folder)


def test_an_untied_head_is_not_left_out(tmp_path):
    folder = Path(shutil.copytree(GOLDEN / "llama2", tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors")
    reading_is_refused(folder, r"tensor lm_head.weight is missing")


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("config.json", b"\xff\xfe\x00", "config.json: not a JSON file"),
        ("config.json", b"{", "config.json: not a JSON file"),
        ("config.json", b"[]", "config.json: expected a JSON object"),
        ("model.safetensors.index.json", b"\xff", "index.json: not a JSON file"),
        ("model.safetensors.index.json", b"{}", "index.json has no weight_map"),
    ],
)
def test_malformed_json_is_refused(folder, name, content, match):
    (folder / name).write_bytes(content)
    reading_is_refused(folder, match)


def test_a_folder_without_weights_or_config_is_refused(folder, tmp_path):
    for path in folder.glob("*safetensors*"):
        path.unlink()
    reading_is_refused(folder, "neither model.safetensors nor model.safetensors.index.json")
    (folder / "config.json").unlink()
    reading_is_refused(folder, "cannot read .*config.json")
    reading_is_refused(tmp_path / "nowhere", "nowhere is not a folder")


@pytest.mark.parametrize(
    "prefixes", [("language_model.model.", "vision_tower."), ("model.language_model.", "model.vision_tower.")]
)  # fmt: skip
def test_the_text_half_of_a_multimodal_model_is_taken(tmp_path, prefixes):
    source = GOLDEN / "gemma3"
    config = json.loads((source / "config.json").read_text())
    whole = {"model_type": "gemma3", "text_config": config, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    text = load_file(source / "model.safetensors")
    tensors = {name.replace("model.", prefixes[0], 1): tensor for name, tensor in text.items()}
    tensors[prefixes[1] + "patch.weight"] = np.zeros(2, np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    taken, plain = HuggingFaceFolder(tmp_path), HuggingFaceFolder(source)
    assert taken.shape() == plain.shape()
    assert hash_params(read_all(tmp_path)) == hash_params(read_all(source))


def test_weights_are_cast_on_the_way():
    checkpoint = HuggingFaceFolder(GOLDEN / "qwen3")
    exact = flatten(read_params(checkpoint.shape(), "float32", checkpoint))
    rounded = flatten(read_params(checkpoint.shape(), "bfloat16", checkpoint))
    for path, leaf in rounded.items():
        assert leaf.dtype.name == "bfloat16"
        np.testing.assert_array_equal(leaf, exact[path].astype(leaf.dtype))


def test_progress_adds_up_to_the_parameters():
    checkpoint, done = HuggingFaceFolder(GOLDEN / "gemma3"), []
    read_params(checkpoint.shape(), "bfloat16", checkpoint, progress=done.append)
    assert sum(done) == checkpoint.shape().weight_bytes("bfloat16")
    assert len(done) == len(checkpoint.shapes())


def test_the_hash_of_parameters_sees_names_types_shapes_and_values():
    params = {"a": np.zeros((2, 3), np.float32), "b": {"0": np.ones(2, np.float32)}}
    variants = [
        params,
        {"c": params["a"], "b": params["b"]},
        {**params, "a": np.zeros((3, 2), np.float32)},
        {**params, "a": np.zeros((2, 3), np.int32)},
        {**params, "b": {"0": np.array([1, 2], np.float32)}},
    ]
    assert len({hash_params(variant) for variant in variants}) == len(variants)
    assert hash_params(params) == hash_params({"b": params["b"], "a": params["a"].copy()})
