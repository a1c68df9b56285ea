"""A model's forward passes, again and again in one compiled loop, wherever on a mesh it lies.

Axes: B batch, T tokens of a pass, S capacity, V vocabulary. Loops run on the device: what the host does is
paid once per call. Every pass needs all scores of the one before, so none can be left out or moved.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from drafters import kv_cache
from drafters.kv_cache import KVCache
from drafters.shapes import TransformerShape
from drafters.sharding import Placement
from drafters.transformer import Params, with_params
from serving.leader import alone

# together: sharded over the placement's axes, copied over the others.
# leader: on the first chip, while the others wait for it.
# apart: every chip does its share of the arithmetic, and none waits for another: a step without its
#   collectives. What comes out is no model's, but as much work as one chip of many has.
Seat = Literal["together", "leader", "apart"]


class Part:
    """A piece of work, ready to be repeated.

    Args:
      program: compiled; (shared, kept, times i32[]) -> (told, kept), where `told` is a small array that is
        known when all is done. `kept` is donated.
      shared, kept: its arrays.
      most: how often one call can repeat it.
    """

    def __init__(self, program: Any, shared: Any, kept: Any, most: int = 2**30):
        self._program, self._shared, self._kept, self.most = program, shared, kept, most

    def lower(self) -> jax.stages.Lowered:
        """The program, traced; compiling that compiles it for `run` too."""
        return self._program.lower(self._shared, self._kept, np.int32(1))

    def run(self, times: int) -> Any:
        """Starts `times` repetitions; the array to wait for."""
        told, self._kept = self._program(self._shared, self._kept, np.int32(times))
        return told


def repeated(
    work: Callable[[Any, Any, Array], tuple[Any, Any]], shared: Any, kept: Any, most: int = 2**30
) -> Part:
    """The part that `work` does. `kept` comes out lying where it lay: one program serves all calls."""
    places = jax.tree.map(lambda leaf: leaf.sharding, kept)
    program = jax.jit(work, donate_argnums=1, out_shardings=(None, places))
    return Part(program, shared, kept, most)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seated:
    """A model and where it is.

    Attributes:
      shape: as served there (key/value heads repeated for the placement); apart, that of one chip's share.
      dtype: of weights and caches.
      placement: None on one device.
    """

    shape: TransformerShape
    dtype: str = "float32"
    placement: Placement | None = None
    seat: Seat = "together"

    @property
    def mesh(self) -> Mesh:
        """Of the placement."""
        assert self.placement is not None
        return self.placement.mesh

    def params(self) -> Params:
        """Random weights; no time depends on their values."""
        tree = self._described_params()
        return jax.tree_util.tree_map_with_path(_random_leaf, tree)

    def _described_params(self) -> Any:
        dtype = jnp.dtype(self.dtype)
        where = self.placement or Placement(_one_device(), ())
        if self.seat == "together":
            return where.abstract_params(self.shape, dtype)
        whole = Placement(where.mesh, ()).abstract_params(self.shape, dtype)
        return jax.tree.map(self._on_each, whole) if self.seat == "apart" else whole

    def _on_each(self, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        mesh = self.mesh
        sharding = NamedSharding(mesh, P(mesh.axis_names))
        return jax.ShapeDtypeStruct((mesh.size, *leaf.shape), leaf.dtype, sharding=sharding)

    def cache(self, batch: int, capacity: int) -> KVCache:
        """An empty one [B, G, S, H], or [chips, B, G, S, H] where chips keep their own."""
        where = self.placement or Placement(_one_device(), ())
        described = jax.eval_shape(
            lambda: kv_cache.empty(self.shape, batch, capacity, jnp.dtype(self.dtype))
        )
        if self.seat == "together":
            return jax.tree.map(zeros, described, where.cache_shardings(self.shape))
        return jax.tree.map(lambda leaf: zeros(self._on_each(leaf)), described)

    def passes(
        self,
        params: Params,
        *,
        batch: int,
        tokens: int,
        context: int,
        capacity: int,
        last_only: bool = False,
    ) -> Part:
        """Passes over T = `tokens` new tokens per row behind `context` others.

        Args:
          params: of `params()`, or trained ones lying as those do.
          batch, tokens, context: see above.
          capacity: S, of the cache.
          last_only: logits of the last token alone, as a prompt is taken in.
        """
        block = _held(np.ones((batch, tokens), np.int32), self.placement)
        length = _held(np.full((batch,), context, np.int32), self.placement)
        places = {"together": self._together, "leader": self._led, "apart": self._apart}
        work = places[self.seat](_again(self, last_only))
        return repeated(work, (params, block, length), self.cache(batch, capacity))

    def _together(self, work: Callable) -> Callable:
        return work

    def _led(self, work: Callable) -> Callable:
        def led(shared: Any, kept: Any, times: Array) -> tuple[Any, Any]:
            return alone(self.mesh, lambda s, kept: work(s[0], kept, s[1]), (shared, times), kept)

        return led

    def _apart(self, work: Callable) -> Callable:
        mesh = self.mesh
        each = P(mesh.axis_names)

        def body(shared: Any, kept: Any, times: Array) -> tuple[Any, Any]:
            params, *rest = shared
            params, kept = jax.tree.map(lambda leaf: leaf[0], (params, kept))
            told, kept = work((params, *rest), kept, times)
            return told, jax.tree.map(lambda leaf: leaf[None], kept)

        return jax.shard_map(
            body,
            mesh=mesh,
            in_specs=((each, P(), P()), each, P()),
            out_specs=(P(), each),
            check_vma=False,
        )


def _again(model: Seated, last_only: bool) -> Callable:
    def gathered(logits: Array) -> Array:
        if model.placement is None or model.seat != "together":
            return logits
        return model.placement.gathered(logits)

    def work(shared: Any, cache: KVCache, times: Array) -> tuple[Array, KVCache]:
        params, block, length = shared
        transformer = with_params(model.shape, params)

        def once(_: Array, carry: tuple[KVCache, Array]) -> tuple[KVCache, Array]:
            cache, block = carry
            x, cache = transformer.step(block, cache.with_length(length))
            x = x[:, :, -1:] if last_only else x
            scores = gathered(transformer.logits(x))
            return cache, block + (jnp.max(scores) == jnp.inf).astype(block.dtype)

        cache, block = jax.lax.fori_loop(0, times, once, (cache, block))
        return block, cache

    return work


# --------------------------------------------------------------------------------------------------
# Arrays that nothing has to be compiled for
# --------------------------------------------------------------------------------------------------

_BLOCK = 1 << 20  # random numbers drawn; larger arrays repeat them


def _one_device() -> Mesh:
    return Mesh(np.array(jax.devices()[:1]), ("one",))


def zeros(leaf: jax.ShapeDtypeStruct, sharding: Any = None) -> Array:
    """Zeros where `sharding`, or the description itself, says."""
    shape, sharding = leaf.shape, sharding or leaf.sharding
    return jax.make_array_from_callback(
        shape, sharding, lambda index: np.zeros(_size(index, shape), leaf.dtype)
    )


def _random_leaf(path: tuple, leaf: jax.ShapeDtypeStruct) -> Array:
    shape = leaf.shape
    norm = path[-1].key.endswith("norm")
    drawn = (np.ones(1) if norm else _noise() * shape[-1] ** -0.5).astype(leaf.dtype)
    return jax.make_array_from_callback(
        shape, leaf.sharding, lambda index: np.resize(drawn, _size(index, shape))
    )


@functools.cache
def _noise() -> np.ndarray:
    return np.random.default_rng(0).standard_normal(_BLOCK, np.float32)


def _size(index: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of the part of an array of `shape` that `index`, a slice per axis, is of."""
    sizes = zip(index, shape, strict=True)
    return tuple(len(range(*part.indices(length))) for part, length in sizes)


def _held(array: np.ndarray, placement: Placement | None) -> Array:
    return jax.device_put(array, placement.sharding() if placement else jax.devices()[0])
