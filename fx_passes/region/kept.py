"""Constants of a region whose parameters were released: packed weights, made plain when they are asked for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from fx_passes.candidates.layouts import row_major
from fx_passes.layout.reorder import reorder_into
from fx_passes.plan.prepack import Packed, as_it_lies, layout_digest
from zendnn_cffi.primitives.memory import Memory
from zendnn_cffi.runtime import huge_pages


class Form(NamedTuple):
    """A constant that is there as packed weights: these, and the shape and dtype of the plain one."""

    packed: Packed
    shape: torch.Size
    dtype: torch.dtype


class Kept(Mapping[str, torch.Tensor]):
    """Constants of a released region by name: plain ones as they are, packed ones made plain each time.

    forms  those that are packed
    still  names of parameters that they were made from and that are still there, as others read them, too
    """

    def __init__(self, plain: Mapping[str, torch.Tensor], forms: Mapping[str, Form], still: Iterable[str] = ()) -> None:
        self._plain, self.forms, self.still = dict(plain), dict(forms), tuple(still)

    def __getitem__(self, name: str) -> torch.Tensor:
        if name in self._plain:
            return self._plain[name]
        packed, shape, dtype = self.forms[name]
        return unpacked(packed).reshape(shape).to(dtype)

    @property
    def plain(self) -> list[torch.Tensor]:
        """What is kept plain."""
        return list(self._plain.values())

    @property
    def plain_by_name(self) -> dict[str, torch.Tensor]:
        """What is kept plain, by name."""
        return dict(self._plain)

    @property
    def packed(self) -> dict[tuple[str, str, bool], torch.Tensor]:
        """The packed weights, as WeightStore.give takes them."""
        return {
            (name, layout_digest(packed.desc), packed.transposed): packed.data
            for name, (packed, _, _) in self.forms.items()
        }

    def __iter__(self) -> Iterator[str]:
        return iter((*self._plain, *self.forms))

    def __len__(self) -> int:
        return len(self._plain) + len(self.forms)

    def __deepcopy__(self, memo: dict[int, Any]) -> Kept:
        """In memory of its own, of the kind that weights are packed into."""
        pool, copied = huge_pages.Pool(), dict[tuple[int, int], torch.Tensor]()

        def copy_of(packed: Packed) -> Packed:
            size_bytes = packed.desc.size_bytes
            key = packed.data.data_ptr(), size_bytes
            if key not in copied:
                with torch.inference_mode(False):
                    copied[key] = pool.allocate(size_bytes).copy_(as_it_lies(packed.data, size_bytes))
            return packed._replace(data=copied[key])

        plain = {name: value.detach().clone() for name, value in self._plain.items()}
        forms = {name: form._replace(packed=copy_of(form.packed)) for name, form in self.forms.items()}
        again = Kept(plain, forms, self.still)
        memo[id(self)] = again
        return again


def unpacked(packed: Packed) -> torch.Tensor:
    """Packed weights as a plain dense tensor of desc's dims, or those swapped where it is the transpose."""
    desc = packed.desc
    assert desc.dtype is not None
    with torch.inference_mode(False):
        plain = torch.empty(desc.dims, dtype=desc.dtype, device="cpu")
    reorder_into(Memory(desc, packed.data.data_ptr()), plain, row_major(desc.dims, desc.dtype))
    return plain.t().contiguous() if packed.transposed else plain
