"""Benchmarks: sampler, update, workflows, server and sandbox. Without a NAME, all of them run.

    python tests/bench.py [NAME …] [--key=value …]
    python tests/bench.py sampler --model=7b --rows=64,128,256 --prompt=900 --new=128     on a GPU
    python tests/bench.py update --beside=naive,../before     ../before: another checkout

A key is a parameter of the benchmark's function below. Each result is printed in columns, then as
one line of JSON. Alternatives are timed in the same run, because the speed of a machine changes
over time.
"""

import dataclasses
import functools
import http.client
import importlib
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

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
from model import Config, Qwen, compute_dtype
from sample import cache_dtype, generate

SHAPES = {  # name -> the Config of a model, which gets random weights
    "small": Config(4096, 256, 768, 6, 4, 2, tie_word_embeddings=True),
    "135m": Config(49152, 576, 1536, 30, 9, 3, tie_word_embeddings=True),  # SmolLM2's
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


def computing(job) -> float:
    """Return the seconds of computation that job() takes.

    On a GPU, this is the elapsed time. On a CPU, it is the CPU time of this process divided by the
    number of torch's threads, so that the time that other programs take does not count.
    """
    if DEVICE.type == "cuda":
        return timed(job)
    started = time.process_time()
    job()
    return (time.process_time() - started) / torch.get_num_threads()


def report(result: dict):
    """Print a result in columns and then as JSON, with floats of four significant digits."""
    for key, value in result.items():
        if isinstance(value, float):
            result[key] = float(f"{value:.4g}")
        print(f"{key:<34} {result[key]!s:>24}")
    print(json.dumps(result), flush=True)


def random_model(shape: str, dtype: str) -> Qwen:
    with torch.device("meta"):
        model = Qwen(SHAPES[shape])
    model.to(getattr(torch, dtype) if dtype else compute_dtype(DEVICE)).to_empty(device=DEVICE)
    if model.config.tie_word_embeddings:  # to_empty has untied the weights
        model.lm_head.weight = model.model.embed_tokens.weight
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.fill_(1.0) if "norm" in name else p.normal_(std=0.02)
    return model


def transformers_model(model: Qwen):
    """Return the same model as transformers implements it, with the same weight tensors."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    rope = {"rope_type": "default", "rope_theta": model.config.rope_theta}
    with torch.device("meta"):
        theirs = Qwen2ForCausalLM(
            Qwen2Config(**dataclasses.asdict(model.config), rope_parameters=rope)
        )
    theirs.load_state_dict(model.state_dict(), assign=True)
    # The state dict lacks the rotary frequencies, which are still on "meta": compute them.
    with torch.device(DEVICE):
        theirs.model.rotary_emb = type(theirs.model.rotary_emb)(theirs.config)
    return theirs


@functools.cache
def checkout(folder: str) -> dict:
    """Return {name: module} for model, sample and grpo from another checkout of this repository."""
    here = dict(sys.modules)
    own = {file.removesuffix(".py") for file in os.listdir(ROOT) if file.endswith(".py")}
    for name in own:
        sys.modules.pop(name, None)
    sys.path.insert(0, os.path.abspath(folder))
    try:
        return {name: importlib.import_module(name) for name in ("model", "sample", "grpo")}
    finally:
        sys.path.pop(0)
        for name in own:
            sys.modules.pop(name, None)
        sys.modules.update({name: here[name] for name in own & set(here)})


def model_of_checkout(folder: str, model: Qwen):
    """Return the same model as another checkout implements it, with the same weight tensors."""
    module = checkout(folder)["model"]
    known = {f.name for f in dataclasses.fields(module.Config) if f.init}
    shape = dataclasses.asdict(model.config)
    with torch.device("meta"):
        theirs = module.Qwen(module.Config(**{key: shape[key] for key in known & set(shape)}))
    theirs.load_state_dict(model.state_dict(), assign=True)
    if model.config.tie_word_embeddings:  # load_state_dict has untied the weights
        theirs.lm_head.weight = theirs.model.embed_tokens.weight
    return theirs


def copied_bytes_a_second() -> float:
    """Return the bytes read and written per second by the fastest of ten copies of 4 GiB.

    On a CPU, 256 MiB are copied.
    """
    a = torch.ones(2 ** (32 if DEVICE.type == "cuda" else 28), dtype=torch.uint8, device=DEVICE)
    b = torch.zeros_like(a)
    return 2 * a.numel() / min(computing(lambda: b.copy_(a)) for _ in range(10))


def multiplied_flops_a_second(dtype) -> float:
    """Return the floating-point operations per second of the fastest of ten matrix products."""
    size = 8192 if DEVICE.type == "cuda" else 1024
    a = torch.randn(size, size, device=DEVICE).to(dtype)
    return 2 * size**3 / min(computing(lambda: a @ a) for _ in range(10))


def sampler(
    model="small",
    rows="64",
    questions=4,
    prompt=500,
    new=64,
    beside="transformers,unshared",
    dtype="",
):
    """Measure the tokens per second of `generate`; the better of two turns counts.

    For each number in `rows`, that many rollouts are sampled, an equal share for each of
    `questions` prompts. A prompt has `prompt` random ids, and a rollout has `new` tokens. On a GPU,
    `Qwen.join` speeds up our model, as in a training run.

    `beside` lists what else to time: "transformers", for the generate of transformers; "unshared",
    for our generate with a separate prompt for every rollout; and folders of other checkouts of
    this repository.

    The roofline is the speed of a decode step that reads the weights and the cached keys and values
    once, at the rate at which this machine copies memory.
    """
    qwen = random_model(model, dtype)
    others = beside.split(",")
    theirs = transformers_model(qwen) if "transformers" in others else None
    checkouts = {name: model_of_checkout(name, qwen) for name in others if os.path.isdir(name)}
    if DEVICE.type == "cuda":
        qwen.join()
    copies = copied_bytes_a_second()
    weights, kv = bytes_read(qwen)
    prompts = torch.randint(qwen.config.vocab_size, (questions, prompt)).tolist()

    for count in map(int, str(rows).split(",")):
        n = count // questions
        jobs = {
            "ours": lambda: generate(qwen, prompts, n, new),
            "prefill": lambda: generate(qwen, prompts, n, 1),
        }
        if "unshared" in others:
            repeated = [ids for ids in prompts for _ in range(n)]
            jobs["unshared"] = lambda: generate(qwen, repeated, 1, new)
        if theirs:
            jobs["transformers"] = lambda: transformers_generate(theirs, prompts, n, new)
        for name, other in checkouts.items():
            their_generate = checkout(name)["sample"].generate
            jobs[name] = functools.partial(their_generate, other, prompts, n, new)
            their_generate(other, prompts, n, 3)
        generate(qwen, prompts, n, 3)  # initialises libraries, compiles kernels
        best = dict.fromkeys(jobs, math.inf)
        for _ in range(2):
            for name, job in jobs.items():
                best[name] = min(best[name], computing(job))

        step = (best["ours"] - best["prefill"]) / (new - 1)  # seconds
        # On average over the steps, half of each rollout's new tokens are in the cache.
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
            "ms a decode step": 1000 * step,
            "decode tokens/s": n * questions / step,
            "tokens/s": n * questions * new / best["ours"],
            "GB/s": read / step / 1e9,
            "share of the roofline": read / step / copies,
        }
        if DEVICE.type == "cuda":
            result["peak GB"] = torch.cuda.max_memory_allocated() / 1e9
        for name in [name for name in jobs if name not in ("ours", "prefill")]:
            result[f"times as fast as {name}"] = best[name] / best["ours"]
        report(result)


def bytes_read(qwen: Qwen) -> tuple[int, int]:
    """Return (bytes of weights, bytes of keys and values per cached token) that a step reads."""
    config = qwen.config
    item = qwen.lm_head.weight.element_size()
    # Of an embedding that is not also lm_head, a step reads only a few rows: do not count it.
    embedding = 0 if config.tie_word_embeddings else qwen.lm_head.weight.numel()
    weights = item * (sum(p.numel() for p in qwen.parameters()) - embedding)
    channels = config.num_key_value_heads * config.head_dim
    return weights, 2 * cache_dtype(qwen).itemsize * config.num_hidden_layers * channels


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


def update(
    model="small",
    groups=1,
    prompt=1000,
    n=64,
    length="250",
    budget=9000,
    kl=0,
    recompute=0,
    beside="naive,transformers",
    dtype="",
):
    """Measure a forward and backward pass of packed_logprobs over `groups` groups of n rollouts.

    `length` is the number of tokens in a rollout, or a range such as 40-80 from which each
    rollout's number is drawn. A micro-batch has at most `budget` tokens, unless a prompt and a
    single rollout have more. In a micro-batch, the rollouts of a prompt share one copy of it. With
    --kl=1, the KL to a second model is computed, too. With --recompute=1, the backward pass
    computes every layer a second time.

    `beside` lists what else to time: "naive", for our code with a separate prompt for every
    rollout; "transformers", for its model on a padded batch of rollouts, each with a separate
    prompt; and folders of other checkouts of this repository.

    Utilisation is our floating-point operations per second divided by those of a large matrix
    product. A prompt's operations count once per group. Those of the reference model and of
    recomputation do not count.
    """
    import grpo

    qwen = random_model(model, dtype)
    qwen.recompute = bool(recompute)
    reference = random_model(model, dtype).requires_grad_(False) if kl else None
    low, _, high = length.partition("-")
    lengths = torch.randint(int(low), int(high or low) + 1, (groups, n))
    lengths = lengths.sort(dim=1).values.tolist()  # as grpo.micro_batches sorts them
    rollouts = []
    for row in lengths:
        prompt_ids = torch.randint(qwen.config.vocab_size, (prompt,)).tolist()
        completions = [torch.randint(qwen.config.vocab_size, (m,)).tolist() for m in row]
        rollouts.append((prompt_ids, completions))

    def packed(module, policy, reference):
        def step(batch):
            logprobs, divergence = module.packed_logprobs(policy, batch, reference=reference)
            (logprobs.sum() + divergence.sum()).backward()
            policy.zero_grad()

        return step

    # name -> (function that computes a micro-batch, number of rollouts per copy of a prompt)
    longest = max(map(max, lengths))
    together = min(n, max(1, (budget - prompt) // longest))
    ours = packed(grpo, qwen, reference)
    ways = {"ours": (ours, together)}
    others = beside.split(",")
    if "naive" in others:
        ways["naive"] = (ours, 1)
    if "transformers" in others:
        theirs = transformers_model(qwen).train()
        if recompute:
            theirs.gradient_checkpointing_enable()
        ways["transformers"] = (functools.partial(transformers_update, theirs), 1)
    for folder in filter(os.path.isdir, others):
        theirs = model_of_checkout(folder, qwen)
        theirs.recompute = bool(recompute)
        their_reference = reference and model_of_checkout(folder, reference)
        ways[folder] = (packed(checkout(folder)["grpo"], theirs, their_reference), together)

    best = dict.fromkeys(ways, math.inf)
    for turn in range(3):
        for name, (step, size) in ways.items():
            pieces = []
            for prompt_ids, completions in rollouts:
                for i in range(0, n, size):
                    pieces.append((prompt_ids, completions[i : i + size]))
            at_once = max(1, budget // (prompt + size * longest))
            batches = [pieces[i : i + at_once] for i in range(0, len(pieces), at_once)]
            if turn == 0:  # initialises libraries, compiles kernels
                step(batches[0])
            else:
                best[name] = min(best[name], computing(lambda: [step(batch) for batch in batches]))

    n_tokens = sum(map(sum, lengths))
    flops = groups * update_flops(qwen, prompt, n, n_tokens / (groups * n))
    flops_a_second = flops / best["ours"]
    result = {
        "benchmark": "update",
        "device": NAME,
        "model": model,
        "dtype": str(qwen.lm_head.weight.dtype),
        "groups": groups,
        "prompt": prompt,
        "rollouts a group": n,
        "tokens a rollout": length,
        "seconds": best["ours"],
        "tokens/s": n_tokens / best["ours"],
        "teraflops": flops_a_second / 1e12,
        "utilisation": flops_a_second / multiplied_flops_a_second(qwen.lm_head.weight.dtype),
    }
    for name in [*ways][1:]:
        result[f"times as fast as {name}"] = best[name] / best["ours"]
    if DEVICE.type == "cuda":
        result["peak GB"] = torch.cuda.max_memory_allocated() / 1e9
    report(result)


def transformers_update(theirs, batch):
    """Run transformers' forward and backward pass over rollouts, each with a separate prompt.

    The KL is not computed.
    """
    rows = [torch.tensor(prompt + completion) for prompt, [completion] in batch]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(DEVICE)  # padded on the right
    first = len(batch[0][0])  # position of each completion's first token (prompts are equally long)
    logits = theirs(ids, logits_to_keep=ids.shape[1] - first + 1).logits[:, :-1].float()
    logprobs = logits.log_softmax(-1).gather(-1, ids[:, first:, None])[..., 0]
    is_token = torch.arange(logprobs.shape[1]) < torch.tensor([[len(c)] for _, [c] in batch])
    (logprobs * is_token.to(DEVICE)).sum().backward()
    theirs.zero_grad()


def update_flops(qwen: Qwen, prompt: int, n: int, length: float) -> float:
    """Estimate the FLOPs of a forward and backward pass over a prompt and its n rollouts.

    The prompt is computed once. `length` is the mean number of tokens in a rollout. The estimate
    includes logits at all the prompt's tokens, although packed_logprobs computes only the last.
    """
    config = qwen.config
    matrices = qwen.lm_head.weight.numel()
    for p in qwen.model.layers.parameters():
        if p.dim() > 1:
            matrices += p.numel()
    seen = n * length * (prompt + length / 2) + prompt**2 / 2  # pairs of a token and one it sees
    channels = config.num_attention_heads * config.head_dim
    tokens = prompt + n * length
    # The forward pass takes 2 FLOPs per token and weight, and 4 per channel of a pair in `seen`: 2
    # for its score and 2 for its value. The backward pass takes twice as many.
    return 6 * matrices * tokens + 12 * config.num_hidden_layers * channels * seen


class Patient(BaseHTTPRequestHandler):
    """An HTTP handler for a worker that answers every request after server.latency seconds."""

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
    """Measure how long `count` simultaneous workflows take, and compare that with a lower bound.

    Each workflow is a chain of `steps` calls, and a call takes `latency` seconds.
    """
    from workers import Worker
    from workflow import Rollout, Step, Workflow, roll_out

    server = ThreadingHTTPServer(("127.0.0.1", 0), Patient)
    server.latency = latency
    server.socket.listen(1024)
    # The workers get a separate process, so that they do not share an interpreter with the caller.
    multiprocessing.get_context("fork").Process(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/v1"
    pool = [Worker("openai", url, "patient", name=f"worker {i}", concurrency=128) for i in range(4)]
    # The workers answer up to 4 * 128 calls at a time, so at least this many latencies pass.
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
    """Send `count` questions over separate connections; return a text for each failure.

    At most `at_once` requests run at the same time.
    """
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
    """Measure how long `workflow.py serve` takes for `clients` requests, and the server's memory.

    The requests are sent in two ways, 16 at a time or all at once. Each way is tried twice, and its
    better time counts. Then `requests` more requests are sent, 256 at a time. The server's memory
    is measured before these and after each fifth of them; it should stop growing.
    """
    process = subprocess.Popen(
        [sys.executable, os.path.join(ROOT, "workflow.py"), "serve", "--port=0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        port = int(re.search(r":(\d+)/", process.stdout.readline())[1])
        failures = ask_server(port, 32, 16)  # untimed: the first requests create threads and caches
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
    """Compare the CPU time of a small test in the sandbox with that of starting Python."""
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
