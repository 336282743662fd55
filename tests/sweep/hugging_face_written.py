"""Configurations and arguments, written by hand, of architectures whose numbers do not fit when rules shrink them.

Each is as small as one made by rules: two layers of 64 or so, with random weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tests.sweep.case import Case

Numbers = dict[str, Any]  # of a configuration, by name

_VOCABULARY, _LENGTH, _BATCH, _IMAGE = 160, 12, 2, 5  # _IMAGE is the token that stands for a part of an image
_LAYERS: Numbers = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
_WORDS: Numbers = {"vocab_size": _VOCABULARY, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
_TEXT: Numbers = {**_LAYERS, **_WORDS, "num_key_value_heads": 2, "head_dim": 16}
_VISION: Numbers = {**_LAYERS, "image_size": 56, "patch_size": 14, "initializer_range": 0.02}  # 16 patches
_LATENT: Numbers = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
_LATENT |= {"v_head_dim": 16}
_HEARD: Numbers = {"hidden_size": 64, "vocab_size": 8, "vocab_offset": 152, "input_feat_size": 32}
_HEARD |= {"conf_num_hidden_layers": 2}
_HEARD |= {"conf_num_attention_heads": 4, "sscp_conv_channel_size": [16, 8]}
_EXPERTS: Numbers = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
_EXPERTS |= {"n_shared_experts": 1}


_ERNIE_VISION: Numbers = {"depth": 2, "hidden_size": 64, "num_heads": 4, "intermediate_size": 96}
_QWEN_VISION: Numbers = {**_ERNIE_VISION, "out_hidden_size": 64, "num_position_embeddings": 64}
_ROPE: Numbers = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}


def _config(kind: str, **numbers: Any) -> Any:
    import transformers

    return transformers.CONFIG_MAPPING[kind](**numbers)


def _case(kind: str, numbers: Mapping[str, Any], **kwargs: Any) -> Case:
    """The model that AutoModel makes of these numbers."""
    import transformers

    torch.manual_seed(0)
    return Case(transformers.AutoModel.from_config(_config(kind, **numbers)).eval().float(), (), kwargs)


def _noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def _ids(*shape: int) -> Tensor:
    return torch.randint(6, 100, shape or (_BATCH, _LENGTH), generator=torch.Generator().manual_seed(1))


def _about(images: int, rows: int = _BATCH) -> dict[str, Tensor]:
    """Texts that begin with an image of so many tokens, all of them attended to."""
    ids = torch.cat([torch.full((rows, images), _IMAGE), _ids(rows, _LENGTH)], 1)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _texts() -> dict[str, Tensor]:
    """Two texts, the second of which is shorter."""
    mask = torch.ones(_BATCH, _LENGTH, dtype=torch.int64)
    mask[-1, _LENGTH * 2 // 3 :] = 0
    return {"input_ids": _ids(), "attention_mask": mask}


# Vision and language


def _of_queries(kind: str, *before: int, **kwargs: Any) -> Case:
    """A language model that reads an image by way of queries: BLIP-2 and those after it."""
    text: Numbers = {**_LAYERS, **_WORDS, "model_type": "opt", "ffn_dim": 96, "word_embed_proj_dim": 64}
    queries: Numbers = {**_LAYERS, "vocab_size": _VOCABULARY, "encoder_hidden_size": 64}
    config: Numbers = {"vision_config": _VISION, "qformer_config": queries, "text_config": text, "num_query_tokens": 4}
    images = _noise(_BATCH, *before, 3, 56, 56)
    config |= {"image_token_index": _IMAGE, "video_token_index": _IMAGE}
    return _case(kind, config, pixel_values=images, **kwargs)


def _blip_2() -> Case:
    return _of_queries("blip-2", **_about(4))


def _instructblip() -> Case:
    return _of_queries("instructblip", qformer_input_ids=_ids(), **_about(4))


def _instructblipvideo() -> Case:
    frames = 4
    return _of_queries("instructblipvideo", frames, qformer_input_ids=_ids(), **_about(4 * frames))


class _Llama4(nn.Module):
    """Llama 4 step by step: its own forward asks the language model for what it does not return."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor, pixel_values: Tensor) -> Any:
        words = self.model.get_input_embeddings()(input_ids)
        seen = self.model.get_image_features(pixel_values=pixel_values, return_dict=True).last_hidden_state
        seen = self.model.multi_modal_projector(seen.flatten(0, -2))
        both = words.masked_scatter((input_ids == _IMAGE).unsqueeze(-1), seen)
        return self.model.language_model(inputs_embeds=both, attention_mask=attention_mask)


def _llama4() -> Case:
    text: Numbers = {**_TEXT, "intermediate_size_mlp": 96, "num_local_experts": 4, "interleave_moe_layer_step": 2}
    vision: Numbers = {**_VISION, "intermediate_size": 256, "vision_output_dim": 64}
    vision |= {"projector_input_dim": 64, "projector_output_dim": 64}
    case = _case("llama4", {"text_config": {**text, "attention_chunk_size": 8}, "vision_config": vision})
    return Case(_Llama4(case.model).eval(), (), {"pixel_values": _noise(_BATCH, 3, 56, 56), **_about(4)})


def _kosmos_2() -> Case:
    text: Numbers = {"embed_dim": 64, "layers": 2, "ffn_dim": 96, "attention_heads": 4, **_WORDS}
    texts = _about(8)
    places = torch.zeros_like(texts["input_ids"])
    places[:, :8] = 1
    numbers: Numbers = {"text_config": text, "vision_config": _VISION, "latent_query_num": 8}
    pixels = _noise(_BATCH, 3, 56, 56)
    return _case("kosmos-2", numbers, pixel_values=pixels, image_embeds_position_mask=places, **texts)


def _idefics() -> Case:
    vision: Numbers = {**_VISION, "embed_dim": 64}
    numbers: Numbers = {**_LAYERS, **_WORDS, "vision_config": vision, "alpha_initializer": "ones"}
    numbers |= {"use_resampler": True}
    perceiver: Numbers = {"use_resampler": True, "resampler_n_latents": 8, "resampler_depth": 2}
    numbers["perceiver_config"] = {**perceiver, "resampler_n_heads": 4, "resampler_head_dim": 16}
    seen = torch.ones(_BATCH, _LENGTH, 1, dtype=torch.int64)
    return _case("idefics", numbers, pixel_values=_noise(_BATCH, 1, 3, 56, 56), image_attention_mask=seen, **_texts())


def _emu3() -> Case:
    codes = {f"<|visual token {i:06d}|>": 20 + i for i in range(16)}
    codes |= {"<image>": _IMAGE, "<|extra_200|>": 40}  # the latter ends a row
    encoder: Numbers = {"codebook_size": 16, "base_channels": 64, "hidden_size": 64, "channel_multiplier": [1, 1]}
    numbers: Numbers = {"text_config": _TEXT, "vq_config": {**encoder, "num_res_blocks": 1, "embed_dim": 4}}
    numbers |= {"vocabulary_map": codes}
    sizes = torch.tensor([[16, 16]] * _BATCH)
    return _case("emu3", numbers, pixel_values=_noise(_BATCH, 3, 16, 16), image_sizes=sizes, **_about(8 * 9))


def _of_patches(kind: str, config: Mapping[str, Any], width: int, *also: str) -> Case:
    """A model that reads images cut into 4 x 4 patches, of which each 2 x 2 are one token."""
    texts = _about(4)
    kinds = (texts["input_ids"] == _IMAGE).long()
    grid = torch.tensor([[1, 4, 4]] * _BATCH)
    more = dict.fromkeys(("mm_token_type_ids", *also), kinds)
    pixels = _noise(16 * _BATCH, width)
    return _case(kind, {**config, "image_token_id": _IMAGE}, pixel_values=pixels, image_grid_thw=grid, **texts, **more)


def _ernie4_5_vl_moe() -> Case:
    rope = {**_ROPE, "mrope_section": [3, 3, 2]}
    text: Numbers = {**_TEXT, "moe_intermediate_size": [48, 32], "moe_k": 2, "moe_num_experts": 4}
    text |= {"rope_parameters": rope}
    config: Numbers = {"vision_config": _ERNIE_VISION, "text_config": text}
    return _of_patches("ernie4_5_vl_moe", config, 3 * 14 * 14, "moe_mm_token_type_ids")


def _compass_text() -> Numbers:
    rope = {**_ROPE, "mrope_interleaved": True}
    return {**_TEXT, "rope_parameters": {"full_attention": rope}}


def _cohere_compass_text() -> Case:
    return _case("cohere_compass_text", _compass_text(), **_texts())


def _cohere_compass() -> Case:
    vision = {**_QWEN_VISION, "deepstack_visual_indexes": [0]}
    return _of_patches("cohere_compass", {"vision_config": vision, "text_config": _compass_text()}, 3 * 2 * 16 * 16)


def _qwen4_text() -> Numbers:
    rope = {**_ROPE, "mrope_interleaved": True}
    linear: Numbers = {"key_head_dim": 16, "value_head_dim": 16, "num_key_heads": 2, "num_value_heads": 4}
    index: Numbers = {"n_heads": 4, "kv_heads": 1, "head_dim": 16, "budget": 8, "compress_ratio": 4}
    named = {f"linear_{name}": value for name, value in linear.items()}
    named |= {f"indexer_{name}": value for name, value in index.items()}
    experts: Numbers = {"moe_intermediate_size": 48, "shared_expert_intermediate_size": 48}
    experts |= {"num_experts": 4, "num_experts_per_tok": 2}
    kinds = ["linear_attention", "indexed_attention"]
    return {**_TEXT, **named, **experts, "layer_types": kinds, "hc_lowrank": 16, "rope_parameters": rope}


def _qwen4_exp_text() -> Case:
    return _case("qwen4_exp_text", _qwen4_text(), **_texts())


def _qwen4_exp() -> Case:
    return _of_patches("qwen4_exp", {"vision_config": _QWEN_VISION, "text_config": _qwen4_text()}, 3 * 2 * 16 * 16)


def _step3p7() -> Case:
    vision: Numbers = {**_VISION, "image_size": 112, "mlp_ratio": 1.5}
    text: Numbers = {**_TEXT, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    text |= {"share_expert_dim": 48, "mlp_layer_types": ["dense", "sparse"], "sliding_window": 8}
    numbers: Numbers = {"vision_config": vision, "text_config": text, "image_token_id": _IMAGE}
    return _case("step3p7", numbers, pixel_values=_noise(_BATCH, 3, 112, 112), **_about(4))


def _granite4_vision() -> Case:
    vision: Numbers = {**_VISION, "model_type": "clip_vision_model"}
    queries: Numbers = {**_LAYERS, "model_type": "blip_2_qformer", "vocab_size": _VOCABULARY}
    numbers: Numbers = {"vision_config": vision, "text_config": _TEXT, "qformer_config": queries}
    numbers |= {"downsample_rate": "2/4"}
    numbers |= {"image_grid_pinpoints": [[56, 56]], "deepstack_layer_map": [[-1, 0]], "spatial_target_layers": [1]}
    sizes = torch.tensor([[56, 56]] * _BATCH)
    tokens = 4 + 2 * 3  # the whole image, and its rows of two with their ends
    images = _noise(_BATCH, 2, 3, 56, 56)
    numbers |= {"image_token_index": _IMAGE}
    return _case("granite4_vision", numbers, pixel_values=images, image_sizes=sizes, **_about(tokens))


def _deepseek_ocr2() -> Case:
    sam: Numbers = {**_LAYERS, "output_channels": 32, "image_size": 64, "patch_size": 8, "window_size": 4}
    sam |= {"mlp_dim": 96}
    sam |= {"global_attn_indexes": [1], "downsample_channels": [48, 64]}
    vision: Numbers = {"sam_config": sam, "encoder_config": {**_TEXT, "vocab_size": 8}}
    text: Numbers = {**_TEXT, **_EXPERTS, "mlp_layer_types": ["dense", "sparse"], "n_group": 1, "topk_group": 1}
    numbers: Numbers = {"vision_config": vision, "text_config": text, "image_token_id": _IMAGE}
    return _case("deepseek_ocr2", numbers, pixel_values=_noise(_BATCH, 3, 64, 64), **_about(144 + 1))


def _perception_lm() -> Case:
    encoder: Numbers = {"embed_dim": 64, "depth": 2, "num_heads": 4, "img_size": [64, 64], "global_pool": ""}
    encoder |= {"patch_size": 16}
    encoder |= {"ref_feat_shape": [4, 4], "use_post_transformer_norm": False, "init_values": 0.1}
    vision = _config("timm_wrapper", architecture="vit_pe_lang_large_patch14_448", model_args=encoder)
    numbers: Numbers = {"vision_config": vision, "text_config": {**_TEXT, "model_type": "llama"}}
    numbers |= {"image_token_id": _IMAGE}
    numbers |= {"vision_use_cls_token": True, "video_token_id": 4}
    return _case("perception_lm", numbers, pixel_values=_noise(_BATCH, 1, 3, 64, 64), **_about(16))


def _tvp() -> Case:
    backbone: Numbers = {"model_type": "resnet", "embedding_size": 16, "hidden_sizes": [16, 16, 32, 64]}
    backbone |= {"depths": [1, 1, 1, 1]}
    backbone |= {"layer_type": "basic", "out_features": ["stage4"]}
    numbers: Numbers = {**_LAYERS, **_WORDS, "backbone_config": backbone, "num_frames": 2, "max_img_size": 128}
    numbers |= {"visual_prompt_size": 16, "hidden_act": "gelu"}
    return _case("tvp", numbers, pixel_values=_noise(1, 2, 3, 128, 128), **_about(0, 1))


_MOBILE: Numbers = {"architecture": "mobilenetv5_300m_enc", "hidden_size": 2048}
_MOBILE |= {"model_args": {"channel_multiplier": 0.125, "msfa_output_resolution": 4}}  # 16 tokens an image


def _gemma3n() -> Case:
    vision = {**_MOBILE, "vocab_size": 8, "vocab_offset": 144}
    text: Numbers = {**_TEXT, "vocab_size_per_layer_input": 144, "hidden_size_per_layer_input": 16, "laurel_rank": 8}
    text |= {"num_kv_shared_layers": 0, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
    numbers: Numbers = {"text_config": text, "vision_config": vision, "audio_config": _HEARD, "image_token_id": _IMAGE}
    numbers |= {"vision_soft_tokens_per_image": 16, "audio_token_id": 4}
    return _case("gemma3n", numbers, pixel_values=_noise(_BATCH, 3, 64, 64), **_about(16))


def _gemma3n_vision() -> Case:
    return _case("gemma3n_vision", _MOBILE, pixel_values=_noise(_BATCH, 3, 64, 64))


# Images

_SWIN: Numbers = {"model_type": "swin", "embed_dim": 16, "depths": [1, 1, 1, 1], "num_heads": [1, 2, 4, 4]}
_SWIN |= {"window_size": 4, "image_size": 128}


def _detr(kind: str, **backbone: Any) -> Case:
    """A detector whose encoder looks at windows of an image of 64 x 64."""
    encoder = {**_LAYERS, "num_hidden_layers": 3, "image_size": 64, "patch_size": 8, **backbone}
    numbers: Numbers = {"backbone_config": encoder, "d_model": 64, "decoder_ffn_dim": 96, "decoder_layers": 2}
    numbers |= {"decoder_self_attention_heads": 4, "decoder_cross_attention_heads": 4, "projector_scale_factors": [1.0]}
    return _case(kind, {**numbers, "num_queries": 8, "group_detr": 2}, pixel_values=_noise(_BATCH, 3, 64, 64))


def _lw_detr() -> Case:
    windows: Numbers = {"num_windows": 4, "window_block_indices": [0], "pretrain_image_size": 64}
    return _detr("lw_detr", model_type="lw_detr_vit", out_indices=[1, 2], **windows)


def _rf_detr() -> Case:
    return _detr("rf_detr", model_type="rf_detr_dinov2", out_indices=[1, 3], num_windows=2)


def _oneformer() -> Case:
    backbone = {**_SWIN, "out_features": ["stage1", "stage2", "stage3", "stage4"]}
    numbers: Numbers = {"backbone_config": backbone, "hidden_dim": 64, "conv_dim": 64, "mask_dim": 64}
    numbers |= {"num_attention_heads": 4}
    numbers |= {"encoder_layers": 2, "decoder_layers": 3, "encoder_feedforward_dim": 96, "dim_feedforward": 96}
    numbers |= {"num_queries": 8, "task_seq_len": _LENGTH, "text_encoder_width": 64, "text_encoder_n_ctx": 4}
    return _case("oneformer", numbers, pixel_values=_noise(1, 3, 128, 128), task_inputs=_ids(1, _LENGTH).float())


def _seggpt() -> Case:
    numbers: Numbers = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "mlp_dim": 96}
    numbers |= {"patch_size": 16}
    numbers |= {"image_size": [128, 64], "intermediate_hidden_state_indices": [1, 2], "merge_index": 0}
    numbers |= {"decoder_hidden_size": 16, "pretrain_image_size": 64}
    names = ("pixel_values", "prompt_pixel_values", "prompt_masks")
    return _case("seggpt", numbers, **{name: _noise(1, 3, 64, 64) for name in names})


def _minicpmv4_7_vision(kind: str = "minicpmv4_7_vision") -> Case:
    numbers: Numbers = {**_VISION, "insert_layer_id": 0}
    return _case(kind, numbers, pixel_values=_noise(1, 3, 14, 14 * 16), target_sizes=torch.tensor([[4, 4]]))


def _minicpm_ocr_vision() -> Case:
    return _minicpmv4_7_vision("minicpm_ocr_vision")


def _omdet_turbo() -> Case:
    backbone = {**_SWIN, "out_indices": [2, 3, 4]}
    text: Numbers = {**_LAYERS, "model_type": "clip_text_model", "hidden_size": 48, "vocab_size": _VOCABULARY}
    numbers: Numbers = {"backbone_config": backbone, "text_config": text, "image_size": 128, "num_queries": 8}
    numbers |= {f"text_projection_{side}_dim": 48 for side in ("in", "out")}
    numbers |= {"task_encoder_hidden_dim": 96, "class_embed_dim": 48, "encoder_in_channels": [32, 64, 128]}
    numbers |= {"vision_features_channels": [64, 64, 64], "disable_custom_kernels": True, "decoder_num_layers": 2}
    for part in ("encoder", "decoder"):
        numbers |= {f"{part}_hidden_dim": 64, f"{part}_dim_feedforward": 96}
    numbers |= {"encoder_attention_heads": 4, "decoder_num_heads": 4, "apply_layernorm_after_vision_backbone": False}
    words: Numbers = {"classes_input_ids": _ids(3, 5), "tasks_input_ids": _ids(1, _LENGTH)}
    masks = {name.replace("input_ids", "attention_mask"): torch.ones_like(ids) for name, ids in words.items()}
    words["classes_structure"] = torch.tensor([3])
    return _case("omdet-turbo", numbers, pixel_values=_noise(1, 3, 128, 128), **words, **masks)


def _timm_backbone() -> Case:
    return _case("timm_backbone", {"backbone": "resnet18"}, pixel_values=_noise(1, 3, 64, 64))


def _inkling2_vision() -> Case:
    numbers: Numbers = {**_LAYERS, "patch_size": 4, "posemb_grid_size": 8, "projection_hidden_dim": 64}
    numbers |= {"text_hidden_size": 64}
    return _case("inkling2_vision", numbers, pixel_values=_noise(4, 8, 8, 3), image_grid_thw=torch.tensor([[1, 2, 2]]))


def _pe_video() -> Case:
    texts: Numbers = {**_LAYERS, **_WORDS, "model_type": "modernbert", "cls_token_id": 0, "sep_token_id": 2}
    numbers: Numbers = {"text_config": texts, "video_config": _pe_frames()}
    return _case("pe_video", numbers, pixel_values_videos=_noise(_BATCH, 3, 3, 64, 64), **_texts())


def _pe_frames() -> Numbers:
    encoder: Numbers = {"embed_dim": 64, "depth": 2, "num_heads": 4, "img_size": [64, 64], "patch_size": 16}
    encoder |= {"ref_feat_shape": [4, 4], "global_pool": "map"}
    named: Numbers = {"architecture": "vit_pe_core_large_patch14_336", "do_pooling": True, "num_classes": 32}
    return {**_LAYERS, "head_dim": 16, "vision_config": {**named, "model_args": encoder}}


def _pe_video_encoder() -> Case:
    return _case("pe_video_encoder", _pe_frames(), pixel_values_videos=_noise(_BATCH, 3, 3, 64, 64))


def _depth_pro() -> Case:
    part: Numbers = {**_LAYERS, "model_type": "dinov2", "image_size": 64, "patch_size": 16}
    numbers: Numbers = {f"{name}_model_config": dict(part) for name in ("image", "patch", "fov")}
    numbers |= {"patch_size": 64, "intermediate_hook_ids": [1, 0], "intermediate_feature_dims": [32, 32]}
    numbers |= {"scaled_images_feature_dims": [64, 64, 32], "fusion_hidden_size": 32, "use_fov_model": True}
    return _case("depth_pro", numbers, pixel_values=_noise(1, 3, 256, 256))


def _edgetam_vision() -> Numbers:
    stages: Numbers = {"in_chans": 3, "features_only": True, "out_indices": [0, 1, 2, 3]}
    backbone = _config("timm_wrapper", architecture="repvit_m1", model_args=stages)
    sizes = [[64, 64], [32, 32], [16, 16]]
    return {"backbone_config": backbone, "backbone_feature_sizes": sizes, "fpn_hidden_size": 64}


def _edgetam_vision_model() -> Case:
    return _case("edgetam_vision_model", _edgetam_vision(), pixel_values=_noise(1, 3, 256, 256))


def _edgetam() -> Case:
    prompts: Numbers = {"hidden_size": 64, "image_size": 256, "patch_size": 16}
    decoder: Numbers = {"hidden_size": 64, "mlp_dim": 96, "num_attention_heads": 4, "iou_head_hidden_dim": 32}
    vision: Numbers = {"model_type": "edgetam_vision_model", **_edgetam_vision()}
    numbers: Numbers = {"vision_config": vision, "prompt_encoder_config": prompts, "mask_decoder_config": decoder}
    points: Numbers = {"input_points": torch.tensor([[[[60.0, 80.0]]]])}
    points |= {"input_labels": torch.ones(1, 1, 1, dtype=torch.int32)}
    return _case("edgetam", numbers, pixel_values=_noise(1, 3, 256, 256), **points)


# Texts


def _funnel() -> Case:
    numbers: Numbers = {"d_model": 64, "n_head": 4, "d_head": 16, "d_inner": 96, "block_sizes": [1, 1, 1], **_WORDS}
    return _case("funnel", {**numbers, "num_decoder_layers": 1, "architectures": ["FunnelModel"]}, **_texts())


def _dots1() -> Case:
    return _case("dots1", {**_TEXT, **_EXPERTS, "first_k_dense_replace": 1}, **_texts())


def _blt() -> Case:
    part: Numbers = {**_LAYERS, "vocab_size": 260, "num_hidden_layers": 1}
    numbers: Numbers = {f"{name}_config": dict(part) for name in ("patcher", "encoder", "decoder", "global")}
    for name in ("encoder", "decoder"):
        numbers[f"{name}_config"]["hidden_size_global"] = 128
    numbers["global_config"] |= {"hidden_size": 128, "num_hidden_layers": 2}
    return _case("blt", {**numbers, "encoder_hash_byte_group_vocab": 500}, input_ids=_ids(), use_cache=False)


def _longcat_flash() -> Case:
    numbers: Numbers = {**_WORDS, **_LATENT, "hidden_size": 64, "num_layers": 1, "num_attention_heads": 4}
    numbers |= {"head_dim": 8}
    numbers |= {"ffn_hidden_size": 96, "expert_ffn_hidden_size": 48, "moe_topk": 2, "n_routed_experts": 4}
    return _case("longcat_flash", {**numbers, "zero_expert_num": 2}, **_texts())


def _bailing_hybrid() -> Case:
    numbers: Numbers = {**_TEXT, **_LATENT, "q_lora_rank": None, "num_key_value_heads": 4, "moe_intermediate_size": 48}
    numbers |= {"num_local_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    numbers |= {"layer_types": ["linear_attention", "full_attention"], "first_k_dense_replace": 1}
    return _case("bailing_hybrid", numbers, **_texts())


def _muse_glimmer_assistant() -> Case:
    numbers: Numbers = {**_TEXT, "sliding_window": 8, "target_layer_ids": [1, 2]}
    states: Numbers = {"noise_embeds": _noise(_BATCH, 4, 64), "context_hidden_states": _noise(_BATCH, _LENGTH, 2 * 64)}
    return _case("muse_glimmer_assistant", numbers, **states)


def _perceiver() -> Case:
    numbers: Numbers = {"num_latents": 16, "d_latents": 64, "d_model": 48, "num_self_attends_per_block": 2}
    numbers |= {"num_self_attention_heads": 4, "num_cross_attention_heads": 4}
    return _case("perceiver", numbers, inputs=_noise(_BATCH, _LENGTH, 48))


def _xlstm() -> Case:
    numbers: Numbers = {"hidden_size": 128, "embedding_dim": 128, "num_hidden_layers": 2, "num_blocks": 2}
    numbers |= {"num_heads": 2}
    return _case("xlstm", {**numbers, **_WORDS, "chunk_size": 4}, input_ids=_ids())


def _xmod() -> Case:
    numbers: Numbers = {**_LAYERS, **_WORDS, "languages": ["en_XX", "de_DE"], "default_language": "de_DE"}
    return _case("xmod", numbers, **_texts())


def _zamba() -> Case:
    kinds = ["linear_attention", "hybrid", "linear_attention", "hybrid"]
    numbers: Numbers = {**_TEXT, "num_hidden_layers": 4, "num_key_value_heads": 4, "layers_block_type": kinds}
    return _case("zamba", {**numbers, "attention_head_dim": 32, "head_dim": 32, "mamba_d_state": 8}, **_texts())


def _zamba2() -> Case:
    kinds = ["linear_attention", "hybrid", "linear_attention", "hybrid"]
    numbers: Numbers = {**_LAYERS, **_WORDS, "num_hidden_layers": 4, "layers_block_type": kinds, "mamba_d_state": 16}
    return _case("zamba2", {**numbers, "chunk_size": 8}, **_texts())


# Sound


def _clap() -> Case:
    audio: Numbers = {"spec_size": 128, "num_mel_bins": 32, "patch_embeds_hidden_size": 16, "hidden_size": 128}
    audio |= {"depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 4, 4], "window_size": 4}
    text: Numbers = {**_LAYERS, **_WORDS, "max_position_embeddings": 64}
    sound = _noise(_BATCH, 1, 512, 32)
    whole = torch.zeros(_BATCH, 1, dtype=torch.bool)
    numbers: Numbers = {"text_config": text, "audio_config": audio, "projection_dim": 32}
    return _case("clap", numbers, input_features=sound, is_longer=whole, **_texts())


def _gemma3n_audio() -> Case:
    padded = torch.zeros(_BATCH, 96, dtype=torch.bool)
    return _case("gemma3n_audio", _HEARD, audio_mel=_noise(_BATCH, 96, 32), audio_mel_mask=padded)


def _speecht5() -> Case:
    """Without the layers before it, which belong to what it is used for: it takes hidden states."""
    numbers: Numbers = {"hidden_size": 64, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 96}
    numbers |= {"decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 96}
    return _case("speecht5", numbers, input_values=_noise(_BATCH, 9, 64), decoder_input_values=_noise(_BATCH, 5, 64))


def _voxtral_realtime() -> Case:
    audio: Numbers = {**_LAYERS, "head_dim": 16, "num_mel_bins": 32, "vocab_size": 8, "sliding_window": 16}
    numbers: Numbers = {"audio_config": audio, "text_config": {**_TEXT, "sliding_window": 8}}
    return _case("voxtral_realtime", numbers, input_features=_noise(_BATCH, 32, 8 * _LENGTH), **_texts())


_CODEC: Numbers = {"num_filters": 8, "hidden_size": 16, "downsampling_ratios": [2, 2, 4], "depths": [1, 1, 1, 1]}
_CODEC |= {"initializer_range": 0.2, "layer_scale_init_value": 0.1}  # so that something is left of a sound


def _vibevoice_acoustic_tokenizer_encoder() -> Case:
    return _case("vibevoice_acoustic_tokenizer_encoder", _CODEC, hidden_states=_noise(_BATCH, 1, 640))


def _vibevoice_acoustic_tokenizer_decoder() -> Case:
    return _case("vibevoice_acoustic_tokenizer_decoder", _CODEC, hidden_states=_noise(_BATCH, 16, 10))


def _vibevoice_acoustic_tokenizer() -> Case:
    """Without the noise that it adds to what it encodes."""
    return _case("vibevoice_acoustic_tokenizer", _CODEC, input_values=_noise(_BATCH, 1, 160), sample=False)


def _vibevoice() -> Case:
    tokenizers: Numbers = {"audio_config": {"model_type": "vibevoice_acoustic_tokenizer", **_CODEC}}
    tokenizers["semantic_model_config"] = {"model_type": "vibevoice_acoustic_tokenizer_encoder", **_CODEC}
    numbers: Numbers = {"text_config": {**_TEXT, "model_type": "qwen2"}, **tokenizers, "audio_token_id": _IMAGE}
    numbers["diffusion_head_config"] = {"num_hidden_layers": 1, "intermediate_size": 96}
    sound: Numbers = {"input_values": _noise(_BATCH, 1, 64), "padding_mask": torch.ones(_BATCH, 64, dtype=torch.bool)}
    return _case("vibevoice", {**numbers, **_WORDS}, sample=False, **sound, **_about(4))


def _fun_asr_nano_encoder() -> Case:
    numbers: Numbers = {**_LAYERS, "num_mel_bins": 16, "num_stacked_frames": 2, "num_timestamp_prediction_layers": 1}
    there = torch.ones(_BATCH, _LENGTH, dtype=torch.int64)
    sound = _noise(_BATCH, _LENGTH, 2 * 16)
    return _case("fun_asr_nano_encoder", numbers, input_features=sound, input_features_mask=there)


def _muse_spark_audio() -> Case:
    numbers: Numbers = {"patch_sizes": [4, 3, 2, 2], "hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 1, 1]}
    return _case("muse_spark_audio", {**numbers, "out_hidden_size": 64}, input_values=_noise(_BATCH, 48 * 10))


def _mimi_decoder() -> Case:
    numbers: Numbers = {**_LAYERS, "num_filters": 8, "codebook_dim": 32, "upsample_groups": 64, "codebook_size": 16}
    numbers |= {"vector_quantization_hidden_dimension": 32, "num_quantizers": 4, "num_key_value_heads": 4}
    return _case("mimi_decoder", numbers, latents=_noise(_BATCH, 64, _LENGTH))


class _Bark(nn.Module):
    """Bark's three transformers, which generate() calls in turns: it has no forward of its own."""

    def __init__(self, bark: Any) -> None:
        super().__init__()
        self.semantic, self.coarse, self.fine = bark.semantic, bark.coarse_acoustics, bark.fine_acoustics

    def forward(self, input_ids: Tensor, codes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        words, coarse = self.semantic(input_ids).logits, self.coarse(input_ids).logits
        return words, coarse, self.fine(2, codes).logits


def _bark() -> Case:
    part: Numbers = {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "block_size": 64}
    part |= {"input_vocab_size": _VOCABULARY, "output_vocab_size": _VOCABULARY}
    names = ("semantic", "coarse_acoustics", "fine_acoustics")
    case = _case("bark", {f"{name}_config": part for name in names})
    return Case(_Bark(case.model).eval(), (), {"input_ids": _ids(), "codes": _ids(_BATCH, _LENGTH, 8)})


WRITTEN: dict[str, Callable[[], Case]] = {
    "bailing_hybrid": _bailing_hybrid,
    "bark": _bark,
    "blip-2": _blip_2,
    "blt": _blt,
    "clap": _clap,
    "cohere_compass": _cohere_compass,
    "cohere_compass_text": _cohere_compass_text,
    "deepseek_ocr2": _deepseek_ocr2,
    "depth_pro": _depth_pro,
    "dots1": _dots1,
    "edgetam": _edgetam,
    "edgetam_vision_model": _edgetam_vision_model,
    "emu3": _emu3,
    "ernie4_5_vl_moe": _ernie4_5_vl_moe,
    "fun_asr_nano_encoder": _fun_asr_nano_encoder,
    "funnel": _funnel,
    "gemma3n": _gemma3n,
    "gemma3n_audio": _gemma3n_audio,
    "gemma3n_vision": _gemma3n_vision,
    "granite4_vision": _granite4_vision,
    "idefics": _idefics,
    "inkling2_vision": _inkling2_vision,
    "instructblip": _instructblip,
    "instructblipvideo": _instructblipvideo,
    "kosmos-2": _kosmos_2,
    "llama4": _llama4,
    "longcat_flash": _longcat_flash,
    "lw_detr": _lw_detr,
    "mimi_decoder": _mimi_decoder,
    "minicpm_ocr_vision": _minicpm_ocr_vision,
    "minicpmv4_7_vision": _minicpmv4_7_vision,
    "muse_glimmer_assistant": _muse_glimmer_assistant,
    "muse_spark_audio": _muse_spark_audio,
    "omdet-turbo": _omdet_turbo,
    "oneformer": _oneformer,
    "pe_video": _pe_video,
    "pe_video_encoder": _pe_video_encoder,
    "perceiver": _perceiver,
    "perception_lm": _perception_lm,
    "qwen4_exp": _qwen4_exp,
    "qwen4_exp_text": _qwen4_exp_text,
    "rf_detr": _rf_detr,
    "seggpt": _seggpt,
    "speecht5": _speecht5,
    "step3p7": _step3p7,
    "timm_backbone": _timm_backbone,
    "tvp": _tvp,
    "vibevoice": _vibevoice,
    "vibevoice_acoustic_tokenizer": _vibevoice_acoustic_tokenizer,
    "vibevoice_acoustic_tokenizer_decoder": _vibevoice_acoustic_tokenizer_decoder,
    "vibevoice_acoustic_tokenizer_encoder": _vibevoice_acoustic_tokenizer_encoder,
    "voxtral_realtime": _voxtral_realtime,
    "xlstm": _xlstm,
    "xmod": _xmod,
    "zamba": _zamba,
    "zamba2": _zamba2,
}
