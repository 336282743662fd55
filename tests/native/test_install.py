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
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import lief
import pytest

import zendnn_cffi

pytestmark = pytest.mark.slow


ROOT = Path(__file__).resolve().parents[2]
Call = Callable[..., "subprocess.CompletedProcess[str]"]

VERSION = zendnn_cffi.__version__

# a user's program, and the lines of it that a type checker must object to
TYPED = """
import torch
import zendnn_cffi
from zendnn_cffi import functional as zf

def run(model: torch.nn.Module, x: torch.Tensor) -> str:
    fast = zendnn_cffi.optimize(model, example_inputs=(x,), dtype=None, tune="off")
    fast(x)
    share: float = zendnn_cffi.profile(fast, x, runs=3).total_ns / 2
    reasons: list[str] = [node.reason for node in zendnn_cffi.explain(fast).nodes]
    zf.convolution(x, x, padding=1)
    zendnn_cffi.optimise(model)  # no such name
    zendnn_cffi.optimize(model, tune=3)  # no string
    zendnn_cffi.explain(fast).notes.append(1)  # a list of strings
    return f"{share} {reasons}"
"""

WHERE = (
    "import zendnn_cffi.engine.library as l; r = l.load(); print(r.version, r.provider, r.path); "
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


def files_of(folder: Path) -> list[Path]:
    """All but bytecode: Python writes that beside a build backend that lies in the checkout."""
    return sorted(path for path in folder.rglob("*") if "__pycache__" not in path.parts)


@dataclass(frozen=True)
class Build:
    """What pip makes of a copy of the checkout: copies are apart, so that builds run beside each other.

    before  what the copy had in it
    out     the folder for wheels
    python  of the environment that is installed into
    """

    sources: Path
    before: list[Path]
    out: Path
    python: Path
    process: Future[subprocess.CompletedProcess[str]]

    def wait(self) -> None:
        done = self.process.result()
        assert done.returncode == 0, done.stdout + done.stderr

    def wheel(self) -> Path:
        """The wheel that was built."""
        self.wait()
        (built,) = self.out.glob("*.whl")
        return built


@pytest.fixture(scope="module")
def builds(
    checkout: Path, engine: Path, run: Call, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Build]]:
    """Every build of these tests, each in pip's isolated environment; two at a time, as each has one thread."""
    with ThreadPoolExecutor(2) as pool:

        def start(*words: str | Path, python: Path | None = None, env: dict[str, str] | None = None) -> Build:
            sources, out = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("out")
            shutil.copytree(checkout, sources, dirs_exist_ok=True)
            command = [python or sys.executable, "-m", "pip", *(out if word == "OUT" else word for word in words)]
            before = files_of(sources)
            process = pool.submit(run, *command, sources, env=env)
            return Build(sources, before, out, python or Path(sys.executable), process)

        wheel = ("wheel", "--no-deps", "-w", "OUT")
        variables = {"ZENDNN_PROVIDER": "system", "ZENDNN_LIBRARY": str(engine / "libamdZenDNN.so")}
        settings = [f"--config-settings=cmake.define.{name}={value}" for name, value in variables.items()]
        yield {
            "wheel": start(*wheel),
            "editable": start(
                "install", "--no-deps", "-e", python=new_environment(tmp_path_factory.mktemp("editable"))
            ),
            "by settings": start(*wheel, *settings),  # pip before 23.1 has no -C
            "by variables": start(*wheel, env=variables),
        }
        pool.shutdown(cancel_futures=True)


@pytest.fixture(scope="module")
def wheel(builds: dict[str, Build]) -> Path:
    """The wheel pip builds from the checkout, in an isolated build environment."""
    build = builds["wheel"]
    built = build.wheel()
    assert files_of(build.sources) == build.before, "building left files in the checkout"
    return built


def test_wheel_fits_every_python_and_the_systems_that_its_tag_names(wheel: Path, engine: Path) -> None:
    """The tag is what LIEF, which shares no code with the build's own reader, finds the library to need."""
    needed = lief.ELF.parse(engine / "libamdZenDNN.so").symbols_version_requirement
    names = {version.name for library in needed for version in library.get_auxiliary_symbols()}
    glibc = max(tuple(map(int, name[6:].split("."))) for name in names if name.startswith("GLIBC_"))
    assert wheel.name == f"zendnn_cffi-{VERSION}-py3-none-manylinux_{glibc[0]}_{glibc[1]}_x86_64.whl"
    with zipfile.ZipFile(wheel) as archive:
        (file,) = (name for name in archive.namelist() if name.endswith(".dist-info/WHEEL"))
        text = archive.read(file).decode()
    assert re.findall(r"^Tag: (.*)$", text, flags=re.MULTILINE) == ["-".join(wheel.stem.split("-")[2:])]


def test_wheel_holds_engine_bindings_and_both_packages(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {
        "zendnn_cffi/__init__.py", "fx_passes/__init__.py", "zendnn_cffi/build_ffi.py", "zendnn_cffi/cdef/types.h",
        "zendnn_cffi/_engine/libamdZenDNN.so", "zendnn_cffi/_engine/config.json",
        "zendnn_cffi/_engine/licenses/zentorch-LICENCE", "zendnn_cffi/_engine/licenses/NOTICE",
        "zendnn_cffi/_engine/licenses/zendnn_cffi-LICENSE",
        "zendnn_cffi/py.typed", "fx_passes/py.typed",
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
    assert "Project-URL: ZenDNN, https://github.com/amd/ZenDNN" in text
    required = [line for line in text.splitlines() if line.startswith("Requires-Dist:") and "extra ==" not in line]
    assert sorted(re.split("[<>]", line.split()[1])[0] for line in required) == [
        "cffi",
        "numpy",
        "safetensors",
        "torch",
    ]


def new_environment(folder: Path) -> Path:
    """The Python of a new virtual environment that sees this one's packages (torch, cffi), but not our package."""
    venv.create(folder / "venv", with_pip=False)
    python = folder / "venv" / "bin" / "python"
    ask = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    site = Path(subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip())
    shelf = folder / "shelf"
    shelf.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if "zendnn" not in entry.name and entry.name != "fx_passes" and not entry.name.endswith(".pth"):
            (shelf / entry.name).symlink_to(entry)
    (site / "shelf.pth").write_text(str(shelf) + "\n")
    return python


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    return new_environment(tmp_path)


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


def test_type_checkers_see_the_annotations(wheel: Path, environment: Path, run: Call, tmp_path: Path) -> None:
    done = run(environment, "-m", "pip", "install", "--no-deps", wheel)
    assert done.returncode == 0, done.stdout + done.stderr
    (tmp_path / "user.py").write_text(TYPED)
    (tmp_path / "mypy.ini").write_text("[mypy-torch.*]\nfollow_imports = skip\n")  # torch takes mypy a minute
    arguments = ["--strict", "--python-executable", environment, "--no-error-summary", "user.py"]
    done = run(sys.executable, "-m", "mypy", *arguments, cwd=tmp_path)
    wrong = {int(line.split(":")[1]) for line in done.stdout.splitlines() if ": error: " in line}
    marked = {number for number, line in enumerate(TYPED.splitlines(), 1) if "  # " in line}
    assert wrong == marked, done.stdout + done.stderr


def test_editable_install_works(builds: dict[str, Build], tmp_path: Path) -> None:
    build = builds["editable"]
    build.wait()
    for where in (tmp_path, build.sources):
        version, provider, path, _ = asks(build.python, where)
        assert (version, provider) == ("5.1.0", "prebuilt")
        assert path.startswith(str(build.python.parents[1])), path


@pytest.mark.parametrize("how", ["by settings", "by variables"])
def test_provider_can_be_chosen_when_installing(builds: dict[str, Build], engine: Path, how: str) -> None:
    """By a pip setting or by the environment: both reach CMake."""
    with zipfile.ZipFile(builds[how].wheel()) as archive:
        assert f'"library": "{engine / "libamdZenDNN.so"}"' in archive.read("zendnn_cffi/_engine/config.json").decode()
        assert not [name for name in archive.namelist() if name.endswith(".so")]
