"""What stands for a value while a forward is traced: it records operations, and answers truly what code asks of it.

    isinstance(y, Tensor), type(y), y.__class__, hasattr(y, "logits"), match y: case Tensor()
    -> as the value would, where its class is known (fx_passes/trace/kinds.py)
    -> TraceError where it is not: the module stays plain PyTorch, or torch.export traces it

C code asks proxies of which class they are, too: torch.relu(y) looks whether y is a tensor. It must not be told so, as
it would read the memory of one. The instruction that the asking frame has come to tells who asks.
"""

from __future__ import annotations

import abc
import contextlib
import math
import operator
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.proxy import Attribute, TraceError

from fx_passes.graph.graph import AUGMENTED
from fx_passes.trace.decisions import ByExample, Undecided
from fx_passes.trace.instructions import (
    callee,
    compares_identity,
    instruction_of,
    is_call,
    next_compares_to_none,
)
from fx_passes.trace.kinds import Kinds

_OF_THE_LIBRARY = tuple(sys.stdlib_module_names)
_ABC_ASKS = abc.ABCMeta.__instancecheck__.__code__
_PARAMETER_ASKS = type(nn.Parameter).__instancecheck__.__code__
_IS_TENSOR = torch.is_tensor.__code__
_FUNCTIONAL = nn.functional.__name__
_NUMBERS = (bool, int, float, complex, str, tuple, torch.Size)
_NO_TENSORS = ("grad", "grad_fn", "_base", "names")  # of a tensor: each may be None

# Names in functions that write values out for people: no branch depends on that.
MESSAGES = frozenset(("_assert", "print", "warn", "warning", "warning_once", "debug", "info", "error"))

_UNTOLD = object()


class Questions:
    """What one trace answered, and what it could not.

    refused     path of a module -> the question that has no answer; noted though code may catch the exception
    by_example  answers what is a matter of sizes, dtypes and devices
    """

    def __init__(self, kinds: Kinds, path: Callable[[], str], by_example: ByExample | None = None) -> None:
        self.kinds = kinds
        self._by_example = by_example
        self.refused: dict[str, str] = {}
        self._path = path
        self._pending: tuple[types.CodeType, int, str] | None = None

    def refuse(self, what: str) -> TraceError:
        """The exception for a question without an answer."""
        self.refused.setdefault(self._path(), what)
        return TraceError(what)

    def decide(self, node: fx.Node, question: str, what: str) -> Any:
        """What the example answers. Raises TraceError, as for a question without an answer, where it does not."""
        answer = self.told(node, question, _UNTOLD)
        if answer is _UNTOLD:
            raise self.refuse(what)
        return answer

    def told(self, node: fx.Node, question: str, otherwise: Any = None) -> Any:
        """What the example answers, where it does; calls of the graph are to have the same answer then."""
        if self._by_example is not None:
            with contextlib.suppress(Undecided):
                return self._by_example.answer(node, question)
        return otherwise

    def wonder(self, frame: types.FrameType) -> None:
        """C code asked for a class, on behalf of the frame's instruction: an operation, which will be recorded next."""
        if self._pending is None or not self._is_of(frame):
            self.settle()
        self._pending = frame.f_code, frame.f_lasti, self._path()

    def recorded(self, frame: types.FrameType) -> None:
        """The operation was recorded that this frame asked for."""
        if self._pending is not None and self._is_of(frame):
            self._pending = None

    def settle(self) -> None:
        """Raise TraceError unless what asked for a class was an operation."""
        pending, self._pending = self._pending, None
        if pending is not None:
            what = f"{pending[0].co_name}() asks for the class of a traced value in a way that is not understood"
            self.refused.setdefault(pending[2], what)
            raise TraceError(what)

    def _is_of(self, frame: types.FrameType) -> bool:
        return self._pending is not None and self._pending[:2] == (frame.f_code, frame.f_lasti)


_OF_FX = frozenset(("tracer", "node", "root", "attr", "_node"))  # what PyTorch keeps in proxies
_kept: Callable[[Any], dict[str, Any]] = vars(fx.Proxy)["__dict__"].__get__


def _questions(proxy: Any) -> Questions | None:
    return getattr(_kept(proxy).get("tracer"), "questions", None)


def asking_frame(frame: types.FrameType | None) -> types.FrameType | None:
    """The frame of the user's code that asks by way of frame; None where PyTorch, or this package, asks."""
    while frame is not None:
        if frame.f_code in (_PARAMETER_ASKS, _IS_TENSOR, _ABC_ASKS):
            frame = frame.f_back
            continue
        room = frame.f_globals.get("__name__", "").partition(".")[0]
        if room in ("torch", "fx_passes"):
            return None
        if room not in _OF_THE_LIBRARY or room == "__main__":
            return frame
        frame = frame.f_back
    return None


class RecordingProxy(fx.Proxy):
    """A Proxy that also records rounding, and augmented assignment as what it is.

    fx.Proxy refuses the one, and makes x = x + y of x += y. It answers what code asks of its class and attributes.
    """

    @property
    def __class__(self) -> Any:
        own, frame = type(self), sys._getframe(1)
        room = frame.f_globals.get("__name__", "")
        if room.startswith(("torch.fx.", "fx_passes.")):  # nearly all
            return own
        asking = asking_frame(frame)
        questions = _questions(self)
        if asking is None or questions is None:
            return own
        row = instruction_of(frame)
        if not _asks_for_class(frame, row):
            questions.wonder(frame)
            return own
        kind = self.own_class(asking)
        if frame.f_code is _ABC_ASKS and issubclass(own, asked := frame.f_locals["cls"]) > issubclass(kind, asked):
            raise questions.refuse(f"{asking.f_code.co_name}() asks whether {self.node.name} is {asked.__name__}")
        return kind

    @__class__.setter
    def __class__(self, value: Any) -> None:
        raise TypeError("a traced value keeps its class")

    def kind(self) -> type | None:
        """The class of the value that this stands for; None where it is unknown."""
        questions = _questions(self)
        return None if questions is None else questions.kinds.of(self.node)

    def own_class(self, frame: types.FrameType) -> type:
        """The class of what this stands for. Raises TraceError where it is unknown."""
        kind = self.kind()
        if kind is None:
            what = f"{frame.f_code.co_name}() asks for the class of {self.node.name}, which is unknown"
            found: type = self._decided("class", what)
            return found
        return kind

    def __getattr__(self, name: str) -> Any:
        questions = _questions(self)
        if questions is None:
            return super().__getattr__(name)
        frame = sys._getframe(1)
        asking = asking_frame(frame)
        if asking is None:
            if frame.f_code is _PARAMETER_ASKS:
                raise AttributeError(name)
            return RecordingAttribute(self, name)
        if name.startswith("__"):
            raise questions.refuse(f"{asking.f_code.co_name}() asks a traced value for {name}")
        row = instruction_of(frame)
        if frame.f_code is _PARAMETER_ASKS or row is None or is_call(row) or asking is not frame:
            kind = self.kind()
            if kind is None:
                raise questions.refuse(f"{asking.f_code.co_name}() asks whether {self.node.name} has {name}")
        else:
            is_clear = hasattr(Tensor, name) or questions.kinds.is_guess(self.node)
            kind = None if is_clear else self.kind()
            if kind is None and not hasattr(Tensor, name):
                questions.kinds.assume_present(self.node, name)
        if kind is not None and kind.__module__.partition(".")[0] in ("torch", "builtins") and not hasattr(kind, name):
            if issubclass(kind, Tensor) and not questions.kinds.assume_bare(self.node, name):
                raise questions.refuse(
                    f"{asking.f_code.co_name}() asks for {name}, an attribute that a tensor was given"
                )
            raise AttributeError(f"{kind.__name__!r} object has no attribute {name!r}")
        found = RecordingAttribute(self, name)
        if name == "type" and self.kind() is torch.device:  # torch.autocast(x.device.type) takes text alone
            return questions.told(found.node, "value", otherwise=found)
        if name in _NO_TENSORS:
            raise questions.refuse(f"{asking.f_code.co_name}() asks for {name}")
        if asking is frame:
            found.check_use(frame)
        return found

    def __setattr__(self, name: str, value: Any) -> None:
        """What torch.fx keeps; a tensor's attributes, data among them, no graph assigns."""
        if name == "_is_param":  # set by nn.Parameter, of what graphs keep as a tensor
            raise self._refused("its forward makes a parameter")
        if name not in _OF_FX and _questions(self) is not None:
            raise self._refused(f"its forward assigns to {name} of a tensor")
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        raise self._refused(f"its forward deletes {name} of a tensor")

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        """What torch.fx keeps here; the attributes of a tensor are not known."""
        asking = asking_frame(sys._getframe(1))
        if asking is not None:
            raise self._refused(f"{asking.f_code.co_name}() asks for all attributes of {self.node.name}")
        return _kept(self)

    def check_use(self, frame: types.FrameType) -> None:
        """Refuse what frame is about to ask by `is`: of what is no tensor, or may be None."""
        questions = _questions(self)
        if questions is None:
            return
        if compares_identity(frame.f_code):
            kind = self.kind()
            if kind is not None and not issubclass(kind, Tensor):
                raise questions.refuse(f"{frame.f_code.co_name}() compares a {kind.__name__} by `is`")
            if kind is None and questions.kinds.is_given(self.node):
                raise questions.refuse(f"{frame.f_code.co_name}() compares {self.node.name}, of an argument, by `is`")
        if next_compares_to_none(frame) and self.kind() is None and not questions.kinds.is_never_none(self.node):
            what = f"{frame.f_code.co_name}() asks whether {self.node.name} is None, which is unknown"
            if questions.decide(self.node, "class", what) is type(None):
                raise questions.refuse(what)

    def __hash__(self) -> int:
        questions = _questions(self)
        if questions is not None and (asking := asking_frame(sys._getframe(1))) is not None:
            kind = self.kind()
            if kind is None or not issubclass(kind, Tensor):
                what = f"{asking.f_code.co_name}() looks {self.node.name} up in a set or mapping"
                return hash(questions.decide(self.node, "value", what))
        return object.__hash__(self)

    def _refused(self, what: str) -> Exception:
        questions = _questions(self)
        return TraceError(what) if questions is None else questions.refuse(what)

    def _decided(self, question: str, what: str) -> Any:
        questions = _questions(self)
        if questions is None:
            raise TraceError(what)
        return questions.decide(self.node, question, what)

    def _is_written_out(self, frame: types.FrameType) -> bool:
        """Whether something may depend on the text, which is none for people."""
        return asking_frame(frame) is not None and not MESSAGES.intersection(frame.f_code.co_names)

    def __str__(self) -> str:
        if not self._is_written_out(frame := sys._getframe(1)):
            return repr(self)
        found: str = self._decided("str", f"{frame.f_code.co_name}() writes {self.node.name} out")
        return found

    def __format__(self, spec: str) -> str:
        if not self._is_written_out(frame := sys._getframe(1)):
            return repr(self)
        return format(self._decided("value", f"{frame.f_code.co_name}() writes {self.node.name} out"), spec)

    def __deepcopy__(self, memo: Any) -> Any:
        raise self._refused(f"a deep copy of {self.node.name}")

    def __int__(self) -> int:
        found: int = self._decided("int", f"int() of {self.node.name}")
        return found

    def __float__(self) -> float:
        found: float = self._decided("float", f"float() of {self.node.name}")
        return found

    def __complex__(self) -> complex:
        raise self._refused(f"complex() of {self.node.name}")

    def __iter__(self) -> Any:
        frame = sys._getframe(1)
        row = instruction_of(frame)
        if row is None or row.opname != "UNPACK_SEQUENCE":
            count: int = self._decided("items", f"{frame.f_code.co_name}() iterates over {self.node.name}")
        else:
            count = row.argval
        items: list[Any] = [self._record(operator.getitem, i) for i in range(count)]
        if asking_frame(frame) is frame:
            for item in items:
                item.check_use(frame)
        return iter(items)

    def __len__(self) -> int:
        found: int = self._decided("items", f"len() of {self.node.name}")
        return found

    def __contains__(self, item: Any) -> bool:
        return item in self._decided("value", f"a question whether something is in {self.node.name}")

    def __reversed__(self) -> Any:
        raise self._refused(f"reversed() of {self.node.name}")

    @classmethod
    def __torch_function__(cls, orig_method: Any, types: Any, args: Any = None, kwargs: Any = None) -> Any:
        result = _recorded(orig_method, args or (), kwargs or {})
        if result is None:
            result = super().__torch_function__(orig_method, types, args, kwargs)
        if isinstance(result, RecordingProxy) and (questions := _questions(result)) is not None:
            questions.recorded(sys._getframe(1))
        return result

    # ---- operations that fx.Proxy does not record

    def _record(self, target: Callable[..., Any], *args: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", target, (self, *args), {})

    def __getitem__(self, item: Any) -> Any:
        found: Any = self._record(operator.getitem, item)
        if (asking := asking_frame(frame := sys._getframe(1))) is frame and asking is not None:
            found.check_use(frame)
        return found

    def __setitem__(self, item: Any, value: Any) -> None:
        self._record(operator.setitem, item, value)

    def __ceil__(self) -> fx.Proxy:
        return self._record(math.ceil)

    def __floor__(self) -> fx.Proxy:
        return self._record(math.floor)


def _recording(operation: Callable[..., Any]) -> Callable[[RecordingProxy, Any], fx.Proxy]:
    """The method of an augmented assignment. A number among the arguments keeps its value under other names.

    Generated code of n += 1 gives all readers of n the new number. Without an example, arguments are taken for tensors.
    """

    def record(self: RecordingProxy, other: Any) -> fx.Proxy:
        kinds = None if (questions := _questions(self)) is None else questions.kinds
        is_given = kinds is not None and kinds.is_given(self.node)
        return self._record(AUGMENTED[operation] if is_given and self.kind() in _NUMBERS else operation, other)

    return record


for _operation in AUGMENTED:
    setattr(RecordingProxy, f"__{_operation.__name__}__", _recording(_operation))


class RecordingAttribute(RecordingProxy, Attribute):
    """An attribute of a traced value, or a method that is about to be called."""

    def kind(self) -> type | None:
        """As RecordingProxy's, without a node for what may be a method."""
        questions = _questions(self)
        return None if questions is None else questions.kinds.of_attribute(self.root.node, self.attr)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        found: Any = Attribute.__call__(self, *args, **kwargs)
        if (frame := sys._getframe(1)) is asking_frame(frame):
            found.check_use(frame)
        return found


def _recorded(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Proxy | None:
    """The call of a function that surely is no method of tensors, as torch.fx records it; None where it is to decide.

    It lists all methods of tensors first, and so all functions of PyTorch: 6 ms.
    """
    if type(function) is not types.BuiltinFunctionType and getattr(function, "__module__", "") != _FUNCTIONAL:
        return None
    tracers: dict[Any, None] = {}

    def note(value: Any) -> Any:
        if isinstance(value, RecordingProxy):
            tracers[value.tracer] = None
        return value

    fx.node.map_aggregate((args, kwargs), note)
    if len(tracers) != 1:
        return None
    tracer = next(iter(tracers))
    name = tracer.graph._target_to_str(function.__name__)
    found: fx.Proxy = tracer.create_proxy("call_function", function, args, kwargs, name=name)
    return found


def _asks_for_class(frame: types.FrameType, row: Any) -> bool:
    """Whether it is the user's code itself that wants to know a class, not an operation on what it has."""
    if frame.f_code in (_PARAMETER_ASKS, _IS_TENSOR, _ABC_ASKS):
        return True
    if row is None:
        return False
    if row.opname == "MATCH_CLASS" or (row.opname.startswith("LOAD_ATTR") and row.argval == "__class__"):
        return True
    return is_call(row) and callee(frame) is isinstance
