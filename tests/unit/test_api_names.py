"""What can be found out about Fuel without its README: names, errors, and what an object says of itself."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from support_models import CoreOnlyModel
from support_paged import model_of

import fuel_core as fuel
from fuel_core import kv
from fuel_core.contracts import errors
from fuel_core.contracts.errors import FuelError
from fuel_core.kv import DeviceKvPool, KvBlockPool, KvBudget, KvGeometry
from fuel_core.schedule import PagedSessionScheduler, SessionScheduler

ERRORS = [
    thing for thing in vars(errors).values() if isinstance(thing, type) and issubclass(thing, FuelError)
]


@pytest.mark.parametrize("package", ["fuel_core", "fuel_core.kv"])
def test_a_fresh_package_lists_all_its_names_without_torch(package: str) -> None:
    code = (
        f"import sys, {package} as package; missing = set(package.__all__) - set(dir(package)); "
        "print(sorted(missing), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] False"


@pytest.mark.parametrize("package", [fuel, kv])
def test_every_name_that_is_listed_is_there(package: object) -> None:
    assert all(hasattr(package, name) for name in dir(package))
    with pytest.raises(AttributeError, match="lood"):
        package.lood  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize("error", ERRORS)
def test_every_error_is_a_name_of_fuel(error: type[FuelError]) -> None:
    assert len(ERRORS) >= 20
    assert getattr(fuel, error.__name__) is error
    assert error.__name__ in fuel.__all__


@pytest.mark.parametrize("error", ERRORS)
def test_every_error_tells_what_it_is_and_how_it_is_made(error: type[FuelError]) -> None:
    assert error.__doc__
    assert error.__init__.__doc__ not in (None, Exception.__init__.__doc__)


def test_an_error_that_tells_nothing_of_its_making_is_seen() -> None:
    class BareError(FuelError):
        def __init__(self) -> None:
            super().__init__("a", needed="b", remedy="c")

    assert BareError.__init__.__doc__ is None


# -- objects


def test_a_pool_tells_its_size_and_who_is_in_it() -> None:
    pool = KvBlockPool(KvGeometry(1, 1, 2, 8, 4, 4))
    assert repr(pool) == "<KvBlockPool: 8 blocks of 4 tokens, 8 free; 0 sessions, 0 prefixes>"
    session = pool.open()
    pool.append(session, 9)
    pool.register_prefix(session, 8)
    assert repr(pool) == "<KvBlockPool: 8 blocks of 4 tokens, 5 free; 1 session, 1 prefix>"


def test_a_device_pool_tells_its_dtype_and_device_too() -> None:
    pool = DeviceKvPool(KvGeometry(1, 1, 2, 1, 1, 2), torch.float16)
    assert repr(pool) == (
        "<DeviceKvPool over <KvBlockPool: 1 block of 1 token, 1 free; 0 sessions, 0 prefixes> "
        "in torch.float16 on cpu>"
    )


def test_a_paged_scheduler_tells_how_many_run_wait_and_have_finished() -> None:
    scheduler = PagedSessionScheduler(model_of("llama"), KvBudget(4, 16))
    _, second, third = (scheduler.add_session([1, 2, 3], max_new_tokens=4) for _ in range(3))
    scheduler.step()
    scheduler.evict_session(second)
    scheduler.cancel(third)
    assert repr(scheduler).endswith(": 1 running, 1 suspended, 1 finished; 16 blocks, 14 free>")
    assert repr(scheduler).startswith("<PagedSessionScheduler of ")


def test_a_contiguous_scheduler_tells_how_many_run_and_have_finished() -> None:
    scheduler = SessionScheduler(CoreOnlyModel(), KvBudget(4, 16))
    _, second = (scheduler.add_session([1, 2, 3], max_new_tokens=4) for _ in range(2))
    scheduler.cancel(second)
    said = "<SessionScheduler of CoreOnlyModel: 1 running, 1 finished; 16 blocks, 12 free>"
    assert repr(scheduler) == said
