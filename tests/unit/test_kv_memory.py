"""How large an engine's pool is: what is asked for, and no more than is there or of use."""

from __future__ import annotations

import attrs
import pytest
import torch
from support_checkpoints import write_directory
from support_engine import ask
from support_models import CoreOnlyModel, MlaShapedModel
from support_paged import model_of

import fuel_core as fuel
from fuel_core.contracts.errors import (
    CapacityError,
    FuelError,
    InvalidRequestError,
    NonUniformStateError,
    UnsupportedTierError,
)
from fuel_core.engine import Engine, Loaded, build_engine

BLOCK = 2 * 2 * 2 * 16 * 16 * 4
"""Bytes of 16 tokens in 2 layers with 2 KV heads of 16 float32 values, K and V."""


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return fuel.load(write_directory(tmp_path_factory.mktemp("models") / "tiny"))


def blocks(engine: Engine) -> int:
    return engine.pool.geometry.num_blocks


UNBOUNDED = 10**6
"""More blocks than any of these sizes gives."""


@pytest.mark.parametrize(
    ("size", "count"),
    [
        ("8192B", 1),
        ("16383B", 1),
        ("1MiB", 128),
        ("1mib", 128),
        (" 1 MiB ", 128),
        ("1MB", 122),
        ("0.5MiB", 64),
        ("17KiB", 2),
        ("0.01GiB", 1310),
        ("0.01GB", 1220),
        ("500KB", 61),
    ],
)
def test_a_size_is_as_many_blocks_as_it_holds(loaded: Loaded, size: str, count: int) -> None:
    assert blocks(build_engine(loaded, kv_memory=size, max_blocks=UNBOUNDED)) == count


NO_SIZES = [
    *(
        "",
        "1.5",
        "GiB",
        "2IB",
        "2PiB",
        "2 G i",
        "-1GiB",
        "1e3MB",
        "1,5GiB",
        "1.GiB",
        ".5GiB",
        "1 0MB",
        "٣GiB",
    ),
    *("0B", "0GiB", "0.00001B", "9" * 400 + "B", "inf B", "2GiB\n2", "half", "auto!", None),
    *("%", "0%", "101%", "-5%", "5%%", "nan%"),
]


@pytest.mark.parametrize("size", NO_SIZES)
def test_a_size_that_is_none_is_refused_by_what_was_given(loaded: Loaded, size: str) -> None:
    with pytest.raises(InvalidRequestError, match="KV memory") as caught:
        build_engine(loaded, kv_memory=size)
    assert repr(size) in str(caught.value)
    with pytest.raises(InvalidRequestError, match="KV memory"):
        fuel.generate(loaded, "x", kv_memory=size)


@pytest.mark.parametrize("size", ["1B", "8KB", "8191B"])
def test_a_size_below_one_block_is_refused_with_what_a_block_needs(loaded: Loaded, size: str) -> None:
    with pytest.raises(CapacityError, match="size of one block") as caught:
        build_engine(loaded, kv_memory=size)
    assert caught.value.figures["need"] == BLOCK


def test_no_size_gives_more_blocks_than_are_of_use(loaded: Loaded) -> None:
    assert blocks(build_engine(loaded, kv_memory="1GiB", max_blocks=7)) == 7
    # Of 128 tokens each, as long as the context.
    assert blocks(build_engine(loaded, kv_memory="1GiB", max_batch=3)) == 3 * 8
    assert blocks(build_engine(loaded, kv_memory="1GiB", max_batch=3, block_size=100)) == 3 * 2
    assert blocks(build_engine(loaded)) == 32 * 8


def test_a_pool_is_in_the_type_that_keys_and_values_were_asked_for(loaded: Loaded) -> None:
    assert build_engine(loaded, kv_memory="1MiB").pool.dtype == loaded.dtype
    half = attrs.evolve(loaded, kv_dtype=torch.bfloat16)
    engine = build_engine(half, kv_memory="1MiB", max_blocks=UNBOUNDED)
    assert (engine.pool.dtype, blocks(engine)) == (torch.bfloat16, 256)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"block_size": 0}, "block_size"),
        ({"block_size": -4}, "block_size"),
        ({"max_batch": 0}, "max_batch"),
        ({"max_batch": -1}, "max_batch"),
        ({"max_batch": "8"}, "max_batch"),
        ({"token_budget": 0}, "token_budget"),
        ({"max_blocks": 0}, "max_blocks"),
        ({"max_blocks": -2}, "max_blocks"),
    ],
    ids=str,
)
def test_a_limit_that_is_none_is_refused_by_its_name(
    loaded: Loaded, options: dict[str, object], said: str
) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        build_engine(loaded, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", ["auto", "50%", "1MiB"])
@pytest.mark.parametrize(
    ("model", "error"), [(CoreOnlyModel(), UnsupportedTierError), (MlaShapedModel(), UnsupportedTierError)]
)
def test_a_model_that_no_pool_serves_is_declined_before_one_is_made(
    loaded: Loaded, size: str, model: CoreOnlyModel, error: type[FuelError]
) -> None:
    with pytest.raises(error):
        build_engine(attrs.evolve(loaded, model=model), kv_memory=size)


def test_layers_that_differ_are_declined_too(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama", num_hidden_layers=4)
    monkeypatch.setattr(type(model), "layer_state_specs", MlaShapedModel.layer_state_specs)
    with pytest.raises(NonUniformStateError):
        build_engine(attrs.evolve(loaded, model=model))


def test_a_pool_smaller_than_a_prompt_needs_is_refused_before_it_runs(loaded: Loaded) -> None:
    prompt = list(ask(60).prompt)
    with pytest.raises(CapacityError, match="needs 5 KV blocks") as caught:
        fuel.stream(loaded, [prompt], max_new_tokens=20, kv_memory="32KiB")
    assert (caught.value.figures["need"], caught.value.figures["have"]) == (5, 4)
    [completion] = fuel.generate(loaded, [prompt], max_new_tokens=5, kv_memory="32KiB")
    assert completion.finish_reason == "length"
