"""Pools and money against their rules: pool files, proxies, kept replies, budgets that are never passed."""
import json
import multiprocessing
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from rogue import CHAT, GOOD, KEY, Rogue, always, entry, http, pool_file, quick, worker  # noqa: F401

import workers
from workers import Replay, Reply, Worker, WorkerError, load_pool

ROOT = os.path.dirname(os.path.abspath(workers.__file__))


def test_proxies_of_the_environment_serve_all_but_loopback(monkeypatch):
    with Rogue(lambda n, c: http(GOOD)) as proxy, Rogue(lambda n, c: http(GOOD)) as server:
        monkeypatch.setenv("HTTP_PROXY", proxy.url.removesuffix("/v1"))
        monkeypatch.setenv("http_proxy", proxy.url.removesuffix("/v1"))
        assert Worker("openai", "http://models.invalid/v1", "m").chat(CHAT).text == "Because."
        assert worker(server).chat(CHAT).text == "Because."
    assert proxy.requests[0][1].startswith("POST http://models.invalid/v1/chat/completions ")
    assert len(proxy.requests) == len(server.requests) == 1


# Replies that are kept


def test_spending_is_counted_and_the_unknown_is_not_zero():
    with Rogue(lambda n, c: http({**GOOD, "usage": None} if n == 2 else GOOD)) as server:
        w, free, unknown = worker(server, price=[1, 10]), worker(server, price=[0, 0]), worker(server)
        assert w.chat(CHAT).cost + w.chat(CHAT).cost == w.spent == pytest.approx(60e-6)
        assert w.chat(CHAT).cost is None and (w.calls, w.unpriced, w.spent) == (3, 1, pytest.approx(60e-6))
        assert free.chat(CHAT).cost == 0 and unknown.chat(CHAT).cost is None
        assert (free.spent, free.unpriced, unknown.spent, unknown.unpriced) == (0, 0, 0, 1)


def test_replay_makes_a_resumed_run_free(tmp_path):
    def play(n, conn):
        return http(
            {
                **GOOD,
                "choices": [{"message": {"content": f"answer {n} \u2028 \r\n é"}, "finish_reason": "stop"}],
            }
        )

    def five(a, b):
        return [a.chat(CHAT, call_id="r0"), a.chat(CHAT, call_id="r1"), b.chat(CHAT, call_id="r0"),
                a.chat(CHAT, call_id="r0", temperature=1), a.chat([*CHAT, *CHAT], call_id="r0")]
    replay = str(tmp_path / "replay")
    with Rogue(play) as server:
        spec = pool_file(tmp_path, [entry(server, price=[1, 10], name=name) for name in "ab"])
        a, b = load_pool(spec, replay=replay)
        first = five(a, b)
        assert [r.text[:8] for r in first] == [f"answer {n}" for n in range(5)]
        a.chat(CHAT)  # without a call_id: asked, not kept
        assert len(server.requests) == 6
        a, b = load_pool(spec, replay=replay)  # the run is killed here, and resumed
        assert five(a, b) == first and len(server.requests) == 6
        assert a.spent == pytest.approx(
            4 * 30e-6
        )  # so that the resumed run's books are those of an uninterrupted one
        a.chat(CHAT, call_id="r2")
        assert len(server.requests) == 7


def test_replay_survives_a_kill_in_the_middle_of_a_line(tmp_path):
    replay = tmp_path / "replay"
    with Rogue(lambda n, c: http(GOOD)) as server:
        for w, call_id in ((worker(server), "0"), (worker(server), "1")):
            w.replay = workers.Replay(str(replay))
            w.chat(CHAT, call_id=call_id)
        replay.write_bytes(replay.read_bytes()[:-30])
        for asked in (3, 3):  # the torn line is asked again, and is whole from then on
            w = worker(server)
            w.replay = workers.Replay(str(replay))
            w.chat(CHAT, call_id="0"), w.chat(CHAT, call_id="1")
            assert len(server.requests) == asked
    assert (
        sum(line.endswith("}") for line in replay.read_text().splitlines()) == 2
        and "\n\n" not in replay.read_text()
    )


def test_a_kept_reply_is_told(tmp_path):
    with always(GOOD) as server:
        w, told = worker(server), []
        w.replay = Replay(str(tmp_path / "replay"))
        w.chat(CHAT, call_id="0")
        w.replay = Replay(str(tmp_path / "replay"))
        w.chat(CHAT, call_id="0", on_text=told.append)
    assert told == ["Because."] and len(server.requests) == 1


def keep(path, name, n):
    """Open the file again and again, and keep n replies in all."""
    for i in range(n):
        replay = Replay(path)
        replay.keep(Replay.key([name, i]), Reply("x" * 3000, 1, 2, None, 0.5))
        os.close(replay.file)


def test_processes_that_write_at_the_same_time_lose_nothing(tmp_path):
    path, n = str(tmp_path / "replay"), 50
    processes = [multiprocessing.Process(target=keep, args=(path, name, n)) for name in "abc"]
    for process in processes:
        process.start()
    keep(path, "d", n)
    for process in processes:
        process.join(60)
    replay = Replay(path)
    assert all(replay.find(Replay.key([name, i])).text == "x" * 3000 for name in "abcd" for i in range(n))
    lines = (tmp_path / "replay").read_text().splitlines()  # blank where one saw another's line half written
    assert len([line for line in lines if line]) == 4 * n


def test_opening_a_file_takes_nothing_from_it(tmp_path):
    """Also not the end of a line that another process is about to write."""
    path = tmp_path / "replay"
    torn = b"0" * 64 + b' {"text": "half of'
    path.write_bytes(torn)
    replay = Replay(str(path))
    assert path.read_bytes() == torn and replay.find(b"0" * 64) is None
    with open(path, "ab") as other:
        other.write(
            b' it", "prompt_tokens": 1, "completion_tokens": 2, "cost": null, "seconds": 1, "finish": "a"}\n'
        )
    assert Replay(str(path)).find(b"0" * 64).text == "half of it"


def test_a_write_that_falls_short_harms_no_other_line(tmp_path, monkeypatch, capsys):
    """A full disk: the reply is returned all the same, the user hears of it, and later lines are whole."""
    write, path = os.write, str(tmp_path / "replay")
    with Rogue(lambda n, c: http({**GOOD, "usage": {"prompt_tokens": n, "completion_tokens": n}})) as server:
        w = worker(server)
        w.replay = Replay(path)
        monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:50]))
        assert w.chat(CHAT, call_id="0").prompt_tokens == 0
        monkeypatch.setattr(
            os, "write", lambda file, data: (_ for _ in ()).throw(OSError(28, "No space left on device"))
        )
        assert w.chat(CHAT, call_id="1").prompt_tokens == 1
        monkeypatch.setattr(os, "write", write)
        assert [w.chat(CHAT, call_id=str(i)).prompt_tokens for i in (2, 3)] == [2, 3]
        w.replay = Replay(path)
        assert [w.chat(CHAT, call_id=str(i)).prompt_tokens for i in (2, 3, 0, 1)] == [2, 3, 4, 5]
    assert capsys.readouterr().err.count("replay: a reply could not be kept") == 2


def test_failures_are_not_replayed(tmp_path):
    with Rogue(lambda n, c: http({}, 500) if n == 0 else http(GOOD)) as server:
        w = worker(server, attempts=1)
        w.replay = workers.Replay(str(tmp_path / "replay"))
        with pytest.raises(WorkerError):
            w.chat(CHAT, call_id="0")
        assert w.chat(CHAT, call_id="0").text == "Because."


@pytest.mark.parametrize("text", ["My notes.\nTwo lines.\n", "no newline", "0" * 64 + " {}\nprose"])
def test_a_file_that_holds_no_replies_is_left_alone(tmp_path, text):
    (tmp_path / "notes").write_text(text)
    with pytest.raises(SystemExit, match="notes.*no file of replies"):
        load_pool("paper", replay=str(tmp_path / "notes"))
    assert (tmp_path / "notes").read_text() == text


# Pools


RIGHT = {"protocol": "openai", "base_url": "http://h/v1", "model": "m"}


@pytest.mark.parametrize(
    "entry, field",
    [
        ({k: v for k, v in RIGHT.items() if k != "model"}, "model"),
        ({**RIGHT, "modle": "m"}, "modle"),
        ({**RIGHT, "model": 3}, "model"),
        ({**RIGHT, "base_url": "h/v1"}, "base_url"),
        ({**RIGHT, "protocol": "smtp"}, "protocol"),
        ({**RIGHT, "protocol": []}, "protocol"),
        ({**RIGHT, "base_url": f"https://me:{KEY}@h/v1"}, "base_url"),
        ({**RIGHT, "api_key_env": KEY}, "api_key_env"),
        ({**RIGHT, "params": [1]}, "params"),
        ({**RIGHT, "price": 3}, "price"),
        ({**RIGHT, "price": [1]}, "price"),
        ({**RIGHT, "price": [1, -1]}, "price"),
        ({**RIGHT, "price": [1, "2"]}, "price"),
        ({**RIGHT, "concurrency": 0}, "concurrency"),
        ({**RIGHT, "concurrency": 1.5}, "concurrency"),
        ({**RIGHT, "rpm": -1}, "rpm"),
        ({**RIGHT, "timeout": "1"}, "timeout"),
        ({**RIGHT, "timeout": float("nan")}, "timeout"),
        ({**RIGHT, "deadline": float("inf")}, "deadline"),
        ("m", "a mapping"),
        (3, "a mapping"),
        ({**RIGHT, "prices": [1, 2]}, "prices.*\nThe fields are protocol, base_url, model, name"),
        ({"model": "m", "protocol": "openai"}, "base_url"),
    ],
)
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
    limited = {**RIGHT, "rpm": 60, "concurrency": 5, "price": [1, 1], "params": {"max_tokens": 9}}
    [w] = load_pool(pool_file(tmp_path, [limited]), budget=3.0, ranks=2)
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
    assert all(w.concurrency == 64 for w in pool + free)
    assert [f.params["max_tokens"] for f in free] == [65535, 64000, 128000] + [20480] * 4  # Table 3
    assert [f.timeout for f in free] == [3600] * 7
    google, claude_, gpt, r1, gemma, direct, thinking = pool
    assert all(w.params["temperature"] == 0.2 for w in pool if w is not gpt)
    assert (
        google.params["thinkingConfig"] == {"thinkingBudget": 128}
        and gpt.params["reasoning_effort"] == "minimal"
    )
    assert (
        "thinking" not in claude_.params
        and free[1].params["thinking"]["budget_tokens"] < free[1].params["max_tokens"]
    )
    assert "temperature" not in free[1].params  # which Claude refuses while it thinks
    for w in direct, thinking:
        assert (w.params["top_p"], w.params["top_k"], w.params["presence_penalty"]) == (0.8, 20, 1.0)
    assert [w.params["chat_template_kwargs"]["enable_thinking"] for w in (direct, thinking)] == [False, True]
    assert all(w.price for w in pool[:3]) and not any(w.price for w in pool[3:])
    for w, name in zip(
        pool, ["GEMINI_API_KEY", "ANTHROPIC_API_KEY", "OPENAI_API_KEY"] + ["OPEN_BASE_URL"] * 4
    ):
        with pytest.raises(WorkerError, match=f"not set in the environment: {name}"):
            w.chat(CHAT)
    with Rogue(lambda n, c: http(GOOD)) as server:
        monkeypatch.setenv("OPEN_BASE_URL", server.url)
        assert load_pool("paper")[4].chat(CHAT).text == "Because."
    assert server.requests[0][2]["model"] == "google/gemma-3-27b-it"


@pytest.mark.parametrize("spec", ["today", "openrouter"])
def test_pools_that_can_be_called_now(spec, monkeypatch):
    """The paper's seven roles, each with a price and an end, as its provider wants to be asked."""
    for name in ("GEMINI_API_KEY", "ANTHROPIC_API_KEY", "OPENAI_API_KEY", "OPENROUTER_API_KEY"):
        monkeypatch.setenv(name, KEY)
    sent = []
    monkeypatch.setattr(workers, "exchange", lambda session, request, *_: sent.append(request) or {})
    pool = load_pool(spec, budget=100.0)
    assert len({w.name for w in pool}) == len(load_pool(f"{spec}:unconstrained", budget=100.0)) == 7
    for w in pool:
        with pytest.raises(WorkerError, match="not as"):
            w.chat(CHAT, max_tokens=7)
    urls, bodies = [url for url, *_ in sent], [json.loads(request.body) for request in sent]
    if spec == "today":
        google, claude, gpt = bodies[:3]
        assert google["generationConfig"] == {
            "maxOutputTokens": 7,
            "thinkingConfig": {"thinkingLevel": "low"},
        }
        assert claude["thinking"] == {"type": "between_tools"} and claude["output_config"] == {
            "effort": "low"
        }
        assert gpt == {
            "model": "gpt-6.2-sol",
            "messages": CHAT,
            "max_completion_tokens": 7,
            "reasoning_effort": "low",
        }
        assert (
            urls[0].endswith("/v1beta/models/gemini-4-hydrogen:generateContent")
            and urls[1] == "https://api.anthropic.com/v1/messages"
        )
    else:
        # Hosts of OpenAI's models advertise max_tokens, and require_parameters leaves out whoever does not advertise all that is
        # sent (github.com/vellum-ai/vellum-assistant/pull/42670, github.com/openstory-so/openstory/issues/1317).
        sent_by_all = {"model", "messages", "max_tokens", "reasoning", "provider"}
        assert all(set(body) == sent_by_all and body["reasoning"] == {"effort": "low"} for body in bodies[:3])
    assert set(urls[3 * (spec == "today"):]) == {"https://openrouter.ai/api/v1/chat/completions"}
    for w, body in zip(pool[3:], bodies[3:]):
        assert body["provider"] == {
            "max_price": {"prompt": 2 * w.price[0], "completion": 2 * w.price[1]},
            "require_parameters": True,
        }
        assert body["temperature"] == 0.2 and "chat_template_kwargs" not in body
    assert [body.get("reasoning") for body in bodies[3:]] == [
        None,
        {"enabled": False},
        {"enabled": False},
        {"enabled": True},
    ]


def test_a_pool_is_printed_as_a_file(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", ["workers.py", "print", "--pool=paper"])
    workers.main()
    (tmp_path / "pool.json").write_text(capsys.readouterr().out)
    assert load_pool(str(tmp_path / "pool.json")) == load_pool("paper")


def test_the_local_pool_is_printed_as_its_server_has_it(monkeypatch, capsys):
    """Not with the port of a server that ends with the command."""
    monkeypatch.setattr(sys, "argv", ["workers.py", "print", "--port=8766"])
    workers.main()
    assert {entry["base_url"] for entry in json.loads(capsys.readouterr().out)} == {"http://127.0.0.1:8766/v1"}


def test_who_is_silent_is_found_before_a_run(monkeypatch, tmp_path):
    """Each worker is asked once, and once more if that may help, all at the same time; none without its key."""
    monkeypatch.delenv("ABSENT", raising=False)
    together = threading.Barrier(2)  # breaks, if one is asked after the other

    def busy(n, conn):
        if n == 0:
            together.wait(20)
        return http({"error": "busy"}, 503)

    with Rogue(busy) as a, Rogue(busy) as b, always(GOOD) as good:
        pool = load_pool(pool_file(tmp_path, [
            entry(a, name="a"), entry(b, name="b"), entry(good, name="up"),
            entry(good, name="keyless", api_key_env="ABSENT"),
            entry(good, name="down", base_url="http://127.0.0.1:9/v1")]))
        told = workers.silent(pool)
        assert len(good.requests) == 1
    thinks = {"choices": [{"message": {"content": None, "reasoning": "Hm"}, "finish_reason": "length"}]}
    with always(thinks) as server:  # A worker whose answers are empty would be 0 in every table.
        [empty] = workers.silent(load_pool(pool_file(tmp_path, [entry(server, name="thinker")])))
    assert empty == "a worker (thinker: the answer to a hello is empty, cut off)"
    monkeypatch.setattr(workers, "PATIENCE", 0.1)
    go_on = threading.Event()
    with Rogue(lambda n, conn: go_on.wait(20) and http(GOOD)) as server:
        [late] = workers.silent(load_pool(pool_file(tmp_path, [entry(server, name="late")])))
        go_on.set()
    assert late.startswith("a worker (late: no complete response") and "a first word has to come within 0.1 s" in late
    assert [line.split()[2] for line in told] == ["(a:", "(b:", "(down:"] and all("attempt 2," in line for line in told)
    assert "HTTP 503: busy" in told[0] and "Connection refused" in told[2] and "Max retries" not in told[2]
    assert workers.unset(pool[3]) == ["ABSENT"]


# Budgets


def test_a_budget_is_never_passed(tmp_path):
    """Calls of $0.0012 at the most, $0.001 in fact: of twenty at once under $0.005 some are refused."""
    gate = threading.Semaphore(0)
    with Rogue(
        lambda n, c: (
            gate.acquire() and http({**GOOD, "usage": {"prompt_tokens": 0, "completion_tokens": 100}})
        )
    ) as server:
        fields = {"params": {"max_tokens": 120}, "price": [0, 10]}
        pool = load_pool(
            pool_file(tmp_path, [entry(server, **fields), entry(server, **fields, name="n")]), budget=0.005
        )
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
    """None of many calls at once is refused that all stay below the budget, though they could cost more."""
    with Rogue(lambda n, c: http({**GOOD, "usage": {"prompt_tokens": 0, "completion_tokens": 1}})) as server:
        [worker] = load_pool(
            pool_file(tmp_path, [entry(server, params={"max_tokens": 1000}, price=[0, 10])]), budget=0.025
        )
        with ThreadPoolExecutor(20) as threads:
            replies = list(
                threads.map(lambda _: worker.chat([{"role": "user", "content": "Hi."}]), range(60))
            )
    assert (
        len(replies) == 60
        and not worker.budget.refused
        and worker.budget.left == pytest.approx(0.025 - 60 * 1e-5)
    )


@pytest.mark.parametrize(
    "answers, attempts_paid",
    [
        ([400], 0),
        ([500, 400], 1),
        ([None, 200], 0),
        ([429, 200], 0),
        ([b"{"], 1),
        ([None] * 6, 0),
        ([503, 200], 0),
        ([529, 200], 0),
        ([json.dumps({"error": {"message": "x", "code": 503}}).encode(), 200], 1),
        ([json.dumps({"error": {"message": "x", "code": 429}}).encode(), 200], 1),
        ([json.dumps({"error": {"message": "x", "code": 400}}).encode()], 1),
    ],
    ids=str,
)
def test_what_a_broken_attempt_may_have_cost_counts(answers, attempts_paid, tmp_path, monkeypatch):
    """What a refused attempt could have cost is given back; not what one that broke later could have."""
    monkeypatch.setattr(workers, "BACKOFF", 0.001)

    def play(n, conn):
        answer = answers[n]
        if type(answer) is int:
            return http(
                {**GOOD, "usage": {"prompt_tokens": 7, "completion_tokens": 3}} if answer == 200 else {},
                answer,
            )
        return answer and http(answer)

    with Rogue(play) as server:
        [worker] = load_pool(
            pool_file(tmp_path, [entry(server, params={"max_completion_tokens": 100}, price=[1, 10])]),
            budget=1.0,
        )
        if answers[-1] == 200:
            worker.chat([{"role": "user", "content": "Hi."}])
        else:
            with pytest.raises(WorkerError):
                worker.chat([{"role": "user", "content": "Hi."}])
    size = len(json.dumps(server.requests[0][2])) + workers.TEMPLATE
    most, known = (2 * size * 1 + 100 * 10) / 1e6, (7 * 1 + 3 * 10) / 1e6 * (answers[-1] == 200)
    assert (
        worker.budget.left == pytest.approx(1 - attempts_paid * most - known) and worker.budget.running == 0
    )


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"max_tokens": None},
        {"max_tokens": -1},
        {"max_tokens": 0},
        {"max_tokens": "4096"},
        {"max_tokens": 40.5},
        {"max_tokens": True},
        {"max_tokens": 9, "max_completion_tokens": None},
        {"max_tokens": 9, "max_completion_tokens": -1},
        {"max_tokens": 9, "n": 2},
        {"max_tokens": 9, "best_of": 4},
        {"max_tokens": 9, "service_tier": "priority"},
        {"max_tokens": 9, "tools": [{}]},
        {"max_tokens": 9, "models": ["a"]},
    ],
    ids=str,
)
def test_nothing_is_sent_whose_cost_has_no_bound(params, tmp_path):
    """Neither by the pool file nor by what a call adds to it."""
    with always(GOOD) as server:
        if "n" not in params:
            with pytest.raises(SystemExit, match="a budget (needs|forbids)"):
                load_pool(pool_file(tmp_path, [entry(server, price=[1, 1], params=params)]), budget=1.0)
        [w] = load_pool(
            pool_file(tmp_path, [entry(server, price=[1, 1], params={"max_tokens": 9})]), budget=1.0
        )
        if params:
            with pytest.raises(WorkerError, match="m: (a budget (needs|forbids)|n: )"):
                w.chat(CHAT, **params)
        assert not server.requests and w.budget.left == 1.0


def test_the_larger_of_two_limits_counts_and_so_do_templates_and_caches(tmp_path):
    """With a prompt of one letter: what a chat template adds and a cache's price at most are set apart."""
    seen = []
    with Rogue(lambda n, c: seen.append(w.budget.left) or http(GOOD)) as server:
        spec = pool_file(
            tmp_path, [entry(server, price=[1, 10], params={"max_tokens": 9, "max_completion_tokens": 1000})]
        )
        [w] = load_pool(spec, budget=1.0)
        w.chat([{"role": "user", "content": "x"}])
    size = len(json.dumps(server.requests[0][2]))
    assert seen == [
        pytest.approx(1 - (2 * (size + 512) + 1000 * 10) / 1e6)
    ] and w.budget.left == pytest.approx(1 - 30e-6)


def test_usage_that_says_nothing_gives_nothing_back(tmp_path):
    for usage in (
        None,
        {"prompt_tokens": -(10**6), "completion_tokens": 1},
        {"prompt_tokens": 1, "completion_tokens": "1"},
    ):
        with always({**GOOD, "usage": usage}) as server:
            [w] = load_pool(
                pool_file(tmp_path, [entry(server, price=[0, 10], params={"max_tokens": 100})]), budget=1.0
            )
            assert w.chat(CHAT).cost is None
        assert w.budget.left == pytest.approx(1 - 0.001) and w.budget.running == 0


@pytest.mark.parametrize("fields", [{"params": {"max_tokens": 9}}, {"price": [1, 2]}])
def test_a_budget_needs_what_a_call_can_cost(fields, tmp_path):
    spec = pool_file(tmp_path, [{**RIGHT, **fields}])
    with pytest.raises(SystemExit, match='a budget needs "(price|max_tokens)"'):
        load_pool(spec, budget=1.0)
    assert load_pool(spec)


def test_a_budget_for_the_paper_pool_says_what_to_write(tmp_path):
    """Each worker that lacks something with what it lacks, and which file to edit."""
    with pytest.raises(SystemExit) as caught:
        load_pool("paper", budget=50.0)
    *lacks, todo = str(caught.value).splitlines()
    names = ["R1-Distill-Qwen-32B", "Gemma 3 27B", "Qwen3-32B", "Qwen3-32B thinking"]
    assert [line.split(": ")[0] for line in lacks] == names
    assert all('"price": [input, output]' in line for line in lacks)
    assert "python workers.py print --pool=paper > pool.json" in todo
    spec = pool_file(tmp_path, [{**RIGHT, "price": [1, 2], "params": {"max_tokens": 9, "service_tier": "flex"}}])
    with pytest.raises(SystemExit) as caught:
        load_pool(spec, budget=50.0)
    assert str(caught.value).splitlines() == [
        'm: a budget forbids "service_tier", which costs beside the tokens', f"edit {spec}"]


def test_a_budget_for_models_of_ones_own():
    assert load_pool("local", "http://127.0.0.1:9/v1", budget=1.0)[0].budget.left == 1.0


def test_the_pool_is_listed_and_pinged(monkeypatch, capsys, tmp_path):
    monkeypatch.delenv("ABSENT", raising=False)
    monkeypatch.setenv("PLANTED", KEY)
    with Rogue(lambda n, c: http(GOOD)) as server:
        spec = pool_file(
            tmp_path,
            [
                entry(server, name="up", api_key_env="PLANTED"),
                entry(server, name="keyless", api_key_env="ABSENT"),
                entry(server, name="homeless", base_url="$NO_URL"),
                entry(server, name="down", base_url="http://127.0.0.1:9/v1"),
            ],
        )
        monkeypatch.setattr(sys, "argv", ["workers.py", f"--pool={spec}"])
        with pytest.raises(SystemExit) as ended:
            workers.main()
    up, keyless, homeless, down = capsys.readouterr().out.splitlines()
    assert ended.value.code == 1  # as some worker failed
    assert up.split() == ["up", "openai,", "m;", "PLANTED", "is", "set;", "answers", "in", *up.split()[-2:]]
    assert keyless.endswith("openai, m; not set in the environment: ABSENT")
    assert homeless.endswith("openai, m; no api_key_env; not set in the environment: NO_URL")
    assert down.count("down") == 1 and "; no api_key_env; the connection failed" in down


def test_a_pool_that_answers_ends_with_status_0(monkeypatch, capsys, tmp_path):
    with Rogue(lambda n, c: http(GOOD)) as server:
        monkeypatch.setattr(sys, "argv", ["workers.py", f"--pool={pool_file(tmp_path, [entry(server)])}"])
        workers.main()
    assert capsys.readouterr().out.split()[:5] == ["m", "openai;", "no", "api_key_env;", "answers"]
