"""Pages of a mapped file that are let go are not resident, and read the same afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from zendnn_cffi.runtime.mapped import let_go


def resident_kb(address: int) -> int:
    """Resident memory of the mapping that begins at an address, or holds it."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            begin, end = (int(part, 16) for part in head.split("-"))
            inside = begin <= address < end
        elif inside and head == "Rss:":
            return int(line.split()[1])
    raise AssertionError("no such mapping")


@pytest.mark.parametrize("offset", (0, 64, 4096 + 4))
def test_pages_go_and_come_back(offset: int, tmp_path: Path) -> None:
    expected = torch.arange(1 << 20, dtype=torch.int32)
    path = tmp_path / "m"
    path.write_bytes(bytes(offset) + expected.numpy().tobytes())
    storage = torch.UntypedStorage.from_file(str(path), False, offset + expected.nbytes)
    tensor = torch.empty(0, dtype=torch.int32).set_(storage, offset // 4, (1 << 20,))
    assert torch.equal(tensor, expected)
    before = resident_kb(tensor.data_ptr() + (1 << 21))
    let_go(tensor.split(1 << 18))
    assert before > 4000 and resident_kb(tensor.data_ptr() + (1 << 21)) < 100
    assert torch.equal(tensor, expected)


def test_less_than_a_page_stays() -> None:
    tensor = torch.arange(8)
    let_go([tensor])
    let_go([torch.empty(0)])
    assert tensor.tolist() == list(range(8))
