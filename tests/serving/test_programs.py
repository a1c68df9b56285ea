"""What XLA makes of a round, as it is served: optimised, and without a copy of the cache."""

import re

import jax.numpy as jnp
import pytest

from serving import speculation
from tests.serving.pairs import SAMPLED, pair, random_prompts, start


def copies_of(text, shape):
    """Instructions of a compiled program that copy an array of this shape."""
    dims = ",".join(map(str, shape))
    return re.findall(rf"f32\[{dims}\]\S* copy\(", text)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 2])
def test_a_round_copies_no_cache(batch):
    served = pair("autoregressive", 3)
    requests, state = start(served, random_prompts((5,) * batch), [SAMPLED] * batch)
    program = speculation.run_rounds.lower(
        served.engine, served.weights, requests, state, jnp.int32(1)
    )
    text = program.compile().as_text()
    assert text is not None
    caches = [*state.target.k, *state.target.v, *state.private.drafter.cache.k]
    assert f"f32[{','.join(map(str, caches[0].shape))}]" in text
    for cache in caches:
        assert copies_of(text, cache.shape) == []


def test_a_copy_would_be_found():
    text = "  %copy.3 = f32[2,8,128,4]{3,2,1,0} copy(%param.1)"
    assert len(copies_of(text, (2, 8, 128, 4))) == 1
    assert copies_of(text, (1, 8, 128, 4)) == []
