"""Tests of workers.Server, against OpenAI's API reference, and of the local pool's process."""

import base64
import contextlib
import hashlib
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
    Refusal,
    Server,
    SpecialistHandler,
    load_pool,
    specialist,
)

ROOT = os.path.dirname(os.path.abspath(workers.__file__))
ASK = {
    "model": "calculator",
    "messages": [{"role": "user", "content": "Question:\nWhat is 6 * 7?"}],
}


@contextlib.contextmanager
def served(handler):
    """Yield the URL of a running server with this handler."""
    server = Server(0, handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


class Parrot(Handler):
    """A handler that answers with the messages. The texts "bug" and "fail" make it fail."""

    models = ["parrot"]

    def complete(self):
        text = self.body["messages"][-1]["content"]
        if text == "bug":
            raise KeyError("a bug")
        if self.body.get("stream"):
            self.send_comment("busy")
        if text == "fail":
            raise Refusal(502, "the workers are down")
        self.reply(
            json.dumps(self.body["messages"]), "length", {"total_tokens": 3}, workflow=["who"]
        )


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
        b"POST /v1/chat/completions HTTP/%s\r\nHost: localhost\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
    ) % (version, len(body), body)


def raw(url, data):
    """Send raw bytes to a server, and return everything that the server sends back."""
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=60) as conn:
        conn.sendall(data)
        conn.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: conn.recv(1 << 16), b""))


def events(text):
    """Return the events of a stream, and assert that the stream ends with [DONE]."""
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
    """The role comes first, then a comment, then the text with the finish reason and the usage."""
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
        (say(0), {}, 400, "TEXT"),
        (say(False), {}, 400, "TEXT"),
        (say({}), {}, 400, "TEXT"),
        (b"", {}, 400, "expected"),
        (b"[" * 100_000, {}, 400, "expected"),
        (b"\xff", {}, 400, "expected"),
        # The next four requests are of kinds that any web page can make a browser send.
        (say("x"), {"Content-Type": "text/plain"}, 415, "Content-Type: application/json"),
        (say("x"), {"Content-Type": None}, 415, "Content-Type: application/json"),
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
    for path in ("/", "/v1", "/v1/models/parrot/x", "/v1/chat/completions/"):
        answer = requests.get(parrot + path, timeout=60)
        assert answer.status_code == 404 and "there" in answer.json()["error"]["message"]
    assert post(parrot, {}, "/v1/completions").status_code == 404
    for length, status in ((b"-5", 411), (b"ten", 411), (b"99999999999", 413)):
        odd = request(b"{}").replace(b"Content-Length: 2", b"Content-Length: " + length)
        answer = raw(parrot, odd)
        assert b"a Content-Length" in answer and answer.count(b"HTTP/1.1") == 1
        assert answer.startswith(b"HTTP/1.1 %d" % status)


def test_a_model_has_a_card_of_its_own():
    with served(SpecialistHandler) as url:
        card = requests.get(f"{url}/v1/models/junior%20calculator", timeout=60).json()
        unknown = requests.get(f"{url}/v1/models/cat", timeout=60)
    assert (card["id"], card["object"]) == ("junior calculator", "model")
    assert unknown.status_code == 404 and "GET /v1/models" in unknown.json()["error"]["message"]


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "OPTIONS", "POST"])
def test_a_method_that_is_not_supported_gets_a_405_with_a_sentence(parrot, method):
    answer = requests.request(method, f"{parrot}/v1/models", timeout=60)
    assert answer.status_code == 405 and "GET" in answer.headers["Allow"]
    assert f"POST {workers.CHAT_PATH}" in answer.json()["error"]["message"]
    assert "Access-Control-Allow-Origin" not in answer.headers


def test_a_chat_is_posted_and_a_head_has_no_body(parrot):
    answer = requests.get(parrot + workers.CHAT_PATH, timeout=60)
    assert (answer.status_code, answer.headers["Allow"]) == (405, "POST")
    head = raw(parrot, b"HEAD /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200") and head.endswith(b"\r\n\r\n")
    unknown = raw(parrot, b"BREW /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert unknown.startswith(b"HTTP/1.1 501") and b"BREW" in unknown


def test_a_body_where_none_belongs_is_not_taken_for_a_request(parrot):
    get = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
    answer = raw(parrot, get + b"Content-Length: %d\r\n\r\n" % (len(get) + 2) + get + b"\r\n")
    assert answer.startswith(b"HTTP/1.1 413") and answer.count(b"HTTP/1.1") == 1


def test_an_error_ends_its_connection(parrot):
    """The body may be unread when an error is sent, and would then pass for the next request."""
    for method, path in ((b"PUT", b"/health"), (b"POST", b"/v1/completions"), (b"GET", b"/x")):
        answer = raw(parrot, b"%b %b HTTP/1.1\r\nHost: localhost\r\n\r\n" % (method, path) * 2)
        assert answer.count(b"HTTP/1.1") == 1 and b"\r\nConnection: close\r\n" in answer


def test_a_body_in_chunks_gets_a_411_with_a_sentence(parrot):
    for pieces in ([b"{}"], [b"x" * 65536] * 64):
        answer = requests.post(parrot + workers.CHAT_PATH, data=iter(pieces), timeout=60)
        assert answer.status_code == 411 and "Content-Length" in answer.json()["error"]["message"]


HOSTS = {
    "localhost": True,
    "LOCALHOST:8400": True,
    "127.0.0.1:1": True,
    "[::1]:8400": True,
    "evil.example": False,
    "127.0.0.1.evil.example": False,
    "localhost.evil.example:80": False,
    "127.0.0.1@evil.example": False,
    "0.0.0.0:8400": True,
    "localhost.": True,
    "evil.example/localhost": False,
    "": False,
}


@pytest.mark.parametrize("host, is_ours", HOSTS.items(), ids=HOSTS)
def test_the_host_is_checked_before_any_route(parrot, host, is_ours):
    """A website can make its domain name resolve to 127.0.0.1, but its pages must read nothing.

    The pages' requests carry the domain name as the Host.
    """
    for line in (b"GET /health", b"GET /v1/models", b"GET /", b"DELETE /x", b"POST /v1/chat"):
        answer = raw(parrot, b"%b HTTP/1.1\r\nHost: %b\r\n\r\n" % (line, host.encode()))
        assert answer.startswith(b"HTTP/1.1 403") != is_ours
        assert is_ours or b"Host: localhost" in answer and b"parrot" not in answer


def test_another_machine_needs_the_key():
    """Every path except the public ones requires the key.

    A server that other machines can reach accepts any Host.
    """

    class Open(Parrot):
        public_paths = ("/public",)

        def page(self, path):
            return {"page": path} if path == "/public" else super().page(path)

    for host in ("0.0.0.0", "", "192.0.2.1", "example.org"):
        with pytest.raises(ValueError, match="CONDUCTOR_API_KEY"):
            Server(0, Open, host)
    server = Server(0, Open, "0.0.0.0", "geheim-\u00e9")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    keys = {
        "Bearer geheim-\u00e9": 200,
        "Bearer  geheim-\u00e9": 401,
        "Bearer geheim": 401,
        "Bearer geheim-\u00e9\u00e9": 401,
        "Basic geheim-\u00e9": 401,
        "geheim-\u00e9": 401,
        "": 401,
    }
    for key, status in keys.items():
        headers = {"Authorization": key.encode(), "Host": "host.docker.internal"}
        for path in ("/health", "/v1/models", "/v1/models/parrot"):
            answer = requests.get(url + path, headers=headers, timeout=60)
            assert answer.status_code == status
        answer = post(url, say("hi"), **headers)
        assert answer.status_code == status and "geheim" not in answer.text
        assert status == 200 or answer.json()["error"]["code"] == "invalid_api_key"
        assert requests.get(f"{url}/public", headers=headers, timeout=60).status_code == 200
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    "asked, missing",
    [
        ({"n": 2}, "n=2: expected 1, .*single answer"),
        ({"tools": [{}], "tool_choice": "required"}, "tool calls"),
        ({"tools": [{}], "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool"),
        ({"functions": [{}], "function_call": {"name": "f"}}, "function calls"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"response_format": {"type": "json_object"}}, "response_format=.*json_object"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "formats"),
        ({"logprobs": True}, "log-probabilities"),
        ({"messages": say([{"type": "image_url", "image_url": {}}])["messages"]}, "image_url"),
        ({"messages": say([{"type": "input_audio"}])["messages"]}, "input_audio"),
        ({"stop": 5}, "stop"),
        ({"stop": ["a", None]}, "stop"),
        ({"stop": {"a": 1}}, "stop"),
        ({"stream": "yes"}, "stream.* true or false"),
        ({"stream": 1}, "stream"),
    ],
    ids=str,
)
def test_what_is_missing_is_named(parrot, asked, missing):
    answer = post(parrot, say("x") | asked)
    assert answer.status_code == 400 and re.search(missing, answer.json()["error"]["message"])


def test_parameters_that_ask_for_nothing_special_pass(parrot):
    for asked in (
        {"n": 1, "logprobs": False, "top_logprobs": 0, "response_format": {"type": "text"}},
        {"n": None, "tools": [{"type": "function"}], "tool_choice": "auto", "stop": None},
        {"tools": [], "tool_choice": "none", "modalities": ["text"], "stop": []},
        {"temperature": 0.3, "max_tokens": 5, "seed": 1, "stream_options": None, "new": {}},
        {"temperature": "hot", "max_tokens": -1, "stream": False},  # Some clients send -1.
        {"stop": ["a, b", "[", '"', "\\"], "frequency_penalty": -2.0, "presence_penalty": -0.5},
        dict.fromkeys([*workers.PARAMETERS]),  # each is null
    ):
        assert post(parrot, say("x", **asked)).status_code == 200


@pytest.mark.parametrize(
    "stop, text",
    [
        ("b", "a"),
        (["c", "b"], "a"),
        (["d"], "abcabc"),
        ("a", ""),
        ("", "abcabc"),
        (["", "ca"], "ab"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_stop_cuts_the_answer(stop, text, stream):
    class Alphabet(Handler):
        models = ["parrot"]

        def complete(self):
            self.reply("abcabc", "length")

    with served(Alphabet) as url:
        answer = post(url, say("x", stop=stop, stream=stream))
    choice = (events(answer.text)[-1] if stream else answer.json())["choices"][0]
    assert choice.get("delta", choice.get("message"))["content"] == text
    assert choice["finish_reason"] == ("length" if text == "abcabc" else "stop")


def test_usage_comes_in_a_chunk_of_its_own_where_it_is_asked_for(parrot):
    asked = say("hi", stream=True, stream_options={"include_usage": True})
    *_, answer, usage = events(post(parrot, asked).text)
    assert answer["choices"][0]["finish_reason"] == "length" and "usage" not in answer
    assert (usage["choices"], usage["usage"]) == ([], {"total_tokens": 3})
    assert usage["workflow"] == ["who"]


def test_a_chat_that_is_too_long_is_refused_at_once(parrot):
    answer = post(parrot, say("x" * 40_000_000))
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    body = request(b"").replace(b"Length: 0", b"Length: 100000000")
    assert raw(parrot, body).startswith(b"HTTP/1.1 413")


def test_one_timeout_ends_a_sender_that_stops():
    class Hasty(Parrot):
        timeout = 0.05

    with served(Hasty) as url:
        port = int(url.rpartition(":")[2])
        for sent in (request(b"{}")[:-1], b"GET /he"):
            with socket.create_connection(("127.0.0.1", port), timeout=60) as conn:
                conn.sendall(sent)
                assert conn.recv(1 << 16) == b""


def test_a_page_may_run_its_own_scripts_only():
    class Site(Parrot):
        def page(self, path):
            return b"<style>a {}</style><p>hi</p><script>\nrun()</script><script>x</script>"

    with served(Site) as url:
        answer = requests.get(f"{url}/", timeout=60)
    policy = answer.headers["Content-Security-Policy"]
    digest = base64.b64encode(hashlib.sha256(b"\nrun()").digest()).decode()
    assert re.search(f"script-src [^;]*'sha256-{re.escape(digest)}' 'sha256-", policy)
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert answer.headers["Content-Type"].startswith("text/html")


def test_a_bug_ends_the_connection_and_the_answer_says_so(parrot):
    """Without Connection: close, a client could send its next request on a dead connection."""
    answer = raw(parrot, request(json.dumps(say("bug")).encode()))
    assert answer.startswith(b"HTTP/1.1 500") and b"\r\nConnection: close\r\n" in answer


def test_a_bug_in_a_page_is_answered_with_500(capfd):
    class Buggy(Handler):
        def page(self, path):
            raise KeyError("a bug")

    with served(Buggy) as url:
        answer = requests.get(f"{url}/", timeout=60)
        assert answer.status_code == 500 and "KeyError: 'a bug'" in answer.text
    assert "KeyError: 'a bug'" in capfd.readouterr().err


def test_an_error_ends_a_stream(parrot):
    text = post(parrot, say("fail", stream=True)).text
    last = text.split("\n\n")[-2]
    assert json.loads(last.removeprefix("data: "))["error"]["message"] == "the workers are down"
    assert "[DONE]" not in text


def test_a_client_that_hangs_up_is_seen():
    waits, gone = threading.Event(), threading.Event()

    class Slow(Handler):
        models = ["slow"]

        def complete(self):
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
    assert load_pool("local")[0].base_url == pool[0].base_url  # All local pools share one server.


def test_simultaneous_first_callers_get_one_and_the_same_result():
    together, made = threading.Barrier(8), []

    @workers.once
    def make():
        time.sleep(0.01)  # Give the other callers time to arrive.
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
        pytest.skip("needs /proc to read another process's environment")
    shown = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True, timeout=120)
    assert shown.startswith("False ") and "PATH=" in shown and "planted" not in shown


@pytest.mark.parametrize("death", [None, signal.SIGKILL, signal.SIGINT])
def test_the_server_ends_with_its_parent(death):
    # If a shell script runs pytest in the background, pytest's children ignore SIGINT. Undo that.
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
            assert conn.recv(1) == b""  # The server has ended.
    parent.wait(120)
