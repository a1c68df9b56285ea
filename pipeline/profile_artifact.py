"""`profile.json`: what a mesh costs. Written by `pipeline.profile`, read by co-design and the report.

Times are quantiles over repeated samples; `source` says where a number comes from. A compiled or predicted
number is never called measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np

from pipeline.core import artifacts

Op = Literal["all_reduce", "all_gather", "reduce_scatter"]
Phase = Literal["decode", "score", "prefill"]
Where = Literal["sharded", "leader", "copies"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantiles:
    """Of repeated samples of one time."""

    p10: float
    p50: float
    p90: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Quantiles:
        """Of at least one sample, in the samples' unit."""
        p10, p50, p90 = (float(q) for q in np.quantile(np.asarray(samples), (0.1, 0.5, 0.9)))
        return cls(p10=p10, p50=p50, p90=p90)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledTopology:
    """The mesh, and the peaks that utilisations refer to.

    Attributes:
      mesh: axis -> size.
      hbm_bytes_per_s, flop_per_s: per chip; on host platforms of all chips together divided by their
        number, since they share one memory.
      peaks_source: "measured", or where they were published.
      cores: of the host, which the chips of a host platform share.
    """

    name: str
    platform: str
    device_kind: str
    num_chips: int
    mesh: dict[str, int]
    hbm_bytes_per_s: float
    flop_per_s: float
    peaks_source: str
    cores: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """Latency of one collective operation.

    Attributes:
      axis: the mesh axes it runs over, joined by "+".
      chips: that take part.
      tokens, width: of the payload [width, tokens] that every chip contributes.
      payload_bytes: tokens * width * bytes of `dtype`.
      samples: behind the quantiles.
    """

    op: Op
    axis: str
    chips: int
    tokens: int
    width: int
    dtype: str
    payload_bytes: int
    latency_us: Quantiles
    samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AlphaBeta:
    """latency = alpha below `knee_bytes`, alpha + beta * (bytes - knee) above it.

    Intervals are 95% ones; `r2` is of the fit to the medians.
    """

    op: Op
    axis: str
    chips: int
    dtype: str
    alpha_us: float
    alpha_interval_us: tuple[float, float]
    beta_us_per_kib: float
    beta_interval_us_per_kib: tuple[float, float]
    knee_bytes: int
    r2: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One forward pass of a model on the mesh.

    Attributes:
      model: a name of the config.
      shape: the fields of its TransformerShape.
      chips: of the mesh; `chips_per_copy` of them share one copy of the model.
      placement: "sharded" over all chips, "copies" side by side, or on the "leader" alone.
      batch, tokens, context, capacity: B rows, T new tokens each behind `context` others, room for S.
      dispatch: "fused" in one compiled loop, or "single" calls from the host.
      collectives_per_layer: as counted in the compiled program.
      layer_collective_us: time of one layer's collectives: the step with all of them less without, shared
        among them; None if not measured.
      bandwidth_utilisation: bytes that must be read / time / the chips' peak; above 1 where a processor's
        cache holds them.
      flop_utilisation: likewise of arithmetic.
      width_utilisation: the share of a chip's matrix tiles that its weights fill (`pipeline.work`).
    """

    model: str
    shape: dict[str, Any]
    chips: int
    chips_per_copy: int
    placement: Where
    batch: int
    tokens: int
    context: int
    capacity: int
    phase: Phase
    dispatch: Literal["fused", "single"]
    latency_ms: Quantiles
    collectives_per_layer: float
    layer_collective_us: float | None
    bandwidth_utilisation: float
    flop_utilisation: float
    source: Literal["measured", "compiled", "predicted"]
    width_utilisation: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """Where one layer's time goes, from the step at two depths, with and without its collectives.

    Attributes:
      arithmetic_us, collective_us: of one layer of `model` for `tokens` tokens on all chips.
      fixed_us: of the step at no layers at all: embedding and head.
      expected_collective_us: the layer's collectives by the alpha-beta fit, the cross-check.
    """

    model: str
    tokens: int
    batch: int
    arithmetic_us: float
    collective_us: float
    fixed_us: float
    expected_collective_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One speculative round of target and drafter, and its parts by themselves.

    Attributes:
      drafter: a name of the config; "" for plain decoding, with k = 0.
      draft_ms: of the drafter's k passes where the placement drafts, the first over two tokens; score_ms: of
        the pass over k + 1 tokens. Both from passes timed alone, interpolated where T was not timed.
      broadcast_us: of the turn's integers, by the fit of all-reduces; 0 if every chip drafts.
      round_ms: the whole, with draws, verdict, rollback and broadcast.
      source: "predicted" from its parts and from what other rounds at the same place, of other K or another
        drafter, took beyond theirs.
    """

    drafter: str
    placement: Where
    chips_per_copy: int
    k: int
    rule: Literal["token", "block"]
    batch: int
    context: int
    draft_ms: float
    score_ms: float
    broadcast_us: float
    round_ms: Quantiles
    source: Literal["measured", "predicted", "published"] = "measured"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledProgram:
    """A decoding step compiled for devices that are not attached: exact sizes and the compiler's estimate.

    Attributes:
      argument_bytes, temporary_bytes, output_bytes: per chip.
      fits: whether that is within the chip's memory.
      collectives: kind -> number in the program, a loop body counted once per trip.
      expected_collectives: by the shape's formula.
      estimated_cycles: the compiler's; None if it gives none.
      interpolated_between: () if this program was compiled; otherwise the fewer and the more tokens whose
        programs were, and its sizes and cycles lie on a straight line between theirs.
    """

    model: str
    topology: str
    chips: int
    batch: int
    tokens: int
    context: int
    dtype: str
    argument_bytes: int
    temporary_bytes: int
    output_bytes: int
    fits: bool
    collectives: dict[str, int]
    expected_collectives: dict[str, int]
    estimated_cycles: float | None
    compile_s: float
    interpolated_between: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyModel:
    """Fitted terms of `pipeline.latency`, and how well they predict steps that were not fitted.

    Attributes:
      terms: name -> coefficient, units in the names.
      median_error, worst_error: relative, on held-out shapes.
    """

    terms: dict[str, float]
    fitted_steps: int
    held_out_steps: int
    median_error: float
    worst_error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """How quiet the machine was: a fixed piece of work timed again and again between the cells."""

    relative_spread: float  # (p90 - p10) / p50
    outliers: int  # samples above twice their cell's median
    load_average: float


@dataclass(frozen=True, kw_only=True)
class Profile(artifacts.Artifact):
    """`profile.json`."""

    SCHEMA: ClassVar[int] = 1
    STAGE: ClassVar[str] = "pipeline.profile"

    target: str
    topology: ProfiledTopology
    collectives: tuple[Collective, ...]
    # "op/axis/dtype" -> fit. A mapping, so that a reader finds an operation without a search.
    alpha_beta: dict[str, AlphaBeta]
    steps: tuple[Step, ...]
    layers: tuple[Layer, ...] = ()
    rounds: tuple[Round, ...] = ()
    compiled: tuple[CompiledProgram, ...] = ()
    latency_model: LatencyModel | None = None
    noise: Noise | None = None
    notes: tuple[str, ...] = field(default_factory=tuple)
