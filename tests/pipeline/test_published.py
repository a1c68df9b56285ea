"""The case of Chen et al. 2302.01318, decided by the same code as any other, against what is printed."""

import numpy as np
import pytest

from pipeline import replay
from pipeline.codesign import SETTINGS, codesign
from pipeline.confirmation import Confirm
from pipeline.core import artifacts, config
from pipeline.core.errors import UserError
from pipeline.core.run_dir import RunDir
from pipeline.published_latency import (
    CHIPS,
    DRAFTER,
    SEVEN_B_LAYERS,
    SEVEN_B_PARAMS,
    TARGET,
    Decomposition,
    equal_size_drafters,
)
from pipeline.tasks import JsonlPrompts
from pipeline.trials import Trial
from serving.plan import Plan


@pytest.fixture(scope="module", autouse=True)
def _quiet():
    """Drawing takes longer than deciding."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipeline.figures_codesign.all_of", lambda *_: {})
        patch.setattr("pipeline.report.update", lambda _: None)
        yield


@pytest.fixture(scope="module")
def plan(tmp_path_factory) -> Plan:
    run = RunDir.at(tmp_path_factory.mktemp("chinchilla"))
    configured = config.load(
        codesign, SETTINGS, files=["chinchilla.gin"], supplied={"run_dir": str(run.root)}
    )
    configured.stage(config=configured.config_str)
    return artifacts.read(run.plan, Plan)


def test_mean_times_of_figure_1(plan):
    rows = plan.details["published"]["figure_1"]
    assert len(rows) == 14
    for row in rows:
        assert row["ms"] == pytest.approx(row["printed_ms"], rel=0.01), row


def test_spreads_of_figure_1_need_requests_that_differ(plan):
    """One number per task explains six bands; chance alone explains none of HumanEval's."""
    rows = [row for row in plan.details["published"]["figure_1"] if row["printed_sd_ms"]]
    assert len(rows) == 12
    for row in rows:
        assert row["sd_ms"] == pytest.approx(row["printed_sd_ms"], rel=0.07), row
        assert row["alike_sd_ms"] < 0.87 * row["printed_sd_ms"], row
    humaneval = [row for row in rows if row["task"] == "humaneval"]
    assert all(row["alike_sd_ms"] < 0.36 * row["printed_sd_ms"] for row in humaneval)


def test_the_spread_between_requests():
    found = {
        r.task: r.alpha_sd_between_requests for r in replay.evidence("chen_2023").acceptance.results
    }
    assert found["xsum"] == pytest.approx(0.030, abs=0.002)
    assert found["humaneval"] == pytest.approx(0.085, abs=0.003)


def test_table_1(plan):
    rows = {
        (row["task"], row["decoding"].split()[0]): row
        for row in plan.details["published"]["table_1"]
    }
    for task, printed in (("xsum", 1.92), ("humaneval", 2.46)):
        assert rows[task, "nucleus"]["printed_speedup"] == printed
        assert rows[task, "nucleus"]["speedup"] == pytest.approx(printed, rel=0.03)
    greedy = rows["xsum", "greedy"]
    assert greedy["speedup"] is None
    assert greedy["tokens_per_round"] == pytest.approx(3.26, abs=0.005)


def test_best_draft_lengths(plan):
    best = {
        task: {objective: one["k"] for objective, one in found.items()}
        for task, found in plan.details["by_task"].items()
    }
    assert (best["xsum"]["mean"], best["xsum"]["p99"]) == (3, 3)
    assert (best["humaneval"]["mean"], best["humaneval"]["p99"]) == (7, 2)
    assert best["humaneval"]["p99_gap"] == best["xsum"]["p99_gap"] == 0


@pytest.mark.parametrize(
    ("task", "objective", "k"),
    [("xsum", "mean", 3), ("humaneval", "mean", 7), ("humaneval", "p99", 2)],
)
def test_a_plan_for_one_task(task, objective, k, tmp_path):
    from pipeline.candidates import Traffic

    codesign(
        run_dir=str(tmp_path),
        published="chen_2023",
        traffic=Traffic(tasks=(task,)),
        objective=objective,
    )
    plan = artifacts.read(RunDir.at(tmp_path).plan, Plan)
    assert (plan.verdict, plan.drafter, plan.k) == ("speculate", "drafter_4b", k)
    assert (plan.placement, plan.chips_per_copy) == ("sharded", 16)


def test_parameter_counts_and_weight_floors():
    assert pytest.approx(70.06e9, rel=1e-3) == TARGET.params
    assert pytest.approx(4.12e9, rel=1e-3) == DRAFTER.params
    # 7.297; the paper's text has 7.29 from 70 B.
    assert pytest.approx(7.29, abs=0.01) == TARGET.weight_floor_ms
    assert pytest.approx(0.43, abs=0.005) == DRAFTER.weight_floor_ms


def test_latency_of_the_two_published_times():
    terms = Decomposition.published()
    assert terms.per_layer_ms == pytest.approx(0.0755, abs=2e-4)
    assert terms.fixed_ms == pytest.approx(0.77, abs=0.005)
    assert terms.step_ms(TARGET.params, TARGET.layers) == pytest.approx(14.1)
    assert terms.step_ms(DRAFTER.params, DRAFTER.layers) == pytest.approx(1.8)


def test_eight_wide_layers_beat_deeper_drafters_of_equal_size():
    terms = Decomposition.published()
    deeper = [model for model in equal_size_drafters() if model.layers > DRAFTER.layers]
    assert len(deeper) == 2
    for model in deeper:
        assert model.params == pytest.approx(DRAFTER.params, rel=0.03)
        assert model.width % (128 * CHIPS) == 0
        assert terms.step_ms(model.params, model.layers) > 1.35 * 1.8


def test_what_the_times_leave_open_is_said(plan):
    """The fit contradicts the paper's own third statement, and the plan says so."""
    seven = Decomposition.published().step_ms(SEVEN_B_PARAMS, SEVEN_B_LAYERS)
    assert seven == pytest.approx(3.9, abs=0.05)
    for words in ("does not fit", "3.9 ms", "nothing checks", "85 us", "171 us"):
        assert words in plan.reason


def test_the_plan_says_where_it_comes_from(plan):
    assert set(plan.lineage.inputs) == {"chen_2023_fig1.csv", "chen_2023_table1.csv"}
    assert plan.measured is None
    assert np.isclose(plan.baseline_ms_per_token, 14.11)


def test_an_unknown_paper_is_refused(tmp_path):
    with pytest.raises(UserError, match="'chen_2024' must be 'chen_2023'"):
        codesign(run_dir=str(tmp_path), published="chen_2024")  # pyright: ignore[reportArgumentType]


ASKED = Trial(task=JsonlPrompts(name="asked", path="asked.jsonl"))


@pytest.mark.parametrize(
    "settings", [{"drafters": ("wide",)}, {"confirm": Confirm(candidates=1, tasks=(ASKED,))}]
)
def test_what_a_paper_cannot_honour_is_refused(settings, tmp_path):
    with pytest.raises(UserError, match=r"printed numbers.*leave codesign.drafters and .*confirm"):
        codesign(run_dir=str(tmp_path), published="chen_2023", **settings)
    assert not RunDir.at(tmp_path).plan.exists()
