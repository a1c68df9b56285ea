"""Shapes of decoder-only transformers and what they cost: parameters, bytes, flops, collectives.

Axes: B batch, T query length, S cache capacity, N query heads, G key/value heads, R = N/G, H head size,
D model width, F feed-forward width, V vocabulary, L layers. Everything here is arithmetic on integers;
nothing imports jax, so that a plan can be printed before a device is touched.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

LayerKind = Literal["global", "local"]
DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}


_POSITIVE = (
    "vocab_size",
    "num_layers",
    "width",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "mlp_width",
    "context",
)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary position embedding: its base and how frequencies are stretched beyond the training context.

    `llama3` is Llama 3.1's smooth interpolation, `linear` divides positions by `factor`, `yarn` is Peng et
    al. 2309.00071 with the attention temperature `attention_factor` (0 means 0.1 ln(factor) + 1).
    """

    theta: float = 10_000.0
    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    factor: float = 1.0
    original_context: int = 0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 0.0
    truncate: bool = True

    def __post_init__(self):
        _require(self.theta > 1, f"Rope.theta must be above 1, not {self.theta}")
        _require(self.factor >= 1, f"Rope.factor must be at least 1, not {self.factor}")
        if self.kind in ("llama3", "yarn"):
            _require(
                self.original_context > 0,
                f"Rope.kind = {self.kind!r} needs original_context, the context it was trained with",
            )


class Collectives(NamedTuple):
    """Collective operations of one decoding step, by where they stand. Each layer's are all-reduces."""

    layers: int
    embedding: int  # one all-reduce of [D, B, T]: each chip looks up the rows it holds
    logits: int  # one all-gather of [V, B, T]


class _Heads(NamedTuple):
    repeats: int  # of every key/value head
    groups: int
    per_group: int  # query heads

    @property
    def rows(self) -> int:
        """Heads to be multiplied: queries, key and value."""
        return self.groups * (self.per_group + 2)


class Layout(NamedTuple):
    """How a shape lies on `chips` chips (Megatron tensor parallelism), decided by sizes alone."""

    chips: int
    kv_repeats: int  # copies of each key/value head, so that more chips hold a whole group
    kv_heads: int  # with copies and groups of zeros
    queries_per_group: int  # of the copies
    zero_heads: int  # query heads that were added, whose weights are zeros
    shard_attention: bool
    shard_mlp: bool
    shard_embedding: bool
    shard_head: bool

    @property
    def changes_heads(self) -> bool:
        """Whether attention is stored with other heads than the model has."""
        return self.kv_repeats > 1 or self.zero_heads > 0

    def notes(self) -> list[str]:
        """What a person should know about this layout, one sentence each; empty for the plain case."""
        said = []
        if self.kv_repeats > 1:
            said.append(f"key/value heads are replicated {self.kv_repeats} times")
        if self.zero_heads:
            said.append(
                f"{self.zero_heads} query heads of zeros are added to divide over {self.chips} chips"
            )
        for sharded, what in (
            (self.shard_attention, "attention: its few heads do"),
            (self.shard_mlp, "the MLP: its width does"),
            (self.shard_embedding, "the embedding: the vocabulary does"),
            (self.shard_head, "the head: its vocabulary does"),
        ):
            if not sharded:
                name, verb = what.split(":")
                said.append(
                    f"every chip holds all of {name}:{verb} not divide over {self.chips} chips"
                )
        return said


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TransformerShape:
    """One decoder-only transformer: RMSNorm, rotary positions, grouped-query attention, gated MLP.

    Attributes:
      vocab_size: V, rows of the embedding.
      num_layers, width, num_heads, num_kv_heads, head_dim, mlp_width: L, D, N, G, H, F.
      context: largest number of positions the model was made for.
      rope, local_rope: positions of global layers, and of local ones where they differ.
      window: keys a local layer sees (its own position included); 0 if there are no local layers.
      layer_pattern: kinds of the layers, repeated over the depth.
      activation: of the MLP's gate.
      tied_head: logits are products with the embedding.
      head_vocab: rows of an untied head that proposes only a subset of the vocabulary; 0 for all V.
      qkv_bias, output_bias, mlp_bias, qk_norm, post_norms: parts some dialects have (Qwen2 biases; Qwen3
        and Gemma 3 query/key norms; Gemma 3 norms after attention and MLP).
      norm_offset: added to every norm's weight (Gemma stores w - 1).
      embedding_scale: factor on looked-up embeddings (Gemma: sqrt D); query_scale: factor on queries, 0
        for H ** -0.5.
    """

    vocab_size: int
    num_layers: int
    width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_width: int
    context: int = 2048
    rope: Rope = Rope()
    local_rope: Rope | None = None
    window: int = 0
    layer_pattern: tuple[LayerKind, ...] = ("global",)
    activation: Literal["silu", "gelu_tanh"] = "silu"
    norm_epsilon: float = 1e-5
    tied_head: bool = True
    head_vocab: int = 0
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    norm_offset: float = 0.0
    embedding_scale: float = 1.0
    query_scale: float = 0.0

    def __post_init__(self):
        for name in _POSITIVE:
            value = getattr(self, name)
            _require(value > 0, f"TransformerShape.{name} must be positive, not {value}")
        _require(
            self.num_heads % self.num_kv_heads == 0,
            f"TransformerShape.num_heads = {self.num_heads} must be a multiple of "
            f"num_kv_heads = {self.num_kv_heads}",
        )
        _require(
            self.head_dim % 2 == 0,
            f"TransformerShape.head_dim must be even for rotary positions, not {self.head_dim}",
        )
        _require(
            "local" not in self.layer_pattern or self.window > 0,
            "TransformerShape.layer_pattern has local layers: set window to the keys they see",
        )
        _require(
            0 <= self.head_vocab <= self.vocab_size,
            f"TransformerShape.head_vocab = {self.head_vocab} must lie in 0..vocab_size = "
            f"{self.vocab_size}",
        )
        _require(
            not (self.tied_head and self.head_vocab),
            "TransformerShape.head_vocab needs its own head: set tied_head = False",
        )

    @property
    def queries_per_group(self) -> int:
        """R, query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def logits_size(self) -> int:
        """Columns of the logits: V, or the draft vocabulary."""
        return self.head_vocab or self.vocab_size

    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """The kind of each of the L layers."""
        pattern = self.layer_pattern
        return tuple(pattern[i % len(pattern)] for i in range(self.num_layers))

    def attention_params(self) -> int:
        """Parameters of one attention block, its norms included."""
        groups, per_group, head = self.num_kv_heads, self.queries_per_group + 2, self.head_dim
        projections = (groups * per_group + self.num_heads) * head * self.width
        biases = groups * per_group * head * self.qkv_bias + self.width * self.output_bias
        norms = self.width * (1 + self.post_norms) + 2 * head * self.qk_norm
        return projections + biases + norms

    def mlp_params(self) -> int:
        """Parameters of one gated MLP, its norms included."""
        biases = (2 * self.mlp_width + self.width) * self.mlp_bias
        return 3 * self.width * self.mlp_width + biases + self.width * (1 + self.post_norms)

    def layer_params(self) -> int:
        """Parameters of one layer."""
        return self.attention_params() + self.mlp_params()

    def head_params(self) -> int:
        """Parameters of an untied head."""
        return 0 if self.tied_head else self.logits_size * self.width

    def num_params(self) -> int:
        """All parameters; a tied embedding counts once."""
        embedding = self.vocab_size * self.width
        return self.num_layers * self.layer_params() + embedding + self.head_params() + self.width

    def read_params(self) -> int:
        """Parameters read by one decoding step: all but the embedding rows that are not looked up."""
        read_once = self.num_layers * self.layer_params() + self.width
        return read_once + self.logits_size * self.width

    def weight_bytes(self, dtype: str) -> int:
        """Bytes of all parameters stored as `dtype`."""
        return self.num_params() * DTYPE_BYTES[dtype]

    def cache_bytes_per_token(self, dtype: str) -> int:
        """Bytes of keys and values of one position, replicated heads not counted."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * DTYPE_BYTES[dtype]

    def flops_per_token(self, context: int) -> int:
        """Multiply-adds times two of one token's forward pass that attends to `context` positions."""
        seen = sum(
            min(context, self.window) if kind == "local" else context for kind in self.layer_kinds()
        )
        return 2 * self.read_params() + 4 * self.num_heads * self.head_dim * seen

    def layout(self, chips: int) -> Layout:
        """How this shape lies on `chips` chips.

        Key/value heads are repeated and heads of zeros added until they divide, in the way that leaves a chip
        the least. An all-reduce for less than half the work does not pay: then every chip holds all of
        attention, as it does of an MLP or a vocabulary that do not divide.
        """
        whole, divided = (
            _Heads(1, self.num_kv_heads, self.queries_per_group),
            self._divided_heads(chips),
        )
        divides = chips == 1 or 2 * divided.rows <= chips * whole.rows
        heads = divided if divides else whole
        return Layout(
            chips=chips,
            kv_repeats=heads.repeats,
            kv_heads=heads.groups,
            queries_per_group=heads.per_group,
            zero_heads=heads.groups * heads.per_group - self.num_heads,
            shard_attention=divides,
            shard_mlp=self.mlp_width % chips == 0,
            shard_embedding=self.vocab_size % chips == 0,
            shard_head=self.logits_size % chips == 0,
        )

    def _divided_heads(self, chips: int) -> _Heads:
        ways = (
            _Heads(
                repeats=repeats,
                groups=math.ceil(self.num_kv_heads * repeats / chips) * chips,
                per_group=math.ceil(self.queries_per_group / repeats),
            )
            for repeats in range(1, self.queries_per_group + 1)
        )
        return min(ways, key=lambda heads: (heads.rows, heads.groups))

    def divided_over(self, chips: int) -> TransformerShape:
        """The same function with the heads of its layout: some stored several times (Pope et al.
        2211.05102, section 3.3), some of zeros."""
        layout = self.layout(chips)
        heads = layout.kv_heads * layout.queries_per_group
        return dataclasses.replace(self, num_kv_heads=layout.kv_heads, num_heads=heads)

    def collectives(self, chips: int) -> Collectives:
        """Collectives of one step on `chips` chips: Megatron's two all-reduces per layer and the ends."""
        if chips == 1:
            return Collectives(0, 0, 0)
        layout = self.layout(chips)
        per_layer = layout.shard_attention + layout.shard_mlp
        return Collectives(
            self.num_layers * per_layer, int(layout.shard_embedding), int(layout.shard_head)
        )
