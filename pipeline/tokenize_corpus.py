"""Tokenises a corpus once: int32 TFRecords, keyed by the corpus, the tokenizer and the row length.

    DIRECTORY/<corpus>-<key>/
        00000/train.tfrecord, held_out.tfrecord, tally.npz    one folder per 512 documents, atomic
        00001/...
        counts.npy      i64[V], how often each token is a training target
        index.json      `Index`; written last, so its presence means that all is there

A run that was interrupted goes on with the first shard that is missing.

A document becomes `[bos] + ids + [eos]` and is cut into chunks of at most row_length + 1 tokens that overlap
by one: every token but the first is a target exactly once. A record holds one chunk: `ids` as little-endian
int32, each plus 1 (seqio's packing takes 0 for padding), and `trained`, a byte per token: 2 where the model
learns to predict the token, 1 where not (prompts). Chunks without a trained target are left out. Within a
shard chunks are shuffled, so that a small shuffle buffer suffices when they are read.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from etils import epath

from drafters import chat
from drafters.tokenizers import Tokenizer
from pipeline.core import artifacts
from pipeline.core.errors import UserError
from pipeline.core.progress import progress_bar
from pipeline.core.run_dir import atomic_directory, atomic_open, explain_os_errors
from pipeline.corpora import Corpus, Document, Segment

SplitName = Literal["train", "held_out"]
SPLITS: tuple[SplitName, ...] = ("train", "held_out")
SHARD_DOCUMENTS = 512

_FORMAT = 1  # part of the key; raised when records change


@dataclass(frozen=True, kw_only=True)
class Split:
    """The size of one side of a corpus."""

    documents: int
    chunks: int
    tokens: int  # of the chunks, prompts included
    targets: int  # tokens that are trained on


@dataclass(frozen=True, kw_only=True)
class Index(artifacts.Artifact):
    """What a tokenised corpus holds; `index.json`."""

    SCHEMA = 1
    STAGE = "pipeline.train"

    corpus: str
    corpus_hash: str
    vocab_size: int
    eos_id: int
    row_length: int
    held_out_fraction: float
    shards: int
    train: Split
    held_out: Split


@dataclass(frozen=True, kw_only=True)
class TokenizedCorpus:
    """A tokenised corpus on disk."""

    root: epath.Path
    index: Index

    @property
    def key(self) -> str:
        """Names its content: equal keys, equal records."""
        return self.root.name

    def split(self, name: SplitName) -> Split:
        """Sizes of one side."""
        return getattr(self.index, name)

    def files(self, name: SplitName) -> list[str]:
        """The record files of one side, in order."""
        folders = [self.root / f"{shard:05d}" for shard in range(self.index.shards)]
        return [str(folder / f"{name}.tfrecord") for folder in folders]

    def counts(self) -> np.ndarray:
        """i64[V]: how often each token is a training target."""
        path = self.root / "counts.npy"
        with explain_os_errors(path, "read"), path.open("rb") as file:
            return np.load(file)


def tokenize(
    corpus: Corpus,
    tokenizer: Tokenizer,
    directory: epath.PathLike,
    *,
    row_length: int,
    held_out_fraction: float = 0.05,
    shard_documents: int = SHARD_DOCUMENTS,
    progress: bool = True,
) -> TokenizedCorpus:
    """Tokenises `corpus` into `directory`, or finds it there.

    Processes that share `directory` may do this at the same time: each writes the same files.

    Args:
      corpus: the text.
      tokenizer: needs an end token.
      directory: holds one folder per corpus, tokenizer and row length.
      row_length: T, the length of the rows that training packs.
      held_out_fraction: of the documents, by the hash of their content.
      shard_documents: documents per shard.
      progress: show a bar.

    Raises:
      UserError: the corpus cannot be read or is empty, or the tokenizer has no end token.
    """
    if row_length < 2:
        raise ValueError(f"row_length must be at least 2, not {row_length}")
    if not 0 <= held_out_fraction < 1:
        raise ValueError(f"held_out_fraction must lie in [0, 1), not {held_out_fraction}")
    if not re.fullmatch(r"\w+", corpus.name):
        raise UserError(f"corpus name {corpus.name!r} may hold only letters, digits and _")
    if not tokenizer.eos_ids:
        raise UserError("the tokenizer has no end token, which separates documents; name one")
    corpus_hash = corpus.content_hash()
    settings = [_FORMAT, corpus_hash, tokenizer.content_hash, tokenizer.bos_id, tokenizer.add_bos]
    settings += [tokenizer.eos_ids[0], tokenizer.chat_template, row_length, held_out_fraction]
    key = hashlib.sha256(json.dumps([*settings, shard_documents]).encode()).hexdigest()[:16]
    root = epath.Path(directory) / f"{corpus.name}-{key}"
    path = root / "index.json"
    if not path.exists():
        writer = _Writer(tokenizer, row_length, held_out_fraction, key)
        shards = writer.write_shards(corpus, root, shard_documents, progress)
        tally = _sum(shards)
        _write_counts(root / "counts.npy", tally.counts)
        index = Index(
            lineage=artifacts.Lineage.here(
                config="", seed=0, tokenizer_hash=tokenizer.content_hash
            ),
            corpus=corpus.name,
            corpus_hash=corpus_hash,
            vocab_size=tokenizer.vocab_size,
            eos_id=tokenizer.eos_ids[0],
            row_length=row_length,
            held_out_fraction=held_out_fraction,
            shards=len(shards),
            **{name: tally.split(i) for i, name in enumerate(SPLITS)},
        )
        artifacts.write(path, index)
    return TokenizedCorpus(root=root, index=artifacts.read(path, Index))


# -------------------------------------------------------------------------------- documents to ids


class Ids(NamedTuple):
    """The tokens of a document or chunk."""

    ids: np.ndarray  # i32[n]
    trained: np.ndarray  # bool[n]


def encode(document: Document, tokenizer: Tokenizer) -> Ids:
    """The tokens of `document`, begin and end tokens included.

    Raises:
      UserError: a conversation that the chat template cannot render part by part.
    """
    if document.messages:
        segments = list(_chat_segments(document, tokenizer))
        ids, trained = _encode_segments(segments, tokenizer, controls=True)
        prefix = tokenizer.encode("")
        if ids[: len(prefix)] != prefix:  # templates may spell the begin token out
            ids, trained = prefix + ids, [False] * len(prefix) + trained
    else:
        ids, trained = _encode_segments(document.segments, tokenizer, controls=False)
        prefix = tokenizer.encode("")
        ids, trained = prefix + ids, [True] * len(prefix) + trained
    if document.ends and ids[-1:] != [tokenizer.eos_ids[0]]:
        ids, trained = [*ids, tokenizer.eos_ids[0]], [*trained, trained[-1] if trained else True]
    return Ids(np.array(ids, np.int32), np.array(trained, bool))


def _encode_segments(
    segments: Iterable[Segment], tokenizer: Tokenizer, controls: bool
) -> tuple[list[int], list[bool]]:
    ids: list[int] = []
    trained: list[bool] = []
    first = True
    for segment in segments:
        for part in segment.text.split(chat.GUARD) if controls else [segment.text]:
            new = tokenizer.vocabulary.encode(part, first=first, controls=controls)
            ids += new
            trained += [segment.trained] * len(new)
            first = False
    return ids, trained


def _chat_segments(document: Document, tokenizer: Tokenizer) -> Iterator[Segment]:
    """Prompts and answers as the template writes them; an answer ends with its end-of-turn mark."""
    controls = [piece.data.decode() for piece in tokenizer.vocabulary.pieces if piece.control]
    messages = chat.guarded(list(document.messages), controls)
    done = ""
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = _render(tokenizer, messages[:i], True)
        answer = _render(tokenizer, messages[: i + 1], False)
        if not (prompt.startswith(done) and answer.startswith(prompt)):
            raise UserError(
                f"{document.id}: the chat template rewrites earlier messages, so the answer to message "
                f"{i} cannot be told apart; split the conversation into one line per answer"
            )
        yield Segment(prompt[len(done) :], trained=False)
        yield Segment(answer[len(prompt) :], trained=True)
        done = answer


def _render(tokenizer: Tokenizer, messages: Sequence, answering: bool) -> str:
    def text(token: int | None) -> str:
        return "" if token is None else tokenizer.vocabulary.pieces[token].data.decode()

    return chat.render(
        tokenizer.chat_template,
        messages,
        add_generation_prompt=answering,
        bos_token=text(tokenizer.bos_id),
        eos_token=text(tokenizer.eos_ids[0]),
    )


def chunks(document: Ids, row_length: int) -> Iterator[Ids]:
    """Chunks of at most row_length + 1 tokens that overlap by one, those with a trained target.

    >>> [c.ids.tolist() for c in chunks(Ids(np.arange(6), np.ones(6, bool)), 3)]
    [[0, 1, 2, 3], [3, 4, 5]]
    """
    ids, trained = document
    for start in range(0, len(ids) - 1, row_length):
        part = slice(start, start + row_length + 1)
        if trained[part][1:].any():
            yield Ids(ids[part], trained[part])


# ---------------------------------------------------------------------------------------- shards


class _Tally(NamedTuple):
    """Sizes of a shard or corpus: `sizes` i64[splits, 4], the fields of `Split`; `counts` i64[V]."""

    sizes: np.ndarray
    counts: np.ndarray

    def split(self, index: int) -> Split:
        documents, chunks, tokens, targets = map(int, self.sizes[index])
        return Split(documents=documents, chunks=chunks, tokens=tokens, targets=targets)


def _sum(tallies: Sequence[_Tally]) -> _Tally:
    return _Tally(*(np.sum(parts, axis=0) for parts in zip(*tallies, strict=True)))


def _write_counts(path: epath.Path, counts: np.ndarray) -> None:
    with atomic_open(path, "wb") as file:
        np.save(file, counts)


@dataclass(frozen=True)
class _Writer:
    tokenizer: Tokenizer
    row_length: int
    held_out_fraction: float
    key: str

    def write_shards(
        self, corpus: Corpus, root: epath.Path, shard_documents: int, progress: bool
    ) -> list[_Tally]:
        """Writes the shards that are missing; sizes of all."""
        documents = progress_bar(
            corpus.documents(), unit="text", description=f"tokenise {corpus.name}", shown=progress
        )
        tallies = []
        for shard, group in enumerate(_batched(documents, shard_documents)):
            folder = root / f"{shard:05d}"
            if not folder.exists():
                with atomic_directory(folder) as new:
                    self._write_shard(new, group, shard)
            with explain_os_errors(folder, "read"), (folder / "tally.npz").open("rb") as file:
                tallies.append(_Tally(**np.load(file)))
        if not tallies:
            raise UserError(f"corpus {corpus.name!r} is empty: it has no documents with text")
        return tallies

    def _write_shard(self, folder: epath.Path, documents: Sequence[Document], shard: int) -> None:
        sizes = np.zeros((len(SPLITS), 4), np.int64)
        counts = np.zeros(self.tokenizer.vocab_size, np.int64)
        parts: list[list[Ids]] = [[] for _ in SPLITS]
        for document in documents:
            side = int(document.is_held_out(self.held_out_fraction))
            found = list(chunks(encode(document, self.tokenizer), self.row_length))
            targets = [chunk.ids[1:][chunk.trained[1:]] for chunk in found]
            tokens = sum(len(chunk.ids) for chunk in found)
            sizes[side] += (1, len(found), tokens, sum(map(len, targets)))
            parts[side] += found
            if SPLITS[side] == "train" and targets:
                counts += np.bincount(np.concatenate(targets), minlength=len(counts))
        for name, found in zip(SPLITS, parts, strict=True):
            order = _random(self.key, shard, name).permutation(len(found))
            _write_records(folder / f"{name}.tfrecord", (found[i] for i in order))
        with (folder / "tally.npz").open("wb") as file:
            np.savez(file, sizes=sizes, counts=counts)


def _batched(items: Iterable[Document], size: int) -> Iterator[list[Document]]:
    iterator = iter(items)
    while group := list(itertools.islice(iterator, size)):
        yield group


def _random(key: str, shard: int, split: str) -> np.random.Generator:
    digest = hashlib.sha256(f"{key} {shard} {split}".encode()).digest()
    return np.random.default_rng(int.from_bytes(digest[:8], "big"))


def _write_records(path: epath.Path, found: Iterable[Ids]) -> None:
    from pipeline.tf_runtime import tf

    def feature(data: bytes) -> tf.train.Feature:
        return tf.train.Feature(bytes_list=tf.train.BytesList(value=[data]))

    with tf.io.TFRecordWriter(str(path)) as writer:
        for ids, trained in found:
            content = {
                "ids": feature((ids + 1).astype("<i4").tobytes()),
                "trained": feature((trained + np.uint8(1)).astype(np.uint8).tobytes()),
            }
            example = tf.train.Example(features=tf.train.Features(feature=content))
            writer.write(example.SerializeToString(deterministic=True))
