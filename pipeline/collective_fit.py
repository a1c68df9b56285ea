"""Latency of a collective as a function of its payload: flat up to a knee, then linear.

latency(n) = alpha below the knee, alpha + beta (n - knee) above it: the start-up and bandwidth terms of
Thakur, Rabenseifner & Gropp 2005, with the flat part that small messages show in practice.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from drafters.shapes import DTYPE_BYTES
from pipeline.profile_artifact import AlphaBeta, Collective

_RESAMPLES = 200
_TAIL = 0.025  # of a 95% interval, on each side
_KNEES = 60  # candidates from the smallest payload to the second largest
_SPREAD_OF_NORMAL = 2.563  # (p90 - p10) / standard deviation
_MEDIAN_INEFFICIENCY = 1.2533  # standard error of a median / that of a mean: sqrt(pi / 2)
_TOLERATED = 0.02  # relative misfit that calls for no knee: cells repeat no better than that
_KIB = 1024


def fit(collectives: Iterable[Collective], seed: int = 0) -> dict[str, AlphaBeta]:
    """Fits each operation on each part of the mesh: "op/axis/dtype" -> its curve.

    Residuals are relative to the latency, so that small payloads count as much as large ones. A knee is
    only claimed where the data need one (Bayesian information criterion); otherwise beta is 0 and the knee is
    the largest payload measured. Intervals come from a bootstrap that redraws every median from its own
    spread and from the misfit of the curve; where noise hides a knee they are of the curve that was chosen.
    """
    groups: dict[str, list[Collective]] = defaultdict(list)
    for one in collectives:
        groups[f"{one.op}/{one.axis}/{one.dtype}"].append(one)
    return {key: _fit_one(group, np.random.default_rng(seed)) for key, group in groups.items()}


def predict_us(curve: AlphaBeta, payload_bytes: float) -> float:
    """Latency of one operation whose payload has `payload_bytes`."""
    beyond = max(0.0, payload_bytes - curve.knee_bytes)
    return curve.alpha_us + curve.beta_us_per_kib * beyond / _KIB


def latency_bound_bytes(curve: AlphaBeta, slack: float = 0.2) -> float:
    """The payload up to which latency exceeds alpha by at most `slack` of it; infinite if none was seen."""
    if curve.beta_us_per_kib <= 0:
        return math.inf
    return curve.knee_bytes + slack * curve.alpha_us / curve.beta_us_per_kib * _KIB


def where_latency_bound_ends(curve: AlphaBeta, width: int, slack: float = 0.2) -> str:
    """A sentence for people.

    Args:
      curve: of one operation.
      width: numbers of one token in the payload.
      slack: see `latency_bound_bytes`.
    """
    row_bytes = width * DTYPE_BYTES[curve.dtype]
    what = f"{curve.op} over {curve.axis} ({curve.chips} chips)"
    limit = latency_bound_bytes(curve, slack)
    if math.isinf(limit):
        return (
            f"{what} takes {curve.alpha_us:.0f} us for every payload measured, up to "
            f"{curve.knee_bytes / row_bytes:.0f} tokens of width {width}"
        )
    return (
        f"{what} is latency-bound up to {limit / row_bytes:.1f} tokens of width {width}: "
        f"{curve.alpha_us:.0f} us and at most {slack:.0%} more"
    )


class _Curves(NamedTuple):
    """One curve per row of latencies, [R] each."""

    alpha: np.ndarray
    beta: np.ndarray  # per byte
    knee: np.ndarray

    def at(self, payload: np.ndarray) -> np.ndarray:
        """Latencies [R, n] of payloads [n]."""
        beyond = np.maximum(0.0, payload - self.knee[:, None])
        return self.alpha[:, None] + self.beta[:, None] * beyond


def _fit_one(group: Sequence[Collective], rng: np.random.Generator) -> AlphaBeta:
    payload = np.array([one.payload_bytes for one in group], float)
    medians = np.array([one.latency_us.p50 for one in group])
    errors = _sampling_errors(group)
    noise = float(np.mean((errors / _positive(medians)) ** 2))
    # Residuals relative to the latencies themselves would favour those that came out too small.
    first_guess = _best(payload, medians[None], _positive(medians), noise).at(payload)[0]
    best = _best(payload, medians[None], _positive(first_guess), noise)
    expected = best.at(payload)[0]
    misfit, scale = medians - expected, _positive(expected)
    freedom = max(1, len(group) - int(_parameters(best.beta, best.knee)[0]))
    missed = np.sqrt(np.sum((misfit / scale) ** 2) / freedom) * scale
    draws = rng.normal(size=(_RESAMPLES, len(group))) * np.maximum(errors, missed)
    redrawn = _best(payload, expected + draws, scale, noise)
    alpha, beta = float(best.alpha[0]), float(best.beta[0]) * _KIB
    first = group[0]
    return AlphaBeta(
        op=first.op,
        axis=first.axis,
        chips=first.chips,
        dtype=first.dtype,
        alpha_us=alpha,
        alpha_interval_us=_interval(alpha, redrawn.alpha),
        beta_us_per_kib=beta,
        beta_interval_us_per_kib=_interval(beta, redrawn.beta * _KIB),
        knee_bytes=round(float(best.knee[0])),
        r2=_r2(medians, misfit),
    )


def _sampling_errors(group: Sequence[Collective]) -> np.ndarray:
    """Standard errors of the medians, [n]."""
    spread = np.array([one.latency_us.p90 - one.latency_us.p10 for one in group])
    samples = np.array([max(1, one.samples) for one in group])
    return _MEDIAN_INEFFICIENCY * spread / _SPREAD_OF_NORMAL / np.sqrt(samples)


def _positive(latency: np.ndarray) -> np.ndarray:
    """Latencies to divide by: noise can make the difference of two loops as small as nothing."""
    return np.maximum(latency, max(float(np.max(latency)) * 1e-3, 1e-9))


def _best(payload: np.ndarray, latency: np.ndarray, scale: np.ndarray, noise: float) -> _Curves:
    """The curves that explain latencies [R, n] best for their number of parameters.

    Weighted least squares in closed form for alpha and beta at every knee k, of latencies y with weights w
    and x = what of a payload lies beyond the knee.

    Args:
      scale: what residuals are relative to, [n].
      noise: mean square of the relative errors of the latencies.
    """
    knees = _knees(payload)
    x = np.maximum(0.0, payload - knees[:, None]) / payload.max()  # [k, n]
    w = 1 / scale**2
    total, wx, wxx = w.sum(), x @ w, (x * x) @ w  # [k]
    wy, wxy = (latency @ w)[:, None], (latency * w) @ x.T  # [R, 1], [R, k]
    spread = total * wxx - wx * wx
    rises = spread > 1e-12 * total * total
    beta = (total * wxy - wx * wy) / np.where(rises, spread, np.inf)
    beta = np.maximum(beta, 0.0)
    alpha = (wy - beta * wx) / total
    misfit = latency[:, None] - alpha[..., None] - beta[..., None] * x  # [R, k, n]
    squares = misfit**2 @ w
    chosen = np.argmin(_scores(squares, beta, knees, len(payload), noise), axis=1)
    rows = np.arange(len(latency))
    alpha, beta = alpha[rows, chosen], beta[rows, chosen] / payload.max()
    return _Curves(alpha, beta, np.where(beta > 0, knees[chosen], payload.max()))


def _scores(
    squares: np.ndarray, beta: np.ndarray, knees: np.ndarray, count: int, noise: float
) -> np.ndarray:
    """Bayesian information criterion (Schwarz 1978) of normal relative residuals, [R, k]."""
    likelihood = count * np.log(squares / count + noise + _TOLERATED**2)
    return likelihood + _parameters(beta, knees) * math.log(count)


def _parameters(beta: np.ndarray, knee: np.ndarray) -> np.ndarray:
    """Of a curve: alpha; beta, if it rises; the knee, if that lies above zero."""
    return 1 + (beta > 0) * (1 + (knee > 0))


def _knees(payload: np.ndarray) -> np.ndarray:
    """Candidates: none (0), the payloads measured and what lies between, and the largest: a flat curve.

    Beyond the second largest payload a single point would decide both knee and slope.
    """
    distinct = np.unique(payload)
    if len(distinct) == 1:
        return distinct
    between = np.geomspace(distinct[0], distinct[-2], _KNEES)
    return np.unique(np.concatenate(([0.0], distinct, between)))


def _interval(value: float, draws: np.ndarray) -> tuple[float, float]:
    low, high = np.quantile(draws, (_TAIL, 1 - _TAIL))
    return min(float(low), value), max(float(high), value)


def _r2(medians: np.ndarray, misfit: np.ndarray) -> float:
    """Of a constant latency that is fitted exactly, 1."""
    total = float(np.sum((medians - medians.mean()) ** 2))
    missed = float(np.sum(misfit**2))
    return 1 - missed / total if total > 0 else 1.0
