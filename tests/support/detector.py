"""A detector in small: as torchvision's it returns as many boxes as the data says, so that it is no graph."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn


class Backbone(nn.Module):
    """Two levels of features, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)
        self.norm, self.act = nn.BatchNorm2d(4), nn.Hardswish(inplace=True)

    def forward(self, x: Tensor) -> OrderedDict[str, Tensor]:
        x = self.act(self.norm(self.first(x)))
        return OrderedDict([("0", x), ("1", self.act(self.norm(self.second(x))))])


class Head(nn.Module):
    """A score for each place of each level; it takes a list, which symbolic tracing cannot go through."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList([nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 1))])

    def forward(self, features: list[Tensor]) -> Tensor:
        return torch.cat([self.towers[0](level).flatten(2) for level in features], 2)


class Boxes(nn.Module):
    """Works on boxes, whose number depends on the picture."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Sequential(nn.Linear(2, 3))

    def postprocess_detections(self, scores: Tensor) -> Tensor:
        return scores[scores.softmax(-1).amax(-1) > 0.5]

    def forward(self, scores: Tensor) -> Tensor:
        return self.postprocess_detections(self.score(scores))


class Detector(nn.Module):
    """Pictures [3, H, W] of any sizes, each its boxes."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head, self.boxes = Backbone(), Head(), Boxes()
        self.spare = nn.Sequential(nn.Linear(2, 2))  # which nobody calls

    def forward(self, images: list[Tensor]) -> list[dict[str, Any]]:
        found = []
        for image in images:
            scores = self.head(list(self.backbone(image[None]).values()))
            found.append({"boxes": self.boxes(scores[0].T), "scores": scores})
        return found
