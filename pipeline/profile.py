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
from collections.abc import Sequence
from pathlib import Path

import jax
from tqdm import tqdm

from drafters.compilation import keep_programs
from drafters.mesh import Topology
from drafters.shapes import Rope, TransformerShape
from pipeline import (
    collective_fit,
    compiled,
    figures,
    figures_profile,
    latency,
    peaks,
    profile_outlook,
    profile_results,
    profile_summary,
    report,
    step_times,
)
from pipeline import collectives as collective_times
from pipeline.cell_store import CellStore
from pipeline.collectives import CollectiveGrid
from pipeline.core import artifacts, config
from pipeline.core.errors import UserError, end_with
from pipeline.core.events import EventWriter
from pipeline.core.progress import progress_bar
from pipeline.core.run_dir import RunDir, explain_os_errors
from pipeline.latency import Machine
from pipeline.noise import NoiseMeter
from pipeline.profile_artifact import Collective, CompiledProgram, Profile, ProfiledTopology
from pipeline.profile_grid import CompileGrid, Grid, Model, Plan
from pipeline.stopwatch import Sampling, Stopwatch
from pipeline.subjects import Subject, weights_hashes
from pipeline.watching import say
from serving.pair import NGRAM, parts_of

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
        for line in profile_outlook.outlook(plan, collectives, compiling, compile_only):
            say(line)
        if not compile_only:
            profile_outlook.require_memory(plan)
        return
    untold = [one.name for one in (target, *drafters, *grid.shapes) if one.shape is None]
    lineage = artifacts.Lineage.here(
        config=config,
        seed=seed,
        weights_hash=weights_hashes(run, (name for name in untold if name != NGRAM)),
        machine=artifacts.this_machine(),
    )
    with run.lock("profile"):
        _refuse_to_replace(run, lineage, compile_only)
        stage = _Stage(run, plan, collectives, lineage)
        if trace:
            stage.trace(trace)
        elif compile_only:
            stage.compile(compiling)
        else:
            stage.measure()


def _refuse_to_replace(run: RunDir, lineage: artifacts.Lineage, compile_only: bool) -> None:
    """Measurements that cannot be repeated here, or that nobody asked to be repeated, are kept."""
    try:
        found = artifacts.read(run.profile, Profile)
    except UserError:
        return
    differences = found.lineage.differences(lineage)
    remedy = "choose another --run_dir, or delete the file"
    if found.steps and "machine" in differences:
        raise UserError(
            f"{run.profile}: measured on {found.lineage.machine!r}, and this is {lineage.machine!r}; {remedy}"
        )
    if found.steps and compile_only and differences:
        raise UserError(
            f"{run.profile}: holds measurements of another {', '.join(differences)}, which compiling would "
            f"replace; {remedy}"
        )


def _plan(
    run: RunDir, target: Subject, drafters: Sequence[Subject], topology: Topology, grid: Grid
) -> Plan:
    def model(subject: Subject) -> Model:
        if len(parts := parts_of(subject.name)) > 1:
            raise UserError(
                f"profile.drafters names {subject.name!r}: profile {' and '.join(parts)}, from which its "
                "rounds follow"
            )
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
            report.restore(self._run)
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
        profile_outlook.require_memory(self._plan)

    def _measured(self, store: CellStore) -> Profile:
        plan, meter = self._plan, NoiseMeter()
        cells = [*plan.target_steps(), *plan.other_steps()]
        dtype = plan.topology.serving_dtype
        wanted = collective_times.cells(plan.topology, self._grid, dtype)
        total = len(wanted) + len(cells) + len(plan.rounds())
        with progress_bar(total=total, unit="cell") as bar:
            found = self._collectives(store, meter, dtype, bar)
            alone = found.collectives
            mesh = peaks.profiled(plan.topology)
            machine = Machine(
                platform=mesh.platform,
                chips=mesh.num_chips,
                cores=mesh.cores,
                dtype=dtype,
                alpha_beta=collective_fit.fit(alone, self._lineage.seed),
            )
            watch = Stopwatch(plan.grid.sampling, meter, self._lineage.seed)
            times = step_times.measure(plan, [*cells, *plan.rounds()], watch, store, _shown(bar))
        outliers = found.noise.outliers + sum(timed.outliers for timed in times.values())
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
                *profile_outlook.layout_notes(plan),
                *unexpected,
                *profile_results.disagreements(layers),
                *profile_summary.model_notes(model),
            ),
        )

    def _collectives(
        self, store: CellStore, meter: NoiseMeter, dtype: str, bar: tqdm
    ) -> collective_times.Measurement:
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
        )

    def _write(self, found: Profile) -> None:
        artifacts.write(self._run.profile, found)
        with EventWriter(self._run.tensorboard("profile")) as events:
            events.text(0, "config", f"```\n{found.lineage.config}\n```")
            events.scalars(0, figures_profile.scalars(found.steps))
            for name, figure in figures_profile.all_of(found).items():
                events.image(0, f"profile/{name}", figures.png(figure))
        report.update(self._run)
        for line in profile_summary.summary(found):
            say(line)
        say(f"wrote {self._run.profile}")

    def compile(self, grid: CompileGrid) -> None:
        """Compiles every model's steps for the topology and keeps what they say."""
        plan = self._plan
        wanted = [
            compiled.Wanted(
                model=m.name,
                shape=m.shape,
                tokens=t,
                batch=b,
                context=c,
                interpolate=t in grid.interpolated,
            )
            for m, b, c, t in itertools.product(
                (plan.target, *plan.drafters), grid.batches, grid.contexts, grid.tokens
            )
        ]
        store = CellStore(self._run.root / "compiled_cells.jsonl", self._lineage)
        kept = [
            store.get(compiled.wanted_key(plan.topology, one), CompiledProgram) for one in wanted
        ]
        before = self._known.compiled if self._known else ()
        known = (*before, *filter(None, kept))
        with progress_bar(total=len(wanted), unit="program") as bar:

            def keep(program: CompiledProgram) -> None:
                store.put(compiled.key_of(program), program)
                bar.update()

            programs = compiled.compile_steps(plan.topology, wanted, known=known, on_program=keep)
        if before == programs:
            say(f"{self._run.profile} is up to date")
            report.restore(self._run)
            return
        base = self._known or _nothing_measured(plan, self._lineage)
        notes = dict.fromkeys((*base.notes, *compiled.findings(programs)))
        self._write(dataclasses.replace(base, compiled=programs, notes=tuple(notes)))
        store.discard()

    def trace(self, folder: str) -> None:
        """Writes a trace of the target's decode step and of a round."""
        with explain_os_errors(folder, "write"):
            Path(folder).mkdir(parents=True, exist_ok=True)
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
    keep_programs()
    configured.stage(config=configured.config_str)


if __name__ == "__main__":
    end_with(main)
