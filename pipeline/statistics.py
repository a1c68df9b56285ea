"""Estimates of acceptance and of quality, with their intervals; requests are what is drawn at random.

Tokens of one request are alike, so every interval resamples whole requests (cluster bootstrap): resampling
rounds or tokens would make intervals too narrow. Axes: J requests, K drafts, R resamples.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from pipeline.acceptance_artifact import Interval
from pipeline.rounds import Counts

RESAMPLES = 2000
_TAIL = 0.025  # of a 95% interval, on each side
_FEWEST = 6  # pairs of which a sign test at 5% can tell anything


class ByPosition(NamedTuple):
    """Acceptance of drafts 1..K; leading axes are allowed."""

    conditional: np.ndarray  # P(draft i accepted | those before it were)
    survival: np.ndarray  # P(drafts 1..i accepted)
    tau: np.ndarray  # tokens per round with room for K drafts


def by_position(exposed: np.ndarray, kept: np.ndarray) -> ByPosition:
    """Product-limit estimate (Kaplan & Meier 1958) from counts [..., K].

    Rounds that the end of the text cuts, or that have less room than K, count up to where they reach; to
    leave them out, or to count them as failures, would be biased. Where no round came so far, 0.
    """
    conditional = kept / np.maximum(exposed, 1)
    survival = np.cumprod(conditional, axis=-1)
    return ByPosition(conditional, survival, 1 + survival.sum(axis=-1))


def spread_between(accepted: np.ndarray, evaluated: np.ndarray) -> float:
    """Standard deviation of alpha between requests, beyond the noise within one.

    One-way random effects: request j accepts binomially with its own alpha_j, of mean m and variance s^2.
    With n_j evaluated drafts and shares a_j, mean squares between and within requests have the expectations

        between = sum n_j (a_j - mean)^2 / (J - 1)          E = E[alpha (1 - alpha)] + n0 s^2
        within  = sum n_j a_j (1 - a_j) / (sum n_j - J)     E = E[alpha (1 - alpha)]
        n0 = (sum n_j - sum n_j^2 / sum n_j) / (J - 1)

    so (between - within) / n0 is unbiased for s^2 (Searle, Casella & McCulloch 1992, ch. 3); below zero it is
    taken as zero. What makes neighbouring drafts of one request alike counts as spread between requests.
    """
    used = evaluated > 0
    kept, n = accepted[used].astype(float), evaluated[used].astype(float)
    requests, total = len(n), n.sum()
    if requests < 2 or total <= requests:
        return 0.0
    share, mean = kept / n, kept.sum() / total
    between = float(np.sum(n * (share - mean) ** 2)) / (requests - 1)
    within = float(np.sum(n * share * (1 - share))) / (total - requests)
    size = (total - np.sum(n**2) / total) / (requests - 1)
    return math.sqrt(max(0.0, (between - within) / size))


def resamples(requests: int, rng: np.random.Generator) -> np.ndarray:
    """i64[R, J]: how often each request occurs in each bootstrap sample."""
    return rng.multinomial(requests, np.full(requests, 1 / requests), size=RESAMPLES)


def interval(value: float, draws: np.ndarray) -> Interval:
    """The percentile interval of bootstrap draws f64[R] around an estimate, which it always holds."""
    low, high = np.quantile(draws, [_TAIL, 1 - _TAIL])
    return Interval(value=value, low=min(float(low), value), high=max(float(high), value))


def ratio_interval(top: np.ndarray, bottom: np.ndarray, times: np.ndarray) -> Interval:
    """Of sum(top) / sum(bottom) over requests, each [J]; 0 where there is nothing to divide by."""

    def ratio(above, below):
        return above / np.maximum(below, 1)

    return interval(float(ratio(top.sum(), bottom.sum())), ratio(times @ top, times @ bottom))


def tau_interval(counts: Counts, times: np.ndarray) -> Interval:
    """Of tau."""
    value = by_position(counts.exposed.sum(axis=0), counts.kept.sum(axis=0)).tau
    draws = by_position(times @ counts.exposed, times @ counts.kept).tau
    return interval(float(value), draws)


def mean_interval(values: np.ndarray, times: np.ndarray) -> Interval:
    """Of the mean over requests of values f64[J]."""
    return interval(float(values.mean()), times @ values / len(values))


def disagreement(counts: Counts) -> float:
    """How far accepted drafts are from what their overlaps promise, in standard deviations.

    Each draft is accepted with probability sum(min(p, q)) given all before it, so the difference is a
    martingale whose variance is the sum of overlap (1 - overlap): standard normal if the rule is exact.
    """
    difference, noise = counts.accepted.sum() - counts.overlap.sum(), counts.noise.sum()
    return float(difference / math.sqrt(noise)) if noise > 1e-9 else 0.0


def pass_at(k: int, samples: np.ndarray, correct: np.ndarray) -> np.ndarray:
    """f64[J]: pass@k of each problem, from n = samples, of which `correct` pass; unbiased.

    1 - C(n - c, k) / C(n, k), the probability that k of the n samples hold a correct one
    (Chen et al. 2107.03374, eq. 1).
    """
    if np.any(samples < k):
        raise ValueError(f"pass@{k} needs at least {k} samples of every problem")
    return np.array(
        [
            1 - math.comb(n - c, k) / math.comb(n, k)
            for n, c in zip(samples.tolist(), correct.tolist(), strict=True)
        ]
    )


def verdict_of(difference: Interval, prompts: int) -> str:
    """In words: which arm is better, of the interval of speculative - plain over so many prompts.

    Of fewer than six, all may favour one arm by chance more often than once in twenty.
    """
    if prompts < _FEWEST or difference.low <= 0 <= difference.high:
        return "within noise"
    return "speculative is better" if difference.value > 0 else "plain is better"
