"""Safetensors files of a Hugging Face folder: one or sharded, read and written tensor by tensor."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from etils import epath
from safetensors import SafetensorError, safe_open

from drafters.formats.tensors import DTYPES, Progress
from pipeline.core.errors import UserError
from pipeline.core.run_dir import explain_os_errors

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_FLOATS = ("F64", "F32", "F16", "BF16")
_NAMES = {"float32": "F32", "bfloat16": "BF16"}


def read_json(path: epath.Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
      UserError: the file is missing, is not text, or holds something else.
    """
    try:
        with explain_os_errors(path, "read"):
            content = json.loads(path.read_bytes().decode("utf-8"))
    except ValueError as error:  # UnicodeDecodeError too
        raise UserError(f"{path}: not a JSON file ({error}); fetch it again") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected a JSON object; fetch it again")
    return content


class SafetensorsFolder:
    """The tensors of all shards of a folder.

    Raises:
      UserError: a file that is missing or truncated, or an index that does not fit the files.
    """

    def __init__(self, folder: epath.Path):
        self.folder = folder
        self.files, promised = _shards(folder)
        self._shards = {file: _open(folder / file) for file in self.files}
        self._home = {name: file for file, shard in self._shards.items() for name in shard.keys()}  # noqa: SIM118 not iterable
        for name, file in promised.items():
            if self._home.get(name) != file:
                raise UserError(
                    f"{folder / INDEX} places tensor {name} in {file}, which does not have it; fetch "
                    "both files again"
                )

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor."""
        return {
            name: tuple(self._shards[file].get_slice(name).get_shape())
            for name, file in self._home.items()
        }

    def read(self, name: str) -> np.ndarray:
        """One tensor, as it is stored.

        Raises:
          UserError: it does not hold floats.
        """
        file = self._home[name]
        dtype = self._shards[file].get_slice(name).get_dtype()
        if dtype not in _FLOATS:
            raise UserError(
                f"{self.folder / file}: tensor {name} has type {dtype}; quantised checkpoints are not "
                f"supported, take one in {', '.join(_FLOATS)}"
            )
        return self._shards[file].get_tensor(name)


def _shards(folder: epath.Path) -> tuple[list[str], Mapping[str, str]]:
    """Names of the weight files, and tensor -> file as the index has it."""
    if (folder / SINGLE).exists():
        return [SINGLE], {}
    if not (folder / INDEX).exists():
        raise UserError(
            f"{folder} has neither {SINGLE} nor {INDEX}; fetch the weights in the safetensors format"
        )
    placed = read_json(folder / INDEX).get("weight_map")
    if not isinstance(placed, dict) or not placed:
        raise UserError(f"{folder / INDEX} has no weight_map; fetch it again")
    files = sorted(set(placed.values()))
    if missing := [file for file in files if not (folder / file).exists()]:
        raise UserError(
            f"{folder / INDEX} names {len(files)} files, but {', '.join(missing)} is missing; fetch it"
        )
    return files, placed


def _open(path: epath.Path) -> Any:
    try:
        with explain_os_errors(path, "read"):
            return safe_open(path, framework="numpy")
    except SafetensorError as error:
        raise UserError(
            f"{path}: truncated or not a safetensors file ({error}); fetch it again"
        ) from error


def write_sharded(
    folder: epath.Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: str,
    read: Callable[[str], np.ndarray],
    *,
    shard_bytes: int,
    progress: Progress,
) -> None:
    """Writes tensors in the order of `shapes`, into one file or several with an index.

    Args:
      folder: exists already.
      shapes: of all tensors by name.
      dtype: of all tensors.
      read: gives a tensor when its turn comes.
      shard_bytes: a file is closed before it exceeds this; a larger tensor gets its own.
      progress: is told the bytes written.
    """
    itemsize = DTYPES[dtype].itemsize
    sizes = {name: math.prod(shape) * itemsize for name, shape in shapes.items()}
    groups = list(_grouped(sizes, shard_bytes))
    files = [f"model-{i + 1:05}-of-{len(groups):05}.safetensors" for i in range(len(groups))]
    files = [SINGLE] if len(groups) == 1 else files
    for file, group in zip(files, groups, strict=True):
        _write(folder / file, {n: shapes[n] for n in group}, sizes, dtype, read, progress)
    if len(groups) > 1:
        placed = {name: f for f, group in zip(files, groups, strict=True) for name in group}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": placed}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _grouped(sizes: Mapping[str, int], limit: int) -> Iterator[list[str]]:
    group: list[str] = []
    filled = 0
    for name, size in sizes.items():
        if group and filled + size > limit:
            yield group
            group, filled = [], 0
        group.append(name)
        filled += size
    yield group


def _write(
    path: epath.Path,
    shapes: Mapping[str, tuple[int, ...]],
    sizes: Mapping[str, int],
    dtype: str,
    read: Callable[[str], np.ndarray],
    progress: Progress,
) -> None:
    """One file: length of the header, the header, the tensors. (The package's writer wants all at once.)"""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + sizes[name]
        header[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": [start, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        for name in shapes:
            tensor = np.ascontiguousarray(read(name), DTYPES[dtype])
            file.write(tensor.reshape(-1).view(np.uint8).data)
            progress(tensor.nbytes)
