"""How long a forward pass takes, for any shape on any part of a mesh: a few terms, fitted to measured steps.

A pass costs what it reads, computes and communicates, and something per layer and per pass (Pope et al. 2022,
arXiv 2211.05102, sections 2 and 3.1; Austin et al. 2025, "How to Scale Your Model", chapters on rooflines and
inference):

    time = weights x bytes of weights + cache x bytes of the cache + arithmetic x flops
         + collectives x sum over collectives of (alpha + beta x bytes)
         + layer x layers + fixed
         + matrix layer x (layers + 1), beyond one column

with nonnegative coefficients, since none of these gives time back. They are sums and not the maxima of a
roofline: at a batch of one a chip waits for each in turn. A single column is multiplied by vector
instructions; several are by matrix instructions, which have a price per flop of their own and one for their
start, in every layer and in the head. Bytes and flops are those of one chip. Chips of a host platform share
its cores: where more of them work than there are cores, they take turns, and all but the collectives, which
were measured on the same cores, counts as often as chips share a core.

Steps whose collectives were removed are fitted too: without them what a layer costs by itself and what
its collectives cost would go up and down together. They are no steps that anybody makes, so errors are not
judged by them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import scipy

from drafters.shapes import TransformerShape
from pipeline.collective_fit import predict_us
from pipeline.core import artifacts
from pipeline.profile_artifact import AlphaBeta, LatencyModel, Profile, Step, Where
from pipeline.work import Pass, Work, work_of

# Names say what a coefficient multiplies; collectives are a factor on what they take by themselves.
TERMS: tuple[str, ...] = (
    "weights_us_per_mib",
    "cache_us_per_mib",
    "arithmetic_us_per_mflop",
    "collectives_factor",
    "layer_us",
    "fixed_us",
    "matrix_arithmetic_us_per_mflop",
    "matrix_layer_us",
)
GOOD_MEDIAN, GOOD_WORST = 0.10, 0.25
_MIB = 1 << 20


class Machine(NamedTuple):
    """What is known of a mesh beside the fitted terms.

    Attributes:
      platform: "cpu" for chips that share the host's cores.
      chips: of the mesh.
      cores: of the host; of no matter elsewhere.
      dtype: served.
      alpha_beta: "op/axis/dtype" -> fit, of the profile.
    """

    platform: str
    chips: int
    cores: int
    dtype: str
    alpha_beta: Mapping[str, AlphaBeta]

    def turns(self, busy: int) -> float:
        """How many chips share a core."""
        return max(1.0, busy / self.cores) if self.platform == "cpu" else 1.0

    def collective_us(self, op: str, chips: int, payload_bytes: float) -> float:
        """What one collective takes by itself; 0 if none was measured."""
        fits = [fit for fit in self.alpha_beta.values() if fit.op == op and fit.chips > 1]
        if chips == 1 or not fits:
            return 0.0
        # The nearest number of chips, more rather than fewer: latency grows with it.
        fit = min(fits, key=lambda f: (abs(np.log2(f.chips / chips)), -f.chips))
        return predict_us(fit, payload_bytes)


def features(work: Work, machine: Machine) -> np.ndarray:
    """f64[terms]: what each of `TERMS` multiplies."""
    turns = machine.turns(work.busy)
    vector, matrix = turns * (work.columns == 1), turns * (work.columns > 1)
    collectives = work.reduces * machine.collective_us(
        "all_reduce", work.chips, work.reduce_bytes
    ) + work.gathers * machine.collective_us("all_gather", work.chips, work.gather_bytes)
    return np.array(
        [
            turns * work.weight_bytes / _MIB,
            turns * work.capacity_bytes / _MIB,
            vector * work.flops / 1e6,
            collectives,
            turns * work.layers,
            turns,
            matrix * work.flops / 1e6,
            matrix * (work.layers + 1),
        ]
    )


# --------------------------------------------------------------------------------------------------
# Fit
# --------------------------------------------------------------------------------------------------


def fit_terms(rows: np.ndarray, times_us: np.ndarray) -> np.ndarray:
    """Nonnegative coefficients f64[terms] with small relative errors, of rows f64[steps, terms]."""
    # Columns of one size: nnls compares them with one tolerance.
    scaled = rows / times_us[:, None]
    sizes = np.maximum(np.linalg.norm(scaled, axis=0), 1e-30)
    found, _ = scipy.optimize.nnls(scaled / sizes, np.ones(len(times_us)))
    return found / sizes


def held_out_errors(rows: np.ndarray, times_us: np.ndarray, groups: Sequence[object]) -> np.ndarray:
    """f64[steps]: relative errors where each step's group was left out of the fit; [] for a single group."""
    labels = sorted(set(groups), key=str)
    if len(labels) < 2:
        return np.zeros(0)
    errors = np.zeros(len(times_us))
    member = np.array([labels.index(group) for group in groups])
    for index in range(len(labels)):
        out = member == index
        predicted = rows[out] @ fit_terms(rows[~out], times_us[~out])
        errors[out] = np.abs(predicted / times_us[out] - 1)
    return errors


class Observation(NamedTuple):
    """A measured pass: its work, its time, the shape that it is of, and whether errors are judged by it."""

    work: Work
    us: float
    shape: TransformerShape
    judged: bool = True


def fit(observed: Sequence[Observation], machine: Machine) -> LatencyModel | None:
    """The model of measured steps; None if there are no two shapes to tell terms by.

    Every shape is left out once, and the errors are of the steps of shapes left out. The terms are those
    of all steps.
    """
    shapes = [one.shape for one in observed]
    if len(set(shapes)) < 2:
        return None
    rows = np.array([features(one.work, machine) for one in observed])
    times_us = np.array([one.us for one in observed])
    judged = np.array([one.judged for one in observed])
    errors = held_out_errors(rows, times_us, shapes)[judged]
    return LatencyModel(
        terms=dict(zip(TERMS, map(float, fit_terms(rows, times_us)), strict=True)),
        fitted_steps=len(observed),
        held_out_steps=len(errors),
        median_error=float(np.median(errors)),
        worst_error=float(errors.max()),
    )


# --------------------------------------------------------------------------------------------------
# Predictions
# --------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
    """A predicted time, where it goes, and how far off such predictions were.

    Attributes:
      parts_us: term -> its share.
      median_error, worst_error: relative, on shapes that were not fitted.
    """

    parts_us: Mapping[str, float]
    median_error: float
    worst_error: float

    @property
    def ms(self) -> float:
        """The whole."""
        return sum(self.parts_us.values()) / 1e3

    def __str__(self) -> str:
        return (
            f"{self.ms:.2f} ms predicted (off by {self.median_error:.0%} in the median, "
            f"{self.worst_error:.0%} at worst, on shapes that were not fitted)"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Predictor:
    """Predicts passes on one mesh."""

    model: LatencyModel
    machine: Machine

    @classmethod
    def of(cls, profile: Profile) -> Predictor | None:
        """From a profile that holds a latency model."""
        if profile.latency_model is None:
            return None
        return cls(model=profile.latency_model, machine=machine_of(profile))

    def step(
        self,
        shape: TransformerShape,
        one: Pass,
        *,
        chips_per_copy: int,
        placement: Where = "sharded",
    ) -> Prediction:
        """A pass of `shape` on `chips_per_copy` chips: of all, of each copy, or led by the first."""
        busy = chips_per_copy if placement == "leader" else self.machine.chips
        return self._of(work_of(shape, chips_per_copy, busy, one, self.machine.dtype))

    def like(self, step: Step) -> Prediction:
        """The same pass as a measured one."""
        one = Pass(step.batch, step.tokens, step.context, step.capacity, step.phase == "prefill")
        return self.step(
            artifacts.from_json(step.shape, TransformerShape),
            one,
            chips_per_copy=step.chips_per_copy,
            placement=step.placement,
        )

    def _of(self, work: Work) -> Prediction:
        terms = np.array([self.model.terms[name] for name in TERMS])
        parts = dict(zip(TERMS, (terms * features(work, self.machine)).tolist(), strict=True))
        return Prediction(
            parts_us=parts,
            median_error=self.model.median_error,
            worst_error=self.model.worst_error,
        )


def machine_of(profile: Profile) -> Machine:
    """The machine that was profiled."""
    mesh = profile.topology
    return Machine(
        platform=mesh.platform,
        chips=mesh.num_chips,
        cores=mesh.cores,
        dtype="float32" if mesh.platform == "cpu" else "bfloat16",
        alpha_beta=profile.alpha_beta,
    )
