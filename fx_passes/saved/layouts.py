"""Memory descriptors, attributes and operation descriptors as JSON, and back: made again by the functions that users
call, which check what they are given.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple
from typing import Any

from fx_passes.candidates.layouts import GrowingDesc, Numerics, OpaqueDesc, Quantized, layout, strided
from fx_passes.plan.prepack import layout_digest
from fx_passes.saved.encoding import decode, encode
from fx_passes.saved.errors import FileError
from zendnn_cffi.primitives.attributes import ARG_ATTR_ZERO_POINTS, ARG_DST, ARG_SRC, Attr, PostOps
from zendnn_cffi.primitives.descriptors import MAKERS
from zendnn_cffi.primitives.lpgemm import PackedLayout
from zendnn_cffi.primitives.memory import MemoryDesc
from zendnn_cffi.primitives.primitive import PrimitiveDesc

_ZERO_POINTS = {ARG_ATTR_ZERO_POINTS | arg: arg for arg in (ARG_SRC, ARG_DST)}
_STANDS_FOR = {"opaque": OpaqueDesc, "growing": GrowingDesc, "aocl": PackedLayout}


class NoForm(Exception):
    """Something that has no form in a file: the rule that made it makes it again."""


class Layouts:
    """The layouts of one file, each written once."""

    def __init__(self, written: list[Any] | None = None) -> None:
        self.written: list[Any] = written if written is not None else []
        self._places: dict[Any, int] = {}
        self._read: dict[int, Any] = {}

    def special(self, value: Any) -> Any:
        """A layout as what stands for it, for `encode`."""
        known = isinstance(value, MemoryDesc | OpaqueDesc | PackedLayout)
        return ["layout", self.place(value)] if known else None

    def special_back(self, data: list[Any]) -> Any:
        """The layout that was written so, for `decode`."""
        return self.at(data[1]) if data[0] == "layout" and len(data) == 2 and type(data[1]) is int else None

    def place(self, desc: Any) -> int:
        """The number of a layout. Raises NoForm."""
        key = desc if not isinstance(desc, MemoryDesc) else desc.key
        if key not in self._places:
            if isinstance(desc, Quantized):
                row = ["quantized", self.place(desc.desc), encode(astuple(desc.numerics), _no_special)]
            else:
                row = _written(desc)
            self._places[key] = len(self.written)
            self.written.append(row)
        return self._places[key]

    def at(self, place: int) -> Any:
        """The layout with this number. Raises FileError."""
        if place not in self._read:
            if not 0 <= place < len(self.written):
                raise FileError(f"there is no layout {place}")
            try:
                self._read[place] = self._quantized(place) or _read(self.written[place])
            except Exception as error:  # whatever a constructor raises for what it was not given before
                raise FileError(f"layout {place} cannot be read ({type(error).__name__}: {error})") from error
        return self._read[place]

    def _quantized(self, place: int) -> Quantized | None:
        """A layout of integers, where it is one: it names the layout they lie in, which was written before it."""
        tag, inner, last = self.written[place][:3]
        if tag != "quantized":
            return None
        desc, numerics = self.at(inner) if type(inner) is int and inner < place else None, decode(last, _no_special)
        found = Quantized(desc, Numerics(*numerics))  # type: ignore[arg-type]  # looked at next
        if not isinstance(desc, MemoryDesc) or desc.dtype != found.dtype or not _is_sound(found.numerics):
            raise FileError(f"layout {place} is none of integers")
        return found


def _is_sound(numerics: Numerics) -> bool:
    is_counted = type(numerics.zero_point) is int and numerics.bits in (7, 8)
    return type(numerics.scale) is float and numerics.scale > 0 and is_counted


def _no_special(value: Any) -> None:
    return None


def _written(desc: Any) -> list[Any]:
    def row(tag: str, *last: Any) -> list[Any]:
        return [tag, *(encode(part, _no_special) for part in (tuple(desc.dims), desc.dtype, *last))]

    if isinstance(desc, PackedLayout):
        return row("aocl")
    if isinstance(desc, OpaqueDesc):
        return row("growing" if isinstance(desc, GrowingDesc) else "opaque", tuple(desc.strides))
    if desc.dtype is None or desc.offset0:
        raise NoForm
    if desc.is_any:
        return row("tag", "any")
    found = row("strided", tuple(desc.strides)) if desc.strides is not None else row("tag", desc.format)
    try:
        same = _read(found) == desc
    except Exception:  # no tag of the library has this name
        same = False
    if not same:
        raise NoForm
    return found


def _read(row: list[Any]) -> Any:
    tag, dims, dtype, *last = row[0], *(decode(part, _no_special) for part in row[1:])
    if tag in _STANDS_FOR:
        return _STANDS_FOR[tag](dims, dtype, *last)
    return strided(dims, dtype, *last) if tag == "strided" else layout(dims, dtype, *last)


def encode_descriptor(pd: PrimitiveDesc, layouts: Layouts) -> list[Any]:
    """A primitive's descriptor as JSON: [function, args, kwargs, post-ops, implementation, digest of its layouts]."""
    assert pd.op is not None
    if pd.attr.scratchpad != "user" or pd.attr.runtime_args.keys() - _ZERO_POINTS.keys():
        raise NoForm
    if pd.op.kind == "reorder":
        made_by: tuple[str, Any, Mapping[str, Any]] = "reorder", (pd.op.descs["src"], pd.op.descs["dst"]), {}
    elif pd.op.made_by is not None:
        made_by = pd.op.made_by
    else:
        raise NoForm
    name, args, kwargs = made_by
    parts = (tuple(args), dict(kwargs), pd.attr.post_ops.entries)
    written = [name, *(encode(part, layouts.special) for part in parts), pd.implementation, _digest(pd)]
    if not pd.attr.scales_key:
        return written
    masks = {arg: mask for arg, (mask, *_) in pd.attr.runtime_args.items()}
    return [*written, encode((pd.attr.output_scales, pd.attr.output_scales_mask, masks), layouts.special)]


def decode_descriptor(data: Any, layouts: Layouts) -> PrimitiveDesc:
    """The descriptor that encode_descriptor wrote. Raises FileError where no implementation here is that one."""
    name, args, kwargs, entries, implementation, digest, *scales = data
    args, kwargs, entries = (decode(part, layouts.special_back) for part in (args, kwargs, entries))
    attr = _attr(entries, *(decode(part, layouts.special_back) for part in scales))
    if name != "reorder" and name not in MAKERS:
        raise FileError(f"no primitive is called {str(name)[:80]!r}")
    try:
        if name == "reorder":
            src, dst = args
            first = PrimitiveDesc.reorder(src, dst, attr)
        else:
            first = PrimitiveDesc(MAKERS[name](*args, **kwargs), attr)
    except ValueError as error:  # numbers that do not go with each other
        raise FileError(f"no {name} is described so: {error}") from error
    _check_scales(first)
    if name == "reorder":
        return first
    if first.implementation == implementation and _digest(first) == digest:
        return first
    for pd in first.implementations():
        if pd.implementation == implementation and _digest(pd) == digest:
            return pd
    raise FileError(f"no implementation {str(implementation)[:80]!r} of {first.op}")


def _check_scales(pd: PrimitiveDesc) -> None:
    """Refuse fewer scales than the result has channels: the library would read beyond them."""
    scales, dst = pd.attr.output_scales, pd.dst_desc
    wanted = dst.dims[1] if pd.attr.output_scales_mask and dst is not None else 1
    if isinstance(scales, tuple) and len(scales) != wanted:
        raise FileError(f"{len(scales)} scales are not those of {pd.op}")


def _attr(entries: Any, scales: Any = None) -> Attr | None:
    """The attributes with these post-ops, added by the methods that check them.

    scales  output scales, which dimensions they vary along, and the same of zero points; None: there are none
    """
    post_ops = PostOps()
    for kind, *rest in entries:
        match kind, rest:
            case "eltwise", [name, alpha, beta, scale]:
                post_ops = post_ops.eltwise(name, alpha, beta, scale)
            case "sum", [scale, dtype]:
                post_ops = post_ops.sum(scale, dtype)
            case "binary", [name, desc]:
                post_ops = post_ops.binary(name, desc)
            case "prelu", [mask]:
                post_ops = post_ops.prelu(mask)
            case "depthwise", [weights, bias, dst, kernel, stride, padding]:
                post_ops = post_ops.depthwise(weights, bias, dst, kernel=kernel, stride=stride, padding=padding)
            case _:
                raise FileError(f"no post-op is written as {str(kind)[:80]}")
    if scales is None:
        return Attr(post_ops) if post_ops.entries else None
    numbers, mask, masks = scales
    if mask not in (0, 2) or any(masks.values()):
        raise FileError("scales of other than channels")
    zero_points = {_ZERO_POINTS[arg]: 0 for arg in masks}
    return Attr(post_ops, output_scales=numbers, output_scales_mask=mask, zero_points=zero_points)


def _digest(pd: PrimitiveDesc) -> str:
    """What tells implementations of one name apart: the layouts they chose."""
    return " ".join("-" if d is None else layout_digest(d) for d in (pd.src_desc, pd.weights_desc, pd.dst_desc))
