"""Streams completions from an OpenAI-compatible server and times them; a process of its own (reads and prints JSON)."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from typing import Any

import aiohttp


async def stream(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> dict[str, Any]:
    """``{"ttft_s", "end_s", "text", "tokens"}`` of one streamed completion; seconds from its start."""
    started = time.perf_counter()
    first: float | None = None
    text: list[str] = []
    usage = 0
    async with session.post(f"{url}/v1/completions", json=body) as response:
        if response.status != 200:
            raise RuntimeError(f"status {response.status}: {(await response.text())[:300]}")
        async for line in response.content:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(str(event["error"]))
            if event.get("usage"):
                usage = event["usage"]["completion_tokens"]
            for choice in event["choices"]:
                if choice.get("text"):
                    first = first or time.perf_counter()
                    text.append(choice["text"])
    end = time.perf_counter()
    return {
        "ttft_s": (first or end) - started,
        "end_s": end - started,
        "text": "".join(text),
        "tokens": usage,
    }


async def run(
    url: str, bodies: list[dict[str, Any]], concurrency: int, api_key: str | None = None
) -> dict[str, Any]:
    """All bodies, ``concurrency`` at once; a user begins its next request when its last one has ended."""
    headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    waiting = list(enumerate(bodies))[::-1]
    results: list[dict[str, Any] | None] = [None] * len(bodies)
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers) as session:

        async def user() -> None:
            while waiting:
                index, body = waiting.pop()
                results[index] = await stream(session, url, body)

        started = time.perf_counter()
        await asyncio.gather(*(user() for _ in range(concurrency)))
        return {"wall_s": time.perf_counter() - started, "requests": results}


def main() -> None:
    job = json.load(sys.stdin)
    api_key = os.environ[job["api_key_env"]] if job.get("api_key_env") else None
    print(json.dumps(asyncio.run(run(job["url"], job["bodies"], job["concurrency"], api_key))))


if __name__ == "__main__":
    main()
