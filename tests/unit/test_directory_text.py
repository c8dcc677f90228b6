"""What a Hugging Face directory says about its text: tokenizer, chat template, end-of-text ids."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fuel_core.contracts import TokenizerData
from fuel_core.contracts.errors import CheckpointError
from fuel_core.weights.safetensors_dir import open_directory


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    put(tmp_path / "config.json", {"architectures": ["Some"]})
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    return tmp_path


def put(path: Path, value: object) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def text_of(directory: Path) -> TokenizerData:
    return open_directory(directory).tokenizer


def test_a_directory_without_a_tokenizer_says_nothing(directory: Path) -> None:
    assert text_of(directory) == TokenizerData()


def test_the_tokenizers_files_are_handed_on(directory: Path) -> None:
    (directory / "tokenizer.json").touch()
    put(directory / "tokenizer_config.json", {"bos_token": "<s>"})
    data = text_of(directory)
    assert data.tokenizer_json == directory / "tokenizer.json"
    assert data.config == {"bos_token": "<s>"}
    assert data.gguf == {}


def test_the_template_is_taken_from_the_most_particular_file(directory: Path) -> None:
    put(directory / "tokenizer_config.json", {"chat_template": "from tokenizer_config"})
    assert text_of(directory).chat_template == "from tokenizer_config"
    put(directory / "chat_template.json", {"chat_template": "from json"})
    assert text_of(directory).chat_template == "from json"
    (directory / "chat_template.jinja").write_text("from jinja ▁\n", encoding="utf-8")
    assert text_of(directory).chat_template == "from jinja ▁\n"


def test_of_several_templates_the_default_is_taken(directory: Path) -> None:
    templates = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    put(directory / "tokenizer_config.json", {"chat_template": templates})
    assert text_of(directory).chat_template == "plain"
    put(directory / "tokenizer_config.json", {"chat_template": templates[:1]})
    assert text_of(directory).chat_template is None


@pytest.mark.parametrize("template", [7, {"default": "x"}, ["x"], [{"name": "default", "template": 7}]])
def test_a_template_that_is_no_text_is_refused(template: object, directory: Path) -> None:
    put(directory / "tokenizer_config.json", {"chat_template": template})
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: chat_template is"):
        text_of(directory)


def test_a_template_file_that_is_not_utf_8_is_refused(directory: Path) -> None:
    (directory / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja"):
        text_of(directory)


@pytest.mark.parametrize(
    ("config", "generation", "ids"),
    [
        ({}, {}, set()),
        ({"eos_token_id": 2}, {}, {2}),
        ({"eos_token_id": 0}, {"eos_token_id": None}, {0}),
        ({"eos_token_id": None}, {"eos_token_id": [2, 3]}, {2, 3}),
        ({"eos_token_id": [1, 2]}, {"eos_token_id": 3}, {1, 2, 3}),
    ],
)
def test_the_end_ids_of_both_configs_are_joined(
    config: dict[str, object], generation: dict[str, object], ids: set[int], directory: Path
) -> None:
    put(directory / "config.json", {"architectures": ["Some"], **config})
    put(directory / "generation_config.json", generation)
    assert text_of(directory).eos_ids == ids


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("value", ["2", 2.0, True, [2, "3"], {"id": 2}])
def test_end_ids_that_are_no_integers_are_refused_by_file(file: str, value: object, directory: Path) -> None:
    put(directory / file, {"architectures": ["Some"], "eos_token_id": value})
    with pytest.raises(CheckpointError, match=rf"{file}: eos_token_id is"):
        text_of(directory)
