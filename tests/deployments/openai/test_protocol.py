import logging

import pytest
from pydantic import ValidationError

from deployments.openai.errors import from_validation
from deployments.openai.protocol import ChatCompletionRequest, CompletionRequest

CHAT = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
COMPLETION = {"model": "m", "prompt": "x"}


def problem(model, body):
    with pytest.raises(ValidationError) as caught:
        model.model_validate(body)
    return from_validation(caught.value)


@pytest.mark.parametrize(
    ("field", "value", "allowed", "given"),
    [
        ("n", 0, "equal to 1", "0"),
        ("n", -1, "equal to 1", "-1"),
        ("n", 129, "equal to 128", "129"),
        ("n", "2", "integer", "'2'"),
        ("n", 1.5, "integer", "1.5"),
        ("n", True, "integer", "True"),
        ("temperature", -1, "equal to 0", "-1"),
        ("temperature", 3, "equal to 2", "3"),
        ("temperature", 1e308, "equal to 2", "1e+308"),
        ("temperature", float("nan"), "finite", "nan"),
        ("temperature", "1", "number", "'1'"),
        ("top_p", 1.01, "equal to 1", "1.01"),
        ("top_k", -2, "equal to -1", "-2"),
        ("max_tokens", 0, "equal to 1", "0"),
        ("max_tokens", -1, "equal to 1", "-1"),
        ("max_tokens", 2**64, "equal to 9223372036854775807", str(2**64)),
        ("max_completion_tokens", 0, "equal to 1", "0"),
        ("min_tokens", -1, "equal to 0", "-1"),
        ("seed", 2**63, "equal to 9223372036854775807", str(2**63)),
        ("stream", "yes", "boolean", "'yes'"),
        ("stop", 5, "list", "5"),
        ("stop", ["a"] * 500_000, "at most 4", "500000"),
        ("stop", [""], "1 to 1024", ""),
        ("stop", "x" * 1025, "1 to 1024", ""),
        ("frequency_penalty", 2.1, "equal to 2", "2.1"),
        ("messages", [], "at least 1", "0"),
        ("messages", "x", "list", "'x'"),
        ("threshold", 1.5, "equal to 1", "1.5"),
        ("steps", 0, "equal to 1", "0"),
        ("editing_threshold", -0.1, "equal to 0", "-0.1"),
        ("max_post_steps", 1025, "equal to 1024", "1025"),
        ("eos_early_stop", 1, "boolean", "1"),
        ("top_logprobs", 21, "equal to 20", "21"),
        ("model", "", "at least 1 character", "''"),
    ],
)
def test_a_bad_value_is_refused_with_field_bounds_and_value(field, value, allowed, given):
    error = problem(ChatCompletionRequest, CHAT | {field: value})
    assert error.param == field
    assert error.message.startswith(f"`{field}`")
    assert allowed in error.message
    assert given in error.message
    assert len(error.message) < 300


@pytest.mark.parametrize(
    ("message", "param", "text"),
    [
        ("x", "messages[0]", "dictionary"),
        ({"role": "robot", "content": "x"}, "messages[0].role", "'assistant'"),
        ({"content": "x"}, "messages[0].role", "required"),
        ({"role": "user"}, "messages[0]", "content"),
        ({"role": "user", "content": None}, "messages[0]", "content"),
        ({"role": "user", "content": 5}, "messages[0].content", "string or a list"),
        ({"role": "user", "content": []}, "messages[0].content", "at least one"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages[0].content", "image_url"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content", "string"),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "messages[0].content", "input_audio"),
        ({"role": "tool", "content": "x"}, "messages[0]", "tool_call_id"),
    ],
)
def test_bad_messages(message, param, text):
    error = problem(ChatCompletionRequest, CHAT | {"messages": [message]})
    assert error.param == param
    assert text in error.message


@pytest.mark.parametrize("field", ["model", "messages"])
def test_a_missing_field_is_named(field):
    error = problem(ChatCompletionRequest, {k: v for k, v in CHAT.items() if k != field})
    assert (error.param, error.message) == (field, f"`{field}` is required")


def test_stream_options_need_a_stream():
    assert problem(ChatCompletionRequest, CHAT | {"stream_options": {}}).param == "stream_options"
    body = ChatCompletionRequest.model_validate(
        CHAT | {"stream": True, "stream_options": {"include_usage": True}}
    )
    assert body.stream_options.include_usage


def test_null_means_absent():
    nulls = dict.fromkeys(
        ["n", "temperature", "stop", "stream", "stream_options", "max_tokens", "seed", "logit_bias", "tools"]
    )
    assert ChatCompletionRequest.model_validate(CHAT | nulls) == ChatCompletionRequest.model_validate(CHAT)


def test_unknown_keys_are_accepted_and_logged(caplog):
    with caplog.at_level(logging.DEBUG):
        ChatCompletionRequest.model_validate(CHAT | {"a_new_thing": "secret"})
    assert "a_new_thing" in caplog.text
    assert "secret" not in caplog.text


def test_text_parts_and_tool_history():
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"function": {"name": "f", "arguments": '{"x": 1}'}}],
        },
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{broken"}}]},
        {"role": "tool", "content": "4", "tool_call_id": "c1"},
    ]
    body = ChatCompletionRequest.model_validate(CHAT | {"messages": messages})
    rendered = [message.for_template() for message in body.messages]
    assert rendered[0] == {"role": "system", "content": "a\nb"}
    assert rendered[1]["content"] == ""
    assert rendered[1]["tool_calls"][0]["function"]["arguments"] == {"x": 1}
    assert rendered[2]["tool_calls"][0]["function"]["arguments"] == "{broken"
    assert rendered[3] == {"role": "tool", "content": "4", "tool_call_id": "c1"}


def test_max_completion_tokens_wins():
    body = ChatCompletionRequest.model_validate(CHAT | {"max_tokens": 5, "max_completion_tokens": 7})
    assert body.new_token_limit == 7


@pytest.mark.parametrize(
    ("prompt", "parsed"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])],
)
def test_prompts(prompt, parsed):
    assert CompletionRequest.model_validate(COMPLETION | {"prompt": prompt}).prompt == parsed


@pytest.mark.parametrize(
    "prompt", [[], [None], [[]], [1, None], [1, "a"], 5, [True], [2**65], [1.5], {}, [{}]]
)
def test_bad_prompts(prompt):
    assert problem(CompletionRequest, COMPLETION | {"prompt": prompt}).param.startswith("prompt")
