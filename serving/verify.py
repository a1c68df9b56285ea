"""Checks that a served pair is lossless: its output is exactly the target's, whatever drafts.

    python -m serving.verify --gin_file=gin/smollm2.gin --samples=1024

It reads the same config as serving.sps. Greedy tokens are compared with plain decoding; sampled tokens
behind fixed texts are tested against the target's distribution, first and later in a block, as corrections
and as bonus tokens, at several temperatures and nuclei, for the configured drafter and for adversaries: a
uniform one, one that is certain, one that is always wrong, and the target itself.

Exit code 0: no deviation; 1: a check failed; 2: bad config, one message says why.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
from collections.abc import Iterator, Sequence

from drafters.compilation import keep_programs
from drafters.lookup_first import LookupFirst
from pipeline.core import config
from pipeline.core.errors import UserError, end_with
from serving import lossless, sps
from serving.decode import Prompt, fit
from serving.lossless import GREEDY, WARPS, Line
from serving.pair import Pair
from serving.sampling import SamplingParams

# The first repeat themselves, so that lookup drafters have something to say; the last do not.
TEXTS = (
    "one two three, one two three, one two",
    "x = 1; y = 1; x = 1; y =",
    "the cat and the dog and the cat and",
    "a b c a b c a b",
    "The capital of France is",
    "def add(first, second):",
    "In the beginning there was",
    "Once upon a time, a small",
)
ADVERSE_WARPS = WARPS[:2]


def verify(pair: Pair, prompts: Sequence[Prompt], batch_size: int, *, samples: int) -> int:
    """Runs all checks and prints a table; returns the exit code.

    Args:
      pair: what is served.
      prompts: texts to decode behind, of at least two tokens; their beginnings are used.
      batch_size: not used: rows are chosen to fit the vocabulary.
      samples: seeds per drafter and way of decoding.
    """
    if not pair.engine.k:
        raise UserError("nothing to verify: the pair decodes plainly; choose a drafter and --k > 0")
    texts = [_beginning(prompt) for prompt in (fit(pair, p) for p in prompts) if not prompt.error]
    texts = [prompt for prompt in texts if len(prompt.tokens) > 1]
    if not texts:
        raise UserError("verify needs a prompt of at least two tokens: give some text")
    lines = lossless.judged(list(_lines(pair, texts, samples)))
    sys.stdout.write(table(lines) + "\n")
    return int(any(line.failed for line in lines))


def _beginning(prompt: Prompt) -> Prompt:
    return dataclasses.replace(prompt, tokens=prompt.tokens[: lossless.PREFIX], params=GREEDY)


def _lines(pair: Pair, texts: Sequence[Prompt], samples: int) -> Iterator[Line]:
    rows = lossless.rows_for(pair)
    filled = [texts[row % len(texts)] for row in range(rows)]  # as many as the law's programs have
    expected = lossless.plain_greedy(pair, filled)
    drafters = {"configured": pair, **lossless.adversaries(pair, texts[0].tokens)}
    yield lossless.scores(pair, "configured", texts[0].tokens)
    for name, served in drafters.items():
        yield lossless.greedy(served, name, filled, expected)
        for i, warp in enumerate(WARPS if name == "configured" else ADVERSE_WARPS):
            prefix = texts[i % len(texts) if name == "configured" else 0].tokens
            yield from _laws(served, name, warp, prefix, samples)
            if isinstance(served.engine.drafter, LookupFirst):
                new = texts[~i % len(texts)].tokens  # nothing to copy: the model's turn
                yield from _laws(served, "its model", warp, new, samples)


def _laws(
    pair: Pair, name: str, warp: SamplingParams, prefix: Sequence[int], samples: int
) -> Iterator[Line]:
    return lossless.laws(pair, name, warp, lossless.sample(pair, warp, prefix, samples))


def table(lines: Sequence[Line]) -> str:
    """The lines in columns, with what the tests can see, and the verdict."""
    rows = [
        f"{line.drafter:<18} {line.warp:<16} {line.check:<26} {line.count:>8}  "
        f"{'FAIL' if line.failed else 'ok':<5} {line.result}"
        for line in lines
    ]
    failed = sum(line.failed for line in lines)
    verdict = f"{failed} of {len(lines)} checks failed" if failed else "no deviation was found"
    return "\n".join(
        [
            f"{'drafter':<18} {'decoding':<16} {'check':<26} {'count':>8}  {'':<5} result",
            *rows,
            f"{verdict} (chance of a false alarm in the whole table {lossless.SIZE:g}; a deviation of "
            f"'sees TV' in total variation is found with probability {lossless.POWER:g})",
        ]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m serving.verify",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    config.add_flags(parser)
    parser.add_argument("--k", type=int, help="drafts per round, over the config's")
    parser.add_argument("--samples", type=int, default=256, help="seeds per test (256)")
    parser.add_argument("--prompts_file", metavar="JSONL", help="texts to decode behind")
    flags = config.parse_flags(parser, arguments)
    if flags.samples < 1:
        raise UserError(f"--samples={flags.samples} must be at least 1")
    texts = [{"prompt": text} for text in TEXTS]
    job = sps.Job(
        lines=sps.read_lines(flags.prompts_file) if flags.prompts_file else tuple(texts),
        instead=functools.partial(verify, samples=flags.samples),
    )
    keep_programs()
    configured = config.load(
        sps.sps,
        sps.SETTINGS,
        files=flags.gin_file,
        bindings=flags.gin_bindings,
        supplied={"run_dir": flags.run_dir, "dry_run": flags.dry_run, "k": flags.k, "job": job},
    )
    return configured.stage()


if __name__ == "__main__":
    end_with(main)
