"""Train a small residual CNN on scikit-learn's handwritten digits: 1797 images of 8 x 8, ten classes, a few seconds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

TRAINING_SHARE = 0.75


class DigitNet(nn.Module):
    """Two convolutions, a residual block, a classifier: every kind of layer that is folded or fused."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.pool = nn.MaxPool2d(2)
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(width * 16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = F.relu(self.norm1(self.conv1(x)))
        x = F.relu(x + self.norm2(self.conv2(y)))
        return self.head(self.dropout(torch.flatten(self.pool(x), 1)))


@dataclass(frozen=True)
class Digits:
    """images [N, 1, 8, 8] float32 in 0..1, labels [N] int64; split into a training and a test part."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def load(seed: int = 0) -> Digits:
    """Return the data set that scikit-learn brings along, shuffled with `seed` and split."""
    from sklearn.datasets import load_digits

    raw = load_digits()
    images = torch.from_numpy(raw.images).float().div_(16).unsqueeze(1)
    labels = torch.from_numpy(raw.target).long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    cut = int(TRAINING_SHARE * len(labels))
    first, rest = order[:cut], order[cut:]
    return Digits(images[first], labels[first], images[rest], labels[rest])


def train(digits: Digits, step: Callable[[str], None], *, epochs: int = 8, seed: int = 0) -> DigitNet:
    """Return a trained network in eval mode; `step` is called once per epoch with a note on it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = DigitNet().train()
        rounds = -(-len(digits.train_labels) // 64)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-3, total_steps=epochs * rounds)
        for _ in range(epochs):
            for part in torch.randperm(len(digits.train_labels)).split(64):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(digits.train_images[part]), digits.train_labels[part])
                loss.backward()
                optimizer.step()
                schedule.step()
            step(f"loss {loss.item():.3f}")
    return model.eval()


@torch.inference_mode()
def predict(model: nn.Module, images: Tensor) -> Tensor:
    """Return the predicted labels [N] of `images`."""
    return model(images).argmax(1)


def accuracy(predicted: Tensor, labels: Tensor) -> float:
    return (predicted == labels).float().mean().item()
