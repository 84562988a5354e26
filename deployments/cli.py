"""The ``blockserve`` command: ``serve``, ``check``, ``verify``, ``bench``. Heavy imports happen where they are used."""

from __future__ import annotations

import argparse
import ipaddress
import math
import os
import secrets
import signal
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deployments.cli_bench import add_bench_parser

if TYPE_CHECKING:
    from ray.serve.schema import ServeDeploySchema

    from configs.schema import BlockserveConfig

POLL_INTERVAL_S = 0.5
#: A busy machine may need longer for a cluster's start than Ray waits.
RAY_START_ATTEMPTS = 2
#: Beyond the replicas' own drain time, in seconds.
DRAIN_MARGIN_S = 10.0
#: Settings of a local cluster's processes; what stands in the environment wins.
SERVE_ENV = {
    # The default of 5 s replaces a proxy that is merely slow to start, on a busy laptop over and over.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    # A streamed chunk costs the proxy and the ingress half as much as through Ray's object references.
    "RAY_SERVE_PROXY_USE_GRPC": "1",
    # One event loop in each actor: its own code never blocks it, and every hop between threads costs.
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    # Ten rounds a second take CPU from an engine on the same cores.
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.25",
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "deployments.proxy_guard:middlewares",
}
#: Of Ray's own processes, so it must be there when they start. By default actors run at niceness 15, and so would an
#: engine on a CPU: whatever else the machine does, the client too, would come first.
RAY_ENV = {"RAY_worker_niceness": "0"}
RAY_TOKEN_ENV = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


class CliError(Exception):
    """Ends the command with one line and status 1."""


class _Stop(BaseException):
    """SIGTERM or Ctrl-C."""


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        return args.run(args)
    except CliError as error:
        print(f"blockserve: {error}", file=sys.stderr)
        return 1
    except (_Stop, KeyboardInterrupt):
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="blockserve", description="Serves LLaDA2 and Qwen models on Ray Serve."
    )
    commands = parser.add_subparsers(dest="command", required=True)

    serve = commands.add_parser("serve", help="serve the models of a configuration file, in the foreground")
    serve.add_argument(
        "file", type=Path, metavar="FILE", help="a Serve YAML file, such as configs/local.yaml"
    )
    serve.add_argument("--port", type=_port, help="instead of the file's http_options.port")
    serve.add_argument("--host", help="instead of the file's http_options.host")
    serve.add_argument(
        "--address", help="a running Ray cluster (`auto` or host:port); default: start one here"
    )
    serve.set_defaults(run=_serve)

    check = commands.add_parser("check", help="validate a configuration file strictly")
    check.add_argument("file", type=Path, metavar="FILE")
    check.set_defaults(run=_check)

    verify = commands.add_parser("verify", help="compare an engine with reference data, token by token")
    verify.add_argument("dirs", type=Path, nargs="+", metavar="DIR", help="directories of reference data")
    verify.add_argument("--engine", choices=["torch", "vllm"], default="torch")
    verify.add_argument("--concurrent", type=int, default=1, metavar="N", help="cases in flight at once")
    verify.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    verify.add_argument(
        "--tensor-parallel-size", type=int, default=1, metavar="N", help="ranks that share the model"
    )
    verify.set_defaults(run=_verify)

    add_bench_parser(commands)
    return parser


def _check(args: argparse.Namespace) -> int:
    from deployments.check import check_file

    problems = check_file(args.file)
    for problem in problems:
        print(problem)
    if not problems:
        print(f"{args.file}: ok")
    return 1 if problems else 0


def _verify(args: argparse.Namespace) -> int:
    from replicas.verify import run_verify

    return run_verify(
        args.dirs,
        engine=args.engine,
        concurrent=args.concurrent,
        dtype=args.dtype,
        tensor_parallel_size=args.tensor_parallel_size,
    )


def _serve(args: argparse.Namespace) -> int:
    schema, configs = load_config(args.file)
    host = args.host or schema.http_options.host or "127.0.0.1"
    port = args.port or schema.http_options.port
    schema = schema.model_copy(
        update={"http_options": schema.http_options.model_copy(update={"host": host, "port": port})}
    )
    if args.address is None:
        _check_port(host, port)
        _check_api_keys(configs, host)
    _resolve_models(configs)

    import ray
    from ray import serve

    _start_ray(args.address, configs)
    _raise_on_signals()
    at_once = False
    try:
        _deploy(_start_serve(schema), schema, configs, f"http://{_client_host(host)}:{port}")
        while True:
            signal.pause()
    except (_Stop, KeyboardInterrupt):
        print("Draining; once more to stop at once.", file=sys.stderr, flush=True)
        at_once = True  # if there is another signal
        _drain(schema, configs)
        at_once = False
        return 0
    finally:
        if args.address is None and not at_once:  # it waits for what is being drained
            serve.shutdown()
        ray.shutdown()


def load_config(path: Path) -> tuple[ServeDeploySchema, dict[str, BlockserveConfig]]:
    """A Serve YAML file and, by application name, the configurations of the applications that are ours.

    Raises ``CliError`` with every problem of the file.
    """
    from ray.serve.schema import ServeDeploySchema

    from configs.loader import APP_IMPORT_PATH, ConfigError, load_file
    from deployments.check import check_file

    problems = check_file(path)
    if problems:
        raise CliError("; ".join(problems))
    try:
        loaded = load_file(path)
    except ConfigError as error:
        raise CliError(f"{path}: {error}") from error
    if not loaded.applications:
        raise CliError(f"{path}: no application with `import_path: {APP_IMPORT_PATH}`")
    return ServeDeploySchema.model_validate(loaded.raw), loaded.applications


def needed_cpus(configs: dict[str, BlockserveConfig]) -> int:
    """Ray's logical CPUs with which every replica, autoscaled ones too, can be placed."""
    total = 0.0
    for config in configs.values():
        total += config.ingress.num_replicas * config.ingress.num_cpus
        total += sum(
            m.autoscaling.max_replicas * m.engine.tensor_parallel_size * m.resources.num_cpus
            for m in config.models
        )
    return math.ceil(total)


def _port(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"must be 1 to 65535, got {text!r}")
    return int(text)


def _check_port(host: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise CliError(
                f"cannot listen on {host}:{port} ({error.strerror}); --host and --port choose another address"
            ) from error


def _check_api_keys(configs: dict[str, BlockserveConfig], host: str) -> None:
    """Of a local cluster, whose ingress sees what this process sees: named before anything starts."""
    from deployments.openai.api_keys import ApiKeysError, load_api_keys

    for config in configs.values():
        try:
            keys = load_api_keys(config.security)
        except ApiKeysError as error:
            raise CliError(str(error)) from error
        if keys is None and not _is_loopback(host):
            print(
                f"blockserve: {host} is reachable from other machines, and no API keys are configured "
                "(`security.api_keys_env`, `security.api_keys_file`)",
                file=sys.stderr,
            )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _resolve_models(configs: dict[str, BlockserveConfig]) -> None:
    """Downloads and converts what is not here yet, with progress bars, before any replica starts."""
    from replicas.checkpoints import resolve_checkpoint
    from replicas.errors import ModelLoadError

    for config in configs.values():
        for model in config.models:
            try:
                resolve_checkpoint(model.path)
            except ModelLoadError as error:
                raise CliError(f"model `{model.name}`: {error}") from error


def _start_ray(address: str | None, configs: dict[str, BlockserveConfig]) -> None:
    import ray

    if address is not None:
        arguments: dict[str, Any] = {"address": address}
    else:
        for name, value in RAY_ENV.items():
            os.environ.setdefault(name, value)
        arguments = {
            "address": "local",
            # Logical CPUs: a laptop with two cores runs three replicas, only slower.
            "num_cpus": max(os.cpu_count() or 1, needed_cpus(configs)),
            "include_dashboard": False,
            "_node_ip_address": "127.0.0.1",
            "runtime_env": {
                "env_vars": {name: os.environ.get(name, value) for name, value in SERVE_ENV.items()}
            },
        }
        _choose_ray_token()
        _keep_loopback()
    for attempt in range(1, RAY_START_ATTEMPTS + 1):
        try:
            ray.init(log_to_driver=False, **arguments)
            return
        except Exception as error:  # Ray raises bare Exceptions here
            ray.shutdown()
            if attempt == RAY_START_ATTEMPTS or address is not None:
                reason = " ".join(str(error).split())
                raise CliError(
                    f"Ray did not start; on a busy machine another try may do. {reason}"
                ) from error


def _choose_ray_token() -> None:
    """Gives the new cluster a token of its own, in the environment of this process and its children only.

    Ray turns token authentication on for a cluster that ``ray.init`` starts, but with ``~/.ray/auth_token``, which all
    clusters of a user share. Whoever sets Ray's variables chooses otherwise.
    """
    if not any(os.environ.get(name) for name in RAY_TOKEN_ENV):
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def _keep_loopback() -> None:
    """Ray replaces 127.0.0.1 as a node's address by that of a network card, and then listens on all of them. With the
    loopback address left as it is, everything of the cluster listens there only."""
    from ray._private import services

    services.resolve_ip_for_localhost = lambda host: host


def _raise_on_signals() -> None:
    # After ray.init, which installs handlers of its own.
    def stop(_signum: int, _frame: Any) -> None:
        raise _Stop

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)


def _start_serve(schema: ServeDeploySchema) -> Any:
    """Serve's client, started as ``serve run FILE`` does. Raises ``CliError`` when Serve runs already and listens on
    another port, which it does not change."""
    from ray.serve._private.api import serve_start

    client = serve_start(
        http_options=schema.http_options.model_dump(),
        grpc_options=schema.grpc_options.model_dump(),
        controller_options=schema.controller_options,
        proxy_location=schema.proxy_location,
    )
    port = client.http_config.port
    if port != schema.http_options.port:
        raise CliError(
            f"Serve runs on this cluster already, on port {port}: port {schema.http_options.port} is not to be had"
        )
    return client


def _deploy(client: Any, schema: ServeDeploySchema, configs: dict[str, BlockserveConfig], url: str) -> None:
    """Raises ``CliError`` when an application fails to start; then none of them is left."""
    from ray import serve

    client.deploy_apps(schema, _blocking=False)
    try:
        _wait_until_ready(schema, configs, url)
    except CliError:
        for app in schema.applications:
            serve.delete(app.name, _blocking=False)
        raise


def _wait_until_ready(schema: ServeDeploySchema, configs: dict[str, BlockserveConfig], url: str) -> None:
    from ray import serve
    from ray.serve.schema import ApplicationStatus

    names = [model.name for config in configs.values() for model in config.models]
    print(f"Loading {', '.join(names)} ...", file=sys.stderr, flush=True)
    while True:
        applications = serve.status().applications
        statuses = [applications[name].status for name in configs if name in applications]
        for name in configs:
            overview = applications.get(name)
            if overview is not None and overview.status == ApplicationStatus.DEPLOY_FAILED:
                raise CliError(f"application `{name}` failed to start: {_failure(overview)}")
        if len(statuses) == len(configs) and set(statuses) == {ApplicationStatus.RUNNING}:
            prefixes = [app.route_prefix or "/" for app in schema.applications if app.name in configs]
            if all(_answers(url + prefix.rstrip("/") + "/ready") for prefix in prefixes):
                break
        time.sleep(POLL_INTERVAL_S)
    print(f"Blockserve is ready at {url}/v1 (models: {', '.join(names)})", flush=True)


def _failure(overview: Any) -> str:
    reasons = [*(status.message for status in overview.deployments.values()), overview.message]
    # Messages carry whole tracebacks; the last line of one is the error itself.
    lines = [reason.strip().splitlines()[-1].strip() for reason in reasons if reason.strip()]
    return next((line for line in lines if "Error" in line), lines[0] if lines else "no reason given")


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return response.status == 200
    except (urllib.error.URLError, OSError):
        return False


def _drain(schema: ServeDeploySchema, configs: dict[str, BlockserveConfig]) -> None:
    """Takes the applications down; running requests may end first."""
    from ray import serve

    grace_s = max(m.resources.graceful_shutdown_timeout_s for c in configs.values() for m in c.models)
    deadline = time.monotonic() + grace_s + DRAIN_MARGIN_S
    for app in schema.applications:
        serve.delete(app.name, _blocking=False)
    while serve.status().applications and time.monotonic() < deadline:
        time.sleep(POLL_INTERVAL_S)


def _client_host(host: str) -> str:
    return "127.0.0.1" if host in ("0.0.0.0", "::", "") else host


if __name__ == "__main__":
    sys.exit(main())
