"""What the machine, or the container where that is less, has for this process."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import attrs
import torch

from fuel_core.kv.residency import peak_resident_bytes


@attrs.frozen
class Memory:
    """A device's memory at one moment, in bytes.

    Attributes:
        free: what could be allocated.
        owned: what this process has allocated, and ``free`` does not count.
        resident: all that this process has in it, mapped files too.
    """

    free: int
    owned: int
    resident: int


@attrs.frozen
class MachineFiles:
    """Where Linux tells of a process's memory and of the control groups that limit it."""

    meminfo: Path = Path("/proc/meminfo")
    status: Path = Path("/proc/self/status")
    own_cgroups: Path = Path("/proc/self/cgroup")
    cgroups: Path = Path("/sys/fs/cgroup")


@attrs.frozen
class _MemoryNames:
    """A version's names: the file that limits a group, what it holds, and the figures of its page cache."""

    limit: str
    usage: str
    page_cache: tuple[str, str]


_MEMORY_V1 = _MemoryNames(
    "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file")
)
_MEMORY_V2 = _MemoryNames("memory.max", "memory.current", ("active_file", "inactive_file"))


def device_memory(device: torch.device) -> Memory:
    """What a device has for this process now."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return Memory(free, torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device))
    return host_memory(MachineFiles())


def host_memory(files: MachineFiles) -> Memory:
    """What the machine, or the container where that is less, has for this process now."""
    owned, resident = _figure(files.status, "RssAnon"), _figure(files.status, "VmRSS")
    available = _figure(files.meminfo, "MemAvailable")
    half = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    host = half if available is None else available * 1024  # its page cache counts as free
    free = max(0, min((host, *_left_by_cgroups(files))))
    if owned is None or resident is None:
        return Memory(free, peak_resident_bytes(), peak_resident_bytes())
    return Memory(free, owned * 1024, resident * 1024)


def available_cores(files: MachineFiles) -> int:
    """The cores that this process may use: those it is bound to, or what its container's quota comes to."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min((bound, *_cores_by_cgroups(files))))


def _left_by_cgroups(files: MachineFiles) -> Iterator[int]:
    """The bytes that each group with a limit leaves free."""
    for is_old, group in _groups(files, "memory"):
        names = _MEMORY_V1 if is_old else _MEMORY_V2
        limit = _text(group / names.limit).strip()
        if limit.isdecimal():  # else "max", or there is none
            yield int(limit) - _unreclaimable(group, names)


def _cores_by_cgroups(files: MachineFiles) -> Iterator[int]:
    """The cores that each group with a quota may keep busy, rounded up."""
    for is_old, group in _groups(files, "cpu"):
        if is_old:
            figures = [_text(group / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
        else:
            figures = _text(group / "cpu.max").split()
        is_limited = len(figures) == 2 and all(each.isdecimal() for each in figures)  # not "max", -1 or none
        if is_limited:
            yield -(-int(figures[0]) // max(1, int(figures[1])))


def _groups(files: MachineFiles, controller: str) -> Iterator[tuple[bool, Path]]:
    """The groups of this process and those around them, each with whether it is of the first version."""
    for controllers, path in re.findall(r"^\d+:([^:]*):(.*)$", _text(files.own_cgroups), re.MULTILINE):
        if controllers and controller not in controllers.split(","):
            continue
        mount = files.cgroups / (controller if controllers else "")
        # A container may see its own group as the mount, under a path of the machine's.
        names = [name for name in path.split("/") if name]
        for depth in range(len(names) + 1):
            yield bool(controllers), mount.joinpath(*names[:depth])


def _unreclaimable(group: Path, names: _MemoryNames) -> int:
    """What a group holds but for its page cache, which counts as free as it does on the machine."""
    page_cache = sum(_figure(group / "memory.stat", name) or 0 for name in names.page_cache)
    return int(_text(group / names.usage).strip() or 0) - page_cache


def _figure(file: Path, name: str) -> int | None:
    """The number that follows ``name`` at the start of a line."""
    match = re.search(rf"^{name}:?\s+(\d+)", _text(file), re.MULTILINE)
    return int(match[1]) if match else None


def _text(file: Path) -> str:
    """A file's text; nothing where it cannot be read, as on a system without it."""
    try:
        return file.read_text()
    except OSError:
        return ""
