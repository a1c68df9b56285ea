"""The figures of a report: which there are, and what they show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from matplotlib.figure import Figure

from pipeline import figures_acceptance, figures_codesign, figures_profile
from pipeline.acceptance_artifact import Acceptance
from pipeline.profile_artifact import Profile
from pipeline.report_evidence import Evidence
from serving.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Plot:
    """One figure.

    Attributes:
      name: of its image in TensorBoard.
      title: a few words.
      description: what it shows, also for those who do not see it.
      draw: None where the evidence has nothing to draw.
    """

    name: str
    title: str
    description: str
    draw: Callable[[Evidence], Figure | None]


def _of_profile(make: Callable[[Profile], Figure | None]) -> Callable[[Evidence], Figure | None]:
    return lambda evidence: make(evidence.profile) if evidence.profile else None


def _of_acceptance(
    make: Callable[[Acceptance], Figure | None],
) -> Callable[[Evidence], Figure | None]:
    return lambda evidence: make(evidence.acceptance) if evidence.acceptance else None


def _of_plan(make: Callable[[Plan], Figure | None]) -> Callable[[Evidence], Figure | None]:
    return lambda evidence: make(evidence.plan) if evidence.plan else None


def _figure_1(evidence: Evidence) -> Figure | None:
    plan, profile, acceptance = evidence.plan, evidence.profile, evidence.acceptance
    if plan is None or profile is None or acceptance is None:
        return None
    return figures_codesign.figure_1(plan, profile, acceptance)


RESULTS = (
    Plot(
        name="figure_1",
        title="Time, acceptance and round against K",
        description="Of the best drafter, for each task: the mean time of a request with its standard "
        "deviation, tokens per round as a share of K + 1, and the time of a round. More drafts take longer "
        "and are accepted less often. The panels of Chen et al. 2023, Figure 1.",
        draw=_figure_1,
    ),
)
CHOICE = (
    Plot(
        name="candidates",
        title="Time per token of every candidate",
        description="Lines are predicted, rings are measured, the dotted line is plain decoding.",
        draw=_of_plan(figures_codesign.candidates),
    ),
    Plot(
        name="predicted_and_measured",
        title="Predicted against measured",
        description="Time per token of every candidate that was run; the band is 10% around equality.",
        draw=_of_plan(figures_codesign.predicted_and_measured),
    ),
    Plot(
        name="shapes_not_trained",
        title="Shapes not trained yet",
        description="Those that no other beats in both predicted step time and predicted acceptance.",
        draw=_of_plan(figures_codesign.shapes_not_trained),
    ),
)
ACCEPTANCE = (
    Plot(
        name="acceptance_by_position",
        title="How far drafts survive",
        description="The probability that drafts 1 to i of a round are all accepted, at the largest K that "
        "was run, by drafter and task.",
        draw=lambda evidence: (
            evidence.acceptance and figures_acceptance.survival(evidence.acceptance)
        ),
    ),
    Plot(
        name="acceptance_by_task",
        title="Acceptance by drafter and task",
        description="Accepted / evaluated drafts with 95% intervals over requests; the mark is the mean of "
        "sum(min(p, q)), which must agree.",
        draw=lambda evidence: (
            evidence.acceptance and figures_acceptance.by_task(evidence.acceptance)
        ),
    ),
)
MESH = (
    Plot(
        name="depth",
        title="Latency by shape",
        description="A decode step of each drafter over all chips against its number of layers: median, "
        "and from the 10th to the 90th percentile. Parameters are about equal, layers are not.",
        draw=_of_profile(figures_profile.depth),
    ),
    Plot(
        name="where_time_goes",
        title="Where a decode step's time goes",
        description="A decode step of each model over all chips: arithmetic, collectives, and what the host "
        "adds if it starts every step by itself.",
        draw=_of_profile(figures_profile.where_time_goes),
    ),
    Plot(
        name="scoring",
        title="Scoring several tokens at once",
        description="The target's pass over T tokens, which verifies T - 1 drafts: median, and from the 10th "
        "to the 90th percentile.",
        draw=_of_profile(figures_profile.scoring),
    ),
    Plot(
        name="collectives",
        title="All-reduce against payload",
        description="Latency of an all-reduce: medians, from the 10th to the 90th percentile, and the fit "
        "(constant up to the knee, then a straight line).",
        draw=_of_profile(figures_profile.collectives),
    ),
)
