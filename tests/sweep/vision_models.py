"""Image networks: torchvision's of every task, and timm's of at most 60M parameters."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from demo import vision
from tests.families.images import PROPOSALS, SMALL, detector, from_folder, pictures
from tests.sweep.case import Case, NotRun, Source, parameters_of

_MOST_PIXELS = 448 * 448
_CALIBRATION_IMAGES = 2
_VANISHING = 1e-3  # a parameter whose numbers are all smaller hides the branch that it scales


_TASKS = ("detection", "segmentation", "video", "optical_flow")
# What a detector's background is ahead by, so that few boxes are kept: by the beginning of its name.
_BACKGROUND = {"fcos": 7.5, "retinanet": 7.6, "ssd": 13.0, "": 6.5}
_FRAMES = {"mvit": (16, 224), "s3d": (16, 224), "": (8, 112)}  # by the beginning of a video network's name


def _task(name: str) -> str:
    """The folder of torchvision that has the model; nothing for classification."""
    models = vision.torchvision().models
    return next((task for task in _TASKS if name in models.list_models(module=getattr(models, task))), "")


def _torchvision_names() -> dict[str, list[str]]:
    """Models by family: the name's beginning, and the task."""
    models = vision.torchvision().models
    families: dict[str, list[str]] = {}
    others = (name for task in _TASKS for name in models.list_models(module=getattr(models, task)))
    for name in (*vision.classification_models(), *others):
        families.setdefault(re.split(r"[\d_]", name)[0] + _task(name), []).append(name)
    return families


def _torchvision(name: str) -> Case:
    torch.manual_seed(0)
    task = _task(name)
    if task == "detection":
        options = {} if name.startswith("ssd") else SMALL
        proposals = {**PROPOSALS, "num_classes": 91} if "rcnn" in name else {}
        model = detector(name, _by_beginning(_BACKGROUND, name), **options, **proposals)
        return Case(model, pictures((300, 320)))
    if task == "segmentation":
        return Case(from_folder(task, name), (torch.randn(1, 3, 224, 224),))
    if task == "video":
        frames, side = _by_beginning(_FRAMES, name)
        return Case(from_folder(task, name), (torch.randn(1, 3, frames, side, side),))
    if task == "optical_flow":
        return Case(from_folder(task, name), tuple(torch.randn(2, 1, 3, 128, 160)))
    return Case(vision.build(name), (vision.image_batch(1, vision.image_side(name)),))


def _by_beginning(table: dict[str, Any], name: str) -> Any:
    return next(value for beginning, value in table.items() if name.startswith(beginning))


@cache
def _timm_names() -> dict[str, list[str]]:
    vision.torchvision()  # which timm imports
    import timm

    families = {family: timm.list_models(module=family) for family in timm.list_modules()}
    return {family: names for family, names in families.items() if names}


def _timm(name: str) -> Case:
    vision.torchvision()
    import timm

    parameters_of(lambda: timm.create_model(name, pretrained=False))
    torch.manual_seed(0)
    model: nn.Module = timm.create_model(name, pretrained=False).eval()
    _, height, width = model.default_cfg.get("input_size", (3, 224, 224))
    if height * width > _MOST_PIXELS:
        raise NotRun(f"images of {height} x {width}")
    images = torch.randn(_CALIBRATION_IMAGES, 3, height, width, generator=torch.Generator().manual_seed(1))
    _randomise(model, images)
    return Case(model, (images[:1],))


def _randomise(model: nn.Module, images: torch.Tensor) -> None:
    """Give weights under which every branch matters, and running statistics as training leaves them."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.rpartition(".")[2] != "bias" and parameter.abs().max() < _VANISHING:
                parameter.normal_(0.0, 0.02, generator=generator) if parameter.ndim > 1 else parameter.fill_(0.3)
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm)]
    if all(norm.affine and norm.track_running_stats for norm in norms):
        vision.randomise(model, images)


TORCHVISION = Source(_torchvision_names, _torchvision)
TIMM = Source(_timm_names, _timm)
