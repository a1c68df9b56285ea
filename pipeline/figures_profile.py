"""Figures of a profile: what collectives cost, what depth costs, what scoring costs, where time goes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from drafters.shapes import TransformerShape
from pipeline import figures
from pipeline.collective_fit import predict_us
from pipeline.core import artifacts
from pipeline.latency import Predictor
from pipeline.profile_artifact import Collective, Profile, Step

_FITTED_POINTS = 100  # of a curve that bends between what was measured
_PARTS = (
    "arithmetic and memory, on every chip",
    "collectives of the layers",
    "collectives of embedding and logits",
    "the host, if steps are dispatched one by one",
)


def all_of(profile: Profile) -> dict[str, Figure]:
    """Name -> figure, of those that there is something to draw for."""
    made = {
        "collectives": collectives(profile),
        "depth": depth(profile),
        "scoring": scoring(profile),
        "where_time_goes": where_time_goes(profile),
    }
    return {name: figure for name, figure in made.items() if figure is not None}


@figures.styled()
def collectives(profile: Profile, op: str = "all_reduce") -> Figure | None:
    """Latency of `op` against payload, a line per number of chips: medians, their p10-p90, and the fit."""
    series = _by_axis(one for one in profile.collectives if one.op == op)
    if not series:
        return None
    figure, axes = figures.panel(
        x="payload per chip, KiB",
        y="latency, us",
        title=f"{op.replace('_', '-')}: latency against payload",
    )
    for index, ((chips, axis), cells) in enumerate(sorted(series.items())):
        kib = [one.payload_bytes / 1024 for one in cells]
        look = figures.series(index)
        axes.plot(
            kib,
            [one.latency_us.p50 for one in cells],
            label=f"{chips} chips ({axis})",
            **{**look, "linestyle": ""},
        )
        low, high = zip(*((one.latency_us.p10, one.latency_us.p90) for one in cells), strict=True)
        figures.band(axes, kib, low, high, index)
        if curve := profile.alpha_beta.get(f"{op}/{axis}/{cells[0].dtype}"):
            along = np.geomspace(kib[0], kib[-1], _FITTED_POINTS)
            axes.plot(
                along,
                [predict_us(curve, 1024 * at) for at in along],
                **figures.series(index, marker=False),
            )
    payloads = sorted({one.payload_bytes / 1024 for cells in series.values() for one in cells})
    axes.set_xscale("log", base=2)
    axes.set_xticks(payloads, [f"{kib:g}" for kib in payloads])
    axes.set_ylim(bottom=0)
    figures.legend(axes)
    return figure


def _by_axis(cells: Iterable[Collective]) -> dict[tuple[int, str], list[Collective]]:
    series: dict[tuple[int, str], list[Collective]] = {}
    for one in sorted(cells, key=lambda one: one.payload_bytes):
        series.setdefault((one.chips, one.axis), []).append(one)
    return series


@figures.styled()
def depth(profile: Profile) -> Figure | None:
    """A decode step over all chips against depth: parameters are about equal, layers are not."""
    found = _decode_steps(profile)
    found = {model: step for model, step in found.items() if model in _drafters(profile)}
    if len(found) < 2:
        return None
    figure, axes = figures.panel(
        x="layers; parameters are about equal",
        y="decode step over all chips, ms",
        title="A decode step against depth",
    )
    ordered = sorted(found.values(), key=lambda step: step.shape["num_layers"])
    layers = [step.shape["num_layers"] for step in ordered]
    times = [step.latency_ms for step in ordered]
    axes.plot(layers, [t.p50 for t in times], **figures.series(0), label="measured")
    figures.band(axes, layers, [t.p10 for t in times], [t.p90 for t in times], 0)
    if predictor := Predictor.of(profile):
        predicted = [predictor.like(step).ms for step in ordered]
        axes.plot(layers, predicted, **figures.series(1), label="latency model")
    for step, time in zip(ordered, times, strict=True):
        _name(axes, step.model, (step.shape["num_layers"], time.p50))
    axes.set_ylim(bottom=0)
    axes.margins(x=0.12)
    figures.legend(axes, loc="lower right")
    return figure


def _name(axes: Any, text: str, at: tuple[float, float]) -> None:
    axes.annotate(text, at, xytext=(4, -12), textcoords="offset points", fontsize=8)


def _drafters(profile: Profile) -> set[str]:
    return {one.drafter for one in profile.rounds if one.drafter}


@figures.styled()
def scoring(profile: Profile) -> Figure | None:
    """The target's pass over T tokens, per batch and context, in milliseconds."""
    curves: dict[tuple[int, int], list[Step]] = {}
    for step in profile.steps:
        if _is_plain(step) and step.model == profile.target and step.phase != "prefill":
            curves.setdefault((step.batch, step.context), []).append(step)
    curves = {key: steps for key, steps in curves.items() if len(steps) > 1}
    if not curves:
        return None
    figure, axes = figures.panel(
        x="tokens T scored in one pass",
        y="pass, ms",
        title=f"{profile.target}: scoring T tokens in one pass",
    )
    for index, ((batch, context), steps) in enumerate(sorted(curves.items())):
        steps = sorted(steps, key=lambda step: step.tokens)
        tokens = [step.tokens for step in steps]
        label = f"batch {batch}, context {context}"
        axes.plot(tokens, [s.latency_ms.p50 for s in steps], label=label, **figures.series(index))
        low, high = [s.latency_ms.p10 for s in steps], [s.latency_ms.p90 for s in steps]
        figures.band(axes, tokens, low, high, index)
    axes.set_ylim(bottom=0)
    figures.legend(axes, loc="lower right")
    return figure


@figures.styled()
def where_time_goes(profile: Profile) -> Figure | None:
    """A decode step of each model over all chips: arithmetic, collectives, and what dispatch adds."""
    steps = {m: s for m, s in _decode_steps(profile).items() if s.layer_collective_us is not None}
    if not steps:
        return None
    figure, axes = figures.panel(
        x="us per decode step, all chips", y="", title="Where a decode step's time goes"
    )
    names, left = list(steps), np.zeros(len(steps))
    parts = np.array([_parts_us(step, _single_us(profile, step)) for step in steps.values()]).T
    for index, (label, widths) in enumerate(zip(_PARTS, parts, strict=True)):
        if widths.max() > 0:
            axes.barh(names, widths, left=left, label=label, color=figures.color(index), height=0.6)
        left += widths
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    below = {"loc": "upper center", "bbox_to_anchor": (0.4, -0.2)}
    figures.legend(axes, **below)
    return figure


def _parts_us(step: Step, single_us: float) -> tuple[float, float, float, float]:
    """Microseconds of `_PARTS`."""
    fused = 1e3 * step.latency_ms.p50
    in_layers = step.shape["num_layers"] * (step.layer_collective_us or 0.0)
    counts = artifacts.from_json(step.shape, TransformerShape).collectives(step.chips_per_copy)
    at_ends = in_layers * (counts.embedding + counts.logits) / max(1, counts.layers)
    return fused - in_layers - at_ends, in_layers, at_ends, max(0.0, single_us - fused)


def _single_us(profile: Profile, fused: Step) -> float:
    """The same step dispatched by itself; 0 if that was not measured."""
    found = (
        1e3 * step.latency_ms.p50
        for step in profile.steps
        if dataclasses.replace(step, dispatch="fused", latency_ms=fused.latency_ms,
                               bandwidth_utilisation=fused.bandwidth_utilisation,
                               flop_utilisation=fused.flop_utilisation) == fused
        and step.dispatch == "single"
    )  # fmt: skip
    return next(found, 0.0)


def _decode_steps(profile: Profile) -> dict[str, Step]:
    """Model -> its measured decode step over all chips, at the first batch and context."""
    found: dict[str, Step] = {}
    for step in profile.steps:
        if _is_plain(step) and step.phase == "decode":
            found.setdefault(step.model, step)
    return found


def _is_plain(step: Step) -> bool:
    return step.placement == "sharded" and step.dispatch == "fused" and step.source == "measured"


def scalars(steps: Sequence[Step]) -> dict[str, float]:
    """Tag -> milliseconds, for TensorBoard."""
    return {
        f"latency/{s.model}/{s.phase}_{s.dispatch}_T{s.tokens}_B{s.batch}_S{s.context}_"
        f"{s.placement}{s.chips_per_copy}_ms": s.latency_ms.p50
        for s in steps
    }
