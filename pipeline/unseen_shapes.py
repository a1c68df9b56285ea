"""Drafters that are not trained yet: their cost on the mesh, what they might be worth, what to train.

A round of a new shape is a trained drafter's round with its drafting exchanged for the latency model's
prediction. Acceptance is a line through the trained drafters: logit of alpha against the logarithm of the
parameters in their layers, with a 95% prediction interval. Where the trained ones are too few or too alike
for a line, that is said and nothing is guessed.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import scipy

from drafters.shapes import TransformerShape
from pipeline.acceptance import Requests, constant_curve
from pipeline.candidates import Objective, Traffic, chip_bytes, times_of, value
from pipeline.profile_artifact import Round, Where

# Of a shape with a copy on so many chips: milliseconds of one draft step.
StepMs = Callable[[TransformerShape, Where, int], float]

FEWEST = 3  # trained drafters that a spread can be told from
_LEVER = (
    1.5  # ratio of parameters that a slope can be told from, and that a level may be carried over
)
_CONFIDENCE = 0.95
_TOUCHABLE = 1e-3  # of an alpha at the ends of its range


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeGrid:
    """Shapes to look at: all combinations that divide over the mesh and fit its memory.

    Attributes:
      widths, depths, heads, mlp_widths: D, L, N, F.
      draft_vocabs: rows of a head of its own; 0 for the whole vocabulary.
      chip_bytes: memory for the drafter's weights and cache on one chip; 0 for the chip's own limit, if any.
      suggestions: shapes to propose.
    """

    widths: tuple[int, ...]
    depths: tuple[int, ...]
    heads: tuple[int, ...]
    mlp_widths: tuple[int, ...]
    draft_vocabs: tuple[int, ...] = (0,)
    chip_bytes: float = 0.0
    suggestions: int = 3

    def __post_init__(self):
        for name in ("widths", "depths", "heads", "mlp_widths"):
            if min(getattr(self, name), default=0) < 1:
                raise ValueError(f"ShapeGrid.{name} must be positive numbers, at least one")
        if min(self.draft_vocabs, default=-1) < 0:
            raise ValueError(f"ShapeGrid.draft_vocabs = {self.draft_vocabs} must be at least 0")
        if self.chip_bytes < 0 or self.suggestions < 0:
            raise ValueError(
                f"ShapeGrid.chip_bytes = {self.chip_bytes} and suggestions = {self.suggestions} must be at "
                "least 0"
            )

    def shapes(self, target: TransformerShape, chips: int) -> Iterator[TransformerShape]:
        """Drafters of `target` whose heads, feed-forward width and vocabulary divide over `chips`."""
        axes = (self.depths, self.widths, self.heads, self.mlp_widths, self.draft_vocabs)
        for depth, width, heads, mlp, vocab in itertools.product(*axes):
            parts = (heads, mlp, vocab or target.vocab_size)
            if (
                any(part % chips for part in parts)
                or width % (2 * heads)
                or vocab > target.vocab_size
            ):
                continue
            yield TransformerShape(
                vocab_size=target.vocab_size,
                num_layers=depth,
                width=width,
                num_heads=heads,
                num_kv_heads=heads,
                head_dim=width // heads,
                mlp_width=mlp,
                context=target.context,
                rope=target.rope,
                tied_head=target.tied_head and not vocab,
                head_vocab=vocab if vocab < target.vocab_size else 0,
            )


class Estimate(NamedTuple):
    """A predicted acceptance with its 95% interval."""

    alpha: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A drafter that was trained and evaluated; its acceptance and how much requests differ in it."""

    name: str
    shape: TransformerShape
    alpha: float
    alpha_sd: float

    @property
    def size(self) -> float:
        """Logarithm of the parameters in its layers."""
        return float(np.log(_layer_params(self.shape)))


def _layer_params(shape: TransformerShape) -> int:
    return shape.num_layers * shape.layer_params()


class AcceptanceLine:
    """logit(alpha) against log(parameters) of trained drafters.

    With sizes that hardly differ there is no slope to see: then the line is level, and drafters of
    other sizes are not predicted. Nor are those with a draft vocabulary that none of the trained ones has.
    """

    def __init__(self, trained: Sequence[Trained]):
        self._vocabularies = {one.shape.head_vocab for one in trained}
        self.sizes = np.array([one.size for one in trained])
        alphas = np.clip([one.alpha for one in trained], _TOUCHABLE, 1 - _TOUCHABLE)
        self._logits = scipy.special.logit(alphas)
        self.sloped = bool(np.ptp(self.sizes) > np.log(_LEVER))
        design = self._design(self.sizes)
        self._inverse = np.linalg.inv(design.T @ design)
        self._line = self._inverse @ design.T @ self._logits
        self._freedom = len(trained) - design.shape[1]
        rest = self._logits - design @ self._line
        self._sd = float(np.sqrt(rest @ rest / max(1, self._freedom)))

    @property
    def says(self) -> str:
        """What it rests on."""
        kind = (
            "rises with size as a line"
            if self.sloped
            else "does not depend on size within 1.5 times"
        )
        return f"acceptance {kind}, by {len(self.sizes)} trained drafters"

    def predict(self, shape: TransformerShape) -> Estimate | None:
        """Of a shape; None where the trained drafters say nothing about its size."""
        size = float(np.log(_layer_params(shape)))
        near = self.sizes.min() - np.log(_LEVER), self.sizes.max() + np.log(_LEVER)
        beyond = not self.sloped and not near[0] <= size <= near[1]
        if self._freedom < 1 or beyond or shape.head_vocab not in self._vocabularies:
            return None
        row = self._design(np.array([size]))[0]
        middle = float(row @ self._line)
        width = float(scipy.stats.t.ppf((1 + _CONFIDENCE) / 2, self._freedom)) * self._sd
        width *= float(np.sqrt(1 + row @ self._inverse @ row))
        return Estimate(*(float(scipy.special.expit(middle + w)) for w in (0, -width, width)))

    def _design(self, sizes: np.ndarray) -> np.ndarray:
        ones = np.ones((len(sizes), 1))
        return np.hstack([ones, (sizes - self.sizes.mean())[:, None]]) if self.sloped else ones


class Place(NamedTuple):
    """Where a drafter can be."""

    placement: Where
    chips_per_copy: int


@dataclass(frozen=True, kw_only=True)
class Rest:
    """A round at one place without its draft steps.

    Attributes:
      per_k_ms: K -> scoring, verdict, broadcast.
      per_draft_ms: of a draft beside the drafter's pass: warping, drawing, bookkeeping.
      factor: on the predicted pass, where trained drafters were faster than predicted; else 1.
    """

    per_k_ms: Mapping[int, float]
    per_draft_ms: float
    factor: float = 1.0

    def loop_ms(self, k: int, step_ms: float) -> float:
        """A round of K drafts by a drafter whose pass is predicted to take `step_ms`."""
        return self.per_k_ms[k] + k * (self.factor * step_ms + self.per_draft_ms)


def rests(
    rounds: Iterable[Round], trained: Sequence[Trained], batch: int, step_ms: StepMs
) -> dict[Place, Rest]:
    """Of every place that trained drafters were profiled at: medians over them."""
    shapes = {one.name: one.shape for one in trained}
    whole: dict[Place, dict[int, list[float]]] = {}
    drafts: dict[Place, list[tuple[float, float]]] = {}  # measured, predicted
    for timed in rounds:
        if timed.drafter not in shapes or timed.batch != batch or timed.rule != "token":
            continue
        place = Place(timed.placement, timed.chips_per_copy)
        remainder = timed.round_ms.p50 - timed.draft_ms
        whole.setdefault(place, {}).setdefault(timed.k, []).append(remainder)
        predicted = step_ms(shapes[timed.drafter], *place)
        drafts.setdefault(place, []).append((timed.draft_ms / timed.k, predicted))
    return {place: _rest(by_k, drafts[place]) for place, by_k in whole.items()}


def _rest(by_k: Mapping[int, Sequence[float]], drafts: Sequence[tuple[float, float]]) -> Rest:
    beside = float(np.median([measured - predicted for measured, predicted in drafts]))
    factor = float(np.median([measured / predicted for measured, predicted in drafts]))
    return Rest(
        per_k_ms={k: float(np.median(times)) for k, times in by_k.items()},
        per_draft_ms=max(0.0, beside),
        factor=1.0 if beside >= 0 else factor,
    )


@dataclass(frozen=True, kw_only=True)
class Prospect:
    """A shape, its best place and K, and what the objective would be.

    Attributes:
      expected, hoped, feared: the objective at the predicted acceptance and at the ends of its interval.
    """

    shape: TransformerShape
    place: Place
    k: int
    step_ms: float
    bytes_per_chip: int
    alpha: Estimate
    expected: float
    hoped: float
    feared: float

    def to_json(self) -> dict[str, Any]:
        """For `Plan.details`."""
        shape = self.shape
        return {
            "layers": shape.num_layers,
            "width": shape.width,
            "heads": shape.num_heads,
            "mlp_width": shape.mlp_width,
            "draft_vocab": shape.head_vocab,
            "layer_params": _layer_params(shape),
            "placement": self.place.placement,
            "chips_per_copy": self.place.chips_per_copy,
            "k": self.k,
            "step_ms": self.step_ms,
            "bytes_per_chip": self.bytes_per_chip,
            "alpha": self.alpha._asdict(),
            "expected": self.expected,
            "interval": [self.hoped, self.feared],
        }


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """Prospects, best first; the front of those that none beats in both step time and acceptance."""

    prospects: tuple[Prospect, ...]
    front: tuple[Prospect, ...]
    considered: int
    unpredicted: int  # shapes whose acceptance the trained drafters say nothing about


def usable(trained: Sequence[Trained]) -> str:
    """Why acceptance of other shapes cannot be predicted from these drafters; "" if it can."""
    if len(trained) >= FEWEST:
        return ""
    return (
        f"{len(trained)} trained drafters are too few to predict the acceptance of other shapes from: "
        f"train and evaluate at least {FEWEST}, best of different sizes"
    )


class Survey:
    """A look at a grid of shapes.

    Args:
      trained: what acceptance is predicted from; at least `FEWEST`.
      found: a round at every place without its drafts, see `rests`.
      step_ms: the latency model.
      traffic, objective: what shapes are judged by.
      dtype: served.
    """

    def __init__(
        self,
        *,
        trained: Sequence[Trained],
        found: Mapping[Place, Rest],
        step_ms: StepMs,
        traffic: Traffic,
        objective: Objective,
        dtype: str,
    ):
        self._line, self._rests, self._step_ms = AcceptanceLine(trained), found, step_ms
        self._traffic, self._dtype = traffic, dtype
        self._objective: Objective = objective
        self._known = {one.shape for one in trained}
        # Requests of a task differ because of what they ask for, whoever drafts.
        self._alpha_sd = float(np.median([one.alpha_sd for one in trained]))
        self._law = functools.cache(self._requests)

    @property
    def says(self) -> str:
        """What acceptance rests on."""
        return self._line.says

    def look(self, grid: ShapeGrid, target: TransformerShape, limit_bytes: float) -> Outlook:
        """At every shape of the grid that fits; `limit_bytes` per chip, 0 for none."""
        limit = grid.chip_bytes or limit_bytes or float("inf")
        best: dict[TransformerShape, Prospect] = {}
        considered, unpredicted = set(), set()
        for place, rest in self._rests.items():
            for shape in grid.shapes(target, place.chips_per_copy):
                held = self._bytes(shape, place.chips_per_copy)
                if shape in self._known or held > limit:
                    continue
                considered.add(shape)
                alpha = self._line.predict(shape)
                if alpha is None:
                    unpredicted.add(shape)
                    continue
                found = self._prospect(shape, place, rest, alpha, held)
                if shape not in best or found.expected < best[shape].expected:
                    best[shape] = found
        ranked = sorted(best.values(), key=lambda one: (one.expected, _layer_params(one.shape)))
        return Outlook(
            prospects=tuple(ranked),
            front=tuple(pareto(ranked)),
            considered=len(considered),
            unpredicted=len(unpredicted),
        )

    def left(self, target: TransformerShape, chips: int, hbm_bytes: float) -> float:
        """Bytes that the target leaves on each of `chips` chips."""
        return hbm_bytes - self._bytes(target, chips)

    def _bytes(self, shape: TransformerShape, chips: int) -> int:
        positions = self._traffic.batch * (self._traffic.context + self._traffic.tokens)
        return chip_bytes(shape, chips, positions, self._dtype)

    def _prospect(
        self, shape: TransformerShape, place: Place, rest: Rest, alpha: Estimate, held: int
    ) -> Prospect:
        step_ms = self._step_ms(shape, *place)
        loops = {k: rest.loop_ms(k, step_ms) for k in rest.per_k_ms}
        at = {k: self._value(alpha.alpha, k, ms) for k, ms in loops.items()}
        k = min(at, key=lambda one: at[one])
        return Prospect(
            shape=shape,
            place=place,
            k=k,
            step_ms=step_ms,
            bytes_per_chip=held,
            alpha=alpha,
            expected=at[k],
            hoped=self._value(alpha.high, k, loops[k]),
            feared=self._value(alpha.low, k, loops[k]),
        )

    def _value(self, alpha: float, k: int, round_ms: float) -> float:
        return value(times_of(*self._law(round(alpha, 3), k), round_ms), self._objective)

    def _requests(self, alpha: float, k: int) -> tuple[Requests, np.ndarray]:
        requests = Requests.spread(constant_curve(alpha, k), self._alpha_sd)
        return requests, requests.rounds(self._traffic.tokens)


def pareto(prospects: Iterable[Prospect]) -> Iterator[Prospect]:
    """Those that no other beats in both step time and predicted acceptance, fastest first."""
    highest = 0.0
    for one in sorted(prospects, key=lambda p: (p.step_ms, -p.alpha.alpha)):
        if one.alpha.alpha > highest:
            highest = one.alpha.alpha
            yield one


# --------------------------------------------------------------------------------------------------
# Gin
# --------------------------------------------------------------------------------------------------


def gin(prospects: Sequence[Prospect]) -> str:
    """Models to train, to be pasted behind the drafters of a training config."""
    names = [_name(one.shape) for one in prospects]
    listed = ", ".join(f"@{name}/ModelSpec()" for name in names)
    head = (
        "# Paste behind your drafters, and add to train.models:\n"
        f"#   {listed}\n"
        "# They take DRAFTER_STEPS, distil/Objective and drafter/Optimizer from there.\n"
    )
    return "\n".join(
        [head, *(_model(n, one.shape) for n, one in zip(names, prospects, strict=True))]
    )


def _name(shape: TransformerShape) -> str:
    vocab = f"v{shape.head_vocab}" if shape.head_vocab else ""
    return f"l{shape.num_layers}w{shape.width}h{shape.num_heads}f{shape.mlp_width}{vocab}"


def _model(name: str, shape: TransformerShape) -> str:
    usual = {f.name: f.default for f in dataclasses.fields(TransformerShape)}
    spec = [
        f'{name}/ModelSpec.name = "{name}"',
        f"{name}/ModelSpec.shape = @{name}/TransformerShape()",
        f"{name}/ModelSpec.steps = %DRAFTER_STEPS",
        f"{name}/ModelSpec.objective = @distil/Objective()",
        f"{name}/ModelSpec.optimizer = @drafter/Optimizer()",
        f"{name}/ModelSpec.batch = @Batch()",
    ]
    for field, default in usual.items():
        found = getattr(shape, field)
        if found != default and field != "rope":
            spec.append(f"{name}/TransformerShape.{field} = {found!r}")
    if shape.rope != usual["rope"]:
        spec.append(f"{name}/TransformerShape.rope = @{name}/Rope()")
        changed = dataclasses.asdict(shape.rope).items()
        spec += [f"{name}/Rope.{field} = {found!r}" for field, found in changed]
    return "\n".join(spec) + "\n"
