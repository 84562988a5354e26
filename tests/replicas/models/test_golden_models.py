"""Forwards and routers against the original implementations, chunked prefill, and models mutated to fail."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
import torch

from replicas.attention.kv_cache import KVCache
from replicas.attention.metadata import CommonAttentionMetadata
from replicas.attention.virtual_batch import make_block_causal_virtual_batches
from replicas.model_info import ModelInfo, load_model_info
from replicas.models.decoder import DecoderModel
from replicas.models.layers import RMSNorm, RotaryEmbedding
from replicas.models.moe import MoE, sigmoid_group_top_k
from replicas.models.registry import load_model

GOLDEN = Path(__file__).parents[2] / "golden"
LLADA = ["llada2_b8", "llada2_b32", "llada2_tp"]
QWEN = ["qwen2_5", "qwen3_dense_tied", "qwen3_dense_untied", "qwen3_moe"]
TOLERANCE = 1e-4


def load(name: str) -> tuple[ModelInfo, DecoderModel]:
    info = load_model_info(GOLDEN / name)
    return info, load_model(info, dtype=torch.float32, device=torch.device("cpu"), progress=False)


loaded = cache(load)


def forward(
    info: ModelInfo,
    model: DecoderModel,
    ids: np.ndarray,
    chunks: list[int] | None = None,
    hidden_states: list[torch.Tensor] | None = None,
    block_length: int | None = None,
) -> np.ndarray:
    """Logits of one sequence, ``chunks`` tokens at a time, in slot 1 of 2."""
    size = info.max_model_len
    block_length = block_length or info.block_length
    kv_cache = KVCache.allocate(model, 2, size)
    tokens = torch.from_numpy(ids.astype(np.int64))
    parts, end = [], 0
    for count in chunks or [len(tokens)]:
        start, end = end, end + count
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
            slot_mapping=size + positions,
        )
        if block_length is not None:
            metadata = make_block_causal_virtual_batches(metadata, block_length)
        hidden = model.forward(tokens[start:end], positions, kv_cache, metadata, hidden_states=hidden_states)
        parts.append(model.compute_logits(hidden))
    assert end == len(tokens)
    return torch.cat(parts).numpy()


def worst(info: ModelInfo, model: DecoderModel, data: np.lib.npyio.NpzFile, **kwargs) -> float:
    """Largest error over all sequences of a forward.npz."""
    errors = []
    for key in (key for key in data.files if key.endswith("_ids")):
        name = key.removesuffix("_ids")
        logits = forward(info, model, data[key], **kwargs)
        if f"{name}_lastblock_logits" in data:
            expected = data[f"{name}_lastblock_logits"]
            logits = logits[-len(expected) :]
        else:
            expected = data[f"{name}_logits"]
            logits = logits[data[f"{name}_logits_rows"]] if f"{name}_logits_rows" in data else logits
        assert logits.shape == expected.shape
        errors.append(np.abs(logits - expected).max())
    assert len(errors) >= 5
    return float(max(errors))


@pytest.mark.parametrize("name", LLADA + QWEN)
def test_forwards(name: str) -> None:
    info, model = loaded(name)
    assert worst(info, model, np.load(GOLDEN / name / "forward.npz")) <= TOLERANCE


@pytest.mark.parametrize("name", LLADA + QWEN)
def test_hidden_states(name: str) -> None:
    info, model = loaded(name)
    data = np.load(GOLDEN / name / "forward.npz")
    (key,) = (key for key in data.files if key.startswith("hidden_for_"))
    states: list[torch.Tensor] = []
    forward(info, model, data[key.removeprefix("hidden_for_") + "_ids"], hidden_states=states)
    assert len(states) == info.config["num_hidden_layers"] + 1
    assert np.abs(torch.stack(states).numpy() - data[key]).max() <= TOLERANCE


@pytest.mark.parametrize("name", [*LLADA, "qwen3_moe"])
def test_routers(name: str) -> None:
    info, model = loaded(name)
    data = np.load(GOLDEN / name / "router.npz")
    layers = [i for i, layer in enumerate(model.layers) if isinstance(layer.mlp, MoE)]
    assert layers == list(range(info.config.get("first_k_dense_replace", 0), len(model.layers)))
    for i in layers:
        moe = model.layers[i].mlp
        assert isinstance(moe, MoE)
        x = torch.from_numpy(data[f"layer{i}_x"])
        ids, weights = moe.route(x)
        expected = zip(data[f"layer{i}_topk_ids"], data[f"layer{i}_topk_weights"], strict=True)
        for got_ids, got, (want_ids, want) in zip(ids.tolist(), weights.tolist(), expected, strict=True):
            assert set(got_ids) == set(want_ids.tolist())
            by_expert = dict(zip(want_ids.tolist(), want.tolist(), strict=True))
            assert got == pytest.approx([by_expert[e] for e in got_ids], abs=1e-5)
        assert np.abs(moe(x).numpy() - data[f"layer{i}_moe_out"]).max() <= TOLERANCE


@pytest.mark.parametrize("name", LLADA)
def test_chunks_of_whole_blocks_equal_one_forward(name: str) -> None:
    info, model = loaded(name)
    assert info.block_length is not None
    ids = np.arange(3 * info.block_length + 5) * 7 % 300
    whole = forward(info, model, ids)
    for chunks in ([1, 2], [2, 1], [1, 1, 1]):
        sizes = [n * info.block_length for n in chunks]
        assert np.abs(forward(info, model, ids, [*sizes, 5]) - whole).max() <= TOLERANCE
    # A chunk that ends inside a block hides the block's end from its beginning.
    cut = info.block_length + 3
    torn = forward(info, model, ids, [cut, len(ids) - cut])
    assert np.abs(torn - whole).max() > 0.1


@pytest.mark.parametrize("name", QWEN)
def test_chunks_equal_one_forward(name: str) -> None:
    info, model = loaded(name)
    ids = np.arange(70) * 7 % 300
    whole = forward(info, model, ids)
    for chunks in ([1] * 70, [33, 37], [69, 1]):
        assert np.abs(forward(info, model, ids, chunks) - whole).max() <= TOLERANCE


# Mutations: the same check must find each of them.


def no_qk_norm(model: DecoderModel) -> None:
    for layer in model.layers:
        layer.attention.qk_norm = None


def no_qkv_bias(model: DecoderModel) -> None:
    for layer in model.layers:
        layer.attention.qkv.bias = None


def no_final_norm_weight(model: DecoderModel) -> None:
    model.norm = RMSNorm(torch.ones_like(model.norm.weight), model.norm.eps)


def swapped_norms(model: DecoderModel) -> None:
    model.layers = [
        replace(layer, input_norm=layer.post_attention_norm, post_attention_norm=layer.input_norm)
        for layer in model.layers
    ]


def other_theta(model: DecoderModel) -> None:
    config = {"rope_theta": 10000.0 * 7}
    model.rotary = RotaryEmbedding(config, model.rotary.rotary_dim, 512, torch.device("cpu"))


def of_experts(change) -> object:
    def mutate(model: DecoderModel) -> None:
        for layer in model.layers:
            if isinstance(layer.mlp, MoE):
                change(layer.mlp)

    return mutate


def no_shared_expert(moe: MoE) -> None:
    moe.shared = None


def with_routing(**changes):
    def change(moe: MoE) -> None:
        assert isinstance(moe.routing, partial)
        assert moe.routing.func is sigmoid_group_top_k
        changes_now = {k: v(moe.routing.keywords[k]) for k, v in changes.items()}
        moe.routing = partial(sigmoid_group_top_k, **{**moe.routing.keywords, **changes_now})

    return change


def softmax_router(moe: MoE) -> None:
    routing = moe.routing
    moe.routing = lambda logits: routing(torch.log_softmax(logits, dim=-1))


MUTATIONS = {
    "no QK norm": ("llada2_b8", no_qk_norm),
    "no QK norm, Qwen3": ("qwen3_dense_tied", no_qk_norm),
    "no QKV bias": ("qwen2_5", no_qkv_bias),
    "no final norm weight": ("llada2_b8", no_final_norm_weight),
    "norms swapped": ("qwen3_dense_tied", swapped_norms),
    "another theta": ("llada2_b8", other_theta),
    "no shared expert": ("llada2_b8", of_experts(no_shared_expert)),
    "no expert bias": ("llada2_b8", of_experts(with_routing(bias=torch.zeros_like))),
    "no scaling of routed experts": ("llada2_b8", of_experts(with_routing(scaling_factor=lambda _: 1.0))),
    "no groups": ("llada2_b8", of_experts(with_routing(top_groups=lambda _: 4))),
    "softmax in the router": ("llada2_b8", of_experts(softmax_router)),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_mutated_models_are_found(mutation: str) -> None:
    name, mutate = MUTATIONS[mutation]
    info, model = load(name)
    mutate(model)
    assert worst(info, model, np.load(GOLDEN / name / "forward.npz")) > 100 * TOLERANCE


@pytest.mark.parametrize("block_length", [1, 4, 512])
def test_another_mask_is_found(block_length: int) -> None:
    info, model = loaded("llada2_b8")
    data = np.load(GOLDEN / "llada2_b8" / "forward.npz")
    assert worst(info, model, data, block_length=block_length) > 100 * TOLERANCE
