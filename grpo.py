"""GRPO: advantages of given rewards → token log-probabilities → loss → update (Eqs. 1 and 2 of the paper).

The rollouts of one prompt are a group. A micro-batch goes through the model as one packed row: each prompt
once, then all its completions. Read eval.py next."""
import itertools

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right
from torch.utils.checkpoint import checkpoint

from model import Qwen, causal
from workflow import Rollout


def advantages(rewards, mask=None, std=True, question=None):
    """Eq. 2 for the rewards (Q, G) of Q groups: (r - mean) / std in each group, or r - mean with std=False.
    Returns (Q, G).

    mask (Q, G) is False for lost rollouts: they are in no statistic and get 0. Equal rewards also give 0.
    question (Q): groups with the same number are rounds of one question (§3.2). Each has its own mean, and
    all have one std: with its own std a first round would lose train.reward's factor of 1/4 again."""
    rewards = torch.as_tensor(rewards, dtype=torch.float32)
    mask = torch.ones_like(rewards) if mask is None else torch.as_tensor(mask).float()
    mean = (rewards * mask).sum(1) / mask.sum(1).clamp(min=1)  # (Q)
    centred = (rewards - mean[:, None]) * mask                 # (Q, G)
    centred[centred.abs() < 1e-6] = 0.0                        # Else rounding would become an advantage.
    if not std:
        return centred
    squares = over_rounds((centred ** 2).sum(1), question)     # (Q)
    counts = over_rounds(mask.sum(1), question)                # (Q)
    deviation = (squares / counts.clamp(min=1)).sqrt()         # (Q): the std, divided by n, not n - 1
    return centred / deviation.clamp(min=1e-6)[:, None]


def set_advantages(groups: list[list[Rollout]], std=True):
    """Write every rollout's advantage from its group's rewards; a reward of None is masked. The groups are of
    one size. Tasks of the same name and question are rounds of one question."""
    asked = [(group[0].task.name, group[0].task.question) for group in groups]
    question = [asked.index(pair) for pair in asked]  # the index of its first group
    rewards = [[r.reward or 0.0 for r in group] for group in groups]
    mask = [[r.reward is not None for r in group] for group in groups]
    for group, row in zip(groups, advantages(rewards, mask, std, question).tolist()):
        for rollout, advantage in zip(group, row):
            rollout.advantage = advantage


# ------------------------------------------------------------------------------------------------------------
# Token log-probabilities


def packed_logprobs(model: Qwen, groups, temperature=1.0, n_ids=None, reference: Qwen | None = None):
    """(2, N) with gradient, for the N tokens of the completions in groups [(prompt, completions)], in order.
    Row 0: log π of each token. Row 1: KL(π_ref ‖ π) over the vocabulary there, or 0 without a reference.
    temperature and n_ids: as in sampling."""
    # All groups become one row. The prompt 5 6 with completions 7 and 8 9 is laid out as
    #     ids         5  6 | 7 | 8  9      (T)
    #     positions   0  1 | 2 | 2  3      (T)  each completion goes on where its prompt ends
    #     targets            7   8  9      (N)  the tokens whose log-probabilities are wanted
    #     predictors         1   1  3      (N)  the places in the row whose output predicts them
    # `attend_group` (appendix): a prompt attends to itself once, each completion to [prompt | own past].
    ids, positions, targets, predictors, attend = pack(groups, model.device)
    ref_hidden = None
    if reference:
        with torch.no_grad():
            ref_hidden = reference(ids[None], positions[None], attend, lambda h: h[0, predictors])  # (N, C)

    def head(hidden):  # (1, T, C) -> (2, N)
        return of_targets(model, hidden[0, predictors], targets, temperature, n_ids, reference, ref_hidden)

    return model(ids[None], positions[None], attend, head)


# ------------------------------------------------------------------------------------------------------------
# The loss (Eq. 1) and the update


def surrogate(logprobs, old, advantage, clip, clip_high=0.0):
    """Eq. 1 without the KL, to be maximised: min(ρA, clip(ρ, 1-ε, 1+ε)A) with ρ = π/π_old, token by token
    (Eq. 1 prints one ρ per completion). All are 1-D over tokens. clip_high: the ε for ρ > 1, if different
    (arXiv 2503.14476)."""
    ratio = (logprobs - old).exp()
    clipped = ratio.clamp(1 - clip, 1 + (clip_high or clip))
    return torch.minimum(ratio * advantage, clipped * advantage)


def update(model: Qwen, optimizer, rollouts: list[Rollout], clip=0.2, beta=0.0, reference: Qwen | None = None,
           temperature=1.0, n_ids=None, token_budget=16384, max_grad_norm=1.0, clip_high=0.0, loss="sequence",
           max_new_tokens=0) -> dict:
    """One optimizer step on Eq. 1 over all ranks' rollouts; `rollouts` are this rank's share. log π_old is in
    completion.logprobs. All ranks skip a step whose gradient is not finite. beta > 0 needs a reference.
    loss: see `per_token`.

    Returns the means of `statistics` over all ranks' tokens that have a gradient, None without any;
    grad_norm before clipping; and skipped, 0 or 1."""
    device = model.device
    world = dist.get_world_size() if dist.is_initialized() else 1  # 1: ranks do not matter
    n_rollouts, n_tokens = all_reduce([len(rollouts), sum(n_written(r) for r in rollouts)], device)
    sums = torch.zeros(len(STATISTICS) + 1, dtype=torch.float64, device=device)
    # Without a KL, rollouts of advantage 0 have no gradient: they count only in the divisors.
    teaching = [r for r in rollouts if r.advantage or beta]
    # FSDP needs equally many micro-batches on all ranks. An empty one runs a dummy token.
    for batch in as_many_on_all_ranks(micro_batches(teaching, token_budget), device):
        # (N) each: a token's log π_old, advantage, and 1 / (n_rollouts · |o|), unless `loss` differs
        old, advantage, scale = per_token(batch, loss, n_rollouts, n_tokens, max_new_tokens, device)
        # by_prompt keeps the order, as micro_batches have put the rollouts of a prompt side by side.
        new, kl = packed_logprobs(model, by_prompt(batch), temperature, n_ids, reference if beta else None)
        new, kl = new[:len(old)], kl[:len(old)]  # without an empty batch's dummy token
        objective = ((surrogate(new, old, advantage, clip, clip_high) - beta * kl) * scale).sum()
        (-objective * world).backward()  # FSDP divides by world; the divisors are of all ranks already
        sums += statistics(new, old, kl, clip, clip_high or clip)

    norm = clipped_step(model, optimizer, max_grad_norm)
    *totals, tokens = all_reduce(sums.tolist(), device)
    means = {name: total / tokens if tokens else None for name, total in zip(STATISTICS, totals)}
    return means | {"grad_norm": norm, "skipped": int(not np.isfinite(norm))}


# ------------------------------------------------------------------------------------------------------------
# Appendix: the packed row, statistics, importance weights, micro-batches, devices, ranks


def token_logprobs(model: Qwen, prompt: list[int], completions: list[list[int]], temperature=1.0, n_ids=None):
    """log π of the tokens of a prompt's completions, a 1-D tensor for each, with gradient."""
    logprobs, _ = packed_logprobs(model, [(prompt, completions)], temperature, n_ids)
    return list(logprobs.split([len(completion) for completion in completions]))


LOSSES = ("sequence", "token", "constant")  # see `per_token`


def over_rounds(x, question):
    """The sum of x (Q) over all rounds of the same question (Q), if there are rounds."""
    if question is None:
        return x
    question = torch.as_tensor(question)
    return (question[:, None] == question).float() @ x  # (Q, Q) times (Q)


def per_token(batch: list[Rollout], loss: str, n_rollouts, n_tokens, max_new_tokens: int, device):
    """log π_old, the advantage and the scale of each of a batch's tokens: (3, N). loss says what a term is
    divided by: "sequence", as in GRPO, makes a mean over a rollout's tokens and then over rollouts; "token"
    is DAPO's, "constant" Dr. GRPO's (arXiv 2503.20783)."""
    old, advantage, scale = [], [], []
    for r in batch:
        n = n_written(r)
        divisors = {"sequence": n_rollouts * n, "token": n_tokens, "constant": n_rollouts * max_new_tokens}
        old += r.completion.logprobs
        advantage += [r.advantage * weight for weight in r.importance or [1.0] * n]
        scale += [1 / divisors[loss]] * n
    return to_device(np.array([old, advantage, scale], dtype=np.float32), device)


HEAD_LOGITS = {"cuda": 1 << 27, "cpu": 1 << 22}  # logits in one tensor


def of_targets(model, hidden, targets, temperature, n_ids, reference=None, ref_hidden=None):
    """What packed_logprobs returns, (2, N), from the hidden states (N, C) that predict the targets (N) and
    those of the reference. It goes part by part, and the backward pass makes each part's logits again: all
    of them, (N, V), would take gigabytes.

    GRPO estimates the KL from the sampled token, by π_ref/π - log(π_ref/π) - 1. The expected gradient is that
    of KL(π_ref ‖ π), but single ones are huge where π is far below π_ref. So the KL itself is computed."""
    def all_logprobs(policy, hidden):  # (n, C) -> (n, V)
        return (policy.logits(hidden)[:, :n_ids] / temperature).log_softmax(-1)

    def of_part(hidden, target, ref_hidden):  # (n, C), (n), (n, C) -> (2, n)
        logp = all_logprobs(model, hidden)
        kl = torch.zeros(len(hidden), device=hidden.device)
        if reference:
            ref = all_logprobs(reference, ref_hidden).detach()
            kl = (ref.exp() * (ref - logp)).sum(-1)
        return torch.stack((logp.gather(1, target[:, None])[:, 0], kl))

    size = max(1, HEAD_LOGITS[model.device.type] // model.config.vocab_size)
    ref_parts = ref_hidden.split(size) if reference else itertools.repeat(None)
    parts = zip(hidden.split(size), targets.split(size), ref_parts)
    return torch.cat([checkpoint(of_part, *part, use_reentrant=False) for part in parts], 1)


def pack(groups, device):
    """Lay out groups [(prompt, completions)] as one row, as drawn in packed_logprobs: those four tensors,
    and the `attend` by which a completion sees its prompt and its own past."""
    ids, positions, targets, predictors = [], [], [], []
    sizes, shapes, tables = [], [], []
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
        shapes.append((P, len(completions)))
        tables += pad(P, completions)
    ids, positions, targets, predictors, *tables = in_one_copy(
        [ids, positions, targets, predictors, *tables], device)
    layout = [(*shape, places, real) for shape, places, real in zip(shapes, tables[::2], tables[1::2])]

    def attend(layer_idx, q, k, v):  # q (1, H, T, D), k and v (1, Hkv, T, D)
        dtype = q.dtype
        y = []
        if device.type == "cpu":  # the fused kernel's backward pass in bf16 is slow there
            q, k, v = q.float(), k.float(), v.float()
        for *qkv, group in zip(q.split(sizes, 2), k.split(sizes, 2), v.split(sizes, 2), layout):
            y.append(attend_group(layer_idx, *qkv, *group))
        return torch.cat(y, 2).to(dtype)

    return ids, positions, targets, predictors, attend


def pad(P: int, completions):
    """For attention a group's completions are padded to the longest of them, L. Of the group above these are

        places      2 (1)| 3  4          (n * L)  where each token stands in its group; (padding)
        real        0      2  3          (S - P)  which of the n * L are no padding
    """
    lengths = np.array([len(completion) for completion in completions])
    column = np.arange(lengths.max())
    is_real = column < lengths[:, None]                         # (n, L)
    begins = P + lengths.cumsum() - lengths                     # (n)
    # Padding points at many places, as a GPU adds up the gradients of one in turn.
    places = np.where(is_real, begins[:, None] + column, column)  # (n, L)
    return places.flatten(), np.flatnonzero(is_real)


def attend_group(layer_idx, q, k, v, P, n, places, real):
    """Attention in one group: its completions see the prompt and their own past, not each other.
    q (1, H, S, D), k and v (1, Hkv, S, D) -> (1, H, S, D)."""
    prompt = causal(layer_idx, q[:, :, :P], k[:, :, :P], v[:, :, :P])
    places = places.view(n, -1)                                 # (n, L)
    rows = []
    for x in (k, v):
        before = x[:, :, :P].expand(n, -1, -1, -1)              # (n, Hkv, P, D), a view
        own = x[0][:, places].transpose(0, 1)                   # (n, Hkv, L, D)
        rows.append(torch.cat((before, own), 2))
    own = q[0][:, places].transpose(0, 1)                       # (n, H, L, D)
    mask = causal_lower_right(own.shape[2], rows[0].shape[2])   # Padding is at the end: nobody sees it.
    y = F.scaled_dot_product_attention(own, *rows, attn_mask=mask, enable_gqa=True)
    y = y.transpose(1, 2).flatten(0, 1)                         # (n*L, H, D)
    y = y.index_select(0, real).transpose(0, 1)[None]           # (1, H, S-P, D)
    return torch.cat((prompt, y), 2)


STATISTICS = ("gap", "approx_kl", "clipfrac", "entropy", "kl")


@torch.no_grad()
def statistics(new, old, kl, clip, clip_high):
    """The sums over tokens of |log π - log π_sampler|, KL(π_old ‖ π) as ρ - 1 - log ρ, whether ρ is clipped,
    -log π of what was sampled, and KL(π_ref ‖ π); and how many tokens these are."""
    log_ratio = new - old
    ratio = log_ratio.exp()
    clipped = (ratio < 1 - clip) | (ratio > 1 + clip_high)
    per_token = (log_ratio.abs(), ratio - 1 - log_ratio, clipped, -new, kl, torch.ones_like(new))
    return torch.stack([x.sum() for x in per_token])


def clipped_step(model, optimizer, max_grad_norm: float) -> float:
    """An optimizer step on the gradient clipped to max_grad_norm, if it is finite. Returns its norm."""
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
    norm = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)  # the same on all ranks
    if np.isfinite(norm):
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm


@torch.no_grad()
def set_importance(model: Qwen, rollouts, cap, temperature=1.0, n_ids=None, token_budget=16384) -> float:
    """Set each token's truncated importance weight, min(π_trainer / π_sampler, cap), which undoes how the two
    programs differ (fengyao.notion.site/off-policy-rl). The log-probabilities become the trainer's: from then
    on ρ is to its own policy before the update. Returns the gap, of which `update` then sees none."""
    far, tokens = 0.0, 0
    for batch in as_many_on_all_ranks(micro_batches(rollouts, token_budget), model.device):
        logprobs, _ = packed_logprobs(model, by_prompt(batch), temperature, n_ids)
        lengths = [n_written(r) for r in batch]
        for r, new in zip(batch, logprobs[:sum(lengths)].cpu().split(lengths)):
            log_ratio = new - torch.tensor(r.completion.logprobs)
            r.importance = log_ratio.exp().clamp(max=cap).tolist()
            r.completion.logprobs = new.tolist()
            far += log_ratio.abs().sum().item()
            tokens += len(new)
    if hasattr(model, "reshard"):  # FSDP leaves that to a backward pass, which may not come
        model.reshard()
    far, tokens = all_reduce([far, tokens], model.device)
    return far / max(tokens, 1)


def n_written(rollout: Rollout) -> int:
    return len(rollout.completion.tokens)


def micro_batches(rollouts: list[Rollout], token_budget: int) -> list[list[Rollout]]:
    """Split rollouts into lists of at most `token_budget` tokens, or of one rollout that is longer. Those of
    a prompt stand together and by length, so that little is padded. A prompt counts once, and a list's first
    not at all: else a long prompt would fill the budget, and be computed again for every few completions."""
    batches = []
    size = 0
    for r in sorted(rollouts, key=lambda r: (r.prompt, n_written(r))):
        cost = n_written(r)
        if batches and r.prompt != batches[-1][-1].prompt:
            cost += len(r.prompt)
        if not batches or size + cost > token_budget:
            batches.append([])
            size = 0
            cost = n_written(r)
        batches[-1].append(r)
        size += cost
    return batches


def by_prompt(batch: list[Rollout]):
    """A micro-batch as groups for packed_logprobs; an empty one as any token, so that it takes part."""
    groups = []
    for prompt, rollouts in itertools.groupby(batch, lambda r: r.prompt):
        groups.append((prompt, [r.completion.tokens for r in rollouts]))
    return groups or [([0], [[0]])]


def in_one_copy(lists, device) -> list:
    """Lists of integers as tensors on the device, in one copy."""
    flat = np.concatenate([np.array(x, dtype=np.int64) for x in lists])
    return to_device(flat, device).split([len(x) for x in lists])


def to_device(array, device):
    """A numpy array as a tensor on the device. The copy does not wait for what the device is doing."""
    if device.type == "cuda":
        return torch.from_numpy(array).pin_memory().to(device, non_blocking=True)
    return torch.from_numpy(array)


def as_many_on_all_ranks(batches: list, device):
    """This rank's micro-batches, then empty ones until every rank has as many: FSDP's collectives would wait
    for ever for a rank that leaves early."""
    [most] = all_reduce([len(batches)], device, dist.ReduceOp.MAX)
    return batches + [[]] * (int(most) - len(batches))


def all_reduce(values: list[float], device, op=dist.ReduceOp.SUM) -> list[float]:
    """The sum of each number over ranks, or what else op says."""
    total = torch.tensor(values, dtype=torch.float64, device=device)
    if dist.is_initialized():
        dist.all_reduce(total, op)
    return total.tolist()
