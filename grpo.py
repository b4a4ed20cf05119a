"""GRPO: turn the rewards of sampled rollouts into one update of the policy.

1. Sample. For each question q the policy writes a group of G completions o_1 … o_G. sample.py also
   keeps log π_old(o_it), the log-probability with which it drew token t of completion i.
2. Reward. workflow.py runs each completion's workflow and eval.py grades the answer. The reward is
   r_i = 0 (no workflow), 0.5 (wrong answer) or 1 (right answer); see `reward` in train.py.
3. Compare (Eq. 2, `advantages`). A completion's advantage is its reward minus the mean reward of
   its group, divided by the group's standard deviation:  A_i = (r_i - mean(r)) / std(r).
4. Score again (`packed_logprobs`). The policy being trained computes log π(o_it) for these tokens.
   A micro-batch is one row of tokens: each prompt appears once, followed by its completions.
5. Clip (`surrogate`). With the ratio ρ_it = π(o_it) / π_old(o_it), a token contributes
   S_it = min(ρ_it · A_i, clip(ρ_it, 1 - ε, 1 + ε) · A_i).
6. Average (Eq. 1, `update`) over the M completions of a minibatch and each completion's tokens:
   J = 1/M · Σ_i 1/|o_i| · Σ_t (S_it - β_i · KL_it),
   where KL_it = Σ_v π_ref(v) · log(π_ref(v) / π(v)) over all token ids v that could be sampled.
   The paper has no KL term (β = 0). Here β_i = β · (share of wrong completions in i's group).
7. Step (`clipped_step`). Clip the gradient of J to a norm of at most 1, then take one Adam step.

Read eval.py next."""

import itertools
import math
from inspect import signature

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import checkpoint

from model import Qwen, in_bf16_on_gpu
from workflow import Rollout

# If keys have fewer heads than queries, newer versions of torch require this argument. Older
# versions do not have it.
GQA = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}

# ---- Advantages (Eq. 2) --------------------------------------------------------------------------


def advantages(rewards, mask=None):
    """Return the advantage (r - mean) / std of each reward within its group (Eq. 2).

    For example, let right answers get 1 and wrong ones 0.5. Two of the first group's four rollouts
    are right (mean 0.75, standard deviation 0.25), and none of the second group's:

        advantages([[0.5, 0.5, 1.0, 1.0],          [[-1, -1, 1, 1],
                    [0.5, 0.5, 0.5, 0.5]])    ->    [ 0,  0, 0, 0]]

    Args:
        rewards: (Q, G), the rewards of the G rollouts of each of Q questions.
        mask: (Q, G), False for each rollout without a reward. These rollouts are left out of the
            mean and the standard deviation, and their advantage is 0.

    Returns:
        (Q, G) in fp32. A group of equal rewards gets zeros.
    """
    rewards = torch.as_tensor(rewards, dtype=torch.float32)
    mask = torch.ones_like(rewards) if mask is None else torch.as_tensor(mask).float()
    count = mask.sum(1).clamp(min=1)  # (Q)
    mean = (rewards * mask).sum(1) / count  # (Q)
    centred = (rewards - mean[:, None]) * mask  # (Q, G)
    # Equal rewards may differ from their mean by rounding: set such differences to 0.
    rounding = 1e-6 * mean.abs().clamp(min=1)  # (Q)
    centred[centred.abs() < rounding[:, None]] = 0.0
    std = ((centred**2).sum(1) / count).sqrt()  # (Q); the sum is divided by count, not count - 1
    return centred / std.clamp(min=1e-6)[:, None]


def set_advantages(questions: list[list[list[Rollout]]], cost_weight=0.0):
    """Set the `advantage` of every rollout (Eq. 2).

    A trajectory is a list of one rollout or, with recursion (§3.2), of a first round and the second
    round that continues it. All rounds of a trajectory get its advantage. A first round's reward
    counts a quarter: if two trajectories of a question have the rewards [1, 0.5] and [0, 1], the
    sums are 0.25 + 0.5 and 0 + 1, and the advantages are -1 and 1. If no trajectory of the question
    has a second round, rewards count in full.

    Args:
        questions: For each question, its trajectories. If the reward of a round is None, the
            trajectory influences no other trajectory, and its advantage is 0.
        cost_weight: How much advantage a trajectory loses for each dollar that it costs above the
            mean of its question's trajectories. This penalty is subtracted after Eq. 2. If it were
            part of the reward, the division by std would blow up even a tiny difference in cost.
    """
    for trajectories in questions:
        has_second_round = any(len(rounds) > 1 for rounds in trajectories)
        first_weight = 0.25 if has_second_round else 1.0
        rewards = [trajectory_reward(rounds, first_weight) for rounds in trajectories]
        mask = [reward is not None for reward in rewards]
        [row] = advantages([[reward or 0.0 for reward in rewards]], [mask]).tolist()

        known = [i for i, is_known in enumerate(mask) if is_known]
        if cost_weight and known:
            costs = {i: trajectories[i][-1].cost for i in known}  # dollars, for all rounds
            mean_cost = sum(costs.values()) / len(known)
            for i, cost in costs.items():
                row[i] -= cost_weight * (cost - mean_cost)

        for rounds, advantage in zip(trajectories, row):
            for rollout in rounds:
                rollout.advantage = advantage


def trajectory_reward(rounds: list[Rollout], first_weight: float) -> float | None:
    """Return the sum of the rounds' rewards, the first multiplied by first_weight (§3.2).

    Returns None if the reward of any round is None.
    """
    if any(rollout.reward is None for rollout in rounds):
        return None
    first, *second = [rollout.reward for rollout in rounds]
    return first_weight * first + sum(second)


def set_wrong_shares(groups: list[list[Rollout]]):
    """Set the `wrong_share` of every rollout: the share of its group's rollouts that are wrong.

    A rollout without a workflow counts as wrong, and one without a reward does not count. If no
    rollout of the group has a reward, the share is 1.
    """
    for group in groups:
        known = [rollout for rollout in group if rollout.reward is not None]
        wrong_share = sum(not rollout.right for rollout in known) / len(known) if known else 1.0
        for rollout in group:
            rollout.wrong_share = wrong_share


# ---- Log-probabilities of the completions' tokens ------------------------------------------------


def packed_logprobs(
    model: Qwen, groups, temperature=1.0, n_ids=None, reference: Qwen | None = None
):
    """Return log π and the KL to a reference for each token of the completions, with gradients.

    All groups are packed into one row of T tokens. For example, the prompt 5 6 with the completions
    7 and 8 9 is laid out as

        ids         5  6 | 7 | 8  9      (T)
        positions   0  1 | 2 | 2  3      (T)  each completion starts where its prompt ends
        targets            7   8  9      (N)  the tokens whose log-probabilities are wanted
        predictors         1   1  3      (N)  for each target, the place whose output predicts it

    A completion attends to its prompt and to itself, not to the other completions.

    Args:
        groups: [(prompt, completions)]. A prompt and each completion are lists of token ids.
        temperature, n_ids: The settings with which the completions were sampled.
        reference: The model of π_ref. None: the KL is 0.

    Returns:
        (2, N) in fp32: one column for each of the N completion tokens, in order. Row 0 is log π of
        the token. Row 1 is KL(π_ref ‖ π) between the two models' distributions for the token.
    """
    ids, positions, targets, predictors, attend = pack(groups, model.device)

    def predicting(hidden):  # (1, T, C) -> (N, C)
        return hidden[0, predictors]

    ref_hidden = None
    if reference:
        with torch.no_grad():
            ref_hidden = reference(ids[None], positions[None], attend, predicting)

    def head(hidden):  # (1, T, C) -> (2, N)
        hidden = predicting(hidden)
        return score_targets(model, hidden, targets, temperature, n_ids, reference, ref_hidden)

    return model(ids[None], positions[None], attend, head)


def token_logprobs(
    model: Qwen, prompt: list[int], completions: list[list[int]], temperature=1.0, n_ids=None
):
    """Return log π of each completion's tokens as a list of 1-D tensors, with gradients."""
    logprobs, _ = packed_logprobs(model, [(prompt, completions)], temperature, n_ids)
    return list(logprobs.split([len(completion) for completion in completions]))


# ---- The objective (Eq. 1) and the update --------------------------------------------------------


def surrogate(logprobs, old, advantage, clip):
    """Return min(ρA, clip(ρ, 1 - ε, 1 + ε)A) for each token, to be maximised. ρ is π / π_old.

    Eq. 1 prints one ratio ρ for a whole completion. Here, as in GRPO, each token has its own ratio.
    All arguments except clip (ε) are 1-D tensors with one number per token.
    """
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
) -> dict:
    """Take one optimizer step on Eq. 1 with the rollouts of all ranks.

    If the gradient is not finite, all ranks skip the step.

    Args:
        rollouts: This rank's share, with `advantage` and `wrong_share` set.
        clip: ε of Eq. 1.
        beta: The weight of the KL. It is multiplied by each rollout's wrong_share, so the policy
            keeps exploring the questions that it gets wrong, but can become certain about the
            questions that it solves.
        reference: π_ref; needed if beta > 0.
        temperature, n_ids: The settings with which the rollouts were sampled.
        token_budget: The maximum number of tokens in a micro-batch, not counting its first prompt.
            A completion that exceeds the budget gets a micro-batch to itself.

    Returns:
        {name: number}. Each of STATISTICS is a mean over the tokens of the rollouts, on all ranks,
        whose advantage or KL weight is not 0 (None if there are none). grad_norm is the gradient's
        norm before clipping. skipped is 1 if the step was skipped and 0 otherwise.
    """
    # Rollouts whose advantage and KL weight are both 0 have no gradient. They still count in Eq. 1,
    # which divides by the number of all rollouts.
    device = model.device
    with_gradient = [r for r in rollouts if r.advantage or beta * r.wrong_share]
    batches = micro_batches(with_gradient, token_budget)

    # FSDP gathers weights in every forward pass, so all ranks must run the same number of passes.
    # A rank that has no batch left runs a dummy rollout, whose loss is an empty sum.
    world = dist.get_world_size() if dist.is_initialized() else 1
    [n_rollouts] = all_reduce([len(rollouts)], device)
    [most_batches] = all_reduce([len(batches)], device, dist.ReduceOp.MAX)
    batches += [[]] * (int(most_batches) - len(batches))

    # The sum of each statistic over tokens, then the number of tokens.
    sums = torch.zeros(len(STATISTICS) + 1, dtype=torch.float64, device=device)
    for batch in batches:
        old, advantage, kl_weight, scale = token_table(batch, beta, n_rollouts, device)
        new, kl = packed_logprobs(
            model, by_prompt(batch), temperature, n_ids, reference if beta else None
        )
        # An empty batch was packed as a dummy rollout of one token: drop this token.
        new, kl = new[: len(old)], kl[: len(old)]
        per_token = surrogate(new, old, advantage, clip) - kl_weight * kl
        objective = (per_token * scale).sum()
        # `scale` already divides by the number of rollouts on all ranks. FSDP also averages the
        # gradients over ranks; the factor `world` undoes this.
        (-objective * world).backward()
        sums += statistics(new, old, kl, clip)

    norm = clipped_step(model, optimizer)
    *totals, tokens = all_reduce(sums.tolist(), device)
    means = {name: total / tokens if tokens else None for name, total in zip(STATISTICS, totals)}
    return means | {"grad_norm": norm, "skipped": int(not math.isfinite(norm))}


def token_table(batch: list[Rollout], beta: float, n_rollouts: float, device):
    """Return a tensor (4, N) of what Eq. 1 needs for each token, apart from log π and the KL.

    The four rows are log π_old, the advantage, the weight of the KL, and the weight of the token in
    the mean over rollouts and their tokens. `n_rollouts`, a float because it comes from all_reduce,
    counts the rollouts of all ranks.
    """
    tokens = []
    for rollout in batch:
        kl_weight = beta * rollout.wrong_share
        scale = 1 / (n_rollouts * len(rollout.tokens))
        for logprob in rollout.logprobs:
            tokens.append((logprob, rollout.advantage, kl_weight, scale))
    return torch.tensor(tokens, device=device).view(-1, 4).T


MAX_GRAD_NORM = 1.0  # A gradient with a larger norm is scaled down to this norm.


def clipped_step(model, optimizer) -> float:
    """Clip the gradient to MAX_GRAD_NORM, take an optimizer step, and clear the gradient.

    Returns the norm before clipping, which is the same on all ranks. If the norm is not finite, the
    optimizer takes no step.
    """
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
    if hasattr(norm, "full_tensor"):  # With FSDP, each rank has only its part of the norm.
        norm = norm.full_tensor()
    norm = float(norm)
    if math.isfinite(norm):
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm


STATISTICS = ("gap", "approx_kl", "clipfrac", "entropy", "kl")


@torch.no_grad()
def statistics(new, old, kl, clip):
    """Return a tensor: the sum over tokens of each of STATISTICS, then the number of tokens.

    gap:        |log π - log π_old|
    approx_kl:  ρ - 1 - log ρ, an estimate of KL(π_old ‖ π)
    clipfrac:   1 if ρ lies outside 1 - ε … 1 + ε, else 0
    entropy:    -log π, whose mean over sampled tokens estimates the entropy
    kl:         KL(π_ref ‖ π)
    """
    log_ratio = new - old
    ratio = log_ratio.exp()
    is_clipped = (ratio - 1).abs() > clip
    per_token = (log_ratio.abs(), ratio - 1 - log_ratio, is_clipped, -new, kl, torch.ones_like(new))
    return torch.stack([x.sum() for x in per_token])


# ---- The packed row ------------------------------------------------------------------------------


def pack(groups, device):
    """Lay out groups [(prompt, completions)] in one row, as the docstring of packed_logprobs shows.

    Returns ids, positions, targets and predictors as tensors, and the row's attention function.
    """
    ids, positions, targets, predictors = [], [], [], []
    lengths = []  # the number of tokens in each piece; a piece is a prompt or a completion
    seen = []  # for each piece, the places in the row that its last token attends to
    for prompt, completions in groups:
        prompt_places = range(len(ids), len(ids) + len(prompt))
        ids += prompt
        positions += range(len(prompt))
        lengths.append(len(prompt))
        seen.append([*prompt_places])
        for completion in completions:
            places = range(len(ids), len(ids) + len(completion))
            ids += completion
            positions += range(len(prompt), len(prompt) + len(completion))
            targets += completion
            predictors += [prompt_places[-1], *places[:-1]]
            lengths.append(len(completion))
            seen.append([*prompt_places, *places])

    row = [torch.tensor(x, device=device) for x in (ids, positions, targets, predictors)]
    return *row, packed_attention(lengths, seen, device)


def packed_attention(lengths: list[int], seen: list[list[int]], device):
    """Return the attention function for a packed row of pieces.

    Args:
        lengths: The number of tokens in each piece, T in all.
        seen: For each piece, the places in the row that its last token attends to. Attention is
            causal: a token that is n positions before the piece's last one attends to all of these
            places except the final n.
    """
    places = torch.tensor([*itertools.chain(*seen)], device=device)  # (S), where S = sum(n_seen)
    n_seen = [len(some) for some in seen]
    ends = []  # the pieces' boundaries, first among the T queries, then among the S keys
    for sizes in (lengths, n_seen):
        cumulative = [0, *itertools.accumulate(sizes)]
        ends.append(torch.tensor(cumulative, dtype=torch.int32, device=device))

    def attend(layer_idx, q, k, v):  # q (1, H, T, D), k and v (1, Hkv, T, D) -> (1, H, T, D)
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))  # (T, H or Hkv, D)
        # Gather in fp32, because backward sums the gradients that all completions of a prompt send
        # to the prompt's keys and values. CUDA sums them in an order that changes from run to run,
        # so a run on a GPU does not repeat bit for bit.
        k = k.float().index_select(0, places)  # (S, Hkv, D)
        v = v.float().index_select(0, places)
        if in_bf16_on_gpu(q):
            longest = (max(lengths), max(n_seen))
            k, v = k.to(q.dtype), v.to(q.dtype)
            # The window (-1, 0) makes attention causal.
            y = varlen_attn(q, k, v, *ends, *longest, window_size=(-1, 0), **GQA)
        else:
            y = attend_in_turn(q.float(), k, v, lengths, n_seen).to(q.dtype)
        return y.transpose(0, 1)[None]

    return attend


def attend_in_turn(q, k, v, lengths: list[int], n_seen: list[int]):
    """Compute varlen_attn's result with ordinary attention calls: q (T, H, D) -> (T, H, D).

    k and v (S, Hkv, D) hold the keys and values that the pieces attend to, one piece after another.
    Neighbouring pieces that have equal numbers of tokens and equal numbers of keys share one call.
    q, k and v are fp32, because on a CPU, torch's attention has a slow backward pass in bf16.
    """
    # Each batch is (number of pieces, tokens in a piece, keys that the piece's last token sees).
    batches = []
    for (length, n), some in itertools.groupby(zip(lengths, n_seen)):
        batches.append((len([*some]), length, n))
    q_parts = q.split([pieces * length for pieces, length, _ in batches])
    k_parts = k.split([pieces * n for pieces, _, n in batches])
    v_parts = v.split([pieces * n for pieces, _, n in batches])

    y = []
    for (pieces, length, n), *qkv in zip(batches, q_parts, k_parts, v_parts):
        qkv = [x.unflatten(0, (pieces, -1)).transpose(1, 2) for x in qkv]  # (pieces, …, D)
        # Align the causal mask so that a piece's last token attends to all n keys. is_causal=True
        # would align the first token with the first key.
        mask = causal_lower_right(length, n)
        part = F.scaled_dot_product_attention(*qkv, mask, enable_gqa=True)
        y.append(part.transpose(1, 2).flatten(0, 1))
    return torch.cat(y)


HEAD_LOGITS = {"cuda": 1 << 27, "cpu": 1 << 22}  # how many logits are computed at a time


def score_targets(model, hidden, targets, temperature, n_ids, reference=None, ref_hidden=None):
    """Return packed_logprobs' result (2, N), from hidden states (N, C) that predict targets (N).

    All logits together, (N, V), would take gigabytes. So they are computed one part at a time, and
    computed again in the backward pass instead of being kept.

    The KL is an exact sum over all ids. GRPO usually computes π_ref/π - log(π_ref/π) - 1 for the
    sampled token alone. Its gradient is, on average, that of the exact sum, but a single token's
    gradient is huge if its π is far below π_ref.
    """

    def score_part(hidden, target, ref_hidden):  # (n, C), (n), (n, C) -> (2, n)
        logp = all_logprobs(model, hidden, temperature, n_ids)
        kl = torch.zeros(len(hidden), device=hidden.device)
        if reference:
            ref = all_logprobs(reference, ref_hidden, temperature, n_ids).detach()
            kl = (ref.exp() * (ref - logp)).sum(-1)
        return torch.stack((logp.gather(1, target[:, None])[:, 0], kl))

    if reference is None:
        ref_hidden = hidden  # a placeholder, which score_part does not read
    size = max(1, HEAD_LOGITS[model.device.type] // model.config.vocab_size)
    parts = zip(hidden.split(size), targets.split(size), ref_hidden.split(size))
    return torch.cat([checkpoint(score_part, *part, use_reentrant=False) for part in parts], 1)


def all_logprobs(policy: Qwen, hidden, temperature, n_ids):
    """Return log π of all ids (below n_ids, if given): hidden (n, C) -> (n, ids) in fp32."""
    logits = policy.logits(hidden)[:, :n_ids]
    if temperature != 1:
        logits = logits / temperature
    return logits.log_softmax(-1)


# ---- Micro-batches and ranks ---------------------------------------------------------------------


def micro_batches(rollouts: list[Rollout], token_budget: int) -> list[list[Rollout]]:
    """Split rollouts into batches of at most `token_budget` tokens, not counting the first prompt.

    A rollout that exceeds the budget is a batch by itself. Rollouts are sorted by prompt, because a
    batch computes each prompt only once, and then by length, because attend_in_turn computes
    neighbours of equal length in one call.

    The tokens of a prompt count once per batch, but those of the batch's first prompt do not count.
    If they did, a long prompt could use up the budget, and would then be computed again for every
    few completions.
    """
    batches, size = [], 0
    for rollout in sorted(rollouts, key=lambda r: (r.prompt_ids, len(r.tokens))):
        size += len(rollout.tokens)
        if batches and rollout.prompt_ids != batches[-1][-1].prompt_ids:
            size += len(rollout.prompt_ids)
        if not batches or size > token_budget:
            batches.append([])
            size = len(rollout.tokens)
        batches[-1].append(rollout)
    return batches


def by_prompt(batch: list[Rollout]):
    """Return a batch as groups [(prompt, completions)].

    An empty batch becomes a dummy group: a prompt and a completion of one token each.
    """
    if not batch:
        return [([0], [[0]])]
    groups = itertools.groupby(batch, lambda rollout: rollout.prompt_ids)
    return [(prompt, [rollout.tokens for rollout in rollouts]) for prompt, rollouts in groups]


def all_reduce(values: list[float], device, op=dist.ReduceOp.SUM) -> list[float]:
    """Return each number summed over all ranks, or reduced with a different `op`."""
    total = torch.tensor(values, dtype=torch.float64, device=device)
    if dist.is_initialized():
        dist.all_reduce(total, op)
    return total.tolist()
