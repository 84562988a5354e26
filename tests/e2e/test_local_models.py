"""The main job: `blockserve serve configs/local.yaml`, and two real models that answer; the same on vLLM."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
import yaml
from running_server import Server, serve

from replicas.demo.tasks import check, sample_task

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture(scope="module")
def local(backend: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The shipped configuration, on a free port."""
    file = CONFIGS / {"torch": "local.yaml", "vllm": "local_vllm.yaml"}[backend]
    args = yaml.safe_load(file.read_text())["applications"][0]["args"]
    with serve(args, tmp_path_factory.mktemp("local")) as running:
        yield running


def test_a_chat_model_knows_a_capital(local: Server) -> None:
    client = openai.OpenAI(base_url=f"{local.url}/v1", api_key="none", max_retries=0)
    request = {
        "model": "smollm2-135m-instruct",
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 0,
    }
    plain = client.chat.completions.create(**request)
    assert "Paris" in plain.choices[0].message.content
    deltas = [
        chunk.choices[0].delta.content or ""
        for chunk in client.chat.completions.create(**request, stream=True)
        if chunk.choices
    ]
    assert "".join(deltas) == plain.choices[0].message.content
    assert len(deltas) > 3, "an answer must come piece by piece"


async def test_a_block_diffusion_model_answers_fresh_tasks(local: Server) -> None:
    """100 prompts of the half that training never draws; several tokens per forward."""
    rng = random.Random(20261129)
    tasks = [sample_task(rng) for _ in range(100)]
    client = openai.AsyncOpenAI(base_url=f"{local.url}/v1", api_key="none", max_retries=0)
    at_once = asyncio.Semaphore(8)

    async def ask(prompt: str) -> tuple[str, int, int]:
        async with at_once:
            answer = await client.chat.completions.create(
                model="llada2-words", messages=[{"role": "user", "content": prompt}], temperature=0
            )
        usage = answer.usage
        return answer.choices[0].message.content, usage.completion_tokens, usage.num_forwards

    answers = await asyncio.gather(*(ask(task.prompt) for task in tasks))
    right = sum(check(task, text) for task, (text, _, _) in zip(tasks, answers, strict=True))
    tokens, forwards = sum(a[1] for a in answers), sum(a[2] for a in answers)
    print(f"{right} of 100 right, {tokens / forwards:.2f} tokens per forward")
    assert right >= 95
    assert tokens / forwards >= 2
