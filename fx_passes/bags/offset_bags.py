"""Bags between offsets of all tables, as one module of the outer graph.

    offset_bags((w0, ..., w25), (i0, ..., i25), o, "sum", False) -> concat_bags
becomes
    offset_bags_0(i0, ..., i25, o) -> concat_bags

Two ways compute the same bits: one call over joined tables (zendnn_cffi.runtime.offset_bags), or one per table. Where
tuning is on, the faster one is found by measuring them, once for batches and numbers of indices of about one size.
Anything unusual runs as PyTorch's own calls: what is invalid raises its errors.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from fx_passes import ops
from fx_passes.graph.graph import finish
from fx_passes.graph.interpreter import run
from fx_passes.partition.partition import Constants, add_module, copy_nodes, replace_by_call
from zendnn_cffi.locks import new_lock
from zendnn_cffi.primitives.ambient import is_watched
from zendnn_cffi.runtime.joined_tables import INDEX_DTYPES
from zendnn_cffi.runtime.offset_bags import OffsetBags
from zendnn_cffi.runtime.ways import fastest

JOINED, EACH = "one call over joined tables", "one call per table"
_fastest = functools.partial(fastest, rounds=7, enough_ns=20e6)
_TENSORS = (Tensor, nn.Parameter)


def join_offset_bags(gm: fx.GraphModule, root: nn.Module, tune: str = "off") -> fx.GraphModule:
    """Make a module of each operation offset_bags, which looks its tables up in root; tune: as optimize() has it."""
    for node in gm.graph.find_nodes(op="call_function", target=ops.offset_bags):
        join(gm, node, root, tune)
    return finish(gm)


def join(gm: fx.GraphModule, node: fx.Node, root: nn.Module, tune: str) -> None:
    """Put the call of a module in place of one operation."""
    tables = set(node.args[0])
    inputs = [source for source in node.all_input_nodes if source not in tables]
    inner, copies = copy_nodes([node], inputs)
    inner.output(copies[node])
    name = add_module(gm, "offset_bags", inner, lambda names, _: JoinedOffsetBags(inner, Constants(root, names), tune))
    call = replace_by_call(gm.graph, [node], name, inputs, [node])
    call.meta["source"] = node.meta.get("source", name)


class JoinedOffsetBags(nn.Module):
    """Computes graph: one operation offset_bags, whose tables are constants.

    calls  how many were computed in which way; those that PyTorch computes plainly are in neither
    """

    reads_numbers = True  # for fx_passes.aliasing.effects: it neither writes to, nor hands on, what it is given

    def __init__(self, graph: fx.Graph, constants: Mapping[str, Tensor], tune: str) -> None:
        super().__init__()
        self.graph = graph
        self.constants = constants
        self.calls = {JOINED: 0, EACH: 0}
        self.tune = tune
        self._lock = new_lock()
        self._bags: OffsetBags | None = None
        self._is_known = False  # else nobody has tried to join the tables yet
        self._faster: dict[tuple[int, int], str] = {}
        [node] = graph.find_nodes(op="call_function", target=ops.offset_bags)
        weights, indices, offsets, self._mode, self._include_last = node.args
        inputs = {node: number for number, node in enumerate(graph.find_nodes(op="placeholder"))}
        self._names = [str(weight.target) for weight in weights]
        self._indices = [inputs[index] for index in indices]
        self._offsets = inputs[offsets] if isinstance(offsets, fx.Node) else [inputs[start] for start in offsets]

    def forward(self, *inputs: Any) -> Tensor:
        """Return the bags [N, T, D], table by table in memory."""
        bags = None if is_watched() or torch.is_autocast_enabled("cpu") else self._current()
        if bags is None or (torch.is_grad_enabled() and any(table.requires_grad for table in bags.tables)):
            return self._plain(inputs)
        indices = [inputs[number] for number in self._indices]
        if isinstance(self._offsets, int):
            offsets = inputs[self._offsets]
        else:
            offsets = [inputs[number] for number in self._offsets]
        if isinstance(offsets, Tensor):
            if not _are_plain((offsets,), 2) or offsets.shape[0] < len(indices):
                return self._plain(inputs)
            offsets = offsets[: len(indices)]
        else:
            offsets = offsets[: len(indices)] if isinstance(offsets, list | tuple) else ()
            if len(offsets) < len(indices) or not _are_plain(offsets, 1):
                return self._plain(inputs)
        if not _are_plain(indices, 1):
            return self._plain(inputs)
        result = self._run(bags, indices, offsets)
        return self._plain(inputs) if result is None else result.transpose(0, 1)

    def _run(self, bags: OffsetBags, indices: Sequence[Tensor], offsets: Any) -> Tensor | None:
        """The bags [T, N, D]; None where PyTorch has to say what they are."""
        way, key = JOINED, (0, 0)
        if self.tune != "off":
            count = offsets.numel() if isinstance(offsets, Tensor) else sum(start.numel() for start in offsets)
            key = count.bit_length(), sum(index.numel() for index in indices).bit_length()
            way = self._faster.get(key, "")
        if way == EACH:
            self.calls[EACH] += 1
            return bags.each(indices, offsets)
        result = bags.joined(indices, offsets)
        if result is not None:
            self.calls[JOINED] += 1
            if not way:
                self._faster[key] = _fastest(
                    {JOINED: lambda: bags.joined(indices, offsets), EACH: lambda: bags.each(indices, offsets)}
                )
        return result

    def _current(self) -> OffsetBags | None:
        """The joined tables, where tables can be joined with gain."""
        bags = self._bags
        if bags.is_current() if bags is not None else self._is_known:
            return bags
        with self._lock, torch.inference_mode(False):  # forget() waits: nothing made of old tables stays behind it
            tables = [self.constants[name] for name in self._names]
            bags = OffsetBags(tables, self._mode, self._include_last) if _may_be_joined(tables) else None
            self._bags = bags if bags is not None and bags.is_worthwhile else None
            self._is_known = True
            return self._bags

    def _plain(self, inputs: Sequence[Any]) -> Tensor:
        result: Tensor = run(self.graph, self.constants, inputs)
        return result

    def forget(self) -> None:
        """Tables may be others now."""
        with self._lock:
            self._bags, self._is_known = None, False

    @property
    def described(self) -> str:
        """Who computes the bags, for explain()."""
        if not self._is_known:
            return "bags between offsets: the first call joins the tables"
        if self._bags is None:
            return "bags between offsets: these tables cannot be joined, one call per table"
        ways = ", ".join(f"{way} ({times} times)" for way, times in self.calls.items() if times)
        return f"bags between offsets, outside of regions: {ways or 'plain PyTorch so far'}"

    def extra_repr(self) -> str:
        return f"{len(self._names)} tables; {', '.join(f'{way}: {n} times' for way, n in self.calls.items())}"


def _may_be_joined(tables: Sequence[Tensor]) -> bool:
    """Whether these are ordinary tables in memory."""
    return all(
        type(t) in _TENSORS
        and t.is_cpu
        and t.layout is torch.strided
        and t.is_contiguous()
        and t.numel() > 0
        and t.untyped_storage().nbytes() >= t.storage_offset() * t.itemsize + t.nbytes
        for t in tables
    )


def _are_plain(tensors: Sequence[Any], ndim: int) -> bool:
    """Whether these are ordinary tensors of indices in memory."""
    return all(
        type(t) in _TENSORS
        and not t.is_nested
        and t.ndim == ndim
        and t.dtype in INDEX_DTYPES
        and t.is_cpu
        and t.layout is torch.strided
        for t in tensors
    )
