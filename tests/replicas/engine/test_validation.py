import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from replicas.engine.validation import validate_request
from replicas.errors import ContextLengthExceededError, InvalidRequestError, UnsupportedParameterError
from replicas.model_info import ModelInfo
from replicas.protocol import DiffusionParams, EngineCapabilities, GenerationRequest, SamplingParams

AR = ModelInfo(Path("m"), "Qwen3ForCausalLM", 100, 64, (7,))
DIFFUSION = ModelInfo(Path("m"), "LLaDA2MoeModelLM", 100, 64, (7,), 32, 99)
AR_CAPABILITIES = EngineCapabilities(True, 4, 64, logprobs=True)
DIFFUSION_CAPABILITIES = EngineCapabilities(True, 4, 64, 32)


def check(info, prompt=(1, 2), diffusion=None, resume=(), **sampling):
    capabilities = DIFFUSION_CAPABILITIES if info.is_diffusion else AR_CAPABILITIES
    request = GenerationRequest("r", "m", prompt, SamplingParams(**sampling), diffusion, resume)
    validate_request(request, info, capabilities)


@pytest.mark.parametrize("info", [AR, DIFFUSION])
@pytest.mark.parametrize(
    ("param", "kwargs"),
    [
        ("prompt", {"prompt": ()}),
        ("prompt", {"prompt": (1, 100)}),
        ("prompt", {"prompt": (-1, 2)}),
        ("max_tokens", {"max_tokens": 0}),
        ("max_tokens", {"max_tokens": -1}),
        ("temperature", {"temperature": -0.1}),
        ("temperature", {"temperature": float("nan")}),
        ("temperature", {"temperature": float("inf")}),
        ("top_k", {"top_k": -1}),
        ("top_p", {"top_p": 0.0}),
        ("top_p", {"top_p": 1.1}),
        ("top_p", {"top_p": float("nan")}),
        ("min_tokens", {"min_tokens": 17, "max_tokens": 16}),
        ("min_tokens", {"min_tokens": -1}),
        ("stop_token_ids", {"stop_token_ids": (100,)}),
        ("logprobs", {"logprobs": -1}),
        ("logprobs", {"logprobs": 21}),
        ("resume_token_ids", {"resume": (3,) * 16, "max_tokens": 16}),
        ("resume_token_ids", {"resume": (101,), "max_tokens": 16}),
    ],
)
def test_bad_values_name_their_field(info, param, kwargs):
    with pytest.raises(InvalidRequestError) as caught:
        check(info, **kwargs)
    assert caught.value.param == param
    assert f"`{param}`" in caught.value.message


@pytest.mark.parametrize(
    ("param", "params"),
    [
        ("threshold", DiffusionParams(threshold=1.01)),
        ("threshold", DiffusionParams(threshold=float("nan"))),
        ("steps", DiffusionParams(steps=0)),
        ("minimal_topk", DiffusionParams(steps=4, minimal_topk=0)),
        ("minimal_topk", DiffusionParams(steps=4, minimal_topk=17)),
        ("minimal_topk", DiffusionParams(minimal_topk=2)),
        ("editing_threshold", DiffusionParams(editing_threshold=-0.1)),
        ("max_post_steps", DiffusionParams(editing_threshold=0.5, max_post_steps=-1)),
        ("max_post_steps", DiffusionParams(editing_threshold=0.5, max_post_steps=10**6)),
        ("num_to_transfer", DiffusionParams(editing_threshold=0.5, num_to_transfer=0)),
    ],
)
def test_bad_diffusion_values_name_their_field(param, params):
    with pytest.raises(InvalidRequestError) as caught:
        check(DIFFUSION, diffusion=params)
    assert caught.value.param == param


def test_good_requests_pass():
    check(AR, max_tokens=62, temperature=2.0, top_k=5, top_p=0.1, min_tokens=3, logprobs=20)
    check(DIFFUSION, max_tokens=62, diffusion=DiffusionParams(steps=64, minimal_topk=8))
    check(DIFFUSION, diffusion=DiffusionParams(editing_threshold=0.0), stop_token_ids=(3,))
    check(AR, resume=(3,) * 15, max_tokens=16)


def test_oversize_names_both_numbers():
    with pytest.raises(
        ContextLengthExceededError, match=r"maximum context length is 64 tokens, but 65"
    ) as caught:
        check(AR, prompt=(1,) * 60, max_tokens=5)
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.param == "max_tokens"
    with pytest.raises(ContextLengthExceededError) as caught:
        check(AR, prompt=(1,) * 64, max_tokens=1)
    assert caught.value.param == "prompt"


def test_the_limit_of_block_diffusion_counts_whole_blocks():
    check(DIFFUSION, prompt=(1,) * 33, max_tokens=31)
    # 33 + 15 tokens fit 60 positions, but not their two blocks of 32.
    odd = replace(DIFFUSION_CAPABILITIES, max_model_len=60)
    request = GenerationRequest("r", "m", (1,) * 33, SamplingParams(max_tokens=15))
    with pytest.raises(
        ContextLengthExceededError, match=r"64 were requested \(counted in whole blocks of 32\)"
    ):
        validate_request(request, DIFFUSION, odd)


def test_the_mask_token_is_refused_in_a_prompt():
    with pytest.raises(InvalidRequestError, match="mask token") as caught:
        check(DIFFUSION, prompt=(1, 99))
    assert caught.value.param == "prompt"
    check(AR, prompt=(1, 99))


def test_what_a_model_cannot_honour_is_refused_by_name():
    with pytest.raises(UnsupportedParameterError) as caught:
        check(DIFFUSION, logprobs=0)
    assert caught.value.param == "logprobs"
    with pytest.raises(UnsupportedParameterError) as caught:
        check(AR, diffusion=DiffusionParams())
    assert caught.value.param == "diffusion"


def test_validation_needs_no_torch():
    code = (
        "import sys, replicas.engine.validation, replicas.engine.scheduler; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
