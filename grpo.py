"""GRPO: rewards → advantages → token log-probabilities → loss → update (Eqs. 1 and 2 of the paper).

A group is the n rollouts of one question. Its prompt and completions go through the model as one packed row, so that the prompt is
computed once for all (once in each micro-batch) and not once per rollout; the gradient is the same. Read eval.py next.
"""
import itertools
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right
from torch.utils.checkpoint import checkpoint

from model import Qwen, causal

# Logits that are alive at a time: they are recomputed in the backward pass. Few on a CPU, where malloc hands what is larger than 32 MB back to
# the system at once, and to touch new pages takes longer than to compute them.
HEAD_LOGITS = {"cuda": 1 << 27, "cpu": 1 << 22}


LOSSES = ("sequence", "token", "constant")  # what `update` divides by


@dataclass
class Episode:
    """One rollout, ready to be trained on. The ids are the sampled ones: sampled text is never encoded again."""
    prompt: list[int]
    tokens: list[int]  # the end token included
    logprobs: list[float]  # of the sampler, i.e. of the policy that acted
    advantage: float = 0.0
    weights: list[float] | None = None  # of the tokens, from `importance`


def advantages(rewards, mask=None, std: bool = True, of: list | None = None):
    """Eq. 2 on rewards (Q, G): (r - mean) / std within each group; with std=False only centred. Returns (Q, G).

    mask (Q, G) is False for rollouts that do not count (their worker calls were lost): they are left out of mean and std and get
    advantage 0, as does a group without spread. std is that of the group itself, sqrt(mean((r - mean)²)).

    of: what each group is a round of. Rounds of the same are divided by one std (§3.2), so that a smaller reward weighs less; each keeps
    its own mean, the best baseline for its own prompt."""
    rewards = torch.as_tensor(rewards, dtype=torch.float32)
    mask = torch.ones_like(rewards) if mask is None else torch.as_tensor(mask).float()
    count = mask.sum(1, keepdim=True).clamp(min=1)
    centred = (rewards - (rewards * mask).sum(1, keepdim=True) / count) * mask
    centred = torch.where(centred.abs() < 1e-6, 0.0, centred)
    if not std:
        return centred
    of = list(range(len(rewards))) if of is None else of
    same = torch.tensor([[a == b for b in of] for a in of]).float()  # (Q, Q)
    return centred / (same @ (centred ** 2).sum(1, keepdim=True) / (same @ mask.sum(1, keepdim=True)).clamp(min=1)).sqrt().clamp(min=1e-6)


def token_logprobs(model: Qwen, prompt: list[int], completions: list[list[int]], temperature: float = 1.0, n_ids: int | None = None):
    """Log-probability of every token of each completion given the prompt: a list of 1-D tensors, with gradient, the prompt computed once.

    temperature and n_ids (ids at or above it have no probability) as in sampling, or the two would not be the same policy."""
    return packed_logprobs(model, [(prompt, completions)], temperature, n_ids)[0]


def packed_logprobs(model: Qwen, groups: list[tuple[list[int], list[list[int]]]], temperature: float = 1.0, n_ids: int | None = None,
                    reference: Qwen | None = None):
    """token_logprobs of several (prompt, completions) at once, in one list. All go through the model as one row:

        prompt A | completion A0 | completion A1 | … | prompt B | completion B0 | …

    Beside it a 1-D tensor over all these tokens: KL(π_ref ‖ π) of the distributions that they were drawn from, with gradient; zeros
    without a reference. GRPO's estimator of the KL, r - log r - 1 with r = π_ref/π of the sampled token, has the same gradient on
    average over the policy's own samples, but where the policy has all but given a token up, the one sample in a thousand that
    holds it has an r of hundreds."""
    device, lengths, sizes, layout, positions, predictors = model.device, [], [], [], [], []
    for prompt, completions in groups:
        P, length = len(prompt), torch.tensor([len(c) for c in completions], device=device)
        step = torch.arange(int(length.max()), device=device)  # (L)
        real = step < length[:, None]  # (n, L) the completions as a padded grid
        begin = P + F.pad(length.cumsum(0), (1, 0))[:-1]  # (n) where each completion begins, counted from its group's begin
        where = (begin[:, None] + step).masked_fill(~real, P)  # (n, L) a grid cell's place in the row; padding points anywhere
        # Queries of a completion see the whole prompt and their own past; padding lies in nobody's past. Fused kernels know this mask.
        layout.append((P, where, real.flatten().nonzero()[:, 0], causal_lower_right(len(step), P + len(step))))
        positions += [torch.arange(P, device=device), (P + step).expand_as(where)[real]]
        # The token at step 0 is predicted by the prompt's last position, the others by the position before them.
        predictors.append(sum(sizes) + torch.where(step == 0, P - 1, where - 1)[real])
        lengths += length.tolist()
        sizes.append(P + sum(map(len, completions)))
    ids = torch.tensor([t for prompt, completions in groups for part in (prompt, *completions) for t in part], device=device)  # (T)
    targets = torch.tensor([t for _, completions in groups for c in completions for t in c], device=device)

    def attend(layer, q, k, v):  # q (1, H, T, D), k and v (1, Hkv, T, D)
        y = []
        for (P, where, cells, mask), q, k, v in zip(layout, q.split(sizes, 2), k.split(sizes, 2), v.split(sizes, 2)):
            n = len(where)
            y.append(causal(layer, q[:, :, :P], k[:, :, :P], v[:, :, :P]))
            k, v = (torch.cat((x[:, :, :P].expand(n, -1, -1, -1), x[0][:, where].transpose(0, 1)), 2) for x in (k, v))  # (n, Hkv, P+L, D)
            own = F.scaled_dot_product_attention(q[0][:, where].transpose(0, 1), k, v, attn_mask=mask, enable_gqa=True)  # (n, H, L, D)
            y.append(own.transpose(1, 2).flatten(0, 1).index_select(0, cells).transpose(0, 1)[None])  # unlike own[real], waits for no GPU
        return torch.cat(y, 2)  # (1, H, T, D)

    def logps(model, hidden):
        logits = model.logits(hidden)[:, :n_ids]
        return (logits if temperature == 1 else logits / temperature).log_softmax(-1)

    def score(hidden, ref_hidden, targets):  # (chunk, C), (chunk, C), (chunk) -> (2, chunk)
        logp, kl = logps(model, hidden), torch.zeros(len(hidden), device=device)
        if reference:
            ref = logps(reference, ref_hidden).detach()
            kl = (ref.exp() * (ref - logp)).sum(-1)
        return torch.stack((logp.gather(1, targets[:, None])[:, 0], kl))

    ids, positions, predictors = ids[None], torch.cat(positions)[None], torch.cat(predictors)
    with torch.no_grad():
        ref_hidden = reference(ids, positions, attend, lambda hidden: hidden[0, predictors]) if reference else None

    def head(hidden):
        hidden, rows = hidden[0, predictors], max(1, HEAD_LOGITS[device.type] // model.config.vocab_size)
        chunks = zip(*(x.split(rows) for x in (hidden, hidden if ref_hidden is None else ref_hidden, targets)))
        return torch.cat([checkpoint(score, *chunk, use_reentrant=False) for chunk in chunks], 1)

    logprobs, kl = model(ids, positions, attend, head)
    return list(logprobs.split(lengths)), kl


def surrogate(logprobs, old, advantage, clip: float, clip_high: float = 0.0):
    """Eq. 1 token by token, without the KL, to be maximised: min(ρA, clip(ρ, 1-ε, 1+ε)A). Log-probabilities are 1-D tensors over tokens,
    and so is `advantage`, unless it is one number for all. clip_high: another ε above 1 (DAPO, arXiv 2503.14476), 0 for the same."""
    ratio = (logprobs - old).exp()
    return torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + (clip_high or clip)) * advantage)


def micro_batches(episodes: list[Episode], token_budget: int) -> list[dict[tuple, list[Episode]]]:
    """Split episodes into {prompt: its episodes}, each of at most `token_budget` tokens with every prompt counted once, or of one episode that is
    longer. Those of a prompt are sorted by length, so that little is padded."""
    batches, size = [{}], 0
    for e in sorted(episodes, key=lambda e: (e.prompt, len(e.tokens))):
        prompt = tuple(e.prompt)
        cost = len(e.tokens) + (0 if prompt in batches[-1] else len(prompt))
        if batches[-1] and size + cost > token_budget:
            batches.append({})
            size, cost = 0, len(prompt) + len(e.tokens)
        batches[-1].setdefault(prompt, []).append(e)
        size += cost
    return batches if episodes else []


def reduce(values: list[float], op=dist.ReduceOp.SUM, device="cpu") -> list[float]:
    """Sum (or max) of numbers over ranks."""
    total = torch.tensor(values, dtype=torch.float64, device=device)
    if dist.is_initialized():
        dist.all_reduce(total, op)
    return total.tolist()


def forwards(model: Qwen, batches: list[dict]):
    """Yield every rank's micro-batches as (is it real, groups for packed_logprobs, episodes in their order). All ranks get the same number
    of them, the last ones not real where others have more: FSDP's collectives would wait for ever for a rank that leaves early."""
    [most] = reduce([len(batches)], dist.ReduceOp.MAX, model.device)
    for i in range(int(most)):
        batch = batches[i] if i < len(batches) else {(0,): [Episode([0], [0], [0.0])]}
        yield i < len(batches), [(list(p), [e.tokens for e in group]) for p, group in batch.items()], [*itertools.chain(*batch.values())]


@torch.no_grad()
def importance(model: Qwen, episodes: list[Episode], cap: float, temperature: float = 1.0, n_ids: int | None = None,
               token_budget: int = 16384) -> float:
    """Truncated importance weights, min(π_trainer / π_sampler, cap), for each token: they undo the difference between the two programs. From
    here on the ratio ρ is to the trainer's own policy before the update (fengyao.notion.site/off-policy-rl). Returns `update`'s gap, which
    from here on is 0."""
    far, tokens = 0.0, 0
    for real, groups, batch in forwards(model, micro_batches(episodes, token_budget)):
        for e, new in zip(batch, packed_logprobs(model, groups, temperature, n_ids)[0]):
            log_ratio = new.cpu() - torch.tensor(e.logprobs)
            e.weights, e.logprobs = log_ratio.exp().clamp(max=cap).tolist(), new.tolist()
            far, tokens = far + real * log_ratio.abs().sum().item(), tokens + real * len(new)
    if hasattr(model, "reshard"):  # FSDP leaves that to a backward pass, which may not come
        model.reshard()
    far, tokens = reduce([far, tokens], device=model.device)
    return far / max(tokens, 1)


def update(model: Qwen, optimizer, episodes: list[Episode], clip: float = 0.2, beta: float = 0.0, reference: Qwen | None = None,
           temperature: float = 1.0, n_ids: int | None = None, token_budget: int = 16384, max_grad_norm: float = 1.0,
           clip_high: float = 0.0, loss: str = "sequence", max_new_tokens: int = 0) -> dict:
    """One optimizer step on Eq. 1 over all ranks' episodes, of which these are this rank's.

    `reference` is needed where beta > 0. loss: what the sum over tokens is divided by: "sequence", each by its rollout's length and then by
    the rollouts (GRPO); "token", by all tokens (DAPO); "constant", by rollouts × max_new_tokens (Dr. GRPO, arXiv 2503.20783).

    Returns means over all ranks' tokens, without rollouts that teach nothing (advantage and beta 0): gap (|trainer's - sampler's
    log-probability|, which is the two programs' difference in the first update after sampling only), approx_kl (KL(π_old ‖ π) as
    ρ - 1 - log ρ), clipfrac, kl (KL(π_ref ‖ π)), entropy (-log π of what was sampled), and grad_norm."""
    device, world = model.device, dist.get_world_size() if dist.is_initialized() else 1
    batches = micro_batches([e for e in episodes if e.advantage or beta], token_budget)
    # Groups without spread count too: they are part of the mean.
    rollouts, n_tokens = reduce([len(episodes), sum(len(e.tokens) for e in episodes)], device=device)
    scale = {"sequence": lambda e: 1 / len(e.tokens) / max(rollouts, 1), "token": lambda e: 1 / max(n_tokens, 1),
             "constant": lambda e: 1 / max(rollouts * max_new_tokens, 1)}[loss]
    sums = torch.zeros(6, dtype=torch.float64)
    for real, groups, batch in forwards(model, batches):
        new, kl = packed_logprobs(model, groups, temperature, n_ids, reference if beta else None)
        new, old = torch.cat(new), torch.tensor([x for e in batch for x in e.logprobs], device=device)  # (T), as are kl and the next two
        advantage = torch.tensor([e.advantage * w for e in batch for w in e.weights or [1.0] * len(e.tokens)], device=device)
        share = torch.tensor([scale(e) for e in batch for _ in e.tokens], device=device)
        gain = ((surrogate(new, old, advantage, clip, clip_high) - beta * kl) * share).sum()
        (-gain * world * real).backward()  # FSDP averages gradients over ranks
        with torch.no_grad():
            log_ratio = new - old
            ratio = log_ratio.exp()
            clipped = ((ratio < 1 - clip) | (ratio > 1 + (clip_high or clip))).float()
            sums += real * torch.stack([log_ratio.abs(), ratio - 1 - log_ratio, clipped, -new, kl, torch.ones_like(new)]).sum(1).cpu()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    *means, tokens = reduce(sums.tolist(), device=device)
    names = "gap", "approx_kl", "clipfrac", "entropy", "kl"
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    return {**{name: x / max(tokens, 1) for name, x in zip(names, means)}, "grad_norm": norm.item()}
