"""The training step: gradients, accumulation, meshes, and what it costs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from drafters.mesh import Topology
from drafters.shapes import TransformerShape
from drafters.sharding import Placement
from drafters.transformer import init_params
from pipeline.core.errors import UserError
from pipeline.objectives import Objective
from pipeline.training_settings import Batch, Execution, ModelSpec, Optimizer, Schedule
from pipeline.training_step import (
    Evaluator,
    Job,
    Teacher,
    compiled_bytes,
    expected_bytes,
    gather,
    learning_rate,
    place,
)
from tests.pipeline.synthetic import VOCAB, SyntheticText

SHAPE = TransformerShape(
    vocab_size=VOCAB,
    num_layers=2,
    width=32,
    num_heads=4,
    num_kv_heads=4,
    head_dim=8,
    mlp_width=64,
    context=64,
)
ROWS = Batch(rows=8, length=32)
SPEC = ModelSpec(name="small", shape=SHAPE, steps=10, batch=ROWS)


def placement(data: int = 1, model: int = 1) -> Placement:
    devices = np.array(jax.devices()[: data * model]).reshape(data, model)
    mesh = Mesh(devices, ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    return Placement(mesh, ("model",) if model > 1 else ())


def put(job: Job, step: int = 0) -> dict[str, jax.Array]:
    rows = SyntheticText().rows(job.spec.batch, step)
    return {name: jax.device_put(array, job.batch_sharding()) for name, array in rows.items()}


def train(job: Job, steps: int = 3, teacher=None):
    """Parameters after some steps, and the metrics of the last."""
    state = job.initial_state()
    stop = jax.device_put(np.zeros(job.shards, bool), job.batch_sharding())
    compiled = job.lower(state, put(job), stop, teacher).compile()
    metrics = None
    for step in range(steps):
        state, metrics = compiled(state, put(job, step), stop, teacher)
    return gather(state.params, job.placement), jax.device_get(metrics)


def largest_difference(a, b) -> float:
    return max(jax.tree.leaves(jax.tree.map(lambda x, y: float(np.abs(x - y).max()), a, b)))


@pytest.fixture(scope="module")
def single():
    return train(Job(spec=SPEC, placement=placement()))


# Sums over rows and heads are ordered differently, and Adam divides by small second moments.
TOLERANCE = 2e-5


@pytest.mark.parametrize(("data", "model"), [(4, 1), (2, 4)])
def test_a_mesh_learns_what_one_device_learns(single, data, model):
    params, metrics = train(Job(spec=SPEC, placement=placement(data, model)))
    assert largest_difference(params, single[0]) < TOLERANCE
    np.testing.assert_allclose(metrics.means.loss, single[1].means.loss, rtol=1e-5)


def test_accumulation_gives_the_gradient_of_the_whole_batch(single):
    """Parts weigh by their positions, which differ: an average of averages would be off by far more."""
    spec = dataclasses.replace(SPEC, batch=dataclasses.replace(ROWS, accumulate=4))
    params, metrics = train(Job(spec=spec, placement=placement(2)))
    assert largest_difference(params, single[0]) < TOLERANCE
    np.testing.assert_allclose(
        metrics.means.cross_entropy, single[1].means.cross_entropy, rtol=1e-5
    )
    np.testing.assert_allclose(metrics.means.weight, single[1].means.weight)


@pytest.mark.parametrize("keep", ["everything", "inputs"])
def test_what_is_kept_for_the_backward_pass_changes_nothing(single, keep):
    spec = dataclasses.replace(SPEC, execution=Execution(keep=keep))
    params, _ = train(Job(spec=spec, placement=placement()))
    assert largest_difference(params, single[0]) < TOLERANCE


def test_a_model_with_its_teachers_weights_overlaps_exactly():
    shape = SHAPE
    spec = dataclasses.replace(SPEC, objective=Objective(forward_kl=1.0))
    execution = Execution(scan=True)
    job = Job(spec=spec, placement=placement(), teacher=Teacher(shape=shape, execution=execution))
    params = init_params(shape, spec.seed, scan=True)
    metrics = Evaluator(job)(params, put(job), params)
    assert float(metrics.overlap) == 1.0
    assert float(metrics.agreement) == 1.0


def test_frozen_parts_stay_and_cost_no_moments():
    spec = dataclasses.replace(
        SPEC, shape=dataclasses.replace(SHAPE, tied_head=False), init="target", layers=(0, 1)
    )
    jobs = [
        Job(spec=dataclasses.replace(spec, frozen=frozen), placement=placement())
        for frozen in ((), ("embedding", "norm"))
    ]
    before = jax.tree.map(np.asarray, init_params(spec.shape, spec.seed, scan=True))
    (free, _), (held, _) = (train(job) for job in jobs)
    for name in before:
        assert largest_difference(free[name], before[name]) > 0
        moved = largest_difference(held[name], before[name]) > 0
        assert moved == (name not in ("embedding", "norm"))
    sizes = [
        sum(leaf.size for leaf in jax.tree.leaves(job.abstract_state().optimizer)) for job in jobs
    ]
    saved = 2 * sum(before[name].size for name in ("embedding", "norm"))
    assert sizes[0] - sizes[1] == saved


def test_random_weights_are_not_frozen():
    with pytest.raises(ValueError, match="would keep random weights"):
        dataclasses.replace(SPEC, frozen=("embedding",))


def test_all_ids_as_a_draft_vocabulary_change_nothing():
    whole = dataclasses.replace(SHAPE, tied_head=False)
    trimmed = dataclasses.replace(whole, head_vocab=VOCAB)
    ids = np.arange(VOCAB, dtype=np.int32)
    results = [
        train(
            Job(
                spec=dataclasses.replace(SPEC, shape=shape),
                placement=placement(),
                draft_ids=draft_ids,
            )
        )
        for shape, draft_ids in ((whole, None), (trimmed, ids))
    ]
    assert largest_difference(results[0][0], results[1][0]) == 0.0


def test_a_document_does_not_see_its_neighbour():
    job = Job(spec=SPEC, placement=placement())
    params = init_params(SHAPE, 0, scan=True)
    batch = dict(SyntheticText().rows(ROWS, 0))
    second = batch["segments"] == 2
    batch["weights"] = np.where(second, batch["weights"], 0).astype(np.float32)
    evaluate = Evaluator(job)
    before = evaluate(params, batch, None).cross_entropy
    changed = {**batch, "tokens": np.where(second, batch["tokens"], 7).astype(np.int32)}
    assert float(evaluate(params, changed, None).cross_entropy) == float(before)
    joined = {**changed, "segments": np.ones_like(batch["segments"])}
    assert float(evaluate(params, joined, None).cross_entropy) != float(before)


@pytest.mark.parametrize("keep", ["everything", "products", "inputs"])
def test_memory_is_what_the_shape_says(keep):
    shape = dataclasses.replace(
        SHAPE, num_layers=6, width=64, num_heads=8, num_kv_heads=8, mlp_width=192
    )
    spec = dataclasses.replace(
        SPEC, shape=shape, batch=Batch(rows=16, length=64), execution=Execution(keep=keep)
    )
    job = Job(spec=spec, placement=placement())
    state = job.abstract_state()
    stop = jax.ShapeDtypeStruct((1,), bool)
    batch = {
        name: jax.ShapeDtypeStruct(array.shape, array.dtype)
        for name, array in SyntheticText().rows(spec.batch, 0).items()
    }
    compiled = job.lower(state, batch, stop, None).compile()
    ratio = compiled_bytes(compiled) / expected_bytes(spec)
    assert 1 / 1.5 < ratio < 1.5


def test_moments_lie_where_their_parameters_lie():
    job = Job(spec=SPEC, placement=placement(2, 4))
    state = job.initial_state()
    shardings = job.state_shardings()
    assert jax.tree.map(lambda x: x.sharding, state) == shardings
    moments = shardings.optimizer[1][0].mu
    assert moments == shardings.params
    assert moments["layers"]["mlp"]["down"].spec[2] == "model"


def test_heads_that_do_not_divide_are_refused():
    shape = dataclasses.replace(SHAPE, num_heads=3, num_kv_heads=3)
    with pytest.raises(UserError, match=r"num_kv_heads = 3.*multiples of the 4 chips"):
        Job(spec=dataclasses.replace(SPEC, shape=shape), placement=placement(1, 4)).check()


def test_rows_that_do_not_divide_are_refused():
    spec = dataclasses.replace(SPEC, batch=Batch(rows=6, length=32))
    with pytest.raises(UserError, match="= 6 must be a multiple of the 4"):
        Job(spec=spec, placement=placement(4)).check()


def test_the_learning_rate_rises_and_falls():
    schedule = Schedule(peak=1.0, warmup_steps=4, decay="linear", final_fraction=0.0)
    rates = [float(learning_rate(schedule, 8)(step)) for step in range(8)]
    np.testing.assert_allclose(rates, [0.2, 0.4, 0.6, 0.8, 1.0, 0.75, 0.5, 0.25], atol=1e-6)


def test_only_matrices_decay():
    optimizer = Optimizer(weight_decay=0.5, schedule=Schedule(peak=0.1, decay="constant"))
    job = Job(spec=dataclasses.replace(SPEC, optimizer=optimizer), placement=placement())
    params = init_params(SHAPE, 0, scan=True)
    zero = jax.tree.map(jnp.zeros_like, params)
    updates, _ = job.optimizer.update(zero, job.optimizer.init(params), params)
    assert float(jnp.abs(updates["layers"]["mlp_norm"]).max()) == 0.0
    assert float(jnp.abs(updates["norm"]).max()) == 0.0
    np.testing.assert_allclose(updates["embedding"], -0.05 * params["embedding"], rtol=1e-6)


def test_host_arrays_survive_the_mesh():
    job = Job(spec=SPEC, placement=placement(2, 4))
    params = jax.tree.map(np.asarray, init_params(SHAPE, 0, scan=True))
    there = place(params, job.state_shardings().params)
    assert largest_difference(gather(there, job.placement), params) == 0.0


def test_a_topology_gives_the_mesh():
    topology = Topology(name="t", platform="cpu", axes=("data", "model"), sizes=(2, 4))
    job = Job(spec=SPEC, placement=Placement(topology.mesh(), ("model",)))
    assert (job.data_axes, job.shards) == (("data",), 2)
