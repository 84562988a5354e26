"""The command line; the last test runs the whole command on two tiny real models."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
import yaml
from local_ports import ROOT, free_port
from ray.serve.schema import ServeDeploySchema

from configs.schema import AutoscalingConfig, BlockserveConfig, IngressConfig, ModelConfig, ReplicaResources
from deployments import cli

GOLDEN = ROOT / "tests" / "golden"


def write_config(folder: Path, *models: dict, **http_options) -> Path:
    document = {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", **http_options},
        "applications": [
            {
                "name": "blockserve",
                "route_prefix": "/",
                "import_path": "deployments.app:build",
                "args": {"models": list(models)},
            }
        ],
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def model(name: str, golden: str, **kwargs) -> dict:
    return {
        "name": name,
        "path": str(GOLDEN / golden),
        "engine": {"max_num_seqs": 8, "dtype": "float32"},
        **kwargs,
    }


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "deployments.cli", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys\nfrom deployments.cli import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "print([m for m in ('ray', 'torch', 'transformers', 'pydantic') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no such file"),
        ("a: [", "config.yaml"),
        ("applications: []", "config.yaml"),
    ],
)
def test_a_bad_file_is_one_line(tmp_path: Path, capsys, text: str | None, message: str) -> None:
    path = tmp_path / "config.yaml"
    if text is not None:
        path.write_text(text)
    assert cli.main(["serve", str(path)]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("blockserve: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1


def test_a_port_in_use_is_refused_before_anything_starts(tmp_path: Path, capsys) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        path = write_config(tmp_path, model("m", "qwen3_dense_tied"), port=port)
        assert cli.main(["serve", str(path)]) == 1
    assert f"127.0.0.1:{port}" in capsys.readouterr().err


@pytest.mark.parametrize("port", ["0", "99999", "-1", "http"])
def test_a_port_that_cannot_be_is_named(port: str, capsys) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["serve", "configs/local.yaml", f"--port={port}"])
    assert exit_.value.code == 2
    assert f"argument --port: must be 1 to 65535, got '{port}'" in capsys.readouterr().err


def test_a_model_that_is_nowhere_is_named_before_anything_starts(tmp_path: Path, capsys) -> None:
    path = write_config(tmp_path, {"name": "gone", "path": "/no/such/folder"}, port=free_port())
    assert cli.main(["serve", str(path)]) == 1
    assert "model `gone`: /no/such/folder" in capsys.readouterr().err


def test_every_replica_that_autoscaling_may_start_has_its_cpus() -> None:
    models = (
        ModelConfig(name="a", path="x", autoscaling=AutoscalingConfig(max_replicas=3)),
        ModelConfig(name="b", path="x", resources=ReplicaResources(num_cpus=0.25)),
    )
    config = BlockserveConfig(models=models, ingress=IngressConfig(num_replicas=2, num_cpus=0.5))
    assert cli.needed_cpus({"app": config}) == 5  # 3 + 0.25 + 1, rounded up


def test_serve_that_runs_already_keeps_its_port(monkeypatch) -> None:
    """`serve --address`: Serve ignores the options of whoever comes second."""
    given: dict = {}

    def serve_start(**options):
        given.update(options)
        return SimpleNamespace(http_config=SimpleNamespace(port=8000))

    monkeypatch.setattr("ray.serve._private.api.serve_start", serve_start)
    controller = {"runtime_env": {"env_vars": {"A": "b"}}}
    tree = {"http_options": {"port": 8000}, "grpc_options": {"port": 9001}, "controller_options": controller}
    schema = ServeDeploySchema.model_validate(tree | {"applications": []})
    assert cli._start_serve(schema).http_config.port == 8000
    assert given["grpc_options"]["port"] == 9001
    assert given["controller_options"] == schema.controller_options is not None
    other = schema.model_copy(update={"http_options": schema.http_options.model_copy(update={"port": 8001})})
    with pytest.raises(cli.CliError, match=r"on port 8000: port 8001"):
        cli._start_serve(other)


def test_the_reason_of_a_failed_start_is_the_last_line_of_its_traceback() -> None:
    traceback = "The deployment failed to start:\nTraceback:\n  File ...\nModelLoadError: no weights"
    overview = SimpleNamespace(
        message="Failed to update the deployments ['Engine-m'].",
        deployments={"Engine-m": SimpleNamespace(message=traceback), "Ingress": SimpleNamespace(message="")},
    )
    assert cli._failure(overview) == "ModelLoadError: no weights"


@pytest.fixture
def process(tmp_path: Path):
    port = free_port()
    path = write_config(tmp_path, model("qwen", "qwen3_dense_tied"), model("llada", "llada2_b8"), port=8000)
    with start("serve", str(path), "--port", str(port)) as process:
        process.port = port
        try:
            yield process
        finally:
            process.kill()


def test_serve_answers_with_the_reference_tokens_and_drains_on_sigterm(process) -> None:
    lines = iter(process.stdout.readline, "")
    ready = next(line for line in lines if "ready at" in line)
    url = f"http://127.0.0.1:{process.port}"
    assert f"{url}/v1 (models: qwen, llada)" in ready
    case = json.loads((GOLDEN / "qwen3_dense_tied" / "greedy.json").read_text())[0]
    body = {
        "model": "qwen",
        "prompt": case["prompt_ids"],
        "max_tokens": case["max_tokens"],
        "temperature": 0,
        "ignore_eos": True,
    }
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(GOLDEN / "qwen3_dense_tied")
    expected = tokenizer.decode(case["output_ids"], skip_special_tokens=True)
    assert answer["choices"][0]["text"] == expected
    diffusion = httpx.post(
        f"{url}/v1/completions",
        json={"model": "llada", "prompt": [5, 6, 7], "max_tokens": 13, "ignore_eos": True},
        timeout=60,
    ).json()
    assert diffusion["usage"]["completion_tokens"] == 13

    # A stream that runs when the signal comes is finished first.
    with httpx.stream(
        "POST", f"{url}/v1/completions", json={**body, "max_tokens": 200, "stream": True}, timeout=60
    ) as response:
        events = response.iter_lines()
        next(events)
        process.send_signal(signal.SIGTERM)
        assert [event for event in events if event][-1] == "data: [DONE]"
    assert process.wait(timeout=60) == 0
    deadline = time.monotonic() + 10
    while True:  # the port is free again
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", process.port))
                break
            except OSError:
                assert time.monotonic() < deadline
                time.sleep(0.5)
