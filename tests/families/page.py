"""docs/models.md from the verdicts of a sweep."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from tests.families.check import COMPILE, EAGER, ENTRIES, INDUCTOR, OPTIMIZE, Outcome, Verdict
from tests.families.rows import Row, table
from tests.zoo.check import is_slower, ratio_quartiles

ROOT = Path(__file__).resolve().parents[2]
Found = Mapping[str, Mapping[str, Verdict | None]]  # part -> name of the row -> verdict
_HEAD = (
    "| family | model | right | operations on the engine | time on the engine | regions | eager | `optimize` "
    "| `torch.compile` | Inductor |"
)


def quotients(verdict: Verdict, entry: str, other: str = EAGER) -> tuple[float, float, float] | None:
    """Quartiles over rounds of the entry's time divided by the other's; None where one was not measured."""
    ours, theirs = verdict.medians.get(entry), verdict.medians.get(other)
    return ratio_quartiles(ours, theirs) if ours and theirs else None


def write_page(found: Found) -> None:
    """Write docs/models.md."""
    (ROOT / "docs" / "models.md").write_text(page(found))


def page(found: Found) -> str:
    """The page's text."""
    template = Path(__file__).with_name("page.md").read_text()
    timed = [verdict for verdict in found["times"].values() if verdict and verdict.medians]
    return template.format(
        versions=_versions(),
        sources=_sources(verdict for part in found.values() for verdict in part.values() if verdict),
        state=_state(found),
        table="\n".join(_lines(found)),
        faults="\n".join(_faults(found)) or "None.",
        slower="\n".join(_slower(timed)) or "None.",
        remarks="\n".join(_remarks(found)),
        dynamo="\n".join(_notes(found)) or "None.",
        inductor="\n".join(_inductor(timed)) or "None.",
    )


def _versions() -> str:
    from zendnn_cffi.engine.host import cpu_generation, cpu_name
    from zendnn_cffi.engine.library import load

    where = f"{cpu_name()} ({cpu_generation()})"
    return f"PyTorch {torch.__version__}, ZenDNN {load().version}, {where}, {torch.get_num_threads()} threads, float32"


def _sources(verdicts: Iterable[Verdict]) -> str:
    counts = Counter(verdict.sources for verdict in verdicts)
    return ", ".join(f"`{name}` ({count} runs)" for name, count in counts.most_common())


def _that_ran(found: Found) -> set[str]:
    """Names of rows with a verdict of either part."""
    return {name for part in found.values() for name, verdict in part.items() if verdict}


def _state(found: Found) -> str:
    """Whether all models ran."""
    ran = _that_ran(found)
    timed = [name for name, verdict in found["times"].items() if verdict and verdict.medians]
    if len(timed) == len(table()):
        return f"All {len(timed)} models ran."
    counts = f"Of {len(table())} models {len(ran)} ran for this page, {len(timed)} with times."
    return f"{counts} `make models` goes on with the rest."


def _lines(found: Found) -> list[str]:
    lines = [_HEAD, "|---|---|---|---:|---:|---:|---:|---:|---:|---:|"]
    family = ""
    for name, row in table().items():
        answers, times = (found[part].get(name) for part in ("answers", "times"))
        known = times or answers  # what was measured decides what PyTorch computes
        if known is None:
            continue
        cells = [row.family if row.family != family else "", row.what, _right(answers, times, row)]
        family = row.family
        cells += [_pair(known, _operations), _pair(times, _share), _pair(known, lambda o: str(o.regions))]
        cells += [_ms(times, EAGER), *(_ms(times, entry) for entry in ENTRIES), _ms(times, INDUCTOR)]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _right(answers: Verdict | None, times: Verdict | None, row: Row) -> str:
    outcomes = [outcome for verdict in (answers, times) if verdict for outcome in verdict.entries.values()]
    if any(outcome.fault for outcome in outcomes):
        return "**no**"
    return f"{max(outcome.error for outcome in outcomes):.0e}"


def _pair(verdict: Verdict | None, said: object) -> str:
    """By both entries; once where they agree."""
    assert callable(said)
    if verdict is None:
        return ""
    cells = [said(verdict.entries[entry]) for entry in ENTRIES]
    return cells[0] if cells[0] == cells[1] else " / ".join(cells)


def _operations(outcome: Outcome) -> str:
    return f"{outcome.offloaded} of {outcome.nodes}"


def _share(outcome: Outcome) -> str:
    return "" if outcome.share is None else f"{outcome.share:.0%}"


def _ms(times: Verdict | None, contender: str) -> str:
    """The median, and for others than eager how many times as fast as eager that is."""
    if times is None or not times.medians.get(contender):
        return ""
    median = statistics.median(times.medians[contender])
    text = f"{median:.2f}" if median < 10 else f"{median:.1f}" if median < 100 else f"{median:.0f}"
    ratios = quotients(times, contender)
    if contender == EAGER or ratios is None:
        return text
    return f"{text} (**{1 / ratios[1]:.2f}**)" if contender in ENTRIES else f"{text} ({1 / ratios[1]:.2f})"


def _faults(found: Found) -> list[str]:
    return [
        f"- {name}, {entry}, {part}: {outcome.fault}"
        for part, verdicts in found.items()
        for name, verdict in verdicts.items()
        if verdict
        for entry, outcome in verdict.entries.items()
        if outcome.fault
    ]


def _notes(found: Found) -> list[str]:
    lines = [
        f"- {name}: {outcome.note}"
        for part in found.values()
        for name, verdict in part.items()
        if verdict
        for outcome in verdict.entries.values()
        if outcome.note
    ]
    return [*dict.fromkeys(lines)]


def _slower(timed: Iterable[Verdict]) -> list[str]:
    lines = []
    for verdict in timed:
        for entry in ENTRIES:
            for other in (EAGER, INDUCTOR):
                ratios = quotients(verdict, entry, other)
                if ratios and is_slower(ratios):
                    low, middle, high = ratios
                    lines.append(f"- {verdict.name}, {entry}: {middle:.2f} of {other}'s time ({low:.2f} to {high:.2f})")
    return lines


def _remarks(found: Found) -> list[str]:
    ran = _that_ran(found)
    return [f"- {row.name}: {row.remark}." for row in table().values() if row.remark and row.name in ran]


def _inductor(timed: Iterable[Verdict]) -> list[str]:
    return [f"- {verdict.name}: {verdict.inductor}" for verdict in timed if verdict.inductor]


def first_calls(found: Found) -> dict[str, tuple[float, float]]:
    """Seconds to the first answer by both entries."""
    return {
        name: (verdict.entries[OPTIMIZE].first_call_s, verdict.entries[COMPILE].first_call_s)
        for name, verdict in found["times"].items()
        if verdict
    }
