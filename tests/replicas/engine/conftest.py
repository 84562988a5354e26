"""Golden models, loaded once, and requests made from golden cases."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from prefix_requests import ask

from replicas.engine.core import EngineCore
from replicas.model_info import load_model_info
from replicas.models.registry import load_model
from replicas.protocol import DiffusionParams, GenerationRequest, SamplingParams

GOLDEN = Path(__file__).resolve().parents[2] / "golden"


@functools.cache
def _loaded(name):
    torch.set_num_threads(1)
    info = load_model_info(GOLDEN / name)
    return load_model(info, dtype=torch.float32, device=torch.device("cpu"), progress=False), info


@functools.cache
def _cases(name, file):
    return json.loads((GOLDEN / name / file).read_text())


def _core(name, **kwargs):
    model, info = _loaded(name)
    kwargs.setdefault("max_model_len", 512)
    return EngineCore.from_model(model, info, **kwargs)


def _request(case, request_id=None, **sampling):
    """The request of a golden case of either family."""
    params = case.get("params")
    if params is None:
        sampling.setdefault("max_tokens", case["max_tokens"])
        return GenerationRequest(
            request_id or case["case"], "golden", tuple(case["prompt_ids"]), SamplingParams(**sampling)
        )
    names = ("threshold", "steps", "minimal_topk", "editing_threshold", "max_post_steps", "num_to_transfer")
    diffusion = {name: params[name] for name in names if name in params}
    diffusion["eos_early_stop"] = params.get("eos_early_stop", False)
    sampling.setdefault("max_tokens", params["gen_length"])
    return GenerationRequest(
        request_id or case["case"],
        "golden",
        tuple(case["prompt_ids"]),
        SamplingParams(**sampling),
        DiffusionParams(**diffusion),
    )


def _make(request_id, prompt, *, diffusion=None, resume=(), deadline=None, **sampling):
    return GenerationRequest(
        request_id,
        "golden",
        tuple(prompt),
        SamplingParams(**sampling),
        diffusion,
        tuple(resume),
        deadline,
    )


def _prompts(name):
    """Golden prompts of different lengths, shortest first."""
    file = "generate_llada20.json" if name.startswith("llada") else "greedy.json"
    unique = {len(case["prompt_ids"]): case["prompt_ids"] for case in _cases(name, file)}
    return [unique[length] for length in sorted(unique)]


@pytest.fixture(scope="session")
def golden():
    return SimpleNamespace(
        loaded=_loaded, cases=_cases, core=_core, request=_request, make=_make, prompts=_prompts, path=GOLDEN
    )


@pytest.fixture(scope="session")
def cold(golden):
    """Tokens of a request alone in an engine that caches nothing."""

    @functools.cache
    def tokens(name, prompt, max_tokens):
        (request,) = ask(golden, name, [prompt], max_tokens)
        core = golden.core(name, max_num_seqs=1, enable_prefix_caching=False)
        return core.generate([request])["r0"].new_token_ids

    return lambda name, prompt, max_tokens: tokens(name, tuple(prompt), max_tokens)
