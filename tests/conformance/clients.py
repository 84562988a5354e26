"""Clients of others, each started as the program that it is, with the interpreter of an environment of its own."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from local_ports import ROOT

#: Made by `make conformance`; the server's environment stays free of all that these clients bring along.
ENVIRONMENT = ROOT / ".conformance-venv"
NEEDS_CLIENTS = pytest.mark.skipif(
    not (ENVIRONMENT / "bin/python").exists(), reason="no .conformance-venv: `make conformance` makes it"
)


def run(
    command: list[str], *, cwd: Path, timeout: float, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs a program of the clients' environment (``command[0]``, its name) in ``cwd``; its status is not checked.

    The clients see no proxy, no key and no path of the caller's.
    """
    inherited = {key: value for key, value in os.environ.items() if key in ("HOME", "LANG", "TMPDIR")}
    path = f"{ENVIRONMENT / 'bin'}{os.pathsep}/usr/local/bin{os.pathsep}/usr/bin{os.pathsep}/bin"
    return subprocess.run(
        [str(ENVIRONMENT / "bin" / command[0]), *command[1:]],
        cwd=cwd,
        env=inherited | {"PATH": path, "PYTHONUNBUFFERED": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
