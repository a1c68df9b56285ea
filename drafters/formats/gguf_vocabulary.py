"""The vocabulary inside a GGUF, rebuilt as a `tokenizer.json` or a SentencePiece model.

llama.cpp stores tokens, types and merges or scores; how text is cut before the merges is known only by a
name, `tokenizer.ggml.pre`, whose rules are in its source (`llama-vocab.cpp`) and, for those we know, here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, TypeVar

import tokenizers
from sentencepiece.sentencepiece_model_pb2 import (
    ModelProto,  # pyright: ignore[reportAttributeAccessIssue] protobuf makes it at import
)
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from drafters.tokenizers import Tokenizer, Vocabulary
from drafters.vocabularies import FastVocabulary, SentencePieceVocabulary
from pipeline.core.errors import UserError

Value = TypeVar("Value")

_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5  # llama.cpp's and SentencePiece's numbers
_SENTENCEPIECE_BPE = 2

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


class Metadata(Protocol):
    """Metadata values of a file, see `drafters.formats.gguf.GGUFFile`."""

    @property
    def origin(self) -> str: ...
    def get(self, key: str) -> Any: ...
    def require(self, key: str, kind: type[Value]) -> Value: ...
    def optional(self, key: str, default: Value) -> Value: ...


class _Cut(NamedTuple):
    """How text is cut into words before merges: each pattern is applied to what the last one left."""

    patterns: tuple[str, ...]
    normal_form_c: bool = False
    whole_words: bool = False  # a word that is a token is taken without merges
    adds_bos: bool = False


_CUTS: Mapping[str, _Cut] = {
    "gpt-2": _Cut((_GPT2,)),
    "smollm": _Cut((r"\p{N}", _GPT2)),
    "default": _Cut((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "llama-bpe": _Cut(
        (rf"{_CONTRACTIONS}|\p{{N}}{{1,3}}|{_REST}",), whole_words=True, adds_bos=True
    ),
    "qwen2": _Cut((rf"{_CONTRACTIONS}|\p{{N}}|{_REST}",), normal_form_c=True),
}


def tokenizer_of(file: Metadata) -> Tokenizer:
    """The tokenizer that the file's metadata describe.

    Raises:
      UserError: there is none, or it is of an unknown kind.
    """
    model = file.require("tokenizer.ggml.model", str)
    if model == "gpt2":
        vocabulary, adds_bos = _byte_pair_vocabulary(file)
    elif model == "llama":
        vocabulary, adds_bos = _sentencepiece_vocabulary(file), True
    else:
        raise UserError(
            f"{file.origin}: vocabulary {model!r} is not supported; supported are gpt2 and llama"
        )
    bos = file.get("tokenizer.ggml.bos_token_id")
    ends = [file.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    try:
        return Tokenizer(
            vocabulary=vocabulary,
            bos_id=bos,
            eos_ids=tuple(dict.fromkeys(end for end in ends if end is not None)),
            add_bos=bos is not None and file.optional("tokenizer.ggml.add_bos_token", adds_bos),
            chat_template=file.optional("tokenizer.chat_template", ""),
        )
    except ValueError as error:
        raise UserError(f"{file.origin}: {error}") from error


def _byte_pair_vocabulary(file: Metadata) -> tuple[Vocabulary, bool]:
    name = file.optional("tokenizer.ggml.pre", "default")
    if name not in _CUTS:
        raise UserError(
            f"{file.origin}: pre-tokenizer {name!r} is not supported; supported are "
            f"{', '.join(_CUTS)}; import the original checkpoint with its tokenizer.json instead"
        )
    cut = _CUTS[name]
    tokens, types = _tokens(file)
    merges = [tuple(merge.split(" ", 1)) for merge in file.require("tokenizer.ggml.merges", list)]
    ids = {token: i for i, token in enumerate(tokens) if types[i] != _UNUSED}
    try:
        model = models.BPE(vocab=ids, merges=merges, ignore_merges=cut.whole_words)
    except Exception as error:  # the tokenizers package raises Exception itself
        raise UserError(f"{file.origin}: tokens and merges do not fit ({error})") from error
    built = tokenizers.Tokenizer(model)
    _cut_by(built, cut)
    for kind, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        added = [AddedToken(tokens[i], special=special, normalized=False)
                 for i in range(len(tokens)) if types[i] == kind]  # fmt: skip
        built.add_special_tokens(added) if special else built.add_tokens(added)
    return FastVocabulary(built.to_str().encode(), file.origin), cut.adds_bos


def _cut_by(built: tokenizers.Tokenizer, cut: _Cut) -> None:
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in cut.patterns]
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    built.pre_tokenizer = pre_tokenizers.Sequence([*splits, bytes_only])
    built.decoder = decoders.ByteLevel()
    built.post_processor = processors.ByteLevel(trim_offsets=False)
    if cut.normal_form_c:
        built.normalizer = normalizers.NFC()


def _sentencepiece_vocabulary(file: Metadata) -> Vocabulary:
    tokens, types = _tokens(file)
    scores = file.require("tokenizer.ggml.scores", list)
    if len(scores) != len(tokens):
        raise UserError(f"{file.origin}: {len(tokens)} tokens, but {len(scores)} scores")
    proto = ModelProto()
    for token, kind, score in zip(tokens, types, scores, strict=True):
        proto.pieces.add(piece=token, type=kind, score=score)
    proto.trainer_spec.model_type = _SENTENCEPIECE_BPE
    proto.trainer_spec.byte_fallback = any(kind == 6 for kind in types)
    proto.normalizer_spec.name = "identity"
    proto.normalizer_spec.add_dummy_prefix = file.optional("tokenizer.ggml.add_space_prefix", True)
    proto.normalizer_spec.remove_extra_whitespaces = False
    return SentencePieceVocabulary(proto.SerializeToString(), file.origin)


def _tokens(file: Metadata) -> tuple[list[str], list[int]]:
    tokens = file.require("tokenizer.ggml.tokens", list)
    types = file.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise UserError(f"{file.origin}: {len(tokens)} tokens, but {len(types)} types")
    return tokens, types
