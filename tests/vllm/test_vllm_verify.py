"""`blockserve verify --engine vllm`: the reference's tokens, alone, together and on two ranks."""

from __future__ import annotations

import pytest
from vllm_client import GOLDEN

from replicas.verify import run_verify


def verify(*names: str, **options) -> list[str]:
    lines: list[str] = []
    status = run_verify(
        [GOLDEN / name for name in names], engine="vllm", out=lambda line: lines.append(str(line)), **options
    )
    assert status == 0, "\n".join(lines)
    return lines


def test_block_diffusion_alone():
    lines = verify("llada2_b8")
    assert lines[-1].endswith("all equal")
    assert any("generate_llada21" in line for line in lines)


def test_block_diffusion_together():
    lines = verify("llada2_b32", concurrent=8)
    assert "up to 8 at once" in lines[0]


def test_block_diffusion_on_two_ranks():
    assert "on 2 ranks" in verify("llada2_tp", tensor_parallel_size=2)[0]


def test_greedy_qwen_together():
    lines = verify("qwen3_dense_untied", "qwen3_moe", concurrent=8)
    assert lines[-1] == "28 cases in 2 files: all equal"


def test_heads_without_a_kernel_are_named():
    lines: list[str] = []
    status = run_verify([GOLDEN / "qwen2_5"], engine="vllm", out=lambda line: lines.append(str(line)))
    if status == 0:
        pytest.skip("this build has the kernel")
    assert "no kernel for heads of size 16" in lines[0]
