"""Values in config.json that no model has are refused by name when the model is loaded, not in its first forward."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from replicas.errors import ModelLoadError
from replicas.model_info import load_model_info
from replicas.models.registry import load_model

GOLDEN = Path(__file__).parents[2] / "golden"
CASES: list[tuple[str, dict[str, Any], str]] = [
    ("llada2_b8", {"num_attention_heads": "four"}, r"`num_attention_heads` .* got 'four'"),
    ("llada2_b8", {"num_hidden_layers": 0}, "`num_hidden_layers` must be a positive integer, got 0"),
    ("llada2_b8", {"hidden_size": None}, "`hidden_size` .* got None"),
    ("llada2_b8", {"num_key_value_heads": -2}, "`num_key_value_heads` .* got -2"),
    ("llada2_b8", {"rms_norm_eps": "tiny"}, "`rms_norm_eps` .* got 'tiny'"),
    ("llada2_b8", {"n_group": 0}, "`n_group` must be a positive integer, got 0"),
    ("llada2_b8", {"num_experts_per_tok": 0}, "`num_experts_per_tok` must be a positive integer, got 0"),
    # 8 experts in 4 groups of which 2 stay: 4 can be chosen.
    ("llada2_b8", {"num_experts_per_tok": 5}, r"`num_experts_per_tok` \(5\) must be at most the 4 experts"),
    ("llada2_b8", {"rope_scaling": "yarn"}, "`rope_scaling` must be objects, got 'yarn'"),
    ("qwen2_5", {"head_dim": True}, "`head_dim` .* got True"),
    ("qwen3_moe", {"num_experts_per_tok": 9}, r"1 to the number of experts \(8\), got 9"),
    ("qwen3_moe", {"num_experts_per_tok": 0}, r"1 to the number of experts \(8\), got 0"),
]


@pytest.mark.parametrize(("name", "changes", "message"), CASES)
def test_impossible_values_are_named(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = tmp_path / name
    shutil.copytree(GOLDEN / name, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ModelLoadError, match=message):
        load_model(load_model_info(folder), dtype=torch.float32, device=torch.device("cpu"), progress=False)


def test_as_many_experts_as_can_be_chosen_are_accepted(tmp_path: Path) -> None:
    folder = tmp_path / "llada2_b8"
    shutil.copytree(GOLDEN / "llada2_b8", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_experts_per_tok": 4}))
    load_model(load_model_info(folder), dtype=torch.float32, device=torch.device("cpu"), progress=False)
