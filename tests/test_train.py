"""Training as a user meets it: real runs of train.py in processes of their own, from the warm start to the
table; bad input."""
import gc
import json
import math
import os
import random
import re
import shlex
import sys
import weakref
from dataclasses import asdict, replace

import pytest
import torch

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import train
import workers
from eval import Problem, grade, load, random_completion, write_problems
from model import Qwen, Tokenizer, read_json
from sample import Completion, generate
from train import PRESETS, Settings, ablation_edit, prompting_from, schedule, tiny_tokenizer
from train_runs import TINY, in_pairs, metrics, recount, rollouts, runs, timeless, weights
from workflow import Prompting, Rollout, Step, Task, Trace, Workflow, WorkflowError, as_lists, messages, parse

# ------------------------------------------------------------------------------------------------------------
# Parts


def test_schedule_by_hand():
    """Linear up to 1 in the warm-up's steps, then half a cosine that ends one step short of 0."""
    assert [schedule(i, 100, 0.03) for i in range(4)] == [1 / 3, 2 / 3, 1.0, 1.0]
    assert [schedule(i, 10, 0.2) for i in (0, 1, 2, 4, 6, 8)] == pytest.approx(
        [0.5, 1.0, 1.0, (1 + 0.5 ** 0.5) / 2, 0.5, (1 - 0.5 ** 0.5) / 2])
    assert 0 < schedule(99, 100, 0.03) < 0.001 and [schedule(i, 200, 0.03) for i in (0, 5, 6)] == [
        1 / 6, 1.0, 1.0]
    assert schedule(0, 1, 0.03) == schedule(0, 50, 0.0) == 1.0


def test_the_papers_preset_has_the_papers_numbers():
    """App. A.1, as far as the settings name it."""
    s = Settings(**PRESETS["paper"])
    assert (s.iterations, s.questions, s.rollouts, s.max_new_tokens, s.temperature, s.max_steps) == (
        200, 4, 64, 1024, 1.0, 5)
    assert (s.lr, s.beta2, s.warmup, s.clip, s.beta, s.minibatches, s.style) == (
        1e-6, 0.999, 0.03, 0.2, 0.0, 1, "full")
    assert (
        s.access and s.subtasks and not s.named and s.examples == "ood" and s.init_from == "Qwen/Qwen2.5-7B")
    assert prompting_from(s).max_new_tokens == 1024 and prompting_from(s).style == "full"


@pytest.fixture(scope="module")
def tokenizer():
    rng, texts = random.Random(3), []
    for p in load("laptop", "train", 1600):
        texts += [m["role"] + "\n" + m["content"] for m in messages(p.question, 5, prompting=Prompting("short"))]
        texts += ["assistant\n" + random_completion(p.question, rng, 5)]
    return tiny_tokenizer(texts)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "\n\n",
        "What is veintitrés * 39?",
        "  two  spaces\tand a tab\r\n",
        "naïve café 東京 🙂 \u0000\u200b",
        'a "quoted [\'x\'] \\"one\\" \\frac{1}{2}',
        "<|im_end|> <|endoftext|>",
        'model_id = [0, 12]\nsubtasks = ["Work it out.", "New words, 3 \\" of them"]\n'
        'access_list = [[], ["all"], [0, 1]]',
    ],
)
def test_tiny_tokenizer_round_trip(text, tokenizer):
    """Any text comes back as it was, also such as it was not trained on, and text never becomes a control
    token."""
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text and not {tokenizer.start_id, tokenizer.eos_id} & set(ids)


def test_tiny_tokenizer_makes_one_decision_one_token(tokenizer):
    """Completions come back as they were; a worker, a phrase and an access list are one token each."""
    rng = random.Random(4)
    assert len(tokenizer) == 900
    for p in load("laptop", "test", 200):
        text = random_completion(p.question, rng, 5)
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        steps, pieces = len(parse(text, 5).steps), [tokenizer.decode([i]) for i in ids]
        assert sum("." in piece and '"' in piece for piece in pieces) == steps  # a phrase, with its quotes
        assert sum(bool(re.fullmatch(r' ?\[("all")?\],?', piece)) for piece in pieces) == steps
        assert len(ids) < 24 + 4 * steps + len(tokenizer.encode(p.question))


def test_ablations_rewrite_workflows():
    """--access=False empties every access list; else nothing changes. --subtasks=False is the prompt's
    matter."""
    made = parse('model_id = [3, 1]\nsubtasks = ["A.", "B."]\naccess_list = [[], ["all"]]', 5)
    assert ablation_edit(Settings()) is None
    blind = ablation_edit(Settings(access=False))(made)
    assert blind.steps == [Step(3, "A.", []), Step(1, "B.", [])] and not blind.steps[1].wrote_all
    assert blind.written == made.written and made.steps[1].wrote_all
    assert not prompting_from(Settings(subtasks=False)).subtasks


def test_every_rank_trains_its_share(monkeypatch):
    """On any number of ranks each rollout is one rank's, in order, with about as many tokens on each; few
    rollouts leave ranks idle."""
    rng = random.Random(0)
    made = [Rollout(None, str(i), [1], Completion([1] * rng.randint(1, 99), [], True)) for i in range(200)]
    tokens = sum(len(r.completion.tokens) for r in made)
    for world in (1, 2, 3, 8):
        monkeypatch.setattr(train.dist, "get_world_size", lambda world=world: world)
        shares, lonely = [], []
        for rank in range(world):
            monkeypatch.setattr(train.dist, "get_rank", lambda rank=rank: rank)
            shares.append(train.my_share(made))
            lonely += train.my_share(made[:1])
            assert train.my_share([]) == []
        assert [r for share in shares for r in share] == made and lonely == made[:1]
        assert all(
            abs(sum(len(r.completion.tokens) for r in share) - tokens / world) < 100 for share in shares)


def test_memory_is_free_for_the_next_phase(tmp_path, monkeypatch, in_process):
    """While an update is computed no copy to sample with is alive, and in the last evaluation nothing of the
    trainer. FSDP's modules hold one another, so that Python alone would let go of them some time later."""
    copies, trainers, phases = [], [], []
    gather, learn, answer = train.whole_copy, train.learn, train.answer

    def spied_gather(model, s):
        copy = gather(model, s)
        copies.append(weakref.ref(copy))
        trainers.append(weakref.ref(model))
        return copy

    def spied_learn(*how):
        phases.append(("update", copies[0]()))
        return learn(*how)

    def spied_answer(*how):
        phases.append(("evaluation", trainers[0]()))
        return answer(*how)

    for name, spy in (("whole_copy", spied_gather), ("learn", spied_learn), ("answer", spied_answer)):
        monkeypatch.setattr(train, name, spy)
    gc.disable()
    try:
        train.main(["--preset=laptop", f"--out={tmp_path}/out", *TINY, "--beta=0"])
    finally:
        gc.enable()
    assert phases == [("update", None), ("evaluation", None)]


def test_the_best_checkpoint_is_the_best_on_held_out_problems(tmp_path):
    """The score is the last held-out accuracy, 0 before the first; where none is measured, the mean accuracy
    since the last save. The two are never compared, nor does one iteration's luck count."""
    s = Settings(out=str(tmp_path), save_every=4, eval_every=0)
    lines = [{"accuracy": i / 10, "held_out": None} for i in range(9)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert train.score(s) == pytest.approx(0.65) and train.score(replace(s, eval_every=8)) == 0.0
    lines[3]["held_out"], lines[7]["held_out"] = 0.1, 0.9
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert train.score(replace(s, eval_every=8)) == 0.9


def test_a_prompt_too_long_for_the_conductor_is_a_lost_rollout():
    """It has no completion, neither parses nor fails to, and the iteration's line is written all the same."""
    tiny = train.tiny_config(Settings(), 900)
    task = Task("Why?", [], problem=Problem("", "Why?", "", "why"))
    lost = Rollout(task, "", [], None, Trace("Why?", Workflow([]), [], [], 0.0, "too long"))
    fine = Rollout(task, "?", [1, 2], Completion([3, 4], [0.0, 0.0], True), reward=0.0)
    step = dict.fromkeys(("lr", "gap", "skipped", "approx_kl", "clipfrac", "kl", "entropy", "grad_norm"), 0.0)
    for group, tokens, parsed in (([lost, fine], 2.0, 0.0), ([lost, lost], None, None)):
        line = train.metrics(Settings(), 0, [group], [step], {"training": 1.0}, None, tiny)
        assert (line["lost"], line["tokens"], line["parsed"]) == (group.count(lost), tokens, parsed)
        assert line["error"] == "too long"
        assert line["accuracy"] == line["by_kind"]["why"] == parsed and line["steps"] is None


# ------------------------------------------------------------------------------------------------------------
# A run from nothing, twice


def test_the_reward_rises(trained):
    """Six iterations after a short warm start: more of what is written can be run, so that the mean reward is
    higher."""
    rewards, parsed = ([line[key] for line in metrics(trained[0][0])] for key in ("reward", "parsed"))
    assert len(rewards) == 6
    assert sum(rewards[-2:]) / 2 > sum(rewards[:2]) / 2 + 0.05, rewards
    assert sum(parsed[-2:]) / 2 > sum(parsed[:2]) / 2 + 0.1, parsed


def test_metrics_are_what_the_traces_say(trained):
    """Every iteration holds every kind and 128 rollouts of 8 questions; sampler and trainer agree; all
    numbers are finite."""
    out = trained[0][0]
    for i, line in enumerate(metrics(out)):
        rows = recount(out, i)
        assert (
            len(rows) == 128 and len({row["problem"] for row in rows}) == len(line["by_kind"]) == 8
            and line["lost"] == 0)
        assert line["gap"] < 1e-4
        assert all(
            math.isfinite(line[key]) for key in ("approx_kl", "clipfrac", "kl", "entropy", "grad_norm"))
        assert line["tokens_per_second"] > 0 and list(line["seconds"]) == ["sampling", "workers", "training"]
        assert (
            line["skipped"] == 0 and line["mfu"] is None and line["memory"] > 0.1 and line["held_out"] is None
        )
        assert (
            line["lr"] == pytest.approx(1e-3 * schedule(i, 6, 0.03))
            and 5 < line["tokens"] < line["longest"] <= 64 and 0 <= line["cut"] < 1)
    assert sum(line["calls"] for line in metrics(out)) > 300  # over real HTTP
    seen = [{row["problem"] for row in rollouts(out, i)} for i in range(6)]
    assert len(set.union(*seen)) == 48  # new problems in each
    held_out = {p.id for p in load("laptop", "test")}
    assert not set.union(*seen) & held_out


def test_what_a_run_prints(trained):
    """A line an iteration, the table with every system, what was learned, the time, and a command that
    works."""
    out = trained[0][1].out
    assert re.search(
        r"[\d,]+ parameters .* 5 workers: calculator, translator, librarian, coder, generalist\n", out)
    assert (
        "warm start: 65 steps" in out
        and len(re.findall(r"^ +\d/6 reward 0\.\d+ accuracy .* memory \d", out, re.MULTILINE)) == 6)
    for system in (
        "Conductor", "calculator", "translator", "librarian", "coder", "generalist", "random workflows"):
        assert re.search(rf"^{system} +[01]\.\d", out, re.MULTILINE), system
    assert re.search(r"^[a-z+]+: \d steps?, written for \d+%", out, re.MULTILINE)
    assert re.search(r"^\d+ s from start to end", out, re.MULTILINE)


def test_the_same_seed_gives_the_same_run(trained):
    """Two runs with one process: equal metrics but for the times, equal texts, bit-identical weights, equal
    test results."""
    (a, end_a), (b, end_b) = trained
    assert [timeless(line) for line in metrics(a)] == [timeless(line) for line in metrics(b)]
    for i in range(6):
        assert [(r["text"], r["reward"]) for r in rollouts(a, i)] == [
            (r["text"], r["reward"]) for r in rollouts(b, i)]
    assert weights(a) == weights(b)
    for file in ("checkpoint/tokenizer.json", "checkpoint/config.json", "test.json"):
        with open(f"{a}/{file}") as in_a, open(f"{b}/{file}") as in_b:
            assert in_a.read() == in_b.read()
    assert table_of(end_a.out) == table_of(end_b.out)


def table_of(text):
    return re.search(r"^accuracy, .*?^random workflows[^\n]*", text, re.MULTILINE | re.DOTALL)[0]


# ------------------------------------------------------------------------------------------------------------
# Its checkpoint


def test_the_checkpoint_loads_in_transformers(checkpoint):
    """Qwen2ForCausalLM gives our logits, PreTrainedTokenizerFast our ids, the chat template our prompt.
    (AutoTokenizer splits text for a Qwen2 model in Qwen2's own way, whatever tokenizer.json says: with a tiny
    tokenizer it can only decode.)"""
    from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
    theirs = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    ids_of = PreTrainedTokenizerFast.from_pretrained(checkpoint)
    assert type(theirs).__name__ == "Qwen2ForCausalLM"
    model, tokenizer = Qwen.from_pretrained(checkpoint), Tokenizer.from_pretrained(checkpoint)
    asked = prompting_from(Settings(max_new_tokens=64))
    assert read_json(f"{checkpoint}/conductor.json") == {**asdict(asked), "dtype": "fp32", "workers": workers.LOCAL["local"]}
    chat = messages("What is veintitrés * 39?", 5, prompting=Prompting("short"))
    ids = tokenizer.chat(chat)
    assert ids_of.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) == ids
    text = random_completion("What is veintitrés * 39?", random.Random(0), 5)
    assert ids_of.encode(text) == tokenizer.encode(text) and ids_of.eos_token_id == tokenizer.eos_id
    auto = AutoTokenizer.from_pretrained(checkpoint)
    assert auto.decode(tokenizer.encode(text)) == text and auto.eos_token_id == tokenizer.eos_id
    with torch.no_grad():
        ours, logits = model(torch.tensor([ids])), theirs(torch.tensor([ids])).logits
    assert (ours - logits).abs().max() < 1e-4 * logits.abs().max()


def test_the_programs_take_the_checkpoint(trained, checkpoint):
    """The command that the run ends with shows a workflow; sample.py speaks; eval.py prints the run's own
    table again."""
    hint = shlex.split(re.search(r"python (workflow\.py .*)", trained[0][1].out)[1])
    assert hint[2] == f"--checkpoint={checkpoint}"
    conducted, sampled, evaluated = runs(
        hint, ["sample.py", f"--checkpoint={checkpoint}", "What is 3 + 4?", "--max_new_tokens=16"],
        ["eval.py", f"--checkpoint={checkpoint}", "--test=8"])
    assert (
        conducted.out.startswith(f"Question: {hint[1]}\n") and "\nAnswer: " in conducted.out
        and re.search(r"\d calls?, ", conducted.out))
    assert re.search(r"^Step 0: \w+ \(model [0-4]\), sees .*: .+", conducted.out, re.MULTILINE)
    assert sampled.out.strip()
    # The last row, random workflows, is another draw
    *again, _ = table_of(evaluated.out).replace("conductor", "Conductor", 1).splitlines()
    assert again == table_of(trained[0][1].out).splitlines()[:-1]


# ------------------------------------------------------------------------------------------------------------
# The two extensions


@pytest.fixture(scope="module")
def extended(tmp_path_factory):
    """(out of one process, out of two): two iterations with three workers or more a question, and second rounds,
    which their warm start has seen."""
    folder = tmp_path_factory.mktemp("extended")
    argv = [
        "train.py", "--preset=laptop", "--warm_steps=80", "--warm_batch=16", "--warm_second=0.4", "--width=64",
        "--subset=3", "--recursion", "--iterations=2", "--questions=4", "--rollouts=16", "--max_new_tokens=64",
        "--minibatches=2", "--test=8"]
    one, two = f"{folder}/one", f"{folder}/two"
    runs([*argv, f"--out={one}"])
    runs([*argv, f"--out={two}"], ranks=2)
    return one, two


def test_each_question_has_its_own_workers(extended):
    """§3.2: at least three of five, numbered anew in the pool's order, the same for every rollout and round
    of a question."""
    pool, problems = workers.load_pool("local"), load("laptop", "train", 300)
    s = Settings(subset=3, questions=300)
    teams = [tuple(w.letter for w in task.pool) for task in train.first_rounds(s, problems, pool, 0)]
    assert all(list(team) == sorted(set(team)) for team in teams) and len(set(teams)) == 10 + 5 + 1
    assert all(70 < sum(len(team) == k for team in teams) < 130 for k in (3, 4, 5))
    assert all(len(task.pool) == 5 for task in train.first_rounds(Settings(), problems, pool, 7))
    for iteration in (0, 1):
        seen = {}
        for row in rollouts(extended[0], iteration):
            trace = row["trace"]
            while trace:
                seen.setdefault(row["problem"], {}).update(
                    {s["worker"]: w for s, w in zip(trace["workflow"]["steps"], trace["workers"])})
                trace = trace["previous"]
        tasks = train.first_rounds(Settings(subset=3, questions=4), load("laptop", "train"), pool, iteration)
        assert [task.problem.id for task in tasks] == list(
            dict.fromkeys(row["problem"] for row in rollouts(extended[0], iteration)))
        for task in tasks:
            assert all(
                task.pool[number].name == name for number, name in seen.get(task.problem.id, {}).items())


def test_half_of_the_questions_get_a_second_round(extended):
    """As many rollouts as the first round had, all shown the same one of its answers; first rounds are worth
    a quarter (§3.2)."""
    for iteration, again in ((0, [0, 1]), (1, [2, 3])):
        rows, line = rollouts(extended[0], iteration), metrics(extended[0])[iteration]
        questions = list(dict.fromkeys(row["problem"] for row in rows))
        first, second = rows[:64], rows[64:]
        assert [row["problem"] for row in first] == [q for q in questions for _ in range(16)]
        assert [row["problem"] for row in second] == [questions[i] for i in again for _ in range(16)]
        shown = {}
        for row in first + second:
            gold, trace, worth = (
                Problem("", "", row["answer"], ""), row["trace"], 1 if row in second else 0.25)
            if trace is None:
                assert row["reward"] == 0
                continue
            assert row["reward"] == worth * (1 if grade(gold, trace["answer"]) else 0.5) and (
                trace["previous"] is None) == (worth < 1)
            if worth == 1:
                shown.setdefault(row["problem"], []).append(trace["previous"])
        for question, previous in shown.items():
            assert all(p == previous[0] for p in previous)
            ran = [row["trace"] for row in first if row["problem"] == question and row["trace"]]
            assert any(previous[0].items() <= trace.items() for trace in ran)
        right = [row["reward"] == 1 for row in second]
        assert (
            line["again"]["accuracy"] == pytest.approx(sum(right) / 32)
            and line["accuracy"] == sum(row["reward"] == 0.25 for row in first) / 64)
        assert line["again"]["parsed"] == pytest.approx(sum(row["trace"] is not None for row in second) / 32)


def test_two_ranks_ask_the_same_second_rounds(extended):
    """The first round that is shown is drawn from the whole group, so that both ranks know it. One token in a
    million may differ."""
    one, two = (rollouts(out, 0) for out in extended)
    assert [(row["problem"], row["trace"] and row["trace"]["previous"] is None) for row in one[:64]] == [
        (row["problem"], row["trace"] and row["trace"]["previous"] is None) for row in two[:64]]
    shown = [
        {
            row["problem"]: row["trace"]["previous"]["workflow"]["written"] for row in rows[64:]
            if row["trace"]}
        for rows in (one, two)
    ]
    assert shown[0].keys() == shown[1].keys() and shown[0]
    texts, others = ([row["text"] for row in rows] for rows in (one, two))
    assert texts == others or texts[:64] != others[:64]
    assert metrics(extended[1])[0]["calls"] > 0 and len(metrics(extended[1])) == 2


def test_nobody_may_have_a_second_round():
    """Where nothing could be run, nothing is asked then."""
    groups = [
        [Rollout(Task("", []), "no workflow")],
        [Rollout(Task("", []), "lost", trace=Trace("", Workflow([]), [], []))]]
    assert train.second_rounds(Settings(), groups, 0) == train.second_rounds(Settings(), groups, 1) == []
    groups[1][0].trace.right = True
    assert train.second_rounds(Settings(), groups[1:], 0)[0].previous is groups[1][0].trace


def test_what_a_kill_leaves_of_tidying_up(tmp_path):
    """A link that was not renamed, a checkpoint half removed or half written: the newest two whole ones and
    the best stay."""
    for i, score in enumerate((0.9, 0.1, 0.2, 0.3)):
        os.makedirs(tmp_path / "checkpoints" / f"{i:05d}")
        (tmp_path / "checkpoints" / f"{i:05d}" / "training.json").write_text(json.dumps({"score": score}))
    os.symlink("checkpoints/00001", tmp_path / "checkpoint.new")
    os.makedirs(tmp_path / "checkpoints" / "unfinished" / "state")
    assert [os.path.basename(folder) for folder in train.checkpoints(str(tmp_path))] == [
        "00000", "00001", "00002", "00003"]
    train.tidy(Settings(out=str(tmp_path)))
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["00000", "00002", "00003"]
    assert os.readlink(tmp_path / "checkpoint") == "checkpoints/00003" and sorted(os.listdir(tmp_path)) == [
        "checkpoint", "checkpoints"]


def test_lessons_of_the_warm_start():
    """With letters: subsets numbered anew, plans that name worker and number; second turns that keep the
    answer or not, by chance. Whether another worker comes, and whether the answer is kept, are one token
    each."""
    s, rng, pool = (
        Settings(named=True, warm_second=0.5), random.Random(0),
        workers.load_pool("local:pairs", "http://127.0.0.1:9/v1"))
    problem, empty, second, texts = load("laptop", "train", 1)[0], 0, 0, []
    for _ in range(300):
        chat, completion = train.random_lesson(problem, rng, pool, s)
        system, question, *turns = [m["content"] for m in chat]
        letters = re.fullmatch(r"Models ((?:[A-H] \d ?)+), 5 steps\.", system)[1].split()[::2]
        assert letters == sorted(letters) and system.split()[2:-2:2] == [
            *map(str, range(len(letters) - 1)), f"{len(letters) - 1},"]
        assert question == problem.question and len(turns) in (0, 2)
        workflow, second = parse(completion, len(letters), allow_empty=bool(turns)), second + bool(turns)
        empty += not workflow.steps
        if workflow.steps:
            named = completion.split("\n")[0].removeprefix(f"Plan: {problem.question} ").split(", ")
            assert named == [f"{letters[step.worker]} {step.worker}" for step in workflow.steps]
        texts.append("assistant\n" + completion)
    assert 110 < second < 190 and 0.3 < empty / second < 0.7
    assert re.search(
        r" A 0\nmodel_id = \[0\]",
        train.random_lesson(problem, random.Random(1), pool[:1], Settings(named=True, max_steps=1))[1])
    without = [
        train.random_lesson(problem, random.Random(i), pool, Settings(subtasks=False, warm_second=0.5))[1]
        for i in range(20)]
    assert not any("subtasks" in text for text in without) and {text.count("\n") for text in without} == {
        1, 2}
    tokenizer = tiny_tokenizer(texts)
    assert [tokenizer.decode([i]) for i in tokenizer.encode(" A 1, B 2")] == [" A", " 1", ",", " B", " 2"]
    assert len(tokenizer.encode(as_lists(Workflow([])))) == 1


# ------------------------------------------------------------------------------------------------------------
# Bad input


REFUSED = {
    "unknown flag": (["--iteration=3"], ["--iteration", "--iterations"]),
    "a name of another program": (["--checkpoint=x"], ["did you mean --init_from?"]),
    "bad value": (["--questions=many"], ["--questions=many", "int"]),
    "paper without GPUs": (
        ["--preset=paper"], ["--preset=laptop", "GiB for each process", "$OPENAI_API_KEY"]),
    "no checkpoint, no problems": (["--init_from={tmp}/none", "--data=lapdog"], ["{tmp}/none", "lapdog"]),
    "half a checkpoint": (["--init_from={tmp}/half"], ["{tmp}/half"]),
    "worker down": (["--pool={tmp}/down.json"], ["carpenter"]),
    "no room": (["--out={tmp}/file/out"], ["{tmp}/file"]),
}


@pytest.fixture(scope="module")
def refused(tmp_path_factory):
    """{case: its end} of train.py called wrongly, two at a time; and the folder for {tmp}."""
    tmp = tmp_path_factory.mktemp("wrong")
    (tmp / "half").mkdir()
    (tmp / "half" / "config.json").write_text('{"model_type": "qwen2"}')
    (tmp / "file").write_text("in the way")
    down = {
        "name": "carpenter", "protocol": "openai", "model": "m", "base_url": "http://127.0.0.1:9/v1",
        "attempts": 1}
    (tmp / "down.json").write_text(json.dumps([down]))

    commands = []
    for case, (words, _) in REFUSED.items():
        wrong = [word.format(tmp=tmp) for word in words]
        commands.append(["train.py", "--preset=laptop", f"--out={tmp}/{case}", *TINY, *wrong])
    return dict(zip(REFUSED, in_pairs(commands))), str(tmp)


@pytest.mark.parametrize("case", REFUSED)
def test_train_refuses(case, refused):
    """Each ends the program with a status, a line for each thing that is wrong, and no traceback; nothing was
    trained."""
    ends, tmp = refused
    end, names = ends[case], REFUSED[case][1]
    assert end.status not in (0, None) and "Traceback" not in end.err and "reward" not in end.out, end.err
    first, *lacks = end.err.strip().splitlines()
    if lacks:
        if case == "paper without GPUs":
            assert lacks.pop().startswith("The laptop world needs nothing")
        assert first == "train.py: the run lacks" and all(line.startswith("  ") for line in lacks), end.err
    assert all(name.format(tmp=tmp) in end.err for name in names), end.err


@pytest.mark.parametrize(
    "word, names",
    [
        ("--preset=lapdog", "laptop, small, paper, "), ("--data=none.jsonl", "none.jsonl is missing"),
        ("--data={tmp_path}/mine.jsonl", "--test_data"), ("--out={tmp_path}/mine.jsonl", "mine.jsonl: a file, where"),
        ("--subset=6", "5 workers"), ("--keep=1000000000", "GiB of disk"), ("--loss=mean", "sequence, token"),
        ("--init_from={tmp}/none", "\n  a model to start from .no checkpoint in '\\S*none'"), ("--test_data=lapdog", "lapdog"),
        ("--reference={tmp}/none", "reference policy .*none"), ("--resume", "without --beta"), ("laptop", "'laptop'"),
        ("--report=paper", "tensorboard, wandb"), ("--dtype=fp8", "fp8"), ("--eval_every=-1", "--eval_every=-1"),
        ("--replay={tmp_path}/out/replies", "outside of --out"), ("--test_data={tmp_path}/out/checkpoints/00001/training.json", "--test_data=.* outside of --out"), ("--rollouts=0", "--rollouts=0"), ("--rollouts=1", "2 or more"),
        ("--max_new_tokens=1024", "room for a prompt"), ("--iterations=-1", "--iterations=-1"), ("--style=shrt", "shrt"),
        ("--width=30", "--width=30"), ("--sandbox=half", "partial"), ("--max_steps=0", "--max_steps=0"), ("--max_steps=101", "at most 100"), ("--temperature=0", "--temperature=0"), ("--warm_batch=0", "--warm_batch=0"),
        ("--temperature=1e-40", "--temperature=1e-40"), ("--beta2=1", "--beta2=1"), ("--reward_wrong=nan", "--reward_wrong=nan"), ("--budget=nan", "--budget=nan"),
        ("--iterations=100000", "99,999"), ("--examples=x", "ood, in, mixed"), ("--seed=1" + 20 * "0", "--seed=1")])
def test_main_refuses(word, names, tmp_path, in_process):
    """As above, without a process of its own. --resume finds a run that began without a KL term."""
    os.makedirs(tmp_path / "out" / "checkpoints" / "00001")
    (tmp_path / "out" / "checkpoints" / "00001" / "training.json").touch()
    (tmp_path / "mine.jsonl").write_text('{"question": "1+1?", "answer": "2", "kind": "sums"}')
    with pytest.raises(SystemExit, match=names):
        train.main(["--preset=laptop", f"--out={tmp_path}/out", *TINY, word.format(tmp=tmp_path, tmp_path=tmp_path)])


def test_code_is_trained_on_only_in_a_whole_sandbox(tmp_path, monkeypatch, in_process):
    """A sandbox that lacks a part is refused where problems are graded by programs, unless --sandbox=partial
    is said."""
    code = Problem("code/0", "Print the number.", "", "code", "code", extra={"function": None, "tests": [["1", "1"]]})
    write_problems(str(tmp_path / "code.jsonl"), [code] * 2)
    monkeypatch.setattr(train.evaluation, "sandbox_lacks", lambda: ["a wall"])
    argv = ["--preset=laptop", f"--out={tmp_path}/out", *TINY, "--test_data=laptop", "--dry_run"]
    train.main(argv)
    with pytest.raises(SystemExit, match="\n  a sandbox .*a wall.*--sandbox=partial"):
        train.main([*argv, f"--data={tmp_path}/code.jsonl"])
    train.main([*argv, f"--data={tmp_path}/code.jsonl", "--sandbox=partial"])


def test_lessons_of_a_pretrained_model():
    """Random workflows, whose subtasks are some of hundreds of sentences; nothing but the three lists."""
    problem = load("laptop", "train", 1)[0]
    pool = workers.load_pool("local", "http://127.0.0.1:9/v1")
    told = []
    for seed in range(300):
        _, completion = train.random_lesson(problem, random.Random(seed), pool, Settings(init_from="a model"))
        assert completion.startswith("model_id = [")
        told += [step.subtask for step in parse(completion, 5).steps]
    assert len(set(told)) > 250 and all(re.fullmatch("[A-Z][a-z ]+[.]", text) for text in told)


def test_a_warm_start_of_fewer_lessons_than_ranks(tmp_path):
    """Every rank has one all the same, as none may wait for the others."""
    runs(["train.py", "--preset=laptop", f"--out={tmp_path}/out", *TINY, "--warm_batch=1"], ranks=2)
    assert len(metrics(tmp_path / "out")) == 1


def test_the_warm_start_of_a_pretrained_model_teaches_the_format(in_process):
    """What it writes at temperature 1 is some workflow in half of the cases, and in none before."""
    s = Settings(init_from="a model", warm_steps=140, warm_batch=8, warm_lr=6e-3, width=64)
    pool = workers.load_pool("local", "http://127.0.0.1:9/v1")
    problems = load("laptop", "train", 200)
    model, tokenizer = train.tiny_conductor(s, problems, pool)

    def parsed():
        prompts = [tokenizer.chat(train.random_lesson(p, random.Random(0), pool, s)[0]) for p in problems[:8]]
        groups = generate(model, prompts, 8, 96, eos_id=tokenizer.eos_id, n_ids=len(tokenizer))
        return sum(is_workflow(tokenizer.decode(c.tokens)) for group in groups for c in group) / 64

    train.dist.init_process_group("gloo", store=train.dist.HashStore(), rank=0, world_size=1)
    try:
        before = parsed()
        train.warm_start(model, tokenizer, problems, pool, s)
    finally:
        train.dist.destroy_process_group()
    after = parsed()
    assert before == 0 and after > 0.5, after


def is_workflow(text):
    try:
        return bool(parse(text, 5))
    except WorkflowError:
        return False


def test_only_who_asks_gives_a_pretrained_model_a_warm_start():
    def warm_steps(*argv):
        return train.settings_of([*argv])[0].warm_steps

    assert warm_steps("--preset=laptop") == 400
    assert warm_steps("--preset=laptop", "--init_from=a/model") == 0
    assert warm_steps("--preset=pools") == warm_steps("--preset=pairs", "--init_from=a/model") == 0
    assert warm_steps("--preset=small") > 0 == warm_steps("--preset=small", "--init_from=a/model")
    assert warm_steps("--preset=laptop", "--init_from=a/model", "--warm_steps=7") == 7
