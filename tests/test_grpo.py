"""Tests that compare GRPO with numbers worked out by hand and with a loop that packs nothing.

Updates on two and on three ranks are compared with an update on a single rank.
"""

import copy
import datetime
import functools
import math
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import grpo
from grpo import (
    STATISTICS,
    advantages,
    by_prompt,
    micro_batches,
    packed_logprobs,
    set_advantages,
    set_wrong_shares,
    surrogate,
)
from grpo import token_logprobs, update
from model import Config, Qwen
from sample import generate
from train_runs import fork
from workers import Reply
from workflow import Rollout

torch.set_num_threads(1)
END = 2


def tiny(seed=0, **changes):
    """Return a random model in which every parameter influences the predictions.

    The predictions are neither uniform nor certain.
    """
    torch.manual_seed(seed)
    shape = dict(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        rope_theta=100.0,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        max_position_embeddings=128,
    )
    model = Qwen(Config(**(shape | changes)))
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.uniform_(0.5, 1.5) if "norm" in name else p.normal_(std=0.25)
    return model


@torch.no_grad()
def near(model):
    """Return a slightly different model, which serves as the reference policy."""
    other, g = copy.deepcopy(model), torch.Generator().manual_seed(0)
    for p in other.parameters():
        p.add_(0.03 * torch.randn(p.shape, generator=g))
    return other


def rollout(prompt, tokens, logprobs, advantage=0.0, **others):
    return Rollout(
        "", [], prompt_ids=prompt, tokens=tokens, logprobs=logprobs, advantage=advantage, **others
    )


def ids(n, seed):
    return torch.randint(36, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def every_logprob(model, prompt, tokens, temperature=1.0, n_ids=None):
    """Return the log-probabilities (T, V) of all ids at each place of one completion."""
    logits = model(torch.tensor([prompt + tokens]))[0, len(prompt) - 1 : -1, :n_ids]
    return (logits / temperature).log_softmax(-1)


def naive(model, prompt, tokens, temperature=1.0, n_ids=None):
    """Return the log-probabilities (T) of the tokens of one completion."""
    return every_logprob(model, prompt, tokens, temperature, n_ids)[
        torch.arange(len(tokens)), tokens
    ]


def same(a, b, tolerance=1e-5):
    """Assert that two lists of tensors agree; differences are relative to a tensor's norm."""
    a, b = list(a), list(b)
    assert len(a) == len(b)
    for i, (x, y) in enumerate(zip(a, b)):
        assert (x - y).norm() <= tolerance * y.norm() + 1e-9, (
            i,
            float((x - y).norm()),
            float(y.norm()),
        )


# --------------------------------------------------------------------------------------------------
# Advantages, surrogate and KL, by hand


def test_advantages_by_hand():
    """An advantage is (reward - mean) / std, where mean and std are those of the group alone."""
    rewards = [[0.0, 0.0, 1.0, 1.0], [0.5, 0.5, 0.5, 0.5], [0.0, 0.5, 0.5, 1.0]]
    r = math.sqrt(2)  # 0.5 divided by the std of [0, 0.5, 0.5, 1], whose variance is 1/8
    expected = torch.tensor([[-1.0, -1, 1, 1], [0, 0, 0, 0], [-r, 0, 0, r]])
    torch.testing.assert_close(advantages(rewards), expected)
    # In fp32, the mean of eleven rewards of 0.7 is not 0.7, but their advantages must still be 0.
    assert torch.full((11,), 0.7).sum() / 11 != torch.tensor(0.7)
    assert not advantages([[0.7] * 11]).any()
    # The sum of large rewards, which a user's function may give, is rounded more coarsely.
    for value in (1000.1, -1e6 + 0.3):
        assert not advantages([[value] * 7]).any()


@pytest.mark.parametrize("junk", [0.0, 100.0])
def test_lost_rollouts_are_in_no_statistic(junk):
    """A masked rollout gets an advantage of 0, and its reward influences no other advantage."""
    mask = [[True, True, False, True], [False] * 4, [False, True, False, False]]
    got = advantages([[0.0, 0.0, junk, 1.5], [junk, 1, 0, 1], [0, 1.0, 0, junk]], mask)
    scale = math.sqrt(0.5)  # the std of [0, 0, 1.5], whose mean is 0.5
    expected = torch.tensor([[-0.5, -0.5, 0, 1.0], [0, 0, 0, 0], [0, 0, 0, 0]]) / scale
    torch.testing.assert_close(got, expected)


def rounds_of(rewards):
    """Return a trajectory of one or two rounds with these rewards."""
    rounds = []
    for reward in rewards:
        previous = rounds[-1] if rounds else None
        rounds.append(rollout([1], [2], [0.0], reward=reward, previous=previous))
    return rounds


def test_a_first_round_and_the_second_that_continues_it_share_an_advantage():
    """A trajectory's reward is its second round's plus a quarter of its first round's (§3.2).

    If any round is lost, the whole trajectory is. A trajectory may have no second round.
    """
    questions = [
        [rounds_of([1.0, 0.5]), rounds_of([0.0, 1.0]), rounds_of([1.0, None])],  # rewards 0.75, 1
        [rounds_of([1.0, 1.0]), rounds_of([0.0]), rounds_of([0.0])],  # rewards 1.25, 0, 0
        [rounds_of([0.5]), rounds_of([1.0]), rounds_of([None])],
    ]
    set_advantages(questions)
    r = math.sqrt(2)  # The rewards 1.25, 0 and 0 have the mean m = 1.25 / 3 and the std √2 · m.
    for question, expected in zip(questions, [[-1, 1, 0], [r, -r / 2, -r / 2], [-1, 1, 0]]):
        for rounds, advantage in zip(question, expected):
            assert [x.advantage for x in rounds] == pytest.approx([advantage] * len(rounds), 1e-5)


def test_without_second_rounds_rewards_count_in_full(monkeypatch):
    """This matters if somebody replaces Eq. 2 by an advantage that does not divide by std."""
    monkeypatch.setattr("grpo.advantages", lambda rewards, mask: torch.tensor(rewards))
    question = [rounds_of([0.5]), rounds_of([1.0])]
    set_advantages([question])
    assert [rounds[0].advantage for rounds in question] == [0.5, 1.0]


def test_dollars_above_the_mean_of_the_group_cost_advantage():
    """The penalty for the cost is subtracted after the division by std.

    If the penalty were divided by std, too, a small difference in cost between two right answers
    would weigh as much as the difference between a right and a wrong answer.
    """
    group = [
        rollout([1], [2], [0.0], reward=x, right=x == 1.0, replies=[Reply("", 1, 1, cost)])
        for x, cost in ((1.0, 0.04), (1.0, 0.01), (0.5, 0.01), (0.5, 0.02), (None, None))
    ]
    set_advantages([[[r] for r in group]], cost_weight=5.0)
    assert [r.advantage for r in group] == pytest.approx([0.9, 1.05, -0.95, -1.0, 0.0], rel=1e-5)
    set_advantages([[[r] for r in group[:2]]], cost_weight=5.0)
    assert [r.advantage for r in group[:2]] == pytest.approx([-0.075, 0.075], rel=1e-5)


def test_the_kl_weighs_the_share_of_wrong_answers():
    for rights, share in (
        ([True, False, None, False], 2 / 3),
        ([True, True], 0.0),
        ([None, None], 1.0),
    ):
        group = [
            rollout([1], [2], [0.0], reward=right and float(right), right=right) for right in rights
        ]
        set_wrong_shares([group])
        assert [r.wrong_share for r in group] == pytest.approx([share] * len(group))


def test_surrogate_by_hand():
    """Eq. 1 at ε = 0.2: the smaller of the clipped and the unclipped product.

    The ratios lie above, below and inside the clip's range. The advantages have both signs, and
    there is one for all tokens or one for each.
    """
    ratio, old = torch.tensor([1.5, 0.5, 1.1, 1.0]), torch.tensor([-1.0, -2.0, -0.3, 0.0])
    new = old + ratio.log()
    each = torch.tensor([2.0, -2.0, 0.0, 1.0])
    for advantage, expected in (
        (2.0, [2.4, 1.0, 2.2, 2.0]),
        (-2.0, [-3.0, -1.6, -2.2, -2.0]),
        (each, [2.4, -1.6, 0.0, 1.0]),
    ):
        torch.testing.assert_close(surrogate(new, old, advantage, 0.2), torch.tensor(expected))


def test_kl_by_hand():
    """KL(π_ref ‖ π) is a sum over the ids that can be sampled.

    Here the policy gives three ids a probability of 1/3 each, and the reference gives them 1/2, 1/4
    and 1/4.
    """
    model = tiny(vocab_size=4, tie_word_embeddings=False)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    reference = copy.deepcopy(model)
    reference.logits = lambda hidden: torch.tensor([math.log(2), 0.0, 0.0, 7.0]).expand(
        len(hidden), 4
    )
    logprobs, kl = packed_logprobs(model, [([0, 1], [[2, 0, 1]])], n_ids=3, reference=reference)
    torch.testing.assert_close(logprobs, torch.full((3,), -math.log(3)))
    torch.testing.assert_close(kl, torch.full((3,), 0.5 * math.log(3 / 2) + 0.5 * math.log(3 / 4)))


# --------------------------------------------------------------------------------------------------
# Token log-probabilities: a packed row against one forward per rollout

# Case -> ([(length of a group's prompt, lengths of its completions)], arguments of packed_logprobs,
# changes to the model's shape).
CASES = {
    "odd lengths": ([(7, [3, 11, 1, 6])], {}, {}),
    "one token each": ([(5, [1, 1, 1])], {}, {}),
    "one rollout": ([(9, [5])], {}, {}),
    "temperature and ids": ([(6, [2, 8, 5])], dict(temperature=0.7, n_ids=37), {}),
    "untied, every head": (
        [(6, [2, 8, 5])],
        {},
        dict(tie_word_embeddings=False, num_key_value_heads=4),
    ),
    "one kv head": ([(6, [2, 8, 5])], dict(temperature=1.5), dict(num_key_value_heads=1)),
    "several groups": (
        [(7, [3, 11, 1]), (1, [4]), (12, [1, 1, 2, 5])],
        dict(temperature=0.7, n_ids=37),
        {},
    ),
}


@pytest.mark.parametrize("chunk", [2048, 4])
@pytest.mark.parametrize("case", CASES)
def test_packed_equals_one_forward_per_rollout(case, chunk, monkeypatch):
    """Log-probabilities and all gradients equal those of separate forward passes to 1e-5.

    The number of places whose logits are computed at once does not matter.
    """
    sizes, how, shape = CASES[case]
    model = tiny(**shape)
    monkeypatch.setitem(grpo.HEAD_LOGITS, "cpu", chunk * model.config.vocab_size)
    groups = []
    for i, (P, lengths) in enumerate(sizes):
        groups.append((ids(P, i), [ids(n, 50 * i + j) for j, n in enumerate(lengths, 10)]))
    completions = [(prompt, c) for prompt, some in groups for c in some]
    weights = [
        torch.randn(len(c), generator=torch.Generator().manual_seed(len(c))) for _, c in completions
    ]

    def run(logprobs):
        total = sum((w * x).sum() for w, x in zip(weights, logprobs))
        return [x.detach() for x in logprobs], torch.autograd.grad(total, list(model.parameters()))

    packed, _ = packed_logprobs(model, groups, **how)
    values, gradients = run(packed.split([len(w) for w in weights]))
    expected, reference = run([naive(model, prompt, c, **how) for prompt, c in completions])
    same(values, expected)
    same(gradients, reference)
    same(token_logprobs(model, *groups[0], **how), expected[: len(groups[0][1])])


def test_the_row_of_the_drawing():
    """The row is the example in the docstring of packed_logprobs, followed by a second group."""
    *row, _ = grpo.pack([([5, 6], [[7], [8, 9]]), ([3], [[4]])], torch.device("cpu"))
    assert [x.tolist() for x in row] == [
        [5, 6, 7, 8, 9, 3, 4],
        [0, 1, 2, 2, 3, 0, 1],
        [7, 8, 9, 4],
        [1, 1, 3, 5],
    ]


def written_out(q, k, v, owners):
    """Return the attention of a packed row (1, H, T, D), computed in double precision by a loop.

    owners: the (group, completion) of each token; 0 is the prompt, completions count from 1.
    """
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    y = torch.zeros(q.shape, dtype=torch.double)
    for i, (group, completion) in enumerate(owners):
        seen = [j for j in range(i + 1) if owners[j] in ((group, 0), (group, completion))]
        for head in range(q.shape[1]):
            scores = k[0, head, seen].double() @ q[0, head, i].double() / math.sqrt(q.shape[3])
            y[0, head, i] = scores.softmax(0) @ v[0, head, seen].double()
    return y


def varlen(q, k, v, q_ends, k_ends, max_q, max_k, *, window_size, enable_gqa=False):
    """Return what torch's varlen_attn returns according to its documentation."""
    assert window_size == (-1, 0), "causal, aligned at the lower right"
    assert {x.dtype for x in (q_ends, k_ends)} == {torch.int32}
    assert (max_q, max_k) == (q_ends.diff().max(), k_ends.diff().max())
    y = torch.empty_like(q)
    for i in range(len(q_ends) - 1):
        queries = slice(q_ends[i], q_ends[i + 1])
        keys = slice(k_ends[i], k_ends[i + 1])
        # (H or Hkv, n, D)
        own_q, its_k, its_v = (x.float().transpose(0, 1) for x in (q[queries], k[keys], v[keys]))
        its_k, its_v = (x.repeat_interleave(q.shape[1] // k.shape[1], 0) for x in (its_k, its_v))
        scores = own_q @ its_k.mT / math.sqrt(q.shape[2])
        n, m = scores.shape[1:]
        scores = scores.masked_fill(torch.ones(n, m).tril(m - n) == 0, -torch.inf)
        y[queries] = (scores.softmax(-1) @ its_v).transpose(0, 1).to(y.dtype)
    return y


@pytest.mark.parametrize("kernel", [False, True])
def test_attention_of_a_packed_row(kernel, monkeypatch):
    """Each token attends to its prompt and to its own completion up to itself.

    With `kernel`, the test takes CUDA's path, on which `varlen` stands in for torch's kernel.
    """
    dtype = torch.float32
    if kernel:  # take the code path of CUDA in bf16
        dtype = torch.bfloat16
        monkeypatch.setattr(grpo, "in_bf16_on_gpu", lambda x: x.dtype == torch.bfloat16)
        monkeypatch.setattr(grpo, "varlen_attn", varlen)
    groups = [([1] * 5, [[2], [3] * 4, [4] * 2]), ([5], [[6] * 3])]
    owners = []
    for i, (prompt, completions) in enumerate(groups):
        for j, piece in enumerate([prompt, *completions]):
            owners += [(i, j)] * len(piece)
    *_, attend = grpo.pack(groups, torch.device("cpu"))
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, h, len(owners), 16, generator=g).to(dtype) for h in (4, 2, 2))
    y = attend(0, q, k, v)
    assert y.dtype == dtype and y.shape == q.shape
    torch.testing.assert_close(
        y.double(), written_out(q, k, v, owners), rtol=0, atol=2e-2 if kernel else 1e-6
    )


def test_the_prompt_is_computed_once():
    """A single forward pass computes each prompt and each completion once, without padding."""
    model, shapes = tiny(), []
    model.register_forward_pre_hook(lambda _, args: shapes.append(tuple(args[0].shape)))
    packed_logprobs(
        model, [(ids(7, 0), [ids(n, n) for n in (3, 11, 1, 6)]), (ids(5, 1), [ids(2, 2)] * 3)]
    )
    assert shapes == [(1, 7 + 3 + 11 + 1 + 6 + 5 + 3 * 2)]


# --------------------------------------------------------------------------------------------------
# The update: packed against a written-out loop


def group(model, prompt_length, lengths, advantages, seed):
    """Return rollouts of one prompt. Each completion ends with END.

    Their recorded log-probabilities differ so much from the model's that some tokens are clipped.
    """
    prompt, g = ids(prompt_length, seed), torch.Generator().manual_seed(seed)
    made = []
    for i, (n, advantage) in enumerate(zip(lengths, advantages, strict=True)):
        tokens = ids(n - 1, 100 * seed + i) + [END]
        with torch.no_grad():
            old = naive(model, prompt, tokens) + 0.3 * torch.randn(n, generator=g)
        made.append(rollout(prompt, tokens, old.tolist(), advantage))
    return made


def four_groups(model):
    """Return groups of different sizes and lengths with different weights of the KL.

    All advantages of the third group are zero.
    """
    groups = [
        group(model, 7, [3, 11, 1, 6, 8], [1.0, -0.5, 0.7, -1.2, 0.0], 1),
        group(model, 1, [5, 2, 9], [0.4, 1.1, -1.5], 2),
        group(model, 12, [4, 4], [0.0, 0.0], 3),
        group(model, 4, [13, 1, 2, 7], [-0.3, 0.9, -0.9, 0.3], 4),
    ]
    return [[replace(r, wrong_share=i / 3) for r in some] for i, some in enumerate(groups)]


def all_rollouts(model):
    return sum(four_groups(model), [])


def loop(
    model,
    rollouts,
    clip=0.2,
    beta=0.0,
    reference=None,
    max_grad_norm=1e9,
    temperature=1.0,
    n_ids=None,
):
    """Compute the gradients of Eq. 1 and the statistics with one forward pass per rollout."""
    total, tokens, stats = 0.0, 0, dict.fromkeys(STATISTICS, 0.0)
    for r in rollouts:
        logp = every_logprob(model, r.prompt_ids, r.tokens, temperature, n_ids)
        new, kl = logp[torch.arange(len(r.tokens)), r.tokens], torch.zeros(len(r.tokens))
        if beta:
            with torch.no_grad():
                ref = every_logprob(reference, r.prompt_ids, r.tokens, temperature, n_ids)
            kl = (ref.exp() * (ref - logp)).sum(-1)
        gain = 0.0
        for p, old, k in zip(new, r.logprobs, kl):
            ratio = torch.exp(p - old)
            gain += min(ratio * r.advantage, ratio.clamp(1 - clip, 1 + clip) * r.advantage)
            gain -= beta * r.wrong_share * k
        total = total - gain / len(r.tokens) / len(rollouts)
        if r.advantage or beta * r.wrong_share:  # `update` computes nothing for other rollouts
            tokens += len(new)
            log_ratio = new.detach() - torch.tensor(r.logprobs)
            stats["gap"] += log_ratio.abs().sum()
            stats["approx_kl"] += (log_ratio.exp() - 1 - log_ratio).sum()
            stats["entropy"] -= new.detach().sum()
            stats["clipfrac"] += ((log_ratio.exp() < 1 - clip) | (log_ratio.exp() > 1 + clip)).sum()
            stats["kl"] += kl.detach().sum()
    gradients = torch.autograd.grad(total, list(model.parameters()))
    norm = math.sqrt(sum(float(g.norm()) ** 2 for g in gradients))
    stats = {name: float(value) / tokens for name, value in stats.items()}
    return [g * min(1, max_grad_norm / norm) for g in gradients], stats | {
        "grad_norm": norm,
        "skipped": 0,
    }


def clipped_update(*args, max_grad_norm=1.0, **how):
    """Call `update` with another MAX_GRAD_NORM."""
    with mock.patch.object(grpo, "MAX_GRAD_NORM", max_grad_norm):
        return update(*args, **how)


def step(model, rollouts, **how):
    """Return the gradients and the statistics of an update of a copy of the model.

    With SGD and a learning rate of 1, each parameter decreases by its gradient.
    """
    moved = copy.deepcopy(model)
    sgd = torch.optim.SGD(moved.parameters(), lr=1.0)
    stats = clipped_update(moved, sgd, rollouts, **{"max_grad_norm": 1e9, **how})
    return [
        old.detach() - new.detach() for old, new in zip(model.parameters(), moved.parameters())
    ], stats


@pytest.mark.parametrize("budget", [1, 20, 10_000])
@pytest.mark.parametrize(
    "how",
    [{}, dict(clip=0.1, max_grad_norm=0.7), dict(temperature=0.8, n_ids=37), dict(beta=0.3)],
    ids=str,
)
@pytest.mark.parametrize(
    "shape", [{}, dict(tie_word_embeddings=False, num_key_value_heads=1)], ids=str
)
def test_update_equals_a_written_out_loop(shape, how, budget):
    """Gradients and statistics equal those of a loop over all rollouts, for any token budget.

    The rollouts include a group whose advantages are all zero.
    """
    model = tiny(**shape)
    if "beta" in how:
        how = {**how, "reference": near(model)}
    rollouts = all_rollouts(model)
    gradients, stats = step(model, rollouts, token_budget=budget, **how)
    expected, expected_stats = loop(model, rollouts, **how)
    assert expected_stats["clipfrac"] > 0.2  # many tokens are clipped
    same(gradients, expected, 2e-5)
    assert stats == pytest.approx(expected_stats, rel=1e-4, abs=1e-7)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_step_that_is_not_finite_is_skipped(poison):
    """Weights and Adam's state stay as they were, so the next step is not affected."""
    model = tiny()
    rollouts = all_rollouts(model)
    broken = copy.deepcopy(rollouts)
    broken[0].advantage = poison
    other = copy.deepcopy(model)
    adam, other_adam = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, other))
    skipped = [update(model, adam, some)["skipped"] for some in (rollouts, broken, rollouts)]
    for _ in range(2):
        update(other, other_adam, rollouts)
    assert skipped == [0, 1, 0]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters()))


def test_rollouts_without_spread_move_nothing_but_count():
    """If the advantages of all rollouts are zero, no weight changes.

    Two such rollouts halve the step of two others, because all four count in the mean.
    """
    model = tiny()
    lone, still = group(model, 7, [3, 6], [1.0, -1.0], 1), group(model, 5, [4, 2], [0.0, 0.0], 3)
    moved, stats = step(model, still)
    assert not any(x.any() for x in moved)
    assert stats == dict.fromkeys(STATISTICS) | {"grad_norm": 0, "skipped": 0}
    same([2 * x for x in step(model, lone + still)[0]], step(model, lone)[0], 1e-4)


@pytest.mark.parametrize("how", [{}, dict(temperature=0.7, n_ids=37)], ids=str)
def test_sampler_and_trainer_are_one_policy(how):
    """The sampler's log-probabilities of a rollout equal those of training.

    So the first update after sampling clips no token.
    """
    model, prompts, rollouts = tiny(), [ids(9, 1), ids(4, 2)], []
    groups = generate(model, prompts, n=6, max_new_tokens=70, eos_id=END, **how)
    for prompt, completions in zip(prompts, groups):
        for c, advantage in zip(completions, [1.0, -1.0] * 3):
            rollouts.append(rollout(prompt, c.tokens, c.logprobs, advantage))
    assert {len(r.tokens) == 70 for r in rollouts} == {True, False}
    stats = update(model, torch.optim.SGD(model.parameters(), lr=0.1), rollouts, **how)
    assert stats["gap"] < 1e-5 and abs(stats["approx_kl"]) < 1e-5 and stats["clipfrac"] == 0


# --------------------------------------------------------------------------------------------------
# Micro-batches


@pytest.mark.parametrize("budget", [1, 15, 20, 33, 10_000])
def test_micro_batches_lose_and_repeat_nothing(budget):
    """Each rollout is in one batch, next to other rollouts of its prompt.

    A batch costs the tokens of its completions and of all its prompts but the first. Only a batch
    of a single rollout may exceed the budget.
    """
    rollouts = all_rollouts(tiny())
    order = torch.randperm(len(rollouts), generator=torch.Generator().manual_seed(0)).tolist()
    batches = micro_batches([rollouts[i] for i in order], budget)
    assert sorted(map(id, sum(batches, []))) == sorted(map(id, rollouts))
    for batch in batches:
        groups = by_prompt(batch)
        assert len({tuple(prompt) for prompt, _ in groups}) == len(groups)
        assert [c for _, completions in groups for c in completions] == [r.tokens for r in batch]
        cost = sum(len(r.tokens) for r in batch) + sum(len(prompt) for prompt, _ in groups[1:])
        assert cost <= budget or len(batch) == 1


@pytest.mark.parametrize(
    "budget, shapes, expected",
    [
        (12, [(10, [8, 2, 6, 4])], [[2, 4, 6], [8]]),
        (11, [(10, [8, 2, 6, 4])], [[2, 4], [6], [8]]),
        (13, [(3, [2, 2]), (4, [5])], [[2, 2, 5]]),
        (12, [(3, [2, 2]), (4, [5])], [[2, 2], [5]]),
        # The long prompt is computed only twice, because its tokens do not count.
        (8192, [(20_000, [250] * 64)], [[250] * 32, [250] * 32]),
    ],
)
def test_micro_batches_fill_the_budget_with_alike_lengths(budget, shapes, expected):
    rollouts = []
    for i, (P, lengths) in enumerate(shapes):
        rollouts += [rollout([i] * P, [3] * n, [0.0] * n) for n in lengths]
    assert [[len(r.tokens) for r in batch] for batch in micro_batches(rollouts, budget)] == expected


# --------------------------------------------------------------------------------------------------
# Ranks: real processes, gloo, fully_shard

# Number of ranks -> the groups of each rank.
SHARES = {1: [[0, 1, 2, 3]], 2: [[1], [3, 0, 2]], 3: [[0, 1, 2], [], [3]]}
# Run -> arguments of `clipped_update`. The runs "no spread" and "not finite" also change the
# advantages.
RUNS = {
    "plain": dict(token_budget=20, max_grad_norm=1e9),
    "clipped with KL": dict(
        token_budget=10_000, max_grad_norm=0.05, beta=0.3, temperature=0.9, n_ids=37
    ),
    "no spread": dict(token_budget=20),
    "not finite": dict(token_budget=20),
}


def outcome(run, share, shard=lambda model: model):
    """Update a model twice with the groups of `share`.

    Returns: the weights by name, the last statistics, and the number of forward passes.
    """
    model, how = tiny(tie_word_embeddings=run != "plain"), dict(RUNS[run])
    if "beta" in how:
        how["reference"] = shard(near(model))
    groups = four_groups(model)
    optimizer, forwards = torch.optim.SGD(shard(model).parameters(), lr=0.1, momentum=0.9), []
    model.register_forward_pre_hook(lambda *_: forwards.append(1))
    if run == "not finite":
        groups[3][0].advantage = math.inf
    rollouts = sum((groups[i] for i in share), [])
    for factor in (1.0, 0.5):
        for r in rollouts:
            r.advantage *= 0.0 if run == "no spread" else factor
        stats = clipped_update(model, optimizer, rollouts, **how)
    weights = {}
    for name, p in model.named_parameters():
        weights[name] = p.detach().full_tensor() if hasattr(p, "full_tensor") else p.detach()
    return weights, stats, len(forwards)


def shard(model):
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def one_rank(rank, folder):
    """Do all of RUNS on 3, 2 and 1 ranks, and save this rank's outcomes in the folder.

    A rank takes part if its number is below the number of ranks.
    """
    for world in (3, 2, 1):
        if rank < world:
            store, patience = f"file://{folder}/store{world}", datetime.timedelta(seconds=120)
            dist.init_process_group("gloo", store, patience, world, rank)
            seen = {run: outcome(run, SHARES[world][rank], shard) for run in RUNS}
            torch.save(seen, f"{folder}/{world}-{rank}.pt")
            dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Return {(number of ranks, rank): {run: outcome}}, computed by real processes."""
    folder = str(tmp_path_factory.mktemp("ranks"))
    processes = [fork(one_rank, rank, folder) for rank in range(3)]
    for process in processes:
        process.join(300)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    return {
        (world, rank): torch.load(f"{folder}/{world}-{rank}.pt")
        for world in SHARES
        for rank in range(world)
    }


one_process = functools.cache(outcome)  # without sharding


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("world", SHARES)
def test_any_number_of_ranks_gives_the_same_update(world, run, ranks):
    """Weights and statistics after two updates equal those of one process.

    If there are several ranks, they have different numbers of groups, and one of three has none.
    Each rank runs as many forward passes as the rank with the most batches needs.
    """
    weights, stats, _ = one_process(run, (0, 1, 2, 3))
    start = dict(tiny(tie_word_embeddings=run != "plain").named_parameters())
    still = run in ("no spread", "not finite")
    assert all(torch.equal(weights[name], start[name]) == still for name in weights)
    most = max(one_process(run, tuple(share))[2] for share in SHARES[world])
    assert (most == 0) == (run == "no spread")
    for rank in range(world):
        got, got_stats, forwards = ranks[world, rank][run]
        same([got[name] for name in weights], weights.values(), 2e-6)
        for name, value in stats.items():
            expected = (
                value if value is None else pytest.approx(value, rel=1e-4, abs=1e-7, nan_ok=True)
            )
            assert got_stats[name] == expected, name
        assert got_stats["skipped"] == (run == "not finite") and forwards == most
