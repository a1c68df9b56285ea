"""What one forward pass must do: bytes to read, arithmetic, collectives, on every chip that takes part.

Axes as in `drafters.shapes`. Everything is arithmetic on shapes; no device is touched.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import NamedTuple

from drafters.shapes import DTYPE_BYTES, TransformerShape

# Rows and columns that matrix units work in: a product of fewer leaves a part of them idle. The MXU's 128
# (Jouppi et al. 2304.01433), a warp group's 64, two vectors of eight floats.
_TILES = {"tpu": 128, "gpu": 64, "cpu": 16}
_LINE_BYTES = 64
_LOGITS_BYTES = 4  # logits are fp32 whatever is served


def chip_shape(shape: TransformerShape, chips: int) -> TransformerShape:
    """The transformer whose work is that of one of `chips` chips: a share of the heads, MLP and vocabulary.

    What does not divide is done whole by every chip (`TransformerShape.layout`).
    """
    layout = shape.layout(chips)
    served = shape.divided_over(chips)
    heads = chips if layout.shard_attention else 1
    head_vocab = served.head_vocab // (chips if layout.shard_head else 1)
    vocab_size = served.vocab_size // (chips if layout.shard_embedding else 1)
    return dataclasses.replace(
        served,
        num_heads=served.num_heads // heads,
        num_kv_heads=served.num_kv_heads // heads,
        mlp_width=served.mlp_width // (chips if layout.shard_mlp else 1),
        # Rows that are only looked up cost nothing; a head must not have more of them.
        vocab_size=max(vocab_size, head_vocab),
        head_vocab=head_vocab,
    )


class Pass(NamedTuple):
    """B rows get T new tokens each behind `context` others."""

    batch: int
    tokens: int
    context: int
    capacity: int
    last_only: bool = False  # logits of the last token alone

    @property
    def columns(self) -> int:
        """B T, columns of the activations."""
        return self.batch * self.tokens

    @property
    def scored(self) -> int:
        """Columns that logits are made of."""
        return self.batch if self.last_only else self.columns


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """Of one pass.

    Attributes:
      chips: that share one copy of the model.
      busy: chips that work at the same time, copies included.
      layers: of the model.
      columns: B T of the activations.
      weight_bytes, cache_bytes, flops: of one busy chip; the cache as far as it must be read.
      capacity_bytes: of the cache's whole capacity, which a masked attention does read, in whole lines of
        memory: a narrow head's vector takes one as a wider one's does.
      reduces, reduce_bytes: all-reduces, and the payload [D, B, T] of one.
      gathers, gather_bytes: all-gathers of logits, and what a chip contributes to one.
    """

    chips: int
    busy: int
    layers: int
    columns: int
    weight_bytes: float
    cache_bytes: float
    capacity_bytes: float
    flops: float
    reduces: int
    reduce_bytes: int
    gathers: int
    gather_bytes: int


def work_of(shape: TransformerShape, chips: int, busy: int, one: Pass, dtype: str) -> Work:
    """The work of a pass of `shape` over `chips` chips per copy, `busy` in all."""
    share = chip_shape(shape, chips)
    size = DTYPE_BYTES[dtype]
    per_position = one.batch * share.cache_bytes_per_token(dtype)
    vector = share.head_dim * size
    whole_lines = math.ceil(vector / _LINE_BYTES) * _LINE_BYTES / vector
    head = share.logits_size * share.width
    flops = one.columns * (share.flops_per_token(one.context + one.tokens) - 2 * head)
    counts = shape.collectives(chips)
    return Work(
        chips=chips,
        busy=busy,
        layers=shape.num_layers,
        columns=one.columns,
        weight_bytes=share.read_params() * size,
        cache_bytes=per_position * (one.context + one.tokens),
        capacity_bytes=per_position * one.capacity * whole_lines,
        flops=flops + 2 * head * one.scored,
        reduces=counts.layers + counts.embedding,
        reduce_bytes=shape.width * one.columns * size,
        gathers=counts.logits,
        gather_bytes=share.logits_size * one.scored * _LOGITS_BYTES,
    )


def without_collectives(work: Work) -> Work:
    """The same arithmetic, and nobody to talk to."""
    return dataclasses.replace(work, reduces=0, gathers=0)


def held_bytes(shape: TransformerShape, chips: int, batch: int, capacity: int, dtype: str) -> int:
    """Bytes of weights and of one cache on each of `chips` chips."""
    share = chip_shape(shape, chips)
    return share.weight_bytes(dtype) + batch * capacity * share.cache_bytes_per_token(dtype)


def width_utilisation(shape: TransformerShape, chips: int, platform: str) -> float:
    """The share of a chip's matrix tiles that its weights fill, by weight: 1 where all sizes divide.

    A narrow model on many chips has slices thinner than a tile; the rest of each tile is wasted.
    """
    tile = _TILES[platform]

    def whole(size: int) -> int:
        return math.ceil(size / tile) * tile

    matrices = list(_matrices(chip_shape(shape, chips)))
    filled = sum(count * rows * columns for count, rows, columns in matrices)
    return filled / sum(count * whole(rows) * whole(columns) for count, rows, columns in matrices)


def _matrices(share: TransformerShape) -> Iterator[tuple[int, int, int]]:
    """(how many, rows, columns) of the weights of products."""
    layers, width = share.num_layers, share.width
    queries = share.num_heads * share.head_dim
    yield layers, queries + 2 * share.num_kv_heads * share.head_dim, width
    yield layers, width, queries
    yield layers, 2 * share.mlp_width, width
    yield layers, width, share.mlp_width
    yield 1, share.logits_size, width
