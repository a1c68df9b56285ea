"""From the times of cells to what `profile.json` holds: steps, layers, rounds."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

import numpy as np

from pipeline import latency
from pipeline.core import artifacts
from pipeline.latency import Machine
from pipeline.profile_artifact import Layer, ProfiledTopology, Quantiles, Round, Step
from pipeline.profile_grid import Plan, RoundCell, Seat, StepCell
from pipeline.step_times import Timed
from pipeline.work import Pass, Work, width_utilisation, without_collectives, work_of

Times = Mapping[str, Timed]  # by the cell's key

_TURN_FIELDS = 4  # integers of a turn beside its block and drafts (`serving.speculation.Turn`)
_TOLERATED = 0.25  # disagreement of a layer's collectives with the fit that is worth a note


# --------------------------------------------------------------------------------------------------
# Steps
# --------------------------------------------------------------------------------------------------


def steps(
    cells: Iterable[StepCell],
    times: Times,
    mesh: ProfiledTopology,
    dtype: str,
) -> tuple[Step, ...]:
    """A step of every cell whose collectives are in place; decode steps dispatched one by one too."""
    return tuple(
        step for cell in cells if not cell.apart for step in _steps(cell, times, mesh, dtype)
    )


def _steps(cell: StepCell, times: Times, mesh: ProfiledTopology, dtype: str) -> Iterator[Step]:
    timed = times[cell.key]
    found: dict[Literal["fused", "single"], Quantiles] = {"fused": timed.fused}
    if cell.phase == "decode":
        found["single"] = timed.single
    for dispatch, latency_ms in found.items():
        bandwidth, flops = _utilisation(cell, latency_ms.p50, mesh, dtype)
        yield Step(
            model=cell.model,
            shape=artifacts.to_json(cell.shape),
            chips=mesh.num_chips,
            chips_per_copy=cell.seat.chips,
            placement=cell.seat.placement,
            batch=cell.batch,
            tokens=cell.tokens,
            context=cell.context,
            capacity=cell.capacity,
            phase=cell.phase,
            dispatch=dispatch,
            latency_ms=latency_ms,
            collectives_per_layer=_per_layer(cell, timed),
            layer_collective_us=_layer_collective_us(cell, times),
            bandwidth_utilisation=bandwidth,
            flop_utilisation=flops,
            source="measured",
            width_utilisation=width_utilisation(cell.shape, cell.seat.chips, mesh.platform),
        )


def pass_of(cell: StepCell) -> Pass:
    """What a cell's pass does."""
    last_only = cell.phase == "prefill"
    return Pass(cell.batch, cell.tokens, cell.context, cell.capacity, last_only)


def work_of_cell(cell: StepCell, chips: int, dtype: str) -> Work:
    """What a cell's pass must do on a mesh of `chips`."""
    busy = 1 if cell.seat.placement == "leader" else chips
    work = work_of(cell.shape, cell.seat.chips, busy, pass_of(cell), dtype)
    return without_collectives(work) if cell.apart else work


def observations(
    cells: Iterable[StepCell], times: Times, machine: Machine
) -> list[latency.Observation]:
    """Steps that a latency model is fitted to: all but prompts, which arithmetic alone bounds."""
    return [
        latency.Observation(
            work=work_of_cell(cell, machine.chips, machine.dtype),
            us=1e3 * times[cell.key].fused.p50,
            shape=cell.shape,
            judged=not cell.apart,
        )
        for cell in cells
        if cell.phase != "prefill"
    ]


def _utilisation(
    cell: StepCell, ms: float, mesh: ProfiledTopology, dtype: str
) -> tuple[float, float]:
    """Of bandwidth and arithmetic, of the chips that work; a host's chips draw from one memory."""
    work = work_of_cell(cell, mesh.num_chips, dtype)
    chips = mesh.num_chips if mesh.platform == "cpu" else work.busy
    per_s = work.busy * 1e3 / ms / chips
    read = work.weight_bytes + work.cache_bytes
    return per_s * read / mesh.hbm_bytes_per_s, per_s * work.flops / mesh.flop_per_s


def _per_layer(cell: StepCell, timed: Timed) -> float:
    """All-reduces of a layer in the compiled program; the embedding's and a leader's last word are none."""
    if cell.seat.placement == "leader":
        return 0.0
    return (timed.reduces - cell.shape.collectives(cell.seat.chips).embedding) / (
        cell.shape.num_layers
    )


def _layer_collective_us(cell: StepCell, times: Times) -> float | None:
    """Of one layer: the step with its collectives less without, which has those of embedding and head too."""
    without = times.get(dataclasses.replace(cell, apart=True).key)
    if without is None:
        return None
    counts = cell.shape.collectives(cell.seat.chips)
    share = counts.layers / sum(counts)
    removed_ms = times[cell.key].fused.p50 - without.fused.p50
    return 1e3 * share * removed_ms / cell.shape.num_layers


def unexpected_collectives(cells: Iterable[StepCell], times: Times) -> Iterator[str]:
    """Steps whose program has other collectives than the shape's formula says."""
    for cell in cells:
        if cell.apart or cell.seat.placement == "leader":
            continue
        counted, formula = times[cell.key], cell.shape.collectives(cell.seat.chips)
        expected = formula.layers + formula.embedding, formula.logits
        if (counted.reduces, counted.gathers) != expected:
            yield (
                f"{cell.key}: the program has {counted.reduces} all-reduces and {counted.gathers} "
                f"all-gathers, the shape's formula says {expected[0]} and {expected[1]}"
            )


# --------------------------------------------------------------------------------------------------
# Layers
# --------------------------------------------------------------------------------------------------


def layers(plan: Plan, times: Times, machine: Machine) -> tuple[Layer, ...]:
    """The target's layers, from two depths with and without collectives."""
    cells = plan.layer_steps()
    return tuple(
        _layer(plan, cells[first : first + 3], times, machine) for first in range(0, len(cells), 3)
    )


def _layer(plan: Plan, cells: Sequence[StepCell], times: Times, machine: Machine) -> Layer:
    flat, deep_apart, flat_apart = cells
    deep = plan.pass_of(plan.target, plan.everywhere, flat.batch, flat.tokens, flat.context)
    more = deep.shape.num_layers - flat.shape.num_layers

    def us(cell: StepCell) -> float:
        return 1e3 * times[cell.key].fused.p50

    whole = (us(deep) - us(flat)) / more
    arithmetic = (us(deep_apart) - us(flat_apart)) / more
    return Layer(
        model=plan.target.name,
        tokens=flat.tokens,
        batch=flat.batch,
        arithmetic_us=arithmetic,
        collective_us=whole - arithmetic,
        fixed_us=us(deep) - whole * deep.shape.num_layers,
        expected_collective_us=_expected_us(deep, machine),
    )


def _expected_us(cell: StepCell, machine: Machine) -> float:
    chips, shape = cell.seat.chips, cell.shape
    work = work_of_cell(cell, chips, machine.dtype)
    per_layer = shape.collectives(chips).layers / shape.num_layers
    return per_layer * machine.collective_us("all_reduce", chips, work.reduce_bytes)


def disagreements(found: Iterable[Layer]) -> Iterator[str]:
    """How a layer's collectives in place compare with the same collectives alone."""
    for layer in found:
        if layer.expected_collective_us <= 0:
            continue
        ratio = layer.collective_us / layer.expected_collective_us
        agree = "agree" if abs(ratio - 1) <= _TOLERATED else "disagree"
        yield (
            f"collectives of a layer of {layer.model} at {layer.tokens} tokens: "
            f"{layer.collective_us:.0f} us in place, {layer.expected_collective_us:.0f} us by the fit: "
            f"they {agree} ({ratio - 1:+.0%})"
        )


# --------------------------------------------------------------------------------------------------
# Rounds
# --------------------------------------------------------------------------------------------------


def rounds(
    plan: Plan, measured: Sequence[Step], times: Times, machine: Machine
) -> tuple[Round, ...]:
    """Every round of the plan: timed, or predicted from the K that were."""
    parts = _Parts(plan, measured, machine)
    return tuple(parts.round(cell, times) for cell in plan.all_rounds())


class _Parts:
    """The parts of rounds, from steps that were measured."""

    def __init__(self, plan: Plan, measured: Sequence[Step], machine: Machine):
        self._plan, self._machine = plan, machine
        self._steps = [s for s in measured if s.dispatch == "fused" and s.phase != "prefill"]

    def round(self, cell: RoundCell, times: Times) -> Round:
        """The round of a cell, timed or not."""
        timed = times.get(cell.key)
        draft, score, broadcast = self._parts(cell)
        return Round(
            drafter=cell.drafter,
            placement=cell.seat.placement,
            chips_per_copy=cell.seat.chips,
            k=cell.k,
            rule=cell.rule,
            batch=cell.batch,
            context=cell.context,
            draft_ms=draft,
            score_ms=score,
            broadcast_us=broadcast,
            round_ms=timed.fused if timed else self._predicted(cell, times),
            source="measured" if timed else "predicted",
        )

    def _parts(self, cell: RoundCell) -> tuple[float, float, float]:
        """Milliseconds of k drafter passes and of scoring k + 1 tokens, microseconds of the broadcast."""
        score = self._step_ms(self._plan.target.name, self._plan.everywhere, cell, cell.k + 1)
        draft = 0.0
        if cell.shape:  # two tokens may be pending when a round begins
            one, two = (self._step_ms(cell.drafter, cell.seat, cell, tokens) for tokens in (1, 2))
            draft = two + (cell.k - 1) * one
        return draft, score, self._broadcast_us(cell)

    def _step_ms(self, model: str, seat: Seat, cell: RoundCell, tokens: int) -> float:
        """At T tokens, interpolated between those measured."""
        curve = {
            step.tokens: step.latency_ms.p50
            for step in self._steps
            if (step.model, step.batch, step.context) == (model, cell.batch, cell.context)
            and (step.placement, step.chips_per_copy) == (seat.placement, seat.chips)
        }
        return _line(tokens, curve)

    def _broadcast_us(self, cell: RoundCell) -> float:
        chips = self._plan.topology.num_chips
        leads = cell.seat.placement == "leader" or not cell.k
        if not leads or chips == 1:
            return 0.0
        integers = cell.batch * (2 * cell.k + 1 + _TURN_FIELDS)
        return self._machine.collective_us("all_reduce", chips, 4 * integers)

    def _predicted(self, cell: RoundCell, times: Times) -> Quantiles:
        """The parts of this K, and what timed rounds took beyond theirs."""
        beyond: dict[int, list[float]] = {}
        spread: dict[int, Quantiles] = {}
        for other in self._plan.rounds():
            if self._tells_of(other, cell):
                found = times[other.key].fused
                beyond.setdefault(other.k, []).append(found.p50 - self._sum(other))
                spread[other.k] = found
        ms = self._sum(cell) + _line(
            cell.k, {k: float(np.mean(all_)) for k, all_ in beyond.items()}
        )
        nearest = spread[min(spread, key=lambda k: abs(k - cell.k))]
        factor = ms / nearest.p50
        return Quantiles(p10=nearest.p10 * factor, p50=ms, p90=nearest.p90 * factor)

    def _tells_of(self, timed: RoundCell, cell: RoundCell) -> bool:
        """Whether a timed round tells what another takes beyond its passes; plain decoding does, at K = 0."""
        if (timed.batch, timed.context) != (cell.batch, cell.context):
            return False
        own = timed.drafter == cell.drafter or (
            timed.shape is not None and not self._plan.is_timed(cell.drafter)
        )
        return not timed.k or (own and (timed.seat, timed.rule) == (cell.seat, cell.rule))

    def _sum(self, cell: RoundCell) -> float:
        draft, score, broadcast = self._parts(cell)
        return draft + score + broadcast / 1e3


def _line(at: int, points: Mapping[int, float]) -> float:
    """Linear between points, and beyond the last two as between them, but never falling."""
    known = sorted(points)
    values = [points[x] for x in known]
    if at > known[-1] and len(known) > 1:
        slope = max(0.0, (values[-1] - values[-2]) / (known[-1] - known[-2]))
        return float(values[-1] + slope * (at - known[-1]))
    return float(np.interp(at, known, values))
