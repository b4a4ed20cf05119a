"""Batched generation with a KV cache whose prompt part is shared by all rollouts of a prompt.

    python sample.py --checkpoint=MODEL "a prompt"

MODEL is a folder in Hugging Face's layout, or the name of a model on its hub, such as
Qwen/Qwen2.5-0.5B-Instruct.

GRPO samples n rollouts of every prompt. The rollouts form a grid of cells, R for each of Q prompts;
if memory is short, several grids are sampled one after another. A grid computes and stores the keys
and values of each prompt once; each cell stores only those of its own tokens. A step feeds the
newest token of every cell to the model. The token's query q attends to the prompt and to the cell's
own tokens under one softmax:

    w = softmax([q · K_prompt | q · K_own] / √D),    y = w_prompt · V_prompt + w_own · V_own

`attend_shared` computes this. The cell of a finished rollout keeps drawing tokens, which are
ignored, until `compact` drops the cell. Read workers.py next.
"""

import hashlib
import math
import sys
from collections import Counter
from dataclasses import dataclass
from functools import partial

import torch

try:  # comes with torch's CUDA builds
    import triton
    import triton.language as tl
except ImportError:
    triton = None

from model import Config, Qwen, Tokenizer, causal, check_ids, configure, dtype_for, flag

CHECK = 8  # steps between checks for finished rollouts
BUCKET = {"cuda": 128, "cpu": 32}  # steps between calls of `compact`; a multiple of CHECK
PAD = {"cuda": 64, "cpu": 1}  # lengths are padded to a multiple of this, for tensor cores
PREFILL_TOKENS = 8192  # max tokens in a forward pass of prompts, unless one prompt has more


@dataclass
class Completion:
    """One rollout: its token ids and the log-probability with which each was drawn.

    The log-probabilities of a greedy rollout are those at temperature 1.
    """

    tokens: list[int]  # including the end token, if finished
    logprobs: list[float]
    finished: bool  # False: cut off at max_new_tokens


def generate(
    model: Qwen, prompts: list[list[int]], n: int = 1, *args, **settings
) -> list[list[Completion]]:
    """Return n rollouts of each prompt, as [prompt][rollout].

    The arguments are those of generate_each.
    """
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
    """Yield (prompt index, rollout index, Completion) for n rollouts of each prompt, as they end.

    The random draws of a rollout depend on the seed, its prompt, its number (see `numbers`), and
    how many times the same prompt occurs earlier in the list. They do not depend on the other
    prompts or on n.

    Args:
        prompts: The token ids of each prompt.
        temperature: If it is below 1e-6, the likeliest token is always taken.
        eos_id: The id or ids that end a rollout.
        n_ids: Only ids below n_ids are drawn. This matters if the vocabulary is padded with unused
            ids, as Qwen2.5's is. None: any id may be drawn.
        numbers: For each prompt, the numbers of its n rollouts, which select their random draws.
            None: 0 … n-1. Ranks that share a prompt, each passing some of its numbers, together
            sample the same rollouts as one rank with all of them.

    Raises ValueError if there are no prompts, if a prompt is empty or longer than the model's
    context, if n, max_new_tokens or temperature is out of range, or if the logits of a prompt are
    not finite.
    """
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
    longest = max(map(len, prompts))
    if longest > model.config.max_position_embeddings:
        raise ValueError(
            f"a prompt of {longest} tokens does not fit into the model's context of "
            f"{model.config.max_position_embeddings} (max_position_embeddings)"
        )
    numbers = numbers or [range(n)] * len(prompts)
    seeds = torch.tensor(rollout_seeds(prompts, numbers, seed))  # (len(prompts), n)
    draw_from = partial(draw, temperature=temperature, n_ids=n_ids)

    # No variable refers to a grid, so its large cache is freed before the next grid is made.
    Q, R = grid_shape(model, longest, max_new_tokens, n)
    for i in range(0, len(prompts), Q):
        for j in range(0, n, R):
            some = (prompts[i : i + Q], seeds[i : i + Q, j : j + R])
            for q, r, completion in Grid(model, *some, max_new_tokens, draw_from, eos_id).run():
                yield i + q, j + r, completion


def grid_shape(model, longest: int, max_new_tokens: int, n: int) -> tuple[int, int]:
    """Return (Q, R): how many prompts a grid holds, and how many of each prompt's n rollouts.

    Unless a single rollout needs more, a grid's keys and values, its logits, and what `draw`
    computes from the logits take at most about a fifth of the GPU's memory: on a 24 GB card, this
    leaves room for a 7B model in bf16. On a CPU, the limit is about 2 GiB.
    """
    device = model.device
    limit = 2 << 30  # bytes
    if device.type == "cuda":
        limit = torch.cuda.get_device_properties(device).total_memory // 5

    channels = model.config.num_key_value_heads * model.config.head_dim
    # The bytes that a token, a prompt and a cell take. Besides its tokens, a cell has fp32 logits,
    # and on a GPU, `draw` makes up to three more tensors of their size.
    token = 2 * len(model.model.layers) * channels * cache_dtype(model).itemsize
    prompt = token * padded(longest, device)
    cell = token * padded(max_new_tokens, device) + 16 * model.config.vocab_size

    cells_that_fit = max(1, (limit - prompt) // cell)
    n_grids = math.ceil(n / cells_that_fit)
    R = math.ceil(n / n_grids)  # split n evenly over the grids
    Q = max(1, limit // (prompt + R * cell))
    return Q, R


def padded(length: int, device) -> int:
    """Return the length rounded up to a multiple of PAD."""
    return math.ceil(length / PAD[device.type]) * PAD[device.type]


# ---- Attention -----------------------------------------------------------------------------------


def attend_shared(grid, place, layer_idx, q, k, v):
    """Cache the newest key and value of each cell, and return the newest query's attention.

    q and the result are (N, H, 1, D), k and v are (N, Hkv, 1, D), for N = Q*R cells that all have t
    own tokens. `place`, a tensor of shape (1), holds t - 1, the newest token's place in the cache
    of each cell's own tokens.
    """
    prompt_kv = grid.prompt_kv[layer_idx]  # (2, Q, Hkv, P, D)
    own_kv = grid.own_kv[layer_idx][..., : grid.T, :]  # (2, N, Hkv, T, D)
    own_kv.index_copy_(3, place, torch.stack((k, v)).to(own_kv.dtype))
    attend = attend_in_kernels if triton and q.is_cuda else attend_plainly
    return attend(q, prompt_kv, grid.prompt_length, own_kv, grid.t)


def attend_plainly(q, prompt_kv, prompt_length, own_kv, t):
    """Compute in fp32 the attention of each query to its prompt and to its cell's own tokens.

    Args:
        q: (N, H, 1, D), the newest token's query in each of N = Q*R cells. Each group of G = H/Hkv
            heads shares keys and values.
        prompt_kv: Keys and values of the prompts, (2, Q, Hkv, P, D).
        prompt_length: (Q), the number of tokens in each prompt, without padding.
        own_kv: Keys and values of the cells' own tokens, (2, N, Hkv, T, D).
        t: (1), the number of own tokens in every cell.

    Returns:
        (N, H, 1, D) in the dtype of q.
    """
    _, Q, Hkv, P, D = prompt_kv.shape
    R = q.shape[0] // Q
    prompt_k, prompt_v = prompt_kv.float()  # each (Q, Hkv, P, D)
    own_k, own_v = own_kv.float().unflatten(1, (Q, R))  # each (Q, R, Hkv, T, D)

    # Compute the scores. The R*G queries that share one prompt and key head form one matrix.
    own_q = q.float().view(Q, R, Hkv, -1, D)  # (Q, R, Hkv, G, D)
    own_scores = own_q @ own_k.mT  # (Q, R, Hkv, G, T)
    prompt_q = own_q.transpose(1, 2).flatten(2, 3)  # (Q, Hkv, R*G, D)
    prompt_scores = (prompt_q @ prompt_k.mT).view(Q, Hkv, R, -1, P)  # (Q, Hkv, R, G, P)

    # Take one softmax over the prompt and the cell's own tokens.
    scores = torch.cat((prompt_scores, own_scores.transpose(1, 2).contiguous()), -1)
    place = torch.arange(scores.shape[-1], device=q.device)
    is_filled = (place < prompt_length[:, None]) | ((place >= P) & (place < P + t))  # (Q, P + T)
    mask = torch.where(is_filled, 0.0, -torch.inf)[:, None, None, None]
    scores = torch.add(mask, scores, alpha=D**-0.5)  # mask + scores / √D: (Q, Hkv, R, G, P + T)
    weights = scores.softmax(-1)

    # Average the values with these weights.
    own_y = weights[..., P:].transpose(1, 2) @ own_v  # (Q, R, Hkv, G, D)
    prompt_y = weights[..., :P].flatten(2, 3) @ prompt_v  # (Q, Hkv, R*G, D)
    y = own_y + prompt_y.view(Q, Hkv, R, -1, D).transpose(1, 2)
    return y.to(q.dtype).view(q.shape)


def attend_in_kernels(q, prompt_kv, prompt_length, own_kv, t):
    """Compute attend_plainly's result by launching `attend_to_part` twice.

    Unlike attend_plainly, the kernel never writes the scores to memory, and it rounds the softmax's
    weights to the dtype of the values. The first launch attends to the prompts, and shares each
    loaded key among up to 64 queries of a prompt's cells. The second launch attends to each cell's
    own tokens, and continues the first launch's softmax.

    The arguments are those of attend_plainly.
    """
    N, H, _, D = q.shape
    Q, Hkv = prompt_kv.shape[1:3]
    G = H // Hkv
    q = q.contiguous()
    y = torch.empty_like(q)
    prompt_y = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    prompt_lse = torch.empty(N, H, dtype=torch.float32, device=q.device)

    # With up to 128 channels, a tile of keys takes at most 16 KB in bf16 and 8 KB in fp32, so that
    # the kernel fits into shared memory. In bf16 it needs 88 KB (112 KB on Hopper); GPUs that
    # compute in bf16 have at least 99 KB (Hopper 227 KB). In fp32 it needs 44 KB of a T4's 64 KB.
    D_PADDED = max(16, triton.next_power_of_2(D))
    tile = 8192 if q.element_size() == 2 else 2048  # elements per tile

    # Each part is (number of rows in its cache, cache, filled places in each row, IS_FIRST). A row
    # of a cache belongs to one prompt or to one cell.
    parts = ((Q, prompt_kv, prompt_length, True), (N, own_kv, t.expand(N), False))
    for B, kv, length, is_first in parts:
        n_queries = N // B * G  # queries that share keys and values
        QUERIES = 16 if n_queries <= 16 else 64
        blocks = (B * Hkv, triton.cdiv(n_queries, QUERIES))
        attend_to_part[blocks](
            *(q, kv[0], kv[1], length, y, prompt_y, prompt_lse),
            cells_per_row=N // B,
            length_step=length.stride(0),
            kv_row=kv.stride(1),
            kv_head=kv.stride(2),
            scale=D**-0.5,
            Hkv=Hkv,
            G=G,
            D=D,
            D_PADDED=D_PADDED,
            QUERIES=QUERIES,
            KEYS=max(16, min(64, tile // D_PADDED)),
            IS_FIRST=is_first,
        )
    return y


if triton:

    @triton.jit
    def attend_to_part(
        q,  # (N, Hkv, G, D)
        k,  # (B, Hkv, places, D) with strides kv_row, kv_head, D, 1
        v,  # laid out like k
        length,  # length[b * length_step] is the number of filled places in row b of k and v
        y,  # (N, Hkv, G, D), the result of both parts, which the second stores
        prompt_y,  # (N, Hkv, G, D), the result of the first part, in fp32
        prompt_lse,  # (N, Hkv, G), the log of the sum of exp(score) in the first part
        cells_per_row,  # N / B, the number of cells that share row b of k and v
        length_step,  # 1, or 0 if one length holds for all rows
        kv_row,
        kv_head,
        scale: tl.constexpr,
        Hkv: tl.constexpr,
        G: tl.constexpr,
        D: tl.constexpr,
        D_PADDED: tl.constexpr,
        QUERIES: tl.constexpr,
        KEYS: tl.constexpr,
        IS_FIRST: tl.constexpr,
    ):
        """Compute the attention of up to QUERIES queries that share the keys of row b and head h.

        The kernel reads KEYS keys at a time and keeps a running softmax, as FlashAttention does:
        the largest score so far, the sum of the weights exp(score - largest), and the sum of the
        values multiplied by these weights. When a larger score turns up, both sums are scaled down.
        """
        b = tl.program_id(0) // Hkv
        h = tl.program_id(0) % Hkv
        query = tl.program_id(1) * QUERIES + tl.arange(0, QUERIES)
        is_query = query < cells_per_row * G
        # `place` holds the flat index of each query over (N, Hkv, G), and `tile` holds the offsets
        # of each query's D channels in (N, Hkv, G, D).
        place = ((b * cells_per_row + query // G) * Hkv + h) * G + query % G
        d = tl.arange(0, D_PADDED)
        is_channel = d < D
        tile = place[:, None] * D + d[None, :]
        in_tile = is_query[:, None] & is_channel[None, :]
        queries = tl.load(q + tile, in_tile, 0.0)

        # In the first part, the running softmax starts empty. The second part starts with the first
        # part's result, as if the prompt were one key with score prompt_lse and value prompt_y.
        if IS_FIRST:
            largest = tl.full((QUERIES,), -float("inf"), tl.float32)
            total = tl.zeros((QUERIES,), tl.float32)
            weighted = tl.zeros((QUERIES, D_PADDED), tl.float32)
        else:
            largest = tl.load(prompt_lse + place, is_query, 0.0)
            total = tl.full((QUERIES,), 1.0, tl.float32)
            weighted = tl.load(prompt_y + tile, in_tile, 0.0)

        start = b.to(tl.int64) * kv_row + h * kv_head  # may not fit into an int32
        end = tl.load(length + b * length_step)
        n = tl.arange(0, KEYS)
        for i in range(0, end, KEYS):
            # Score the next KEYS keys.
            is_key = i + n < end
            at = start + (i + n) * D
            keys = tl.load(
                k + at[None, :] + d[:, None], is_key[None, :] & is_channel[:, None], 0.0
            )  # (D_PADDED, KEYS)
            scores = tl.dot(queries, keys, input_precision="ieee") * scale
            scores = tl.where(is_key[None, :], scores, -float("inf"))

            # Scale both sums to the new largest score, and add these keys' weights and values.
            new_largest = tl.maximum(largest, tl.max(scores, 1))
            weights = tl.exp(scores - new_largest[:, None])
            shrink = tl.exp(largest - new_largest)
            values = tl.load(
                v + at[:, None] + d[None, :], is_key[:, None] & is_channel[None, :], 0.0
            )  # (KEYS, D_PADDED)
            part = tl.dot(weights.to(values.dtype), values, input_precision="ieee")
            weighted = weighted * shrink[:, None] + part
            total = total * shrink + tl.sum(weights, 1)
            largest = new_largest

        mean = weighted / total[:, None]
        if IS_FIRST:
            tl.store(prompt_y + tile, mean, in_tile)
            tl.store(prompt_lse + place, largest + tl.log(total), is_query)
        else:
            tl.store(y + tile, mean.to(y.dtype.element_ty), in_tile)


# ---- The grid ------------------------------------------------------------------------------------


class Grid:
    """The rollouts that are being sampled, in N = Q*R cells: R cells for each of Q prompts.

    Every cell has drawn t tokens. The newest token, which has index t - 1, is not in the cache yet;
    `decode` feeds it to the model. P is the padded length of the longest prompt. T is the number of
    places that a step reads in the cache of a cell's own tokens. V is the size of the vocabulary.

    A finished rollout keeps its cell until `compact` drops the cell. So `rollouts`, `seeds` and
    `newest` have one entry for each remaining cell, while `tokens`, `logprobs` and `lengths` have
    one entry for each rollout that the grid started with.
    """

    def __init__(self, model, prompts, seeds, max_new_tokens, draw_from, eos_id):
        """Allocate a grid for Q prompts and their seeds (Q, R).

        draw_from maps logits (N, V) and uniform numbers (N) to tokens (N) and their
        log-probabilities (N).
        """
        self.model = model
        self.prompts = prompts
        self.draw_from = draw_from
        self.device = model.device
        self.shape = seeds.shape
        self.Q, self.R = seeds.shape  # `compact` may reduce both.
        self.P = padded(max(map(len, prompts)), self.device)
        room = padded(max_new_tokens, self.device)  # places for a cell's own tokens
        self.T = min(BUCKET[self.device.type], room)
        self.steps = 0  # the number of steps since the shapes changed
        self.graph = None  # the CUDA graph of a step
        N = seeds.numel()
        self.running = list(range(N))  # indices of the rollouts that have not been yielded yet

        with self.device:
            # One entry for each rollout that the grid starts with.
            self.tokens = torch.zeros(N, max_new_tokens, dtype=torch.long)
            self.logprobs = torch.zeros(N, max_new_tokens, dtype=torch.float32)
            self.lengths = torch.zeros(N, dtype=torch.long)  # 0 while a rollout is running

            self.ends = torch.tensor(eos_id, dtype=torch.long).view(-1)  # ids that end a rollout
            self.t = torch.zeros(1, dtype=torch.long)  # how many tokens every cell has drawn

            # One entry for each cell.
            self.rollouts = torch.arange(N)  # the index of each cell's rollout
            self.seeds = seeds.flatten().to(self.device)
            self.newest = torch.zeros(N, dtype=torch.long)  # the token that each cell drew last
            self.prompt_length = torch.tensor([len(prompt) for prompt in prompts])  # (Q), not (N)
        self.prompt_kv = cache(model, self.Q, self.P)
        self.own_kv = cache(model, N, room)

    def run(self):
        """Yield (prompt index, rollout index, Completion) of each rollout, soon after it ends.

        The indices count only the prompts and rollouts of this grid.
        """
        self.prefill()
        max_new_tokens = self.tokens.shape[1]
        bucket = BUCKET[self.device.type]
        for count in range(1, max_new_tokens + 1):  # tokens that each cell has drawn
            if count % CHECK == 0 or count == max_new_tokens:
                yield from self.harvest(count)
            if not self.running:
                return
            if count % bucket == 0:
                self.compact()
                # Let the next steps attend to up to `bucket` more places of each cell. With `steps`
                # at 0, `step` captures a new CUDA graph for the new shapes.
                self.T = min(self.T + bucket, self.own_kv[0].shape[3])
                self.steps = 0
            self.step()

    def prefill(self):
        """Cache the keys and values of the prompts, and draw the first token of every rollout.

        The prompts go through the model a few at a time. Raises ValueError if the logits are not
        finite.
        """
        parts = []
        at_once = max(1, PREFILL_TOKENS // self.P)
        for start in range(0, self.Q, at_once):
            batch = slice(start, start + at_once)
            prompts = self.prompts[batch]
            width = padded(max(map(len, prompts)), self.device)
            # The padding goes on the right, where causal attention never looks.
            ids = [prompt + [0] * (width - len(prompt)) for prompt in prompts]
            last = self.prompt_length[batch, None, None] - 1  # (q, 1, 1)

            def attend(layer_idx, q, k, v):
                self.prompt_kv[layer_idx][:, batch, :, :width] = torch.stack((k, v))
                return causal(layer_idx, q, k, v)

            def head(hidden):  # (q, width, C) -> (q, V), for each prompt's last token
                return self.model.logits(hidden.take_along_dim(last, dim=1)[:, 0])

            ids = torch.tensor(ids, device=self.device)
            parts.append(self.model(ids, attend=attend, head=head))

        logits = torch.cat(parts)  # (Q, V)
        if not logits.isfinite().all():
            raise ValueError("the model's logits are not finite, so its weights must be damaged")
        self.draw_next(logits.repeat_interleave(self.R, 0))

    def step(self):
        """Draw every cell's next token.

        On CUDA, the first step after a change of shapes runs without a CUDA graph, because CUDA's
        libraries must be initialised before a capture. The second step captures a graph, which it
        and all later steps replay until the shapes change again.
        """
        if self.device.type == "cpu" or self.steps == 0:
            self.decode()
        else:
            if self.steps == 1:
                self.capture()
            self.graph.replay()
        self.steps += 1

    def capture(self):
        """Capture `decode` as a CUDA graph."""
        # The assignment to self.graph below frees the previous graph. torch then drops the cuBLAS
        # workspace of the capture stream, although the new graph uses the same workspace (pytorch
        # issue 193402). This is harmless, because the workspace lies in the memory pool that both
        # graphs share, and nothing else uses that pool, since there is only one grid at a time.
        graph = torch.cuda.CUDAGraph()
        pool = self.graph.pool() if self.graph else None
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            self.decode()
        self.graph = graph

    def decode(self):
        """Feed every cell's newest token to the model and draw the cell's next token.

        Everything happens in place and without waiting for the device, as a CUDA graph requires.
        """
        place = self.t - 1  # the newest token's place in the cache of each cell's own tokens
        positions = (self.prompt_length + place).repeat_interleave(self.R)[:, None]  # (N, 1)
        attend = partial(attend_shared, self, place)
        logits = self.model(self.newest[:, None], positions, attend)  # (N, 1, V)
        self.draw_next(logits[:, 0])

    def draw_next(self, logits):
        """Draw and record every cell's token with index t, from logits (N, V); then increment t."""
        token, logprob = self.draw_from(logits, uniform(self.seeds, self.t))
        self.tokens[self.rollouts, self.t] = token
        self.logprobs[self.rollouts, self.t] = logprob
        length = self.lengths[self.rollouts]
        is_end = (token[:, None] == self.ends).any(-1)
        self.lengths[self.rollouts] = torch.where(is_end & (length == 0), self.t + 1, length)
        self.newest.copy_(token)
        self.t.add_(1)

    def harvest(self, count: int):
        """Yield what `run` yields, for the rollouts that ended since the last call.

        `count` is the number of tokens that each cell has drawn. If it is max_new_tokens, the
        rollouts that have not ended are yielded as well, cut off.
        """
        is_last = count == self.tokens.shape[1]
        lengths = self.lengths.tolist()
        ended = [i for i in self.running if is_last or lengths[i]]
        self.running = [i for i in self.running if not (is_last or lengths[i])]
        tokens = self.tokens[:, :count][ended].tolist()
        logprobs = self.logprobs[:, :count][ended].tolist()
        for i, its_tokens, its_logprobs in zip(ended, tokens, logprobs):
            finished = lengths[i] > 0
            length = lengths[i] or count
            q, r = divmod(i, self.shape[1])
            yield q, r, Completion(its_tokens[:length], its_logprobs[:length], finished)

    def compact(self):
        """Drop finished cells.

        Prompts whose rollouts have all finished are dropped. All others are cut to R' cells each,
        where R' is the maximum number of running rollouts per prompt, so some finished rollouts may
        keep their cells.
        """
        # Choose the Q' prompts to keep and, for each of them, R' cells, running ones first.
        is_running = (self.lengths[self.rollouts] == 0).view(self.Q, self.R)
        prompts = is_running.any(1).nonzero()[:, 0]  # (Q')
        R = int(is_running.sum(1).max())
        order = is_running[prompts].int().sort(dim=1, descending=True, stable=True).indices
        cells = (prompts[:, None] * self.R + order[:, :R]).flatten()  # (Q'*R')
        if len(cells) == len(self.rollouts):
            return

        # Move the chosen prompts and cells to the front, and cut off the rest.
        self.rollouts = self.rollouts[cells]
        self.seeds = self.seeds[cells]
        self.newest = self.newest[cells]
        self.prompt_length = self.prompt_length[prompts]
        for i, (prompt_kv, own_kv) in enumerate(zip(self.prompt_kv, self.own_kv)):
            prompt_kv[:, : len(prompts)] = prompt_kv[:, prompts]
            own_kv[:, : len(cells), :, : self.T] = own_kv[:, cells, :, : self.T]
            self.prompt_kv[i] = prompt_kv[:, : len(prompts)]
            self.own_kv[i] = own_kv[:, : len(cells)]
        self.Q = len(prompts)
        self.R = R


def cache(model, rows: int, length: int) -> list:
    """Return an empty cache: for each layer, a tensor (2, rows, Hkv, length, D) of keys and values.

    The tensors are filled with zeros, because uninitialised memory may hold NaNs, and a NaN stays a
    NaN when it is multiplied by a weight of 0.
    """
    shape = (2, rows, model.config.num_key_value_heads, length, model.config.head_dim)
    dtype = cache_dtype(model)
    return [torch.zeros(shape, dtype=dtype, device=model.device) for _ in model.model.layers]


def cache_dtype(model) -> torch.dtype:
    """Return the weights' dtype, or fp32 on a CPU, where attention computes in fp32."""
    return torch.float32 if model.device.type == "cpu" else model.lm_head.weight.dtype


# ---- Draws ---------------------------------------------------------------------------------------


def draw(logits, u, temperature=1.0, n_ids=None):
    """Sample one id for each row of logits (N, V), using uniform numbers u (N) in [0, 1).

    Returns the ids (N) and their log-probabilities (N). If n_ids is given, only ids below it are
    drawn. If the temperature is below 1e-6, the likeliest id is taken, with its log-probability at
    temperature 1.
    """
    is_greedy = temperature < 1e-6
    logits = logits[:, :n_ids]
    scaled = logits if is_greedy or temperature == 1 else logits / temperature
    logp = scaled.log_softmax(1)
    if is_greedy:
        tokens = logits.argmax(-1, True)  # (N, 1)
    elif logits.is_cuda:
        tokens = pick_in_blocks(logp.exp(), u[:, None])
    else:
        tokens = pick(logp.exp(), u[:, None])
    return tokens[:, 0], logp.gather(-1, tokens)[:, 0]


def pick(mass, share):
    """Pick an id (N, 1) from each row of mass (N, V), given each row's share (N, 1) in [0, 1).

    The id is the first one at which the cumulative sum of the row exceeds share * (sum of the row).
    The id always has a mass above 0, even if the share is 0. For example, if the row is 0, 0.25,
    0.75, a share of 0.2 picks id 1, and a share of 0.3 picks id 2.
    """
    ends = mass.cumsum(-1)
    return torch.searchsorted(ends, share * ends[:, -1:], right=True)


def pick_in_blocks(mass, share, block=512):
    """Return the same ids as `pick`, up to rounding, but faster on a GPU.

    To avoid a cumulative sum over all ids, the function first picks a block, using the sum of each
    block, and then an id within that block.
    """
    # Pick the block, and sum the mass before it. The last block holds the V % block leftover ids,
    # possibly none.
    V = mass.shape[1]
    whole = V // block * block
    sums = mass[:, :whole].unflatten(1, (-1, block)).sum(-1)
    ends = torch.cat((sums, mass[:, whole:].sum(-1, True)), 1).cumsum(-1)
    target = share * ends[:, -1:]  # (N, 1)
    chosen = torch.searchsorted(ends, target, right=True)
    before = torch.where(chosen > 0, ends.gather(1, (chosen - 1).clamp(min=0)), 0.0)

    # Pick the id in that block. Limit `rest`, so that rounding cannot lead past the block's last id
    # that has mass.
    ids = chosen * block + torch.arange(block, device=mass.device)  # (N, block)
    own = mass.gather(1, ids.clamp(max=V - 1)).where(ids < V, 0.0).cumsum(-1)
    rest = (target - before).minimum(own[:, -1:] * (1 - 2**-23))
    return chosen * block + torch.searchsorted(own, rest, right=True)


def uniform(seeds, step):
    """Return a pseudo-random float in [0, 1) for each seed (N, int64) at a step (int64).

    The float is k / 2^23, where k is the top 23 bits of the output with index `step` of the
    generator splitmix64. Its last operation, which does not change these bits, is left out. The
    generator's arithmetic is unsigned, but int64 wraps around to the same bits, so the constants
    are written as signed integers. >> fills in copies of the sign bit, so a mask clears them.
    """
    z = seeds + (step + 1) * -0x61C8864680B583EB
    z = (z ^ (z >> 30 & (1 << 34) - 1)) * -0x40A7B892E31B1A47
    z = (z ^ (z >> 27 & (1 << 37) - 1)) * -0x6B2FB644ECCEEE15
    return (z >> 41 & (1 << 23) - 1).float() / (1 << 23)


def rollout_seeds(prompts, numbers, seed: int) -> list[list[int]]:
    """Return a 64-bit seed for each rollout of each prompt, as [prompt][rollout].

    A rollout's seed is a hash of the argument `seed`, the prompt, how many times the prompt occurs
    earlier in the list, and the rollout's number.
    """
    seeds = []
    occurrences = Counter()
    for prompt, its_numbers in zip(map(tuple, prompts), numbers):
        repeats = occurrences[prompt]
        occurrences[prompt] += 1
        identity = (seed, prompt, repeats) if repeats else (seed, prompt)
        key = hashlib.blake2b(repr(identity).encode()).digest()
        its_seeds = []
        for number in its_numbers:
            digest = hashlib.blake2b(b"%d" % number, key=key, digest_size=8).digest()
            its_seeds.append(int.from_bytes(digest, "big", signed=True))
        seeds.append(its_seeds)
    return seeds


def load_sampler(path: str) -> tuple[Qwen, Tokenizer]:
    """Load a checkpoint for sampling; return its model and its tokenizer.

    `path` is a folder, or a repository on the Hugging Face hub. The model is on the GPU if there is
    one. Raises OSError or ValueError if the checkpoint cannot be loaded.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = Config.from_pretrained(path)
    tokenizer = Tokenizer.from_pretrained(path)
    check_ids(tokenizer, config)
    model = Qwen.from_pretrained(path, dtype_for(config, device), device)
    if device == "cuda":
        model.join()
    return model, tokenizer


# ---- The command line ----------------------------------------------------------------------------
@dataclass
class Settings:
    checkpoint: str = flag("", "a model's folder, or its name on the Hugging Face hub")
    n: int = flag(1, "number of answers")
    max_new_tokens: int = flag(512, "maximum number of tokens in an answer")
    temperature: float = flag(0.7, "sampling temperature; 0: always take the likeliest token")
    seed: int = flag(0, "random seed; the same seed gives the same answers")


if __name__ == "__main__":
    settings = Settings()
    words = configure(settings, sys.argv[1:])
    if not settings.checkpoint or not words:
        raise SystemExit(
            'usage: python sample.py --checkpoint=FOLDER "a prompt"   (--help: all settings)'
        )
    try:
        model, tokenizer = load_sampler(settings.checkpoint)
        prompt = tokenizer.chat([{"role": "user", "content": " ".join(words)}])
        # The prompt and an answer together must fit into the model's context.
        room = max(1, model.config.max_position_embeddings - len(prompt))
        [completions] = generate(
            model,
            [prompt],
            settings.n,
            min(settings.max_new_tokens, room),
            settings.temperature,
            tokenizer.end_ids,
            settings.seed,
            len(tokenizer),
        )
    except (OSError, ValueError) as e:
        raise SystemExit(str(e)) from None
    for c in completions:
        print(tokenizer.decode(c.tokens) + ("" if c.finished else " …"))
