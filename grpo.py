"""GRPO: rewards → advantages → token log-probabilities → loss → update (Eqs. 1 and 2 of the paper).

A group is the n rollouts of one question. Its prompt and completions go through the model as one packed row, so that the prompt is
computed once per group and not once per rollout; the gradient is the same. Read eval.py next.
"""
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from model import Qwen

HEAD_CHUNK = 2048  # completion positions whose logits are alive at a time: they are recomputed in the backward pass


@dataclass
class Episode:
    """One rollout, ready to be trained on. The ids are the sampled ones: sampled text is never encoded again."""
    prompt: list[int]
    tokens: list[int]  # the end token included
    logprobs: list[float]  # of the sampler, i.e. of the policy that acted
    advantage: float = 0.0


def advantages(rewards, mask=None, std: bool = True):
    """Eq. 2 on rewards (Q, G): (r - mean) / std within each group; with std=False only centred. Returns (Q, G).

    mask (Q, G) is False for rollouts that do not count (their worker calls were lost): they are left out of mean and std and get
    advantage 0, as does a group without spread. std is that of the group itself, sqrt(mean((r - mean)²))."""
    rewards = torch.as_tensor(rewards, dtype=torch.float32)
    mask = torch.ones_like(rewards) if mask is None else torch.as_tensor(mask).float()
    count = mask.sum(1, keepdim=True).clamp(min=1)
    centred = (rewards - (rewards * mask).sum(1, keepdim=True) / count) * mask
    centred = torch.where(centred.abs() < 1e-6, 0.0, centred)
    if not std:
        return centred
    return centred / ((centred ** 2).sum(1, keepdim=True) / count).sqrt().clamp(min=1e-6)


def token_logprobs(model: Qwen, prompt: list[int], completions: list[list[int]], temperature: float = 1.0, n_ids: int | None = None):
    """Log-probability of every token of each completion given the prompt: a list of 1-D tensors, with gradient, the prompt computed once.

    temperature and n_ids (ids at or above it have no probability) as in sampling, or the two would not be the same policy."""
    device, P, lengths = model.device, len(prompt), [len(c) for c in completions]
    n, L = len(completions), max(lengths)
    length = torch.tensor(lengths, device=device)
    ids = torch.tensor([prompt + [t for c in completions for t in c]], device=device)  # (1, T): prompt, completion 0, completion 1, …
    starts = P + F.pad(length.cumsum(0), (1, 0))[:-1]  # (n) where each completion begins in the row
    step = torch.arange(L, device=device)
    real = step < length[:, None]  # (n, L) the completions as a padded grid
    where = (starts[:, None] + step).masked_fill(~real, P)  # (n, L) a grid cell's place in the row; padding points anywhere
    positions = torch.cat((torch.arange(P, device=device), (P + step).expand(n, L)[real]))[None]  # (1, T)
    # Queries of a completion see the whole prompt and their own past; padding lies in nobody's past.
    mask = torch.ones(L, P + L, dtype=torch.bool, device=device).tril(P)

    def attend(layer, q, k, v):  # q (1, H, T, D), k and v (1, Hkv, T, D)
        on_prompt = F.scaled_dot_product_attention(q[:, :, :P], k[:, :, :P], v[:, :, :P], is_causal=True, enable_gqa=True)
        k, v = (torch.cat((x[:, :, :P].expand(n, -1, -1, -1), x[0][:, where].transpose(0, 1)), 2) for x in (k, v))  # (n, Hkv, P+L, D)
        own = F.scaled_dot_product_attention(q[0][:, where].transpose(0, 1), k, v, attn_mask=mask, enable_gqa=True)  # (n, H, L, D)
        return torch.cat((on_prompt, own.transpose(0, 1)[None, :, real]), 2)  # (1, H, T, D)

    # The token at step 0 is predicted by the prompt's last position, the others by the position before them.
    predictor = torch.where(step == 0, P - 1, where - 1)[real]  # (T - P)

    def score(hidden, targets):  # (chunk, C), (chunk) -> (chunk)
        return -F.cross_entropy(model.logits(hidden)[:, :n_ids] / temperature, targets, reduction="none")

    def head(hidden):
        chunks = zip(hidden[0, predictor].split(HEAD_CHUNK), ids[0, P:].split(HEAD_CHUNK))
        return torch.cat([checkpoint(score, h, t, use_reentrant=False) for h, t in chunks])

    return list(model(ids, positions, attend, head).split(lengths))


def surrogate(logprobs, old, advantage: float, clip: float, beta: float = 0.0, reference=None):
    """Eq. 1 for the tokens of one rollout, to be maximised: min(ρA, clip(ρ, 1-ε, 1+ε)A) - β·KL(π‖π_ref), each a 1-D tensor over tokens.

    The KL term is the unbiased, never negative estimator of GRPO: r - log r - 1 with r = π_ref / π."""
    ratio = (logprobs - old).exp()
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
    if beta:
        log_r = (reference - logprobs).clamp(max=5)  # of a token that the policy gave up: r itself would drown the batch
        gain = gain - beta * (log_r.exp() - log_r - 1)
    return gain


def micro_batches(episodes: list[Episode], token_budget: int) -> list[list[Episode]]:
    """Split episodes into lists of one prompt each, of at most `token_budget` tokens with the prompt counted once, alike in length."""
    groups = {}
    for e in episodes:
        groups.setdefault(tuple(e.prompt), []).append(e)
    batches = []
    for prompt, group in groups.items():
        size = float("inf")
        for e in sorted(group, key=lambda e: len(e.tokens)):
            if size + len(e.tokens) > token_budget:
                batches.append([])
                size = len(prompt)
            batches[-1].append(e)
            size += len(e.tokens)
    return batches


def reduce(values: list[float], op=dist.ReduceOp.SUM, device="cpu") -> list[float]:
    """Sum (or max) of numbers over ranks."""
    total = torch.tensor(values, dtype=torch.float64, device=device)
    if dist.is_initialized():
        dist.all_reduce(total, op)
    return total.tolist()


def update(model: Qwen, optimizer, episodes: list[Episode], clip: float = 0.2, beta: float = 0.0, reference: Qwen | None = None,
           temperature: float = 1.0, n_ids: int | None = None, token_budget: int = 16384, max_grad_norm: float = 1.0) -> dict:
    """One optimizer step on this rank's episodes: the mean of Eq. 1 over all ranks' rollouts, each rollout the mean over its tokens.

    `reference` is needed where beta > 0. Returns means over all tokens of all ranks: gap (|trainer's - sampler's log-probability|, as
    if before the update), approx_kl, clipfrac, kl to the reference, entropy (estimated as -log π of what was sampled), and grad_norm."""
    device, world = model.device, dist.get_world_size() if dist.is_initialized() else 1
    batches = micro_batches([e for e in episodes if e.advantage or beta], token_budget)
    [rollouts] = reduce([len(episodes)], device=device)  # groups without spread count too: they are part of the mean
    [forwards] = reduce([len(batches)], dist.ReduceOp.MAX, device)
    sums = torch.zeros(6, dtype=torch.float64)
    for i in range(int(forwards)):
        # Every rank runs the same number of forward and backward passes, or FSDP's collectives would wait for ever.
        batch = batches[i] if i < len(batches) else [Episode([0], [0], [0.0])]
        args = batch[0].prompt, [e.tokens for e in batch], temperature, n_ids
        with torch.no_grad():
            references = token_logprobs(reference, *args) if beta else [None] * len(batch)
        loss = 0.0
        for e, logprobs, ref in zip(batch, token_logprobs(model, *args), references):
            old = torch.tensor(e.logprobs, device=device)
            gain = surrogate(logprobs, old, e.advantage, clip, beta, ref).mean()
            loss = loss - gain * (world / rollouts if i < len(batches) else 0.0)  # FSDP averages gradients over ranks
            if i < len(batches):
                new, log_ratio = logprobs.detach(), logprobs.detach() - old
                ratio = log_ratio.exp()
                sums += torch.stack([log_ratio.abs().sum(), (ratio - 1 - log_ratio).sum(), ((ratio - 1).abs() > clip).sum(), -new.sum(),
                                     (ref - new).exp().sub(ref - new + 1).sum() if beta else new.new_zeros(()), new.new_tensor(len(old))]).cpu()
        loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    *means, tokens = reduce(sums.tolist(), device=device)
    names = "gap", "approx_kl", "clipfrac", "entropy", "kl"
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    return {**{name: x / max(tokens, 1) for name, x in zip(names, means)}, "grad_norm": norm.item()}
