"""Whole generations against reference data (tests/golden/README.md)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from replicas.engine.core import EngineCore
from replicas.model_info import ModelInfo
from replicas.models.decoder import DecoderModel
from replicas.parallel.ranks import Ranks
from replicas.protocol import DiffusionParams, FinishReason, GenerationRequest, RequestOutput, SamplingParams
from replicas.verify_numbers import FileReport

LOGPROB_TOLERANCE = 1e-3
#: Below float32, tokens are compared only in cases whose every decision is clear by this much, in logits and in
#: probability: one other decision changes all that follow. The typical error of a logit in bfloat16 is half of it.
MIN_MARGIN = 0.25
#: `temperature` > 0: which token is drawn depends on the random generator, which is not the reference's.
SAMPLED = "sampled with torch's generator: only run to the end"

Changes = list[tuple[int, list[tuple[int, int]]]]


@dataclass(frozen=True)
class Subject:
    """The engine that is verified; ``model`` is rank 0's where there are ``ranks``. ``concurrent``: cases in flight."""

    model: DecoderModel
    info: ModelInfo
    dtype: str
    concurrent: int
    ranks: Ranks | None = None

    def engine(self, **options: Any) -> EngineCore:
        core = EngineCore.from_model(self.model, self.info, max_num_seqs=self.concurrent, **options)
        if self.ranks is not None:
            core.engine.runner.lead(self.ranks, owned=False)
        return core


def verify_diffusion(report: FileReport, subject: Subject, file: Path) -> None:
    """LLaDA2.0 and 2.1: tokens, the changes of each denoising forward, finish reason, number of forwards.

    The engine never chooses the mask token, as in service; the reference could, but does not in its cases.
    """
    cases = comparable(report, read_cases(file), subject.dtype)
    changes: dict[str, Changes] = {case["case"]: [] for case in cases}

    def trace(request_id: str, block: int, pairs: list[tuple[int, int]]) -> None:
        changes[request_id].append((block, sorted(pairs)))

    engine = subject.engine(reference_stopping=True, trace=trace)
    outputs = engine.generate(diffusion_request(case) for case in cases)
    deciding = 0
    for case in cases:
        output = outputs[case["case"]]
        if case["params"].get("temperature", 0.0) > 0:
            deciding += output.num_forwards
            problem = sampled_problem(case, output, subject.info)
            if problem is None:
                report.skip(SAMPLED)
                continue
        else:
            deciding += case["num_forwards"]
            problem = diffusion_problem(case, output, subject.info) or _changes_problem(
                case, changes[case["case"]]
            )
        report.check(f"{case['case']}: {problem}", problem is None)
    _check_forwards(report, engine, deciding, subject)


def diffusion_problem(
    case: dict[str, Any], output: RequestOutput, info: ModelInfo, *, fewer_forwards: bool = False
) -> str | None:
    """What is wrong with a greedy case, or None. ``fewer_forwards``: fewer of them than the reference's are right where
    it may end early."""
    # The original may answer with more than gen_length tokens; a server must not.
    tokens = case["output_ids"][: case["params"].get("gen_length", 2048)]
    ended = bool(tokens) and tokens[-1] in info.eos_token_ids
    finish = FinishReason.STOP if ended else FinishReason.LENGTH
    if output.error is not None:
        return f"failed: {output.error.message}"
    if output.new_token_ids != tokens:
        return f"tokens {_first_difference(output.new_token_ids, tokens)}"
    forwards = case["num_forwards"]
    fewer = fewer_forwards and (case["params"].get("eos_early_stop") or "editing_threshold" in case["params"])
    if output.num_forwards > forwards or (output.num_forwards < forwards and not fewer):
        return f"{output.num_forwards} denoising forwards, the reference has {forwards}"
    if output.finish_reason != finish:
        return f"finished by {output.finish_reason}, expected {finish}"
    return None


def _changes_problem(case: dict[str, Any], steps: Changes) -> str | None:
    expected = [(step["block"], sorted(map(tuple, step["set"]))) for step in case["steps"]]
    return None if steps == expected else f"changes per step {_first_difference(steps, expected)}"


def sampled_problem(case: dict[str, Any], output: RequestOutput, info: ModelInfo) -> str | None:
    """What holds for a sampled case whatever was drawn."""
    limit = case["params"].get("gen_length", 2048)
    if output.error is not None:
        return f"failed: {output.error.message}"
    if not 1 <= len(output.new_token_ids) <= limit or info.mask_token_id in output.new_token_ids:
        return f"{len(output.new_token_ids)} tokens of at most {limit}, or a mask among them"
    if not set(info.eos_token_ids).isdisjoint(output.new_token_ids[:-1]):
        return "went on after EOS"
    return None


def verify_greedy(report: FileReport, subject: Subject, file: Path) -> None:
    """Autoregressive greedy decoding: tokens, finish reason, tokens past EOS, logprobs."""
    cases = comparable(report, read_cases(file), subject.dtype)
    engine = subject.engine()
    outputs = engine.generate(
        greedy_request(case, ignore_eos)
        for case in cases
        for ignore_eos in (False, True)
        if not ignore_eos or case.get("output_ids_ignore_eos")
    )
    deciding = 0
    for case in cases:
        output, ignoring = outputs[case["case"]], outputs.get(f"{case['case']} ignore_eos")
        deciding += len(case["output_ids"]) + len(case.get("output_ids_ignore_eos") or [])
        problem = greedy_problem(case, output, ignoring)
        report.check(f"{case['case']}: {problem}", problem is None)
        if case.get("logprobs") and subject.dtype == "float32":
            error = logprob_error(output, case["logprobs"])
            report.check_error(f"{case['case']} logprobs", error, LOGPROB_TOLERANCE)
    _check_forwards(report, engine, deciding, subject)


def greedy_problem(case: dict[str, Any], output: RequestOutput, ignoring: RequestOutput | None) -> str | None:
    finish = FinishReason.STOP if case["finish"] == "eos" else FinishReason.LENGTH
    for answer in (output, ignoring):
        if answer is not None and answer.error is not None:
            return f"failed: {answer.error.message}"
    if output.new_token_ids != case["output_ids"]:
        return f"tokens {_first_difference(output.new_token_ids, case['output_ids'])}"
    if output.finish_reason != finish:
        return f"finished by {output.finish_reason}, expected {finish}"
    if ignoring is not None and ignoring.new_token_ids != case["output_ids_ignore_eos"]:
        return f"tokens past EOS {_first_difference(ignoring.new_token_ids, case['output_ids_ignore_eos'])}"
    return None


def _check_forwards(report: FileReport, engine: EngineCore, deciding: int, subject: Subject) -> None:
    """Alone, a prompt and a commit are computed in a deciding forward: there is no other forward at all."""
    stats = engine.stats()
    by_rank = engine.engine.runner.num_forwards_by_rank()
    engine.shutdown()
    if len(by_rank) > 1:
        report.notes.append(f"on {len(by_rank)} ranks")
        if len(set(by_rank)) > 1:
            report.check(f"the ranks ran {by_rank} model forwards", False)
    if not stats.num_forwards:
        return
    report.notes.append(f"{stats.num_forwards} model forwards for {deciding} deciding rows")
    if subject.concurrent > 1:
        report.notes.append(f"up to {stats.max_running_seen} at once")
    elif not report.mismatches and stats.num_forwards != deciding:
        report.check(f"{stats.num_forwards} model forwards, {deciding} expected", False)


def diffusion_request(case: dict[str, Any]) -> GenerationRequest:
    params = case["params"]
    token_editing = "editing_threshold" in params
    diffusion = DiffusionParams(
        steps=params.get("steps", 32),
        threshold=params.get("threshold", 0.95),
        minimal_topk=params.get("minimal_topk", 1),
        eos_early_stop=params.get("eos_early_stop", False),
        editing_threshold=params["editing_threshold"] if token_editing else None,
        max_post_steps=params.get("max_post_steps", 16),
        num_to_transfer=params.get("num_to_transfer", 1),
    )
    sampling = SamplingParams(
        max_tokens=params.get("gen_length", 2048),
        temperature=params.get("temperature", 0.0),
        top_k=params.get("top_k") or 0,
        top_p=params.get("top_p") or 1.0,
        seed=0,
    )
    return GenerationRequest(case["case"], "reference", tuple(case["prompt_ids"]), sampling, diffusion)


def greedy_request(case: dict[str, Any], ignore_eos: bool) -> GenerationRequest:
    sampling = SamplingParams(
        max_tokens=len(case["output_ids_ignore_eos"]) if ignore_eos else case["max_tokens"],
        ignore_eos=ignore_eos,
        logprobs=5 if case.get("logprobs") else None,
    )
    name = f"{case['case']} ignore_eos" if ignore_eos else case["case"]
    return GenerationRequest(name, "reference", tuple(case["prompt_ids"]), sampling)


def read_cases(file: Path) -> list[dict[str, Any]]:
    cases = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(cases, list) or not cases:
        raise ValueError("holds no list of cases")
    return cases


def comparable(report: FileReport, cases: list[dict[str, Any]], dtype: str) -> list[dict[str, Any]]:
    """Cases whose narrowest decision is clear in ``dtype`` (float32: all)."""
    if dtype == "float32":
        return cases
    chosen = []
    for case in cases:
        margins = case.get("min_margins") or {"logit_gap": case.get("min_logit_gap")}
        narrowest = min((value for value in margins.values() if value is not None), default=0.0)
        if narrowest >= MIN_MARGIN:
            chosen.append(case)
    report.skip(f"a decision within {MIN_MARGIN}", len(cases) - len(chosen))
    return chosen


def logprob_error(output: RequestOutput, expected: list[dict[str, Any]]) -> float:
    if output.logprobs is None or len(output.logprobs) != len(expected):
        return float("inf")
    errors = []
    for got, want in zip(output.logprobs, expected, strict=True):
        top = dict(got.top)
        errors.append(abs(got.logprob - want["logprob"]))
        errors += [abs(top.get(token, float("inf")) - value) for token, value in want["top5"]]
    return float(np.max(errors))  # unlike max(), it keeps a NaN


def _first_difference(got: Sequence[Any], expected: Sequence[Any]) -> str:
    for i, (a, b) in enumerate(zip(got, expected, strict=False)):
        if a != b:
            return f"differ from index {i}: {a}, the reference has {b}"
    return f"have length {len(got)}, the reference has {len(expected)}"
