"""explain(...).model_explorer(): a graph whose edges lead somewhere, with the times of what ran."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zendnn_cffi
from fx_passes.report.explain import Explanation
from fx_passes.report.picture import COLOURS


class Network(nn.Module):
    """Two regions, and between them what stays PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(17, 33), nn.Linear(33, 17)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        z = self.first(x)
        return self.second(torch.cumsum(z, 1)) + y, z


def written(tmp_path: Path) -> tuple[Any, dict[str, Any], dict[str, Any], Explanation]:
    torch.manual_seed(0)
    fast: Any = zendnn_cffi.optimize(Network().eval(), tune="off")
    fast(torch.randn(3, 17), torch.randn(3, 17))
    found = zendnn_cffi.explain(fast)
    times = found.model_explorer(tmp_path / "graph.json")
    assert times == tmp_path / "graph.times.json"
    (graph,) = json.loads((tmp_path / "graph.json").read_text())["graphs"]
    return fast, graph, json.loads(times.read_text())[graph["id"]], found


def test_edges_lead_from_inputs_through_regions_to_the_output(tmp_path: Path) -> None:
    fast, graph, _, found = written(tmp_path)
    nodes = {node["id"]: node for node in graph["nodes"]}
    assert len(nodes) == len(graph["nodes"])
    reads = {name: [edge["sourceNodeId"] for edge in node["incomingEdges"]] for name, node in nodes.items()}
    assert all(source in nodes for sources in reads.values() for source in sources)
    reached, pending = set(), ["output"]
    while pending:
        name = pending.pop()
        if name not in reached:
            reached.add(name)
            pending += reads[name]
    assert reached == set(nodes)
    assert {name for name, sources in reads.items() if not sources} == {"x", "y"}
    assert {node["namespace"] for node in nodes.values()} == {"", *fast.regions()}
    assert {(each.region, each.name) for each in found.nodes} <= {
        (node["namespace"], attribute["value"])
        for node in nodes.values()
        for attribute in node["attrs"]
        if attribute["key"] == "name"
    }


def test_operations_have_colours_reasons_and_times(tmp_path: Path) -> None:
    _, graph, times, found = written(tmp_path)
    nodes = {node["id"]: node for node in graph["nodes"]}
    said = {name: {a["key"]: a["value"] for a in node["attrs"]} for name, node in nodes.items()}
    for each in found.nodes:
        name = f"{each.region}/{each.name}" if each.region else each.name
        assert said[name].get("implementation", "") == each.implementation and said[name]["became"] == each.became
        assert said[name].get("reason", "") == each.reason
        assert (nodes[name]["style"]["backgroundColor"] == COLOURS["engine"]) == each.in_engine
        assert times["results"].get(name, {}).get("value") == (round(each.time_ns / 1e3, 3) if each.time_ns else None)
    assert sum(each.in_engine for each in found.nodes) >= 2 and len(times["results"]) >= 2


def test_refusals(tmp_path: Path) -> None:
    found = zendnn_cffi.explain(zendnn_cffi.optimize(nn.Linear(3, 3).eval()))
    with pytest.raises(ValueError, match=r"\.json"):
        found.model_explorer(tmp_path / "graph.svg")
    assert not list(tmp_path.iterdir())
