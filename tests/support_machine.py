"""A machine that has only what a user installs: an environment of its own, away from the checkout."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import attrs

ROOT = Path(__file__).parents[1]
DISTRIBUTIONS = {
    "fuel-core": ROOT,
    "fuel-plugin-llama": ROOT / "plugins/llama",
    "fuel-plugin-qwen3": ROOT / "plugins/qwen3",
    "fuel-plugin-quantized": ROOT / "plugins/quantized",
}


@attrs.frozen
class Machine:
    """A virtual environment and an empty folder to work in."""

    prefix: Path
    home: Path
    wheels: Path

    def run(self, *command: str, check: bool = True, shell: bool = False) -> subprocess.CompletedProcess[str]:
        """Run a command of the environment, with its output captured."""
        env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "FUEL_"))}
        env |= {"PATH": f"{self.prefix / 'bin'}:{env['PATH']}", "VIRTUAL_ENV": str(self.prefix)}
        env |= {"FUEL_CACHE": os.environ["FUEL_CACHE"]} if "FUEL_CACHE" in os.environ else {}
        args: tuple[str, ...] | str = command[0] if shell else command
        ran = subprocess.run(
            args, shell=shell, cwd=self.home, env=env, capture_output=True, text=True, check=False
        )
        assert not check or ran.returncode == 0, f"{command}\n{ran.stdout}\n{ran.stderr}"
        return ran

    def install(self, *distributions: str) -> None:
        """Install wheels of this checkout, without looking for newer dependencies."""
        self.run("pip", "install", "--quiet", "--find-links", str(self.wheels), *distributions)
