"""Tests of prompts, runs, further rounds, writers, files and commands.

Most workers are Python functions. Some commands use the laptop world's workers.
"""

import json
import os
import re
import subprocess
import sys
import threading

import pytest
import torch

from eval import Problem, own_grader
from model import Config, Qwen, Tokenizer
from players import Player, lost
from sample import generate
from train_runs import end_of, launch
import workers
from workers import WorkerError
from workflow import (
    Prompting,
    Rollout,
    Step,
    Workflow,
    as_lists,
    call_worker,
    choose_examples,
    choose_pool,
    conduct,
    conductor_chat,
    execute,
    main,
    messages,
    model_writer,
    parse,
    question_of,
    read_examples,
    read_prompting,
    roll_out,
    rollout_from_json,
    rollout_to_json,
    save_prompting,
    show,
    view,
    without_pools,
    worker_writer,
)

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
LAPTOP = os.path.join(ROOT, "assets", "laptop")


def lists(*steps) -> str:
    return as_lists(Workflow([Step(worker, subtask, access) for worker, subtask, access in steps]))


def one_step() -> Workflow:
    return Workflow([Step(0, "x", [])])


def writer(*texts):
    """Return a writer that writes these texts in turn.

    Its attribute `chats` collects the chats that would ask a Conductor for them.
    """
    left = list(texts)

    def write(rollouts):
        for rollout in rollouts:
            write.chats.append(conductor_chat(rollout, Prompting()))
            rollout.written = left.pop(0)
            yield rollout

    write.chats = []
    return write


# The prompt


def test_the_full_prompt_has_the_rules_the_examples_the_question_and_the_models():
    [turn] = messages("How many?", 3, max_steps=4)
    text = turn["content"]
    assert "one to 4 steps" in text
    assert text.endswith("Question: How many?\n\nModels: Model 0, Model 1, Model 2")
    shown = text.split("Example question: ")[1:]
    assert len(shown) == 4
    for example in shown:  # Each example's workflow names only these models.
        assert all(step.worker < 3 for step in parse(example, 3, max_steps=4).steps)
    assert "Example" not in messages("How many?", 3, prompt_style="zero-shot")[0]["content"]
    assert messages("How many?", 3, prompt_style="in") != messages(
        "How many?", 3, prompt_style="mixed"
    )


def test_a_subset_names_workers_by_their_numbers_in_the_pool():
    text = messages("How many?", [0, 3, 5])[0]["content"]
    assert text.endswith("Models: Model 0, Model 3, Model 5")
    for example in text.split("Example question: ")[1:]:
        assert {step.worker for step in parse(example, [0, 3, 5]).steps} <= {0, 3, 5}
    short_subset, short_pool = (
        messages("How many?", workers, prompt_style="short")[0]["content"]
        for workers in ([0, 3], 2)
    )
    assert short_subset == "Models 0 3, 5 steps."
    assert short_pool == "2 models, 5 steps."


TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "4"},
]


def test_turns_before_the_question_reach_the_full_prompt_and_the_workers():
    text = messages("And times 3?", 2, context=TURNS)[0]["content"]
    conversation = "system: Be brief.\n\nuser: What is 2 + 2?\n\nassistant: 4"
    assert text.endswith(
        f"The conversation so far:\n\n{conversation}\n\nQuestion: And times 3?\n\n"
        "Models: Model 0, Model 1"
    )
    alone = messages("And times 3?", 2, prompt_style="short")
    assert messages("And times 3?", 2, prompt_style="short", context=TURNS) == alone

    pool = [Player("a", lambda m: "12")]
    rollout = Rollout("And times 3?", pool, context=TURNS, written=lists((0, "Solve it.", [])))
    roll_out([rollout])
    asked = {"role": "user", "content": "Question:\nAnd times 3?\n\nYour task:\nSolve it."}
    assert pool[0].asked == [[*TURNS, asked]]
    assert conductor_chat(rollout, Prompting())[0]["content"].count("What is 2 + 2?") == 1
    assert rollout_from_json(json.loads(json.dumps(rollout_to_json(rollout)))).context == TURNS


def test_notes_stand_beside_the_numbers_of_their_workers():
    notes = ["It computes.", "It translates.", "It codes."]
    text = messages("How many?", [0, 2], notes=notes)[0]["content"]
    assert text.endswith("Models:\nModel 0: It computes.\nModel 2: It codes.")
    short = messages("How many?", 2, prompt_style="short", notes=["calculator", "coder"])
    assert short[0]["content"] == "calculator0, coder1, 5 steps."

    pool = [Player("a", lambda m: "b"), Player("c", lambda m: "d")]
    for player, note in zip(pool, ("adder", "poet")):
        player.note = note
    told, untold = (
        conductor_chat(Rollout("q", pool), Prompting("short", notes=notes))[0]["content"]
        for notes in (True, False)
    )
    assert (told, untold) == ("adder0, poet1, 5 steps.", "2 models, 5 steps.")


def test_a_further_round_shows_what_was_written_and_what_came_of_it():
    pool = [Player("a", lambda m: "41")]
    first = execute(Workflow([Step(0, "Solve it.", [])]), "How many?", pool)
    chat = messages("How many?", 1, previous=first)
    assert [turn["role"] for turn in chat] == ["user", "assistant", "user"]
    assert chat[1]["content"] == lists((0, "Solve it.", []))
    assert "41" in chat[2]["content"]


# The run


def test_a_worker_sees_the_question_the_steps_it_may_see_and_its_subtask():
    pool = [
        Player("a", lambda m: "one"),
        Player("b", lambda m: "two"),
        Player("c", lambda m: "three"),
    ]
    steps = [Step(0, "First.", []), Step(1, "Second.", []), Step(2, "Last.", [1])]
    rollout = execute(Workflow(steps), "Why?", pool)
    assert rollout.responses == ["one", "two", "three"]
    assert rollout.answer == "three"
    assert (rollout.calls, rollout.tokens_used, rollout.cost) == (3, 36, 1.5)
    assert rollout.names == ["a", "b", "c"]
    assert pool[0].asked == [[{"role": "user", "content": "Question:\nWhy?\n\nYour task:\nFirst."}]]
    assert pool[2].asked == [
        [
            {"role": "user", "content": "Question:\nWhy?\n\nYour task:\nSecond."},
            {"role": "assistant", "content": "two"},
            {"role": "user", "content": "Your task:\nLast."},
        ]
    ]


def test_steps_that_do_not_see_one_another_run_at_the_same_time():
    together = threading.Barrier(3)  # opens only once three threads wait

    def meet(messages):
        together.wait(timeout=60)
        return "met"

    pool = [Player(name, meet) for name in "abc"]
    rollout = execute(Workflow([Step(i, "Meet.", []) for i in range(3)]), "Who?", pool)
    assert rollout.responses == ["met"] * 3


def test_a_lost_call_loses_the_rollout_and_starts_no_step_that_needs_it():
    pool = [Player("a", lost), Player("b", lambda m: "b")]
    rollout = Rollout("Why?", pool, workflow=Workflow([Step(0, "x", []), Step(1, "y", [0])]))
    roll_out([rollout], judge=lambda problem, answer: "wrong")
    assert rollout.error == "step 0: nobody answers"
    assert rollout.right is None
    assert rollout.answer == ""
    assert pool[1].asked == []


def test_rollouts_are_judged_and_what_is_no_workflow_is_wrong():
    pool = [Player("a", lambda m: "42")]
    write = writer(lists((0, "Solve it.", [])), "I say 42.", lists((0, "Solve it.", [])))
    rollouts = [Rollout("q", pool, problem=gold) for gold in ("42", "42", "43")]
    ended = []

    def judge(gold, answer):
        return "" if gold == answer else f"not {answer}"

    roll_out(rollouts, write, judge=judge, on_end=ended.append)
    assert [r.right for r in rollouts] == [True, False, False]
    assert rollouts[1].workflow is None
    assert "model_id" in rollouts[1].invalid
    assert rollouts[2].failure == "not 42"
    assert len(ended) == 3


def test_a_rollout_that_takes_too_long_is_lost_and_its_late_reply_ignored():
    release, answered = threading.Event(), threading.Event()

    def wait(messages):
        release.wait(60)
        answered.set()
        return "late"

    slow = Rollout("q", [Player("a", wait)], workflow=one_step())
    quick = Rollout("q", [Player("b", lambda m: "b")], workflow=one_step())
    roll_out([slow, quick], timeout=0.2)
    release.set()
    assert answered.wait(60)
    assert slow.error == "it took longer than 0.2 s"
    assert slow.replies == [None]
    assert quick.answer == "b"


def test_a_lost_call_is_the_reason_even_if_time_runs_out_after_it():
    release = threading.Event()
    pool = [Player("a", lost), Player("b", lambda m: str(release.wait(60)))]
    rollout = Rollout("q", pool, workflow=Workflow([Step(0, "x", []), Step(1, "x", [])]))
    roll_out([rollout], timeout=0.2)
    release.set()
    assert rollout.error == "step 0: nobody answers"


def test_a_bug_in_a_worker_or_a_grader_stops_everything():
    workflow = one_step()
    with pytest.raises(ZeroDivisionError):
        execute(workflow, "q", [Player("a", lambda m: str(1 / 0))])
    with pytest.raises(ZeroDivisionError):
        roll_out(
            [Rollout("q", [Player("a", lambda m: "b")], workflow=workflow)],
            judge=lambda p, a: 1 / 0,
        )


def ask_judge(problem, answer):
    raise WorkerError("the judge is down")


def wrap(problem, answer):
    try:
        ask_judge(problem, answer)
    except WorkerError as e:
        raise ValueError("the grader failed") from e


def wrap_twice(problem, answer):
    try:
        wrap(problem, answer)
    except ValueError:
        raise RuntimeError("no verdict") from None  # Python still sets __context__.


def fail_while_handling(problem, answer):
    try:
        ask_judge(problem, answer)
    except WorkerError:
        raise KeyError("verdict") from ZeroDivisionError("another cause")


@pytest.mark.parametrize("judge", [ask_judge, wrap, wrap_twice, fail_while_handling])
def test_a_failed_call_of_the_grader_loses_the_rollout_and_nothing_else(judge):
    def judge_one(problem, answer):
        return judge(problem, answer) if problem == "hard" else ""

    pool = [Player("a", lambda m: "b")]
    workflow = one_step()
    hard, easy = (
        Rollout("q", pool, problem=problem, workflow=workflow) for problem in ("hard", "easy")
    )
    roll_out([hard, easy], judge=judge_one)
    assert (hard.error, hard.right, hard.failure) == ("the grader: the judge is down", None, "")
    assert easy.right
    assert easy.error is None
    hard.problem = None
    assert rollout_from_json(json.loads(json.dumps(rollout_to_json(hard)))) == without_pools(hard)


def test_a_users_grader_may_ask_a_judge_whose_calls_fail():
    judge = own_grader(lambda problem, response: ask_judge(problem, response)).check
    problem = Problem("1", "q", "b", "own")
    rollout = Rollout("q", [Player("a", lambda m: "b")], problem=problem)
    rollout.workflow = one_step()
    roll_out([rollout], judge=judge)
    assert rollout.error == "the grader: the judge is down"
    assert rollout.right is None


def test_a_wrapped_failure_of_a_workers_call_loses_the_rollout():
    def call(rollout, i):
        wrap("q", "b")

    rollout = Rollout("q", [Player("a", lambda m: "b")], workflow=one_step())
    roll_out([rollout], call=call)
    assert rollout.error == "step 0: the judge is down"


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_a_grader_that_ends_the_program_does_not_leave_it_hanging(error):
    def judge(problem, answer):
        raise error(7)

    rollout = Rollout("q", [Player("a", lambda m: "b")], workflow=one_step())
    with pytest.raises(RuntimeError, match=rf"raised {error.__name__}\(7\)"):
        roll_out([rollout], judge=judge)


@pytest.mark.parametrize("step", [Step(1, "x", []), Step(0, "x", [0])])
def test_a_workflow_by_hand_that_cannot_run_is_refused(step):
    with pytest.raises(
        ValueError, match="step 0 has no worker of the pool, or sees what is no earlier step"
    ):
        execute(Workflow([step]), "q", [Player("a", lambda m: "b")])


def test_calls_have_the_names_by_which_a_rerun_finds_them():
    pool = [Player("a", lambda m: "b")]
    workflow = Workflow([Step(0, "x", []), Step(0, "y", [])])
    roll_out([Rollout("q", pool, call_prefix="1/7", number=3, workflow=workflow)])
    assert sorted(pool[0].ids) == ["1/7/3/0/0", "1/7/3/0/1"]


# Further rounds


def test_what_does_not_parse_is_written_again_and_then_given_up():
    pool = [Player("a", lambda m: "b")]
    [rollout] = conduct(writer("hm", "hm", lists((0, "x", []))), [Rollout("q", pool)])
    assert rollout.answer == "b"
    assert rollout.number == 2
    [rollout] = conduct(writer("hm", "hm", "hm"), [Rollout("q", pool)])
    assert rollout.workflow is None
    assert rollout.invalid


def test_rounds_go_on_until_empty_lists_keep_the_answer():
    answers = iter(["41", "42"])
    pool = [Player("a", lambda m: next(answers))]
    second = 'model_id = [0]\nsubtasks = ["Check."]\naccess_list = [["all"]]'
    write = writer(lists((0, "Solve it.", [])), second, lists())
    [rollout] = conduct(write, [Rollout("q", pool)], extra_rounds=5)
    assert rollout.answer == "42"
    assert len(rollout.rounds()) == 3
    assert rollout.calls == 2
    said = [turn["content"] for turn in pool[0].asked[1]]  # "all" also shows the first round
    assert said == ["Question:\nq\n\nYour task:\nSolve it.", "41", "Your task:\nCheck."]
    assert len(write.chats[2]) == 5


def test_a_round_without_a_workflow_leaves_the_round_before():
    pool = [Player("a", lambda m: "41")]
    [rollout] = conduct(
        writer(lists((0, "x", [])), "hm", "hm", "hm"), [Rollout("q", pool)], extra_rounds=1
    )
    assert rollout.answer == "41"
    assert len(rollout.rounds()) == 1


# Writers


@pytest.fixture(scope="module")
def tiny():
    tokenizer = Tokenizer.from_pretrained(LAPTOP)
    torch.manual_seed(0)
    config = Config(
        len(tokenizer), 32, 64, 2, 2, 1, tie_word_embeddings=True, max_position_embeddings=256
    )
    return Qwen(config), tokenizer


def test_a_model_writes_the_same_on_any_number_of_ranks(tiny):
    model, tokenizer = tiny
    pool = [Player("a", lambda m: "b")] * 3
    questions = ("What is dos?", "What is 2 + 2?")

    def write(numbers):
        rollouts = [Rollout(question, pool, number=i) for question in questions for i in numbers]
        written = model_writer(model, tokenizer, Prompting("short", 5, 12), seed=5)(rollouts)
        return {(r.question, r.number): (r.tokens, r.written) for r in written}

    together = write(range(4))
    assert {**write(range(2)), **write(range(2, 4))} == together
    prompt = tokenizer.chat(messages("What is dos?", 3, prompt_style="short"))
    expected = generate(
        model, [prompt], 4, 12, eos_id=tokenizer.end_ids, seed=5, n_ids=len(tokenizer)
    )[0]
    assert [together["What is dos?", number][0] for number in range(4)] == [
        c.tokens for c in expected
    ]


def test_a_prompt_that_is_too_long_loses_its_rollout_alone(tiny):
    pool = [Player("a", lambda m: "b")]
    rollouts = [Rollout("word " * 300, pool), Rollout("What is dos?", pool)]
    written = list(model_writer(*tiny, Prompting("short", 5, 12))(rollouts))
    assert len(written) == 2
    assert "the Conductor can read" in rollouts[0].error
    assert rollouts[1].tokens


def test_a_worker_in_the_seat_gets_the_prompt_and_its_lost_call_is_an_error():
    seat = Player(
        "seat", lambda m: lists((0, "x", [])) if "Question: good" in m[0]["content"] else lost(m)
    )
    pool = [Player("a", lambda m: "b")]
    rollouts = roll_out(
        [Rollout("good", pool), Rollout("bad", pool)], worker_writer(seat, Prompting())
    )
    assert [(r.answer, r.error) for r in rollouts] == [("b", None), ("", "nobody answers")]


@pytest.mark.parametrize("given, doubled", [(1000, 2000), (6000, 8192), (9000, 9000)])
def test_a_worker_in_the_seat_may_write_twice_as_many_tokens(given, doubled):
    seat = Player("seat", lambda m: lists((0, "x", [])), max_tokens=given, temperature=0.2)
    pool = [Player("a", lambda m: "b")]
    roll_out([Rollout("q", pool)], worker_writer(seat, Prompting()))
    assert seat.overrides == [{"max_tokens": doubled}]


def test_a_worker_in_the_seat_reads_names_and_notes():
    pool = [Player("deep", lambda m: "b"), Player("quick", lambda m: "c")]
    pool[1].note = "It answers short questions."
    seat = Player("seat", lambda m: lists((1, "x", [])))
    roll_out([Rollout("q", pool)], worker_writer(seat, Prompting()))
    asked = seat.asked[0][0]["content"]
    assert asked.endswith("Models:\nModel 0: deep\nModel 1: quick, It answers short questions.")


def test_examples_of_ones_own_replace_the_prompts(tmp_path):
    example = {
        "question": "Why?",
        "plan": "One is enough.",
        "steps": [{"worker": 4, "subtask": "Say why.", "access": []}],
    }
    (tmp_path / "mine.json").write_text(json.dumps({"own": [example]}))
    examples = read_examples(str(tmp_path / "mine.json"))
    text = messages("How?", 3, examples=examples)[0]["content"]
    shown = 'Example question: Why?\n\nOne is enough.\nmodel_id = [1]\nsubtasks = ["Say why."]'
    assert shown in text
    assert text.count("Example question") == 1
    prompting = Prompting("ood", examples=examples)
    assert conductor_chat(Rollout("How?", [None] * 3), prompting)[0]["content"] == text
    save_prompting(str(tmp_path), prompting, "local", [])
    assert read_prompting(str(tmp_path))[0] == prompting

    wrong = [
        {"question": "Why?"},
        {"question": "Why?", "steps": example["steps"]},
        example | {"steps": [{"worker": "0", "subtask": "x", "access": []}]},
        example | {"steps": [{"worker": 0, "subtask": "x", "access": [0]}]},
        example | {"steps": []},
        "Why?",
    ]
    for examples in (5, [5], *([one] for one in wrong)):
        (tmp_path / "mine.json").write_text(json.dumps({"own": examples}))
        with pytest.raises(ValueError, match="an example is wrong"):
            read_examples(str(tmp_path / "mine.json"))


def test_examples_from_traces_are_right_and_vary():
    def rollout(question, *workers, right=True):
        steps = [Step(worker, f"Do {question}.", []) for worker in workers]
        written = f"Plan {question}.\n```python\n{as_lists(Workflow(steps))}\n```"
        names = [f"worker {worker}" for worker in workers]
        return Rollout(
            question, written=written, workflow=Workflow(steps), names=names, right=right
        )

    rollouts = [
        rollout("a", 0, 1),
        rollout("b", 0, 1),
        rollout("c", 2, 3, right=False),
        rollout("d", 1, 1, 2),
        rollout("d", 0),
        rollout("e", 0),
        rollout("f", 0, 1),
    ]
    examples = choose_examples(rollouts)
    assert [example["question"] for example in examples] == ["a", "d", "e", "b"]
    assert len(choose_examples(rollouts, n=9)) == 5
    assert examples[0] == {
        "question": "a",
        "plan": "Plan a.",
        "steps": [
            {"worker": worker, "subtask": "Do a.", "access": [], "wrote_all": False}
            for worker in (0, 1)
        ],
    }
    assert choose_examples([]) == []


def test_the_plan_of_an_example_is_what_follows_the_thoughts():
    thoughts = "<think>Perhaps model_id = [1]?</think>\n\n"
    written = f"{thoughts}One is enough.\n{as_lists(one_step())}"
    rollout = Rollout("q", written=written, workflow=one_step(), names=["a"], right=True)
    assert choose_examples([rollout])[0]["plan"] == "One is enough."


# Files and commands


def test_a_rollout_survives_json_and_its_stripped_copy_lacks_only_pool_and_problem():
    pool = [Player("a", lambda m: "41\x1b[31m")]
    first = execute(Workflow([Step(0, "Solve it.", [])]), "q", pool)
    rollout = execute(Workflow([Step(0, "Check.", [], True)]), "q", pool, previous=first)
    rollout.prompt_ids, rollout.tokens, rollout.logprobs, rollout.reward = [1, 2], [3], [-0.1], 0.5
    whole = rollout_from_json(json.loads(json.dumps(rollout_to_json(rollout, with_tokens=True))))
    assert whole == without_pools(rollout)
    assert rollout_from_json(rollout_to_json(rollout)).tokens == []
    assert rollout.tokens == [3]
    text = view(rollout)
    assert "Round 1" in text
    assert "Answer: 41" in text
    assert "\x1b" not in text


def test_conductor_json_says_how_a_conductor_is_asked(tmp_path):
    save_prompting(str(tmp_path), Prompting("short", 3, 64), "local", ["a", "b"])
    assert read_prompting(str(tmp_path)) == (Prompting("short", 3, 64), "local", ["a", "b"])
    (tmp_path / "conductor.json").write_text(
        '{"prompt": "short", "max_steps": 1000000, "max_new_tokens": 9}'
    )
    with pytest.raises(ValueError, match="max_steps"):
        read_prompting(str(tmp_path))
    (tmp_path / "conductor.json").write_text('{"style": "short", "named": true}')
    with pytest.raises(ValueError, match="earlier format"):
        read_prompting(str(tmp_path))


def pool_file(folder, *rows) -> str:
    values = [{"protocol": "openai", "base_url": "http://127.0.0.1:1"} | row for row in rows]
    path = folder / f"{len(os.listdir(folder))}.json"
    path.write_text(json.dumps(values))
    return str(path)


def test_a_conductor_without_notes_knows_its_pool_by_name_and_place(tmp_path):
    save_prompting(str(tmp_path), Prompting("short"), "mine.json", ["a", "b"])
    rows = [{"model": "x", "name": "a"}, {"model": "y", "name": "b"}]
    assert choose_pool(str(tmp_path), pool_file(tmp_path, *rows))
    for wrong in (rows[::-1], rows[:1], [*rows, {"model": "z"}], [{"name": 7}, {"model": ["b"]}]):
        with pytest.raises(ValueError, match="knows a, b, in this order, and --pool"):
            choose_pool(str(tmp_path), pool_file(tmp_path, *wrong))


def test_a_conductor_without_notes_knows_its_local_pool(monkeypatch):
    assert choose_pool(LAPTOP, "") == choose_pool(LAPTOP, "local") == "local"
    with pytest.raises(ValueError, match="--pool=local:pairs has calculator, junior calculator"):
        choose_pool(LAPTOP, "local:pairs")
    monkeypatch.setitem(workers.LOCAL, "local", [*workers.LOCAL["local"], "gardener"])
    for pool in ("", "local"):
        with pytest.raises(ValueError, match="generalist, gardener: name yours so"):
            choose_pool(LAPTOP, pool)


def test_a_tired_local_worker_may_stand_for_another_of_its_trade(tmp_path):
    save_prompting(str(tmp_path), Prompting("short"), "local:pairs", workers.LOCAL["local:pairs"])
    assert choose_pool(str(tmp_path), "local:tired") == "local:tired"


def test_a_conductor_with_notes_meets_any_pool_that_has_notes(tmp_path):
    save_prompting(str(tmp_path), Prompting("short", notes=True), "local", ["a", "b"])
    rows = [{"model": name, "note": f"{name} does it."} for name in "xyz"]
    pool = pool_file(tmp_path, *rows)
    assert choose_pool(str(tmp_path), pool) == pool
    with pytest.raises(ValueError, match="knows workers by their notes: give a note to w, v"):
        choose_pool(str(tmp_path), pool_file(tmp_path, *rows, {"model": "w"}, {"model": "v"}))


def run_command(*words, cwd=ROOT, stdin=""):
    """Run workflow.py as a user does; return (status, stdout, stderr)."""
    run = subprocess.run(
        [sys.executable, os.path.join(ROOT, "workflow.py"), *words],
        cwd=cwd,
        text=True,
        input=stdin,
        capture_output=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    return run.returncode, run.stdout, run.stderr


def command(*words, cwd=ROOT):
    """Run workflow.py in a fork, which need not import torch; return (status, stdout, stderr)."""
    return end_of(launch(*words, folders=[cwd], program=f"{ROOT}/workflow.py"))


def test_the_readmes_question_is_answered_as_it_says(tmp_path):
    with open(os.path.join(ROOT, "README.md"), encoding="utf-8") as file:
        [(question, shown)] = re.findall(
            r'workflow.py "([^"]+)"\n(Question:.*?)```', file.read(), re.DOTALL
        )
    status, out, err = run_command(question, cwd=tmp_path)
    assert status == 0
    assert out.startswith(re.sub(r"\d+\.\d s\s*$", "", shown)), err  # without the seconds
    assert err.count("the Conductor writes a workflow") == 1  # not once for every try it may have


def test_a_question_is_answered_right_after_the_clone(tmp_path):
    status, out, err = command("What is the atomic number of nickel - treinta?", cwd=tmp_path)
    assert status == 0
    assert "\nAnswer: -2\n" in out, err
    assert "--pool=FILE.json --conductor=WORKER" in err  # how to ask anything else


def test_a_question_may_come_from_standard_input_for_a_part_of_the_pool(tmp_path):
    words, stdin = ["--only=calculator,coder"], "What is 6 * 7?\n"
    status, out, err = run_command(*words, cwd=tmp_path, stdin=stdin)
    assert status == 0
    assert out.startswith("Question: What is 6 * 7?"), err
    assert "translator" not in out and "generalist" not in out


@pytest.fixture(scope="module")
def trace(tmp_path_factory) -> str:
    """Return the path of a trace file with two rollouts; the first is right."""
    pool = [Player("a", lambda m: "41")]
    rollouts = [execute(Workflow([Step(0, "Solve it.", [])]), f"q{i}", pool) for i in range(2)]
    rollouts[0].right = True
    file = tmp_path_factory.mktemp("traces") / "0.jsonl"
    file.write_text("".join(json.dumps(rollout_to_json(r)) + "\n" for r in rollouts))
    return str(file)


QUOTED = 'python workflow.py "a question"'
WRONG = {  # the words of a command line -> a part of the error message
    (): QUOTED,
    ("",): QUOTED,
    ("help",): "--help",
    ("server",): "use a command, serve or show",
    ("Serve",): "use a command, serve or show",
    ("serve", "me", "a", "poem"): QUOTED,
    ("shwo", "out.jsonl", "3"): "use a command, serve or show",
    ("how", "many", "apples?"): QUOTED,
    ("show",): "show takes a FILE",
    ("show", "me", "the", "capital"): QUOTED,
    ("show", "TRACE", "x"): "has lines 0 to 1, and no line 'x'",
    ("show", "TRACE", "1.5"): "no line '1.5'",
    ("show", "TRACE", "-1"): "no line '-1'",
    ("show", "TRACE", "99"): "no line '99'",
    ("show", "TRACE", "1", "2"): "show takes a FILE",
    ("show", "nowhere.jsonl"): "there is no file nowhere.jsonl",
    ("show", os.path.join(ROOT, "assets")): "a run's traces are in its folder traces/",
    ("show", "TRACES"): "such as traces/00000.jsonl",
    ("show", os.path.join(LAPTOP, "model.safetensors")): "holds no rollout",
    ("show", os.devnull): "there is no file",
    ("show", "--examples"): "show takes a FILE",
    ("What is 6 * 7?", "--chekpoint=x"): "did you mean --checkpoint",
    ("What is 6 * 7?", "--checkpoint=nowhere"): "--conductor=WORKER",
    ("What is 6 * 7?", "--only=nobody"): "the pool has calculator",
    ("What is 6 * 7?", "--conductor=coder,librarian"): "name one worker",
    ("What is 6 * 7?", "--pool=nowhere.json"): "nowhere.json",
    ("What is 6 * 7?", "--pool=today"): "--preset=own",
    ("What is 6 * 7?", "--extra_rounds=-1"): "--extra_rounds is at least 0",
    ("What is 6 * 7?", "--budget=-1"): "--budget is at least 0",
    ("What is 6 * 7?", "--budget=nan"): "--budget: invalid number value: 'nan'",
    ("What is 6 * 7?", "--temperature=-0.5"): "--temperature is at least 0",
    ("serve", "--extra_rounds=-1"): "--extra_rounds is at least 0",
}


@pytest.mark.parametrize("words, why", WRONG.items(), ids=range(len(WRONG)))
def test_what_a_user_does_wrong_is_said(words, why, trace, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    places = {"TRACE": trace, "TRACES": os.path.dirname(trace)}
    words = [places.get(word, word) for word in words]
    with pytest.raises((ValueError, OSError, SystemExit)) as caught:
        main(words)
    assert why in f"{caught.value} {capsys.readouterr().err}"


def test_a_reader_that_has_enough_is_no_error(trace):
    words = [sys.executable, os.path.join(ROOT, "workflow.py"), "show", trace]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait() == 0


def test_an_error_of_the_command_line_is_one_sentence(trace):
    status, out, err = command("show", trace, "99")
    assert (status, out, err.count("\n")) == (1, "", 1)


@pytest.mark.parametrize("question", ["show me it", "Serve?", "法国的首都是哪里"])
def test_a_question_may_begin_with_any_word(question):
    assert question_of([question]) == question


@pytest.mark.parametrize("price, bill", [(None, "$0.0000"), ([1, 2], "unknown cost")])
def test_an_llm_conducts_without_any_training_and_is_on_the_bill(price, bill, tmp_path):
    (tmp_path / "tools.py").write_text(
        "def write(messages):\n"
        "    return 'model_id = [1]\\nsubtasks = [\"Answer it.\"]\\naccess_list = [[]]'\n\n"
        "def answer(messages):\n    return 'forty-two'\n"
    )
    pool = [
        {"protocol": "python", "function": f"tools.py:{name}", "name": name}
        for name in ("write", "answer")
    ]
    pool[0]["price"] = price
    (tmp_path / "pool.json").write_text(json.dumps(pool))
    status, out, err = command("Why?", "--conductor=write", "--pool=pool.json", cwd=tmp_path)
    assert status == 0, err
    assert "Answer: forty-two" in out
    assert f"with the Conductor's: 2 calls, {bill}\n" in out


def test_show_lists_rollouts_and_shows_one(tmp_path):
    pool = [Player("a", lambda m: "41")]
    rollouts = [execute(Workflow([Step(0, "Solve it.", [])]), f"q{i}", pool) for i in range(2)]
    file = tmp_path / "0.jsonl"
    file.write_text("".join(json.dumps(rollout_to_json(r)) + "\n" for r in rollouts))
    assert len(show(str(file)).splitlines()) == 2
    assert "Question: q1" in show(str(file), 1)
    rollouts[0].right, rollouts[1].right, rollouts[1].failure = True, False, "answered 41"
    file.write_text("".join(json.dumps(rollout_to_json(r)) + "\n" for r in rollouts))
    assert [line.split()[1] for line in show(str(file)).splitlines()] == ["right", "wrong"]
    assert "Right: True" in show(str(file), 0)
    assert "Right: False. answered 41" in show(str(file), 1)
    file.write_text("{}\n")
    with pytest.raises(ValueError, match="line 0, holds no rollout"):
        show(str(file))
    file.write_text(json.dumps(rollout_to_json(rollouts[0])) + '\n{"question":')
    assert "Question: q0" in show(str(file), 0)  # The cut-off line comes later, so it is not read.
    with pytest.raises(ValueError, match="line 1, holds no rollout"):
        show(str(file))
    file.write_text("")
    with pytest.raises(ValueError, match="is empty"):
        show(str(file), 0)


def test_show_writes_examples_of_several_files(tmp_path, trace, capsys):
    main(["show", "--examples", trace, trace])
    (tmp_path / "mine.json").write_text(capsys.readouterr().out)
    [example] = read_examples(str(tmp_path / "mine.json"))
    assert example["question"] == "q0"


def test_show_says_that_no_rollout_can_be_an_example(tmp_path):
    file = tmp_path / "0.jsonl"
    file.write_text(json.dumps(rollout_to_json(Rollout("q", right=False))) + "\n")
    with pytest.raises(ValueError, match="no rollout in these files is right"):
        main(["show", "--examples", str(file)])


def test_a_call_can_be_replaced():
    seen = []

    def call(rollout, i):
        seen.append((rollout.question, i))
        return call_worker(rollout, i)

    roll_out(
        [Rollout("q", [Player("a", lambda m: "b")], workflow=one_step())],
        call=call,
    )
    assert seen == [("q", 0)]
