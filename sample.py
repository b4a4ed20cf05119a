"""Batched generation with a KV cache: one prefill per prompt, many rollouts.

    python sample.py --checkpoint=DIR "a prompt"        chat with a checkpoint
    python sample.py --bench --random=small             tokens/s and the share of the roofline; --random=7b on a GPU

GRPO asks the same prompt n times, so the prompt's keys and values are computed and stored once, and each rollout stores only its
own. A decode step attends to [shared prompt | own tokens] under one softmax. Rollouts live in a grid of Q prompts × R rows; all have
the same age, so one mask over own tokens serves all, and rows that finished are compacted away. On CUDA the decode step is captured as
a graph, anew whenever the grid shrinks or the cache grows. Read workers.py next.
"""
import hashlib
import json
import math
import sys
import time
from dataclasses import dataclass

import torch

from model import Config, Qwen, Tokenizer, causal, configure

BLOCK = 64  # own tokens by which the KV cache grows
CHECK = 8  # decode steps between looks at who has finished
COMPACT = 0.9  # the grid is made smaller once at most this share of its cells would stay


@dataclass
class Completion:
    tokens: list[int]  # the end token included when finished
    logprobs: list[float]  # of each token, under the distribution it was drawn from
    finished: bool  # False: cut off at max_new_tokens


def uniform(seeds, step):
    """One number in [0, 1) per row from its seed (int64) and the step (an int64 tensor): splitmix64. A rollout's luck is its own, whatever
    shares its batch."""
    z = seeds + (step + 1) * -0x61C8864680B583EB  # int64 wraps around, so splitmix64's constants stand here as signed
    z = (z ^ (z >> 30 & (1 << 34) - 1)) * -0x40A7B892E31B1A47
    z = (z ^ (z >> 27 & (1 << 37) - 1)) * -0x6B2FB644ECCEEE15
    return (z >> 41 & (1 << 23) - 1).float() / (1 << 23)


def draw(logits, u, temperature=1.0, top_p=1.0, top_k=0):
    """Sample from logits (N, V) with uniforms u (N): tokens (N) and their log-probabilities (N) in what was sampled from.

    temperature 0 is greedy, with log-probabilities at temperature 1. top_k keeps the k likeliest tokens, top_p then the smallest set of
    the likeliest that holds that much of what remains; both renormalise."""
    if temperature == 0:
        tokens = logits.argmax(-1)
        return tokens, logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    logp = (logits / temperature).log_softmax(-1)
    if top_k or top_p < 1:
        ranked, order = logp.sort(-1, descending=True)
        if top_k:
            ranked[:, top_k:].fill_(-torch.inf)
        ranked = ranked.log_softmax(-1)
        ranked.masked_fill_(ranked.exp().cumsum(-1) - ranked.exp() >= top_p, -torch.inf)  # the mass before a token already reaches top_p
        logp = torch.empty_like(logp).scatter_(-1, order, ranked.log_softmax(-1))
    mass = logp.exp().cumsum(-1)
    tokens = torch.searchsorted(mass, (u * mass[:, -1])[:, None], right=True)  # (N, 1); right: never a token of probability 0
    return tokens[:, 0], logp.gather(-1, tokens)[:, 0]


@torch.inference_mode()
def generate(model: Qwen, prompts: list[list[int]], n: int = 1, max_new_tokens: int = 1024, temperature: float = 1.0,
             top_p: float = 1.0, top_k: int = 0, eos_id: int | list[int] = (), seed: int = 0, n_ids: int | None = None,
             on_finish=None, first: int = 0) -> list[list[Completion]]:
    """n rollouts of each prompt, as [prompt][rollout].

    eos_id: the token or tokens that end a rollout. n_ids: only ids below it are sampled (Qwen2.5 pads its vocabulary beyond the
    tokenizer's). The same seed and prompt give the same rollouts in any batch, up to rounding; a prompt listed twice continues with fresh ones.
    first: the number of each prompt's first rollout; in whatever call, the rollout of one number draws the same random numbers.
    on_finish(prompt index, rollout index, Completion) is called as rollouts finish."""
    if not prompts or not all(prompts) or n < 1 or max_new_tokens < 1:
        raise ValueError("generate needs at least one prompt, no empty prompt, n >= 1 and max_new_tokens >= 1")
    if not 0 <= temperature < math.inf or not 0 < top_p <= 1 or top_k < 0:
        raise ValueError(f"generate needs temperature >= 0, 0 < top_p <= 1 and top_k >= 0, not {temperature}, {top_p}, {top_k}")
    device, config = model.device, model.config
    eos = torch.tensor([eos_id] if isinstance(eos_id, int) else list(eos_id), dtype=torch.long, device=device)
    Q, R, Hkv, D = len(prompts), n, config.num_key_value_heads, config.head_dim
    G, scale = config.num_attention_heads // Hkv, D ** -0.5

    # Prefill: prompts padded on the right, which causal attention never looks at.
    length = torch.tensor([len(p) for p in prompts], device=device)
    P = int(length.max())
    ids = torch.tensor([p + [0] * (P - len(p)) for p in prompts], device=device)  # (Q, P)
    shared = []  # per layer: the prompts' keys and values, each (Q, Hkv, P, D)

    def prefill(layer, q, k, v):
        shared.append((k.contiguous(), v.contiguous()))
        return causal(layer, q, k, v)

    logits = model(ids, attend=prefill, head=lambda h: model.logits(h[torch.arange(Q, device=device), length - 1]))  # (Q, V)
    padding = torch.where(torch.arange(P, device=device) < length[:, None], 0.0, -torch.inf)[:, None, None, None]  # (Q, 1, 1, 1, P)

    # The outputs, a line for each of the Q*n rollouts.
    tokens = torch.zeros(Q * n, max_new_tokens, dtype=torch.long, device=device)
    logprobs = torch.zeros(Q * n, max_new_tokens, dtype=torch.float32, device=device)
    ends = torch.zeros(Q * n, dtype=torch.long, device=device)  # a rollout's length, 0 while it goes on
    completions = [[None] * n for _ in prompts]

    # The grid, flat. row says which rollout a cell holds; a finished one stays until it is compacted away. t is how many tokens all have.
    row, seeds = torch.arange(Q * R, device=device), torch.tensor(row_seeds(prompts, n, seed, first), device=device)  # (Q*R)
    newest, t = torch.zeros_like(row), torch.zeros(1, dtype=torch.long, device=device)
    own = [k.new_zeros(2, Q, Hkv, R, 0, D) for k, _ in shared]  # per layer: keys and values of own tokens

    def choose(logits):
        """Token number t of every cell."""
        token, logprob = draw(logits[:, :n_ids], uniform(seeds, t), temperature, top_p, top_k)
        tokens[row, t], logprobs[row, t] = token, logprob
        ends[row] = torch.where((token[:, None] == eos).any(-1) & (ends[row] == 0), t + 1, ends[row])
        newest.copy_(token)
        t.add_(1)

    def step():
        """Feed every cell's newest token and choose the next. Nothing here waits for the device, and until a shape changes every step launches
        the same kernels: a CUDA graph can replay it."""
        T = own[0].shape[4]
        future = torch.where(torch.arange(T, device=device) < t, 0.0, -torch.inf)  # (T), over own tokens

        def attend(layer, q, k, v):  # q (Q*R, H, 1, D), k and v (Q*R, Hkv, 1, D)
            (kp, vp), kv = shared[layer], own[layer]
            kv.index_copy_(4, t - 1, torch.stack((k, v)).view(2, Q, R, Hkv, 1, D).transpose(2, 3))
            q = q.view(Q, R, Hkv, G, D).transpose(1, 2)  # (Q, Hkv, R, G, D)
            on_prompt = dot(q.reshape(Q, Hkv, R * G, D), kp).view(Q, Hkv, R, G, P) * scale + padding  # all rows of a prompt on its one KV
            on_own = dot(q, kv[0]) * scale + future  # (Q, Hkv, R, G, T)
            weight = torch.cat((on_prompt, on_own), -1).softmax(-1).to(v.dtype)
            y = (weight[..., :P].reshape(Q, Hkv, R * G, P) @ vp).view(Q, Hkv, R, G, D) + weight[..., P:] @ kv[1]
            return y.transpose(1, 2).reshape(Q * R, Hkv * G, 1, D)

        positions = (length + t - 1)[:, None].expand(Q, R).reshape(-1, 1)  # (Q*R, 1)
        choose(model(newest[:, None], positions, attend)[:, 0])

    choose(logits.repeat_interleave(R, 0))  # (Q*R, V)
    play = None  # how a step is taken: as it is after a change of shapes, from the next one on by a graph
    for count in range(1, max_new_tokens + 1):  # how many tokens all have
        last = count == max_new_tokens
        if last or count % CHECK == 0:
            lengths = ends.tolist()
            finished = [i for i in row.tolist() if completions[i // n][i % n] is None and (last or lengths[i])]
            for i, ids, lps in zip(finished, tokens[finished].tolist(), logprobs[finished].tolist()):
                completions[i // n][i % n] = c = Completion(ids[: lengths[i] or None], lps[: lengths[i] or None], lengths[i] > 0)
                if on_finish:
                    on_finish(i // n, i % n, c)
            live = (ends[row] == 0).view(Q, R)
            left, r = live.any(1).nonzero()[:, 0], int(live.sum(1).max())  # the prompts that go on, and the most rows of one that do
            if last or r == 0:
                break
            if len(left) * r <= COMPACT * Q * R:  # drop finished prompts, and move each prompt's live rows to the front
                order = (~live[left]).int().sort(dim=1, stable=True).indices[:, :r]  # (Q', R')
                cells = (left[:, None] * R + order).flatten()
                row, seeds, newest = row[cells], seeds[cells], newest[cells]
                padding, length, Q, R, play = padding[left], length[left], len(left), r, None
                for i, ((k, v), kv) in enumerate(zip(shared, own)):  # one by one: two caches of all layers would not fit at 7B
                    shared[i] = k[left], v[left]
                    own[i] = kv[:, left[:, None], :, order].permute(2, 0, 3, 1, 4, 5).contiguous()  # (2, Q', Hkv, R', T, D)
        if count % BLOCK == 1:
            play = None
            for i, kv in enumerate(own):
                own[i] = torch.cat((kv, kv.new_zeros(*kv.shape[:4], BLOCK, D)), 4)
        play = step if play is None else capture(step, device) if play is step else play
        play()
    return completions


def dot(q, k):
    """q @ k.mT in fp32, as fused attention kernels have it. Qwen2.5's keys have biases that make scores of hundreds: rounded to bf16 their
    differences are lost, and the sampler is another policy than the one that is trained."""
    if q.dtype == torch.float32 or q.device.type != "cuda":
        return q.float() @ k.float().mT
    return torch.bmm(q.flatten(0, -3), k.flatten(0, -3).mT, out_dtype=torch.float32).view(*q.shape[:-1], k.shape[-2])


def capture(step, device):
    """On CUDA a step as one graph: all of its kernels in one launch."""
    if device.type != "cuda":
        return step
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def row_seeds(prompts, n: int, seed: int, start: int = 0) -> list[int]:
    """A 64-bit seed for each rollout, from the seed, the prompt's ids and the rollout's number."""
    seen, seeds = {}, []
    for prompt in map(tuple, prompts):
        first = seen.get(prompt, start)
        seen[prompt] = first + n
        key = hashlib.blake2b(repr((seed, prompt)).encode()).digest()
        seeds += [int.from_bytes(hashlib.blake2b(b"%d" % i, key=key, digest_size=8).digest(), "big", signed=True) for i in range(first, first + n)]
    return seeds


# ---------------------------------------------------------------------------------------------------------------------------------
# How fast

RANDOM = {  # shapes to time with random weights
    "small": Config(4096, 256, 768, 6, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True),
    "7b": Config(),
}


def timed(job, device) -> float:
    began = time.perf_counter()
    job()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def copy_bandwidth(device) -> float:
    """Bytes read and written per second by the fastest of ten copies: what a decode step, which reads all weights and KV, is measured by."""
    a = torch.ones(2 ** (32 if device.type == "cuda" else 28), dtype=torch.uint8, device=device)
    b = torch.zeros_like(a)
    return 2 * a.numel() / min(timed(lambda: b.copy_(a), device) for _ in range(10))


# What --vs compares with: name -> job(model, prompts, n, max_new_tokens). tests/test_sample.py adds transformers.
OTHERS = {"unshared": lambda model, prompts, n, new: lambda: generate(model, [p for p in prompts for _ in range(n)], 1, new)}


def bench(model: Qwen, s):
    """Time --questions prompts of --prompt random ids, --n rollouts each, all of --max_new_tokens; the last line is one JSON object."""
    device, config, Q, N, new = model.device, model.config, s.questions, s.questions * s.n, s.max_new_tokens
    prompts = torch.randint(config.vocab_size, (Q, s.prompt), generator=torch.Generator().manual_seed(s.seed)).tolist()
    size = torch.finfo(model.lm_head.weight.dtype).bits // 8
    weights = size * (sum(p.numel() for p in model.parameters()) - (0 if config.tie_word_embeddings else model.lm_head.weight.numel()))
    kv = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * size  # bytes a token
    generate(model, prompts, s.n, min(new, 3))  # warm up
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    prefill = timed(lambda: generate(model, prompts, s.n, 1), device)
    total = timed(lambda: generate(model, prompts, s.n, new, seed=s.seed), device)
    step = (total - prefill) / (new - 1)
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated()
    else:
        import resource  # not on Windows
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    result = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads",
        "parameters": sum(p.numel() for p in model.parameters()), "dtype": str(model.lm_head.weight.dtype).removeprefix("torch."),
        "questions": Q, "n": s.n, "prompt": s.prompt, "new": new, "prefill_tokens_per_second": Q * s.prompt / prefill,
        "decode_tokens_per_second": N / step, "ms_per_step": 1000 * step, "peak_gigabytes": peak / 1e9,
        "gigabytes_per_second": (weights + kv * (Q * s.prompt + N * new / 2)) / step / 1e9,  # weights and live KV pass once a step
        "copy_gigabytes_per_second": copy_bandwidth(device) / 1e9, "tokens_per_second": N * new / total}
    result["share_of_copy_bandwidth"] = result["gigabytes_per_second"] / result["copy_gigabytes_per_second"]
    if s.vs:
        took = timed(OTHERS[s.vs](model, prompts, s.n, new), device)
        result |= {"vs": s.vs, "vs_tokens_per_second": N * new / took, "times_as_fast": took / total}
    result = {key: float(f"{x:.4g}") if isinstance(x, float) else x for key, x in result.items()}
    print("\n".join(f"{key:<28}{x:>16}" for key, x in result.items()) + f"\n{json.dumps(result)}")


@dataclass
class Settings:
    checkpoint: str = ""  # a Hugging Face folder with tokenizer.json
    system: str = ""  # the system prompt; "" is Qwen's own
    n: int = 1
    max_new_tokens: int = 512
    temperature: float = 0.7
    top_p: float = 0.8
    top_k: int = 20
    seed: int = 0
    # --bench: time --questions prompts of --prompt tokens
    bench: bool = False
    random: str = ""  # a shape of random weights in place of a checkpoint
    questions: int = 4
    prompt: int = 1000
    vs: str = ""  # unshared: beside the same with a prompt for every rollout; or transformers, by python tests/test_sample.py --bench


def main(argv):
    s = Settings()
    if "--bench" in argv:
        s.n, s.max_new_tokens = 64, 256
    words = configure(s, argv)
    if s.random not in ("", *RANDOM) or s.vs not in ("", *OTHERS):
        raise SystemExit(f"--random is one of {', '.join(RANDOM)}, and --vs {' or '.join(OTHERS)} (transformers: python tests/test_sample.py --bench)")
    if bool(s.checkpoint) == bool(s.random) or s.bench == bool(words) or s.random and not s.bench or min(s.n, s.questions, s.prompt) < 1 or \
            s.max_new_tokens < 1 + s.bench:
        raise SystemExit('usage: python sample.py --checkpoint=DIR "a prompt"   (train.py writes its checkpoint to OUT/checkpoint)\n'
                         '       python sample.py --bench --checkpoint=DIR, or --random=small   (see Settings for its other flags)')
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    try:
        if s.random:
            torch.manual_seed(s.seed)
            torch.set_default_dtype(dtype)
            with torch.device(device):
                model = Qwen(RANDOM[s.random])
            torch.set_default_dtype(torch.float32)
            return bench(model, s)
        model = Qwen.from_pretrained(s.checkpoint, dtype, device)
        if s.bench:
            return bench(model, s)
        tokenizer = Tokenizer.from_pretrained(s.checkpoint)
        system = [{"role": "system", "content": s.system}] if s.system else []
        prompt = tokenizer.chat([*system, {"role": "user", "content": " ".join(words)}])
        [completions] = generate(model, [prompt], s.n, s.max_new_tokens, s.temperature, s.top_p, s.top_k, tokenizer.end_ids, s.seed,
                                 len(tokenizer))
    except (OSError, ValueError) as e:
        raise SystemExit(str(e)) from None
    except KeyboardInterrupt:
        raise SystemExit("interrupted") from None
    for c in completions:
        print(tokenizer.decode(c.tokens) + ("" if c.finished else " …"))


if __name__ == "__main__":
    main(sys.argv[1:])
