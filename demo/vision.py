"""torchvision models with realistic statistics, and photographs to run them on, without downloading anything.

Pretrained weights live on a download server; a model built without them has batch-norm statistics of mean 0 and
variance 1, which would hide every mistake in folding them. `build` therefore makes seeded random weights whose
batch-norm layers have the statistics of real activations, jittered so that no layer is accidentally an identity.
"""

from __future__ import annotations

import sys
import zlib
from types import ModuleType

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

CALIBRATION_IMAGES = 4
VARIANCE_FLOOR = 0.1  # of the layer's mean variance

# Input sides that differ from 224: the resolution the published weights were trained for.
IMAGE_SIDES = {"inception_v3": 299, "swin_v2_t": 256, "swin_v2_s": 256, "swin_v2_b": 256}

# torchvision registers shape functions for its own compiled operators on import. A torchvision built for another
# variant of PyTorch (CUDA against CPU) cannot load them, and then fails to import although no classification model
# uses them. Declaring the two operators it insists on is enough.
_TORCHVISION_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_declared: torch.library.Library | None = None


def torchvision() -> ModuleType:
    """Return the torchvision package, also where its compiled operators do not fit the installed PyTorch."""
    global _declared
    try:
        import torchvision as package
    except RuntimeError as error:
        if "torchvision::nms" not in str(error) or _declared is not None:
            raise
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        _declared = torch.library.Library("torchvision", "DEF")  # kept: the schemas live as long as this object
        for schema in _TORCHVISION_SCHEMAS:
            _declared.define(schema)
        import torchvision as package
    return package


def classification_models() -> list[str]:
    """Return the names of all torchvision classification architectures, sorted."""
    models = torchvision().models
    return sorted(models.list_models(module=models))


def image_side(name: str) -> int:
    """Return the side, in pixels, of the square input that the named model is used with."""
    return IMAGE_SIDES.get(name, 224)


def build(name: str, seed: int = 0, *, calibrate: bool = True) -> nn.Module:
    """Return the named torchvision model in eval mode with seeded random weights and realistic statistics.

    calibrate=False leaves batch-norm statistics at their defaults, for callers that load a state dict next.
    """
    models = torchvision().models
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        options = {"init_weights": True} if name in ("inception_v3", "googlenet") else {}
        model = models.get_model(name, weights=None, **options).eval()
        if calibrate:
            side = image_side(name)
            randomise(model, image_batch(CALIBRATION_IMAGES, side, seed=seed + 1), seed=seed)
    return model


def randomise(model: nn.Module, sample: Tensor, *, seed: int = 0) -> nn.Module:
    """Give `model`, in place, weights and statistics under which every layer matters; return it.

    Batch norms take the statistics of their activations for `sample` (at least two images), jittered, and random
    scales and shifts. Parameters that are born all zero (ViT's head) or vanishing (ConvNeXt's layer scale 1e-6)
    become random too, for otherwise the output would not depend on most of the network.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("layer_scale"):
                parameter.uniform_(0.1, 0.5, generator=generator)
            elif parameter.ndim >= 2 and not parameter.any():
                parameter.normal_(0.0, 0.02, generator=generator)
        norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
        for norm in norms:
            norm.weight.uniform_(0.7, 1.3, generator=generator)
            norm.bias.normal_(0.0, 0.1, generator=generator)
        _calibrate(model, norms, sample)
        for norm in norms:
            assert norm.running_mean is not None and norm.running_var is not None
            # A channel that hardly varied over a few images would blow up every other image, layer by layer.
            norm.running_var += VARIANCE_FLOOR * norm.running_var.mean()
            spread = norm.running_var.sqrt()
            norm.running_mean += 0.1 * spread * torch.randn(spread.shape, generator=generator)
            norm.running_var *= torch.empty_like(spread).uniform_(0.8, 1.25, generator=generator)
    return model


def _calibrate(model: nn.Module, norms: list[_BatchNorm], sample: Tensor) -> None:
    """Set the running statistics of `norms` to those of their inputs when `model` sees `sample`."""
    momenta = [norm.momentum for norm in norms]
    try:
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # None means cumulative average: one pass gives exactly the batch's statistics
            norm.train()
        model(sample)
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
            norm.eval()


def photograph(name: str = "china", side: int = 224) -> Tensor:
    """Return one of scikit-learn's sample photographs, resized and normalised as ImageNet input.

    name     "china" or "flower"
    Returns  [1, 3, side, side] float32, centre crop
    """
    from sklearn.datasets import load_sample_image

    pixels = torch.from_numpy(load_sample_image(f"{name}.jpg").copy()).permute(2, 0, 1).float().div_(255)
    crop = min(pixels.shape[1:])
    top, left = ((extent - crop) // 2 for extent in pixels.shape[1:])
    square = pixels[None, :, top : top + crop, left : left + crop]
    resized = nn.functional.interpolate(square, (side, side), mode="bilinear", antialias=True)
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (IMAGENET_MEAN, IMAGENET_STD))
    return (resized - mean) / std


def image_batch(batch: int, side: int = 224, seed: int = 0) -> Tensor:
    """Return [batch, 3, side, side] float32 of seeded noise with the statistics of normalised photographs."""
    generator = torch.Generator().manual_seed(seed + zlib.crc32(b"images"))
    coarse = torch.randn(batch, 3, 16, 16, generator=generator)
    smooth = nn.functional.interpolate(coarse, (side, side), mode="bilinear")
    return smooth + 0.3 * torch.randn(batch, 3, side, side, generator=generator)
