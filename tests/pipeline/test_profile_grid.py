"""Which cells a profile has, and what it refuses before a device is touched."""

import dataclasses

import pytest

from drafters.mesh import Topology
from drafters.shapes import TransformerShape
from pipeline.core.errors import UserError
from pipeline.profile_grid import CompileGrid, Grid, Model, Plan
from pipeline.stopwatch import Sampling

HOST_16 = Topology(name="host_16", platform="cpu", axes=("x", "y", "z"), sizes=(2, 2, 4))
SHAPE = TransformerShape(
    vocab_size=64,
    num_layers=6,
    width=32,
    num_heads=16,
    num_kv_heads=16,
    head_dim=2,
    mlp_width=64,
    context=512,
)
TARGET = Model(name="target", shape=SHAPE)
SMALL = Model(name="small", shape=dataclasses.replace(SHAPE, num_layers=1))
SHORT = Model(name="short", shape=dataclasses.replace(SHAPE, context=64))
OTHER = Model(name="other", shape=dataclasses.replace(SHAPE, num_layers=2))


def plan(topology=HOST_16, lookup=False, drafters=(SMALL, OTHER), **grid):
    return Plan(
        grid=Grid(**grid), topology=topology, target=TARGET, drafters=drafters, lookup=lookup
    )


def keys(cells):
    return [cell.key for cell in cells]


def test_every_cell_has_a_name_of_its_own():
    full = plan(
        lookup=True, chips_per_copy=(1, 4), batches=(1, 2), contexts=(64, 128), rules=("token", "block")
    )  # fmt: skip
    named = keys([*full.target_steps(), *full.other_steps(), *full.all_rounds()])
    assert len(set(named)) == len(named)


def test_the_target_is_seen_at_two_depths_with_and_without_collectives():
    cells = plan(tokens=(1, 2), prompts=(), layer_tokens=(1, 2)).target_steps()
    seen = {(cell.shape.num_layers, cell.tokens, cell.apart) for cell in cells}
    assert seen == {(layers, t, apart) for layers in (6, 2) for t in (1, 2) for apart in (0, 1)}


def test_what_is_compared_is_sampled_together():
    """Cells are sampled in turns, ten or more at a time, in this order."""
    many = plan(tokens=tuple(range(1, 17)), contexts=(64, 256), batches=(1, 2), layer_tokens=(1, 9))
    target = [(c.tokens, c.shape.num_layers, c.apart) for c in many.target_steps()]
    for tokens in (1, 9):
        first = target.index((tokens, 6, False))
        assert target[first + 1 : first + 4] == [
            (tokens, 2, False), (tokens, 6, True), (tokens, 2, True),
        ]  # fmt: skip
    models = [cell.model for cell in many.other_steps()]
    assert models == sorted(models, key=["small", "other"].index)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompts": (513,)}, r"Grid.prompts = \(513,\) exceed the context of target, 512"),
        ({"drafters": (SHORT,)}, r"Grid.contexts = \(256,\) with 2 new tokens exceed .* short, 64"),
        ({"shallow": 6}, "Grid.shallow = 6 must be fewer layers than target's 6"),
    ],
)
def test_what_the_models_cannot_do_is_refused(changes, message):
    with pytest.raises(UserError, match=message):
        plan(**changes)


@pytest.mark.parametrize(
    "wrong", [{"shallow": -1}, {"temperature": -1.0}, {"top_p": 7.0}, {"tokens": (1, 4, 4)}]
)
def test_grids_that_make_no_sense(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Grid(**wrong)


def test_one_chip_has_no_collectives_to_remove_and_nobody_to_lead():
    alone = plan(topology=Topology(name="host_1", platform="cpu"))
    cells = [*alone.target_steps(), *alone.other_steps()]
    assert not any(cell.apart for cell in cells)
    assert {(cell.seat.placement, cell.seat.chips) for cell in cells} == {("sharded", 1)}


def test_drafters_are_tried_in_every_place():
    tried = plan(chips_per_copy=(1, 2, 4, 8, 16)).seats
    assert [str(seat) for seat in tried] == [
        "sharded 16", "copies 1", "copies 2", "copies 4", "copies 8", "leader",
    ]  # fmt: skip


def test_rounds_of_other_k_and_other_drafters_are_predicted():
    some = plan(drafts=(1, 2, 3), timed_drafts=(1, 3), timed_drafters=("small",), lookup=True)
    timed = {(cell.drafter, cell.k) for cell in some.rounds()}
    assert timed == {("", 0), *((name, k) for name in ("small", "ngram") for k in (1, 3))}
    assert {(cell.drafter, cell.k) for cell in some.all_rounds()} == {
        ("", 0), *((name, k) for name in ("small", "other", "ngram") for k in (1, 2, 3)),
    }  # fmt: skip
    assert set(keys(some.rounds())) <= set(keys(some.all_rounds()))


def test_all_caches_of_a_context_have_one_capacity():
    cells = plan(tokens=(1, 8), prompts=()).target_steps()
    (capacity,) = {cell.capacity for cell in [*cells, *plan(prompts=()).all_rounds()]}
    assert capacity >= 256 + 8 * 8


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"tokens": (2, 4)}, "must hold 1"),
        ({"tokens": ()}, "must not be empty"),
        ({"contexts": (0,)}, "must all be positive"),
        ({"timed_drafts": (9,)}, "timed_drafts holds 9"),
        ({"layer_tokens": (3,)}, "layer_tokens holds 3"),
    ],
)
def test_settings_are_checked(wrong, message):
    with pytest.raises(ValueError, match=message):
        Grid(**wrong)
    with pytest.raises(ValueError, match="positive"):
        CompileGrid(tokens=(0,))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"contexts": (510,)}, "exceed the context of target, 512"),
        ({"chips_per_copy": (3,)}, "no axes with 3 chips"),
        ({"timed_drafters": ("smal",)}, "timed_drafters names 'smal'"),
        ({"drafters": (SMALL, SMALL)}, "two models named 'small'"),
    ],
)
def test_what_does_not_fit_the_models_or_the_mesh_is_refused(wrong, message):
    with pytest.raises(UserError, match=message):
        plan(**wrong)


def test_sampling_is_part_of_the_grid():
    assert Grid(sampling=Sampling(samples=3)).sampling.samples == 3


@pytest.mark.parametrize("count", [1, 3, 9])
def test_what_is_interpolated_lies_between_two_that_are_compiled(count):
    with pytest.raises(ValueError, match=f"interpolated has {count}"):
        CompileGrid(tokens=(1, 2, 4, 9), interpolated=(count,))
    assert CompileGrid(tokens=(1, 2, 4, 9), interpolated=(2, 4)).interpolated == (2, 4)
