"""Packs a drafter that shares its target's embedding into one small file, and unpacks it beside that target.

    python -m tools.pack_drafter pack MODEL_DIRECTORY TARGET_DIRECTORY FILE
    python -m tools.pack_drafter unpack FILE TARGET_DIRECTORY MODEL_DIRECTORY

FILE is in the safetensors format: parameters in bfloat16 without the embedding, the ids of a trimmed head and
the model's card as metadata. Train the drafter with `ModelSpec.frozen = ("embedding",)`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import safetensors.numpy
from etils import epath
from safetensors import SafetensorError, safe_open

from drafters.formats.tensors import DTYPES, flatten, leaf_shapes, nest
from drafters.model_card import CARD, ModelCard, read_card, read_draft_ids, read_tokenizer
from drafters.models import read_params_of, write_model
from drafters.shapes import TransformerShape
from pipeline.core import artifacts
from pipeline.core.errors import UserError, run_cli
from pipeline.core.run_dir import atomic_write, explain_os_errors, require_replaceable

_EMBEDDING = ("embedding",)
_DRAFT_IDS = "draft_ids"
_STORED = "bfloat16"


def pack(model: epath.Path, target: epath.Path, file: epath.Path) -> int:
    """Writes `file`; returns its bytes.

    Raises:
      UserError: the model has another embedding than the target.
    """
    card, target_card = read_card(model), read_card(target)
    leaves = {path: np.asarray(leaf) for path, leaf in flatten(read_params_of(model, card)).items()}
    ours = leaves.pop(_EMBEDDING)
    if card.shape.tied_head or not np.array_equal(
        ours, _embedding(target, target_card, card.dtype)
    ):
        raise UserError(
            f"{model} does not share the embedding of {target}: train it with an untied head, init = "
            "'target' and frozen = ('embedding',), or from such a model"
        )
    tensors = {".".join(path): leaf.astype(DTYPES[_STORED]) for path, leaf in leaves.items()}
    ids = read_draft_ids(model, card)
    if ids is not None:
        tensors[_DRAFT_IDS] = ids
    told = {"card": json.dumps(artifacts.to_json(card)), "target": target_card.weights_hash}
    content = safetensors.numpy.save(tensors, metadata=told)
    atomic_write(file, content)
    return len(content)


def unpack(file: epath.Path, target: epath.Path, model: epath.Path) -> ModelCard:
    """Writes the model directory `model` in the target's dtype.

    Raises:
      UserError: the file is damaged, or was packed beside another target.
    """
    require_replaceable(model, CARD, target)
    packed, tensors, taught_by = _read(file)
    card = read_card(target)
    if taught_by != card.weights_hash:
        raise UserError(
            f"{file} was packed beside a target with the weights {taught_by[:12]}, {target} has "
            f"{card.weights_hash[:12]}: give the target that the drafter was trained for, in its dtype"
        )
    ids = tensors.pop(_DRAFT_IDS, None)
    _require_fit(file, packed.shape, card.shape, ids)
    leaves = {
        path: leaf.astype(DTYPES[card.dtype]) for path, leaf in _leaves(file, packed, tensors)
    }
    leaves[_EMBEDDING] = _embedding(target, card, card.dtype)
    return write_model(
        model,
        shape=packed.shape,
        params=nest(leaves),
        source=packed.source,
        tokenizer=read_tokenizer(target, card),
        draft_ids=ids,
        training_cost=packed.training_cost,
        config=packed.lineage.config,
        seed=packed.lineage.seed,
        inputs=packed.lineage.inputs,
    )


def _require_fit(
    file: epath.Path, shape: TransformerShape, target: TransformerShape, ids: np.ndarray | None
) -> None:
    """Refuses a file whose drafter has other tokens than the target, or a head of other ones than it says."""
    if (shape.vocab_size, shape.width) != (target.vocab_size, target.width):
        raise UserError(
            f"{file}: its card says another embedding than the target's; fetch it again"
        )
    if ids is None and not shape.head_vocab:
        return
    if not _increasing(ids, shape.head_vocab, shape.vocab_size):
        raise UserError(
            f"{file}: {_DRAFT_IDS} are not {shape.head_vocab} increasing ids below {shape.vocab_size}; fetch "
            "it again"
        )


def _increasing(ids: np.ndarray | None, count: int, below: int) -> bool:
    if ids is None or ids.dtype.kind != "i" or ids.shape != (count,):
        return False
    return bool(np.all(np.diff(ids) > 0) and ids[0] >= 0 and ids[-1] < below)


def _embedding(target: epath.Path, card: ModelCard, dtype: str) -> np.ndarray:
    return np.asarray(read_params_of(target, card, dtype)["embedding"])


def _read(file: epath.Path) -> tuple[ModelCard, dict[str, np.ndarray], str]:
    """Card, tensors and the hash of the target."""
    try:
        with explain_os_errors(file, "read"), safe_open(file, framework="numpy") as opened:
            told = opened.metadata() or {}
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        card = artifacts.from_json(json.loads(told["card"]), ModelCard)
        return card, tensors, told["target"]
    except (SafetensorError, KeyError, ValueError) as error:
        raise UserError(f"{file}: not a packed drafter ({error}); fetch it again") from error


def _leaves(file: epath.Path, card: ModelCard, tensors: Mapping[str, np.ndarray]) -> Any:
    """Path and tensor of every parameter but the embedding, checked against the shape."""
    wanted = {path: size for path, size in leaf_shapes(card.shape).items() if path != _EMBEDDING}
    names = {".".join(path): path for path in wanted}
    if tensors.keys() != names.keys():
        odd = sorted(tensors.keys() ^ names.keys())
        raise UserError(f"{file}: tensor {odd[0]} does not fit its {CARD}; fetch it again")
    for name, tensor in tensors.items():
        if tensor.shape != wanted[names[name]] or tensor.dtype != DTYPES[_STORED]:
            raise UserError(
                f"{file}: tensor {name} is {tensor.dtype}{list(tensor.shape)}, not {_STORED}"
                f"{list(wanted[names[name]])}; fetch it again"
            )
        if not np.isfinite(tensor.astype(np.float32)).all():
            raise UserError(f"{file}: tensor {name} holds what is no number; fetch it again")
        yield names[name], tensor


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.pack_drafter",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("action", choices=("pack", "unpack"))
    parser.add_argument("source", type=epath.Path, help="a model directory, or the file to unpack")
    parser.add_argument("target", type=epath.Path, help="the target's model directory")
    parser.add_argument("destination", type=epath.Path, help="the file, or the model directory")
    given = parser.parse_args(arguments)
    if given.action == "pack":
        size = pack(given.source, given.target, given.destination)
        print(f"{given.destination}: {size:,} bytes")
    else:
        card = unpack(given.source, given.target, given.destination)
        print(f"{given.destination}: {card.shape.num_params():,} parameters")
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(main))
