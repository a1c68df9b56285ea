"""One look for every plot: colours, lines, fonts, and how a figure becomes SVG or PNG.

A plot is a function from an artifact to a matplotlib `Figure`, without state of its own:

    @figures.styled()
    def acceptance_by_position(acceptance: Acceptance) -> Figure:
        figure, axes = figures.panel(x="draft position", y="probability")
        for index, result in enumerate(acceptance.results):
            axes.plot(positions, result.survival, label=result.drafter, **figures.series(index))
        figures.legend(axes)
        return figure

Colours tell series apart for all common kinds of colour blindness, markers and dashes without colour. `svg`
writes every colour of this module as a CSS variable with itself as the fallback, so that a page can
show the same figure on a light and on a dark ground.
"""

from __future__ import annotations

import contextlib
import hashlib
import html
import io
import re
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import matplotlib
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter, LogFormatter, MaxNLocator, NullFormatter

# Wong 2011 (Nature Methods 8:441), darkened where the contrast on white was below 3:1.
SERIES = ("#0072b2", "#d55e00", "#008a64", "#b0508a", "#9a7200", "#3a8fb7", "#7a4fb5", "#5b6770")
INK = "#1b1f24"  # text and axes
FAINT = "#d5dae0"  # grid lines
GROUND = "#ffffff"  # behind everything; transparent in SVG

# What a page may redefine: `--plot-0` .. `--plot-7`, `--plot-ink`, `--plot-faint`, `--plot-ground`.
_VARIABLES = {
    **{color: f"--plot-{index}" for index, color in enumerate(SERIES)},
    INK: "--plot-ink",
    FAINT: "--plot-faint",
    GROUND: "--plot-ground",
}

_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (6, 1.5, 1.5, 1.5)))

# A phone shows a panel at about 60% of this, with text still legible.
WIDTH_INCHES, HEIGHT_INCHES = 5.2, 3.4
_PNG_DPI = 144
_LONGEST_TEXT = 60  # characters; about as wide as a panel

_STYLE: dict[Any, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": INK,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.labelsize": 9,
    "axes.linewidth": 0.8,
    "axes.prop_cycle": cycler(color=SERIES),
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "errorbar.capsize": 2.5,
    "figure.dpi": 72,
    "figure.facecolor": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    "grid.color": FAINT,
    "grid.linewidth": 0.7,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.5,
    "path.simplify": True,
    "savefig.facecolor": "auto",
    "svg.fonttype": "none",  # text stays text: selectable, searchable, small
    "svg.hashsalt": "draftmesh",  # the same figure gives the same bytes
    "text.color": INK,
    "text.parse_math": False,  # a model may be named "a$b$"
    "xtick.color": INK,
    "xtick.labelsize": 8,
    "ytick.color": INK,
    "ytick.labelsize": 8,
}


@contextlib.contextmanager
def styled() -> Iterator[None]:
    """Matplotlib in this module's look, as a decorator (`@figures.styled()`) or in a `with`."""
    with matplotlib.rc_context(_STYLE):
        yield


def panel(
    *,
    x: str,
    y: str,
    title: str = "",
    width: float = WIDTH_INCHES,
    height: float = HEIGHT_INCHES,
) -> tuple[Figure, Axes]:
    """A figure with one pair of axes; `x` and `y` are the labels, with units. Sizes are in inches."""
    figure, rows = panels(1, 1, width=width, height=height)
    axes = rows[0][0]
    axes.set(xlabel=x, ylabel=y, title=title)
    return figure, axes


def panels(
    rows: int, columns: int, *, width: float = WIDTH_INCHES, height: float = HEIGHT_INCHES, **kwargs
) -> tuple[Figure, list[list[Axes]]]:
    """A figure with `rows` x `columns` axes; `kwargs` go to `Figure.subplots` (`sharex`, ...)."""
    with styled():
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(figure)
        grid = figure.subplots(rows, columns, squeeze=False, **kwargs)
    return figure, [list(row) for row in grid]


def series(index: int, *, marker: bool = True) -> dict[str, Any]:
    """Keyword arguments of `Axes.plot` for the `index`-th series: color, linestyle and marker."""
    look: dict[str, Any] = {
        "color": SERIES[index % len(SERIES)],
        "linestyle": _DASHES[index % len(_DASHES)],
    }
    return {**look, "marker": _MARKERS[index % len(_MARKERS)]} if marker else look


def color(index: int) -> str:
    """The colour of the `index`-th series."""
    return SERIES[index % len(SERIES)]


def band(axes: Axes, x: Sequence[float], low: Sequence[float], high: Sequence[float], index: int):
    """The spread around the `index`-th series."""
    axes.fill_between(x, low, high, color=color(index), alpha=0.16, linewidth=0)


def whole_x(axes: Axes) -> None:
    """Ticks at whole numbers only, for K, positions and layers."""
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def legend(axes: Axes, **kwargs) -> None:
    """A legend if anything is labelled; below the plot where there are many series."""
    handles, labels = axes.get_legend_handles_labels()
    if not handles:
        return
    with styled():
        if len(labels) <= 4:
            axes.legend(**kwargs)
        else:
            below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.18), "ncols": 3}
            axes.legend(**{**below, **kwargs})


def svg(figure: Figure, description: str = "") -> str:
    """An `<svg>` element for a page: no prolog, no fixed size, colours as CSS variables.

    Args:
      figure: any figure; the title of a single panel is left to the page.
      description: what it shows, for those who do not see it.
    """
    if len(figure.axes) == 1:
        figure.axes[0].set_title("", loc="left")
    buffer = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with _drawing(figure):
        figure.savefig(buffer, format="svg", metadata=nothing)
    text = buffer.getvalue()
    element = text[text.index("<svg") :].strip()
    # Matplotlib's style sheet would apply to the whole page; `_opening` sets the same on the element.
    element = re.sub(r"<(metadata|style)\b.*?</\1>", "", element, flags=re.DOTALL)
    element = _own_ids(_css_colors(element))
    return _opening(element, description)


def png(figure: Figure, dpi: int = _PNG_DPI) -> bytes:
    """A PNG file on a white ground."""
    buffer = io.BytesIO()
    with _drawing(figure):
        figure.savefig(buffer, format="png", dpi=dpi, facecolor=GROUND)
    return buffer.getvalue()


@contextlib.contextmanager
def _drawing(figure: Figure) -> Iterator[None]:
    """The look, whatever texts there are: names are other people's."""
    for text in figure.findobj(Text):
        if isinstance(text, Text) and len(text.get_text()) > _LONGEST_TEXT:
            text.set_text(text.get_text()[: _LONGEST_TEXT - 3] + "...")
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            if isinstance(
                axis.get_major_formatter(), LogFormatter
            ):  # formulas, which are text here
                axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
                axis.set_minor_formatter(NullFormatter())
    with styled(), warnings.catch_warnings():
        # Boxes in a PNG for scripts that the font lacks; a crowded plot where names leave no room.
        warnings.filterwarnings("ignore", message=r"Glyph .* missing from font")
        warnings.filterwarnings("ignore", message="constrained_layout not applied")
        yield


def _css_colors(element: str) -> str:
    def variable(match: re.Match[str]) -> str:
        name = _VARIABLES.get(match[2])
        return f"{match[1]}var({name}, {match[2]})" if name else match[0]

    return re.sub(r"((?:fill|stroke): )(#[0-9a-f]{6})\b", variable, element)


def _own_ids(element: str) -> str:
    """Ids that no other figure of a page has."""
    prefix = f"f{hashlib.sha256(element.encode()).hexdigest()[:8]}-"
    element = re.sub(r'\bid="', f'id="{prefix}', element)
    element = re.sub(r'href="#', f'href="#{prefix}', element)
    return re.sub(r"url\(#", f"url(#{prefix}", element)


def _opening(element: str, description: str) -> str:
    """The element with a size that follows the page's and a name."""
    opening, rest = element.split(">", 1)
    box = re.search(r'viewBox="[^"]*"', opening)
    label = html.escape(description, quote=True)
    named = f'role="img" aria-label="{label}"' if description else 'aria-hidden="true"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'{box[0] if box else ""} style="stroke-linejoin: round; stroke-linecap: butt" {named}>{rest}'
    )
