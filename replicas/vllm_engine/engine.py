"""The ``Engine`` protocol on vLLM's ``AsyncLLM``.

vLLM's own front end has a queue and a task for every request. A replica needs none of them: it reads what each step of
the engine process decided, for all requests at once, and hands it on.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

from replicas.engine.output_stream import OutputStream
from replicas.engine.validation import validate_request
from replicas.errors import (
    BlockserveError,
    DeadlineExceededError,
    EngineDeadError,
    InvalidRequestError,
    StepFailedError,
    UnsupportedParameterError,
)
from replicas.model_info import ModelInfo
from replicas.protocol import (
    DiffusionParams,
    EngineCapabilities,
    EngineStats,
    FinishReason,
    GenerationRequest,
    RequestOutput,
    SamplingParams,
    StepOutput,
    TokenLogprob,
)
from replicas.vllm_engine.plugin.canvas import CanvasParams

logger = logging.getLogger(__name__)

#: ``MAX_NUM_STOP_TOKEN_IDS`` of vLLM's sampler for GPUs.
MAX_STOP_TOKEN_IDS = 128
_FINISH_REASONS = {"STOP": FinishReason.STOP, "LENGTH": FinishReason.LENGTH, "ABORT": FinishReason.ABORT}


@dataclass(slots=True)
class _Live:
    """A request in vLLM. ``core_id`` is its name there: ours may come again while outputs of the first are on their
    way."""

    request: GenerationRequest
    core_id: str
    num_emitted: int = 0
    num_cached_tokens: int = 0
    num_forwards: int = 0

    @property
    def num_queued_tokens(self) -> int:
        request = self.request
        left = request.sampling.max_tokens - len(request.resume_token_ids) - self.num_emitted
        return left + (
            0 if self.num_emitted else len(request.prompt_token_ids) + len(request.resume_token_ids)
        )

    def output(self, new_token_ids: list[int] | None = None, **fields: Any) -> RequestOutput:
        return RequestOutput(
            self.request.request_id,
            new_token_ids or [],
            num_cached_tokens=self.num_cached_tokens,
            num_forwards=self.num_forwards,
            **fields,
        )


class VllmEngine:
    """Implements ``replicas.protocol.Engine``. ``llm``: an ``AsyncLLM`` that nobody else uses.

    ``submit`` and ``abort`` leave a message for the loop that reads ``steps``, which sends it on.
    """

    def __init__(
        self,
        llm: Any,
        info: ModelInfo,
        *,
        max_num_seqs: int,
        prefix_caching: bool,
        step_timeout_s: float = 120.0,
    ) -> None:
        if llm.output_handler is not None:
            raise RuntimeError(
                "`AsyncLLM` must be made outside of an event loop, or it reads the steps itself"
            )
        self._llm, self.info = llm, info
        self._core = llm.engine_core
        self._step_timeout_s = step_timeout_s
        self.capabilities = EngineCapabilities(
            supports_batching=max_num_seqs > 1,
            max_num_seqs=max_num_seqs,
            max_model_len=info.max_model_len,
            block_length=info.block_length,
            logprobs=True,
            structured_output=not info.is_diffusion,
            penalties=not info.is_diffusion,
            prefix_caching=prefix_caching,
        )
        self._core_ids = map(str, itertools.count())
        self._stream = OutputStream()
        # Guards everything below; held for moments only.
        self._lock = threading.Lock()
        self._live: dict[str, _Live] = {}
        self._by_core_id: dict[str, _Live] = {}
        self._outgoing: deque[Any] = deque()
        self._consumer: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None
        self._dead: EngineDeadError | None = None
        self._closed = False
        self._progress_at = time.monotonic()
        self._stats = EngineStats(total_slots=max_num_seqs, num_finished={r.value: 0 for r in FinishReason})
        self._num_running = 0

    def submit(self, request: GenerationRequest) -> None:
        """Queues a request; callable from any thread. Raises ``InvalidRequestError`` (its field named) for one that can
        never run, ``EngineDeadError`` after the engine's end."""
        validate_request(request, self.info, self.capabilities)
        core_request = self._core_request(request)
        live = _Live(request, core_request.request_id)
        with self._lock:
            self._raise_if_ended()
            if request.request_id in self._live:
                raise InvalidRequestError(
                    f"`request_id` must be unique among live requests, got {request.request_id!r} twice",
                    param="request_id",
                )
            if not self._live:
                self._progress_at = time.monotonic()
            self._live[request.request_id] = self._by_core_id[live.core_id] = live
            self._outgoing.append(core_request)
        self._wake()

    def abort(self, request_id: str) -> None:
        """Ends a request in any phase; unknown and finished ids are ignored. Callable from any thread."""
        with self._lock:
            live = self._live.get(request_id)
            if live is None:
                return
            self._outgoing.append(live.core_id)
            output = self._ended(live, live.output(finish_reason=FinishReason.ABORT))
        self._stream.put(StepOutput([output]))
        self._wake()

    async def steps(self) -> AsyncIterator[StepOutput]:
        """Outputs, in order, for the one consumer of this engine. Ends at ``shutdown``; raises ``EngineDeadError`` when
        vLLM's engine process has died."""
        loop = asyncio.get_running_loop()
        with self._lock:
            self._raise_if_ended()
            if self._consumer is not None:
                raise RuntimeError("steps() has a consumer already")
            wakeup = asyncio.Event()
            wakeup.set()
            self._consumer = (loop, wakeup)
        tasks = [loop.create_task(self._send(wakeup)), loop.create_task(self._receive())]
        try:
            async with contextlib.aclosing(self._stream.items()) as items:
                async for item in items:
                    yield item
        finally:
            for task in tasks:
                task.cancel()

    def stats(self) -> EngineStats:
        with self._lock:
            running = min(self._num_running, len(self._live))
            return replace(
                self._stats,
                waiting=len(self._live) - running,
                running=running,
                free_slots=max(0, self._stats.total_slots - len(self._live)),
                # vLLM reports with its steps, and after the last one there is none.
                kv_usage=self._stats.kv_usage if self._live else 0.0,
                queued_tokens=sum(live.num_queued_tokens for live in self._live.values()),
                num_finished=dict(self._stats.num_finished),
                last_step_age_s=time.monotonic() - self._progress_at if self._live else 0.0,
            )

    def check_health(self) -> None:
        """Raises ``EngineDeadError`` when vLLM's engine process has died, or when there is work and nothing has come of
        it for ``step_timeout_s``."""
        if self._core.resources.engine_dead:
            self._die("vLLM's engine process has died")
        with self._lock:
            self._raise_if_ended()
            age = time.monotonic() - self._progress_at
            if self._live and age > self._step_timeout_s:
                raise EngineDeadError(
                    f"the engine has {len(self._live)} requests but no step has ended for {age:.1f} s "
                    f"(`step_timeout_s` is {self._step_timeout_s:g})"
                )

    def shutdown(self) -> None:
        """Ends what is live with a retryable error, and vLLM's processes; idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            outputs = self._all_failed(EngineDeadError("the engine was shut down"))
        if outputs:
            self._stream.put(StepOutput(outputs))
        self._stream.end()
        self._llm.shutdown()
        # It is called again when the object goes, which may be after the modules that it needs.
        self._llm.shutdown = lambda: None

    # What the loop of the consumer does.

    async def _send(self, wakeup: asyncio.Event) -> None:
        try:
            while True:
                await wakeup.wait()
                wakeup.clear()
                while True:
                    with self._lock:
                        message = self._outgoing.popleft() if self._outgoing else None
                    if message is None:
                        break
                    if isinstance(message, str):
                        await self._core.abort_requests_async([message])
                    else:
                        await self._core.add_request_async(message)
        except Exception as error:
            self._die(f"vLLM's engine process cannot be reached: {type(error).__name__}", error)

    async def _receive(self) -> None:
        try:
            while True:
                step = self._take(await self._core.get_output_async())
                if step.outputs:
                    self._stream.put(step)
        except Exception as error:
            self._die(f"vLLM's engine process has died: {type(error).__name__}", error)

    def _take(self, outputs: Any) -> StepOutput:
        """What a step of vLLM decided, in our terms."""
        step = StepOutput()
        now = time.time()
        with self._lock:
            for output in outputs.outputs:
                live = self._by_core_id.get(output.request_id)
                if live is not None:  # or it was aborted here, and vLLM has not heard of it yet
                    step.outputs.append(self._output(live, output, now))
            if outputs.scheduler_stats is not None:
                self._count_step(outputs)
            self._progress_at = time.monotonic()
        return step

    def _count_step(self, outputs: Any) -> None:
        """What vLLM's scheduler says of a step. Called with the lock."""
        stats, reported = self._stats, outputs.scheduler_stats
        self._num_running = reported.num_running_reqs
        stats.kv_usage = reported.kv_cache_usage
        if not outputs.outputs and not reported.num_running_reqs:
            return  # after the last request vLLM reports once more, and computes nothing
        stats.steps += 1
        stats.num_forwards += 1
        in_step = len(outputs.outputs)
        if reported.spec_decoding_stats is not None:  # block diffusion: canvases are vLLM's drafts
            in_step = max(in_step, reported.spec_decoding_stats.num_drafts)
            stats.num_denoise_row_forwards += reported.spec_decoding_stats.num_drafts
        stats.max_running_seen = max(stats.max_running_seen, in_step)

    def _output(self, live: _Live, output: Any, now: float) -> RequestOutput:
        """Called with the lock."""
        tokens = list(output.new_token_ids)
        stats = self._stats
        if output.prefill_stats is not None and not live.num_emitted:
            prefill = output.prefill_stats
            live.num_cached_tokens = min(prefill.num_cached_tokens, len(live.request.prompt_token_ids))
            stats.num_cached_tokens += prefill.num_cached_tokens
            stats.num_prefill_tokens += prefill.num_computed_tokens
        live.num_emitted += len(tokens)
        if not self.info.is_diffusion:
            live.num_forwards = live.num_emitted
        elif output.spec_decode_metrics is not None:  # with the last output only
            live.num_forwards = sum(output.spec_decode_metrics.histogram)
        stats.num_decode_tokens += len(tokens)
        if output.finish_reason is not None:
            reason = _FINISH_REASONS.get(output.finish_reason.name)
            if reason is None:
                return self._failed(live, _fault(live.request))
            result = live.output(tokens, finish_reason=reason)
            result.logprobs = _logprobs(live.request, output)
            return self._ended(live, result)
        if live.request.deadline is not None and live.request.deadline <= now:
            self._outgoing.append(live.core_id)
            self._wake()
            return self._failed(live, DeadlineExceededError("the request's deadline passed before it ended"))
        result = live.output(tokens)
        result.logprobs = _logprobs(live.request, output)
        return result

    def _core_request(self, request: GenerationRequest) -> Any:
        """As vLLM's front end would make it. Raises ``InvalidRequestError`` for what vLLM refuses."""
        from vllm.exceptions import VLLMClientError
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import SamplingParams as VLLMSamplingParams

        sampling = request.sampling
        num_given = len(request.resume_token_ids)
        stop = set(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            stop |= set(self.info.eos_token_ids)
        structured_outputs = self._structured_outputs(request, stop)
        if not self.info.is_diffusion:
            _refuse_for_vllm(sampling, num_given, len(stop))
        prompt = tokens_input([*request.prompt_token_ids, *request.resume_token_ids])
        common: dict[str, Any] = {
            "max_tokens": sampling.max_tokens - num_given,
            "stop_token_ids": sorted(stop),
            # All that end a request are given above: vLLM need not look for more.
            "ignore_eos": True,
            "logprobs": sampling.logprobs,
            "detokenize": False,
        }
        min_tokens = max(0, sampling.min_tokens - num_given)
        seed = secrets.randbits(62) if sampling.seed is None else sampling.seed
        try:
            if self.info.is_diffusion:
                params = VLLMSamplingParams(**common, extra_args=self._extra_args(request, min_tokens, seed))
            else:
                params = VLLMSamplingParams(
                    **common,
                    min_tokens=min_tokens,
                    temperature=sampling.temperature,
                    top_k=sampling.top_k,
                    top_p=sampling.top_p,
                    seed=generator_seed(seed),
                    min_p=sampling.min_p,
                    logit_bias=dict(sampling.logit_bias) or None,
                    frequency_penalty=sampling.frequency_penalty,
                    presence_penalty=sampling.presence_penalty,
                    repetition_penalty=sampling.repetition_penalty,
                    structured_outputs=structured_outputs,
                )
            core_request = self._llm.input_processor.process_inputs(
                next(self._core_ids), prompt, params, supported_tasks=("generate",)
            )
        except (ValueError, VLLMClientError) as error:
            param = getattr(error, "parameter", None)
            if not param and sampling.grammar is not None:
                param = "grammar"  # all else was checked before
            raise InvalidRequestError(str(error), param=param) from error
        core_request.external_req_id = core_request.request_id
        return core_request

    def _structured_outputs(self, request: GenerationRequest, stop: set[int]) -> Any:
        """The grammar as vLLM takes it. At its end vLLM allows only the tokenizer's EOS: that joins ``stop``."""
        from vllm.sampling_params import StructuredOutputsParams

        if request.sampling.grammar is None:
            return None
        stop.add(self._llm.input_processor.get_tokenizer().eos_token_id)
        return StructuredOutputsParams(grammar=request.sampling.grammar)

    def _extra_args(self, request: GenerationRequest, min_tokens: int, seed: int) -> dict[str, Any]:
        """What vLLM refuses for diffusion models, and what the plugin adds."""
        sampling = request.sampling
        return CanvasParams(
            max_tokens=sampling.max_tokens,
            min_tokens=min_tokens,
            num_resumed=len(request.resume_token_ids),
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            logit_bias=sampling.logit_bias,
            seed=seed,
            diffusion=request.diffusion or DiffusionParams(),
        ).to_extra_args()

    def _die(self, message: str, cause: BaseException | None = None) -> None:
        with self._lock:
            if self._dead is not None or self._closed:
                return
            self._dead = EngineDeadError(message)
            outputs = self._all_failed(self._dead)
        logger.error("%s", message, exc_info=cause)
        if outputs:
            self._stream.put(StepOutput(outputs))
        self._stream.end(self._dead)

    def _all_failed(self, error: BlockserveError) -> list[RequestOutput]:
        """Called with the lock."""
        return [self._failed(live, error) for live in list(self._live.values())]

    def _failed(self, live: _Live, error: BlockserveError) -> RequestOutput:
        return self._ended(
            live, live.output(finish_reason=FinishReason.ERROR, error=error.to_request_error())
        )

    def _ended(self, live: _Live, output: RequestOutput) -> RequestOutput:
        """Called with the lock."""
        del self._live[live.request.request_id], self._by_core_id[live.core_id]
        assert output.finish_reason is not None
        self._stats.num_finished[output.finish_reason.value] += 1
        return output

    def _raise_if_ended(self) -> None:
        if self._dead is not None:
            raise EngineDeadError(self._dead.message)
        if self._closed:
            raise EngineDeadError("the engine was shut down")

    def _wake(self) -> None:
        consumer = self._consumer
        if consumer is not None:
            loop, wakeup = consumer
            # A closed loop has nobody left to serve.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(wakeup.set)


def _refuse_for_vllm(sampling: SamplingParams, num_resumed: int, num_stop: int) -> None:
    """What vLLM's samplers of autoregressive models cannot do. Raises ``InvalidRequestError`` (the field named)."""
    if sampling.min_tokens and num_stop > MAX_STOP_TOKEN_IDS:
        # Its sampler on a GPU has room for no more, and raises in the step of all requests.
        raise InvalidRequestError(
            f"`stop_token_ids`: with `min_tokens` at most {MAX_STOP_TOKEN_IDS} tokens may end a request, the model's "
            f"own among them, got {num_stop}",
            param="stop_token_ids",
        )
    # To vLLM the resumed tokens are the prompt's, which neither grammars nor these penalties look at.
    if num_resumed and (sampling.grammar or sampling.frequency_penalty or sampling.presence_penalty):
        raise UnsupportedParameterError(
            "`resume_token_ids` are not supported together with a grammar, a frequency or a presence penalty",
            param="resume_token_ids",
        )


def _fault(request: GenerationRequest) -> BlockserveError:
    """Why vLLM ended a request with an error."""
    if request.sampling.grammar is not None:
        return InvalidRequestError("`grammar` cannot be followed any further", param="grammar")
    return StepFailedError("vLLM reports a fault in this request's step")


def generator_seed(seed: int) -> int:
    """``seed`` for vLLM's sampler, whose generator takes 32 bits on a CPU: seeds that differ only above them would draw
    alike. Those of 32 bits stay what they are."""
    value = seed & (2**64 - 1)
    return value if value < 2**32 else (value * 0x9E3779B97F4A7C15 >> 32) & (2**32 - 1)


def _logprobs(request: GenerationRequest, output: Any) -> list[TokenLogprob] | None:
    """vLLM's rows are the chosen token, then the best ones; its logprobs are of the plain softmax."""
    wanted = request.sampling.logprobs
    if wanted is None or output.new_logprobs is None:
        return None
    ids, values = output.new_logprobs.logprob_token_ids.tolist(), output.new_logprobs.logprobs.tolist()
    return [
        TokenLogprob(row[0], value[0], tuple(zip(row[1 : wanted + 1], value[1 : wanted + 1], strict=True)))
        for row, value in zip(ids, values, strict=True)
    ]
