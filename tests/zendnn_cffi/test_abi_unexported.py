"""What no *_desc_init shows: structs filled by hand, argument ids, queries. The library is asked through primitives.

A descriptor handed to the library comes back through primitive_desc_query: field for field, if it is as declared.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from zendnn_cffi.engine import abi
from zendnn_cffi.engine.loaded import Library


class Session:
    """One engine, and primitive descriptors made on it, with nothing of our own layers between."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self.engine = self.make("engine_create", library.const("cpu"), 0)
        self.made: list[Any] = []

    def make(self, function: str, *arguments: Any) -> Any:
        create = self.library.fn(function)
        out = self.library.ffi.new(self.library.ffi.typeof(create).args[0])
        assert create(out, *arguments) == 0, function
        return out[0]

    def primitive_desc(self, op_desc: Any) -> Any:
        null = self.library.ffi.NULL
        self.made.append(self.make("primitive_desc_create", op_desc, null, self.engine, null))
        return self.made[-1]

    def close(self) -> None:
        for made in self.made:
            self.library.fn("primitive_desc_destroy")(made)
        self.library.fn("engine_destroy")(self.engine)


@pytest.fixture
def session(library: Library) -> Iterator[Session]:
    session = Session(library)
    yield session
    session.close()


def filled(library: Library, kind: str, **fields: Any) -> Any:
    """Return a zeroed <kind>_desc_t with primitive_kind and the given fields set; memory descriptors as (dims, tag)."""
    desc = library.new(f"{kind}_desc_t *")
    desc.primitive_kind = library.const("rnn" if kind == "rnn" else kind)
    for name, value in fields.items():
        if name.endswith("_desc"):
            value = abi.make_desc(library, *value)[0]
        elif isinstance(value, str):
            value = library.const(value)
        setattr(desc, name, value)
    return desc


INFERENCE = "forward_inference"
IMAGE, SMALL = ((2, 16, 8, 8), "f32", "nchw"), ((2, 16, 4, 4), "f32", "nchw")
POOL = {"prop_kind": INFERENCE, "alg_kind": "pooling_avg_include_padding", "src_desc": IMAGE, "dst_desc": SMALL}
TWO_BY_TWO = {"strides": [2, 2], "kernel": [2, 2]}
HAND_FILLED: dict[str, dict[str, Any]] = {
    "pooling": {**POOL, **TWO_BY_TWO, "accum_data_type": "f32"},
    "pooling_v2": {**POOL, **TWO_BY_TWO, "accum_data_type": "f32", "dilation": [0, 0]},
    "batch_normalization": {
        "prop_kind": INFERENCE,
        "data_desc": IMAGE,
        "data_scaleshift_desc": ((2, 16), "f32", "nc"),
        "stat_desc": ((16,), "f32", "x"),
        "batch_norm_epsilon": 0.125,
        "flags": 3,
    },
    "layer_normalization": {
        "prop_kind": INFERENCE,
        "data_desc": ((4, 16), "f32", "nc"),
        "data_scaleshift_desc": ((2, 16), "f32", "nc"),
        "stat_desc": ((4,), "f32", "x"),
        "layer_norm_epsilon": 0.125,
        "flags": 2,
    },
    "lrn": {
        "prop_kind": INFERENCE,
        "alg_kind": "lrn_across_channels",
        "data_desc": IMAGE,
        "local_size": 5,
        "lrn_alpha": 0.25,
        "lrn_beta": 0.75,
        "lrn_k": 2.0,
    },
    "prelu": {"prop_kind": INFERENCE, "data_desc": IMAGE, "weights_desc": ((1, 16, 1, 1), "f32", "nchw")},
    "reduction": {
        "alg_kind": "reduction_norm_lp_sum",
        "src_desc": IMAGE,
        "dst_desc": ((2, 16, 1, 1), "f32", "nchw"),
        "p": 3.0,
        "eps": 0.5,
    },
    "resampling": {
        "prop_kind": INFERENCE,
        "alg_kind": "resampling_linear",
        "src_desc": SMALL,
        "dst_desc": IMAGE,
        "factors": [2.0, 2.0],
    },
    "shuffle": {"prop_kind": INFERENCE, "data_desc": IMAGE, "axis": 1, "group_size": 4},
    "deconvolution": {
        "prop_kind": INFERENCE,
        "alg_kind": "deconvolution_direct",
        "src_desc": SMALL,
        "weights_desc": ((16, 16, 2, 2), "f32", "any"),
        "dst_desc": IMAGE,
        "strides": [2, 2],
        "accum_data_type": "f32",
    },
    "rnn": {
        "prop_kind": INFERENCE,
        "cell_kind": "vanilla_rnn",
        "direction": "unidirectional_left2right",
        "src_layer_desc": ((3, 2, 16), "f32", "tnc"),
        "weights_layer_desc": ((1, 1, 16, 1, 16), "f32", "any"),
        "weights_iter_desc": ((1, 1, 16, 1, 16), "f32", "any"),
        "bias_desc": ((1, 1, 1, 16), "f32", "ldgo"),
        "dst_layer_desc": ((3, 2, 16), "f32", "tnc"),
        "activation_kind": "eltwise_relu",
        "alpha": 0.25,
    },
}


def test_every_struct_without_an_initialiser_is_tried(library: Library) -> None:
    structs = {
        name.removeprefix("zendnn_").removesuffix("_desc_t")
        for name in library.ffi.list_types()[0]
        if name.endswith("_desc_t") and library.ffi.typeof(name).kind == "struct"
        and any(member == "primitive_kind" for member, _ in library.ffi.typeof(name).fields or [])
    }  # fmt: skip
    initialised = {name.removesuffix("_desc_t") for name, _ in abi.fillers(library)}
    assert structs - initialised == HAND_FILLED.keys()


@pytest.mark.parametrize("kind", HAND_FILLED)
def test_hand_filled_struct_comes_back_as_it_went_in(session: Session, kind: str) -> None:
    library = session.library
    desc = filled(library, kind, **HAND_FILLED[kind])
    made = session.primitive_desc(desc)
    for query in (f"query_{kind}_d", "query_op_d"):
        out = library.ffi.new("void **")
        assert library.fn("primitive_desc_query")(made, library.const(query), 0, out) == 0
        back = library.ffi.cast(library.ctype(f"{kind}_desc_t *"), out[0])
        for name, value in HAND_FILLED[kind].items():
            found = getattr(back, name)
            if name.endswith("_desc"):
                ndims = len(value[0])
                assert (found.ndims, tuple(found.dims)[:ndims]) == (ndims, value[0]), name
            elif isinstance(value, list):
                assert list(found)[: len(value)] == value, name
            else:
                assert found == (library.const(value) if isinstance(value, str) else value), name
        assert back.primitive_kind == desc.primitive_kind


INITIALISED = [
    "convolution",
    "inner_product",
    "matmul",
    "eltwise",
    "binary",
    "softmax",
    "logsoftmax",
    "softmax_v2",
    "embedding_bag",
]


@pytest.mark.parametrize("kind", INITIALISED)
def test_initialised_struct_is_found_under_its_own_query(session: Session, kind: str) -> None:
    library = session.library
    desc = library.new(f"{kind}_desc_t *")
    assert dict(abi.fillers(library))[f"{kind}_desc_t"](desc) == 0
    made = session.primitive_desc(desc)
    out = library.ffi.new("void **")
    assert library.fn("primitive_desc_query")(made, library.const(f"query_{kind}_d"), 0, out) == 0
    assert library.ffi.cast("int *", out[0])[0] == library.const(kind)
    others = [other for other in (*INITIALISED, *HAND_FILLED) if other not in (kind, "pooling", "pooling_v2")]
    answered = [
        o for o in others if library.fn("primitive_desc_query")(made, library.const(f"query_{o}_d"), 0, out) == 0
    ]
    assert set(answered) <= {"softmax", "logsoftmax", "softmax_v2"}  # one implementation serves all three


@pytest.mark.parametrize("kind", HAND_FILLED)
def test_scalar_queries(session: Session, kind: str) -> None:
    library = session.library
    made = session.primitive_desc(filled(library, kind, **HAND_FILLED[kind]))
    number, text = library.ffi.new("int *"), library.ffi.new("const char **")
    query = library.fn("primitive_desc_query")
    assert query(made, library.const("query_primitive_kind"), 0, number) == 0
    assert number[0] == library.const("rnn" if kind == "rnn" else kind)
    if "prop_kind" in HAND_FILLED[kind]:
        assert query(made, library.const("query_prop_kind"), 0, number) == 0
        assert number[0] == library.const(INFERENCE)
    assert query(made, library.const("query_impl_info_str"), 0, text) == 0
    assert library.ffi.string(text[0])
    handle = library.ffi.new(library.ctype("engine_t *"))
    assert query(made, library.const("query_engine"), 0, handle) == 0
    assert handle[0] == session.engine
    inputs = library.fn("primitive_desc_query_s32")(made, library.const("query_num_of_inputs_s32"), 0)
    outputs = library.fn("primitive_desc_query_s32")(made, library.const("query_num_of_outputs_s32"), 0)
    assert inputs >= 1
    assert outputs == 1


def convolution(library: Library) -> Any:
    desc = library.new("convolution_desc_t *")
    weights = abi.make_desc(library, (32, 16, 3, 3))
    src, dst = abi.make_desc(library, *IMAGE), abi.make_desc(library, (2, 32, 8, 8), "f32", "nchw")
    ones = (1,) * 12
    init = library.fn("convolution_forward_desc_init")
    bias = abi.make_desc(library, (32,), "f32", "x")
    kind, how = library.const(INFERENCE), library.const("convolution_direct")
    assert init(desc, kind, how, src, weights, bias, dst, ones, ones, ones) == 0
    return desc


ARGUMENTS = {
    "convolution": {"SRC": (2, 16, 8, 8), "WEIGHTS": (32, 16, 3, 3), "BIAS": (32,), "DST": (2, 32, 8, 8)},
    "batch_normalization": {"SRC": (2, 16, 8, 8), "MEAN": (16,), "VARIANCE": (16,), "SCALE_SHIFT": (2, 16)},
    "prelu": {"SRC": (2, 16, 8, 8), "WEIGHTS": (1, 16, 1, 1), "DST": (2, 16, 8, 8)},
    "rnn": {
        "SRC_LAYER": (3, 2, 16),
        "WEIGHTS_LAYER": (1, 1, 16, 1, 16),
        "BIAS": (1, 1, 1, 16),
        "DST_LAYER": (3, 2, 16),
    },
}


@pytest.mark.parametrize(
    ("kind", "argument"), [(kind, argument) for kind, arguments in ARGUMENTS.items() for argument in arguments]
)
def test_argument_id_names_its_memory(session: Session, kind: str, argument: str) -> None:
    library = session.library
    desc = convolution(library) if kind == "convolution" else filled(library, kind, **HAND_FILLED[kind])
    made = session.primitive_desc(desc)
    query = library.fn("primitive_desc_query_md")
    found = query(made, library.const("query_exec_arg_md"), library.const(f"ARG_{argument}"))
    expected = ARGUMENTS[kind][argument]
    assert found != library.ffi.NULL
    assert tuple(found.dims)[: found.ndims] == expected


@pytest.mark.parametrize(
    ("query", "dims"),
    [("src", (2, 16, 8, 8)), ("weights", (32, 16, 3, 3)), ("dst", (2, 32, 8, 8))],
)
def test_memory_descriptor_queries(session: Session, query: str, dims: tuple[int, ...]) -> None:
    library = session.library
    made = session.primitive_desc(convolution(library))
    found = library.fn("primitive_desc_query_md")(made, library.const(f"query_{query}_md"), 0)
    assert tuple(found.dims)[: found.ndims] == dims


@pytest.mark.parametrize("number", range(3))
def test_post_op_arguments_are_where_the_macro_says(session: Session, number: int) -> None:
    library, fn = session.library, session.library.fn
    post_ops, attr = session.make("post_ops_create"), session.make("primitive_attr_create")
    side = abi.make_desc(library, (2, 32, 8, 8), "f32", "nchw")
    for _ in range(3):
        assert fn("post_ops_append_binary")(post_ops, library.const("binary_add"), side) == 0
    assert fn("primitive_attr_set_post_ops")(attr, post_ops) == 0
    made = session.make("primitive_desc_create", convolution(library), attr, session.engine, library.ffi.NULL)
    argument = library.const("ARG_ATTR_MULTIPLE_POST_OP_BASE") * (number + 1) | library.const("ARG_SRC_1")
    found = fn("primitive_desc_query_md")(made, library.const("query_exec_arg_md"), argument)
    assert found != library.ffi.NULL
    assert tuple(found.dims)[:4] == (2, 32, 8, 8)
    for destroy, handle in (("primitive_desc", made), ("primitive_attr", attr), ("post_ops", post_ops)):
        assert fn(f"{destroy}_destroy")(handle) == 0
