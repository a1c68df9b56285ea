"""From logits to tokens: what a request asks for, the distributions it implies and draws from them.

Every distribution that is sampled from or compared, the target's q and the drafter's p alike, is
made by `penalise` (where a request uses penalties) followed by `warp`. Rows of a batch are
independent: a row's result does not depend on the other rows, nor on which settings they use.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from pipeline.core.errors import UserError

# --------------------------------------------------------------------------------------------------
# Requests
# --------------------------------------------------------------------------------------------------


def _is_int(value: Any, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _is_number(value: Any, low: float, high: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high


def _is_tuple_of(value: Any, check: Callable[[Any], bool]) -> bool:
    return isinstance(value, tuple) and all(check(item) for item in value)


def _is_token(value: Any) -> bool:
    return _is_int(value, 0, 2**31 - 1)


def _is_bias(value: Any) -> bool:
    return (
        isinstance(value, tuple)
        and len(value) == 2
        and _is_token(value[0])
        and _is_number(value[1], -100, 100)
    )


# Field -> (what is allowed, in words; the check).
_ALLOWED: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "temperature": (
        "0 (greedy) or a number in [1e-6, 1e6]",
        lambda v: _is_number(v, 0, 0) or _is_number(v, 1e-6, 1e6),
    ),
    "top_k": ("an integer in [0, 2147483647], 0 for off", lambda v: _is_int(v, 0, 2**31 - 1)),
    "top_p": ("a number in (0, 1], 1 for off", lambda v: _is_number(v, 0, 1) and v > 0),
    "min_p": ("a number in [0, 1], 0 for off", lambda v: _is_number(v, 0, 1)),
    "seed": ("an integer in [0, 4294967295]", lambda v: _is_int(v, 0, 2**32 - 1)),
    "max_tokens": ("an integer of at least 1", lambda v: _is_int(v, 1, 2**31 - 1)),
    "stop": (
        "a string or several, none of them empty",
        lambda v: _is_tuple_of(v, lambda s: isinstance(s, str) and s != ""),
    ),
    "ignore_eos": ("true or false", lambda v: isinstance(v, bool)),
    "repetition_penalty": (
        "a number in [0.01, 100], 1 for off",
        lambda v: _is_number(v, 0.01, 100),
    ),
    "presence_penalty": ("a number in [-2, 2], 0 for off", lambda v: _is_number(v, -2, 2)),
    "frequency_penalty": ("a number in [-2, 2], 0 for off", lambda v: _is_number(v, -2, 2)),
    "logit_bias": (
        "pairs of a token id and a number in [-100, 100], each id once",
        lambda v: _is_tuple_of(v, _is_bias) and len({token for token, _ in v}) == len(v),
    ),
    "banned_tokens": ("token ids, integers of at least 0", lambda v: _is_tuple_of(v, _is_token)),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is decoded. Raises ValueError naming field, value and allowed range.

    `seed` and the request alone decide the tokens, whatever else is in the batch. `stop` strings
    end the text and are not part of it. `ignore_eos` decodes past the end token. Penalties follow
    the engines people know: `repetition_penalty` as in transformers (prompt and generated tokens;
    positive logits are divided by it, negative ones multiplied), `presence_penalty` and
    `frequency_penalty` as in the OpenAI API and vLLM (generated tokens only; subtracted once, and
    once per occurrence). `logit_bias` is added to the raw logits; `banned_tokens` never occur.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    max_tokens: int = 128
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    banned_tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, (allowed, is_allowed) in _ALLOWED.items():
            value = getattr(self, name)
            if not is_allowed(value):
                raise ValueError(f"{name}={value!r}: must be {allowed}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @classmethod
    def from_json(cls, overrides: Mapping[str, Any], defaults: SamplingParams) -> SamplingParams:
        """Applies the sampling fields of one input line to `defaults`.

        JSON spells `stop` as a string or a list, `logit_bias` as an object from token id to number.
        Raises UserError for a field that is not one of ours (it could not be honoured) and for a
        value out of range.
        """
        for name in overrides:
            if name not in _ALLOWED:
                known = ", ".join(sorted(_ALLOWED))
                raise UserError(
                    f"sampling field {name!r} is not supported: remove it; supported are {known}"
                )
        try:
            return dataclasses.replace(
                defaults, **{name: _from_json(name, value) for name, value in overrides.items()}
            )
        except ValueError as error:
            raise UserError(str(error)) from None


def _from_json(name: str, value: Any) -> Any:
    """A field as the dataclass holds it; what does not fit is left for validation to name."""
    if isinstance(value, list):
        return tuple(value)
    if name == "stop" and isinstance(value, str):
        return (value,)
    if name == "logit_bias" and isinstance(value, dict):
        return tuple((int(k) if k.isdecimal() else k, v) for k, v in value.items())
    return value


def column(
    requests: Sequence[SamplingParams],
    job: Sequence[SamplingParams],
    name: str,
    off: Any,
    dtype: Any,
) -> Array | None:
    """[B]: each row's setting `name`; None if no request of `job` departs from `off`."""
    if all(getattr(request, name) == off for request in job):
        return None
    return jnp.asarray(np.array([getattr(request, name) for request in requests], dtype))


# --------------------------------------------------------------------------------------------------
# Warping
# --------------------------------------------------------------------------------------------------

# Vocabularies of at least `_WIDE` tokens have thresholds looked for among the largest logits first.
_WIDE = 8192
_CANDIDATES = 256

# The bits of +inf in fp32. Bits of non-negative floats are ordered as the floats are.
_INFINITY_BITS = 0x7F800000

Mass = Callable[[Array], Array]  # the weight of tokens at these gaps below the row's largest logit


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Warp:
    """Warping of the rows of a batch. A field that no row uses is None and costs nothing."""

    temperature: Array | None  # f32[B], 1 in greedy rows; None: every row is greedy
    greedy: Array | None  # bool[B]; None: no row is greedy
    top_k: Array | None  # i32[B], 0 for off
    top_p: Array | None  # f32[B], 1 for off
    min_p: Array | None  # f32[B], 0 for off
    num_tokens: int = dataclasses.field(metadata={"static": True})  # of the tokenizer


def make_warp(
    requests: Sequence[SamplingParams],
    num_tokens: int,
    *,
    job: Sequence[SamplingParams] | None = None,
) -> Warp:
    """The warping of a batch whose row b serves `requests[b]`.

    `num_tokens` is the tokenizer's size: columns of the logits beyond it are padding. Which fields
    are None is part of the compiled program, so pass as `job` every request that program will serve
    and it is compiled once; a row comes out the same whether the fields it does not use are present
    or None.
    """
    job = requests if job is None else job
    temperatures = [1.0 if request.greedy else request.temperature for request in requests]
    return Warp(
        temperature=None
        if all(request.greedy for request in job)
        else jnp.asarray(temperatures, jnp.float32),
        greedy=column(requests, job, "greedy", False, np.bool_),
        top_k=column(requests, job, "top_k", 0, np.int32),
        top_p=column(requests, job, "top_p", 1.0, np.float32),
        min_p=column(requests, job, "min_p", 0.0, np.float32),
        num_tokens=num_tokens,
    )


def finite_rows(logits: Array) -> Array:
    """bool[...] for logits [..., V]: False where a row holds NaN or +inf, or only -inf."""
    # Not isfinite(max): on CPU, max over a long row loses NaN.
    return jnp.all(logits < jnp.inf, axis=-1) & jnp.any(logits > -jnp.inf, axis=-1)


def warp(logits: Array, params: Warp) -> Array:
    """The distribution of each row: f32[B, ..., V'] of logits [B, ..., V], V' = min(V, num_tokens).

    Order as in transformers: temperature, top-k, top-p, min-p; greedy rows are one-hot at the first
    largest logit. What happens at a threshold:
      * top-k keeps every token whose logit is at least the k-th largest, so ties may make it more
        than k (as transformers does);
      * top-p keeps a token if the tokens strictly likelier than it hold less than top_p of the mass
        that top-k left. That is the smallest set of the likeliest tokens with mass >= top_p,
        together with all tokens that tie with its last one (a sort would keep an arbitrary one of
        them);
      * min-p keeps tokens with at least min_p times the largest probability.
    Rows that `finite_rows` turns down come out as NaN: nothing raises, and draws from them are
    valid ids.

    No sort: a filter is a threshold, found among the largest few hundred logits where it lies
    there, else by bisection over the bits of an fp32 number, which is as exact.
    """
    rows = logits[..., : params.num_tokens].astype(jnp.float32)  # once, before temperature
    lead, width = rows.shape[:-1], rows.shape[-1]
    rows = rows.reshape(-1, width)  # [B*..., V']
    if params.temperature is None:
        return _one_hot_argmax(rows).reshape(*lead, width)
    probs = _sampled(rows, params, lead)
    if params.greedy is not None:
        probs = jnp.where(_per_row(params.greedy, lead), _one_hot_argmax(rows), probs)
    return probs.reshape(*lead, width)


def _per_row(setting: Array, lead: tuple[int, ...]) -> Array:
    """[B] -> [B*..., 1], one entry per row of the flattened logits."""
    spread = setting.reshape(setting.shape + (1,) * (len(lead) - 1))
    return jnp.broadcast_to(spread, lead).reshape(-1, 1)


def _one_hot_argmax(rows: Array) -> Array:
    return jax.nn.one_hot(jnp.argmax(rows, axis=-1), rows.shape[-1], dtype=jnp.float32)


def _sampled(rows: Array, params: Warp, lead: tuple[int, ...]) -> Array:
    """f32[rows, V]: temperature, and filters as thresholds on the gap to the largest logit."""
    assert params.temperature is not None
    temperature = _per_row(params.temperature, lead)
    top = jnp.max(rows, axis=-1, keepdims=True)
    gap = top - rows  # >= 0; subtracting before dividing keeps tiny temperatures finite

    nearest = None  # [rows, M] ascending: the smallest gaps
    if rows.shape[-1] >= _WIDE and not (params.top_k is None and params.top_p is None):
        nearest = top - lax.top_k(rows, _CANDIDATES)[0]

    mass = _boltzmann(temperature)
    if params.top_k is not None:
        k = _per_row(params.top_k, lead)
        limit = _limit(gap, nearest, jnp.ones_like, k.astype(jnp.float32), active=k > 0)
        mass = _within(limit, mass)
    if params.top_p is not None:
        top_p = _per_row(params.top_p, lead)
        target = top_p * jnp.sum(mass(gap), axis=-1, keepdims=True)
        limit = _limit(gap, nearest, mass, target, active=top_p < 1)
        mass = _within(limit, mass)
    weights = mass(gap)
    if params.min_p is not None:
        weights = jnp.where(weights < _per_row(params.min_p, lead), 0.0, weights)
    return weights / jnp.sum(weights, axis=-1, keepdims=True)


def _boltzmann(temperature: Array) -> Mass:
    return lambda gap: jnp.exp(-gap / temperature)


def _within(limit: Array, mass: Mass) -> Mass:
    return lambda gap: jnp.where(gap <= limit, mass(gap), 0.0)


def _limit(
    gap: Array,
    nearest: Array | None,
    mass: Mass,
    target: Array,
    *,
    active: Array,
) -> Array:
    """f32[rows, 1]: the largest limit with mass < `target` strictly below it; inf if inactive.

    Keeping `gap <= limit` keeps the smallest set of nearest tokens whose mass reaches `target`, and
    their ties.
    """
    if nearest is None:
        return jnp.where(active, _bisect(gap, mass(gap), target), jnp.inf)
    reached = jnp.cumsum(mass(nearest), axis=-1)  # [rows, M]
    before = jnp.pad(reached[:, :-1], ((0, 0), (1, 0)))
    last = jnp.sum(before < target, axis=-1, keepdims=True) - 1
    found = jnp.take_along_axis(nearest, jnp.maximum(last, 0), axis=-1)
    known = ~active | (reached[:, -1:] >= target)
    # Chosen row by row, so that a row that needs the bisection does not change the others.
    bisected = lax.cond(jnp.all(known), lambda: found, lambda: _bisect(gap, mass(gap), target))
    return jnp.where(active, jnp.where(known, found, bisected), jnp.inf)


def _bisect(gap: Array, weights: Array, target: Array) -> Array:
    """`_limit` of every row: 31 halvings of the range of bits of a non-negative fp32 number."""
    # The first bound always satisfies the condition, the second never has to.
    bounds = (
        jnp.zeros_like(target, jnp.int32),
        jnp.full_like(target, _INFINITY_BITS + 1, jnp.int32),
    )

    def halve(_: int, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = low + (high - low) // 2
        below = gap < lax.bitcast_convert_type(middle, jnp.float32)
        light = jnp.sum(jnp.where(below, weights, 0.0), axis=-1, keepdims=True) < target
        return jnp.where(light, middle, low), jnp.where(light, high, middle)

    low, _ = lax.fori_loop(0, 31, halve, bounds)
    return lax.bitcast_convert_type(low, jnp.float32)


# --------------------------------------------------------------------------------------------------
# Draws
# --------------------------------------------------------------------------------------------------


class Purpose(enum.IntEnum):
    """What a key's noise is for; keys of different purposes are independent."""

    DRAFT = 0
    VERIFY = 1


def request_key(seed: Array, round_start: Array, offset: Array | int, purpose: Purpose) -> Array:
    """Key[...], one per request: a function of its seed, its round and the noise's purpose alone.

    `seed` u32[...], `round_start` i32[...] (committed tokens, prompt included, when the round
    starts) and `offset` (place in the block) broadcast together, so one call makes all keys of a
    round. Every round commits at least one token, so no key is ever used in two rounds. A key of
    the absolute position alone would be: block verification decides by a rejected draft's noise,
    and reusing it for the next round's draft at the same position biases the output
    (tests/serving/test_verification.py shows it).
    """
    shape = jnp.broadcast_shapes(jnp.shape(seed), jnp.shape(round_start), jnp.shape(offset))

    def key(seed: Array, round_start: Array, offset: Array) -> Array:
        start = jax.random.fold_in(jax.random.key(seed), round_start)
        return jax.random.fold_in(start, offset * len(Purpose) + int(purpose))

    flat = (jnp.broadcast_to(part, shape).ravel() for part in (seed, round_start, offset))
    return jax.vmap(key)(*flat).reshape(shape)


def draw(keys: Array, weights: Array) -> Array:
    """i32[B]: token x of row b with probability weights[b, x] / sum(weights[b]).

    `keys` Key[B], `weights` f32[B, V]. Weights need not be normalised; a token of weight 0 is never
    drawn, whatever the rounding.
    """
    return draw_at(jax.vmap(lambda key: jax.random.uniform(key, (2,)))(keys), weights)


_BLOCK = 128  # tokens


def draw_at(uniforms: Array, weights: Array) -> Array:
    """`draw` at given uniforms f32[B, 2] in [0, 1): inverts the distribution function in two steps.

    The first uniform picks a block of 128 tokens by its mass, the second a token in it. That reads
    the weights once (Gumbel noise would take V random numbers, one cumulative sum over V many
    passes), sums at most a few hundred numbers in a row, so that rounding stays near 1e-7, and
    leaves 23 random bits for each step: a single fp32 uniform resolves 1e-7, more than the
    probability of most tokens of a large vocabulary.
    """
    batch, width = weights.shape
    size = min(_BLOCK, width)
    blocks = -(-width // size)
    padded = jnp.pad(weights, ((0, 0), (0, blocks * size - width))).reshape(batch, blocks, size)
    block = _invert(uniforms[:, :1], jnp.sum(padded, axis=-1))
    chosen = jnp.take_along_axis(padded, block[:, None, None], axis=1)[:, 0]  # [B, size]
    return block * size + _invert(uniforms[:, 1:], chosen)


def _invert(uniform: Array, weights: Array) -> Array:
    """i32[B]: the first index whose cumulative weight exceeds uniform (f32[B, 1]) of the whole."""
    reached = jnp.cumsum(weights, axis=-1)
    # Cumulative sums come from trees of additions and need not be monotone, so weight 0 is ruled
    # out by itself: the first positive weight beyond the mark scores 2, other positive weights 1.
    beyond = reached > uniform * reached[:, -1:]
    score = jnp.where(weights > 0, 1 + beyond.astype(jnp.int32), 0)
    return jnp.argmax(score, axis=-1).astype(jnp.int32)
