"""The kernels under sanitizers, by a driver without Python: none reads or writes beyond what it was given."""

from __future__ import annotations

import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fuel_core import _native

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "fuel_core" / "kernels" / "native" / "src"

COMMON = [
    *("-std=c++17", "-O1", "-Wall", "-Wextra", "-Wno-maybe-uninitialized", "-fno-math-errno"),
    *("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
]
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, *(f"-mavx512{part}" for part in ("f", "bw", "vl", "dq")), "-mprefer-vector-width=512"]
FLAGS = {"portable": [], "avx2": AVX2, "avx512": AVX512, "avx512_vnni": [*AVX512, "-mavx512vnni"]}

# What the sets that were left out would be: dispatch.cpp names all.
ABSENT = "namespace fuel::{isa} {{ extern const Kernels kernels; const Kernels kernels{{}}; }}\n"


def compiled(command: list[str]) -> None:
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


def build(where: Path, sources: Path = SOURCES) -> Path:
    """The driver, with the instruction sets that this processor runs."""
    runs = _native.available()
    absent = '#include "kernels.h"\n' + "".join(ABSENT.format(isa=isa) for isa in FLAGS if isa not in runs)
    (where / "absent.cpp").write_text(absent)
    base = ["g++", *COMMON, "-I", str(sources)]
    if runs != ["portable"]:
        base.append("-DFUEL_X86")
    units = {name: [str(sources / f"{name}.cpp")] for name in ("packed", "parallel", "dispatch")}
    units["absent"] = [str(where / "absent.cpp")]
    units["driver"] = [str(ROOT / "tests" / "native" / "check_kernels.cpp")]
    for isa in runs:
        name = [f"-DFUEL_ISA={isa}", f'-DFUEL_NAME="{isa}"']
        units[isa] = [*FLAGS[isa], *name, str(sources / "isa.cpp")]
    objects = {unit: where / f"{unit}.o" for unit in units}
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(compiled, ([*base, *units[unit], "-c", "-o", str(objects[unit])] for unit in units)))
    compiled(["g++", *COMMON, *map(str, objects.values()), "-lpthread", "-o", str(where / "check")])
    return where / "check"


def run(program: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(program)], capture_output=True, text=True, timeout=900, check=False)


needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None, reason="there is no g++ to compile the driver"
)


@needs_compiler
def test_no_kernel_of_any_instruction_set_touches_what_is_not_its_own(tmp_path: Path) -> None:
    ran = run(build(tmp_path))
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-4000:]
    assert ran.stdout.endswith(" checks, 0 failures\n")
    assert int(ran.stdout.split()[0]) > 500 * len(_native.available())
