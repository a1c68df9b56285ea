"""Beside the tools people use today: the same weights, prompt and greedy tokens in fp32, in turns.

    python -m tools.bench peers                           looks drafts up in a text that repeats itself
    python -m tools.bench peers --drafter=DIR --k=4,7     and drafts with a model, and with both ("both")
    python -m tools.bench peers --gguf=FILE               and beside llama.cpp, if its Python package is there

The yardsticks are transformers (plain, prompt lookup, and assisted by the exported drafter) and llama.cpp
(plain and prompt lookup). Each tool is a process of its own; its start-up ends with its first plain token.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import itertools
import os
import platform
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from etils import epath

from drafters.model_card import read_card, read_tokenizer
from pipeline.core.errors import UserError
from pipeline.core.run_dir import explain_os_errors
from tools.bench_arguments import positive, positives
from tools.bench_arms import Run, Work
from tools.bench_decode import MODEL
from tools.bench_worker import Worker, working

# Text that goes on as it began: what looking drafts up is for.
REPETITIVE = "".join(
    f"def area_{name}(width, height):\n"
    f'    """The area of the {name} in square metres."""\n'
    f"    if width < 0 or height < 0:\n"
    f'        raise ValueError("{name}: width and height must not be negative")\n'
    f"    return width * height\n\n\n"
    for name in ("kitchen", "garden", "cellar")
)


OURS, PEERS = "draftmesh", ("transformers", "llama.cpp")
KINDS = ("plain", "lookup", "drafter")


@dataclasses.dataclass(frozen=True)
class Timed:
    """One arm's figures; seconds have one entry per repeat."""

    run: Run
    seconds: tuple[float, ...]
    first: tuple[float, ...]  # to the first token
    peak_bytes: int = 0  # of the tool's process, with this arm and those before it
    start_s: float = 0.0  # of the tool's process

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return len(self.run.tokens) / statistics.median(self.seconds)


# --------------------------------------------------------------------------------------------------
# The table
# --------------------------------------------------------------------------------------------------


def timed(workers: Mapping[str, Worker], tokens: int, repeats: int) -> dict[str, Timed]:
    """Every arm of every tool, in turns, after one run that is not timed."""
    found = {}
    for tool, worker in workers.items():
        for arm in worker.arms:
            played = (worker.play(arm, 1), worker.play(arm, tokens))[1]
            found[tool, arm] = Timed(played.run, (), (), played.peak_bytes)
    for _ in range(repeats):
        for (tool, arm), one in found.items():
            whole, first = (workers[tool].play(arm, count).seconds for count in (tokens, 1))
            found[tool, arm] = dataclasses.replace(
                one, seconds=(*one.seconds, whole), first=(*one.first, first)
            )
    return {f"{tool} {arm}": one for (tool, arm), one in found.items()}


def table(found: Mapping[str, Timed]) -> list[str]:
    """A line per arm; `x plain` is beside the same tool's own plain decoding."""
    lines = [
        f"{'':28} {'tokens/s':>8} {'x plain':>8} {'first token':>12} {'tau':>5} {'memory':>8} {'start':>7}"
    ]
    for name, arm in found.items():
        plain = found[f"{name.split()[0]} plain"]
        tau = len(arm.run.tokens) / arm.run.passes
        first = 1e3 * statistics.median(arm.first)
        ratio = arm.rate / plain.rate
        lines.append(
            f"{name:28} {arm.rate:8.1f} {ratio:8.2f} {first:9.0f} ms {tau:5.2f} "
            f"{arm.peak_bytes / 1e9:5.1f} GB {arm.start_s:5.1f} s"
        )
    return [*lines, *_verdicts(found)]


def _verdicts(found: Mapping[str, Timed]) -> list[str]:
    """The best arm of each kind beside each peer's best, and whether all wrote the same."""
    lines = []
    for kind, peer in itertools.product(KINDS, PEERS):
        ours, theirs = (_best(found, f"{tool} {kind}") for tool in (OURS, peer))
        if ours and theirs:
            lines.append(
                f"{kind:8} {OURS} at its best K / {peer} at its best K: {ours / theirs:.2f}"
            )
    same = len({arm.run.tokens for arm in found.values()}) == 1
    return [*lines, f"all arms wrote the same tokens: {same}"]


def _best(found: Mapping[str, Timed], arms: str) -> float:
    return max((arm.rate for name, arm in found.items() if name.startswith(arms)), default=0.0)


def _tools(gguf: str) -> list[str]:
    if not gguf:
        return [OURS, "transformers"]
    if not os.path.isfile(gguf):
        raise UserError(f"--gguf={gguf} is no file: tools.fetch_smollm2 --gguf=FILE writes one")
    if importlib.util.find_spec("llama_cpp") is None:
        raise UserError("--gguf is for llama.cpp: pip install llama-cpp-python, or leave it out")
    return [OURS, *PEERS]


def _text(path: str) -> str:
    try:
        with explain_os_errors(path, "read"):
            return Path(path).read_text("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is no text in UTF-8 ({error})") from error


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench peers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default=MODEL, help="a model directory")
    parser.add_argument(
        "--drafter",
        default="",
        help="a model directory, run alone and behind a lookup; none without",
    )
    parser.add_argument("--gguf", default="", help="the same model as a GGUF file")
    parser.add_argument(
        "--k", type=positives, default=(4, 7, 10), help="drafts per round, several by commas"
    )
    parser.add_argument("--prompt_file", default="", help="text to continue")
    parser.add_argument("--tokens", type=positive, default=96)
    parser.add_argument("--repeats", type=positive, default=5)
    given = parser.parse_args(arguments)
    model = os.path.abspath(given.model)
    text = _text(given.prompt_file) if given.prompt_file else REPETITIVE
    if not text:
        raise UserError(f"--prompt_file={given.prompt_file} is empty: give it some text")
    ids = read_tokenizer(epath.Path(model), read_card(model)).encode(text)
    if given.drafter:
        read_card(given.drafter)  # what is wrong with it is said before anything is loaded
    work = Work(
        model=model,
        drafter=given.drafter and os.path.abspath(given.drafter),
        gguf=given.gguf,
        counts=given.k,
        ids=ids,
    )
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, a prompt of {len(ids)} tokens", flush=True
    )
    with contextlib.ExitStack() as stack:
        workers, starts = {}, {}
        for tool in _tools(given.gguf):
            started = time.perf_counter()
            workers[tool] = stack.enter_context(working(tool, work))
            workers[tool].play("plain", 1)
            starts[tool] = time.perf_counter() - started
        found = timed(workers, given.tokens, given.repeats)
    for name, arm in found.items():
        found[name] = dataclasses.replace(arm, start_s=starts[name.split()[0]])
    print("\n".join(table(found)))
    return 0
