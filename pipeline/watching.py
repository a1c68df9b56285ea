"""What a person sees of a training: a progress bar, TensorBoard, and the speeds behind both.

Nothing here waits for a device: values come from steps that are done.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from etils import epath
from tqdm import tqdm

from drafters.mesh import Topology
from pipeline.core.errors import UserError
from pipeline.core.events import EventWriter
from pipeline.core.progress import progress_bar
from pipeline.objectives import Metrics

_PEAK_SIZE = (
    1024,
    1024,
    4096,
)  # of the products that measure the peak; large enough to be bound by flops
_PEAK_REPEATS = 5
_SMOOTHING = 0.98  # of the running mean that a spike is compared with
_SPIKE_AFTER = 20  # steps before the mean is worth comparing with


def say(line: str) -> None:
    """Writes a line for the person at the terminal, above a progress bar if there is one."""
    tqdm.write(line, file=sys.stderr)


@jax.jit
def _multiply(left: jax.Array, right: jax.Array) -> jax.Array:
    return left @ right


def measure_peak(dtype: str) -> float:
    """Flop/s that large matrix products reach now on one device (host devices share the cores)."""
    rows, inner, columns = _PEAK_SIZE
    left, right = jnp.ones((rows, inner), dtype), jnp.ones((inner, columns), dtype)
    _multiply(left, right).block_until_ready()
    times = []
    for _ in range(_PEAK_REPEATS):
        start = time.perf_counter()
        _multiply(left, right).block_until_ready()
        times.append(time.perf_counter() - start)
    return 2.0 * rows * inner * columns / min(times)


def peak_flops(topology: Topology, dtype: str) -> float:
    """Flop/s of all chips: published for bf16 where it is, else measured."""
    if topology.platform == "cpu":
        return measure_peak(dtype)
    per_chip = topology.bf16_flop_per_s if dtype == "bfloat16" else 0.0
    return topology.num_chips * (per_chip or measure_peak(dtype))


class Meter:
    """Speeds since the last reading."""

    def __init__(self, tokens_per_step: int, flops_per_step: float, peak: float):
        self.tokens_per_step, self.flops_per_step, self.peak = tokens_per_step, flops_per_step, peak
        self.restart()

    def restart(self) -> None:
        """Begins a new reading, for what is not training must not count as training."""
        self._start, self._steps, self._waited = time.perf_counter(), 0, 0.0

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts the block as waiting for input."""
        start = time.perf_counter()
        yield
        self._waited += time.perf_counter() - start

    def step(self) -> None:
        """Counts a step that is done."""
        self._steps += 1

    def read(self) -> dict[str, float]:
        """Curves of the steps since the last reading, by tag; empty if there was none."""
        seconds, steps = time.perf_counter() - self._start, self._steps
        waited = self._waited
        self.restart()
        if not steps:
            return {}
        return {
            "throughput/tok_s": steps * self.tokens_per_step / seconds,
            "throughput/model_flops_utilisation": steps * self.flops_per_step / seconds / self.peak,
            "timing/step_s": seconds / steps,
            "timing/input_wait_fraction": waited / seconds,
        }


class Guard:
    """Stops a training whose loss is no number, or far above its running mean.

    Args:
      name: of the model, for messages.
      spike: the largest multiple of the mean; 0 for any.
    """

    def __init__(self, name: str, spike: float):
        self._name, self._spike = name, spike
        self._mean, self._seen = 0.0, 0

    def check(self, step: int, loss: float, norm: float, first_ids: list[int]) -> None:
        """Looks at one step's loss and gradient norm.

        Raises:
          UserError: naming the step, and its batch by its number and first token ids.
        """
        if not (math.isfinite(loss) and math.isfinite(norm)):
            problem = f"the loss is {loss} and its gradient norm {norm}"
        elif self._spike and self._seen >= _SPIKE_AFTER and loss > self._spike * self.mean:
            problem = f"the loss jumped to {loss:.3f} from a mean of {self.mean:.3f}"
        else:
            self._mean = _SMOOTHING * self._mean + (1 - _SMOOTHING) * loss
            self._seen += 1
            return
        raise UserError(
            f"{self._name}: {problem} at step {step}, on batch {step} (it begins with the ids "
            f"{first_ids}): look at that batch, lower Schedule.peak, or raise Watch.spike. States saved "
            "before are kept, and the same command goes on from the last one"
        )

    @property
    def mean(self) -> float:
        """Running mean of the loss, corrected for its start at zero as Adam's moments are."""
        return self._mean / (1 - _SMOOTHING**self._seen) if self._seen else math.inf


class Journal:
    """TensorBoard and the progress bar of one model; does nothing in processes that do not lead.

    Args:
      folder: RUN_DIR/tensorboard/train/<model>.
      name: the model's.
      steps: length of its training.
      first: steps done before.
      leads: whether this process writes.
    """

    def __init__(self, folder: epath.PathLike, name: str, steps: int, first: int, leads: bool):
        self._open = contextlib.ExitStack()
        self._events = self._open.enter_context(EventWriter(folder)) if leads else None
        shown = leads and sys.stderr.isatty()  # a log gets the lines of `_lines`
        self._bar = progress_bar(
            total=steps, initial=first, unit="step", description=name, shown=shown
        )
        self._lines = leads and not shown
        self._name, self._steps = name, steps
        self._open.callback(self._bar.close)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def text(self, step: int, tag: str, markdown: str) -> None:
        """A text in Markdown."""
        if self._events:
            self._events.text(step, tag, markdown)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """One point of each curve."""
        if self._events:
            self._events.scalars(step, values)

    def hparams(self, params: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
        """This model's row of the HPARAMS table."""
        if self._events:
            self._events.hparams(params, metrics)

    def advance(self) -> None:
        """Moves the bar by a step."""
        self._bar.update()

    def training(self, step: int, metrics: dict[str, float], speeds: dict[str, float]) -> None:
        """The curves of training after `step` steps."""
        self.scalars(step, {**metrics, **speeds})
        if speeds:
            rate = speeds["throughput/tok_s"]
            left_s = (self._steps - step) * speeds["timing/step_s"]
            self._bar.set_postfix_str(f"loss {metrics['loss/train']:.3f}, {rate:,.0f} tok/s")
            if self._lines:
                say(
                    f"{self._name}: step {step}/{self._steps}, loss {metrics['loss/train']:.3f}, "
                    f"{rate:,.0f} tok/s, {left_s:.0f} s left"
                )

    def held_out(self, step: int, results: Mapping[str, Mapping[str, float]]) -> None:
        """The curves of held-out text: `{corpus: {metric: value}}`."""
        self.scalars(
            step,
            {
                f"held_out_{metric}/{corpus}": value
                for corpus, values in results.items()
                for metric, value in values.items()
            },
        )
        if self._lines or not self._bar.disable:
            say(f"{self._name}: step {step}/{self._steps}, held out: {summary(results)}")


def summary(results: Mapping[str, Mapping[str, float]]) -> str:
    """One line on held-out results."""

    def one(corpus: str, values: Mapping[str, float]) -> str:
        said = f"{corpus} perplexity {values['perplexity']:.2f}"
        return said + (f", overlap {values['overlap']:.3f}" if "overlap" in values else "")

    return "; ".join(one(corpus, values) for corpus, values in results.items())


def as_curves(means: Metrics) -> dict[str, float]:
    """Metrics of a training step by tag; what has no teacher is left out."""
    named = {
        "loss/train": means.loss,
        "loss/cross_entropy": means.cross_entropy,
        "agreement/overlap": means.overlap,
        "agreement/greedy": means.agreement,
    }
    return {tag: float(value) for tag, value in named.items() if value is not None}


def averaged(parts: list[Metrics]) -> dict[str, float]:
    """Metrics of held-out batches as one, each weighed by its positions."""
    total = sum(float(part.weight) for part in parts)

    def mean(values: list[Any]) -> float:
        weighed = zip(values, parts, strict=True)
        return sum(float(value) * float(part.weight) for value, part in weighed) / total

    loss = mean([part.cross_entropy for part in parts])
    result = {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}
    for name, values in (
        ("overlap", [part.overlap for part in parts]),
        ("agreement", [part.agreement for part in parts]),
    ):
        if all(value is not None for value in values):
            result[name] = mean(values)
    return result
