"""Rows of transformers' models, of medium size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.families.rows import Row
from tests.support.hugging_face import MEDIUM, models
from tests.support.torchvision_models import import_torchvision

TEXT, SPEECH, PICTURES, SCANS = "text", "speech", "pictures and text", "scans"
EXPERTS, DETECTION = "mixtures of experts", "detection"

_STACK: dict[str, Any] = {
    "hidden_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "intermediate_size": 1536,
}
_VOCABULARY: dict[str, Any] = {"vocab_size": 8000}
_SPECIAL: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def _build(name: str, head: str = "Model", **config: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import_torchvision()
        import transformers

        made = getattr(transformers, f"{name}Config")(**config)
        model: nn.Module = getattr(transformers, name + head)(made)
        return model

    return build


def _tokens(length: int, batch: int = 1) -> torch.Tensor:
    return torch.randint(5, 8000, (batch, length))


def _sentences() -> dict[str, Any]:
    mask = torch.ones(4, 32, dtype=torch.int64)
    mask[1, 20:] = mask[3, 9:] = 0
    return {"input_ids": _tokens(32, 4), "attention_mask": mask}


class Sentences(nn.Module):
    """As a SentenceTransformer: an encoder, the mean of its tokens, of unit length."""

    def __init__(self) -> None:
        super().__init__()
        self.model = _build("Bert", **{**_STACK, **_VOCABULARY, "num_hidden_layers": 6, "num_attention_heads": 12})()

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        hidden = self.model(input_ids, attention_mask=attention_mask).last_hidden_state
        weights = attention_mask.unsqueeze(-1).to(hidden.dtype)
        return nn.functional.normalize((hidden * weights).sum(1) / weights.sum(1), dim=1)


_WHISPER = {
    **_VOCABULARY,
    **_SPECIAL,
    "d_model": 384,
    "encoder_layers": 4,
    "decoder_layers": 4,
    "encoder_attention_heads": 6,
    "decoder_attention_heads": 6,
    "encoder_ffn_dim": 1536,
    "decoder_ffn_dim": 1536,
    "max_source_positions": 300,
    "max_target_positions": 64,
    "decoder_start_token_id": 3,
}


def _whisper_part(part: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model: Any = _build("Whisper", **_WHISPER)()
        found: nn.Module = getattr(model, part)
        return found

    return build


def _trocr() -> nn.Module:
    import_torchvision()
    import transformers

    encoder = transformers.ViTConfig(**{**_STACK, "image_size": 112, "patch_size": 16})
    decoder = transformers.TrOCRConfig(
        **_VOCABULARY,
        d_model=384,
        decoder_layers=3,
        decoder_attention_heads=6,
        decoder_ffn_dim=1536,
        cross_attention_hidden_size=384,
    )
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    config.decoder_start_token_id, config.pad_token_id = 2, 1
    model: nn.Module = transformers.VisionEncoderDecoderModel(config)
    return model


_EXPERTS = {**_VOCABULARY, **_STACK, "num_key_value_heads": 2, "num_hidden_layers": 2, "use_cache": False}


def _experts(name: str, what: str, kind: str, **config: Any) -> Row:
    return Row(
        EXPERTS,
        name,
        f"{what}, 2 layers of 384, 8 experts, 1 x 32",
        _build(kind, "ForCausalLM", **{**_EXPERTS, **config}),
        lambda: {"input_ids": _tokens(32)},
    )


_MINIMAX = {"num_local_experts": 8, "head_dim": 64, "intermediate_size": 512, "num_hidden_layers": 2}


def _detr_backbone() -> Any:
    import_torchvision()
    import transformers

    config: Any = transformers.ResNetConfig
    return config(
        embedding_size=64,
        hidden_sizes=[64, 128, 256, 512],
        depths=[2, 2, 2, 2],
        layer_type="basic",
        out_features=["stage2", "stage3", "stage4"],
    )


def _deformable_detr() -> nn.Module:
    return _build(
        "DeformableDetr",
        "ForObjectDetection",
        use_timm_backbone=False,
        backbone_config=_detr_backbone(),
        backbone=None,
        use_pretrained_backbone=False,
        d_model=128,
        encoder_layers=2,
        decoder_layers=2,
        encoder_ffn_dim=256,
        decoder_ffn_dim=256,
        num_queries=50,
        num_feature_levels=3,
        disable_custom_kernels=True,
    )()


def rows() -> list[Row]:
    """The rows."""
    wave = lambda: {"input_values": torch.randn(1, 16000)}  # noqa: E731
    wav2vec: dict[str, Any] = {"vocab_size": 32, **_STACK, "num_conv_pos_embedding_groups": 16}
    clip = models(MEDIUM)["clip"]
    return [
        Row(TEXT, "minilm", "MiniLM-like sentence embedding, 6 x 384, 4 x 32, padded", Sentences, _sentences),
        Row(
            PICTURES,
            "clip",
            "CLIP, 4 x 384 twice, 128 tokens, 112 x 112",
            lambda: _build("CLIP", **clip.config)(),
            clip.inputs,
        ),
        Row(
            PICTURES,
            "trocr",
            "TrOCR-like: ViT 4 x 384 and decoder 3 x 384, 24 tokens",
            _trocr,
            lambda: {"pixel_values": torch.randn(1, 3, 112, 112), "decoder_input_ids": _tokens(24)},
        ),
        Row(SPEECH, "wav2vec2", "wav2vec2, 4 x 384, 1 s", _build("Wav2Vec2", **wav2vec), wave),
        Row(SPEECH, "sew", "SEW, 4 x 384, 1 s", _build("SEW", **wav2vec, squeeze_factor=2), wave),
        Row(
            SPEECH,
            "wav2vec2-bert",
            "Wav2Vec2-BERT, 4 x 384, 100 frames",
            _build("Wav2Vec2Bert", **_STACK, vocab_size=32, feature_projection_input_dim=160),
            lambda: {"input_features": torch.randn(1, 100, 160)},
        ),
        Row(
            SPEECH,
            "conformer",
            "Wav2Vec2-Conformer, 4 x 384, 1 s",
            _build("Wav2Vec2Conformer", **wav2vec, position_embeddings_type="relative"),
            wave,
        ),
        Row(
            SPEECH,
            "whisper-encoder",
            "Whisper's encoder, 4 x 384, 6 s",
            _whisper_part("encoder"),
            lambda: {"input_features": torch.randn(1, 80, 600)},
        ),
        Row(
            SPEECH,
            "whisper-decoder",
            "Whisper's decoder, 4 x 384, 16 tokens",
            _whisper_part("decoder"),
            lambda: {"input_ids": _tokens(16), "encoder_hidden_states": torch.randn(1, 300, 384), "use_cache": False},
        ),
        Row(
            SCANS,
            "mamba",
            "Mamba, 2 x 256, 1 x 32",
            _build("Mamba", **_VOCABULARY, hidden_size=256, num_hidden_layers=2, state_size=16, use_cache=False),
            lambda: {"input_ids": _tokens(32)},
        ),
        _experts("phimoe", "PhiMoE-like", "Phimoe", num_local_experts=8, intermediate_size=512),
        _experts("mixtral", "Mixtral-like", "Mixtral", num_local_experts=8, intermediate_size=512),
        _experts(
            "gpt-oss",
            "gpt-oss-like",
            "GptOss",
            num_local_experts=8,
            intermediate_size=512,
            head_dim=64,
            num_experts_per_tok=2,
        ),
        _experts("minimax", "MiniMax-like", "MiniMax", **_MINIMAX),
        Row(
            DETECTION,
            "deformable-detr",
            "Deformable DETR, ResNet-18 stages, 2 + 2 x 128, 160 x 192",
            _deformable_detr,
            lambda: {
                "pixel_values": torch.randn(1, 3, 160, 192),
                "pixel_mask": torch.ones(1, 160, 192, dtype=torch.int64),
            },
            "samples of places that depend on the picture are PyTorch's, by its kernel for bags of rows",
        ),
    ]
