"""How the text is cut before byte-level BPE, by the names that GGUF files give in ``tokenizer.ggml.pre``."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
from tokenizers import Regex, normalizers, pre_tokenizers

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _tiktoken(digits: str) -> str:
    return (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


@attrs.frozen
class PreTokenizer:
    r"""What a byte-level vocabulary expects of its text.

    Attributes:
        splits: regular expressions (Oniguruma), applied one after the other; each match becomes a word of
            its own, as does each gap between two matches.
        nfc: whether the text is brought to Unicode's NFC first.
        ignores_merges: whether a word that is a token stays whole, whatever the merges say.
        adds_bos: whether such models want BOS where the file does not say.
    """

    splits: tuple[str, ...]
    nfc: bool = False
    ignores_merges: bool = False
    adds_bos: bool = False

    @property
    def normalizer(self) -> normalizers.Normalizer | None:
        """The library's normalizer."""
        return normalizers.NFC() if self.nfc else None

    @property
    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        """The library's pre-tokenizer: the splits, then bytes as characters."""
        splits = [pre_tokenizers.Split(Regex(split), behavior="isolated") for split in self.splits]
        return pre_tokenizers.Sequence(
            [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )


_LLAMA3 = PreTokenizer((_tiktoken(r"\p{N}{1,3}"),), ignores_merges=True, adds_bos=True)

# Source: llm_tokenizer_bpe in llama.cpp's llama-vocab.cpp, and the tokenizer.json files of the models named.
PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": PreTokenizer((_GPT2,)),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": PreTokenizer((_tiktoken(r"\p{N}"),), nfc=True),
    "smollm": PreTokenizer((r"\p{N}", _GPT2)),
}
