"""Everything that is timed: python tests/bench.py NAME [--key=value …], where NAME is a function below.

Each benchmark prints its numbers and ends with one line of JSON. What is compared takes turns in one run, as a machine is not equally fast
all the time."""
import dataclasses
import importlib.util
import inspect
import json
import math
import os
import statistics
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import torch

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import sample
from model import Config, Qwen, compute_dtype


def timed(job, device="cpu") -> float:
    """Seconds that job() takes."""
    began = time.perf_counter()
    job()
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def report(result: dict):
    """Print the numbers in columns, and as one line of JSON."""
    for key, value in result.items():
        if isinstance(value, float):
            result[key] = float(f"{value:.4g}")
        print(f"{key:<34}{result[key]!s:>24}")
    print(json.dumps(result))


# -------------------------------------------------------------------------------------------------------------
# sample.py

SHAPES = {  # --model: shapes of random weights
    "small": Config(4096, 256, 768, 6, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True),
    "0.5b": Config(151936, 896, 4864, 24, num_attention_heads=14, num_key_value_heads=2, tie_word_embeddings=True),
    "7b": Config(),
}


def random_model(name: str, dtype, device) -> Qwen:
    with torch.device("meta"):
        model = Qwen(SHAPES[name])
    model.to(dtype).to_empty(device=device)
    if model.config.tie_word_embeddings:  # to_empty gives each a weight of its own
        model.lm_head.weight = model.model.embed_tokens.weight
    with torch.no_grad():
        for key, p in model.named_parameters():
            p.fill_(1.0) if "norm" in key else p.normal_(std=0.02)
    return model


def transformers_model(model: Qwen):
    """The same weights, not copied, in transformers' implementation."""
    from transformers import Qwen2Config, Qwen2ForCausalLM
    rope = {"rope_type": "default", "rope_theta": model.config.rope_theta}
    with torch.device("meta"):
        theirs = Qwen2ForCausalLM(Qwen2Config(**dataclasses.asdict(model.config), rope_parameters=rope))
    theirs.load_state_dict(model.state_dict(), assign=True)
    with torch.device(model.device):  # its tables are no parameters
        theirs.model.rotary_emb = type(theirs.model.rotary_emb)(theirs.config)
    return theirs


def copy_bandwidth(device) -> float:
    """Bytes read and written in a second by the fastest of ten copies of 4 GiB (on a CPU 256 MiB)."""
    a = torch.ones(2 ** (32 if device.type == "cuda" else 28), dtype=torch.uint8, device=device)
    b = torch.zeros_like(a)
    return 2 * a.numel() / min(timed(lambda: b.copy_(a), device) for _ in range(10))


def sampler(model="small", rows="64", questions="4", prompt="500", new="64", others="transformers,unshared", rounds="2", dtype=""):
    """Tokens per second of `rows` rollouts over `questions` prompts of `prompt` random ids, each of `new` tokens.

    Beside it stand transformers' generate and generate with a prompt for every rollout; all take turns, and the best of
    `rounds` counts. The roofline: a decode step has to read the weights and the live keys and values once, here at
    the rate at which this machine copies. --model=7b --rows=64,128,256 --new=512 --others= on a GPU, where capturing a
    graph, once in 128 tokens, takes as long as many steps and counts too."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    qwen = random_model(model, compute_dtype(device, dtype), device)
    config, copies = qwen.config, copy_bandwidth(device)
    Q, P, new = int(questions), int(prompt), int(new)
    size = qwen.lm_head.weight.element_size()
    embedding = 0 if config.tie_word_embeddings else qwen.lm_head.weight.numel()  # of which a step reads some rows only
    weights = size * (sum(p.numel() for p in qwen.parameters()) - embedding)
    kv = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * size  # bytes a token
    prompts = torch.randint(config.vocab_size, (Q, P), generator=torch.Generator().manual_seed(0)).tolist()
    for count in map(int, rows.split(",")):
        n = count // Q
        jobs = {"ours": lambda: sample.generate(qwen, prompts, n, new), "prefill": lambda: sample.generate(qwen, prompts, n, 1)}
        if "unshared" in others:
            jobs["unshared"] = lambda: sample.generate(qwen, [p for p in prompts for _ in range(n)], 1, new)
        if "transformers" in others:
            theirs, ids = transformers_model(qwen), torch.tensor(prompts, device=device)
            jobs["transformers"] = lambda: theirs.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
                num_return_sequences=n, min_new_tokens=new, max_new_tokens=new, eos_token_id=None, pad_token_id=0)
        sample.generate(qwen, prompts, n, 3)  # readies what is made once
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        best = dict.fromkeys(jobs, math.inf)
        for _ in range(int(rounds)):
            for name, job in jobs.items():
                best[name] = min(best[name], timed(job, device))
        step = (best["ours"] - best["prefill"]) / (new - 1)
        read = weights + kv * (Q * P + n * Q * new / 2)
        result = {
            "device": torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads",
            "model": model, "dtype": str(qwen.lm_head.weight.dtype), "rows": n * Q, "questions": Q, "prompt": P, "new": new,
            "prefill tokens/s": Q * P / best["prefill"], "decode tokens/s": n * Q / step, "ms a step": 1000 * step,
            "tokens/s": n * Q * new / best["ours"], "GB/s": read / step / 1e9, "GB/s of a copy": copies / 1e9,
            "share of the roofline": read / step / copies}
        if device.type == "cuda":
            result["peak GB"] = torch.cuda.max_memory_allocated() / 1e9
        for name in ("unshared", "transformers"):
            if name in jobs:
                result[f"times as fast as {name}"] = best[name] / best["ours"]
        report(result)


# ---------------------------------------------------------------------------------------------------------------------------------
# grpo.py


def kept_bytes(job) -> int:
    """The bytes that job() keeps for its backward pass."""
    sizes = {}

    def count(tensor):
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        alive = job()
    del alive
    return sum(sizes.values())


def update(width="512", layers="4", vocabulary="4096", prompt="1000", n="64", length="250", budget="9000", dtype=""):
    """One group of n rollouts, forward and backward in micro-batches of at most `budget` tokens: with the prompt once in
    each (grpo.packed_logprobs) against once for every rollout. What each keeps for the backward pass is that of 16
    rollouts. MFU, where the device's peak is known, counts forward and backward pass with the prompt once, as train.py does.

    --width=3584 --layers=4 --vocabulary=152064 on a GPU."""
    from grpo import packed_logprobs
    from train import forward_flops, speeds
    width, layers, vocabulary, P, n, length, budget = map(int, (width, layers, vocabulary, prompt, n, length, budget))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    head = 128 if width >= 1024 else 64
    shape = Config(vocabulary, width, 16 * width // 3 // 64 * 64, layers, width // head, max(1, width // head // 7))
    model = Qwen(shape).to(device, compute_dtype(device, dtype))
    asked, written = torch.randint(vocabulary, (P,)).tolist(), torch.randint(vocabulary, (n, length)).tolist()

    def shared(completions):
        return [(asked, completions)]

    def naive(completions):
        return [(asked, [completion]) for completion in completions]

    def step(groups):
        logprobs, _ = packed_logprobs(model, groups)
        logprobs.sum().backward()
        model.zero_grad()

    ways = {"shared": (shared, (budget - P) // length), "naive": (naive, max(1, budget // (P + length)))}
    result = {"parameters": sum(p.numel() for p in model.parameters()), "device": device.type, "threads": torch.get_num_threads()}
    for name, (way, at_once) in ways.items():
        result[f"kept_gigabytes_{name}"] = kept_bytes(lambda way=way: packed_logprobs(model, way(written[:16]))) / 1e9
        size = at_once if device.type == "cuda" else 2
        timed(lambda: step(way(written[:size])), device)  # readies what is made once, on a GPU the kernels and memory of a shape
        result[f"seconds_{name}"] = 0.0
    for half in (written[:n // 2], written[n // 2:]):
        for name, (way, at_once) in ways.items():
            for i in range(0, len(half), at_once):
                result[f"seconds_{name}"] += timed(lambda part=way(half[i:i + at_once]): step(part), device)
    result["times_as_fast"] = result["seconds_naive"] / result["seconds_shared"]
    result["times_less_kept"] = result["kept_gigabytes_naive"] / result["kept_gigabytes_shared"]
    flops = 3 * forward_flops(shape, P, n * length, P + length / 2)
    result["teraflops"] = flops / result["seconds_shared"] / 1e12
    result["mfu"] = result["teraflops"] * 1e12 / speeds()[0] if speeds() else None
    report(result)


# ---------------------------------------------------------------------------------------------------------------------------------
# workers.py


def client(workflows=256, steps=3, latency=0.05):
    """Chains of calls, as workflows make them, all at once over five workers that take `latency` seconds: wall time beside the least
    possible, and this process's CPU time of a call."""
    from workers import load_pool, local_server
    workflows, steps, latency = int(workflows), int(steps), float(latency)
    pool = load_pool("local", local_server(latency)[0])

    def chain(k):
        for i in range(steps):
            pool[(k + i) % len(pool)].chat([{"role": "user", "content": "Question:\nWhat is 6 * 7?\n\nYour task:\nWork it out."}])

    with ThreadPoolExecutor(workflows) as threads:
        list(threads.map(chain, range(workflows)))  # opens the connections and starts the threads
        begun, before = time.monotonic(), os.times()
        list(threads.map(chain, range(workflows)))
        wall, cpu = time.monotonic() - begun, sum(os.times()[:2]) - sum(before[:2])
    calls, slots = workflows * steps, sum(worker.concurrency for worker in pool)
    print(json.dumps({"calls": calls, "at_a_time": slots, "latency_ms": 1000 * latency, "wall_seconds": round(wall, 4),
                      "times_the_least": round(wall / (math.ceil(calls / slots) * latency), 3),
                      "client_cpu_ms_per_call": round(1000 * cpu / calls, 3)}))


# ---------------------------------------------------------------------------------------------------------------------------------
# eval.py


def sandbox(solutions="60", tests="100", against=""):
    """How many small solutions a second the sandbox takes, with one at a time on each core, and how much CPU time
    a test costs in a solution of many. against=FILE compares with another edition of eval.py, turn by turn."""
    import eval as evaluation

    editions = {"here": evaluation}
    if against:
        editions["there"] = load_edition(against)
    program = """
def count(words):
    seen = {}
    for word in words:
        seen[word] = seen.get(word, 0) + 1
    return [list(pair) for pair in sorted(seen.items())]
"""
    words = [[], ["a"], ["a", "b", "a"], ["x"] * 50, [*"abracadabra"], [*"mississippi"], ["", " "]]
    few = [[json.dumps(w), json.dumps(sorted(map(list, Counter(w).items())))] for w in words]
    many = [[f"{i}\n", f"{i + 1}\n"] for i in range(int(tests))]
    cores = len(os.sched_getaffinity(0))
    numbers = {name: {"per_second": [], "cpu_ms_per_test": []} for name in editions}
    turns = 3
    for _ in range(turns):
        for name, edition in editions.items():
            begun = time.perf_counter()
            with ThreadPoolExecutor(cores) as threads:
                rounds = range(int(solutions) // turns)
                passed = list(threads.map(lambda _: edition.passes_livecodebench(program, few, "count"), rounds))
            numbers[name]["per_second"].append(len(passed) / (time.perf_counter() - begun))
            before = os.times()
            passed.append(edition.passes_livecodebench("print(int(input()) + 1)", many))
            after = os.times()
            used = sum(after[:4]) - sum(before[:4])
            numbers[name]["cpu_ms_per_test"].append(1000 * used / len(many))
            assert all(passed), "a right solution did not pass"
    found = {"cores": cores}
    for name, measured in numbers.items():
        found[name] = {what: round(statistics.median(values), 2) for what, values in measured.items()}
        per_second, cpu = found[name].values()
        print(f"{name}: {per_second} solutions a second, {cpu} ms of CPU a test")
    print(json.dumps(found))


def load_edition(path):
    """Another eval.py as a module beside this one."""
    spec = importlib.util.spec_from_file_location("other_eval", path)
    module = sys.modules["other_eval"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---------------------------------------------------------------------------------------------------------------------------------

if __name__ == "__main__":
    here = {name: f for name, f in vars(sys.modules["__main__"]).items() if inspect.isfunction(f) and f.__module__ == "__main__"
            and all(p.default is not p.empty for p in inspect.signature(f).parameters.values())}  # others are called by these
    if sys.argv[1:2] == [] or sys.argv[1] not in here:
        raise SystemExit(f"usage: python tests/bench.py NAME [--key=value …], with NAME one of {', '.join(here) or '(none yet)'}")
    known = inspect.signature(here[sys.argv[1]]).parameters
    flags = dict(flag.removeprefix("--").partition("=")[::2] for flag in sys.argv[2:])
    if not all(key in known and value for key, value in flags.items()):
        raise SystemExit(f"usage: python tests/bench.py {sys.argv[1]}{''.join(f' [--{p.name}={p.default}]' for p in known.values())}")
    here[sys.argv[1]](**flags)
