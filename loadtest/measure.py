"""One chat completion, timed at the client; a streamed one chunk by chunk."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import requests


@dataclass
class Measurement:
    """Times in milliseconds from the moment the request was sent.

    ``ttft_ms``: first chunk with text, time in the server's queue included. ``tpot_ms``: (end - first chunk) /
    (tokens - 1), the mean time per output token; None when all came in one chunk. ``block_latency_ms``: mean gap
    between chunks with text; a block-diffusion model sends several tokens in one chunk, so it says more than TPOT.
    """

    text: str = ""
    completion_tokens: int = 0
    chunks: int = 0
    ttft_ms: float | None = None
    e2e_ms: float = 0.0
    last_chunk_ms: float = 0.0
    finish_reason: str | None = None
    error: str | None = None

    @property
    def tpot_ms(self) -> float | None:
        if self.ttft_ms is None or self.chunks < 2 or self.completion_tokens < 2:
            return None
        return (self.last_chunk_ms - self.ttft_ms) / (self.completion_tokens - 1)

    @property
    def block_latency_ms(self) -> float | None:
        if self.ttft_ms is None or self.chunks < 2:
            return None
        return (self.last_chunk_ms - self.ttft_ms) / (self.chunks - 1)

    @property
    def tokens_per_chunk(self) -> float | None:
        return self.completion_tokens / self.chunks if self.chunks else None


def measure(response: requests.Response, stream: bool, started: float) -> Measurement:
    """Reads an answer with status 200, opened with ``stream=True``. A broken connection and a malformed body are its
    ``error``, not exceptions."""
    try:
        if stream:
            # iter_lines and small chunk sizes hold data back, and TTFT would be the time of the whole answer.
            return measure_stream(response.iter_content(chunk_size=None), started)
        return _measure_body(response.json(), started)
    except (requests.RequestException, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        elapsed = (time.perf_counter() - started) * 1000
        return Measurement(e2e_ms=elapsed, error=f"{type(error).__name__}: {error}")


def _measure_body(body: dict[str, Any], started: float) -> Measurement:
    choice = body["choices"][0]
    return Measurement(
        text=choice["message"]["content"],
        completion_tokens=body["usage"]["completion_tokens"],
        finish_reason=choice["finish_reason"],
        e2e_ms=(time.perf_counter() - started) * 1000,
    )


def measure_stream(chunks: Iterable[bytes], started: float) -> Measurement:
    """Reads a server-sent event stream to its end. ``started``: ``time.perf_counter()`` when it was sent.

    ``chunks`` must come as the network delivers them: an iterator that buffers makes TTFT a lie.
    """
    result = Measurement()
    done = False
    for event in _events(chunks):
        now = (time.perf_counter() - started) * 1000
        if event == "[DONE]":
            done = True
            break
        payload: dict[str, Any] = json.loads(event)
        if "error" in payload:
            result.error = f"{payload['error'].get('code')}: {payload['error'].get('message')}"
            break
        if payload.get("usage"):
            result.completion_tokens = payload["usage"]["completion_tokens"]
        for choice in payload.get("choices", []):
            result.finish_reason = choice.get("finish_reason") or result.finish_reason
            if text := choice.get("delta", {}).get("content"):
                result.text += text
                result.chunks += 1
                result.last_chunk_ms = now
                if result.ttft_ms is None:
                    result.ttft_ms = now
    result.e2e_ms = (time.perf_counter() - started) * 1000
    if not done and result.error is None:
        result.error = "the stream ended without [DONE]"
    return result


def _events(chunks: Iterable[bytes]) -> Iterator[str]:
    """The ``data:`` payloads of a byte stream, as soon as each is complete."""
    buffer = b""
    for chunk in chunks:
        buffer += chunk
        while b"\n\n" in buffer:
            event, buffer = buffer.split(b"\n\n", 1)
            for line in event.splitlines():
                if line.startswith(b"data:"):
                    yield line[len(b"data:") :].strip().decode()
