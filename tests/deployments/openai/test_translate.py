import threading
from dataclasses import replace

import pytest
from fake_dispatcher import load_entry
from tool_templates import with_tools

from deployments.openai.protocol import ChatCompletionRequest, CompletionRequest
from deployments.openai.translate import translate_chat, translate_completion
from replicas.errors import ContextLengthExceededError, InvalidRequestError, UnsupportedParameterError
from replicas.protocol import DiffusionParams

LLADA = load_entry("llada2_b32", "llada", diffusion={"threshold": 0.9, "editing_threshold": 0.8})
QWEN = load_entry("qwen2_5", "qwen", sampling={"temperature": 0.5, "top_k": 7})
TOOL = {"type": "function", "function": {"name": "f"}}
MASK = LLADA.info.mask_token_id


async def chat(entry=QWEN, **fields):
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
    return await translate_chat(ChatCompletionRequest.model_validate(body), entry)


async def complete(entry=QWEN, prompt="hi", **fields):
    body = {"model": "m", "prompt": prompt, **fields}
    return await translate_completion(CompletionRequest.model_validate(body), entry)


async def test_defaults_come_from_the_model():
    (request,) = (await chat()).requests
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.5, 7, 1.0)
    assert sampling.max_tokens == QWEN.capabilities.max_model_len - len(request.prompt_token_ids)
    assert isinstance(sampling.seed, int)
    assert request.diffusion is None
    assert request.model == "qwen"


async def test_given_values_win():
    fields = {
        "temperature": 0,
        "top_k": 3,
        "top_p": 0.5,
        "max_tokens": 9,
        "min_tokens": 2,
        "ignore_eos": True,
        "stop_token_ids": [5],
        "seed": -1,
        "stop": "x",
    }
    translated = await chat(**fields)
    sampling = translated.requests[0].sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.max_tokens) == (0, 3, 0.5, 9)
    assert (sampling.min_tokens, sampling.ignore_eos, sampling.stop_token_ids) == (2, True, (5,))
    assert sampling.seed == 2**63 - 1
    assert translated.stop == ("x",)


async def test_choices_share_what_is_the_same():
    translated = await complete(prompt=["ab", "cd"], n=2, logit_bias={"3": 1.5}, seed=5)
    first, second, third, _ = translated.requests
    assert first.prompt_token_ids is second.prompt_token_ids
    assert first.sampling.logit_bias is second.sampling.logit_bias is third.sampling.logit_bias
    assert [request.sampling.seed for request in translated.requests] == [5, 6, 7, 8]


@pytest.fixture
def threads(monkeypatch):
    """Names of the threads in which texts are encoded."""
    names = []
    for name in ("encode_text", "encode_chat"):
        encode = getattr(type(QWEN.encoder), name)

        def recording(*arguments, _encode=encode, **keywords):
            names.append(threading.current_thread().name.split("_")[0])
            return _encode(*arguments, **keywords)

        monkeypatch.setattr(type(QWEN.encoder), name, recording)
    return names


LONG_CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "x" * 5000}}


@pytest.mark.parametrize(
    "fields",
    [
        {"chat_template_kwargs": {"hint": "x" * 5000}},
        {"chat_template_kwargs": {"items": list(range(5000))}},
        {"messages": [{"role": "assistant", "content": None, "tool_calls": [LONG_CALL]}]},
        {"messages": [{"role": "user", "content": "hi", "name": "x" * 5000}]},
    ],
)
async def test_everything_that_a_template_may_write_counts_as_long(threads, fields):
    await chat(**fields)
    assert threads == ["tokenize"]


async def test_many_short_prompts_are_long_together(threads):
    await complete(prompt=["x" * 50] * 100)
    assert threads == ["tokenize"] * 100
    await complete(prompt=["x" * 50] * 3)
    assert threads[100:] == ["MainThread"] * 3


async def test_what_a_template_writes_is_refused_before_it_is_tokenized(monkeypatch):
    entry = with_tools(QWEN)
    call = LONG_CALL | {"function": {"name": "f", "arguments": "x" * 10**6}}
    monkeypatch.setattr(entry.encoder, "_encode_plain", None)
    monkeypatch.setattr(entry.encoder, "_normal", None)
    with pytest.raises(ContextLengthExceededError, match="characters") as caught:
        await chat(entry, messages=[{"role": "assistant", "content": None, "tool_calls": [call]}])
    assert caught.value.param == "messages"


async def test_top_p_zero_is_greedy():
    sampling = (await chat(top_p=0, temperature=1.5)).requests[0].sampling
    assert (sampling.temperature, sampling.top_p) == (0, 1)


async def test_each_choice_has_its_own_seed_and_id():
    requests = (await chat(n=4, seed=10)).requests
    assert [request.sampling.seed for request in requests] == [10, 11, 12, 13]
    assert len({request.request_id for request in requests}) == 4
    unseeded = [(await chat()).requests[0].sampling.seed for _ in range(5)]
    assert len(set(unseeded)) == 5


async def test_prompts_times_choices():
    translated = await complete(prompt=["a", "bc"], n=2, echo=True)
    assert [len(request.prompt_token_ids) for request in translated.requests] == [1, 1, 2, 2]
    assert translated.echo_texts == ["a", "a", "bc", "bc"]
    assert (translated.num_prompt_tokens, translated.num_prompts) == (3, 2)
    assert (await complete(prompt=[65, 66])).requests[0].prompt_token_ids == (65, 66)


async def test_diffusion_parameters():
    assert (await chat(LLADA)).requests[0].diffusion == DiffusionParams(threshold=0.9, editing_threshold=0.8)
    given = {
        "steps": 5,
        "threshold": 0.1,
        "editing_threshold": 0,
        "max_post_steps": 0,
        "eos_early_stop": False,
    }
    assert (await chat(LLADA, **given)).requests[0].diffusion == DiffusionParams(**given)
    await chat(LLADA, block_length=32)


async def test_the_context_limit_counts_prompt_and_new_tokens():
    limit = LLADA.capabilities.max_model_len
    assert (await complete(LLADA, prompt=[1] * (limit - 1))).requests[0].sampling.max_tokens == 1
    assert (await complete(LLADA, prompt=[1] * 100, max_tokens=limit - 100)).num_live_tokens == limit
    with pytest.raises(ContextLengthExceededError, match=rf"{limit} tokens.*has {limit} tokens") as caught:
        await complete(LLADA, prompt=[1] * limit)
    assert caught.value.param == "prompt"
    with pytest.raises(ContextLengthExceededError, match=rf"{limit} tokens.*{limit + 1} were") as caught:
        await complete(LLADA, prompt=[1] * 100, max_tokens=limit - 99)
    assert caught.value.param == "max_tokens"


@pytest.mark.parametrize("size", [2100, 20_000, 3_000_000])
async def test_long_chats_are_refused_with_both_numbers(size):
    with pytest.raises(ContextLengthExceededError, match=r"2048 tokens, .* [0-9]+ tokens") as caught:
        await chat(messages=[{"role": "user", "content": "x" * size}])
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("entry", "fields", "param"),
    [
        (QWEN, {"steps": 3}, "steps"),
        (QWEN, {"threshold": 0.5}, "threshold"),
        (QWEN, {"editing_threshold": 0.5}, "editing_threshold"),
        (QWEN, {"max_post_steps": 0}, "max_post_steps"),
        (QWEN, {"eos_early_stop": False}, "eos_early_stop"),
        (QWEN, {"block_length": 32}, "block_length"),
        (LLADA, {"block_length": 16}, "block_length"),
        (LLADA, {"frequency_penalty": 0.1}, "frequency_penalty"),
        (LLADA, {"presence_penalty": -0.1}, "presence_penalty"),
        (LLADA, {"repetition_penalty": 1.1}, "repetition_penalty"),
        (LLADA, {"response_format": {"type": "json_object"}}, "response_format"),
        (LLADA, {"structured_outputs": {"json_object": True}}, "structured_outputs"),
        (QWEN, {"guided_json": {"type": "object"}}, "guided_json"),
    ],
)
async def test_what_cannot_be_honoured_is_refused_by_name(entry, fields, param):
    for translate in (chat, complete):
        with pytest.raises(UnsupportedParameterError) as caught:
            await translate(entry, **fields)
        assert caught.value.param == param
        assert f"`{param}`" in caught.value.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [TOOL]}, "tools"),
        ({"tools": [TOOL], "tool_choice": "auto"}, "tools"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tools"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"prompt_logprobs": 3}, "prompt_logprobs"),
        ({"best_of": 2}, "best_of"),
    ],
)
async def test_what_chat_cannot_honour(fields, param):
    with pytest.raises(UnsupportedParameterError) as caught:
        await chat(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"echo": True, "logprobs": 1}, "echo"),
        ({"best_of": 2}, "best_of"),
        ({"suffix": "x"}, "suffix"),
    ],
)
async def test_what_completions_cannot_honour(fields, param):
    with pytest.raises(UnsupportedParameterError) as caught:
        await complete(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize("entry", [QWEN, LLADA])
async def test_what_changes_logits_reaches_the_engine(entry):
    fields = {"min_p": 0.1, "logit_bias": {"5": 1, "7": -100, "9": 0.0}}
    if entry is QWEN:
        fields |= {"frequency_penalty": 0.5, "presence_penalty": -2, "repetition_penalty": 1.1}
    for translate in (chat, complete):
        sampling = (await translate(entry, **fields)).requests[0].sampling
        assert sampling.min_p == 0.1
        assert sampling.logit_bias == ((5, 1.0), (7, -100.0))
        assert sampling.frequency_penalty == fields.get("frequency_penalty", 0)
        assert sampling.presence_penalty == fields.get("presence_penalty", 0)
        assert sampling.repetition_penalty == fields.get("repetition_penalty", 1)


@pytest.mark.parametrize(
    "bias",
    [{"-1": 1}, {"x": 1}, {"1.5": 1}, {"999999": 1}, {"9" * 40: 1}, {"": 1}, {"٣": 1}, {"05": 1}, {" 5": 1}],
)
async def test_keys_of_a_bias_are_token_ids(bias):
    with pytest.raises(InvalidRequestError, match="token ids of 0 to") as caught:
        await chat(logit_bias=bias)
    assert caught.value.param == "logit_bias"


async def test_a_grammar_leaves_no_room_for_min_tokens():
    fields = {"response_format": {"type": "json_object"}}
    for translate in (chat, complete):
        assert (await translate(QWEN, **fields)).requests[0].sampling.grammar is not None
        with pytest.raises(InvalidRequestError) as caught:
            await translate(QWEN, min_tokens=3, **fields)
        assert caught.value.param == "min_tokens"


@pytest.mark.parametrize("entry", [QWEN, LLADA])
async def test_logprobs_reach_the_engine(entry):
    async def wanted(translate, **fields):
        return (await translate(entry, **fields)).requests[0].sampling.logprobs

    assert await wanted(chat) is None
    assert await wanted(chat, logprobs=False) is None
    assert await wanted(chat, logprobs=True) == 0
    assert await wanted(chat, logprobs=True, top_logprobs=5) == 5
    assert await wanted(complete, logprobs=0) == 0
    assert await wanted(complete, logprobs=3) == 3


async def test_neutral_values_are_fine():
    await chat(
        tools=[TOOL],
        tool_choice="none",
        response_format={"type": "text"},
        logit_bias={},
        modalities=["text"],
        frequency_penalty=0,
        logprobs=False,
        top_k=-1,
        best_of=1,
        prompt_logprobs=None,
        guided_json=None,
        use_beam_search=False,
    )
    await complete(best_of=1, n=1, echo=False)


@pytest.mark.parametrize("prompt", [[512], [-1], [[1], [600]], [2**62]])
async def test_token_ids_outside_the_vocabulary(prompt):
    with pytest.raises(InvalidRequestError, match="0 to 511, got") as caught:
        await complete(prompt=prompt)
    assert caught.value.param == "prompt"


async def test_a_tokenizer_that_knows_more_tokens_than_the_model():
    entry = replace(QWEN, info=replace(QWEN.info, vocab_size=400))
    with pytest.raises(InvalidRequestError, match="0 to 399, got 509"):  # the template's <|role_end|>
        await chat(entry)


async def test_stop_token_ids_outside_the_vocabulary():
    with pytest.raises(InvalidRequestError, match="0 to 511, got 512") as caught:
        await chat(stop_token_ids=[512])
    assert caught.value.param == "stop_token_ids"


async def test_the_mask_token_is_no_prompt():
    with pytest.raises(InvalidRequestError, match="mask token"):
        await complete(LLADA, prompt=[1, MASK])
    await complete(QWEN, prompt=[1, MASK])  # no mask token there
    (request,) = (await complete(LLADA, prompt="<|mask|>")).requests
    assert MASK not in request.prompt_token_ids


async def test_an_empty_prompt_is_refused():
    with pytest.raises(InvalidRequestError, match="at least one token"):
        await complete(prompt="")


async def test_min_tokens_above_the_limit():
    with pytest.raises(InvalidRequestError, match=r"0 to 4 .* got 5"):
        await chat(max_tokens=4, min_tokens=5)
