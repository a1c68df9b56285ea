"""Chained collectives on 16 host devices, and how cells take turns."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from drafters.mesh import Topology
from pipeline import collectives, hlo
from pipeline.collectives import Cell, CollectiveGrid
from pipeline.core.errors import UserError

HOST = Topology(name="host_16", platform="cpu", axes=("x", "y", "z"), sizes=(2, 2, 4))
GRID = CollectiveGrid(tokens=(1, 5), widths=(32,), min_samples=2, max_samples=2, sample_ms=0.1)
KINDS = {
    "all_reduce": "all-reduce",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
}


def test_every_axis_and_every_size_once():
    found = collectives.cells(HOST, CollectiveGrid(tokens=(1, 5), widths=(256, 1024)), "float32")
    parts = {"x": 2, "y": 2, "z": 4, "y+z": 8, "x+y+z": 16}
    assert {cell.axis: cell.chips for cell in found} == parts
    assert len(found) == len(set(found)) == len(parts) * 3 * 2 * 2


def test_a_grid_chooses():
    chosen = dataclasses.replace(GRID, ops=("all_reduce",), chips=(1, 16), axes=("x+z",))
    found = collectives.cells(HOST, chosen, "bfloat16")
    assert {(cell.axis, cell.tokens) for cell in found} == set(
        itertools.product(["x+z", "x+y+z"], [1, 5])
    )


def test_one_chip_has_nothing_to_time():
    assert collectives.cells(Topology(name="one", platform="cpu"), GRID, "float32") == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"chips": (32,)}, r"32 chips.*choose one of \[1, 2, 4, 8, 16\]"),
        ({"axes": ("x+w",)}, "'w'.*'x', 'y', 'z'"),
        ({"widths": (40,)}, "multiples of 16"),
    ],
)
def test_requests_that_the_mesh_cannot_answer(changes, message):
    with pytest.raises(UserError, match=message):
        collectives.cells(HOST, dataclasses.replace(GRID, **changes), "float32")


def test_more_chips_than_there_are():
    wide = dataclasses.replace(HOST, sizes=(2, 2, 8))
    with pytest.raises(UserError, match="xla_force_host_platform_device_count=32"):
        collectives.measure(wide, dataclasses.replace(GRID, widths=(64,)), "float32")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": ()}, "tokens"),
        ({"ops": ("broadcast",)}, "broadcast.*all_reduce"),
        ({"min_samples": 9, "max_samples": 2}, "min_samples = 9"),
        ({"tolerance": 0}, "tolerance"),
    ],
)
def test_grids_that_make_no_sense(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(GRID, **changes)


@pytest.fixture(scope="module")
def mesh():
    return HOST.mesh()


def run(cell, mesh, x, trips):
    """The chain's result, [chips, width, tokens], and what a trip of it does."""
    own = NamedSharding(mesh, P(mesh.axis_names))
    x = jax.device_put(x.reshape(-1, cell.tokens), own)
    program = jax.jit(collectives.chain(cell, mesh)).lower(x, jnp.int32(trips)).compile()
    found = np.asarray(program(x, jnp.int32(trips))).reshape(16, cell.width, cell.tokens)
    return found, hlo.read(program.as_text()).collectives


@pytest.mark.parametrize("op", KINDS)
def test_each_trip_is_one_collective_on_the_result_of_the_last(op, mesh):
    cell = Cell(op, "y+z", 8, 2, 8, "float32")
    x = np.random.default_rng(0).integers(0, 3, (2, 8, 8, 2)).astype(np.float32)
    found, kinds = run(cell, mesh, x, 3)
    assert kinds == {KINDS[op]: 1}
    expected = x
    for _ in range(3):
        expected = by_hand(op, expected)
    np.testing.assert_array_equal(found.reshape(x.shape), expected)


def by_hand(op, x):
    """One trip; x [groups, chips, width, tokens]."""
    if op == "all_reduce":
        return np.broadcast_to(x.sum(axis=1, keepdims=True), x.shape)
    if op == "all_gather":
        return np.broadcast_to(x[:, :1], x.shape)
    rows = x.shape[2] // x.shape[1]
    parts = x.sum(axis=1).reshape(len(x), x.shape[1], rows, x.shape[3])
    return np.concatenate((parts, x[:, :, rows:]), axis=2)


def test_measured_cells_are_kept_and_not_measured_again():
    grid = dataclasses.replace(GRID, ops=("all_reduce",), chips=(16,), axes=("z",), tokens=(1,))
    first = collectives.measure(HOST, grid, "float32")
    assert [(one.axis, one.chips, one.samples) for one in first.collectives] == [
        ("z", 4, 2),
        ("x+y+z", 16, 2),
    ]
    assert first.collectives[0].payload_bytes == 32 * 4
    known = {Cell.of(one): one for one in first.collectives}
    wider, asked = dataclasses.replace(grid, tokens=(1, 5)), []
    second = collectives.measure(HOST, wider, "float32", known=known, on_cell=asked.append)
    assert {Cell.of(one) for one in asked}.isdisjoint(known)
    assert len(asked) == 2
    assert [one for one in second.collectives if one.tokens == 1] == list(first.collectives)


class Scripted:
    """A probe without devices: latency 100, and in every second sample `wobble` more."""

    turns: list
    wobble: dict

    def __init__(self, mesh, cell, sample_ms, clock):
        self.cell, self.samples_us = cell, []

    def sample(self):
        self.turns.append(self.cell.tokens)
        extra = self.wobble.get(self.cell.tokens, 0.0)
        self.samples_us.append(100.0 + extra * (len(self.samples_us) % 2))

    def result(self):
        return self


@pytest.fixture
def scripted(monkeypatch):
    Scripted.turns, Scripted.wobble = [], {}
    monkeypatch.setattr(collectives, "_Probe", Scripted)
    return Scripted


STEADY = CollectiveGrid(
    ops=("all_reduce",), chips=(16,), axes=("x+y+z",), tokens=tuple(range(1, 9)), widths=(32,),
    min_samples=6, max_samples=40, budget_s=1000,
)  # fmt: skip


def test_steady_cells_stop_early_and_restless_ones_go_on(scripted):
    scripted.wobble = {3: 150.0}
    found = collectives.measure(HOST, STEADY, "float32")
    counts = {one.cell.tokens: len(one.samples_us) for one in found.collectives}
    assert counts == {tokens: 40 if tokens == 3 else 6 for tokens in range(1, 9)}
    assert found.noise.outliers == 0
    scripted.wobble = {3: 1000.0, 4: 1000.0}
    grid = dataclasses.replace(STEADY, max_samples=41)
    assert collectives.measure(HOST, grid, "float32").noise.outliers == 2 * 20


def test_no_time_left_means_the_fewest_samples(scripted):
    scripted.wobble = {3: 150.0}
    grid = dataclasses.replace(STEADY, budget_s=0)
    found = collectives.measure(HOST, grid, "float32")
    assert {len(one.samples_us) for one in found.collectives} == {6}


def test_cells_take_turns_in_an_order_drawn_from_the_seed(scripted):
    def turns(seed):
        scripted.turns.clear()
        collectives.measure(HOST, STEADY, "float32", seed=seed)
        return list(scripted.turns)

    first = turns(0)
    rounds = [first[i : i + 8] for i in range(0, len(first), 8)]
    assert all(sorted(turn) == list(range(1, 9)) for turn in rounds)
    assert len({tuple(turn) for turn in rounds}) > 1
    assert turns(0) == first
    assert turns(1) != first
