"""One exported graph, from observers to a choice of layers: of a whole model, or of a submodule of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import fx, nn

from fx_passes.candidates.layouts import has_vnni
from zendnn_cffi.api.quantization.attempt import Attempt
from zendnn_cffi.api.quantization.attention import mark_attention
from zendnn_cffi.api.quantization.checks import check_signal
from zendnn_cffi.api.quantization.choose import Limits
from zendnn_cffi.api.quantization.fake_quantized import FakeQuantized
from zendnn_cffi.api.quantization.gates import share_observers
from zendnn_cffi.api.quantization.inputs import Calls, writes_to_inputs
from zendnn_cffi.api.quantization.layers import Call
from zendnn_cffi.api.quantization.pt2e import Pt2e
from zendnn_cffi.api.quantization.row_scales import mark_one_sided
from zendnn_cffi.api.quantization.smooth import smooth_linears
from zendnn_cffi.api.quantization.states import State


class Options(NamedTuple):
    """How a graph is quantized, as quantize() has it."""

    dynamic: bool
    correct_bias: bool
    smooth: bool
    attention: bool
    dtype: torch.dtype | None
    tune: str
    compare: bool


class Calibrated:
    """An exported graph with observers.

    model     what it was exported from
    prepared  the graph with observers, to be called with all inputs before attempt()
    kept      calls of it, each as it was before the first look at it
    written   whether the graph writes to its inputs
    """

    def __init__(
        self, model: nn.Module, exported: fx.GraphModule, kept: Sequence[Call], pt2e: Pt2e, options: Options
    ) -> None:
        self._model, self._pt2e, self._options = model, pt2e, options
        self.state, self.written = State(exported), writes_to_inputs(exported)
        self.kept = Calls(kept, self.written)
        if options.smooth:
            smooth_linears(exported, self.kept)
        if options.attention and not options.dynamic and has_vnni():  # else no kernel multiplies two values of 8 bits
            mark_attention(exported)
        self.prepared = pt2e.prepare(exported, options.dynamic)
        share_observers(self.prepared)

    def attempt(self, limits: Limits) -> Attempt:
        """Choose layers once all inputs were observed. Raises ValueError for a budget against zeros."""
        options = self._options
        mark_one_sided(self.prepared, self.kept)
        fake = FakeQuantized(self.prepared, self.kept, self.state)
        check_signal(fake, limits.budget_db)
        attempt = Attempt(self._model, self._pt2e, fake, options.dtype, options.tune)
        if options.correct_bias:
            attempt.correct_biases()
        if limits.budget_db is not None or limits.accuracy is not None:
            attempt.search(limits)
        elif options.compare and options.tune != "off" and fake.layers:
            attempt.keep_fastest()
        else:
            attempt.compile(None)
        return attempt
