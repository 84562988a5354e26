"""A real server with API keys: who gets in, what floods and slow clients cost, and who may talk to its Ray cluster."""

from __future__ import annotations

import json
import os
import pickle
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import psutil
import pytest
from running_server import GOLDEN, Server, engine, serve

ENV_KEY, FILE_KEY, NEW_KEY = "env-key-of-these-tests", "file-key-of-these-tests", "new-key-of-these-tests"
ENV = "BLOCKSERVE_E2E_KEYS"
BODY_TIMEOUT_S = 3.0
BODY = {
    "model": "qwen",
    "prompt": [65, 66, 67, 68] * 8,
    "max_tokens": 900,
    "temperature": 0,
    "ignore_eos": True,
}


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(f"# a comment\n{FILE_KEY}\n")
    return file


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, key_file: Path) -> Iterator[Server]:
    config = {
        "security": {"api_keys_env": ENV, "api_keys_file": str(key_file)},
        "admission": {"body_timeout_s": BODY_TIMEOUT_S, "max_live_requests": 8},
        "models": [
            {
                "name": "qwen",
                "path": str(GOLDEN / "qwen3_dense_untied"),
                "engine": engine("torch", max_num_seqs=2),
                "resources": {"num_cpus": 0.5},
            }
        ],
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ENV, ENV_KEY)
        for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
            patch.delenv(name, raising=False)
        with serve(config, tmp_path_factory.mktemp("server")) as running:
            running.client.headers["authorization"] = f"Bearer {ENV_KEY}"
            yield running
            assert ENV_KEY not in running.log.read_text()


@pytest.fixture(autouse=True)
def works_afterwards(server: Server) -> Iterator[None]:
    yield
    server.wait_idle("qwen")
    answer = server.client.post("/v1/completions", json=BODY | {"max_tokens": 3})
    assert answer.status_code == 200, answer.text


# --- API keys -----------------------------------------------------------------------------------------------


def test_the_openai_client_with_a_right_and_a_wrong_key(server: Server) -> None:
    for key in (ENV_KEY, FILE_KEY):
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)
        assert [model.id for model in client.models.list()] == ["qwen"]
        stream = client.completions.create(model="qwen", prompt="ab", max_tokens=3, stream=True)
        assert list(stream)[-1].choices[0].finish_reason in ("stop", "length")
    wrong = openai.OpenAI(base_url=f"{server.url}/v1", api_key="a-wrong-key-of-these-tests", max_retries=0)
    with pytest.raises(openai.AuthenticationError) as caught:
        wrong.completions.create(model="qwen", prompt="ab")
    assert caught.value.code == "invalid_api_key"


def test_probes_and_page_are_open_and_nothing_else_is(server: Server) -> None:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        for path in ("/health", "/ready", "/"):
            assert client.get(path).status_code == 200
        for path in ("/v1/models", "/v1/models/qwen", "/metrics", "/version", "/openapi.json", "/nothing"):
            assert client.get(path).status_code == 401
        response = client.post("/v1/completions", json=BODY)
        assert (response.status_code, response.headers["www-authenticate"]) == (401, "Bearer")


def test_a_key_file_is_read_again(server: Server, key_file: Path) -> None:
    def status(key: str) -> int:
        return httpx.get(f"{server.url}/v1/models", headers={"authorization": f"Bearer {key}"}).status_code

    assert (status(FILE_KEY), status(NEW_KEY)) == (200, 401)
    other = key_file.with_name("other")
    other.write_text(NEW_KEY)
    other.replace(key_file)
    deadline = time.monotonic() + 20
    while status(NEW_KEY) != 200:
        assert time.monotonic() < deadline, "the new key is not taken"
        time.sleep(0.2)
    assert (status(FILE_KEY), status(ENV_KEY)) == (401, 200)
    key_file.write_text(FILE_KEY)


def test_no_file_of_the_ray_session_holds_a_key_or_a_prompt(server: Server) -> None:
    prompt = "a prompt that nobody logs"
    assert server.client.post("/v1/completions", json=BODY | {"prompt": prompt, "max_tokens": 3}).is_success
    raylet = _process(server, "raylet")
    session = re.search(r"--session_dir=(\S+)|session-dir=(\S+)", " ".join(raylet.cmdline()))
    assert session is not None
    files = [file for file in (Path(session[1] or session[2]) / "logs").rglob("*") if file.is_file()]
    assert len(files) > 5
    for file in files:
        text = file.read_text(errors="replace")
        for secret in (ENV_KEY, FILE_KEY, prompt):
            assert secret not in text, file


def test_unusable_keys_end_the_start_with_one_line(tmp_path: Path, server: Server) -> None:
    config = {"applications": [{"name": "b", "import_path": "deployments.app:build", "args": {
        "security": {"api_keys_env": "BLOCKSERVE_E2E_MISSING"},
        "models": [{"name": "qwen", "path": str(GOLDEN / "qwen3_dense_untied")}]}}]}  # fmt: skip
    file = tmp_path / "config.yaml"
    file.write_text(json.dumps(config))
    command = [sys.executable, "-m", "deployments.cli", "serve", str(file), "--port", "31999"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 1
    assert done.stderr == (
        "blockserve: security.api_keys_env: the environment variable BLOCKSERVE_E2E_MISSING is not set\n"
    )


# --- floods and slow clients --------------------------------------------------------------------------------


def raw(server: Server, head: bytes, body: bytes = b"", pause_s: float = 0.0) -> tuple[int, bytes]:
    """Status and everything received for bytes written as they are, byte by byte if there is a pause."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(head)
        received = b""
        try:
            for byte in body:
                connection.sendall(bytes([byte]))
                time.sleep(pause_s)
            # `connection: close` in these requests: the server ends it.
            while data := connection.recv(65536):
                received += data
        except ConnectionError:
            received += connection.recv(65536) if not received else b""
    return int(received.split(b" ", 2)[1]), received


def head_of(*lines: bytes, first: bytes = b"GET /v1/models HTTP/1.1", key: str | None = ENV_KEY) -> bytes:
    fields = [first, b"host: x", b"connection: close", *lines]
    if key is not None:
        fields.append(f"authorization: Bearer {key}".encode())
    return b"\r\n".join(fields) + b"\r\n\r\n"


POST = b"POST /v1/completions HTTP/1.1"


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (head_of(b"x-large: " + b"x" * 1_000_000), 431),
        (head_of(*(b"x-%d: 1" % i for i in range(10_000))), 431),
        (head_of(first=b"GET /v1/models/" + b"x" * 1_000_000 + b" HTTP/1.1"), 400),
        (head_of(first=b"GET /v1/models?" + b"x" * 65_400 + b" HTTP/1.1"), 200),
        (head_of(first=b"GET /v1/models/..%2f..%2fetc%2fpasswd HTTP/1.1"), 404),
        (head_of(first=b"GARBAGE"), 400),
        # What Serve's proxy itself would obey, or fail on.
        (head_of(b"x-request-id: " + b"x" * 50_000), 200),
        (head_of(b"x-request-id: \xff\xfe"), 200),
        (head_of(b"serve_multiplexed_model_id: \xff"), 200),
        (head_of(b"x-session-id: \xff"), 200),
        (head_of(b"x-request-timeout-seconds: \xff"), 200),
        (head_of(b"x-request-timeout-seconds: 0.000001"), 200),
        (head_of(b"x-other: \xff"), 200),
        (head_of(first=b"GET /v1/models/%ff HTTP/1.1"), 404),
    ],
    ids=range(14),
)
def test_floods_and_odd_headers(server: Server, head: bytes, status: int) -> None:
    given, received = raw(server, head)
    assert given == status, received[:500]
    assert len(received) < 5000


@pytest.mark.parametrize("framing", [b"content-length: 100000", b"transfer-encoding: chunked"])
@pytest.mark.parametrize("slowly", [False, True])
def test_a_body_that_does_not_come_is_408(server: Server, framing: bytes, slowly: bool) -> None:
    head = head_of(b"content-type: application/json", framing, first=POST)
    body = (
        b'fffff\r\n{"model": "qwen", "prompt": "'
        if b"chunked" in framing
        else b'{"model": "qwen", "prompt": "'
    )
    started = time.monotonic()
    status, received = raw(server, head, body[:20] if slowly else b"", pause_s=0.1)
    assert status == 408, received
    assert b"body_timeout" in received
    assert time.monotonic() - started >= BODY_TIMEOUT_S


def test_a_client_that_leaves_within_its_body(server: Server) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    for _ in range(20):
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(
                head_of(b"content-type: application/json", b"content-length: 1000", first=POST) + b"{"
            )


def test_a_wrong_key_is_refused_before_the_body(server: Server) -> None:
    head = head_of(b"content-type: application/json", b"content-length: 100000", first=POST, key="x" * 20)
    started = time.monotonic()
    assert raw(server, head)[0] == 401
    assert time.monotonic() - started < BODY_TIMEOUT_S


def test_clients_that_do_not_read_hold_no_slot(server: Server) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    options = {"continuous_usage_stats": True}  # some 400 bytes for each token
    body = json.dumps(BODY | {"stream": True, "stream_options": options}).encode()
    before = server.total("generation_tokens_total", "qwen")
    idle = []
    for _ in range(2):
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((host, int(port)))
        length = b"content-length: %d" % len(body)
        connection.sendall(head_of(b"content-type: application/json", length, first=POST) + body)
        idle.append(connection)
    deadline = time.monotonic() + 120
    while server.total("generation_tokens_total", "qwen") < before + 2 * 900:
        assert time.monotonic() < deadline, "the engine has not finished"
        time.sleep(0.3)
    # All connections are still open, and nothing runs.
    server.wait_idle("qwen")
    assert server.client.post("/v1/completions", json=BODY | {"max_tokens": 3}).status_code == 200
    for connection in idle:
        connection.close()


@pytest.mark.parametrize("header", ["x-request-disconnect-disabled", "X-Request-Disconnect-Disabled"])
def test_a_client_cannot_switch_off_that_its_leaving_counts(server: Server, header: str) -> None:
    for _ in range(4):
        with server.client.stream(
            "POST",
            "/v1/completions",
            json=BODY | {"stream": True, "max_tokens": 1900},
            headers={header: "?1"},
        ) as response:
            assert next(response.iter_raw())
    server.wait_idle("qwen")


# --- the Ray cluster ----------------------------------------------------------------------------------------

# Ray would also replace the address that it is given by that of a network card, where nothing listens.
CONNECT = """
from ray._private import services
services.resolve_ip_for_localhost = lambda host: host
import ray
ray.init(address='{}', log_to_driver=False)
print('CONNECTED', len(ray.nodes()))
"""


def _process(server: Server, name: str) -> psutil.Process:
    found = [p for p in psutil.Process(server.process.pid).children(recursive=True) if p.name() == name]
    assert len(found) == 1
    return found[0]


def connect(server: Server, **environment: str) -> str:
    """What a process that tries to join the server's cluster prints."""
    gcs = _process(server, "gcs_server")
    ports = [c.laddr.port for c in gcs.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run(
        [sys.executable, "-c", CONNECT.format(f"127.0.0.1:{ports[0]}")],
        env=kept | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    "environment",
    [
        {"RAY_AUTH_MODE": "disabled"},
        {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64},
        {},  # the token file of the home directory, if there is one
    ],
    ids=["no token", "another token", "the user's own"],
)
def test_nobody_joins_the_cluster_without_its_token(server: Server, environment: dict[str, str]) -> None:
    printed = connect(server, **environment)
    assert "CONNECTED" not in printed
    assert re.search(r"(?i)unauthenticated|authentication|token", printed), printed[-2000:]


def test_the_clusters_own_token_lets_in(server: Server) -> None:
    """So that the test above fails for the right reason; the token is in the environment of the user's processes."""
    environment = _process(server, "raylet").environ()
    token = environment["RAY_AUTH_TOKEN"]
    assert environment["RAY_AUTH_MODE"] == "token"
    assert re.fullmatch("[0-9a-f]{64}", token)
    assert token not in server.log.read_text()
    assert token not in " ".join(_process(server, "raylet").cmdline())
    assert "CONNECTED 1" in connect(server, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=token)


def listening(server: Server) -> list[tuple[psutil.Process, str, int]]:
    found = []
    root = psutil.Process(server.process.pid)
    for process in [root, *root.children(recursive=True)]:
        for connection in process.net_connections("inet"):
            if connection.status == psutil.CONN_LISTEN:
                found.append((process, connection.laddr.ip, connection.laddr.port))
    return found


def test_all_ports_are_on_loopback_except_those_of_replicas(server: Server) -> None:
    """Serve binds a replica's own gRPC server to all interfaces; it asks for the token, see below."""
    everywhere = [
        " ".join(process.cmdline())
        for process, ip, _ in listening(server)
        if ip not in ("127.0.0.1", "::1", "::ffff:127.0.0.1")
    ]
    assert len(listening(server)) > 8
    assert len(everywhere) == 2, everywhere
    assert all("ServeReplica" in title for title in everywhere)


class _Bomb:
    """Unpickling it makes a file."""

    def __init__(self, file: Path) -> None:
        self.file = str(file)

    def __reduce__(self):
        return open, (self.file, "w")


def test_a_replicas_port_unpickles_nothing_without_the_token(server: Server, tmp_path: Path) -> None:
    import grpc
    from ray.serve.generated import serve_pb2, serve_pb2_grpc

    ports = [port for _, ip, port in listening(server) if ip in ("::", "0.0.0.0")]
    assert ports
    token = _process(server, "raylet").environ()["RAY_AUTH_TOKEN"]
    bomb = tmp_path / "made"
    request = serve_pb2.ASGIRequest(pickled_request_metadata=pickle.dumps(_Bomb(bomb)))
    for port in ports:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = serve_pb2_grpc.ASGIServiceStub(channel)
            for metadata in ([], [("authorization", "Bearer " + "0" * 64)]):
                with pytest.raises(grpc.RpcError) as caught:
                    stub.HandleRequest(request, metadata=metadata, timeout=20)
                assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
                assert not bomb.exists()
    # The token is all that keeps it out.
    with grpc.insecure_channel(f"127.0.0.1:{ports[0]}") as channel:
        stub = serve_pb2_grpc.ASGIServiceStub(channel)
        with pytest.raises(grpc.RpcError):  # the file is no metadata
            stub.HandleRequest(request, metadata=[("authorization", f"Bearer {token}")], timeout=20)
    assert bomb.exists()
