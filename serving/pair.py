"""A target and what drafts for it, loaded and placed: everything that is needed to serve."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from drafters import model_card
from drafters.autoregressive import Autoregressive, DrafterParams
from drafters.checkpoints import restore_params
from drafters.drafter import Drafter
from drafters.formats.tensors import DTYPES
from drafters.lookup_first import LookupFirst
from drafters.mesh import Topology
from drafters.model_card import ModelCard
from drafters.ngram import Ngram
from drafters.shapes import TransformerShape
from drafters.sharding import Placement
from drafters.tokenizers import Tokenizer
from drafters.transformer import Params, abstract_params
from pipeline.core.errors import UserError
from pipeline.core.run_dir import RunDir
from serving.plan import Choice
from serving.speculation import Engine, Weights

NGRAM = "ngram"
_LOOKUP_FIRST = f"+{NGRAM}"  # behind a model's name


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair:
    """A served target.

    Attributes:
      engine, weights: the compiled program's static half and its parameters.
      tokenizer: the target's.
      context: longest row of the target.
      notes: what a person should know about how the models lie on the mesh.
    """

    engine: Engine
    weights: Weights
    tokenizer: Tokenizer
    context: int
    notes: tuple[str, ...] = ()

    def drafting(self, k: int, rule: Literal["token", "block"]) -> Pair:
        """The same pair with K = `k` drafts per round, judged by `rule`."""
        drafter = self.engine.drafter
        if isinstance(drafter, LookupFirst):
            drafter = drafter.for_drafts(k)
        engine = dataclasses.replace(self.engine, k=k, rule=rule, drafter=drafter)
        return dataclasses.replace(self, engine=engine)

    def plain(self) -> Pair:
        """The same target decoded without a drafter."""
        # Led wherever there is somebody to lead: a verdict by every chip is the slower baseline.
        leader = self.engine.placement is not None
        engine = dataclasses.replace(
            self.engine, drafter=None, k=0, drafter_placement=None, leader=leader
        )
        return dataclasses.replace(self, engine=engine, weights=self.weights._replace(drafter=None))


def model_of(drafter: str) -> str:
    """The model that a drafter's name means: "two" of "two+ngram"; "" of a lookup, and of none.

    Raises:
      UserError: it is no drafter's name; a model with a plus in its own can be given as a path.
    """
    model = "" if drafter == NGRAM else drafter.removesuffix(_LOOKUP_FIRST)
    half = drafter == _LOOKUP_FIRST or model == NGRAM
    if half or ("+" in model and "/" not in model):
        raise UserError(
            f"{drafter!r} names no drafter: that is MODEL, {NGRAM!r}, or 'MODEL{_LOOKUP_FIRST}'"
        )
    return model


def require_names(setting: str, drafters: Sequence[str]) -> None:
    """Refuses names in a list of drafters that are no drafter's, or are there twice.

    Raises:
      UserError: naming the `setting` that the list is of.
    """
    for drafter in drafters:
        if not drafter:
            raise UserError(f"{setting} names no drafter with ''; remove it")
        if list(drafters).count(drafter) > 1:
            raise UserError(f"{setting} names {drafter!r} twice; remove one")
        model_of(drafter)


def parts_of(drafter: str) -> tuple[str, ...]:
    """The drafters that a name is put together from, the model first: "two" and "ngram" of "two+ngram"."""
    return (model_of(drafter), NGRAM) if drafter.endswith(_LOOKUP_FIRST) else (drafter,)


def look_first(model: str) -> str:
    """The name of a model behind a lookup."""
    return f"{model}{_LOOKUP_FIRST}"


def model_folder(run_dir: str, name: str) -> epath.Path:
    """The model directory that `name` means: a path if it has a slash, else one of the run directory."""
    return epath.Path(name).expanduser() if "/" in name else RunDir.at(run_dir).model(name)


def load(run_dir: str, topology: Topology, target: str, choice: Choice) -> Pair:
    """Loads both models and puts them where `choice` says.

    Raises:
      UserError: a model is missing or damaged, the tokenizers differ, the mesh or K does not fit.
    """
    return with_drafter(load_target(run_dir, topology, target), run_dir, topology, choice)


def load_target(run_dir: str, topology: Topology, target: str) -> Pair:
    """Loads the target, to be decoded plainly.

    Raises:
      UserError: it is missing or damaged, or the mesh does not fit.
    """
    folder = model_folder(run_dir, target)
    card = model_card.read_card(folder)
    tokenizer = model_card.read_tokenizer(folder, card)
    everywhere = topology.placement() if topology.num_chips > 1 else None
    shape, params, notes = _load_model(folder, card, everywhere, topology.serving_dtype)
    engine = Engine(
        shape=shape,
        num_tokens=tokenizer.vocab_size,
        eos_ids=tuple(tokenizer.eos_ids),
        dtype=topology.serving_dtype,
        drafter=None,
        k=0,
        placement=everywhere,
        leader=everywhere is not None,
    )
    return Pair(
        engine=engine,
        weights=Weights(params, None),
        tokenizer=tokenizer,
        context=shape.context,
        notes=notes,
    )


def with_drafter(target: Pair, run_dir: str, topology: Topology, choice: Choice) -> Pair:
    """The loaded target, whose weights are shared, with the drafter that `choice` names.

    Raises:
      UserError: the drafter is missing or damaged, its tokenizer is another, its place or K does not fit.
    """
    drafter, params, placement, notes = _load_drafter(
        run_dir, topology, choice, target.tokenizer, target.engine.dtype
    )
    _require_shorter(choice.k, target.context, drafter.context if drafter else target.context)
    engine = dataclasses.replace(
        target.engine,
        drafter=drafter,
        k=choice.k,
        rule=choice.rule,
        drafter_placement=placement,
        leader=(choice.leader or not choice.k) and target.engine.placement is not None,
    )
    return dataclasses.replace(
        target,
        engine=engine,
        weights=target.weights._replace(drafter=params),
        notes=(*target.notes, *notes),
    )


def _require_shorter(k: int, context: int, drafter_context: int) -> None:
    if k >= min(context, drafter_context):
        raise UserError(
            f"k = {k} drafts do not fit: the target's context is {context} tokens, the drafter's "
            f"{drafter_context}; choose a smaller k"
        )


def _load_model(
    folder: epath.Path, card: ModelCard, placement: Placement | None, dtype: str
) -> tuple[TransformerShape, Params, tuple[str, ...]]:
    weights = folder / model_card.WEIGHTS
    if placement is None:
        params = restore_params(weights, abstract_params(card.shape, DTYPES[dtype]))
        return card.shape, params, ()
    params = restore_params(weights, placement.reading_params(card.shape, DTYPES[dtype]))
    notes = tuple(f"{folder.name}: {note}" for note in placement.layout(card.shape).notes())
    return placement.served_shape(card.shape), placement.put(card.shape, params), notes


def _load_drafter(
    run_dir: str, topology: Topology, choice: Choice, tokenizer: Tokenizer, dtype: str
) -> tuple[Drafter | None, Any, Placement | None, tuple[str, ...]]:
    if not choice.k:
        return None, None, None, ()
    if choice.drafter == NGRAM:
        return Ngram(tokenizer.vocab_size), None, None, ()
    folder = model_folder(run_dir, model_of(choice.drafter))
    card = model_card.read_card(folder)
    _require_same_tokenizer(folder, model_card.read_tokenizer(folder, card), tokenizer)
    placement = None
    if topology.num_chips > 1:
        placement = topology.placement(1 if choice.leader else choice.chips_per_copy)
    shape, params, notes = _load_model(folder, card, placement, dtype)
    ids = model_card.read_draft_ids(folder, card)
    params = DrafterParams(params, _held(ids, placement))
    model = Autoregressive(shape, dtype)
    if NGRAM not in parts_of(choice.drafter):
        return model, params, placement, notes
    drafter = LookupFirst(Ngram(tokenizer.vocab_size), model).for_drafts(choice.k)
    return drafter, params, placement, notes


def _held(ids: np.ndarray | None, placement: Placement | None) -> jax.Array | None:
    if ids is None:
        return None
    return jax.device_put(ids, placement.sharding()) if placement else jnp.asarray(ids)


def _require_same_tokenizer(folder: epath.Path, drafter: Tokenizer, target: Tokenizer) -> None:
    if difference := target.first_difference(drafter):
        raise UserError(
            f"{folder}: the drafter has another tokenizer than the target ({difference}); its drafts "
            "would mean other text. Train a drafter on the target's tokenizer"
        )
