"""How long a request takes: the law of its rounds, from how many drafts each round accepts.

A round emits G tokens, 1..K+1 of them, with P(G > j) = s_j, the probability that drafts 1..j are accepted. A
request of N tokens takes R rounds, the first r with G_1 + ... + G_r >= N, and R times the time of a round.
Rounds are independent given the request; requests differ from each other, which is what makes the tail:
with one acceptance for all, the spread that Chen et al. 2302.01318 show in Figure 1 is missed by half.

Axes: M kinds of requests, K drafts, N tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import scipy

Curve = Sequence[float] | np.ndarray

# Equally likely kinds that stand for a continuous spread: the 99th percentile is then within a round.
KINDS = 100
# A rest of probability that no figure printed anywhere can show.
_NEGLIGIBLE = 1e-12
EXACT_TOKENS = 512  # of answers whose law is walked through
# The widest spread used, relative to that of requests that are either all or not at all accepted.
_WIDEST = 0.95


def conditional(survival: Curve) -> np.ndarray:
    """P(draft j is accepted | those before it were), f64[K], of P(drafts 1..j are accepted)."""
    reached = np.concatenate([[1.0], np.asarray(survival, float)])
    return np.divide(
        reached[1:], reached[:-1], out=np.zeros(len(reached) - 1), where=reached[:-1] > 0
    )


def mean_acceptance(survival: Curve) -> float:
    """alpha, accepted drafts / evaluated ones, of P(drafts 1..j are accepted); 0 without drafts."""
    reached = np.concatenate([[1.0], np.asarray(survival, float)])
    return float(reached[1:].sum() / reached[:-1].sum()) if len(reached) > 1 else 0.0


def constant_curve(alpha: float, k: int) -> np.ndarray:
    """Survival f64[K] of drafts that are each accepted with probability `alpha`."""
    return alpha ** np.arange(1.0, k + 1)


@dataclass(frozen=True, kw_only=True, eq=False)
class Requests:
    """Requests of M kinds.

    Attributes:
      weights: f64[M], how many of the requests are of each kind; they sum to 1.
      survival: f64[M, K], P(drafts 1..j are accepted) in a request of that kind.
    """

    weights: np.ndarray
    survival: np.ndarray

    @classmethod
    def alike(cls, survival: Curve) -> Requests:
        """All of one kind."""
        return cls(weights=np.ones(1), survival=np.asarray(survival, float)[None])

    @classmethod
    def of_constant_acceptance(cls, mean: float, sd: float, k: int) -> Requests:
        """Each request accepts its drafts with one probability alpha ~ Beta(mean, sd)."""
        alphas = beta_grid(mean, sd)
        return cls(weights=_equal(len(alphas)), survival=alphas[:, None] ** np.arange(1.0, k + 1))

    @classmethod
    def spread(cls, survival: Curve, alpha_sd: float) -> Requests:
        """Requests whose alphas differ by `alpha_sd` and whose rounds together show `survival`.

        A request of acceptance alpha_i has the curve s_j ** (log alpha_i / log alpha): every conditional
        acceptance is raised to one power, so that a constant one stays constant and the order of positions
        stays. `survival` was counted over rounds, and a request that accepts little has more of them: the
        mean of the Beta law is chosen such that all rounds together emit tau tokens on average, as counted.
        """
        curve = np.asarray(survival, float)
        alpha, tau = mean_acceptance(curve), 1 + curve.sum()
        if alpha_sd <= 0 or not 0 < alpha < 1:
            return cls.alike(curve)

        def bent(mean: float) -> Requests:
            powers = np.log(beta_grid(mean, alpha_sd)) / np.log(alpha)
            return cls(weights=_equal(len(powers)), survival=curve ** powers[:, None])

        return bent(_zero(lambda mean: bent(mean).tau - tau, 1e-6, 1 - 1e-6))

    @classmethod
    def mixed(cls, parts: Sequence[Requests]) -> Requests:
        """As many requests of each part, all with the same number of drafts."""
        return cls(
            weights=np.concatenate([part.weights / len(parts) for part in parts]),
            survival=np.concatenate([part.survival for part in parts]),
        )

    @property
    def k(self) -> int:
        """Drafts per round."""
        return self.survival.shape[1]

    @property
    def tau(self) -> float:
        """Tokens per round over the rounds of all requests, when each request emits as many tokens."""
        return 1 / float(self.weights @ (1 / self._taus()))

    def drafting(self, k: int) -> Requests:
        """The same requests with at most k drafts per round: exact under the token rule."""
        return Requests(weights=self.weights, survival=self.survival[:, :k])

    def bent(self, power: float) -> Requests:
        """Every conditional acceptance raised to `power`: above 1 for a worse drafter."""
        return Requests(weights=self.weights, survival=self.survival**power)

    def rounds(self, tokens: int) -> np.ndarray:
        """P(R = r) for r = 1..N, f64[N]: exactly for short answers, by renewal theory for long ones."""
        return self.exact_rounds(tokens) if tokens <= EXACT_TOKENS else self._normal_rounds(tokens)

    def _normal_rounds(self, tokens: int) -> np.ndarray:
        """Each kind's number of rounds is normal, with the moments of `renewal_rounds`."""
        mean, variance = self._renewal(tokens)
        sd = np.sqrt(np.maximum(variance, _NEGLIGIBLE))
        ends = np.arange(1, tokens)[:, None] + 0.5
        done = scipy.special.ndtr((ends - mean) / sd) @ self.weights
        return np.maximum(np.diff(done, prepend=0.0, append=1.0), 0.0)  # rounding apart

    def exact_rounds(self, tokens: int) -> np.ndarray:
        """P(R = r) for r = 1..N, f64[N]: a walk over the tokens emitted so far, N^2 steps for every kind."""
        emits = -np.diff(np.pad(self.survival, ((0, 0), (1, 1)), constant_values=(1.0, 0.0)))
        walk = np.zeros((len(self.weights), tokens))  # P(so many emitted, not done), per kind
        walk[:, 0] = 1.0
        unfinished = [1.0]
        while unfinished[-1] > _NEGLIGIBLE and len(unfinished) <= tokens:
            after = np.zeros_like(walk)
            for emitted in range(1, min(emits.shape[1], tokens - 1) + 1):
                after[:, emitted:] += walk[:, :-emitted] * emits[:, emitted - 1 : emitted]
            walk = after
            unfinished.append(float(self.weights @ walk.sum(axis=1)))
        unfinished[-1] = 0.0
        return np.pad(-np.diff(unfinished), (0, tokens + 1 - len(unfinished)))

    def renewal_rounds(self, tokens: int) -> tuple[float, float]:
        """Mean and variance of R from renewal theory, good for N >= 64; see `exact_rounds` for the law.

        Within a request E[R] = N/tau + E[G^2]/(2 tau^2) - 1/(2 tau) and Var R = N Var(G)/tau^3.
        """
        means, within = self._renewal(tokens)
        mean = float(self.weights @ means)
        return mean, float(self.weights @ (within + (means - mean) ** 2))

    def _renewal(self, tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """Mean and variance of R of each kind, f64[M]."""
        tau, square = self._taus(), self._squares()
        means = tokens / tau + square / (2 * tau**2) - 1 / (2 * tau)
        return means, tokens * (square - tau**2) / tau**3

    def _taus(self) -> np.ndarray:
        return 1 + self.survival.sum(axis=1)

    def _squares(self) -> np.ndarray:
        """E[G^2] of each kind, f64[M]."""
        return 1 + self.survival @ (2.0 * np.arange(1, self.k + 1) + 1)


@dataclass(frozen=True, kw_only=True, eq=False)
class TimeLaw:
    """The time of a request of N tokens whose rounds all take `round_ms`.

    Attributes:
      rounds: P(R = r) for r = 1..N.
    """

    rounds: np.ndarray
    round_ms: float

    @property
    def tokens(self) -> int:
        """N."""
        return len(self.rounds)

    @property
    def mean_ms(self) -> float:
        """Of a request."""
        return self.round_ms * float(self.rounds @ self._counts())

    @property
    def sd_ms(self) -> float:
        """Of a request."""
        counts = self._counts()
        mean = self.rounds @ counts
        return self.round_ms * float(np.sqrt(max(0.0, self.rounds @ counts**2 - mean**2)))

    def quantile_ms(self, level: float) -> float:
        """The time within which a share `level` of the requests are done: the mid-quantile.

        Interpolated between numbers of rounds (Ma, Genton and Parzen 2011): a choice between two K does not
        hang on which side of a step of one round their percentiles happen to fall.
        """
        counts, taken = self._counts(), self.rounds > 0
        middles = np.cumsum(self.rounds) - self.rounds / 2
        return self.round_ms * float(np.interp(level, middles[taken], counts[taken]))

    def _counts(self) -> np.ndarray:
        return np.arange(1.0, self.tokens + 1)


def gap_quantile_ms(requests: Requests, round_ms: float, level: float) -> float:
    """A quantile of the time between one token and the next.

    Tokens come in bursts: one gap in tau lasts a round, the others nothing. So the 99th percentile is the
    time of a round, whatever is accepted, until a round emits a hundred tokens.
    """
    return round_ms if 1 / requests.tau > 1 - level else 0.0


def explaining_spread(survival: Curve, tokens: int, relative_sds: Mapping[int, float]) -> float:
    """The sd of alpha between requests that explains how much request times differ.

    Args:
      survival: over all rounds, of as many drafts as the largest K.
      tokens: N of every request.
      relative_sds: K -> sd of the times, relative to their mean. They are met on average.

    Returns:
      0 where chance within a request explains as much or more.
    """

    def excess(alpha_sd: float) -> float:
        requests = Requests.spread(survival, alpha_sd)
        found = {k: requests.drafting(k).renewal_rounds(tokens) for k in relative_sds}
        ratios = [np.sqrt(v) / m / relative_sds[k] for k, (m, v) in found.items()]
        return float(np.mean(ratios)) - 1

    return _zero(excess, 0.0, 0.5)


def beta_grid(mean: float, sd: float, kinds: int = KINDS) -> np.ndarray:
    """Equally likely values f64[kinds] of a Beta law: the middles of its quantiles.

    A spread that no Beta law of this mean has is narrowed to one that it has.
    """
    widest = mean * (1 - mean)
    variance = min(sd**2, _WIDEST * widest)
    if variance <= 0:
        return np.full(kinds, mean)
    concentration = widest / variance - 1
    levels = (np.arange(kinds) + 0.5) / kinds
    values = scipy.special.betaincinv(mean * concentration, (1 - mean) * concentration, levels)
    return np.clip(values, 1e-12, 1 - 1e-12)


def _equal(count: int) -> np.ndarray:
    return np.full(count, 1 / count)


def _zero(increasing: Callable[[float], float], low: float, high: float) -> float:
    """Where a growing function crosses 0 between `low` and `high`, or the end that comes nearest."""
    if increasing(low) >= 0:
        return low
    if increasing(high) <= 0:
        return high
    return float(scipy.optimize.brentq(increasing, low, high, xtol=1e-7))  # pyright: ignore[reportArgumentType]
