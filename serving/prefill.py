"""From prompts to the state that rounds are played on.

Axes: B batch, T chunk of the prompt, S cache capacity, V vocabulary, C tokens there is room for. Prompts are
taken in by chunks of few sizes, so that memory is bounded and few programs are compiled.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import SingleDeviceSharding

from drafters import kv_cache
from drafters.kv_cache import KVCache
from drafters.lookup_first import model_in
from drafters.transformer import with_params
from serving import penalties as penalising
from serving.leader import alone, for_each_chip
from serving.speculation import (
    Engine,
    Private,
    Progress,
    Requests,
    Scored,
    State,
    Weights,
    everywhere,
    gathered,
)

LARGEST_CHUNK = 512
SMALLEST_CHUNK = 16


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prefix:
    """Prompts taken in so far."""

    target: KVCache
    drafter: Any
    scores: Any  # f32[V, B], behind the last token of each prompt reached; None once handed over


# From this size on, reading the weights once more costs less than half as many positions of padding.
_WORTH_SPLITTING = 256


def chunk_sizes(length: int) -> list[int]:
    """Sizes that cover `length` positions: largest chunks, then powers of two, one or two, for the rest.

    >>> [chunk_sizes(length) for length in (20, 100, 165, 200, 1200)]
    [[32], [128], [128, 64], [256], [512, 512, 128, 64]]
    """
    whole, rest = divmod(length, LARGEST_CHUNK)
    return [LARGEST_CHUNK] * whole + (_last_chunks(rest) if rest else [])


def _last_chunks(length: int) -> list[int]:
    size = max(SMALLEST_CHUNK, 1 << (length - 1).bit_length())
    half = size // 2
    if size < _WORTH_SPLITTING or length - half > half // 2:
        return [size]
    return [half, max(SMALLEST_CHUNK, 1 << (length - half - 1).bit_length())]


def padded_length(length: int) -> int:
    """Positions that taking in a prompt of `length` tokens writes."""
    return sum(chunk_sizes(length))


@functools.partial(jax.jit, static_argnames=("engine", "batch", "capacity"))
def _nothing(engine: Engine, batch: int, capacity: int) -> Prefix:
    drafter = engine.drafter.start(batch, capacity) if engine.drafter and engine.k else None
    if engine.leader:
        assert engine.placement is not None
        drafter = for_each_chip(engine.placement.mesh, drafter)
    elif engine.drafter_placement is not None:
        drafter = _with_sharded_caches(engine, drafter)
    target = kv_cache.empty(engine.shape, batch, capacity, jnp.dtype(engine.dtype))
    if engine.placement is not None:
        shardings = engine.placement.cache_shardings(engine.shape)
        target = jax.lax.with_sharding_constraint(target, shardings)
    scores = jnp.zeros((engine.shape.logits_size, batch), jnp.float32)
    return Prefix(target, drafter, everywhere(engine, scores))


def _before(engine: Engine, batch: int, capacity: int) -> Prefix:
    """What precedes a prompt, lying where its chunks leave it: one program takes in all of a size."""
    prefix = _nothing(engine, batch, capacity)
    return prefix if engine.placement else jax.device_put(prefix, jax.devices()[0])


def _with_sharded_caches(engine: Engine, drafter: Any) -> Any:
    shardings = _cache_places(engine)

    def place(part: Any) -> Any:
        if not isinstance(part, KVCache):
            return part
        return jax.lax.with_sharding_constraint(part, shardings)

    return jax.tree.map(place, drafter, is_leaf=lambda part: isinstance(part, KVCache))


def _cache_places(engine: Engine) -> Any:
    model = model_in(engine.drafter)
    assert model is not None
    assert engine.drafter_placement is not None
    return engine.drafter_placement.cache_shardings(model.shape)


@functools.partial(jax.jit, static_argnames="engine", donate_argnames="prefix")
def _take_in(
    engine: Engine, weights: Weights, prefix: Prefix, tokens: Array, first: Array, lengths: Array
) -> Prefix:
    """Appends tokens i32[B, T] at positions first.. of prompts that are lengths i32[B] long."""
    model = with_params(engine.shape, weights.target)
    x, target = model.step(tokens, prefix.target.with_length(jnp.full_like(lengths, first)))
    last = lengths - 1 - first
    here = (last >= 0) & (last < tokens.shape[1])
    place = jnp.clip(last, 0, tokens.shape[1] - 1)
    x = jnp.take_along_axis(x, place[None, :, None], axis=2)[:, :, 0]
    scores = jnp.where(here[None], gathered(engine, model.logits(x)), prefix.scores)
    drafter = _drafter_takes_in(engine, weights, prefix.drafter, tokens, first, lengths)
    return Prefix(target, drafter, scores)


def _drafter_takes_in(
    engine: Engine, weights: Weights, state: Any, tokens: Array, first: Array, lengths: Array
) -> Any:
    if state is None:
        return None
    assert engine.drafter is not None

    def take(shared: tuple, state: Any) -> tuple[tuple, Any]:
        params, *prompt = shared
        return (), engine.drafter.prefill(params, state, *prompt)  # pyright: ignore

    shared = (weights.drafter, tokens, first, lengths)
    if not engine.leader:
        return take(shared, state)[1]
    assert engine.placement is not None
    return alone(engine.placement.mesh, take, shared, state)[1]


@functools.partial(jax.jit, static_argnames="engine", donate_argnames="prefix")
def _begin(
    engine: Engine,
    requests: Requests,
    prefix: Prefix,
    behind: Array,
    prompts: Array,
    lengths: Array,
) -> State:
    """The state after the prompts i32[B, C]: an empty block, the scores behind which are known."""
    batch, room = prompts.shape
    zeros = jnp.zeros((batch,), jnp.int32)
    never = jnp.zeros((batch,), bool)
    progress = Progress(
        tokens=prompts,
        length=lengths,
        done=never,
        failed=never,
        rounds=zeros,
        drafted=jnp.zeros((batch, room), jnp.int32),
        accepted=jnp.zeros((batch, room), jnp.int32),
    )
    scores = jnp.zeros((behind.shape[0], batch, engine.k + 1), jnp.float32)
    scored = Scored(
        progress=progress,
        drafts=jnp.zeros((batch, engine.k), jnp.int32),
        num_drafted=zeros,
        scores=scores.at[:, :, 0].set(behind),
    )
    return State(
        scored=scored,
        target=prefix.target.with_length(lengths),
        private=_private(engine, requests, prefix.drafter, prompts, lengths),
    )


def _private(
    engine: Engine, requests: Requests, drafter: Any, prompts: Array, lengths: Array
) -> Private:
    width = engine.proposed_vocab if engine.k else 0
    probs = jnp.zeros((prompts.shape[0], engine.k, width), jnp.float32)
    history = None
    if requests.penalties is not None and requests.penalties.use_history:
        history = penalising.start_history(prompts, lengths, engine.num_tokens)
    own = Private(probs=probs, drafter=None, history=history)
    if engine.leader:
        assert engine.placement is not None
        own = for_each_chip(engine.placement.mesh, own)
    return dataclasses.replace(own, drafter=drafter)


def start(
    engine: Engine,
    weights: Weights,
    requests: Requests,
    prompts: Sequence[Sequence[int]],
    capacity: int,
    room: int,
) -> State:
    """Takes in the prompts, token ids, none empty.

    Args:
      engine, weights, requests: the pair and what is asked of it.
      prompts: B of them, of any lengths.
      capacity: S of the caches; at least the padded length of the longest prompt and `engine.slack`.
      room: C, tokens a row may come to hold, prompt included.
    """
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    sizes = chunk_sizes(int(lengths.max()))
    tokens = np.zeros((len(prompts), max(room, sum(sizes))), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    prefix, first = _before(engine, len(prompts), capacity), 0
    for size in sizes:
        chunk = tokens[:, first : first + size]
        prefix = _take_in(engine, weights, prefix, chunk, np.int32(first), lengths)
        first += size
    behind, prefix = prefix.scores, dataclasses.replace(prefix, scores=None)
    return _begin(engine, requests, prefix, behind, tokens[:, :room], lengths)


def taking_in(
    engine: Engine, weights: Weights, batch: int, capacity: int, size: int
) -> jax.stages.Lowered:
    """The program by which `start` takes in chunks of `size` tokens, traced."""
    prefix, lengths = _before(engine, batch, capacity), np.ones(batch, np.int32)
    chunk = np.zeros((batch, size), np.int32)
    return _take_in.lower(engine, weights, prefix, chunk, np.int32(0), lengths)


def described(
    engine: Engine, requests: Requests, batch: int, capacity: int, room: int = 0
) -> State:
    """ShapeDtypeStructs in the places of the arrays that `start` returns, lying where they lie.

    A `room` for tokens of 0 is the capacity.
    """

    def unread() -> State:
        prefix = _nothing(engine, batch, capacity)
        behind, prefix = prefix.scores, dataclasses.replace(prefix, scores=None)
        prompts = jnp.zeros((batch, room or capacity), jnp.int32)
        return _begin(engine, requests, prefix, behind, prompts, prompts[:, 0])

    shapes = jax.eval_shape(unread)
    return jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        shapes,
        places(engine, shapes),
    )


def places(engine: Engine, state: State) -> State:
    """A sharding in the place of every array of `state`, as `start` lays them."""
    if engine.placement is None:
        here = SingleDeviceSharding(jax.devices()[0])
        return jax.tree.map(lambda _: here, state)
    everyone = engine.placement.sharding()
    each = engine.placement.sharding(engine.placement.mesh.axis_names)
    # XLA lays what is empty everywhere.
    private = jax.tree.map(
        lambda leaf: each if engine.leader and leaf.size else everyone, state.private
    )
    if engine.drafter_placement is not None and not engine.leader:
        caches = _cache_places(engine)
        drafter = jax.tree.map(
            lambda part: caches if isinstance(part, KVCache) else part,
            private.drafter,
            is_leaf=lambda part: isinstance(part, KVCache),
        )
        private = dataclasses.replace(private, drafter=drafter)
    return State(
        scored=jax.tree.map(lambda _: everyone, state.scored),
        target=engine.placement.cache_shardings(engine.shape),
        private=private,
    )


@functools.partial(jax.jit, static_argnames=("engine", "capacity"))
def grown(engine: Engine, state: State, capacity: int) -> State:
    """The same state with caches of another bucket."""
    drafter = state.private.drafter
    if drafter is not None:
        assert engine.drafter is not None
        grow = functools.partial(engine.drafter.grown, capacity=capacity)
        drafter = jax.vmap(grow)(drafter) if engine.leader else grow(drafter)
    return dataclasses.replace(
        state,
        target=kv_cache.grown(state.target, capacity),
        private=dataclasses.replace(state.private, drafter=drafter),
    )
