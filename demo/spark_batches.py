"""An optimized model over a table with Spark: predict_batch_udf, whose Python workers load one saved file.

    python demo/spark_batches.py         a local Spark of two cores, 256 images

Needs `pip install pyspark pandas pyarrow`, and Java. The file lies where all nodes can read it; workers of one node
share its memory.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

if __name__ == "__main__":  # the checkout comes last, so that an installed zendnn_cffi wins over the source tree
    sys.path[:] = [*sys.path[1:], str(Path(__file__).resolve().parent.parent)]

from demo import small_classifier

CORES = 1  # of a Python worker: spark.task.cpus
BATCH = 32
SHAPE = (3, 64, 64)


def predictor(path: str) -> Callable[[], Callable[[np.ndarray], np.ndarray]]:
    """What predict_batch_udf takes: it is called once in each Python worker, which then keeps the loaded model."""

    def make() -> Callable[[np.ndarray], np.ndarray]:
        import torch

        import zendnn_cffi

        torch.set_num_threads(CORES)
        model = zendnn_cffi.load(path)

        def predict(images: np.ndarray) -> np.ndarray:
            with torch.inference_mode():  # the last batch of a partition is a smaller one: it is filled up
                rows = torch.zeros(BATCH, *SHAPE)
                rows[: len(images)] = torch.from_numpy(images)
                return model(rows)[: len(images)].numpy()

        return predict

    return make


def classify(path: str, images: np.ndarray) -> np.ndarray:
    """Scores [N, 10] of images [N, 3, 64, 64], computed by a local Spark."""
    from pyspark.ml.functions import predict_batch_udf
    from pyspark.sql import SparkSession
    from pyspark.sql.types import ArrayType, FloatType

    cores = f"local[{2 * CORES}]"
    builder = SparkSession.builder.master(cores).config("spark.ui.enabled", "false")
    spark = builder.config("spark.task.cpus", str(CORES)).config("spark.sql.shuffle.partitions", "2").getOrCreate()
    try:
        rows = [(number, image.reshape(-1).tolist()) for number, image in enumerate(images)]
        table = spark.createDataFrame(rows, "number int, image array<float>").repartition(2)
        scores = predict_batch_udf(
            predictor(path), return_type=ArrayType(FloatType()), batch_size=BATCH, input_tensor_shapes=[list(SHAPE)]
        )
        found = table.select("number", scores("image").alias("scores")).orderBy("number").collect()
    finally:
        spark.stop()
    return np.array([row["scores"] for row in found])


def main() -> None:
    """Save a model, run it over a table, and compare with the model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=256)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        path, model = Path(folder) / "model.safetensors", small_classifier.build()
        small_classifier.save(model, path, (BATCH,), CORES)
        images = small_classifier.images(options.images)
        found, expected = classify(str(path), images.numpy()), model(images).numpy()
    right = int(np.isclose(found, expected, atol=1e-4).all(axis=1).sum())
    print(f"Spark: {right} of {options.images} answers right")


if __name__ == "__main__":
    main()
