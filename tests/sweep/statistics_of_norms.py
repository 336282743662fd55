"""Batch normalizations with the statistics of what they are given.

With those they are born with, deep random networks shrink what they compute until nothing is left of it.
"""

from __future__ import annotations

import copy

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from tests.sweep.case import Case


def with_statistics(case: Case) -> Case:
    """The case with running statistics of its own call, where batch normalizations have any; as it was otherwise."""
    norms = [m for m in case.model.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
    before = copy.deepcopy([norm.state_dict() for norm in norms])
    momenta = [norm.momentum for norm in norms]
    try:
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # one call then gives exactly its statistics
            norm.train()
        if norms:
            with torch.no_grad():
                case.model(*case.args, **case.kwargs)
    except Exception:  # one value a channel has no statistics
        for norm, state in zip(norms, before, strict=True):
            norm.load_state_dict(state)
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
            norm.eval()
    return case
