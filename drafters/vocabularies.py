"""The kinds of vocabulary: `tokenizer.json`, a SentencePiece model, and plain bytes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from sentencepiece import SentencePieceProcessor
from sentencepiece.sentencepiece_model_pb2 import (
    ModelProto,  # pyright: ignore[reportAttributeAccessIssue] protobuf makes it at import
)

from drafters.tokenizers import Piece, Vocabulary
from pipeline.core.errors import UserError

SPACE = "\u2581"  # SentencePiece's visible space
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_characters() -> dict[str, int]:
    """The printable characters that byte-level BPE writes bytes with (GPT-2's `bytes_to_unicode`)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    shifted = {chr(256 + i): byte for i, byte in enumerate(others)}
    return {chr(byte): byte for byte in printable} | shifted


_BYTE_OF = byte_characters()


def _byte_level(token: str) -> bytes:
    try:
        return bytes(_BYTE_OF[character] for character in token)
    except KeyError:  # an added token, which is spelled as it is
        return token.encode()


def _sentencepiece_like(token: str) -> bytes:
    if match := _BYTE_TOKEN.fullmatch(token):
        return bytes.fromhex(match[1])
    return token.replace(SPACE, " ").encode()


# ------------------------------------------------------------------------------- tokenizer.json


class FastVocabulary:
    """A `tokenizer.json` of the tokenizers package, byte-level BPE or SentencePiece-like.

    Raises:
      UserError: it is malformed, or its decoder is of another kind.
    """

    kind = "tokenizer.json"

    def __init__(self, content: bytes, origin: str):
        try:
            description = json.loads(content.decode("utf-8"))
            self._tokenizer = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
        except Exception as error:  # the tokenizers package raises Exception itself
            raise UserError(
                f"{origin}: not a tokenizer.json that can be read ({error}); fetch it again"
            ) from error
        self._content = content
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        steps = _decoder_steps(description.get("decoder"))
        to_bytes, self.drops_space = _decoding(steps, origin)
        self.pieces = _fast_pieces(self._tokenizer, to_bytes)

    def encode(self, text: str, *, first: bool, controls: bool) -> list[int]:
        """See `Vocabulary`. (Whether a later part is prefixed by a space is up to the file.)"""
        self._tokenizer.encode_special_tokens = not controls
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def prefix(self) -> list[int]:
        """Ids that the file's own post-processor puts before every text."""
        text = "a"
        plain = self._tokenizer.encode(text, add_special_tokens=False).ids
        full = self._tokenizer.encode(text, add_special_tokens=True).ids
        starts = range(len(full) - len(plain) + 1)
        start = next((i for i in starts if full[i : i + len(plain)] == plain), 0)
        return full[:start]

    def serialize(self) -> bytes:
        return self._content


def _decoder_steps(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if decoder is None:
        return []
    return list(decoder["decoders"]) if decoder["type"] == "Sequence" else [decoder]


def _decoding(steps: Sequence[Mapping[str, Any]], origin: str) -> Any:
    """The bytes of a token as a function, and whether the first space is dropped."""
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds:
        return _byte_level, False
    known = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
    if not kinds or kinds - known:
        found = ", ".join(sorted(kinds - known)) or "none"
        raise UserError(
            f"{origin}: decoder {found} is not supported; supported are ByteLevel (GPT-2, Llama 3, "
            "Qwen) and those of SentencePiece (Llama 2, Mistral, Gemma)"
        )
    strips = any(step["type"] == "Strip" and step.get("start") for step in steps)
    prepends = any(
        step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never"
        for step in steps
    )
    return _sentencepiece_like, strips or prepends


def _fast_pieces(tokenizer: tokenizers.Tokenizer, to_bytes: Any) -> list[Piece]:
    added = tokenizer.get_added_tokens_decoder()
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    pieces = [Piece(b"", control=True)] * (max(vocabulary.values(), default=-1) + 1)
    for token, i in vocabulary.items():
        if i in added:
            pieces[i] = Piece(token.encode(), control=added[i].special)
        else:
            pieces[i] = Piece(to_bytes(token))
    return pieces


# -------------------------------------------------------------------------------- SentencePiece


class SentencePieceVocabulary:
    """A SentencePiece model (`tokenizer.model`).

    Raises:
      UserError: it is malformed.
    """

    kind = "sentencepiece"

    def __init__(self, content: bytes, origin: str):
        try:
            proto = ModelProto.FromString(content)
            self._first = SentencePieceProcessor(model_proto=content)
        except Exception as error:  # protobuf and SentencePiece raise what they like
            raise UserError(
                f"{origin}: not a SentencePiece model ({error}); fetch it again"
            ) from error
        self._content = content
        self.drops_space = proto.normalizer_spec.add_dummy_prefix
        proto.normalizer_spec.add_dummy_prefix = False
        self._later = SentencePieceProcessor(model_proto=proto.SerializeToString())
        self.pieces = [_proto_piece(piece) for piece in proto.pieces]
        self._controls = {p.data.decode(): i for i, p in enumerate(self.pieces) if p.control}
        self._spelled = re.compile(
            "(" + "|".join(map(re.escape, sorted(self._controls, key=len, reverse=True))) + ")"
        )

    def encode(self, text: str, *, first: bool, controls: bool) -> list[int]:
        """See `Vocabulary`."""
        if not (controls and self._controls):
            return self._processor(first).encode(text)
        ids: list[int] = []
        for part in self._spelled.split(text):
            if part in self._controls:
                ids.append(self._controls[part])
            else:
                ids += self._processor(first and not ids).encode(part)
        return ids

    def _processor(self, first: bool) -> SentencePieceProcessor:
        return self._first if first else self._later

    def serialize(self) -> bytes:
        return self._content


def _proto_piece(piece: Any) -> Piece:
    kinds = ModelProto.SentencePiece
    if piece.type in (kinds.CONTROL, kinds.UNKNOWN):
        return Piece(piece.piece.encode(), control=True)
    return Piece(_sentencepiece_like(piece.piece))


# ---------------------------------------------------------------------------------------- bytes


class ByteVocabulary:
    """The 256 bytes of UTF-8, then the control tokens that begin and end a document."""

    kind = "bytes"
    drops_space = False
    END, BEGIN = 256, 257

    def __init__(self):
        self.pieces = [Piece(bytes([byte])) for byte in range(256)]
        self.pieces += [Piece(b"<|end|>", control=True), Piece(b"<|begin|>", control=True)]
        self._spelled = re.compile(r"(<\|end\|>|<\|begin\|>)")

    def encode(self, text: str, *, first: bool, controls: bool) -> list[int]:
        """See `Vocabulary`."""
        parts = self._spelled.split(text) if controls else [text]
        ids = {"<|end|>": [self.END], "<|begin|>": [self.BEGIN]} if controls else {}
        return [i for part in parts for i in ids.get(part) or part.encode()]

    def serialize(self) -> bytes:
        return b""


KINDS = (FastVocabulary.kind, SentencePieceVocabulary.kind, ByteVocabulary.kind)


def make(kind: str, content: bytes, origin: str) -> Vocabulary:
    """The vocabulary of `kind` from the content of its file.

    Raises:
      UserError: the content is malformed; `origin` is named.
    """
    if kind == ByteVocabulary.kind:
        return ByteVocabulary()
    if kind == SentencePieceVocabulary.kind:
        return SentencePieceVocabulary(content, origin)
    return FastVocabulary(content, origin)
