"""Prometheus metrics with vLLM's names and meanings, under ``blockserve:``, and a log line per request."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from deployments.openai.contracts import ModelState
from deployments.openai.errors import ClientGoneError
from deployments.openai.generation import Choice
from replicas.errors import BlockserveError
from replicas.protocol import EngineStats

#: Below Serve's own logger, so that Serve's logging configuration holds for these lines too.
request_logger = logging.getLogger("ray.serve.blockserve.request")

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5)

#: Gauges and counters of replicas: name, help, value of an ``EngineStats``.
_GAUGES = (
    ("num_requests_running", "Requests in the engine's batch.", lambda s: s.running),
    ("num_requests_waiting", "Requests waiting in the engine.", lambda s: s.waiting),
    ("kv_cache_usage_perc", "Used part of the KV memory, 0 to 1.", lambda s: s.kv_usage),
    ("max_running_requests_seen", "Most requests that shared one forward.", lambda s: s.max_running_seen),
    ("queued_tokens", "Tokens still to be computed for live requests.", lambda s: s.queued_tokens),
    (
        "tokens_per_forward",
        "Emitted tokens per denoising row since the start (block diffusion only).",
        lambda s: s.num_decode_tokens / s.num_denoise_row_forwards if s.num_denoise_row_forwards else None,
    ),
)
_COUNTERS = (
    ("engine_steps", "Engine steps.", lambda s: s.steps),
    ("model_forwards", "Model forwards.", lambda s: s.num_forwards),
    ("denoise_row_forwards", "Rows of denoising in all forwards.", lambda s: s.num_denoise_row_forwards),
    ("engine_decode_tokens", "Tokens emitted by the engine.", lambda s: s.num_decode_tokens),
    ("engine_prefill_tokens", "Prompt tokens computed by the engine.", lambda s: s.num_prefill_tokens),
    ("prefix_cache_hit_tokens", "Prompt tokens taken from a cache.", lambda s: s.num_cached_tokens),
)


class IngressMetrics:
    """The metrics of one ingress replica, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "From the request's arrival to its first token.", _SECONDS
        )
        self.inter_token_latency = self._histogram(
            "inter_token_latency_seconds",
            "Between tokens of a choice after the first ones; the tokens of one step share its time evenly.",
            _TOKEN_SECONDS,
        )
        self.e2e_request_latency = self._histogram(
            "e2e_request_latency_seconds", "From the request's arrival to its end.", _SECONDS
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests.")
        self.generation_tokens = self._counter("generation_tokens", "Tokens that clients were given.")
        self.request_success = self._counter(
            "request_success", "Choices that finished.", "model_name", "finished_reason"
        )
        self.request_failure = self._counter("request_failure", "Requests that failed.", "model_name", "code")

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"blockserve:{name}", text, ["model_name"], buckets=buckets, registry=self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"blockserve:{name}", text, labels or ("model_name",), registry=self.registry)

    def render(self, states: Mapping[str, ModelState]) -> bytes:
        """The text format: this ingress's own metrics, then those of the replicas in ``states``."""
        engines = CollectorRegistry(auto_describe=False)
        engines.register(_EngineCollector(states))
        return generate_latest(self.registry) + generate_latest(engines)


class _EngineCollector:
    def __init__(self, states: Mapping[str, ModelState]) -> None:
        self._stats: list[tuple[list[str], EngineStats]] = [
            ([model, replica], stats)
            for model, state in states.items()
            for replica, stats in state.replicas.items()
        ]

    def collect(self) -> Iterator[Metric]:
        for name, text, value in _GAUGES:
            gauge = GaugeMetricFamily(f"blockserve:{name}", text, labels=["model_name", "replica"])
            for labels, stats in self._stats:
                if (number := value(stats)) is not None:
                    gauge.add_metric(labels, number)
            yield gauge
        for name, text, value in _COUNTERS:
            counter = CounterMetricFamily(f"blockserve:{name}", text, labels=["model_name", "replica"])
            for labels, stats in self._stats:
                counter.add_metric(labels, value(stats))
            yield counter


class RequestRecord:
    """Times one request, and reports it once, at its end: into the metrics and as a JSON log line that never
    holds a prompt or an answer. Use as a context manager round the request's whole life. ``arrival`` is a
    ``time.monotonic()`` value in seconds."""

    def __init__(
        self,
        metrics: IngressMetrics,
        request_id: str,
        model: str,
        num_prompt_tokens: int,
        *,
        arrival: float,
        stream: bool,
    ) -> None:
        self._metrics = metrics
        self._request_id = request_id
        self._model = model
        self._num_prompt_tokens = num_prompt_tokens
        self._stream = stream
        self._start = arrival
        self._first: float | None = None
        self._last: dict[int, float] = {}
        self._error: BaseException | None = None
        self.choices: list[Choice] = []

    def on_tokens(self, index: int, num_tokens: int) -> None:
        if not num_tokens:
            return
        now = time.monotonic()
        if self._first is None:
            self._first = now
            self._metrics.time_to_first_token.labels(self._model).observe(now - self._start)
        if index in self._last:
            histogram = self._metrics.inter_token_latency.labels(self._model)
            for _ in range(num_tokens):
                histogram.observe((now - self._last[index]) / num_tokens)
        self._last[index] = now

    def on_error(self, error: BaseException) -> None:
        self._error = error

    def __enter__(self) -> RequestRecord:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        error = error or self._error
        reasons = [choice.finish_reason for choice in self.choices]
        finished = bool(reasons) and all(reasons)
        seconds = time.monotonic() - self._start
        num_tokens = sum(choice.num_tokens for choice in self.choices)
        metrics, model = self._metrics, self._model
        metrics.prompt_tokens.labels(model).inc(self._num_prompt_tokens)
        metrics.generation_tokens.labels(model).inc(num_tokens)
        metrics.e2e_request_latency.labels(model).observe(seconds)
        for reason in reasons:
            if reason is not None:
                metrics.request_success.labels(model, reason).inc()
        code = None
        if not finished:
            code = error.code if isinstance(error, BlockserveError) else "internal_error"
            # A stream that is closed, or cancelled, before its end has lost its client.
            if error is None or isinstance(error, ClientGoneError) or not isinstance(error, Exception):
                code = "client_gone"
            metrics.request_failure.labels(model, code).inc()
        line: dict[str, Any] = {
            "event": "request_finished",
            "request_id": self._request_id,
            "model": model,
            "stream": self._stream,
            "prompt_tokens": self._num_prompt_tokens,
            "completion_tokens": num_tokens,
            "num_forwards": sum(choice.num_forwards for choice in self.choices),
            "ttft_s": None if self._first is None else round(self._first - self._start, 4),
            "e2e_s": round(seconds, 4),
            "finish_reason": ",".join(sorted({reason for reason in reasons if reason})) if finished else None,
            "error": code,
        }
        request_logger.info(json.dumps(line))
