"""Checkpoints that cannot be served are refused by name; sharded ones load like single files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from replicas.errors import ModelLoadError
from replicas.model_info import load_model_info
from replicas.models.decoder import DecoderModel
from replicas.models.moe import MoE
from replicas.models.registry import load_model

GOLDEN = Path(__file__).parents[2] / "golden"


@pytest.fixture
def checkpoint(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    folder = tmp_path / "checkpoint"
    shutil.copytree(GOLDEN / getattr(request, "param", "llada2_b8"), folder)
    return folder


def load(folder: Path) -> DecoderModel:
    return load_model(
        load_model_info(folder), dtype=torch.float32, device=torch.device("cpu"), progress=False
    )


def change_config(folder: Path, **changes) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def change_tensors(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("checkpoint", ["llada2_b8", "qwen2_5"], indirect=True)
def test_sharded_equals_single(checkpoint: Path) -> None:
    single = load(checkpoint)
    tensors = load_file(checkpoint / "model.safetensors")
    names = sorted(tensors)
    shards = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, part in shards.items():
        save_file({name: tensors[name] for name in part}, checkpoint / file)
    index = {"weight_map": {name: file for file, part in shards.items() for name in part}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    (checkpoint / "model.safetensors").unlink()
    sharded = load(checkpoint)
    assert torch.equal(single.lm_head.weight, sharded.lm_head.weight)
    for a, b in zip(single.layers, sharded.layers, strict=True):
        assert torch.equal(a.attention.qkv.weight, b.attention.qkv.weight)
    (checkpoint / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"shard 'model-00002-of-00002\.safetensors'"):
        load(checkpoint)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", r"model\.safetensors\.index\.json: cannot be read"),
        ("{}", r"model\.safetensors\.index\.json: cannot be read: KeyError\('weight_map'\)"),
        ('{"weight_map": {"nothing": "model.safetensors"}}', "lacks tensors .* 'nothing'"),
        ('{"weight_map": {"lm_head.weight": "../model.safetensors"}}', "is not in"),
    ],
)
def test_a_wrong_index_is_named(checkpoint: Path, index: str, message: str) -> None:
    (checkpoint / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelLoadError, match=message):
        load(checkpoint)


TIED = {"llada2_b8": "model.word_embeddings.weight", "qwen3_dense_tied": "model.embed_tokens.weight"}


@pytest.mark.parametrize(("checkpoint", "embeddings"), TIED.items(), indirect=["checkpoint"])
def test_a_tied_head_may_be_stored_twice(checkpoint: Path, embeddings: str) -> None:
    change_config(checkpoint, tie_word_embeddings=True)
    change_tensors(checkpoint, lambda t: t.update({"lm_head.weight": t[embeddings].clone()}))
    model = load(checkpoint)
    assert torch.equal(model.lm_head.weight, model.embeddings.weight)


@pytest.mark.parametrize(("checkpoint", "embeddings"), TIED.items(), indirect=["checkpoint"])
def test_a_tied_head_that_differs_is_named(checkpoint: Path, embeddings: str) -> None:
    """transformers uses such a head; to leave it out would serve other logits."""
    change_config(checkpoint, tie_word_embeddings=True)
    change_tensors(checkpoint, lambda t: t.update({"lm_head.weight": t[embeddings] + 1}))
    with pytest.raises(ModelLoadError, match=r"'lm_head\.weight' differs from the embeddings"):
        load(checkpoint)
    change_tensors(checkpoint, lambda t: t.update({"lm_head.weight": torch.zeros(2)}))
    with pytest.raises(ModelLoadError, match=r"'lm_head\.weight' has shape \[2\]"):
        load(checkpoint)


@pytest.mark.parametrize("checkpoint", ["qwen3_dense_tied", "qwen2_5", "llada2_b8"], indirect=True)
def test_a_16_bit_checkpoint_computes_in_float32_as_its_float32_copy(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same numbers, held in fewer bytes where that is exact. The file is mapped anew for every tensor here."""
    monkeypatch.setattr("replicas.models.weights._REMAP_BYTES", 1)
    change_tensors(checkpoint, lambda t: t.update({name: tensor.bfloat16() for name, tensor in t.items()}))
    narrow = load(checkpoint)
    assert narrow.embeddings.weight.dtype == torch.bfloat16
    change_tensors(checkpoint, lambda t: t.update({name: tensor.float() for name, tensor in t.items()}))
    wide = load(checkpoint)
    assert wide.embeddings.weight.dtype == torch.float32
    tokens = torch.arange(3, 12)
    embedded = narrow.embeddings(tokens)
    assert embedded.dtype == torch.float32
    assert torch.equal(embedded, wide.embeddings(tokens))
    for a, b in zip(narrow.layers, wide.layers, strict=True):
        assert torch.equal(a.attention.qkv.weight, b.attention.qkv.weight)
        assert torch.equal(a.input_norm.weight, b.input_norm.weight)
    logits = [model.compute_logits(embedded) for model in (narrow, wide)]
    assert torch.allclose(*logits, rtol=0, atol=1e-5 * float(logits[1].abs().max()))


@pytest.mark.parametrize("checkpoint", ["qwen3_dense_tied"], indirect=True)
def test_a_loaded_model_does_not_change_with_its_file(checkpoint: Path) -> None:
    model = load(checkpoint)
    before = [model.embeddings.weight.clone(), model.norm.weight.clone()]
    file = checkpoint / "model.safetensors"
    size = file.stat().st_size
    with file.open("r+b") as opened:
        opened.seek(size // 4)
        opened.write(bytes(size - size // 4))
    assert torch.equal(model.embeddings.weight, before[0])
    assert torch.equal(model.norm.weight, before[1])


def test_tensors_come_in_the_wanted_dtype(checkpoint: Path) -> None:
    model = load_model(
        load_model_info(checkpoint), dtype=torch.bfloat16, device=torch.device("cpu"), progress=False
    )
    moe = model.layers[-1].mlp
    assert isinstance(moe, MoE)
    assert model.dtype == moe.experts.gate_up.dtype == torch.bfloat16
    assert moe.gate.dtype == torch.float32, "the router computes in float32 whatever the model's dtype"


def test_a_missing_tensor_is_named(checkpoint: Path) -> None:
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    change_tensors(checkpoint, lambda tensors: tensors.pop(name))
    with pytest.raises(ModelLoadError, match=f"'{name}' .*missing"):
        load(checkpoint)


def test_surplus_tensors_are_named(checkpoint: Path) -> None:
    change_tensors(checkpoint, lambda tensors: tensors.update({"model.layers.9.extra": torch.zeros(2)}))
    with pytest.raises(ModelLoadError, match=r"1 tensors .*'model\.layers\.9\.extra'"):
        load(checkpoint)


def test_a_derived_tensor_is_no_surplus(checkpoint: Path) -> None:
    name = "model.rotary_emb.inv_freq"
    change_tensors(checkpoint, lambda tensors: tensors.update({name: torch.zeros(2)}))
    load(checkpoint)


def test_a_misshapen_tensor_is_named(checkpoint: Path) -> None:
    change_tensors(checkpoint, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(7)}))
    with pytest.raises(ModelLoadError, match=r"'model\.norm\.weight' has shape \[7\], expected \[96\]"):
        load(checkpoint)


def test_a_truncated_file_is_named(checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(ModelLoadError, match=r"model\.safetensors: not a readable safetensors file"):
        load(checkpoint)


def test_no_weights_at_all(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"neither model\.safetensors nor"):
        load(checkpoint)


def test_fused_experts_are_named(checkpoint: Path) -> None:
    name = "model.layers.1.mlp.experts.gate_up_proj"
    change_tensors(checkpoint, lambda tensors: tensors.update({name: torch.zeros(2)}))
    with pytest.raises(ModelLoadError, match=r"fused into one tensor"):
        load(checkpoint)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "unknown architecture 'GPT2LMHeadModel'"),
        ({"architectures": []}, "unknown architecture ''"),
        ({"model_type": "llada2_moe_veomni"}, "fused expert tensors"),
        ({"expert_capacity": 48}, r"LLaDA2\.2"),
        ({"use_qkv_bias": True}, "`use_qkv_bias` is not supported"),
        ({"use_qk_norm": False}, "QK norm"),
        ({"hidden_act": "gelu"}, "`hidden_act` 'gelu'"),
        ({"use_sliding_window": True}, "`use_sliding_window`"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, r"`layer_types` \['sliding_attention'\]"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, "'yarn' is not supported"),
        ({"n_group": 3}, "`num_experts` .* multiple of `n_group`"),
        ({"num_key_value_heads": 4}, "`num_attention_heads` .* multiple of"),
    ],
)
def test_unservable_configurations_are_named(checkpoint: Path, changes: dict, message: str) -> None:
    change_config(checkpoint, **changes)
    with pytest.raises(ModelLoadError, match=message):
        load(checkpoint)


def test_a_lacking_field_is_named(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    del config["moe_intermediate_size"]
    (checkpoint / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match="lacks 'moe_intermediate_size'"):
        load(checkpoint)


def test_a_broken_config_is_named(checkpoint: Path) -> None:
    (checkpoint / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"config\.json: cannot be read as JSON"):
        load(checkpoint)
    (checkpoint / "config.json").unlink()
    with pytest.raises(ModelLoadError, match=r"no config\.json"):
        load(checkpoint)


def test_limits_are_checked(checkpoint: Path) -> None:
    with pytest.raises(ModelLoadError, match="`max_model_len` must be 1 to"):
        load_model_info(checkpoint, max_model_len=10**6)
    assert load_model_info(checkpoint, max_model_len=30).max_model_len == 24, "whole blocks of 8"
    with pytest.raises(ModelLoadError, match="shorter than one block"):
        load_model_info(checkpoint, max_model_len=7)
