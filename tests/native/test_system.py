"""Provider `system`: the library is used where it is, if it is a ZenDNN these bindings are for."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from engine_build.common import BuildError
from engine_build.system import use_system, version_of

Call = Callable[..., "subprocess.CompletedProcess[str]"]


def compiled(folder: Path, code: str, name: str = "libstandin.so") -> Path:
    (folder / "standin.c").write_text(code)
    library = folder / name
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, folder / "standin.c"], check=True)
    return library


def versioned(major: int, minor: int) -> str:
    return f"static int v[] = {{{major}, {minor}, 7}}; const int *zendnn_version(void) {{ return v; }}"


def test_real_library_is_pointed_at_not_copied(build: Call, engine: Path, tmp_path: Path) -> None:
    library = engine / "libamdZenDNN.so"
    done = build(tmp_path, "-DZENDNN_PROVIDER=system", f"-DZENDNN_LIBRARY={library}")
    assert done.returncode == 0, done.stdout + done.stderr
    config = json.loads((tmp_path / "engine" / "config.json").read_text())
    assert (config["provider"], config["zendnn_version"]) == ("system", "5.1.0")
    assert config["library"] == str(library)
    assert config["sha256"] == json.loads((engine / "config.json").read_text())["sha256"]
    assert not list((tmp_path / "engine").glob("*.so"))


@pytest.mark.parametrize("minor", [0, 1])
def test_supported_versions(tmp_path: Path, minor: int) -> None:
    assert version_of(compiled(tmp_path, versioned(5, minor))) == f"5.{minor}.7"


def test_other_version_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="is ZenDNN 4.2.7; the bindings are for 5.0 and 5.1"):
        use_system(compiled(tmp_path, versioned(4, 2)))


def test_other_library_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="not a ZenDNN with the C API"):
        use_system(compiled(tmp_path, "int other;"))


def test_library_that_does_not_load_alone_is_taken_with_unknown_version(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code = "extern int brought_later; int *needs_it = &brought_later;" + versioned(5, 1)
    assert use_system(compiled(tmp_path, code)).zendnn_version is None
    assert "brought_later" in capfd.readouterr().out


def test_path_must_be_given() -> None:
    with pytest.raises(BuildError, match="needs -DZENDNN_LIBRARY"):
        use_system(None)


def test_path_must_be_a_library(tmp_path: Path) -> None:
    (tmp_path / "lib.so").write_text("text")
    for path in (tmp_path / "lib.so", tmp_path / "absent.so", tmp_path):
        with pytest.raises(BuildError, match="is not a shared library"):
            use_system(path)
