"""Rows of torchvision's detectors, segmentation and video networks, and of networks that make images."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.families.rows import Row
from tests.support.answers import TOLERANCE
from tests.support.torchvision_models import import_torchvision, provide_nms, randomize

DETECTION, SEGMENTATION, VIDEO = "detection", "segmentation", "video"
DIFFUSION, SUPER_RESOLUTION = "diffusion", "super-resolution"


def _from(folder: str, name: str, **options: Any) -> nn.Module:
    """torchvision's model with random weights and statistics."""
    torchvision = import_torchvision()
    provide_nms()
    model: nn.Module = getattr(getattr(torchvision.models, folder), name)(
        weights=None, **({} if folder == "video" else {"weights_backbone": None}), **options
    )
    randomize(model.eval())
    return model


def _pictures(*sides: tuple[int, int]) -> tuple[list[Tensor]]:
    return ([torch.rand(3, *side) for side in sides],)


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


_PROPOSALS = {"rpn_pre_nms_top_n_test": 200, "rpn_post_nms_top_n_test": 100}
# Of two stages with random weights, eager's own scores differ from float64's by 7e-4, and ours by 4e-4.
_TWO_STAGES = 1e-3
_SMALL = {"min_size": 320, "max_size": 320}


def _detectors() -> list[Row]:
    def row(name: str, what: str, folder_name: str, **options: Any) -> Row:
        return Row(
            DETECTION,
            name,
            what,
            lambda: _from("detection", folder_name, **options),
            lambda: _pictures((300, 320)),
            tolerance=_TWO_STAGES if "rcnn" in name else TOLERANCE,
            remark="boxes are PyTorch's: how many there are depends on the picture, so forward is no graph",
        )

    return [
        row("fasterrcnn", "Faster R-CNN, ResNet-50 FPN, 320", "fasterrcnn_resnet50_fpn", **_SMALL, **_PROPOSALS),
        row("maskrcnn", "Mask R-CNN, ResNet-50 FPN, 320", "maskrcnn_resnet50_fpn", **_SMALL, **_PROPOSALS),
        row("retinanet", "RetinaNet, ResNet-50 FPN, 320", "retinanet_resnet50_fpn", **_SMALL),
        row("ssdlite", "SSDLite, MobileNetV3, 320", "ssdlite320_mobilenet_v3_large"),
        row("fcos", "FCOS, ResNet-50 FPN, 320", "fcos_resnet50_fpn", **_SMALL),
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
            lambda full=full: _from("segmentation", full),  # type: ignore[misc]
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
            lambda name=name: _from("video", name),  # type: ignore[misc]
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
