"""Products of int8 matrices that are written as products of uint8, for kernels that take a first operand without signs.

Before: _int_mm((a.to(int32) + 128).to(uint8), b) - b.sum(0, keepdim=True, dtype=int32) * 128      a, b of int8
After:  _int_mm(a, b)

Both are the same sums in int32. torchao writes the first where a CPU has VNNI and no AMX, as AMD's do.
Needs:  meta["val"]; nodes without it stay as they are
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fx_passes import ops
from fx_passes.aliasing.aliasing import Aliasing
from fx_passes.fold.casts import dtype_of, is_cast
from fx_passes.graph.graph import finish, is_call, only_user, replace

aten = torch.ops.aten
_SHIFT = 128


def fold_unsigned_products(gm: fx.GraphModule) -> fx.GraphModule:
    """Respell every such product whose sums nobody else reads."""
    aliasing = Aliasing(gm)
    for product in list(gm.graph.nodes):
        if not is_call(product, torch._int_mm, aten._int_mm.default) or len(product.args) != 2 or product.kwargs:
            continue
        rows, matrix = product.args
        signed, difference = _signed(rows), only_user(product)
        if signed is None or dtype_of(matrix) != torch.int8 or not is_call(difference, ops.binary):
            continue
        if aliasing.is_written(signed) or aliasing.is_written(matrix):
            continue
        if difference.args[0] is product and difference.args[2] == "sub" and _is_shift(difference.args[1], matrix):
            product.args = (signed, matrix)
            replace(difference, product)
    return finish(gm)


def _signed(rows: Any) -> fx.Node | None:
    """The int8 matrix that rows is 128 more of; None where it is none."""
    shifted = rows.args[0] if is_cast(rows) and dtype_of(rows) == torch.uint8 else None
    wide = _other(shifted, "add")
    if not isinstance(wide, fx.Node) or not is_cast(wide) or dtype_of(wide) != torch.int32:
        return None
    signed: fx.Node = wide.args[0]
    return signed if dtype_of(signed) == torch.int8 else None


def _is_shift(node: Any, matrix: fx.Node) -> bool:
    """Whether node is 128 times the sums of the matrix's columns, in int32."""
    sums = _other(node, "mul")
    if not is_call(sums, aten.sum.dim_IntList) or sums.args[0] is not matrix or dtype_of(sums) != torch.int32:
        return False
    return list(sums.args[1]) in ([0], [-2])


def _other(node: Any, kind: str) -> Any:
    """The operand beside 128 of a sum or product; None where that is no operand. Beside 128.0 it would be float32."""
    if not is_call(node, ops.binary) or node.args[2] != kind:
        return None
    a, b, _ = node.args
    return next((x for x, y in ((a, b), (b, a)) if type(y) is int and y == _SHIFT), None)
