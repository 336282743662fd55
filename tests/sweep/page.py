"""docs/sweep.md from what is on record: what the page says, and the journals of a sweep, which replace it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median_high

import torch

from demo import vision
from tests.conformance.table import ROOT
from tests.sweep.check import CRASHED, FAULTS, HUNG, NOT_RUN, RAISED, RIGHT, WRONG, Verdict
from tests.sweep.process import Journal, Run
from tests.sweep.record import OUT, RAN, RUNS, Key, Record, of_journals, of_page, plain, table

SLOW_S = 10.0  # a first call of more is worth a line
_COLUMNS = (RIGHT, WRONG, RAISED, CRASHED, HUNG, NOT_RUN)
_HALF = 0.5
_EMPTY = "None."
_PAGE = ROOT / "docs" / "sweep.md"


def write_page(journals: Mapping[tuple[str, str], Journal], path: Path = _PAGE) -> None:
    """Write the page anew: models that no journal has stay as they are."""
    before = of_page(path.read_text()) if path.exists() else {}
    path.write_text(page(before | of_journals(journals)))


def page(record: Record) -> str:
    """The page's text."""
    template = (Path(__file__).parent / "page.md").read_text()
    record = dict(sorted(record.items()))
    found = {key: verdict for key, (verdict, _) in record.items()}
    numbers = {run: i for i, run in enumerate(dict.fromkeys(run for _, run in record.values()), 1)}
    return template.format(
        versions=_versions(),
        runs=_runs(record, numbers),
        totals=_totals(found),
        faults=_lines((key, str(v)) for key, v in found.items() if v.verdict in FAULTS),
        slow=SLOW_S,
        first_calls=_lines(
            (key, f"{v.first_s:.0f} s; {v.regions} regions")
            for key, v in sorted(found.items(), key=lambda item: -item[1].first_s)
            if v.first_s > SLOW_S
        ),
        least=_lines(
            (key, f"{v.offloaded} of {v.nodes}; {v.left}" if v.left else f"{v.offloaded} of {v.nodes}")
            for key, v in sorted(found.items(), key=lambda item: item[1].share)
            if v.verdict == RIGHT and v.share < _HALF
        ),
        not_run=_not_run(record, numbers),
        models=_models(record, numbers),
    )


def _versions() -> str:
    torchvision = vision.torchvision().__version__  # which both import
    import timm
    import transformers

    libraries = f"torchvision {torchvision}, timm {timm.__version__}, transformers {transformers.__version__}"
    return f"PyTorch {torch.__version__}, {libraries}"


def _runs(record: Record, numbers: Mapping[Run, int]) -> str:
    """On which CPU the results were found, and with which sources of the package."""
    counts = Counter(run for _, run in record.values())
    return table(RUNS, 1, ((number, run.cpu, f"`{run.sources}`", counts[run]) for run, number in numbers.items()))


def _totals(found: Mapping[Key, Verdict]) -> str:
    kinds: dict[tuple[str, str], list[Verdict]] = defaultdict(list)
    for key, verdict in found.items():
        kinds[key.source, key.entry].append(verdict)
    rows = []
    for (source, entry), verdicts in kinds.items():
        counts = Counter(v.verdict for v in verdicts)
        shares = [v.share for v in verdicts if v.verdict == RIGHT]
        middle = f"{median_high(shares):.0%}" if shares else "-"
        ratios = [v.ratios[1] for v in verdicts if v.ratios]
        times = f"{len(ratios)}: {median_high(ratios):.2f}, {max(ratios):.2f}" if ratios else "-"
        rows.append([source, entry, len(verdicts), *(counts[word] for word in _COLUMNS), middle, times])
    columns = (
        "library",
        "entry",
        "models",
        *_COLUMNS,
        "share on the engine, median",
        "timed: ours / eager, median, largest",
    )
    return table(columns, len(columns) - 2, rows)


def _lines(rows: Iterable[tuple[Key, str]]) -> str:
    return "\n".join(f"- {key.source} `{key.name}` ({key.entry}): {plain(said)}" for key, said in rows) or _EMPTY


def _not_run(record: Record, numbers: Mapping[Run, int]) -> str:
    rows = (
        (key.source, f"`{key.name}`", key.entry, plain(verdict.detail), numbers[run])
        for key, (verdict, run) in record.items()
        if verdict.verdict == NOT_RUN
    )
    return table(OUT, 1, rows)


def _models(record: Record, numbers: Mapping[Run, int]) -> str:
    rows = []
    for key, (v, run) in record.items():
        if v.verdict != NOT_RUN:
            share = f"{v.offloaded} of {v.nodes}"
            times = f"{v.ratios[1]:.2f}" if v.ratios else ""
            found = [v.verdict, f"{v.error:.0e}", share, v.regions, v.first_s, times, numbers[run]]
            rows.append([key.source, f"`{key.name}`", key.entry, *found])
    return table(RAN, 6, rows)
