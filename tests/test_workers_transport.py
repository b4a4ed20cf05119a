"""Workers against servers that misbehave in every way: faults, slowness, limits, streams, and a fuzzer."""
import email.utils
import gzip
import json
import random
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from rogue import CHAT, GOOD, Rogue, always, drip, http, quick, waits, worker  # noqa: F401 (two are fixtures)

import workers
from workers import Worker, WorkerError, urllib3


def reset(n, conn):
    conn.sendall(http(GOOD)[:-20])
    conn.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # close() sends RST


def chunks(*pieces):
    """A chunked body of these pieces, each as it stands: size line, data and all."""
    return lambda n, conn: conn.sendall(
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"".join(pieces)
    )


def flood(n, conn):
    conn.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000000\r\n\r\n")
    for _ in range(100):
        conn.sendall(b"x" * 1_000_000)


HTML = b"<html><body><h1>Sorry, the model is away</h1></body></html>"
FAULTS = {  # name: play, attempts of two, what the error says
    "truncated JSON": (lambda n, c: http(json.dumps(GOOD).encode()[:-9]), 1, "no JSON object"),
    "HTML with 200": (lambda n, c: http(HTML), 1, "no JSON object"),
    "HTML with 502": (lambda n, c: http(HTML, 502), 2, "HTTP 502: <html>"),
    "empty body": (lambda n, c: http(b""), 2, "no JSON object"),
    "JSON list": (lambda n, c: http([GOOD]), 1, "no JSON object"),
    "100,000 brackets": (lambda n, c: http(b"[" * 100_000), 1, "no JSON object"),
    "not UTF-8": (lambda n, c: http(b'{"choices": "\xff\xfe\xfa"}'), 1, "no JSON object"),
    "a stream nobody asked for": (
        lambda n, c: http(b'data: {"choices": []}\n\n', Content_Type="text/event-stream"),
        1,
        "no JSON object",
    ),
    "200 with an error": (
        lambda n, c: http({"error": {"message": "upstream died", "code": 502}}),
        2,
        "HTTP 502: upstream died",
    ),
    "200 with an error's text": (lambda n, c: http({"error": "model is loading"}), 2, "model is loading"),
    "200 with a final error": (
        lambda n, c: http({"error": {"message": "too long", "code": 400}}),
        1,
        "HTTP 400: too long",
    ),
    "200 with an odd code": (
        lambda n, c: http({"error": {"message": "odd", "code": 10**400}}),
        2,
        "HTTP 500: odd",
    ),
    "an error as choice": (
        lambda n, c: http({"choices": [{"error": "cut off", "message": {"content": "Bec"}}]}),
        2,
        "cut off",
    ),
    "no choices": (lambda n, c: http({"id": 1}), 1, "KeyError"),
    "empty choices": (lambda n, c: http({"choices": []}), 1, "IndexError"),
    "choices of no object": (lambda n, c: http({"choices": ["a"]}), 1, "AttributeError"),
    "content of no text": (lambda n, c: http({"choices": [{"message": {"content": 42}}]}), 1, "TypeError"),
    "not to be retried": (
        lambda n, c: http({"error": {"message": "paid"}}, 502, X_Should_Retry="false"),
        1,
        "HTTP 502: paid",
    ),
    "100 MB": (flood, 1, "larger than 32 MiB"),
    "closed at once": (lambda n, c: None, 2, "connection failed"),
    "closed mid-body": (lambda n, c: c.sendall(http(GOOD)[:-20]), 2, "connection failed"),
    "reset mid-body": (reset, 2, "connection failed"),
    "no HTTP": (lambda n, c: b"220 mail.example ESMTP\r\n\r\n", 2, "connection failed"),
    "two lengths": (lambda n, c: c.sendall(http(GOOD, Content_Length="5")), 2, "connection failed"),
    "chunk of -5": (chunks(b"-5\r\nhello\r\n0\r\n\r\n"), 2, "connection failed"),
    "chunk of -1": (chunks(b"-1\r\nhello\r\n0\r\n\r\n"), 2, "connection failed|no JSON"),
    "chunk of no number": (chunks(b"five\r\nhello\r\n0\r\n\r\n"), 2, "connection failed"),
    "chunk of 10^400": (chunks(b"1" + b"0" * 400 + b"\r\nhello\r\n"), 2, "connection failed"),
    "unended chunks": (chunks(b"5\r\nhel"), 2, "connection failed"),
    "a body that is no gzip": (lambda n, c: http(GOOD, Content_Encoding="gzip"), 2, "connection failed"),
    "redirect": (lambda n, c: http(b"", 302, Location="http://127.0.0.1:9/v1"), 1, "HTTP 302"),
    "redirect to nowhere": (lambda n, c: http(b"", 302, Location="http://[::1"), 1, "HTTP 302"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_become_errors_and_never_content(name):
    """What is whole and wrong is paid for once; what broke off is asked again."""
    play, attempts, says = FAULTS[name]
    with Rogue(play) as server, pytest.raises(WorkerError, match=says) as caught:
        worker(server, name="jane", attempts=2).chat(CHAT)
    assert len(server.requests) == attempts or name == "chunk of -1"
    assert str(caught.value).startswith("jane: ") and f"attempt {len(server.requests)}," in str(caught.value)


SLOW = {
    "silence before the head": lambda n, conn: time.sleep(20),
    "silence in the body": drip(http(GOOD)[:-20], b""),
    "drip of the body": drip(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n"),
    "drip of a chunked body": drip(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
    "drip of a body that the connection's end ends": drip(
        b"HTTP/1.1 200 OK\r\n\r\n" + json.dumps(GOOD).encode()
    ),
    "a stream without end": drip(
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n", b": wait\n\n"
    ),
}


@pytest.mark.parametrize("name", SLOW)
def test_slow_servers_end_at_the_timeout_and_the_deadline(name):
    with Rogue(SLOW[name]) as server:
        begun = time.monotonic()
        with pytest.raises(WorkerError, match="no complete response within 0.3 s"):
            worker(server, timeout=0.3, attempts=1).chat(CHAT, on_text=print)
        one = time.monotonic() - begun
        with pytest.raises(WorkerError, match="no complete response within"):
            worker(server, timeout=0.3, deadline=0.8).chat(CHAT)
        assert 0.29 <= one < 3 and time.monotonic() - begun - one < 4
        assert len(server.requests) == 2  # Who is late may still be at work: it is not asked again.


@pytest.mark.parametrize("silent_in", ["head", "body", "body without length", "stream"])
def test_a_slow_answer_is_one_reply_for_one_request(silent_in, monkeypatch):
    monkeypatch.setattr(workers, "CONNECT", 0.1)  # the limit of the connect, never of the answer
    answer = http(GOOD)
    if silent_in == "body without length":
        answer = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + json.dumps(GOOD).encode()
    if silent_in == "stream":
        answer = http(
            stream({"delta": {"content": "Because."}, "finish_reason": "stop"}),
            Content_Type="text/event-stream",
        )

    def slow(n, conn):
        begun = 0 if silent_in == "head" else len(answer) - 30
        conn.sendall(answer[:begun])
        time.sleep(0.4)
        conn.sendall(answer[begun:])

    with Rogue(slow) as server:
        assert worker(server).chat(CHAT, on_text=print if silent_in == "stream" else None).text == "Because."
        assert len(server.requests) == 1


def test_a_worker_that_is_down():
    with socket.create_server(("127.0.0.1", 0)) as s:
        url = f"http://127.0.0.1:{s.getsockname()[1]}/v1"
    with pytest.raises(WorkerError, match="gone: the connection failed.*attempt 3"):
        Worker("openai", url, "m", name="gone", attempts=3).chat(CHAT)
    with pytest.raises(WorkerError, match=f"attempt {workers.FAILURES},"):
        Worker("openai", url, "m").chat(CHAT)


def test_connections_stay_alive_through_a_silent_hour():
    with always(GOOD) as server:
        w = worker(server)
        w.chat(CHAT)
        pools = w.session.adapters["http://"].poolmanager.pools
        connection = pools[pools.keys().pop()].pool.get()
    assert connection.sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    if hasattr(socket, "TCP_KEEPIDLE"):
        assert connection.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 60


def test_a_body_that_was_packed_all_the_same():
    with always(gzip.compress(json.dumps(GOOD).encode()), Content_Encoding="gzip") as server:
        assert worker(server).chat(CHAT).text == "Because."
    assert "accept-encoding: identity\r\n" in server.requests[0][1].lower()


def test_cookies_are_not_kept_and_redirects_not_followed():
    with always(GOOD, Set_Cookie="a=b") as server:
        w = worker(server)
        w.chat(CHAT), w.chat(CHAT)
    assert (
        len(server.requests) == 2
        and server.connections == 1
        and "cookie" not in server.requests[1][1].lower()
    )


# Retries


@pytest.mark.parametrize("status", [408, 409, 429, 500, 502, 503, 504, 529])
def test_retried_until_it_works(status):
    with Rogue(lambda n, c: http({"error": {"message": "busy"}}, status) if n < 2 else http(GOOD)) as server:
        assert worker(server).chat(CHAT).text == "Because."
    assert len(server.requests) == 3 and len({json.dumps(body) for _, _, body in server.requests}) == 1


@pytest.mark.parametrize("status", [400, 401, 402, 403, 404, 413, 422])
def test_never_retried(status):
    with (
        always({"error": {"message": "no"}}, status) as server,
        pytest.raises(WorkerError, match=f"HTTP {status}: no"),
    ):
        worker(server).chat(CHAT)
    assert len(server.requests) == 1


@pytest.mark.parametrize("status", [429, 503, 529])
def test_a_busy_provider_is_asked_while_the_deadline_lasts(status, waits):
    """Rate limits are per minute: the waits grow from two seconds to half a minute, until the deadline."""
    with always({}, status) as server, pytest.raises(WorkerError, match=f"HTTP {status}"):
        worker(server, timeout=120, deadline=300).chat(CHAT)
    assert (
        waits == [2, 4, 8, 16, *[30] * 8] and len(server.requests) == 13
    )  # 270 s: one more would end at the deadline


def test_a_broken_provider_is_asked_six_times(waits):
    with always({}, 500) as server, pytest.raises(WorkerError, match="attempt 6,"):
        worker(server, timeout=120).chat(CHAT)
    assert waits == [2, 4, 8, 16, 30]


def test_what_a_provider_says_cannot_command_the_terminal():
    with always({"error": {"message": "down\x1b[2J\u202e"}}, 400) as server, pytest.raises(WorkerError) as e:
        worker(server).chat(CHAT)
    assert str(e.value).isprintable() and "HTTP 400: down" in str(e.value)


def test_the_screen_hears_of_a_failing_worker_once_a_minute(waits, capsys):
    with always({"error": "tired"}, 500) as server:
        coach = worker(server, name="coach", attempts=2)
        for seconds in (0, 0, workers.QUIET):
            waits.append(seconds)
            with pytest.raises(WorkerError):
                coach.chat(CHAT)
    assert capsys.readouterr().err == 2 * "coach: HTTP 500: tired; trying again\n"


def test_attempts_hold_for_a_busy_provider_too(waits):
    with always({}, 429) as server, pytest.raises(WorkerError, match="attempt 3,"):
        worker(server, attempts=3).chat(CHAT)
    assert len(server.requests) == 3


def test_a_spent_quota_is_no_busy_provider(waits):
    """OpenAI's status for both is 429, and the code tells them apart (github.com/openai/codex/pull/6340)."""
    body = {"error": {"message": "You exceeded it", "type": "insufficient_quota", "code": "insufficient_quota"}}
    with always(body, 429) as server, pytest.raises(WorkerError, match="HTTP 429: You exceeded it .attempt 1,"):
        worker(server).chat(CHAT)
    assert len(server.requests) == 1 and not waits


def test_no_attempt_starts_with_less_time_left_than_an_answer_takes(waits):
    with Rogue(lambda n, c: http(GOOD) if n == 0 else http({}, 429)) as server:
        w = worker(server, timeout=120, deadline=300)
        w.chat(CHAT)
        w.usual_seconds = 200.0
        with pytest.raises(WorkerError, match="HTTP 429"):
            w.chat(CHAT)
    assert waits == [2, 4, 8, 16, 30, 30]  # 90 s; with the next 30 s less than 200 of the 300 s were left


@pytest.mark.parametrize(
    "headers, body, least",
    [
        ({"Retry_After": "7"}, {}, 7),
        ({"Retry_After": " 2.5 "}, {}, 2.5),
        ({"retry_after_ms": "1500"}, {}, 1.5),
        ({"Retry_After": ["3", "9"]}, {}, 9),
        ({"Retry_After": "1", "retry_after_ms": "4000"}, {}, 4),
        ({}, {"error": {"message": "x", "details": [{"@type": "x"}, {"retryDelay": "36.5s"}]}}, 36.5),
        ({}, {"error": {"details": [{"retryDelay": "soon"}, 3]}}, 0),
        ({}, {"error": {"details": 7}}, 0),
        ({}, {"error": "x"}, 0),
        ({"Retry_After": "soon"}, {}, 0),
        ({"Retry_After": "Wed, 21 Oct 2015 07:28:00 GMT"}, {}, 0),
        ({"Retry_After": "-5"}, {}, 0),
        ({"Retry_After": "nan"}, {}, 0),
        ({"Retry_After": "inf"}, {}, 0),
    ],
)
def test_the_wait_that_is_asked_for_is_kept_with_jitter_on_top(headers, body, least, waits):
    with Rogue(lambda n, c: http(body, 429, **headers) if n < 2 else http(GOOD)) as server:
        worker(server, timeout=120).chat(CHAT)
    assert waits == [pytest.approx(least + 2), pytest.approx(least + 4)]


def test_a_wait_beyond_the_deadline_fails_at_once(waits):
    for asked in ("3600", "9" * 400):
        with always({"error": {"message": "later"}}, 429, Retry_After=asked) as server:
            with pytest.raises(WorkerError, match="later; it asks to wait beyond the deadline"):
                worker(server).chat(CHAT)
        assert len(server.requests) == 1 and waits == []


def test_a_date_as_wait():
    soon = email.utils.formatdate(time.time() + 60, usegmt=True)
    assert 50 < workers.asked_wait(urllib3.HTTPHeaderDict({"Retry-After": soon}), None) <= 60
    for past in ("Wed, 99 Foo 2020", email.utils.formatdate(time.time() - 60, usegmt=True)):
        assert workers.asked_wait(urllib3.HTTPHeaderDict({"Retry-After": past}), None) == 0


def test_waits_differ_between_calls(monkeypatch):
    drawn = []
    monkeypatch.setattr(workers.jitter, "uniform", lambda low, high: drawn.append((low, high)) or 0)
    with Rogue(lambda n, c: http({}, 500) if n < 3 else http(GOOD)) as server:
        worker(server).chat(CHAT)
    assert drawn == [pytest.approx((w / 2, w)) for w in (0.004, 0.008, 0.016)]


def test_the_experiments_random_numbers_are_left_alone():
    random.seed(5)
    expected = random.random()
    random.seed(5)
    with Rogue(lambda n, c: http({}, 500) if n == 0 else http(GOOD)) as server:
        worker(server).chat(CHAT)
    assert random.random() == expected


# Limits


def test_concurrency_is_per_worker_and_connections_are_kept():
    def play(n, conn):
        time.sleep(0.05)
        return http(GOOD)
    with Rogue(play) as server:
        w = worker(server, concurrency=3)
        with ThreadPoolExecutor(18) as threads:
            list(threads.map(lambda _: w.chat(CHAT), range(18)))
    assert 2 <= server.most <= 3 >= server.connections and len(server.requests) == w.calls == 18


def test_requests_per_minute_count_retries():
    with Rogue(lambda n, c: http({}, 500) if n == 1 else http(GOOD)) as server:
        w = worker(server, rpm=600)
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(lambda _: w.chat(CHAT), range(4)))
    times = [t for t, _, _ in server.requests]
    assert len(times) == 5 and times[-1] - times[0] > 0.2  # 0.4 but for the jitter of the machine


def test_waiting_for_a_turn_takes_nothing_from_the_deadline():
    """Four calls are refused once; their second turns come up to 2 s later, beyond the deadline of 1 s."""
    with (
        Rogue(lambda n, conn: http({}, 503) if n < 4 else http(GOOD)) as server,
        ThreadPoolExecutor(4) as threads,
    ):
        w = worker(server, rpm=150, deadline=1)
        assert [f.text for f in threads.map(lambda _: w.chat(CHAT), range(4))] == ["Because."] * 4


# Streams


def stream(*choices, usage=None, done=True, newline="\n"):
    """The events of a stream, one for each choice."""
    lines = [
        ": OPENROUTER PROCESSING",
        "",
        *(f"data: {json.dumps({'choices': [choice]})}{newline}" for choice in choices),
    ]
    if usage:
        lines.append(f"data:{json.dumps({'choices': [], 'usage': usage})}{newline}")
    return newline.join([*lines, *["data: [DONE]", "", ""] * done]).encode()


PIECES = [
    {"delta": {"role": "assistant", "content": ""}},
    {"delta": {"content": "Be"}},
    {"delta": {"content": None}},
    {"delta": {"content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "cau"}]}},
    {"delta": {"content": "sé."}},
    {"delta": {}, "finish_reason": "length"},
]


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("size", [1, 7, 100_000])
def test_a_stream_is_told_as_it_comes(newline, size):
    body, told = stream(*PIECES, usage=GOOD["usage"], newline=newline), []
    pieces = [body[i:i + size] for i in range(0, len(body), size)]
    play = (
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n"
        + b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
        + b"0\r\n\r\n"
    )
    with Rogue(lambda n, conn: play) as server:
        w = worker(server, price=[1, 10])
        replies = [w.chat(CHAT, on_text=told.append), w.chat(CHAT, on_text=told.append)]
    assert told == ["Be", "cau", "sé."] * 2 and server.connections == 1
    for reply in replies:
        assert (reply.text, reply.finish, reply.prompt_tokens, reply.cost) == (
            "Becausé.",
            "length",
            10,
            pytest.approx(30e-6),
        )
    assert server.requests[0][2] == {
        "model": "m",
        "messages": CHAT,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_a_refusal_is_streamed_as_text():
    told, body = [], stream({"delta": {"content": None, "refusal": "I will"}}, {"delta": {"refusal": " not."}, "finish_reason": "stop"})
    with always(body, Content_Type="text/event-stream") as server:
        assert worker(server).chat(CHAT, on_text=told.append).text == "I will not." and told == ["I will", " not."]


def test_each_piece_is_told_before_the_next_is_sent():
    told = threading.Event()

    def play(n, conn):
        body = stream(*PIECES)
        half = body.index(b"cau")
        conn.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + body[:half])
        assert told.wait(20)
        conn.sendall(body[half:])

    with Rogue(play) as server:
        assert worker(server).chat(CHAT, on_text=lambda piece: told.set()).text == "Becausé."


@pytest.mark.parametrize(
    "body, attempts, says",
    [
        (stream({"delta": {"content": "Be"}}, done=False), 1, "ended early"),
        (stream(done=False), 2, "ended early"),
        (b'data: {"error": {"message": "died", "code": 502}}\n\n', 2, "HTTP 502: died"),
        (b'data: {"error": "x"}\n', 2, "HTTP 500: x"),
        (b"data: {\n\n", 1, "not as openai defines"),
        (b"data: []\n\n", 1, "not as openai defines"),
        (b'data: {"choices": 3}\n\n', 1, "openai"),
        (b'data: {"choices": [{"delta": {"content": 3}}]}\n\n', 1, "openai"),
        (b"data: " + b"[" * 9999 + b"\n\n", 1, "openai"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_streams_that_break(body, attempts, says):
    """What has been told cannot be taken back: there is no second attempt then."""
    told = []
    with always(body, Content_Type="text/event-stream") as server, pytest.raises(WorkerError, match=says):
        worker(server, attempts=2).chat(CHAT, on_text=told.append)
    assert len(server.requests) == attempts and (not told or attempts == 1)


def test_a_whole_answer_is_told_once():
    for protocol, body in (
        ("openai", GOOD),
        ("anthropic", {"content": [{"type": "text", "text": "Because."}]}),
    ):
        told = []
        with always(body) as server:
            worker(server, protocol=protocol).chat(CHAT, on_text=told.append)
        assert told == ["Because."] and ("stream" in server.requests[0][2]) == (protocol == "openai")


def test_what_the_listener_raises_comes_out_and_costs_one_call():
    def hang_up(piece):
        raise BrokenPipeError("the reader has gone")
    with always(stream(*PIECES), Content_Type="text/event-stream") as server, pytest.raises(BrokenPipeError):
        worker(server).chat(CHAT, on_text=hang_up)
    assert len(server.requests) == 1


# Whatever a server sends


NUMBERS = ["10", -1, 10 ** 400, 1e400, 2.5, True, None, [], {}, 1e12, "", 10 ** 9]


@pytest.mark.parametrize("value", NUMBERS, ids=lambda value: repr(value)[:9])
@pytest.mark.parametrize("field", ["prompt_tokens", "completion_tokens"])
def test_usage_that_is_no_sensible_number_is_unknown(field, value):
    with always({**GOOD, "usage": {**GOOD["usage"], field: value}}) as server:
        reply = worker(server, price=[1, 10]).chat(CHAT)
    assert reply.text == "Because." and reply.cost is None and reply.seconds > 0
    with always({**GOOD, "usage": value}) as server:
        assert worker(server, price=[1, 10]).chat(CHAT).cost is None


BODIES = {
    "openai": GOOD,
    "anthropic": {
        "content": [{"type": "text", "text": "Hi."}],
        "stop_reason": "end_turn",
        "usage": {"input_tokens": 1, "output_tokens": 2, "cache_creation": {"ephemeral_1h_input_tokens": 1}},
    },
    "gemini": {
        "candidates": [{"content": {"parts": [{"text": "Hi."}]}, "finishReason": "STOP"}],
        "promptFeedback": {},
        "usageMetadata": {"promptTokenCount": 1, "candidatesTokenCount": 2},
    },
}


def mutated(value, rng):
    """The value with something in it replaced by what does not belong there."""
    if isinstance(value, dict) and value and rng.random() < 0.8:
        key = rng.choice(list(value))
        return {**value, key: mutated(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.8:
        return [mutated(value[0], rng), *value[1:]]
    return rng.choice(
        [*NUMBERS, "text", ["a"], [{}], [None], {"error": 1}, {"type": 3}, [[]], "\ud83d", {"message": None}]
    )


@pytest.mark.parametrize("protocol", BODIES)
def test_nothing_that_a_server_sends_raises_anything_but_worker_error(protocol):
    """600 responses: well-formed ones with wrong values, errors, streams, bytes changed at random."""
    rng = random.Random(protocol)
    replies = 0

    def play(n, conn):
        body = mutated(BODIES[protocol], rng)
        kind = rng.choice(["value", "value", "error", "bytes", "stream"])
        if kind == "error":
            return http(
                {"error": mutated({"message": "m", "code": 429, "details": [{"retryDelay": "1s"}]}, rng)},
                rng.choice([200, 400, 429]),
            )
        if kind == "stream":
            event = mutated(
                {"choices": [{"delta": {"content": "a"}, "finish_reason": "stop"}], "usage": {}}, rng
            )
            return http(
                f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n".encode(), Content_Type="text/event-stream"
            )
        answer = bytearray(http(body))
        if kind == "bytes":
            for _ in range(rng.randint(1, 5)):
                answer[rng.randrange(len(answer))] = rng.randrange(256)
            conn.sendall(answer)
            return None
        return bytes(answer)

    with Rogue(play) as server:
        w = worker(server, protocol=protocol, attempts=1, price=[1, 1], timeout=5)
        for i in range(600):
            try:
                reply = w.chat(CHAT, on_text=[].append if i % 2 else None)
            except WorkerError:
                continue
            replies += 1
            assert type(reply.text) is str and reply.text.encode() is not None and type(reply.finish) is str
            assert reply.cost is None or 0 <= reply.cost < 1e6
    assert 60 < replies < 540 and w.calls == replies
