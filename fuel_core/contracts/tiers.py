"""The tiers: how much of the model interface a model implements.

Every method is a pluggy hook specification, and an implementation carries ``@hookimpl``: that is how a
class is compared with the tier that it claims when it is first loaded. The token loop calls the methods
directly.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs

from fuel_core.contracts.errors import UnsupportedTierError
from fuel_core.contracts.markers import hookimpl, hookspec
from fuel_core.contracts.session import DecodeSession, PagedDecodePlan
from fuel_core.contracts.state import LayerStateSpec

if TYPE_CHECKING:
    import torch


class DecodeModel(ABC):
    """The core tier: a model that continues one session, and optionally a lockstep batch of them."""

    @hookspec
    @abstractmethod
    def n_layers(self) -> int:
        """The number of layers."""

    @hookspec
    @abstractmethod
    def vocab_size(self) -> int:
        """The number of logits, and one more than the largest token id."""

    @hookspec
    @abstractmethod
    def max_context(self) -> int | None:
        """The most tokens of prompt and output together, or None if there is no limit."""

    @hookspec
    @abstractmethod
    def layer_state_specs(self) -> Sequence[LayerStateSpec]:
        """What each layer keeps between steps, one entry per layer."""

    @hookspec
    @abstractmethod
    def forward_with_kv_context_persistent(
        self, tokens: Sequence[int], cache: Any, session: DecodeSession
    ) -> torch.Tensor:
        """Run ``tokens`` after what ``cache`` holds: the whole prompt, a chunk, or one token.

        Returns:
            float32 logits ``[vocab]`` of the last token. The cache has grown by ``len(tokens)``.

        Raises:
            InvalidRequestError: no tokens, an id outside ``[0, vocab)``, or more than the context.
            CapacityError: more tokens than the cache has room for.
            ModelContractError: a cache of another geometry.
            On any error the cache is as long as it was.
        """

    @hookspec
    @hookimpl
    def supports_batched_decode(self) -> bool:
        """Whether :meth:`build_batched_decode_logits` is implemented."""
        return False

    @hookspec
    @hookimpl
    def build_batched_decode_logits(
        self,
        caches: Sequence[Any],
        last_tokens: Sequence[int],
        device: str | torch.device,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """One decode step of K sessions whose caches hold equally many tokens.

        Everything is validated before any cache is written: all or nothing.

        Returns:
            float32 logits ``[K, vocab]``, in the order of ``caches``.

        Raises:
            UnsupportedTierError: the model has no batched arm.
            ModelContractError: counts, lengths, geometries or dtypes differ.
        """
        raise UnsupportedTierError(
            f"{type(self).__name__} implements only the core DecodeModel surface",
            needed="a batched decode arm",
            remedy="ask supports_batched_decode() first, or decode the sessions one by one",
        )


class PagedDecodeModel(DecodeModel):
    """The paged tier: sessions live in the blocks of one shared pool."""

    @hookspec
    @abstractmethod
    def forward_paged_step(self, token: int, pool: Any, session: Any) -> torch.Tensor:
        """Append ``token`` to the pool session and return its float32 logits ``[vocab]``."""

    @hookspec
    @abstractmethod
    def forward_paged_step_batched(
        self, tokens: Sequence[int], pool: Any, sessions: Sequence[Any]
    ) -> torch.Tensor:
        """One token for each of K pool sessions at one position: float32 logits ``[K, vocab]``."""

    @hookspec
    @abstractmethod
    def forward_paged_step_persistent(
        self,
        token: int,
        pool: Any,
        session: Any,
        max_blocks_cap: int,
        plan: PagedDecodePlan,
        decode_session: DecodeSession,
    ) -> torch.Tensor:
        """:meth:`forward_paged_step` with a plan that ``decode_session`` keeps between tokens.

        ``max_blocks_cap`` is the width of the block table that the plan is built for.
        """


@attrs.frozen(eq=False)
class RaggedBatch:
    """New tokens of any number of pool sessions: ``tokens[i]`` are the new ids of ``sessions[i]``."""

    pool: Any
    sessions: tuple[Any, ...]
    tokens: tuple[tuple[int, ...], ...]


class RaggedDecodeModel(PagedDecodeModel):
    """The ragged tier: prompt chunks and single tokens of many sessions in one pass."""

    @hookspec
    @abstractmethod
    def forward_paged_ragged(self, batch: RaggedBatch) -> torch.Tensor:
        """Append every session's tokens; float32 logits ``[n_sessions, vocab]`` of each last one."""
