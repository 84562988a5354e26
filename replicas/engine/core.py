"""The engine of a replica: a scheduler, a model engine, and one thread that steps them."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from configs.schema import ModelConfig
from replicas.engine.diffusion_state import Trace
from replicas.engine.llada_engine import LLaDAEngine
from replicas.engine.loading import load_engine
from replicas.engine.qwen_engine import QwenEngine
from replicas.engine.request_state import RequestState
from replicas.engine.scheduler import ScheduledRow, Scheduler
from replicas.engine.slot_engine import SlotEngine, failed_output
from replicas.engine.step_thread import StepThread
from replicas.engine.validation import validate_request
from replicas.errors import DeadlineExceededError, EngineDeadError, InvalidRequestError
from replicas.model_info import ModelInfo
from replicas.protocol import (
    EngineCapabilities,
    EngineStats,
    FinishReason,
    GenerationRequest,
    RequestOutput,
    StepOutput,
)

logger = logging.getLogger(__name__)

#: Called from the step thread with a request's last output.
FinishCallback = Callable[[RequestOutput], None]


class EngineCore(StepThread):
    """Implements ``replicas.protocol.Engine`` on torch.

    ``submit`` and ``abort`` only leave a note for the next step; everything else about requests is done by
    the thread that steps, so the scheduler and the model engine need no locks. An idle engine waits on a
    condition variable.
    """

    def __init__(self, engine: SlotEngine, *, step_timeout_s: float = 120.0) -> None:
        super().__init__(step_timeout_s)
        self.engine = engine
        self.info = engine.info
        self._scheduler = Scheduler(
            engine.slots,
            max_num_batched_tokens=engine.max_num_batched_tokens,
            block_length=engine.block_length,
            prefix_cache=engine.prefix_cache,
        )
        self._callbacks: dict[str, FinishCallback] = {}
        # Guarded by the condition, as what the step thread shares.
        self._incoming: list[RequestState] = []
        self._aborts: list[str] = []
        self._stats = EngineStats(
            free_slots=engine.slots.num_free,
            total_slots=engine.slots.num_slots,
            num_finished={reason.value: 0 for reason in FinishReason},
        )

    @classmethod
    def from_config(cls, config: ModelConfig, path: str | Path) -> EngineCore:
        """Loads the checkpoint directory ``path``; the step thread starts with ``start`` or ``steps``.

        Raises ``ModelLoadError`` for a checkpoint that cannot be served, and, with all numbers named, when
        the KV slots do not fit into memory.
        """
        return cls(load_engine(config, path), step_timeout_s=config.engine.step_timeout_s)

    @classmethod
    def from_model(
        cls,
        model: Any,
        info: ModelInfo,
        *,
        step_timeout_s: float = 120.0,
        ban_mask_token: bool = True,
        reference_stopping: bool = False,
        trace: Trace | None = None,
        **limits: Any,
    ) -> EngineCore:
        """An engine around a loaded model (tests, verification).

        ``ban_mask_token``, ``reference_stopping``, ``trace``: block diffusion only, see ``LLaDAEngine``.
        ``limits``: ``max_num_seqs``, ``max_model_len``, ``max_num_batched_tokens``, ``enable_prefix_caching``,
        ``static_decode``, as ``SlotEngine`` takes them.
        """
        engine: SlotEngine
        if info.is_diffusion:
            engine = LLaDAEngine(
                model,
                info,
                ban_mask_token=ban_mask_token,
                reference_stopping=reference_stopping,
                trace=trace,
                **limits,
            )
        else:
            engine = QwenEngine(model, info, **limits)
        return cls(engine, step_timeout_s=step_timeout_s)

    @property
    def capabilities(self) -> EngineCapabilities:
        return self.engine.capabilities

    def submit(self, request: GenerationRequest, on_finish: FinishCallback | None = None) -> None:
        """Queues a request; callable from any thread. ``on_finish`` gets its last output, in the step thread.

        Raises ``InvalidRequestError`` (its field named) for one that can never run, ``EngineDeadError`` after
        the engine's end.
        """
        validate_request(request, self.info, self.capabilities)
        seed = request.sampling.seed
        state = self.engine.new_state(request, secrets.randbits(63) if seed is None else seed)
        with self._condition:
            self._raise_if_ended()
            if request.request_id in self._live_ids:
                raise InvalidRequestError(
                    f"`request_id` must be unique among live requests, got {request.request_id!r} twice",
                    param="request_id",
                )
            if not self._live_ids:
                self._progress_at = time.monotonic()
            self._live_ids.add(request.request_id)
            self._incoming.append(state)
            if on_finish is not None:
                self._callbacks[request.request_id] = on_finish
            self._condition.notify_all()

    def abort(self, request_id: str) -> None:
        """Ends a request in any phase, in the next step; unknown and finished ids are ignored."""
        with self._condition:
            if request_id in self._live_ids:
                self._aborts.append(request_id)
                self._condition.notify_all()

    def stats(self) -> EngineStats:
        """Load as of the last step, with what was submitted since."""
        with self._condition:
            return replace(
                self._stats,
                waiting=self._stats.waiting + len(self._incoming),
                queued_tokens=self._stats.queued_tokens
                + sum(state.num_queued_tokens for state in self._incoming),
                num_finished=dict(self._stats.num_finished),
                last_step_age_s=time.monotonic() - self._progress_at if self._live_ids else 0.0,
            )

    def has_work(self) -> bool:
        with self._condition:
            return bool(self._live_ids)

    def step(self) -> StepOutput:
        """One step in the caller's thread: aborts, deadlines, admission, one forward, outputs.

        For tests and verification; not to be mixed with ``start``.
        """
        with self._condition:
            incoming, self._incoming = self._incoming, []
            aborts, self._aborts = self._aborts, []
        for state in incoming:
            self._scheduler.add(state)
        result = StepOutput()
        for request_id in aborts:
            aborted = self._scheduler.get(request_id)
            if aborted is not None:
                aborted.finish_reason = FinishReason.ABORT
                self._finish(aborted, result, aborted.output())
        self._expire(result)
        rows = self._scheduler.schedule()
        for output in self._execute(rows) if rows else []:
            if output.finished:
                ended = self._scheduler.get(output.request_id)
                assert ended is not None
                self._finish(ended, result, output)
            else:
                result.outputs.append(output)
        self._publish_stats(result, rows)
        return result

    def generate(self, requests: Iterable[GenerationRequest]) -> dict[str, RequestOutput]:
        """Submits all, steps in the caller's thread until they have ended; returns one merged output per
        request: all its token ids and logprobs, and its last counters."""
        merged: dict[str, RequestOutput] = {}
        for request in requests:
            self.submit(request)
            merged[request.request_id] = RequestOutput(request.request_id)
        while any(not output.finished for output in merged.values()):
            for output in self.step().outputs:
                if output.request_id in merged:
                    previous = merged[output.request_id]
                    output.new_token_ids = previous.new_token_ids + output.new_token_ids
                    if previous.logprobs is not None:
                        output.logprobs = previous.logprobs + (output.logprobs or [])
                    merged[output.request_id] = output
        return merged

    def _execute(self, rows: list[ScheduledRow]) -> list[RequestOutput]:
        try:
            return self.engine.execute(rows)
        except Exception as error:
            if isinstance(error, torch.AcceleratorError):
                # After a device fault every later call on that device fails too.
                error = EngineDeadError(f"the device failed: {error}")
            if isinstance(error, EngineDeadError):
                with self._condition:
                    self._dead = error
            return [failed_output(row.state, error) for row in rows]

    def _expire(self, result: StepOutput) -> None:
        now = time.time()
        for state in self._scheduler.live():
            deadline = state.request.deadline
            if deadline is not None and deadline <= now:
                error = DeadlineExceededError("the request's deadline passed before it ended")
                self._finish(state, result, failed_output(state, error))

    def _finish(self, state: RequestState, result: StepOutput, output: RequestOutput) -> None:
        """Frees the slot, then says so: whoever sees the output may count on the slot."""
        self._scheduler.remove(state)
        result.outputs.append(output)
        assert output.finish_reason is not None
        with self._condition:
            self._live_ids.discard(state.request_id)
            self._stats.num_finished[output.finish_reason.value] += 1
            callback = self._callbacks.pop(state.request_id, None)
        if callback is not None:
            try:
                callback(output)
            except Exception:
                logger.exception("the completion callback of request %s failed", state.request_id)

    def _cut_off(self, error: EngineDeadError) -> None:
        """Ends all live requests with ``error`` and wakes the consumer; the step thread has ended."""
        with self._condition:
            incoming, self._incoming = self._incoming, []
        for state in incoming:
            self._scheduler.add(state)
        result = StepOutput()
        for state in self._scheduler.live():
            self._finish(state, result, failed_output(state, error))
        self._publish_stats(result, [])
        if result.outputs:
            self._stream.put(result)

    def _publish_stats(self, result: StepOutput, rows: list[ScheduledRow]) -> None:
        scheduler, slots, runner = self._scheduler, self.engine.slots, self.engine.runner
        with self._condition:
            stats = self._stats
            stats.waiting, stats.running = len(scheduler.waiting), len(scheduler.running)
            stats.free_slots, stats.total_slots = slots.num_free, slots.num_slots
            # A slot is reserved for the longest context, so a slot in use is memory in use.
            stats.kv_usage = 1 - slots.num_free / slots.num_slots
            stats.queued_tokens = sum(state.num_queued_tokens for state in scheduler.live())
            stats.steps += bool(rows)
            stats.num_forwards = runner.num_forwards
            stats.num_prefill_tokens = runner.num_prefill_tokens
            stats.num_denoise_row_forwards = runner.num_denoise_rows
            stats.num_decode_tokens += sum(len(output.new_token_ids) for output in result.outputs)
            if self.engine.prefix_cache is not None:
                stats.num_cached_tokens = self.engine.prefix_cache.num_cached_tokens
            stats.max_running_seen = max(stats.max_running_seen, runner.max_requests)
            self._progress_at = time.monotonic()
