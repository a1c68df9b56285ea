"""Docstrings in source code, which is parsed and never run."""

from __future__ import annotations

import ast
import functools
import textwrap
import warnings
from collections.abc import Iterator


def parse(source: str) -> ast.Module:
    """The syntax tree of a module."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about escapes in other people's strings
        return ast.parse(source)


@functools.cache  # the tokenizer's sample and the tokenisation both want them: 7 s to parse, 3 MB to keep
def docstrings(source: str) -> list[str]:
    """The docstrings of a module, its classes and its functions, in the order of the source."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in _statements(parse(source)) if isinstance(node, documented)]
    nodes.sort(key=lambda node: getattr(node, "lineno", 0))
    return [text for node in nodes if (text := ast.get_docstring(node))]


def documented_functions(source: str) -> Iterator[tuple[str, str]]:
    """(source without docstring, first line of the docstring) of every function of a module that has one."""
    lines = source.splitlines()
    for node in _statements(parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        summary = (ast.get_docstring(node) or "").split("\n", 1)[0].strip()
        if not summary or len(node.body) < 2:
            continue
        said = node.body[0]
        assert said.end_lineno is not None
        assert node.end_lineno is not None
        kept = lines[node.lineno - 1 : said.lineno - 1] + lines[said.end_lineno : node.end_lineno]
        yield textwrap.dedent("\n".join(kept)), summary


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """`node` and the statements in it, without their expressions: an eighth of what `ast.walk` visits."""
    yield node
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        inner = getattr(node, name, None)
        for statement in (
            inner if isinstance(inner, list) else ()
        ):  # a lambda's body is an expression
            yield from _statements(statement)
