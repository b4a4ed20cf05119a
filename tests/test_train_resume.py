"""Runs that are killed in any phase go on as if nothing had happened, on any number of ranks, and pay for
nothing twice."""

import os

import pytest
import torch
from safetensors.torch import load_file
from train_runs import Workers, end_of, kill_when, launch, metrics, traces, train, trained, weights


def timeless(line):
    return {
        key: value
        for key, value in line.items()
        if key not in ("rollout_s", "learning_s", "memory")
    }


def test_a_run_killed_in_every_phase_ends_with_the_same_weights(tmp_path):
    workers = Workers(tmp_path)
    whole, killed = f"{tmp_path}/whole", f"{tmp_path}/killed"
    flags = workers.flags("--iterations=6", "--save_every=4")
    train(*flags, f"--out={whole}")
    calls, workers.calls = workers.calls, 0

    def when_sampling():  # The first iteration is over, and nobody has been asked in the second.
        return len(metrics(killed)) == 1

    def when_working():
        if len(metrics(killed)) == 2:
            workers.open.clear()
        return not workers.open.is_set() and workers.calls > asked

    def when_learning():
        return os.path.exists(f"{killed}/traces/00003.jsonl") and len(metrics(killed)) == 3

    def when_saving():
        return os.path.exists(f"{killed}/checkpoints/unfinished")

    for condition in (when_sampling, when_working, when_learning, when_saving):
        asked = workers.calls
        resume = ["--resume"] if os.path.exists(killed) else []
        kill_when(condition, launch(*flags, f"--out={killed}", *resume))
        workers.open.set()
    train(*flags, f"--out={killed}", "--resume")
    assert weights(killed) == weights(whole) != weights(trained()[0])
    assert [*map(timeless, metrics(killed))] == [*map(timeless, metrics(whole))]
    # What was on its way at a kill is paid again, at most a call of each worker, and nothing else.
    assert calls <= workers.calls <= calls + 4 * 5
    assert sorted(os.listdir(f"{killed}/checkpoints")) == sorted(os.listdir(f"{whole}/checkpoints"))


def test_only_the_newest_checkpoint_has_a_state():
    out, _ = trained()
    before, newest = (f"{out}/checkpoints/{name}" for name in ("00001", "00002"))
    assert os.path.exists(f"{newest}/state") and not os.path.exists(f"{before}/state")
    assert sorted(os.listdir(f"{out}/traces")) == ["00000.jsonl", "00001.jsonl"]
    assert os.readlink(f"{out}/checkpoint") == "checkpoints/00002"


@pytest.mark.parametrize("first", [1, 2])
def test_a_run_goes_on_on_another_number_of_ranks(first, tmp_path):
    """Weights and Adam's moments are read as they were written: the next step differs by rounding only."""
    flags = (
        "--preset=laptop",
        f"--init_from={trained()[0]}/checkpoint",
        "--iterations=2",
        "--n_questions=4",
        "--n_rollouts=8",
        "--minibatches=1",
        "--save_every=1",
        "--n_test=0",
    )
    ends = []
    for name, second in (("same", first), ("other", 3 - first)):
        out = f"{tmp_path}/{name}"
        run = launch(*flags, f"--out={out}", ranks=first)
        kill_when(lambda: os.path.exists(f"{out}/traces/00001.jsonl"), run)
        assert os.path.exists(f"{out}/checkpoints/00001/state")
        train(*flags, f"--out={out}", "--resume", ranks=second)
        ends.append(load_file(f"{out}/checkpoint/model.safetensors"))
        assert len(os.listdir(f"{out}/checkpoint/state")) == second
    for name, tensor in ends[0].items():
        torch.testing.assert_close(tensor, ends[1][name], rtol=1e-3, atol=1e-4)


def test_two_ranks_roll_out_and_learn_what_one_does(tmp_path):
    flags = (
        "--preset=laptop",
        f"--init_from={trained()[0]}/checkpoint",
        "--iterations=1",
        "--n_questions=8",
        "--n_rollouts=8",
        "--minibatches=1",
        "--n_test=0",
    )
    for ranks in (1, 2):
        train(*flags, f"--out={tmp_path}/{ranks}", ranks=ranks)
    one, two = (
        [
            (row["problem_id"], row["written"], row["reward"])
            for row in traces(f"{tmp_path}/{ranks}", 0)
        ]
        for ranks in (1, 2)
    )
    # What shares a batch with a rollout changes it by rounding only, which may turn a token now and then.
    same = sum(a == b for a, b in zip(one, two))
    assert len(one) == len(two) == 64 and same >= 60
    a, b = metrics(f"{tmp_path}/1")[0], metrics(f"{tmp_path}/2")[0]
    for key in ("reward", "parsed", "entropy", "grad_norm"):
        assert b[key] == pytest.approx(a[key], rel=1e-3 if same == 64 else 0.2), key
    assert max(a["gap"], b["gap"]) < 1e-4


def test_a_run_killed_before_its_first_checkpoint_begins_anew_with_what_it_rolled_out(tmp_path):
    workers = Workers(tmp_path)
    flags = workers.flags("--iterations=1", f"--out={tmp_path}/out")
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
