"""Exports a model directory to a Hugging Face folder that transformers, vLLM and llama.cpp load.

    python -m tools.export_model SOURCE DEST [--target=MODEL_DIRECTORY]

A drafter with a trimmed head needs --target: the missing rows of the head are the target's. DEST appears
complete or not at all.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import numpy as np
from etils import epath
from tqdm import tqdm

from drafters.formats.huggingface import CONFIG, SHARD_BYTES, export, with_whole_head
from drafters.model_card import ModelCard, read_card, read_draft_ids, read_tokenizer
from drafters.models import head_of, read_params_of
from drafters.shapes import TransformerShape
from drafters.transformer import Params
from pipeline.core.artifacts import sha256_of_file
from pipeline.core.errors import UserError, run_cli
from pipeline.core.run_dir import require_replaceable


def export_model(
    source: epath.Path, destination: epath.Path, target: epath.Path | None, shard_bytes: int
) -> None:
    """Writes the folder `destination`; see the module."""
    require_replaceable(destination, CONFIG, source, *([target] if target else []))
    card = read_card(source)
    if target and not card.draft_ids:
        raise UserError(f"{source} proposes the whole vocabulary: leave --target away")
    tokenizer = read_tokenizer(source, card) if card.tokenizer else None
    shape, params = _whole(source, card, target)
    total = shape.weight_bytes(card.dtype)
    with tqdm(total=total, unit="B", unit_scale=True, desc="writing", disable=None) as bar:
        export(destination, shape, params, tokenizer, shard_bytes=shard_bytes, progress=bar.update)


def _whole(
    source: epath.Path, card: ModelCard, target: epath.Path | None
) -> tuple[TransformerShape, Params]:
    """Shape and parameters with a head for the whole vocabulary."""
    params = read_params_of(source, card)
    draft_ids = read_draft_ids(source, card)
    if draft_ids is None or target is None:
        return card.shape, params
    target_card = read_card(target)
    _require_same_tokens(source, card, target, target_card)
    head = np.asarray(head_of(read_params_of(target, target_card)))
    return with_whole_head(card.shape, params, draft_ids, head)


def _require_same_tokens(
    source: epath.Path, card: ModelCard, target: epath.Path, target_card: ModelCard
) -> None:
    if card.tokenizer is None or target_card.tokenizer is None:
        return
    ours, theirs = read_tokenizer(source, card), read_tokenizer(target, target_card)
    if difference := ours.first_difference(theirs):
        raise UserError(
            f"{source} and {target} have different tokenizers: {difference}; give the target this "
            "drafter was trained for"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.export_model",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", type=epath.Path, help="a model directory")
    parser.add_argument("destination", type=epath.Path, help="the folder to write")
    parser.add_argument("--target", type=epath.Path, help="completes a trimmed head")
    parser.add_argument(
        "--shard_bytes", type=int, default=SHARD_BYTES, help="size of a weight file at most"
    )
    given = parser.parse_args(arguments)
    export_model(given.source, given.destination, given.target, given.shard_bytes)
    for path in sorted(given.destination.iterdir()):
        print(f"{path.name}  {path.stat().length:,} bytes  {sha256_of_file(path)}")
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(main))
