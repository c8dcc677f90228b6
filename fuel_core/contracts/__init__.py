"""The contracts between the core, its schedulers and the plugins. Imports no torch."""

from fuel_core.contracts import errors
from fuel_core.contracts.checkpoint import (
    BLOCK_TYPES,
    BlockType,
    Checkpoint,
    QuantizedTensor,
    TokenizerData,
)
from fuel_core.contracts.errors import FuelError
from fuel_core.contracts.family import API_VERSION, DTYPES, TIERS, Capabilities, ModelFamily
from fuel_core.contracts.markers import hookimpl, hookspec
from fuel_core.contracts.records import KernelBackend, WeightFormat
from fuel_core.contracts.sampling import FinishReason, SamplingParams
from fuel_core.contracts.session import DecodeSession, PagedDecodePlan
from fuel_core.contracts.state import (
    KeyValue,
    LayerStateSpec,
    ModelDims,
    Slots,
    StateSlot,
    collapse_uniform,
)
from fuel_core.contracts.tiers import DecodeModel, PagedDecodeModel, RaggedBatch, RaggedDecodeModel

__all__ = [
    "API_VERSION",
    "BLOCK_TYPES",
    "DTYPES",
    "TIERS",
    "BlockType",
    "Capabilities",
    "Checkpoint",
    "DecodeModel",
    "DecodeSession",
    "FinishReason",
    "FuelError",
    "KernelBackend",
    "KeyValue",
    "LayerStateSpec",
    "ModelDims",
    "ModelFamily",
    "PagedDecodeModel",
    "PagedDecodePlan",
    "QuantizedTensor",
    "RaggedBatch",
    "RaggedDecodeModel",
    "SamplingParams",
    "Slots",
    "StateSlot",
    "TokenizerData",
    "WeightFormat",
    "collapse_uniform",
    "errors",
    "hookimpl",
    "hookspec",
]
