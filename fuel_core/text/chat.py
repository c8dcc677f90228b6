"""Conversations as text, by the template of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from fuel_core.contracts.errors import CheckpointError, FuelError, InvalidRequestError

if TYPE_CHECKING:
    from fuel_core.text.templates import Template


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
        except Exception as error:
            raise (self._unusable if template.is_broken_by(error) else self._refused)(error) from error

    @cached_property
    def _compiled(self) -> Template:
        if not self._text:
            raise InvalidRequestError(
                f"a conversation for {self._source}, which has no chat template",
                needed="a model with a chat template",
                remedy="use an instruction-tuned model, or give the prompt as plain text",
            )
        # Imported here, since it takes a tenth of a second, and plain prompts need none.
        from fuel_core.text.templates import Template

        try:
            return Template(self._text)
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
