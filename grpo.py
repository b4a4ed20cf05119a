"""GRPO: rewards → advantages → token log-probabilities → loss → update (Eqs. 1 and 2 of the paper).

The rollouts of one prompt are a group. A micro-batch goes through the model as one packed row: each prompt
once, then all its completions. Read eval.py next."""

import itertools
import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right
from torch.utils.checkpoint import checkpoint

from model import Qwen, causal
from workflow import Rollout


def advantages(rewards, mask=None):
    """Eq. 2 for the rewards (Q, G) of Q groups: (r - mean) / std in each group. Returns (Q, G).

    mask (Q, G) is False for lost rollouts: they are in no statistic and get 0. Equal rewards also give 0."""
    rewards = torch.as_tensor(rewards, dtype=torch.float32)
    mask = torch.ones_like(rewards) if mask is None else torch.as_tensor(mask).float()
    count = mask.sum(1).clamp(min=1)  # (Q)
    mean = (rewards * mask).sum(1) / count  # (Q)
    centred = (rewards - mean[:, None]) * mask  # (Q, G)
    centred[centred.abs() < 1e-6] = 0.0  # Else rounding would become an advantage.
    std = ((centred**2).sum(1) / count).sqrt()  # (Q), divided by n, not by n - 1
    return centred / std.clamp(min=1e-6)[:, None]


def set_advantages(groups: list[list[Rollout]], recursion=False, cost_weight=0.0):
    """Write every rollout's advantage from its group's rewards, where None is masked, and the group's share
    of wrong answers. The groups are of one size.

    With recursion every first round's advantage counts a quarter, whether its question is asked again or not:
    the paper scales the rewards, which the division by std would undo. Nor are costs a part of the reward: by
    cost_weight, a rollout loses that much advantage for each dollar that its calls cost above the mean of its
    group."""
    rewards = [[r.reward or 0.0 for r in group] for group in groups]
    mask = [[r.reward is not None for r in group] for group in groups]
    for group, row in zip(groups, advantages(rewards, mask).tolist()):
        weight = 0.25 if recursion and group[0].previous is None else 1.0
        known = [r for r in group if r.reward is not None]
        dollars = (
            sum(r.cost for r in known) / len(known) if cost_weight and known else 0.0
        )  # their mean
        for rollout, advantage in zip(group, row):
            if cost_weight and rollout.reward is not None:
                advantage -= cost_weight * (rollout.cost - dollars)
            rollout.advantage = weight * advantage
            rollout.wrong_share = sum(not r.right for r in known) / len(known) if known else 1.0


# ---- Token log-probabilities -------------------------------------------------------------------------------


def packed_logprobs(
    model: Qwen, groups, temperature=1.0, n_ids=None, reference: Qwen | None = None
):
    """(2, N) with gradient, for the N tokens of the completions in groups [(prompt, completions)], in order.
    Row 0: log π of each token. Row 1: KL(π_ref ‖ π) over the vocabulary there, or 0 without a reference.
    temperature and n_ids: as in sampling."""
    # All groups become one row. The prompt 5 6 with completions 7 and 8 9 is laid out as
    #     ids         5  6 | 7 | 8  9      (T)
    #     positions   0  1 | 2 | 2  3      (T)  each completion goes on where its prompt ends
    #     targets            7   8  9      (N)  the tokens whose log-probabilities are wanted
    #     predictors         1   1  3      (N)  the places in the row whose output predicts them
    # `attend_group` (below): a prompt attends to itself once, each completion to [prompt | own past].
    ids, positions, targets, predictors, attend = pack(groups, model.device)
    row = (ids[None], positions[None], attend)
    with torch.no_grad():
        ref_hidden = (
            reference(*row, lambda hidden: hidden[0, predictors]) if reference else None
        )  # (N, C)
    return model(
        *row,
        lambda hidden: of_targets(
            model, hidden[0, predictors], targets, temperature, n_ids, reference, ref_hidden
        ),
    )


def token_logprobs(
    model: Qwen, prompt: list[int], completions: list[list[int]], temperature=1.0, n_ids=None
):
    """log π of the tokens of a prompt's completions, a 1-D tensor for each, with gradient."""
    logprobs, _ = packed_logprobs(model, [(prompt, completions)], temperature, n_ids)
    return list(logprobs.split([len(completion) for completion in completions]))


# ---- The loss (Eq. 1) and the update -----------------------------------------------------------------------


def surrogate(logprobs, old, advantage, clip):
    """Eq. 1 without the KL, to be maximised: min(ρA, clip(ρ, 1-ε, 1+ε)A) with ρ = π/π_old, token by token
    (Eq. 1 prints one ρ per completion). All are 1-D over tokens."""
    ratio = (logprobs - old).exp()
    clipped = ratio.clamp(1 - clip, 1 + clip)
    return torch.minimum(ratio * advantage, clipped * advantage)


def update(
    model: Qwen,
    optimizer,
    rollouts: list[Rollout],
    clip=0.2,
    beta=0.0,
    reference: Qwen | None = None,
    temperature=1.0,
    n_ids=None,
    token_budget=16384,
    max_grad_norm=1.0,
) -> dict:
    """One optimizer step on Eq. 1 over all ranks' rollouts; `rollouts` are this rank's share. The objective
    is the mean over rollouts of the mean over a completion's tokens. log π_old is in rollout.logprobs. The KL
    weighs beta * rollout.wrong_share: what is unsolved stays explored, what is solved may become certain.
    beta > 0 needs a reference. All ranks skip a step whose gradient is not finite.

    Returns the means of `statistics` over all ranks' tokens that have a gradient, None without any;
    grad_norm before clipping; and skipped, 0 or 1."""
    device = model.device
    world = dist.get_world_size() if dist.is_initialized() else 1
    [n_rollouts] = all_reduce([len(rollouts)], device)
    # Rollouts with neither an advantage nor a KL have no gradient: they count only in the divisor.
    batches = micro_batches(
        [r for r in rollouts if r.advantage or beta * r.wrong_share], token_budget
    )
    [most] = all_reduce([len(batches)], device, dist.ReduceOp.MAX)
    sums = torch.zeros(len(STATISTICS) + 1, dtype=torch.float64, device=device)
    for i in range(int(most)):  # FSDP needs equally many forward passes on all ranks.
        batch = batches[i] if i < len(batches) else []  # An empty one runs a dummy token.
        # A rollout's advantage, KL weight and scale are repeated for each of its tokens.
        rows = [
            (x, r.advantage, beta * r.wrong_share, 1 / (n_rollouts * len(r.tokens)))
            for r in batch
            for x in r.logprobs
        ]
        old, advantage, weight, scale = (
            torch.tensor(rows, device=device).view(-1, 4).T
        )  # (N) each, as tokens
        new, kl = packed_logprobs(
            model, by_prompt(batch), temperature, n_ids, reference if beta else None
        )
        new, kl = new[: len(old)], kl[: len(old)]  # without an empty batch's dummy token
        objective = ((surrogate(new, old, advantage, clip) - weight * kl) * scale).sum()
        (
            -objective * world
        ).backward()  # FSDP divides by world; the divisor is of all ranks already
        sums += statistics(new, old, kl, clip)

    norm = clipped_step(model, optimizer, max_grad_norm)
    *totals, tokens = all_reduce(sums.tolist(), device)
    means = {name: total / tokens if tokens else None for name, total in zip(STATISTICS, totals)}
    return means | {"grad_norm": norm, "skipped": int(not math.isfinite(norm))}


def schedule(step: int, steps: int, warmup: float) -> float:
    """The learning rate's factor: linear warm-up over a share of the steps, then a cosine to 0 (App. A.1)."""
    warm = max(1, round(warmup * steps))
    if step < warm:
        return (step + 1) / warm
    return 0.5 * (1 + math.cos(math.pi * ((step - warm) / max(1, steps - warm))))


def my_share(rollouts: list[Rollout]) -> list[Rollout]:
    """This rank's part of some rollouts: neighbours, which share prompts, with as many tokens as others'."""
    ends = [*itertools.accumulate(len(r.tokens) for r in rollouts)]
    owners = [(end - 1) * dist.get_world_size() // ends[-1] for end in ends]
    return [rollout for rollout, owner in zip(rollouts, owners) if owner == dist.get_rank()]


def clipped_step(model, optimizer, max_grad_norm: float) -> float:
    """Take an optimizer step on the gradient clipped to max_grad_norm, if it is finite. Return its norm."""
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
    norm = float(
        norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    )  # the same on all ranks
    if math.isfinite(norm):
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm


STATISTICS = ("gap", "approx_kl", "clipfrac", "entropy", "kl")


@torch.no_grad()
def statistics(new, old, kl, clip):
    """The sums over tokens of |log π - log π_sampler|, KL(π_old ‖ π) as ρ - 1 - log ρ, whether ρ is clipped,
    -log π of what was sampled, and KL(π_ref ‖ π); and how many tokens these are."""
    log_ratio = new - old
    ratio = log_ratio.exp()
    clipped = (ratio - 1).abs() > clip
    per_token = (log_ratio.abs(), ratio - 1 - log_ratio, clipped, -new, kl, torch.ones_like(new))
    return torch.stack([x.sum() for x in per_token])


# ---- The packed row, micro-batches, ranks ------------------------------------------------------------------


def pack(groups, device):
    """Lay out groups [(prompt, completions)] as one row, as drawn in packed_logprobs: those four tensors,
    and the `attend` by which a completion sees its prompt and its own past."""
    ids, positions, targets, predictors = [], [], [], []
    sizes, layout = [], []
    for prompt, completions in groups:
        begin, P = len(ids), len(prompt)
        ids += prompt
        positions += range(P)
        for completion in completions:
            predictors += [begin + P - 1, *range(len(ids), len(ids) + len(completion) - 1)]
            positions += range(P, P + len(completion))
            targets += completion
            ids += completion
        sizes.append(len(ids) - begin)
        layout.append((P, *pad(P, completions, device)))

    def attend(layer_idx, q, k, v):  # q (1, H, T, D), k and v (1, Hkv, T, D)
        dtype = q.dtype
        y = []
        if device.type == "cpu":  # the fused kernel's backward pass in bf16 is slow there
            q, k, v = q.float(), k.float(), v.float()
        for *qkv, group in zip(q.split(sizes, 2), k.split(sizes, 2), v.split(sizes, 2), layout):
            y.append(attend_group(layer_idx, *qkv, *group))
        return torch.cat(y, 2).to(dtype)

    return *(torch.tensor(x, device=device) for x in (ids, positions, targets, predictors)), attend


def pad(P: int, completions, device):
    """For attention a group's completions are padded to the longest of them, L. Of the group above these are
    places      2 (1)| 3  4          (n, L)   where each token stands in its group; (padding)
    real        0      2  3          (S - P)  which of the n*L are no padding
    """
    lengths = torch.tensor([[len(completion)] for completion in completions])  # (n, 1)
    column = torch.arange(lengths.max())
    is_real = column < lengths  # (n, L)
    begins = P + lengths.cumsum(0) - lengths  # (n, 1)
    # Padding points at many places, as a GPU adds up the gradients of one in turn.
    places = torch.where(is_real, begins + column, column)  # (n, L)
    return places.to(device), is_real.flatten().nonzero()[:, 0].to(device)


def attend_group(layer_idx, q, k, v, P, places, real):
    """Attention in one group: its completions see the prompt and their own past, not each other.
    q (1, H, S, D), k and v (1, Hkv, S, D) -> (1, H, S, D)."""
    n, L = places.shape

    def own(x):  # (1, h, S, D) -> (n, h, L, D); the gradient of x[0][:, places] would be slower
        return x[0].index_select(1, places.flatten()).unflatten(1, (n, L)).transpose(0, 1)

    def seen(x):  # (1, Hkv, S, D) -> (n, Hkv, P+L, D)
        return torch.cat((x[:, :, :P].expand(n, -1, -1, -1), own(x)), 2)

    prompt = causal(layer_idx, q[:, :, :P], k[:, :, :P], v[:, :, :P])
    # A mask as a tensor would take the kernel of quadratic memory, and is_causal aligns at the upper left.
    mask = causal_lower_right(L, P + L)  # Padding is at the end: nobody sees it.
    y = F.scaled_dot_product_attention(own(q), seen(k), seen(v), attn_mask=mask, enable_gqa=True)
    y = y.transpose(1, 2).flatten(0, 1).index_select(0, real)  # (n, H, L, D) -> (S-P, H, D)
    return torch.cat((prompt, y.transpose(0, 1)[None]), 2)


HEAD_LOGITS = {"cuda": 1 << 27, "cpu": 1 << 22}  # logits in one tensor


def of_targets(model, hidden, targets, temperature, n_ids, reference=None, ref_hidden=None):
    """What packed_logprobs returns, (2, N), from the hidden states (N, C) that predict the targets (N) and
    those of the reference. It goes part by part, and the backward pass makes each part's logits again: all
    of them, (N, V), would take gigabytes.

    GRPO estimates the KL from the sampled token, by π_ref/π - log(π_ref/π) - 1. The expected gradient is that
    of KL(π_ref ‖ π), but single ones are huge where π is far below π_ref. So the KL itself is computed."""

    def all_logprobs(policy, hidden):  # (n, C) -> (n, V)
        logits = policy.logits(hidden)[:, :n_ids]
        return (logits if temperature == 1 else logits / temperature).log_softmax(-1)

    def of_part(hidden, target, ref_hidden):  # (n, C), (n), (n, C) -> (2, n)
        logp = all_logprobs(model, hidden)
        kl = torch.zeros(len(hidden), device=hidden.device)
        if reference:
            ref = all_logprobs(reference, ref_hidden).detach()
            kl = (ref.exp() * (ref - logp)).sum(-1)
        return torch.stack((logp.gather(1, target[:, None])[:, 0], kl))

    size = max(1, HEAD_LOGITS[model.device.type] // model.config.vocab_size)
    ref_hidden = ref_hidden if reference else hidden  # which then nobody looks at
    parts = zip(hidden.split(size), targets.split(size), ref_hidden.split(size))
    return torch.cat([checkpoint(of_part, *part, use_reentrant=False) for part in parts], 1)


def micro_batches(rollouts: list[Rollout], token_budget: int) -> list[list[Rollout]]:
    """Split rollouts into lists of at most `token_budget` tokens, or of one rollout that is longer. Those of
    a prompt stand together and by length, so that little is padded. A prompt counts once, and a list's first
    not at all: else a long prompt would fill the budget, and be computed again for every few completions."""
    batches, size = [], 0
    for r in sorted(rollouts, key=lambda r: (r.prompt_ids, len(r.tokens))):
        size += len(r.tokens)
        if batches and r.prompt_ids != batches[-1][-1].prompt_ids:
            size += len(r.prompt_ids)
        if not batches or size > token_budget:
            batches.append([])
            size = len(r.tokens)
        batches[-1].append(r)
    return batches


def by_prompt(batch: list[Rollout]):
    """A micro-batch as groups for packed_logprobs; an empty one as any token, so that it takes part."""
    groups = itertools.groupby(batch, lambda r: r.prompt_ids)
    return [(prompt, [r.tokens for r in rollouts]) for prompt, rollouts in groups] or [([0], [[0]])]


def all_reduce(values: list[float], device, op=dist.ReduceOp.SUM) -> list[float]:
    """The sum of each number over ranks, or what else op says."""
    total = torch.tensor(values, dtype=torch.float64, device=device)
    if dist.is_initialized():
        dist.all_reduce(total, op)
    return total.tolist()
