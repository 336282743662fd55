"""torchvision's model definitions with untrained, deterministic weights, on a torch whose C++ ops torchvision lacks."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import torch
from torch import nn

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_library: Any = None


def import_torchvision() -> Any:
    """Return torchvision.

    Its import registers fake versions of operators that its compiled part defines. Where that part does not load (built
    for another torch), the operators must exist by name; no classification model calls them.
    """
    global _library
    if _library is None:
        _library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            with contextlib.suppress(RuntimeError):  # the compiled part is there
                _library.define(name + _SCHEMA)
    import torchvision

    return torchvision


def classification_models() -> list[str]:
    """Names of all classification architectures."""
    torchvision = import_torchvision()
    return list(torchvision.models.list_models(module=torchvision.models))


def build(name: str, seed: int = 0, **kwargs: Any) -> nn.Module:
    """Return the architecture in evaluation mode, with random weights and random batch normalization statistics."""
    torchvision = import_torchvision()
    if name in ("googlenet", "inception_v3"):
        kwargs.setdefault("init_weights", False)  # their own initialization takes seconds
    torch.manual_seed(seed)
    model: nn.Module = torchvision.models.get_model(name, weights=None, **kwargs).eval()
    randomize(model, seed)
    return model


def randomize(model: nn.Module, seed: int = 0) -> None:
    """Draw statistics and scales as training leaves them, so that folding them wrongly shows.

    Layers that start as nothing (heads of vision transformers, layer scales) get weights too.
    """
    generator = torch.Generator().manual_seed(seed)

    def uniform(low: float, high: float, like: torch.Tensor) -> torch.Tensor:
        return torch.rand(like.shape, generator=generator).to(like) * (high - low) + low

    with torch.no_grad():
        for module in model.modules():
            scale = getattr(module, "layer_scale", None)
            if isinstance(scale, nn.Parameter):
                scale.copy_(uniform(0.05, 0.2, scale))
            if isinstance(module, nn.Linear) and not module.weight.any():
                module.weight.copy_(uniform(-0.05, 0.05, module.weight))
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None:
                assert module.running_var is not None
                module.running_mean.copy_(uniform(-0.3, 0.3, module.running_mean))
                module.running_var.copy_(uniform(0.5, 1.5, module.running_var))
                if module.affine:
                    module.weight.copy_(uniform(0.5, 1.5, module.weight))
                    module.bias.copy_(uniform(-0.3, 0.3, module.bias))


def provide_nms() -> None:
    """Let torchvision's detectors run where its compiled part does not load: nms in plain PyTorch, as slow as it is."""
    extension = import_torchvision().extension
    if extension._has_ops() or _provided:
        return
    library = torch.library.Library("torchvision", "IMPL")
    library.impl("nms", _nms, "CPU")
    _provided.append(library)
    extension._has_ops = lambda: True  # which boxes.nms asks; roi_align asks its own and keeps its version in Python


_provided: list[Any] = []  # kept: an implementation lives as long as its library


def _nms(boxes: torch.Tensor, scores: torch.Tensor, iou_threshold: float) -> torch.Tensor:
    """Indices of the boxes [N, 4] that no better one overlaps by more, best first."""
    from torchvision.ops.boxes import box_iou

    order = scores.argsort(descending=True, stable=True)
    overlaps = (box_iou(boxes[order], boxes[order]) > iou_threshold).numpy()
    kept = np.ones(len(order), dtype=bool)
    for number in range(len(order)):
        if kept[number]:
            kept[number + 1 :] &= ~overlaps[number, number + 1 :]
    return order[torch.from_numpy(kept)]
