"""A worker: loads a saved module, and answers calls until the other end of its socket is closed.

    python -m zendnn_cffi.serving.worker FILE-DESCRIPTOR CORES PATH

CORES are separated by commas.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Any


def main(descriptor: int, cores: Sequence[int], path: str) -> None:
    """Answer (args, kwargs) by (True, result) or (False, error), on these cores."""
    os.sched_setaffinity(0, cores)  # before there are threads
    import torch

    from fx_passes.saved.files import load
    from zendnn_cffi.serving.wire import Ended, receive, send

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who started it ends it
    torch.set_num_threads(len(cores))
    end = socket.socket(fileno=descriptor)
    with contextlib.suppress(Ended), torch.inference_mode():
        try:
            module = load(path)
        except Exception as error:
            send(end, (False, _sendable(error)))
            return
        send(end, (True, None))
        while True:
            try:
                args, kwargs = receive(end)
                answer: tuple[bool, Any] = True, module(*args, **kwargs)
            except Ended:
                raise
            except Exception as error:
                answer = False, _sendable(error)
            try:
                send(end, answer)
            except Ended:
                raise
            except Exception as error:  # a result that cannot be pickled
                send(end, (False, _sendable(error)))


def _sendable(error: Exception) -> Exception:
    """The error without what cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


if __name__ == "__main__":
    main(int(sys.argv[1]), [int(core) for core in sys.argv[2].split(",")], sys.argv[3])
