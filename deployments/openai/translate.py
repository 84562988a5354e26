"""From a validated body to the requests that engines run, all limits checked.

What a model cannot honour is refused by name, never ignored.
"""

from __future__ import annotations

import asyncio
import functools
import secrets
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from deployments.openai.contracts import ModelEntry
from deployments.openai.grammar import TAGS, make_grammar
from deployments.openai.protocol import ChatCompletionRequest, CompletionRequest, GenerationBody
from deployments.openai.tools import ToolPlan, plan_tools
from replicas.errors import ContextLengthExceededError, InvalidRequestError, UnsupportedParameterError
from replicas.protocol import NEUTRAL_PENALTIES, DiffusionParams, GenerationRequest, SamplingParams

T = TypeVar("T")

#: Prompts above this many characters are tokenized in a thread, so that they do not hold up other requests.
_INLINE_CHARACTERS = 4096
_SEED_RANGE = 2**63
_DIFFUSION_FIELDS = ("steps", "threshold", "editing_threshold", "max_post_steps", "eos_early_stop")
#: Extensions of peers that change the output; accepting and ignoring them would be a lie.
UNSUPPORTED_EXTRAS = (
    "best_of", "chat_template", "guided_choice", "guided_grammar", "guided_json", "guided_regex", "length_penalty",
    "prompt_logprobs", "use_beam_search",
)  # fmt: skip

_pool = ThreadPoolExecutor(2, thread_name_prefix="tokenize")


@dataclass(frozen=True)
class TranslatedRequest:
    """One HTTP request as engine requests: prompt by prompt, each with its ``n`` choices, so that the choice
    index is the position. ``echo_texts``: per choice, a text that comes before its output ("" is none).
    ``new_token_field``: the request's name for the limit of new tokens.
    ``tools``: what calls to look for in the output. ``grammar_param``: the field that the grammar comes from."""

    requests: list[GenerationRequest]
    stop: tuple[str, ...]
    num_prompts: int
    num_prompt_tokens: int
    echo_texts: list[str]
    new_token_field: str = "max_tokens"
    tools: ToolPlan | None = None
    grammar_param: str | None = None

    @property
    def num_live_tokens(self) -> int:
        """Prompt and allowed new tokens of all choices: what admission counts."""
        return sum(len(r.prompt_token_ids) + r.sampling.max_tokens for r in self.requests)


async def translate_chat(
    body: ChatCompletionRequest, entry: ModelEntry, *, deadline: float | None = None
) -> TranslatedRequest:
    """Raises ``InvalidRequestError`` and its subclasses; every message names the field at fault."""
    _refuse_unsupported(body, entry)
    _refuse_unsupported_chat(body, entry)
    plan = await _plan_tools(body)
    grammar = await _grammar(body, entry, plan)
    messages = [message.for_template() for message in body.messages]
    tools = plan.for_template() if plan else []
    check = functools.partial(refuse_hopeless, entry=entry, field="messages")
    check(sum(len(message.content or "") for message in body.messages))
    encode = functools.partial(
        entry.encoder.encode_chat, messages, body.chat_template_kwargs, tools=tools, check_length=check
    )
    # Which of all this the template writes is not known before it has.
    prompt = await _run(encode, _size(messages, body.chat_template_kwargs, tools))
    translated = _build(body, entry, [(prompt, "")], "messages", grammar, deadline)
    return replace(translated, tools=plan, grammar_param=_grammar_param(body, plan))


async def translate_completion(
    body: CompletionRequest, entry: ModelEntry, *, deadline: float | None = None
) -> TranslatedRequest:
    """Raises ``InvalidRequestError`` and its subclasses; every message names the field at fault."""
    _refuse_unsupported(body, entry)
    if body.suffix:
        raise _unsupported("suffix", "is not supported")
    if body.best_of is not None and body.best_of != body.n:
        raise _unsupported("best_of", f"must equal `n` ({body.n}), got {body.best_of}")
    if body.echo and body.logprobs is not None:
        raise _unsupported("echo", "is not supported together with `logprobs`")
    grammar = await _grammar(body, entry, None)
    encode = functools.partial(_encode_prompts, body, entry)
    prompts = await _run(encode, sum(len(prompt) for prompt in body.prompt))
    translated = _build(body, entry, prompts, "prompt", grammar, deadline)
    return replace(translated, grammar_param=_grammar_param(body, None))


def _encode_prompts(body: CompletionRequest, entry: ModelEntry) -> list[tuple[list[int], str]]:
    """Token ids of every prompt, and the text that the output begins with."""
    prompts: list[tuple[list[int], str]] = []
    for prompt in body.prompt:
        if isinstance(prompt, str):
            refuse_hopeless(len(prompt), entry, "prompt")
            prompts.append((entry.encoder.encode_text(prompt), prompt if body.echo else ""))
        else:
            check_token_ids(prompt, entry, "prompt")
            prompts.append((prompt, entry.encoder.decode(prompt) if body.echo else ""))
    return prompts


def _build(
    body: GenerationBody,
    entry: ModelEntry,
    prompts: list[tuple[list[int], str]],
    field: str,
    grammar: str | None,
    deadline: float | None,
) -> TranslatedRequest:
    requests: list[GenerationRequest] = []
    echo_texts: list[str] = []
    base_seed = secrets.randbelow(_SEED_RANGE) if body.seed is None else body.seed
    diffusion = _diffusion_params(body, entry)
    logit_bias = _logit_bias(body, entry)
    if grammar is not None and body.min_tokens:
        # Where a grammar's text ends nothing but EOS may follow, and that is what `min_tokens` forbids.
        raise InvalidRequestError(
            "`min_tokens` cannot be combined with a grammar (`response_format`, `structured_outputs`, a forced call)",
            param="min_tokens",
        )
    for prompt, echo_text in prompts:
        if not prompt:
            raise InvalidRequestError(f"`{field}`: must have at least one token, got 0", param=field)
        if max(prompt) >= entry.info.vocab_size:  # a tokenizer may know more tokens than the model
            check_token_ids(prompt, entry, field)
        mask = entry.info.mask_token_id
        if mask is not None and mask in prompt:
            raise InvalidRequestError(
                f"`{field}`: the mask token (id {mask}) is not allowed in a prompt", param=field
            )
        max_tokens = _new_token_limit(body, entry, len(prompt), field)
        sampling = _sampling_params(body, entry, max_tokens, logit_bias, grammar)
        token_ids = tuple(prompt)
        for _ in range(body.n):
            seed = (base_seed + len(requests)) % _SEED_RANGE
            requests.append(
                GenerationRequest(
                    request_id=uuid.uuid4().hex,
                    model=entry.name,
                    prompt_token_ids=token_ids,
                    sampling=replace(sampling, seed=seed),
                    diffusion=diffusion,
                    deadline=deadline,
                )
            )
            echo_texts.append(echo_text)
    num_prompt_tokens = sum(len(prompt) for prompt, _ in prompts)
    return TranslatedRequest(
        requests, tuple(body.stop), len(prompts), num_prompt_tokens, echo_texts, body.new_token_field
    )


def _sampling_params(
    body: GenerationBody,
    entry: ModelEntry,
    max_tokens: int,
    logit_bias: tuple[tuple[int, float], ...],
    grammar: str | None,
) -> SamplingParams:
    """Of one prompt, without the seed, which is each choice's own."""
    defaults = entry.config.sampling
    temperature = defaults.temperature if body.temperature is None else body.temperature
    top_p = defaults.top_p if body.top_p is None else body.top_p
    top_k = defaults.top_k if body.top_k is None else max(body.top_k, 0)
    if top_p == 0:  # nothing but the best token is left
        temperature, top_p = 0.0, 1.0
    if body.min_tokens > max_tokens:
        raise InvalidRequestError(
            f"`min_tokens` must be 0 to {max_tokens} (the new tokens allowed), got {body.min_tokens}",
            param="min_tokens",
        )
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=min(top_k, entry.info.vocab_size),
        top_p=top_p,
        stop_token_ids=tuple(body.stop_token_ids),
        ignore_eos=body.ignore_eos,
        min_tokens=body.min_tokens,
        logprobs=body.num_top_logprobs,
        min_p=body.min_p,
        logit_bias=logit_bias,
        grammar=grammar,
        frequency_penalty=body.frequency_penalty,
        presence_penalty=body.presence_penalty,
        repetition_penalty=body.repetition_penalty,
    )


def _logit_bias(body: GenerationBody, entry: ModelEntry) -> tuple[tuple[int, float], ...]:
    size = entry.info.vocab_size
    pairs = []
    for key, value in body.logit_bias.items():
        # One spelling for an id, or two keys could mean the same one.
        if (
            not (key.isascii() and key.isdecimal() and len(key) <= 20 and str(int(key)) == key)
            or int(key) >= size
        ):
            raise InvalidRequestError(
                f"`logit_bias`: keys must be token ids of 0 to {size - 1}, got {key[:32]!a}",
                param="logit_bias",
            )
        if value:
            pairs.append((int(key), value))
    return tuple(pairs)


def _diffusion_params(body: GenerationBody, entry: ModelEntry) -> DiffusionParams | None:
    if not entry.info.is_diffusion:
        for name in (*_DIFFUSION_FIELDS, "block_length"):
            if getattr(body, name) is not None:
                raise _unsupported(name, "applies to block-diffusion models only")
        return None
    block_length = entry.info.block_length
    if body.block_length is not None and body.block_length != block_length:
        raise _unsupported("block_length", f"is the model's ({block_length}), got {body.block_length}")
    if body.steps is not None and body.steps > 1_000_000:
        raise InvalidRequestError(f"`steps` must be 1 to 1000000, got {body.steps}", param="steps")
    defaults = entry.config.diffusion
    given = {name: getattr(body, name) for name in _DIFFUSION_FIELDS}
    return DiffusionParams(**{k: getattr(defaults, k) if v is None else v for k, v in given.items()})


def _new_token_limit(body: GenerationBody, entry: ModelEntry, num_prompt_tokens: int, field: str) -> int:
    """New tokens of one choice. A block-diffusion model's context is a multiple of its block length, so
    what fits in tokens also fits in whole blocks."""
    limit = entry.capabilities.max_model_len
    if num_prompt_tokens >= limit:
        raise ContextLengthExceededError(
            f"`{field}`: this model's maximum context length is {limit} tokens, at least one of them new, "
            f"but the prompt has {num_prompt_tokens} tokens",
            param=field,
        )
    room = limit - num_prompt_tokens
    wanted = body.new_token_limit
    if wanted is None:
        return room
    if wanted > room:
        name = body.new_token_field
        raise ContextLengthExceededError(
            f"`{name}`: this model's maximum context length is {limit} tokens, but "
            f"{num_prompt_tokens + wanted} were requested ({num_prompt_tokens} in the prompt, {wanted} new)",
            param=name,
        )
    return wanted


def refuse_hopeless(num_characters: int, entry: ModelEntry, field: str) -> None:
    """Refuses a text that is too long whatever its tokens are, before the work of tokenizing it. A margin of
    four allows for tokenizers that normalize text to a shorter one."""
    limit = entry.capabilities.max_model_len
    at_least = num_characters // (4 * entry.encoder.longest_token)
    if at_least >= limit:
        raise ContextLengthExceededError(
            f"`{field}`: this model's maximum context length is {limit} tokens, but the prompt has "
            f"{num_characters} characters, which are at least {at_least} tokens",
            param=field,
        )


def check_token_ids(ids: list[int], entry: ModelEntry, field: str) -> None:
    size = entry.info.vocab_size
    for i, token_id in enumerate(ids):
        if not 0 <= token_id < size:
            raise InvalidRequestError(
                f"`{field}`: token ids must be 0 to {size - 1}, got {token_id} at position {i}", param=field
            )


def _refuse_unsupported(body: GenerationBody, entry: ModelEntry) -> None:
    if body.num_top_logprobs is not None and not entry.capabilities.logprobs:
        raise _unsupported("logprobs", "is not supported by this model")
    if not entry.capabilities.penalties:
        for name, neutral in NEUTRAL_PENALTIES.items():
            if getattr(body, name) != neutral:
                raise _unsupported(
                    name, f"is not supported by this model, except {neutral:g}; got {getattr(body, name)}"
                )
    if not entry.capabilities.structured_output:
        if body.response_format is not None and body.response_format.type != "text":
            raise _unsupported("response_format", "supports the type 'text' only with this model")
        if body.structured_outputs is not None:
            raise _unsupported("structured_outputs", "is not supported by this model")
    extras = body.model_extra or {}
    for name in UNSUPPORTED_EXTRAS:
        value = extras.get(name)
        # 0 asks for the prompt's logprobs without alternatives; of the others it is nothing, and one of one is plain.
        neutral = value is None or value is False if name == "prompt_logprobs" else not value
        if not neutral and (name, value) != ("best_of", 1):
            raise _unsupported(name, "is not supported")
    check_token_ids(body.stop_token_ids, entry, "stop_token_ids")


def refuse_tools_without_template(entry: ModelEntry) -> None:
    if not entry.encoder.knows_tools:
        raise _unsupported(
            "tools", 'is not supported by this model\'s chat template, except with `tool_choice: "none"`'
        )


def _refuse_unsupported_chat(body: ChatCompletionRequest, entry: ModelEntry) -> None:
    if body.tools and body.tool_choice != "none":
        refuse_tools_without_template(entry)
        if body.tool_choice not in (None, "auto") and not entry.capabilities.structured_output:
            raise _unsupported("tool_choice", "supports 'none' and 'auto' only with this model")
    if body.functions and body.function_call != "none":
        raise _unsupported("functions", "is not supported")
    if body.modalities is not None and body.modalities != ["text"]:
        raise _unsupported("modalities", "supports ['text'] only")
    for name in ("audio", "web_search_options"):
        if getattr(body, name) is not None:
            raise _unsupported(name, "is not supported")


def _unsupported(name: str, what: str) -> UnsupportedParameterError:
    return UnsupportedParameterError(f"`{name}` {what}", param=name)


async def _plan_tools(body: ChatCompletionRequest) -> ToolPlan | None:
    plan = functools.partial(plan_tools, body.tools, body.tool_choice, body.parallel_tool_calls)
    return await _run(plan, _INLINE_CHARACTERS + 1 if body.tools else 0)


def _grammar_param(body: GenerationBody, plan: ToolPlan | None) -> str:
    if plan is not None and plan.forced:
        return "tools"
    return "structured_outputs" if body.structured_outputs is not None else "response_format"


async def _grammar(body: GenerationBody, entry: ModelEntry, plan: ToolPlan | None) -> str | None:
    """Compiling takes a millisecond or a second, which is not seen from outside: always in a thread."""
    if not entry.capabilities.structured_output:
        return None
    wanted = body.response_format or body.structured_outputs or (plan and plan.forced)
    tag_ids = entry.encoder.added_token_ids(TAGS)
    make = functools.partial(
        make_grammar,
        body.response_format,
        body.structured_outputs,
        plan,
        tag_ids,
        entry.encoder.control_tokens,
    )
    return await _run(make, _INLINE_CHARACTERS + 1 if wanted else 0)


def _size(*values: Any) -> int:
    """Characters and items of nested values, counted no further than to see that they are many."""
    size = 0
    rest = list(values)
    while rest and size <= _INLINE_CHARACTERS:
        value = rest.pop()
        size += len(value) if isinstance(value, str) else 1
        if isinstance(value, dict):
            rest += [*value.keys(), *value.values()]
        elif isinstance(value, list):
            rest += value
    return size


async def _run(function: Callable[[], T], size: int) -> T:
    if size <= _INLINE_CHARACTERS:
        return function()
    loop = asyncio.get_running_loop()
    result: Any = await loop.run_in_executor(_pool, function)
    return result
