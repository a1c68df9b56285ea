"""How much drafter and target agree along a text: sum(min(p, q)) at each position, by teacher forcing.

Both models read the whole text at once, without caches and rounds, and go through the warp that serves it.
So these numbers are an estimate of acceptance that shares no counter with the real run.

Axes: D width, B rows, T positions, V vocabulary, N positions of one continuation, K drafts, C positions of
one chunk.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from drafters import kv_cache
from drafters.autoregressive import Autoregressive, DrafterParams
from drafters.lookup_first import LookupFirst, model_in
from drafters.ngram import Ngram, NgramState
from drafters.shapes import TransformerShape
from drafters.transformer import Params, with_params
from pipeline import rounds
from pipeline.core.errors import UserError
from pipeline.rounds import Outlook, Round
from serving import sampling
from serving.pair import Pair
from serving.sampling import SamplingParams, Warp, make_warp
from serving.speculation import Engine, Weights
from serving.verification import expand

CHUNK = 256  # positions whose distributions are held at once
_SCORES = 2**25  # attention scores of one layer that are held at once
END = -1  # stands for whichever end token it was

# The target's hidden states of texts that several drafters are compared on, by the tokens.
Memory = dict[bytes, Array]


class Text(NamedTuple):
    """A prompt and what follows it; a continuation may end with `END`."""

    prompt: tuple[int, ...]
    continuation: tuple[int, ...]

    @property
    def read(self) -> tuple[int, ...]:
        """What the models read: all but the last token, behind which nothing is asked."""
        return (*self.prompt, *self.continuation[:-1])


class Forced(NamedTuple):
    """Along one continuation, f64[N] each."""

    overlap: np.ndarray  # sum(min(p, q))
    ratio: np.ndarray  # min(1, p(x) / q(x)) of the token x that stands there


class Copied(NamedTuple):
    """What a lookup proposes from each position of one continuation."""

    drafts: np.ndarray  # i32[N, K]
    offered: np.ndarray  # i64[N], how many of them
    overlap: np.ndarray  # f64[N, K], q of draft i, sensible where those before it are the text


@functools.partial(jax.jit, static_argnames="shape")
def _hidden(shape: TransformerShape, params: Params, tokens: Array) -> Array:
    return with_params(shape, params).hidden(tokens)


def _read_by_target(pair: Pair, tokens: np.ndarray, memory: Memory) -> Array:
    """Hidden states [D, B, T] of tokens i32[B, T], kept in `memory`."""
    key = tokens.tobytes()
    if key not in memory:
        memory[key] = _hidden(pair.engine.shape, pair.weights.target, tokens)
    return memory[key]


def _at(x: Array, rows: Array, places: Array) -> Array:
    """[D, C] of hidden states [D, B, T]."""
    return x[:, rows, places]


def _target_probs(engine: Engine, params: Params, x: Array, warp: Warp) -> Array:
    """q, f32[C, V], of hidden states [D, C]."""
    return sampling.warp(with_params(engine.shape, params).logits(x).T, warp)


def _drafter_probs(engine: Engine, params: DrafterParams, x: Array, warp: Warp) -> Array:
    """p, f32[C, V], over the target's vocabulary, of the drafter's hidden states [D, C]."""
    logits = with_params(_model(engine).shape, params.weights).logits(x).T
    if params.ids is None:
        return sampling.warp(logits, warp)
    own = dataclasses.replace(warp, num_tokens=params.ids.shape[0])
    return expand(sampling.warp(logits, own), params.ids, engine.num_tokens)


def _of_tokens(probs: Array, tokens: Array, ends: tuple[int, ...]) -> Array:
    """f32[C]: the probability of each token, of all end tokens together for `END`."""
    together = jnp.sum(probs[:, jnp.asarray(ends, jnp.int32)], axis=1)
    one = jnp.take_along_axis(probs, jnp.maximum(tokens, 0)[:, None], axis=1)[:, 0]
    return jnp.where(tokens == END, together, one)


@functools.partial(jax.jit, static_argnames="engine")
def _compare(
    engine: Engine,
    weights: Weights,
    hidden: tuple[Array, Array],
    rows: Array,
    places: Array,
    tokens: Array,
    warp: Warp,
) -> tuple[Array, Array]:
    """Overlap and ratio, f32[C] each, behind positions (rows, places) that `tokens` i32[C] follow."""
    q = _target_probs(engine, weights.target, _at(hidden[0], rows, places), warp)
    p = _drafter_probs(engine, weights.drafter, _at(hidden[1], rows, places), warp)
    common = jnp.minimum(p, q)
    of_target = _of_tokens(q, tokens, engine.eos_ids)
    shared = _of_tokens(common, tokens, engine.eos_ids)
    ratio = shared / jnp.where(of_target > 0, of_target, 1)
    return jnp.sum(common, axis=1), ratio


@functools.partial(jax.jit, static_argnames="engine")
def _probabilities(
    engine: Engine, weights: Weights, x: Array, rows: Array, places: Array, ids: Array, warp: Warp
) -> Array:
    """f32[C, M]: q of tokens `ids` i32[C, M] behind positions (rows, places)."""
    q = _target_probs(engine, weights.target, _at(x, rows, places), warp)
    return jnp.take_along_axis(q, ids, axis=1)


def _model(engine: Engine) -> Autoregressive:
    """The language model in the drafter."""
    model = model_in(engine.drafter)
    assert model is not None
    return model


@functools.partial(jax.jit, static_argnames=("engine", "k"))
def _lookups(
    engine: Engine, params: Any, tokens: Array, lengths: Array, k: int
) -> tuple[Array, Array]:
    """Drafts i32[N, K] and counts i32[N] behind the first lengths i32[N] of tokens i32[S]."""
    rows = jnp.broadcast_to(tokens, (lengths.shape[0], tokens.shape[0]))
    state, drafter = NgramState(rows, lengths), engine.drafter
    if isinstance(drafter, LookupFirst):
        copies, _, count = drafter.copies(params.ids, state, k)
        return copies, count
    assert isinstance(drafter, Ngram)
    return drafter.copies(state, k)


# --------------------------------------------------------------------------------------------------
# Batches and chunks of few sizes
# --------------------------------------------------------------------------------------------------


class _Group(NamedTuple):
    """Texts that are read together, padded to one size."""

    texts: Sequence[Text]
    tokens: np.ndarray  # i32[B, T]


def _groups(pair: Pair, texts: Sequence[Text]) -> Iterator[_Group]:
    longest = max(len(text.read) for text in texts)
    length = min(kv_cache.capacity_for(longest), max(longest, pair.context))
    fit = max(1, _SCORES // (pair.engine.shape.num_heads * length**2))
    count = -(-len(texts) // fit)
    size = -(-len(texts) // count)
    for first in range(0, len(texts), size):
        some = texts[first : first + size]
        tokens = np.zeros((size, length), np.int32)
        for row, text in zip(tokens, some, strict=False):
            row[: len(text.read)] = text.read
        yield _Group(some, tokens)


def _places(texts: Sequence[Text]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(row, position before it, token) of every token of the continuations, i32 each."""
    sizes = [len(text.continuation) for text in texts]
    rows = np.repeat(np.arange(len(texts), dtype=np.int32), sizes)
    places = [np.arange(len(text.prompt) - 1, len(text.read)) for text in texts]
    tokens = [text.continuation for text in texts]
    return rows, np.concatenate(places).astype(np.int32), np.concatenate(tokens).astype(np.int32)


def _chunked(*columns: np.ndarray) -> Iterator[tuple[np.ndarray, ...]]:
    """Pieces of CHUNK entries, the last filled up with copies of entry 0."""
    total = len(columns[0])
    for first in range(0, total, CHUNK):
        index = np.arange(first, first + CHUNK)
        index = np.where(index < total, index, 0)
        yield tuple(column[index] for column in columns)


def _warp(pair: Pair, params: SamplingParams, job: Sequence[SamplingParams]) -> Warp:
    return make_warp([params] * CHUNK, pair.engine.num_tokens, job=job)


def _split(values: np.ndarray, texts: Sequence[Text]) -> list[np.ndarray]:
    ends = np.cumsum([len(text.continuation) for text in texts])
    return np.split(values[: ends[-1]], ends[:-1])


# --------------------------------------------------------------------------------------------------
# By kind of drafter
# --------------------------------------------------------------------------------------------------


def _forced(
    pair: Pair,
    texts: Sequence[Text],
    params: SamplingParams,
    job: Sequence[SamplingParams],
    memory: Memory,
) -> list[Forced]:
    """Both models along the texts; the drafter is a language model."""
    engine, weights, warp = pair.engine, pair.weights, _warp(pair, params, job)
    found: list[Forced] = []
    for group in _groups(pair, texts):
        hidden = (
            _read_by_target(pair, group.tokens, memory),
            _hidden(_model(engine).shape, weights.drafter.weights, group.tokens),
        )
        parts = [
            _compare(engine, weights, hidden, rows, places, tokens, warp)
            for rows, places, tokens in _chunked(*_places(group.texts))
        ]
        overlap, ratio = (np.concatenate(part).astype(float) for part in zip(*parts, strict=True))
        # Sums of many fp32 numbers come out a rounding above one.
        columns = (_split(np.clip(part, 0, 1), group.texts) for part in (overlap, ratio))
        found += [Forced(*pieces) for pieces in zip(*columns, strict=True)]
    return found


def _copied(
    pair: Pair,
    texts: Sequence[Text],
    params: SamplingParams,
    job: Sequence[SamplingParams],
    k: int,
    memory: Memory,
) -> list[Copied]:
    """A lookup along the texts."""
    engine, weights, warp = pair.engine, pair.weights, _warp(pair, params, job)
    found: list[Copied] = []
    for group in _groups(pair, texts):
        x = _read_by_target(pair, group.tokens, memory)
        looked = [_look_up(pair, group, row, text, k) for row, text in enumerate(group.texts)]
        # Position s + i is asked about draft i of the round that begins at s: K questions each.
        asked = np.concatenate([_turned(drafts) for drafts, _ in looked])
        rows, places, _ = _places(group.texts)
        parts = [
            _probabilities(engine, weights, x, row, place, ids, warp)
            for row, place, ids in _chunked(rows, places, asked)
        ]
        answers = _split(np.concatenate(parts).astype(float), group.texts)
        for (drafts, offered), answer in zip(looked, answers, strict=True):
            found.append(Copied(drafts, offered, _turned_back(answer)))
    return found


def _look_up(
    pair: Pair, group: _Group, row: int, text: Text, k: int
) -> tuple[np.ndarray, np.ndarray]:
    """Drafts i32[N, K] and how many there are, i64[N], from each position of a continuation."""
    count = len(text.continuation)
    room = kv_cache.capacity_for(count)
    lengths = len(text.prompt) + np.minimum(np.arange(room), count - 1)
    drafts, offered = _lookups(
        pair.engine, pair.weights.drafter, group.tokens[row], lengths.astype(np.int32), k
    )
    return np.asarray(drafts)[:count], np.asarray(offered, np.int64)[:count]


def _turned(table: np.ndarray) -> np.ndarray:
    """Entry [t, i] is [t - i, i] of the table [N, K]; 0 before the first row."""
    turned = np.zeros_like(table)
    for i in range(min(table.shape)):
        turned[i:, i] = table[: len(table) - i, i]
    return turned


def _turned_back(table: np.ndarray) -> np.ndarray:
    """The inverse of `_turned`; 0 behind the last row."""
    turned = np.zeros_like(table)
    for i in range(min(table.shape)):
        turned[: len(table) - i, i] = table[i:, i]
    return turned


def look(
    pair: Pair,
    texts: Sequence[Text],
    params: SamplingParams,
    *,
    job: Sequence[SamplingParams],
    rounds_of: Sequence[Sequence[Round]],
    seed: int,
) -> list[Outlook]:
    """What becomes of drafts at every position of answers; see `pipeline.rounds`.

    Args:
      pair: target and drafter; its K is the longest look ahead.
      texts: prompts and answers.
      params: their warp.
      job: all requests of the compiled programs (see `serving.sampling.make_warp`).
      rounds_of: recorded rounds of each answer, under the token rule; what they say of a position stands.
      seed: decides the positions that no round evaluated.
    """
    k, drafter = pair.engine.k, pair.engine.drafter
    if not model_in(drafter) and not isinstance(drafter, Ngram):
        raise UserError(f"{type(drafter).__name__}: smaller K are not known for this kind")
    copies: list[Outlook] = [_NO_COPIES] * len(texts)
    memory: Memory = {}
    if isinstance(drafter, Ngram | LookupFirst):
        copied = _copied(pair, texts, params, job, k, memory)
        ends = pair.engine.eos_ids
        copies = [_of_copies(*both, ends) for both in zip(texts, copied, strict=True)]
    if not model_in(drafter):
        return copies
    forced = _forced(pair, texts, params, job, memory)
    rngs = (np.random.default_rng([seed, index]) for index in range(len(texts)))
    return [_of_model(*one, k) for one in zip(forced, copies, rounds_of, rngs, strict=True)]


# Of a drafter that copies nothing; each field stands for as many positions as there are.
_NO_COPIES = Outlook(np.zeros(1, bool), np.zeros(1), np.zeros(1, np.int64), np.zeros(1, bool))


def _of_model(
    forced: Forced, copies: Outlook, played: Sequence[Round], rng: np.random.Generator, k: int
) -> Outlook:
    """What becomes of a model's drafts, and of the copies that come before them."""
    copied = np.broadcast_to(copies.copied, forced.ratio.shape)
    accepted = rounds.everywhere(rounds.marks(played, copied, forced.ratio, rng), k)
    overlap = rounds.everywhere(forced.overlap, k)
    return Outlook(
        np.where(copied[:, None], copies.accepted, accepted),
        np.where(copied[:, None], copies.overlap, overlap),
        np.where(copied, copies.offered, k),
        copied,
    )


def _of_copies(text: Text, copied: Copied, ends: tuple[int, ...]) -> Outlook:
    continuation = np.array(text.continuation)
    k = copied.drafts.shape[1]
    following = rounds.everywhere(continuation + 1, k) - 1  # END behind the text is undone below
    equal = (copied.drafts == following) | (np.isin(copied.drafts, ends) & (following == END))
    inside = np.arange(len(continuation))[:, None] + np.arange(k)[None] < len(continuation)
    there = inside & (np.arange(k)[None] < copied.offered[:, None])
    overlap = np.where(there, copied.overlap, 0.0)
    return Outlook(equal & there, overlap, copied.offered, copied.offered > 0)


def mean_overlap(
    pair: Pair,
    texts: Sequence[Text],
    params: SamplingParams,
    *,
    job: Sequence[SamplingParams],
    memory: Memory,
) -> float:
    """Mean overlap over all positions of the continuations; where nothing is proposed it is 0.

    Args:
      pair: target and drafter.
      texts: prompts and what follows them.
      params: their warp.
      job: as in `look`.
      memory: what the target has read for other drafters; is added to.
    """
    drafter, found = pair.engine.drafter, np.zeros(1)
    if model_in(drafter):
        forced = _forced(pair, texts, params, job, memory)
        found = np.concatenate([one.overlap for one in forced])
    if isinstance(drafter, Ngram | LookupFirst):
        copies = _copied(pair, texts, params, job, pair.engine.k, memory)
        offered, first = (
            np.concatenate(part)
            for part in zip(*((one.offered, one.overlap[:, 0]) for one in copies), strict=True)
        )
        found = np.where(offered > 0, first, found)
    return float(found.mean())
