"""Speculation beside plain decoding, in turns: drafters, placements and K; and a round against its parts.

    python -m tools.bench speculate --run_dir=runs/quickstart --target=target --drafters=wide,deep --sixteen

Text is the beginnings of held-out documents: code at temperature 0.8 and top-p 0.95, prose at top-p 0.8, the
warps of Chen et al. 2023.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import platform
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from drafters.model_card import read_card
from pipeline.core.errors import UserError
from pipeline.corpora import PythonCode, PythonProse
from pipeline.tasks import CorpusPrompts
from serving import compare, timing
from serving.decode import Prompt
from serving.pair import Pair, load, model_folder, model_of, require_names
from serving.plan import Choice
from serving.sampling import SamplingParams
from tools.bench_arguments import positive, positives
from tools.bench_decode import ONE, SIXTEEN

WARPS = {
    "code": (PythonCode(), dict(temperature=0.8, top_p=0.95)),
    "prose": (PythonProse(), dict(temperature=1.0, top_p=0.8)),
}

_ROUNDS, _LAPS = 8, 9  # rounds per sample, and samples


class Row(NamedTuple):
    """One choice on one task."""

    task: str
    choice: Choice
    speedup: float
    tau: float
    round_ratio: float  # a round's time / (K drafts + scoring pass), each timed alone


def prompts_of(pair: Pair, task: str, count: int, tokens: int) -> list[Prompt]:
    """Requests of a task."""
    corpus, warp = WARPS[task]
    texts = CorpusPrompts(corpus=corpus, count=count, characters=200).prompts()
    return [
        Prompt(
            index=i,
            text=found.text,
            tokens=tuple(pair.tokenizer.encode(found.text)),
            params=SamplingParams(max_tokens=tokens, seed=i, ignore_eos=True, **warp),
        )
        for i, found in enumerate(texts)
    ]


def choices(
    drafters: Sequence[str], counts: Sequence[int], chips: int, led_only: bool = False
) -> Iterator[Choice]:
    """Drafters x K x placements: over all chips, and, on a mesh, led by the first."""
    for drafter, k in itertools.product(drafters, counts):
        if drafter != "ngram" and not led_only:
            yield Choice(drafter=drafter, k=k)
        if chips > 1 or drafter == "ngram":
            yield Choice(drafter=drafter, k=k, leader=chips > 1)


def measure(pair: Pair, choice: Choice, task: str, prompts: Sequence[Prompt]) -> Row:
    """Both arms on the prompts, and a round against its parts."""
    plain, speculative = compare.play(pair, prompts, 1)
    ratio = float(np.mean(plain.ms_per_token()) / np.mean(speculative.ms_per_token()))
    context = int(np.mean([len(p.tokens) for p in prompts])) + prompts[0].params.max_tokens // 2
    setting = timing.Setting(context=context, params=prompts[0].params)
    tau = compare.acceptance(speculative.answers, choice.k).tau
    return Row(task, choice, ratio, tau, round_ratio(pair, setting))


def round_ratio(pair: Pair, setting: timing.Setting) -> float:
    """A round's time over its parts', all three timed in turn: the median over some laps."""
    engine = pair.engine
    positions = _ROUNDS * (engine.k + 1) + engine.slack
    setting = dataclasses.replace(setting, capacity=setting.holding(positions))
    timed = (
        timing.playing(pair, setting),
        timing.proposing(pair, setting),
        timing.scoring(pair, setting, engine.k + 1),
    )
    ratios = []
    for lap in range(_LAPS + 1):
        whole, *parts = (timing.sample_ms(part, _ROUNDS) for part in timed)
        ratios += [whole / sum(parts)] if lap else []  # the first compiles
    return float(np.median(ratios))


def shown(row: Row) -> str:
    """A row of the table."""
    where = "leader" if row.choice.leader else "with the target"
    return (
        f"{row.task:6} {row.choice.drafter:10} K = {row.choice.k}  {where:16} {row.speedup:5.2f} x"
        f"   tau {row.tau:4.2f}   round / parts {row.round_ratio:4.2f}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench speculate", description=__doc__)
    parser.add_argument("--run_dir", default="runs/quickstart")
    parser.add_argument("--target", default="target")
    parser.add_argument("--drafters", default="wide,mid,deep,ngram")
    parser.add_argument("--k", type=positives, default=(3, 5, 7))
    parser.add_argument("--tasks", default="code,prose")
    parser.add_argument("--prompts", type=positive, default=3)
    parser.add_argument("--tokens", type=positive, default=96)
    parser.add_argument("--sixteen", action="store_true", help="on 16 host devices")
    parser.add_argument(
        "--led_only",
        action="store_true",
        help="leave out drafters that lie on all chips: minutes each",
    )
    given = parser.parse_args(arguments)
    topology = SIXTEEN if given.sixteen else ONE
    topology.prepare()
    tasks = given.tasks.split(",")
    if unknown := set(tasks) - set(WARPS):
        raise UserError(f"--tasks {sorted(unknown)}: choose among {sorted(WARPS)}")
    drafters = given.drafters.split(",")
    require_names("--drafters", drafters)
    for model in filter(None, map(model_of, drafters)):
        read_card(model_folder(given.run_dir, model))  # before minutes are spent on the others
    print(f"{platform.machine()}, {os.cpu_count()} cores, {topology.name}, batch 1", flush=True)
    rows = []
    for choice in choices(drafters, given.k, topology.num_chips, given.led_only):
        pair = load(given.run_dir, topology, given.target, choice)
        for task in tasks:
            prompts = prompts_of(pair, task, given.prompts, given.tokens)
            rows.append(measure(pair, choice, task, prompts))
            print(shown(rows[-1]), flush=True)
    for task in tasks:
        best = max((row for row in rows if row.task == task), key=lambda row: row.speedup)
        print(f"best on {task}: {shown(best)}")
    return 0
