"""Models on 16 host devices: the same logits, the collectives of the formula, the same checkpoints."""

import dataclasses
import functools
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from drafters import kv_cache
from drafters.checkpoints import restore_params, save_params
from drafters.mesh import Topology, by_coordinates
from drafters.shapes import TransformerShape
from drafters.transformer import abstract_params, with_params
from pipeline.core.errors import UserError
from tests.drafters.random_params import random_params

MODEL_TOLERANCE = 1e-4  # fp32, whole models
MESH = Topology(name="host_16", platform="cpu", axes=("x", "y", "z"), sizes=(2, 2, 4))
# Query heads that do not divide, as SmolLM2's nine.
NINE = TransformerShape(
    vocab_size=96, num_layers=2, width=64, num_heads=9, num_kv_heads=3, head_dim=8, mlp_width=96
)
SHAPES = {
    # Key/value heads fewer than chips, biases, its own head.
    "grouped": TransformerShape(
        vocab_size=96,
        num_layers=3,
        width=64,
        num_heads=16,
        num_kv_heads=2,
        head_dim=8,
        mlp_width=96,
        qkv_bias=True,
        output_bias=True,
        tied_head=False,
    ),
    "nine heads": NINE,
    # Groups whose copies share unequally, with norms and biases of heads, as Qwen's fourteen.
    "fourteen heads": dataclasses.replace(
        NINE, num_heads=14, num_kv_heads=2, qkv_bias=True, qk_norm=True
    ),
    # Nothing divides but the heads.
    "odd": TransformerShape(
        vocab_size=97,
        num_layers=1,
        width=64,
        num_heads=16,
        num_kv_heads=16,
        head_dim=4,
        mlp_width=50,
    ),
}
TOKENS = np.random.default_rng(0).integers(0, 96, (2, 6), np.int32)


@functools.cache
def params_for(name):
    return random_params(SHAPES[name], seed=2)


@functools.cache
def reference(name):
    run = jax.jit(lambda params: with_params(SHAPES[name], params)(TOKENS))
    return np.asarray(run(params_for(name)))


def compiled_step(shape, placement, params):
    served = placement.served_shape(shape)

    def step(params, tokens, cache):
        model = with_params(served, params)
        x, cache = model.step(tokens, cache)
        logits = jnp.moveaxis(model.logits(x), 0, -1)
        return jax.lax.with_sharding_constraint(logits, placement.sharding()), cache

    cache = kv_cache.empty(served, 2, 16, jnp.float32)
    cache = jax.device_put(cache, placement.cache_shardings(served))
    return jax.jit(step).lower(params, TOKENS, cache).compile(), cache


@pytest.mark.parametrize("chips", [4, 16])
@pytest.mark.parametrize("name", SHAPES)
def test_logits_and_collectives_of_a_sharded_step(name, chips):
    shape, placement = SHAPES[name], MESH.placement(chips)
    params = placement.put(shape, params_for(name))
    step, cache = compiled_step(shape, placement, params)
    found = Counter(
        re.findall(r"= \S+ (all-[\w-]+|reduce-scatter|collective-[\w-]+)\(", step.as_text())
    )
    expected = shape.collectives(chips)
    assert found["all-reduce"] == expected.layers + expected.embedding
    assert found["all-gather"] == expected.logits
    assert sum(found.values()) == sum(expected)
    logits, _ = step(params, TOKENS, cache)
    np.testing.assert_allclose(logits, reference(name), atol=MODEL_TOLERANCE)


@pytest.mark.parametrize("name", ["grouped", "nine heads", "fourteen heads"])
def test_checkpoints_restore_onto_any_mesh(name, tmp_path):
    """Saved from one device; read onto 1, 2 x 4 and 16; saved from 16, read onto one."""
    shape = SHAPES[name]
    save_params(tmp_path / "one", params_for(name))
    two_by_four = Topology(name="8", platform="cpu", axes=("data", "model"), sizes=(2, 4))
    for placement in (two_by_four.placement(4), MESH.placement(16)):
        stored = restore_params(tmp_path / "one", placement.reading_params(shape, jnp.float32))
        jax.tree.map(np.testing.assert_array_equal, stored, params_for(name))
        served = placement.put(shape, stored)
        specs = placement.param_shardings(placement.served_shape(shape))
        assert jax.tree.map(lambda leaf: leaf.sharding, served) == specs
    save_params(tmp_path / "sixteen", stored)
    back = restore_params(tmp_path / "sixteen", abstract_params(shape))
    jax.tree.map(np.testing.assert_array_equal, back, params_for(name))


def test_a_copy_can_take_any_axes_of_the_mesh():
    assert MESH.copy_sizes() == [1, 2, 4, 8, 16]
    assert MESH.axes_of(1) == ()
    assert MESH.axes_of(4) == ("z",)
    assert MESH.axes_of(8) == ("y", "z")
    assert MESH.axes_of(16) == ("x", "y", "z")
    with pytest.raises(UserError, match="3 chips"):
        MESH.axes_of(3)


def test_more_chips_than_devices_says_how_to_get_them():
    wide = dataclasses.replace(MESH, sizes=(2, 2, 8))
    with pytest.raises(UserError, match="xla_force_host_platform_device_count=32"):
        wide.mesh()


def test_an_accelerator_that_is_not_there_is_said_so():
    absent = Topology(name="tpu_4", platform="tpu", axes=("x",), sizes=(4,))
    with pytest.raises(UserError, match="tpu_4 needs 4 tpu devices, and JAX finds none here"):
        absent.mesh()


def test_devices_of_another_kind_are_refused():
    with pytest.raises(UserError, match="TPU v4"):
        dataclasses.replace(MESH, device_kind="TPU v4").mesh()


def test_peaks_need_a_source():
    with pytest.raises(ValueError, match="source"):
        dataclasses.replace(MESH, hbm_bytes_per_s=1e12)


@dataclasses.dataclass(frozen=True)
class Chip:
    coords: tuple[int, int, int]
    core_on_chip: int = 0


def test_mesh_axes_follow_the_machines():
    places = [(x, y, z) for z in range(4) for y in range(2) for x in range(2)]
    arranged = by_coordinates([Chip((x + 2, y, z)) for x, y, z in places], (2, 2, 4))
    assert arranged is not None
    assert all(arranged[x, y, z].coords == (x + 2, y, z) for x, y, z in places)
    assert by_coordinates([Chip(place) for place in places], (4, 4)) is None


def test_two_cores_of_a_chip_are_an_axis():
    chips = [Chip((x, y, 0), core) for core in (1, 0) for x in range(2) for y in range(2)]
    arranged = by_coordinates(chips, (2, 2, 1, 2))
    assert arranged is not None
    assert arranged[1, 0, 0, 1] == Chip((1, 0, 0), 1)
