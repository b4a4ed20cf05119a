"""Tests of the Conductor's server, over real sockets, against OpenAI's API reference."""

import errno
import inspect
import json
import os
import queue
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
import requests

import workflow
from players import Player, lost, served
from workers import Budget, WorkerError, load_pool
from workflow import ASSETS, Rollout, Step, Workflow, as_lists


def chain(*workers):
    return as_lists(
        Workflow([Step(worker, "Go on.", [*range(i)]) for i, worker in enumerate(workers)])
    )


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
        "cost": 1.0,
    }
    first = {"round": 0, "step": 0, "worker": "a", "subtask": "Go on.", "access": []}
    second = {"round": 0, "step": 1, "worker": "b", "subtask": "Go on.", "access": [0]}
    assert data["workflow"] == [
        first | {"reply": "draft", "seconds": 0.0, "cost": 0.5},
        second | {"reply": "answer", "seconds": 0.0, "cost": 0.5},
    ]
    assert names == ["conductor", "conductor-recursive"]


def test_the_question_is_the_last_user_message_and_the_others_are_its_context():
    seen, contexts = [], []

    def write(rollouts):
        for rollout in rollouts:
            contexts.append(rollout.context)
            rollout.written = chain(0)
            yield rollout

    turns = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Who?"},
        {"role": "assistant", "content": "You."},
    ]
    question = {"role": "user", "content": [{"type": "text", "text": "Why?"}]}
    # Open WebUI's button "Continue Response" sends the beginning of an answer.
    begun = {"role": "assistant", "content": "Because"}
    later = {"role": "system", "content": "Hurry."}
    with served([Player("a", lambda m: seen.append(m) or "b")], write=write) as url:
        assert post(url, messages=[*turns, question]).status_code == 200
        assert post(url, messages=[*turns, question, later, begun]).status_code == 200
        refused = post(url, messages=turns[:1])
    asked = {"role": "user", "content": "Question:\nWhy?\n\nYour task:\nGo on."}
    assert contexts == [turns, [*turns, later]]
    assert seen == [[*turns, asked], [*turns, later, asked]]
    assert refused.status_code == 400 and "user message" in refused.json()["error"]["message"]


@pytest.mark.parametrize("content", ["", " \n", None, [], [{"type": "text", "text": ""}]])
def test_an_empty_question_is_a_400(content):
    turns = [{"role": "user", "content": "Who?"}, {"role": "user", "content": content}]
    with served([Player("a", lambda m: "b")], chain(0)) as url:
        refused = post(url, messages=turns)
    assert refused.status_code == 400
    assert "the last user message is empty" in refused.json()["error"]["message"]


def test_the_recursive_model_looks_again():
    answers = iter(["41", "42"])
    with served([Player("a", lambda m: next(answers))], chain(0)) as url:
        data = post(url, model="conductor-recursive").json()
    assert data["choices"][0]["message"]["content"] == "42"
    assert [step["round"] for step in data["workflow"]] == [0, 1]


def test_a_round_that_is_lost_is_paid_for_although_the_round_before_answers():
    answers = iter(["41", "42"])
    pool = [Player("a", lambda m: next(answers)), Player("b", lost)]
    with served(pool, chain(0), chain(0, 1)) as url:
        data = post(url, model="conductor-recursive").json()
    assert data["choices"][0]["message"]["content"] == "41"
    assert [(step["round"], step["reply"]) for step in data["workflow"]] == [(0, "41"), (1, "42")]
    assert (data["usage"]["total_tokens"], data["usage"]["cost"]) == (24, 1.0)


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


def test_a_stream_shows_each_step_while_it_runs():
    go_on = threading.Event()

    def wait(messages):
        assert go_on.wait(60)
        return "answer"

    pool = [Player("a", lambda m: "draft"), Player("b", wait)]
    with served(pool, chain(0, 1)) as url:
        body = {
            "model": "conductor-recursive",
            "messages": [{"role": "user", "content": "Why?"}],
            "stream": True,
        }
        chunks = []
        with requests.post(
            f"{url}/v1/chat/completions", json=body, stream=True, timeout=60
        ) as response:
            for line in response.iter_lines(chunk_size=1):
                if line.startswith(b"data: {"):
                    chunks.append(json.loads(line.removeprefix(b"data: ")))
                    if chunks[-1].get("workflow_event", {}).get("worker") == "b":
                        go_on.set()  # lets the second worker answer
    told = [chunk for chunk in chunks if "workflow_event" in chunk]
    found = [(e["round"], e["step"], e.get("reply")) for e in (c["workflow_event"] for c in told)]
    one_round = [(0, None), (0, "draft"), (1, None), (1, "answer")]
    assert found == [(number, *event) for number in (0, 1) for event in one_round]
    assert told[0]["workflow_event"] == {
        "round": 0,
        "step": 0,
        "worker": "a",
        "subtask": "Go on.",
        "access": [],
    }
    assert set(told[1]["workflow_event"]) == {"round", "step", "reply", "seconds", "cost"}
    words = "".join(c["choices"][0]["delta"]["reasoning_content"] for c in told)
    assert words.index("a is told: Go on.") < words.index("draft") < words.index("b is told")
    assert [step["reply"] for step in chunks[-1]["workflow"]] == ["draft", "answer"] * 2
    assert not any("content" in c["choices"][0]["delta"] for c in told)


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
            while busy < 3:  # until three comments have come
                busy += next(lines).startswith(b": ")
            go_on.set()
            rest = b"\n".join(lines)
    assert b"answer" in rest and b"[DONE]" in rest


def test_an_error_of_several_lines_is_one_line_of_the_log(capfd):
    def fail(messages):
        raise WorkerError("HTTP 500:\n<html>\r\n\u2028conductor: answered, 1 steps")

    with served([Player("a", fail)], chain(0)) as url:
        post(url)
    [line] = capfd.readouterr().err.splitlines()
    assert "HTTP 500: <html> conductor: answered" in line


def spent(messages):
    raise WorkerError("the budget of $1 is spent, but for $0.0001")


FAILURES = {
    "a lost call": ([lost], [chain(0)], "nobody answers"),
    "no workflow": (
        [str],
        ["hm"],
        "the Conductor wrote no workflow: model_id: the list is missing",
    ),
}


def test_a_spent_budget_is_a_402(capfd):
    with served([Player("a", spent)], chain(0)) as url:
        response = post(url)
    assert response.status_code == 402 and "budget of $1" in response.json()["error"]["message"]
    assert response.json()["error"]["code"] == "insufficient_quota"
    assert capfd.readouterr().err.count("conductor: 402, step 0: the budget of $1 is spent") == 1


@pytest.mark.parametrize(
    "why", ["a: HTTP 400: the prompt has been blocked", "a: HTTP 400: the budget of $9 is spent"]
)
def test_an_error_in_a_workers_words_is_a_502(why):
    def fail(messages):
        raise WorkerError(why)

    def write(rollouts):  # as worker_writer does if the worker that conducts fails
        for rollout in rollouts:
            rollout.error = why
            yield rollout

    for how in ({"write": write}, {}):
        with served([Player("a", fail)], chain(0), **how) as url:
            response = post(url)
        assert response.status_code == 502 and why in response.json()["error"]["message"]


def test_each_request_is_one_line_of_the_log(capfd):
    """The line has the model, outcome, steps, seconds, dollars, and what is left of the budget.

    If nothing was conducted, the line has no steps, seconds or dollars.
    """
    worker = Player("a", lambda m: "b")
    worker.budget = Budget(1.0)
    with served([worker], chain(0, 0)) as url:
        post(url, model="conductor-recursive", stream=True)
        post(url, messages=[{"role": "assistant", "content": "\x1b[2J"}])
        requests.get(f"{url}/health", timeout=60)
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 2
    left = r"\$1\.0000 left"
    assert re.fullmatch(
        rf"conductor-recursive: answered, 4 steps, \d\.\d s, \$2\.0000 for the steps, {left}",
        lines[0],
    )
    assert re.fullmatch(rf"conductor: 400, messages: there is no user message.*{left}", lines[1])


@pytest.mark.parametrize("answers, texts, why", FAILURES.values(), ids=FAILURES)
def test_a_failure_is_a_502_that_asks_not_to_pay_again(answers, texts, why):
    with served([Player("a", answer) for answer in answers], *texts) as url:
        response = post(url)
        assert response.status_code == 502 and why in response.json()["error"]["message"]
        assert response.headers["x-should-retry"] == "false"
        assert why in post(url, stream=True).text


def hang_up(url, question, until=None):
    """Send a request, wait for the event `until` if it is given, and close the connection."""
    body = json.dumps({"model": "conductor", "messages": [{"role": "user", "content": question}]})
    with socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1])), timeout=60) as client:
        client.sendall(
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
        )
        if until:
            assert until.wait(60)


def test_a_client_that_hangs_up_stops_the_workflow(capfd):
    started, go_on = threading.Event(), threading.Event()

    def first(messages):
        started.set()
        go_on.wait(60)
        return "draft"

    second = Player("b", lambda m: "answer")
    with served([Player("a", first), second], chain(0, 1)) as url:
        hang_up(url, "Why?", started)
        go_on.set()
        next_one = post(url, messages=[{"role": "user", "content": "Next?"}])
        assert next_one.status_code == 200  # The server still answers other clients.
    assert len(second.asked) == 1  # The first request no longer reached this worker.
    log = capfd.readouterr().err
    assert "conductor: the client hung up, 1 steps" in log and "Traceback" not in log


def test_a_client_that_is_out_of_reach_has_hung_up(monkeypatch, capfd):
    def fail(handler, delta, **extra):
        handler.connection.shutdown(socket.SHUT_RDWR)  # as the system does
        raise OSError(errno.EHOSTUNREACH, "No route to host")

    monkeypatch.setattr(workflow.ConductorHandler, "send_event", fail)
    with served([Player("a", lambda m: "answer")], chain(0)) as url:
        with pytest.raises(requests.ConnectionError):
            post(url, stream=True)
    log = capfd.readouterr().err
    assert "conductor: the client hung up" in log and "Traceback" not in log


def test_a_conductor_is_not_asked_again_for_a_client_that_left(monkeypatch):
    """The Conductor writes no workflow, so it would try again if the client stayed."""
    started, go_on, logged = threading.Event(), threading.Event(), threading.Event()
    monkeypatch.setattr(workflow.ConductorHandler, "log", lambda *parts: logged.set())
    tries = []

    def write(rollouts):
        for rollout in rollouts:
            tries.append(rollout.number)
            started.set()
            go_on.wait(60)
            rollout.written = "I cannot."
            yield rollout

    with served([Player("a", lambda m: "answer")], write=write) as url:
        hang_up(url, "Why?", started)
        go_on.set()
        assert logged.wait(60)
    assert len(tries) == 1


def test_more_clients_than_threads_for_calls_are_all_answered(monkeypatch):
    """Requests are conducted in separate threads, not in those that call workers."""
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
    empty = workflow.Threads(512)
    with pytest.raises(RuntimeError, match="thread"):
        empty.run(divmod, (7, 2), results.put)
    assert not empty.jobs


def test_one_request_too_many_is_told_when_to_come_again(monkeypatch):
    monkeypatch.setattr(workflow, "WAITING", 1)
    conducting = workflow.Threads(2)
    at_work, go_on = threading.Semaphore(0), threading.Event()

    def wait(messages):
        at_work.release()
        return go_on.wait(60) and "b"

    pool = [Player("a", wait)]
    with served(pool, chain(0), conducting=conducting) as url, ThreadPoolExecutor(3) as clients:
        first = []
        for _ in range(2):
            first.append(clients.submit(post, url))
            assert at_work.acquire(timeout=60)
        first.append(clients.submit(post, url))
        while not conducting.jobs:
            pass
        refused = [post(url) for _ in range(20)]
        client = openai.OpenAI(api_key="none", base_url=f"{url}/v1", max_retries=0)
        with pytest.raises(openai.InternalServerError, match="come again in"):
            client.chat.completions.create(
                model="conductor", messages=[{"role": "user", "content": "Why?"}]
            )
        go_on.set()
        assert [one.result().status_code for one in first] == [200] * 3
        assert post(url).status_code == 200
    assert {response.status_code for response in refused} == {503}
    # The openai client ignores a Retry-After of more than 60 s. The seconds must differ: if all the
    # clients came back at once, most would be refused again.
    seconds = {int(response.headers["Retry-After"]) for response in refused}
    assert seconds <= {*range(1, 61)} and len(seconds) > 1


def test_a_client_that_hangs_up_while_it_waits_is_not_conducted(monkeypatch):
    monkeypatch.setattr(workflow, "CONDUCTING", 1)
    go_on, at_work, questions = threading.Event(), threading.Event(), []

    def write(rollouts):
        for rollout in rollouts:
            questions.append(rollout.question)
            rollout.written = chain(0)
            at_work.set()
            assert go_on.wait(60)
            yield rollout

    def ask(question):
        return post(url, messages=[{"role": "user", "content": question}]).status_code

    with served([Player("a", str)], write=write) as url, ThreadPoolExecutor(2) as clients:
        first = clients.submit(ask, "first")
        assert at_work.wait(60)
        hang_up(url, "second")
        go_on.set()
        assert first.result() == 200 and ask("third") == 200
    assert questions == ["first", "third"]


def test_prompts_that_wait_together_are_written_as_one_batch():
    go_on, at_work, batches = threading.Event(), threading.Event(), []

    def write(rollouts):
        batches.append(len(rollouts))
        at_work.set()
        assert go_on.wait(60)
        for rollout in reversed(rollouts):
            rollout.written = rollout.question
            if rollout.question == "bad":
                raise KeyError("bad")
            yield rollout

    shared = workflow.share_batches(write)
    ask = lambda question: [r.written for r in shared([Rollout(question)])]
    with ThreadPoolExecutor(8) as clients:
        first = clients.submit(ask, "first")
        assert at_work.wait(60)
        others = [clients.submit(ask, f"{i}") for i in range(7)]
        while workflow_queue(shared).qsize() < 7:
            pass
        go_on.set()
        assert first.result() == ["first"]
        assert [one.result() for one in others] == [[f"{i}"] for i in range(7)]
    assert batches == [1, 7]
    with pytest.raises(KeyError):
        ask("bad")
    assert ask("good") == ["good"]  # After an error, the writer still works.


def workflow_queue(shared):
    """Return the queue in which rollouts wait for a shared writer."""
    start = inspect.getclosurevars(shared).nonlocals["start"]
    return inspect.getclosurevars(start).nonlocals["waiting"]


def test_what_is_written_does_not_depend_on_who_waits_beside():
    model, tokenizer, prompting = workflow.load_conductor(os.path.join(ASSETS, "laptop"))
    prompting.max_new_tokens = 16  # At a high temperature, texts seldom end by themselves.
    write = workflow.model_writer(model, tokenizer, prompting, temperature=2.0)
    questions = ["What is 6 * 7?", "Find dos * tres.", "Find dos * tres.", "Give me Lima shouted."]

    def asked():
        pool = [Player(name, str) for name in "abcde"]
        return [Rollout(q, pool, number=10 * i) for i, q in enumerate(questions)]

    alone = [next(write([rollout])).tokens for rollout in asked()]
    shared = workflow.share_batches(write)
    with ThreadPoolExecutor(4) as clients:
        together = list(clients.map(lambda rollout: next(shared([rollout])).tokens, asked()))
    assert together == alone and alone[1] != alone[2]


def test_turns_of_a_chat_as_open_webui_sends_them_are_each_answered_right():
    """The chats have a system message and unused tools. The Conductor in assets/laptop answers."""
    pool = load_pool("local")
    model, tokenizer, prompting = workflow.load_conductor(os.path.join(ASSETS, "laptop"))
    write = workflow.share_batches(workflow.model_writer(model, tokenizer, prompting, 0.2))
    answers = {
        "What is 6 * 7?": "42",
        "Find dos * tres.": "6",
        "Give me element number 8 shouted.": "OXYGEN",
    }
    chat = [{"role": "system", "content": "You are helpful. What is 1 + 1? Answer in one word."}]
    with served(pool, write=write) as url:
        for question, answer in answers.items():
            chat.append({"role": "user", "content": question})
            asked = {
                "stream": True,
                "stream_options": {"include_usage": True},
                "tools": [{"type": "function", "function": {"name": "search"}}],
                "chat_id": "b5f0",
            }
            chunks, end, _ = events(post(url, messages=chat, **asked))
            texts = [c["choices"][0]["delta"].get("content", "") for c in chunks if c["choices"]]
            assert "".join(texts) == answer and end == "[DONE]"
            chat.append({"role": "assistant", "content": answer})


def test_a_prompt_that_the_conductor_cannot_read_is_a_400():
    model, tokenizer, prompting = workflow.load_conductor(os.path.join(ASSETS, "laptop"))
    write = workflow.share_batches(workflow.model_writer(model, tokenizer, prompting))
    with served([Player("a", str)], write=write) as url:
        for length in (3_000, 300_000, 3_900_000, 40_000_000):
            response = post(url, messages=[{"role": "user", "content": "x " * (length // 2)}])
            assert response.status_code == 400
            assert response.json()["error"]["code"] == "context_length_exceeded"
            assert re.search("tokens|characters", response.json()["error"]["message"])


def test_the_page_and_a_run_and_nothing_else(tmp_path):
    run = tmp_path / "run"
    (run / "traces").mkdir(parents=True)
    (tmp_path / "secret.json").write_text('"secret"')
    (run / "secret.json").write_text('"secret"')
    (run / "settings.json").write_text('{"out": "run"}')
    (run / "metrics.jsonl").write_text('{"iteration": 0, "loss": NaN}\n{"iteration": 1}\n{"ite')
    (run / "traces" / "00007.jsonl").write_text('{"question": "Why?"}\n')
    (run / "test.json").write_text('{"laptop, conductor": {}}')
    with served([Player("a", str)], chain(0), run=str(run), api_key="key") as url:
        get = lambda path, **headers: requests.get(f"{url}{path}", headers=headers, timeout=60)
        page = get("/")
        key = {"Authorization": "Bearer key"}
        names = ("settings.json", "metrics.jsonl", "traces/00007.jsonl", "test.json")
        found = [get(f"/run/{name}", **key).json() for name in names]
        missing = ["/run/traces/00008.jsonl", "/run/secret.json", "/run/../secret.json"]
        missing += ["/run/traces/..%2Fsettings.json", "/run/traces/", "/assets/plot.py", "/run/"]
        assert [get(path, **key).status_code for path in missing] == [404] * len(missing)
        assert get("/run/settings.json").status_code == 401
    assert page.status_code == 200 and b"<script>" in page.content
    assert "script-src 'sha256-" in page.headers["Content-Security-Policy"]
    assert found[0] == {"out": "run"}
    assert found[1] == [{"iteration": 0, "loss": None}, {"iteration": 1}]
    assert found[2] == [{"question": "Why?"}]
    assert found[3] == {"laptop, conductor": {}}


DAMAGED = [b'{"ite\n{}\n', b"\0\0\0\n", b"\xff\n", b"\n", b"[" * 200_000 + b"\n"]


@pytest.mark.parametrize("content", DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_file_of_a_run_is_named(content, tmp_path):
    (tmp_path / "traces").mkdir()
    names = ("settings.json", "metrics.jsonl", "traces/00000.jsonl")
    for name in names:
        (tmp_path / name).write_bytes(content)
    with served([Player("a", str)], chain(0), run=str(tmp_path)) as url:
        for name in names:
            answer = requests.get(f"{url}/run/{name}", timeout=60)
            assert answer.status_code == 500
            assert f"{name} is damaged" in answer.json()["error"]["message"]


def test_a_link_out_of_a_run_and_what_is_no_file_are_not_read(tmp_path):
    traces = tmp_path / "run" / "traces"
    traces.mkdir(parents=True)
    (tmp_path / "secret.jsonl").write_text('"secret"\n')
    (traces / "00000.jsonl").symlink_to(tmp_path / "secret.jsonl")
    os.mkfifo(traces / "00001.jsonl")
    (traces / "00002.jsonl").mkdir()
    (traces / "00003.jsonl").write_text('"own"\n')
    (traces / "00004.jsonl").symlink_to("00003.jsonl")
    (tmp_path / "link").symlink_to("run")
    with served([Player("a", str)], chain(0), run=str(tmp_path / "link")) as url:
        found = [requests.get(f"{url}/run/traces/0000{i}.jsonl", timeout=60) for i in range(5)]
    assert [answer.status_code for answer in found] == [404, 404, 404, 200, 200]
    assert found[4].json() == ["own"]


def test_serving_a_pool_that_costs_demands_a_budget(tmp_path, capsys):
    worker = {"protocol": "openai", "base_url": "https://example.org/v1", "model": "m"}
    worker |= {"price": [1, 2], "params": {"max_tokens": 10}}
    pool = tmp_path / "pool.json"
    pool.write_text(json.dumps([worker]))
    with pytest.raises(ValueError, match="serving costs money, .*--budget"):
        workflow.main(["serve", f"--pool={pool}", "--conductor=m"])
    with pytest.raises(ValueError, match="CONDUCTOR_API_KEY"):
        workflow.main(["serve", "--host=0.0.0.0"])
    with pytest.raises(ValueError, match="--run=.*settings.json"):
        workflow.main(["serve", f"--run={tmp_path}"])


def test_the_command_serves_the_shipped_conductor_until_it_is_interrupted():
    # Restore the handler of SIGINT: if a shell script runs the tests in the background, they and
    # their child processes ignore SIGINT.
    command = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "import runpy; sys.argv = ['workflow.py', 'serve', '--port=0']; "
        "runpy.run_path('workflow.py', run_name='__main__')"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", command],
        cwd=os.path.dirname(ASSETS),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    url = re.match(r"http://[^/]+", process.stdout.readline())[0]
    assert "the workers are small programs" in process.stderr.readline()
    soft, hard = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
    assert soft == hard  # The server may open as many files as the system allows.
    response = post(url, messages=[{"role": "user", "content": "What is 6 * 7?"}])
    log = process.stderr.readline()
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60)[1] == "interrupted\n" and process.returncode == 1
    assert response.json()["choices"][0]["message"]["content"] == "42"
    assert re.fullmatch(r"conductor: answered, 1 steps, \d+\.\d s, \$0\.0000 for the steps\n", log)


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
