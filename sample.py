"""Batched generation with a KV cache: one prefill per prompt, many rollouts.

    python sample.py --checkpoint=Qwen/Qwen2.5-0.5B-Instruct "a prompt"      or a folder

GRPO asks the same prompt n times, so a prompt's keys and values are computed and stored once, and each
rollout stores only its own. The rollouts form a grid of Q prompts × R rows. A step feeds each row's newest
token to the model; its query q sees both parts, [shared prompt | own tokens], under one softmax:

    w = softmax([q · K_prompt | q · K_own] / √D),    y = w_prompt · V_prompt + w_own · V_own

This is `attend_shared`. The appendix has the `Grid`; its `prefill` computes the shared part. Finished rows go
on drawing, in vain, until `compact` drops them. Read workers.py next.
"""
import collections
import contextlib
import hashlib
import math
import signal
import sys
import threading
from dataclasses import dataclass
from functools import partial

import torch

from model import Qwen, Tokenizer, causal, compute_dtype, configure, matmul_fp32

READ_AT_ONCE = 1 << 15  # prompt tokens in one grid, padding included: it bounds the cache
CHECK = 8  # steps from one look for finished rows to the next


@dataclass
class Completion:
    tokens: list[int]  # the end token included when finished
    logprobs: list[float]  # of each token under the sampling distribution (greedy: at temperature 1)
    finished: bool  # False: cut off at max_new_tokens


@torch.inference_mode()
def generate_each(model: Qwen, prompts: list[list[int]], n: int = 1, max_new_tokens: int = 1024,
                  temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0, eos_id: int | list[int] = (),
                  seed: int = 0, n_ids: int | None = None, first: int = 0):
    """n rollouts of each prompt. Prompts are token ids, as Tokenizer.chat makes them. Yields (prompt index,
    rollout index, Completion) as rollouts end.

    eos_id: the token or tokens that end a rollout. n_ids: only ids below it are sampled, as Qwen2.5 pads its
    vocabulary. first: the number of each prompt's first rollout. A draw depends only on the seed, the prompt
    (and which repeat of it) and the rollout's number: two ranks, with first=0 and first=n, draw what one
    would with 2n rollouts."""
    check_sampling(prompts, n, max_new_tokens, temperature, top_p, top_k)
    how = dict(temperature=temperature, top_p=top_p, top_k=top_k, n_ids=n_ids)  # for `draw`
    seeds = row_seeds(prompts, n, seed, first)
    at_once = max(1, READ_AT_ONCE // max(map(len, prompts)))
    for start in range(0, len(prompts), at_once):
        some = prompts[start:start + at_once]
        grid = Grid(model, some, n, max_new_tokens, seeds[start * n:(start + len(some)) * n], how, eos_id)
        grid.prefill(some)  # This draws every rollout's first token.
        for count in range(1, max_new_tokens + 1):  # how many tokens every rollout has
            last = count == max_new_tokens
            if last or count % CHECK == 0:
                for number, completion in grid.harvest(last):
                    yield start + number // n, number % n, completion
            if not grid.going:
                break
            grid.step(count)
        del grid  # before the next one is allocated


def attend_shared(grid, layer_idx, q, k, v):
    """Attention of each row's newest token, own token number t - 1: N = Q*R rows, q (N, H, 1, D), k and v
    (N, Hkv, 1, D), which it stores. It sees its prompt's P places and T own places; grid.mask is -inf where
    these are padding or still empty. G query heads share a key-value head. Returns (N, H, 1, D)."""
    Q, R, P, T, Hkv, D = grid.Q, grid.R, grid.P, grid.T, k.shape[1], grid.D
    prompt_k, prompt_v = grid.prompt_kv[layer_idx]  # each (Q, Hkv, P, D)
    own_kv = grid.own_kv[layer_idx][..., :T, :]  # (2, N, Hkv, T, D)
    own_kv.index_copy_(3, grid.t - 1, torch.stack((k, v)).to(own_kv.dtype))  # into the cache
    own_k, own_v = own_kv.unflatten(1, (Q, R))  # each (Q, R, Hkv, T, D)
    own_q = q.view(Q, R, Hkv, -1, D)  # (Q, R, Hkv, G, D)
    own_scores = matmul_fp32(own_q, own_k.mT)  # (Q, R, Hkv, G, T)
    prompt_q = own_q.transpose(1, 2).flatten(2, 3)  # (Q, Hkv, R*G, D): all rows look at one prompt
    prompt_scores = matmul_fp32(prompt_q, prompt_k.mT).view(Q, Hkv, R, -1, P)  # (Q, Hkv, R, G, P)
    scores = torch.cat((prompt_scores, own_scores.transpose(1, 2).contiguous()), -1)
    mask = grid.mask[:, None, None, None, :P + T]
    scores = torch.add(mask, scores, alpha=D ** -0.5)  # mask + scores / √D: (Q, Hkv, R, G, P + T)
    weights = scores.softmax(-1).to(own_kv.dtype)
    y = matmul_fp32(weights[..., P:].transpose(1, 2), own_v)  # (Q, R, Hkv, G, D)
    prompt_y = matmul_fp32(weights[..., :P].flatten(2, 3), prompt_v)  # (Q, Hkv, R*G, D)
    y = y + prompt_y.view(Q, Hkv, R, -1, D).transpose(1, 2)
    return y.to(k.dtype).view(q.shape)


# -----------------------------------------------------------------------------------------------------------
# Appendix: the grid of rollouts and its KV cache, random numbers, CUDA graphs, the command line

def generate(model, prompts, n=1, max_new_tokens=1024, temperature=1.0, top_p=1.0, top_k=0, eos_id=(),
             seed=0, n_ids=None, on_finish=None, first=0) -> list[list[Completion]]:
    """As `generate_each`, but returns all, as [prompt][rollout], after on_finish(prompt index, rollout index,
    Completion) for each."""
    completions = [[None] * n for _ in prompts]
    for i, j, completion in generate_each(model, prompts, n, max_new_tokens, temperature, top_p, top_k,
                                          eos_id, seed, n_ids, first):
        completions[i][j] = completion
        if on_finish:
            on_finish(i, j, completion)
    return completions


def check_sampling(prompts, n, max_new_tokens, temperature, top_p, top_k):
    if not prompts or not all(prompts) or n < 1 or max_new_tokens < 1:
        raise ValueError("generate needs prompts, none of them empty, n >= 1 and max_new_tokens >= 1")
    if not 0 <= temperature < math.inf or not 0 < top_p <= 1 or top_k < 0:
        raise ValueError("generate needs temperature >= 0, 0 < top_p <= 1 and top_k >= 0, "
                         f"not {temperature}, {top_p}, {top_k}")


BUCKET = {"cuda": 128, "cpu": 32}  # steps from one `compact` to the next; a multiple of CHECK
PREFILL_TOKENS = 8192  # prompt tokens that are computed at once
PAD = {"cuda": 64, "cpu": 1}  # prompts are padded to a multiple of this, which tensor cores like
GRAPH = {"cuda": True, "cpu": False}  # whether a decode step is captured as a CUDA graph


class Grid:
    """The rollouts that are being sampled: Q prompts × R rows, N = Q*R cells, all with t tokens of their own.
    The newest of these, number t - 1, was drawn and not yet fed to the model: `decode` does that.

    Below, P is the padded length of the prompts, T the room for own tokens that a step looks at, Hkv the
    key-value heads, G the query heads on each, D a head's channels, V the ids."""

    def __init__(self, model, prompts, n, max_new_tokens, seeds, how, eos_id):
        config, device = model.config, model.device
        self.model = model
        self.device = device
        self.how = how  # to draw
        self.Q, self.R = len(prompts), n
        self.P = self.padded(max(map(len, prompts)))
        self.steps = 0  # taken since the shapes changed
        self.graph = None  # the captured step
        # What was sampled, a line for each of the Q*n rollouts.
        N = self.Q * n
        self.tokens = torch.zeros(N, max_new_tokens, dtype=torch.long, device=device)
        self.logprobs = torch.zeros(N, max_new_tokens, dtype=torch.float32, device=device)
        self.lengths = torch.zeros(N, dtype=torch.long, device=device)  # 0 while a rollout goes on
        self.going = list(range(N))  # the rollouts that were not harvested
        # The grid, flat. A finished rollout stays in its cell until it is compacted away.
        self.rollouts = torch.arange(N, device=device)  # (N) the number of the one that a cell holds
        self.seeds = torch.tensor(seeds, device=device)  # (N)
        self.newest = torch.zeros_like(self.rollouts)  # (N) each cell's last token
        self.t = torch.zeros(1, dtype=torch.long, device=device)
        self.ends = torch.tensor(eos_id, dtype=torch.long, device=device).view(-1)
        # Keys and values of each layer, allocated once. A CPU attends in fp32, as `causal` does. They begin
        # as zeros, since NaN would stay NaN under a weight of 0.
        room = self.padded(max_new_tokens)
        self.T = min(BUCKET[device.type], room)
        self.D = config.head_dim
        heads = config.num_key_value_heads
        kv = dict(dtype=torch.float32 if device.type == "cpu" else model.lm_head.weight.dtype, device=device)
        layers = range(config.num_hidden_layers)
        self.prompt_kv = [torch.zeros(2, self.Q, heads, self.P, self.D, **kv) for _ in layers]
        self.own_kv = [torch.zeros(2, N, heads, room, self.D, **kv) for _ in layers]
        # What is added to scores: -inf where a prompt is padded, and for own tokens that are yet to come.
        self.prompt_length = torch.tensor([len(p) for p in prompts], device=device)  # (Q)
        self.mask = torch.full((self.Q, self.P + room), -torch.inf, device=device)
        is_prompt = torch.arange(self.P + room, device=device) < self.prompt_length[:, None]
        self.mask.masked_fill_(is_prompt, 0.0)

    def padded(self, length: int) -> int:
        pad = PAD[self.device.type]
        return math.ceil(length / pad) * pad

    def prefill(self, prompts):
        """Compute the prompts, not too many at once, and draw every rollout's first token."""
        at_once = max(1, PREFILL_TOKENS // self.P)
        pieces = range(0, self.Q, at_once)
        logits = [self.prefill_some(begin, prompts[begin:begin + at_once]) for begin in pieces]
        self.draw_next(torch.cat(logits).repeat_interleave(self.R, 0))

    def prefill_some(self, begin, prompts):
        """Keep the keys and values of q prompts, the first of which is number `begin`: logits (q, V)."""
        width = self.padded(max(map(len, prompts)))
        rows = slice(begin, begin + len(prompts))
        last = self.prompt_length[rows, None, None] - 1  # (q, 1, 1)
        # Padding stands on the right, where causal attention never looks.
        ids = [prompt + [0] * (width - len(prompt)) for prompt in prompts]
        ids = torch.tensor(ids, device=self.device)  # (q, width)

        def attend(layer_idx, q, k, v):
            self.prompt_kv[layer_idx][:, rows, :, :width] = torch.stack((k, v))
            return causal(layer_idx, q, k, v)

        def head(hidden):  # (q, width, C) -> (q, V), of the last tokens only
            return self.model.logits(hidden.take_along_dim(last, dim=1)[:, 0])

        return self.model(ids, attend=attend, head=head)

    def step(self, count):
        """Draw every cell's next token, beyond the `count` that it has. On CUDA the first step at new shapes
        runs as it is, which readies the libraries, the second is captured, and then the graph is replayed."""
        if count % BUCKET[self.device.type] == 0:
            compact(self)
        if GRAPH[self.device.type] and self.steps == 1:
            self.graph = capture(self.decode, self.graph)
        if GRAPH[self.device.type] and self.steps > 0:
            self.graph.replay()
        else:
            self.decode()
        self.steps += 1

    def decode(self):
        """Feed every cell's newest token and draw the next. Nothing here waits for the device or moves what
        the next step reads, so a graph can replay it."""
        self.mask.index_fill_(1, self.P + self.t - 1, 0.0)  # the newest token becomes visible
        position = self.prompt_length + self.t - 1  # (Q)
        positions = position[:, None].expand(self.Q, self.R).reshape(-1, 1)  # (N, 1)
        logits = self.model(self.newest[:, None], positions, partial(attend_shared, self))  # (N, 1, V)
        self.draw_next(logits[:, 0])

    def draw_next(self, logits):
        """Draw token number t of every cell from logits (N, V)."""
        token, logprob = draw(logits, uniform(self.seeds, self.t), **self.how)
        self.tokens[self.rollouts, self.t] = token
        self.logprobs[self.rollouts, self.t] = logprob
        length = self.lengths[self.rollouts]
        is_end = (token[:, None] == self.ends).any(-1)
        self.lengths[self.rollouts] = torch.where(is_end & (length == 0), self.t + 1, length)
        self.newest.copy_(token)
        self.t.add_(1)

    def harvest(self, last):
        """Yield number and completion of each rollout that newly ended, or of all that are left if `last`."""
        lengths = self.lengths.tolist()
        ended = [i for i in self.going if last or lengths[i]]
        self.going = [i for i in self.going if not (last or lengths[i])]
        for i, tokens, logprobs in zip(ended, self.tokens[ended].tolist(), self.logprobs[ended].tolist()):
            length = lengths[i] or len(tokens)
            yield i, Completion(tokens[:length], logprobs[:length], finished=lengths[i] > 0)


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
            prompt_kv[:, :len(prompts)] = prompt_kv[:, prompts]
            own_kv[:, :len(cells), :, :grid.T] = own_kv[:, cells, :, :grid.T]
            grid.prompt_kv[i] = prompt_kv[:, :len(prompts)]
            grid.own_kv[i] = own_kv[:, :len(cells)]
        grid.Q, grid.R = len(prompts), R
    grid.T = min(grid.T + BUCKET[grid.device.type], grid.own_kv[0].shape[3])
    grid.steps = 0


def draw(logits, u, temperature=1.0, top_p=1.0, top_k=0, n_ids=None):
    """Sample from logits (N, V) with uniforms u (N): tokens and their log-probabilities, (N) each.

    Only ids below n_ids are drawn. A temperature below 1e-6 is greedy, with log-probabilities at 1. top_k
    keeps the k likeliest tokens; then top_p keeps the fewest of these whose renormalised mass reaches it."""
    logits = logits[:, :n_ids]
    if temperature < 1e-6:
        tokens = logits.argmax(-1)
        return tokens, logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    logp = (logits / temperature).log_softmax(-1)
    if top_k or top_p < 1:
        logp = truncated(logp, top_p, top_k)
    mass = logp.exp().cumsum(-1)
    target = u * mass[:, -1]
    tokens = torch.searchsorted(mass, target[:, None], right=True)  # Even u = 0 draws no token of mass 0.
    return tokens[:, 0], logp.gather(-1, tokens)[:, 0]


def truncated(logp, top_p, top_k):
    """The distributions logp (N, V), in logarithms, cut to their likeliest tokens: see `draw`."""
    ranked, order = logp.sort(-1, descending=True)
    if top_k:
        ranked[:, top_k:].fill_(-torch.inf)
    ranked = ranked.log_softmax(-1)
    p = ranked.exp()
    mass_before = p.cumsum(-1) - p
    ranked.masked_fill_(mass_before >= top_p, -torch.inf)
    return torch.empty_like(logp).scatter_(-1, order, ranked.log_softmax(-1))


def uniform(seeds, step):
    """One number in [0, 1) per row from its seed (int64) and the step (an int64 tensor), by splitmix64."""
    z = seeds + (step + 1) * -0x61C8864680B583EB  # int64 wraps around; the constants are splitmix64's, signed
    z = (z ^ (z >> 30 & (1 << 34) - 1)) * -0x40A7B892E31B1A47
    z = (z ^ (z >> 27 & (1 << 37) - 1)) * -0x6B2FB644ECCEEE15
    return (z >> 41 & (1 << 23) - 1).float() / (1 << 23)


def row_seeds(prompts, n: int, seed: int, first: int) -> list[int]:
    """A 64-bit seed for each rollout, by the seed, the prompt, how often it was listed before, its number."""
    listed = collections.Counter()
    seeds = []
    for prompt in map(tuple, prompts):
        what = (seed, prompt, listed[prompt]) if prompt in listed else (seed, prompt)
        listed[prompt] += 1
        key = hashlib.blake2b(repr(what).encode()).digest()
        for number in range(first, first + n):
            digest = hashlib.blake2b(b"%d" % number, key=key, digest_size=8).digest()
            seeds.append(int.from_bytes(digest, "big", signed=True))
    return seeds


def capture(decode, before):
    """All kernels of decode() as one CUDA graph, in the memory pool of the graph before it, which must still
    exist. Threads that call CUDA meanwhile cannot break it, nor can signals."""
    graph = torch.cuda.CUDAGraph()
    pool = before.pool() if before else None
    with signals_wait(), torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        decode()
    return graph


@contextlib.contextmanager
def signals_wait():
    """Ctrl-C and SIGTERM take effect after this block: an exception amid a capture aborts the process."""
    came, handlers = [], {}
    if threading.current_thread() is threading.main_thread():  # no other thread gets signals
        for number in (signal.SIGINT, signal.SIGTERM):
            handlers[number] = signal.signal(number, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    for number in came:
        signal.raise_signal(number)


@dataclass
class Settings:
    checkpoint: str = ""  # a folder with a Hugging Face checkpoint, or a repository's name
    system: str = ""  # the system prompt; "" is Qwen's own
    n: int = 1
    max_new_tokens: int = 512
    temperature: float = 0.7
    top_p: float = 0.8
    top_k: int = 20
    seed: int = 0
    dtype: str = ""  # bf16 or fp32; "": what the device computes best


def main(argv):
    s = Settings()
    words = configure(s, argv)
    if not s.checkpoint or not words:
        raise SystemExit('usage: python sample.py --checkpoint=FOLDER "a prompt"   (--help: all settings)')
    device = "cuda" if torch.cuda.is_available() else "cpu"
    messages = [{"role": "user", "content": " ".join(words)}]
    if s.system:
        messages.insert(0, {"role": "system", "content": s.system})
    try:
        tokenizer = Tokenizer.from_pretrained(s.checkpoint)
        model = Qwen.from_pretrained(s.checkpoint, compute_dtype(device, s.dtype), device)
        prompt = tokenizer.chat(messages)
        room = model.config.max_position_embeddings - len(prompt)
        if room < 1:
            raise ValueError(f"the prompt has {len(prompt)} tokens, {1 - room} too many for this model")
        [completions] = generate(model, [prompt], s.n, min(s.max_new_tokens, room), s.temperature, s.top_p,
                                 s.top_k, tokenizer.end_ids, s.seed, len(tokenizer))
    except (OSError, ValueError) as e:
        raise SystemExit(str(e)) from None
    except KeyboardInterrupt:
        raise SystemExit("interrupted") from None
    for c in completions:
        print(tokenizer.decode(c.tokens) + ("" if c.finished else " …"))


if __name__ == "__main__":
    main(sys.argv[1:])
