"""An optimized model behind LitServe: HTTP, batches put together of requests, a worker for each core.

    python demo/litserve_serving.py                    serve on port 8000 until it is interrupted
    python demo/litserve_serving.py --requests 100     start that, send so many requests at once, compare the answers

Needs `pip install "zendnn_cffi[litserve]"`. All workers load one saved file, and share its memory.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import litserve
import torch

if __name__ in ("__main__", "__mp_main__"):  # the checkout comes last, so that an installed zendnn_cffi wins over it
    sys.path[:] = [*sys.path[1:], str(Path(__file__).resolve().parent.parent)]

import zendnn_cffi
from demo import small_classifier

CORES = 1  # of a worker: threads follow it
LARGEST_BATCH = 4


class Classifier(litserve.LitAPI):
    """What each worker holds."""

    path = ""  # of the saved model

    def setup(self, device: str) -> None:
        """Load it, in the worker's own process."""
        torch.set_num_threads(CORES)
        self.model = zendnn_cffi.load(self.path)

    def decode_request(self, request) -> torch.Tensor:  # type: ignore[no-untyped-def]  # a type would be FastAPI's
        """An image [3, H, W]."""
        return torch.tensor(request["image"])

    def batch(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Images of requests that came together."""
        return torch.stack(list(inputs))

    def predict(self, images: torch.Tensor) -> torch.Tensor:
        """Scores [N, 10]."""
        with torch.inference_mode():
            scores: torch.Tensor = self.model(images)
            return scores

    def unbatch(self, scores: torch.Tensor) -> list[torch.Tensor]:
        """Scores of each request."""
        return list(scores)

    def encode_response(self, scores: torch.Tensor) -> dict[str, Any]:
        """What goes back as JSON."""
        return {"scores": scores.tolist()}


def serve(path: Path, port: int, workers: int) -> None:
    """Answer requests until the process is interrupted."""
    api = Classifier(max_batch_size=LARGEST_BATCH, batch_timeout=0.002)
    api.path = str(path)
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=workers)
    server.run(host="127.0.0.1", port=port, num_api_servers=1, generate_client_file=False, log_level="warning")


def ask(port: int, image: torch.Tensor) -> torch.Tensor:
    """The scores of one image."""
    body = json.dumps({"image": image.tolist()}).encode()
    url, headers = f"http://127.0.0.1:{port}/predict", {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=60) as answer:
        return torch.tensor(json.load(answer)["scores"])


def wait(server: subprocess.Popen[bytes], port: int) -> None:
    """Until the workers are ready. Raises RuntimeError where the server ends."""
    while server.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise RuntimeError(f"the server ended with status {server.returncode}")


def end(server: subprocess.Popen[bytes]) -> None:
    """Interrupt the server, and end what is left of it: it has processes of its own."""
    for signal_number in (signal.SIGINT, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal_number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(10)


def check(path: Path, port: int, workers: int, requests: int) -> None:
    """Start a server, send requests at once, and compare the answers with the model's."""
    images = small_classifier.images(requests)
    with torch.inference_mode():
        expected = small_classifier.build()(images)
    command = [sys.executable, __file__, "--port", str(port), "--workers", str(workers), "--path", str(path)]
    server = subprocess.Popen(command, start_new_session=True)
    try:
        begun = time.perf_counter()
        wait(server, port)
        print(f"{workers} workers answer after {time.perf_counter() - begun:.1f} s")
        begun = time.perf_counter()
        with ThreadPoolExecutor(4 * workers) as clients:
            answers = list(clients.map(lambda image: ask(port, image), images))
        seconds = time.perf_counter() - begun
    finally:
        end(server)
    right = sum(torch.allclose(a, b, atol=1e-4) for a, b in zip(answers, expected, strict=True))
    print(f"LitServe: {right} of {requests} answers right, {requests / seconds:.0f} a second")


def main() -> None:
    """Save a model, then serve it or check that."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)) // CORES)
    parser.add_argument("--path", type=Path, help="a saved model (default: a small one is made)")
    parser.add_argument("--requests", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = options.path or Path(folder) / "model.safetensors"
        if options.path is None:
            small_classifier.save(small_classifier.build(), path, range(1, LARGEST_BATCH + 1), CORES)
        if options.requests:
            check(path, options.port, options.workers, options.requests)
        else:
            serve(path, options.port, options.workers)


if __name__ == "__main__":
    main()
