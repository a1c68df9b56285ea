"""Samples of many parts in turns, so that whatever else the machine does falls on all of them alike."""

from __future__ import annotations

import contextlib
import gc
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from drafters.compilation import compile_together
from pipeline import noise
from pipeline.noise import NoiseMeter
from serving.passes import Part
from serving.timing import sample_ms

Key = TypeVar("Key")

# With fewer repetitions in a call, the time of one and that of the call itself cannot be told apart.
_FEW = 4
_LONGEST = 10  # times `sample_ms` that a call may take; of longer work a call holds one repetition
_MOST_OVERHEAD = 100  # times that a call may exceed one repetition


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How long is measured.

    Attributes:
      sample_ms: least time of one sample; passes are repeated inside one call until it is reached, and at
        least four times unless that takes ten times as long.
      samples: least number per cell.
      seconds: of measuring per cell that more samples are taken for; compiling is not counted.
    """

    sample_ms: float = 60.0
    samples: int = 7
    seconds: float = 1.0

    def __post_init__(self):
        if self.sample_ms <= 0 or self.seconds <= 0:
            raise ValueError(
                f"Sampling.sample_ms = {self.sample_ms} and seconds = {self.seconds} must be positive"
            )
        if self.samples < 3:
            raise ValueError(f"Sampling.samples = {self.samples} must be at least 3 for quantiles")


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Milliseconds of one repetition.

    Attributes:
      fused: inside calls of `loops`, what is paid once per call taken off.
      single: one call each, waited for.
      program: the text of the compiled program; empty if that was not asked.
    """

    fused: tuple[float, ...]
    single: tuple[float, ...]
    loops: int
    program: str = ""

    @property
    def outliers(self) -> int:
        """Samples far above the median."""
        return noise.outliers(self.fused)


class Stopwatch:
    """Measures parts.

    Args:
      sampling: how long.
      meter: looks at the machine in between.
      seed: of the order of cells.
    """

    def __init__(self, sampling: Sampling, meter: NoiseMeter, seed: int = 0):
        self._sampling, self._meter, self._random = sampling, meter, random.Random(seed)

    def measure(
        self, parts: Mapping[Key, Part], read: Sequence[Key] = ()
    ) -> Iterator[tuple[Key, Samples]]:
        """Compiles all parts, then samples them in turns, in an order that is drawn anew each time.

        Args:
          parts: what to measure.
          read: those whose program's text is wanted.

        Yields:
          Each part as soon as it has samples enough.
        """
        programs = _compiled(parts, read)
        cells = {key: _Cell(part, self._sampling) for key, part in parts.items()}
        with _no_collection():
            while cells:
                for key in self._random.sample(list(cells), len(cells)):
                    self._meter.tick()
                    cells[key].sample()
                for key in [key for key, cell in cells.items() if cell.is_done]:
                    yield key, cells.pop(key).samples(programs[key])


class _Cell:
    """A part, how often a call repeats it, and the times of calls so far."""

    def __init__(self, part: Part, sampling: Sampling):
        self._part, self._sampling = part, sampling
        sample_ms(part, 1)  # the first call loads the program
        self._loops = self._chosen()
        self._long: list[float] = []
        self._short: list[float] = []

    def _chosen(self) -> int:
        once, wanted = sample_ms(self._part, 1), self._sampling.sample_ms
        few = min(_FEW, self._part.most)
        if few == 1 or once * few > _LONGEST * wanted:
            return 1
        each = (few * sample_ms(self._part, few) - once) / (few - 1)
        enough = math.ceil(wanted / max(each, once / _MOST_OVERHEAD))
        return min(self._part.most, max(few, enough))

    def sample(self) -> None:
        """One long call, and another of a single repetition as long as those are too few."""
        self._long.append(sample_ms(self._part, self._loops))
        if self._loops > 1 and len(self._short) < self._sampling.samples:
            self._short.append(sample_ms(self._part, 1))

    @property
    def is_done(self) -> bool:
        """Whether there are enough samples."""
        spent_s = sum(self._long) * self._loops / 1e3
        return len(self._long) >= self._sampling.samples and spent_s >= self._sampling.seconds

    def samples(self, program: str) -> Samples:
        """What was found."""
        repeating = self._share_of_repetitions()
        return Samples(
            fused=tuple(ms * repeating for ms in self._long),
            single=tuple(self._short or self._long),
            loops=self._loops,
            program=program,
        )

    def _share_of_repetitions(self) -> float:
        """Of a long call's time, without what it costs beside: t(1) = c + p and t(n) = c + n p.

        Noise can make one repetition appear to take longer than many; the share is positive all the same.
        """
        count = self._loops
        if count < _FEW:
            return 1.0
        once, each = np.median(self._short), np.median(self._long)
        repetition = each - (once - each) / (count - 1)
        return float(np.clip(repetition / each, 1 / count, 1.0))


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Python's garbage collector would pause some samples for half a second."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _compiled(parts: Mapping[Key, Part], read: Sequence[Key]) -> dict[Key, str]:
    """The text of every program, if it is to be read; `Part.run` finds all of them compiled."""
    done = zip(parts, compile_together(part.lower() for part in parts.values()), strict=True)
    return {key: (program.as_text() or "") if key in read else "" for key, program in done}
