"""Rotary positions (Su et al. 2104.09864) in the half-split convention: pair i is (x[i], x[i + H/2])."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from drafters.shapes import Rope


def _base(rope: Rope, head_dim: int) -> np.ndarray:
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    return (1.0 / np.float32(rope.theta) ** exponents).astype(np.float32)


def _llama3(rope: Rope, head_dim: int) -> np.ndarray:
    """Long wavelengths divided by `factor`, short ones kept, a linear blend between (Llama 3.1)."""
    base = _base(rope, head_dim)
    turns = rope.original_context * base / (2 * math.pi)
    low, high = rope.low_frequency_factor, rope.high_frequency_factor
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return base * (kept + (1 - kept) / rope.factor)


def _yarn(rope: Rope, head_dim: int) -> np.ndarray:
    """Frequencies that turn less than `beta_slow` times are interpolated (Peng et al. 2309.00071, 3.2)."""

    def pair_that_turns(times: float) -> float:
        context = rope.original_context / (times * 2 * math.pi)
        return head_dim * math.log(context) / (2 * math.log(rope.theta))

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = max(high - low, 1e-3)
    ramp = np.clip((np.arange(head_dim // 2, dtype=np.float32) - low) / width, 0, 1)
    base = _base(rope, head_dim)
    return base / rope.factor * ramp + base * (1 - ramp)


_FREQUENCIES = {
    "default": _base,
    "linear": lambda rope, head_dim: _base(rope, head_dim) / rope.factor,
    "llama3": _llama3,
    "yarn": _yarn,
}


def frequencies(rope: Rope, head_dim: int) -> np.ndarray:
    """Angle per position of each pair, f32[H/2]."""
    return np.asarray(_FREQUENCIES[rope.kind](rope, head_dim), np.float32)


def magnitude(rope: Rope) -> float:
    """Factor on cosines and sines: yarn's attention temperature, else 1."""
    if rope.kind != "yarn":
        return 1.0
    return rope.attention_factor or 0.1 * math.log(rope.factor) + 1.0


def tables(rope: Rope, head_dim: int, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines, f32[H/2, B, T], of positions i32[B, T]."""
    angles = frequencies(rope, head_dim)[:, None, None] * positions.astype(jnp.float32)[None]
    scale = magnitude(rope)
    return jnp.cos(angles) * scale, jnp.sin(angles) * scale


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the pairs of x [..., H, B, T] by tables [H/2, B, T]; computed in fp32."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-3)
    lead = (1,) * (x.ndim - 3)
    cos, sin = cos.reshape(*lead, *cos.shape), sin.reshape(*lead, *sin.shape)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate(turned, axis=-3).astype(x.dtype)
