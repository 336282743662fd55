"""Turn a call's template and the places of its arguments into the call, for running and for measuring alike."""

from __future__ import annotations

from collections.abc import Callable

from fx_passes.candidates.candidates import (
    Argument,
    GemmTemplate,
    LoopTemplate,
    Operand,
    Operation,
    PrimitiveTemplate,
    Result,
    Template,
    TorchTemplate,
)
from fx_passes.candidates.layouts import GrowingDesc
from zendnn_cffi.primitives.memory import MemoryDesc
from zendnn_cffi.primitives.primitive import Primitive
from zendnn_cffi.runtime.calls import Call, PrimitiveCall, TorchCall
from zendnn_cffi.runtime.gemm_call import GemmCall
from zendnn_cffi.runtime.loop_call import LoopCall
from zendnn_cffi.runtime.places import Slot, TensorView

Place = Callable[[Argument], tuple[Slot, MemoryDesc]]


def materialise(template: Template, name: str, operation: Operation | None, operands: int, place: Place) -> Call:
    """Return the call that a template describes.

    operation  None: a reorder or a check, of no operation
    operands   how many the operation has: those of a PyTorch call that names no arguments
    place      where an argument lies, and the layout it is seen in
    """
    flops = operation.flops if operation is not None else 0
    match template:
        case PrimitiveTemplate(pd, args, kind):
            places = {arg: place(argument) for arg, argument in args.items()}
            return PrimitiveCall(name, Primitive(pd), places, kind, flops if template.flops is None else template.flops)
        case GemmTemplate(gemm, src, weights, dst):
            source, packed, result = (place(argument)[0] for argument in (src, weights, dst))
            return GemmCall(name, gemm, source, packed, result, tuple(map(place, template.operands)), flops)
        case LoopTemplate(steps, args, rounds, kind, own):
            primitives = tuple((Primitive(pd), parts) for pd, parts in steps)
            return LoopCall(name, primitives, tuple(map(place, args)), rounds, kind, own)
        case TorchTemplate(function, args=args):
            kind = operation.kind if operation is not None else template.kind
            arguments = args or (*map(Operand, range(operands)), Result())
            *srcs, written = (_view(*place(argument)) for argument in arguments)
            own = template.flops if args or operation is None else flops
            return TorchCall(
                name, function, tuple(srcs), written, kind, own, into=template.into, allocate=template.allocate
            )


def _view(slot: Slot, desc: MemoryDesc) -> TensorView:
    """A slot as the torch tensor that desc describes (always plain: torch calls ask for eager layouts)."""
    assert desc.strides is not None and desc.dtype is not None
    return TensorView(slot, desc.dims, desc.strides, desc.dtype, isinstance(desc, GrowingDesc))
