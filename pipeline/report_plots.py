"""The figures of a report: which there are, and what they show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from matplotlib.figure import Figure

from pipeline.report_evidence import Evidence


@dataclass(frozen=True, kw_only=True)
class Plot:
    """One figure.

    Attributes:
      name: of its image in TensorBoard.
      title: a few words.
      description: what it shows, also for those who do not see it.
      draw: None where the evidence has nothing to draw.
    """

    name: str
    title: str
    description: str
    draw: Callable[[Evidence], Figure | None]


RESULTS: tuple[Plot, ...] = ()
CHOICE: tuple[Plot, ...] = ()
ACCEPTANCE: tuple[Plot, ...] = ()
MESH: tuple[Plot, ...] = ()
