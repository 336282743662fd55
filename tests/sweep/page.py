"""docs/sweep.md from the journals of a sweep."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch

from demo import vision
from tests.conformance.table import ROOT
from tests.sweep.check import CRASHED, FAULTS, HUNG, NOT_RUN, RAISED, RIGHT, WRONG, Verdict
from tests.sweep.process import Journal

SLOW_S = 10.0  # a first call of more is worth a line
_COLUMNS = (RIGHT, WRONG, RAISED, CRASHED, HUNG, NOT_RUN)
_HALF = 0.5
_EMPTY = "None."

Found = Mapping[tuple[str, str], Mapping[str, Verdict]]  # source and entry -> model -> verdict


def write_page(journals: Mapping[tuple[str, str], Journal], path: Path = ROOT / "docs" / "sweep.md") -> None:
    """Write the page of all that ran."""
    path.write_text(page({which: journal.verdicts for which, journal in journals.items()}, journals.values()))


def page(found: Found, journals: Iterable[Journal]) -> str:
    """The page's text."""
    template = (Path(__file__).parent / "page.md").read_text()
    return template.format(
        versions=_versions(),
        sources=_sources(journals),
        totals=_totals(found),
        faults=_lines((name, entry, str(v)) for name, entry, v in _every(found) if v.verdict in FAULTS),
        slow=SLOW_S,
        first_calls=_lines(
            (name, entry, f"{v.first_s:.0f} s; {v.regions} regions")
            for name, entry, v in sorted(_every(found), key=lambda row: -row[2].first_s)
            if v.first_s > SLOW_S
        ),
        least=_lines(
            (name, entry, f"{v.offloaded} of {v.nodes}; {v.left}" if v.left else f"{v.offloaded} of {v.nodes}")
            for name, entry, v in sorted(_every(found), key=lambda row: row[2].share)
            if v.verdict == RIGHT and v.share < _HALF
        ),
        models=_models(found),
    )


def _every(found: Found) -> Iterator[tuple[str, str, Verdict]]:
    for (source, entry), verdicts in found.items():
        for name, verdict in verdicts.items():
            yield f"{source} `{name}`", entry, verdict


def _versions() -> str:
    torchvision = vision.torchvision().__version__  # which both import
    import timm
    import transformers

    libraries = f"torchvision {torchvision}, timm {timm.__version__}, transformers {transformers.__version__}"
    return f"PyTorch {torch.__version__}, {libraries}"


def _sources(journals: Iterable[Journal]) -> str:
    """On which CPU the results were found, and with which sources of the package."""
    lines = ["| library | CPU | models | package sources |", "|---|---|---:|---|"]
    for journal in journals:
        for cpu in dict.fromkeys(journal.cpus.values()):
            counts = Counter(sources for name, sources in journal.sources.items() if journal.cpus[name] == cpu)
            said = ", ".join(f"`{sources}` ({count})" for sources, count in counts.most_common())
            lines.append(f"| {journal.path.stem} | {cpu} | {counts.total()} | {said} |")
    return "\n".join(lines)


def _totals(found: Found) -> str:
    lines = [f"| library | entry | models | {' | '.join(_COLUMNS)} | share on the engine, median |"]
    lines.append("|---|---|" + "---:|" * (len(_COLUMNS) + 2))
    for (source, entry), verdicts in found.items():
        counts = Counter(v.verdict for v in verdicts.values())
        shares = sorted(v.share for v in verdicts.values() if v.verdict == RIGHT)
        middle = f"{shares[len(shares) // 2]:.0%}" if shares else "-"
        cells = [source, entry, len(verdicts), *(counts[word] for word in _COLUMNS), middle]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def _lines(rows: Iterable[tuple[str, str, str]]) -> str:
    return "\n".join(f"- {name} ({entry}): {_plain(said)}" for name, entry, said in rows) or _EMPTY


def _plain(text: str) -> str:
    """Text that Markdown takes for text."""
    return "".join(f"\\{c}" if c in "*_<>|[]" else c for c in text)


def _models(found: Found) -> str:
    lines = ["| library | model | entry | verdict | error | ZenDNN ran | regions | first call, s | ours / eager |"]
    lines.append("|---|---|---|---|---:|---:|---:|---:|---:|")
    for (source, entry), verdicts in found.items():
        for name, v in sorted(verdicts.items()):
            if v.verdict != NOT_RUN:
                share = f"{v.offloaded} of {v.nodes}"
                times = f"{v.ratios[1]:.2f}" if v.ratios else ""
                cells = [source, f"`{name}`", entry, v.verdict, f"{v.error:.0e}", share, v.regions, v.first_s, times]
                lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)
