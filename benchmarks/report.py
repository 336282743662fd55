"""Turn measured outcomes into a table, a JSON file and bar charts."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.case import Case
from benchmarks.contenders import CONTENDERS
from benchmarks.driver import Outcome, Protocol

OURS = "ours"
COLOURS = {
    "ours": "#d1495b",
    "ours_float_attention": "#f2786d",
    "ours_loaded": "#b0213a",
    "ours_compile": "#e89aa5",
    "ours_bf16": "#c98bb9",
    "ours_fp32": "#5e2a3f",
    "onednn": "#8d5a97",
    "eager": "#c9cdd2",
    "eager_cl": "#9aa1a9",
    "inductor": "#66a182",
    "zentorch": "#edae49",
    "onnxruntime": "#2e86ab",
    "openvino": "#574ae2",
}


@dataclass(frozen=True)
class Summary:
    """Quartiles of one contender's latency on one case, in milliseconds."""

    contender: str
    low_ms: float
    median_ms: float
    high_ms: float
    count: int

    @classmethod
    def of(cls, outcome: Outcome) -> Summary | None:
        if not outcome.times_ns:
            return None
        low, median, high = np.percentile(np.array(outcome.times_ns) / 1e6, (25, 50, 75))
        return cls(outcome.contender, float(low), float(median), float(high), len(outcome.times_ns))


@dataclass(frozen=True)
class Result:
    """All outcomes of one case."""

    case: Case
    outcomes: list[Outcome]

    def summaries(self) -> dict[str, Summary]:
        found = (Summary.of(outcome) for outcome in self.outcomes)
        return {summary.contender: summary for summary in found if summary is not None}

    def fastest_peer(self) -> Summary | None:
        rows = [row for name, row in self.summaries().items() if CONTENDERS[name].is_peer]
        return min(rows, key=lambda row: row.median_ms, default=None)

    def ratio(self) -> float | None:
        """Return the fastest peer's median divided by ours: above 1, ours is faster. None where ours is provisional."""
        ours, peer = self.summaries().get(OURS), self.fastest_peer()
        if any(outcome.contender == OURS and is_provisional(outcome) for outcome in self.outcomes):
            return None
        return peer.median_ms / ours.median_ms if ours and peer else None


def is_provisional(outcome: Outcome) -> bool:
    """Whether some of it was chosen by estimate: its times say nothing of what was to be compared."""
    return bool(outcome.notes.get("provisional"))


def table(result: Result) -> str:
    """Return one case as text, a line per contender, fastest first."""
    summaries, ours = result.summaries(), result.summaries().get(OURS)
    lines = [
        f"{result.case}",
        f"  {'':28} {'median ms':>10} {'quartiles':>19} {'n':>4} {'vs ours':>8} {'first call s':>13} "
        f"{'peak MiB':>9} {'error':>9} {'SQNR dB':>8}",
    ]
    order = sorted(result.outcomes, key=lambda row: summaries[row.contender].median_ms if row.times_ns else 1e30)
    for outcome in order:
        title = CONTENDERS[outcome.contender].title
        if (row := summaries.get(outcome.contender)) is None:
            lines.append(f"  {title:28} {'-':>10}   {outcome.error}")
            continue
        versus = f"{row.median_ms / ours.median_ms:8.2f}" if ours else f"{'-':>8}"
        lines.append(
            f"  {title:28} {row.median_ms:10.3f} {row.low_ms:9.3f}-{row.high_ms:<9.3f} {row.count:4} {versus} "
            f"{outcome.ready_s:13.2f} {outcome.peak_bytes / 2**20:9.0f} {outcome.max_error:9.1e} {outcome.sqnr_db:8.1f}"
            f"{'  provisional' if is_provisional(outcome) else ''}"
        )
    if (ratio := result.ratio()) is not None and (peer := result.fastest_peer()) is not None:
        lines.append(f"  fastest peer / ours: {ratio:.2f} ({CONTENDERS[peer.contender].title})")
    return "\n".join(lines)


def overview(results: Iterable[Result]) -> str:
    """Return one Markdown table: a row per case, a column per contender (medians in ms), and the ratio.

    Cases in integers have the signal to noise ratio beside each time.
    """
    results = list(results)
    names = [name for name in CONTENDERS if any(name in result.summaries() for result in results)]
    head = ["case", *(CONTENDERS[name].title for name in names), "fastest peer / ours"]
    lines = ["| " + " | ".join(head) + " |", "|---" + "|---:" * (len(head) - 1) + "|"]
    for result in results:
        summaries, ratio = result.summaries(), result.ratio()
        unsure = {outcome.contender for outcome in result.outcomes if is_provisional(outcome)}
        noise = {row.contender: f", {row.sqnr_db:.1f} dB" for row in result.outcomes if result.case.is_quantized}
        cells = [
            f"{summaries[name].median_ms:.2f}{noise.get(name, '')}{' (provisional)' if name in unsure else ''}"
            if name in summaries
            else "-"
            for name in names
        ]
        lines.append("| " + " | ".join([str(result.case), *cells, f"**{ratio:.2f}**" if ratio else "-"]) + " |")
    return "\n".join(lines)


def save(results: list[Result], protocol: Protocol, path: Path) -> None:
    """Write everything measured to `path` as JSON; `load` reads it back."""
    document = {
        "machine": machine(),
        "protocol": asdict(protocol),
        "written": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        "results": [{"case": asdict(row.case), "outcomes": [asdict(item) for item in row.outcomes]} for row in results],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".part")
    temporary.write_text(json.dumps(document, indent=1))
    temporary.replace(path)


def load(path: Path) -> list[Result]:
    """Return the results in a file written by `save`."""
    rows = json.loads(path.read_text())["results"]
    return [Result(Case(**row["case"]), [Outcome(**item) for item in row["outcomes"]]) for row in rows]


def machine() -> dict[str, Any]:
    """Return what the numbers depend on: CPU model, core count, kernel, Python."""
    cpuinfo = Path("/proc/cpuinfo").read_text().splitlines()
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in cpuinfo)}
    return {
        "cpu": f"{facts.get('model name')} (family {facts.get('cpu family')}, model {facts.get('model')})",
        "cores": sum(line.startswith("processor") for line in cpuinfo),
        "system": platform.platform(),
        "python": platform.python_version(),
    }
