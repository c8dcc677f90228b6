"""What the engine refuses, at once and with nothing changed."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from support_engine import ask, drain, engine_of, serve
from support_models import CoreOnlyModel, MlaShapedModel
from support_paged import make_pool, model_of, pool_for

from fuel_core.contracts import DecodeModel
from fuel_core.contracts.errors import (
    CapacityError,
    FuelError,
    InvalidRequestError,
    ModelContractError,
    NonUniformStateError,
    UnsupportedTierError,
)
from fuel_core.engine import Engine

MODEL = model_of("llama")


@pytest.mark.parametrize(
    ("length", "max_new", "need"), [(10, 8, 5), (17, 1, 5), (1, 17, 5), (33, 8, 10)], ids=str
)
def test_what_can_never_fit_is_refused_at_once_with_what_it_needs(
    length: int, max_new: int, need: int
) -> None:
    engine = engine_of(MODEL, 4)
    with pytest.raises(CapacityError, match=f"needs {need} KV blocks") as caught:
        engine.submit(ask(length).prompt, max_new_tokens=max_new)
    assert caught.value.figures == {"need": need, "have": 4}
    assert (engine._sessions, list(engine._waiting)) == ({}, [])
    # One token less fits to the last slot.
    serve(engine, MODEL, ask(max(1, 17 - max_new), min(max_new, 16)))
    drain(engine)


@pytest.mark.parametrize("n", [0, -1, 5, True, 1.0, None])
def test_a_number_of_samples_that_cannot_run_together_is_refused(n: object) -> None:
    engine = engine_of(MODEL, max_batch=4)
    with pytest.raises(InvalidRequestError, match="samples"):
        engine.submit([1], max_new_tokens=1, n=n)  # type: ignore[arg-type]
    assert engine._next_id == 0


@pytest.mark.parametrize("prompt", [(), (96,), (-1,), ("a",)])
def test_a_bad_prompt_is_refused_and_takes_no_id(prompt: Sequence[int]) -> None:
    engine = engine_of(MODEL)
    with pytest.raises(InvalidRequestError):
        engine.submit(prompt, max_new_tokens=1, n=2)
    assert (engine._next_id, list(engine._waiting)) == (0, [])


@pytest.mark.parametrize(
    "limits",
    [
        *({name: value} for name in ("max_batch", "token_budget") for value in (0, -1, True, 2.0, "4")),
        *({"watermark": value} for value in (-0.1, 1, 1.5, float("nan"), "0.5", True)),
    ],
    ids=str,
)
def test_a_limit_that_is_none_is_refused(limits: dict[str, object]) -> None:
    with pytest.raises(InvalidRequestError, match=next(iter(limits))):
        Engine(MODEL, pool_for(MODEL), **limits)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("model", "error"),
    [
        (CoreOnlyModel(), UnsupportedTierError),
        (MlaShapedModel(), FuelError),
        (model_of("llama", num_hidden_layers=3), ModelContractError),
    ],
    ids=["core tier only", "another kind of state", "another number of layers"],
)
def test_a_model_that_the_pool_does_not_fit_is_declined_at_once(
    model: DecodeModel, error: type[FuelError]
) -> None:
    with pytest.raises(error) as caught:
        Engine(model, make_pool())
    assert isinstance(caught.value, UnsupportedTierError | NonUniformStateError | ModelContractError)
