"""Decisions on constructed cases, whose answers are known, and what is refused."""

import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest

from drafters import model_card
from drafters.mesh import Topology
from drafters.model_card import TrainingCost
from drafters.shapes import TransformerShape
from pipeline import confirmation, decision, figures_codesign, report_evidence
from pipeline.acceptance import constant_curve
from pipeline.acceptance_artifact import Acceptance, Interval, Result
from pipeline.candidates import Forecast, Option, Traffic, chip_bytes, loops
from pipeline.codesign import codesign
from pipeline.confirmation import Confirm, Confirmation, Played
from pipeline.core import artifacts
from pipeline.core.errors import UserError
from pipeline.core.run_dir import RunDir
from pipeline.latency import TERMS
from pipeline.profile_artifact import (
    LatencyModel,
    Profile,
    ProfiledTopology,
    Quantiles,
    Round,
    Step,
)
from pipeline.trials import Asked, Trial
from pipeline.unseen_shapes import ShapeGrid
from serving.choosing import choice_of
from serving.decode import Prompt
from serving.plan import Plan
from serving.sampling import SamplingParams

PLAIN_MS = 20.0
LINEAGE = artifacts.Lineage(config="", seed=0, versions={}, machine=artifacts.this_machine())


@pytest.fixture(autouse=True)
def _quiet(request, monkeypatch):
    """Drawing takes longer than deciding."""
    if "figures" not in request.node.name:
        monkeypatch.setattr("pipeline.figures_codesign.all_of", lambda *_: {})
        monkeypatch.setattr("pipeline.report.update", lambda _: None)


def round_of(drafter: str, k: int, ms: float, **changes) -> Round:
    fields = {
        "drafter": drafter,
        "placement": "sharded",
        "chips_per_copy": 16,
        "k": k,
        "rule": "token",
        "batch": 1,
        "context": 256,
        "draft_ms": 0.0,
        "score_ms": ms,
        "broadcast_us": 0.0,
        "round_ms": Quantiles(p10=0.98 * ms, p50=ms, p90=1.02 * ms),
    }
    return Round(**{**fields, **changes})


def rounds(drafter: str, draft_ms: float, ks=(1, 3, 5, 7), **changes) -> list[Round]:
    """Rounds of K drafts that cost `draft_ms` each, and as much as a plain step for the target."""
    return [round_of(drafter, k, PLAIN_MS + k * draft_ms, **changes) for k in ks]


def result(drafter: str, alpha: float, task: str = "code", sd: float = 0.0, **changes) -> Result:
    fields = {
        "drafter": drafter,
        "task": task,
        "warp": {"temperature": 0.8, "top_p": 0.95},
        "rule": "token",
        "k": 8,
        "requests": 32,
        "rounds": 900,
        "emitted": 4096,
        "alpha": alpha,
        "alpha_overlap": alpha,
        "alpha_sd_between_requests": sd,
        "alpha_interval": Interval(value=alpha, low=max(0.0, alpha - 0.01), high=alpha + 0.01),
    }
    fields |= changes
    curve = constant_curve(alpha, fields["k"])
    return Result(
        **fields, tau=1 + curve.sum(), conditional=(alpha,) * fields["k"], survival=tuple(curve)
    )


PLAIN = round_of("", 0, PLAIN_MS)


def profile_of(*timed: Round, **changes) -> Profile:
    topology = ProfiledTopology(
        name="host_16",
        platform="cpu",
        device_kind="cpu",
        num_chips=16,
        mesh={"x": 2, "y": 2, "z": 4},
        hbm_bytes_per_s=1e9,
        flop_per_s=1e9,
        peaks_source="measured",
    )
    fields = {"lineage": LINEAGE, "target": "target", "topology": topology, "rounds": timed}
    return Profile(**{**fields, "collectives": (), "alpha_beta": {}, "steps": (), **changes})


def written(folder, profile: Profile, *results: Result, lineage=LINEAGE) -> RunDir:
    run = RunDir.at(folder)
    artifacts.write(run.profile, profile)
    artifacts.write(run.acceptance, Acceptance(lineage=lineage, target="target", results=results))
    return run


def decided(folder, profile: Profile, *results: Result, **settings) -> Plan:
    run = written(folder, profile, *results)
    codesign(run_dir=str(run.root), **settings)
    return artifacts.read(run.plan, Plan)


# --------------------------------------------------------------------------------------------------
# Verdicts
# --------------------------------------------------------------------------------------------------


def test_a_fast_drafter_that_is_accepted_is_chosen(tmp_path):
    plan = decided(tmp_path, profile_of(PLAIN, *rounds("wide", 1.0)), result("wide", 0.85))
    assert (plan.verdict, plan.drafter, plan.placement) == ("speculate", "wide", "sharded")
    # argmin of (20 + K) / tau(K), which lies between measured K.
    costs = {k: (PLAIN_MS + k) / (1 + constant_curve(0.85, k).sum()) for k in range(1, 8)}
    assert plan.k == min(costs, key=lambda k: costs[k])
    assert plan.baseline_ms_per_token == PLAIN_MS
    assert plan.details["gain"]["low"] > 1
    assert {one.k for one in plan.candidates} == set(range(8))
    assert plan.predicted == plan.candidates[0].predicted
    assert choice_of(str(tmp_path), plan.target, None, None).k == plan.k


def test_a_drafter_as_slow_as_the_target_does_not_pay(tmp_path):
    profile = profile_of(PLAIN, *rounds("twin", PLAIN_MS))
    plan = decided(tmp_path, profile, result("twin", 0.9))
    assert (plan.verdict, plan.drafter, plan.k) == ("do_not_speculate", "", 0)
    assert plan.predicted.ms_per_token == pytest.approx(PLAIN_MS)
    assert "Nothing beats plain decoding" in plan.reason
    assert plan.details["tipping_points"]["round_ms"] < 2 * PLAIN_MS
    assert choice_of(str(tmp_path), plan.target, None, None).k == 0


def test_drafts_that_are_never_accepted_do_not_pay(tmp_path):
    profile = profile_of(PLAIN, *rounds("noise", 0.1))
    plan = decided(tmp_path, profile, result("noise", 0.0))
    assert plan.verdict == "do_not_speculate"
    assert plan.details["gain"]["value"] < 1


def test_a_gain_within_the_noise_is_not_taken(tmp_path):
    """1% faster by prediction, with rounds that scatter by 2% and acceptance known to 1%."""
    profile = profile_of(PLAIN, round_of("wide", 1, PLAIN_MS * 1.8))
    assert (
        1 < decided(tmp_path / "a", profile, result("wide", 0.83)).details["gain"]["value"] < 1.03
    )
    assert decided(tmp_path / "b", profile, result("wide", 0.83)).verdict == "do_not_speculate"
    assert decided(tmp_path / "c", profile, result("wide", 0.99)).verdict == "speculate"


def test_the_tail_moves_the_choice_to_fewer_drafts(tmp_path):
    """Chen et al. 2302.01318: the rounds of Figure 1, requests as different as HumanEval's."""
    loop_ms = (16.32, 18.19, 20.30, 22.79, 25.01, 27.07, 28.46)
    timed = [round_of("wide", k, ms) for k, ms in enumerate(loop_ms, 1)]
    profile = profile_of(round_of("", 0, 14.11), *timed)

    def best(objective: str, sd: float) -> int:
        folder = tmp_path / f"{objective}{sd}"
        return decided(folder, profile, result("wide", 0.8845, sd=sd), objective=objective).k

    assert best("mean", 0.09) == 7
    assert best("p99", 0.09) == 2
    assert best("p99", 0.0) >= 5


def test_gaps_between_tokens_are_shortest_without_speculation(tmp_path):
    plan = decided(
        tmp_path, profile_of(PLAIN, *rounds("wide", 1.0)), result("wide", 0.9), objective="p99_gap"
    )
    assert plan.verdict == "do_not_speculate"
    assert "longer than a plain step" in plan.reason


def test_of_equals_the_one_with_fewer_drafts_is_chosen(tmp_path):
    """No draft behind the first is accepted and drafting costs nothing: K = 1..7 are equal."""
    accepted = dataclasses.replace(
        result("wide", 0.9), survival=(0.9, *[0.0] * 7), conditional=(0.9, *[0.0] * 7)
    )
    timed = [round_of("wide", k, PLAIN_MS) for k in (1, 7)]
    twins = [dataclasses.replace(r, drafter="also") for r in timed]
    plan = decided(
        tmp_path,
        profile_of(PLAIN, *timed, *twins),
        accepted,
        dataclasses.replace(accepted, drafter="also"),
    )
    assert (plan.drafter, plan.k) == ("also", 1)
    assert plan.details["regret_of_runner_up"] == pytest.approx(0)


def test_placements_compete(tmp_path):
    timed = [
        *rounds("wide", 2.0),
        *rounds("wide", 1.0, placement="copies", chips_per_copy=4),
        *rounds("wide", 3.0, placement="leader", chips_per_copy=1),
    ]
    plan = decided(tmp_path, profile_of(PLAIN, *timed), result("wide", 0.85))
    assert (plan.placement, plan.chips_per_copy) == ("sharded", 4)
    choice = choice_of(str(tmp_path), plan.target, None, None)
    assert (choice.chips_per_copy, choice.leader) == (4, False)


def test_the_block_rule_is_chosen_where_it_accepts_more(tmp_path):
    block = result("wide", 0.88, k=5, rule="block")
    profile = profile_of(PLAIN, *rounds("wide", 1.0))
    plan = decided(tmp_path, profile, result("wide", 0.8), block)
    assert (plan.rule, plan.k) == ("block", 5)


def test_batches_have_their_own_k(tmp_path):
    """A busier target leaves less to gain, as in SmartSpec 2406.14066."""
    busy = [
        round_of("", 0, 30.0, batch=16),
        *(round_of("wide", k, 30.0 * (1 + k), batch=16) for k in (1, 7)),
    ]
    profile = profile_of(PLAIN, *rounds("wide", 1.0), *busy)
    plan = decided(tmp_path, profile, result("wide", 0.8))
    by_batch = {row["batch"]: row["k"] for row in plan.details["by_batch"]}
    assert by_batch[1] == plan.k > 0
    assert by_batch[16] == 0


def test_lookups_are_judged_at_their_own_batch():
    """Of 16 rows one nearly always has drafts; alone a row seldom pays for them, whatever the traffic is."""
    busy = [round_of("", 0, 40.0, batch=16), round_of("ngram", 4, 100.0, batch=16)]
    timed = [PLAIN, round_of("ngram", 4, 28.0), *busy]
    found = [result("ngram", 0.6, drafting=0.3)]
    chosen = [
        decision.best_by_batch(timed, Forecast(found, Traffic(batch=batch)), "mean")
        for batch in (1, 16)
    ]
    assert chosen[0] == chosen[1]
    assert [row["k"] > 0 for row in chosen[0]] == [True, False]


def test_gaps_with_drafts_count_where_they_are_not_too_rare():
    timed = loops([PLAIN, round_of("ngram", 4, 28.0)], 1, 256)
    for drafting, gap in ((0.005, PLAIN_MS), (0.2, 28.0)):
        forecast = Forecast([result("ngram", 0.01, drafting=drafting)], Traffic())
        one = next(j for j in decision.judged(forecast, timed) if j.option.k == 4)
        assert one.predicted.p99_gap_ms == pytest.approx(gap, rel=0.01)


def test_what_would_change_the_decision(tmp_path):
    """At the tipping points the candidate is as good as plain decoding."""
    plan = decided(tmp_path, profile_of(PLAIN, *rounds("wide", 1.0)), result("wide", 0.8))
    points = plan.details["tipping_points"]
    round_ms = PLAIN_MS + plan.k
    assert points["round_ms"] == pytest.approx(
        round_ms * PLAIN_MS / plan.predicted.ms_per_token, rel=1e-6
    )
    worse = result("wide", points["alpha"])
    forecast = Forecast([worse], Traffic())
    option = Option("wide", plan.k, "token", "sharded", 16)
    assert forecast.times(option, round_ms).ms_per_token == pytest.approx(PLAIN_MS, rel=1e-3)
    assert f"below {points['alpha']:.3f}" in plan.reason


def test_tasks_have_equal_shares(tmp_path):
    results = [result("wide", 0.9), result("wide", 0.6, task="prose")]
    plan = decided(tmp_path, profile_of(PLAIN, *rounds("wide", 1.0)), *results)
    alone = [
        Forecast([r], Traffic()).times(
            Option("wide", plan.k, "token", "sharded", 16), PLAIN_MS + plan.k
        )
        for r in results
    ]
    mean = np.mean([times.ms_per_token for times in alone])
    assert plan.predicted.ms_per_token == pytest.approx(mean, rel=1e-6)
    by_task = {task: found["mean"]["k"] for task, found in plan.details["by_task"].items()}
    assert by_task["code"] > by_task["prose"]
    assert plan.workload.tasks == ("code", "prose")


def test_one_task_under_two_warps_is_two_tasks():
    hot = result("wide", 0.5, warp={"temperature": 1.5, "top_p": 1.0})
    forecast = Forecast([result("wide", 0.9), hot], Traffic(tasks=("code",)))
    assert forecast.tasks == ("code (temperature 0.8, top_p 0.95)", "code (temperature 1.5)")
    assert Forecast([result("wide", 0.9), hot], Traffic(tasks=forecast.tasks[1:])).tasks == (
        forecast.tasks[1],
    )


# --------------------------------------------------------------------------------------------------
# Parts
# --------------------------------------------------------------------------------------------------


def test_round_times_between_measured_k_and_nearest_contexts():
    timed = [PLAIN, round_of("wide", 2, 22.0), round_of("wide", 6, 30.0)]
    timed.append(round_of("wide", 2, 99.0, context=2048))
    found = {o.k: loop.ms for o, loop in loops(timed, 1, 300).items() if o.rule == "token"}
    assert found == pytest.approx({0: PLAIN_MS, 2: 22.0, 3: 24.0, 4: 26.0, 5: 28.0, 6: 30.0})
    assert loops(timed, 2, 300) == {}


def test_a_round_without_drafts_costs_a_step():
    timed = loops([PLAIN, round_of("ngram", 4, 2 * PLAIN_MS)], 1, 300)
    option = Option("ngram", 4, "token", "sharded", 16)
    seldom = [result("ngram", 0.5, drafting=0.25)]
    assert Forecast(seldom, Traffic()).loop(option, timed).ms == pytest.approx(1.25 * PLAIN_MS)
    # Of several rows one with drafts is enough.
    pairs = Forecast(seldom, Traffic(batch=2))
    assert pairs.loop(option, timed).ms == pytest.approx((2 - 0.75**2) * PLAIN_MS)
    always = Forecast([result("ngram", 0.5)], Traffic())
    assert always.loop(option, timed) == timed[option]


def test_tasks_without_drafts_have_more_rounds():
    """The mean over tasks is that of the tasks; the 99th percentile of gaps is a round with drafts."""
    timed = loops([PLAIN, round_of("ngram", 4, 2 * PLAIN_MS)], 1, 300)
    option = Option("ngram", 4, "token", "sharded", 16)
    both = [
        result("ngram", 0.95, task="copies", drafting=1.0),
        result("ngram", 0.05, task="prose", drafting=0.08),
    ]
    means = []
    for results in (both, both[:1], both[1:]):
        one = next(
            j
            for j in decision.judged(Forecast(results, Traffic(tokens=1000)), timed)
            if j.option == option
        )
        assert one.predicted.p99_gap_ms == 2 * PLAIN_MS
        means.append(one.predicted.ms_per_token)
    assert means[0] == pytest.approx(np.mean(means[1:]), rel=0.01)


def test_a_model_behind_a_lookup_has_rounds_of_both():
    """Half of its rounds are copies: the lookup's, and one draft's time to take in what was committed."""
    both = Option("wide+ngram", 4, "token", "sharded", 16)
    rounds = [PLAIN, round_of("wide", 4, 36.0), round_of("ngram", 4, 28.0)]
    assert both not in loops(rounds[:2], 1, 300)
    timed = loops(rounds, 1, 300)
    forecast = Forecast([result("wide+ngram", 0.5, looked_up=0.5)], Traffic())
    assert forecast.loop(both, timed).ms == pytest.approx((36 + (28 + 8 / 4)) / 2)
    twice = forecast.at_batch(2)  # both rows must copy
    assert twice.loop(both, timed).ms == pytest.approx(36 - (36 - 30) / 4)
    never = Forecast([result("wide+ngram", 0.5)], Traffic())
    assert never.loop(both, timed).ms == 36
    assert [one.option.drafter for one in decision.judged(forecast, timed)] == ["", "wide+ngram"]


def test_a_run_of_a_lookup_leaves_its_rarer_gaps_to_the_law():
    """It measures the mean round; the 99th percentile is one with drafts, a fifth slower than profiled."""
    timed = loops([PLAIN, round_of("ngram", 4, 2 * PLAIN_MS)], 1, 300)
    forecast = Forecast([result("ngram", 0.5, drafting=0.25)], Traffic())
    one = next(j for j in decision.judged(forecast, timed) if j.option.k == 4)
    times = dataclasses.replace(one.predicted, p99_gap_ms=1.5 * PLAIN_MS)
    longest = timed[one.option].ms
    ran = decision.with_measurement(one, forecast, times, 1.5 * PLAIN_MS, None, longest)
    assert ran.measured
    assert ran.measured.p99_gap_ms is None
    assert ran.score("p99_gap") == pytest.approx(1.2 * 2 * PLAIN_MS)
    always = Forecast([result("ngram", 0.5)], Traffic())
    one = next(j for j in decision.judged(always, timed) if j.option.k == 4)
    for round_ms in np.random.default_rng(0).uniform(10, 60, 200):
        ran = decision.with_measurement(one, always, times, float(round_ms), None, longest)
        assert ran.measured == times


def test_chip_bytes_are_those_of_whole_models_where_one_chip_holds_all():
    shape = TransformerShape(
        vocab_size=320,
        num_layers=2,
        width=64,
        num_heads=16,
        num_kv_heads=4,
        head_dim=8,
        mlp_width=96,
    )
    alone = chip_bytes(shape, 1, 10, "float32")
    assert alone == shape.weight_bytes("float32") + 10 * shape.cache_bytes_per_token("float32")
    # All divides but norms; key/value heads are repeated four times.
    assert alone / 16 < chip_bytes(shape, 16, 10, "float32") < alone / 8


def test_measured_candidates_are_the_only_ones_in_the_running():
    """The law with the measured round decides between means that are close; a slow one is out."""
    forecast = Forecast([result("wide", 0.8)], Traffic())
    timed = loops([PLAIN, *rounds("wide", 1.0)], 1, 256)
    field = decision.judged(forecast, timed)

    def ran(k: int, ms_per_token: float, round_ms: float) -> decision.Judged:
        one = next(j for j in field if j.option.k == k and j.option.rule == "token")
        times = dataclasses.replace(one.predicted, ms_per_token=ms_per_token)
        gain = decision.Gain(PLAIN_MS / ms_per_token, PLAIN_MS / ms_per_token - 0.1, 9.0)
        return decision.with_measurement(one, forecast, times, round_ms, gain if k else None)

    plain = ran(0, PLAIN_MS, PLAIN_MS)
    close = [plain, ran(3, 8.0, 25.0), ran(5, 8.1, 25.0), *field[3:4]]
    assert decision.decide(close, "mean").chosen.option.k == 5
    far = [plain, ran(3, 8.0, 25.0), ran(5, 8.5, 25.0)]
    assert decision.decide(far, "mean").chosen.option.k == 3
    slower = [plain, ran(3, 21.0, 25.0), ran(5, 20.5, 25.0)]
    assert not decision.decide(slower, "mean").speculates


def ran_at(forecast, timed, paces: dict) -> list[decision.Judged]:
    """Every token-rule option of `paces`: drafter -> (ms per token, gain), with a real run."""
    field = decision.judged(forecast, timed)
    found = [j for j in field if j.option.drafter in paces and j.option.rule == "token"]

    def ran(one: decision.Judged) -> decision.Judged:
        pace, gain = paces[one.option.drafter]
        times = dataclasses.replace(one.predicted, ms_per_token=pace)
        return decision.with_measurement(one, forecast, times, timed[one.option].ms, gain)

    return list(map(ran, found))


def test_a_fast_candidate_that_may_be_luck_does_not_hide_one_that_is_not():
    timed = loops([PLAIN, round_of("shaky", 1, 24.0), round_of("sure", 1, 24.4)], 1, 256)
    forecast = Forecast([result("shaky", 0.8), result("sure", 0.75)], Traffic())
    paces = {
        "": (PLAIN_MS, None),
        "shaky": (13.0, decision.Gain(20 / 13, 0.95, 2.5)),
        "sure": (13.5, decision.Gain(20 / 13.5, 1.4, 1.56)),
    }
    decided = decision.decide(ran_at(forecast, timed, paces), "mean")
    assert decided.chosen.option.drafter == "sure"
    assert decided.gain.low == 1.4


def test_what_is_called_measured_was():
    """One pair of answers has no interval of its own: the ratio is that of its times all the same."""
    timed = loops([PLAIN, round_of("wide", 3, 28.0)], 1, 256)
    forecast = Forecast([result("wide", 0.8)], Traffic())
    field = ran_at(forecast, timed, {"": (24.0, None), "wide": (18.0, None)})
    mean = decision.decide(field, "mean")
    assert mean.gain.value == pytest.approx(24 / 18)
    assert "1.33 times as fast (measured, " in decision.reason(mean, {})
    tail = decision.decide(field, "p99")
    assert "(by the law with measured rounds, " in decision.reason(tail, {})


def test_points_that_contradict_the_choice_of_the_runner_up_are_not_said():
    """Measured, `wide` is the better; by the law it is the worse: no acceptance makes both equal."""
    timed = loops([PLAIN, round_of("wide", 3, 28.0), round_of("mid", 3, 27.0)], 1, 256)
    forecast = Forecast([result("wide", 0.8), result("mid", 0.8)], Traffic())
    gain = decision.Gain(2.0, 1.9, 2.1)
    paces = {"": (PLAIN_MS, None), "wide": (9.0, gain), "mid": (9.9, gain)}
    decided = decision.decide(ran_at(forecast, timed, paces), "mean")
    assert decided.chosen.option.drafter == "wide"
    points = decision.tipping_points(decided, forecast)
    assert points["runner_up_alpha"] is points["runner_up_round_ms"] is None
    assert points["round_ms"] is not None


def test_answers_of_a_batch_share_its_noise():
    """Two batches of eight with 10% noise of their own: 400 runs, 95% within four standard errors."""
    rng = np.random.default_rng(0)
    held = 0
    for _ in range(400):
        paces = 20 * np.exp(0.1 * rng.normal(size=(2, 4))).repeat(8, axis=1)
        played = tuple(
            Played(
                arm=arm, lap=0, task="code", ms_per_token=tuple(paces[arm] / (1, 2)[arm]), emitted=(96,) * 32,
                rounds=40, round_s=1.0, accepted=1, evaluated=1, batch=8,
            )
            for arm in (0, 1)
        )  # fmt: skip
        gain = Confirmation(lineage=LINEAGE, arms=("plain decoding", "x"), played=played).gain(1)
        held += gain.low <= 2 <= gain.high
    assert held / 400 == pytest.approx(0.95, abs=4 * (0.95 * 0.05 / 400) ** 0.5)


def test_gain_is_of_pairs_and_its_interval_holds_it():
    def played(arm: int, lap: int, paces: tuple[float, ...]) -> Played:
        return Played(
            arm=arm,
            lap=lap,
            task="code",
            ms_per_token=paces,
            emitted=(96, 96),
            rounds=40,
            round_s=1.0,
            accepted=100,
            evaluated=120,
        )

    found = Confirmation(
        lineage=LINEAGE,
        arms=("plain decoding", "x"),
        played=(
            *(played(0, lap, (20.0, 22.0)) for lap in range(2)),
            *(played(1, lap, (5.0, 5.5 + lap)) for lap in range(2)),
        ),
    )
    gain = found.gain(1)
    assert gain.value == pytest.approx(84 / 22)
    assert gain.low < gain.value < gain.high
    assert found.round_ms(1) == pytest.approx(25.0)
    assert found.times(0, 96).p50_ms == pytest.approx(96 * 21)
    single = dataclasses.replace(found, played=(played(0, 0, (20.0,)), played(1, 0, (5.0,))))
    assert single.gain(1) is None


def test_the_interval_of_a_gain_holds_the_truth_as_often_as_it_says():
    """Four pairs, log-normal: 400 runs, 95% within four standard errors."""
    rng = np.random.default_rng(0)
    held = 0
    for _ in range(400):
        paces = 20 * np.exp(0.1 * rng.normal(size=(2, 4)))
        played = tuple(
            Played(
                arm=arm, lap=0, task="code", ms_per_token=tuple(paces[arm] / (1, 2)[arm]), emitted=(96,) * 4,
                rounds=40, round_s=1.0, accepted=1, evaluated=1,
            )
            for arm in (0, 1)
        )  # fmt: skip
        gain = Confirmation(lineage=LINEAGE, arms=("plain decoding", "x"), played=played).gain(1)
        held += gain.low <= 2 <= gain.high
    assert held / 400 == pytest.approx(0.95, abs=4 * (0.95 * 0.05 / 400) ** 0.5)


def test_one_pair_of_answers_is_no_proof():
    """Faster in a single pair, but not by more than what its acceptance may differ."""
    shaky = dataclasses.replace(result("wide", 0.5), requests=1, rounds=10)
    forecast = Forecast([shaky], Traffic())
    field = decision.judged(forecast, loops([PLAIN, *rounds("wide", 1.0)], 1, 256))
    one = next(j for j in field if j.option.k == 3 and j.option.rule == "token")
    tau = 1 + sum(0.5**i for i in (1, 2, 3))
    times = dataclasses.replace(one.predicted, ms_per_token=0.99 * PLAIN_MS)
    measured = decision.with_measurement(one, forecast, times, 0.99 * tau * PLAIN_MS, None)
    assert measured.uncertainty > 0.05
    decided = decision.decide([field[0], measured], "mean")
    assert not decided.speculates
    points = decision.tipping_points(decided, forecast)
    assert "That would change" not in decision.reason(decided, points)


@pytest.mark.parametrize(("low", "high"), [(0.0, 0.9), (0.01, 0.9), (0.1, 1.0)])
def test_an_interval_up_to_the_edge_is_no_less_uncertain(low, high):
    found = result("wide", 0.5)
    wide = dataclasses.replace(
        found, alpha_interval=dataclasses.replace(found.alpha_interval, low=low, high=high)
    )
    field = decision.judged(
        Forecast([wide], Traffic()), loops([PLAIN, *rounds("wide", 1.0)], 1, 256)
    )
    assert all(one.uncertainty > 0.15 for one in field if one.option.k)


def test_candidates_are_played_in_whole_batches(monkeypatch):
    """Prompts that do not suffice are asked again, with other seeds."""
    asked = [
        Prompt(index=i, text="x", tokens=(1, 2), params=SamplingParams(max_tokens=9))
        for i in range(3)
    ]
    monkeypatch.setattr(
        confirmation, "ask", lambda *_, **__: Asked(prompts=(), requests=tuple(asked))
    )
    pair = SimpleNamespace(context=64, tokenizer=None)
    for batch, prompts, expected in ((1, 2, 2), (4, 2, 4), (2, 3, 4), (8, 8, 8)):
        bench = SimpleNamespace(
            traffic=Traffic(batch=batch, tokens=16), settings=SimpleNamespace(prompts=prompts)
        )
        trial = SimpleNamespace(samples=1, sampling=SamplingParams(), name="code")
        found = confirmation._prompts(bench, pair, trial)
        assert [prompt.index for prompt in found] == list(range(expected))


# --------------------------------------------------------------------------------------------------
# Shapes that are not trained, figures
# --------------------------------------------------------------------------------------------------

SHAPE = TransformerShape(
    vocab_size=320, num_layers=4, width=64, num_heads=16, num_kv_heads=16, head_dim=4, mlp_width=96
)
GRID = ShapeGrid(widths=(64, 128), depths=(1, 2), heads=(16,), mlp_widths=(96, 128))


def with_latency(*names: str) -> Profile:
    """Steps of the target and of drafters of 1, 2, ... layers, and a latency model of depth alone."""
    shapes = {"target": SHAPE}
    shapes |= {n: dataclasses.replace(SHAPE, num_layers=i) for i, n in enumerate(names, 1)}
    steps = [
        Step(
            model=name,
            shape=artifacts.to_json(shape),
            chips=16,
            chips_per_copy=16,
            placement="sharded",
            batch=1,
            tokens=1,
            context=256,
            capacity=512,
            phase="decode",
            dispatch="fused",
            latency_ms=Quantiles(p10=1, p50=1, p90=1),
            collectives_per_layer=2.0,
            layer_collective_us=None,
            bandwidth_utilisation=0.1,
            flop_utilisation=0.1,
            source="measured",
        )
        for name, shape in shapes.items()
    ]
    model = LatencyModel(
        terms={name: 100.0 * (name == "layer_us") for name in TERMS},
        fitted_steps=8,
        held_out_steps=8,
        median_error=0.05,
        worst_error=0.1,
    )
    timed = [r for name in names for r in rounds(name, 1.0)]
    return profile_of(PLAIN, *timed, steps=tuple(steps), latency_model=model)


def test_shapes_that_are_not_trained_are_proposed(tmp_path, capsys):
    names = ("one", "two", "three")
    results = [result(n, a) for n, a in zip(names, (0.7, 0.75, 0.8), strict=True)]
    plan = decided(tmp_path, with_latency(*names), *results, grid=GRID)
    found = plan.details["unseen"]
    assert found["considered"] > found["unpredicted"] == 0
    assert (tmp_path / "next_drafters.gin").read_text() == found["gin"]
    assert f"{found['next'][0]['layers']} layers" in capsys.readouterr().err
    # A lost file comes back with what is up to date.
    (tmp_path / "next_drafters.gin").unlink()
    codesign(run_dir=str(tmp_path), grid=GRID)
    assert (tmp_path / "next_drafters.gin").read_text() == found["gin"]


def test_shapes_that_are_not_expected_to_be_better_are_not_proposed(tmp_path, capsys):
    names = ("one", "two", "three")
    results = [result(n, a) for n, a in zip(names, (0.7, 0.75, 0.8), strict=True)]
    plan = decided(tmp_path, with_latency(*names), *results, grid=GRID, objective="p99_gap")
    assert plan.verdict == "do_not_speculate"
    assert (plan.details["unseen"]["next"], plan.details["unseen"]["best_known"]) == ([], PLAIN_MS)
    assert "none can be hoped to beat the 20.00" in capsys.readouterr().err
    assert not (tmp_path / "next_drafters.gin").exists()


def test_two_drafters_are_too_few_to_predict_others(tmp_path):
    plan = decided(
        tmp_path, with_latency("one", "two"), result("one", 0.7), result("two", 0.8), grid=GRID
    )
    assert "2 trained drafters are too few" in plan.details["unseen"]["skipped"]
    assert not (tmp_path / "next_drafters.gin").exists()


def test_without_a_latency_model_nothing_is_predicted(tmp_path):
    profile = profile_of(PLAIN, *rounds("wide", 1.0))
    plan = decided(tmp_path, profile, result("wide", 0.8), grid=GRID)
    assert "no latency model" in plan.details["unseen"]["skipped"]


def test_figures_and_events(tmp_path):
    names = ("one", "two", "three")
    results = [result(n, a) for n, a in zip(names, (0.7, 0.75, 0.8), strict=True)]
    profile = with_latency(*names)
    plan = decided(tmp_path, profile, *results, grid=GRID)
    ran = dataclasses.replace(
        plan,
        candidates=tuple(dataclasses.replace(c, measured=c.predicted) for c in plan.candidates[:5]),
    )
    acceptance = artifacts.read(RunDir.at(tmp_path).acceptance, Acceptance)
    drawn = figures_codesign.all_of(ran, profile, acceptance)
    assert set(drawn) == {"figure_1", "candidates", "predicted_and_measured", "shapes_not_trained"}
    assert len(drawn["figure_1"].axes) == 3
    # Nothing to draw is no error.
    nothing = dataclasses.replace(plan, candidates=(), details={})
    assert figures_codesign.all_of(nothing, profile, acceptance) == {}
    (events,) = RunDir.at(tmp_path).tensorboard("codesign").iterdir()
    assert events.stat().length > 10_000
    assert RunDir.at(tmp_path).report.exists()


# --------------------------------------------------------------------------------------------------
# Artifacts
# --------------------------------------------------------------------------------------------------


def test_the_second_run_does_nothing(tmp_path, capsys):
    run = written(tmp_path, profile_of(PLAIN, *rounds("wide", 1.0)), result("wide", 0.8))
    codesign(run_dir=str(run.root))
    before = run.plan.read_text()
    capsys.readouterr()
    codesign(run_dir=str(run.root))
    assert "is up to date" in capsys.readouterr().err
    assert run.plan.read_text() == before
    # Other evidence, other plan.
    written(tmp_path, profile_of(PLAIN, *rounds("wide", 30.0)), result("wide", 0.8))
    codesign(run_dir=str(run.root))
    assert json.loads(run.plan.read_text())["verdict"] == "do_not_speculate"


@pytest.fixture
def trained(tmp_path, monkeypatch) -> RunDir:
    """A run directory whose drafter "wide" is trained, with evidence about it."""
    card = SimpleNamespace(
        shape=SHAPE, weights_hash="1f", training_cost=TrainingCost(tokens=300_000, hours=0.5)
    )
    monkeypatch.setattr(model_card, "read_card", lambda _: card)
    (tmp_path / "models" / "wide").mkdir(parents=True)
    (tmp_path / "models" / "wide" / "model.json").touch()
    lineage = dataclasses.replace(LINEAGE, weights_hash={"wide": "1f"})
    return written(tmp_path, profile_of(*GOOD), result("wide", 0.8), lineage=lineage)


def test_training_is_paid_back(trained):
    codesign(run_dir=str(trained.root))
    plan = artifacts.read(trained.plan, Plan)
    saved_ms = PLAIN_MS - plan.predicted.ms_per_token
    assert plan.training_cost.tokens == 300_000
    assert plan.training_cost.break_even_tokens == pytest.approx(0.5 * 3.6e6 / saved_ms)
    assert plan.lineage.weights_hash == {"wide": "1f"}


@pytest.mark.parametrize("name", ["profile", "acceptance"])
def test_evidence_of_other_weights_is_refused(name, trained):
    path = getattr(trained, name)
    content = json.loads(path.read_text())
    content["lineage"]["weights_hash"] = {"wide": "other"}
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=rf"{name}.json: made with weights_hash.*'other', but '1f'"):
        codesign(run_dir=str(trained.root))


def test_a_run_that_was_stopped_goes_on(tmp_path, monkeypatch):
    options = [Option("", 0, "token", "sharded", 16), Option("wide", 3, "token", "leader", 1)]
    bench = confirmation.Bench(
        run=RunDir.at(tmp_path),
        topology=Topology(name="host_1", platform="cpu"),
        target="target",
        traffic=Traffic(),
        settings=Confirm(candidates=1, tasks=CONFIRM.tasks, laps=2),
        tasks=("code",),
    )
    turns, stop_at = [], 3

    def play(pair, turn, prompts, batch, job):
        if len(turns) == stop_at:
            raise KeyboardInterrupt
        turns.append((turn.lap, turn.arm))
        return Played(
            **turn._asdict(),
            ms_per_token=(5.0,),
            emitted=(9,),
            rounds=4,
            round_s=0.1,
            accepted=5,
            evaluated=6,
        )

    monkeypatch.setattr(confirmation, "_loaded", lambda bench, options: list(options))
    monkeypatch.setattr(confirmation, "_prompts", lambda *_: [])
    monkeypatch.setattr(confirmation.Bench, "trials", lambda _: {"code": None})
    monkeypatch.setattr(confirmation, "_play", play)
    with pytest.raises(KeyboardInterrupt):
        confirmation.confirm(bench, options, LINEAGE)
    stop_at = 99
    found = confirmation.confirm(bench, options, LINEAGE)
    # There and back, so that neither arm has the better half.
    assert turns == [(0, 1), (0, 0), (1, 0), (1, 1)]
    assert len(found.played) == 4
    confirmation.confirm(bench, options, LINEAGE)
    assert len(turns) == 4
    confirmation.confirm(bench, options[:1], LINEAGE)
    assert len(turns) == 6


@pytest.mark.parametrize(
    ("drafters", "message"),
    [
        (("+ngram",), r"'\+ngram' names no drafter"),
        (("two", "ngram+two"), r"'ngram\+two' names no drafter"),
        (("two", "two"), "codesign.drafters names 'two' twice"),
        (("",), "codesign.drafters names no drafter with ''"),
    ],
)
def test_a_dry_run_refuses_what_names_no_drafter(tmp_path, drafters, message):
    with pytest.raises(UserError, match=message):
        codesign(run_dir=str(tmp_path / "none"), drafters=drafters, dry_run=True)


def test_a_dry_run_needs_nothing_and_writes_nothing(tmp_path, capsys):
    codesign(run_dir=str(tmp_path / "none"), dry_run=True)
    assert "not there yet" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


GOOD = (PLAIN, *rounds("wide", 1.0))
HOST = Topology(name="host_16", platform="cpu", axes=("x",), sizes=(16,))
CONFIRM = Confirm(candidates=1, tasks=(Trial(task=None),))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("profile", "settings", "message"),
    [
        (profile_of(*GOOD), {"target": "other"}, "about the target 'target', not 'other'"),
        (profile_of(*GOOD), {"drafters": ("deep",)}, "no results of the drafter 'deep'"),
        (profile_of(*GOOD), {"drafters": ("wide", "wide")}, "names 'wide' twice"),
        (profile_of(PLAIN), {}, "no rounds of the drafter 'wide'"),
        (profile_of(*GOOD[1:]), {}, "no round of plain decoding"),
        (profile_of(*GOOD), {"traffic": Traffic(batch=4)}, "at batch 4"),
        (profile_of(*GOOD), {"traffic": Traffic(tasks=("xsum",))}, "Traffic.tasks names 'xsum'"),
        (
            profile_of(*GOOD, lineage=dataclasses.replace(LINEAGE, machine="a Cray")),
            {"confirm": CONFIRM, "topology": HOST},
            "machine = 'a Cray'",
        ),
        (
            profile_of(*GOOD),
            {"confirm": CONFIRM, "topology": dataclasses.replace(HOST, name="host_4")},
            "is of the mesh 'host_16'",
        ),
    ],
)
def test_what_does_not_fit_is_refused(profile, settings, message, tmp_path):
    run = written(tmp_path, profile, result("wide", 0.8))
    with pytest.raises(UserError, match=message):
        codesign(run_dir=str(run.root), **settings)
    assert not run.plan.exists()


def test_real_runs_are_repeated_for_nothing_but_what_they_are_of(tmp_path, monkeypatch, capsys):
    """Not for another seed; for another batch; and where they are lost, since the plan rests on them."""
    turns = []

    def play(pair, turn, prompts, batch, job):
        turns.append(turn.arm)
        return Played(
            **turn._asdict(), ms_per_token=(9.0 if turn.arm else PLAIN_MS,) * batch, emitted=(9,) * batch,
            rounds=4, round_s=0.1, accepted=5, evaluated=6, batch=batch,
        )  # fmt: skip

    monkeypatch.setattr(confirmation, "_loaded", lambda bench, options: list(options))
    monkeypatch.setattr(confirmation, "_prompts", lambda *_: [])
    monkeypatch.setattr(confirmation.Bench, "trials", lambda _: {"code": None})
    monkeypatch.setattr(confirmation, "_play", play)
    lineage = dataclasses.replace(LINEAGE, machine=artifacts.this_machine())
    pairs = [dataclasses.replace(r, batch=2) for r in GOOD]
    run = written(tmp_path, profile_of(*GOOD, *pairs, lineage=lineage), result("wide", 0.8))
    once = {"run_dir": str(run.root), "confirm": CONFIRM, "topology": HOST}
    codesign(**once)
    assert len(turns) == 4
    codesign(**once, seed=1)
    codesign(**once, seed=0)
    assert len(turns) == 4
    played = report_evidence.read(run).confirmation
    assert played
    assert len(played.played) == 4
    capsys.readouterr()
    codesign(**once)
    assert "is up to date" in capsys.readouterr().err
    (run.root / confirmation.FILE).unlink()
    codesign(**once)
    assert len(turns) == 8
    codesign(**once, traffic=Traffic(batch=2), config="pairs")
    assert len(turns) == 12


@pytest.mark.parametrize("name", ["profile", "acceptance"])
def test_a_missing_artifact_is_named_with_its_stage(name, tmp_path):
    run = written(tmp_path, profile_of(*GOOD), result("wide", 0.8))
    getattr(run, name).unlink()
    with pytest.raises(
        UserError, match=r"does not exist; run python -m pipeline\.(profile|evaluate)"
    ):
        codesign(run_dir=str(run.root))


def test_an_acceptance_without_results_is_refused(tmp_path):
    run = written(tmp_path, profile_of(*GOOD))
    with pytest.raises(UserError, match="has no results"):
        codesign(run_dir=str(run.root))


def test_settings_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match=r"Traffic.tokens must be positive, not 0"):
        Traffic(tokens=0)
    with pytest.raises(ValueError, match=r"Confirm.tasks is empty"):
        Confirm(candidates=2)


def test_what_an_earlier_decision_proposed_is_forgotten(tmp_path):
    stale = tmp_path / "next_drafters.gin"
    stale.write_text("of an earlier run")
    decided(tmp_path, profile_of(PLAIN, *rounds("wide", 1.0)), result("wide", 0.8))
    assert not stale.exists()


@pytest.mark.parametrize("wrong", [{"chip_bytes": -5.0}, {"suggestions": -1}])
def test_grids_of_shapes_that_make_no_sense(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        dataclasses.replace(GRID, **wrong)


@pytest.mark.parametrize(
    ("traffic", "message"),
    [
        (Traffic(tokens=512), r"Traffic.tokens = 512 do not fit the target's context of 512"),
        (Traffic(context=513), r"Traffic.context = 513 is more than the target's context of 512"),
    ],
)
def test_answers_longer_than_the_context_are_refused(traffic, message, tmp_path):
    """Before anything is worked out: 100 million tokens would take hours."""
    shape = dataclasses.replace(SHAPE, context=512)
    profile = with_latency("wide")
    steps = tuple(dataclasses.replace(s, shape=artifacts.to_json(shape)) for s in profile.steps)
    profile = dataclasses.replace(profile, steps=steps)
    with pytest.raises(UserError, match=message):
        decided(tmp_path, profile, result("wide", 0.85), traffic=traffic)
    with pytest.raises(ValueError, match="at most 1000000"):
        Traffic(tokens=100_000_000)
