"""Every error that Fuel raises on purpose.

An error says in one line what was given, what was needed and what to do, and carries its figures as
attributes, so that a caller can act on them without reading the text.
"""

from __future__ import annotations

from typing import Any


class FuelError(Exception):
    """The base of every error of ours.

    Attributes: ``given``, ``needed`` and ``remedy`` (text), and each keyword figure under its name.
    """

    def __init__(self, given: str, *, needed: str, remedy: str, **figures: Any) -> None:
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
    """A session id or handle that was never given out, or that has been reaped."""

    def __init__(self, session: object) -> None:
        super().__init__(
            f"session {session}",
            needed="a live session",
            remedy="use an id that add_session returned and reap_finished has not",
            session=session,
        )


class CapacityError(FuelError):
    """A request that is larger than the memory set aside for it."""


class OutOfBlocksError(CapacityError):
    """Too few free KV blocks. ``need`` and ``have`` are counts of blocks."""

    need: int
    have: int

    def __init__(self, need: int, have: int) -> None:
        super().__init__(
            f"{need} KV blocks asked for, {have} free",
            needed=f"at most {have}",
            remedy="reap finished sessions, wait for others to finish, or raise the KV budget",
            need=need,
            have=have,
        )
