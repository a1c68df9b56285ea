"""Small vocabularies of each kind, and GGUF files made from the checkpoints of tests/golden."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import sentencepiece
import tokenizers
from tokenizers import (
    AddedToken,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from drafters.formats.gguf import _NAMES as GGUF_NAMES
from drafters.formats.huggingface import HuggingFaceFolder
from drafters.shapes import TransformerShape
from drafters.vocabularies import FastVocabulary, SentencePieceVocabulary

GOLDEN = Path(__file__).parents[1] / "golden"

CORPUS = [
    "the cat sat on the mat 123",
    "a naïve café, 你好 世界",
    "def f(x):\n    return x",
    "🎉 yes",
]


def byte_level(specials=("<|im_start|>", "<|im_end|>")) -> FastVocabulary:
    built = tokenizers.Tokenizer(models.BPE())
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken(token, special=True) for token in specials],
        show_progress=False,
    )
    built.train_from_iterator(CORPUS, trainer)
    return FastVocabulary(built.to_str().encode(), "tokenizer.json")


def sentencepiece_model() -> bytes:
    """A small model with byte fallback, as Llama 2 has it."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 20),
        model_writer=model,
        vocab_size=330,
        model_type="bpe",
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        minloglevel=2,
    )
    return model.getvalue()


def as_llama2_json(spm: SentencePieceVocabulary) -> bytes:
    """The `tokenizer.json` that transformers 4 converts a Llama 2 SentencePiece model to."""
    processor = sentencepiece.SentencePieceProcessor(model_proto=spm.serialize())
    tokens = [processor.id_to_piece(i) for i in range(processor.get_piece_size())]
    ids = {token: i for i, token in enumerate(tokens)}
    ranked = sorted(range(len(tokens)), key=lambda i: -processor.get_score(i))
    merges = [
        (tokens[i][:cut], tokens[i][cut:])
        for i in ranked
        for cut in range(1, len(tokens[i]))
        if tokens[i][:cut] in ids and tokens[i][cut:] in ids and not tokens[i].startswith("<")
    ]
    built = tokenizers.Tokenizer(
        models.BPE(vocab=ids, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    built.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    built.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
         decoders.Strip(" ", 1, 0)]
    )  # fmt: skip
    built.add_special_tokens([AddedToken(t, special=True) for t in ("<unk>", "<s>", "</s>")])
    built.post_processor = processors.TemplateProcessing(
        single=["<s>", "$A"], special_tokens=[("<s>", 1)]
    )
    return built.to_str().encode()


def gguf_writer(
    path: Path, family: str, architecture: str, kind: str = "F32", **overrides: Any
) -> gguf.GGUFWriter:
    """A writer that holds a checkpoint of tests/golden as llama.cpp's converter would write it.

    Args:
      path: of the file.
      family: folder in tests/golden.
      architecture: of the file.
      kind: quantisation of the matrices, where their rows are whole blocks.
      **overrides: metadata by their names after the architecture, dots as __; None leaves one out.
    """
    checkpoint = HuggingFaceFolder(GOLDEN / family)
    shape = checkpoint.shape()
    writer = gguf.GGUFWriter(path, architecture)
    values = {
        "block_count": shape.num_layers,
        "context_length": shape.context,
        "embedding_length": shape.width,
        "feed_forward_length": shape.mlp_width,
        "attention__head_count": shape.num_heads,
        "attention__head_count_kv": shape.num_kv_heads,
        "attention__key_length": shape.head_dim,
        "attention__value_length": shape.head_dim,
        "attention__layer_norm_rms_epsilon": shape.norm_epsilon,
        "rope__dimension_count": shape.head_dim,
        "rope__freq_base": shape.rope.theta,
        **overrides,
    }
    for name, value in values.items():
        if value is not None:
            key = f"{architecture}.{name.replace('__', '.')}"
            add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string,
                   list: writer.add_array}  # fmt: skip
            add[type(value)](key, value)
    names = {theirs: GGUF_NAMES[role] for role, theirs in checkpoint.names.items()}
    for name in checkpoint.shapes():
        layer = next((part for part in name.split(".") if part.isdigit()), "")
        template = name.replace(f".{layer}.", ".{}.", 1) if layer else name
        tensor = as_llama_cpp(architecture, names[template], checkpoint.read(name), shape)
        stored = gguf.GGMLQuantizationType[kind]
        if tensor.ndim == 1 or tensor.shape[-1] % gguf.GGML_QUANT_SIZES[stored][0]:
            stored = gguf.GGMLQuantizationType.F32
        data = gguf.quants.quantize(tensor, stored)
        writer.add_tensor(names[template].format(layer), data, raw_dtype=stored)
    return writer


def as_llama_cpp(
    architecture: str, name: str, tensor: np.ndarray, shape: TransformerShape
) -> np.ndarray:
    """What `convert_hf_to_gguf.py` does to a tensor: `permute` for llama, +1 on Gemma's norms."""
    if architecture == "llama" and (".attn_q." in name or ".attn_k." in name):
        heads = shape.num_heads if ".attn_q." in name else shape.num_kv_heads
        halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
        return halves.swapaxes(1, 2).reshape(tensor.shape)
    return tensor + 1 if architecture == "gemma3" and name.endswith("norm.weight") else tensor


def write_gguf(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
