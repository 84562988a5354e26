"""The training module against the original implementation, and each rule of its router by itself."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from replicas.demo.llada2_module import Llada2Config, Llada2Module, load_module
from replicas.demo.muon import Muon, orthogonal
from replicas.demo.train_llada2 import CONFIG, block_loss, config_json, level_experts, new_module, save, train
from replicas.demo.words_data import BLOCK_LENGTH, Batches

GOLDEN = Path(__file__).parents[2] / "golden"
TINY = dataclasses.replace(
    CONFIG, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2, head_dim=16
)


@pytest.mark.parametrize("name", ["llada2_b32", "llada2_b8", "llada2_tp"])
def test_logits_of_the_original_code(name: str) -> None:
    block = json.loads((GOLDEN / name / "meta.json").read_text())["block_length"]
    module = load_module(GOLDEN / name)
    data = np.load(GOLDEN / name / "forward.npz")
    compared = 0
    for key in data.files:
        if not key.endswith("_ids"):
            continue
        case = key.removesuffix("_ids")
        with torch.no_grad():
            logits = module(torch.from_numpy(data[key]).long().view(1, -1), block)[0].numpy()
        if case.startswith("canvas"):
            logits, expected = logits[-block:], data[f"{case}_lastblock_logits"]
        else:
            expected = data[f"{case}_logits"]
            if f"{case}_logits_rows" in data.files:
                logits = logits[data[f"{case}_logits_rows"]]
        np.testing.assert_allclose(logits, expected, atol=1e-4, rtol=0)
        compared += 1
    assert compared >= 4


@pytest.mark.parametrize("name", ["llada2_b32", "llada2_tp"])
def test_router_choices_of_the_original_code(name: str) -> None:
    module = load_module(GOLDEN / name)
    data = np.load(GOLDEN / name / "router.npz")
    layers = {i: layer.mlp for i, layer in enumerate(module.model.layers) if f"layer{i}_x" in data.files}
    assert layers
    for index, moe in layers.items():
        x = torch.from_numpy(data[f"layer{index}_x"]).float()
        with torch.no_grad():
            ids, weights = moe.gate(x)
            out = moe(x)
        got, order = ids.sort(dim=-1)
        expected, expected_order = torch.from_numpy(data[f"layer{index}_topk_ids"]).long().sort(dim=-1)
        assert torch.equal(got, expected)
        expected_weights = torch.from_numpy(data[f"layer{index}_topk_weights"]).float()
        torch.testing.assert_close(
            weights.gather(1, order), expected_weights.gather(1, expected_order), atol=1e-5, rtol=0
        )
        torch.testing.assert_close(
            out, torch.from_numpy(data[f"layer{index}_moe_out"]).float(), atol=1e-4, rtol=0
        )


def test_a_block_sees_itself_and_the_past_only() -> None:
    module = new_module(TINY, 0).eval()
    ids = torch.randint(0, 256, (1, 3 * BLOCK_LENGTH))
    changed = ids.clone()
    changed[0, 2 * BLOCK_LENGTH - 1] ^= 1
    with torch.no_grad():
        moved = (module(ids, BLOCK_LENGTH) - module(changed, BLOCK_LENGTH)).abs().amax(-1)[0]
    assert moved[:BLOCK_LENGTH].max() < 1e-5  # not 0: experts sum in another order
    assert moved[BLOCK_LENGTH : 2 * BLOCK_LENGTH].min() > 1e-4
    assert moved[2 * BLOCK_LENGTH :].min() > 1e-4
    with torch.no_grad():
        last = module(ids, BLOCK_LENGTH, last=BLOCK_LENGTH)
        whole = module(ids, BLOCK_LENGTH)
    torch.testing.assert_close(last, whole[:, -BLOCK_LENGTH:])


def test_config_must_be_whole() -> None:
    raw = config_json(CONFIG, "bfloat16")
    assert Llada2Config.from_dict(raw) == CONFIG
    del raw["n_group"]
    with pytest.raises(KeyError, match="n_group"):
        Llada2Config.from_dict(raw)


def test_config_has_exactly_the_fields_of_the_real_checkpoints() -> None:
    real = json.loads((GOLDEN / "llada2_b32" / "config.json").read_text())
    ours = config_json(CONFIG, "bfloat16")
    assert set(ours) == set(real)
    for key in ("architectures", "model_type", "score_function", "router_dtype", "hidden_act"):
        assert ours[key] == real[key]


def test_training_lowers_the_loss_and_repeats_from_its_seed(tmp_path: Path) -> None:
    def run() -> Llada2Module:
        module = new_module(TINY, 1)
        assert train(module, 12, minutes=5, seed=1) == 12
        return module

    probe = next(Batches(99, 2048))
    module = run()
    with torch.no_grad():
        before = block_loss(new_module(TINY, 1), *probe)
        after = block_loss(module, *probe)
    assert after < before - 0.5
    save(module, tmp_path)
    torch.testing.assert_close(
        dict(run().named_parameters()), dict(module.named_parameters()), atol=0, rtol=0
    )
    stored = load_file(tmp_path / "model.safetensors")
    assert stored["model.layers.1.mlp.gate.expert_bias"].dtype == torch.float32
    assert stored["lm_head.weight"].dtype == torch.bfloat16
    read = load_module(tmp_path)
    torch.testing.assert_close(
        read.lm_head.weight, module.lm_head.weight.bfloat16().float(), atol=0, rtol=0, check_stride=False
    )


def test_training_stops_at_its_time() -> None:
    assert train(new_module(TINY, 0), 100_000, minutes=0.02, seed=0) < 100_000


def test_overloaded_experts_lose_bias() -> None:
    module = new_module(TINY, 0)
    layer = module.moe_layers()[0]
    layer.load = torch.tensor([9, 0, 0, 0, 0, 0, 0, 7])
    level_experts(module, 0.5)
    assert layer.gate.expert_bias[0] == layer.gate.expert_bias[7] == -0.5
    assert layer.gate.expert_bias[3] == 0.5


@pytest.mark.parametrize("shape", [(3, 8, 24), (2, 24, 8)])
def test_orthogonal_levels_singular_values(shape: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape)
    values = torch.linalg.svdvals(orthogonal(x))
    assert values.min() > 0.5
    assert values.max() < 1.3
    u, _, vh = torch.linalg.svd(x, full_matrices=False)
    nearest = u @ vh
    cosine = (nearest * orthogonal(x)).sum((1, 2)) / nearest.norm(dim=(1, 2)) / orthogonal(x).norm(dim=(1, 2))
    assert cosine.min() > 0.95


def test_muon_minimises_and_takes_no_closure() -> None:
    torch.manual_seed(0)
    goal, weight = torch.randn(6, 4), torch.nn.Parameter(torch.zeros(6, 4))
    optimizer = Muon([weight], lr=0.05)
    for _ in range(200):
        optimizer.zero_grad()
        (weight - goal).pow(2).sum().backward()
        optimizer.step()
    assert (weight - goal).norm() < 0.2 * goal.norm()
    with pytest.raises(ValueError, match="closure"):
        optimizer.step(lambda: 0.0)
