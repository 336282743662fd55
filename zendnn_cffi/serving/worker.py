"""A worker: loads a saved module, and answers calls until the other end of its socket is closed.

    main(descriptors, cores, path)

descriptors are those of files: of the socket, and of areas for questions and answers where there are such.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
from collections.abc import Sequence
from typing import Any


def main(descriptors: Sequence[int], cores: Sequence[int], path: str) -> None:
    """Answer (args, kwargs) by (True, result) or (False, error), on these cores."""
    os.sched_setaffinity(0, cores)  # before there are threads
    import torch

    from fx_passes.saved.files import load
    from zendnn_cffi.serving.wire import UNDER_WAY, Area, Channel, Ended

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who started it ends it
    torch.set_num_threads(len(cores))
    areas = [Area(descriptor) for descriptor in descriptors[1:]]
    asked, answered = areas[:UNDER_WAY], areas[UNDER_WAY:]
    channel = Channel(socket.socket(fileno=descriptors[0]), answered, asked, copies=False)
    with contextlib.suppress(Ended), torch.inference_mode():
        try:
            module = load(path)
        except Exception as error:
            channel.send((False, _sendable(error)))
            return
        channel.send((True, None))
        while True:
            try:
                args, kwargs = channel.receive()
                answer: tuple[bool, Any] = True, module(*args, **kwargs)
            except Ended:
                raise
            except Exception as error:
                answer = False, _sendable(error)
            try:
                channel.send(answer)
            except Ended:
                raise
            except Exception as error:  # a result that cannot be pickled
                channel.send((False, _sendable(error)))


def _sendable(error: Exception) -> Exception:
    """The error without what cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
