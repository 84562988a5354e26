"""The torch engine, vLLM and transformers give the same greedy tokens on a real model."""

from __future__ import annotations

import asyncio

import torch
from vllm_client import config_of, request

from replicas.checkpoints import resolve_checkpoint
from replicas.engine.core import EngineCore
from replicas.verify_vllm import generate
from replicas.vllm_engine.loading import load_vllm_engine

QUESTIONS = [
    "What is the capital of France?",
    "Write a haiku about rain.",
    "List three prime numbers.",
    "Warum ist der Himmel blau?",
    "def fibonacci(n):",
    "Name a fruit that is red.",
]
MAX_TOKENS = 48


def test_smollm2():
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = resolve_checkpoint("demo://smollm2-135m-instruct")
    tokenizer = AutoTokenizer.from_pretrained(path)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        for question in QUESTIONS
    ]
    requests = [request(f"{i}", prompt, max_tokens=MAX_TOKENS) for i, prompt in enumerate(prompts)]
    config = config_of(path)
    vllm_engine = load_vllm_engine(config, path)
    try:
        vllm_outputs = asyncio.run(generate(vllm_engine, requests))
    finally:
        vllm_engine.shutdown()
    torch_engine = EngineCore.from_config(config_of(path, backend="torch"), path)
    torch_outputs = torch_engine.generate(requests)
    torch_engine.shutdown()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for i, prompt in enumerate(prompts):
        output = model.generate(torch.tensor([prompt]), max_new_tokens=MAX_TOKENS, do_sample=False)
        expected = output[0, len(prompt) :].tolist()
        assert torch_outputs[f"{i}"].new_token_ids == expected, QUESTIONS[i]
        assert vllm_outputs[f"{i}"].new_token_ids == expected, QUESTIONS[i]
