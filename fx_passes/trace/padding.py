"""Write out what nn.TransformerEncoder makes of a padding mask: padded positions are left out, and 0 in its result.

PyTorch does so (by nested tensors) where padding comes last in each row, no other mask is given and no gradient is
asked for. Exported, the layers compute padded positions as well, and those are set to 0 before the last normalization.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def write_out_padding(root: nn.Module) -> list[nn.Module]:
    """Let encoders in root, a copy that is exported, do so; return a list that gets those that a call gave a mask.

    A graph that has one of these is right for calls without gradients alone.
    """
    given: list[nn.Module] = []

    def notice(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        bound = inspect.signature(module.forward).bind(*args, **kwargs).arguments
        if _is_nested(**{"mask": None, "src_key_padding_mask": None, **bound}):
            given.append(module)

    if torch.backends.mha.get_fastpath_enabled():
        for module in root.modules():
            if isinstance(module, nn.TransformerEncoder) and module.use_nested_tensor:
                module.register_forward_pre_hook(notice, with_kwargs=True)
                module.forward = _forward(module)
    return given


def _is_nested(src: Tensor, mask: Tensor | None, src_key_padding_mask: Tensor | None, **others: Any) -> bool:
    """Whether PyTorch may leave padded positions out of a call with these arguments."""
    return src_key_padding_mask is not None and mask is None and src.dim() == 3


def _forward(encoder: Any) -> Callable[..., Tensor]:
    own = encoder.forward

    def forward(
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        padding = src_key_padding_mask
        if padding is None or not _is_nested(src, mask, padding):
            return own(src, mask, padding, is_causal)
        if padding.dtype != torch.bool or not getattr(encoder, "mask_check", True):
            raise NotImplementedError("a TransformerEncoder with nested tensors and a padding mask that is not boolean")
        norm, encoder.norm = encoder.norm, None
        try:
            output = own(src, None, padding, is_causal)
        finally:
            encoder.norm = norm
        output = output.masked_fill(left_out(padding).unsqueeze(-1), 0.0)
        return output if norm is None else norm(output)

    return forward


def left_out(padding: Tensor) -> Tensor:
    """Where PyTorch leaves positions out, of [N, L] where padding is: nowhere if padding is followed by more text."""
    followed = padding[:, :-1] & padding[:, 1:].logical_not()
    return padding & followed.any().logical_not()
