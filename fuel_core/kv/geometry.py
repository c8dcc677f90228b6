"""How KV memory is measured: integers only."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NoReturn

import attrs

from fuel_core.contracts.errors import CapacityError, InvalidRequestError


def _refuse(attribute: attrs.Attribute[Any], value: Any, needed: str) -> NoReturn:
    raise CapacityError(
        f"{attribute.name} = {value!r}",
        needed=needed,
        remedy=f"change {attribute.name}",
        parameter=attribute.name,
    )


def _at_least(low: int) -> Callable[[object, attrs.Attribute[Any], Any], None]:
    def check(_: object, attribute: attrs.Attribute[Any], value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            _refuse(attribute, value, f"an integer of at least {low}")

    return check


def _share(_: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        _refuse(attribute, value, "a number above 0 and at most 1")


@attrs.frozen
class KvBudget:
    """The KV memory that a scheduler may hand out: ``num_blocks`` blocks of ``block_size`` tokens."""

    block_size: int = attrs.field(validator=_at_least(1))
    num_blocks: int = attrs.field(validator=_at_least(1))


@attrs.frozen
class KvMemoryBudget:
    """What a device has for KV: its share of the memory, less what else stays resident there.

    Attributes:
        device_bytes: the device's memory.
        utilization: the part of it that may be used at all, in (0, 1], as the decimal that it prints as.
        non_kv_resident_bytes: weights, activations and whatever else lives beside the blocks.

    Raises:
        CapacityError: a field outside its range.
    """

    device_bytes: int = attrs.field(validator=_at_least(1))
    utilization: float = attrs.field(validator=_share)
    non_kv_resident_bytes: int = attrs.field(validator=_at_least(0))

    @property
    def kv_bytes(self) -> int:
        """Bytes that are left for blocks, 0 or more."""
        # In binary 0.7 * 10 bytes would be 6: neither the product nor the factor is what was written.
        usable = math.floor(Fraction(str(float(self.utilization))) * self.device_bytes)
        return max(0, usable - self.non_kv_resident_bytes)


@attrs.frozen
class KvGeometry:
    """The shape of a block pool. A block is ``block_size`` token slots in every layer's K and V.

    ``elem_size`` is bytes per element.

    Raises:
        CapacityError: a field that is not a positive integer.
    """

    n_layers: int = attrs.field(validator=_at_least(1))
    n_kv_heads: int = attrs.field(validator=_at_least(1))
    head_dim: int = attrs.field(validator=_at_least(1))
    num_blocks: int = attrs.field(validator=_at_least(1))
    block_size: int = attrs.field(validator=_at_least(1))
    elem_size: int = attrs.field(validator=_at_least(1))

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers, K and V."""
        return 2 * self.n_layers * self.n_kv_heads * self.head_dim * self.block_size * self.elem_size

    def fit_to_budget(self, budget: KvMemoryBudget) -> KvGeometry:
        """The same geometry with as many blocks as the budget holds.

        Raises:
            CapacityError: not one block fits; ``need`` and ``have`` are bytes.
        """
        blocks = budget.kv_bytes // self.block_bytes
        if blocks < 1:
            raise CapacityError(
                f"{budget.kv_bytes} bytes for KV blocks",
                needed=f"{self.block_bytes} bytes, the size of one block",
                remedy="give more KV memory; where the device has no more, stop what else runs there, or run "
                "it with a shorter context or fewer sessions",
                need=self.block_bytes,
                have=budget.kv_bytes,
            )
        return attrs.evolve(self, num_blocks=blocks)


def check_geometry(geometry: object) -> None:
    """What a pool is built from.

    Raises:
        InvalidRequestError: something else than a KvGeometry.
    """
    if not isinstance(geometry, KvGeometry):
        raise InvalidRequestError(
            f"a pool of {type(geometry).__name__}",
            needed="a KvGeometry, which says how large a block is",
            remedy="build one from the model's dimensions",
        )


@attrs.frozen
class PoolCapacity:
    """What a pool has, and how much of it is free, in blocks."""

    geometry: KvGeometry
    free_blocks: int
    total_blocks: int
