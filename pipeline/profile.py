"""Measures what a mesh costs: `python -m pipeline.profile --gin_file=gin/quickstart.gin`.

Writes RUN_DIR/profile.json: collectives, forward passes of the target and of every drafter in every place,
what one layer costs with and without its collectives, rounds of speculation, and a model that predicts
passes of other shapes. Weights are random: no time depends on them, so that nothing needs to be trained.
A run that was interrupted goes on with the cells that are missing when the same command is given again.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import jax
from tqdm import tqdm

from drafters.mesh import Topology
from drafters.shapes import DTYPE_BYTES, Rope, TransformerShape
from pipeline import (
    collective_fit,
    compiled,
    figures,
    figures_profile,
    latency,
    peaks,
    profile_results,
    report,
    step_times,
)
from pipeline import collectives as collective_times
from pipeline.cell_store import CellStore
from pipeline.collectives import CollectiveGrid
from pipeline.core import artifacts, config
from pipeline.core.errors import UserError, run_cli
from pipeline.core.events import EventWriter
from pipeline.core.run_dir import RunDir
from pipeline.latency import Machine
from pipeline.noise import NoiseMeter
from pipeline.profile_artifact import Collective, LatencyModel, Profile, ProfiledTopology
from pipeline.profile_grid import CompileGrid, Grid, Model, Plan
from pipeline.stopwatch import Sampling, Stopwatch
from pipeline.subjects import Subject, weights_hashes
from pipeline.watching import say
from pipeline.work import held_bytes
from serving.pair import NGRAM

SETTINGS = (
    CollectiveGrid,
    CompileGrid,
    Grid,
    Rope,
    Sampling,
    Subject,
    Topology,
    TransformerShape,
)


def profile(
    *,
    run_dir: str,
    target: Subject = Subject(name="target"),
    drafters: tuple[Subject, ...] = (),
    topology: Topology = Topology(name="host_1", platform="cpu"),
    grid: Grid = Grid(),
    collectives: CollectiveGrid = CollectiveGrid(),
    compiling: CompileGrid = CompileGrid(),
    compile_only: bool = False,
    trace: str = "",
    seed: int = 0,
    config: str = "",
    dry_run: bool = False,
) -> None:
    """Measures what is not measured yet and writes the profile.

    Args:
      run_dir: where profile.json goes.
      target: the model that is to be served.
      drafters: what may draft for it; one named "ngram" is the lookup.
      topology: the devices.
      grid, collectives: what is measured.
      compiling: what is compiled with `compile_only`.
      compile_only: compile for `topology.compile_target`, which is not attached, and measure nothing.
      trace: write a trace of a few steps and rounds to this folder, for TensorBoard, and measure nothing.
      seed: of the order of cells.
      config: the text of this config, for lineage and TensorBoard.
      dry_run: check, print the plan and stop.
    """
    run = RunDir.at(run_dir)
    plan = _plan(run, target, drafters, topology, grid)
    if dry_run:
        for line in _outlook(plan, collectives, compiling, compile_only):
            say(line)
        return
    untold = [one.name for one in (target, *drafters, *grid.shapes) if one.shape is None]
    lineage = artifacts.Lineage.here(
        config=config,
        seed=seed,
        weights_hash=weights_hashes(run, (name for name in untold if name != NGRAM)),
        machine=artifacts.this_machine(),
    )
    stage = _Stage(run, plan, collectives, lineage)
    with run.lock("profile"):
        if trace:
            stage.trace(trace)
        elif compile_only:
            stage.compile(compiling)
        else:
            stage.measure()


def _plan(
    run: RunDir, target: Subject, drafters: Sequence[Subject], topology: Topology, grid: Grid
) -> Plan:
    def model(subject: Subject) -> Model:
        return Model(name=subject.name, shape=subject.shape_in(run))

    return Plan(
        grid=grid,
        topology=topology,
        target=model(target),
        drafters=tuple(model(one) for one in drafters if one.name != NGRAM),
        others=tuple(model(one) for one in grid.shapes),
        lookup=any(one.name == NGRAM for one in drafters),
    )


# --------------------------------------------------------------------------------------------------
# The stage
# --------------------------------------------------------------------------------------------------


class _Stage:
    """One call: what is there already, what is missing."""

    def __init__(
        self,
        run: RunDir,
        plan: Plan,
        grid: CollectiveGrid,
        lineage: artifacts.Lineage,
    ):
        self._run, self._plan, self._grid, self._lineage = run, plan, grid, lineage
        self._known = artifacts.current(run.profile, Profile, lineage)

    def measure(self) -> None:
        """Measures, unless it is done."""
        if self._known is not None and self._known.steps:
            say(f"{self._run.profile} is up to date")
            return
        self._prepare()
        store = CellStore(self._run.root / "profile_cells.jsonl", self._lineage)
        if len(store):
            say(f"{len(store)} cells were measured before and are kept")
        found = self._measured(store)
        if self._known is not None:
            found = dataclasses.replace(found, compiled=self._known.compiled)
        self._write(found)
        store.discard()

    def _prepare(self) -> None:
        topology = self._plan.topology
        topology.prepare()
        topology.mesh()
        _require_memory(self._plan)

    def _measured(self, store: CellStore) -> Profile:
        plan, meter = self._plan, NoiseMeter()
        cells = [*plan.target_steps(), *plan.other_steps()]
        dtype = plan.topology.serving_dtype
        wanted = collective_times.cells(plan.topology, self._grid, dtype)
        total = len(wanted) + len(cells) + len(plan.rounds())
        with tqdm(total=total, unit="cell", disable=not sys.stderr.isatty()) as bar:
            alone = self._collectives(store, meter, dtype, bar)
            mesh = peaks.profiled(plan.topology)
            machine = Machine(
                platform=mesh.platform,
                chips=mesh.num_chips,
                cores=mesh.cores,
                dtype=dtype,
                alpha_beta=collective_fit.fit(alone, self._lineage.seed),
            )
            watch = Stopwatch(plan.grid.sampling, meter, self._lineage.seed)
            times = {}
            for some in (plan.target_steps(), plan.other_steps(), plan.rounds()):
                times |= step_times.measure(plan, some, watch, store, _shown(bar))
        outliers = sum(timed.outliers for timed in times.values())
        layers = profile_results.layers(plan, times, machine)
        steps = profile_results.steps(cells, times, mesh, dtype)
        rounds = profile_results.rounds(plan, steps, times, machine)
        model = latency.fit(profile_results.observations(cells, times, machine), machine)
        unexpected = profile_results.unexpected_collectives(cells, times)
        return Profile(
            lineage=self._lineage,
            target=plan.target.name,
            topology=mesh,
            collectives=alone,
            alpha_beta=dict(machine.alpha_beta),
            steps=steps,
            layers=layers,
            rounds=rounds,
            latency_model=model,
            noise=meter.noise(outliers),
            notes=(
                *_layout_notes(plan),
                *unexpected,
                *profile_results.disagreements(layers),
                *_model_notes(model),
            ),
        )

    def _collectives(
        self, store: CellStore, meter: NoiseMeter, dtype: str, bar: tqdm
    ) -> tuple[Collective, ...]:
        """Of the grid; cells are kept as they are finished."""
        wanted = collective_times.cells(self._plan.topology, self._grid, dtype)
        kept = {cell: store.get(_key(cell), Collective) for cell in wanted}
        known = {cell: one for cell, one in kept.items() if one is not None}
        bar.update(len(known))

        def keep(one: Collective) -> None:
            store.put(_key(collective_times.Cell.of(one)), one)
            bar.update()

        return collective_times.measure(
            self._plan.topology,
            self._grid,
            dtype,
            seed=self._lineage.seed,
            known=known,
            on_cell=keep,
            meter=meter,
        ).collectives

    def _write(self, found: Profile) -> None:
        artifacts.write(self._run.profile, found)
        with EventWriter(self._run.tensorboard("profile")) as events:
            events.text(0, "config", f"```\n{found.lineage.config}\n```")
            events.scalars(0, figures_profile.scalars(found.steps))
            for name, figure in figures_profile.all_of(found).items():
                events.image(0, f"profile/{name}", figures.png(figure))
        report.update(self._run)
        for line in _summary(found):
            say(line)
        say(f"wrote {self._run.profile}")

    def compile(self, grid: CompileGrid) -> None:
        """Compiles every model's steps for the topology and keeps what they say."""
        plan = self._plan
        wanted = [
            compiled.Wanted(model=m.name, shape=m.shape, tokens=t, batch=b, context=c)
            for m, b, c, t in itertools.product(
                (plan.target, *plan.drafters), grid.batches, grid.contexts, grid.tokens
            )
        ]
        known = self._known.compiled if self._known else ()
        with tqdm(total=len(wanted), unit="program", disable=not sys.stderr.isatty()) as bar:
            programs = compiled.compile_steps(
                plan.topology, wanted, known=known, on_program=lambda _: bar.update()
            )
        base = self._known or _nothing_measured(plan, self._lineage)
        notes = dict.fromkeys((*base.notes, *compiled.findings(programs)))
        self._write(dataclasses.replace(base, compiled=programs, notes=tuple(notes)))

    def trace(self, folder: str) -> None:
        """Writes a trace of the target's decode step and of a round."""
        self._prepare()
        plan = self._plan
        cells = [plan.target_steps()[0], plan.rounds()[-1]]
        bench = step_times.Bench(plan)
        parts = [bench.part(cell) for cell in cells]
        for part in parts:
            jax.block_until_ready(part.run(1))  # compiles
        with jax.profiler.trace(folder):
            for part in parts:
                jax.block_until_ready(part.run(3))
        names = " and ".join(cell.key for cell in cells)
        say(f"traced {names}: tensorboard --logdir={folder} (plugin: tensorboard-plugin-profile)")


def _key(cell: collective_times.Cell) -> str:
    return "collective " + " ".join(map(str, cell))


def _shown(bar: tqdm):
    def show(count: int, name: str) -> None:
        bar.set_postfix_str(name, refresh=False)
        bar.update(count)

    return show


def _nothing_measured(plan: Plan, lineage: artifacts.Lineage) -> Profile:
    """A profile that only compiled programs are put into."""
    topology = plan.topology
    return Profile(
        lineage=lineage,
        target=plan.target.name,
        topology=ProfiledTopology(
            name=topology.name,
            platform=topology.platform,
            device_kind=topology.device_kind,
            num_chips=topology.num_chips,
            mesh=dict(zip(topology.axes, topology.sizes, strict=True)),
            hbm_bytes_per_s=topology.hbm_bytes_per_s,
            flop_per_s=topology.bf16_flop_per_s,
            peaks_source=topology.source,
        ),
        collectives=(),
        alpha_beta={},
        steps=(),
    )


# --------------------------------------------------------------------------------------------------
# Before a device is touched
# --------------------------------------------------------------------------------------------------


def _outlook(
    plan: Plan, collectives: CollectiveGrid, compiling: CompileGrid, compile_only: bool
) -> Iterator[str]:
    """The plan in lines: models, memory, cells."""
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
    yield from _layout_notes(plan)
    if compile_only:
        steps = len(compiling.tokens) * len(compiling.batches) * len(compiling.contexts)
        yield f"{steps * (1 + len(plan.drafters))} programs compiled for {topology.compile_target}"
        return
    alone = collective_cells(topology, collectives)
    yield (
        f"{alone} cells of collectives, {len(plan.target_steps())} of the target's passes, "
        f"{len(plan.other_steps())} of other models' passes, {len(plan.rounds())} of rounds"
    )
    yield f"about {_needed_bytes(plan) / 1e9:,.2f} GB of memory {_whose(topology)}"


def collective_cells(topology: Topology, grid: CollectiveGrid) -> int:
    """How many collectives are timed."""
    return len(collective_times.cells(topology, grid, topology.serving_dtype))


def _layout_notes(plan: Plan) -> Iterator[str]:
    if plan.topology.num_chips == 1:
        return
    for model in plan.models:
        for note in model.shape.layout(plan.topology.num_chips).notes():
            yield f"{model.name}: {note}"


def _whose(topology: Topology) -> str:
    return "on the host" if topology.platform == "cpu" else "per chip"


def _needed_bytes(plan: Plan) -> int:
    """At most: per chip, or of the whole host where its chips share one memory."""
    topology, grid = plan.topology, plan.grid
    sharers = topology.num_chips if topology.platform == "cpu" else 1
    batch, capacity = max(grid.batches), grid.capacity(max(grid.contexts))

    def needed(shape: TransformerShape, chips: int, caches: int) -> int:
        empty = held_bytes(shape, chips, 0, capacity, topology.serving_dtype)
        full = held_bytes(shape, chips, batch, capacity, topology.serving_dtype)
        return sharers * (empty + caches * (full - empty))

    # Removing collectives takes a second copy of the target's weights, and of the shallow one.
    target = needed(plan.target.shape, topology.num_chips, step_times.TOGETHER)
    apart = sum(
        needed(model.shape, topology.num_chips, 1) for model in (plan.target, plan.shallow) if model
    )
    fewest = min(seat.chips for seat in plan.seats)
    drafters = sum(needed(model.shape, fewest, 1) for model in plan.drafters)
    scores = 4 * plan.target.shape.vocab_size * batch * (max(grid.drafts) + 1)
    return target + max(apart, drafters) + step_times.TOGETHER * sharers * scores


def _require_memory(plan: Plan) -> None:
    """Refuses what does not fit, before anything is allocated."""
    topology, needed = plan.topology, _needed_bytes(plan)
    there = _host_bytes() if topology.platform == "cpu" else topology.hbm_bytes
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


def _host_bytes() -> float:
    """Memory that is available; 0 if that cannot be told."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return 0.0
    found = (line.split()[1] for line in lines if line.startswith("MemAvailable"))
    return 1024 * float(next(found, 0))


# --------------------------------------------------------------------------------------------------
# What a person is told
# --------------------------------------------------------------------------------------------------


def _model_notes(model: LatencyModel | None) -> Iterator[str]:
    if model is None:
        yield "no latency model: it takes at least two shapes"
        return
    good = model.median_error <= latency.GOOD_MEDIAN and model.worst_error <= latency.GOOD_WORST
    yield (
        f"the latency model is off by {model.median_error:.0%} in the median and {model.worst_error:.0%} at "
        f"worst on shapes that were left out of its fit{'' if good else ': do not trust it for new shapes'}"
    )


def _summary(found: Profile) -> Iterator[str]:
    rows = {
        op: fit.r2 for op, fit in found.alpha_beta.items() if fit.chips == found.topology.num_chips
    }
    for name in rows:
        curve = found.alpha_beta[name]
        row = DTYPE_BYTES[curve.dtype] * _width(found)
        yield collective_fit.where_latency_bound_ends(curve, row)
    for step in found.steps:
        if step.dispatch == "fused":
            yield (
                f"{step.model:24} {step.phase:7} T = {step.tokens:<4} {step.placement:8} "
                f"{step.chips_per_copy:3} chips {step.latency_ms.p50:9.3f} ms  "
                f"bandwidth {step.bandwidth_utilisation:4.0%}  flops {step.flop_utilisation:4.0%}"
            )
    yield from _round_lines(found)
    yield from found.notes


def _width(found: Profile) -> int:
    widths: Iterable[int] = (s.shape["width"] for s in found.steps if s.model == found.target)
    return next(iter(widths), 1)


def _round_lines(found: Profile) -> Iterator[str]:
    for one in found.rounds:
        who = f"{one.drafter} K = {one.k}, {one.placement}" if one.k else "plain decoding"
        rest = one.round_ms.p50 - one.draft_ms - one.score_ms - one.broadcast_us / 1e3
        yield (
            f"round of {who:28} {one.round_ms.p50:9.3f} ms = draft {one.draft_ms:.3f} + score "
            f"{one.score_ms:.3f} + broadcast {one.broadcast_us / 1e3:.3f} + the rest {rest:.3f}"
            f"{' (predicted)' if one.source == 'predicted' else ''}"
        )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m pipeline.profile", description=__doc__)
    parser.add_argument(
        "--compile_only",
        action="store_true",
        default=None,
        help="compile for the topology's devices, which need not be attached, and measure nothing",
    )
    parser.add_argument(
        "--trace",
        metavar="DIR",
        help="write a trace of a few steps and rounds for TensorBoard, and measure nothing",
    )
    config.add_flags(parser)
    flags = config.parse_flags(parser)
    configured = config.load(
        profile,
        SETTINGS,
        files=flags.gin_file,
        bindings=flags.gin_bindings,
        supplied={
            "run_dir": flags.run_dir,
            "dry_run": flags.dry_run,
            "compile_only": flags.compile_only,
            "trace": flags.trace,
        },
    )
    configured.stage(config=configured.config_str)


if __name__ == "__main__":
    sys.exit(run_cli(main))
