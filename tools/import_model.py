"""Imports a language model: a Hugging Face folder or a GGUF file, to a model directory.

    python -m tools.import_model SOURCE DEST [--dtype=float32|bfloat16]

SOURCE is a folder with config.json, safetensors and tokenizer files, or a .gguf file (or a folder with one).
DEST appears complete or not at all.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from etils import epath
from tqdm import tqdm

from drafters.formats.gguf import GGUFFile
from drafters.formats.huggingface import CONFIG, HuggingFaceFolder
from drafters.formats.tensors import DTYPES, read_params
from drafters.model_card import CARD, ModelCard, Source
from drafters.models import write_model
from drafters.tokenizers import require_fit
from pipeline.core.artifacts import sha256_of_file
from pipeline.core.errors import UserError, run_cli
from pipeline.core.run_dir import require_replaceable


def open_checkpoint(source: Path) -> GGUFFile | HuggingFaceFolder:
    """The checkpoint at `source`, by what lies there.

    Raises:
      UserError: nothing that can be imported.
    """
    if source.is_file():
        return GGUFFile(source)
    ggufs = sorted(source.glob("*.gguf"))
    if len(ggufs) == 1 and not (source / CONFIG).exists():
        return GGUFFile(ggufs[0])
    if ggufs and not (source / CONFIG).exists():
        names = ", ".join(path.name for path in ggufs)
        raise UserError(f"{source} holds several models ({names}); give one of the files")
    return HuggingFaceFolder(source)


def import_model(source: Path, destination: epath.PathLike, dtype: str) -> ModelCard:
    """Writes the model directory `destination`; see the module."""
    require_replaceable(destination, CARD, source)
    checkpoint = open_checkpoint(source)
    shape, tokenizer = checkpoint.shape(), checkpoint.tokenizer()
    if tokenizer is not None:
        require_fit(tokenizer, shape.vocab_size, source)
    total = shape.weight_bytes(dtype)
    with tqdm(total=total, unit="B", unit_scale=True, desc="reading", disable=None) as bar:
        params = read_params(shape, dtype, checkpoint, progress=bar.update)
    hashes = {path.name: sha256_of_file(path) for path in checkpoint.files}
    return write_model(
        destination,
        shape=shape,
        params=params,
        source=Source(format=checkpoint.format, name=source.name, sha256=hashes),
        tokenizer=tokenizer,
    )


def describe(card: ModelCard) -> str:
    """Sizes and hashes of an imported model, some lines of text."""
    shape = card.shape
    lines = [
        f"{shape.num_params() / 1e6:,.1f} M parameters, {card.dtype}, "
        f"{shape.weight_bytes(card.dtype) / 1e6:,.1f} MB",
        f"weights    {card.weights_hash}",
    ]
    if card.tokenizer:
        lines.append(f"tokenizer  {card.tokenizer.content_hash} ({card.tokenizer.kind})")
    else:
        lines.append(
            "tokenizer  none: texts cannot be answered; put tokenizer.json or tokenizer.model beside "
            "config.json and import it again"
        )
    return "\n".join(
        [*lines, *(f"{name}  {digest}" for name, digest in card.source.sha256.items())]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.import_model",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", type=Path, help="a Hugging Face folder or a .gguf file")
    parser.add_argument("destination", help="the model directory to write")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32")
    given = parser.parse_args(arguments)
    print(describe(import_model(given.source, given.destination, given.dtype)))
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(main))
