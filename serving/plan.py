"""The plan: what to serve on one mesh, or that speculation does not pay."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from pipeline.core import artifacts


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Of decoding: milliseconds per token, and quantiles of a request's time.

    Attributes:
      p99_gap_ms: 99th percentile of the time between one token and the next; None if it was not looked at.
    """

    ms_per_token: float
    p50_ms: float
    p90_ms: float
    p99_ms: float
    p99_gap_ms: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One choice that was considered.

    Attributes:
      placement: "sharded", "copies" or "leader", with `chips_per_copy` as in `Plan`.
      error: of the predicted ms per token, relative to the measured ones.
      bytes_per_chip: of weights and caches of target and drafter; 0 if the shapes are not known.
    """

    drafter: str
    k: int
    rule: str
    placement: str
    predicted: Times
    measured: Times | None = None
    chips_per_copy: int = 0
    error: float | None = None
    bytes_per_chip: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What the plan was made for; `context` is how much text rounds were timed behind."""

    tasks: tuple[str, ...]
    warp: dict[str, Any]
    batch: int
    tokens: int
    context: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingBill:
    """What the drafter cost, and after how many served tokens it has paid that back."""

    tokens: int
    hours: float
    break_even_tokens: float


@dataclass(frozen=True, kw_only=True)
class Plan(artifacts.Artifact):
    """`plan.json`. Without speculation `drafter` is empty and `k` is 0."""

    SCHEMA: ClassVar[int] = 1
    STAGE: ClassVar[str] = "pipeline.codesign"

    verdict: Literal["speculate", "do_not_speculate"]
    target: str
    drafter: str
    k: int
    rule: Literal["token", "block"]
    placement: Literal["sharded", "leader"]
    chips_per_copy: int
    objective: str
    workload: Workload
    predicted: Times
    measured: Times | None
    baseline_ms_per_token: float
    training_cost: TrainingBill | None
    candidates: tuple[Candidate, ...]
    reason: str
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """How a target is served.

    Attributes:
      drafter: a model of the run directory, a path to a model directory, "ngram" (drafts are looked up in the
        text so far), a model with "+ngram" behind its name (looked up where the text repeats itself,
        else the model's), or "" for none.
      k: drafts per round; 0 is plain decoding.
      rule: "token" or "block".
      chips_per_copy: chips that share one copy of the drafter; 0 for all.
      leader: the first chip alone drafts and verifies; the drafter then lies whole on it.
    """

    drafter: str = ""
    k: int = 4
    rule: Literal["token", "block"] = "token"
    chips_per_copy: int = 0
    leader: bool = False

    def __post_init__(self):
        if self.k < 0:
            raise ValueError(f"Choice.k must be at least 0, not {self.k}")
        if self.leader and self.chips_per_copy > 1:
            raise ValueError(
                f"Choice.leader drafts on one chip; chips_per_copy = {self.chips_per_copy} must be 1"
            )
