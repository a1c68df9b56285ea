"""Typed results that stages hand to each other as JSON, with the lineage they come from.

A stage defines its artifact as a frozen dataclass and passes it to `write`; another stage gets an
equal object from `read`, or an error that names the file, the field and the remedy:

    @dataclass(frozen=True, kw_only=True)
    class Profile(Artifact):
        SCHEMA = 1
        STAGE = "pipeline.profile"
        topology: Topology
        steps: tuple[Step, ...]
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import subprocess
import sys
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
from etils import epath

from pipeline.core.annotations import Mismatch, coerce
from pipeline.core.errors import UserError
from pipeline.core.run_dir import atomic_write, explain_os_errors

# What can change a result: listed with every artifact where it is installed.
_PACKAGES = (
    "draftmesh", "flax", "gguf", "gin-config", "jax", "jaxlib", "libtpu", "numpy", "optax",
    "orbax-checkpoint", "safetensors", "sentencepiece", "seqio", "tensorflow", "tokenizers",
)  # fmt: skip
_CHUNK_BYTES = 1 << 20
_SOURCE_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, kw_only=True)
class Lineage:
    """Where an artifact comes from."""

    config: str  # the stage's config, as gin text
    seed: int
    versions: dict[str, str]  # package -> version, and "python"
    revision: str | None = None  # git commit of this program, "-dirty" if changed; None: no clone
    tokenizer_hash: str | None = None
    weights_hash: dict[str, str] = dataclasses.field(default_factory=dict)  # model name -> sha256
    inputs: dict[str, str] = dataclasses.field(default_factory=dict)  # artifact read -> sha256
    machine: str = ""  # where times were measured; "" for results that depend on none

    @classmethod
    def here(
        cls,
        *,
        config: str,
        seed: int,
        tokenizer_hash: str | None = None,
        weights_hash: Mapping[str, str] | None = None,
        inputs: Mapping[str, str] | None = None,
        machine: str = "",
    ) -> Lineage:
        """The lineage of what this process makes: versions and revision are looked up."""
        return cls(
            config=config,
            seed=seed,
            versions=package_versions(),
            revision=source_revision(),
            tokenizer_hash=tokenizer_hash,
            weights_hash=dict(weights_hash or {}),
            inputs=dict(inputs or {}),
            machine=machine,
        )

    def same_work(self, other: Lineage) -> bool:
        """Whether both were asked for the same thing, of the same things, on the same machine."""
        return not self.differences(other)

    def differences(self, other: Lineage) -> list[str]:
        """The fields that make it other work.

        Versions and revision do not count: they are recorded, and a person who wants the work done
        again with newer ones deletes the artifact.
        """
        names = [one.name for one in dataclasses.fields(self)]
        counted = [name for name in names if name not in ("versions", "revision")]
        return [name for name in counted if getattr(self, name) != getattr(other, name)]


@dataclass(frozen=True, kw_only=True)
class Artifact:
    """Base of what stages write. A subclass raises `SCHEMA` whenever its fields change meaning."""

    SCHEMA: ClassVar[int] = 1
    STAGE: ClassVar[str] = "the stage that writes it"  # module to run, for error messages

    lineage: Lineage


AnyArtifact = TypeVar("AnyArtifact", bound=Artifact)


def write(path: epath.PathLike, artifact: Artifact) -> None:
    """Writes `artifact` as JSON, atomically.

    Raises:
      ValueError: a value that JSON cannot hold, such as NaN; the message names the field.
      UserError: the file system refuses.
    """
    content = {"schema": artifact.SCHEMA, **to_json(artifact)}
    atomic_write(path, json.dumps(content, indent=2, allow_nan=False) + "\n")


def read(path: epath.PathLike, cls: type[AnyArtifact]) -> AnyArtifact:
    """Reads the artifact that `write` put to `path`.

    Raises:
      UserError: no such file, not JSON, another schema, or fields that do not fit `cls`.
    """
    path = epath.Path(path)
    remedy = f"run python -m {cls.STAGE} again" if "." in cls.STAGE else f"run {cls.STAGE} again"
    if not path.exists():
        raise UserError(f"{path} does not exist; {remedy.removesuffix(' again')} first")
    try:
        with explain_os_errors(path, "read"):
            content = json.loads(path.read_text())
    except ValueError as error:  # not JSON, or not even text
        raise UserError(f"{path}: not a JSON file ({error}); {remedy}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected a JSON object, found {_kind(content)}; {remedy}")
    schema = content.pop("schema", None)
    if schema != cls.SCHEMA:
        raise UserError(
            f"{path}: schema {schema}, but this version reads schema {cls.SCHEMA}; {remedy}"
        )
    try:
        return from_json(content, cls)
    except (ValueError, TypeError) as error:
        raise UserError(f"{path}: {error}; {remedy}") from error


def current(path: epath.PathLike, cls: type[AnyArtifact], wanted: Lineage) -> AnyArtifact | None:
    """The artifact at `path` if it is of `wanted`, so that it need not be made again; else None.

    One that is there and of no use is named on stderr, with what is wrong with it.
    """
    if not epath.Path(path).exists():
        return None
    try:
        found = read(path, cls)
    except UserError as error:
        sys.stderr.write(f"{error}: doing so\n")
        return None
    if differences := found.lineage.differences(wanted):
        sys.stderr.write(f"{path}: another {', '.join(differences)} than now; made again\n")
        return None
    return found


def require_match(
    path: epath.PathLike, found: Lineage, *, remedy: str | None = None, **expected: Any
) -> None:
    """Refuses an artifact that was made from something else.

        require_match(run.profile, profile.lineage, tokenizer_hash=tokenizer.sha256,
                      weights_hash={"target": weights.sha256})

    Args:
      path: the artifact, for the message.
      found: its lineage.
      remedy: what to do about a mismatch.
      **expected: fields of `Lineage`. Of a mapping, only the names given are compared.

    Raises:
      UserError: a field differs; both values are named.
    """
    remedy = remedy or "run the stage that wrote it again, or choose another --run_dir"
    for name, wanted in expected.items():
        value = getattr(found, name)
        pairs = {name: (value, wanted)}
        if isinstance(wanted, Mapping):
            pairs = {f"{name}[{key!r}]": (value.get(key), item) for key, item in wanted.items()}
        for label, (has, wants) in pairs.items():
            if has != wants:
                raise UserError(
                    f"{path}: made with {label} = {has!r}, but {wants!r} is in use; {remedy}"
                )


def to_json(value: Any, where: str = "") -> Any:
    """Plain JSON values of nested dataclasses, tuples, mappings and numpy scalars.

    Raises:
      ValueError: NaN, an infinity, or a type that JSON has no form for; `where` and below is named.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return {f.name: to_json(getattr(value, f.name), _dot(where, f.name)) for f in fields}
    if isinstance(value, Mapping):
        return {str(key): to_json(item, f"{where}[{key!r}]") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{where} is {value}: an artifact holds finite numbers only")
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(f"{where} is a {_kind(value)}, which an artifact cannot hold")


def from_json(value: Any, annotation: Any, where: str = "") -> Any:
    """The inverse of `to_json` for the type `annotation`.

    Raises:
      ValueError: a missing or unknown field, or a value of another type; names the field.
    """
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if dataclasses.is_dataclass(annotation):
        return _object_from_json(value, annotation, where)
    if origin in (typing.Union, types.UnionType) and types.NoneType in args:
        if value is None:
            return None
        arms = [arm for arm in args if arm is not types.NoneType]
        return from_json(value, typing.Union[tuple(arms)], where)  # noqa: UP007 built at run time
    if origin in (tuple, list) and isinstance(value, list) and args:
        uniform = origin is list or args[-1] is Ellipsis
        if not uniform and len(args) != len(value):
            raise ValueError(f"{where}: expected {len(args)} items, found {len(value)}")
        kinds = [args[0]] * len(value) if uniform else args
        items = zip(value, kinds, strict=True)
        return origin(from_json(v, kind, f"{where}[{i}]") for i, (v, kind) in enumerate(items))
    if origin is dict and isinstance(value, dict):
        return {key: from_json(item, args[1], f"{where}[{key!r}]") for key, item in value.items()}
    try:
        return coerce(value, annotation, {})
    except Mismatch as error:
        raise ValueError(f"{where}: {error}, found {value!r}") from error


def _object_from_json(value: Any, cls: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise ValueError(f"{where}: expected an object, found {_kind(value)}")
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
    if unknown := sorted(value.keys() - fields.keys()):
        raise ValueError(f"unknown field {_dot(where, unknown[0])!r}")
    for name, field in fields.items():
        optional = (field.default, field.default_factory) != (dataclasses.MISSING,) * 2
        if name not in value and not optional:
            raise ValueError(f"missing field {_dot(where, name)!r}")
    hints = typing.get_type_hints(cls)
    arguments = {k: from_json(item, hints[k], _dot(where, k)) for k, item in value.items()}
    return cls(**arguments)


def _dot(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _kind(value: Any) -> str:
    return type(value).__name__


def sha256_of_file(path: epath.PathLike) -> str:
    """Hex digest of the bytes of a file."""
    digest = hashlib.sha256()
    with epath.Path(path).open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(typing.cast(bytes, chunk))
    return digest.hexdigest()


def sha256_of_tree(root: epath.PathLike) -> str:
    """Hex digest of all files below a folder: relative names with `/` and contents, sorted.

    Times, permissions and empty folders do not count, so a copy has the same digest anywhere.
    """
    root = epath.Path(root)
    digest = hashlib.sha256()
    for name in sorted(_files_below(root, "")):
        digest.update(f"{sha256_of_file(root / name)} {name}\n".encode())
    return digest.hexdigest()


def _files_below(folder: epath.Path, prefix: str) -> typing.Iterator[str]:
    for entry in folder.iterdir():
        name = prefix + entry.name
        if entry.is_dir():
            yield from _files_below(entry, f"{name}/")
        else:
            yield name


def this_machine() -> str:
    """Names the host whose speed a measurement depends on: its processor and number of cores."""
    return f"{_processor()}, {os.cpu_count()} cores"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def package_versions() -> dict[str, str]:
    """Installed versions of what can change a result, and Python's."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def source_revision(root: Path = _SOURCE_ROOT) -> str | None:
    """The git commit of this program, with `-dirty` if files differ; None outside a clone."""
    if not (root / ".git").exists():  # git itself would find a repository around an unpacked one
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        done = subprocess.run(
            [*command, "--exclude=*"], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.SubprocessError):  # no git, or one that hangs on a slow disk
        return None
    return done.stdout.strip() or None
