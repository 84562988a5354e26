"""Chat users with verified answers, streaming or not.

    locust -f loadtest/locustfile.py --host http://127.0.0.1:8000 --headless -u 8 -r 4 -t 30s

Before the load, each prompt is asked once, alone, at temperature 0; an answer under load that differs from
that one is wrong. A wrong answer is a failure, and Locust then exits with status 1. For prompts that have one right
answer the share of right ones is reported too: it says how good the model is, not the server.

Entries in the statistics, measured at the client: ``TTFT``, ``TPOT``, ``block latency``, ``E2E`` (ms) and ``tokens per
chunk`` (a number, though the column says ms). Locust's own entry for the POST ends at the headers of a stream.
"""

from __future__ import annotations

import csv
import itertools
import os
import time
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import requests
from locust import HttpUser, constant, events, task
from locust.env import Environment
from locust.runners import MasterRunner

from loadtest.measure import Measurement, measure
from loadtest.prompts import Prompt, mt_bench_prompts, word_prompts

WORDS_MODEL = "llada2-words"
#: Entries of the statistics, and the measurements that they show.
ENTRIES = {
    "TTFT": "ttft_ms",
    "TPOT": "tpot_ms",
    "block latency": "block_latency_ms",
    "tokens per chunk": "tokens_per_chunk",
}
COLUMNS = ["model", *ENTRIES.values(), "e2e_ms", "completion_tokens", "chunks", "problem"]


class Run:
    """What one test run knows: models, prompts, the answers given alone, and a row for each request."""

    def __init__(self, environment: Environment) -> None:
        options: Any = environment.parsed_options
        self.host = environment.host
        self.max_tokens: int = options.max_tokens
        self.stream: bool = not options.no_stream
        self.rows_file: str = options.rows_csv
        self.headers = _authorization(options.api_key_env)
        listed = requests.get(f"{self.host}/v1/models", headers=self.headers, timeout=30)
        if listed.status_code != 200:
            raise SystemExit(f"{self.host}/v1/models: HTTP {listed.status_code}: {listed.text[:200]}")
        available = [m["id"] for m in listed.json()["data"]]
        unknown = [name for name in options.model or [] if name not in available]
        if unknown or not available:
            raise SystemExit(f"--model {unknown}: the server has {available}")
        self.models: list[str] = options.model or available
        self.rows: list[dict[str, Any]] = []
        self.verified = self.wrong = 0
        self.user_numbers = itertools.count()
        self.questions: list[tuple[str, Prompt, str]] = []
        for model in self.models:
            make = word_prompts if model == WORDS_MODEL else mt_bench_prompts
            for prompt in make(options.prompts):
                self.questions.append((model, prompt, self._ask_alone(model, prompt)))

    def body(self, model: str, prompt: Prompt) -> dict[str, Any]:
        body = {
            "model": model,
            "messages": [{"role": "user", "content": prompt.text}],
            "temperature": 0,
            "max_tokens": self.max_tokens,
        }
        if self.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return body

    def _ask_alone(self, model: str, prompt: Prompt) -> str:
        started = time.perf_counter()
        url = f"{self.host}/v1/chat/completions"
        with requests.post(
            url, json=self.body(model, prompt), headers=self.headers, stream=True, timeout=600
        ) as response:
            response.raise_for_status()
            result = measure(response, self.stream, started)
        if result.error:
            raise SystemExit(f"{model}: the server fails without any load: {result.error}")
        return result.text

    def record(self, model: str, result: Measurement, problem: Exception | None) -> None:
        values = {column: getattr(result, column, None) for column in COLUMNS}
        self.rows.append(values | {"model": model, "problem": problem})

    def close(self) -> None:
        if self.rows_file:
            with Path(self.rows_file).open("w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, COLUMNS)
                writer.writeheader()
                writer.writerows(self.rows)
        print(f"verified answers: {self.verified}, wrong answers: {self.wrong}")
        known = [
            (prompt.expected, alone) for _, prompt, alone in self.questions if prompt.expected is not None
        ]
        if known:
            right = sum(expected == alone.strip() for expected, alone in known)
            print(f"right answers to prompts that have one: {right} of {len(known)}")


def _authorization(name: str) -> dict[str, str]:
    if not name:
        return {}
    if not os.environ.get(name):
        raise SystemExit(f"--api-key-env: the environment variable {name} is not set")
    return {"authorization": f"Bearer {os.environ[name]}"}


#: The run of this process; Locust's event handlers have no other place to share it with its users.
_runs: dict[str, Run] = {}


@events.init_command_line_parser.add_listener
def _arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--model", action="append", help="a model to load; all of the server's when absent")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--prompts", type=int, default=8, help="different prompts for each model")
    parser.add_argument("--rows-csv", default="", help="a file for one row per request")
    # The key itself would stand in the list of processes and in Locust's web interface.
    parser.add_argument(
        "--api-key-env", default="", help="the environment variable with the server's API key"
    )
    parser.add_argument("--no-stream", action="store_true", help="whole answers; only E2E is measured")


@events.init.add_listener
def _init(environment: Environment, **_: Any) -> None:
    # Locust's --run-time counts from before test_start: the questions asked alone must not eat it up. With
    # the web interface the host is known at test_start only, and with --master no user runs here.
    options: Any = environment.parsed_options
    if options.headless and not isinstance(environment.runner, MasterRunner):
        _runs["run"] = Run(environment)


@events.test_start.add_listener
def _start(environment: Environment, **_: Any) -> None:
    if "run" not in _runs and not isinstance(environment.runner, MasterRunner):
        _runs["run"] = Run(environment)


@events.quitting.add_listener
def _quit(environment: Environment, **_: Any) -> None:
    run = _runs.pop("run", None)
    if isinstance(environment.runner, MasterRunner):
        return
    if run is None or run.wrong or not run.verified:
        environment.process_exit_code = 1
    if run is not None:
        run.close()


class ChatUser(HttpUser):
    """Asks one question after another, each as soon as the last answer has ended."""

    wait_time = constant(0)

    def on_start(self) -> None:
        self.run = _runs["run"]
        self.client.headers.update(self.run.headers)
        self.index = next(self.run.user_numbers)  # so that users ask different things at once

    @task
    def chat(self) -> None:
        model, prompt, alone = self.run.questions[self.index % len(self.run.questions)]
        self.index += 1
        started = time.perf_counter()
        with self.client.post(
            "/v1/chat/completions", json=self.run.body(model, prompt), stream=True, catch_response=True
        ) as response:
            if response.status_code != 200:
                text = f"HTTP {response.status_code}: {response.text[:200]}"
                response.failure(text)
                self.run.record(model, Measurement(), RuntimeError(text))
                return
            result = measure(response, self.run.stream, started)
        self._report(model, prompt, alone, result)

    def _report(self, model: str, prompt: Prompt, alone: str, result: Measurement) -> None:
        problem: Exception | None = None
        if result.error:
            problem = RuntimeError(result.error)
        elif result.text != alone:
            self.run.wrong += 1
            problem = ValueError(f"wrong answer to {prompt.text[:40]!r}: {result.text!r}, alone {alone!r}")
        else:
            self.run.verified += 1
        self.run.record(model, result, problem)
        self._fire("E2E", model, result.e2e_ms, problem)
        if problem is None:
            for entry, column in ENTRIES.items():
                self._fire(entry, model, getattr(result, column))

    def _fire(self, kind: str, model: str, value: float | None, problem: Exception | None = None) -> None:
        if value is not None:
            self.environment.events.request.fire(
                request_type=kind,
                name=model,
                response_time=value,
                response_length=0,
                exception=problem,
                context={},
            )
