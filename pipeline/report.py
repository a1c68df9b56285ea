"""`report.html`: everything a run directory shows, in one file that needs no network.

Rendered anew after every stage from whatever artifacts are there. Their texts are other people's: all of
them are escaped. An artifact that cannot be read, or holds what no stage writes, costs a line and no more.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jinja2
from etils import epath
from markupsafe import Markup
from matplotlib.figure import Figure

from pipeline import figures, report_decision, report_evidence
from pipeline.core.events import EventWriter
from pipeline.core.run_dir import RunDir, atomic_write
from pipeline.report_evidence import Evidence
from pipeline.report_format import as_text
from pipeline.report_plots import Plot
from pipeline.report_sections import SECTIONS, Section
from pipeline.run_children import REPORT_LATER

_TEMPLATES = Path(__file__).parent / "templates"
_Made = TypeVar("_Made")


def update(run: RunDir) -> epath.Path:
    """Renders RUN_DIR/report.html, unless `pipeline.run` will; one that would not change is left as it is.

    Raises:
      UserError: the file system refuses.
    """
    if REPORT_LATER not in os.environ:
        _replace(run, render(report_evidence.read(run)))
    return run.report


def restore(run: RunDir) -> None:
    """Renders the report where it is missing or older than an artifact; for a stage with nothing to do."""
    made = [path.stat().mtime for path in (run.profile, run.acceptance, run.plan) if path.exists()]
    if not run.report.exists() or run.report.stat().mtime < max(made, default=0):
        update(run)


def conclude(run: RunDir) -> str:
    """At the end of a run: updates the report, and its figures in TensorBoard; the text to end with."""
    evidence = report_evidence.read(run)
    if _replace(run, render(evidence)) or not run.tensorboard("report").exists():
        with EventWriter(run.tensorboard("report")) as writer:
            write_figures(evidence, writer)
    shown = report_decision.paper_table(evidence)
    said = [as_text(shown)] if shown else []
    if evidence.plan:
        reason, _ = report_decision.reason(evidence.plan)
        said += [f"{report_decision.headline(evidence.plan)}\n{reason}\n"]
    return "\n".join([*said, f"report: {run.report}\n"])


def write_figures(evidence: Evidence, writer: EventWriter, step: int = 0) -> None:
    """All figures of the report as images."""
    page = _Page(evidence)
    for section in SECTIONS:
        for plot, png in page.drawn(section, lambda figure, _: figures.png(figure)):
            writer.image(step, f"report/{plot.name}", png)


def render(evidence: Evidence) -> str:
    """The page; the same artifacts give the same text."""
    page = _Page(evidence)
    sections = [page.section(section) for section in SECTIONS]
    decision = page.guarded("the decision", lambda: _decision(evidence))
    return (
        _environment()
        .get_template("report.html.j2")
        .render(
            decision=decision,
            evidence=evidence,
            sections=sections,
            warnings=[*evidence.warnings, *page.warnings],
        )
    )


def _replace(run: RunDir, page: str) -> bool:
    """Writes the page if it is not there already; whether it did."""
    if run.report.exists() and run.report.read_bytes() == page.encode():
        return False
    atomic_write(run.report, page)
    return True


def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _decision(evidence: Evidence) -> dict[str, Any] | None:
    plan = evidence.plan
    if plan is None:
        return None
    reason, notes = report_decision.reason(plan)
    return {
        "speculate": plan.verdict == "speculate",
        "headline": report_decision.headline(plan),
        "lead": report_decision.lead(plan),
        "tiles": list(report_decision.tiles(plan)),
        "bill": report_decision.bill(plan),
        "command": report_decision.command(plan, evidence.where),
        "reason": reason,
        "notes": notes,
    }


class _Image(NamedTuple):
    """An element for the page; a wide one has a row of its own."""

    svg: Markup
    wide: bool


def _in_page(figure: Figure, plot: Plot) -> _Image:
    # SVG from matplotlib has its texts escaped already.
    wide = figure.get_figwidth() > 1.5 * figures.WIDTH_INCHES
    return _Image(Markup(figures.svg(figure, plot.description)), wide)


@dataclass
class _Page:
    """One rendering.

    Attributes:
      warnings: of what could not be shown.
    """

    evidence: Evidence
    warnings: list[str] = field(default_factory=list)

    def section(self, section: Section) -> dict[str, Any]:
        """What the template shows of it."""
        tables = [
            self.guarded(f"a table of {section.title!r}", lambda make=make: make(self.evidence))
            for make in section.tables
        ]
        plots = self.drawn(section, _in_page)
        return {"about": section, "tables": [t for t in tables if t], "plots": plots}

    def drawn(
        self, section: Section, form: Callable[[Figure, Plot], _Made]
    ) -> list[tuple[Plot, _Made]]:
        """Every figure that there is something to draw for, as `form` has it."""

        def one(plot: Plot) -> _Made | None:
            figure = plot.draw(self.evidence)
            return None if figure is None else form(figure, plot)

        made = [
            (plot, self.guarded(f"the figure {plot.title!r}", lambda plot=plot: one(plot)))
            for plot in section.plots
        ]
        return [(plot, image) for plot, image in made if image is not None]

    def guarded(self, what: str, make: Callable[[], _Made]) -> _Made | None:
        """What `make` makes, or a warning: foreign artifacts hold combinations that no stage writes."""
        try:
            return make()
        except Exception as error:
            self.warnings.append(f"{what} is left out: {type(error).__name__}: {error}")
            return None
