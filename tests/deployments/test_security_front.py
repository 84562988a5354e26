"""API keys, CORS and limits of the HTTP front, and what clients try to smuggle in."""

import asyncio
import contextlib
import json
import logging
import os
import pickle
import socket
import threading
import time

import httpx
import pytest
import uvicorn
from fake_dispatcher import FakeDispatcher, config_for, load_entry, says, up, validate

from configs.loader import ConfigError, parse_args
from configs.schema import SecurityConfig
from deployments.ingress import create_app
from deployments.openai import api_keys
from deployments.openai.api_keys import ApiKeysError, load_api_keys
from deployments.openai.metrics import request_logger
from replicas.protocol import RequestOutput

ENTRY = load_entry("llada2_b32", "m")
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
KEY, OTHER_KEY = "first-key-of-the-tests", "Second.key~of+the/tests="
ENV = "BLOCKSERVE_TEST_KEYS"
CORS = {"cors_allow_origins": ["https://chat.example"]}


@contextlib.asynccontextmanager
async def client_for(root_path="", dispatcher=None, admission=None, **security):
    dispatcher = dispatcher or FakeDispatcher(says(ENTRY, "fine"))
    dispatcher.states = {"m": up()}
    config = config_for(ENTRY, security=security, admission=admission or {})
    app = create_app(config, {"m": ENTRY}, dispatcher)
    transport = httpx.ASGITransport(app, root_path=root_path)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        client.app = app
        yield client


@pytest.fixture
def keys(monkeypatch):
    monkeypatch.setenv(ENV, f"# ours\n{KEY}, {OTHER_KEY}  # two of them\n\n")


def bearer(key):
    return {"authorization": f"Bearer {key}"}


def is_unauthorized(response):
    assert response.status_code == 401
    validate("ErrorResponse", response.json())
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
    assert response.headers["www-authenticate"] == "Bearer"


# --- API keys -----------------------------------------------------------------------------------------------

CLOSED = [
    ("POST", "/v1/chat/completions"), ("POST", "/v1/completions"), ("GET", "/v1/models"), ("GET", "/v1/models/m"),
    ("GET", "/metrics"), ("GET", "/version"), ("GET", "/openapi.json"), ("GET", "/nothing"), ("POST", "/health"),
    ("DELETE", "/ready"), ("OPTIONS", "/v1/models"), ("GET", "/health/"), ("GET", "/healthz"),
    ("POST", "/"),
]  # fmt: skip


@pytest.mark.parametrize(("method", "path"), CLOSED)
async def test_everything_but_probes_and_page_needs_a_key(keys, method, path):
    async with client_for(api_keys_env=ENV) as client:
        is_unauthorized(await client.request(method, path, json=CHAT))
        is_unauthorized(await client.request(method, path, json=CHAT, headers=bearer(KEY + "x")))
        response = await client.request(method, path, json=CHAT, headers=bearer(KEY))
        assert response.status_code != 401


@pytest.mark.parametrize("path", ["/", "/health", "/ready"])
async def test_probes_and_page_are_open(keys, path):
    async with client_for(api_keys_env=ENV) as client:
        assert (await client.get(path)).status_code == 200
        if path != "/":
            assert (await client.head(path)).status_code == 200


async def test_open_paths_behind_a_route_prefix(keys):
    async with client_for(root_path="/app", api_keys_env=ENV) as client:
        assert (await client.get("/app/health")).status_code == 200
        is_unauthorized(await client.get("/app/v1/models"))
        is_unauthorized(await client.get("/app/app/health"))


async def test_metrics_can_be_opened(keys):
    async with client_for(api_keys_env=ENV, metrics_open=True) as client:
        assert (await client.get("/metrics")).status_code == 200
        is_unauthorized(await client.get("/v1/models"))


@pytest.mark.parametrize("key", [KEY, OTHER_KEY])
@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
async def test_each_key_works_under_any_case_of_the_scheme(keys, key, scheme):
    async with client_for(api_keys_env=ENV) as client:
        headers = {"authorization": f"{scheme} {key}"}
        assert (await client.post("/v1/chat/completions", json=CHAT, headers=headers)).status_code == 200


@pytest.mark.parametrize(
    "value",
    ["", "Bearer", "Bearer ", KEY, f"Basic {KEY}", f"Bearer {KEY[:-1]}", f"Bearer {KEY},{OTHER_KEY}", "Bearer \xff",
     f"Bearer {KEY} {KEY}", f"Bearer {KEY.upper()}", "Bearer # ours", "Bearer " + "x" * 50_000],
)  # fmt: skip
async def test_what_is_no_key(keys, value):
    async with client_for(api_keys_env=ENV) as client:
        is_unauthorized(await client.get("/v1/models", headers={"authorization": value.encode("latin-1")}))


async def test_two_authorization_headers_are_refused(keys):
    async with client_for(api_keys_env=ENV) as client:
        headers = [("authorization", f"Bearer {KEY}"), ("authorization", "Bearer other")]
        is_unauthorized(await client.get("/v1/models", headers=headers))


async def test_every_key_is_compared(keys, monkeypatch):
    """No early exit: the first key takes as many comparisons as the last, or a wrong one."""
    compared = []
    real = api_keys.hmac.compare_digest
    monkeypatch.setattr(api_keys.hmac, "compare_digest", lambda a, b: compared.append(len(a)) or real(a, b))
    loaded = load_api_keys(SecurityConfig(api_keys_env=ENV))
    for key, accepted in ((KEY, True), (OTHER_KEY, True), ("x", False)):
        compared.clear()
        assert loaded.accepts(key.encode()) == accepted
        assert compared == [32, 32]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (None, "is not set"),
        ("", "holds no key"),
        (" , \n# only-a-comment-is-here\n", "holds no key"),
        ("short", "line 1: a key must be 16 to 512 characters"),
        (f"{KEY}\nwith a blank in it, yes", "line 2: a key must be"),
        ("x" * 513, "line 1"),
        ("schlüssel-schlüssel-schlüssel", "line 1"),
    ],
)
def test_unusable_keys_are_an_error_that_names_the_setting_and_no_key(monkeypatch, tmp_path, text, problem):
    file = tmp_path / "keys"
    if text is not None:
        monkeypatch.setenv(ENV, text)
        file.write_text(text)
    for setting, value in (("api_keys_env", ENV), ("api_keys_file", str(file))):
        with pytest.raises(ApiKeysError) as caught:
            create_app(config_for(ENTRY, security={setting: value}), {}, FakeDispatcher(says(ENTRY, "")))
        message = str(caught.value)
        assert message.startswith(f"security.{setting}: ")
        assert value in message
        if text is not None or setting == "api_keys_env":
            assert problem in message
        for word in (text or "").split():
            assert len(word) < 5 or word not in message.replace(value, "")


def test_keys_are_nowhere_to_be_seen(keys):
    config = config_for(ENTRY, security={"api_keys_env": ENV})
    loaded = load_api_keys(config.security)
    assert KEY not in f"{loaded!r} {loaded} {vars(loaded)} {config!r}"
    assert KEY.encode() not in pickle.dumps(config)
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(loaded)


def test_a_key_in_the_configuration_is_refused_and_not_repeated():
    for section in (
        {"api_keys": [KEY]},
        {"api_keys_env": KEY},
        {"api_keys_env": [KEY]},
        {"api_keys_file": [KEY]},
    ):
        with pytest.raises(ConfigError) as caught:
            parse_args({"models": [{"name": "m", "path": "p"}], "security": section})
        assert KEY not in str(caught.value)


async def test_a_file_is_read_again_when_it_changes(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(api_keys, "FILE_CHECK_PERIOD_S", 0.0)
    file = tmp_path / "keys"
    file.write_text(KEY)
    async with client_for(api_keys_file=str(file)) as client:

        async def status(key):
            return (await client.get("/v1/models", headers=bearer(key))).status_code

        assert (await status(KEY), await status(OTHER_KEY)) == (200, 401)
        new = tmp_path / "new"
        new.write_text(f"{OTHER_KEY}\n")
        os.replace(new, file)
        assert (await status(KEY), await status(OTHER_KEY)) == (401, 200)
        # An unusable file is no open door, and locks nobody out.
        for text in ("# none\n", "short\n"):
            file.write_text(text)
            assert (await status(KEY), await status(OTHER_KEY)) == (401, 200)
        file.unlink()
        assert (await status(KEY), await status(OTHER_KEY)) == (401, 200)
    assert "the keys read before stay valid" in caplog.text
    assert OTHER_KEY not in caplog.text


async def test_without_keys_configured_the_server_is_open():
    async with client_for() as client:
        assert (await client.get("/v1/models", headers=bearer("anything"))).status_code == 200
        assert (await client.get("/v1/models")).status_code == 200


async def test_no_log_holds_a_key_or_a_prompt(keys, caplog, monkeypatch):
    monkeypatch.setattr(request_logger, "propagate", True)
    with caplog.at_level(logging.DEBUG):
        async with client_for(api_keys_env=ENV) as client:
            body = CHAT | {
                "messages": [{"role": "user", "content": "my secret prompt"}],
                "odd": "secret value",
            }
            for key in (KEY, KEY + "wrong"):
                await client.post("/v1/chat/completions", json=body, headers=bearer(key))
                await client.post("/v1/chat/completions", json=body | {"n": 0}, headers=bearer(key))
    assert "request_finished" in caplog.text
    for word in (KEY, "secret", "fine"):
        assert word not in caplog.text


# --- CORS ---------------------------------------------------------------------------------------------------

PREFLIGHT = {"origin": "https://chat.example", "access-control-request-method": "POST",
             "access-control-request-headers": "authorization,content-type,x-stainless-lang"}  # fmt: skip


def cors_headers(response):
    return {name: value for name, value in response.headers.items() if name.startswith("access-control-")}


async def test_no_cors_headers_by_default():
    async with client_for() as client:
        for response in (
            await client.options("/v1/chat/completions", headers=PREFLIGHT),
            await client.post("/v1/chat/completions", json=CHAT, headers={"origin": "https://chat.example"}),
            await client.get("/", headers={"origin": "null"}),
        ):
            assert cors_headers(response) == {}


async def test_a_preflight_needs_no_key_and_the_request_does(keys):
    async with client_for(api_keys_env=ENV, **CORS) as client:
        preflight = await client.options("/v1/chat/completions", headers=PREFLIGHT)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == "https://chat.example"
        assert "x-stainless-lang" in preflight.headers["access-control-allow-headers"]
        origin = {"origin": "https://chat.example"}
        refused = await client.post("/v1/chat/completions", json=CHAT, headers=origin)
        is_unauthorized(refused)
        answered = await client.post("/v1/chat/completions", json=CHAT, headers=origin | bearer(KEY))
        assert answered.status_code == 200
        for response in (refused, answered):  # the page may read both
            assert response.headers["access-control-allow-origin"] == "https://chat.example"
            assert response.headers["vary"] == "Origin"
            assert "access-control-allow-credentials" not in response.headers


async def test_other_origins_and_methods_are_refused_in_the_envelope():
    async with client_for(**CORS) as client:
        for change, text in (({"origin": "https://evil.example"}, "origin"),
                             ({"access-control-request-method": "DELETE"}, "method")):  # fmt: skip
            response = await client.options("/v1/models", headers=PREFLIGHT | change)
            assert response.status_code == 400
            validate("ErrorResponse", response.json())
            assert text in response.json()["error"]["message"]
        assert (
            "access-control-allow-origin"
            not in (await client.get("/v1/models", headers={"origin": "https://evil.example"})).headers
        )


async def test_an_unforeseen_error_has_cors_headers_and_the_envelope():
    def explode(_):
        raise RuntimeError("inside")
        yield

    async with client_for(dispatcher=FakeDispatcher(explode), **CORS) as client:
        origin = {"origin": "https://chat.example"}
        response = await client.post("/v1/chat/completions", json=CHAT, headers=origin)
    assert response.status_code == 500
    assert "inside" not in response.text
    assert response.headers["access-control-allow-origin"] == "https://chat.example"


@pytest.mark.parametrize("origin", ["chat.example", "https://chat.example/", "https://*.example", "", "null"])
def test_what_is_no_origin_is_named(origin):
    with pytest.raises(ConfigError, match="cors_allow_origins"):
        parse_args({"models": [{"name": "m", "path": "p"}], "security": {"cors_allow_origins": [origin]}})


# --- limits -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/health", {"x-large": "x" * 1_000_000}, 431),
        ("/v1/models", {f"x-{i}": "" for i in range(10_000)}, 431),
        ("/v1/models", {"x-request-id": "x" * 1_000_000}, 431),
        ("/v1/models", {"x" * 70_000: "1"}, 431),
        ("/v1/models/" + "x" * 1_000_000, {}, 414),
        ("/v1/models?" + "x" * 1_000_000, {}, 414),
        ("/v1/models/" + "%41" * 30_000, {}, 414),
    ],
)
async def test_headers_and_urls_are_bounded(path, headers, status):
    async with client_for() as client:
        # Not httpx's URL, which has a limit of its own.
        scope_path, _, query = path.partition("?")
        response = await asgi_get(client.app, scope_path, query, headers)
        assert response["status"] == status
        validate("ErrorResponse", json.loads(response["body"]))
        assert len(response["body"]) < 1000
        assert (b"connection", b"close") in response["headers"]
        # Just below the limit is fine.
        assert (await client.get("/health", headers={"x-large": "x" * 60_000})).status_code == 200


async def asgi_get(app, path, query="", headers=(), host="test"):
    sent = []
    raw = [(b"host", host.encode("latin-1"))]
    raw += [(name.lower().encode(), value.encode()) for name, value in dict(headers).items()]
    scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "GET", "scheme": "http",
             "path": path, "raw_path": path.encode(),
             "query_string": query.encode(), "root_path": "", "headers": raw, "client": None,
             "server": ("test", 80)}  # fmt: skip

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message):
        sent.append(message)

    await app(scope, receive, send)
    return {"status": sent[0]["status"], "headers": sent[0]["headers"],
            "body": b"".join(message.get("body", b"") for message in sent[1:])}  # fmt: skip


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize"]
)
async def test_a_body_that_does_not_come_is_408(path):
    dispatcher = FakeDispatcher(says(ENTRY, "fine"))
    async with client_for(dispatcher=dispatcher, admission={"body_timeout_s": 0.3}) as client:

        async def slowly():
            for byte in b'{"model": "m", "prompt": "a long wait"}':
                await asyncio.sleep(0.05)
                yield bytes([byte])

        response = await client.post(path, content=slowly(), headers={"content-type": "application/json"})
        assert response.status_code == 408
        validate("ErrorResponse", response.json())
        assert response.json()["error"]["code"] == "body_timeout"
        assert response.headers["connection"] == "close"
        assert dispatcher.requests == []


def test_a_client_that_does_not_read_loses_its_slot():
    """On a socket, with an endless stream: only the write timeout can end it."""

    def endless(request):
        token = ENTRY.encoder.encode_text("x")
        while True:
            yield RequestOutput(request.request_id, token * 64)

    dispatcher = FakeDispatcher(endless)
    app = create_app(config_for(ENTRY, admission={"write_timeout_s": 0.5}), {"m": ENTRY}, dispatcher)
    with serving(app) as address, socket.socket() as idle:
        idle.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        idle.connect(address)
        body = json.dumps(CHAT | {"stream": True}).encode()
        head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        idle.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        wait_until(lambda: dispatcher.live == 1)
        wait_until(lambda: dispatcher.live == app.state.admission.live_requests("m") == 0)
        metrics = httpx.get(f"http://{address[0]}:{address[1]}/metrics").text
    assert 'blockserve:request_failure_total{code="slow_consumer",model_name="m"} 1.0' in metrics


@contextlib.contextmanager
def serving(app):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(
            uvicorn.Config(app, log_level="critical", lifespan="off", timeout_graceful_shutdown=1)
        )
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        wait_until(lambda: server.started)
        yield listener.getsockname()
        server.should_exit = True
        thread.join()


def wait_until(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


# --- injection ----------------------------------------------------------------------------------------------

NASTY = [
    "../../etc/passwd",
    "{{7*7}}",
    "<script>alert(1)</script>",
    "m\r\nx-evil: 1",
    "\x00",
    "é" * 1000,
    "%2e%2e",
]


@pytest.mark.parametrize("name", NASTY)
async def test_a_models_name_is_only_a_name(name):
    async with client_for() as client:
        posted = await client.post("/v1/chat/completions", json=CHAT | {"model": name})
        got = await asgi_get(client.app, "/v1/models/" + name)
        got = httpx.Response(got["status"], headers=got["headers"], content=got["body"])
        for response in (posted, got):
            assert response.status_code == 404
            # No route matches a line end.
            unknown_path = f"Unknown path: GET {'/v1/models/' + name!a}"
            by_route = response is got and "\n" in name
            expected = unknown_path if by_route else f"The model {name[:128]!a} does not exist"
            assert response.json()["error"]["message"] == expected
            assert response.headers["content-type"] == "application/json"
            assert "x-evil" not in response.headers


@pytest.mark.parametrize("path", ["/v1/models/..%2f..%2fhealth", "/v1/models/%2e%2e/%2e%2e/health"])
async def test_an_encoded_path_leads_nowhere_else(path):
    async with client_for() as client:
        response = await client.get(path)
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize("host", ["[", "evil/../x", "a b", "\xff", ""])
async def test_the_host_header_is_not_parsed_nor_reflected(host):
    async with client_for() as client:
        response = await asgi_get(client.app, "/nothing/é", host=host)
        assert response["status"] == 404
        assert json.loads(response["body"])["error"]["message"] == "Unknown path: GET '/nothing/\\xe9'"


async def test_a_clients_keys_are_bounded_in_param():
    async with client_for() as client:
        key = "<b>\n" + "x" * 100_000
        response = await client.post("/v1/chat/completions", json=CHAT | {"logit_bias": {key: 101}})
        assert response.status_code == 400
        param = response.json()["error"]["param"]
        assert param.startswith("logit_bias.'<b>\\n")
        assert len(response.text) < 1000


async def test_a_template_of_the_client_is_refused():
    async with client_for() as client:
        response = await client.post("/v1/chat/completions", json=CHAT | {"chat_template": "{{ 7*7 }}"})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "chat_template"


@pytest.mark.parametrize(
    "name",
    ["chat_template", "messages", "conversations", "self", "tokenize", "__class__", "_x", "", "a.b", "a b", "é",
     "x" * 100, "raise_exception"],
)  # fmt: skip
async def test_template_variables_that_are_not_the_clients(name):
    dispatcher = FakeDispatcher(says(ENTRY, "fine"))
    async with client_for(dispatcher=dispatcher) as client:
        body = CHAT | {"chat_template_kwargs": {name: "{{ 7*7 }}"}}
        response = await client.post("/v1/chat/completions", json=body)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "chat_template_kwargs"
        assert dispatcher.requests == []


@pytest.mark.parametrize(
    "text",
    [
        "{{''.__class__.__mro__}}",
        "{% for i in range(10**9) %}x{% endfor %}",
        "{{ cycler.__init__.__globals__ }}",
    ],
)
async def test_template_code_in_any_text_stays_text(text):
    dispatcher = FakeDispatcher(says(ENTRY, "fine"))
    async with client_for(dispatcher=dispatcher) as client:
        body = CHAT | {
            "messages": [{"role": "user", "content": text, "name": text}],
            "chat_template_kwargs": {"thinking": text, "loop_count": 10**12, "items": [text] * 10_000},
        }
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
    assert ENTRY.encoder.decode(dispatcher.requests[0].prompt_token_ids) == f"<user>{text}<assistant>"


@pytest.mark.parametrize("depth", [100, 250, 400, 600, 800, 900, 950, 2000])
@pytest.mark.parametrize("escape", ["", r"\ud83d\ude00"])
@pytest.mark.parametrize("padding", [0, 70_000])
async def test_deep_nesting_is_a_400_at_most(depth, escape, padding):
    """Long bodies are parsed in a thread, whose stack is short."""
    chat = '"messages": [{"role": "user", "content": "x"}]'
    dispatcher = FakeDispatcher(says(ENTRY, "fine"))
    async with client_for(dispatcher=dispatcher) as client:
        for path, start, field in (
            ("chat/completions", chat, '"chat_template_kwargs": {"a": %s}'),
            ("chat/completions", chat, '"odd": %s'),
            ("chat/completions", chat, '"tools": [{"a": %s}], "tool_choice": "none"'),
            ("responses", '"input": "x"', '"text": {"format": {"type": "text", "x": %s}}'),
            ("responses", '"input": "x", "stream": true', '"text": {"format": {"type": "text", "x": %s}}'),
            ("tokenize", '"prompt": "x"', '"odd": %s'),
        ):
            deep = field % ('{"a":' * depth + f'"{escape}"' + "}" * depth)
            body = f'{{"model": "m", {start}, "user": "{"u" * padding}", {deep}}}'
            response = await client.post(
                "/tokenize" if path == "tokenize" else f"/v1/{path}",
                content=body,
                headers={"content-type": "application/json"},
            )
            assert response.status_code in (200, 400), response.text
            if depth > 256:
                assert "nested too deeply" in response.text
            if response.status_code == 200 and "stream" in start:
                assert "response.completed" in response.text
        assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200


async def test_a_pickle_is_only_a_body_that_is_no_json():
    class Evil:
        def __reduce__(self):
            return os._exit, (3,)

    async with client_for() as client:
        for kind, status in (("application/json", 400), ("application/octet-stream", 415)):
            response = await client.post(
                "/v1/chat/completions", content=pickle.dumps(Evil()), headers={"content-type": kind}
            )
            assert response.status_code == status
