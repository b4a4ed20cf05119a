"""workflow.py in a fork: workflows made by hand and conductors of one's own, right and wrong ones, against what their contract says."""
import itertools
import threading

import pytest

import workflow as wf
from eval import Problem, grades, run_conductor
from test_workflow import Local, one_step
from test_workflow_parse import lists
from workflow import Step, Task, Workflow, execute

POOL = [Local("echo", lambda chat: "You said " + chat[-1]["content"].split("Your task:\n")[1]), Local("other", lambda chat: "")]


@pytest.mark.parametrize("step, i", [(Step(2, "A.", []), 0), (Step(-1, "A.", []), 0), (Step(0, "A.", [0]), 0), (Step(0, "A.", [1]), 0),
                                     (Step(0, "A.", [-1]), 1), (Step(0, "A.", [2]), 1)])
def test_a_step_that_cannot_be_is_refused_before_any_is_asked(step, i):
    """A worker who is not there; itself, a later step or one counted from the end in the access list: a wait for ever, or another's words."""
    asked = []
    pool = [Local("a", lambda chat: asked.append(chat) or "A"), Local("b", lambda chat: "B")]
    steps = [Step(0, "First.", []), Step(1, "Then.", []), Step(1, "Last.", [0, 1])]
    steps[i] = step
    with pytest.raises(ValueError, match=f"step {i} has no worker of the pool, or sees what is no earlier step"):
        execute(Workflow(steps), "Why?", pool)
    with pytest.raises(ValueError, match=f"step {i} has no worker"):
        wf.roll_out(template(one_step("Go.")), [Task("Why?", pool)], edit=lambda workflow: Workflow(steps))
    assert asked == []


def template(text):
    """A conductor that always writes the same."""
    def conductor(chats, n, first):
        for i, j in itertools.product(range(len(chats)), range(n)):
            yield i, j, text
    return conductor


def test_a_template_is_a_conductor():
    groups = wf.roll_out(template(one_step("Go.")), [Task("Why?", POOL), Task("How?", POOL)], 3, grade=lambda problem, answer: True)
    assert [[r.trace.answer for r in group] for group in groups] == [["You said Go."] * 3] * 2
    assert all(r.right and r.completion is None and r.prompt == [] for r in itertools.chain(*groups))


@pytest.mark.parametrize("pairs, said", [
    ([], r"has not written \(chat, completion\) \[\(0, 0\), \(0, 1\), \(1, 0\), \(1, 1\)\]"), ([(0, 0), (0, 1), (1, 1)], r"has not written \(chat, completion\) \[\(1, 0\)\]"),
    ([(0, 0), (0, 1), (0, 0)], "completion 0 of chat 0 twice, or unasked"), ([(0, 0), (2, 0)], "completion 0 of chat 2 twice, or unasked"),
    ([(0, 0), (-1, 0)], "completion 0 of chat -1"), ([(0, 0), (0, 2)], "completion 2 of chat 0")])
@pytest.mark.parametrize("text", [one_step("Go."), "I cannot."])
def test_a_conductor_that_writes_too_few_or_too_many(pairs, said, text):
    """It is an error, not a rollout that is None, nor one that is paid and graded twice."""
    def conductor(chats, n, first):
        for i, j in pairs:
            yield i, j, text

    finished = []
    with pytest.raises(ValueError, match=said):
        wf.roll_out(conductor, [Task("Why?", POOL), Task("How?", POOL)], 2, on_finish=finished.append)
    assert len(finished) <= len(pairs)


@pytest.mark.parametrize("pairs, answered, said", [
    ([], False, "left out this chat"), ([(-1, 0)], False, "-1"), ([(1, 0)], False, "1"), ([(0, 0), (0, 0)], True, "KeyError: 0")])
def test_a_served_conductor_that_writes_too_few_or_too_many(pairs, answered, said, capsys):
    """Who asked hears of it, nobody gets what is another's, and who comes next is served."""
    def conductor(chats, n, first):
        for i, j in pairs if "bad" in chats[0] else [(0, 0)]:
            yield i, j, "fine"

    ask_for, work_on = wf.from_one_thread(conductor)
    threading.Thread(target=work_on, daemon=True).start()
    if answered:
        assert [*ask_for(["bad"], 1, 0)] == [(0, 0, "fine")]
    else:
        with pytest.raises((ValueError, KeyError), match=said):
            next(ask_for(["bad"], 1, 0))
    assert [*ask_for(["good"], 1, 0)] == [(0, 0, "fine")]
    assert not answered or said in capsys.readouterr().err


def test_a_conductor_writes_no_more_once_something_has_failed(monkeypatch):
    written, failures = [], threading.Semaphore(0)
    set_exception = wf.Future.set_exception
    monkeypatch.setattr(wf.Future, "set_exception", lambda future, e: (set_exception(future, e), failures.release()))

    def conductor(chats, n, first):
        for j in range(n):
            written.append(j)
            yield 0, j, one_step("Go.")
            assert j or failures.acquire(timeout=60) and failures.acquire(timeout=60)  # of the step, and of its workflow

    with pytest.raises(ZeroDivisionError):
        wf.roll_out(conductor, [Task("Why?", [Local("a", lambda chat: 1 // 0)])], 5)
    assert written == [0, 1]


def test_what_exits_in_a_thread_is_raised():
    """sys.exit, say in a grader of one's own, does not leave the rollouts waiting for ever."""
    def grade(problem, answer):
        raise SystemExit("no grader")

    with pytest.raises(SystemExit, match="no grader"):
        wf.roll_out(template(one_step("Go.")), [Task("Why?", POOL)], grade=grade)


def test_no_rounds_are_no_rounds():
    """A negative number of further rounds is none, and not one after another for ever."""
    [rollout] = wf.conduct(template(one_step("Go.")), [Task("Why?", POOL)], rounds=-1)
    assert rollout.trace.calls == 1


def test_an_evaluation_says_why_nothing_was_written(capsys):
    """A worker's number that is not there, in every completion; and pools that are not one for each problem are refused."""
    problems = [Problem(f"p/{i}", "Why?", "42", "why") for i in range(3)]
    assert run_conductor(template(lists("[5]", '["Go."]', "[[]]")), problems, [POOL] * 3, "mine") == [None] * 3
    assert "mine: no workflow for 3 of 3 problems; the first: model_id" in capsys.readouterr().err
    with pytest.raises(ValueError, match="shorter"):
        run_conductor(template(one_step("Go.")), problems, [POOL], "mine")
    with pytest.raises(ValueError, match="shorter"):
        grades(problems, [None])
