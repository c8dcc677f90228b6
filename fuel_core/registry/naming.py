"""How names are compared and errors quoted in messages."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from fuel_core.contracts.errors import FuelError


def nearest(name: str, candidates: Iterable[str]) -> str | None:
    """The candidate that ``name`` most likely misspells, or None if none is close."""
    by_fold = {candidate.casefold(): candidate for candidate in candidates}
    close = difflib.get_close_matches(name.casefold(), by_fold, n=1)
    return by_fold[close[0]] if close else None


def one_of(name: str, candidates: Iterable[str], *, none: str) -> str:
    """``a, b, c (nearest: b)``, or ``none`` where there is no candidate."""
    names = list(candidates)
    close = nearest(name, names)
    listed = f"one of {', '.join(names)}" if names else none
    return f"{listed} (nearest: {close})" if close else listed


def normalize(name: str) -> str:
    """A distribution name without its differences of case and separator (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def one_line(error: BaseException) -> str:
    """The text of an error on one line, after its type unless it is one of ours."""
    try:
        text = " ".join(str(error).split())
    except Exception:
        # A plugin's exception may fail to print, and must not take the report of it down.
        text = "(no readable text)"
    if isinstance(error, FuelError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
