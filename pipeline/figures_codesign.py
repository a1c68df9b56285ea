"""Figures of a decision: Figure 1 of Chen et al. 2302.01318 from this run; candidates; prediction and run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pipeline import figures
from pipeline.acceptance import TimeLaw
from pipeline.acceptance_artifact import Acceptance
from pipeline.candidates import Forecast, Option, loops, traffic_of
from pipeline.profile_artifact import Profile
from serving.plan import Candidate, Plan

_TOLERANCE = 0.1  # relative error within which predictions are meant to be


def all_of(plan: Plan, profile: Profile, acceptance: Acceptance) -> dict[str, Figure]:
    """Name -> figure, of those that there is something to draw for."""
    drawn = {
        "figure_1": figure_1(plan, profile, acceptance),
        "candidates": candidates(plan),
        "predicted_and_measured": predicted_and_measured(plan),
        "shapes_not_trained": shapes_not_trained(plan),
    }
    return {name: figure for name, figure in drawn.items() if figure is not None}


class _Curve(NamedTuple):
    """Of one task, by K: mean and sd of a request's time in ms, tokens per round / (K + 1)."""

    ks: list[int]
    means: np.ndarray
    sds: np.ndarray
    accepted: np.ndarray


@figures.styled()
def figure_1(plan: Plan, profile: Profile, acceptance: Acceptance) -> Figure | None:
    """Mean time and its spread, acceptance and round time against K, of the best drafter in its place."""
    best = next((one for one in plan.candidates if one.k), None)
    if best is None:
        return None
    traffic = traffic_of(plan.workload)
    forecast = Forecast(acceptance.results, traffic)
    timed = loops(profile.rounds, traffic.batch, traffic.context)
    options = _options(best, timed)
    figure, ((times, rates, rounds),) = figures.panels(1, 3, width=2.1 * figures.WIDTH_INCHES)
    for index, task in enumerate(forecast.tasks):
        alone = forecast.of_task(task)
        curve = _curve(alone, options, {o: alone.loop(o, timed).ms for o in options})
        if curve is None:
            continue
        times.plot(curve.ks, curve.means, label=task, **figures.series(index))
        low, high = curve.means - curve.sds, curve.means + curve.sds
        figures.band(times, curve.ks, low.tolist(), high.tolist(), index)
        rates.plot(curve.ks, curve.accepted, label=task, **figures.series(index))
    rounds.plot(
        [option.k for option in options],
        [forecast.loop(option, timed).ms for option in options],
        **figures.series(len(forecast.tasks)),
    )
    times.set(xlabel="K", ylabel=f"ms per {traffic.tokens} tokens", title="time, mean and sd")
    rates.set(xlabel="K", ylabel="tokens per round / (K + 1)", title="acceptance")
    rounds.set(xlabel="K", ylabel="ms", title=f"round with {best.drafter}")
    rounds.set_ylim(bottom=0)
    for axes in (times, rates, rounds):
        figures.whole_x(axes)
    figures.legend(times)
    figures.legend(rates)
    return figure


def _options(best: Candidate, timed: Mapping[Option, object]) -> list[Option]:
    """The candidate's K under the token rule, and plain decoding."""
    way = (best.drafter, "token", best.placement, best.chips_per_copy)
    same = [o for o in timed if (o.drafter, o.rule, o.placement, o.chips_per_copy) == way]
    plain = [option for option in timed if not option.k][:1]
    return sorted([*plain, *same], key=lambda option: option.k)


def _curve(
    forecast: Forecast, options: Sequence[Option], round_ms: Mapping[Option, float]
) -> _Curve | None:
    ks, rows = [], []
    for option in options:
        requests = forecast.requests(option)
        if requests is None:
            continue
        law = TimeLaw(rounds=requests.rounds(forecast.traffic.tokens), round_ms=round_ms[option])
        ks.append(option.k)
        rows.append((law.mean_ms, law.sd_ms, requests.tau / (option.k + 1)))
    return _Curve(ks, *np.array(rows).T) if rows else None


@figures.styled()
def candidates(plan: Plan) -> Figure | None:
    """Time per token of every candidate against K: predicted as lines, measured as open circles."""
    lines: dict[str, list[Candidate]] = {}
    for one in plan.candidates:
        if one.k and one.rule == "token":
            lines.setdefault(_label(one), []).append(one)
    if not lines:
        return None
    figure, axes = figures.panel(x="K, drafts per round", y="ms per token")
    for index, (label, line) in enumerate(lines.items()):
        line.sort(key=lambda one: one.k)
        axes.plot(
            [one.k for one in line],
            [one.predicted.ms_per_token for one in line],
            label=label,
            **figures.series(index),
        )
        _ran(axes, line, index)
    axes.axhline(plan.baseline_ms_per_token, color=figures.INK, linewidth=1, linestyle=":")
    axes.annotate(
        "plain decoding",
        (1, plan.baseline_ms_per_token),
        xycoords=("axes fraction", "data"),
        ha="right",
        va="bottom",
        fontsize=8,
    )
    axes.set_ylim(bottom=0)
    figures.whole_x(axes)
    figures.legend(axes)
    return figure


def _label(one: Candidate) -> str:
    where = f"{one.chips_per_copy} chips" if one.placement == "copies" else one.placement
    return f"{one.drafter}, {where}"


def _ran(axes: Axes, line: Sequence[Candidate], index: int) -> None:
    """Measured candidates as rings."""
    measured = [(one.k, one.measured.ms_per_token) for one in line if one.measured]
    if measured:
        axes.plot(
            *zip(*measured, strict=True),
            linestyle="",
            marker="o",
            markersize=9,
            markerfacecolor="none",
            markeredgecolor=figures.color(index),
        )


@figures.styled()
def predicted_and_measured(plan: Plan) -> Figure | None:
    """Predicted against measured time per token, with the band of 10% around equality."""
    ran = [one for one in plan.candidates if one.measured]
    if not ran:
        return None
    figure, axes = figures.panel(x="predicted, ms per token", y="measured, ms per token")
    for index, (label, points) in enumerate(_by_drafter(ran)):
        axes.plot(*points, label=label, **{**figures.series(index), "linestyle": ""})
    largest = 1.08 * max(max(one.predicted.ms_per_token, _measured(one)) for one in ran)
    ends = np.array([0.0, largest])
    axes.plot(ends, ends, color=figures.INK, linewidth=1, linestyle=":")
    axes.fill_between(
        ends, (1 - _TOLERANCE) * ends, (1 + _TOLERANCE) * ends, color=figures.FAINT, alpha=0.6
    )
    axes.set(xlim=(0, largest), ylim=(0, largest))
    figures.legend(axes, loc="upper left")
    return figure


def _by_drafter(ran: Sequence[Candidate]) -> Iterator[tuple[str, tuple[list[float], list[float]]]]:
    for name in dict.fromkeys(one.drafter for one in ran):
        own = [one for one in ran if one.drafter == name]
        yield (
            name or "plain",
            ([o.predicted.ms_per_token for o in own], [_measured(o) for o in own]),
        )


def _measured(one: Candidate) -> float:
    assert one.measured is not None
    return one.measured.ms_per_token


@figures.styled()
def shapes_not_trained(plan: Plan) -> Figure | None:
    """Shapes that none beats in both predicted step time and acceptance, with the acceptance's interval."""
    front = (plan.details.get("unseen") or {}).get("front")
    if not front:
        return None
    figure, axes = figures.panel(x="ms per draft step, predicted", y="acceptance, 95% interval")
    for index, one in enumerate(front):
        alpha = one["alpha"]
        below, above = alpha["alpha"] - alpha["low"], alpha["high"] - alpha["alpha"]
        axes.errorbar(
            one["step_ms"],
            alpha["alpha"],
            yerr=[[below], [above]],
            label=f"{one['layers']} x {one['width']}, F {one['mlp_width']}",
            fmt=str(figures.series(index)["marker"]),
            color=figures.color(index),
        )
    axes.set_ylim(0, 1)
    figures.legend(axes)
    return figure
