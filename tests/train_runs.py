"""Helpers that run programs in separate processes, and workers that count the calls of a run."""

import fcntl
import functools
import json
import multiprocessing
import multiprocessing.forkserver
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple
from unittest import mock

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")


def run_command(*flags, ranks=1):
    """Run train.py as a user does, with torchrun for two ranks; return (status, stdout, stderr)."""
    command = [sys.executable, *(TORCHRUN if ranks == 2 else ()), "train.py", *flags]
    end = subprocess.run(command, cwd=ROOT, env=ENV, text=True, capture_output=True, timeout=400)
    return end.returncode, end.stdout, end.stderr


# Importing torch takes longer than most runs in these tests. So a fork server imports train.py
# once, and `launch` forks the processes of its runs from the server.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["train"])


def fork(function, *arguments):
    """Start a process that calls function(*arguments), and return the process."""
    # The fork server keeps the environment in which it starts, and its forks inherit it.
    with mock.patch.dict(os.environ, ENV | {"PYTHONPATH": ROOT}):
        multiprocessing.forkserver.ensure_running()
    process = FORKS.Process(target=function, args=arguments, daemon=True)
    process.start()
    return process


class Launched(NamedTuple):
    """A run of a program, with one process for each rank."""

    ranks: list  # the processes
    said: Path  # the folder of the files stdout and stderr, to which all ranks write

    def is_over(self):
        return all(rank.exitcode is not None for rank in self.ranks)


def launch(*flags, ranks=1, folders=None, program=f"{ROOT}/train.py"):
    """Start train.py, or another program, and return the run.

    If there are several ranks, each gets the environment variables that torchrun would set for
    torch.distributed.

    Args:
        folders: The working directory of each rank; default: the repository's root.
        program: The path of the other program.
    """
    with socket.socket() as free:  # finds a free port
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(ranks))
    shared["LOCAL_WORLD_SIZE"] = str(ranks)

    run = Launched([], Path(tempfile.mkdtemp()))
    for rank in range(ranks):
        own = dict(RANK=str(rank), LOCAL_RANK=str(rank))
        env = shared | own if ranks > 1 else {}
        folder = folders[rank] if folders else ROOT
        run.ranks.append(fork(run_rank, program, flags, env, run.said, folder))
    return run


def run_rank(program, flags, env, said, folder):
    """Run a program with these flags in this process, as `python PROGRAM FLAGS` would.

    The output is appended to the files stdout and stderr in the folder `said`.
    """
    os.environ.update(env)
    os.chdir(folder)
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        with open(said / name, "a") as file:
            os.dup2(file.fileno(), descriptor)
    sys.argv = [os.path.basename(program), *flags]
    runpy.run_path(program, run_name="__main__")


def end_of(run):
    """Wait for a run to end; return (its exit status, stdout, stderr).

    The status is the highest of the ranks' statuses. If that is 0, it is the lowest, which is
    negative if a signal killed a rank.

    Waits for each rank in turn, at most 400 s. Then kills the ranks that are still running.
    """
    for rank in run.ranks:
        rank.join(timeout=400)
    kill(run)
    texts = [Path(run.said, name).read_text() for name in ("stdout", "stderr")]
    statuses = [rank.exitcode for rank in run.ranks]
    return max(statuses) or min(statuses), *texts


def train(*flags, ranks=1):
    """Run train.py, assert that the run succeeds, and return its stdout."""
    status, out, err = end_of(launch(*flags, ranks=ranks))
    assert status == 0, f"{flags}\n{out}\n{err}"
    return out


def kill(run):
    """Send SIGKILL to all ranks, and wait until they have ended."""
    for rank in run.ranks:
        rank.kill()
    for rank in run.ranks:
        rank.join()


def wait_until(condition, run):
    """Wait until condition() is true; fail if the run ends first."""
    while not condition():
        assert not run.is_over(), end_of(run)
        time.sleep(0.003)


def kill_when(condition, run):
    """Kill all ranks once condition() is true."""
    wait_until(condition, run)
    kill(run)


def interrupt(run):
    """Send Ctrl-C's signal to all ranks, assert exit status 130, and return the run's stderr."""
    for rank in run.ranks:
        os.kill(rank.pid, signal.SIGINT)
    status, _, err = end_of(run)
    assert status == 130, err
    return err


def metrics(out):
    if not os.path.exists(f"{out}/metrics.jsonl"):
        return []
    with open(f"{out}/metrics.jsonl") as file:
        # A last line without a line break is still being written: leave it out.
        return [json.loads(line) for line in file if line.endswith("\n")]


def timeless(line):
    """Return a line of metrics without the measurements that differ between identical runs."""
    varying = ("rollout_s", "learning_s", "memory")
    return {key: value for key, value in line.items() if key not in varying}


def traces(out, iteration):
    with open(f"{out}/traces/{iteration:05d}.jsonl") as file:
        return [json.loads(line) for line in file]


def weights(out):
    with open(f"{out}/checkpoint/model.safetensors", "rb") as file:
        return file.read()


TEST_RUN = os.environ.get("PYTEST_XDIST_TESTRUNUID", uuid.uuid4().hex)


def once_per_test_run(function):
    """Decorate a function so that only its first call in a test run does something.

    All other calls, including those in pytest-xdist's other workers, return the result of the
    first. The function takes no arguments, and its result can be written as JSON.
    """

    @functools.cache
    def result():
        path = f"{tempfile.gettempdir()}/{function.__name__}-{TEST_RUN}.json"
        with open(path, "a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # Wait while another worker calls the function.
            file.seek(0)
            if written := file.read():
                return json.loads(written)
            found = function()
            json.dump(found, file)
        return found

    return result


@once_per_test_run
def trained():
    """Train briefly with the laptop preset on one rank; return the run's folder and its stdout."""
    out = tempfile.mkdtemp() + "/run"
    status, said, err = run_command(
        "--preset=laptop",
        f"--out={out}",
        "--warm_steps=40",
        "--max_steps=2",
        "--iterations=2",
        "--n_questions=9",
        "--n_rollouts=8",
        "--n_test=9",
        "--save_every=1",
    )
    assert status == 0, f"{said}\n{err}"
    return out, said


class Workers:
    """Five workers with prices, on a local server. A hash of the request picks the answer, A or B.

    `calls` counts the calls that are not refused. Calls wait until the event `open` is set. After
    `n_before_expiry` calls, all further calls are refused as if the API key had expired. The test
    calls that train.py makes first ("Say hello") are always answered at once and not counted.
    """

    def __init__(self, folder):
        self.calls = 0
        self.n_before_expiry = float("inf")
        self.open = threading.Event()
        self.lock = threading.Lock()
        self.open.set()
        workers = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                asked = self.rfile.read(int(self.headers["Content-Length"]))
                is_expired = False
                if b"Say hello" not in asked:
                    with workers.lock:
                        is_expired = workers.calls >= workers.n_before_expiry
                        workers.calls += not is_expired
                    workers.open.wait()
                message = {"role": "assistant", "content": "AB"[zlib.crc32(asked) % 2]}
                usage = {"prompt_tokens": 100, "completion_tokens": 10}
                choice = {"message": message, "finish_reason": "stop"}
                body = json.dumps({"choices": [choice], "usage": usage})
                try:
                    self.send_response(401 if is_expired else 200)
                    self.send_header("Content-Length", str(len(body)))
                    self.end_headers()
                    self.wfile.write(body.encode())
                except OSError:  # The run was killed.
                    self.close_connection = True

            def log_message(self, *_):
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}/v1"
        self.pool, self.data = f"{folder}/pool.json", f"{folder}/questions.jsonl"
        with open(self.pool, "w") as file:
            json.dump(
                [
                    {
                        "name": name,
                        "protocol": "openai",
                        "base_url": url,
                        "model": name,
                        "price": [1, 10],
                        "params": {"max_tokens": 10},
                        "concurrency": 1,
                    }
                    for name in ("left", "right", "up", "down", "in")
                ],
                file,
            )
        with open(self.data, "w") as file:
            for i in range(8):
                row = {"question": f"What is {i} + 7?", "answer": "AB"[i % 2], "grader": "same"}
                file.write(json.dumps(row) + "\n")

    def flags(self, *more):
        """Return flags for a short run with these workers that starts from the model of `trained`.

        more: Further flags.
        """
        return (
            "--preset=laptop",
            f"--init_from={trained()[0]}/checkpoint",
            f"--pool={self.pool}",
            f"--data={self.data}",
            "--budget=1",
            "--n_questions=4",
            "--n_rollouts=4",
            "--minibatches=2",
            "--n_test=2",
            *more,
        )
