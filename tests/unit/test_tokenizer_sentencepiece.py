"""SentencePiece vocabularies from GGUF keys, with the sentencepiece library as the oracle."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sentencepiece import SentencePieceProcessor
from support_text import TEXTS, build, gguf_keys, gguf_of_sentencepiece, texts, train_sentencepiece

from fuel_core.contracts.errors import CheckpointError

USER_DEFINED = ("<tool>", "ab", "  ")
REPEATS = (
    "hahahahaha",
    "aaaaaaaaaaa",
    "abababababa",
    "......... .....",
    "bananananas banana",
    "-" * 23,
    " " * 9,
)


@pytest.fixture(scope="module")
def bpe() -> SentencePieceProcessor:
    return train_sentencepiece("bpe", 700)


@pytest.fixture(scope="module")
def unigram() -> SentencePieceProcessor:
    return train_sentencepiece("unigram", 460)


@pytest.fixture(scope="module")
def ours(bpe: SentencePieceProcessor) -> Any:
    return build(gguf_of_sentencepiece(bpe, add_bos_token=False))


@pytest.fixture(scope="module")
def ours_unigram(unigram: SentencePieceProcessor) -> Any:
    return build(gguf_of_sentencepiece(unigram, model="t5", add_space_prefix=True))


def without_control(text: str) -> str:
    """SentencePiece spells control tokens out, where every chat model wants them recognised."""
    return re.sub("<unk>|</?s>", "", text)


# --- BPE ---


@pytest.mark.parametrize("text", [*TEXTS, *REPEATS])
def test_bpe_ids_and_text_are_those_of_sentencepiece(
    bpe: SentencePieceProcessor, ours: Any, text: str
) -> None:
    ids = ours.encode(text)
    assert ids == bpe.encode(text)
    assert ours.decode(ids) == bpe.decode(ids)


@given(text=texts)
@settings(max_examples=400, deadline=None)
def test_bpe_ids_are_those_of_sentencepiece_on_any_text(
    bpe: SentencePieceProcessor, ours: Any, text: str
) -> None:
    text = without_control(text)
    assert ours.encode(text) == bpe.encode(text)


def joined_by_score(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece's BPE, spelled out: the best pair joins first, the leftmost of equals."""
    pieces = list(text)
    while True:
        pairs = [(left + right, at) for at, (left, right) in enumerate(pairwise(pieces))]
        known = [(-scores[pair], at) for pair, at in pairs if pair in scores]
        if not known:
            return pieces
        at = min(known)[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]


vocabularies = st.lists(st.text("ab", min_size=2, max_size=6), unique=True, max_size=25)


@given(best_first=vocabularies, text=st.text("ab", max_size=24), repeat=st.integers(1, 3))
@settings(max_examples=300, deadline=None)
def test_any_scores_join_the_pieces_that_they_say(best_first: list[str], text: str, repeat: int) -> None:
    scores = {"<unk>": 0.0, "<s>": 0.0, "</s>": 0.0, "a": -1e6, "b": -1e6}
    scores |= {piece: -float(rank) for rank, piece in enumerate(best_first)}
    types = np.array([2, 3, 3] + [1] * (len(scores) - 3))
    keys = gguf_keys(model="llama", tokens=list(scores), scores=list(scores.values()), token_type=types)
    tokenizer = build(keys | gguf_keys(add_space_prefix=False, add_bos_token=False))
    ids = tokenizer.encode(text * repeat)
    assert [list(scores)[id] for id in ids] == joined_by_score(text * repeat, scores)


def test_the_order_of_the_scores_matters(bpe: SentencePieceProcessor) -> None:
    keys = gguf_of_sentencepiece(bpe, add_bos_token=False)
    upside_down = build(keys | gguf_keys(scores=-keys["tokenizer.ggml.scores"]))
    assert any(upside_down.encode(text) != bpe.encode(text) for text in TEXTS)


def test_without_byte_tokens_an_unknown_run_is_one_unknown_token() -> None:
    processor = train_sentencepiece("bpe", 400, byte_fallback=False)
    tokenizer = build(gguf_of_sentencepiece(processor, add_bos_token=False))
    for text in ("the 🙂🙂 cat", "🙂", "cat🙂"):
        assert tokenizer.encode(text) == processor.encode(text)
    assert tokenizer.encode("🙂🙂").count(0) == 1


@pytest.mark.parametrize("text", ["hello  <tool>ab  cd", "<tool>", "cabab", "x<tool><tool>y", "a b  c    d"])
def test_user_defined_pieces_cut_the_text_and_each_part_begins_anew(text: str) -> None:
    processor = train_sentencepiece("bpe", 700, user_defined_symbols=["<tool>", "ab", "▁▁"])
    tokenizer = build(gguf_of_sentencepiece(processor, USER_DEFINED, add_bos_token=False))
    parts = [part for part in re.split("(<tool>|ab|  )", text) if part]
    expected = [id for part in parts for id in encoded(processor, part)]
    assert tokenizer.encode(text) == expected


def encoded(processor: SentencePieceProcessor, part: str) -> list[int]:
    """llama.cpp's rule: a user-defined piece is its token, and what follows it gets a space before it."""
    if part in USER_DEFINED:
        return [processor.piece_to_id(part.replace(" ", "▁"))]
    return list(processor.encode(part))


def test_no_space_is_put_before_a_text_where_the_file_says_so() -> None:
    processor = train_sentencepiece("bpe", 700, add_dummy_prefix=False)
    tokenizer = build(gguf_of_sentencepiece(processor, add_bos_token=False, add_space_prefix=False))
    for text in TEXTS:
        assert tokenizer.encode(text) == processor.encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == processor.decode(processor.encode(text))


def test_one_space_of_the_start_belongs_to_the_vocabulary_and_no_more(ours: Any) -> None:
    for text in ("the cat", " the cat", "   the cat", " "):
        assert ours.decode(ours.encode(text)) == text


def test_llama_adds_bos_unless_the_file_says_otherwise(bpe: SentencePieceProcessor, ours: Any) -> None:
    tokenizer = build(gguf_of_sentencepiece(bpe))
    assert tokenizer.adds_bos
    assert tokenizer.encode("the cat") == [1, *bpe.encode("the cat")]
    assert tokenizer.encode("<s>the cat") == [1, *bpe.encode("the cat")]
    assert not ours.adds_bos


def test_a_file_without_ids_of_bos_and_eos_means_one_and_two(bpe: SentencePieceProcessor) -> None:
    absent = gguf_of_sentencepiece(bpe, bos_token_id=None, eos_token_id=None, unknown_token_id=None)
    tokenizer = build(absent)
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (1, {2})


def test_control_tokens_in_a_text_are_recognised_and_skipped_in_a_decode(ours: Any) -> None:
    ids = ours.encode("the cat</s>the dog")
    assert 2 in ids
    assert ours.decode(ids) == "the cat the dog"
    assert ours.decode(ids, skip_special=False) == "the cat</s> the dog"


def test_pieces_of_a_text_never_join_to_a_control_token() -> None:
    tokens, scores = ["<unk>", "<s>", "</s>", "▁", "x", "▁x"], [0.0, 0.0, 0.0, -2.0, -3.0, -1.0]
    keys = gguf_keys(model="llama", tokens=tokens, scores=scores, add_bos_token=False)
    assert build(keys | gguf_keys(token_type=[2, 3, 3, 1, 1, 3])).encode("x") == [3, 4]
    assert build(keys | gguf_keys(token_type=[2, 3, 3, 1, 1, 1])).encode("x") == [5], "the control"


# --- Unigram ---


def likelihood(processor: SentencePieceProcessor, ids: list[int]) -> float:
    return float(sum(processor.get_score(id) for id in ids))


def assert_as_likely(processor: SentencePieceProcessor, ids: list[int], text: str) -> None:
    """The ids of sentencepiece, or a cut of the same text that is equally likely: it may choose either."""
    theirs = processor.encode(text)
    if ids != theirs:
        assert processor.decode(ids) == processor.decode(theirs)
        assert likelihood(processor, ids) == pytest.approx(likelihood(processor, theirs), abs=1e-4)


@pytest.mark.parametrize("text", TEXTS)
def test_unigram_ids_are_those_of_sentencepiece(
    unigram: SentencePieceProcessor, ours_unigram: Any, text: str
) -> None:
    ids = ours_unigram.encode(text)
    assert_as_likely(unigram, ids, text)
    assert ours_unigram.decode(ids) == unigram.decode(ids)


@given(text=texts)
@settings(max_examples=300, deadline=None)
def test_unigram_ids_are_those_of_sentencepiece_on_any_text(
    unigram: SentencePieceProcessor, ours_unigram: Any, text: str
) -> None:
    text = without_control(text)
    assert_as_likely(unigram, ours_unigram.encode(text), text)


def test_most_unigram_texts_have_exactly_the_ids_of_sentencepiece(
    unigram: SentencePieceProcessor, ours_unigram: Any
) -> None:
    same = [ours_unigram.encode(text) == unigram.encode(text) for text in TEXTS]
    assert sum(same) >= len(TEXTS) - 1


def test_unigram_normalization_is_sentencepieces_own() -> None:
    processor = train_sentencepiece(
        "unigram", 460, normalization_rule_name="nmt_nfkc", remove_extra_whitespaces=True
    )
    charsmap = np.frombuffer(normalizer_of(processor), dtype=np.uint8)
    keys = gguf_of_sentencepiece(processor, model="t5", add_space_prefix=True)
    tokenizer = build(keys | gguf_keys(precompiled_charsmap=charsmap, remove_extra_whitespaces=True))
    for text in ("  ﬁne   ½ \t \uff21\uff22  ", "Å and A\u030a", *TEXTS[:12]):
        assert_as_likely(processor, tokenizer.encode(text), text)
    assert build(keys).encode("\uff21\uff22") != processor.encode("\uff21\uff22"), "the control"


def normalizer_of(processor: SentencePieceProcessor) -> bytes:
    from sentencepiece import sentencepiece_model_pb2 as pb

    model = pb.ModelProto.FromString(processor.serialized_model_proto())
    return bytes(model.normalizer_spec.precompiled_charsmap)


def test_a_byte_token_spelled_out_in_a_text_is_not_that_byte(ours: Any, ours_unigram: Any) -> None:
    for tokenizer in (ours, ours_unigram):
        assert tokenizer.decode(tokenizer.encode("a <0x41> b")) == "a <0x41> b"


# --- Bad input ---


def test_missing_or_malformed_scores_are_refused(bpe: SentencePieceProcessor) -> None:
    keys = gguf_of_sentencepiece(bpe)
    for scores in (None, keys["tokenizer.ggml.scores"][1:], ["high"] * 700, np.full(700, np.nan)):
        for model in ("llama", "t5"):
            with pytest.raises(CheckpointError, match=r"tokenizer\.ggml\.scores"):
                build(keys | {"tokenizer.ggml.scores": scores, "tokenizer.ggml.model": model})


@pytest.mark.parametrize("charsmap", [b"abc", b"\xff\xff\xff\x7fabc"])
def test_a_damaged_character_map_is_refused(unigram: SentencePieceProcessor, charsmap: bytes) -> None:
    more = gguf_keys(precompiled_charsmap=np.frombuffer(charsmap, dtype=np.uint8))
    with pytest.raises(CheckpointError, match="its tokenizer cannot be built"):
        build(gguf_of_sentencepiece(unigram, model="t5") | more)
