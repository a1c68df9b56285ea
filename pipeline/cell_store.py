"""Finished cells of a measurement that may be interrupted, by what they were measured for."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any, TypeVar

from etils import epath

from pipeline.core import artifacts
from pipeline.core.artifacts import Lineage
from pipeline.core.run_dir import atomic_write, explain_os_errors

Value = TypeVar("Value")


class CellStore:
    """A JSONL file, one finished cell a line. Lines of another lineage, or damaged ones, are dropped.

    Args:
      path: of the file.
      lineage: of the work; versions and revision do not count (`Lineage.same_work`).
    """

    def __init__(self, path: epath.PathLike, lineage: Lineage):
        self._path = epath.Path(path)
        self._work = _digest(lineage)
        self._cells = dict(self._read())

    def _read(self) -> list[tuple[str, Any]]:
        if not self._path.exists():
            return []
        with explain_os_errors(self._path, "read"):
            lines = self._path.read_bytes().splitlines()
        entries = [entry for entry in map(_entry, lines) if entry]
        return [(key, value) for work, key, value in entries if work == self._work]

    def __len__(self) -> int:
        return len(self._cells)

    def get(self, key: str, cls: type[Value]) -> Value | None:
        """The value of a finished cell; None if it is not finished, or of another form."""
        if key not in self._cells:
            return None
        try:
            return artifacts.from_json(self._cells[key], cls)
        except (ValueError, TypeError):
            return None

    def put(self, key: str, value: Any) -> None:
        """Keeps a finished cell, a dataclass, in the file."""
        self._cells[key] = artifacts.to_json(value)
        lines = (json.dumps([self._work, key, cell]) for key, cell in self._cells.items())
        atomic_write(self._path, "".join(f"{line}\n" for line in lines))

    def discard(self) -> None:
        """Removes the file: the whole is written elsewhere."""
        self._path.unlink(missing_ok=True)


def _entry(line: bytes) -> tuple[str, str, Any] | None:
    """(work, key, value) of a line that `put` wrote; None of any other."""
    try:
        entry = json.loads(line, parse_constant=_refuse)
    except ValueError:  # not JSON, or not even text
        return None
    if not isinstance(entry, list) or len(entry) != 3 or not isinstance(entry[1], str):
        return None
    return entry[0], entry[1], entry[2]


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number")


def _digest(lineage: Lineage) -> str:
    same = dataclasses.replace(lineage, versions={}, revision=None)
    text = json.dumps(artifacts.to_json(same), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
