"""How long until the first answer: from weights in memory, in a fresh process, with empty and with filled caches.

    python benchmarks/cold_start.py                                       ours beside eager
    python benchmarks/cold_start.py --models resnet50 bert-base-128 --peers
    python benchmarks/cold_start.py --models resnet50 --peers --together 4    four processes at once

Each row is the median of --repeats processes, which take turns. `import` is that of the contender's own packages, of
ours after PyTorch's. `make` is optimize(), load(), compile() or the session; then come the first and the second call.
`steady` is the median of later ones, and `first answer` is make and first call together.

Caches of compilers and ours lie in a folder of their own. It is empty in the cold rows; in the warm ones, a process
before filled it. `ours_loaded` starts from a file that zendnn_cffi.save wrote. ONNX Runtime keeps nothing, and OpenVINO
gets its model cache. Peers run in the environments that `make bench` makes. Those that are missing are skipped, each
with a line. Our modules have bytecode, as installed ones have. What other work disturbs while it is measured is not
kept, so on a busy machine the warm row of ours measures again.

--together N starts N processes of one contender at once, each with --threads threads (at_once.py). `cold`: they share
an empty folder for caches; then comes one process more, alone. `warm`: a process before filled the folder.
"""

from __future__ import annotations

import argparse
import compileall
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":  # the checkout comes last, so that an installed zendnn_cffi wins over the source tree
    sys.path[:] = [*sys.path[1:], str(Path(__file__).resolve().parent.parent)]

from benchmarks import at_once, peers
from benchmarks.case import DTYPES, Case
from benchmarks.contenders import SAVED_VARIABLE

# contender -> what it imports by itself, also what optimize() and load() import where they are called
IMPORTS = {
    "eager": ("torch",),
    "ours": ("zendnn_cffi", "fx_passes.pipeline", "fx_passes.region.region"),
    "ours_loaded": ("zendnn_cffi", "fx_passes.saved.files"),
    "inductor": ("torch._inductor.compile_fx",),
    "onnxruntime": ("onnxruntime",),
    "openvino": ("openvino",),
}
PEERS = ("inductor", "onnxruntime", "openvino")
NO_CACHE = ("eager", "ours_loaded", "onnxruntime")  # they keep nothing on disk: a warm row would say the same again
PARTS = ("import", "make", "first", "second", "steady")
_STEADY_CALLS = 10


def measure(name: str, case: Case) -> dict[str, float]:
    """Run one contender in this process; return the seconds of each of PARTS, and CPU seconds to the first answer."""
    import numpy  # noqa: F401  (contenders share it)

    if name.startswith("ours"):
        import torch  # noqa: F401
    began = time.perf_counter()
    import_own(name)
    imported = time.perf_counter()
    from benchmarks.contenders import CONTENDERS
    from benchmarks.provisional import provisional

    start = CONTENDERS[name].start_of(case)
    ready, cpu = time.perf_counter(), time.process_time()
    runner = start()
    made = time.perf_counter()
    runner.run()
    marks = [time.perf_counter()]
    cpu = time.process_time() - cpu
    for _ in range(1 + _STEADY_CALLS):
        runner.run()
        marks.append(time.perf_counter())
    calls = [after - before for before, after in zip(marks, marks[1:], strict=False)]
    times = (imported - began, made - ready, marks[0] - made, calls[0], statistics.median(calls[1:]))
    return dict(zip(PARTS, times, strict=True)) | {"cpu": cpu, "provisional": provisional()}


def import_own(name: str) -> None:
    """Import what the contender would import later."""
    for module in IMPORTS[name]:
        importlib.import_module(module)


def in_process(name: str, case: Case, caches: Path) -> dict[str, float]:
    """measure() in a fresh process whose compilers and tuning keep what they keep in `caches`."""
    command = _command(name, case, "--in-this-process")
    done = subprocess.run(command, capture_output=True, text=True, env=_environment(case, caches))
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["no message"])[-1])
    answer: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


def at_once_in(name: str, case: Case, caches: Path, count: int) -> at_once.Group:
    """So many fresh processes that begin at once, with the same folder for what they keep."""
    caches.mkdir(exist_ok=True)
    return at_once.run(_command(name, case, "--one-of-several"), _environment(case, caches), count)


def _command(name: str, case: Case, mode: str) -> list[str]:
    return [str(peers.python_of(_environment_of(name))), __file__, mode, name, case.to_json()]


def _environment(case: Case, caches: Path) -> dict[str, str]:
    """Variables of a contender's process."""
    return os.environ | {
        "OMP_NUM_THREADS": str(case.threads),
        "MKL_NUM_THREADS": str(case.threads),
        "ZENDNN_CFFI_CACHE": str(caches / "zendnn_cffi"),
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        SAVED_VARIABLE: str(caches.parent),
        "ZENDNN_CFFI_BENCHMARK_OPENVINO_CACHE": str(caches / "openvino"),
    }


def rows_of(case: Case, names: Sequence[str], repeats: int) -> dict[tuple[str, str], list[dict[str, float]]]:
    """(contender, "cold" or "warm") -> what its processes measured; they take turns. One that fails is left out."""
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    failed: set[str] = set()
    with tempfile.TemporaryDirectory(prefix="cold-start-") as folder:
        for number in range(repeats):
            for name in names:
                warm = Path(folder) / name
                states = [("cold", Path(folder) / f"{name}-{number}")]
                if name not in NO_CACHE:
                    if number == 0 and name not in failed:
                        states = [("cold", warm)]  # which fills it
                    states.append(("warm", warm))
                for state, caches in states:
                    if name in failed:
                        continue
                    caches.mkdir(exist_ok=True)
                    try:
                        found.setdefault((name, state), []).append(in_process(name, case, caches))
                    except RuntimeError as error:
                        failed.add(name)
                        print(f"{case}: {name}: skipped: {error}", file=sys.stderr)
    return found


def rows_together(case: Case, names: Sequence[str], repeats: int, count: int) -> dict[str, at_once.Rows]:
    """Contender -> what its groups of processes measured; they take turns. One that fails is left out."""
    found = {name: at_once.Rows() for name in names}
    with tempfile.TemporaryDirectory(prefix="cold-start-") as folder:
        for number in range(repeats):
            for name in [*found]:
                warm, fresh, rows = Path(folder) / name, Path(folder) / f"{name}-{number}", found[name]
                try:
                    if name not in NO_CACHE:
                        rows.cold.append(at_once_in(name, case, fresh, count))
                        rows.after.append(at_once_in(name, case, fresh, 1))
                    if number == 0:
                        filling = at_once_in(name, case, warm, 1)
                        rows.first += [filling] if name not in NO_CACHE else []
                    rows.alone.append(at_once_in(name, case, warm, 1))
                    rows.warm.append(at_once_in(name, case, warm, count))
                except RuntimeError as error:
                    del found[name]
                    print(f"{case}: {name}: skipped: {error}", file=sys.stderr)
    return found


def table(found: dict[tuple[str, str], list[dict[str, float]]]) -> str:
    """Medians as a Markdown table, in seconds; second and steady calls in milliseconds."""
    lines = [
        "| contender | caches | import s | make s | first call s | first answer s | CPU s | second ms | steady ms |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for (name, state), runs in found.items():
        if not runs:
            continue
        at = {part: statistics.median(run[part] for run in runs) for part in (*PARTS, "cpu")}
        answer = statistics.median(run["make"] + run["first"] for run in runs)
        state = "none" if name in NO_CACHE else state
        state += ", provisional" if any(run.get("provisional") for run in runs) else ""
        lines.append(
            f"| {name} | {state} | {at['import']:.2f} | {at['make']:.2f} | {at['first']:.2f} | {answer:.2f} |"
            f" {at['cpu']:.2f} | {at['second'] * 1e3:.1f} | {at['steady'] * 1e3:.1f} |"
        )
    return "\n".join(lines)


def contenders(with_peers: bool) -> list[str]:
    """Who takes part; a peer whose environment is missing is named and left out."""
    names = ["eager", "ours", "ours_loaded"]
    for name in PEERS if with_peers else ():
        if peers.python_of(_environment_of(name)).exists():
            names.append(name)
        else:
            print(f"{name}: skipped: its environment is missing (python benchmarks/peers.py onnx)", file=sys.stderr)
    return names


def _environment_of(name: str) -> str:
    return "onnx" if name in ("onnxruntime", "openvino") else peers.OURS


def compile_ours() -> None:
    """Write bytecode beside our modules, as pip does for installed packages, the peers' among them."""
    for name in ("zendnn_cffi", "fx_passes"):
        spec = importlib.util.find_spec(name)
        for folder in spec.submodule_search_locations or () if spec is not None else ():
            compileall.compile_dir(folder, quiet=2)


def prepare(case: Case, names: Sequence[str]) -> None:
    """Write the files of the case; the ONNX file, which needs an environment of its own, for those who read it."""
    if any(_environment_of(name) == "onnx" for name in names):
        from benchmarks.driver import prepare as prepare_all

        prepare_all(case)
    elif not (case.weights_file.exists() and case.inputs_file.exists()):
        from benchmarks.prepare import prepare as prepare_here

        prepare_here(case, onnx=False)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table for each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["resnet50", "mobilenet_v2"], metavar="NAME")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3, help="processes of each; medians are printed")
    parser.add_argument("--peers", action="store_true", help="also Inductor, ONNX Runtime, OpenVINO")
    parser.add_argument("--contenders", nargs="+", choices=list(IMPORTS), metavar="NAME", help="these alone")
    parser.add_argument("--together", type=int, metavar="N", help="N processes at once")
    parser.add_argument("--one-of-several", nargs=2, metavar=("CONTENDER", "CASE"), help=argparse.SUPPRESS)
    parser.add_argument("--in-this-process", nargs=2, metavar=("CONTENDER", "CASE"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.in_this_process:
        name, case = options.in_this_process
        print(json.dumps(measure(name, Case.from_json(case))))
        return
    if options.one_of_several:
        name, case = options.one_of_several
        import_own(name)
        at_once.serve(name, Case.from_json(case))
        return
    names = options.contenders or contenders(options.peers)
    compile_ours()
    for model in options.models:
        case = Case(model, 1, options.dtype, options.threads)
        prepare(case, names)
        if options.together:
            rows = at_once.table(rows_together(case, names, options.repeats, options.together), options.together)
        else:
            rows = table(rows_of(case, names, options.repeats))
        print(f"\n{case}\n{rows}", flush=True)


if __name__ == "__main__":
    main()
