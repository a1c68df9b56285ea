"""`model.json`: what a model directory holds besides its weights, and how to read its tokenizer.

RUN_DIR/models/<name>/model.json   this card
                      weights/     the parameters, see `drafters.checkpoints`
                      tokenizer.*  as the card says
                      draft_ids.npy  sorted ids that a trimmed head proposes, if it is trimmed
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np
from etils import epath

from drafters import vocabularies
from drafters.shapes import TransformerShape
from drafters.tokenizers import Tokenizer, require_fit
from pipeline.core import artifacts
from pipeline.core.errors import UserError
from pipeline.core.run_dir import atomic_open, atomic_write, explain_os_errors

CARD = "model.json"
WEIGHTS = "weights"
DRAFT_IDS = "draft_ids.npy"
_TOKENIZER_FILES = {
    "tokenizer.json": "tokenizer.json",
    "sentencepiece": "tokenizer.model",
    "bytes": "",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerCard:
    """How to build the tokenizer: see `drafters.tokenizers.Tokenizer`.

    Attributes:
      kind: of the vocabulary.
      content_hash: SHA-256 of the meaning of all ids, `Tokenizer.content_hash`.
      file: beside the card; empty for bytes.
    """

    kind: Literal["tokenizer.json", "sentencepiece", "bytes"]
    content_hash: str
    file: str = ""
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    add_bos: bool = False
    chat_template: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where the weights come from: a foreign format with the hashes of its files, or a training."""

    format: Literal["huggingface", "gguf", "training"]
    name: str
    sha256: dict[str, str] = field(default_factory=dict)  # file -> digest


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingCost:
    """What a model cost to train: tokens learned from, wall time, model flops."""

    tokens: int
    hours: float
    flops: float = 0.0

    def after(self, earlier: TrainingCost | None) -> TrainingCost:
        """With what the model had cost before this training."""
        if earlier is None:
            return self
        return TrainingCost(
            tokens=self.tokens + earlier.tokens,
            hours=self.hours + earlier.hours,
            flops=self.flops + earlier.flops,
        )


@dataclass(frozen=True, kw_only=True)
class ModelCard(artifacts.Artifact):
    """Everything about a model but its parameters.

    Attributes:
      shape: of the transformer.
      dtype: of the stored weights.
      weights_hash: SHA-256 of the parameters.
      source: where they come from.
      tokenizer: None for a model of token ids only.
      draft_ids: the file of the ids that a trimmed head proposes; empty for the whole vocabulary.
      training_cost: of a drafter that was trained here.
    """

    SCHEMA: ClassVar[int] = 1
    STAGE: ClassVar[str] = "the import or training of this model"

    shape: TransformerShape
    dtype: Literal["float32", "bfloat16"]
    weights_hash: str
    source: Source
    tokenizer: TokenizerCard | None = None
    draft_ids: str = ""
    training_cost: TrainingCost | None = None

    def __post_init__(self):
        if bool(self.shape.head_vocab) != bool(self.draft_ids):
            raise ValueError(
                f"ModelCard.draft_ids = {self.draft_ids!r} does not fit head_vocab = "
                f"{self.shape.head_vocab}: a trimmed head needs the file of its ids, a whole one none"
            )


def read_card(folder: epath.PathLike) -> ModelCard:
    """The card of a model directory.

    Raises:
      UserError: there is none, or it is malformed.
    """
    return artifacts.read(epath.Path(folder) / CARD, ModelCard)


def write_card(folder: epath.PathLike, card: ModelCard) -> None:
    """Writes `model.json`; by convention the last file of a model directory."""
    artifacts.write(epath.Path(folder) / CARD, card)


def write_tokenizer(folder: epath.PathLike, tokenizer: Tokenizer) -> TokenizerCard:
    """Writes the tokenizer's file to a model directory and returns its part of the card."""
    kind = tokenizer.vocabulary.kind
    if name := _TOKENIZER_FILES[kind]:
        atomic_write(epath.Path(folder) / name, tokenizer.vocabulary.serialize())
    return TokenizerCard(
        kind=kind,  # pyright: ignore[reportArgumentType] checked by the look-up above
        content_hash=tokenizer.content_hash,
        file=name,
        bos_id=tokenizer.bos_id,
        eos_ids=tokenizer.eos_ids,
        add_bos=tokenizer.add_bos,
        chat_template=tokenizer.chat_template,
    )


def read_tokenizer(folder: epath.PathLike, card: ModelCard) -> Tokenizer:
    """The tokenizer of a model directory.

    Raises:
      UserError: the card names none, its file is missing, malformed or not the one that was saved, or
        it has more ids than the embedding has rows.
    """
    described = card.tokenizer
    if described is None:
        raise UserError(f"{folder}: the model has no tokenizer; give token ids, or import it again")
    content, path = b"", epath.Path(folder) / (described.file or CARD)
    if described.file:
        with explain_os_errors(path, "read"):
            content = path.read_bytes()
    tokenizer = Tokenizer(
        vocabulary=vocabularies.make(described.kind, content, str(path)),
        bos_id=described.bos_id,
        eos_ids=described.eos_ids,
        add_bos=described.add_bos,
        chat_template=described.chat_template,
    )
    if tokenizer.content_hash != described.content_hash:
        raise UserError(
            f"{path}: content {tokenizer.content_hash}, but {CARD} was written for "
            f"{described.content_hash}; restore the file or import the model again"
        )
    require_fit(tokenizer, card.shape.vocab_size, path)
    return tokenizer


def write_draft_ids(folder: epath.PathLike, ids: np.ndarray) -> str:
    """Writes the sorted ids i32[V'] of a trimmed head; returns the file's name for the card."""
    with atomic_open(epath.Path(folder) / DRAFT_IDS, "wb") as file:
        np.save(file, np.asarray(ids, np.int32))
    return DRAFT_IDS


def read_draft_ids(folder: epath.PathLike, card: ModelCard) -> np.ndarray | None:
    """The sorted ids i32[V'] of a trimmed head, None for a whole one.

    Raises:
      UserError: the file is missing, malformed, or does not fit the shape.
    """
    if not card.draft_ids:
        return None
    path = epath.Path(folder) / card.draft_ids
    try:
        with explain_os_errors(path, "read"), path.open("rb") as file:
            ids = np.load(file, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise UserError(f"{path}: not a list of ids ({error}); train the drafter again") from error
    shape = card.shape
    fits = ids.dtype == np.int32 and ids.shape == (shape.head_vocab,) and (np.diff(ids) > 0).all()
    if not fits or ids[0] < 0 or ids[-1] >= shape.vocab_size:
        raise UserError(
            f"{path}: expected {shape.head_vocab} increasing ids below {shape.vocab_size}; train the "
            "drafter again"
        )
    return ids
