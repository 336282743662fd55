"""Results of `make verify-library` as data of the package, and verdicts of this machine in its cache folder."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zendnn_cffi.engine import host
from zendnn_cffi.primitives.verification import records

FILES = sorted(records.VERIFIED.glob("*"))
_words = st.text(st.sampled_from("ab c1-"), min_size=1, max_size=6).map(str.strip).filter(bool)
_kinds = st.lists(_words, min_size=2, max_size=4).map(" | ".join)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(records, "VERIFIED", tmp_path)
    caches = (records.verified, records._others)
    for cache in caches:
        cache.cache_clear()
    yield tmp_path
    for cache in caches:
        cache.cache_clear()


@given(st.dictionaries(_kinds, st.sampled_from(["", "gives wrong numbers"]), max_size=12))
def test_saved_results_are_read(found: dict[str, str]) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "VERIFIED", Path(folder))
        path = records.save("name", found, cpu="a CPU")
        read = records.verified("name")
        assert read.kinds() == found and read.about == {"machine": "name", "cpu": "a CPU", "kinds": len(found)}
        assert all(read.get(kind) == problem for kind, problem in found.items())
        first = path.read_bytes()
        assert records.save("name", found, cpu="a CPU").read_bytes() == first
        records.verified.cache_clear()


def test_results_of_this_machine_are_found(folder: Path) -> None:
    assert records.found("a b | c") is None
    path = records.save(records.machine(), {"a b | c": "", "a b | d | e": "gives wrong numbers"})
    assert records.found("a b | c") == ""
    assert records.found("a b | d | e") == "gives wrong numbers"
    assert records.found("a b | f") is None and records.found("z | c") is None
    for damage in (b"", b"no gzip", path.read_bytes()[:-9]):
        path.write_bytes(damage)
        records.verified.cache_clear()
        assert records.found("a b | c") is None


def test_what_reached_beyond_its_memory_elsewhere_counts_here(folder: Path) -> None:
    version = records.machine().partition("-")[0]
    elsewhere = {
        "a b | c": "ends the process (signal 11)",
        "a b | d": "writes beyond",
        "a b | e": "gives wrong numbers",
    }
    records.save(f"{version}-zen9-avx2", elsewhere | {"a b | f": ""})
    records.save("0.0-zen9-avx2", {"a b | g": "ends the process (signal 11)"})
    known = {kind: records.found(f"a b | {kind}") for kind in "cdefg"}
    assert known == {"c": elsewhere["a b | c"], "d": "writes beyond", "e": None, "f": None, "g": None}
    records.save(records.machine(), {"a b | c": ""})
    assert records.found("a b | c") == ""


def test_the_package_has_results_and_they_can_be_read() -> None:
    assert FILES, f"no results in {records.VERIFIED}"
    for path in FILES:
        name = path.name.removesuffix(f"-{records.FORMAT}.txt.gz")
        read = records.verified(name)
        found = read.kinds()
        assert read.about["machine"] == name and read.about["cpu"] and read.about["kinds"] == len(found) > 1000
        kinds = {kind.split()[0] for kind in found}
        assert kinds >= {"convolution", "inner_product", "matmul", "pooling"}
        assert "reorder" in kinds or "groups" in read.about  # a file that is not complete says so
        assert 0 < sum(map(bool, found.values())) < len(found) / 5


def test_a_machine_is_its_library_cpu_generation_and_instructions(run_python: object) -> None:
    version, generation, instructions = (
        records.machine().split("-", 1)[0],
        host.cpu_generation(),
        records.instruction_set(),
    )
    assert records.machine() == f"{version}-{generation}-{instructions}" and version[0].isdigit()


@pytest.mark.parametrize(
    ("vendor", "family", "flags", "generation"),
    [
        ("AuthenticAMD", "26", "avx2 avx512f", "zen5"),
        ("AuthenticAMD", "25", "avx2 avx512f", "zen4"),
        ("AuthenticAMD", "25", "avx2", "zen3"),
        ("AuthenticAMD", "23", "avx2", "zen2"),
        ("AuthenticAMD", "27", "avx2 avx512f", "amd-27-avx512"),
        ("GenuineIntel", "6", "avx2 avx512f", "intel-6-avx512"),
        ("GenuineIntel", "6", "avx2", "intel-6-avx2"),
        ("", "", "", "unknown-0-avx2"),
    ],
)
def test_cpu_generations(
    monkeypatch: pytest.MonkeyPatch, vendor: str, family: str, flags: str, generation: str
) -> None:
    facts = {"vendor_id": vendor, "cpu family": family, "flags": flags}
    monkeypatch.setattr(host, "_cpu_fact", lambda name: facts.get(name, ""))
    for function in (host.cpu_flags, host.cpu_generation):
        function.cache_clear()
    try:
        assert host.cpu_generation() == generation
    finally:
        for function in (host.cpu_flags, host.cpu_generation):
            function.cache_clear()


def test_verdicts_outlive_the_process(tmp_path: Path) -> None:
    first = records.Checked(tmp_path / "new", "engine")
    assert first.get("kind") is None
    first.put("kind", "")
    first.put("other", "gives\twrong\nnumbers")
    first.put("doubtful", "fails", keep=False)
    assert first.get("doubtful") == "fails"
    second = records.Checked(tmp_path / "new", "engine")
    assert (second.get("kind"), second.get("other"), second.get("doubtful")) == ("", "gives wrong numbers", None)
    assert records.Checked(tmp_path / "new", "another engine").get("kind") is None


def test_a_damaged_or_unwritable_file_costs_only_the_memory(tmp_path: Path) -> None:
    first = records.Checked(tmp_path, "engine")
    first.put("kind", "")
    assert first.path is not None
    with first.path.open("a") as file:
        file.write("no tab\nhalf a line\tgives wr")
    again = records.Checked(tmp_path, "engine")
    assert (again.get("kind"), again.get("no tab"), again.get("half a line")) == ("", None, None)
    with first.path.open("a") as file:  # it was cut off behind its tab, say, and then others wrote
        file.write("ong\nright\tanother\t\n")
    assert records.Checked(tmp_path, "engine").get("right") is None
    first.path.write_bytes(b"\xff\xfe\n")
    assert records.Checked(tmp_path, "engine").get("kind") is None
    for folder in (None, tmp_path / "file" / "below"):
        (tmp_path / "file").touch()
        nowhere = records.Checked(folder, "engine")
        nowhere.put("kind", "")
        assert nowhere.get("kind") == ""
