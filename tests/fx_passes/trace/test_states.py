"""Flags and environment variables that a forward reads: each call takes the branch of what they are then."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Iterator
from os import getenv
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.backends.cuda import flash_sdp_enabled
from torch.nn.attention import SDPBackend, sdpa_kernel

import zendnn_cffi
from fx_passes.trace.states import State, States, settings_kept
from fx_passes.trace.traced import WHOLE
from tests.support.exported import needs_export

backends = torch.backends


class Asking(nn.Module):
    """A network whose result has the other sign where the answer is yes; loops over sizes need torch.export."""

    def __init__(self, ask: Callable[[], Any], loops: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.ask, self.loops = nn.Linear(4, 4), ask, loops

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        for _ in range(int(x.shape[1])) if self.loops and needs_export(x) else ():
            y = y + 1
        return -y if self.ask() else y


@contextlib.contextmanager
def changed(holder: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(holder, name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        setattr(holder, name, before)


@contextlib.contextmanager
def switched(get: Callable[[], Any], switch: Callable[[Any], Any], value: Any) -> Iterator[None]:
    before = get()
    switch(value)
    try:
        yield
    finally:
        switch(before)


@contextlib.contextmanager
def environment() -> Iterator[None]:
    os.environ["ZENDNN_CFFI_TESTS_FLAG"] = "1"
    try:
        yield
    finally:
        del os.environ["ZENDNN_CFFI_TESTS_FLAG"]


STATES: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "mkldnn": (lambda: backends.mkldnn.enabled, lambda: backends.mkldnn.flags(enabled=False)),
    "cudnn.benchmark": (lambda: backends.cudnn.benchmark, lambda: backends.cudnn.flags(benchmark=True)),
    "tf32": (
        lambda: backends.cuda.matmul.allow_tf32,
        lambda: changed(backends.cuda.matmul, "allow_tf32", not backends.cuda.matmul.allow_tf32),
    ),
    "precision": (lambda: backends.fp32_precision == "ieee", lambda: backends.flags(fp32_precision="ieee")),
    "of matmul": (
        lambda: backends.mkldnn.matmul.fp32_precision == "bf16",
        lambda: changed(backends.mkldnn.matmul, "fp32_precision", "bf16"),
    ),
    "quantized": (
        lambda: backends.quantized.engine == "onednn",
        lambda: changed(backends.quantized, "engine", "onednn"),
    ),
    "filled": (
        lambda: torch.utils.deterministic.fill_uninitialized_memory,
        lambda: changed(torch.utils.deterministic, "fill_uninitialized_memory", False),
    ),
    "attention": (lambda: backends.cuda.flash_sdp_enabled(), lambda: sdpa_kernel(SDPBackend.MATH)),
    "imported": (lambda: flash_sdp_enabled(), lambda: sdpa_kernel(SDPBackend.MATH)),
    "fast path": (
        lambda: backends.mha.get_fastpath_enabled(),
        lambda: switched(backends.mha.get_fastpath_enabled, backends.mha.set_fastpath_enabled, False),
    ),
    "autocast elsewhere": (
        lambda: torch.is_autocast_enabled("cuda"),
        lambda: switched(
            lambda: torch.is_autocast_enabled("cuda"), lambda value: torch.set_autocast_enabled("cuda", value), True
        ),
    ),
    "autocast's dtype": (
        lambda: torch.get_autocast_dtype("cpu") is torch.float16,
        lambda: switched(
            lambda: torch.get_autocast_dtype("cpu"),
            lambda dtype: torch.set_autocast_dtype("cpu", dtype),
            torch.float16,
        ),
    ),
    "distributed": (
        lambda: torch.distributed.is_initialized(),
        lambda: changed(torch.distributed, "is_initialized", lambda: True),
    ),
    "environment": (lambda: os.environ.get("ZENDNN_CFFI_TESTS_FLAG") == "1", environment),
    "in environment": (lambda: "ZENDNN_CFFI_TESTS_FLAG" in os.environ, environment),
    "getenv": (lambda: getenv("ZENDNN_CFFI_TESTS_FLAG") == "1", environment),
}


@pytest.mark.parametrize("way", ("symbolic", "export"))
@pytest.mark.parametrize("name", STATES)
def test_each_call_compares(name: str, way: str) -> None:
    ask, state = STATES[name]
    model, x = Asking(ask, way == "export").eval(), torch.rand(2, 4)
    with torch.no_grad():
        fast: Any = zendnn_cffi.optimize(model, (x,) if way == "export" else None, tune="off")
        for context in (contextlib.nullcontext, state, contextlib.nullcontext):
            with context():
                torch.testing.assert_close(fast(x), model(x))
        kept = not fast.leaves and fast.regions()
        assert kept or (way == "export" and name in ("fast path", "mkldnn"))  # which torch.export switches off


def test_imported_names_of_states_for_which_no_graph_is_made() -> None:
    from torch import is_grad_enabled

    space = {"asked": is_grad_enabled, "torch": torch, "__name__": "users"}
    exec("def ask():\n    return asked()", space)
    model, x = Asking(space["ask"], False).eval(), torch.rand(2, 4)
    fast: Any = zendnn_cffi.optimize(model, tune="off")
    assert "gradients are enabled" in "".join(fast.leaves.values())
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x))
    assert space["asked"] is is_grad_enabled


def test_everything_is_put_back() -> None:
    places = (torch, torch.cuda, torch.distributed, backends.cuda, backends.mha)
    before = [dict(vars(place)) for place in places]
    classes = [dict(vars(cls)) for cls in (type(backends.mkldnn), type(backends.cuda.matmul), type(os.environ))]
    with States().heard():
        assert torch.is_autocast_enabled is not before[0]["is_autocast_enabled"]
    assert [dict(vars(place)) for place in places] == before
    assert [dict(vars(c)) for c in (type(backends.mkldnn), type(backends.cuda.matmul), type(os.environ))] == classes


_READING = """
import os
def ask():
    return os.environ.get("ZENDNN_CFFI_TESTS_FLAG") == "1"
every, flag = dict(os.environ), ask()
"""


def test_what_an_import_reads_is_no_condition(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first torch.export of a process imports networkx: files were for processes of the same environment alone."""
    (tmp_path / "zendnn_cffi_tests_reading.py").write_text(_READING)
    monkeypatch.syspath_prepend(str(tmp_path))
    states = States()
    with states.heard():
        module = importlib.import_module("zendnn_cffi_tests_reading")
        assert module.every and not states.read
        module.ask()
    assert [name for _, name, _ in states.read] == ["ZENDNN_CFFI_TESTS_FLAG"]


def test_a_model_that_is_optimized_by_an_import_has_its_conditions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "zendnn_cffi_tests_optimizing"
    (tmp_path / f"{name}.py").write_text(
        f"import zendnn_cffi\nfrom {__name__} import STATES, Asking\n"
        "fast = zendnn_cffi.optimize(Asking(STATES['environment'][0], False).eval(), tune='off')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    arrange = importlib.import_module(name).fast._source[0].arrange
    assert arrange((torch.rand(2, 4),), {}) is not None
    with environment():
        assert arrange((torch.rand(2, 4),), {}) is None


def test_the_condition_is_saved(tmp_path: Any) -> None:
    model, x = Asking(STATES["environment"][0], False).eval(), torch.rand(2, 4)
    fast: Any = zendnn_cffi.optimize(model, tune="off")
    with torch.no_grad():
        fast(x)
    zendnn_cffi.save(fast, tmp_path / "model.safetensors")
    arrange = zendnn_cffi.load(tmp_path / "model.safetensors")._source[0].arrange
    assert arrange((x,), {}) is not None
    with environment():
        assert arrange((x,), {}) is None


@pytest.mark.parametrize(
    ("state", "known"),
    (
        (State("os.environ", "HOME", (), None), True),
        (State("torch.backends.mkldnn", "enabled", (), True), True),
        (State("torch", "load", ("/etc/passwd",), None), False),
        (State("os", "system", (), None), False),
        (State("torch", "is_autocast_enabled", (torch.device("cpu"),), True), False),
    ),
)
def test_a_file_names_known_flags_alone(state: State, known: bool) -> None:
    assert state.is_known is known


SETS: dict[str, Callable[[], Any]] = {
    "gradients": lambda: torch.set_grad_enabled(False),
    "deterministic": lambda: torch.use_deterministic_algorithms(True),
    "dtype": lambda: torch.set_default_dtype(torch.float64),
    "autocast": lambda: torch.set_autocast_enabled("cpu", True),
    "precision": lambda: torch.set_float32_matmul_precision("medium"),
}


def settings() -> tuple[Any, ...]:
    return (
        torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled(), torch.get_default_dtype(),
        torch.is_autocast_enabled("cpu"), torch.get_float32_matmul_precision(), torch.get_num_threads(),
    )  # fmt: skip


@pytest.mark.parametrize("by_example", [False, True])
@pytest.mark.parametrize("name", SETS)
def test_what_a_forward_sets_is_set_by_calls_alone(name: str, by_example: bool) -> None:
    class Setting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.a(x)
            SETS[name]()
            return y

    model, x = Setting().eval(), torch.randn(2, 4)
    with settings_kept():
        before = settings()
        fast = zendnn_cffi.optimize(model, tune="off", example_inputs=(x,) if by_example else None)
        assert settings() == before
        with settings_kept():
            expected = model(x)
        with settings_kept() as changed:
            torch.testing.assert_close(fast(x), expected)
        assert len(changed) == 1
    assert settings() == before
    assert ("autocast" if name == "autocast" else "its forward sets") in fast.leaves[""]


def set_and_back(x: torch.Tensor) -> torch.Tensor:
    torch.set_grad_enabled(False)
    y = x * 2
    torch.set_grad_enabled(True)
    return y


def set_in_c_and_back(x: torch.Tensor) -> torch.Tensor:
    torch._C._set_grad_enabled(False)
    y = x * 2
    torch._C._set_grad_enabled(True)
    return y


def enabled(x: torch.Tensor) -> torch.Tensor:
    torch.set_grad_enabled(True)
    return x * 2


def deterministic(x: torch.Tensor) -> torch.Tensor:
    torch.use_deterministic_algorithms(True)
    y = x * 2
    torch.use_deterministic_algorithms(False)
    return y


def printing(x: torch.Tensor) -> torch.Tensor:
    torch.set_printoptions(precision=2)
    return x * 2


def warning_always(x: torch.Tensor) -> torch.Tensor:
    torch.set_warn_always(True)
    return x * 2


def in_a_block(x: torch.Tensor) -> torch.Tensor:
    with torch.set_grad_enabled(False), torch.no_grad():
        return x * 2


SETTERS = (set_and_back, set_in_c_and_back, enabled, deterministic, printing, warning_always)


class Setting(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function, self.linear = function, nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.function(x))


def ambient() -> tuple[Any, ...]:
    options = dict(vars(torch._tensor_str.PRINT_OPTS))
    algorithms = torch.are_deterministic_algorithms_enabled()
    return torch.is_grad_enabled(), algorithms, torch.is_warn_always_enabled(), options


@pytest.mark.parametrize("with_example", [False, True])
@pytest.mark.parametrize("function", [*SETTERS, in_a_block], ids=lambda f: f.__name__)
def test_what_forward_sets_is_set_as_in_eager(
    function: Callable[[torch.Tensor], torch.Tensor], with_example: bool
) -> None:
    """It may be set already while it is traced, and otherwise in a call."""
    model, x = Setting(function).eval(), torch.randn(2, 8)
    with settings_kept():
        before = ambient()
        fast = zendnn_cffi.optimize(model, (x,) if with_example else None, tune="off")
        assert ambient() == before
        assert (WHOLE in fast.leaves) == (function in SETTERS), fast.leaves
        left = []
        for run in (model, fast):
            with settings_kept(), torch.no_grad():
                torch.use_deterministic_algorithms(True)
                y = run(x)
                left.append((ambient(), y.requires_grad))
        assert left[0] == left[1]
