"""Prompts in, text out."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import attrs

from fuel_core.contracts import RaggedDecodeModel, SamplingParams
from fuel_core.contracts.errors import FuelError, InvalidRequestError
from fuel_core.contracts.memory import parse_kv_memory
from fuel_core.contracts.requests import check_request
from fuel_core.contracts.sampling import is_ordered
from fuel_core.engine.loading import Loaded, load
from fuel_core.engine.output import Request
from fuel_core.engine.results import Completion, Delta
from fuel_core.engine.runs import ContiguousRun, PagedRun, blocks_of
from fuel_core.engine.served import check_positive
from fuel_core.engine.serving import Engine
from fuel_core.engine.sizing import build_engine

Prompt: TypeAlias = str | Sequence[int]


def generate(
    model: Loaded | str | Path,
    prompts: str | Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    max_new_tokens: int = 64,
    max_batch: int = 32,
    scheduler: str = "auto",
    kv_memory: str | int = "auto",
    engine: Engine | None = None,
) -> list[Completion]:
    """Generate for every prompt, side by side.

    Args:
        model: a loaded model, or a reference to load one by.
        prompts: texts or lists of token ids; one string is one prompt.
        params: for all prompts, or one for each; None is greedy.
        max_new_tokens: the most that a prompt may generate.
        max_batch: the most prompts that run at a time; the others wait in order.
        scheduler: ``paged`` (one pool, continuous batching), ``contiguous`` (a cache for each prompt), or
            ``auto``: paged where the model can.
        kv_memory: for the paged scheduler, bytes or a text; see :func:`build_engine`.
        engine: one to run on, which keeps its prefix cache between calls, with its own ``max_batch`` and
            ``kv_memory``; None makes one for this call.

    Returns:
        One completion per prompt, in order. One that failed while running has ``finish_reason`` ``error`` and
        leaves the others as they are.

    Raises:
        InvalidRequestError: a prompt or argument that cannot be served, before anything has run.
        CapacityError: a prompt that needs more KV memory than there is, before anything has run.
        FuelError: as :func:`load`, where ``model`` is a reference.
    """
    options = {"max_batch": max_batch, "scheduler": scheduler, "kv_memory": kv_memory, "engine": engine}
    deltas = stream(model, prompts, params, max_new_tokens=max_new_tokens, **options)  # type: ignore[arg-type]
    completions = {delta.index: delta.completion for delta in deltas if delta.completion is not None}
    return [completions[index] for index in sorted(completions)]


def stream(
    model: Loaded | str | Path,
    prompts: str | Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    max_new_tokens: int = 64,
    max_batch: int = 32,
    scheduler: str = "auto",
    kv_memory: str | int = "auto",
    engine: Engine | None = None,
) -> Generator[Delta, None, None]:
    """:func:`generate`, delta by delta as the tokens come; closing the iterator ends all prompts.

    Args: those of :func:`generate`.

    Raises:
        FuelError: as :func:`generate`, when called, not when first iterated.
    """
    asked = parse_kv_memory(kv_memory)  # also for an engine, which has its own
    check_positive(max_batch=max_batch)
    _check_choice(scheduler, engine)
    loaded = model if isinstance(model, Loaded) else load(model)
    requests = _requests(loaded, prompts, params, max_new_tokens)
    if not requests:
        return _nothing()
    if _is_contiguous(scheduler, loaded, engine):
        if asked is not None:
            raise InvalidRequestError(
                f"KV memory {kv_memory!r} for the contiguous scheduler",
                needed="auto: each prompt has a cache of its own",
                remedy="use the paged scheduler, or lower max_batch",
            )
        return ContiguousRun(loaded, requests, max_batch).__iter__()
    if engine is None:
        # More blocks than all requests can fill would be of no use.
        useful = sum(map(blocks_of, requests)) + 1
        engine = build_engine(loaded, kv_memory=kv_memory, max_batch=max_batch, max_blocks=useful)
    return PagedRun(loaded, engine, requests).__iter__()


def _nothing() -> Generator[Delta, None, None]:
    yield from ()


def _check_choice(scheduler: str, engine: Engine | None) -> None:
    if scheduler not in ("auto", "paged", "contiguous"):
        raise InvalidRequestError(
            f"scheduler {scheduler!r}", needed="auto, paged or contiguous", remedy="choose one of them"
        )
    if engine is not None and scheduler == "contiguous":
        raise InvalidRequestError(
            "an engine for the contiguous scheduler", needed="one or the other", remedy="leave one out"
        )
    if engine is not None and not isinstance(engine, Engine):
        raise InvalidRequestError(
            f"an engine of type {type(engine).__name__}",
            needed="an Engine, or None",
            remedy="make one with build_engine(loaded)",
        )


def _is_contiguous(scheduler: str, loaded: Loaded, engine: Engine | None) -> bool:
    pageable = isinstance(loaded.model, RaggedDecodeModel)
    return scheduler == "contiguous" or (scheduler == "auto" and not pageable and engine is None)


def _requests(
    loaded: Loaded,
    prompts: str | Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams] | None,
    max_new_tokens: int,
) -> list[Request]:
    """Tokenize and check every prompt before any of them runs."""
    texts = [prompts] if isinstance(prompts, str) else _listed(prompts)
    params = SamplingParams() if params is None else params
    each = list(params) if isinstance(params, Sequence) else [params] * len(texts)
    for given in each:
        if not isinstance(given, SamplingParams):
            raise InvalidRequestError(
                f"params of type {type(given).__name__}",
                needed="SamplingParams",
                remedy="pass SamplingParams(...)",
            )
    if len(each) != len(texts):
        raise InvalidRequestError(
            f"{len(each)} sets of parameters for {len(texts)} prompts",
            needed="one for all, or one for each",
            remedy="pass as many as there are prompts",
        )
    return [
        _request(loaded, i, len(texts), *pair, max_new_tokens)
        for i, pair in enumerate(zip(texts, each, strict=True))
    ]


_CHAT = "encode the messages of a chat first: [loaded.tokenizer.encode_chat(messages)] is one prompt"


def _listed(prompts: Iterable[Prompt]) -> list[Prompt]:
    if not is_ordered(prompts):
        raise InvalidRequestError(
            f"prompts of type {type(prompts).__name__}",
            needed="a text, or a list of texts and of lists of token ids",
            remedy=_CHAT if isinstance(prompts, Mapping) else "wrap it into a list of prompts",
        )
    return list(prompts)


def _request(
    loaded: Loaded, index: int, count: int, prompt: Prompt, params: SamplingParams, max_new_tokens: int
) -> Request:
    try:
        tokens = _tokens(loaded, prompt)
        sampling = attrs.evolve(params, stop=())
        check_request(
            tokens,
            sampling,
            max_new_tokens,
            vocab_size=loaded.model.vocab_size(),
            max_context=loaded.max_context,
        )
    except FuelError as error:
        if count == 1:
            raise
        raise InvalidRequestError(
            f"prompt {index + 1} of {count}: {error.given}",
            needed=error.needed,
            remedy=error.remedy,
            **{**error.figures, "prompt_index": index},
        ) from error
    return Request(index, tokens, sampling, max_new_tokens, params.stop)


def _tokens(loaded: Loaded, prompt: Prompt) -> list[int]:
    if isinstance(prompt, str):
        if not prompt:
            raise InvalidRequestError(
                "an empty prompt", needed="at least one character", remedy="give a text"
            )
        return loaded.tokenizer.encode(prompt)
    ids = getattr(prompt, "tolist", lambda: prompt)()  # of an array or a tensor
    if not is_ordered(prompt) or not isinstance(ids, Sequence):
        other = "wrap a single list of ids into a list of prompts, and decode bytes"
        raise InvalidRequestError(
            f"a prompt of type {type(prompt).__name__}",
            needed="a text, or a list of token ids",
            remedy=_CHAT if isinstance(ids, Mapping) else other,
        )
    return list(ids)
