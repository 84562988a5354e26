"""What an engine accepts. Imports no torch: the ingress checks the same, before a replica is involved."""

from __future__ import annotations

import math

from replicas.errors import (
    ContextLengthExceededError,
    InvalidRequestError,
    UnsupportedParameterError,
)
from replicas.model_info import ModelInfo
from replicas.protocol import (
    NEUTRAL_PENALTIES,
    DiffusionParams,
    EngineCapabilities,
    GenerationRequest,
    SamplingParams,
)

#: Most alternatives per token that ``logprobs`` may ask for (OpenAI's limit).
MAX_LOGPROBS = 20
#: An edit pass without masks left costs a forward; more of them than this is a runaway request.
MAX_POST_STEPS = 1024


def validate_request(request: GenerationRequest, info: ModelInfo, capabilities: EngineCapabilities) -> None:
    """Raises a named error for a request that this engine can never run.

    ``InvalidRequestError`` (field in ``param``), ``ContextLengthExceededError`` for one that does not fit
    ``capabilities.max_model_len``, ``UnsupportedParameterError`` for a field that cannot be honoured.
    """
    _check_sampling(request.sampling, info, capabilities)
    if info.is_diffusion:
        _check_diffusion(request.diffusion or DiffusionParams(), request.sampling)
    elif request.diffusion is not None:
        raise UnsupportedParameterError(
            f"`diffusion` parameters apply to block-diffusion models only, not to {info.architecture}",
            param="diffusion",
        )
    _check_tokens(request, info)
    _check_length(request, info, capabilities)


def _check_tokens(request: GenerationRequest, info: ModelInfo) -> None:
    if not request.prompt_token_ids:
        raise InvalidRequestError("`prompt` must hold at least one token, got none", param="prompt")
    given = (("prompt", request.prompt_token_ids), ("resume_token_ids", request.resume_token_ids))
    for name, tokens in given:
        if not tokens:
            continue
        for worst in (min(tokens), max(tokens)):
            if not 0 <= worst < info.vocab_size:
                raise InvalidRequestError(
                    f"`{name}` token ids must be 0 to {info.vocab_size - 1}, got {worst}", param=name
                )
        if info.mask_token_id is not None and info.mask_token_id in tokens:
            # The original code would overwrite it in the last partial block.
            raise InvalidRequestError(
                f"`{name}` must not hold the mask token (id {info.mask_token_id})", param=name
            )
    if len(request.resume_token_ids) >= request.sampling.max_tokens:
        raise InvalidRequestError(
            f"`resume_token_ids` must be fewer than `max_tokens` ({request.sampling.max_tokens}), "
            f"got {len(request.resume_token_ids)}: nothing is left to generate",
            param="resume_token_ids",
        )


def _check_length(request: GenerationRequest, info: ModelInfo, capabilities: EngineCapabilities) -> None:
    limit = capabilities.max_model_len
    num_prompt, max_tokens = len(request.prompt_token_ids), request.sampling.max_tokens
    total = num_prompt + max_tokens
    counted = ""
    if info.block_length is not None:
        total = math.ceil(total / info.block_length) * info.block_length
        counted = f" (counted in whole blocks of {info.block_length})"
    if total > limit:
        raise ContextLengthExceededError(
            f"This model's maximum context length is {limit} tokens, but {total} were requested{counted}: "
            f"{num_prompt} in the prompt and {max_tokens} for the completion",
            param="prompt" if num_prompt >= limit else "max_tokens",
        )


def _check_sampling(sampling: SamplingParams, info: ModelInfo, capabilities: EngineCapabilities) -> None:
    _need(sampling.max_tokens >= 1, "max_tokens", "at least 1", sampling.max_tokens)
    finite = math.isfinite(sampling.temperature)
    _need(finite and sampling.temperature >= 0, "temperature", "a number, at least 0", sampling.temperature)
    _need(sampling.top_k >= 0, "top_k", "at least 0 (0 is off)", sampling.top_k)
    _need(0 < sampling.top_p <= 1, "top_p", "above 0 and at most 1", sampling.top_p)
    _need(
        0 <= sampling.min_tokens <= sampling.max_tokens,
        "min_tokens",
        f"0 to `max_tokens` ({sampling.max_tokens})",
        sampling.min_tokens,
    )
    for token in sampling.stop_token_ids:
        _need(0 <= token < info.vocab_size, "stop_token_ids", f"ids of 0 to {info.vocab_size - 1}", token)
    _need(0 <= sampling.min_p <= 1, "min_p", "0 to 1", sampling.min_p)
    for token, bias in sampling.logit_bias:
        _need(0 <= token < info.vocab_size, "logit_bias", f"token ids of 0 to {info.vocab_size - 1}", token)
        _need(-100 <= bias <= 100, "logit_bias", "-100 to 100", bias)
    for name in ("frequency_penalty", "presence_penalty"):
        _need(-2 <= getattr(sampling, name) <= 2, name, "-2 to 2", getattr(sampling, name))
    _need(
        0 < sampling.repetition_penalty <= 2,
        "repetition_penalty",
        "above 0 and at most 2",
        sampling.repetition_penalty,
    )
    for name, neutral in NEUTRAL_PENALTIES.items():
        if getattr(sampling, name) != neutral and not capabilities.penalties:
            raise UnsupportedParameterError(
                f"`{name}` is not supported by this model, except {neutral:g}", param=name
            )
    if sampling.grammar is not None and not capabilities.structured_output:
        raise UnsupportedParameterError("`grammar` is not supported by this model", param="grammar")
    if sampling.logprobs is None:
        return
    _need(0 <= sampling.logprobs <= MAX_LOGPROBS, "logprobs", f"0 to {MAX_LOGPROBS}", sampling.logprobs)
    if not capabilities.logprobs:
        raise UnsupportedParameterError("`logprobs` are not supported by this model", param="logprobs")


def _check_diffusion(params: DiffusionParams, sampling: SamplingParams) -> None:
    _need(0 <= params.threshold <= 1, "threshold", "0 to 1", params.threshold)
    _need(params.steps is None or params.steps >= 1, "steps", "at least 1", params.steps)
    _need(params.minimal_topk >= 1, "minimal_topk", "at least 1", params.minimal_topk)
    if params.editing_threshold is not None:
        _need(0 <= params.editing_threshold <= 1, "editing_threshold", "0 to 1", params.editing_threshold)
        _need(
            0 <= params.max_post_steps <= MAX_POST_STEPS,
            "max_post_steps",
            f"0 to {MAX_POST_STEPS}",
            params.max_post_steps,
        )
        _need(params.num_to_transfer >= 1, "num_to_transfer", "at least 1", params.num_to_transfer)
    elif params.minimal_topk > 1:
        if params.steps is None:
            raise InvalidRequestError(
                "`minimal_topk` only lowers `steps`, which must be given with it", param="minimal_topk"
            )
        _need(
            params.minimal_topk <= sampling.max_tokens,
            "minimal_topk",
            f"1 to `max_tokens` ({sampling.max_tokens}), or no step is left",
            params.minimal_topk,
        )


def _need(condition: bool, name: str, allowed: str, given: object) -> None:
    if not condition:
        raise InvalidRequestError(f"`{name}` must be {allowed}, got {given}", param=name)
