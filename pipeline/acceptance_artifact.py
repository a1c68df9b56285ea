"""`acceptance.json`: what each drafter is worth, per task. Written by `pipeline.evaluate`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from pipeline.core import artifacts


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """An estimate with its 95% bootstrap interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Quality of both arms' answers on one task: they should agree, since the law is the same.

    Attributes:
      metric: "rouge2" or "pass@1" (or another k).
      plain, speculative, difference: means over prompts; the difference, speculative - plain, is of pairs.
      verdict: "within noise" if the interval of the difference holds zero, or which arm is better.
    """

    metric: str
    plain: Interval
    speculative: Interval
    difference: Interval
    verdict: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Real speculative generation of one drafter on one task.

    Attributes:
      warp: sampling fields that shape the distributions: temperature, top_k, top_p, min_p.
      k: drafts per round; `source` "derived" follows from a larger k, exact under the token rule (see
        `pipeline.rounds`).
      emitted: tokens of all requests, without end tokens; rounds likewise, with the first of each request,
        which only continues the prompt.
      tau: tokens per round with room for k drafts, 1 + sum(survival). A round in which the drafter had
        nothing to propose counts.
      drafting: of the rounds with room for drafts, the share in which there were any; others are decode
        steps.
      looked_up: of the rounds with drafts, the share in which they were copied from the text.
      alpha: accepted / evaluated drafts; evaluated are the accepted ones and the one rejected. Drafts behind
        an end token, a stop string or the limit are not counted.
      alpha_overlap: mean of sum(min(p, q)) at the evaluated positions, by teacher forcing; agrees with alpha
        under the token rule. (The block rule accepts more.)
      conditional: P(draft i accepted | those before it were), i = 1..k, of rounds with room for it; no
        property of a single draft under the block rule.
      survival: P(drafts 1..i accepted), their product.
      alpha_sd_between_requests: spread of alpha beyond what chance within a request explains.
      overlap_teacher_forced: mean overlap over held-out text, every position counted.
      alpha_interval, tau_interval: 95% bootstrap over requests.
      disagreement: of accepted drafts and their overlaps, in standard deviations; standard normal if the rule
        is exact. None under the block rule.
    """

    drafter: str
    task: str
    warp: dict[str, Any]
    rule: Literal["token", "block"]
    k: int
    requests: int
    rounds: int
    emitted: int
    tau: float
    alpha: float
    alpha_overlap: float
    conditional: tuple[float, ...]
    survival: tuple[float, ...]
    alpha_sd_between_requests: float
    alpha_interval: Interval
    overlap_teacher_forced: float | None = None
    source: Literal["measured", "derived", "published"] = "measured"
    tau_interval: Interval | None = None
    disagreement: float | None = None
    drafting: float = 1.0
    looked_up: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """A task that could not be run, and what to do about it."""

    task: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Acceptance(artifacts.Artifact):
    """`acceptance.json`."""

    SCHEMA: ClassVar[int] = 1
    STAGE: ClassVar[str] = "pipeline.evaluate"

    target: str
    results: tuple[Result, ...]
    # "drafter/task"; the task with its warp where it is evaluated more than once.
    scores: dict[str, Score] = field(default_factory=dict)
    skipped: tuple[Skipped, ...] = ()
