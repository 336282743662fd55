"""Arguments that a model of Hugging Face's takes: those that it needs, and those that its errors ask for."""

from __future__ import annotations

import contextlib
import inspect
import re
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tests.conformance.outcome import brief
from tests.sweep.case import Case
from tests.sweep.hugging_face_widths import as_wide_as_asked

_LENGTH, _BATCH, _FRAMES, _SAMPLES, _GRID, _SIDE = 12, 2, 4, 8000, 4, 224
_MOST_ASKED = 5  # times that an error may name arguments
_VARIANTS = 5
_OF_PATCHES = {"grid_thw", "image_grid_thw", "spatial_shapes", "pixel_position_ids"}  # of images that come in patches
_LAST_LINES = 3  # of those that led to an error, PyTorch's own left out
_WORDS = re.compile(r"[A-Za-z_]\w*")


def parts(config: Any) -> Iterator[Any]:
    """The configuration and those within it."""
    yield config
    for value in list(vars(config).values()):
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            yield from parts(value)


def with_inputs(model: nn.Module) -> Case | str:
    """The model with arguments that it takes, or the first error it raises."""
    why = ""
    for kwargs, makers in _arguments(model):
        found = _tried(model, kwargs, makers)
        if isinstance(found, Case):
            return found
        why = why or found
    return why or "no arguments known"


def _tried(model: nn.Module, kwargs: dict[str, Any], makers: Mapping[str, Callable[[], Any]]) -> Case | str:
    """The model with these arguments and those that its errors ask for, or the error that asks for none."""
    taken = inspect.signature(model.forward).parameters
    why = ""
    for _ in range(_MOST_ASKED):
        try:
            with torch.no_grad():
                torch.manual_seed(0)
                model(**kwargs)
            return Case(model, (), kwargs)
        except Exception as error:  # these are not the arguments
            why = why or brief(error, 120)
            if (wider := as_wide_as_asked(kwargs, error)) is not None:
                kwargs = wider
                continue
            asked = [name for name in _named_by(error) if name in taken and name in makers and name not in kwargs]
        if not asked:
            break
        try:
            kwargs = {**kwargs, **{name: makers[name]() for name in asked}}
        except Exception:  # the configuration lacks what the argument is made by
            break
    return why


def _named_by(error: Exception) -> list[str]:
    """Names in the error's message, and in the lines that led to it: an argument that is None is one of these."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/torch/" not in frame.filename]
    lines = [frame.line or "" for frame in reversed(frames[-_LAST_LINES:])]
    return [*dict.fromkeys(_WORDS.findall(" ".join([str(error), *lines])))]


def _arguments(model: Any) -> Iterator[tuple[dict[str, Any], dict[str, Callable[[], Any]]]]:
    """Keyword arguments that may be right, and how others are made: those without defaults, and the main one."""
    parameters = inspect.signature(model.forward).parameters.values()
    needed = [p.name for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    taken = [p.name for p in parameters]
    first = list(dict.fromkeys([*needed, *([model.main_input_name] if model.main_input_name in taken else [])]))
    if getattr(model.config, "is_encoder_decoder", False) and "decoder_input_ids" in taken:
        first.append("decoder_input_ids")
    masked = [*first, "attention_mask"] if "attention_mask" in taken and first[:1] == ["input_ids"] else first
    both = [*masked, "pixel_values"] if "pixel_values" in taken and "input_ids" in masked else masked
    every = [name for name in ("input_ids", "pixel_values", "input_features", "bbox") if name in taken]
    tried = (both, masked, first, [*dict.fromkeys([*masked, *every])], ["input_ids"], ["pixel_values"])
    cut_before = bool(_OF_PATCHES & {*needed})
    ways = [(variant, cut_before) for variant in range(_VARIANTS)]
    if _OF_PATCHES & {*taken} and not cut_before:  # the processor of a model that can do without may cut as well
        ways += [(1, True)]
    for names in dict.fromkeys(map(tuple, tried)):
        for variant, in_patches in ways:
            makers = _makers(model.config, variant, in_patches)
            if names and all(name in makers and name in taken for name in names):
                with contextlib.suppress(Exception):
                    yield {name: makers[name]() for name in names}, makers


def _of(config: Any, names: tuple[str, ...], default: Any) -> Any:
    """The first number of this name in the configuration or one within it."""
    for part in parts(config):
        for name in names:
            value = vars(part).get(name)
            if value is not None and not isinstance(value, bool):
                return value
    return default


def _noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def _mask() -> Tensor:
    made = torch.ones(_BATCH, _LENGTH, dtype=torch.int64)
    made[-1, _LENGTH * 2 // 3 :] = 0
    return made


def _makers(config: Any, variant: int, in_patches: bool = False) -> dict[str, Callable[[], Any]]:
    """Arguments by name; in_patches: images cut before.

    variant: 0 for images, 1 for videos, 2 for images of 64 x 64, 3 for an image to each text, 4 for pairs of images
    """
    return {
        **_of_words(config, variant),
        **_of_sound(config, variant),
        **_of_series(config),
        **_of_images(config, variant, in_patches),
    }


def _of_words(config: Any, variant: int) -> dict[str, Callable[[], Any]]:
    vocabulary = min(int(_of(config, ("vocab_size",), 64)), 100)
    hidden = _of(config, ("hidden_size", "d_model", "dim"), 64)

    of_sound = _of(config, ("num_codebooks",), 1) if variant == 1 else 1  # a row for each codebook

    def ids(length: int = _LENGTH, rows: int = _BATCH) -> Tensor:
        return torch.randint(3, max(vocabulary, 5), (rows, length), generator=torch.Generator().manual_seed(1))

    def states() -> Tensor:
        return _noise(_BATCH, _LENGTH, hidden)

    names = ("inputs_embeds", "hidden_states", "query_embeds", "noise_embeds", "context_hidden_states", "action_embeds")
    return {
        **dict.fromkeys(names, states),
        "input_ids": lambda: ids(rows=_BATCH * of_sound),
        **dict.fromkeys(("inputs", "qformer_input_ids", "task_inputs"), ids),
        "encoder_hidden_states": lambda: _noise(_BATCH, _LENGTH, _of(config, ("encoder_hidden_size",), hidden)),
        "decoder_input_ids": lambda: ids(5, _BATCH * of_sound),
        "attention_mask": _mask,
        "position_ids": lambda: torch.arange(_LENGTH).expand(_BATCH, -1),
        "token_type_ids": lambda: torch.zeros_like(ids()),
        "bbox": lambda: torch.tensor([[[1, 2, 30, 40]]]).expand(_BATCH, _LENGTH, 4).contiguous(),
        "visual_feats": lambda: _noise(_BATCH, _LENGTH, _of(config, ("visual_feat_dim",), hidden)),
        "visual_pos": lambda: _noise(_BATCH, _LENGTH, _of(config, ("visual_pos_dim",), 4)),
    }


def _of_sound(config: Any, variant: int) -> dict[str, Callable[[], Any]]:
    mels = _of(config, ("num_mel_bins", "feature_size", "feature_projection_input_dim"), None)
    mels = mels or _of(config, ("input_feat_per_channel", "n_mels", "input_dim"), 80)
    frames = 2 * _of(config, ("max_source_positions",), 50)
    hidden = _of(config, ("hidden_size", "d_model", "dim"), 64)
    last = variant == 1  # bins of mel are the last dimension

    def sound() -> Tensor:
        spectrum = (_of(config, ("max_length",), _SAMPLES), mels)
        return _noise(_BATCH, *((_SAMPLES,), (1, _SAMPLES), spectrum)[min(variant, 2)])

    def features() -> Tensor:
        return _noise(_BATCH, frames, mels) if last else _noise(_BATCH, mels, frames)

    def frames_there() -> Tensor:
        return torch.ones(_BATCH, frames, dtype=torch.int64)

    return {
        "input_values": sound,
        "input_features": features,
        "input_features_mask": frames_there,
        "audio_mel": lambda: _noise(_BATCH, frames, mels),
        "audio_mel_mask": lambda: frames_there().bool(),
        "latents": lambda: _noise(_BATCH, _of(config, ("codebook_dim", "hidden_size"), hidden), _LENGTH),
        "spectrogram": lambda: _noise(_BATCH, 64, mels),
    }


def _of_series(config: Any) -> dict[str, Callable[[], Any]]:
    """Arguments of models of time series, and of decisions."""
    past = _of(config, ("context_length",), 32)
    channels = _of(config, ("num_input_channels",), None)
    lags = max(_of(config, ("lags_sequence",), [0]))
    length = past + lags
    times = _of(config, ("num_time_features",), 0)

    def values() -> Tensor:
        return _noise(_BATCH, length, *([channels] if channels else []))

    def whole(high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(1))

    return {
        "past_values": values,
        "past_values_padding": lambda: torch.zeros(_BATCH, length, dtype=torch.int64),
        "past_time_features": lambda: _noise(_BATCH, length, times),
        "past_observed_mask": lambda: torch.ones_like(values()),
        "future_values": lambda: _noise(_BATCH, _of(config, ("prediction_length",), 4)),
        "future_time_features": lambda: _noise(_BATCH, _of(config, ("prediction_length",), 4), times),
        "freq": lambda: torch.zeros(_BATCH, 1, dtype=torch.int64),
        "states": lambda: _noise(_BATCH, _LENGTH, _of(config, ("state_dim",), 17)),
        "actions": lambda: _noise(_BATCH, _LENGTH, _of(config, ("act_dim",), 4)),
        "returns_to_go": lambda: _noise(_BATCH, _LENGTH, 1),
        "timesteps": lambda: whole(_LENGTH, _BATCH, _LENGTH),
    }


def _of_images(config: Any, variant: int, in_patches: bool) -> dict[str, Callable[[], Any]]:
    size = 64 if variant == 2 else _of(config, ("image_size", "img_size", "input_size"), 64)
    if _of(config, ("patch_size",), None) is None and isinstance(size, int):
        size = min(size, _SIDE)  # convolutions take images of any size
    height, width = size if isinstance(size, list | tuple) else (size, size)
    channels = _of(config, ("num_channels", "in_channels", "in_chans"), 3)
    frames = _of(config, ("num_frames",), _FRAMES)
    hidden = _of(config, ("hidden_size", "d_model", "dim"), 64)
    side = _of(config, ("patch_size",), 14)

    def images() -> Tensor:
        before = {1: (1, frames), 3: (_BATCH,), 4: (1, 2)}.get(variant, (1,))
        return _noise(*before, channels, height, width)

    def patches() -> Tensor:
        """Patches in a row; of variant 1 with a dimension for the batch, of variant 2 as small images."""
        if variant == 2:
            return _noise(_GRID * _GRID, channels, side, side)
        together = _of(config, ("temporal_patch_size",), 1)
        return _noise(*([1] if variant == 1 else []), _GRID * _GRID, channels * together * side**2)

    def grid() -> Tensor:
        return torch.tensor([[1, _GRID, _GRID]])

    def places() -> Tensor:
        return torch.stack(torch.meshgrid(torch.arange(_GRID), torch.arange(_GRID), indexing="ij"), -1).view(1, -1, 2)

    return {
        "pixel_values": patches if in_patches else images,
        **({"hidden_states": patches} if in_patches else {"hidden_states": lambda: _noise(_BATCH, _LENGTH, hidden)}),
        "grid_thw": grid,
        "image_grid_thw": grid,
        "grid_hws": lambda: grid()[:, 1:],
        "spatial_shapes": lambda: grid()[:, 1:],
        "pixel_position_ids": places,
        "pixel_attention_mask": lambda: torch.ones(1, _GRID * _GRID, dtype=torch.int64),
        "merge_sizes": lambda: torch.tensor([_of(config, ("spatial_merge_size",), 1)]),
        "pixel_values_videos": lambda: _noise(1, frames, channels, height, width),
        "prompt_pixel_values": images,
        "prompt_masks": images,
    }
