"""One code path, two ways through it: cached and cacheless, unrolled and scanned."""

import dataclasses
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from drafters import attention, kv_cache
from drafters.products import padded_length, product
from drafters.shapes import Rope, TransformerShape
from drafters.transformer import (
    params_of,
    stack_layers,
    unstack_layers,
    with_params,
)
from tests.drafters.random_params import random_params

MODEL_TOLERANCE = 1e-4  # fp32, whole models
BLOCK_TOLERANCE = 1e-5  # fp32, one block
PLAIN = TransformerShape(
    vocab_size=64, num_layers=3, width=32, num_heads=4, num_kv_heads=2, head_dim=8, mlp_width=48
)
EVERYTHING = dataclasses.replace(
    PLAIN,
    tied_head=False,
    qkv_bias=True,
    qk_norm=True,
    post_norms=True,
    norm_offset=1.0,
    activation="gelu_tanh",
    window=4,
    layer_pattern=("local", "local", "global"),
    local_rope=Rope(theta=500.0),
    embedding_scale=5.0,
)


@functools.cache
def params_for(shape):
    return random_params(shape, seed=3)


@functools.cache
def tokens(batch=2, length=12):
    return jax.random.randint(jax.random.key(1), (batch, length), 0, 64)


@functools.partial(jax.jit, static_argnums=0)
def _whole(shape, params, tokens):
    return with_params(shape, params)(tokens)


@functools.partial(jax.jit, static_argnums=0)
def _step(shape, params, tokens, cache):
    model = with_params(shape, params)
    x, cache = model.step(tokens, cache)
    return jnp.moveaxis(model.logits(x), 0, -1), cache


@functools.partial(jax.jit, static_argnums=0)
def _hidden(shape, params, tokens, segments, positions):
    return with_params(shape, params).hidden(tokens, segments, positions)


def whole(shape, tokens):
    """Logits [B, T, V] without a cache."""
    return _whole(shape, params_for(shape), tokens)


def step(shape, tokens, cache):
    """Logits [B, T, V] behind tokens appended to a cache, and the cache."""
    return _step(shape, params_for(shape), tokens, cache)


def hidden(shape, tokens, segments=None, positions=None):
    """Hidden states [D, B, T] without a cache."""
    return _hidden(shape, params_for(shape), tokens, segments, positions)


@pytest.mark.parametrize("shape", [PLAIN, EVERYTHING], ids=["plain", "everything"])
@pytest.mark.parametrize("cuts", [(0, 1, 2, 3, 12), (0, 5, 11, 12)])
def test_steps_over_a_cache_equal_the_cacheless_model(shape, cuts):
    cache, parts = kv_cache.empty(shape, 2, 16, jnp.float32), []
    for first, last in itertools.pairwise(cuts):
        logits, cache = step(shape, tokens()[:, first:last], cache)
        parts.append(logits)
    together = jnp.concatenate(parts, 1)
    np.testing.assert_allclose(together, whole(shape, tokens()), atol=MODEL_TOLERANCE)
    np.testing.assert_array_equal(cache.length, [12, 12])


@pytest.mark.parametrize("shape", [PLAIN, EVERYTHING], ids=["plain", "everything"])
def test_a_scan_over_layers_equals_unrolled_layers(shape):
    stacked = stack_layers(params_for(shape))
    scanned = jax.jit(lambda params: with_params(shape, params, scan=True)(tokens()))(stacked)
    np.testing.assert_allclose(scanned, whole(shape, tokens()), atol=MODEL_TOLERANCE)


def test_stacking_layers_is_undone_exactly():
    params = params_for(EVERYTHING)
    back = unstack_layers(stack_layers(params))
    jax.tree.map(np.testing.assert_array_equal, back, params)
    assert jax.tree.structure(back) == jax.tree.structure(params)


def test_params_go_in_and_out_of_a_model_unchanged():
    params = params_for(EVERYTHING)
    jax.tree.map(np.testing.assert_array_equal, params_of(with_params(EVERYTHING, params)), params)


def test_rows_roll_back_and_go_on_alone():
    """Row 0 keeps two of five new tokens, row 1 all; both then continue as if never rolled back."""
    _, cache = step(EVERYTHING, tokens()[:, :5], kv_cache.empty(EVERYTHING, 2, 16, jnp.float32))
    following = jnp.stack([tokens()[0, 2:6], tokens()[1, 5:9]])
    logits, _ = step(EVERYTHING, following, cache.with_length(jnp.array([2, 5])))
    expected = whole(EVERYTHING, tokens())
    np.testing.assert_allclose(logits[0], expected[0, 2:6], atol=MODEL_TOLERANCE)
    np.testing.assert_allclose(logits[1], expected[1, 5:9], atol=MODEL_TOLERANCE)


def test_rollback_across_a_wrapped_window():
    """A window of 4 keys, 5 rejected tokens: the keys before them are still there."""
    _, cache = step(EVERYTHING, tokens()[:, :7], kv_cache.empty(EVERYTHING, 2, 16, jnp.float32))
    _, cache = step(EVERYTHING, jnp.zeros((2, 5), jnp.int32), cache)
    logits, _ = step(EVERYTHING, tokens()[:, 7:12], cache.with_length(jnp.array([7, 7])))
    np.testing.assert_allclose(logits, whole(EVERYTHING, tokens())[:, 7:12], atol=MODEL_TOLERANCE)


def test_packed_documents_do_not_see_each_other():
    segments = jnp.array([[1] * 5 + [2] * 7])
    positions = jnp.array([[*range(5), *range(7)]])
    packed = hidden(EVERYTHING, tokens()[:1], segments, positions)
    alone = hidden(EVERYTHING, tokens()[:1, 5:])
    np.testing.assert_allclose(packed[:, :, 5:], alone, atol=MODEL_TOLERANCE)
    changed = hidden(EVERYTHING, tokens()[:1].at[0, 2].set(0), segments, positions)
    np.testing.assert_array_equal(packed[:, :, 5:], changed[:, :, 5:])
    assert (packed[:, :, 2:5] != changed[:, :, 2:5]).any()


@pytest.mark.parametrize(("batch", "length"), [(1, 1), (1, 4), (2, 1)])
def test_compiled_steps_update_the_cache_in_place(batch, length):
    """No copy of a cache, and no turned weight: what XLA does to a step that is written carelessly."""
    capacity = 256

    def one_step(params, tokens, cache):
        model = with_params(PLAIN, params)
        x, cache = model.step(tokens, cache)
        return model.logits(x), cache

    cache = kv_cache.empty(PLAIN, batch, capacity, jnp.float32)
    compiled = (
        jax.jit(one_step, donate_argnums=2)
        .lower(params_for(PLAIN), jnp.zeros((batch, length), jnp.int32), cache)
        .compile()
    )
    text = compiled.as_text()
    assert not re.findall(rf"= f32\[[\d,]*{capacity},8\]\S* copy\(", text)
    # The output projection [D, N H] is 32 x 32, like nothing else here.
    made = re.findall(r"= f32\[32,32\]\S* ([\w-]+)\(", text)
    assert set(made) <= {"parameter", "bitcast"}


@pytest.mark.parametrize("tokens", [1, 255, 256, 257, 384, 385, 512, 513, 1000, 5000])
def test_buckets_hold_what_they_are_for_and_waste_at_most_a_third(tokens):
    bucket = kv_cache.capacity_for(tokens)
    assert bucket >= tokens
    assert bucket == kv_cache.SMALLEST_BUCKET or tokens > bucket * 2 / 3


def test_a_grown_cache_holds_the_same_tokens():
    _, small = step(PLAIN, tokens()[:, :5], kv_cache.empty(PLAIN, 2, 8, jnp.float32))
    logits, _ = step(PLAIN, tokens()[:, 5:10], kv_cache.grown(small, 16))
    np.testing.assert_allclose(logits, whole(PLAIN, tokens())[:, 5:10], atol=MODEL_TOLERANCE)


@pytest.mark.parametrize(
    ("batch", "length", "padded"),
    [
        *[(1, 1, 1), (1, 2, 4), (1, 4, 4), (1, 5, 8), (1, 8, 8), (1, 9, 9)],
        *[(2, 1, 2), (3, 1, 1), (4, 1, 1), (2, 3, 4)],
    ],
)
def test_few_columns_are_padded_to_what_products_take_at_a_time(batch, length, padded):
    assert padded_length(batch, length) == padded


def derivatives(function, *inputs):
    """The value, and the derivatives of a random weighing of it."""
    value, pull = jax.vjp(function, *inputs)
    return value, pull(jax.random.normal(jax.random.key(9), value.shape))


def test_many_queries_attend_as_few_do_and_learn_as_much():
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v = (
        jax.random.normal(key, size)
        for key, size in zip(keys, [(2, 3, 8, 24), (2, 3, 20, 8), (2, 3, 20, 8)], strict=False)
    )
    seen = jax.random.bernoulli(keys[3], 0.7, (2, 1, 20, 24)).at[:, :, 0].set(True)
    few, many = (
        derivatives(lambda q, k, v, mix=mix: mix(q, k, v, seen), q, k, v)
        for mix in (attention._mix_few, attention._mix_many)
    )
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=BLOCK_TOLERANCE), few, many)


def test_a_product_has_the_derivatives_of_its_formula():
    weight = jax.random.normal(jax.random.key(0), (5, 2, 6))
    x = jax.random.normal(jax.random.key(1), (6, 3, 4))
    ours, formula = (
        derivatives(function, weight, x)
        for function in (product, lambda w, x: jnp.einsum("cfd,dbt->cfbt", w, x))
    )
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=BLOCK_TOLERANCE), ours, formula)
