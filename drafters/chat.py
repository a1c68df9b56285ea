"""Chat templates: Jinja sources that turn a conversation into the text a model was trained on.

Templates come with checkpoints, from strangers: they run in Jinja's immutable sandbox. What is filled into
them comes from users: control tokens spelled out there are broken up by `GUARD`, at which the rendered text
is cut before it is tokenised.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pipeline.core.errors import UserError

GUARD = "\ufdd0"  # a noncharacter: never part of interchanged text


def render(template: str, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
    """The conversation as text that ends where the assistant's answer begins.

    Args:
      template: Jinja source in Hugging Face's conventions.
      messages: `{"role": ..., "content": ...}` each.
      **variables: for the template, `bos_token` say.

    Raises:
      UserError: there is no template, it is malformed, or it refuses the messages.
    """
    if not template:
        raise UserError("the model has no chat template; give a prompt without roles instead")
    try:
        return _compiled(template).render(
            messages=messages, **{"add_generation_prompt": True, "tools": None} | variables
        )
    except (jinja2.TemplateError, TypeError) as error:
        raise UserError(f"the chat template cannot be filled: {error}") from error


def guarded(messages: Any, controls: Iterable[str]) -> Any:
    """`messages` with each of `controls` in any of its strings broken up by `GUARD`."""
    spelled = sorted(filter(None, controls), key=len, reverse=True)
    if not spelled:
        return messages
    pattern = re.compile("|".join(map(re.escape, spelled)))
    return _map_strings(messages, lambda text: pattern.sub(_broken, text))


def _broken(match: re.Match[str]) -> str:
    return "".join(character + GUARD for character in match[0])


def _map_strings(value: Any, function: Any) -> Any:
    if isinstance(value, str):
        return function(value)
    if isinstance(value, Mapping):
        return {key: _map_strings(item, function) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_map_strings(item, function) for item in value]
    return value


@functools.lru_cache(maxsize=8)
def _compiled(template: str) -> jinja2.Template:
    """The environment of transformers' `apply_chat_template`, which templates are written for."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment.from_string(template)


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
