"""Beside the tools people use today: the same weights, prompt and greedy tokens in fp32, in turns.

    python -m tools.bench peers                           looks drafts up in a text that repeats itself
    python -m tools.bench peers --drafter=DIR --k=4,7     and drafts with a model

The yardstick is transformers: plain, prompt lookup, and assisted by the exported drafter.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import platform
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from etils import epath

from drafters.model_card import read_card, read_tokenizer
from serving.pair import NGRAM, load_target, with_drafter
from serving.plan import Choice
from tools.bench_arms import Arm, Run, ours, reader, theirs
from tools.bench_decode import MODEL, ONE

# Text that goes on as it began: what looking drafts up is for.
REPETITIVE = "".join(
    f"def area_{name}(width, height):\n"
    f'    """The area of the {name} in square metres."""\n'
    f"    if width < 0 or height < 0:\n"
    f'        raise ValueError("{name}: width and height must not be negative")\n'
    f"    return width * height\n\n\n"
    for name in ("kitchen", "garden", "cellar")
)


@dataclasses.dataclass(frozen=True)
class Timed:
    """One arm's figures; seconds have one entry per repeat."""

    run: Run
    seconds: tuple[float, ...]
    first: tuple[float, ...]  # to the first token

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return len(self.run.tokens) / statistics.median(self.seconds)


# --------------------------------------------------------------------------------------------------
# Arms
# --------------------------------------------------------------------------------------------------


def our_arms(model: str, drafter: str, counts: Sequence[int], ids: Sequence[int]) -> dict[str, Arm]:
    """Plain decoding, looked-up drafts, and a drafter's."""
    target = load_target(".", ONE, model)
    arms = {"plain": ours(target, ids)}
    for name in filter(None, (NGRAM, drafter)):
        pair = with_drafter(target, ".", ONE, Choice(drafter=name, k=max(counts)))
        for k in counts:
            engine = dataclasses.replace(pair.engine, k=k)
            what = "lookup" if name == NGRAM else "drafter"
            arms[f"{what} K = {k}"] = ours(dataclasses.replace(pair, engine=engine), ids)
    return {f"draftmesh {name}": arm for name, arm in arms.items()}


def their_arms(
    model: str, drafter: str, counts: Sequence[int], ids: Sequence[int]
) -> dict[str, Arm]:
    """Plain decoding, prompt lookup, and assisted generation."""
    read = reader()
    target = read(model)
    arms = {"plain": theirs(target, ids)}
    for k in counts:
        arms[f"lookup K = {k}"] = theirs(target, ids, prompt_lookup_num_tokens=k)
    for k in counts if drafter else ():
        assistant = read(drafter, model)
        settings = assistant.generation_config
        settings.num_assistant_tokens = k
        settings.num_assistant_tokens_schedule = "constant"
        settings.assistant_confidence_threshold = 0.0
        arms[f"drafter K = {k}"] = theirs(target, ids, assistant_model=assistant)
    return {f"transformers {name}": arm for name, arm in arms.items()}


# --------------------------------------------------------------------------------------------------
# The table
# --------------------------------------------------------------------------------------------------


def timed(arms: Mapping[str, Arm], tokens: int, repeats: int) -> dict[str, Timed]:
    """Every arm, in turns, after one run that is not timed."""
    runs = {name: (arm(1), arm(tokens))[1] for name, arm in arms.items()}
    took: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in arms}
    for _ in range(repeats):
        for name, arm in arms.items():
            for times, count in zip(took[name], (tokens, 1), strict=True):
                start = time.perf_counter()
                arm(count)
                times.append(time.perf_counter() - start)
    return {name: Timed(runs[name], *map(tuple, took[name])) for name in arms}


def table(found: Mapping[str, Timed]) -> list[str]:
    """A line per arm; `x plain` is beside the same tool's own plain decoding."""
    lines = [f"{'':28} {'tokens/s':>8} {'x plain':>8} {'first token':>12} {'tau':>5}"]
    for name, arm in found.items():
        plain = found[f"{name.split()[0]} plain"]
        tau = len(arm.run.tokens) / arm.run.passes
        first = 1e3 * statistics.median(arm.first)
        ratio = arm.rate / plain.rate
        lines.append(f"{name:28} {arm.rate:8.1f} {ratio:8.2f} {first:9.0f} ms {tau:5.2f}")
    return [*lines, *_verdicts(found)]


def _verdicts(found: Mapping[str, Timed]) -> list[str]:
    """The best arm of each kind beside the peer's best, and whether all wrote the same."""
    lines = []
    for kind in ("plain", "lookup", "drafter"):
        best = {
            tool: max(
                (arm.rate for name, arm in found.items() if name.startswith(f"{tool} {kind}")),
                default=0.0,
            )
            for tool in ("draftmesh", "transformers")
        }
        if all(best.values()):
            ratio = best["draftmesh"] / best["transformers"]
            lines.append(
                f"{kind:8} draftmesh at its best K / transformers at its best K: {ratio:.2f}"
            )
    same = len({arm.run.tokens for arm in found.values()}) == 1
    return [*lines, f"all arms wrote the same tokens: {same}"]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench peers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default=MODEL, help="a model directory")
    parser.add_argument("--drafter", default="", help="a model directory; none without")
    parser.add_argument("--k", default="4,7,10", help="drafts per round, several by commas")
    parser.add_argument("--prompt_file", default="", help="text to continue")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args(arguments)
    ONE.prepare()
    text = Path(given.prompt_file).read_text("utf-8") if given.prompt_file else REPETITIVE
    ids = read_tokenizer(epath.Path(given.model), read_card(given.model)).encode(text)
    what = (given.model, given.drafter, [int(k) for k in given.k.split(",")], ids)
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, a prompt of {len(ids)} tokens", flush=True
    )
    found = timed(our_arms(*what) | their_arms(*what), given.tokens, given.repeats)
    print("\n".join(table(found)))
    return 0
