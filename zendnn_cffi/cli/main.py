"""The arguments of the four commands, and their errors in one line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from zendnn_cffi.cli.errors import CommandError

_MODEL = """\
MODEL is one of
  resnet50                a name of torchvision, then of timm, then of a Hugging Face architecture, with random weights
  timm:resnet50           the same of one library: torchvision:, timm: or hf:
  hf:bert                 an architecture by its model type, with its default configuration; or a folder with a model
  model.pt2               a file that torch.export.save wrote
  package.module:function a function of yours that returns a model, or a pair: the model, and the arguments of a call;
                          or such a model, or pair, itself
"""


def parser() -> argparse.ArgumentParser:
    """Return the parser; each command's function is its default `run`."""
    top = argparse.ArgumentParser(
        prog="python -m zendnn_cffi", description="PyTorch inference on AMD ZenDNN: look, check, measure, explain."
    )
    top.add_argument("--version", action=_Version, nargs=0, help="print the version of this package")
    top.add_argument("--traceback", action="store_true", help="show where an error came from")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    show = commands.add_parser("show", help="versions, library, CPU, threads, and what is known of this CPU")
    show.add_argument("--json", action="store_true", help="print JSON")
    show.set_defaults(run=_show)

    check = commands.add_parser("check", help="library, ABI, a sample of its kernels, small models, peaks: a minute")
    check.add_argument("--seconds", type=_seconds, default=25.0, help="length of the sample of kernels (%(default)s)")
    check.set_defaults(run=_check)

    explain = _with_model(commands.add_parser, "explain", "what became of each operation of a model, and why not more")
    explain.add_argument("--profile", action="store_true", help="also time every call inside")
    explain.set_defaults(run=_explain)

    bench = _with_model(commands.add_parser, "bench", "a model beside eager PyTorch and the peers that are installed")
    bench.add_argument(
        "--mode",
        choices=("latency", "throughput", "realtime", "all"),
        default="latency",
        help="latency: one call on all cores. throughput: the best of --batches and --instances."
        " realtime: instances of --cores cores each, all busy (default: latency)",
    )
    bench.add_argument("--beside", nargs="*", metavar="NAME", help="contenders (default: all that are installed)")
    bench.add_argument("--seconds", type=_seconds, default=3.0, help="measured of each contender (%(default)s)")
    bench.add_argument("--batches", type=_count, nargs="+", default=[1, 8, 32], help="for throughput (1 8 32)")
    bench.add_argument("--instances", type=_count, nargs="+", help="for throughput (1, and one per core)")
    bench.add_argument("--cores", type=_count, default=1, help="of an instance, for realtime (%(default)s)")
    bench.add_argument("--json", type=Path, metavar="FILE", help="write all results")
    bench.add_argument("--png", type=Path, metavar="FILE", help="draw them; needs matplotlib")
    bench.set_defaults(run=_bench)
    return top


class _Version(argparse.Action):
    """Prints the version and ends; --help does without the import."""

    def __call__(self, *_: object) -> None:
        from zendnn_cffi.api.config import package_version

        print(package_version())
        sys.exit(0)


def _with_model(add: object, name: str, text: str) -> argparse.ArgumentParser:
    made: argparse.ArgumentParser = add(  # type: ignore[operator]
        name, help=text, description=text, epilog=_MODEL, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("model", metavar="MODEL", help="see below")
    made.add_argument("--batch", type=_count, default=1, help="samples of a call (%(default)s)")
    made.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="(%(default)s)")
    made.add_argument("--threads", type=_count, help="threads of a call (default: as PyTorch has)")
    return made


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of 1 or more")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 86400:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0")
    return value


def _show(args: argparse.Namespace) -> int:
    from zendnn_cffi.cli.show import show

    return show(as_json=args.json)


def _check(args: argparse.Namespace) -> int:
    from zendnn_cffi.cli.check import check

    return check(args.seconds)


def _explain(args: argparse.Namespace) -> int:
    from zendnn_cffi.cli.explain import explain

    return explain(args.model, args.batch, args.dtype, args.threads, profiled=args.profile)


def _bench(args: argparse.Namespace) -> int:
    from zendnn_cffi.cli.bench import bench

    return bench(args)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return its exit status: 0, 1 where a check failed, 2 where it could not be done."""
    args = parser().parse_args(argv)
    try:
        status: int = args.run(args)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if args.traceback:
            raise
        said = str(error) if isinstance(error, CommandError) else f"{type(error).__name__}: {error}"
        print(f"error: {' '.join(said.split())[:500]}", file=sys.stderr)
        return 2
    return status
