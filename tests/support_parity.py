"""Small random Transformers models, the same files as Fuel loads them, and how closely the two must agree."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import torch
import transformers
from support_rope import exact_rotation
from torch import Tensor, nn

from fuel_core import registry
from fuel_core.contracts import Checkpoint, DecodeModel, DecodeSession, ModelDims, QuantizedTensor
from fuel_core.kv import KvCache
from fuel_core.weights import MemoryCheckpoint

transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()

TOLERANCE = 1e-4
"""The most that logits may differ from the truth, relative to the largest of them."""

SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 51,
    "intermediate_size": 70,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 10,
    "rms_norm_eps": 1e-3,
    "max_position_embeddings": 512,
}
"""Odd sizes throughout, an epsilon that is felt, and every query head on one KV head."""


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Models as small as these lose more by waking threads than they gain."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def random_ids(count: int, vocab: int = SMALL["vocab_size"], seed: int = 0) -> list[int]:
    """Token ids that do not repeat in a pattern."""
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(0, vocab, (count,), generator=generator).tolist()
    return ids


def randomize(model: nn.Module, seed: int = 0) -> None:
    """Matrices of deviation ``1/sqrt(columns)``, gains near one, and biases that matter."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.ndim == 2:
                noise /= math.sqrt(weight.shape[1])
            elif name.endswith("bias"):
                noise *= 0.3
            else:
                noise = 1 + 0.2 * noise
            weight.copy_(noise)


def write_model(
    path: Path, architecture: str = "LlamaForCausalLM", *, shard: str = "5GB", **config: Any
) -> Path:
    """Save a random model of Transformers, with the sizes of :data:`SMALL` where ``config`` has no other."""
    cls = getattr(transformers, architecture)
    model = cls(cls.config_class(**{**SMALL, **config}))
    randomize(model)
    model.save_pretrained(path, max_shard_size=shard)
    return path


def read_config(path: Path) -> dict[str, Any]:
    """What stands in config.json."""
    config: dict[str, Any] = json.loads((path / "config.json").read_text(encoding="utf-8"))
    return config


def respell(path: Path, into: Path, *, drop: Iterable[str] = (), **changes: Any) -> Path:
    """The same weights under another config.json."""
    shutil.copytree(path, into)
    config = read_config(path)
    for key in drop:
        del config[key]
    (into / "config.json").write_text(json.dumps({**config, **changes}), encoding="utf-8")
    return into


def load(source: Path | Checkpoint, dtype: torch.dtype = torch.float32) -> DecodeModel:
    """Load through the registry, as the engine does."""
    checkpoint = registry.open_checkpoint(source) if isinstance(source, Path) else source
    return registry.load_model(registry.family_for(checkpoint), checkpoint, device="cpu", dtype=dtype)


def altered(
    source: Path,
    change: Callable[[str, Any], Any] = lambda name, tensor: tensor,
    *,
    drop: Iterable[str] = (),
    add: Mapping[str, Tensor | QuantizedTensor] | None = None,
    **config: Any,
) -> MemoryCheckpoint:
    """The checkpoint with tensors changed, dropped or added, and other config values: a fault to find."""
    checkpoint = registry.open_checkpoint(source)

    def make(name: str) -> Any:
        return change(name, checkpoint.tensor(name))

    tensors: dict[str, Callable[[], Any]] = {
        name: partial(make, name) for name in checkpoint if name not in set(drop)
    }
    tensors |= {name: partial(_same, tensor) for name, tensor in (add or {}).items()}
    return MemoryCheckpoint(
        source=checkpoint.source,
        format=checkpoint.format,
        architecture=checkpoint.architecture,
        config={key: value for key, value in {**checkpoint.config, **config}.items() if value is not DROPPED},
        tensors=tensors,
    )


DROPPED = object()
"""As a value for :func:`altered`: the config has no such key."""


def _same(tensor: Any) -> Any:
    return tensor


def new_cache(model: DecodeModel, size: int, dtype: torch.dtype = torch.float32) -> KvCache:
    """A cache whose slots are poisoned: reading one that was not written shows."""
    dims = ModelDims.from_model(model)
    cache = KvCache(dims.n_layers, dims.n_kv_heads, dims.head_dim, size, dtype=dtype)
    cache.k.fill_(math.nan)
    cache.v.fill_(math.nan)
    return cache


@one_thread()
def run(
    model: DecodeModel, ids: Sequence[int], ends: Sequence[int], dtype: torch.dtype = torch.float32
) -> Tensor:
    """Feed ``ids`` in chunks that end at ``ends``: ``[len(ends), vocab]``, the logits after each chunk."""
    # Some room to spare, of which nothing may be read.
    cache = new_cache(model, ends[-1] + 3, dtype)
    starts = [0, *ends[:-1]]
    rows = [
        model.forward_with_kv_context_persistent(ids[start:end], cache, DecodeSession())
        for start, end in zip(starts, ends, strict=True)
    ]
    return torch.stack(rows)


@attrs.frozen(eq=False)
class Oracle:
    """What the model's logits are at each position of ``ids``, ``[T, vocab]``.

    Attributes:
        plain: as Transformers computes them in float32, with explicit softmax.
        truth: as Transformers computes them in float64, norms and rotary angles included.
    """

    ids: list[int]
    plain: Tensor
    truth: Tensor

    @property
    def noise(self) -> float:
        """What float32 costs Transformers."""
        return distance(self.plain, self.truth, self.truth)

    def distance(self, rows: Tensor, ends: Sequence[int]) -> float:
        """Of logits after ``ends`` tokens from the truth, relative to the largest logit."""
        places = torch.tensor(ends) - 1
        return distance(rows, self.truth[places], self.truth)


def distance(ours: Tensor, theirs: Tensor, scale: Tensor) -> float:
    """The largest difference, relative to the largest value of ``scale``; NaN is infinitely far."""
    apart = (ours.double() - theirs.double()).abs().nan_to_num(nan=math.inf)
    return float(apart.max() / scale.double().abs().max())


def ask_transformers(path: Path, ids: Sequence[int]) -> Oracle:
    """Run the model of a directory both ways."""
    plain = _pretrained(path, torch.float32, "eager")
    wide = _pretrained(path, torch.float64, "sdpa")
    truth = exact(wide, {**read_config(path), "head_dim": getattr(wide.config, "head_dim", None)})
    return Oracle(list(ids), logits_of(plain, ids), logits_of(truth, ids))


def _pretrained(path: Path, dtype: torch.dtype, attention: str) -> Any:
    auto = transformers.AutoModelForCausalLM
    return auto.from_pretrained(path, dtype=dtype, attn_implementation=attention).eval()


@one_thread()
@torch.no_grad()
def logits_of(model: Any, ids: Sequence[int]) -> Tensor:
    """``[T, vocab]`` of a model of Transformers."""
    logits: Tensor = model(torch.tensor([list(ids)]), use_cache=False).logits[0]
    return logits


def exact(model: Any, config: Mapping[str, Any]) -> Any:
    """Widen the places where a float64 model of Transformers still computes in float32."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = partial(_exact_norm, module)
    model.model.rotary_emb.forward = partial(_exact_angles, *exact_rotation(config))
    return model


def _exact_norm(module: Any, x: Tensor) -> Tensor:
    result: Tensor = (
        module.weight * x / torch.sqrt(x.square().mean(-1, keepdim=True) + module.variance_epsilon)
    )
    return result


def _exact_angles(
    frequencies: list[float], factor: float, x: Tensor, position_ids: Tensor
) -> tuple[Tensor, Tensor]:
    angles = position_ids[..., None].double() * torch.tensor(frequencies, dtype=torch.float64)  # [B, T, D/2]
    both = torch.cat((angles, angles), dim=-1)  # [B, T, D]
    return both.cos() * factor, both.sin() * factor


def ways(length: int) -> list[list[int]]:
    """Ends of the chunks in which ``length`` tokens are fed: whole prompts, token by token, and in pieces."""
    prompts = [[n] for n in (1, 2, 3, 17, 63, 64, 65, 130, length) if n <= length]
    early = list(range(1, min(length, 20) + 1))
    late = list(range(max(1, length - 12), length + 1))
    pieces = sorted({n for n in (1, 7, 8, 40, 65, 131, length) if n <= length})
    return [*prompts, early, late, pieces]


def worst(model: DecodeModel, oracle: Oracle) -> float:
    """How far the model is from the truth, over all ways to feed it."""
    return max(oracle.distance(run(model, oracle.ids, ends), ends) for ends in ways(len(oracle.ids)))


def assert_parity(model: DecodeModel, oracle: Oracle) -> None:
    """Within the tolerance, and within four times what float32 costs Transformers."""
    # An oracle that disagrees with itself would excuse anything.
    assert oracle.noise < TOLERANCE / 2
    error = worst(model, oracle)
    assert error <= TOLERANCE
    assert error <= 4 * oracle.noise + 1e-7


def assert_disparity(model: DecodeModel, oracle: Oracle, *, at_least: float = 100 * TOLERANCE) -> None:
    """The negative control: a fault moves the logits far more than the tolerance allows."""
    assert worst(model, oracle) > at_least
