"""Flags of PyTorch's and environment variables that a forward reads: a graph has the branch of one answer for good.

    if torch.backends.mkldnn.enabled: ...        heard while traced: State("torch.backends.mkldnn", "enabled", (), True)

Each call compares what was heard with what is now. Installed libraries read such flags, so no graph is refused for it.
Autocast on the CPU and the default dtype are compared by each call anyway. fx_passes/trace/asked.py has the states for
which no graph is made.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import _tensor_str

from fx_passes.trace.proxies import asking_frame

ENVIRONMENT = "os.environ"
# What is called, and what is read: place -> names.
_FUNCTIONS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "torch": ("is_autocast_enabled", "is_autocast_cache_enabled", "get_autocast_dtype", "get_autocast_cpu_dtype",
                  "get_autocast_gpu_dtype", "is_warn_always_enabled"),
        "torch.cuda": ("is_available", "device_count"),
        "torch.distributed": ("is_available", "is_initialized"),
        "torch.backends.mha": ("get_fastpath_enabled",),
        "torch.backends.cuda": ("flash_sdp_enabled", "mem_efficient_sdp_enabled", "math_sdp_enabled",
                                "cudnn_sdp_enabled", "fp16_bf16_reduction_math_sdp_allowed"),
    }
)  # fmt: skip
_PRECISION = ("fp32_precision",)
_FLAGS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "torch.backends": _PRECISION,
        "torch.utils.deterministic": ("fill_uninitialized_memory",),
        "torch.backends.mkldnn": ("enabled", "deterministic", "allow_tf32", *_PRECISION),
        **dict.fromkeys((f"torch.backends.mkldnn.{name}" for name in ("matmul", "conv", "rnn")), _PRECISION),
        "torch.backends.cudnn": ("enabled", "benchmark", "deterministic", "allow_tf32", *_PRECISION),
        "torch.backends.quantized": ("engine",),
        "torch.backends.opt_einsum": ("enabled", "strategy"),
        "torch.backends.cuda.matmul": ("allow_tf32", "allow_fp16_reduced_precision_reduction",
                                       "allow_bf16_reduced_precision_reduction", *_PRECISION),
    }
)  # fmt: skip
# What forwards set, and a graph would leave out: how it is read, and how it is set.
_SETTINGS: Mapping[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = MappingProxyType(
    {
        "whether gradients are enabled": (torch.is_grad_enabled, torch.set_grad_enabled),
        "the number of threads": (torch.get_num_threads, torch.set_num_threads),
        "deterministic algorithms": (
            lambda: (
                torch.are_deterministic_algorithms_enabled(),
                torch.is_deterministic_algorithms_warn_only_enabled(),
            ),
            lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
        ),
        "the default dtype": (torch.get_default_dtype, torch.set_default_dtype),
        "autocast": (
            lambda: torch.is_autocast_enabled("cpu"),
            lambda value: torch.set_autocast_enabled("cpu", value),
        ),
        "the precision of products": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
        "the detection of anomalies": (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
        "how tensors are printed": (
            lambda: dict(vars(_tensor_str.PRINT_OPTS)),
            lambda value: vars(_tensor_str.PRINT_OPTS).update(value),
        ),
        "whether warnings are repeated": (torch.is_warn_always_enabled, torch.set_warn_always),
    }
)
# What sets them. What a forward sets may be set already while it is traced, and then nothing changes.
_SETTERS: Mapping[str, tuple[Any, str]] = MappingProxyType(
    {
        "_set_grad_enabled": (torch._C, "whether gradients are enabled"),
        "set_num_threads": (torch, "the number of threads"),
        "use_deterministic_algorithms": (torch, "deterministic algorithms"),
        "set_deterministic_debug_mode": (torch, "deterministic algorithms"),
        "set_default_dtype": (torch, "the default dtype"),
        "set_autocast_enabled": (torch, "autocast"),
        "set_float32_matmul_precision": (torch, "the precision of products"),
        "set_printoptions": (torch, "how tensors are printed"),
        "set_warn_always": (torch, "whether warnings are repeated"),
        "set_flush_denormal": (torch, "whether denormal numbers are kept"),
    }
)
_VALUES = (bool, int, float, str, torch.dtype, type(None))
_MISSING = object()
_IMPORTING = "<frozen importlib._bootstrap>"


class State(NamedTuple):
    """What a flag was.

    place  the module that has it, or ENVIRONMENT
    args   what it is called with, where it is a function
    """

    place: str
    name: str
    args: tuple[str, ...]
    value: Any

    def holds(self) -> bool:
        """Whether it is the same now."""
        if self.place == ENVIRONMENT:
            return os.environ.get(self.name) == self.value
        found = getattr(_found(self.place), self.name, _MISSING)
        if self.name in _FUNCTIONS.get(self.place, ()) and callable(found):
            found = found(*self.args)
        return type(found) is type(self.value) and found == self.value

    @property
    def is_known(self) -> bool:
        """Whether it is one that is heard: a file may hold anything."""
        if type(self.value) not in _VALUES or not all(isinstance(each, str) for each in (self.name, *self.args)):
            return False
        names = (*_FUNCTIONS.get(self.place, ()), *_FLAGS.get(self.place, ()))
        return self.place == ENVIRONMENT or self.name in names


@functools.cache
def _found(place: str) -> Any:
    """The object of that name in PyTorch; None where this version has none."""
    found: Any = sys.modules["torch"]
    for name in place.split(".")[1:]:
        found = getattr(found, name, None)
    return found


class States:
    """The flags that user's code, or a library's, reads while this is heard.

    read  by place, name and arguments
    """

    def __init__(self) -> None:
        self.read: dict[tuple[str, str, tuple[str, ...]], State] = {}
        self._thread = threading.get_ident()

    def note(self, place: str, name: str, args: tuple[str, ...], value: Any) -> None:
        """Whoever calls what calls this read a flag: of interest where it is not PyTorch."""
        if threading.get_ident() != self._thread:
            return
        asking = asking_frame(sys._getframe(2))
        if asking is None or _is_of_import(asking):
            return
        state = State(place, name, args, value)
        if state.is_known:
            self.read.setdefault((place, name, args), state)

    @contextlib.contextmanager
    def heard(self, spaces: Iterable[dict[str, Any]] = ()) -> Iterator[None]:
        """Listen while this lasts; spaces are globals of functions, which may have such functions by other names."""
        with contextlib.ExitStack() as stack:
            told = {}
            for place, names in _FUNCTIONS.items():
                for name in names:
                    if (function := getattr(_found(place), name, None)) is not None:
                        told[function] = self._telling(place, name, function)
                        stack.callback(setattr, _found(place), name, function)
                        setattr(_found(place), name, told[function])
            stack.enter_context(replaced_in(spaces, told))
            for cls in {type(_found(place)) for place in _FLAGS if _found(place) is not None}:
                self._listen(cls, "__getattribute__", self._telling_of(cls), stack)
            self._listen(os._Environ, "__getitem__", self._environment(os._Environ.__getitem__), stack)
            yield

    @staticmethod
    def _listen(cls: Any, name: str, function: Callable[..., Any], stack: contextlib.ExitStack) -> None:
        own = vars(cls).get(name)
        stack.callback(delattr, cls, name) if own is None else stack.callback(setattr, cls, name, own)
        setattr(cls, name, function)

    def _telling(self, place: str, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def tell(*args: Any, **kwargs: Any) -> Any:
            value = function(*args, **kwargs)
            self.note(place, name, (*args, *kwargs.values()), value)
            return value

        return tell

    def _telling_of(self, cls: Any) -> Callable[..., Any]:
        places = {id(_found(place)): (place, names) for place, names in _FLAGS.items() if type(_found(place)) is cls}
        otherwise = getattr(cls, "__getattr__", None)

        def tell(holder: Any, name: str) -> Any:
            try:
                value = super(cls, holder).__getattribute__(name)
            except AttributeError:
                if otherwise is None:
                    raise
                value = otherwise(holder, name)
            place, names = places.get(id(holder), ("", ()))
            if name in names:
                self.note(place, name, (), value)
            return value

        return tell

    def _environment(self, function: Callable[[Any, str], str]) -> Callable[[Any, str], str]:
        def tell(environment: Any, name: str) -> str:
            try:
                value = function(environment, name)
            except KeyError:
                self.note(ENVIRONMENT, name, (), None)
                raise
            self.note(ENVIRONMENT, name, (), value)
            return value

        return tell


def _is_of_import(asking: types.FrameType) -> bool:
    """Whether code asks as its module is imported, which a process does once: no later call asks again.

    torch.export imports libraries when it is first used. One of them reads all of the environment then.
    """
    frame: types.FrameType | None = asking
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] != "fx_passes":  # that traces
        if frame.f_code.co_filename == _IMPORTING:
            return True
        frame = frame.f_back
    return False


@contextlib.contextmanager
def settings_kept(spaces: Iterable[dict[str, Any]] = ()) -> Iterator[list[str]]:
    """Set anew, at the end, what was set otherwise meanwhile; names it in the list, and what the user's code set.

    spaces  globals of functions, which may have imported what sets by other names
    """
    before = {name: read() for name, (read, _) in _SETTINGS.items()}
    changed: list[str] = []

    def note(name: str) -> None:
        if name not in changed:
            changed.append(name)

    try:
        with _setters_told(note, spaces):
            yield changed
    finally:
        for name, (read, write) in _SETTINGS.items():
            if read() != before[name]:
                note(name)
                write(before[name])


@contextlib.contextmanager
def _setters_told(told: Callable[[str], None], spaces: Iterable[dict[str, Any]]) -> Iterator[None]:
    """Call told(what is set) where the user's code, in this thread, sets one; contexts of PyTorch's set back."""
    thread = threading.get_ident()
    unused: list[Any] = []  # torch.set_grad_enabled() that no `with` has entered

    def telling(function: Callable[..., Any], what: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def tell(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == thread and asking_frame(sys._getframe(1)) is not None:
                told(what)
            return function(*args, **kwargs)

        return tell

    def made(switch: Any, mode: bool) -> None:
        create(switch, mode)
        if threading.get_ident() == thread and asking_frame(sys._getframe(1)) is not None:
            unused.append(switch)

    def entered(switch: Any) -> None:
        unused[:] = [other for other in unused if other is not switch]
        enter(switch)

    cls: Any = torch.set_grad_enabled
    create, enter = cls.__init__, cls.__enter__
    own = {name: getattr(place, name) for name, (place, _) in _SETTERS.items()}
    others = {own[name]: telling(own[name], what) for name, (_, what) in _SETTERS.items()}
    try:
        cls.__init__, cls.__enter__ = made, entered
        for name, (place, _) in _SETTERS.items():
            setattr(place, name, others[own[name]])
        with replaced_in(spaces, others):
            yield
    finally:
        cls.__init__, cls.__enter__ = create, enter
        for name, (place, _) in _SETTERS.items():
            setattr(place, name, own[name])
        if unused:
            told("whether gradients are enabled")


@contextlib.contextmanager
def replaced_in(spaces: Iterable[dict[str, Any]], others: Mapping[Any, Any]) -> Iterator[None]:
    """Let these globals hold other functions in place of some, by whatever names, while this lasts."""
    changed = []
    for space in spaces:
        for name, value in [*space.items()]:
            if isinstance(value, types.FunctionType | types.BuiltinFunctionType) and value in others:
                changed.append((space, name, value))
                space[name] = others[value]
    try:
        yield
    finally:
        for space, name, value in changed:
            space[name] = value
