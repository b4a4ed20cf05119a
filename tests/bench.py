"""Everything that is timed: python tests/bench.py NAME [--key=value …], where NAME is a function below.

Each benchmark prints its numbers and ends with one line of JSON. What is compared takes turns in one run, as a machine is not equally fast
all the time."""
import dataclasses
import inspect
import json
import math
import os
import sys
import time
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
    the rate at which this machine copies. --model=7b --rows=64,128,256 --others= on a GPU."""
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


# ---------------------------------------------------------------------------------------------------------------------------------

if __name__ == "__main__":
    here = {name: f for name, f in vars(sys.modules["__main__"]).items() if inspect.isfunction(f) and f.__module__ == "__main__"
            and all(p.default is not p.empty for p in inspect.signature(f).parameters.values())}  # others are called by these
    if sys.argv[1:2] == [] or sys.argv[1] not in here:
        raise SystemExit(f"usage: python tests/bench.py NAME [--key=value …], with NAME one of {', '.join(here) or '(none yet)'}")
    here[sys.argv[1]](**dict(flag.removeprefix("--").split("=", 1) for flag in sys.argv[2:]))
