"""Numbers that a configuration lacks and its model reads, as the error says."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tests.sweep.hugging_face_inputs import parts

_LACKS = re.compile(r"AttributeError: '(?P<kind>\w+)' object has no attribute '(?P<name>\w+)'")
_USUAL = {"rope_theta": 10_000.0, "dropout": 0.0, "dropout_rate": 0.0, "num_key_value_heads": 2}

Missing = Mapping[tuple[str, str], Any]  # class of a configuration, name -> value


def missing(config: Any, why: str, known: Missing) -> Missing | None:
    """What was known to be missing with what the error names; None: it names nothing new that has a value."""
    match = _LACKS.match(why)
    if match is None or (match["kind"], match["name"]) in known:
        return None
    others = (vars(part)[match["name"]] for part in parts(config) if vars(part).get(match["name"]) is not None)
    value = next(others, _USUAL.get(match["name"]))
    return None if value is None else {**known, (match["kind"], match["name"]): value}


def complete(config: Any, lacking: Missing) -> Any:
    """The configuration and those within it with what they lack."""
    for part in parts(config):
        for (kind, name), value in lacking.items():
            if type(part).__name__ == kind:
                vars(part)[name] = value
    return config
