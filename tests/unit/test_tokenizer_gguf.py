"""Byte-level tokenizers from GGUF keys: the same ids as the tokenizer.json that the file was made from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import support_text
from hypothesis import given, settings
from support_text import (
    TEXTS,
    build,
    directory_data,
    gguf_keys,
    gguf_of_json,
    texts,
    tiny_byte_level,
)
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from fuel_core.contracts import TokenizerData
from fuel_core.contracts.errors import CheckpointError
from fuel_core.text.pretokenizers import PRE_TOKENIZERS
from fuel_core.weights.gguf import open_gguf

qwen3_tokenizer_dir = support_text.qwen3_tokenizer_dir

DIGITS = ("12345", "in 1999", "v1.23.4", "a1b22c333d4444")


# --- Qwen3: the GGUF path against the directory path ---


@pytest.fixture(scope="module")
def qwen3(qwen3_tokenizer_dir: Path) -> Any:
    return build(directory_data(qwen3_tokenizer_dir))


@pytest.fixture(scope="module")
def qwen3_keys(qwen3_tokenizer_dir: Path) -> dict[str, Any]:
    content = json.loads((qwen3_tokenizer_dir / "tokenizer.json").read_text("utf-8"))
    return gguf_of_json(content, "qwen2", bos_token_id=151643, eos_token_id=151645, add_bos_token=False)


@pytest.fixture(scope="module")
def qwen3_gguf(qwen3_keys: dict[str, Any]) -> Any:
    return build(qwen3_keys)


@pytest.mark.parametrize("text", [*TEXTS, *DIGITS, "<|im_start|>x<|im_end|>", "a<tool_call>b"])
def test_qwen3_has_the_same_ids_and_text_from_either_format(qwen3: Any, qwen3_gguf: Any, text: str) -> None:
    ids = qwen3.encode(text)
    assert qwen3_gguf.encode(text) == ids
    for skip_special in (True, False):
        assert qwen3_gguf.decode(ids, skip_special=skip_special) == qwen3.decode(
            ids, skip_special=skip_special
        )


@given(text=texts)
@settings(max_examples=300, deadline=None)
def test_qwen3_has_the_same_ids_from_either_format_on_any_text(
    qwen3: Any, qwen3_gguf: Any, text: str
) -> None:
    assert qwen3_gguf.encode(text) == qwen3.encode(text)


def test_another_pre_tokenizer_cuts_digits_in_other_places(qwen3: Any, qwen3_keys: dict[str, Any]) -> None:
    keys = qwen3_keys | gguf_keys(pre="llama-bpe", add_bos_token=False)
    # Qwen's merges join no digits; merge some, so that only the cuts keep them apart.
    merges = [*keys["tokenizer.ggml.merges"], "1 2"]
    tokens = [*keys["tokenizer.ggml.tokens"], "12"]
    types = np.append(keys["tokenizer.ggml.token_type"], np.int32(1))
    keys |= gguf_keys(merges=merges, tokens=tokens, token_type=types)
    assert build(keys).encode("12") == [len(tokens) - 1]
    assert build(keys | gguf_keys(pre="qwen2")).encode("12") == qwen3.encode("12")


def test_only_the_digit_cuts_keep_merged_digits_apart(keys: dict[str, Any]) -> None:
    merged = keys["tokenizer.ggml.tokens"].index("123")
    for pre in PRE_TOKENIZERS:
        ids = build(keys | gguf_keys(pre=pre, add_bos_token=False)).encode("123")
        assert (ids == [merged]) is (pre not in ("smollm", "qwen2")), pre


def test_nfc_is_part_of_qwen2_only(tmp_path: Path) -> None:
    content = json.loads((tiny_byte_level(tmp_path) / "tokenizer.json").read_text())
    decomposed, composed = "e\u0301", "\u00e9"
    qwen, gpt2 = build(gguf_of_json(content, "qwen2")), build(gguf_of_json(content, "gpt-2"))
    assert qwen.encode(decomposed) == qwen.encode(composed)
    assert gpt2.encode(decomposed) != gpt2.encode(composed)


# --- SmolLM2: the real file against a tokenizer assembled by hand ---


@pytest.fixture(scope="module")
def smollm2_data(smollm2_path: Path) -> TokenizerData:
    return open_gguf(smollm2_path).tokenizer


@pytest.fixture(scope="module")
def smollm2(smollm2_data: TokenizerData) -> Any:
    return build(smollm2_data)


def by_hand(data: TokenizerData, *cuts: pre_tokenizers.PreTokenizer) -> Tokenizer:
    tokens = data.gguf["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in data.gguf["tokenizer.ggml.merges"]]
    core = Tokenizer(models.BPE({token: id for id, token in enumerate(tokens)}, merges))
    core.pre_tokenizer = pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    core.add_special_tokens(tokens[:17])
    return core


@pytest.fixture(scope="module")
def smollm2_by_hand(smollm2_data: TokenizerData) -> Tokenizer:
    return by_hand(smollm2_data, pre_tokenizers.Digits(individual_digits=True))


@pytest.mark.parametrize("text", [*TEXTS, *DIGITS, "<|im_start|>user\nhi<|im_end|>"])
def test_smollm2_ids_are_those_of_the_tokenizer_assembled_by_hand(
    smollm2: Any, smollm2_by_hand: Tokenizer, text: str
) -> None:
    ids = smollm2.encode(text)
    assert ids == smollm2_by_hand.encode(text).ids
    assert smollm2.decode(ids, skip_special=False) == text


@given(text=texts)
@settings(max_examples=300, deadline=None)
def test_smollm2_ids_are_those_of_the_tokenizer_assembled_by_hand_on_any_text(
    smollm2: Any, smollm2_by_hand: Tokenizer, text: str
) -> None:
    assert smollm2.encode(text) == smollm2_by_hand.encode(text).ids


def test_smollm2_under_another_pre_tokenizer_would_have_other_ids(
    smollm2: Any, smollm2_data: TokenizerData
) -> None:
    other = build(dict(smollm2_data.gguf) | gguf_keys(pre="llama-bpe", add_bos_token=False))
    assert any(other.encode(text) != smollm2.encode(text) for text in TEXTS)


def test_smollm2_facts(smollm2: Any) -> None:
    assert (smollm2.vocab_size, smollm2.bos_id, smollm2.adds_bos) == (49152, 1, False)
    assert smollm2.eos_ids == {2}
    assert smollm2.encode("Hello world") == [19556, 905]


# --- Pre-tokenizers ---


def words(name: str, text: str) -> list[str]:
    """Where a pre-tokenizer cuts, in the text's own characters."""
    cuts = PRE_TOKENIZERS[name].pre_tokenizer.pre_tokenize_str(text)
    return [text[start:end] for _, (start, end) in cuts]


CUTS = [
    ("gpt-2", "it's 12345", ["it", "'s", " 12345"]),
    ("gpt-2", "IT'S  a", ["IT", "'", "S", " ", " a"]),
    ("smollm", "it's 123", ["it", "'s", " ", "1", "2", "3"]),
    ("smollm", "x½ ٣٤", ["x", "½", " ", "٣", "٤"]),
    ("llama-bpe", "IT'S 12345\n\n x", ["IT", "'S", " ", "123", "45", "\n\n", " x"]),
    ("llama3", "(a) !!\n b", ["(a", ")", " !!\n", " b"]),
    ("llama-v3", "1234567", ["123", "456", "7"]),
    ("qwen2", "IT'S 123\r\n", ["IT", "'S", " ", "1", "2", "3", "\r\n"]),
    ("qwen2", "a\tb  c", ["a", "\tb", " ", " c"]),
    ("default", "a.b 12345", ["a", ".", "b", " ", "123", "45"]),
    ("default", "x == y!?", ["x", " ", "==", " y", "!?"]),
]


@pytest.mark.parametrize(("name", "text", "expected"), CUTS)
def test_each_pre_tokenizer_cuts_where_its_models_were_trained_to(
    name: str, text: str, expected: list[str]
) -> None:
    assert words(name, text) == expected


@given(text=texts)
@settings(max_examples=200, deadline=None)
def test_gpt2_and_smollm_cut_as_the_librarys_own_pre_tokenizers(text: str) -> None:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    for name, theirs in (("gpt-2", byte_level), ("smollm", digits)):
        assert PRE_TOKENIZERS[name].pre_tokenizer.pre_tokenize_str(text) == theirs.pre_tokenize_str(text)


@pytest.fixture(scope="module")
def real_qwen3_cuts(qwen3_tokenizer_dir: Path) -> Any:
    content = json.loads((qwen3_tokenizer_dir / "tokenizer.json").read_text("utf-8"))
    pattern = content["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), byte_level])


@given(text=texts)
@settings(max_examples=100, deadline=None)
def test_qwen2_cuts_as_the_real_tokenizer_does(real_qwen3_cuts: Any, text: str) -> None:
    ours = PRE_TOKENIZERS["qwen2"].pre_tokenizer
    assert ours.pre_tokenize_str(text) == real_qwen3_cuts.pre_tokenize_str(text)


# --- Small vocabularies: defaults, token types, refusals ---


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, Any]:
    content = json.loads((tiny_byte_level(tmp_path) / "tokenizer.json").read_text())
    return gguf_of_json(content, "gpt-2", bos_token_id=0, eos_token_id=1)


@pytest.mark.parametrize(("pre", "adds"), [(name, name.startswith("llama")) for name in PRE_TOKENIZERS])
def test_bos_is_the_default_of_llama_bpe_only(keys: dict[str, Any], pre: str, adds: bool) -> None:
    tokenizer = build(keys | gguf_keys(pre=pre))
    assert tokenizer.adds_bos is adds
    assert tokenizer.encode("hello")[:1] == ([0] if adds else tokenizer.encode("hello", add_bos=False)[:1])


@pytest.mark.parametrize("adds", [True, False])
def test_the_file_decides_about_bos_where_it_says_so(keys: dict[str, Any], adds: bool) -> None:
    for pre in ("gpt-2", "llama-bpe"):
        assert build(keys | gguf_keys(pre=pre, add_bos_token=adds)).adds_bos is adds


def test_eos_is_never_appended_even_if_the_file_asks_for_it(keys: dict[str, Any]) -> None:
    assert 1 not in build(keys | gguf_keys(add_eos_token=True)).encode("hello")


def test_every_id_that_ends_a_text_is_an_eos_id(keys: dict[str, Any]) -> None:
    data = TokenizerData(gguf=keys | gguf_keys(eot_token_id=5, eom_token_id=6), eos_ids=frozenset({1, 9}))
    assert build(data).eos_ids == {1, 5, 6, 9}


def test_no_pre_key_means_the_default_one(keys: dict[str, Any]) -> None:
    absent = {name: value for name, value in keys.items() if name != "tokenizer.ggml.pre"}
    merged = [*keys["tokenizer.ggml.merges"], "1 2", "12 3", "3 4"]
    more = gguf_keys(
        merges=merged,
        tokens=[*keys["tokenizer.ggml.tokens"], "34"],
        token_type=np.append(keys["tokenizer.ggml.token_type"], 1),
    )
    assert build(absent | more).encode("1234") == build(absent | more | gguf_keys(pre="default")).encode(
        "1234"
    )
    assert build(absent | more).encode("x 34.") != build(absent | more | gguf_keys(pre="smollm")).encode(
        "x 34."
    )


def test_llama_bpe_keeps_a_word_whole_that_is_a_token_whatever_the_merges_say(keys: dict[str, Any]) -> None:
    unreachable = gguf_keys(
        tokens=[*keys["tokenizer.ggml.tokens"], "xyz"],
        token_type=np.append(keys["tokenizer.ggml.token_type"], 1),
        add_bos_token=False,
    )
    last = len(unreachable["tokenizer.ggml.tokens"]) - 1
    assert build(keys | unreachable | gguf_keys(pre="llama-bpe")).encode("xyz") == [last]
    assert last not in build(keys | unreachable).encode("xyz")


def test_token_types_decide_what_is_recognised_in_a_text_and_what_is_skipped(keys: dict[str, Any]) -> None:
    tokens = [*keys["tokenizer.ggml.tokens"], "<unk>", "<normal>", "ä ö"]
    types = np.append(keys["tokenizer.ggml.token_type"], [2, 1, 4])
    tokenizer = build(keys | gguf_keys(tokens=tokens, token_type=types))
    unk, normal, user = (tokens.index(token) for token in ("<unk>", "<normal>", "ä ö"))
    ids = tokenizer.encode("</s>|<unk>|<normal>|ä ö|<tool>")
    assert {unk, user, 1} <= set(ids)
    assert normal not in ids
    assert tokenizer.decode(ids) == "||<normal>|ä ö|<tool>"
    assert tokenizer.decode(ids, skip_special=False) == "</s>|<unk>|<normal>|ä ö|<tool>"


def test_without_token_types_bos_and_eos_are_still_control(keys: dict[str, Any]) -> None:
    untyped = {name: value for name, value in keys.items() if name != "tokenizer.ggml.token_type"}
    tokenizer = build(untyped)
    assert tokenizer.encode("<s>")[:1] == [0]
    assert tokenizer.decode([0, *tokenizer.encode("hello"), 1]) == "hello"


def test_empty_tokens_do_not_hide_each_other(keys: dict[str, Any]) -> None:
    tokens = [*keys["tokenizer.ggml.tokens"], "", ""]
    more = gguf_keys(tokens=tokens, token_type=np.append(keys["tokenizer.ggml.token_type"], [1, 1]))
    assert build(keys | more).vocab_size == len(tokens)


def changed(keys: dict[str, Any], name: str, change: Any) -> dict[str, Any]:
    full = f"tokenizer.ggml.{name}"
    value = change(keys.get(full)) if callable(change) else change
    return {key: kept for key, kept in keys.items() if key != full} | ({} if value is None else {full: value})


REFUSALS = [
    ("model", None, r"tokenizer\.ggml\.model is None; needed: one of gpt2, llama, t5"),
    ("model", "rwkv", r"tokenizer\.ggml\.model is 'rwkv'.*one of gpt2, llama, t5"),
    ("pre", "mystery", r"pre is 'mystery'; needed: one of default, gpt-2, llama-bpe, .*qwen2, smollm"),
    ("tokens", None, r"no list of strings under tokenizer\.ggml\.tokens"),
    ("tokens", [1, 2], r"no list of strings under tokenizer\.ggml\.tokens"),
    ("tokens", lambda tokens: [*tokens[:-1], tokens[5]], "stands twice"),
    ("tokens", lambda tokens: tokens[:-1], r"values under tokenizer\.ggml\.token_type"),
    (
        "token_type",
        lambda types: types[:-1],
        r"269 values under tokenizer\.ggml\.token_type; needed: one for",
    ),
    ("token_type", lambda types: types.reshape(1, -1), r"values under tokenizer\.ggml\.token_type"),
    ("merges", None, r"no list of strings under tokenizer\.ggml\.merges"),
    ("merges", lambda merges: [*merges, "he"], "merge 10 is 'he'"),
    ("merges", lambda merges: [*merges, "h e l"], "merge 10 is 'h e l'"),
    ("merges", lambda merges: [*merges, "a zz"], "merge 10 is 'a zz'"),
    ("merges", lambda merges: ["x y", *merges], "merge 0 is 'x y'"),
    ("eos_token_id", 100000, r"eos_token_id 100000; needed: the id of one of 270 tokens"),
    ("bos_token_id", -1, "bos_token_id -1"),
    ("unknown_token_id", "0", "unknown_token_id 0"),
]


@pytest.mark.parametrize(("name", "change", "message"), REFUSALS)
def test_what_is_missing_or_malformed_is_refused_by_name(
    keys: dict[str, Any], name: str, change: Any, message: str
) -> None:
    build(keys)
    with pytest.raises(CheckpointError, match=message) as caught:
        build(changed(keys, name, change))
    assert str(caught.value).startswith("the test's model: ")
    assert str(caught.value).count("needed:") == 1
    assert "\n" not in str(caught.value)


def test_bos_wanted_but_not_given_is_refused(keys: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="wants BOS before every text but has no bos_token_id"):
        build(changed(keys, "bos_token_id", None) | gguf_keys(add_bos_token=True))
