"""gin/chinchilla.gin: the published sizes, on every topology that programs can be compiled for."""

import pytest

from drafters.mesh import Topology
from pipeline import compile_targets
from pipeline import profile as stage
from pipeline.compiled import expected_collectives
from pipeline.core import config
from pipeline.profile_grid import CompileGrid, Grid
from pipeline.subjects import Subject
from pipeline.work import held_bytes

TPUS = [path.stem for path in sorted((config.GIN_ROOT / "topologies").glob("tpu*.gin"))]


def configured(*more_files):
    """The stage's arguments."""
    found = {}

    def profile(
        *,
        run_dir: str,
        target: Subject,
        drafters: tuple[Subject, ...],
        topology: Topology,
        grid: Grid,
        compiling: CompileGrid,
    ):
        found.update(shapes=[one.shape for one in (target, *drafters)], topology=topology)
        found.update(compiling=compiling, run_dir=run_dir, grid=grid)

    config.load(profile, stage.SETTINGS, files=["chinchilla.gin", *more_files]).stage()
    return found


def test_sizes_are_the_published_ones():
    found = configured()
    target, drafter = found["shapes"]
    assert target.num_params() == 70_056_681_472
    assert drafter.num_params() == 4_122_580_992
    for shape in (target, drafter):
        assert abs(shape.layer_params() / shape.width**2 - 13) < 0.001  # norms are the rest
    assert expected_collectives(target, 16) == {"all-reduce": 160 + 1, "all-gather": 1}
    assert expected_collectives(drafter, 16) == {"all-reduce": 16 + 1, "all-gather": 1}
    assert found["compiling"].tokens == tuple(range(1, 10))


@pytest.mark.parametrize("name", TPUS)
def test_every_tpu_can_be_compiled_for(name):
    found = configured(f"topologies/{name}.gin")
    topology = found["topology"]
    assert topology.name == name
    compile_targets.generation_of(topology)
    assert topology.num_chips == 16
    held = [held_bytes(shape, 16, 1, 1536, "bfloat16") for shape in found["shapes"]]
    assert sum(held) < topology.hbm_bytes
