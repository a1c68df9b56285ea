"""Samples of many parts in turns, so that whatever else the machine does falls on all of them alike."""

from __future__ import annotations

import gc
import math
import random
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import jax

from pipeline import noise
from pipeline.noise import NoiseMeter
from serving.passes import Part
from serving.timing import sample_ms

Key = TypeVar("Key")

_COMPILERS = 2  # programs compiled at once: half of a compilation runs on one core


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How long is measured.

    Attributes:
      sample_ms: least time of one sample; short passes are repeated inside one call until it is reached.
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
      fused: inside one call.
      single: one call each, waited for; empty if that was not asked.
      program: the text of the compiled program; empty if that was not asked.
    """

    fused: list[float] = field(default_factory=list)
    single: list[float] = field(default_factory=list)
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
        self,
        parts: Mapping[Key, Part],
        singly: Sequence[Key] = (),
        read: Sequence[Key] = (),
    ) -> dict[Key, Samples]:
        """Compiles all parts, then samples them in turns, in an order that is drawn anew each time.

        Args:
          parts: what to measure.
          singly: those that are also dispatched one by one.
          read: those whose program's text is wanted.
        """
        programs = _compiled(parts, read)
        loops = {key: self._loops(part) for key, part in parts.items()}
        found = {key: Samples(program=programs[key]) for key in parts}
        gc.collect()
        waiting = list(parts)
        while waiting:
            for key in self._random.sample(waiting, len(waiting)):
                self._meter.tick()
                found[key].fused.append(sample_ms(parts[key], loops[key]))
                if key in singly:
                    found[key].single.append(_dispatched_ms(parts[key], loops[key]))
            waiting = [key for key in waiting if not self._is_done(found[key].fused, loops[key])]
        return found

    def _loops(self, part: Part) -> int:
        """How often a sample repeats the part."""
        sample_ms(part, 1)  # the first call loads the program
        ms = min(sample_ms(part, 1), sample_ms(part, 1))
        return max(1, min(part.most, math.ceil(self._sampling.sample_ms / ms)))

    def _is_done(self, samples: Sequence[float], loops: int) -> bool:
        spent_s = sum(samples) * loops / 1e3
        return len(samples) >= self._sampling.samples and spent_s >= self._sampling.seconds


def _compiled(parts: Mapping[Key, Part], read: Sequence[Key]) -> dict[Key, str]:
    """The text of every program, if it is to be read; `Part.run` finds all of them compiled."""
    with ThreadPoolExecutor(_COMPILERS) as pool:
        # Tracing holds the interpreter: one after the other, while others compile.
        compiling = {key: pool.submit(part.lower().compile) for key, part in parts.items()}
        done = {key: future.result() for key, future in compiling.items()}
    return {key: (program.as_text() or "") if key in read else "" for key, program in done.items()}


def _dispatched_ms(part: Part, times: int) -> float:
    start = time.perf_counter()
    for _ in range(times):
        jax.block_until_ready(part.run(1))
    return 1e3 * (time.perf_counter() - start) / times
