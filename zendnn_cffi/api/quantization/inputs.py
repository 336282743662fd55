"""Calibration data as calls: positional and keyword arguments."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any, overload

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from fx_passes.aliasing.aliasing import Aliasing
from fx_passes.trace.arrays import moved, together
from zendnn_cffi.api.quantization.layers import Call
from zendnn_cffi.errors import interrupts

_IN_RESULTS = (torch.Tensor, bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
# Of TorchRuntimeError, behind all arguments, and of what TorchDynamo does not support
_CAUSE = re.compile(r"^ *Explanation: (?:.*?: got )?(.*)$", re.MULTILINE)
FIRST = "the first calibration input"
_MOST_KEPT, _MOST_KEPT_BYTES = 64, 2**28


def calls_of(calibration: Iterable[Any]) -> Iterator[Call]:
    """Each input as positional and keyword arguments."""
    if isinstance(calibration, torch.Tensor | str | Mapping) or not isinstance(calibration, Iterable):
        kind = type(calibration).__name__
        raise TypeError(f"calibration must be an iterable of inputs, such as a list or a DataLoader, got {kind}")
    for number, each in enumerate(calibration, 1):
        name = f"calibration input {number}"
        call = call_of(each, name)
        tensors = [leaf for leaf in pytree.tree_leaves(call) if isinstance(leaf, torch.Tensor)]
        for tensor in tensors:
            _check_tensor(tensor, name)
        if not tensors or any(tensor.numel() for tensor in tensors):  # others tell nothing of ranges
            yield call


def call_of(each: Any, name: str) -> Call:
    """One input as positional and keyword arguments; errors call it by that name."""
    if isinstance(each, torch.Tensor):
        return (each,), {}
    if isinstance(each, Mapping):
        for key in each:
            if not isinstance(key, str):
                raise TypeError(f"{name} is a mapping, so its keys must be names of arguments, got {key!r}")
        return (), dict(each)
    if isinstance(each, Sequence) and not isinstance(each, str):
        return tuple(each), {}
    kind = type(each).__name__
    hint = ": torch.from_numpy() makes a tensor of it" if kind == "ndarray" else ""
    raise TypeError(f"{name} must be one of tensors, sequences or mappings, got {kind}{hint}")


def _check_tensor(tensor: torch.Tensor, name: str) -> None:
    if tensor.device.type != "cpu":
        raise ValueError(f"{name} is on {tensor.device}: quantize() runs on the CPU, give tensors that are there")
    if tensor.layout is not torch.strided:
        raise ValueError(f"{name} is a sparse tensor ({tensor.layout}): give dense ones, such as by to_dense()")
    if tensor.is_floating_point() and _spoils_ranges(tensor):
        raise ValueError(f"{name} holds NaN or infinity: ranges of values cannot tell such")


def _spoils_ranges(values: torch.Tensor) -> bool:
    """Whether values hold NaN or infinity; masks hold minus infinity."""
    return bool((values.isnan() | (values == torch.inf)).any())


def check_call(model: nn.Module, example: Call, name: str) -> None:
    """Raise ValueError where an example, of that name, is no call of the model, or its results are unknown."""
    kind, (args, kwargs) = type(model).__name__, example
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise ValueError(
            f"{name} is no call of {kind}: {error}. A sequence is positional arguments, a mapping"
            " keywords. Leave out labels: (x for x, label in loader)"
        ) from error
    try:
        with torch.no_grad():
            args, kwargs = copied((args, kwargs))
            result = model(*args, **kwargs)
    except Exception as error:  # whatever the model's own code raises
        if interrupts(error):
            raise
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise ValueError(f"{kind} itself fails on {name}: {reason}") from error
    if unknown := _unknown_in(result, model):
        raise ValueError(unknown)


def why_not_exported(model: nn.Module, refused: Exception | None) -> str:
    """Why torch.export cannot follow a model, and what to do, where none of its submodules is quantized either."""
    reason = _reason(refused)
    hint = "Quantize those of its submodules that it can follow, and put them in their places"
    if "data-dependent" in reason:  # as detectors are, behind their backbone
        hint = "Sizes depend on what it computes: quantize the submodules before that, and put them in their places"
    return f"torch.export cannot follow {type(model).__name__}: {type(refused).__name__}: {reason}. {hint}"


def _reason(refused: Exception | None) -> str:
    """The first line of what was raised, and what it was raised for, where PyTorch says that further down."""
    first, _, rest = str(refused).partition("\n")
    found = _CAUSE.search(rest)
    return first.rstrip(".") + (f": {found[1].rstrip('.')}" if found else "")


def check_cache(model: nn.Module, example: Call) -> None:
    """Raise ValueError where a decoder returns its cache: torch.export takes a minute to find that it cannot."""
    if not _caching_configs(model):
        return
    try:
        with torch.no_grad():
            args, kwargs = copied(example)
            result = model(*args, **kwargs)
    except Exception as error:
        if interrupts(error):
            raise
        return  # check_call() tells
    if unknown := _unknown_in(result, model):
        raise ValueError(unknown)


def _unknown_in(result: Any, model: nn.Module) -> str:
    """Which class in a result of the model torch.export does not know, and what to do; "" where it knows all."""
    kind = type(model).__name__
    for leaf in pytree.tree_leaves(result):
        if is_dataclass(leaf):
            cls = type(leaf).__name__
            return f"{kind} returns a {cls}, unknown to torch.export: call torch.export.register_dataclass({cls}) first"
        if not isinstance(leaf, _IN_RESULTS):
            cls = type(leaf).__name__
            way = "return its tensors in a tuple, list or dictionary"
            if configs := _caching_configs(model):
                switches = " = ".join(f"{config}.use_cache" for config in configs)
                way = f"{switches} = False leaves it out; or {way}"
            return f"{kind} returns a {cls}, unknown to torch.export: {way}"
    return ""


def _caching_configs(model: nn.Module) -> list[str]:
    """The configurations of Transformers that have decoders return their caches, as a user writes them."""
    found: dict[int, str] = {}
    for path, module in model.named_modules():
        config = getattr(module, "config", None)
        if getattr(config, "use_cache", None) is True:
            found.setdefault(id(config), ".".join(name for name in ("model", path, "config") if name))
    return list(found.values())


class Kept:
    """The first 64 calls, or so many as take 256 MB, one at least: corrections and errors need them again.

    copies  in memory of their own: a generator may give the next input in that of the last
    """

    def __init__(self, *, copies: bool) -> None:
        self.calls: list[Call] = []
        self._copies, self._bytes = copies, 0

    def is_full(self) -> bool:
        return len(self.calls) >= _MOST_KEPT or self._bytes >= _MOST_KEPT_BYTES

    def add(self, call: Call) -> None:
        if not self.is_full():
            self.calls.append(copied(call) if self._copies else call)
            self._bytes += sum(x.nbytes for x in pytree.tree_leaves(call) if isinstance(x, torch.Tensor))


def kept_calls(calls: Iterator[Call], *, copies: bool) -> list[Call]:
    """The first of the calls, as many as are kept; others are not looked at. Raises ValueError where there is none."""
    kept = Kept(copies=copies)
    for call in calls:
        kept.add(call)
        if kept.is_full():
            break
    if not kept.calls:
        raise ValueError(
            "calibration is empty, or all its tensors are: give inputs like those to come, each a tensor or a sequence"
            " of arguments; a generator or DataLoader that was used up gives none"
        )
    return kept.calls


class Calls(Sequence[Call]):
    """Calls to be run many times. Each look at one gives it as it was, a copy where that is `written` to."""

    def __init__(self, calls: Sequence[Call], written: bool) -> None:
        self._calls, self._written = calls, written

    @overload
    def __getitem__(self, which: int) -> Call: ...
    @overload
    def __getitem__(self, which: slice) -> Sequence[Call]: ...
    def __getitem__(self, which: int | slice) -> Call | Sequence[Call]:
        if isinstance(which, slice):
            return Calls(self._calls[which], self._written)
        return copied(self._calls[which]) if self._written else self._calls[which]

    def __len__(self) -> int:
        return len(self._calls)


def writes_to_inputs(exported: fx.GraphModule) -> bool:
    """Whether an exported graph writes to the tensors that it is given."""
    return any(map(Aliasing(exported).is_written, exported.graph.find_nodes(op="placeholder")))


def copied(call: Call) -> Call:
    """The same call with tensors in memory of their own; those that share some share new memory."""
    leaves, structure = pytree.tree_flatten(call)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    own: dict[int, Any] = {}
    for group in together(tensors):
        own |= moved(list(group))
    own |= {id(tensor): tensor.detach().clone() for tensor in tensors if id(tensor) not in own}
    result: Call = pytree.tree_unflatten([own.get(id(leaf), leaf) for leaf in leaves], structure)
    return result
