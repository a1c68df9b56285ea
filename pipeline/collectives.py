"""Latency of collective operations on parts of the mesh, measured.

Operations are chained in one compiled loop, each working on the result of the one before: nothing is
overlapped, left out or dispatched one by one. Each sample runs the loop for few and for many trips and
divides the difference, so that what is paid once per call cancels; the number of trips is an argument, so
one program serves both. Cells take turns, in a new random order each round: whatever slows the machine for a
while slows all of them alike.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from drafters.mesh import Topology
from drafters.shapes import DTYPE_BYTES
from pipeline import hlo, noise
from pipeline.core.errors import UserError
from pipeline.noise import NoiseMeter
from pipeline.profile_artifact import Collective, Noise, Op, Quantiles

_FEW_TRIPS = 2
_FEWEST_MORE, _MOST_MORE = 8, 4096  # trips by which the long loop exceeds the short one


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveGrid:
    """Which collectives are timed, and how well.

    Attributes:
      ops: operations.
      chips: sizes of the parts of the mesh; () for every size that whole axes make. One chip needs no
        collective, so there is nothing to time.
      axes: mesh axes timed by themselves, several joined by "+"; () for each one alone.
      tokens, widths: of the payloads [width, tokens].
      tolerance: a cell is finished once half the 95% interval of its median is this part of the median.
      min_samples, max_samples: of each cell, whatever the time.
      sample_ms: length of the chain behind one sample.
      budget_s: no cell with `min_samples` is continued after this; compilation included.
    """

    ops: tuple[Op, ...] = ("all_reduce", "all_gather", "reduce_scatter")
    chips: tuple[int, ...] = ()
    axes: tuple[str, ...] = ()
    tokens: tuple[int, ...] = (1, 2, 4, 5, 8, 16, 32, 64)
    widths: tuple[int, ...] = (256, 1024, 6144, 8192)
    tolerance: float = 0.05
    min_samples: int = 6
    max_samples: int = 60
    sample_ms: float = 10.0
    budget_s: float = 600.0

    def __post_init__(self):
        for name in ("tokens", "widths"):
            if min(getattr(self, name), default=0) < 1:
                raise ValueError(
                    f"CollectiveGrid.{name} = {getattr(self, name)} must list positive numbers"
                )
        if unknown := set(self.ops) - set(get_args(Op)):
            raise ValueError(f"CollectiveGrid.ops has {sorted(unknown)}; choose of {get_args(Op)}")
        if not 1 <= self.min_samples <= self.max_samples:
            raise ValueError(
                f"CollectiveGrid.min_samples = {self.min_samples} must lie in 1..max_samples = "
                f"{self.max_samples}"
            )
        if self.tolerance <= 0 or self.sample_ms <= 0:
            raise ValueError(
                f"CollectiveGrid.tolerance = {self.tolerance} and sample_ms = {self.sample_ms} must be "
                "positive"
            )


class Cell(NamedTuple):
    """One measurement; see `profile_artifact.Collective` for the fields."""

    op: Op
    axis: str
    chips: int
    tokens: int
    width: int
    dtype: str

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes it runs over."""
        return tuple(self.axis.split("+"))

    @classmethod
    def of(cls, measured: Collective) -> Cell:
        """The cell that `measured` is the result of."""
        return cls(*(getattr(measured, name) for name in cls._fields))


class Measurement(NamedTuple):
    """Results in the order of the cells, and how quiet the machine was."""

    collectives: tuple[Collective, ...]
    noise: Noise


def cells(topology: Topology, grid: CollectiveGrid, dtype: str) -> tuple[Cell, ...]:
    """All that `grid` asks for.

    Raises:
      UserError: the mesh has no such axis or no part of such a size, or a payload cannot be divided.
    """
    parts = dict.fromkeys(
        (
            *(_named_axes(topology, name) for name in grid.axes or _single_axes(topology)),
            *(topology.axes_of(chips) for chips in grid.chips or topology.copy_sizes()),
        )
    )
    sizes = dict(zip(topology.axes, topology.sizes, strict=True))
    found = []
    for part, op in itertools.product(filter(None, parts), grid.ops):
        chips = int(np.prod([sizes[axis] for axis in part]))
        for width, tokens in itertools.product(grid.widths, grid.tokens):
            if op == "reduce_scatter" and width % chips:
                raise UserError(
                    f"a reduce_scatter over {chips} chips cannot divide width {width}: choose multiples "
                    f"of {chips} for CollectiveGrid.widths, or leave reduce_scatter out of its ops"
                )
            found.append(Cell(op, "+".join(part), chips, tokens, width, dtype))
    return tuple(found)


def measure(
    topology: Topology,
    grid: CollectiveGrid,
    dtype: str,
    *,
    seed: int = 0,
    known: Mapping[Cell, Collective] | None = None,
    on_cell: Callable[[Collective], Any] = lambda measured: None,
    meter: NoiseMeter | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Measurement:
    """Times every cell of `grid` on the attached devices of `topology`.

    Args:
      topology: prepared.
      dtype: of the payloads: the one served.
      seed: of the order of cells.
      known: cells measured before an interruption; they are not measured again.
      on_cell: called with each cell as soon as it is finished.
      meter: goes on with this one.
      clock: seconds.

    Raises:
      UserError: see `cells`; or there are fewer devices than chips.
    """
    wanted = cells(topology, grid, dtype)
    done = dict(known or {})
    mesh, meter = topology.mesh(), meter or NoiseMeter()
    deadline = clock() + grid.budget_s
    probes = [_Probe(mesh, cell, grid.sample_ms, clock) for cell in wanted if cell not in done]
    order = np.random.default_rng(seed)
    waiting = list(probes)
    while waiting:
        for index in order.permutation(len(waiting)):
            waiting[index].sample()
        meter.tick()
        late = clock() >= deadline
        finished = [probe for probe in waiting if _is_finished(probe.samples_us, grid, late)]
        for probe in finished:
            done[probe.cell] = probe.result()
            on_cell(done[probe.cell])
        waiting = [probe for probe in waiting if probe not in finished]
    strays = sum(noise.outliers(probe.samples_us) for probe in probes)
    return Measurement(tuple(done[cell] for cell in wanted), meter.noise(strays))


def _single_axes(topology: Topology) -> list[str]:
    sized = zip(topology.axes, topology.sizes, strict=True)
    return [axis for axis, size in sized if size > 1]


def _named_axes(topology: Topology, name: str) -> tuple[str, ...]:
    axes = tuple(name.split("+"))
    if unknown := [axis for axis in axes if axis not in topology.axes]:
        raise UserError(
            f"CollectiveGrid.axes names {unknown[0]!r}, but the axes of {topology.name} are "
            f"{topology.axes}: choose some of those, joined by '+'"
        )
    return axes


def _is_finished(samples: Sequence[float], grid: CollectiveGrid, late: bool) -> bool:
    if len(samples) < grid.min_samples:
        return False
    return late or len(samples) >= grid.max_samples or noise.is_tight(samples, grid.tolerance)


# ---------------------------------------------------------------------------- one cell


def chain(cell: Cell, mesh: Mesh) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """x [chips of the mesh x width, tokens], a part for each chip, and trips -> the last result.

    Each trip is one collective; what it returns is the next one's operand.
    """
    step = functools.partial(_STEPS[cell.op], axes=cell.axes)

    def run(x: jax.Array, trips: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, trips, lambda _, x: step(x), x)

    own = P(mesh.axis_names)
    return jax.shard_map(run, mesh=mesh, in_specs=(own, P()), out_specs=own, check_vma=False)


def _all_reduce(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    return jax.lax.psum(x, axes)


def _all_gather(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    return jax.lax.all_gather(x, axes, tiled=True)[: x.shape[0]]


def _reduce_scatter(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    part = jax.lax.psum_scatter(x, axes, tiled=True)
    return jax.lax.dynamic_update_slice(x, part, (0, 0))


_STEPS = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
}


class _Probe:
    """A compiled chain and the samples taken of it, in microseconds per operation."""

    def __init__(self, mesh: Mesh, cell: Cell, sample_ms: float, clock: Callable[[], float]):
        self.cell, self.samples_us = cell, []
        self._clock = clock
        sharding = NamedSharding(mesh, P(mesh.axis_names))
        self._everywhere = NamedSharding(mesh, P())
        # Zeros stay zeros: no overflow, and nothing to scale between two operations.
        rows = mesh.size * cell.width
        self._x = jax.device_put(jnp.zeros((rows, cell.tokens), cell.dtype), sharding)
        self._few = self._trips(_FEW_TRIPS)
        self._run = jax.jit(chain(cell, mesh)).lower(self._x, self._few).compile()
        found = hlo.read(self._run.as_text() or "").collectives
        if found.total() != 1:
            raise AssertionError(f"the chain of {cell} has collectives {dict(found)}, not one")
        self._seconds(self._few)  # the first call loads the program
        roughly = self._seconds(self._few) / _FEW_TRIPS
        more = min(max(_FEWEST_MORE, round(sample_ms * 1e-3 / max(roughly, 1e-9))), _MOST_MORE)
        self._more, self._many = more, self._trips(_FEW_TRIPS + more)

    def _trips(self, count: int) -> jax.Array:
        return jax.device_put(jnp.int32(count), self._everywhere)

    def _seconds(self, trips: jax.Array) -> float:
        started = self._clock()
        jax.block_until_ready(self._run(self._x, trips))
        return self._clock() - started

    def sample(self) -> None:
        """Takes one more sample."""
        few = self._seconds(self._few)
        self.samples_us.append(1e6 * (self._seconds(self._many) - few) / self._more)

    def result(self) -> Collective:
        """What was measured so far."""
        return Collective(
            **self.cell._asdict(),
            payload_bytes=self.cell.tokens * self.cell.width * DTYPE_BYTES[self.cell.dtype],
            latency_us=Quantiles.of(self.samples_us),
            samples=len(self.samples_us),
        )
