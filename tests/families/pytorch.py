"""Rows of PyTorch's own attention and recurrent modules, and of networks around the latter."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from tests.families.rows import Row
from tests.support.torchvision_models import build

ATTENTION, RECURRENT = "attention modules", "recurrent"


class Tacotron(nn.Module):
    """The encoder of Tacotron 2: an embedding, three convolutions, an LSTM in both directions."""

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.embedding = nn.Embedding(148, width)
        blocks = [[nn.Conv1d(width, width, 5, padding=2), nn.BatchNorm1d(width), nn.ReLU()] for _ in range(3)]
        self.convolutions = nn.Sequential(*(layer for block in blocks for layer in block))
        self.lstm = nn.LSTM(width, width // 2, batch_first=True, bidirectional=True)

    def forward(self, text: Tensor) -> Tensor:
        """text [N, L]; returns [N, L, width]."""
        x = self.convolutions(self.embedding(text).transpose(1, 2)).transpose(1, 2)
        output: Tensor = self.lstm(x)[0]
        return output


class DeepSpeech(nn.Module):
    """Spectrograms through two convolutions, GRUs in both directions, and a product for each step."""

    def __init__(self, width: int = 512, layers: int = 3) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(1, 32, (41, 11), (2, 2), (20, 5)),
            nn.BatchNorm2d(32),
            nn.Hardtanh(0, 20),
            nn.Conv2d(32, 32, (21, 11), (2, 1), (10, 5)),
            nn.BatchNorm2d(32),
            nn.Hardtanh(0, 20),
        )
        self.gru = nn.GRU(32 * 41, width, layers, bidirectional=True)
        self.head = nn.Linear(2 * width, 29)

    def forward(self, spectrogram: Tensor) -> Tensor:
        """spectrogram [N, 1, 161, T]; returns [T / 2, N, 29], logarithms of probabilities."""
        x = self.convolutions(spectrogram)
        x = x.flatten(1, 2).permute(2, 0, 1)
        return self.head(self.gru(x)[0]).log_softmax(-1)


class Elmo(nn.Module):
    """Two stacks of projected LSTMs, one for each direction, and a weighted sum of their layers."""

    def __init__(self, width: int = 256, hidden: int = 1024) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5000, width)
        self.forwards = nn.ModuleList(nn.LSTM(width, hidden, proj_size=width, batch_first=True) for _ in range(2))
        self.backwards = nn.ModuleList(nn.LSTM(width, hidden, proj_size=width, batch_first=True) for _ in range(2))
        self.weights = nn.Parameter(torch.tensor([0.5, 0.2, 0.3]))

    def forward(self, text: Tensor) -> Tensor:
        """text [N, L]; returns [N, L, 2 * width]."""
        there = back = self.embedding(text)
        back = back.flip(1)
        layers = [torch.cat([there, back.flip(1)], -1)]
        for one, other in zip(self.forwards, self.backwards, strict=True):
            there, back = there + one(there)[0], back + other(back)[0]
            layers.append(torch.cat([there, back.flip(1)], -1))
        return (torch.stack(layers, -1) * self.weights.softmax(0)).sum(-1)


class Packed(nn.Module):
    """A tagger of texts of different lengths: packed for the LSTM, padded again behind it."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5000, width)
        self.lstm = nn.LSTM(width, width, 2, batch_first=True, bidirectional=True)
        self.head = nn.Sequential(nn.Linear(2 * width, width), nn.ReLU(), nn.Linear(width, 17))

    def forward(self, text: Tensor, lengths: Tensor) -> Tensor:
        """text [N, L], lengths [N]; returns [N, L, 17]."""
        packed = pack_padded_sequence(self.embedding(text), lengths, batch_first=True, enforce_sorted=False)
        output, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        return self.head(output)


class SpeechDecoder(nn.Module):
    """A step of a decoder of two LSTM cells, its states given and returned."""

    def __init__(self, width: int = 1024) -> None:
        super().__init__()
        self.before = nn.Sequential(nn.Linear(80, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU())
        self.cells = nn.ModuleList([nn.LSTMCell(256, width), nn.LSTMCell(width, width)])
        self.head = nn.Linear(width, 80)

    def forward(self, frame: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        """frame [N, 80], states [N, width] twice for each cell; returns the next frame and states."""
        x, after = self.before(frame), []
        for number, cell in enumerate(self.cells):
            x, c = cell(x, (states[2 * number], states[2 * number + 1]))
            after += [x, c]
        return (self.head(x), *after)


def _packed_alone() -> tuple[PackedSequence]:
    return (pack_padded_sequence(torch.randn(60, 8, 256), torch.tensor([60, 50, 44, 30, 30, 12, 9, 2])),)


def _transformer_inputs() -> dict[str, Any]:
    return {
        "src": torch.randn(1, 96, 512),
        "tgt": torch.randn(1, 48, 512),
        "tgt_mask": nn.Transformer.generate_square_subsequent_mask(48),
        "tgt_is_causal": True,
        "src_is_causal": False,
    }


def _padded() -> dict[str, Any]:
    mask = torch.zeros(4, 64, dtype=torch.bool)
    mask[1, 40:] = mask[3, 50:] = True
    return {"src": torch.randn(4, 64, 384), "src_key_padding_mask": mask, "is_causal": False}


def _encoder(width: int, heads: int, layers: int) -> nn.Module:
    layer = nn.TransformerEncoderLayer(width, heads, 4 * width, batch_first=True, activation="gelu")
    return nn.TransformerEncoder(layer, layers)


_recurrent = functools.partial(Row, RECURRENT, recurrent=True)


def rows() -> list[Row]:
    """The rows."""
    states = lambda n, h: (torch.randn(2, n, h), torch.randn(2, n, h))  # noqa: E731
    query = lambda: torch.randn(1, 128, 512)  # noqa: E731
    return [
        Row(
            ATTENTION,
            "mha",
            "`nn.MultiheadAttention`, 512, 8 heads, 1 x 128",
            lambda: nn.MultiheadAttention(512, 8, batch_first=True),
            lambda: dict(zip(("query", "key", "value"), [query()] * 3, strict=True), need_weights=False),
        ),
        Row(
            ATTENTION,
            "cross-mha",
            "`nn.MultiheadAttention` on other keys and values, with weights, 4 x 40 on 4 x 60",
            lambda: nn.MultiheadAttention(512, 8, batch_first=True, kdim=384, vdim=256),
            lambda: (torch.randn(4, 40, 512), torch.randn(4, 60, 384), torch.randn(4, 60, 256)),
        ),
        Row(
            ATTENTION,
            "transformer-encoder",
            "`nn.TransformerEncoder`, 6 layers of 512, 1 x 128",
            lambda: _encoder(512, 8, 6),
            lambda: (torch.randn(1, 128, 512),),
        ),
        Row(
            ATTENTION,
            "padded-encoder",
            "`nn.TransformerEncoder`, 4 layers of 384, 4 x 64, padded",
            lambda: _encoder(384, 6, 4),
            _padded,
        ),
        Row(
            ATTENTION,
            "transformer",
            "`nn.Transformer`, 3 + 3 layers of 512, 96 and 48 tokens",
            lambda: nn.Transformer(512, 8, 3, 3, 2048, batch_first=True),
            _transformer_inputs,
        ),
        Row(
            ATTENTION,
            "vit_b_16",
            "torchvision's ViT-B/16, batch 1",
            lambda: build("vit_b_16"),
            lambda: (torch.randn(1, 3, 224, 224),),
        ),
        _recurrent(
            "lstm",
            "`nn.LSTM`, 2 x 512, batch 1, 100 steps",
            lambda: nn.LSTM(512, 512, 2),
            lambda: (torch.randn(100, 1, 512),),
        ),
        _recurrent(
            "lstm-32",
            "`nn.LSTM`, 2 x 512, batch 32, 100 steps",
            lambda: nn.LSTM(512, 512, 2),
            lambda: (torch.randn(100, 32, 512),),
        ),
        _recurrent(
            "lstm-states",
            "`nn.LSTM`, 2 x 256, batch 4, 40 steps, with states",
            lambda: nn.LSTM(256, 256, 2),
            lambda: (torch.randn(40, 4, 256), states(4, 256)),
        ),
        _recurrent(
            "lstm-projected",
            "`nn.LSTM`, 2 x 1024 projected to 256, both directions, 50 steps",
            lambda: nn.LSTM(256, 1024, 2, proj_size=256, bidirectional=True),
            lambda: (torch.randn(50, 1, 256),),
        ),
        _recurrent(
            "lstm-packed",
            "`nn.LSTM` on a packed sequence, 256, 8 texts of 2 to 60 steps",
            lambda: nn.LSTM(256, 256),
            _packed_alone,
            "TorchDynamo breaks its graph at packed data, so by torch.compile the layers are PyTorch's",
        ),
        _recurrent(
            "gru",
            "`nn.GRU`, 2 x 512, both directions, batch first, 4 x 50",
            lambda: nn.GRU(512, 512, 2, batch_first=True, bidirectional=True),
            lambda: (torch.randn(4, 50, 512),),
        ),
        _recurrent(
            "rnn",
            "`nn.RNN`, 2 x 512, batch 1, 100 steps",
            lambda: nn.RNN(512, 512, 2),
            lambda: (torch.randn(100, 1, 512),),
        ),
        _recurrent(
            "tacotron",
            "Tacotron-2-like encoder, 1 x 80 characters",
            Tacotron,
            lambda: (torch.randint(0, 148, (1, 80)),),
        ),
        _recurrent(
            "deepspeech",
            "DeepSpeech-2-like, 3 x 512, both directions, 2 s",
            DeepSpeech,
            lambda: (torch.randn(1, 1, 161, 200),),
        ),
        _recurrent(
            "elmo",
            "ELMo-like, 2 x 1024 projected to 256, 1 x 40 words",
            Elmo,
            lambda: (torch.randint(0, 5000, (1, 40)),),
        ),
        _recurrent(
            "packed-tagger",
            "tagger with a packed LSTM, 4 texts of 9 to 40 words",
            Packed,
            lambda: (torch.randint(0, 5000, (4, 40)), torch.tensor([40, 9, 31, 22])),
            "packing and padding are PyTorch's; by torch.compile, where TorchDynamo breaks its graph, so is the LSTM",
        ),
        _recurrent(
            "speech-decoder",
            "a step of two LSTM cells of 1024",
            SpeechDecoder,
            lambda: (torch.randn(1, 80), *(torch.randn(1, 1024) for _ in range(4))),
        ),
    ]
