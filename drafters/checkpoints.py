"""Saving and restoring trees of arrays, through Orbax and nowhere else.

A checkpoint appears under its name only when it is complete: Orbax writes to a temporary folder and renames
it. A restore reads each array straight into the sharding it is asked for, whatever it was saved from.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from drafters.transformer import Params
from pipeline.core.errors import UserError


@contextlib.contextmanager
def _refusals(path: epath.PathLike, doing: str) -> Iterator[None]:
    """Turns a full disk or a damaged checkpoint into one message that names the path."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{doing} {path} failed: {error}. Free space there or choose another run_dir"
        ) from error
    except (ValueError, KeyError) as error:
        raise UserError(
            f"{doing} {path} failed: {error}. The checkpoint is incomplete or belongs to another "
            "shape: import or train the model again"
        ) from error


def save_params(path: epath.PathLike, params: Params) -> None:
    """Writes a tree of arrays to the new folder `path`; nothing is left behind on failure."""
    path = epath.Path(path)
    with _refusals(path, "Saving"), ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path.absolute(), params)


def restore_params(path: epath.PathLike, abstract: Params) -> Params:
    """Reads a tree of arrays.

    Args:
      path: a folder written by `save_params`.
      abstract: ShapeDtypeStructs in the places of the arrays; arrays are cast to their dtypes and placed
        in their shardings (the default device's without).

    Raises:
      UserError: the folder is missing, incomplete, or holds another tree.
    """
    path = epath.Path(path)
    if not path.is_dir():
        raise UserError(f"No weights in {path}: import or train the model first")
    with _refusals(path, "Reading"), ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path.absolute(), _placed(abstract))


def _placed(abstract: Params) -> Params:
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def place(leaf: Any) -> jax.ShapeDtypeStruct:
        sharding = getattr(leaf, "sharding", None) or here
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(place, abstract)
