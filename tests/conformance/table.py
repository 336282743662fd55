"""docs/conformance.md from the journals of a sweep."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tests.conformance import cases
from tests.conformance.check import FAULTS, RAISED_AS_EAGER, RIGHT, TORCH_COMPILE, Verdict
from tests.conformance.group import Journal

ROOT = Path(__file__).resolve().parents[2]
_PARTS = ("zendnn_cffi", "fx_passes")
_COLUMNS = (RIGHT, RAISED_AS_EAGER, TORCH_COMPILE, *FAULTS)
_ENTRY_NAMES = {"optimize": "`optimize(example_inputs)`", "compile": '`torch.compile(backend="zendnn")`'}


def sources() -> str:
    """A short hash of the package's Python sources: what the results are results of."""
    digest = hashlib.sha256()
    for path in sorted(p for part in _PARTS for p in (ROOT / part).rglob("*.py") if "_generated" not in p.parts):
        digest.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:12]


@dataclass
class Row:
    """What became of one operator's cases."""

    verdicts: Counter[str] = field(default_factory=Counter)
    offloaded: int = 0
    nodes: int = 0

    def add(self, key: str, verdict: Verdict) -> None:
        """Count a case; the share on the engine is that of networks."""
        self.verdicts[verdict.verdict] += 1
        if key.split("/")[1:2] == ["network"]:
            self.offloaded += verdict.offloaded
            self.nodes += verdict.nodes

    @property
    def share(self) -> str:
        """The engine's share of the operations that compute; a dash where none does, as of views."""
        return f"{self.offloaded / self.nodes:.0%}" if self.nodes else "-"


Found = Mapping[tuple[str, str], Mapping[str, Verdict]]  # (entry, group) -> key -> verdict


def page(found: Found, journals: Iterable[Journal], *, label: str) -> str:
    """The text of docs/conformance.md."""
    groups = list(dict.fromkeys(group for _, group in found))
    keys = {group: [key for key, _ in cases.cases(group)] for group in groups}
    template = Path(__file__).with_name("page.md").read_text()
    return template.format(
        versions=_versions(label),
        sources=_sources(journals),
        state=_state(found, keys),
        totals=_totals(found, keys),
        faults=_faults(found),
        dynamo=_dynamo(found),
        operators=_operators(found, keys),
    )


def _versions(label: str) -> str:
    from zendnn_cffi.engine.host import cpu_name
    from zendnn_cffi.engine.library import load

    asked = "" if label == "native" else f", instruction set limited to {label.upper()}"
    return f"PyTorch {torch.__version__}, ZenDNN {load().version}, {cpu_name()}{asked}, one thread"


def _sources(journals: Iterable[Journal]) -> str:
    """Which sources the results are of, those of most groups first."""
    counts = Counter(journal.sources for journal in journals if journal.sources)
    found = [f"`{name}` ({count} groups)" for name, count in counts.most_common()]
    return "package sources " + ", ".join(found)


def _state(found: Found, keys: Mapping[str, list[str]]) -> str:
    """Whether all cases ran."""
    every, run = sum(len(keys[group]) for _, group in found), sum(map(len, found.values()))
    if run >= every:
        return f"All {every:,} cases ran."
    ran = {
        entry: sum(bool(v) for (e, _), v in found.items() if e == entry) for entry in dict.fromkeys(e for e, _ in found)
    }
    named = " and ".join(f"of {count} by {_ENTRY_NAMES[entry]}" for entry, count in ran.items())
    return (
        f"Of {every:,} cases {run:,} ran for this page, samples evenly spaced among all of an operator:\n"
        f"{named}, of {sum(map(bool, keys.values()))} operators and modules.\n"
        "`make conformance` goes on with the rest."
    )


def _totals(found: Found, keys: Mapping[str, list[str]]) -> str:
    lines = ["| entry | dtype | form | cases | run | " + " | ".join(_COLUMNS) + " |", "|---|---|---|" + "---:|" * 9]
    for entry in dict.fromkeys(entry for entry, _ in found):
        for dtype in cases.DTYPES:
            for form in cases.FORMS:
                start = f"{dtype}/{form}/"
                every = sum(key.startswith(start) for group in keys for key in keys[group])
                counts = Counter(
                    verdict.verdict
                    for (e, _), verdicts in found.items()
                    for key, verdict in verdicts.items()
                    if e == entry and key.startswith(start)
                )
                cells = [every, sum(counts.values()), *(counts[word] for word in _COLUMNS)]
                lines.append(
                    f"| {_ENTRY_NAMES[entry]} | {dtype} | {form} | " + " | ".join(map("{:,}".format, cells)) + " |"
                )
    return "\n".join(lines)


def _faults(found: Found) -> str:
    lines = [
        f"- `{group}` {entry} {key}: {verdict.verdict}: {verdict.detail}"
        for (entry, group), verdicts in found.items()
        for key, verdict in verdicts.items()
        if verdict.verdict in FAULTS
    ]
    return "\n".join(lines) or "None."


def _dynamo(found: Found) -> str:
    """The operators that TorchDynamo by itself gives other results for, with the number of cases."""
    counts: Counter[str] = Counter()
    for (_, group), verdicts in found.items():
        counts[group] += sum(verdict.verdict == TORCH_COMPILE for verdict in verdicts.values())
    return ", ".join(f"`{group}` ({count})" for group, count in sorted(counts.items()) if count) or "none."


def _operators(found: Found, keys: Mapping[str, list[str]]) -> str:
    lines = ["| operator | samples | cases run | right | raised as eager | faults | share on the engine |"]
    lines.append("|---|---:|---:|---:|---:|---:|---:|")
    for group in keys:
        row, run = Row(), 0
        for (_, other), verdicts in found.items():
            if other == group:
                run += len(verdicts)
                for key, verdict in verdicts.items():
                    row.add(key, verdict)
        if not run:
            continue
        samples = len({(key.split("/")[0], key.rsplit("/", 1)[1]) for key in keys[group]})
        faults = sum(row.verdicts[word] for word in FAULTS)
        cells = [f"`{group}`", samples, run, row.verdicts[RIGHT], row.verdicts[RAISED_AS_EAGER], faults, row.share]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)
