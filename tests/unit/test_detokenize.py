"""Detokenizing as ids arrive: the same text as all at once, certain when given out, whole characters only."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import support_text
from hypothesis import given, settings
from hypothesis import strategies as st
from support_text import (
    TEXTS,
    build,
    directory_data,
    gguf_of_sentencepiece,
    texts,
    tiny_byte_level,
    train_sentencepiece,
)
from tokenizers import Tokenizer, decoders, models

from fuel_core.contracts import TokenizerData
from fuel_core.contracts.errors import CheckpointError, InvalidRequestError
from fuel_core.text.detokenize import TokenBytes
from fuel_core.weights.gguf import open_gguf

qwen3_tokenizer_dir = support_text.qwen3_tokenizer_dir

REPLACEMENT = "\ufffd"


def qwen3(request: pytest.FixtureRequest) -> TokenizerData:
    return directory_data(request.getfixturevalue("qwen3_tokenizer_dir"))


def smollm2(request: pytest.FixtureRequest) -> TokenizerData:
    return open_gguf(request.getfixturevalue("smollm2_path")).tokenizer


def scratch(request: pytest.FixtureRequest, name: str) -> Path:
    factory: pytest.TempPathFactory = request.getfixturevalue("tmp_path_factory")
    return factory.mktemp(name)


def byte_level(request: pytest.FixtureRequest) -> TokenizerData:
    return directory_data(tiny_byte_level(scratch(request, "byte-level")))


def sentencepiece_bpe(request: pytest.FixtureRequest) -> TokenizerData:
    processor = train_sentencepiece("bpe", 700, user_defined_symbols=["<tool>"])
    return TokenizerData(gguf=gguf_of_sentencepiece(processor, ("<tool>",)))


def sentencepiece_unigram(request: pytest.FixtureRequest) -> TokenizerData:
    return TokenizerData(gguf=gguf_of_sentencepiece(train_sentencepiece("unigram", 460), model="t5"))


def saved(directory: Path, decoder: Any) -> TokenizerData:
    words = ["<s>", "▁", "▁a", "▁▁", "b", "é", "<0xE4>", "<0xBD>", "<0xA0>", "<0x41>", "▁c▁"]
    core = Tokenizer(models.BPE({word: id for id, word in enumerate(words)}, []))
    core.add_special_tokens(["<s>"])
    if decoder is not None:
        core.decoder = decoder
    core.save(str(directory / "tokenizer.json"))
    return directory_data(directory)


def metaspace(request: pytest.FixtureRequest) -> TokenizerData:
    return saved(scratch(request, "metaspace"), decoders.Metaspace())


def metaspace_kept(request: pytest.FixtureRequest) -> TokenizerData:
    return saved(scratch(request, "metaspace-kept"), decoders.Metaspace(prepend_scheme="never"))


def llama_json(request: pytest.FixtureRequest) -> TokenizerData:
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return saved(scratch(request, "llama"), decoders.Sequence(steps))


def no_decoder(request: pytest.FixtureRequest) -> TokenizerData:
    return saved(scratch(request, "no-decoder"), None)


KINDS: list[Callable[[pytest.FixtureRequest], TokenizerData]] = [
    qwen3,
    smollm2,
    byte_level,
    sentencepiece_bpe,
    sentencepiece_unigram,
    llama_json,
    metaspace,
    metaspace_kept,
    no_decoder,
]
WITH_TEXT = KINDS[:5]


@pytest.fixture(scope="module")
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return build(request.param(request))


every_kind = pytest.mark.parametrize("tokenizer", KINDS, indirect=True, ids=lambda kind: kind.__name__)
every_text_kind = pytest.mark.parametrize(
    "tokenizer", WITH_TEXT, indirect=True, ids=lambda kind: kind.__name__
)


def some_ids(tokenizer: Any) -> st.SearchStrategy[list[int]]:
    """Ids from all over the vocabulary, and more often from its start, where bytes and control tokens are."""
    size = tokenizer.vocab_size
    near = st.integers(0, min(size, 300) - 1)
    return st.lists(near | st.integers(0, size - 1) | st.integers(max(size - 30, 0), size - 1), max_size=20)


def in_parts(draw: st.DataObject, ids: list[int]) -> Iterator[list[int]]:
    while ids:
        count = draw.draw(st.integers(1, 4))
        yield ids[:count]
        ids = ids[count:]


# --- The property, for every id sequence ---


@every_kind
@given(draw=st.data())
@settings(max_examples=40, deadline=None)
def test_the_parts_are_the_whole_however_the_ids_are_cut(tokenizer: Any, draw: st.DataObject) -> None:
    ids = draw.draw(some_ids(tokenizer))
    detokenizer = tokenizer.detokenizer()
    parts = [detokenizer.add(part) for part in in_parts(draw, ids)]
    assert "".join(parts) + detokenizer.finish() == tokenizer.decode(ids)


@every_kind
@given(draw=st.data())
@settings(max_examples=40, deadline=None)
def test_text_is_given_out_as_soon_as_it_is_certain_and_never_changes(
    tokenizer: Any, draw: st.DataObject
) -> None:
    ids = draw.draw(some_ids(tokenizer))
    detokenizer, given_out = tokenizer.detokenizer(), ""
    for count, id in enumerate(ids, start=1):
        given_out += detokenizer.add([id])
        # What is held back is the start of one character; one that can become none may be two replacements.
        assert tokenizer.decode(ids[:count]) in [given_out + REPLACEMENT * held for held in range(3)]
        assert tokenizer.decode(ids).startswith(given_out)


@every_text_kind
@given(text=texts)
@settings(max_examples=40, deadline=None)
def test_no_character_of_a_text_is_ever_given_out_in_halves(tokenizer: Any, text: str) -> None:
    ids = tokenizer.encode(text)
    whole = tokenizer.decode(ids)
    detokenizer = tokenizer.detokenizer()
    parts = [detokenizer.add([id]) for id in ids]
    assert "".join(parts) + detokenizer.finish() == whole
    assert sum(part.count(REPLACEMENT) for part in parts) <= whole.count(REPLACEMENT)


@every_text_kind
@pytest.mark.parametrize("text", TEXTS)
def test_texts_in_many_scripts_come_back_id_by_id(tokenizer: Any, text: str) -> None:
    ids = tokenizer.encode(text)
    detokenizer = tokenizer.detokenizer()
    assert "".join(detokenizer.add([id]) for id in ids) == tokenizer.decode(ids)
    assert detokenizer.finish() == ""


@every_text_kind
def test_decoding_each_id_alone_would_break_characters(tokenizer: Any) -> None:
    ids = tokenizer.encode("👩‍👩‍👧‍👦 𐍈")
    assert REPLACEMENT in "".join(tokenizer.decode([id]) for id in ids)
    assert REPLACEMENT not in tokenizer.decode(ids)


@every_kind
def test_each_token_costs_the_same_however_long_the_text(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    original = TokenBytes.of

    def counted(self: TokenBytes, id: int, *, first: bool) -> bytes:
        asked.append(id)
        return original(self, id, first=first)

    monkeypatch.setattr(TokenBytes, "of", counted)
    ids = [id for id in range(4, 11) if id not in tokenizer._tokens.special] or [20, 21]
    detokenizer = tokenizer.detokenizer()
    for id in ids * 200:
        detokenizer.add([id])
    assert asked == ids * 200


# --- Against the library's own decoder ---


@pytest.mark.parametrize(
    "tokenizer", [qwen3, byte_level, metaspace, metaspace_kept, no_decoder], indirect=True
)
@pytest.mark.parametrize("skip_special", [True, False])
@given(draw=st.data())
@settings(max_examples=40, deadline=None)
def test_any_ids_give_the_text_that_the_library_gives(
    tokenizer: Any, skip_special: bool, draw: st.DataObject
) -> None:
    ids = draw.draw(some_ids(tokenizer))
    expected = tokenizer._core.decode(ids, skip_special_tokens=skip_special)
    assert tokenizer.decode(ids, skip_special=skip_special) == expected


@pytest.mark.parametrize("tokenizer", [sentencepiece_bpe, sentencepiece_unigram, llama_json], indirect=True)
@given(draw=st.data())
@settings(max_examples=40, deadline=None)
def test_ids_whose_byte_runs_are_characters_give_the_text_that_the_library_gives(
    tokenizer: Any, draw: st.DataObject
) -> None:
    ids = draw.draw(some_ids(tokenizer))
    expected = tokenizer._core.decode(ids, skip_special_tokens=True)
    if REPLACEMENT in expected:
        assert REPLACEMENT in tokenizer.decode(ids)
    else:
        assert tokenizer.decode(ids) == expected


# --- Cases ---


def ids_of(tokenizer: Any, *tokens: str) -> list[int]:
    return [tokenizer._core.token_to_id(token) for token in tokens]


@pytest.mark.parametrize("tokenizer", [sentencepiece_bpe, llama_json], indirect=True)
def test_a_broken_byte_does_not_take_whole_characters_with_it(tokenizer: Any) -> None:
    ids = ids_of(tokenizer, "<0xE4>", "<0xBD>", "<0xA0>", "<0xE4>", "<0xBD>", "b")
    detokenizer = tokenizer.detokenizer()
    assert [detokenizer.add([id]) for id in ids] == ["", "", "你", "", "", REPLACEMENT + "b"]
    assert detokenizer.finish() == ""


@pytest.mark.parametrize("tokenizer", [sentencepiece_bpe, byte_level], indirect=True)
def test_a_broken_tail_becomes_a_replacement_character_at_the_end_only(tokenizer: Any) -> None:
    ids = tokenizer.encode("b\U00010348", add_bos=False)
    detokenizer = tokenizer.detokenizer()
    assert detokenizer.add(ids[:-1]).endswith("b")
    assert detokenizer.finish() == REPLACEMENT


@pytest.mark.parametrize("tokenizer", [sentencepiece_bpe], indirect=True)
def test_a_control_token_inside_a_character_does_not_break_it(tokenizer: Any) -> None:
    before, after = ids_of(tokenizer, "<0xE4>", "<0xBD>"), ids_of(tokenizer, "<0xA0>")
    detokenizer = tokenizer.detokenizer()
    assert detokenizer.add([*before, 2]) == ""
    assert detokenizer.add(after) == "你"


@pytest.mark.parametrize("tokenizer", [sentencepiece_bpe], indirect=True)
def test_only_the_first_space_of_a_stream_is_dropped(tokenizer: Any) -> None:
    ids = tokenizer.encode("the cat sat", add_bos=False)
    detokenizer = tokenizer.detokenizer()
    parts = [detokenizer.add([id]) for id in [1, *ids]]
    assert "".join(parts) == "the cat sat"
    assert [part for part in parts if part.startswith(" ")], "the control: later pieces keep theirs"


@pytest.mark.parametrize("tokenizer", [sentencepiece_bpe], indirect=True)
def test_a_stream_that_continues_a_text_keeps_its_first_space(tokenizer: Any) -> None:
    ids = tokenizer.encode("the cat sat", add_bos=False)
    after = next(n for n in range(1, len(ids)) if tokenizer.decode(ids[:n]) == "the")
    detokenizer = tokenizer.detokenizer(continues=True)
    assert detokenizer.add(ids[after:]) + detokenizer.finish() == " cat sat"
    assert tokenizer.decode(ids[after:]) == "cat sat", "the control: a text of its own has no such space"


@every_kind
def test_an_id_is_a_token_or_it_is_not(tokenizer: Any) -> None:
    assert tokenizer.has_token(0)
    assert not any(map(tokenizer.has_token, (-1, 2**33, tokenizer.vocab_size + 1000)))


def test_an_added_token_of_a_byte_level_vocabulary_is_its_own_text(tmp_path: Path) -> None:
    core = Tokenizer.from_file(str(tiny_byte_level(tmp_path) / "tokenizer.json"))
    core.add_tokens(["ä ö", "éa"])
    core.save(str(tmp_path / "tokenizer.json"))
    tokenizer = build(directory_data(tmp_path))
    assert tokenizer.decode(tokenizer.encode("x éa ä ö é")) == "x éa ä ö é"
    assert core.decode(core.encode("éa").ids) != "éa", "the control: the library reads its letters as bytes"


@pytest.mark.parametrize("tokenizer", [byte_level], indirect=True)
def test_a_bad_id_adds_nothing_of_its_call(tokenizer: Any) -> None:
    detokenizer = tokenizer.detokenizer()
    ids = tokenizer.encode("hello 世")
    given_out = detokenizer.add(ids[:-1])
    with pytest.raises(InvalidRequestError):
        detokenizer.add([ids[0], 10**6])
    assert given_out + detokenizer.add(ids[-1:]) == "hello 世"


UNSTREAMABLE = {
    "WordPiece": decoders.WordPiece(),
    "CTC": decoders.CTC(),
    "BPEDecoder": decoders.BPEDecoder(),
    "Strip": decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
    "Replace": decoders.Sequence([decoders.Fuse(), decoders.Replace("▁", " ")]),
}


@pytest.mark.parametrize(("name", "decoder"), UNSTREAMABLE.items())
def test_a_decoder_whose_text_is_certain_only_at_the_end_is_refused_by_name(
    tmp_path: Path, name: str, decoder: Any
) -> None:
    with pytest.raises(CheckpointError, match=rf"tokenizer\.json with the decoder .*{name}; needed: any of"):
        build(saved(tmp_path, decoder))


def test_a_replacement_by_pattern_is_refused(tmp_path: Path) -> None:
    saved(tmp_path, decoders.Replace("▁", " "))
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["decoder"]["pattern"] = {"Regex": "▁+"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="with the decoder Replace"):
        build(directory_data(tmp_path))
