"""What a profile measures: its settings, and the cells that follow from them.

Axes: B batch, T tokens of a pass, S capacity, K drafts. Nothing here touches a device.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from drafters import kv_cache
from drafters.mesh import Topology
from drafters.shapes import TransformerShape
from pipeline.core.errors import UserError
from pipeline.profile_artifact import Phase, Where
from pipeline.stopwatch import Sampling
from pipeline.subjects import Subject
from serving.pair import NGRAM
from serving.sampling import SamplingParams

Rule = Literal["token", "block"]
_ROUNDS_PER_CALL = 8  # that the caches have room for


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """What is measured of models. Each list multiplies the number of programs to compile.

    Attributes:
      tokens: T of the target's passes: 1 is a decode step, K + 1 scores K drafts.
      contexts, batches: of all passes and rounds.
      drafter_tokens: T of the drafters' passes: a round begins with 2 and goes on with 1.
      prompts: tokens of prompts that are taken in at once.
      chips_per_copy: drafters in copies of so many chips side by side, beside one over all chips.
      leader: drafters on the first chip alone, too.
      drafts: K of the rounds.
      timed_drafts: those K that are timed, () for all.
      timed_drafters: those whose rounds are timed, () for all. Other rounds are predicted: they have their
        own passes, and beside them what the timed ones take at the same place.
      rules: of the rounds.
      temperature, top_p: of the rounds: filters take time.
      layer_tokens: T at which the target's collectives are removed and its depth is changed.
      shallow: layers of the second depth, 0 for a third of the target's.
      shapes: more models whose steps the latency model is fitted to and judged by.
      sampling: how long is measured.
    """

    tokens: tuple[int, ...] = (1, 2, 4, 6, 8)
    contexts: tuple[int, ...] = (256,)
    batches: tuple[int, ...] = (1,)
    drafter_tokens: tuple[int, ...] = (1, 2)
    prompts: tuple[int, ...] = (256,)
    chips_per_copy: tuple[int, ...] = ()
    leader: bool = True
    drafts: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7)
    timed_drafts: tuple[int, ...] = ()
    timed_drafters: tuple[str, ...] = ()
    rules: tuple[Rule, ...] = ("token",)
    temperature: float = 0.8
    top_p: float = 0.95
    layer_tokens: tuple[int, ...] = (1,)
    shallow: int = 0
    shapes: tuple[Subject, ...] = ()
    sampling: Sampling = Sampling()

    def __post_init__(self):
        for name in ("tokens", "contexts", "batches", "drafter_tokens", "drafts", "rules"):
            if not getattr(self, name):
                raise ValueError(f"Grid.{name} must not be empty")
            if len(set(getattr(self, name))) < len(getattr(self, name)):
                raise ValueError(f"Grid.{name} = {getattr(self, name)} names something twice")
        for name in ("tokens", "contexts", "batches", "drafter_tokens", "prompts", "drafts"):
            if min(getattr(self, name), default=1) < 1:
                raise ValueError(f"Grid.{name} = {getattr(self, name)} must all be positive")
        SamplingParams(temperature=self.temperature, top_p=self.top_p)
        if self.shallow < 0:
            raise ValueError(f"Grid.shallow = {self.shallow} must not be negative")
        for name in ("tokens", "drafter_tokens"):
            if 1 not in getattr(self, name):
                raise ValueError(
                    f"Grid.{name} = {getattr(self, name)} must hold 1, the decode step"
                )
        for name, inner, outer in (
            ("timed_drafts", self.timed_drafts, self.drafts),
            ("layer_tokens", self.layer_tokens, self.tokens),
        ):
            if unknown := sorted(set(inner) - set(outer)):
                raise ValueError(f"Grid.{name} holds {unknown[0]}, which is none of {outer}")

    def capacity(self, context: int) -> int:
        """S of all caches behind `context` tokens: one for all, since attention reads all of it."""
        longest = max(self.drafts)
        room = max(*self.tokens, _ROUNDS_PER_CALL * (longest + 1) + longest)
        return kv_cache.capacity_for(context + room + kv_cache.SMALLEST_WRITE)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileGrid:
    """What is compiled for devices that are not attached.

    Attributes:
      tokens: T of every model's step.
      interpolated: those T that are taken from their compiled neighbours on either side.
      batches, contexts: of those steps.
    """

    tokens: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7, 8, 9)
    interpolated: tuple[int, ...] = ()
    batches: tuple[int, ...] = (1,)
    contexts: tuple[int, ...] = (1024,)

    def __post_init__(self):
        for name in ("tokens", "batches", "contexts"):
            if min(getattr(self, name), default=0) < 1:
                raise ValueError(
                    f"CompileGrid.{name} = {getattr(self, name)} must list positive numbers"
                )
        whole = set(self.tokens) - set(self.interpolated)
        for count in self.interpolated:
            if count not in self.tokens or not whole or not min(whole) < count < max(whole):
                raise ValueError(
                    f"CompileGrid.interpolated has {count}, which must be one of tokens = {self.tokens} "
                    f"between two that are compiled, {sorted(whole)}"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """Where a model is: `chips` share one copy of it."""

    placement: Where
    chips: int

    def __str__(self) -> str:
        return self.placement if self.placement == "leader" else f"{self.placement} {self.chips}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCell:
    """Passes of one model.

    Attributes:
      apart: its collectives are removed; every chip does as much arithmetic as before.
    """

    model: str
    shape: TransformerShape
    seat: Seat
    batch: int
    tokens: int
    context: int
    capacity: int
    phase: Phase
    apart: bool = False

    @property
    def key(self) -> str:
        """Names the cell within a profile."""
        apart = " apart" if self.apart else ""
        return (
            f"{self.phase} {self.model} {self.seat}{apart} B={self.batch} T={self.tokens} "
            f"context={self.context}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundCell:
    """Rounds of the target and a drafter; plain decoding has none, and K = 0. A lookup has no shape."""

    drafter: str
    shape: TransformerShape | None
    seat: Seat
    k: int
    rule: Rule
    batch: int
    context: int
    capacity: int

    @property
    def key(self) -> str:
        """Names the cell within a profile."""
        who = f"{self.drafter} {self.seat} K={self.k} {self.rule}" if self.k else "plain"
        return f"round {who} B={self.batch} context={self.context}"


Cell = StepCell | RoundCell


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A subject with its shape."""

    name: str
    shape: TransformerShape

    def with_layers(self, count: int) -> Model:
        """The same with another depth."""
        shape = dataclasses.replace(self.shape, num_layers=count)
        return Model(name=f"{self.name} with {count} layers", shape=shape)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All cells of a profile.

    Attributes:
      target, drafters, others: the models; `others` are known to the latency model alone.
      lookup: whether rounds of the n-gram drafter are timed too.
    """

    grid: Grid
    topology: Topology
    target: Model
    drafters: tuple[Model, ...] = ()
    others: tuple[Model, ...] = ()
    lookup: bool = False

    def __post_init__(self):
        names = [model.name for model in self.models]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise UserError(f"the profile has two models named {twice[0]!r}: rename one")
        for model in self.models:
            self._require_context(model)
        layers = self.target.shape.num_layers
        if self.grid.shallow and self.grid.shallow >= layers:
            raise UserError(
                f"Grid.shallow = {self.grid.shallow} must be fewer layers than {self.target.name}'s {layers}"
            )
        for count in self.grid.chips_per_copy:
            self.topology.axes_of(count)
        known = [model.name for model in self.drafters]
        if unknown := sorted(set(self.grid.timed_drafters) - set(known)):
            raise UserError(
                f"Grid.timed_drafters names {unknown[0]!r}; the profile's drafters are {known}"
            )

    def _require_context(self, model: Model) -> None:
        grid, room = self.grid, model.shape.context
        whose = f"the context of {model.name}, {room}"
        new = max(grid.tokens if model is self.target else grid.drafter_tokens)
        if max(grid.contexts) + new > room:
            raise UserError(
                f"Grid.contexts = {grid.contexts} with {new} new tokens exceed {whose}: choose smaller "
                "contexts"
            )
        if model is self.target and max(grid.prompts, default=0) > room:
            raise UserError(f"Grid.prompts = {grid.prompts} exceed {whose}: choose shorter prompts")

    @property
    def models(self) -> tuple[Model, ...]:
        """All of them."""
        return (self.target, *self.drafters, *self.others)

    @property
    def everywhere(self) -> Seat:
        """Over all chips."""
        return Seat(placement="sharded", chips=self.topology.num_chips)

    @property
    def seats(self) -> tuple[Seat, ...]:
        """Where drafters are tried."""
        chips = self.topology.num_chips
        if chips == 1:
            return (self.everywhere,)
        copies = [Seat(placement="copies", chips=n) for n in self.grid.chips_per_copy if n < chips]
        leader = [Seat(placement="leader", chips=1)] if self.grid.leader else []
        return (self.everywhere, *copies, *leader)

    @property
    def shallow(self) -> Model | None:
        """The target with fewer layers; None if it has only one."""
        layers = self.target.shape.num_layers
        count = self.grid.shallow or max(1, layers // 3)
        return self.target.with_layers(count) if count < layers else None

    def target_steps(self) -> list[StepCell]:
        """Passes of the target, each followed by those that tell its layers' parts; then prompts."""
        grid, layers = self.grid, self.layer_steps()
        cells = []
        for batch, context, tokens in itertools.product(grid.batches, grid.contexts, grid.tokens):
            cells.append(self.pass_of(self.target, self.everywhere, batch, tokens, context))
            if (batch, context) == (grid.batches[0], grid.contexts[0]):
                cells += [cell for cell in layers if cell.tokens == tokens]
        return [*cells, *self._prompts()]

    def _prompts(self) -> Iterator[StepCell]:
        for batch, tokens in itertools.product(self.grid.batches, self.grid.prompts):
            yield StepCell(
                model=self.target.name,
                shape=self.target.shape,
                seat=self.everywhere,
                batch=batch,
                tokens=tokens,
                context=0,
                capacity=kv_cache.capacity_for(tokens),
                phase="prefill",
            )

    def layer_steps(self) -> list[StepCell]:
        """The target at two depths without collectives, and with them at the second depth."""
        if self.shallow is None or self.topology.num_chips == 1:
            return []
        batch, context = self.grid.batches[0], self.grid.contexts[0]
        cells = []
        for tokens in self.grid.layer_tokens:
            deep = self.pass_of(self.target, self.everywhere, batch, tokens, context)
            flat = self.pass_of(self.shallow, self.everywhere, batch, tokens, context)
            removed = [dataclasses.replace(cell, apart=True) for cell in (deep, flat)]
            cells += [flat, *removed]
        return cells

    def other_steps(self) -> list[StepCell]:
        """Passes of drafters in every place, without collectives too, and of the other shapes."""
        tried = [(model, seat) for model in self.drafters for seat in self.seats]
        tried += [(model, self.everywhere) for model in self.others]
        cells = [
            self.pass_of(model, seat, batch, tokens, context)
            for (model, seat), batch, context, tokens in itertools.product(
                tried, self.grid.batches, self.grid.contexts, self.grid.drafter_tokens
            )
        ]
        order = {model.name: place for place, (model, _) in enumerate(tried)}
        return sorted([*cells, *self._removed()], key=lambda cell: order[cell.model])

    def _removed(self) -> list[StepCell]:
        """The drafters' decode steps over all chips without collectives."""
        if self.topology.num_chips == 1:
            return []
        batch, context = self.grid.batches[0], self.grid.contexts[0]
        steps = [
            self.pass_of(model, self.everywhere, batch, 1, context)
            for model in (*self.drafters, *self.others)
        ]
        return [dataclasses.replace(step, apart=True) for step in steps]

    def pass_of(self, model: Model, seat: Seat, batch: int, tokens: int, context: int) -> StepCell:
        """A pass over T = `tokens` behind `context` others."""
        return StepCell(
            model=model.name,
            shape=model.shape,
            seat=seat,
            batch=batch,
            tokens=tokens,
            context=context,
            capacity=self.grid.capacity(context),
            phase="decode" if tokens == 1 else "score",
        )

    def is_timed(self, drafter: str) -> bool:
        """Whether rounds of this drafter are timed."""
        names = self.grid.timed_drafters
        return not names or drafter in (*names, NGRAM)

    def rounds(self) -> list[RoundCell]:
        """Rounds that are timed; plain decoding first."""
        timed = self._rounds(self.grid.timed_drafts or self.grid.drafts)
        return [cell for cell in timed if not cell.k or self.is_timed(cell.drafter)]

    def all_rounds(self) -> list[RoundCell]:
        """Rounds that are timed or predicted."""
        return list(self._rounds(self.grid.drafts))

    def _rounds(self, counts: tuple[int, ...]) -> Iterator[RoundCell]:
        for batch, context in itertools.product(self.grid.batches, self.grid.contexts):
            capacity = self.grid.capacity(context)
            yield RoundCell(
                drafter="",
                shape=None,
                seat=self.everywhere,
                k=0,
                rule="token",
                batch=batch,
                context=context,
                capacity=capacity,
            )
            drafters = [(model.name, model.shape) for model in self.drafters]
            drafters += [(NGRAM, None)] * self.lookup
            for (name, shape), seat, rule, k in itertools.product(
                drafters, self.seats, self.grid.rules, counts
            ):
                yield RoundCell(
                    drafter=name,
                    shape=shape,
                    seat=seat,
                    k=k,
                    rule=rule,
                    batch=batch,
                    context=context,
                    capacity=capacity,
                )
