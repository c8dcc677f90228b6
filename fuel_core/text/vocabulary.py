"""What every tokenizer is built from, wherever its vocabulary was found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import attrs
import numpy as np  # noqa: F401 - imported by the library itself, an interrupt in the midst of it would be lost
import tokenizers

from fuel_core.contracts.errors import CheckpointError, FuelError


@attrs.frozen
class Vocabulary:
    """A tokenizer of the ``tokenizers`` library and what its checkpoint says around it.

    Attributes:
        core: encodes text; it adds no token of its own.
        bos_id: the token that begins a text, or None.
        adds_bos: whether the model wants ``bos_id`` before every text.
        eos_ids: the ids that end a text.
        special_tokens: ``bos_token``, ``eos_token`` and the like, as a chat template names them.
    """

    core: tokenizers.Tokenizer
    bos_id: int | None
    adds_bos: bool
    eos_ids: frozenset[int]
    special_tokens: Mapping[str, str]


@contextmanager
def refused_by_library(given: str) -> Iterator[None]:
    """Turns what the ``tokenizers`` library raises on bad data into our error.

    Raises:
        CheckpointError: the library refused the data.
    """
    try:
        yield
    except FuelError:
        raise
    except BaseException as error:
        # A Rust panic reaches Python as a BaseException of this module, which cannot be imported.
        if not isinstance(error, Exception) and type(error).__module__ != "pyo3_runtime":
            raise
        reason = " ".join(str(error).split())
        raise CheckpointError(
            f"{given}: {reason}",
            needed="a tokenizer that the tokenizers library can build",
            remedy="fetch the model again, or convert it anew",
        ) from error
