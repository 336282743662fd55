"""What the Spark example gives to predict_batch_udf, as Spark calls it: pickled, in another process, batch by batch."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import cloudpickle
import numpy as np
import torch

from demo import small_classifier, spark_batches

# A Spark worker has nothing of what its driver imported.
WORKER = """
import pickle, sys
import cloudpickle, numpy as np
make = cloudpickle.loads(open(sys.argv[1], "rb").read())
predict = make()
batches = np.load(sys.argv[2])
found = [predict(batch) for batch in (batches, batches[:1], batches[:5])]
sys.stdout.buffer.write(pickle.dumps(found))
"""


def test_a_worker_computes_whole_and_partial_batches(tmp_path: Path) -> None:
    path, images = tmp_path / "model.safetensors", small_classifier.images(spark_batches.BATCH)
    model = small_classifier.build()
    small_classifier.save(model, path, (spark_batches.BATCH,), spark_batches.CORES)
    cloudpickle.register_pickle_by_value(spark_batches)  # as of a driver's main script
    try:
        (tmp_path / "function").write_bytes(cloudpickle.dumps(spark_batches.predictor(str(path))))
    finally:
        cloudpickle.unregister_pickle_by_value(spark_batches)
    np.save(tmp_path / "batch.npy", images.numpy())
    root = str(Path(__file__).resolve().parents[2])
    found_by = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-c", WORKER, str(tmp_path / "function"), str(tmp_path / "batch.npy")],
        capture_output=True, timeout=600, env=os.environ | {"PYTHONPATH": found_by}, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    with torch.inference_mode():
        expected = model(images).numpy()
    for scores, count in zip(pickle.loads(done.stdout), (spark_batches.BATCH, 1, 5), strict=True):
        np.testing.assert_allclose(scores, expected[:count], atol=1e-4)
