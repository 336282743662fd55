"""show_config, __config__ and __version__: what is installed, what runs, and why not."""

from __future__ import annotations

import hashlib
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

import zendnn_cffi
from zendnn_cffi.api import config
from zendnn_cffi.engine import library as module


def shown() -> dict[str, str]:
    out = io.StringIO()
    zendnn_cffi.show_config(file=out)
    pairs = (line.split(maxsplit=1) for line in out.getvalue().splitlines())
    return {pair[0]: pair[1] for pair in pairs}


def test_everything_is_named(library: Any) -> None:
    facts = shown()
    assert facts.keys() == {
        *[
            "zendnn_cffi",
            "python",
            "torch",
            "cffi",
            "numpy",
            "platform",
            "cpu",
            "available",
            "zendnn",
            "provider",
            "library",
            "sha256",
            "isa",
        ],
        *["threads", "openmp", "blis", "environment"],
    }
    assert facts["available"] == "yes"
    assert facts["zendnn"] == library.version
    assert facts["library"] == library.path
    assert facts["sha256"].split()[0] == hashlib.sha256(Path(library.path).read_bytes()).hexdigest()
    assert facts["isa"].startswith("cpu_isa_avx")
    assert int(facts["threads"]) >= 1
    assert "libgomp" in facts["openmp"]
    assert "BL" in facts["blis"]
    assert facts["zendnn_cffi"] == zendnn_cffi.__version__


def test_it_prints_to_stdout_without_importing_torch(run_python) -> None:
    done = run_python("import sys, zendnn_cffi; zendnn_cffi.show_config(); print('torch' in sys.modules)")
    lines = done.stdout.splitlines()
    assert lines[-1] == "False"
    assert any(line.startswith("available") for line in lines)
    assert done.stderr == ""


def test_unavailable_engine_gives_its_reason(run_python, tmp_path: Path) -> None:
    env = {module.LIBRARY_VARIABLE: str(tmp_path / "none.so")}
    out = run_python("import zendnn_cffi; zendnn_cffi.show_config()", env=env).stdout
    assert re.search(r"^available +no: .*none\.so: no such file", out, flags=re.MULTILINE)
    assert re.search(r"^provider +none", out, flags=re.MULTILINE)
    assert re.search(r"^environment .*ZENDNN_CFFI_LIBRARY=", out, flags=re.MULTILINE)


def test_file_other_than_the_built_one_is_pointed_out(library: Any, monkeypatch) -> None:
    monkeypatch.setattr(library, "config", {"sha256": "0" * 64})
    assert shown()["sha256"].endswith(f"(config.json says {'0' * 64})")


def test_second_openmp_runtime_is_pointed_out(library: Any, monkeypatch) -> None:
    monkeypatch.setattr(config.openmp, "mapped_runtimes", lambda: ["/a/libgomp.so.1", "/b/libomp.so"])
    monkeypatch.setattr(config.openmp, "thread_count", lambda: 2)
    assert "more than one" in shown()["openmp"]


@pytest.fixture
def tree(monkeypatch, tmp_path: Path) -> Path:
    """A package folder with nothing in it, and no variable set."""
    monkeypatch.delenv(module.LIBRARY_VARIABLE, raising=False)
    package = tmp_path / "zendnn_cffi"
    (package / "_engine").mkdir(parents=True)
    monkeypatch.setattr(module, "PACKAGE", package)
    return package


def test_config_is_the_engines_file_read_only(tree: Path) -> None:
    written = {"provider": "prebuilt", "zendnn_version": "5.1.0", "options": {"a": 1}}
    (tree / "_engine" / "config.json").write_text(json.dumps(written))
    (tree / "_engine" / "libamdZenDNN.so").write_bytes(b"")
    assert dict(config.engine_config()) == written
    with pytest.raises(TypeError):
        config.engine_config()["provider"] = "other"  # type: ignore[index]


def test_config_without_engine_has_the_reason(tree: Path) -> None:
    (tree / "_engine" / "config.json").write_text(json.dumps({"provider": "none", "reason": "because"}))
    told = config.engine_config()
    assert told["provider"] == "none"
    assert "because" in told["reason"]


def test_config_of_a_library_given_by_variable(monkeypatch, tmp_path: Path) -> None:
    (tmp_path / "mine.so").write_bytes(b"")
    monkeypatch.setenv(module.LIBRARY_VARIABLE, str(tmp_path / "mine.so"))
    assert dict(config.engine_config()) == {"provider": "system", "library": str(tmp_path / "mine.so")}


def test_version_comes_from_the_source_tree(tree: Path) -> None:
    (tree.parent / "pyproject.toml").write_text('[build-system]\nrequires = []\n[project]\nversion = "7.8.9"\n')
    assert config.package_version() == "7.8.9"


def test_version_comes_from_the_installed_distribution(tree: Path, monkeypatch) -> None:
    monkeypatch.setattr(module, "DISTRIBUTION", "cffi")
    assert re.match(r"\d+\.\d+", config.package_version())
    monkeypatch.setattr(module, "DISTRIBUTION", "not-installed-at-all")
    assert config.package_version() == "0+unknown"


def test_package_has_version_and_config() -> None:
    assert re.match(r"\d+\.\d+", zendnn_cffi.__version__)
    assert "provider" in zendnn_cffi.__config__
    with pytest.raises(AttributeError):
        _ = config.nonsense
