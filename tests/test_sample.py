"""Generation against transformers, a loop without cache and a plain reference sampler; seeds, end tokens, callbacks.

    python tests/test_sample.py --bench --random=small --vs=transformers        sample.py's bench, beside transformers' generate
"""
import json
import math
import os
import sys
from collections import Counter
from dataclasses import asdict

import pytest
import torch
from tokenizers import Tokenizer as BPE, decoders, models, pre_tokenizers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Qwen2Config, Qwen2ForCausalLM

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # for the bench
import sample
from model import Config, Qwen, Tokenizer
from sample import BLOCK, CHECK, Completion, generate
from train import tiny_tokenizer

LONG = BLOCK + 16  # more own tokens than one block of the cache


def transformers_generate(model, prompts, n, max_new_tokens):
    """The same weights in Hugging Face's implementation, sampling as many rollouts of the same length."""
    with torch.device(model.device):
        theirs = Qwen2ForCausalLM(Qwen2Config(**asdict(model.config), rope_parameters={
            "rope_type": "default", "rope_theta": model.config.rope_theta}))
    theirs.load_state_dict(model.state_dict(), assign=True)
    ids = torch.tensor(prompts, device=model.device)
    return lambda: theirs.generate(ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
                                   num_return_sequences=n, max_new_tokens=max_new_tokens, eos_token_id=None, pad_token_id=0)


sample.OTHERS["transformers"] = transformers_generate


def tiny(vocab=40, seed=0, **changes):
    """A random model whose next token is neither certain nor uniform and depends on everything before it."""
    torch.manual_seed(seed)
    model = Qwen(Config(**{**dict(
        vocab_size=vocab, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        rope_theta=1000.0, rms_norm_eps=1e-6, tie_word_embeddings=True, max_position_embeddings=512), **changes}))
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.uniform_(0.5, 1.5) if "norm" in name else p.normal_(std=0.25)
    return model.eval()


@pytest.fixture(scope="module")
def model():
    return tiny()


def make(*lengths, vocab=40, seed=0):
    """Random prompts of these lengths."""
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab, (n,), generator=g).tolist() for n in lengths]


PROMPTS = make(5, 1, 17, 70)  # mixed lengths, one token, longer than a block


def reference(logits, temperature=1.0, top_p=1.0, top_k=0):
    """The sampling distribution of logits (V), written out: a list of probabilities."""
    p = (logits.double() / temperature).softmax(-1).tolist()
    ranked = sorted(range(len(p)), key=lambda i: -p[i])
    if top_k:
        ranked = ranked[:top_k]
    total, mass, keep = sum(p[i] for i in ranked), 0.0, []
    for i in ranked:
        keep.append(i)
        mass += p[i] / total
        if mass >= top_p:
            break
    total = sum(p[i] for i in keep)
    return [p[i] / total if i in keep else 0.0 for i in range(len(p))]


@torch.no_grad()
def next_logits(model, ids, n_ids=None):
    """Logits after `ids`, without any cache."""
    return model(torch.tensor([ids]))[0, -1, :n_ids]


@torch.no_grad()
def check_logprobs(model, prompt, completion, n_ids=None, **how):
    """The completion's log-probabilities are those of one full forward and the reference distribution."""
    logits = model(torch.tensor([prompt + completion.tokens]))[0, len(prompt) - 1 : -1, :n_ids]
    expected = [math.log(reference(row, **how)[token]) for row, token in zip(logits, completion.tokens)]
    assert completion.logprobs == pytest.approx(expected, abs=2e-4)


def close(a, b):
    """Two lists of completions are the same, up to rounding in the log-probabilities."""
    assert [(c.tokens, c.finished) for c in a] == [(c.tokens, c.finished) for c in b]
    for x, y in zip(a, b):
        assert x.logprobs == pytest.approx(y.logprobs, abs=1e-4)


def frequencies(outcomes, expected):
    """Counts of outcomes fit {outcome: probability}: nothing impossible, and nothing 5 standard deviations off."""
    counts, n = Counter(outcomes), len(outcomes)
    assert all(expected.get(o, 0) > 0 for o in counts)
    for o, p in expected.items():
        assert abs(counts[o] - n * p) <= 5 * math.sqrt(n * p * (1 - p)) + 1, (o, counts[o] / n, p)


# --------------------------------------------------------------------------------------------------------------------------------
# Greedy


@pytest.mark.parametrize("heads, kv, tied", [(4, 2, True), (4, 4, False), (4, 1, True)])
def test_greedy_equals_transformers(heads, kv, tied, tmp_path):
    """Prompts of mixed lengths in one batch continue token for token as transformers' generate does, ends included."""
    model = tiny(num_attention_heads=heads, num_key_value_heads=kv, tie_word_embeddings=tied)
    model.save_pretrained(str(tmp_path))
    theirs = Qwen2ForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    free = generate(model, PROMPTS, max_new_tokens=LONG, temperature=0)
    for eos in ([], [free[0][0].tokens[12], free[3][0].tokens[66]]):
        ours = generate(model, PROMPTS, max_new_tokens=LONG, temperature=0, eos_id=eos)
        for prompt, [c] in zip(PROMPTS, ours):
            out = theirs.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), do_sample=False,
                                  max_new_tokens=LONG, eos_token_id=eos or None, pad_token_id=0)
            assert c.tokens == out[0, len(prompt):].tolist()
            assert c.finished == (c.tokens[-1] in eos)
    assert len({len(c.tokens) for [c] in ours}) > 1  # they did not all end together


def test_greedy_equals_a_loop_without_cache(model):
    """Each token is the argmax of a full forward over all before it; log-probabilities are at temperature 1; rollouts agree."""
    for prompt, rollouts in zip(PROMPTS, generate(model, PROMPTS, n=2, max_new_tokens=LONG, temperature=0)):
        ids = list(prompt)
        for _ in range(LONG):
            ids.append(int(next_logits(model, ids).argmax()))
        assert [c.tokens for c in rollouts] == [ids[len(prompt):]] * 2
        check_logprobs(model, prompt, rollouts[1])


# --------------------------------------------------------------------------------------------------------------------------------
# Sampling


@pytest.mark.parametrize("how", [dict(), dict(temperature=0.7), dict(temperature=1.3, top_k=5), dict(temperature=0.8, top_p=0.7),
                                 dict(top_p=0.8, top_k=7), dict(n_ids=30, top_p=0.9)], ids=str)
def test_logprobs_are_those_of_a_full_forward(how, model):
    """Log-probabilities hold under the distribution that was sampled from, also after others left and the cache grew."""
    out = generate(model, PROMPTS, n=6, max_new_tokens=LONG, eos_id=[3, 4], seed=1, **how)
    lengths = [len(c.tokens) for rollouts in out for c in rollouts]
    assert min(lengths) < CHECK and sum(x > CHECK for x in lengths) > 4
    for prompt, rollouts in zip(PROMPTS, out):
        for c in rollouts:
            check_logprobs(model, prompt, c, **how)


def test_rollouts_that_outlive_the_others(model):
    """Rollouts longer than a block, most of whose neighbours have left: the compacted cache is still theirs."""
    out = generate(model, PROMPTS, n=8, max_new_tokens=2 * BLOCK + 5, eos_id=9, seed=6)
    lengths = sorted(len(c.tokens) for rollouts in out for c in rollouts)
    assert lengths[0] <= CHECK and lengths[len(lengths) // 2] < BLOCK < 2 * BLOCK < lengths[-1]
    for prompt, rollouts in zip(PROMPTS, out):
        for c in rollouts:
            check_logprobs(model, prompt, c)


@pytest.mark.parametrize("how", [
    dict(), dict(temperature=2.0), dict(top_k=4), dict(top_p=0.6), dict(temperature=0.5, top_p=0.9, top_k=6), dict(top_k=1),
    dict(top_p=1e-6), dict(top_k=100, top_p=0.999)], ids=str)
def test_frequencies_fit_a_plain_sampler(how):
    """First and second tokens come with the probabilities of a sampler written out: so steps and rollouts are independent."""
    model, [prompt] = tiny(vocab=9), make(4, vocab=9)
    [rollouts] = generate(model, [prompt], n=4000, max_new_tokens=2, seed=3, **how)
    first = reference(next_logits(model, prompt), **how)
    second = [reference(next_logits(model, [*prompt, a]), **how) for a in range(9)]
    frequencies([c.tokens[0] for c in rollouts], dict(enumerate(first)))
    frequencies([tuple(c.tokens) for c in rollouts], {(a, b): first[a] * second[a][b] for a in range(9) for b in range(9)})


def test_the_first_tokens_of_64_rollouts_differ(model):
    """Rollouts of one prompt part at the first token, about as much as independent draws would."""
    [rollouts] = generate(model, PROMPTS[:1], n=64, max_new_tokens=30)
    p = reference(next_logits(model, PROMPTS[0]))
    expected = sum(1 - (1 - x) ** 64 for x in p)
    assert expected > 5 and abs(len({c.tokens[0] for c in rollouts}) - expected) < 0.4 * expected
    assert len({tuple(c.tokens) for c in rollouts}) == 64


def test_prompts_do_not_share_their_luck():
    """Where nothing but the last token counts, two prompts with the same last token still get different rollouts."""
    model = tiny(tie_word_embeddings=False)
    with torch.no_grad():
        for p in model.model.layers.parameters():
            p.zero_()
    a, b = generate(model, [[1, 7], [2, 7]], n=8, max_new_tokens=10)
    assert not {tuple(c.tokens) for c in a} & {tuple(c.tokens) for c in b}


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_ids_beyond_the_tokenizer_never_appear(temperature):
    """Ids at or above n_ids are neither drawn nor given probability, even where the model wants them most."""
    model = tiny(tie_word_embeddings=False)
    with torch.no_grad():
        model.lm_head.weight[30:] *= 8
    prompts = make(5, 1, vocab=30)
    how = dict(n=16, max_new_tokens=20, temperature=temperature)
    assert max(t for rollouts in generate(model, prompts, **how) for c in rollouts for t in c.tokens) >= 30
    for prompt, rollouts in zip(prompts, generate(model, prompts, n_ids=30, **how)):
        for c in rollouts:
            assert max(c.tokens) < 30
            check_logprobs(model, prompt, c, n_ids=30)


# --------------------------------------------------------------------------------------------------------------------------------
# Seeds


def test_a_seed_gives_the_same_whatever_shares_the_batch(model):
    """A prompt's rollouts depend on the seed and the prompt, not on its neighbours, its place, n, or when others finish."""
    how = dict(max_new_tokens=LONG, eos_id=[3, 4], seed=5)
    a, b, c, d = PROMPTS
    alone = generate(model, [a], n=8, **how)[0]
    assert len({len(x.tokens) for x in alone}) > 3
    close(generate(model, [d, b, a, c], n=8, **how)[2], alone)
    close(generate(model, [a, c], n=3, **how)[0], alone[:3])
    close(generate(model, [a], n=8, **how)[0], alone)
    other = generate(model, [a], n=8, **{**how, "seed": 6})[0]
    assert not {tuple(x.tokens) for x in alone if len(x.tokens) > 4} & {tuple(x.tokens) for x in other}


def test_a_prompt_listed_twice_gets_fresh_rollouts(model):
    """The second listing goes on where the first stopped."""
    a, b = PROMPTS[0], PROMPTS[2]
    first, _, second = generate(model, [a, b, a], n=4, max_new_tokens=20)
    assert not {tuple(c.tokens) for c in first} & {tuple(c.tokens) for c in second}
    close(first + second, generate(model, [a], n=8, max_new_tokens=20)[0])


# --------------------------------------------------------------------------------------------------------------------------------
# Ends, and who is in the batch


@pytest.mark.parametrize("eos", [3, [3], [3, 4, 11]], ids=str)
def test_a_rollout_ends_with_its_end_token(eos, model):
    """Finished: the end token is the last and the only one, with its log-probability. Cut off: full length and no end token."""
    ends = {eos} if isinstance(eos, int) else set(eos)
    out = [c for rollouts in generate(model, PROMPTS, n=16, max_new_tokens=30, eos_id=eos, seed=2) for c in rollouts]
    assert {c.tokens[-1] for c in out if c.finished} == ends and {c.finished for c in out} == {True, False}
    for c in out:
        assert len(c.tokens) == len(c.logprobs) and not ends & set(c.tokens[:-1])
        assert c.tokens[-1] in ends if c.finished else len(c.tokens) == 30 and c.tokens[-1] not in ends


def test_an_end_at_the_very_last_token_counts_as_finished(model):
    """A rollout whose end token is its max_new_tokens-th is finished, not cut off."""
    [[c]] = generate(model, PROMPTS[:1], max_new_tokens=20, temperature=0)
    k = c.tokens.index(c.tokens[9]) + 1
    [[end]] = generate(model, PROMPTS[:1], max_new_tokens=k, temperature=0, eos_id=c.tokens[k - 1])
    assert end == Completion(c.tokens[:k], pytest.approx(c.logprobs[:k], abs=1e-4), True)


def widths(model, *args, **how):
    """generate, and the shape of the ids of every forward it made, in order."""
    shapes = []
    with model.register_forward_pre_hook(lambda _, args: shapes.append(tuple(args[0].shape))):
        return generate(model, *args, **how), shapes


def test_one_prefill_per_prompt_and_finished_rows_leave(model):
    """The prompts are computed once, not once per rollout; then steps of one token, over ever fewer rows."""
    out, shapes = widths(model, PROMPTS, n=16, max_new_tokens=LONG, eos_id=[3, 4, 11], seed=2)
    assert shapes[0] == (4, 70) and shapes[1] == (64, 1)
    assert {t for _, t in shapes[1:]} == {1}
    rows = [r for r, _ in shapes[1:]]
    assert rows == sorted(rows, reverse=True) and rows[-1] <= 16
    longest = max(len(c.tokens) for rollouts in out for c in rollouts)
    assert longest - 1 <= len(rows) < longest + CHECK


def test_all_finished_at_once_stops_the_loop(model):
    """Where every id is an end token, every rollout has one token, and generation does not run on to max_new_tokens."""
    out, shapes = widths(model, PROMPTS, n=3, max_new_tokens=500, eos_id=range(40))
    assert all(len(c.tokens) == 1 and c.finished for rollouts in out for c in rollouts) and len(shapes) <= CHECK


def test_on_finish_is_called_once_as_each_rollout_finishes(model):
    """Every rollout is reported exactly once, with its final completion, and the early ones before the late ones are done."""
    forwards, calls = [], []
    with model.register_forward_pre_hook(lambda *_: forwards.append(1)):
        out = generate(model, PROMPTS, n=8, max_new_tokens=LONG, eos_id=[3, 4], seed=1,
                       on_finish=lambda i, j, c: calls.append((i, j, c, len(forwards))))
    assert sorted((i, j) for i, j, *_ in calls) == [(i, j) for i in range(4) for j in range(8)]
    for i, j, c, seen in calls:
        assert out[i][j] == c and len(c.tokens) <= seen < len(c.tokens) + CHECK
    assert len({seen for *_, seen in calls}) > 2


class NothingWaits(TorchDispatchMode):
    """Fails where a result has to reach the host or comes from it: a CUDA graph cannot hold that."""
    aten = torch.ops.aten
    waits = {aten.item, aten._local_scalar_dense, aten.is_nonzero, aten.nonzero, aten.masked_select, aten.lift_fresh, aten._to_copy}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.overloadpacket not in self.waits or func.overloadpacket is self.aten._to_copy and "device" not in (kwargs or {}), func
        if func.overloadpacket in (self.aten.index, self.aten.index_put, self.aten.index_put_):
            assert not any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1]), func  # counts what it finds
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("wait", [lambda x: x.item(), lambda x: bool(x > 0), lambda x: x[None][x[None] > 0], lambda x: torch.tensor([1]),
                                  lambda x: x[None].nonzero(), lambda x: x[None].clone().__setitem__(x[None] > 0, x)])
def test_nothing_waits_notices(wait):
    with torch.inference_mode(), pytest.raises(AssertionError), NothingWaits():
        wait(torch.tensor(1.0))


@pytest.mark.parametrize("how", [dict(), dict(temperature=0.0), dict(top_p=0.9, top_k=7)], ids=str)
def test_a_step_can_be_captured(how, model, monkeypatch):
    """From the second step after a change of shapes on, steps neither wait for the device nor move what they read and write to another
    place: each runs over the memory that the one before left, as a replayed graph does."""
    plain, replays = generate(model, PROMPTS, 6, LONG, eos_id=3, **how), []

    def capture(step, device):
        cells, model_cells = dict(zip(step.__code__.co_freevars, step.__closure__)), {}
        for inner in ("choose", "step"):
            function = cells[inner].cell_contents if inner in cells else step
            model_cells |= dict(zip(function.__code__.co_freevars, function.__closure__))

        def places():
            tensors = [x for cell in model_cells.values() for x in tree_leaves(cell.cell_contents) if isinstance(x, torch.Tensor)]
            return [x.data_ptr() for x in tensors]

        before = places()
        assert len(before) > 10

        def replay():
            assert places() == before
            with NothingWaits(), monkeypatch.context() as patch:
                patch.setattr(torch.Tensor, "tolist", None)
                step()
            assert places() == before
            replays.append(step)
        return replay

    monkeypatch.setattr(sample, "capture", capture)
    assert generate(model, PROMPTS, 6, LONG, eos_id=3, **how) == plain
    assert len(replays) > 20


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("how", [dict(temperature=0.0), dict(), dict(top_p=0.9, top_k=7)], ids=str)
def test_graphs_equal_plain_steps(how, monkeypatch):
    """On CUDA: the same rollouts with captured graphs as without."""
    model = tiny().cuda()
    graphs = generate(model, PROMPTS, 6, 3 * LONG, eos_id=3, **how)
    monkeypatch.setattr(sample, "capture", lambda step, device: step)
    assert [[c.tokens for c in group] for group in graphs] == [
        [c.tokens for c in group] for group in generate(model, PROMPTS, 6, 3 * LONG, eos_id=3, **how)]


@pytest.mark.parametrize("prompts, how", [([], {}), ([[1], []], {}), ([[1]], dict(n=0)), ([[1]], dict(max_new_tokens=0))])
def test_nothing_to_sample_is_an_error(prompts, how, model):
    """No prompts, an empty prompt, no rollouts and no tokens are refused in words."""
    with pytest.raises(ValueError, match="generate needs"):
        generate(model, prompts, **how)


@pytest.mark.parametrize("how", [dict(temperature=-1.0), dict(top_p=0.0), dict(top_p=-0.5), dict(top_k=-1)], ids=str)
def test_a_senseless_distribution_is_an_error(how, model):
    """A negative temperature, no probability mass and a negative count of tokens are refused, not sampled from."""
    with pytest.raises(ValueError, match=next(iter(how))):
        generate(model, [[1]], max_new_tokens=2, **how)


# --------------------------------------------------------------------------------------------------------------------------------
# The program


@pytest.mark.parametrize("system", ["", "Be brief."])
def test_the_program_answers_from_a_checkpoint(system, tmp_path, capsys, monkeypatch):
    """`python sample.py --checkpoint=DIR words` prints n answers to the chat prompt of those words, with these settings."""
    bpe = BPE(models.BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    bpe.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # what is compared below is computed in fp32 on the CPU
    tokenizer, model = Tokenizer(bpe), tiny(vocab=270)
    tokenizer.save_pretrained(str(tmp_path))
    model.save_pretrained(str(tmp_path))
    sample.main([f"--checkpoint={tmp_path}", "--n=3", "--max_new_tokens=9", "--temperature=1.5", "--top_p=1", "--top_k=0",
                 "--seed=4", "two", *([f"--system={system}"] if system else []), "words"])
    turns = [{"role": "system", "content": system}] if system else []
    prompt = tokenizer.chat([*turns, {"role": "user", "content": "two words"}])
    [expected] = generate(model, [prompt], n=3, max_new_tokens=9, temperature=1.5, seed=4, eos_id=tokenizer.end_ids,
                          n_ids=len(tokenizer))
    assert capsys.readouterr().out == "".join(tokenizer.decode(c.tokens) + ("\n" if c.finished else " …\n") for c in expected)


def test_log_probabilities_are_fp32_whatever_the_model(model):
    """In bf16, as on CUDA, log-probabilities stay fp32, and the default dtype does not matter."""
    half = tiny().bfloat16()
    torch.set_default_dtype(torch.bfloat16)
    try:
        [[c]] = generate(half, make(9), 1, 5)
    finally:
        torch.set_default_dtype(torch.float32)
    assert [float(torch.tensor(x).bfloat16()) for x in c.logprobs] != c.logprobs


@pytest.mark.parametrize("vs", ["", "transformers", "unshared"])
def test_the_bench_ends_in_one_json_line(vs, capsys, monkeypatch):
    """--bench times as many tokens as it says, beside whom it says."""
    monkeypatch.setitem(sample.RANDOM, "small", tiny().config)
    drawn = []
    monkeypatch.setattr(sample, "generate", lambda *args, **how: drawn.append(generate(*args, **how)) or drawn[-1])
    sample.main(["--bench", "--random=small", "--prompt=20", "--questions=2", "--n=3", "--max_new_tokens=9", "--vs=" + vs])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (result["questions"], result["n"], result["prompt"], result["new"]) == (2, 3, 20, 9)
    assert [len(c.tokens) for c in sum(drawn[2], [])] == [9] * 6
    assert min(value for value in result.values() if type(value) is float) > 0 and result.get("vs", "") == vs


def test_the_bench_compares_with_the_same_weights(model):
    """transformers_generate samples from our weights: six rollouts of nine tokens, and equal logits."""
    job = transformers_generate(model, make(20, 20), 3, 9)
    assert job().shape == (6, 29)
    theirs = dict(zip(job.__code__.co_freevars, job.__closure__))["theirs"].cell_contents
    ids = torch.tensor(make(20, 20))
    torch.testing.assert_close(theirs(ids).logits, model(ids), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("argv, said", [([], "usage"), (["--checkpoint=/nowhere"], "usage"),
                                        (["--checkpoint=/nowhere", "hi"], "/nowhere"), (["--chekpoint=x", "hi"], "--checkpoint"),
                                        (["--bench"], "usage"), (["--bench", "--random=8b"], "7b"), (["--random=small", "hi"], "usage"),
                                        (["--checkpoint={dir}", "hi", "--temperature=-1"], "temperature >= 0"), (["--checkpoint={dir}", "hi", "--top_p=0"], "top_p"),
                                        (["--checkpoint={dir}", "hi", "--temperature=nan"], "temperature >= 0")])
def test_the_program_says_what_is_wrong(argv, said, model, tmp_path):
    """No words, a missing checkpoint and a misspelt flag end the program with a message."""
    model.save_pretrained(str(tmp_path))
    tiny_tokenizer(["a b"]).save_pretrained(str(tmp_path))
    with pytest.raises(SystemExit, match=said):
        sample.main([word.format(dir=tmp_path) for word in argv])


if __name__ == "__main__":
    sample.main(sys.argv[1:])
else:
    torch.set_num_threads(1)
