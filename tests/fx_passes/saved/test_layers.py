"""Layers of PyTorch's that no operation stands for are in files by class and attributes."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zendnn_cffi
from fx_passes.saved.document import decode_module, encode_module
from fx_passes.saved.errors import FileError, NotSaved
from fx_passes.saved.layers import _LAYERS, decode_layer, encode_layer
from tests.support.lowering import noise

OF_EACH_SIZE: dict[str, tuple[Any, ...]] = {
    "AdaptiveAvgPool": (3,), "AdaptiveMaxPool": (3,), "AvgPool": (2,), "BatchNorm": (4,), "CircularPad": (1,),
    "ConstantPad": (1, 2.5), "Conv": (4, 2, 3), "ConvTranspose": (4, 2, 3), "Dropout": (), "FractionalMaxPool": (2, 3),
    "InstanceNorm": (4, 1e-3, 0.1, True, True), "LPPool": (2, 2), "MaxPool": (2,), "MaxUnpool": (2,),
    "ReflectionPad": (1,), "ReplicationPad": (1,), "ZeroPad": (1,),
}  # fmt: skip
OTHERS: dict[str, tuple[Any, ...]] = {
    "Bilinear": (6, 6, 3), "ChannelShuffle": (2,), "Embedding": (5, 3, 0, 1.0), "EmbeddingBag": (5, 3),
    "Fold": ((6, 6), 2), "GLU": (1,), "GroupNorm": (2, 4), "LayerNorm": (6,), "Linear": (6, 3),
    "LocalResponseNorm": (2,), "LogSoftmax": (1,), "PixelShuffle": (2,), "PixelUnshuffle": (2,), "RMSNorm": (6,),
    "Softmax": (1,), "Softmin": (1,), "Threshold": (0.1, 3.0), "Unflatten": (1, (2, 2)), "Unfold": (2,),
    "Upsample": (None, 2, "bicubic", True), "UpsamplingBilinear2d": (None, 2), "UpsamplingNearest2d": (None, 2),
}  # fmt: skip
INPUTS: dict[str, Any] = {
    "Bilinear": (noise(2, 6), noise(2, 6)), "CosineSimilarity": (noise(2, 6), noise(2, 6)),
    "PairwiseDistance": (noise(2, 6), noise(2, 6)), "Embedding": (torch.tensor([[1, 4]]),),
    "EmbeddingBag": (torch.tensor([[1, 4]]),), "Fold": (noise(2, 16, 25),),
}  # fmt: skip


def layer(name: str) -> nn.Module:
    torch.manual_seed(0)
    arguments = OF_EACH_SIZE[name[:-2]] if name[:-2] in OF_EACH_SIZE else OTHERS.get(name, ())
    return _LAYERS[name](*arguments).eval()


def inputs(name: str) -> tuple[Any, ...]:
    images = noise(2, 4, *[6] * (int(name[-2]) if name[:-2] in OF_EACH_SIZE else 2))
    if name.startswith("MaxUnpool"):
        pool: Any = getattr(nn, f"MaxPool{name[-2:]}")(2, return_indices=True)
        pooled: tuple[Any, ...] = pool(images)
        return pooled
    return tuple(INPUTS.get(name, (images,)))


class Inside(nn.Module):
    """A layer behind a convolution."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.conv, self.inner = nn.Conv2d(3, 4, 3), nn.ModuleList([inner])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.inner[0](F.relu(self.conv(x)))
        return y


def loaded(model: nn.Module, x: torch.Tensor, path: Path, **options: Any) -> Any:
    fast = zendnn_cffi.optimize(model.eval(), tune="off", **options)
    fast(x)
    zendnn_cffi.save(fast, path)
    return zendnn_cffi.load(path)


@pytest.mark.parametrize("name", _LAYERS)
def test_every_layer_comes_back(name: str) -> None:
    made, given = layer(name), inputs(name)
    row = json.loads(json.dumps(encode_layer(made)))
    again = decode_layer(row).eval()
    for key, parameter in made._parameters.items():
        again.register_parameter(key, parameter)
    for key, buffer in made._buffers.items():
        again.register_buffer(key, buffer)
    assert type(again) is type(made)
    assert repr(again) == repr(made)
    torch.manual_seed(2)  # fractional pooling takes random numbers
    expected = made(*given)
    torch.manual_seed(2)
    torch.testing.assert_close(again(*given), expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    "name", ["PixelShuffle", "InstanceNorm2d", "ReflectionPad2d", "Upsample", "GLU", "SELU", "LocalResponseNorm"]
)
def test_models_with_layers_that_are_no_operations_are_in_files(name: str, tmp_path: Path) -> None:
    model, x = Inside(layer(name)).eval(), noise(2, 3, 9, 9)
    gm = loaded(model, x, tmp_path / "m")
    for images in (x, noise(3, 3, 8, 11)):
        torch.testing.assert_close(gm(images), model(images))
    assert gm.state_dict().keys() == model.state_dict().keys()
    for again in (copy.deepcopy(gm), loaded_again(gm, tmp_path)):
        torch.testing.assert_close(again(x), model(x))
    expected, given = x.clone().requires_grad_(), x.clone().requires_grad_()
    model(expected).square().sum().backward()
    gm(given).square().sum().backward()
    torch.testing.assert_close(given.grad, expected.grad)


def loaded_again(gm: Any, folder: Path) -> Any:
    zendnn_cffi.save(gm, folder / "again")
    return zendnn_cffi.load(folder / "again")


def test_a_convolution_that_pads_by_reflection(tmp_path: Path) -> None:
    model, x = Inside(nn.Conv2d(4, 5, 3, padding=1, padding_mode="reflect")), noise(2, 3, 9, 9)
    gm = loaded(model, x, tmp_path / "m")
    torch.testing.assert_close(gm(x), model(x))
    with torch.no_grad():
        for each in (model, gm):
            each.get_parameter("inner.0.weight").mul_(2)
    for _ in range(3):
        torch.testing.assert_close(gm(x), model(x))


def test_inputs_without_a_batch_are_normalized_as_such(tmp_path: Path) -> None:
    model, x = Inside(nn.InstanceNorm2d(4)), noise(2, 3, 9, 9)
    gm = loaded(model, x, tmp_path / "m")
    torch.testing.assert_close(gm(x[0]), model(x[0]))


def test_dropout_that_is_left_in_training_stays_so(tmp_path: Path) -> None:
    model, x = Inside(nn.Dropout(0.5)).eval(), noise(1, 3, 9, 9)
    model.inner[0].train()
    fast = zendnn_cffi.optimize(model, tune="off")
    fast(x)
    zendnn_cffi.save(fast, tmp_path / "m")
    gm = zendnn_cffi.load(tmp_path / "m")
    torch.manual_seed(0)
    expected = model(x)
    torch.manual_seed(0)
    torch.testing.assert_close(gm(x), expected)


def test_a_released_model_keeps_what_its_layers_read(tmp_path: Path) -> None:
    model, x = Inside(layer("InstanceNorm2d")), noise(2, 3, 9, 9)
    expected = model.eval()(x)
    torch.testing.assert_close(loaded(model, x, tmp_path / "m", release_weights=True)(x), expected)


FUNCTIONS = {
    "interpolate": lambda y: F.interpolate(y, size=(5, 7), mode="bilinear", align_corners=True),
    "normalize": lambda y: F.normalize(y, dim=1),
    "grid_sample": lambda y: F.grid_sample(y, y.permute(0, 2, 3, 1)[..., :2], align_corners=False),
    "fold": lambda y: F.fold(y.flatten(2)[:, :, :4], (3, 3), 2),
    "logsigmoid": F.logsigmoid,
    "local_response_norm": lambda y: F.local_response_norm(y, 2),
    "threshold": lambda y: F.threshold(y, 0.1, 3.0),
}


class Calls(Inside):
    def __init__(self, name: str) -> None:
        super().__init__(nn.Identity())
        self.name = name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = FUNCTIONS[self.name](self.conv(x))
        return y


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_that_are_written_in_python(name: str, tmp_path: Path) -> None:
    model, x = Calls(name).eval(), noise(2, 3, 9, 9)
    torch.testing.assert_close(loaded(model, x, tmp_path / "m")(x), model(x))


def test_hooks_and_odd_attributes_are_refused(tmp_path: Path) -> None:
    x = noise(2, 3, 9, 9)
    hooked = nn.PixelShuffle(2)
    hooked.register_forward_hook(lambda module, args, result: result + 1)
    with pytest.raises(NotSaved, match=r"submodule inner.0 \(PixelShuffle\) stays plain PyTorch.* not hold its hooks"):
        loaded(Inside(hooked), x, tmp_path / "m")
    odd = nn.PixelShuffle(2)
    odd.about = object()  # type: ignore[assignment]
    with pytest.raises(NotSaved, match="not hold its attribute about, a object"):
        loaded(Inside(odd), x, tmp_path / "m")


@pytest.mark.parametrize(
    "row",
    [["LSTM", {}, False], ["Sequential", {}, False], ["CELU", {"forward": 1}, False], ["CELU", [], False], "CELU", [],
     ["CELU", {"_parameters": ["dict"]}, False], ["CELU", {"a b": 1}, False], [["CELU"], {}, False],
     ["CELU", {"inplace": ["function", "os.system"]}, False]],
)  # fmt: skip
def test_layers_that_were_not_written_are_refused(row: Any) -> None:
    x = noise(2, 3, 9, 9)
    fast: Any = zendnn_cffi.optimize(Inside(nn.CELU()).eval(), tune="off")
    fast(x)
    document, tensors, _ = encode_module(fast)
    decode_module(document, tensors)
    document["tree"]["layers"]["inner.0"] = row
    with pytest.raises(FileError):
        decode_module(document, tensors)


def test_modules_that_only_hold_parameters_cannot_be_called() -> None:
    fast: Any = zendnn_cffi.optimize(Inside(nn.CELU()).eval(), tune="off")
    fast(noise(2, 3, 9, 9))
    document, tensors, _ = encode_module(fast)
    for name in ("inner", "", "nothing"):
        changed = json.loads(json.dumps(document).replace('"call_module", "inner_0", "inner.0"',
                                                          f'"call_module", "inner_0", "{name}"'))  # fmt: skip
        assert changed != document
        with pytest.raises(FileError, match="not in the file"):
            decode_module(changed, tensors)
