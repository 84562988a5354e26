"""The same checkpoint and the same greedy requests over HTTP, on both engines and in transformers: one text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from running_server import GOLDEN, NEEDS_VLLM, engine, serve
from transformers import AutoModelForCausalLM, AutoTokenizer

from replicas.checkpoints import resolve_checkpoint

pytestmark = pytest.mark.conformance

BACKENDS = ["torch", pytest.param("vllm", marks=[NEEDS_VLLM, pytest.mark.slow])]
SMOLLM2 = "demo://smollm2-135m-instruct"
PROMPTS = [
    "What is the capital of France?",
    "def fibonacci(n):",
    "Warum ist der Himmel blau?",
    "The quick brown fox",
    "한국의 수도는",
    "1 2 3 4 5",
    "emoji: 👩‍👩‍👧",
    "a",
]
MAX_TOKENS = 32
CHECKPOINTS = {
    "smollm2": SMOLLM2,
    "qwen3": str(GOLDEN / "qwen3_dense_untied"),
    "qwen3-tied": str(GOLDEN / "qwen3_dense_tied"),
    "qwen3-moe": str(GOLDEN / "qwen3_moe"),
    "qwen2.5": str(GOLDEN / "qwen2_5"),
}
#: Their heads are of size 16, for which vLLM's attention has no kernel on a CPU.
NOT_IN_VLLM = {"qwen3-tied", "qwen2.5"}


class Reference:
    """transformers' ``generate`` on one checkpoint, in float32."""

    def __init__(self, path: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)

    def text(self, ids: list[int]) -> str:
        config = self.model.generation_config
        output = self.model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            max_new_tokens=MAX_TOKENS,
            do_sample=False,
            pad_token_id=config.pad_token_id or 0,
        )
        return self.tokenizer.decode(output[0, len(ids) :], skip_special_tokens=True)

    def completion(self, prompt: str) -> str:
        return self.text(self.tokenizer(prompt, add_special_tokens=False)["input_ids"])

    def chat(self, prompt: str) -> str:
        messages = [{"role": "user", "content": prompt}]
        return self.text(
            self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        )


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("own_backend", BACKENDS)
def test_texts_are_those_of_transformers(own_backend: str, tmp_path: Path) -> None:
    checkpoints = {
        name: path for name, path in CHECKPOINTS.items() if own_backend == "torch" or name not in NOT_IN_VLLM
    }
    models = [
        {
            "name": name,
            "path": path,
            "engine": engine(own_backend, max_model_len=512),
            "resources": {"num_cpus": 0.2},
        }
        for name, path in checkpoints.items()
    ]
    rows: list[tuple[str, str, int, int]] = []
    differences: list[tuple[Any, ...]] = []
    with serve({"ingress": {"num_cpus": 0}, "models": models}, tmp_path) as server:
        for name, path in checkpoints.items():
            reference = Reference(resolve_checkpoint(path))
            for kind in ("completion", "chat"):
                equal = 0
                for prompt in PROMPTS:
                    body: dict[str, Any] = {"model": name, "temperature": 0, "max_tokens": MAX_TOKENS}
                    if kind == "chat":
                        body["messages"] = [{"role": "user", "content": prompt}]
                        answer = server.client.post("/v1/chat/completions", json=body).json()
                        text, expected = answer["choices"][0]["message"]["content"], reference.chat(prompt)
                    else:
                        answer = server.client.post("/v1/completions", json=body | {"prompt": prompt}).json()
                        text, expected = answer["choices"][0]["text"], reference.completion(prompt)
                    equal += text == expected
                    if text != expected:
                        differences.append((name, kind, prompt, text, expected))
                rows.append((name, kind, equal, len(PROMPTS)))
    print(f"\n{own_backend} against transformers, greedy, {MAX_TOKENS} tokens")
    for name, kind, equal, total in rows:
        print(f"  {name:12} {kind:12} {equal} of {total} texts equal")
    assert not differences
