"""The local specialists: their replies, pinned by value, and their server's life."""
import collections
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time

import bench
import pytest
import requests
from rogue import CHAT, KEY, quick  # noqa: F401 (quick is a fixture)

import workers
from workers import load_pool

ROOT = os.path.dirname(os.path.abspath(workers.__file__))


QUESTIONS = [
    "What is 6 * 7?",
    "Find diez + 4.",
    "Tell me the capital of France turned around.",
    "Give me element number 8 shouted.",
    "What is the atomic number of iron - veinte?",
    "What is the weather?",
]
SUBTASKS = ["Work it out.", "Find it, recall it.", "Simplify it.", "Leave out the vowels.", "Solve it."]


def chats():
    """Every question alone, with every subtask, and after each of two responses."""
    for question in QUESTIONS:
        yield [{"role": "user", "content": f"Question:\n{question}"}]
        for subtask in SUBTASKS:
            yield [{"role": "user", "content": f"Question:\n{question}\n\nYour task:\n{subtask}"}]
            for response in ("10 + 4", "I am a coder; I find nothing here to work on."):
                yield [
                    {"role": "user", "content": f"Question:\n{question}"},
                    {"role": "user", "content": "Your task:\nDo."},
                    {"role": "assistant", "content": response},
                    {"role": "user", "content": f"Your task:\n{subtask}"},
                ]


def told(name, question, subtask):
    content = f"Question:\n{question}" + (f"\n\nYour task:\n{subtask}" if subtask else "")
    return workers.SPECIALISTS[name]([{"role": "user", "content": content}])


def test_the_specialists_say_what_they_always_said():
    """The laptop world is learned with these very replies: with others it would be another experiment."""
    replies = [answer(chat) for answer in workers.SPECIALISTS.values() for chat in chats()]
    assert len(replies) == 1248
    assert (
        hashlib.sha256(json.dumps(replies).encode()).hexdigest()
        == "ec9c13be37230aacc6b2670a13141ce094dc0b0f12e70033af7e0cd7a20fa583"
    )


@pytest.mark.parametrize(
    "name, question, subtask, reply",
    [
        ("calculator", QUESTIONS[0], None, "42"),
        ("librarian", QUESTIONS[4], SUBTASKS[1], "What is 26 - veinte?"),
        ("calculator", QUESTIONS[4], SUBTASKS[0], "I am a calculator; I find nothing here to work on."),
        ("tired librarian", QUESTIONS[3], SUBTASKS[3], "Give me oxygen shouted."),
        ("junior calculator", QUESTIONS[4], SUBTASKS[3], "I am a calculator; I find nothing here to work on."),
        ("tired translator", QUESTIONS[3], SUBTASKS[0], "I have lost the thread."),
        ("junior librarian", QUESTIONS[4], SUBTASKS[4], "What is 26 - veinte?"),
        ("tired calculator", QUESTIONS[5], None, "I have lost the thread."),
    ],
)
def test_some_replies_by_value(name, question, subtask, reply):
    assert told(name, question, subtask) == reply


@pytest.mark.parametrize("wish", workers.SPELLING)
@pytest.mark.parametrize("subtask, made", [
    ("Reverse it.", "amiL"), ("Write the word in capitals.", "LIMA"), ("Leave the vowels out.", "Lm")])
def test_the_coder_does_what_it_is_told_and_not_what_the_question_wishes(wish, subtask, made):
    assert told("coder", f"What is Lima {wish}?", subtask) == made


@pytest.mark.parametrize("subtask", [None, "Process it.", "Solve the question."])
def test_a_coder_who_is_told_nothing_precise_guesses(subtask):
    """Each of the three operations is as likely, whatever the question wishes, and for a question always the same."""
    words = [f"{a}{b}a" for a in "bcdfghklmn" for b in "aeiourstvw"]
    for wish in workers.SPELLING:
        made = collections.Counter()
        for word in words:
            reply = told("coder", f"What is {word} {wish}?", subtask)
            made.update(order for order, do in workers.ORDERS.items() if do(word) == reply)
            assert reply == told("coder", f"What is {word} {wish}?", "Find the value.")
        assert set(made) == set(workers.ORDERS) and all(20 <= n <= 50 for n in made.values()), made


def test_two_workers_for_each_trade():
    """A junior or tired specialist is a specialist on 60 or 70 % of his days, which differ."""
    assert workers.LOCAL["local:pairs"][:3] == ["calculator", "junior calculator", "translator"]
    assert workers.LOCAL["local:tired"][:2] == ["tired calculator", "junior calculator"]
    assert [w.letter for w in load_pool("local:pairs", "http://127.0.0.1:9/v1")] == [*"ABCDEFGH"]
    chats = [
        [{"role": "user", "content": f"Question:\nWhat is {i} + 1?\n\nYour task:\nWork it out."}]
        for i in range(1000)
    ]
    days = {
        kind: [workers.SPECIALISTS[f"{kind} calculator"](chat) for chat in chats]
        for kind in ("junior", "tired")
    }
    for kind, share in (("junior", 0.6), ("tired", 0.7)):
        good = [text == str(i + 1) for i, text in enumerate(days[kind])]
        assert abs(sum(good) / 1000 - share) < 0.05 and {t for t, g in zip(days[kind], good) if not g} == {
            "I have lost the thread."
        }
    both = sum(a == b == "I have lost the thread." for a, b in zip(days["junior"], days["tired"]))
    assert abs(both / 1000 - 0.12) < 0.04  # each for himself


def test_local_pool():
    pool = load_pool("local")
    assert [w.name for w in pool] == workers.LOCAL["local"] and all(
        w.price == [0, 0] and w.concurrency == 16 for w in pool
    )
    reply = pool[0].chat(CHAT)
    assert (
        reply.text == workers.SPECIALISTS[pool[0].name](CHAT) and reply.cost == 0 and reply.prompt_tokens == 1
    )
    models = requests.get(pool[0].url + "/models", timeout=20).json()
    assert [m["id"] for m in models["data"]] == list(workers.SPECIALISTS)
    assert [w.url for w in load_pool("local", local_url="http://127.0.0.1:9/v1")] == [
        "http://127.0.0.1:9/v1"
    ] * len(pool)


def test_importing_workers_does_not_import_torch():
    code = "import sys, workers; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0


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


def gone(url, seconds=60):
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
    code = "import sys, workers\nprint(workers.load_pool('local')[0].url, flush=True)\nsys.stdin.readline()"
    parent = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    url = parent.stdout.readline().strip()
    assert requests.get(url + "/models", timeout=20).ok
    parent.stdin.close() if death == "exit" else parent.send_signal(death)
    parent.wait(timeout=30)
    assert gone(url)


def test_serve_ends_quietly_and_a_port_in_use_is_said():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SystemExit, match=f"127.0.0.1:{port}: .*--port=N"):
            workers.serve_specialists(port)
    server = subprocess.Popen(
        [sys.executable, "-c", "import workers; workers.serve_specialists(0)"],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
    )  # as under a service manager: no stdin
    url = server.stdout.readline().strip()
    assert requests.get(url + "/models", timeout=20).ok
    server.send_signal(signal.SIGINT)
    assert server.communicate(timeout=30) == ("", "") and server.returncode == 0


def test_bench_ends_in_a_json_line(capsys):
    bench.client(workflows=20, steps=2, latency=0.001)
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert line["calls"] == 40 and line["client_cpu_ms_per_call"] > 0 and line["times_the_least"] > 1
