"""ZENDNN_CFFI_BLIS=sdist: BLIS really compiled, and its typed API called through our declarations, against numpy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_build import blis_sdist
from engine_build.common import sha256_of
from hypothesis import given, settings
from hypothesis import strategies as st

from zendnn_cffi.engine.library import declarations

ROOT = Path(__file__).resolve().parents[2]
Call = Callable[..., "subprocess.CompletedProcess[str]"]
# Optimizing takes more than half of all compiling; seven files that pack panels by macros, for twelve families of
# processors, take the most. Of such options the last one counts, behind the recorded flags.
COMPILER = """#!/bin/sh
exec cc "$@" -Og
"""


@pytest.fixture(scope="session")
def built(build: Call) -> Path:
    """The engine folder with libblis.so. Compiling takes minutes; the objects are kept in build/ for the next run."""
    folder = ROOT / "build" / "engine-blis-sdist"
    compiler = folder / "cc"
    if not compiler.exists():
        folder.mkdir(parents=True, exist_ok=True)
        compiler.write_text(COMPILER)
        compiler.chmod(0o755)
    done = build(folder, "-DZENDNN_CFFI_BLIS=sdist", env={"CC": str(compiler)})
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "engine"


@pytest.fixture(scope="session")
def blis(built: Path) -> Any:
    """libblis.so, opened with the package's own declarations."""
    ffi = declarations("_blis").ffi
    return ffi.dlopen(str(built / "libblis.so"))


@pytest.mark.slow
def test_config_and_licence(built: Path) -> None:
    config = json.loads((built / "config.json").read_text())
    assert (config["provider"], config["library"], config["blis"]) == ("prebuilt", "libamdZenDNN.so", "libblis.so")
    assert config["blis_version"] == "0.7.0"
    assert config["blis_sha256"] == sha256_of(built / "libblis.so")
    assert "University of Texas" in (built / "licenses" / "blis-LICENSE").read_text()


@pytest.mark.slow
def test_every_recorded_file_was_compiled(built: Path) -> None:
    work = built.parent / "work"
    source = work / "blis-sdist" / "blis-1.3.4" / "blis" / "_src"
    records = blis_sdist.read_records(source / "make" / "linux-x86_64.jsonl")
    groups = blis_sdist.grouped(records)
    assert len(records) == 860 == sum(len(sources) for sources in groups.values())
    assert len(list((work / "blis-sdist-build").rglob("*.o"))) == 860


def view(array: np.ndarray, transposed: bool) -> tuple[np.ndarray, int, int]:
    """The array as BLIS gets it (its transpose where `transposed`) with row and column stride in elements."""
    seen = array.T if transposed else array
    return seen, seen.strides[0] // seen.itemsize, seen.strides[1] // seen.itemsize


SIZES, FLAG = st.integers(1, 40), st.booleans()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype", "ctype"), [("bli_sgemm", "f4", "float"), ("bli_dgemm", "f8", "double")])
@settings(max_examples=60, deadline=None)
@given(
    m=SIZES, n=SIZES, k=SIZES, ta=st.booleans(), tb=st.booleans(), step=st.integers(1, 3), seed=st.integers(0, 2**31)
)
def test_gemm_equals_numpy(
    blis: Any, name: str, dtype: str, ctype: str, m: int, n: int, k: int, ta: bool, tb: bool, step: int, seed: int
) -> None:
    """c = alpha * op(a) @ op(b) + beta * c, with transposes, and c strided so that the gaps must stay as they are.

    But for what docs/engine.md says of this BLIS: its double-precision kernel for Intel CPUs is wrong there.
    """
    ffi = declarations("_blis").ffi
    if name == "bli_dgemm" and ffi.string(blis.bli_arch_string(blis.bli_arch_query_id())) == b"haswell":
        step = 1
    rng = np.random.default_rng(seed)
    a, b = rng.standard_normal((m, k)).astype(dtype), rng.standard_normal((k, n)).astype(dtype)
    whole = rng.standard_normal((m, n * step)).astype(dtype)
    before, c = whole.copy(), whole[:, ::step]
    alpha, beta = 1.5, -0.5

    def pointer(array: np.ndarray) -> Any:
        return ffi.cast(f"{ctype} *", array.ctypes.data)

    (a_seen, rs_a, cs_a), (b_seen, rs_b, cs_b) = view(a, ta), view(b, tb)
    how = {True: ffi.integer_const("BLIS_TRANSPOSE"), False: ffi.integer_const("BLIS_NO_TRANSPOSE")}
    getattr(blis, name)(
        how[ta], how[tb], m, n, k, ffi.new(f"{ctype} *", alpha),
        pointer(a_seen), rs_a, cs_a, pointer(b_seen), rs_b, cs_b,
        ffi.new(f"{ctype} *", beta), pointer(c), n * step, step,
    )  # fmt: skip
    expected = before.astype("f8")
    expected[:, ::step] = alpha * (a.astype("f8") @ b.astype("f8")) + beta * before[:, ::step].astype("f8")
    bound = (
        (k + 3)
        * np.finfo(dtype).eps
        * (1.5 * np.abs(a.astype("f8")) @ np.abs(b.astype("f8")) + np.abs(before[:, ::step]))
    )
    assert np.all(np.abs(c - expected[:, ::step]) <= bound)
    gaps = np.ones(whole.shape, bool)
    gaps[:, ::step] = False
    assert np.array_equal(whole[gaps], before[gaps])


@pytest.mark.slow
@pytest.mark.parametrize("how", ["beside the engine", "by variable"])
def test_zendnn_cffi_blis_is_this_library(built: Path, prebuilt: Path, how: str) -> None:
    """In a process of its own: found beside libamdZenDNN.so, or named by ZENDNN_CFFI_BLIS_LIBRARY."""
    code = textwrap.dedent("""
        import sys
        import numpy as np
        import zendnn_cffi
        from zendnn_cffi.engine.library import load
        ffi, blis = load().blis_ffi, zendnn_cffi.blis
        a, b, c = (np.arange(12, dtype="f4").reshape(shape) for shape in ((3, 4), (4, 3), (3, 4)))
        c, one, zero = np.zeros((3, 3), "f4"), ffi.new("float *", 1), ffi.new("float *", 0)
        data = lambda array: ffi.cast("float *", array.ctypes.data)
        plain = blis.BLIS_NO_TRANSPOSE
        blis.bli_sgemm(plain, plain, 3, 3, 4, one, data(a), 4, 1, data(b), 3, 1, zero, data(c), 3, 1)
        assert np.array_equal(c, a @ b), c
        assert any("libblis.so" in line for line in open("/proc/self/maps"))
    """)
    engine = built if how == "beside the engine" else prebuilt / "engine"
    variables = {"ZENDNN_CFFI_LIBRARY": str(engine / "libamdZenDNN.so")}
    if how == "by variable":
        variables["ZENDNN_CFFI_BLIS_LIBRARY"] = str(built / "libblis.so")
    environment = {key: value for key, value in os.environ.items() if not key.startswith("ZENDNN_")}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment | variables, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_records_become_groups_with_nothing_lost() -> None:
    records: list[dict[str, object]] = [
        {"source": "a.c", "flags": ["-O3"], "macros": ['-DV="0.7.0"'], "include": ["-Iinc", "-Iinc"]},
        {"source": "b.c", "flags": ["-O3"], "macros": ['-DV="0.7.0"'], "include": ["-Iinc"]},
        {"source": "a.c", "flags": ["-O3", "-mavx2"], "macros": [], "include": ["-Iinc"]},
    ]
    groups = blis_sdist.grouped(records)
    assert list(groups.values()) == [["a.c", "b.c"], ["a.c"]]
    first, sources = next(iter(groups.items()))
    assert blis_sdist.as_cmake_call(first, sources) == (
        "blis_objects(\n  FLAGS [==[-O3]==]\n  DEFINITIONS [==[V=\"0.7.0\"]==]\n  INCLUDES [==[inc]==]\n"
        "  SOURCES [==[a.c]==] [==[b.c]==])\n"
    )  # fmt: skip


def test_own_option_without_compiler_says_so(build: Call, tmp_path: Path, error_line: Callable[[Any], str]) -> None:
    (downloads,) = (ROOT / "build" / "engine-blis-sdist" / "work" / "download",)
    given_files = [f"-DZENDNN_CFFI_BLIS_SDIST={path}" for path in downloads.glob("blis-*.tar.gz")]
    done = build(tmp_path, "-DZENDNN_CFFI_BLIS=sdist", *given_files, env={"CC": "no-such-compiler"})
    assert "ZENDNN_CFFI_BLIS=sdist needs a C compiler" in error_line(done)
