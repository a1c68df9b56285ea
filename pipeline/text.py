"""What a training config says about text, and the text as the training loop reads it.

    text = Text(corpora=(PythonCode(), PythonProse()), vocab_size=2048).open(run, "target", seed=0)
    text.batches(Batch(rows=16, length=256), first=0, share)     # see `pipeline.data` for the arrays

Records and a tokenizer that is trained here lie in RUN_DIR/data, or in `directory`, where runs share them.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from etils import epath

from drafters import model_card
from drafters.tokenizers import Tokenizer
from pipeline import draft_vocabulary, train_tokenizer
from pipeline.core.artifacts import Lineage
from pipeline.core.errors import UserError
from pipeline.core.run_dir import RunDir
from pipeline.corpora import Corpus
from pipeline.training_settings import Batch

if TYPE_CHECKING:
    from pipeline.data import Data
    from pipeline.training_loop import Share


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """What models are trained on.

    Attributes:
      corpora: at least one.
      rates: how many chunks of each to draw, relative to the others; empty for as many as each has, so that
        an epoch takes equally long for all.
      held_out_fraction: of each corpus's documents, kept for evaluation.
      shuffle_buffer: chunks.
    """

    corpora: tuple[Corpus, ...]
    rates: tuple[float, ...] = ()
    held_out_fraction: float = 0.05
    shuffle_buffer: int = 4096

    def __post_init__(self):
        names = [corpus.name for corpus in self.corpora]
        if not names:
            raise ValueError("DataSettings.corpora is empty; name at least one corpus")
        if len(set(names)) < len(names):
            raise ValueError(f"DataSettings.corpora: names must differ, not {', '.join(names)}")
        if self.rates and len(self.rates) != len(names):
            raise ValueError(
                f"DataSettings.rates has {len(self.rates)} values for {len(names)} corpora"
            )
        if any(rate <= 0 for rate in self.rates):
            raise ValueError(f"DataSettings.rates must be positive, not {self.rates}")
        if not 0 < self.held_out_fraction < 1:
            raise ValueError(
                "DataSettings.held_out_fraction must lie between 0 and 1, not "
                f"{self.held_out_fraction}"
            )
        if self.shuffle_buffer < 1:
            raise ValueError(
                f"DataSettings.shuffle_buffer must be positive, not {self.shuffle_buffer}"
            )


@dataclass(frozen=True, kw_only=True)
class Text(DataSettings):
    """Corpora and the tokenizer they are read with.

    Attributes:
      vocab_size: of the SentencePiece tokenizer that is trained if the target has none; 0 if it must have
        one.
      directory: keeps records; empty for RUN_DIR/data.
    """

    vocab_size: int = 0
    directory: str = ""

    def open(self, run: RunDir, target: str, seed: int) -> OpenText:
        """The text, with the tokenizer of the model `target` if there is one in the run directory.

        Raises:
          UserError: no tokenizer, or a corpus that cannot be read.
        """
        directory = epath.Path(self.directory) if self.directory else run.root / "data"
        return OpenText(
            settings=self,
            tokenizer=self._tokenizer(run, target, directory),
            directory=directory,
            seed=seed,
        )

    def _tokenizer(self, run: RunDir, target: str, directory: epath.Path) -> Tokenizer:
        folder = run.model(target)
        if folder.exists():
            return model_card.read_tokenizer(folder, model_card.read_card(folder))
        if not self.vocab_size:
            raise UserError(
                f"{folder} does not exist, so there is no tokenizer; import the target first, or set "
                "Text.vocab_size to train one"
            )
        content = [corpus.content_hash() for corpus in self.corpora]
        content += [self.vocab_size, self.held_out_fraction]
        key = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]
        return train_tokenizer.train_sentencepiece(
            self.corpora,
            self.vocab_size,
            directory / f"tokenizer-{key}.model",
            held_out_fraction=self.held_out_fraction,
        )


@dataclass(frozen=True, kw_only=True)
class OpenText:
    """Text with its tokenizer; rows of every length are packed from records of their own."""

    settings: DataSettings
    tokenizer: Tokenizer
    directory: epath.Path
    seed: int
    _by_length: dict[int, Data] = field(default_factory=dict, init=False, repr=False)
    _held_out: dict[tuple, Any] = field(default_factory=dict, init=False, repr=False)

    @functools.cached_property
    def fingerprint(self) -> Mapping[str, str]:
        """Names what decides the batches, by content."""
        settings = self.settings
        corpora = {corpus.name: corpus.content_hash() for corpus in settings.corpora}
        mixture = [settings.rates, settings.held_out_fraction, settings.shuffle_buffer]
        marks = [self.tokenizer.bos_id, self.tokenizer.add_bos, *self.tokenizer.eos_ids[:1]]
        return {
            **corpora,
            "mixture": json.dumps(mixture),
            "tokenizer": self.tokenizer.content_hash,
            "marks": json.dumps([*marks, self.tokenizer.chat_template]),
        }

    def data(self, row_length: int) -> Data:
        """The text in rows of `row_length`, tokenised now if it was not."""
        from pipeline.data import prepare

        if row_length not in self._by_length:
            self._by_length[row_length] = prepare(
                self.settings, self.tokenizer, self.directory, row_length=row_length
            )
        return self._by_length[row_length]

    def batches(self, batch: Batch, first: int, share: Share) -> Iterator[dict[str, np.ndarray]]:
        """This process's rows of the batches of steps `first`, `first + 1`, ... without end."""
        return self.data(batch.length).train_batches(
            batch_size=batch.rows, seed=self.seed, start_step=first, rows=_rows(batch, share)
        )

    def held_out(
        self, batch: Batch, count: int, share: Share
    ) -> Mapping[str, Sequence[dict[str, np.ndarray]]]:
        """Up to `count` batches of each corpus, the same every time."""
        data, rows = self.data(batch.length), _rows(batch, share)
        key = batch.length, batch.rows, count, rows.start
        if key not in self._held_out:  # building a pipeline takes seconds, and every model asks
            self._held_out[key] = {
                name: list(
                    data.held_out_batches(name, batch_size=batch.rows, limit=count, rows=rows)
                )
                for name in data.corpora
            }
        return self._held_out[key]

    def frequent_ids(self, count: int) -> np.ndarray:
        """The most frequent ids of the training text, sorted, i32[count]; end tokens are always in it."""
        data = next(iter(self._by_length.values()), None) or self.data(256)
        chosen = draft_vocabulary.choose(
            data.token_counts(),
            count,
            self.tokenizer.eos_ids,
            Lineage.here(config="", seed=self.seed, tokenizer_hash=self.tokenizer.content_hash),
        )
        return np.array(chosen.ids, np.int32)


def _rows(batch: Batch, share: Share) -> slice:
    """The rows of every global batch that one process reads."""
    if batch.rows % share.count:
        raise UserError(
            f"Batch.rows = {batch.rows} does not divide over {share.count} processes; make it a multiple of "
            f"{share.count}"
        )
    size = batch.rows // share.count
    return slice(share.index * size, (share.index + 1) * size)
