"""Text to token ids and back, for every checkpoint that brings a vocabulary."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import attrs

from fuel_core.contracts.checkpoint import TokenizerData
from fuel_core.contracts.errors import InvalidRequestError
from fuel_core.text.chat import ChatTemplate
from fuel_core.text.detokenize import IncrementalDetokenizer, TokenBytes
from fuel_core.text.gguf_vocab import read_gguf_vocabulary
from fuel_core.text.hf_vocab import read_directory_vocabulary
from fuel_core.text.vocabulary import Vocabulary


class Tokenizer:
    """The text side of one model.

    Attributes:
        vocab_size: the number of tokens, added ones included.
        bos_id: the token that begins a text, or None.
        adds_bos: whether the model wants ``bos_id`` before every text.
        eos_ids: the ids that end a text.
    """

    def __init__(self, vocabulary: Vocabulary, template: str | None, *, source: str) -> None:
        self._core = vocabulary.core
        self._tokens = TokenBytes(vocabulary.core, source=source)
        self._template = ChatTemplate(template, vocabulary.special_tokens, source=source)
        self.vocab_size = vocabulary.core.get_vocab_size(with_added_tokens=True)
        self.bos_id = vocabulary.bos_id
        self.adds_bos = vocabulary.adds_bos
        self.eos_ids = vocabulary.eos_ids

    def encode(self, text: str, *, add_bos: bool = True) -> list[int]:
        """The ids of ``text``, in which special tokens are recognised.

        Where the model wants BOS there is exactly one at the start, even if the text begins with its own;
        with ``add_bos`` false the text's ids stand as they are. EOS is never added.

        Raises:
            InvalidRequestError: ``text`` is not a string, or holds half of a surrogate pair.
        """
        try:
            ids: list[int] = self._core.encode(text, add_special_tokens=False).ids
        except TypeError as error:
            raise _not_text(text) from error
        return self._with_one_bos(ids) if add_bos and self.adds_bos else ids

    def _with_one_bos(self, ids: list[int]) -> list[int]:
        own = next((n for n, id in enumerate(ids) if id != self.bos_id), len(ids))
        return [self.bos_id, *ids[own:]] if self.bos_id is not None else ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of ``ids``, with U+FFFD for bytes that are no character.

        Args:
            skip_special: leave control tokens out; other added tokens are text.

        Raises:
            InvalidRequestError: an id that is no token.
        """
        detokenizer = IncrementalDetokenizer(self._tokens, skip_special=skip_special)
        return detokenizer.add(ids) + detokenizer.finish()

    def detokenizer(self, *, continues: bool = False) -> IncrementalDetokenizer:
        """A fresh detokenizer for one stream of ids; ``continues`` says that they follow others."""
        return IncrementalDetokenizer(self._tokens, continues=continues)

    def has_token(self, id: int) -> bool:
        """Whether a token has this id; a model's last rows may stand for none."""
        return self._tokens.has(id)

    @property
    def has_chat_template(self) -> bool:
        """Whether the checkpoint says how a conversation is written."""
        return self._template.is_present

    def render_chat(
        self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True
    ) -> str:
        """The conversation as the model's own template writes it.

        Args:
            messages: each with ``role`` and ``content``.
            add_generation_prompt: end with what begins the model's answer.

        Raises:
            InvalidRequestError: no template, malformed messages, or messages that the template refuses.
            CheckpointError: the template is not valid Jinja, or does what a template must not do.
        """
        return self._template.render(messages, add_generation_prompt=add_generation_prompt)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The ids of ``render_chat(messages)``, ready to be answered. Raises as ``render_chat`` does."""
        return self.encode(self.render_chat(messages))


def build_tokenizer(data: TokenizerData, *, source: str) -> Tokenizer:
    """The tokenizer of a checkpoint.

    Args:
        data: what the checkpoint's reader found; GGUF keys, where there are any, come first.
        source: where it was found, for messages.

    Raises:
        CheckpointError: a part is missing, damaged or of a kind that is not known; the text says which.
    """
    if data.gguf:
        vocabulary = read_gguf_vocabulary(data.gguf, source=source)
    else:
        vocabulary = read_directory_vocabulary(data, source=source)
    every_eos = attrs.evolve(vocabulary, eos_ids=vocabulary.eos_ids | data.eos_ids)
    return Tokenizer(every_eos, data.chat_template, source=source)


def _not_text(text: object) -> InvalidRequestError:
    given = (
        "text with half of a surrogate pair" if isinstance(text, str) else f"{type(text).__name__} as text"
    )
    return InvalidRequestError(
        given, needed="a str of whole characters", remedy="decode the input as UTF-8 first"
    )
