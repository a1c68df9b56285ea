"""Arms of one tool in a process of its own, with its own memory, threads and start-up.

`python -m tools.bench_worker TOOL` reads a `Work` as JSON from the first line of stdin, answers with the
names of its arms, and then plays what each line asks for. What libraries print goes to stderr.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from pipeline.core.errors import UserError, run_cli
from tools.bench_arms import Arm, Run, Work, arms_of, peak_bytes


class Played(NamedTuple):
    """One call of an arm."""

    run: Run
    seconds: float
    peak_bytes: int  # most memory that the process has held so far


class Worker:
    """A tool's process.

    Args:
      tool: whose arms.
      work: what they do.

    Attributes:
      arms: their names.
    """

    def __init__(self, tool: str, work: Work):
        command = [sys.executable, "-m", "tools.bench_worker", tool]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._tool = tool
        self.arms: list[str] = self._ask(dataclasses.asdict(work))

    def play(self, arm: str, tokens: int) -> Played:
        """The arm's answer of so many tokens."""
        answer = self._ask({"arm": arm, "tokens": tokens})
        run = Run(tuple(answer["tokens"]), answer["passes"])
        return Played(run, answer["seconds"], answer["peak_bytes"])

    def _ask(self, question: Mapping[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # its exit code says why
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            self.close()
            raise UserError(f"{self._tool} ended with exit code {code}; what it said is above")
        return json.loads(line)

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.communicate()


@contextlib.contextmanager
def working(tool: str, work: Work) -> Iterator[Worker]:
    """A worker that ends with the block."""
    worker = Worker(tool, work)
    try:
        yield worker
    finally:
        worker.close()


def main() -> int:
    """The process's side."""
    questions = (json.loads(line) for line in sys.stdin)
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        arms = arms_of(sys.argv[1], Work(**next(questions)))
        for answer in _answers(arms, questions):
            answers.write(json.dumps(answer) + "\n")
            answers.flush()
    return 0


def _answers(arms: Mapping[str, Arm], questions: Iterator[Mapping[str, Any]]) -> Iterator[Any]:
    yield list(arms)
    for question in questions:
        started = time.perf_counter()
        run = arms[question["arm"]](question["tokens"])
        seconds = time.perf_counter() - started
        yield {**run._asdict(), "seconds": seconds, "peak_bytes": peak_bytes()}


if __name__ == "__main__":
    sys.exit(run_cli(main))
