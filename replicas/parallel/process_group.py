"""How ranks find one another, and the torch.distributed backends that they talk through.

The backends are made directly, not with ``init_process_group``, which allows one group per process: engines of one
process must not share state.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from replicas.parallel.group import TensorParallelGroup

#: For what waits on a peer that may be idle for long: an idle engine has no next step. A peer that dies is noticed by
#: its closed sockets, one that hangs by the engine's step timeout.
FOREVER = timedelta(days=3650)


def listen(host: str, timeout: timedelta) -> dist.TCPStore:
    """The key-value store of a new group, on a free port of ``host`` alone; ``.port`` says which."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as server:
        server.bind((host, 0))
        server.listen()
        port = server.getsockname()[1]
        # The store closes the descriptor at its end.
        return dist.TCPStore(
            host, port, None, True, timeout, wait_for_workers=False, master_listen_fd=server.detach()
        )


def connect(host: str, port: int, timeout: timedelta) -> dist.TCPStore:
    """The store that ``listen`` made on another rank."""
    return dist.TCPStore(host, port, None, False, timeout, wait_for_workers=False)


def join(
    store: dist.TCPStore, rank: int, size: int, *, host: str, device: torch.device, timeout: timedelta
) -> tuple[Any, TensorParallelGroup]:
    """(gloo backend for commands, group for the model's tensors), once all ranks are here.

    ``host``: this rank's own address for gloo. On CUDA tensors go through NCCL; otherwise both are the same gloo
    backend. Raises ``RuntimeError`` when a rank does not come within ``timeout``.
    """
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=host)]
    options._timeout = timeout
    options._threads = 1  # operations come one after another; fewer threads to wake
    control = gloo(dist.PrefixStore("gloo", store), rank, size, options)
    control.set_timeout(FOREVER)
    tensors: Any = control
    if device.type == "cuda":
        torch.cuda.set_device(device)
        nccl = dist.ProcessGroupNCCL
        tensors = nccl(dist.PrefixStore("nccl", store), rank, size, nccl.Options())
        tensors.set_timeout(FOREVER)
    return control, TensorParallelGroup(rank, size, tensors)
