"""One step of training as pure functions on explicit state, and how it lies on a mesh.

Axes: A parts of an accumulated batch, B rows, T positions, D width, V vocabulary. A batch is a dict of
global arrays `[B, T]`: `tokens`, `targets`, `segments`, `positions` (i32), `weights` (f32), and with a cached
teacher `teacher_ids` i32 and `teacher_log_probs` f32 `[B, T, k]`. Rows are divided over the mesh axes that
the model is not sharded over; gradients are then summed over them by the compiler.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from drafters.shapes import TransformerShape
from drafters.sharding import Placement
from drafters.transformer import Params, abstract_params, init_params, with_params
from pipeline.core.errors import UserError
from pipeline.objectives import CHUNK_BYTES, Metrics, Objective, TopK, objective_loss
from pipeline.training_settings import Execution, ModelSpec, Optimizer, Schedule

Batch = Mapping[str, jax.Array]

# What held-out text is measured with: the metrics are the same whatever was trained for.
_MEASURE = Objective(cross_entropy=1.0)


class TrainState(NamedTuple):
    """All that a step changes; the data position is `step`. Shardings and shapes stand in the same places."""

    step: Any  # i32[], steps done
    params: Any  # Params, f32
    optimizer: Any  # optax's, with moments in the places of the parameters


class StepMetrics(NamedTuple):
    """What a step tells; scalars."""

    means: Metrics
    gradient_norm: jax.Array  # before clipping
    learning_rate: jax.Array
    stop: jax.Array  # bool, some process was asked to stop


@dataclasses.dataclass(frozen=True, kw_only=True)
class Teacher:
    """The target as it runs inside another model's step; its parameters are an argument."""

    shape: TransformerShape
    execution: Execution = Execution(scan=False)

    @functools.partial(jax.jit, static_argnums=0)
    def logits(self, params: Params, batch: Batch) -> jax.Array:
        """f32[V, B, T], constants to whoever learns from them; compiled once for all who ask."""
        logits = _logits(self.shape, self.execution, params, batch)
        return jax.lax.stop_gradient(logits)


def _logits(
    shape: TransformerShape, execution: Execution, params: Params, batch: Batch
) -> jax.Array:
    model = with_params(shape, params, execution.scan, execution.keep)
    hidden = model.hidden(
        batch["tokens"], batch["segments"], batch["positions"], jnp.dtype(execution.dtype)
    )
    return model.logits(hidden)


def learning_rate(schedule: Schedule, steps: int) -> optax.Schedule:
    """The rate of each of `steps` steps."""
    rest, floor = steps - schedule.warmup_steps, schedule.final_fraction
    decays = {
        "cosine": lambda: optax.cosine_decay_schedule(schedule.peak, rest, alpha=floor),
        "linear": lambda: optax.linear_schedule(schedule.peak, schedule.peak * floor, rest),
        "constant": lambda: optax.constant_schedule(schedule.peak),
    }
    after = decays[schedule.decay]()
    if not schedule.warmup_steps:
        return after
    # Begins above zero: a first step of rate 0 would only cost time.
    start = schedule.peak / (schedule.warmup_steps + 1)
    warmup = optax.linear_schedule(start, schedule.peak, schedule.warmup_steps)
    return optax.join_schedules([warmup, after], [schedule.warmup_steps])


def make_optimizer(settings: Optimizer, steps: int) -> optax.GradientTransformation:
    """Clipping, then AdamW under the schedule."""
    clip = optax.clip_by_global_norm(settings.clip_norm) if settings.clip_norm else optax.identity()
    adamw = optax.adamw(
        learning_rate(settings.schedule, steps),
        b1=settings.beta1,
        b2=settings.beta2,
        eps=settings.epsilon,
        weight_decay=settings.weight_decay,
        mask=_decays,
    )
    return optax.chain(clip, adamw)


def _decays(params: Params) -> Any:
    """True for matrices: norms and biases are told by their names, for a scan adds an axis to both."""

    def of(path: tuple, leaf: Any) -> bool:
        del leaf
        name = path[-1].key
        return not (name.endswith(("norm", "bias")))

    return jax.tree_util.tree_map_with_path(of, params)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """One model's training on one mesh: builds its compiled functions and places its arrays.

    Attributes:
      spec: what to train.
      placement: the mesh, and the axes the model is sharded over; the others divide the batch.
      teacher: the target, if it runs in the step.
      draft_ids: sorted i32[n] ids that a trimmed head proposes.
    """

    spec: ModelSpec
    placement: Placement
    teacher: Teacher | None = None
    draft_ids: np.ndarray | None = None

    @property
    def data_axes(self) -> tuple[str, ...]:
        """Mesh axes that the rows of a batch are divided over."""
        return tuple(a for a in self.placement.mesh.axis_names if a not in self.placement.axes)

    @property
    def shards(self) -> int:
        """Ways in which the rows are divided."""
        return math.prod(self.placement.mesh.shape[axis] for axis in self.data_axes)

    @property
    def learns_from_cache(self) -> bool:
        """Whether the target's answers come with the batches."""
        return self.spec.teacher == "cache" and self.spec.objective.needs_teacher

    @property
    def learns_in_step(self) -> bool:
        """Whether the target runs in every step; it runs in evaluations wherever there is one."""
        objective = self.spec.objective
        return self.teacher is not None and objective.needs_teacher and not self.learns_from_cache

    @functools.cached_property
    def optimizer(self) -> optax.GradientTransformation:
        """Of this model."""
        return make_optimizer(self.spec.optimizer, self.spec.steps)

    def check(self) -> None:
        """Refuses a mesh that the model or the batch does not divide over.

        Raises:
          UserError: naming both numbers.
        """
        spec, chips = self.spec, self.placement.chips_per_copy
        layout = spec.shape.layout(chips)
        if not layout.shard_attention or layout.changes_heads or not layout.shard_mlp:
            raise UserError(
                f"{spec.name}: num_kv_heads = {spec.shape.num_kv_heads}, num_heads = "
                f"{spec.shape.num_heads} and mlp_width = {spec.shape.mlp_width} must be multiples of the "
                f"{chips} chips that the model is sharded over; choose other model_axes or another shape"
            )
        rows = spec.batch.rows // spec.batch.accumulate
        if rows % self.shards:
            raise UserError(
                f"{spec.name}: Batch.rows / accumulate = {rows} must be a multiple of the {self.shards} "
                "ways in which the mesh divides rows"
            )

    # ------------------------------------------------------------------------------- placing

    def batch_sharding(self) -> NamedSharding:
        """Of every array of a batch: rows divided, the rest whole."""
        return NamedSharding(self.placement.mesh, P(self.data_axes or None))

    def put(self, batch: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
        """This process's rows as a part of the global arrays."""
        sharding, rows = self.batch_sharding(), self.spec.batch.rows

        def array(local: np.ndarray) -> jax.Array:
            whole = (rows, *local.shape[1:])
            return jax.make_array_from_process_local_data(sharding, local, whole)

        return {name: array(local) for name, local in batch.items()}

    def put_flag(self, value: bool) -> jax.Array:
        """bool[shards], this process's parts being `value`."""
        flags = np.full(self.shards, value)
        return jax.make_array_from_callback(
            flags.shape, self.batch_sharding(), lambda index: flags[index]
        )

    def state_shardings(self) -> TrainState:
        """Shardings in the places of the state's arrays; moments lie where their parameters lie."""
        params = self.placement.param_shardings(self.spec.shape, self.spec.execution.scan)
        everywhere = self.placement.sharding()
        optimizer = optax.tree_utils.tree_map_params(
            self.optimizer,
            lambda _, sharding: sharding,
            jax.eval_shape(self.optimizer.init, self._trained(self._abstract_params())),
            self._trained(params),
            transform_non_params=lambda _: everywhere,
        )
        return TrainState(everywhere, params, optimizer)

    def abstract_state(self) -> TrainState:
        """ShapeDtypeStructs with shardings: what a saved state is restored to."""
        shapes = jax.eval_shape(self._begin, self._abstract_params())
        return jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            shapes,
            self.state_shardings(),
        )

    def initial_state(self, params: Params | None = None) -> TrainState:
        """The state before the first step, from `params` (host arrays) or random ones."""
        spec, shardings = self.spec, self.state_shardings()
        if params is None:
            params = init_params(
                spec.shape, spec.seed, scan=spec.execution.scan, shardings=shardings.params
            )
        else:
            params = place(params, shardings.params)
        return jax.jit(self._begin, out_shardings=shardings, donate_argnums=0)(params)

    def _abstract_params(self) -> Params:
        return abstract_params(self.spec.shape, scan=self.spec.execution.scan)

    def _begin(self, params: Params) -> TrainState:
        moments = self.optimizer.init(self._trained(params))
        return TrainState(jnp.zeros((), jnp.int32), params, moments)

    def _trained(self, params: Params) -> Params:
        """The parts that are not frozen: only they have gradients and moments."""
        return {name: part for name, part in params.items() if name not in self.spec.frozen}

    # ------------------------------------------------------------------------------- stepping

    def lower(
        self, state: TrainState, batch: Batch, stop: jax.Array, teacher: Params | None
    ) -> jax.stages.Lowered:
        """The step `(state, batch, stop, teacher) -> (state, StepMetrics)` for arrays like these.

        The state is donated. Compiled ahead, it cannot compile again: another shape is an error.
        """
        replicated = self.placement.sharding()
        step = jax.jit(
            self.step, donate_argnums=0, out_shardings=(self.state_shardings(), replicated)
        )
        return step.lower(state, batch, stop, teacher)

    def step(
        self, state: TrainState, batch: Batch, stop: jax.Array, teacher: Params | None
    ) -> tuple[TrainState, StepMetrics]:
        """One update from a batch; `stop` bool[processes] is passed on to all of them."""
        gradient, means = self._gradient(state.params, batch, teacher)
        trained = self._trained(state.params)
        updates, optimizer = self.optimizer.update(gradient, state.optimizer, trained)
        changed: Any = optax.apply_updates(trained, updates)
        params = {**state.params, **changed}
        metrics = StepMetrics(
            means=means,
            gradient_norm=optax.tree_utils.tree_norm(gradient),
            learning_rate=jnp.asarray(
                learning_rate(self.spec.optimizer.schedule, self.spec.steps)(state.step)
            ),
            stop=jnp.any(stop),
        )
        return TrainState(state.step + 1, params, optimizer), metrics

    def _gradient(
        self, params: Params, batch: Batch, teacher: Params | None
    ) -> tuple[Params, Metrics]:
        """Gradient of the weighted mean over the batch by the trained parts, and metrics."""
        trained = self._trained(params)

        def loss(trained: Params, batch: Batch, teacher: Params | None):
            return self._loss({**params, **trained}, batch, teacher)

        differentiate = jax.grad(loss, has_aux=True)
        if self.spec.batch.accumulate == 1:
            return differentiate(trained, batch, teacher)
        # Rows a, a + A, ...: each part is divided over the mesh as the whole batch is.
        parts = jax.tree.map(
            lambda x: jnp.moveaxis(x.reshape(-1, self.spec.batch.accumulate, *x.shape[1:]), 1, 0),
            dict(batch),
        )

        def add(total, part):
            gradient, means = differentiate(trained, part, teacher)
            weighed = jax.tree.map(lambda x: x * means.weight, (gradient, means))
            return jax.tree.map(jnp.add, total, weighed), means.weight

        zero = jax.eval_shape(differentiate, trained, jax.tree.map(lambda x: x[0], parts), teacher)
        zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), zero)
        total, weights = jax.lax.scan(add, zero, parts)
        weight = jnp.sum(weights)
        gradient, means = jax.tree.map(lambda x: x / jnp.where(weight > 0, weight, 1), total)
        return gradient, means._replace(weight=weight)

    def _loss(
        self, params: Params, batch: Batch, teacher: Params | None
    ) -> tuple[jax.Array, Metrics]:
        logits = _logits(self.spec.shape, self.spec.execution, params, batch)
        return self._compare(self.spec.objective, logits, batch, self.taught(batch, teacher))

    def taught(self, batch: Batch, teacher: Params | None) -> jax.Array | TopK | None:
        """What the target says about a batch."""
        if "teacher_ids" in batch:
            first = functools.partial(jnp.moveaxis, source=-1, destination=0)
            return TopK(first(batch["teacher_ids"]), first(batch["teacher_log_probs"]))
        if self.teacher is None or teacher is None:
            return None
        return self.teacher.logits(teacher, batch)

    def _compare(
        self,
        objective: Objective,
        logits: jax.Array,
        batch: Batch,
        teacher: jax.Array | TopK | None,
    ) -> tuple[jax.Array, Metrics]:
        ids = None if self.draft_ids is None else jnp.asarray(self.draft_ids)
        sharded_head = self.placement.chips_per_copy > 1
        return objective_loss(
            objective,
            logits,
            batch["targets"],
            batch["weights"],
            teacher,
            draft_ids=ids,
            shards=self.shards,
            chunk_bytes=0 if sharded_head else CHUNK_BYTES,
        )

    def answers(self, params: Params | None) -> Callable[[Batch], tuple[jax.Array, jax.Array]]:
        """The target's most probable tokens on a batch: i32[B, T, k] and log-probabilities f32."""
        teacher = self.teacher
        assert teacher is not None

        def top(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
            log_probs = jnp.moveaxis(jax.nn.log_softmax(logits, axis=0), 0, -1)
            values, ids = jax.lax.top_k(log_probs, self.spec.cached_tokens)
            return ids, values

        jitted = jax.jit(top, out_shardings=self.batch_sharding())
        return lambda batch: jitted(teacher.logits(params, batch))

    def measure(self, params: Params, batch: Batch, taught: jax.Array | TopK | None) -> Metrics:
        """Metrics on rows, against what the target says about them."""
        logits = _logits(self.spec.shape, self.spec.execution, params, batch)
        return self._compare(_MEASURE, logits, batch, taught)[1]

    def sampler(self, new_tokens: int) -> Callable[..., jax.Array]:
        """Continues rows i32[B, T] that hold `length` i32[B] tokens each, without a cache: for a look."""

        def sample(params: Params, tokens: jax.Array, length: jax.Array, key: jax.Array):
            rows = jnp.arange(tokens.shape[0])

            def append(i: jax.Array, carry: jax.Array) -> jax.Array:
                model = with_params(self.spec.shape, params, self.spec.execution.scan)
                last = model.hidden(carry)[:, rows, length + i - 1]
                drawn = jax.random.categorical(
                    jax.random.fold_in(key, i), model.logits(last) / _TEMPERATURE, axis=0
                )
                drawn = drawn if self.draft_ids is None else jnp.asarray(self.draft_ids)[drawn]
                return carry.at[rows, length + i].set(drawn.astype(carry.dtype))

            return jax.lax.fori_loop(0, new_tokens, append, tokens)

        return jax.jit(sample, out_shardings=self.placement.sharding())

    # ------------------------------------------------------------------------------- costs

    def flops_per_step(self) -> float:
        """Model flops of one step: forward and backward (twice the forward), and the teacher's forward.

        Attention counts all T keys of a row, as is usual (Chowdhery et al. 2204.02311, appendix B);
        recomputed activations do not count.
        """
        batch = self.spec.batch
        per_token = 3 * self.spec.shape.flops_per_token(batch.length)
        if self.teacher is not None and self.learns_in_step:
            per_token += self.teacher.shape.flops_per_token(batch.length)
        return float(per_token) * batch.tokens


_TEMPERATURE = 0.8


def place(tree: Any, shardings: Any) -> Any:
    """Host arrays that every process holds whole, as global arrays."""

    def put(leaf: Any, sharding: NamedSharding) -> jax.Array:
        host = np.asarray(leaf)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    return jax.tree.map(put, tree, shardings)


def gather(tree: Any, placement: Placement) -> Any:
    """Global arrays as host arrays that every process holds whole."""
    whole = jax.jit(lambda x: x, out_shardings=placement.sharding())(tree)
    return jax.tree.map(lambda leaf: np.asarray(leaf.addressable_data(0)), whole)


def activation_bytes(shape: TransformerShape, execution: Execution, rows: int, length: int) -> int:
    """Bytes that the backward pass finds kept of the forward pass over `rows` rows of `length` tokens.

    Of one layer: its input, both norms' outputs, queries, keys and values before and after rotation, the
    mixed values, gate and up projections and their product. What `Execution.keep` leaves out is there for one
    layer at a time, as are the scores, their weights and their gradient. Then the final norm, the logits and
    their gradient (fp32).
    """
    size = 2 if execution.dtype == "bfloat16" else 4
    heads, head, width = shape.num_heads, shape.head_dim, shape.width
    projected = (heads + 2 * shape.num_kv_heads) * head
    everything = 3 * width + 2 * projected + heads * head + 4 * shape.mlp_width
    kept = {
        "everything": everything,
        "products": 3 * width + projected + heads * head + 2 * shape.mlp_width,
        "inputs": width,
    }[execution.keep if execution.scan else "everything"]
    once = (0 if kept == everything else everything) * size + 3 * heads * length * 4
    layers = shape.num_layers * kept * size + once
    return rows * length * (layers + width * size + 2 * shape.logits_size * 4)


def expected_bytes(spec: ModelSpec) -> int:
    """Memory of a step from the shape: weights, gradients, both of Adam's moments, and activations."""
    rows = spec.batch.rows // spec.batch.accumulate
    activations = activation_bytes(spec.shape, spec.execution, rows, spec.batch.length)
    return 4 * spec.shape.weight_bytes("float32") + activations


def compiled_bytes(compiled: jax.stages.Compiled) -> int:
    """Memory of a compiled step on each device: arguments, temporaries, results that are not donated."""
    memory = compiled.memory_analysis()
    assert memory is not None
    return (
        memory.argument_size_in_bytes
        + memory.temp_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
    )


class Evaluator:
    """A job's metrics on held-out rows, against the target's own logits where there is one."""

    def __init__(self, job: Job):
        self._job = job
        self._program = jax.jit(job.measure, out_shardings=job.placement.sharding())

    def __call__(self, params: Params, batch: Batch, teacher: Params | None) -> Metrics:
        """Of one batch."""
        return self._program(params, batch, self._job.taught(batch, teacher))

    def lower(self, params: Params, batch: Batch, teacher: Params | None) -> jax.stages.Lowered:
        """The program that a call of arrays like these runs."""
        return self._program.lower(params, batch, self._job.taught(batch, teacher))
