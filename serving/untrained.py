"""Pairs of models that were never trained: as fast and as large as trained ones, and nothing to read."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import numpy as np

from drafters.autoregressive import Autoregressive, DrafterParams
from drafters.mesh import Topology
from drafters.ngram import Ngram
from drafters.shapes import TransformerShape
from drafters.transformer import Params
from serving.passes import Seated
from serving.plan import Choice
from serving.speculation import Engine, Weights


class Untrained(NamedTuple):
    """What `serving.timing` needs of a pair."""

    engine: Engine
    weights: Weights


def seated(topology: Topology, shape: TransformerShape, chips_per_copy: int = 0) -> Seated:
    """A model sharded over that many chips per copy, 0 for all, in the dtype that is served."""
    dtype = topology.serving_dtype
    if topology.num_chips == 1:
        return Seated(shape=shape, dtype=dtype)
    placement = topology.placement(chips_per_copy)
    return Seated(shape=placement.served_shape(shape), dtype=dtype, placement=placement)


def random_pair(
    topology: Topology,
    target: TransformerShape,
    drafter: TransformerShape | None,
    choice: Choice,
    params: Params | None = None,
) -> Untrained:
    """A target and what drafts for it, put where `choice` says, with random weights.

    Args:
      topology: the devices.
      target, drafter: shapes; drafts are looked up in the text if there is no drafter.
      choice: K, rule and the drafter's place.
      params: the target's, if there are some already.

    Raises:
      UserError: no set of mesh axes has `choice.chips_per_copy` chips.
    """
    large = seated(topology, target)
    params = large.params() if params is None else params
    engine = Engine(
        shape=large.shape,
        num_tokens=target.vocab_size,
        eos_ids=(0,),
        dtype=large.dtype,
        rule=choice.rule,
        placement=large.placement,
        leader=(choice.leader or not choice.k) and large.placement is not None,
    )
    if not choice.k:
        return Untrained(engine, Weights(params, None))
    if drafter is None:
        engine = dataclasses.replace(engine, drafter=Ngram(target.vocab_size), k=choice.k)
        return Untrained(engine, Weights(params, None))
    small = seated(topology, drafter, 1 if choice.leader else choice.chips_per_copy)
    engine = dataclasses.replace(
        engine,
        drafter=Autoregressive(small.shape, small.dtype),
        k=choice.k,
        drafter_placement=small.placement,
    )
    return Untrained(engine, Weights(params, DrafterParams(small.params(), _ids(small))))


def _ids(drafter: Seated) -> jax.Array | None:
    """Of a trimmed vocabulary: the first ones, for which they are changes no time."""
    if not drafter.shape.head_vocab:
        return None
    ids = np.arange(drafter.shape.head_vocab, dtype=np.int32)
    return jax.device_put(ids, drafter.placement.sharding() if drafter.placement else None)
