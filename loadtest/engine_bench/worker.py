"""One measurement in a process of its own: a ``WorkerSpec`` as JSON on stdin, one line of JSON on stdout.

`python -m loadtest.engine_bench.worker`; whatever else is printed goes to stderr.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import sys
import time
import traceback
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from loadtest.engine_bench import systems
from loadtest.engine_bench.spec import (
    MIXED_DELAY_S,
    MIXED_LONG_PROMPT,
    MIXED_OUTPUT,
    MIXED_SHORT_PROMPT,
    TimedRequest,
    WorkerSpec,
    random_prompts,
)
from replicas.model_info import load_model_info

#: Pairs of runs (many slots, one slot) in a round.
SLOT_PAIRS = 4
SLOT_OUTPUT_TOKENS = 32


class Prompts:
    """Requests of a worker: equal prompts for equal keys, whatever the system."""

    def __init__(self, spec: WorkerSpec) -> None:
        info = load_model_info(spec.checkpoint)
        self.spec = spec
        self.is_diffusion = info.is_diffusion
        self.block_length = info.block_length
        self._vocab_size = info.vocab_size
        self._excluded = [] if info.mask_token_id is None else [info.mask_token_id]

    def requests(self, key: str, count: int, prompt_tokens: int, max_tokens: int) -> list[TimedRequest]:
        prompts = random_prompts(self.spec.seed, key, count, prompt_tokens, self._vocab_size, self._excluded)
        return [TimedRequest(prompt, max_tokens) for prompt in prompts]


def run_task(spec: WorkerSpec) -> dict[str, Any]:
    """Loads the system and does ``spec.task``; adds load time and memory to what it measured."""
    load_average = os.getloadavg()
    prompts = Prompts(spec)
    start = time.perf_counter()
    system = systems.load_system(spec)
    load_s = time.perf_counter() - start
    result = _TASKS[spec.task](system, prompts)
    return result | {"load_s": load_s, "peak_rss_bytes": peak_rss_bytes(), "load_average": load_average}


def _check(system: systems.System, prompts: Prompts) -> dict[str, Any]:
    """Tokens of each request alone and in each batch; to be compared by the caller."""
    spec = system.spec
    requests = prompts.requests("check", max(spec.concurrency), spec.prompt_tokens, spec.output_tokens)
    return {
        "solo": [
            system.run([request], 1 if prompts.is_diffusion else None).tokens[0] for request in requests
        ],
        "batched": {str(n): system.run(requests[:n], _slots(prompts, n)).tokens for n in spec.concurrency},
    }


def _throughput(system: systems.System, prompts: Prompts) -> dict[str, Any]:
    spec = system.spec
    runs = []
    for n in spec.concurrency:
        warm_up = min(spec.output_tokens, prompts.block_length or 4)
        for key, max_tokens in (("warm-up", warm_up), ("timed", spec.output_tokens)):
            requests = prompts.requests(f"{key}/{spec.round}/{n}", n, spec.prompt_tokens, max_tokens)
            timeline = system.run(requests, _slots(prompts, n))
        runs.append({"concurrency": n} | timeline.figures(n * spec.prompt_tokens))
    return {"runs": runs}


def _slots(prompts: Prompts, concurrency: int) -> int | None:
    # A row of block diffusion is an engine with as many slots as requests.
    return concurrency if prompts.is_diffusion else None


def _compare_slots(system: systems.System, prompts: Prompts) -> dict[str, Any]:
    """The same request alone on an engine with all slots and on one with a single slot, in turn."""
    spec = system.spec
    output_tokens = min(spec.output_tokens, SLOT_OUTPUT_TOKENS)
    pairs = []
    for pair in range(-1, SLOT_PAIRS):  # the first one warms up
        requests = prompts.requests(f"slots/{spec.round}/{pair}", 1, spec.prompt_tokens, output_tokens)
        order = (spec.max_num_seqs, 1) if pair % 2 == 0 else (1, spec.max_num_seqs)
        timelines = {num_slots: system.run(requests, num_slots) for num_slots in order}
        many, one = timelines[spec.max_num_seqs], timelines[1]
        if many.tokens != one.tokens and spec.dtype == "float32":
            raise RuntimeError(f"one request's tokens on {spec.max_num_seqs} slots and on 1 differ")
        if pair >= 0:
            pairs.append(
                {
                    "many_step_s": _step_median(many.step_ends),
                    "one_step_s": _step_median(one.step_ends),
                    "many_total_s": many.step_ends[-1],
                    "one_total_s": one.step_ends[-1],
                }
            )
    return {"slots": spec.max_num_seqs, "pairs": pairs}


def _step_median(step_ends: list[float]) -> float:
    """Of all steps but the first, which holds the prompt."""
    return statistics.median([b - a for a, b in pairwise(step_ends)] or step_ends)


def _ttft(system: systems.System, prompts: Prompts) -> dict[str, Any]:
    spec = system.spec
    rows = []
    for length in spec.ttft:
        for key in ("warm-up", "timed"):
            requests = prompts.requests(f"ttft-{key}/{spec.round}/{length}", 1, length, 1)
            timeline = system.run(requests)
        rows.append({"prompt_tokens": length, "ttft_s": timeline.first[0]})
    long = prompts.requests(f"mixed-long/{spec.round}", 1, MIXED_LONG_PROMPT, MIXED_OUTPUT)[0]
    short = prompts.requests(f"mixed-short/{spec.round}", 1, MIXED_SHORT_PROMPT, MIXED_OUTPUT)[0]
    system.run(prompts.requests("mixed-warm-up", 1, MIXED_SHORT_PROMPT, MIXED_OUTPUT))
    timeline = system.run([long, replace(short, arrival_s=MIXED_DELAY_S)])
    mixed = {}
    for index, (name, arrival) in enumerate((("long", 0.0), ("short", MIXED_DELAY_S))):
        first, last = timeline.first[index], timeline.last[index]
        assert first is not None
        mixed[name] = {"arrival_s": arrival, "ttft_s": first - arrival, "end_s": last}
    return {"ttft": rows, "mixed": mixed}


_TASKS = {"check": _check, "throughput": _throughput, "slots": _compare_slots, "ttft": _ttft}


def peak_rss_bytes() -> int:
    """Peak resident memory of this process since its start."""
    try:
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def spec_from_json(text: str) -> WorkerSpec:
    data: dict[str, Any] = json.loads(text)
    fields: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in data.items()}
    return WorkerSpec(**fields)


def main() -> int:
    # Libraries print to stdout; the result must stand alone there.
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    try:
        result = run_task(spec_from_json(sys.stdin.read()))
    except Exception as error:
        traceback.print_exc()
        result = {"error": first_line(error)}
    answer.write(json.dumps(result) + "\n")
    answer.flush()
    return 0


def first_line(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__


if __name__ == "__main__":
    sys.stdout.flush()
    status = main()
    sys.stderr.flush()
    # Without the teardown of frameworks and their threads: the result is out.
    os._exit(status)
