"""Recurrent layers."""

from __future__ import annotations

from zendnn_cffi.primitives.attributes import kind_value
from zendnn_cffi.primitives.descriptors.common import (
    INFERENCE,
    OpDesc,
    describing,
    fill,
    need,
    need_dense_bias,
    need_equal,
    need_layout,
    need_rank,
)
from zendnn_cffi.primitives.memory import MemoryDesc

CELLS = {"rnn_tanh": 0x1FFF, "rnn_relu": 0x1FFF, "lstm": 0x2FFF, "gru": 0x4FFF}
GATES = {"rnn_tanh": 1, "rnn_relu": 1, "lstm": 4, "gru": 3}
_ACTIVATIONS = {"rnn_relu": 31, "rnn_tanh": 47}
_LEFT_TO_RIGHT, _RIGHT_TO_LEFT = 0, 1
_FIELDS = {
    "src": "src_layer",
    "weights": "weights_layer",
    "dst": "dst_layer",
    "projection": "weights_projection",
}


@describing
def recurrent(
    src: MemoryDesc,
    weights: MemoryDesc,
    weights_iter: MemoryDesc,
    bias: MemoryDesc,
    dst: MemoryDesc,
    *,
    kind: str,
    reverse: bool = False,
    projection: MemoryDesc | None = None,
    src_iter: MemoryDesc | None = None,
    src_iter_c: MemoryDesc | None = None,
    dst_iter: MemoryDesc | None = None,
    dst_iter_c: MemoryDesc | None = None,
) -> OpDesc:
    """One layer in one direction: lstm, gru (reset behind the recurrent product, as PyTorch's), rnn_tanh, rnn_relu.

    src [T, N, I], weights [1, 1, I, G, H], weights_iter [1, 1, O, G, H], bias [1, 1, G, H] f32 (G + 1 of gru: the
    last is the bias of the new state's recurrent product), dst [T, N, O]. Gates: lstm input, forget, cell, output; gru
    update, reset, new. O is H unless there is a projection [1, 1, H, O], of lstm. Initial and last states src_iter and
    dst_iter [1, 1, N, O], of lstm src_iter_c and dst_iter_c [1, 1, N, H]; left out: zeros, or not wanted.
    reverse begins at the last step.
    """
    states = {"src_iter": src_iter, "src_iter_c": src_iter_c, "dst_iter": dst_iter, "dst_iter_c": dst_iter_c}
    given = {name: desc for name, desc in {"projection": projection, **states}.items() if desc is not None}
    need(src=src, weights=weights, weights_iter=weights_iter, bias=bias, dst=dst, **given)
    number = kind_value(CELLS, kind, "kind")
    for name, desc, rank in (("src", src, 3), ("dst", dst, 3), ("weights", weights, 5), ("bias", bias, 4)):
        need_rank(desc, rank, name)
    for name, desc in (("src", src), ("dst", dst), ("bias", bias)):
        need_layout(desc, name)
    need_dense_bias(bias)
    (steps, samples, inputs), gates, hidden, width = src.dims, GATES[kind], weights.dims[-1], dst.dims[-1]
    need_equal(dst.dims[:2], (steps, samples), "dst steps and samples against src's")
    need_equal(weights.dims, (1, 1, inputs, gates, hidden), "weights dims against [1, 1, I, gates, H]")
    need_equal(weights_iter.dims, (1, 1, width, gates, hidden), "weights_iter dims against [1, 1, O, gates, H]")
    need_equal(bias.dims, (1, 1, gates + (kind == "gru"), hidden), "bias dims against [1, 1, gates, H]")
    if projection is not None:
        need_equal(projection.dims, (1, 1, hidden, width), "projection dims against [1, 1, H, O]")
    if projection is None or kind != "lstm":
        need_equal((projection, width), (None, hidden), "projection and dst's width (only lstm takes a projection)")
    for name, state in states.items():
        if state is not None:
            cell = name.endswith("_c")
            need_equal(state.dims, (1, 1, samples, hidden if cell else width), f"{name} dims against [1, 1, N, width]")
            need_layout(state, name)
    for side in ("src", "dst"):
        both = [states[f"{side}_iter"] is None, states[f"{side}_iter_c"] is None]
        need_equal(both[1], both[0] if kind == "lstm" else True, f"whether {side}_iter_c is left out ({kind})")
    descs: dict[str, MemoryDesc | None] = {
        "src": src,
        "weights": weights,
        "weights_iter": weights_iter,
        "bias": bias,
        "dst": dst,
        "projection": projection,
        **states,
    }
    return fill(
        "rnn",
        descs,
        prop_kind=INFERENCE,
        cell_kind=number,
        direction=_RIGHT_TO_LEFT if reverse else _LEFT_TO_RIGHT,
        activation_kind=_ACTIVATIONS.get(kind, 0),
        params={"kind": kind, "reverse": bool(reverse)},
        _fields={f"{_FIELDS.get(name, name)}_desc": desc for name, desc in descs.items()},
    )
