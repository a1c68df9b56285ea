"""The parts of a round, each timed alone in one compiled loop, and whole rounds.

Axes: B batch, T tokens scored, K drafts. Loops run on the device: the host's part is paid once per sample.
All times are medians of a few samples, programs compiled before the first.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from drafters import kv_cache
from drafters.kv_cache import KVCache
from serving import prefill, speculation
from serving.leader import alone
from serving.pair import Pair
from serving.sampling import SamplingParams, make_warp
from serving.speculation import Engine, Private, Requests, State, Weights

SAMPLES = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """What is timed: `batch` rows that are `context` tokens long and decoded as `params` say."""

    batch: int = 1
    context: int = 256
    params: SamplingParams = SamplingParams()  # noqa: RUF009 frozen


def score_ms(pair: Pair, setting: Setting, tokens: int, loops: int = 8) -> float:
    """Milliseconds of the target's pass over T = `tokens` new tokens per row."""
    engine, target = pair.engine, pair.weights.target
    _, state = _started(pair, setting, setting.context + max(tokens, kv_cache.SMALLEST_WRITE))
    cache, block = state.target, jnp.ones((setting.batch, tokens), jnp.int32)

    def sample() -> Any:
        nonlocal cache
        cache = _score_again(engine, target, cache, block, setting.context, loops)
        return cache.length

    return _median_ms(sample, loops)


def propose_ms(pair: Pair, setting: Setting, loops: int = 8) -> float:
    """Milliseconds of drafting K tokens per row, where the pair drafts; 0 without a drafter."""
    engine, params = pair.engine, pair.weights.drafter
    if not engine.k:
        return 0.0
    requests, state = _started(pair, setting, setting.context + engine.slack)
    private, length = state.private, state.progress.length

    def sample() -> Any:
        nonlocal private
        private = _propose_again(engine, params, requests, private, length, loops)
        return private.probs

    return _median_ms(sample, loops)


def round_ms(pair: Pair, setting: Setting, rounds: int = 8) -> float:
    """Milliseconds of one whole round, in calls of `rounds`."""
    engine = pair.engine
    played = (SAMPLES + 1) * rounds
    longest = setting.context + played * (engine.k + 1)
    requests, state = _started(pair, setting, longest + engine.slack)

    def sample() -> Any:
        nonlocal state
        state = speculation.run_rounds(engine, pair.weights, requests, state, jnp.int32(rounds))
        return state.progress.length

    return _median_ms(sample, rounds)


def _median_ms(sample: Callable[[], Any], loops: int) -> float:
    jax.block_until_ready(sample())  # compiles
    seconds = []
    for _ in range(SAMPLES):
        started = time.perf_counter()
        jax.block_until_ready(sample())
        seconds.append(time.perf_counter() - started)
    return 1e3 * float(np.median(seconds)) / loops


def _started(pair: Pair, setting: Setting, positions: int) -> tuple[Requests, State]:
    """Rows of made-up text that never end, with room for `positions`."""
    engine, params = pair.engine, setting.params
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, engine.num_tokens, (setting.batch, setting.context)).tolist()
    capacity = kv_cache.capacity_for(max(positions, prefill.padded_length(setting.context)))
    requests = Requests(
        warp=make_warp([params] * setting.batch, engine.num_tokens),
        penalties=None,
        seed=jnp.arange(setting.batch, dtype=jnp.uint32),
        limit=jnp.full((setting.batch,), capacity, jnp.int32),
        ignore_eos=jnp.ones((setting.batch,), bool),
    )
    return requests, prefill.start(engine, pair.weights, requests, prompts, capacity, room=capacity)


@functools.partial(jax.jit, static_argnames="engine", donate_argnames="cache")
def _score_again(
    engine: Engine, target: Any, cache: KVCache, block: Array, context: Array, loops: Array
) -> KVCache:
    length = jnp.full((block.shape[0],), context, jnp.int32)

    def again(_: Array, carry: tuple[KVCache, Array]) -> tuple[KVCache, Array]:
        cache, block = carry
        weights = Weights(target, None)
        scores, cache = speculation.score(engine, weights, block, cache.with_length(length))
        # Each pass needs all scores of the one before: nothing can be left out or moved.
        return cache, block + (jnp.max(scores) == jnp.inf)

    return jax.lax.fori_loop(0, loops, again, (cache, block))[0]


@functools.partial(jax.jit, static_argnames="engine", donate_argnames="private")
def _propose_again(
    engine: Engine, params: Any, requests: Requests, private: Private, length: Array, loops: Array
) -> Private:
    assert engine.drafter is not None
    drafter, nothing = engine.drafter, jnp.zeros_like(length)

    def work(shared: tuple, private: Private) -> tuple[Array, Private]:
        params, requests, length = shared

        def again(_: Array, carry: tuple[Private, Array]) -> tuple[Private, Array]:
            private, block = carry
            # Nothing is committed: the next drafts start where these did.
            state = drafter.commit(private.drafter, block, nothing)
            private = dataclasses.replace(private, drafter=state)
            proposal, private = speculation.draft(engine, params, requests, private, length)
            return private, jnp.pad(proposal.tokens, ((0, 0), (1, 0)))

        block = jnp.zeros((length.shape[0], engine.k + 1), jnp.int32)
        private, block = jax.lax.fori_loop(0, loops, again, (private, block))
        return block, private

    shared = (params, requests, length)
    if not engine.leader:
        return work(shared, private)[1]
    assert engine.placement is not None
    return alone(engine.placement.mesh, work, shared, private)[1]
