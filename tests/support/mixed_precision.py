"""Small networks for the choice of layers, prepared and calibrated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from tests.support.lowering import noise
from zendnn_cffi.api.quantization.layers import Call
from zendnn_cffi.api.quantization.pt2e import calibrate, exported_graph, torchao
from zendnn_cffi.api.quantization.row_scales import mark_one_sided


class Residual(nn.Module):
    """Convolutions with a residual sum, pooling and a classifier; the second reads and adds the same value."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body, self.head = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.stem(x)), 2)
        x = F.relu(self.body(x) + x)
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


class Concatenated(nn.Module):
    """Pieces that are concatenated, pooled and multiplied between convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3, bias=False), nn.Conv2d(8, 8, 1)
        self.d = nn.Conv2d(8, 4, 3, groups=2)

    def forward(self, x: Tensor) -> Tensor:
        y = F.avg_pool2d(torch.cat([F.relu(self.a(x)), self.b(x)], 1), 2)
        return self.d(y * torch.sigmoid(self.c(y)))


class Dense(nn.Module):
    """DenseNet's layers: a normalization and relu of all pieces so far come before each convolution of the next."""

    def __init__(self, layers: int = 2, activation: Any = F.relu) -> None:
        super().__init__()
        self.stem, self.last, self.activation = nn.Conv2d(3, 8, 3), nn.Conv2d(8 + 4 * layers, 4, 1), activation
        self.norms = nn.ModuleList(nn.BatchNorm2d(8 + 4 * number) for number in range(layers))
        self.layers = nn.ModuleList(nn.Conv2d(8 + 4 * number, 4, 3, padding=1) for number in range(layers))
        for norm in self.norms:
            nn.init.uniform_(norm.weight, -1.0, 1.0)
            nn.init.uniform_(norm.running_mean, -0.5, 0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.stem(x)), 2)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = torch.cat([x, layer(self.activation(norm(x)))], 1)
        return self.last(F.relu(x))


class Outlier(nn.Module):
    """Linear layers; one channel of what the middle one reads is so large that one scale loses all others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 8)
        self.register_buffer("spread", torch.ones(32))
        with torch.no_grad():
            self.spread[3] = 3000.0
            self.middle.weight[:, 3] /= 3000.0

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.middle(torch.relu(self.first(x)) * self.spread)))


class Encoder(nn.Module):
    """Linear layers behind normalizations: one that they alone read, and one that a residual sum reads, too."""

    def __init__(self) -> None:
        super().__init__()
        self.pre, self.post = nn.LayerNorm(16), nn.LayerNorm(16)
        self.q, self.k, self.up, self.down = (nn.Linear(16, 16) for _ in range(4))
        with torch.no_grad():
            for norm in (self.pre, self.post):
                norm.weight[5] = 60.0
                norm.bias.uniform_(-1, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.pre(x)
        y = self.post(self.q(y) * torch.sigmoid(self.k(y)) + x)
        return y + self.down(F.gelu(self.up(y)))


def calls_of_noise(count: int, *shape: int) -> list[Call]:
    return [((noise(*shape, seed=number),), {}) for number in range(count)]


def prepared(model: nn.Module, calls: Sequence[Call], dynamic: bool = False) -> fx.GraphModule:
    graph = torchao().prepare(exported_graph(model, calls[0]), dynamic)
    with torch.no_grad():
        calibrate(graph, calls)
        mark_one_sided(graph, calls)
    return graph


def called(module: Any, call: Call) -> Tensor:
    with torch.no_grad():
        result: Tensor = module(*call[0], **call[1])
    return result
