"""Numbers and tables of reports: how they are written, with their units."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pipeline.acceptance_artifact import Interval
from pipeline.profile_artifact import Quantiles

NOTHING = "-"


def number(value: float | None, digits: int = 3) -> str:
    """With so many significant digits, `1,234` from a thousand on."""
    if value is None:
        return NOTHING
    if abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return f"{value:#.{digits}g}".rstrip(".")


def ms(value: float | None) -> str:
    """Milliseconds."""
    return NOTHING if value is None else f"{number(value)} ms"


def times(value: float | None) -> str:
    """A factor, as the paper writes speed-ups."""
    return NOTHING if value is None else f"{value:.2f}x"


def percent(value: float | None, signed: bool = False) -> str:
    """A share."""
    if value is None:
        return NOTHING
    return f"{100 * value:+.1f}%" if signed else f"{100 * value:.1f}%"


def count(value: float | None) -> str:
    """A whole number."""
    return NOTHING if value is None else f"{value:,.0f}"


def size(num_bytes: float) -> str:
    """Bytes with a decimal prefix."""
    for factor, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if num_bytes >= factor:
            return f"{number(num_bytes / factor)} {unit}"
    return f"{num_bytes:.0f} B"


def spread(quantiles: Quantiles) -> str:
    """The median with the 10th and 90th percentiles."""
    return f"{number(quantiles.p50)} ({number(quantiles.p10)} to {number(quantiles.p90)})"


def interval(found: Interval, digits: int = 3) -> str:
    """An estimate with its 95% interval."""
    value, low, high = (number(part, digits) for part in (found.value, found.low, found.high))
    return f"{value} ({low} to {high})"


def where(placement: str, chips_per_copy: int) -> str:
    """Where a drafter lies."""
    if placement == "leader":
        return "leader"
    return f"{placement}, {chips_per_copy} chips per copy" if chips_per_copy else placement


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of a report.

    Attributes:
      title: what it shows, with the unit where all columns share it.
      columns: headings; a trailing ">" marks a column of numbers, aligned to the right.
      rows: cells as text; the first one names the row.
      note: a sentence below it.
      open: shown without being asked for.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    open: bool = True

    @property
    def headings(self) -> list[tuple[str, bool]]:
        """Every heading, and whether its column holds numbers."""
        return [(column.removesuffix(">"), column.endswith(">")) for column in self.columns]


def table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    note: str = "",
    open: bool = True,
) -> Table | None:
    """A table, None without rows."""
    lines = tuple(tuple(row) for row in rows)
    if not lines:
        return None
    return Table(title=title, columns=tuple(columns), rows=lines, note=note, open=open)


def as_text(shown: Table) -> str:
    """The table for a terminal; nothing in it can move the cursor."""
    lines = [
        [name for name, _ in shown.headings],
        *([_safe(cell) for cell in r] for r in shown.rows),
    ]
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    right = [numeric for _, numeric in shown.headings]
    return "".join(
        "  ".join(
            cell.rjust(width) if numeric else cell.ljust(width)
            for cell, width, numeric in zip(line, widths, right, strict=True)
        ).rstrip()
        + "\n"
        for line in lines
    )


def _safe(text: str) -> str:
    """Without control characters, which a name in an artifact may hold."""
    return "".join("?" if unicodedata.category(c).startswith("C") else c for c in text)
