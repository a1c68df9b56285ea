"""`tools/bench.py train`: how well training steps use the machine.

Trains the quickstart's target for some steps in a throw-away folder, and prints its model-flops utilisation
against matrix products of the same run, input wait, the compiled step's memory against what the shape says,
and how many programs were compiled after the first step.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import tempfile
from collections.abc import Sequence

import jax
import numpy as np

from drafters.mesh import Topology
from drafters.shapes import TransformerShape
from drafters.sharding import Placement
from pipeline import watching
from pipeline.core.run_dir import RunDir
from pipeline.corpora import PythonCode, PythonProse
from pipeline.text import Text
from pipeline.training_loop import Prefetch, Share
from pipeline.training_settings import Batch, Execution, ModelSpec
from pipeline.training_step import Job, compiled_bytes, expected_bytes
from tools.bench_arguments import positive

_COMPILED = "/jax/core/compile/backend_compile_duration"
_WARM_UP = 3
_PEAKS_EVERY = (
    10  # steps between measurements of the peak: it drifts with what else the machine does
)

# The quickstart's target.
TARGET = TransformerShape(
    vocab_size=2048,
    num_layers=12,
    width=256,
    num_heads=16,
    num_kv_heads=16,
    head_dim=16,
    mlp_width=512,
    context=1024,
)


def train(argv: Sequence[str]) -> None:
    """The benchmark's command line."""
    parser = argparse.ArgumentParser(prog="tools/bench.py train", description=__doc__)
    parser.add_argument("--steps", type=positive, default=30, help="steps to measure")
    parser.add_argument("--rows", type=positive, default=8)
    parser.add_argument("--length", type=positive, default=128)
    parser.add_argument("--keep", choices=("everything", "products", "inputs"), default="products")
    parser.add_argument("--unrolled", action="store_true", help="layers without a scan")
    flags = parser.parse_args(argv)
    spec = ModelSpec(
        name="target",
        shape=TARGET,
        steps=1_000_000,
        batch=Batch(rows=flags.rows, length=flags.length),
        execution=Execution(scan=not flags.unrolled, keep=flags.keep),
    )
    with tempfile.TemporaryDirectory() as folder:
        measure(spec, RunDir.at(folder), flags.steps)


def measure(spec: ModelSpec, run: RunDir, steps: int) -> None:
    """Runs and prints; text is tokenised into `run` first."""
    topology = Topology(name="host_1", platform="cpu")
    topology.prepare()
    text = Text(corpora=(PythonCode(), PythonProse()), vocab_size=spec.shape.vocab_size)
    feed = text.open(run, "target", seed=0).batches(spec.batch, 0, Share())
    job = Job(spec=spec, placement=Placement(topology.mesh(), ()))
    source = Prefetch(feed, job.put)
    compiled_after: list[str] = []
    try:
        state, stop = job.initial_state(), job.put_flag(False)
        step = job.lower(state, source.next(), stop, None).compile()
        readings, peaks = [], [watching.measure_peak("float32")]

        def listen(event: str, duration_secs: float, **_: str | int) -> None:
            del duration_secs
            if event == _COMPILED:
                compiled_after.append(event)

        jax.monitoring.register_event_duration_secs_listener(listen)
        for number in range(-_WARM_UP, steps):
            meter = watching.Meter(spec.batch.tokens, job.flops_per_step(), peaks[0])
            with meter.waiting():
                batch = source.next()
            state, metrics = step(state, batch, stop, None)
            jax.block_until_ready(metrics)
            meter.step()
            if number >= 0:
                readings.append(meter.read())
            if number % _PEAKS_EVERY == 0:
                peaks.append(watching.measure_peak("float32"))
    finally:
        source.close()
    _print(spec, step, readings, peaks, job.flops_per_step(), len(compiled_after))


def _print(
    spec: ModelSpec,
    step: jax.stages.Compiled,
    readings: list[dict[str, float]],
    peaks: list[float],
    flops: float,
    compiled_after: int,
) -> None:
    step_s = statistics.median(reading["timing/step_s"] for reading in readings)
    waited = float(np.mean([reading["timing/input_wait_fraction"] for reading in readings]))
    peak = statistics.median(peaks)
    used, expected = compiled_bytes(step), expected_bytes(spec)
    print(f"{dataclasses.asdict(spec.batch)} {dataclasses.asdict(spec.execution)}")
    print(
        f"step                       {step_s * 1e3:8.1f} ms, {spec.batch.tokens / step_s:,.0f} tok/s"
    )
    print(f"matrix products            {peak / 1e9:8.1f} Gflop/s (median of {len(peaks)})")
    print(f"model-flops utilisation    {flops / step_s / peak:8.1%}")
    print(f"input wait                 {waited:8.1%}")
    print(f"compiled after first step  {compiled_after:8d}")
    print(f"memory of the step         {used / 1e6:8.0f} MB, {used / expected:.2f} of the shape's")
