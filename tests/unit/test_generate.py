"""``fuel.generate`` and ``fuel.stream`` on a small model from disk."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from support_checkpoints import EOS, VOCAB, write_directory
from torch import Tensor

import fuel_core as fuel
from fuel_core import SamplingParams
from fuel_core.contracts import DecodeModel, DecodeSession, hookimpl
from fuel_core.contracts.errors import CapacityError, InvalidRequestError
from fuel_core.engine import Loaded

PROMPTS = ["one", "another prompt", "x", "the fourth", "and a fifth one", "six", "seventh"]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return fuel.load(write_directory(tmp_path_factory.mktemp("models") / "tiny"))


class Wrapper(DecodeModel):
    """A model that passes everything on; subclasses change what they are about."""

    def __init__(self, inner: DecodeModel) -> None:
        self.inner = inner

    @hookimpl
    def n_layers(self) -> int:
        return self.inner.n_layers()

    @hookimpl
    def vocab_size(self) -> int:
        return self.inner.vocab_size()

    @hookimpl
    def max_context(self) -> int | None:
        return self.inner.max_context()

    @hookimpl
    def layer_state_specs(self) -> Sequence[Any]:
        return self.inner.layer_state_specs()

    @hookimpl
    def forward_with_kv_context_persistent(
        self, tokens: Sequence[int], cache: Any, session: DecodeSession
    ) -> Tensor:
        return self.inner.forward_with_kv_context_persistent(tokens, cache, session)


class Scripted(Wrapper):
    """Says the tokens of a script, whatever it is asked; ``script`` may hold whole logits too."""

    def __init__(self, inner: DecodeModel, script: Sequence[int | float]) -> None:
        super().__init__(inner)
        self.script = script

    @hookimpl
    def forward_with_kv_context_persistent(
        self, tokens: Sequence[int], cache: Any, session: DecodeSession
    ) -> Tensor:
        said = session.rebinds
        session.rebinds += 1
        cache.cached_len += len(tokens)
        value = self.script[said] if said < len(self.script) else EOS
        if isinstance(value, float):
            return torch.full((VOCAB,), value)
        logits = torch.full((VOCAB,), -10.0)
        logits[value] = 10.0
        return logits


def scripted(loaded: Loaded, said: str | Sequence[int | float]) -> Loaded:
    script = loaded.tokenizer.encode(said, add_bos=False) if isinstance(said, str) else said
    return attrs.evolve(loaded, model=Scripted(loaded.model, script))


def test_every_prompt_gets_what_it_gets_alone_in_order_whatever_runs_beside_it(loaded: Loaded) -> None:
    alone = [fuel.generate(loaded, [prompt], max_new_tokens=9)[0] for prompt in PROMPTS]
    for max_batch in (1, 3, 16):
        together = fuel.generate(loaded, PROMPTS, max_new_tokens=9, max_batch=max_batch)
        assert [c.token_ids for c in together] == [c.token_ids for c in alone]
        assert [c.text for c in together] == [c.text for c in alone]
        assert [c.prompt_tokens for c in together] == [len(p) + 1 for p in map(_bytes, PROMPTS)]
    assert len({tuple(c.token_ids) for c in alone}) == len(PROMPTS), (
        "the prompts must differ in their outputs"
    )


def _bytes(prompt: str) -> bytes:
    return prompt.replace("th", "t").encode()


def test_a_seed_gives_one_stream_alone_and_in_company_and_another_seed_another(loaded: Loaded) -> None:
    seeded = [SamplingParams(temperature=1.5, seed=seed) for seed in range(len(PROMPTS))]
    together = fuel.generate(loaded, PROMPTS, seeded, max_new_tokens=12)
    for prompt, params, completion in zip(PROMPTS, seeded, together, strict=True):
        assert fuel.generate(loaded, prompt, params, max_new_tokens=12)[0].token_ids == completion.token_ids
    other = fuel.generate(loaded, PROMPTS[0], attrs.evolve(seeded[0], seed=99), max_new_tokens=12)[0]
    assert other.token_ids != together[0].token_ids


def test_the_deltas_of_a_prompt_add_up_to_its_completion(loaded: Loaded) -> None:
    whole = fuel.generate(loaded, PROMPTS, max_new_tokens=9)
    text, ids, ends = [""] * len(PROMPTS), [[] for _ in PROMPTS], [0] * len(PROMPTS)
    for delta in fuel.stream(loaded, PROMPTS, max_new_tokens=9):
        assert not ends[delta.index], "nothing may follow the last delta"
        text[delta.index] += delta.text
        ids[delta.index] += delta.token_ids
        ends[delta.index] += delta.finish_reason is not None
    assert text == [c.text for c in whole]
    assert ids == [c.token_ids for c in whole]
    assert ends == [1] * len(PROMPTS)


def test_a_character_of_several_tokens_comes_whole_in_one_delta(loaded: Loaded) -> None:
    said = "aé日本🙂z"
    texts = [delta.text for delta in fuel.stream(scripted(loaded, said), "x", max_new_tokens=40)]
    assert "".join(texts) == said
    assert not any("\ufffd" in text for text in texts)


def test_a_broken_tail_is_given_at_the_end_as_a_replacement_character(loaded: Loaded) -> None:
    half = loaded.tokenizer.encode("a🙂", add_bos=False)[:-1]
    assert fuel.generate(scripted(loaded, half), "x", max_new_tokens=40)[0].text == "a\ufffd"


def test_an_id_of_a_padded_head_has_no_text_and_ends_nothing(tmp_path: Path) -> None:
    padded = fuel.load(write_directory(tmp_path / "padded", vocab_size=VOCAB + 5))
    logits = torch.full((VOCAB + 5,), -10.0)
    said = [65, VOCAB + 4, 66]

    class Padded(Scripted):
        @hookimpl
        def forward_with_kv_context_persistent(
            self, tokens: Any, cache: Any, session: DecodeSession
        ) -> Tensor:
            session.rebinds += 1
            cache.cached_len += len(tokens)
            return logits.index_fill(0, torch.tensor(said[session.rebinds - 1]), 10.0)

    completion = fuel.generate(attrs.evolve(padded, model=Padded(padded.model, [])), "x", max_new_tokens=3)[0]
    assert (completion.token_ids, completion.error) == (said, None)
    assert completion.text == loaded_text(padded, [65, 66])


def loaded_text(loaded: Loaded, ids: Sequence[int]) -> str:
    return loaded.tokenizer.decode(ids)


@pytest.mark.parametrize("stop", ["<END>", "END>", "<"])
def test_no_part_of_a_stop_string_is_emitted_and_nothing_after_it(loaded: Loaded, stop: str) -> None:
    said = "abc<END>def"
    params = SamplingParams(stop=stop)
    deltas = list(fuel.stream(scripted(loaded, said), "x", params, max_new_tokens=40))
    assert "".join(d.text for d in deltas) == said[: said.index(stop)]
    completion = deltas[-1].completion
    assert completion is not None
    assert completion.finish_reason == "stop"
    # The ids end with the token that completed it.
    assert len(completion.token_ids) == said.index(stop) + len(stop)


def test_what_only_began_like_a_stop_string_is_emitted_after_all(loaded: Loaded) -> None:
    completion = fuel.generate(
        scripted(loaded, "abc<EN"), "x", SamplingParams(stop="<END>"), max_new_tokens=40
    )[0]
    assert completion.text == "abc<EN"


def test_a_stop_string_that_the_held_back_bytes_complete_is_seen_at_the_end(loaded: Loaded) -> None:
    half = loaded.tokenizer.encode("a🙂", add_bos=False)[:-1]
    completion = fuel.generate(scripted(loaded, half), "x", SamplingParams(stop="\ufffd"), max_new_tokens=40)[
        0
    ]
    assert (completion.text, completion.finish_reason) == ("a", "stop")


def test_neither_eos_nor_stop_string_ends_before_min_new_tokens(loaded: Loaded) -> None:
    stopping = scripted(loaded, "a.b.c.d.")
    params = SamplingParams(stop=".", min_new_tokens=3)
    assert fuel.generate(stopping, "x", params, max_new_tokens=20)[0].text == "a.b"
    ending = scripted(loaded, [EOS, 5, EOS])
    params = SamplingParams(min_new_tokens=2)
    assert len(fuel.generate(ending, "x", params, max_new_tokens=20)[0].token_ids) == 3


def test_a_stop_string_ends_the_work_too(loaded: Loaded) -> None:
    whole = fuel.generate(loaded, "x", max_new_tokens=40)[0]
    counting = CountingModel(loaded.model)
    params = SamplingParams(stop=whole.text[2:4])
    fuel.generate(attrs.evolve(loaded, model=counting), "x", params, max_new_tokens=40)
    assert 0 < counting.passes < 20


class CountingModel(Wrapper):
    passes = 0

    @hookimpl
    def forward_with_kv_context_persistent(self, tokens: Any, cache: Any, session: DecodeSession) -> Tensor:
        self.passes += 1
        return super().forward_with_kv_context_persistent(tokens, cache, session)


@pytest.mark.parametrize(("least", "text"), [(1, "a"), (2, "a.b"), (3, "a.b"), (4, "a.b.c")])
def test_a_stop_string_counts_from_the_token_after_the_least_number(
    loaded: Loaded, least: int, text: str
) -> None:
    params = SamplingParams(stop=".", min_new_tokens=least)
    assert fuel.generate(scripted(loaded, "a.b.c.d."), "x", params, max_new_tokens=20)[0].text == text


@pytest.mark.parametrize(
    ("least", "text", "tokens"),
    [(0, "ab", 5), (4, "ab", 5), (5, "ab<E", 7), (6, "ab<E", 7), (7, "ab<E<E", 9), (9, "ab<E<E<E>c", 11)],
)
def test_a_stop_string_that_begins_before_the_least_number_and_ends_after_it_ends_the_text(
    loaded: Loaded, least: int, text: str, tokens: int
) -> None:
    said, params = "ab<E<E<E>c", SamplingParams(stop=["<E<", "<E>"], min_new_tokens=least)
    deltas = list(fuel.stream(scripted(loaded, said), "x", params, max_new_tokens=20))
    assert "".join(delta.text for delta in deltas) == text, "nothing of it is given out before it is whole"
    completion = deltas[-1].completion
    assert completion is not None
    assert (completion.text, len(completion.token_ids)) == (text, tokens)
    assert completion.finish_reason == "stop"


def test_eos_ends_with_stop_and_stands_in_the_ids_and_not_in_the_text(loaded: Loaded) -> None:
    completion = fuel.generate(scripted(loaded, "ok"), "x", max_new_tokens=20)[0]
    assert (completion.text, completion.finish_reason) == ("ok", "stop")
    assert completion.token_ids[-1] == EOS
    ignoring = fuel.generate(scripted(loaded, "ok"), "x", SamplingParams(ignore_eos=True), max_new_tokens=20)[
        0
    ]
    assert (ignoring.finish_reason, len(ignoring.token_ids)) == ("length", 20)


@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf])
def test_logits_that_hold_nothing_to_sample_fail_that_prompt_alone(loaded: Loaded, value: float) -> None:
    class OneBad(Scripted):
        @hookimpl
        def forward_with_kv_context_persistent(
            self, tokens: Any, cache: Any, session: DecodeSession
        ) -> Tensor:
            if cache.max_seq_len == 2 + 10:  # the prompt of one byte
                return super().forward_with_kv_context_persistent(tokens, cache, session)
            return self.inner.forward_with_kv_context_persistent(tokens, cache, session)

    bad = attrs.evolve(loaded, model=OneBad(loaded.model, [65, 66, value]))
    prompts = ["abc", "x", "defg"]
    completions = fuel.generate(bad, prompts, max_new_tokens=10)
    healthy = fuel.generate(loaded, ["abc", "defg"], max_new_tokens=10)
    assert completions[1].finish_reason == "error"
    assert isinstance(completions[1].error, fuel.FuelError)
    assert len(completions[1].token_ids) == 2
    assert [completions[0].token_ids, completions[2].token_ids] == [c.token_ids for c in healthy]


BAD = {
    "empty text": ("", {}, "empty prompt"),
    "no tokens": ([], {}, "no tokens"),
    "id beyond the vocabulary": ([1, VOCAB], {}, f"token id {VOCAB} at position 1"),
    "negative id": ([-1], {}, "token id -1"),
    "not an id": (["a"], {}, "token id 'a'"),
    "no new tokens": ("x", {"max_new_tokens": 0}, "max_new_tokens = 0"),
    "negative new tokens": ("x", {"max_new_tokens": -3}, "max_new_tokens = -3"),
    "beyond the context": ("x", {"max_new_tokens": 127}, "129 tokens"),
    "more at least than at most": ("x", {"params": SamplingParams(min_new_tokens=65)}, "min_new_tokens = 65"),
    "bias beyond the vocabulary": ("x", {"params": SamplingParams(logit_bias={VOCAB: 1.0})}, "logit_bias"),
}


either_scheduler = pytest.mark.parametrize("scheduler", ["paged", "contiguous"])


@either_scheduler
@pytest.mark.parametrize("case", BAD)
def test_a_request_that_cannot_be_served_is_refused_and_the_next_is_fine(
    loaded: Loaded, case: str, scheduler: str
) -> None:
    prompt, options, said = BAD[case]
    with pytest.raises(InvalidRequestError, match=said):
        fuel.generate(loaded, [prompt], scheduler=scheduler, **options)
    [fine] = fuel.generate(loaded, ["one"], max_new_tokens=3, scheduler=scheduler)
    assert fine.finish_reason == "length"


@either_scheduler
@pytest.mark.parametrize("case", BAD)
def test_one_bad_prompt_among_many_is_named_before_any_has_run(
    loaded: Loaded, case: str, scheduler: str
) -> None:
    prompt, options, _ = BAD[case]
    ran = attrs.evolve(loaded, model=Never(loaded.model))
    with pytest.raises(InvalidRequestError, match="of 3") as caught:
        list(fuel.stream(ran, ["ok", prompt, "ok"], scheduler=scheduler, **options))
    # What is wrong with all of them is told of the first.
    assert caught.value.figures["prompt_index"] == (0 if options else 1)


class Never(Wrapper):
    @hookimpl
    def forward_with_kv_context_persistent(self, tokens: Any, cache: Any, session: DecodeSession) -> Tensor:
        raise AssertionError("a prompt has run")


def test_the_context_is_full_to_its_last_token_and_never_cut(loaded: Loaded) -> None:
    limit = loaded.max_context
    assert limit == 128
    for total in (limit - 1, limit):
        completion = fuel.generate(
            loaded, [[1] * 10], SamplingParams(ignore_eos=True), max_new_tokens=total - 10
        )[0]
        assert len(completion.token_ids) == total - 10
    with pytest.raises(InvalidRequestError, match="at most 128") as caught:
        fuel.generate(loaded, [[1] * 10], max_new_tokens=limit + 1 - 10)
    assert (caught.value.figures["total"], caught.value.figures["max_context"]) == (129, 128)


@pytest.mark.parametrize("params", [{"temperature": 1e-4}, {"temperature": 1.0, "top_p": 1e-4}])
def test_a_temperature_or_top_p_near_zero_is_greedy(loaded: Loaded, params: dict[str, float]) -> None:
    near = fuel.generate(loaded, PROMPTS, SamplingParams(**params, seed=1), max_new_tokens=12)
    assert [c.token_ids for c in near] == [
        c.token_ids for c in fuel.generate(loaded, PROMPTS, max_new_tokens=12)
    ]


def test_a_top_k_beyond_the_vocabulary_filters_nothing(loaded: Loaded) -> None:
    plain, wide = (
        fuel.generate(loaded, PROMPTS, SamplingParams(temperature=1.0, seed=3, top_k=k), max_new_tokens=12)
        for k in (0, VOCAB + 1000)
    )
    assert [c.token_ids for c in plain] == [c.token_ids for c in wide]


def test_parameters_are_for_all_prompts_or_one_for_each(loaded: Loaded) -> None:
    with pytest.raises(InvalidRequestError, match="2 sets of parameters for 3 prompts"):
        fuel.generate(loaded, PROMPTS[:3], [SamplingParams()] * 2)
    with pytest.raises(InvalidRequestError, match="max_batch"):
        fuel.generate(loaded, PROMPTS, max_batch=0)
    assert fuel.generate(loaded, []) == []


@pytest.mark.parametrize(
    ("prompts", "said"),
    [
        ([5, 6], "wrap a single list"),
        ([b"abc"], "type bytes"),
        ([None], "type NoneType"),
        ([{"role": "user"}], "type dict"),
    ],
)
def test_what_is_no_list_of_prompts_is_refused_with_what_to_do(
    loaded: Loaded, prompts: Any, said: str
) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        fuel.generate(loaded, prompts)


def test_ids_may_come_as_an_array_or_a_tensor(loaded: Loaded) -> None:
    ids = [3, 4, 5]
    given = [ids, tuple(ids), np.array(ids), torch.tensor(ids)]
    assert len({tuple(c.token_ids) for c in fuel.generate(loaded, given, max_new_tokens=4)}) == 1


def test_parameters_of_another_type_are_refused(loaded: Loaded) -> None:
    with pytest.raises(InvalidRequestError, match="params of type dict"):
        fuel.generate(loaded, "x", {"temperature": 0.5})  # type: ignore[arg-type]


def test_a_prompt_that_failed_at_once_has_no_speed(loaded: Loaded) -> None:
    timing = fuel.generate(scripted(loaded, [math.nan]), "x", max_new_tokens=5)[0].timing
    assert timing.tokens_per_s == 0


def test_a_stream_that_is_closed_early_leaves_nothing_behind(loaded: Loaded) -> None:
    deltas = fuel.stream(loaded, PROMPTS, max_new_tokens=50)
    next(deltas)
    deltas.close()
    assert fuel.generate(loaded, ["one"], max_new_tokens=3)[0].finish_reason == "length"


def test_loading_tells_its_progress_up_to_the_last_tensor(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    fuel.load(write_directory(tmp_path / "m"), progress=lambda done, total: seen.append((done, total)))
    assert seen == [(i + 1, len(seen)) for i in range(len(seen))]
    assert len(seen) == 21


@pytest.mark.parametrize(
    ("options", "said"), [({"device": "warp"}, "device 'warp'"), ({"dtype": "int3"}, "'int3'")]
)
def test_a_device_or_dtype_that_is_not_is_refused(tmp_path: Path, options: dict[str, str], said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        fuel.load(write_directory(tmp_path / "m"), **options)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_model_computes_in_the_dtype_that_is_asked_for(tmp_path: Path, dtype: str) -> None:
    path = write_directory(tmp_path / "m")
    narrow, wide = fuel.load(path, dtype=dtype), fuel.load(path)
    assert (narrow.dtype, wide.dtype) == (getattr(torch, dtype), torch.float32)
    assert (
        len(fuel.generate(narrow, "hello", SamplingParams(ignore_eos=True), max_new_tokens=5)[0].token_ids)
        == 5
    )


def test_a_prompt_that_the_pool_can_never_hold_is_named(loaded: Loaded) -> None:
    with pytest.raises(CapacityError, match=r"prompt 2 of 2: a request that needs \d+ KV blocks") as caught:
        fuel.generate(loaded, ["x", "y" * 80], max_new_tokens=4, kv_memory="40KB")
    assert caught.value.figures["prompt_index"] == 1


def test_a_size_of_kv_memory_means_nothing_to_the_contiguous_scheduler(loaded: Loaded) -> None:
    with pytest.raises(InvalidRequestError, match="contiguous scheduler"):
        fuel.generate(loaded, "x", kv_memory="1GiB", scheduler="contiguous")
