"""Machines as a cluster has them: pipes that nobody reads any more, closed terminals, two nodes, folders on other
disks, limits of memory, full disks."""
import contextlib
import errno
import fcntl
import os
import signal
import subprocess
import sys
import types

import pytest
from train_runs import ENV, ROOT, TINY, Ended, kill, metrics

import train
import workers
from eval import Problem
from model import configure, write_json
from train import Settings


@pytest.mark.parametrize("number, gone", [(signal.SIGINT, True), (signal.SIGHUP, False)])
def test_a_run_that_nobody_hears_saves(number, gone, checkpoint, tmp_path):
    """Ctrl-C ends `2>&1 | tee` too, or a terminal is closed."""
    read, write = os.pipe()
    argv = ["--preset=laptop", f"--init_from={checkpoint}", *TINY, "--max_new_tokens=48", "--iterations=4000",
            "--save_every=4000", "--eval_every=0", f"--out={tmp_path}/out"]
    process = subprocess.Popen([sys.executable, "train.py", *argv], cwd=ROOT, env=ENV, stdout=write, stderr=write,
                               start_new_session=True, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL))  # under nohup
    os.close(write)
    heard = b""
    while b"/4000 reward" not in heard:
        piece = os.read(read, 1 << 16)
        assert piece, heard.decode()
        heard += piece
    if gone:
        os.close(read)
    process.send_signal(number)
    try:
        Ended(process)
    finally:
        kill(process)
    n = len(metrics(f"{tmp_path}/out"))
    assert os.readlink(tmp_path / "out" / "checkpoint") == f"checkpoints/{n:05d}" and n < 4000
    if not gone:
        assert f"interrupted: stopped after iteration {n}" in os.read(read, 1 << 20).decode()
        os.close(read)


def test_a_killed_torchrun_takes_its_ranks_with_it(checkpoint, tmp_path):
    """They would go on, and pay, and hold the folder; they save and end instead."""
    argv = ["--preset=laptop", f"--init_from={checkpoint}", *TINY, "--max_new_tokens=48", "--iterations=4000", "--save_every=4000",
            "--eval_every=0", f"--out={tmp_path}/out"]
    process = subprocess.Popen([sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=1", "train.py", *argv], cwd=ROOT,
                               env=ENV, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    heard = b""
    while b"/4000 reward" not in heard:
        piece = os.read(process.stdout.fileno(), 1 << 16)
        assert piece, heard.decode()
        heard += piece
    process.kill()
    heard += process.stdout.read()  # until the rank too has ended
    process.wait()
    assert b"stopped after iteration" in heard and os.path.exists(tmp_path / "out" / "checkpoint" / "config.json")


def test_a_warning_that_nobody_reads_ends_nothing(monkeypatch):
    """A worker fails while stderr is a pipe whose reader has gone."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w", buffering=1) as gone:
        monkeypatch.setattr(sys, "stderr", gone)
        with pytest.raises(BrokenPipeError):
            print("Hello?", file=sys.stderr)
        workers.warn("a worker: HTTP 503; trying again")
        monkeypatch.undo()
        with contextlib.suppress(BrokenPipeError):
            gone.close()


def test_the_last_command_names_the_pool_that_must_be_named():
    run = types.SimpleNamespace(test=[Problem("", "Why?", "", "")])
    assert train.try_it(run, Settings(pool="my pool.json")).endswith("/checkpoint '--pool=my pool.json'")
    assert "--pool" not in train.try_it(run, Settings(pool="local:pairs"))


def test_tensorboard_and_wandb_may_make_links(tmp_path):
    s = Settings(out=str(tmp_path))
    os.makedirs(tmp_path / "wandb")
    (tmp_path / "wandb" / "latest-run").symlink_to("run-1")
    train.refuse_links(s)
    (tmp_path / "traces").symlink_to(tmp_path / "wandb")
    with pytest.raises(OSError, match="traces is a link"):
        train.refuse_links(s)


def test_nohup_is_respected(monkeypatch, in_process):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    monkeypatch.setattr(train.dist, "get_rank", lambda: 0)
    train.as_before(train.on_signals())
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


@pytest.mark.parametrize("node, same", [("0", True), ("1", False)])
def test_only_the_first_nodes_ranks_share_its_specialists(node, same, tmp_path, monkeypatch, in_process):
    """The loopback address of the first is no other's."""
    asked = []

    def load_pool(spec, url=None, *others, **named):
        asked.append(url)
        if len(asked) == 2:
            raise SystemExit("enough")
        return pool(spec, url, *others, **named)

    pool = train.load_pool
    monkeypatch.setattr(train, "load_pool", load_pool)
    monkeypatch.setenv("GROUP_RANK", node)
    with pytest.raises(SystemExit, match="enough"):
        train.main(["--preset=laptop", *TINY, f"--out={tmp_path}/out"])
    assert asked[0] is None and (asked[1] is not None) == same


def test_a_linked_folder_stays_on_its_disk(tmp_path):
    """--out may be a link to a larger disk: there earlier runs are kept, and the link stays one."""
    (tmp_path / "scratch" / "run").mkdir(parents=True)
    (tmp_path / "home").symlink_to(tmp_path / "scratch" / "run")
    for _ in range(2):
        s, _ = train.settings_of(["--preset=laptop", f"--out={tmp_path}/home/"])
        train.make_room(s)
        (tmp_path / "home" / "metrics.jsonl").write_text("{}\n")
    assert os.path.islink(tmp_path / "home") and sorted(os.listdir(tmp_path / "scratch")) == ["run", "run.1"]


def test_the_home_folder_may_be_written_as_in_a_shell(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    s = Settings()
    configure(s, ["--out=~/runs/a"])
    assert s.out == "/home/me/runs/a"


@pytest.mark.parametrize("own, limits, expected", [
    ("0::/slurm/job_7/step_0\n", {"slurm/job_7/memory.max": "7000\n", "memory.max": "max\n"}, 7000),
    ("0::/\n", {"memory.max": "5000"}, 5000),
    ("4:memory:/docker/x\n", {"memory/memory.limit_in_bytes": "3000"}, 3000),
    ("5:cpu:/\n4:memory:/slurm/job_7\n", {"memory/slurm/job_7/memory.limit_in_bytes": "2000"}, 2000),
    ("0::/\n", {"memory.max": "9" * 30}, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))])
def test_memory_is_what_a_container_or_a_batch_system_allows(own, limits, expected, tmp_path):
    (tmp_path / "own").write_text(own)
    for file, limit in limits.items():
        os.makedirs(os.path.dirname(tmp_path / "cgroup" / file), exist_ok=True)
        (tmp_path / "cgroup" / file).write_text(limit)
    assert train.machine_memory(str(tmp_path / "cgroup"), str(tmp_path / "own")) == expected


def test_a_run_that_lives_is_noticed_before_its_checkpoints_are_read(tmp_path, monkeypatch, in_process):
    """It may write and remove them."""
    monkeypatch.setattr(train, "checkpoints", lambda out: pytest.fail("too early"))
    lock = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    with pytest.raises(SystemExit, match="another run is writing there"):
        train.main(["--preset=laptop", *TINY, f"--out={tmp_path}", "--resume"])
    os.close(lock)


def test_a_file_system_without_links_is_noticed_at_the_start(tmp_path, monkeypatch):
    def symlink(*_):
        raise PermissionError(errno.EPERM, "Operation not permitted")
    with monkeypatch.context() as without:
        without.setattr(os, "symlink", symlink)
        with pytest.raises(OSError, match="not permitted"):
            train.make_room(Settings(out=str(tmp_path / "out")))
    (tmp_path / "out" / "checkpoint.new").symlink_to("checkpoints")  # as a kill may leave it
    train.make_room(Settings(out=str(tmp_path / "out")))
    assert sorted(os.listdir(tmp_path / "out")) == ["settings.json", "traces"]


@pytest.mark.parametrize("part", [b"", b"\x08\0\0\0\0\0\0\0{}"])
def test_a_damaged_state_is_named(part, tmp_path, monkeypatch, in_process):
    folder = tmp_path / "00007"
    os.makedirs(folder / "state")
    write_json(f"{folder}/training.json", {"parts": 1, "optimizer_steps": 7})
    (folder / "state" / "00000.safetensors").write_bytes(part)
    monkeypatch.setattr(train.dist, "get_rank", lambda: 0)
    with pytest.raises(SystemExit, match=f"{folder} is damaged .*--resume takes the checkpoint before"):
        train.restore(None, None, str(folder))


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), OSError(errno.EDQUOT, "Disk quota exceeded")])
def test_a_full_disk_says_where_the_last_checkpoint_is(error, tmp_path, monkeypatch, in_process):
    def full(s, device):
        raise error
    monkeypatch.setattr(train, "train", full)
    try:
        with pytest.raises(SystemExit, match=f"{error.strerror}; nothing had been saved"):
            train.main(["--preset=laptop", f"--out={tmp_path}/out"])
    finally:
        train.dist.destroy_process_group()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_must_not_be_written_is_a_lack(tmp_path):
    tmp_path.chmod(0o500)
    s = Settings(out=str(tmp_path / "out"), beta=0.0)
    assert f"permission to write in {tmp_path}" in " ".join(train.lacking(s, "", []))
