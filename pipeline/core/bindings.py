"""The statements of a config with their places, and which of them can have an effect.

Gin applies the bindings of `scope/Name` where a reference builds `Name` in that scope, and is
silent about those that are never applied. Here references are followed as Gin follows them:

    `@a/Name()` builds Name in the scope `a`, whatever the scope around it;
    `@Name()` builds it in the scope around it;
    bindings of `Name` and of `a/Name` apply in the scopes `a` and `a/b`, the longer scope winning.

A macro `%M` stands for its value, as if the value were written in its place.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pipeline.core.annotations import Reference
from pipeline.core.errors import UserError

REQUIRED = "gin.REQUIRED"  # `%gin.REQUIRED`: the value must come from another file or a flag


@dataclass(frozen=True, slots=True)
class Macro:
    """`%name` in a config."""

    name: str

    def __str__(self) -> str:
        return f"%{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Binding:
    """`scope/name.argument = value`, or the macro `name = value` where `argument` is empty."""

    scope: tuple[str, ...]
    name: str
    argument: str
    value: Any
    source: str  # the file, or the flag of a binding given on the command line
    line: int  # 1-based; 0 on the command line

    @property
    def key(self) -> tuple[tuple[str, ...], str, str]:
        return self.scope, self.name, self.argument

    @property
    def where(self) -> str:
        return f"{self.source}:{self.line}" if self.line else self.source

    @property
    def label(self) -> str:
        path = "/".join((*self.scope, self.name))
        return f"{path}.{self.argument}" if self.argument else path

    def error(self, problem: str) -> UserError:
        return UserError(f"{self.where}: {self.label}: {problem}")


@dataclass(frozen=True, slots=True)
class Node:
    """One object that a config builds: `name` in `scope`."""

    scope: tuple[str, ...]
    name: str

    def __str__(self) -> str:
        return "/".join((*self.scope, self.name))

    def child(self, reference: Reference) -> Node:
        return Node(reference.scopes or self.scope, reference.name)

    def uses(self, binding: Binding) -> bool:
        depth = len(binding.scope)
        return binding.name == self.name and binding.scope == self.scope[:depth]


class Bindings:
    """All bindings of a config in the order they were read; a later one overrides an earlier."""

    def __init__(self, statements: Iterable[Binding]):
        self.all = tuple(statements)
        _refuse_duplicates(self.all)

    @cached_property
    def parameters(self) -> tuple[Binding, ...]:
        return tuple(binding for binding in self.all if binding.argument)

    @cached_property
    def final(self) -> tuple[Binding, ...]:
        """The parameters that no later statement overrides."""
        return tuple({binding.key: binding for binding in self.parameters}.values())

    @cached_property
    def macros(self) -> dict[str, list[Binding]]:
        """Every definition of each macro; the last one holds."""
        definitions: dict[str, list[Binding]] = {}
        for binding in self.all:
            if not binding.argument:
                definitions.setdefault(binding.label, []).append(binding)
        return definitions

    def effective(self, node: Node) -> dict[str, Binding]:
        """The binding that holds for each bound argument of `node`."""
        used = [binding for binding in self.final if node.uses(binding)]
        return {b.argument: b for b in sorted(used, key=lambda b: len(b.scope))}

    def mentioned(self, value: Any) -> Iterator[Reference | Macro]:
        """All references and macros in `value` and in any definition of those macros."""
        seen: set[str] = set()
        pending = list(_leaves(value))
        while pending:
            leaf = pending.pop()
            yield leaf
            if isinstance(leaf, Macro) and leaf.name not in seen:
                seen.add(leaf.name)
                for definition in self.macros.get(leaf.name, ()):
                    pending.extend(_leaves(definition.value))

    def reach(self, roots: Iterable[Node]) -> tuple[set[Node], set[str]]:
        """The nodes and macros that any statement reaches from `roots`.

        Overridden statements count: an override on the command line must not turn what it replaces
        into an error.
        """
        nodes: set[Node] = set()
        macros: set[str] = set()
        pending = list(roots)
        while pending:
            node = pending.pop()
            if node in nodes:
                continue
            nodes.add(node)
            for binding in filter(node.uses, self.parameters):
                for leaf in self.mentioned(binding.value):
                    if isinstance(leaf, Macro):
                        macros.add(leaf.name)
                    else:
                        pending.append(node.child(leaf))
        return nodes, macros

    def resolve(self, binding: Binding) -> Any:
        """The value of `binding` with every macro replaced by its final value.

        Raises:
          UserError: a macro is not defined, or defined through itself, or left `%gin.REQUIRED`.
        """
        return self._resolve(binding.value, binding, ())

    def _resolve(self, value: Any, user: Binding, path: tuple[str, ...]) -> Any:
        if not isinstance(value, Macro):
            return map_leaves(value, lambda leaf: self._resolve(leaf, user, path), (Macro,))
        if value.name == REQUIRED:
            raise user.error(f"required, but nothing sets it; give --gin.{user.label}=VALUE")
        if value.name in path:
            raise user.error(f"macro %{value.name} is defined through itself")
        definitions = self.macros.get(value.name)
        if not definitions:
            raise user.error(f"{value} is not defined; {choices(value.name, self.macros)}")
        return self._resolve(definitions[-1].value, definitions[-1], (*path, value.name))


def _refuse_duplicates(bindings: Sequence[Binding]) -> None:
    """Two values in one file are a slip of the pen: overriding is for later files and flags."""
    first: dict[Any, Binding] = {}
    for binding in bindings:
        earlier = first.setdefault((binding.source, binding.key), binding)
        if binding.line and binding.line != earlier.line:
            raise binding.error(f"already bound at {earlier.where}; keep one of the two lines")


def _leaves(value: Any) -> list[Reference | Macro]:
    found: list[Reference | Macro] = []
    map_leaves(value, found.append, (Reference, Macro))
    return found


def map_leaves(value: Any, function: Callable[[Any], Any], kinds: tuple[type, ...]) -> Any:
    """`value` with `function` applied to its leaves of `kinds`, in lists, tuples and dicts too."""
    if isinstance(value, kinds):
        return function(value)
    if isinstance(value, list | tuple):
        return type(value)(map_leaves(item, function, kinds) for item in value)
    if isinstance(value, dict):
        return {
            map_leaves(k, function, kinds): map_leaves(v, function, kinds) for k, v in value.items()
        }
    return value


def choices(name: str, allowed: Iterable[str]) -> str:
    """`did you mean 'steps'? allowed: batch, steps`."""
    names = sorted(allowed)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}allowed: {', '.join(names) if names else 'none'}"
