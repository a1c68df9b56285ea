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
      metric: "rouge2" or "pass@1".
      plain, speculative, difference: means over requests; the difference is of pairs.
      verdict: "within noise", or which arm is better.
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
      k: drafts per round; `source` "derived" follows from a larger k, exact under the token rule.
      emitted: tokens of all requests; rounds likewise.
      tau: emitted tokens per round, of rounds that drafted all k.
      alpha: accepted / evaluated drafts.
      alpha_overlap: mean of sum(min(p, q)) at evaluated positions; agrees with alpha.
      conditional: P(draft i accepted | those before it were), i = 1..k.
      survival: P(drafts 1..i accepted).
      alpha_sd_between_requests: spread of alpha beyond what chance within a request explains.
      overlap_teacher_forced: mean overlap over held-out text, every position counted.
      alpha_interval: 95% bootstrap over requests.
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
    scores: dict[str, Score] = field(default_factory=dict)  # "drafter/task"
    skipped: tuple[Skipped, ...] = ()
