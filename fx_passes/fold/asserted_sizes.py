"""A number out of a tensor that is asserted to be a size is that size from there on.

Before: n = lengths.item(); assert n == size(x, 0); piece, = split(y, [n], 1)      y [H, size(x, 0), D]
After:  n = lengths.item(); assert n == size(x, 0)                                 piece is y
Needs:  torch.export's assertions; sizes of y that it knows

Vision encoders of many language models cut a batch of images by their lengths, and attend to each by itself. Of one
image nothing is cut, so its layers are one region.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from fx_passes.aliasing.aliasing import Aliasing
from fx_passes.fold.rows import same_sizes
from fx_passes.graph.graph import example, finish, is_call, is_shape, only_values_count, replace

aten = torch.ops.aten
_CUT = aten.split_with_sizes.default
_ITEMS = (aten.item.default, aten._local_scalar_dense.default)


def fold_asserted_sizes(gm: fx.GraphModule) -> fx.GraphModule:
    """Read sizes in place of the numbers asserted to be such, and a value in place of its only piece."""
    for assertion in gm.graph.find_nodes(op="call_function", target=aten._assert_scalar.default):
        number, size = _asserted(assertion.args[0])
        if number is not None:
            number.replace_all_uses_with(size, delete_user_cb=lambda user, after=assertion: after < user)
    cuts = [cut for cut in gm.graph.find_nodes(op="call_function", target=_CUT) if _is_whole(cut)]
    aliasing = Aliasing(gm) if cuts else None
    for cut in cuts:
        assert aliasing is not None
        for piece in [user for user in cut.users if is_call(user, operator.getitem) and only_values_count(user)]:
            if not aliasing.is_written_after(cut.args[0], piece):
                replace(piece, cut.args[0])
    return finish(gm)


def _asserted(question: Any) -> tuple[Any, Any]:
    """The number of data and the size that it is asked to be; None, None where that is not what is asked."""
    if is_call(question, operator.eq):
        for number, size in (question.args, question.args[::-1]):
            if is_call(number, *_ITEMS) and (type(size) is int or is_shape(size)):
                return number, size
    return None, None


def _is_whole(cut: fx.Node) -> bool:
    """Whether the only piece is all of it."""
    src, sizes, *others = cut.args
    value, dim = example(src), others[0] if others else cut.kwargs.get("dim", 0)
    if value is None or type(dim) is not int or not isinstance(sizes, list | tuple) or len(sizes) != 1:
        return False
    size = sizes[0].meta.get("val") if isinstance(sizes[0], fx.Node) else sizes[0]
    return size is not None and same_sizes([size], [value.shape[dim]])
