"""Figures of an acceptance measurement."""

from __future__ import annotations

import dataclasses

from matplotlib.figure import Figure

from pipeline import figures
from pipeline.acceptance_artifact import Acceptance, Result
from pipeline.candidates import task_labels


@figures.styled()
def survival(acceptance: Acceptance) -> Figure | None:
    """P(drafts 1..i accepted) against i, a line for every drafter and task."""
    results = largest(acceptance)
    if not results:
        return None
    figure, axes = figures.panel(
        x="draft i of a round", y="P(drafts 1..i accepted)", title="How far drafts survive"
    )
    for index, one in enumerate(results):
        positions = range(1, len(one.survival) + 1)
        label = f"{one.drafter}, {one.task}"
        axes.plot(positions, one.survival, label=label, **figures.series(index))
    axes.set_ylim(0, 1)
    figures.whole_x(axes)
    figures.legend(axes)
    return figure


@figures.styled()
def by_task(acceptance: Acceptance) -> Figure | None:
    """alpha with its interval by drafter, a series for every task, and its estimate from overlaps."""
    results = largest(acceptance)
    if not results:
        return None
    figure, axes = figures.panel(x="", y="alpha", title="Acceptance by drafter and task")
    drafters = list(dict.fromkeys(one.drafter for one in results))
    tasks = list(dict.fromkeys(one.task for one in results))
    for index, task in enumerate(tasks):
        own = [one for one in results if one.task == task]
        places = [
            drafters.index(one.drafter) + 0.15 * (index - (len(tasks) - 1) / 2) for one in own
        ]
        spans = [(one.alpha_interval, one.alpha) for one in own]
        errors = [[a - i.low for i, a in spans], [i.high - a for i, a in spans]]
        look = {**figures.series(index), "linestyle": ""}
        axes.errorbar(places, [one.alpha for one in own], yerr=errors, label=task, **look)
        axes.plot(
            places,
            [one.alpha_overlap for one in own],
            linestyle="",
            marker="_",
            markersize=14,
            color=figures.INK,
            label="by overlap" if index == len(tasks) - 1 else None,
        )
    axes.set_xticks(range(len(drafters)), drafters)
    axes.set_xlim(-0.5, len(drafters) - 0.5)
    axes.set_ylim(0, 1)
    figures.legend(axes, loc="lower left")
    return figure


def largest(acceptance: Acceptance) -> list[Result]:
    """Of every drafter and task (and warp, if there are several), the most drafts under the token rule."""
    found: dict[tuple[str, str], Result] = {}
    for label, result in zip(task_labels(acceptance.results), acceptance.results, strict=True):
        one = dataclasses.replace(result, task=label)
        best = found.get((one.drafter, label), one)
        if one.rule == "token":
            found[one.drafter, label] = max(best, one, key=lambda result: result.k)
    return list(found.values())
