"""Work that one chip does while the others wait for its word."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

Told = TypeVar("Told")
Kept = TypeVar("Kept")


def alone(
    mesh: Mesh, work: Callable[[Any, Kept], tuple[Told, Kept]], shared: Any, kept: Kept
) -> tuple[Told, Kept]:
    """Runs work(shared, kept) -> (told, kept) on the mesh's first chip; the others skip it.

    Args:
      mesh: all chips that wait.
      work: may not communicate.
      shared: arrays that every chip holds.
      kept: what only the leader keeps, as `[chips, ...]` sharded over the chips. The other chips' parts
        are never written, so calling them replicated would be a lie the compiler may act on.

    Returns:
      What the leader tells, integer arrays, known to every chip after one small all-reduce; and `kept`.
    """
    axes = mesh.axis_names

    def body(shared: Any, kept: Any) -> tuple[Any, Any]:
        kept = jax.tree.map(lambda leaf: leaf[0], kept)

        def lead() -> tuple[Any, Any]:
            return work(shared, kept)

        def wait() -> tuple[Any, Any]:
            silence = jax.tree.map(
                lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(lead)[0]
            )
            return silence, kept

        told, kept = jax.lax.cond(jax.lax.axis_index(axes) == 0, lead, wait)
        return _broadcast(told, axes), jax.tree.map(lambda leaf: leaf[None], kept)

    run = jax.shard_map(
        body, mesh=mesh, in_specs=(P(), P(axes)), out_specs=(P(), P(axes)), check_vma=False
    )
    return run(shared, kept)


def _broadcast(told: Any, axes: tuple[str, ...]) -> Any:
    """The sum over all chips of integers that are zero on all but one, as a single all-reduce."""
    leaves, treedef = jax.tree.flatten(told)
    if not leaves:
        return told
    flat = jax.lax.psum(jnp.concatenate([leaf.ravel() for leaf in leaves]), axes)
    parts, start = [], 0
    for leaf in leaves:
        parts.append(flat[start : start + leaf.size].reshape(leaf.shape))
        start += leaf.size
    return treedef.unflatten(parts)


def for_each_chip(mesh: Mesh, kept: Kept) -> Kept:
    """`kept` as the leader keeps it: a leading axis of chips, one part on each."""
    sharding = NamedSharding(mesh, P(mesh.axis_names))

    def spread(leaf: jax.Array) -> jax.Array:
        parts = jnp.broadcast_to(leaf[None], (mesh.size, *leaf.shape))
        return jax.lax.with_sharding_constraint(parts, sharding)

    return jax.tree.map(spread, kept)
