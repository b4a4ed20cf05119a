"""workflow.py: what parses and what does not, who sees what (read off the wire of a real server), recursion, serving.

The fuzz test is seeded and takes a few seconds; `WORKFLOW_FUZZ=100000 python -m pytest tests/test_workflow.py -k fuzz` is the long run."""
import json
import os
import queue
import random
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import requests
import torch
from tokenizers import Tokenizer as BPE
from tokenizers import models, pre_tokenizers, decoders

import workflow as wf
from model import Config, Qwen, Tokenizer
from workers import SPECIALISTS, Reply, WorkerError, load_pool
from workflow import Prompting, Step, Task, Trace, Workflow, WorkflowError, conduct, execute, messages, parse, serve, submit

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
GOOD = 'I would ask two.\nmodel_id = [1, 0]\nsubtasks = ["Solve it.", "Check it."]\naccess_list = [[], ["all"]]'
CHECKED = Workflow([Step(1, "Solve it.", []), Step(0, "Check it.", [0])])


def lists(ids="[1, 0]", subtasks='["Solve it.", "Check it."]', access='[[], ["all"]]'):
    return f"model_id = {ids}\nsubtasks = {subtasks}\naccess_list = {access}"


def task(text):
    """The only subtask of a one-step workflow whose string literal is `text`."""
    return parse(lists("[0]", f"[{text}]", "[[]]"), 1).steps[0].subtask


# ---------------------------------------------------------------------------------------------------------------------------------
# Parse


@pytest.mark.parametrize("text", [
    GOOD,
    "```python\n" + lists() + "\n```\nThat should do.",
    '{"model_id": [1, 0], "subtasks": ["Solve it.", "Check it."], "access_list": [[], ["all"]]}',
    "```json\n{\n  \"model_id\": [\n    1,\n    0\n  ],\n  \"subtasks\": [\n    \"Solve it.\",\n    \"Check it.\"\n  ],\n"
    "  \"access_list\": [\n    [],\n    [\"all\"]\n  ]\n}\n```",
    "access_list=[[],'all',]\nsubtasks=['Solve it.','Check it.',]\nmodel_id=[1,0,]",
    "`model_id` = [1, 0]\n**subtasks**: not these\n'subtasks' : ['Solve it.', \"Check it.\"]\naccess_list:\n[[], [0]]",
    "model_id = [1,  # the strong one, ]\n 0]  # [7]\nsubtasks = ['Solve it.', # \"quote\n 'Check it.'] // end\naccess_list = [[], // none\n ['all']]",
    lists("[5, 5]", '["a", "b"]', "[[], []]") + "\nNo, rather:\n" + lists(),
    lists() + "\nOr even model_id = [3, 2, ",  # the last list that is closed counts
    "model_id = [9, \nOnce more.\n" + lists(),
    lists(access='["all", "all"]'), lists(access="[['all'], [0, 0]]"),
    lists(subtasks='["Solve " "it.", """Check it."""]'),
    "\0 \ud800 the model's plan [ ( { \" ' \n" + lists(),
    lists().replace("\n", "\r\n"),
    "my_model_id = [4]\nmodel_ids = [4]\n" + lists()])
def test_parse_takes_what_models_write(text):
    assert parse(text, 2) == CHECKED


@pytest.mark.parametrize("literal, subtask", [
    (r'"Show \frac{1}{2} \times \theta \neq \nu, \xi \in \Upsilon \to \beta."', r"Show \frac{1}{2} \times \theta \neq \nu, \xi \in \Upsilon \to \beta."),
    (r'"Show \\frac{1}{2} \\times \\nu."', r"Show \frac{1}{2} \times \nu."),
    (r'r"Show \frac{1}{2} \times."', r"Show \frac{1}{2} \times."),
    (r'"\(x\) and \[y\]\nThen\tgo on \\ stop"', "\\(x\\) and \\[y\\]\nThen\tgo on \\ stop"),
    (r'"caf\u00e9 \x41 😀"', "café A 😀"),
    ('"lists [1, ] and ] # no comment, // nor here, model_id = [3]"', "lists [1, ] and ] # no comment, // nor here, model_id = [3]"),
    ('"model_id = [3]"', "model_id = [3]"), ("'It\\'s \"so\"'", "It's \"so\""), ('"the model\'s"', "the model's"),
    ('"""two\nlines with "quotes\" """', 'two\nlines with "quotes" '), ('""', ""), ('"日本語"', "日本語")])
def test_parse_strings(literal, subtask):
    assert task(literal) == subtask


@pytest.mark.parametrize("text, reason", [
    ("", "model_id: the list is missing"), ("I cannot.", "model_id: the list is missing"),
    (lists().replace("subtasks", "tasks"), "subtasks: the list is missing"),
    ("model_id = [0]\nsubtasks = ['a'", "subtasks: the list is not closed"),
    (lists("[1]"), "differ in length"), (lists(access="[[]]"), "differ in length"), (lists(subtasks="['a', 'b', 'c']"), "differ in length"),
    (lists("[]", "[]", "[]"), "model_id: 0 steps"),
    (lists("[0]*6"), "model_id"), (lists(str([0] * 6), str(["a"] * 6), str([[]] * 6)), "model_id: 6 steps"),
    (lists("[2, 0]"), "step 0 names 2"), (lists("[0, -1]"), "-1"), (lists("[True, 0]"), "step 0 names True"),
    (lists("[1.0, 0]"), "step 0 names 1.0"), (lists("['1', 0]"), "step 0 names '1'"), (lists("[None, 0]"), "step 0 names None"),
    (lists("[[1], 0]"), r"step 0 names \[1\]"), (lists("[" + "9" * 5000 + ", 0]"), "model_id"),
    (lists(subtasks="['a', 1]"), "subtasks: step 1"), (lists(subtasks="['a', ['b']]"), "subtasks: step 1"), (lists(subtasks="['a', None]"), "subtasks"),
    (lists(access="[[], [1]]"), "step 1 reads 1"), (lists(access="[[0], []]"), "step 0 reads 0"), (lists(access="[[], [-1]]"), "access_list"),
    (lists(access="[[], [True]]"), "step 1 reads True"), (lists(access="[[], 0]"), "step 1 reads 0"), (lists(access="[[], ['none']]"), "reads 'none'"),
    (lists(access="[[], [[0]]]"), "access_list"), (lists(access="[[], None]"), "reads None"), (lists(access="[[], ['all', 5]]"), "reads 5"),
    (lists("[f(), 0]"), "model_id: 'f'"), (lists("[0 for i in range(2)]"), "model_id"), (lists("[1 0]"), "model_id"), (lists("[, 1, 0]"), "model_id"),
    (lists(subtasks="['a', f'{1}']"), "subtasks: 'f'"), (lists(subtasks="['a', b'b']"), "subtasks: 'b'"), (lists(subtasks="['a', 'b]"), "subtasks"),
    (lists(subtasks="['a\nb', 'c']"), "subtasks"), (lists("[...]"), "model_id"), (lists("(1, 0)"), "model_id: the list is missing"),
    (lists(subtasks="['a', 'b' + 'c']"), r"subtasks: '\+'"), (lists(subtasks="['a', 'half \\ud83d']"), "step 1 is no text"),
    (lists(subtasks="['a', 'half \ud83d']"), "subtasks"), (lists(subtasks="['a', 'nul \0']"), "subtasks"),
    (lists() + "\n" + lists("[x, y]"), "model_id: 'x'")])
def test_parse_refuses_and_says_why(text, reason):
    with pytest.raises(WorkflowError, match=reason):
        parse(text, 2)


def test_parse_limits():
    assert parse(lists("[]", "[]", "[]"), 2, allow_empty=True).steps == []
    assert len(parse(lists(str([0] * 7), str(["a"] * 7), str([[]] * 7)), 1, max_steps=7).steps) == 7
    with pytest.raises(WorkflowError, match="2 steps, where 1 to 1"):
        parse(GOOD, 2, max_steps=1)
    w = parse(lists("[0, 0, 0, 0]", str(["a"] * 4), '[["all"], "all", [1, 0], [2]]'), 1)
    assert [s.access for s in w.steps] == [[], [0], [0, 1], [2]] and [s.sees_all for s in w.steps] == [True, True, False, False]
    assert parse(GOOD, 2).completion == GOOD


def test_parse_evaluates_nothing(tmp_path):
    evil = f"__import__('os').system('touch {tmp_path}/pwned')"
    for text in (lists(f"[{evil}, 0]"), lists(subtasks=f"['a', {evil}]"), lists(subtasks=f"['a', f'{{{evil}}}']"), lists(access=f"[[], {evil}]"),
                 f"model_id = [0]\n{evil}", f"model_id: [0].append({evil})"):
        with pytest.raises(WorkflowError):
            parse(text, 2)
    assert not os.listdir(tmp_path)


PIECES = ['"', "'", "\\", "\n", "\\nu", "\n" + "u = 1", "\t", "]", "[", ",", "#", "//", "model_id = [", "subtasks", '"""', "\\frac", "é", "😀", " ", "a",
          "all", "\x00", "\r", "\x7f", "\u2028", "ight", "\\u0041", "{", "}", "r", "9"]


def test_text_is_parsed_back():
    rng = random.Random(0)
    for _ in range(500):
        steps = [Step(rng.randrange(9), "".join(rng.choices(PIECES, k=rng.randrange(12))), sorted(rng.sample(range(i), rng.randrange(i + 1))))
                 for i in range(rng.randrange(6))]
        assert parse("Plan.\n" + Workflow(steps).text(), 9, allow_empty=True) == Workflow(steps), Workflow(steps).text()


def test_fuzz():
    """Whatever the text, parse returns a workflow that can be run, or raises WorkflowError."""
    rng, parsed = random.Random(1), 0
    seeds = [GOOD, lists("[1,\n0,]", r'["\frac{1}{2}", r"\d", """x""", ]', '[[], ["all"], [0, 1]]'), "```json\n{" + lists().replace(" =", ":") + "}\n```",
             lists("[]", "[]", "[]"), messages("?", 7)[0]["content"]]
    tokens = PIECES + ["[[", "]]", "\ud800", "1e9", "-1", "True", "None", "=", ":", "[0]", "b'", "f'{", "(", "lambda:", "9" * 50, "access_list", "`"]
    for _ in range(int(os.environ.get("WORKFLOW_FUZZ", 5000))):
        text = rng.choice(seeds)
        for _ in range(rng.randrange(1, 6)):
            i, j = sorted(rng.randrange(len(text) + 1) for _ in range(2))
            j = min(j, i + rng.choice([0, 1, 2, 30]))
            text = text[:i] + rng.choice([lambda: "", lambda: rng.choice(tokens), lambda: text[i:j] * 2, lambda: chr(rng.randrange(0x250))])() + text[j:]
        try:
            w = parse(text, 7, allow_empty=True)
        except WorkflowError as e:
            assert re.match("(model_id|subtasks|access_list|the lists differ)", str(e))
            continue
        parsed += 1
        assert len(w.steps) <= 5 and parse(w.text(), 7, allow_empty=True) == w
        for i, s in enumerate(w.steps):
            assert type(s.worker) is int and 0 <= s.worker < 7 and s.subtask.encode() is not None and all(0 <= j < i for j in s.access)
    assert parsed > 100  # the mutations are mild enough to reach the end of the parser, too


def hostile():
    n = 10 ** 6
    for text in ["model_id = " + "[" * n, "model_id = [" * (n // 12), "model_id = [1]" * (n // 14), "model_id" + " " * n, "model_id " * (n // 9),
                 'subtasks = ["' + '\\"' * (n // 2), 'subtasks = ["' + "\\a" * (n // 2), "subtasks = [" + '"\\' * (n // 2),
                 "subtasks = [" + "'\"" * (n // 2), "subtasks = [" + '"""\\' * (n // 4), "subtasks = [" + "'''" + "''\\'" * (n // 4),
                 "subtasks = [" + '"a" ' * (n // 4) + "]", "subtasks = [" + "#" * n, "subtasks = [" + "'\n" * (n // 2),
                 "subtasks = [" + '"\\text' * (n // 6) + "a" * n, "model_id = [" + "1" * n, "model_id = [" + "1," * (n // 2) + "]",
                 "model_id = [" + "-" * n, "access_list = [" + "[]," * (n // 3), "x" * n, "\0" * n, "\ud800" * n, "`" * n,
                 "model_id = [" + "a" * n + "]", "model_id = [" + "1e1" * (n // 3) + "]", "subtasks = [" + "r" * n + '"' * n]:
        with pytest.raises(WorkflowError) as e:
            parse(text, 7)
        assert len(str(e.value)) < 200


def test_hostile_text_costs_linear_time():
    """Texts of a million characters: seconds when linear, hours when quadratic; and no deep recursion, no crash, no warning."""
    code = f"import sys; sys.path[:0] = {[ROOT, os.path.dirname(__file__)]}; import test_workflow; test_workflow.hostile()"
    subprocess.run([sys.executable, "-W", "error::SyntaxWarning", "-c", code], check=True, timeout=120)


# ---------------------------------------------------------------------------------------------------------------------------------
# The prompt


@pytest.mark.parametrize("n_workers, max_steps", [(7, 5), (3, 5), (1, 5), (5, 2)])
def test_the_examples_are_workflows(n_workers, max_steps):
    [turn] = messages("Why {question}?", n_workers, max_steps)
    examples = turn["content"].split("Example question: ")[1:]
    workflows = [parse(e, n_workers, max_steps) for e in examples]
    assert len(workflows) == (4 if max_steps == 5 else 2) and len({len(w.steps) for w in workflows}) == len(workflows)
    assert "Question: Why {question}?\n" in turn["content"] and turn["content"].endswith(f"Model {n_workers - 1}")
    if (n_workers, max_steps) == (7, 5):
        assert {s.worker for w in workflows for s in w.steps} == set(range(7))  # no worker is favoured by being left out
        assert any(s.access == [] for w in workflows for s in w.steps[1:]) and any(len(s.access) > 1 for w in workflows for s in w.steps)
        assert turn["content"].count("<idea>") >= 4 and turn["content"].count("<answer>") >= 4


def test_styles():
    assert messages("Why?", 3, 4, style="short") == [{"role": "system", "content": "3 models, 4 steps."},
                                                     {"role": "user", "content": "Why?"}]
    named = messages("Why?", 3, 4, style="short", names="ACH")
    assert named[0]["content"] == "Models A 0 C 1 H 2, 4 steps."
    assert messages("Why?", 3, names="ACH")[0]["content"].endswith("\n\nModels: Model 0 (A), Model 1 (C), Model 2 (H)")
    full, zero, fine = (messages("Why?", 3, style=s)[0]["content"] for s in ("full", "zero-shot", "fine-grained"))
    assert "Example question" not in zero and zero.split("\n\n")[0] == full.split("\n\n")[0] and "such as [0, 2]" in fine and "such as" not in full
    with pytest.raises(ValueError, match="style 'shrot'"):
        messages("Why?", 3, style="shrot")


# ---------------------------------------------------------------------------------------------------------------------------------
# Execute: real HTTP, chats read off the wire


class Wire:
    """An OpenAI-compatible server whose answers are answer(model, chat) -> text or HTTP status; it keeps every (model, chat)."""

    def __init__(self, answer):
        self.seen, self.limits, wire = [], set(), self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_):
                pass

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                wire.seen.append((body["model"], body["messages"]))
                wire.limits.add((body["model"], body.get("max_tokens")))
                text = answer(body["model"], body["messages"])
                self.send_response(text if type(text) is int else 200)
                self.send_header("Content-Type", "application/json")
                self.end_headers()
                self.wfile.write(json.dumps({
                    "object": "chat.completion", "model": body["model"], "usage": {"prompt_tokens": 10, "completion_tokens": 2, "total_tokens": 12},
                    "choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}]}).encode())

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.socket.listen(256)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/v1"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def chat_of(self, model):
        """The only chat that this model saw."""
        [chat] = [chat for name, chat in self.seen if name == model]
        return chat

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()


def pool_of(tmp_path, url, names, price=(1.0, 10.0), **more):
    file = tmp_path / "pool.json"
    entry = {"protocol": "openai", "base_url": url, "timeout": 30, **({"price": list(price)} if price else {}), **more}
    file.write_text(json.dumps([{**entry, "name": f"worker-{name}", "model": name} for name in names]))
    return load_pool(str(file))


def user(text):
    return {"role": "user", "content": text}


def said(text):
    return {"role": "assistant", "content": text}


def test_access_lists_as_workers_saw_them(tmp_path):
    with Wire(lambda model, chat: f"{model} says") as wire:
        pool = pool_of(tmp_path, wire.url, "abcde")
        trace = execute(Workflow([Step(0, "One.", []), Step(1, "Two.", [0]), Step(2, "Three.", []), Step(3, "Four.", [0, 2]),
                                  Step(4, "Five.", [0, 1, 2, 3])]), "Why?", pool)
    assert wire.chat_of("a") == [user("Question:\nWhy?\n\nYour task:\nOne.")]
    assert wire.chat_of("b") == [user("Question:\nWhy?\n\nYour task:\nOne."), said("a says"), user("Your task:\nTwo.")]
    assert wire.chat_of("c") == [user("Question:\nWhy?\n\nYour task:\nThree.")]
    assert wire.chat_of("d") == [user("Question:\nWhy?\n\nYour task:\nOne."), said("a says"), user("Your task:\nThree."), said("c says"),
                                 user("Your task:\nFour.")]
    assert wire.chat_of("e") == [user("Question:\nWhy?\n\nYour task:\nOne."), said("a says"), user("Your task:\nTwo."), said("b says"),
                                 user("Your task:\nThree."), said("c says"), user("Your task:\nFour."), said("d says"), user("Your task:\nFive.")]
    assert trace.responses == [f"{m} says" for m in "abcde"] and trace.answer == "e says" and trace.error is None
    assert trace.calls == 5 and trace.tokens == 60 and trace.cost == pytest.approx(5 * (10 * 1 + 2 * 10) / 1e6) and trace.seconds > 0


def test_steps_that_do_not_see_each_other_run_at_the_same_time(tmp_path):
    together, order = threading.Barrier(3), []

    def answer(model, chat):
        if model != "z":
            together.wait(timeout=60)  # raises unless all three are in flight
        order.append(model)
        return model

    with Wire(answer) as wire:
        pool = pool_of(tmp_path, wire.url, "abcz")
        trace = execute(Workflow([Step(0, "A.", []), Step(1, "B.", []), Step(2, "C.", []), Step(3, "Z.", [0, 1, 2])]), "Why?", pool)
    assert trace.answer == "z" and order[-1] == "z" and set(order) == set("abcz")


class Local:
    """A worker without a network: .chat is answer(chat)."""

    def __init__(self, name, answer):
        self.name, self.answer = name, answer

    def chat(self, chat, **_):
        return Reply(self.answer(chat), 1, 1, 0.0, 0.0)


def test_hundreds_of_workflows_share_a_few_threads(monkeypatch):
    """No thread waits for another: with four of them, 300 chains and diamonds all get through."""
    monkeypatch.setattr(wf, "jobs", queue.SimpleQueue())
    monkeypatch.setattr(wf, "idle", threading.Semaphore(0))
    monkeypatch.setattr(wf, "unborn", threading.Semaphore(4))
    pool = [Local(str(i), lambda chat, i=i: f"{i}:{len(chat)}") for i in range(3)]
    diamond = Workflow([Step(0, "A", []), Step(1, "B", [0]), Step(2, "C", [0]), Step(0, "D", [1, 2]), Step(1, "E", [0, 3])])
    futures = [submit(diamond, Task(f"Question {i}", pool)) for i in range(300)]
    assert [f.result(timeout=60).responses for f in futures] == [["0:1", "1:3", "2:3", "0:5", "1:5"]] * 300


def test_a_lost_worker_is_infrastructure(tmp_path):
    with Wire(lambda model, chat: 400 if model == "b" else model) as wire:
        pool = pool_of(tmp_path, wire.url, "abc")
        trace = execute(Workflow([Step(0, "A.", []), Step(1, "B.", []), Step(2, "C.", [0, 1])]), "Why?", pool)
    assert trace.error.startswith("step 1: worker-b: ") and trace.answer == ""
    assert trace.responses == ["a", "", ""] and trace.calls == 1 and trace.cost > 0  # what the others cost is known
    assert [m for m, _ in wire.seen if m == "c"] == [] and "Failed: step 1" in trace.view()


def test_an_empty_reply_is_the_models_own(tmp_path):
    with Wire(lambda model, chat: "") as wire:
        trace = execute(Workflow([Step(0, "A.", []), Step(0, "B.", [])]), "Why?", pool_of(tmp_path, wire.url, "a"))
    assert trace.error is None and trace.answer == "" and trace.calls == 2


def test_a_bug_is_not_swallowed():
    def broken(chat):
        raise KeyError("a bug")
    with pytest.raises(KeyError, match="a bug"):
        execute(Workflow([Step(0, "A.", []), Step(0, "B.", [])]), "Why?", [Local("broken", broken)])
    with pytest.raises(ValueError, match="no previous"):
        execute(Workflow([]), "Why?", [])


def test_unknown_cost_is_unknown(tmp_path):
    with Wire(lambda model, chat: "yes") as wire:
        trace = execute(Workflow([Step(0, "A.", [])]), "Why?", pool_of(tmp_path, wire.url, "a", price=None))
    assert trace.cost is None and trace.tokens == 12 and "unknown cost" in trace.view()


def test_traces_round_trip_and_replay(tmp_path):
    with Wire(lambda model, chat: f"{model}{len(chat)}") as wire:
        pool = pool_of(tmp_path, wire.url, "ab")
        first = execute(parse(GOOD, 2), "Why?", pool)
        second = execute(parse(GOOD, 2), "Why?", pool, first)
        again = Trace.from_json(json.loads(json.dumps(second.to_json())))
        assert again == second and again.rounds()[0].workflow.completion == GOOD and again.workflow.steps[1].sees_all
        before, _ = list(wire.seen), wire.seen.clear()
        assert execute(again.workflow, again.question, pool, again.previous).responses == second.responses
        assert wire.seen == before[2:]


def test_views(tmp_path):
    nasty = 'a "quoted" <b> `tick` #hash;\n1. _x_ \x1b[31m]end'
    pool = [Local("w_1", lambda chat: nasty), Local("w2", lambda chat: "fine")]
    trace = execute(Workflow([Step(0, nasty, []), Step(1, "Two.", [0], True)]), "Why?", pool)
    trace = execute(Workflow([Step(1, "Three.", [], True), Step(0, "Four.", [0])]), "Why?", pool, trace)
    view = trace.view()
    assert "\x1b" not in view and all(word in view for word in ("Why?", "w_1", "w2", "Two.", "Three.", "4 calls", "8 tokens", "$0.0000"))
    lines = trace.mermaid().splitlines()
    assert lines[0] == "flowchart TD" and {"r0s0 --> r0s1", "r0s1 --> r1s0", "r1s0 --> r1s1"} <= {x.strip() for x in lines}
    for line in lines[1:]:  # nothing of the text is left that could end its label
        assert re.fullmatch(r'\s+(\w+\(?\["([^\W_]|[ ,]|#\d+;|<br/>)*"\]\)?|\w+ --> \w+(\(\["([^\W_]|[ ,]|#\d+;)*"\]\))?)', line), line


# ---------------------------------------------------------------------------------------------------------------------------------
# The five modes of App. F. Each answer depends on what its worker was shown, so a wrong access list also ends in a wrong answer.


def heard(chat):
    """A worker's chat as (question, the (subtask, response) pairs it was shown, its own subtask)."""
    question, rest = chat[0]["content"].removeprefix("Question:\n").split("\n\nYour task:\n", 1)
    tasks = [rest] + [m["content"].removeprefix("Your task:\n") for m in chat[2::2]]
    return question, list(zip(tasks, [m["content"] for m in chat[1::2]])), tasks[-1]


FACTS = {"How many legs has a spider?": "8", "How many legs has an ant?": "6"}


def trade(model, chat):
    """Small honest programs: each does one thing, with nothing but its chat to go by."""
    question, shown, task = heard(chat)
    said_before = [response for _, response in shown]
    if model == "planner":
        return "1. Legs of a spider. 2. Legs of an ant. 3. Add." if "Plan" in task else "I only plan."
    if model == "librarian":
        return next((fact for asked, fact in FACTS.items() if asked in task), "unknown")
    if model == "adder":
        numbers = [int(n) for response in said_before for n in re.findall(r"^\d+$", response)]
        return str(sum(numbers)) if numbers else "nothing to add"
    if model == "checker":
        return said_before[-1] if said_before and "Check" in task else "nothing to check"
    if model == "judge":
        return max(set(said_before), key=said_before.count) if said_before else "no candidates"
    if model == "guesser":
        return "13" if "quickly" in task else "14"
    if model == "strong":
        return "Ask the librarian twice, then the adder." if not said_before else f"I said: {said_before[0]}"


MODEL = ["planner", "librarian", "adder", "checker", "judge", "guesser", "strong"]
SPIDER, ANT = FACTS
Q = "How many legs have a spider and an ant together?"


@pytest.mark.parametrize("steps, answer, shown", [
    pytest.param([("planner", "Plan the steps.", []), ("librarian", SPIDER, "all"), ("librarian", ANT, "all"), ("adder", "Carry the plan out.", "all"),
                  ("checker", "Check the sum.", "all")], "14",
                 [[], [0], [0, 1], [0, 1, 2], [0, 1, 2, 3]], id="planner, executor, checker"),
    pytest.param([("guesser", "Solve it.", []), ("guesser", "Solve it quickly.", []), ("guesser", "Solve it, with care.", []), ("judge", "Vote.", "all")],
                 "14", [[], [], [], [0, 1, 2]], id="independent attempts, aggregated"),
    pytest.param([("librarian", SPIDER, []), ("librarian", ANT, []), ("adder", "Add both facts.", "all")], "14", [[], [], [0, 1]],
                 id="independent recall of facts"),
    pytest.param([("librarian", SPIDER, []), ("adder", "Start the sum.", [0]), ("checker", "Check it.", [1]), ("adder", "Go on.", [2])], "8",
                 [[], [0], [1], [2]], id="a chain, step by step"),
    pytest.param([("strong", "Say how the other models should solve this.", []), ("librarian", SPIDER, [0]), ("librarian", ANT, [0]),
                  ("adder", "Do as planned.", "all")], "14", [[], [0], [0], [0, 1, 2]], id="abdication to a strong worker")])
def test_the_five_modes(steps, answer, shown, tmp_path):
    text = "Some plan.\n" + Workflow([Step(MODEL.index(m), task, [] if sees == "all" else sees, sees == "all") for m, task, sees in steps]).text()
    with Wire(trade) as wire:
        trace = execute(parse(text, len(MODEL)), Q, pool_of(tmp_path, wire.url, MODEL))
    assert trace.error is None and trace.answer == answer and len(wire.seen) == len(steps)
    for i, (model, task, _) in enumerate(steps):
        [chat] = [chat for m, chat in wire.seen if m == model and heard(chat)[2] == task]
        assert heard(chat) == (Q, [(steps[j][1], trace.responses[j]) for j in shown[i]], task)
        assert [m["role"] for m in chat] == ["user", "assistant"] * len(shown[i]) + ["user"]


CATORCE, IRON, PERU = "Find catorce + quince.", "What is the atomic number of iron * tres?", "Find the capital of Peru backwards."


def test_some_of_a_pool():
    """--only: by name, in the pool's order; their letters are those of the whole pool, their numbers are new."""
    pool = load_pool("local", "http://127.0.0.1:9/v1")
    some = wf.subset(pool, "coder, translator")
    assert [w.name for w in some] == ["translator", "coder"] and wf.subset(pool, "") == pool
    [system, _] = wf.ask(Task("Why?", some), Prompting(style="short", named=True))
    assert system["content"] == "Models B 0 D 1, 5 steps." and wf.ask(Task("Why?", some), Prompting()) == messages("Why?", 2)
    with pytest.raises(ValueError, match="no worker 'poet'; the pool has calculator, translator"):
        wf.subset(pool, "coder,poet")


@pytest.mark.parametrize("question, steps, responses", [
    pytest.param(IRON, [("translator", "Rewrite the question.", []), ("librarian", "Look up what it takes.", [0]), ("calculator", "Work it out.", [1]),
                        ("calculator", "Compute it again, to check.", [1])],
                 ["What is the atomic number of iron * 3?", "What is 26 * 3?", "78", "78"], id="planner, executor, checker"),
    pytest.param(CATORCE, [("calculator", "Work it out.", []), ("translator", "Translate it.", []), ("calculator", "Calculate from both.", "all")],
                 ["I am a calculator; I find nothing here to work on.", "Find 14 + 15.", "29"], id="independent attempts, aggregated"),
    pytest.param("Find the atomic number of iron + the atomic number of zinc.", [
        ("librarian", "Recall the first.", []), ("librarian", "Recall the second.", []), ("calculator", "Find the sum.", "all")],
        ["Find 26 + 30."] * 2 + ["56"], id="independent recall of facts"),
    pytest.param(IRON, [("librarian", "Name the number.", []), ("translator", "Translate the rest.", [0]), ("calculator", "Work it out.", [1])],
                 ["What is 26 * tres?", "What is 26 * 3?", "78"], id="a chain, step by step"),
    pytest.param(PERU, [("librarian", "Tell the others what to do.", []), ("librarian", "Look up the city.", [0]), ("coder", "Spell it.", [1])],
                 ["I am a librarian; that is not my work.", "Find Lima backwards.", "amiL"], id="abdication, to one who will not plan")])
def test_the_five_modes_of_the_local_specialists(question, steps, responses, tmp_path):
    names = list(SPECIALISTS)
    workflow = Workflow([Step(names.index(m), task, [*range(i)] if sees == "all" else sees, sees == "all") for i, (m, task, sees) in enumerate(steps)])
    with Wire(lambda model, chat: SPECIALISTS[model](chat)) as wire:
        trace = execute(parse(workflow.text(), len(names)), question, pool_of(tmp_path, wire.url, names))
    assert trace.error is None and trace.responses == responses and len(wire.seen) == len(steps)
    for (model, task, _), step in zip(steps, workflow.steps):
        [chat] = [chat for m, chat in wire.seen if m == model and heard(chat)[2] == task]
        assert heard(chat) == (question, [(steps[j][1], responses[j]) for j in step.access], task)


def test_a_run_again_is_replayed(tmp_path):
    """With a nonce and a replay file a second run of the same workflow asks nobody; another nonce or no file asks again."""
    with Wire(lambda model, chat: f"{model}{len(wire.seen)}") as wire:
        pool_of(tmp_path, wire.url, "ab")

        def run(nonce, replay=str(tmp_path / "replies")):
            trace = execute(parse(GOOD, 2), "Why?", load_pool(str(tmp_path / "pool.json"), replay=replay), name=nonce)
            return trace.responses, len(wire.seen)

        first = run("1/q/0")
        assert run("1/q/0") == first and first[1] == 2
        assert run("1/q/1")[1] == 4 and run("1/q/0", "")[1] == 6 and run("1/q/1")[1] == 6


# ---------------------------------------------------------------------------------------------------------------------------------
# Recursion (§3.2)


def test_the_second_round_is_asked_for_and_sees_the_first(tmp_path):
    with Wire(lambda model, chat: f"{model}'s answer") as wire:
        pool = pool_of(tmp_path, wire.url, "abc")
        first = execute(parse("Plan A.\n" + lists(), 3), "Why?", pool)
        chat = messages("Why?", 3, previous=first)
        wire.seen.clear()
        second = execute(parse(lists("[0, 1, 2]", '["One.", "Two.", "Three."]', '["all", [], ["all"]]'), 3), "Why?", pool, first)
    assert chat[:1] == messages("Why?", 3) and chat[1] == said("Plan A.\n" + lists()) and "a's answer" in chat[2]["content"] and len(chat) == 3
    old = [user("Question:\nWhy?\n\nYour task:\nCheck it."), said("a's answer")]
    assert wire.chat_of("a") == [*old, user("Your task:\nOne.")]
    assert wire.chat_of("b") == [user("Question:\nWhy?\n\nYour task:\nTwo.")]
    assert wire.chat_of("c") == [*old, user("Your task:\nOne."), said("a's answer"), user("Your task:\nTwo."), said("b's answer"), user("Your task:\nThree.")]
    kept = execute(Workflow([]), "Why?", [], second)
    assert kept.answer == second.answer == "c's answer" and kept.cost == second.cost
    assert len(messages("Why?", 3, previous=kept)) == 7 and [t.calls for t in kept.rounds()] == [2, 5, 5]
    third = execute(Workflow([Step(0, "Go on.", [], True)]), "Why?", [Local("x", lambda chat: json.dumps(chat))], kept)
    assert json.loads(third.answer)[:2] == [user("Question:\nWhy?\n\nYour task:\nThree."), said("c's answer")]


def one_step(text):
    return lists("[0]", f'["{text}"]', '["all"]')


def test_conduct_rounds_and_tries():
    pool = [Local("echo", lambda chat: chat[-1]["content"].removeprefix("Question:\nWhy?\n\n").removeprefix("Your task:\n"))]

    def writer(*texts):
        texts, asked = list(texts), []

        def write(chats, n, first, on_text):
            asked.append(chats[0])
            on_text(0, 0, texts.pop(0))
        write.asked = asked
        return write

    def conduct(question, pool, write, rounds=0):
        return wf.conduct(write, [Task(question, pool)], rounds)[0].trace

    write = writer(one_step("first"), one_step("second"), one_step("third"))
    assert conduct("Why?", pool, write, rounds=1).answer == "second" and len(write.asked) == 2  # the depth is capped
    write = writer(one_step("first"), lists("[]", "[]", "[]"), one_step("third"))
    trace = conduct("Why?", pool, write, rounds=5)
    assert trace.answer == "first" and len(write.asked) == 2 and trace.calls == 1  # three empty lists end it
    write = writer("gibberish", one_step("first"), "gibberish", "gibberish", "gibberish")
    assert conduct("Why?", pool, write, rounds=3).answer == "first" and len(write.asked) == 5
    [lost] = wf.conduct(writer("gibberish", lists("[]", "[]", "[]"), "gibberish"), [Task("Why?", pool)], 3)
    assert lost.trace is None and "missing" in lost.invalid

    assert wf.conduct(writer(one_step("first")), [Task("Why \ud83d?", pool)])[0].task.question == "Why ??"  # half an emoji, which nothing can encode

    def down(chat):
        raise WorkerError("down")
    trace = conduct("Why?", [Local("down", down)], writer(one_step("first"), one_step("second")), rounds=1)
    assert trace.error == "step 0: down" and trace.previous is None


# ---------------------------------------------------------------------------------------------------------------------------------
# A checkpoint in the seat


def byte_tokenizer():
    """One token a byte, and the chat's two."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = BPE(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    bpe.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return Tokenizer(bpe)


LEARNED = 'model_id = [0]\nsubtasks = ["Go."]\naccess_list = [[]]'


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A tiny Conductor that has learned one workflow by heart: in its last layer's eyes the next byte depends on the position alone."""
    path = str(tmp_path_factory.mktemp("checkpoint"))
    tokenizer = byte_tokenizer()
    torch.manual_seed(0)
    model = Qwen(Config(258, 64, 128, 2, 4, 2, tie_word_embeddings=True, max_position_embeddings=512))
    prompts = [tokenizer.chat(messages(q, 1, style="short")) for q in ("Why?", "What is 6 * 7?", *(f"Question:\nWhy?\n\nYour task:\n{t}." for t in "AB"))]
    answer = tokenizer.encode(LEARNED) + [tokenizer.eos_id]
    optimizer = torch.optim.AdamW(model.parameters(), 5e-3)
    for _ in range(150):
        optimizer.zero_grad()
        for prompt in prompts:
            logits = model(torch.tensor([prompt + answer]))[0, len(prompt) - 1:-1]
            torch.nn.functional.cross_entropy(logits, torch.tensor(answer)).backward()
        optimizer.step()
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    with open(os.path.join(path, "conductor.json"), "w") as f:
        json.dump({"style": "short", "max_steps": 5, "max_new_tokens": 80, "n_workers": 1}, f)
    return path


def write_all(write, chats, n=1, first=0):
    texts = {}
    write(chats, n, first, lambda i, j, text, prompt, completion: texts.update({(i, j): text}))
    return texts


def test_a_checkpoint_writes(checkpoint):
    model, tokenizer, prompting = wf.load_conductor(checkpoint)
    assert prompting == Prompting("short", max_new_tokens=80)
    write = wf.sampled(model, tokenizer, prompting, 0.0)
    assert write_all(write, [messages(q, 1, style="short") for q in ("Why?", "What is 6 * 7?")], 2) == dict.fromkeys(
        [(0, 0), (0, 1), (1, 0), (1, 1)], LEARNED)
    with pytest.raises(ValueError, match="80 to write are more than the Conductor's 512"):  # a model of 512 positions
        write_all(write, [messages("Why? " * 400, 1, style="short")])


def run_cli(*words, env=()):
    return subprocess.run([sys.executable, "workflow.py", *words], cwd=ROOT, capture_output=True, text=True, timeout=120,
                          env={**os.environ, "OMP_NUM_THREADS": "1", **dict(env)})


def test_command_line(checkpoint, tmp_path):
    workflow = lists("[1]", '["Answer."]', "[[]]")
    with Wire(lambda model, chat: workflow if "You conduct" in chat[0]["content"] else f"{model} says so") as wire:
        pool_of(tmp_path, wire.url, "a")
        (tmp_path / "pool.json").rename(tmp_path / "a.json")
        pool_of(tmp_path, wire.url, "ab", params={"max_tokens": 100})
        pool_a, pool = f"--pool={tmp_path}/a.json", f"--pool={tmp_path}/pool.json"
        shown = run_cli("Why?", f"--checkpoint={checkpoint}", "--temperature=0", pool_a)
        seated = run_cli("Why?", "--conductor=worker-a", pool, "--rounds=1", "--show=json")
    assert shown.returncode == 0 and "a says so" in shown.stdout and "Go." in shown.stdout, shown.stderr
    trace = Trace.from_json(json.loads(seated.stdout))
    assert trace.answer == "b says so" and len(trace.rounds()) == 2
    assert wire.limits == {("a", None), ("a", 200), ("b", 100)}  # in the Conductor's seat twice the output


def test_ctrl_c_ends_it_at_once(tmp_path):
    asked, go_on = threading.Event(), threading.Event()

    def answer(model, chat):
        asked.set()
        go_on.wait(60)
        return "late"

    with Wire(answer) as wire:
        pool_of(tmp_path, wire.url, "a")
        process = subprocess.Popen([sys.executable, "workflow.py", "Why?", "--conductor=worker-a", f"--pool={tmp_path}/pool.json"], cwd=ROOT,
                                   stderr=subprocess.PIPE, text=True)
        assert asked.wait(60)
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=25)[1].strip() == "interrupted" and process.returncode == 1  # the worker's timeout is 30 s
        go_on.set()


@pytest.mark.parametrize("words, reason", [
    (["Why?", "--conductor=nobody", "--pool={pool}"], "worker-a"), (["Why?", "--checkpoint={dir}/none", "--pool={pool}"], "none"),
    ([], "python workflow.py"), (["Why?", "--chekpoint=x"], "--checkpoint"), (["Why?", "--show=png"], "--show=png: there are view"),
    (["serve", "--conductor=worker-a", "--pool={pool}", "--port=99999"], "--port=N")])
def test_command_line_refuses(words, reason, tmp_path):
    pool_of(tmp_path, "http://127.0.0.1:9/v1", "a")
    with pytest.raises(SystemExit, match=reason):
        wf.main([w.format(pool=f"{tmp_path}/pool.json", dir=tmp_path) for w in words])


# ---------------------------------------------------------------------------------------------------------------------------------
# Serve


JSON = {"Content-Type": "application/json"}


class Serving:
    """workflow.serve on a free port, with this `ask`."""

    def __init__(self, ask):
        self.server = serve(ask, {"conductor": 0, "conductor-recursive": 2}, 0)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/v1"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def post(self, chat, model="conductor", **more):
        chat = [user(chat)] if type(chat) is str else chat
        return requests.post(self.url + "/chat/completions", json={"model": model, "messages": chat, **more}, timeout=60)

    __enter__, __exit__ = Wire.__enter__, Wire.__exit__


def echo(question, rounds):
    trace = execute(Workflow([Step(0, "A.", []), Step(0, "B.", [])]), question, [Local("echo", lambda chat: f"{rounds} {chat[-1]['content']}")])
    return execute(Workflow([]), question, [], trace) if rounds else trace


def test_serve_answers_and_sums_the_usage():
    with Serving(echo) as s:
        assert [m["id"] for m in requests.get(s.url + "/models", timeout=60).json()["data"]] == ["conductor", "conductor-recursive"]
        body = s.post("Why?").json()
        assert body["object"] == "chat.completion" and body["model"] == "conductor" and body["choices"][0]["finish_reason"] == "stop"
        assert body["choices"][0]["message"] == {"role": "assistant", "content": "0 Question:\nWhy?\n\nYour task:\nB."}
        assert {k: body["usage"][k] for k in ("prompt_tokens", "completion_tokens", "total_tokens", "cost")} == {
            "prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4, "cost": 0.0}
        body = s.post("Why?", model="conductor-recursive").json()
        assert body["choices"][0]["message"]["content"].startswith("2 ") and body["usage"]["total_tokens"] == 4  # both rounds count
        chat = [{"role": "system", "content": "Be brief."}, user("Hi"), said("Hello"), user([{"type": "text", "text": "Why?"}])]
        assert "system: Be brief.\n\nuser: Hi\n\nassistant: Hello\n\nuser: Why?\n" in s.post(chat).json()["choices"][0]["message"]["content"]


def events(response):
    return [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]


def test_serve_streams():
    with Serving(echo) as s:
        response = s.post("Why?", stream=True, stream_options={"include_usage": True})
        *chunks, end = events(response)
        chunks = [json.loads(c) for c in chunks]
        assert response.headers["Content-Type"] == "text/event-stream" and end == "[DONE]" and len({c["id"] for c in chunks}) == 1
        assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
        assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks[:-1]) == "0 Question:\nWhy?\n\nYour task:\nB."
        assert [c["choices"][0]["finish_reason"] for c in chunks[:-1]][-2:] == [None, "stop"]
        assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["total_tokens"] == 4
        assert all("usage" not in json.loads(e) for e in events(s.post("Why?", stream=True))[:-1])


def test_serve_refuses():
    def ask(question, rounds):
        if question == "No workflow":
            raise WorkflowError("model_id: the list is missing")
        if question == "No worker":
            return Trace(question, Workflow([Step(0, "", [])]), ["w"], [None], error="step 0: w: down")
        if question == "Too long":
            raise ValueError("more than the Conductor's 512")
        if question == "No memory":
            raise MemoryError("no memory left")
        return echo(question, rounds)
    with Serving(ask) as s:
        for status, response in [
                (404, requests.get(s.url + "/nothing", timeout=60)), (404, s.post("Why?", model="gpt")),
                (404, requests.post(s.url + "/completions", json={"model": "conductor", "messages": [user("x")]}, timeout=60)),
                (400, s.post("Why?", n=2)), (400, s.post("Why?", tools=[{}])), (400, s.post([])), (400, s.post([user(None)])), (400, s.post([{}])),
                (400, s.post([user([{"type": "image_url", "image_url": {}}])])), (400, requests.post(s.url + "/chat/completions", b"{", headers=JSON, timeout=60)),
                (400, requests.post(s.url + "/chat/completions", json=[1], timeout=60)),
                (400, s.post("Why?", model=[])), (400, s.post("Too long")), (500, s.post("No memory")),
                (502, s.post("No workflow")), (502, s.post("No worker"))]:
            assert response.status_code == status and len(response.json()["error"]["message"]) > 10, response.text
        assert s.post("No worker", stream=True).status_code == 502
        assert s.post("Why?").status_code == s.post("Why?", n=None).status_code == 200


def test_serve_is_not_for_other_sites():
    """A page in the user's browser can send text/plain to 127.0.0.1 unasked; for JSON the browser would ask first, and gets no."""
    with Serving(echo) as s:
        for kind in ("text/plain", "application/x-www-form-urlencoded", None):
            answer = requests.post(f"{s.url}/chat/completions", json.dumps({"model": "conductor", "messages": []}), headers={"Content-Type": kind})
            assert answer.status_code == 415 and "application/json" in answer.json()["error"]["message"]
        assert requests.options(f"{s.url}/chat/completions").status_code == 501
        chat = {"model": "conductor", "messages": [user("Why?")]}
        assert requests.post(f"{s.url}/chat/completions", json=chat, headers={"Content-Type": "Application/JSON; charset=utf-8"}).status_code == 200


def test_serve_on_a_port_in_use(tmp_path):
    pool_of(tmp_path, "http://127.0.0.1:9/v1", "a")
    with Serving(echo) as s, pytest.raises(SystemExit, match="in use.*--port"):
        wf.main(["serve", "--conductor=worker-a", f"--pool={tmp_path}/pool.json", f"--port={s.server.server_address[1]}"])


def test_serve_many_at_once():
    """All in flight together, and everyone gets their own answer."""
    together = threading.Barrier(40)

    def ask(question, rounds):
        together.wait(60)
        return echo(question, rounds)
    with Serving(ask) as s, ThreadPoolExecutor(40) as threads:
        answers = threads.map(lambda i: s.post(f"Question {i}").json()["choices"][0]["message"]["content"], range(40))
        assert [f"Question {i}\n" in a for i, a in enumerate(answers)] == [True] * 40


def test_a_conductor_is_a_worker_of_another(checkpoint, tmp_path):
    """A checkpoint behind serve, as a worker of a pool that a workflow runs over: usage and cost come up through both."""
    with Wire(lambda model, chat: f"{model} heard {chat[0]['content']!r}") as wire:
        inner = pool_of(tmp_path, wire.url, "i")
        *conductor, prompting = wf.load_conductor(checkpoint)
        write = wf.one_at_a_time(wf.sampled(*conductor, prompting, 0.0))
        with Serving(lambda question, rounds: conduct(write, [Task(question, inner)], 0, prompting)[0].trace) as s:
            outer = pool_of(tmp_path, s.url, ["conductor"])
            trace = execute(Workflow([Step(0, "A.", []), Step(0, "B.", [])]), "Why?", outer)
    assert trace.error is None and trace.calls == 2 and trace.tokens == 24
    assert sorted(chat[0]["content"] for _, chat in wire.seen) == [
        f"Question:\nQuestion:\nWhy?\n\nYour task:\n{t}.\n\nYour task:\nGo." for t in "AB"]
