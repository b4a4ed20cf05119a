"""Runs that are interrupted, killed, resumed, or cut into another number of ranks go on as if nothing had
happened."""
import copy
import fcntl
import json
import math
import os
import re
import signal
import sys
from dataclasses import asdict

import pytest
import torch

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import train
import workers
from model import Qwen, read_json, write_json
from train import Settings, dry_step, reporter
from train_runs import (
    SHORT, TINY, Ended, Forked, kill, launch, metrics, recount, rollouts, runs, timeless, until, weights, well)

# ------------------------------------------------------------------------------------------------------------
# From that checkpoint: two ranks, Ctrl-C


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]


def first_iteration(checkpoint):
    return [
        "--preset=laptop", f"--init_from={checkpoint}", "--iterations=1", "--questions=8", "--rollouts=8",
        "--test=8", "--max_new_tokens=64", "--minibatches=1", "--warmup=0", "--seed=5", "--eval_every=0"]


@pytest.fixture(scope="module")
def continued(checkpoint, tmp_path_factory):
    """(one, its end, two, its end): one process that is interrupted after its first iteration, in whose
    folder another run stood, and one iteration on two ranks; both from the checkpoint above."""
    one, two = (str(tmp_path_factory.mktemp("more") / "out") for _ in range(2))
    os.makedirs(one)
    with open(f"{one}/metrics.jsonl", "w") as f:
        f.write("earlier\n")
    both = launch(*TORCHRUN, "train.py", *first_iteration(checkpoint), f"--out={two}")
    process = launch("train.py", *first_iteration(checkpoint), "--iterations=4000", f"--out={one}")
    until(
        lambda: os.path.exists(f"{one}.1") and os.path.exists(f"{one}/metrics.jsonl") and metrics(one),
        process)
    process.send_signal(signal.SIGINT)
    return one, Ended(process), two, Ended(both)


def test_two_runs_do_not_share_a_folder(checkpoint, tmp_path):
    argv = ["train.py", "--preset=laptop", f"--init_from={checkpoint}", *TINY, f"--out={tmp_path}/out"]
    first = launch(*argv, "--iterations=4000")
    until(lambda: os.path.exists(f"{tmp_path}/out/metrics.jsonl"), first)
    second = Ended(Forked(*argv))
    alive = first.poll() is None
    kill(first)
    assert alive and second.status == 1 and "another run is writing there" in second.err
    assert not os.path.exists(f"{tmp_path}/out.1")


def test_resuming_tidies_what_a_kill_left(tmp_path, capsys):
    """Between a checkpoint's last file and the link to it, say. What a user has copied beside it stays."""
    s = Settings(out=str(tmp_path))
    write_json(f"{tmp_path}/settings.json", asdict(s))
    (tmp_path / "metrics.jsonl").write_text("{}\n{}\n")
    os.makedirs(tmp_path / "checkpoints" / "unfinished" / "state")
    for name in ("00001", "00002", "mine", "00001 to keep"):
        os.makedirs(tmp_path / "checkpoints" / name)
        write_json(f"{tmp_path}/checkpoints/{name}/training.json", {"score": 0.0})
    assert [os.path.basename(folder) for folder in train.checkpoints(str(tmp_path))] == ["00001", "00002"]
    os.symlink("checkpoints/00001", tmp_path / "checkpoint")
    train.hold(s)
    train.rewind(s, 2)
    assert os.readlink(tmp_path / "checkpoint") == "checkpoints/00002"
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["00001", "00001 to keep", "00002", "mine"]
    os.close(train.held.pop())
    other = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    with pytest.raises(OSError, match="another run is writing there"):
        train.hold(s)
    os.close(other)


@pytest.mark.parametrize("module, name, call", [(train, "write_tensors", 2), (train, "write_json", 4), (train.os, "rename", 2),
                                               (train.shutil, "rmtree", 1)])
def test_a_checkpoint_has_a_number_only_while_it_is_whole(module, name, call, tmp_path, monkeypatch, in_process):
    """Whatever ends the run within the writing of a checkpoint, or the removing of one, those that are listed can be resumed."""
    ended = []

    def end(*arguments, **options):
        if name == "rmtree" and not os.path.exists(f"{arguments[0]}/model.safetensors"):
            return whole(*arguments, **options)
        ended.append(name)
        if len(ended) == call:
            if name == "rmtree":  # amid the removing
                os.remove(f"{arguments[0]}/model.safetensors")
            raise InterruptedError("the end")
        return whole(*arguments, **options)

    whole = getattr(module, name)
    how = ["--preset=laptop", *TINY, "--warm_steps=2", "--iterations=3", "--save_every=1", "--keep=1", "--beta=0", "--eval_every=0", "--test=1",
           f"--out={tmp_path}/out"]
    with monkeypatch.context() as during:
        during.setattr(module, name, end)
        with pytest.raises(InterruptedError):
            train.main(how)
    train.dist.destroy_process_group()
    for folder in train.checkpoints(f"{tmp_path}/out"):
        assert {"config.json", "model.safetensors", "training.json", "state"} <= {*os.listdir(folder)}
        assert os.listdir(f"{folder}/state") == ["00000.safetensors"]
    train.main([*how, "--resume"])
    assert not os.path.exists(f"{tmp_path}/out/checkpoints/unfinished")


def test_ctrl_c_saves_and_says_so(continued, checkpoint):
    """The run stops after its iteration with a checkpoint, one message and no traceback; the specialists'
    server is gone, or its end of stderr would still be open."""
    out, end, *_ = continued
    lines = metrics(out)
    assert end.status == 1 and 1 <= len(lines) < 4000
    assert (
        end.err.strip().splitlines()[-1]
        == f"interrupted: stopped after iteration {len(lines)}; the checkpoint is in {out}/checkpoint; the same "
        "command with --resume goes on")
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
    """The next free number is taken, also where --out ends in a slash; a folder without a run in it is used
    as it is."""
    (tmp_path / "out.1").mkdir()
    for name, kept in [("out", None), ("out", "out.2"), ("out/", "out.3")]:
        train.make_room(train.settings_of([f"--out={tmp_path}/{name}"])[0])
        assert sorted(os.listdir(tmp_path / "out")) == ["settings.json", "traces"]
        assert kept is None or (tmp_path / kept / "metrics.jsonl").exists()
        (tmp_path / "out" / "metrics.jsonl").touch()
    assert sorted(os.listdir(tmp_path)) == ["out", "out.1", "out.2", "out.3"]


@pytest.fixture(scope="module")
def three(checkpoint, tmp_path_factory):
    """The end of one iteration on three ranks, of which one rolls out two of eight and the others three."""
    out = str(tmp_path_factory.mktemp("three") / "out")
    return out, Ended(Forked("train.py", *first_iteration(checkpoint), f"--out={out}", ranks=3))


@pytest.mark.parametrize("ranks", [2, 3])
def test_more_ranks_do_what_one_does(ranks, continued, three):
    """From the same weights the first iteration's rollouts are the same, rollout by rollout, and so are loss
    and gradient."""
    one, _, *two = continued
    more, end = two if ranks == 2 else three
    assert end.status == 0 and "Traceback" not in end.err, end.err
    recount(more, 0)
    alone, together = (
        [(row["problem"], row["text"], row["reward"]) for row in rollouts(out, 0)] for out in (one, more))
    assert [rollout[0] for rollout in together] == [rollout[0] for rollout in alone] and len(alone) == 64
    # What shares its batch changes a rollout by rounding only, which may turn one token in a million.
    same = sum(a == b for a, b in zip(alone, together))
    assert same >= 60
    a, b = metrics(one)[0], metrics(more)[0]
    for key in ("reward", "accuracy", "parsed", "steps", "entropy", "grad_norm"):
        assert b[key] == pytest.approx(a[key], rel=1e-3 if same == 64 else 0.2), key
    assert max(a["gap"], b["gap"]) < 1e-4
    # Rank 0 alone speaks
    assert end.out.count("random workflows") == 1 and os.path.exists(f"{more}/checkpoint/model.safetensors")


# ------------------------------------------------------------------------------------------------------------
def test_ctrl_c_in_the_warm_start(tmp_path):
    """Before the first iteration there is nothing to save: a message says so, without a traceback, and the
    server is gone."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "metrics.jsonl").touch()  # of an earlier run
    process = launch("train.py", "--preset=laptop", f"--out={tmp_path}/out", "--warm_steps=100000")
    until(lambda: "parameters" in process.stdout.readline(), process)
    process.send_signal(signal.SIGINT)
    end = Ended(process)
    assert end.status == 1 and "Traceback" not in end.err
    assert "interrupted; nothing had been saved" in end.err
    assert not os.path.exists(tmp_path / "out" / "metrics.jsonl")


def test_ctrl_c_in_the_last_evaluation(checkpoint, tmp_path):
    """Training is over and its checkpoint is there; the evaluation ends at once, and no table is made of half
    of it."""
    process = Forked(
        "train.py", "--preset=laptop", f"--out={tmp_path}/out", f"--init_from={checkpoint}", *TINY,
        "--test=20000")
    until(lambda: os.path.exists(tmp_path / "out" / "checkpoint"), process)
    os.kill(process.pids[0], signal.SIGINT)
    end = Ended(process)
    assert end.status == 1 and f"{tmp_path}/out/checkpoint" in end.err and "Traceback" not in end.err
    assert "Conductor  " not in end.out
    assert weights(tmp_path / "out") and len(metrics(tmp_path / "out")) == 1


@pytest.mark.parametrize("moment", ["tidy", "bill"])
def test_ctrl_c_between_training_and_the_last_evaluation(moment, checkpoint, tmp_path, monkeypatch, in_process):
    """As above, where the signal comes in the last save, or after the last look for one, and before the
    evaluation's own handler."""
    real = getattr(train, moment)
    monkeypatch.setattr(train, moment, lambda *x: (real(*x), os.kill(os.getpid(), signal.SIGINT)))
    with pytest.raises(SystemExit, match=f"interrupted.*{tmp_path}/out/checkpoint"):
        train.main(["--preset=laptop", f"--out={tmp_path}/out", f"--init_from={checkpoint}", *TINY])
    assert weights(tmp_path / "out") and not os.path.exists(tmp_path / "out" / "test.json")


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_killed_run_goes_on_as_if_nothing_had_happened(ranks, checkpoint, tmp_path):
    """Killed with SIGKILL between two checkpoints, with a torn line of metrics and a half-written checkpoint,
    and resumed: the weights and metrics are those of a run that was left alone, to the bit. Then it goes on
    on another number of ranks, and what is new is named."""
    how = [
        "train.py", "--preset=laptop", f"--init_from={checkpoint}", "--iterations=8", "--questions=8",
        "--rollouts=4", "--minibatches=2", "--test=2", "--max_new_tokens=64", "--save_every=2", "--seed=5"]
    whole, broken = (str(tmp_path / name) for name in ("whole", "broken"))
    process = Forked(*how, f"--out={broken}", ranks=ranks)
    until(lambda: os.path.exists(f"{broken}/metrics.jsonl") and len(metrics(broken)) >= 3, process)
    kill(process)
    process.communicate(timeout=20)
    reached = len(metrics(broken))
    assert reached < 8
    with open(f"{broken}/metrics.jsonl", "a") as f:
        f.write('{"iteration": ')
    os.makedirs(f"{broken}/checkpoints/unfinished/state", exist_ok=True)
    resumed = Forked(*how, f"--out={broken}", "--resume", ranks=ranks)
    alone = Forked(*how, f"--out={whole}", ranks=2) if ranks == 2 else launch(*how, f"--out={whole}")
    again, _ = well(Ended(resumed)), well(Ended(alone))
    going_on = re.search(rf"^going on in {broken} after iteration (\d+)$", again.out, re.MULTILINE)
    assert reached - 2 <= int(going_on[1]) <= reached

    def state(out):
        return weights(out), [timeless(line) for line in metrics(out)]

    assert state(broken) == state(whole) and weights(whole) != weights(os.path.dirname(checkpoint))
    assert sorted(os.listdir(f"{broken}/traces")) == sorted(os.listdir(f"{whole}/traces"))
    kept = sorted(os.listdir(f"{whole}/checkpoints"))
    assert kept[-2:] == ["00006", "00008"] and len(kept) <= 3
    before = read_json(f"{broken}/settings.json")
    newest = f"{broken}/checkpoints/00008/conductor.json"
    write_json(newest, read_json(newest) | {"workers": ["abacus"]})  # as if the pool had been another
    [end] = runs([*how, "--iterations=9", "--width=64", "--warm_steps=1", f"--out={broken}", "--resume"], ranks=3 - ranks)
    assert f"going on in {broken} after iteration 8, with changed settings: iterations 8 -> 9\n" in end.out
    assert "the Conductor learned with abacus, and takes calculator, " in end.err and "learned with" not in again.err
    assert read_json(f"{broken}/settings.json") == before | {"iterations": 9, "resume": True}  # what its start was stays
    parts = sorted(os.listdir(f"{broken}/checkpoint/state"))
    assert parts == [f"{rank:05d}.safetensors" for rank in range(3 - ranks)]
    assert state(broken)[1][:8] == state(whole)[1]
    assert [line["iteration"] for line in metrics(broken)] == [*range(9)]


def test_a_dry_step_leaves_no_trace(in_process):
    """Adam's state is there, as it is after no step; the weights are what they were, and so is what the next
    step makes of them."""
    torch.manual_seed(0)
    model = Qwen(train.tiny_config(Settings(width=32), 90))
    other = copy.deepcopy(model)
    fresh, dry = (torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True) for m in (other, model))
    s = Settings(max_new_tokens=16)
    train.dist.init_process_group("gloo", store=train.dist.HashStore(), rank=0, world_size=1)
    try:
        dry_step(model, dry, copy.deepcopy(model), s, 90)
    finally:
        train.dist.destroy_process_group()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters()))
    assert len(dry.state) == len(list(model.parameters())) and not any(
        x.any() for state in dry.state.values() for x in state.values())
    for m, optimizer in ((model, dry), (other, fresh)):
        train.set_lr(optimizer, 1e-2)
        m(torch.arange(8)[None]).pow(2).sum().backward()
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters()))


def test_three_steps_that_are_not_finite_end_the_run(checkpoint, tmp_path, monkeypatch, in_process):
    """After the second iteration, whose two steps are skipped as the first's last is: with the checkpoint
    that was saved before."""
    real, steps = train.update, []

    def update(*how, **more):
        steps.append(1)
        # The first is the dry step
        return real(*how, **more) | {"skipped": int(len(steps) > 2), "grad_norm": math.nan, "entropy": math.inf}

    monkeypatch.setattr(train, "update", update)
    with pytest.raises(SystemExit, match=f"three gradients in a row .*{tmp_path}/out/checkpoint"):
        train.main(
            [
                "--preset=laptop", f"--out={tmp_path}/out", f"--init_from={checkpoint}", *TINY,
                "--iterations=9", "--minibatches=2", "--save_every=1"]
        )
    assert [line["skipped"] for line in metrics(tmp_path / "out")] == [1, 2] and os.listdir(
        tmp_path / "out/checkpoints") == ["00001"]
    assert metrics(tmp_path / "out")[0]["grad_norm"] is metrics(tmp_path / "out")[0]["entropy"] is None


BROKEN = """
import sys
sys.path.insert(0, {root!r})
import train
def broken(*_):
    def write(*_):
        raise RuntimeError("the sampler is out of order")
    return write
if train.os.environ["RANK"] == "1":
    train.model_conductor = broken
train.main(sys.argv[1:])
"""


def test_an_error_while_sampling_ends_all_ranks(checkpoint, tmp_path):
    """Rank 1 fails while rank 0 waits for its rollouts: nothing hangs, and the error is shown."""
    (tmp_path / "broken.py").write_text(BROKEN.format(root=train.os.path.dirname(train.__file__)))
    end = Ended(
        launch(
            *TORCHRUN, str(tmp_path / "broken.py"), *first_iteration(checkpoint), f"--out={tmp_path}/out")
    )
    assert end.status != 0 and "the sampler is out of order" in end.err


def test_metrics_go_where_they_are_asked_for(tmp_path, monkeypatch):
    """Nowhere else without --report; to wandb as numbers, if it is installed."""
    class Wandb:
        seen = []  # noqa: RUF012

        @classmethod
        def init(cls, **how):
            return cls

        @classmethod
        def log(cls, numbers):
            cls.seen.append(numbers)

    monkeypatch.setitem(sys.modules, "wandb", Wandb)
    monkeypatch.setattr(train.dist, "get_rank", lambda: 0)
    reporter(Settings(), 0)({"reward": 1.0})
    assert Wandb.seen == []
    reporter(Settings(report="wandb"), 0)({"reward": 1.0})
    assert Wandb.seen == [{"reward": 1.0}]
    monkeypatch.setattr(train.importlib.util, "find_spec", lambda name: None)
    s = Settings(report="tensorboard", out="out/nowhere", beta=0.0)
    assert list(train.lacking(s, "", [])) == ["tensorboard (pip install tensorboard)"]


def test_nothing_to_resume_is_a_run_from_the_beginning(checkpoint, tmp_path):
    [end] = runs(
        [
            "train.py", "--preset=laptop", f"--init_from={checkpoint}", *TINY, "--max_new_tokens=48",
            f"--out={tmp_path}/out", "--resume"]
    )
    assert "going on" not in end.out and len(metrics(f"{tmp_path}/out")) == 1


def test_a_budget_ends_the_run_before_it_is_passed(checkpoint, tmp_path):
    """With priced workers and $0.004: the run stops with a checkpoint, what was refused is lost and not
    punished, and the bill is below. Started again with the same replies on file, it asks only for what the
    first run could not pay."""
    (tmp_path / "pool.json").write_text(
        json.dumps(
            [
                {
                    "name": name, "protocol": "openai", "base_url": workers.local_server()[0], "model": name,
                    "price": [0, 10], "params": {"max_tokens": 20}}
                for name in workers.LOCAL["local"]
            ]
        )
    )
    argv = [
        "train.py", "--preset=laptop", f"--init_from={checkpoint}", *SHORT, "--iterations=40",
        "--questions=4", "--rollouts=8", "--budget=0.004", f"--pool={tmp_path}/pool.json",
        f"--replay={tmp_path}/replies"]
    out = f"{tmp_path}/out"
    end = Ended(Forked(*argv, f"--out={out}"))
    lines = metrics(out)
    assert (
        end.status == 1 and 1 <= len(lines) < 40 and lines[-1]["lost"] > 0
        and os.path.exists(f"{out}/checkpoint/model.safetensors"))
    assert (
        end.err.strip().splitlines()[-1]
        .startswith(f"the budget is spent: stopped after iteration {len(lines)}"))
    assert 0.002 < sum(line["cost"] for line in lines) <= 0.004
    paid = sum(line != b"" for line in (tmp_path / "replies").read_bytes().splitlines())
    assert paid == sum(line["calls"] for line in lines)
    again = Ended(Forked(*argv, f"--out={out}2"))
    assert again.status == 1 and len(metrics(f"{out}2")) > len(lines)


def test_a_run_may_start_from_the_checkpoint_in_its_own_folder(trained, tmp_path):
    """`--init_from=OUT/checkpoint --out=OUT`: the earlier run moves aside, and its checkpoint is what is
    loaded, also as the reference."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "metrics.jsonl").write_text("earlier\n")
    os.symlink(f"{trained[1][0]}/checkpoint", out / "checkpoint")
    [end] = runs(
        [
            "train.py", "--preset=laptop", f"--out={out}", f"--init_from={out}/checkpoint",
            f"--reference={out}/checkpoint", *TINY, "--max_new_tokens=48"]
    )
    assert (tmp_path / "out.1" / "metrics.jsonl").read_text() == "earlier\n" and len(metrics(out)) == 1




def test_only_a_resumed_run_has_the_reference_of_its_folder():
    """A fresh run from an earlier run's checkpoint is held to that checkpoint, wherever it lies."""
    for resume, folder in ((True, "out/x/reference"), (False, "")):
        assert train.reference_folder(Settings(out="out/x", resume=resume), "out/x/checkpoints/00040") == folder
