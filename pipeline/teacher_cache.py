"""The target's most probable tokens at every training position: computed once, read by every drafter.

    cache = TeacherCache(root=directory, content=CacheContent(...))
    say(cache.describe(steps))                                     # the size, before anything is written
    cache.fill(steps, batches_from, top_k, rows)                   # only what is missing
    for batch in cache.attach(batches, first_step, rows): ...      # + teacher_ids, teacher_log_probs

    ROOT/teacher-<key>/content.json
                       00000/00000-00016/{ids,log_probs,digests}.npy   one shard of steps: rows 0..15

Axes: B rows of the global batch, T positions, k tokens. `ids` [steps, rows, T, k] are uint16 where they fit,
`log_probs` f32 of the same shape, the most probable token first. `digests` u32[steps, rows] are checksums of
the rows' tokens: an answer is never given for another row than it was computed for. Shards are written
atomically, each process its own rows; another number of processes can read them.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import NamedTuple

import numpy as np
from etils import epath
from tqdm import tqdm

from pipeline.core.errors import UserError
from pipeline.core.progress import progress_bar
from pipeline.core.run_dir import atomic_directory, claim, explain_os_errors, is_bucket

Batch = Mapping[str, np.ndarray]
BatchesFrom = Callable[[int], Iterator[Batch]]  # first step -> batches, this process's rows
TopKOf = Callable[[Batch], tuple[np.ndarray, np.ndarray]]  # ids and log-probabilities, [rows, T, k]

SHARD_BYTES = 64 << 20
_MOST_STEPS = 16  # a whole shard is computed for the sake of one step

_ARRAYS = ("ids", "log_probs", "digests")


@dataclass(frozen=True, kw_only=True)
class CacheContent:
    """What a cache is made of; the key is its hash.

    Attributes:
      data: names the stream of batches: corpora, mixture, seed.
      teacher: the target's weights hash.
      vocab_size: V.
      k: tokens kept per position.
      batch_size, row_length: B and T.
    """

    data: str
    teacher: str
    vocab_size: int
    k: int
    batch_size: int
    row_length: int

    def __post_init__(self):
        if not 1 <= self.k <= self.vocab_size:
            raise ValueError(
                f"CacheContent.k must lie in 1..vocab_size = {self.vocab_size}, not {self.k}"
            )

    @property
    def key(self) -> str:
        """16 hex digits."""
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:16]

    @property
    def ids_dtype(self) -> np.dtype:
        """The smallest type that holds every id."""
        return np.dtype(np.uint16 if self.vocab_size <= 1 << 16 else np.int32)

    @property
    def step_bytes(self) -> int:
        """Bytes of one global batch."""
        position = self.k * (self.ids_dtype.itemsize + 4)
        return self.batch_size * (self.row_length * position + 4)

    @property
    def shard_steps(self) -> int:
        """Steps per shard: few, for whole shards are computed."""
        return max(1, min(_MOST_STEPS, SHARD_BYTES // self.step_bytes))


class _Part(NamedTuple):
    """Some rows of a shard."""

    first_row: int
    ids: np.ndarray
    log_probs: np.ndarray
    digests: np.ndarray


@dataclass(frozen=True, kw_only=True)
class TeacherCache:
    """The cache of `content` below `root`."""

    root: epath.PathLike
    content: CacheContent

    @property
    def folder(self) -> epath.Path:
        """Holds its shards."""
        return epath.Path(self.root) / f"teacher-{self.content.key}"

    def size_bytes(self, steps: int) -> int:
        """Bytes on disk for `steps` batches."""
        return steps * self.content.step_bytes

    def describe(self, steps: int) -> str:
        """One line: what will be written, and how large it is."""
        c = self.content
        return (
            f"teacher cache: {c.k} of {c.vocab_size} tokens at {steps} x {c.batch_size} x {c.row_length} "
            f"positions, {self.size_bytes(steps) / 1e6:,.0f} MB in {self.folder}"
        )

    def fill(
        self,
        steps: int,
        batches_from: BatchesFrom,
        top_k: TopKOf,
        rows: slice | None = None,
        *,
        progress: bool = True,
    ) -> int:
        """Computes the shards of the first `steps` batches that are missing; the number of those.

        Args:
          steps: batches to cover, rounded up to whole shards.
          batches_from: the stream from a step on, this process's rows.
          top_k: what the target says about a batch.
          rows: of the global batch, those of this process; None for all.
          progress: show how far it is.

        Raises:
          UserError: the disk is full, or the folder is of another content.
        """
        self._claim()
        rows = rows or slice(0, self.content.batch_size)
        size = self.content.shard_steps
        missing = [s for s in range(-(-steps // size)) if not self._part_folder(s, rows).exists()]
        bar = progress_bar(
            total=len(missing) * size, unit="batch", description="teacher cache", shown=progress
        )
        batches, at = iter(()), -1
        with bar:
            for shard in missing:
                if shard != at:  # a stream takes seconds to begin: one serves all shards in a row
                    batches = batches_from(shard * size)
                some = itertools.islice(batches, size)
                self._write(self._part_folder(shard, rows), some, top_k, bar)
                at = shard + 1
        return len(missing)

    def attach(
        self, batches: Iterator[Batch], first: int, rows: slice | None = None
    ) -> Iterator[dict[str, np.ndarray]]:
        """Batches with `teacher_ids` i32 and `teacher_log_probs` f32 [rows, T, k].

        Args:
          batches: the stream from step `first` on.
          first: see above.
          rows: of the global batch, those that `batches` hold; None for all.

        Raises:
          UserError: a step is not in the cache, or was computed for other tokens.
        """
        rows = rows or slice(0, self.content.batch_size)
        loaded, parts = -1, list[_Part]()
        for step, batch in enumerate(batches, start=first):
            shard, offset = divmod(step, self.content.shard_steps)
            if shard != loaded:
                loaded, parts = shard, self._parts(shard, rows, step)
            ids, log_probs, digests = (
                np.concatenate([getattr(part, name)[offset] for part in parts]) for name in _ARRAYS
            )
            if not np.array_equal(digests, _digests(batch["tokens"])):
                raise UserError(
                    f"{self.folder}: step {step} was computed for other tokens than are read now; delete the "
                    "folder to compute it again"
                )
            yield {
                **batch,
                "teacher_ids": ids.astype(np.int32),
                "teacher_log_probs": log_probs,
            }

    def _claim(self) -> None:
        """Writes what the folder is of, or checks it."""
        path = self.folder / "content.json"
        wanted = asdict(self.content)
        found = claim(path, wanted)
        if found != wanted:
            raise UserError(f"{path}: made of {found}, but {wanted} is in use; delete the folder")

    def _part_folder(self, shard: int, rows: slice) -> epath.Path:
        return self.folder / f"{shard:05d}" / f"{rows.start:05d}-{rows.stop:05d}"

    def _write(
        self, folder: epath.Path, batches: Iterator[Batch], top_k: TopKOf, bar: tqdm
    ) -> None:
        columns: dict[str, list[np.ndarray]] = {name: [] for name in _ARRAYS}
        for batch in batches:
            ids, log_probs = top_k(batch)
            columns["ids"].append(np.asarray(ids).astype(self.content.ids_dtype))
            columns["log_probs"].append(np.asarray(log_probs, np.float32))
            columns["digests"].append(_digests(batch["tokens"]))
            bar.update()
        with atomic_directory(folder) as new:
            for name, column in columns.items():
                with (new / f"{name}.npy").open("wb") as file:
                    np.save(file, np.stack(column))

    def _parts(self, shard: int, rows: slice, step: int) -> list[_Part]:
        """Row ranges on disk cut to `rows`, in order and without gaps."""
        parts, row = [], rows.start
        folder = self.folder / f"{shard:05d}"
        for path in sorted(folder.iterdir()) if folder.exists() else ():
            if path.name.startswith("."):  # still being written
                continue
            start, stop = map(int, path.name.split("-"))
            if start <= row < min(stop, rows.stop):
                kept = slice(row - start, min(stop, rows.stop) - start)
                arrays = [_load(path / f"{name}.npy") for name in _ARRAYS]
                parts.append(_Part(row, *(array[:, kept] for array in arrays)))
                row = min(stop, rows.stop)
        if row < rows.stop:
            raise UserError(
                f"{self.folder}: row {row} of step {step} is not cached; fill the cache for as many steps as "
                "are trained"
            )
        return parts


def _load(path: epath.Path) -> np.ndarray:
    with explain_os_errors(path, "read"):
        if is_bucket(path):
            with path.open("rb") as file:
                return np.load(file)
        return np.load(path, mmap_mode="r")


def _digests(tokens: np.ndarray) -> np.ndarray:
    return np.array([zlib.crc32(np.ascontiguousarray(row).tobytes()) for row in tokens], np.uint32)
