"""From made-up times of cells to layers, steps and rounds whose values are known."""

import dataclasses

import pytest

from pipeline import profile_results
from pipeline.latency import Machine
from pipeline.profile_artifact import AlphaBeta, ProfiledTopology, Quantiles
from pipeline.profile_grid import StepCell
from pipeline.step_times import Timed
from tests.pipeline.test_profile_grid import SMALL, TARGET, plan

REDUCE = AlphaBeta(
    op="all_reduce", axis="x+y+z", chips=16, dtype="float32", alpha_us=100.0,
    alpha_interval_us=(100.0, 100.0), beta_us_per_kib=0.0, beta_interval_us_per_kib=(0.0, 0.0),
    knee_bytes=1 << 20, r2=1.0,
)  # fmt: skip
MACHINE = Machine(
    platform="cpu", chips=16, cores=2, dtype="float32", alpha_beta={"all_reduce": REDUCE}
)
MESH = ProfiledTopology(
    name="host_16", platform="cpu", device_kind="cpu", num_chips=16, mesh={"x": 2, "y": 2, "z": 4},
    hbm_bytes_per_s=1e9, flop_per_s=1e9, peaks_source="measured",
)  # fmt: skip


def timed(ms, **more):
    found = Quantiles(p10=0.9 * ms, p50=ms, p90=1.2 * ms)
    return Timed(fused=found, single=found, samples=9, outliers=0, **more)


def step_ms(cell):
    """0.5 fixed, and per layer 0.3 of arithmetic and 0.2 of collectives; 0.1 per further token."""
    per_layer = 0.3 if cell.apart or cell.seat.placement == "leader" else 0.5
    return 0.5 + cell.shape.num_layers * per_layer + 0.1 * (cell.tokens - 1)


def round_ms(cell):
    """A verdict takes 0.4 and each draft's draw 0.05 beyond the passes; the broadcast 0.1."""
    leads = cell.seat.placement == "leader" or not cell.k
    score = 0.5 + 6 * 0.5 + 0.1 * cell.k
    if not cell.k:
        return score + 0.1 + 0.4
    one = 0.5 + cell.shape.num_layers * (0.3 if leads else 0.5)
    return score + 0.1 * leads + one * cell.k + 0.1 + 0.4 + 0.05 * cell.k


PLAN = plan(
    tokens=(1, 2, 4), drafts=(1, 2, 3, 4), timed_drafts=(1, 4), timed_drafters=("small",), prompts=()
)  # fmt: skip
STEPS = [*PLAN.target_steps(), *PLAN.other_steps()]
TIMES = {cell.key: timed(step_ms(cell), reduces=2 * cell.shape.num_layers + 1, gathers=1)
         for cell in STEPS} | {cell.key: timed(round_ms(cell)) for cell in PLAN.rounds()}  # fmt: skip


def test_two_depths_with_and_without_collectives_tell_a_layers_parts():
    (layer,) = profile_results.layers(PLAN, TIMES, MACHINE)
    assert layer.arithmetic_us == pytest.approx(300)
    assert layer.collective_us == pytest.approx(200)
    assert layer.fixed_us == pytest.approx(500)
    assert layer.expected_collective_us == pytest.approx(200)
    (said,) = profile_results.disagreements([layer])
    assert "they agree (+0%)" in said
    slow = dataclasses.replace(layer, collective_us=300.0)
    assert "they disagree (+50%)" in next(profile_results.disagreements([slow]))


def test_steps_say_what_collectives_a_layer_has_and_what_they_cost():
    steps = profile_results.steps(STEPS, TIMES, MESH, "float32")
    one = next(s for s in steps if (s.model, s.tokens) == ("target", 1))
    assert one.collectives_per_layer == 2
    # 1.2 ms go with all 14 collectives, of which 12 are the layers'.
    assert one.layer_collective_us == pytest.approx(1e3 * 1.2 * 12 / 14 / 6)
    four = next(s for s in steps if (s.model, s.tokens) == ("target", 4))
    assert four.layer_collective_us is None
    led = next(s for s in steps if s.placement == "leader")
    assert (led.collectives_per_layer, led.layer_collective_us) == (0, None)


def test_bandwidth_is_of_the_memory_that_chips_share():
    steps = profile_results.steps(STEPS, TIMES, MESH, "float32")
    led = next(s for s in steps if s.placement == "leader" and s.tokens == 1)
    read = 4 * SMALL.shape.read_params() + 257 * SMALL.shape.cache_bytes_per_token("float32")
    assert led.bandwidth_utilisation == pytest.approx(read / (led.latency_ms.p50 / 1e3) / 16e9)


def test_single_calls_are_steps_of_their_own():
    cell = PLAN.target_steps()[0]
    both = dataclasses.replace(TIMES[cell.key], single=Quantiles(p10=4.0, p50=5.0, p90=6.0))
    steps = profile_results.steps([cell], {**TIMES, cell.key: both}, MESH, "float32")
    assert [(s.dispatch, s.latency_ms.p50) for s in steps] == [("fused", 3.5), ("single", 5.0)]


def test_a_program_with_other_collectives_than_the_formula_is_reported():
    assert not list(profile_results.unexpected_collectives(STEPS, TIMES))
    cell = next(c for c in STEPS if isinstance(c, StepCell) and not c.apart)
    times = {**TIMES, cell.key: dataclasses.replace(TIMES[cell.key], reduces=99)}
    (said,) = profile_results.unexpected_collectives(STEPS, times)
    assert "99 all-reduces" in said
    assert "the shape's formula says 13 and 1" in said


def test_rounds_that_were_not_timed_are_their_parts_and_what_others_take_beyond_theirs():
    steps = profile_results.steps(STEPS, TIMES, MESH, "float32")
    rounds = profile_results.rounds(PLAN, steps, TIMES, MACHINE)
    by_cell = zip(PLAN.all_rounds(), rounds, strict=True)
    measured = 0
    for cell, found in by_cell:
        assert found.round_ms.p50 == pytest.approx(round_ms(cell)), cell.key
        assert found.source == ("measured" if cell.key in TIMES else "predicted")
        measured += found.source == "measured"
        assert found.broadcast_us == (100 if cell.seat.placement == "leader" or not cell.k else 0)
    assert measured == 5
    assert len(rounds) == 17


def test_observations_leave_prompts_out_and_removed_collectives_are_removed():
    prompts = plan(prompts=(32,))
    cells = [*prompts.target_steps(), *prompts.other_steps()]
    times = {cell.key: timed(step_ms(cell)) for cell in cells}
    observed = profile_results.observations(cells, times, MACHINE)
    assert len(observed) == len(cells) - 1
    assert [one.judged for one in observed] == [not c.apart for c in cells if c.phase != "prefill"]
    assert sum(one.work.reduces == 0 for one in observed) == sum(
        cell.apart or cell.seat.placement == "leader" for cell in cells
    )
    assert TARGET.shape in {one.shape for one in observed}
