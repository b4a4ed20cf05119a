"""The two controllers that learn, in worlds where the right choice is known; their evolution, on a quadratic whose minimum is known."""
import os
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

import eval as evaluation
import train
from eval import Problem, evolve, masrouter, train_masrouter, train_trinity, trinity
from workers import Reply, WorkerError, load_pool


class Says:
    """A worker without a network, who says answer(question); where that is None, it is lost."""
    calls, spent, budget = 0, 0.0, None

    def __init__(self, name, answer):
        self.name, self.answer = name, answer

    def chat(self, messages, call_id="", **overrides):
        question = re.search(r"\d+\?", messages[0]["content"])[0]
        text = self.answer(question)
        if text is None:
            raise WorkerError("down")
        self.calls += 1
        return Reply(text, 10, 5, 0.0, 0.1)


PROBLEMS = [Problem(str(i), f"What comes after {i}?", str(i + 1), "k") for i in range(40)]


def right(question):
    return str(int(question[:-1]) + 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model with random weights, as a run's reference."""
    path = str(tmp_path_factory.mktemp("reference"))
    s = train.Settings(width=16, layers=1)
    torch.manual_seed(0)
    model, tokenizer = train.tiny_conductor(s, evaluation.load("laptop", "train", 64), load_pool("local", "http://127.0.0.1:9/v1"))
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def settings(folder, monkeypatch):
    monkeypatch.setattr(evaluation, "MASROUTER_STEPS", 30)
    monkeypatch.setattr(evaluation, "GENERATIONS", 25)
    monkeypatch.setattr(evaluation, "POPULATION", 18)
    return evaluation.Settings(trinity=folder)


@pytest.mark.parametrize("n, scales", [(20, "even"), (20, "uneven"), (200, "even")])
def test_evolution_finds_the_minimum_of_a_quadratic(n, scales):
    """Whose axes may differ by a factor of a thousand in steepness, as a diagonal covariance can learn."""
    steepness = np.geomspace(1, 1000, n) if scales == "uneven" else np.ones(n)
    minimum = np.linspace(-3, 3, n)
    found = evolve(lambda population: -((population - minimum) ** 2 * steepness).sum(1), n, 4 + int(3 * np.log(n)), 60 * n if n < 100 else 1500, 0)
    assert np.abs(found - minimum).max() < 1e-3


@pytest.mark.parametrize("learn, system", [(train_masrouter, masrouter), (train_trinity, trinity)])
@pytest.mark.parametrize("failing", [False, True])
def test_a_controller_finds_the_one_right_worker(learn, system, failing, settings):
    """Of two, of whom the other is always wrong; also where both are lost on every fourth problem."""
    lost = {p.question.split()[-1] for p in PROBLEMS[::4]} if failing else ()
    pool = [Says("other", lambda question: None if question in lost else "no"),
            Says("right", lambda question: None if question in lost else right(question))]
    weights = learn(pool, PROBLEMS[:30], settings)
    traces = [system(weights, settings, p, pool, 0, "test") for p in PROBLEMS]
    assert [bool(t.error) for t in traces] == [p.question.split()[-1] in lost for p in PROBLEMS]
    ran = [(p, t) for p, t in zip(PROBLEMS, traces) if not t.error]
    assert sum(t.answer == p.answer for p, t in ran) > 0.9 * len(ran)
    if system is masrouter:
        assert {len(t.workers) for t in traces} == {1}  # as a call costs


def test_learning_goes_on_where_all_are_lost(settings):
    pool = [Says("one", lambda question: None), Says("two", lambda question: None)]
    for learn in (train_masrouter, train_trinity):
        assert np.isfinite(learn(pool, PROBLEMS[:4], settings)).all()


def test_while_they_learn_nobody_is_asked_the_same_twice(settings):
    pool = [Says("other", lambda question: "no"), Says("right", right)]
    asked = []
    for worker in pool:
        chat = worker.chat
        worker.chat = lambda messages, call_id=None, name=worker.name, chat=chat, **_: asked.append(str((name, messages))) or chat(messages)
    train_trinity(pool, PROBLEMS[:5], settings)
    assert len(asked) < 64 + len(set(asked))  # but for those asked at a time


@pytest.mark.parametrize("text, ends", [("ACCEPT", True), ("I am a coder; I find nothing here to work on.", True), ("5", False), ("6", False),
                                        ("I would not ACCEPTED", False)])
def test_a_verifier_ends_it_by_accepting(text, ends, settings, monkeypatch):
    """By that word or by finding nothing to do; the answer is the last worker's all the same, and stands last."""
    pool = [Says("solver", right), Says("judge", lambda question: text)]
    turns = iter([(0, "worker"), (1, "verifier"), (1, "thinker"), (0, "worker"), (1, "thinker")])
    read = []

    def hidden_state(folder, text):
        read.append(text)
        worker, role = next(turns)
        return np.eye(5)[[worker, 2 + [*evaluation.ROLES].index(role)]].sum(0)

    monkeypatch.setattr(evaluation, "hidden_state", hidden_state)
    trace = trinity(np.eye(5), settings, PROBLEMS[4], pool, 0, "test")
    assert trace.answer == "5" and trace.calls == (2 if ends else 5) and trace.workers[-1] == "solver" and trace.error is None
    question = PROBLEMS[4].question
    newest = ["worker: 5", f"verifier: {text}", f"thinker: {text}", "worker: 5"]
    assert read == [question, *(f"{question}\n{turn}" for turn in newest)][:trace.calls]


def test_both_are_measured_saved_and_reused(settings, tmp_path, capsys, monkeypatch):
    """Over real HTTP in the laptop world: calls and lost workers are told, and a second run trains nobody."""
    monkeypatch.setattr(evaluation, "LESSONS", 8)
    monkeypatch.setattr(evaluation, "MASROUTER_STEPS", 3)
    monkeypatch.setattr(evaluation, "GENERATIONS", 1)
    argv = ["--systems=masrouter,trinity", f"--trinity={settings.trinity}", "--test=8", "--repeats=2", f"--out={tmp_path}/x.json"]
    evaluation.main(argv)
    told = capsys.readouterr().out
    assert re.search(r"masrouter: trained with [\d,]+ calls", told) and re.search(r"trinity: trained with [\d,]+ calls", told)
    assert sorted(os.listdir(tmp_path)) == ["x.json", "x.json.masrouter-laptop.npz", "x.json.trinity-laptop.npz"]
    evaluation.main(argv)
    again = capsys.readouterr().out
    assert "trained" not in again and again in told.split("calls\n")[-1]
    with pytest.raises(SystemExit, match="no checkpoint in .nowhere.*train.py --out=DIR makes"):
        evaluation.main(["--systems=trinity", "--trinity=nowhere"])


def test_a_worker_is_asked_once_though_many_ask_at_once():
    """What a controller's training costs does not depend on how threads meet."""
    together = threading.Barrier(8)
    worker = Says("a", lambda question: [time.sleep(0) for _ in range(1000)] and "42")
    remembers = evaluation.Remembers(worker)

    def ask(i):
        together.wait(60)
        return remembers.chat([{"role": "user", "content": f"{i % 2}?"}]).text

    with ThreadPoolExecutor(8) as threads:
        assert [*threads.map(ask, range(8))] == ["42"] * 8
    assert worker.calls == 2
