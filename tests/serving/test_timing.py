"""What is timed: the same work at every call, in one program; and a step without its collectives."""

import dataclasses

import jax
import numpy as np
import pytest

from drafters.lookup_first import LookupFirst
from drafters.mesh import Topology
from drafters.ngram import Ngram
from drafters.shapes import TransformerShape
from drafters.sharding import Placement
from pipeline import hlo
from pipeline.work import chip_shape
from serving import speculation, timing
from serving.passes import Seated
from serving.plan import Choice
from serving.sampling import SamplingParams
from serving.untrained import random_pair, seated

HOST_16 = Topology(name="host_16", platform="cpu", axes=("x", "y"), sizes=(4, 4))
HOST_1 = Topology(name="host_1", platform="cpu")
SHAPE = TransformerShape(
    vocab_size=64,
    num_layers=2,
    width=32,
    num_heads=16,
    num_kv_heads=4,
    head_dim=4,
    mlp_width=64,
    context=256,
)
SMALL = dataclasses.replace(SHAPE, num_layers=1)
SETTING = timing.Setting(context=20, capacity=128)

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.mark.parametrize("drafter", [SMALL, None], ids=["model", "lookup"])
def test_every_call_plays_the_same_rounds_in_one_program(drafter):
    pair = random_pair(HOST_1, SHAPE, drafter, Choice(drafter="d", k=2))
    part = timing.playing(pair, SETTING)
    lengths = [np.asarray(part.run(3)) for _ in range(2)]
    np.testing.assert_array_equal(*lengths)
    assert 20 + 3 <= lengths[0][0] <= 20 + 3 * 3
    assert part._program._cache_size() == 1
    # Whatever one call can repeat fits into the caches.
    assert 20 + part.most * 3 + pair.engine.slack <= 128
    assert np.asarray(part.run(part.most))[0] <= 128 - pair.engine.slack


def test_a_model_behind_a_lookup_is_timed_drafting():
    """Blank text repeats itself: it would be copied."""
    pair = random_pair(HOST_1, SHAPE, SMALL, Choice(drafter="d", k=2))
    drafter = LookupFirst(Ngram(SHAPE.vocab_size), pair.engine.drafter).for_drafts(2)
    behind = pair._replace(engine=dataclasses.replace(pair.engine, drafter=drafter))
    for part in (timing.playing, timing.proposing):
        alone, both = (np.asarray(part(one, SETTING).run(3)) for one in (pair, behind))
        np.testing.assert_array_equal(alone, both)


def test_rounds_of_a_lookup_are_timed_with_drafts():
    pair = random_pair(HOST_1, SHAPE, None, Choice(drafter="d", k=2))
    assert pair.engine.may_pass
    played, play = [], speculation.play_round
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            speculation,
            "play_round",
            lambda engine, *rest: played.append(engine) or play(engine, *rest),
        )
        timing.playing(pair, SETTING).lower()
    assert [engine.may_pass for engine in played] == [False]


def test_nothing_is_compiled_for_the_rows_to_begin_with():
    pair = random_pair(HOST_16, SHAPE, SMALL, Choice(drafter="d", k=2, chips_per_copy=4))
    with jax.log_compiles(False), pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.stages.Lowered, "compile", lambda self: pytest.fail("compiled"))
        _, state = timing.started(pair.engine, SETTING, 128)
    assert state.progress.length[0] == state.target.length[0] == 20
    assert state.private.drafter.committed[0] == 20
    assert state.private.drafter.cache.k[0].sharding.spec[1] == "y"


def test_a_step_apart_does_the_same_arithmetic_and_has_no_collectives():
    whole = seated(HOST_16, SHAPE)
    share = chip_shape(SHAPE, 16)
    mesh = HOST_16.mesh()
    apart = Seated(shape=share, placement=Placement(mesh, mesh.axis_names), seat="apart")
    programs = [
        model.passes(model.params(), batch=1, tokens=4, context=20, capacity=128).lower().compile()
        for model in (whole, apart)
    ]
    counts = [hlo.read(program.as_text()).collectives for program in programs]
    assert dict(counts[0]) == {"all-reduce": 2 * 2 + 1, "all-gather": 1}
    assert not counts[1]
    flops = [program.cost_analysis()["flops"] for program in programs]
    assert flops[1] == pytest.approx(flops[0], rel=0.1)


def test_a_leaders_step_tells_the_others_once():
    led = dataclasses.replace(seated(HOST_16, SMALL, 1), seat="leader")
    part = led.passes(led.params(), batch=1, tokens=1, context=20, capacity=128)
    assert dict(hlo.read(part.lower().compile().as_text()).collectives) == {"all-reduce": 1}
    np.testing.assert_array_equal(part.run(2), part.run(5))


@pytest.mark.parametrize(
    ("chips", "leader", "expected"),
    [
        (16, False, {"all-reduce": 5 + 3 * 3, "all-gather": 1 + 3}),
        (4, False, {"all-reduce": 5 + 3 * 3, "all-gather": 1 + 3}),
        (0, True, {"all-reduce": 5 + 1, "all-gather": 1}),
    ],
    ids=["sharded", "copies", "leader"],
)
def test_a_round_has_the_collectives_of_its_passes_and_no_more(chips, leader, expected):
    """Warps and draws have none, wherever the drafter is: they begin with whole logits."""
    choice = Choice(drafter="d", k=3, chips_per_copy=chips, leader=leader)
    pair = random_pair(HOST_16, SHAPE, SMALL, choice)
    setting = dataclasses.replace(SETTING, params=SamplingParams(temperature=0.8, top_p=0.9))
    program = timing.playing(pair, setting).lower().compile()
    assert dict(hlo.read(program.as_text()).collectives) == expected


def test_random_weights_lie_where_trained_ones_would():
    params = seated(HOST_16, SHAPE, 4).params()
    qkv = params["layers"]["0"]["attention"]["qkv"]
    assert qkv.sharding.spec[0] == "y"
    assert float(np.asarray(params["norm"]).min()) == 1
    assert np.std(np.asarray(qkv)) == pytest.approx(SHAPE.width**-0.5, rel=0.2)
