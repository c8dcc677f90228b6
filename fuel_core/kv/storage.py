"""The bytes of a pool's blocks: K and V of every layer, on one device."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from enum import Enum

import torch
from torch import Tensor

from fuel_core.contracts.errors import CapacityError, InvalidRequestError
from fuel_core.kv.geometry import KvGeometry, check_geometry

_alloc_ids = itertools.count()


class BlockKind(Enum):
    """Which of a layer's two buffers."""

    K = 0
    V = 1


class BlockStorage:
    """K and V buffers of all layers, zeroed. A block is the same slots in every one of them.

    Attributes:
        geometry, dtype, device: what it was built with.
        alloc_id: the identity of the buffers; no two storages of a process share one.

    Raises:
        InvalidRequestError: no KvGeometry, no floating-point dtype, or no device of this machine.
        CapacityError: ``geometry.elem_size`` is not the dtype's, or there is no memory.
    """

    def __init__(
        self, geometry: KvGeometry, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
    ) -> None:
        check_geometry(geometry)
        check_dtype(dtype)
        if geometry.elem_size != dtype.itemsize:
            raise CapacityError(
                f"a geometry of {geometry.elem_size} bytes per element for {dtype}",
                needed=f"elem_size = {dtype.itemsize}",
                remedy="build the geometry with dtype.itemsize",
            )
        self.geometry, self.dtype, self.device = geometry, dtype, device_of(device)
        self.alloc_id = next(_alloc_ids)
        shape = (geometry.n_layers, 2, *self.pool_shape)
        self._buffers = allocated(
            f"a KV pool of {geometry.num_blocks * geometry.block_bytes} bytes on {self.device}",
            "lower num_blocks, or size the pool with fit_to_budget",
            lambda: torch.zeros(shape, dtype=dtype, device=self.device),
        )

    @property
    def pool_shape(self) -> tuple[int, int, int, int]:
        """``[num_blocks, block_size, n_kv_heads, head_dim]`` of one buffer."""
        g = self.geometry
        return g.num_blocks, g.block_size, g.n_kv_heads, g.head_dim

    @property
    def pool_shape_flat(self) -> tuple[int, int, int]:
        """``[num_blocks * block_size, n_kv_heads, head_dim]``: the same, a row per token slot."""
        g = self.geometry
        return g.num_blocks * g.block_size, g.n_kv_heads, g.head_dim

    def k_pool(self, layer: int) -> Tensor:
        """K of one layer, shaped as :attr:`pool_shape`: a view.

        Raises:
            InvalidRequestError: no such layer.
        """
        return self._buffer(layer, BlockKind.K)

    def v_pool(self, layer: int) -> Tensor:
        """V of one layer; see :meth:`k_pool`."""
        return self._buffer(layer, BlockKind.V)

    def _buffer(self, layer: int, kind: BlockKind) -> Tensor:
        if not 0 <= layer < self.geometry.n_layers:
            raise outside("layer", layer, self.geometry.n_layers)
        return self._buffers[layer, kind.value]

    def block_write_ranges(self, block: int) -> tuple[tuple[int, int], ...]:
        """The ``(start, end)`` of a block along each axis of :attr:`pool_shape`.

        Raises:
            InvalidRequestError: no such block.
        """
        self.check_block(block)
        _, *inner = self.pool_shape
        return (block, block + 1), *((0, size) for size in inner)

    # -- blocks in and out ---------------------------------------------------------------------

    def write_block(self, layer: int, kind: BlockKind, block: int, values: Tensor) -> None:
        """Set a block to ``values [block_size, n_kv_heads, head_dim]`` of the pool's dtype.

        Raises:
            InvalidRequestError: no such layer or block, or another shape or dtype. Nothing is written.
        """
        view = self._block(layer, kind, block)
        if values.shape != view.shape or values.dtype != self.dtype:
            raise InvalidRequestError(
                f"a block of shape {list(values.shape)} in {values.dtype}",
                needed=f"{list(view.shape)} in {self.dtype}",
                remedy="reshape or convert it first",
            )
        view.copy_(values)

    def read_block(self, layer: int, kind: BlockKind, block: int) -> Tensor:
        """A copy of a block, ``[block_size, n_kv_heads, head_dim]`` on the pool's device.

        Raises:
            InvalidRequestError: no such layer or block.
        """
        return self._block(layer, kind, block).clone()

    def write_block_bytes(self, layer: int, kind: BlockKind, block: int, data: bytes) -> None:
        """Set a block to the bytes that :meth:`read_block_bytes` gave, in any dtype.

        Raises:
            InvalidRequestError: no such layer or block, or another length. Nothing is written.
        """
        view = self._block(layer, kind, block)
        if len(data) != view.nbytes:
            raise InvalidRequestError(
                f"{len(data)} bytes for a block", needed=f"{view.nbytes} bytes", remedy="pass a whole block"
            )
        view.copy_(torch.frombuffer(bytearray(data), dtype=self.dtype).view(view.shape))

    def read_block_bytes(self, layer: int, kind: BlockKind, block: int) -> bytes:
        """The bytes of a block, exactly.

        Raises:
            InvalidRequestError: no such layer or block.
        """
        values = self._block(layer, kind, block).contiguous().cpu()
        return values.view(torch.uint8).numpy().tobytes()

    def _block(self, layer: int, kind: BlockKind, block: int) -> Tensor:
        self.check_block(block)
        return self._buffer(layer, kind)[block]

    def check_block(self, block: int) -> None:
        """A block of this storage.

        Raises:
            InvalidRequestError: there is none of this number.
        """
        if not 0 <= block < self.geometry.num_blocks:
            raise outside("block", block, self.geometry.num_blocks)

    def copy_block(self, source: int, target: int) -> None:
        """Copy a block in every layer, K and V.

        Raises:
            InvalidRequestError: no such block.
        """
        self.check_block(source)
        self.check_block(target)
        self._buffers[:, :, target].copy_(self._buffers[:, :, source])

    # What is contiguous a device copies straight to the host and back; for anything else it needs memory.

    def block_to_host(self, block: int) -> Tensor:
        """A copy of a block of every layer, ``[n_layers, 2, block_size, n_kv_heads, head_dim]`` on the CPU.

        Raises:
            InvalidRequestError: no such block.
        """
        self.check_block(block)
        parts = torch.stack([part[block].to("cpu") for part in self._parts()])
        return parts.view(self.geometry.n_layers, 2, *self.pool_shape[1:])

    def block_from_host(self, block: int, data: Tensor) -> None:
        """Set a block of every layer to what :meth:`block_to_host` gave.

        Raises:
            InvalidRequestError: no such block.
        """
        self.check_block(block)
        for part, values in zip(self._parts(), data.flatten(0, 1), strict=True):
            part[block].copy_(values)

    def _parts(self) -> Iterator[Tensor]:
        """K and V of each layer in turn."""
        return iter(self._buffers.flatten(0, 1))


def check_dtype(dtype: object) -> None:
    """A type that keys and values can be kept in.

    Raises:
        InvalidRequestError: it is no floating-point type of torch.
    """
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise InvalidRequestError(
            f"keys and values in {dtype!r}",
            needed="a floating-point torch.dtype",
            remedy="pass torch.float32",
        )


def device_of(device: str | torch.device) -> torch.device:
    """A device of this machine, by its name.

    Raises:
        InvalidRequestError: there is none of this name.
    """
    try:
        torch.empty(0, device=device)
        return torch.device(device)
    except Exception as error:  # torch raises half a dozen kinds for a bad name and an absent device
        raise InvalidRequestError(
            f"device {str(device)!r}",
            needed="a device of this machine: cpu or cuda",
            remedy="see fuel doctor",
        ) from error


def allocated(what: str, remedy: str, make: Callable[[], Tensor]) -> Tensor:
    """What ``make`` makes.

    Raises:
        CapacityError: there is no memory for ``what``.
    """
    try:
        return make()
    except (RuntimeError, MemoryError) as error:  # torch reports a failed allocation as RuntimeError
        raise CapacityError(what, needed="that much free memory", remedy=remedy) from error


def outside(what: str, given: int, size: int) -> InvalidRequestError:
    """The error for an index that is not one."""
    return InvalidRequestError(
        f"{what} {given}", needed=f"a {what} in [0, {size})", remedy="ask the pool's geometry"
    )
