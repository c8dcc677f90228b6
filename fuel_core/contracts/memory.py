"""How much memory is asked for."""

from __future__ import annotations

import re

from fuel_core.contracts.errors import InvalidRequestError

_NUMBER = r"([0-9]{1,15}(?:\.[0-9]{1,15})?)"
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def parse_kv_memory(kv_memory: str | int) -> int | float | None:
    """What ``kv_memory`` asks for: an integer of bytes, a share of the memory in (0, 1], or None for auto.

    A text is a number of bytes, with a ``B`` or without; or one with K, M, G or T, powers of 1000 (``2G``,
    ``2GB``) or with an i of 1024 (``2Gi``, ``2GiB``); or ``40%``; or ``auto``; in letters of either case.

    Raises:
        InvalidRequestError: it is none of these, or not above 0, or a share above 100%.
    """
    asked: int | float
    text = str(kv_memory).strip().upper()
    is_int = isinstance(kv_memory, int) and not isinstance(kv_memory, bool)
    if is_int or re.fullmatch("[0-9]{1,15}", text):
        asked = int(text)
    elif match := re.fullmatch(rf"{_NUMBER} ?(?:B|([KMGT])(I?)B?)", text):
        asked = int(float(match[1]) * (1024 if match[3] else 1000) ** _POWERS[match[2] or ""])
    elif match := re.fullmatch(rf"{_NUMBER} ?%", text):
        asked = float(match[1]) / 100
    elif text == "AUTO":
        return None
    else:
        raise _bad(kv_memory)
    if asked <= 0 or (isinstance(asked, float) and asked > 1):
        raise _bad(kv_memory)
    return asked


def _bad(kv_memory: object) -> InvalidRequestError:
    return InvalidRequestError(
        f"KV memory {kv_memory!r}",
        needed="bytes or a size above 0, such as 2GiB, a share above 0% and up to 100%, or auto",
        remedy="write one of these",
    )
