"""Rotary position embedding and its scalings: a config in, inverse frequencies out.

Sources: RoFormer (arXiv:2104.09864), position interpolation (arXiv:2306.15595), YaRN (arXiv:2309.00071), and
the Llama 3.1 reference code; the keys are those of Hugging Face configs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from fuel_core.contracts.errors import CheckpointError


@attrs.frozen(eq=False)
class Rope:
    """The rotation of a model.

    Attributes:
        inv_freq: float32 ``[D/2]``, radians per position.
        attention_factor: multiplies cos and sin (YaRN's temperature), else 1.
        max_context: the most positions that this scaling is good for.
    """

    inv_freq: Tensor
    attention_factor: float
    max_context: int

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cos and sin, float32 ``[T, D/2]``, of int64 ``positions [T]``."""
        angles = positions[:, None].float() * self.inv_freq  # [T, D/2]
        return angles.cos() * self.attention_factor, angles.sin() * self.attention_factor

    def to(self, device: str | torch.device) -> Rope:
        """The same rotation with its frequencies on ``device``."""
        return attrs.evolve(self, inv_freq=self.inv_freq.to(device))


def rope_from_config(config: Mapping[str, Any], head_dim: int) -> Rope:
    """Read ``rope_parameters`` or ``rope_scaling`` (and ``rope_type`` or ``type`` in it).

    Raises:
        CheckpointError: a scaling that is not supported, or one whose keys are missing or out of range.
    """
    rope = _Parameters(config, head_dim)
    kind = rope.kind
    if kind not in _SCALINGS:
        raise CheckpointError(
            f"RoPE scaling {kind!r}",
            needed=f"one of {', '.join(sorted(_SCALINGS))}",
            remedy="this model needs a newer fuel-core or another family plugin",
            key="rope_type",
        )
    return _SCALINGS[kind](rope)


class _Parameters:
    """The RoPE keys of a config, wherever and however they are spelled."""

    def __init__(self, config: Mapping[str, Any], head_dim: int) -> None:
        self._config = config
        # The older key wins, as in Transformers: people add it to a config that has the newer one.
        self._keys = config.get("rope_scaling") or config.get("rope_parameters") or {}
        if not isinstance(self._keys, Mapping) or any(isinstance(v, Mapping) for v in self._keys.values()):
            raise CheckpointError(
                f"rope parameters {self._keys!r}",
                needed="an object of numbers and names, one for all layers",
                remedy="correct config.json",
                key="rope_parameters",
            )
        self.kind = str(self._keys.get("rope_type", self._keys.get("type", "default")))
        if self.kind == "default" and self._keys.get("factor") not in (None, 1, 1.0):
            raise CheckpointError(
                f"a RoPE factor of {self._keys['factor']!r} without a type of scaling",
                needed="rope_type beside it",
                remedy="correct config.json",
            )
        self.head_dim = head_dim
        partial = self._anywhere("partial_rotary_factor", 1.0)
        if partial != 1.0:
            raise CheckpointError(
                f"partial_rotary_factor = {partial!r}",
                needed="1, the rotation of the whole head",
                remedy="this model needs another family plugin",
                key="partial_rotary_factor",
            )

    def _anywhere(self, key: str, default: float) -> Any:
        """A value that may stand among the RoPE keys or beside them, null counting as absent."""
        newer = self._config.get("rope_parameters")
        places = (self._keys, self._config, newer if isinstance(newer, Mapping) else {})
        return next((place[key] for place in places if place.get(key) is not None), default)

    def optional(self, key: str, default: float) -> float:
        """A number, or the default where the key is absent or null."""
        value = self._keys.get(key)
        return default if value is None else self._number(key, value)

    def required(self, key: str) -> float:
        """A positive number that the scaling cannot do without."""
        value = self._keys.get(key)
        if value is None:
            raise CheckpointError(
                f"RoPE scaling {self.kind!r} without {key!r}",
                needed=f"{key} in its parameters",
                remedy="correct config.json",
                key=key,
            )
        return self._number(key, value)

    def raw(self, key: str) -> Any:
        """The value as it stands, None where absent."""
        return self._keys.get(key)

    @property
    def max_positions(self) -> int:
        """``max_position_embeddings``."""
        return self._length("max_position_embeddings", self._config.get("max_position_embeddings", 2048))

    @property
    def original(self) -> int:
        """The length that the model was pretrained for."""
        value = self._config.get("original_max_position_embeddings")
        value = self._keys.get("original_max_position_embeddings") if value is None else value
        return (
            self.max_positions if value is None else self._length("original_max_position_embeddings", value)
        )

    @property
    def theta(self) -> float:
        """The base of the frequencies."""
        theta = self._number("rope_theta", self._anywhere("rope_theta", 10000.0))
        if theta <= 1:
            raise CheckpointError(
                f"rope_theta = {theta:g}",
                needed="more than 1",
                remedy="correct config.json",
                key="rope_theta",
            )
        return theta

    def inv_freq(self) -> Tensor:
        """The frequencies without any scaling, float32 ``[D/2]``."""
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.int64).float() / self.head_dim
        return 1.0 / self.theta**exponents

    def _length(self, key: str, value: Any) -> int:
        length = self._number(key, value)
        if length != int(length):
            raise CheckpointError(
                f"{key} = {value!r}", needed="a whole number", remedy="correct config.json", key=key
            )
        return int(length)

    def _number(self, key: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e300:
            raise CheckpointError(
                f"{key} = {value!r}", needed="a positive number", remedy="correct config.json", key=key
            )
        return float(value)


def _default(rope: _Parameters) -> Rope:
    return Rope(rope.inv_freq(), 1.0, rope.max_positions)


def _linear(rope: _Parameters) -> Rope:
    return Rope(rope.inv_freq() / rope.required("factor"), 1.0, rope.max_positions)


def _dynamic(rope: _Parameters) -> Rope:
    # Beyond the original length the angles depend on how a prompt is cut, so this stops there.
    rope.required("factor")
    return Rope(rope.inv_freq(), 1.0, min(rope.original, rope.max_positions))


def _llama3(rope: _Parameters) -> Rope:
    """Llama 3.1: long wavelengths are stretched, short ones kept, those between interpolated."""
    factor, original = rope.required("factor"), rope.original
    low, high = rope.required("low_freq_factor"), rope.required("high_freq_factor")
    if low >= high:
        raise CheckpointError(
            f"low_freq_factor {low:g}, high_freq_factor {high:g}",
            needed="low < high",
            remedy="correct config.json",
            key="low_freq_factor",
        )
    inv_freq = rope.inv_freq()
    turns = original * inv_freq / (2 * math.pi)  # full turns within the original context
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return Rope((1 - keep) * inv_freq / factor + keep * inv_freq, 1.0, rope.max_positions)


def _yarn(rope: _Parameters) -> Rope:
    original = rope.original
    factor = rope.optional("factor", rope.max_positions / original)
    inv_freq = rope.inv_freq()
    low, high = _yarn_range(rope, original)
    ramp = ((torch.arange(rope.head_dim // 2).float() - low) / (high - low)).clamp(0, 1)
    scaled = inv_freq / factor * ramp + inv_freq * (1 - ramp)
    return Rope(
        scaled, _yarn_attention_factor(rope, factor), max(rope.max_positions, round(original * factor))
    )


def _yarn_range(rope: _Parameters, original: int) -> tuple[float, float]:
    """The dimensions between which YaRN passes from keeping to interpolating (its equations 20 to 23)."""

    def dimension(turns: float) -> float:
        return rope.head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.optional("beta_fast", 32)), dimension(rope.optional("beta_slow", 1))
    if rope.raw("truncate") is not False:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.head_dim - 1)
    return low, high if high != low else high + 0.001


def _yarn_attention_factor(rope: _Parameters, factor: float) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    both = rope.raw("mscale") and rope.raw("mscale_all_dim")
    default = (
        mscale(rope.required("mscale")) / mscale(rope.required("mscale_all_dim")) if both else mscale(1.0)
    )
    return rope.optional("attention_factor", default)


def _divisors(rope: _Parameters) -> Rope:
    """Frequencies divided one by one: how GGUF files carry the Llama 3.1 scaling (``rope_freqs``)."""
    divisors = torch.as_tensor(rope.raw("divisors"), dtype=torch.float32)
    if divisors.shape != (rope.head_dim // 2,) or not bool((divisors > 0).all()):
        raise CheckpointError(
            f"RoPE divisors of shape {list(divisors.shape)}",
            needed=f"{rope.head_dim // 2} positive numbers",
            remedy="the file is damaged: fetch it again",
        )
    return Rope(rope.inv_freq() / divisors, 1.0, rope.max_positions)


_SCALINGS: Mapping[str, Callable[[_Parameters], Rope]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "divisors": _divisors,
}
