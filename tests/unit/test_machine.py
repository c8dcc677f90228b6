"""Memory and cores are what the machine has, or the container where that is less."""

from __future__ import annotations

import os
from pathlib import Path

import attrs
import pytest
import torch

from fuel_core.engine.machine import (
    MachineFiles,
    Memory,
    available_cores,
    device_memory,
    host_memory,
)


@attrs.frozen
class Files:
    """The files of a machine with 10,000 kB free, of which the process has 500, 300 of them its own."""

    root: Path

    def __attrs_post_init__(self) -> None:
        self.write("meminfo", "MemTotal: 99999 kB\nMemFree: 1 kB\nMemAvailable:   10000 kB\n")
        self.write("status", "Name:\tfuel\nVmHWM:\t 900 kB\nVmRSS:\t 500 kB\nRssAnon:\t 300 kB\n")
        self.write("cgroup", "0::/\n")

    def write(self, name: str, text: object) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")  # as the kernel ends them

    def group(self, folder: str, limit: object, held: int, stat: str | None = None) -> None:
        """A group of version 2."""
        self.write(f"fs/{folder}/memory.max", limit)
        self.write(f"fs/{folder}/memory.current", held)
        if stat is not None:
            self.write(f"fs/{folder}/memory.stat", stat)

    def old_group(self, folder: str, limit: object, held: int, stat: str = "") -> None:
        """A group of version 1."""
        self.write(f"fs/memory/{folder}/memory.limit_in_bytes", limit)
        self.write(f"fs/memory/{folder}/memory.usage_in_bytes", held)
        self.write(f"fs/memory/{folder}/memory.stat", stat)

    def of_machine(self) -> MachineFiles:
        names = ("meminfo", "status", "cgroup", "fs")
        return MachineFiles(*(self.root / name for name in names))

    def read(self) -> Memory:
        return host_memory(self.of_machine())


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


HOST = 10_000 * 1024


def test_without_a_limit_it_is_what_the_machine_has_available(files: Files) -> None:
    assert files.read() == Memory(HOST, 300 * 1024, 500 * 1024)
    files.group(".", "max", 5_000)
    assert files.read().free == HOST


def test_a_container_has_what_its_limit_leaves(files: Files) -> None:
    files.group(".", 3_000_000, 1_000_000)
    assert files.read() == Memory(2_000_000, 300 * 1024, 500 * 1024)


def test_a_limit_above_what_the_machine_has_changes_nothing(files: Files) -> None:
    files.group(".", 10**15, 1_000_000)
    assert files.read().free == HOST


def test_page_cache_is_free_in_a_container_as_it_is_on_a_machine(files: Files) -> None:
    stat = "anon 400000\nfile 700000\nactive_file 200000\ninactive_file 350000\nshmem 150000"
    files.group(".", 3_000_000, 1_000_000, stat)
    assert files.read().free == 2_550_000


def test_the_least_of_the_groups_around_it_counts(files: Files) -> None:
    files.write("cgroup", "0::/outer/middle/inner")
    files.group("outer", 4_000_000, 1_500_000)
    files.group("outer/middle", "max", 0)
    files.group("outer/middle/inner", 3_000_000, 100_000)
    files.group("other", 1_000, 0)
    assert files.read().free == 2_500_000
    files.group("outer/middle/inner", 3_000_000, 600_000)
    assert files.read().free == 2_400_000
    files.group("outer", "max", 0)
    files.group(".", 2_000_000, 1_999_999)
    assert files.read().free == 1


@pytest.mark.parametrize("path", ["/not/seen/from/inside", "/../.."])
def test_a_container_that_sees_its_group_as_the_root_finds_its_limit_there(files: Files, path: str) -> None:
    files.write("cgroup", f"0::{path}")
    files.group(".", 3_000_000, 1_000_000)
    assert files.read().free == 2_000_000


def test_a_group_of_the_first_version_limits_too(files: Files) -> None:
    files.write("cgroup", "5:cpu,memory:/docker/x\n1:name=systemd:/docker/x\n0::/")
    files.old_group("docker/x", 3_000_000, 1_000_000, "total_active_file 100\ntotal_inactive_file 20")
    assert files.read().free == 2_000_120
    files.old_group("docker/x", 2**63 - 4096, 1_000_000)
    assert files.read().free == HOST
    files.old_group(".", 1_500_000, 1_000_000)
    assert files.read().free == 500_000


def test_another_controller_and_the_other_versions_files_mean_nothing(files: Files) -> None:
    files.write("cgroup", "5:cpuset:/x\n4:memory_recursiveprot:/x")
    files.old_group("x", 1_000, 0)
    files.group("x", 1_000, 0)
    assert files.read().free == HOST


def test_a_container_over_its_limit_has_nothing(files: Files) -> None:
    files.group(".", 1_000_000, 1_500_000)
    assert files.read().free == 0


def test_a_system_without_these_files_is_guessed_at(tmp_path: Path) -> None:
    memory = host_memory(MachineFiles(*[tmp_path / "none"] * 4))
    assert memory.free > 0
    assert memory.owned == memory.resident > 0


def test_this_machine_has_memory_and_this_process_some_of_it() -> None:
    memory = device_memory(torch.device("cpu"))
    assert 0 < memory.owned <= memory.resident
    assert memory.free > 0


# -- cores -----------------------------------------------------------------------------------------

ALL = len(os.sched_getaffinity(0))


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on 16 cores."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(16))


@pytest.mark.usefixtures("bound")
@pytest.mark.parametrize(
    ("quota", "cores"),
    [
        ("max 100000", 16),
        ("200000 100000", 2),
        ("250000 100000", 3),
        ("1000 100000", 1),
        ("9900000 100000", 16),
    ],
)
def test_a_quota_is_as_many_cores_as_it_can_keep_busy(files: Files, quota: str, cores: int) -> None:
    files.write("fs/cpu.max", quota)
    assert available_cores(files.of_machine()) == cores


@pytest.mark.usefixtures("bound")
def test_the_least_quota_of_the_groups_around_it_counts(files: Files) -> None:
    files.write("cgroup", "0::/outer/inner")
    files.write("fs/outer/cpu.max", "400000 100000")
    files.write("fs/outer/inner/cpu.max", "800000 100000")
    files.write("fs/other/cpu.max", "100000 100000")
    assert available_cores(files.of_machine()) == 4


@pytest.mark.usefixtures("bound")
def test_a_quota_of_the_first_version_counts_and_minus_one_is_none(files: Files) -> None:
    files.write("cgroup", "4:cpu,cpuacct:/x\n3:memory:/y")
    files.write("fs/cpu/x/cpu.cfs_quota_us", 300000)
    files.write("fs/cpu/x/cpu.cfs_period_us", 100000)
    assert available_cores(files.of_machine()) == 3
    files.write("fs/cpu/x/cpu.cfs_quota_us", -1)
    assert available_cores(files.of_machine()) == 16


def test_without_these_files_it_is_the_cores_that_the_process_is_bound_to(tmp_path: Path) -> None:
    assert available_cores(MachineFiles(*[tmp_path / "none"] * 4)) == ALL
