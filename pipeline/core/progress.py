"""How far long work is: a bar on a terminal, a line now and then in a log."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm

_LINES_EVERY_S = 30.0


def progress_bar(
    over: Iterable | None = None,
    *,
    total: int | None = None,
    unit: str,
    description: str = "",
    initial: int = 0,
    shown: bool = True,
) -> tqdm:
    """A bar over what is iterated, or one to be updated.

    Args:
      over: what is iterated.
      total: of units; by default the length of `over`.
      unit: one of them, as a word.
      description: what is being done.
      initial: units that were done before.
      shown: nothing is shown without.
    """
    terminal = sys.stderr.isatty()
    settings: dict[str, Any] = dict(iterable=over, total=total, unit=unit, initial=initial)
    if terminal:
        settings |= dict(dynamic_ncols=True)
    else:
        settings |= dict(mininterval=_LINES_EVERY_S, maxinterval=2 * _LINES_EVERY_S)
    kind = tqdm if terminal else _Lines
    return kind(**settings, desc=description, disable=not shown)


class _Lines(tqdm):
    """Writes a line now and then; work that is shorter than their distance says nothing."""

    _said_s = 0.0  # when the last line was written, since the beginning

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        """A line instead of a bar; a new description is no reason for one."""
        elapsed = self._elapsed()
        if self.n > self.initial and elapsed - self._said_s >= self.mininterval:
            self._said_s = elapsed
            self.fp.write(f"{self._said()}\n")

    def clear(self, nolock: bool = False) -> None:
        """Lines stay."""

    def close(self) -> None:
        """No last line: who works says what was done."""
        if not self.disable:
            self.disable = True
            self._decr_instances(self)  # pyright: ignore[reportAttributeAccessIssue]

    def _elapsed(self) -> float:
        return self.format_dict["elapsed"]

    def _said(self) -> str:
        told, elapsed = self.format_dict, self._elapsed()
        name = f"{self.desc.rstrip(': ')}: " if self.desc else ""
        total = f"/{self.total}" if self.total else ""
        left = ""
        if self.total:
            rest = (self.total - self.n) * elapsed / (self.n - self.initial)
            left = f", {tqdm.format_interval(rest)} left"
        return f"{name}{self.n}{total} {told['unit']}{left}"
