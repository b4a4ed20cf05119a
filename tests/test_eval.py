"""Tests of eval.py: its systems, the tables of a comparison, and the command line.

Most workers are Python functions, and most expected numbers were worked out by hand.
"""

import json
import os
import shutil
import subprocess
import sys
import threading
from dataclasses import replace

import pytest

import eval as evaluation
from eval import SYSTEMS, Problem, Settings, Setup, load, measure, random_workflow, table
from players import Player, lost
from train_runs import end_of, launch
from workers import Reply, load_name, load_pool
from workflow import Rollout, Step, Workflow

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

PROBLEMS = [
    Problem("p/0", "6 * 7?", "42", "exact", "sum"),
    Problem("p/1", "The answer?", "42", "exact", "riddle"),
]


def play(name, pool, worker=0, **settings):
    system = SYSTEMS.get(name) or load_name(f"{ROOT}/assets/rivals.py:{name}")
    setup = Setup(Settings(**settings), pool, worker, PROBLEMS * 4)
    return system.make(setup)(PROBLEMS, [pool] * len(PROBLEMS), "test/0")


def test_a_single_worker_sees_the_bare_question():
    pool = [Player("a", lambda m: "42", max_tokens=100)]
    rollouts = play("workers", pool)
    assert [r.right for r in rollouts] == [True, True] and rollouts[0].calls == 1
    assert [{"role": "user", "content": "6 * 7?"}] in pool[0].asked
    play("context", pool)
    assert pool[0].overrides[-1] == {"max_tokens": 500}


def test_consensus_takes_what_most_answers_agree_on_and_pays_for_all():
    answers = iter(["41", "42", "42", "40", "42"] * 2)
    for rollout in play("consensus", [Player("a", lambda m: next(answers))]):
        assert (
            rollout.answer == "42" and rollout.right and rollout.calls == 5 and rollout.cost == 2.5
        )


def test_a_vote_is_lost_where_a_call_was():
    pool = [Player("a", lambda m: "42"), Player("b", lost)]
    for rollout in play("smoothie", pool):
        assert rollout.error and rollout.right is None


def test_smoothie_takes_the_answer_that_is_most_like_the_others():
    said = {"a": "forty two", "b": "forty two or so", "c": "no idea"}
    pool = [Player(name, lambda m, name=name: said[name]) for name in said]
    assert {r.answer for r in play("smoothie", pool)} <= {"forty two", "forty two or so"}


def test_reflection_and_the_mixture_of_agents_are_workflows():
    pool = [Player("a", lambda m: "42"), Player("b", lambda m: "41")]
    reflected = play("reflect", pool, worker=1)[0]
    assert [step.access for step in reflected.workflow.steps] == [
        [],
        [0],
        [0, 1],
        [0, 1, 2],
        [0, 1, 2, 3],
    ]
    assert set(reflected.names) == {"b"}
    mixed = play("moa", pool)[0]
    assert mixed.names[:2] == ["a", "b"] and mixed.workflow.steps[-1].access == [0, 1]


def test_the_router_learns_which_worker_to_ask():
    pool = [
        Player("a", lambda m: "42" if "6 * 7" in m[0]["content"] else "?"),
        Player("b", lambda m: "42" if "answer" in m[0]["content"] else "?"),
    ]
    assert [r.right for r in play("router", pool)] == [True, True]


def test_masrouter_and_trinity_learn_from_rewards_and_say_how_far_they_are(monkeypatch, capsys):
    pool = [Player("a", lambda m: "42"), Player("b", lambda m: "?")]
    monkeypatch.setattr(evaluation, "LINE_EVERY", 0.0)
    laptop = os.path.join(ROOT, "assets", "laptop")
    for name in ("masrouter", "trinity"):
        constants = load_name(f"{ROOT}/assets/rivals.py:{name}").make.__globals__
        for key, value in {"CHECKPOINT": laptop, "GENERATIONS": 2, "STEPS": 10}.items():
            monkeypatch.setitem(constants, key, value)
        rollouts = play(name, pool)
        assert len(rollouts) == 2 and all(r.right is not None and r.calls for r in rollouts)
    lines = capsys.readouterr().err.splitlines()
    assert any(line.startswith("masrouter learns: 5 of 10, ETA ") for line in lines)
    assert any(line.startswith("trinity evolves: 1 of 2, ETA ") for line in lines)


def test_short_work_prints_no_progress_and_other_ranks_none_at_all(monkeypatch, capsys):
    list(evaluation.progress("short", range(3)))
    monkeypatch.setattr(evaluation, "LINE_EVERY", 0.0)
    monkeypatch.setenv("RANK", "1")
    list(evaluation.progress("of rank 1", range(3)))
    assert capsys.readouterr().err == ""


def test_a_worker_in_the_seat_reads_names_and_notes_and_writes_the_workflow():
    text = 'model_id = [1]\nsubtasks = ["Solve it."]\naccess_list = [[]]'
    pool = [Player("seat", lambda m: text), Player("b", lambda m: "42")]
    pool[1].note = "It knows the answer."
    assert [(r.names, r.right) for r in play("seat", pool)] == [(["b"], True)] * 2
    prompt = pool[0].asked[0][-1]["content"]
    assert "Model 0: seat" in prompt and "Model 1: b, It knows the answer." in prompt
    assert all(r.invalid for r in play("seat", pool, only="seat"))  # Model 1 is not allowed.


def test_random_workflows_obey_their_limits():
    rng = evaluation.random.Random(0)
    for _ in range(200):
        workflow = random_workflow(rng, [2, 5], max_steps=3)
        assert 1 <= len(workflow.steps) <= 3 and {step.worker for step in workflow.steps} <= {2, 5}


def test_ablations_edit_what_the_conductor_wrote():
    pool = load_pool("local")
    problems = load("laptop", "test", 9)  # one of each kind
    shares = {}
    for name in ("conductor", "no-subtasks", "no-access", "one-worker"):
        rollouts = SYSTEMS[name].make(Setup(Settings(), pool, 0, []))(
            problems, [pool] * len(problems), name
        )
        shares[name] = measure(rollouts)["accuracy"]
        steps = [step for rollout in rollouts for step in rollout.workflow.steps]
        assert name != "no-subtasks" or {step.subtask for step in steps} == {"Solve the question."}
        assert name != "no-access" or not any(step.access for step in steps)
        assert name != "one-worker" or {step.worker for step in steps} == {0}
    assert shares["conductor"] > 0.8 > max(shares["no-access"], shares["one-worker"])


def test_a_conductor_may_name_only_some_workers():
    write = lambda rollouts: (vars(r).update(written=text) or r for r in rollouts)
    text = 'model_id = [1]\nsubtasks = ["Solve it."]\naccess_list = [[]]'
    pool = [Player("a", lambda m: "42"), Player("b", lambda m: "42")]
    for only, right in (("b", [True, True]), ("a", [False, False])):
        system = evaluation.conductor(write, only=only)
        assert [r.right for r in system(PROBLEMS, [pool] * 2, "test")] == right


def test_a_system_of_a_users_file_shares_the_modules_of_the_running_program(tmp_path):
    """The user's `import eval` gets the running program, so there is one table of graders."""
    (tmp_path / "mine.py").write_text(
        "import sys\nimport eval\n"
        "def make(setup):\n"
        "    assert eval is sys.modules['__main__'] and 'own' in eval.GRADERS\n"
        "    return eval.planned(eval.plan_at_random)\n"
        "mine = eval.System(make)\n"
        "def grade(problem, response):\n    return True\n"
    )
    words = ["--systems=mine.py:mine", "--limit=3", "--grader=mine.py:grade"]
    run = launch(*words, folders=[tmp_path], program=f"{ROOT}/eval.py")
    status, out, err = end_of(run)
    assert status == 0 and "\nmine " in out, err


# Measure


def judged(right, cost=0.5, error=None, kind="sum", name="p"):
    reply = Reply("42", 10, 2, cost, 0.0)
    return Rollout(
        "q",
        problem=Problem(name, "q", "42", "exact", kind),
        names=["a"],
        workflow=Workflow([Step(0, "x", [])]),
        replies=[None if error else reply],
        error=error,
        right=None if error else right,
    )


def test_a_row_has_the_numbers_of_one_system():
    row = measure(
        [judged(True), judged(False), judged(True, kind="riddle"), judged(None, error="lost")]
    )
    assert row["accuracy"] == pytest.approx(2 / 3)
    assert (row["lost"], row["calls"], row["tokens"]) == (1, 1, 12)
    assert row["dollars"] == 0.5
    assert row["sum"] == 0.5 and row["riddle"] == 1.0
    assert measure([judged(True, cost=None)])["dollars"] is None


def test_the_interval_is_over_problems():
    row = measure(
        [judged(right, name=name) for right, name in ((True, "p"), (False, "p"), (True, "q"))]
    )
    assert row["accuracy"] == pytest.approx(2 / 3)
    # The problems' shares are 0.5 (p) and 1 (q). The interval adds shares of 0, 0, 1 and 1, and the
    # variance of all six is 0.2014.
    assert row["±"] == pytest.approx(1.96 * (0.2014 / 6) ** 0.5, abs=1e-3)


def test_a_table_tells_unknown_from_absent():
    text = table({"a": {"accuracy": 0.5, "dollars": None}, "b": {"accuracy": 0.25}}, "laptop, %")
    lines = text.splitlines()
    assert lines[0].split() == ["laptop,", "%", "accuracy", "dollars"]
    assert lines[1].split() == ["a", "50.0", "?"] and lines[2].split() == ["b", "25.0"]


def test_seconds_are_those_of_the_longest_chain_of_steps():
    """Steps 0 and 1 run in parallel, step 2 sees both, and a second round follows."""
    steps = [Step(0, "x", []), Step(0, "x", []), Step(0, "x", [0, 1])]
    replies = [Reply("a", 1, 1, 0.0, seconds) for seconds in (2.0, 3.0, 4.0)]
    first = Rollout("q", workflow=Workflow(steps), replies=replies)
    assert evaluation.latency(first) == 7.0
    again = Rollout("q", workflow=Workflow(steps[:1]), replies=replies[:1], previous=first)
    assert evaluation.latency(again) == 9.0
    assert evaluation.latency(Rollout("q", invalid="no lists")) == 0.0


def of_worker(right: str, n_repeats: int = 1, cost=0.5) -> list[Rollout]:
    """Return a rollout for each character of `right`: "1" is right, "0" is wrong, "." is lost.

    The rollouts go through the problems p0, p1, … n_repeats times.
    """
    n_problems = len(right) // n_repeats
    rollouts = []
    for i, letter in enumerate(right):
        error = "lost" if letter == "." else None
        rollouts.append(judged(letter == "1", cost, error, name=f"p{i % n_problems}"))
    return rollouts


def test_a_paired_difference_is_over_the_problems_that_both_answered():
    row = evaluation.paired_difference(of_worker("111."), of_worker("1001"))
    assert row["vs best"] == pytest.approx(2 / 3)
    # The differences are 0, 1 and 1, with a variance of 1/3.
    assert row["shows"] == pytest.approx(2.8 * (1 / 3) ** 0.5 / 3**0.5)
    assert 0 <= row["from"] <= 2 / 3 <= row["to"] <= 1
    same = evaluation.paired_difference(of_worker("11"), of_worker("00"))
    assert same == {"vs best": 1.0, "from": None, "to": None, "shows": None}


def test_the_interval_of_a_difference_is_the_bootstraps_and_never_changes():
    rows = [
        evaluation.paired_difference(of_worker("1011" * 100), of_worker("0010" * 100))
        for _ in range(2)
    ]
    assert rows[0] == rows[1] and rows[0]["vs best"] == 0.5
    error = rows[0]["shows"] / 2.8  # half of the differences are 1, half are 0
    assert error == pytest.approx(0.5 / 20, rel=0.01)
    assert rows[0]["from"] == pytest.approx(0.5 - 1.96 * error, abs=0.005)
    assert rows[0]["to"] == pytest.approx(0.5 + 1.96 * error, abs=0.005)


def test_repeats_of_a_problem_count_as_one_problem():
    row = evaluation.paired_difference(of_worker("1110", 2), of_worker("0000", 2))
    assert row["vs best"] == pytest.approx(0.75)  # shares 1 and 0.5, with a variance of 0.125
    assert row["shows"] == pytest.approx(2.8 * 0.125**0.5 / 2**0.5)


def test_the_best_worker_is_also_chosen_on_the_other_half():
    """Each worker solves one half only, so the best worker on one half solves none of the other."""
    problems = [judged(True, name=f"p{i}") for i in range(40)]
    halves = [evaluation.half_of(rollout) for rollout in problems]
    assert 10 < sum(halves) < 30
    first = of_worker("".join(str(1 - half) for half in halves))
    second = of_worker("".join(str(half) for half in halves))
    chosen = evaluation.best_by_other_half({"first": first, "second": second})
    assert sorted(r.problem.id for r in chosen) == sorted(r.problem.id for r in problems)
    assert measure(chosen)["accuracy"] == 0.0


def test_headroom_tells_luck_from_skill():
    """Two workers answer four problems twice each; one answer to the last problem is lost."""
    nan = float("nan")
    first = [[1, 1, 0, 1], [1, 0, 0, 1]]
    second = [[0, 1, 1, 1], [0, 1, 0, nan]]
    right = evaluation.np.array([first, second])
    rows = evaluation.headroom(right)
    assert rows["oracle"]["accuracy"] == pytest.approx(5 / 6)  # repeat 0: 1 1 1, repeat 1: 1 1 0
    assert rows["either of two workers"]["accuracy"] == pytest.approx(5 / 6)
    assert rows["either of one worker's two answers"]["accuracy"] == pytest.approx(4 / 6)
    assert "either of one worker's two answers" not in evaluation.headroom(right[:, :1])


def test_best_of_n_spends_what_the_conductor_spends():
    pool = [Player("a", lambda m: "41"), Player("b", lambda m: "42")]
    played = {
        "conductor": of_worker("1111", cost=1.2),
        "workers a": of_worker("0000"),
        "workers b": of_worker("1101"),
    }
    setup = Setup(Settings(), pool, 0, [], played)
    rollouts = SYSTEMS["best-of-n"].make(setup)(PROBLEMS, [pool] * 2, "test/0")
    assert [(r.names, r.right) for r in rollouts] == [(["b"] * 3, True)] * 2  # 3 = ceil(1.2 / 0.5)


@pytest.mark.parametrize(
    "conductor, worker, n",
    [
        ({"dollars": 0.005, "calls": 3.0}, {"dollars": 0.002, "calls": 1.0}, 3),
        ({"dollars": 0.006, "calls": 9.0}, {"dollars": 0.002, "calls": 1.0}, 3),
        ({"dollars": 0.0, "calls": 1.68}, {"dollars": 0.0, "calls": 1.0}, 2),
        ({"dollars": None, "calls": 2.2}, {"dollars": 0.1, "calls": 1.0}, 3),
        ({"dollars": 0.001, "calls": 2.0}, {"dollars": 0.01, "calls": 1.0}, 1),
        ({"dollars": None, "calls": None}, {"dollars": None, "calls": None}, 1),
    ],
)
def test_how_many_answers_cost_the_same(conductor, worker, n):
    assert evaluation.answers_for_the_same(conductor, worker) == n


def test_a_legend_explains_the_rows_and_columns_that_a_table_has(capsys):
    row = measure([judged(True, cost=None)]) | {"shows": 0.2, "a random kind": 0.5, "b": 0.5}
    evaluation.print_with_legend(table({"oracle": row, "context a": {"accuracy": 0.5}}, "title"))
    legend = capsys.readouterr().out.split("\n\n")[-1]
    explained = [line.partition(":")[0] for line in legend.splitlines() if line[0] != " "]
    assert explained == ["context", "oracle", "±", "shows", "lost", "seconds", "?"]


def test_no_table_is_wider_than_120_columns():
    kinds = {f"{kind}+a kind with a long name": 0.5 for kind in "abcdefghijkl"}
    row = measure([judged(True)]) | {"vs best": -0.5, "from": -0.6, "to": 0.1, "shows": 0.2}
    rows = {"workers " + "very " * 40: row | kinds, "oracle": {"accuracy": 1.0}}
    text = table(rows, "a benchmark with a long name, 100,000 problems, %")
    assert max(map(len, text.splitlines())) <= 120
    for kind in kinds:
        assert text.count(kind) == 1
    assert text.count("oracle") == 1  # Only its accuracy is shown.


def test_the_papers_numbers_are_those_of_the_pools_setting(capsys):
    constrained = Player("a", None, max_tokens=4096)
    free = Player("b", None, max_completion_tokens=65_535)
    evaluation.print_paper("math500", [constrained])
    text = capsys.readouterr().out
    assert "Table 7: Gemini 2.5 Pro " in text and "85.3" in text and "Table 1:" not in text
    evaluation.print_paper("gpqa", [constrained, free])
    text = capsys.readouterr().out
    assert "Table 1: GPT-5" in text and "Table 11: GPT-5 conducts three workers" in text
    assert "86.4" in text and "Table 8:" not in text
    evaluation.print_paper("mine.jsonl", [free])
    assert capsys.readouterr().out == ""


def test_equal_answers_to_a_problem_are_judged_once():
    seen = []

    def check(problem, response):
        seen.append(response)
        return ""

    evaluation.GRADERS["counted"] = evaluation.Grader("", (), check, None)
    try:
        judge = evaluation.grade_once()
        problems = [Problem(name, "q", "a", "counted") for name in "ab"]
        threads = [threading.Thread(target=judge, args=(problem, "x")) for problem in problems * 8]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        del evaluation.GRADERS["counted"]
    assert seen == ["x", "x"]  # once for each problem


# The command line


def test_own_workers_questions_and_grader_make_a_table(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(evaluation.GRADERS, "own", None)
    (tmp_path / "tools.py").write_text(
        "def up(messages):\n    return messages[-1]['content'].upper()\n\n"
        "def fine(problem, response):\n    return response.endswith(problem.answer)\n"
    )
    (tmp_path / "pool.json").write_text(
        '[{"protocol": "python", "function": "tools.py:up", "name": "up"}]'
    )
    rows = [{"question": f"Say it loud: {word}", "answer": word.upper()} for word in ("yes", "no")]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--systems=workers", "--pool=pool.json", "--benchmarks=mine.jsonl"]
    evaluation.main([*words, "--grader=tools.py:fine", "--out=numbers.json"])
    out = capsys.readouterr().out
    assert "workers up" in out and "best single worker" in out
    assert max(map(len, out.splitlines())) <= 120
    numbers = json.loads((tmp_path / "numbers.json").read_text())
    assert numbers["mine.jsonl, workers up"]["accuracy"] == 1.0
    assert numbers["mine.jsonl, best single worker by other half"]["vs best"] == 0.0
    traces = (tmp_path / "numbers.jsonl").read_text().splitlines()
    assert len(traces) == 2 and json.loads(traces[0])["right"] is True


@pytest.mark.parametrize("edit", ["[:2]", " * 2"])
def test_a_system_returns_one_rollout_for_each_problem(tmp_path, monkeypatch, capsys, edit):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "import eval\n"
        "random = eval.planned(eval.plan_at_random)\n"
        f"few = eval.System(lambda setup: lambda *args: random(*args){edit})\n"
    )
    with pytest.raises(SystemExit) as end:
        evaluation.main(["--systems=mine.py:few", "--limit=3", "--out=ev"])
    n = len("abc"[:2] if edit == "[:2]" else "abcabc")
    assert end.value.code == 2 and not os.path.exists("ev.json")
    assert f"laptop/few: {n} rollouts for 3 problems" in capsys.readouterr().err


@pytest.mark.parametrize("out", ["ev", "ev.json", "ev.jsonl"])
def test_the_two_files_of_out_differ_in_their_ending_alone(tmp_path, monkeypatch, out):
    monkeypatch.chdir(tmp_path)
    settings = Settings(systems="workers,moa", worker="coder", limit=3, out=out)
    for _ in range(2):
        evaluation.compare_systems(settings)
    assert sorted(os.listdir()) == ["ev.json", "ev.jsonl"]
    assert "laptop, moa" in json.loads((tmp_path / "ev.json").read_text())
    rows = [json.loads(line) for line in (tmp_path / "ev.jsonl").read_text().splitlines()]
    assert [row["system"] for row in rows] == ["workers coder"] * 3 + ["moa"] * 3


def test_out_never_holds_half_a_file(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("no space left")

    monkeypatch.setattr(evaluation, "rollout_to_json", fail)
    with pytest.raises(OSError):
        evaluation.compare_systems(Settings(systems="random", limit=1, out=f"{tmp_path}/ev"))
    assert not {"ev.json", "ev.jsonl"} & {*os.listdir(tmp_path)}


def test_best_of_n_plays_last_and_says_where_a_vote_is_degenerate(capsys):
    systems = "best-of-n,conductor,workers"
    evaluation.compare_systems(Settings(systems=systems, worker="coder", limit=9))
    text = capsys.readouterr().out
    assert "laptop/best-of-n is degenerate" in text
    assert text.index("\nworkers coder") < text.index("\nbest-of-n ") < text.index("\nbest-of-n:")

    # Two rounds of one call each, with different responses, are not degenerate.
    first, last = (Rollout("q", replies=[Reply(text, 1, 1, 0.0)]) for text in "ab")
    evaluation.print_faults("two rounds", [replace(last, previous=first)])
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "words, said",
    [
        ([], "no replies are kept"),
        (["--budget=1"], "the replies in data/replies"),
        (["--replay=mine"], "the replies in mine"),
        (["prepare"], "no replies are kept"),
        (["prepare", "--pool=local"], "the replies in data/replies"),
    ],
)
def test_an_interrupt_says_whether_replies_are_kept(monkeypatch, words, said):
    def interrupt(settings):
        raise KeyboardInterrupt

    monkeypatch.setattr(evaluation, "compare_systems", interrupt)
    monkeypatch.setattr(evaluation, "prepare", interrupt)
    with pytest.raises(SystemExit, match=f"interrupted: .*{said}"):
        evaluation.main(words)


@pytest.mark.parametrize(
    "words, why",
    [
        (["--systems=conducter"], "there is no conducter, only conductor, "),
        (["--systems=workers,random,workers"], "--systems: two systems are named workers"),
        (["--systems=mine.py:system"], "no file 'mine.py'; expected FILE.py:NAME"),
        (
            ["--systems=workers", "--worker=nobody"],
            "no such worker: nobody; the pool has calculator",
        ),
        (["--systems=workers,conductor", "--only=nobody"], "no such worker: nobody"),
        (["--systems=workers,conductor", "--checkpoint=broken"], "model.safetensors"),
        (["--benchmarks=mine.jsonl"], "mine.jsonl, line 2: grader has to be one of exact, "),
        (["--benchmarks=mathematics"], "no problems 'mathematics'"),
        (["--benchmarks=none.jsonl"], "none.jsonl is missing"),
        (
            ["--benchmarks=mine.jsonl", "--grader=mine.py:grade"],
            "no file 'mine.py'; expected FILE.py:NAME",
        ),
        (["--pool=today", "--systems=workers"], "OPENAI_API_KEY"),
        (["--limit=0"], "--limit is from 1 on"),
        (["--seed=-1"], "--seed is from 0 on"),
        (["--systems=workers,best-of-n"], "best-of-n needs the rows of conductor"),
        (["--out=nowhere/ev.json"], "--out=nowhere/ev.json: expected a name in a folder you can"),
        (["--out=./"], "--out=./: expected a name in a folder you can write to"),
        (["--out=mine"], "--out=mine: mine.jsonl exists; choose another name, or move"),
        (["--replay=."], "Is a directory: '.'"),
        (["--sandbox=docker"], "--sandbox=docker: there are bwrap, none"),
        (["--prompt_style=none"], "--prompt_style=none: there are ood, in, mixed, zero-shot"),
        (["prepar"], "there is no command 'prepar', only prepare"),
        (["prepare", "--limit=9"], "prepare does not use --limit"),
        (["prepare", "--pool=local", "--worker=coder"], "prepare does not use --worker"),
        (["--limits=9"], "unknown flag --limits=9; did you mean --limit"),
    ],
)
def test_what_is_wrong_is_said_before_anybody_is_asked(tmp_path, monkeypatch, capsys, words, why):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(evaluation, "play_all", None)
    mine = '\n{"question": "q", "answer": "a"}\n'
    (tmp_path / "mine.jsonl").write_text(mine)
    laptop = os.path.join(ROOT, "assets", "laptop")
    shutil.copytree(laptop, "broken", ignore=shutil.ignore_patterns("model.safetensors"))
    (tmp_path / "broken" / "model.safetensors").write_text("damaged")
    with pytest.raises(SystemExit) as end:
        evaluation.main(words)
    assert end.value.code == 2 and why in capsys.readouterr().err
    assert (tmp_path / "mine.jsonl").read_text() == mine


def test_results_appear_when_they_are_complete_and_replace_nothing(tmp_path, monkeypatch, capsys):
    """An interrupted evaluation leaves no results; those of a complete one are not overwritten."""
    monkeypatch.chdir(tmp_path)
    words = ["--systems=workers", "--worker=coder", "--limit=3", "--out=ev"]

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as context, pytest.raises(SystemExit, match="interrupted"):
        context.setattr(evaluation, "print_paper", interrupt)
        evaluation.main(words)
    assert not os.path.exists("ev.json") and not os.path.exists("ev.jsonl")

    evaluation.main(words)
    texts = [(tmp_path / name).read_text() for name in ("ev.json", "ev.jsonl")]
    for name in ("ev.json", "ev.jsonl"):
        with pytest.raises(SystemExit) as end:
            evaluation.main(words)
        assert end.value.code == 2 and f"{name} exists" in capsys.readouterr().err
        assert (tmp_path / name).read_text() == texts.pop(0)
        os.remove(name)


@pytest.mark.parametrize("command", ["", "prepare"])
def test_an_evaluation_that_lost_everything_has_failed(tmp_path, monkeypatch, command):
    (tmp_path / "tools.py").write_text("def broken(messages):\n    raise OSError('no disk')\n")
    row = {"protocol": "python", "function": "tools.py:broken", "attempts": 1}
    (tmp_path / "pool.json").write_text(json.dumps([row]))
    monkeypatch.chdir(tmp_path)
    if command:
        monkeypatch.setattr(evaluation, "check_sandbox", lambda: None)
        monkeypatch.setattr(evaluation, "load", lambda *_: PROBLEMS)
        words = ["prepare", "--pool=pool.json"]
    else:
        words = ["--systems=workers,moa", "--pool=pool.json", "--limit=3", "--out=ev"]
    with pytest.raises(SystemExit, match="every answer was lost, the first by: .*no disk"):
        evaluation.main(words)
    assert not os.path.exists("ev.json") and not os.path.exists("data/paper.jsonl")


def test_a_reader_that_ends_early_sees_no_error():
    """Write to a pipe that its reader has closed, as head does in `python eval.py | head -1`."""
    program = [sys.executable, "eval.py", "--systems=workers", "--worker=coder", "--limit=3"]
    reading, writing = os.pipe()
    os.close(reading)
    run = subprocess.run(program, cwd=ROOT, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert run.returncode == 1 and run.stderr == ""


def test_results_are_kept_where_nobody_reads_the_table(tmp_path):
    out = f"--out={tmp_path}/ev"
    program = [sys.executable, "eval.py", "--systems=workers", "--worker=coder", "--limit=3", out]
    reading, writing = os.pipe()
    os.close(reading)
    run = subprocess.run(program, cwd=ROOT, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert run.returncode == 0 and run.stderr == ""
    assert [*json.loads((tmp_path / "ev.json").read_text())][0] == "laptop, workers coder"


def test_an_edited_file_pays_for_its_new_questions_alone(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "def answer(messages):\n    open('calls', 'a').write('.')\n    return 'a'\n"
    )
    row = {"protocol": "python", "function": "mine.py:answer", "name": "a", "price": [1, 1]}
    (tmp_path / "pool.json").write_text(json.dumps([row | {"params": {"max_tokens": 9}}]))
    questions = ["one", "two"]
    monkeypatch.chdir(tmp_path)

    def calls_of_evaluation(benchmark):
        rows = [{"question": q, "answer": "a", "grader": "exact"} for q in questions]
        (tmp_path / "k.jsonl").write_text("\n".join(map(json.dumps, rows)))
        (tmp_path / "calls").write_text("")
        words = ["--systems=workers", "--pool=pool.json", "--budget=1", "--replay=replies"]
        evaluation.main([*words, f"--benchmarks={benchmark}"])
        return len((tmp_path / "calls").read_text())

    assert calls_of_evaluation("k.jsonl") == 2
    assert calls_of_evaluation(f"{tmp_path}/k.jsonl") == 0
    questions.insert(0, "zero")
    assert calls_of_evaluation("./k.jsonl") == 1


def test_a_pool_that_costs_needs_a_budget_and_says_how_much(tmp_path, capsys):
    row = {"protocol": "openai", "base_url": "http://127.0.0.1:9/v1", "model": "m"}
    (tmp_path / "pool.json").write_text(json.dumps([{**row, "price": [1000, 2000]}]))
    with pytest.raises(SystemExit):
        evaluation.main(["--systems=workers", f"--pool={tmp_path}/pool.json"])
    err = capsys.readouterr().err
    assert "--budget=" in err and "$" in err
