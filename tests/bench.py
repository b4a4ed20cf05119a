"""Benchmarks: sampler, update, workflows, server and sandbox. Without a name, all of them run.

    python tests/bench.py [NAME …] [--key=value …]
    python tests/bench.py sampler --model=7b --rows=64,128,256 --prompt=512 --new=512     on a GPU

Each prints its numbers, then the same numbers as one line of JSON. What is compared takes turns in
one run, because the speed of a machine changes over time.
"""

import dataclasses
import http.client
import inspect
import json
import math
import multiprocessing
import os
import re
import resource
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from model import Config, Qwen, compute_dtype
from sample import generate

SHAPES = {  # of random weights
    "small": Config(4096, 256, 768, 6, 4, 2, tie_word_embeddings=True),
    "0.5b": Config(151936, 896, 4864, 24, 14, 2, tie_word_embeddings=True),
    "1.5b": Config(151936, 1536, 8960, 28, 12, 2, tie_word_embeddings=True),
    "3b": Config(151936, 2048, 11008, 36, 16, 2, tie_word_embeddings=True),
    "7b": Config(),
}
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NAME = (
    torch.cuda.get_device_name()
    if DEVICE.type == "cuda"
    else f"CPU, {torch.get_num_threads()} threads"
)


def timed(job) -> float:
    """Return the seconds that job() takes."""
    started = time.perf_counter()
    job()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def report(result: dict):
    """Print the numbers in columns, and as one line of JSON."""
    for key, value in result.items():
        if isinstance(value, float):
            result[key] = float(f"{value:.4g}")
        print(f"{key:<34}{result[key]!s:>24}")
    print(json.dumps(result), flush=True)


def random_model(shape: str, dtype: str) -> Qwen:
    with torch.device("meta"):
        model = Qwen(SHAPES[shape])
    model.to(getattr(torch, dtype) if dtype else compute_dtype(DEVICE)).to_empty(device=DEVICE)
    if model.config.tie_word_embeddings:  # to_empty has given each its own weight
        model.lm_head.weight = model.model.embed_tokens.weight
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.fill_(1.0) if "norm" in name else p.normal_(std=0.02)
    return model


def transformers_model(model: Qwen):
    """Return the same weights, not copied, in transformers' implementation."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    rope = {"rope_type": "default", "rope_theta": model.config.rope_theta}
    with torch.device("meta"):
        theirs = Qwen2ForCausalLM(
            Qwen2Config(**dataclasses.asdict(model.config), rope_parameters=rope)
        )
    theirs.load_state_dict(model.state_dict(), assign=True)
    with torch.device(DEVICE):  # the rotary tables are not parameters
        theirs.model.rotary_emb = type(theirs.model.rotary_emb)(theirs.config)
    return theirs


def copied_bytes_a_second() -> float:
    """Return the bytes read and written per second by the fastest of ten copies of 4 GiB.

    On a CPU, 256 MiB are copied.
    """
    a = torch.ones(2 ** (32 if DEVICE.type == "cuda" else 28), dtype=torch.uint8, device=DEVICE)
    b = torch.zeros_like(a)
    return 2 * a.numel() / min(timed(lambda: b.copy_(a)) for _ in range(10))


def multiplied_flops_a_second(dtype) -> float:
    """Return the floating-point operations per second of the fastest of ten matrix products."""
    size = 8192 if DEVICE.type == "cuda" else 1024
    a = torch.randn(size, size, device=DEVICE).to(dtype)
    return 2 * size**3 / min(timed(lambda: a @ a) for _ in range(10))


def sampler(
    model="small",
    rows="64",
    questions=4,
    prompt=500,
    new=64,
    beside="transformers,unshared",
    dtype="",
):
    """Measure the tokens per second of generate; the best of two turns counts.

    `rows` rollouts of `questions` prompts are sampled; a prompt has `prompt` random ids, a rollout
    `new` tokens. Beside it run transformers' generate, and generate without sharing: a prompt for
    every rollout. On a GPU, the sampler's copy of the model is joined, as in training.

    The roofline: at best, a decode step reads the weights and the live keys and values once, at the
    rate at which this machine copies.
    """
    qwen = random_model(model, dtype)
    if DEVICE.type == "cuda":
        qwen.join()
    theirs = transformers_model(qwen) if "transformers" in beside else None
    copies = copied_bytes_a_second()
    weights, kv = bytes_read(qwen)
    prompts = torch.randint(qwen.config.vocab_size, (questions, prompt)).tolist()

    for count in map(int, str(rows).split(",")):
        n = count // questions
        jobs = {
            "ours": lambda: generate(qwen, prompts, n, new),
            "prefill": lambda: generate(qwen, prompts, n, 1),
        }
        if "unshared" in beside:
            repeated = [ids for ids in prompts for _ in range(n)]
            jobs["unshared"] = lambda: generate(qwen, repeated, 1, new)
        if theirs:
            jobs["transformers"] = lambda: transformers_generate(theirs, prompts, n, new)
        generate(qwen, prompts, n, 3)  # initialises libraries, compiles kernels
        best = dict.fromkeys(jobs, math.inf)
        for _ in range(2):
            for name, job in jobs.items():
                best[name] = min(best[name], timed(job))

        step = (best["ours"] - best["prefill"]) / (new - 1)  # seconds
        read = weights + kv * (questions * prompt + n * questions * new / 2)
        result = {
            "benchmark": "sampler",
            "device": NAME,
            "model": model,
            "dtype": str(qwen.lm_head.weight.dtype),
            "rows": n * questions,
            "questions": questions,
            "prompt": prompt,
            "new": new,
            "prefill tokens/s": questions * prompt / best["prefill"],
            "decode tokens/s": n * questions / step,
            "tokens/s": n * questions * new / best["ours"],
            "GB/s": read / step / 1e9,
            "share of the roofline": read / step / copies,
        }
        if DEVICE.type == "cuda":
            result["peak GB"] = torch.cuda.max_memory_allocated() / 1e9
        for name in ("unshared", "transformers"):
            if name in jobs:
                result[f"times as fast as {name}"] = best[name] / best["ours"]
        report(result)


def bytes_read(qwen: Qwen) -> tuple[int, int]:
    """Return the bytes that a decode step reads of the weights, and for each token in the cache."""
    config = qwen.config
    item = qwen.lm_head.weight.element_size()
    # A step reads only a few rows of an embedding that is not also the head.
    embedding = 0 if config.tie_word_embeddings else qwen.lm_head.weight.numel()
    weights = item * (sum(p.numel() for p in qwen.parameters()) - embedding)
    channels = config.num_key_value_heads * config.head_dim
    return weights, 2 * item * config.num_hidden_layers * channels


def transformers_generate(theirs, prompts: list[list[int]], n: int, new: int):
    """Sample n rollouts of each prompt with transformers, `new` tokens each."""
    ids = torch.tensor(prompts, device=DEVICE)
    theirs.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        num_return_sequences=n,
        min_new_tokens=new,
        max_new_tokens=new,
        eos_token_id=None,
        pad_token_id=0,
    )


def update(model="small", prompt=1000, n=64, length=250, budget=9000, dtype=""):
    """Measure a forward and backward pass over a group of n rollouts (grpo.packed_logprobs).

    A micro-batch has at most `budget` tokens. The prompt stands once in each ("shared"), or, beside
    it, once for every rollout ("naive"). Utilisation is the share of a large matrix product's
    floating-point operations per second; a prompt's operations count once.
    """
    from grpo import packed_logprobs

    qwen = random_model(model, dtype)
    prompt_ids = torch.randint(qwen.config.vocab_size, (prompt,)).tolist()
    completions = torch.randint(qwen.config.vocab_size, (n, length)).tolist()

    def step(groups):
        logprobs, _ = packed_logprobs(qwen, groups)
        logprobs.sum().backward()
        qwen.zero_grad()

    ways = {  # the groups of some completions, and how many completions fit in a micro-batch
        "shared": (lambda some: [(prompt_ids, some)], max(1, (budget - prompt) // length)),
        "naive": (
            lambda some: [(prompt_ids, [one]) for one in some],
            max(1, budget // (prompt + length)),
        ),
    }
    for lay_out, size in ways.values():
        step(lay_out(completions[:size]))  # initialises libraries, compiles kernels
    seconds = dict.fromkeys(ways, 0.0)
    for half in (completions[: n // 2], completions[n // 2 :]):
        for name, (lay_out, size) in ways.items():
            for i in range(0, len(half), size):
                seconds[name] += timed(lambda: step(lay_out(half[i : i + size])))

    flops_a_second = update_flops(qwen, prompt, n, length) / seconds["shared"]
    result = {
        "benchmark": "update",
        "device": NAME,
        "model": model,
        "dtype": str(qwen.lm_head.weight.dtype),
        "tokens/s": n * length / seconds["shared"],
        "teraflops": flops_a_second / 1e12,
        "utilisation": flops_a_second / multiplied_flops_a_second(qwen.lm_head.weight.dtype),
        "times as fast as naive": seconds["naive"] / seconds["shared"],
    }
    if DEVICE.type == "cuda":
        result["peak GB"] = torch.cuda.max_memory_allocated() / 1e9
    report(result)


def update_flops(qwen: Qwen, prompt: int, n: int, length: int) -> float:
    """Return the floating-point operations of forward and backward pass, with the prompt once."""
    config = qwen.config
    matrices = qwen.lm_head.weight.numel()
    for p in qwen.model.layers.parameters():
        if p.dim() > 1:
            matrices += p.numel()
    seen = n * length * (prompt + length / 2) + prompt**2 / 2  # pairs of a token and one it sees
    channels = config.num_attention_heads * config.head_dim
    tokens = prompt + n * length
    return 6 * matrices * tokens + 12 * config.num_hidden_layers * channels * seen


class Patient(BaseHTTPRequestHandler):
    """A worker that answers after its server's `latency`, in seconds."""

    protocol_version = "HTTP/1.1"
    # With Nagle's algorithm, the body waits 40 ms for the client's ACK of the head.
    disable_nagle_algorithm = True
    answer = json.dumps(
        {
            "choices": [{"message": {"content": "yes"}, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 1, "completion_tokens": 1},
        }
    ).encode()

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        time.sleep(self.server.latency)
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.answer)))
        self.end_headers()
        self.wfile.write(self.answer)

    def log_message(self, *arguments):
        pass


def workflows(count=512, steps=3, latency=1.0):
    """Measure the seconds that `count` simultaneous workflows take, beside the least possible.

    Each is a chain of `steps` calls, and a call takes `latency` seconds.
    """
    from workers import Worker
    from workflow import Rollout, Step, Workflow, roll_out

    server = ThreadingHTTPServer(("127.0.0.1", 0), Patient)
    server.latency = latency
    server.socket.listen(1024)
    # Workers run in a process of their own, so they do not share an interpreter with their caller.
    multiprocessing.get_context("fork").Process(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/v1"
    pool = [Worker("openai", url, "patient", name=f"worker {i}", concurrency=128) for i in range(4)]
    # The workers answer up to 4 * 128 calls at a time.
    rounds = math.ceil(count * steps / (4 * 128))
    rollouts = []
    for k in range(count):
        chain = [Step((k + i) % 4, "Go on.", [*range(i)]) for i in range(steps)]
        rollouts.append(Rollout("Is it?", pool, workflow=Workflow(chain)))
    before = resource.getrusage(resource.RUSAGE_SELF)
    seconds = timed(lambda: roll_out(rollouts))
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert all(rollout.answer == "yes" for rollout in rollouts), rollouts[0].error
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    report(
        {
            "benchmark": "workflows",
            "workflows": count,
            "steps": steps,
            "latency": latency,
            "seconds": seconds,
            "the least": rounds * latency,
            "times the least": seconds / (rounds * latency),
            "CPU ms a call": 1000 * cpu / (count * steps),
        }
    )


def resident_megabytes(pid: int) -> float:
    """Return the resident memory of a process in MB, read from Linux's /proc."""
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def ask_server(port: int, count: int, at_once: int) -> list[str]:
    """Ask `count` questions, each over its own connection, and return the failures as texts."""
    questions = [f"What is {2 + i % 38} * {2 + i // 38 % 38}?" for i in range(count)]

    def ask(question):
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
            turns = [{"role": "user", "content": question}]
            body = json.dumps({"model": "conductor", "messages": turns})
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/chat/completions", body, headers)
            response = connection.getresponse()
            data = response.read()
            connection.close()
            return "" if response.status == 200 else f"{response.status} {data[:200]}"
        except OSError as e:
            return repr(e)

    with ThreadPoolExecutor(at_once) as clients:
        return [failure for failure in clients.map(ask, questions) if failure]


def server(clients=600, requests=5000):
    """Measure the seconds that `workflow.py serve` takes for `clients` requests, and its memory.

    They are sent all at once and 16 at a time, twice each; the better time counts. Then it gets
    `requests` more, 256 at a time: its memory should stop growing.
    """
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    process = subprocess.Popen(
        [sys.executable, os.path.join(root, "workflow.py"), "serve", "--port=0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        port = int(re.search(r":(\d+)/", process.stdout.readline())[1])
        failures = ask_server(port, 32, 16)  # the first requests create pools and caches
        seconds = dict.fromkeys((16, clients), math.inf)
        for at_once in (16, clients) * 2:
            started = time.perf_counter()
            failures += ask_server(port, clients, at_once)
            seconds[at_once] = min(seconds[at_once], time.perf_counter() - started)
        memory = [resident_megabytes(process.pid)]
        for _ in range(5):
            failures += ask_server(port, requests // 5, 256)
            memory.append(resident_megabytes(process.pid))
    finally:
        process.terminate()
        process.wait()
    for failure in failures[:5]:
        print(failure)
    report(
        {
            "benchmark": "server",
            "clients": clients,
            "seconds at 16 at a time": seconds[16],
            "seconds all at once": seconds[clients],
            "all at once / 16 at a time": seconds[clients] / seconds[16],
            "requests": 32 + 4 * clients + 5 * (requests // 5),
            "failures": len(failures),
            "MB before and per fifth": " ".join(f"{size:.0f}" for size in memory),
        }
    )


def sandbox(tests=60):
    """Measure the CPU time of a small test in the sandbox, beside that of starting Python."""
    from eval import passes_livecodebench

    def cpu(job) -> float:
        before = os.times()
        job()
        return sum(os.times()[:4]) - sum(before[:4])

    inputs = [[f"{i}\n", f"{i + 1}\n"] for i in range(tests)]
    bare = cpu(lambda: [subprocess.run([sys.executable, "-I", "-c", "pass"]) for _ in range(tests)])
    boxed = cpu(lambda: passes_livecodebench("print(int(input()) + 1)", inputs))
    report(
        {
            "benchmark": "sandbox",
            "tests": tests,
            "CPU ms a test": 1000 * boxed / tests,
            "times a bare Python": boxed / bare,
        }
    )


BENCHMARKS = {job.__name__: job for job in (sampler, update, workflows, server, sandbox)}


def main(argv):
    names = [word for word in argv if not word.startswith("--")] or [*BENCHMARKS]
    flags = dict(
        word.removeprefix("--").partition("=")[::2] for word in argv if word.startswith("--")
    )
    for name in names:
        if name not in BENCHMARKS:
            raise SystemExit(f"no benchmark {name!r}; there are {', '.join(BENCHMARKS)}")
        known = inspect.signature(BENCHMARKS[name]).parameters
        if len(names) == 1 and not set(flags) <= set(known):
            flags = ", ".join(f"--{p.name}={p.default}" for p in known.values())
            raise SystemExit(f"{name} has the flags {flags}")
        chosen = {
            key: type(known[key].default)(value) for key, value in flags.items() if key in known
        }
        BENCHMARKS[name](**chosen)


if __name__ == "__main__":
    main(sys.argv[1:])
