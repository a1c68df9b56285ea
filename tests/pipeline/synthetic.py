"""Text for tests of training: rows of two random documents, a function of the step alone."""

import dataclasses
import time
from collections.abc import Iterator, Mapping

import numpy as np

from drafters.tokenizers import Tokenizer
from drafters.vocabularies import ByteVocabulary
from pipeline.training_loop import HostBatch, Share
from pipeline.training_settings import Batch

VOCAB = 258  # of bytes


@dataclasses.dataclass(frozen=True)
class SyntheticText:
    """`text` of `pipeline.train.train`, and what it opens."""

    seed: int = 0
    pause_s: float = 0.0  # per batch, so that a test can interrupt
    poison: int = 10**9  # a step whose weights are NaN

    tokenizer = Tokenizer(vocabulary=ByteVocabulary(), eos_ids=(256,))

    @property
    def fingerprint(self) -> Mapping[str, str]:
        return {"text": f"synthetic {self.seed}"}

    def open(self, run, target, seed):
        return self

    def data(self, row_length: int) -> None:
        pass

    def frequent_ids(self, count: int) -> np.ndarray:
        return np.arange(count, dtype=np.int32)

    def batches(self, batch: Batch, first: int, share: Share) -> Iterator[HostBatch]:
        step = first
        while True:
            time.sleep(self.pause_s)
            yield self.rows(batch, step, share)
            step += 1

    def held_out(self, batch: Batch, count: int, share: Share):
        return {"random": [self.rows(batch, -1 - i, share) for i in range(count)]}

    def rows(self, batch: Batch, step: int, share: Share = Share()) -> HostBatch:
        rng = np.random.default_rng([self.seed, step % 2**32])
        size, half = (batch.rows, batch.length), batch.length // 2
        # Skewed, so that there is something to learn.
        tokens = np.minimum(rng.geometric(0.1, (batch.rows, batch.length + 1)), VOCAB - 1)
        positions = np.broadcast_to(np.arange(batch.length) % half, size)
        weights = np.where(rng.random(size) < 0.9, 1.0, 0.0)
        whole = {
            "tokens": tokens[:, :-1],
            "targets": tokens[:, 1:],
            "segments": np.broadcast_to(1 + np.arange(batch.length) // half, size),
            "positions": positions,
            "weights": weights * (np.nan if step == self.poison else 1),
        }
        own = batch.rows // share.count
        return {
            name: np.ascontiguousarray(array[own * share.index : own * (share.index + 1)]).astype(
                np.float32 if name == "weights" else np.int32
            )
            for name, array in whole.items()
        }
