"""What could be served, and how long requests would take: round times of a profile, acceptance of drafters.

A round of drafter, placement and K costs what the profile measured, linearly interpolated over K between
measured ones; what it emits follows from the survival of the drafter's drafts. See `pipeline.acceptance`
for the law that puts both together.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from drafters.shapes import TransformerShape
from pipeline.acceptance import Requests, TimeLaw, gap_quantile_ms, mean_acceptance
from pipeline.acceptance_artifact import Result
from pipeline.core.errors import UserError
from pipeline.profile_artifact import Round, Where
from pipeline.trials import shown_warp
from pipeline.work import chip_shape
from serving.pair import NGRAM, look_first, parts_of
from serving.plan import Choice, Times, Workload

Objective = Literal["mean", "p50", "p90", "p99", "p99_gap"]
OBJECTIVES: tuple[Objective, ...] = ("mean", "p50", "p90", "p99", "p99_gap")
_GAP_LEVEL = 0.99  # of the time between tokens
_NORMAL = 1.96  # half a 95% interval, in standard deviations
_SMALLEST = 1e-3
_MOST_TOKENS = 1_000_000  # of an answer whose law is worked out
_FIELDS: Mapping[Objective, str] = {
    "mean": "ms_per_token",
    "p50": "p50_ms",
    "p90": "p90_ms",
    "p99": "p99_ms",
    "p99_gap": "p99_gap_ms",
}
IN_WORDS: Mapping[Objective, str] = {
    "mean": "mean ms per token",
    "p50": "median time of a request",
    "p90": "90th percentile of a request's time",
    "p99": "99th percentile of a request's time",
    "p99_gap": "99th percentile of the time between tokens",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What is to be served; every task has an equal share of the requests.

    Attributes:
      tasks: of acceptance.json; () for all of it. A task that was evaluated under several warps stands for
        all of them, "task (warp)" for one.
      tokens: N, length of an answer.
      batch: B, requests that are decoded together.
      context: where in a request rounds are timed: the profile's nearest context is used.
    """

    tasks: tuple[str, ...] = ()
    tokens: int = 128
    batch: int = 1
    context: int = 256

    def __post_init__(self):
        for name in ("tokens", "batch", "context"):
            if getattr(self, name) < 1:
                raise ValueError(f"Traffic.{name} must be positive, not {getattr(self, name)}")
        if self.tokens > _MOST_TOKENS:
            raise ValueError(f"Traffic.tokens = {self.tokens} must be at most {_MOST_TOKENS}")


def traffic_of(work: Workload) -> Traffic:
    """What a plan was made for."""
    return Traffic(tasks=work.tasks, tokens=work.tokens, batch=work.batch, context=work.context)


class Option(NamedTuple):
    """A way to decode. Plain decoding has no drafter and K = 0."""

    drafter: str
    k: int
    rule: Literal["token", "block"]
    placement: Where
    chips_per_copy: int

    def __str__(self) -> str:
        if not self.k:
            return "plain decoding"
        rule = "" if self.rule == "token" else ", block rule"
        return f"{self.drafter} K = {self.k} ({self.where}{rule})"

    @property
    def where(self) -> str:
        """Where the drafter is, in words."""
        if self.placement == "copies":
            return f"copies of {self.chips_per_copy} chips"
        return {"leader": "on the leader", "sharded": "over all chips"}[self.placement]

    def choice(self) -> Choice:
        """For `serving.pair.load`."""
        return Choice(
            drafter=self.drafter,
            k=self.k,
            rule=self.rule,
            chips_per_copy=self.chips_per_copy if self.placement == "copies" else 0,
            leader=self.placement == "leader",
        )


class Loop(NamedTuple):
    """The time of a round: milliseconds, and half the width from its p10 to its p90, relative."""

    ms: float
    spread: float


class _Way(NamedTuple):
    drafter: str
    rule: Literal["token", "block"]
    placement: Where
    chips_per_copy: int


def loops(rounds: Iterable[Round], batch: int, context: int) -> dict[Option, Loop]:
    """The round time of every option at batch B: each K that was measured or lies between two that were.

    Where no round was timed with the block rule, its round is taken to be as long as the token rule's. A
    model behind a lookup has the model's rounds; `Forecast.loop` knows how many of them are copies.
    """
    ways: dict[_Way, dict[int, Loop]] = {}
    for nearest in _nearest(rounds, batch, context):
        way = _Way(nearest.drafter, nearest.rule, nearest.placement, nearest.chips_per_copy)
        ways.setdefault(way, {})[nearest.k] = _loop(nearest)
    for way, timed in list(ways.items()):
        if way.drafter and way.rule == "token":
            ways.setdefault(way._replace(rule="block"), timed)
    for way, timed in list(ways.items()):
        if way.drafter and way._replace(drafter=NGRAM) in ways and way.drafter != NGRAM:
            ways[way._replace(drafter=look_first(way.drafter))] = timed
    return {
        Option(way.drafter, k, way.rule, way.placement, way.chips_per_copy): loop
        for way, timed in ways.items()
        for k, loop in _interpolated(timed)
    }


def _nearest(rounds: Iterable[Round], batch: int, context: int) -> Iterator[Round]:
    """Of each option the round whose context is nearest."""
    found: dict[tuple, Round] = {}
    for r in rounds:
        if r.batch == batch:
            key = (r.drafter, r.k, r.rule, r.placement, r.chips_per_copy)
            best = found.get(key, r)
            found[key] = min(best, r, key=lambda one: abs(one.context - context))
    return iter(found.values())


def _loop(timed: Round) -> Loop:
    times = timed.round_ms
    return Loop(times.p50, (times.p90 - times.p10) / (2 * times.p50))


def _interpolated(timed: Mapping[int, Loop]) -> Iterator[tuple[int, Loop]]:
    counts = sorted(timed)
    columns = np.array([timed[k] for k in counts])
    for k in range(counts[0], counts[-1] + 1):
        ms, spread = (float(np.interp(k, counts, column)) for column in columns.T)
        yield k, Loop(ms, spread)


def _mixed(share: float, some: Loop, others: Loop) -> Loop:
    """The mean round where a share of them is `some`."""
    ms, spread = (share * a + (1 - share) * b for a, b in zip(some, others, strict=True))
    return Loop(ms, spread)


def plain_of(timed: Mapping[Option, Loop]) -> Option | None:
    """Plain decoding where it is fastest; None if it was not timed."""
    return min((o for o in timed if not o.k), key=lambda o: timed[o].ms, default=None)


class Forecast:
    """How long the requests of some tasks take, by what their drafts' acceptance was found to be.

    Args:
      results: of acceptance.json.
      traffic: the requests.

    Raises:
      UserError: a task of the traffic was not evaluated.
    """

    def __init__(self, results: Sequence[Result], traffic: Traffic):
        labels = task_labels(results)
        known = sorted({*labels, *(result.task for result in results)})
        if missing := [task for task in traffic.tasks if task not in known]:
            raise UserError(
                f"Traffic.tasks names {missing[0]!r}, and acceptance.json holds {known or 'no results'}: "
                "evaluate that task, or choose among these"
            )
        self.traffic = traffic
        self._results = [
            (label, result)
            for label, result in zip(labels, results, strict=True)
            if not traffic.tasks or {label, result.task} & set(traffic.tasks)
        ]
        self.tasks = tuple(dict.fromkeys(label for label, _ in self._results))
        self._requests: dict[tuple[str, str, int], Requests | None] = {}
        self._rounds: dict[tuple[str, str, int], np.ndarray] = {}

    def of_task(self, task: str) -> Forecast:
        """Of one task alone."""
        if self.tasks == (task,):
            return self
        alone = [result for label, result in self._results if label == task]
        return Forecast(alone, dataclasses.replace(self.traffic, tasks=()))

    def at_batch(self, batch: int) -> Forecast:
        """Of the same requests, served `batch` at a time."""
        found = copy.copy(self)
        found.traffic = dataclasses.replace(self.traffic, batch=batch)
        return found

    def requests(self, option: Option) -> Requests | None:
        """All tasks' requests as this option's drafter is worth to them; None where that is not known."""
        if not option.k:
            return Requests.alike([])
        key = (option.drafter, option.rule, option.k)
        if key not in self._requests:
            chosen = [self._result(option, task) for task in self.tasks]
            known = [_requests(result, option.k) for result in chosen if result is not None]
            complete = len(known) == len(self.tasks) and known
            self._requests[key] = Requests.mixed(known) if complete else None
        return self._requests[key]

    def times(self, option: Option, round_ms: float, longest_ms: float = 0.0) -> Times | None:
        """Of decoding with rounds that take `round_ms`; None where acceptance is not known.

        Args:
          option: how.
          round_ms: of the mean round.
          longest_ms: of one with drafts, where others take less: what the rarer gaps between tokens are, if
            they are not too rare.
        """
        requests, key = self.requests(option), (option.drafter, option.rule, option.k)
        if requests is None:
            return None
        if key not in self._rounds:
            self._rounds[key] = requests.rounds(self.traffic.tokens)
        if self._busy(option) / requests.tau <= 1 - _GAP_LEVEL:
            longest_ms = 0.0
        return times_of(requests, self._rounds[key], round_ms, longest_ms)

    def loop(self, option: Option, timed: Mapping[Option, Loop]) -> Loop:
        """The mean round.

        Where no row of a batch has drafts, it is one of plain decoding. Where all rows copy what a model
        would have drafted, it is one of the lookup, and the model takes in what is committed.
        """
        loop, plain = timed[option], plain_of(timed)
        if plain is not None:
            loop = _mixed(1 - self._busy(option), timed[plain], loop)
        lookup = option._replace(drafter=NGRAM)
        if option.drafter != NGRAM and NGRAM in parts_of(option.drafter) and lookup in timed:
            copying = timed[lookup]
            draft_ms = max(0.0, timed[option].ms - copying.ms) / option.k
            share = self._mean(option, "looked_up") ** self.traffic.batch
            loop = _mixed(share, copying._replace(ms=copying.ms + draft_ms), loop)
        return loop

    def _busy(self, option: Option) -> float:
        """The share of rounds in which some row of the batch has drafts."""
        return 1 - (1 - self._mean(option, "drafting")) ** self.traffic.batch

    def _mean(self, option: Option, share: Literal["drafting", "looked_up"]) -> float:
        """A share of rounds over all tasks: each has as many tokens, in tokens / tau rounds."""
        known = self._known(option)
        if not known:
            return 1.0
        rounds = [1 / (1 + sum(result.survival[: option.k])) for result in known]
        return float(np.average([getattr(result, share) for result in known], weights=rounds))

    def acceptance_spread(self, option: Option) -> float:
        """How uncertain tau is: half its 95% interval, relative, over all tasks."""
        widths = [_tau_spread(result, option.k) for result in self._known(option)]
        return float(np.sqrt(np.sum(np.square(widths)))) / max(1, len(widths))

    def alpha(self, option: Option) -> float:
        """Mean acceptance over the tasks, 0 without drafts."""
        requests = self.requests(option)
        return mean_acceptance(requests.weights @ requests.survival) if requests else 0.0

    def alpha_sd(self, option: Option) -> float:
        """How much alpha differs between the requests of a task, the mean over the tasks that are known."""
        return float(np.mean([r.alpha_sd_between_requests for r in self._known(option)]))

    def warps(self) -> dict[str, Any]:
        """Of each task, what shapes its distributions; of all where they agree."""
        found = {label: result.warp for label, result in self._results}
        first = next(iter(found.values()), {})
        return dict(first) if all(warp == first for warp in found.values()) else dict(found)

    def _known(self, option: Option) -> list[Result]:
        """The evidence of every task that has some."""
        found = (self._result(option, task) for task in self.tasks)
        return [result for result in found if result]

    def _result(self, option: Option, task: str) -> Result | None:
        """The evidence at K drafts, or, which is as good under the token rule, at the next larger number."""
        found = [
            result
            for label, result in self._results
            if (result.drafter, label, result.rule) == (option.drafter, task, option.rule)
            and (result.k == option.k or (option.rule == "token" and result.k > option.k))
        ]
        return min(found, key=lambda result: (result.k, result.source == "derived"), default=None)


def task_labels(results: Sequence[Result]) -> list[str]:
    """The task of each result, with its warp where the task was evaluated under several."""
    warps: dict[str, list] = {}
    for result in results:
        if result.warp not in warps.setdefault(result.task, []):
            warps[result.task].append(result.warp)
    return [r.task if len(warps[r.task]) == 1 else shown_warp(r.task, r.warp) for r in results]


def times_of(
    requests: Requests, rounds: np.ndarray, round_ms: float, longest_ms: float = 0.0
) -> Times:
    """The time law as an artifact holds it; `rounds` f64[N] is that of the requests."""
    law = TimeLaw(rounds=rounds, round_ms=round_ms)
    return Times(
        ms_per_token=law.mean_ms / law.tokens,
        p50_ms=law.quantile_ms(0.5),
        p90_ms=law.quantile_ms(0.9),
        p99_ms=law.quantile_ms(0.99),
        p99_gap_ms=gap_quantile_ms(requests, max(round_ms, longest_ms), _GAP_LEVEL),
    )


def _requests(result: Result, k: int) -> Requests:
    return Requests.spread(result.survival, result.alpha_sd_between_requests).drafting(k)


def _tau_spread(result: Result, k: int) -> float:
    """Half the interval of tau, relative: that of alpha, by which conditional acceptances are bent.

    One request tells no spread between requests: then it is that of its drafts, as if they were independent.
    """
    alpha, interval = _inside(result.alpha), result.alpha_interval
    low, high = interval.low, interval.high
    if result.requests < 2:
        error = _NORMAL * math.sqrt(alpha * (1 - alpha) / max(1, result.rounds))
        low, high = alpha - error, alpha + error
    survival = np.asarray(result.survival[:k])
    known = 0 < result.alpha < 1
    powers = np.log(_inside(survival)) / np.log(alpha) if known else np.arange(1, k + 1)
    taus = [1 + (_inside(a) ** powers).sum() for a in (low, high)]
    return float(taus[1] - taus[0]) / (2 * (1 + survival.sum()))


def _inside(share: Any) -> Any:
    """Away from 0 and 1, which no power changes, and no number of drafts proves."""
    return np.clip(share, _SMALLEST, 1 - _SMALLEST)


def value(times: Times, objective: Objective) -> float:
    """What the objective asks to be small."""
    found = getattr(times, _FIELDS[objective])
    return float("inf") if found is None else found


def chip_bytes(shape: TransformerShape, chips: int, positions: int, dtype: str) -> int:
    """Bytes of weights and of caches of `positions` positions (all rows together) on one of `chips` chips."""
    share = chip_shape(shape, chips)
    return share.weight_bytes(dtype) + positions * share.cache_bytes_per_token(dtype)
