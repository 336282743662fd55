"""A program for a few samples, run over a batch slice by slice."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zendnn_cffi.runtime.calls import Call
from zendnn_cffi.runtime.program import OutputSpec, Program


class SlicedProgram:
    """Run a program for a smaller batch over slices of dimension 0 of every input and output.

    The activations of a slice stay in the cache where those of the whole batch would not.
    """

    def __init__(self, program: Program, slice_size: int, outputs: Sequence[OutputSpec]) -> None:
        self.program = program
        self.slice_size = slice_size
        self.outputs = tuple(outputs)
        self._makers = [spec.maker() for spec in self.outputs]
        self.slices = outputs[0].shape[0] // slice_size

    @property
    def calls(self) -> tuple[Call, ...]:
        """The calls of one slice."""
        return self.program.calls

    @property
    def arena_bytes(self) -> int:
        return self.program.arena_bytes

    @property
    def constants(self) -> tuple[torch.Tensor, ...]:
        return self.program.constants

    @property
    def failed(self) -> set[str]:
        """As Program.failed."""
        return self.program.failed

    @property
    def last_used(self) -> int:
        return self.program.last_used

    @property
    def is_running(self) -> bool:
        """As Program.is_running."""
        return self.program.is_running

    def close(self) -> None:
        """As Program.close."""
        self.program.close()

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the outputs for these inputs."""
        outputs = [make() for make in self._makers]
        for start in range(0, self.slices * self.slice_size, self.slice_size):
            self.program.run_into(*(self._slices(tensors, start) for tensors in (inputs, outputs)))
        return outputs

    def first_slice(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What the program for a smaller batch is run on first."""
        return self._slices(inputs, 0)

    def _slices(self, tensors: Sequence[torch.Tensor], start: int) -> list[torch.Tensor]:
        return [tensor.narrow(0, start, self.slice_size) for tensor in tensors]

    def run_timed(self, inputs: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[int]]:
        """Return the outputs, and the wall time of each call in ns, summed over the slices."""
        pieces, times_ns = [], [0] * len(self.calls)
        for start in range(0, self.slices * self.slice_size, self.slice_size):
            outputs, times = self.program.run_timed(self._slices(inputs, start))
            pieces.append(outputs)
            times_ns = [a + b for a, b in zip(times_ns, times, strict=True)]
        return [torch.cat(list(parts)) for parts in zip(*pieces, strict=True)], times_ns
