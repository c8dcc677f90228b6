"""Tokenizers of Hugging Face directories, with the real Qwen3 files and Transformers as the oracle."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import support_text
import tokenizers
from hypothesis import given, settings
from support_text import TEXTS, build, directory_data, texts, tiny_byte_level

from fuel_core.contracts import TokenizerData
from fuel_core.contracts.errors import CheckpointError, InvalidRequestError

qwen3_tokenizer_dir = support_text.qwen3_tokenizer_dir


@pytest.fixture(scope="module")
def qwen3(qwen3_tokenizer_dir: Path) -> Any:
    return build(directory_data(qwen3_tokenizer_dir))


@pytest.fixture(scope="module")
def theirs(qwen3_tokenizer_dir: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(qwen3_tokenizer_dir)


@pytest.fixture(scope="module")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_byte_level(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def tiny_bos_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_byte_level(tmp_path_factory.mktemp("tiny-bos"), post_processor=True)


CHATTY = ("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n", "a<tool_call>b")


@pytest.mark.parametrize("text", [*TEXTS, *CHATTY])
def test_qwen3_ids_and_text_are_those_of_transformers(qwen3: Any, theirs: Any, text: str) -> None:
    ids = qwen3.encode(text)
    assert ids == theirs.encode(text)
    assert qwen3.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert qwen3.decode(ids, skip_special=False) == theirs.decode(ids, skip_special_tokens=False)


@given(text=texts)
@settings(max_examples=150, deadline=None)
def test_qwen3_ids_are_those_of_transformers_on_any_text(qwen3: Any, theirs: Any, text: str) -> None:
    assert qwen3.encode(text) == theirs.encode(text)


def test_qwen3_facts(qwen3: Any) -> None:
    assert (qwen3.vocab_size, qwen3.bos_id, qwen3.adds_bos) == (151669, None, False)
    assert qwen3.eos_ids == {151645}
    assert qwen3.has_chat_template


def test_declared_eos_ids_join_the_tokenizers_own(tiny_dir: Path) -> None:
    data = TokenizerData(
        tiny_dir / "tokenizer.json", {"eos_token": {"content": "</s>"}}, eos_ids=frozenset({7})
    )
    assert build(data).eos_ids == {1, 7}


def test_an_eos_token_may_be_a_plain_string_or_absent(tiny_dir: Path) -> None:
    assert build(directory_data(tiny_dir, eos_token="</s>")).eos_ids == {1}
    assert build(directory_data(tiny_dir, eos_token=None)).eos_ids == frozenset()


def test_special_tokens_in_a_text_are_recognised(tiny_dir: Path) -> None:
    tokenizer = build(directory_data(tiny_dir))
    call = tokenizers.Tokenizer.from_file(str(tiny_dir / "tokenizer.json")).token_to_id("<|call|>")
    assert call in tokenizer.encode("a<|call|>b")
    assert call not in tokenizer.encode("a<|call |>b")


def test_only_control_tokens_are_skipped(tiny_dir: Path) -> None:
    tokenizer = build(directory_data(tiny_dir))
    ids = tokenizer.encode("a<|call|>b<tool>c")
    assert tokenizer.decode(ids) == "ab<tool>c"
    assert tokenizer.decode(ids, skip_special=False) == "a<|call|>b<tool>c"


# --- BOS ---


@pytest.mark.parametrize("text", ["", "hello", "<s>hello", "<s><s>hello", "<s>"])
def test_there_is_exactly_one_bos_where_the_model_wants_one(tiny_bos_dir: Path, text: str) -> None:
    tokenizer = build(directory_data(tiny_bos_dir, bos_token="<s>", eos_token="</s>"))
    ids = tokenizer.encode(text)
    assert tokenizer.adds_bos
    assert ids[0] == tokenizer.bos_id == 0
    assert ids.count(0) == 1
    assert ids == [0, *tokenizer.encode(text.replace("<s>", ""), add_bos=False)]


def test_a_bos_inside_the_text_stays(tiny_bos_dir: Path) -> None:
    tokenizer = build(directory_data(tiny_bos_dir, bos_token="<s>"))
    assert tokenizer.encode("<s>hello<s>hello").count(0) == 2


def test_without_add_bos_the_text_stands_as_it_is(tiny_bos_dir: Path) -> None:
    tokenizer = build(directory_data(tiny_bos_dir, bos_token="<s>"))
    assert 0 not in tokenizer.encode("hello", add_bos=False)
    assert tokenizer.encode("<s>hello", add_bos=False)[0] == 0


@pytest.mark.parametrize("text", ["", "hello"])
def test_no_bos_where_the_model_does_not_want_one(tiny_dir: Path, text: str) -> None:
    tokenizer = build(directory_data(tiny_dir, bos_token="<s>"))
    assert not tokenizer.adds_bos
    assert tokenizer.bos_id == 0
    assert 0 not in tokenizer.encode(text)


def test_eos_is_never_appended(tiny_bos_dir: Path) -> None:
    post_processed = tokenizers.Tokenizer.from_file(str(tiny_bos_dir / "tokenizer.json")).encode("hello").ids
    assert post_processed[-1] == 1, "the control: the file's own post-processor appends it"
    assert 1 not in build(directory_data(tiny_bos_dir, eos_token="</s>", bos_token="<s>")).encode("hello")


def test_the_config_says_whether_bos_is_wanted_before_the_post_processor_does(
    tiny_dir: Path, tiny_bos_dir: Path
) -> None:
    assert not build(directory_data(tiny_bos_dir, bos_token="<s>", add_bos_token=False)).adds_bos
    assert build(directory_data(tiny_dir, bos_token="<s>", add_bos_token=True)).encode("hello")[0] == 0


def test_a_post_processor_names_bos_where_the_config_does_not(tiny_bos_dir: Path) -> None:
    tokenizer = build(directory_data(tiny_bos_dir))
    assert (tokenizer.bos_id, tokenizer.adds_bos) == (0, True)


def test_an_eos_that_a_post_processor_puts_first_is_no_bos(tiny_dir: Path, tmp_path: Path) -> None:
    core = tokenizers.Tokenizer.from_file(str(tiny_dir / "tokenizer.json"))
    core.post_processor = tokenizers.processors.TemplateProcessing("</s> $A", None, [("</s>", 1)])
    core.save(str(tmp_path / "tokenizer.json"))
    assert build(directory_data(tmp_path)).bos_id == 1, "the control: it would be one"
    tokenizer = build(directory_data(tmp_path, eos_token="</s>"))
    assert (tokenizer.bos_id, tokenizer.adds_bos) == (None, False)


# --- Limits of a training run ---


def test_truncation_and_padding_of_the_file_are_ignored(tiny_dir: Path, tmp_path: Path) -> None:
    core = tokenizers.Tokenizer.from_file(str(tiny_dir / "tokenizer.json"))
    core.enable_truncation(3)
    core.enable_padding(length=50)
    core.save(str(tmp_path / "tokenizer.json"))
    limited = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode("hello 123 hello").ids
    assert len(limited) == 50, "the control: the file's own limits bite"
    ours = build(directory_data(tmp_path)).encode("hello 123 hello")
    assert ours == build(directory_data(tiny_dir)).encode("hello 123 hello")


# --- Bad input ---


def test_a_directory_without_tokenizer_json_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"the test's model has no tokenizer\.json.*save_pretrained"):
        build(directory_data(tmp_path))


BROKEN = {
    "no JSON": "{",
    "another JSON": "[]",
    "no model": "{}",
    "an unknown model": '{"model": {"type": "Foo"}}',
    "a merge that leads nowhere": json.dumps(
        {"model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": [["a", "b"]]}}
    ),
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN.keys())
def test_a_damaged_tokenizer_json_is_refused_in_one_line(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be loaded") as caught:
        build(directory_data(tmp_path))
    assert "\n" not in str(caught.value)


def test_a_tokenizer_json_that_vanished_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="No such file"):
        build(TokenizerData(tmp_path / "tokenizer.json"))


def test_an_eos_or_bos_token_outside_the_vocabulary_is_refused_by_name(tiny_dir: Path) -> None:
    with pytest.raises(CheckpointError, match="eos_token '<end>'"):
        build(directory_data(tiny_dir, eos_token="<end>"))
    with pytest.raises(CheckpointError, match="bos_token '<start>'"):
        build(directory_data(tiny_dir, bos_token="<start>", add_bos_token=True))


def test_bos_wanted_but_not_named_is_refused(tiny_dir: Path) -> None:
    with pytest.raises(CheckpointError, match="names no bos_token"):
        build(directory_data(tiny_dir, add_bos_token=True))


@pytest.mark.parametrize("text", ["half \ud83d", None, 7, b"bytes"])
def test_what_is_no_text_is_refused(tiny_dir: Path, text: Any) -> None:
    with pytest.raises(InvalidRequestError, match="needed: a str of whole characters"):
        build(directory_data(tiny_dir)).encode(text)


@pytest.mark.parametrize("id", [-1, 10**6, 2**40, 1.5, "a", None, [1]])
def test_an_id_that_is_no_token_is_refused(tiny_dir: Path, id: Any) -> None:
    with pytest.raises(InvalidRequestError, match="token id"):
        build(directory_data(tiny_dir)).decode([5, id])


def test_the_first_id_past_the_vocabulary_is_refused_and_the_last_in_it_is_not(tiny_dir: Path) -> None:
    tokenizer = build(directory_data(tiny_dir))
    assert tokenizer.decode([tokenizer.vocab_size - 1]) == "<tool>"
    with pytest.raises(InvalidRequestError) as caught:
        tokenizer.decode([tokenizer.vocab_size])
    assert caught.value.id == tokenizer.vocab_size


def test_text_imports_no_torch() -> None:
    code = "import sys, fuel_core.text; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
