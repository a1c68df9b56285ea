"""Where training text comes from: files, and two corpora that every Python installation carries.

A corpus yields documents in a fixed order, each with an id for people (`notes.jsonl:17`) and the text that
decides on which side of the train/held-out split it falls: equal texts fall on the same side.

    python_code    the standard library's source files
    python_prose   the language reference in `pydoc_data` and the docstrings of those source files

Both skip tests (many distributions leave them out, and they hold undecodable files on purpose), tables
(`encodings`) and what the build of this interpreter generated. Docstrings are read with `ast`; nothing is
imported. The docstrings of a file fall on the side of the file itself, so that held-out code is not in the
training prose.

Errors are `UserError`s that name file and line: a missing file (`Absent`), bytes that are not UTF-8, a line
that is not JSON or lacks the field.
"""

from __future__ import annotations

import ast
import gzip
import hashlib
import io
import json
import os
import sysconfig
import tokenize
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol, cast

from etils import epath

from pipeline.core.errors import UserError
from pipeline.core.run_dir import explain_os_errors
from pipeline.docstrings import docstrings, parse


class Absent(UserError):
    """Something is not on this machine; work that does not need it can go on."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of a document, and whether the model is trained to predict it."""

    text: str
    trained: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One document: segments of text, or a conversation for the tokenizer's chat template.

    Attributes:
      id: where it comes from, for people.
      segments: the text, in order.
      messages: `{"role": ..., "content": ...}` each, instead of segments; answers are trained on.
      source: the text that decides the side of the split; empty for the document's own.
      ends: whether the end token follows; not for text that was cut off.
    """

    id: str
    segments: tuple[Segment, ...] = ()
    messages: tuple[Mapping[str, Any], ...] = ()
    source: str = ""
    ends: bool = True

    @property
    def content_id(self) -> str:
        """16 hex digits that are equal for equal documents: an id for programs."""
        return _digest(self.content).hex()[:16]

    @property
    def content(self) -> str:
        """All of its text."""
        if self.messages:
            return json.dumps(self.messages, sort_keys=True, ensure_ascii=False)
        return "".join(segment.text for segment in self.segments)

    def is_held_out(self, fraction: float) -> bool:
        """Whether the document belongs to the held-out `fraction`, by the hash of its source."""
        return is_held_out(self.source or self.content, fraction)


def is_held_out(source: str, fraction: float) -> bool:
    """The side of the split that a document with this source falls on."""
    return int.from_bytes(_digest(source)[:8], "big") < fraction * 2**64


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


Wanted = Callable[[str], bool]


def everything(source: str) -> bool:
    """Wants every document."""
    del source
    return True


class Corpus(Protocol):
    """Documents in a fixed order."""

    @property
    def name(self) -> str:
        """Letters, digits and _."""
        ...

    def documents(self, wanted: Wanted = everything) -> Iterator[Document]:
        """All documents; those whose `source` is not wanted may be left out, if that saves making them."""
        ...

    def content_hash(self) -> str:
        """Changes whenever `documents` does."""
        ...


def _hash(*parts: bytes | str) -> str:
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(b"%d " % len(data) + data)
    return digest.hexdigest()


def matching_files(path: str) -> list[epath.Path]:
    """The file `path`, or those a pattern such as `data/*.jsonl` matches, sorted.

    Raises:
      Absent: there is none.
    """
    whole = epath.Path(path).expanduser()
    parts = whole.parts
    fixed = next((i for i, part in enumerate(parts) if set(part) & set("*?[")), len(parts))
    if fixed == len(parts):
        found = [whole] if whole.exists() else []
    else:
        folder = epath.Path(*parts[:fixed])
        found = sorted(p for p in folder.glob("/".join(parts[fixed:])) if not p.is_dir())
    if not found:
        raise Absent(f"no file {path}; give the path of a file or a pattern such as data/*.jsonl")
    return found


def _open(path: epath.Path) -> IO[bytes]:
    file = path.open("rb")
    return gzip.open(file, "rb") if path.suffix == ".gz" else file  # type: ignore[return-value]


def hash_files(files: list[epath.Path], *settings: str) -> str:
    """SHA-256 of the content of files and of settings."""
    digests = []
    for path in files:
        with explain_os_errors(path, "read"), path.open("rb") as file:
            digests.append(hashlib.file_digest(cast(Any, file), "sha256").digest())
    return _hash(*settings, *digests)


def _decode(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{where}: byte {error.start} (0x{data[error.start]:02x}) is not UTF-8; convert the file, "
            "or leave it out"
        ) from None


def json_lines(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(`file:line`, object) for every line that is not blank."""
    for file in matching_files(path):
        with explain_os_errors(file, "read"), _open(file) as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                where = f"{file}:{number}"
                try:
                    row = json.loads(_decode(line, where))
                except ValueError as error:
                    raise UserError(f"{where}: not JSON ({error})") from None
                if not isinstance(row, dict):
                    raise UserError(f"{where}: expected a JSON object, found {type(row).__name__}")
                yield where, row


def require_field(row: Mapping[str, Any], field: str, kind: type, where: str) -> Any:
    """`row[field]`.

    Raises:
      UserError: it is missing or of another type; `where` is named.
    """
    if field not in row:
        raise UserError(
            f"{where}: no field {field!r}; it has {', '.join(map(repr, row)) or 'no fields'}"
        )
    if not isinstance(row[field], kind):
        raise UserError(
            f"{where}: field {field!r} holds {type(row[field]).__name__}, expected {kind.__name__}"
        )
    return row[field]


def short_place(where: str) -> str:
    """`file:line` without the folders."""
    return where.rsplit("/", 1)[-1]


# ------------------------------------------------------------------------------------------ files


@dataclass(frozen=True, kw_only=True)
class JsonlCorpus:
    """One document per line of JSONL files (`.gz` too): the text in `field`.

    Attributes:
      path: a file or a pattern.
      name: of the corpus, in task names and reports.
      field: holds the text.
    """

    path: str
    name: str
    field: str = "text"

    def documents(self, wanted: Wanted = everything) -> Iterator[Document]:
        """See `Corpus`."""
        for where, row in json_lines(self.path):
            yield Document(
                id=short_place(where),
                segments=(Segment(require_field(row, self.field, str, where)),),
            )

    def content_hash(self) -> str:
        """See `Corpus`."""
        return hash_files(matching_files(self.path), "jsonl", self.field)


@dataclass(frozen=True, kw_only=True)
class ChatCorpus:
    """One conversation per line of JSONL files; the model is trained on the assistant's answers alone.

    Attributes:
      path: a file or a pattern.
      name: of the corpus.
      field: holds the list of `{"role": ..., "content": ...}`.
    """

    path: str
    name: str
    field: str = "messages"

    def documents(self, wanted: Wanted = everything) -> Iterator[Document]:
        """See `Corpus`."""
        for where, row in json_lines(self.path):
            messages = require_field(row, self.field, list, where)
            for message in messages:
                if not isinstance(message, dict) or "role" not in message:
                    raise UserError(f"{where}: {self.field!r} must list objects with a role")
            if not any(message["role"] == "assistant" for message in messages):
                raise UserError(f"{where}: no message with the role 'assistant' to train on")
            yield Document(id=short_place(where), messages=tuple(messages))

    def content_hash(self) -> str:
        """See `Corpus`."""
        return hash_files(matching_files(self.path), "chat", self.field)


@dataclass(frozen=True, kw_only=True)
class TextCorpus:
    """Plain UTF-8 text files.

    Attributes:
      path: a file or a pattern.
      name: of the corpus.
      separator: text between documents, such as a blank line; empty if each file is one document.
    """

    path: str
    name: str
    separator: str = ""

    def documents(self, wanted: Wanted = everything) -> Iterator[Document]:
        """See `Corpus`."""
        for file in matching_files(self.path):
            with explain_os_errors(file, "read"), _open(file) as stream:
                text = _decode(stream.read(), str(file))
            parts = text.split(self.separator) if self.separator else [text]
            for number, part in enumerate(parts, start=1):
                if part.strip():
                    yield Document(id=f"{file.name}:{number}", segments=(Segment(part),))

    def content_hash(self) -> str:
        """See `Corpus`."""
        return hash_files(matching_files(self.path), "text", self.separator)


@dataclass(frozen=True, kw_only=True)
class ParquetCorpus:
    """One document per row of Parquet files: the text in the column `field`.

    Attributes:
      path: a file or a pattern.
      name: of the corpus.
      field: the column.
    """

    path: str
    name: str
    field: str = "text"

    def documents(self, wanted: Wanted = everything) -> Iterator[Document]:
        """See `Corpus`."""
        for file in matching_files(self.path):
            for number, value in enumerate(_parquet_column(file, self.field), start=1):
                if not isinstance(value, str):
                    raise UserError(
                        f"{file}: row {number}: column {self.field!r} holds "
                        f"{type(value).__name__}, expected text"
                    )
                yield Document(id=f"{file.name}:{number}", segments=(Segment(value),))

    def content_hash(self) -> str:
        """See `Corpus`."""
        return hash_files(matching_files(self.path), "parquet", self.field)


def _parquet_column(file: epath.Path, field: str) -> Iterator[Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise Absent(
            f"reading {file} needs pyarrow; install it with: pip install pyarrow"
        ) from None
    with explain_os_errors(file, "read"), file.open("rb") as stream:
        try:
            table = pyarrow.parquet.ParquetFile(stream)
            if field not in table.schema_arrow.names:
                columns = ", ".join(map(repr, table.schema_arrow.names))
                raise UserError(f"{file}: no column {field!r}; it has {columns}")
            for batch in table.iter_batches(batch_size=1024, columns=[field]):
                yield from batch.column(0).to_pylist()
        except (pyarrow.ArrowInvalid, UnicodeDecodeError) as error:
            raise UserError(f"{file}: not readable as Parquet ({error})") from None


# --------------------------------------------------------------------------------- standard library

_SKIPPED_FOLDERS = frozenset(
    (
        "test",
        "tests",
        "idle_test",
        "__pycache__",
        "site-packages",
        "dist-packages",
        "encodings",
        "pydoc_data",
    )
)
_SKIPPED_PREFIXES = ("config-", "_sysconfigdata")  # made when the interpreter was built


def _library() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def _library_files(every: int = 1) -> list[tuple[str, Path]]:
    """(name, path) of every n-th source file, sorted by name; the name is relative, with slashes."""
    root, kept = _library(), []
    for folder, folders, files in os.walk(root):
        # Installed packages and tests are most of what lies there: they are not even listed.
        folders[:] = (name for name in folders if _is_kept(name, folder == str(root)))
        paths = (Path(folder, name) for name in files if name.endswith(".py"))
        paths = (path for path in paths if _is_kept(path.name, folder == str(root)))
        kept += [(path.relative_to(root).as_posix(), path) for path in paths]
    if not kept:
        raise UserError(f"no source files of the standard library in {root}; use another corpus")
    return sorted(kept)[::every]


def _is_kept(name: str, at_top: bool) -> bool:
    """Whether a file or folder of the library is text to learn from."""
    made_when_built = at_top and name.startswith(_SKIPPED_PREFIXES)
    return name not in _SKIPPED_FOLDERS and not made_when_built


def _read_source(path: Path) -> str:
    """The text of a Python file in the encoding that it declares, with `\\n` line ends."""
    with explain_os_errors(path, "read"):
        data = path.read_bytes()
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        return io.TextIOWrapper(io.BytesIO(data), encoding).read()
    except (SyntaxError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not a readable source file ({error}); reinstall Python") from None


def _hash_library(every: int, *more: Path) -> str:
    files = _library_files(every) + [(path.name, path) for path in more]
    return _hash(*(part for name, path in files for part in (name, path.read_bytes())))


def _require_positive(corpus: PythonCode | PythonProse) -> None:
    if corpus.every < 1:
        raise ValueError(f"{type(corpus).__name__}.every = {corpus.every} must be positive")


@dataclass(frozen=True, kw_only=True)
class PythonCode:
    """The source files of the standard library, one document each (about 10 MB).

    Attributes:
      name: of the corpus.
      every: only every n-th file is read, for a first look.
    """

    name: str = "python_code"
    every: int = 1

    def __post_init__(self):
        _require_positive(self)

    def documents(self, wanted: Wanted = everything) -> Iterator[Document]:
        """See `Corpus`."""
        for name, path in _library_files(self.every):
            text = _read_source(path)
            if text.strip():
                yield Document(id=name, segments=(Segment(text),))

    def content_hash(self) -> str:
        """See `Corpus`."""
        return _hash("code 1", _hash_library(self.every))


@dataclass(frozen=True, kw_only=True)
class PythonProse:
    """The topics of Python's language reference, and for each source file its docstrings (about 3 MB).

    Attributes:
      name: of the corpus.
      every: the docstrings of only every n-th file are read, for a first look.
    """

    name: str = "python_prose"
    every: int = 1

    def __post_init__(self):
        _require_positive(self)

    def documents(self, wanted: Wanted = everything) -> Iterator[Document]:
        """See `Corpus`."""
        for topic, text in sorted(_topics().items()):
            yield Document(id=f"topic:{topic}", segments=(Segment(text),))
        for name, path in _library_files(self.every):
            source = _read_source(path)
            text = "\n\n".join(docstrings(source)) if wanted(source) else ""
            if text:
                yield Document(id=f"docstrings:{name}", segments=(Segment(text),), source=source)

    def content_hash(self) -> str:
        """See `Corpus`."""
        return _hash("prose 1", _hash_library(self.every, _topics_file()))


def _topics_file() -> Path:
    path = _library() / "pydoc_data" / "topics.py"
    if not path.exists():
        raise UserError(
            f"{path} does not exist: this Python has no reference topics; use another corpus"
        )
    return path


def _topics() -> dict[str, str]:
    """The dictionary `topics` of pydoc_data, read without running it."""
    for node in parse(_read_source(_topics_file())).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            return ast.literal_eval(node.value)
    raise UserError(f"{_topics_file()}: no dictionary of topics; use another corpus")


CORPORA = (ChatCorpus, JsonlCorpus, ParquetCorpus, PythonCode, PythonProse, TextCorpus)
