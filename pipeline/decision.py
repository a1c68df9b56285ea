"""Which candidate to serve, whether to speculate at all, and what would change that. Pure arithmetic.

Candidates are ranked by the objective under the time law, with the round time that was measured for the
candidate itself where it was run. A run of a few prompts knows the round time well and acceptance
badly, the evaluation behind acceptance.json the other way round.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import scipy

from pipeline.acceptance import Requests, mean_acceptance
from pipeline.candidates import (
    IN_WORDS,
    OBJECTIVES,
    Forecast,
    Loop,
    Objective,
    Option,
    loops,
    plain_of,
    times_of,
    value,
)
from pipeline.core.errors import UserError
from pipeline.profile_artifact import Round
from serving.plan import Times

# Measured means that lie closer to the best one are told apart by the law, which knows acceptance better.
_CLOSE = 0.03
# Powers of the conditional acceptance between which a change of the decision is looked for.
_POWERS = (1e-3, 1e3)


class Gain(NamedTuple):
    """How many times as fast as plain decoding, with a 95% interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A candidate with what is known about it.

    Attributes:
      loop: its round by the profile.
      predicted: by the law with that round.
      uncertainty: of the prediction, relative: half the 95% interval of tau, the spread of the round.
      measured, measured_round_ms, measured_gain: of a real run; None where it was not run.
      refined: by the law with the measured round.
    """

    option: Option
    loop: Loop
    predicted: Times
    uncertainty: float
    measured: Times | None = None
    measured_round_ms: float | None = None
    measured_gain: Gain | None = None
    refined: Times | None = None

    def score(self, objective: Objective) -> float:
        """The best estimate of what the objective asks to be small."""
        return value(self.refined or self.predicted, objective)


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What to serve.

    Attributes:
      chosen: `plain` if nothing beats it by more than the noise.
      best: the best that speculates, chosen or not; None if there is none.
      gain: of `best` over plain decoding in terms of the objective.
      ranking: the chosen one, then the others, best first; only measured ones if some were measured.
    """

    objective: Objective
    plain: Judged
    chosen: Judged
    best: Judged | None
    gain: Gain
    ranking: tuple[Judged, ...]

    @property
    def speculates(self) -> bool:
        """The verdict."""
        return self.chosen is not self.plain

    @property
    def runner_up(self) -> Judged | None:
        """The best of the others."""
        return next(iter(self.ranking[1:]), None)

    def regret(self, other: Judged) -> float:
        """How much worse `other` is than the chosen one, relative; of means that were measured, these."""
        chosen = self.chosen
        if self.objective == "mean" and chosen.measured and other.measured:
            return other.measured.ms_per_token / chosen.measured.ms_per_token - 1
        return other.score(self.objective) / chosen.score(self.objective) - 1


def judged(forecast: Forecast, timed: Mapping[Option, Loop]) -> list[Judged]:
    """Every option whose acceptance is known, with its prediction; plain decoding first.

    Raises:
      UserError: plain decoding was not profiled.
    """
    plain = plain_of(timed)
    if plain is None:
        raise UserError(
            f"profile.json has no round of plain decoding (k = 0) at batch {forecast.traffic.batch}: "
            "run python -m pipeline.profile with that batch"
        )
    options = [plain, *(option for option in timed if option.k)]
    means = {option: forecast.loop(option, timed) for option in options}
    return [
        Judged(
            option=option,
            loop=loop,
            predicted=times,
            uncertainty=float(
                np.hypot(
                    np.hypot(loop.spread, timed[plain].spread), forecast.acceptance_spread(option)
                )
            ),
        )
        for option, loop in means.items()
        if (times := forecast.times(option, loop.ms, timed[option].ms)) is not None
    ]


def ranked(field: Iterable[Judged], objective: Objective) -> list[Judged]:
    """Best first; of equals the one with fewer drafts."""

    def key(one: Judged) -> tuple[float, int, Option]:
        return float(f"{one.score(objective):.9g}"), one.option.k, one.option

    return sorted(field, key=key)


def decide(field: Sequence[Judged], objective: Objective) -> Decision:
    """Chooses; the first of the field is plain decoding."""
    plain, others = field[0], list(field[1:])
    if any(one.measured for one in others):
        others = [one for one in others if one.measured]
    order = ranked(others, objective)
    # Noise is asked about first: a fast one that may be luck must not hide one that is not.
    won = [one for one in order if _gain(one, plain, objective).low > 1]
    best = next(iter(_not_slower(won or order, objective)), None)
    chosen = best if won and best else plain
    rest = ranked((one for one in (plain, *others) if one is not chosen), objective)
    found = Decision(
        objective=objective,
        plain=plain,
        chosen=chosen,
        best=best,
        gain=_gain(best, plain, objective) if best else Gain(1.0, 1.0, 1.0),
        ranking=(chosen, *rest),
    )
    return dataclasses.replace(found, ranking=(chosen, *sorted(rest, key=found.regret)))


def _not_slower(others: list[Judged], objective: Objective) -> list[Judged]:
    """Those whose measured mean is about the best; all for tails, which a short run cannot see."""
    means = [one.measured.ms_per_token for one in others if one.measured]
    if objective != "mean" or not means:
        return others
    limit = (1 + _CLOSE) * min(means)
    return [one for one in others if one.measured and one.measured.ms_per_token <= limit]


def _gain(one: Judged, plain: Judged, objective: Objective) -> Gain:
    ratio = plain.score(objective) / one.score(objective)
    found = one.measured_gain
    if objective == "mean" and one.measured and plain.measured:
        if found:
            return found
        ratio = plain.measured.ms_per_token / one.measured.ms_per_token
    if found:
        return Gain(ratio, ratio * found.low / found.value, ratio * found.high / found.value)
    return Gain(ratio, ratio / (1 + one.uncertainty), ratio * (1 + one.uncertainty))


# --------------------------------------------------------------------------------------------------
# What would change it
# --------------------------------------------------------------------------------------------------


def tipping_points(decision: Decision, forecast: Forecast) -> dict[str, float | None]:
    """Where the decision flips: acceptance and round time of the best speculative candidate.

    They are where the law says both are equal. One that lies on the wrong side of a choice by measurement, or
    within the noise, would contradict it, and is None.

    Keys:
      alpha: at which it is as good as plain decoding, all conditional acceptances bent by one power; None
        where no acceptance makes it so.
      round_ms: likewise of its round time.
      runner_up_alpha, runner_up_round_ms: at which the runner-up is as good, if it is another candidate.
    """
    best, objective = decision.best, decision.objective
    if best is None:
        return {}
    rivals = {"": decision.plain, "runner_up_": decision.runner_up}
    found: dict[str, float | None] = {}
    for name, rival in rivals.items():
        if rival is None or rival is best or (name and rival is decision.plain):
            continue
        level, own = rival.score(objective), best.score(objective)
        agrees = (own < level) == (decision.speculates or rival is not decision.plain)
        found[f"{name}alpha"] = _alpha_at(best, level, objective, forecast) if agrees else None
        found[f"{name}round_ms"] = _round_ms(best) * level / own if agrees else None
    return found


def _round_ms(one: Judged) -> float:
    return one.measured_round_ms or one.loop.ms


def _alpha_at(one: Judged, level: float, objective: Objective, forecast: Forecast) -> float | None:
    requests = forecast.requests(one.option)
    if requests is None:
        return None

    def excess(log_power: float) -> float:
        bent = requests.bent(float(np.exp(log_power)))
        rounds = bent.rounds(forecast.traffic.tokens)
        return value(times_of(bent, rounds, _round_ms(one)), objective) - level

    low, high = np.log(_POWERS)
    if excess(low) >= 0 or excess(high) <= 0:
        return None
    log_power = float(scipy.optimize.brentq(excess, low, high, xtol=1e-3))  # pyright: ignore[reportArgumentType]
    return _alpha(requests.bent(float(np.exp(log_power))))


def _alpha(requests: Requests) -> float:
    return mean_acceptance(requests.weights @ requests.survival)


def regret_by_drafter(decision: Decision) -> dict[str, float]:
    """How much worse the best candidate of every drafter is; of plain decoding under ""."""
    found: dict[str, float] = {}
    for one in decision.ranking:
        found.setdefault(one.option.drafter, decision.regret(one))
    return found


def best_by_batch(
    rounds: Sequence[Round], forecast: Forecast, objective: Objective
) -> list[dict[str, Any]]:
    """The best option at every batch size that was profiled, plain decoding included."""
    found = []
    for batch in sorted({r.batch for r in rounds}):
        timed = loops(rounds, batch, forecast.traffic.context)
        if any(not option.k for option in timed):
            found.append({"batch": batch, **_best(forecast.at_batch(batch), timed, objective)})
    return found


def best_by_task(
    timed: Mapping[Option, Loop], forecast: Forecast
) -> dict[str, dict[str, dict[str, Any]]]:
    """Task -> objective -> the best option for it alone, by prediction."""
    return {
        task: {objective: _best(alone, timed, objective, known) for objective in OBJECTIVES}
        for task, alone, known in _tasks(timed, forecast)
    }


def _tasks(
    timed: Mapping[Option, Loop], forecast: Forecast
) -> Iterator[tuple[str, Forecast, list[Judged]]]:
    for task in forecast.tasks:
        alone = forecast.of_task(task)
        yield task, alone, judged(alone, timed)


def _best(
    forecast: Forecast,
    timed: Mapping[Option, Loop],
    objective: Objective,
    known: Sequence[Judged] | None = None,
) -> dict[str, Any]:
    field = known or judged(forecast, timed)
    best = ranked(field, objective)[0]
    return {
        "drafter": best.option.drafter,
        "k": best.option.k,
        "rule": best.option.rule,
        "placement": best.option.placement,
        "chips_per_copy": best.option.chips_per_copy,
        "value": best.score(objective),
        "plain": field[0].score(objective),
    }


# --------------------------------------------------------------------------------------------------
# In words
# --------------------------------------------------------------------------------------------------


def reason(decision: Decision, points: Mapping[str, float | None]) -> str:
    """The decision in a few sentences."""
    said: Callable[[Decision], Iterator[str]] = _why if decision.speculates else _why_not
    return " ".join([*said(decision), *_flips(decision, points)])


def _why(decision: Decision) -> Iterator[str]:
    gain, chosen = decision.gain, decision.chosen
    yield (
        f"{chosen.option}: {IN_WORDS[decision.objective]} {_shown(chosen, decision)} against "
        f"{_shown(decision.plain, decision)} for plain decoding, {gain.value:.2f} times as fast "
        f"({_how(chosen, decision)})."
    )
    if other := decision.runner_up:
        regret = 100 * decision.regret(other)
        worse = (
            f"{regret:.1f}% worse"
            if regret >= 0
            else f"{-regret:.1f}% better, but not by more than the noise"
        )
        yield f"Next best: {other.option}, {worse}."


def _why_not(decision: Decision) -> Iterator[str]:
    if decision.best is None:
        yield "No drafter was both profiled and evaluated: plain decoding is all there is."
        return
    gain, best = decision.gain, decision.best
    yield (
        f"Nothing beats plain decoding ({IN_WORDS[decision.objective]} "
        f"{_shown(decision.plain, decision)}) by more than the noise: the best candidate, "
        f"{best.option}, is {gain.value:.2f} times as fast ({_how(best, decision)})."
    )
    if decision.objective == "p99_gap":
        yield (
            "Tokens of a round come together, so more than one gap in a hundred lasts a whole round, "
            "which is longer than a plain step."
        )


def _how(one: Judged, decision: Decision) -> str:
    """Where a gain comes from, and its interval if there is one."""
    source = "predicted"
    if one.measured:
        source = "measured" if decision.objective == "mean" else "by the law with measured rounds"
    low, high = decision.gain.low, decision.gain.high
    return f"{source}, {low:.2f} to {high:.2f}" if low < high else source


def _shown(one: Judged, decision: Decision) -> str:
    if decision.objective == "mean" and one.measured:
        return f"{one.measured.ms_per_token:.2f} ms"
    return f"{one.score(decision.objective):.2f} ms"


def _flips(decision: Decision, points: Mapping[str, float | None]) -> Iterator[str]:
    alpha, round_ms = points.get("alpha"), points.get("round_ms")
    if decision.best is None or round_ms is None:
        return
    side, now = ("below", "above") if decision.speculates else ("above", "below")
    first = f"its acceptance were {side} {alpha:.3f}" if alpha is not None else ""
    second = f"its round took {now} {round_ms:.2f} ms (it takes {_round_ms(decision.best):.2f})"
    yield f"That would change if {' or '.join(filter(None, (first, second)))}."


def with_measurement(
    one: Judged,
    forecast: Forecast,
    times: Times,
    round_ms: float,
    gain: Gain | None,
    longest_ms: float = 0.0,
) -> Judged:
    """The candidate with a real run.

    Args:
      one, forecast: the candidate, and what predicts it.
      times, round_ms, gain: what was measured.
      longest_ms: by the profile, of a round with drafts where others have none. A run tells the mean round
        alone, so that the rarer gaps between tokens are then predicted, and not measured.
    """
    if longest_ms > one.loop.ms:
        times = dataclasses.replace(times, p99_gap_ms=None)
    return dataclasses.replace(
        one,
        measured=times,
        measured_round_ms=round_ms,
        measured_gain=gain,
        refined=forecast.times(one.option, round_ms, longest_ms * round_ms / one.loop.ms),
    )
