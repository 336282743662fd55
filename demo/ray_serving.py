"""An optimized model behind Ray Serve, and over a data set with Ray Data. Every replica loads one saved file.

    python demo/ray_serving.py                    two replicas of one core, 200 requests
    python demo/ray_serving.py --kill             one replica is ended in the midst: no request is lost

Needs `pip install "zendnn_cffi[ray]"`. The file lies where all nodes can read it; on a node, replicas share its memory.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from ray import serve
from ray.exceptions import RayActorError
from torch import nn

if __name__ == "__main__":  # the checkout comes last, so that an installed zendnn_cffi wins over the source tree
    sys.path[:] = [*sys.path[1:], str(Path(__file__).resolve().parent.parent)]

import zendnn_cffi
from demo import small_classifier

CORES = 1  # of a replica: threads follow it


class Classifier:
    """What each replica, or worker of Ray Data, holds."""

    def __init__(self, path: str) -> None:
        torch.set_num_threads(CORES)
        self.model = zendnn_cffi.load(path)

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            scores: torch.Tensor = self.model(images)
            return scores

    def process(self) -> int:
        """The process that answers."""
        return os.getpid()


class Rows(Classifier):
    """The same for batches of Ray Data."""

    def __call__(self, batch: Any) -> Any:
        return {**batch, "class": super().__call__(torch.tensor(batch["data"])).argmax(1).numpy()}


def result(answer: Any, handle: Any, images: torch.Tensor) -> torch.Tensor:
    """The answer of a replica; the request is sent again where the replica died with it, which Serve leaves to us."""
    while True:
        try:
            scores: torch.Tensor = answer.result()
            return scores
        except RayActorError:
            answer = handle.remote(images)


def serve_requests(path: str, model: nn.Module, replicas: int, requests: int, kill: bool) -> None:
    """Send requests to a deployment, and compare the answers with the model's."""
    actors = {"num_cpus": CORES}
    deployment: Any = serve.deployment(Classifier, num_replicas=replicas, ray_actor_options=actors)
    begun = time.perf_counter()
    handle: Any = serve.run(deployment.bind(path))
    print(f"{replicas} replicas answer after {time.perf_counter() - begun:.1f} s")
    images = torch.randn(1, 3, 64, 64)
    expected = model(images)
    begun = time.perf_counter()
    answers = [handle.remote(images) for _ in range(requests // 2)]
    if kill:
        os.kill(handle.process.remote().result(), signal.SIGKILL)
    answers += [handle.remote(images) for _ in range(requests - requests // 2)]
    right = sum(torch.allclose(result(answer, handle, images), expected, atol=1e-4) for answer in answers)
    print(f"Ray Serve: {right} of {requests} answers right, {requests / (time.perf_counter() - begun):.0f} a second")


def infer_data_set(path: str, model: nn.Module, workers: int) -> None:
    """Run the model over a data set."""
    images = np.random.default_rng(0).standard_normal((256, 3, 64, 64), dtype=np.float32)
    pool = ray.data.ActorPoolStrategy(size=workers)
    rows = ray.data.from_numpy(np.array_split(images, 8)).map_batches(
        Rows, fn_constructor_args=(path,), compute=pool, num_cpus=CORES, batch_size=32
    )
    found = [row["class"] for row in rows.take_all()]
    expected = model(torch.from_numpy(images)).argmax(1).tolist()
    right = sum(a == b for a, b in zip(sorted(map(int, found)), sorted(expected), strict=True))
    print(f"Ray Data: {right} of {len(images)} classes right")


def main() -> None:
    """Save a model, start Ray, and run both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--kill", action="store_true", help="end one replica in the midst")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        path, model = str(Path(folder) / "model.safetensors"), small_classifier.build()
        small_classifier.save(model, Path(path), (1, 32), CORES)
        ray.init(
            num_cpus=options.replicas * CORES, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False
        )
        try:
            serve_requests(path, model, options.replicas, options.requests, options.kill)
            serve.shutdown()
            infer_data_set(path, model, options.replicas)
        finally:
            ray.shutdown()


if __name__ == "__main__":
    main()
