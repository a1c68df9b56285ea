"""The tables of a report: pure functions from artifacts to text cells."""

from __future__ import annotations

from pipeline.acceptance_artifact import Acceptance, Result
from pipeline.profile_artifact import Profile
from pipeline.report_evidence import Evidence, Model
from pipeline.report_format import (
    NOTHING,
    Table,
    count,
    interval,
    ms,
    number,
    percent,
    size,
    spread,
    table,
    times,
    where,
)
from serving.plan import Candidate, Plan

# --------------------------------------------------------------------------------------- the decision


def candidates(plan: Plan) -> Table | None:
    """Every choice that was considered, predicted against measured."""
    return table(
        "Candidates: predicted against measured",
        (
            "drafter", "K>", "rule", "placement", "predicted ms/token>", "measured ms/token>",
            "error>", "speed-up>", "p50 ms>", "p99 ms>", "bytes per chip>",
        ),
        (_candidate(one, plan) for one in plan.candidates),
        note=(
            "Error is of the prediction, relative to the measurement; speed-up is over plain decoding "
            f"({ms(plan.baseline_ms_per_token)} per token); p50 and p99 are of the time of a request of "
            f"{count(plan.workload.tokens)} tokens, all measured where a measurement is shown."
        ),
        open=False,
    )  # fmt: skip


def _candidate(one: Candidate, plan: Plan) -> tuple[str, ...]:
    best = one.measured or one.predicted
    return (
        one.drafter or "plain",
        count(one.k),
        one.rule,
        where(one.placement, one.chips_per_copy),
        number(one.predicted.ms_per_token),
        number(one.measured.ms_per_token if one.measured else None),
        percent(one.error, signed=True),
        times(_ratio(plan.baseline_ms_per_token, best.ms_per_token)),
        number(best.p50_ms),
        number(best.p99_ms),
        size(one.bytes_per_chip) if one.bytes_per_chip else NOTHING,
    )


def _ratio(top: float, bottom: float) -> float | None:
    return top / bottom if bottom > 0 else None


# -------------------------------------------------------------------------- what drafters are worth


def results(acceptance: Acceptance) -> Table | None:
    """Acceptance of every drafter on every task."""
    return table(
        "Acceptance by task",
        (
            "drafter", "task", "rule", "K>", "tau>", "alpha>", "alpha by overlap>",
            "overlap on held-out text>", "sd between requests>", "first draft>", "last draft>",
            "rounds with drafts>", "of them copied>", "requests>", "tokens>", "source",
        ),
        (_result(one) for one in acceptance.results),
        note=(
            "tau: tokens per round. alpha: accepted / evaluated drafts, with its 95% interval; by overlap: "
            "mean of sum(min(p, q)) at the same positions, which must agree. First and last draft: "
            "P(accepted | those before it were)."
        ),
        open=False,
    )  # fmt: skip


def _result(one: Result) -> tuple[str, ...]:
    conditional = one.conditional or (None,)
    return (
        one.drafter,
        one.task,
        one.rule,
        count(one.k),
        number(one.tau),
        interval(one.alpha_interval),
        number(one.alpha_overlap),
        number(one.overlap_teacher_forced),
        number(one.alpha_sd_between_requests, 2),
        number(conditional[0]),
        number(conditional[-1]),
        number(one.drafting),
        number(one.looked_up),
        count(one.requests),
        count(one.emitted),
        one.source,
    )


def scores(acceptance: Acceptance) -> Table | None:
    """Quality of both arms: the law is the same, so a difference is noise or a defect."""
    return table(
        "Quality of the answers",
        ("drafter / task", "metric", "plain>", "speculative>", "difference>", "verdict"),
        (
            (
                name,
                one.metric,
                interval(one.plain),
                interval(one.speculative),
                interval(one.difference, 2),
                one.verdict,
            )
            for name, one in acceptance.scores.items()
        ),
        note="Means over requests with 95% intervals; the difference is of pairs.",
    )


def skipped(acceptance: Acceptance) -> Table | None:
    """Tasks that could not be run."""
    return table(
        "Tasks left out",
        ("task", "reason"),
        ((one.task, one.reason) for one in acceptance.skipped),
    )


# ------------------------------------------------------------------------------------- the mesh


def topology(profile: Profile) -> Table | None:
    """The devices."""
    found = profile.topology
    rows = [
        ("devices", f"{found.num_chips} x {found.device_kind} ({found.platform})"),
        ("mesh", ", ".join(f"{axis} = {n}" for axis, n in found.mesh.items())),
        ("memory bandwidth per chip", f"{size(found.hbm_bytes_per_s)}/s"),
        ("arithmetic per chip", f"{number(found.flop_per_s / 1e9)} Gflop/s"),
        ("peaks", found.peaks_source),
    ]
    if noise := profile.noise:
        rows.append(
            (
                "quiet",
                f"a fixed piece of work varied by {percent(noise.relative_spread)} (p90 - p10, of the "
                f"median); {noise.outliers} samples above twice their median; load {noise.load_average:.1f}",
            )
        )
    return table(found.name, ("", "value"), rows)


def collectives(profile: Profile) -> Table | None:
    """The fits of all collective operations."""
    return table(
        "Collectives: latency = alpha up to the knee, then alpha + beta x (bytes - knee)",
        ("operation", "axis", "chips>", "dtype", "alpha us>", "beta us/KiB>", "knee>", "r2>"),
        (
            (
                fit.op,
                fit.axis,
                count(fit.chips),
                fit.dtype,
                _bounds(fit.alpha_us, fit.alpha_interval_us),
                _bounds(fit.beta_us_per_kib, fit.beta_interval_us_per_kib),
                size(fit.knee_bytes),
                f"{fit.r2:.3f}",
            )
            for fit in profile.alpha_beta.values()
        ),
        note="95% intervals in brackets.",
    )


def _bounds(value: float, bounds: tuple[float, float]) -> str:
    return f"{number(value)} ({number(bounds[0])} to {number(bounds[1])})"


def layers(profile: Profile) -> Table | None:
    """Where one layer's time goes."""
    return table(
        "One layer, us",
        (
            "model", "tokens>", "batch>", "arithmetic>", "collectives>",
            "collectives by the fit>", "fixed part of a step>",
        ),
        (
            (
                one.model,
                count(one.tokens),
                count(one.batch),
                number(one.arithmetic_us),
                number(one.collective_us),
                number(one.expected_collective_us),
                number(one.fixed_us),
            )
            for one in profile.layers
        ),
        note="The fixed part, embedding and head, is once per step.",
        open=False,
    )  # fmt: skip


def steps(profile: Profile) -> Table | None:
    """Latency of a forward pass by shape."""
    return table(
        "Forward passes, ms",
        (
            "model", "layers x width", "phase", "placement", "batch>", "tokens>", "context>",
            "latency>", "collectives per layer>", "of bandwidth>", "of arithmetic>", "source",
        ),
        (
            (
                one.model,
                _layers_by_width(one.shape),
                f"{one.phase}, {one.dispatch}",
                where(one.placement, one.chips_per_copy),
                count(one.batch),
                count(one.tokens),
                count(one.context),
                spread(one.latency_ms),
                number(one.collectives_per_layer, 2),
                percent(one.bandwidth_utilisation),
                percent(one.flop_utilisation),
                one.source,
            )
            for one in profile.steps
        ),
        note="Medians with 10th and 90th percentiles.",
        open=False,
    )  # fmt: skip


def _layers_by_width(shape: dict) -> str:
    return f"{shape.get('num_layers', '?')} x {shape.get('width', '?')}"


def rounds(profile: Profile) -> Table | None:
    """Speculative rounds and their parts."""
    return table(
        "Rounds, ms",
        (
            "drafter", "K>", "rule", "placement", "batch>", "context>",
            "round>", "draft>", "score>", "broadcast>", "source",
        ),
        (
            (
                one.drafter or "plain",
                count(one.k),
                one.rule,
                where(one.placement, one.chips_per_copy),
                count(one.batch),
                count(one.context),
                spread(one.round_ms),
                number(one.draft_ms),
                number(one.score_ms),
                number(one.broadcast_us / 1e3),
                one.source,
            )
            for one in profile.rounds
        ),
        note="Draft and score are of passes timed alone, the broadcast is by the fit of all-reduces; the "
        "round holds verdict and rollback too.",
        open=False,
    )  # fmt: skip


def compiled(profile: Profile) -> Table | None:
    """Programs compiled for devices that are not here."""
    return table(
        "Compiled for other devices: exact sizes, nothing measured",
        (
            "model", "topology", "chips>", "batch>", "tokens>", "context>", "dtype",
            "memory per chip>", "fits", "collectives (by formula)", "cycles, estimated>",
        ),
        (
            (
                one.model,
                one.topology,
                count(one.chips),
                count(one.batch),
                count(one.tokens),
                count(one.context),
                one.dtype,
                size(one.argument_bytes + one.temporary_bytes + one.output_bytes),
                "yes" if one.fits else "no",
                f"{_counts(one.collectives)} ({_counts(one.expected_collectives)})",
                count(one.estimated_cycles),
            )
            for one in profile.compiled
        ),
        open=False,
    )  # fmt: skip


def notes(profile: Profile) -> Table | None:
    """What the profile says about itself."""
    return table("Notes", ("note",), ((note,) for note in profile.notes))


def _counts(found: dict[str, int]) -> str:
    return ", ".join(f"{n} {kind}" for kind, n in found.items()) or "none"


def latency_model(profile: Profile) -> Table | None:
    """What the latency of an unmeasured shape is predicted from."""
    model = profile.latency_model
    if model is None:
        return None
    return table(
        "Latency model",
        ("term", "value>"),
        ((name, number(value)) for name, value in model.terms.items()),
        note=(
            f"Fitted to {model.fitted_steps} steps; off by {percent(model.median_error)} in the median and "
            f"{percent(model.worst_error)} at worst on {model.held_out_steps} that were held out."
        ),
        open=False,
    )


# ------------------------------------------------------------------------------------- training


def models(evidence: Evidence) -> Table | None:
    """What models are, what they cost and how well they were taught."""
    corpora = sorted({c for m in evidence.models.values() if m.record for c in m.record.held_out})
    metrics = [(c, m) for c in corpora for m in ("overlap", "perplexity")]
    return table(
        "Models",
        (
            "model", "layers x width", "parameters>", "in layers>", "source", "tokens seen>", "hours>",
            *(f"{metric}, {corpus}>" for corpus, metric in metrics),
        ),
        (_model(name, model, metrics) for name, model in evidence.models.items()),
        note=(
            "Overlap (mean of sum(min(p, q)) with the target) and perplexity on held-out text. A drafter's "
            "acceptance is limited by the tokens it has seen."
        ),
    )  # fmt: skip


def _model(name: str, model: Model, metrics: list[tuple[str, str]]) -> tuple[str, ...]:
    shape, cost = model.card.shape, model.card.training_cost
    held_out = model.record.held_out if model.record else {}
    return (
        name,
        f"{shape.num_layers} x {shape.width}",
        count(shape.num_params()),
        count(shape.num_layers * shape.layer_params()),
        f"{model.card.source.format}: {model.card.source.name}",
        count(cost.tokens if cost else None),
        number(cost.hours if cost else None),
        *(number(held_out.get(corpus, {}).get(metric)) for corpus, metric in metrics),
    )
