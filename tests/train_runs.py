"""Helpers that run train.py in processes, and workers that count the calls of such runs."""

import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")


def launch(*flags, ranks=1):
    """Start train.py, under torchrun for two ranks, as a process group that `kill` ends."""
    command = [sys.executable, *(TORCHRUN if ranks == 2 else ()), "train.py", *flags]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=ENV,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def end_of(process):
    """Wait for a process and return its (status, stdout, stderr)."""
    try:
        out, err = process.communicate(timeout=400)
    finally:
        kill(process)
    return process.returncode, out, err


def train(*flags, ranks=1):
    """Run train.py, assert that it succeeds, and return its output."""
    status, out, err = end_of(launch(*flags, ranks=ranks))
    assert status == 0, f"{flags}\n{out}\n{err}"
    return out


def kill(process):
    """Send SIGKILL to all ranks."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def kill_when(condition, process):
    """Kill all ranks once condition() is true, and assert that the run has not ended before."""
    while not condition():
        assert process.poll() is None, process.communicate()
        time.sleep(0.001)
    kill(process)
    process.communicate()


def metrics(out):
    if not os.path.exists(f"{out}/metrics.jsonl"):
        return []
    with open(f"{out}/metrics.jsonl") as file:
        return [json.loads(line) for line in file if line.endswith("\n")]


def timeless(line):
    """Return a line of metrics without the measurements that differ between equal runs."""
    varying = ("rollout_s", "learning_s", "memory")
    return {key: value for key, value in line.items() if key not in varying}


def traces(out, iteration):
    with open(f"{out}/traces/{iteration:05d}.jsonl") as file:
        return [json.loads(line) for line in file]


def weights(out):
    with open(f"{out}/checkpoint/model.safetensors", "rb") as file:
        return file.read()


@functools.cache
def trained():
    """Run the laptop preset briefly on one rank, once; return its folder and its output."""
    out = tempfile.mkdtemp() + "/run"
    said = train(
        "--preset=laptop",
        f"--out={out}",
        "--warm_steps=100",
        "--iterations=2",
        "--n_questions=9",
        "--n_rollouts=8",
        "--n_test=9",
        "--save_every=1",
    )
    return out, said


class Workers:
    """Five workers with prices, served on loopback. A hash of the request decides: "A" or "B".

    `calls` counts the calls. A call waits until `open` is set. After `n_before_expiry` calls, all
    further ones are refused as if the API key had expired.
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
        """Return flags of a short run with these workers, starting at `trained`'s checkpoint."""
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
