"""The loopback server against what OpenAI's API reference says, and against clients that misbehave."""
import contextlib
import json
import socket
import threading
import time

import pytest
import requests

import workers
from workers import Handler, Server, SpecialistHandler

CHAT = [{"role": "user", "content": "Question:\nWhat is 6 * 7?"}]
ASK = {"model": "calculator", "messages": CHAT}


@contextlib.contextmanager
def served(handler):
    """A running server with this handler: its address."""
    server = Server(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="module")
def url():
    with served(SpecialistHandler) as url:
        yield url


class Parrot(Handler):
    """Says what it is asked, in one of the ways that `complete` may end."""
    models = ["parrot", "a/b c"]

    def complete(self, body):
        text = body["messages"][-1]["content"]
        if text == "bug":
            raise KeyError("a bug")
        if text == "fail":
            return self.fail(502, "the workers are down", retry=False)
        if text == "fail midway":
            self.send_chunk({"content": "Well"})
            return self.fail(502, "the workers are down")
        self.reply(text, "stop", {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3})


@pytest.fixture(scope="module")
def parrot():
    with served(Parrot) as url:
        yield url


def post(url, body, path="/v1/chat/completions", **headers):
    data = body if isinstance(body, (bytes, str)) else json.dumps(body)
    return requests.post(
        url + path, data=data, headers={"Content-Type": "application/json", **headers}, timeout=20
    )


def error(answer):
    return answer.json()["error"]["message"]


def raw(url, data):
    """What the server answers to these bytes until it closes the connection."""
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=20) as conn:
        conn.sendall(data)
        conn.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: conn.recv(1 << 16), b""))


def until(condition):
    """Wait for what must happen soon."""
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def events(answer):
    """The events of a stream, which must end with [DONE]."""
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_a_completion(url):
    answer = post(url, ASK).json()
    assert (
        answer["object"] == "chat.completion"
        and answer["id"].startswith("chatcmpl-")
        and answer["model"] == "calculator"
    )
    assert answer["choices"] == [
        {"index": 0, "message": {"role": "assistant", "content": "42"}, "finish_reason": "stop"}]
    assert answer["usage"] == {"prompt_tokens": 6, "completion_tokens": 1, "total_tokens": 7}
    assert abs(answer["created"] - time.time()) < 60


def test_a_stream(url):
    plain = events(post(url, {**ASK, "stream": True}))
    full = events(post(url, {**ASK, "stream": True, "stream_options": {"include_usage": True}}))
    assert [event["choices"] for event in plain] == [
        [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}],
        [{"index": 0, "delta": {"content": "42"}, "finish_reason": None}],
        [{"index": 0, "delta": {}, "finish_reason": "stop"}]]
    assert len({event["id"] for event in plain}) == 1 and plain[0]["object"] == "chat.completion.chunk"
    assert full[3]["choices"] == [] and full[3]["usage"]["total_tokens"] == 7 and len(full) == 4
    assert post(url, {**ASK, "stream": True}).headers["Content-Type"] == "text/event-stream"


def test_models_health_and_paths(url, parrot):
    with requests.Session() as session:  # all on one connection
        def get(path):
            return session.get(parrot + path, timeout=20)
        assert get("/health").json() == {"status": "ok"} and get("/health?deep=1").ok
        assert [card["id"] for card in get("/v1/models?limit=9").json()["data"]] == ["parrot", "a/b c"]
        assert get("/v1/models/a%2Fb%20c").json()["id"] == get("/v1/models/a/b%20c").json()["id"] == "a/b c"
        for path in ("/", "/v1", "/v1/models/", "/v1/models/cat", "/v1/chat/completions", "/healthy"):
            assert get(path).status_code == 404 and "GET /health" in error(get(path)), path
        assert session.post(parrot + "/v1/completions", json={}, timeout=20).status_code == 404
        assert session.post(
            parrot + "/v1/chat/completions?x=1", json={**ASK, "model": "parrot"}, timeout=20
        ).ok
    answer = session.put(parrot + "/v1/models", json={}, timeout=20)
    assert answer.status_code == 501 and "PUT" in error(answer)


@pytest.mark.parametrize(
    "change, status, says",
    [
        ({"model": "cat"}, 404, "no model 'cat'"),
        ({"model": 3}, 400, "model"),
        ({"messages": []}, 400, "at least one"),
        ({"messages": "Hi."}, 400, "a list"),
        ({"messages": ["Hi."]}, 400, "role"),
        ({"messages": [{"role": "tool"}]}, 400, "role"),
        ({"messages": [{"role": "user", "content": 3}]}, 400, "text"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, 400, "text"),
        ({"tools": [{"type": "function"}]}, 400, "tools is not supported"),
        ({"n": 2}, 400, "n: expected a number from 1 to 1"),
        ({"top_k": 3}, 400, "top_k is not supported"),
        ({"max_tokens": 0}, 400, "max_tokens: expected"),
        ({"logprobs": True}, 400, "logprobs is not supported"),
        ({"response_format": {"type": "json_object"}}, 400, "response_format"),
    ],
)
def test_what_is_not_supported_is_said(url, change, status, says):
    answer = post(url, {**ASK, **change})
    assert answer.status_code == status and says in error(answer)


@pytest.mark.parametrize(
    "change",
    [
        {
            "tools": [],
            "n": 1,
            "logprobs": False,
            "stream": None,
            "stream_options": None,
            "temperature": 0.3,
            "user": "me",
        },
        {"response_format": {"type": "text"}},
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "Question:"},
                        {"type": "text", "text": "What is 6 * 7?"},
                    ],
                }
            ]
        },
    ],
)
def test_what_clients_send_is_taken(url, change):
    assert post(url, {**ASK, **change}).json()["choices"][0]["message"]["content"] == "42"


def test_null_content_and_the_developers_role(parrot):
    talk = [{"role": "developer", "content": "Be brief."}, {"role": "assistant", "content": None}]
    assert (
        post(parrot, {"model": "parrot", "messages": talk}).json()["choices"][0]["message"]["content"] == ""
    )
    assert workers.plain_chat({"model": "parrot", "messages": talk})["messages"] == [
        {"role": "system", "content": "Be brief."}, {"role": "assistant", "content": ""}]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"3",
        b"\xff",
        b"[" * 1_000_000,
        b'{"model": ' + b"9" * 10_000 + b"}",
        b'{"a":' * 100_000,
    ],
    ids=lambda body: repr(body[:9]),
)
def test_a_body_that_is_no_chat(url, body):
    answer = post(url, body)
    assert answer.status_code == 400 and "expected" in error(answer)


def test_only_json_from_this_machine(url):
    assert post(url, ASK, **{"Content-Type": "text/plain"}).status_code == 415
    for host in (
        "attacker.example",
        "127.0.0.1.attacker.example",
        "localhost.attacker.example:80",
        "[::1",
        "",
    ):
        answer = post(url, ASK, Host=host)
        assert answer.status_code == 403 and "Host" in error(answer), host
    assert (
        requests.get(url + "/v1/models", headers={"Host": "attacker.example"}, timeout=20).status_code == 403
    )
    for host in ("localhost", "localhost:8765", "127.0.0.1", "127.1.2.3:1", "[::1]:8765"):
        assert post(url, ASK, Host=host).ok, host


def test_an_upload_in_chunks_is_refused_and_is_not_the_next_request(url):
    inner = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    answer = raw(url, head + b"%x\r\n%s\r\n0\r\n\r\n" % (len(inner), inner))
    assert answer.startswith(b"HTTP/1.1 411 Length Required\r\n") and answer.count(b"HTTP/1.1") == 1
    assert b"\r\nConnection: close\r\n" in answer
    answer = requests.post(url + "/v1/chat/completions", data=iter([b"x" * 100_000] * 20), timeout=20)
    assert answer.status_code == 411


@pytest.mark.parametrize(
    "head, status",
    [
        (b"Content-Length: 99999999999999", 413),
        (b"Content-Length: 200000000", 413),
        (b"Content-Length: -5", 413),
        (b"Content-Length: ten", 413),
    ],
)
def test_odd_lengths(url, head, status):
    answer = raw(url, b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n" + head + b"\r\n\r\nxx")
    assert answer.startswith(b"HTTP/1.1 %d " % status) and answer.count(b"HTTP/1.1") == 1


def test_no_http(url):
    head, _, body = raw(url, b"EHLO mail.example\r\n\r\n").partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ") and json.loads(body)["error"]
    assert raw(url, b"") == b""


def test_failures(parrot, capfd):
    failed = post(parrot, {"model": "parrot", "messages": [{"role": "user", "content": "fail"}]})
    assert failed.status_code == 502 and failed.headers["x-should-retry"] == "false"
    assert failed.json()["error"]["type"] == "server_error" and error(failed) == "the workers are down"
    midway = post(
        parrot, {"model": "parrot", "messages": [{"role": "user", "content": "fail midway"}], "stream": True}
    )
    assert (
        midway.ok
        and json.loads(midway.text.split("\n\n")[2].removeprefix("data: "))["error"]["message"]
        == "the workers are down"
    )
    assert "[DONE]" not in midway.text and capfd.readouterr().err == ""
    bug = post(parrot, {"model": "parrot", "messages": [{"role": "user", "content": "bug"}]})
    assert bug.status_code == 500 and bug.headers["x-should-retry"] == "false"
    assert "KeyError: 'a bug'" in capfd.readouterr().err  # whoever runs the server sees where


def test_who_has_gone_when_it_is_refused_leaves_no_traceback():
    """Of a connection that the client has reset, shutdown says that there is none."""
    handler = Parrot.__new__(Parrot)
    handler.connection = socket.socket()  # it was never connected
    handler.fail = lambda status, message: None
    with handler.connection:
        handler.refuse(403, "expected a loopback address as Host")
    assert handler.close_connection


def test_a_client_that_hangs_up_is_seen_and_leaves_no_traceback(capfd):
    asked, go_on, seen = threading.Event(), threading.Event(), []

    class Slow(Handler):
        models = ["slow"]

        def complete(self, body):
            seen.append(self.hung_up())
            asked.set()
            go_on.wait(20)
            until(self.hung_up)
            seen.append(True)
            for _ in range(100):
                self.send_chunk({"content": "x" * 10_000})  # into nowhere
            seen.append("the stream went on")

        def finish(self):
            super().finish()
            seen.append("finished")

    with served(Slow) as url:
        with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=20) as conn:
            body = json.dumps({**ASK, "model": "slow", "stream": True}).encode()
            conn.sendall(
                b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
            )
            assert asked.wait(20)
        go_on.set()
        until(lambda: "finished" in seen)
    assert seen == [False, True, "finished"] and capfd.readouterr().err == ""


def test_many_clients_at_once_and_no_thread_is_left(url):
    before, answers = threading.active_count(), []

    def client(i):
        chat = [{"role": "user", "content": f"Question:\nWhat is {i} + 1?"}]
        answers.append((i, post(url, {**ASK, "messages": chat, "stream": bool(i % 2)}).text))
    threads = [threading.Thread(target=client, args=(i,)) for i in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(answers) == 64 and all(f'"content": "{i + 1}"' in text for i, text in answers)
    until(lambda: threading.active_count() <= before)


def test_head_has_no_body_and_the_host_may_be_in_capitals(url):
    answer = requests.head(url.removesuffix("/v1") + "/health", headers={"Host": "LOCALHOST"}, timeout=20)
    assert answer.status_code == 200 and answer.content == b"" and int(answer.headers["Content-Length"]) > 0


def test_a_stream_ends_in_its_last_chunk_and_the_connection_stays(url, parrot):
    """RFC 9112, 7.1: a client can tell a stream's end from a broken connection. HTTP/1.0 knows no chunks: there
    it ends with the connection."""
    with requests.Session() as session:
        for _ in range(3):
            answer = session.post(url + "/v1/chat/completions", json={**ASK, "stream": True}, timeout=20)
            assert len(events(answer)) == 3 and answer.headers["Transfer-Encoding"] == "chunked"
        assert session.post(url + "/v1/chat/completions", json=ASK, timeout=20).json()["object"] == "chat.completion"
        assert session.get(url + "/health", timeout=20).ok
        session.post(url + "/v1/chat/completions", json={**ASK, "stream": True}, timeout=20)
        assert session.get(url + "/v1/models/nobody", timeout=20).status_code == 404
        broken = {"model": "parrot", "messages": [{"role": "user", "content": "fail midway"}], "stream": True}
        assert "are down" in session.post(parrot + "/v1/chat/completions", json=broken, timeout=20).text
        assert session.post(parrot + "/v1/chat/completions", json={**broken, "stream": False}, timeout=20).ok
    body = json.dumps({**ASK, "stream": True}).encode()
    head = b"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    post_line = b"POST /v1/chat/completions HTTP/1.%d\r\n"
    assert raw(url, post_line % 1 + head + body).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    old = raw(url, post_line % 0 + head + body)
    assert old.endswith(b"\n\ndata: [DONE]\n\n") and b"chunked" not in old and b"Connection: close" in old
    assert b"X-Accel-Buffering: no" in old  # Else nginx would hold it back until it has ended.
