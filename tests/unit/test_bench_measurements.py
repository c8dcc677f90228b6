"""What ``fuel bench`` times is what it says, on a clock that only the model's passes move."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from support_checkpoints import CONFIG, random_tensors, write_directory, write_gguf
from support_models import distance, feed, new_cache
from support_paged import TOLERANCE
from torch import Tensor

from fuel_core.contracts import RaggedBatch, hookimpl
from fuel_core.contracts.errors import InvalidRequestError, UnsupportedTierError
from fuel_core.engine import Loaded, benchmark, load
from fuel_core.engine.benchmark import Plan, Report, Sessions, Spread
from fuel_core.layers import Decoder, Step


class Counted(Decoder):
    """A real model that keeps what each pass was given and gave."""

    def __init__(self, inner: Decoder) -> None:
        super().__init__(inner.parts)
        self.inner = inner
        self.passes: list[tuple[tuple[int, ...], ...]] = []
        self.rows: list[Tensor] = []

    def layer(self, i: int, x: Tensor, step: Step) -> Tensor:
        """The inner model's."""
        return self.inner.layer(i, x, step)

    @hookimpl
    def forward_paged_ragged(self, batch: RaggedBatch) -> Tensor:
        """See :meth:`RaggedDecodeModel.forward_paged_ragged`."""
        rows = super().forward_paged_ragged(batch)
        self.passes.append(batch.tokens)
        self.rows.append(rows)
        return rows

    def clock(self) -> float:
        """A second per pass."""
        return float(len(self.passes))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_directory(tmp_path_factory.mktemp("bench") / "tiny", max_position_embeddings=1024)


@pytest.fixture(scope="module")
def loaded(directory: Path) -> Loaded:
    return load(directory, "cpu")


@pytest.fixture
def counted(loaded: Loaded) -> tuple[Loaded, Counted]:
    assert isinstance(loaded.model, Decoder)
    model = Counted(loaded.model)
    return attrs.evolve(loaded, model=model), model


# -- decoding --------------------------------------------------------------------------------------


def test_the_time_of_a_decode_is_that_of_its_steps_alone(counted: tuple[Loaded, Counted]) -> None:
    """Neither the prompts nor the step that warms up is in it, and every session takes every step."""
    loaded, model = counted
    sessions = Sessions(loaded, [20, 20, 20], room=6)
    for _ in range(2):
        assert sessions.decode(5, model.clock) == 5
        assert [[len(new) for new in each] for each in model.passes[-5:]] == [[1, 1, 1]] * 5


@pytest.mark.parametrize("contexts", [[20, 20], [3, 40, 17, 16], [600]], ids=str)
def test_sessions_attend_over_their_whole_prompts(
    contexts: list[int], counted: tuple[Loaded, Counted]
) -> None:
    """Each session's logits are those of its own prompt on a cache of its own, however often it decodes."""
    loaded, model = counted
    sessions = Sessions(loaded, contexts, room=3)
    prompt = [token for each in model.passes for token in each[0]]
    assert len(prompt) == max(contexts)
    for _ in range(2):
        sessions.decode(3, model.clock)
        for row, context in enumerate(contexts):
            cache = new_cache(loaded.model, context + 3)
            feed(model.inner, cache, *prompt[:context])
            fed = [each[row][0] for each in model.passes[-3:]]
            for token, rows in zip(fed, model.rows[-3:], strict=True):
                assert distance(rows[row], feed(model.inner, cache, token)) < TOLERANCE


def test_another_context_would_give_other_logits(counted: tuple[Loaded, Counted]) -> None:
    loaded, model = counted
    rows = []
    for context in (16, 17):
        Sessions(loaded, [context], room=1).decode(1, model.clock)
        rows.append(model.rows[-1])
    assert distance(*rows) > 100 * TOLERANCE


def test_each_step_feeds_what_the_last_one_chose(counted: tuple[Loaded, Counted]) -> None:
    loaded, model = counted
    Sessions(loaded, [9, 30], room=4).decode(4, model.clock)
    chosen = [rows.argmax(-1).tolist() for rows in model.rows[-4:-1]]
    assert [[new[0] for new in each] for each in model.passes[-3:]] == chosen


def test_sessions_hold_blocks_of_their_own_and_no_more_than_they_need(
    counted: tuple[Loaded, Counted],
) -> None:
    loaded, model = counted
    sessions = Sessions(loaded, [20, 33], room=12)
    sessions.decode(12, model.clock)
    core = sessions._pool.core
    assert [core.filled_tokens(handle) for handle in sessions._handles] == [20, 33]
    held = [set(core.session_block_table(handle)) for handle in sessions._handles]
    assert not held[0] & held[1]
    assert core.geometry.num_blocks == 2 + 3 + 3  # two sessions to their end, and the prompt


# -- prompts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "chunks"), [(1, [1]), (512, [512]), (600, [512, 88])])
def test_the_time_of_a_prompt_is_that_of_its_chunks(
    length: int, chunks: list[int], counted: tuple[Loaded, Counted]
) -> None:
    loaded, model = counted
    assert benchmark.prefill(loaded, length, model.clock) == len(chunks)
    assert [[len(new) for new in each] for each in model.passes] == [[chunk] for chunk in chunks]


def test_a_model_without_a_ragged_tier_is_refused(loaded: Loaded) -> None:
    from support_models import CoreOnlyModel

    lone = attrs.evolve(loaded, model=CoreOnlyModel())
    with pytest.raises(UnsupportedTierError):
        benchmark.prefill(lone, 4)
    with pytest.raises(UnsupportedTierError):
        Sessions(lone, [4], room=1)


# -- the whole -------------------------------------------------------------------------------------


def test_rates_are_tokens_of_all_sessions_over_seconds(
    counted: tuple[Loaded, Counted], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the peak of memory is read after all of it, before the bandwidth's buffer is there."""
    loaded, model = counted
    seen: list[Any] = []
    monkeypatch.setattr(benchmark, "read_bandwidth", lambda **_: seen.append("stream") or 1000.0)

    def peak() -> int:
        seen.append(len(model.passes))
        return 77

    report = benchmark.measure(loaded, Plan((1, 3), 10, 4, 600, repeats=2), peak, model.clock)
    assert report.decode == {1: Spread((1.0, 1.0)), 3: Spread((3.0, 3.0))}
    assert report.prefill == Spread((300.0, 300.0))
    # Per batch a prompt, and twice a step to warm up and four; then twice a prompt in two chunks.
    assert seen == [2 * (1 + 2 * 5) + 2 * 2, "stream"]
    assert (report.peak_bytes, report.bandwidth) == (77, 1000.0)
    assert report.weight_bytes == benchmark.weight_bytes(loaded)


def report_of(decode: dict[int, Spread], weight_bytes: int = 200, bandwidth: float = 1000.0) -> Report:
    return Report(decode, Spread((1.0,)), weight_bytes, bandwidth, peak_bytes=1)


def test_the_share_of_the_limit_is_of_the_median_of_batch_1() -> None:
    decode = {8: Spread((99.0,)), 1: Spread((1.0, 4.0, 3.0))}
    assert report_of(decode).limit_fraction == pytest.approx(3 * 200 / 1000)
    assert report_of({8: Spread((99.0,))}).limit_fraction is None


def test_a_spread_shows_median_least_and_most() -> None:
    assert str(Spread((3.0, 1.0, 9.0))) == "3 (1 to 9)"
    assert Spread((1.0, 4.0)).median == 2.5


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (Plan(batches=()), "batch of nothing"),
        (Plan(batches=(1, 0)), "batch 1, 0"),
        (Plan(batches=(2, 2)), "batch 2, 2"),
        (Plan(context=0), "context 0"),
        (Plan(steps=0), "steps 0"),
        (Plan(prompt_len=-1), "prompt-len -1"),
        (Plan(repeats=0), "repeats 0"),
        (Plan(context=200, steps=57, prompt_len=1), "257 tokens"),
        (Plan(context=1, prompt_len=257), "257 tokens"),
    ],
    ids=str,
)
def test_a_plan_that_cannot_be_is_refused(plan: Plan, said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        plan.check(256)


def test_a_plan_that_just_fits_is_taken() -> None:
    Plan(context=200, steps=56, prompt_len=256).check(256)
    Plan(context=10**6).check(None)


# -- the machine -----------------------------------------------------------------------------------


def bytes_of(**overrides: Any) -> dict[str, int]:
    return {name: 4 * tensor.numel() for name, tensor in random_tensors({**CONFIG, **overrides}).items()}


@pytest.mark.parametrize("tied", [False, True])
def test_weights_are_all_that_a_step_reads(tied: bool, tmp_path: Path) -> None:
    """An embedding that is not the head too gives a row, and is not read."""
    sizes = bytes_of(tie_word_embeddings=tied)
    found = load(write_directory(tmp_path / "m", tie_word_embeddings=tied), "cpu")
    embedding = sizes["model.embed_tokens.weight"]
    assert benchmark.weight_bytes(found) == sum(sizes.values()) - (0 if tied else embedding)


def test_weights_that_are_loaded_narrower_are_read_narrower(directory: Path) -> None:
    whole, half = (benchmark.weight_bytes(load(directory, "cpu", dtype)) for dtype in ("float32", "bfloat16"))
    assert half == whole // 2


def test_quantized_weights_count_as_their_blocks(tmp_path: Path) -> None:
    sizes = bytes_of()
    gains = {name: size for name, size in sizes.items() if name.endswith("norm.weight")}
    matrices = sum(sizes.values()) - sum(gains.values()) - sizes["model.embed_tokens.weight"]
    found = load(write_gguf(tmp_path / "m.gguf"), "cpu")
    assert benchmark.weight_bytes(found) == sum(gains.values()) + matrices // 4 * 34 // 32


def test_a_token_of_context_costs_its_keys_and_values(loaded: Loaded) -> None:
    assert (
        benchmark.kv_bytes_per_token(loaded) == 2 * 2 * 2 * 16 * 4
    )  # K and V, layers, heads, width, float32


def ticking(*seconds: float) -> Callable[[], float]:
    """A clock between whose calls, two by two, so many seconds pass."""

    def times() -> Iterator[float]:
        now = 0.0
        for each in seconds:
            yield now
            now += each
            yield now

    return times().__next__


@pytest.mark.parametrize("native", [False, True])
def test_the_bandwidth_is_that_of_the_best_of_five_streams(
    native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    streamed: list[int] = []

    class Native:
        @staticmethod
        def read_stream(address: int, size: int) -> None:
            assert address
            streamed.append(size)

    monkeypatch.setattr(benchmark, "_native", lambda: Native if native else None)
    assert benchmark.read_bandwidth(4000, ticking(5, 3, 2, 4, 6)) == 2000
    assert streamed == ([4000] * 5 if native else [])


def test_a_product_rate_counts_two_operations_a_multiply_add() -> None:
    assert benchmark.product_rate(ticking(5, 3, 2, 4, 6)) == 1024**3


def test_the_stream_reads_512_megabytes(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    monkeypatch.setattr(torch, "ones", lambda count: made.append(4 * count) or torch.zeros(4))
    benchmark.read_bandwidth()
    assert made == [512_000_000]
