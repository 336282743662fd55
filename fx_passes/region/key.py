"""What names a region under one signature, in whatever is kept about it between processes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
from torch import fx

from fx_passes.candidates.specs import TensorSpec
from fx_passes.lower.post_ops import as_of_floats
from fx_passes.region.options import RegionOptions


def region_key(
    graph: fx.Graph, specs: Sequence[TensorSpec], parameters: Mapping[str, torch.Tensor], options: RegionOptions
) -> str:
    """A key that is equal for the same graph on the same shapes, of parameters too, with the same options."""
    shapes = {name: TensorSpec.of(value) for name, value in parameters.items()}
    text = as_of_floats(f"{graph}|{specs}|{shapes}|{options.key}")
    return "region " + hashlib.sha256(text.encode()).hexdigest()
