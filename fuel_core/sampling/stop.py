"""Stop strings, found in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

from fuel_core.contracts.errors import InvalidRequestError


class _Matcher:
    """How far the text's end matches one string (Knuth, Morris and Pratt): one step per character."""

    def __init__(self, pattern: str) -> None:
        self.pattern, self.matched = pattern, 0
        self._fallback = [0]
        for character in pattern[1:]:
            self._fallback.append(self._longest(self._fallback[-1], character))

    def advance(self, character: str) -> bool:
        """Whether the text now ends with the pattern; ``matched`` is the longest prefix that it ends with."""
        self.matched = self._longest(self.matched, character)
        return self.matched == len(self.pattern)

    def pass_over(self) -> None:
        """Let a whole match be plain text, but for its end that another match begins with."""
        if self.matched == len(self.pattern):
            self.matched = self._fallback[-1]

    def _longest(self, matched: int, character: str) -> int:
        while matched and self.pattern[matched] != character:
            matched = self._fallback[matched - 1]
        return matched + (self.pattern[matched] == character)


class StopStrings:
    """Cuts a text at the first stop string, and emits no character too early.

    The match that *completes* first wins; of those that complete at one character, the longest. The text is
    cut where that match starts. So the outcome depends on the text alone, not on its pieces, and is known as
    soon as the match is whole. A longer one that began earlier and is not whole by then is plain text.

    Until then the longest end of the text that some stop string begins with is held back, and no more. A
    match that completes where the text may not end yet is plain text; one that only began there counts.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        """Look for any of ``stop``.

        Raises:
            InvalidRequestError: one is empty.
        """
        if "" in stop:
            raise InvalidRequestError(
                f"stop = {tuple(stop)!r}",
                needed="strings of at least one character",
                remedy="drop the empty one",
                parameter="stop",
            )
        self._matchers = [_Matcher(text) for text in stop]
        self._held = ""
        self.stopped = False

    def feed(self, text: str, *, may_end: bool = True) -> tuple[str, bool]:
        """Take the next piece; ``may_end``: whether a match that it completes ends the text.

        Returns:
            What may be emitted now, and whether a stop string was found, in this piece or before. After that
            nothing is emitted any more.
        """
        if self.stopped:
            return "", True
        if not self._matchers:
            return text, False
        return self._scan(self._held + text, len(self._held), may_end)

    def _scan(self, pending: str, start: int, may_end: bool) -> tuple[str, bool]:
        for end in range(start, len(pending)):
            if (whole := self._complete(pending[end])) and may_end:
                self._held, self.stopped = "", True
                return pending[: end + 1 - whole], True
            for matcher in self._matchers if whole else ():
                matcher.pass_over()
        cut = len(pending) - max(matcher.matched for matcher in self._matchers)
        self._held = pending[cut:]
        return pending[:cut], False

    def _complete(self, character: str) -> int:
        """Advance by one character; the length of the longest stop string that it completes, or 0."""
        whole = [matcher.advance(character) for matcher in self._matchers]
        lengths = (len(matcher.pattern) for matcher in self._matchers)
        return max(compress(lengths, whole), default=0)

    def flush(self) -> str:
        """What is held back, to be emitted when the text ends without a stop string; "" after one."""
        held, self._held = self._held, ""
        return held
