"""What a profile is going to do, and whether there is memory for it: said before a device is touched."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from drafters import kv_cache
from drafters.mesh import Topology
from drafters.shapes import TransformerShape
from pipeline import compile_targets, step_times
from pipeline.collectives import CollectiveGrid, cells
from pipeline.core.errors import UserError
from pipeline.profile_grid import CompileGrid, Plan
from pipeline.work import chip_shape, held_bytes


def outlook(
    plan: Plan, collectives: CollectiveGrid, compiling: CompileGrid, compile_only: bool
) -> Iterator[str]:
    """The plan in lines: models, memory, cells.

    Raises:
      UserError: a collective is asked for that the mesh has not, or a compiler that is not known.
    """
    topology = plan.topology
    yield f"{topology.name}: {topology.num_chips} chips ({topology.platform})"
    capacity = plan.grid.capacity(max(plan.grid.contexts))
    for model in plan.models:
        shape = model.shape
        held = held_bytes(
            shape, topology.num_chips, max(plan.grid.batches), capacity, topology.serving_dtype
        )
        yield (
            f"{model.name}: {shape.num_layers} layers of width {shape.width}, {shape.num_params():,} "
            f"parameters; weights and cache take {held / 1e6:,.1f} MB per chip over all chips"
        )
    yield from layout_notes(plan)
    if compile_only:
        compile_targets.generation_of(topology)
        whole = set(compiling.tokens) - set(compiling.interpolated)
        steps = len(whole) * len(compiling.batches) * len(compiling.contexts)
        yield f"{steps * (1 + len(plan.drafters))} programs compiled for {topology.compile_target}"
        return
    alone = len(cells(topology, collectives, topology.serving_dtype))
    yield (
        f"{alone} cells of collectives, {len(plan.target_steps())} of the target's passes, "
        f"{len(plan.other_steps())} of other models' passes, {len(plan.rounds())} of rounds"
    )
    yield f"about {_needed_bytes(plan) / 1e9:,.2f} GB of memory {_whose(topology)}"


def layout_notes(plan: Plan) -> Iterator[str]:
    """What a person should know about how the models lie on all chips."""
    if plan.topology.num_chips == 1:
        return
    for model in plan.models:
        for note in model.shape.layout(plan.topology.num_chips).notes():
            yield f"{model.name}: {note}"


def _whose(topology: Topology) -> str:
    return "on the host" if topology.platform == "cpu" else "per chip"


def _needed_bytes(plan: Plan) -> int:
    """At most: per chip, or of the whole host where its chips share one memory."""
    topology = plan.topology

    def weights(shape: TransformerShape, chips: int) -> int:
        return held_bytes(shape, chips, 0, 0, topology.serving_dtype)

    chips = topology.num_chips
    copies = 1 if chips == 1 else 2  # the second one has its collectives removed
    models = [model for model in (*plan.models, plan.shallow) if model]
    fewest = min(seat.chips for seat in plan.seats)
    held = copies * sum(weights(model.shape, chips) for model in models)
    held += sum(weights(model.shape, fewest) for model in plan.drafters)
    count = len(plan.target_steps()) + len(plan.other_steps()) + len(plan.rounds())
    cells = min(step_times.together(plan), count) * step_times.cell_bytes(plan)
    return step_times.sharers(topology) * (held + _activation_bytes(plan)) + cells


def _activation_bytes(plan: Plan) -> int:
    """What the target's largest pass holds while it runs, on each chip: scores, weights and MLP, in fp32."""
    grid, share = plan.grid, chip_shape(plan.target.shape, plan.topology.num_chips)
    widest = [(tokens, kv_cache.capacity_for(tokens)) for tokens in grid.prompts]
    widest.append((max(grid.tokens), grid.capacity(max(grid.contexts))))

    def of(tokens: int, capacity: int) -> int:
        column = 2 * share.num_heads * capacity + 3 * share.mlp_width + 4 * share.width
        return 4 * max(grid.batches) * tokens * column

    return max(of(tokens, capacity) for tokens, capacity in widest)


def require_memory(plan: Plan) -> None:
    """Refuses what does not fit, before anything is allocated.

    Raises:
      UserError: with what is needed and what is there.
    """
    topology, needed = plan.topology, _needed_bytes(plan)
    there = host_bytes() if topology.platform == "cpu" else topology.hbm_bytes
    if not there or needed <= there:
        return
    shape = plan.target.shape
    raise UserError(
        f"the profile of {plan.target.name} on {topology.name} needs about {needed / 1e9:,.1f} GB "
        f"{_whose(topology)} ({shape.weight_bytes(topology.serving_dtype) / 1e9:,.1f} GB of the target's "
        f"weights on {topology.num_chips} chips; caches of {max(plan.grid.batches)} rows and "
        f"{plan.grid.capacity(max(plan.grid.contexts))} positions), and {there / 1e9:,.1f} GB are there: "
        "choose a smaller shape, fewer Grid.batches, shorter Grid.contexts or more chips"
    )


def host_bytes() -> float:
    """Memory that is available; 0 if that cannot be told."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return 0.0
    found = (line.split()[1] for line in lines if line.startswith("MemAvailable"))
    return 1024 * float(next(found, 0))
