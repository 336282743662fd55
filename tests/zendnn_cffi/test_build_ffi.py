"""The generator: conditions, prefixes, modules that agree with each other, and a command line that needs cffi only."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from zendnn_cffi import build_ffi
from zendnn_cffi.engine import abi
from zendnn_cffi.engine.library import declarations

MODULES = [row.module for row in build_ffi.BINDINGS]
NESTED = "a\n#ifdef X\nb\n#ifdef Y\nc\n#else\nd\n#endif\n#else\ne\n#endif\n#ifndef X\nf\n#endif\ng\n"
# What only ZenDNN has, by intent: the list a reader would expect in the headers' #ifdef ZENDNN blocks.
ONLY_ZENDNN = {
    "embedding_bag_desc_init",
    "fused_convolution_forward_desc_init",
    "post_ops_append_dw",
    "post_ops_get_params_dw",
    "primitive_attr_set_autoTunerEnable",
    "primitive_attr_set_plugin_op_name",
    "primitive_attr_set_scales_mask",
    "primitive_attr_set_woq_weight_scale",
}


def names(module: str, prefix: str) -> set[str]:
    return {name.removeprefix(prefix) for name in abi.declared_functions(declarations(module))}


@pytest.mark.parametrize(
    ("defines", "kept"),
    [({"X", "Y"}, "a b c g"), ({"X"}, "a b d g"), ({"Y"}, "a e f g"), (set(), "a e f g")],
)
def test_conditions_select_their_lines(defines: set[str], kept: str) -> None:
    assert build_ffi.select(NESTED, frozenset(defines)).split() == kept.split()


@pytest.mark.parametrize("text", ["#ifdef X\n", "#endif\n", "#else\n", "#ifdef X\n#endif\n#endif\n"])
def test_conditions_that_do_not_pair_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="#"):
        build_ffi.select(text, frozenset())


def test_prefix_replaces_both_cases_and_nothing_else() -> None:
    text = "#define ZENDNN_ARG_SRC 1\nconst_zendnn_engine_t zendnn_f(int dims);"
    respelled = "#define DNNL_ARG_SRC 1\nconst_dnnl_engine_t dnnl_f(int dims);"
    assert build_ffi.respell(text, "dnnl_") == respelled
    assert build_ffi.respell(text, "zendnn_") == text


@pytest.mark.parametrize("row", build_ffi.BINDINGS, ids=lambda row: row.module)
def test_no_declaration_is_left_to_a_compiler(row: build_ffi.Binding) -> None:
    text = build_ffi.declarations(row)
    assert "..." not in text  # cffi would take it, and sizeof would come out too small
    assert "#if" not in text
    assert "/*" not in text


@pytest.mark.parametrize("header", sorted(path.name for path in build_ffi.CDEF.iterdir()))
def test_every_header_is_used_and_names_its_origin(header: str) -> None:
    assert any(header in row.headers for row in build_ffi.BINDINGS)
    first = (build_ffi.CDEF / header).read_text().split("*/")[0]
    assert re.search(r"ZenDNN 5\.1|AOCL-BLIS 5\.1", first)


def test_all_functions_of_the_c_api_are_declared() -> None:
    assert len(names("_zendnn", "zendnn_")) == 144


def test_the_second_library_differs_by_the_stated_functions_only() -> None:
    zendnn, onednn = names("_zendnn", "zendnn_"), names("_onednn", "dnnl_")
    assert zendnn - onednn == ONLY_ZENDNN
    assert onednn <= zendnn


def test_the_second_library_has_no_zendnn_left() -> None:
    assert "zendnn" not in build_ffi.declarations(build_ffi.binding("_onednn")).lower()


@pytest.mark.parametrize("prefix_of", [("_zendnn", "zendnn_", 7), ("_onednn", "dnnl_", 5)], ids=lambda x: x[0])
def test_memory_descriptor_initialiser_has_two_more_arguments_in_zendnn(prefix_of: tuple[str, str, int]) -> None:
    module, prefix, arguments = prefix_of
    ffi = declarations(module).ffi
    lib = ffi.dlopen(None)
    text = build_ffi.declarations(build_ffi.binding(module))
    found = re.search(rf"{prefix}memory_desc_init_by_tag\(([^)]*)\)", text)
    assert found is not None
    assert len(found.group(1).split(",")) == arguments
    assert f"{prefix}memory_desc_init_by_tag" in dir(lib)


def run_generator(folder: Path, *extra: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-I", str(Path(build_ffi.__file__)), "--out", str(folder), *extra]
    return subprocess.run(command, capture_output=True, text=True, cwd="/")


def test_command_line_writes_every_module_the_same_each_time(tmp_path: Path) -> None:
    for folder in (tmp_path / "first", tmp_path / "second" / "deeper"):
        done = run_generator(folder)
        assert done.returncode == 0, done.stderr
        assert [Path(line).name for line in done.stdout.splitlines()] == [f"{name}.py" for name in MODULES]
        assert sorted(p.name for p in folder.iterdir()) == sorted(["__init__.py", *(f"{name}.py" for name in MODULES)])
    for name in MODULES:
        assert (tmp_path / "first" / f"{name}.py").read_bytes() == (
            tmp_path / "second" / "deeper" / f"{name}.py"
        ).read_bytes()


def test_command_line_needs_a_folder(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, str(build_ffi.__file__)], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2
    assert "--out" in done.stderr


def test_generator_imports_nothing_of_the_package() -> None:
    imported = {
        node.module.split(".")[0] if isinstance(node, ast.ImportFrom) and node.module else alias.name.split(".")[0]
        for node in ast.walk(ast.parse(Path(build_ffi.__file__).read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert imported - set(sys.stdlib_module_names) == {"cffi"}


@pytest.mark.parametrize("row", build_ffi.BINDINGS, ids=lambda row: row.module)
def test_written_module_declares_what_the_one_in_memory_does(row: build_ffi.Binding, tmp_path: Path) -> None:
    written = build_ffi.write_module(row, tmp_path).read_text()
    scope: dict[str, object] = {}
    exec(written, scope)
    assert scope["FINGERPRINT"] == build_ffi.fingerprint(row)
    assert dir(scope["ffi"].dlopen(None)) == dir(declarations(row.module).ffi.dlopen(None))  # type: ignore[attr-defined]


@pytest.fixture
def copied_package(tmp_path: Path) -> Path:
    """A copy of the package's own files, to put generated modules into."""
    target = tmp_path / "zendnn_cffi"
    shutil.copytree(
        Path(build_ffi.__file__).parent, target, ignore=shutil.ignore_patterns("_generated", "_engine", "__pycache__")
    )
    return target


WHICH = """
from zendnn_cffi.engine import library
module = library.declarations('_zendnn')
print(module.__name__, module.ffi.sizeof('zendnn_dims_t'))
"""


def test_generated_module_is_preferred(copied_package: Path, run_python) -> None:
    assert run_generator(copied_package / "_generated").returncode == 0
    assert run_python(WHICH, package=copied_package).stdout.split() == ["zendnn_cffi._generated._zendnn", "96"]


def test_module_older_than_the_declarations_is_passed_over(copied_package: Path, run_python) -> None:
    assert run_generator(copied_package / "_generated").returncode == 0
    with open(copied_package / "cdef" / "types.h", "a") as header:
        header.write("\n/* changed */\n")
    assert run_python(WHICH, package=copied_package).stdout.split() == ["_zendnn", "96"]


def test_generated_module_serves_without_the_headers(copied_package: Path, run_python) -> None:
    assert run_generator(copied_package / "_generated").returncode == 0
    shutil.rmtree(copied_package / "cdef")
    assert run_python(WHICH, package=copied_package).stdout.split() == ["zendnn_cffi._generated._zendnn", "96"]
