"""Runs an engine over reference data and compares number by number (``blockserve verify``).

The format is that of tests/golden/README.md: forwards, router choices, sampling filters and whole
generations that the original implementations computed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from configs.schema import MAX_TENSOR_PARALLEL_SIZE
from replicas.engine.rank_processes import check_divisible, load_on_all, start_ranks
from replicas.errors import ModelLoadError
from replicas.model_info import load_model_info
from replicas.models.registry import load_model
from replicas.parallel.ranks import Ranks
from replicas.verify_generation import Subject, verify_diffusion, verify_greedy
from replicas.verify_numbers import TOLERANCE, FileReport, verify_filters, verify_forwards, verify_routers

logger = logging.getLogger(__name__)

ENGINES = ("torch", "vllm")
SHOWN_MISMATCHES = 3


def run_verify(
    directories: Sequence[str | Path],
    *,
    engine: str = "torch",
    concurrent: int = 1,
    dtype: str = "float32",
    tensor_parallel_size: int = 1,
    out: Callable[[str], object] = print,
) -> int:
    """Verifies each directory; prints a line per file; returns 0 if all that was compared was equal, else 1.

    ``engine``: ``vllm`` runs generations only, in eager mode. ``concurrent``: cases in flight at once.
    ``tensor_parallel_size``: ranks, processes of this machine, that run the generations; all else is compared on one
    rank. Paths that are files are skipped with a note. A missing directory, or a damaged checkpoint or file, is a
    failure, and all others are still verified.
    """
    size = tensor_parallel_size
    if (
        engine not in ENGINES
        or dtype not in TOLERANCE
        or concurrent < 1
        or not 1 <= size <= MAX_TENSOR_PARALLEL_SIZE
    ):
        given = f"engine {engine!r}, dtype {dtype!r}, concurrent {concurrent}, tensor parallel size {size}"
        allowed = f"engine {' or '.join(ENGINES)}, a dtype out of {', '.join(TOLERANCE)}"
        out(
            f"{given}: {allowed}, at least 1 case at once and 1 to {MAX_TENSOR_PARALLEL_SIZE} ranks are supported"
        )
        return 1
    failed, cases, files, not_comparable = 0, 0, 0, 0
    # Reference models are tiny: several threads spend their time waiting for one another.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    ranks: Ranks | None = None
    try:
        if size > 1 and engine == "torch":
            ranks = start_ranks(size, torch.device("cpu"))
        for directory in map(Path, directories):
            if directory.is_file():
                out(f"{directory}: not a directory, skipped")
                continue
            if engine == "vllm":
                from replicas.verify_vllm import verify_directory

                reports = verify_directory(directory, concurrent, dtype, size)
            else:
                reports = _verify_directory(directory, concurrent, dtype, ranks)
            for report in reports:
                if isinstance(report, str):
                    out(report)
                    failed += 1
                    continue
                out(report.line())
                for mismatch in report.mismatches[:SHOWN_MISMATCHES]:
                    out(f"  {mismatch}")
                if len(report.mismatches) > SHOWN_MISMATCHES:
                    out(f"  and {len(report.mismatches) - SHOWN_MISMATCHES} more")
                failed += bool(report.mismatches)
                cases, files = cases + report.cases, files + 1
                not_comparable += sum(report.not_comparable.values())
    except ModelLoadError as error:  # the ranks did not start
        out(error.message)
        return 1
    finally:
        if ranks is not None:
            ranks.shutdown()
        torch.set_num_threads(threads)
    verdict = f"{failed} failed" if failed else "all equal" if cases else "nothing was verified"
    rest = f" ({not_comparable} more not comparable)" if not_comparable else ""
    out(f"{cases} cases in {files} files{rest}: {verdict}")
    return 0 if cases and not failed else 1


def _verify_directory(
    directory: Path, concurrent: int, dtype: str, ranks: Ranks | None
) -> Iterator[FileReport | str]:
    """A report per reference file, or one line for what cannot be read."""
    if not directory.exists():
        yield f"{directory}: no such directory"
        return
    try:
        info = load_model_info(directory)
        model = load_model(info, dtype=getattr(torch, dtype), device=torch.device("cpu"), progress=False)
        subject = Subject(model, info, dtype, concurrent)
        if ranks is not None:
            check_divisible(info, ranks.size)
            rank, _ = load_on_all(ranks, info, getattr(torch, dtype), num_threads=1)
            subject = replace(subject, model=rank.model, ranks=ranks)
    except Exception as error:
        yield _one_line(directory, error)
        return
    known: dict[str, Callable[[FileReport, Path], None]] = {
        "forward.npz": lambda report, file: verify_forwards(report, model, info, file, dtype),
        "router.npz": lambda report, file: verify_routers(report, model, file, dtype),
        "sampling_filters.npz": lambda report, file: verify_filters(report, file),
        "generate_llada20.json": lambda report, file: verify_diffusion(report, subject, file),
        "generate_llada21.json": lambda report, file: verify_diffusion(report, subject, file),
        "greedy.json": lambda report, file: verify_greedy(report, subject, file),
    }
    present = [name for name in known if (directory / name).exists()]
    if not present:
        yield f"{directory}: no reference file; known: {', '.join(known)}"
    for name in present:
        report = FileReport(f"{directory.name}/{name}")
        try:
            known[name](report, directory / name)
        except Exception as error:
            # A damaged file can fail in any way (a zip, an array, a field): it must not hide the others.
            yield _one_line(directory / name, error)
        else:
            if ranks is not None and name.endswith(".npz"):
                report.notes.append("on 1 rank")
            yield report


def _one_line(path: Path, error: Exception) -> str:
    logger.debug("%s cannot be verified", path, exc_info=error)
    text = " ".join(str(error).split())
    return text if text.startswith(str(path)) else f"{path}: {type(error).__name__}: {text}"
