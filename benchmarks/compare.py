"""Compare zendnn_cffi with the other ways to run a PyTorch model on this CPU, side by side.

    make bench                                            the standard set
    python benchmarks/compare.py --models resnet50 --batches 1 16 --dtypes fp32 bf16
    python benchmarks/compare.py --models resnet50 --batches 1 --dtypes int8
    make scaling                                          one model, batch 1 to 640, one and two threads
    python benchmarks/compare.py --draw benchmarks/out/latest.json

Every case (model, batch, dtype, threads) is run by all contenders interleaved; see driver.py for how. Writes a JSON
file, PNG charts and a Markdown table into --out.
The standard set takes hours; --models, --batches, --seconds and --iterations make it shorter, --resume goes on.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from pathlib import Path

if __name__ == "__main__":  # the checkout comes last, so that an installed zendnn_cffi wins over the source tree
    sys.path[:] = [*sys.path[1:], str(Path(__file__).resolve().parent.parent)]

from benchmarks import peers
from benchmarks.case import DTYPES, QUANTIZED, Case
from benchmarks.contenders import CONTENDERS
from benchmarks.driver import Protocol, prepare, run_case
from benchmarks.report import Result, load, machine, overview, save, table

STANDARD_MODELS = [
    *("resnet18", "resnet50", "vgg16", "inception_v3", "densenet121", "mobilenet_v2", "efficientnet_b0"),
    *("convnext_tiny", "resnext50_32x4d", "googlenet", "squeezenet1_1", "shufflenet_v2_x1_0"),
]
OUT = Path(__file__).resolve().parent / "out"


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Protocol()
    parser.add_argument("--models", nargs="+", default=STANDARD_MODELS, metavar="NAME")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 16], metavar="N")
    parser.add_argument("--dtypes", nargs="+", choices=[*DTYPES, *QUANTIZED], default=["fp32"])
    parser.add_argument("--threads", nargs="+", type=int, default=[2], metavar="N")
    parser.add_argument("--contenders", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS), metavar="NAME")
    parser.add_argument("--out", type=Path, default=OUT, metavar="FOLDER")
    parser.add_argument("--warmup", type=int, default=default.warmup)
    parser.add_argument("--iterations", type=int, default=default.iterations)
    parser.add_argument("--rounds", type=int, default=default.rounds)
    parser.add_argument("--seconds", type=float, default=default.seconds, help="cap on the timed part of each")
    parser.add_argument("--min-iterations", type=int, default=default.min_iterations, help="... however long they take")
    parser.add_argument("--warm-caches", action="store_true", help="let compilers and tuning use their disk caches")
    parser.add_argument("--resume", action="store_true", help="keep the cases that OUT/latest.json has, run the others")
    parser.add_argument("--keep-files", action="store_true", help="keep the ONNX files (large) for the next run")
    parser.add_argument("--draw", type=Path, metavar="JSON", help="only print and draw an earlier run again")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run the comparison; return the exit status: 1 if any contender of ours failed."""
    options = parse_arguments(arguments)
    if options.draw:
        return finish(load(options.draw), options.out)
    protocol = Protocol(
        warmup=options.warmup,
        iterations=options.iterations,
        rounds=min(options.rounds, options.iterations, options.min_iterations),
        seconds=options.seconds,
        min_iterations=min(options.min_iterations, options.iterations),
        cold=not options.warm_caches,
    )
    for environment in sorted({CONTENDERS[name].environment for name in options.contenders}):
        peers.ensure(environment)
    latest = options.out / "latest.json"
    results = load(latest) if options.resume and latest.exists() else []
    done = {result.case for result in results}
    cases = [
        Case(model, batch, dtype, threads)
        for model, batch, dtype, threads in itertools.product(
            options.models, options.batches, options.dtypes, options.threads
        )
    ]
    facts = machine()
    print(f"{facts['cpu']}, {facts['cores']} cores", flush=True)
    for number, case in enumerate(cases, 1):
        if case in done:
            continue
        say(f"case {number} of {len(cases)}: {case}: preparing")
        prepare(case)
        outcomes = run_case(case, options.contenders, protocol, say)
        results.append(Result(case, outcomes))
        print(table(results[-1]), flush=True)
        save(results, protocol, latest)
        if not options.keep_files and case.workload not in {later.workload for later in cases[number:]}:
            case.forget()
    save(results, protocol, options.out / time.strftime("%Y%m%d-%H%M%S.json"))
    return finish(results, options.out)


def finish(results: list[Result], out: Path) -> int:
    """Print and write the overview, draw the charts."""
    from benchmarks import charts

    text = overview(results)
    print(f"\nmedian ms\n{text}")
    out.mkdir(parents=True, exist_ok=True)
    (out / "overview.md").write_text(text + "\n")
    for file in charts.draw(results, out):
        print(f"wrote {file}")
    return int(any(outcome.error for result in results for outcome in result.outcomes if outcome.contender == "ours"))


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
