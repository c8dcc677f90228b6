"""Every error that Fuel raises on purpose.

An error says in one line what was given, what was needed and what to do, and carries its figures as
attributes, so that a caller can act on them without reading the text.
"""

from __future__ import annotations

from typing import Any


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """``1 token``, ``2 tokens``; the ``plural`` where it is no ``s`` more."""
    return f"{count} {noun if count == 1 else plural or noun + 's'}"


class FuelError(Exception):
    """The base of every error of ours.

    Attributes:
        given: what was asked or found, as text.
        needed: what would have been right.
        remedy: what to do.
        figures: the numbers and names of the case, each an attribute of its own too.
    """

    def __init__(self, given: str, *, needed: str, remedy: str, **figures: Any) -> None:
        """Say what was ``given``, what was ``needed`` and what to do; ``figures`` become attributes."""
        self.given, self.needed, self.remedy, self.figures = given, needed, remedy, figures
        for name, value in figures.items():
            setattr(self, name, value)
        super().__init__(f"{given}; needed: {needed}; {remedy}")


class InvalidRequestError(FuelError):
    """A request that no state of the system could serve: bad ids, lengths or sampling parameters."""


class CheckpointError(FuelError):
    """A file or directory that is not the model it claims to be."""


class DownloadError(FuelError):
    """A model that could not be fetched. Nothing of it is left behind."""


class PluginError(FuelError):
    """A plugin that could not be loaded, or that registers what it may not."""


class ModelContractError(FuelError):
    """A model class whose methods differ from the tiers that it declares, or a call that breaks one."""


class SamplingError(FuelError):
    """Logits that leave nothing to sample from: NaN, +inf, or nothing finite after bans."""


class UnsupportedTierError(FuelError):
    """A call into a tier that the model does not implement."""


class NonUniformStateError(FuelError):
    """A model whose layers do not all keep the same per-head keys and values."""


class UnknownSessionError(FuelError):
    """A session id or handle that was never given out, or whose session is gone. ``session`` is it."""

    session: object

    def __init__(
        self,
        session: object,
        *,
        remedy: str = "use a handle that the pool's open() returned and discard() has not closed",
    ) -> None:
        """Refuse ``session``; the ``remedy`` names the calls of whoever gives such ids out."""
        super().__init__(f"session {session}", needed="a live session", remedy=remedy, session=session)


class CapacityError(FuelError):
    """A request that is larger than the memory set aside for it."""


class OutOfBlocksError(CapacityError):
    """Too few free KV blocks. ``need`` and ``have`` are counts of blocks."""

    need: int
    have: int

    def __init__(
        self,
        need: int,
        have: int,
        *,
        remedy: str = "discard or evict sessions, release prefixes, or build the pool with more blocks",
    ) -> None:
        """Refuse ``need`` blocks where ``have`` are free; the ``remedy`` is for whoever asked."""
        super().__init__(
            f"{counted(need, 'KV block')} asked for, {have or 'none'} free",
            needed=counted(need, "free block"),
            remedy=remedy,
            need=need,
            have=have,
        )


class SessionNotResidentError(FuelError):
    """A use of a slot whose block was evicted. ``slot`` is its index in the session's table."""

    slot: int

    def __init__(self, slot: int) -> None:
        """Name the ``slot``."""
        super().__init__(
            f"slot {slot}, whose block was evicted",
            needed="a resident block",
            remedy="restore the session first",
            slot=slot,
        )


class BadBlockIndexError(FuelError):
    """A slot or block number that is out of range, or named twice."""


class BadSpliceRangeError(FuelError):
    """A range of slots that the source session does not have."""


class OffsetNotBlockAlignedError(FuelError):
    """Whole blocks to be appended after a block that is only partly filled."""

    offset: int
    block_size: int

    def __init__(self, offset: int, block_size: int) -> None:
        """Name the ``offset``, in tokens, that is no multiple of ``block_size``."""
        super().__init__(
            f"whole blocks to append at token {offset}",
            needed=f"a multiple of {block_size}",
            remedy="truncate or fill the session to a block's end first",
            offset=offset,
            block_size=block_size,
        )


class UnknownPrefixError(FuelError):
    """A prefix id that was never given out, or that has been released. ``prefix`` is it."""

    prefix: object

    def __init__(self, prefix: object) -> None:
        """Refuse ``prefix``."""
        super().__init__(
            f"prefix {prefix}",
            needed="a registered prefix",
            remedy="use an id that register_prefix returned and release_prefix has not",
            prefix=prefix,
        )


class PrefixNotFullyFilledError(FuelError):
    """A prefix that is not made of whole blocks which the donor has filled."""


class PrefixTargetNotEmptyError(FuelError):
    """A prefix for position 0 of a session that holds tokens already."""


class PrefixMismatchError(FuelError):
    """A prompt that does not begin with the tokens of the prefix that it is to share."""
