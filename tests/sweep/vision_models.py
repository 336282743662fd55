"""Image networks: torchvision's classification models, and timm's of at most 60M parameters."""

from __future__ import annotations

import re
from functools import cache

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from demo import vision
from tests.sweep.case import Case, NotRun, Source, parameters_of

_MOST_PIXELS = 448 * 448
_CALIBRATION_IMAGES = 2
_VANISHING = 1e-3  # a parameter whose numbers are all smaller hides the branch that it scales


def _torchvision_names() -> dict[str, list[str]]:
    families: dict[str, list[str]] = {}
    for name in vision.classification_models():
        families.setdefault(re.split(r"[\d_]", name)[0], []).append(name)
    return families


def _torchvision(name: str) -> Case:
    return Case(vision.build(name), (vision.image_batch(1, vision.image_side(name)),))


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
