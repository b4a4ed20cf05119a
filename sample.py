"""Batched generation with a KV cache: one prefill per prompt, many rollouts.

    python sample.py --checkpoint=Qwen/Qwen2.5-0.5B-Instruct "a prompt"      or a folder

GRPO asks the same prompt n times, so a prompt's keys and values are computed and stored once, and each
rollout stores only its own. The rollouts form a grid of Q prompts × R rows. A step feeds each row's newest
token to the model; its query q sees both parts, [shared prompt | own tokens], under one softmax:

    w = softmax([q · K_prompt | q · K_own] / √D),    y = w_prompt · V_prompt + w_own · V_own

This is `attend_shared`. Finished rows go on drawing, in vain, until `compact` drops them. Next: workers.py.
"""

import hashlib
import math
import sys
from dataclasses import dataclass
from functools import partial

import torch

from model import Qwen, Tokenizer, causal, compute_dtype, configure, matmul_fp32

CHECK = 8  # steps from one look for finished rows to the next
BUCKET = {"cuda": 128, "cpu": 32}  # steps from one `compact` to the next; a multiple of CHECK
PAD = {"cuda": 64, "cpu": 1}  # lengths are padded to a multiple of this, which tensor cores like
PREFILL_TOKENS = 8192  # prompt tokens that are computed at once


@dataclass
class Completion:
    tokens: list[int]  # the end token included when finished
    logprobs: list[
        float
    ]  # of each token under the sampling distribution (greedy: at temperature 1)
    finished: bool  # False: cut off at max_new_tokens


def generate(
    model: Qwen, prompts: list[list[int]], n: int = 1, *args, **settings
) -> list[list[Completion]]:
    """All that generate_each yields, as [prompt][rollout]."""
    completions = [[None] * n for _ in prompts]
    for i, j, completion in generate_each(model, prompts, n, *args, **settings):
        completions[i][j] = completion
    return completions


@torch.inference_mode()
def generate_each(
    model: Qwen,
    prompts: list[list[int]],
    n: int = 1,
    max_new_tokens: int = 1024,
    temperature: float = 1.0,
    eos_id: int | list[int] = (),
    seed: int = 0,
    n_ids: int | None = None,
    numbers: list[list[int]] | None = None,
):
    """Sample n rollouts of each prompt; yield (prompt index, rollout index, Completion) as each ends.

    prompts: token ids. A temperature below 1e-6 is greedy. eos_id: what ends a rollout. n_ids: only ids below
    it are drawn, as Qwen2.5 pads its vocabulary. numbers: of each prompt's n rollouts, else 0 … n-1. A draw
    depends on the seed, the prompt (and which repeat of it) and the rollout's number, and on nothing else."""
    if (
        not prompts
        or not all(prompts)
        or n < 1
        or max_new_tokens < 1
        or not 0 <= temperature < math.inf
    ):
        raise ValueError(
            "generate needs prompts with tokens, n and max_new_tokens >= 1 and temperature >= 0"
        )
    seeds = torch.tensor(
        row_seeds(prompts, numbers or [range(n)] * len(prompts), seed)
    )  # (len(prompts), n)
    rest = (max_new_tokens, partial(draw, temperature=temperature, n_ids=n_ids), eos_id)
    Q, R = grid_shape(model, max(map(len, prompts)), max_new_tokens, n)
    for i in range(0, len(prompts), Q):
        for j in range(0, n, R):  # A grid is gone before the next is made, as its cache is large.
            for q, r, completion in Grid(
                model, prompts[i : i + Q], seeds[i : i + Q, j : j + R], *rest
            ).run():
                yield i + q, j + r, completion


def grid_shape(model, longest: int, max_new_tokens: int, n: int) -> tuple[int, int]:
    """How many prompts and how many of their n rollouts one grid holds. Its keys and values take at most a
    fifth of a GPU's memory, for which a 7B leaves room on 24 GB, or some 2 GiB of a CPU's."""
    device = model.device
    limit = (
        torch.cuda.get_device_properties(device).total_memory // 5
        if device.type == "cuda"
        else 2 << 30
    )
    channels = model.config.num_key_value_heads * model.config.head_dim
    token = 2 * len(model.model.layers) * channels * model.lm_head.weight.itemsize  # bytes
    prompt, row = (token * padded(length, device) for length in (longest, max_new_tokens))
    R = math.ceil(n / math.ceil(n / max(1, (limit - prompt) // row)))  # equal shares of n
    return max(1, limit // (prompt + R * row)), R


def padded(length: int, device) -> int:
    return math.ceil(length / PAD[device.type]) * PAD[device.type]


def attend_shared(grid, layer_idx, q, k, v):
    """Attention of each row's newest token, own token number t - 1: N = Q*R rows, q (N, H, 1, D), k and v
    (N, Hkv, 1, D), which it stores. It sees its prompt's P places and T own places; grid.mask is -inf where
    these are padding or still empty. G query heads share a key-value head. Returns (N, H, 1, D)."""
    Q, R, P, T, Hkv, D = grid.Q, grid.R, grid.P, grid.T, k.shape[1], k.shape[3]
    prompt_k, prompt_v = grid.prompt_kv[layer_idx]  # each (Q, Hkv, P, D)
    own_kv = grid.own_kv[layer_idx][..., :T, :]  # (2, N, Hkv, T, D)
    own_kv.index_copy_(3, grid.t - 1, torch.stack((k, v)).to(own_kv.dtype))  # into the cache
    own_k, own_v = own_kv.unflatten(1, (Q, R))  # each (Q, R, Hkv, T, D)
    own_q = q.view(Q, R, Hkv, -1, D)  # (Q, R, Hkv, G, D)
    own_scores = matmul_fp32(own_q, own_k.mT)  # (Q, R, Hkv, G, T)
    prompt_q = own_q.transpose(1, 2).flatten(2, 3)  # (Q, Hkv, R*G, D): all rows look at one prompt
    prompt_scores = matmul_fp32(prompt_q, prompt_k.mT).view(Q, Hkv, R, -1, P)  # (Q, Hkv, R, G, P)
    scores = torch.cat((prompt_scores, own_scores.transpose(1, 2).contiguous()), -1)
    mask = grid.mask[:, None, None, None, : P + T]
    scores = torch.add(mask, scores, alpha=D**-0.5)  # mask + scores / √D: (Q, Hkv, R, G, P + T)
    weights = scores.softmax(-1).to(own_kv.dtype)
    y = matmul_fp32(weights[..., P:].transpose(1, 2), own_v)  # (Q, R, Hkv, G, D)
    prompt_y = matmul_fp32(weights[..., :P].flatten(2, 3), prompt_v)  # (Q, Hkv, R*G, D)
    y = y + prompt_y.view(Q, Hkv, R, -1, D).transpose(1, 2)
    return y.to(k.dtype).view(q.shape)


# ---- The grid -------------------------------------------------------------------------------------------
class Grid:
    """The rollouts that are being sampled: Q prompts × R rows, N = Q*R cells, all with t tokens of their own.
    The newest of these, number t - 1, was drawn and not yet fed to the model: `decode` does that. P is the
    padded length of the prompts, T the room for own tokens that a step looks at, V the number of ids."""

    def __init__(self, model, prompts, seeds, max_new_tokens, draw_from, eos_id):
        self.model = model
        self.prompts = prompts
        self.draw_from = (
            draw_from  # logits (N, V), uniforms (N) -> tokens and log-probabilities (N)
        )
        self.device = model.device
        self.Q, self.R = self.shape = seeds.shape  # `compact` makes Q and R smaller
        self.P = padded(max(map(len, prompts)), self.device)
        room = padded(max_new_tokens, self.device)
        self.T = min(BUCKET[self.device.type], room)
        self.steps = 0  # taken since the shapes changed
        self.graph = None  # the captured step
        N = seeds.numel()
        self.going = list(range(N))  # the rollouts that were not harvested
        with self.device:
            self.tokens = torch.zeros(N, max_new_tokens, dtype=torch.long)  # of each rollout
            self.logprobs = torch.zeros(N, max_new_tokens, dtype=torch.float32)
            self.lengths = torch.zeros(N, dtype=torch.long)  # 0 while a rollout goes on
            self.ends = torch.tensor(eos_id, dtype=torch.long).view(-1)
            self.t = torch.zeros(1, dtype=torch.long)
            # The cells. A finished rollout stays in its cell until it is compacted away.
            self.rollouts = torch.arange(N)  # the number of the one that a cell holds
            self.seeds = seeds.flatten().to(self.device)
            self.newest = torch.zeros(N, dtype=torch.long)  # each cell's last token
            # What is added to scores: -inf where a prompt is padded, and for own tokens that are yet to come.
            self.prompt_length = torch.tensor([len(prompt) for prompt in prompts])  # (Q)
            is_prompt = torch.arange(self.P + room) < self.prompt_length[:, None]
            self.mask = torch.where(is_prompt, 0.0, -torch.inf)  # (Q, P + room)
        self.prompt_kv = cache(model, self.Q, self.P)
        self.own_kv = cache(model, N, room)

    def run(self):
        """Yield (row, column, Completion) of each rollout as it ends."""
        self.prefill()  # draws every rollout's first token
        most = self.tokens.shape[1]
        for count in range(1, most + 1):  # how many tokens every rollout has
            if count % CHECK == 0 or count == most:
                yield from self.harvest(count, last=count == most)
            if not self.going:
                return
            if count % BUCKET[self.device.type] == 0:
                compact(self)
            self.step()

    def prefill(self):
        """Keep the prompts' keys and values, not too many at once, and draw every rollout's first token."""
        logits = []
        at_once = max(1, PREFILL_TOKENS // self.P)
        for begin in range(0, self.Q, at_once):
            rows = slice(begin, begin + at_once)
            prompts = self.prompts[rows]
            width = padded(max(map(len, prompts)), self.device)
            ids = [
                p + [0] * (width - len(p)) for p in prompts
            ]  # Causal attention never looks to the right.
            last = self.prompt_length[rows, None, None] - 1  # (q, 1, 1)

            def attend(layer_idx, q, k, v):
                self.prompt_kv[layer_idx][:, rows, :, :width] = torch.stack((k, v))
                return causal(layer_idx, q, k, v)

            def head(hidden):  # (q, width, C) -> (q, V), of the last tokens only
                return self.model.logits(hidden.take_along_dim(last, dim=1)[:, 0])

            logits.append(
                self.model(torch.tensor(ids, device=self.device), attend=attend, head=head)
            )
        self.draw_next(torch.cat(logits).repeat_interleave(self.R, 0))

    def step(self):
        """Draw every cell's next token. On CUDA the first step at new shapes runs as it is, which readies the
        libraries, the second is captured as a graph, which is replayed from then on."""
        if self.device.type == "cpu" or self.steps == 0:
            self.decode()
        else:
            if self.steps == 1:
                # The graph before goes with this, and clears the capture stream's cuBLAS workspace (pytorch
                # issue 193402). It lies in their common pool, which nobody else uses while there is one grid.
                graph, pool = torch.cuda.CUDAGraph(), self.graph.pool() if self.graph else None
                with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                    self.decode()
                self.graph = graph
            self.graph.replay()
        self.steps += 1

    def decode(self):
        """Feed every cell's newest token and draw the next, in place and without waiting, as a graph must."""
        self.mask.index_fill_(1, self.P + self.t - 1, 0.0)  # the newest token becomes visible
        positions = (self.prompt_length + self.t - 1).repeat_interleave(self.R)[:, None]  # (N, 1)
        logits = self.model(
            self.newest[:, None], positions, partial(attend_shared, self)
        )  # (N, 1, V)
        self.draw_next(logits[:, 0])

    def draw_next(self, logits):
        """Draw token number t of every cell from logits (N, V)."""
        token, logprob = self.draw_from(logits, uniform(self.seeds, self.t))
        self.tokens[self.rollouts, self.t] = token
        self.logprobs[self.rollouts, self.t] = logprob
        length = self.lengths[self.rollouts]
        is_end = (token[:, None] == self.ends).any(-1)
        self.lengths[self.rollouts] = torch.where(is_end & (length == 0), self.t + 1, length)
        self.newest.copy_(token)
        self.t.add_(1)

    def harvest(self, count: int, last: bool):
        """Yield (row, column, Completion) of what newly ended, or of all that is left if `last`."""
        lengths = self.lengths.tolist()
        ended = [i for i in self.going if last or lengths[i]]
        self.going = [i for i in self.going if not (last or lengths[i])]
        drawn = zip(
            ended, self.tokens[:, :count][ended].tolist(), self.logprobs[:, :count][ended].tolist()
        )
        for i, tokens, logprobs in drawn:
            length = lengths[i] or count
            yield (
                *divmod(i, self.shape[1]),
                Completion(tokens[:length], logprobs[:length], lengths[i] > 0),
            )


def cache(model, rows: int, length: int) -> list:
    """Room for each layer's keys and values. Zeros, as NaN would stay NaN under a weight of 0."""
    dtype = (
        torch.float32 if model.device.type == "cpu" else model.lm_head.weight.dtype
    )  # as `causal` attends
    shape = (2, rows, model.config.num_key_value_heads, length, model.config.head_dim)
    return [torch.zeros(shape, dtype=dtype, device=model.device) for _ in model.model.layers]


def compact(grid: Grid):
    """Drop prompts whose rollouts have all finished, keep of the others as many rows as the one with most
    live rows needs, and let the next steps see BUCKET more own tokens. New shapes need a new CUDA graph."""
    live = (grid.lengths[grid.rollouts] == 0).view(grid.Q, grid.R)
    prompts = live.any(1).nonzero()[:, 0]  # (Q') those that go on
    R = int(live.sum(1).max())  # the most live rows of a prompt
    order = live[prompts].int().sort(dim=1, descending=True, stable=True).indices[:, :R]  # (Q', R)
    cells = (prompts[:, None] * grid.R + order).flatten()  # (N')
    if len(cells) < len(grid.rollouts):
        grid.rollouts = grid.rollouts[cells]
        grid.seeds = grid.seeds[cells]
        grid.newest = grid.newest[cells]
        grid.prompt_length = grid.prompt_length[prompts]
        grid.mask = grid.mask[prompts]
        for i, (prompt_kv, own_kv) in enumerate(zip(grid.prompt_kv, grid.own_kv)):
            prompt_kv[:, : len(prompts)] = prompt_kv[:, prompts]
            own_kv[:, : len(cells), :, : grid.T] = own_kv[:, cells, :, : grid.T]
            grid.prompt_kv[i] = prompt_kv[:, : len(prompts)]
            grid.own_kv[i] = own_kv[:, : len(cells)]
        grid.Q, grid.R = len(prompts), R
    grid.T = min(grid.T + BUCKET[grid.device.type], grid.own_kv[0].shape[3])
    grid.steps = 0


# ---- Draws ----------------------------------------------------------------------------------------------
def draw(logits, u, temperature=1.0, n_ids=None):
    """Sample from logits (N, V) with uniforms u (N): tokens and their log-probabilities, (N) each. Only ids
    below n_ids are drawn. A temperature below 1e-6 is greedy, with log-probabilities at 1."""
    greedy = temperature < 1e-6
    logits = logits[:, :n_ids]
    logp = (logits if greedy or temperature == 1 else logits / temperature).log_softmax(1)
    mass = logp.exp().cumsum(-1)
    target = u[:, None] * mass[:, -1:]  # (N, 1); even u = 0 draws no token of mass 0
    tokens = (
        logits.argmax(-1, True) if greedy else torch.searchsorted(mass, target, right=True)
    )  # (N, 1)
    return tokens[:, 0], logp.gather(-1, tokens)[:, 0]


def uniform(seeds, step):
    """One number in [0, 1) per row from its seed (int64) and the step (an int64 tensor), by splitmix64."""
    z = (
        seeds + (step + 1) * -0x61C8864680B583EB
    )  # int64 wraps around; the constants are splitmix64's, signed
    z = (z ^ (z >> 30 & (1 << 34) - 1)) * -0x40A7B892E31B1A47
    z = (z ^ (z >> 27 & (1 << 37) - 1)) * -0x6B2FB644ECCEEE15
    return (z >> 41 & (1 << 23) - 1).float() / (1 << 23)


def row_seeds(prompts, numbers, seed: int) -> list[list[int]]:
    """A 64-bit seed for each rollout, by the seed, the prompt, how often it was listed before, its number."""
    seeds = []
    for i, prompt in enumerate(prompts):
        repeats = prompts[:i].count(prompt)
        what = (seed, tuple(prompt), repeats) if repeats else (seed, tuple(prompt))
        key = hashlib.blake2b(repr(what).encode()).digest()
        digests = [
            hashlib.blake2b(b"%d" % number, key=key, digest_size=8).digest()
            for number in numbers[i]
        ]
        seeds.append([int.from_bytes(digest, "big", signed=True) for digest in digests])
    return seeds


# ---- The command line -----------------------------------------------------------------------------------
@dataclass
class Settings:
    checkpoint: str = ""  # a folder in Hugging Face's layout, or a repository's name
    n: int = 1  # answers
    max_new_tokens: int = 512
    temperature: float = 0.7
    seed: int = 0


if __name__ == "__main__":
    settings = Settings()
    words = configure(settings, sys.argv[1:])
    if not settings.checkpoint or not words:
        raise SystemExit(
            'usage: python sample.py --checkpoint=FOLDER "a prompt"   (--help: all settings)'
        )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        tokenizer = Tokenizer.from_pretrained(settings.checkpoint)
        model = Qwen.from_pretrained(settings.checkpoint, compute_dtype(device), device)
        prompt = tokenizer.chat([{"role": "user", "content": " ".join(words)}])
        [completions] = generate(
            model,
            [prompt],
            settings.n,
            settings.max_new_tokens,
            settings.temperature,
            tokenizer.end_ids,
            settings.seed,
            len(tokenizer),
        )
    except (OSError, ValueError) as e:
        raise SystemExit(str(e)) from None
    for c in completions:
        print(tokenizer.decode(c.tokens) + ("" if c.finished else " …"))
