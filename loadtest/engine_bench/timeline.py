"""When each token of a run came, and the figures that follow from it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from loadtest.engine_bench.spec import TimedRequest


@dataclass
class Timeline:
    """Times in seconds since the start of the run.

    ``tokens[i]``: new tokens of request i. ``step_ends[s]``, ``step_tokens[s]``: end of step s and the tokens that it
    gave to all requests. ``first[i]``, ``last[i]``: when request i got its first and its last token.
    """

    tokens: list[list[int]]
    step_ends: list[float] = field(default_factory=list)
    step_tokens: list[int] = field(default_factory=list)
    first: list[float | None] = field(default_factory=list)
    last: list[float | None] = field(default_factory=list)
    #: Counters of the engine, where it has them.
    counters: dict[str, int] = field(default_factory=dict)

    @classmethod
    def empty(cls, num_requests: int) -> Timeline:
        return cls([[] for _ in range(num_requests)], first=[None] * num_requests, last=[None] * num_requests)

    def record(self, end_s: float, new_tokens: Mapping[int, Sequence[int]]) -> None:
        """A step that ended at ``end_s`` and gave ``new_tokens[i]`` to request i."""
        self.step_ends.append(end_s)
        self.step_tokens.append(sum(len(new) for new in new_tokens.values()))
        for index, new in new_tokens.items():
            if new:
                self.tokens[index] += new
                if self.first[index] is None:
                    self.first[index] = end_s
                self.last[index] = end_s

    def check_complete(self, requests: Sequence[TimedRequest]) -> None:
        """Raises ``RuntimeError`` when a request did not get exactly the tokens that it asked for."""
        for index, request in enumerate(requests):
            if len(self.tokens[index]) != request.max_tokens:
                raise RuntimeError(
                    f"request {index} got {len(self.tokens[index])} tokens instead of {request.max_tokens}"
                )

    def figures(self, num_prompt_tokens: int) -> dict[str, Any]:
        """What a complete run of requests that arrive together says.

        ``prefill_s``: until every request has its first token. ``decode_tokens_per_s``: tokens that came after that,
        over the time after that. ``step_s``: durations of the steps after it, ``step_median_s`` their median.
        ``tokens_per_s``: all tokens over all time. None where there was nothing to measure.
        """
        prefill_s = max(first for first in self.first if first is not None)
        end_s = self.step_ends[-1]
        later = [step for step, end in enumerate(self.step_ends) if end > prefill_s]
        decoded = sum(self.step_tokens[step] for step in later)
        steps = [self.step_ends[step] - self.step_ends[step - 1] for step in later]
        return {
            "prefill_s": prefill_s,
            "prefill_tokens_per_s": num_prompt_tokens / prefill_s,
            "decode_tokens_per_s": decoded / (end_s - prefill_s) if decoded else None,
            "tokens_per_s": sum(self.step_tokens) / end_s,
            "total_s": end_s,
            "step_median_s": statistics.median(steps) if steps else None,
            "step_s": steps,
            "num_steps": len(self.step_ends),
            **self.counters,
        }


def drive(
    requests: Sequence[TimedRequest],
    submit: Callable[[int, TimedRequest], None],
    step: Callable[[], Mapping[int, Sequence[int]]],
    has_work: Callable[[], bool],
) -> Timeline:
    """Steps an engine in this thread until all requests have ended. A request is submitted between two steps, once its
    arrival time is past."""
    timeline = Timeline.empty(len(requests))
    arriving = sorted(range(len(requests)), key=lambda index: requests[index].arrival_s)
    start = time.perf_counter()
    while arriving or has_work():
        now = time.perf_counter() - start
        while arriving and requests[arriving[0]].arrival_s <= now:
            index = arriving.pop(0)
            submit(index, requests[index])
        if not has_work():
            time.sleep(max(0.0, requests[arriving[0]].arrival_s - now))
            continue
        new_tokens = step()
        timeline.record(time.perf_counter() - start, new_tokens)
    timeline.check_complete(requests)
    return timeline
