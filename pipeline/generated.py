"""Sequence-level distillation (Kim and Rush 1606.07947): training text that the target wrote itself.

    prompts = CorpusPrompts(corpus=corpus, count=1000, held_out=False).prompts()
    generate(prompts, generator, folder, batch_size=64)          # resumable: only what is missing
    corpus = GeneratedCorpus(path=f"{folder}/*.jsonl", name="generated")

Answers are kept as JSONL, one file per batch of requests, each written atomically:

    {"id": the prompt's, "prompt": ..., "text": ..., "finished": whether the target ended it, "chat": ...}
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from etils import epath

from pipeline.core.progress import progress_bar
from pipeline.core.run_dir import atomic_write
from pipeline.corpora import (
    Document,
    Segment,
    Wanted,
    everything,
    hash_files,
    json_lines,
    matching_files,
    require_field,
    short_place,
)
from pipeline.tasks import Prompt


class Generation(NamedTuple):
    """What the target answered."""

    text: str
    finished: bool  # with an end token, not by the limit of length


Generator = Callable[[Sequence[str]], Sequence[Generation]]  # ids of prompts -> their answers


def generate(
    prompts: Sequence[Prompt],
    generator: Generator,
    folder: epath.PathLike,
    *,
    batch_size: int,
    chat: bool = False,
    progress: bool = True,
) -> int:
    """Asks for the answers that `folder` lacks; the number of those.

    Args:
      prompts: equal ids are asked once.
      generator: ids of prompts -> answers, in their order.
      folder: keeps the answers.
      batch_size: prompts per call and file.
      chat: whether they are asked as messages of a conversation.
      progress: show how far it is.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be positive, not {batch_size}")
    folder = epath.Path(folder)
    files = sorted(folder.glob("*.jsonl")) if folder.exists() else []
    done = {_asked(row, where) for file in files for where, row in json_lines(str(file))}
    missing = list({p.id: p for p in prompts if (p.id, p.text) not in done}.values())
    first = max((int(file.stem) for file in files if file.stem.isdecimal()), default=-1) + 1
    starts = range(0, len(missing), batch_size)
    for number, start in enumerate(
        progress_bar(starts, unit="batch", description="generate", shown=progress)
    ):
        asked = missing[start : start + batch_size]
        answers = generator([prompt.id for prompt in asked])
        lines = [
            json.dumps({"id": prompt.id, "prompt": prompt.text, **answer._asdict(), "chat": chat})
            for prompt, answer in zip(asked, answers, strict=True)
        ]
        atomic_write(folder / f"{first + number:06d}.jsonl", "\n".join(lines) + "\n")
    return len(missing)


def _asked(row: Mapping[str, Any], where: str) -> tuple[str, str]:
    """Id and text: an id may name a place in a file, where another prompt stands by now."""
    return require_field(row, "id", str, where), require_field(row, "prompt", str, where)


@dataclass(frozen=True, kw_only=True)
class GeneratedCorpus:
    """Answers of the target; the model is trained on them, not on their prompts.

    An answer in a conversation ends with the template's mark even where it was cut off.

    Attributes:
      path: a file or a pattern.
      name: of the corpus.
    """

    path: str
    name: str = "generated"

    def documents(self, wanted: Wanted = everything) -> Iterator[Document]:
        """See `Corpus`."""
        for where, row in json_lines(self.path):
            prompt, text = (require_field(row, f, str, where) for f in ("prompt", "text"))
            if not text:
                continue
            if require_field(row, "chat", bool, where):
                turns = (
                    {"role": "user", "content": prompt},
                    {"role": "assistant", "content": text},
                )
                yield Document(id=short_place(where), messages=turns, source=prompt)
                continue
            yield Document(
                id=short_place(where),
                segments=(Segment(prompt, trained=False), Segment(text)),
                source=prompt,
                ends=require_field(row, "finished", bool, where),
            )

    def content_hash(self) -> str:
        """See `Corpus`."""
        return hash_files(matching_files(self.path), "generated")
