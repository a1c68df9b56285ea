"""A profile in lines, for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pipeline.collective_fit import where_latency_bound_ends
from pipeline.latency import GOOD_MEDIAN, GOOD_WORST
from pipeline.profile_artifact import LatencyModel, Profile


def model_notes(model: LatencyModel | None) -> Iterator[str]:
    if model is None:
        yield "no latency model: it takes at least two shapes"
        return
    good = model.median_error <= GOOD_MEDIAN and model.worst_error <= GOOD_WORST
    yield (
        f"the latency model is off by {model.median_error:.0%} in the median and {model.worst_error:.0%} at "
        f"worst on shapes that were left out of its fit{'' if good else ': do not trust it for new shapes'}"
    )


def summary(found: Profile) -> Iterator[str]:
    for curve in found.alpha_beta.values():
        if curve.chips == found.topology.num_chips:
            yield where_latency_bound_ends(curve, _width(found))
    for step in found.steps:
        if step.dispatch == "fused":
            yield (
                f"{step.model:24} {step.phase:7} T = {step.tokens:<4} {step.placement:8} "
                f"{step.chips_per_copy:3} chips {step.latency_ms.p50:9.3f} ms  "
                f"bandwidth {step.bandwidth_utilisation:4.0%}  flops {step.flop_utilisation:4.0%}"
            )
    yield from _round_lines(found)
    yield from _compiled_lines(found)
    yield from found.notes


def _width(found: Profile) -> int:
    widths: Iterable[int] = (s.shape["width"] for s in found.steps if s.model == found.target)
    return next(iter(widths), 1)


def _round_lines(found: Profile) -> Iterator[str]:
    timed = [one for one in found.rounds if one.source == "measured"]
    for one in timed:
        who = f"{one.drafter} K = {one.k}, {one.placement}" if one.k else "plain decoding"
        rest = one.round_ms.p50 - one.draft_ms - one.score_ms - one.broadcast_us / 1e3
        yield (
            f"round of {who:28} {one.round_ms.p50:9.3f} ms = draft {one.draft_ms:.3f} + score "
            f"{one.score_ms:.3f} + broadcast {one.broadcast_us / 1e3:.3f} + the rest {rest:.3f}"
        )
    if predicted := len(found.rounds) - len(timed):
        yield f"{predicted} more rounds, of other K or drafters, are predicted from their passes"


def _compiled_lines(found: Profile) -> Iterator[str]:
    for one in found.compiled:
        held = one.argument_bytes + one.temporary_bytes + one.output_bytes
        counted = ", ".join(f"{count} {kind}" for kind, count in one.collectives.items())
        cycles = f", {one.estimated_cycles:,.0f} cycles" if one.estimated_cycles else ""
        yield (
            f"compiled for {one.topology}: {one.model} T = {one.tokens}: {held / 1e9:.2f} GB per chip "
            f"({'fits' if one.fits else 'does not fit'}), {counted or 'no collectives'}{cycles}"
        )
