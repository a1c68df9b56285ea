"""Trains a SentencePiece tokenizer for a target that has none of its own.

    tokenizer = train_sentencepiece(corpora, vocab_size=2048, path=run.root / "tokenizer.model")

BPE with byte fallback and no normalisation: `decode(encode(text)) == text`, tabs, newlines and runs of spaces
included, and a text is segmented the same wherever it stands (no dummy space is put before it). The one
exception is U+2581, by which SentencePiece stands for a space. Pieces may hold line ends and indentation;
digits stay single.

    id 0         <unk>, which byte fallback leaves without use
    id 1         <s>, begins every document
    id 2         </s>, ends it
    ids 3..258   the 256 bytes
    ids 259..    merges, then characters

The same corpora give the same bytes. Only training documents are seen, never held-out ones.
"""

from __future__ import annotations

import contextlib
import heapq
import io
import os
from collections.abc import Iterable, Iterator, Sequence

import sentencepiece
from etils import epath

from drafters.tokenizers import Tokenizer
from drafters.vocabularies import SentencePieceVocabulary
from pipeline.core.errors import UserError
from pipeline.core.run_dir import atomic_write, explain_os_errors
from pipeline.corpora import Corpus, Document

UNK_ID, BOS_ID, EOS_ID = 0, 1, 2
SMALLEST_VOCABULARY = 3 + 256 + 1

_PIECE_BYTES = (
    4096  # SentencePiece skips longer lines, so documents are cut at line ends before that
)
SAMPLE_BYTES = 4 << 20  # more text changes a vocabulary of thousands very little


def train_sentencepiece(
    corpora: Sequence[Corpus],
    vocab_size: int,
    path: epath.PathLike,
    *,
    held_out_fraction: float = 0.05,
    sample_bytes: int = SAMPLE_BYTES,
) -> Tokenizer:
    """Trains on a sample of the corpora and writes `path`, or reads what is there.

    Args:
      corpora: equal shares of the sample are taken from each.
      vocab_size: V, at least `SMALLEST_VOCABULARY`.
      path: the SentencePiece model.
      held_out_fraction: of the documents, left out as in training.
      sample_bytes: about how much text to look at.

    Raises:
      UserError: no text, or too little for a vocabulary of this size.
    """
    if vocab_size < SMALLEST_VOCABULARY:
        raise UserError(
            f"vocab_size = {vocab_size}: byte fallback needs at least {SMALLEST_VOCABULARY} ids"
        )
    path = epath.Path(path)
    if not path.exists():
        share = sample_bytes // len(corpora)
        parts = [
            part
            for corpus in corpora
            for document in _sample(corpus, held_out_fraction, share)
            for part in _parts(document.content)
        ]
        if not parts:
            raise UserError("the corpora hold no text to train a tokenizer on; check their paths")
        atomic_write(path, _train(parts, vocab_size))
    return read_sentencepiece(path)


def read_sentencepiece(path: epath.PathLike) -> Tokenizer:
    """The tokenizer that `train_sentencepiece` wrote."""
    path = epath.Path(path)
    with explain_os_errors(path, "read"):
        content = path.read_bytes()
    return Tokenizer(
        vocabulary=SentencePieceVocabulary(content, str(path)),
        bos_id=BOS_ID,
        eos_ids=(EOS_ID,),
        add_bos=True,
    )


def _sample(corpus: Corpus, held_out_fraction: float, size: int) -> list[Document]:
    """Training documents of about `size` bytes: those with the smallest hashes, in that order."""
    heap: list[tuple[int, int, Document]] = []  # the largest hash comes first
    total = 0
    for number, document in enumerate(corpus.documents()):
        if document.is_held_out(held_out_fraction):
            continue
        heapq.heappush(heap, (-int(document.content_id, 16), -number, document))
        total += len(document.content)
        while len(heap) > 1 and total - len(heap[0][2].content) >= size:
            total -= len(heapq.heappop(heap)[2].content)
    return [document for _, _, document in sorted(heap, key=lambda item: item[:2], reverse=True)]


def _parts(text: str) -> Iterator[str]:
    """The text in parts of whole lines that are short enough for SentencePiece."""
    part, size = [], 0
    for line in text.splitlines(keepends=True):
        length = len(line.encode("utf-8", "surrogatepass"))
        if size + length > _PIECE_BYTES:
            if part:
                yield "".join(part)
            part, size = [], 0
        if length <= _PIECE_BYTES:
            part.append(line)
            size += length
    if part:
        yield "".join(part)


def _train(parts: Iterable[str], vocab_size: int) -> bytes:
    model = io.BytesIO()
    try:
        with _silent():
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(parts),
                model_writer=model,
                vocab_size=vocab_size,
                model_type="bpe",
                byte_fallback=True,
                character_coverage=0.9995,
                normalization_rule_name="identity",
                remove_extra_whitespaces=False,
                add_dummy_prefix=False,
                allow_whitespace_only_pieces=True,
                split_digits=True,
                max_sentence_length=2 * _PIECE_BYTES,
                shuffle_input_sentence=False,
                num_threads=1,  # the result must not depend on timing
                unk_id=UNK_ID,
                bos_id=BOS_ID,
                eos_id=EOS_ID,
                pad_id=-1,
                minloglevel=2,
            )
    except RuntimeError as error:
        raise UserError(
            f"no vocabulary of {vocab_size} ids can be trained on this text ({error}); lower vocab_size or "
            "add text"
        ) from None
    return model.getvalue()


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Nothing on the error stream: the trainer reports each of its steps there."""
    kept = os.dup(2)
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
