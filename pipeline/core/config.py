"""Flags and Gin: the only module that imports gin.

An entry point keeps its stage function and settings classes free of gin and hands them over:

    def main() -> None:
        parser = argparse.ArgumentParser(prog="python -m pipeline.train")
        config.add_flags(parser)
        flags = config.parse_flags(parser)
        configured = config.load(
            train, SETTINGS, files=flags.gin_file, bindings=flags.gin_bindings,
            supplied={"run_dir": flags.run_dir, "dry_run": flags.dry_run},
        )
        configured.stage()

    if __name__ == "__main__":
        sys.exit(run_cli(main))

One file may configure several stages. Of the names that are not handed over, those of the other
stages are skipped, and so are the objects that only their bindings refer to; any other is an error.
Gin alone keeps no line numbers and is silent about bindings that never apply, so files are read
here (by gin's parser), checked by `checks`, and only then bound.
"""

from __future__ import annotations

import argparse
import io
import sys
import tokenize
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import gin
from gin import config_parser
from gin.config import ConfigurableReference

from pipeline.core.annotations import Reference
from pipeline.core.bindings import Binding, Bindings, Macro, map_leaves
from pipeline.core.checks import STAGES, Check
from pipeline.core.errors import UserError

GIN_ROOT = Path(__file__).resolve().parents[2] / "gin"

_GIN_MODULE = "pipeline"  # one namespace in gin's registry for everything handed over


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that every entry point has; read them with `parse_flags`."""
    parser.add_argument(
        "--gin_file",
        metavar="PATH",
        action="append",
        default=[],
        help="a config, looked for in the working directory and in gin/; later ones override",
    )
    parser.add_argument(
        "--gin_bindings",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="one more binding, which overrides the files; usually written --gin.NAME=VALUE",
    )
    parser.add_argument("--run_dir", metavar="PATH", help="where results go, if not the config's")
    parser.add_argument(
        "--dry_run",
        action="store_true",
        default=None,
        help="check the config, print the plan and stop",
    )


def parse_flags(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None = None
) -> argparse.Namespace:
    """`parser.parse_args` that also knows `--gin.NAME=VALUE` and `--gin.NAME VALUE`."""
    rewritten: list[str] = []
    tokens = iter(sys.argv[1:] if argv is None else argv)
    for token in tokens:
        if not token.startswith("--gin."):
            rewritten.append(token)
            continue
        name, equals, value = token.removeprefix("--gin.").partition("=")
        if not equals and (value := next(tokens, "--")).startswith("--"):
            parser.error(f"--gin.{name} needs a value: --gin.{name}=VALUE")
        rewritten.append(f"--gin_bindings={name}={value}")
    return parser.parse_args(rewritten)


@dataclass(frozen=True)
class Configured:
    """A stage with its config applied.

    Gin's state is one per process: the next `load` ends the life of this one.
    """

    stage: Callable[..., Any]
    config_str: str  # what was asked of this stage, in a form that can be loaded again

    def operative_config_str(self) -> str:
        """What was used, defaults included. Complete only after the stage was called."""
        return gin.operative_config_str()


def load(
    stage: Callable[..., Any],
    settings: Iterable[type] = (),
    *,
    files: Sequence[str] = (),
    bindings: Sequence[str] = (),
    supplied: Mapping[str, Any] | None = None,
) -> Configured:
    """Reads and checks a config and applies it to `stage`.

    Args:
      stage: a function whose parameters are what its config may set.
      settings: the frozen dataclasses that the config may build for it.
      files: gin files, later ones overriding earlier ones.
      bindings: `NAME=VALUE`, overriding the files.
      supplied: arguments of `stage` from flags; they win over the config unless they are None.

    Raises:
      UserError: anything wrong with the config, with file, line, binding and the allowed values.
    """
    given = {name: value for name, value in (supplied or {}).items() if value is not None}
    check = Check(Bindings(_read_all(files, bindings)), [stage], settings)
    check.names()
    check.effects()
    check.objects(stage.__name__, given, origin=", ".join(files) or "no --gin_file")
    _bind(check)
    configured = gin.get_configurable(stage)

    def run(**overrides: Any) -> Any:
        try:
            return configured(**{**given, **overrides})
        except UserError as error:
            raise UserError(_without_gin_note(error)) from error

    return Configured(stage=run, config_str=gin.config_str())


def check_fragment(
    path: str, stages: Iterable[Callable[..., Any]], settings: Iterable[type]
) -> None:
    """Checks a file that is made to be included: it may be incomplete, and unused on its own.

    Names, parameters and types of all bindings are checked, and every object is built that its
    macros or stages refer to.

    Raises:
      UserError: as `load`.
    """
    check = Check(Bindings(_read_all([path], [])), stages, settings)
    check.names()
    check.fragment()
    _bind(check)


def configured_stages(*files: str) -> set[str]:
    """The names of the stages that files and their includes configure: where results go is not enough."""
    bindings = (b for b in _read_all(files, []) if b.argument != "run_dir")
    return {binding.name for binding in bindings} & STAGES.keys()


# Reading


def find_file(name: str) -> Path:
    """The config `name`: by absolute path, else from the working directory, else from gin/.

    The folder that holds gin/ is searched last, so that `gin/quickstart.gin` works from anywhere.

    Raises:
      UserError: no such file; the places searched are listed.
    """
    places = [Path(name)]
    if not places[0].is_absolute():
        places += [GIN_ROOT / name, GIN_ROOT.parent / name]
    for place in places:
        if place.is_file():
            return place
    searched = ", ".join(str(place.absolute()) for place in places)
    raise UserError(f"config file {name!r} not found; searched {searched}")


class _Delegate(config_parser.ParserDelegate):
    """Keeps references and macros as plain data: nothing is looked up while parsing."""

    def configurable_reference(self, scoped_configurable_name: str, evaluate: bool) -> Reference:
        *scopes, name = scoped_configurable_name.split("/")
        return Reference(tuple(scopes), _short_name(name), evaluate)

    def macro(self, macro_name: str) -> Macro:
        return Macro(macro_name)


def _short_name(name: str) -> str:
    """`pipeline.train` and `train` are the same stage."""
    qualified = {f"{module.split('.')[0]}.{stage}": stage for stage, module in STAGES.items()}
    return qualified.get(name, name.removeprefix(f"{_GIN_MODULE}."))


def _read_all(files: Sequence[str], bindings: Sequence[str]) -> Iterator[Binding]:
    for file in files:
        yield from _read_file(find_file(file), ())
    for text in bindings:
        name, equals, value = text.partition("=")
        if not equals:
            raise UserError(f"--gin.{text}: expected --gin.NAME=VALUE")
        yield from _parse(f"{name.strip()} = {value}", f"--gin.{text}", (), from_file=False)


def _read_file(path: Path, including: tuple[Path, ...]) -> Iterator[Binding]:
    resolved = path.resolve()
    if resolved in including:
        chain = " includes ".join(str(p) for p in (*including, resolved))
        raise UserError(f"config files include each other: {chain}")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not a UTF-8 text file (byte {error.start})") from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; check its permissions") from error
    yield from _parse(text, str(path), (*including, resolved), from_file=True)


def _parse(
    text: str, source: str, including: tuple[Path, ...], *, from_file: bool
) -> Iterator[Binding]:
    for statement in _statements(text, source, from_file=from_file):
        location = statement.location
        line = location.line_num if from_file else 0
        where = f"{source}:{line}" if line else source
        if isinstance(statement, config_parser.BindingStatement):
            scope = tuple(filter(None, statement.scope.split("/")))
            name = _short_name(statement.selector)
            yield Binding(
                scope=scope,
                name=name,
                argument=statement.arg_name,
                value=statement.value,
                source=source,
                line=line,
            )
        elif isinstance(statement, config_parser.IncludeStatement):
            try:
                included = find_file(statement.filename)
            except UserError as error:
                raise UserError(f"{where}: include: {error}") from error
            yield from _read_file(included, including)
        elif isinstance(statement, config_parser.ImportStatement):
            raise UserError(
                f"{where}: {statement.format()}: a config cannot import; the stage that reads it "
                "already knows every class it may use. Remove the line"
            )


def _statements(text: str, source: str, *, from_file: bool) -> Iterator[Any]:
    try:
        parser = config_parser.ConfigParser(io.StringIO(text), _Delegate())
        while (statement := parser.parse_statement()) is not None:
            yield statement
    except (SyntaxError, tokenize.TokenError, StopIteration) as error:
        _raise_syntax_error(error, source, from_file=from_file)


def _raise_syntax_error(error: Exception, source: str, *, from_file: bool) -> NoReturn:
    if not from_file:
        raise UserError(
            f"{source}: not a valid value; text needs quotes inside the shell's, such as "
            "--gin.NAME=\"'text'\""
        ) from error
    if isinstance(error, SyntaxError):
        problem, line, content = error.msg, error.lineno, (error.text or "").strip()
    else:
        problem, (line, _) = error.args if len(error.args) == 2 else ("unexpected end", (1, 0))
        content = "a bracket or quote is not closed"
    problem = " ".join(str(problem).split()).rstrip(".")
    if "Failed to parse token" in problem:
        problem = f"not a value: {problem.rsplit(' ', 1)[1]}; text needs quotes"
    raise UserError(f"{source}:{line}: syntax error: {problem}: {content}") from error


# Binding


def _bind(check: Check) -> None:
    """Hands the checked values to gin, replacing all that an earlier `load` left there.

    Raises:
      UserError: an object refuses its values.
    """
    gin.clear_config()
    _register(check)
    for binding in check.bindings.final:
        used = [
            n
            for n, bound in check.arguments.items()
            if n.uses(binding) and binding.argument in bound
        ]
        if used:
            gin.bind_parameter(
                ("/".join(binding.scope), f"{_GIN_MODULE}.{binding.name}", binding.argument),
                map_leaves(check.value(binding), _to_gin, (Reference,)),
            )
    gin.finalize()
    _build(check)


def _register(check: Check) -> None:
    # Interactive mode lets a name be registered again: one process may load many configs.
    gin.enter_interactive_mode()
    try:
        for schema in check.stages.values():
            gin.configurable(schema.target, module=_GIN_MODULE)
        for target in check.classes.values():
            gin.register(target, module=_GIN_MODULE)
    finally:
        gin.exit_interactive_mode()


def _build(check: Check) -> None:
    """Builds every object once, so that values it refuses are reported with their lines."""
    for node in check.arguments:
        if node.name in check.stages:
            continue
        try:
            with gin.config_scope(list(node.scope)):
                gin.get_configurable(check.classes[node.name])()
        except (ValueError, TypeError, UserError) as error:
            raise check.blame(node, _without_gin_note(error)) from error


def _to_gin(reference: Reference) -> ConfigurableReference:
    return ConfigurableReference("/".join((*reference.scopes, reference.name)), reference.evaluate)


def _without_gin_note(error: Exception) -> str:
    """The message as it was raised: gin adds the call stack of configurables to every exception."""
    return str(error).split("\n  In call to configurable")[0]
