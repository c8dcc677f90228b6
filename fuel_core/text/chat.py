"""Chat templates, rendered as Transformers renders them, in a sandbox.

Source of the names that a template may use: ``apply_chat_template`` of Transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from fuel_core.contracts.errors import CheckpointError, FuelError, InvalidRequestError


class _GenerationBlocks(jinja2.ext.Extension):
    """``{% generation %}``: marks an assistant's text for training; here it is only its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """The template of one checkpoint, or its absence. Compiled when first used: plain prompts need none."""

    def __init__(self, text: str | None, special_tokens: Mapping[str, str], *, source: str) -> None:
        self._text, self._special_tokens, self._source = text, special_tokens, source

    @property
    def is_present(self) -> bool:
        """Whether there is a template."""
        return bool(self._text)

    def render(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool) -> str:
        """The conversation as text.

        Raises:
            InvalidRequestError: no template, malformed messages, or messages that the template refuses.
            CheckpointError: the template is not valid Jinja, or does what a template must not do.
        """
        template = self._compiled
        names = {"messages": _checked(messages), "add_generation_prompt": add_generation_prompt}
        try:
            # Transformers passes these two even when they are None, and templates test `is defined`.
            return template.render(**self._special_tokens, **names, tools=None, documents=None)
        except SecurityError as error:
            raise self._unusable(error) from error
        except Exception as error:
            raise self._refused(error) from error

    @cached_property
    def _compiled(self) -> jinja2.Template:
        if not self._text:
            raise InvalidRequestError(
                f"a conversation for {self._source}, which has no chat template",
                needed="a model with a chat template",
                remedy="use an instruction-tuned model, or give the prompt as plain text",
            )
        try:
            return _environment().from_string(self._text)
        except Exception as error:
            raise self._unusable(error) from error

    def _unusable(self, error: Exception) -> FuelError:
        return CheckpointError(
            f"the chat template of {self._source} cannot be used: {_one_line(error)}",
            needed="a Jinja template that keeps to its sandbox",
            remedy="give the prompt as plain text, or mend the template",
        )

    def _refused(self, error: Exception) -> FuelError:
        return InvalidRequestError(
            f"messages that the chat template of {self._source} refuses: {_one_line(error)}",
            needed="messages that it can write",
            remedy="give the roles and the order that this model was trained on",
        )


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    line = getattr(error, "lineno", None)
    return text if line is None else f"{text} (line {line})"


def _checked(messages: object) -> list[dict[str, str]]:
    """Plain copies, so that a template can neither change nor call into what it was given."""
    if not isinstance(messages, Sequence) or not messages:
        raise InvalidRequestError(
            f"messages of type {type(messages).__name__}" if messages else "no messages",
            needed="a list with at least one message",
            remedy="give what the user says as a message",
        )
    return [_checked_message(message, number) for number, message in enumerate(messages)]


def _checked_message(message: object, number: int) -> dict[str, str]:
    if isinstance(message, Mapping) and {"role", "content"} <= message.keys():
        pairs = [(name, value) for name, value in message.items() if isinstance(value, str)]
        if len(pairs) == len(message):
            return {str(name): str.__str__(value) for name, value in pairs}
    raise InvalidRequestError(
        f"message {number} has no role, no content, or something other than text",
        needed="role and content, both text",
        remedy='write {"role": "user", "content": "..."}',
    )
