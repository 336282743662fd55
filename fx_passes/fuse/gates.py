"""Recognise activations that models write out.

x * sigmoid(x)      -> swish
x * hardsigmoid(x)  -> hardswish
"""

from __future__ import annotations

from torch import fx

from fx_passes import ops
from fx_passes.graph.graph import finish, is_call, only_user

# gate -> (kind, alpha)
GATES = {"logistic": ("swish", 1.0), "hardsigmoid": ("hardswish", 0.0)}


def fuse_gates(gm: fx.GraphModule) -> fx.GraphModule:
    """Replace every product of a value with a gate computed from it."""
    for node in gm.graph.find_nodes(op="call_function", target=ops.binary):
        if (match := match_gate(node)) is not None:
            src, gate = match
            kind, alpha = GATES[gate.args[1]]
            node.target, node.args = ops.eltwise, (src, kind, alpha, 0.0)
    return finish(gm)


def match_gate(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """(value, gate) of value * gate(value), the gate read by nobody else."""
    a, b, kind = node.args
    if kind != "mul":
        return None
    for src, gate in ((a, b), (b, a)):
        gated = is_call(gate, ops.eltwise) and gate.args[1] in GATES and gate.args[0] is src
        if gated and only_user(gate) is node:
            return src, gate
    return None
