"""The contiguous KV cache of one session."""

from __future__ import annotations

import torch

from fuel_core.contracts.errors import CapacityError, InvalidRequestError, counted
from fuel_core.contracts.state import ModelDims
from fuel_core.kv.storage import allocated, check_dtype, device_of


class KvCache:
    """Keys and values of one session, contiguous and of fixed size.

    Attributes:
        k, v: ``[n_layers, n_kv_heads, max_seq_len, head_dim]``; slots past ``cached_len`` are undefined.
        cached_len: tokens held. A model writes slots first and grows this last, so that a failed step
            leaves the cache as it was.

    Raises:
        InvalidRequestError: no floating-point dtype, or no device of this machine.
        CapacityError: a size below 1, or more memory than there is.
    """

    def __init__(
        self,
        n_layers: int,
        n_kv_heads: int,
        head_dim: int,
        max_seq_len: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
    ) -> None:
        shape = (n_layers, n_kv_heads, max_seq_len, head_dim)
        if min(shape) < 1:
            raise CapacityError(
                f"a KV cache of shape {shape}",
                needed="sizes of at least 1",
                remedy="check the model's dimensions",
            )
        check_dtype(dtype)
        self.dims = ModelDims(n_layers, n_kv_heads, head_dim)
        self.max_seq_len = max_seq_len
        self.dtype = dtype
        self.device = device_of(device)
        self.cached_len = 0
        self.k, self.v = (
            allocated(
                f"a KV cache of shape {list(shape)} in {dtype}",
                "lower the context, the batch or max_new_tokens",
                lambda: torch.empty(shape, dtype=dtype, device=self.device),
            )
            for _ in range(2)
        )

    def truncate(self, n: int) -> None:
        """Forget all but the first ``n`` tokens.

        Raises:
            InvalidRequestError: ``n`` is negative or more than is held.
        """
        if not 0 <= n <= self.cached_len:
            raise InvalidRequestError(
                f"truncate to {counted(n, 'token')}",
                needed=f"a length in [0, {self.cached_len}]",
                remedy="ask cached_len",
            )
        self.cached_len = n

    def release(self) -> None:
        """Free the memory now, whoever still holds this object; it has no room from then on."""
        self.k = self.v = self.k.new_empty(0)
        self.cached_len = self.max_seq_len = 0
