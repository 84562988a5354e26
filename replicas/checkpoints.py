"""From what a configuration says (folder, demo name or hub id) to a checkpoint folder on this machine."""

from __future__ import annotations

import re
from pathlib import Path

from replicas.demo import resolve_model_path
from replicas.errors import ModelLoadError

#: Of a hub repository: configuration and tokenizer, and the weights. Never code.
INFO_FILES = ["*.json", "*.jinja"]
WEIGHT_FILES = ["*.safetensors"]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.\-]*/[\w.\-]+")


def resolve_checkpoint(path: str, *, weights: bool = True) -> Path:
    """The folder of ``path``: a folder itself, ``demo://NAME``, or a hub id (``org/name``).

    A hub model is downloaded into the hub's cache with a progress bar; without ``weights`` only its
    configuration and tokenizer are. Raises ``ModelLoadError``.
    """
    try:
        folder = resolve_model_path(path)
    except Exception as error:
        raise ModelLoadError(f"{path}: {error}") from error
    if folder.is_dir():
        return folder
    if not _HUB_ID.fullmatch(path):
        raise ModelLoadError(f"{path}: no such directory")
    from huggingface_hub import snapshot_download

    try:
        patterns = INFO_FILES + (WEIGHT_FILES if weights else [])
        return Path(snapshot_download(path, allow_patterns=patterns))
    except Exception as error:
        message = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelLoadError(
            f"{path}: no such directory, and the hub has no such model or cannot be reached: {message}"
        ) from error
