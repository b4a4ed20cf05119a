"""Tests of workers: their requests and replies, compared with the providers' documentation.

Further tests are about servers that fail, replayed replies, money, pools, and the command line.
"""

import ast
import contextlib
import dataclasses
import json
import multiprocessing
import os
import re
import socket
import socketserver
import ssl
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from email.utils import formatdate

import pytest
import requests
from requests.packages.urllib3 import Timeout

import workers
from workers import (
    Budget,
    Replay,
    Reply,
    Worker,
    WorkerError,
    check_pool,
    load_pool,
)

ROOT = os.path.dirname(os.path.abspath(workers.__file__))
KEY = "sk-planted-0123456789"
CHAT = [{"role": "user", "content": "Why?"}]
GOOD = {
    "choices": [{"message": {"role": "assistant", "content": "Because."}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 10, "completion_tokens": 2},
}
QUICK = 3  # a timeout in seconds, so short that the first pause between attempts is at most 10 ms


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.setenv("PLANTED", KEY)
    monkeypatch.setenv("BLANK", " ")
    monkeypatch.setenv("CURLY", f"“{KEY}”")
    monkeypatch.setenv("TWO_LINES", f"{KEY}\n{KEY}")
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


def http(body, status=200, **headers):
    """Return an HTTP response as bytes. A body that is not bytes becomes JSON."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"HTTP/1.1 {status} Whatever", f"Content-Length: {len(content)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + content


class OddServer(socketserver.ThreadingTCPServer):
    """A server whose answers a test chooses.

    Args:
        play: bytes that answer every request; a list of answers in bytes, whose last item is
            repeated; or a function play(n, conn) of the request's number, counting from 0, and its
            connection. The function returns bytes to send, or None to hang up.

    `requests` lists (time, head, body); `most` is the maximum number of simultaneous requests.
    """

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, play):
        super().__init__(("127.0.0.1", 0), None)
        answers = play if isinstance(play, list) else [play]
        self.play = play if callable(play) else lambda n, conn: answers[min(n, len(answers) - 1)]
        self.requests = []
        self.running = 0
        self.most = 0
        self.lock = threading.Lock()
        self.over = threading.Event()  # set when the test is over
        self.url = f"http://127.0.0.1:{self.server_address[1]}/v1"
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def __exit__(self, *_):
        self.over.set()
        self.shutdown()
        self.server_close()

    def finish_request(self, conn, _):
        with conn.makefile("rb") as file, contextlib.suppress(OSError):  # The client gave up.
            while line := file.readline():
                while not line.endswith(b"\r\n\r\n"):
                    line += file.readline()
                head = line.decode()
                body = file.read(int(re.search(r"(?i)content-length: (\d+)", head)[1]))
                with self.lock:
                    n = len(self.requests)
                    self.requests.append((time.monotonic(), head, json.loads(body)))
                    self.running += 1
                    self.most = max(self.most, self.running)
                answer = self.play(n, conn)
                with self.lock:
                    self.running -= 1
                if answer is None:
                    return
                conn.sendall(answer)


def worker(server, **fields):
    return Worker(
        **{"protocol": "openai", "base_url": server.url, "model": "m", "timeout": 30, **fields}
    )


def pool_file(folder, *entries):
    (folder / "pool.json").write_text(json.dumps(entries))
    return str(folder / "pool.json")


# Protocols, as the providers' documentation describes them

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi."},
    {"role": "assistant", "content": " "},
    {"role": "user", "content": "Why?"},
]


def on_the_wire(response, overrides=(), **fields):
    """Call a worker; return its request's head in lower case, the request's body, and the reply."""
    with OddServer(http(response)) as server:
        reply = worker(server, **fields).chat(TALK, **dict(overrides))
    [(_, head, body)] = server.requests
    return head.lower(), body, reply


def test_openai_on_the_wire():
    """Overrides replace parameters. A blank turn, which some providers reject, becomes (empty)."""
    head, body, reply = on_the_wire(
        GOOD,
        {"max_completion_tokens": 9},
        api_key_env="PLANTED",
        price=[1, 10],
        headers={"X-Title": "ours"},
        params={"max_completion_tokens": 5, "reasoning": {"effort": "low"}},
    )
    assert head.startswith("post /v1/chat/completions http/1.1")
    assert f"\r\nauthorization: bearer {KEY}\r\n" in head and "\r\nx-title: ours\r\n" in head
    assert body == {
        "model": "m",
        "max_completion_tokens": 9,
        "reasoning": {"effort": "low"},
        "messages": [*TALK[:2], {"role": "assistant", "content": "(empty)"}, TALK[3]],
    }
    assert (
        reply == Reply("Because.", 10, 2, pytest.approx(30e-6), reply.seconds) and reply.seconds > 0
    )
    assert "authorization" not in on_the_wire(GOOD)[0]


def test_anthropic_on_the_wire():
    answer = {
        "content": [
            {"type": "thinking", "thinking": "Hm."},
            {"type": "text", "text": "Be"},
            {"type": "text", "text": "cause."},
        ],
        "stop_reason": "max_tokens",
        "usage": {"input_tokens": 10, "output_tokens": 7, "cache_read_input_tokens": 100},
    }
    head, body, reply = on_the_wire(
        answer, protocol="anthropic", api_key_env="PLANTED", price=[3, 15]
    )
    assert head.startswith("post /v1/messages http/1.1") and f"\r\nx-api-key: {KEY}\r\n" in head
    assert "\r\nanthropic-version: 2023-06-01\r\n" in head
    assert body == {
        "model": "m",
        "max_tokens": 4096,
        "system": "Be brief.",
        "messages": [TALK[1], {"role": "assistant", "content": "(empty)"}, TALK[3]],
    }
    assert reply == Reply("Because.", 110, 7, pytest.approx(435e-6), reply.seconds, "length")


def answer(content="Because.", finish="stop", usage=GOOD["usage"], **message):
    choice = {"message": {"content": content, **message}, "finish_reason": finish}
    return {"choices": [choice], "usage": usage}


BOXED = r'To strip it: re.sub(r"<think>.*?</think>", "", s). \boxed{5}'


@pytest.mark.parametrize(
    "response, text, finish",
    [
        (answer(None, "length"), "", "length"),
        (answer("", "content_filter"), "", "content_filter"),
        (answer(None, refusal="I will not."), "I will not.", "stop"),
        (
            answer([{"type": "thinking", "thinking": "Hm"}, {"type": "text", "text": "A"}]),
            "A",
            "stop",
        ),
        (answer("Hm.", None), "Hm.", "stop"),
        (answer("<think>Why? Because.</think>\n\nSo."), "So.", "stop"),
        (answer("<think>Why? Bec", "length"), "", "length"),
        (answer([{"type": "text"}, {"type": "text", "text": "A"}]), "A", "stop"),
        (answer(["A", {"type": "image"}, "B"]), "AB", "stop"),
        (answer("<think>Hm.</think>" + BOXED), BOXED, "stop"),
        (answer("Hm.", "model_length"), "Hm.", "length"),  # Mistral
        # Gemini sends no message if its thoughts took all the tokens, or a filter blocked the
        # answer.
        ({"choices": [{"finish_reason": "length", "index": 0}]}, "", "length"),
        ({"choices": [{"finish_reason": "content_filter: OTHER"}]}, "", "content_filter: OTHER"),
        ({"choices": [{"finish_reason": "length", "message": None}]}, "", "length"),
    ],
)
def test_what_models_answer(response, text, finish):
    _, _, reply = on_the_wire(response)
    assert (reply.text, reply.finish) == (text, finish)


@pytest.mark.parametrize(
    "reply, text",
    [
        # A block at the beginning ends with its first closing tag.
        ("<think>a</think>So.", "So."),
        ("<think>a\nb\n</think>\n\nSo.\n", "So.\n"),
        ("\n <think>a</think> So.", "So."),
        ("<think></think>So.", "So."),
        ("<think>\n\n</think>\n\nSo.", "So."),
        (f"<think>a</think>{BOXED}", BOXED),
        ("<think>a</think>b</think>\nc", "b</think>\nc"),
        ("<think>a</think><think>b</think>c", "<think>b</think>c"),
        ("<think>a <think>b</think> c", "c"),
        ("<think>a</think>", ""),
        ("<think>a</think>\n", ""),
        # If a reply begins with <think> and never closes it, all of it counts as thoughts.
        ("<think>", ""),
        ("<think>a\nb", ""),
        (" <think>a <think> b", ""),
        ("<think>a</thin", ""),
        # Without an opening tag, thoughts end with the first closing tag that a line break follows,
        # or with one that is alone on the last line.
        ("a\n</think>\n\nSo.", "So."),
        ("a</think>\nSo.", "So."),
        ("a</think> \t\r\n  So.", "So."),
        ("</think>\nSo.", "So."),
        ("a\n</think>\nb\n</think>\nc", "b\n</think>\nc"),
        ("It ends in </think> here.\n</think>\nSo.", "So."),
        ("a\n</think>\nWrite <think>.", "Write <think>."),
        ("a\n</think>", ""),
        ("a\n</think>\n \n", ""),
        # An answer may mention tags.
        ("BEGIN <think>x</think> AFTER", "BEGIN <think>x</think> AFTER"),
        ("BEGIN <think>x</think>\nAFTER", "BEGIN <think>x</think>\nAFTER"),
        ("BEGIN <think>\nx\n</think>\n", "BEGIN <think>\nx\n</think>\n"),
        ("So <think> is a tag.", "So <think> is a tag."),
        ("So </think> is a tag.", "So </think> is a tag."),
        ("a</think>So.", "a</think>So."),
        ("It ends with </think>", "It ends with </think>"),
        ("<thinking>a</thinking>So.", "<thinking>a</thinking>So."),
        ("`<think>` opens.", "`<think>` opens."),
        (BOXED, BOXED),
        (" So.\n", " So.\n"),
        ("", ""),
    ],
)
def test_thoughts_are_removed_and_nothing_else(reply, text):
    assert workers.without_leading_thoughts(reply) == text
    assert on_the_wire(answer(reply))[2].text == text
    claude = {"content": [{"type": "text", "text": reply}]}
    assert on_the_wire(claude, protocol="anthropic")[2].text == text


COUNTS = {"prompt_tokens": 10, "completion_tokens": 2}
CLAUDE = {"content": [{"type": "text", "text": "Because."}], "stop_reason": "end_turn"}


@pytest.mark.parametrize(
    "usage",
    [
        [],
        [COUNTS],
        "12",
        7,
        {},
        {"prompt_tokens": "10", "completion_tokens": "2"},
        {"prompt_tokens": 10, "completion_tokens": None},
        {"prompt_tokens": 10.5, "completion_tokens": 2},
        {"prompt_tokens": True, "completion_tokens": 2},
        {"prompt_tokens": [10], "completion_tokens": {}},
        {**COUNTS, "total_tokens": "12"},
        {**COUNTS, "total_tokens": [12]},
        {**COUNTS, "total_tokens": -12},
        {**COUNTS, "cache_creation_input_tokens": "5"},
        {**COUNTS, "prompt_tokens_details": {"cache_write_tokens": "5"}},
        {"input_tokens": None, "output_tokens": 2},
        {"input_tokens": "10", "output_tokens": 2},
        {"input_tokens": 10, "output_tokens": 2, "cache_read_input_tokens": "5"},
        {
            "input_tokens": 10,
            "output_tokens": 2,
            "cache_creation": {"ephemeral_1h_input_tokens": []},
        },
        {**COUNTS, "cost": "0.1", "total_tokens": ""},
        {**COUNTS, "cost": float("nan"), "total_tokens": "1"},
    ],
)
@pytest.mark.parametrize("protocol", ["openai", "anthropic"])
def test_an_odd_usage_loses_no_reply(usage, protocol):
    response = answer(usage=usage) if protocol == "openai" else {**CLAUDE, "usage": usage}
    _, _, reply = on_the_wire(response, protocol=protocol, price=[1, 10])
    assert (reply.text, reply.prompt_tokens, reply.completion_tokens) == ("Because.", 0, 0)
    assert reply.cost is None


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32-le"])
def test_a_byte_order_mark_is_no_fault_of_a_reply(encoding):
    _, _, reply = on_the_wire(json.dumps(answer("Olé."), ensure_ascii=False).encode(encoding))
    assert reply.text == "Olé."


@pytest.mark.parametrize("status", [201, 202, 203])
def test_every_status_of_success_brings_a_reply(status):
    with OddServer(http(GOOD, status)) as server:
        assert worker(server).chat(CHAT).text == "Because."


WRITTEN = {"input_tokens": 10, "output_tokens": 2, "cache_creation_input_tokens": 100}


@pytest.mark.parametrize(
    "usage, dollars",
    [  # at $1 per million prompt tokens and $10 per million completion tokens
        (WRITTEN, 10 + 1.25 * 100 + 20),
        ({**WRITTEN, "cache_read_input_tokens": 50}, 10 + 1.25 * 100 + 50 + 20),
        (
            {
                **WRITTEN,
                "cache_creation": {
                    "ephemeral_5m_input_tokens": 40,
                    "ephemeral_1h_input_tokens": 60,
                },
            },
            10 + 1.25 * 40 + 2 * 60 + 20,
        ),
        ({**WRITTEN, "cache_creation": None, "cache_creation_input_tokens": None}, 10 + 20),
        # litellm and OpenRouter include cached tokens in prompt_tokens.
        ({**COUNTS, "prompt_tokens": 110, "cache_creation_input_tokens": 100}, 10 + 125 + 20),
        (
            {**COUNTS, "prompt_tokens": 110, "prompt_tokens_details": {"cache_write_tokens": 100}},
            10 + 125 + 20,
        ),
        (
            {**COUNTS, "prompt_tokens": 110, "prompt_tokens_details": {"cached_tokens": 100}},
            110 + 20,
        ),
        # Portkey does not, but counts them in the total.
        (
            {
                **COUNTS,
                "total_tokens": 162,
                "cache_creation_input_tokens": 100,
                "cache_read_input_tokens": 50,
            },
            10 + 1.25 * 100 + 50 + 20,
        ),
    ],
)
def test_what_is_written_to_a_cache_costs_more(usage, dollars):
    is_claude = "input_tokens" in usage
    response = {**CLAUDE, "usage": usage} if is_claude else answer(usage=usage)
    protocol = "anthropic" if is_claude else "openai"
    _, _, reply = on_the_wire(response, protocol=protocol, price=[1, 10])
    assert reply.cost == pytest.approx(dollars / 1e6)


@pytest.mark.parametrize(
    "header, usage, price, cost",
    [
        ("0.25", COUNTS, None, 0.25),
        ("2.5e-1", COUNTS, [1, 10], 0.25),
        ("0.25", None, None, 0.25),
        ("0.25", {**COUNTS, "cost": 0.5}, None, 0.5),  # the higher of two reported costs
        ("0.0", COUNTS, [1, 10], 30e-6),
        ("None", COUNTS, [1, 10], 30e-6),
        ("nan", COUNTS, [1, 10], 30e-6),
        ("inf", COUNTS, None, None),
        ("-1", COUNTS, [1, 10], 30e-6),
        ("", COUNTS, None, None),
    ],
)
def test_litellms_header_is_the_cost(header, usage, price, cost):
    response = http(answer(usage=usage), x_litellm_response_cost=header)
    with OddServer(response) as server:
        assert worker(server, price=price).chat(CHAT).cost == (cost and pytest.approx(cost))


@pytest.mark.parametrize(
    "usage, price, cost",
    [
        (COUNTS, [1, 10], 30e-6),
        (COUNTS, None, None),
        (COUNTS, [0, 0], 0),
        (None, [1, 10], None),
        ({**COUNTS, "prompt_tokens": -10}, [1, 10], None),
        ({**COUNTS, "completion_tokens": "2"}, [1, 10], None),
        # The reply has a text, so a count of zero tokens must be wrong.
        ({**COUNTS, "completion_tokens": 0}, [1, 10], None),
        # The total includes reasoning tokens.
        ({**COUNTS, "total_tokens": 112}, [1, 10], 1030e-6),
        # OpenRouter reports the cost.
        ({**COUNTS, "cost": 0.25}, [1, 10], 0.25),
        ({**COUNTS, "cost": 0.25}, None, 0.25),
        ({**COUNTS, "cost": 0}, [1, 10], 30e-6),
        ({**COUNTS, "cost": 0.25, "is_byok": True}, [1, 10], 30e-6),
        # Anthropic charges a fee for each search that the model makes, and does not report the fee.
        ({**COUNTS, "server_tool_use": {"web_search_requests": 2}}, [1, 10], None),
        ({**COUNTS, "server_tool_use": {"web_search_requests": 0}}, [1, 10], 30e-6),
        ({**COUNTS, "server_tool_use": None}, [1, 10], 30e-6),
        # Perplexity adds a fee for each search to the price of the tokens.
        ({**COUNTS, "cost": {"request_cost": 0.2, "total_cost": 0.25}}, [1, 10], 0.25),
        ({**COUNTS, "cost": {"total_cost": "0.25"}}, [1, 10], 30e-6),
        # xAI reports what it bills, including a fee for each search, in ticks of 1e-10 dollars.
        ({**COUNTS, "cost_in_usd_ticks": 37756000}, [1, 10], 0.0037756),
        ({**COUNTS, "cost_in_usd_ticks": 37756000}, None, 0.0037756),
        ({**COUNTS, "cost_in_usd_ticks": "37756000"}, [1, 10], 30e-6),
    ],
)
def test_what_a_reply_costs(usage, price, cost):
    """A cost that is not reported and does not follow from usage and price is None, not zero."""
    with OddServer(http(answer(usage=usage))) as server:
        one = worker(server, price=price)
        reply = one.chat(CHAT)
    assert reply.cost == (cost and pytest.approx(cost))
    assert (one.calls, one.spent) == (1, reply.cost)


def test_a_python_function_is_a_worker(tmp_path):
    (tmp_path / "tools.py").write_text(
        "from workers import Reply\n"
        "def search(messages): return 'found ' + messages[-1]['content']\n"
        "def agent(messages): return Reply('done', 5, 6, 0.25)\n"
        "def broken(messages): raise ValueError('no net')\n"
        "def silent(messages): pass\n"
        "def empty(messages): return Reply(None, 0, 0, 0)\n"
        "def half(messages): return 'half \\ud83d'\n"
        "one = Reply('same', 1, 1, 0)\n"
        "def same(messages): return one\n"
    )
    names = ["search", "agent", "broken", "silent", "empty", "half", "same"]
    entries = [{"protocol": "python", "function": f"tools.py:{name}"} for name in names]
    pool = load_pool(pool_file(tmp_path, *entries))
    assert [one.name for one in pool] == names and workers.probable_cost(pool, 1) == 0
    assert pool[0].chat(CHAT).text == "found Why?" and pool[0].chat(CHAT).cost == 0.0
    assert pool[1].chat(CHAT).cost == pool[1].spent == 0.25
    for one, says in zip(pool[2:5], ("broken: ValueError: no net", "silent: Type", "empty: Type")):
        with pytest.raises(WorkerError, match=says):
            one.chat(CHAT)
    assert pool[5].chat(CHAT).text == "half ?"
    assert pool[6].chat(CHAT) is not pool[6].chat(CHAT)  # Each call records its own seconds.
    with pytest.raises(ValueError, match="tools.py has no function find"):
        load_pool(pool_file(tmp_path, {"protocol": "python", "function": "tools.py:find"}))


@pytest.mark.parametrize(
    "numbers", ["1, 1, '0.5'", "None, 1, 0.5", "1, '1', 0.5", "1, 1, float('nan')", "1, 1, -0.5"]
)
def test_odd_numbers_of_a_functions_reply_are_a_failed_call(numbers, tmp_path):
    (tmp_path / "tools.py").write_text(
        f"from workers import Reply\ndef f(messages): return Reply('text', {numbers})\n"
    )
    spec = pool_file(tmp_path, {"protocol": "python", "function": "tools.py:f"})
    [one] = load_pool(spec, replay=tmp_path / "replay", budget=1.0)
    with pytest.raises(WorkerError, match="f: TypeError: expected .*tokens.*cost"):
        one.chat(CHAT, call_id="a")
    assert one.budget.running == 0


def test_a_function_gets_no_blank_turn_either(tmp_path):
    """It may forward the chat. Open WebUI sends a blank turn for an answer that failed."""
    (tmp_path / "tools.py").write_text("def f(messages): return messages[2]['content']")
    spec = pool_file(tmp_path, {"protocol": "python", "function": "tools.py:f"})
    [worker] = load_pool(spec, replay=str(tmp_path / "replies"))
    assert worker.chat(TALK, call_id="a").text == "(empty)"
    # Replies are kept under the chat that the worker gets.
    filled = [TALK[0], TALK[1], {"role": "assistant", "content": "(empty)"}, TALK[3]]
    key = worker.replay.key(worker, filled, worker.params, "a")
    assert worker.replay.find(key).text == "(empty)"


def test_a_function_cannot_change_the_callers_messages(tmp_path):
    """A function may change the messages that it gets, but the next attempt must not see that."""
    (tmp_path / "tools.py").write_text(
        "def agent(messages):\n"
        "    messages[0]['content'] += ' Because.'\n"
        "    messages.append(messages[0])\n"
        "    if not seen: seen.append(1); raise ConnectionError\n"
        "    return str(messages)\n"
        "seen = []\n"
    )
    row = {"protocol": "python", "function": "tools.py:agent", "timeout": QUICK}
    [one] = load_pool(pool_file(tmp_path, row))
    chat = [{"role": "user", "content": "Why?"}]
    assert (
        ast.literal_eval(one.chat(chat).text) == [{"role": "user", "content": "Why? Because."}] * 2
    )
    assert chat == [{"role": "user", "content": "Why?"}]


def test_a_users_file_may_import_the_modules_beside_it(tmp_path):
    (tmp_path / "beside_the_pool.py").write_text("def answer(): return 'yes'\n")
    (tmp_path / "tools.py").write_text(
        "import beside_the_pool\ndef f(messages): return beside_the_pool.answer()\n"
    )
    [one] = load_pool(pool_file(tmp_path, {"protocol": "python", "function": "tools.py:f"}))
    assert one.chat(CHAT).text == "yes"


ENDLESS = """
import os, sys, threading, requests
class Ended(BaseException): pass
def sleep(messages): threading.Event().wait()
def end(messages): sys.exit(0)
def interrupt(messages): raise KeyboardInterrupt
def own(messages): raise Ended("over")
def give_up(messages): raise TimeoutError("the database is locked")
def send(messages): raise requests.ReadTimeout("Read timed out. (read timeout=0.5)")
def encoded(messages): return b"yes"
def generated(messages): yield "yes"
"""


@pytest.mark.parametrize(
    "name, says",
    [
        ("sleep", "no whole answer in time; its timeout is 0.05 s"),
        ("end", r"raised SystemExit\(0\)"),
        ("interrupt", "KeyboardInterrupt"),
        ("own", r"raised Ended\('over'\)"),
        ("give_up", "TimeoutError: the database is locked"),
        ("send", r"ReadTimeout: Read timed out. \(read timeout=0.5\)"),
        ("encoded", "TypeError: expected a text, .*b'yes'"),
        ("generated", "TypeError: expected a text, .*generator"),
    ],
)
@pytest.mark.filterwarnings("error")
def test_a_function_that_does_not_answer_is_a_failed_call(name, says, tmp_path):
    """The error names the worker and its function's file. The caller can catch it and continue."""
    (tmp_path / "tools.py").write_text(ENDLESS)
    timeout = 0.05 if name == "sleep" else 30
    row = {"protocol": "python", "function": f"tools.py:{name}", "name": "jane", "timeout": timeout}
    pool = load_pool(pool_file(tmp_path, row))
    with pytest.raises(WorkerError, match=rf"^jane: .*{says}.*tools.py:{name}, attempt 1,"):
        pool[0].chat(CHAT)
    [error] = workers.ping_workers(pool)
    assert isinstance(error, WorkerError)


@pytest.mark.parametrize(
    "ending", ["sys.exit(0)", "raise SystemExit", "class E(BaseException): pass\nraise E"]
)
def test_a_file_whose_import_ends_is_an_error_that_names_it(ending, tmp_path):
    (tmp_path / "tools.py").write_text(f"import sys\n{ending}\ndef f(messages): pass\n")
    spec = pool_file(tmp_path, {"protocol": "python", "function": "tools.py:f", "name": "jane"})
    with pytest.raises(ValueError, match="jane: function: .*tools.py cannot be imported: "):
        load_pool(spec)
    with pytest.raises(ValueError, match="tools.py cannot be imported: "):
        workers.load_function(f"{tmp_path}/tools.py:f")  # loads a reward or a grader


@pytest.mark.parametrize("name", ["end", "own"])
def test_a_users_function_raises_nothing_that_ends_the_program(name, tmp_path):
    (tmp_path / "mine.py").write_text(ENDLESS)
    reward = workers.load_function(f"{tmp_path}/mine.py:{name}")
    with pytest.raises(RuntimeError, match="it raised "):
        reward(None)


def test_a_coroutine_is_no_function(tmp_path):
    (tmp_path / "tools.py").write_text("async def f(messages): return 'yes'\n")
    with pytest.raises(ValueError, match="function: .*tools.py:f is async"):
        load_pool(pool_file(tmp_path, {"protocol": "python", "function": "tools.py:f"}))


def test_ctrl_c_in_a_users_function_is_ctrl_c(tmp_path):
    (tmp_path / "mine.py").write_text(ENDLESS)
    with pytest.raises(KeyboardInterrupt):
        workers.load_function(f"{tmp_path}/mine.py:interrupt")(None)


def cut(n, conn):
    conn.sendall(http(GOOD)[:-20])


def flood(n, conn):
    conn.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000000\r\n\r\n")
    for _ in range(100):
        conn.sendall(b"x" * 1_000_000)


def refused(status, message="no", code=None, **headers):
    return http({"error": {"message": message, "code": code}}, status, **headers)


@pytest.mark.parametrize(
    "play, asked, says",
    [  # (what the server does, how many requests it gets if two attempts are allowed, the error)
        # After a temporary error, there is a second attempt.
        *(
            (refused(status), 2, f"HTTP {status}.*no")
            for status in (408, 409, 429, 498, 500, 503, 529)
        ),
        (refused(402, "in-flight budget exhausted", Retry_After="0"), 2, "HTTP 402.*in-flight"),
        # DashScope calls too many tokens per minute an insufficient quota.
        (
            refused(429, "See https://help.x/error-code#token-limit", "insufficient_quota"),
            2,
            "HTTP 429.*token-limit",
        ),
        (http(b"<h1>Bad gateway</h1>", 502), 2, "HTTP 502.*Bad gateway"),
        (http({"error": {"message": "upstream died", "code": 502}}), 2, "HTTP 502.*upstream died"),
        (http({"error": "model is loading"}), 2, "HTTP 500.*model is loading"),
        (http(answer("Bec", "error")), 2, "failed midway"),
        (http(answer("Bec", "abort")), 2, "failed midway: abort"),  # vLLM
        # DeepSeek
        (http(answer("Bec", "insufficient_system_resource")), 2, "midway: insufficient_system"),
        (lambda n, conn: None, 2, "Error"),
        (cut, 2, "Error"),
        (b"220 mail.example ESMTP\r\n\r\n", 2, "Error"),
        (http(b" \n "), 2, "no reply"),
        # After a lasting error or an unreadable reply, there is no second attempt.
        *(
            (refused(status), 1, f"HTTP {status}.*no")
            for status in (400, 401, 402, 403, 404, 413, 422)
        ),
        (refused(502, X_Should_Retry="false"), 1, "HTTP 502"),
        (http({"error": {"message": "too long", "code": 400}}), 1, "HTTP 400.*too long"),
        (
            http(b"", 302, Location="http://127.0.0.1:9/v1"),
            1,
            "HTTP 302.* to http://127.0.0.1:9/v1",
        ),
        (http(json.dumps(GOOD).encode()[:-9]), 1, "no reply as openai"),
        (http(b"[" * 100_000), 1, "no reply as openai"),
        (http([GOOD]), 1, "no reply as openai"),
        (http({"choices": []}), 1, "no reply as openai"),
        (http({"choices": [{}]}), 1, "no reply as openai"),
        (http({"choices": [{"text": "A", "finish_reason": "stop"}]}), 1, "no reply as openai"),
        (http(answer(42)), 1, "no reply as openai"),
        (flood, 1, "larger than 32 MiB"),
        # The account has no money or no quota left, in the words of OpenAI, Anthropic, Google,
        # OpenRouter, xAI, Moonshot, Z.ai, Ollama and litellm.
        (refused(429, "You exceeded it", "insufficient_quota"), 1, "HTTP 429.*You exceeded it"),
        (refused(400, "Your credit balance is too low"), 1, "credit balance"),
        (refused(429, "GenerateRequestsPerDayPerProjectPerModel-FreeTier"), 1, "PerDay"),
        (refused(429, "Rate limit exceeded: free-models-per-day. Add credits"), 1, "per-day"),
        (http({"error": "Your team has either used all available credits"}, 429), 1, "Your team"),
        (refused(429, "Your account is suspended due to insufficient balance"), 1, "suspended"),
        (http({"error": {"type": "exceeded_current_quota_error"}}, 429), 1, "exceeded_current"),
        (refused(429, "Insufficient balance or no resource package."), 1, "no resource"),
        (refused(429, "余额不足或无可用资源包,请充值。", "1113"), 1, "1113"),
        (http({"error": "you (jane) have reached your weekly usage limit"}, 429), 1, "weekly"),
        (http({"error": {"type": "budget_exceeded"}}, 429), 1, "budget_exceeded"),
        (refused(429, "No deployments available - crossed budget for provider"), 1, "crossed"),
        (refused(429, "Max budget limit reached."), 1, "limit reached"),
        # litellm drops OpenAI's code, but keeps its message.
        (refused(429, "read https://platform.openai.com/docs/error-codes/api-errors"), 1, "read"),
    ],
)
def test_what_ends_a_call(play, asked, says):
    with (
        OddServer(play) as server,
        pytest.raises(WorkerError, match=f"^jane: .*{says}.*attempt {asked},"),
    ):
        worker(server, name="jane", attempts=2, timeout=QUICK).chat(CHAT)
    assert len(server.requests) == asked


@pytest.mark.parametrize(
    "status, asked", [(429, 8), (498, 8), (503, 8), (529, 8), (408, 6), (409, 6), (500, 6)]
)
def test_a_busy_provider_is_asked_until_it_answers_and_a_broken_one_six_times(status, asked):
    gives_up = pytest.raises(WorkerError, match="attempt 6,")
    with OddServer([refused(status)] * 7 + [http(GOOD)]) as server:
        with gives_up if asked == 6 else contextlib.nullcontext():
            assert worker(server, timeout=QUICK).chat(CHAT).text == "Because."
    assert len(server.requests) == asked


def test_litellms_500_for_an_overloaded_claude_is_no_failure():
    """Such a provider is merely busy, and charges nothing."""
    budget = Budget(1.0)
    overloaded = http({"error": {"message": 'AnthropicError - {"type": "overloaded_error"}'}}, 500)
    fields = {"price": [0, 10], "params": {"max_tokens": 1000}, "budget": budget}
    with OddServer([overloaded] * 7 + [http(GOOD)]) as server:
        assert worker(server, timeout=QUICK, **fields).chat(CHAT).text == "Because."
    assert budget.left == pytest.approx(1 - 20e-6)


def test_the_wait_that_is_asked_for_is_kept():
    for wait, least in (("0.3", 0.3), ("Wed, 21 Oct 2015 07:28:00 GMT", 0), ("soon", 0)):
        with OddServer([refused(429, Retry_After=wait), http(GOOD)]) as server:
            worker(server, timeout=QUICK).chat(CHAT)
        assert server.requests[1][0] - server.requests[0][0] >= least
    # The wait exceeds 3 * timeout (90 s), so there is no second attempt.
    for wait in ("3600", formatdate(time.time() + 3600, usegmt=True)):
        with OddServer(refused(429, Retry_After=wait)) as server:
            with pytest.raises(WorkerError, match="429"):
                worker(server).chat(CHAT)
        assert len(server.requests) == 1


@pytest.mark.parametrize(
    "sent", [0, 20, -30], ids=["before the head", "in the head", "in the body"]
)
def test_a_slow_answer_is_one_reply_to_one_request(sent):
    waits, go_on = threading.Event(), threading.Event()

    def slow(n, conn):
        conn.sendall(http(GOOD)[:sent])
        waits.set()
        assert go_on.wait(60)
        return http(GOOD)[sent:]

    with OddServer(slow) as server, ThreadPoolExecutor(1) as thread:
        reply = thread.submit(worker(server, timeout=60).chat, CHAT)
        assert waits.wait(60) and not reply.done()
        go_on.set()
        assert reply.result().text == "Because." and len(server.requests) == 1


@pytest.mark.parametrize("begins", [b"", http(GOOD)[:-20], b"HTTP/1.1 200 OK\r\n\r\n"])
@pytest.mark.parametrize("drip", [b"", b" "])
def test_who_does_not_answer_in_time_is_not_asked_again(begins, drip):
    def late(n, conn):
        conn.sendall(begins)
        while not server.over.wait(0.01):
            conn.sendall(drip if begins else b"")

    with OddServer(late) as server, pytest.raises(WorkerError, match="timeout is 0.3 s|no reply"):
        worker(server, timeout=0.3).chat(CHAT)
    assert len(server.requests) == 1


def test_who_cannot_be_reached():
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/v1"
    with pytest.raises(WorkerError, match="gone: .*refused.*attempt 6,"):
        Worker("openai", url, "m", name="gone", timeout=QUICK).chat(CHAT)


@pytest.mark.parametrize(
    "errno, attempts",
    [(socket.EAI_NONAME, 1), (socket.EAI_AGAIN, 6)],
    ids=["no such host", "no name server"],
)
def test_a_name_server_that_is_down_for_a_moment_is_asked_again(errno, attempts, monkeypatch):
    def resolve(*_, **__):
        raise socket.gaierror(errno, "no address")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    budget = Budget(1.0)
    fields = {"price": [0, 10], "params": {"max_tokens": 1000}, "budget": budget}
    with pytest.raises(WorkerError, match=f"resolve.*attempt {attempts},"):
        Worker("openai", "http://nobody.invalid/v1", "m", timeout=QUICK, **fields).chat(CHAT)
    assert budget.left == 1.0


def test_a_connection_that_is_not_made_costs_nothing(monkeypatch):
    """A certificate that is not trusted ends the call. A slow handshake or a proxy may recover."""
    fields = {"timeout": QUICK, "price": [0, 10], "params": {"max_tokens": 1000}}

    def fails(says, url, attempts):
        budget = Budget(1.0)
        with pytest.raises(WorkerError, match=f"{says}.*attempt {attempts},"):
            Worker("openai", url, "m", budget=budget, **fields).chat(CHAT)
        assert budget.left == 1.0

    with OddServer(http(GOOD)) as server:
        url = server.url.replace("http", "https")  # The server never answers the handshake.
        monkeypatch.setattr(workers, "Timeout", lambda connect, read: Timeout(0.01, read))
        fails("no TLS handshake", url, 6)

        def refuse(*_, **__):
            raise ssl.SSLCertVerificationError(1, "[SSL: CERTIFICATE_VERIFY_FAILED] self-signed")

        monkeypatch.setattr(ssl.SSLContext, "wrap_socket", refuse)
        fails("self-signed.*REQUESTS_CA_BUNDLE", url, 1)
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        port = proxy.getsockname()[1]
    monkeypatch.setenv("https_proxy", f"http://me:password@127.0.0.1:{port}")
    fails("Unable to connect to proxy", "https://model.example/v1", 6)


def test_no_key_is_in_any_error_or_file(tmp_path):
    echo = refused(400, f"Incorrect key {KEY}\x1b[2J and {KEY[:9]}... in header-secret")
    with OddServer([http(GOOD), echo]) as server:
        one = worker(server, api_key_env="PLANTED", headers={"X-Pass": "header-secret"})
        one.replay = Replay(tmp_path / "r")
        one.chat(CHAT, call_id="0")
        with pytest.raises(WorkerError, match="Incorrect key") as caught:
            one.chat(CHAT)
    for text in (str(caught.value), repr(one), (tmp_path / "r").read_text()):
        assert KEY not in text and "header-secret" not in text and "\x1b" not in text
    assert len(str(caught.value)) < 600 and caught.value.__cause__ is None


@pytest.mark.parametrize(
    "echo",
    [
        refused(401, f"Incorrect key {KEY}"),
        http({"headers": {"authorization": f"Bearer {KEY}"}}),
        # A long message is cut, and the key must be masked before that.
        http(("x" * 357 + KEY).encode()),
    ],
)
def test_an_echoed_header_is_masked_word_by_word(echo):
    with OddServer(echo) as server, pytest.raises(WorkerError) as caught:
        worker(server, headers={"Authorization": f"Bearer {KEY}"}).chat(CHAT)
    assert KEY[:8] not in str(caught.value)


def test_a_short_header_is_no_secret():
    with OddServer(refused(401, "Retry 1 failed")) as server:
        with pytest.raises(WorkerError, match=f"HTTP 401 of {server.url}.*Retry 1 failed"):
            worker(server, headers={"X-Retry": "1"}).chat(CHAT)


def test_a_key_of_two_lines_is_in_no_error(monkeypatch):
    monkeypatch.setenv("PLANTED", f"{KEY}\nsecond-line")
    with OddServer(http(GOOD)) as server, pytest.raises(WorkerError, match="header") as caught:
        worker(server, api_key_env="PLANTED").chat(CHAT)
    assert KEY not in str(caught.value) and "second-line" not in str(caught.value)


def test_concurrency_is_a_workers_own():
    with OddServer(lambda n, conn: server.over.wait(0.02) or http(GOOD)) as server:
        one = worker(server, concurrency=3)
        with ThreadPoolExecutor(12) as threads:
            list(threads.map(lambda _: one.chat(CHAT), range(24)))
        assert server.most <= 3 and one.calls == 24


def test_a_replay_makes_a_second_run_free(tmp_path):
    def five(one):
        asked = [(CHAT, "a", 1), (CHAT, "b", 1), (CHAT * 2, "a", 1), (CHAT, "a", 2), (CHAT, "a", 1)]
        return [one.chat(chat, call_id, top_p=top_p) for chat, call_id, top_p in asked]

    numbered = [http(answer(f"{n} \u2028 \r\n é \ud83d")) for n in range(9)]
    with OddServer(numbered) as server:
        first = worker(server, price=[1, 10], replay=Replay(tmp_path / "replay"))
        replies = five(first)
        again = worker(
            server, price=[1, 10], replay=Replay(tmp_path / "replay"), budget=Budget(0.0)
        )
        assert five(again) == replies and len(server.requests) == 4
        assert (
            again.spent == first.spent == pytest.approx(5 * 30e-6)
        )  # Replayed replies count, too.
        first.chat(CHAT)  # A call without a call_id is sent, and its reply is not kept.
        worker(server, name="another", replay=Replay(tmp_path / "replay")).chat(CHAT, call_id="a")
        assert len(server.requests) == 6
        with ThreadPoolExecutor(8) as threads:  # Equal simultaneous calls are sent only once.
            assert len({*threads.map(lambda _: first.chat(CHAT, "c").text, range(8))}) == 1
        assert len(server.requests) == 7


def test_a_replay_knows_a_worker_by_its_whole_url(tmp_path):
    """Servers on two ports of a machine are different workers, even if they serve one model."""
    with OddServer(http(answer("one"))) as one, OddServer(http(answer("two"))) as two:
        for server, text in ((one, "one"), (two, "two"), (one, "one")):
            player = worker(server, replay=Replay(tmp_path / "replay"))
            assert player.chat(CHAT, call_id="a").text == text
        assert len(one.requests) == len(two.requests) == 1


def test_a_replay_knows_a_function_by_its_code(tmp_path):
    tool = tmp_path / "tool.py"
    spec = pool_file(tmp_path, {"protocol": "python", "function": "tool.py:answer"})

    def replies(code, folder=tmp_path):
        (folder / "tool.py").write_text(code)
        [one] = load_pool(spec.replace(str(tmp_path), str(folder)), replay=tmp_path / "replay")
        return one.chat(CHAT, call_id="a").text

    first = "import itertools\nn = itertools.count()\ndef answer(chat): return f'{next(n)} old'\n"
    assert replies(first) == replies(first) == "0 old"
    assert replies(first.replace("old", "new")) == "0 new"
    assert replies(first) == "0 old"
    [loaded] = load_pool(spec, replay=tmp_path / "replay")
    # A pool uses the code that it has loaded, even after the file changes.
    tool.write_text(first.replace("old", "newer"))
    assert loaded.chat(CHAT, call_id="a").text == "0 old"
    assert loaded.chat(CHAT, call_id="b").text == "1 old"
    moved = tmp_path / "moved"
    moved.mkdir()
    (moved / "pool.json").write_text((tmp_path / "pool.json").read_text())
    tool.unlink()
    assert replies(first, moved) == "0 old"


def test_a_replay_knows_the_laptop_world_whatever_its_port(tmp_path):
    one, other = load_pool("local", tmp_path / "replay")[:2]
    moved = dataclasses.replace(one, base_url="http://127.0.0.1:9/v1")
    assert one.replay.key(one, CHAT, {}, "a") == one.replay.key(moved, CHAT, {}, "a")
    assert one.replay.key(one, CHAT, {}, "a") != one.replay.key(other, CHAT, {}, "a")


def test_shared_replies_are_paid_once_whoever_asks(tmp_path):
    """Equal calls with different ids share a reply only if both ids begin with `share`."""
    numbered = [http(answer(str(n))) for n in range(9)]
    with OddServer(numbered) as server:
        one = worker(server, replay=Replay(tmp_path / "replay", share="7/"))
        ids = ["7/0/1/0", "7/3/2/1", "8/0/1/0", "test:0/1", "test:0/2", "7/9/9/9"]
        assert [one.chat(CHAT, i).text for i in ids] == ["0", "0", "1", "2", "3", "0"]
        assert one.chat(CHAT, "7/0/1/0", top_p=1).text == "4"
        assert one.chat(CHAT).text == "5"  # Without an id, no reply is shared.
        assert len(server.requests) == 6


def test_a_replay_sees_what_other_processes_have_appended(tmp_path):
    with OddServer([http(answer(str(n))) for n in range(9)]) as server:
        early, other = (worker(server, replay=Replay(tmp_path / "r", share="7/")) for _ in "ab")
        assert other.chat(CHAT, "7/0").text == early.chat(CHAT, "7/1").text == "0"
        assert other.chat(CHAT * 2, "7/0").text == early.chat(CHAT * 2, "7/1").text == "1"
        assert early.chat(CHAT * 3, "7/1").text == other.chat(CHAT * 3, "7/0").text == "2"
        assert len(server.requests) == 3


def test_torn_lines_are_ignored_and_harm_no_other(tmp_path):
    path, reply = tmp_path / "replay", Reply("x", 1, 2, None, 0.5)
    Replay(path).keep("a", reply), Replay(path).keep("b", reply)
    path.write_bytes(path.read_bytes()[:-30])  # The process was killed while it wrote.
    Replay(path).keep("c", reply)
    assert Replay(path).replies == {"a": reply, "c": reply}


def keep_fifty(path, name):
    for i in range(50):
        Replay(path).keep(f"{name}{i}", Reply("x" * 3000, 1, 2, None, 0.5))


def test_processes_append_at_the_same_time(tmp_path):
    with multiprocessing.Pool(3) as processes:
        processes.starmap(keep_fifty, [(tmp_path / "replay", name) for name in "abc"], chunksize=1)
    known = Replay(tmp_path / "replay").replies
    assert set(known) == {f"{name}{i}" for name in "abc" for i in range(50)}


def test_a_budget_is_never_passed():
    """With a budget of $0.005, four of twenty simultaneous calls are made.

    Each call reserves its maximum cost, $0.0012, and then costs $0.001. After four calls, $0.001 is
    left, which is too little for a fifth.
    """
    budget = Budget(0.005)
    fields = {"price": [0, 10], "params": {"max_tokens": 120}, "budget": budget}
    with OddServer(http(answer(usage={"prompt_tokens": 0, "completion_tokens": 100}))) as server:
        pool = [worker(server, name=name, **fields) for name in "ab"]
        with ThreadPoolExecutor(20) as threads:
            calls = [threads.submit(pool[i % 2].chat, CHAT) for i in range(20)]
        errors = [str(call.exception()) for call in calls if call.exception()]
    assert len(errors) == 16 and all("the budget of $0.005 is spent" in error for error in errors)
    assert len(server.requests) == 4 and budget.refused and budget.left == pytest.approx(0.001)


def test_a_budget_that_a_function_has_overspent_has_nothing_left(tmp_path):
    """The cost of a call to a function is known only after the call."""
    (tmp_path / "tools.py").write_text(
        "from workers import Reply\ndef f(messages): return Reply('yes', 1, 1, 0.75)\n"
    )
    spec = pool_file(tmp_path, {"protocol": "python", "function": "tools.py:f"})
    [one] = load_pool(spec, budget=1.0)
    assert one.chat(CHAT).text == one.chat(CHAT).text == "yes"
    with pytest.raises(WorkerError, match=r"the budget of \$1 is spent, but for \$0.0000"):
        one.chat(CHAT)


def test_a_budget_that_is_too_small_for_one_call_is_not_called_spent():
    budget = Budget(0.001)
    budget.reserve(0.0001)
    budget.settle(0.0001, 0.0001)
    with pytest.raises(WorkerError, match=r"budget of \$0.001 is too small; .* reserves \$0.0020"):
        budget.reserve(0.002)


@pytest.mark.parametrize(
    "answers, left",
    [  # (answers, what is left of $1); an attempt reserves $0.01, and a good reply costs $0.00002
        ([refused(400)], 1),
        ([refused(429), http(GOOD)], 1 - 20e-6),
        ([refused(402, Retry_After="0"), http(GOOD)], 1 - 20e-6),
        ([refused(503), http(GOOD)], 1 - 20e-6),
        ([refused(500), refused(400)], 0.99),
        ([http(b"{")], 0.99),
        ([http(b"{", 201)], 0.99),
        ([http({"error": {"message": "x", "code": 503}}, 202), http(GOOD)], 0.99 - 20e-6),
        ([http(answer(usage=None))], 0.99),
        # OpenRouter does not charge for an answer that ends with the reason "error". Providers may
        # charge for one that ends with another such reason, or for one that is only an error.
        ([http(answer("Bec", "error")), http(GOOD)], 1 - 20e-6),
        ([http(answer("Bec", "abort")), http(GOOD)], 0.99 - 20e-6),
        ([http({"error": {"message": "x", "code": 503}}), http(GOOD)], 0.99 - 20e-6),
    ],
)
def test_an_attempt_that_may_be_billed_counts_whole(answers, left):
    budget = Budget(1.0)
    with OddServer(answers) as server, contextlib.suppress(WorkerError):
        worker(
            server, price=[0, 10], params={"max_tokens": 1000}, budget=budget, timeout=QUICK
        ).chat(CHAT)
    assert budget.left == pytest.approx(left, abs=1e-9) and budget.running == 0


def test_the_most_that_a_call_can_cost_is_reserved():
    """OpenRouter may choose a host that costs more than the pool's price, up to max_price."""
    seen = []
    params = {"max_tokens": 1000, "provider": {"max_price": {"prompt": 0, "completion": 20}}}
    with OddServer(lambda n, conn: seen.append(budget.left) or http(GOOD)) as server:
        budget = Budget(1.0)
        worker(server, price=[0, 10], params=params, budget=budget).chat(CHAT)
        with pytest.raises(WorkerError, match="budget"):
            worker(server, budget=budget).chat(CHAT)  # This worker's price is unknown.
        with pytest.raises(WorkerError, match=r"too small; this call reserves \$0.0200"):
            worker(server, price=[0, 10], params=params, budget=Budget(0.01)).chat(CHAT)
    assert seen == [pytest.approx(1 - 0.02)] and budget.left == pytest.approx(1 - 20e-6)


RIGHT = {"protocol": "openai", "base_url": "http://h/v1", "model": "m"}


@pytest.mark.parametrize(
    "change, field",
    [
        ({"modle": ""}, "modle"),
        ({"model": ""}, "model"),
        ({"base_url": ""}, "base_url"),
        ({"base_url": f"https://me:{KEY}@h/v1"}, "base_url"),
        ({"base_url": "https://h/v1?v=1"}, "base_url"),
        ({"base_url": "https://h/v1/chat/completions"}, "base_url: .*that each call appends"),
        ({"base_url": "https://h/v1/Messages/"}, "base_url: .*that each call appends"),
        ({"base_url": "https://h/v1/completions"}, "base_url: .*that each call appends"),
        ({"base_url": "https://h/v1/responses"}, "base_url: .*that each call appends"),
        ({"note": 7}, "note"),
        ({"note": ""}, "note"),
        ({"note": "one\ntwo"}, "note"),
        ({"note": "one\\\ntwo"}, "note"),
        ({"protocol": "smtp"}, "protocol"),
        ({"protocol": []}, "protocol"),
        ({"api_key_env": KEY}, "api_key_env"),
        ({"api_key_env": "ABSENT"}, r"\$ABSENT"),
        ({"api_key_env": "BLANK"}, r"\$BLANK is not set$"),
        ({"api_key_env": "CURLY"}, r"\$CURLY is not one line of ASCII"),
        ({"api_key_env": "TWO_LINES"}, r"\$TWO_LINES is not one line of ASCII"),
        ({"params": [1]}, "params"),
        ({"params": {"n": 2}}, "params"),
        ({"headers": {"a": 1}}, "headers"),
        ({"headers": ["a"]}, "headers"),
        ({"headers": {"a": f"{KEY}\n"}}, "headers: .*one-line"),
        ({"headers": {"X-Title": "Пример"}}, "headers: .*Latin-1"),
        ({"price": 3}, "price"),
        ({"price": [1]}, "price"),
        ({"price": [1, -1]}, "price"),
        ({"price": [1, "2"]}, "price"),
        ({"concurrency": 0}, "concurrency"),
        ({"concurrency": 1.5}, "concurrency"),
        ({"timeout": "1"}, "timeout"),
        ({"timeout": -1}, "timeout"),
        ({"timeout": 0.0}, "timeout"),
        ({"attempts": True}, "attempts"),
        ({"protocol": "python"}, "function"),
        ({"protocol": "python", "function": "absent.py:f"}, "function"),
        ({"price": None}, "a budget needs a price"),
        ({"price": [1, 2]}, "max_tokens"),
        ({"price": [1, 2], "params": {"max_tokens": "9"}}, "max_tokens"),
        ({"price": [1, 2], "params": {"provider": {"max_price": 5}}}, "max_tokens"),
    ],
)
def test_a_bad_field_is_named_with_its_worker_and_not_shown(change, field, tmp_path):
    free = {**RIGHT, "price": [0, 0]}
    spec = pool_file(
        tmp_path, {**free, "name": "good", "timeout": None}, {**free, "name": "bad", **change}
    )
    with pytest.raises(ValueError, match=f"pool.json:\nbad: .*{field}") as caught:
        load_pool(spec, budget=1.0)
    assert KEY not in str(caught.value) and "good" not in str(caught.value)


def test_everything_that_is_missing_is_said_at_once():
    changes = [{"api_key_env": "ABSENT"}, {"timeout": 0, "modle": "m"}, {"name": "m"}]
    said = check_pool([*({**RIGHT, **change} for change in changes), {}], budget=1.0)
    for sentence in (
        "m: api_key_env: $ABSENT",
        "m: price",
        "m: timeout",
        "m: modle: expected one of",
        "m: name: another",
        "worker 3: protocol",
        "worker 3: base_url",
        "worker 3: model",
    ):
        assert any(one.startswith(sentence) for one in said)


@pytest.mark.parametrize("name", ["a, b", "a\nb"])
def test_a_name_can_be_listed_between_commas(name):
    """--only, for example, takes a list of names."""
    [said] = check_pool([{**RIGHT, "name": name}])
    assert said.endswith("name: expected a text of one line without commas")
    assert not check_pool([{**RIGHT, "name": 'Jane "é" \\ 7B'}])


def test_a_header_may_hold_quotes(tmp_path):
    """Some gateways take their configuration as JSON in a header."""
    headers = {"x-portkey-config": '{"provider": "openai", "path": "a\\b"}', "x-title": "ours"}
    with OddServer(http(GOOD)) as server:
        row = {**RIGHT, "base_url": server.url, "headers": headers}
        load_pool(pool_file(tmp_path, row))[0].chat(CHAT)
    [(_, head, _)] = server.requests
    assert f"x-portkey-config: {headers['x-portkey-config']}\r\n" in head


def test_a_header_may_hold_latin_1():
    assert not check_pool([{**RIGHT, "headers": {"X-Title": "Café à côté"}}])


def test_a_note_may_hold_quotes_and_backslashes():
    assert not check_pool([{**RIGHT, "note": r'It knows "\nabla" and C:\new \\'}])


def test_a_pools_file_may_begin_with_a_byte_order_mark(tmp_path):
    (tmp_path / "pool.json").write_text(json.dumps([RIGHT]), encoding="utf-8-sig")
    assert [one.name for one in load_pool(str(tmp_path / "pool.json"))] == ["m"]


@pytest.mark.parametrize(
    "text", ["", "[", "{}", "3", "[3]", "null", "[]", "[null]", '"a"', "[[]]", "[" * 100_000]
)
def test_what_is_no_pool(text, tmp_path):
    (tmp_path / "pool.json").write_text(text)
    with pytest.raises(ValueError, match="pool.json: .*there are local, .*today") as caught:
        load_pool(str(tmp_path / "pool.json"))
    assert not re.search("NoneType|'int'|attribute|iterable|KeyError", str(caught.value))


@pytest.mark.parametrize(
    "row, fields",
    [
        ({"protcol": "openai", "base_url": "http://h/v1", "model": "m"}, ["protcol", "protocol"]),
        ({"protocol": "opnai", "base_url": "http://h/v1", "model": "m"}, ["protocol"]),
        ({"protocol": "openai", "base_url": "http://h/v1", "modle": "m"}, ["modle", "model"]),
        ({"protocol": "python", "funktion": "tools.py:f"}, ["funktion", "function"]),
        ({"protocol": "openai", "function": "tools.py:f"}, ["base_url", "model"]),
        ({"protocol": "python"}, ["function"]),
        ({}, ["protocol", "base_url", "model"]),
    ],
)
@pytest.mark.parametrize("budget", [0.0, 1.0])
def test_wrong_and_missing_fields_are_named(row, fields, budget):
    priced = {} if row.get("protocol") == "python" else {"price": [0, 0]}
    lines = check_pool([{**row, **priced, "name": "jane"}], budget)
    assert [line.split(": ")[:2] for line in lines] == [["jane", field] for field in fields]


def test_a_function_with_a_price_is_not_asked_for_tokens(tmp_path):
    (tmp_path / "tools.py").write_text("def f(messages): return 'yes'\n")
    spec = pool_file(tmp_path, {"protocol": "python", "function": "tools.py:f", "price": [1, 2]})
    assert load_pool(spec)[0].chat(CHAT).cost is None
    with pytest.raises(ValueError, match="f: price: .*Reply with the call's cost") as caught:
        load_pool(spec, budget=1.0)
    assert "max_tokens" not in str(caught.value)


@pytest.mark.parametrize(
    "name", [file.removesuffix(".json") for file in os.listdir(f"{ROOT}/assets/pools")]
)
def test_a_pool_that_comes_along_can_be_used_with_its_keys_alone(name, monkeypatch):
    entries = workers.read_pool(name)
    for variable in {entry["api_key_env"] for entry in entries}:
        monkeypatch.delenv(variable, raising=False)
        assert any(f"${variable} is not set" in said for said in check_pool(entries))
        monkeypatch.setenv(variable, KEY)
    assert not check_pool(entries, budget=10.0) and workers.probable_cost(entries, 1) != 0
    assert workers.probable_cost(entries, 9) == workers.probable_cost(load_pool(name), 9) > 0


@pytest.mark.parametrize(
    "change, costs, dollars",
    [
        ({"price": [1, 10]}, True, 10 * 0.008),
        ({"price": [0, 0]}, False, 0),
        ({}, True, None),
        ({"base_url": "http://localhost:80/v1"}, False, 0),
        ({"base_url": "http://localhost.eu/v1"}, True, None),
        ({"base_url": "http://0.0.0.0:11434/v1"}, False, 0),
        ({"base_url": "http://localhost.:80/v1"}, False, 0),
        ({"base_url": "http://[::ffff:127.0.0.1]:80/v1"}, False, 0),
        ({"base_url": "http://[::ffff:8.8.8.8]:80/v1"}, True, None),
        ({"price": [1, "2"], "protocol": []}, True, None),
    ],
)
def test_what_costs_money_needs_a_budget(change, costs, dollars):
    pool = [{**RIGHT, **change}]
    assert (workers.probable_cost(pool, 1) != 0) == costs
    assert workers.probable_cost(pool, 10) == (dollars and pytest.approx(dollars))
    workers.demand_budget(pool, 1.0, 10, "training")
    expected = pytest.raises(ValueError, match="training costs money.* 10 calls.*--budget")
    with expected if costs else contextlib.nullcontext():
        workers.demand_budget(pool, 0.0, 10, "training")


def test_an_estimate_is_at_least_a_cent(capsys):
    workers.demand_budget([{**RIGHT, "price": [0.1, 0.1]}], 1.0, 3, "training")
    assert capsys.readouterr().out == "training costs money, probably $0.01 for 3 calls\n"


THIS_MACHINE = """127.0.0.1 127.1 127.0.0.1:80 localhost LOCALHOST:1 localhost. localhost.:80
a.localhost 0.0.0.0 0.0.0.0:11434 [::1] [::1]:80 [::] [::]:80 [0:0:0:0:0:0:0:1] [::ffff:127.0.0.1]
[::ffff:127.0.0.1]:9 [::FFFF:7f00:1] [0:0:0:0:0:ffff:127.0.0.1]""".split()
OTHERS = """localhost.eu 127.evil.com evil.com localhost@evil.com 127.0.0.1@evil.com 10.0.0.1 [::2]
evil.com:80/x.localhost [::ffff:8.8.8.8] [::11] [fe80::1] 0.0.0.0.evil.com notlocalhost 1270.0.0.1
[::ffff:7e00:1] [2001::1] evil.com#.localhost""".split()


def test_this_machine_is_called_without_a_proxy(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    for host in THIS_MACHINE:
        one = Worker("openai", f"http://{host}/v1", "m")
        assert one.route()[0].proxy is None and workers.probable_cost([one], 1) == 0, host
    for host in OTHERS:
        one = Worker("openai", f"http://{host}/v1", "m")
        assert one.route()[0].proxy.port == 9 and workers.probable_cost([one], 1) is None, host


@pytest.mark.parametrize("proxy", [False, True])
def test_connections_are_kept_alive_and_those_of_others_are_not_changed(proxy, monkeypatch):
    connection = requests.packages.urllib3.util.connection
    connect, seen = connection.create_connection, []

    def spy(*args, **kwargs):
        sock = connect(*args, **kwargs)
        seen.append([sock.getsockopt(*option[:2]) for option in workers.SOCKET_OPTIONS])
        return sock

    monkeypatch.setattr(connection, "create_connection", spy)
    with OddServer(http(GOOD)) as server:
        if proxy:
            monkeypatch.setenv("http_proxy", server.url)
            Worker("openai", "http://model.example/v1", "m").chat(CHAT)
        else:
            worker(server).chat(CHAT)
        requests.post(server.url, "{}", timeout=60, proxies={"http": None})
    [ours, others] = seen
    assert all(ours) and ours[2] == 60 and not others[1]


def test_one_connection_serves_all_calls_that_follow_each_other():
    used = []
    answers = [http(GOOD), refused(400), http(b"{"), http(answer(""))]

    def play(n, conn):
        used.append(conn)
        return answers[n % 4]

    with OddServer(play) as server:
        one = worker(server)
        for _ in range(8):
            with contextlib.suppress(WorkerError):
                one.chat(CHAT)
    assert len(used) == 8 and len({*map(id, used)}) == 1


@pytest.mark.parametrize("play", [flood, cut, http(b"{", 500)])
def test_a_failed_call_spoils_no_later_one(play):
    first = play if callable(play) else lambda n, conn: play
    with OddServer(lambda n, conn: http(GOOD) if n else first(n, conn)) as server:
        one = worker(server, concurrency=1, attempts=1)
        with pytest.raises(WorkerError):
            one.chat(CHAT)
        assert [one.chat(CHAT).text for _ in range(3)] == ["Because."] * 3


@pytest.mark.parametrize("excluded", ["", "model.example"])
def test_a_proxy_comes_from_the_environment_and_a_key_does_not_come_from_netrc(
    excluded, monkeypatch, tmp_path
):
    (tmp_path / "netrc").write_text("machine model.example login me password wrong")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("no_proxy", excluded)
    with OddServer(http(GOOD)) as server:
        monkeypatch.setenv("http_proxy", server.url.replace("//", "//you:pass@"))
        one = Worker("openai", "http://model.example/v1", "m", api_key_env="PLANTED", attempts=1)
        if excluded:
            with pytest.raises(WorkerError, match="resolve"):
                one.chat(CHAT)
            return
        assert one.chat(CHAT).text == "Because."
    [(_, head, _)] = server.requests
    head = head.lower()
    assert head.startswith("post http://model.example/v1/chat/completions http/1.1")
    assert f"\r\nauthorization: bearer {KEY}\r\n" in head and "wrong" not in head
    assert "\r\nproxy-authorization: basic " in head


def test_headers_of_ones_own_replace_others_whatever_their_case():
    mine = {"AUTHORIZATION": "Token mine", "user-Agent": "me", "X-Api-Key": "x"}
    head, _, _ = on_the_wire(GOOD, api_key_env="PLANTED", headers=mine)
    sent = dict(line.split(": ", 1) for line in head.splitlines()[1:] if line)
    assert len(sent) == len(head.splitlines()) - 2 and KEY not in head
    assert (sent["authorization"], sent["user-agent"], sent["x-api-key"]) == (
        "token mine",
        "me",
        "x",
    )


@pytest.mark.parametrize("file", ["workers", "workflow", "eval", "train"])
def test_a_module_that_runs_as_a_command_exists_once(file):
    with open(os.path.join(ROOT, f"{file}.py"), encoding="utf-8") as source:
        [command] = [node for node in ast.parse(source.read()).body if isinstance(node, ast.If)][
            -1:
        ]
    assert ast.unparse(command.test) == "__name__ == '__main__'"
    assert ast.unparse(command.body[0]) == f"sys.modules['{file}'] = sys.modules['__main__']"


def test_a_users_file_gets_the_module_that_runs(tmp_path):
    """The file's `workers` is the running module. The file runs once for both of its functions."""
    (tmp_path / "mine.py").write_text(
        "import itertools, workers\n"
        "numbers = itertools.count(1)\n"
        "def tool(messages): return workers.Reply(f'Call {next(numbers)}.', 1, 1, 0.25)\n"
        "def other(messages): return tool(messages)\n"
    )
    rows = [{"protocol": "python", "function": f"mine.py:{name}"} for name in ("tool", "other")]
    run = run_command(f"--pool={pool_file(tmp_path, *rows)}")
    assert run.returncode == 0, run.stdout
    assert sorted(re.findall(r"2 tokens, \$0.250000: (.*)", run.stdout)) == ["Call 1.", "Call 2."]


def run_command(*words):
    command = [sys.executable, "workers.py", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_the_command_asks_each_worker_for_a_word(tmp_path):
    """The command shows each reply's first words, so that the user notices a wrong model."""
    talk = "No expression \x1b[2J found.\n" * 9
    with (
        OddServer(http(answer(talk))) as good,
        OddServer(refused(401)) as bad,
        OddServer(http(answer("", "length"))) as mute,
    ):
        rows = [{**RIGHT, "base_url": one.url, "model": one.url[-8:]} for one in (good, bad, mute)]
        rows[0]["name"] = "x" * 30
        all_three = run_command(f"--pool={pool_file(tmp_path, *rows)}")
        del rows[0]["name"]
        rows[0]["note"] = "It is good at sums."
        fine = run_command("--pool", pool_file(tmp_path, rows[0]))
    up, down, silent = all_three.stdout.splitlines()
    assert re.match(rf"{'x' * 30} \d+\.\d\d s, ", up)
    assert "12 tokens, unknown cost: No expression [2J found. No" in up and "\x1b" not in up
    assert up.endswith(" …") and len(up) < 120
    assert "HTTP 401" in down and "an empty answer to a hello, which ended by 'length'" in silent
    assert all_three.returncode == 1 and fine.returncode == 0
    first, second = fine.stdout.splitlines()
    assert first.startswith(good.url[-8:]) and second.strip() == "It is good at sums."


def test_an_attempt_that_the_pool_forbids_is_not_made():
    with OddServer(refused(500)) as server:
        [error] = workers.ping_workers([worker(server, attempts=1, timeout=QUICK)])
    assert "(attempt 1," in str(error) and len(server.requests) == 1


def test_the_commands_help_and_its_errors():
    shown = run_command("--help")
    assert shown.returncode == 0
    for part in (
        "python workers.py serve",
        "local:tired",
        "today",
        "--port",
        "FILE.json",
    ):
        assert part in shown.stdout
    for words, says in (
        (["--prot=1"], "--port"),
        (["sevre"], "serve"),
        (["--port=x"], "--port"),
        (["serve", "--pool=today"], "leave out --pool"),
        (["--pool=nowhere"], "there are local, "),
    ):
        failed = run_command(*words)
        assert failed.returncode != 0 and says in failed.stderr, words
        assert "Traceback" not in failed.stderr


@pytest.mark.parametrize("protocol", workers.PROTOCOLS)
def test_a_pool_may_name_every_protocol(protocol):
    assert workers.fits(protocol, workers.FIELDS["protocol"][0])
