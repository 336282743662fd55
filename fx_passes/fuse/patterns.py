"""Recognise operations that models write out: normalizations, rotary embedding, activations.

Before: mul(weight, cast(mul(cast(x), rsqrt(add(mean(square(cast(x)), -1), eps)))))
After:  rms_norm(x, weight, eps)

Each is a row: a pattern, and the function that makes the operation of what the pattern's names stand for. The nodes of
the parts disappear, as far as nothing else reads them. The operation stands where the last part stood, and reads there
what the first parts read. So nobody may write to any of it meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fx_passes import ops
from fx_passes.aliasing.aliasing import Aliasing
from fx_passes.fold.casts import is_cast
from fx_passes.fold.rows import same_sizes, shape_of
from fx_passes.graph.graph import argument, erase_unread, finish, is_call, is_constant, nodes_in
from fx_passes.graph.inference import dtype
from fx_passes.graph.pattern import Either, Parts, Value, binary, call, eltwise, match, once
from fx_passes.spellings.registry import Call, is_number, static
from zendnn_cffi.values import dataclass

aten = torch.ops.aten


@dataclass(frozen=True)
class Row:
    """An operation that models write out.

    becomes  called with the last node and what the names of the pattern stand for; None refuses
    source   what explain() calls it; empty: as the last node
    """

    name: str
    pattern: Any
    becomes: Callable[..., Call | None]
    source: str = ""


def fuse_patterns(gm: fx.GraphModule) -> fx.GraphModule:
    """Replace what matches a row, from the end of the graph: larger expressions before their parts."""
    aliasing = Aliasing(gm)
    for node in reversed(list(gm.graph.nodes)):
        if node.op == "output" or not node.users:  # perhaps erased by now
            continue
        for row in ROWS:
            if (made := _made(row, node)) is not None and aliasing.may_compute_at(
                node, nodes_in((made.args, made.kwargs))
            ):
                _replace(node, made, row.source)
                break
    return finish(gm)


def _made(row: Row, node: fx.Node) -> Call | None:
    """The operation that node computes, if row recognises it."""
    found = match(row.pattern, node)
    return None if found is None else row.becomes(node, **found)


def _replace(node: fx.Node, made: Call, source: str) -> None:
    with node.graph.inserting_before(node):
        result = node.graph.call_function(*made)
    result.meta = {**node.meta, "source": source} if source else dict(node.meta)
    node.replace_all_uses_with(result)
    erase_unread(node)


def _cast(name: str, pattern: Any) -> Parts:
    """A conversion of what pattern matches; the name stands for it."""
    return Parts(lambda value: (value, value.args[0]) if is_cast(value) else None, (Value(name), pattern))


def _rms_norm(
    node: fx.Node,
    x: fx.Node,
    eps: float,
    weight: fx.Node | None = None,
    back: fx.Node | None = None,
    last: fx.Node | None = None,
    wide: fx.Node | None = None,
) -> Call | None:
    """The operation computes in float32 inside, so conversions before and back to the same dtype belong to it.

    back  before the weight; last  behind it; wide  of what is squared alone
    """
    if wide is not None and not (_is_float32(wide) and (back or last)):
        return None
    conversion = back or last
    src = x if conversion is None else _before_conversion(x, conversion)
    if src is None or not _may_have_dtype_of(node, src):
        return None
    return Call(ops.rms_norm, (src, weight), {"eps": float(eps), **({"rounds_last": True} if last else {})})


def _before_conversion(x: fx.Node, back: fx.Node) -> fx.Node | None:
    """What has the dtype that `back` converts to: x, or what was converted to float32 as x; None where neither has."""
    sources = (x, x.args[0]) if is_cast(x) and _is_float32(x) else (x,)
    return next((source for source in sources if _converts_to_dtype_of(back, source)), None)


def _is_float32(cast: fx.Node) -> bool:
    value = cast.meta.get("val")
    if isinstance(value, torch.Tensor):
        return value.dtype == torch.float32
    return cast.target == "float" or (cast.target == "to" and argument(cast, 1, "dtype") is torch.float32)


def _converts_to_dtype_of(cast: fx.Node, source: fx.Node) -> bool:
    have, want = cast.meta.get("val"), source.meta.get("val")
    if isinstance(have, torch.Tensor) and isinstance(want, torch.Tensor):
        return have.dtype == want.dtype
    to = argument(cast, 1, "dtype" if cast.target == "to" else "other")
    return to is source or (is_call(to, getattr) and tuple(to.args) == (source, "dtype"))


def _may_have_dtype_of(node: fx.Node, src: fx.Node) -> bool:
    have, want = node.meta.get("val"), src.meta.get("val")
    return have is None or want is None or bool(have.dtype == want.dtype)


def _is_vector(node: Any) -> bool:
    if not isinstance(node, fx.Node) or not is_constant(node):
        return False
    value = node.meta.get("val")  # of functions of parameters as well: 1 + weight
    return node.meta.get("rank", value.ndim if isinstance(value, torch.Tensor) else None) == 1


def _rms_norms() -> Either:
    x, eps, weight = Value("x"), Value("eps", is_number), Value("weight", _is_vector)
    squares = eltwise("square", Either((x, _cast("wide", x))))
    mean = call(ops.reduce, squares, "mean", (-1,), True)
    plain = binary("mul", x, once(eltwise("rsqrt", binary("add", mean, eps))))
    cast = _cast("back", once(plain))
    rounded_last = _cast("last", once(binary("mul", weight, once(plain))))
    return Either((rounded_last, binary("mul", weight, once(Either((cast, plain)))), cast, plain))


def _l2_normalize(node: fx.Node, x: fx.Node, dim: Any, eps: float = 0.0, root: fx.Node | None = None) -> Call | None:
    """root  of the sum of squares, where that is written out."""
    squares = {} if root is None else {"of_squares": True}
    return Call(ops.l2_normalize, (x, _single(dim)), {"eps": float(eps), **squares})


def _single(dims: Any) -> Any:
    """The one dimension that is named, else None."""
    if isinstance(dims, list | tuple) and len(dims) == 1:
        dims = dims[0]
    return dims if isinstance(dims, int) else None


def _l2_norms() -> Parts:
    x, dim = Value("x"), Value("dim", lambda dims: _single(dims) is not None)
    squares = Either((eltwise("square", x), binary("mul", x, x)))
    sums = eltwise("sqrt", call(ops.reduce, squares, "sum", dim, True))
    root = Parts(lambda value: (value, value), (Value("root"), sums))
    norm = once(Either((call(ops.reduce, x, "norm", dim, True), root)))
    least = Either((once(call(aten.clamp_min.default, norm, Value("eps", is_number))), norm))
    return binary("div", x, Either((once(call(aten.expand_as.default, least, x)), least)))


_NEIGHBOURS = (slice(None, None, 2), slice(1, None, 2))


def _rotary(
    node: fx.Node, x: fx.Node, cos: fx.Node, sin: fx.Node, first: slice, second: slice, dim: int | None = None
) -> Call | None:
    """By neighbours, or where dim is given by halves."""
    if dim is None and (first, second) == _NEIGHBOURS:  # of any even size, and PyTorch raises for others
        return Call(ops.rotary, (x, cos, sin, True))
    value = x.meta.get("val")
    if (
        value is None
        or not isinstance(size := value.shape[-1], int)
        or size % 2
        or dim not in (None, -1, value.ndim - 1)
    ):
        return None
    halves, neighbours = (range(size // 2), range(size // 2, size)), (range(0, size, 2), range(1, size, 2))
    if (range(size)[first], range(size)[second]) != (neighbours if dim is None else halves):
        return None
    return Call(ops.rotary, (x, cos, sin, dim is None))


def _narrowed(node: Any) -> tuple[fx.Node, slice] | None:
    """(x, bounds) where node is a slice of x along its last dimension."""
    if not is_call(node, ops.narrow, aten.slice.Tensor) or len(node.args) < 4 or not static(node.args[1:]):
        return None
    x, dim, *bounds = node.args
    return (x, slice(*bounds)) if "val" in x.meta and dim in (-1, x.meta["val"].ndim - 1) else None


def _indexed(node: Any) -> tuple[Any, Any] | None:
    """(x, bounds) where node is x[..., bounds], or x[:, :, bounds] with as many dimensions."""
    if not is_call(node, ops.index) or not isinstance(node.args[1], tuple) or len(node.args[1]) < 2:
        return None
    x, (*others, bounds) = node.args
    if others == [Ellipsis]:
        return x, bounds
    value = x.meta.get("val")
    is_last = isinstance(value, torch.Tensor) and value.ndim == len(node.args[1])
    return (x, bounds) if is_last and all(item == slice(None) for item in others) else None


def _paired(node: Any) -> tuple[fx.Node, slice] | None:
    """(x, bounds) where node is one of each pair: x.view(*x.shape[:-1], -1, 2)[..., 0] is x[..., ::2]."""
    taken = _indexed(node)
    if (
        taken is None
        or type(taken[1]) is not int
        or taken[1] not in (0, 1)
        or not is_call(taken[0], ops.reshape, ops.unflatten)
    ):
        return None
    x = taken[0].args[0]
    have, pairs = shape_of(x), shape_of(taken[0])
    if have is None or pairs is None or pairs[-1] != 2 or not same_sizes(have[:-1], pairs[:-2]):
        return None
    return x, _NEIGHBOURS[taken[1]]


def _stack(node: Any) -> tuple[Any, Any] | None:
    """(pieces, dim) of torch.stack."""
    if not is_call(node, torch.stack, aten.stack.default) or node.kwargs.keys() - {"dim"}:
        return None
    return node.args[0], argument(node, 1, "dim", 0)


def _rotations() -> Parts:
    def piece(name: str) -> Either:
        bounds = Value(name, lambda item: isinstance(item, slice) and static(item))
        return Either((Parts(_indexed, (x, bounds)), Parts(_narrowed, (x, bounds)), Parts(_paired, (x, bounds))))

    x = Value("x")
    pieces = (binary("mul", piece("second"), -1), piece("first"))
    stack = Parts(_stack, (pieces, -1))
    halves = call(ops.concat, pieces, Value("dim", is_number))
    turned = Either((halves, call(ops.flatten, stack, -2, -1), call(ops.reshape_as, stack, x)))
    return binary("add", binary("mul", turned, Value("sin")), binary("mul", x, Value("cos")))


def _gated(node: fx.Node, x: fx.Node, gate: str) -> Call | None:
    return Call(ops.eltwise, (x, *GATES[gate], 0.0))


def _quick_gelu(node: fx.Node, x: fx.Node, alpha: float) -> Call | None:
    return Call(ops.eltwise, (x, "swish", float(alpha), 0.0))


def _gelu_tanh(node: fx.Node, x: fx.Node, root: float) -> Call | None:
    return _gelu("gelu_tanh", node, x)


def _gelu_erf(node: fx.Node, x: fx.Node, root: float) -> Call | None:
    return _gelu("gelu_erf", node, x)


def _gelu(kind: str, node: fx.Node, x: fx.Node) -> Call | None:
    """Of numbers that are floating point for certain: PyTorch's function takes no others."""
    owner = node.graph.owning_module
    found = None if owner is None else dtype(x, owner)
    return Call(ops.eltwise, (x, kind, 0.0, 0.0)) if found is not None and found.is_floating_point else None


def _near(expected: float) -> Callable[[Any], bool]:
    """Whether a value is this number, written with seven digits or more."""
    return lambda value: is_number(value) and math.isclose(value, expected, rel_tol=1e-6)


def _half_of(x: Value, share: Parts) -> Either:
    """0.5 x share, whichever two are multiplied first."""

    def half(value: Any) -> Either:
        return Either((binary("mul", value, 0.5), binary("div", value, 2)))

    return Either((binary("mul", half(x), share), binary("mul", x, half(share)), half(binary("mul", x, share))))


def _gelus_by_tanh() -> Either:
    """0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), the cube perhaps as x (1 + 0.044715 x x)."""
    x, root = Value("x"), Value("root", _near(math.sqrt(2 / math.pi)))
    cube = Either((call(ops.eltwise, x, "pow", 1, 3), binary("mul", binary("mul", x, x), x)))
    sums = binary("mul", binary("add", x, binary("mul", cube, 0.044715)), root)
    squares = binary("add", binary("mul", binary("mul", x, 0.044715), x), 1)
    tanh = eltwise("tanh", Either((sums, binary("mul", binary("mul", x, root), squares))))
    return _half_of(x, binary("add", tanh, 1))


def _gelus_by_erf() -> Either:
    """0.5 x (1 + erf(x / sqrt(2)))."""
    x = Value("x")
    quotient = binary("div", x, Value("root", _near(math.sqrt(2))))
    product = binary("mul", x, Value("root", _near(math.sqrt(0.5))))
    return _half_of(x, binary("add", eltwise("erf", Either((quotient, product))), 1))


GATES = {"logistic": ("swish", 1.0), "hardsigmoid": ("hardswish", 0.0)}  # (kind, alpha) of x * gate(x)
_X = Value("x")

ROWS = (
    Row("rms_norm", _rms_norms(), _rms_norm, "RMSNorm"),
    Row("l2_normalize", _l2_norms(), _l2_normalize, "L2 normalization"),
    Row("rotary", _rotations(), _rotary),
    Row("gated", binary("mul", _X, once(eltwise(Value("gate", GATES.__contains__), _X))), _gated),
    Row(
        "quick_gelu",
        binary("mul", _X, once(eltwise("logistic", binary("mul", _X, Value("alpha", is_number))))),
        _quick_gelu,
        "QuickGELU",
    ),
    Row("gelu_tanh", _gelus_by_tanh(), _gelu_tanh, "GELU"),
    Row("gelu_erf", _gelus_by_erf(), _gelu_erf, "GELU"),
)
