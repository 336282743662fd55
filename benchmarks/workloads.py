"""The table of workloads: what can be benchmarked, by name. Needs torch (and torchvision for the vision rows).

A row says how to build the model with its seeded weights, and how to make inputs of a batch size. Everything else in
benchmarks/ works on any row: a transformer or a recommender is added here only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from demo import vision


@dataclass(frozen=True)
class Workload:
    """A model with inputs.

    build    (calibrate: bool) -> nn.Module in eval mode; calibrate=False: weights are loaded from a file next, so
             expensive initialisation may be left out
    inputs   (batch: int) -> tuple of tensors, the positional arguments of the model
    """

    name: str
    build: Callable[..., nn.Module]
    inputs: Callable[[int], tuple[Tensor, ...]]


def _image_inputs(name: str, batch: int) -> tuple[Tensor, ...]:
    return (vision.image_batch(batch, vision.image_side(name)),)


def _vision_rows() -> dict[str, Workload]:
    return {
        name: Workload(name, partial(vision.build, name), partial(_image_inputs, name))
        for name in vision.classification_models()
    }


def _sequence_rows() -> dict[str, Workload]:
    from benchmarks.workloads_recommender import recommender_rows  # they import Workload from here
    from benchmarks.workloads_transformers import transformer_rows

    return transformer_rows() | recommender_rows()


FAMILIES: tuple[Callable[[], dict[str, Workload]], ...] = (_vision_rows, _sequence_rows)


def find(name: str) -> Workload:
    """Return the row called `name`; KeyError naming the near misses otherwise."""
    rows: dict[str, Workload] = {}
    for family in FAMILIES:  # the later ones import more
        rows.update(family())
        if name in rows:
            return rows[name]
    near = [row for row in rows if name[:4] in row]
    raise KeyError(f"no workload {name!r}; close to it: {', '.join(near) or 'none'}")


def outputs_of(result: object) -> tuple[Tensor, ...]:
    """Return the tensors in a model's result, whatever container it came in, in a stable order."""
    leaves, _ = torch.utils._pytree.tree_flatten(result)
    return tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))
