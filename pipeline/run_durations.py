"""How long stages took in a run directory, to tell how long they will take."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from etils import epath

from pipeline.core.artifacts import sha256_of_file
from pipeline.core.run_dir import RunDir, atomic_write

_FILE = "durations.json"


@dataclass
class Measured:
    """One call of a stage."""

    seconds: float = 0.0
    complete: bool = False
    made: bool = True  # something that was not there before

    def __str__(self) -> str:
        if self.made:
            return f"done in {in_words(self.seconds)}"
        return f"was up to date ({in_words(self.seconds)})"


@dataclass
class Durations:
    """What is known of earlier calls.

    Attributes:
      last: stage -> {"seconds": of the last call that made something, "outputs": {path: sha256} after it}.
      making: an earlier stage of this run has made something, so that later ones must.
    """

    run: RunDir
    last: dict[str, dict[str, Any]] = field(default_factory=dict)
    making: bool = False

    @classmethod
    def of(cls, run: RunDir) -> Durations:
        """As kept in the run directory; what cannot be read is not known."""
        try:
            last = json.loads((run.root / _FILE).read_text())
            known = {
                name: {**entry, "seconds": float(entry["seconds"])} for name, entry in last.items()
            }
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            known = {}
        return cls(run, known)

    def outlook(self, names: Sequence[str]) -> str:
        """How long the first of these stages and all of them will take, as far as earlier calls tell."""
        expected = [self._expected(name) for name in names]
        if expected[0] is None:
            return ""
        said = f": about {in_words(expected[0])}" if expected[0] else ": seems up to date"
        rest = [seconds for seconds in expected if seconds is not None]
        if len(names) == 1 or len(rest) < len(expected):
            return said
        return f"{said}; about {in_words(sum(rest))} to the end of the run"

    def _expected(self, name: str) -> float | None:
        entry = self.last.get(name)
        if entry is None:
            return None
        if not self.making and entry.get("outputs") == outputs(self.run, name):
            return 0.0
        return entry["seconds"]

    @contextlib.contextmanager
    def measured(self, name: str) -> Iterator[Measured]:
        """Times a call of a stage; its time is kept if it was complete and made something."""
        before, began, call = outputs(self.run, name), time.monotonic(), Measured()
        yield call
        call.seconds = time.monotonic() - began
        after = outputs(self.run, name)
        call.made = after != before
        self.making |= call.made
        if call.complete and call.made:
            self.last[name] = {"seconds": round(call.seconds, 1), "outputs": after}
            atomic_write(self.run.root / _FILE, json.dumps(self.last, indent=2) + "\n")


def outputs(run: RunDir, stage: str) -> Mapping[str, str]:
    """Path below the run directory -> sha256 of the artifacts that `stage` writes."""
    files: dict[str, list[epath.Path]] = {
        "generate": sorted((run.root / "generated").glob("*/*.jsonl")),
        "train": sorted((run.root / "models").glob("*/model.json")),
        "profile": [run.profile],
        "evaluate": [run.acceptance],
        "codesign": [run.plan],
    }
    present = [path for path in files.get(stage, []) if path.exists()]
    return {str(path.relative_to(run.root)): sha256_of_file(path) for path in present}


def in_words(seconds: float) -> str:
    """`4 s`, `2 min 5 s`, `3 h 20 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if minutes else f"{hours} h"
