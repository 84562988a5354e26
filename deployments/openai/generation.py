"""The outputs of one HTTP request: its choices' streams merged, as text with stop strings applied."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from deployments.openai.contracts import Dispatcher, ModelEntry
from deployments.openai.detokenize import StopChecker
from deployments.openai.errors import GenerationFailedError
from deployments.openai.translate import TranslatedRequest
from replicas.errors import BlockserveError, DeadlineExceededError
from replicas.protocol import FinishReason, GenerationRequest, RequestError, RequestOutput, TokenLogprob

#: Outputs that the choices of one request may be ahead of their reader, per choice.
_QUEUED_PER_CHOICE = 4


@dataclass(slots=True)
class ChoiceDelta:
    """What one engine output adds to a choice. ``text`` may be "" while characters or a possible stop string
    are held back; ``num_tokens`` counts the tokens that the client sees; ``finish_reason`` is ``stop`` or
    ``length`` in the last delta of the choice."""

    index: int
    text: str = ""
    num_tokens: int = 0
    finish_reason: str | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)


class Choice:
    """State of one choice; feeds tokens through the detokenizer and the stop strings one by one."""

    def __init__(
        self,
        index: int,
        request: GenerationRequest,
        entry: ModelEntry,
        stop: tuple[str, ...],
        grammar_param: str | None = None,
    ) -> None:
        self._grammar_param = grammar_param
        self.index = index
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.num_tokens = 0
        self.num_cached_tokens = 0
        self.num_forwards = 0
        self.finish_reason: str | None = None
        self._min_tokens = request.sampling.min_tokens
        self._end_ids = {*entry.info.eos_token_ids, *request.sampling.stop_token_ids}
        self._detokenizer = entry.token_table.new_detokenizer(request.prompt_token_ids)
        self._stop = StopChecker(stop)

    def accept(self, output: RequestOutput) -> ChoiceDelta:
        """Raises ``GenerationFailedError`` when the output says that the request failed."""
        self._raise_failure(output)
        delta = ChoiceDelta(self.index)
        pieces: list[str] = []
        tokens = output.new_token_ids
        ends_by_token = output.finish_reason is FinishReason.STOP and tokens and tokens[-1] in self._end_ids
        for position, token_id in enumerate(tokens):
            delta.num_tokens += 1
            if ends_by_token and position == len(tokens) - 1:
                break
            pieces.append(self._checked(self._detokenizer.push(token_id), delta))
            if self._stop.stopped is not None:
                break
        if output.finish_reason is not None and self._stop.stopped is None:
            pieces += (self._checked(self._detokenizer.finish(), delta), self._stop.finish())
        if self._stop.stopped is not None:
            self.finish_reason = "stop"
        elif output.finish_reason is not None:
            self.finish_reason = output.finish_reason.value
        self.num_tokens += delta.num_tokens
        self.num_cached_tokens = output.num_cached_tokens
        self.num_forwards = output.num_forwards
        delta.text = "".join(pieces)
        delta.finish_reason = self.finish_reason
        delta.logprobs = (output.logprobs or [])[: delta.num_tokens]
        return delta

    def _checked(self, text: str, delta: ChoiceDelta) -> str:
        if self.num_tokens + delta.num_tokens < self._min_tokens:
            return text
        return self._stop.feed(text)

    def _raise_failure(self, output: RequestOutput) -> None:
        error = output.error
        if error is not None:
            if (
                error.param == "grammar" and self._grammar_param is not None
            ):  # our name for it, not the client's
                message = error.message.replace("`grammar`", f"`{self._grammar_param}`")
                error = replace(error, message=message, param=self._grammar_param)
            raise GenerationFailedError(error)
        if output.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
            raise GenerationFailedError(
                RequestError("request_aborted", "The request was aborted by the server", retryable=True)
            )


class Generation:
    """Runs the engine requests of one HTTP request. Iterate ``deltas`` once; closing it, or being cancelled
    in it, aborts whatever still runs."""

    def __init__(self, translated: TranslatedRequest, entry: ModelEntry, dispatcher: Dispatcher) -> None:
        self._requests = translated.requests
        self._dispatcher = dispatcher
        self.choices = [
            Choice(i, request, entry, translated.stop, translated.grammar_param)
            for i, request in enumerate(translated.requests)
        ]

    async def deltas(self) -> AsyncGenerator[ChoiceDelta, None]:
        """Deltas of all choices, each choice's in order, until every choice has finished.

        Raises ``BlockserveError`` when one choice fails (the others are aborted), and
        ``DeadlineExceededError`` after the requests' deadline.
        """
        if len(self.choices) == 1:
            source = self._run_choice(self.choices[0], self._requests[0])
        else:
            source = self._run_choices()
        async with aclosing(_until(source, self._requests[0].deadline)) as deltas:
            async for delta in deltas:
                yield delta

    async def _run_choice(
        self, choice: Choice, request: GenerationRequest
    ) -> AsyncGenerator[ChoiceDelta, None]:
        async with aclosing(self._dispatcher.stream(request)) as outputs:
            async for output in outputs:
                yield choice.accept(output)
                if choice.finish_reason is not None:
                    return  # a stop string may come before the engine's own end
        raise BlockserveError(f"the stream of request {request.request_id} ended without a finish reason")

    async def _run_choices(self) -> AsyncGenerator[ChoiceDelta, None]:
        queue: asyncio.Queue[ChoiceDelta | BaseException] = asyncio.Queue(
            _QUEUED_PER_CHOICE * len(self.choices)
        )

        async def run(choice: Choice, request: GenerationRequest) -> None:
            try:
                async with aclosing(self._run_choice(choice, request)) as deltas:
                    async for delta in deltas:
                        await queue.put(delta)
            except Exception as error:
                await queue.put(error)

        tasks = [
            asyncio.create_task(run(choice, request))
            for choice, request in zip(self.choices, self._requests, strict=True)
        ]
        try:
            unfinished = len(tasks)
            while unfinished:
                item = await queue.get()
                if isinstance(item, BaseException):
                    raise item
                unfinished -= item.finish_reason is not None
                yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _until(
    source: AsyncGenerator[ChoiceDelta, None], deadline: float | None
) -> AsyncGenerator[ChoiceDelta, None]:
    """Items of ``source`` until ``deadline`` (a ``time.time()`` value); closes ``source`` in any case."""
    async with aclosing(source):
        while True:
            seconds = None if deadline is None else deadline - time.time()
            try:
                async with asyncio.timeout(seconds):
                    item = await anext(source)
            except StopAsyncIteration:
                return
            except TimeoutError:
                raise DeadlineExceededError("The request took longer than the server allows") from None
            yield item
