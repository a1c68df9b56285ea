"""Benchmarks that anyone can repeat. Speed is stated as ratios of arms that alternate in one process.

    python -m tools.bench decode [--model=DIR]      plain decoding beside transformers; needs the bench extra
    python -m tools.bench peers [--drafter=DIR]     speculation beside transformers; needs the bench extra
    python -m tools.bench speculate [--sixteen]     speculation beside plain decoding
    python -m tools.bench train                     a training step against the matrix-product peak

Run them on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from pipeline.core.errors import run_cli


def _decode(arguments: Sequence[str]) -> int:
    from tools import bench_decode

    return bench_decode.main(arguments)


def _peers(arguments: Sequence[str]) -> int:
    from tools import bench_peers

    return bench_peers.main(arguments)


def _speculate(arguments: Sequence[str]) -> int:
    from tools import bench_speculate

    return bench_speculate.main(arguments)


def _train(arguments: Sequence[str]) -> int:
    from tools import bench_train

    bench_train.train(arguments)
    return 0


BENCHMARKS: dict[str, Callable[[Sequence[str]], int]] = {
    "decode": _decode,
    "peers": _peers,
    "speculate": _speculate,
    "train": _train,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("benchmark", choices=sorted(BENCHMARKS))
    given, rest = parser.parse_known_args(arguments)
    return BENCHMARKS[given.benchmark](rest)


if __name__ == "__main__":
    sys.exit(run_cli(main))
