"""The BLIS binding: what is declared, what a build exports of it, and gemm in each spelling against numpy."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zendnn_cffi
from zendnn_cffi.engine import abi
from zendnn_cffi.engine import library as module
from zendnn_cffi.errors import MissingFunctionError

BLIS = module.declarations("_blis")
DECLARED = sorted(abi.declared_functions(BLIS))
TYPED = ("bli_sgemm", "bli_dgemm")
FORTRAN = ("sgemm_blis_impl", "dgemm_blis_impl")
# A plain BLIS as the source build makes it: the typed API, nothing of AOCL's
STAND_IN = """
#include <stdint.h>
#define GEMM(name, T) void name(int ta, int tb, int64_t m, int64_t n, int64_t k, T *alpha, T *a, int64_t ras, \\
    int64_t cas, T *b, int64_t rbs, int64_t cbs, T *beta, T *c, int64_t rcs, int64_t ccs) { \\
    for (int64_t i = 0; i < m; i++) for (int64_t j = 0; j < n; j++) { T sum = 0; \\
        for (int64_t p = 0; p < k; p++) sum += (ta == 8 ? a[p * ras + i * cas] : a[i * ras + p * cas]) \\
                                            * (tb == 8 ? b[j * rbs + p * cbs] : b[p * rbs + j * cbs]); \\
        c[i * rcs + j * ccs] = *alpha * sum + *beta * c[i * rcs + j * ccs]; } }
GEMM(bli_sgemm, float) GEMM(bli_dgemm, double)
int64_t bli_info_get_int_type_size(void) { return BITS; }
const char *bli_info_get_version_str(void) { return "stand-in"; }
"""
USE_TYPED = """
import numpy as np
from zendnn_cffi import blis
for kind, gemm in (("float", blis.bli_sgemm), ("double", blis.bli_dgemm)):
    random = np.random.default_rng(0)
    dtype = np.float32 if kind == "float" else np.float64
    a, b, c = (random.standard_normal(shape).astype(dtype) for shape in ((7, 5), (5, 9), (7, 9)))
    expected = 2 * (a @ b) + 0.5 * c
    pointer = lambda array: blis.ffi.cast(f"{kind} *", array.ctypes.data)
    scalar = lambda value: blis.ffi.new(f"{kind} *", value)
    plain = blis.BLIS_NO_TRANSPOSE
    gemm(plain, plain, 7, 9, 5, scalar(2), pointer(a), 5, 1, pointer(b), 9, 1, scalar(0.5), pointer(c), 9, 1)
    assert np.allclose(c, expected, rtol=1e-4, atol=1e-4), kind
print("right", hasattr(blis, "aocl_gemm_f32f32f32of32"))
"""


def pointer(array: np.ndarray[Any, Any], kind: str) -> Any:
    return BLIS.ffi.cast(f"{kind} *", array.ctypes.data)


def test_lpgemm_family_and_plain_gemm_are_declared() -> None:
    assert len([name for name in DECLARED if name.startswith("aocl_")]) == 38
    assert {*TYPED, *FORTRAN} < set(DECLARED)


def test_engine_has_the_whole_lpgemm_family(library: Any) -> None:
    missing = [name for name in DECLARED if name.startswith("aocl_") and not hasattr(library.blis_lib, name)]
    assert not missing


def test_one_spelling_of_gemm_at_least_is_there(library: Any) -> None:
    assert hasattr(library.blis_lib, "bli_sgemm") or hasattr(library.blis_lib, "sgemm_blis_impl")


def test_set_up_and_information(library: Any) -> None:
    blis = zendnn_cffi.blis
    blis.bli_init()
    assert blis.ffi.string(blis.bli_info_get_version_str())
    assert blis.bli_info_get_int_type_size() == 64
    assert blis.bli_thread_get_num_threads() in (-1, *range(1, 4096))  # -1: plain BLIS, not set


def test_absent_function_is_named_when_used(library: Any, monkeypatch) -> None:
    monkeypatch.delenv(module.BLIS_VARIABLE, raising=False)
    absent = [name for name in DECLARED if not hasattr(library.blis_lib, name)]
    for name in absent:
        with pytest.raises(MissingFunctionError, match=f"{name} is not in .*: this BLIS was built without it. Set"):
            getattr(library.blis_lib, name)
    with pytest.raises(AttributeError, match="no BLIS function or constant 'bli_nonsense' is declared"):
        _ = library.blis_lib.bli_nonsense
    with pytest.raises(AttributeError, match="'bli_nonsense' is not declared"):
        _ = zendnn_cffi.blis.bli_nonsense


def test_names_are_listed(library: Any) -> None:
    assert set(DECLARED) < set(dir(zendnn_cffi.blis))
    assert set(DECLARED) < set(dir(library.blis_lib))
    assert library.blis_ffi is zendnn_cffi.blis.ffi is BLIS.ffi
    assert zendnn_cffi.blis.AOCL_GEMM_BF16 == 1


# ---- gemm as the engine has it


@pytest.fixture
def operands() -> tuple[np.ndarray[Any, Any], ...]:
    random = np.random.default_rng(3)
    return tuple(random.standard_normal(shape) for shape in ((17, 33), (33, 19), (17, 19)))


@pytest.mark.parametrize(("name", "kind"), [("sgemm_blis_impl", "float"), ("dgemm_blis_impl", "double")])
def test_fortran_gemm(library: Any, operands, name: str, kind: str) -> None:
    gemm = getattr(library.blis_lib, name)
    a, b, c = (np.ascontiguousarray(x, np.float32 if kind == "float" else np.float64) for x in operands)
    expected = 2 * (a @ b) + 0.5 * c
    new = BLIS.ffi.new
    m, n, k = new("int *", 19), new("int *", 17), new("int *", 33)  # column major: C.T = B.T @ A.T
    alpha, beta = new(f"{kind} *", 2), new(f"{kind} *", 0.5)
    gemm(b"N", b"N", m, n, k, alpha, pointer(b, kind), m, pointer(a, kind), k, beta, pointer(c, kind), m)
    np.testing.assert_allclose(c, expected, rtol=0, atol=(1e-5 if kind == "float" else 1e-13) * np.abs(expected).max())


@pytest.mark.parametrize("reordered", [False, True])
def test_lpgemm_f32(library: Any, operands, reordered: bool) -> None:
    blis = library.blis_lib
    a, b, c = (np.ascontiguousarray(x, np.float32) for x in operands)
    expected = a @ b
    weights, form = b, b"n"
    if reordered:
        size = blis.aocl_get_reorder_buf_size_f32f32f32of32(b"r", b"n", b"B", 33, 19)
        weights, form = np.zeros(size // 4 + 16, np.float32), b"r"
        blis.aocl_reorder_f32f32f32of32(b"r", b"n", b"B", pointer(b, "float"), pointer(weights, "float"), 33, 19, 19)
    blis.aocl_gemm_f32f32f32of32(
        b"r", b"n", b"n", 17, 19, 33, 1.0, pointer(a, "float"), 33, b"n", pointer(weights, "float"), 19, form, 0.0,
        pointer(c, "float"), 19, BLIS.ffi.NULL,
    )  # fmt: skip
    np.testing.assert_allclose(c, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_lpgemm_with_a_post_op(library: Any, operands) -> None:
    """The post-op structs, read by the library: bias then relu."""
    new = BLIS.ffi.new
    a, b, c = (np.ascontiguousarray(x, np.float32) for x in operands)
    bias = np.linspace(-1, 1, 19, dtype=np.float32)
    eltwise, add = new("aocl_post_op_eltwise *"), new("aocl_post_op_bias *")
    eltwise.algo.algo_type = BLIS.ffi.integer_const("RELU")
    add.bias, add.stor_type = pointer(bias, "void"), BLIS.ffi.integer_const("AOCL_GEMM_F32")
    order = new("AOCL_POST_OP_TYPE[]", [BLIS.ffi.integer_const("BIAS"), BLIS.ffi.integer_const("ELTWISE")])
    post = new(
        "aocl_post_op *", {"eltwise": eltwise, "bias": add, "seq_length": 2, "seq_vector": order, "num_eltwise": 1}
    )
    library.blis_lib.aocl_gemm_f32f32f32of32(
        b"r", b"n", b"n", 17, 19, 33, 1.0, pointer(a, "float"), 33, b"n", pointer(b, "float"), 19, b"n", 0.0,
        pointer(c, "float"), 19, post,
    )  # fmt: skip
    expected = np.maximum(a @ b + bias, 0)
    np.testing.assert_allclose(c, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.needs("vnni")
def test_lpgemm_s8(library: Any) -> None:
    random = np.random.default_rng(4)
    a, b = (random.integers(-128, 128, shape, np.int8) for shape in ((17, 32), (32, 16)))
    c, packed = np.zeros((17, 16), np.int32), np.zeros(32 * 64 + 4096, np.int8)
    blis = library.blis_lib
    assert blis.aocl_get_reorder_buf_size_s8s8s32os32(b"r", b"n", b"B", 32, 16) <= packed.size
    blis.aocl_reorder_s8s8s32os32(b"r", b"n", b"B", pointer(b, "int8_t"), pointer(packed, "int8_t"), 32, 16, 16)
    blis.aocl_gemm_s8s8s32os32(
        b"r", b"n", b"n", 17, 16, 32, 1, pointer(a, "int8_t"), 32, b"n", pointer(packed, "int8_t"), 16, b"r", 0,
        pointer(c, "int32_t"), 16, BLIS.ffi.NULL,
    )  # fmt: skip
    np.testing.assert_array_equal(c, a.astype(np.int32) @ b.astype(np.int32))


# ---- another BLIS


def test_a_plain_blis_by_variable_serves_alone(run_python, compile_c) -> None:
    path = compile_c("#define BITS 64\n" + STAND_IN, name="libblis")
    assert run_python(USE_TYPED, env={module.BLIS_VARIABLE: str(path)}).stdout.split() == ["right", "False"]


def test_what_a_plain_blis_lacks_is_named(run_python, compile_c) -> None:
    path = compile_c("#define BITS 64\n" + STAND_IN, name="libblis")
    code = "from zendnn_cffi import blis\ntry: blis.aocl_gemm_f32f32f32of32\nexcept Exception as e: print(e)"
    told = run_python(code, env={module.BLIS_VARIABLE: str(path)}).stdout
    assert f"aocl_gemm_f32f32f32of32 is not in {path}" in told
    assert f"Unset {module.BLIS_VARIABLE}" in told


def test_blis_with_other_integers_is_refused(run_python, compile_c) -> None:
    path = compile_c("#define BITS 32\n" + STAND_IN, name="libblis")
    code = "import zendnn_cffi; print(zendnn_cffi.unavailable_reason())"
    told = run_python(code, env={module.BLIS_VARIABLE: str(path)}).stdout
    assert "bli_info_get_int_type_size() is 32, declared as 64" in told


def test_packaged_blis_comes_before_the_engines_own(run_python, compile_c, tmp_path: Path, library: Any) -> None:
    """libblis.so beside the engine answers first; what it lacks, the engine has."""
    target = tmp_path / "zendnn_cffi"
    shutil.copytree(module.PACKAGE, target, ignore=shutil.ignore_patterns("_engine", "__pycache__"))
    (target / "_engine").mkdir()
    (target / "_engine" / "libamdZenDNN.so").symlink_to(library.path)
    (target / "_engine" / "libblis.so").symlink_to(compile_c("#define BITS 64\n" + STAND_IN, name="libblis"))
    (target / "_engine" / "config.json").write_text(json.dumps({"provider": "prebuilt", "blis": "libblis.so"}))
    code = USE_TYPED + "print(blis.ffi.string(blis.bli_info_get_version_str()).decode())"
    env = {module.LIBRARY_VARIABLE: None, module.BLIS_VARIABLE: None}
    assert run_python(code, package=target, env=env).stdout.split() == ["right", "True", "stand-in"]
