"""A config against the signatures of the stages and settings classes that it is meant for."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from pipeline.core.annotations import Mismatch, Reference, Schema, coerce
from pipeline.core.bindings import (
    REQUIRED,
    Binding,
    Bindings,
    Macro,
    Node,
    choices,
    map_leaves,
)
from pipeline.core.errors import UserError

# Every stage that a config may mention, and the module whose function of that name is its schema.
STAGES = {
    "generate": "pipeline.generate",
    "train": "pipeline.train",
    "profile": "pipeline.profile",
    "evaluate": "pipeline.evaluate",
    "codesign": "pipeline.codesign",
    "run": "pipeline.run",
    "sps": "serving.sps",
}


class Check:
    """Looks up, checks and converts the bindings of `stages` and of the `settings` they build."""

    def __init__(
        self, bindings: Bindings, stages: Iterable[Callable[..., Any]], settings: Iterable[type]
    ):
        self.bindings = bindings
        self.stages = {schema.name: schema for schema in map(Schema.of, stages)}
        self.settings = {schema.name: schema for schema in map(Schema.of, settings)}
        self.schemas = {**self.settings, **self.stages}
        self.classes = {name: schema.target for name, schema in self.settings.items()}
        self.arguments: dict[Node, dict[str, Any]] = {}  # of every object built, innermost first

    def names(self) -> None:
        """Refuses names that are neither known here nor another stage's business.

        A settings class that is not registered in this process is another stage's business if
        bindings of another stage lead to it.
        """
        own, _ = self.bindings.reach(Node((), name) for name in self.stages)
        others, _ = self.bindings.reach(Node((), name) for name in STAGES.keys() - self.stages)
        known = {*self.schemas, *STAGES, *(node.name for node in others)}
        for binding in self.bindings.all:
            self._check_macros(binding)
            if binding.argument:
                self._check_name(binding, known)
            if any(node.uses(binding) for node in own):
                self._check_references(binding)

    def _check_macros(self, binding: Binding) -> None:
        macros = self.bindings.macros
        for leaf in self.bindings.mentioned(binding.value):
            if isinstance(leaf, Macro) and leaf.name not in (*macros, REQUIRED):
                raise binding.error(f"{leaf} is not defined; {choices(leaf.name, macros)}")

    def _check_name(self, binding: Binding, known: set[str]) -> None:
        name, argument = binding.name, binding.argument
        if name not in known:
            raise binding.error(
                f"nothing is named {name!r}; {choices(name, {*self.schemas, *STAGES})}"
            )
        schema = self.schemas.get(name)
        parameters = schema.annotations if schema else _declared_parameters(name)
        if parameters is not None and argument not in parameters:
            raise binding.error(f"{name} has no {argument!r}; {choices(argument, parameters)}")

    def _check_references(self, binding: Binding) -> None:
        for leaf in self.bindings.mentioned(binding.value):
            if isinstance(leaf, Reference) and leaf.name not in self.settings:
                known = choices(leaf.name, self.settings)
                raise binding.error(f"{leaf} refers to nothing; {known}")

    def effects(self) -> None:
        """Refuses bindings that nothing applies and macros that nothing uses."""
        nodes, macros = self.bindings.reach(Node((), name) for name in {*STAGES, *self.stages})
        for binding in self.bindings.all:
            if not binding.argument:
                if binding.label not in macros:
                    raise binding.error(f"nothing uses %{binding.label}; use it or remove it")
            elif not any(node.uses(binding) for node in nodes):
                raise binding.error(f"has no effect: {_why_unused(binding, nodes)}")

    def objects(self, stage: str, given: Iterable[str], origin: str) -> None:
        """Checks the arguments of `stage` and of every object that it builds.

        Args:
          stage: name of one of `stages`.
          given: arguments that a caller supplies, so that the config need not.
          origin: the config, for messages.

        Raises:
          UserError: a missing value, a value of the wrong type, an object within itself.
        """
        self._visit(Node((), stage), frozenset(given), origin, ())

    def fragment(self) -> None:
        """Checks what a file made for inclusion holds; it may be incomplete and unused.

        Every binding is checked, and every object that its macros and stages lead to.
        """
        nowhere = Node((), "")
        for binding in self.bindings.all:
            if Macro(REQUIRED) in self.bindings.mentioned(binding.value):
                continue
            self._check_references(binding)
            if not binding.argument:
                self._visit_values(binding, self.bindings.resolve(binding), nowhere, ())
            elif binding.name in self.schemas:
                value = self.value(binding)
                if binding.name in self.stages:
                    self._visit_values(binding, value, nowhere, ())

    def _visit(
        self, node: Node, given: frozenset[str], origin: str, path: tuple[Node, ...]
    ) -> None:
        if node in path:
            chain = " -> ".join(map(str, (*path, node)))
            raise UserError(f"{origin}: an object cannot contain itself: {chain}")
        if node in self.arguments:
            return
        schema = self.schemas[node.name]
        bound = {k: b for k, b in self.bindings.effective(node).items() if k not in given}
        arguments = {name: self.value(binding) for name, binding in bound.items()}
        if missing := sorted(schema.required - arguments.keys() - given):
            wanted = ", ".join(f"{node}.{name}" for name in missing)
            raise UserError(f"{origin}: nothing sets {wanted}, which {node.name} needs")
        for name, value in arguments.items():
            self._visit_values(bound[name], value, node, (*path, node))
        self.arguments[node] = arguments

    def _visit_values(
        self, binding: Binding, value: Any, parent: Node, path: tuple[Node, ...]
    ) -> None:
        origin = f"{binding.where}: {binding.label}"
        map_leaves(
            value,
            lambda reference: self._visit(parent.child(reference), frozenset(), origin, path),
            (Reference,),
        )

    def value(self, binding: Binding) -> Any:
        """The value of `binding`, macros replaced, as the type of its parameter.

        Raises:
          UserError: it is of another type.
        """
        value = self.bindings.resolve(binding)
        annotation = self.schemas[binding.name].annotations[binding.argument]
        try:
            return coerce(value, annotation, self.classes)
        except Mismatch as error:
            shown = map_leaves(value, _Shown, (Reference,))
            kind = "" if isinstance(value, Reference) else f" ({type(value).__name__})"
            raise binding.error(f"{shown!r}{kind} does not fit: {error}") from error

    def blame(self, node: Node, problem: str) -> UserError:
        """The message for values that the object itself refused, with the lines that set them.

        Of an object with many bindings only those are listed that `problem` mentions.
        """
        bound = list(self.bindings.effective(node).values())
        mentioned = [b for b in bound if re.search(rf"\b{b.argument}\b", problem)]
        lines = [f"{b.where}: {b.label}" for b in mentioned or bound]
        return UserError(f"{'; '.join(lines) or node}: {problem}")


def _why_unused(binding: Binding, nodes: Iterable[Node]) -> str:
    if binding.name in STAGES:
        return f"a stage has no scope; write {binding.name}.{binding.argument}"
    target = "/".join((*binding.scope, binding.name))
    built = sorted({f"@{node}()" for node in nodes if node.name == binding.name})
    others = f" (only to {', '.join(built)})" if built else ""
    return f"nothing refers to @{target}(){others}"


def _declared_parameters(stage: str) -> set[str] | None:
    """The parameters of another stage's function, read from its source: importing costs seconds.

    None where they cannot be told: no stage, no such module, or a function with `**kwargs`.
    """
    spec = importlib.util.find_spec(STAGES[stage]) if stage in STAGES else None
    if spec is None or spec.origin is None:
        return None
    for node in ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name == stage and node.args.kwarg is None:
            return {a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)}
    return None


class _Shown(str):
    """A reference in an error message: as it is written, without quotes."""

    def __repr__(self) -> str:
        return str(self)
