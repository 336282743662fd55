"""torchvision's model definitions with untrained, deterministic weights, on a torch whose C++ ops torchvision lacks."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

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


def provide_operators() -> None:
    """Let torchvision's detectors run where its compiled part does not load, as they run where it does.

    nms and roi_align are operators there, which no graph looks into. torchvision's own roi_align in Python would be
    compiled by Inductor in eager mode, and inlined by TorchDynamo: no user with the compiled part sees these times.
    """
    extension = import_torchvision().extension
    if extension._has_ops() or _provided:
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    library.define("roi_align" + _ROI_ALIGN)
    library.impl("nms", _nms, "CPU")
    library.impl("roi_align", _roi_align, "CPU")
    torch.library.register_fake("torchvision::roi_align", _empty_regions, lib=library)
    _provided.append(library)
    extension._has_ops = lambda: True  # which boxes.nms asks
    sys.modules["torchvision.ops.roi_align"]._has_ops = extension._has_ops  # type: ignore[attr-defined]


_ROI_ALIGN = (
    "(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width, int sampling_ratio,"
    " bool aligned) -> Tensor"
)
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


def _empty_regions(
    input: torch.Tensor, rois: torch.Tensor, scale: float, height: int, width: int, *_: Any
) -> torch.Tensor:
    return input.new_empty((rois.shape[0], input.shape[1], height, width))


def _roi_align(
    input: torch.Tensor, rois: torch.Tensor, scale: float, height: int, width: int, ratio: int, aligned: bool
) -> torch.Tensor:
    """Means of ratio x ratio bilinear samples in each cell of regions [K, 5]: an image's number and its corners."""
    assert ratio > 0, "as many samples as a cell has pixels: not provided"
    corners = rois[:, 1:] * scale - (0.5 if aligned else 0.0)
    sizes = corners[:, 2:] - corners[:, :2]
    if not aligned:
        sizes = sizes.clamp(min=1.0)
    x, x_inside = _samples(corners[:, 0], sizes[:, 0], width * ratio, input.shape[3])
    y, y_inside = _samples(corners[:, 1], sizes[:, 1], height * ratio, input.shape[2])
    answer = _empty_regions(input, rois, scale, height, width)
    for number, image in enumerate(input):
        of_image = (rois[:, 0] == number).nonzero()[:, 0]
        if not len(of_image):
            continue
        across = x[of_image, None, :].expand(-1, height * ratio, -1)
        down = y[of_image, :, None].expand(-1, -1, width * ratio)
        grid = torch.stack([across, down], dim=-1).flatten(0, 1)[None]
        sampled = functional.grid_sample(image[None], grid, padding_mode="border", align_corners=True)
        inside = (y_inside[of_image, :, None] & x_inside[of_image, None, :]).flatten(0, 1)
        means = functional.avg_pool2d(sampled * inside, ratio)
        answer[of_image] = means[0].unflatten(1, (-1, height)).movedim(1, 0)
    return answer


def _samples(start: torch.Tensor, size: torch.Tensor, samples: int, pixels: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Places of samples [K, samples] from -1 (the first pixel) to 1 (the last), and which are no pixel outside."""
    steps = (torch.arange(samples, dtype=start.dtype) + 0.5) / samples
    places = start[:, None] + steps * size[:, None]
    return places * (2 / max(pixels - 1, 1)) - 1, (places >= -1) & (places <= pixels)
