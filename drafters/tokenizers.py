"""Text to token ids and back, for four kinds of vocabulary behind one class.

A `Vocabulary` segments text and knows the bytes of every id; `Tokenizer` adds what a model wants around
that: begin and end tokens, a chat template. Because decoding joins bytes, a stream that holds back
incomplete UTF-8 gives exactly the text that decoding everything at once gives.

Text never turns into control tokens (`<|im_end|>` typed by a user stays text); only chat templates make
them, and not out of the messages they are filled with.
"""

from __future__ import annotations

import codecs
import functools
import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from drafters import chat
from pipeline.core.errors import UserError


class Piece(NamedTuple):
    """One token: its bytes, and whether it steers the model instead of being text."""

    data: bytes
    control: bool = False


class Vocabulary(Protocol):
    """Segmentation of text into known pieces; the kinds are in `drafters.vocabularies`."""

    @property
    def kind(self) -> str:
        """The name of the kind."""
        ...

    @property
    def pieces(self) -> Sequence[Piece]:
        """The pieces of the ids 0..; an id that is not used is an empty control piece."""
        ...

    @property
    def drops_space(self) -> bool:
        """Whether the first space of a text is an artefact of segmentation and not shown."""
        ...

    def encode(self, text: str, *, first: bool, controls: bool) -> list[int]:
        """Ids of a text that stands at the `first` position or after others; with `controls`, control
        pieces spelled out in it become their ids."""
        ...

    def serialize(self) -> bytes:
        """The content of its file; empty if the kind says everything."""
        ...


class Difference(NamedTuple):
    """The first id that means two things: bytes of both sides, None where a side has no such token."""

    token: int
    ours: bytes | None
    theirs: bytes | None

    def __str__(self) -> str:
        def shown(data: bytes | None) -> str:
            return "no token" if data is None else repr(data.decode("utf-8", "replace"))

        return f"id {self.token} is {shown(self.ours)} in one and {shown(self.theirs)} in the other"


@dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """A vocabulary as one model uses it.

    Attributes:
      vocabulary: segments text.
      bos_id: the token that begins a document, None if there is none.
      eos_ids: tokens that end a generation.
      add_bos: whether a prompt begins with `bos_id`.
      chat_template: Jinja source in Hugging Face's conventions, empty for a plain language model.
    """

    vocabulary: Vocabulary
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    add_bos: bool = False
    chat_template: str = ""

    def __post_init__(self):
        used = [*self.eos_ids, *([] if self.bos_id is None else [self.bos_id])]
        for token in used:
            if not 0 <= token < self.vocab_size:
                raise ValueError(
                    f"Tokenizer.bos_id and eos_ids must lie in 0..{self.vocab_size - 1}, not {token}"
                )
        if self.add_bos and self.bos_id is None:
            raise ValueError("Tokenizer.add_bos needs a bos_id")

    @property
    def vocab_size(self) -> int:
        """Number of ids; the embedding of a model may have more rows."""
        return len(self.vocabulary.pieces)

    def encode(self, text: str, *, add_bos: bool | None = None) -> list[int]:
        """Ids of `text`; control tokens spelled out in it stay text.

        Args:
          text: anything.
          add_bos: begin with `bos_id`; None for what the model is used to.
        """
        return self._prefix(add_bos) + self.vocabulary.encode(text, first=True, controls=False)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> list[int]:
        """Ids of a conversation, ready for the assistant's answer.

        Args:
          messages: `{"role": ..., "content": ...}` each.
          **variables: more of them for the template.

        Raises:
          UserError: there is no template, or it refuses the messages.
        """
        controls = [piece.data.decode() for piece in self.vocabulary.pieces if piece.control]
        text = chat.render(
            self.chat_template,
            chat.guarded(messages, controls),
            bos_token=self._text(self.bos_id),
            eos_token=self._text(self.eos_ids[0] if self.eos_ids else None),
            **variables,
        )
        ids: list[int] = []
        for i, part in enumerate(text.split(chat.GUARD)):
            ids += self.vocabulary.encode(part, first=i == 0, controls=True)
        # Templates spell the begin token out, or leave it to the tokenizer; it comes once either way.
        prefix = self._prefix(None)
        return ids if ids[: len(prefix)] == prefix else prefix + ids

    def decode(self, ids: Iterable[int], *, controls: bool = False, continues: bool = False) -> str:
        """The text of `ids`; see `stream`."""
        stream = self.stream(controls=controls, continues=continues)
        return stream.push(ids) + stream.finish()

    def stream(self, *, controls: bool = False, continues: bool = False) -> StreamDecoder:
        """A decoder that takes ids as they come.

        Args:
          controls: show control tokens; they are left out by default.
          continues: the text continues another one, so that a space it begins with is kept.
        """
        drop = self.vocabulary.drops_space and not continues
        return StreamDecoder(self.vocabulary.pieces, controls, drop)

    @functools.cached_property
    def content_hash(self) -> str:
        """SHA-256 of the meaning of all ids: equal for vocabularies that can share token ids."""
        digest = hashlib.sha256()
        for data, control in self.vocabulary.pieces:
            digest.update(b"%d %d " % (control, len(data)) + data)
        return digest.hexdigest()

    def first_difference(self, other: Tokenizer) -> Difference | None:
        """The first id that means something else in `other`, None if there is no such id."""
        ours, theirs = self.vocabulary.pieces, other.vocabulary.pieces
        for token, (a, b) in enumerate(zip(ours, theirs, strict=False)):
            if a != b:
                return Difference(token, a.data, b.data)
        if len(ours) == len(theirs):
            return None
        token = min(len(ours), len(theirs))
        a, b = (p[token].data if token < len(p) else None for p in (ours, theirs))
        return Difference(token, a, b)

    def _prefix(self, add_bos: bool | None) -> list[int]:
        wanted = self.add_bos if add_bos is None else add_bos
        if not wanted:
            return []
        if self.bos_id is None:
            raise ValueError("add_bos = True, but the tokenizer has no bos_id")
        return [self.bos_id]

    def _text(self, token: int | None) -> str:
        return "" if token is None else self.vocabulary.pieces[token].data.decode()


class StreamDecoder:
    """Turns ids into text piece by piece: the pieces joined are the text of all ids."""

    def __init__(self, pieces: Sequence[Piece], controls: bool, drop_space: bool):
        self._pieces, self._controls, self._drop_space = pieces, controls, drop_space
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        """The text that is certain after `ids`; an incomplete character is held back."""
        return self._utf8.decode(b"".join(map(self._bytes, ids)))

    def finish(self) -> str:
        """What is held back; bytes that are no character come out as U+FFFD."""
        return self._utf8.decode(b"", final=True)

    def _bytes(self, token: int) -> bytes:
        if not 0 <= token < len(self._pieces):
            raise ValueError(f"id {token} is not in the vocabulary, 0..{len(self._pieces) - 1}")
        data, control = self._pieces[token]
        if control and not self._controls:
            return b""
        if self._drop_space and data:
            self._drop_space = False
            return data.removeprefix(b" ")
        return data


def require_fit(tokenizer: Tokenizer, vocab_size: int, where: str | os.PathLike[str]) -> None:
    """Refuses a tokenizer with more ids than the embedding has rows.

    Raises:
      UserError: naming both sizes.
    """
    if tokenizer.vocab_size > vocab_size:
        raise UserError(
            f"{os.fspath(where)}: the tokenizer has {tokenizer.vocab_size} ids, but the embedding only "
            f"{vocab_size} rows; they belong to different models"
        )
