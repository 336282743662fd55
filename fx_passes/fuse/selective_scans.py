"""Recognise Mamba's scan: a loop over the steps of a sequence, of which tracing leaves each round in the graph.

Before: states_1 = decays[:, :, 0] * states_0 + drives[:, :, 0];  read_0 = matmul(states_1, c[:, 0, :, None])[:, :, 0]
        states_2 = decays[:, :, 1] * states_1 + drives[:, :, 1];  ...              stack((read_0, read_1, ...), -1)
        of decays = exp(a * delta[..., None]), drives = delta[..., None] * b[:, None] * src[..., None]
After:  selective_scan(delta, a, delta * src, b, c, states_0), with the last state where others read it

Models write the rounds in many ways. So the nodes between what is read in each round and the stack are not matched but
run, in float64 on random numbers, and compared with the scan. `associative_scan`, which TorchDynamo takes apart, is
found the same way: its states of all steps are read by one product, matmul(states, c[..., None]).
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from fx_passes import ops
from fx_passes.aliasing.aliasing import Aliasing
from fx_passes.graph.graph import (
    argument,
    example,
    finish,
    is_call,
    is_constant,
    is_stack,
    known_shape,
    remove_dead,
    set_example,
)
from zendnn_cffi.values import dataclass

_DTYPES = torch.float32, torch.float64  # others round in each step
_INSIDE: frozenset[Callable[..., Any]] = frozenset({*ops.MOVEMENT, ops.binary, ops.concat, ops.matmul, ops.reduce})
_TRIED = {"B": 2, "D": 3, "N": 5}  # sizes to compare at; the steps are as many as they are
_FULL_SIZED = (
    1 << 22
)  # numbers of all decays, up to which it is compared at the sizes it has, should the graph name these
_FEWEST = 3  # steps: of two, a state has as many readers as what all rounds read
_TIMES = ("BDTN", "BTDN")  # how models lay out decays and drives
_READS = ("BTN", "BNT")


@dataclass(frozen=True)
class Scan:
    """What the numbers read of states in each step are computed from; `layout` of decays and drives."""

    decays: fx.Node
    drives: fx.Node
    layout: str
    c: fx.Node
    c_layout: str
    state: fx.Node | None
    lasts: Sequence[fx.Node] = ()  # the state after the last step, where others read it


def fuse_selective_scans(gm: fx.GraphModule) -> fx.GraphModule:
    """Rewrite every such loop."""
    ends = [node for node in gm.graph.nodes if is_stack(node) or is_call(node, ops.matmul)]
    matches = [(node, scan) for node in ends if (scan := match_scan(node)) is not None]
    if not matches:
        return gm
    aliasing = Aliasing(gm)
    for node, scan in matches:
        read = (scan.decays, scan.drives, scan.c, scan.state, *scan.lasts)
        is_written = any(aliasing.is_written(source) for source in read if source is not None)
        made = None if is_written else _made_of(scan)
        if made is not None and aliasing.may_compute_at(node, made.read(scan)):
            _rewrite(node, scan, made)
    return finish(gm)


def match_scan(node: fx.Node) -> Scan | None:
    """The scan whose steps a stack collects, [B, D] each, or a product reads at once, [B, T, D, 1]; None: none."""
    rounds = _read_at_once(node) if is_call(node, ops.matmul) else _stacked(node)
    if rounds is None:
        return None
    value = example(rounds.ends[0])
    by_rank: dict[int, list[fx.Node]] = {}
    for source in rounds.sources:
        shown = example(source)
        if value is None or shown is None or shown.dtype != value.dtype:
            return None
        by_rank.setdefault(shown.ndim, []).append(source)
    fours, threes = by_rank.pop(4, []), by_rank.pop(3, [])
    if by_rank or len(fours) != 2 or len(threes) not in (1, 2):
        return None
    found = next((scan for scan in _readings(fours, threes) if _is_scan(scan, rounds)), None)
    return None if found is None else replace(found, lasts=rounds.lasts)


@dataclass(frozen=True)
class _Rounds:
    """Nodes that may be a scan's rounds.

    ends     what is read in each round; a single one is the product of all rounds
    inside   what computes them, in order, from sources
    lasts    what others read of inside, by an index where they take one: must be the last state
    """

    ends: Sequence[fx.Node]
    inside: Sequence[fx.Node]
    sources: Sequence[fx.Node]
    lasts: Sequence[fx.Node]
    steps: int

    def read(self, values: Mapping[fx.Node, Any]) -> Sequence[Tensor]:
        """[B, D] of each step."""
        if len(self.ends) == 1:
            return values[self.ends[0]].squeeze(-1).unbind(1)
        return [values[end] for end in self.ends]


def _stacked(node: fx.Node) -> _Rounds | None:
    """The rounds of which a stack collects the pieces."""
    pieces = argument(node, 0, "tensors")
    if not isinstance(pieces, (list, tuple)) or len(pieces) < _FEWEST or len(set(pieces)) < len(pieces):
        return None
    value, steps = example(pieces[0]), len(pieces)
    if value is None or value.ndim != 2 or value.dtype not in _DTYPES:
        return None
    return _rounds(node, pieces, lambda part: len(part.users) < steps, steps)


def _read_at_once(node: fx.Node) -> _Rounds | None:
    """What a product of [B, T, D, N] and [B, T, N, 1] reads: only a sum of products of all sizes is of a scan."""
    value = example(node)
    if value is None or value.ndim != 4 or value.dtype not in _DTYPES or str(value.shape[-1]) != "1":
        return None
    steps = str(value.shape[1])
    if not steps.isdigit() or int(steps) < _FEWEST:
        return None
    return _rounds(node, [node], _is_of_all_sizes, int(steps))


def _is_of_all_sizes(node: fx.Node) -> bool:
    """Whether node has four dimensions or more, and no operand of an element-wise operation broadcasts."""
    value = example(node)
    if value is None or value.ndim < 4:
        return False
    shapes = {str(known_shape(each)) for each in node.all_input_nodes} if is_call(node, ops.binary) else set()
    return len(shapes) <= 1


def _rounds(collects: fx.Node, ends: Sequence[fx.Node], belongs: Callable[[fx.Node], bool], steps: int) -> _Rounds:
    """What computes ends, which one node collects, by nodes that belong to a round."""
    inside, sources = dict[fx.Node, None](), dict[fx.Node, None]()
    waiting = [*ends]
    while waiting:
        node = waiting.pop()
        if node in inside or node in sources:
            continue
        if (is_call(node, *_INSIDE) or is_stack(node)) and belongs(node) and not node.kwargs.get("post_ops"):
            inside[node] = None
            waiting += node.all_input_nodes
        else:
            sources[node] = None
    known, lasts = {*inside, collects}, dict[fx.Node, None]()
    for part in inside:
        others = [user for user in part.users if user not in known] if part is not collects else []
        lasts.update(dict.fromkeys(user if is_call(user, ops.index) else part for user in others))
    return _Rounds(ends, [node for node in collects.graph.nodes if node in inside], [*sources], [*lasts], steps)


def _readings(fours: Sequence[fx.Node], threes: Sequence[fx.Node]) -> Iterator[Scan]:
    """What may be what."""
    for decays, drives in itertools.permutations(fours):
        for c, *states in itertools.permutations(threes):
            for layout, c_layout in itertools.product(_TIMES, _READS):
                yield Scan(decays, drives, layout, c, c_layout, *(states or [None]))


def _is_scan(scan: Scan, rounds: _Rounds) -> bool:
    """Whether the rounds compute the scan's numbers."""
    have = _sizes(scan)
    if have is None or have["T"] != rounds.steps:
        return False
    tried = [{**have, **_TRIED}]
    if math.prod(have.values()) <= _FULL_SIZED:
        tried.append(have)
    for sizes in tried:
        try:
            return _compare(scan, rounds, sizes)
        except Exception:  # whatever PyTorch raises where the graph names other sizes
            continue
    return False


def _sizes(scan: Scan) -> dict[str, int] | None:
    """The sizes by their letters, any of samples where these are free; None where tensors differ in them."""
    shapes = [(scan.decays, scan.layout), (scan.drives, scan.layout), (scan.c, scan.c_layout)]
    shapes += [] if scan.state is None else [(scan.state, "BDN")]
    sizes: dict[str, str] = {}  # as text: comparing symbolic sizes would make conditions of the graph
    for node, layout in shapes:
        for name, size in zip(layout, known_shape(node), strict=True):
            if sizes.setdefault(name, str(size)) != str(size):
                return None
    if not all(sizes[name].isdigit() for name in "DTN"):
        return None
    return {name: int(size) if size.isdigit() else _TRIED[name] for name, size in sizes.items()}


def _compare(scan: Scan, rounds: _Rounds, sizes: dict[str, int]) -> bool:
    generator = torch.Generator().manual_seed(0)

    def made(layout: str) -> Tensor:
        return torch.rand([sizes[name] for name in layout], dtype=torch.float64, device="cpu", generator=generator)

    values: dict[fx.Node, Any] = {scan.decays: made(scan.layout), scan.drives: made(scan.layout)}
    values[scan.c] = made(scan.c_layout)
    if scan.state is not None:
        values[scan.state] = made("BDN")
    for node in dict.fromkeys((*rounds.inside, *rounds.lasts)):
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
        values[node] = node.target(*args, **kwargs)
    decays, drives = (values[node].movedim(scan.layout.index("T"), 0) for node in (scan.decays, scan.drives))
    rows = values[scan.c].movedim(scan.c_layout.index("T"), 0)
    state = values[scan.state] if scan.state is not None else torch.zeros_like(drives[0])
    for decay, drive, row, found in zip(decays, drives, rows, rounds.read(values), strict=True):
        state = decay * state + drive
        wanted = (state * row.unsqueeze(1)).sum(-1)
        if found.shape != wanted.shape or not torch.allclose(found, wanted, rtol=1e-9, atol=1e-12):
            return False
    return all(values[node].shape == state.shape and torch.allclose(values[node], state) for node in rounds.lasts)


def _rewrite(end: fx.Node, scan: Scan, made: _Made) -> None:
    """Put one call in place of the loop."""
    at_once = is_call(end, ops.matmul)
    dim = 1 if at_once else argument(end, 1, "dim", 0)
    if dim not in (-1, 2, 1):
        return
    with end.graph.inserting_before(end):
        args = _arguments(scan, made)
        delta = example(args[0])
        if delta is None:
            return
        read = delta.new_empty(delta.shape)
        if scan.lasts:
            both = end.graph.call_function(ops.selective_scan_and_state, args)
            set_example(both, (read, example(scan.lasts[0])))
            result = _piece(both, 0)
        else:
            result = end.graph.call_function(ops.selective_scan, args)
            set_example(result, read)
        replaced = result
        if dim == 1:  # as eager's stack, or product, lies
            turned = _in_order(result, "BDT", "BTD")
            replaced = end.graph.call_function(ops.contiguous, (turned,))
            set_example(replaced, read.new_empty(known_shape(turned)))
        if at_once:
            replaced = end.graph.call_function(ops.unsqueeze, (replaced, -1))
            set_example(replaced, example(end))
    replaced.meta.update({key: value for key, value in end.meta.items() if key != "val"})
    end.replace_all_uses_with(replaced)
    end.graph.erase_node(end)
    remove_dead(end.graph)  # the rounds: others alone read their last state then
    for last in scan.lasts:
        with end.graph.inserting_after(result):
            last.replace_all_uses_with(_piece(result.args[0], 1))


@dataclass(frozen=True)
class _Made:
    """What decays and drives are made of: exp(rates * delta), and the product of rows and of what is across them."""

    rates: fx.Node
    delta: fx.Node
    rows: Sequence[fx.Node]
    across: Sequence[fx.Node]

    def read(self, scan: Scan) -> list[fx.Node]:
        """What one call in place of the loop reads."""
        states = () if scan.state is None else (scan.state,)
        return [self.rates, self.delta, *self.rows, *self.across, scan.c, *states]


def _made_of(scan: Scan) -> _Made | None:
    """None where decays and drives are not made as Mamba's are."""
    exponent = scan.decays.args[0] if is_call(scan.decays, ops.eltwise) and scan.decays.args[1] == "exp" else None
    if not is_call(exponent, ops.binary) or exponent.args[2] != "mul":
        return None
    wide, flat = scan.layout.replace("N", "1"), "".join("1" if name in "BT" else name for name in scan.layout)
    rates, delta = _by_shape(exponent, scan, flat), _by_shape(exponent, scan, wide)
    factors = _factors(scan.drives)
    rows = [factor for factor in factors if _has_shape(factor, scan, wide)]
    across = [factor for factor in factors if _has_shape(factor, scan, scan.layout.replace("D", "1"))]
    if rates is None or delta is None or not is_constant(rates) or not rows or not across:
        return None
    return _Made(rates, delta, rows, across) if len(rows) + len(across) >= len(factors) else None


def _arguments(scan: Scan, made: _Made) -> tuple[Any, ...]:
    """The scan's operands, in order, made where nodes are inserted."""
    missing = 4 - len(known_shape(made.rates))
    a = _without(made.rates, [d - missing for d, name in enumerate(scan.layout) if name in "BT" and d >= missing])
    last, middle = scan.layout.index("N"), scan.layout.index("D")
    by_width = [
        _in_order(_without(node, [last]), scan.layout.replace("N", ""), "BDT") for node in (made.delta, *made.rows)
    ]
    b = _product([_without(node, [middle]) for node in made.across])
    c = _in_order(scan.c, scan.c_layout, "BTN")
    return by_width[0], a, _product(by_width[1:]), b, c, scan.state


def _piece(both: fx.Node, index: int) -> fx.Node:
    piece = both.graph.call_function(operator.getitem, (both, index))
    set_example(piece, both.meta["val"][index])
    return piece


def _factors(node: Any) -> list[Any]:
    if is_call(node, ops.binary) and node.args[2] == "mul":
        return [factor for part in node.args[:2] for factor in _factors(part)]
    return [node]


def _by_shape(product: fx.Node, scan: Scan, layout: str) -> fx.Node | None:
    """The one factor of a product that has this shape."""
    found = [factor for factor in product.args[:2] if _has_shape(factor, scan, layout)]
    return found[0] if len(found) == 1 else None


def _has_shape(node: Any, scan: Scan, layout: str) -> bool:
    """Whether node has the sizes of decays by these letters, and 1 where it says so; leading ones may be left out."""
    value, whole = example(node), example(scan.decays)
    if value is None or whole is None or value.ndim > 4 or value.dtype != whole.dtype:
        return False
    wanted = [1 if name == "1" else size for name, size in zip(layout, whole.shape, strict=True)]
    return [str(size) for size in (*[1] * (4 - value.ndim), *value.shape)] == [str(size) for size in wanted]


def _without(node: fx.Node, dims: Sequence[int]) -> fx.Node:
    """node without dimensions of size 1."""
    value = example(node)
    assert value is not None
    if not dims:
        return node
    if is_call(node, ops.unsqueeze) and [node.args[1] % value.ndim] == list(dims):
        return node.args[0]
    item = tuple(0 if dim in dims else slice(None) for dim in range(value.ndim))
    found = node.graph.call_function(ops.index, (node, item))
    set_example(found, value[item])
    return found


def _in_order(node: fx.Node, have: str, want: str) -> fx.Node:
    """node with its three dimensions in another order; the first is the same."""
    if have == want:
        return node
    value = example(node)
    assert value is not None
    found = node.graph.call_function(ops.transpose, (node, 1, 2))
    set_example(found, value.transpose(1, 2))
    return found


def _product(factors: Sequence[fx.Node]) -> fx.Node:
    first, *others = factors
    for other in others:
        value = example(first)
        product = first.graph.call_function(ops.binary, (first, other, "mul"))
        set_example(product, value)
        first = product
    return first
