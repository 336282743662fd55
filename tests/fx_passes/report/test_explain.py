"""explain(): every node is accounted for, in text and HTML."""

from __future__ import annotations

import html.parser
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zendnn_cffi
from tests.support.lowering import net, noise

X = noise(2, 3, 8, 8)


def made() -> Any:
    """A convolution with two post-ops, a view, a linear, a fallback inside and one outside."""

    def fn(m: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(m[0](x) + 1)
        y = torch.softmax(y, 1)
        return torch.cumsum(m[1](y.flatten(1)), 1)

    return zendnn_cffi.optimize(net(fn, nn.Conv2d(3, 16, 3), nn.Linear(576, 5)), tune="off")


def test_before_the_first_call() -> None:
    found = zendnn_cffi.explain(made())
    assert {n.became for n in found.nodes} == {"waiting", "movement", "torch"}
    assert found.offloaded_share == 0.0
    assert "lowered on the first call" in str(found)
    assert "3 of 4 operations in regions, which the first call lowers" in str(found)


def test_after_a_call() -> None:
    gm = made()
    gm(X)
    found = zendnn_cffi.explain(gm)
    became = {n.name: n for n in found.nodes}
    conv = next(n for n in found.nodes if n.became == "convolution")
    assert conv.post_ops == ("linear", "relu") and conv.offloaded and conv.flops == 2 * 2 * 16 * 36 * 27
    assert "avx" in conv.implementation and conv.layout and conv.source and conv.signature == "2x3x8x8"
    soft = next(n for n in found.nodes if "softmax" in n.name)
    assert soft.became == "torch" and "last" in soft.reason and soft.region
    outside = became["cumsum"]
    assert outside.became == "torch" and not outside.region and outside.reason
    assert any(n.became == "inner_product" for n in found.nodes)
    times_ns = {n.name: n.time_ns for n in found.nodes if n.region and n.computes}
    assert all(times_ns.values())  # each is known, the fallback's among them
    share = 1 - times_ns[soft.name] / sum(times_ns.values())
    assert found.share_basis == "time" and found.offloaded_share == pytest.approx(share)
    assert found.counts()["convolution", conv.implementation] == 1


def test_every_signature_is_told() -> None:
    gm = made()
    gm(X)
    gm(noise(1, 3, 8, 8))
    found = zendnn_cffi.explain(gm)
    assert {n.signature for n in found.nodes if n.region} == {"2x3x8x8", "1x3x8x8"}
    table = [line.split() for line in str(found).splitlines()]
    assert table[0][:3] == ["node", "inputs", "became"]
    assert {row[1] for row in table if row[0] in {n.name for n in found.nodes if n.region}} == {"2x3x8x8", "1x3x8x8"}
    assert "<th>inputs</th>" in found._repr_html_() and "<td>1x3x8x8</td>" in found._repr_html_()


def test_one_signature_needs_no_column() -> None:
    gm = made()
    gm(X)
    found = zendnn_cffi.explain(gm)
    assert "inputs" not in str(found) and "<th>inputs</th>" not in found._repr_html_()


def test_text() -> None:
    gm = made()
    gm(X)
    text = str(zendnn_cffi.explain(gm))
    lines = text.splitlines()
    assert lines[0].split() == ["node", "became", "implementation", "layout", "absorbed", "why", "not"]
    summary = (
        r"\d+% of the time of the regions' operations in the engine \(each estimated alone; 1 more operations outside"
    )
    assert re.search(summary, text) and "linear relu" in text
    assert "2 in PyTorch" in text and "1 view" in text and "torch torch" not in text and "view view" not in text
    assert all(line == line.rstrip() for line in lines) and repr(zendnn_cffi.explain(gm)) == text


def test_weights_are_counted_in_bytes() -> None:
    model = net(lambda m, x: m[2](F.relu(m[1](m[0](x))).flatten(1)), nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16),
                nn.Linear(576, 5))  # fmt: skip
    gm = zendnn_cffi.optimize(model, tune="off")
    read = sum(t.numel() * t.element_size() for t in model.state_dict().values() if t.is_floating_point())
    before = zendnn_cffi.explain(gm).weights
    assert (before.original_bytes, before.packed_bytes) == (read, 0)
    gm(X)
    after = zendnn_cffi.explain(gm).weights
    (region,) = gm.regions().values()
    (lowered,) = region.lowered.values()
    parameters = {t.untyped_storage().data_ptr() for t in model.state_dict().values()}
    copies = [t for t in lowered.program.constants if t.untyped_storage().data_ptr() not in parameters]
    assert after.original_bytes == read
    assert after.packed_bytes == sum(t.numel() * t.element_size() for t in copies) > 4 * (16 * 27 + 16)
    line = f"weights: {read:,} bytes original plus {after.packed_bytes:,} bytes packed copies"
    assert line in str(zendnn_cffi.explain(gm)) and line in zendnn_cffi.explain(gm)._repr_html_()


def test_weights_that_regions_share_count_once() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(torch.cumsum(self.linear(x), 1))

    gm = zendnn_cffi.optimize(Twice().eval(), tune="off")
    gm(noise(4, 8))
    assert len(gm.regions()) == 2
    assert zendnn_cffi.explain(gm).weights.original_bytes == 8 * 8 * 4


def test_html_is_well_formed_and_escaped() -> None:
    gm = made()
    gm(X)
    found = zendnn_cffi.explain(gm)
    page = found._repr_html_()

    class Counter(html.parser.HTMLParser):
        rows, open_tags = 0, 0

        def handle_starttag(self, tag: str, attrs: Any) -> None:
            self.rows += tag == "tr"
            self.open_tags += tag not in ("br",)

        def handle_endtag(self, tag: str) -> None:
            self.open_tags -= 1

    counter = Counter()
    counter.feed(page)
    assert counter.rows == len(found.nodes) + 1 and counter.open_tags == 0
    from dataclasses import replace

    found.nodes[0] = replace(found.nodes[0], reason="<script>")
    assert "<script>" not in found._repr_html_() and "&lt;script&gt;" in found._repr_html_()


def test_a_model_without_anything_to_do() -> None:
    found = zendnn_cffi.explain(zendnn_cffi.optimize(nn.Identity().eval()))
    assert found.offloaded_share == 0.0 and "0% of 0 operations in the engine: nothing" in str(found)
    assert found._repr_html_()


class Shapes(nn.Module):
    """Sizes, arithmetic over them, an assertion and moved data between two products, as in vision transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, length = x.shape[0], x.shape[1]
        torch._assert(length % 2 == 0, "an even length")
        y = torch.cumsum(self.first(x), 1)
        y = y.reshape(n * (length // 2), 2, 8).transpose(1, 2).reshape(n, length, 8)
        return torch.cumsum(self.second(y), 1)


@pytest.mark.parametrize("example", (None, (noise(2, 4, 8),)), ids=("symbolic", "exported"))
def test_sizes_assertions_and_moved_data_are_no_operations(example: Any) -> None:
    gm = zendnn_cffi.optimize(Shapes().eval(), example, tune="off")
    gm(noise(2, 4, 8))
    found = zendnn_cffi.explain(gm)
    computing = sorted(n.became for n in found.nodes if n.computes)
    assert computing == ["inner_product", "inner_product", "torch", "torch"]
    assert {n.became for n in found.nodes if not n.computes} <= {"number", "check", "movement", "view"}
    assert any(n.became == "number" for n in found.nodes)
    assert all(n.reason for n in found.nodes if not n.offloaded and n.became != "view")
    assert found.share_basis == "time" and found.offloaded_share == 1.0
    assert "2 more operations outside" in str(found)


def test_after_profile_the_share_is_that_of_a_call() -> None:
    gm = made()
    measured = zendnn_cffi.profile(gm, X, runs=3)
    found = zendnn_cffi.explain(gm)
    assert found.share_basis == "call" and found.profile is measured
    assert 0 < measured.engine_ns < measured.primitives_ns  # the softmax inside is PyTorch's
    assert found.offloaded_share == pytest.approx(min(measured.engine_ns / measured.total_ns, 1.0))
    assert "of a call's time in the engine" in str(found)


def test_reasons_of_what_stays_whole() -> None:
    class Branches(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if x.sum() > 0 else x

    gm = zendnn_cffi.optimize(nn.Sequential(nn.Linear(8, 8), Branches(), nn.Linear(8, 8)).eval(), tune="off")
    gm(noise(2, 8))
    (whole,) = (n for n in zendnn_cffi.explain(gm).nodes if n.became == "torch")
    assert whole.reason == gm.leaves["1"] and "control flow" in whole.reason


def test_a_region_that_pytorch_runs_counts_by_operations() -> None:
    gm = zendnn_cffi.optimize(nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval(), tune="off")
    gm(noise(0, 8))
    found = zendnn_cffi.explain(gm)
    assert found.share_basis == "operations" and found.offloaded_share == 0.0
    assert {n.reason for n in found.nodes} == {"an input is empty"}


@pytest.mark.parametrize("other", (None, nn.Conv2d(3, 4, 1), 3))
def test_other_objects(other: Any) -> None:
    with pytest.raises(TypeError, match=r"explain\(\) takes what zendnn_cffi.optimize\(\), zendnn_cffi.replace_f"):
        zendnn_cffi.explain(other)


def test_a_model_whose_forward_was_replaced() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval()
    replaced = zendnn_cffi.replace_forward(model, tune="off")
    for each in (model, replaced):
        with pytest.raises(TypeError, match="no call was optimized yet: call the model once"):
            zendnn_cffi.explain(each)
    with torch.no_grad():
        model(noise(2, 8))
    for each in (model, replaced, nn.ModuleDict({"held": model})):
        assert [node.became for node in zendnn_cffi.explain(each).nodes] == ["inner_product"]
    found = zendnn_cffi.profile(model, noise(2, 8), runs=2)
    assert found.records and zendnn_cffi.explain(model).share_basis == "call"


def test_a_replaced_forward_that_stays_plain_says_why() -> None:
    model = nn.Linear(8, 8).eval()
    replaced = zendnn_cffi.replace_forward(model, tune="off")
    with torch.no_grad():
        model(noise(2, 8).to_sparse())
    for each in (model, replaced, nn.ModuleDict({"held": model})):
        with pytest.raises(TypeError, match="stayed plain PyTorch: a tensor among the arguments is sparse, nested or"):
            zendnn_cffi.explain(each)


def test_parts_whose_forwards_were_replaced_are_told_apart() -> None:
    model = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 4)}).eval()
    for part in model.values():
        zendnn_cffi.replace_forward(part, tune="off")
        part(noise(2, 8))
    assert [node.name.partition(".")[0] for node in zendnn_cffi.explain(model).nodes] == ["a", "b"]
