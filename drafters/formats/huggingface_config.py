"""`config.json` of transformers 4 and 5, to a shape and back.

A key that would change the computation in a way that the transformer cannot express is refused by name;
what an absent one means stands in `drafters.formats.huggingface_families`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from drafters.formats.huggingface_families import FAMILIES, MULTIMODAL, Config, Family
from drafters.shapes import LayerKind, Rope, TransformerShape
from pipeline.core.errors import UserError

_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {  # keys that are refused unless they ask for nothing
    "quantization_config": (None,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "use_bidirectional_attention": (None, False),
    "partial_rotary_factor": (None, 1.0),
}
_KINDS: Mapping[str, LayerKind] = {"full_attention": "global", "sliding_attention": "local"}
_ROPE_KINDS = ("default", "linear", "llama3", "yarn")


# ------------------------------------------------------------------------------ config to shape


class Fields:
    """The keys of one config, with transformers' values for absent ones and checks of their types."""

    def __init__(self, origin: str, config: Config):
        model_type: Any = config.get("model_type")
        if model_type in MULTIMODAL:
            config = {**(config.get("text_config") or {}), "model_type": MULTIMODAL[model_type]}
        if config.get("model_type") not in FAMILIES:
            raise UserError(
                f"{origin}: model_type {model_type!r} is not supported; supported are "
                f"{', '.join([*FAMILIES, *MULTIMODAL])}"
            )
        self.origin = origin
        self.family = FAMILIES[config["model_type"]]
        self._config = config
        for key, neutral in _NEUTRAL.items():
            if config.get(key) not in neutral:
                raise UserError(f"{origin}: {key} = {config[key]!r} is not supported")

    def get(self, key: str) -> Any:
        """The value of `key`, what transformers takes if it is absent, None if that is nothing."""
        return self._config.get(key, self.family.absent.get(key))

    def has(self, key: str) -> bool:
        """Whether the key is there with a value other than null."""
        return self._config.get(key) is not None

    def number(self, key: str, kind: type = int) -> Any:
        """A positive number of type `kind`."""
        value = self.get(key)
        if value is None:
            raise UserError(f"{self.origin}: {key} is missing; the config is incomplete")
        if type(value) not in ((int,) if kind is int else (int, float)) or value <= 0:
            raise UserError(f"{self.origin}: {key} must be a positive number, not {value!r}")
        return kind(value)

    def flag(self, key: str) -> bool:
        """A boolean; null is False."""
        value = self.get(key)
        if value not in (True, False, None):
            raise UserError(f"{self.origin}: {key} must be true or false, not {value!r}")
        return bool(value)


def shape_from_config(origin: str, config: Config) -> TransformerShape:
    """The shape that `config.json` describes.

    Args:
      origin: name of the file, for messages.
      config: its content.

    Raises:
      UserError: an unknown model_type, rope type or activation, a missing or malformed key, or one that
        asks for something the transformer does not do.
    """
    fields = Fields(origin, config)
    family = fields.family
    kinds = _layer_kinds(fields)
    heads, width = fields.number("num_attention_heads"), fields.number("hidden_size")
    biased = family.biases == "key" and fields.flag("attention_bias")
    try:
        shape = TransformerShape(
            vocab_size=fields.number("vocab_size"),
            num_layers=fields.number("num_hidden_layers"),
            width=width,
            num_heads=heads,
            num_kv_heads=_or_number(fields, "num_key_value_heads", heads),
            head_dim=_or_number(fields, "head_dim", width // heads),
            mlp_width=fields.number("intermediate_size"),
            context=fields.number("max_position_embeddings"),
            rope=_rope(fields, "full_attention"),
            window=fields.number("sliding_window") if "local" in kinds else 0,
            layer_pattern=shortest_pattern(kinds),
            activation=_activation(fields),
            norm_epsilon=fields.number("rms_norm_eps", float),
            tied_head=fields.flag("tie_word_embeddings"),
            qkv_bias=family.biases == "qkv" or biased,
            output_bias=biased,
            mlp_bias=family.model_type == "llama" and fields.flag("mlp_bias"),
            qk_norm=family.model_type in ("qwen3", "gemma3_text"),
        )
        return _as_gemma(shape, fields) if family.is_gemma else shape
    except ValueError as error:
        raise UserError(f"{origin}: {error}") from error


def _as_gemma(shape: TransformerShape, fields: Fields) -> TransformerShape:
    return dataclasses.replace(
        shape,
        local_rope=_rope(fields, "sliding_attention"),
        post_norms=True,
        norm_offset=1.0,
        embedding_scale=math.sqrt(shape.width),
        query_scale=fields.number("query_pre_attn_scalar", float) ** -0.5,
    )


def _or_number(fields: Fields, key: str, default: int) -> int:
    return default if fields.get(key) is None else fields.number(key)


def _activation(fields: Fields) -> Any:
    key = "hidden_activation" if fields.family.is_gemma else "hidden_act"
    name = fields.get(key)
    if name not in _ACTIVATIONS:
        raise UserError(
            f"{fields.origin}: {key} = {name!r} is not supported; supported are "
            f"{', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[name]


def _layer_kinds(fields: Fields) -> tuple[LayerKind, ...]:
    depth, windows = fields.number("num_hidden_layers"), fields.family.windows
    windowed = fields.get("sliding_window") is not None
    if windows == "none" or not windowed:
        return ("global",) * depth
    if windows == "all":
        return ("local",) * depth
    if windows == "qwen" and not fields.flag("use_sliding_window"):
        return ("global",) * depth
    if fields.has("layer_types"):
        return _listed_kinds(fields, depth)
    if windows == "qwen":
        first = fields.get("max_window_layers") or 0
        return tuple("local" if i >= first else "global" for i in range(depth))
    period = fields.number("sliding_window_pattern")
    return tuple("local" if (i + 1) % period else "global" for i in range(depth))


def _listed_kinds(fields: Fields, depth: int) -> tuple[LayerKind, ...]:
    listed = fields.get("layer_types")
    if not isinstance(listed, list) or len(listed) != depth:
        raise UserError(f"{fields.origin}: layer_types must list {depth} layers, not {listed!r}")
    for kind in listed:
        if kind not in _KINDS:
            raise UserError(
                f"{fields.origin}: layer type {kind!r} is not supported; supported are "
                f"{', '.join(_KINDS)}"
            )
    return tuple(_KINDS[kind] for kind in listed)


def shortest_pattern(kinds: Sequence[LayerKind]) -> tuple[LayerKind, ...]:
    """The shortest pattern that gives `kinds` when repeated over the depth."""
    for period in range(1, len(kinds)):
        if all(kind == kinds[i % period] for i, kind in enumerate(kinds)):
            return tuple(kinds[:period])
    return tuple(kinds)


def _rope(fields: Fields, layer_type: str) -> Rope:
    """Positions of the layers of `layer_type`.

    Three forms exist: `rope_theta` and `rope_scaling` (transformers 4), one `rope_parameters` (5), and one
    per layer type (5, Gemma 3). As in transformers, `rope_scaling` goes before `rope_parameters`, and in
    Gemma 3 it is for the global layers only, whose local ones have `rope_local_base_freq`.
    """
    local_gemma = fields.family.is_gemma and layer_type == "sliding_attention"
    theta_key = "rope_local_base_freq" if local_gemma else "rope_theta"
    given = fields.get("rope_parameters") or {}
    given = given.get(layer_type, {} if given.keys() & _KINDS.keys() else given) or {}
    scaling = {} if local_gemma else fields.get("rope_scaling") or {}
    parameters = {**given, **scaling}
    if parameters.get("rope_theta") is None:
        parameters["rope_theta"] = fields.get(theta_key)
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind not in _ROPE_KINDS:
        raise UserError(
            f"{fields.origin}: rope type {kind!r} is not supported; supported are "
            f"{', '.join(_ROPE_KINDS)}"
        )
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise UserError(f"{fields.origin}: partial_rotary_factor is not supported")
    return _rope_of_kind(fields, kind, parameters)


def _rope_of_kind(fields: Fields, kind: Any, parameters: Config) -> Rope:
    def number(key: str, default: float | None = None) -> float:
        value: Any = default if parameters.get(key) is None else parameters[key]
        if type(value) not in (int, float):
            raise UserError(
                f"{fields.origin}: rope type {kind!r} needs a number {key}, not {value!r}"
            )
        return float(value)

    theta = number("rope_theta")
    if kind == "default":
        return Rope(theta=theta)
    factor = number("factor")
    if kind == "linear":
        return Rope(theta=theta, kind=kind, factor=factor)
    context = int(
        number("original_max_position_embeddings", fields.number("max_position_embeddings"))
    )
    if kind == "llama3":
        return Rope(
            theta=theta,
            kind=kind,
            factor=factor,
            original_context=context,
            low_frequency_factor=number("low_freq_factor"),
            high_frequency_factor=number("high_freq_factor"),
        )
    return Rope(
        theta=theta,
        kind=kind,
        factor=factor,
        original_context=context,
        beta_fast=number("beta_fast", 32),
        beta_slow=number("beta_slow", 1),
        attention_factor=number("attention_factor", _yarn_temperature(factor, parameters)),
        truncate=parameters.get("truncate", True),
    )


def _yarn_temperature(factor: float, parameters: Config) -> float:
    """DeepSeek's two scales where both are given; else 0, for yarn's own formula."""
    scale, all_dims = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if not (scale and all_dims) or factor <= 1:
        return 0.0
    return (0.1 * scale * math.log(factor) + 1) / (0.1 * all_dims * math.log(factor) + 1)


# ------------------------------------------------------------------------------ shape to config


def config_from_shape(shape: TransformerShape) -> dict[str, Any]:
    """The `config.json` of a model that computes what `shape` does, for transformers 4 and 5.

    Every family is tried: its config is read back, and the one whose shape means the same is taken.

    Raises:
      UserError: no family has everything the shape asks for; names the fields that the closest ones lack.
    """
    lost: dict[str, list[str]] = {}
    for family in FAMILIES.values():
        config = _config(family, shape)
        lost[family.model_type] = _differences(shape_from_config(family.model_type, config), shape)
        if not lost[family.model_type]:
            return config
    fewest = min(map(len, lost.values()))
    closest = [
        f"{name} lacks " + ", ".join(f"{field} = {getattr(shape, field)!r}" for field in fields)
        for name, fields in lost.items()
        if len(fields) == fewest
    ]
    raise UserError(f"no model type of transformers expresses this shape: {'; '.join(closest)}")


def _differences(found: TransformerShape, wanted: TransformerShape) -> list[str]:
    """Fields of two shapes that mean different things."""
    a, b = _meaning(found), _meaning(wanted)
    return [name for name in a if a[name] != b[name]]


def _meaning(shape: TransformerShape) -> dict[str, Any]:
    """The fields of a shape, those that can be written in several ways in one of them."""
    kinds = shape.layer_kinds()
    values = {f.name: getattr(shape, f.name) for f in dataclasses.fields(shape)}
    values["layer_pattern"] = kinds
    values["window"] = shape.window if "local" in kinds else 0
    values["rope"] = _rope_meaning(shape.rope) if "global" in kinds else None
    local = shape.local_rope or shape.rope
    values["local_rope"] = _rope_meaning(local) if "local" in kinds else None
    values["query_scale"] = f"{shape.query_scale or shape.head_dim**-0.5:.9g}"
    values["embedding_scale"] = f"{shape.embedding_scale:.9g}"
    return values


def _rope_meaning(rope: Rope) -> dict[str, Any]:
    meaning = _rope_parameters(rope)
    if rope.kind == "yarn":
        factor = rope.attention_factor or 0.1 * math.log(rope.factor) + 1
        meaning["attention_factor"] = f"{factor:.9g}"
    return meaning


def _config(family: Family, shape: TransformerShape) -> dict[str, Any]:
    activation = next(name for name, ours in _ACTIVATIONS.items() if ours == shape.activation)
    config = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.width,
        "intermediate_size": shape.mlp_width,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_activation" if family.is_gemma else "hidden_act": activation,
        "max_position_embeddings": shape.context,
        "rms_norm_eps": shape.norm_epsilon,
        "tie_word_embeddings": shape.tied_head,
    }
    if family.biases == "key":
        config["attention_bias"] = shape.qkv_bias and shape.output_bias
    if family.model_type == "llama":
        config["mlp_bias"] = shape.mlp_bias
    return config | _window_keys(family, shape) | _rope_keys(family, shape)


def _window_keys(family: Family, shape: TransformerShape) -> dict[str, Any]:
    kinds = shape.layer_kinds()
    window = shape.window if "local" in kinds else None
    if family.windows == "none":
        return {}
    if family.windows == "all":
        return {"sliding_window": window if "global" not in kinds else None}
    names = {ours: name for name, ours in _KINDS.items()}
    listed = {"sliding_window": window, "layer_types": [names[kind] for kind in kinds]}
    if family.windows == "qwen":
        first = kinds.index("local") if "local" in kinds else len(kinds)
        return listed | {"use_sliding_window": window is not None, "max_window_layers": first}
    # The number whose power -1/2 scales queries; transformers takes integers only.
    return listed | {
        "query_pre_attn_scalar": round((shape.query_scale or shape.head_dim**-0.5) ** -2)
    }


def _rope_keys(family: Family, shape: TransformerShape) -> dict[str, Any]:
    """Positions in the forms of transformers 4 and 5, which agree."""
    rope = _rope_parameters(shape.rope)
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    keys = {
        "rope_theta": shape.rope.theta,
        "rope_scaling": None if shape.rope.kind == "default" else scaling,
        "rope_parameters": rope,
    }
    if family.is_gemma:
        local = shape.local_rope or shape.rope
        keys["rope_local_base_freq"] = local.theta
        keys["rope_parameters"] = {
            "full_attention": rope,
            "sliding_attention": _rope_parameters(local),
        }
    return keys


def _rope_parameters(rope: Rope) -> dict[str, Any]:
    parameters: dict[str, Any] = {"rope_theta": rope.theta, "rope_type": rope.kind}
    if rope.kind != "default":
        parameters["factor"] = rope.factor
    if rope.kind in ("llama3", "yarn"):
        parameters["original_max_position_embeddings"] = rope.original_context
    if rope.kind == "llama3":
        parameters["low_freq_factor"] = rope.low_frequency_factor
        parameters["high_freq_factor"] = rope.high_frequency_factor
    if rope.kind == "yarn":
        parameters |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow}
        parameters["truncate"] = rope.truncate
        if rope.attention_factor:
            parameters["attention_factor"] = rope.attention_factor
    return parameters
