"""Rows of torchvision's detectors, segmentation and video networks, and of networks that make images."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.families.rows import Row
from tests.support.torchvision_models import import_torchvision, provide_operators, randomize

DETECTION, SEGMENTATION, VIDEO = "detection", "segmentation", "video"
DIFFUSION, SUPER_RESOLUTION = "diffusion", "super-resolution"


def from_folder(folder: str, name: str, **options: Any) -> nn.Module:
    """torchvision's model with random weights and statistics."""
    torchvision = import_torchvision()
    provide_operators()
    model: nn.Module = getattr(getattr(torchvision.models, folder), name)(
        weights=None, **({"weights_backbone": None} if folder in (DETECTION, SEGMENTATION) else {}), **options
    )
    randomize(model.eval())
    return model


def detector(name: str, offset: float, **options: Any) -> nn.Module:
    """torchvision's detector, which answers as a trained one does: most of what it sees is background.

    With random weights a picture vanishes in the backbone, or swells, and scores are alike at all places, or 1.0: their
    order, and so which boxes are kept, is noise. So statistics of batch norms are those of pictures, and the last
    layer of each head is scaled by what it answers to one.

    offset  added to the logit of the background, or where there is none taken from all classes'
    """
    model = from_folder("detection", name, **options)
    with torch.no_grad():
        for name, layer in model.named_modules():
            if isinstance(layer, nn.BatchNorm2d):
                layer.momentum = 1.0
                layer.train()
                if name.endswith("bn3"):  # the last of a residual block: trained ones add little each
                    layer.weight.mul_(0.3)
        model(*pictures(*[(300, 320)] * 4))
    model.eval()
    hooks = [
        layer.register_forward_hook(partial(_scale_head, kind=kind, offset=offset, scaled=[]))
        for kind, layer in _last_layers(model)
    ]
    with torch.no_grad():
        model(*pictures((300, 320)))
    for hook in hooks:
        hook.remove()
    return model


def _last_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The last layers of heads, and what they say: "background" for logits with a class of that name.

    Boxes and masks are told by their names, as torchvision has them.
    """
    for name, layer in model.named_modules():
        if not isinstance(layer, nn.Conv2d | nn.Linear):
            continue
        last = name.rsplit(".", 1)[-1]
        if last in ("bbox_pred", "bbox_reg") or re.search(r"regression_head\.module_list\.\d+(\.1)?$", name):
            yield "boxes", layer
        elif last == "cls_score" or re.search(r"classification_head\.module_list\.\d+(\.1)?$", name):
            yield "background", layer
        elif name == "head.classification_head.cls_logits":
            yield "classes", layer
        elif last in ("cls_logits", "bbox_ctrness", "mask_fcn_logits"):
            yield "logits", layer


_CLASSES = 91


def _scale_head(
    layer: Any, inputs: tuple[Tensor], output: Tensor, *, kind: str, offset: float, scaled: list[str]
) -> Tensor:
    """A forward hook: at the first call give the layer weights with which what it answers has a spread of 1."""
    if not scaled:
        scaled.append(kind)
        layer.weight.mul_((0.3 if kind == "boxes" else 1.0) / output.std())
        layer.bias.zero_()
        if kind in ("background", "classes"):
            by_class = layer.bias.view(-1, _CLASSES)
            by_class += torch.linspace(0.0, 1.0, _CLASSES)
            if kind == "background":
                by_class[:, 0] += offset
            else:
                by_class -= offset
    answer: Tensor = layer.forward(*inputs)
    return answer


def pictures(*sides: tuple[int, int]) -> tuple[list[Tensor]]:
    """Pictures of these heights and widths, with contrasts of all scales as photographs have."""
    return ([_picture(*side) for side in sides],)


def _picture(height: int, width: int) -> Tensor:
    scales = [torch.rand(1, 3, -(-height // step), -(-width // step)) for step in (2, 8, 32, 128)]
    blurred = [nn.functional.interpolate(scale, (height, width), mode="bilinear") for scale in scales]
    return torch.stack(blurred).mean(0)[0]


class ResidualDense(nn.Module):
    """Super-resolution as EDSR's: residual blocks at low resolution, then pixel shuffles."""

    def __init__(self, width: int = 64, blocks: int = 8) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, width, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(width, width, 3, padding=1)
            )
            for _ in range(blocks)
        )
        up = [[nn.Conv2d(width, 4 * width, 3, padding=1), nn.PixelShuffle(2)] for _ in range(2)]
        self.up = nn.Sequential(*(layer for step in up for layer in step), nn.Conv2d(width, 3, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        """x [N, 3, H, W]; returns [N, 3, 4 * H, 4 * W]."""
        x = first = self.first(x)
        for block in self.blocks:
            x = x + block(x) * 0.1
        return self.up(x + first)


def _unet() -> nn.Module:
    import_torchvision()
    from diffusers import UNet2DConditionModel

    model: nn.Module = UNet2DConditionModel(
        sample_size=32,
        block_out_channels=(64, 128, 256),
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=256,
        attention_head_dim=8,
        layers_per_block=1,
    )
    return model


def _vae() -> nn.Module:
    import_torchvision()
    from diffusers import AutoencoderKL

    model: nn.Module = AutoencoderKL(
        block_out_channels=(32, 64, 128),
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        latent_channels=4,
    )
    return model


def _vae_decoder() -> nn.Module:
    model: Any = _vae()
    decoder: nn.Module = model.decoder
    return decoder


def _vae_encoder() -> nn.Module:
    model: Any = _vae()
    encoder: nn.Module = model.encoder
    return encoder


def _noisy() -> dict[str, Any]:
    return {
        "sample": torch.randn(1, 4, 32, 32),
        "timestep": torch.tensor(500),
        "encoder_hidden_states": torch.randn(1, 16, 256),
    }


PROPOSALS = {"rpn_pre_nms_top_n_test": 200, "rpn_post_nms_top_n_test": 100}
SMALL = {"min_size": 320, "max_size": 320}


def _detectors() -> list[Row]:
    def row(name: str, what: str, folder_name: str, offset: float, **options: Any) -> Row:
        return Row(
            DETECTION,
            name,
            what,
            lambda: detector(folder_name, offset, **options),
            lambda: pictures((300, 320)),
            remark="boxes are PyTorch's: how many there are depends on the picture, so forward is no graph",
        )

    return [
        row("fasterrcnn", "Faster R-CNN, ResNet-50 FPN, 320", "fasterrcnn_resnet50_fpn", 6.5, **SMALL, **PROPOSALS),
        row("maskrcnn", "Mask R-CNN, ResNet-50 FPN, 320", "maskrcnn_resnet50_fpn", 6.5, **SMALL, **PROPOSALS),
        row("retinanet", "RetinaNet, ResNet-50 FPN, 320", "retinanet_resnet50_fpn", 7.6, **SMALL),
        row("ssdlite", "SSDLite, MobileNetV3, 320", "ssdlite320_mobilenet_v3_large", 13.0),
        row("fcos", "FCOS, ResNet-50 FPN, 320", "fcos_resnet50_fpn", 7.5, **SMALL),
    ]


def _segmentation() -> list[Row]:
    names = {
        "deeplabv3": ("DeepLabV3, MobileNetV3, 224", "deeplabv3_mobilenet_v3_large"),
        "fcn": ("FCN, ResNet-50, 224", "fcn_resnet50"),
        "lraspp": ("LR-ASPP, MobileNetV3, 224", "lraspp_mobilenet_v3_large"),
    }
    return [
        Row(
            SEGMENTATION,
            name,
            what,
            lambda full=full: from_folder("segmentation", full),  # type: ignore[misc]
            lambda: (torch.randn(1, 3, 224, 224),),
        )
        for name, (what, full) in names.items()
    ]


def _videos() -> list[Row]:
    names = {
        "r3d_18": ("R3D-18, 8 frames of 112", (8, 112)),
        "s3d": ("S3D, 16 frames of 224", (16, 224)),
        "mvit_v1_b": ("MViT-B, 16 frames of 224", (16, 224)),
        "swin3d_t": ("Swin3D-T, 8 frames of 112", (8, 112)),
    }
    return [
        Row(
            VIDEO,
            name,
            what,
            lambda name=name: from_folder("video", name),  # type: ignore[misc]
            lambda frames=frames, side=side: (torch.randn(1, 3, frames, side, side),),  # type: ignore[misc]
        )
        for name, (what, (frames, side)) in names.items()
    ]


def rows() -> list[Row]:
    """The rows."""
    return [
        *_detectors(),
        *_segmentation(),
        *_videos(),
        Row(DIFFUSION, "unet", "diffusers' UNet2DConditionModel, 14 M parameters, 32 x 32 latents", _unet, _noisy),
        Row(
            DIFFUSION,
            "vae-encoder",
            "the encoder of AutoencoderKL, 128 x 128",
            _vae_encoder,
            lambda: (torch.randn(1, 3, 128, 128),),
        ),
        Row(
            DIFFUSION,
            "vae-decoder",
            "the decoder of AutoencoderKL, 32 x 32 latents",
            _vae_decoder,
            lambda: (torch.randn(1, 4, 32, 32),),
        ),
        Row(
            SUPER_RESOLUTION,
            "edsr",
            "EDSR-like, 8 blocks of 64, four times 64 x 64",
            ResidualDense,
            lambda: (torch.rand(1, 3, 64, 64),),
        ),
    ]
