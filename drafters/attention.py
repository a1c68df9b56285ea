"""Attention of grouped queries: over packed training rows, and over a cache with per-row lengths.

Axes: B batch, T query length, S cache capacity, G key/value heads, R query heads per group, H head size.
Both functions take queries [G, R, H, B, T] (scaled) and new keys and values [G, H, B, T], feature-major
like every activation, and return [G, R, H, B, T] with what the layer remembers.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from drafters import kv_cache

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


def _attend(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    """Softmax attention of q [G,R,H,B,T] over k, v [B,G,S,H]; scores and softmax in fp32.

    Keys are the left factor, k[S,H] @ q[H,RT]: the larger operand is read as it lies. The scores are
    then turned, a small copy, so that the softmax runs along contiguous memory.
    """
    groups, per_group, head, batch, length = q.shape
    columns = q.transpose(3, 0, 2, 1, 4).reshape(batch, groups, head, per_group * length)
    scores = jnp.einsum("bgsh,bghm->bgsm", k, columns, preferred_element_type=jnp.float32)
    scores = scores.swapaxes(2, 3).reshape(batch, groups, per_group, length, -1)
    scores = jnp.where(mask[:, None, None], scores, MASKED)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    weights = weights.reshape(batch, groups, per_group * length, -1)
    mixed = jnp.einsum("bgms,bgsh->bgmh", weights, v)
    mixed = mixed.reshape(batch, groups, per_group, length, head)
    return mixed.transpose(1, 2, 4, 0, 3)


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
