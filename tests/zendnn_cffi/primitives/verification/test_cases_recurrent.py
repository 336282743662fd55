"""Recurrent layers of the library against the reference, which computes step by step."""

from __future__ import annotations

import pytest
import torch

from zendnn_cffi import PrimitiveDesc
from zendnn_cffi.errors import UnsupportedError
from zendnn_cffi.primitives.verification.cases_recurrent import layer, recurrents
from zendnn_cffi.primitives.verification.check import check
from zendnn_cffi.primitives.verification.kinds import kind_of
from zendnn_cffi.primitives.verification.unchecked import unchecked

GATES = {"rnn_tanh": 1, "rnn_relu": 1, "lstm": 4, "gru": 3}


def made(*args: object, **kwargs: object) -> PrimitiveDesc:
    with unchecked():
        return PrimitiveDesc(layer(*args, **kwargs))  # type: ignore[arg-type]


@pytest.mark.needs("bf16")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize(("reverse", "states"), [(False, False), (True, True)])
def test_the_library_computes_what_the_reference_does(
    kind: str, dtype: torch.dtype, reverse: bool, states: bool
) -> None:
    pd = made(kind, dtype, (5, 3, 17, 33), reverse=reverse, states=states)
    assert check(pd).problem == ""
    assert kind in kind_of(pd) and ("reverse" in kind_of(pd)) == reverse == ("dst_iter" in kind_of(pd))


@pytest.mark.needs("bf16")
def test_projected_layers_are_right_in_float32_and_refused_in_bfloat16() -> None:
    assert check(made("lstm", torch.float32, (5, 3, 17, 33), width=24, states=True)).problem == ""
    with pytest.raises(UnsupportedError, match="interleaved in pairs"):
        made("lstm", torch.bfloat16, (5, 3, 17, 33), width=24)


def test_cases_have_names_of_their_own() -> None:
    names = [case.name for case in recurrents(torch.float32)]
    assert len(set(names)) == len(names) >= 80
