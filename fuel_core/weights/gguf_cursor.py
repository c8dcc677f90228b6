"""The values of a GGUF header, read one after another and never past the end of the file.

Source: the GGUF specification, ``docs/gguf.md`` of ggml (versions 2 and 3, little endian).
"""

from __future__ import annotations

import struct
from collections.abc import Container
from typing import Any

import numpy as np

from fuel_core.contracts.errors import CheckpointError

_STRING, _ARRAY = 8, 9
_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_SCALARS = {kind: struct.Struct(f"<{code}") for kind, code in _CODES.items()}
_U32, _U64 = _SCALARS[4], _SCALARS[10]

# The fewest bytes of one element: an empty string is its length, an empty array its type and length.
_SMALLEST = {kind: scalar.size for kind, scalar in _SCALARS.items()} | {_STRING: 8, _ARRAY: 12}
_MAX_DEPTH = 4
_MAX_NAME_BYTES = 65535


class Cursor:
    """Reads a mapped file from its beginning; every length is compared with what is left first."""

    def __init__(self, view: memoryview, source: str) -> None:
        self.view, self.source, self.position = view, source, 0

    def damaged(self, given: str, needed: str, at: int | None = None) -> CheckpointError:
        """The error for bytes at ``at`` (by default the next ones) that are not what the format says."""
        offset = self.position if at is None else at
        return CheckpointError(
            f"{self.source}: {given} at byte {offset}",
            needed=needed,
            remedy="the file is damaged or cut short: fetch it again",
            offset=offset,
        )

    def require(self, count: int, smallest: int, what: str) -> None:
        """Refuse ``count`` things of at least ``smallest`` bytes each that cannot all be in the file."""
        left = len(self.view) - self.position
        if count > left // smallest:
            room = f"at most {left // smallest}, for {left} bytes are left"
            raise self.damaged(f"{what}: {count} are announced", room)

    def skip(self, length: int, what: str) -> int:
        """Step over ``length`` bytes and return where they began."""
        self.require(length, 1, f"bytes of {what}")
        self.position += length
        return self.position - length

    def u32(self, what: str) -> int:
        """An unsigned integer of four bytes."""
        value: int = _U32.unpack_from(self.view, self.skip(4, what))[0]
        return value

    def u64(self, what: str) -> int:
        """An unsigned integer of eight bytes."""
        value: int = _U64.unpack_from(self.view, self.skip(8, what))[0]
        return value

    def text(self, what: str, most: int = 1 << 30) -> str:
        """A string of at most ``most`` bytes that must be valid UTF-8."""
        length = self.u64(f"the length of {what}")
        if length > most:
            raise self.damaged(f"{what} of {length} bytes", f"at most {most}", self.position - 8)
        start = self.skip(length, what)
        try:
            return str(self.view[start : start + length], "utf-8")
        except UnicodeDecodeError as error:
            raise self.damaged(what, "valid UTF-8", start + error.start) from error

    def name(self, what: str, taken: Container[str]) -> str:
        """The name of a key or tensor, which must not be among those ``taken``."""
        start = self.position
        name = self.text(what, _MAX_NAME_BYTES)
        if name in taken:
            raise self.damaged(f"{what} {name!r} for the second time", "every name once", start)
        return name

    def value(self, what: str) -> Any:
        """A type and a value of that type: int, float, bool, str, list of str or numpy array."""
        kind = self.u32(what)
        if kind == _STRING:
            return self.text(what)
        if kind == _ARRAY:
            return self._array(what, depth=1)
        scalar = _SCALARS.get(kind)
        if scalar is None:
            raise self._unknown(what, kind)
        return scalar.unpack_from(self.view, self.skip(scalar.size, what))[0]

    def _unknown(self, what: str, kind: int) -> CheckpointError:
        return self.damaged(f"{what} of value type {kind}", "a value type from 0 to 12", self.position - 4)

    def _array(self, what: str, depth: int) -> Any:
        kind = self.u32(what)
        if kind not in _SMALLEST:
            raise self._unknown(what, kind)
        count = self.u64(what)
        self.require(count, _SMALLEST[kind], f"elements of {what}")
        if kind == _STRING:
            return self._strings(count, what)
        if kind == _ARRAY:
            return self._arrays(count, what, depth)
        start = self.skip(count * _SMALLEST[kind], what)
        return np.frombuffer(self.view[start : self.position], dtype=f"<{_CODES[kind]}")

    def _arrays(self, count: int, what: str, depth: int) -> list[Any]:
        if depth == _MAX_DEPTH:
            raise self.damaged(f"{what}: arrays inside arrays", f"at most {_MAX_DEPTH} levels")
        return [self._array(what, depth + 1) for _ in range(count)]

    def _strings(self, count: int, what: str) -> list[str]:
        """Tokens may be any bytes: what is not UTF-8 becomes surrogate escapes, so that none is lost."""
        # A vocabulary has a hundred thousand of these, so this loop calls nothing of ours.
        found: list[str] = []
        view, size, position = self.view, len(self.view), self.position
        unpack = _U64.unpack_from
        for _ in range(count):
            start = position + 8
            end = start + unpack(view, position)[0] if start <= size else start
            if end > size:
                raise self.damaged(f"string {len(found)} of {what}", f"an end by byte {size}", position)
            found.append(str(view[start:end], "utf-8", "surrogateescape"))
            position = end
        self.position = position
        return found
