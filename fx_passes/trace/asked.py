"""What a forward asks beside numbers: how its tensors lie, whether gradients flow, and states of PyTorch's.

A graph has one answer to each for good. torch.export notes none of these questions, so they are listened to here. Of
strides, layouts and gradients a guard is made, and what else is asked refuses the graph.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from fx_passes.trace.assumptions import own_attributes
from fx_passes.trace.proxies import MESSAGES, asking_frame
from fx_passes.trace.states import replaced_in
from zendnn_cffi.primitives.memory_desc import dense_strides

GRADIENTS = "is_grad_enabled"
# States that a call may find changed. Autocast and the default dtype are not among them: each call compares these.
_STATES = (GRADIENTS, "is_inference_mode_enabled", "get_num_threads", "get_num_interop_threads", "initial_seed",
           "are_deterministic_algorithms_enabled", "is_deterministic_algorithms_warn_only_enabled",
           "get_deterministic_debug_mode", "get_float32_matmul_precision", "is_anomaly_enabled")  # fmt: skip
_OF_STRIDES = frozenset(("stride", "is_contiguous", "dim_order", "layout", "is_sparse", "is_sparse_csr", "is_mkldnn",
                         "is_quantized", "is_nested"))  # fmt: skip
_OF_GRADIENTS = frozenset(("requires_grad", "is_leaf", "grad", "grad_fn", "retains_grad"))
# Nothing of an argument that a call could compare at little cost, or as likely as not another each time.
_OF_NOTHING = frozenset(("_version", "_base", "_is_view", "data_ptr", "const_data_ptr", "storage", "untyped_storage",
                         "storage_offset", "is_inference", "is_neg", "is_conj", "is_shared", "is_pinned", "is_set_to",
                         "output_nr", "_cdata"))  # fmt: skip
_ASSIGNED = ("data", "grad")  # which no graph does
_ASKED = _OF_STRIDES | _OF_GRADIENTS | _OF_NOTHING
# Methods of tensors that are written in Python: who calls them asks.
_BETWEEN = ("torch._tensor", "torch.overrides")
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
# Only while torch.export goes through a forward they say yes, and a model may then go another way.
_WAYS = ("is_compiling", "is_exporting")


@contextlib.contextmanager
def states_told(asked: Callable[[str], None], spaces: Iterable[dict[str, Any]] = ()) -> Iterator[None]:
    """Call asked(name) where the user's code, in this thread, asks for a state: by torch.is_grad_enabled(), say.

    spaces  globals of functions, which may have imported these by other names
    """
    with _told(torch, _STATES, asked, spaces):
        yield


@contextlib.contextmanager
def ways_told(asked: Callable[[str], None]) -> Iterator[None]:
    """Call asked(name) where code that is not PyTorch's, in this thread, asks whether it is compiled.

    Most such ways give equal numbers, as nearly everywhere in transformers. But PaliGemma, without a mask, attends to
    what comes later in eager, and not where it is exported.
    """
    with _told(torch.compiler, _WAYS, asked), _eager_where_linalg():
        yield


@contextlib.contextmanager
def _eager_where_linalg() -> Iterator[None]:
    """Let functions that name torch.linalg go eager's way: the other one is for targets that lack its operations.

    transformers' gated delta rule solves a triangular system, and exported writes 63 steps of substitution instead.
    """
    own = torch.compiler.is_exporting

    def is_exporting() -> bool:
        asking = asking_frame(sys._getframe(1))
        by_way_of = [frame for frame in (asking, asking and asking.f_back) if frame is not None]
        return own() and not any("linalg" in frame.f_code.co_names for frame in by_way_of)

    torch.compiler.is_exporting = is_exporting
    try:
        yield
    finally:
        torch.compiler.is_exporting = own


@contextlib.contextmanager
def sizes_written() -> Iterator[None]:
    """Let numbers that torch.export keeps free be written out as numbers, which fixes them: f"{n} rows" has no symbol.

    In messages for people they stay free, and PyTorch's own messages name the symbols.
    """
    thread, own = threading.get_ident(), {cls: cls.__repr__ for cls in (torch.SymInt, torch.SymFloat)}

    def written(value: Any) -> str:
        frame = sys._getframe(1)
        asking = asking_frame(frame) if threading.get_ident() == thread else None
        if asking is None or any(not MESSAGES.isdisjoint(each.f_code.co_names) for each in (frame, asking)):
            return own[type(value)](value)
        return repr(int(value) if type(value) is torch.SymInt else float(value))

    for cls in own:
        cls.__repr__ = written
    try:
        yield
    finally:
        for cls, function in own.items():
            cls.__repr__ = function


@contextlib.contextmanager
def _told(
    module: types.ModuleType,
    names: Sequence[str],
    asked: Callable[[str], None],
    spaces: Iterable[dict[str, Any]] = (),
) -> Iterator[None]:
    thread, own = threading.get_ident(), {name: getattr(module, name) for name in names}

    def telling(name: str, function: Callable[[], Any]) -> Callable[[], Any]:
        @functools.wraps(function)
        def tell() -> Any:
            frame: types.FrameType | None = sys._getframe(1)
            while frame is not None and frame.f_code.co_name == name:  # another name of the same
                frame = frame.f_back
            asking = asking_frame(frame) if threading.get_ident() == thread else None
            if asking is not None:
                asked(name)
            return function()

        return tell

    told = {name: telling(name, function) for name, function in own.items()}
    for name, function in told.items():
        setattr(module, name, function)
    try:
        with replaced_in(spaces, {own[name]: function for name, function in told.items()}):
            yield
    finally:
        for name, function in own.items():
            setattr(module, name, function)


class Asked:
    """What a forward asked of tensors that are not parameters, from outside of PyTorch's own code.

    missing   attributes that it looked for, and that no tensor has while torch.export goes through it
    assigned  attributes of tensors that it set to other tensors
    """

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.missing: set[str] = set()
        self.assigned: set[str] = set()

    @contextlib.contextmanager
    def heard(self) -> Iterator[None]:
        """Within this, listening() is to what is asked."""
        token = _HEARD.set(self)
        try:
            yield
        finally:
            _HEARD.reset(token)

    @property
    def strides(self) -> bool:
        """Whether the graph is for calls whose tensors lie as the example's."""
        return not _OF_STRIDES.isdisjoint(self.names)

    @property
    def gradients(self) -> bool:
        """Whether the graph is for calls whose tensors take part in gradients as the example's."""
        return not _OF_GRADIENTS.isdisjoint(self.names)

    def refuse(self, root: nn.Module) -> None:
        """Raise NotImplementedError where no guard could tell whether the graph is right."""
        if names := sorted(self.assigned):
            raise NotImplementedError(f"its forward assigns to {names[0]} of a tensor")
        held = own_attributes([*root.parameters(), *root.buffers()])
        if names := sorted(self.missing.intersection(held)):
            raise NotImplementedError(f"its forward asks for {names[0]}, which one of its tensors was given")
        if names := sorted(self.names & _OF_NOTHING):
            raise NotImplementedError(f"its forward asks for {names[0]} of a tensor, which a graph does not tell")


_HEARD: ContextVar[Asked] = ContextVar("_HEARD")  # no function's own: those are searched for state that it changes


@contextlib.contextmanager
def listening() -> Iterator[None]:
    """Around the call of a forward: listen to what it asks."""
    from torch._subclasses.fake_tensor import FakeTensor

    heard, thread = _HEARD.get(), threading.get_ident()

    def missing(tensor: torch.Tensor, name: str) -> Any:
        if threading.get_ident() == thread and asking_frame(sys._getframe(1)) is not None:
            heard.missing.add(name)
        raise AttributeError(f"'Tensor' object has no attribute {name!r}")

    FakeTensor.__getattr__ = missing
    try:
        with _Listening(heard):
            yield
    finally:
        del FakeTensor.__getattr__


class _Listening(TorchFunctionMode):
    def __init__(self, heard: Asked) -> None:
        super().__init__()
        self._heard = heard

    def __torch_function__(
        self, func: Any, kinds: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__"):
            attribute = getattr(getattr(func, "__self__", None), "__name__", "")
            if name == "__set__" and attribute in _ASSIGNED and _is_asked_by_user(sys._getframe(1)):
                self._heard.assigned.add(attribute)
            name = attribute if name == "__get__" else ""
        if name in _ASKED and args and not isinstance(args[0], nn.Parameter) and _is_asked_by_user(sys._getframe(1)):
            self._heard.names.add(name)
        return func(*args, **(kwargs or {}))


def _is_asked_by_user(frame: types.FrameType | None) -> bool:
    while frame is not None and frame.f_globals.get("__name__", "") in _BETWEEN:
        frame = frame.f_back
    return asking_frame(frame) is not None


def arrangement(tensor: torch.Tensor) -> tuple[Any, ...]:
    """How a tensor lies, whatever its sizes: the memory formats it has, or its strides where it has none."""
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return str(tensor.layout), str(tensor.dtype)
    formats = [torch.contiguous_format, *([_FORMATS[tensor.ndim]] if tensor.ndim in _FORMATS else [])]
    dims = range(tensor.ndim)
    orders = ([*dims], [0, *dims[2:], 1]) if len(formats) > 1 else ([*dims],)
    if any(tensor.stride() == dense_strides(tensor.shape, order) for order in orders):
        return tuple(tensor.is_contiguous(memory_format=kind) for kind in formats)
    return tensor.stride()


def part_in_gradients(tensor: torch.Tensor) -> tuple[bool, ...]:
    """Whether it requires a gradient, is a leaf, and has no gradient yet."""
    return tensor.requires_grad, tensor.is_leaf, not tensor.is_leaf or tensor.grad is None
