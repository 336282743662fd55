"""Folders that show how each model was compiled: graphs after every pass, times, programs, explanations, drawings.

    ZENDNN_CFFI_DEBUG=folder   optimize() and torch.compile write there
    TORCH_COMPILE_DEBUG=1      torch.compile writes into TorchDynamo's debug folder, beside its own log

    zendnn_cffi/graph_0_ResNet/
      00_captured.txt, 02_normalize.txt, ...   the graph as captured, and after each pass that changed it
      times.txt                                each pass; of each lowering: candidates, measuring, packing, ...
      explain.txt, graph.svg                   what is in regions and what is not, before the first call
      zen_region_0/                            per region: its graph and drawing, and per input signature
        signature_0/program.txt, explain.txt   the calls with implementations and layouts; what each node became

Without either variable nothing is written and nothing kept.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from zendnn_cffi.primitives.attributes import ARG_BIAS, ARG_DST, ARG_SCRATCHPAD, ARG_SRC, ARG_WEIGHTS
from zendnn_cffi.runtime.calls import Call, PrimitiveCall, TorchCall
from zendnn_cffi.runtime.gemm_call import GemmCall
from zendnn_cffi.runtime.loop_call import LoopCall

if TYPE_CHECKING:
    from fx_passes.module import OptimizedModule
    from fx_passes.region.lowered import LoweredRegion
    from fx_passes.region.region import ZenRegion

log = logging.getLogger("zendnn_cffi.passes")

VARIABLE = "ZENDNN_CFFI_DEBUG"
_ARGUMENTS = {ARG_SRC: "src", ARG_WEIGHTS: "weights", ARG_BIAS: "bias", ARG_DST: "dst", ARG_SCRATCHPAD: ""}
_for_dynamo: ContextVar[bool] = ContextVar("for_dynamo", default=False)


@contextmanager
def captured_by_dynamo() -> Iterator[None]:
    """While open, TORCH_COMPILE_DEBUG=1 makes folders, too."""
    token = _for_dynamo.set(True)
    try:
        yield
    finally:
        _for_dynamo.reset(token)


def debug_root() -> Path | None:
    """Where folders are asked for; None: nowhere."""
    if chosen := os.environ.get(VARIABLE):
        return Path(chosen)
    if _for_dynamo.get() and os.environ.get("TORCH_COMPILE_DEBUG") == "1":
        from torch._dynamo.utils import get_debug_dir

        return Path(get_debug_dir()) / "zendnn_cffi"
    return None


class CompileNotes:
    """What compiling one model leaves to read. Writing that fails ends it with a warning: no model depends on it.

    root  folder for all models, or None: nothing is noted
    """

    def __init__(self, gm: OptimizedModule, root: Path | None) -> None:
        self.folder: Path | None = None
        self._number, self._before = 0, ""
        if root is not None:
            self._try(lambda: self._begin(gm, root))
        self._since = time.perf_counter()

    def after(self, stage: str, gm: fx.GraphModule) -> None:
        """Note the graph that a stage left, and the time since the stage before."""
        if self.folder is None:
            return
        seconds = time.perf_counter() - self._since
        self._number += 1
        self._try(lambda: self._graph(stage, gm, seconds))
        self._since = time.perf_counter()

    def end(self, gm: OptimizedModule) -> None:
        """Note what came out, and let its regions note what they are lowered to."""
        if self.folder is not None:
            self._try(lambda: self._result(gm))

    def _begin(self, gm: OptimizedModule, root: Path) -> None:
        root.mkdir(parents=True, exist_ok=True)
        name = re.sub(r"\W", "_", type(gm).__name__)
        self.folder = _new_folder(root, lambda number: f"graph_{number}_{name}")
        self._before = text_of(gm.graph)
        (self.folder / "00_captured.txt").write_text(self._before)
        (self.folder / "times.txt").write_text("     ms  nodes  stage\n")
        log.info("the passes write to %s", self.folder)

    def _graph(self, stage: str, gm: fx.GraphModule, seconds: float) -> None:
        assert self.folder is not None
        text = text_of(gm.graph)
        changed = text != self._before
        if changed:
            (self.folder / f"{self._number:02}_{stage}.txt").write_text(text)
        self._before = text
        note = "" if changed else " (unchanged)"
        append(self.folder / "times.txt", f"{seconds * 1e3:7.2f}  {len(gm.graph.nodes):5}  {stage}{note}")

    def _result(self, gm: OptimizedModule) -> None:
        from fx_passes.report.drawing import draw
        from fx_passes.report.explain import explain

        assert self.folder is not None
        (self.folder / "graph.svg").write_text(draw(gm.graph))
        (self.folder / "explain.txt").write_text(f"{explain(gm)}\n")
        for name, region in gm.regions().items():
            own = self.folder / name
            own.mkdir()
            graph: Any = region.graph
            (own / "graph.txt").write_text(text_of(graph))
            from fx_passes.report.drawing import draw

            (own / "graph.svg").write_text(draw(graph))
            region.on_lowered = RegionNotes(own)

    def _try(self, write: Callable[[], None]) -> None:
        try:
            write()
        except OSError as error:
            log.warning("%s: nothing more is written for this model: %s", VARIABLE, error)
            self.folder = None


class RegionNotes:
    """Called by a region when it was lowered, or found not to be: writes a folder per input signature."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(
        self,
        region: ZenRegion,
        inputs: Sequence[torch.Tensor],
        lowered: LoweredRegion | None,
        reason: str,
        seconds: float,
    ) -> None:
        try:
            self._write(region, inputs, lowered, reason, seconds)
        except OSError as error:
            log.warning("%s: nothing more is written for %s: %s", VARIABLE, region.name, error)
            region.on_lowered = None

    def _write(
        self,
        region: ZenRegion,
        inputs: Sequence[torch.Tensor],
        lowered: LoweredRegion | None,
        reason: str,
        seconds: float,
    ) -> None:
        own = _new_folder(self.folder, lambda number: f"signature_{number}")
        shapes = ", ".join(f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in inputs)
        times = self.folder.parent / "times.txt"
        append(times, f"{seconds * 1e3:7.0f}         {region.name}, {own.name}: {shapes}")
        if lowered is None:
            (own / "program.txt").write_text(f"{shapes}\nplain PyTorch runs: {reason}\n")
            return
        for stage, stage_ns in lowered.times_ns.items():
            append(times, f"{stage_ns / 1e6:7.0f}           {stage}")
        (own / "program.txt").write_text(f"{shapes}\n{program_text(lowered)}")
        (own / "explain.txt").write_text(f"{explain_lowered(region, lowered, shapes)}\n")


def explain_lowered(region: ZenRegion, lowered: LoweredRegion, shapes: str) -> Any:
    """What each node of a region became for one signature."""
    from fx_passes.region.region import weights_bytes
    from fx_passes.report.explain import Explanation, WeightsExplanation, explain_report

    rows = [explain_report(region.name, shapes, report, lowered.program.slices) for report in lowered.nodes]
    return Explanation(rows, [], WeightsExplanation(*weights_bytes([region])), measured=lowered.is_measured)


def program_text(lowered: LoweredRegion) -> str:
    """A line per call: its name, kind and implementation, and how each operand lies."""
    program = lowered.program
    rows = [(call.name, call.kind, call.implementation, layouts_of(call)) for call in program.calls]
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(4)]
    head = f"{len(rows)} calls" + (f", for each of {program.slices} slices of the batch" if program.slices > 1 else "")
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([head, *lines, ""])


def layouts_of(call: Call) -> str:
    """How each operand of a call lies."""
    if isinstance(call, PrimitiveCall):
        operands = [(_ARGUMENTS.get(arg, f"arg {arg}"), desc) for arg, (_, desc) in call.args.items()]
        return ", ".join(
            f"{name} {str(desc.dtype).removeprefix('torch.')}{list(desc.dims)} {desc.format}"
            for name, desc in operands
            if name
        )
    if isinstance(call, LoopCall):
        parts = ", ".join(f"{str(desc.dtype).removeprefix('torch.')}{list(desc.dims)}" for _, desc in call.args)
        return f"{call.rounds} rounds of {len(call.steps)} primitives on {parts}"
    if isinstance(call, GemmCall):
        m, k, n = call.gemm.sizes
        dtypes = (str(dtype).removeprefix("torch.") for dtype in (call.gemm.dtype, call.gemm.result))
        return "src {0}[{2}, {3}], weights {0}[{4}, {3}] packed, dst {1}[{2}, {4}]".format(*dtypes, m, k, n)
    if isinstance(call, TorchCall):
        views = [*(("src", view) for view in call.srcs), ("dst", call.dst)]
        return ", ".join(f"{name} {str(v.dtype).removeprefix('torch.')}{list(v.shape)}" for name, v in views)
    return ""


def text_of(graph: fx.Graph) -> str:
    """A line per node, with the shape and dtype of its value where they are known."""
    lines = []
    for node in graph.nodes:
        value = node.meta.get("val")
        known = isinstance(value, torch.Tensor)
        shape = f"  # {str(value.dtype).removeprefix('torch.')}{list(value.shape)}" if known else ""
        lines.append(f"{node.format_node() or node}{shape}")
    return "\n".join([*lines, ""])


def append(file: Path, line: str) -> None:
    with file.open("a") as stream:
        stream.write(f"{line}\n")


def _new_folder(parent: Path, name: Callable[[int], str]) -> Path:
    """Make the first folder whose number is not taken, by other threads and processes either."""
    number = sum(1 for _ in parent.glob(f"{name(0).partition('0')[0]}*"))
    while True:
        folder = parent / name(number)
        try:
            folder.mkdir()
            return folder
        except FileExistsError:
            number += 1
