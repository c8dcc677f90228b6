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
from torch import Tensor, nn

from fuel_core import registry
from fuel_core.contracts import Checkpoint, DecodeModel, DecodeSession, ModelDims, QuantizedTensor
from fuel_core.kv import KvCache
from fuel_core.weights import MemoryCheckpoint

transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()

TOLERANCE = 1e-4
"""The most that logits may differ from the truth, relative to the largest of them."""

LONG = 300
"""Positions that a test of the scalings reaches; their models were pretrained, so to say, for 64."""

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

_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}

SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": _YARN,
    "yarn attention_factor": {**_YARN, "attention_factor": 1.7},
    "yarn mscale": {**_YARN, "mscale": 1.5, "mscale_all_dim": 0.6},
    "yarn betas": {**_YARN, "beta_fast": 4.0, "beta_slow": 0.25},
    "yarn not truncated": {**_YARN, "beta_fast": 4.0, "truncate": False},
    "yarn null factor": {**_YARN, "factor": None},
    "yarn without original": {"rope_type": "yarn", "factor": 4.0},
}
"""Every scaling that changes frequencies, in every shape that its parameters take."""


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
    """The largest difference, relative to the largest value of ``scale``."""
    return float((ours.double() - theirs.double()).abs().max() / scale.double().abs().max())


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


def exact_rotation(config: Mapping[str, Any]) -> tuple[list[float], float]:
    """Radians per position of each pair, and YaRN's factor, from the papers' formulas in float64."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    theta = rope.get("rope_theta", config.get("rope_theta", 10000.0))
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    longest = config["max_position_embeddings"]
    original = config.get("original_max_position_embeddings") or rope.get(
        "original_max_position_embeddings", longest
    )
    plain = [theta ** (-2 * i / dim) for i in range(dim // 2)]
    if kind in ("default", "dynamic"):  # dynamic scaling leaves positions within the original length alone
        return plain, 1.0
    factor = rope.get("factor") or longest / original
    if kind == "linear":
        return [f / factor for f in plain], 1.0
    if kind == "llama3":
        return [_llama3(f, factor, original, rope) for f in plain], 1.0
    assert kind == "yarn"
    weights = _yarn_weights(dim, theta, original, rope)
    mixed = [f * ((1 - w) + w / factor) for f, w in zip(plain, weights, strict=True)]
    return mixed, _yarn_factor(factor, rope)


def _llama3(frequency: float, factor: float, original: int, rope: Mapping[str, Any]) -> float:
    turns = original * frequency / (2 * math.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    if turns < low:
        return frequency / factor
    if turns > high:
        return frequency
    smooth = (turns - low) / (high - low)
    return (1 - smooth) * frequency / factor + smooth * frequency


def _yarn_weights(dim: int, theta: float, original: int, rope: Mapping[str, Any]) -> list[float]:
    """How far each pair is interpolated: from 0 for those that turn often to 1 for those that seldom do."""

    def pair(turns: float) -> float:
        return dim / 2 * math.log(original / (2 * math.pi * turns), theta)

    first, last = pair(rope.get("beta_fast") or 32), pair(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    width = last - first or 0.001
    return [min(max((i - first) / width, 0.0), 1.0) for i in range(dim // 2)]


def _yarn_factor(factor: float, rope: Mapping[str, Any]) -> float:
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    stretch = math.log(max(factor, 1.0)) / 10
    numerator, denominator = 1.0, 0.0
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        numerator, denominator = rope["mscale"], rope["mscale_all_dim"]
    return (1 + numerator * stretch) / (1 + denominator * stretch)


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
    error = worst(model, oracle)
    assert math.isnan(error) or error > at_least
