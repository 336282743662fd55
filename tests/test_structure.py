"""The folders show the data flow: no stage imports a later one, and no files import each other in a circle.

Read from the source: imports inside of functions count like any other, those for type checkers alone do not.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests" / "fx_passes"

# From the ground up: what stands on a line may use its own line and those above. The only place that says so.
ORDER = (
    "zendnn_cffi.errors",
    "zendnn_cffi.log",
    "zendnn_cffi.locks",
    "zendnn_cffi.recent",
    "zendnn_cffi.collector",
    "zendnn_cffi.values",
    "zendnn_cffi.build_ffi",
    "zendnn_cffi.engine",  # the library: found, loaded, checked
    "zendnn_cffi.primitives",  # owners of its handles
    "zendnn_cffi.runtime",  # programs: lists of calls, and their memory
    "zendnn_cffi.functional",  # operations on tensors
    "fx_passes.ops",  # the vocabulary
    "fx_passes.graph",  # questions about nodes, and edits
    "fx_passes.spellings",  # how else an operation may be written
    "fx_passes.aliasing",  # who writes to whose memory
    "fx_passes.trace",
    "fx_passes.normalize",
    "fx_passes.fold",
    "fx_passes.fuse",
    "fx_passes.partition",
    "fx_passes.memoize",
    "fx_passes.bags",
    "fx_passes.candidates",  # what the stages of lowering share
    "fx_passes.lower",
    "fx_passes.layout",
    "fx_passes.plan",
    "fx_passes.search",
    "fx_passes.region",  # drives those from candidates on
    "fx_passes.changes",  # what was changed on a module since
    "fx_passes.first_writes",  # what calls of a model's own forward write to
    "fx_passes.first_call",  # arguments that a model is traced with once more
    "fx_passes.plain_calls",  # which other threads make while a model is traced
    "fx_passes.call_kinds",  # further graphs of a module, for other calls
    "fx_passes.model_watch",  # the same, of a model whose forward was replaced
    "fx_passes.submodule",  # the forward of a part, where the whole is no graph
    "fx_passes.whole_model",  # the graph of a model that could not be traced
    "fx_passes.watched_module",  # what makes its graph again
    "fx_passes.module",
    "fx_passes.report",  # for people: explain, debug folders
    "fx_passes.pipeline",  # states the order of the passes
    "fx_passes.saved",  # modules in files
    "zendnn_cffi.api",  # what users call
    "zendnn_cffi.serving",  # processes that answer calls
    "zendnn_cffi.backend",
    "zendnn_cffi.cli",  # the command line
    "zendnn_cffi",
    "zendnn_cffi.__main__",
)


def source_files() -> dict[str, Path]:
    """Every module of both packages by its dotted name."""
    found = {}
    for package in ("zendnn_cffi", "fx_passes"):
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            if not any(part.startswith("_generated") for part in parts):
                found[".".join(parts).removesuffix(".__init__")] = path
    return found


@cache
def imports() -> dict[str, frozenset[str]]:
    """Module -> modules of both packages that it imports anywhere in its text."""
    files = source_files()
    return {name: frozenset(_imported(name, path, files)) - {name} for name, path in files.items()}


def _imported(name: str, path: Path, files: dict[str, Path]) -> set[str]:
    found = set()
    tree = ast.parse(path.read_text())
    for_types = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in (node for node in ast.walk(tree) if node not in for_types):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name in files}
        elif isinstance(node, ast.ImportFrom):
            package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                full = f"{base}.{alias.name}"
                found |= {full} if full in files else {base} & files.keys()
    return found


def place(module: str) -> int:
    """How high a module stands: by the longest entry of ORDER that it is, or is in."""
    entries = [entry for entry in ORDER if module == entry or module.startswith(f"{entry}.")]
    assert entries and (module in (*ORDER, "fx_passes") or "." in max(entries, key=len)), f"{module} has no place"
    return ORDER.index(max(entries, key=len))


# Modules of fx_passes without a test file of their own, or whole folders of them, and the file that tests them instead.
TESTED_BY = {
    "aliasing.effects": "aliasing/test_aliasing.py",
    "candidates.candidates": "lower/test_primitives.py",  # plain data
    "candidates.conversions": "lower/test_quantized.py",
    "candidates.layouts": "saved/test_layouts.py",  # plain data
    "candidates.shapes": "candidates/shapes/test_rules.py",  # every rule beside fake tensors, from one table
    "fold.behind": "fold/test_int8_layers.py",
    "fuse.dynamic_quantization": "lower/products/test_dynamic.py",
    "graph.affine": "lower/products/test_dynamic.py",
    "graph.free_sizes": "fuse/test_caches.py",
    "graph.hooks": "trace/test_trace.py",
    "layout.reorder": "layout/test_assign.py",
    "lower.attention.steps": "lower/attention/test_attention.py",
    "lower.context": "lower/test_primitives.py",
    "lower.movement.aliases": "lower/movement/test_movement.py",
    "lower.movement.concat_bags": "bags/test_offset_bags.py",
    "lower.movement.embedding": "partition/test_lookups.py",
    "lower.movement.gather": "lower/movement/test_embedding_bags.py",
    "lower.post_ops": "lower/products/test_linear.py",
    "lower.products.row_blocks": "lower/products/test_row_scaled_linear.py",
    "lower.products.scales": "lower/products/test_dynamic_rows.py",
    "lower.products.step": "lower/attention/test_attention.py",
    "lower.rules": "ops/test_registry.py",  # that each operation has one
    "lower.torch_into": "lower/test_torch_candidates.py",
    "lower.recurrent": "lower/recurrent/test_layer.py",
    "normalize.attention": "normalize/test_normalize.py",
    "normalize.recurrent": "lower/recurrent/test_layer.py",
    "ops": "ops/test_ops.py",  # every operation's body, from one table
    "plan": "plan/test_schedule.py",  # whole programs, whose dead memory is poisoned
    "region.batch": "region/test_variants.py",
    "region.compile": "region/test_region.py",
    "region.keep": "saved/test_programs.py",
    "region.kept": "region/test_release.py",
    "region.key": "lower/test_post_ops.py",
    "region.lowered": "region/test_region.py",
    "region.options": "region/test_region.py",
    "report.drawing": "report/test_picture.py",
    "report.explanation": "report/test_explain.py",
    "report.outside": "report/test_explain.py",
    "report.peak": "report/test_profile.py",
    "report.profile_plot": "report/test_profile.py",
    "report.records": "report/test_profile.py",
    "saved": "saved/test_files.py",  # whole files, there and back
    "search.cost": "search/test_tuner.py",
    "search.features": "search/test_learned.py",
    "search.measure": "search/test_verdicts.py",
    "spellings": "normalize/test_normalize.py",  # every spelling beside eager, through normalize
    **dict.fromkeys(
        ("trace.compared", "trace.instructions", "trace.kinds", "trace.proxies", "trace.reached"),
        "trace/test_questions.py",
    ),
    "trace.guards": "trace/test_export.py",
    "trace.held": "trace/test_state.py",  # each row by a forward that changes such an object
    "trace.inline": "trace/test_export.py",
    "trace.recurrent": "lower/recurrent/test_layer.py",
    "trace.seeding": "trace/test_trace.py",
    "trace.sizes": "trace/test_dynamic.py",
    "watched_module": "test_changes.py",  # each change, by what the next calls return
}

MODULES = sorted(set(source_files()) - {"fx_passes"})


@pytest.mark.parametrize("module", MODULES)
def test_nothing_imports_a_later_stage(module: str) -> None:
    later = [other for other in sorted(imports()[module]) if place(other) > place(module)]
    assert not later


def test_no_files_import_each_other_in_a_circle() -> None:
    waiting = {module: set(others) for module, others in imports().items()}
    while ready := [module for module, others in waiting.items() if not others]:
        for module in ready:
            del waiting[module]
        for others in waiting.values():
            others.difference_update(ready)
    for module, others in waiting.items():  # behind a circle, not in one
        assert not others, f"{module} imports {sorted(others)}, which lead back to it or to a circle"


def test_every_folder_says_what_it_holds() -> None:
    for path in (path for package in ("zendnn_cffi", "fx_passes") for path in (ROOT / package).rglob("__init__.py")):
        text = path.read_text()
        assert ast.get_docstring(ast.parse(text)), f"{path.relative_to(ROOT)} says nothing"


def _tests_of(module: str) -> str:
    """The test file of a module of fx_passes, given without that name."""
    folder, _, name = module.rpartition(".")
    own = f"{folder.replace('.', '/')}/test_{name}.py".lstrip("/")
    if (TESTS / own).exists():
        return own
    return next((TESTED_BY[key] for key in (module, folder) if key in TESTED_BY), own)


@pytest.mark.parametrize("module", [m.removeprefix("fx_passes.") for m in MODULES if m.startswith("fx_passes.")])
def test_every_module_has_its_test_file(module: str) -> None:
    if source_files()[f"fx_passes.{module}"].name != "__init__.py":
        assert (TESTS / _tests_of(module)).exists(), f"{_tests_of(module)} is missing"


def test_modules_that_are_tested_elsewhere_are_there() -> None:
    assert not {f"fx_passes.{module}" for module in TESTED_BY} - source_files().keys()
    assert all((TESTS / path).exists() for path in TESTED_BY.values())
