"""The networks of PyTorch's own tests of quantization, quantized by torchao's PT2E for x86.

The oracle is the graph with quantize and dequantize operators in eager. Networks of one input are quantized as one.
Left out: LinearAddModel (torchao's quantizer refuses a sum with a number), ModelForFusion (torchao takes two minutes),
NormalizationTestModel (its result is rounding errors: instance norms of equal numbers), and networks of which torchao
quantizes nothing (transposed convolutions, recurrent layers, embeddings), but for one of each.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zendnn_cffi
from tests.support.lowering import noise
from tests.support.quantized import ran
from tests.support.torchvision_models import import_torchvision

import_torchvision()  # the module below imports it
from torch.testing._internal import common_quantization as theirs  # noqa: E402

HELPERS = theirs.TestHelperModules
C, P, L = "convolution", "pooling", "product"

ROWS = {  # of five numbers: what runs on integers
    "SingleLayerLinearModel": L,
    "AnnotatedSingleLayerLinearModel": L,
    "SingleLayerLinearDynamicModel": L,
    "TwoLayerLinearModel": f"{L} {L}",
    "LinearModelWithSubmodule": f"{L} {L} {L}",
    "AnnotatedTwoLayerLinearModel": f"{L} {L}",
    "ActivationsTestModel": "",
    "LinearReluModel": L,
    "LinearReluLinearModel": f"{L} {L}",
    "LinearReluAddModel": f"{L} {L}",
    "LinearBnLeakyReluModel": L,
    "LinearTanhModel": L,
    "NestedModel": f"{L} {L} {L} {L}",
    "AnnotatedNestedModel": f"{L} {L} {L} {L}",
    "AnnotatedSubNestedModel": f"{L} {L} {L} {L}",
    "AnnotatedCustomConfigNestedModel": f"{L} {L} {L} {L}",
    "QuantSubModel": f"{L} {L} {L} {L}",
    "InnerModule": f"{L} {L}",
    "FunctionalLinear": L,
    "SingleLayerFunctionalLinearModel": L,
    "TwoLayerFunctionalLinearModel": f"{L} {L}",
    "FunctionalLinearAddModel": f"{L} {L}",
    "FunctionalLinearReluModel": L,
    "FunctionalLinearReluLinearModel": f"{L} {L}",
    "SkipQuantModel": f"{L} {L} {L}",
    "AnnotatedSkipQuantModel": f"{L} {L} {L}",
    "QuantStubModel": L,
    "ManualLinearQATModel": f"{L} {L}",
    "ManualDropoutQATModel": L,
    "ManualLinearDynamicQATModel": f"{L} {L}",
    "ModelWithFunctionals": "",
}
IMAGES = {  # 3 channels of 10 x 10
    "ConvModel": C,
    "AnnotatedConvModel": C,
    "ConvTransposeModel": "",
    "ConvBnModel": C,
    "AnnotatedConvBnModel": C,
    "ConvBnReLUModel": C,
    "AnnotatedConvBnReLUModel": C,
    "TwoLayerConvModel": f"{C} {C}",
    "ConvReluModel": C,
    "ConvReluConvModel": f"{C} {C}",
    "ConvReluAddModel": f"{C} {C}",
    "FunctionalConv2d": C,
    "SingleLayerFunctionalConvModel": C,
    "TwoLayerFunctionalConvModel": f"{C} {C}",
    "FunctionalConvReluModel": C,
    "FunctionalConvReluConvModel": f"{C} {C}",
    "ManualConvLinearQATModel": f"{C} {L} {L}",
    "ManualConvLinearSymmQATModel": f"{C} {L} {L}",
    "ConvBNReLU": C,
    "ModelWithSequentialFusion": f"{C} {C} {C} {C} {L}",
    "ModelForFusionWithBias": f"{C} {C}",
    "ResNetBase": f"{C} {L}",
    "ModelMultipleOps": f"{C} {C} {P} {L}",
    "Conv2dPropAnnotaton": f"{C} {L}",
    "Conv2dWithObsSharingOps": f"{C} {P}",
    "Conv2dWithTwoLinearPermute": f"{C} {L} {L}",
    "ConvLinearWPermute": f"{C} {L}",
    "ConvWithAdaptiveAvgPool2d": f"{C} {P}",
    "ConvWithBNRelu": C,
    "ConvBnReLU2dAndLinearReLU": f"{C} {L}",
}
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "AnnotatedNestedModel": ("fbgemm",),
    "AnnotatedSkipQuantModel": ("fbgemm",),
    "ManualLinearQATModel": ("fbgemm",),
    "ManualDropoutQATModel": ("fbgemm",),
    "AnnotatedConvModel": ("fbgemm",),
    "AnnotatedConvBnReLUModel": ("fbgemm",),
    "ConvWithBNRelu": (True,),
}


def indices(*shape: int) -> Tensor:
    return torch.arange(torch.Size(shape).numel()).mul(7).remainder(10).view(shape)


OFFSETS = torch.tensor([0, 3])
OTHERS: dict[str, tuple[tuple[Tensor, ...], str]] = {
    "ConvBnAddReluModel": ((noise(2, 5, 6, 6), noise(2, 5, 5, 5, seed=1)), f"{C} {C}"),
    "ModelForLinearBNFusion": ((noise(4, 20),), L),
    "ModelMultipleOpsNoAvgPool": ((noise(2, 3, 16, 16),), f"{C} {C} {C} {P} {P} {L}"),
    "DeFusedEmbeddingBagLinear": ((indices(3, 4),), L),
    "EmbeddingWithStaticLinear": ((indices(6), OFFSETS, noise(2, 4)), L),
    "SparseNNModel": ((indices(6), OFFSETS, noise(2, 4)), f"{L} {L} {L}"),
    "Conv2dWithTwoLinear": ((noise(2, 3, 4, 4),), f"{C} {L} {L}"),
    "Conv2dWithTwoCat": (
        (noise(2, 3, 9, 9), noise(2, 3, 9, 9, seed=1), noise(2, 6, 7, 7), noise(2, 6, 7, 7, seed=1)),
        f"{C} {C}",
    ),
    "ConvMaxPool2d": ((noise(2, 2, 9, 9),), f"{C} {P}"),
    "EmbeddingConvLinearModule": ((indices(6, 6),), f"{C} {L}"),
    "GroupwiseConv2d": ((noise(2, 4, 10, 10),), C),
    "RNNDynamicModel": ((noise(3, 2, 2),), ""),
}
ARGUMENTS["RNNDynamicModel"] = ("LSTM",)


def network(name: str) -> nn.Module:
    torch.manual_seed(0)
    make: Callable[..., nn.Module] = getattr(theirs, name, None) or getattr(HELPERS, name)
    model = make(*ARGUMENTS.get(name, ()))
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None:
            module.running_mean.uniform_(-0.5, 0.5)
            module.running_var.uniform_(0.5, 2)  # type: ignore[union-attr]
    return model.eval()


class Together(nn.Module):
    """Networks on one input: a list of their results."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.networks = nn.ModuleList(network(name) for name in names)
        self.eval()

    def forward(self, *inputs: Tensor) -> list[Any]:
        return [each(*inputs) for each in self.networks]


def quantized(model: nn.Module, inputs: tuple[Tensor, ...]) -> Any:
    """model by torchao's PT2E, its ranges those of inputs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torchao's, about itself
        from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
        from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

        quantizer = x86.X86InductorQuantizer()
        quantizer.set_global(x86.get_default_x86_inductor_quantization_config())
        prepared = prepare_pt2e(torch.export.export(model, inputs, strict=True).module(), quantizer)
        with torch.no_grad():
            prepared(*inputs)
        return convert_pt2e(prepared)


def check(cases: dict[str, str], inputs: tuple[Tensor, ...]) -> None:
    graph = quantized(Together(list(cases)), inputs)
    fast = zendnn_cffi.optimize(graph, inputs, tune="off")
    with torch.no_grad():
        ours, eager = fast(*inputs), graph(*inputs)
    for name, a, b in zip(cases, ours, eager, strict=True):
        for one, other in zip(torch.utils._pytree.tree_leaves(a), torch.utils._pytree.tree_leaves(b), strict=True):
            assert (one.shape, one.dtype) == (other.shape, other.dtype), name
            # a step of the last source, which has up to 255, is at most this; rounding midway numbers may differ by one
            apart = (one - other).abs() / other.abs().max()
            assert apart.max() <= 1 / 64 and (apart > 1e-4).double().mean() < 0.1, name
    names = {"inner_product": L, "matmul": L}
    calls = [(names.get(kind, kind), source) for kind, source, _ in ran(fast)]
    found = Counter(kind for kind, source in calls if source == torch.uint8 and kind in (C, P, L))
    assert found == Counter(kind for kinds in cases.values() for kind in kinds.split())


@pytest.mark.needs("vnni")
@pytest.mark.parametrize(("cases", "shape"), [(ROWS, (4, 5)), (IMAGES, (2, 3, 10, 10))])
def test_networks_of_one_input(cases: dict[str, str], shape: tuple[int, ...]) -> None:
    check(cases, (noise(*shape),))


@pytest.mark.needs("vnni")
@pytest.mark.parametrize("name", OTHERS)
def test_networks_of_their_own_inputs(name: str) -> None:
    inputs, kinds = OTHERS[name]
    check({name: kinds}, inputs)
