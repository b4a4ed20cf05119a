"""Batched generation with a KV cache: one prefill per prompt, many rollouts.

    python sample.py --checkpoint=DIR "a prompt"        chat with a checkpoint

GRPO asks the same prompt n times, so the prompt's keys and values are computed and stored once, and each rollout stores only its
own. A decode step attends to [shared prompt | own tokens] under one softmax. Rollouts live in a grid of Q prompts × R rows; all have
the same age, so no mask over own tokens is needed, and rows that finished are compacted away. Read workers.py next.
"""
import hashlib
import sys
from dataclasses import dataclass

import torch

from model import Qwen, Tokenizer, configure

BLOCK = 64  # own tokens by which the KV cache grows
CHECK = 8  # decode steps between looks at who has finished


@dataclass
class Completion:
    tokens: list[int]  # the end token included when finished
    logprobs: list[float]  # of each token, under the distribution it was drawn from
    finished: bool  # False: cut off at max_new_tokens


def uniform(seeds, step: int):
    """One number in [0, 1) per row from its seed (int64) and the step: splitmix64. A rollout's luck is its own, whatever shares its batch."""
    z = seeds + torch.full_like(seeds, step + 1) * -0x61C8864680B583EB  # int64 wraps around, so splitmix64's constants stand here as signed
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
            ranked[:, top_k:] = -torch.inf
        ranked = ranked.log_softmax(-1)
        ranked[ranked.exp().cumsum(-1) - ranked.exp() >= top_p] = -torch.inf  # the mass before a token already reaches top_p
        logp = torch.empty_like(logp).scatter_(-1, order, ranked.log_softmax(-1))
    mass = logp.exp().cumsum(-1)
    tokens = torch.searchsorted(mass, (u * mass[:, -1])[:, None], right=True)  # (N, 1); right: never a token of probability 0
    return tokens[:, 0], logp.gather(-1, tokens)[:, 0]


@torch.inference_mode()
def generate(model: Qwen, prompts: list[list[int]], n: int = 1, max_new_tokens: int = 1024, temperature: float = 1.0,
             top_p: float = 1.0, top_k: int = 0, eos_id: int | list[int] = (), seed: int = 0, n_ids: int | None = None,
             on_finish=None) -> list[list[Completion]]:
    """n rollouts of each prompt, as [prompt][rollout].

    eos_id: the token or tokens that end a rollout. n_ids: only ids below it are sampled (Qwen2.5 pads its vocabulary beyond the
    tokenizer's). The same seed and prompt give the same rollouts in any batch; a prompt listed twice continues with fresh ones.
    on_finish(prompt index, rollout index, Completion) is called as rollouts finish."""
    if not prompts or not all(prompts) or n < 1 or max_new_tokens < 1:
        raise ValueError("generate needs at least one prompt, no empty prompt, n >= 1 and max_new_tokens >= 1")
    if temperature < 0 or not 0 < top_p <= 1 or top_k < 0:
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
        shared.append((k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    logits = model(ids, attend=prefill, head=lambda h: model.logits(h[torch.arange(Q, device=device), length - 1]))  # (Q, V)
    logits = logits.repeat_interleave(R, 0)  # (Q*R, V)
    padding = torch.where(torch.arange(P, device=device) < length[:, None], 0.0, -torch.inf)[:, None, None, None]  # (Q, 1, 1, 1, P)

    # The grid. row[q, r] says which rollout (an index into the outputs) the cell holds; a finished one stays until it is compacted away.
    row, seeds = torch.arange(Q * R, device=device).view(Q, R), torch.tensor(row_seeds(prompts, n, seed), device=device).view(Q, R)
    done = torch.zeros(Q, R, dtype=torch.bool, device=device)
    own = [torch.empty(2, Q, Hkv, R, 0, D, device=device, dtype=k.dtype) for k, _ in shared]  # per layer: keys and values of own tokens
    tokens = torch.zeros(Q * R, max_new_tokens, dtype=torch.long, device=device)
    logprobs = torch.zeros(Q * R, max_new_tokens, device=device)
    ends = torch.zeros(Q * R, dtype=torch.long, device=device)  # a rollout's length, 0 while it goes on
    completions = [[None] * n for _ in prompts]

    def decode(layer, q, k, v):  # q (Q*R, H, 1, D), k and v (Q*R, Hkv, 1, D), at own position t
        (kp, vp), kv = shared[layer], own[layer]
        Q, R = row.shape
        kv[0, :, :, :, t] = k.view(Q, R, Hkv, D).transpose(1, 2)
        kv[1, :, :, :, t] = v.view(Q, R, Hkv, D).transpose(1, 2)
        ko, vo = kv[..., : t + 1, :]  # (Q, Hkv, R, t+1, D)
        q = q.view(Q, R, Hkv, G, D).transpose(1, 2) * scale  # (Q, Hkv, R, G, D)
        on_prompt = (q.reshape(Q, Hkv, R * G, D) @ kp.mT).view(Q, Hkv, R, G, P) + padding  # all rows of a prompt against its one KV
        on_own = q @ ko.mT  # (Q, Hkv, R, G, t+1)
        weight = torch.cat((on_prompt, on_own), -1).softmax(-1, dtype=torch.float32).to(q.dtype)
        y = (weight[..., :P].reshape(Q, Hkv, R * G, P) @ vp).view(Q, Hkv, R, G, D) + weight[..., P:] @ vo
        return y.transpose(1, 2).reshape(Q * R, Hkv * G, 1, D)

    for t in range(max_new_tokens):
        token, logprob = draw(logits[:, :n_ids], uniform(seeds.flatten(), t), temperature, top_p, top_k)
        tokens[row.flatten(), t], logprobs[row.flatten(), t] = token, logprob
        ended = torch.isin(token, eos).view(row.shape) & ~done
        ends[row[ended]] = t + 1
        done |= ended
        last = t + 1 == max_new_tokens
        if last or t % CHECK == CHECK - 1:
            finished = [i for i in row.flatten().tolist() if completions[i // n][i % n] is None and (last or ends[i] > 0)]
            if finished:
                pick = torch.tensor(finished, device=device)
                for i, ids, lps, end in zip(finished, tokens[pick].tolist(), logprobs[pick].tolist(), ends[pick].tolist()):
                    completions[i // n][i % n] = c = Completion(ids[: end or None], lps[: end or None], end > 0)
                    if on_finish:
                        on_finish(i // n, i % n, c)
            alive = (~done).sum(1)  # (Q)
            q, r = (alive > 0).nonzero()[:, 0], int(alive.max())
            if last or r == 0:
                break
            if len(q) * r <= 0.9 * row.numel():  # compact: drop finished prompts, and move each prompt's live rows to the front
                order = done[q].int().sort(dim=1, stable=True).indices[:, :r]  # (Q', R')
                row, seeds, done = (x[q].gather(1, order) for x in (row, seeds, done))
                token = token.view(Q, R)[q].gather(1, order).flatten()
                own = [kv[:, q[:, None], :, order].permute(2, 0, 3, 1, 4, 5).contiguous() for kv in own]  # (2, Q', Hkv, R', T, D)
                shared, padding, length = [(k[q], v[q]) for k, v in shared], padding[q], length[q]
                Q, R = row.shape
        if t % BLOCK == 0:
            own = [torch.cat((kv, kv.new_empty(*kv.shape[:4], BLOCK, D)), 4) for kv in own]
        positions = (length + t)[:, None].expand(Q, R).reshape(-1, 1)  # (Q*R, 1)
        logits = model(token[:, None], positions, decode)[:, 0]  # (Q*R, V)
    return completions


def row_seeds(prompts, n: int, seed: int) -> list[int]:
    """A 64-bit seed for each rollout, from the seed, the prompt's ids and the rollout's number."""
    seen, seeds = {}, []
    for prompt in map(tuple, prompts):
        first = seen.get(prompt, 0)
        seen[prompt] = first + n
        key = hashlib.blake2b(repr((seed, prompt)).encode()).digest()
        seeds += [int.from_bytes(hashlib.blake2b(b"%d" % i, key=key, digest_size=8).digest(), "big", signed=True) for i in range(first, first + n)]
    return seeds


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


def main(argv):
    settings = Settings()
    words = configure(settings, argv)
    if not settings.checkpoint or not words:
        raise SystemExit('usage: python sample.py --checkpoint=DIR "a prompt"   (train.py writes its checkpoint to OUT/checkpoint)')
    try:
        tokenizer = Tokenizer.from_pretrained(settings.checkpoint)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        model = Qwen.from_pretrained(settings.checkpoint, torch.bfloat16 if device == "cuda" else torch.float32, device)
    except (FileNotFoundError, ValueError) as e:
        raise SystemExit(str(e)) from None
    system = [{"role": "system", "content": settings.system}] if settings.system else []
    prompt = tokenizer.chat([*system, {"role": "user", "content": " ".join(words)}])
    [completions] = generate(model, [prompt], settings.n, settings.max_new_tokens, settings.temperature, settings.top_p, settings.top_k,
                             tokenizer.eos_id, settings.seed, len(tokenizer))
    for c in completions:
        print(tokenizer.decode(c.tokens) + ("" if c.finished else " …"))


if __name__ == "__main__":
    main(sys.argv[1:])
