"""Runs an engine over reference data and compares number by number (``blockserve verify``).

The format is that of tests/golden/README.md: forwards, router choices, sampling filters and whole
generations that the original implementations computed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from replicas.attention.kv_cache import KVCache
from replicas.attention.metadata import CommonAttentionMetadata
from replicas.attention.virtual_batch import make_block_causal_virtual_batches
from replicas.decoding.sampling import filtered_probs, greedy
from replicas.engine.core import EngineCore
from replicas.errors import BlockserveError
from replicas.model_info import ModelInfo, load_model_info
from replicas.models.decoder import DecoderModel
from replicas.models.moe import MoE
from replicas.models.registry import load_model
from replicas.protocol import DiffusionParams, FinishReason, GenerationRequest, RequestOutput, SamplingParams

#: Of tests/golden/README.md: absolute for float32, times the spread of the logits for bfloat16.
LOGITS_TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}
LOGPROB_TOLERANCE = 1e-3
#: Cases are compared only if every decision in them is clear by this much; float32 decides all of them.
MIN_MARGIN = {"float32": 0.0, "bfloat16": 0.25}
SHOWN_MISMATCHES = 3


@dataclass
class FileReport:
    """Outcome of one reference file; ``skipped``: cases that this dtype cannot decide."""

    name: str
    cases: int = 0
    skipped: int = 0
    worst: float = 0.0
    mismatches: list[str] = field(default_factory=list)
    note: str = ""

    def check(self, what: str, ok: bool) -> None:
        self.cases += 1
        if not ok:
            self.mismatches.append(what)

    def check_error(self, what: str, error: float, tolerance: float) -> None:
        self.worst = max(self.worst, error)
        # "not <=" rather than ">": NaN is a mismatch.
        self.check(f"{what}: error {error:.2e} > {tolerance:.2e}", error <= tolerance)

    def line(self) -> str:
        equal = self.cases - len(self.mismatches)
        parts = [f"{self.name}: {equal}/{self.cases} equal"]
        if self.worst:
            parts.append(f"largest error {self.worst:.1e}")
        if self.skipped:
            parts.append(f"{self.skipped} not comparable (margins too narrow)")
        if self.note:
            parts.append(self.note)
        return ", ".join(parts)


def run_verify(
    directories: Sequence[str | Path],
    *,
    engine: str = "torch",
    concurrent: int = 1,
    dtype: str = "float32",
    out: Callable[[str], object] = print,
) -> int:
    """Verifies each directory; prints a line per file; returns 0 if all was equal, else 1.

    ``concurrent``: cases in flight at once. Paths that are files are skipped with a note; a missing directory or a
    damaged one is a failure, and the others are still verified.
    """
    if engine != "torch" or dtype not in LOGITS_TOLERANCE or concurrent < 1:
        out(f"engine {engine!r}, dtype {dtype!r}, concurrent {concurrent}: engine torch, a dtype out of "
            f"{', '.join(LOGITS_TOLERANCE)} and at least 1 case at once are supported")  # fmt: skip
        return 1
    # Reference models are tiny: several threads spend their time waiting for one another.
    torch.set_num_threads(1)
    failed, cases, files = 0, 0, 0
    for directory in map(Path, directories):
        if directory.is_file():
            out(f"{directory}: not a directory, skipped")
            continue
        try:
            for report in _verify_directory(directory, concurrent, dtype):
                out(report.line())
                for mismatch in report.mismatches[:SHOWN_MISMATCHES]:
                    out(f"  {mismatch}")
                failed += bool(report.mismatches)
                cases, files = cases + report.cases, files + 1
        except (BlockserveError, OSError, ValueError, KeyError) as error:
            out(f"{directory}: {type(error).__name__}: {error}")
            failed += 1
    out(f"{cases} cases in {files} files: {'all equal' if files and not failed else f'{failed} failures'}")
    return 0 if files and not failed else 1


def _verify_directory(directory: Path, concurrent: int, dtype: str) -> Iterator[FileReport]:
    info = load_model_info(directory)
    model = load_model(info, dtype=getattr(torch, dtype), device=torch.device("cpu"), progress=False)
    known: dict[str, Callable[[FileReport], None]] = {
        "forward.npz": lambda r: _forwards(r, model, info, directory / "forward.npz", dtype),
        "router.npz": lambda r: _routers(r, model, directory / "router.npz", dtype),
        "sampling_filters.npz": lambda r: _filters(r, directory / "sampling_filters.npz"),
        "generate_llada20.json": lambda r: _generations(r, model, info, directory, concurrent, dtype),
        "generate_llada21.json": lambda r: _generations(r, model, info, directory, concurrent, dtype),
        "greedy.json": lambda r: _greedy(r, model, info, directory, concurrent, dtype),
    }
    present = [name for name in known if (directory / name).exists()]
    if not present:
        raise ValueError(f"no reference file; known: {', '.join(known)}")
    for name in present:
        report = FileReport(f"{directory.name}/{name}")
        known[name](report)
        yield report


def _forwards(report: FileReport, model: DecoderModel, info: ModelInfo, file: Path, dtype: str) -> None:
    data = np.load(file)
    for key in [key for key in data.files if key.endswith("_ids")]:
        name = key.removesuffix("_ids")
        logits, hidden = _forward(model, info, data[key])
        if f"{name}_logits" in data:
            expected = data[f"{name}_logits"]
            rows = data[f"{name}_logits_rows"] if f"{name}_logits_rows" in data else slice(None)
            got = logits[rows]
        else:
            expected = data[f"{name}_lastblock_logits"]
            got = logits[-len(expected) :]
        tolerance = LOGITS_TOLERANCE[dtype] * (1 if dtype == "float32" else float(np.ptp(expected)))
        report.check_error(name, _error(got, expected), tolerance)
        if f"hidden_for_{name}" in data and dtype == "float32":
            error = _error(np.stack(hidden), data[f"hidden_for_{name}"])
            report.check_error(f"hidden states of {name}", error, LOGITS_TOLERANCE[dtype])


def _forward(
    model: DecoderModel, info: ModelInfo, token_ids: np.ndarray
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Logits [tokens, V] and hidden states of one sequence in one forward."""
    tokens = torch.from_numpy(token_ids.astype(np.int64))
    count = len(tokens)
    starts = torch.tensor([0, count], dtype=torch.int32)
    metadata = CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=starts[1:],
        num_reqs=1,
        num_actual_tokens=count,
        max_query_len=count,
        max_seq_len=count,
        block_table_tensor=torch.zeros(1, 1, dtype=torch.int32),
        slot_mapping=torch.arange(count),
    )
    if info.block_length is not None:
        metadata = make_block_causal_virtual_batches(metadata, info.block_length)
    states: list[torch.Tensor] = []
    kv_cache = KVCache.allocate(model, 1, info.max_model_len)
    hidden = model.forward(tokens, torch.arange(count), kv_cache, metadata, hidden_states=states)
    return model.compute_logits(hidden).numpy(), [state.float().numpy() for state in states]


def _routers(report: FileReport, model: DecoderModel, file: Path, dtype: str) -> None:
    data = np.load(file)
    for key in [key for key in data.files if key.endswith("_x")]:
        name = key.removesuffix("_x")
        moe = model.layers[int(name.removeprefix("layer"))].mlp
        if not isinstance(moe, MoE):
            report.check(f"{name}: is not a mixture of experts here", False)
            continue
        x = torch.from_numpy(data[key]).to(model.dtype).flatten(0, -2)
        ids, weights = moe.route(x)
        if dtype == "float32":  # rounding x to another dtype changes near ties
            got = [dict(zip(*row, strict=True)) for row in zip(ids.tolist(), weights.tolist(), strict=True)]
            pairs = zip(data[f"{name}_topk_ids"].tolist(), data[f"{name}_topk_weights"].tolist(), strict=True)
            expected = [dict(zip(*row, strict=True)) for row in pairs]
            report.check(
                f"{name}: other experts than the reference's",
                [set(row) for row in got] == [set(row) for row in expected],
            )
            pairs_of = zip(got, expected, strict=True)
            error = max(abs(a.get(e, 9.0) - w) for a, b in pairs_of for e, w in b.items())
            report.check_error(f"{name} weights", error, LOGITS_TOLERANCE[dtype])
        expected_out = data[f"{name}_moe_out"].reshape(len(x), -1)
        tolerance = LOGITS_TOLERANCE[dtype] * (1 if dtype == "float32" else float(np.ptp(expected_out)))
        report.check_error(f"{name} output", _error(moe(x).float().numpy(), expected_out), tolerance)


def _filters(report: FileReport, file: Path) -> None:
    data = np.load(file)
    logits = torch.from_numpy(data["logits"])
    for j, (temperature, top_k, top_p) in enumerate(data["grid_temperature_topk_topp"].tolist()):
        rows = len(logits)
        probs = filtered_probs(
            logits.clone(),
            torch.full((rows,), temperature),
            torch.full((rows,), int(top_k)),
            torch.full((rows,), top_p),
        )
        report.check_error(f"probs{j}", _error(probs.numpy(), data[f"probs{j}"]), 1e-5)
    tokens, confidence = greedy(logits.clone())
    report.check("greedy tokens", tokens.tolist() == data["greedy_tokens"].tolist())
    report.check_error("greedy confidence", _error(confidence.numpy(), data["greedy_conf"]), 1e-5)


def _generations(
    report: FileReport, model: DecoderModel, info: ModelInfo, directory: Path, concurrent: int, dtype: str
) -> None:
    """LLaDA2.0 and 2.1: tokens, the changes of each denoising forward, and the number of forwards."""
    cases = _comparable(report, json.loads((directory / report.name.split("/")[-1]).read_text()), dtype)
    changes: dict[str, list[tuple[int, list[tuple[int, int]]]]] = {case["case"]: [] for case in cases}

    def trace(request_id: str, block: int, pairs: list[tuple[int, int]]) -> None:
        changes[request_id].append((block, sorted(pairs)))

    engine = EngineCore.from_model(model, info, max_num_seqs=concurrent, reference_stopping=True, trace=trace)
    outputs = engine.generate(_diffusion_request(case) for case in cases)
    for case in cases:
        output, steps = outputs[case["case"]], changes[case["case"]]
        expected = [(step["block"], sorted(map(tuple, step["set"]))) for step in case["steps"]]
        # The original may answer with more than gen_length tokens; a server must not.
        tokens = case["output_ids"][: case["params"].get("gen_length", 2048)]
        problem = _problem(output)
        if problem is None and output.new_token_ids != tokens:
            problem = f"tokens {_first_difference(output.new_token_ids, tokens)}"
        if problem is None and steps != expected:
            problem = f"changes per step {_first_difference(steps, expected)}"
        if problem is None and output.num_forwards != case["num_forwards"]:
            problem = f"{output.num_forwards} denoising forwards, the reference has {case['num_forwards']}"
        report.check(f"{case['case']}: {problem}", problem is None)
    _count_forwards(report, engine, sum(case["num_forwards"] for case in cases), concurrent)


def _greedy(
    report: FileReport, model: DecoderModel, info: ModelInfo, directory: Path, concurrent: int, dtype: str
) -> None:
    """Autoregressive greedy decoding: tokens, finish reason, logprobs."""
    cases = _comparable(report, json.loads((directory / "greedy.json").read_text()), dtype)
    engine = EngineCore.from_model(model, info, max_num_seqs=concurrent)
    outputs = engine.generate(
        _greedy_request(case, ignore_eos)
        for case in cases
        for ignore_eos in (False, True)
        if not ignore_eos or case.get("output_ids_ignore_eos")
    )
    num_tokens = 0
    for case in cases:
        output = outputs[case["case"]]
        finish = FinishReason.STOP if case["finish"] == "eos" else FinishReason.LENGTH
        problem = _problem(output)
        if problem is None and output.new_token_ids != case["output_ids"]:
            problem = f"tokens {_first_difference(output.new_token_ids, case['output_ids'])}"
        if problem is None and output.finish_reason != finish:
            problem = f"finished by {output.finish_reason}, expected {finish}"
        if expected := case.get("output_ids_ignore_eos"):
            ignoring = outputs[f"{case['case']} ignore_eos"].new_token_ids
            num_tokens += len(expected)
            if problem is None and ignoring != expected:
                problem = f"tokens past EOS {_first_difference(ignoring, expected)}"
        num_tokens += len(case["output_ids"])
        report.check(f"{case['case']}: {problem}", problem is None)
        if case.get("logprobs") and dtype == "float32":
            error = _logprob_error(output, case["logprobs"])
            report.check_error(f"{case['case']} logprobs", error, LOGPROB_TOLERANCE)
    _count_forwards(report, engine, num_tokens, concurrent)


def _count_forwards(report: FileReport, engine: EngineCore, deciding: int, concurrent: int) -> None:
    """Alone, prompts are computed in the first deciding forward: there is no other forward at all."""
    forwards = engine.stats().num_forwards
    report.note = f"{forwards} model forwards for {deciding} deciding rows"
    if concurrent == 1 and not report.mismatches and forwards != deciding:
        report.mismatches.append(f"{forwards} model forwards, {deciding} expected")
    engine.shutdown()


def _diffusion_request(case: dict[str, Any]) -> GenerationRequest:
    params = case["params"]
    token_editing = "editing_threshold" in params
    diffusion = DiffusionParams(
        steps=params.get("steps", 32),
        threshold=params.get("threshold", 0.95),
        minimal_topk=params.get("minimal_topk", 1),
        eos_early_stop=params.get("eos_early_stop", False),
        editing_threshold=params.get("editing_threshold", 0.9) if token_editing else None,
        max_post_steps=params.get("max_post_steps", 16),
        num_to_transfer=params.get("num_to_transfer", 1),
    )
    sampling = SamplingParams(
        max_tokens=params.get("gen_length", 2048), temperature=params.get("temperature", 0.0)
    )
    return GenerationRequest(case["case"], "reference", tuple(case["prompt_ids"]), sampling, diffusion)


def _greedy_request(case: dict[str, Any], ignore_eos: bool) -> GenerationRequest:
    sampling = SamplingParams(
        max_tokens=len(case["output_ids_ignore_eos"]) if ignore_eos else case["max_tokens"],
        ignore_eos=ignore_eos,
        logprobs=5 if case.get("logprobs") else None,
    )
    name = f"{case['case']} ignore_eos" if ignore_eos else case["case"]
    return GenerationRequest(name, "reference", tuple(case["prompt_ids"]), sampling)


def _comparable(report: FileReport, cases: list[dict[str, Any]], dtype: str) -> list[dict[str, Any]]:
    """Cases whose narrowest decision is wide enough for ``dtype`` (float32: all)."""
    chosen = []
    for case in cases:
        margins = case.get("min_margins") or {"logit_gap": case.get("min_logit_gap")}
        narrowest = min((value for value in margins.values() if value is not None), default=0.0)
        if narrowest >= MIN_MARGIN[dtype]:
            chosen.append(case)
    report.skipped = len(cases) - len(chosen)
    return chosen


def _problem(output: RequestOutput) -> str | None:
    return None if output.error is None else f"failed: {output.error.message}"


def _logprob_error(output: RequestOutput, expected: list[dict[str, Any]]) -> float:
    if output.logprobs is None or len(output.logprobs) != len(expected):
        return float("inf")
    error = 0.0
    for got, want in zip(output.logprobs, expected, strict=True):
        top = dict(got.top)
        error = max(error, abs(got.logprob - want["logprob"]))
        error = max([error, *(abs(top.get(token, 9.0) - value) for token, value in want["top5"])])
    return error


def _error(got: np.ndarray, expected: np.ndarray) -> float:
    if got.shape != expected.shape:
        raise ValueError(f"shape {got.shape}, the reference has {expected.shape}")
    return float(np.abs(got.astype(np.float64) - expected).max())


def _first_difference(got: Sequence[Any], expected: Sequence[Any]) -> str:
    for i, (a, b) in enumerate(zip(got, expected, strict=False)):
        if a != b:
            return f"differ from index {i}: {a}, the reference has {b}"
    return f"have length {len(got)}, the reference has {len(expected)}"
