"""Models in the GGUF format of llama.cpp: metadata to a shape, tensors (quantised or not) to parameters.

Names and conventions are those of llama.cpp's converters: matrices are `[out, in]`, the `llama`
architecture has the rows of queries and keys permuted for rotations of neighbouring pairs, `gemma3` has 1
added to its norms. All of this is undone here, so that a GGUF and the checkpoint it was made from import
to the same tree, up to quantisation.
"""

from __future__ import annotations

import dataclasses
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np

from drafters.formats.gguf_reader import Container
from drafters.formats.gguf_vocabulary import tokenizer_of
from drafters.formats.tensors import Names
from drafters.shapes import LayerKind, Rope, TransformerShape
from drafters.tokenizers import Tokenizer
from pipeline.core.errors import UserError

Value = TypeVar("Value")

_NAMES: Names = {
    "embedding": "token_embd.weight",
    "norm": "output_norm.weight",
    "head": "output.weight",
    "attention_norm": "blk.{}.attn_norm.weight",
    "query": "blk.{}.attn_q.weight",
    "key": "blk.{}.attn_k.weight",
    "value": "blk.{}.attn_v.weight",
    "query_bias": "blk.{}.attn_q.bias",
    "key_bias": "blk.{}.attn_k.bias",
    "value_bias": "blk.{}.attn_v.bias",
    "query_norm": "blk.{}.attn_q_norm.weight",
    "key_norm": "blk.{}.attn_k_norm.weight",
    "out": "blk.{}.attn_output.weight",
    "out_bias": "blk.{}.attn_output.bias",
    "attention_post_norm": "blk.{}.post_attention_norm.weight",
    "mlp_norm": "blk.{}.ffn_norm.weight",
    "gate": "blk.{}.ffn_gate.weight",
    "up": "blk.{}.ffn_up.weight",
    "down": "blk.{}.ffn_down.weight",
    "gate_bias": "blk.{}.ffn_gate.bias",
    "up_bias": "blk.{}.ffn_up.bias",
    "down_bias": "blk.{}.ffn_down.bias",
    "mlp_post_norm": "blk.{}.post_ffw_norm.weight",
}
_LLAMA3_CONTEXT = 8192  # of every Llama 3.x before its rope was stretched
_YARN_VARIANTS = (
    "{arch}.rope.scaling.yarn_log_multiplier",
    "{arch}.rope.scaling.yarn_ext_factor",
    "{arch}.rope.scaling.yarn_attn_factor",
)
_GEMMA3_PERIOD = 6  # llama.cpp's default: five local layers, then a global one
_GEMMA3_LOCAL_THETA = 10_000.0
_GEMMA3_27B_LAYERS = 62  # how llama.cpp knows the one Gemma 3 that scales queries by (D/N) ** -0.5


@dataclass(frozen=True, kw_only=True)
class _Architecture:
    """What sets one `general.architecture` apart; biases and norms show in the tensors themselves."""

    permuted: bool = False  # rows of query and key: pairs (2i, 2i+1) instead of (i, i + H/2)
    gemma: bool = False


_ARCHITECTURES = {
    "llama": _Architecture(permuted=True),
    "qwen2": _Architecture(),
    "qwen3": _Architecture(),
    "gemma3": _Architecture(gemma=True),
}


class GGUFFile:
    """An open GGUF file: metadata, the shape they describe, and a source of its tensors.

    Raises:
      UserError: no such file, or not a whole GGUF.
    """

    format: Final = "gguf"

    def __init__(self, path: str | os.PathLike[str]):
        self._file = Container(path)
        self.origin = self._file.origin
        self.architecture = self.require("general.architecture", str)
        if self.architecture not in _ARCHITECTURES:
            raise UserError(
                f"{self.origin}: architecture {self.architecture!r} is not supported; supported are "
                f"{', '.join(_ARCHITECTURES)}"
            )
        self._kind = _ARCHITECTURES[self.architecture]

    @property
    def files(self) -> list[Path]:
        """The files that determine the model."""
        return [Path(self.origin)]

    @property
    def names(self) -> Names:
        """Names of the tensors by their roles."""
        return _NAMES

    def get(self, key: str) -> Any:
        """A metadata value, None if absent. `{arch}` in the key stands for the architecture."""
        return self._file.metadata.get(self._name(key))

    def _name(self, key: str) -> str:
        return key.format(arch=self.architecture) if "{arch}" in key else key

    def require(self, key: str, kind: type[Value]) -> Value:
        """A metadata value of type `kind`; an int is taken for a float.

        Raises:
          UserError: it is absent or of another type.
        """
        value: Any = self.get(key)
        if kind is float and type(value) is int:
            value = float(value)
        if not isinstance(value, kind):
            found = "is absent" if value is None else f"is {value!r}, not {kind.__name__}"
            name = self._name(key)
            raise UserError(f"{self.origin}: metadata {name} {found}; convert the model again")
        return value

    def optional(self, key: str, default: Value) -> Value:
        """A metadata value, `default` if absent."""
        return default if self.get(key) is None else self.require(key, type(default))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor, `[out, in]`."""
        return {name: tensor.shape for name, tensor in self._file.tensors.items()}

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that the metadata describe."""
        return tokenizer_of(self)

    def ignored(self, name: str) -> bool:
        """Whether the tensor is no parameter: `rope_freqs` is part of the shape."""
        return name == "rope_freqs.weight"

    def read(self, name: str) -> np.ndarray:
        """One tensor, dequantised to float32, in the conventions of our tree."""
        values = self._file.dequantized(name)
        if self._kind.permuted and (".attn_q." in name or ".attn_k." in name):
            return _half_split(values, self._head_dim())
        if self._kind.gemma and name.endswith("norm.weight"):
            return values - 1
        return values

    def shape(self) -> TransformerShape:
        """The shape that the metadata and the set of tensors describe.

        Raises:
          UserError: metadata that are missing, inconsistent or ask for something unsupported.
        """
        self._refuse_unsupported()
        heads = self.require("{arch}.attention.head_count", int)
        width = self.require("{arch}.embedding_length", int)
        tensors = self.shapes()
        try:
            shape = TransformerShape(
                vocab_size=tensors.get(_NAMES["embedding"], (0,))[0],
                num_layers=self.require("{arch}.block_count", int),
                width=width,
                num_heads=heads,
                num_kv_heads=self.optional("{arch}.attention.head_count_kv", heads),
                head_dim=self._head_dim(),
                mlp_width=self.require("{arch}.feed_forward_length", int),
                context=self.require("{arch}.context_length", int),
                rope=self._rope(),
                norm_epsilon=self.require("{arch}.attention.layer_norm_rms_epsilon", float),
                tied_head=_NAMES["head"] not in tensors,
                qkv_bias=_NAMES["query_bias"].format(0) in tensors,
                output_bias=_NAMES["out_bias"].format(0) in tensors,
                mlp_bias=_NAMES["gate_bias"].format(0) in tensors,
                qk_norm=_NAMES["query_norm"].format(0) in tensors,
            )
            return self._gemma(shape) if self._kind.gemma else shape
        except ValueError as error:
            raise UserError(f"{self.origin}: {error}") from error

    def _refuse_unsupported(self) -> None:
        layers = self.require("{arch}.block_count", int)
        if layers > (found := len(self._file.tensors)):
            raise UserError(
                f"{self.origin}: {layers} layers, but only {found} tensors; fetch it again"
            )
        if experts := self.optional("{arch}.expert_count", 0):
            raise UserError(
                f"{self.origin}: a mixture of {experts} experts is not supported; choose a dense model"
            )
        head = self._head_dim()
        for key in ("{arch}.attention.value_length", "{arch}.rope.dimension_count"):
            if (other := self.optional(key, head)) != head:
                raise UserError(
                    f"{self.origin}: {self._name(key)} = {other} differs from the head size {head}, "
                    "which is not supported"
                )

    def _head_dim(self) -> int:
        heads = max(1, self.require("{arch}.attention.head_count", int))
        width = self.require("{arch}.embedding_length", int)
        return self.optional("{arch}.attention.key_length", width // heads)

    def _gemma(self, shape: TransformerShape) -> TransformerShape:
        local_theta = self.optional("{arch}.rope.freq_base_swa", _GEMMA3_LOCAL_THETA)
        query_width = shape.head_dim
        if shape.num_layers == _GEMMA3_27B_LAYERS:
            query_width = shape.width // shape.num_heads
        return dataclasses.replace(
            shape,
            local_rope=Rope(theta=local_theta),
            window=self.require("{arch}.attention.sliding_window", int),
            layer_pattern=self._gemma_pattern(),
            activation="gelu_tanh",
            post_norms=True,
            norm_offset=1.0,
            embedding_scale=math.sqrt(shape.width),
            query_scale=query_width**-0.5,
        )

    def _gemma_pattern(self) -> tuple[LayerKind, ...]:
        """Kinds of the layers, from a period or from one flag per layer that says "local"."""
        given = self.get("{arch}.attention.sliding_window_pattern")
        if isinstance(given, list):
            return tuple("local" if flag else "global" for flag in given)
        period = self.optional("{arch}.attention.sliding_window_pattern", _GEMMA3_PERIOD)
        local: tuple[LayerKind, ...] = ("local",)
        return (*local * (period - 1), "global")

    def _rope(self) -> Rope:
        theta = self.optional("{arch}.rope.freq_base", 10_000.0)
        if "rope_freqs.weight" in self._file.tensors:
            return self._llama3_rope(theta)
        kind = self.optional("{arch}.rope.scaling.type", "none")
        if kind == "none":
            return Rope(theta=theta)
        factor = self.require("{arch}.rope.scaling.factor", float)
        if kind == "linear":
            return Rope(theta=theta, kind="linear", factor=factor)
        if kind != "yarn":
            raise UserError(
                f"{self.origin}: rope scaling type {kind!r} is not supported; supported are none, "
                "linear, yarn and Llama 3's factors"
            )
        for key in _YARN_VARIANTS:
            if self.get(key) is not None:
                raise UserError(f"{self.origin}: {self._name(key)} is not supported")
        temperature = self.optional("{arch}.rope.scaling.attn_factor", 1.0)
        return Rope(
            theta=theta,
            kind="yarn",
            factor=factor,
            original_context=self.require("{arch}.rope.scaling.original_context_length", int),
            beta_fast=self.optional("{arch}.rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=self.optional("{arch}.rope.scaling.yarn_beta_slow", 1.0),
            attention_factor=temperature * (0.1 * math.log(factor) + 1) if temperature != 1 else 0,
        )

    def _llama3_rope(self, theta: float) -> Rope:
        """Llama 3's stretched rope from its list of factors, one per frequency.

        The converter keeps the factors and drops what they were computed from. All published models
        have the same low and high frequency factors, so the list is compared with theirs.
        """
        factors = self.read("rope_freqs.weight").reshape(-1)
        factor = float(factors.max())
        rope = Rope(theta=theta, kind="llama3", factor=factor, original_context=_LLAMA3_CONTEXT)
        if not np.allclose(factors, _llama3_factors(rope, len(factors)), rtol=1e-3):
            raise UserError(
                f"{self.origin}: the rope factors in rope_freqs.weight are not those of a Llama 3 "
                f"model stretched {factor:g} times from {_LLAMA3_CONTEXT} tokens; import the original "
                "checkpoint instead"
            )
        return rope


def _half_split(values: np.ndarray, head: int) -> np.ndarray:
    """Rows of each head from pairs (2i, 2i + 1) to pairs (i, i + H/2)."""
    pairs = values.reshape(-1, head // 2, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)


def _llama3_factors(rope: Rope, count: int) -> np.ndarray:
    """What the `count` frequencies are divided by (Llama 3.1's `apply_scaling`)."""
    wavelengths = 2 * np.pi * rope.theta ** (np.arange(count) / count)
    rotations = rope.original_context / wavelengths
    low, high = rope.low_frequency_factor, rope.high_frequency_factor
    smooth = np.clip((rotations - low) / (high - low), 0, 1)
    return 1 / ((1 - smooth) / rope.factor + smooth)
