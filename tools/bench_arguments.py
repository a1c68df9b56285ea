"""Arguments that the benchmarks' command lines have in common."""

from __future__ import annotations

import argparse


def positive(text: str) -> int:
    """For argparse: a number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def positives(text: str) -> list[int]:
    """For argparse: numbers by commas."""
    return [positive(part) for part in text.split(",")]
