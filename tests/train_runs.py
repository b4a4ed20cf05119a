"""Runs of train.py in processes of their own, for the tests of training."""
import contextlib
import functools
import json
import multiprocessing
import os
import pathlib
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from multiprocessing import forkserver

import pytest
import torch.distributed as dist

import train
from eval import Problem, grade
from workflow import WorkflowError, parse

ROOT = os.path.dirname(os.path.abspath(train.__file__))
ENV = {
    **os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1",
    "HF_HUB_OFFLINE": "1"}
SHORT = [
    "--warm_steps=65", "--warm_batch=16", "--warm_lr=6e-3", "--width=64", "--layers=2", "--iterations=6",
    "--questions=8", "--rollouts=16", "--max_new_tokens=64", "--lr=1e-3", "--minibatches=4", "--beta=0.1",
    "--test=8"]
TINY = [
    "--warm_steps=1", "--warm_batch=2", "--width=16", "--layers=1", "--iterations=1", "--questions=2",
    "--rollouts=2", "--test=1"]


def launch(*argv):
    """`python ARGV` at the repository's root, in a session of its own, with both outputs in pipes."""
    return subprocess.Popen(
        [sys.executable, *argv], cwd=ROOT, env=ENV, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True)


class Forked:
    """`python ARGV` as well, but forked from a process that has imported train.py already: this takes two
    thirds of the time of a tiny run. With more ranks it is what `torchrun ARGV` starts. env: more of the
    environment.

    What is forked has the same seed of hashes and of `random`. Of two runs that shall be alike to the bit
    one is therefore a process of its own."""

    def __init__(self, *argv, ranks=1, **env):
        self.args, self.folder, self.processes = argv, tempfile.TemporaryDirectory(), []
        if ranks > 1:  # The ranks meet in a store that is held here, as torchrun holds one.
            self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            env |= {
                "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": self.store.port, "TORCHELASTIC_USE_AGENT_STORE": True,
                "TORCHELASTIC_RESTART_COUNT": 0}
        for rank in range(ranks):
            if ranks > 1:
                env |= {"RANK": rank, "LOCAL_RANK": rank}
            how = (argv, self.folder.name, {name: str(value) for name, value in env.items()})
            self.processes.append(fork_server().Process(target=program, args=how))
            self.processes[-1].start()
        self.pids = [process.pid for process in self.processes]

    def poll(self):
        """None as long as all ranks run."""
        return next((p.exitcode for p in self.processes if p.exitcode is not None), None)

    def communicate(self, timeout):
        end = time.monotonic() + timeout
        for process in self.processes:
            process.join(max(0.0, end - time.monotonic()))
            if process.exitcode is None:
                raise subprocess.TimeoutExpired(self.args, timeout)
        self.returncode = next(filter(None, (process.exitcode for process in self.processes)), 0)
        return [pathlib.Path(self.folder.name, name).read_text() for name in ("out", "err")]


def program(argv, folder, env):
    """What a forked process does: `python ARGV` in a session of its own, with its outputs in FOLDER."""
    os.setsid()
    for fd, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(os.path.join(folder, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND), fd)
    os.environ.update(env)
    sys.argv = list(argv)
    runpy.run_path(os.path.join(ROOT, argv[0]), run_name="__main__")


@functools.cache
def fork_server():
    """Start the process that Forked's are forked from, once."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["train", "train_runs"])
    with pytest.MonkeyPatch.context() as changed:
        changed.chdir(ROOT)
        for name, value in {**ENV, "PYTHONPATH": f"{ROOT}:{ROOT}/tests"}.items():
            changed.setenv(name, value)
        forkserver.ensure_running()
    return context


def kill(process):
    """SIGKILL, to all ranks and what is in their sessions."""
    for pid in getattr(process, "pids", None) or [process.pid]:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


class Ended:
    """A process that has ended, and after `launch` whatever it started too: its children hold the other ends
    of these pipes."""

    def __init__(self, process, timeout=200):
        try:
            self.out, self.err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            kill(process)
            self.out, self.err = process.communicate(timeout=20)
            pytest.fail(f"{process.args} did not end:\n{self.out}\n{self.err}")
        self.status = process.returncode


def in_pairs(commands, ranks=1):
    """The ends of all commands, of which two run at a time."""
    ends, running = [], []
    for argv in commands:
        running.append(Forked(*argv, ranks=ranks))
        if len(running) == 2:
            ends.append(Ended(running.pop(0)))
    return ends + [Ended(process) for process in running]


def well(end):
    """The end, which must be a good one."""
    assert end.status == 0 and "Traceback" not in end.err, f"{end.out}\n{end.err}"
    return end


def runs(*commands, ranks=1):
    """The ends of all commands; each must succeed."""
    return [well(end) for end in in_pairs(commands, ranks)]


def metrics(out):
    with open(f"{out}/metrics.jsonl") as f:
        return [json.loads(line) for line in f]


def rollouts(out, iteration):
    """Traces as dicts; of each, "text" is all that the Conductor wrote, and "trace" is None where that is no
    workflow."""
    with open(f"{out}/traces/{iteration:05d}.jsonl") as f:
        rows = [{"trace": None, **json.loads(line)} for line in f]
    return [{"text": row["trace"] and row["trace"]["workflow"]["written"], **row} for row in rows]


def recount(out, iteration):
    """Assert that an iteration's metrics are what its traces say, and that the rewards are §3.1's. Returns
    the traces."""
    rows, line = rollouts(out, iteration), metrics(out)[iteration]
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
    known, ran = (
        [row for row in rows if row["reward"] is not None], [row["trace"] for row in rows if row["trace"]])

    def mean(values):
        return pytest.approx(sum(values) / len(values)) if values else None

    assert (line["iteration"], line["lost"], line["calls"]) == (
        iteration, len(rows) - len(known), sum(t["calls"] for t in ran))
    assert line["reward"] == mean([row["reward"] for row in known])
    assert line["accuracy"] == mean([row["reward"] == 1 for row in known])
    assert line["parsed"] == mean([row["trace"] is not None for row in rows])
    assert line["steps"] == mean([len(t["workflow"]["steps"]) for t in ran])
    groups = {
        p: [row["reward"] for row in known if row["problem"] == p] for p in {row["problem"] for row in rows}}
    assert line["flat"] == mean([len(set(groups[row["problem"]])) < 2 for row in rows])
    steps = [name for t in ran for name in t["workers"]]
    assert line["workers"] == {name: pytest.approx(steps.count(name) / len(steps)) for name in steps}
    for kind, accuracy in line["by_kind"].items():
        assert accuracy == mean(
            [row["reward"] == 1 for row in known if row["problem"].startswith(f"{kind}/")])
    assert set(line["by_kind"]) == {row["problem"].split("/")[0] for row in rows}
    return rows


def timeless(line):
    return {
        key: value for key, value in line.items() if key not in ("seconds", "tokens_per_second", "memory")}


def weights(out):
    with open(f"{out}/checkpoint/model.safetensors", "rb") as f:
        return f.read()


def until(condition, process, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate(timeout=20)
        assert time.monotonic() < end
        time.sleep(0.02)
