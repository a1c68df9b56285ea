"""What the text of a compiled program says: its collectives, and the compiler's estimate of its time."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_OPERATION = re.compile(r" = .*? ([a-z][\w\-]*)\(")
_COLLECTIVE = re.compile(
    r"(all-reduce|all-gather|reduce-scatter|collective-permute|collective-broadcast"
    r"|(?:ragged-)?all-to-all)(-start)?"
)
_CALLED = re.compile(r"\b(body|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')


class Program(NamedTuple):
    """What one execution of a program does.

    Attributes:
      collectives: kind, such as "all-reduce" -> operations executed by each device.
      estimated_cycles: the compiler's, of everything but collectives, as if nothing ran side by side; None
        where it gives none (TPUs only).
    """

    collectives: Counter[str]
    estimated_cycles: float | None


def read(text: str) -> Program:
    """Reads `compiled.as_text()`.

    A loop's body counts once per trip, or once if the compiler does not know the trips; of a conditional
    the branch with most of each kind counts.
    """
    computations, entry = _computations(text)

    @functools.cache
    def total(name: str) -> Counter[str]:
        found: Counter[str] = Counter()
        for line in computations.get(name, ()):
            found += _of_line(line)
            for branches, trips in _callees(line):
                most = functools.reduce(Counter.__or__, map(total, branches), Counter())
                found.update({kind: trips * count for kind, count in most.items()})
        return found

    counted = Counter(total(entry))
    cycles = counted.pop("cycles", None)
    return Program(counted, None if cycles is None else float(cycles))


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """Name -> the lines of each computation, and the name of the one that is run."""
    computations: dict[str, list[str]] = {}
    lines, entry = [], ""
    for line in text.splitlines():
        if line.startswith(" "):
            lines.append(line)
        elif match := _COMPUTATION.match(line):
            lines = computations.setdefault(match[2], [])
            entry = match[2] if match[1] else entry
    return computations, entry


def _operation(line: str) -> str:
    match = _OPERATION.search(line)
    return match[1] if match else ""


def _of_line(line: str) -> Counter[str]:
    found: Counter[str] = Counter()
    if match := _COLLECTIVE.fullmatch(_operation(line)):
        found[match[1]] = 1
    if match := _CYCLES.search(line):
        found["cycles"] = int(match[1])
    return found


def _callees(line: str) -> Iterator[tuple[list[str], int]]:
    """(alternatives, trips) of what a line runs besides itself."""
    operation = _operation(line)
    if operation.endswith(
        ("-done", "-update")
    ):  # the text names the computation at each of its steps
        return
    trips = _TRIPS.search(line)
    called = _CALLED.findall(line)
    if operation == "conditional":
        yield [name for _, name in called], 1
        for listed in _BRANCHES.findall(line):
            yield [name.strip().removeprefix("%") for name in listed.split(",")], 1
        return
    for _, name in called:
        yield [name], int(trips[1]) if trips else 1
