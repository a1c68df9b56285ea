"""All stages in order: `python -m pipeline.run --gin_file=gin/quickstart.gin`.

Every stage is a process of its own, because stages want different numbers of devices and JAX settles that
once. Stages meet only in the run directory, and each one knows what is up to date: a run that was stopped
anywhere goes on when the same command is given again, and a finished one does nothing.
"""

from __future__ import annotations

import argparse
import importlib
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pipeline.core import config
from pipeline.core.checks import STAGES
from pipeline.core.errors import UserError, end_with
from pipeline.core.run_dir import RunDir
from pipeline.run_children import Children
from pipeline.run_durations import Durations, in_words

Stage = Literal["generate", "train", "profile", "evaluate", "codesign"]

ORDER: tuple[Stage, ...] = ("generate", "train", "profile", "evaluate", "codesign")
SETTINGS = ()


@dataclass(frozen=True, kw_only=True)
class Command:
    """The configs that every stage is started with.

    Attributes:
      files: of --gin_file.
      bindings: of --gin.NAME=VALUE.
    """

    files: tuple[str, ...] = ()
    bindings: tuple[str, ...] = ()

    @property
    def flags(self) -> list[str]:
        """As a command line."""
        files = [f"--gin_file={file}" for file in self.files]
        return [*files, *(f"--gin.{binding}" for binding in self.bindings)]


def run(
    *,
    run_dir: str,
    stages: tuple[Stage, ...] = (),
    command: Command = Command(),
    dry_run: bool = False,
) -> int:
    """Runs stages as child processes, in order, until one fails.

    Args:
      run_dir: of all stages; overrides their own.
      stages: which; () for all that the config sets more of than their run_dir.
      command: the configs, for the children.
      dry_run: let every stage print its plan and stop.

    Returns:
      0, the exit code of the stage that failed, or 128 + the signal that stopped the run.

    Raises:
      UserError: no stage is configured, or another run is at work in this directory.
    """
    names = _in_order(stages, command.files)
    work = _Run(RunDir.at(run_dir), command, names)
    with Children() as children:
        if dry_run:
            return work.dry(children)
        with work.run.lock("run"):
            return work.check_later_stages(children) or work.all(children)


def _in_order(chosen: Sequence[Stage], files: Sequence[str]) -> list[Stage]:
    wanted = set(chosen) or config.configured_stages(*files)
    names: list[Stage] = [stage for stage in ORDER if stage in wanted]
    if names:
        return names
    raise UserError(
        f"{', '.join(files) or 'no --gin_file'}: configures none of {', '.join(ORDER)}; include a file "
        "of gin/stages, or name the stages in run.stages"
    )


def check(names: Sequence[str], command: Command, run_dir: str) -> None:
    """Reads the configs as each of these stages would.

    Raises:
      UserError: the first thing that one of them refuses.
    """
    for name in names:
        module = importlib.import_module(STAGES[name])
        config.load(
            getattr(module, name),
            module.SETTINGS,
            files=command.files,
            bindings=command.bindings,
            supplied={"run_dir": run_dir},
        )


class _Run:
    """One pass over the stages."""

    def __init__(self, run: RunDir, command: Command, names: Sequence[Stage]):
        self.run, self.command, self.names = run, command, names

    def dry(self, children: Children) -> int:
        """Lets every stage print its plan."""
        for name in self.names:
            _say(f"{name}:")
            if code := children.call(self._command(STAGES[name], "--dry_run")):
                return code
        return 0

    def check_later_stages(self, children: Children) -> int:
        """Refuses a wrong value for the last stage now, not after the hours of the first.

        The first stage checks its own in a moment. In a child, so that the imports of all stages do not
        stay in memory.
        """
        if len(self.names) < 2:
            return 0
        later = f"--check={','.join(self.names[1:])}"
        return children.call(self._command("pipeline.run", later))

    def all(self, children: Children) -> int:
        """Runs every stage, then prints what came of it."""
        began, durations = time.monotonic(), Durations.of(self.run)
        for index, name in enumerate(self.names):
            heading = f"[{index + 1}/{len(self.names)}] {name}"
            _say(f"{heading}{durations.outlook(self.names[index:])}")
            with durations.measured(name) as measured:
                code = self._call(children, name)
                measured.complete = code == 0
            if code:
                return code
            _say(f"{heading}: {measured}")
        _say(f"all stages took {in_words(time.monotonic() - began)}")
        sys.stdout.write(_conclusion(self.run))
        return 0

    def _call(self, children: Children, name: Stage) -> int:
        code = children.call(self._command(STAGES[name]))
        if children.received:
            _say(f"stopped in {name}; {self._go_on()}")
        elif code:
            _render(self.run)
            _say(f"error: {name} ended with exit code {code}; {self._go_on()}")
        return code

    def _command(self, module: str, *more: str) -> list[str]:
        flags = [*self.command.flags, f"--run_dir={self.run.root}", *more]
        return [sys.executable, "-m", module, *flags]

    def _go_on(self) -> str:
        flags = [*self.command.flags, f"--run_dir={self.run.root}"]
        return (
            "what is done is kept, the same command goes on from there: "
            f"python -m pipeline.run {shlex.join(flags)}"
        )


def _render(run: RunDir) -> None:
    """The report of what is there, which the stages left to this process."""
    from pipeline import report

    report.update(run)


def _conclusion(run: RunDir) -> str:
    """The table of results and where the report is."""
    from pipeline import report  # JAX and matplotlib must not take memory while the stages run

    return report.conclude(run)


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m pipeline.run", description=__doc__)
    config.add_flags(parser)
    parser.add_argument("--check", metavar="STAGES", help=argparse.SUPPRESS)
    flags = config.parse_flags(parser)
    command = Command(files=tuple(flags.gin_file), bindings=tuple(flags.gin_bindings))
    if flags.check:
        check(flags.check.split(","), command, flags.run_dir)
        return 0
    configured = config.load(
        run,
        SETTINGS,
        files=command.files,
        bindings=command.bindings,
        supplied={"run_dir": flags.run_dir, "dry_run": flags.dry_run},
    )
    return configured.stage(command=command)


if __name__ == "__main__":
    end_with(main)
