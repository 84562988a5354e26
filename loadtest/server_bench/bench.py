"""Rounds of the same streamed requests against each server in turn, and their ratios."""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from loadtest.engine_bench.environment import describe_environment
from loadtest.engine_bench.report import table
from loadtest.server_bench.servers import Server, Workload, serve


@dataclass(frozen=True)
class ServerBenchOptions:
    """Flags of ``blockserve bench server``. ``requests``: of each row, for each of its concurrent users."""

    workload: Workload
    vocab_size: int
    concurrency: tuple[int, ...]
    prompt_tokens: int
    output_tokens: int
    requests: int
    repeat: int
    against: tuple[str, ...]
    seed: int
    json_file: Path | None


def run_bench(options: ServerBenchOptions, command: list[str]) -> int:
    """Prints a table; returns 1 when the servers' greedy texts differ (their figures are void). Raises ``RuntimeError``
    for a server that fails."""
    systems = ("blockserve", *options.against)
    runs: list[dict[str, Any]] = []
    for round_index in range(options.repeat):
        # Each round begins with another server, so that a drift of the machine meets all of them.
        for name in systems[round_index % len(systems) :] + systems[: round_index % len(systems)]:
            with serve(name, options.workload) as server:
                _drive(server, options, 1, warm_up=True)
                for concurrency in options.concurrency:
                    runs.append({"round": round_index, "system": name} | _drive(server, options, concurrency))
                    print(f"round {round_index + 1}: {_line(runs[-1])}", file=sys.stderr, flush=True)
    void = _void(runs)
    report = {
        "environment": describe_environment(options.workload.threads, command),
        "workload": asdict(options.workload),
        "prompt_tokens": options.prompt_tokens,
        "output_tokens": options.output_tokens,
        "void": void,
        "rows": _summary(runs, options, systems),
        "runs": [{key: value for key, value in run.items() if key != "texts"} for run in runs],
    }
    print(_render(report, systems))
    if options.json_file is not None:
        options.json_file.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if void else 0


def _drive(
    server: Server, options: ServerBenchOptions, concurrency: int, *, warm_up: bool = False
) -> dict[str, Any]:
    # The same prompts for each server and round, others for each row: nothing is found in a prefix cache.
    rng = random.Random(f"{options.seed} {concurrency} {warm_up}")
    count = 2 if warm_up else concurrency * options.requests
    bodies = [
        {
            "model": server.model,
            "prompt": [rng.randrange(1000, options.vocab_size - 1000) for _ in range(options.prompt_tokens)],
            "max_tokens": options.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        for _ in range(count)
    ]
    before = server.front_end_cpu_s(), server.other_cpu_s()
    job = {
        "url": server.url,
        "bodies": bodies,
        "concurrency": concurrency,
        "api_key_env": options.workload.api_key_env,
    }
    done = subprocess.run(
        [sys.executable, "-P", "-m", "loadtest.server_bench.client"],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        check=False,
        env=None,
        cwd=Path(__file__).resolve().parents[2],
    )
    if done.returncode:
        raise RuntimeError(f"{server.name}: {done.stderr.strip().splitlines()[-1]}")
    result = json.loads(done.stdout)
    front, other = server.front_end_cpu_s() - before[0], server.other_cpu_s() - before[1]
    tokens = sum(request["tokens"] for request in result["requests"])
    ttfts = sorted(request["ttft_s"] for request in result["requests"])
    return {
        "concurrency": concurrency,
        "tokens": tokens,
        "tokens_per_s": tokens / result["wall_s"],
        "ttft_p50_s": statistics.median(ttfts),
        "ttft_max_s": ttfts[-1],
        "front_cpu_ms_per_token": 1000 * front / tokens,
        "other_cpu_ms_per_token": 1000 * other / tokens,
        "texts": [request["text"] for request in result["requests"]],
    }


def _void(runs: list[dict[str, Any]]) -> list[str]:
    """Rows in which not all servers gave the same texts. Only float32 is exact enough to ask that."""
    texts: dict[int, list[str]] = {}
    return [
        f"{run['system']} at {run['concurrency']}: other texts"
        for run in runs
        if texts.setdefault(run["concurrency"], run["texts"]) != run["texts"]
    ]


def _summary(
    runs: list[dict[str, Any]], options: ServerBenchOptions, systems: tuple[str, ...]
) -> list[dict[str, Any]]:
    rows = []
    for concurrency in options.concurrency:
        medians: dict[str, dict[str, float]] = {}
        for name in systems:
            found = [run for run in runs if run["system"] == name and run["concurrency"] == concurrency]
            medians[name] = {
                key: statistics.median(run[key] for run in found)
                for key in ("tokens_per_s", "ttft_p50_s", "front_cpu_ms_per_token", "other_cpu_ms_per_token")
            }
        ratios = {
            name: {
                key: medians["blockserve"][key] / medians[name][key] for key in ("tokens_per_s", "ttft_p50_s")
            }
            for name in options.against
        }
        rows.append({"concurrency": concurrency, "medians": medians, "ratios": ratios})
    return rows


def _render(report: dict[str, Any], systems: tuple[str, ...]) -> str:
    header = [
        "server",
        "users",
        "tok/s",
        "x vllm",
        "TTFT p50 ms",
        "x vllm",
        "front end CPU ms/token",
        "Ray's own",
    ]
    rows = []
    for row in report["rows"]:
        for name in systems:
            values = row["medians"][name]
            ratio = row["ratios"].get("vllm") if name == "blockserve" else None
            rows.append(
                [
                    name,
                    str(row["concurrency"]),
                    f"{values['tokens_per_s']:.1f}",
                    f"{ratio['tokens_per_s']:.2f}" if ratio else "-",
                    f"{1000 * values['ttft_p50_s']:.0f}",
                    f"{ratio['ttft_p50_s']:.2f}" if ratio else "-",
                    f"{values['front_cpu_ms_per_token']:.3f}",
                    f"{values['other_cpu_ms_per_token']:.3f}",
                ]
            )
    lines = [table(header, rows)]
    lines += [f"VOID: {reason}" for reason in report["void"]]
    return "\n".join(lines)


def _line(run: dict[str, Any]) -> str:
    return (
        f"{run['system']} at {run['concurrency']}: {run['tokens_per_s']:.1f} tok/s, "
        f"TTFT p50 {1000 * run['ttft_p50_s']:.0f} ms, {run['front_cpu_ms_per_token']:.3f} ms of CPU per token"
    )
