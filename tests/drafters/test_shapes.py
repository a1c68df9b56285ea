"""The arithmetic of shapes against built models and published numbers."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from drafters import kv_cache
from drafters.shapes import Collectives, Rope, TransformerShape
from drafters.transformer import abstract_params, with_params

TINY = TransformerShape(
    vocab_size=96, num_layers=2, width=32, num_heads=8, num_kv_heads=2, head_dim=8, mlp_width=48
)
DIALECTS = {
    "llama": TINY,
    "untied": dataclasses.replace(TINY, tied_head=False),
    "trimmed": dataclasses.replace(TINY, tied_head=False, head_vocab=40),
    "qwen2": dataclasses.replace(TINY, qkv_bias=True),
    "all biases": dataclasses.replace(TINY, qkv_bias=True, output_bias=True, mlp_bias=True),
    "qwen3": dataclasses.replace(TINY, qk_norm=True),
    "gemma3": dataclasses.replace(TINY, qk_norm=True, post_norms=True, norm_offset=1.0),
}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_num_params_is_that_of_the_built_model(dialect):
    shape = DIALECTS[dialect]
    leaves = jax.tree.leaves(abstract_params(shape))
    assert shape.num_params() == sum(leaf.size for leaf in leaves)
    assert shape.weight_bytes("float32") == sum(leaf.size * 4 for leaf in leaves)


def test_read_params_leave_out_the_embedding_that_is_only_looked_up():
    assert TINY.read_params() == TINY.num_params()
    trimmed = DIALECTS["trimmed"]
    assert trimmed.read_params() == trimmed.num_params() - 96 * 32


def chinchilla(layers: int, width: int) -> TransformerShape:
    # A gated MLP of F = 3 D has the 13 D^2 parameters per layer of the paper's blocks.
    heads = width // 128
    return TransformerShape(
        vocab_size=32_000,
        num_layers=layers,
        width=width,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=128,
        mlp_width=3 * width,
    )


def test_the_papers_models():
    # Chen et al. 2023, table 2: 70B and 4B; bytes of keys and values per token in bf16.
    target, drafter = chinchilla(80, 8192), chinchilla(8, 6144)
    norms = 2 * 8192 * 80 + 8192
    assert target.num_params() - norms == 80 * 13 * 8192**2 + 32_000 * 8192
    assert round(target.num_params() / 1e9, 2) == 70.06
    assert round(drafter.num_params() / 1e9, 2) == 4.12
    assert target.cache_bytes_per_token("bfloat16") == 2_621_440
    assert drafter.cache_bytes_per_token("bfloat16") == 196_608
    assert target.collectives(16) == Collectives(layers=160, embedding=1, logits=1)
    assert drafter.collectives(16) == Collectives(layers=16, embedding=1, logits=1)


def test_flops_count_local_layers_by_their_window():
    shape = dataclasses.replace(TINY, window=4, layer_pattern=("local", "global"))
    attention = 4 * 8 * 8
    assert shape.flops_per_token(100) == 2 * shape.read_params() + attention * (4 + 100)
    assert TINY.flops_per_token(100) == 2 * TINY.read_params() + attention * 200


@pytest.mark.parametrize(
    ("heads", "groups", "chips", "repeats", "stored", "sharded"),
    [
        (16, 2, 16, 8, (16, 16), True),
        (16, 16, 16, 1, (16, 16), True),
        (16, 4, 2, 1, (16, 4), True),
        (28, 4, 4, 1, (28, 4), True),
        # One chip of four is idle, but each of the others holds one group of six rows, not three of three.
        (12, 3, 4, 1, (16, 4), True),
        (9, 3, 16, 3, (16, 16), True),
        (8, 2, 16, 4, (16, 16), True),
        # Four query heads share a copy, the last ones with one of zeros.
        (14, 2, 4, 2, (16, 4), True),
        (28, 4, 16, 4, (32, 16), True),
        (1, 1, 16, 1, (1, 1), False),
        (3, 1, 16, 1, (3, 1), False),
        (9, 3, 1, 1, (9, 3), True),
    ],
)
def test_layout_divides_heads_as_they_leave_a_chip_the_least(
    heads, groups, chips, repeats, stored, sharded
):
    shape = dataclasses.replace(TINY, num_heads=heads, num_kv_heads=groups)
    layout, served = shape.layout(chips), shape.divided_over(chips)
    assert (layout.kv_repeats, layout.shard_attention) == (repeats, sharded)
    assert (served.num_heads, served.num_kv_heads) == stored
    assert layout.zero_heads == stored[0] - heads
    assert bool(layout.notes()) == (stored != (heads, groups) or not sharded)
    assert served.divided_over(chips) == served
    assert served.layout(chips).shard_attention == sharded


def test_layout_says_what_every_chip_holds_whole():
    shape = dataclasses.replace(TINY, num_heads=1, num_kv_heads=1, mlp_width=50, vocab_size=97)
    notes = " ".join(shape.layout(16).notes())
    for part in ("attention", "the MLP", "the embedding", "the head"):
        assert f"all of {part}" in notes
    assert shape.collectives(16) == Collectives(0, 0, 0)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_layers": 0}, "num_layers"),
        ({"num_kv_heads": 3}, "num_heads = 8"),
        ({"head_dim": 7}, "head_dim"),
        ({"layer_pattern": ("local",)}, "window"),
        ({"head_vocab": 97, "tied_head": False}, "head_vocab = 97"),
        ({"head_vocab": 40}, "tied_head"),
    ],
)
def test_shapes_that_cannot_be_are_refused_by_name(change, named):
    with pytest.raises(ValueError, match=named):
        dataclasses.replace(TINY, **change)


def test_rope_scalings_need_the_context_they_stretch():
    with pytest.raises(ValueError, match="original_context"):
        Rope(kind="llama3", factor=8.0)


def test_cache_bytes_are_those_of_a_cache():
    cache = kv_cache.empty(TINY, batch=1, capacity=10, dtype=jnp.bfloat16)
    held = sum(leaf.nbytes for leaf in (*cache.k, *cache.v))
    assert held == 10 * TINY.cache_bytes_per_token("bfloat16")


def test_flops_are_those_of_the_compiled_step():
    """XLA counts the softmax, norms and rotations too: a few percent at a width of 128."""
    shape = dataclasses.replace(TINY, width=128, num_heads=8, head_dim=16, mlp_width=384)
    capacity = 64

    def step(params, tokens, cache):
        model = with_params(shape, params)
        x, cache = model.step(tokens, cache)
        return model.logits(x), cache

    cache = jax.eval_shape(lambda: kv_cache.empty(shape, 1, capacity, jnp.float32))
    tokens = jax.ShapeDtypeStruct((1, 4), jnp.int32)
    compiled = jax.jit(step).lower(abstract_params(shape), tokens, cache).compile()
    counted = compiled.cost_analysis()["flops"]
    assert shape.flops_per_token(capacity) * 4 == pytest.approx(counted, rel=0.1)
