"""Times of forward passes and rounds on the devices of a mesh, with random weights.

Cells that are compared, such as the target with and without its collectives, are sampled in turns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from drafters.mesh import Topology
from drafters.sharding import Placement
from pipeline import hlo
from pipeline.cell_store import CellStore
from pipeline.profile_artifact import Quantiles
from pipeline.profile_grid import Cell, Plan, RoundCell, StepCell
from pipeline.stopwatch import Samples, Stopwatch
from pipeline.work import chip_shape, held_bytes
from serving import timing
from serving.passes import Part, Seated
from serving.plan import Choice
from serving.sampling import SamplingParams
from serving.untrained import random_pair, seated

HELD_BYTES = 1 << 30  # of caches and logits that are held at once, on a chip or on the host of all
_FEWEST = 10  # cells that are held at once, whatever they take


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """What was measured of a cell.

    Attributes:
      fused: milliseconds, inside one compiled loop.
      single: milliseconds, dispatched one by one.
      reduces, gathers: collectives in the compiled program, a loop's body counted once.
      samples, outliers: behind `fused`.
    """

    fused: Quantiles
    single: Quantiles
    reduces: int = 0
    gathers: int = 0
    samples: int
    outliers: int


class Bench:
    """Builds the parts of cells; models are shared among them.

    Args:
      plan: what is measured.
    """

    def __init__(self, plan: Plan):
        self._plan = plan
        self._params: dict[Any, Any] = {}

    def part(self, cell: Cell) -> Part:
        """What is repeated for the cell."""
        return self._step(cell) if isinstance(cell, StepCell) else self._round(cell)

    def _step(self, cell: StepCell) -> Part:
        model = seat_of(self._plan.topology, cell)
        return model.passes(
            self._params_of(model),
            batch=cell.batch,
            tokens=cell.tokens,
            context=cell.context,
            capacity=cell.capacity,
            last_only=cell.phase == "prefill",
        )

    def _round(self, cell: RoundCell) -> Part:
        target, grid = self._plan.target.shape, self._plan.grid
        choice = Choice(
            drafter=cell.drafter,
            k=cell.k,
            rule=cell.rule,
            chips_per_copy=cell.seat.chips if cell.seat.placement == "copies" else 0,
            leader=cell.seat.placement == "leader",
        )
        topology = self._plan.topology
        params = self._params_of(seated(topology, target))
        pair = random_pair(topology, target, cell.shape, choice, params)
        sampled = SamplingParams(temperature=grid.temperature, top_p=grid.top_p)
        setting = timing.Setting(
            batch=cell.batch, context=cell.context, params=sampled, capacity=cell.capacity
        )
        return timing.playing(pair, setting)

    def _params_of(self, model: Seated) -> Any:
        if model not in self._params:
            self._params[model] = model.params()
        return self._params[model]


def seat_of(topology: Topology, cell: StepCell) -> Seated:
    """The model of a cell, where it is."""
    if cell.apart:
        placement = Placement(topology.mesh(), topology.axes)
        share = chip_shape(cell.shape, cell.seat.chips)
        dtype = topology.serving_dtype
        return Seated(shape=share, dtype=dtype, placement=placement, seat="apart")
    model = seated(topology, cell.shape, cell.seat.chips)
    leads = cell.seat.placement == "leader"
    return dataclasses.replace(model, seat="leader") if leads else model


def measure(
    plan: Plan,
    cells: Sequence[Cell],
    stopwatch: Stopwatch,
    store: CellStore,
    on_cells: Callable[[int, str], None] = lambda count, name: None,
) -> dict[str, Timed]:
    """Times cells, some at a time; those in the store are not timed again.

    Args:
      plan: that they are of.
      cells: to be timed.
      stopwatch: how.
      store: where finished cells are kept.
      on_cells: called with how many more are finished, and the name of one.
    """
    found = {}
    for cell in cells:
        if (known := store.get(cell.key, Timed)) is not None:
            found[cell.key] = known
            on_cells(1, cell.key)
    missing = [cell for cell in cells if cell.key not in found]
    count = together(plan)
    for first in range(0, len(missing), count):
        some = missing[first : first + count]
        for key, timed in _measure(Bench(plan), some, stopwatch):
            store.put(key, timed)
            found[key] = timed
            on_cells(1, key)
    return found


def together(plan: Plan) -> int:
    """How many cells are sampled in turns: all that are compared, where memory allows it.

    A shared machine is faster at one time than half a minute later, and a model of all passes would take
    that for a property of those measured then.
    """
    return max(_FEWEST, HELD_BYTES // cell_bytes(plan))


def cell_bytes(plan: Plan) -> int:
    """What a cell holds beside weights, at most: per chip, or of the host that all chips share."""
    topology, grid, shape = plan.topology, plan.grid, plan.target.shape
    batch, capacity = max(grid.batches), grid.capacity(max(grid.contexts))
    empty, full = (
        held_bytes(shape, topology.num_chips, rows, capacity, topology.serving_dtype)
        for rows in (0, batch)
    )
    scores = 4 * shape.vocab_size * batch * (max(grid.drafts) + 1)
    return sharers(topology) * (full - empty + scores)


def sharers(topology: Topology) -> int:
    """Chips that share one memory."""
    return topology.num_chips if topology.platform == "cpu" else 1


def _measure(
    bench: Bench, cells: Sequence[Cell], stopwatch: Stopwatch
) -> Iterator[tuple[str, Timed]]:
    by_key = {cell.key: cell for cell in cells}
    parts = {key: bench.part(cell) for key, cell in by_key.items()}
    steps = [key for key, cell in by_key.items() if isinstance(cell, StepCell)]
    for key, samples in stopwatch.measure(parts, steps):
        yield key, _timed(samples)


def _timed(samples: Samples) -> Timed:
    counted = hlo.read(samples.program).collectives if samples.program else {}
    return Timed(
        fused=Quantiles.of(samples.fused),
        single=Quantiles.of(samples.single),
        reduces=counted.get("all-reduce", 0),
        gathers=counted.get("all-gather", 0),
        samples=len(samples.fused),
        outliers=samples.outliers,
    )
