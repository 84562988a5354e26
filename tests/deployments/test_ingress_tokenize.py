"""``/tokenize`` and ``/detokenize``: the very tokens that a generation would get. And ``/openapi.json``."""

import jsonschema
import pytest
from fake_dispatcher import FakeDispatcher, http_client, load_entry, says, validate
from tool_templates import tool, with_tools

QWEN = with_tools(load_entry("qwen2_5", "m"))
LLADA = load_entry("llada2_b32", "llada")
ENTRIES = {"m": QWEN, "llada": LLADA}
MESSAGES = [{"role": "user", "content": "Grüße <|role_end|>"}]


@pytest.fixture
def dispatcher():
    return FakeDispatcher(says(QWEN, "fine"))


@pytest.fixture
async def client(dispatcher):
    async with http_client(dispatcher, *ENTRIES.values()) as client:
        yield client


async def post(client, path, body):
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("model", ["m", "llada"])
async def test_a_prompt_and_back(client, dispatcher, model):
    text = "Grüße 👨‍👩‍👧 <|mask|>"
    answer = await post(client, "/tokenize", {"model": model, "prompt": text})
    assert answer["count"] == len(answer["tokens"]) > 0
    assert answer["max_model_len"] == ENTRIES[model].capabilities.max_model_len
    assert answer["token_strs"] is None
    back = await post(client, "/detokenize", {"model": model, "tokens": answer["tokens"]})
    assert back == {"prompt": text}
    await post(client, "/v1/completions", {"model": model, "prompt": text})
    assert list(dispatcher.requests[0].prompt_token_ids) == answer["tokens"]


async def test_a_chat(client, dispatcher):
    body = {"model": "m", "messages": MESSAGES, "tools": [tool("add", x={"type": "integer"})]}
    answer = await post(client, "/tokenize", body | {"return_token_strs": True})
    await post(client, "/v1/chat/completions", body)
    assert list(dispatcher.requests[0].prompt_token_ids) == answer["tokens"]
    assert len(answer["token_strs"]) == answer["count"]
    assert answer["token_strs"] == QWEN.tokenizer.convert_ids_to_tokens(answer["tokens"])
    without = await post(client, "/tokenize", body | {"add_generation_prompt": False})
    assert without["tokens"] == answer["tokens"][: without["count"]]
    text = await post(client, "/detokenize", {"model": "m", "tokens": answer["tokens"][without["count"] :]})
    assert text == {"prompt": "<assistant>"}


async def test_special_tokens_are_part_of_a_text(client):
    (eos,) = QWEN.info.eos_token_ids[:1]
    answer = await post(client, "/detokenize", {"model": "m", "tokens": [eos]})
    assert answer == {"prompt": QWEN.tokenizer.convert_ids_to_tokens(eos)}
    assert await post(client, "/detokenize", {"model": "m", "tokens": []}) == {"prompt": ""}


async def test_an_empty_prompt_has_no_tokens(client):
    answer = await post(client, "/tokenize", {"model": "m", "prompt": "", "add_special_tokens": False})
    assert (answer["count"], answer["tokens"]) == (0, [])


@pytest.mark.parametrize(
    ("path", "fields", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, 400, "prompt"),
        ("/tokenize", {"prompt": 5}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "model": "nope"}, 404, "model"),
        ("/tokenize", {"prompt": "a" * 3_000_000}, 400, "prompt"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"messages": MESSAGES, "add_special_tokens": True}, 400, "add_special_tokens"),
        ("/tokenize", {"messages": MESSAGES, "tools": [tool("add")], "model": "llada"}, 400, "tools"),
        (
            "/tokenize",
            {"messages": MESSAGES, "chat_template_kwargs": {"tools": []}},
            400,
            "chat_template_kwargs",
        ),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": "abc"}, 400, "tokens"),
        ("/detokenize", {"tokens": [1, -1]}, 400, "tokens"),
        ("/detokenize", {"tokens": [2**40]}, 400, "tokens"),
        ("/detokenize", {"tokens": [1.5]}, 400, "tokens[0]"),
    ],
)
async def test_what_is_wrong_is_named(client, path, fields, status, param):
    response = await client.post(path, json={"model": "m"} | fields)
    assert response.status_code == status, response.text
    validate("ErrorResponse", response.json())
    assert response.json()["error"]["param"] == param


async def test_the_own_document_describes_every_answer(client):
    document = (await client.get("/openapi.json")).json()
    assert document["openapi"].startswith("3.1")

    def schema_of(path, status):
        content = document["paths"][path]["post"]["responses"][status]["content"]
        return content["application/json"]["schema"] | {"components": document["components"]}

    bodies = {
        "/v1/chat/completions": {"model": "m", "messages": MESSAGES},
        "/v1/completions": {"model": "m", "prompt": "a"},
        "/v1/responses": {"model": "m", "input": "a"},
        "/tokenize": {"model": "m", "prompt": "a", "return_token_strs": True},
        "/detokenize": {"model": "m", "tokens": [1]},
    }
    for path, body in bodies.items():
        request = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        request |= {"components": document["components"]}
        jsonschema.Draft202012Validator(request).validate(body)
        jsonschema.Draft202012Validator(schema_of(path, "200")).validate(await post(client, path, body))
        bad = await client.post(
            path, json={"model": "nope"} | {k: v for k, v in body.items() if k != "model"}
        )
        jsonschema.Draft202012Validator(schema_of(path, "4XX")).validate(bad.json())
    assert all(
        "422" not in operation["responses"] for p in document["paths"].values() for operation in p.values()
    )
