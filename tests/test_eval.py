"""The laptop world and the systems that play in it. The specialists are real, over real HTTP; what is right was worked out by hand."""
import hashlib
import io
import itertools
import json
import random
import re
import threading
import types
from collections import Counter
from dataclasses import replace

import pytest

import eval as evaluation
import workers
import workflow as workflow_py
from eval import (PHRASES, Problem, accuracies, alone, baselines, central, draw_pool, grade, habits, load, majority, poll,
                  best_chance, random_completion, random_workflow, router, run_conductor, train_router)
from sample import Completion
from train import Settings as TrainSettings, random_lesson
from workers import SPELLING, Reply, Worker, WorkerError, load_pool
from workflow import Prompting, Step, Task, Workflow, as_lists, execute, model_conductor, parse, submit

CALCULATOR, TRANSLATOR, LIBRARIAN, CODER, GENERALIST = range(5)
SIMPLE = ("arithmetic", "fact", "string", "number")
TWO, THREE = ("foreign", "fact+arithmetic", "capital+string", "element+string"), ("foreign+fact+arithmetic",)
KINDS = SIMPLE + TWO + THREE
TELL = {CALCULATOR: "Compute it.", TRANSLATOR: "Translate it.", LIBRARIAN: "Look up the fact.",
        "turned around": "Reverse it.", "shouted": "Write it in capitals.", "thinned out": "Leave out the vowels."}
INTENDED = {"arithmetic": [CALCULATOR], "fact": [LIBRARIAN], "string": [CODER], "number": [TRANSLATOR],
            "foreign": [TRANSLATOR, CALCULATOR], "fact+arithmetic": [LIBRARIAN, CALCULATOR],
            "capital+string": [LIBRARIAN, CODER], "element+string": [LIBRARIAN, CODER],
            "foreign+fact+arithmetic": [TRANSLATOR, LIBRARIAN, CALCULATOR]}


@pytest.fixture(scope="module")
def pool():
    found = load_pool("local")
    assert [w.name for w in found] == ["calculator", "translator", "librarian", "coder", "generalist"]
    return found


def right_words(problem, worker):
    """What sets a worker to work: a trade's own verb, and for the coder the order that the question wishes in other words."""
    [wish] = [w for w in SPELLING if w in problem.question] or [None]
    return TELL[wish if worker == CODER else worker]


def chain(problem, tell=right_words, linked=True):
    """The right workers one after another: each step sees the one before it; without links none sees anything."""
    return Workflow([Step(w, tell(problem, w), [i - 1] if linked and i else []) for i, w in enumerate(INTENDED[problem.kind])])


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


@pytest.mark.parametrize("name, most", [("laptop:1", 1), ("laptop:2", 2), ("laptop", 3)])
def test_kinds_that_few_workers_can_solve(name, most):
    """The easier worlds are the laptop's own problems, of some kinds, in the same split."""
    for split in ("train", "test"):
        problems = {p.id for p in load(name, split)}
        assert problems == {p.id for p in load("laptop", split) if len(evaluation.NEEDS[p.kind]) <= most}


def test_no_such_problems():
    """An unknown data set or split is an error that says what there is."""
    for name, split in [("lapdog", "train"), ("laptop", "valid")]:
        with pytest.raises(ValueError, match="laptop"):
            load(name, split)


@pytest.mark.parametrize("kind, asked, answer", [
    ("arithmetic", "7 * 8", "56"), ("arithmetic", "3 - 9", "-6"), ("arithmetic", "39 + 26", "65"),
    ("fact", "the atomic number of oxygen", "8"), ("fact", "the capital of Peru", "Lima"), ("fact", "element number 26", "iron"),
    ("string", "silver turned around", "revlis"), ("string", "silver thinned out", "slvr"),
    ("string", "castle shouted", "CASTLE"),
    ("number", "veintitrés", "23"), ("number", "quince", "15"),
    ("foreign", "doce * tres", "36"), ("foreign", "cinco - treinta", "-25"),
    ("fact+arithmetic", "the atomic number of carbon - 10", "-4"), ("fact+arithmetic", "the atomic number of zinc * 2", "60"),
    ("capital+string", "the capital of Norway turned around", "olsO"), ("capital+string", "the capital of Japan thinned out", "Tky"),
    ("element+string", "element number 26 shouted", "IRON"), ("element+string", "element number 8 turned around", "negyxo"),
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
    assert share(problems, pool, chain) == dict.fromkeys(KINDS, 1.0)


def test_access_lists_matter(pool):
    """The same workflows with their access lists emptied solve what takes one step, and no composite."""
    problems = load("laptop", "test", 12 * len(KINDS))
    assert share(problems, pool, lambda p: chain(p, linked=False)) == {k: float(k in SIMPLE) for k in KINDS}


def test_subtasks_matter(pool):
    """Told to solve the question, all do their trade, but the coder guesses what is wished, and a third is right. Told another
    wish, it is never right; the others do not mind."""
    problems = load("laptop", "test", 40 * len(KINDS))
    general = share(problems, pool, lambda p: chain(p, lambda p, worker: "Solve the question."))
    assert all(0.1 < general.pop(kind) < 0.6 for kind in ("string", "capital+string", "element+string")) and set(general.values()) == {1.0}
    wishes = [*SPELLING, "turned around"]
    strings = [p for p in problems if p.kind == "string"]
    assert len(strings) == 40
    for p in strings:
        [i] = [i for i, wish in enumerate(wishes[:3]) if wish in p.question]
        answer = execute(Workflow([Step(CODER, TELL[wishes[i + 1]], [])]), p.question, pool).answer
        assert not grade(p, answer)


def test_order_matters(pool):
    """A composite's workers in reverse order, all of them seen, do not solve it."""
    problems = [p for p in load("laptop", "test", 12 * len(KINDS)) if p.kind not in SIMPLE]
    assert not any(share(problems, pool, lambda p: Workflow([Step(s.worker, s.subtask, [*range(i)]) for i, s in enumerate(
        reversed(chain(p).steps))])).values())


@pytest.mark.parametrize("worker", range(5))
def test_one_worker_is_not_enough_for_a_composite(pool, worker):
    """The intended steps with one and the same worker in every seat solve no composite, whoever it is."""
    problems = [p for p in load("laptop", "test", 12 * len(KINDS)) if p.kind not in SIMPLE]
    assert not any(share(problems, pool, lambda p: Workflow([replace(s, worker=worker) for s in chain(p).steps])).values())


def test_no_phrase_favours_a_worker(pool):
    """Whichever phrase of the warm start it is told, a specialist does its trade; the coder does as many things as there are
    orders."""
    said = {kind: {execute(Workflow([Step(INTENDED[kind][0], phrase, [])]), question, pool).answer for phrase in PHRASES}
            for kind, question in (("arithmetic", "What is 7 * 8?"), ("fact", "What is element number 26?"),
                                   ("string", "What is silver turned around?"), ("number", "What is quince?"))}
    assert said == {"arithmetic": {"56"}, "fact": {"iron"}, "string": {"revlis", "SILVER", "slvr"}, "number": {"15"}}


@pytest.fixture(scope="module")
def measured(pool):
    """(problems, systems) of the baselines on 270 held-out problems."""
    problems = load("laptop", "test", 30 * len(KINDS))
    return problems, baselines(problems, pool)


def test_no_worker_alone_and_no_luck_solve_the_world(measured):
    """Over all problems single workers stay at or below 0.35, random workflows at or below 0.15; a specialist knows its trade."""
    problems, systems = measured
    assert list(systems) == ["calculator", "translator", "librarian", "coder", "generalist", "random workflows"]
    scores = {name: accuracies(problems, traces) for name, traces in systems.items()}
    assert all(s["all"] <= 0.35 for s in scores.values()) and 0 < scores["random workflows"]["all"] <= 0.15
    for name, kind in zip(systems, ("arithmetic", "number", "fact")):
        assert scores[name] == {"all": 1 / 9, **{k: float(k == kind) for k in KINDS}}
    assert 0.1 < scores["coder"].pop("string") < 0.6 and 0 < scores["coder"].pop("all") < 1 / 9  # Untold, it guesses.
    assert not any(scores["coder"].values())
    simple = sum(scores["generalist"][k] for k in SIMPLE) / len(SIMPLE)
    assert 0.02 < simple < 0.3 and not any(scores["generalist"][k] for k in TWO + THREE)


def test_random_workflows_are_the_same_each_time(pool, measured):
    """The baseline does not move between two evaluations."""
    problems, systems = measured
    again = baselines(problems[:40], pool)["random workflows"]
    assert [(t.workflow, t.answer) for t in again] == [(t.workflow, t.answer) for t in systems["random workflows"][:40]]


@pytest.mark.parametrize("kind", ["math500", "string"])
def test_random_workflows_beyond_the_laptop_world_say_nothing_of_it(kind, pool):
    """There its phrases, such as "Leave out the vowels.", would make no baseline, nor a warm start, whatever the kind is called."""
    problem = Problem("mine.jsonl/3", "What is 7 * 8?", "56", kind)
    trace, = baselines([problem], pool)["random workflows"]
    assert {step.subtask for step in trace.workflow.steps} <= {*evaluation.OTHER_PHRASES}
    rng = random.Random(0)
    assert not any(phrase in random_lesson(problem, rng, pool, TrainSettings())[1] for phrase in PHRASES for _ in range(50))


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
    """A Conductor that writes by(question): a tokenizer whose ids are characters, and generate_each() for it."""
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

    def generate_each(self, model, prompts, n, max_new_tokens, temperature, **_):
        assert (n, temperature) == (1, 0.0)
        self.batches.append(len(prompts))
        for i in reversed(range(len(prompts))):  # they finish in any order
            yield i, 0, Completion([ord(c) for c in self.by(self.decode(prompts[i]))], [], True)


def conduct(monkeypatch, by, problems, pool, **how):
    script, prompting = Script(by), Prompting(style="short")
    monkeypatch.setattr(workflow_py, "generate_each", script.generate_each)
    write = model_conductor(script.model, script, prompting, 0.0)
    return run_conductor(write, problems, [pool] * len(problems), "test", prompting=prompting, **how), script


def test_the_gold_answer_never_leaves(monkeypatch):
    """Problems whose every hidden field is a canary: it is in no request of a workflow, a single worker or a random workflow."""
    server = workers.Server(("127.0.0.1", 0), Tap)
    server.bodies = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    problems = [Problem("CANARY", p.question, "CANARY", "CANARY") for p in load("laptop", "test", 16)]
    pool = load_pool("local", local_url=f"http://127.0.0.1:{server.server_address[1]}/v1")
    workflows = {p.question: chain(p) for p in load("laptop", "test", 16)}
    traces, _ = conduct(monkeypatch, lambda question: as_lists(workflows[question]), problems, pool)
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
    """`shouted` would be no task otherwise."""
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


def test_random_workflows_are_the_ones_that_the_laptop_world_is_learned_with():
    """A warm start is made of them: another distribution would be another experiment."""
    found = []
    for seed, (n, steps) in itertools.product(range(20), ((5, 5), (8, 5), (3, 2), (1, 1))):
        rng = random.Random(f"{seed} {n}")
        for _ in range(50):
            found += [as_lists(random_workflow(rng, n, steps)), random_completion("What is 7 * 8?", rng, n, steps),
                      random_completion("Q?", rng, n, steps, "ABCDEFGH"[:n])]
    assert hashlib.sha256("\n".join(found).encode()).hexdigest() == "c2fdf597f2afe031c46d39dde90b53a9fde9688df1033b48a70733b8437fbab5"


def test_without_subtasks_the_same_workflow_is_written_without_them():
    """The variant for App. B.7 draws the same workers and access lists, and leaves the list of subtasks out."""
    for seed in range(50):
        whole = random_completion("Why?", random.Random(seed), 5).split("\n")
        assert [line.split(" = ")[0] for line in whole] == ["Plan: Why?", "model_id", "subtasks", "access_list"]
        bare = random_completion("Why?", random.Random(seed), 5, subtasks=False).split("\n")
        assert bare == whole[:2] + whole[3:]
        steps = parse("\n".join(bare), 5, subtasks=False).steps
        assert [(s.worker, s.access) for s in steps] == [(s.worker, s.access) for s in parse("\n".join(whole), 5).steps]


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
    """More problems than a batch holds: each trace in its problem's place, None for what is no workflow, `edit` applied."""
    problems = load("laptop", "test", 72)
    asked = {p.question: p for p in problems}

    def write(question):
        return "I would rather not." if asked[question].kind == "number" else f"A plan.\n{as_lists(chain(asked[question]))}"

    traces, script = conduct(monkeypatch, write, problems, pool)
    assert sum(script.batches) == 72
    assert [t and t.question for t in traces] == [None if p.kind == "number" else p.question for p in problems]
    assert accuracies(problems, traces) == {"all": 8 / 9, **{k: float(k != "number") for k in KINDS}}

    def blind(workflow):
        return Workflow([Step(s.worker, s.subtask, []) for s in workflow.steps])

    traces, _ = conduct(monkeypatch, write, problems, pool, edit=blind)
    assert accuracies(problems, traces)["all"] == 3 / 9
    assert conduct(monkeypatch, write, [], pool)[0] == []  # a rank without problems


def test_rounds_go_on_until_an_answer_is_kept(pool, monkeypatch):
    """Of four questions one is right at once and kept, one is kept wrong, one is mended in the second round, one writes no second workflow."""
    problems = [Problem(str(i), f"What is 6 * {i}?", str(6 * i), "arithmetic") for i in (3, 4, 5, 6)]
    good, bad, empty = *(as_lists(Workflow([Step(w, "Work it out.", [])])) for w in (0, 3)), as_lists(Workflow([]))
    turns = {"3": [good, empty, bad], "4": [bad, empty], "5": [bad, good, empty], "6": [bad, "Never mind.", good]}

    def write(prompt):
        question = re.search(r"6 \* (\d)", prompt)[1]
        return turns[question].pop(0)

    traces, _ = conduct(monkeypatch, write, problems, pool, rounds=2)
    assert [grade(p, t.answer) for p, t in zip(problems, traces)] == [True, False, True, False]
    assert [[len(t.workflow.steps) for t in trace.rounds()] for trace in traces] == [[1, 0], [1, 0], [1, 1, 0], [1]]
    told = habits(traces)
    assert told["kept"] == {"right": 1.0, "wrong": 0.5} and told["lengths"] == {"1 step": 1.0}
    assert told["workers, round 1"] == {"calculator": 0.25, "coder": 0.75} and told["workers, round 2"] == {"calculator": 1.0}
    assert turns == {"3": [bad], "4": [], "5": [], "6": [good]} and [t.calls for t in traces] == [1, 1, 2, 1]


def test_pools_that_can_solve_a_problem():
    """The best workflow's chance is the product of the best specialists' skills; pools are drawn so that it is not zero."""
    pool = load_pool("local:pairs", "http://127.0.0.1:9/v1")
    worker = {w.name: w for w in pool}
    three = Problem("", "", "", "foreign+fact+arithmetic")
    assert best_chance(three, pool) == 1.0
    team = [worker[name] for name in ("junior calculator", "translator", "junior librarian")]
    assert best_chance(three, team) == pytest.approx(0.36) and best_chance(three, team[:2]) == 0
    drawn = [draw_pool(three, pool, 5, random.Random(i)) for i in range(200)]
    assert all(len(d) == 5 and [w.letter for w in d] == sorted(w.letter for w in d) and best_chance(three, d) > 0 for d in drawn)
    assert len({"".join(w.letter for w in d) for d in drawn}) > 20
    with pytest.raises(ValueError, match="no 2 of calculator"):
        draw_pool(three, pool, 2, random.Random(0))
    assert set(evaluation.NEEDS) == set(KINDS)


@pytest.mark.parametrize("grader, responses, chosen", [
    ("math", ["\\boxed{0.4}", "<answer>1/2</answer>", "Hence \\boxed{0.5}", "\\boxed{4}"], 1),
    ("math", ["\\boxed{\\frac{2}{4}}", "\\boxed{0.25}", "\\boxed{7}", "\\boxed{1/4}"], 1),
    ("short", ["<answer>Lima</answer>", "<answer>Oslo</answer>", "<answer>oslo</answer>"], 1),
    ("exact", ["a", "b", "<answer>b</answer>"], 1), ("exact", ["a", "b"], 0), ("exact", ["a", "b", "B"], 0),
    ("letter", ["<answer>A</answer>", "<answer>(B) no</answer>", "The answer is B.", "<answer>C</answer>"], 1),
    ("code", ["```python\nprint(1)\n```", "So: ```python\nprint(2)\n```", "```python\nprint(2)\n```"], 1),
    # What was cut off before its answer agrees with nothing.
    ("letter", ["Let me see", "<answer>B</answer>", "First,", "<answer>B</answer>", "Hm"], 1), ("letter", ["Let me see", "First,"], 0),
    ("code", ["Let me see", "```python\nprint(1)\n```", "First,", "Hm"], 1),
    ("math", ["", "\\boxed{4}", "", "\\boxed{4}", ""], 1), ("exact", ["", "4", ""], 1)])
def test_a_majority_is_of_meaning(grader, responses, chosen):
    """The answer with which most responses agree as the grader sees it, in whatever words; the first where several are."""
    assert majority(Problem("", "?", "hidden", "k", grader, 0, {"choices": ["yes", "no", "so"]}), responses) == chosen


def test_central_by_hand():
    """The response with most words in common with the others."""
    chosen = [central(None, responses) for responses in (["a b c d", "x y", "a b c e", "a b"], ["one"], ["", ""])]
    assert chosen == [0, 0, 0]


def test_a_poll_asks_all_and_puts_the_chosen_response_last(pool):
    problem = Problem("", "What is 7 * 8?", "56", "arithmetic")
    trace = poll(problem, pool, [0, 1, 2], "test", lambda problem, responses: 0)
    assert trace.answer == "56" and trace.calls == 3 and trace.workers == ["translator", "librarian", "calculator"] and not trace.error
    assert all(len(r.text) > 10 for r in trace.replies[:2]) and trace.tokens > 10
    down = Worker("openai", "http://127.0.0.1:9/v1", "m", name="gone", attempts=1)
    lost = poll(problem, [pool[0], down], [0, 1], "test", lambda problem, responses: 1 / 0)
    assert lost.error.startswith("gone: ") and lost.answer == "" and lost.calls == 1  # what was paid for is counted


def test_the_router_learns_who_is_right_alone(pool):
    """On other problems it finds the one worker whose trade it is, by the words of the question."""
    kinds = dict(zip(SIMPLE, (CALCULATOR, LIBRARIAN, CODER, TRANSLATOR)))
    lessons, problems = ([p for p in load("laptop", split) if p.kind in kinds][:n] for split, n in (("train", 160), ("test", 80)))
    weights = train_router(pool, lessons, None)
    assert sum(router(weights, None, p, pool, 0, "test").workers == [pool[kinds[p.kind]].name] for p in problems) > 72


class Sees(Worker):
    """A worker without a network: says what it was shown."""
    def chat(self, messages, call_id="", **overrides):
        text = json.dumps([self.name, messages])
        self.asked.append((self.name, messages, call_id, {**self.params, **overrides}))
        return Reply(text, 10, 5, 0.01, 0.5)


def test_what_each_system_asks():
    """Workers alone, five turns, five votes, five times the tokens, everyone and an aggregator: who is asked what, and shown what."""
    Sees.asked = []
    pool = [Sees("openai", "http://127.0.0.1:9/v1", name, params={"max_tokens": 100}) for name in "abc"]
    problems, s = [Problem("p", "Why?", "", "k")], evaluation.Settings()

    def asked(name, who=""):
        Sees.asked = []
        [[[trace]]] = evaluation.play(s, "laptop", problems, [pool], name, who).values()
        assert trace.error is None and trace.calls == len(Sees.asked) and trace.cost == pytest.approx(0.01 * trace.calls)
        assert len({call_id for *_, call_id, _ in Sees.asked}) == len(Sees.asked)  # a replay file tells them apart
        return Sees.asked

    bare = [{"role": "user", "content": "Why?"}]
    assert [(w, m) for w, m, *_ in asked("workers", "b")] == [("b", bare)]
    assert [(w, m, p) for w, m, _, p in asked("context", "b")] == [("b", bare, {"max_tokens": 500})] and pool[1].params == {"max_tokens": 100}
    pool[2].params = {"maxOutputTokens": 7}  # Gemini's own name
    assert [p for *_, p in asked("context", "c")] == [{"maxOutputTokens": 35}]
    Sees.asked = []
    evaluation.play(s, "laptop", problems, [pool], "seat", "c")
    assert [p for *_, p in Sees.asked] == [{"maxOutputTokens": 14}] * 10
    assert [(w, m) for w, m, *_ in asked("consensus", "c")] == [("c", bare)] * 5
    assert [(w, m) for w, m, *_ in asked("smoothie")] == [(w, bare) for w in "abc"]
    reflect = asked("reflect", "c")
    assert [(w, len(m)) for w, m, *_ in reflect] == [("c", 2 * i + 1) for i in range(5)] and evaluation.REFLECT in reflect[4][1][-1]["content"]
    *proposers, (_, shown, *_) = asked("moa")
    assert sorted(w for w, *_ in proposers) == [*"abc"] and all(len(m) == 1 for _, m, *_ in proposers) and len(shown) == 7
    Sees.asked = []
    evaluation.play(replace(s, repeats=2), "laptop", problems, [pool], "router", "")
    assert len(Sees.asked) == 3 * 256 + 2  # it learns once
    assert len({(w, call_id) for w, *_, call_id, _ in Sees.asked}) == 3 * 256 + 2

    def down(*args, **more):
        raise WorkerError("down")
    pool[1].chat = down
    assert [t.error for t in evaluation.play(s, "laptop", problems, [pool], "seat", "b")["seat b"][0]] == ["down"]  # lost, not wrong


def test_every_call_of_a_conductor_has_its_own_name(monkeypatch):
    """Problems, rounds and steps: with a replay file each is kept apart."""
    Sees.asked, text = [], as_lists(Workflow([Step(0, "Do.", []), Step(0, "Check.", [0])]))
    problems = [Problem(str(i), "Why?", "", "k") for i in range(3)]
    conduct(monkeypatch, lambda question: text, problems, [Sees("openai", "http://127.0.0.1:9/v1", "a")], rounds=1)
    assert len({call_id for *_, call_id, _ in Sees.asked}) == len(Sees.asked) == 3 * 2 * 2


def test_a_worker_alone(pool):
    """One turn, the bare question; a worker that is lost is an error of its trace and no answer."""
    problem = Problem("", "What is 7 * 8?", "56", "arithmetic")
    trace = alone(problem, pool, CALCULATOR)
    assert (trace.answer, trace.calls, trace.error, trace.workers) == ("56", 1, None, ["calculator"])
    down = alone(problem, [Worker("openai", "http://127.0.0.1:9/v1", "m", name="gone", attempts=1)], 0)
    assert down.error.startswith("gone: ") and (down.answer, down.calls) == ("", 0)


def test_a_mix_has_no_problem_that_could_not_be_read_again(tmp_path, monkeypatch):
    golds = ["2", "\\boxed{2}", " "]
    monkeypatch.setattr(evaluation, "DATA", str(tmp_path))
    monkeypatch.setattr(evaluation, "load", lambda name, *_: [Problem(f"{name}/{i}", "?", a, name, "short") for i, a in enumerate(golds)])
    evaluation.prepare([])
    assert {p.answer for p in evaluation.read_problems(str(tmp_path / "paper.jsonl"))} == {"2"}
