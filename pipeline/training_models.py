"""The models of a run directory as a training sees them: finished, begun, or to be trained.

RUN_DIR/models/<name>/                 the finished model
RUN_DIR/training/<name>/training.json  what it is trained with; results and costs once it is finished
RUN_DIR/training/<name>/states/        states of the unfinished training
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax
import numpy as np
from etils import epath

from drafters.model_card import CARD, ModelCard, read_card, read_draft_ids
from drafters.models import read_params_of
from drafters.shapes import TransformerShape
from drafters.transformer import Params, abstract_params, stack_layers
from pipeline.core import artifacts
from pipeline.core.errors import UserError
from pipeline.core.run_dir import RunDir
from pipeline.training_settings import ModelSpec

_RECORD = "training.json"

_SHA256 = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True)
class Ingredients:
    """What a model is made of: equal ingredients give equal weights.

    Attributes:
      model: its spec.
      data: what the text and its tokens were, by name; values are hashes or settings.
      tokenizer_hash: of the tokenizer.
      target_hash: of the target's weights, where it teaches or is copied from.
      start_hash: of the weights of the model that the training goes on from.
    """

    model: ModelSpec
    data: dict[str, str]
    tokenizer_hash: str
    target_hash: str = ""
    start_hash: str = ""

    @property
    def inputs(self) -> dict[str, str]:
        """Of texts and models, by name: their hashes, for a lineage."""
        named = {**self.data, "target": self.target_hash, "start": self.start_hash}
        return {name: value for name, value in named.items() if _SHA256.fullmatch(value)}


@dataclass(frozen=True, kw_only=True)
class TrainingRecord(artifacts.Artifact):
    """`training.json`: begun with these ingredients, and what came of it.

    Attributes:
      ingredients: see there.
      weights_hash: of the finished model, empty before.
      tokens, hours, flops: the cost; positions without padding, wall time, model flops.
      held_out: `{corpus: {metric: value}}` at the last step.
    """

    SCHEMA: ClassVar[int] = 1
    STAGE: ClassVar[str] = "pipeline.train"

    ingredients: Ingredients
    weights_hash: str = ""
    tokens: int = 0
    hours: float = 0.0
    flops: float = 0.0
    held_out: dict[str, dict[str, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Bench:
    """One model's place in a run directory while it is trained."""

    run: RunDir
    name: str

    @property
    def folder(self) -> epath.Path:
        """Of the finished model."""
        return self.run.model(self.name)

    @property
    def states(self) -> epath.Path:
        """Of the unfinished training."""
        return self.run.root / "training" / self.name / "states"

    @property
    def record(self) -> epath.Path:
        """Of `training.json`."""
        return self.run.root / "training" / self.name / _RECORD

    def finished(self, ingredients: Ingredients) -> TrainingRecord | None:
        """The record of the finished model, None if it is yet to be trained.

        Raises:
          UserError: it was begun or finished with other ingredients, or was imported.
        """
        card = read_card(self.folder) if (self.folder / CARD).exists() else None
        if not self.record.exists():
            if card is not None:
                raise UserError(
                    f"{self.folder} is a model from {card.source.name!r} ({card.source.format}), which "
                    f"was not trained here: choose another name than {self.name!r} or another --run_dir"
                )
            return None
        found = artifacts.read(self.record, TrainingRecord)
        self._require_same(found.ingredients, ingredients)
        return found if card is not None and card.weights_hash == found.weights_hash else None

    def _require_same(self, found: Ingredients, wanted: Ingredients) -> None:
        differences = list(_differences(artifacts.to_json(found), artifacts.to_json(wanted)))
        if differences:
            raise UserError(
                f"{self.name} in {self.run.root} was begun with another config: "
                f"{'; '.join(differences)}. Restore the config, choose another --run_dir or model name, "
                f"or remove {self.record.parent} and {self.folder}"
            )

    def discard_states(self) -> None:
        """Removes the states of a training that is finished."""
        if self.states.exists():
            self.states.rmtree()


def _differences(found: Any, wanted: Any, where: str = "") -> Iterator[str]:
    """`path: old, now new` of every leaf that differs."""
    if isinstance(found, Mapping) and isinstance(wanted, Mapping):
        for key in sorted({*found, *wanted}):
            path = f"{where}.{key}" if where else key
            yield from _differences(found.get(key), wanted.get(key), path)
    elif found != wanted:
        yield f"{where} was {found!r}, now {wanted!r}"


# ------------------------------------------------------------------------------- the target


@dataclass(frozen=True, kw_only=True)
class Target:
    """The target of a run directory, as a teacher and as a start for drafters."""

    name: str
    card: ModelCard
    params: Params  # unstacked, on the host

    @property
    def shape(self) -> TransformerShape:
        """Its shape."""
        return self.card.shape


def read_target(run: RunDir, name: str) -> Target:
    """The finished target in fp32.

    Raises:
      UserError: there is none.
    """
    folder = run.model(name)
    if not (folder / CARD).exists():
        raise UserError(
            f"{folder} does not exist, but models of this config learn from it: add a ModelSpec with name "
            f"= {name!r}, import a model there, or set train.target to the name of one"
        )
    card = read_card(folder)
    params = read_params_of(folder, card, "float32")
    return Target(name=name, card=card, params=jax.tree.map(np.asarray, params))


def require_teachable(spec: ModelSpec, target: Target, tokenizer_hash: str) -> None:
    """Refuses a target that speaks other tokens than the model.

    Raises:
      UserError: naming both sides.
    """
    theirs = target.card.lineage.tokenizer_hash
    if theirs is not None and theirs != tokenizer_hash:
        raise UserError(
            f"{spec.name}: the target {target.name!r} has the tokenizer {theirs[:12]}, the data has "
            f"{tokenizer_hash[:12]}: a drafter learns on the tokens of its target"
        )
    if spec.shape.vocab_size != target.shape.vocab_size:
        raise UserError(
            f"{spec.name}: vocab_size = {spec.shape.vocab_size}, but the target {target.name!r} has "
            f"{target.shape.vocab_size}: set them equal, padding included"
        )


# ------------------------------------------------------------------------------- how it begins


def in_order(run: RunDir, models: Sequence[ModelSpec], target: str) -> list[ModelSpec]:
    """The target first, the others as they are listed.

    Raises:
      UserError: two have one name, the target would learn from itself, or a model would go on from what is
        not there by then.
    """
    names = [spec.name for spec in models]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise UserError(f"train.models has two models named {repeated[0]!r}; rename one")
    for spec in models:
        if spec.name == target and spec.needs_target:
            raise UserError(
                f"{target!r} is the target and cannot learn from itself: give it cross-entropy and random "
                "weights, or set train.target to the model that teaches"
            )
    ordered = sorted(models, key=lambda spec: spec.name != target)
    for index, spec in enumerate(ordered):
        if spec.start in names and spec.start not in (one.name for one in ordered[:index]):
            raise UserError(
                f"{spec.name!r} goes on from {spec.start!r}, which is trained after it: the target comes "
                "first, the others as train.models lists them"
            )
        require_start(run, spec, ordered[:index])
    return ordered


@dataclass(frozen=True, kw_only=True)
class Start:
    """A finished model that a training goes on from."""

    folder: epath.Path
    card: ModelCard

    def draft_ids(self) -> np.ndarray | None:
        """The ids it proposes, None for all."""
        return read_draft_ids(self.folder, self.card)

    def params(self) -> Params:
        """In fp32, unstacked, on the host."""
        return jax.tree.map(np.asarray, read_params_of(self.folder, self.card, "float32"))


def require_start(run: RunDir, spec: ModelSpec, others: Iterable[ModelSpec] = ()) -> None:
    """Refuses what cannot be gone on from, before anything is trained.

    Raises:
      UserError: it is neither there nor one of the `others`, or has another shape.
    """
    if not spec.start:
        return
    folder = run.model(spec.start)
    shapes = {other.name: other.shape for other in others}
    if (folder / CARD).exists():
        shapes[spec.start] = read_card(folder).shape
    if spec.start not in shapes:
        raise UserError(
            f"{spec.name} goes on from {folder}, which does not exist: list {spec.start!r} before "
            f"{spec.name!r} in train.models, import it, or set another ModelSpec.start"
        )
    ours, theirs = artifacts.to_json(spec.shape), artifacts.to_json(shapes[spec.start])
    if differences := "; ".join(_differences(theirs, ours)):
        raise UserError(
            f"{spec.name} goes on from {spec.start!r}, which has another shape: {differences}. Set "
            f"{spec.name}'s shape to it"
        )


def find_start(run: RunDir, spec: ModelSpec, tokenizer_hash: str) -> Start | None:
    """What `spec` goes on from, None if it begins anew.

    Raises:
      UserError: as `require_start`, or it is no model of these tokens.
    """
    if not spec.start:
        return None
    require_start(run, spec)
    folder = run.model(spec.start)
    card = read_card(folder)
    if (theirs := card.lineage.tokenizer_hash) not in (None, tokenizer_hash):
        raise UserError(
            f"{spec.name} goes on from {spec.start!r}, which has the tokenizer {theirs[:12]}; the data has "
            f"{tokenizer_hash[:12]}: a drafter learns on the tokens of its target"
        )
    return Start(folder=folder, card=card)


def initial_params(
    spec: ModelSpec, target: Target | None, start: Start | None, draft_ids: np.ndarray | None
) -> Params | None:
    """Host arrays that a model starts from, None for random ones.

    Raises:
      UserError: the target's layers do not fit the model's.
    """
    if start is not None:
        params = start.params()
    elif spec.init == "target" and target is not None:
        params = _copied(spec, target, draft_ids)
    else:
        return None
    return stack_layers(params) if spec.execution.scan else params


def _copied(spec: ModelSpec, target: Target, draft_ids: np.ndarray | None) -> Params:
    source = target.params
    depth = len(source["layers"])
    if wrong := [layer for layer in spec.layers if not 0 <= layer < depth]:
        raise UserError(
            f"{spec.name}: ModelSpec.layers names layer {wrong[0]}, but the target {target.name!r} has "
            f"layers 0..{depth - 1}"
        )
    params = {
        "embedding": source["embedding"],
        "norm": source["norm"],
        "layers": {str(i): source["layers"][str(layer)] for i, layer in enumerate(spec.layers)},
    }
    if not spec.shape.tied_head:
        head = source.get("head", source["embedding"])
        params["head"] = head if draft_ids is None else head[draft_ids]
    _require_fit(spec, params, target)
    return params


def _require_fit(spec: ModelSpec, params: Params, target: Target) -> None:
    own = abstract_params(spec.shape)
    found, wanted = _shapes(params), _shapes(own)
    for path in sorted({*found, *wanted}):
        if found.get(path) != wanted.get(path):
            raise UserError(
                f"{spec.name}: {path} is {wanted.get(path)}, but {found.get(path)} in the target "
                f"{target.name!r}: init = 'target' needs the target's widths and kinds of layers"
            )


def _shapes(params: Params) -> dict[str, tuple[int, ...]]:
    leaves = jax.tree_util.tree_flatten_with_path(params)[0]
    return {"/".join(str(key.key) for key in path): tuple(leaf.shape) for path, leaf in leaves}
