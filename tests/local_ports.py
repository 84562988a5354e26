"""Where the repository is, and ports for servers of tests."""

from __future__ import annotations

import secrets
import socket
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

#: Below the ports that the kernel hands out and above those of Ray's workers: a cluster that starts between the
#: choice of a port and its use takes dozens of either kind.
FIRST_PORT, LAST_PORT = 20_000, 32_000


def free_port() -> int:
    """A port of 127.0.0.1 that nothing listens on."""
    while True:
        port = FIRST_PORT + secrets.randbelow(LAST_PORT - FIRST_PORT)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
