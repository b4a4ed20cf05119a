"""The laptop world: its problems, who can solve them, the grader, the tables. The specialists are real, over real HTTP."""
import io
import itertools
import json
import os
import random
import re
import sys
import threading
from collections import Counter

import pytest

import eval as evaluation
import workers
from eval import PHRASES, Problem, accuracies, alone, baselines, grade, learned, load, random_completion, random_workflow, table
from sample import Completion
from workers import Reply, Worker, load_pool
from workflow import Step, Trace, Workflow, execute, parse, submit

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
    futures = [submit(workflow_of(p), p.question, pool) for p in problems]
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


class Tap(workers.Handler):
    """The local specialists, with what came over the wire kept in server.bodies."""

    def do_POST(self):
        wire, body = self.rfile, self.rfile.read(int(self.headers["Content-Length"]))
        self.server.bodies.append(body)
        self.rfile = io.BytesIO(body)
        super().do_POST()
        self.rfile = wire


class Script:
    """A Conductor that writes by(question): a tokenizer whose ids are characters, and a generate() for it."""
    eos_id = 0

    def __init__(self, by):
        self.by, self.batches = by, []

    def __len__(self):
        return 0x110000

    def chat(self, messages):
        return [ord(c) for c in messages[-1]["content"]]

    def decode(self, ids):
        return "".join(map(chr, ids))

    def generate(self, model, prompts, n, max_new_tokens, temperature, on_finish, **_):
        assert (n, temperature) == (1, 0.0)
        self.batches.append(len(prompts))
        for i in reversed(range(len(prompts))):  # they finish in any order
            on_finish(i, 0, Completion([ord(c) for c in self.by(self.decode(prompts[i]))], [], True))


def conduct(monkeypatch, by, problems, pool, **how):
    script = Script(by)
    monkeypatch.setattr(evaluation, "generate", script.generate)
    return evaluation.conduct(None, script, problems, pool, "short", 5, 96, **how), script


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
    assert lines["half"][0] == "1.000" and lines["half"][2] == "1.00"
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
    (["--chekpoint=x"], "--checkpoint"), (["--test=many"], "--test=many"), (["--checkpoint={dir}/none"], "{dir}/none"),
    (["--data=laptot"], "laptop"), (["plot", "{dir}/none"], "{dir}/none"),
    (["draw"], r"python eval\.py"), (["plot"], r"python eval\.py")])
def test_command_line_refuses(words, reason, tmp_path):
    """A wrong flag, value, word or folder ends the program with one message that names it."""
    with pytest.raises(SystemExit, match=reason.format(dir=tmp_path)):
        evaluation.main([w.format(dir=tmp_path) for w in words])


def test_plot(tmp_path, monkeypatch):
    """A picture of a run if matplotlib is there, else a message that names it."""
    lines = [{"iteration": i, "accuracy": i / 30, "by_kind": {"a": i / 30} | ({"b": 0.5} if i % 2 else {})} for i in range(30)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    with monkeypatch.context() as m:
        m.setitem(sys.modules, "matplotlib", None)
        with pytest.raises(SystemExit, match="matplotlib"):
            evaluation.main(["plot", str(tmp_path)])
    pytest.importorskip("matplotlib")
    evaluation.main(["plot", str(tmp_path)])
    assert os.path.getsize(tmp_path / "curve.png") > 5000
