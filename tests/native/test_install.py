"""`pip install .`: what the wheel holds, its tag, and that an editable install and the checkout find the engine."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
Call = Callable[..., "subprocess.CompletedProcess[str]"]

WHERE = (
    "import zendnn_cffi.library as l; r = l.load(); print(r.version, r.provider, r.path); "
    "print(l.declarations('_zendnn').__name__)"
)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what git tracks or would: building must not need, nor change, anything else."""
    folder = tmp_path_factory.mktemp("checkout")
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in names:
        if name and (ROOT / name).is_file() and not name.startswith("benchmarks/."):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def wheel(checkout: Path, run: Call, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel pip builds from the checkout, in an isolated build environment."""
    out = tmp_path_factory.mktemp("wheel")
    before = sorted(path for path in checkout.rglob("*"))
    done = run(sys.executable, "-m", "pip", "wheel", "--no-deps", "-w", out, checkout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(path for path in checkout.rglob("*")) == before, "building left files in the checkout"
    (built,) = out.glob("*.whl")
    return built


def test_wheel_fits_every_python_on_this_platform(wheel: Path) -> None:
    assert wheel.name.startswith("zendnn_cffi-") and wheel.name.endswith("-py3-none-linux_x86_64.whl")


def test_wheel_holds_engine_bindings_and_both_packages(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {
        "zendnn_cffi/__init__.py", "fx_passes/__init__.py", "zendnn_cffi/build_ffi.py", "zendnn_cffi/cdef/types.h",
        "zendnn_cffi/_engine/libamdZenDNN.so", "zendnn_cffi/_engine/config.json",
        "zendnn_cffi/_engine/licenses/zentorch-LICENCE", "zendnn_cffi/_engine/licenses/NOTICE",
        "zendnn_cffi/_engine/licenses/zendnn_cffi-LICENSE",
        "zendnn_cffi/_generated/__init__.py", "zendnn_cffi/_generated/_zendnn.py", "zendnn_cffi/_generated/_blis.py",
    }  # fmt: skip
    assert expected <= names
    others = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert others == {"zendnn_cffi", "fx_passes"}, "tests, demo or native went into the wheel"
    assert not [name for name in names if name.endswith((".part", ".log", ".pyc"))]


def test_wheel_metadata(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        text = archive.read(name).decode()
    assert "License-Expression: Apache-2.0" in text
    assert "Requires-Python: >=3.10" in text
    required = [line for line in text.splitlines() if line.startswith("Requires-Dist:") and "extra ==" not in line]
    assert sorted(re.split("[<>]", line.split()[1])[0] for line in required) == ["cffi", "numpy", "torch"]


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """The Python of a new virtual environment that sees this one's packages (torch, cffi), but not our package."""
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    ask = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    site = Path(subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip())
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if "zendnn" not in entry.name and entry.name != "fx_passes" and not entry.name.endswith(".pth"):
            (shelf / entry.name).symlink_to(entry)
    (site / "shelf.pth").write_text(str(shelf) + "\n")
    return python


def asks(python: Path, where: Path) -> list[str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("ZENDNN_", "PYTHONPATH"))}
    done = subprocess.run([str(python), "-c", WHERE], cwd=where, env=clean, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_installed_wheel_works_from_anywhere_and_from_the_checkout(
    wheel: Path, checkout: Path, environment: Path, run: Call, tmp_path: Path
) -> None:
    """In the checkout the source tree is imported first; it must find the engine of the installed distribution."""
    done = run(environment, "-m", "pip", "install", "--no-deps", wheel)
    assert done.returncode == 0, done.stdout + done.stderr
    for where in (tmp_path, checkout):
        version, provider, path, module = asks(environment, where)
        assert (version, provider) == ("5.1.0", "prebuilt")
        assert path.startswith(str(tmp_path / "venv")), path
        assert module.endswith("_zendnn")


def test_editable_install_works(checkout: Path, environment: Path, run: Call, tmp_path: Path) -> None:
    done = run(environment, "-m", "pip", "install", "--no-deps", "-e", checkout)
    assert done.returncode == 0, done.stdout + done.stderr
    for where in (tmp_path, checkout):
        version, provider, path, _ = asks(environment, where)
        assert (version, provider) == ("5.1.0", "prebuilt")
        assert path.startswith(str(tmp_path / "venv")), path


def test_provider_can_be_chosen_when_installing(checkout: Path, engine: Path, run: Call, tmp_path: Path) -> None:
    """By a pip setting or by the environment: both reach CMake."""
    library = engine / "libamdZenDNN.so"
    defines = "cmake.define.ZENDNN_PROVIDER=system", f"cmake.define.ZENDNN_LIBRARY={library}"
    settings = [f"--config-settings={define}" for define in defines]  # pip before 23.1 has no -C
    variables = {"ZENDNN_PROVIDER": "system", "ZENDNN_LIBRARY": str(library)}
    for index, (arguments, env) in enumerate([(settings, {}), ([], variables)]):
        out = tmp_path / str(index)
        done = run(sys.executable, "-m", "pip", "wheel", "--no-deps", "-w", out, *arguments, checkout, env=env)
        assert done.returncode == 0, done.stdout + done.stderr
        with zipfile.ZipFile(next(out.glob("*.whl"))) as archive:
            assert f'"library": "{library}"' in archive.read("zendnn_cffi/_engine/config.json").decode()
            assert not [name for name in archive.namelist() if name.endswith(".so")]
