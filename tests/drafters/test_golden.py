"""Our transformer against transformers: tiny checkpoints of every family, and SmolLM2's greedy tokens.

tests/golden is written by tools/make_golden.py. The last tests need torch and transformers (the `bench`
extra) and hold where they are installed.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import shutil
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from drafters import attention, transformer
from drafters.formats.huggingface import HuggingFaceFolder, export
from drafters.formats.tensors import flatten, leaf_shapes, read_params
from drafters.model_card import read_card, read_tokenizer
from drafters.models import read_params_of
from drafters.shapes import TransformerShape

GOLDEN = Path(__file__).parents[1] / "golden"
FAMILIES = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir())
OLD_CONFIGS = sorted(path.parent.name for path in GOLDEN.glob("*/config_transformers4.json"))
BLOCK_TOLERANCE = 1e-5  # fp32 on both sides, sums in another order
MODEL_TOLERANCE = 1e-4


class Golden(NamedTuple):
    shape: TransformerShape
    params: transformer.Params
    tokens: np.ndarray  # i32[B, T]
    hidden: np.ndarray  # f32[L+1, B, T, D]
    logits: np.ndarray  # f32[B, T, V]


@functools.cache
def golden(family: str) -> Golden:
    checkpoint = HuggingFaceFolder(GOLDEN / family)
    with np.load(GOLDEN / family / "expected.npz") as expected:
        params = read_params(checkpoint.shape(), "float32", checkpoint)
        return Golden(checkpoint.shape(), params, **{k: expected[k] for k in expected.files})


@functools.cache
def runner(family: str):
    """(params, tokens, hidden) -> the embedding and each block's output on `hidden`, and our logits."""
    shape = golden(family).shape

    def run(params, tokens, hidden):
        model = transformer.with_params(shape, params)
        order = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        views = model.views(order, jnp.zeros(tokens.shape[:1], jnp.int32), True, order)
        blocks = [
            block(jnp.moveaxis(x, -1, 0), views[kind], None, attention.attend_packed)[0]
            for block, kind, x in zip(model.layers, shape.layer_kinds(), hidden[:-1], strict=True)
        ]
        outputs = jnp.stack([model.embed(tokens), *blocks])
        return jnp.moveaxis(outputs, 1, -1), model(tokens)

    # Compiling is nearly all of the time here, and what it optimises is tiny.
    return jax.jit(run, compiler_options={"xla_backend_optimization_level": 0})


@functools.cache
def computed(family: str) -> tuple[np.ndarray, np.ndarray]:
    case = golden(family)
    return jax.device_get(runner(family)(case.params, case.tokens, case.hidden))


@pytest.mark.parametrize("family", FAMILIES)
def test_embedding_and_every_block_equal_transformers(family):
    blocks, _ = computed(family)
    np.testing.assert_allclose(
        blocks, golden(family).hidden, atol=BLOCK_TOLERANCE, rtol=BLOCK_TOLERANCE
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(family):
    _, logits = computed(family)
    expected = golden(family).logits
    assert expected.std() > 1  # or a tolerance of 1e-4 would mean little
    np.testing.assert_allclose(logits, expected, atol=MODEL_TOLERANCE)


@pytest.mark.parametrize("family", ["llama_biases", "gemma3"])  # they have every kind of leaf
def test_a_slip_in_any_leaf_would_show(family):
    case = golden(family)
    for path in leaf_shapes(case.shape):
        moved = jax.tree.map(np.copy, case.params)
        leaf = flatten(moved)[path]
        leaf += 0.01 * np.random.default_rng(0).standard_normal(leaf.shape).astype(np.float32)
        _, logits = runner(family)(moved, case.tokens, case.hidden)
        assert np.abs(logits - case.logits).max() > 10 * MODEL_TOLERANCE, path


@pytest.mark.parametrize("family", OLD_CONFIGS)
def test_configs_of_transformers_4_and_5_mean_the_same(family, tmp_path):
    folder = tmp_path / family
    shutil.copytree(GOLDEN / family, folder)
    (folder / "config_transformers4.json").rename(folder / "config.json")
    assert HuggingFaceFolder(folder).shape() == golden(family).shape


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shard_bytes", [10**9, 9_000])
def test_an_exported_checkpoint_imports_to_the_same_parameters(family, shard_bytes, tmp_path):
    case = golden(family)
    export(tmp_path / "out", case.shape, case.params, None, shard_bytes=shard_bytes)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1 or shard_bytes > 10_000
    again = HuggingFaceFolder(tmp_path / "out")
    assert again.shape() == case.shape
    params = flatten(read_params(again.shape(), "float32", again))
    assert params.keys() == leaf_shapes(case.shape).keys()
    for path, leaf in flatten(case.params).items():
        np.testing.assert_array_equal(params[path], leaf)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tree_is_that_of_the_transformer(family):
    case = golden(family)
    abstract = flatten(transformer.abstract_params(case.shape))
    assert {path: leaf.shape for path, leaf in abstract.items()} == leaf_shapes(case.shape)


@pytest.mark.slow
def test_smollm2_continues_greedily_as_in_transformers(smollm2):
    """Token for token: the argmax after every forced prefix is the token that transformers chose."""
    card = read_card(smollm2)
    params, tokenizer = read_params_of(smollm2, card), read_tokenizer(smollm2, card)
    cases = json.loads((GOLDEN / "smollm2_greedy.json").read_text())
    rows = [case["prompt_ids"] + case["ids"] for case in cases]
    tokens = np.zeros(
        (len(rows), max(map(len, rows))), np.int32
    )  # causal: what follows is not seen
    for row, ids in zip(tokens, rows, strict=True):
        row[: len(ids)] = ids

    @jax.jit
    def best(params, tokens):
        model = transformer.with_params(card.shape, params)
        return jnp.argmax(model.logits(model.hidden(tokens)), axis=0)

    chosen = np.asarray(best(params, tokens))
    for case, row in zip(cases, chosen, strict=True):
        assert tokenizer.encode(case["prompt"]) == case["prompt_ids"]
        start = len(case["prompt_ids"]) - 1
        ours = row[start : start + len(case["ids"])].tolist()
        pairs = zip(ours, case["ids"], case["gaps"], strict=True)
        gaps = {i: gap for i, (our, their, gap) in enumerate(pairs) if our != their}
        assert not gaps, f"{case['prompt']!r}: steps that differ, with transformers' gaps: {gaps}"
    assert len(cases) >= 4
    assert all(len(case["ids"]) >= 48 for case in cases)


needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None or importlib.util.find_spec("transformers") is None,
    reason="torch and transformers are yardsticks of the `bench` extra",
)


@needs_transformers
@pytest.mark.filterwarnings("ignore")  # theirs
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_loads_an_export_with_equal_logits(family, tmp_path):
    import torch
    import transformers

    case = golden(family)
    export(tmp_path / "out", case.shape, case.params, None, shard_bytes=9_000)
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True, attn_implementation="eager"
    )
    assert not any(report.values()), report
    with torch.no_grad():
        logits = model(torch.from_numpy(case.tokens.astype(np.int64))).logits.numpy()
    np.testing.assert_allclose(logits, case.logits, atol=MODEL_TOLERANCE)
