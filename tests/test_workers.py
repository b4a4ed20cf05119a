"""Workers against servers that misbehave in every way; the wire formats of three protocols; keys, money, the local specialists."""
import email.utils
import json
import logging
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests

import workers
from workers import Reply, Worker, WorkerError, load_pool

ROOT = os.path.dirname(os.path.abspath(workers.__file__))
CHAT = [{"role": "user", "content": "Why?"}]
GOOD = {"choices": [{"message": {"role": "assistant", "content": "Because."}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 10, "completion_tokens": 2}}


def http(body, status=200, **headers):
    """A whole HTTP response as bytes; a body that is not bytes is sent as JSON."""
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    more = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    return f"HTTP/1.1 {status} Whatever\r\nContent-Length: {len(body)}\r\n{more}\r\n".encode() + body


class Rogue:
    """A server on raw sockets. play(n, conn) gets the number of the request and returns bytes to send, or does worse to conn and
    returns None, which ends the connection. .requests holds what came over the wire: (time, head, body)."""

    def __init__(self, play):
        self.play, self.requests, self.connections, self.open, self.most, self.lock = play, [], 0, 0, 0, threading.Lock()
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}/v1"

    def __enter__(self):
        threading.Thread(target=self.accept, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.listener.close()

    def accept(self):
        while True:
            try:
                conn, _ = self.listener.accept()
            except OSError:
                return
            self.connections += 1
            threading.Thread(target=self.serve, args=(conn,), daemon=True).start()

    def serve(self, conn):
        with conn, conn.makefile("rb") as file:
            try:
                while line := file.readline():
                    head = line
                    while line not in (b"\r\n", b""):
                        line = file.readline()
                        head += line
                    fields = dict(h.lower().split(": ", 1) for h in head.decode().strip().split("\r\n")[1:])
                    body = file.read(int(fields.get("content-length", 0)))
                    with self.lock:
                        n = len(self.requests)
                        self.requests.append((time.monotonic(), head.decode(), json.loads(body)))
                        self.open += 1
                        self.most = max(self.most, self.open)
                    answer = self.play(n, conn)
                    with self.lock:
                        self.open -= 1
                    if answer is None:
                        return
                    conn.sendall(answer)
            except OSError:
                pass  # the client gave up, as it should


def worker(server, **fields):
    return Worker(**{"protocol": "openai", "base_url": server.url, "model": "m", "timeout": 20, **fields})


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Backoff in milliseconds, no proxies."""
    monkeypatch.setattr(workers, "BACKOFF", 0.002)
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


# Faults


def drip(start, piece=b" "):
    def play(n, conn):
        conn.sendall(start)
        for _ in range(400):
            conn.sendall(piece)
            time.sleep(0.05)
    return play


def reset(n, conn):
    conn.sendall(http(GOOD)[:-20])
    conn.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # close() sends RST


def flood(n, conn):
    conn.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000000\r\n\r\n")
    for _ in range(100):
        conn.sendall(b"x" * 1_000_000)


HTML = b"<html><body><h1>Sorry, the model is away</h1></body></html>"
FAULTS = {  # name: play, attempts of two, what the error says
    "truncated JSON": (lambda n, c: http(json.dumps(GOOD).encode()[:-9]), 2, "no JSON object"),
    "HTML with 200": (lambda n, c: http(HTML), 2, "no JSON object"),
    "HTML with 502": (lambda n, c: http(HTML, 502), 2, "HTTP 502: <html>"),
    "empty body": (lambda n, c: http(b""), 2, "no JSON object"),
    "JSON list": (lambda n, c: http([GOOD]), 2, "no JSON object"),
    "100,000 brackets": (lambda n, c: http(b"[" * 100_000), 2, "no JSON object"),
    "not UTF-8": (lambda n, c: http(b'{"choices": "\xff\xfe\xfa"}'), 2, "no JSON object"),
    "200 with an error": (lambda n, c: http({"error": {"message": "upstream died", "code": 502}}), 2, "HTTP 502: upstream died"),
    "200 with an error's text": (lambda n, c: http({"error": "model is loading"}), 2, "model is loading"),
    "200 with a final error": (lambda n, c: http({"error": {"message": "too long", "code": 400}}), 1, "HTTP 400: too long"),
    "an error as choice": (lambda n, c: http({"choices": [{"error": "cut off", "message": {"content": "Bec"}}]}), 2, "cut off"),
    "no choices": (lambda n, c: http({"id": 1}), 2, "KeyError"),
    "empty choices": (lambda n, c: http({"choices": []}), 2, "IndexError"),
    "content of no text": (lambda n, c: http({"choices": [{"message": {"content": 42}}]}), 2, "TypeError"),
    "usage of no numbers": (lambda n, c: http({**GOOD, "usage": {"prompt_tokens": "ten"}}), 2, "TypeError"),
    "closed at once": (lambda n, c: None, 2, "connection failed"),
    "closed mid-body": (lambda n, c: c.sendall(http(GOOD)[:-20]), 2, "connection failed"),
    "reset mid-body": (reset, 2, "connection failed"),
    "no HTTP": (lambda n, c: b"220 mail.example ESMTP\r\n\r\n", 2, "connection failed"),
    "redirect": (lambda n, c: http(b"", 302, Location="http://127.0.0.1:9/v1"), 1, "HTTP 302"),
    "100 MB": (flood, 1, "larger than 32 MiB"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_become_errors_and_never_content(name):
    play, attempts, says = FAULTS[name]
    with Rogue(play) as server, pytest.raises(WorkerError, match=says) as caught:
        worker(server, name="jane", attempts=2).chat(CHAT)
    assert len(server.requests) == attempts
    assert str(caught.value).startswith("jane: ") and f"attempt {attempts}," in str(caught.value)


SLOW = {
    "hang": lambda n, conn: time.sleep(20),
    "hang mid-body": drip(http(GOOD)[:-20], b""),
    "drip of the body": drip(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n"),
    "drip of a chunked body": drip(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
    "drip of a body that the connection's end ends": drip(b"HTTP/1.1 200 OK\r\n\r\n" + json.dumps(GOOD).encode()),
    "drip of the headers": drip(b"HTTP/1.1 200 OK\r\nX-Long: ", b"x"),
    "100 Continue without end": drip(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
}


@pytest.mark.parametrize("name", SLOW)
def test_slow_servers_end_at_the_timeout_and_the_deadline(name):
    with Rogue(SLOW[name]) as server:
        begun = time.monotonic()
        with pytest.raises(WorkerError, match="no complete response within|connection failed: Read"):
            worker(server, timeout=0.3, attempts=1).chat(CHAT)
        one = time.monotonic() - begun
        with pytest.raises(WorkerError, match="no complete response within|connection failed: Read"):
            worker(server, timeout=0.3, deadline=0.8, attempts=99).chat(CHAT)
        assert 0.29 <= one < 3 and time.monotonic() - begun - one < 4
        assert 2 <= len(server.requests) <= 5  # one, and as many as begin within 0.8 s


@pytest.mark.parametrize("silent_in", ["head", "body"])
def test_a_slow_answer_is_one_reply_for_one_request(silent_in, monkeypatch):
    monkeypatch.setattr(workers, "CONNECT", 0.1)  # the limit of the connect, never of the answer
    answer = http(GOOD)

    def slow(n, conn):
        if silent_in == "body":
            conn.sendall(answer[:-10])
        time.sleep(0.4)
        return answer[-10:] if silent_in == "body" else answer

    with Rogue(slow) as server:
        assert worker(server).chat(CHAT).text == "Because."
        assert len(server.requests) == 1


def test_a_connection_that_cannot_be_cut_is_no_other_ones_trouble():
    """What urllib3 lays over a TLS proxy is no socket; one of which nothing is known has to be left to its own timeout."""
    odd = workers.Line()
    odd.sock = object()
    workers.ends[odd] = 0.0
    try:
        with Rogue(SLOW["drip of the body"]) as server, pytest.raises(WorkerError, match="no complete response within 0.3 s"):
            worker(server, timeout=0.3, attempts=1).chat(CHAT)
    finally:
        del workers.ends[odd]


def test_a_worker_that_is_down():
    with socket.create_server(("127.0.0.1", 0)) as s:
        url = f"http://127.0.0.1:{s.getsockname()[1]}/v1"
    with pytest.raises(WorkerError, match="gone: the connection failed.*attempt 3"):
        Worker("openai", url, "m", name="gone", attempts=3).chat(CHAT)


# Retries


@pytest.mark.parametrize("status", [408, 409, 429, 500, 502, 503, 504, 529])
def test_retried_until_it_works(status):
    with Rogue(lambda n, c: http({"error": {"message": "busy"}}, status) if n < 2 else http(GOOD)) as server:
        assert worker(server).chat(CHAT).text == "Because."
    assert len(server.requests) == 3 and len({json.dumps(body) for _, _, body in server.requests}) == 1


@pytest.mark.parametrize("status", [400, 401, 402, 403, 404, 413, 422])
def test_never_retried(status):
    with Rogue(lambda n, c: http({"error": {"message": "no"}}, status)) as server:
        with pytest.raises(WorkerError, match=f"HTTP {status}: no"):
            worker(server).chat(CHAT)
    assert len(server.requests) == 1


def test_backoff_doubles_with_full_jitter(monkeypatch):
    monkeypatch.setattr(workers, "BACKOFF", 0.1)
    drawn = []
    monkeypatch.setattr(workers.jitter, "uniform", lambda low, high: drawn.append((low, high)) or high)
    with Rogue(lambda n, c: http({}, 503)) as server, pytest.raises(WorkerError, match="attempt 4"):
        worker(server, attempts=4).chat(CHAT)
    assert drawn[:3] == [(0, 0.1), (0, 0.2), (0, 0.4)]
    times = [t for t, _, _ in server.requests]
    assert all(b - a >= wait for a, b, wait in zip(times, times[1:], (0.1, 0.2, 0.4)))


def test_the_experiments_random_numbers_are_left_alone():
    random.seed(5)
    expected = random.random()
    random.seed(5)
    with Rogue(lambda n, c: http({}, 500) if n == 0 else http(GOOD)) as server:
        worker(server).chat(CHAT)
    assert random.random() == expected


def test_retry_after_is_a_floor_and_read_anew():
    with Rogue(lambda n, c: http({}, 429, Retry_After=["0.2", "0.5"][n]) if n < 2 else http(GOOD)) as server:
        worker(server).chat(CHAT)
    a, b, c = [t for t, _, _ in server.requests]
    assert b - a >= 0.2 and c - b >= 0.5


def test_retry_after_beyond_the_deadline_fails_at_once():
    with Rogue(lambda n, c: http({"error": {"message": "later"}}, 429, Retry_After="3600")) as server:
        begun = time.monotonic()
        with pytest.raises(WorkerError, match="later"):
            worker(server).chat(CHAT)
    assert len(server.requests) == 1 and time.monotonic() - begun < 10


def test_retry_after_forms():
    assert workers.seconds_until("17") == 17 and workers.seconds_until(" 2.5 ") == 2.5
    assert 55 < workers.seconds_until(email.utils.formatdate(time.time() + 60, usegmt=True)) <= 60
    for bad in ("", "soon", "-5", "nan", "inf", "Wed, 99 Foo 2020", email.utils.formatdate(time.time() - 60, usegmt=True)):
        assert workers.seconds_until(bad) == 0


# Limits


def test_concurrency_is_per_worker_and_connections_are_kept():
    def play(n, conn):
        time.sleep(0.05)
        return http(GOOD)
    with Rogue(play) as server:
        w = worker(server, concurrency=3)
        threads = [threading.Thread(target=w.chat, args=(CHAT,)) for _ in range(18)]
        [t.start() for t in threads]
        [t.join() for t in threads]
    assert 2 <= server.most <= 3 >= server.connections and len(server.requests) == w.calls == 18


def test_requests_per_minute_count_retries():
    with Rogue(lambda n, c: http({}, 500) if n == 1 else http(GOOD)) as server:
        w = worker(server, rpm=600)
        threads = [threading.Thread(target=w.chat, args=(CHAT,)) for _ in range(4)]
        [t.start() for t in threads]
        [t.join() for t in threads]
    times = [t for t, _, _ in server.requests]
    assert len(times) == 5 and times[-1] - times[0] > 0.2  # 0.4 but for the jitter of the machine


def test_waiting_for_a_turn_takes_nothing_from_the_deadline():
    """Four calls are refused once; the turns of their second attempts come up to two seconds later, beyond the deadline of one."""
    with Rogue(lambda n, conn: http({}, 503) if n < 4 else http(GOOD)) as server, ThreadPoolExecutor(4) as threads:
        w = worker(server, rpm=150, deadline=1)
        assert [f.text for f in threads.map(lambda _: w.chat(CHAT), range(4))] == ["Because."] * 4


def test_half_an_emoji_is_no_text():
    """JSON can spell a lone surrogate, which nothing can encode: a question mark takes its place."""
    with Rogue(lambda n, conn: http(json.dumps(GOOD).replace("Because.", r"\ud83d!").encode())) as server:
        assert worker(server).chat(CHAT).text == "?!"


# Protocols: what goes over the wire, and what comes back

TALK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi."}, {"role": "assistant", "content": ""},
        {"role": "user", "content": "Why?"}]


def wire(protocol, response, messages=TALK, model="m", params=None, **fields):
    """One call: the request's first line and headers in lower case, its body, and the Reply."""
    with Rogue(lambda n, c: http(response)) as server:
        reply = worker(server, protocol=protocol, model=model, params=params or {}, **fields).chat(messages)
    [(_, head, body)] = server.requests
    return head.lower(), body, reply


def test_openai_on_the_wire(monkeypatch):
    monkeypatch.setenv("SOME_KEY", "sk-1")
    head, body, reply = wire("openai", GOOD, params={"max_tokens": 9, "top_k": 3}, api_key_env="SOME_KEY", price=[1, 10])
    assert head.startswith("post /v1/chat/completions http/1.1") and "\r\nauthorization: bearer sk-1\r\n" in head
    assert body == {"model": "m", "messages": TALK, "max_tokens": 9, "top_k": 3}
    assert (reply.text, reply.prompt_tokens, reply.completion_tokens, reply.finish) == ("Because.", 10, 2, "stop")
    assert reply.cost == pytest.approx(30e-6) and 0 < reply.seconds < 20
    head, _, _ = wire("openai", GOOD)
    assert "authorization" not in head


@pytest.mark.parametrize("model, reasons", [
    ("gpt-5", True), ("gpt-5-mini-2025-08-07", True), ("openai/gpt-5", True), ("o3", True),
    ("gpt-5-chat-latest", False), ("gpt-4o", False), ("Qwen/Qwen3-32B", False), ("olmo", False)])
def test_parameters_that_reasoning_models_reject(model, reasons):
    sampling = {"max_tokens": 9, "temperature": 0.2, "top_p": 0.8}
    _, body, _ = wire("openai", GOOD, CHAT, model, {**sampling, "reasoning_effort": "minimal"})
    assert body == {"model": model, "messages": CHAT, "reasoning_effort": "minimal",
                    **({"max_completion_tokens": 9} if reasons else sampling)}


def test_overrides_win_over_params():
    with Rogue(lambda n, c: http(GOOD)) as server:
        worker(server, params={"temperature": 0.2, "max_tokens": 5}).chat(CHAT, temperature=1.0)
    assert server.requests[0][2] == {"model": "m", "messages": CHAT, "temperature": 1.0, "max_tokens": 5}


def openai_choice(content, finish, **message):
    choice = {"message": {"role": "assistant", "content": content, **message}, "finish_reason": finish}
    return {"choices": [choice], "usage": None}


@pytest.mark.parametrize("response, text, finish", [
    (openai_choice(None, "length"), "", "length"), (openai_choice("", "stop"), "", "stop"),
    (openai_choice("Bec", "length"), "Bec", "length"), (openai_choice("", "content_filter"), "", "refusal"),
    (openai_choice(None, "stop", refusal="I will not."), "I will not.", "refusal"),
    (openai_choice("Hm.", None), "Hm.", "stop"), (openai_choice("Hm.", "tool_calls"), "Hm.", "tool_calls")])
def test_openai_replies_of_the_models_own(response, text, finish):
    _, _, reply = wire("openai", response, price=[1, 10])
    assert (reply.text, reply.finish) == (text, finish)
    assert reply.cost is None and reply.prompt_tokens == reply.completion_tokens == 0  # no usage: the cost is unknown, not zero


def claude(text, reason, **usage):
    return {"type": "message", "role": "assistant", "stop_reason": reason,
            "content": [{"type": "thinking", "thinking": "Hm.", "signature": "x"}] + [{"type": "text", "text": t} for t in text],
            "usage": {"input_tokens": 10, "output_tokens": 7, **usage}}


def test_anthropic_on_the_wire(monkeypatch):
    monkeypatch.setenv("SOME_KEY", "sk-1")
    response = claude(["Be", "cause."], "end_turn", cache_read_input_tokens=100, cache_creation_input_tokens=1000)
    head, body, reply = wire("anthropic", response, params={"temperature": 0.2}, api_key_env="SOME_KEY", price=[3, 15])
    assert head.startswith("post /v1/messages http/1.1") and "\r\nx-api-key: sk-1\r\n" in head
    assert "\r\nanthropic-version: 2023-06-01\r\n" in head and "authorization" not in head
    assert body == {"model": "m", "max_tokens": 4096, "temperature": 0.2, "system": "Be brief.", "messages": [
        TALK[1], {"role": "assistant", "content": "(empty)"}, TALK[3]]}  # the API refuses empty turns
    assert (reply.text, reply.prompt_tokens, reply.completion_tokens, reply.finish) == ("Because.", 1110, 7, "stop")
    assert reply.cost == pytest.approx((1110 * 3 + 7 * 15) / 1e6)
    _, body, _ = wire("anthropic", response, [*CHAT, {"role": "assistant", "content": " \n"}], params={"max_tokens": 64000})
    assert body["messages"][1]["content"] == "(empty)"  # nor blank ones
    assert "system" not in body and body["max_tokens"] == 64000


@pytest.mark.parametrize("text, reason, finish", [
    ([], "end_turn", "stop"), (["Bec"], "max_tokens", "length"), ([], "refusal", "refusal"), (["a"], "stop_sequence", "stop"),
    (["b"], "model_context_window_exceeded", "length")])
def test_anthropic_stop_reasons(text, reason, finish):
    _, _, reply = wire("anthropic", claude(text, reason))
    assert (reply.text, reply.finish) == ("".join(text), finish)


def test_anthropic_overloaded():
    error = {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}, "request_id": "req_1"}
    with Rogue(lambda n, c: http(error, [529, 200][n]) if n < 2 else http(claude(["Hi."], "end_turn"))) as server:
        assert worker(server, protocol="anthropic").chat(CHAT).text == "Hi."
    assert len(server.requests) == 3


def gemini(parts, reason):
    content = {"role": "model", **({} if parts is None else {"parts": parts})}
    return {"candidates": [{"content": content, "finishReason": reason}],
            "usageMetadata": {"promptTokenCount": 10, "candidatesTokenCount": 3, "thoughtsTokenCount": 40, "totalTokenCount": 53}}


def test_gemini_on_the_wire(monkeypatch):
    monkeypatch.setenv("SOME_KEY", "sk-1")
    response = gemini([{"text": "Hm.", "thought": True}, {"text": "Be"}, {"text": "cause."}], "STOP")
    head, body, reply = wire("gemini", response, api_key_env="SOME_KEY", price=[1, 10], params={
        "max_tokens": 9, "temperature": 0.2, "top_p": 0.8, "top_k": 3, "thinkingConfig": {"thinkingBudget": 128}})
    assert head.startswith("post /v1/models/m:generatecontent http/1.1") and "\r\nx-goog-api-key: sk-1\r\n" in head
    assert body == {"systemInstruction": {"parts": [{"text": "Be brief."}]}, "contents": [
        {"role": "user", "parts": [{"text": "Hi."}]}, {"role": "model", "parts": [{"text": "(empty)"}]},
        {"role": "user", "parts": [{"text": "Why?"}]}], "generationConfig": {
            "maxOutputTokens": 9, "temperature": 0.2, "topP": 0.8, "topK": 3, "thinkingConfig": {"thinkingBudget": 128}}}
    assert (reply.text, reply.prompt_tokens, reply.completion_tokens, reply.finish) == ("Because.", 10, 43, "stop")
    assert reply.cost == pytest.approx(440e-6)


@pytest.mark.parametrize("response, text, finish", [
    (gemini(None, "MAX_TOKENS"), "", "length"), (gemini([], "SAFETY"), "", "refusal"),
    (gemini([{"text": "Bec"}], "MAX_TOKENS"), "Bec", "length"),
    ({"candidates": [{"finishReason": "PROHIBITED_CONTENT"}]}, "", "refusal"),
    ({"promptFeedback": {"blockReason": "SAFETY"}, "usageMetadata": {"promptTokenCount": 4}}, "", "refusal")])
def test_gemini_finish_reasons(response, text, finish):
    _, _, reply = wire("gemini", response)
    assert (reply.text, reply.finish) == (text, finish)


@pytest.mark.parametrize("protocol, response", [
    ("gemini", {"usageMetadata": {}}), ("gemini", {"candidates": []}), ("anthropic", {"type": "message"})])
def test_a_response_that_is_none(protocol, response):
    with pytest.raises(WorkerError, match=f"not as {protocol} defines it"):
        wire(protocol, response, attempts=1)


# Keys

KEY = "sk-planted-0123456789"


@pytest.mark.parametrize("protocol", workers.PROTOCOLS)
def test_a_planted_key_appears_nowhere_but_in_its_header(protocol, monkeypatch, caplog, tmp_path):
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("PLANTED", KEY)
    told = []

    def play(n, conn):  # the provider repeats the request's headers in its error, as some do
        head = server.requests[n][1]
        return [http({"error": {"message": f"who are you? {head}"}}, 401), http(head.encode(), 500), http(head.encode()), None][n]
    with Rogue(play) as server:
        w = worker(server, protocol=protocol, api_key_env="PLANTED", attempts=1)
        w.replay = workers.Replay(str(tmp_path / "replay"))
        told.append(repr(w))
        for _ in range(4):
            with pytest.raises(WorkerError) as caught:
                w.chat(CHAT, nonce="1")
            told += [repr(caught.value), *traceback.format_exception(caught.value)]
    assert len(server.requests) == 4 and all(KEY in head and KEY not in json.dumps(body) for _, head, body in server.requests)
    assert "who are you" in "".join(told)
    assert KEY not in "".join(told) + caplog.text + (tmp_path / "replay").read_text() + json.dumps(w.params)


def test_a_key_that_is_no_header(monkeypatch):
    monkeypatch.setenv("PLANTED", KEY + "\n" + KEY)
    with Rogue(lambda n, c: http(GOOD)) as server, pytest.raises(WorkerError) as caught:
        worker(server, api_key_env="PLANTED", attempts=1).chat(CHAT)
    assert KEY not in "".join(traceback.format_exception(caught.value)) and not server.requests


@pytest.mark.parametrize("at", [370, 380, 390, 395, 400, 1990])
def test_no_half_of_a_key_where_the_error_is_cut(at, monkeypatch):
    monkeypatch.setenv("PLANTED", KEY)
    with Rogue(lambda n, c: http(b"x" * at + KEY.encode() + b"y" * 99, 400)) as server, pytest.raises(WorkerError) as caught:
        worker(server, api_key_env="PLANTED").chat(CHAT)
    assert KEY[:4] not in str(caught.value) and len(str(caught.value)) < 500


def test_keys_are_read_at_the_call_and_a_netrc_does_not_replace_them(monkeypatch, tmp_path):
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password secret\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.delenv("PLANTED", raising=False)
    with Rogue(lambda n, c: http(GOOD)) as server:
        w = worker(server, api_key_env="PLANTED")
        with pytest.raises(WorkerError, match="set PLANTED in the environment"):
            w.chat(CHAT)
        assert not server.requests
        monkeypatch.setenv("PLANTED", KEY)
        w.chat(CHAT)
    assert f"Authorization: Bearer {KEY}\r\n" in server.requests[0][1]


def test_the_specialists_server_gets_no_key():
    code = f"""if True:
        import os, workers
        os.environ["PLANTED"] = os.environ["OPENAI_API_KEY"] = {KEY!r}
        [w, *_] = workers.load_pool("local")
        assert workers.load_pool("local")[0].url == w.url
        print(open(f"/proc/{{workers.local_server()[1].pid}}/environ").read())"""
    if not os.path.exists("/proc/self/environ"):
        pytest.skip("shows another process's environment by /proc")
    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert shown.returncode == 0 and "PATH=" in shown.stdout and KEY not in shown.stdout, shown.stderr


# Proxies


def test_proxies_of_the_environment_serve_all_but_loopback(monkeypatch):
    with Rogue(lambda n, c: http(GOOD)) as proxy, Rogue(lambda n, c: http(GOOD)) as server:
        monkeypatch.setenv("HTTP_PROXY", proxy.url.removesuffix("/v1"))
        monkeypatch.setenv("http_proxy", proxy.url.removesuffix("/v1"))
        assert Worker("openai", "http://models.invalid/v1", "m").chat(CHAT).text == "Because."
        assert worker(server).chat(CHAT).text == "Because."
    assert proxy.requests[0][1].startswith("POST http://models.invalid/v1/chat/completions ")
    assert len(proxy.requests) == len(server.requests) == 1


# Money and replay


def test_spending_is_counted_and_the_unknown_is_not_zero():
    with Rogue(lambda n, c: http({**GOOD, "usage": None} if n == 2 else GOOD)) as server:
        w, free, unknown = worker(server, price=[1, 10]), worker(server, price=[0, 0]), worker(server)
        assert w.chat(CHAT).cost + w.chat(CHAT).cost == w.spent == pytest.approx(60e-6)
        assert w.chat(CHAT).cost is None and (w.calls, w.unpriced, w.spent) == (3, 1, pytest.approx(60e-6))
        assert free.chat(CHAT).cost == 0 and unknown.chat(CHAT).cost is None
        assert (free.spent, free.unpriced, unknown.spent, unknown.unpriced) == (0, 0, 0, 1)


def pool_file(tmp_path, entries):
    path = tmp_path / "pool.json"
    path.write_text(json.dumps(entries))
    return str(path)


def test_replay_makes_a_resumed_run_free(tmp_path):
    def play(n, conn):
        return http({**GOOD, "choices": [{"message": {"content": f"answer {n} \u2028 \r\n é"}, "finish_reason": "stop"}]})

    def five(a, b):
        return [a.chat(CHAT, nonce="r0"), a.chat(CHAT, nonce="r1"), b.chat(CHAT, nonce="r0"),
                a.chat(CHAT, nonce="r0", temperature=1), a.chat([*CHAT, *CHAT], nonce="r0")]
    replay = str(tmp_path / "replay")
    with Rogue(play) as server:
        entry = {"protocol": "openai", "base_url": server.url, "model": "m", "price": [1, 10]}
        spec = pool_file(tmp_path, [{**entry, "name": "a"}, {**entry, "name": "b"}])
        a, b = load_pool(spec, replay=replay)
        first = five(a, b)
        assert [r.text[:8] for r in first] == [f"answer {n}" for n in range(5)]
        a.chat(CHAT)  # without a nonce: asked, not kept
        assert len(server.requests) == 6
        a, b = load_pool(spec, replay=replay)  # the run is killed here, and resumed
        assert five(a, b) == first and len(server.requests) == 6
        assert a.spent == pytest.approx(4 * 30e-6)  # so that the resumed run's books are those of an uninterrupted one
        a.chat(CHAT, nonce="r2")
        assert len(server.requests) == 7


def test_replay_survives_a_kill_in_the_middle_of_a_line(tmp_path):
    replay = tmp_path / "replay"
    with Rogue(lambda n, c: http(GOOD)) as server:
        for w, nonce in ((worker(server), "0"), (worker(server), "1")):
            w.replay = workers.Replay(str(replay))
            w.chat(CHAT, nonce=nonce)
        replay.write_bytes(replay.read_bytes()[:-30])
        for asked in (3, 3):  # the torn line is asked again, and is whole from then on
            w = worker(server)
            w.replay = workers.Replay(str(replay))
            w.chat(CHAT, nonce="0"), w.chat(CHAT, nonce="1")
            assert len(server.requests) == asked
    assert len(replay.read_text().splitlines()) == 2


def test_failures_are_not_replayed(tmp_path):
    with Rogue(lambda n, c: http({}, 500) if n == 0 else http(GOOD)) as server:
        w = worker(server, attempts=1)
        w.replay = workers.Replay(str(tmp_path / "replay"))
        with pytest.raises(WorkerError):
            w.chat(CHAT, nonce="0")
        assert w.chat(CHAT, nonce="0").text == "Because."


# Pools

RIGHT = {"protocol": "openai", "base_url": "http://h/v1", "model": "m"}


@pytest.mark.parametrize("entry, field", [
    ({k: v for k, v in RIGHT.items() if k != "model"}, "model"), ({**RIGHT, "modle": "m"}, "modle"),
    ({**RIGHT, "model": 3}, "model"), ({**RIGHT, "base_url": "h/v1"}, "base_url"),
    ({**RIGHT, "protocol": "smtp"}, "protocol"), ({**RIGHT, "protocol": []}, "protocol"),
    ({**RIGHT, "base_url": f"https://me:{KEY}@h/v1"}, "base_url"), ({**RIGHT, "api_key_env": KEY}, "api_key_env"),
    ({**RIGHT, "params": [1]}, "params"), ({**RIGHT, "price": 3}, "price"), ({**RIGHT, "price": [1]}, "price"),
    ({**RIGHT, "price": [1, -1]}, "price"), ({**RIGHT, "price": [1, "2"]}, "price"), ({**RIGHT, "concurrency": 0}, "concurrency"),
    ({**RIGHT, "concurrency": 1.5}, "concurrency"), ({**RIGHT, "rpm": -1}, "rpm"), ({**RIGHT, "timeout": "1"}, "timeout"),
    ({**RIGHT, "timeout": float("nan")}, "timeout"), ({**RIGHT, "deadline": float("inf")}, "deadline"), ("m", "an object"), (3, "an object"),
    ({**RIGHT, "prices": [1, 2]}, "unknown field prices, there are protocol, base_url, model, name"),
    ({"model": "m", "protocol": "openai"}, "no base_url")])
def test_a_bad_entry_is_named_with_its_field(tmp_path, entry, field):
    with pytest.raises(SystemExit, match=f"pool.json: entry 1: .*{field}") as caught:
        load_pool(pool_file(tmp_path, [RIGHT, entry]))
    assert KEY not in str(caught.value)


@pytest.mark.parametrize("text", ["", "[", "[]", "{}", "3", '"x"'])
def test_a_file_that_is_no_pool(tmp_path, text):
    (tmp_path / "pool.json").write_text(text)
    with pytest.raises(SystemExit, match="pool.json"):
        load_pool(str(tmp_path / "pool.json"))
    with pytest.raises(SystemExit, match="missing.json.*expected local, local:pairs, local:tired, paper"):
        load_pool(str(tmp_path / "missing.json"))


def test_two_workers_of_one_name(tmp_path):
    """Tables, --only and replay files know a worker by its name."""
    with pytest.raises(SystemExit, match="entry 1: .*another worker has the name"):
        load_pool(pool_file(tmp_path, [RIGHT, {**RIGHT, "base_url": "http://127.0.0.1:1/v1"}]))


def test_ranks_share_the_limits(tmp_path):
    """Each process of a run has its own pool; the provider counts all of them together."""
    entry = {**RIGHT, "rpm": 60, "concurrency": 5, "price": [1, 1], "params": {"max_tokens": 9}}
    [w] = load_pool(pool_file(tmp_path, [entry]), budget=3.0, ranks=2)
    assert w.rpm == 30 and w.concurrency == 2 and w.slots._value == 2 and w.budget.left == 1.5
    [w] = load_pool(pool_file(tmp_path, [{**RIGHT, "concurrency": 1}]), ranks=2)
    assert w.rpm is None and w.concurrency == 1 and w.budget is None


def test_defaults_of_an_entry(tmp_path):
    [w] = load_pool(pool_file(tmp_path, [{**RIGHT, "price": None, "rpm": None}]))
    assert w.name == "m" and w.price is None and w.deadline == 3 * w.timeout and w.api_key_env is None


def test_the_paper_pool(monkeypatch):
    """§4.1 and App. A.1: 4096 tokens, temperature 0.2, reasoning at its minimum."""
    for name in ("GEMINI_API_KEY", "ANTHROPIC_API_KEY", "OPENAI_API_KEY", "OPEN_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    pool, free = load_pool("paper"), load_pool("paper:unconstrained")
    assert len({w.name for w in pool}) == 7 and [w.name for w in pool] == [w.name for w in free]
    assert [w.protocol for w in pool] == ["gemini", "anthropic"] + ["openai"] * 5
    assert all(w.params["max_tokens"] == 4096 < f.params["max_tokens"] for w, f in zip(pool, free))
    google, claude_, gpt, r1, gemma, direct, thinking = pool
    assert all(w.params["temperature"] == 0.2 for w in pool if w is not gpt)
    assert google.params["thinkingConfig"] == {"thinkingBudget": 128} and gpt.params["reasoning_effort"] == "minimal"
    assert "thinking" not in claude_.params and free[1].params["thinking"]["budget_tokens"] < free[1].params["max_tokens"]
    assert "temperature" not in free[1].params  # which Claude refuses while it thinks
    for w in direct, thinking:
        assert (w.params["top_p"], w.params["top_k"], w.params["presence_penalty"]) == (0.8, 20, 1.0)
    assert [w.params["chat_template_kwargs"]["enable_thinking"] for w in (direct, thinking)] == [False, True]
    assert all(w.price for w in pool[:3]) and not any(w.price for w in pool[3:])
    for w, name in zip(pool, ["GEMINI_API_KEY", "ANTHROPIC_API_KEY", "OPENAI_API_KEY"] + [r"\$OPEN_BASE_URL"] * 4):
        with pytest.raises(WorkerError, match=f"set {name} in the environment"):
            w.chat(CHAT)
    with Rogue(lambda n, c: http(GOOD)) as server:
        monkeypatch.setenv("OPEN_BASE_URL", server.url)
        assert load_pool("paper")[4].chat(CHAT).text == "Because."
    assert server.requests[0][2]["model"] == "google/gemma-3-27b-it"


# The local specialists' server


def test_local_pool():
    pool = load_pool("local")
    assert [w.name for w in pool] == workers.LOCAL["local"] and all(w.price == [0, 0] and w.concurrency == 16 for w in pool)
    reply = pool[0].chat(CHAT)
    assert reply.text == workers.SPECIALISTS[pool[0].name](CHAT) and reply.cost == 0 and reply.prompt_tokens == 1
    models = requests.get(pool[0].url + "/models", timeout=20).json()
    assert [m["id"] for m in models["data"]] == list(workers.SPECIALISTS)
    assert [w.url for w in load_pool("local", local_url="http://127.0.0.1:9/v1")] == ["http://127.0.0.1:9/v1"] * len(pool)


@pytest.mark.parametrize("body", [
    "", "{", "[]", '{"model": "nobody", "messages": []}', '{"messages": []}', '{"model": 1, "messages": "x"}',
    json.dumps({"model": next(iter(workers.SPECIALISTS)), "messages": []})])
def test_bad_requests_to_the_specialists(body):
    url = load_pool("local")[0].url + "/chat/completions"
    with requests.Session() as session:
        answer = session.post(url, data=body, headers={"Content-Type": "application/json"}, timeout=20)
        assert answer.status_code == 400 and "expected" in answer.json()["error"]["message"]
        good = {"model": next(iter(workers.SPECIALISTS)), "messages": CHAT}
        assert session.post(url, json=good, timeout=20).status_code == 200  # on the same connection


def test_importing_workers_does_not_import_torch():
    code = "import sys, workers; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0


def gone(url, seconds=20):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            requests.get(url + "/models", timeout=5)
        except requests.ConnectionError:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("death", ["exit", signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_the_server_ends_with_its_parent(death):
    code = "import sys, time, workers\nprint(workers.load_pool('local')[0].url, flush=True)\nsys.stdin.readline()"
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                              stderr=subprocess.DEVNULL)
    url = parent.stdout.readline().strip()
    assert requests.get(url + "/models", timeout=20).ok
    parent.stdin.close() if death == "exit" else parent.send_signal(death)
    parent.wait(timeout=30)
    assert gone(url)


def test_serve_ends_quietly_and_a_port_in_use_is_said():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        run = subprocess.run([sys.executable, "workers.py", "serve", f"--port={port}"], cwd=ROOT, capture_output=True, text=True,
                             timeout=120)
    assert run.returncode == 1 and f"127.0.0.1:{port}" in run.stderr and "--port" in run.stderr and "Traceback" not in run.stderr
    server = subprocess.Popen([sys.executable, "workers.py", "serve", "--port=0"], cwd=ROOT, text=True, stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, stdin=subprocess.DEVNULL)  # as under a service manager: no stdin
    url = server.stdout.readline().strip()
    assert requests.get(url + "/models", timeout=20).ok
    server.send_signal(signal.SIGINT)
    assert server.communicate(timeout=30) == ("", "") and server.returncode == 0


def test_a_budget_is_never_passed(tmp_path):
    """Calls of $0.0012 at the most and $0.001 in fact: of twenty at once under $0.005 some are refused, and what was spent stays below."""
    gate = threading.Semaphore(0)
    with Rogue(lambda n, c: gate.acquire() and http({**GOOD, "usage": {"prompt_tokens": 0, "completion_tokens": 100}})) as server:
        entry = {"protocol": "openai", "base_url": server.url, "model": "m", "params": {"max_tokens": 120}, "price": [0, 10]}
        pool = load_pool(pool_file(tmp_path, [entry, {**entry, "name": "n"}]), budget=0.005)
        budget = pool[0].budget

        def ask(i):
            try:
                return pool[i % 2].chat([{"role": "user", "content": "Hi."}]).cost
            except WorkerError as e:
                assert f"{pool[i % 2].name}: the budget of $0.005 is spent" in str(e)

        with ThreadPoolExecutor(20) as threads:
            costs = threads.map(ask, range(20))
            gate.release(20)
            paid = [cost for cost in costs if cost is not None]
    assert paid == [pytest.approx(0.001)] * 4 and budget.refused and budget.running == 0
    assert sum(w.spent for w in pool) == pytest.approx(0.004) and budget.left == pytest.approx(0.001)


def test_calls_wait_for_what_others_give_back(tmp_path):
    """Many calls at once under a budget that all of them together stay below: none is refused, although what they could cost is above."""
    with Rogue(lambda n, c: http({**GOOD, "usage": {"prompt_tokens": 0, "completion_tokens": 1}})) as server:
        entry = {"protocol": "openai", "base_url": server.url, "model": "m", "params": {"max_tokens": 1000}, "price": [0, 10]}
        [worker] = load_pool(pool_file(tmp_path, [entry]), budget=0.025)
        with ThreadPoolExecutor(20) as threads:
            replies = list(threads.map(lambda _: worker.chat([{"role": "user", "content": "Hi."}]), range(60)))
    assert len(replies) == 60 and not worker.budget.refused and worker.budget.left == pytest.approx(0.025 - 60 * 1e-5)


@pytest.mark.parametrize("answers, attempts_paid", [([400], 0), ([500, 400], 1), ([None, 200], 0), ([429, 200], 0), ([b"{", 200], 1), ([503, 200], 0),
                                                    ([529, 200], 0), ([json.dumps({"error": {"message": "x", "code": 503}}).encode(), 200], 1)], ids=str)
def test_what_a_broken_attempt_may_have_cost_counts(answers, attempts_paid, tmp_path, monkeypatch):
    """What a refused attempt could have cost is given back; what one that broke later could have cost is not."""
    monkeypatch.setattr(workers, "BACKOFF", 0.001)

    def play(n, conn):
        answer = answers[n]
        if type(answer) is int:
            return http({**GOOD, "usage": {"prompt_tokens": 7, "completion_tokens": 3}} if answer == 200 else {}, answer)
        return answer and http(answer)

    with Rogue(play) as server:
        entry = {"protocol": "openai", "base_url": server.url, "model": "m", "params": {"max_completion_tokens": 100}, "price": [1, 10]}
        [worker] = load_pool(pool_file(tmp_path, [entry]), budget=1.0)
        if answers[-1] == 200:
            worker.chat([{"role": "user", "content": "Hi."}])
        else:
            with pytest.raises(WorkerError):
                worker.chat([{"role": "user", "content": "Hi."}])
    most, known = (19 * 1 + 100 * 10) / 1e6, (7 * 1 + 3 * 10) / 1e6 * (answers[-1] == 200)
    assert worker.budget.left == pytest.approx(1 - attempts_paid * most - known) and worker.budget.running == 0


@pytest.mark.parametrize("entry", [{"params": {"max_tokens": 9}}, {"price": [1, 2]}])
def test_a_budget_needs_what_a_call_can_cost(entry, tmp_path):
    spec = pool_file(tmp_path, [{"protocol": "openai", "base_url": "http://127.0.0.1:9/v1", "model": "m", **entry}])
    with pytest.raises(SystemExit, match="entry 0: a budget needs price"):
        load_pool(spec, budget=1.0)
    assert load_pool(spec)


def test_bench_ends_in_a_json_line():
    code = "import workers; workers.bench(20, 2, 0.001)"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    line = json.loads(run.stdout.splitlines()[-1])
    assert line["calls"] == 40 and line["client_cpu_ms_per_call"] > 0 and line["times_the_least"] > 1


def test_the_pool_is_listed_and_pinged(monkeypatch, capsys, tmp_path):
    monkeypatch.delenv("ABSENT", raising=False)
    monkeypatch.setenv("PLANTED", KEY)
    with Rogue(lambda n, c: http(GOOD)) as server:
        entry = {"protocol": "openai", "base_url": server.url, "model": "m"}
        spec = pool_file(tmp_path, [{**entry, "name": "up", "api_key_env": "PLANTED"},
                                    {**entry, "name": "keyless", "api_key_env": "ABSENT"},
                                    {**entry, "name": "down", "base_url": "http://127.0.0.1:9/v1"}])
        monkeypatch.setattr(sys, "argv", ["workers.py", f"--pool={spec}"])
        workers.main()
    up, keyless, down = capsys.readouterr().out.splitlines()
    assert up.startswith("up") and "PLANTED is set" in up and "answers in" in up and KEY not in up
    assert "ABSENT is NOT SET" in keyless and "set ABSENT" in keyless
    assert "no key needed" in down and "connection failed" in down


def test_replies_are_plain_data():
    assert Reply("a", 1, 2, None, 0.5) == Reply("a", 1, 2, None, 0.5, "stop")


def test_two_workers_for_each_trade():
    """A junior or tired specialist is a specialist on 60 or 70 % of his days, which differ, and on the others says that he is not."""
    assert workers.LOCAL["local:pairs"][:3] == ["calculator", "junior calculator", "translator"]
    assert workers.LOCAL["local:tired"][:2] == ["tired calculator", "junior calculator"]
    assert [w.letter for w in load_pool("local:pairs", "http://127.0.0.1:9/v1")] == [*"ABCDEFGH"]
    chats = [[{"role": "user", "content": f"Question:\nWhat is {i} + 1?\n\nYour task:\nWork it out."}] for i in range(1000)]
    days = {kind: [workers.SPECIALISTS[f"{kind} calculator"](chat) for chat in chats] for kind in ("junior", "tired")}
    for kind, share in (("junior", 0.6), ("tired", 0.7)):
        good = [text == str(i + 1) for i, text in enumerate(days[kind])]
        assert abs(sum(good) / 1000 - share) < 0.05 and {t for t, g in zip(days[kind], good) if not g} == {"I have lost the thread."}
    both = sum(a == b == "I have lost the thread." for a, b in zip(days["junior"], days["tired"]))
    assert abs(both / 1000 - 0.12) < 0.04  # each for himself


@pytest.mark.parametrize("text", ["My notes.\nTwo lines.\n", "no newline", "0" * 64 + " {}\nprose"])
def test_a_file_that_holds_no_replies_is_left_alone(tmp_path, text):
    (tmp_path / "notes").write_text(text)
    with pytest.raises(SystemExit, match="notes.*no file of replies"):
        load_pool("paper", replay=str(tmp_path / "notes"))
    assert (tmp_path / "notes").read_text() == text
