"""Whole generations of the vLLM engine against reference data (tests/golden/README.md)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from configs.schema import ModelConfig
from replicas.errors import ModelLoadError
from replicas.model_info import load_model_info
from replicas.protocol import Engine, GenerationRequest, RequestOutput
from replicas.verify_generation import (
    LOGPROB_TOLERANCE,
    SAMPLED,
    comparable,
    diffusion_problem,
    diffusion_request,
    greedy_problem,
    greedy_request,
    logprob_error,
    read_cases,
    sampled_problem,
)
from replicas.verify_numbers import FileReport
from replicas.vllm_engine.loading import UnsupportedHeadSizeError, load_vllm_engine

FILES = ("generate_llada20.json", "generate_llada21.json", "greedy.json")


def verify_directory(
    directory: Path, concurrent: int, dtype: str, tensor_parallel_size: int
) -> Iterator[FileReport | str]:
    """A report per file of generations; one line for what cannot be read or served. Other files are not for vLLM."""
    files = [directory / name for name in FILES if (directory / name).exists()]
    if not files:
        yield f"{directory}: no file of generations; known: {', '.join(FILES)}"
        return
    reports = {file.name: FileReport(f"{directory.name}/{file.name}") for file in files}
    try:
        cases = {file.name: comparable(reports[file.name], read_cases(file), dtype) for file in files}
        outputs, running = _run(directory, cases, concurrent, dtype, tensor_parallel_size)
    except UnsupportedHeadSizeError as error:
        for name, report in reports.items():
            report.skip(error.message, len(cases[name]))
            yield report
        return
    except ModelLoadError as error:
        yield error.message if str(directory) in error.message else f"{directory}: {error.message}"
        return
    except (OSError, ValueError, KeyError) as error:
        # A damaged file must not hide the other directories.
        yield f"{directory}: {type(error).__name__}: {error}"
        return
    for name, report in reports.items():
        if name == "greedy.json":
            _check_greedy(report, cases[name], outputs, dtype)
        else:
            _check_diffusion(report, directory, cases[name], outputs)
        if concurrent > 1:
            report.notes.append(f"up to {running} at once")
        if tensor_parallel_size > 1:
            report.notes.append(f"on {tensor_parallel_size} ranks")
        yield report


def _run(
    directory: Path, cases: dict[str, list[dict[str, Any]]], concurrent: int, dtype: str, size: int
) -> tuple[dict[str, RequestOutput], int]:
    requests: list[GenerationRequest] = []
    for name, found in cases.items():
        if name == "greedy.json":
            requests += [greedy_request(case, False) for case in found]
            requests += [greedy_request(case, True) for case in found if case.get("output_ids_ignore_eos")]
        else:
            requests += [diffusion_request(case) for case in found]
    arguments = {
        "backend": "vllm",
        "dtype": dtype,
        "max_num_seqs": concurrent,
        "enforce_eager": True,
        "tensor_parallel_size": size,
    }
    if torch.cuda.is_available():
        resources = {"num_gpus": 1}
    else:
        resources = {"num_cpus": 1}
    config = ModelConfig.model_validate(
        {"name": "reference", "path": str(directory), "engine": arguments, "resources": resources}
    )
    engine = load_vllm_engine(config, directory)
    try:
        outputs = asyncio.run(generate(engine, requests))
        return outputs, engine.stats().max_running_seen
    finally:
        engine.shutdown()


async def generate(engine: Engine, requests: Sequence[GenerationRequest]) -> dict[str, RequestOutput]:
    """Submits all to an engine without a consumer; returns one merged output per request."""
    merged: dict[str, RequestOutput] = {}
    for request in requests:
        engine.submit(request)
        merged[request.request_id] = RequestOutput(request.request_id)
    left = set(merged)
    async for step in engine.steps():
        for output in step.outputs:
            previous = merged[output.request_id]
            output.new_token_ids = previous.new_token_ids + output.new_token_ids
            if previous.logprobs is not None:
                output.logprobs = previous.logprobs + (output.logprobs or [])
            merged[output.request_id] = output
            if output.finished:
                left.discard(output.request_id)
        if not left:
            break
    return merged


def _check_diffusion(
    report: FileReport, directory: Path, cases: list[dict[str, Any]], outputs: dict[str, RequestOutput]
) -> None:
    """Tokens, finish reason, and the number of denoising forwards: the reference's, or fewer where it looks for an
    early end less often."""
    info = load_model_info(directory)
    for case in cases:
        output = outputs[case["case"]]
        if case["params"].get("temperature", 0.0) > 0:
            problem = sampled_problem(case, output, info)
            if problem is None:
                report.skip(SAMPLED)
                continue
        else:
            problem = diffusion_problem(case, output, info, fewer_forwards=True)
        report.check(f"{case['case']}: {problem}", problem is None)


def _check_greedy(
    report: FileReport, cases: list[dict[str, Any]], outputs: dict[str, RequestOutput], dtype: str
) -> None:
    for case in cases:
        output, ignoring = outputs[case["case"]], outputs.get(f"{case['case']} ignore_eos")
        problem = greedy_problem(case, output, ignoring)
        report.check(f"{case['case']}: {problem}", problem is None)
        if case.get("logprobs") and dtype == "float32":
            report.check_error(
                f"{case['case']} logprobs", logprob_error(output, case["logprobs"]), LOGPROB_TOLERANCE
            )
