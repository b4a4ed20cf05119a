"""GRPO against hand-worked numbers and a loop without packing."""
import copy
import math

import numpy as np
import pytest
import torch

import grpo
from grpo import (
    advantages, by_prompt, micro_batches, packed_logprobs, set_advantages, set_importance, surrogate,
    token_logprobs, update)
from model import Config, Qwen
from sample import Completion, generate
from workflow import Rollout, Task

torch.set_num_threads(1)
END = 2


def tiny(seed=0, **changes):
    """A random model whose predictions are neither flat nor certain and in which every parameter counts."""
    torch.manual_seed(seed)
    model = Qwen(
        Config(
            **{
                **dict(
                    vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                    num_attention_heads=4, num_key_value_heads=2, rope_theta=100.0, rms_norm_eps=1e-6,
                    tie_word_embeddings=True, max_position_embeddings=128),
                **changes,
            }
        )
    )
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.uniform_(0.5, 1.5) if "norm" in name else p.normal_(std=0.25)
    return model


@torch.no_grad()
def near(model):
    """A model that differs a little: a reference policy."""
    other, g = copy.deepcopy(model), torch.Generator().manual_seed(0)
    for p in other.parameters():
        p.add_(0.03 * torch.randn(p.shape, generator=g))
    return other


def rollout(prompt, tokens, logprobs, advantage=0.0, reward=None, task=None):
    """As roll_out makes them, of which the update needs these."""
    return Rollout(task, "", prompt, Completion(tokens, logprobs, True), reward=reward, advantage=advantage)


def ids(n, seed):
    return torch.randint(36, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def every_logprob(model, prompt, tokens, temperature=1.0, n_ids=None):
    """Log-probabilities (T, V) of all ids at each position of one completion, by a forward of its own."""
    return (
        model(torch.tensor([prompt + tokens]))[0, len(prompt) - 1 : -1, :n_ids] / temperature).log_softmax(-1)


def naive(model, prompt, tokens, temperature=1.0, n_ids=None):
    """Log-probabilities (T) of one completion."""
    return every_logprob(model, prompt, tokens, temperature, n_ids)[torch.arange(len(tokens)), tokens]


def same(a, b, tolerance=1e-5):
    """Two lists of tensors agree, each relative to its own size."""
    a, b = list(a), list(b)
    assert len(a) == len(b)
    for i, (x, y) in enumerate(zip(a, b)):
        assert (x - y).norm() <= tolerance * y.norm() + 1e-9, (i, float((x - y).norm()), float(y.norm()))


# ------------------------------------------------------------------------------------------------------------
# Advantages and the surrogate, by hand


def test_advantages_by_hand():
    """(r - mean) / std with the group's own std; a group without spread gets zeros; groups do not touch each
    other."""
    rewards = [[0.0, 0.0, 1.0, 1.0], [0.5, 0.5, 0.5, 0.5], [0.0, 0.5, 0.5, 1.0]]
    r = math.sqrt(2)  # of [0, .5, .5, 1]: mean .5, variance 1/8, so ±.5 is ±√2
    torch.testing.assert_close(
        advantages(rewards), torch.tensor([[-1.0, -1, 1, 1], [0, 0, 0, 0], [-r, 0, 0, r]]))


@pytest.mark.parametrize("std", [True, False])
def test_rounding_is_no_spread(std):
    """Eleven equal rewards whose mean is not quite theirs in fp32 still get exactly zero, so that the group
    is left out."""
    assert torch.full((11,), 0.7).sum() / 11 != torch.tensor(0.7)
    assert not advantages([[0.7] * 11], std=std).any()


def test_advantages_without_std_are_only_centred():
    """std=False: r - mean, as it is."""
    torch.testing.assert_close(advantages([[0.0, 0.5, 1.0, 0.5, 0.0, 1.0, 1.0, 0.0]], std=False),
                               torch.tensor([[-0.5, 0, 0.5, 0, -0.5, 0.5, 0.5, -0.5]]))
    torch.testing.assert_close(
        advantages(torch.tensor([[1.0, 0, 0, 0]]), std=False), torch.tensor([[0.75, -0.25, -0.25, -0.25]]))


def test_rounds_of_one_question_share_their_std():
    """§3.2: each round has its own mean, both the std over all their rollouts; a round whose rewards are a
    quarter weighs a quarter."""
    # Squares about the means: 2 × 1/64, 2 × 1/4; of the other question 2 × 1/16
    rewards = [[0.0, 0.25], [0.0, 1.0], [0.5, 1.0]]
    std = math.sqrt((2 / 64 + 2 / 4) / 4)
    expected = torch.tensor([[-0.125 / std, 0.125 / std], [-0.5 / std, 0.5 / std], [-1, 1]])
    torch.testing.assert_close(advantages(rewards, question=[1, 1, 2]), expected)
    torch.testing.assert_close(
        advantages([rewards[0], rewards[2], rewards[1]], question=[1, 2, 1]), expected[[0, 2, 1]])
    masked = advantages([[0.0, 0.25, 9.0], [0.0, 1.0, 9.0]], [[True, True, False]] * 2, question=[1, 1])
    torch.testing.assert_close(masked, torch.cat([expected[:2], torch.zeros(2, 1)], 1))
    assert not advantages([[0.5, 0.5], [1.0, 1.0]], [[False] * 2, [True] * 2], question=[1, 1]).any()


@pytest.mark.parametrize("std", [True, False])
def test_masked_rollouts_are_in_no_statistic(std):
    """What is masked gets 0 and changes nothing for the others, whatever reward stands there; a group all
    masked is zeros."""
    mask = [[True, True, False, True], [False] * 4, [False, True, False, False]]
    got = [
        advantages([[0.0, 0.0, junk, 1.5], [junk, 1, 0, 1], [0, 1.0, 0, junk]], mask, std)
        for junk in (0.0, 100.0)]
    scale = math.sqrt(0.5) if std else 1  # of [0, 0, 1.5]: mean .5, variance .5
    for a in got:
        torch.testing.assert_close(
            a, torch.tensor([[-0.5, -0.5, 0, 1.0], [0, 0, 0, 0], [0, 0, 0, 0]]) / scale)


def test_surrogate_by_hand():
    """Eq. 1 at ε = 0.2: the lesser of clipped and unclipped, on both sides, for both signs; one advantage or
    one a token."""
    ratio, old = torch.tensor([1.5, 0.5, 1.1, 1.0]), torch.tensor([-1.0, -2.0, -0.3, 0.0])
    new = old + ratio.log()
    torch.testing.assert_close(surrogate(new, old, 2.0, 0.2), torch.tensor([2.4, 1.0, 2.2, 2.0]))
    torch.testing.assert_close(surrogate(new, old, -2.0, 0.2), torch.tensor([-3.0, -1.6, -2.2, -2.0]))
    torch.testing.assert_close(
        surrogate(new, old, torch.tensor([2.0, -2.0, 0.0, 1.0]), 0.2), torch.tensor([2.4, -1.6, 0.0, 1.0]))
    # Another ε above 1
    torch.testing.assert_close(surrogate(new, old, 2.0, 0.2, 0.4), torch.tensor([2.8, 1.0, 2.2, 2.0]))
    torch.testing.assert_close(surrogate(new, old, -2.0, 0.2, 0.4), torch.tensor([-3.0, -1.6, -2.2, -2.0]))


def test_surrogate_gradient_by_hand():
    """d/d log π is ρA, and 0 where the clip holds: above 1 + ε for a good rollout, below 1 - ε for a bad
    one."""
    for advantage, expected in ((2.0, [0.0, 1.0, 2.2]), (-2.0, [-3.0, 0.0, -2.2])):
        new = torch.tensor([1.5, 0.5, 1.1]).log().requires_grad_()
        surrogate(new, torch.zeros(3), advantage, 0.2).sum().backward()
        torch.testing.assert_close(new.grad, torch.tensor(expected))


def test_kl_term_by_hand():
    """KL(π_ref ‖ π) over the ids that can be sampled: here the policy is even over three, the reference is
    1/2, 1/4, 1/4."""
    model, shift = tiny(vocab_size=4, tie_word_embeddings=False), torch.tensor([math.log(2), 0.0, 0.0, 7.0])
    with torch.no_grad():
        model.lm_head.weight.zero_()
    reference = copy.deepcopy(model)
    reference.logits = lambda hidden: shift.expand(len(hidden), 4)
    logprobs, kl = packed_logprobs(model, [([0, 1], [[2, 0, 1]])], n_ids=3, reference=reference)
    torch.testing.assert_close(logprobs, torch.full((3,), -math.log(3)))
    torch.testing.assert_close(kl, torch.full((3,), 0.5 * math.log(3 / 2) + 0.5 * math.log(3 / 4)))


def test_kl_term_has_the_estimators_gradient_on_average():
    """The gradient of KL(π_ref ‖ π) is that of GRPO's r - log r - 1, averaged over every token the policy can
    draw."""
    model, prompt = tiny(), ids(5, 0)
    reference, weights = near(model), list(model.parameters())
    _, kl = packed_logprobs(model, [(prompt, [[0]])], reference=reference)
    with torch.no_grad():
        ref = reference(torch.tensor([prompt]))[0, -1].log_softmax(-1)
    logp = model(torch.tensor([prompt]))[0, -1].log_softmax(-1)
    estimate = (logp.exp().detach() * ((ref - logp).exp() - (ref - logp) - 1)).sum()
    same(torch.autograd.grad(kl.sum(), weights), torch.autograd.grad(estimate, weights))


def test_advantages_of_groups():
    """set_advantages: None is masked, rounds of one question share their std, and the same question asked
    again does not."""
    def group(name, question, rewards):
        task = Task(question, [], name=name)
        return [rollout([1], [2], [0.0], reward=reward, task=task) for reward in rewards]

    made = [
        group("7/0", "a", [0.0, 0.25, None]), group("7/1", "a", [0.5, 1.0, 1.0]),
        group("7/0", "a", [0.0, None, 1.0]), group("7/2", "a", [None] * 3)]
    set_advantages(made)
    rewards = [[r.reward or 0.0 for r in g] for g in made]
    mask = [[r.reward is not None for r in g] for g in made]
    expected = advantages(rewards, mask, question=[0, 1, 0, 2])
    torch.testing.assert_close(torch.tensor([[r.advantage for r in g] for g in made]), expected)
    assert (
        expected[0, 0] != advantages(rewards, mask)[0, 0]
        and made[0][2].advantage == 0 == made[3][1].advantage)
    set_advantages(made, std=False)
    assert [r.advantage for r in made[0]] == [-0.125, 0.125, 0]


# ------------------------------------------------------------------------------------------------------------
# Token log-probabilities: a packed row against one forward per rollout

CASES = {  # the lengths of each group's prompt and completions; how; the model's shape
    "odd-lengths": ([(7, [3, 11, 1, 6])], {}, {}),
    "one-token-each": ([(5, [1, 1, 1])], {}, {}),
    "one-token-prompt": ([(1, [4, 1, 9])], {}, {}),
    "one-rollout": ([(9, [5])], {}, {}),
    "temperature-and-ids": ([(6, [2, 8, 5])], dict(temperature=0.7, n_ids=37), {}),
    "untied-every-head": ([(6, [2, 8, 5])], {}, dict(tie_word_embeddings=False, num_key_value_heads=4)),
    "one-kv-head": ([(6, [2, 8, 5])], dict(temperature=1.5), dict(num_key_value_heads=1)),
    "several-groups": ([(7, [3, 11, 1]), (1, [4]), (12, [1, 1, 2, 5])], dict(temperature=0.7, n_ids=37), {}),
}


@pytest.mark.parametrize("chunk", [2048, 4])
@pytest.mark.parametrize("case", CASES)
def test_packed_equals_one_forward_per_rollout(case, chunk, monkeypatch):
    """Values, and the gradient of every parameter, equal the naive forward's to 1e-5, whatever the head's
    chunk."""
    sizes, how, shape = CASES[case]
    model = tiny(**shape)
    monkeypatch.setitem(grpo.HEAD_LOGITS, "cpu", chunk * model.config.vocab_size)
    groups = [
        (ids(P, i), [ids(n, 50 * i + j) for j, n in enumerate(lengths, 10)])
        for i, (P, lengths) in enumerate(sizes)]
    weights = [
        torch.randn(n, generator=torch.Generator().manual_seed(n)) for _, lengths in sizes for n in lengths]

    def run(logprobs):
        gradients = torch.autograd.grad(
            sum((w * x).sum() for w, x in zip(weights, logprobs)), list(model.parameters()))
        return [x.detach() for x in logprobs], gradients

    if len(groups) == 1:
        packed = token_logprobs(model, *groups[0], **how)
    else:
        packed = packed_logprobs(model, groups, **how)[0].split([len(w) for w in weights])
    values, gradients = run(packed)
    expected, reference = run(
        [naive(model, prompt, c, **how) for prompt, completions in groups for c in completions])
    assert [len(v) for v in values] == [len(w) for w in weights]
    same(values, expected)
    same(gradients, reference)


def test_the_row_of_three_tokens():
    """The example in the docstrings of pack and pad, and a second group after it."""
    *row, _ = grpo.pack([([5, 6], [[7], [8, 9]]), ([3], [[4]])], torch.device("cpu"))
    assert [x.tolist() for x in row] == [
        [5, 6, 7, 8, 9, 3, 4], [0, 1, 2, 2, 3, 0, 1], [7, 8, 9, 4], [1, 1, 3, 5]]
    assert [x.tolist() for x in grpo.pad(2, [[7], [8, 9]])] == [[2, 1, 3, 4], [0, 2, 3]]
    assert [x.tolist() for x in grpo.pad(1, [[4]])] == [[1], [0]]


def test_no_place_is_padding_often():
    """CUDA adds the gradients of equal indices one after the other: were all padding one token's, thousands of
    additions would follow each other in every layer."""
    places, real = grpo.pad(9, [ids(length, length) for length in range(1, 65)])
    assert len(places) == 64 * 64 and len(real) == 64 * 65 // 2
    assert places.min() >= 0 and places.max() < 9 + len(real) and np.bincount(places).max() <= 64


def test_the_prompt_is_computed_once():
    """One forward over a row that holds each prompt once and each completion once, without padding."""
    model, shapes = tiny(), []
    model.register_forward_pre_hook(lambda _, args: shapes.append(tuple(args[0].shape)))
    packed_logprobs(model, [(ids(7, 0), [ids(n, n) for n in (3, 11, 1, 6)]), (ids(5, 1), [ids(2, 2)] * 3)])
    assert shapes == [(1, 7 + 3 + 11 + 1 + 6 + 5 + 3 * 2)]


# ------------------------------------------------------------------------------------------------------------
# The update: packed against a written-out loop


def group(model, prompt_length, lengths, advantages, seed):
    """Episodes of one prompt; the sampler's log-probabilities are off by enough that some tokens are clipped;
    END is last."""
    prompt, g = ids(prompt_length, seed), torch.Generator().manual_seed(seed)
    out = []
    for i, (n, a) in enumerate(zip(lengths, advantages, strict=True)):
        tokens = ids(n - 1, 100 * seed + i) + [END]
        with torch.no_grad():
            old = naive(model, prompt, tokens) + 0.3 * torch.randn(n, generator=g)
        out.append(rollout(prompt, tokens, old.tolist(), a))
    return out


def groups(model):
    """Four groups of different sizes and lengths, one of them without spread."""
    return [
        group(model, 7, [3, 11, 1, 6, 8], [1.0, -0.5, 0.7, -1.2, 0.0], 1),
        group(model, 1, [5, 2, 9], [0.4, 1.1, -1.5], 2), group(model, 12, [4, 4], [0.0, 0.0], 3),
        group(model, 4, [13, 1, 2, 7], [-0.3, 0.9, -0.9, 0.3], 4)]


def flat(lists):
    return [e for x in lists for e in x]


def loop(
    model, episodes, clip=0.2, beta=0.0, reference=None, temperature=1.0, n_ids=None, clip_high=0.0,
    loss="sequence", max_new_tokens=0, **_):
    """The objective without packing, batches or ranks: the gradient of the loss for every parameter, and the
    statistics."""
    high, length = (
        clip_high or clip,
        {
            "sequence": None, "token": sum(len(e.completion.tokens) for e in episodes) / len(episodes),
            "constant": max_new_tokens}[loss],
    )
    total, tokens, stats = 0.0, 0, dict(gap=0.0, approx_kl=0.0, clipfrac=0.0, entropy=0.0, kl=0.0)
    for e in episodes:
        new = naive(model, e.prompt, e.completion.tokens, temperature, n_ids)
        kl = [0.0] * len(new)
        if beta:
            with torch.no_grad():
                ref = every_logprob(reference, e.prompt, e.completion.tokens, temperature, n_ids)
            kl = [
                (r.exp() * (r - p)).sum()
                for r, p in zip(ref, every_logprob(model, e.prompt, e.completion.tokens, temperature, n_ids))]
        gain = 0.0
        for p, old, k, w in zip(new, e.completion.logprobs, kl, e.importance or [1.0] * len(new)):
            ratio = torch.exp(p - old)
            gain = (
                gain + w * min(ratio * e.advantage, ratio.clamp(1 - clip, 1 + high) * e.advantage) - beta * k)
        total = total - gain / (length or len(e.completion.tokens)) / len(episodes)
        if e.advantage or beta:  # the others are not computed
            tokens += len(new)
            for p, old, k in zip(new.tolist(), e.completion.logprobs, kl):
                for name, x in dict(
                    gap=abs(p - old), approx_kl=math.exp(p - old) - 1 - (p - old), entropy=-p,
                    clipfrac=not 1 - clip <= math.exp(p - old) <= 1 + high,
                    kl=k.item() if beta else 0.0).items():
                    stats[name] += x
    gradients = torch.autograd.grad(total, list(model.parameters()))
    norm = math.sqrt(sum(float(g.norm()) ** 2 for g in gradients))
    return gradients, {**{k: v / tokens for k, v in stats.items()}, "grad_norm": norm, "skipped": 0}


def step(model, episodes, **how):
    """update with SGD at lr 1, and the gradient of each parameter read off its change; the model itself stays
    as it was."""
    moved = copy.deepcopy(model)
    stats = update(
        moved, torch.optim.SGD(moved.parameters(), lr=1.0), episodes, **{"max_grad_norm": 1e9, **how})
    return [old.detach() - new.detach() for old, new in zip(model.parameters(), moved.parameters())], stats


@pytest.mark.parametrize("budget", [1, 20, 10_000])
@pytest.mark.parametrize(
    "how",
    [
        {}, dict(clip=0.1), dict(temperature=0.8, n_ids=37), dict(beta=0.3), dict(clip_high=0.5),
        dict(loss="token"), dict(loss="constant", max_new_tokens=20)],
    ids=str,
)
def test_update_equals_a_written_out_loop(how, budget):
    """Gradient and statistics equal the loop's over all rollouts (a group without spread is in the mean),
    whatever the budget."""
    model = tiny()
    if "beta" in how:
        how = {**how, "reference": near(model)}
    episodes = flat(groups(model))
    gradients, stats = step(model, episodes, token_budget=budget, **how)
    expected, expected_stats = loop(model, episodes, **how)
    assert expected_stats["clipfrac"] > 0.2  # the clip is at work
    same(gradients, expected, 2e-5)
    assert stats == pytest.approx(expected_stats, rel=1e-4, abs=1e-7)


@pytest.mark.parametrize("budget", [1, 10_000])
def test_importance_weights(budget):
    """min(π / π_sampler, cap), token by token; the ratio is from then on to the trainer's own policy, and
    each token's gain is weighted."""
    model, how = tiny(), dict(temperature=0.8, n_ids=37)
    episodes = flat(groups(model))
    sampled = copy.deepcopy(episodes)
    gap = set_importance(model, episodes, cap=1.1, token_budget=budget, **how)
    with torch.no_grad():
        own = [naive(model, e.prompt, e.completion.tokens, **how) for e in episodes]
    expected = [
        (new - torch.tensor(e.completion.logprobs)).exp().clamp(max=1.1) for e, new in zip(sampled, own)]
    same([torch.tensor(e.importance) for e in episodes], expected)
    assert gap == pytest.approx(
        torch.cat([(new - torch.tensor(e.completion.logprobs)).abs() for e, new in zip(sampled, own)]) .mean()
        .item(), rel=1e-4)
    same([torch.tensor(e.completion.logprobs) for e in episodes], own)
    assert 0.1 < (torch.cat(expected) == 1.1).float().mean() < 0.9
    same(step(model, episodes, **how)[0], loop(model, episodes, **how)[0], 2e-5)


def test_recomputed_layers_give_the_same_gradient():
    """recompute: layers keep their inputs only."""
    model, kept = tiny(), {}
    episodes = flat(groups(model))
    for model.recompute in (False, True):
        sizes = []

        def count(tensor):
            sizes.append(tensor.nbytes)
            return tensor
        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            packed_logprobs(model, [(e.prompt, [e.completion.tokens]) for e in episodes])
        kept[model.recompute] = sum(sizes), step(model, episodes)
    assert kept[True][0] < kept[False][0] / 4
    same(kept[True][1][0], kept[False][1][0], 1e-6)


def test_untied_update_equals_a_written_out_loop():
    """The same where embedding and head are two tensors."""
    model = tiny(tie_word_embeddings=False, num_key_value_heads=1)
    episodes = flat(groups(model))
    same(step(model, episodes, token_budget=20)[0], loop(model, episodes)[0], 2e-5)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_step_that_is_not_finite_is_skipped(poison):
    """Weights and Adam's state stay as they were, and the next step is as if it had never been."""
    model = tiny()
    rollouts = flat(groups(model))
    other = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, other)]
    for m, optimizer in zip((model, other), optimizers):
        assert update(m, optimizer, rollouts)["skipped"] == 0
    sound, rollouts[0].advantage = rollouts[0].advantage, poison
    stats = update(model, optimizers[0], rollouts)
    assert stats["skipped"] == 1 and not math.isfinite(stats["grad_norm"])
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters()))
    rollouts[0].advantage = sound
    for m, optimizer in zip((model, other), optimizers):
        update(m, optimizer, rollouts)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters()))


def test_the_gradient_is_clipped_to_its_norm():
    """max_grad_norm scales the whole gradient; the norm that is reported is that before clipping."""
    model = tiny()
    episodes = flat(groups(model))
    whole, stats = step(model, episodes)
    clipped, clipped_stats = step(model, episodes, max_grad_norm=stats["grad_norm"] / 4)
    same([4 * x for x in clipped], whole, 1e-4)
    assert clipped_stats["grad_norm"] == pytest.approx(stats["grad_norm"])


def test_rollouts_without_spread_move_nothing_but_count():
    """All advantages zero: no forward, no change. Beside others they halve the step, since they are part of
    the mean."""
    model = tiny()
    lone, still = group(model, 7, [3, 6], [1.0, -1.0], 1), group(model, 5, [4, 2], [0.0, 0.0], 3)
    moved, stats = step(model, still)
    assert not any(x.any() for x in moved)
    assert {name for name, value in stats.items() if value is not None} == {"grad_norm", "skipped"}
    assert stats["grad_norm"] == stats["skipped"] == 0
    same([2 * x for x in step(model, lone + still)[0]], step(model, lone)[0], 1e-4)


def test_gradients_do_not_outlive_their_update():
    """Two updates in a row are two steps: the second one's gradient is its own."""
    model = tiny()
    first, second = groups(model)[0], groups(model)[1]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    update(model, optimizer, first, max_grad_norm=0.1)
    before = copy.deepcopy(model)
    update(model, optimizer, second, max_grad_norm=0.1)
    same(
        [a - b for a, b in zip(before.parameters(), model.parameters())],
        step(before, second, max_grad_norm=0.1)[0], 1e-4)


def test_the_end_token_is_trained():
    """With every other token clipped away, the end token alone moves the weights, towards itself."""
    model, prompt, tokens = tiny(), ids(6, 1), [5, 9, END]
    with torch.no_grad():
        old = naive(model, prompt, tokens)
    acted = (
        old - torch.tensor([1.0, 1.0, 0.0])
    ).tolist()  # ratios e, e, 1: a good rollout's first two gain nothing more
    update(
        model, torch.optim.SGD(model.parameters(), lr=1e-3), [rollout(prompt, tokens, acted, 1.0)],
        max_grad_norm=1e9)
    assert naive(model, prompt, tokens)[-1] > old[-1] + 1e-4


@pytest.mark.parametrize("how", [{}, dict(temperature=0.7, n_ids=37)], ids=str)
def test_sampler_and_trainer_are_one_policy(how):
    """Rollouts as they were sampled have no gap to the training forward, and no token is clipped in the first
    update."""
    model, prompts = tiny(), [ids(9, 1), ids(4, 2)]
    episodes = [
        rollout(prompt, c.tokens, c.logprobs, a)
        for prompt, rollouts in zip(
            prompts, generate(model, prompts, n=6, max_new_tokens=70, eos_id=END, **how))
        for c, a in zip(rollouts, [1.0, -1.0] * 3)
    ]
    assert {len(e.completion.tokens) == 70 for e in episodes} == {True, False}
    stats = update(model, torch.optim.SGD(model.parameters(), lr=0.1), episodes, **how)
    assert stats["gap"] < 1e-5 and abs(stats["approx_kl"]) < 1e-5 and stats["clipfrac"] == 0
    sampled = flat(e.completion.logprobs for e in episodes)
    assert stats["entropy"] == pytest.approx(-sum(sampled) / len(sampled), rel=1e-4)


# ------------------------------------------------------------------------------------------------------------
# Micro-batches


def test_they_are_one_policy_in_bf16_beside_large_biases():
    """Qwen2.5's keys and queries have biases that lift all scores by hundreds. Their differences survive in
    the sampler as in training."""
    model, prompts = tiny().bfloat16(), [list(range(1, 20)), [7] * 30]
    with torch.no_grad():
        for layer in model.model.layers:
            for part in (layer.self_attn.q_proj, layer.self_attn.k_proj):
                # On the pair that RoPE turns least: a score of 40² / √8
                part.bias.view(-1, model.config.head_dim)[:, -1] += 40.0
    [[c, *_], [d, *_]] = generate(model, prompts, n=4, max_new_tokens=60)
    new = torch.cat([token_logprobs(model, p, [r.tokens])[0] for p, r in zip(prompts, (c, d))])
    assert (new - torch.tensor(c.logprobs + d.logprobs)).abs().mean() < 0.02


def cost(batch):
    """Tokens of a micro-batch by its rule: completions, and every prompt but the first."""
    groups = by_prompt(batch)
    return sum(len(c) for _, completions in groups for c in completions) + sum(
        len(prompt) for prompt, _ in groups[1:])


@pytest.mark.parametrize("budget, n", [(1, 14), (15, 8), (20, 5), (33, 3), (10_000, 1)])
def test_micro_batches_lose_and_repeat_nothing(budget, n):
    """Each rollout comes once, those of a prompt together, and only a rollout that is alone may exceed the
    budget."""
    rollouts = flat(groups(tiny()))
    order = torch.randperm(len(rollouts), generator=torch.Generator().manual_seed(0)).tolist()
    batches = micro_batches([rollouts[i] for i in order], budget)
    assert sorted(map(id, flat(batches))) == sorted(map(id, rollouts))
    for batch in batches:
        grouped = by_prompt(batch)
        assert len({tuple(prompt) for prompt, _ in grouped}) == len(grouped)
        assert [c for _, completions in grouped for c in completions] == [r.completion.tokens for r in batch]
        assert cost(batch) <= budget or len(batch) == 1
    assert len(batches) == n


def test_micro_batches_fill_the_budget_with_alike_lengths():
    """A prompt counts once, the first not at all; a batch takes what fits to the last token; lengths are
    sorted."""
    def sizes(budget, *shapes):
        rollouts = []
        for i, (P, lengths) in enumerate(shapes):
            rollouts += [rollout([i] * P, [3] * n, [0.0] * n) for n in lengths]
        return [[len(r.completion.tokens) for r in batch] for batch in micro_batches(rollouts, budget)]

    assert sizes(12, (10, [8, 2, 6, 4])) == [[2, 4, 6], [8]]
    assert sizes(11, (10, [8, 2, 6, 4])) == [[2, 4], [6], [8]]
    assert sizes(13, (3, [2, 2]), (4, [5])) == [[2, 2, 5]]
    assert sizes(12, (3, [2, 2]), (4, [5])) == [[2, 2], [5]]
    assert micro_batches([], 100) == []


def test_a_long_prompt_is_computed_as_rarely_as_a_short_one():
    """64 rollouts of 250 tokens in micro-batches of 8,192: the prompt, here a recursion round's, comes into
    two of them."""
    for P in (1_000, 5_500, 20_000):
        rollouts = [rollout([1] * P, [3] * 250, [0.0] * 250) for _ in range(64)]
        assert [len(batch) for batch in micro_batches(rollouts, 8192)] == [32, 32]
