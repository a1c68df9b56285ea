"""Products of weights and feature-major activations: few columns when decoding, many when training.

Axes: B batch, T length, k and n what goes in and comes out.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

# Named for the backward pass of a layer whose activations are computed again: products and what attention
# keeps are dear to make and cheap to hold.
SAVED = "product"


def product(weight: jax.Array, x: jax.Array) -> jax.Array:
    """weight [n..., k] @ x [k, B, T] -> [n..., B, T], in the dtype of x."""
    flat = _matrix_product(
        weight.reshape(-1, weight.shape[-1]).astype(x.dtype), x.reshape(x.shape[0], -1)
    )
    return checkpoint_name(flat, SAVED).reshape(*weight.shape[:-1], *x.shape[1:])


@jax.custom_vjp
def _matrix_product(weight: jax.Array, x: jax.Array) -> jax.Array:
    """weight [n, k] @ x [k, m].

    The derivatives are products that take every array as it lies. Those that JAX derives by itself have the
    columns first, and the copies into that order and back took a fifth of a training step.
    """
    return weight @ x


def _with_factors(weight: jax.Array, x: jax.Array) -> tuple[jax.Array, Any]:
    return weight @ x, (weight, x)


def _product_derivatives(factors: Any, change: jax.Array) -> tuple[jax.Array, jax.Array]:
    weight, x = factors
    return change @ x.T, weight.T @ change


_matrix_product.defvjp(_with_factors, _product_derivatives)


# CPU matrix products take four columns at a time and what is left over one by one, each time reading the
# weights again: 5 columns cost 1.5 times what 8 do (SmolLM2-135M, 2 AVX2 cores: 78 against 54 ms).
_COLUMNS_AT_A_TIME, _MOST_PADDED = 4, 8


def padded_length(batch: int, length: int) -> int:
    """The length T' >= T for which B T' columns are multiplied fastest; only few columns are padded."""
    for longer in range(length, _MOST_PADDED // batch + 1):
        if batch * longer % _COLUMNS_AT_A_TIME == 0:
            return longer if batch * length > 1 else length
    return length


def padded(x: jax.Array, size: int, axis: int = -1) -> jax.Array:
    """Zeros behind an axis, up to `size`."""
    missing = [(0, 0)] * x.ndim
    missing[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, missing)
