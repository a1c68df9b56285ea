"""The look of plots: as SVG for a page, as PNG for TensorBoard."""

import re

import pytest

from pipeline import figures


@figures.styled()
def example(label="wide", title="Time"):
    figure, axes = figures.panel(x="K", y="ms per token", title=title)
    axes.plot([1, 2], [3, 4], label=label, **figures.series(0))
    figures.band(axes, [1, 2], [2, 3], [4, 5], 0)
    figures.legend(axes)
    return figure


def test_svg_is_one_element_that_takes_the_size_of_its_page():
    svg = figures.svg(example(), "time against K")
    assert svg.startswith("<svg ")
    assert svg.endswith("</svg>")
    opening = svg[: svg.index(">")]
    assert "viewBox=" in opening
    assert " width=" not in opening
    assert 'role="img" aria-label="time against K"' in opening
    for foreign in ("<?xml", "<!DOCTYPE", "<metadata", "<style"):
        assert foreign not in svg


def test_every_color_can_be_redefined_by_the_page():
    svg = figures.svg(example())
    assert f"stroke: var(--plot-0, {figures.SERIES[0]})" in svg
    assert f"fill: var(--plot-ink, {figures.INK})" in svg
    assert not re.findall(r"(?:fill|stroke): #", svg)


def test_two_figures_share_no_id():
    first, second = (figures.svg(example(label)) for label in ("wide", "deep"))
    ids = [set(re.findall(r'\bid="([^"]+)"', svg)) for svg in (first, second)]
    assert ids[0]
    assert not ids[0] & ids[1]
    for svg, own in zip((first, second), ids, strict=True):
        used = re.findall(r'href="#([^"]+)"', svg) + re.findall(r"url\(#([^)]+)\)", svg)
        assert used
        assert set(used) <= own


def test_the_same_figure_gives_the_same_bytes():
    assert figures.svg(example()) == figures.svg(example())
    assert figures.png(example()) == figures.png(example())


def test_names_are_shown_as_they_are():
    """A model may be named with what matplotlib takes for mathematics, XML for markup, or no font has."""
    svg = figures.svg(example("a$\\frac$<b>& 图"))
    assert "a$\\frac$&lt;b&gt;&amp; 图" in svg
    assert figures.png(example("a$\\frac$", "图"))


def test_a_long_name_leaves_room_for_the_plot():
    svg = figures.svg(example("n" * 500))
    assert "n" * 57 + "...<" in svg
    assert "n" * 58 not in svg


def test_the_page_gives_a_single_panel_its_title():
    assert "Time" not in figures.svg(example(title="Time"))
    figure, rows = figures.panels(1, 2)
    for axes, title in zip(rows[0], ("Left", "Right"), strict=True):
        with figures.styled():
            axes.set_title(title)
    assert "Left" in figures.svg(figure)


def test_there_is_no_half_a_draft():
    figure, axes = figures.panel(x="K", y="ms")
    axes.plot([1, 2, 3], [1, 2, 3])
    axes.set_yticks([1, 2, 3])
    assert ">1.50</text>" in figures.svg(figure)
    figures.whole_x(axes)
    assert ".5" not in "".join(re.findall(r">([^<]*)</text>", figures.svg(figure)))


def test_ticks_of_a_logarithmic_axis_are_numbers():
    figure, axes = figures.panel(x="KiB", y="us")
    axes.plot([1, 1024], [1, 2])
    axes.set_xscale("log", base=2)
    svg = figures.svg(figure)
    assert ">1024</text>" in svg
    assert "math" not in svg


def test_png():
    png = figures.png(example(), dpi=50)
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = int.from_bytes(png[16:20]), int.from_bytes(png[20:24])
    assert (width, height) == (
        int(50 * figures.WIDTH_INCHES),
        int(50 * figures.HEIGHT_INCHES),
    )


def test_many_series_have_their_legend_below():
    figure, axes = figures.panel(x="x", y="y")
    for index in range(6):
        axes.plot([0, 1], [0, index], label=str(index), **figures.series(index))
    figures.legend(axes)
    assert axes.get_legend() is not None
    bare, axes = figures.panel(x="x", y="y")
    figures.legend(axes)
    assert axes.get_legend() is None
    assert figures.svg(figure) != figures.svg(bare)


@pytest.mark.parametrize("ground", ["#ffffff", "#f5f7f9"])
def test_colors_are_visible_on_light_grounds(ground):
    """WCAG 2.1 asks for a contrast of 3 for graphics and 4.5 for text."""
    assert min(contrast(color, ground) for color in figures.SERIES) >= 3
    assert contrast(figures.INK, ground) >= 4.5


def contrast(first, second):
    light, dark = sorted((luminance(first), luminance(second)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def luminance(color):
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
