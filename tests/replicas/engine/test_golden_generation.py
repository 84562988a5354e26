"""Whole generations against the original implementations, alone and eight at once."""

import pytest

from replicas.engine.core import EngineCore
from replicas.protocol import FinishReason

LLADA = [
    (name, file)
    for name in ("llada2_b32", "llada2_b8", "llada2_tp")
    for file in ("generate_llada20.json", "generate_llada21.json")
]
QWEN = ["qwen3_dense_tied", "qwen3_dense_untied", "qwen3_moe", "qwen2_5"]


def run(golden, name, cases, **kwargs):
    """{case: (token ids, forwards, trace, finish reason)} of one engine run; the engine too."""
    traced = {}
    core: EngineCore = golden.core(
        name,
        reference_stopping=True,
        trace=lambda request_id, block, changes: traced.setdefault(request_id, []).append(
            {"block": block, "set": [list(change) for change in sorted(changes)]}
        ),
        **kwargs,
    )
    outputs = core.generate([golden.request(case) for case in cases])
    result = {
        case["case"]: (
            outputs[case["case"]].new_token_ids,
            outputs[case["case"]].num_forwards,
            traced.get(case["case"]),
            outputs[case["case"]].finish_reason,
        )
        for case in cases
    }
    return result, core


def check_llada(case, result):
    tokens, forwards, trace, reason = result[case["case"]]
    expected = [{"block": step["block"], "set": sorted(step["set"])} for step in case["steps"]]
    # The original may return tokens past gen_length when EOS lies in the last block; a server caps.
    wanted = case["output_ids"][: case["params"]["gen_length"]]
    assert tokens == wanted
    assert forwards == case["num_forwards"]
    assert trace == expected
    assert reason == (FinishReason.STOP if wanted[-1] == case["params"]["eos_id"] else FinishReason.LENGTH)


@pytest.mark.parametrize(("name", "file"), LLADA)
def test_llada_alone(golden, name, file):
    for case in golden.cases(name, file):
        result, core = run(golden, name, [case], max_num_seqs=1)
        check_llada(case, result)
        # The last chunk of the prompt and every commit are part of a denoising forward.
        assert core.stats().num_forwards == case["num_forwards"]


@pytest.mark.parametrize(("name", "file"), LLADA)
def test_llada_eight_at_once(golden, name, file):
    cases = golden.cases(name, file)
    result, core = run(golden, name, cases, max_num_seqs=8)
    for case in cases:
        check_llada(case, result)
    assert core.stats().max_running_seen == min(8, len(cases))
    assert core.stats().free_slots == 8


@pytest.mark.parametrize("name", QWEN)
@pytest.mark.parametrize("width", [1, 8])
def test_autoregressive(golden, name, width):
    cases = golden.cases(name, "greedy.json")
    result, _ = run(golden, name, cases, max_num_seqs=width)
    for case in cases:
        tokens, forwards, _, reason = result[case["case"]]
        assert tokens == case["output_ids"]
        assert forwards == len(tokens)
        assert reason == (FinishReason.STOP if case["finish"] == "eos" else FinishReason.LENGTH)


@pytest.mark.parametrize("name", QWEN)
def test_autoregressive_ignoring_eos(golden, name):
    cases = [case for case in golden.cases(name, "greedy.json") if case["output_ids_ignore_eos"]]
    assert cases
    core = golden.core(name)
    outputs = core.generate([golden.request(case, ignore_eos=True) for case in cases])
    for case in cases:
        assert outputs[case["case"]].new_token_ids == case["output_ids_ignore_eos"]


def test_autoregressive_logprobs(golden):
    cases = [case for case in golden.cases("qwen3_dense_tied", "greedy.json") if case["logprobs"]]
    core = golden.core("qwen3_dense_tied")
    outputs = core.generate([golden.request(case, logprobs=5) for case in cases])
    for case in cases:
        entries = outputs[case["case"]].logprobs
        assert len(entries) == len(case["logprobs"])
        for entry, expected in zip(entries, case["logprobs"], strict=True):
            assert entry.token_id == expected["token"]
            assert entry.logprob == pytest.approx(expected["logprob"], abs=1e-3)
            assert [token for token, _ in entry.top] == [token for token, _ in expected["top5"]]
            assert [value for _, value in entry.top] == pytest.approx(
                [value for _, value in expected["top5"]], abs=1e-3
            )


@pytest.mark.parametrize("name", ["llada2_b32", "llada2_b8"])
def test_a_server_stops_earlier_with_the_same_tokens(golden, name):
    saved = 0
    for case in golden.cases(name, "generate_llada20.json"):
        if not case["params"].get("eos_early_stop"):
            continue
        output = golden.core(name).generate([golden.request(case)])[case["case"]]
        assert output.new_token_ids == case["output_ids"][: case["params"]["gen_length"]]
        assert output.num_forwards <= case["num_forwards"]
        saved += case["num_forwards"] - output.num_forwards
    assert saved > 0


def mutated(golden, monkeypatch, name, mutate):
    """Number of cases of several blocks whose tokens are right under a mutation."""
    cases = [case for case in golden.cases(name, "generate_llada20.json") if case["steps"][-1]["block"] > 2]
    mutate(monkeypatch)
    result, _ = run(golden, name, cases)
    return sum(result[case["case"]][0] == case["output_ids"] for case in cases), len(cases)


def test_without_a_commit_the_goldens_fail(golden, monkeypatch):
    from replicas.engine.diffusion_state import DiffusionState

    original = DiffusionState.apply

    def apply(self, row, *args):
        output = original(self, row, *args)
        if row.decide and self.finish_reason is None and self._step == 0:
            # The block is done: keep the keys and values that its last denoising pass wrote.
            self.num_computed_tokens = self.canvas_start
        return output

    right, total = mutated(
        golden, monkeypatch, "llada2_b32", lambda patch: patch.setattr(DiffusionState, "apply", apply)
    )
    assert right < total / 2


def test_causal_attention_fails_the_goldens(golden, monkeypatch):
    import dataclasses

    from replicas.engine import model_runner

    right, total = mutated(
        golden,
        monkeypatch,
        "llada2_b32",
        lambda patch: patch.setattr(
            model_runner,
            "make_block_causal_virtual_batches",
            lambda metadata, _: dataclasses.replace(metadata, causal=True),
        ),
    )
    assert right < total / 2
