"""Decides what to serve: `python -m pipeline.codesign --gin_file=gin/quickstart.gin`.

Reads RUN_DIR/profile.json and RUN_DIR/acceptance.json, predicts every drafter, placement, K and rule, runs
the best few for real, and writes RUN_DIR/plan.json, which `python -m serving.sps` serves. With `published`
the same decision is made from the numbers of a paper.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from drafters import model_card
from drafters.compilation import keep_programs
from drafters.mesh import Topology
from pipeline import (
    candidates,
    codesign_evidence,
    codesign_unseen,
    confirmation,
    decision,
    figures,
    figures_codesign,
    report,
)
from pipeline.candidates import Forecast, Objective, Option, Traffic
from pipeline.codesign_evidence import Evidence
from pipeline.confirmation import Bench, Confirm, Confirmation
from pipeline.core import artifacts, config
from pipeline.core.errors import UserError, end_with
from pipeline.core.events import EventWriter
from pipeline.core.run_dir import RunDir
from pipeline.corpora import CORPORA
from pipeline.decision import Decision, Judged
from pipeline.tasks import TASKS
from pipeline.trials import Trial
from pipeline.unseen_shapes import ShapeGrid
from pipeline.watching import say
from serving.pair import model_folder, model_of, require_names
from serving.plan import Candidate, Plan, TrainingBill, Workload
from serving.sampling import SamplingParams


def codesign(
    *,
    run_dir: str,
    target: str = "target",
    drafters: tuple[str, ...] = (),
    topology: Topology = Topology(name="host_1", platform="cpu"),
    traffic: Traffic = Traffic(),
    objective: Objective = "mean",
    confirm: Confirm = Confirm(),
    grid: ShapeGrid | None = None,
    published: Literal["", "chen_2023"] = "",
    seed: int = 0,
    config: str = "",
    dry_run: bool = False,
) -> None:
    """Chooses drafter, placement, K and rule, or plain decoding, and writes the plan.

    Args:
      run_dir: of the artifacts and models.
      target: the model to be served.
      drafters: to choose among; () for all in acceptance.json.
      topology: the mesh that candidates are run on.
      traffic: what is to be served.
      objective: what is to be small: mean time per token, a percentile of a request's time, or the 99th
        percentile of the time between tokens.
      confirm: which candidates are run for real.
      grid: shapes that are not trained yet, to find those worth training.
      published: decide from a paper's numbers, of its own models, instead of the run directory's.
      seed: for lineage; nothing here is drawn at random but bootstrap samples, from a fixed seed.
      config: the text of this config, for lineage.
      dry_run: check, print the plan and stop.
    """
    require_names("codesign.drafters", drafters)
    _require_own_models(published, drafters, confirm)
    run = RunDir.at(run_dir)
    if dry_run:
        for line in _outlook(run, target, drafters, traffic, objective, confirm, published):
            say(line)
        return
    if published:
        evidence = codesign_evidence.published(published, config, seed)
    else:
        mesh = topology if confirm.candidates else None
        evidence = codesign_evidence.read(run, target, drafters, mesh, config, seed)
    _require_room(evidence, traffic)
    with run.lock("codesign"):
        plan = artifacts.current(run.plan, Plan, evidence.lineage)
        if plan and _complete(run, plan):
            codesign_unseen.restore(run, plan)
            say(f"{run.plan} is up to date")
            report.restore(run)
            return
        work = _Work(run, evidence, topology, traffic, objective, confirm)
        plan = work.plan()
        if grid:
            found = codesign_unseen.survey(
                work.field, evidence, work.forecast, objective, grid, topology.hbm_bytes
            )
            plan = dataclasses.replace(plan, details={**plan.details, "unseen": found})
        codesign_unseen.restore(run, plan)
        _write_events(run, plan, evidence, config)
        artifacts.write(run.plan, plan)
        report.update(run)
    for line in (*_table(plan), *_by_task(plan), *evidence.table, *codesign_unseen.lines(plan)):
        say(line)
    say(f"{run.plan}: {plan.verdict}. {plan.reason}")


def _require_own_models(published: str, drafters: tuple[str, ...], confirm: Confirm) -> None:
    if published and (drafters or confirm.candidates):
        raise UserError(
            f"codesign.published = {published!r} decides from printed numbers, of models that cannot be run "
            "here: leave codesign.drafters and codesign.confirm away"
        )


def _require_room(evidence: Evidence, traffic: Traffic) -> None:
    shape = evidence.shapes.get(evidence.profile.target)
    if shape and traffic.tokens >= shape.context:
        raise UserError(
            f"Traffic.tokens = {traffic.tokens} do not fit the target's context of {shape.context} tokens: "
            "ask for shorter answers"
        )
    if shape and traffic.context > shape.context:
        raise UserError(
            f"Traffic.context = {traffic.context} is more than the target's context of {shape.context} tokens"
        )


def _complete(run: RunDir, plan: Plan) -> bool:
    """Whether the runs that a plan rests on are still there to be shown."""
    played = any(one.measured for one in plan.candidates)
    return not played or (run.root / confirmation.FILE).exists()


# --------------------------------------------------------------------------------------------------
# Decision
# --------------------------------------------------------------------------------------------------


class _Work:
    """One decision, from evidence to plan."""

    def __init__(
        self,
        run: RunDir,
        evidence: Evidence,
        topology: Topology,
        traffic: Traffic,
        objective: Objective,
        confirm: Confirm,
    ):
        self.run, self.evidence = run, evidence
        self.objective: Objective = objective
        self.topology, self.traffic, self.confirm = topology, traffic, confirm
        self.forecast = Forecast(evidence.acceptance.results, traffic)
        rounds = evidence.profile.rounds
        self.timed = candidates.loops(rounds, traffic.batch, traffic.context)
        self.field = decision.judged(self.forecast, self.timed)

    def plan(self) -> Plan:
        """Decides."""
        found = self._confirmed() if self.confirm.candidates else None
        decided = decision.decide(self.field, self.objective)
        points = decision.tipping_points(decided, self.forecast)
        chosen, plain = decided.chosen, decided.plain
        option, traffic = chosen.option, self.forecast
        return Plan(
            lineage=self.evidence.lineage,
            verdict="speculate" if decided.speculates else "do_not_speculate",
            target=self.evidence.profile.target,
            drafter=option.drafter,
            k=option.k,
            rule=option.rule,
            placement="leader" if option.placement == "leader" else "sharded",
            chips_per_copy=option.chips_per_copy,
            objective=self.objective,
            workload=Workload(
                tasks=traffic.tasks,
                warp=traffic.warps(),
                batch=self.traffic.batch,
                tokens=self.traffic.tokens,
                context=self.traffic.context,
            ),
            predicted=chosen.predicted,
            measured=chosen.measured,
            baseline_ms_per_token=(plain.measured or plain.predicted).ms_per_token,
            training_cost=self._bill(decided),
            candidates=tuple(map(self._row, _all_ranked(decided, self.field))),
            reason=" ".join((decision.reason(decided, points), *self.evidence.notes)),
            details=self._details(decided, points, found),
        )

    def _confirmed(self) -> Confirmation:
        """Runs the best candidates and takes what was measured into the field."""
        plain, others = self.field[0], self.field[1:]
        best = decision.ranked(others, self.objective)[: self.confirm.candidates]
        arms = [plain, *best]
        bench = Bench(
            run=self.run,
            topology=self.topology,
            target=self.evidence.profile.target,
            traffic=self.traffic,
            settings=self.confirm,
            tasks=self.forecast.tasks,
        )
        found = confirmation.confirm(bench, [one.option for one in arms], self._lineage_of_runs())
        measured = {
            one.option: decision.with_measurement(
                one,
                self.forecast,
                found.times(arm, self.traffic.tokens),
                found.round_ms(arm),
                found.gain(arm) if arm else None,
                self.timed[one.option].ms,
            )
            for arm, one in enumerate(arms)
        }
        self.field = [measured.get(one.option, one) for one in self.field]
        return found

    def _lineage_of_runs(self) -> artifacts.Lineage:
        """Of what is played: nothing else in the config is a reason to play it again."""
        settings = (self.topology, self.traffic, self.confirm)
        inputs = self.evidence.acceptance.lineage.inputs
        return dataclasses.replace(
            self.evidence.lineage,
            config=repr(settings),
            seed=0,
            inputs={name: digest for name, digest in inputs.items() if name.startswith("task ")},
        )

    def _row(self, one: Judged) -> Candidate:
        error = None
        if one.measured:
            error = one.predicted.ms_per_token / one.measured.ms_per_token - 1
        return Candidate(
            drafter=one.option.drafter,
            k=one.option.k,
            rule=one.option.rule,
            placement=one.option.placement,
            predicted=one.predicted,
            measured=one.measured,
            chips_per_copy=one.option.chips_per_copy,
            error=error,
            bytes_per_chip=self._bytes_per_chip(one.option),
        )

    def _bytes_per_chip(self, option: Option) -> int:
        """Of weights and caches of both models; 0 if a shape is not known."""
        topology = self.evidence.profile.topology
        chips = {self.evidence.profile.target: topology.num_chips}
        if name := model_of(option.drafter):
            chips[name] = option.chips_per_copy or topology.num_chips
        dtype = "float32" if topology.platform == "cpu" else "bfloat16"
        longest = self.traffic.context + self.traffic.tokens + option.k + 1
        shapes = self.evidence.shapes
        if not chips.keys() <= shapes.keys():
            return 0
        return sum(
            candidates.chip_bytes(shapes[name], count, self.traffic.batch * longest, dtype)
            for name, count in chips.items()
        )

    def _bill(self, decided: Decision) -> TrainingBill | None:
        """What the chosen drafter's training cost, and the served tokens that save as much time."""
        name = model_of(decided.chosen.option.drafter)
        folder = model_folder(str(self.run.root), name) if name else None
        if folder is None or not (folder / model_card.CARD).exists():
            return None
        cost = model_card.read_card(folder).training_cost
        if cost is None:
            return None
        times = [one.measured or one.predicted for one in (decided.plain, decided.chosen)]
        saved_ms = (times[0].ms_per_token - times[1].ms_per_token) / self.traffic.batch
        if saved_ms <= 0:
            return None
        return TrainingBill(
            tokens=cost.tokens,
            hours=cost.hours,
            break_even_tokens=cost.hours * 3.6e6 / saved_ms,
        )

    def _details(
        self,
        decided: Decision,
        points: Mapping[str, float | None],
        found: Confirmation | None,
    ) -> dict[str, Any]:
        rounds, other = self.evidence.profile.rounds, decided.runner_up
        details = {
            "gain": decided.gain._asdict(),
            "best": str(decided.best.option) if decided.best else "",
            "alpha": self.forecast.alpha(decided.best.option) if decided.best else 0.0,
            "runner_up": str(other.option) if other else "",
            "regret_of_runner_up": decided.regret(other) if other else 0.0,
            "regret_by_drafter": decision.regret_by_drafter(decided),
            "tipping_points": dict(points),
            "by_batch": decision.best_by_batch(rounds, self.forecast, self.objective),
            "by_task": decision.best_by_task(self.timed, self.forecast),
            "notes": list(self.evidence.notes),
            **self.evidence.details,
        }
        if found:
            details["confirmed"] = _confirmed_details(self.field, found, self.forecast.tasks)
        return details


def _all_ranked(decided: Decision, field: Sequence[Judged]) -> list[Judged]:
    """The ranking, then those that were not in the running."""
    ranking = list(decided.ranking)
    seen = {one.option for one in ranking}
    rest = (one for one in field if one.option not in seen)
    return [*ranking, *decision.ranked(rest, decided.objective)]


def _confirmed_details(
    field: Sequence[Judged], found: Confirmation, tasks: Sequence[str]
) -> dict[str, Any]:
    """Predicted against measured: time per token and its two factors."""
    by_name = {str(one.option): one for one in field}
    rows = []
    for arm, name in enumerate(found.arms):
        one, played = by_name[name], found.of(arm)
        evaluated = sum(p.evaluated for p in played)
        rows.append(
            {
                "option": name,
                "predicted_round_ms": one.loop.ms,
                "measured_round_ms": found.round_ms(arm),
                "measured_alpha": sum(p.accepted for p in played) / max(1, evaluated),
                "speedup": {
                    task: gain._asdict() for task in tasks if (gain := found.gain(arm, task))
                },
            }
        )
    errors = [
        abs(one.predicted.ms_per_token / one.measured.ms_per_token - 1)
        for one in field
        if one.measured
    ]
    return {
        "arms": rows,
        "median_error": float(np.median(errors)),
        "worst_error": float(np.max(errors)),
    }


# --------------------------------------------------------------------------------------------------
# For people
# --------------------------------------------------------------------------------------------------


def _table(plan: Plan, rows: int = 8) -> Iterator[str]:
    """The best candidates."""
    yield f"{'drafter':12}{'K':>3} {'rule':6}{'placement':14}{'predicted':>11}{'measured':>11}  ms per token"
    for one in plan.candidates[:rows]:
        measured = f"{one.measured.ms_per_token:11.3f}" if one.measured else f"{'-':>11}"
        where = (
            f"{one.placement} {one.chips_per_copy}" if one.placement == "copies" else one.placement
        )
        yield (
            f"{one.drafter or '(plain)':12}{one.k:3d} {one.rule if one.k else '-':6}"
            f"{where if one.k else '-':14}{one.predicted.ms_per_token:11.3f}{measured}"
        )


def _write_events(run: RunDir, plan: Plan, evidence: Evidence, config: str) -> None:
    """The decision and its figures in TensorBoard; curves have K as their x axis."""
    best = next((one for one in plan.candidates if one.k), None)
    with EventWriter(run.tensorboard("codesign")) as events:
        events.text(0, "config", f"```\n{config}\n```")
        events.text(0, "decision", plan.reason)
        drawn = figures_codesign.all_of(plan, evidence.profile, evidence.acceptance)
        for name, figure in drawn.items():
            events.image(0, f"codesign/{name}", figures.png(figure))
        for one in plan.candidates:
            if best and _way(one) == _way(best):
                events.scalars(one.k, _curves(one))


def _way(one: Candidate) -> tuple[str, str, str, int]:
    return one.drafter, one.rule, one.placement, one.chips_per_copy


def _curves(one: Candidate) -> dict[str, float]:
    curves = {"predicted/ms_per_token": one.predicted.ms_per_token}
    curves["predicted/p99_ms"] = one.predicted.p99_ms
    if one.measured:
        curves["measured/ms_per_token"] = one.measured.ms_per_token
    return curves


def _by_task(plan: Plan) -> Iterator[str]:
    """What would be best for each task alone, by prediction."""
    for task, found in plan.details["by_task"].items():
        best = (
            f"{objective}: {one['drafter'] or 'plain'} K = {one['k']}"
            for objective, one in found.items()
        )
        yield f"best for {task} alone: {', '.join(best)}"


def _outlook(
    run: RunDir,
    target: str,
    drafters: tuple[str, ...],
    traffic: Traffic,
    objective: Objective,
    confirm: Confirm,
    published: str,
) -> Iterator[str]:
    """The plan of a dry run."""
    tasks = ", ".join(traffic.tasks) or "all tasks that were evaluated"
    yield (
        f"codesign: {candidates.IN_WORDS[objective]} of {target}, {traffic.tokens} tokens, batch "
        f"{traffic.batch}, {tasks}; drafters: {', '.join(drafters) or 'all that were evaluated'}"
    )
    if published:
        yield f"evidence: published, {published}"
        return
    for path in (run.profile, run.acceptance):
        yield f"{path}: {'is there' if path.exists() else 'not there yet'}"
    if confirm.candidates:
        answers = confirm.prompts * confirm.laps * len(confirm.tasks)
        yield (
            f"the best {confirm.candidates} candidates and plain decoding answer {answers} requests each"
        )


SETTINGS = (*CORPORA, *TASKS, Confirm, SamplingParams, ShapeGrid, Topology, Traffic, Trial)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m pipeline.codesign", description=__doc__)
    config.add_flags(parser)
    flags = config.parse_flags(parser)
    configured = config.load(
        codesign,
        SETTINGS,
        files=flags.gin_file,
        bindings=flags.gin_bindings,
        supplied={"run_dir": flags.run_dir, "dry_run": flags.dry_run},
    )
    keep_programs()
    configured.stage(config=configured.config_str)


if __name__ == "__main__":
    end_with(main)
