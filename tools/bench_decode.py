"""Plain decoding: beside transformers on the same weights, and against what the memory can deliver."""

from __future__ import annotations

import argparse
import functools
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from etils import epath
from jax import Array

from drafters import kv_cache
from drafters.mesh import Topology
from drafters.model_card import read_card, read_tokenizer
from drafters.transformer import with_params
from serving.decode import Prompt, decode
from serving.pair import Pair, load_target
from serving.sampling import SamplingParams
from serving.speculation import Engine, everywhere
from tools.bench_arguments import positive
from tools.bench_arms import ONE, ours, peak_bytes, reader, theirs

MODEL = "runs/smollm2/models/smollm2_135m"
PROMPT = "def fibonacci(n):\n    "
REDUCED_BYTES = 512 << 20
SIXTEEN = Topology(name="host_16", platform="cpu", axes=("x", "y", "z"), sizes=(2, 2, 4))


# --------------------------------------------------------------------------------------------------
# Yardsticks
# --------------------------------------------------------------------------------------------------


def seconds(run: Callable[[], Any], repeats: int) -> list[float]:
    """Wall times of `repeats` calls, after one that is not timed."""
    jax.block_until_ready(run())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - start)
    return times


def reduction_bytes_per_s() -> float:
    """Memory bandwidth of a large fp32 sum, the median of several."""
    numbers = jnp.ones((REDUCED_BYTES // 4,), jnp.float32)
    return REDUCED_BYTES / statistics.median(
        seconds(functools.partial(jax.jit(jnp.sum), numbers), 9)
    )


@functools.partial(jax.jit, static_argnames="engine", donate_argnames="cache")
def _scoring(engine: Engine, params: Any, tokens: Array, cache: Any, steps: Array) -> Any:
    """Scores tokens i32[1, T] `steps` times behind the same context."""
    model = with_params(engine.shape, params)

    def score(_: Array, carry: Any) -> Any:
        tokens, cache = carry
        x, grown = model.step(tokens, cache)
        best = jnp.argmax(everywhere(engine, model.logits(x)), axis=0).astype(jnp.int32)
        return best, grown.with_length(cache.length)

    return jax.lax.fori_loop(0, steps, score, (tokens, cache))


class Scorer:
    """Scoring passes of T tokens at one context, timed inside one loop."""

    def __init__(self, pair: Pair, context: int):
        engine = pair.engine
        self.engine, self.params = engine, pair.weights.target
        capacity = kv_cache.capacity_for(context + 16)
        cache = kv_cache.empty(engine.shape, 1, capacity, jnp.dtype(engine.dtype))
        if engine.placement is not None:
            cache = jax.device_put(cache, engine.placement.cache_shardings(engine.shape))
        self.cache = cache.with_length(jnp.full((1,), context, jnp.int32))

    def ms(self, tokens: int, steps: int = 8) -> float:
        """Milliseconds of one pass."""
        block = jnp.ones((1, tokens), jnp.int32)

        def run() -> Array:
            scored, self.cache = _scoring(
                self.engine, self.params, block, self.cache, jnp.int32(steps)
            )
            return scored

        return 1e3 * min(seconds(run, 3)) / steps


# --------------------------------------------------------------------------------------------------
# The report
# --------------------------------------------------------------------------------------------------


def beside_transformers(pair: Pair, model: str, tokens: int, repeats: int) -> list[str]:
    """Alternating runs of both arms on the same prompt."""
    card = read_card(model)
    ids = read_tokenizer(epath.Path(model), card).encode(PROMPT)
    arms = {"draftmesh": ours(pair, ids), "transformers": theirs(reader()(model), ids)}
    emitted = {name: arm(tokens).tokens for name, arm in arms.items()}
    times: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(repeats):
        for name, arm in arms.items():
            start = time.perf_counter()
            arm(tokens)
            times[name].append(time.perf_counter() - start)
    ratios = [b / a for a, b in zip(*times.values(), strict=True)]
    lines = [
        f"{name:13} {tokens / statistics.median(took):6.1f} tokens/s (median of {repeats}; "
        f"{tokens / max(took):.1f} to {tokens / min(took):.1f})"
        for name, took in times.items()
    ]
    return [
        *lines,
        f"ratio         {statistics.median(ratios):6.2f} (pairs from {min(ratios):.2f} to "
        f"{max(ratios):.2f}); same tokens: {emitted['draftmesh'] == emitted['transformers']}",
    ]


def bandwidth(pair: Pair) -> list[str]:
    """Bytes of weights read per second of a decoding step, against a reduction, alternating."""
    scorer = Scorer(pair, context=64)
    shape = pair.engine.shape
    pairs = [(reduction_bytes_per_s(), scorer.ms(1, 16)) for _ in range(5)]
    peak = statistics.median(peak for peak, _ in pairs)
    step = statistics.median(ms for _, ms in pairs)
    read = shape.weight_bytes(pair.engine.dtype) / step * 1e3
    share = statistics.median(
        shape.weight_bytes(pair.engine.dtype) / ms * 1e3 / peak for peak, ms in pairs
    )
    return [
        f"a step at context 64 takes {step:.1f} ms and reads weights at {read / 1e9:.1f} GB/s, "
        f"{share:.0%} of a large fp32 reduction's {peak / 1e9:.1f} GB/s"
    ]


def scoring_curve(
    pair: Pair, context: int, counts: Sequence[int], repeats: int = 5, steps: int = 8
) -> list[str]:
    """What scoring T tokens costs, in steps of one; each T beside T = 1, in turns."""
    scorer = Scorer(pair, context)
    lines = [f"scoring at context {context}, in steps of one token:"]
    for count in counts:
        ratios = []
        for _ in range(repeats):
            one = scorer.ms(1, steps)
            ratios.append((scorer.ms(count, steps) / one, one))
        ratio, one = statistics.median(ratios)
        lines.append(f"  T = {count:2}  {ratio:5.2f}   (one token {one:.1f} ms)")
    return lines


def fresh_start(model: str) -> list[str]:
    """Start-up to the first token and peak memory of a new process, programs compiled and kept."""
    lines = []
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": cache}
        environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.5"
        for what in ("first start, compiling", "later start"):
            done = subprocess.run(
                [sys.executable, "-m", "tools.bench_decode", "--one_token", f"--model={model}"],
                env=environment,
                capture_output=True,
                text=True,
                check=True,
            )
            lines.append(f"{what:24} {done.stdout.strip().splitlines()[-1]}")
    return lines


def one_token(model: str) -> str:
    """Run in a process of its own: loads the model and decodes one token."""
    ONE.prepare()
    pair = load_target(".", ONE, f"./{model}" if "/" not in model else model)
    tokenizer = pair.tokenizer
    decode(
        pair,
        [Prompt(index=0, text=PROMPT, tokens=tuple(tokenizer.encode(PROMPT)),
                params=SamplingParams(max_tokens=1))],
    )  # fmt: skip
    boot = float(Path("/proc/uptime").read_text().split()[0])
    started = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    took = boot - started / os.sysconf("SC_CLK_TCK")
    peak = peak_bytes()
    weights = pair.engine.shape.weight_bytes(pair.engine.dtype)
    cache = pair.engine.shape.cache_bytes_per_token(pair.engine.dtype) * 384
    bound = 1.3 * weights + cache + 400e6
    return (
        f"{took:5.1f} s to the first token, peak memory {peak / 1e6:,.0f} MB "
        f"(1.3 x weights + cache + 400 MB = {bound / 1e6:,.0f} MB)"
    )


def on_sixteen(model: str) -> list[str]:
    """The scoring curve on 16 host devices, from a process of its own."""
    command = [sys.executable, "-m", "tools.bench_decode", "--sixteen", f"--model={model}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return ["16 host devices:", *(f"  {line}" for line in done.stdout.strip().splitlines())]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench decode", description=__doc__)
    parser.add_argument("--model", default=MODEL, help="a model directory")
    parser.add_argument("--tokens", type=positive, default=64)
    parser.add_argument("--repeats", type=positive, default=5)
    parser.add_argument("--one_token", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--sixteen", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.one_token:
        print(one_token(given.model))
        return 0
    topology = SIXTEEN if given.sixteen else ONE
    topology.prepare()
    pair = load_target(".", topology, given.model)
    if given.sixteen:
        lines = [*pair.notes, *scoring_curve(pair, 256, (4, 5, 8), repeats=3, steps=3)]
        print("\n".join(lines))
        return 0
    print(f"{platform.machine()}, {os.cpu_count()} cores, jax {jax.__version__}")
    for part in (
        lambda: beside_transformers(pair, given.model, given.tokens, given.repeats),
        lambda: bandwidth(pair),
        lambda: scoring_curve(pair, 1000, (2, 3, 4, 5, 6, 8, 9)),
        lambda: fresh_start(given.model),
        lambda: on_sixteen(given.model),
    ):
        print("\n".join(part()), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
