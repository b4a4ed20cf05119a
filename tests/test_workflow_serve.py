"""The OpenAI-compatible server of a Conductor, over real sockets."""

import contextlib
import json
import queue
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests

import workflow
from workers import Reply, WorkerError
from workflow import Prompting, Step, Workflow, as_lists, conductor_server


class Player:
    def __init__(self, name, answer):
        self.name, self.answer, self.asked = name, answer, 0

    def chat(self, messages, call_id="", **overrides):
        self.asked += 1
        return Reply(self.answer(messages), 10, 2, 0.25, 0.0)


def lost(messages):
    raise WorkerError("nobody answers")


def chain(*workers):
    return as_lists(
        Workflow([Step(worker, "Go on.", [*range(i)]) for i, worker in enumerate(workers)])
    )


@contextlib.contextmanager
def served(pool, *texts, silence=15.0, write=None):
    """The URL of a server whose Conductor writes these texts in turn, the last one for ever."""
    left = list(texts)

    def write_texts(rollouts):
        for rollout in rollouts:
            rollout.written = left.pop(0) if len(left) > 1 else left[0]
            yield rollout

    server = conductor_server(write or write_texts, pool, None, Prompting(), 1, 0, silence)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def post(url, **body):
    body = {"model": "conductor", "messages": [{"role": "user", "content": "Why?"}]} | body
    return requests.post(f"{url}/v1/chat/completions", json=body, timeout=60)


def test_an_answer_has_everybodys_usage_and_says_who_did_what():
    pool = [Player("a", lambda m: "draft"), Player("b", lambda m: "answer")]
    with served(pool, chain(0, 1)) as url:
        data = post(url).json()
        names = [card["id"] for card in requests.get(f"{url}/v1/models", timeout=60).json()["data"]]
    assert data["choices"][0]["message"] == {"role": "assistant", "content": "answer"}
    assert data["usage"] == {
        "prompt_tokens": 20,
        "completion_tokens": 4,
        "total_tokens": 24,
        "cost": 0.5,
    }
    assert [(step["worker"], step["access"]) for step in data["workflow"]] == [
        ("a", []),
        ("b", [0]),
    ]
    assert names == ["conductor", "conductor-recursive"]


def test_the_question_is_the_whole_conversation():
    seen = []
    with served([Player("a", lambda m: seen.append(m[0]["content"]) or "b")], chain(0)) as url:
        post(
            url,
            messages=[
                {"role": "system", "content": "Be short."},
                {"role": "user", "content": [{"type": "text", "text": "Why?"}]},
            ],
        )
    assert seen == ["Question:\nsystem: Be short.\n\nuser: Why?\n\nYour task:\nGo on."]


def test_the_recursive_model_looks_again():
    answers = iter(["41", "42"])
    with served([Player("a", lambda m: next(answers))], chain(0)) as url:
        data = post(url, model="conductor-recursive").json()
    assert data["choices"][0]["message"]["content"] == "42"
    assert [step["round"] for step in data["workflow"]] == [0, 1]


def events(response):
    lines = [line.decode() for line in response.iter_lines() if line]
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return (
        [json.loads(d) for d in data[:-1]],
        data[-1],
        [line for line in lines if line.startswith(":")],
    )


def test_a_stream_begins_with_the_role_and_ends_with_the_answer():
    with served([Player("a", lambda m: "answer")], chain(0)) as url:
        chunks, end, comments = events(
            post(url, stream=True, stream_options={"include_usage": True})
        )
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant" and end == "[DONE]"
    assert (
        "".join(c["choices"][0]["delta"].get("content", "") for c in chunks if c["choices"])
        == "answer"
    )
    assert chunks[-1]["usage"]["total_tokens"] == 12


def test_a_silent_stream_says_that_workers_are_busy():
    go_on = threading.Event()

    def wait(messages):
        go_on.wait(60)
        return "answer"

    with served([Player("a", wait)], chain(0), silence=0.05) as url:
        body = {
            "model": "conductor",
            "messages": [{"role": "user", "content": "Why?"}],
            "stream": True,
        }
        with requests.post(
            f"{url}/v1/chat/completions", json=body, stream=True, timeout=60
        ) as response:
            lines = response.iter_lines()
            busy = 0
            while busy < 3:  # Three comments come while the worker works.
                busy += next(lines).startswith(b": ")
            go_on.set()
            rest = b"\n".join(lines)
    assert b"answer" in rest and b"[DONE]" in rest


FAILURES = {
    "a lost call": ([lost], [chain(0)], "nobody answers"),
    "no workflow": (
        [str],
        ["hm"],
        "the Conductor wrote no workflow: model_id: the list is missing",
    ),
}


@pytest.mark.parametrize("answers, texts, why", FAILURES.values(), ids=FAILURES)
def test_a_failure_is_a_502_that_asks_not_to_pay_again(answers, texts, why):
    with served([Player("a", answer) for answer in answers], *texts) as url:
        response = post(url)
        assert response.status_code == 502 and why in response.json()["error"]["message"]
        assert response.headers["x-should-retry"] == "false"
        _, last, _ = events(post(url, stream=True))
        assert why in last


def test_a_client_that_hangs_up_stops_the_workflow():
    begun, go_on = threading.Event(), threading.Event()

    def first(messages):
        begun.set()
        go_on.wait(60)
        return "draft"

    second = Player("b", lambda m: "answer")
    pool = [Player("a", first), second]
    with served(pool, chain(0, 1)) as url:
        port = int(url.rsplit(":", 1)[1])
        body = json.dumps({"model": "conductor", "messages": [{"role": "user", "content": "Why?"}]})
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(
                f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(body)}\r\n\r\n{body}".encode()
            )
            assert begun.wait(60)
        go_on.set()
        assert (
            post(url, messages=[{"role": "user", "content": "Next?"}]).status_code == 200
        )  # it serves on
    assert second.asked == 1  # by the client that waited


def test_more_clients_than_threads_for_calls_are_all_answered(monkeypatch):
    """Each request has a thread of its own: none takes one of those that its calls need."""
    monkeypatch.setattr(workflow, "THREADS", workflow.Threads(2))
    everyone_asks = threading.Barrier(8)

    def write(rollouts):
        everyone_asks.wait(60)
        for rollout in rollouts:
            rollout.written = chain(0, 0)
            yield rollout

    with served([Player("a", lambda m: "b")], write=write) as url:
        with ThreadPoolExecutor(8) as clients:
            found = list(clients.map(lambda _: post(url).status_code, range(8)))
    assert found == [200] * 8


def test_threads_are_started_as_needed_and_up_to_a_limit():
    pool, results, gate = workflow.Threads(3), queue.SimpleQueue(), threading.Event()
    pool.run(divmod, (7, 2), results.put)
    assert results.get(timeout=60) == (3, 1) and pool.started == 1
    for _ in range(10):
        pool.run(gate.wait, (60,), results.put)
    pool.run(divmod, (1, 0), results.put)
    assert pool.started == 3
    gate.set()
    found = [type(results.get(timeout=60)) for _ in range(11)]
    assert sorted(found, key=str) == [ZeroDivisionError] + [bool] * 10


def test_jobs_wait_for_a_thread_where_the_system_allows_no_more(monkeypatch):
    pool, results = workflow.Threads(512), queue.SimpleQueue()
    pool.run(divmod, (7, 2), results.put)

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    for _ in range(20):
        pool.run(divmod, (9, 2), results.put)
    assert [results.get(timeout=60) for _ in range(21)] == [(3, 1)] + [(4, 1)] * 20
    with pytest.raises(RuntimeError, match="thread"):
        workflow.Threads(512).run(divmod, (7, 2), results.put)


def test_clients_are_served_side_by_side():
    together = threading.Barrier(4)

    def meet(messages):
        together.wait(timeout=60)
        return "met"

    with served([Player("a", meet)], chain(0)) as url:
        found = []
        clients = [
            threading.Thread(target=lambda: found.append(post(url).status_code)) for _ in range(4)
        ]
        for client in clients:
            client.start()
        for client in clients:
            client.join()
    assert found == [200] * 4
