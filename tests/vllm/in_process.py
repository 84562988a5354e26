"""Faults put into the plugin while one vLLM engine of this process runs the reference's cases; prints JSON.

A script of its own: vLLM in one process changes torch and the thread binding of that process.
`python in_process.py FOLDER`: FOLDER is for a changed checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "OMP_NUM_THREADS": "1",
}

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from vllm import LLM, SamplingParams

from replicas.attention.virtual_batch import BlockCausalRows
from replicas.protocol import DiffusionParams
from replicas.vllm_engine.plugin import sampler, scheduler, state
from replicas.vllm_engine.plugin.canvas import CanvasParams

GOLDEN = Path(__file__).parents[1] / "golden" / "llada2_b32"
META = json.loads((GOLDEN / "meta.json").read_text())
PAGES = 36


def engine(path: Path) -> LLM:
    config = json.loads((path / "config.json").read_text())
    page = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"] * 4 * 32
    return LLM(
        model=str(path),
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=6,
        block_size=32,
        # One request at its longest, and a little more.
        kv_cache_memory_bytes=PAGES * page,
        max_num_batched_tokens=256,
        distributed_executor_backend="uni",
        hf_overrides={"canvas_length": 32, "mask_token_id": META["mask_id"]},
        async_scheduling=False,
        disable_log_stats=False,
    )


def cases() -> list[dict[str, Any]]:
    found = json.loads((GOLDEN / "generate_llada20.json").read_text())
    return [case for case in found if not case["params"].get("temperature")]


def sampling(max_tokens: int, params: DiffusionParams, stop: bool = True) -> SamplingParams:
    extra = CanvasParams(max_tokens=max_tokens, seed=0, diffusion=params).to_extra_args()
    return SamplingParams(
        max_tokens=max_tokens,
        ignore_eos=True,
        detokenize=False,
        stop_token_ids=[META["eos_id"]] if stop else [],
        extra_args=extra,
    )


def run(llm: LLM, requests: list[tuple[list[int], SamplingParams]]) -> list[list[int]]:
    prompts = [{"prompt_token_ids": prompt} for prompt, _ in requests]
    outputs = llm.generate(prompts, [params for _, params in requests], use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def equal_cases(llm: LLM) -> int:
    """How many of the reference's cases have equal tokens, each alone and without what others left in the cache."""
    equal = 0
    for case in cases():
        params = case["params"]
        limit = params["gen_length"]
        diffusion = DiffusionParams(
            steps=params.get("steps", 32),
            threshold=params.get("threshold", 0.95),
            minimal_topk=params.get("minimal_topk", 1),
            eos_early_stop=params.get("eos_early_stop", False),
        )
        llm.reset_prefix_cache()
        (tokens,) = run(llm, [(case["prompt_ids"], sampling(limit, diffusion))])
        equal += tokens == case["output_ids"][:limit]
    return equal


@contextlib.contextmanager
def causal() -> Iterator[None]:
    """Every row sees only what is before it."""
    build = state.build_attn_metadata
    with mock.patch.object(state, "build_attn_metadata", lambda **kw: build(**kw | {"causal": True})):
        yield


@contextlib.contextmanager
def unsplit() -> Iterator[None]:
    """A request is one row: in the prompt every token sees all of it."""

    def rows(query_lens: np.ndarray, seq_lens: np.ndarray, block_length: int) -> BlockCausalRows:
        starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
        return BlockCausalRows(starts, seq_lens.astype(np.int32), np.arange(len(seq_lens)))

    with mock.patch.object(state, "block_causal_rows", rows):
        yield


@contextlib.contextmanager
def no_commit() -> Iterator[None]:
    """A finished block keeps the keys and values of its last denoising forward."""
    call, update = (
        sampler.BlockDiffusionSampler.__call__,
        scheduler.BlockDiffusionScheduler.update_from_output,
    )

    def sample(self: Any, logits: torch.Tensor, input_batch: Any, draft_logits: Any = None) -> Any:
        output = call(self, logits, input_batch, draft_logits)
        output.num_rejected[output.num_sampled > 0] = 0
        return output

    def keep(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        ends = {r: self.requests[r].num_computed_tokens for r in scheduler_output.num_scheduled_tokens}
        before = {r: self.requests[r].num_tokens for r in ends}
        outputs = update(self, scheduler_output, model_runner_output)
        for request_id, end in ends.items():
            request = self.requests.get(request_id)
            if request is not None and request.num_tokens > before[request_id]:
                request.num_computed_tokens = end
        return outputs

    with (
        mock.patch.object(sampler.BlockDiffusionSampler, "__call__", sample),
        mock.patch.object(scheduler.BlockDiffusionScheduler, "update_from_output", keep),
    ):
        yield


@contextlib.contextmanager
def mask_allowed() -> Iterator[None]:
    """The mask token may be predicted, as in the original code."""
    select = sampler.select_tokens

    def any_token(logits: torch.Tensor, rows: Any, **kwargs: Any) -> Any:
        return select(logits, rows, **kwargs | {"mask_token_id": None})

    with mock.patch.object(sampler, "select_tokens", any_token):
        yield


def preempted(llm: LLM) -> dict[str, Any]:
    """Requests that do not fit the KV cache together, against each alone."""
    core = llm.llm_engine.engine_core.engine_core.scheduler
    count = 0
    original = core._preempt_request

    def counted(*args: Any, **kwargs: Any) -> None:
        nonlocal count
        count += 1
        original(*args, **kwargs)

    params = DiffusionParams(steps=8, threshold=0.9)
    base = cases()[0]["prompt_ids"]
    requests = [((base * 40)[i : i + 20 + 25 * i], sampling(400, params, stop=False)) for i in range(6)]
    alone = [run(llm, [one])[0] for one in requests]
    with mock.patch.object(core, "_preempt_request", counted):
        together = run(llm, requests)
        # Again with what is still in the cache.
        again = run(llm, requests[::-1])[::-1]
    return {
        "preemptions": count,
        "equal": together == alone and again == alone,
        "tokens": [len(t) for t in alone],
    }


def likes_the_mask(folder: Path) -> Path:
    """The checkpoint with an output row for the mask that often wins (in the reference it is 0)."""
    path = folder / "likes_the_mask"
    shutil.copytree(GOLDEN, path)
    tensors = load_file(path / "model.safetensors")
    head = tensors["lm_head.weight"]
    head[META["mask_id"]] = 1.3 * head[cases()[0]["output_ids"][0]]
    save_file(tensors, path / "model.safetensors")
    return path


def torch_tokens(path: Path, requests: list[tuple[list[int], int, DiffusionParams]]) -> list[list[int]]:
    from configs.schema import ModelConfig
    from replicas.engine.core import EngineCore
    from replicas.protocol import GenerationRequest
    from replicas.protocol import SamplingParams as OurParams

    config = ModelConfig.model_validate(
        {"name": "m", "path": str(path), "engine": {"dtype": "float32", "device": "cpu", "max_num_seqs": 1}}
    )
    core = EngineCore.from_config(config, path)
    outputs = core.generate(
        GenerationRequest(f"{i}", "m", tuple(prompt), OurParams(max_tokens=limit, ignore_eos=True), params)
        for i, (prompt, limit, params) in enumerate(requests)
    )
    core.shutdown()
    return [outputs[f"{i}"].new_token_ids for i in range(len(requests))]


def mask_ban(folder: Path) -> dict[str, Any]:
    path = likes_the_mask(folder)
    llm = engine(path)
    mask = META["mask_id"]
    params = DiffusionParams(steps=8, threshold=0.9)
    prompts = [case["prompt_ids"] for case in cases()[:6]]
    requests = [(prompt, sampling(40, params, stop=False)) for prompt in prompts]
    banned = run(llm, requests)
    llm.reset_prefix_cache()
    with mask_allowed():
        allowed = run(llm, requests)
    expected = torch_tokens(path, [(prompt, 40, params) for prompt in prompts])
    return {
        "masks": sum(tokens.count(mask) for tokens in banned),
        "equal": banned == expected,
        "masks_allowed": sum(tokens.count(mask) for tokens in allowed),
        "equal_allowed": allowed == expected,
    }


def main(folder: Path) -> None:
    llm = engine(GOLDEN)
    result: dict[str, Any] = {"cases": len(cases()), "right": equal_cases(llm)}
    for fault in (causal, unsplit, no_commit):
        with fault():
            result[fault.__name__] = equal_cases(llm)
    result["right_again"] = equal_cases(llm)
    result["preempted"] = preempted(llm)
    del llm
    result["mask_ban"] = mask_ban(folder)
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
