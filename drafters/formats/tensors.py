"""Where the tensors of other programs lie in our parameter tree, and the tree filled from them.

Every foreign weight is `[out, in]` and becomes a part of one of our leaves by a reshape: query, key and
value heads interleave per group in `qkv: [G, R+2, H, D]`, gate and up rows in `gate_up: [F, 2, D]`. A format
brings names and an order of reading; this module knows the places. Axes as in `drafters.shapes`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import ml_dtypes
import numpy as np

from drafters.shapes import TransformerShape
from pipeline.core.errors import UserError

Path = tuple[str, ...]
Params = dict[str, Any]  # nested, leaves are arrays
Names = Mapping[str, str]  # role -> name, with {} for the number of the layer
Progress = Callable[[int], object]  # is told the bytes of parameters done since the last call

DTYPES: Mapping[str, np.dtype] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}


def no_progress(num_bytes: int) -> None:
    """A `Progress` that nobody watches."""


class Slot(NamedTuple):
    """The place of one foreign tensor: `leaf[index]`, reshaped to `shape`."""

    path: Path
    index: tuple[int | slice, ...]
    shape: tuple[int, ...]


class TensorSource(Protocol):
    """Tensors of a checkpoint, read one at a time."""

    @property
    def origin(self) -> str:
        """File or folder, for messages."""
        ...

    @property
    def names(self) -> Names:
        """Names of the tensors by their roles, see `slots`."""
        ...

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor there is, `[out, in]`."""
        ...

    def read(self, name: str) -> np.ndarray:
        """One tensor as floats of any width."""
        ...

    def ignored(self, name: str) -> bool:
        """Whether a tensor is known and no parameter."""
        ...


def leaf_shapes(shape: TransformerShape) -> dict[Path, tuple[int, ...]]:
    """Path and shape of every leaf of the parameter tree, in the order of the computation."""
    leaves: dict[Path, tuple[int, ...]] = {("embedding",): (shape.vocab_size, shape.width)}
    layer = _layer_leaves(shape)
    for i in range(shape.num_layers):
        leaves |= {("layers", str(i), *path): size for path, size in layer.items()}
    leaves["norm",] = (shape.width,)
    if not shape.tied_head:
        leaves["head",] = (shape.logits_size, shape.width)
    return leaves


def _layer_leaves(shape: TransformerShape) -> dict[Path, tuple[int, ...]]:
    groups, ratio, head = shape.num_kv_heads, shape.queries_per_group, shape.head_dim
    width, hidden = shape.width, shape.mlp_width
    candidates = [
        (True, ("attention_norm",), (width,)),
        (True, ("attention", "qkv"), (groups, ratio + 2, head, width)),
        (shape.qkv_bias, ("attention", "qkv_bias"), (groups, ratio + 2, head)),
        (shape.qk_norm, ("attention", "query_norm"), (head,)),
        (shape.qk_norm, ("attention", "key_norm"), (head,)),
        (True, ("attention", "out"), (width, groups, ratio, head)),
        (shape.output_bias, ("attention", "out_bias"), (width,)),
        (shape.post_norms, ("attention_post_norm",), (width,)),
        (True, ("mlp_norm",), (width,)),
        (True, ("mlp", "gate_up"), (hidden, 2, width)),
        (shape.mlp_bias, ("mlp", "gate_up_bias"), (hidden, 2)),
        (True, ("mlp", "down"), (width, hidden)),
        (shape.mlp_bias, ("mlp", "down_bias"), (width,)),
        (shape.post_norms, ("mlp_post_norm",), (width,)),
    ]
    return {path: size for wanted, path, size in candidates if wanted}


def slots(shape: TransformerShape, names: Names) -> dict[str, Slot]:
    """The slot of every tensor that a checkpoint of `shape` holds, by its foreign name.

    Args:
      shape: of the model.
      names: foreign name of each role: `embedding`, `norm`, `head` and, with `{}` for the layer,
        `query`, `key`, `value`, `gate`, `up`, the same with `_bias`, and the leaves of a layer.
    """
    leaves = leaf_shapes(shape)
    places: dict[str, Slot] = {}
    for path, size in leaves.items():
        layer = path[1] if path[0] == "layers" else ""
        for role, index, foreign in _parts(path[-1], size, shape):
            places[names[role].format(layer)] = Slot(path, index, foreign)
    return places


def _parts(
    leaf: str, size: tuple[int, ...], shape: TransformerShape
) -> Iterator[tuple[str, tuple[int | slice, ...], tuple[int, ...]]]:
    """Role, index into the leaf and foreign shape of each tensor that makes up `leaf`."""
    ratio, bias = shape.queries_per_group, "_bias" if leaf.endswith("_bias") else ""
    if leaf in ("qkv", "qkv_bias"):
        everything, groups = slice(None), size[0]
        for role, start, count in (
            ("query", 0, ratio),
            ("key", ratio, 1),
            ("value", ratio + 1, 1),
        ):
            rows = groups * count * shape.head_dim
            yield role + bias, (everything, slice(start, start + count)), (rows, *size[3:])
    elif leaf in ("gate_up", "gate_up_bias"):
        for part, role in enumerate(("gate", "up")):
            yield role + bias, (slice(None), part), (size[0], *size[2:])
    elif leaf == "out":
        yield "out", (), (size[0], shape.num_heads * shape.head_dim)
    else:
        yield leaf, (), size


def read_params(
    shape: TransformerShape,
    dtype: str,
    source: TensorSource,
    *,
    progress: Progress = no_progress,
) -> Params:
    """All parameters of `shape` as numpy arrays of `dtype`, read tensor by tensor.

    Memory peaks at the result and one tensor.

    Raises:
      UserError: the source lacks a tensor, has one that no parameter needs and it does not
        ignore, or has one of another shape.
    """
    places = slots(shape, source.names)
    _require_match(source, places)
    leaves = {path: np.empty(size, DTYPES[dtype]) for path, size in leaf_shapes(shape).items()}
    for name, slot in places.items():
        tensor = source.read(name)
        part = leaves[slot.path][slot.index]
        part[...] = tensor.reshape(part.shape)
        progress(part.nbytes)
    return nest(leaves)


def _require_match(source: TensorSource, places: Mapping[str, Slot]) -> None:
    found = source.shapes()
    if missing := [name for name in places if name not in found]:
        raise UserError(
            f"{source.origin}: {some(missing)} missing; the file is incomplete or its config "
            "describes another model"
        )
    if extra := [name for name in found if name not in places and not source.ignored(name)]:
        raise UserError(
            f"{source.origin}: {some(extra)} not used by a model of this config; "
            "the weights and the config belong to different models"
        )
    for name, slot in places.items():
        if found[name] != slot.shape:
            raise UserError(
                f"{source.origin}: tensor {name} has shape {list(found[name])}, but the config "
                f"asks for {list(slot.shape)}; the weights and the config belong to different models"
            )


def some(names: Collection[str], shown: int = 3) -> str:
    """`tensor a is`, or `tensors a, b, c and 4 more are`."""
    listed = ", ".join(list(names)[:shown])
    if len(names) == 1:
        return f"tensor {listed} is"
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return f"tensors {listed}{more} are"


def nest(leaves: Mapping[Path, Any]) -> Params:
    """The nested dict of a flat one."""
    tree: Params = {}
    for path, leaf in leaves.items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = leaf
    return tree


def flatten(params: Mapping[Any, Any], prefix: Path = ()) -> dict[Path, Any]:
    """The inverse of `nest`. Keys become strings: nnx lists have integers for them."""
    flat: dict[Path, Any] = {}
    for key, value in params.items():
        path = (*prefix, str(key))
        flat |= flatten(value, path) if isinstance(value, Mapping) else {path: value}
    return flat


def hash_params(params: Mapping[Any, Any]) -> str:
    """SHA-256 of the names, types, shapes and values of all leaves, in the order of their paths."""
    digest = hashlib.sha256()
    for path, leaf in sorted(flatten(params).items()):
        array = np.ascontiguousarray(leaf)
        digest.update(f"{'/'.join(path)} {array.dtype.name} {array.shape}\n".encode())
        digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()
