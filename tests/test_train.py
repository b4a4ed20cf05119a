"""One run from end to end, what each of its parts promises, and what it says to who lacks something."""

import itertools
import json
import os
import random
import sys
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from eval import ABLATIONS, Problem, load
from grpo import packed_logprobs
from model import Qwen
from train import (
    PRESETS,
    Run,
    Settings,
    first_rounds,
    random_lesson,
    read_command,
    reward,
    schedule,
    second_rounds,
    tiny_conductor,
    warm_start,
)
from train_runs import Workers, end_of, launch, metrics, traces, train, trained
from workers import LOCAL, Reply
from workflow import Rollout, Step, Workflow, WorkflowError, as_lists, parse, read_prompting
from workflow import rollout_from_json, show

WORKFLOW = Workflow([Step(0, "Find it.", []), Step(1, "Check it.", [0], wrote_all=True)])

# ---- A short run -------------------------------------------------------------------------------------------


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
    assert metrics(out)[0]["held_out"] is not None  # measured with the checkpoint
    assert metrics(out)[0]["parsed"] > 0.5  # The warm start teaches the format.
    assert len(show(f"{out}/traces/00000.jsonl").splitlines()) == 72
    with open(f"{out}/traces/00000.jsonl") as file:
        assert rollout_from_json(json.loads(next(file))).reward is not None


# ---- Its parts ---------------------------------------------------------------------------------------------


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
    """The questions that an iteration asks."""
    return [*itertools.islice(first_rounds(run, settings, iteration), settings.n_questions)]


def test_first_rounds_take_the_next_questions_and_begin_again():
    settings = Settings(n_questions=4, ask_solved_probability=1.0)
    asked = [asked_in(a_run(), settings, iteration) for iteration in range(3)]
    assert [r.question[-1] for r in itertools.chain(*asked)] == [*"012345012345"]
    assert all(r.workers == [0, 1, 2, 3, 4] for r in asked[0])
    names = [r.call_prefix for r in itertools.chain(*asked)]
    assert names == [f"1/{i // 4}/{i}" for i in range(12)]  # by which a replay file knows them


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
    groups[1] = [replace(r, workflow=None) for r in groups[1]]  # Nothing there can be shown.
    for iteration, expected in ((0, ["q0", "q4", "q5"]), (1, ["q2", "q3", "q6", "q7"])):
        asked = second_rounds(groups, Settings(), iteration)
        assert [r.question for r in asked] == expected
        for r in asked:
            assert r.previous.right is not None and r.previous.question == r.question
            assert (r.call_prefix, r.written, r.workflow) == (r.previous.call_prefix, "", None)


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
        chat, completion = random_lesson(problem, rng, 5, settings)
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
    assert as_lists(Workflow([])) not in random_lesson(problem, rng, 5, Settings())[1]


def test_a_step_of_the_warm_start_is_made_of_rows_within_the_token_budget(monkeypatch):
    """On many GPUs as on one; its gradient is that of the whole batch."""
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
            settings = Settings(token_budget=budget, warm_steps=3)
            torch.manual_seed(0)
            model, tokenizer = tiny_conductor(problems, 5, settings)
            run = Run([None] * 5, problems, [], tokenizer, model, None, None, 0, {})
            warm_start(run, settings)
            ends.append((len(rows), max(rows), model.model.layers[0].mlp.up_proj.weight))
            rows.clear()
    finally:
        dist.destroy_process_group()
    (whole, _, one), (few, most, another), (each, _, third) = ends
    assert whole == 3 and 3 < few < each == 96 and most <= 300
    assert torch.allclose(one, another, atol=1e-4) and torch.allclose(one, third, atol=1e-4)


def test_workers_of_other_problems_are_not_told_what_only_the_laptops_coder_obeys():
    problem = Problem("mine.jsonl/1", "Who wrote Emma?", "Jane Austen", "short")
    settings = Settings(data="mine.jsonl")
    told = "".join(
        random_lesson(problem, random.Random(i), 5, settings)[1] for i in range(100)
    ).lower()
    assert "solve the question" in told
    assert not any(word in told for word in ("vowels", "reverse", "capitals"))
    long = replace(problem, question="Who wrote Emma? " * 99)  # whose repetition would not fit
    assert random_lesson(long, random.Random(0), 5, settings)[1].count("Emma") < 9


# ---- What ends a run, or part of it ------------------------------------------------------------------------


def test_a_spent_budget_ends_the_run_with_a_checkpoint(tmp_path):
    """A call costs $0.0002 and reserves a little more. What was refused is lost, not punished."""
    workers = Workers(tmp_path)
    out = f"{tmp_path}/out"
    status, said, err = end_of(
        launch(*workers.flags("--iterations=40", "--budget=0.02", f"--out={out}"))
    )
    lines = metrics(out)
    assert (
        status == 1
        and "the budget is spent" in err
        and "--resume" in err
        and "Traceback" not in err
    )
    assert 1 <= len(lines) < 40 and lines[-1]["lost"] > 0 and 0.01 < workers.calls * 0.0002 <= 0.02
    assert os.path.exists(f"{out}/checkpoint/state") and sum(line["cost"] for line in lines) <= 0.02
    lost = [row for row in traces(out, len(lines) - 1) if row["error"]]
    assert lost and all(row["reward"] is None and "budget" in row["error"] for row in lost)


def test_a_rollout_whose_workers_are_stuck_is_lost_not_waited_for(tmp_path):
    workers = Workers(tmp_path)
    workers.open.clear()
    train(
        *workers.flags(
            "--iterations=1",
            "--n_rollouts=32",
            "--workflow_timeout=0.2",
            "--n_test=0",
            f"--out={tmp_path}/out",
        )
    )
    [line] = metrics(f"{tmp_path}/out")
    assert line["lost"] > 0 and "longer than" in line["error"] and line["calls"] == 0


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
    assert len(metrics(f"{tmp_path}/out")) < 9


# ---- What it says before it begins -------------------------------------------------------------------------


def test_a_run_with_everything_of_ones_own(tmp_path):
    """Without a KL, with what is held out of 20 rows measured at the end, and without a warm start, as the
    model to start from is a Conductor already."""
    workers = Workers(tmp_path)
    with open(workers.data, "a") as file:
        for i in range(8, 20):
            file.write(
                json.dumps({"question": f"What is {i} + 7?", "answer": "A", "grader": "same"})
                + "\n"
            )
    flags = workers.flags("--prompt_style=short", "--iterations=1", "--n_test=9")
    status, _, err = end_of(launch("--preset=own", *flags[1:], f"--out={tmp_path}/none"))
    assert status == 1 and "cannot read the 29 tokens" in err  # with 1,024 to be written
    said = train("--preset=own", *flags[1:], f"--out={tmp_path}/out", "--max_new_tokens=96")
    assert metrics(f"{tmp_path}/out")[0]["lost"] == 0
    assert (
        "16 problems, workers: left, right" in said
        and "4 problems" in said
        and "warm start" not in said
    )
    assert not os.path.exists(f"{tmp_path}/out/reference") and f"--checkpoint={tmp_path}" in said


def test_own_runs_name_all_that_is_missing_at_once():
    status, _, err = end_of(
        launch("--preset=own", "--dry_run", "--n_rollouts=1", "--ablate=everything")
    )
    assert status == 1 and "Traceback" not in err
    for missing in ("--init_from", "--pool", "--data", "--n_rollouts=1", "--ablate=every"):
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


def test_a_pool_that_costs_money_needs_a_budget(tmp_path):
    workers = Workers(tmp_path)
    flags = [
        flag for flag in workers.flags(f"--out={tmp_path}/out") if not flag.startswith("--budget")
    ]
    status, _, err = end_of(launch(*flags))
    assert status == 1 and "--budget=DOLLARS" in err and "$" in err and workers.calls == 0


def test_a_dry_run_says_what_a_run_takes_and_does_its_largest_step(tmp_path):
    """Also where model and keys are not there."""
    said = train("--preset=laptop", "--dry_run", f"--out={tmp_path}/out")
    for word in ("calls", "at no cost", "GiB", "disk", "the largest step took"):
        assert word in said, word
    assert said.count(" to ") >= 2 and not os.path.exists(f"{tmp_path}/out")
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
    """Its largest ids would have no embedding."""
    problems = load("laptop", "train", 50)
    model, tokenizer = tiny_conductor(problems, 5, Settings())
    shape = replace(model.config, vocab_size=len(tokenizer) - 1)
    tokenizer.save_pretrained(tmp_path)
    Qwen(shape).save_pretrained(tmp_path)
    flags = ("--preset=laptop", f"--init_from={tmp_path}", f"--out={tmp_path}/out")
    status, _, err = end_of(launch(*flags, "--dry_run"))
    assert status == 1 and f"ids up to {len(tokenizer) - 1}" in err and "Traceback" not in err


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
    settings, device = read_command([])
    assert settings.preset == preset and f"--preset={preset}" in capsys.readouterr().out
    assert (device == "cpu") == (preset == "laptop") and settings.out == f"out/{preset}"
    assert settings.pool == "local"


def test_only_what_a_user_names_costs_money():
    for settings in (Settings(**values) for values in PRESETS.values()):
        assert settings.pool in ("", *LOCAL) and settings.budget == 0


def test_unknown_presets_and_flags_are_named(capsys):
    with pytest.raises(SystemExit, match="laptop, small"):
        read_command(["--preset=big"])
    with pytest.raises(SystemExit):
        read_command(["--rollout=8"])
    assert "rollouts" in capsys.readouterr().err
