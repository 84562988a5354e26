"""An engine without a model: deterministic tokens, a clock for steps, and faults on request.

Token ``i`` of a request is ``(sum(prompt) + i) % 1000``; see ``expected_tokens``. Faults are triggered by
the first prompt token (``CRASH``, ``HANG``, ``BAD``), so that a test can cause them through any interface.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from configs.schema import ModelConfig
from replicas.errors import EngineDeadError, InvalidRequestError
from replicas.protocol import (
    EngineCapabilities,
    EngineStats,
    FinishReason,
    GenerationRequest,
    RequestOutput,
    StepOutput,
)

BAD, CRASH, HANG, KILL = 666_001, 666_002, 666_003, 666_004


def expected_tokens(request: GenerationRequest) -> list[int]:
    base = sum(request.prompt_token_ids)
    return [(base + i) % 1000 for i in range(request.sampling.max_tokens)]


@dataclass
class FakeEngine:
    """``step_s``: seconds per step. ``first_step_s``: extra seconds before a request's first token."""

    max_num_seqs: int = 8
    step_s: float = 0.01
    first_token_s: float = 0.0
    step_timeout_s: float = 1.0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _waiting: list[GenerationRequest] = field(default_factory=list)
    _running: dict[str, tuple[GenerationRequest, int, float]] = field(default_factory=dict)
    _aborted: set[str] = field(default_factory=set)
    _stats: EngineStats = field(default_factory=EngineStats)
    _dead: str | None = None
    _stop: bool = False
    _last_step: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self._started = False
        self.submitted: list[GenerationRequest] = []
        self.aborts: list[str] = []

    @property
    def capabilities(self) -> EngineCapabilities:
        return EngineCapabilities(True, self.max_num_seqs, 4096)

    def submit(self, request: GenerationRequest) -> None:
        if request.prompt_token_ids and request.prompt_token_ids[0] == BAD:
            raise InvalidRequestError("`prompt` is bad", param="prompt")
        with self._lock:
            self.submitted.append(request)
            self._waiting.append(request)

    def abort(self, request_id: str) -> None:
        with self._lock:
            self.aborts.append(request_id)
            self._aborted.add(request_id)

    async def steps(self) -> AsyncIterator[StepOutput]:
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[StepOutput | Exception | None] = asyncio.Queue()

        def run() -> None:
            error: Exception | None = None
            try:
                while not self._stop:
                    output = self._step()
                    if output.outputs:
                        loop.call_soon_threadsafe(queue.put_nowait, output)
                    time.sleep(self.step_s)
            except Exception as caught:
                self._dead = str(caught)
                error = EngineDeadError(str(caught))
            if not loop.is_closed():
                loop.call_soon_threadsafe(queue.put_nowait, error)

        threading.Thread(target=run, daemon=True).start()
        while True:
            item = await queue.get()
            if item is None:
                return
            if isinstance(item, Exception):
                raise item
            yield item

    def _step(self) -> StepOutput:
        out = StepOutput()
        with self._lock:
            for request in [r for r in self._waiting if r.request_id in self._aborted]:
                self._waiting.remove(request)
                out.outputs.append(RequestOutput(request.request_id, finish_reason=FinishReason.ABORT))
            for request_id in self._aborted & set(self._running):
                del self._running[request_id]
                out.outputs.append(RequestOutput(request_id, finish_reason=FinishReason.ABORT))
            self._aborted.clear()
            while self._waiting and len(self._running) < self.max_num_seqs:
                request = self._waiting.pop(0)
                self._running[request.request_id] = (request, 0, time.monotonic() + self.first_token_s)
            running = list(self._running.values())
        for request, done, ready_at in running:
            first = request.prompt_token_ids[0] if request.prompt_token_ids else 0
            if first == CRASH and done >= 2:
                raise RuntimeError("the fake engine crashed")
            if first == KILL and done >= 2:
                os._exit(1)
            if first == HANG and done >= 2:
                time.sleep(3600)
            if time.monotonic() < ready_at:
                continue
            token = (sum(request.prompt_token_ids) + done) % 1000
            finished = done + 1 >= request.sampling.max_tokens
            out.outputs.append(
                RequestOutput(request.request_id, [token], FinishReason.LENGTH if finished else None)
            )
            with self._lock:
                if finished:
                    del self._running[request.request_id]
                else:
                    self._running[request.request_id] = (request, done + 1, ready_at)
        if running:
            self._stats.steps += 1
            self._stats.num_forwards += 1
            self._stats.max_running_seen = max(self._stats.max_running_seen, len(running))
        self._last_step = time.monotonic()
        return out

    def stats(self) -> EngineStats:
        with self._lock:
            live = list(self._running.values())
            waiting = list(self._waiting)
        self._stats.waiting, self._stats.running = len(waiting), len(live)
        self._stats.total_slots = self.max_num_seqs
        self._stats.free_slots = self.max_num_seqs - len(live)
        self._stats.kv_usage = len(live) / self.max_num_seqs
        self._stats.queued_tokens = sum(r.sampling.max_tokens - done for r, done, _ in live) + sum(
            len(r.prompt_token_ids) + r.sampling.max_tokens for r in waiting
        )
        self._stats.last_step_age_s = time.monotonic() - self._last_step
        return self._stats

    def check_health(self) -> None:
        if self._dead:
            raise EngineDeadError(self._dead)
        if self._running and time.monotonic() - self._last_step > self.step_timeout_s:
            raise EngineDeadError("no step for too long")

    def shutdown(self) -> None:
        self._stop = True


class FakeEngineFactory:
    """Picklable: what ``build_app(..., load=...)`` wants. ``max_num_seqs`` comes from the configuration."""

    def __init__(self, **options: float) -> None:
        self.options = options

    def __call__(self, config: ModelConfig) -> FakeEngine:
        return FakeEngine(max_num_seqs=config.engine.max_num_seqs, **self.options)  # type: ignore[arg-type]
