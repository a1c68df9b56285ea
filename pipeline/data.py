"""Batches for training and evaluation: seqio tasks and mixtures over tokenised corpora.

    data = prepare(settings, tokenizer, directory, row_length=256)
    batches = data.train_batches(batch_size=16, seed=0, start_step=step)     # an endless iterator
    for batch in batches: ...
    for batch in data.held_out_batches("python_code", batch_size=16): ...    # every held-out chunk once

A batch is a dict of arrays `[B, T]`, B rows of T positions:

    tokens      i32
    targets     i32, the token after each within its segment, else 0
    weights     f32, 1 where the target is trained on, else 0
    segments    i32, 1, 2, ... along a row, 0 for padding
    positions   i32, from 0 in each segment

**One stream, whatever the number of processes.** Every process runs the same pipeline with the same seed and
keeps rows `i B/P .. (i + 1) B/P` of each global batch: the concatenation over processes is the batch that one
process would see, and a run may go on with another number of processes. The price is that each process reads
and packs all rows, some tens of microseconds each.

**Resuming** skips: the batches from `start_step` on are those of an uninterrupted run, bit for bit. Skipping
runs the input pipeline without the model, thousands of rows per second.

Rows are packed by seqio from chunks of whole documents: tokens of one segment never predict those of another
(`targets`, `weights` and `segments` are made together, by `shift`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from etils import epath

from drafters.tokenizers import Tokenizer
from pipeline.core.errors import UserError
from pipeline.text import DataSettings
from pipeline.tf_runtime import seqio, tf
from pipeline.tokenize_corpus import SPLITS, SplitName, TokenizedCorpus, tokenize

Batch = dict[str, np.ndarray]


def shift(rows: Mapping[str, np.ndarray]) -> Batch:
    """Inputs, targets and weights from packed rows.

    A worked row: chunks [5, 6, 7] (a prompt 5, answered 6 7) and [0, 9] in a row of T = 5, with 1 added to
    each id and `trained` 2 or 1:

        targets              6 7 8 1 10 0      tokens       5 6 7 0 9
        trained              1 2 2 2  2 0      targets      6 7 0 9 0
        targets_segment_ids  1 1 1 2  2 0      weights      1 1 0 1 0
        targets_positions    0 1 2 0  1 0      segments     1 1 1 2 2,  positions  0 1 2 0 1

    Args:
      rows: i32[B, T + 1] each, as `PackedRows` makes them.
    """
    ids, segments = rows["targets"] - 1, rows["targets_segment_ids"]
    same = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
    trained = same & (rows["trained"][:, 1:] == 2)
    return {
        "tokens": np.maximum(ids[:, :-1], 0),
        "targets": np.where(same, ids[:, 1:], 0),
        "weights": trained.astype(np.float32),
        "segments": segments[:, :-1],
        "positions": rows["targets_positions"][:, :-1],
    }


class PackedRows(seqio.FeatureConverter):
    """Packs `targets` and `trained` side by side: both have the same lengths, so they stay aligned."""

    _INT32 = seqio.FeatureConverter.FeatureSpec(dtype=tf.int32)
    TASK_FEATURES = {"targets": _INT32, "trained": _INT32}  # noqa: RUF012 seqio's interface
    MODEL_FEATURES = TASK_FEATURES
    PACKING_FEATURE_DTYPES = {  # noqa: RUF012
        f"{name}_{suffix}": tf.int32
        for name in TASK_FEATURES
        for suffix in ("segment_ids", "positions")
    }

    def _convert_features(
        self, ds: tf.data.Dataset, task_feature_lengths: Mapping[str, int]
    ) -> tf.data.Dataset:
        return self._pack_or_pad(ds, task_feature_lengths)

    def get_model_feature_lengths(
        self, task_feature_lengths: Mapping[str, int]
    ) -> Mapping[str, int]:
        """Every feature is as long as the row."""
        length = task_feature_lengths["targets"]
        return {name: length for name in (*self.MODEL_FEATURES, *self.PACKING_FEATURE_DTYPES)}


# ---------------------------------------------------------------------------- tasks and mixtures


def register(corpus: TokenizedCorpus, shuffle_buffer: int) -> str:
    """The name of the corpus's seqio task, which is registered if it was not."""
    name = f"{corpus.key.replace('-', '_')}_{shuffle_buffer}"
    if name in seqio.TaskRegistry.names():
        return name
    splits: list[SplitName] = [split for split in SPLITS if corpus.split(split).chunks]
    feature = seqio.Feature(
        seqio.PassThroughVocabulary(corpus.index.vocab_size + 1), add_eos=False, dtype=tf.int32
    )
    source = seqio.FileDataSource(
        tf.data.TFRecordDataset,
        {split: corpus.files(split) for split in splits},
    )
    seqio.TaskRegistry.add(
        name,
        source=cast(Any, source),
        preprocessors=[_parse],
        output_features={"targets": feature, "trained": feature},
        shuffle_buffer_size=shuffle_buffer,
    )
    return name


def register_mixture(rates: Mapping[str, float]) -> str:
    """The name of a seqio mixture of the tasks in `rates`, which is registered if it was not."""
    digest = hashlib.sha256(json.dumps(list(rates.items())).encode()).hexdigest()[:16]
    name = f"mixture_{digest}"
    if name not in seqio.MixtureRegistry.names():
        seqio.MixtureRegistry.add(name, list(rates.items()))
    return name


@seqio.map_over_dataset
def _parse(record: tf.Tensor) -> Mapping[str, tf.Tensor]:
    text = tf.io.FixedLenFeature([], tf.string)
    example = tf.io.parse_single_example(record, {"ids": text, "trained": text})
    return {
        "targets": tf.io.decode_raw(example["ids"], tf.int32),
        "trained": tf.cast(tf.io.decode_raw(example["trained"], tf.uint8), tf.int32),
    }


def _packed(task: str, split: SplitName, row_length: int, **options: Any) -> tf.data.Dataset:
    """Packed rows of T + 1 tokens, the last of which is only a target."""
    return seqio.get_dataset(
        task,
        {"targets": row_length + 1, "trained": row_length + 1},
        PackedRows(pack=True, apply_length_check=False),  # chunks fit; checking traces graphs
        dataset_split=split,
        verbose=False,
        **options,
    )


def _numpy(dataset: tf.data.Dataset) -> Iterator[Any]:
    """Its elements, dicts of arrays, in an order that does not depend on timing."""
    options = tf.data.Options()
    options.deterministic = True
    # The model computes on the same cores.
    options.threading.private_threadpool_size = 2
    options.threading.max_intra_op_parallelism = 1
    options.autotune.enabled = False
    return dataset.with_options(options).as_numpy_iterator()


# --------------------------------------------------------------------------------------- batches


class TrainBatches(Iterator[Batch]):
    """An endless stream of batches; `step` counts those that were taken."""

    def __init__(self, dataset: tf.data.Dataset, batch_size: int, rows: slice, start_step: int):
        self._rows = rows
        self.step = start_step
        dataset = dataset.batch(batch_size, drop_remainder=True).skip(start_step).prefetch(4)
        self._iterator = _numpy(dataset)

    def __next__(self) -> Batch:
        rows = next(self._iterator)
        self.step += 1
        return shift({name: x[self._rows] for name, x in rows.items()})


@dataclass(frozen=True, kw_only=True)
class Data:
    """Tokenised corpora, ready to be read in rows of `row_length`."""

    settings: DataSettings
    corpora: Mapping[str, TokenizedCorpus]
    row_length: int

    def _rates(self) -> list[float]:
        return list(self.settings.rates or (c.split("train").chunks for c in self.corpora.values()))

    def train_batches(
        self, *, batch_size: int, seed: int, start_step: int = 0, rows: slice = slice(None)
    ) -> TrainBatches:
        """The training stream from batch `start_step` on.

        Args:
          batch_size: B, rows of the global batch.
          seed: decides the order.
          start_step: number of batches already used.
          rows: of every global batch, those of this process.

        Raises:
          UserError: a corpus has no training text, or all together are smaller than one batch.
        """
        self._require(batch_size)
        buffer = self.settings.shuffle_buffer
        tasks = [register(corpus, buffer) for corpus in self.corpora.values()]
        name = register_mixture(dict(zip(tasks, self._rates(), strict=True)))
        dataset = _packed(name, "train", self.row_length, shuffle=True, seed=seed, num_epochs=None)
        return TrainBatches(dataset, batch_size, rows, start_step)

    def held_out_batches(
        self, corpus: str, *, batch_size: int, limit: int | None = None, rows: slice = slice(None)
    ) -> Iterator[Batch]:
        """The held-out rows of one corpus, each once and in order; the last batch is filled with padding.

        Args:
          corpus: its name.
          batch_size: B, rows of the global batch.
          limit: at most that many batches.
          rows: of every global batch, those of this process.

        Raises:
          UserError: nothing is held out.
        """
        found = self.corpora[corpus]
        if not found.split("held_out").chunks:
            raise UserError(
                f"corpus {corpus!r} has no held-out text: {found.split('train').documents} documents and a "
                f"held_out_fraction of {found.index.held_out_fraction} left none; raise it, or split the "
                "corpus into more documents"
            )
        dataset = _packed(
            register(found, self.settings.shuffle_buffer),
            "held_out",
            self.row_length,
            shuffle=False,
        )
        dataset = dataset.batch(batch_size).take(-1 if limit is None else limit)
        return _held_out(dataset.prefetch(2), batch_size, rows)

    def token_counts(self) -> np.ndarray:
        """i64[V]: how often each token is a training target, over all corpora."""
        return np.sum([corpus.counts() for corpus in self.corpora.values()], axis=0)

    def _require(self, batch_size: int) -> None:
        tokens = {name: c.split("train").tokens for name, c in self.corpora.items()}
        for name, count in tokens.items():
            if not count:
                raise UserError(f"corpus {name!r} has no training text; add documents or remove it")
        wanted = batch_size * self.row_length
        if sum(tokens.values()) < wanted:
            raise UserError(
                f"the corpora {', '.join(tokens)} have {sum(tokens.values())} training tokens, less than "
                f"one batch of {batch_size} x {self.row_length} = {wanted}; add text or lower the batch size"
            )


def _held_out(dataset: tf.data.Dataset, batch_size: int, rows: slice) -> Iterator[Batch]:
    for found in _numpy(dataset):
        missing = batch_size - len(found["targets"])
        filled = {name: np.pad(x, ((0, missing), (0, 0))) for name, x in found.items()}
        yield shift({name: x[rows] for name, x in filled.items()})


def prepare(
    settings: DataSettings,
    tokenizer: Tokenizer,
    directory: epath.PathLike,
    *,
    row_length: int,
    progress: bool = True,
) -> Data:
    """Tokenises what is not tokenised yet.

    Args:
      settings: corpora and their mixture.
      tokenizer: the target's.
      directory: keeps the records; may be shared by runs.
      row_length: T.
      progress: show a bar per corpus.

    Raises:
      UserError: a corpus cannot be read or is empty.
    """
    corpora = {
        corpus.name: tokenize(
            corpus,
            tokenizer,
            directory,
            row_length=row_length,
            held_out_fraction=settings.held_out_fraction,
            progress=progress,
        )
        for corpus in settings.corpora
    }
    return Data(settings=settings, corpora=corpora, row_length=row_length)
