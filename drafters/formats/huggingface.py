"""Checkpoints in the Hugging Face format: a folder of `config.json`, safetensors and tokenizer files."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from etils import epath

from drafters.formats import huggingface_tokenizer, safetensors
from drafters.formats.huggingface_config import Fields, config_from_shape, shape_from_config
from drafters.formats.huggingface_families import FAMILIES, MULTIMODAL
from drafters.formats.tensors import Names, Params, Progress, flatten, no_progress, slots
from drafters.shapes import TransformerShape
from drafters.tokenizers import Tokenizer
from pipeline.core.errors import UserError
from pipeline.core.run_dir import atomic_directory

CONFIG = "config.json"
SHARD_BYTES = 5_000_000_000
# The language model inside a model of text and images, as transformers 5 and 4 name it.
_NESTED = {"model.language_model.": "model.", "language_model.model.": "model.",
           "language_model.lm_head.": "lm_head."}  # fmt: skip
_OTHER_HALVES = ("vision_tower.", "multi_modal_projector.")


class HuggingFaceFolder:
    """An open checkpoint: the shape its config describes, and a source of its tensors.

    Raises:
      UserError: a missing, malformed or truncated file, or an unsupported model.
    """

    format: Final = "huggingface"

    def __init__(self, folder: str | os.PathLike[str]):
        self._folder = epath.Path(folder)
        self.origin = os.fspath(folder)
        if not self._folder.is_dir():
            raise UserError(f"{folder} is not a folder; give the one that holds {CONFIG}")
        self._config = safetensors.read_json(self._folder / CONFIG)
        self._family = Fields(str(self._folder / CONFIG), self._config).family
        self._shape = shape_from_config(str(self._folder / CONFIG), self._config)
        self._tensors = safetensors.SafetensorsFolder(self._folder)
        nested = _NESTED if self._config.get("model_type") in MULTIMODAL else {}
        self._stored = {_renamed(name, nested): name for name in self._tensors.shapes()}

    @property
    def files(self) -> list[epath.Path]:
        """The files that determine the model."""
        return [self._folder / name for name in (CONFIG, *self._tensors.files)]

    @property
    def names(self) -> Names:
        """Names of the tensors by their roles."""
        return self._family.names

    def shape(self) -> TransformerShape:
        """The shape of the model."""
        return self._shape

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor, under the name it has in a model of text alone."""
        found = self._tensors.shapes()
        return {name: found[stored] for name, stored in self._stored.items()}

    def read(self, name: str) -> np.ndarray:
        """One tensor."""
        return self._tensors.read(self._stored[name])

    def ignored(self, name: str) -> bool:
        """Whether the tensor is known and no parameter: tables old versions stored, a head that is
        tied to the embedding, the half of the model that sees images."""
        return (
            name.endswith("rotary_emb.inv_freq")
            or (name == "lm_head.weight" and self._shape.tied_head)
            or name.removeprefix("model.").startswith(_OTHER_HALVES)
        )

    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer, None if the folder has none."""
        return huggingface_tokenizer.read_tokenizer(self._folder, self._config)


def _renamed(name: str, prefixes: Mapping[str, str]) -> str:
    for prefix, ours in prefixes.items():
        if name.startswith(prefix):
            return ours + name.removeprefix(prefix)
    return name


def export(
    folder: str | os.PathLike[str],
    shape: TransformerShape,
    params: Mapping[str, Any],
    tokenizer: Tokenizer | None,
    *,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress = no_progress,
) -> None:
    """Writes a folder that transformers loads, and that computes the same logits.

    Args:
      folder: appears complete or not at all; an existing one is replaced.
      shape: of the model, with a whole head (see `with_whole_head`).
      params: its parameters, all of one dtype, which the files keep.
      tokenizer: written along, if there is one.
      shard_bytes: size of a weight file at most.
      progress: is told the bytes written.

    Raises:
      UserError: no model type of transformers expresses the shape, or the file system refuses.
    """
    if shape.head_vocab:
        raise UserError(
            f"the head proposes {shape.head_vocab} of {shape.vocab_size} tokens, which no model type of "
            "transformers does; give --target, whose head has the missing rows"
        )
    leaves = flatten(params)
    dtype = np.dtype(next(iter(leaves.values())).dtype).name
    config = (
        config_from_shape(shape) | _token_ids(tokenizer) | {"dtype": dtype, "torch_dtype": dtype}
    )
    places = slots(shape, FAMILIES[config["model_type"]].names)

    def read(name: str) -> np.ndarray:
        slot = places[name]
        return np.asarray(leaves[slot.path])[slot.index].reshape(slot.shape)

    with atomic_directory(folder) as temporary:
        (temporary / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        generation = json.dumps(_token_ids(tokenizer), indent=2)
        (temporary / "generation_config.json").write_text(generation + "\n")
        if tokenizer is not None:
            huggingface_tokenizer.write_tokenizer(temporary, tokenizer)
        shapes = {name: slot.shape for name, slot in places.items()}
        safetensors.write_sharded(
            temporary, shapes, dtype, read, shard_bytes=shard_bytes, progress=progress
        )


def _token_ids(tokenizer: Tokenizer | None) -> dict[str, Any]:
    if tokenizer is None:
        return {"bos_token_id": None, "eos_token_id": None}
    ends = list(tokenizer.eos_ids)
    return {"bos_token_id": tokenizer.bos_id, "eos_token_id": ends[0] if len(ends) == 1 else ends}


def with_whole_head(
    shape: TransformerShape,
    params: Mapping[str, Any],
    draft_ids: np.ndarray,
    target_head: np.ndarray,
) -> tuple[TransformerShape, Params]:
    """A drafter whose trimmed head is completed by the rows of its target's head.

    Args:
      shape, params: of the drafter.
      draft_ids: ids i32[V'] of its rows.
      target_head: [V, D], the embedding if it is tied.

    Raises:
      UserError: the target has another width or vocabulary.
    """
    wanted = (shape.vocab_size, shape.width)
    if target_head.shape != wanted:
        raise UserError(
            f"the target's head is {list(target_head.shape)}, but the drafter needs rows of "
            f"{list(wanted)}: a trimmed head can be completed only where vocabulary and width agree"
        )
    own = np.asarray(params["head"])
    head = np.array(target_head, own.dtype)
    head[draft_ids] = own
    return dataclasses.replace(shape, head_vocab=0), {**params, "head": head}
