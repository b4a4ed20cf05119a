"""What a run takes, against numbers worked by hand, on faked devices; what is refused, and what would fit
instead."""
import json
import math
import os
import random
import re
import shlex
import sys
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import train
import workers
from eval import Problem, grade
from model import Config, Qwen
from sample import Completion
from train import PRESETS, Settings
from train_runs import TINY, Ended, Forked, metrics, rollouts, runs, timeless, weights
from workflow import Rollout, Task, Trace, Workflow

# Qwen2.5-0.5B
SMALL = Config(151936, 896, 4864, 24, num_attention_heads=14, num_key_value_heads=2, tie_word_embeddings=True)


@pytest.fixture
def machine(monkeypatch):
    """machine(gigabytes, processes, name): so many processes have a GPU of that size each; without a size
    there is only a CPU of 16 GB."""
    def set_up(gigabytes=0, processes=1, name="NVIDIA H100 80GB HBM3"):
        kind = ("cuda", gigabytes * 10**9, name) if gigabytes else ("cpu", 16 * 10**9 // processes, "cpu")
        monkeypatch.setattr(train, "devices", lambda: kind)
        monkeypatch.setattr(dist, "get_world_size", lambda: processes)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
        monkeypatch.setenv("WORLD_SIZE", str(processes))
        return kind[0]
    return set_up


def test_the_papers_memory_by_hand(machine):
    """Qwen2.5-7B on two ranks: 12 bytes a parameter and 4 of gradients in halves, a bf16 copy, keys and
    values of half of the rollouts."""
    machine(80, 2)
    s, N = Settings(**PRESETS["paper"], dtype="bf16"), 7_615_616_512  # of the model card: 7.61 B
    phases = train.memory(s, Config(), 2, 1051)
    # 2 x 28 layers x 4 heads x 128 x 2 bytes a token
    for phase, part, size in [
        ("training", "weights", 2 * N), ("training", "Adam's state", 4 * N), ("training", "gradients", 2 * N),
        ("training", "layers' inputs", 28 * (8192 + 1051) * 3584 * 2),
        ("sampling", "copy to sample with", 2 * N),
        ("sampling", "keys and values", 57_344 * (4 * 1051 + 128 * 1024)), ("sampling", "weights", 2 * N),
        ("evaluation", "Adam's state", 4 * N)]:
        assert phases[phase][part] == pytest.approx(size / 2**30), (phase, part)
    assert "gradients" not in phases["sampling"] and "reference policy" not in phases["training"]
    s.eval_every = 0
    # By then they are gone
    assert not {"weights", "Adam's state"} & train.memory(s, Config(), 2, 1051)["evaluation"].keys()
    s.beta, s.offload = 0.1, True
    phases = train.memory(s, Config(), 2, 1051)
    assert phases["training"]["weights (CPU)"] == phases["training"]["reference policy"] == 2 * N / 2**30
    assert train.peak({"x": {"a (CPU)": 9, "b": 2}, "y": {"c": 3}}) == 3
    # In fp32 attention's scores are kept: 28 heads, each query of a layer with its prompt and completion
    s.dtype = "fp32"
    scores = 3 * 4 * 28 * (8192 + 1051) * (1051 + 1024)
    assert train.memory(s, Config(), 2, 1051)["training"]["a layer at work"] == pytest.approx(
        (scores + (8192 + 1051) * (10 * 3584 + 5 * 18944) * 4) / 2**30)


RUNS = [  # preset, changes, shape, GB of a device, processes: whether it is accepted
    ("laptop", {}, None, 0, 1, True),
    ("laptop", {}, None, 0, 2, True),
    ("laptop", {}, None, 16, 1, True),
    ("laptop", {}, None, 80, 8, True),
    ("small", {}, SMALL, 16.7, 1, True),  # An RTX A4000 of 16 GB has 15.6 GiB.
    ("small", {}, SMALL, 24, 1, True),
    ("small", {}, SMALL, 8, 1, False),
    ("paper", {}, Config(), 85, 2, True),
    ("paper", {}, Config(), 85, 1, False),
    ("paper-recursive", {}, Config(), 85, 2, True),
    ("paper", {}, Config(), 85, 8, True),
    ("paper", {"offload": True, "token_budget": 32768}, Config(), 85, 1, True),  # gradients leave the GPU seldom
    ("paper", {"beta": 0.1}, Config(), 85, 2, False),
    ("paper", {"beta": 0.1, "offload": True}, Config(), 85, 1, True),
    ("paper", {"recompute": False}, Config(), 85, 2, False),
    ("paper", {"token_budget": 65536}, Config(), 85, 2, False),
    ("paper", {}, Config(), 150, 1, True),
    ("paper", {"beta": 0.1}, Config(), 150, 1, False),
    ("paper", {}, Config(), 24, 8, False),
    ("paper", {}, Config(), 0, 1, False),
    ("paper", {"offload": True, "recursion": True}, Config(), 85, 1, True),
]


@pytest.mark.parametrize("preset, changes, shape, size, processes, accepted", RUNS)
def test_the_estimate_decides(preset, changes, shape, size, processes, accepted, machine):
    """The peak and 3 GiB against the device's memory, for any model and number of processes. A refusal names
    a way that is accepted."""
    machine(size, processes)
    s = Settings(**{**PRESETS[preset], **changes})
    config = shape or train.tiny_config(s)
    train.choose_by_size(s, config)
    text, lack = train.estimate(
        s, config, workers.load_pool("local" if s.pool == "local" else "paper", "http://127.0.0.1:9/v1"))
    assert (lack == "") == accepted, lack
    assert re.search(r"at most [\d.]+ GiB a process", text)
    if not accepted:
        said = r"^memory: [\d.]+ GiB for each process, of which [\d.]+ are here; "
        assert re.search(said + "(it would fit with|a smaller model)", lack)
        for way in re.findall(r"with ((?:--\S+=\w+ ?)+)", lack):
            changed = Settings(**vars(s))
            train.configure(changed, way.split())
            assert train.estimate(changed, config, workers.load_pool("paper"))[1] == "", way


@pytest.mark.parametrize("offload, size, told", [
    (True, 160, ["170 GiB of RAM, and some more, for --offload"]), (True, 256, []),
    (False, 64, ["85 GiB of RAM, and some more, for checkpoints"]), (False, 128, [])])
def test_a_gpu_needs_memory_of_the_cpu(offload, size, told, machine, monkeypatch):
    """12 bytes a parameter are gathered for a checkpoint. Offloaded are 16, of which 8 are pinned: for the 7B these 57 GiB are 108
    in powers of two."""
    machine(80)
    monkeypatch.setattr(train, "machine_memory", lambda: size * 2**30)
    s = Settings(offload=offload, beta=0.0, out="out/nowhere")
    assert [lack for lack in train.room_lacking(s, Config()) if "RAM" in lack] == told


def test_long_prompts_are_read_in_turns(machine):
    """More of them at once take no more memory than 32,768 tokens of them."""
    machine(80, 2)
    sizes = [train.memory(Settings(**PRESETS["paper"] | {"questions": n}, dtype="bf16"), Config(), 2, 1051)["sampling"]
             for n in (31, 64)]
    assert sizes[0] == sizes[1]


def test_what_would_fit(machine):
    """7B on one card of 80 GB: offload or more cards; on two of 48 GB the same; on a CPU of 16 GB nothing,
    and for a smaller model there nothing that takes other memory."""
    machine(0, 1)
    s = Settings(**PRESETS["small"] | {"rollouts": 256}, dtype="fp32")
    assert "offload" not in train.estimate(s, SMALL, workers.load_pool("local", "http://127.0.0.1:9/v1"))[1]
    for size, processes, expected in (
        (85, 1, "--offload=True, or with 2 processes"), (51, 2, "--offload=True, or with 8 processes"),
        (0, 1, "a smaller model is what would fit")):
        machine(size, processes)
        _, lack = train.estimate(
            Settings(**PRESETS["paper"], dtype="bf16"), Config(), workers.load_pool("paper"))
        assert expected in lack


def test_calls_dollars_and_seconds_by_hand(machine):
    """Seven workers of 16 calls at a time: 768 calls an iteration, 20 s each; three of the workers have a
    known price. On two H100s the sampling reads 15.2 GB of weights for each of 1,024 tokens."""
    machine(85, 2)
    s, pool = Settings(**PRESETS["paper"], dtype="bf16"), workers.load_pool("paper")
    text, _ = train.estimate(s, Config(), pool)
    slots = sum(w.concurrency for w in pool)
    calls = 3 * (200 * 256 + 225 + 4 * 72)  # training, and the Conductor's tests
    calls += 225 * (7 + 3)  # and at the end every worker alone, and random workflows
    dollars = calls / 7 * sum((w.price[0] * 1000 + w.price[1] * 700) / 1e6 for w in pool if w.price)
    assert f"workers {max(768 / slots, 3) * 20:.1f} (768 calls over {slots} slots, 20 s each)" in text
    assert (
        f"{calls:,} with the evaluations" in text and f"dollars   about {dollars:,.0f} at" in text
        and "without 4 workers whose price is unknown" in text)
    assert f"sampling {1024 * 2 * 7_615_616_512 / 3.35e12 / 0.65:.0f} (at 65 %" in text
    assert "disk      113.5 GiB a checkpoint" in text
    assert "20 s each" in train.estimate(replace(s, pool="local-vllm.json"), Config(), pool)[0]
    machine(85, 2, "Some GPU")
    text, _ = train.estimate(s, Config(), pool)
    assert (
        "how fast this device computes is unknown" in text
        and "sampling" not in text.split("seconds")[1].split("\n")[0])


def test_utilisation_by_hand(machine):
    """Two groups of a prompt of 100 and 4 x 50 tokens: 6 FLOP a parameter of the layers and token, the head
    for completions only."""
    machine(85, 2)
    config = Config()
    group = [Rollout(None, "", [1] * 100, Completion([1] * 50, [], True)) for _ in range(4)]
    layers = 28 * (6 * train.sizes(config)[0] + 12 * 3584 * 125)
    flops = 2 * (300 * layers + 200 * 6 * 3584 * 152064)
    assert train.utilisation([group, group], 0.5, config) == pytest.approx(flops / 0.5 / 989e12 / 2)
    machine(85, 2, "Some GPU")
    assert train.utilisation([group], 0.5, config) is None


def test_utilisation_is_of_what_was_computed(machine):
    """What is lost, and without a KL term what has no advantage, is not computed; with two epochs the rest is twice.
    Where nothing is, the statistics of the update are unknown, and in no mean."""
    machine(85, 2)
    task, config, s = Task("Why?", [], problem=Problem("", "Why?", "", "why")), Config(), Settings(beta=0.0)
    down = Trace("Why?", Workflow([]), [], [], error="down")
    spread, even, lost = ([
        Rollout(task, "", [1] * 100, Completion([1] * 50, [], True), down if r is None else None, reward=r, advantage=a)
        for r, a in two] for two in ([(0.0, -1.0), (1.0, 1.0)], [(0.5, 0.0)] * 2, [(None, 0.0)] * 2))
    names = ("gap", "approx_kl", "clipfrac", "kl", "entropy")
    steps = [dict.fromkeys(("lr", "skipped", "grad_norm", *names), 1.0)]
    steps.append({"grad_norm": 0.0, "skipped": 0, **dict.fromkeys(names)})
    for how, computed in (
        ({}, [spread]), ({"epochs": 2}, [spread, spread]), ({"beta": 0.1}, [spread, even])):
        line = train.metrics(
            replace(s, **how), 0, [spread, even, lost], steps, {"training": 1.0}, None, config)
        assert line["mfu"] == pytest.approx(train.utilisation(computed, 1.0, config)) and line["mfu"] > 0
        assert (line["entropy"], line["grad_norm"]) == (1.0, 0.5)


def test_the_last_command_can_be_pasted(checkpoint, tmp_path, in_process, capsys):
    """Into a shell, whatever the questions are; the shortest is in it."""
    odd = "What's `ls`,\n\"$HOME\" and {3 + 4}?"
    rows = [{"question": question, "answer": "7", "kind": "odd"} for question in (odd, odd * 100)]
    (tmp_path / "odd.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    train.main([
        "--preset=laptop", f"--init_from={checkpoint}", *TINY, "--max_new_tokens=64", f"--out={tmp_path}/out",
        f"--test_data={tmp_path}/odd.jsonl", "--test=2"])
    command = capsys.readouterr().out.partition(" Next: ")[2]
    assert shlex.split(command) == [
        "python", "workflow.py", odd, f"--checkpoint={tmp_path}/out/checkpoint"]


def test_the_memory_of_a_run_on_a_cpu_beside_gpus(machine, monkeypatch):
    """Where there are fewer GPUs than processes these compute on the CPU, though CUDA was asked for its GPUs."""
    machine(processes=2)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert train.memory_used() > 50e6


def test_the_preset_without_flags(machine):
    """The paper's run where two processes have 80 GB each, else the laptop's; what depends on the model's
    size."""
    for size, processes, preset in (
        (85, 2, "paper"), (85, 8, "paper"), (85, 1, "laptop"), (24, 2, "laptop"), (0, 2, "laptop")):
        machine(size, processes)
        assert train.settings_of([])[0].preset == preset
        assert train.settings_of(["--preset=small"])[0].init_from == "Qwen/Qwen2.5-0.5B-Instruct"
    for config, given, lr, dtype in (
        (Config(), 0.0, 1e-6, "bf16"), (Config(), 3e-7, 3e-7, "bf16"),
        (train.tiny_config(Settings()), 0.0, 1e-3, "fp32")):
        machine(85, 1)
        s = Settings(lr=given)
        train.choose_by_size(s, config)
        assert (s.lr, s.dtype) == (lr, dtype)  # a laptop run on a GPU computes in fp32, as on a CPU


def test_dry_runs(tmp_path):
    """The estimate, and either what is lacking, all of it, or that nothing is; no folder is made."""
    papers, laptops = (
        Ended(Forked("train.py", f"--preset={preset}", "--dry_run", f"--out={tmp_path}/out"))
        for preset in ("paper", "laptop"))
    assert papers.status == 1 and "Traceback" not in papers.err and "expected at least" not in papers.err
    for lack in (
        "GiB for each process", "Qwen/Qwen2.5-7B", "eval.py prepare", "$OPENAI_API_KEY for GPT-5",
        "$OPEN_BASE_URL for R1-Distill-Qwen-32B, Gemma 3 27B"):
        assert lack in papers.err, lack
    assert "7.616 billion parameters" in papers.out
    assert laptops.status == 0 and "at most 0." in laptops.out and "the run lacks nothing" in laptops.out
    assert not re.search(r" 0\.0\b|dollars|without 0", laptops.out), laptops.out  # nothing that is zero
    assert not os.path.exists(tmp_path / "out")


@pytest.mark.parametrize("start, said", [("out/paper/checkpoint", "7.616 billion parameters"), ("out/mine/checkpoint", "")])
def test_the_estimate_of_a_model_that_is_not_here(start, said, tmp_path, monkeypatch, in_process, capsys):
    """The paper's second run starts from its first; of a model that nobody knows nothing is said, and least of all a tiny one's size."""
    monkeypatch.chdir(tmp_path)
    argv = ["--preset=paper-recursive", "--pool=local", "--data=laptop", "--dry_run", f"--init_from={start}"]
    with pytest.raises(SystemExit, match=f"\n  a model to start from .no checkpoint in '{start}'") as end:
        train.main(argv)
    assert said in capsys.readouterr().out and "room for a prompt" not in str(end.value)
    assert ("GiB for each process" in str(end.value)) == bool(said)


def test_questions_that_a_tiny_conductor_cannot_write_down(tmp_path, in_process):
    """Its plan is the question: where that is longer than a completion may be, no format is learned, and every reward would be 0."""
    with open(tmp_path / "long.jsonl", "w") as f:
        f.write('{"question": "%s?", "answer": "2", "kind": "sums"}' % " ".join("Tell me about number %d" % i for i in range(40)))
    with pytest.raises(SystemExit, match="have more tokens than --max_new_tokens=96"):
        train.main(["--preset=laptop", f"--data={tmp_path}/long.jsonl", "--test_data=laptop", f"--out={tmp_path}/out", "--warm_steps=2"])


OPTIONS = {  # of the trainer, and what else is said
    "plain": [], "offload": ["--offload"], "bf16": ["--dtype=bf16"],
    "objective": ["--recompute", "--loss=token", "--clip_high=0.3", "--std=False", "--epochs=2", "--importance=2"]}


def test_options_of_the_trainer(checkpoint, tmp_path):
    """Two ranks. Where the trainer's state is changes nothing; the others run, and learn something else."""
    argv = [
        "train.py", "--preset=laptop", f"--init_from={checkpoint}", "--iterations=2", "--questions=4",
        "--rollouts=8", "--max_new_tokens=64", "--test=2"]
    runs(*([*argv, *more, f"--out={tmp_path}/{name}"] for name, more in OPTIONS.items()), ranks=2)
    lines = {name: timeless(metrics(tmp_path / name)[1]) for name in OPTIONS}
    for name, line in lines.items():
        same = name in ("plain", "offload")
        assert (line == lines["plain"]) == same and math.isfinite(line["grad_norm"]), name
        assert (weights(tmp_path / name) == weights(tmp_path / "plain")) == same, name
        assert line["gap"] < (0.05 if name == "bf16" else 1e-5), name


def test_importance_weights_reach_every_minibatch(monkeypatch):
    """On any number of ranks a rank weighs the very rollouts that it then trains on, and all of them are trained on
    once an epoch."""
    model = Qwen(train.tiny_config(Settings(width=16, layers=1), 40))
    optimizer = torch.optim.SGD(model.parameters())
    rng = random.Random(0)
    groups = []
    for _ in range(3):
        rewards = [None, *rng.choices((0.0, 1.0), k=8)]
        groups.append([
            Rollout(None, "", [1], Completion([1] * rng.randint(1, 30), [], True), reward=r) for r in rewards])
    s = Settings(minibatches=3, epochs=2, importance=2.0, iterations=2)
    run = train.Run(0, [], [], [], [], model, optimizer, None)
    for world in (1, 2, 3):
        monkeypatch.setattr(train.dist, "get_world_size", lambda world=world: world)
        trained = []
        for rank in range(world):
            monkeypatch.setattr(train.dist, "get_rank", lambda rank=rank: rank)
            weighed, steps = [], []
            monkeypatch.setattr(
                train, "set_importance", lambda model, rollouts, *_, weighed=weighed, **__: weighed.extend(rollouts))
            monkeypatch.setattr(
                train, "update", lambda model, optimizer, batch, steps=steps, **_: steps.append(batch) or {})
            train.learn(run, groups, s, 0)
            assert len(steps) == 6 and steps[:3] == steps[3:]
            assert sorted(map(id, weighed)) == sorted(id(r) for batch in steps[:3] for r in batch)
            trained += weighed
        assert sorted(map(id, trained)) == sorted(id(r) for group in groups for r in group[1:])


def test_the_reward_is_a_setting(checkpoint, tmp_path):
    """What no workflow and a wrong answer are worth: in the traces and in the metrics."""
    runs(
        [
            "train.py", "--preset=laptop", f"--init_from={checkpoint}", "--iterations=1", "--questions=4",
            "--rollouts=8", "--max_new_tokens=64", "--test=8", "--reward_no_workflow=-1", "--reward_wrong=-0.5",
            f"--out={tmp_path}/out"]
    )
    rows = rollouts(tmp_path / "out", 0)
    for row in rows:
        gold = Problem("", "", row["answer"], "")
        assert row["reward"] == (
            -1 if row["trace"] is None else 1 if grade(gold, row["trace"]["answer"]) else -0.5)
    assert metrics(tmp_path / "out")[0]["reward"] == pytest.approx(sum(row["reward"] for row in rows) / 32)
