"""Forwards against transformers and against a token-by-token reference."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from replicas.attention.kv_cache import KVCache
from replicas.attention.metadata import CommonAttentionMetadata
from replicas.model_info import load_model_info
from replicas.models.decoder import DecoderModel
from replicas.models.experts import Experts
from replicas.models.layers import SwiGLU, silu_and_mul
from replicas.models.linear import Linear
from replicas.models.moe import MoE, sigmoid_group_top_k, softmax_top_k
from replicas.models.registry import load_model

SIZES = {
    "vocab_size": 160,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "eos_token_id": 1,
    "bos_token_id": 0,
    "pad_token_id": None,
}
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 16}
VARIANTS = {
    "llama": transformers.LlamaConfig(**SIZES),
    "llama, tied, biases": transformers.LlamaConfig(**SIZES, tie_word_embeddings=True, attention_bias=True),
    "llama 3.1 scaling": transformers.LlamaConfig(**SIZES, rope_parameters=LLAMA3_SCALING),
    "llama, linear scaling": transformers.LlamaConfig(
        **SIZES, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
    ),
    "qwen2": transformers.Qwen2Config(**SIZES),
    "qwen3, own head_dim": transformers.Qwen3Config(**SIZES, head_dim=32),
    "qwen3 moe, some layers dense": transformers.Qwen3MoeConfig(**SIZES, **MOE, mlp_only_layers=[1]),
    "qwen3 moe, every other layer": transformers.Qwen3MoeConfig(
        **SIZES, **MOE, decoder_sparse_step=2, norm_topk_prob=False
    ),
}


def run(model: DecoderModel, tokens: torch.Tensor, chunks: list[int]) -> torch.Tensor:
    """Logits of one sequence, computed chunk by chunk in slot 1 of 2."""
    kv_cache = KVCache.allocate(model, 2, 256)
    outputs, start = [], 0
    for count in chunks:
        end = start + count
        loc = torch.tensor([0, count], dtype=torch.int32)
        positions = torch.arange(start, end)
        metadata = CommonAttentionMetadata(
            query_start_loc=loc,
            query_start_loc_cpu=loc,
            seq_lens=torch.tensor([end], dtype=torch.int32),
            num_reqs=1,
            num_actual_tokens=count,
            max_query_len=count,
            max_seq_len=end,
            block_table_tensor=torch.tensor([[1]], dtype=torch.int32),
            slot_mapping=256 + positions,
        )
        hidden = model.forward(tokens[start:end], positions, kv_cache, metadata)
        outputs.append(model.compute_logits(hidden))
        start = end
    return torch.cat(outputs)


@pytest.mark.parametrize("name", VARIANTS)
def test_against_transformers(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = VARIANTS[name]
    reference = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter_name, parameter in reference.named_parameters():
            if "norm" in parameter_name or "bias" in parameter_name:
                parameter.normal_(1.0, 0.2)  # ones and zeros would hide a norm or bias left out
    reference.save_pretrained(tmp_path)
    tokens = torch.randint(0, 160, (90,))
    with torch.no_grad():
        expected = reference(tokens[None]).logits[0]
    model = load_model(
        load_model_info(tmp_path), dtype=torch.float32, device=torch.device("cpu"), progress=False
    )
    assert model.compute_logits(torch.zeros(0, 48)).shape == (0, 160)
    for chunks in ([90], [1, 40, 1, 48]):
        got = run(model, tokens, chunks)
        assert (got - expected).abs().max() <= 1e-4 * max(1, float(expected.abs().max()) / 10), chunks


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_grouped_experts_equal_a_loop_over_tokens(stored: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(stored).float()

    gate, gate_up, down = random(6, 16), random(6, 20, 16), random(6, 16, 10)
    shared = SwiGLU(Linear(random(20, 16)), Linear(random(16, 10)))
    experts = Experts(gate_up, down)
    moe = MoE(gate, lambda logits: softmax_top_k(logits, 2, normalize=True), experts, shared)
    x = random(33, 16)
    ids, weights = moe.route(x)
    expected = shared(x)
    for token in range(33):
        for expert, weight in zip(ids[token].tolist(), weights[token], strict=True):
            expected[token] += weight * (down[expert] @ silu_and_mul(gate_up[expert] @ x[token]))
    assert torch.allclose(moe(x), expected, atol=1e-4)
    assert torch.allclose(moe(x[5:6]), expected[5:6], atol=1e-4), "alone as in the batch"


def test_bias_picks_but_does_not_weigh() -> None:
    logits = torch.zeros(1, 8)
    bias = torch.tensor([0.0, 0, 5, 5, 0, 0, 0, 9])
    ids, weights = sigmoid_group_top_k(logits, bias, 2, num_groups=4, top_groups=1, scaling_factor=2.5)
    # Group 1 has two good experts; the single best expert is in group 3, whose other one is poor.
    assert sorted(ids[0].tolist()) == [2, 3]
    assert torch.allclose(weights, torch.full((1, 2), 1.25))
