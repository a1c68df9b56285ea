"""The model types of transformers that we read and write: tensor names and the meaning of absent keys.

An absent key of `config.json` means what the config class of transformers means by it; `Family.absent`
lists those values as of transformers 4.50 to 5.24. A size that differs between models has none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from drafters.formats.tensors import Names

Config = Mapping[str, Any]

_BLOCK = "model.layers.{}."
_NAMES: Names = {
    "embedding": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "head": "lm_head.weight",
    "attention_norm": _BLOCK + "input_layernorm.weight",
    "query": _BLOCK + "self_attn.q_proj.weight",
    "key": _BLOCK + "self_attn.k_proj.weight",
    "value": _BLOCK + "self_attn.v_proj.weight",
    "query_bias": _BLOCK + "self_attn.q_proj.bias",
    "key_bias": _BLOCK + "self_attn.k_proj.bias",
    "value_bias": _BLOCK + "self_attn.v_proj.bias",
    "query_norm": _BLOCK + "self_attn.q_norm.weight",
    "key_norm": _BLOCK + "self_attn.k_norm.weight",
    "out": _BLOCK + "self_attn.o_proj.weight",
    "out_bias": _BLOCK + "self_attn.o_proj.bias",
    "mlp_norm": _BLOCK + "post_attention_layernorm.weight",
    "gate": _BLOCK + "mlp.gate_proj.weight",
    "up": _BLOCK + "mlp.up_proj.weight",
    "down": _BLOCK + "mlp.down_proj.weight",
    "gate_bias": _BLOCK + "mlp.gate_proj.bias",
    "up_bias": _BLOCK + "mlp.up_proj.bias",
    "down_bias": _BLOCK + "mlp.down_proj.bias",
}
_GEMMA_NAMES: Names = {
    **_NAMES,
    "attention_post_norm": _BLOCK + "post_attention_layernorm.weight",
    "mlp_norm": _BLOCK + "pre_feedforward_layernorm.weight",
    "mlp_post_norm": _BLOCK + "post_feedforward_layernorm.weight",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One `model_type` of transformers.

    Attributes:
      model_type, architecture: as in config.json.
      absent: what the config class of transformers takes for a key that is not there.
      biases: which attention projections have one: query, key and value (`qkv`), none, or all four if
        `attention_bias` is set (`key`).
      windows: which layers see only a window: none, all, or as `layer_types` says, whose own default
        goes by depth (`qwen`) or by a period (`gemma`).
      names: of the tensors.
    """

    model_type: str
    architecture: str
    absent: Config
    biases: Literal["none", "qkv", "key"]
    windows: Literal["none", "all", "qwen", "gemma"]
    names: Names = dataclasses.field(default_factory=lambda: _NAMES)

    @property
    def is_gemma(self) -> bool:
        """Norms around both halves of a layer, scaled embedding, own rope of local layers."""
        return self.windows == "gemma"


_COMMON = {
    "head_dim": None,  # hidden_size / num_attention_heads
    "num_key_value_heads": None,  # num_attention_heads
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}
_QWEN = {
    **_COMMON,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32_768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
FAMILIES: Mapping[str, Family] = {
    family.model_type: family
    for family in (
        Family(
            model_type="llama",
            architecture="LlamaForCausalLM",
            absent={**_COMMON, "max_position_embeddings": 2048},
            biases="key",
            windows="none",
        ),
        Family(
            model_type="mistral",
            architecture="MistralForCausalLM",
            absent={
                **_COMMON,
                "num_key_value_heads": 8,
                "max_position_embeddings": 131_072,
                "sliding_window": 4096,
            },
            biases="none",
            windows="all",
        ),
        Family(
            model_type="qwen2",
            architecture="Qwen2ForCausalLM",
            absent=_QWEN,
            biases="qkv",
            windows="qwen",
        ),
        Family(
            model_type="qwen3",
            architecture="Qwen3ForCausalLM",
            absent={**_QWEN, "head_dim": 128},
            biases="key",
            windows="qwen",
        ),
        Family(
            model_type="gemma3_text",
            architecture="Gemma3ForCausalLM",
            absent={
                **_COMMON,
                "vocab_size": 262_208,
                "hidden_size": 2304,
                "intermediate_size": 9216,
                "num_hidden_layers": 26,
                "num_attention_heads": 8,
                "num_key_value_heads": 4,
                "head_dim": 256,
                "hidden_activation": "gelu_pytorch_tanh",
                "max_position_embeddings": 131_072,
                "rope_theta": 1_000_000.0,
                "rope_local_base_freq": 10_000.0,
                "query_pre_attn_scalar": 256,
                "sliding_window": 4096,
                "sliding_window_pattern": 6,
                "tie_word_embeddings": True,
            },
            biases="key",
            windows="gemma",
            names=_GEMMA_NAMES,
        ),
    )
}
# Models of text and images; their text half, `text_config`, is taken.
MULTIMODAL: Mapping[str, str] = {"gemma3": "gemma3_text"}
