"""A model is loaded only where its family says it can be, and held to what the family claims."""

import pytest
import torch
from support_plugins import (
    BatchedModel,
    CoreModel,
    FakeCheckpoint,
    PagedModel,
    RaggedModel,
    entry,
    family,
    plugin,
    registry,
)

from fuel_core.contracts import hookimpl
from fuel_core.contracts.errors import (
    CapacityError,
    CheckpointError,
    InvalidRequestError,
    ModelContractError,
    PluginError,
)
from fuel_core.registry import vetting


def load(toy, *, form: str = "safetensors", device="cpu", dtype=torch.float32, made=None):
    made = made or registry(entry(plugin(toy)))
    return made.load_model(toy, FakeCheckpoint(format=form), device=device, dtype=dtype)


def test_the_familys_loader_gets_the_checkpoint_the_device_and_the_dtype():
    seen = []

    def loader(checkpoint, *, device, dtype):
        seen.append((checkpoint, device, dtype))
        return CoreModel()

    assert isinstance(load(family(load=loader)), CoreModel)
    assert seen == [(FakeCheckpoint(), "cpu", torch.float32)]


def never(checkpoint, *, device, dtype):
    raise AssertionError("the loader must not run")


@pytest.mark.parametrize("device", ["cuda", "cuda:0", torch.device("meta"), "auto"])
def test_a_device_that_the_family_does_not_know_is_refused_before_loading(device):
    with pytest.raises(InvalidRequestError, match=r"device .* for the family 'toy'; needed: one of cpu"):
        load(family(load=never), device=device)


@pytest.mark.parametrize("device", ["cuda", "cuda:3", torch.device("cuda", 1)])
def test_a_devices_index_does_not_matter(device):
    load(family(devices=("cpu", "cuda")), device=device)


def test_a_dtype_that_the_family_does_not_know_is_refused_before_loading():
    with pytest.raises(InvalidRequestError, match=r"dtype 'float16'.*one of float32, bfloat16"):
        load(family(load=never, dtypes=("float32", "bfloat16")), dtype=torch.float16)
    load(family(dtypes=("float32", "bfloat16")), dtype=torch.bfloat16)


def test_a_format_that_the_family_does_not_know_is_refused_before_loading():
    with pytest.raises(CheckpointError, match="gguf checkpoint"):
        load(family(load=never), form="gguf")
    load(family(weight_formats=("safetensors", "gguf")), form="gguf")


@pytest.mark.parametrize("failure", [KeyError("weight"), SystemExit(1)])
def test_a_loader_that_fails_is_named_with_its_family_and_distribution(failure):
    def loader(checkpoint, *, device, dtype):
        raise failure

    with pytest.raises(PluginError, match=r"the family 'toy' of fuel-plugin-toy 1\.0") as caught:
        load(family(load=loader))
    assert caught.value.__cause__ is failure
    assert type(failure).__name__ in str(caught.value)


def test_a_loaders_typed_error_passes_as_it_is():
    failure = CapacityError("too large", needed="less", remedy="shrink it")

    def loader(checkpoint, *, device, dtype):
        raise failure

    with pytest.raises(CapacityError) as caught:
        load(family(load=loader))
    assert caught.value is failure


def test_an_interrupt_while_loading_passes():
    def loader(checkpoint, *, device, dtype):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load(family(load=loader))


SOUND = [
    (CoreModel, ("decode",)),
    (BatchedModel, ("decode", "batched")),
    (PagedModel, ("decode", "paged")),
    (RaggedModel, ("decode", "batched", "paged", "ragged")),
]


@pytest.mark.parametrize(("model", "tiers"), SOUND)
def test_a_model_that_is_what_its_family_claims_is_loaded(model, tiers):
    assert isinstance(load(family(model=model, tiers=tiers)), model)


@pytest.mark.parametrize(("model", "tiers"), SOUND)
def test_a_model_that_is_not_what_its_family_claims_is_refused(model, tiers):
    for _, claimed in SOUND:
        if claimed != tiers:
            with pytest.raises(ModelContractError, match=model.__name__):
                load(family(model=model, tiers=claimed))


def test_a_loader_that_gives_no_model_is_refused():
    with pytest.raises(ModelContractError, match="NoneType"):
        load(family(model=lambda: None))


def test_a_class_is_vetted_at_its_first_load_only(monkeypatch):
    vetted = []
    monkeypatch.setattr(vetting, "vet_model_class", lambda cls, capabilities: vetted.append(cls))
    toy = family()
    made = registry(entry(plugin(toy)))
    for _ in range(3):
        load(toy, made=made)
    assert vetted == [CoreModel]
    load(family(model=BatchedModel, tiers=("decode", "batched")), made=made)
    assert vetted == [CoreModel, BatchedModel]


def test_a_class_that_was_refused_is_refused_again():
    toy = family(tiers=("decode", "paged"))
    made = registry(entry(plugin(toy)))
    for _ in range(2):
        with pytest.raises(ModelContractError):
            load(toy, made=made)


def test_a_class_that_serves_another_claim_is_vetted_again():
    made = registry(entry(plugin(family())))
    load(family(), made=made)
    with pytest.raises(ModelContractError):
        load(family(tiers=("decode", "paged")), made=made)


class Undecided(BatchedModel):
    """Has the batched arm, and says so only where it is told to."""

    def __init__(self, said):
        self.said = said

    @hookimpl
    def supports_batched_decode(self):
        return self.said


@pytest.mark.parametrize("said", [False, None, 1, "yes"])
def test_a_model_that_denies_its_declared_batched_arm_is_refused_at_every_load(said):
    answers = iter([True, said])
    toy = family(model=lambda: Undecided(next(answers)), tiers=("decode", "batched"))
    made = registry(entry(plugin(toy)))
    load(toy, made=made)
    with pytest.raises(ModelContractError, match=rf"expected True.*found {said!r}"):
        load(toy, made=made)


def test_a_model_that_claims_an_undeclared_batched_arm_is_refused():
    with pytest.raises(ModelContractError, match=r"expected False.*found True"):
        vetting.vet_predicate(Undecided(True), family().capabilities)
    vetting.vet_predicate(Undecided(False), family().capabilities)
