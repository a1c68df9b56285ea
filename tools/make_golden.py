"""Regenerates tests/golden with transformers: tiny random checkpoints and what they compute.

    python -m tools.make_golden [--smollm2=HUGGING_FACE_FOLDER]

Needs the `bench` extra (torch, transformers). Each folder holds a checkpoint as transformers writes it and
expected.npz: tokens i32[B, T], hidden f32[L+1, B, T, D] (the embedding, then the output of each block) and
logits f32[B, T, V]. With --smollm2, also the greedy continuations of SmolLM2-135M-Instruct, from a folder
that tools.export_model made of what tools.fetch_smollm2 imports.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.core.errors import UserError, run_cli

GOLDEN = Path(__file__).resolve().parents[1] / "tests" / "golden"
BATCH, LENGTH = 2, 20  # longer than the windows below
_SEED = 20260
_SHARD_SIZE = "20KB"

_SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,  # so that one frequency each is kept, blended and divided
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
_GEMMA = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "query_pre_attn_scalar": 24,  # not the head size
    "sliding_window": 6,
    "layer_types": [
        "sliding_attention",
        "sliding_attention",
        "full_attention",
        "sliding_attention",
    ],
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
    "tie_word_embeddings": True,
}
# folder -> config class and what is particular about it
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("LlamaConfig", {"num_key_value_heads": 4}),
    "llama3": ("LlamaConfig", {"rope_parameters": _LLAMA3}),
    "llama_linear": (
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0}},
    ),
    "llama_yarn": ("LlamaConfig", {"rope_parameters": _YARN}),
    "llama_biases": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("MistralConfig", {"sliding_window": 6}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen2_windows": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),  # heads are wider than the model
    "gemma3": ("Gemma3TextConfig", _GEMMA),
    "smollm": (
        "LlamaConfig",
        {"hidden_size": 24, "num_attention_heads": 3, "num_key_value_heads": 1,
         "tie_word_embeddings": True},
    ),
}  # fmt: skip
SHARDED = "smollm"

PROMPTS = (
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n",
    "The history of the bicycle begins in",
    "List three reasons to learn a second language:\n1.",
    "In 1969, the Apollo 11 mission",
    "Dear diary, today I walked to the market and",
    "A recipe for vegetable soup.\n\nIngredients:\n",
    "Photosynthesis is the process by which",
)
NUM_PROMPTS = 6  # the first ones whose continuation does not end early
NEW_TOKENS = 64


def make_case(folder: Path, config_class: str, particular: dict[str, Any]) -> None:
    """Writes one checkpoint and its outputs."""
    import torch
    import transformers

    torch.manual_seed(_SEED)
    config = getattr(transformers, config_class)(**_SIZES | particular)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    _sharpen(model)
    limit = _SHARD_SIZE if folder.name == SHARDED else "1GB"
    model.save_pretrained(folder, max_shard_size=limit)
    tokens = np.random.default_rng(_SEED).integers(0, config.vocab_size, (BATCH, LENGTH))
    hidden, logits = _outputs(model, torch.from_numpy(tokens))
    np.savez(folder / "expected.npz", tokens=tokens.astype(np.int32), hidden=hidden, logits=logits)
    if config_class in ("LlamaConfig", "Gemma3TextConfig"):
        _write_old_config(folder, particular)


def _sharpen(model: Any) -> None:
    """Weights so large that logits spread over several units, and no norm or bias is trivial."""
    import torch

    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1:
                weight.add_(torch.randn_like(weight) * 0.3)
            elif "embed_tokens" in name or "lm_head" in name:
                weight.copy_(torch.randn_like(weight))
            else:
                weight.copy_(torch.randn_like(weight) * 1.5 * weight.shape[1] ** -0.5)


def _outputs(model: Any, tokens: Any) -> tuple[np.ndarray, np.ndarray]:
    """hidden f32[L+1, B, T, D] and logits f32[B, T, V]. (The model's own list ends after the norm.)"""
    import torch

    states: list[Any] = []
    layers = model.model.layers
    hooks = [layers[0].register_forward_pre_hook(lambda _, inputs: states.append(inputs[0]))]
    for layer in layers:
        hooks.append(layer.register_forward_hook(lambda _, inputs, output: states.append(output)))
    with torch.no_grad():
        logits = model(tokens, use_cache=False).logits
    for hook in hooks:
        hook.remove()
    return torch.stack(states).numpy(), logits.float().numpy()


def _write_old_config(folder: Path, particular: dict[str, Any]) -> None:
    """The same config as transformers 4 writes it: positions in `rope_theta` and `rope_scaling`."""
    config = json.loads((folder / "config.json").read_text())
    positions = config.pop("rope_parameters")
    config["torch_dtype"] = config.pop("dtype")
    config["transformers_version"] = "4.50.0"
    if "full_attention" in positions:
        config["rope_local_base_freq"] = positions["sliding_attention"]["rope_theta"]
        positions = positions["full_attention"]
        config.pop("layer_types")
        config["sliding_window_pattern"] = 3
    config["rope_theta"] = positions.pop("rope_theta")
    config["rope_scaling"] = positions if positions["rope_type"] != "default" else None
    (folder / "config_transformers4.json").write_text(json.dumps(config, indent=2) + "\n")


def make_smollm2(source: Path, path: Path) -> None:
    """Greedy continuations in fp32, with the gap of the two largest logits at every step."""
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    cases = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt)["input_ids"]
        chosen, gaps = _greedy(model, ids)
        if len(chosen) == NEW_TOKENS and len(cases) < NUM_PROMPTS:
            cases.append({"prompt": prompt, "prompt_ids": ids, "ids": chosen, "gaps": gaps})
    if len(cases) < NUM_PROMPTS:
        raise UserError(
            f"only {len(cases)} continuations reach {NEW_TOKENS} tokens; add to PROMPTS"
        )
    path.write_text("[\n" + ",\n".join(json.dumps(case) for case in cases) + "\n]\n")


def _greedy(model: Any, ids: list[int]) -> tuple[list[int], list[float]]:
    import torch

    done = model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        do_sample=False,
        max_new_tokens=NEW_TOKENS,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.cat(done.logits).topk(2).values
    gaps = (best[:, 0] - best[:, 1]).tolist()
    return done.sequences[0, len(ids) :].tolist(), [round(gap, 6) for gap in gaps]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.make_golden",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--smollm2", type=Path, help="a folder that tools.export_model wrote")
    given = parser.parse_args(arguments)
    try:
        import transformers
    except ImportError:
        raise UserError("transformers is not installed; pip install -e '.[bench]'") from None
    transformers.logging.set_verbosity_error()
    for name, (config_class, particular) in CASES.items():
        print(name)
        make_case(GOLDEN / name, config_class, particular)
    if given.smollm2:
        print("SmolLM2")
        make_smollm2(given.smollm2, GOLDEN / "smollm2_greedy.json")
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(main))
