"""The flags of ``blockserve bench engine`` and ``bench server``. Heavy imports happen where they are used."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from loadtest.engine_bench.spec import MAX_NUM_BATCHED_TOKENS

AGAINST = ("vllm", "vllm-eager", "transformers")


def add_bench_parser(commands: Any) -> None:
    """Adds ``bench`` to the subcommands of ``blockserve``."""
    bench = commands.add_parser("bench", help="measure how fast this machine serves a model")
    kinds = bench.add_subparsers(dest="kind", required=True)
    engine = kinds.add_parser(
        "engine",
        help="the torch engine in process, next to vLLM and transformers, on the CPU",
        description="Checks tokens on a small checkpoint first; a system whose tokens are wrong gets no figures.",
    )
    add = engine.add_argument
    add(
        "--shape",
        default="qwen3-0.6b",
        metavar="SHAPE",
        help="qwen3-0.6b or llada2-small (random weights), or a checkpoint directory",
    )
    add("--dtype", choices=["auto", "float32", "bfloat16"], default="auto", help="of weights and KV cache")
    add(
        "--concurrency",
        type=_list_of(_count(1, 1024)),
        metavar="N,...",
        help="live requests of each row (1,2,4,8; for block diffusion 1,4,8)",
    )
    add("--prompt-tokens", type=_count(1, 1 << 20), default=128, metavar="N")
    add("--output-tokens", type=_count(2, 1 << 20), default=64, metavar="N")
    add(
        "--against",
        type=_list_of(_one_of(AGAINST)),
        default=(),
        metavar="SYSTEM,...",
        help=f"also measure {', '.join(AGAINST)} (autoregressive shapes only)",
    )
    add("--repeat", type=_count(1, 1000), default=3, metavar="N", help="rounds; medians are printed")
    add("--threads", type=_count(1, 1024), metavar="N", help="of every system (all CPUs of this process)")
    add("--json", type=Path, metavar="FILE", dest="json_file", help="everything that was measured")
    add("--plot", type=Path, metavar="FILE", dest="plot_file", help="a figure, such as bench.png")
    add(
        "--ttft",
        type=_list_of(_count(1, 1 << 20)),
        default=(),
        metavar="N,...",
        help="also time to first token alone for these prompt lengths, and for a long and a short prompt together",
    )
    add(
        "--max-num-batched-tokens",
        type=_count(1, 1 << 20),
        default=MAX_NUM_BATCHED_TOKENS,
        metavar="N",
        help=f"computed in one step, of every system ({MAX_NUM_BATCHED_TOKENS})",
    )
    add("--seed", type=_count(0, 2**31), default=0, metavar="N", help="of the random prompts")
    add(
        "--steps",
        type=_count(1, 1024),
        metavar="N",
        help="block diffusion: denoising steps per block at most (a quarter of the block length)",
    )
    add(
        "--threshold",
        type=_probability,
        metavar="P",
        help="block diffusion: confidence above which a token is decided at once (0.95)",
    )
    engine.set_defaults(run=_run)
    _add_server_parser(kinds)


def _add_server_parser(kinds: Any) -> None:
    server = kinds.add_parser(
        "server",
        help="this server on vLLM over HTTP, next to vLLM's own server, on the CPU",
        description="The same streamed requests to each server in turn; texts must be equal.",
    )
    add = server.add_argument
    add(
        "--model", default="demo://smollm2-135m-instruct", metavar="PATH", help="as `path` in a configuration"
    )
    add("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    add("--concurrency", type=_list_of(_count(1, 1024)), default=(1, 8, 32), metavar="N,...")
    add("--prompt-tokens", type=_count(1, 1 << 20), default=128, metavar="N")
    add("--output-tokens", type=_count(1, 1 << 20), default=64, metavar="N")
    add("--requests", type=_count(1, 1000), default=2, metavar="N", help="of each user, one after the other")
    add("--against", type=_list_of(_one_of(("vllm",))), default=("vllm",), metavar="SYSTEM")
    add("--repeat", type=_count(1, 1000), default=2, metavar="N", help="rounds; medians are printed")
    add("--threads", type=_count(1, 1024), metavar="N", help="of the engine (all CPUs of this process)")
    add("--compile", action="store_true", help="let vLLM compile the model (a minute at the first start)")
    add("--seed", type=_count(0, 2**31), default=0, metavar="N", help="of the random prompts")
    add(
        "--api-key-env",
        metavar="NAME",
        help="the environment variable with an API key that the servers ask for",
    )
    add("--json", type=Path, metavar="FILE", dest="json_file", help="everything that was measured")
    server.set_defaults(run=_run_server)


def _run_server(args: argparse.Namespace) -> int:
    from loadtest.engine_bench.environment import available_cpus
    from loadtest.server_bench.bench import ServerBenchOptions, run_bench
    from loadtest.server_bench.servers import Workload
    from replicas.checkpoints import resolve_checkpoint
    from replicas.errors import ModelLoadError
    from replicas.model_info import load_model_info

    if args.api_key_env and not os.environ.get(args.api_key_env):
        print(f"blockserve: `--api-key-env`: {args.api_key_env} is not set", file=sys.stderr)
        return 1
    try:
        info = load_model_info(resolve_checkpoint(args.model))
        workload = Workload(
            path=str(info.path),
            dtype=args.dtype,
            max_num_seqs=max(args.concurrency),
            max_model_len=min(info.max_model_len, 2048),
            max_num_batched_tokens=2048,
            kv_cache_memory_bytes=1 << 30,
            enforce_eager=not args.compile,
            threads=args.threads or len(available_cpus()),
            api_key_env=args.api_key_env,
        )
        options = ServerBenchOptions(
            workload=workload,
            vocab_size=info.vocab_size,
            concurrency=args.concurrency,
            prompt_tokens=args.prompt_tokens,
            output_tokens=args.output_tokens,
            requests=args.requests,
            repeat=args.repeat,
            against=args.against,
            seed=args.seed,
            json_file=args.json_file,
        )
        return run_bench(options, sys.argv)
    except (ModelLoadError, RuntimeError) as error:
        print(f"blockserve: {error}", file=sys.stderr)
        return 1


def _run(args: argparse.Namespace) -> int:
    from loadtest.engine_bench.bench import BenchOptions, run_bench
    from loadtest.engine_bench.environment import available_cpus
    from loadtest.engine_bench.spec import BenchError

    threads = args.threads or len(available_cpus())
    if threads > len(available_cpus()):
        print(
            f"blockserve: `--threads` must be 1 to {len(available_cpus())} here, got {threads}",
            file=sys.stderr,
        )
        return 1
    given = vars(args)
    options = {name: given[name] for name in BenchOptions.__dataclass_fields__ if name != "threads"}
    # SIGTERM ends like Ctrl-C, so that the running worker is stopped too.
    previous = signal.signal(signal.SIGTERM, _interrupt)
    try:
        return run_bench(BenchOptions(threads=threads, **options), sys.argv)
    except BenchError as error:
        print(f"blockserve: {error}", file=sys.stderr)
        return 1
    finally:
        signal.signal(signal.SIGTERM, previous)


def _interrupt(_signum: int, _frame: Any) -> None:
    raise KeyboardInterrupt


def _count(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"must be {low} to {high}, got {text!r}")
        return int(text)

    return parse


def _one_of(allowed: tuple[str, ...]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in allowed:
            raise argparse.ArgumentTypeError(f"must be {', '.join(allowed)}, got {text!r}")
        return text

    return parse


def _list_of(item: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    """Comma-separated, in the order given, without repetitions."""

    def parse(text: str) -> tuple[Any, ...]:
        return tuple(dict.fromkeys(item(part.strip()) for part in text.split(",")))

    return parse


def _probability(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"must be 0 to 1, got {text!r}")
    return value
