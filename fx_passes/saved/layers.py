"""Layers of PyTorch's that a graph calls as they are: their class, of a closed list, and their attributes.

    upsampling = nn.PixelShuffle(2)    ["PixelShuffle", {"upscale_factor": 2}, false]

Their parameters and buffers are the tree's. A file names no other class, and attributes are data; the code is
PyTorch's.
Recurrent layers are not among them, as PyTorch does not compare all sizes of theirs before it reads the weights.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from fx_passes.graph.hooks import HOOKS
from fx_passes.graph.inner import parts
from fx_passes.saved.encoding import decode, encode
from fx_passes.saved.errors import FileError, NotSaved

_OF_EACH_SIZE = """
    AdaptiveAvgPool AdaptiveMaxPool AvgPool BatchNorm CircularPad ConstantPad Conv ConvTranspose Dropout
    FractionalMaxPool InstanceNorm LPPool MaxPool MaxUnpool ReflectionPad ReplicationPad ZeroPad
"""
_OTHERS = """
    AlphaDropout Bilinear CELU ChannelShuffle CosineSimilarity Dropout ELU Embedding EmbeddingBag FeatureAlphaDropout
    Flatten Fold GELU GLU GroupNorm Hardshrink Hardsigmoid Hardswish Hardtanh Identity LayerNorm LeakyReLU Linear
    LocalResponseNorm LogSigmoid LogSoftmax Mish PReLU PairwiseDistance PixelShuffle PixelUnshuffle RMSNorm RReLU ReLU
    ReLU6 SELU SiLU Sigmoid Softmax Softmax2d Softmin Softplus Softshrink Softsign Tanh Tanhshrink Threshold Unflatten
    Unfold Upsample UpsamplingBilinear2d UpsamplingNearest2d
"""
_NAMES = (*_OTHERS.split(), *(f"{name}{size}d" for name in _OF_EACH_SIZE.split() for size in (1, 2, 3)))
_LAYERS: dict[str, type[nn.Module]] = {name: getattr(nn, name) for name in _NAMES if hasattr(nn, name)}
_OF_MODULES = frozenset(nn.Module().__dict__)


def encode_layer(module: nn.Module) -> list[Any]:
    """Return the layer as JSON. Raises NotSaved with what a file does not hold of it."""
    name = type(module).__name__
    if _LAYERS.get(name) is not type(module):
        raise NotSaved("its code")
    if any(getattr(module, hooks, None) for hooks in HOOKS):
        raise NotSaved("its hooks")
    for parameter in module._parameters.values():
        if parameter is not None and parts(parameter):
            dtype = str(parameter.dtype).removeprefix("torch.")
            raise NotSaved(f"a parameter that is made of others in a layer (its {type(parameter).__name__} of {dtype})")
    own = {key: value for key, value in module.__dict__.items() if key not in _OF_MODULES}
    values = {}
    for key, value in own.items():
        try:
            values[key] = encode(value, lambda _: None)
        except NotSaved:
            raise NotSaved(f"its attribute {key}, a {type(value).__name__}") from None
    return [name, values, module.training]


def decode_layer(row: Any) -> nn.Module:
    """Return the layer, without its parameters and buffers. Raises FileError for what encode_layer did not write."""
    name, values, _ = row
    cls = _LAYERS.get(name) if isinstance(name, str) else None
    if cls is None or not isinstance(values, dict):
        raise FileError(f"no layer is written as {str(row)[:80]}")
    module: nn.Module = object.__new__(cls)
    nn.Module.__init__(module)
    for key, value in values.items():
        if key in _OF_MODULES or not key.isidentifier() or callable(getattr(cls, key, None)):
            raise FileError(f"no {name} has an attribute {key[:80]!r}")
        module.__dict__[key] = decode(value, lambda _: None)
    return module
