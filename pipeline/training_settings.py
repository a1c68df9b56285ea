"""What a training config may say: models, optimisers, batches, checkpoints and what is watched.

Every length is in steps, never in seconds: a run that was killed and started again ends with the weights of
one that was not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from drafters.shapes import TransformerShape
from pipeline.objectives import Objective
from serving.pair import model_of


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The learning rate over the steps: a linear warm-up to `peak`, then a decay to `peak * final_fraction`.

    Attributes:
      peak: the largest rate.
      warmup_steps: steps of the warm-up.
      decay: how it falls until the last step; "constant" does not.
      final_fraction: of the peak, at the last step.
    """

    peak: float = 1e-3
    warmup_steps: int = 0
    decay: Literal["cosine", "linear", "constant"] = "cosine"
    final_fraction: float = 0.1

    def __post_init__(self):
        _require(self.peak > 0, f"Schedule.peak must be above 0, not {self.peak}")
        _require(
            self.warmup_steps >= 0,
            f"Schedule.warmup_steps must be at least 0, not {self.warmup_steps}",
        )
        _require(
            0 <= self.final_fraction <= 1,
            f"Schedule.final_fraction must lie in 0..1, not {self.final_fraction}",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """AdamW (Loshchilov and Hutter 1711.05101) after clipping gradients by their global norm.

    Attributes:
      schedule: the learning rate.
      beta1, beta2, epsilon: Adam's.
      weight_decay: of matrices; norms and biases do not decay.
      clip_norm: largest global gradient norm, 0 for no clipping.
    """

    schedule: Schedule = Schedule()
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0

    def __post_init__(self):
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            _require(0 <= value < 1, f"Optimizer.{name} must lie in 0..1 below 1, not {value}")
        for name in ("epsilon", "weight_decay", "clip_norm"):
            value = getattr(self, name)
            _require(value >= 0, f"Optimizer.{name} must be at least 0, not {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What one step learns from: `rows` packed rows of `length` tokens, over all processes.

    Attributes:
      rows: B.
      length: T.
      accumulate: parts that a step walks through one after the other, to hold the activations of one
        only; the gradient is that of the whole batch.
    """

    rows: int = 16
    length: int = 128
    accumulate: int = 1

    def __post_init__(self):
        for name in ("rows", "length", "accumulate"):
            value = getattr(self, name)
            _require(value > 0, f"Batch.{name} must be positive, not {value}")
        _require(
            self.rows % self.accumulate == 0,
            f"Batch.rows = {self.rows} must be a multiple of accumulate = {self.accumulate}",
        )

    @property
    def tokens(self) -> int:
        """Positions of one step, padding included."""
        return self.rows * self.length


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """How the step is computed; it changes speed and memory, not what is learned.

    Attributes:
      dtype: of the activations; weights, gradients and optimiser are fp32 always.
      scan: one compiled layer, run over all; unrolled otherwise, slower to compile.
      keep: what a scanned layer keeps of the forward pass for the backward pass: "everything", "products"
        with weights and what attention gives (scores, norms and activations are computed again), or its
        "inputs" alone.
    """

    dtype: Literal["float32", "bfloat16"] = "float32"
    scan: bool = True
    keep: Literal["everything", "products", "inputs"] = "products"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """One model to train.

    Attributes:
      name: its folder under RUN_DIR/models.
      shape: its transformer; with `head_vocab` it proposes only that many most frequent tokens (or those of
        `start`).
      steps: length of the training.
      objective: what is minimised. Anything but cross-entropy compares with the target.
      init: "random", or "target": embedding, head, norm and `layers` are copied from the target, or "model":
        the training goes on from the finished model `start`, with its shape and the ids that it proposes.
      layers: the target's layers to begin with, one for each of the model's.
      start: a model under RUN_DIR/models.
      frozen: parts that stay what they were: "embedding", "norm", "head", "layers".
      teacher: the target runs in the "step", or its answers are read from a "cache" that all models with
        such batches share: the `cached_tokens` most probable tokens of each position, in the first
        `cached_batches` batches, which are then read again and again; 0 for one batch for each step.
      optimizer, batch, execution: see there.
      seed: of the initial weights.
    """

    name: str
    shape: TransformerShape
    steps: int
    objective: Objective = Objective(cross_entropy=1.0)
    init: Literal["random", "target", "model"] = "random"
    layers: tuple[int, ...] = ()
    start: str = ""
    frozen: tuple[Literal["embedding", "norm", "head", "layers"], ...] = ()
    teacher: Literal["step", "cache"] = "step"
    cached_tokens: int = 32
    cached_batches: int = 0
    optimizer: Optimizer = Optimizer()
    batch: Batch = Batch()
    execution: Execution = Execution()
    seed: int = 0

    def __post_init__(self):
        _require(
            model_of(self.name) == self.name != "",
            f"ModelSpec.name = {self.name!r} means a lookup where drafters are named: choose another",
        )
        _require(self.steps > 0, f"ModelSpec.steps must be positive, not {self.steps}")
        self._require_consistent_start()
        _require(
            self.batch.length <= self.shape.context,
            f"ModelSpec.batch has length {self.batch.length}, longer than the context "
            f"{self.shape.context} of {self.name!r}",
        )
        _require(
            self.cached_batches >= 0,
            f"ModelSpec.cached_batches must be at least 0, not {self.cached_batches}",
        )
        warmup = self.optimizer.schedule.warmup_steps
        _require(
            warmup < self.steps,
            f"ModelSpec.steps = {self.steps} of {self.name!r} must be more than the schedule's "
            f"warmup_steps = {warmup}",
        )

    def _require_consistent_start(self) -> None:
        depth, name = self.shape.num_layers, self.name
        copied = depth if self.init == "target" else 0
        _require(
            len(self.layers) == copied,
            f"ModelSpec.layers = {self.layers} of {name!r} does not fit init = {self.init!r}: "
            + (f"name one of the target for each of its own {depth}" if copied else "remove it"),
        )
        _require(
            bool(self.start) == (self.init == "model"),
            f"ModelSpec.start = {self.start!r} of {name!r} does not fit init = {self.init!r}: it is the "
            "finished model that init = 'model' goes on from, and empty otherwise",
        )
        _require(
            self.start != name,
            f"ModelSpec.start of {name!r} is the model itself: give what is trained on a name of its own",
        )
        _require(
            not self.frozen or self.init != "random",
            f"ModelSpec.frozen = {self.frozen} would keep random weights: set init to 'target' or 'model'",
        )

    @property
    def tokens(self) -> int:
        """Positions of the whole training, padding included."""
        return self.steps * self.batch.tokens

    @property
    def taught_batches(self) -> int:
        """How many different batches a cached teacher answers for."""
        return min(self.cached_batches or self.steps, self.steps)

    @property
    def needs_target(self) -> bool:
        """Whether the target must exist first."""
        return self.objective.needs_teacher or self.init == "target"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoints:
    """States of an unfinished training, to go on from after an interruption.

    Attributes:
      every_steps: one each so many steps; one more on SIGTERM.
      keep: the newest ones that are kept.
    """

    every_steps: int = 200
    keep: int = 2

    def __post_init__(self):
        for name in ("every_steps", "keep"):
            value = getattr(self, name)
            _require(value > 0, f"Checkpoints.{name} must be positive, not {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """What is looked at while training.

    Attributes:
      log_every, evaluate_every: steps between points of the curves, and between evaluations on held-out
        text; the last step is always evaluated.
      evaluate_batches: held-out batches per corpus.
      samples: prompts continued by the model at every evaluation, as text in TensorBoard.
      sample_tokens: length of the continuations.
      spike: stop when the loss exceeds so many times its running mean; 0 only stops at NaN.
    """

    log_every: int = 10
    evaluate_every: int = 100
    evaluate_batches: int = 4
    samples: tuple[str, ...] = ()
    sample_tokens: int = 48
    spike: float = 3.0

    def __post_init__(self):
        for name in ("log_every", "evaluate_every", "evaluate_batches", "sample_tokens"):
            value = getattr(self, name)
            _require(value > 0, f"Watch.{name} must be positive, not {value}")
        _require(
            self.spike == 0 or self.spike > 1,
            f"Watch.spike must be 0 (off) or above 1, not {self.spike}",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The processes that train together.

    Attributes:
      launcher: who started them and numbers them: "none" for one process, "slurm", "gke", or "explicit"
        (the fields below, or the variables DRAFTMESH_PROCESS, DRAFTMESH_PROCESSES, DRAFTMESH_COORDINATOR).
      processes, process: how many, and which one this is.
      coordinator: host:port of process 0.
      timeout_s: how long to wait for the others.
      text_timeout_s: how long to wait for process 0 to tokenise the text.
    """

    launcher: Literal["none", "slurm", "gke", "explicit"] = "none"
    processes: int = 1
    process: int = 0
    coordinator: str = ""
    timeout_s: float = 300.0
    text_timeout_s: float = 86_400.0

    def __post_init__(self):
        _require(self.processes > 0, f"Cluster.processes must be positive, not {self.processes}")
        _require(
            0 <= self.process < self.processes,
            f"Cluster.process = {self.process} must lie in 0..{self.processes - 1}",
        )
        for name in ("timeout_s", "text_timeout_s"):
            value = getattr(self, name)
            _require(value > 0, f"Cluster.{name} must be positive, not {value}")
