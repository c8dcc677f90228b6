"""How KV memory is measured: integers only."""

from __future__ import annotations

from typing import Any

import attrs

from fuel_core.contracts.errors import CapacityError


def _positive(_: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CapacityError(
            f"{attribute.name} = {value!r}",
            needed="an integer of at least 1",
            remedy=f"change {attribute.name}",
            parameter=attribute.name,
        )


@attrs.frozen
class KvBudget:
    """The KV memory that a scheduler may hand out: ``num_blocks`` blocks of ``block_size`` tokens."""

    block_size: int = attrs.field(validator=_positive)
    num_blocks: int = attrs.field(validator=_positive)


@attrs.frozen
class KvGeometry:
    """The shape of a block pool. A block is ``block_size`` token slots in every layer's K and V.

    ``elem_size`` is bytes per element.

    Raises:
        CapacityError: a field that is not a positive integer.
    """

    n_layers: int = attrs.field(validator=_positive)
    n_kv_heads: int = attrs.field(validator=_positive)
    head_dim: int = attrs.field(validator=_positive)
    num_blocks: int = attrs.field(validator=_positive)
    block_size: int = attrs.field(validator=_positive)
    elem_size: int = attrs.field(validator=_positive)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers, K and V."""
        return 2 * self.n_layers * self.n_kv_heads * self.head_dim * self.block_size * self.elem_size


@attrs.frozen
class PoolCapacity:
    """What a pool has, and how much of it is free, in blocks."""

    geometry: KvGeometry
    free_blocks: int
    total_blocks: int
