"""What docs/sweep.md keeps of each model: a later sweep replaces the models that it runs, and no others."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from tests.sweep.check import NOT_RUN, Verdict
from tests.sweep.process import Journal, Run

RUNS = ("run", "CPU", "package sources", "models")
RAN = ("library", "model", "entry", "verdict", "error", "ZenDNN ran", "regions", "first call, s", "ours / eager", "run")
OUT = ("library", "model", "entry", "why not", "run")

_FOLDERS = re.compile(r"(?<![\w.:/])/(?:[\w.-]+/)+")
_CELLS = re.compile(r"(?<!\\)\|")
_LINE = re.compile(r"- (?P<source>\w+) `(?P<name>.+?)` \((?P<entry>\w+)\): (?P<said>.*)")
_FAULT = re.compile(r"[A-Z]+: (?P<detail>.*), error \S+, ZenDNN ran \d+ of \d+ in .*")
_LEFT = re.compile(r"\d+ of \d+; (?P<left>.*)")


class Key(NamedTuple):
    """A model of a library, and by which entry it ran."""

    source: str
    entry: str
    name: str


Record = dict[Key, tuple[Verdict, Run]]


def of_journals(journals: Mapping[tuple[str, str], Journal]) -> Record:
    """All that journals, by source and entry, say."""
    return {
        Key(source, entry, name): (verdict, journal.runs[name])
        for (source, entry), journal in journals.items()
        for name, verdict in journal.verdicts.items()
    }


def of_page(text: str) -> Record:
    """All that a page says. Digits that it rounds are lost, and reasons that its lists leave out."""
    runs = {row["run"]: Run(row["CPU"], row["package sources"].strip("`")) for row in _rows(text, RUNS)}
    details, left = _listed(text, _FAULT), _listed(text, _LEFT)
    found: Record = {}
    for row in _rows(text, RAN):
        key = _key(row)
        verdict = _verdict(row)
        verdict.detail, verdict.left = details.get(key, ""), left.get(key, "")
        found[key] = verdict, runs[row["run"]]
    for row in _rows(text, OUT):
        found[_key(row)] = Verdict(NOT_RUN, row["why not"]), runs[row["run"]]
    return found


def table(columns: tuple[str, ...], to_the_right: int, rows: Iterable[Iterable[Any]]) -> str:
    """A table whose last columns are numbers."""
    kinds = ["---"] * (len(columns) - to_the_right) + ["---:"] * to_the_right
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in (columns, kinds, *rows))


def plain(text: str) -> str:
    """Text that Markdown takes for text, with files by their names: folders are those of one machine."""
    text = _FOLDERS.sub("", text)
    return "".join(f"\\{c}" if c in "\\*_<>|[]" else c for c in text)


def _said(markdown: str) -> str:
    return re.sub(r"\\(.)", r"\1", markdown)


def _rows(text: str, columns: tuple[str, ...]) -> Iterator[dict[str, str]]:
    """Rows of the table that has these columns."""
    lines = text.splitlines()
    head = f"| {' | '.join(columns)} |"
    for line in lines[lines.index(head) + 2 :] if head in lines else []:
        if not line.startswith("|"):
            return
        cells = [_said(cell.strip()) for cell in _CELLS.split(line)[1:-1]]
        yield dict(zip(columns, cells, strict=True))


def _listed(text: str, pattern: re.Pattern[str]) -> dict[Key, str]:
    """What lines of lists say of models."""
    lines = (_LINE.fullmatch(line) for line in text.splitlines())
    said = {Key(m["source"], m["entry"], m["name"]): pattern.fullmatch(_said(m["said"])) for m in lines if m}
    return {key: match[1] for key, match in said.items() if match}


def _key(row: Mapping[str, str]) -> Key:
    return Key(row["library"], row["entry"], row["model"].strip("`"))


def _verdict(row: Mapping[str, str]) -> Verdict:
    offloaded, nodes = map(int, row["ZenDNN ran"].split(" of "))
    ratio = row["ours / eager"]
    return Verdict(
        row["verdict"],
        error=float(row["error"]),
        offloaded=offloaded,
        nodes=nodes,
        regions=int(row["regions"]),
        first_s=float(row["first call, s"]),
        ratios=[float(ratio)] * 3 if ratio else [],
    )
