"""CMakeLists.txt on its own: options, environment, other platforms, no network, installation."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Call = Callable[..., "subprocess.CompletedProcess[str]"]
ErrorLine = Callable[["subprocess.CompletedProcess[str]"], str]
ELSEWHERE = ("-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64")


def config_of(folder: Path) -> Any:
    return json.loads((folder / "engine" / "config.json").read_text())


def test_install_puts_everything_into_the_package(prebuilt: Path, run: Call, tmp_path: Path) -> None:
    done = run("cmake", "--install", prebuilt, "--prefix", tmp_path)
    assert done.returncode == 0, done.stderr
    package = tmp_path / "zendnn_cffi"
    assert (package / "_engine" / "libamdZenDNN.so").is_file()
    assert (package / "_engine" / "config.json").is_file()
    generated = sorted(path.name for path in (package / "_generated").iterdir())
    assert generated == ["__init__.py", "_blis.py", "_onednn.py", "_zendnn.py"]
    assert sorted(path.name for path in package.iterdir()) == ["_engine", "_generated"]


def test_installed_bindings_import_without_the_package(prebuilt: Path, run: Call) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import _zendnn, _blis; _zendnn.ffi.sizeof('zendnn_memory_desc_t')"
    )
    done = run(sys.executable, "-c", code, prebuilt / "generated")
    assert done.returncode == 0, done.stderr


def test_no_compiler_is_looked_for(prebuilt: Path) -> None:
    assert "CMAKE_C_COMPILER" not in (prebuilt / "CMakeCache.txt").read_text()


def test_building_again_does_nothing(prebuilt: Path, build: Call) -> None:
    before = (prebuilt / "engine" / "config.json").stat().st_mtime_ns
    assert build(prebuilt).returncode == 0
    assert (prebuilt / "engine" / "config.json").stat().st_mtime_ns == before


def test_other_platform_builds_without_engine_and_says_why(build: Call, tmp_path: Path) -> None:
    done = build(tmp_path, *ELSEWHERE)
    assert done.returncode == 0, done.stderr
    config = config_of(tmp_path)
    assert config["provider"] == "none"
    assert config["reason"] == "ZenDNN is available for Linux on x86-64 only, this is Linux on aarch64"
    assert config["library"] is None
    assert not list(tmp_path.rglob("*.so"))


@pytest.mark.parametrize(
    ("option", "choices"),
    [
        ("ZENDNN_PROVIDER=cloud", "choose prebuilt, source or system"),
        ("ZENDNN_CFFI_BLIS=mkl", "choose default or sdist"),
    ],
)
def test_unknown_choice_is_refused(build: Call, tmp_path: Path, option: str, choices: str) -> None:
    done = build(tmp_path, f"-D{option}")
    assert done.returncode != 0
    assert option in done.stderr and choices in " ".join(done.stderr.split())


def test_environment_sets_the_provider(build: Call, tmp_path: Path, error_line: ErrorLine) -> None:
    line = error_line(build(tmp_path, env={"ZENDNN_PROVIDER": "system"}))
    assert line.endswith("ZENDNN_PROVIDER=system needs -DZENDNN_LIBRARY=<path of libamdZenDNN.so>.")


def test_option_wins_over_environment(build: Call, tmp_path: Path) -> None:
    done = build(tmp_path, "-DZENDNN_PROVIDER=prebuilt", *ELSEWHERE, env={"ZENDNN_PROVIDER": "system"})
    assert done.returncode == 0, done.stderr
    assert config_of(tmp_path)["provider"] == "none"


@pytest.mark.parametrize(
    "environment",
    [
        {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""},
        {
            "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
            "PIP_EXTRA_INDEX_URL": "",
            "PIP_FIND_LINKS": "",
            "PIP_RETRIES": "0",
        },
    ],
    ids=["no index", "nothing listens"],
)
def test_no_network_is_one_line_with_the_remedy(
    build: Call, tmp_path: Path, error_line: ErrorLine, environment: dict[str, str]
) -> None:
    line = error_line(build(tmp_path, env={**environment, "PIP_CONFIG_FILE": "/dev/null"}))
    assert "zentorch==5.1.0 cannot be downloaded" in line
    assert "-DZENDNN_CFFI_WHEEL=<file>" in line
    assert not (tmp_path / "engine" / "libamdZenDNN.so").exists()
    assert not (tmp_path / "engine" / "config.json").exists()


def test_changed_wheel_is_refused(build: Call, tmp_path: Path, error_line: ErrorLine) -> None:
    (tmp_path / "zentorch.whl").write_bytes(b"not the wheel")
    line = error_line(build(tmp_path / "b", f"-DZENDNN_CFFI_WHEEL={tmp_path / 'zentorch.whl'}"))
    assert "is not the pinned file" in line and "656e2a98" in line


def test_given_wheel_must_exist(build: Call, tmp_path: Path, error_line: ErrorLine) -> None:
    line = error_line(build(tmp_path / "b", "-DZENDNN_CFFI_WHEEL=/nowhere.whl"))
    assert "ZENDNN_CFFI_WHEEL=/nowhere.whl is not a file" in line
