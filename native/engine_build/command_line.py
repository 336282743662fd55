"""Arguments in, one provider's step run, config.json out; a failure is one line on stderr and exit status 1."""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from .common import BuildError, say
from .config import EngineConfig, copy_licences, write_config


def main(arguments: list[str]) -> int:
    """Run one build of the engine folder; return the exit status."""
    options = parser().parse_args(arguments)
    try:
        build(options)
    except BuildError as error:
        print(f"zendnn_cffi: error: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


def parser() -> argparse.ArgumentParser:
    """The arguments CMakeLists.txt passes."""
    top = argparse.ArgumentParser(prog="engine.py", description=__doc__)
    top.add_argument("provider", choices=("prebuilt", "source", "system", "none"))
    top.add_argument("--out", type=Path, required=True, help="folder that becomes zendnn_cffi/_engine")
    top.add_argument("--work", type=Path, required=True, help="folder for downloads and intermediate files")
    top.add_argument("--license", type=Path, required=True, help="our own licence")
    top.add_argument("--cmake", default="cmake", help="the cmake to build BLIS and ZenDNN with")
    top.add_argument("--jobs", type=int, default=0, help="parallel compilations, 0 for one per processor")
    top.add_argument("--wheel", type=Path, help="prebuilt: the wheel, already downloaded")
    top.add_argument("--library", type=Path, help="system: the library to use")
    top.add_argument("--blis", choices=("default", "sdist"), default="default", help="sdist: compile libblis.so too")
    top.add_argument("--blis-sdist", type=Path, help="the BLIS sdist, already downloaded")
    top.add_argument("--third-party", type=Path, help="source: folder where blis/ and ZenDNN/ are or will be cloned")
    top.add_argument("--local-blis", type=Path, help="source: BLIS tree to use instead")
    top.add_argument("--local-zendnn", type=Path, help="source: ZenDNN tree to use instead")
    top.add_argument("--build-type", default="Release", help="source: CMAKE_BUILD_TYPE")
    top.add_argument("--reason", help="none: why there is no engine")
    return top


def build(options: argparse.Namespace) -> None:
    """Fill options.out with the chosen provider's engine. It is emptied first, so nothing of another provider stays."""
    out, work = options.out.resolve(), options.work.resolve()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    work.mkdir(parents=True, exist_ok=True)
    config = run_provider(options, out, work)
    if options.blis == "sdist" and config.provider != "none":
        from .blis_sdist import add_blis_from_sdist

        add_blis_from_sdist(config, out, work, sdist=options.blis_sdist, cmake=options.cmake, jobs=options.jobs)
    copy_licences(out, {"zendnn_cffi-LICENSE": options.license})
    write_config(out, config)
    version = f", ZenDNN {config.zendnn_version}" if config.zendnn_version else ""
    say(f"engine ready: provider {config.provider}{version}")


def run_provider(options: argparse.Namespace, out: Path, work: Path) -> EngineConfig:
    """Dispatch; each provider is imported only when chosen."""
    if options.provider == "prebuilt":
        from .prebuilt import build_prebuilt

        return build_prebuilt(out, work, options.wheel)
    if options.provider == "system":
        from .system import use_system

        return use_system(options.library)
    if options.provider == "source":
        from .source import build_source

        return build_source(out, work, options)
    return EngineConfig(provider="none", reason=options.reason or "this build was asked for no engine")
