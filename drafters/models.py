"""Whole model directories: weights, card and tokenizer, written at once and read back."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from etils import epath

from drafters import model_card
from drafters.checkpoints import restore_params, save_params
from drafters.formats.tensors import DTYPES, flatten, hash_params
from drafters.model_card import ModelCard, Source, TrainingCost
from drafters.shapes import TransformerShape
from drafters.tokenizers import Tokenizer, require_fit
from drafters.transformer import Params, abstract_params
from pipeline.core.artifacts import Lineage
from pipeline.core.errors import UserError
from pipeline.core.run_dir import atomic_directory, is_bucket


def write_model(
    path: epath.PathLike,
    *,
    shape: TransformerShape,
    params: Mapping[str, Any],
    source: Source,
    tokenizer: Tokenizer | None,
    draft_ids: np.ndarray | None = None,
    training_cost: TrainingCost | None = None,
    config: str = "",
    seed: int = 0,
    inputs: Mapping[str, str] | None = None,
) -> ModelCard:
    """Writes a model directory: complete or not at all; an existing one is replaced.

    Args:
      path: its folder, `RUN_DIR/models/<name>`.
      shape: of the model.
      params: its parameters, all of one dtype.
      source: where they come from.
      tokenizer: saved along, if there is one.
      draft_ids: sorted ids i32[V'] of a trimmed head.
      training_cost: of a model that was trained here.
      config, seed, inputs: of the training, for the lineage.

    Raises:
      UserError: the tokenizer has more ids than the embedding rows, or the file system refuses.
    """
    path = epath.Path(path)
    dtype = np.dtype(next(iter(flatten(params).values())).dtype).name
    if tokenizer is not None:
        require_fit(tokenizer, shape.vocab_size, path)
    _require_space(path, shape.weight_bytes(dtype))
    weights_hash = hash_params(params)
    with atomic_directory(path) as folder:
        save_params(folder / model_card.WEIGHTS, dict(params))
        described = tokenizer and model_card.write_tokenizer(folder, tokenizer)
        card = ModelCard(
            lineage=Lineage.here(
                config=config,
                seed=seed,
                tokenizer_hash=described.content_hash if described else None,
                weights_hash={path.name: weights_hash},
                inputs=inputs,
            ),
            shape=shape,
            dtype=dtype,  # pyright: ignore[reportArgumentType] refused below if it is another
            weights_hash=weights_hash,
            source=source,
            tokenizer=described,
            draft_ids="" if draft_ids is None else model_card.write_draft_ids(folder, draft_ids),
            training_cost=training_cost,
        )
        model_card.write_card(folder, card)
    return card


def _require_space(path: epath.Path, num_bytes: int) -> None:
    """Refuses what certainly does not fit before the first byte is written."""
    if is_bucket(path):
        return
    existing = next(parent for parent in path.absolute().parents if parent.exists())
    free = shutil.disk_usage(existing).free
    if free < num_bytes:
        raise UserError(
            f"{path} needs {num_bytes / 1e6:,.0f} MB, but {free / 1e6:,.0f} MB are free in {existing}; "
            "free some space or choose another place"
        )


def read_params_of(path: epath.PathLike, card: ModelCard, dtype: str | None = None) -> Params:
    """The parameters of a model directory on the default device, as stored or cast to `dtype`."""
    abstract = abstract_params(card.shape, DTYPES[dtype or card.dtype])
    return restore_params(epath.Path(path) / model_card.WEIGHTS, abstract)


def head_of(params: Mapping[str, Any]) -> jax.Array:
    """The rows [V, D] that logits are products with: the head, or the embedding if it is tied."""
    return params["head"] if "head" in params else params["embedding"]
