"""The loopback server against OpenAI's API reference and odd clients; the local pool's process."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests

import workers
from workers import (
    LOCAL,
    Handler,
    SpecialistHandler,
    load_pool,
    loopback_server,
    specialist,
)

ROOT = os.path.dirname(os.path.abspath(workers.__file__))
ASK = {
    "model": "calculator",
    "messages": [{"role": "user", "content": "Question:\nWhat is 6 * 7?"}],
}


@contextlib.contextmanager
def served(handler):
    """A running server with this handler: its address."""
    server = loopback_server(0, handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


class Parrot(Handler):
    """Ends a request in one of the ways that `complete` may."""

    models = ["parrot"]

    def complete(self, body):
        text = body["messages"][-1]["content"]
        if text == "bug":
            raise KeyError("a bug")
        if body.get("stream"):
            self.send_comment("busy")
        if text == "fail":
            return self.fail(502, "the workers are down", retry=False)
        self.reply(json.dumps(body["messages"]), "length", {"total_tokens": 3}, workflow=["who"])


@pytest.fixture(scope="module")
def parrot():
    with served(Parrot) as url:
        yield url


def post(url, body, path="/v1/chat/completions", **headers):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", **headers}
    return requests.post(url + path, data, headers=headers, timeout=60)


def say(text, **more):
    return {"model": "parrot", "messages": [{"role": "user", "content": text}], **more}


def request(body, version=b"1.1"):
    return (
        b"POST /v1/chat/completions HTTP/%s\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%s"
    ) % (version, len(body), body)


def raw(url, data):
    """All that the server answers to these bytes."""
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=60) as conn:
        conn.sendall(data)
        conn.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: conn.recv(1 << 16), b""))


def events(text):
    """The events of a stream that has ended as it should."""
    pieces = [piece for piece in text.split("\n\n") if piece.startswith("data: ")]
    assert pieces.pop() == "data: [DONE]"
    return [json.loads(piece.removeprefix("data: ")) for piece in pieces]


def test_a_completion():
    with served(SpecialistHandler) as url:
        answer = post(url, ASK).json()
    assert answer["choices"] == [
        {"index": 0, "message": {"role": "assistant", "content": "42"}, "finish_reason": "stop"}
    ]
    assert answer["usage"] == {"prompt_tokens": 6, "completion_tokens": 1, "total_tokens": 7}
    assert (answer["object"], answer["model"]) == ("chat.completion", "calculator")
    assert answer["id"].startswith("chatcmpl-") and abs(answer["created"] - time.time()) < 600


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
def test_a_stream_ends_with_its_connection(parrot, version):
    """First the role; comments; then the text, why it ended, the usage and extra fields."""
    body = json.dumps(say("hi", stream=True)).encode()
    head, _, text = raw(parrot, request(body, version)).decode().partition("\r\n\r\n")
    assert "Content-Type: text/event-stream" in head and "chunked" not in head
    first, last = events(text)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert text.index('"role"') < text.index(": busy\n\n") < text.index("hi")
    [choice] = last["choices"]
    assert "hi" in choice["delta"]["content"] and choice["finish_reason"] == "length"
    assert (last["object"], last["usage"]) == ("chat.completion.chunk", {"total_tokens": 3})
    assert last["workflow"] == ["who"]


def test_one_connection_serves_many_requests(parrot):
    get = b"GET /%s HTTP/1.1\r\nHost: localhost\r\n\r\n"
    answer = raw(
        parrot, get % b"health" + request(json.dumps(say("hi")).encode()) + get % b"health?deep=1"
    )
    assert answer.count(b"HTTP/1.1 200 OK") == 3 and answer.count(b'{"status": "ok"}') == 2
    cards = requests.get(parrot + "/v1/models", timeout=60).json()["data"]
    assert [card["id"] for card in cards] == ["parrot"]


@pytest.mark.parametrize(
    "content, text",
    [
        (None, ""),
        ("a", "a"),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "a\nb"),
    ],
)
def test_what_clients_send_becomes_plain_text(parrot, content, text):
    body = say("x", temperature=0, tools=[], user="me")
    body["messages"] = [
        {"role": "developer", "content": "So."},
        {"role": "user", "content": content},
    ]
    told = json.loads(post(parrot, body).json()["choices"][0]["message"]["content"])
    assert told == [{"role": "system", "content": "So."}, {"role": "user", "content": text}]


@pytest.mark.parametrize(
    "body, headers, status, says",
    [
        (say("x", model="cat"), {}, 404, "no model 'cat'.*parrot"),
        (say("x", model=["a"]), {}, 404, "no model"),
        ({"model": "parrot"}, {}, 400, "messages"),
        (say("x", messages=[]), {}, 400, "messages"),
        (say("x", messages=["Hi."]), {}, 400, "messages"),
        (say("x", messages="Hi."), {}, 400, "messages"),
        (say("x", messages=[{"role": "tool", "content": "x"}]), {}, 400, "a role is one of system"),
        (say([{"type": "image_url"}]), {}, 400, "TEXT"),
        (say(3), {}, 400, "TEXT"),
        (b"", {}, 400, "expected"),
        (b"[" * 100_000, {}, 400, "expected"),
        (b"\xff", {}, 400, "expected"),
        (
            say("x"),
            {"Content-Type": "text/plain"},
            403,
            "Content-Type: application/json",
        ),  # from any web page
        (say("x"), {"Host": "attacker.example"}, 403, "Host: localhost"),
        (say("x"), {"Host": "127.0.0.1.attacker.example"}, 403, "Host"),
        (say("fail"), {}, 502, "workers are down"),
        (say("bug"), {}, 500, "KeyError: 'a bug'"),
    ],
    ids=str,
)
def test_errors_are_worded_as_openai_words_them(parrot, body, headers, status, says):
    answer = post(parrot, body, **headers)
    error = answer.json()["error"]
    assert answer.status_code == status and re.search(says, error["message"])
    assert error["type"] == ("server_error" if status >= 500 else "invalid_request_error")
    assert answer.headers.get("x-should-retry") == ("false" if status >= 500 else None)


def test_paths_that_are_not_there_and_odd_lengths(parrot):
    for path in ("/", "/v1", "/v1/models/parrot", "/v1/chat/completions"):
        assert "GET /health" in requests.get(parrot + path, timeout=60).json()["error"]["message"]
    assert post(parrot, {}, "/v1/completions").status_code == 404
    for length in (b"-5", b"ten", b"99999999999"):
        odd = request(b"{}").replace(b"Content-Length: 2", b"Content-Length: " + length)
        answer = raw(parrot, odd)
        assert b"a Content-Length" in answer and answer.count(b"HTTP/1.1") == 1


def test_an_error_ends_a_stream(parrot):
    text = post(parrot, say("fail", stream=True)).text
    last = text.split("\n\n")[-2]
    assert json.loads(last.removeprefix("data: "))["error"]["message"] == "the workers are down"
    assert "[DONE]" not in text


def test_a_client_that_hangs_up_is_seen():
    waits, gone = threading.Event(), threading.Event()

    class Slow(Handler):
        models = ["slow"]

        def complete(self, body):
            if not self.hung_up():
                waits.set()
            while not self.hung_up():
                time.sleep(0.01)
            gone.set()

    with (
        served(Slow) as url,
        socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as conn,
    ):
        conn.sendall(request(json.dumps(say("x", model="slow")).encode()))
        assert waits.wait(60) and not gone.is_set()
        conn.close()
        assert gone.wait(60)


def test_a_local_pool_is_free_and_answers_over_http():
    pool = load_pool("local:pairs", budget=1.0)
    assert [one.name for one in pool] == LOCAL["local:pairs"] and workers.probable_cost(
        pool, 1
    ) == 0
    for one in pool:
        reply = one.chat(ASK["messages"])
        assert (reply.text, reply.cost) == (specialist(one.name, ASK["messages"]), 0.0)
    assert all(reply.text for reply in workers.ping_workers(pool))
    assert load_pool("local")[0].base_url == pool[0].base_url  # One server a process.
    assert load_pool("local", "http://127.0.0.1:9/v1")[0].base_url == "http://127.0.0.1:9/v1"


def test_simultaneous_first_callers_get_one_and_the_same_result():
    together, made = threading.Barrier(8), []

    @workers.once
    def make():
        time.sleep(0.01)  # Long enough for the others to come.
        made.append(object())
        return made[-1]

    def call(_):
        together.wait(60)
        return make()

    with ThreadPoolExecutor(8) as callers:
        assert set(callers.map(call, range(8))) == {*made}
    assert len(made) == 1


def test_the_server_imports_no_torch_and_gets_no_key():
    code = """if True:
        import os, sys, workers
        os.environ["OPENAI_API_KEY"] = "sk-planted"
        url, process = workers.local_server()
        print("torch" in sys.modules, open(f"/proc/{process.pid}/environ").read())"""
    if not os.path.exists("/proc/self/environ"):
        pytest.skip("shows another process's environment by /proc")
    shown = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True, timeout=120)
    assert shown.startswith("False ") and "PATH=" in shown and "planted" not in shown


@pytest.mark.parametrize("death", [None, signal.SIGKILL, signal.SIGINT])
def test_the_server_ends_with_its_parent(death):
    # A shell's background job ignores SIGINT, and so would this.
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); import workers; "
        "print(workers.local_server()[0], flush=True); input()"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    port = int(re.search(r":(\d+)/", parent.stdout.readline())[1])
    with socket.create_connection(("127.0.0.1", port), timeout=120) as conn:
        parent.stdin.close() if death is None else parent.send_signal(death)
        with contextlib.suppress(ConnectionError):
            assert conn.recv(1) == b""  # The connection ends with the server.
    parent.wait(120)
