"""The parts that a model family is made of, and the decoder that gives it every tier."""

from fuel_core.layers.blocks import Attention, GatedMlp
from fuel_core.layers.config import ConfigReader, DecoderSizes
from fuel_core.layers.decoder import Decoder, DecoderParts
from fuel_core.layers.linear import Linear
from fuel_core.layers.rope import Rope, rope_from_config
from fuel_core.layers.step import ContiguousStep, Step

__all__ = [
    "Attention",
    "ConfigReader",
    "ContiguousStep",
    "Decoder",
    "DecoderParts",
    "DecoderSizes",
    "GatedMlp",
    "Linear",
    "Rope",
    "Step",
    "rope_from_config",
]
