"""The laptop world: its problems, who can solve them, the grader, the tables. The specialists are real, over real HTTP."""
import base64
import contextlib
import hashlib
import io
import itertools
import json
import os
import pickle
import random
import re
import signal
import subprocess
import sys
import threading
import time
import zlib
import types
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from urllib.parse import parse_qs, urlsplit

import pytest
import urllib3.util.retry

import eval as evaluation
import model as model_file
import workers
from eval import (accuracies, alone, ASK, average, baselines, central, costs, draw_pool, grade, kept, learned, load, majority, PHRASES,
                  poll, possible, prepare, Problem, random_completion, random_workflow, read_problems, router, stored_tests, table, unpack,
                  write_problems)
from sample import Completion
from workers import load_pool, Reply, Worker, WorkerError
import workflow as workflow_py
from workflow import execute, parse, Prompting, Step, submit, Task, Trace, Workflow

CALCULATOR, TRANSLATOR, LIBRARIAN, CODER, GENERALIST = range(5)
SIMPLE = ("arithmetic", "fact", "string", "number")
TWO, THREE = ("foreign", "fact+arithmetic", "fact+string"), ("foreign+fact+arithmetic",)
KINDS = SIMPLE + TWO + THREE
TELL = {CALCULATOR: "Compute it.", TRANSLATOR: "Translate it.", LIBRARIAN: "Look up the fact.", CODER: "Transform the word."}
INTENDED = {"arithmetic": [CALCULATOR], "fact": [LIBRARIAN], "string": [CODER], "number": [TRANSLATOR],
            "foreign": [TRANSLATOR, CALCULATOR], "fact+arithmetic": [LIBRARIAN, CALCULATOR], "fact+string": [LIBRARIAN, CODER],
            "foreign+fact+arithmetic": [TRANSLATOR, LIBRARIAN, CALCULATOR]}


@pytest.fixture(scope="module")
def pool():
    found = load_pool("local")
    assert [w.name for w in found] == ["calculator", "translator", "librarian", "coder", "generalist"]
    return found


def chain(who, tell=TELL.get, linked=True):
    """Each step sees the one before it; without links none sees anything."""
    return Workflow([Step(w, tell(w) or "Do it.", [i - 1] if linked and i else []) for i, w in enumerate(who)])


def share(problems, pool, workflow_of):
    """Accuracy by kind of the workflow that workflow_of(problem) makes."""
    futures = [submit(workflow_of(p), Task(p.question, pool)) for p in problems]
    traces = [f.result() for f in futures]
    assert not any(t.error for t in traces)
    right = {}
    for p, t in zip(problems, traces):
        right.setdefault(p.kind, []).append(grade(p, t.answer))
    return {kind: sum(values) / len(values) for kind, values in right.items()}


# ---------------------------------------------------------------------------------------------------------------------------------
# Problems


def expression(problem):
    """What the sentence around it asks for."""
    return re.fullmatch(r"What is (.+)\?|(?:Find|Tell me|Give me) (.+)\.", problem.question).expand(r"\1\2")


@pytest.fixture(scope="module")
def world():
    """The problems of both splits by what is asked in them."""
    found = {}
    for problem in load("laptop", "train") + load("laptop", "test"):
        found.setdefault(expression(problem), []).append(problem)
    return found


def test_train_and_test_share_no_expression():
    """Whatever the sentence around it, an expression is in one split only; of every kind about three quarters are in train."""
    train, test = ({(p.kind, expression(p)) for p in load("laptop", split)} for split in ("train", "test"))
    assert {e for _, e in train}.isdisjoint(e for _, e in test)
    for kind in KINDS:
        n_train, n_test = (sum(k == kind for k, _ in part) for part in (train, test))
        assert n_test >= 7 and 0.6 < n_train / (n_train + n_test) < 0.9, kind
    assert {k for k, _ in train | test} == set(KINDS)


@pytest.mark.parametrize("split", ["train", "test"])
def test_kinds_take_turns(split):
    """Any slice of a multiple of the number of kinds holds each kind equally often; the order is shuffled, always alike."""
    problems = load("laptop", split, 4000)
    for begin, rounds in [(0, 1), (3, 2), (129, 4), (3000, 100)]:
        counts = Counter(p.kind for p in problems[begin:begin + rounds * len(KINDS)])
        assert counts == dict.fromkeys(KINDS, rounds)
    assert problems == load("laptop", split)[:4000] and [p.id for p in problems[:80:8]] != sorted(p.id for p in problems[:80:8])


def test_no_such_problems():
    """An unknown data set or split is an error that says what there is."""
    for name, split in [("lapdog", "train"), ("laptop", "valid")]:
        with pytest.raises(ValueError, match="laptop"):
            load(name, split)


@pytest.mark.parametrize("kind, asked, answer", [
    ("arithmetic", "7 * 8", "56"), ("arithmetic", "3 - 9", "-6"), ("arithmetic", "39 + 26", "65"),
    ("fact", "the atomic number of oxygen", "8"), ("fact", "the capital of Peru", "Lima"), ("fact", "element number 26", "iron"),
    ("string", "silver backwards", "revlis"), ("string", "silver without vowels", "slvr"),
    ("string", "castle in capitals", "CASTLE"),
    ("number", "veintitrés", "23"), ("number", "quince", "15"),
    ("foreign", "doce * tres", "36"), ("foreign", "cinco - treinta", "-25"),
    ("fact+arithmetic", "the atomic number of carbon - 10", "-4"), ("fact+arithmetic", "the atomic number of zinc * 2", "60"),
    ("fact+string", "the capital of Norway backwards", "olsO"), ("fact+string", "the capital of Japan without vowels", "Tky"),
    ("foreign+fact+arithmetic", "the atomic number of zinc + veinte", "50"),
    ("foreign+fact+arithmetic", "the atomic number of iron - uno", "25")])
def test_answers_by_hand(kind, asked, answer, world):
    """Questions of each kind, worked out by hand, are there in four sentences, with that answer."""
    found = world[asked]
    assert {(p.kind, p.answer) for p in found} == {(kind, answer)} and len({p.question for p in found}) == 4


# ---------------------------------------------------------------------------------------------------------------------------------
# Who can solve what


def test_intended_workflows_solve_every_kind(pool):
    """The right workers in the right order, each told its trade and shown the step before, answer every question of each kind."""
    problems = load("laptop", "test", 12 * len(KINDS))
    assert share(problems, pool, lambda p: chain(INTENDED[p.kind])) == dict.fromkeys(KINDS, 1.0)


def test_access_lists_matter(pool):
    """The same workflows with their access lists emptied solve what takes one step, and no composite."""
    problems = load("laptop", "test", 12 * len(KINDS))
    assert share(problems, pool, lambda p: chain(INTENDED[p.kind], linked=False)) == {k: float(k in SIMPLE) for k in KINDS}


def test_subtasks_matter(pool):
    """The same workflows with a general subtask in every step solve nothing, and neither do workers told another's trade."""
    problems = load("laptop", "test", 12 * len(KINDS))
    none = dict.fromkeys(KINDS, 0.0)
    assert share(problems, pool, lambda p: chain(INTENDED[p.kind], lambda w: "Solve the question.")) == none
    assert share(problems, pool, lambda p: chain(INTENDED[p.kind], lambda w: TELL[(w + 1) % 4])) == none


def test_order_matters(pool):
    """A composite's workers in reverse order, all of them seen, do not solve it."""
    problems = [p for p in load("laptop", "test", 12 * len(KINDS)) if p.kind not in SIMPLE]
    assert not any(share(problems, pool, lambda p: Workflow([Step(s.worker, s.subtask, [*range(i)]) for i, s in enumerate(
        reversed(chain(INTENDED[p.kind]).steps))])).values())


@pytest.mark.parametrize("worker", range(5))
def test_one_worker_is_not_enough_for_a_composite(pool, worker):
    """The intended steps with one and the same worker in every seat solve no composite, whoever it is."""
    problems = [p for p in load("laptop", "test", 12 * len(KINDS)) if p.kind not in SIMPLE]
    workflow = {p.kind: Workflow([Step(worker, s.subtask, s.access) for s in chain(INTENDED[p.kind]).steps]) for p in problems}
    assert not any(share(problems, pool, lambda p: workflow[p.kind]).values())


def test_specialists_take_half_of_the_phrases(pool):
    """Of the phrases that the warm start teaches, each specialist answers to three; the generalist cares for none."""
    accepted = Counter()
    for (kind, question), phrase in itertools.product(
            [("arithmetic", "What is 7 * 8?"), ("fact", "What is element number 26?"), ("string", "What is silver backwards?"),
             ("number", "What is quince?")], PHRASES):
        answer = execute(Workflow([Step(INTENDED[kind][0], phrase, [])]), question, pool).answer
        accepted[kind] += answer in ("56", "iron", "revlis", "15")
    assert accepted == dict.fromkeys(SIMPLE, 3)


@pytest.fixture(scope="module")
def measured(pool):
    """(problems, systems) of the baselines on 256 held-out problems."""
    problems = load("laptop", "test", 256)
    return problems, baselines(problems, pool)


def test_no_worker_alone_and_no_luck_solve_the_world(measured):
    """Over all problems single workers stay at or below 0.35, random workflows at or below 0.15; a specialist knows its trade."""
    problems, systems = measured
    assert list(systems) == ["calculator", "translator", "librarian", "coder", "generalist", "random workflows"]
    scores = {name: accuracies(problems, traces) for name, traces in systems.items()}
    assert all(s["all"] <= 0.35 for s in scores.values()) and 0 < scores["random workflows"]["all"] <= 0.15
    for name, kind in zip(systems, ("arithmetic", "number", "fact", "string")):
        assert scores[name] == {"all": 1 / 8, **{k: float(k == kind) for k in KINDS}}
    simple = sum(scores["generalist"][k] for k in SIMPLE) / len(SIMPLE)
    assert 0.02 < simple < 0.3 and not any(scores["generalist"][k] for k in TWO + THREE)


def test_random_workflows_are_the_same_each_time(pool, measured):
    """The baseline does not move between two evaluations."""
    problems, systems = measured
    again = baselines(problems[:40], pool)["random workflows"]
    assert [(t.workflow, t.answer) for t in again] == [(t.workflow, t.answer) for t in systems["random workflows"][:40]]


# ---------------------------------------------------------------------------------------------------------------------------------
# What the specialists are sent


class Tap(workers.SpecialistHandler):
    """The local specialists, with what came over the wire kept in server.bodies."""

    def do_POST(self):
        wire, body = self.rfile, self.rfile.read(int(self.headers["Content-Length"]))
        self.server.bodies.append(body)
        self.rfile = io.BytesIO(body)
        super().do_POST()
        self.rfile = wire


class Script:
    """A Conductor that writes by(question): a tokenizer whose ids are characters, and a generate() for it."""
    end_ids = [0]
    model = types.SimpleNamespace(config=types.SimpleNamespace(max_position_embeddings=10 ** 6))

    def __init__(self, by):
        self.by, self.batches = by, []

    def __len__(self):
        return 0x110000

    def chat(self, messages):
        return [ord(c) for c in messages[1]["content"]]  # the question, in every round

    def decode(self, ids):
        return "".join(map(chr, ids))

    def generate(self, model, prompts, n, max_new_tokens, temperature, on_finish, **_):
        assert (n, temperature) == (1, 0.0)
        self.batches.append(len(prompts))
        for i in reversed(range(len(prompts))):  # they finish in any order
            on_finish(i, 0, Completion([ord(c) for c in self.by(self.decode(prompts[i]))], [], True))


def conduct(monkeypatch, by, problems, pool, **how):
    script = Script(by)
    monkeypatch.setattr(workflow_py, "generate", script.generate)
    return evaluation.conduct(script.model, script, problems, [pool] * len(problems), Prompting(style="short"), **how), script


def test_the_gold_answer_never_leaves(monkeypatch):
    """Problems whose every hidden field is a canary: it is in no request of a workflow, a single worker or a random workflow."""
    server = workers.Server(("127.0.0.1", 0), Tap)
    server.bodies = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    problems = [Problem("CANARY", p.question, "CANARY", "CANARY") for p in load("laptop", "test", 16)]
    kinds = [p.kind for p in load("laptop", "test", 16)]
    pool = load_pool("local", local_url=f"http://127.0.0.1:{server.server_address[1]}/v1")
    workflows = {p.question: chain(INTENDED[kind]) for p, kind in zip(problems, kinds)}
    traces, _ = conduct(monkeypatch, lambda question: workflows[question].text(), problems, pool)
    baselines(problems, pool)
    server.shutdown()
    server.server_close()
    assert all(t and not t.error for t in traces) and len(server.bodies) > 16 * 6
    assert not any(b"CANARY" in body for body in server.bodies)
    for body in map(json.loads, server.bodies):
        assert set(body) == {"model", "messages"}
        assert any(q in body["messages"][0]["content"] for q in workflows)
        assert {m["role"] for m in body["messages"]} <= {"user", "assistant"}


# ---------------------------------------------------------------------------------------------------------------------------------
# Graders


@pytest.mark.parametrize("response, right", [
    ("42", True), (" 42\n", True), ("<answer>42</answer>", True), ("I work it out. <answer>\n 42 </answer> Done.", True),
    ("<answer>41</answer> no, <answer>42</answer>", True), ("<answer>42</answer> no, <answer>41</answer>", False),
    ("The answer is 42", False), ("42.", False), ("42.0", False), ("", False), ("4 2", False), ("142", False), ("-42", False),
    ("<answer></answer> 42", False), ("<answer>42", False), ("42 <answer>I do not know</answer>", False)])
def test_grade(response, right):
    """The last <answer> tag, or else the whole response, has to be the answer to the letter."""
    assert grade(Problem("", "", "42", ""), response) is right


def test_grade_minds_case():
    """`in capitals` would be no task otherwise."""
    assert grade(Problem("", "", "LIMA", ""), "LIMA") and not grade(Problem("", "", "LIMA", ""), "Lima")


# ---------------------------------------------------------------------------------------------------------------------------------
# Random workflows


def test_random_completions_parse_back(world):
    """Each parses into its own workflow, of 1 to 5 steps, after a plan that says the question; the length stands behind the workers."""
    rng, lengths, again = random.Random(7), Counter(), random.Random(7)
    for question in [problems[0].question for problems in world.values()][:1500]:
        text, workflow = random_completion(question, rng, 5), random_workflow(again, 5)
        assert parse(text, 5) == workflow
        assert text.startswith(f"Plan: {question}\nmodel_id = ") and f"] # {len(workflow.steps)} steps\nsubtasks = [" in text
        lengths[len(workflow.steps)] += 1
    assert all(abs(lengths[n] / 1500 - (11 - 2 * n) / 25) < 0.04 for n in range(1, 6)), lengths


def test_random_workflows_prefer_nothing():
    """Workers and phrases are even, later steps see all before them nine times in ten, and the limits are kept."""
    rng = random.Random(8)
    steps = [(i, s) for _ in range(1000) for i, s in enumerate(random_workflow(rng, 4, 3).steps)]
    assert max(i for i, _ in steps) == 2
    for counts, n in [(Counter(s.worker for _, s in steps), 4), (Counter(s.subtask for _, s in steps), len(PHRASES))]:
        assert len(counts) == n and all(0.8 < c * n / len(steps) < 1.2 for c in counts.values())
    later = [(i, s.access) for i, s in steps if i]
    assert all(access in ([], [*range(i)]) for i, access in later)
    assert 0.87 < sum(access != [] for _, access in later) / len(later) < 0.93


# ---------------------------------------------------------------------------------------------------------------------------------
# Systems and tables


def test_the_conductors_workflows_are_run_in_order(pool, monkeypatch):
    """More problems than a batch holds: each trace in its problem's place, None for what is no workflow, `change` applied."""
    problems = load("laptop", "test", 72)
    kind = {p.question: p.kind for p in problems}

    def write(question):
        return "I would rather not." if kind[question] == "number" else f"A plan.\n{chain(INTENDED[kind[question]]).text()}"

    traces, script = conduct(monkeypatch, write, problems, pool)
    assert sum(script.batches) == 72
    assert [t and t.question for t in traces] == [None if p.kind == "number" else p.question for p in problems]
    assert accuracies(problems, traces) == {"all": 7 / 8, **{k: float(k != "number") for k in KINDS}}

    def blind(workflow):
        return Workflow([Step(s.worker, s.subtask, []) for s in workflow.steps])

    traces, _ = conduct(monkeypatch, write, problems, pool, change=blind)
    assert accuracies(problems, traces)["all"] == 3 / 8
    assert conduct(monkeypatch, write, [], pool)[0] == []  # a rank without problems


def test_rounds_go_on_until_an_answer_is_kept(pool, monkeypatch):
    """Of four questions one is right at once and kept, one is kept wrong, one is mended in the second round, one writes no second workflow."""
    problems = [Problem(str(i), f"What is 6 * {i}?", str(6 * i), "arithmetic") for i in (3, 4, 5, 6)]
    good, bad, empty = *(Workflow([Step(w, "Work it out.", [])]).text() for w in (0, 3)), Workflow([]).text()
    turns = {"3": [good, empty, bad], "4": [bad, empty], "5": [bad, good, empty], "6": [bad, "Never mind.", good]}

    def write(prompt):
        question = re.search(r"6 \* (\d)", prompt)[1]
        return turns[question].pop(0)

    traces, _ = conduct(monkeypatch, write, problems, pool, rounds=2)
    assert [grade(p, t.answer) for p, t in zip(problems, traces)] == [True, False, True, False]
    assert [[len(t.workflow.steps) for t in trace.rounds()] for trace in traces] == [[1, 0], [1, 0], [1, 1, 0], [1]]
    assert kept(problems, traces) == {"kept_right": 1.0, "kept_wrong": 0.5}
    assert turns == {"3": [bad], "4": [], "5": [], "6": [good]} and [t.calls for t in traces] == [1, 1, 2, 1]


def test_pools_that_can_solve_a_problem():
    """The best workflow's chance is the product of the best specialists' skills; pools are drawn so that it is not zero."""
    pool = load_pool("local:pairs", "http://127.0.0.1:9/v1")
    worker = {w.name: w for w in pool}
    three = Problem("", "", "", "foreign+fact+arithmetic")
    assert possible(three, pool) == 1.0
    team = [worker[name] for name in ("junior calculator", "translator", "junior librarian")]
    assert possible(three, team) == pytest.approx(0.36) and possible(three, team[:2]) == 0
    drawn = [draw_pool(three, pool, 5, random.Random(i)) for i in range(200)]
    assert all(len(d) == 5 and [w.letter for w in d] == sorted(w.letter for w in d) and possible(three, d) > 0 for d in drawn)
    assert len({"".join(w.letter for w in d) for d in drawn}) > 20
    with pytest.raises(ValueError, match="no 2 of calculator"):
        draw_pool(three, pool, 2, random.Random(0))
    assert set(evaluation.NEEDS) == set(KINDS)


def test_average_by_hand(tmp_path):
    """Mean and 95 % interval over files: 2.776 standard errors of five."""
    for i, x in enumerate((0.5, 0.6, 0.7, 0.8, 0.9)):
        (tmp_path / f"{i}.json").write_text(json.dumps({"Conductor": {"all": x, "calls": 2}}))
    lines = average([str(tmp_path / f"{i}.json") for i in range(5)]).splitlines()
    assert [line.split()[:5] for line in lines] == [["Conductor", "all", "0.700", "±", "0.196"], ["Conductor", "calls", "2.000", "±", "0.000"]]


def test_votes_by_hand():
    """majority: the answer in tags or boxes that is given most often, the first where several are. central: most words in common."""
    assert majority(["It is 4.", "<answer>5</answer>", "Hence \\boxed{5}", "<answer>4</answer>"]) == 1
    assert majority(["a", "b"]) == 0 and majority(["a", "b", "B"]) == 1
    assert central(["a b c d", "x y", "a b c e", "a b"]) == 0 and central(["one"]) == 0 and central(["", ""]) == 0


def test_a_poll_asks_all_and_puts_the_chosen_response_last(pool):
    problem = Problem("", "What is 7 * 8?", "56", "arithmetic")
    trace = poll(pool[:3], problem, lambda responses: 0)
    assert trace.answer == "56" and trace.calls == 3 and trace.workers == ["translator", "librarian", "calculator"] and not trace.error
    assert all(len(r.text) > 10 for r in trace.replies[:2]) and trace.tokens > 10
    down = Worker("openai", "http://127.0.0.1:9/v1", "m", name="gone", attempts=1)
    lost = poll([pool[0], down], problem, lambda responses: 1 / 0)
    assert lost.error.startswith("gone: ") and lost.answer == "" and lost.calls == 1  # what was paid for is counted


def test_the_router_learns_who_is_right_alone(pool):
    """On other problems it finds the one worker whose trade it is, by the words of the question."""
    kinds = dict(zip(SIMPLE, (CALCULATOR, LIBRARIAN, CODER, TRANSLATOR)))
    lessons, problems = ([p for p in load("laptop", split) if p.kind in kinds][:n] for split, n in (("train", 160), ("test", 80)))
    route = router(pool, lessons, [[alone(w, p) for p in lessons] for w in pool])
    assert sum(route(p.question) is pool[kinds[p.kind]] for p in problems) > 72


class Sees(Worker):
    """A worker without a network: says what it was shown."""
    def chat(self, messages, nonce=None, **overrides):
        text = json.dumps([self.name, messages])
        self.asked.append((self.name, messages, nonce, {**self.params, **overrides}))
        return Reply(text, 10, 5, 0.01, 0.5)


def test_what_each_system_asks():
    """Workers alone, five turns, five votes, five times the tokens, everyone and an aggregator: who is asked what, and shown what."""
    Sees.asked = []
    pool = [Sees("openai", "http://127.0.0.1:9/v1", name, params={"max_tokens": 100}) for name in "abc"]
    problems, s = [Problem("p", "Why?", "", "k")], evaluation.Settings()

    def asked(name, who=""):
        Sees.asked = []
        [trace] = evaluation.run(name, who, problems, [pool], s, 0)
        assert trace.error is None and trace.calls == len(Sees.asked) and trace.cost == pytest.approx(0.01 * trace.calls)
        assert len({nonce for *_, nonce, _ in Sees.asked}) == len(Sees.asked)  # a replay file tells them apart
        return Sees.asked

    bare = [{"role": "user", "content": "Why?"}]
    assert [(w, m) for w, m, *_ in asked("workers", "b")] == [("b", bare)]
    assert [(w, m, p) for w, m, _, p in asked("context", "b")] == [("b", bare, {"max_tokens": 500})] and pool[1].params == {"max_tokens": 100}
    assert [(w, m) for w, m, *_ in asked("consensus", "c")] == [("c", bare)] * 5
    assert [(w, m) for w, m, *_ in asked("smoothie")] == [(w, bare) for w in "abc"]
    reflect = asked("reflect", "c")
    assert [(w, len(m)) for w, m, *_ in reflect] == [("c", 2 * i + 1) for i in range(5)] and evaluation.REFLECT in reflect[4][1][-1]["content"]
    *proposers, (_, shown, *_) = asked("moa")
    assert sorted(w for w, *_ in proposers) == [*"abc"] and all(len(m) == 1 for _, m, *_ in proposers) and len(shown) == 7
    lessons = set()
    for repeat in range(2):
        Sees.asked = []
        evaluation.run("router", "", problems, [pool], s, repeat)
        assert len(Sees.asked) == 3 * 256 + 1
        lessons |= {(w, nonce) for w, *_, nonce, _ in Sees.asked}
    assert len(lessons) == 2 * (3 * 256 + 1)

    def down(*args, **more):
        raise WorkerError("down")
    pool[1].chat = down
    assert [t.error for t in evaluation.run("seat", "b", problems, [pool], s, 0)] == ["down"]  # lost, not wrong


def test_every_call_of_a_conductor_has_its_own_name(monkeypatch):
    """Problems, rounds and steps: with a replay file each is kept apart."""
    Sees.asked, text = [], Workflow([Step(0, "Do.", []), Step(0, "Check.", [0])]).text()
    problems = [Problem(str(i), "Why?", "", "k") for i in range(3)]
    conduct(monkeypatch, lambda question: text, problems, [Sees("openai", "http://127.0.0.1:9/v1", "a")], rounds=1, nonce="run")
    assert len({nonce for *_, nonce, _ in Sees.asked}) == len(Sees.asked) == 3 * 2 * 2


def test_a_trace_is_graded_once(monkeypatch):
    """However many tables ask; as programs take minutes, side by side."""
    together, asked = threading.Barrier(2), []
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(evaluation, "grade", lambda p, answer: asked.append(answer) or together.wait(60) >= 0 and answer == p.answer)
    problems = [Problem(str(i), "?", "yes", "k") for i in range(3)]
    traces = [Trace("?", Workflow([Step(0, "", [])]), ["w"], [Reply(text, 1, 1, 0.0, 0.0)]) for text in ("yes", "no")] + [None]
    table(problems, {"some": traces})
    assert costs(problems, {"some": [traces]})[1]["some"]["accuracy"] == pytest.approx(100 / 3)
    assert sorted(asked) == ["no", "yes"]


def test_costs_by_hand():
    """Two repeats of two problems: standard error, calls, tokens, cents, points a cent; unknown stays unknown."""
    problems = [Problem("1", "?", "yes", "k"), Problem("2", "?", "no", "k")]

    def one(text, cost=0.01, n=1):
        return Trace("?", Workflow([Step(0, "", [])] * n), ["w"] * n, [Reply(text, 30, 10, cost, 1.0)] * n)

    text, numbers = costs(problems, {"some": [[one("yes"), one("no")], [one("yes", n=3), None]], "free": [[one("yes", None), one("yes", 0.0)]]})
    assert numbers["some"] == {"accuracy": 75.0, "error": 25.0, "calls": 5 / 4, "steps": 5 / 4, "tokens": 50.0, "cents": 1.25,
                               "points_per_cent": 60.0, "lost": 0, "k": 75.0}
    assert (numbers["free"]["cents"], numbers["free"]["points_per_cent"], numbers["free"]["error"]) == (None, None, None)
    text2, lost = costs(problems, {"down": [[Trace("?", Workflow([]), [], [], error="down")] * 2], "half": [[one("yes"), one("x")], [Trace(
        "?", Workflow([]), [], [], error="down")] * 2]})
    assert lost["down"]["accuracy"] is None and lost["half"]["accuracy"] == 50.0 and text2.count("   2 not counted: down") == 2
    assert lost["half"]["lost"] == 2 and lost["half"]["tokens"] == 40 and lost["half"]["cents"] == 1.0  # of the two that were answered
    assert [line.split() for line in text.splitlines()][1:] == [["some", "75.00", "25.00", "1.25", "1.25", "50", "1.2500", "60.0"],
                                                               ["free", "50.00", "?", "1.00", "1.00", "40", "?", "?"]]


def test_an_evaluation_started_again_pays_for_nothing(tmp_path, capsys):
    """--replay: the second run asks no worker, and ends with the same numbers."""
    server = workers.Server(("127.0.0.1", 0), Tap)
    server.bodies = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    (tmp_path / "pool.json").write_text(json.dumps([{"protocol": "openai", "base_url": url, "model": m} for m in workers.LOCAL["local"]]))
    argv = [f"--pool={tmp_path}/pool.json", f"--replay={tmp_path}/replay", "--test=8", "--systems=workers,best-single,random,moa,reflect:coder,seat:coder",
            "--repeats=2"]
    evaluation.main([*argv, f"--out={tmp_path}/1.json"])
    asked = len(server.bodies)
    evaluation.main([*argv, f"--out={tmp_path}/2.json"])
    server.shutdown()
    server.server_close()
    assert len(server.bodies) == asked > 8 * 2 * (5 + 1 + 6 + 5 + 3) * 0.8
    one, two = (json.loads((tmp_path / f"{i}.json").read_text()) for i in (1, 2))
    assert one == two and one["laptop, calculator"]["accuracy"] == 100 / 8 and one["laptop, moa"]["calls"] == 6.0
    assert "points/cent" in capsys.readouterr().out


def test_a_worker_alone(pool):
    """One turn, the bare question; a worker that is lost is an error of its trace and no answer."""
    problem = Problem("", "What is 7 * 8?", "56", "arithmetic")
    trace = alone(pool[CALCULATOR], problem)
    assert (trace.answer, trace.calls, trace.error, trace.workers) == ("56", 1, None, ["calculator"])
    down = alone(Worker("openai", "http://127.0.0.1:9/v1", "m", name="gone", attempts=1), problem)
    assert down.error.startswith("gone: ") and (down.answer, down.calls) == ("", 0)


def trace(answer=None, error=None, who=("calculator",), access=((),), question="Q?", said=None):
    """A made-up trace; without an answer it is lost."""
    steps = [Step(0, f"Task {i}.", [*a]) for i, a in enumerate(access)]
    replies = [Reply(said or answer, 1, 1, 0.0, 0.1) for _ in who[1:]] + [Reply(answer, 1, 1, 0.0, 0.1) if not error else None]
    return Trace(question, Workflow(steps), [*who], replies, error=error)


def test_accuracies():
    """By hand: what does not parse is wrong; what was lost is in neither count; a kind that was lost wholly has no accuracy."""
    problems = [Problem("", "Q?", "1", kind) for kind in "aaaabbc"]
    traces = [trace("1"), trace("2"), None, trace(error="down"), trace("1"), trace("1"), trace(error="down")]
    assert accuracies(problems, traces) == {"all": 3 / 5, "a": 1 / 3, "b": 1.0}
    assert accuracies(problems[:1], [trace(error="down")]) == {}


def rows(text):
    """A table's lines as {name: numbers}, and its header's kinds."""
    head, *lines = text.splitlines()
    return head.split("calls")[1].split(), {re.split(r"\s{2,}", line)[0]: line[24:].split() for line in lines}


def test_table():
    """A row for each system: accuracy over all, mean calls, accuracy by kind, under the right heads."""
    problems = [Problem("", "Q?", "1", kind) for kind in ("arithmetic", "arithmetic", "fact", "fact")]
    two, wrong = trace("1", who=("a", "b"), access=((), (0,))), trace("2")
    kinds, lines = rows(table(problems, {"Conductor": [two, two, two, None], "some worker": [wrong, trace("1"), wrong, wrong]}))
    assert kinds == ["arithmetic", "fact"]
    assert lines == {"Conductor": ["0.750", "1.50", "1.00", "0.50"], "some worker": ["0.250", "1.00", "0.50", "0.00"]}


def test_a_system_that_was_lost_is_not_shown_as_wrong():
    """A worker that failed on all problems has no accuracy: a 0 would be a claim about what it can do."""
    problems = [Problem("", "Q?", "1", kind) for kind in "ab"]
    _, lines = rows(table(problems, {"down": [trace(error="down")] * 2, "half": [trace("1"), trace(error="down")]}))
    assert lines["half"][:3] == ["1.000", "1.00", "1.00"]
    for cell in [*lines["down"][:1], *lines["down"][2:], lines["half"][3]]:
        assert not re.fullmatch(r"[\d.]+", cell), lines


def test_learned():
    """For each kind the commonest shape, how often it was written, and one example with what every step saw and said."""
    problems = [Problem("", "Q?", "1", kind) for kind in ("one", "one", "one", "two", "two", "none")]
    pair = trace("1", who=("librarian", "coder", "coder"), access=((), (0,), (0, 1)), question="Which?", said="hm")
    text = learned(problems, [trace("1"), trace("2"), trace("3", who=("coder",)), pair, None, None])
    first, second = text.split("\ntwo: ")
    assert first.startswith("one: 1 step, ") and "67%" in first and "coder" not in first
    assert "calculator, told 'Task 0.': 1" in first
    head, *steps = second.splitlines()
    assert head.startswith("3 steps") and "Which?" in head
    assert [s.strip() for s in steps] == ["librarian, told 'Task 0.': hm", "coder, told 'Task 1.', seeing step 1: hm",
                                         "coder, told 'Task 2.', seeing steps 1 and 2: 1"]
    assert "none:" not in text


# ---------------------------------------------------------------------------------------------------------------------------------
# The command line (with a checkpoint: test_train.py)


@pytest.mark.parametrize("words, reason", [
    (["--chekpoint=x"], "--checkpoint"), (["--test=many"], "--test=many"), (["--systems=oracle"], "there are conductor"),
    (["--systems=best-single,workers"], "workers,best-single"),
    (["--systems=seat:poet"], "the pool has calculator"), (["--one_worker=poet"], "the pool has calculator"), (["--repeats=0"], "from 1 on"),
    (["--rounds=-1"], "from 0 on"), (["average", __file__, __file__], "JSON|Expecting"), (["--systems=router", "--benchmarks={dir}/one.jsonl"], "train split"),
    (["--subset=3"], "--systems=conductor"), (["--systems=conductor", "--subset=3", "--benchmarks=mmlu"], "--benchmarks=laptop"), (["--checkpoint={dir}/none"], "{dir}/none"),
    (["--benchmarks=laptot"], "laptop"), (["plot", "{dir}/none"], "{dir}/none"),
    (["--out={dir}"], "{dir}: a folder"), (["--out={dir}/one.jsonl/x.json"], "one.jsonl"), (["--pool={dir}/pool.json"], "random"),
    (["draw"], r"python eval\.py"), (["plot"], r"python eval\.py")])
def test_command_line_refuses(words, reason, tmp_path):
    """A wrong flag, value, word or folder ends the program with one message that names it."""
    (tmp_path / "one.jsonl").write_text('{"question": "1+1?", "answer": "2", "kind": "sums"}')
    (tmp_path / "pool.json").write_text('[{"protocol": "openai", "base_url": "http://127.0.0.1:9", "model": "m", "name": "random"}]')
    with pytest.raises(SystemExit, match=reason.format(dir=tmp_path)):
        evaluation.main([w.format(dir=tmp_path) for w in words])


@pytest.mark.parametrize("system", ["workers", "reflect"])
def test_ctrl_c_ends_it_at_once(tmp_path, system):
    """Neither what is asked nor what is queued is waited for."""
    asked, go_on = threading.Event(), threading.Event()

    class Slow(workers.Handler):
        def do_POST(self):
            asked.set()
            go_on.wait(60)

    server = workers.Server(("127.0.0.1", 0), Slow)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    (tmp_path / "pool.json").write_text(json.dumps([{"protocol": "openai", "base_url": f"http://127.0.0.1:{server.server_address[1]}", "model": "m"}]))
    process = subprocess.Popen([sys.executable, "eval.py", f"--pool={tmp_path}/pool.json", f"--systems={system}", "--test=100"],
                               cwd=os.path.dirname(evaluation.__file__), stderr=subprocess.PIPE, text=True)
    try:
        assert asked.wait(60)
        for _ in range(10):  # Python can miss one that comes just before it waits for a lock
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)  # the worker's timeout is 120 s
                break
        assert process.returncode == 1 and process.stderr.read().strip().endswith("interrupted")
    finally:
        process.kill()
        go_on.set()
        server.shutdown()
        server.server_close()


def test_plot(tmp_path, monkeypatch):
    """A picture of a run if matplotlib is there, else a message that names it."""
    lines = [{"iteration": i, "accuracy": i / 30, "by_kind": {"a": i / 30} | ({"b": 0.5} if i % 2 else {}), "workers": {"w": 1.0},
              "steps_by_kind": {"a": 2.0}} for i in range(30)]
    (tmp_path / "test.json").write_text(json.dumps({"Conductor": {"all": 1.0}, "w": {"all": 0.25}}))
    row = {"accuracy": 50.0, "error": None, "cents": None, "tokens": 30.0}
    (tmp_path / "numbers.json").write_text(json.dumps({"w": row, "v": {**row, "error": 2.0}, "second rounds": {"kept_right": 1.0}}))
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    with monkeypatch.context() as m:
        m.setitem(sys.modules, "matplotlib", None)
        with pytest.raises(SystemExit, match="matplotlib"):
            evaluation.main(["plot", str(tmp_path)])
    pytest.importorskip("matplotlib")
    evaluation.main(["plot", str(tmp_path)])
    evaluation.main(["plot", str(tmp_path / "numbers.json")])
    assert all(os.path.getsize(tmp_path / name) > 5000 for name in ("curve.png", "numbers.png"))


# ---------------------------------------------------------------------------------------------------------------------------------
# Benchmarks, against a local server that answers as the documentation of the hub and of its dataset viewer says


class Hub:
    """The hub (0) and its CDN (1). `rows`: (data set, config, split) -> rows, served as /rows does; `files`: path below /resolve/main/ ->
    bytes, redirected to the CDN with their sha256 as files in LFS are. `seen`: (server, path, Range, Authorization) of each request.
    `faults`: of the next answers (status, headers, bytes after which the body ends or None); None: no fault. `gated`: data sets for which
    the token must be hf_secret."""

    def __init__(self):
        self.rows, self.files, self.seen, self.faults, self.gated, self.lie = {}, {}, [], [], set(), {}
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                server, url = hub.servers.index(self.server), urlsplit(self.path)
                hub.seen.append((server, self.path, self.headers["Range"], self.headers["Authorization"]))
                status, headers, self.cut = (hub.faults.pop(0) if hub.faults else None) or (0, {}, None)
                if status:
                    return self.answer(status, headers, b'{"error": "as told"}')
                if url.path == "/rows":
                    return self.answer(*hub.page({key: value for key, (value,) in parse_qs(url.query).items()}, self.headers))
                body = hub.files.get(url.path.removeprefix("/cdn"))
                if body is None:
                    return self.answer(404, {"X-Error-Code": "EntryNotFound"})
                if server == 0:
                    told = {"X-Linked-Size": str(len(body)), "X-Linked-Etag": f'"{hashlib.sha256(body).hexdigest()}"', **hub.lie}
                    return self.answer(302, {"Location": f"{hub.url(1)}/cdn{url.path}", **told})
                start = int((self.headers["Range"] or "bytes=0-")[6:-1])
                self.answer(206 if start else 200, {}, body[start:])

            def answer(self, status, headers, body=b""):
                self.send_response(status)
                for name, value in {**headers, "Content-Length": len(body)}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body[:self.cut])
                self.close_connection = self.cut is not None

            def log_message(self, *args):
                pass

        self.servers = [ThreadingHTTPServer(("127.0.0.1", 0), Handler) for _ in range(2)]
        for server in self.servers:
            threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def url(self, i):
        return f"http://127.0.0.1:{self.servers[i].server_port}"

    def page(self, asked, headers):
        """huggingface.co/docs/dataset-viewer/rows; the errors are those of its openapi.json."""
        if asked["dataset"] in self.gated and headers["Authorization"] != "Bearer hf_secret":
            return 401, {"X-Error-Code": "ExternalUnauthenticatedError"}, json.dumps({"error":
                "The dataset does not exist, or is not accessible without authentication (private or gated)."}).encode()
        rows, start, n = self.rows.get((asked["dataset"], asked["config"], asked["split"])), int(asked["offset"]), int(asked["length"])
        if rows is None:
            return 404, {"X-Error-Code": "ResponseNotFound"}, b'{"error": "Not found."}'
        if n > 100:
            return 422, {}, b'{"error": "Parameter \'length\' must not be greater than 100"}'
        page = [{"row_idx": start + i, "row": row, "truncated_cells": []} for i, row in enumerate(rows[start:start + n])]
        features = [{"feature_idx": i, "name": name, "type": {"dtype": "string", "_type": "Value"}} for i, name in enumerate(rows[0])]
        return 200, {}, json.dumps({"features": features, "rows": page, "num_rows_total": len(rows), "num_rows_per_page": 100,
                                    "partial": False}).encode()

    def offsets(self):
        return [int(parse_qs(urlsplit(path).query)["offset"][0]) for _, path, _, _ in self.seen]


def packed(tests, text=None):
    """LiveCodeBench's hidden tests as they are published."""
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(tests) if text is None else text))).decode()


def lcb(i, difficulty="hard", starter="", function=None, id="abc300_{}", content="Add the two numbers of line {}."):
    kind = "functional" if starter else "stdin"
    return {"question_title": "Sum", "question_content": content.format(i), "platform": "atcoder", "question_id": id.format(i),
            "contest_id": "abc300", "contest_date": "2023-05-20T00:00:00", "starter_code": starter, "difficulty": difficulty,
            "metadata": json.dumps({"func_name": function} if function else {}),
            "public_test_cases": json.dumps([{"input": f"1 {i}\n", "output": str(1 + i), "testtype": kind}]),
            "private_test_cases": packed([{"input": f"2 {i}\n", "output": str(2 + i), "testtype": kind}])}


ROWS = {  # as the data sets have them
    ("DigitalLearningGmbH/MATH-lighteval", "default", "train"): [
        {"problem": f"What is $1/{i}$?", "level": f"Level {i % 5 + 1}" if i % 50 else "Level ?", "type": "Algebra",
         "solution": f"It is \\boxed{{0}}, no, \\boxed{{\\frac{{1}}{{{i}}}}}."} for i in range(1, 301)],
    ("HuggingFaceH4/MATH-500", "default", "test"): [
        {"problem": f"What is $1/{i}$?", "solution": "", "answer": f"\\frac{{1}}{{{i}}}", "subject": "Algebra", "level": 4,
         "unique_id": f"test/algebra/{i}.json"} for i in range(298, 304)],
    ("cais/mmlu", "all", "validation"): [
        {"question": f"Which is {i}?", "subject": "anatomy", "choices": [str(i + k) for k in range(4)], "answer": 0} for i in range(250)],
    ("cais/mmlu", "all", "test"): [
        {"question": "All of the above?\n", "subject": "anatomy", "choices": ["x", "y", "z", f"{i}"], "answer": i % 4} for i in range(8)],
    ("openbmb/RLPR-Train-Dataset", "default", "train"): [
        {"data_source": "WebInstruct-verified", "ability": "Business", "reward_model": {"ground_truth": f"{i}%", "style": "rule"},
         "prompt": [{"role": "system", "content": "Think."}, {"role": "user", "content": f"What costs {i}?"}],
         "extra_info": {"answer_type": "Percentage", "category": "Business", "difficulty": "University",
                        "reasoning_score": None if i % 3 == 0 else i % 3 + 2}} for i in range(350)],
    ("yentinglin/aime_2025", "default", "train"): [
        {"id": i, "problem": f"Find the sum of the digits of {i}.", "answer": f"{i}", "solution": ""} for i in range(30)],
    ("bigcode/bigcodebench-hard", "default", "v0.1.4"): [
        {"task_id": f"BigCodeBench/{13 + i}", "complete_prompt": 'import os\n\ndef task_func():\n    """Say 7."""\n', "instruct_prompt": "",
         "canonical_solution": "    return 7", "code_prompt": "import os\ndef task_func():\n", "test": "import unittest\n...",
         "entry_point": "task_func", "libs": "['os']"} for i in range(148)],
    ("Idavidrein/gpqa", "gpqa_diamond", "train"): [
        {"Question": f"Which spin has {i}?", "Correct Answer": f"right {i}\n", "Record ID": f"rec{i}",
         **{f"Incorrect Answer {k}": f"wrong {k}" for k in (1, 2, 3)}} for i in range(198)],
}
METHOD = "class Solution:\n    def add(self, a: int, b: int) -> int:\n        "
V1 = [lcb(i, ("easy", "medium", "hard")[i % 3]) for i in range(250)]
V6 = [lcb(0), lcb(1, "easy", METHOD, "add", "3{}", "Add two numbers.")]


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub with small data sets, an empty current directory, and waits that are only noted."""
    hub = Hub()
    hub.rows.update(ROWS)
    lines = {"test.jsonl": V1, "test6.jsonl": V6}
    hub.files.update({f"/datasets/livecodebench/code_generation_lite/resolve/main/{name}":
                      b"".join(json.dumps(row).encode() + b"\n" for row in rows) for name, rows in lines.items()})
    hub.gated.add("Idavidrein/gpqa")
    for name, (repository, what, _, size) in list(evaluation.SOURCES.items()):
        rows = ROWS[repository, *what.split("/")] if "/" in what else lines[what]
        monkeypatch.setitem(evaluation.SOURCES, name, (repository, what, len(rows), size))
    monkeypatch.setattr(evaluation, "RLPR_TEST", 70)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_ENDPOINT", hub.url(0) + "/")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    hub.waits = []
    monkeypatch.setattr(urllib3.util.retry, "time", SimpleNamespace(sleep=hub.waits.append, time=time.time))
    stored_tests.cache_clear()
    yield hub
    for server in hub.servers:
        server.shutdown()
        server.server_close()


def by_id(name, split="test"):
    found = load(name, split)
    assert len({p.id for p in found}) == len(found) and {p.kind for p in found} == {name}
    return {p.id: p for p in found}


def test_mathematics_comes_as_problems_that_ask_for_a_box(hub):
    found = by_id("math500", "train")
    assert len(found) == 300 and found["math500/6"] == Problem(
        "math500/6", "What is $1/7$?\n\nPut the final answer in \\boxed{}.", "\\frac{1}{7}", "math500", "math", 3)
    assert found["math500/49"].level == 0  # "Level ?"
    assert [(p.answer, p.level) for p in by_id("math500").values()].count(("\\frac{1}{299}", 4)) == 1
    assert by_id("aime25")["aime25/12"] == Problem(
        "aime25/12", "Find the sum of the digits of 12.\n\nPut the final answer in \\boxed{}.", "12", "aime25", "math")


def test_choices_stand_in_the_question_with_letters(hub):
    found = by_id("mmlu")
    assert found["mmlu/6"] == Problem(
        "mmlu/6", "All of the above?\n\nA. x\nB. y\nC. z\nD. 6\n\nPut the letter of the right option in <answer> tags.",
        "C", "mmlu", "letter", 0, {"choices": ["x", "y", "z", "6"]})
    assert len(by_id("mmlu", "train")) == 250


def test_gpqa_is_shuffled_by_a_fixed_seed(hub):
    """The letter follows the right option, all letters occur about equally often, and a second run gives the same."""
    first = by_id("gpqa")
    letters = []
    for p in first.values():
        right = p.extra["choices"].index(f"right {p.id.split('/')[1]}")
        assert p.answer == "ABCD"[right] and f"\n{p.answer}. right" in p.question
        assert sorted(p.extra["choices"])[1:] == ["wrong 1", "wrong 2", "wrong 3"]
        letters.append(p.answer)
    assert len(first) == 198 and all(30 < letters.count(letter) < 70 for letter in "ABCD")
    os.remove("data/gpqa-test.jsonl")
    os.remove("data/gpqa-test.jsonl.sha256")
    assert by_id("gpqa") == first


def test_rlpr_has_one_split_for_all(hub):
    """Train and test are disjoint, together all, and do not depend on the order of the rows, which are fetched once."""
    train, test = load("rlpr", "train"), load("rlpr", "test")
    assert len(hub.seen) == 4 and len(test) == 70 and len(train) == 280
    ask = "Put the final answer, as short as possible, in <answer> tags."
    assert {p.question for p in train + test} == {f"What costs {i}?\n\n{ask}" for i in range(350)}
    p = next(p for p in train + test if "costs 4?" in p.question)
    assert (p.answer, p.grader, p.level) == ("4%", "short", 3) and {q.level for q in train} == {0, 3, 4}
    hub.rows["openbmb/RLPR-Train-Dataset", "default", "train"] = ROWS["openbmb/RLPR-Train-Dataset", "default", "train"][::-1]
    for name in os.listdir("data"):
        os.path.isfile(f"data/{name}") and os.remove(f"data/{name}")
    os.remove("data/openbmb/RLPR-Train-Dataset/default-train.jsonl")
    assert {p.question for p in load("rlpr", "test")} == {p.question for p in test}


def test_bigcodebench_has_what_its_unit_tests_need(hub):
    p = by_id("bigcodebench")["bigcodebench/BigCodeBench/13"]
    row = ROWS["bigcode/bigcodebench-hard", "default", "v0.1.4"][0]
    assert (p.grader, p.extra) == ("unittest", {"test": row["test"], "entry_point": "task_func", "code_prompt": row["code_prompt"]})
    assert p.question == f"```python\n{row['complete_prompt'].strip()}\n```\n\n{ASK['unittest']}" and "```python block" in p.question


def test_livecodebench_keeps_its_hidden_tests_in_the_file(hub):
    """V1 to train, V6 to test; a program reads standard input, a function has its name; the tests are public and hidden ones."""
    assert len(by_id("livecodebench", "train")) == 250
    found = by_id("livecodebench")
    program, method = found["livecodebench/abc300_0"], found["livecodebench/31"]
    assert program.grader == method.grader == "code" and (program.level, method.level) == (3, 1)
    assert program.question == f"Add the two numbers of line 0.\n\n{ASK['code']}" and "standard input" in ASK["code"]
    assert method.question == f"Add two numbers.\n\n```python\n{METHOD.strip()}\n```\n\n{ASK['unittest']}"
    assert (program.extra["function"], method.extra["function"]) == (None, "add")
    assert stored_tests(program.id, **program.extra["tests"]) == [["1 0\n", "1"], ["2 0\n", "2"]]
    assert stored_tests(method.id, **method.extra["tests"]) == [["1 1\n", "2"], ["2 1\n", "3"]]
    assert os.path.getsize("data/livecodebench-test.jsonl") < 3000 and "2 0" not in open("data/livecodebench-test.jsonl").read()


def test_hidden_tests_of_another_problem_are_not_taken(hub):
    p = by_id("livecodebench")["livecodebench/abc300_0"]
    file = p.extra["tests"]["file"]
    with open(file, "rb") as f:
        lines = f.readlines()
    with open(file, "wb") as f:
        f.writelines(lines[::-1])
    with pytest.raises(ValueError, match="byte 0: no tests of livecodebench/abc300_0 .*there stands 31"):
        stored_tests(p.id, **p.extra["tests"])


def test_tests_that_are_plain_json_are_read_too(tmp_path):
    file = tmp_path / "plain.jsonl"
    file.write_text(json.dumps({**lcb(5), "private_test_cases": '[{"input": "a", "output": "b", "testtype": "stdin"}]'}) + "\n")
    assert stored_tests("livecodebench/abc300_5", str(file), 0)[1] == ["a", "b"]


class Runs:
    def __reduce__(self):
        return os.mkdir, ("ran",)


@pytest.mark.parametrize("wrapped", [Runs(), [Runs()], ["text"], b"bytes", 7, None, {"a": "b"}, ("text",), ["a", "b"]])
def test_a_pickle_of_anything_but_a_string_is_refused_and_never_runs(wrapped, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        with pytest.raises(ValueError, match="a pickle of .*, not of one string"):
            unpack(base64.b64encode(zlib.compress(pickle.dumps(wrapped, protocol))).decode())
    assert not os.listdir()
    pickle.loads(pickle.dumps(wrapped))
    assert os.listdir() == (["ran"] if wrapped.__class__ is Runs or wrapped.__class__ is list and isinstance(wrapped[0], Runs) else [])


@pytest.mark.parametrize("payload", [b"", b".", b"\x80\x04N.", b"\x80\x04X\xff\xff\xff\xffa.", b"\x80\x04\x8c\x01a",
                                     b"cos\nmkdir\n(S'ran'\ntR.", b"\xff" * 9,
                                     b"\x80\x04\x8c\x01a" + b"\x94" * 99 + b"0N.",
                                     b"\x80\x04\x8c\x01ar\xff\xff\xff\x7fr\xff\xff\xff\x7f0" + b"N" * 99 + b"."])
def test_a_crafted_pickle_is_refused_and_never_runs(payload, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError):
        unpack(base64.b64encode(zlib.compress(payload)).decode())
    assert not os.listdir()


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("text", ["", "a", "ä" * 200, "x" * 100_000])
def test_a_string_comes_out_of_every_protocol(protocol, text):
    assert unpack(base64.b64encode(zlib.compress(pickle.dumps(text, protocol))).decode()) == text


def test_what_unpacks_beyond_the_bound_or_is_cut_off_is_refused(monkeypatch):
    monkeypatch.setattr(evaluation, "TESTS_MAX", 1 << 16)
    assert unpack(packed(None, "x" * 60_000)) == "x" * 60_000
    bomb = packed(None, "x" * 10_000_000)
    assert len(bomb) < 20_000
    for text in (bomb, packed(None, "whole")[:-8]):
        with pytest.raises(ValueError, match="cut off, or more than 65,536 bytes"):
            unpack(text)


@pytest.mark.parametrize("hidden", ["!", "AAAA", packed(None, "no json"), packed(None, "[" * 100_000), packed({"input": 1}),
                                    packed([["a", "b"]]), None])
def test_damaged_hidden_tests_are_an_error_that_says_where(hidden, tmp_path):
    file = tmp_path / "damaged.jsonl"
    file.write_text(json.dumps({**lcb(5), "private_test_cases": hidden}) + "\n")
    with pytest.raises(ValueError, match=r"damaged.jsonl, byte 0: no tests of livecodebench/abc300_5 \("):
        stored_tests("livecodebench/abc300_5", str(file), 0)


def test_pages_of_a_hundred_are_asked_for_once(hub):
    load("math500", "train")
    assert hub.offsets() == [0, 100, 200] and "length=100" in hub.seen[0][1] and not hub.waits
    load("math500", "train")
    assert len(hub.seen) == 3
    load("mmlu", "train")
    assert hub.offsets()[3:] == [0, 100, 200] and "length=50" in hub.seen[-1][1]


def test_limits_and_server_errors_are_waited_for(hub):
    """Retry-After is obeyed, 5xx are tried again with growing waits, and nothing is asked twice after all."""
    told = [(429, "0"), None, (429, "7"), (500, ""), (429, ""), (502, ""), (503, "")]
    hub.faults = [t and (t[0], {"Retry-After": t[1]} if t[1] else {"RateLimit": '"api";r=0;t=55'}, None) for t in told]
    assert len(load("math500", "train")) == 300
    assert hub.offsets() == [0, 0, 100, 100, 100, 100, 100, 100, 200]
    assert hub.waits[0] == 7 and hub.waits[1:] == sorted(hub.waits[1:]) and len(hub.waits) == 5


def test_a_server_that_stays_down_ends_the_patience_after_five_minutes(hub):
    hub.faults = [None] + [(500, {"X-Error-Code": "UnexpectedApiError"}, None)] * 99
    with pytest.raises(OSError, match="lacks rows of https://huggingface.co/datasets/DigitalLearningGmbH/MATH-lighteval"):
        load("math500", "train")
    assert 300 < sum(hub.waits) < 600
    hub.faults, before = [], len(hub.seen)
    assert len(load("math500", "train")) == 300 and hub.offsets()[before:] == [100, 200]


def test_a_torn_page_is_not_kept_and_the_next_run_goes_on(hub):
    hub.faults = [None, (0, {}, 2000)]
    with pytest.raises(OSError, match="Try again to go on where it stopped"):
        load("math500", "train")
    assert not os.path.exists("data/math500-train.jsonl")
    with open("data/DigitalLearningGmbH/MATH-lighteval/default-train.jsonl", "a") as f:
        f.write('{"problem": "killed while wri')
    seen = len(hub.seen)
    assert len({p.question for p in load("math500", "train")}) == 300 and hub.offsets()[seen:] == [100, 200]


@pytest.mark.parametrize("change", [
    lambda page: page.update(num_rows_total=301), lambda page: page["rows"].pop(), lambda page: page["rows"][7].update(row_idx=8),
    lambda page: page["rows"][7]["truncated_cells"].append("problem"), lambda page: page.pop("rows"), lambda page: page.update(rows=7)])
def test_pages_that_are_not_what_was_asked_for_are_not_taken(hub, change, monkeypatch):
    page = hub.page

    def changed(asked, headers):
        status, told, body = page(asked, headers)
        body = json.loads(body)
        change(body)
        return status, told, json.dumps(body).encode()
    monkeypatch.setattr(hub, "page", changed)
    with pytest.raises(OSError, match="lacks rows of .*MATH-lighteval"):
        load("math500", "train")
    assert os.path.getsize("data/DigitalLearningGmbH/MATH-lighteval/default-train.jsonl") == 0


def test_a_large_file_resumes_and_must_have_the_sha256_that_the_hub_told(hub, monkeypatch):
    monkeypatch.setattr(model_file, "time", SimpleNamespace(sleep=hub.waits.append))
    hub.faults = [None, (0, {}, 100_000)]  # the redirect, then the CDN's body
    assert len(load("livecodebench", "train")) == 250
    assert [r for server, _, r, _ in hub.seen if server == 1] == [None, "bytes=65535-"] and hub.waits == [2]
    hub.lie = {"X-Linked-Etag": f'"{"0" * 64}"'}
    with pytest.raises(OSError, match="another size or sha256"):
        load("livecodebench", "test")
    hub.lie = {}
    assert len(load("livecodebench", "test")) == 2


def test_the_token_goes_to_the_hub_alone(hub):
    load("livecodebench", "test")
    load("gpqa", "test")
    assert {(server, token) for server, _, _, token in hub.seen} == {(0, "Bearer hf_secret"), (1, None)}
    assert "hf_secret" not in "".join(path for _, path, _, _ in hub.seen)
    written = b"".join(open(os.path.join(folder, name), "rb").read() for folder, _, names in os.walk("data") for name in names)
    assert b"right 7" in written and b"hf_secret" not in written


@pytest.mark.parametrize("token", [None, "hf_other", "hf_se\ncret", "hf_sec…ret"])
def test_what_is_gated_says_what_to_do_and_no_token(hub, token, monkeypatch, capfd):
    monkeypatch.setenv("HF_TOKEN", token) if token else monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(OSError) as e:
        load("gpqa", "test")
    told = str(e.value)
    assert "https://huggingface.co/datasets/Idavidrein/gpqa" in told and "accept terms" in told and "HF_TOKEN" in told and "1.4 MB" in told
    assert "data/Idavidrein/gpqa/gpqa_diamond-train.jsonl" in told and "hf_" not in told + "".join(capfd.readouterr())
    assert len(hub.seen) == (token in (None, "hf_other")) and ("401" in told) == (len(hub.seen) == 1)


def test_what_cannot_be_had_can_be_put_there_by_hand(hub):
    """The error names page, place and form; rows that are put there, as JSON lines, are taken without a request."""
    hub.rows.clear()
    hub.files.clear()
    with pytest.raises(OSError) as e:
        load("aime25", "test")
    assert "put there the rows of its config/split default/train as lines of JSON" in str(e.value) and "HTTP 404" in str(e.value)
    os.makedirs("data/yentinglin/aime_2025", exist_ok=True)
    with open("data/yentinglin/aime_2025/default-train.jsonl", "w") as f:
        f.writelines(json.dumps(row) + "\n" for row in ROWS["yentinglin/aime_2025", "default", "train"])
    asked = len(hub.seen)
    assert len(load("aime25", "test")) == 30 and len(hub.seen) == asked
    with pytest.raises(OSError, match="code_generation_lite/resolve/main/test6.jsonl. If"):
        load("livecodebench", "test")


@pytest.mark.parametrize("line", ['{"problem": "?"}', '{"problem": 1, "answer": 2}', "[]", "7", '{"problem": "?", "answer": "1"',
                                  "[" * 100_000])
def test_rows_of_another_form_are_an_error_that_names_file_and_page(hub, line):
    os.makedirs("data/yentinglin/aime_2025")
    with open("data/yentinglin/aime_2025/default-train.jsonl", "w") as f:
        f.write((line + "\n") * 30)
    with pytest.raises(ValueError, match="train.jsonl has not the 30 rows that https://huggingface.co/datasets/yentinglin/aime_2025 had"):
        load("aime25", "test")
    assert not os.path.exists("data/aime25-test.jsonl")


def test_a_damaged_file_is_noticed(hub):
    load("aime25", "test")
    with open("data/aime25-test.jsonl", "r+") as f:
        text = f.read()
        f.seek(text.index('"12"') + 1)
        f.write("13")
    with pytest.raises(ValueError, match="data/aime25-test.jsonl was damaged or edited"):
        load("aime25", "test")
    os.remove("data/aime25-test.jsonl")
    assert {p.answer for p in load("aime25", "test")} == {str(i) for i in range(30)} and len(hub.seen) == 1  # made from the rows


def test_the_sha256_is_as_sha256sum_writes_it(hub):
    load("aime25", "test")
    digest = hashlib.sha256(open("data/aime25-test.jsonl", "rb").read()).hexdigest()
    assert open("data/aime25-test.jsonl.sha256").read() == f"{digest}  aime25-test.jsonl\n"


def test_the_order_is_shuffled_and_fixed(hub):
    first = load("mmlu", "train")
    numbers = [int(p.id.split("/")[1]) for p in first]
    assert first == load("mmlu", "train") and sorted(numbers) == list(range(250)) != numbers
    assert load("mmlu", "train", 5) == first[:5]


def test_what_is_written_is_read(tmp_path):
    problems = [Problem("a/1", "Wie groß?\u2028\n", "ä", "own", "math", 3, {"x": [1, None]}), Problem("b", "", "", "math"),
                Problem("c", "?", "1", "any", "code", 0, {"function": None, "tests": [["1\n", "2\n"]]})]
    file = str(tmp_path / "some.jsonl")
    write_problems(file, problems)
    assert read_problems(file) == problems == load(file, "train") == load(file, "test")


def test_a_users_file_needs_three_fields(tmp_path):
    file = tmp_path / "mine.jsonl"
    file.write_text('{"question": "1+1?", "answer": "2", "kind": "sums"}\n{"question": "2*2?", "answer": "4", "kind": "math", "id": "x"}\n'
                    '{"question": "3?", "answer": "B", "kind": "math", "grader": "letter", "level": 2, "extra": {"choices": ["3", "4"]}}')
    assert load(str(file), "test") == [Problem("mine.jsonl/1", "1+1?", "2", "sums"), Problem("x", "2*2?", "4", "math", "math"),
                                       Problem("mine.jsonl/3", "3?", "B", "math", "letter", 2, {"choices": ["3", "4"]})]


GOOD = {"question": "1+1?", "answer": "2", "kind": "sums"}


@pytest.mark.parametrize("line, told", [
    *((json.dumps({k: v for k, v in GOOD.items() if k != key}), f"{key} missing or not a string") for key in GOOD),
    *((json.dumps({**GOOD, key: wrong}), f"{key} missing or not a string") for key in ("answer", "id", "kind") for wrong in (2, None)),
    ('{"answer": "2"}', "question, kind missing"), (json.dumps({**GOOD, "choises": []}), "choises"),
    (json.dumps({**GOOD, "kind": "letter"}), "letter needs choices in extra"), (json.dumps({**GOOD, "grader": "code"}), "needs function, tests"),
    *((json.dumps({**GOOD, "kind": "letter", "answer": answer, "extra": {"choices": choices}}), told) for answer, choices, told in (
        ("B", [1, 2], "choices .* texts"), ("B", "xyz", "choices .* texts"), ("(b)", ["x", "y"], "'\\(b\\)' is none of the letters A to B"),
        ("C", ["x", "y"], "'C' is none"), ("L", ["x"] * 12, "choices .* texts"), ("AB", ["x", "y"], "'AB' is none"))),
    *((json.dumps({**GOOD, "kind": "code", "extra": {"function": None, "tests": tests}}), "tests .* pairs") for tests in (
        [], [["1"]], [[1, 2]], [{"input": "1", "output": "2"}], "12", 7)),
    (json.dumps({**GOOD, "kind": "letter", "extra": ["choices"]}), "extra is not an object"),
    (json.dumps({**GOOD, "grader": "maths"}), "no grader 'maths'"), (json.dumps({**GOOD, "grader": ["math"]}), "no grader"),
    ("", "Expecting value"), ("[1]", ""), ("7", ""), ("{", ""), ("[" * 100_000, ""), ('{"question": "\xff', "")])
def test_a_users_file_with_a_fault_names_line_and_field(tmp_path, line, told):
    file = tmp_path / "mine.jsonl"
    file.write_bytes(json.dumps(GOOD).encode() + b"\n" + line.encode("latin-1") + b"\n" + json.dumps(GOOD).encode())
    with pytest.raises(ValueError, match=f"mine.jsonl, line 2: .*{told}"):
        load(str(file), "test")


@pytest.mark.parametrize("name, split", [("laptop", "dev"), ("aime25", "train"), ("nothing", "test"), ("", "train"), ("paper", "dev")])
def test_an_unknown_name_or_split_lists_what_there_is(hub, name, split):
    with pytest.raises(ValueError, match="there are laptop, paper, recursion, .*aime25 .test., .*jsonl"):
        load(name, split)
    assert not hub.seen and not os.listdir()


def test_a_missing_file_is_named(hub):
    with pytest.raises(FileNotFoundError, match=r"data/paper.jsonl is missing; python eval.py prepare"):
        load("paper", "train")
    with pytest.raises(FileNotFoundError, match=r"mine.jsonl is missing$"):
        load("mine.jsonl", "test")


def test_prepare_writes_both_mixes_without_what_is_tested(hub, capsys):
    """The counts, the hardest first, nothing of a test, the kinds by turns, the same bytes again, and what the program prints."""
    evaluation.main(["prepare"])
    told, paper, recursion = capsys.readouterr().out, load("paper", "train"), load("recursion", "train")
    assert len(paper) == 960 and len(recursion) == 350 and len({p.id for p in paper}) == 960 and len({p.id for p in recursion}) == 350
    assert [p.kind for p in paper[:4]] == [p.kind for p in paper[-4:]] == ["math500", "mmlu", "rlpr", "livecodebench"]
    assert [sum(p.kind == kind for p in recursion) for kind in ("livecodebench", "rlpr")] == [175, 175]
    tested = {p.question for kind in ("math500", "mmlu", "rlpr", "livecodebench") for p in load(kind, "test")}
    assert not tested & {p.question for p in paper + recursion}
    assert {p.question for p in load("math500", "train")} & tested  # three problems are in both data sets here
    for kind in ("math500", "rlpr", "livecodebench"):
        chosen = [p.level for p in paper if p.kind == kind]
        assert sorted(chosen) == sorted((p.level for p in load(kind, "train") if p.question not in tested))[-240:]
    lines = told.splitlines()
    assert "data/paper.jsonl: 960 problems" in lines and "data/recursion.jsonl: 350 problems" in lines
    assert "    240 mmlu, level unknown" in lines and sum(int(line.split()[0]) for line in lines if line[0] == " ") == 960 + 350
    before = {name: open(f"data/{name}", "rb").read() for name in ("paper.jsonl", "recursion.jsonl")}
    asked = len(hub.seen)
    random.seed(5)
    prepare()
    assert before == {name: open(f"data/{name}", "rb").read() for name in before} and len(hub.seen) == asked
    p = next(p for p in paper if p.kind == "livecodebench")
    assert len(stored_tests(p.id, **p.extra["tests"])) == 2  # a mix knows where its hidden tests are


def test_a_mix_is_tested_by_its_parts(hub):
    found = load("recursion", "test", 20)
    assert [p.kind for p in found] == ["livecodebench", "rlpr"] * 10
