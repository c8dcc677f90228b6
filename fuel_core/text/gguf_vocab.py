"""Tokenizers from the ``tokenizer.ggml.*`` keys of a GGUF file.

Source of the keys: GGUF's specification. Source of their meaning and defaults: llama.cpp's llama-vocab.cpp.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from fuel_core.contracts.errors import CheckpointError
from fuel_core.text.pretokenizers import PRE_TOKENIZERS
from fuel_core.text.vocabulary import Vocabulary, refused_by_library

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
_SPACE = "▁"  # SentencePiece's mark for a space
_REMEDY = "fetch the file again, or convert the model anew"

# A literal "<0x41>" in a text must not become the byte token of that spelling: cut it after the bracket.
_BYTE_SPELLING = r"<(?=0x[0-9A-F]{2}>)"


@attrs.frozen
class _Keys:
    """The ``tokenizer.ggml.*`` keys, checked as they are read."""

    values: Mapping[str, Any]
    source: str

    def get(self, name: str) -> Any:
        return self.values.get(f"tokenizer.ggml.{name}")

    def refusal(self, given: str, needed: str, remedy: str = _REMEDY) -> CheckpointError:
        return CheckpointError(f"{self.source}: {given}", needed=needed, remedy=remedy)

    def strings(self, name: str) -> list[str]:
        value = self.get(name)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.refusal(f"no list of strings under tokenizer.ggml.{name}", "one")
        return value

    def per_token(self, name: str, count: int) -> npt.NDArray[Any]:
        values = np.asarray(() if self.get(name) is None else self.get(name))
        if values.shape != (count,):
            raise self.refusal(
                f"{values.size} values under tokenizer.ggml.{name}", f"one for each of {count} tokens"
            )
        if not np.issubdtype(values.dtype, np.number) or not np.isfinite(values).all():
            raise self.refusal(f"values under tokenizer.ggml.{name} that are no finite numbers", "only such")
        return values

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name)
        return default if value is None else bool(value)

    def token_id(self, name: str, count: int, default: int | None = None) -> int | None:
        value = self.get(f"{name}_token_id")
        value = default if value is None else value
        if value is None:
            return None
        if not isinstance(value, (int, np.integer)) or not 0 <= value < count:
            raise self.refusal(f"{name}_token_id {value}", f"the id of one of {count} tokens")
        return int(value)


@attrs.frozen
class _Tokens:
    """The vocabulary: a text and a type for each id, and the ids that have a meaning."""

    texts: list[str]
    types: npt.NDArray[np.int64]  # [tokens]
    ids: Mapping[str, int]  # of bos, eos, eot, eom, unknown and padding, as far as declared

    def of_type(self, *types: int) -> list[int]:
        return [int(id) for id in np.flatnonzero(np.isin(self.types, types))]

    def text_of(self, name: str) -> str | None:
        return self.texts[self.ids[name]] if name in self.ids else None

    def vocab(self) -> dict[str, int]:
        return {text: id for id, text in enumerate(self.texts)}


_SPECIAL = ("bos", "eos", "eot", "eom", "unknown", "padding")
_END = ("eos", "eot", "eom")
_DEFAULT_IDS: Mapping[str, Mapping[str, int]] = {
    "llama": {"bos": 1, "eos": 2, "unknown": 0},
    "t5": {"eos": 1, "unknown": 2, "padding": 0},
}


def _read_tokens(keys: _Keys, model: str) -> _Tokens:
    # An empty text cannot be told from no token, so it gets llama.cpp's name for it.
    texts = [text or f"[EMPTY_{id}]" for id, text in enumerate(keys.strings("tokens"))]
    if len(set(texts)) != len(texts):
        twice = Counter(texts).most_common(1)[0][0]
        raise keys.refusal(f"the token {twice!r} stands twice in tokenizer.ggml.tokens", "each token once")
    defaults = _DEFAULT_IDS.get(model, {})
    found = {name: keys.token_id(name, len(texts), defaults.get(name)) for name in _SPECIAL}
    ids = {name: id for name, id in found.items() if id is not None}
    return _Tokens(texts, _read_types(keys, len(texts), ids), ids)


def _read_types(keys: _Keys, count: int, ids: Mapping[str, int]) -> npt.NDArray[np.int64]:
    if keys.get("token_type") is not None:
        return keys.per_token("token_type", count).astype(np.int64)
    types = np.full(count, _NORMAL, dtype=np.int64)  # [tokens]
    types[[id for name, id in ids.items() if name in ("bos", *_END)]] = _CONTROL
    return types


def _read_merges(keys: _Keys, vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    merges = []
    for number, merge in enumerate(keys.strings("merges")):
        left, space, right = merge.partition(" ")
        # Checked here, because the library panics on a merge that leads outside of its vocabulary.
        if not (space and left in vocab and right in vocab and left + right in vocab):
            raise keys.refusal(f"merge {number} is {merge!r}", "two tokens whose concatenation is a token")
        merges.append((left, right))
    return merges


def _byte_level_bpe(keys: _Keys, tokens: _Tokens) -> tuple[Tokenizer, bool]:
    name = keys.get("pre") or "default"
    if name not in PRE_TOKENIZERS:
        remedy = "use the model's Hugging Face directory instead"
        raise keys.refusal(f"tokenizer.ggml.pre is {name!r}", f"one of {', '.join(PRE_TOKENIZERS)}", remedy)
    pre, vocab = PRE_TOKENIZERS[name], tokens.vocab()
    model = models.BPE(vocab=vocab, merges=_read_merges(keys, vocab), ignore_merges=pre.ignores_merges)
    core = Tokenizer(model)
    if pre.normalizer is not None:
        core.normalizer = pre.normalizer
    core.pre_tokenizer = pre.pre_tokenizer
    core.decoder = decoders.ByteLevel()
    return core, pre.adds_bos


def _merges_by_score(scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """Every way to join two pieces to a third, the best third first (source: SentencePiece's bpe_model.cc).

    The order among the cuts of one piece is left open: joining the leftmost of equals first, as both
    libraries do, never leaves two of them to choose from.
    """
    cuts = (
        (piece[:at], piece[at:])
        for piece in scores
        for at in range(1, len(piece))
        if piece[:at] in scores and piece[at:] in scores
    )
    return sorted(cuts, key=lambda cut: -scores[cut[0] + cut[1]])


def _sentencepiece_bpe(keys: _Keys, tokens: _Tokens) -> tuple[Tokenizer, bool]:
    scores = keys.per_token("scores", len(tokens.texts)).tolist()
    mergeable = {tokens.texts[id]: scores[id] for id in tokens.of_type(_NORMAL)}
    model = models.BPE(
        vocab=tokens.vocab(),
        merges=_merges_by_score(mergeable),
        unk_token=tokens.text_of("unknown"),
        fuse_unk=True,
        byte_fallback=bool(tokens.of_type(_BYTE)),
    )
    core, prefix = Tokenizer(model), keys.flag("add_space_prefix", True)
    core.normalizer = normalizers.Sequence(_space_marks(prefix))
    core.decoder = _space_decoder(prefix)
    return core, True


def _unigram(keys: _Keys, tokens: _Tokens) -> tuple[Tokenizer, bool]:
    scores = keys.per_token("scores", len(tokens.texts)).tolist()
    has_bytes, prefix = bool(tokens.of_type(_BYTE)), keys.flag("add_space_prefix", False)
    model = models.Unigram(list(zip(tokens.texts, scores, strict=True)), tokens.ids["unknown"], has_bytes)
    core = Tokenizer(model)
    core.normalizer = normalizers.Sequence([*_unigram_normalizers(keys), *_space_marks(prefix)])
    if has_bytes:
        core.pre_tokenizer = pre_tokenizers.Split(Regex(_BYTE_SPELLING), behavior="isolated")
    core.decoder = _space_decoder(prefix)
    return core, False


def _unigram_normalizers(keys: _Keys) -> list[normalizers.Normalizer]:
    charsmap = keys.get("precompiled_charsmap")
    steps: list[normalizers.Normalizer] = []
    if charsmap is not None and len(charsmap):
        steps.append(normalizers.Precompiled(np.asarray(charsmap).astype(np.uint8).tobytes()))
    if keys.flag("remove_extra_whitespaces", False):
        steps += [normalizers.Replace(Regex("^ +| +$"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    return steps


def _space_marks(prefix: bool) -> list[normalizers.Normalizer]:
    steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", _SPACE)]
    return [normalizers.Prepend(_SPACE), *steps] if prefix else steps


def _space_decoder(prefix: bool) -> decoders.Decoder:
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)


_MODELS: Mapping[str, Callable[[_Keys, _Tokens], tuple[Tokenizer, bool]]] = {
    "gpt2": _byte_level_bpe,
    "llama": _sentencepiece_bpe,
    "t5": _unigram,
}


def _added(tokens: _Tokens) -> list[AddedToken]:
    """The tokens that are found in a text before it is cut; those a user defined are text, not control."""
    return [
        AddedToken(tokens.texts[id], normalized=False, special=bool(tokens.types[id] != _USER_DEFINED))
        for id in tokens.of_type(_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]


def read_gguf_vocabulary(values: Mapping[str, Any], *, source: str) -> Vocabulary:
    """The vocabulary of a GGUF file.

    Args:
        values: the ``tokenizer.*`` keys: numeric arrays as numpy arrays, string arrays as lists.
        source: the file, for messages.

    Raises:
        CheckpointError: a kind of tokenizer that is not known, a key that is missing, arrays whose
            lengths differ, merges that are not pairs of tokens, an id that is no token.
    """
    keys = _Keys(values, source)
    model = keys.get("model")
    if model not in _MODELS:
        remedy = "use the model's Hugging Face directory instead"
        raise keys.refusal(f"tokenizer.ggml.model is {model!r}", f"one of {', '.join(_MODELS)}", remedy)
    tokens = _read_tokens(keys, model)
    with refused_by_library(f"{source}: its tokenizer cannot be built"):
        core, adds_bos = _MODELS[model](keys, tokens)
        core.add_tokens(_added(tokens))
    return _assemble(keys, tokens, core, keys.flag("add_bos_token", adds_bos))


def _assemble(keys: _Keys, tokens: _Tokens, core: Tokenizer, adds_bos: bool) -> Vocabulary:
    if adds_bos and "bos" not in tokens.ids:
        raise keys.refusal("it wants BOS before every text but has no bos_token_id", "one")
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    return Vocabulary(
        core=core,
        bos_id=tokens.ids.get("bos"),
        adds_bos=adds_bos,
        eos_ids=frozenset(tokens.ids[name] for name in _END if name in tokens.ids),
        special_tokens={names[name]: tokens.texts[id] for name, id in tokens.ids.items() if name in names},
    )
