"""Reading a family's config: every key checked, every error naming it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar

import attrs

from fuel_core.contracts.errors import CheckpointError

_T = TypeVar("_T", int, float, bool, str)

# Larger than any model's, and small enough that no arithmetic on them fails or fills the memory.
_MAX_SIZE, _MAX_HEAD_DIM = 2**31 - 1, 2**16


class ConfigReader:
    """Typed reads of a config mapping; ``source`` stands in every message."""

    def __init__(self, config: Mapping[str, Any], source: str) -> None:
        self.config, self.source = config, source

    def get(self, key: str, kind: type[_T], default: _T | None = None) -> _T:
        """The value of ``key``, or ``default`` where it is absent or null.

        Raises:
            CheckpointError: no value and no default, another type, or a float that is negative or not finite.
        """
        value = self.config.get(key)
        if value is None:
            if default is None:
                raise CheckpointError(
                    f"{self.source}: no {key!r} in its config",
                    needed=f"{key}, of type {kind.__name__}",
                    remedy="the config is incomplete: fetch the model again",
                    key=key,
                )
            return default
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value) if abs(value) < 1 << 1000 else math.inf
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise self.unsupported(key, value, f"a value of type {kind.__name__}")
        if isinstance(value, float) and not 0 <= value < math.inf:
            raise self.unsupported(key, value, "a number of at least 0")
        return value

    def size(self, key: str, default: int | None = None) -> int:
        """A dimension: an integer from 1 to 2,147,483,647.

        Raises:
            CheckpointError: absent, or not such an integer.
        """
        value = self.get(key, int, default)
        if not 1 <= value <= _MAX_SIZE:
            raise self.unsupported(key, value, f"an integer in [1, {_MAX_SIZE}]")
        return value

    def require(self, key: str, supported: Any, default: Any) -> None:
        """Refuse the model unless ``key`` has the one value that the family implements.

        Raises:
            CheckpointError: it has another.
        """
        value = self.config.get(key, default)
        if value != supported and value is not None:
            raise self.unsupported(key, value, repr(supported))

    def unsupported(self, key: str, value: Any, needed: str) -> CheckpointError:
        """The error for a value that the family cannot serve."""
        return CheckpointError(
            f"{self.source}: {key} = {value!r}",
            needed=needed,
            remedy="this model needs another family plugin, or its config is damaged",
            key=key,
        )


@attrs.frozen(kw_only=True)
class DecoderSizes:
    """The sizes of a decoder, under the names that Hugging Face configs share."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    tie_word_embeddings: bool

    @classmethod
    def read(cls, config: ConfigReader, *, head_dim: int | None = None) -> DecoderSizes:
        """Read them; ``head_dim`` is the family's default, else hidden size over heads.

        Raises:
            CheckpointError: a needed key is absent, or a value is not one that a decoder can have.
        """
        config.require("quantization_config", None, None)
        heads, hidden = config.size("num_attention_heads"), config.size("hidden_size")
        kv_heads = config.size("num_key_value_heads", heads)
        if heads % kv_heads:
            raise config.unsupported(
                "num_key_value_heads", kv_heads, f"a divisor of the {heads} attention heads"
            )
        dim = config.size("head_dim", head_dim or max(1, hidden // heads))
        if dim % 2 or dim > _MAX_HEAD_DIM:
            needed = f"an even number up to {_MAX_HEAD_DIM}, since RoPE turns pairs"
            raise config.unsupported("head_dim", dim, needed)
        return cls(
            vocab_size=config.size("vocab_size"),
            hidden_size=hidden,
            intermediate_size=config.size("intermediate_size"),
            num_hidden_layers=config.size("num_hidden_layers"),
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=dim,
            rms_norm_eps=config.get("rms_norm_eps", float, 1e-6),
            tie_word_embeddings=config.get("tie_word_embeddings", bool, False),
        )
