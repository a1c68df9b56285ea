"""The tokens that a drafter with a small head may propose: the most frequent ones of the training text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.core.artifacts import Artifact, Lineage


@dataclass(frozen=True, kw_only=True)
class DraftVocabulary(Artifact):
    """A subset of the target's vocabulary; the residual of the verification is over all of it.

    Attributes:
      ids: sorted.
      coverage: fraction of training targets that are in it.
      vocab_size: V, of the target's tokenizer.
    """

    SCHEMA = 1
    STAGE = "pipeline.train"

    ids: tuple[int, ...]
    coverage: float
    vocab_size: int


def choose(
    counts: np.ndarray, size: int, always: Sequence[int], lineage: Lineage
) -> DraftVocabulary:
    """The `size` most frequent ids, the smaller id first among equals.

    Args:
      counts: i64[V], how often each id is a training target.
      size: number of ids.
      always: ids that are in it whatever their count: the end tokens, without which a drafter could never
        propose to stop.
      lineage: where the counts come from.

    Raises:
      ValueError: a size that does not fit.
    """
    if not len(set(always)) <= size <= len(counts):
        raise ValueError(
            f"a draft vocabulary of {size} ids must hold {len(set(always))} end tokens and at most all "
            f"{len(counts)} ids"
        )
    wanted = counts.astype(np.int64)
    wanted[list(always)] = np.iinfo(np.int64).max
    ids = np.sort(np.argsort(-wanted, kind="stable")[:size])
    return DraftVocabulary(
        lineage=lineage,
        ids=tuple(ids.tolist()),
        coverage=float(counts[ids].sum() / max(counts.sum(), 1)),
        vocab_size=len(counts),
    )
