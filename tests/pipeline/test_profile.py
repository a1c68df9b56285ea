"""The profile stage on four host devices: what it writes, what it keeps, what it refuses."""

import dataclasses
import json

import jax
import pytest

from drafters.mesh import Topology
from drafters.shapes import TransformerShape
from pipeline import figures_profile, profile_outlook, step_times
from pipeline import profile as stage
from pipeline.collectives import CollectiveGrid
from pipeline.compiled import Wanted
from pipeline.core import artifacts
from pipeline.core.errors import UserError
from pipeline.core.run_dir import RunDir
from pipeline.profile_artifact import CompiledProgram, Profile
from pipeline.profile_grid import CompileGrid, Grid
from pipeline.stopwatch import Sampling, Stopwatch
from pipeline.subjects import Subject

HOST_4 = Topology(name="host_4", platform="cpu", axes=("x",), sizes=(4,))
TARGET = TransformerShape(
    vocab_size=64,
    num_layers=2,
    width=32,
    num_heads=4,
    num_kv_heads=4,
    head_dim=8,
    mlp_width=32,
    context=256,
)
DRAFTER = dataclasses.replace(TARGET, num_layers=1, width=16)
GRID = Grid(
    tokens=(1, 2),
    contexts=(40,),
    drafter_tokens=(1,),
    prompts=(),
    drafts=(1, 2),
    timed_drafts=(1,),
    leader=False,
    temperature=0.0,
    top_p=1.0,
    sampling=Sampling(sample_ms=1.0, samples=3, seconds=0.01),
)
SETTINGS = {
    "target": Subject(name="target", shape=TARGET),
    "drafters": (Subject(name="small", shape=DRAFTER),),
    "topology": HOST_4,
    "grid": GRID,
    "collectives": CollectiveGrid(
        ops=("all_reduce", "all_gather"), chips=(4,), tokens=(1, 2), widths=(32,), min_samples=3,
        sample_ms=1.0, budget_s=1.0,
    ),
    "config": "profile.seed = 0",
}  # fmt: skip


def run(folder, **changes):
    stage.profile(run_dir=str(folder), **{**SETTINGS, **changes})


class Interrupted(Exception):
    pass


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run that was interrupted after its first cells, and went on: the folder, and cells per call."""
    folder, measured = tmp_path_factory.mktemp("run"), []
    original = Stopwatch.measure

    def measure(self, parts, read=()):
        if len(measured) == 1:
            measured.append(0)
            raise Interrupted
        measured.append(len(parts))
        return original(self, parts, read)

    # Compiles three times faster to slower programs: this test compiles much and computes little.
    jax.config.update("jax_disable_most_optimizations", True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stopwatch, "measure", measure)
        patch.setattr(step_times, "together", lambda plan: 5)
        with pytest.raises(Interrupted):
            run(folder)
        assert not RunDir.at(folder).profile.exists()
        run(folder)
    jax.config.update("jax_disable_most_optimizations", False)
    return folder, measured


@pytest.fixture(scope="module")
def profile(made):
    return artifacts.read(RunDir.at(made[0]).profile, Profile)


@pytest.mark.slow
def test_an_interrupted_run_keeps_its_cells(made):
    folder, measured = made
    assert measured == [
        5,
        0,
        4,
    ]  # the first cells at one go, the interruption, then the others alone
    assert not list(folder.glob("profile_cells*"))


@pytest.mark.slow
def test_a_second_run_does_nothing(made, monkeypatch):
    before = RunDir.at(made[0]).profile.read_bytes()
    monkeypatch.setattr(step_times, "measure", None)
    run(made[0])
    assert RunDir.at(made[0]).profile.read_bytes() == before


@pytest.mark.slow
def test_the_profile_holds_what_readers_rely_on(made, profile):
    content = json.loads(RunDir.at(made[0]).profile.read_text())
    assert content["schema"] == 1
    assert content["topology"]["mesh"] == {"x": 4}
    assert {row["op"] for row in content["collectives"]} == {"all_reduce", "all_gather"}
    assert set(content["alpha_beta"]) == {"all_reduce/x/float32", "all_gather/x/float32"}
    for row in content["steps"]:
        assert row["source"] == "measured"
        assert 0 < row["latency_ms"]["p10"] <= row["latency_ms"]["p50"] <= row["latency_ms"]["p90"]
        assert row["bandwidth_utilisation"] > 0
        assert TransformerShape(**{**row["shape"], "rope": TARGET.rope,
                                   "layer_pattern": ("global",)}) in (TARGET, DRAFTER,
               dataclasses.replace(TARGET, num_layers=1))  # fmt: skip
    assert profile.lineage.machine == artifacts.this_machine()
    assert profile.latency_model is not None
    assert profile.noise is not None
    assert profile.topology.peaks_source == "measured"


@pytest.mark.slow
def test_programs_have_the_collectives_of_the_formula(profile):
    assert {step.collectives_per_layer for step in profile.steps} == {2.0}
    assert not [note for note in profile.notes if "formula" in note]


@pytest.mark.slow
def test_every_k_has_a_round(profile):
    rounds = {(r.drafter, r.placement, r.k): r for r in profile.rounds}
    assert set(rounds) == {
        ("", "sharded", 0),
        ("small", "sharded", 1),
        ("small", "sharded", 2),
    }
    predicted = [key for key, found in rounds.items() if found.source == "predicted"]
    assert predicted == [("small", "sharded", 2)]
    for r in rounds.values():
        assert r.score_ms > 0
        assert (r.draft_ms > 0) == bool(r.k)


@pytest.mark.slow
def test_there_is_something_to_see(made, profile):
    assert set(figures_profile.all_of(profile)) == {"collectives", "scoring", "where_time_goes"}
    assert list(RunDir.at(made[0]).tensorboard("profile").glob("events*"))
    assert RunDir.at(made[0]).report.exists()


@pytest.mark.slow
def test_measurements_of_another_machine_are_refused_and_kept(made, profile, monkeypatch):
    path = RunDir.at(made[0]).profile
    before = path.read_bytes()
    monkeypatch.setattr(artifacts, "this_machine", lambda: "an abacus")
    with pytest.raises(UserError, match="an abacus"):
        artifacts.require_match(path, profile.lineage, machine=artifacts.this_machine())
    with pytest.raises(UserError, match=r"measured on .*, and this is 'an abacus'; choose another"):
        run(made[0])
    assert path.read_bytes() == before


@pytest.mark.slow
def test_compiling_does_not_replace_measurements_of_another_config(made):
    path = RunDir.at(made[0]).profile
    before = path.read_bytes()
    with pytest.raises(UserError, match="holds measurements of another config, which compiling"):
        run(made[0], compile_only=True, config="profile.seed = 0  # and more")
    assert path.read_bytes() == before


# --------------------------------------------------------------------------------------------------
# Refusals and the plan
# --------------------------------------------------------------------------------------------------


def test_more_chips_than_there_are(tmp_path):
    many = dataclasses.replace(HOST_4, name="host_32", sizes=(32,))
    with pytest.raises(UserError, match=r"host_32 needs 32 cpu devices.*device_count=32"):
        run(tmp_path, topology=many, drafters=())


def test_a_shape_that_does_not_fit_is_refused_before_anything_is_allocated(tmp_path, monkeypatch):
    monkeypatch.setattr(profile_outlook, "host_bytes", lambda: 1e3)
    with pytest.raises(UserError, match=r"needs about .* GB on the host .* 0\.0 GB are there"):
        run(tmp_path)
    assert not list(tmp_path.glob("profile*"))


def test_a_trace_that_cannot_be_written_is_refused_before_anything_is_compiled(tmp_path):
    with pytest.raises(UserError, match="cannot write /dev/null/here"):
        run(tmp_path, trace="/dev/null/here")


def test_a_dry_run_refuses_what_does_not_fit(tmp_path, monkeypatch):
    monkeypatch.setattr(profile_outlook, "host_bytes", lambda: 1e3)
    with pytest.raises(UserError, match="are there"):
        run(tmp_path, dry_run=True)


def test_prompts_need_memory_for_their_scores(tmp_path, monkeypatch):
    short, long = (dataclasses.replace(GRID, prompts=(tokens,)) for tokens in (16, 200))
    run_dir, models = RunDir.at(tmp_path), (SETTINGS["target"], SETTINGS["drafters"])
    enough = profile_outlook._needed_bytes(stage._plan(run_dir, *models, HOST_4, short))
    monkeypatch.setattr(profile_outlook, "host_bytes", lambda: enough)
    run(tmp_path, dry_run=True, grid=short)
    with pytest.raises(UserError, match="are there"):
        run(tmp_path, dry_run=True, grid=long)


def test_a_mesh_that_does_not_divide(tmp_path):
    with pytest.raises(UserError, match="no axes with 3 chips"):
        run(tmp_path, grid=dataclasses.replace(GRID, chips_per_copy=(3,)))


def test_a_model_that_is_neither_trained_nor_described(tmp_path):
    with pytest.raises(UserError, match="train or import 'absent' first, or give its shape"):
        run(tmp_path, drafters=(Subject(name="absent"),))


def test_a_dry_run_says_what_would_be_done(tmp_path, capsys):
    run(tmp_path, dry_run=True, drafters=(*SETTINGS["drafters"], Subject(name="ngram")))
    said = capsys.readouterr().err
    assert f"target: 2 layers of width 32, {TARGET.num_params():,} parameters" in said
    assert "4 cells of collectives, 5 of the target's passes, 2 of other models' passes, 3 of rounds" in (
        said
    )  # fmt: skip
    assert "GB of memory on the host" in said
    assert not list(tmp_path.iterdir())


# --------------------------------------------------------------------------------------------------
# Compiled, not run
# --------------------------------------------------------------------------------------------------


def program(wanted: Wanted) -> CompiledProgram:
    return CompiledProgram(
        model=wanted.model, topology="host_4", chips=4, batch=wanted.batch, tokens=wanted.tokens,
        context=wanted.context, dtype="bfloat16", argument_bytes=100, temporary_bytes=10,
        output_bytes=1, fits=True, collectives={"all-reduce": 5}, expected_collectives={"all-reduce": 5},
        estimated_cycles=7.0, compile_s=0.1,
    )  # fmt: skip


def test_compiled_programs_join_what_is_measured(tmp_path, monkeypatch):
    asked = []

    def compile_steps(topology, wanted, *, known, on_program):
        asked.append((len(wanted), len(tuple(known))))
        return tuple(program(one) for one in wanted)

    monkeypatch.setattr(stage.compiled, "compile_steps", compile_steps)
    grid = CompileGrid(tokens=(1, 5), contexts=(100,))
    run(tmp_path, compile_only=True, compiling=grid)
    run(tmp_path, compile_only=True, compiling=grid)
    assert asked == [(4, 0), (4, 4)]
    found = artifacts.read(RunDir.at(tmp_path).profile, Profile)
    assert {(one.model, one.tokens) for one in found.compiled} == {
        (model, tokens) for model in ("target", "small") for tokens in (1, 5)
    }
    assert not found.steps
    # Measuring is still to be done, and keeps what was compiled.
    measured = dataclasses.replace(found, compiled=(), notes=("measured",))
    monkeypatch.setattr(stage._Stage, "_measured", lambda self, store: measured)
    run(tmp_path)
    after = artifacts.read(RunDir.at(tmp_path).profile, Profile)
    assert (after.notes, after.compiled) == (("measured",), found.compiled)


def test_programs_compiled_before_an_interruption_are_kept(tmp_path, monkeypatch):
    known_at_start = []

    def compile_steps(topology, wanted, *, known, on_program):
        known_at_start.append([one.tokens for one in known])
        for one in wanted:
            if one.tokens == 5 and len(known_at_start) == 1:
                raise KeyboardInterrupt
            on_program(dataclasses.replace(program(one), topology=topology.name))
        return tuple(program(one) for one in wanted)

    monkeypatch.setattr(stage.compiled, "compile_steps", compile_steps)
    grid = CompileGrid(tokens=(1, 5), contexts=(100,))
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, compile_only=True, compiling=grid)
    run(tmp_path, compile_only=True, compiling=grid)
    assert known_at_start == [[], [1]]
    assert not (tmp_path / "compiled_cells.jsonl").exists()
