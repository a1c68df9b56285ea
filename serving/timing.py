"""The parts of a round, each timed alone in one compiled loop, and whole rounds.

Axes: B batch, T tokens scored, K drafts. Loops run on the device: the host's part is paid once per sample.
Rows begin every sample at the same length: what is timed does not depend on how often it was timed before.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from drafters import kv_cache
from drafters.autoregressive import AutoregressiveState
from drafters.kv_cache import KVCache
from drafters.lookup_first import LookupFirst
from drafters.ngram import Ngram, NgramState
from serving import prefill, speculation
from serving.leader import alone
from serving.passes import Part, Seated, repeated, zeros
from serving.sampling import SamplingParams, make_warp
from serving.speculation import Engine, Private, Requests, State, Weights

SAMPLES = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """What is timed: `batch` rows that are `context` tokens long and decoded as `params` say.

    `capacity` is that of the caches; 0 for the bucket that holds what is timed.
    """

    batch: int = 1
    context: int = 256
    params: SamplingParams = SamplingParams()  # noqa: RUF009 frozen
    capacity: int = 0

    def holding(self, positions: int) -> int:
        """The capacity for `positions` behind the context."""
        return self.capacity or kv_cache.capacity_for(self.context + positions)


class Served(Protocol):
    """What is needed of a pair, trained or not."""

    @property
    def engine(self) -> Engine:
        """Its static half."""
        ...

    @property
    def weights(self) -> Weights:
        """Its parameters."""
        ...


def score_ms(pair: Served, setting: Setting, tokens: int, loops: int = 8) -> float:
    """Milliseconds of the target's pass over T = `tokens` new tokens per row."""
    return median_ms(scoring(pair, setting, tokens), loops)


def propose_ms(pair: Served, setting: Setting, loops: int = 8) -> float:
    """Milliseconds of drafting K tokens per row, where the pair drafts; 0 without a drafter."""
    return median_ms(proposing(pair, setting), loops) if pair.engine.k else 0.0


def round_ms(pair: Served, setting: Setting, rounds: int = 8) -> float:
    """Milliseconds of one whole round, in calls of `rounds`."""
    positions = rounds * (pair.engine.k + 1) + pair.engine.slack
    setting = dataclasses.replace(setting, capacity=setting.holding(positions))
    return median_ms(playing(pair, setting), rounds)


def median_ms(part: Part, loops: int) -> float:
    """Milliseconds of one repetition, the median of a few samples."""
    sample_ms(part, loops)  # compiles
    return float(np.median([sample_ms(part, loops) for _ in range(SAMPLES)]))


def sample_ms(part: Part, loops: int) -> float:
    """Milliseconds of one repetition in a single call of `loops`."""
    started = time.perf_counter()
    jax.block_until_ready(part.run(loops))
    return 1e3 * (time.perf_counter() - started) / loops


# --------------------------------------------------------------------------------------------------
# Parts
# --------------------------------------------------------------------------------------------------


def scoring(pair: Served, setting: Setting, tokens: int) -> Part:
    """The target's pass over T = `tokens` new tokens per row."""
    engine = pair.engine
    target = Seated(shape=engine.shape, dtype=engine.dtype, placement=engine.placement)
    return target.passes(
        pair.weights.target,
        batch=setting.batch,
        tokens=tokens,
        context=setting.context,
        capacity=setting.holding(max(tokens, kv_cache.SMALLEST_WRITE)),
    )


def proposing(pair: Served, setting: Setting) -> Part:
    """Drafting K tokens per row behind the same text, where the pair drafts."""
    engine = _always_drafting(pair.engine)
    requests, state = started(engine, setting, setting.holding(engine.slack))
    shared = (pair.weights.drafter, requests, state.progress.length)
    return repeated(functools.partial(_propose_again, engine), shared, state.private)


def playing(pair: Served, setting: Setting) -> Part:
    """Whole rounds, each with drafts, as many in one call as the capacity has room for."""
    engine = _always_drafting(pair.engine)
    capacity = setting.holding(engine.slack)
    most = (capacity - setting.context - engine.slack) // (engine.k + 1)
    requests, state = started(engine, setting, capacity)
    work = functools.partial(_play_again, engine)
    return repeated(work, (pair.weights, requests), state, most)


def _always_drafting(engine: Engine) -> Engine:
    """With K drafts that are worked for: a lookup finds something, a model behind one is asked."""
    drafter = engine.drafter
    if isinstance(drafter, Ngram):
        drafter = dataclasses.replace(drafter, shortest=0)
    if isinstance(drafter, LookupFirst):
        drafter = drafter.model
    return dataclasses.replace(engine, drafter=drafter)


def _propose_again(
    engine: Engine, shared: tuple, private: Private, times: Array
) -> tuple[Array, Private]:
    assert engine.drafter is not None
    drafter = engine.drafter

    def work(shared: tuple, private: Private) -> tuple[Array, Private]:
        params, requests, length, times = shared
        nothing = jnp.zeros_like(length)

        def again(_: Array, carry: tuple[Private, Array]) -> tuple[Private, Array]:
            private, block = carry
            # Nothing is committed: the next drafts start where these did.
            state = drafter.commit(private.drafter, block, nothing)
            private = dataclasses.replace(private, drafter=state)
            proposal, private = speculation.draft(engine, params, requests, private, length)
            return private, jnp.pad(proposal.tokens, ((0, 0), (1, 0)))

        block = jnp.zeros((length.shape[0], engine.k + 1), jnp.int32)
        private, block = jax.lax.fori_loop(0, times, again, (private, block))
        return block, private

    shared = (*shared, times)
    if not engine.leader:
        return work(shared, private)
    assert engine.placement is not None
    return alone(engine.placement.mesh, work, shared, private)


def _play_again(
    engine: Engine, shared: tuple[Weights, Requests], state: State, times: Array
) -> tuple[Array, State]:
    """Rounds; the caches are handed back with the lengths they had, so that the next call plays the same."""
    weights, requests = shared

    def play(_: Array, state: State) -> State:
        return speculation.play_round(engine, weights, requests, state)

    played = jax.lax.fori_loop(0, times, play, state)
    return played.progress.length, _rewound(played, state)


def _rewound(played: State, before: State) -> State:
    def is_cache(node: Any) -> bool:
        return isinstance(node, KVCache)

    def rewind(new: Any, old: Any) -> Any:
        return new.with_length(old.length) if is_cache(new) else old

    return jax.tree.map(rewind, played, before, is_leaf=is_cache)


# --------------------------------------------------------------------------------------------------
# Rows to time
# --------------------------------------------------------------------------------------------------


def started(engine: Engine, setting: Setting, capacity: int) -> tuple[Requests, State]:
    """Rows of text that never end. No model takes the text in: its values change no time."""
    params = setting.params
    requests = Requests(
        warp=make_warp([params] * setting.batch, engine.num_tokens),
        penalties=None,
        seed=jnp.arange(setting.batch, dtype=jnp.uint32),
        limit=jnp.full((setting.batch,), capacity, jnp.int32),
        ignore_eos=jnp.ones((setting.batch,), bool),
    )
    return requests, _blank(engine, setting, requests, capacity)


def _blank(engine: Engine, setting: Setting, requests: Requests, capacity: int) -> State:
    """The state behind prompts of zeros, put together by the host: nothing is compiled for it."""
    described = prefill.described(engine, requests, setting.batch, capacity)
    state = jax.tree.map(zeros, described)
    return _at_length(state, setting.context)


def _at_length(state: State, length: int) -> State:
    def filled(counts: Array) -> Array:
        return jax.device_put(np.full(counts.shape, length, np.int32), counts.sharding)

    def behind(cache: KVCache) -> KVCache:
        return cache.with_length(filled(cache.length))

    progress = dataclasses.replace(state.progress, length=filled(state.progress.length))
    drafter = state.private.drafter
    if isinstance(drafter, AutoregressiveState):
        drafter = dataclasses.replace(
            drafter, cache=behind(drafter.cache), committed=filled(drafter.committed)
        )
    if isinstance(drafter, NgramState):
        drafter = dataclasses.replace(drafter, length=filled(drafter.length))
    return State(
        scored=dataclasses.replace(state.scored, progress=progress),
        target=behind(state.target),
        private=dataclasses.replace(state.private, drafter=drafter),
    )
