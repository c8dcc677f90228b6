"""The JSON and template files of a Hugging Face model directory."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fuel_core.contracts.checkpoint import TokenizerData
from fuel_core.contracts.errors import CheckpointError


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        CheckpointError: no such file, not readable, not JSON, or not an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise damaged(path, str(error), "a file of JSON in UTF-8") from error
    if not isinstance(value, dict):
        raise damaged(path, f"holds a {type(value).__name__}", "a JSON object")
    return value


def damaged(path: Path, given: str, needed: str) -> CheckpointError:
    """The error for a file of the directory that is not what it should be."""
    return CheckpointError(f"{path}: {given}", needed=needed, remedy="fetch the file again", path=path)


def read_tokenizer(directory: Path, config: Mapping[str, Any]) -> TokenizerData:
    """What the directory says about its text; ``config`` is its config.json.

    Raises:
        CheckpointError: a file that is there but is not what its name says.
    """
    tokenizer_json = directory / "tokenizer.json"
    tokenizer_config = _read_optional(directory / "tokenizer_config.json")
    generation = _read_optional(directory / "generation_config.json")
    return TokenizerData(
        tokenizer_json=tokenizer_json if os.path.isfile(tokenizer_json) else None,
        config=tokenizer_config,
        chat_template=_chat_template(directory, tokenizer_config),
        eos_ids=_end_ids(directory / "config.json", config)
        | _end_ids(directory / "generation_config.json", generation),
    )


def _read_optional(path: Path) -> dict[str, Any]:
    return read_json(path) if (os.path.isfile(path) or os.path.islink(path) or os.path.isdir(path)) else {}


def _chat_template(directory: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    """The first of chat_template.jinja, chat_template.json and the entry of tokenizer_config.json."""
    jinja = directory / "chat_template.jinja"
    if os.path.isfile(jinja):
        return _read_text(jinja)
    own = directory / "chat_template.json"
    value = _read_optional(own).get("chat_template")
    if value is not None:
        return _default_template(own, value)
    return _default_template(directory / "tokenizer_config.json", tokenizer_config.get("chat_template"))


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise damaged(path, str(error), "a file of text in UTF-8") from error


def _default_template(path: Path, value: Any) -> str | None:
    """A template, or the one named ``default`` of several; None where there is no such."""
    if isinstance(value, list) and all(isinstance(entry, dict) for entry in value):
        value = next((entry.get("template") for entry in value if entry.get("name") == "default"), None)
    if not isinstance(value, str | None):
        raise damaged(path, f"chat_template is {value!r}", "a template, or a list of named templates")
    return value


def _end_ids(path: Path, config: Mapping[str, Any]) -> frozenset[int]:
    value = config.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(one, bool) or not isinstance(one, int) for one in ids):
        raise damaged(path, f"eos_token_id is {value!r}", "a token id or a list of token ids")
    return frozenset(ids)
