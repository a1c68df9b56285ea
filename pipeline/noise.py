"""How far repeated times can be trusted: intervals of medians, and how quiet the machine was."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence

import numpy as np

from pipeline.profile_artifact import Noise, Quantiles

_WORK = 1 << 18  # floats: 1 MB, about 0.1 ms
_NORMAL_95 = 1.959964


def median_interval(samples: Sequence[float]) -> tuple[float, float]:
    """A 95% interval of the median from order statistics, whatever the distribution.

    The number of samples below the median is binomial with p = 1/2; ranks by its normal approximation
    (David & Nagaraja 2003, section 7.1). The range of all samples is returned where that needs more.
    """
    ordered = sorted(samples)
    count = len(ordered)
    reach = _NORMAL_95 * math.sqrt(count) / 2
    low = max(0, math.floor(count / 2 - reach))
    high = min(count - 1, math.ceil(count / 2 + reach) - 1)
    return ordered[low], ordered[high]


def is_tight(samples: Sequence[float], tolerance: float) -> bool:
    """Whether half the width of the median's interval is at most `tolerance` of the median."""
    low, high = median_interval(samples)
    return (high - low) / 2 <= tolerance * abs(float(np.median(samples)))


def outliers(samples: Sequence[float]) -> int:
    """Samples above twice their median."""
    return int(np.sum(np.asarray(samples) > 2 * np.median(samples)))


class NoiseMeter:
    """Times the same piece of work again and again, between other measurements.

    Args:
      clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._work = np.ones(_WORK, np.float32)
        self._seconds: list[float] = []
        self.tick()
        self._seconds.clear()  # the first touches new memory

    def tick(self) -> None:
        """Times it once."""
        started = self._clock()
        self._work.sum()
        self._seconds.append(self._clock() - started)

    def noise(self, outliers: int = 0) -> Noise:
        """What was seen so far.

        Args:
          outliers: of the measurements in between.
        """
        if not self._seconds:
            self.tick()
        seen = Quantiles.of(self._seconds)
        return Noise(
            relative_spread=(seen.p90 - seen.p10) / max(seen.p50, 1e-9),
            outliers=outliers,
            load_average=os.getloadavg()[0],
        )
