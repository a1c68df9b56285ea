"""Intervals of medians, and the meter of a machine's noise."""

import itertools

import numpy as np
import pytest

from pipeline import noise
from pipeline.noise import NoiseMeter


@pytest.mark.parametrize("count", [6, 15, 40])
def test_intervals_hold_the_median_19_times_of_20(count):
    rng = np.random.default_rng(count)
    runs = [noise.median_interval(rng.lognormal(size=count)) for _ in range(2000)]
    held = np.mean([low <= 1 <= high for low, high in runs])  # the median of this law is 1
    assert 0.935 <= held <= 0.99


def test_few_samples_give_their_range():
    assert noise.median_interval([3.0, 1.0, 2.0]) == (1.0, 3.0)
    assert noise.median_interval([7.0]) == (7.0, 7.0)


def test_tight_is_relative_to_the_median():
    assert noise.is_tight([100.0, 104.0, 96.0], 0.05)
    assert not noise.is_tight([100.0, 106.0, 94.0], 0.05)


def test_outliers_are_above_twice_the_median():
    assert noise.outliers([1.0, 1.0, 1.0, 1.0, 1.9, 2.1, 30.0]) == 2


def test_the_meter_sees_a_restless_machine():
    ticks = itertools.accumulate(itertools.cycle([0.0, 1.0, 0.0, 1.0, 0.0, 3.0]))
    restless = NoiseMeter(lambda: next(ticks))
    for _ in range(30):
        restless.tick()
    seen = restless.noise(outliers=4)
    assert seen.relative_spread == pytest.approx(2.0)
    assert seen.outliers == 4
    even = itertools.count()
    assert NoiseMeter(lambda: float(next(even))).noise().relative_spread == 0
