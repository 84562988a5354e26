"""Over HTTP, each request gets what the reference gives, whatever runs beside it."""

from __future__ import annotations

import asyncio
import random

import httpx
import openai
import pytest
from running_server import GOLDEN, Server, golden
from transformers import AutoTokenizer

TOKENIZERS = {"qwen": "qwen3_dense_untied", "llada": "llada2_b32"}


def reference_text(model: str, ids: list[int]) -> str:
    tokenizer = AutoTokenizer.from_pretrained(GOLDEN / TOKENIZERS[model])
    return tokenizer.decode(ids, skip_special_tokens=True)


def cases(model: str) -> list[tuple[dict, str]]:
    """Request bodies, and the text of the reference's tokens."""
    if model == "qwen":
        found = [
            (
                {"prompt": case["prompt_ids"], "max_tokens": case["max_tokens"], "temperature": 0},
                case["output_ids"],
            )
            for case in golden("qwen3_dense_untied", "greedy.json")
        ]
    else:
        found = []
        for case in golden("llada2_b32", "generate_llada20.json"):
            params = case["params"]
            # Sampled cases depend on the original's random numbers; EOS in a prompt ends the original's answer.
            if params.get("temperature", 0) or 508 in case["prompt_ids"]:
                continue
            body = {
                "prompt": case["prompt_ids"],
                "max_tokens": params["gen_length"],
                "steps": params.get("steps", 32),
                "threshold": params.get("threshold", 0.95),
                "eos_early_stop": params.get("eos_early_stop", False),
                "temperature": 0,
            }
            if params.get("minimal_topk", 1) == 1:
                found.append((body, case["output_ids"][: params["gen_length"]]))
    return [(body | {"model": model}, reference_text(model, ids)) for body, ids in found]


async def complete(client: httpx.AsyncClient, body: dict) -> str:
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


@pytest.mark.parametrize("model", ["qwen", "llada"])
async def test_golden_cases_alone_and_together(server: Server, model: str) -> None:
    expected = cases(model)
    assert len(expected) >= 8
    random.Random(0).shuffle(expected)
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
        for body, text in expected[:3]:
            assert await complete(client, body) == text
        together = await asyncio.gather(*(complete(client, body) for body, _ in expected))
    assert together == [text for _, text in expected]


@pytest.mark.parametrize("model", ["qwen", "llada"])
async def test_seeded_request_alone_and_among_seven_others(server: Server, model: str) -> None:
    prompt = cases(model)[0][0]["prompt"]
    body = {"model": model, "prompt": prompt, "max_tokens": 40, "temperature": 0.8, "seed": 7}
    others = [body | {"seed": 100 + i, "prompt": prompt[i:] or prompt} for i in range(7)]
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
        alone = await complete(client, body)
        among = await asyncio.gather(*(complete(client, b) for b in [*others[:4], body, *others[4:]]))
    assert among[4] == alone
    assert len({*among}) > 4, "other seeds and prompts must not give the same text"


@pytest.mark.parametrize("model", ["qwen", "llada", "words"])
def test_stream_equals_answer_through_the_openai_client(server: Server, model: str) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    messages = [{"role": "user", "content": "reverse: blocks"}]
    plain = client.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=48)
    chunks = list(
        client.chat.completions.create(
            model=model,
            messages=messages,
            temperature=0,
            max_tokens=48,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    deltas = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(deltas) == plain.choices[0].message.content
    usage = chunks[-1].usage
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [getattr(usage, name) for name in counts] == [getattr(plain.usage, name) for name in counts]
    # The second request begins like the first one.
    assert usage.prompt_tokens_details.cached_tokens >= plain.usage.prompt_tokens_details.cached_tokens


@pytest.mark.parametrize("max_tokens", [1, 31, 33, 37])
@pytest.mark.parametrize("prompt_length", [1, 31, 32, 33, 170])
def test_max_tokens_of_block_diffusion_is_exact(server: Server, max_tokens: int, prompt_length: int) -> None:
    # This prompt's continuation holds no EOS in the first 37 tokens at any of these lengths.
    prompt = (golden("llada2_b32", "generate_llada20.json")[0]["prompt_ids"] * 4)[:prompt_length]
    body = {
        "model": "llada",
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    response = server.client.post("/v1/completions", json=body).json()
    assert response["usage"]["completion_tokens"] == max_tokens
    assert response["usage"]["prompt_tokens"] == prompt_length
    assert response["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("model", ["qwen", "llada"])
def test_a_repeated_prompt_is_not_computed_again(server: Server, backend: str, model: str) -> None:
    """All but its last token, whose logits are wanted; of block diffusion the whole blocks, on vLLM whole pages."""
    cached = 69 if (model, backend) == ("qwen", "torch") else 64
    prompt = [5 + (11 * i * i + 3) % 290 for i in range(70)]
    body = {"model": model, "prompt": prompt, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    cold, warm = (server.client.post("/v1/completions", json=body).json() for _ in range(2))
    assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] == cached
    assert warm["choices"][0]["text"] == cold["choices"][0]["text"]
