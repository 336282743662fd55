"""Fetching through pip: the pinned file or a reason, never something else."""

from __future__ import annotations

import importlib.util
import sys
import zipfile
from pathlib import Path

import pytest
from engine_build import fetch as fetching
from engine_build.common import BuildError, sha256_of
from engine_build.fetch import ensure_lief, fetch
from engine_build.pins import BLIS_SDIST, ZENTORCH_WHEEL, RegistryFile


def tiny_wheel(folder: Path, name: str = "tinypackage", tags: str = "cp311-cp311-manylinux_2_28_x86_64") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-1.0-{tags}.whl"
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: torch\n"
        )
        archive.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: {tags}\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


def pin_for(path: Path, sha256: str | None = None) -> RegistryFile:
    return RegistryFile("tinypackage", "1.0", sha256 or sha256_of(path), "3.11", "cp311", "manylinux_2_28_x86_64")


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels as the only place pip looks at."""
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "shelf"))
    return tmp_path / "shelf"


def test_wheel_of_another_python_is_fetched_without_its_dependencies(shelf: Path, tmp_path: Path) -> None:
    wheel = tiny_wheel(shelf)
    got = fetch(pin_for(wheel), tmp_path / "got")
    assert sha256_of(got) == sha256_of(wheel)
    assert [path.name for path in (tmp_path / "got").glob("*.whl")] == [wheel.name]


def test_other_content_is_refused(shelf: Path, tmp_path: Path) -> None:
    wheel = tiny_wheel(shelf)
    with pytest.raises(BuildError, match="does not have the pinned hash; refusing it"):
        fetch(pin_for(wheel, "0" * 64), tmp_path / "got")
    assert not list((tmp_path / "got").glob("*.whl"))


def test_absent_file_says_what_to_do(shelf: Path, tmp_path: Path) -> None:
    shelf.mkdir()
    with pytest.raises(BuildError, match="tinypackage==1.0 cannot be downloaded.*-DZENDNN_CFFI_WHEEL=<file>"):
        fetch(RegistryFile("tinypackage", "1.0", "0" * 64, "3.11", "cp311", "manylinux_2_28_x86_64"), tmp_path / "got")


def test_file_already_there_needs_no_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = tiny_wheel(tmp_path)
    monkeypatch.setattr(fetching, "run", lambda *_, **__: pytest.fail("pip was run"))
    assert fetch(pin_for(wheel), tmp_path) == wheel


def test_changed_file_already_there_is_refused(tmp_path: Path) -> None:
    wheel = tiny_wheel(tmp_path)
    with pytest.raises(BuildError, match="is not the pinned file"):
        fetch(pin_for(wheel, "0" * 64), tmp_path)


def test_missing_pip_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BuildError, match="-m ensurepip"):
        fetch(ZENTORCH_WHEEL, tmp_path)


def test_missing_lief_is_installed_into_the_work_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, commands = importlib.util.find_spec, []

    def fake_pip(command: list[object], **_: object) -> str:
        commands.append([str(word) for word in command])
        target = Path(commands[-1][commands[-1].index("--target") + 1])
        (target / "lief").mkdir(parents=True)
        return ""

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "lief" else real(name))
    monkeypatch.setattr(fetching, "run", fake_pip)
    monkeypatch.setattr("sys.path", list(sys.path))
    ensure_lief(tmp_path)
    ensure_lief(tmp_path)  # the second time it is there
    assert len(commands) == 1 and commands[0][-1].startswith("lief")
    assert (tmp_path / "lief" / "lief").is_dir()


@pytest.mark.parametrize("pin", [ZENTORCH_WHEEL, BLIS_SDIST], ids=lambda pin: pin.name)
def test_pins_are_exact(pin: RegistryFile) -> None:
    assert pin.requirement == f"{pin.name}=={pin.version} --hash=sha256:{pin.sha256}"
    assert len(pin.sha256) == 64
