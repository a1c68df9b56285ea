"""The container format GGUF: metadata and tensors of a file, every read checked against its end.

The gguf package has a reader too; it makes two numpy arrays per token of the vocabulary (many seconds for
a real one) and reads past the end of a truncated file without an error. Types, block sizes and
dequantisation come from that package. Format: ggml's `docs/gguf.md`, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from gguf.quants import dequantize

from pipeline.core.errors import UserError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_SCALARS = {
    GGUFValueType.UINT8: "<u1",
    GGUFValueType.INT8: "<i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.FLOAT64: "<f8",
    GGUFValueType.BOOL: "?",
}
_PLAIN = {GGMLQuantizationType.F32: "<f4", GGMLQuantizationType.F16: "<f2"}


class Tensor(NamedTuple):
    """One tensor as it lies in the file."""

    shape: tuple[int, ...]  # [out, in]: the file lists sizes the other way round
    kind: GGMLQuantizationType
    offset: int  # from the start of the file
    num_bytes: int


class Container:
    """A GGUF file, mapped into memory: `metadata` and `tensors` by name.

    Raises:
      UserError: no such file, or one that is damaged.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.origin = os.fspath(path)
        with explained(self.origin):
            with open(path, "rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            cursor = _Cursor(self._data)
            num_tensors, num_values = _header(cursor)
            self.metadata: dict[str, Any] = {}
            for _ in range(num_values):
                key = cursor.text()
                self.metadata[key] = cursor.value(cursor.integer("<u4"))
            described = [_description(cursor) for _ in range(num_tensors)]
            self.tensors = self._placed(described, cursor.offset)

    def _placed(
        self, described: list[tuple[str, Tensor]], end_of_descriptions: int
    ) -> dict[str, Tensor]:
        alignment = int(self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT))
        start = -(-end_of_descriptions // alignment) * alignment
        tensors = {name: t._replace(offset=start + t.offset) for name, t in described}
        if len(tensors) < len(described):
            raise ValueError("two tensors have the same name")
        end = max((t.offset + t.num_bytes for t in tensors.values()), default=0)
        _require_bytes(end, len(self._data))
        return tensors

    def dequantized(self, name: str) -> np.ndarray:
        """The tensor `name` as float32.

        Raises:
          UserError: its type is one that the gguf package cannot dequantise.
        """
        shape, kind, offset, num_bytes = self.tensors[name]
        raw = np.frombuffer(self._data, np.uint8, num_bytes, offset)
        if kind in _PLAIN:
            return raw.view(_PLAIN[kind]).astype(np.float32).reshape(shape)
        try:
            return dequantize(raw.reshape(*shape[:-1], -1), kind).reshape(shape)
        except NotImplementedError as error:
            raise UserError(
                f"{self.origin}: tensor {name} has type {kind.name}, which the gguf package cannot "
                "dequantise; convert the model to another type"
            ) from error


class _Cursor:
    """Reads one thing after the other."""

    def __init__(self, data: mmap.mmap):
        self._data = data
        self.offset = 0

    def numbers(self, dtype: str, count: int) -> np.ndarray:
        raw = self.raw(np.dtype(dtype).itemsize * count)
        return np.frombuffer(raw, dtype)

    def integer(self, dtype: str) -> int:
        return int(self.numbers(dtype, 1)[0])

    def text(self) -> str:
        return self.raw(self.integer("<u8")).decode("utf-8")

    def raw(self, num_bytes: int) -> bytes:
        end = self.offset + num_bytes
        _require_bytes(end, len(self._data))
        raw = self._data[self.offset : end]
        self.offset = end
        return raw

    def value(self, kind: int) -> Any:
        """A value of the type `kind`. Floats of single precision become the number that was meant."""
        kind = GGUFValueType(kind)
        if kind == GGUFValueType.STRING:
            return self.text()
        if kind == GGUFValueType.ARRAY:
            return self._array(GGUFValueType(self.integer("<u4")), self.integer("<u8"))
        number = self.numbers(_SCALARS[kind], 1)[0]
        # float32 0.1 is 0.10000000149 as a double.
        return float(str(number)) if kind == GGUFValueType.FLOAT32 else number.item()

    def _array(self, kind: GGUFValueType, count: int) -> list[Any]:
        if kind in _SCALARS:
            return self.numbers(_SCALARS[kind], count).tolist()
        _require_bytes(self.offset + count, len(self._data))
        if kind == GGUFValueType.STRING:
            return self._texts(count)
        return [self.value(kind) for _ in range(count)]

    def _texts(self, count: int) -> list[str]:
        """`count` strings, by the shortest way: vocabularies have 10^5 of them."""
        data, offset, unpack = self._data, self.offset, struct.Struct("<Q").unpack_from
        texts = []
        for _ in range(count):
            start = offset + 8
            offset = start + unpack(data, offset)[0]
            texts.append(data[start:offset].decode("utf-8"))
        _require_bytes(offset, len(data))
        self.offset = offset
        return texts


def _header(cursor: _Cursor) -> tuple[int, int]:
    """Numbers of tensors and of metadata values."""
    if cursor.raw(4) != _MAGIC:
        raise ValueError("it does not start with GGUF")
    version = cursor.integer("<u4")
    if version not in _VERSIONS:
        raise ValueError(f"version {version}, supported are 2 and 3 in little-endian order")
    return cursor.integer("<u8"), cursor.integer("<u8")


def _description(cursor: _Cursor) -> tuple[str, Tensor]:
    """Name and tensor, its offset still relative to the start of the data."""
    name = cursor.text()
    sizes = cursor.numbers("<u8", cursor.integer("<u4")).tolist()
    kind = GGMLQuantizationType(cursor.integer("<u4"))
    per_block, block_bytes = GGML_QUANT_SIZES[kind]
    if sizes and sizes[0] % per_block:
        raise ValueError(f"rows of tensor {name} are no multiple of a block")
    num_bytes = math.prod(sizes) // per_block * block_bytes
    return name, Tensor(tuple(reversed(sizes)), kind, cursor.integer("<u8"), num_bytes)


def _require_bytes(needed: int, found: int) -> None:
    if needed > found:
        raise ValueError(f"{found:,} bytes where at least {needed:,} are needed")


@contextlib.contextmanager
def explained(origin: str) -> Iterator[None]:
    """One message for whatever a damaged file makes the parser stumble over."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot read {origin}: {error.strerror or error}; check the path"
        ) from error
    except (ValueError, IndexError, KeyError, OverflowError, struct.error) as error:
        raise UserError(
            f"{origin}: damaged or not a GGUF file ({error}); fetch or convert it again"
        ) from error
