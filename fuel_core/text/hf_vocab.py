"""Tokenizers from the ``tokenizer.json`` and ``tokenizer_config.json`` of a Hugging Face directory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from fuel_core.contracts.checkpoint import TokenizerData
from fuel_core.contracts.errors import CheckpointError
from fuel_core.text.vocabulary import Vocabulary, refused_by_library


def _token_text(value: Any) -> str | None:
    """A token of tokenizer_config.json: its text, or an object that holds it; None for anything else."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    texts = {name: _token_text(value) for name, value in config.items() if name.endswith("_token")}
    return {name: text for name, text in texts.items() if text is not None}


def _id_of(core: tokenizers.Tokenizer, name: str, text: str, source: str) -> int:
    id = core.token_to_id(text)
    if id is None:
        raise CheckpointError(
            f"{source}: the {name} {text!r} of tokenizer_config.json is not in tokenizer.json",
            needed="a token of the vocabulary",
            remedy="fetch both files of the same model again",
        )
    return id


def _prepended_id(core: tokenizers.Tokenizer, eos_ids: frozenset[int]) -> int | None:
    """The id that the tokenizer's own post-processor puts before a text."""
    plain = core.encode("a", add_special_tokens=False).ids
    marked = core.encode("a", add_special_tokens=True).ids
    if marked[:1] == plain[:1] or marked[0] in eos_ids:
        return None
    return marked[0]


def _bos(
    core: tokenizers.Tokenizer, data: TokenizerData, eos_ids: frozenset[int], source: str
) -> tuple[int | None, bool]:
    """The BOS id, and whether it is wanted before every text."""
    text, wanted = _token_text(data.config.get("bos_token")), data.config.get("add_bos_token")
    prepended = _prepended_id(core, eos_ids)
    if wanted is None and prepended is not None:
        return prepended, True
    if not wanted:
        return core.token_to_id(text) if text else prepended, False
    if text is None and prepended is None:
        raise CheckpointError(
            f"{source}: tokenizer_config.json wants BOS before every text but names no bos_token",
            needed="a bos_token",
            remedy="fetch tokenizer_config.json again",
        )
    return _id_of(core, "bos_token", text, source) if text else prepended, True


def _load(path: Path | None, source: str) -> tokenizers.Tokenizer:
    if path is None:
        raise CheckpointError(
            f"{source} has no tokenizer.json",
            needed="a tokenizer that the tokenizers library can load",
            remedy="have Transformers write one: AutoTokenizer.from_pretrained(...).save_pretrained(...)",
        )
    with refused_by_library(f"{path} cannot be loaded"):
        core = tokenizers.Tokenizer.from_file(str(path))
    # A tokenizer.json may carry the limits of a training run.
    core.no_truncation()
    core.no_padding()
    return core


def read_directory_vocabulary(data: TokenizerData, *, source: str) -> Vocabulary:
    """The vocabulary of a Hugging Face directory.

    BOS is wanted where ``add_bos_token`` says so, else where the tokenizer's own post-processor adds it.

    Raises:
        CheckpointError: there is no tokenizer.json, it is damaged, or it lacks a token that
            tokenizer_config.json names.
    """
    core, special = _load(data.tokenizer_json, source), _special_tokens(data.config)
    eos = special.get("eos_token")
    eos_ids = frozenset([_id_of(core, "eos_token", eos, source)] if eos else [])
    bos_id, adds_bos = _bos(core, data, eos_ids, source)
    return Vocabulary(core, bos_id, adds_bos, eos_ids, special)
