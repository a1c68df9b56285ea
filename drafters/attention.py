"""Attention of grouped queries: over packed training rows, and over a cache with per-row lengths.

Axes: B batch, T query length, S cache capacity, G key/value heads, R query heads per group, H head size.
Both functions take queries [G, R, H, B, T] (scaled) and new keys and values [G, H, B, T], feature-major
like every activation, and return [G, R, H, B, T] with what the layer remembers.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from drafters import kv_cache
from drafters.products import SAVED

Memory = tuple[jax.Array, jax.Array] | None
# Finite, so that a query that sees nothing (padding) averages instead of dividing zero by zero.
MASKED = -1e30


class View(NamedTuple):
    """What the queries of one layer see; the same for all layers of a kind.

    Attributes:
      cos, sin: rotary tables, f32[H/2, B, T].
      mask: bool[B, T, S], True where a query may attend; S = T without a cache.
      start: i32[B], position of each row's first query in the cache.
    """

    cos: jax.Array
    sin: jax.Array
    mask: jax.Array
    start: jax.Array


def visible(query_positions: jax.Array, key_positions: jax.Array, window: int) -> jax.Array:
    """Causal mask bool[B, T, S] of positions i32[B, T] and i32[B or 1, S]; window 0 sees everything."""
    distance = query_positions[:, :, None] - key_positions[:, None, :]
    seen = distance >= 0
    return seen & (distance < window) if window else seen


# Queries per key/value head from which on the softmax runs over the leading axis of the scores.
_MANY = 16


def _attend(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    """Softmax attention of q [G,R,H,B,T] over k, v [B,G,S,H]; scores and softmax in fp32.

    Keys are the left factor, k[S,H] @ q[H,RT]: the larger operand is read as it lies.
    """
    groups, per_group, head, batch, length = q.shape
    columns = q.transpose(3, 0, 2, 1, 4).reshape(batch, groups, head, per_group * length)
    seen = jnp.tile(mask.swapaxes(1, 2), (1, 1, per_group))[:, None]
    mix = _mix_many if per_group * length >= _MANY else _mix_few
    mixed = mix(columns, k, v, seen).reshape(batch, groups, head, per_group, length)
    return mixed.transpose(1, 3, 2, 0, 4)


def _scores(q: jax.Array, k: jax.Array, seen: jax.Array) -> jax.Array:
    """f32[B, G, S, M] of M = R T queries [B, G, H, M] over keys [B, G, S, H]; seen bool[B, 1, S, M]."""
    scores = jnp.einsum("bgsh,bghm->bgsm", k, q, preferred_element_type=jnp.float32)
    return jnp.where(seen, scores, MASKED)


def _mix_few(q: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array) -> jax.Array:
    """Values [B, G, H, M] that few queries see.

    The scores are turned, a small copy, so that the softmax runs along contiguous memory.
    """
    weights = jax.nn.softmax(_scores(q, k, seen).swapaxes(2, 3), axis=-1)
    mixed = jnp.einsum("bgms,bgsh->bgmh", weights.astype(v.dtype), v)
    # XLA would turn the product itself, and several rows then take ten times as long on a CPU.
    return jax.lax.optimization_barrier(mixed).swapaxes(2, 3)


@jax.custom_vjp
def _mix_many(q: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array) -> jax.Array:
    """Values [B, G, H, M] that many queries see: the softmax runs down the columns of the scores.

    The backward pass makes the weights from the scores and the logarithm of their sum (Dao et al.
    2205.14135): a training step of 128 tokens by 16 heads takes a fifth less time.
    """
    return _mix_and_keep(q, k, v, seen)[0]


def _mix_and_keep(
    q: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array
) -> tuple[jax.Array, tuple]:
    scores = _scores(q, k, seen)
    top = jnp.max(scores, axis=2, keepdims=True)
    weights = jnp.exp(scores - top)
    total = jnp.sum(weights, axis=2, keepdims=True)
    mixed = _weighed(v, weights) / total
    mixed = checkpoint_name(mixed.astype(v.dtype), SAVED)
    return mixed, (q, k, v, seen, mixed, checkpoint_name(top + jnp.log(total), SAVED))


def _weighed(x: jax.Array, weights: jax.Array) -> jax.Array:
    """Sums over positions f32[B, G, H, M] of x [B, G, S, H]."""
    weights = weights.astype(x.dtype)
    return jnp.einsum("bgsh,bgsm->bghm", x, weights, preferred_element_type=jnp.float32)


def _mix_derivatives(
    kept: tuple, change: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    q, k, v, seen, mixed, log_total = kept
    weights = jnp.exp(_scores(q, k, seen) - log_total)
    along = jnp.einsum("bgsh,bghm->bgsm", v, change, preferred_element_type=jnp.float32)
    mean = jnp.sum(change.astype(jnp.float32) * mixed, axis=2, keepdims=True)
    of_scores = (weights * (along - mean)).astype(q.dtype)
    of_k = jnp.einsum("bghm,bgsm->bgsh", q, of_scores)
    of_v = jnp.einsum("bghm,bgsm->bgsh", change, weights.astype(v.dtype))
    return _weighed(k, of_scores).astype(q.dtype), of_k, of_v, None


_mix_many.defvjp(_mix_and_keep, _mix_derivatives)


def attend_packed(
    q: jax.Array, k: jax.Array, v: jax.Array, view: View, memory: Memory
) -> tuple[jax.Array, Memory]:
    """Attends to the row itself; nothing is remembered."""
    k, v = k.transpose(2, 0, 3, 1), v.transpose(2, 0, 3, 1)
    return _attend(q, k, v, view.mask), memory


def attend_cached(
    q: jax.Array, k: jax.Array, v: jax.Array, view: View, memory: Memory
) -> tuple[jax.Array, Memory]:
    """Writes the new keys and values at each row's length, then attends to all the mask shows.

    Positions behind the mask's T are padding: neither written nor attended for, and zero in the result.
    """
    assert memory is not None
    length, padding = view.mask.shape[1], q.shape[-1] - view.mask.shape[1]
    q, k, v = (x[..., :length] for x in (q, k, v))
    keys = kv_cache.write(memory[0], k.transpose(2, 0, 3, 1), view.start)
    values = kv_cache.write(memory[1], v.transpose(2, 0, 3, 1), view.start)
    mixed = jnp.pad(_attend(q, keys, values, view.mask), [(0, 0)] * 4 + [(0, padding)])
    return mixed, (keys, values)
