"""Every declaration against the tables of facts, which other code made from the same binary.

Collected only where the tables lie beside the checkout; test_abi.py checks the declarations without them.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from zendnn_cffi.engine import abi, library
from zendnn_cffi.engine.library import declarations

MODULES = {"abi": "_zendnn", "aocl": "_blis"}
# Declared beside the LPGEMM family, from BLIS's own header
BEYOND_LPGEMM = re.compile(r"(bli_|BLIS_|[sd]gemm_blis_impl)")


def plain(ctype: str) -> str:
    """Return a C type spelled the same whoever wrote it: by cffi, with typedefs of enums and arrays resolved."""
    return re.sub(r"\s+", " ", ctype).strip()


@pytest.fixture(params=MODULES)
def table(request: pytest.FixtureRequest, facts) -> tuple[dict[str, Any], Any]:
    return facts(request.param), declarations(MODULES[request.param])


def typed(ffi: Any, ctype: str) -> Any:
    """Return the type a table's spelling means to our declarations."""
    return ffi.typeof(re.sub(r"\*\s+\*", "**", ctype)) if ctype != "void" else ffi.typeof("void")


def test_functions_are_the_same(table) -> None:
    known, module = table
    declared = {name for name in abi.declared_functions(module) if not BEYOND_LPGEMM.match(name)}
    assert declared == known["functions"].keys()


def test_prototypes_are_the_same(table) -> None:
    known, module = table
    loaded = module.ffi.dlopen(library.load().path, module.ffi.RTLD_LAZY)
    for name, prototype in known["functions"].items():
        declared = module.ffi.typeof(getattr(loaded, name))
        assert declared.result == typed(module.ffi, prototype["returns"]), name
        expected = tuple(decayed(module.ffi, kind) for _, kind in prototype["args"])
        assert declared.args == expected, name
        assert not declared.ellipsis


def decayed(ffi: Any, ctype: str) -> Any:
    """Return a parameter's type, arrays become pointers as in C."""
    kind = typed(ffi, ctype)
    return ffi.typeof(ffi.getctype(kind.item, "*")) if kind.kind == "array" else kind


def test_enumerators_and_macros_are_the_same(table) -> None:
    known, module = table
    values = {name: value for members in known["enums"].values() for name, value in members.items()}
    values |= known["constants"]
    assert len(values) > 10
    assert {name: module.ffi.integer_const(name) for name in values} == values
    declared = abi.declared_names(module) - abi.declared_functions(module)
    assert {name for name in declared - values.keys() if not BEYOND_LPGEMM.match(name)} <= {"ZENDNN_RNN_MAX_N_PARTS"}


def test_structs_are_the_same(table) -> None:
    known, module = table
    for name, struct in known["structs"].items():
        kind = module.ffi.typeof(name)
        assert module.ffi.sizeof(kind) == struct["size"], name
        assert {field: module.ffi.offsetof(name, field) for field, _ in kind.fields} == struct["offsets"], name
        for (field, member), (_, spelled) in zip(kind.fields, struct["fields"], strict=True):
            base, _, length = spelled.partition("[")
            expected = typed(module.ffi, base)
            if length:
                expected = module.ffi.typeof(module.ffi.getctype(expected, f"[{length}"))
            assert member.type == expected, (name, field)


def test_typedefs_are_the_same(table) -> None:
    known, module = table
    for name, meaning in known["typedefs"].items():
        kind = module.ffi.typeof(name)
        if meaning == "int":  # the tables spell enumerations as int
            assert kind.kind == "enum"
            assert module.ffi.sizeof(kind) == 4
        else:
            base, _, length = meaning.partition("[")
            expected = module.ffi.getctype(base, f"[{length}") if length else base
            assert kind == module.ffi.typeof(expected), name
