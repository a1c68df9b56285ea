"""Where a run keeps its files, and the only way files are written: temporary name, then rename.

Paths go through `etils.epath`, so that a run directory can be a folder or a bucket (`gs://`, `s3://`).
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

from etils import epath

from pipeline.core.errors import UserError

_REMEDIES = {
    errno.ENOSPC: "free some space or choose another --run_dir",
    errno.EDQUOT: "the disk quota is used up; free some space or choose another --run_dir",
    errno.EACCES: "no permission; change the owner of the folder or choose another --run_dir",
    errno.EPERM: "no permission; change the owner of the folder or choose another --run_dir",
    errno.EROFS: "the file system is read-only; choose another --run_dir",
    errno.ENOTDIR: "a part of the path is a file; move it away or choose another --run_dir",
    errno.EEXIST: "a part of the path is a file; move it away or choose another --run_dir",
    errno.EISDIR: "a folder has the name of the file; move it away or choose another --run_dir",
    errno.ENAMETOOLONG: "the path is too long; choose a shorter --run_dir",
}

# A failed save has ended when nothing was written for the second of these; no wait exceeds the first.
_LATE_WRITERS_S, _QUIET_S = 10.0, 0.3


def is_bucket(path: epath.PathLike) -> bool:
    """Whether `path` is an address such as `gs://bucket/run` and not a local path."""
    return "://" in os.fspath(path)


@contextlib.contextmanager
def explain_os_errors(path: epath.PathLike, action: str = "write") -> Iterator[None]:
    """Turns an `OSError` (disk full, no permission, ...) into a `UserError` with a remedy.

    An error that names a file elsewhere is not about `path` and passes through.
    """
    try:
        yield
    except OSError as error:
        if error.filename is not None and not _related(str(error.filename), os.fspath(path)):
            raise
        remedy = _REMEDIES.get(error.errno or 0, "check the path and its file system")
        reason = error.strerror or error
        raise UserError(f"cannot {action} {os.fspath(path)}: {reason}; {remedy}") from error


def _related(name: str, path: str) -> bool:
    """Whether `name` is `path`, a folder above it, or lies in its temporary form."""
    name, path = os.path.abspath(name), os.path.abspath(path)
    folder, base = os.path.split(path)
    above = path == name or path.startswith(name.rstrip(os.sep) + os.sep)
    return above or name.startswith(os.path.join(folder, f".{base}."))


@contextlib.contextmanager
def atomic_open(path: epath.PathLike, mode: str = "w") -> Iterator[IO]:
    """A file that appears under `path` complete when the block ends, or not at all.

    Args:
      path: final name; missing folders are made, an existing file is replaced.
      mode: `"w"` for UTF-8 text (JSONL, say), `"wb"` for bytes.

    Raises:
      UserError: the file system refuses (disk full, no permission). Nothing is left behind then,
        nor after any exception in the block.
    """
    if mode not in ("w", "wb"):
        raise ValueError(f"atomic_open writes whole files: mode must be 'w' or 'wb', not {mode!r}")
    target = epath.Path(path)
    temporary = _temporary_name(target)
    with explain_os_errors(target), _removed_on_failure(temporary):
        target.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open(mode) as file:
            yield file
            if not is_bucket(target):
                # Rename may reach the disk before the data does: a crash would leave an empty file.
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(target)


def atomic_write(path: epath.PathLike, content: bytes | str) -> None:
    """Writes `content` (text as UTF-8) to `path`: complete or not at all. See `atomic_open`."""
    with atomic_open(path, "w" if isinstance(content, str) else "wb") as file:
        file.write(content)


def claim(path: epath.PathLike, content: Any) -> Any:
    """What the JSON file `path` says its folder is made of; `content`, written now, if there is none."""
    path = epath.Path(path)
    if not path.exists():
        atomic_write(path, json.dumps(content, indent=2) + "\n")
        return content
    with explain_os_errors(path, "read"):
        text = path.read_text()
    try:
        found = json.loads(text)
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}); delete it with its folder") from error
    if not isinstance(found, type(content)):
        raise UserError(f"{path} is damaged; delete it with its folder")
    return found


def require_replaceable(folder: epath.PathLike, mark: str, *sources: epath.PathLike) -> None:
    """Refuses to write a folder over anything but an older one of its kind.

    Args:
      folder: to be written.
      mark: a file that all of its kind have.
      sources: what it is made of.

    Raises:
      UserError: something else is there.
    """
    folder = epath.Path(folder)
    if any(folder.resolve() == epath.Path(source).resolve() for source in sources):
        raise UserError(f"{folder} is what is read: write to another place")
    if not folder.exists():
        return
    if not folder.is_dir() or (any(folder.iterdir()) and not (folder / mark).exists()):
        raise UserError(
            f"{folder} exists and has no {mark}, so it would not be replaced by its like: choose another "
            "place, or remove it"
        )


@contextlib.contextmanager
def atomic_directory(path: epath.PathLike) -> Iterator[epath.Path]:
    """Yields an empty folder that is renamed to `path` when the block ends.

    An existing folder `path` is replaced. After an exception `path` is as it was before and nothing
    else is left. (On a bucket rename copies object by object and is not atomic; a reader there must
    look for the file that is written last.)

    Raises:
      UserError: the file system refuses.
    """
    target = epath.Path(path)
    temporary = _temporary_name(target)
    with explain_os_errors(target), _removed_on_failure(temporary):
        temporary.mkdir(parents=True)
        yield temporary
        if target.exists():
            _swap_in(temporary, target)
        else:
            temporary.rename(target)


def _swap_in(new: epath.Path, target: epath.Path) -> None:
    """Replaces the folder `target` by `new`; rename cannot replace a folder that holds files."""
    old = _temporary_name(target)
    target.rename(old)
    try:
        new.rename(target)
    except BaseException:
        old.rename(target)
        raise
    old.rmtree()


def _temporary_name(target: epath.Path) -> epath.Path:
    """A hidden sibling of `target`: same file system, so that rename is atomic."""
    return target.parent / f".{target.name}.{uuid.uuid4().hex[:8]}.tmp"


@contextlib.contextmanager
def _removed_on_failure(temporary: epath.Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            if temporary.is_dir():
                _remove_for_good(temporary)
            else:
                temporary.unlink(missing_ok=True)
        raise


def _remove_for_good(folder: epath.Path) -> None:
    """Removes `folder` until it stays away: threads of a failed save write on for a moment."""
    deadline = time.monotonic() + _LATE_WRITERS_S
    gone_since = math.inf
    while (now := time.monotonic()) < min(deadline, gone_since + _QUIET_S):
        if folder.exists():
            with contextlib.suppress(OSError):
                folder.rmtree()
            gone_since = math.inf
        else:
            gone_since = min(gone_since, now)
        time.sleep(_QUIET_S / 10)


@dataclass(frozen=True)
class RunDir:
    """The files of one run. Stages meet only here: each reads what earlier ones wrote."""

    root: epath.Path

    @classmethod
    def at(cls, path: epath.PathLike) -> RunDir:
        """The run directory at `path` (`~` is expanded); made when the first file is written."""
        return cls(epath.Path(path).expanduser())

    @property
    def profile(self) -> epath.Path:
        return self.root / "profile.json"

    @property
    def acceptance(self) -> epath.Path:
        return self.root / "acceptance.json"

    @property
    def plan(self) -> epath.Path:
        return self.root / "plan.json"

    @property
    def report(self) -> epath.Path:
        return self.root / "report.html"

    def model(self, name: str) -> epath.Path:
        """Weights, `model.json` and tokenizer of the model `name`."""
        if not name or name in (".", "..") or "/" in name:
            raise UserError(f"model name {name!r} cannot be a folder; use letters, digits, - and _")
        return self.root / "models" / name

    def tensorboard(self, stage: str) -> epath.Path:
        """Event files of `stage`."""
        return self.root / "tensorboard" / stage

    @contextlib.contextmanager
    def lock(self, stage: str) -> Iterator[None]:
        """Keeps a second process from running the same `stage` in this folder at the same time.

        The kernel drops the lock when the process ends, however it ends. Buckets and platforms
        without `fcntl` have no such lock: nothing is guarded there.

        Raises:
          UserError: another process holds it.
        """
        try:
            import fcntl
        except ImportError:
            yield
            return
        if is_bucket(self.root):
            yield
            return
        path = self.root / f".{stage}.lock"
        with explain_os_errors(path):
            self.root.mkdir(parents=True, exist_ok=True)
            file = open(path, "w")  # noqa: SIM115 closed below, on every way out
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(
                    f"another process is running {stage!r} in {self.root}; wait for it or choose "
                    "another --run_dir"
                ) from None
            yield
