"""From single requests to batches on replicas, and back to one stream of outputs per request.

``@serve.batch`` only forms and dispatches batches (a generator under it would never learn that a caller has
left). One pump per batch opens ONE stream to a replica and hands its outputs to the requests' mailboxes.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import time
from collections.abc import AsyncGenerator, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ray import serve
from ray.serve.exceptions import DeploymentUnavailableError

from configs.schema import BlockserveConfig
from deployments.mailbox import Mailbox, failed_output
from deployments.openai.contracts import ModelState
from deployments.states import StatePoller
from replicas.errors import (
    BlockserveError,
    DeadlineExceededError,
    EngineDeadError,
    ModelNotFoundError,
    ModelNotReadyError,
    ReplicaLostError,
)
from replicas.protocol import GenerationRequest, RequestError, RequestOutput

logger = logging.getLogger("ray.serve")

#: Batches that may be in the forming function at once. It returns at once, so this is never reached.
MAX_CONCURRENT_BATCHES = 64
#: A replica sends something every second; silence for this long (seconds) means that it is lost.
STREAM_SILENCE_TIMEOUT_S = 30.0
#: For the end of a stream whose requests have all ended.
STREAM_END_TIMEOUT_S = 1.0
#: Above this many bytes a batch goes by reference: Serve's gRPC transport takes at most 4 MiB.
MAX_INLINE_BYTES = 2_000_000


@dataclass(eq=False)
class _Item:
    """A request on its way. ``num_emitted`` counts tokens; ``attempts`` dispatches so far."""

    request: GenerationRequest
    mailbox: Mailbox
    num_emitted: int = 0
    attempts: int = 0
    avoid: set[str] = field(default_factory=set)
    group: _Group | None = None
    left: bool = False


@dataclass(eq=False)
class _Group:
    """The requests that share one stream. ``live``: those that have not ended and whose reader is there."""

    model: str
    live: dict[str, _Item]
    replica_id: str | None = None
    #: Readers that left before the stream said which replica it is on.
    left_early: list[str] = field(default_factory=list)
    retry: list[_Item] = field(default_factory=list)
    pump: asyncio.Task[None] | None = None
    abandoned: bool = False


class BatchingDispatcher:
    """Implements ``Dispatcher`` on Serve handles, ``handles`` by model name. Lives on one event loop."""

    def __init__(self, config: BlockserveConfig, handles: Mapping[str, Any]) -> None:
        self._config = config
        self._handles = dict(handles)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._aborts: dict[tuple[str, str], list[str]] = {}
        self._live_ids: set[str] = set()
        batch = serve.batch(
            max_batch_size=config.batching.max_batch_size,
            batch_wait_timeout_s=config.batching.batch_wait_timeout_s,
            max_concurrent_batches=MAX_CONCURRENT_BATCHES,
        )
        self._enqueue = {name: batch(self._batch_function(name)) for name in self._handles}
        self._states = StatePoller(config.models, self._handles)

    def start(self) -> None:
        """Starts the background poll of the replicas' states; to be called on the event loop."""
        self._spawn(self._states.run())

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def model_states(self) -> dict[str, ModelState]:
        return self._states.states()

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[RequestOutput, None]:
        """See ``Dispatcher.stream``. The request's deadline, or the configured timeout, bounds all of it."""
        if request.model not in self._handles:
            error = ModelNotFoundError(f"the model `{request.model}` does not exist", param="model")
            yield failed_output(request.request_id, error.to_request_error())
            return
        if request.request_id in self._live_ids:
            duplicate = BlockserveError(f"the request id {request.request_id} is in use")
            yield failed_output(request.request_id, duplicate.to_request_error())
            return
        deadline = request.deadline or time.time() + self._config.admission.request_timeout_s
        request = replace(request, deadline=deadline)
        mailbox = Mailbox(request.request_id, self._config.batching.mailbox_size)
        item = _Item(request, mailbox)
        self._live_ids.add(request.request_id)
        try:
            while True:
                try:
                    async with asyncio.timeout(max(deadline - time.time(), 0)):
                        if item.group is None:
                            await self._enqueue[request.model](item)
                        output = await mailbox.get()
                except TimeoutError:
                    late = DeadlineExceededError("the request did not end before its deadline")
                    output = failed_output(request.request_id, late.to_request_error())
                except Exception as error:
                    logger.exception("Dispatching a request failed.")
                    output = failed_output(request.request_id, _request_error(error))
                if output.finished and output.error is not None:
                    self._leave(item)  # it may still run, after a timeout; harmless otherwise
                yield output
                if output.finished:
                    return
        finally:
            self._live_ids.discard(request.request_id)
            self._leave(item)

    # Forming batches

    def _batch_function(self, model: str) -> Any:
        # More than one forward can hold would queue on one replica while another may be idle.
        size = next(m.engine.max_num_seqs for m in self._config.models if m.name == model)

        async def form_batch(items: list[_Item]) -> list[Mailbox]:
            present = [item for item in items if not item.left]
            for start in range(0, len(present), size):
                self._dispatch(model, present[start : start + size])
            return [item.mailbox for item in items]

        return form_batch

    def _dispatch(self, model: str, items: list[_Item]) -> None:
        if not items:
            return
        group = _Group(model, {item.request.request_id: item for item in items})
        for item in items:
            item.group = group
            item.attempts += 1
        group.pump = self._spawn(self._pump(group))

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        # A clean context: handle calls that inherit one request's Serve context share its internal request
        # id, and Serve's router tells pending calls apart by that id alone.
        task = asyncio.get_running_loop().create_task(coroutine, context=contextvars.Context())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # One batch

    async def _pump(self, group: _Group) -> None:
        try:
            error = await self._read_stream(group)
        except Exception as caught:
            logger.exception("The pump of a batch failed.")
            error = BlockserveError(f"{type(caught).__name__}: {caught}")
        retry = list(group.retry)
        for item in list(group.live.values()):
            # The second half of the condition: nothing can have run, so nothing can run twice.
            if isinstance(error, ReplicaLostError) and item.num_emitted == 0:
                retry.append(item)
            elif error is not None:
                item.mailbox.put(failed_output(item.request.request_id, error.to_request_error()))
        group.live.clear()
        self._retry(group, [item for item in retry if not item.left])

    def _retry(self, group: _Group, items: list[_Item]) -> None:
        again = []
        for item in items:
            if group.replica_id is not None:
                item.avoid.add(group.replica_id)
            if item.attempts < self._config.batching.max_attempts:
                again.append(item)
                continue
            error = ReplicaLostError(
                f"replicas failed {item.attempts} times before the request's first token"
            )
            item.mailbox.put(failed_output(item.request.request_id, error.to_request_error()))
        if again:
            logger.warning("Dispatching %d requests of %s again.", len(again), group.model)
            self._dispatch(group.model, again)

    async def _read_stream(self, group: _Group) -> BlockserveError | None:
        """Reads a batch's stream to its end. Returns why requests are left in ``group.live``, if any are."""
        wait_s = self._config.batching.replica_wait_timeout_s
        response = self._call(group)
        ended = False
        try:
            while group.live:
                async with asyncio.timeout(wait_s if group.replica_id is None else STREAM_SILENCE_TIMEOUT_S):
                    kind, payload = await anext(response)
                if kind == "hdr":
                    self._on_header(group, payload)
                elif kind == "out":
                    for output in payload:
                        self._deliver(group, output)
            # The replica ends the stream by itself now; cancelling it would only cost another call.
            if not group.abandoned:
                async with asyncio.timeout(STREAM_END_TIMEOUT_S):
                    await anext(response)
            return None
        except StopAsyncIteration:
            ended = True
            return ReplicaLostError("the replica ended the stream before the request had ended")
        except TimeoutError:
            if group.replica_id is None:
                return ModelNotReadyError(
                    f"no replica of `{group.model}` took the request within {wait_s:g} s"
                )
            return ReplicaLostError(f"replica {group.replica_id} has gone silent")
        except DeploymentUnavailableError:
            return ModelNotReadyError(f"no replica of `{group.model}` is up")
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            return ReplicaLostError("the replica cancelled the stream")  # gRPC's CANCELLED from the peer
        except Exception as error:
            # ActorDiedError, ActorUnavailableError, a gRPC error, or an exception out of the replica's code.
            logger.warning("The stream of a batch on replica %s broke: %r", group.replica_id, error)
            return ReplicaLostError(f"the replica that ran the request was lost ({type(error).__name__})")
        finally:
            if not ended:
                with contextlib.suppress(Exception):
                    response.cancel()

    def _call(self, group: _Group) -> Any:
        requests = [item.request for item in group.live.values()]
        prompt_tokens = sum(len(request.prompt_token_ids) for request in requests)
        handle = self._handles[group.model].options(
            stream=True,
            method_name="generate_batch",
            _by_reference=sum(map(_num_bytes, requests)) > MAX_INLINE_BYTES,
        )
        return handle.remote(
            requests,
            num_requests=len(requests),
            num_tokens=prompt_tokens + sum(request.sampling.max_tokens for request in requests),
            avoid=sorted({replica for item in group.live.values() for replica in item.avoid}),
        )

    def _on_header(self, group: _Group, replica_id: str) -> None:
        group.replica_id = replica_id
        for request_id in group.left_early:
            self._abort_soon(group.model, replica_id, request_id)
        group.left_early.clear()

    def _deliver(self, group: _Group, output: RequestOutput) -> None:
        item = group.live.get(output.request_id)
        if item is None:
            return
        if output.error is not None and output.error.code == EngineDeadError.code and item.num_emitted == 0:
            del group.live[output.request_id]
            group.retry.append(item)
            return
        item.num_emitted += len(output.new_token_ids)
        if output.finished:
            del group.live[output.request_id]
        if not item.mailbox.put(output) and not output.finished:
            self._leave(item)

    # Leaving

    def _leave(self, item: _Item) -> None:
        """The reader is gone, or has had its last output: ends what still runs, on that replica only."""
        item.left = True
        group, request_id = item.group, item.request.request_id
        if group is None or group.live.pop(request_id, None) is None:
            return
        if group.replica_id is None:
            group.left_early.append(request_id)
        else:
            self._abort_soon(group.model, group.replica_id, request_id)
        if not group.live and not group.retry and group.pump is not None:
            group.abandoned = True
            group.pump.cancel()

    def _abort_soon(self, model: str, replica_id: str, request_id: str) -> None:
        pending = self._aborts.setdefault((model, replica_id), [])
        pending.append(request_id)
        if len(pending) == 1:  # what else leaves in this turn of the loop goes with it
            self._spawn(self._send_aborts(model, replica_id))

    async def _send_aborts(self, model: str, replica_id: str) -> None:
        request_ids = self._aborts.pop((model, replica_id))
        try:
            async with asyncio.timeout(STREAM_SILENCE_TIMEOUT_S):
                await self._handles[model].abort.remote(request_ids, pin=replica_id)
        except Exception as error:
            # A dead replica runs nothing any more; on a live one the request's deadline ends it.
            logger.info("Aborting %d requests on replica %s failed: %r", len(request_ids), replica_id, error)


def _request_error(error: Exception) -> RequestError:
    if isinstance(error, BlockserveError):
        return error.to_request_error()
    return RequestError("internal_error", f"{type(error).__name__}: {error}")


def _num_bytes(request: GenerationRequest) -> int:
    """About what a request takes when it is pickled, and not less."""
    sampling = request.sampling
    return (
        512
        + 5 * (len(request.prompt_token_ids) + len(request.resume_token_ids) + len(sampling.stop_token_ids))
        + 18 * len(sampling.logit_bias)
        + len((sampling.grammar or "").encode())
    )
