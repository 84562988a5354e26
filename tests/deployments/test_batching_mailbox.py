from __future__ import annotations

import asyncio

import pytest

from deployments.mailbox import Mailbox
from replicas.errors import ReplicaLostError
from replicas.protocol import FinishReason, RequestOutput, TokenLogprob


def output(*tokens: int, finish: FinishReason | None = None, forwards: int = 0) -> RequestOutput:
    logprobs = [TokenLogprob(token, -1.0) for token in tokens]
    return RequestOutput("r", list(tokens), finish, logprobs, num_forwards=forwards)


async def test_what_the_reader_has_not_taken_is_merged() -> None:
    mailbox = Mailbox("r", 10)
    for i, finish in enumerate([None, None, FinishReason.STOP]):
        assert mailbox.put(output(i, finish=finish, forwards=i + 1))
    merged = await mailbox.get()
    assert merged.new_token_ids == [0, 1, 2]
    assert [logprob.token_id for logprob in merged.logprobs] == [0, 1, 2]
    assert (merged.finish_reason, merged.num_forwards) == (FinishReason.STOP, 3)
    assert mailbox.closed


async def test_an_error_does_not_swallow_the_tokens_before_it() -> None:
    mailbox = Mailbox("r", 10)
    mailbox.put(output(1))
    error = ReplicaLostError("gone").to_request_error()
    mailbox.put(RequestOutput("r", finish_reason=FinishReason.ERROR, error=error))
    assert (await mailbox.get()).new_token_ids == [1]
    assert (await mailbox.get()).error == error


async def test_the_bound_counts_unread_tokens_only() -> None:
    mailbox = Mailbox("r", 3)
    for i in range(20):
        assert mailbox.put(output(i))
        assert (await mailbox.get()).new_token_ids == [i]
    assert mailbox.put(output(1, 2, 3))
    assert not mailbox.put(output(4))
    assert mailbox.put(output(5))  # late outputs are dropped
    assert (await mailbox.get()).new_token_ids == [1, 2, 3]
    last = await mailbox.get()
    assert (last.error.code, last.finish_reason) == ("slow_consumer", FinishReason.ERROR)


async def test_get_waits() -> None:
    mailbox = Mailbox("r", 3)
    reader = asyncio.create_task(mailbox.get())
    await asyncio.sleep(0.01)
    assert not reader.done()
    mailbox.put(output(1))
    assert (await asyncio.wait_for(reader, 1)).new_token_ids == [1]
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(mailbox.get(), 0.01)
