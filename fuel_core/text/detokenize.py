"""From token ids back to text, whole or while the ids arrive."""

from __future__ import annotations

import codecs
import json
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import tokenizers

from fuel_core.contracts.errors import CheckpointError, InvalidRequestError

# What a decoder of the library does to a token: (its text, whether it is the first) -> text, or final bytes.
_Step = Callable[[str, bool], "str | bytes"]

_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
_MAX_ID = 2**32  # of the library
_new_utf8_decoder = codecs.getincrementaldecoder("utf-8")


def _byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte in a byte-level vocabulary (source: GPT-2's encoder.py)."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = sorted(set(range(256)) - set(visible))
    return {chr(byte): byte for byte in visible} | {chr(256 + n): byte for n, byte in enumerate(hidden)}


_BYTE_OF = _byte_alphabet()


def _byte_level(_state: Mapping[str, Any]) -> _Step:
    def step(token: str, _first: bool) -> bytes:
        if all(character in _BYTE_OF for character in token):
            return bytes(_BYTE_OF[character] for character in token)
        return token.encode()

    return step


def _byte_fallback(_state: Mapping[str, Any]) -> _Step:
    def step(token: str, _first: bool) -> str | bytes:
        match = _BYTE_TOKEN.fullmatch(token)
        return bytes.fromhex(match[1]) if match else token

    return step


def _replace(state: Mapping[str, Any]) -> _Step:
    pattern, content = state["pattern"]["String"], state["content"]
    return lambda token, _first: token.replace(pattern, content)


def _metaspace(state: Mapping[str, Any]) -> _Step:
    mark, keeps_first = state["replacement"], state["prepend_scheme"] == "never"
    return lambda token, first: token.replace(mark, "" if first and not keeps_first else " ")


def _spaced(token: str, first: bool) -> str:
    return token if first else " " + token


_STEPS: Mapping[str, Callable[[Mapping[str, Any]], _Step]] = {
    "ByteLevel": _byte_level,
    "ByteFallback": _byte_fallback,
    "Replace": _replace,
    "Metaspace": _metaspace,
}


def _flat(state: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The decoders of a sequence in order; any other decoder alone."""
    if state["type"] != "Sequence":
        return [state]
    return [inner for part in state["decoders"] for inner in _flat(part)]


def _leading_spaces(last: Mapping[str, Any]) -> int:
    """How many spaces a ``Strip`` takes off the whole text's start; 0 for any other decoder."""
    return int(last["start"]) if last["type"] == "Strip" else 0


def _is_streamable(parts: list[Mapping[str, Any]]) -> bool:
    """Whether each token's bytes depend on nothing but the token and its being first."""
    names = [part["type"] for part in parts]
    if names[-1:] == ["Strip"]:
        strip = parts[-1]
        if strip["stop"] or strip["content"] != " " or "Fuse" not in names:
            return False
        names = names[:-1]
    if names[-1:] == ["Fuse"]:
        names = names[:-1]
    patterns = [part["pattern"] for part in parts if part["type"] == "Replace"]
    return all(name in _STEPS for name in names) and all("String" in pattern for pattern in patterns)


class TokenBytes:
    """The bytes that each token of a vocabulary stands for.

    They follow the tokenizer's own decoder, with two exceptions. A token that was added to a byte-level
    vocabulary is plain text and stands for itself. A run of byte tokens that is not UTF-8 gives U+FFFD
    for its broken part, not for the whole run, so that no later token can change what came before.

    Attributes:
        special: ids of the tokens that are control, not text.
        leading_spaces: how many spaces at the start of the text are an artefact of the vocabulary.

    Raises:
        CheckpointError: the decoder is of a kind whose text is not certain until its last token.
    """

    def __init__(self, core: tokenizers.Tokenizer, *, source: str) -> None:
        added = core.get_added_tokens_decoder()
        parts = _flat(json.loads(core.decoder.__getstate__())) if core.decoder else []
        if not _is_streamable(parts):
            raise _unknown_decoder(source, parts)
        self._core = core
        self._steps = [_STEPS[part["type"]](part) for part in parts if part["type"] in _STEPS] or [_spaced]
        self._literal = (
            frozenset(added) if any(part["type"] == "ByteLevel" for part in parts) else frozenset()
        )
        self._later: dict[int, bytes] = {}
        self.special = frozenset(id for id, token in added.items() if token.special)
        self.leading_spaces = _leading_spaces(parts[-1]) if parts else 0

    def of(self, id: int, *, first: bool) -> bytes:
        """The bytes of token ``id``, ``first`` in its text or not.

        Raises:
            InvalidRequestError: there is no such token.
        """
        if first:
            return self._decode(id, first=True)
        if id not in self._later:
            self._later[id] = self._decode(id, first=False)
        return self._later[id]

    def _decode(self, id: int, *, first: bool) -> bytes:
        token: str | bytes = self._text(id)
        for step in () if id in self._literal else self._steps:
            if isinstance(token, bytes):
                break
            token = step(token, first)
        return token.encode() if isinstance(token, str) else token

    def has(self, id: int) -> bool:
        """Whether a token has this id."""
        return 0 <= id < _MAX_ID and self._core.id_to_token(id) is not None

    def _text(self, id: int) -> str:
        text = self._core.id_to_token(id) if 0 <= id < _MAX_ID else None
        if text is None:
            size = self._core.get_vocab_size(with_added_tokens=True)
            raise InvalidRequestError(
                f"token id {id}",
                needed=f"the id of one of {size} tokens",
                remedy="use this model's own ids",
                id=id,
            )
        return text


class IncrementalDetokenizer:
    """Text of a growing list of token ids, given out as soon as it is certain.

    What has been given out never changes, and all of it together, ``finish()`` included, is what
    ``Tokenizer.decode`` gives for all ids. The cost of a token does not grow with the text before it.

    Args:
        tokens: what each token stands for.
        skip_special: leave control tokens out.
        continues: the ids follow others, so that the space before the first word is one.
    """

    def __init__(self, tokens: TokenBytes, *, skip_special: bool = True, continues: bool = False) -> None:
        self._tokens = tokens
        self._skipped = tokens.special if skip_special else frozenset()
        self._utf8 = _new_utf8_decoder("replace")
        self._is_first = not continues
        self._spaces_to_drop = 0 if continues else tokens.leading_spaces

    def add(self, ids: Iterable[int]) -> str:
        """The text that these ids make certain; an unfinished character is held back.

        Raises:
            InvalidRequestError: an id that is no token. Nothing of ``ids`` is added then.
        """
        kept = [id for id in map(_as_int, ids) if id not in self._skipped]
        pieces = [self._tokens.of(id, first=self._is_first and n == 0) for n, id in enumerate(kept)]
        self._is_first = self._is_first and not pieces
        return self._drop_spaces(self._utf8.decode(b"".join(pieces)))

    def finish(self) -> str:
        """What was held back: U+FFFD for a character that was never completed, or nothing."""
        return self._drop_spaces(self._utf8.decode(b"", final=True))

    def _drop_spaces(self, text: str) -> str:
        while self._spaces_to_drop and text:
            if not text.startswith(" "):
                self._spaces_to_drop = 0
                break
            text, self._spaces_to_drop = text[1:], self._spaces_to_drop - 1
        return text


def _as_int(id: object) -> int:
    try:
        return operator.index(id)  # type: ignore[arg-type]
    except TypeError as error:
        raise InvalidRequestError(
            f"token id {id!r}", needed="an integer", remedy="pass token ids", id=id
        ) from error


def _unknown_decoder(source: str, parts: list[Mapping[str, Any]]) -> CheckpointError:
    return CheckpointError(
        f"{source}: a tokenizer.json with the decoder {', '.join(part['type'] for part in parts)}",
        needed=f"any of {', '.join(sorted(_STEPS))}, then Fuse, then Strip at the start",
        remedy="use a checkpoint with a byte-level or SentencePiece tokenizer",
    )
