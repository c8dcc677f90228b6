"""What a pool leaves to the model's largest pass, and what memory there is, in a container too."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import attrs
import pytest
import torch
from support_checkpoints import write_directory

import fuel_core as fuel
from fuel_core.contracts import ModelDims, RaggedBatch
from fuel_core.contracts.errors import CapacityError, InvalidRequestError
from fuel_core.contracts.memory import parse_kv_memory
from fuel_core.engine import Engine, Loaded, build_engine, sizing
from fuel_core.engine.machine import Memory, device_memory
from fuel_core.engine.sizing import fit_pool
from fuel_core.kv import DeviceKvPool, KvBudget, KvGeometry
from fuel_core.kv.residency import ResidencyReport
from fuel_core.schedule.table import geometry_of

BLOCK = 2 * 2 * 2 * 16 * 16 * 4
"""Bytes of 16 tokens in 2 layers with 2 KV heads of 16 float32 values, K and V."""


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """Its context is of 128 tokens, or 8 blocks."""
    return fuel.load(write_directory(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture(scope="module")
def endless(loaded: Loaded) -> Loaded:
    return attrs.evolve(loaded, max_context=None)


# -- what a share leaves to a pass ------------------------------------------------------------------


@attrs.define
class Machine:
    """A device of 1,000 blocks, of which the process has 300, and a token of a pass takes a quarter of one.

    ``probed`` are the tokens of each pass that was measured; ``files`` are blocks of mapped files, resident
    and yet free.
    """

    files: int = 0
    probed: list[int] = attrs.field(factory=list)

    def read(self) -> Memory:
        return Memory(700 * BLOCK, 300 * BLOCK, (300 + self.files) * BLOCK)

    def measure(self, model: object, pool: DeviceKvPool, tokens: int) -> ResidencyReport:
        self.probed.append(tokens)
        blocks = 300 + self.files + pool.geometry.num_blocks
        return ResidencyReport(blocks * BLOCK + tokens * BLOCK // 4)


def template(loaded: Loaded, num_blocks: int = 1) -> KvGeometry:
    return geometry_of(ModelDims.from_model(loaded.model), KvBudget(16, num_blocks), loaded.dtype)


def fitted(
    loaded: Loaded,
    machine: Machine,
    asked: float | None,
    *,
    tokens: int = 64,
    useful: int | None = None,
    **options: Any,
) -> int:
    options = {"read": machine.read, "measure": machine.measure} | options
    bounded = useful is not None
    shape = template(loaded, useful or 1)
    return fit_pool(loaded, shape, asked, pass_tokens=tokens, bounded=bounded, **options).num_blocks


@pytest.mark.parametrize("tokens", [64, 100, 512, 1200])
@pytest.mark.parametrize("share", [1.0, 0.8])
def test_a_share_leaves_room_for_a_pass_of_as_many_tokens_as_there_may_be(
    endless: Loaded, tokens: int, share: float
) -> None:
    machine = Machine()
    blocks = fitted(endless, machine, share, tokens=tokens)
    assert machine.probed == [tokens]
    assert blocks == int(share * 1000) - 300 - tokens // 4


def test_a_pass_of_a_few_tokens_would_have_left_too_little(endless: Loaded) -> None:
    small, large = (fitted(endless, Machine(), 1.0, tokens=tokens) for tokens in (64, 512))
    assert small + 512 // 4 > 700 >= large + 512 // 4


def test_a_pass_of_more_than_one_context_is_reckoned_from_one(loaded: Loaded, endless: Loaded) -> None:
    machine = Machine()
    assert fitted(loaded, machine, 1.0, tokens=512) == fitted(endless, Machine(), 1.0, tokens=512)
    assert machine.probed == [128]
    # A part of a context is a part of what it takes.
    assert fitted(loaded, Machine(), 1.0, tokens=192) == 700 - 192 // 4


def test_what_a_pass_takes_beyond_the_context_is_rounded_up(loaded: Loaded) -> None:
    def measure(model: object, pool: DeviceKvPool, tokens: int) -> ResidencyReport:
        return ResidencyReport((300 + pool.geometry.num_blocks) * BLOCK + 1)

    # One more token than was measured, of a pass that took a byte, is a block that does not fit.
    both = [fitted(loaded, Machine(), 1.0, tokens=tokens, measure=measure) for tokens in (128, 129)]
    assert both == [699, 699]
    exact = attrs.evolve(Machine().read(), free=700 * BLOCK + 1)
    both = [
        fitted(loaded, Machine(), 1.0, tokens=tokens, measure=measure, read=lambda: exact)
        for tokens in (128, 129)
    ]
    assert both == [700, 699]


def test_files_that_are_mapped_are_counted_once(endless: Loaded, loaded: Loaded) -> None:
    for model in (endless, loaded):
        assert fitted(model, Machine(files=200), 1.0, tokens=256) == 700 - 200 - 256 // 4


def test_what_the_process_once_held_and_gave_back_is_no_room(endless: Loaded) -> None:
    def measure(model: object, pool: DeviceKvPool, tokens: int) -> ResidencyReport:
        return ResidencyReport(500 * BLOCK)  # of loading, which the pass stays below

    assert fitted(endless, Machine(), 1.0, measure=measure) == 1000 - (500 - 64 // 16)


@pytest.mark.parametrize(("asked", "blocks"), [(None, 584), (1.0, 684), (0.5, 184), (0.405, 89)])
def test_auto_is_nine_tenths_and_no_share_gives_more_than_is_of_use(
    endless: Loaded, asked: float | None, blocks: int
) -> None:
    assert fitted(endless, Machine(), asked) == blocks
    assert fitted(endless, Machine(), asked, useful=10**6) == blocks
    assert fitted(endless, Machine(), asked, useful=70) == 70


def test_a_share_that_the_model_and_a_pass_have_taken_is_refused(endless: Loaded) -> None:
    with pytest.raises(CapacityError, match="size of one block"):
        fitted(endless, Machine(), 0.316)
    assert fitted(endless, Machine(), 0.317) == 1


def test_a_size_is_given_without_a_look_at_the_memory(endless: Loaded) -> None:
    def never() -> Memory:
        raise AssertionError("read")

    assert fitted(endless, Machine(), 2000 * BLOCK, read=never) == 2000


def test_what_is_clearly_small_is_not_measured(endless: Loaded) -> None:
    for useful, measured in ((174, []), (175, [64])):
        machine = Machine()
        assert fitted(endless, machine, None, useful=useful) == useful
        assert machine.probed == measured
    machine = Machine()
    assert fitted(endless, machine, 0.9, useful=100) == 100
    assert machine.probed == [64], "a share that is asked for is looked up"


def test_no_pass_is_measured_that_the_useful_blocks_could_not_hold(endless: Loaded) -> None:
    machine = Machine()
    fitted(endless, machine, 0.9, tokens=512, useful=3)
    assert machine.probed == [48]


def test_a_pass_whose_own_blocks_are_too_many_is_refused_before_it_runs(endless: Loaded) -> None:
    machine = Machine()
    with pytest.raises(CapacityError, match=r"a pass of 11201 tokens.*lower token_budget") as caught:
        fitted(endless, machine, 1.0, tokens=700 * 16 + 1)
    assert (caught.value.figures["need"], caught.value.figures["have"]) == (701 * BLOCK, 700 * BLOCK)
    assert machine.probed == []
    with pytest.raises(CapacityError, match="size of one block"):
        fitted(endless, machine, 1.0, tokens=700 * 16)
    assert machine.probed == [700 * 16], "what just fits is tried"


def test_a_block_that_is_larger_than_a_pass_and_than_the_memory_is_what_is_named(endless: Loaded) -> None:
    size, machine = 1000 * 16, Machine()
    shape = geometry_of(ModelDims.from_model(endless.model), KvBudget(size, 1), endless.dtype)
    fit = partial(fit_pool, endless, shape, 1.0, bounded=False, read=machine.read, measure=machine.measure)
    with pytest.raises(CapacityError, match=r"a block of 16000 tokens.*lower block_size"):
        fit(pass_tokens=size - 1)
    with pytest.raises(CapacityError, match=r"a pass of 16000 tokens.*lower token_budget, or max_batch"):
        fit(pass_tokens=size)
    assert machine.probed == []


def test_a_pass_that_leaves_no_block_is_named_with_what_makes_it_smaller(loaded: Loaded) -> None:
    with pytest.raises(CapacityError, match=r"a pass of 1000000000000 tokens.*lower token_budget") as caught:
        fitted(loaded, Machine(), 0.4, tokens=10**12)
    assert (caught.value.figures["need"], caught.value.figures["have"]) == (BLOCK, 0)


@pytest.mark.parametrize(
    ("limits", "tokens"),
    [
        ({"token_budget": 100}, 100),
        ({"token_budget": 5, "max_batch": 40}, 40),
        ({"token_budget": 5, "max_batch": 4}, 5),
        ({"token_budget": 4096}, 128),
        ({"token_budget": 100, "max_blocks": 2}, 32),
    ],
    ids=str,
)
def test_an_engine_is_measured_with_its_largest_pass(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch, limits: dict[str, int], tokens: int
) -> None:
    passes: list[int] = []
    kind = type(loaded.model)
    real: Callable[..., Any] = kind.forward_paged_ragged  # type: ignore[attr-defined]

    def watched(self: object, batch: RaggedBatch) -> torch.Tensor:
        passes.extend(map(len, batch.tokens))
        result: torch.Tensor = real(self, batch)
        return result

    monkeypatch.setattr(kind, "forward_paged_ragged", watched)
    # Much memory: what is scaled up here is the high-water mark of all that this process has tested so far.
    monkeypatch.setattr(
        sizing, "device_memory", lambda device: attrs.evolve(device_memory(device), free=1 << 45)
    )
    build_engine(loaded, kv_memory="50%", **limits)  # type: ignore[arg-type]
    assert passes == [tokens]


def test_a_measured_share_of_this_machine_is_some_blocks_and_not_all_of_it(loaded: Loaded) -> None:
    # The geometry alone: a pool of this size would be felt.
    read = partial(device_memory, torch.device("cpu"))
    geometry = fit_pool(loaded, template(loaded), 0.9, pass_tokens=512, bounded=False, read=read)
    assert 0 < geometry.num_blocks * BLOCK < read().free


def test_a_model_without_a_context_limit_has_a_pool_of_the_whole_size(
    endless: Loaded, loaded: Loaded
) -> None:
    assert blocks(build_engine(endless, kv_memory="4MiB", max_batch=2)) == 512
    assert blocks(build_engine(loaded, kv_memory="4MiB", max_batch=2)) == 2 * 8


# -- what is asked for -----------------------------------------------------------------------------


def blocks(engine: Engine) -> int:
    return engine.pool.geometry.num_blocks


def test_a_number_is_one_of_bytes(loaded: Loaded) -> None:
    for size, count in ((2**20, 128), (BLOCK, 1), (2 * BLOCK - 1, 1)):
        assert blocks(build_engine(loaded, kv_memory=size, max_blocks=10**6)) == count
    [completion] = fuel.generate(loaded, "x", max_new_tokens=3, kv_memory=2**20)
    assert completion.finish_reason == "length"
    with pytest.raises(CapacityError, match="size of one block"):
        build_engine(loaded, kv_memory=BLOCK - 1)


@pytest.mark.parametrize("size", [0, -1, True, False, 1.5, 0.4, b"1MiB"])
def test_no_other_number_is_a_size(loaded: Loaded, size: Any) -> None:
    with pytest.raises(InvalidRequestError, match="KV memory") as caught:
        build_engine(loaded, kv_memory=size)
    assert repr(size) in caught.value.given


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        *(
            ("2KiB", 2048),
            ("2 kb", 2000),
            ("2k", 2000),
            ("2 Ki", 2048),
            ("1.5M", 1500000),
            ("3mi", 3 * 2**20),
        ),
        *(
            ("2G", 2 * 10**9),
            ("2Gb", 2 * 10**9),
            ("2gib", 2**31),
            ("1T", 10**12),
            ("1TiB", 2**40),
            ("9b", 9),
            ("100000000", 10**8),
        ),
        *(("40%", 0.4), ("100 %", 1.0), (" Auto", None), (7, 7)),
    ],
)
def test_bytes_a_share_and_auto_are_told_apart_by_their_types(
    text: str | int, asked: int | float | None
) -> None:
    assert parse_kv_memory(text) == asked
    assert type(parse_kv_memory(text)) is type(asked)


@pytest.mark.parametrize("size", ["0", "0G", "0%", "150%"])
def test_a_size_out_of_range_is_answered_with_the_range(size: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"above 0, such as.*above 0% and up to 100%"):
        parse_kv_memory(size)


@pytest.mark.parametrize("size", ["2 gigs", "0B", "101%", 0])
@pytest.mark.parametrize("prompts", [["x"], []])
def test_a_size_that_is_none_is_refused_though_the_engine_has_its_own(
    loaded: Loaded, size: Any, prompts: list[str]
) -> None:
    engine = build_engine(loaded, kv_memory="1MiB")
    with pytest.raises(InvalidRequestError, match="KV memory"):
        fuel.generate(loaded, prompts, kv_memory=size, engine=engine)
    [completion] = fuel.generate(loaded, ["x"], max_new_tokens=2, kv_memory="1MiB", engine=engine)
    assert completion.finish_reason == "length"
