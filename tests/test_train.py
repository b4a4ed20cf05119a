"""Tests of training: a short run, the parts of a run, what ends a run, and messages before a run.

Parts such as rewards and learning rates are compared with results worked out by hand.
"""

import itertools
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from eval import ABLATIONS, Problem, load
from grpo import packed_logprobs
from model import Config, Qwen, configure
from train import (
    PRESETS,
    SHAPES,
    Call,
    Run,
    Settings,
    bytes_for,
    check_longest_prompt,
    check_reward,
    discard_empty,
    files_of,
    find_reason_to_stop,
    first_rounds,
    lock,
    log,
    needs_recompute,
    open_folder,
    preflight,
    random_lesson,
    read_command,
    reward,
    schedule,
    second_rounds,
    tiny_conductor,
    trajectories,
    warm_start,
)
from train_runs import (
    ENV,
    ROOT,
    Workers,
    end_of,
    interrupt,
    launch,
    metrics,
    timeless,
    traces,
    train,
    trained,
    wait_until,
    weights,
)
from workers import LOCAL, Reply
from workflow import Prompting, Rollout, Step, Workflow, WorkflowError, as_lists, parse
from workflow import read_prompting, rollout_from_json, show

WORKFLOW = Workflow([Step(0, "Find it.", []), Step(1, "Check it.", [0], wrote_all=True)])
POOL = [None] * 5  # stands for five workers in tests that call none
SHORT = Prompting("short")

# ---- A short run ---------------------------------------------------------------------------------


@pytest.mark.parametrize("iteration", [0, 1])
def test_the_metrics_of_a_run_are_what_its_traces_say(iteration):
    out, _ = trained()
    rows, line = traces(out, iteration), metrics(out)[iteration]
    problems = {problem.id: problem for problem in load("laptop", "train")}
    for row in rows:
        problem = problems[row["problem_id"]]
        assert (row["question"], row["expected"]) == (problem.question, problem.answer)
        try:
            steps = parse(row["written"], len(LOCAL["local"])).steps
        except WorkflowError:
            assert row["reward"] == 0 and row["workflow"] is None and row["invalid"]
            continue
        assert row["reward"] == (1 if row["answer"] == problem.answer else 0.5)
        assert row["calls"] == len(steps) == len(row["replies"])
        assert row["names"] == [LOCAL["local"][step.worker] for step in steps]

    def mean(values):
        values = [*values]
        return pytest.approx(sum(values) / len(values)) if values else None

    ran = [row for row in rows if row["workflow"]]
    assert line["iteration"] == iteration and len(rows) == 9 * 8
    assert line["lost"] == 0 and line["error"] is None
    assert line["reward"] == mean(row["reward"] for row in rows)
    assert line["accuracy"] == mean(row["reward"] == 1 for row in rows)
    assert line["parsed"] == mean(row["workflow"] is not None for row in rows)
    assert line["steps"] == mean(len(row["replies"]) for row in ran)
    assert line["calls"] == sum(row["calls"] for row in ran)
    groups = [rows[i : i + 8] for i in range(0, 72, 8)]
    assert line["flat"] == mean(len({row["reward"] for row in group}) == 1 for group in groups)
    names = [name for row in ran for name in row["names"]]
    assert line["workers"] == {
        name: pytest.approx(names.count(name) / len(names)) for name in names
    }
    for kind, accuracy in line["by_kind"].items():
        assert accuracy == mean(
            row["reward"] == 1 for row in rows if problems[row["problem_id"]].kind == kind
        )
    assert line["rollout_s"] > 0 < line["learning_s"]
    assert line["gap"] < 1e-4  # between the sampler's log-probabilities and the trainer's


def test_a_run_says_how_it_goes_and_leaves_a_conductor_to_ask(tmp_path):
    out, said = trained()
    assert "warm start" in said and "2/2 reward" in said
    n_parameters = sum(p.numel() for p in Qwen.from_pretrained(f"{out}/checkpoint").parameters())
    assert f"{n_parameters:,} parameters" in said
    table = {line.split("  ")[0] for line in said.splitlines()}
    assert {"conductor", *(f"workers {name}" for name in LOCAL["local"]), "random"} <= table
    with open(f"{out}/test.json") as file:
        assert 0 <= json.load(file)["laptop, conductor"]["accuracy"] <= 1
    assert f"--checkpoint={out}/checkpoint" in said
    prompting, pool, names = read_prompting(f"{out}/checkpoint")
    assert (prompting.prompt_style, pool, names) == ("short", "local", [*LOCAL["local"]])
    assert metrics(out)[0]["held_out"] is not None  # because each iteration saves a checkpoint
    assert metrics(out)[0]["parsed"] > 0.5  # The warm start teaches the format.
    assert len(show(f"{out}/traces/00000.jsonl").splitlines()) == 72
    with open(f"{out}/traces/00000.jsonl") as file:
        assert rollout_from_json(json.loads(next(file))).reward is not None


# ---- The parts of a run --------------------------------------------------------------------------


def of(right, workflow=WORKFLOW, cost=0.0, **more):
    replies = [Reply("", 1, 1, cost)] if workflow else []
    return Rollout("q", right=right, workflow=workflow, replies=replies, **more)


@pytest.mark.parametrize(
    "rollout, cost_weight, expected",
    [
        (of(False, None), 0.0, 0.0),
        (of(False), 0.0, 0.5),
        (of(True), 0.0, 1.0),
        (of(None, error="a lost call"), 0.0, None),
        (of(True, cost=0.02), 0.0, 1.0),
        (of(True, cost=0.02), 5.0, 1.0),
        (of(False, None), 5.0, 0.0),
        (of(True, cost=None), 0.0, 1.0),
        (of(True, cost=None), 5.0, None),  # An unknown price is not 0.
    ],
)
def test_the_reward(rollout, cost_weight, expected):
    assert reward(rollout, Settings(cost_weight=cost_weight)) == (
        expected and pytest.approx(expected)
    )


def a_run(n_problems=6, n_workers=5):
    problems = [Problem(str(i), f"question {i}", "", "same") for i in range(n_problems)]
    shares = {"same": torch.ones(())}
    return Run(["worker"] * n_workers, problems, [], None, None, None, None, 0, shares)


def asked_in(run, settings, iteration):
    """Return the questions that an iteration asks, as rollouts without workflows."""
    return [*itertools.islice(first_rounds(run, settings, iteration), settings.n_questions)]


def test_first_rounds_take_the_next_questions_and_begin_again():
    settings = Settings(n_questions=4, ask_solved_probability=1.0)
    asked = [asked_in(a_run(), settings, iteration) for iteration in range(3)]
    assert [r.question[-1] for r in itertools.chain(*asked)] == [*"012345012345"]
    assert all(r.workers == [0, 1, 2, 3, 4] for r in asked[0])
    names = [r.call_prefix for r in itertools.chain(*asked)]
    # A resumed run finds the replies on disk by these prefixes.
    assert names == [f"1/{i // 4}/{i}" for i in range(12)]


def test_first_rounds_have_no_end_and_depend_on_the_seed_and_the_iteration_alone():
    settings = Settings(n_questions=2)
    one, other = (first_rounds(a_run(), settings, 3) for _ in range(2))
    assert [*itertools.islice(one, 50)] == [*itertools.islice(other, 50)]
    prefixes = [r.call_prefix for r in itertools.islice(one, 50)]
    assert len({*prefixes}) == 50  # so that no two questions share replies


def test_every_question_of_a_small_file_is_asked_in_time():
    run = a_run(80)
    run.wrong_share = {"same": torch.tensor(0.5)}
    asked = {r.question for i in range(60) for r in asked_in(run, Settings(), i)}
    assert len(asked) == 80


def test_what_is_always_answered_is_seldom_asked():
    run = a_run()
    run.problems = [Problem(str(i), f"question {i}", "", "same", "ab"[i % 2]) for i in range(200)]
    run.wrong_share = {"a": torch.tensor(0.0), "b": torch.tensor(0.5)}
    kinds = [r.problem.kind for i in range(50) for r in asked_in(run, Settings(), i)]
    assert (
        0.1 < kinds.count("a") / kinds.count("b") < 0.35
        and len(kinds) == 50 * Settings().n_questions
    )


def test_with_subset_a_question_has_some_of_the_workers():
    asked = asked_in(a_run(), Settings(n_questions=300, subset=2), 0)
    assert {len(r.workers) for r in asked} == {2, 3, 4, 5}
    assert {worker for r in asked for worker in r.workers} == {0, 1, 2, 3, 4}
    assert all(r.workers == sorted({*r.workers}) for r in asked)
    assert asked == asked_in(a_run(), Settings(n_questions=300, subset=2), 0)
    assert asked != asked_in(a_run(), Settings(n_questions=300, subset=2, seed=2), 0)


def test_half_of_the_questions_get_a_second_round_with_an_answer_of_the_first():
    groups = [
        [
            replace(of(right), question=f"q{i}", number=j, call_prefix=f"1/{i}")
            for j, right in enumerate((True, False, None))
        ]
        for i in range(8)
    ]
    # A second round cannot continue a rollout that has no workflow.
    groups[1] = [replace(r, workflow=None) for r in groups[1]]
    for iteration, expected in ((0, ["q0", "q4", "q5"]), (1, ["q2", "q3", "q6", "q7"])):
        asked = second_rounds(groups, iteration)
        assert [r.question for group in asked for r in group[:1]] == expected
        for r in itertools.chain(*asked):
            assert r.previous.right is not None and r.previous.question == r.question
            assert (r.call_prefix, r.written, r.workflow) == (r.previous.call_prefix, "", None)


def test_each_second_round_continues_its_own_first_round():
    first = [of(right, number=i, call_prefix="q") for i, right in enumerate((True, None, False))]
    [again] = second_rounds([first], 0)
    assert [(r.number, r.previous is first[r.number]) for r in again] == [(0, True), (2, True)]
    expected = [[first[0], again[0]], [first[1]], [first[2], again[1]]]
    [found] = trajectories([first, again])
    assert [list(map(id, rounds)) for rounds in found] == [list(map(id, r)) for r in expected]


def test_a_reward_of_ones_own(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def short(rollout):\n    return rollout.right - 0.1 * len(rollout.workflow.steps)\n"
        "def huge(rollout):\n    return -1e300\n"
    )
    settings = Settings(reward=f"{tmp_path}/mine.py:short")
    assert reward(of(True), settings) == pytest.approx(0.8)
    assert reward(of(None, error="a lost call"), settings) is None
    faulty = of(True, workflow=None, problem=Problem("p/1", "", "", "same"))
    with pytest.raises(
        ValueError, match="mine.py:short failed on a rollout of p/1: AttributeError"
    ):
        reward(faulty, settings)
    with pytest.raises(ValueError, match="mine.py:huge failed .*ValueError: it returned -1e"):
        reward(faulty, Settings(reward=f"{tmp_path}/mine.py:huge"))
    (tmp_path / "mine.py").write_text("def short(rollout): return 7")
    assert reward(of(True), settings) == pytest.approx(0.8)  # as when the run began
    (tmp_path / "two.py").write_text("def reward(rollout, settings): return 7")
    with pytest.raises(TypeError, match="missing a required argument: 'settings'"):
        check_reward(f"{tmp_path}/two.py:reward")
    (tmp_path / "getter.py").write_text("import operator\nreward = operator.attrgetter('right')")
    check_reward(f"{tmp_path}/getter.py:reward")  # Python cannot tell its parameters.
    with pytest.raises(ValueError, match="no file"):
        check_reward("none.py:f")


def test_a_shuffled_pool_is_a_pool_of_its_own():
    run = a_run()
    run.pool = [*"abcde"]
    asked = asked_in(run, Settings(n_questions=300, subset=4, shuffle=True, notes=True), 0)
    assert {len(r.pool) for r in asked} == {4, 5}
    assert all(r.workers == [*range(len(r.pool))] and {*r.pool} <= {*"abcde"} for r in asked)
    assert {r.pool[0] for r in asked} == {*"abcde"}


def test_lessons_with_notes_find_the_numbers_of_workers():
    problem = load("laptop", "train", 1)[0]
    settings = Settings(notes=True, shuffle=True, subset=4)
    notes = [f'Tell it "Do it."; it is a {name}' for name in LOCAL["local"]]
    pool = [SimpleNamespace(note=note) for note in notes]
    prompting = replace(SHORT, notes=True)
    rng, sizes = random.Random(0), set()
    for _ in range(50):
        chat, completion = random_lesson(problem, rng, pool, prompting, settings)
        shown = re.findall(r"it is a (\w+?)(\d)", chat[0]["content"])
        sizes.add(len(shown))
        assert [int(number) for _, number in shown] == [*range(len(shown))]
        name_of = {int(number): name for name, number in shown}
        steps = parse(completion, len(shown)).steps
        used = ", ".join(f"{name_of[step.worker]}{step.worker}" for step in steps)
        assert f"\nUse {used}\n" in completion
    assert sizes == {4, 5}
    plain = random_lesson(problem, rng, pool, prompting, replace(settings, init_from="model"))[1]
    assert plain.startswith("model_id")  # A pretrained model needs no plan.


def test_the_learning_rate_rises_and_falls():
    rates = [schedule(step, 100, 0.03) for step in range(100)]
    assert rates[:3] == pytest.approx([1 / 3, 2 / 3, 1]) and rates[51] == pytest.approx(
        0.5, abs=0.01
    )
    assert all(a >= b for a, b in itertools.pairwise(rates[2:])) and 0 < rates[-1] < 0.001


def test_ablations_edit_the_workflow():
    told = ABLATIONS["subtasks"](WORKFLOW)
    assert {step.subtask for step in told.steps} == {"Solve the question."} and told.steps[
        1
    ].access == [0]
    blind = ABLATIONS["access"](WORKFLOW)
    assert [(step.access, step.wrote_all) for step in blind.steps] == [([], False)] * 2
    assert [step.subtask for step in blind.steps] == ["Find it.", "Check it."]


def test_lessons_of_the_warm_start_are_random_workflows():
    problem = load("laptop", "train", 1)[0]
    settings = Settings(warm_extensions=True)
    rng, seconds, kept, sizes = random.Random(0), 0, 0, set()
    for _ in range(200):
        chat, completion = random_lesson(problem, rng, POOL, SHORT, settings)
        models = chat[0]["content"].partition(",")[0]
        named = (
            [int(word) for word in models.split()[1:]]
            if models.startswith("Models")
            else [0, 1, 2, 3, 4]
        )
        steps = parse(completion, named, allow_empty=True).steps
        is_second = len(chat) > 2
        assert steps or is_second
        seconds, kept = seconds + is_second, kept + (not steps)
        sizes |= {len(named)}
        assert problem.question in chat[1]["content"]
    assert 20 < seconds < 65 and 5 < kept < 40 and sizes == {2, 3, 4, 5}
    assert as_lists(Workflow([])) not in random_lesson(problem, rng, POOL, SHORT, Settings())[1]


def test_a_step_of_the_warm_start_is_made_of_rows_within_the_token_budget(monkeypatch):
    """The trained weights do not depend on how many rows the budget splits a batch into."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        problems, ends, rows = load("laptop", "train", 99), [], []
        monkeypatch.setattr(
            "train.packed_logprobs",
            lambda model, groups, *rest: (
                rows.append(sum(len(prompt) + len(text) for prompt, [text] in groups)),
                packed_logprobs(model, groups, *rest),
            )[1],
        )
        for budget in (8192, 300, 1):
            settings = Settings(token_budget=budget, warm_steps=2)
            torch.manual_seed(0)
            model, tokenizer = tiny_conductor(problems, POOL, SHORT, settings)
            run = Run(POOL, problems, [], tokenizer, model, None, SHORT, 0, {})
            warm_start(run, settings)
            ends.append((len(rows), max(rows), model.model.layers[0].mlp.up_proj.weight))
            rows.clear()
    finally:
        dist.destroy_process_group()
    (whole, _, one), (few, most, another), (each, _, third) = ends
    assert whole == 2 and 2 < few < each == 64 and most <= 300
    assert torch.allclose(one, another, atol=1e-4) and torch.allclose(one, third, atol=1e-4)


def test_workers_of_other_problems_are_not_told_what_only_the_laptops_coder_obeys():
    problem = Problem("mine.jsonl/1", "Who wrote Emma?", "Jane Austen", "short")
    settings = Settings(data="mine.jsonl")
    told = "".join(
        random_lesson(problem, random.Random(i), POOL, SHORT, settings)[1] for i in range(100)
    ).lower()
    assert "solve the question" in told
    assert not any(word in told for word in ("vowels", "reverse", "capitals"))
    long = replace(problem, question="Who wrote Emma? " * 99)  # too long for a plan to repeat
    assert random_lesson(long, random.Random(0), POOL, SHORT, settings)[1].count("Emma") < 9


# ---- What ends a run, or part of it --------------------------------------------------------------


def test_a_run_that_stops_within_an_iteration_loses_nothing(tmp_path):
    """The run saves a checkpoint. Resumed, it repeats no call and ends like an unstopped run."""
    workers = Workers(tmp_path)
    whole, stopped = f"{tmp_path}/whole", f"{tmp_path}/stopped"
    flags = workers.flags("--iterations=4", "--save_every=2", "--n_rollouts=8")
    train(*flags, f"--out={whole}")
    calls, workers.calls = workers.calls, 0

    def stop(reason, *more):
        status, _, err = end_of(launch(*flags, f"--out={stopped}", *more))
        assert status == 1 and reason in err and "--resume" in err and "Traceback" not in err
        lines = metrics(stopped)
        assert all(line["lost"] == 0 for line in lines)
        assert len(os.listdir(f"{stopped}/traces")) == len(lines)
        assert os.path.exists(f"{stopped}/checkpoints/{len(lines):05d}/state")
        return len(lines)

    n_calls = [line["calls"] for line in metrics(whole)]
    workers.n_before_expiry = n_calls[0] + 3
    assert stop("HTTP 401") == 1
    workers.n_before_expiry = float("inf")
    dollars = 0.0002 * (n_calls[1] + n_calls[2] // 2)  # a call costs 0.0002
    assert stop("the budget is spent", "--resume", f"--budget={dollars}") == 2

    train(*flags, f"--out={stopped}", "--resume")
    assert workers.calls == calls
    assert weights(stopped) == weights(whole)
    assert [*map(timeless, metrics(stopped))] == [*map(timeless, metrics(whole))]


def groups_of(outcomes):
    """Return groups of four rollouts: a lost one for each x, a right one for each dot."""
    rollouts = [
        of(True) if c == "." else of(None, error=f"lost {i}") for i, c in enumerate(outcomes)
    ]
    return [rollouts[i : i + 4] for i in range(0, len(rollouts), 4)]


# `calls` has two characters per call: the worker's name, then x (failed) or a dot (answered).
@pytest.mark.parametrize(
    "outcomes, calls, expected",
    [
        ("........", "a.b.a.b.", ""),
        ("..x.x.x.", "axbxa.b.axbx", ""),  # a few calls fail
        ("xxx.xxx.", "a.b.", "6 of 8 rollouts were lost, the first by: lost 0"),
        ("xxx.xx..", "a.b.", ""),
        ("x...x...", "a." + "bx" * 7, ""),
        ("x...x...", "a." + "bx" * 8 + "a.", "the last eight calls of b all failed"),
        ("x...x...", "a." + "bx" * 8 + "b.", ""),
    ],
)
def test_what_is_too_much_to_be_lost(outcomes, calls, expected, monkeypatch):
    monkeypatch.setattr("train.all_gather", lambda mine: mine)
    run = a_run()
    run.pool = [type("Worker", (), {"budget": None})]
    pairs = zip(calls[::2], calls[1::2])
    made = [Call(float(i), worker, end == ".") for i, (worker, end) in enumerate(pairs)]
    assert find_reason_to_stop(run, groups_of(outcomes), made[::-1]).startswith(expected)
    assert bool(expected) == bool(find_reason_to_stop(run, groups_of(outcomes), made))


def test_a_rollout_whose_workers_are_stuck_is_lost_not_waited_for(tmp_path):
    workers = Workers(tmp_path)
    workers.open.clear()
    flags = workers.flags("--iterations=1", "--workflow_timeout=0.2", "--n_test=0")
    status, _, err = end_of(launch(*flags, f"--out={tmp_path}/out"))
    assert status == 1 and "rollouts were lost" in err and "longer than" in err
    assert not os.listdir(f"{tmp_path}/out/traces") and not metrics(f"{tmp_path}/out")


def test_ctrl_c_ends_a_run_at_once_and_leaves_nothing_if_nothing_has_begun(tmp_path):
    """The run is interrupted while it waits for its first reply. The worker never sends one."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        worker = {"protocol": "openai", "model": "m", "price": [0, 0]}
        worker["base_url"] = f"http://127.0.0.1:{silent.getsockname()[1]}/v1"
        (tmp_path / "pool.json").write_text(json.dumps([worker]))
        run = launch("--preset=laptop", f"--pool={tmp_path}/pool.json", f"--out={tmp_path}/out")
        silent.accept()
        assert os.listdir(tmp_path / "out") == ["lock"]
        assert interrupt(run) == "interrupted\n"
    assert not os.path.exists(tmp_path / "out")


def test_ctrl_c_ends_a_run_that_can_go_on(tmp_path):
    workers = Workers(tmp_path)
    whole, out = f"{tmp_path}/whole", f"{tmp_path}/out"
    flags = workers.flags("--iterations=2", "--save_every=1")
    train(*flags, f"--out={whole}")

    workers.open.clear()
    workers.calls = 0
    asking = launch(*flags, f"--out={out}")
    wait_until(lambda: workers.calls > 0, asking)
    assert interrupt(asking) == "interrupted; the same command with --resume goes on\n"
    workers.open.set()
    saving = launch(*flags, f"--out={out}", "--resume")
    wait_until(lambda: os.path.exists(f"{out}/checkpoints/unfinished"), saving)
    assert "--resume" in interrupt(saving)

    train(*flags, f"--out={out}", "--resume")
    assert weights(out) == weights(whole)


def test_ctrl_c_while_torch_is_imported_ends_without_a_word():
    command = [sys.executable, "train.py", "--preset=laptop"]
    run = subprocess.Popen(command, cwd=ROOT, env=ENV, stderr=subprocess.PIPE)
    while "libtorch" not in Path(f"/proc/{run.pid}/maps").read_text():
        assert run.poll() is None
    run.send_signal(signal.SIGINT)
    # A shell reports this status as 130.
    assert (run.communicate()[1], run.returncode) == (b"", -signal.SIGINT)


def test_three_gradients_that_are_not_finite_end_the_run(tmp_path):
    status, _, err = end_of(
        launch(
            "--preset=laptop",
            f"--init_from={trained()[0]}/checkpoint",
            "--lr=1e30",
            "--iterations=9",
            "--n_questions=8",
            "--n_rollouts=8",
            "--n_test=0",
            f"--out={tmp_path}/out",
        )
    )
    assert status == 1 and "not finite" in err and "Traceback" not in err
    assert "--out" in err and f"--init_from={tmp_path}/out/checkpoint" in err
    assert len(metrics(f"{tmp_path}/out")) < 9


# ---- Messages before a run starts ----------------------------------------------------------------


def test_a_run_with_everything_of_ones_own(tmp_path):
    """The run starts from a trained Conductor, so it has no warm start. It has no KL, either.

    Four of the 20 questions are held out, and the Conductor is measured on them at the end.
    """
    workers = Workers(tmp_path)
    with open(workers.data, "a") as file:
        for i in range(8, 20):
            file.write(
                json.dumps({"question": f"What is {i} + 7?", "answer": "A", "grader": "same"})
                + "\n"
            )
    flags = workers.flags("--prompt_style=short", "--iterations=1", "--n_test=9")
    status, _, err = end_of(launch("--preset=own", *flags[1:], f"--out={tmp_path}/none"))
    # The preset's completions of up to 1,024 tokens do not fit into the tiny model's context.
    assert status == 1 and "cannot read the 29 tokens" in err
    status, _, err = end_of(
        launch("--preset=own", *flags[1:], f"--out={tmp_path}/none", "--dry_run")
    )
    assert status == 1 and "cannot read the 29 tokens" in err
    assert not os.path.exists(f"{tmp_path}/none")
    said = train("--preset=own", *flags[1:], f"--out={tmp_path}/out", "--max_new_tokens=96")
    assert metrics(f"{tmp_path}/out")[0]["lost"] == 0
    assert "16 problems, workers: left, right" in said and "warm start" not in said
    with open(f"{tmp_path}/out/test.jsonl") as file:
        assert [json.loads(row)["system"] for row in file].count("conductor") == 4
    assert not os.path.exists(f"{tmp_path}/out/reference")
    assert f"QUESTION --checkpoint={tmp_path}/out/checkpoint --pool={tmp_path}" in said


def test_own_runs_name_all_that_is_missing_at_once():
    status, out, err = end_of(launch("--preset=own", "--dry_run", "--reward=none.py:f"))
    assert status == 1 and "Traceback" not in err
    assert "trial update" not in out  # no model is named, so none is tried
    for missing in ("--init_from", "--pool", "--data", "--reward"):
        assert missing in err, missing


def test_a_grader_that_fails_is_known_before_anything_is_paid(tmp_path):
    workers = Workers(tmp_path)
    (tmp_path / "mine.py").write_text(
        "def grade(problem, response):\n    return problem['answer']\n"
    )
    (tmp_path / "mine.jsonl").write_text('{"question": "q", "answer": "a"}\n')
    status, _, err = end_of(
        launch(
            *workers.flags(
                f"--out={tmp_path}/out",
                f"--data={tmp_path}/mine.jsonl",
                f"--grader={tmp_path}/mine.py:grade",
            )
        )
    )
    assert (
        status == 1
        and "the grader failed on mine.jsonl/1: TypeError" in err
        and "Traceback" not in err
    )
    assert workers.calls == 0


def test_a_folder_in_which_no_run_began_keeps_what_is_in_it(tmp_path, monkeypatch):
    monkeypatch.setattr("train.LOCKS", [None])
    out = tmp_path / "out"
    out.mkdir()
    mine = out / ".gitkeep"
    for file in (mine, out / "lock", out / "replies"):
        file.touch()
    discard_empty(out)
    assert os.listdir(out) == [".gitkeep"]
    mine.unlink()
    (out / "replies").write_text("a paid reply")
    discard_empty(out)
    assert os.listdir(out) == ["replies"]
    (out / "replies").unlink()
    discard_empty(out)
    assert not out.exists()


def test_an_out_that_is_a_file_is_a_sentence(tmp_path):
    file = tmp_path / "mine.jsonl"
    file.touch()
    with pytest.raises(ValueError, match="--out=.*mine.jsonl cannot be written: File exists"):
        lock(file / "lock")


def test_an_iteration_without_a_valid_workflow_says_so(tmp_path, capsys):
    settings = Settings(out=str(tmp_path))
    metrics = {"iteration": 0, "error": None}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    log(settings, metrics | {"parsed": 0.5}, 0.0)
    assert "no completion was a valid workflow" not in capsys.readouterr().out
    log(settings, metrics | {"parsed": 0.0}, 0.0)
    assert f"{tmp_path}/traces/00000.jsonl has them" in capsys.readouterr().out
    dist.destroy_process_group()


def test_the_longest_question_is_the_one_with_the_most_bytes():
    tokenizer = SimpleNamespace(chat=lambda chat: str(chat))
    config = Config(max_position_embeddings=300)
    short, dense = Problem("1", "x" * 40, "", "same"), Problem("2", "é" * 30, "", "same")
    with pytest.raises(ValueError, match="cannot read .* tokens of its prompt.* has 300; .* éé"):
        check_longest_prompt(config, tokenizer, [short, dense], POOL, SHORT)


def test_wandb_that_fails_and_examples_that_are_too_long_are_named_at_once(tmp_path, monkeypatch):
    def fail(**_):
        raise RuntimeError("no API key")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=fail))
    with pytest.raises(ValueError, match="--wandb: RuntimeError: no API key"):
        open_folder(Settings(out=f"{tmp_path}/out", wandb=True), 0)
    # Without this file, the same command can be run again.
    assert not os.path.exists(f"{tmp_path}/out/settings.json")

    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 1)
    file = tmp_path / "examples.json"
    steps = [{"worker": 0, "subtask": "Do it.", "access": []}] * 2
    for examples in ([], [{"question": "q", "plan": "p", "steps": steps}]):
        file.write_text(json.dumps({"mine": examples}))
        flags = dict(pool="", device="cpu", out=f"{tmp_path}/out", prompt_style="ood")
        settings = Settings(**flags, examples=str(file), max_steps=1)
        assert "--examples: none has at most --max_steps=1 steps" in preflight(settings, "")[2]


def test_a_pool_that_costs_money_needs_a_budget(tmp_path):
    workers = Workers(tmp_path)
    flags = [
        flag for flag in workers.flags(f"--out={tmp_path}/out") if not flag.startswith("--budget")
    ]
    status, _, err = end_of(launch(*flags))
    assert status == 1 and "--budget=DOLLARS" in err and "$" in err and workers.calls == 0
    assert not os.path.exists(f"{tmp_path}/out")


def test_a_dry_run_says_what_a_run_takes_and_does_its_largest_step(tmp_path):
    """A dry run prints what a run takes even if the model and the API keys are missing."""
    said = train("--preset=laptop", "--dry_run", "--n_questions=8", f"--out={tmp_path}/out")
    for word in ("calls", "at no cost", "GiB", "disk", "the trial update took", "to learn;"):
        assert word in said, word
    assert re.search(r"the run takes about \d+:\d\d:\d\d, .*: 160 iterations of", said)
    assert "GPU" not in said and said.count(" to ") >= 2 and not os.path.exists(f"{tmp_path}/out")
    pool = [
        {
            "protocol": "openai",
            "base_url": "https://example.com/v1",
            "model": "m",
            "price": [1, 2],
            "params": {"max_tokens": 99},
            "api_key_env": "A_KEY_THAT_IS_NOT_SET",
        }
    ]
    (tmp_path / "pool.json").write_text(json.dumps(pool))
    status, said, err = end_of(
        launch(
            "--preset=large",
            "--dry_run",
            f"--pool={tmp_path}/pool.json",
            "--budget=9",
            f"--out={tmp_path}/out",
        )
    )
    assert status == 1 and "7.616 billion" in said and "$" in said
    assert "--init_from=Qwen" in err and "api_key_env" in err and "Traceback" not in err


def test_a_dry_run_refuses_a_tokenizer_of_another_model(tmp_path):
    """The tokenizer's largest id has no embedding in the model."""
    problems = load("laptop", "train", 50)
    model, tokenizer = tiny_conductor(problems, POOL, SHORT, Settings())
    shape = replace(model.config, vocab_size=len(tokenizer) - 1)
    tokenizer.save_pretrained(tmp_path)
    Qwen(shape).save_pretrained(tmp_path)
    flags = ("--preset=laptop", f"--init_from={tmp_path}", f"--out={tmp_path}/out")
    status, _, err = end_of(launch(*flags, "--dry_run"))
    assert status == 1 and f"ids up to {len(tokenizer) - 1}" in err and "Traceback" not in err


def usage_error_of(capsys, *flags):
    """Assert that the flags are a usage error, and return the message."""
    with pytest.raises(SystemExit) as end:
        read_command(["--preset=laptop", *flags])
    assert end.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    "gpus, ranks, preset",
    [
        ([], 2, "laptop"),
        ([80], 2, "laptop"),
        ([80, 80], 2, "large"),
        ([24, 24], 2, "small"),
        ([80, 80], 1, "small"),
        ([80], 1, "small"),
    ],
)
def test_the_bare_command_takes_what_fits_the_device(gpus, ranks, preset, monkeypatch, capsys):
    cards = [type("Card", (), {"total_memory": size * 10**9}) for size in gpus]
    monkeypatch.setattr("torch.cuda.device_count", lambda: len(cards))
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda i: cards[i])
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    settings = read_command([])
    assert settings.preset == preset and f"--preset={preset}" in capsys.readouterr().out
    assert (settings.device == "cpu") == (preset == "laptop") and settings.out == f"out/{preset}"
    assert settings.pool == "local"

    # A tiny model is trained on the CPU, unless the user says otherwise.
    assert read_command(["--preset=laptop"]).device == "cpu"
    assert read_command(["--device=cpu"]).preset == "laptop"
    if len(gpus) >= ranks:
        assert read_command(["--preset=laptop", "--device=cuda"]).device == "cuda"
    else:
        assert "--device=cuda: there are" in usage_error_of(capsys, "--device=cuda")


def test_lora_takes_ten_times_the_learning_rate():
    flags = ["--preset=small", "--lora_rank=16"]
    assert read_command(flags).lr == pytest.approx(5e-4)
    assert read_command([*flags, "--lr=3e-4"]).lr == 3e-4


@pytest.fixture
def two_gpus(monkeypatch):
    """Make train.py calculate as if it ran on two GPUs of 80 GB."""
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    monkeypatch.setattr("train.device_bytes", lambda device: 79.2 * 2**30)
    monkeypatch.setattr("model.compute_dtype", lambda device: torch.bfloat16)


@pytest.mark.parametrize(
    "flags, low, high",
    [
        ([], 70, 77),  # the paper's settings
        (["--n_questions=8"], 65, 79),  # more questions take more memory only while sampling
        (["--lora_rank=16", "--n_questions=8"], 25, 45),
        (["--offload"], 20, 40),
        (["--iterations=2", "--n_questions=2", "--n_test=8"], 70, 77),  # the README's trial of 7B
    ],
)
def test_what_7b_takes_of_two_gpus(flags, low, high, two_gpus):
    settings = Settings(**PRESETS["large"], device="cuda")
    configure(settings, flags)
    recompute = needs_recompute(settings, Config())
    assert recompute and low < bytes_for(settings, Config(), recompute) / 2**30 < high


def test_a_small_model_recomputes_nothing_where_memory_suffices(two_gpus, monkeypatch):
    shape = SHAPES["Qwen/Qwen2.5-0.5B-Instruct"]
    settings = Settings(**PRESETS["small"], device="cuda")
    assert not needs_recompute(settings, shape)
    monkeypatch.setattr("train.device_bytes", lambda device: 12 * 2**30)
    assert needs_recompute(settings, shape)


def test_a_state_is_written_in_files_that_fit_into_memory_one_by_one(two_gpus):
    state = {str(i): torch.empty(300 << 20, device="meta") for i in range(5)}  # 600 MiB a rank
    assert [*files_of(state).values()] == [1, 2, 3, 4, 5]
    state = {str(i): torch.empty(25 << 20, device="meta") for i in range(15)}  # 50 MiB a rank
    assert [*files_of(state).values()] == [1] * 5 + [2] * 5 + [3] * 5


def test_only_what_a_user_names_costs_money():
    for settings in (Settings(**values) for values in PRESETS.values()):
        assert settings.pool in ("", *LOCAL) and settings.budget == 0


@pytest.mark.parametrize(
    "flag, sentence",
    [
        ("--save_every=0", "--save_every=0: expected 1 or more"),
        ("--iterations=0", "--iterations=0: expected 1 or more"),
        ("--n_rollouts=1", "--n_rollouts=1: expected 2 or more"),
        ("--max_steps=101", "--max_steps=101: expected 1 or more, at most 100"),
        ("--beta2=1", "--beta2=1.0: expected 0 or more, at most 0.9999"),
        ("--ablate=everything", "--ablate=everything: there are subtasks, access"),
        ("--lora_rank=8", "--lora_rank: there is no pretrained model"),
        ("--examples=mine.json", "--examples: --prompt_style=short shows none"),
        ("--shuffle", "--shuffle: without --notes"),
        ("--data=a,b.jsonl", "splits names at commas"),
        ("--wandb", "--wandb: the package wandb is not installed"),
    ],
)
def test_faulty_flags_are_named_before_anything_begins(flag, sentence, monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    said = usage_error_of(capsys, flag, "--lr=-1")
    assert sentence in said and "--lr=-1.0: expected 0 or more" in said


def test_unknown_presets_and_flags_are_named(capsys):
    assert "laptop, small" in usage_error_of(capsys, "--preset=big")
    assert "rollouts" in usage_error_of(capsys, "--rollout=8")
