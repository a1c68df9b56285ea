"""Random parameters without compiling a generator for every shape."""

import jax
import numpy as np

from drafters.transformer import abstract_params


def random_params(shape, seed):
    """fp32 parameters of a model: normal, scaled by the square root of the last axis."""
    rng = np.random.default_rng(seed)

    def draw(leaf):
        return rng.normal(size=leaf.shape).astype(np.float32) * leaf.shape[-1] ** -0.5

    return jax.tree.map(draw, abstract_params(shape))
