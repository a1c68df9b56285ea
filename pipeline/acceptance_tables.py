"""acceptance.json for people: a table for the terminal, and TensorBoard's curves."""

from __future__ import annotations

from collections.abc import Sequence

from etils import epath

from pipeline.acceptance_artifact import Acceptance, Interval, Result
from pipeline.core.events import EventWriter
from pipeline.trials import shown_warp

_COLUMNS = ("task", "drafter", "rule", "K", "tau", "alpha", "95%", "overlap", "sd", "held out")


def measured(acceptance: Acceptance) -> list[Result]:
    """The results of real runs, by task."""
    found = [result for result in acceptance.results if result.source == "measured"]
    tasks = list(dict.fromkeys(task_label(result) for result in found))
    return sorted(found, key=lambda result: tasks.index(task_label(result)))


def task_label(result: Result) -> str:
    """Task and warp."""
    return shown_warp(result.task, result.warp)


def _span(interval: Interval) -> str:
    return f"{interval.low:.3f}-{interval.high:.3f}"


def _row(result: Result) -> tuple[str, ...]:
    held_out = result.overlap_teacher_forced
    return (
        task_label(result),
        result.drafter,
        result.rule,
        str(result.k),
        f"{result.tau:.2f}",
        f"{result.alpha:.3f}",
        _span(result.alpha_interval),
        f"{result.alpha_overlap:.3f}",
        f"{result.alpha_sd_between_requests:.3f}",
        "-" if held_out is None else f"{held_out:.3f}",
    )


def _score_rows(acceptance: Acceptance) -> list[tuple[str, ...]]:
    return [
        (
            where,
            score.metric,
            f"{score.plain.value:.3f}",
            f"{score.speculative.value:.3f}",
            f"{score.difference.value:+.3f} ({score.difference.low:+.3f} to {score.difference.high:+.3f})",
            score.verdict,
        )
        for where, score in acceptance.scores.items()
    ]


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def text(acceptance: Acceptance) -> str:
    """A table of the real runs, and of both arms' quality."""
    parts = [_aligned([_COLUMNS, *map(_row, measured(acceptance))])]
    if acceptance.scores:
        head = ("drafter/task", "metric", "plain", "speculative", "difference", "")
        parts.append(_aligned([head, *_score_rows(acceptance)]))
    return "\n\n".join(parts)


def write_events(folder: epath.Path, acceptance: Acceptance, config: str) -> None:
    """TensorBoard: one run per drafter and rule; curves over positions and over K, tables as text."""
    with EventWriter(folder) as events:
        events.text(0, "config", f"```\n{config}\n```")
        events.text(0, "acceptance", f"```\n{text(acceptance)}\n```")
        for skipped in acceptance.skipped:
            events.text(0, f"skipped/{skipped.task}", skipped.reason)
    runs: dict[str, list[Result]] = {}
    for result in acceptance.results:
        runs.setdefault(f"{result.drafter.replace('/', '_')}-{result.rule}", []).append(result)
    for name, results in runs.items():
        with EventWriter(folder / name) as events:
            for result in results:
                _write_result(events, result)


def _write_result(events: EventWriter, result: Result) -> None:
    task = task_label(result)
    by_k = {"tokens_per_round": result.tau, "alpha": result.alpha, "overlap": result.alpha_overlap}
    events.scalars(result.k, {f"by_drafts/{name}/{task}": v for name, v in by_k.items()})
    if result.source != "measured":
        return
    columns = zip(result.conditional, result.survival, strict=True)
    for position, (conditional, survival) in enumerate(columns, 1):
        events.scalars(
            position,
            {
                f"by_position/accepted_given_those_before/{task}": conditional,
                f"by_position/accepted_with_those_before/{task}": survival,
            },
        )
