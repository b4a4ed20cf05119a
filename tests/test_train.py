"""Training as a user meets it: real runs of train.py in processes of their own, from the warm start to the table; bad input."""
import contextlib
import json
import math
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

import train
import workers
from eval import Problem, grade, load, random_completion
from model import Qwen, Tokenizer
from train import PRESETS, Settings, ablate, schedule, tiny_tokenizer
from workflow import Step, Workflow, WorkflowError, messages, parse

ROOT = os.path.dirname(os.path.abspath(train.__file__))
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1"}
SHORT = ["--warm_steps=65", "--warm_batch=16", "--warm_lr=6e-3", "--width=64", "--layers=2", "--iterations=6", "--questions=8",
         "--rollouts=16", "--max_new_tokens=64", "--lr=1e-3", "--minibatches=4", "--beta=0.1", "--test=8"]


def launch(*argv):
    """`python ARGV` at the repository's root, in a session of its own, with both outputs in pipes."""
    return subprocess.Popen([sys.executable, *argv], cwd=ROOT, env=ENV, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            start_new_session=True)


class Ended:
    """A process that has ended, and whatever it started too: its children hold the other ends of these pipes."""

    def __init__(self, process, timeout=200):
        try:
            self.out, self.err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            self.out, self.err = process.communicate(timeout=20)
            pytest.fail(f"{process.args} did not end:\n{self.out}\n{self.err}")
        self.status = process.returncode


def runs(*commands):
    """The ends of all commands, two at a time; each must succeed."""
    with ThreadPoolExecutor(2) as threads:
        ends = list(threads.map(lambda argv: Ended(launch(*argv)), commands))
    for end in ends:
        assert end.status == 0 and "Traceback" not in end.err, f"{end.out}\n{end.err}"
    return ends


def metrics(out):
    with open(f"{out}/metrics.jsonl") as f:
        return [json.loads(line) for line in f]


def rollouts(out, iteration, rank=0):
    """Traces as dicts; of each, "text" is all that the Conductor wrote, and "trace" is None where that is no workflow."""
    with open(f"{out}/traces/{iteration:05d}.{rank}.jsonl") as f:
        rows = [{"trace": None, **json.loads(line)} for line in f]
    return [{"text": row["trace"] and row["trace"]["workflow"]["completion"], **row} for row in rows]


def timeless(line):
    return {key: value for key, value in line.items() if key not in ("seconds", "tokens_per_second")}


def weights(out):
    with open(f"{out}/checkpoint/model.safetensors", "rb") as f:
        return f.read()


# ---------------------------------------------------------------------------------------------------------------------------------
# Parts


def test_schedule_by_hand():
    """Linear up to 1 in the warm-up's steps, then half a cosine that ends one step short of 0."""
    assert [schedule(i, 100, 0.03) for i in range(4)] == [1 / 3, 2 / 3, 1.0, 1.0]
    assert [schedule(i, 10, 0.2) for i in (0, 1, 2, 4, 6, 8)] == pytest.approx(
        [0.5, 1.0, 1.0, (1 + 0.5 ** 0.5) / 2, 0.5, (1 - 0.5 ** 0.5) / 2])
    assert 0 < schedule(99, 100, 0.03) < 0.001 and [schedule(i, 200, 0.03) for i in (0, 5, 6)] == [1 / 6, 1.0, 1.0]
    assert schedule(0, 1, 0.03) == schedule(0, 50, 0.0) == 1.0


def test_the_papers_preset_has_the_papers_numbers():
    """App. A.1, as far as the settings name it."""
    s = Settings(**PRESETS["paper"])
    assert (s.iterations, s.questions, s.rollouts, s.max_new_tokens, s.temperature, s.max_steps) == (200, 4, 64, 1024, 1.0, 5)
    assert (s.lr, s.beta2, s.warmup, s.clip, s.beta, s.minibatches, s.style) == (1e-6, 0.999, 0.03, 0.2, 0.0, 1, "full")
    assert s.access and s.subtasks


@pytest.fixture(scope="module")
def tokenizer():
    rng, texts = random.Random(3), []
    for p in load("laptop", "train", 1600):
        texts += [m["role"] + "\n" + m["content"] for m in messages(p.question, 5, style="short")]
        texts += ["assistant\n" + random_completion(p.question, rng, 5)]
    return tiny_tokenizer(texts)


@pytest.mark.parametrize("text", [
    "", " ", "\n\n", "What is veintitrés * 39?", "  two  spaces\tand a tab\r\n", "naïve café 東京 🙂 \u0000\u200b",
    'a "quoted [\'x\'] \\"one\\" \\frac{1}{2}', "<|im_end|> <|endoftext|>",
    'model_id = [0, 12]\nsubtasks = ["Work it out.", "New words, 3 \\" of them"]\naccess_list = [[], ["all"], [0, 1]]'])
def test_tiny_tokenizer_round_trip(text, tokenizer):
    """Any text comes back as it was, also such as it was not trained on, and text never becomes a control token."""
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
    """--access=False empties every access list, --subtasks=False makes every subtask the general one; else nothing changes."""
    def made():
        return parse('model_id = [3, 1]\nsubtasks = ["A.", "B."]\naccess_list = [[], ["all"]]', 5)

    assert ablate(made(), Settings()) == made() and ablate(made(), Settings()).steps[1].sees_all
    blind = ablate(made(), Settings(access=False))
    assert blind.steps == [Step(3, "A.", []), Step(1, "B.", [])] and not blind.steps[1].sees_all
    general = ablate(made(), Settings(subtasks=False))
    assert general.steps == [Step(3, "Solve the question.", []), Step(1, "Solve the question.", [0])]


# ---------------------------------------------------------------------------------------------------------------------------------
# A run from nothing, twice


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(folder, end) of a short run, and of the same run once more."""
    folders = [str(tmp_path_factory.mktemp("run") / "out") for _ in range(2)]
    return list(zip(folders, runs(*[["train.py", "--preset=laptop", f"--out={out}", *SHORT] for out in folders])))


@pytest.fixture(scope="module")
def checkpoint(trained):
    return f"{trained[0][0]}/checkpoint"


def test_the_reward_rises(trained):
    """Six iterations after a short warm start: more of what is written can be run, so that the mean reward is higher."""
    rewards, parsed = ([line[key] for line in metrics(trained[0][0])] for key in ("reward", "parsed"))
    assert len(rewards) == 6
    assert sum(rewards[-2:]) / 2 > sum(rewards[:2]) / 2 + 0.05, rewards
    assert sum(parsed[-2:]) / 2 > sum(parsed[:2]) / 2 + 0.1, parsed


def recount(out, iteration, ranks=1):
    """Assert that an iteration's metrics are what its traces say, and that the rewards are §3.1's. Returns the traces."""
    rows, line = [row for rank in range(ranks) for row in rollouts(out, iteration, rank)], metrics(out)[iteration]
    for row in rows:
        trace = row["trace"]
        if trace is None:
            assert row["reward"] == 0
            with pytest.raises(WorkflowError):
                parse(row["text"], 5)
        elif trace["error"]:
            assert row["reward"] is None
        else:
            assert row["reward"] == (1 if grade(Problem("", "", row["answer"], ""), trace["answer"]) else 0.5)
            assert trace["calls"] == len(trace["workflow"]["steps"]) == len(parse(row["text"], 5).steps)
    known, ran = [row for row in rows if row["reward"] is not None], [row["trace"] for row in rows if row["trace"]]

    def mean(values):
        return pytest.approx(sum(values) / max(len(values), 1))

    assert (line["iteration"], line["lost"], line["calls"]) == (iteration, len(rows) - len(known), sum(t["calls"] for t in ran))
    assert line["reward"] == mean([row["reward"] for row in known])
    assert line["accuracy"] == mean([row["reward"] == 1 for row in known])
    assert line["parsed"] == mean([row["trace"] is not None for row in rows])
    assert line["steps"] == mean([len(t["workflow"]["steps"]) for t in ran])
    groups = {p: [row["reward"] for row in known if row["problem"] == p] for p in {row["problem"] for row in rows}}
    assert line["flat"] == mean([len(set(groups[row["problem"]])) < 2 for row in rows])
    steps = [name for t in ran for name in t["workers"]]
    assert line["workers"] == {name: pytest.approx(steps.count(name) / len(steps)) for name in steps}
    for kind, accuracy in line["by_kind"].items():
        assert accuracy == mean([row["reward"] == 1 for row in known if row["problem"].startswith(f"{kind}/")])
    assert set(line["by_kind"]) == {row["problem"].split("/")[0] for row in rows}
    return rows


def test_metrics_are_what_the_traces_say(trained):
    """Every iteration holds every kind and 128 rollouts of 8 questions; sampler and trainer agree; all numbers are finite."""
    out = trained[0][0]
    for i, line in enumerate(metrics(out)):
        rows = recount(out, i)
        assert len(rows) == 128 and len({row["problem"] for row in rows}) == len(line["by_kind"]) == 8 and line["lost"] == 0
        assert line["gap"] < 1e-4
        assert all(math.isfinite(line[key]) for key in ("approx_kl", "clipfrac", "kl", "entropy", "grad_norm"))
        assert line["tokens_per_second"] > 0 and set(line["seconds"]) == {"sampling", "workers", "training"}
    assert sum(line["calls"] for line in metrics(out)) > 300  # over real HTTP
    seen = [{row["problem"] for row in rollouts(out, i)} for i in range(6)]
    assert len(set.union(*seen)) == 48  # new problems in each
    held_out = {p.id for p in load("laptop", "test")}
    assert not set.union(*seen) & held_out


def test_what_a_run_prints(trained):
    """A line an iteration, the table with every system, what was learned, the time, and a command that works."""
    out = trained[0][1].out
    assert re.search(r"[\d,]+ parameters .* 5 workers: calculator, translator, librarian, coder, generalist\n", out)
    assert "warm start: 65 steps" in out and len(re.findall(r"^ +\d/6 reward 0\.\d+ accuracy", out, re.MULTILINE)) == 6
    for system in ("Conductor", "calculator", "translator", "librarian", "coder", "generalist", "random workflows"):
        assert re.search(rf"^{system} +[01]\.\d", out, re.MULTILINE), system
    assert re.search(r"^[a-z+]+: \d steps?, written for \d+%", out, re.MULTILINE)
    assert re.search(r"^\d+ s from start to end", out, re.MULTILINE)


def test_the_same_seed_gives_the_same_run(trained):
    """Two runs with one process: equal metrics but for the times, equal texts, bit-identical weights, equal test results."""
    (a, end_a), (b, end_b) = trained
    assert [timeless(line) for line in metrics(a)] == [timeless(line) for line in metrics(b)]
    for i in range(6):
        assert [(r["text"], r["reward"]) for r in rollouts(a, i)] == [(r["text"], r["reward"]) for r in rollouts(b, i)]
    assert weights(a) == weights(b)
    for file in ("checkpoint/tokenizer.json", "checkpoint/config.json", "test.json"):
        with open(f"{a}/{file}") as in_a, open(f"{b}/{file}") as in_b:
            assert in_a.read() == in_b.read()
    assert table_of(end_a.out) == table_of(end_b.out)


def table_of(text):
    return re.search(r"^accuracy, .*?^random workflows[^\n]*", text, re.MULTILINE | re.DOTALL)[0]


# ---------------------------------------------------------------------------------------------------------------------------------
# Its checkpoint


def test_the_checkpoint_loads_in_transformers(checkpoint):
    """Qwen2ForCausalLM gives our logits, PreTrainedTokenizerFast our ids, the chat template our prompt. (AutoTokenizer splits text
    for a Qwen2 model in Qwen2's own way, whatever tokenizer.json says: with a tiny tokenizer it can only decode.)"""
    from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
    theirs = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    ids_of = PreTrainedTokenizerFast.from_pretrained(checkpoint)
    assert type(theirs).__name__ == "Qwen2ForCausalLM"
    model, tokenizer = Qwen.from_pretrained(checkpoint), Tokenizer.from_pretrained(checkpoint)
    chat = messages("What is veintitrés * 39?", 5, style="short")
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
    """The command that the run ends with shows a workflow; sample.py speaks; eval.py prints the run's own table again."""
    hint = shlex.split(re.search(r"python (workflow\.py .*)", trained[0][1].out)[1])
    assert hint[2] == f"--checkpoint={checkpoint}"
    conducted, sampled, evaluated = runs(
        hint, ["sample.py", f"--checkpoint={checkpoint}", "What is 3 + 4?", "--max_new_tokens=16"],
        ["eval.py", f"--checkpoint={checkpoint}", "--test=8"])
    assert conducted.out.startswith(f"Question: {hint[1]}\n") and "\nAnswer: " in conducted.out and " calls, " in conducted.out
    assert re.search(r"^\w+, model [0-4], sees .*: .+", conducted.out, re.MULTILINE)
    assert sampled.out.strip()
    assert table_of(evaluated.out).replace("conductor", "Conductor", 1) == table_of(trained[0][1].out)


# ---------------------------------------------------------------------------------------------------------------------------------
# From that checkpoint: two ranks, Ctrl-C


def until(condition, process, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate(timeout=20)
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture(scope="module")
def continued(checkpoint, tmp_path_factory):
    """(one, its end, two, its end): one process that is interrupted after its first iteration, in whose folder another run stood,
    and one iteration on two ranks; both from the checkpoint above."""
    one, two = (str(tmp_path_factory.mktemp("more") / "out") for _ in range(2))
    os.makedirs(one)
    with open(f"{one}/metrics.jsonl", "w") as f:
        f.write("earlier\n")
    how = ["--preset=laptop", f"--init_from={checkpoint}", "--questions=8", "--rollouts=8", "--test=8", "--max_new_tokens=64",
           "--minibatches=1", "--warmup=0", "--seed=5"]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    both = launch(*torchrun, "train.py", *how, "--iterations=1", f"--out={two}")
    process = launch("train.py", *how, "--iterations=4000", f"--out={one}")
    until(lambda: os.path.exists(f"{one}.1") and os.path.exists(f"{one}/metrics.jsonl") and metrics(one), process)
    process.send_signal(signal.SIGINT)
    return one, Ended(process), two, Ended(both)


def test_ctrl_c_saves_and_says_so(continued, checkpoint):
    """The run stops after its iteration with a checkpoint, one message and no traceback; the specialists' server is gone, or its
    end of stderr would still be open."""
    out, end, *_ = continued
    lines = metrics(out)
    assert end.status == 1 and 1 <= len(lines) < 4000
    assert end.err.strip().splitlines()[-1] == f"interrupted: stopped after iteration {len(lines)}; the checkpoint is in {out}/checkpoint"
    assert "Traceback" not in end.err + end.out and sum(line["calls"] for line in lines) > 0
    for i in range(len(lines)):
        recount(out, i)
    before, after = Qwen.from_pretrained(checkpoint), Qwen.from_pretrained(f"{out}/checkpoint")
    assert 0 < max((a - b).abs().max().item() for a, b in zip(before.parameters(), after.parameters())) < 0.1


def test_an_earlier_run_is_kept_under_a_number(continued):
    """What stood in --out is beside it now, as it was, and the run says where."""
    out, end, *_ = continued
    with open(f"{out}.1/metrics.jsonl") as f:
        assert f.read() == "earlier\n"
    assert f"the earlier run in {out} is now {out}.1" in end.out
    assert metrics(out)[0]["iteration"] == 0


def test_earlier_runs_are_numbered_on(tmp_path):
    """The next free number is taken, also where --out ends in a slash; a folder without a run in it is used as it is."""
    (tmp_path / "out.1").mkdir()
    for name, kept in [("out", None), ("out", "out.2"), ("out/", "out.3")]:
        train.make_room(Settings(out=f"{tmp_path}/{name}"))
        assert sorted(os.listdir(tmp_path / "out")) == ["settings.json", "traces"]
        assert kept is None or (tmp_path / kept / "metrics.jsonl").exists()
        (tmp_path / "out" / "metrics.jsonl").touch()
    assert sorted(os.listdir(tmp_path)) == ["out", "out.1", "out.2", "out.3"]


def test_two_ranks_do_what_one_does(continued):
    """From the same weights the first iteration's rollouts are the same, question by question, and so are loss and gradient."""
    one, _, two, end = continued
    assert end.status == 0 and "Traceback" not in end.err, end.err
    recount(two, 0, ranks=2)

    def texts(rows):
        return [(row["problem"], row["text"], row["reward"]) for row in rows]

    alone, shares = texts(rollouts(one, 0)), [texts(rollouts(two, 0, rank)) for rank in (0, 1)]
    groups = [shares[i % 2][8 * (i // 2):8 * (i // 2) + 8] for i in range(8)]  # the ranks take turns at the questions
    together = [rollout for group in groups for rollout in group]
    assert [rollout[0] for rollout in together] == [rollout[0] for rollout in alone] and len(alone) == 64
    # What shares its batch changes a rollout by rounding only, which may turn one token in a million.
    same = sum(a == b for a, b in zip(alone, together))
    assert same >= 60
    a, b = metrics(one)[0], metrics(two)[0]
    for key in ("reward", "accuracy", "parsed", "steps", "entropy", "grad_norm"):
        assert b[key] == pytest.approx(a[key], rel=1e-3 if same == 64 else 0.2), key
    assert max(a["gap"], b["gap"]) < 1e-4
    assert end.out.count("random workflows") == 1 and os.path.exists(f"{two}/checkpoint/model.safetensors")  # rank 0 alone speaks


# ---------------------------------------------------------------------------------------------------------------------------------
# The two extensions


@pytest.fixture(scope="module")
def extended(checkpoint, tmp_path_factory):
    """(out of one process, out of two): two iterations from the checkpoint above, with three workers or more a question, and second rounds."""
    folder = tmp_path_factory.mktemp("extended")
    argv = ["train.py", "--preset=laptop", f"--init_from={checkpoint}", "--subset=3", "--recursion", "--iterations=2", "--questions=4",
            "--rollouts=8", "--max_new_tokens=64", "--minibatches=2", "--test=8"]
    one, two = f"{folder}/one", f"{folder}/two"
    runs([*argv, f"--out={one}"], ["-m", "torch.distributed.run", "--nproc_per_node=2", *argv, f"--out={two}"])
    return one, two


def test_each_question_has_its_own_workers(extended):
    """§3.2: at least three of five, numbered anew in the pool's order, the same for every rollout and round of a question."""
    pool = workers.load_pool("local")
    teams = [tuple(w.letter for w in train.assign(Problem("", "", "", ""), pool, Settings(subset=3), i).pool) for i in range(300)]
    assert all(list(team) == sorted(set(team)) for team in teams) and len(set(teams)) == 10 + 5 + 1
    assert all(70 < sum(len(team) == k for team in teams) < 130 for k in (3, 4, 5))
    assert len(train.assign(Problem("", "", "", ""), pool, Settings(), 7).pool) == 5
    for iteration in (0, 1):
        seen = {}
        for row in rollouts(extended[0], iteration):
            trace = row["trace"]
            while trace:
                seen.setdefault(row["problem"], {}).update({s["worker"]: w for s, w in zip(trace["workflow"]["steps"], trace["workers"])})
                trace = trace["previous"]
        for i, question in enumerate(dict.fromkeys(row["problem"] for row in rollouts(extended[0], iteration))):
            team = train.assign(Problem("", "", "", ""), pool, Settings(subset=3), 4 * iteration + i).pool
            assert all(team[number].name == name for number, name in seen.get(question, {}).items())


def test_half_of_the_questions_get_a_second_round(extended):
    """As many rollouts as the first round had, all shown the same one of its answers; first rounds are worth a quarter (§3.2)."""
    for iteration, again in ((0, [0, 1]), (1, [2, 3])):
        rows, line = rollouts(extended[0], iteration), metrics(extended[0])[iteration]
        questions = list(dict.fromkeys(row["problem"] for row in rows))
        first, second = rows[:32], rows[32:]
        assert [row["problem"] for row in first] == [q for q in questions for _ in range(8)]
        assert [row["problem"] for row in second] == [questions[i] for i in again for _ in range(8)]
        shown = {}
        for row in first + second:
            gold, trace, worth = Problem("", "", row["answer"], ""), row["trace"], 1 if row in second else 0.25
            if trace is None:
                assert row["reward"] == 0
                continue
            assert row["reward"] == worth * (1 if grade(gold, trace["answer"]) else 0.5) and (trace["previous"] is None) == (worth < 1)
            if worth == 1:
                shown.setdefault(row["problem"], []).append(trace["previous"])
        for question, previous in shown.items():
            assert all(p == previous[0] for p in previous)
            ran = [row["trace"] for row in first if row["problem"] == question and row["trace"]]
            assert any(previous[0].items() <= trace.items() for trace in ran)
        right = [row["reward"] == 1 for row in second]
        assert line["again"]["accuracy"] == pytest.approx(sum(right) / 16) and line["accuracy"] == sum(row["reward"] == 0.25 for row in first) / 32
        assert line["again"]["parsed"] == pytest.approx(sum(row["trace"] is not None for row in second) / 16)


def test_two_ranks_ask_the_same_second_rounds(extended):
    one, two = extended
    shares = rollouts(two, 0, 0) + rollouts(two, 0, 1)
    for key in ("problem", "answer"):
        assert sorted(row[key] for row in shares) == sorted(row[key] for row in rollouts(one, 0))
    assert metrics(two)[0]["calls"] > 0 and len(metrics(two)) == 2


def test_nobody_may_have_a_second_round():
    """Of a rank's few questions: nothing is asked then."""
    assert train.again([[train.Rollout(train.Task("", []), "no workflow")]], 1) == []
    assert train.collect(None, None, [], Settings(), 1, None) == ([], {"sampling": 0.0, "workers": 0.0})


def test_what_a_kill_leaves_of_tidying_up(tmp_path):
    """A link that was not renamed, checkpoints half removed or half written: the next time goes through, with the newest two and the best."""
    for i, reward in enumerate((0.9, 0.1, 0.2, 0.3)):
        os.makedirs(tmp_path / "checkpoints" / f"{i:05d}")
        (tmp_path / "checkpoints" / f"{i:05d}" / "training.json").write_text(json.dumps({"reward": reward}))
    os.symlink("checkpoints/00001", tmp_path / "checkpoint.tmp")
    for left in ("00001.old", "00077.old", "00002.tmp"):
        os.makedirs(tmp_path / "checkpoints" / left / "exp_avg")
    train.tidy(Settings(out=str(tmp_path)))
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["00000", "00002", "00003"]
    assert os.readlink(tmp_path / "checkpoint") == "checkpoints/00003" and sorted(os.listdir(tmp_path)) == ["checkpoint", "checkpoints"]


def test_lessons_of_the_warm_start():
    """With letters: subsets numbered anew, plans that name worker and number; second turns that keep the answer or not, by chance. Whether
    another worker comes, and whether the answer is kept, are one token each."""
    s, rng, pool = Settings(named=True, warm_second=0.5), random.Random(0), workers.load_pool("local:pairs", "http://127.0.0.1:9/v1")
    problem, empty, second, texts = load("laptop", "train", 1)[0], 0, 0, []
    for _ in range(300):
        chat, completion = train.random_lesson(problem, rng, pool, s)
        system, question, *turns = [m["content"] for m in chat]
        letters = re.fullmatch(r"Models ((?:[A-H] \d ?)+), 5 steps\.", system)[1].split()[::2]
        assert letters == sorted(letters) and system.split()[2:-2:2] == [*map(str, range(len(letters) - 1)), f"{len(letters) - 1},"]
        assert question == problem.question and len(turns) in (0, 2)
        workflow, second = parse(completion, len(letters), allow_empty=bool(turns)), second + bool(turns)
        empty += not workflow.steps
        if workflow.steps:
            named = completion.split("\n")[0].removeprefix(f"Plan: {problem.question} ").split(", ")
            assert named == [f"{letters[step.worker]} {step.worker}" for step in workflow.steps]
        texts.append("assistant\n" + completion)
    assert 110 < second < 190 and 0.3 < empty / second < 0.7
    assert re.search(r" A 0\nmodel_id = \[0\]", train.random_lesson(problem, random.Random(1), pool[:1], Settings(named=True, max_steps=1))[1])
    tokenizer = tiny_tokenizer(texts)
    assert [tokenizer.decode([i]) for i in tokenizer.encode(" A 1, B 2")] == [" A", " 1", ",", " B", " 2"]
    assert len(tokenizer.encode(Workflow([]).text())) == 1


# ---------------------------------------------------------------------------------------------------------------------------------
# Workers that fail


class Moody(workers.Handler):
    """The specialists, who answer 400 to a share of what they are asked: at /30/v1 to 30 %, at /100/v1 to all, but to a hello."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        data, per_cent = json.loads(body), int(self.path.split("/")[1])
        self.server.asked.append((per_cent, data["messages"]))
        if data["messages"][-1]["content"] != "Say hello." and zlib.crc32(body) % 100 < per_cent:
            return self.answer(400, {"error": {"message": "not in the mood"}})
        text = workers.SPECIALISTS[data["model"]](data["messages"])
        self.answer(200, {"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}], "usage": {}})


@pytest.fixture(scope="module")
def moody(tmp_path_factory):
    """(folder with 30.json and 100.json, pools of workers that fail so often; what they were asked, as it grows)."""
    folder, server = tmp_path_factory.mktemp("moody"), workers.Server(("127.0.0.1", 0), Moody)
    server.asked = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for per_cent in (30, 100):
        url = f"http://127.0.0.1:{server.server_address[1]}/{per_cent}/v1"
        entries = [{"name": name, "protocol": "openai", "model": name, "base_url": url} for name in workers.LOCAL["local"]]
        (folder / f"{per_cent}.json").write_text(json.dumps(entries))
    yield folder, server.asked
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def faulty(checkpoint, moody):
    """(out at 30 %, out at 100 %, ends): runs from the checkpoint above. The second has no KL term, and the ablations."""
    folder, _ = moody
    def command(per_cent, *more):
        return ["train.py", "--preset=laptop", f"--init_from={checkpoint}", f"--pool={folder}/{per_cent}.json",
                f"--out={folder}/{per_cent}", "--questions=8", "--rollouts=8", "--test=8", "--max_new_tokens=64", *more]
    ends = runs(command(30, "--iterations=3"), command(100, "--iterations=2", "--beta=0", "--importance=2", "--access=false", "--subtasks=false"))
    return f"{folder}/30", f"{folder}/100", ends


def test_lost_rollouts_are_counted_and_training_goes_on(faulty, checkpoint):
    """With 30 % of calls failing, rollouts are lost and counted, have no reward, and are in no mean; the weights are trained."""
    out, _, [end, _] = faulty
    for i, line in enumerate(metrics(out)):
        lost = [row for row in recount(out, i) if row["reward"] is None]
        assert 0 < len(lost) == line["lost"] < 64 and line["grad_norm"] > 0 and math.isfinite(line["grad_norm"])
        assert all("not in the mood" in row["trace"]["error"] and "(attempt 1," in row["trace"]["error"] for row in lost)
        assert f"lost {line['lost']} " in end.out
    assert len(metrics(out)) == 3 and weights(out) != weights(os.path.dirname(checkpoint))


def test_training_learns_the_same_with_failing_workers(trained, moody, tmp_path):
    """The short run from nothing, with 30 % of calls failing: lost rollouts are counted, and the reward rises as it does without."""
    [end] = runs(["train.py", "--preset=laptop", f"--pool={moody[0]}/30.json", f"--out={tmp_path}/out", *SHORT])
    failing, sound = metrics(tmp_path / "out"), metrics(trained[0][0])
    assert all(0 < line["lost"] < 100 for line in failing)
    for key in ("reward", "parsed"):
        rise, same = (sum(line[key] for line in lines[-2:]) / 2 - sum(line[key] for line in lines[:2]) / 2 for lines in (failing, sound))
        assert rise > same / 2 > 0.02, key


def test_what_is_lost_teaches_nothing(faulty, checkpoint):
    """With every call failing, what parses is lost and what does not is all alike: not one bit of the weights moves."""
    _, out, _ = faulty
    for i, line in enumerate(metrics(out)):
        recount(out, i)
        assert line["lost"] == round(line["parsed"] * 64) > 0 and line["reward"] == line["accuracy"] == line["calls"] == 0
    assert weights(out) == weights(os.path.dirname(checkpoint))


@pytest.fixture
def in_process(monkeypatch):
    """train.main may be called here: it finds no GPU, and the signal handlers that it sets are taken back."""
    handlers = {sig: signal.getsignal(sig) for sig in (signal.SIGINT, signal.SIGTERM)}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    yield
    for sig, handler in handlers.items():
        signal.signal(sig, handler)


def test_what_is_trained_on(checkpoint, moody, monkeypatch, in_process):
    """Every rollout that was not lost is trained on once, as sampled, with its advantage among those of its group not lost."""
    folder, seen = moody[0], []

    def spy(model, optimizer, episodes, *how, **more):
        seen.extend(episodes)
        return update(model, optimizer, episodes, *how, **more)

    update = train.update
    monkeypatch.setattr(train, "update", spy)
    train.main(["--preset=laptop", f"--init_from={checkpoint}", f"--pool={folder}/30.json", f"--out={folder}/spied",
                "--iterations=1", "--questions=8", "--rollouts=10", "--minibatches=3", "--test=1", "--max_new_tokens=64"])
    tokenizer, rows, expected = Tokenizer.from_pretrained(checkpoint), recount(f"{folder}/spied", 0), []
    for group in (rows[i:i + 10] for i in range(0, 80, 10)):
        rewards = [row["reward"] for row in group if row["reward"] is not None]
        mean = sum(rewards) / max(len(rewards), 1)
        std = (sum((r - mean) ** 2 for r in rewards) / max(len(rewards), 1)) ** 0.5
        expected += [(row["text"], (row["reward"] - mean) / std if std else 0.0) for row in group if row["reward"] is not None]
    texts, got = zip(*sorted((tokenizer.decode(e.tokens), e.advantage) for e in seen))
    written, wanted = zip(*sorted(expected))
    assert 0 < len(seen) < 80 and texts == written and got == pytest.approx(wanted, abs=1e-5)
    assert sum(e.tokens[-1] == tokenizer.eos_id for e in seen) > 40 and all(len(e.tokens) == len(e.logprobs) for e in seen)


def test_ablations_reach_the_workers(faulty, moody):
    """With --access=false --subtasks=false every worker gets one turn, with the question and the general subtask."""
    (_, out, _), (_, asked) = faulty, moody
    chats = [chat for per_cent, chat in asked if per_cent == 100 and chat[-1]["content"].startswith("Question:")]
    steps = sum(len(row["trace"]["workflow"]["steps"]) for i in range(2) for row in rollouts(out, i) if row["trace"])
    told = [chat[-1]["content"].endswith("\n\nYour task:\nSolve the question.") for chat in chats]
    assert all(len(chat) == 1 for chat in chats[:steps]) and all(told[:steps]) and steps > 30
    assert any(len(chat) > 1 for per_cent, chat in asked if per_cent == 30)


# ---------------------------------------------------------------------------------------------------------------------------------
# Bad input


REFUSED = {
    "unknown flag": (["--iteration=3"], ["--iteration", "--iterations"]),
    "bad value": (["--questions=many"], ["--questions=many", "int"]),
    "paper without GPUs": (["--preset=paper"], ["--preset=laptop", "GPU"]),
    "no checkpoint, no problems": (["--init_from={tmp}/none", "--data=lapdog"], ["--init_from={tmp}/none", "lapdog"]),
    "half a checkpoint": (["--init_from={tmp}/half"], ["{tmp}/half"]),
    "worker down": (["--pool={tmp}/down.json"], ["carpenter"]),
    "no room": (["--out={tmp}/file/out"], ["{tmp}/file"]),
}
TINY = ["--warm_steps=1", "--warm_batch=2", "--width=16", "--layers=1", "--iterations=1", "--questions=2", "--rollouts=2",
        "--test=1"]


@pytest.fixture(scope="module")
def refused(tmp_path_factory):
    """{case: its end} of train.py called wrongly, two at a time; and the folder for {tmp}."""
    tmp = tmp_path_factory.mktemp("wrong")
    (tmp / "half").mkdir()
    (tmp / "half" / "config.json").write_text('{"model_type": "qwen2"}')
    (tmp / "file").write_text("in the way")
    down = {"name": "carpenter", "protocol": "openai", "model": "m", "base_url": "http://127.0.0.1:9/v1", "attempts": 1}
    (tmp / "down.json").write_text(json.dumps([down]))

    def call(case):
        argv = ["--preset=laptop", f"--out={tmp}/{case}", *TINY, *REFUSED[case][0]]
        return Ended(launch("train.py", *[word.format(tmp=tmp) for word in argv]))

    with ThreadPoolExecutor(2) as threads:
        return dict(zip(REFUSED, threads.map(call, REFUSED))), str(tmp)


@pytest.mark.parametrize("case", REFUSED)
def test_train_refuses(case, refused):
    """Each ends the program with a status, one line that names what is wrong, and no traceback; nothing was trained."""
    ends, tmp = refused
    end, names = ends[case], REFUSED[case][1]
    assert end.status not in (0, None) and "Traceback" not in end.err and "reward" not in end.out, end.err
    assert len(end.err.strip().splitlines()) == 1, end.err
    assert all(name.format(tmp=tmp) in end.err for name in names), end.err


@pytest.mark.parametrize("word, names", [
    ("--preset=lapdog", "laptop, pairs, pools"), ("--data=mine.jsonl", "--test_data"), ("--subset=6", "5 workers"),
    ("--keep=1000000000", "GiB of disk"), ("--init_from={tmp}/none", "lacks a checkpoint folder at --init_from=\\S*none .train it first"), ("--loss=mean", "sequence, token"), ("--test_data=lapdog", "lapdog"), ("--reference={tmp}/none", "--reference=.*none"),
    ("--resume", "began without"), ("laptop", "'laptop'"), ("--rollouts=0", "--rollouts=0"),
    ("--iterations=-1", "--iterations=-1"), ("--style=shrt", "shrt"), ("--width=30", "--width=30"),
    ("--max_steps=0", "--max_steps=0"), ("--temperature=0", "--temperature=0"), ("--warm_batch=0", "--warm_batch=0")])
def test_main_refuses(word, names, tmp_path, in_process):
    """As above, without a process of its own. --resume finds a run that began without a KL term."""
    os.makedirs(tmp_path / "out" / "checkpoints" / "00001")
    with pytest.raises(SystemExit, match=names):
        train.main(["--preset=laptop", f"--out={tmp_path}/out", *TINY, word.format(tmp=tmp_path)])


def test_ctrl_c_in_the_warm_start(tmp_path):
    """Before the first iteration there is nothing to save: a message says so, without a traceback, and the server is gone."""
    process = launch("train.py", "--preset=laptop", f"--out={tmp_path}/out", "--warm_steps=100000")
    until(lambda: "parameters" in process.stdout.readline(), process)
    process.send_signal(signal.SIGINT)
    end = Ended(process)
    assert end.status == 1 and "interrupted" in end.err and "Traceback" not in end.err
    assert not os.path.exists(tmp_path / "out" / "metrics.jsonl")


def test_ctrl_c_in_the_last_evaluation(checkpoint, tmp_path):
    """Training is over and its checkpoint is there; the evaluation ends at once, and no table is made of half of it."""
    process = launch("train.py", "--preset=laptop", f"--out={tmp_path}/out", f"--init_from={checkpoint}", *TINY, "--test=2000")
    until(lambda: os.path.exists(tmp_path / "out" / "checkpoint"), process)
    process.send_signal(signal.SIGINT)
    end = Ended(process)
    assert end.status == 1 and f"{tmp_path}/out/checkpoint" in end.err and "Traceback" not in end.err
    assert "Conductor  " not in end.out
    assert weights(tmp_path / "out") and len(metrics(tmp_path / "out")) == 1


def test_ctrl_c_in_the_last_save(checkpoint, tmp_path, monkeypatch, in_process):
    """As above, where the signal comes after the last iteration's look for one, and before the evaluation's own handler."""
    tidy = train.tidy
    monkeypatch.setattr(train, "tidy", lambda s: (tidy(s), os.kill(os.getpid(), signal.SIGINT)))
    with pytest.raises(SystemExit, match=f"interrupted.*{tmp_path}/out/checkpoint"):
        train.main(["--preset=laptop", f"--out={tmp_path}/out", f"--init_from={checkpoint}", *TINY])
    assert weights(tmp_path / "out") and not os.path.exists(tmp_path / "out" / "test.json")


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_killed_run_goes_on_as_if_nothing_had_happened(ranks, checkpoint, tmp_path):
    """Killed with SIGKILL between two checkpoints, with a torn line of metrics and a half-written checkpoint, and resumed: the weights and
    metrics are those of a run that was left alone, to the bit. Then it goes on on another number of ranks, and what is new is named."""
    how = ["train.py", "--preset=laptop", f"--init_from={checkpoint}", "--questions=8", "--rollouts=16", "--test=8", "--max_new_tokens=64",
           "--save_every=2", "--seed=5"]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    how, other = (torchrun + how, how) if ranks == 2 else (how, torchrun + how)
    whole, broken = (str(tmp_path / name) for name in ("whole", "broken"))
    process = launch(*how, "--iterations=12", f"--out={broken}")
    until(lambda: os.path.exists(f"{broken}/metrics.jsonl") and len(metrics(broken)) >= 5, process)
    for pid in subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split() if ranks > 1 else []:
        os.kill(int(pid), signal.SIGKILL)  # torchrun's ranks have process groups of their own
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    reached = len(metrics(broken))
    assert reached < 12
    with open(f"{broken}/metrics.jsonl", "a") as f:
        f.write('{"iteration": ')
    os.makedirs(f"{broken}/checkpoints/00012.tmp")
    again, _ = runs([*how, "--iterations=12", f"--out={broken}", "--resume"], [*how, "--iterations=12", f"--out={whole}"])
    assert re.search(rf"going on in {broken} after iteration [{reached - 2}-{reached}]$", again.out, re.MULTILINE)

    def state(out):
        with open(f"{out}/checkpoint/model.safetensors", "rb") as f:
            return f.read(), [{k: v for k, v in line.items() if k not in ("seconds", "tokens_per_second")} for line in metrics(out)]

    assert state(broken) == state(whole)
    assert sorted(os.listdir(f"{broken}/traces")) == sorted(os.listdir(f"{whole}/traces"))
    kept = sorted(os.listdir(f"{whole}/checkpoints"))
    assert kept[-2:] == ["00010", "00012"] and len(kept) <= 3
    [end] = runs([*other, "--iterations=13", f"--out={broken}", "--resume"])
    assert f"going on in {broken} after iteration 12, with changed settings: iterations 12 -> 13" in end.out
    assert state(broken)[1][:12] == state(whole)[1] and [line["iteration"] for line in metrics(broken)] == [*range(13)]


def test_nothing_to_resume_is_a_run_from_the_beginning(checkpoint, tmp_path):
    [end] = runs(["train.py", "--preset=laptop", f"--init_from={checkpoint}", *SHORT, "--iterations=1", f"--out={tmp_path}/out", "--resume"])
    assert "going on" not in end.out and len(metrics(f"{tmp_path}/out")) == 1


def test_a_budget_ends_the_run_before_it_is_passed(checkpoint, tmp_path):
    """With priced workers and $0.03: the run stops with a checkpoint, what was refused is lost and not punished, and the bill is below.
    Started again with the same replies on file, it asks only for what the first run could not pay."""
    (tmp_path / "pool.json").write_text(json.dumps([
        {"name": name, "protocol": "openai", "base_url": workers.local_server()[0], "model": name, "price": [0, 10],
         "params": {"max_tokens": 20}} for name in workers.LOCAL["local"]]))
    argv = ["train.py", "--preset=laptop", f"--init_from={checkpoint}", *SHORT, "--iterations=40", f"--pool={tmp_path}/pool.json",
            f"--replay={tmp_path}/replies"]
    out = f"{tmp_path}/out"
    end = Ended(launch(*argv, "--budget=0.03", f"--out={out}"))
    lines = metrics(out)
    assert end.status == 1 and 1 <= len(lines) < 40 and lines[-1]["lost"] > 0 and os.path.exists(f"{out}/checkpoint/model.safetensors")
    assert end.err.strip().splitlines()[-1].startswith(f"the budget is spent: stopped after iteration {len(lines)}")
    assert 0.01 < sum(line["cost"] for line in lines) <= 0.03
    paid = len((tmp_path / "replies").read_bytes().splitlines())
    assert paid == sum(line["calls"] for line in lines)
    again = Ended(launch(*argv, "--budget=0.03", f"--out={out}2"))
    assert again.status == 1 and len(metrics(f"{out}2")) > len(lines)


def test_a_run_may_start_from_the_checkpoint_in_its_own_folder(trained, tmp_path):
    """`--init_from=OUT/checkpoint --out=OUT`: the earlier run moves aside, and its checkpoint is what is loaded, also as the reference."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "metrics.jsonl").write_text("earlier\n")
    os.symlink(f"{trained[1][0]}/checkpoint", out / "checkpoint")
    [end] = runs(["train.py", "--preset=laptop", f"--out={out}", f"--init_from={out}/checkpoint", f"--reference={out}/checkpoint", *TINY,
                  "--max_new_tokens=48"])
    assert (tmp_path / "out.1" / "metrics.jsonl").read_text() == "earlier\n" and len(metrics(out)) == 1


# ---------------------------------------------------------------------------------------------------------------------------------
# What a run will take


def test_the_papers_plan_by_hand(tmp_path, monkeypatch):
    """Qwen2.5-7B on two ranks: 12 bytes a parameter and 4 of gradients in halves, a bf16 copy, keys and values of two questions' rollouts."""
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    text, disk = train.plan(Settings(preset="paper", **PRESETS["paper"]), workers.load_pool("paper"))
    N = 7_615_616_512  # of the model card: 7.61 B, 6.53 B without embeddings
    for name, size in (("weights, fp32", 2 * N), ("Adam's state, fp32", 4 * N), ("copy to sample with", 2 * N), ("gradients, fp32", 2 * N),
                       ("layers' inputs", 28 * 8192 * 3584 * 2)):
        assert f"{name} {size / 2**30:.1f}" in text, name
    prompt = int(re.search(r"prompts of (\d+) tokens", text)[1])
    assert f"keys and values {2 * (prompt + 64 * 1024) * 2 * 28 * 4 * 128 * 2 / 2**30:.1f}" in text and 800 < prompt < 1500
    assert max(map(float, re.search(r"peak while sampling ([\d.]+), while training ([\d.]+)", text).groups())) < 75
    assert "153,600 calls" in text and "4 workers of unknown price (R1-Distill-Qwen-32B," in text
    dollars = 153_600 / 7 * (2 * 0.00825 + 0.0135)  # 1,000 tokens in and 700 out, of $1.25 and $10, and of $3 and $15, a million
    assert f"about ${dollars:,.0f}," in text
    assert disk == 12 * N and "disk      85.1 GiB" in text
    offloaded, _ = train.plan(Settings(preset="paper", **PRESETS["paper"], offload=True), workers.load_pool("paper"))
    assert "weights, fp32 (CPU) 14.2" in offloaded and float(re.search(r"training ([\d.]+)\n", offloaded)[1]) < 20


def test_dry_runs(tmp_path):
    """The plan, and either what is lacking, all of it, or that nothing is; no folder is made."""
    papers, laptops = (Ended(launch("train.py", f"--preset={preset}", "--dry_run", f"--out={tmp_path}/out")) for preset in ("paper", "laptop"))
    assert papers.status == 1 and "Traceback" not in papers.err and "expected at least" not in papers.err
    for lack in ("2 GPUs of 80 GB", "models/Qwen/Qwen2.5-7B", "eval.py prepare", "$OPENAI_API_KEY for GPT-5", "set $OPEN_BASE_URL"):
        assert lack in papers.err, lack
    assert laptops.status == 0 and "memory    GiB of a rank" in laptops.out and "the run lacks nothing" in laptops.out
    assert not os.path.exists(tmp_path / "out")


def test_bench_says_what_it_measured(capsys, monkeypatch):
    """At a small size: naive keeps more for its backward pass, every time is one, and the last line is JSON."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    train.bench(width=64, layers=1, vocabulary=128, prompt=60, n=16, length=9, budget=150)
    lines = capsys.readouterr().out.splitlines()
    numbers = json.loads(lines[-1])
    assert numbers["times_less_kept"] == pytest.approx(numbers["kept_gigabytes_naive"] / numbers["kept_gigabytes_shared"]) and "16 rollouts of 9" in lines[0]
    assert 2 < numbers["times_less_kept"] < 16 * 69 / (60 + 16 * 9) and all(x > 0 for x in numbers.values())


@pytest.mark.parametrize("more", [["--offload"], ["--recompute", "--loss=token", "--clip_high=0.3", "--std=False", "--epochs=2", "--importance=2"]],
                         ids=lambda more: more[0])
def test_options_of_the_trainer(more, checkpoint, tmp_path):
    """Two ranks. Where the trainer's state is changes nothing; the others run, and learn something else."""
    argv = ["-m", "torch.distributed.run", "--nproc_per_node=2", "train.py", "--preset=laptop", f"--init_from={checkpoint}", "--iterations=2",
            "--questions=4", "--rollouts=8", "--max_new_tokens=64", "--test=8"]
    runs([*argv, f"--out={tmp_path}/plain"], [*argv, *more, f"--out={tmp_path}/more"])
    plain, other = (timeless(metrics(tmp_path / name)[1]) for name in ("plain", "more"))
    assert (plain == other) == (more == ["--offload"]) and math.isfinite(other["grad_norm"])
    assert (weights(tmp_path / "plain") == weights(tmp_path / "more")) == (more == ["--offload"])


def test_the_reward_is_a_setting(checkpoint, tmp_path):
    """no_workflow, wrong and right: in the traces and in the metrics."""
    runs(["train.py", "--preset=laptop", f"--init_from={checkpoint}", "--iterations=1", "--questions=4", "--rollouts=8", "--max_new_tokens=64",
          "--test=8", "--no_workflow=-1", "--wrong=-0.5", f"--out={tmp_path}/out"])
    rows = rollouts(tmp_path / "out", 0)
    for row in rows:
        gold = Problem("", "", row["answer"], "")
        assert row["reward"] == (-1 if row["trace"] is None else 1 if grade(gold, row["trace"]["answer"]) else -0.5)
    assert metrics(tmp_path / "out")[0]["reward"] == pytest.approx(sum(row["reward"] for row in rows) / 32)
