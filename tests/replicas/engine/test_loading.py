import pytest
import torch

from replicas.engine.loading import resolve_device, resolve_dtype, stored_dtype
from replicas.engine.memory import check_kv_memory, free_memory_bytes
from replicas.errors import ModelLoadError

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
