"""Reading checkpoints: safetensors files of a directory, single or sharded.

A model takes each tensor by name while it is built; what is missing, misshapen or left over at the end is a
named error, so a checkpoint of another layout never loads half.
"""

from __future__ import annotations

import ctypes
import json
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from replicas.errors import ModelLoadError
from replicas.models.linear import Rows
from replicas.models.sharding import Shard

#: Tensors that older exports carry and that follow from the configuration.
_DERIVED = re.compile(r"(^|\.)rotary_emb\.inv_freq$")
#: A mapped file's pages count as resident memory once they are read; after so many bytes it is mapped anew.
_REMAP_BYTES = 256 << 20
_FUSED_EXPERTS = re.compile(r"\.mlp\.experts\.(gate_up_proj|gate_proj|up_proj|down_proj|w13|w2)(\.weight)?$")


class CheckpointWeights:
    """The tensors of a checkpoint directory, each to be taken once, in ``dtype`` on ``device``; from any thread.

    ``compact``: see ``load_model``. A context manager: leaving it without an error checks that no tensor is left over.
    """

    def __init__(
        self,
        path: Path,
        *,
        dtype: torch.dtype,
        device: torch.device,
        progress: bool = False,
        compact: bool = False,
    ) -> None:
        self._path = path
        self.dtype = dtype
        #: For linear layers that get prompts as well as single tokens.
        self.linear_rows = Rows.FEW if compact else Rows.ANY
        self.device = device
        self._files: dict[Path, Any] = {}
        self._read_bytes = 0
        self._location = self._index()
        self._taken: set[str] = set()
        for name in self._location:
            if _FUSED_EXPERTS.search(name):
                raise ModelLoadError(
                    f"{path}: {name!r} holds the experts of a layer fused into one tensor; only checkpoints with one "
                    "tensor per expert are supported: convert it with the training framework's script first"
                )
        self._bar = tqdm(
            total=len(self._location),
            desc=f"loading {path.name}",
            unit="tensor",
            disable=not progress,
            file=sys.stderr,
        )

    def __enter__(self) -> CheckpointWeights:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()
        if kind is None:
            surplus = [n for n in self._location if n not in self._taken and not _DERIVED.search(n)]
            if surplus:
                raise ModelLoadError(
                    f"{self._path}: {len(surplus)} tensors that this architecture does not have: {_few(surplus)}"
                )
        self._files.clear()
        release_freed_memory()

    def __contains__(self, name: str) -> bool:
        return name in self._location

    def take(
        self, name: str, *shape: int, dtype: torch.dtype | None = None, shard: Shard | None = None
    ) -> torch.Tensor:
        """The tensor ``name``, or the ``shard`` of it. Raises ``ModelLoadError`` when it is missing or not of ``shape``
        (the whole tensor's)."""
        if name not in self._location:
            near = [other for other in self._location if other.rsplit(".", 2)[0] == name.rsplit(".", 2)[0]]
            hint = f"; beside it stand {_few(near)}" if near else ""
            raise ModelLoadError(f"{self._path}: tensor {name!r} {list(shape)} is missing{hint}")
        try:
            stored = self._open(self._location[name]).get_slice(name)
            found = tuple(stored.get_shape())
            tensor = None
            if found == shape:
                tensor = stored[:] if shard is None else _read_shard(stored, shard)
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(
                f"{self._location[name]}: tensor {name!r} cannot be read: {error}"
            ) from error
        if tensor is None:
            raise ModelLoadError(
                f"{self._path}: tensor {name!r} has shape {list(found)}, expected {list(shape)}"
            )
        if name not in self._taken:
            self._taken.add(name)
            self._bar.update()
        # Always a copy: a view would keep the file mapped, and change with it.
        copied = tensor.to(device=self.device, dtype=dtype or self.dtype, copy=True)
        self._read_bytes += tensor.nbytes
        if self._read_bytes > _REMAP_BYTES:
            self._read_bytes = 0
            self._files.clear()
            release_freed_memory()
        return copied

    def narrowest_dtype(self, name: str) -> torch.dtype:
        """The model's dtype, or the one in which ``name`` is stored where that takes less memory without a loss."""
        if name not in self:
            return self.dtype  # `take` says that it is missing
        stored = str(self._open(self._location[name]).get_slice(name).get_dtype())
        narrow = {"BF16": torch.bfloat16, "F16": torch.float16}.get(stored)
        return narrow if narrow is not None and self.dtype == torch.float32 else self.dtype

    def take_parts(self, name: str, *shape: int, shards: Sequence[Shard]) -> torch.Tensor:
        """Several shards of one tensor, joined along their dimension."""
        return torch.cat([self.take(name, *shape, shard=shard) for shard in shards], dim=shards[0].dim)

    def expect_copy(self, name: str, *shape: int, of: torch.Tensor, shard: Shard | None = None) -> None:
        """Accepts ``name`` as a second copy of a tied tensor. Raises ``ModelLoadError`` when it is there and differs:
        transformers then uses it untied, so leaving it out would give other logits."""
        if name in self and not torch.equal(self.take(name, *shape, shard=shard), of):
            raise ModelLoadError(
                f"{self._path}: `tie_word_embeddings` is true, but {name!r} differs from the embeddings; set it to "
                "false in config.json if that tensor is the output head"
            )

    def _index(self) -> dict[str, Path]:
        """Tensor name -> file."""
        index = self._path / "model.safetensors.index.json"
        if not index.exists():
            single = self._path / "model.safetensors"
            if not single.exists():
                raise ModelLoadError(
                    f"{self._path}: neither model.safetensors nor model.safetensors.index.json is there"
                )
            return dict.fromkeys(self._open(single).keys(), single)
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            location = {str(name): self._path / str(file) for name, file in weight_map.items()}
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise ModelLoadError(f"{index}: cannot be read: {error!r}") from error
        for file in sorted(set(location.values())):
            if file.parent != self._path or not file.exists():
                raise ModelLoadError(f"{index}: the shard {file.name!r} that it names is not in {self._path}")
            stored = set(self._open(file).keys())
            absent = [name for name, place in location.items() if place == file and name not in stored]
            if absent:
                raise ModelLoadError(f"{file}: lacks tensors that the index places there: {_few(absent)}")
        return location

    def _open(self, file: Path) -> Any:
        opened = self._files.get(file)
        if opened is None:
            try:
                opened = self._files[file] = safe_open(str(file), framework="pt")
            except (SafetensorError, OSError) as error:
                raise ModelLoadError(
                    f"{file}: not a readable safetensors file (truncated?): {error}"
                ) from error
        return opened


def release_freed_memory() -> None:
    """Gives memory that was freed back to the system: glibc keeps what converted and packed weights leave behind, for
    each thread by itself. Does nothing with another C library."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _read_shard(stored: Any, shard: Shard) -> torch.Tensor:
    """Reads the shard's part of the file only."""
    shape = list(stored.get_shape())
    end = min(shard.end, shape[shard.dim])
    start = min(shard.start, end)
    index = [slice(None)] * len(shape)
    index[shard.dim] = slice(start, end)
    tensor = stored[tuple(index)]
    shape[shard.dim] = shard.end - shard.start - (end - start)
    return torch.cat((tensor, tensor.new_zeros(shape)), dim=shard.dim) if shape[shard.dim] else tensor


def _few(names: list[str], limit: int = 5) -> str:
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(repr(name) for name in sorted(names)[:limit]) + rest
