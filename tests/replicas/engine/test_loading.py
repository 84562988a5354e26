import shutil

import pytest
import torch
from prefix_requests import AR, ask, question
from safetensors.torch import load_file, save_file

from replicas.engine import memory
from replicas.engine.core import EngineCore
from replicas.engine.loading import default_num_batched_tokens, resolve_device, resolve_dtype, stored_dtype
from replicas.engine.memory import check_kv_memory, free_memory_bytes
from replicas.engine.rank import EngineRank
from replicas.errors import ModelLoadError
from replicas.model_info import load_model_info
from replicas.models.narrow import narrow_kernel_exists

CPU = torch.device("cpu")


def test_auto_dtype_is_the_stored_one_where_it_runs_well(golden):
    _, plain = golden.loaded("llada2_b32")
    _, half = golden.loaded("llada2_tp")
    assert stored_dtype(plain) is torch.float32
    assert stored_dtype(half) is torch.bfloat16
    fast = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert resolve_dtype("auto", half, CPU) is (torch.bfloat16 if fast else torch.float32)
    assert resolve_dtype("auto", plain, CPU) is torch.float32
    assert resolve_dtype("float16", plain, CPU) is torch.float16


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_in_vain_is_named():
    with pytest.raises(ModelLoadError, match="no CUDA device"):
        resolve_device("cuda")
    assert resolve_device("auto") == CPU


def test_kv_memory_is_refused_with_all_numbers():
    fits = {"max_model_len": 64, "device": CPU, "kv_cache_memory_bytes": None, "kv_memory_fraction": 0.5}
    assert check_kv_memory(bytes_per_slot=100, max_num_seqs=4, **fits) == 400
    with pytest.raises(ModelLoadError, match=r"4000 bytes are needed .* but 2500 are available .*2 slots"):
        check_kv_memory(
            bytes_per_slot=1000,
            max_num_seqs=4,
            max_model_len=64,
            device=CPU,
            kv_cache_memory_bytes=2500,
            kv_memory_fraction=0.5,
        )
    with pytest.raises(ModelLoadError, match=r"`kv_memory_fraction` 0\.5"):
        check_kv_memory(bytes_per_slot=free_memory_bytes(CPU), max_num_seqs=4, **fits)


def test_free_memory_is_plausible():
    assert 2**20 < free_memory_bytes(CPU) < 2**50


def test_steps_are_short_where_tokens_are_slow():
    assert default_num_batched_tokens(CPU, 8, None) == 264
    assert default_num_batched_tokens(CPU, 8, 32) == 256 + 8 * 64
    assert default_num_batched_tokens(torch.device("cuda"), 8, 32) == 2048


def test_a_model_that_fills_the_memory_is_held_once(golden, monkeypatch, tmp_path):
    """In 16 bits only, with the same tokens; where there is room, both copies."""
    for file in (golden.path / AR).iterdir():
        shutil.copy(file, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({k: v.bfloat16() for k, v in tensors.items()}, tmp_path / "model.safetensors")
    size = (tmp_path / "model.safetensors").stat().st_size
    info = load_model_info(tmp_path)
    outputs, rows = [], []
    for free in (5 * size, 7 * size):
        monkeypatch.setattr(memory, "free_memory_bytes", lambda device, free=free: free)
        rank = EngineRank()
        rank.load(info, torch.float32, 1)
        linear = rank.model.layers[0].mlp.gate_up
        rows.append(linear.num_copies)
        core = EngineCore.from_model(rank.model, info, max_num_seqs=2, max_model_len=256)
        outputs.append(core.generate(ask(golden, AR, [question(i, 40) for i in range(3)])))
    assert rows == [1, 2] if narrow_kernel_exists() else rows == [1, 1]
    first, second = ({key: output.new_token_ids for key, output in one.items()} for one in outputs)
    assert first == second
