"""vLLM on a GPU: reference tokens, CUDA graphs, ranks over NCCL, throughput of LLaDA2.0-mini's shape."""

from __future__ import annotations

import asyncio
import importlib.util
import time
from pathlib import Path

import pytest
import torch

from configs.schema import ModelConfig
from loadtest.engine_bench.shapes import write_checkpoint
from replicas.protocol import DiffusionParams, GenerationRequest, RequestOutput, SamplingParams
from replicas.verify import run_verify
from replicas.verify_generation import diffusion_request, read_cases
from replicas.verify_vllm import generate

GOLDEN = Path(__file__).parents[1] / "golden"
pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
    pytest.mark.timeout(1800),
]

#: LLaDA2.0-mini (specification of the published checkpoint), with fewer layers: its weights are random here.
MINI = {
    "architectures": ["LLaDA2MoeModelLM"],
    "model_type": "llada2_moe",
    "num_hidden_layers": 6,
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "moe_intermediate_size": 512,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "vocab_size": 157184,
    "max_position_embeddings": 8192,
    "rope_theta": 600000,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "use_bias": False,
    "use_qkv_bias": False,
    "embedding_dropout": 0.0,
    "hidden_act": "silu",
    "pad_token_id": 156892,
    "mask_token_id": 156895,
    "moe_router_enable_expert_bias": True,
}


def run(path: Path, requests: list[GenerationRequest], **engine) -> tuple[dict[str, RequestOutput], float]:
    """Outputs, and the seconds that a second run of the same requests took."""
    from replicas.vllm_engine.loading import load_vllm_engine

    config = ModelConfig.model_validate(
        {
            "name": "m",
            "path": str(path),
            "engine": {"backend": "vllm", "device": "cuda", "enable_prefix_caching": False} | engine,
            "resources": {"num_gpus": 1},
        }
    )
    loaded = load_vllm_engine(config, path)

    async def twice() -> tuple[dict[str, RequestOutput], float]:
        again = [
            GenerationRequest(f"{r.request_id}'", r.model, r.prompt_token_ids, r.sampling, r.diffusion)
            for r in requests
        ]
        outputs = await generate(loaded, requests)
        started = time.perf_counter()
        await generate(loaded, again)
        return outputs, time.perf_counter() - started

    try:
        return asyncio.run(twice())
    finally:
        loaded.shutdown()


@pytest.mark.parametrize("concurrent", [1, 8])
@pytest.mark.parametrize("name", ["llada2_b32", "qwen3_dense_untied", "qwen3_moe"])
def test_reference_tokens(name: str, concurrent: int) -> None:
    lines: list[object] = []
    assert run_verify([GOLDEN / name], engine="vllm", concurrent=concurrent, out=lines.append) == 0, lines


@pytest.mark.parametrize("eager", [True, False])
def test_cuda_graphs_change_no_token(eager: bool) -> None:
    cases = [
        case
        for case in read_cases(GOLDEN / "llada2_b32" / "generate_llada20.json")
        if not case["params"].get("temperature")
    ]
    requests = [diffusion_request(case) for case in cases]
    outputs, _ = run(GOLDEN / "llada2_b32", requests, dtype="float32", max_num_seqs=8, enforce_eager=eager)
    for case in cases:
        expected = case["output_ids"][: case["params"]["gen_length"]]
        assert outputs[case["case"]].new_token_ids == expected, case["case"]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_ranks_over_nccl() -> None:
    lines: list[object] = []
    status = run_verify([GOLDEN / "llada2_tp"], engine="vllm", tensor_parallel_size=2, out=lines.append)
    assert status == 0, lines


def test_throughput_grows_with_the_batch_and_the_gpu_is_used(tmp_path: Path) -> None:
    path = tmp_path / "mini"
    path.mkdir()
    write_checkpoint(path, MINI, std=0.02, dtype=torch.bfloat16)
    figures = {}
    free = torch.cuda.mem_get_info()[0]
    for batch in (1, 4, 8, 32):
        requests = [
            GenerationRequest(
                f"r{i}",
                "m",
                tuple(range(1000 + i, 1128 + i)),
                SamplingParams(max_tokens=256, ignore_eos=True),
                DiffusionParams(steps=8),
            )
            for i in range(batch)
        ]
        outputs, seconds = run(path, requests, dtype="bfloat16", max_num_seqs=batch, max_model_len=1024)
        assert all(len(output.new_token_ids) == 256 for output in outputs.values())
        figures[batch] = 256 * batch / seconds
    print({batch: round(value) for batch, value in figures.items()}, f"{free / 2**30:.0f} GiB were free")
    assert figures[1] < figures[4] < figures[8] < figures[32]
