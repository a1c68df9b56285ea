"""Saving and restoring trees of arrays, through Orbax and nowhere else.

A checkpoint appears under its name only when it is complete: Orbax writes to a temporary folder and renames
it. A restore reads each array straight into the sharding it is asked for, whatever it was saved from.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import checkpoint_managers

from drafters.host_memory import frugal
from drafters.transformer import Params
from pipeline.core.errors import UserError

_SYSTEM_ERROR = re.compile(r"os_error_code='(\d+)'")


@contextlib.contextmanager
def _refusals(path: epath.PathLike, doing: str) -> Iterator[None]:
    """Turns a full disk or a damaged checkpoint into one message that names the path.

    Tensorstore reports what the system said as a ValueError with the error's number in its text, and Orbax
    logs the traceback of every thread that was writing; the message says all a person needs of that.
    """
    with _quiet():
        try:
            yield
        except OSError as error:
            raise _refusal(path, doing, error.strerror or str(error)) from error
        except (ValueError, KeyError) as error:
            if number := _SYSTEM_ERROR.search(str(error)):
                raise _refusal(path, doing, os.strerror(int(number[1]))) from error
            raise UserError(
                f"{doing} {path} failed: {error}. The checkpoint is incomplete or belongs to another "
                "shape: import or train the model again"
            ) from error


def _refusal(path: epath.PathLike, doing: str, reason: str) -> UserError:
    return UserError(f"{doing} {path} failed: {reason}. Free space there or choose another place")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps writing threads from printing: Orbax's log errors, Tensorstore's raise where nobody can catch.

    After a failure some of the latter go on for a while, so the filter stays.
    """
    logger, hook = logging.getLogger("absl"), sys.unraisablehook
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    sys.unraisablehook = functools.partial(_print_unless_late, hook)
    try:
        yield
        sys.unraisablehook = hook
    finally:
        logger.setLevel(level)


def _print_unless_late(hook: Any, unraisable: Any) -> None:
    """Leaves out what a thread says that finds the event loop of a failed save gone."""
    if str(unraisable.exc_value) != "Event loop is closed":
        hook(unraisable)


def save_params(path: epath.PathLike, params: Params) -> None:
    """Writes a tree of arrays to the new folder `path`; nothing is left behind on failure."""
    path = epath.Path(path)
    with _refusals(path, "Saving"), _writer(params) as checkpointer:
        checkpointer.save(path.absolute(), args=ocp.args.PyTreeSave(params))


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
    placed = _placed(abstract)
    with _refusals(path, "Reading"), frugal(), _reader(placed) as checkpointer:
        return checkpointer.restore(path.absolute(), args=ocp.args.StandardRestore(placed))


def _writer(tree: Params) -> ocp.Checkpointer:
    """Writes without compression: weights hardly shrink, and a model starts in half the time."""
    processes = _processes(tree)
    handler = ocp.PyTreeCheckpointHandler(use_compression=False, multiprocessing_options=processes)
    return ocp.Checkpointer(handler, multiprocessing_options=processes)


def _reader(tree: Params) -> ocp.Checkpointer:
    """Reads no more at a time than the largest array, or 64 MB: what is read ahead is held twice."""
    largest = max(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
    at_once = max(largest, 1 << 26) / 1e9 + 1e-3
    processes = _processes(tree)
    handler = ocp.StandardCheckpointHandler(
        restore_concurrent_gb=at_once,  # pyright: ignore[reportArgumentType] fractions are fine
        multiprocessing_options=processes,
    )
    return ocp.Checkpointer(handler, multiprocessing_options=processes)


def _processes(tree: Params) -> ocp.options.MultiprocessingOptions:
    """Those to wait for: all of them only if they hold parts of `tree`."""
    shardings = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(tree)]
    if any(s is not None and not s.is_fully_addressable for s in shardings):
        return ocp.options.MultiprocessingOptions()
    here = jax.process_index()
    return ocp.options.MultiprocessingOptions(
        primary_host=here, active_processes={here}, barrier_sync_key_prefix=f"process_{here}"
    )


def _placed(abstract: Params) -> Params:
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])

    def place(leaf: Any) -> jax.ShapeDtypeStruct:
        sharding = getattr(leaf, "sharding", None) or here
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(place, abstract)


class States:
    """The states of one unfinished training: saved in the background, the newest ones kept.

    A state is a tree of arrays with notes in JSON beside it. One that was being written when the process
    died is not among them.

    Args:
      folder: theirs alone.
      keep: how many.
    """

    def __init__(self, folder: epath.PathLike, keep: int = 2):
        self.folder = epath.Path(folder).absolute()
        with _refusals(self.folder, "Saving"):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._manager = ocp.CheckpointManager(
                self.folder,
                options=ocp.CheckpointManagerOptions(
                    preservation_policy=checkpoint_managers.LatestN(keep),
                    save_decision_policy=checkpoint_managers.FixedIntervalPolicy(1),
                ),
            )

    def latest(self) -> int | None:
        """The step of the newest complete state, None if there is none."""
        return self._manager.latest_step()

    def save(self, step: int, state: Any, notes: Mapping[str, Any]) -> None:
        """Starts to write a state; the arrays may be donated as soon as this returns.

        Raises:
          UserError: this one or the one before could not be written.
        """
        with _refusals(self.folder / str(step), "Saving"):
            items = ocp.args.Composite(
                state=ocp.args.StandardSave(state), notes=ocp.args.JsonSave(dict(notes))
            )
            self._manager.save(step, args=items)

    def restore(self, step: int, abstract: Any) -> tuple[Any, dict[str, Any]]:
        """The state of `step` in the dtypes and shardings of `abstract`, and its notes."""
        with _refusals(self.folder / str(step), "Reading"):
            items = ocp.args.Composite(
                state=ocp.args.StandardRestore(_placed(abstract)), notes=ocp.args.JsonRestore()
            )
            read = self._manager.restore(step, args=items)
        return read["state"], read["notes"]

    def close(self) -> None:
        """Waits until everything is written."""
        with _refusals(self.folder, "Saving"):
            try:
                self._manager.wait_until_finished()
            finally:
                self._manager.close()
