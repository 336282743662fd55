"""What torch.addmm and torch.baddbmm add comes before the product's only rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fx_passes import ops
from tests.support.lowering import kinds, net, noise
from tests.tolerance import assert_close
from zendnn_cffi import explain, optimize

BF16 = torch.bfloat16
SHAPES = ((4, 7), (1, 4, 7), (3, 4, 7), (3, 4, 1), (3, 1, 7), (4, 1), (7,), ())


def cancelling(shape: tuple[int, ...], alpha: float) -> tuple[Tensor, Tensor, Tensor]:
    """Two matrices, or equal batches of them, and nearly the negative of their product wherever shape allows it."""
    size = (3,) if len(shape) == 3 or shape in ((4, 7), (7,)) else ()
    a, b = (noise(4, 16, dtype=BF16), noise(16, 7, dtype=BF16))
    if shape[-2:-1] in ((1,), ()):
        a = a[:1].expand(4, 16)
    if shape[-1:] in ((1,), ()):
        b = b[:, :1].expand(16, 7)
    product = alpha * (a.double() @ b.double())
    part = product[tuple(slice(0, n) for n in ((1, 1, *shape)[-2:]))].to(BF16)
    c = -part.expand((*shape[:-2], *part.shape)).reshape(shape).contiguous()
    return (c, a.expand(*size, 4, 16).contiguous(), b.expand(*size, 16, 7).contiguous())


@pytest.mark.needs("vnni")
@pytest.mark.parametrize("alpha", (1.0, 0.37))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_sum_is_rounded_once(shape: tuple[int, ...], alpha: float) -> None:
    c, a, b = cancelling(shape, alpha)
    add = {2: torch.addmm, 3: torch.baddbmm}[a.ndim]
    expected = add(c.double(), a.double(), b.double(), alpha=alpha)
    rounded = (alpha * (a.double() @ b.double())).to(BF16) + c
    assert rounded.abs().max() < expected.abs().max() / 2, "a product that is rounded first has none of these numbers"
    model = net(lambda m, x, y, z: add(x, y, z, alpha=alpha), torch.nn.Identity())
    fast = optimize(model, (c, a, b), tune="off")
    assert_close(fast(c, a, b), expected, dtype=BF16, k=16)
    (entry,) = [n for n in explain(fast).nodes if n.became == "matmul"]
    assert entry.post_ops, "in the kernel"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_plain_pytorch_rounds_once(shape: tuple[int, ...]) -> None:
    """What runs in place of a kernel."""
    c, a, b = cancelling(shape, 0.37)
    post_ops = (("eltwise", "linear", 0.37, 0.0), ("binary", "add", c), ("eltwise", "relu", 0.0, 0.0))
    expected = torch.relu(0.37 * (a.double() @ b.double()) + c.double())
    assert_close(ops.matmul(a, b, post_ops=post_ops), expected, dtype=BF16, k=16)


@pytest.mark.parametrize("scale", ({"beta": 0.5}, {"beta": 3, "alpha": 2}), ids=str)
def test_an_addend_with_a_factor_is_pytorch_s(scale: dict[str, float]) -> None:
    """It would be rounded before the sum."""
    c, a, b = noise(3, 4, 7, dtype=BF16), noise(3, 4, 16, dtype=BF16), noise(3, 16, 7, dtype=BF16)
    model = net(lambda m, x, y, z: torch.baddbmm(x, y, z, **scale), torch.nn.Identity())
    fast = optimize(model, (c, a, b), tune="off")
    assert torch.equal(fast(c, a, b), model(c, a, b)) and not any(n.offloaded for n in explain(fast).nodes)


@pytest.mark.parametrize("function", (torch.add, torch.mul), ids=("sum", "product"))
@pytest.mark.parametrize(("batch", "dtype"), (((3,), torch.float32), ((2, 3), BF16)), ids=str)
def test_elsewhere_nothing_is_broadcast(function: Any, batch: tuple[int, ...], dtype: torch.dtype) -> None:
    """Float32 has digits to spare, and no operation of PyTorch's adds to a product of four dimensions."""
    inputs = noise(4, 7, dtype=dtype), noise(*batch, 4, 16, dtype=dtype), noise(*batch, 16, 7, dtype=dtype)
    model = net(lambda m, x, y, z: function(torch.matmul(y, z), x), torch.nn.Identity())
    fast = optimize(model, inputs, tune="off")
    assert_close(fast(*inputs), model(*(t.double() for t in inputs)), dtype=dtype, k=16)
    assert kinds(explain(fast)) == ["matmul", "binary"]


@pytest.mark.parametrize(
    "shapes",
    (((3, 4, 7), (4, 16), (16, 7)), ((3, 4, 7), (3, 4, 16), (1, 16, 7)), ((2, 3, 4, 7), (3, 4, 16), (3, 16, 7))),
    ids=("larger", "one matrix for all", "more dimensions"),
)
def test_sums_of_other_shapes_than_addmm_takes(shapes: tuple[tuple[int, ...], ...]) -> None:
    x, y, z = (noise(*shape, dtype=BF16) for shape in shapes)
    model = net(lambda m, x, y, z: torch.add(torch.matmul(y, z), x), torch.nn.Identity())
    expected = y.double() @ z.double() + x.double()
    fast = optimize(model, (x, y, z), tune="off")
    assert_close(fast(x, y, z), expected, dtype=BF16, k=16)
    assert_close(ops.matmul(y, z, post_ops=(("binary", "add", x),)), expected, dtype=BF16, k=16)
