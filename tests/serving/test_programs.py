"""What XLA makes of a round, as it is served: optimised, and without a copy of the cache."""

import contextlib
import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest

from serving import speculation
from serving.decode import prepare
from tests.serving.pairs import (
    JOB,
    SAMPLED,
    ask_all,
    on_mesh,
    pair,
    random_prompts,
    serve,
    start,
)


def copies_of(text, shape):
    """Instructions of a compiled program that copy an array of this shape."""
    dims = ",".join(map(str, shape))
    return re.findall(rf"f32\[{dims}\]\S* copy\(", text)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 2])
def test_a_round_copies_no_cache(batch):
    served = pair("autoregressive", 3)
    requests, state = start(served, random_prompts((5,) * batch), [SAMPLED] * batch)
    program = speculation.run_rounds.lower(
        served.engine, served.weights, requests, state, jnp.int32(1)
    )
    text = program.compile().as_text()
    assert text is not None
    caches = [*state.target.k, *state.target.v, *state.private.drafter.cache.k]
    assert f"f32[{','.join(map(str, caches[0].shape))}]" in text
    for cache in caches:
        assert copies_of(text, cache.shape) == []


def test_a_copy_would_be_found():
    text = "  %copy.3 = f32[2,8,128,4]{3,2,1,0} copy(%param.1)"
    assert len(copies_of(text, (2, 8, 128, 4))) == 1
    assert copies_of(text, (1, 8, 128, 4)) == []


@contextlib.contextmanager
def compilations():
    """The names of the functions that are compiled meanwhile."""
    names = []

    def listen(event, seconds, **about):
        if event == "/jax/core/compile/backend_compile_duration":
            names.append(about["fun_name"])

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield names
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@pytest.fixture
def quick_compilation():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def here(served):
    """The same pair with weights that have their place, as those that are read from a file have."""
    return dataclasses.replace(served, weights=jax.device_put(served.weights, jax.devices()[0]))


@pytest.mark.parametrize(
    "served",
    [
        pytest.param(lambda: here(pair("autoregressive", 2)), id="one device"),
        pytest.param(
            lambda: on_mesh(pair("autoregressive", 2), leader=True),
            id="led",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            lambda: on_mesh(pair("autoregressive", 2), chips_per_copy=4),
            id="copies",
            marks=pytest.mark.slow,
        ),
        pytest.param(lambda: on_mesh(pair(), leader=True), id="plain"),
    ],
)
def test_what_was_prepared_is_not_compiled_again(served, quick_compilation):
    """A prompt of two sizes of chunks, so that the caches of the second come from the first."""
    served, prompts = served(), ask_all(random_prompts((280,)), SAMPLED)
    with compilations() as first:
        prepare([(served, prompts)], JOB)
    assert {"jit(run_rounds)", "jit(_take_in)"} <= set(first)
    with compilations() as later:
        (answer,) = serve(served, prompts)
    assert answer.tokens
    assert {"jit(run_rounds)", "jit(_take_in)"}.isdisjoint(later)
