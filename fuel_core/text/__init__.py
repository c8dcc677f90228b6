"""Tokenizers, chat templates and incremental detokenizing. Imports no torch."""

from fuel_core.text.detokenize import IncrementalDetokenizer
from fuel_core.text.tokenizer import Tokenizer, build_tokenizer

__all__ = ["IncrementalDetokenizer", "Tokenizer", "build_tokenizer"]
