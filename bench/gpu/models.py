"""Models of the shape of ResNet-50 and BERT-base, randomly initialised: they are as much work."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Block(nn.Module):
    """A bottleneck of ResNet's."""

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        outside = width * 4
        self.way = nn.Sequential(
            nn.Conv2d(inside, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, outside, 1, bias=False),
            nn.BatchNorm2d(outside),
        )
        straight = stride == 1 and inside == outside
        self.short = nn.Identity() if straight else nn.Conv2d(inside, outside, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.way(x) + self.short(x))


class ResNet(nn.Module):
    """[n, 3, 224, 224] float32 -> [n, 1000]"""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
        inside = 64
        for width, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
            for number in range(count):
                layers.append(Block(inside, width, stride if number == 0 else 1))
                inside = width * 4
        self.layers = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Bert(nn.Module):
    """[n, 128] int64 -> [n, 768]"""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(30522, 768)
        layer = nn.TransformerEncoderLayer(768, 12, 3072, batch_first=True, activation="gelu")
        self.layers = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(self.words(x))[:, 0]


class Tiny(nn.Module):
    """[n, 16] float32 -> [n, 4]: for a dry run of the script"""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


# class -> dtype, shape of an input row and of an output row
SHAPES: dict[str, tuple[Any, str, tuple[int, ...], tuple[int, ...]]] = {
    "ResNet": (ResNet, "float32", (3, 224, 224), (1000,)),
    "Bert": (Bert, "int64", (128,), (768,)),
}
TINY: dict[str, tuple[Any, str, tuple[int, ...], tuple[int, ...]]] = {"Tiny": (Tiny, "float32", (16,), (4,))}
