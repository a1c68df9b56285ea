"""The part of co-design that looks beyond the drafters that were trained; see `pipeline.unseen_shapes`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from drafters import kv_cache
from drafters.shapes import TransformerShape
from pipeline import unseen_shapes
from pipeline.candidates import Forecast, Objective, Option, Traffic, value
from pipeline.codesign_evidence import Evidence
from pipeline.core.run_dir import RunDir, atomic_write
from pipeline.decision import Judged
from pipeline.latency import Predictor
from pipeline.profile_artifact import Where
from pipeline.unseen_shapes import ShapeGrid, StepMs, Survey, Trained
from pipeline.work import Pass
from serving.plan import Plan

FILE = "next_drafters.gin"


def restore(run: RunDir, plan: Plan) -> None:
    """RUN_DIR/next_drafters.gin as the plan has it; none where it proposes nothing."""
    path, proposed = run.root / FILE, plan.details.get("unseen", {}).get("gin", "")
    if not proposed:
        path.unlink(missing_ok=True)
    elif not path.exists() or path.read_text() != proposed:
        atomic_write(path, proposed)


def survey(
    field: Sequence[Judged],
    evidence: Evidence,
    forecast: Forecast,
    objective: Objective,
    grid: ShapeGrid,
    hbm_bytes: float,
) -> dict[str, Any]:
    """What `Plan.details` says of the grid, and of the shapes that may beat all that is there.

    Args:
      field: what is there, plain decoding too.
      hbm_bytes: memory of a chip, of which the drafter has what the target leaves; 0 if it is not known.
    """
    predictor, profile = Predictor.of(evidence.profile), evidence.profile
    if predictor is None or profile.target not in evidence.shapes:
        return {
            "skipped": "profile.json has no latency model: profile models of at least two shapes"
        }
    trained = list(_trained(evidence, forecast))
    if why := unseen_shapes.usable(trained):
        return {"skipped": why}
    step_ms = _step_ms(predictor, forecast.traffic)
    asked = Survey(
        trained=trained,
        found=unseen_shapes.rests(profile.rounds, trained, forecast.traffic.batch, step_ms),
        step_ms=step_ms,
        traffic=forecast.traffic,
        objective=objective,
        dtype=predictor.machine.dtype,
    )
    target = evidence.shapes[profile.target]
    limit = asked.left(target, profile.topology.num_chips, hbm_bytes) if hbm_bytes else 0.0
    outlook = asked.look(grid, target, limit)
    known = min(value(one.predicted, objective) for one in field)
    best = [one for one in outlook.prospects if one.hoped < known][: grid.suggestions]
    return {
        "best_known": known,
        "rests_on": asked.says,
        "latency_error": [predictor.model.median_error, predictor.model.worst_error],
        "considered": outlook.considered,
        "unpredicted": outlook.unpredicted,
        "front": [one.to_json() for one in outlook.front],
        "next": [one.to_json() for one in best],
        "gin": unseen_shapes.gin(best) if best else "",
    }


def _trained(evidence: Evidence, forecast: Forecast) -> Iterator[Trained]:
    """The evaluated drafters whose shape is known, with their mean acceptance at their largest K."""
    most: dict[str, int] = {}
    for result in evidence.acceptance.results:
        if result.rule == "token":
            most[result.drafter] = max(result.k, most.get(result.drafter, 0))
    for name, k in most.items():
        option = Option(name, k, "token", "sharded", 0)
        if name in evidence.shapes and forecast.requests(option):
            yield Trained(
                name=name,
                shape=evidence.shapes[name],
                alpha=forecast.alpha(option),
                alpha_sd=forecast.alpha_sd(option),
            )


def _step_ms(predictor: Predictor, traffic: Traffic) -> StepMs:
    """A draft step: one token per row in the middle of the traffic."""
    room = kv_cache.capacity_for(traffic.context + traffic.tokens)
    one = Pass(traffic.batch, 1, traffic.context, room)

    def step_ms(shape: TransformerShape, placement: Where, chips_per_copy: int) -> float:
        return predictor.step(shape, one, chips_per_copy=chips_per_copy, placement=placement).ms

    return step_ms


def lines(plan: Plan) -> Iterator[str]:
    """For the terminal; nothing if no grid was looked at."""
    found = plan.details.get("unseen")
    if not found:
        return
    if "skipped" in found:
        yield f"shapes not trained yet: {found['skipped']}"
        return
    yield (
        f"shapes not trained yet: {found['considered']} fit the mesh, of {found['unpredicted']} the trained "
        f"drafters say nothing; {found['rests_on']}"
    )
    if not found["next"]:
        yield f"  none can be hoped to beat the {found['best_known']:.2f} of what is there"
    for one in found["next"]:
        low, high = one["interval"]
        alpha = one["alpha"]
        yield (
            f"  {one['layers']} layers, width {one['width']}, {one['heads']} heads, F {one['mlp_width']}: "
            f"{one['step_ms']:.2f} ms per draft, acceptance {alpha['alpha']:.2f} ({alpha['low']:.2f} to "
            f"{alpha['high']:.2f}), K = {one['k']}: {one['expected']:.2f} ({low:.2f} to {high:.2f})"
        )
