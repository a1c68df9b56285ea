"""The sections of a report: which figures and tables stand in each, and what is said where there are none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pipeline import report_decision, report_plots, report_published, report_tables
from pipeline.acceptance_artifact import Acceptance
from pipeline.profile_artifact import Profile
from pipeline.report_evidence import Evidence
from pipeline.report_format import Table
from pipeline.report_plots import Plot
from serving.plan import Plan

MakeTable = Callable[[Evidence], Table | None]


@dataclass(frozen=True, kw_only=True)
class Section:
    """One section.

    Attributes:
      anchor: within the page.
      lead: what a reader should know first.
      stage: that makes what is shown here, to be run where it is missing.
      plots, tables: in this order.
    """

    anchor: str
    title: str
    lead: str
    stage: str
    plots: tuple[Plot, ...]
    tables: tuple[MakeTable, ...]


def _of_plan(*makers: Callable[[Plan], Table | None]) -> tuple[MakeTable, ...]:
    return tuple(lambda e, make=make: make(e.plan) if e.plan else None for make in makers)


def _of_profile(*makers: Callable[[Profile], Table | None]) -> tuple[MakeTable, ...]:
    return tuple(lambda e, make=make: make(e.profile) if e.profile else None for make in makers)


def _of_acceptance(*makers: Callable[[Acceptance], Table | None]) -> tuple[MakeTable, ...]:
    return tuple(
        lambda e, make=make: make(e.acceptance) if e.acceptance else None for make in makers
    )


SECTIONS = (
    Section(
        anchor="results",
        title="Results",
        lead="Autoregressive sampling (ArS) and speculative sampling (SpS) of the same target. "
        "Speed-ups in brackets are 95% intervals.",
        stage="pipeline.codesign",
        plots=report_plots.RESULTS,
        tables=(
            report_decision.paper_table,
            *_of_plan(
                report_published.table_1,
                report_published.figure_1,
                report_published.equal_size_drafters,
            ),
        ),
    ),
    Section(
        anchor="choice",
        title="Why this choice",
        lead="Every candidate is predicted from the mesh's round times and the drafter's acceptance; the "
        "best ones are run for real, in turns with plain decoding.",
        stage="pipeline.codesign",
        plots=report_plots.CHOICE,
        tables=_of_plan(
            report_decision.confirmed,
            report_decision.flips,
            report_decision.regrets,
            report_decision.by_batch,
            report_decision.by_task,
            report_decision.unseen,
            report_tables.candidates,
        ),
    ),
    Section(
        anchor="acceptance",
        title="What each drafter is worth",
        lead="Acceptance of drafts in real speculative generation.",
        stage="pipeline.evaluate",
        plots=report_plots.ACCEPTANCE,
        tables=_of_acceptance(report_tables.scores, report_tables.skipped, report_tables.results),
    ),
    Section(
        anchor="mesh",
        title="What the mesh costs",
        lead="Measured here unless a row says otherwise; a compiled or predicted number is never called "
        "measured.",
        stage="pipeline.profile",
        plots=report_plots.MESH,
        tables=_of_profile(
            report_tables.topology,
            report_tables.collectives,
            report_tables.layers,
            report_tables.steps,
            report_tables.rounds,
            report_tables.latency_model,
            report_tables.compiled,
            report_tables.notes,
        ),
    ),
    Section(
        anchor="training",
        title="Training",
        lead="",
        stage="pipeline.train",
        plots=(),
        tables=(report_tables.models,),
    ),
)
