"""Samples in turns, of parts that take no time but what they say."""

import types

import numpy as np
import pytest

from pipeline.noise import NoiseMeter
from pipeline.stopwatch import Sampling, Stopwatch


class Clock:
    """Time passes only when a part runs."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now


class Worker:
    """A part that takes `ms` per repetition and `call_ms` per call."""

    def __init__(self, clock, ms, call_ms=0.0, most=1000, log=None):
        self._clock, self._ms, self._call_ms, self.most = clock, ms, call_ms, most
        self.calls, self._log = [], log if log is not None else []

    def lower(self):
        text = "ENTRY %main {\n  %a = f32[] all-reduce(%x), to_apply=%sum\n}\n"
        compiled = types.SimpleNamespace(as_text=lambda: text)
        return types.SimpleNamespace(compile=lambda: compiled)

    def run(self, times):
        self.calls.append(times)
        self._log.append(self)
        self._clock.now += (times * self._ms + self._call_ms) / 1e3
        return np.zeros(())


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("serving.timing.time", clock)
    return clock


def measured(parts, **kwargs):
    sampling = Sampling(sample_ms=50.0, samples=5, seconds=0.4)
    return dict(Stopwatch(sampling, NoiseMeter()).measure(parts, **kwargs))


def test_short_work_is_repeated_until_a_sample_is_long(clock):
    parts = {
        "short": Worker(clock, 0.5),
        "middle": Worker(clock, 90.0),
        "long": Worker(clock, 200.0),
    }
    found = measured(parts)
    assert [found[name].loops for name in parts] == [100, 4, 1]
    np.testing.assert_allclose(found["short"].fused, 0.5)
    np.testing.assert_allclose(found["long"].fused, 200.0)


def test_a_cell_is_sampled_until_its_time_is_used_but_at_least_so_often(clock):
    found = measured({"short": Worker(clock, 9.9), "long": Worker(clock, 500.0)})
    assert len(found["short"].fused) == 7  # of 6 x 9.9 ms
    assert len(found["long"].fused) == 5


def test_a_cell_that_is_done_is_told_before_the_others_are(clock):
    parts = {"short": Worker(clock, 9.9), "long": Worker(clock, 500.0)}
    told = Stopwatch(Sampling(sample_ms=50.0, samples=5, seconds=0.4), NoiseMeter()).measure(parts)
    assert next(told)[0] == "long"
    sampled = len(parts["short"].calls)
    assert next(told)[0] == "short"
    assert len(parts["short"].calls) > sampled


def test_a_call_repeats_no_more_than_there_is_room_for(clock):
    part = Worker(clock, 1.0, most=7)
    measured({"part": part})
    assert max(part.calls) == 7


@pytest.mark.parametrize("ms", [0.3, 2.0, 30.0])
def test_what_a_call_costs_by_itself_is_taken_off_and_told(clock, ms):
    found = measured({"part": Worker(clock, ms, call_ms=3.0)})["part"]
    np.testing.assert_allclose(found.fused, ms, rtol=1e-6)
    np.testing.assert_allclose(found.single, ms + 3.0)


def test_a_repetition_that_seems_longer_than_many_has_a_time_all_the_same(clock):
    """A single call caught by noise must not make what it is compared with less than nothing."""
    part = Worker(clock, 20.0)
    run = part.run

    def noisy(times):
        clock.now += 0.3 if times == 1 and len(part.calls) > 3 else 0.0
        return run(times)

    part.run = noisy
    found = measured({"part": part})["part"]
    assert found.loops >= 4
    assert 0 < min(found.fused) <= max(found.fused) <= 20.0


def test_cells_take_turns(clock):
    log = []
    parts = {name: Worker(clock, 60.0, log=log) for name in "abc"}
    measured(parts)
    sampled = log[9:]  # three calls each before the first sample, then two in each turn
    for first in range(0, len(sampled) - 5, 6):
        assert len(set(sampled[first : first + 6])) == 3


def test_programs_are_read_only_where_that_is_asked(clock):
    found = measured({"a": Worker(clock, 1.0), "b": Worker(clock, 1.0)}, read=["a"])
    assert "all-reduce" in found["a"].program
    assert not found["b"].program


@pytest.mark.parametrize("wrong", [{"samples": 2}, {"sample_ms": 0.0}, {"seconds": -1.0}])
def test_settings_are_checked(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Sampling(**wrong)
