"""docs/bindings.md: its examples run by themselves, and what it says of the environment is true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from zendnn_cffi import log
from zendnn_cffi.engine import library as module

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "bindings.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)
MATMUL = next(code for code in EXAMPLES if "zendnn_matmul_desc_init" in code)


@pytest.mark.parametrize("code", EXAMPLES, ids=lambda code: code.split("\n")[1])
def test_example_runs(run_python, code: str) -> None:
    run_python(code)


@pytest.mark.parametrize("name", [module.LIBRARY_VARIABLE, module.BLIS_VARIABLE, log.VARIABLE])
def test_our_variables_are_documented(name: str) -> None:
    assert f"`{name}=" in TEXT


def test_profile_names_each_primitive_executed(run_python) -> None:
    shown = run_python(MATMUL, env={"ZENDNN_PRIMITIVE_LOG_ENABLE": "1", "ZENDNN_LOG_OPTS": "PROF:2"}).stdout
    executed = [line for line in shown.splitlines() if "zendnn_primitive_execute" in line]
    assert len(executed) == 1
    assert ",matmul," in executed[0]
    assert "2x3:3x4:2x4" in executed[0]


def test_log_options_print_on_stdout(run_python) -> None:
    assert "[matmul]" in run_python(MATMUL, env={"ZENDNN_LOG_OPTS": "ALL:2"}).stdout
    assert run_python(MATMUL, env={"ZENDNN_LOG_OPTS": None}).stdout == ""


def test_instruction_set_can_be_limited(run_python) -> None:
    code = "import zendnn_cffi; zendnn_cffi.show_config()"
    assert re.search(r"^isa +cpu_isa_avx2$", run_python(code, env={"ZENDNN_MAX_CPU_ISA": "AVX2"}).stdout, re.MULTILINE)


# what a CPU shows without a limit of ours -> what it must be limited to; others stay as they are
_LIMITED = {"cpu_isa_avx512_core_amx": "cpu_isa_avx512_core_bf16"}


def test_kernels_for_amx_are_not_used(run_python) -> None:
    """They write beyond their results; on CPUs without AMX the limit changes nothing."""
    shown = [
        re.search(r"^isa +(\w+)$", run_python("import zendnn_cffi; zendnn_cffi.show_config()", env=env).stdout, re.M)
        for env in ({"ZENDNN_MAX_CPU_ISA": "ALL"}, {"ZENDNN_MAX_CPU_ISA": None})
    ]
    unlimited, ours = (match[1] for match in shown if match)
    assert ours == _LIMITED.get(unlimited, unlimited)
