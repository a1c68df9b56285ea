"""Megatron's tensor parallelism as one table of rules, and the weights' way onto a mesh.

Axes: G key/value heads, R query heads per group, H head size, D model width, F feed-forward width, V
vocabulary. `axes` names the mesh axes a model is sharded over; no axes means every chip holds all of it.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from drafters.kv_cache import KVCache
from drafters.products import padded
from drafters.shapes import Layout, TransformerShape
from drafters.transformer import Params, abstract_params


class Rule(NamedTuple):
    """`axis` of the parameter is divided over the chips if the layout's `when` holds."""

    axis: int
    when: str


# Column-parallel into attention and MLP, row-parallel out of them (Shoeybi et al. 1909.08053); the vocabulary
# is divided too. Whatever is not listed is small and held by every chip.
RULES = {
    "embedding": Rule(0, "shard_embedding"),
    "head": Rule(0, "shard_head"),
    "qkv": Rule(0, "shard_attention"),
    "qkv_bias": Rule(0, "shard_attention"),
    "out": Rule(1, "shard_attention"),
    "gate_up": Rule(0, "shard_mlp"),
    "gate_up_bias": Rule(0, "shard_mlp"),
    "down": Rule(1, "shard_mlp"),
}


@dataclasses.dataclass(frozen=True)
class Placement:
    """A model's place on a mesh: sharded over `axes`, copied over the other axes."""

    mesh: Mesh
    axes: tuple[str, ...]

    @property
    def chips_per_copy(self) -> int:
        """Chips that share one copy of the model."""
        return math.prod(self.mesh.shape[axis] for axis in self.axes)

    def sharding(self, *spec: Any) -> NamedSharding:
        """A sharding on this mesh."""
        return NamedSharding(self.mesh, P(*spec))

    def layout(self, shape: TransformerShape) -> Layout:
        """How `shape` lies on one copy's chips."""
        return shape.layout(self.chips_per_copy)

    def served_shape(self, shape: TransformerShape) -> TransformerShape:
        """`shape` with its heads as they are divided: each chip holds whole groups."""
        return shape.divided_over(self.chips_per_copy)

    def param_shardings(self, shape: TransformerShape, scan: bool = False) -> Params:
        """A NamedSharding in the place of every parameter."""
        layout = self.layout(shape)

        def of(path: tuple, leaf: Any) -> NamedSharding:
            rule = RULES.get(path[-1].key)
            if rule is None or not self.axes or not getattr(layout, rule.when):
                return self.sharding()
            lead = rule.axis + (scan and path[0].key == "layers")
            return self.sharding(*[None] * lead, self.axes)

        return jax.tree_util.tree_map_with_path(of, abstract_params(shape, scan=scan))

    def abstract_params(self, shape: TransformerShape, dtype: Any, scan: bool = False) -> Params:
        """ShapeDtypeStructs with shardings: what a checkpoint is restored to."""

        def place(leaf: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        shardings = self.param_shardings(shape, scan)
        return jax.tree.map(place, abstract_params(shape, dtype, scan), shardings)

    def reading_params(self, shape: TransformerShape, dtype: Any) -> Params:
        """ShapeDtypeStructs with the shardings a checkpoint of `shape` is read in, before `put`.

        The parameters that `put` reorders are still whole heads of the stored model, which may be fewer
        than chips: they are read divided along their width.
        """
        if not self.layout(shape).changes_heads:
            return self.abstract_params(shape, dtype)
        by_width = {
            "qkv": self.sharding(None, None, None, self.axes),
            "out": self.sharding(self.axes),
        }
        chips = self.chips_per_copy

        def of(path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            name = path[-1].key
            if name not in (*by_width, "qkv_bias"):
                return leaf
            divides = name in by_width and shape.width % chips == 0
            sharding = by_width[name] if divides else self.sharding()
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        return jax.tree_util.tree_map_with_path(of, self.abstract_params(shape, dtype))

    def cache_shardings(self, shape: TransformerShape) -> Any:
        """A KVCache of shardings: of a cache [B, G, S, H] of the served shape."""
        heads = self.axes if self.axes and self.layout(shape).shard_attention else None
        one = self.sharding(None, heads)
        layers = (one,) * shape.num_layers
        return KVCache(layers, layers, self.sharding())  # pyright: ignore[reportArgumentType]

    def gathered(self, logits: jax.Array) -> jax.Array:
        """Logits [V, ...], whole on every chip of the mesh after one gather.

        Told in two steps: left to itself, XLA may gather the head instead, and every chip multiply by all
        of it.
        """
        if self.axes and logits.shape[0] % self.chips_per_copy == 0:  # as the head is divided
            logits = jax.lax.with_sharding_constraint(logits, self.sharding(self.axes))
        return jax.lax.with_sharding_constraint(logits, self.sharding())

    def put(self, shape: TransformerShape, params: Params) -> Params:
        """Moves the parameters of `shape` here, as those of `served_shape(shape)`."""
        layout = self.layout(shape)
        shardings = self.param_shardings(self.served_shape(shape))
        if layout.changes_heads:
            params = jax.jit(divide_heads, static_argnums=1)(params, layout)
        return jax.device_put(params, shardings)


def divide_heads(params: Params, layout: Layout) -> Params:
    """Parameters of the same function with the heads of a layout.

    A group of R queries with one key/value head becomes `kv_repeats` groups, each with a copy of that head
    and its share of the queries. Heads of zeros fill up what is missing: they give zeros, and the zeros of
    `out` take nothing from them.
    """
    repeats, groups, per_group = layout.kv_repeats, layout.kv_heads, layout.queries_per_group

    def split(queries: jax.Array) -> jax.Array:  # [G, R, ...] -> [G', R', ...]
        queries = padded(queries, repeats * per_group, axis=1)
        return padded(queries.reshape(-1, per_group, *queries.shape[2:]), groups, axis=0)

    def of(path: tuple, leaf: jax.Array) -> jax.Array:
        name = path[-1].key
        if name in ("qkv", "qkv_bias"):  # [G, R + 2, ...]
            shared = padded(jnp.repeat(leaf[:, -2:], repeats, axis=0), groups, axis=0)
            return jnp.concatenate((split(leaf[:, :-2]), shared), axis=1)
        if name == "out":  # [D, G, R, H]
            return jnp.moveaxis(split(jnp.moveaxis(leaf, 0, -1)), -1, 0)
        return leaf

    return jax.tree_util.tree_map_with_path(of, params)
