"""What is made of an event stream's bytes, however the network cuts them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest

from loadtest.measure import measure_stream


def stream(*texts: str, tokens: int) -> bytes:
    choices = [{"index": 0, "delta": {"content": text}} for text in texts]
    events: list[dict] = [{"choices": [choice]} for choice in choices]
    events.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    events.append({"choices": [], "usage": {"completion_tokens": tokens}})
    return b"".join(f"data: {json.dumps(event)}\n\n".encode() for event in events) + b"data: [DONE]\n\n"


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_bytes_cut_anywhere(size: int) -> None:
    data = stream("", "Grüße", " 🙂", tokens=4)
    result = measure_stream((data[i : i + size] for i in range(0, len(data), size)), time.perf_counter())
    assert (result.text, result.chunks, result.completion_tokens) == ("Grüße 🙂", 2, 4)
    assert (result.finish_reason, result.error, result.tokens_per_chunk) == ("stop", None, 2)


def test_times() -> None:
    def chunks() -> Iterator[bytes]:
        for event in stream("a", "b", tokens=5).split(b"\n\n")[:-1]:
            time.sleep(0.1)
            yield event + b"\n\n"

    result = measure_stream(chunks(), time.perf_counter())
    assert 100 <= result.ttft_ms < 190 < result.last_chunk_ms < result.e2e_ms
    assert result.tpot_ms == pytest.approx((result.last_chunk_ms - result.ttft_ms) / 4)
    assert result.block_latency_ms == pytest.approx(result.last_chunk_ms - result.ttft_ms)


def test_an_answer_in_one_chunk_has_no_time_per_token() -> None:
    result = measure_stream([stream("a whole block", tokens=8)], time.perf_counter())
    assert result.ttft_ms is not None
    assert (result.tpot_ms, result.block_latency_ms, result.tokens_per_chunk) == (None, None, 8)


def test_errors() -> None:
    error = b'data: {"error": {"code": "replica_lost", "message": "m"}}\n\n'
    assert measure_stream([error], 0).error == "replica_lost: m"
    assert measure_stream([stream("a", tokens=1)[:-10]], 0).error == "the stream ended without [DONE]"
