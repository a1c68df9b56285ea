"""The decision in words, and the table of results with the columns of Chen et al. 2302.01318, Table 1."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from pipeline.candidates import IN_WORDS, Forecast, Option, loops, plain_of, task_labels, traffic_of
from pipeline.report_evidence import Evidence
from pipeline.report_format import Table, count, ms, number, percent, table, times
from pipeline.run_durations import in_words
from serving.pair import model_of
from serving.plan import Candidate, Plan


class Tile(NamedTuple):
    """One figure that a reader should not have to look for."""

    name: str
    value: str
    more: str = ""


def _objective(name: str) -> str:
    words: Mapping[str, str] = {str(known): text for known, text in IN_WORDS.items()}
    return words.get(name, name)


def headline(plan: Plan) -> str:
    """The verdict in a few words."""
    if plan.verdict == "do_not_speculate":
        return "Do not speculate"
    return f"Speculate: {plan.drafter}, K = {plan.k}"


def lead(plan: Plan) -> str:
    """What to serve, in a sentence."""
    work = plan.workload
    setting = (
        f"for the {_objective(plan.objective)} at batch {work.batch}, answers of "
        f"{work.tokens} tokens, {', '.join(work.tasks)}"
    )
    if plan.verdict == "do_not_speculate":
        return (
            f"Decode {plan.target} plainly: no drafter beats that by more than the noise {setting}."
        )
    placed = "on the leader chip"
    if plan.placement != "leader":
        placed = (
            f"with one copy on {plan.chips_per_copy} chips" if plan.chips_per_copy else "sharded"
        )
    return (
        f"Serve {plan.target} with the drafter {plan.drafter} {placed}, {plan.k} drafts per round, the "
        f"{plan.rule} rule: the best found {setting}. The output distribution stays the target's."
    )


def reason(plan: Plan) -> tuple[str, list[str]]:
    """Why, in sentences, and apart from that what to know of the evidence."""
    notes = [str(note) for note in plan.details.get("notes") or ()]
    return plan.reason.removesuffix(" ".join(notes)).strip(), notes


def command(plan: Plan, where: str) -> str:
    """How to serve it."""
    return f"python -m serving.sps --gin_file=YOUR.gin --run_dir={shlex.quote(where)} --prompt=TEXT"


def tiles(plan: Plan) -> Iterator[Tile]:
    """The figures of the decision."""
    best, source = plan.measured or plan.predicted, "measured" if plan.measured else "predicted"
    more = f"{source}; {ms(plan.predicted.ms_per_token)} predicted" if plan.measured else source
    yield Tile("time per token", ms(best.ms_per_token), more)
    yield Tile("speed-up", *_gain(plan, best.ms_per_token, source))
    yield Tile("plain decoding", ms(plan.baseline_ms_per_token), "per token")
    yield Tile("90% of requests", f"within {ms(best.p90_ms)}", f"99% within {ms(best.p99_ms)}")


def _gain(plan: Plan, ms_per_token: float, source: str) -> tuple[str, str]:
    if plan.verdict == "do_not_speculate":
        return "1x", "plain decoding is served"
    bounds = _bounds(plan)
    return times(plan.baseline_ms_per_token / ms_per_token), f"{source}{bounds and '; '}{bounds}"


def _bounds(plan: Plan) -> str:
    """The interval of the speed-up in ms per token, empty if the plan holds none."""
    found = plan.details.get("gain") or {}
    if plan.objective != "mean" or "low" not in found or found["low"] == found["high"]:
        return ""
    return f"{found['low']:.2f} to {found['high']:.2f}"


def bill(plan: Plan) -> str:
    """What the drafter cost, and when that is paid back."""
    cost = plan.training_cost
    if cost is None:
        return ""
    return (
        f"Training {model_of(plan.drafter)} took {count(cost.tokens)} tokens and "
        f"{in_words(3600 * cost.hours)}, its teacher's answers and generated text not counted; that time is "
        f"paid back after {count(cost.break_even_tokens)} served tokens."
    )


def served(plan: Plan) -> Candidate | None:
    """The candidate that the plan serves, or the best that it decided against."""
    drafting = [one for one in plan.candidates if one.k]
    chosen = [
        one
        for one in drafting
        if (one.drafter, one.k, one.rule, one.chips_per_copy)
        == (plan.drafter, plan.k, plan.rule, plan.chips_per_copy)
        and (one.placement == "leader") == (plan.placement == "leader")
    ]
    best = [one for one in drafting if str(_option(one)) == plan.details.get("best")]
    return next(iter((chosen if plan.k else best) or drafting), None)


# --------------------------------------------------------------------------------------------------
# Table 1
# --------------------------------------------------------------------------------------------------


class Arms(NamedTuple):
    """Plain and speculative decoding of one task: ms per token, speed-up, and where both times come from."""

    plain_ms: float
    ms: float
    gain: str
    plain_source: str
    source: str


def paper_table(evidence: Evidence) -> Table | None:
    """Method, task, result, mean time per token and speed-up: of every task, and of all."""
    plan = evidence.plan
    one = served(plan) if plan else None
    if plan is None or one is None:
        return None
    found = {task: _of_task(evidence, one, task) for task in plan.workload.tasks}
    known = {task: arms for task, arms in found.items() if arms is not None}
    if len(known) != 1 or len(found) != 1:
        known["all"] = _of_all(plan, one)
    rows = [row for task, arms in known.items() for row in _pair(evidence, one, task, arms)]
    note = (
        ""
        if plan.k
        else "The speculative rows show the best candidate, which the plan decides against."
    )
    columns = ("method", "task", "result>", "mean token time>", "speed-up>", "source")
    return table("Mean token time and speed-up", columns, rows, note=note)


def _pair(evidence: Evidence, one: Candidate, task: str, arms: Arms) -> Iterator[tuple[str, ...]]:
    scores = evidence.acceptance.scores if evidence.acceptance else {}
    score = scores.get(f"{one.drafter}/{task}")
    plain, speculative = "-", "-"
    if score is not None:
        plain = f"{number(score.plain.value)} {score.metric}"
        speculative = f"{number(score.speculative.value)} {score.metric}"
    yield "ArS", task, plain, ms(arms.plain_ms), "1x", arms.plain_source
    yield f"SpS, {one.drafter} K = {one.k}", task, speculative, ms(arms.ms), arms.gain, arms.source


def _of_all(plan: Plan, one: Candidate) -> Arms:
    best, source = one.measured or one.predicted, "measured" if one.measured else "predicted"
    gain, bounds = times(plan.baseline_ms_per_token / best.ms_per_token), _bounds(plan)
    said = f"{gain} ({bounds})" if bounds else gain
    return Arms(plan.baseline_ms_per_token, best.ms_per_token, said, source, source)


def _option(one: Candidate) -> Option:
    # An artifact holds text where the program knows the few values that it may have.
    placement, rule = str(one.placement), str(one.rule)
    return Option(one.drafter, one.k, rule, placement, one.chips_per_copy)  # pyright: ignore


def _of_task(evidence: Evidence, one: Candidate, task: str) -> Arms | None:
    return _played(evidence, one, task) or _expected(evidence, one, task)


def _played(evidence: Evidence, one: Candidate, task: str) -> Arms | None:
    """By the real runs, if there were any."""
    found, name = evidence.confirmation, str(_option(one))
    if found is None or name not in found.arms:
        return None
    arm = found.arms.index(name)
    paces = [[p.ms_per_token for p in found.of(which) if p.task == task] for which in (0, arm)]
    if not all(paces):
        return None
    plain, speculative = (float(np.mean(np.concatenate(each))) for each in paces)
    said = times(plain / speculative)
    if gain := found.gain(arm, task):
        said = f"{times(gain.value)} ({gain.low:.2f} to {gain.high:.2f})"
    return Arms(plain, speculative, said, "measured", "measured")


def _expected(evidence: Evidence, one: Candidate, task: str) -> Arms | None:
    """By the law of acceptance and round times."""
    plan, profile, acceptance = evidence.plan, evidence.profile, evidence.acceptance
    if plan is None or profile is None or acceptance is None:
        return None
    traffic = traffic_of(plan.workload)
    if not set(traffic.tasks) <= set(task_labels(acceptance.results)):
        return None  # evaluated anew on other tasks, and not decided since
    timed = loops(profile.rounds, traffic.batch, traffic.context)
    option, plain = _option(one), plain_of(timed)
    forecast = Forecast(acceptance.results, traffic)
    if option not in timed or plain is None:
        return None
    forecast = forecast.of_task(task)
    expected = forecast.times(option, forecast.loop(option, timed).ms)
    if expected is None:
        return None
    gain = times(timed[plain].ms / expected.ms_per_token)
    return Arms(timed[plain].ms, expected.ms_per_token, gain, "predicted", "predicted")


# --------------------------------------------------------------------------------------------------
# What would change it
# --------------------------------------------------------------------------------------------------


def flips(plan: Plan) -> Table | None:
    """At which acceptance and round time the decision turns."""
    points, alpha = plan.details.get("tipping_points") or {}, plan.details.get("alpha")
    rows = [
        ("plain decoding", points.get("alpha"), points.get("round_ms")),
        (
            str(plan.details.get("runner_up", "")),
            points.get("runner_up_alpha"),
            points.get("runner_up_round_ms"),
        ),
    ]
    note = f"The acceptance found is {number(alpha)}." if alpha else ""
    return table(
        "What would change it: the best candidate is only as good as ...",
        ("alternative", "at an acceptance of>", "at a round of>"),
        (
            (name, number(at_alpha), ms(at_round))
            for name, at_alpha, at_round in rows
            if at_alpha is not None or at_round is not None
        ),
        note=note,
    )


def by_batch(plan: Plan) -> Table | None:
    """The best choice at every batch size that was profiled."""
    found = plan.details.get("by_batch") or []
    return table(
        f"Best choice by batch size ({_objective(plan.objective)}, predicted)",
        ("batch", "choice", "time>", "plain decoding>", "speed-up>"),
        ((count(one["batch"]), *_best(one)) for one in found),
    )


def by_task(plan: Plan) -> Table | None:
    """The best choice for each task alone, by objective."""
    found: Mapping[str, Mapping[str, Any]] = plan.details.get("by_task") or {}
    return table(
        "Best choice for one task alone, by objective (predicted)",
        ("task", "objective", "choice", "time>", "plain decoding>", "speed-up>"),
        (
            (task, _objective(objective), *_best(one))
            for task, objectives in found.items()
            for objective, one in objectives.items()
        ),
        open=False,
    )


def _best(one: Mapping[str, Any]) -> tuple[str, ...]:
    option = Option(*(one[name] for name in Option._fields))
    ratio = one["plain"] / one["value"] if one["value"] else None
    return str(option), ms(one["value"]), ms(one["plain"]), times(ratio)


def regrets(plan: Plan) -> Table | None:
    """What choosing another drafter would cost."""
    found: Mapping[str, float] = plan.details.get("regret_by_drafter") or {}
    return table(
        "Regret: how much worse the best candidate of each drafter is",
        ("drafter", "worse by>"),
        ((name or "plain decoding", percent(value)) for name, value in found.items()),
    )


def confirmed(plan: Plan) -> Table | None:
    """The two factors of the time per token, predicted and measured."""
    found = plan.details.get("confirmed") or {}
    rows = (
        (
            str(one["option"]),
            ms(one["predicted_round_ms"]),
            ms(one["measured_round_ms"]),
            number(one["measured_alpha"]),
            ", ".join(f"{task} {times(gain['value'])}" for task, gain in one["speedup"].items()),
        )
        for one in found.get("arms", [])
    )
    columns = (
        "candidate",
        "round, predicted>",
        "round, measured>",
        "alpha, measured>",
        "speed-up by task",
    )
    if not found:
        return None
    note = (
        f"Predicted ms per token is off by {percent(found['median_error'])} in the median, "
        f"{percent(found['worst_error'])} at worst."
    )
    return table("Real runs of the best candidates", columns, rows, note=note)


def unseen(plan: Plan) -> Table | None:
    """Shapes that are not trained yet and worth it, by prediction."""
    found = plan.details.get("unseen") or {}
    return table(
        "Shapes not trained yet: none beats these in both step time and acceptance (predicted)",
        ("layers x width, F", "heads>", "draft step>", "acceptance>", "K>", "expected>"),
        (
            (
                f"{one['layers']} x {one['width']}, {one['mlp_width']}",
                count(one["heads"]),
                ms(one["step_ms"]),
                _with_bounds(one["alpha"]["alpha"], one["alpha"]["low"], one["alpha"]["high"]),
                count(one["k"]),
                _with_bounds(one["expected"], *one["interval"]),
            )
            for one in found.get("front", [])
        ),
        note=f"By prediction: {found.get('rests_on', '')}. As Gin that can be pasted: next_drafters.gin.",
    )


def _with_bounds(value: float, low: float, high: float) -> str:
    return f"{number(value)} ({number(low)} to {number(high)})"
