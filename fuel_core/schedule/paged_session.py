"""A session of the paged scheduler, and what a prompt must be to share a prefix."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fuel_core.contracts.errors import InvalidRequestError, PrefixMismatchError, counted
from fuel_core.kv.device_pool import DeviceEvicted
from fuel_core.kv.pool import SessionHandle
from fuel_core.schedule.session import Session


class PagedSession(Session):
    """A session whose keys and values are in a pool.

    Attributes:
        handle: its session there.
        suspended: its blocks while it is evicted, else None.
        captured: its logits so far, while they are captured, else None.
        max_blocks: the most blocks that it may come to hold.
    """

    handle: SessionHandle
    max_blocks: int
    suspended: DeviceEvicted | None = None
    captured: list[Tensor] | None = None


def check_begins(prompt: Sequence[int], prefix: Sequence[int]) -> None:
    """A prompt that begins with the prefix and goes on.

    Raises:
        PrefixMismatchError, InvalidRequestError: which of the two it does not.
    """
    for place, (given, shared) in enumerate(zip(prompt, prefix, strict=False)):
        if given != shared:
            raise PrefixMismatchError(
                f"token {given} at position {place} of the prompt",
                needed=f"{shared}, which the prefix has there",
                remedy="share a prefix that the prompt begins with, or none",
                place=place,
            )
    if len(prompt) <= len(prefix):
        raise InvalidRequestError(
            f"a prompt of {counted(len(prompt), 'token')} to share a prefix of {len(prefix)}",
            needed="at least one token after the prefix",
            remedy="register a shorter prefix, or add the session without it",
        )
