"""Tests of --resume: a run that is killed in any phase and resumed ends like a run without kills.

Also tests which flags a resumed run accepts, and what it says about damaged files.
"""

import contextlib
import fcntl
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import train as module
from eval import load
from model import Qwen, merge_lora, write_json
from train import Settings, read_command, read_trace
from train_runs import (
    ROOT,
    Workers,
    end_of,
    kill_when,
    launch,
    metrics,
    once_per_test_run,
    run_command,
    timeless,
    traces,
    train,
    trained,
    weights,
)
from workflow import Rollout, read_prompting


def test_a_run_killed_in_every_phase_ends_with_the_same_weights(tmp_path):
    workers = Workers(tmp_path)
    whole, killed = f"{tmp_path}/whole", f"{tmp_path}/killed"
    flags = workers.flags("--iterations=5", "--save_every=4")
    train(*flags, f"--out={whole}")
    calls, workers.calls = workers.calls, 0

    def when_sampling():  # The first iteration is over, and the second has just begun.
        return len(metrics(killed)) == 1

    def when_working():
        if len(metrics(killed)) == 2:
            workers.open.clear()
        return not workers.open.is_set() and workers.calls > asked

    def when_learning():
        return os.path.exists(f"{killed}/traces/00003.jsonl") and len(metrics(killed)) == 3

    def when_saving():
        return os.path.exists(f"{killed}/checkpoints/unfinished")

    def when_saved():  # The checkpoint is complete; the link to it may still be missing.
        return os.path.exists(f"{killed}/checkpoints/00004")

    for condition in (when_sampling, when_working, when_learning, when_saving, when_saved):
        asked = workers.calls
        resume = ["--resume"] if os.path.exists(killed) else []
        kill_when(condition, launch(*flags, f"--out={killed}", *resume))
        workers.open.set()
    train(*flags, f"--out={killed}", "--resume")
    assert weights(killed) == weights(whole) != weights(trained()[0])
    assert [*map(timeless, metrics(killed))] == [*map(timeless, metrics(whole))]
    # Only calls that were under way at a kill are paid for again, at most one for each of the five
    # workers. None can be under way at the third kill, because then the run is learning.
    assert calls <= workers.calls <= calls + 4 * 5
    assert sorted(os.listdir(f"{killed}/checkpoints")) == sorted(os.listdir(f"{whole}/checkpoints"))

    # Damage files, then delete those that the error messages name. The run repeats their iterations
    # with the rollouts and replies on disk.
    before, workers.calls = weights(whole), 0
    for name in os.listdir(f"{whole}/checkpoints"):
        os.truncate(f"{whole}/checkpoints/{name}/model.safetensors", 1000)
    os.truncate(f"{whole}/traces/00002.jsonl", 1000)
    for damaged in ("checkpoints/00005", "traces/00002.jsonl"):
        status, _, err = end_of(launch(*flags, f"--out={whole}", "--resume"))
        assert status == 1 and damaged in err and "elete" in err and "Traceback" not in err
        subprocess.run(["rm", "-r", f"{whole}/{damaged}"], check=True)
    train(*flags, f"--out={whole}", "--resume")
    assert weights(whole) == before and workers.calls == 0


def test_only_the_newest_checkpoint_has_a_state():
    out, _ = trained()
    before, newest = (f"{out}/checkpoints/{name}" for name in ("00001", "00002"))
    assert os.path.exists(f"{newest}/state") and not os.path.exists(f"{before}/state")
    assert sorted(os.listdir(f"{out}/traces")) == ["00000.jsonl", "00001.jsonl"]
    assert os.readlink(f"{out}/checkpoint") == "checkpoints/00002"


@once_per_test_run
def trained_on_two():
    """Run one iteration on two ranks with torchrun; return the run's folder and its flags."""
    flags = (
        "--preset=laptop",
        f"--init_from={trained()[0]}/checkpoint",
        "--iterations=1",
        "--n_questions=8",
        "--n_rollouts=8",
        "--minibatches=1",
        "--n_test=0",
    )
    out = tempfile.mkdtemp() + "/run"
    status, said, err = run_command(*flags, f"--out={out}", ranks=2)
    assert status == 0, f"{said}\n{err}"
    return out, flags


@pytest.mark.parametrize("first", [1, 2])
def test_a_run_goes_on_on_another_number_of_ranks(first, tmp_path):
    """Weights and Adam's moments are read exactly as they were written.

    Only the rounding of the next step depends on the number of ranks.
    """
    earlier, done = (trained()[0], 2) if first == 1 else (trained_on_two()[0], 1)
    assert len(os.listdir(f"{earlier}/checkpoint/state")) == first
    ends = []
    for ranks in (1, 2):
        out = f"{tmp_path}/{ranks}"
        shutil.copytree(earlier, out, symlinks=True)
        flags = ("--preset=laptop", f"--out={out}", "--resume", f"--iterations={done + 1}")
        train(*flags, "--n_test=0", ranks=ranks)
        ends.append(load_file(f"{out}/checkpoint/model.safetensors"))
        assert len(os.listdir(f"{out}/checkpoint/state")) == ranks
    for name, tensor in ends[0].items():
        torch.testing.assert_close(tensor, ends[1][name], rtol=1e-3, atol=1e-4)


def test_a_run_with_lora_goes_on_as_if_nothing_had_happened(tmp_path):
    """Of the weights, the state holds only LoRA's matrices; the others come from --init_from."""
    conductor = f"{trained()[0]}/checkpoint"
    flags = ("--preset=laptop", f"--init_from={conductor}", "--lora_rank=4", "--iterations=2")
    flags += ("--n_questions=4", "--n_rollouts=8", "--save_every=1", "--n_test=0")
    whole, killed = f"{tmp_path}/whole", f"{tmp_path}/killed"
    train(*flags, f"--out={whole}")
    run = launch(*flags, f"--out={killed}")
    kill_when(lambda: os.path.exists(f"{killed}/traces/00001.jsonl"), run)
    train(*flags, f"--out={killed}", "--resume")
    assert weights(killed) == weights(whole) != weights(trained()[0])
    [state] = Path(whole).glob("checkpoint/state/*")
    assert state.stat().st_size < os.path.getsize(f"{conductor}/model.safetensors") / 3


def test_a_lora_update_that_16_bits_round_away_reaches_the_sampler(monkeypatch):
    """B A is so small that, merged into bf16 weights, hardly any of it would be left."""
    monkeypatch.setattr(module, "dtype_for", lambda config, device: torch.bfloat16)
    settings = Settings(device="cpu", lora_rank=4)
    shard = lambda whole: module.shard(whole, settings)
    folder = f"{ROOT}/assets/laptop"
    ids = torch.arange(20)[None]
    with one_rank(), torch.no_grad():
        model = Qwen.from_pretrained(folder, torch.bfloat16, shard=shard, lora_rank=4)
        for name, p in model.named_parameters():
            if name.endswith("lora_B"):
                p.to_local().normal_(std=1e-4)
        sampler = module.whole_copy(model, settings)
        before = Qwen.from_pretrained(folder, torch.bfloat16)
        assert torch.equal(sampler(ids), model(ids))
        assert not torch.equal(sampler(ids), before(ids))
    state = sampler.state_dict()
    merged = merge_lora(state)
    same = [(merged[name] == state[name]).float().mean() for name in merged if "_proj" in name]
    assert min(same) > 0.9


def test_two_ranks_roll_out_and_learn_what_one_does(tmp_path):
    on_two, flags = trained_on_two()
    on_one = f"{tmp_path}/one"
    train(*flags, f"--out={on_one}")
    one, two = (
        [(row["problem_id"], row["written"], row["reward"]) for row in traces(out, 0)]
        for out in (on_one, on_two)
    )
    # Rounding depends on which rollouts share a batch, and may change a token now and then.
    same = sum(a == b for a, b in zip(one, two))
    assert len(one) == len(two) == 64 and same >= 60
    a, b = metrics(on_one)[0], metrics(on_two)[0]
    for key in ("reward", "parsed", "entropy", "grad_norm"):
        assert b[key] == pytest.approx(a[key], rel=1e-3 if same == 64 else 0.2), key
    assert max(a["gap"], b["gap"]) < 1e-4


def test_a_run_killed_before_its_first_checkpoint_begins_anew_with_what_it_rolled_out(tmp_path):
    """The trace also holds the rewards. They are random, so rewards computed again would differ."""
    workers = Workers(tmp_path)
    reward = tmp_path / "mine.py"
    reward.write_text("import random\ndef luck(rollout):\n    return random.random()\n")
    flags = workers.flags("--iterations=1", f"--out={tmp_path}/out", f"--reward={reward}:luck")
    kill_when(lambda: os.path.exists(f"{tmp_path}/out/traces/00000.jsonl"), launch(*flags))
    asked, written = workers.calls, traces(f"{tmp_path}/out", 0)
    train(*flags, "--resume", "--n_test=0")
    assert workers.calls == asked and traces(f"{tmp_path}/out", 0) == written


def test_a_folder_that_holds_a_run_is_not_written_into():
    out, _ = trained()
    before = weights(out)
    status, _, err = end_of(launch("--preset=laptop", f"--out={out}"))
    assert status == 1 and "--resume" in err and "--out" in err and "Traceback" not in err
    assert weights(out) == before


# ---- What --resume accepts as the same experiment ------------------------------------------------


def resume(out, *flags):
    """Return the settings that train.py uses if the run in this folder is resumed."""
    return read_command(["--preset=laptop", f"--out={out}", "--resume", *flags])


def test_flags_that_are_not_given_are_the_runs(tmp_path):
    saved = Settings(preset="laptop", lr=1e-3, n_rollouts=4, budget=2.0, out="elsewhere")
    write_json(f"{tmp_path}/settings.json", vars(saved))
    settings = resume(tmp_path)
    expected = vars(saved) | {"out": str(tmp_path), "resume": True, "device": "cpu"}
    assert vars(settings) == expected
    assert resume(tmp_path, "--lr=1e-3", "--budget=5", "--save_every=7").budget == 5


def test_flags_that_change_the_experiment_are_refused_by_name(tmp_path, capsys):
    write_json(f"{tmp_path}/settings.json", vars(Settings(preset="laptop", n_rollouts=4)))
    with pytest.raises(SystemExit) as refused:
        resume(tmp_path, "--n_rollouts=6", "--lr=1e-3", "--budget=3", "--seed=1")
    said = capsys.readouterr().err
    assert refused.value.code == 2 and "--n_rollouts=6" in said and "--lr=0.001" in said
    assert "seed" not in said and "--budget=3" not in said
    with pytest.raises(SystemExit):
        read_command(["--preset=small", f"--out={tmp_path}", "--resume"])
    assert "--preset=small" in capsys.readouterr().err
    assert resume(tmp_path, "--iterations=9").iterations == 9
    assert "cosine" in capsys.readouterr().out


def test_a_resumed_run_needs_no_preset(tmp_path, capsys):
    write_json(f"{tmp_path}/settings.json", vars(Settings(preset="own", pool="mine.json")))
    settings = read_command([f"--out={tmp_path}", "--resume"])
    assert (settings.preset, settings.pool) == ("own", "mine.json")
    assert not capsys.readouterr().out  # It names no other preset.


def test_workers_and_examples_that_changed_in_their_files_are_refused():
    checkpoint = Path(trained()[0], "checkpoint")
    prompting, _, names = read_prompting(str(checkpoint))
    pool = [SimpleNamespace(name=name) for name in names]
    module.check_unchanged(checkpoint, prompting, pool)
    others = [pool[::-1], pool[1:], [*pool, SimpleNamespace(name="another")]]
    for changed in others:
        with pytest.raises(ValueError, match=f"{', '.join(names)}, in this order"):
            module.check_unchanged(checkpoint, prompting, changed)
    with pytest.raises(ValueError, match="--examples in .*/conductor.json"):
        module.check_unchanged(checkpoint, replace(prompting, examples=[{}]), pool)


def test_settings_of_the_third_edition_are_read(tmp_path):
    values = vars(Settings(preset="laptop", n_rollouts=4, ask_solved_probability=0.5))
    new = {*values} - {"n_questions", "n_rollouts", "n_test", "prompt_style"}
    old = {key: values[key] for key in new - {"ask_solved_probability"} - module.NEW_FLAGS}
    old |= {"questions": 3, "rollouts": 4, "test": 5, "prompt": "short", "review": 0.5}
    write_json(f"{tmp_path}/settings.json", old)
    settings = resume(tmp_path)
    assert (settings.n_questions, settings.n_rollouts, settings.n_test) == (3, 4, 5)
    assert (settings.prompt_style, settings.ask_solved_probability) == ("short", 0.5)

    # Only recursion used this removed flag: other runs can be resumed, recursive ones are refused.
    write_json(f"{tmp_path}/settings.json", old | {"recursion_rewards": "apart"})
    assert resume(tmp_path) == settings
    write_json(f"{tmp_path}/settings.json", old | {"recursion_rewards": "apart", "recursion": True})
    with pytest.raises(SystemExit, match="recursion_rewards"):
        resume(tmp_path)

    del old["lr"]  # A missing key is an error; no default replaces it.
    write_json(f"{tmp_path}/settings.json", old)
    with pytest.raises(SystemExit, match="does not say lr"):
        resume(tmp_path)
    Path(tmp_path, "settings.json").write_text("{")
    with pytest.raises(SystemExit, match="Delete it"):
        resume(tmp_path)


def test_a_second_run_on_a_folder_is_kept_away(tmp_path):
    with open(tmp_path / "lock", "w") as first:
        first.write("pid 123 on a-host")
        first.flush()
        fcntl.flock(first, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="pid 123 on a-host"):
            module.lock(tmp_path / "lock")
    # Closing the file released the first run's lock.
    assert f"pid {os.getpid()} on" in module.lock(tmp_path / "lock")


# ---- Damaged files -------------------------------------------------------------------------------


@contextlib.contextmanager
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        if dist.is_initialized():  # `leave` may already have destroyed the group.
            dist.destroy_process_group()


@functools.cache
def problems():
    return load("laptop", "train")


def lines_of(file):
    return Path(file).read_text().splitlines(keepends=True)


@pytest.mark.parametrize(
    "damage",
    [
        lambda lines: [],
        lambda lines: ["".join(lines)[:1000]],
        lambda lines: lines[:-1],
        lambda lines: lines[:-8],  # without the last question
        lambda lines: [*lines[:3], "\0" * 50 + "\n", *lines[4:]],
        lambda lines: [*lines[:3], "[1]\n", *lines[4:]],
        lambda lines: [*lines[:3], lines[4], lines[3], *lines[5:]],
        lambda lines: [
            line.replace('"problem_id": "laptop/', '"problem_id": "no/') for line in lines
        ],
        # as if the data had changed, so that each id belonged to a different question
        lambda lines: [line.replace('"question": "', '"question": "Now ') for line in lines],
    ],
)
def test_a_damaged_trace_says_what_to_do(damage, tmp_path):
    os.makedirs(tmp_path / "traces")
    file = tmp_path / "traces/00000.jsonl"
    lines = lines_of(f"{trained()[0]}/traces/00000.jsonl")
    settings = Settings(out=str(tmp_path), n_questions=9, n_rollouts=8)
    run = SimpleNamespace(problems=problems(), pool=[])
    file.write_text("".join(lines))
    assert [len(group) for group in read_trace(run, settings, 0)] == [8] * 9
    file.write_text("".join(damage(lines)))
    with pytest.raises(ValueError, match="00000.jsonl is damaged.*Delete it"):
        read_trace(run, settings, 0)


def copy_of_run(tmp_path):
    out = f"{tmp_path}/run"
    shutil.copytree(trained()[0], out, symlinks=True)
    return out, Settings(out=out, resume=True)


def test_an_incomplete_checkpoint_says_what_to_do(tmp_path):
    out, settings = copy_of_run(tmp_path)
    assert module.newest_checkpoint(settings).name == "00002"
    shutil.copytree(f"{out}/checkpoints/00002", f"{out}/checkpoints/00002.backup")
    module.tidy(Path(out))
    assert module.newest_checkpoint(settings).name == "00002"
    assert os.readlink(f"{out}/checkpoint") == "checkpoints/00002"
    os.makedirs(f"{out}/checkpoints/00003")
    with pytest.raises(ValueError, match="00003 is damaged.*Delete"):
        module.newest_checkpoint(settings)
    os.rmdir(f"{out}/checkpoints/00003")
    shutil.rmtree(f"{out}/checkpoints/00002")
    assert module.newest_checkpoint(settings) is None  # The run begins again, with its rollouts.


def flip_a_bit(file):
    written = bytearray(Path(file).read_bytes())
    written[len(written) // 2] ^= 1
    Path(file).write_bytes(written)


def truncate_to(size):
    return lambda file: os.truncate(file, size)


@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json", "state/*"])
@pytest.mark.parametrize(
    "damage",
    [
        flip_a_bit,
        os.unlink,
        truncate_to(0),
        truncate_to(5000),
        lambda file: Path(file).write_bytes(b"\xff" * 1000),
    ],
)
def test_a_damaged_checkpoint_says_what_to_do(damage, file, tmp_path):
    out, settings = copy_of_run(tmp_path)
    [file] = Path(out, "checkpoints/00002").glob(file)
    damage(file)
    with pytest.raises(ValueError, match=f"00002 is damaged: .*{file.name}.*Delete"):
        module.newest_checkpoint(settings)


def run_of(folder, kinds):
    """Return a run, with a model and an optimizer, that a checkpoint can be loaded into."""
    settings = Settings(device="cpu")
    model = Qwen.from_pretrained(folder, shard=lambda whole: module.shard(whole, settings))
    run = SimpleNamespace(model=model, optimizer=module.adam(model, 0.99))
    run.wrong_share = {kind: torch.ones(()) for kind in kinds}
    module.largest_step(model, run.optimizer, None, Settings(beta=0.0))  # creates Adam's state
    return run


@pytest.mark.parametrize(
    "damage",
    [
        os.unlink,
        truncate_to(0),
        truncate_to(100),
        truncate_to(100_000),
        lambda file: Path(file).write_bytes(b"\xff" * 1000),
    ],
)
def test_a_damaged_state_without_checksums_says_what_to_do(damage, tmp_path):
    """Checkpoints of earlier editions have no checksums."""
    out, settings = copy_of_run(tmp_path)
    os.unlink(f"{out}/checkpoint/checksums.json")
    with one_rank():
        checkpoint = module.newest_checkpoint(settings)
        run = run_of(checkpoint, ["fact", "a new kind"])
        module.load_state(run, checkpoint)
        assert run.wrong_share["a new kind"] == 1  # the checkpoint does not know this kind
        [file] = [*checkpoint.glob("state/*")]
        damage(file)
        with pytest.raises(SystemExit, match="00002 is damaged.*Delete"):
            module.load_state(run, checkpoint)


def test_a_torn_line_of_metrics_says_what_to_do(tmp_path):
    out, settings = copy_of_run(tmp_path)
    file = Path(out, "metrics.jsonl")
    first, second = lines_of(file)
    file.write_text(first + second[:100])  # A kill tore the last line.
    assert module.read_metrics(file) == [first.rstrip()]
    file.write_text(first[:100] + second)
    with pytest.raises(ValueError, match="line 1, is damaged: .*Delete the line"):
        module.read_metrics(file)
    file.write_text(second)
    module.open_folder(settings, first_iteration=2)
    assert file.read_text() == second


def test_a_run_that_goes_on_drops_the_measurement_of_its_old_end(tmp_path):
    out, settings = copy_of_run(tmp_path)
    module.open_folder(replace(settings, iterations=2), first_iteration=2)
    assert {"test.json", "test.jsonl"} < {*os.listdir(out)}
    module.open_folder(replace(settings, iterations=3), first_iteration=2)
    assert not {"test.json", "test.jsonl"} & {*os.listdir(out)}


def test_fewer_iterations_than_are_done_are_refused(tmp_path):
    out, _ = copy_of_run(tmp_path)
    before = Path(out, "settings.json").read_text()
    status, _, err = end_of(launch(f"--out={out}", "--resume", "--iterations=1"))
    assert status == 1 and "--iterations=1: the run has already done 2" in err
    assert Path(out, "settings.json").read_text() == before


def test_what_was_not_measured_is_measured_when_the_run_goes_on(tmp_path, monkeypatch, capsys):
    """An API key expired while the checkpoint of the first two iterations was measured."""
    file = tmp_path / "metrics.jsonl"
    lines = [{"iteration": i, "loss": i / 7, "held_out": None} for i in range(2)]
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    settings = Settings(out=str(tmp_path), iterations=4, save_every=2)
    run = SimpleNamespace(test=["a problem"], pool=[SimpleNamespace(budget=None)])
    right = Rollout("q", problem=problems()[0], right=True)
    lost = Rollout("q", problem=problems()[0], error="HTTP 401")

    def measure(done, *rollouts):
        with one_rank():
            monkeypatch.setattr(module, "conduct_problems", lambda *_: [*rollouts])
            module.measure_held_out(run, settings, done)

    measure(1, right)  # no checkpoint is due after one iteration
    with pytest.raises(SystemExit, match="3 of 4 rollouts were lost.*HTTP 401.*--resume"):
        measure(2, right, lost, lost, lost)
    assert [json.loads(line) for line in lines_of(file)] == lines
    measure(2, right, right, lost, lost)
    assert "held out: 2 of 2 problems are right" in capsys.readouterr().out
    lines[1]["held_out"] = 1.0
    assert [json.loads(line) for line in lines_of(file)] == lines
    measure(2, lost)  # It has already been measured.


def test_a_fault_that_only_held_out_problems_show_is_a_sentence(monkeypatch):
    def fail(*_):
        raise ValueError("the grader failed on mine/3")

    def spend(*_):
        raise SystemExit("the budget is spent")

    run = SimpleNamespace(pool=[], prompting=module.Prompting(), model=None, tokenizer=None)
    for name in ("whole_copy", "model_writer"):
        monkeypatch.setattr(module, name, lambda *_, **more: None)
    monkeypatch.setattr(module.evaluation, "conductor", lambda *_, **more: fail)
    with one_rank(), pytest.raises(SystemExit, match="the grader failed on mine/3"):
        module.conduct_problems(run, problems()[:2], Settings(), "test")

    for job, sentence in ((fail, "the grader failed"), (spend, "the budget is spent")):
        monkeypatch.setattr(module.evaluation, "compare_systems", job)
        run.pool = [SimpleNamespace(budget=None)]
        with one_rank(), pytest.raises(SystemExit, match=sentence):
            module.print_results(run, Settings(out="out"))


def test_a_full_disk_is_a_sentence(tmp_path):
    file = tmp_path / "traces.jsonl"
    os.symlink("/dev/full", f"{file}.tmp")
    with one_rank(), pytest.raises(SystemExit, match="the disk is full: .*No space left.*--resume"):
        module.on_rank0(lambda: module.replace_file(file, ["a line"]))


# ---- Several machines ----------------------------------------------------------------------------


def test_a_folder_that_is_not_shared_is_known_before_the_warm_start(tmp_path):
    """Two machines have separate folders of the same name."""
    folders = [tmp_path / "one", tmp_path / "other"]
    for folder in folders:
        folder.mkdir()
    status, said, err = end_of(launch("--preset=laptop", "--out=run", ranks=2, folders=folders))
    assert status == 1 and "is not the folder of rank 0" in err and "warm start" not in said


def test_data_that_one_machine_lacks_are_named(tmp_path):
    folders = [tmp_path / "one", tmp_path / "other"]
    for folder in folders:
        folder.mkdir()
    (folders[0] / "mine.jsonl").write_text('{"question": "q", "answer": "a", "grader": "exact"}\n')
    flags = ("--preset=laptop", "--data=mine.jsonl", f"--out={tmp_path}/run")
    status, _, err = end_of(launch(*flags, ranks=2, folders=folders))
    assert status == 1 and "mine.jsonl" in err and "Traceback" not in err
