"""Batches with the target's most probable tokens, computed once for all drafters that read the same text."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from pipeline.teacher_cache import CacheContent, TeacherCache
from pipeline.training_loop import Feed, HostBatch, Share
from pipeline.training_settings import Batch


@dataclass(frozen=True, kw_only=True)
class CachedFeed:
    """A feed whose training batches carry `teacher_ids` and `teacher_log_probs`.

    Attributes:
      text: the batches.
      cache: the target's answers to the first `count` of them, which come again and again.
    """

    text: Feed
    cache: TeacherCache
    count: int

    def batches(self, batch: Batch, first: int, share: Share) -> Iterator[HostBatch]:
        """See `Feed`."""
        start = first % self.count
        while True:
            text = self.text.batches(batch, start, share)
            answered = self.cache.attach(text, start, rows_of(batch, share))
            yield from itertools.islice(answered, self.count - start)
            start = 0

    def held_out(self, batch: Batch, count: int, share: Share) -> Mapping[str, Sequence[HostBatch]]:
        """See `Feed`: without a teacher's answers, which are computed for every evaluation."""
        return self.text.held_out(batch, count, share)


def rows_of(batch: Batch, share: Share) -> slice:
    """This process's rows of a global batch."""
    size = batch.rows // share.count
    return slice(share.index * size, (share.index + 1) * size)


def cache_of(
    root,
    fingerprint: Mapping[str, str],
    seed: int,
    teacher_hash: str,
    vocab: int,
    k: int,
    batch: Batch,
) -> TeacherCache:
    """The cache for this text, teacher and kind of batch."""
    content = CacheContent(
        data=json.dumps({**fingerprint, "seed": seed}),
        teacher=teacher_hash,
        vocab_size=vocab,
        k=k,
        batch_size=batch.rows,
        row_length=batch.length,
    )
    return TeacherCache(root=root, content=content)


def local_rows(array: jax.Array) -> np.ndarray:
    """This process's rows of a global array that is divided over its first axis."""
    parts = {shard.index[0].start or 0: shard.data for shard in array.addressable_shards}
    return np.concatenate([np.asarray(parts[start]) for start in sorted(parts)])
