"""A request's bounded mailbox: between the pump that reads a batch's stream and the request's reader.

Serve's streams have no backpressure, so this is where a slow client's memory is bounded.
"""

from __future__ import annotations

import asyncio
from collections import deque

from replicas.errors import SlowConsumerError
from replicas.protocol import FinishReason, RequestError, RequestOutput


def failed_output(request_id: str, error: RequestError) -> RequestOutput:
    """The last output of a request that failed."""
    return RequestOutput(request_id, finish_reason=FinishReason.ERROR, error=error)


class Mailbox:
    """Outputs that the reader has not taken yet; those of successive steps are merged into one.

    ``max_tokens`` bounds the undelivered tokens. One writer and one reader, on one event loop.
    """

    def __init__(self, request_id: str, max_tokens: int) -> None:
        self.request_id = request_id
        self._max_tokens = max_tokens
        self._outputs: deque[RequestOutput] = deque()
        self._num_tokens = 0
        self._wakeup = asyncio.Event()
        self._closed = False

    @property
    def closed(self) -> bool:
        """True once the last output is in; whatever is put later is dropped."""
        return self._closed

    def put(self, output: RequestOutput) -> bool:
        """Adds an output. False when the reader is too slow: then the mailbox is closed with
        ``SlowConsumerError`` and the request should be aborted."""
        if self._closed:
            return True
        self._wakeup.set()
        self._num_tokens += len(output.new_token_ids)
        if self._num_tokens > self._max_tokens:
            error = SlowConsumerError(
                f"the client has left more than {self._max_tokens} tokens of its stream unread"
            )
            self._outputs.append(failed_output(self.request_id, error.to_request_error()))
            self._closed = True
            return False
        self._closed = output.finished
        if self._outputs and output.error is None:
            _merge(self._outputs[-1], output)
        else:
            self._outputs.append(output)
        return True

    async def get(self) -> RequestOutput:
        """The next output; waits for one."""
        while not self._outputs:
            self._wakeup.clear()
            await self._wakeup.wait()
        output = self._outputs.popleft()
        self._num_tokens -= len(output.new_token_ids)
        return output


def _merge(into: RequestOutput, output: RequestOutput) -> None:
    into.new_token_ids = into.new_token_ids + output.new_token_ids
    if output.logprobs is not None:
        into.logprobs = (into.logprobs or []) + output.logprobs
    into.finish_reason = output.finish_reason
    into.num_cached_tokens = output.num_cached_tokens
    into.num_forwards = output.num_forwards
