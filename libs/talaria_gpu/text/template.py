"""Chat templates, rendered as `transformers.apply_chat_template` renders them (transformers 5, chat_template_utils).

Templates are code from a model's publisher, so they run in Jinja's immutable sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from talaria_common.errors import BadRequestError
from talaria_gpu.text.messages import ChatMessage


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks assistant text for training masks; when serving, its body is rendered as it stands."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        """The tag's body inside a scope, as the call block of transformers makes one."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(fmt: str) -> str:
    return datetime.now().strftime(fmt)  # noqa: DTZ005 - local time is what templates get from transformers


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> ImmutableSandboxedEnvironment:
    # No autoescape: the output is a prompt, not a page, and transformers renders it so.
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise_exception
    env.globals["strftime_now"] = _strftime_now
    return env


class ChatTemplate:
    """A compiled template with the model's special tokens.

    Args:
        source: the Jinja source.
        special_tokens: bos_token, eos_token and the like, passed to the template as variables.

    Raises:
        ValueError: the source does not compile.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, Any]) -> None:
        self.source = source
        self._variables = dict(special_tokens)
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as e:
            raise ValueError(f"chat template does not compile: {e}") from e

    def render(self, messages: Sequence[ChatMessage], *, add_generation_prompt: bool = True) -> str:
        """The prompt text.

        Raises:
            BadRequestError: the template refuses these messages (roles out of order, ...) or fails on them.
        """
        try:
            return self._template.render(
                messages=[dict(m) for m in messages],
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._variables,
            )
        except (jinja2.TemplateError, TypeError, KeyError, ValueError) as e:
            raise BadRequestError(f"the model's chat template refuses these messages: {e}", param="messages") from e
