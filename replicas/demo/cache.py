"""A folder of finished downloads: each entry is built once, by one process, and appears whole or not at all."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


class DemoModelError(RuntimeError):
    """A demo model could not be fetched or converted; the message says what to do."""


def default_cache_dir() -> Path:
    """`$BLOCKSERVE_CACHE` when set and not empty, else `~/.cache/blockserve`. Read at every call."""
    named = os.environ.get("BLOCKSERVE_CACHE")
    return Path(named).expanduser() if named else Path.home() / ".cache" / "blockserve"


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Holds an exclusive lock on `path` (created when missing); waits while another process holds it.

    The kernel drops the lock when its process dies, so a crash leaves nothing to clean up. The file
    itself stays: removing it would let two processes lock two files of one name.
    """
    with path.open("a") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(handle, fcntl.LOCK_UN)


def build_once(
    target: Path, required: tuple[str, ...], build: Callable[[Path], None], version: str = "1"
) -> Path:
    """Returns `target`, building it first when it is not there in this version.

    `build` fills a hidden temporary folder beside `target`, which is then renamed: readers that take no
    lock see the whole folder or none. A failed build leaves nothing behind.

    Args:
        target: the folder to return; its parents are created.
        required: file names that `build` must produce; a folder that lacks one is built again.
        build: writes into the folder it is given.
        version: recipe version; a folder that another version built is replaced.

    Raises:
        DemoModelError: `build` did not write a required file.
        OSError: the cache folder cannot be written.
    """
    if _is_complete(target, required, version):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{target.name}-"
    with file_lock(target.parent / f".{target.name}.lock"):
        if _is_complete(target, required, version):  # another process built it while we waited
            return target
        for left_over in target.parent.glob(f"{prefix}*"):  # of a process that was killed
            shutil.rmtree(left_over, ignore_errors=True)
        work = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
        try:
            work.chmod(0o755)
            build(work)
            missing = [name for name in required if not (work / name).is_file()]
            if missing:
                raise DemoModelError(f"building {target.name} did not write {', '.join(missing)}")
            (work / _STAMP).write_text(version)
            if target.exists():
                shutil.rmtree(target)
            work.rename(target)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return target


_STAMP = ".version"


def _is_complete(target: Path, required: tuple[str, ...], version: str) -> bool:
    stamp = target / _STAMP
    if not stamp.is_file() or stamp.read_text() != version:
        return False
    return all((target / name).is_file() for name in required)
