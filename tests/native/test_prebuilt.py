"""The default provider end to end: what is installed, that it is what it says, and that it computes without torch."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest
from engine_build import pins
from engine_build.common import BuildError, sha256_of
from engine_build.elf_dynamic import read_dynamic
from engine_build.prebuilt import build_prebuilt, unpack_library, unsupported_reason, wheel_licences

ROOT = Path(__file__).resolve().parents[2]

# A convolution through the generated bindings alone: nothing here knows torch, and torch cannot be imported.
CONVOLUTION = textwrap.dedent("""
    import sys
    sys.modules["torch"] = None
    sys.path.insert(0, sys.argv[1])
    import numpy as np
    from _zendnn import ffi
    lib = ffi.dlopen(sys.argv[2], ffi.RTLD_NOW if sys.argv[3] == "now" else ffi.RTLD_LAZY)

    def check(status):
        assert status == 0, ffi.string(lib.zendnn_status2str(status))

    def made(kind, create, *arguments):
        box = ffi.new(kind)
        check(create(box, *arguments))
        return box[0]

    engine = made("zendnn_engine_t *", lib.zendnn_engine_create, lib.zendnn_cpu, 0)
    stream = made("zendnn_stream_t *", lib.zendnn_stream_create, engine, lib.zendnn_stream_default_flags)
    dims = lambda values: list(values) + [0] * (12 - len(values))

    def described(array):
        strides = [size // array.itemsize for size in array.strides]
        desc = ffi.new("zendnn_memory_desc_t *")
        shape, f32 = dims(array.shape), lib.zendnn_f32
        check(lib.zendnn_memory_desc_init_by_strides(desc, array.ndim, shape, f32, dims(strides), False, False))
        data = ffi.cast("void *", array.ctypes.data)
        return desc, made("zendnn_memory_t *", lib.zendnn_memory_create, desc, engine, data)

    rng = np.random.default_rng(0)
    src, weights, bias = (rng.standard_normal(shape, dtype="f4") for shape in ((1, 3, 7, 9), (5, 3, 3, 3), (5,)))
    dst = np.zeros((1, 5, 7, 9), "f4")
    arrays = {lib.ZENDNN_ARG_SRC: src, lib.ZENDNN_ARG_WEIGHTS: weights, lib.ZENDNN_ARG_BIAS: bias,
              lib.ZENDNN_ARG_DST: dst}
    memories = {argument: described(array) for argument, array in arrays.items()}
    descs = [desc for desc, _ in memories.values()]
    op, one = ffi.new("zendnn_convolution_desc_t *"), dims([1, 1])
    check(lib.zendnn_convolution_forward_desc_init(
        op, lib.zendnn_forward_inference, lib.zendnn_convolution_direct, *descs, one, one, one))
    pd = made("zendnn_primitive_desc_t *", lib.zendnn_primitive_desc_create, op, ffi.NULL, engine, ffi.NULL)
    primitive = made("zendnn_primitive_t *", lib.zendnn_primitive_create, pd)
    arguments = ffi.new("zendnn_exec_arg_t[]", [(argument, memory) for argument, (_, memory) in memories.items()])
    check(lib.zendnn_primitive_execute(primitive, stream, len(arguments), arguments))
    check(lib.zendnn_stream_wait(stream))

    padded = np.pad(src.astype("f8"), ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(2, 3))
    expected = np.einsum("nchwij,ocij->nohw", windows, weights.astype("f8")) + bias[:, None, None]
    error = np.abs(dst - expected).max() / np.abs(expected).max()
    assert error < 1e-6, error  # 27 products of f32
    assert not any("torch" in line for line in open("/proc/self/maps")), "torch was mapped"
    version = lib.zendnn_version()
    print(version.major, version.minor, version.patch)
""")


def test_config_says_what_is_there(engine: Path) -> None:
    config = json.loads((engine / "config.json").read_text())
    assert config["provider"] == "prebuilt"
    assert config["zendnn_version"] == "5.1.0"
    assert config["library"] == config["blis"] == "libamdZenDNN.so"
    assert config["sha256"] == sha256_of(engine / "libamdZenDNN.so")
    assert config["source_sha256"] == pins.ZENTORCH_LIBRARY_SHA256
    assert config["options"]["wheel_sha256"] == pins.ZENTORCH_WHEEL.sha256
    assert str(ROOT) not in json.dumps(config), "a build path went into the package"


def test_only_what_is_needed_is_installed(engine: Path) -> None:
    assert sorted(path.name for path in engine.iterdir()) == ["config.json", "libamdZenDNN.so", "licenses"]
    assert os.access(engine / "libamdZenDNN.so", os.X_OK)


def test_licences_are_carried(engine: Path) -> None:
    texts = {path.name: path.read_text() for path in (engine / "licenses").iterdir()}
    assert texts["zendnn_cffi-LICENSE"] == (ROOT / "LICENSE").read_text()
    assert "Advanced Micro Devices" in texts["zentorch-LICENCE"]
    assert "CHANGED by the build of zendnn_cffi" in texts["NOTICE"], "Apache-2.0 asks to say so"
    assert "BSD-3-Clause" in texts["NOTICE"]


@pytest.mark.parametrize(
    ("libc", "reason"),
    [
        (("glibc", "2.36"), None),
        (("glibc", "2.28"), None),
        (("glibc", "2.17"), "needs glibc 2.28 or newer, this is 2.17"),
        (("", ""), "needs glibc, which this system's Python does not use"),
    ],
)
def test_old_glibc_and_musl_get_no_engine_but_a_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, libc: tuple[str, str], reason: str | None
) -> None:
    monkeypatch.setattr("platform.libc_ver", lambda: libc)
    if reason is None:
        assert unsupported_reason() is None
    else:
        config = build_prebuilt(tmp_path, tmp_path, None)
        assert config.provider == "none" and reason in str(config.reason)


def test_library_names_itself_and_needs_no_torch(engine: Path) -> None:
    dynamic = read_dynamic(engine / "libamdZenDNN.so")
    assert dynamic is not None and dynamic.soname == "libamdZenDNN.so"
    system = ("libc.", "libm.", "libpthread.", "libstdc++.", "libgcc_s.", "libgomp.", "ld-linux")
    assert all(name.startswith(system) for name in dynamic.needed), dynamic.needed


@pytest.mark.parametrize("binding", ["lazy", "now"])
def test_convolution_in_a_process_without_torch(engine: Path, tmp_path: Path, binding: str) -> None:
    """Bound lazily, and with every symbol looked up at once: nothing of torch is missed either way."""
    generate = [sys.executable, str(ROOT / "zendnn_cffi" / "build_ffi.py"), "--out", str(tmp_path)]
    subprocess.run(generate, check=True, capture_output=True)
    words = [sys.executable, "-c", CONVOLUTION, str(tmp_path), str(engine / "libamdZenDNN.so"), binding]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"} | ({"LD_BIND_NOW": "1"} if binding == "now" else {})
    done = subprocess.run(words, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["5", "1", "0"]


def test_build_leaves_no_partial_file(prebuilt: Path) -> None:
    assert not list(prebuilt.rglob("*.part"))


def fake_wheel(path: Path, files: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return path


def test_wheel_without_the_library_is_refused(tmp_path: Path) -> None:
    wheel = fake_wheel(tmp_path / "zentorch.whl", {"zentorch/__init__.py": b""})
    with pytest.raises(BuildError, match="has no zentorch/libzentorch.so"):
        unpack_library(wheel, tmp_path)


def test_changed_library_in_the_wheel_is_refused(tmp_path: Path) -> None:
    wheel = fake_wheel(tmp_path / "zentorch.whl", {pins.ZENTORCH_LIBRARY: b"\x7fELF other"})
    with pytest.raises(BuildError, match="not the pinned file.*expected 89b5c9da"):
        unpack_library(wheel, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["zentorch.whl"], "a part of the library was left"


def test_wheel_without_licence_is_refused(tmp_path: Path) -> None:
    wheel = fake_wheel(tmp_path / "zentorch.whl", {"zentorch-5.1.0.dist-info/METADATA": b""})
    with pytest.raises(BuildError, match="no licence text"):
        wheel_licences(wheel)


def test_given_wheel_serves_without_registry(prebuilt: Path, build, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    (wheel,) = (prebuilt / "work" / "download").glob("*.whl")
    copy = shutil.copy(wheel, tmp_path / wheel.name)
    done = build(tmp_path / "b", f"-DZENDNN_CFFI_WHEEL={copy}", env={"PIP_NO_INDEX": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert sha256_of(tmp_path / "b/engine/libamdZenDNN.so") == sha256_of(prebuilt / "engine/libamdZenDNN.so")
