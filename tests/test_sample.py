"""Generation against transformers, a loop without cache and a plain reference sampler; seeds, end tokens, callbacks."""
import gc
import json
import math
import os
import signal
import subprocess
import sys
import weakref
from collections import Counter

import pytest
import torch
from tokenizers import Tokenizer as BPE, decoders, models, pre_tokenizers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Qwen2ForCausalLM

import bench
import sample
from model import Config, Qwen, Tokenizer
from sample import BUCKET, CHECK, Completion, generate
from train import tiny_tokenizer

torch.set_num_threads(1)
BLOCK = 2 * BUCKET["cpu"]
LONG = BLOCK + 16  # more own tokens than two buckets of the cache


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
    assert generate(model, PROMPTS, temperature=1e-40, max_new_tokens=LONG) == generate(model, PROMPTS, temperature=0, max_new_tokens=LONG)
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


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_rollouts_split_over_calls_are_those_of_one_call(ranks, model):
    """`first` numbers rollouts: whoever samples which of them, together they are the rollouts of one call. So also for a
    prompt that is listed twice, whose second rollouts are none of its first."""
    a, b = PROMPTS[0], PROMPTS[2]
    how = dict(max_new_tokens=20, eos_id=[3], seed=9)
    whole = generate(model, [a, b, a], n=8, **how)
    shares = torch.arange(8).tensor_split(ranks)
    parts = [generate(model, [a, b, a], n=len(share), first=int(share[0]), **how) for share in shares]
    for i in range(3):
        close(sum((part[i] for part in parts), []), whole[i])
    first, _, second = ({tuple(c.tokens) for c in rollouts if len(c.tokens) > 4} for rollouts in whole)
    assert len(first) > 4 < len(second) and not first & second


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


@pytest.mark.parametrize("budget", [1, 70, 150])
def test_many_prompts_are_computed_in_pieces(budget, model, monkeypatch):
    """No forward has more prompt tokens than PREFILL_TOKENS, but for a longer prompt, the head sees last positions only,
    and the rollouts are the same."""
    prompts = make(30, 3, 70, 17, 64, 5, 41)
    whole = generate(model, prompts, n=2, max_new_tokens=12)
    heads = []
    logits = model.logits
    monkeypatch.setattr(sample, "PREFILL_TOKENS", budget)
    monkeypatch.setattr(model, "logits", lambda hidden: heads.append(tuple(hidden.shape)) or logits(hidden))
    out, shapes = widths(model, prompts, n=2, max_new_tokens=12)
    pieces = shapes[:-11]
    assert len(pieces) == math.ceil(7 / max(1, budget // 70)) and sum(q for q, _ in pieces) == 7
    assert all(q * width <= budget or q == 1 for q, width in pieces)
    assert heads[:len(pieces)] == [(q, 32) for q, _ in pieces]
    for mine, theirs in zip(out, whole):
        close(mine, theirs)


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


def test_only_the_sampling_is_in_inference_mode(model, monkeypatch):
    """No step keeps a graph for a backward pass, and whoever takes the completions may make one."""
    modes, draw = [], sample.draw
    monkeypatch.setattr(sample, "draw", lambda *args, **how: modes.append(torch.is_inference_mode_enabled()) or draw(*args, **how))
    for _ in sample.generate_each(model, PROMPTS, 2, 20, eos_id=[3, 4]):
        assert not torch.is_inference_mode_enabled()
    assert len(modes) > 9 and all(modes)


def test_a_grid_is_gone_before_the_next_is_made(model, monkeypatch):
    """Its keys and values are most of a GPU's memory."""
    grids, alive = [], []

    class Counted(sample.Grid):
        def __init__(self, *args):
            alive.extend(grid for grid in grids if grid())
            grids.append(weakref.ref(self))
            super().__init__(*args)

    monkeypatch.setattr(sample, "Grid", Counted)
    monkeypatch.setattr(sample, "READ_AT_ONCE", 70)
    generate(model, PROMPTS, n=2, max_new_tokens=5)
    assert len(grids) == 4 and not alive


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


class Graph:
    """What `capture` returns on CUDA, on a CPU: a replay is a step over the memory that the capture saw."""
    replays = 0

    def __init__(self, decode):
        self.decode = decode
        self.seen = self.places()
        assert len(self.seen) > 10

    def places(self):
        grid = self.decode.__self__
        return {name: [x.data_ptr() for x in tree_leaves(value)] for name, value in vars(grid).items()
                if name != "live" and any(isinstance(x, torch.Tensor) for x in tree_leaves(value))}  # no step reads that

    def replay(self):
        assert self.places() == self.seen
        with NothingWaits():
            self.decode()
        assert self.places() == self.seen
        Graph.replays += 1


@pytest.fixture
def graphs(monkeypatch):
    """Sampling as on CUDA, with faked graphs: the list of them."""
    made = []

    def capture(decode, before):
        assert before is (made[-1] if made else None)
        made.append(Graph(decode))
        return made[-1]

    monkeypatch.setattr(Graph, "replays", 0)
    monkeypatch.setattr(sample, "capture", capture)
    for table in (sample.BUCKET, sample.PAD, sample.GRAPH):
        monkeypatch.setitem(table, "cpu", table["cuda"])
    return made


@pytest.mark.parametrize("how", [dict(), dict(temperature=0.0), dict(top_p=0.9, top_k=7)], ids=str)
def test_a_step_can_be_captured(how, model, graphs, monkeypatch):
    """From the second step after a change of shapes on, steps neither wait for the device nor move what they read and write
    to another place: each runs over the memory that the one before left, as a replayed graph does."""
    monkeypatch.setitem(sample.BUCKET, "cpu", 16)
    out = generate(model, PROMPTS, 6, 60, eos_id=[] if "temperature" in how else 3, **how)
    assert max(len(c.tokens) for rollouts in out for c in rollouts) == 60
    assert len(graphs) == 4 and Graph.replays == 59 - 4
    for prompt, rollouts in zip(PROMPTS, out):
        check_logprobs(model, prompt, rollouts[0], **({} if "temperature" in how else how))


def test_few_captures_an_iteration(graphs, monkeypatch):
    """The paper's iteration, 4 prompts x 64 rollouts of up to 1,024 tokens, at a spread of lengths like that of a trained
    Conductor and at worse ones, captures fewer than 10 graphs, and the grid shrinks as rollouts finish."""
    model, N = tiny(hidden_size=8, num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=1), 4 * 64
    monkeypatch.setattr(sample, "matmul_fp32", lambda a, b: a.new_zeros(*a.shape[:-1], b.shape[-1]))  # only shapes count
    monkeypatch.setattr(Graph, "replay", lambda graph: graph.decode())  # what a replay may do is tested above
    spreads = {"realistic": torch.randn(N).mul(0.6).add(math.log(220)).exp(), "even": torch.linspace(1, 1024, N),
               "short, one long": torch.cat((torch.rand(N - 1) * 100, torch.tensor([1024.0])))}
    for name, lengths in spreads.items():
        wanted, rows = lengths.clamp(1, 1024).long(), []
        graphs.clear()
        draw_next = sample.Grid.draw_next

        def ends_as_wanted(grid, logits):
            draw_next(grid, logits)
            rows.append(len(grid.rollouts))
            grid.lengths.copy_(torch.where((wanted <= grid.t) & (grid.lengths == 0), grid.t, grid.lengths))

        with monkeypatch.context() as patch:
            patch.setattr(sample.Grid, "draw_next", ends_as_wanted)
            out = generate(model, make(5, 6, 7, 8), 64, 1024)
        assert [len(c.tokens) for rollouts in out for c in rollouts] == wanted.tolist()
        wasted = sum(rows) / sum((wanted > t).sum().item() for t in range(1024))
        print(name, len(graphs), "captures, grid / live rows", round(wasted, 2))
        assert len(graphs) < 10 and rows[-1] < N / 4 and wasted < 3


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ValueError])
@pytest.mark.parametrize("during", ["prefill", "step", "on_finish"])
def test_an_interrupted_generate_leaves_nothing_behind(error, during, model, monkeypatch):
    """An exception in the midst of it, as Ctrl-C raises one, comes out as it is. Gradients are recorded again, no tensor of
    the size of the cache lives on, and the next call samples what it would have."""
    expected = generate(model, PROMPTS, n=2, max_new_tokens=LONG, eos_id=3)
    forwards, grids, init = [], [], sample.Grid.__init__

    def init_and_tell(grid, *args):
        init(grid, *args)
        grids.append(weakref.ref(grid))

    def stop(*_):
        forwards.append(1)
        if len(forwards) == dict(prefill=1, step=20, on_finish=3)[during]:
            raise error("now")

    monkeypatch.setattr(sample.Grid, "__init__", init_and_tell)
    hook = model.register_forward_pre_hook(stop if during != "on_finish" else lambda *_: None)
    gc.disable()
    try:
        generate(model, PROMPTS, n=2, max_new_tokens=LONG, eos_id=3, on_finish=stop if during == "on_finish" else None)
    except error as e:
        assert str(e) == "now"
    else:
        raise AssertionError("nothing was raised")
    finally:
        hook.remove()
        gc.enable()
    assert grids[0]() is None and torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    for mine, theirs in zip(generate(model, PROMPTS, n=2, max_new_tokens=LONG, eos_id=3), expected):
        close(mine, theirs)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_waits_for_the_end_of_a_capture(number):
    """Within signals_wait a signal does nothing; right after it the handler that was there gets it, once."""
    got = []
    before = signal.signal(number, lambda *_: got.append("handled"))
    try:
        with sample.signals_wait():
            os.kill(os.getpid(), number)
            sum(range(100_000))
            got.append("captured")
        assert got == ["captured", "handled"]
        os.kill(os.getpid(), number)
        sum(range(100_000))
        assert got == ["captured", "handled", "handled"]
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("number, code, said", [(signal.SIGINT, 1, "interrupted"), (signal.SIGTERM, -signal.SIGTERM, "")])
def test_a_signal_ends_the_program(number, code, said, tmp_path):
    """Ctrl-C and SIGTERM in the midst of generation: it ends at once, without a traceback."""
    tiny(vocab=270).save_pretrained(str(tmp_path))
    tiny_tokenizer(["a b"]).save_pretrained(str(tmp_path))
    program = ("import signal, sys, sample; signal.signal(signal.SIGINT, signal.default_int_handler); step = sample.Grid.step\n"
               "def told(grid, count):\n    print('step', flush=True)\n    step(grid, count)\n"
               "sample.Grid.step = told; sample.main(sys.argv[1:])")
    run = subprocess.Popen([sys.executable, "-c", program, f"--checkpoint={tmp_path}", "--max_new_tokens=100000", "--n=4", "--top_k=0",
                            "--dtype=fp32", "hi"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                           cwd=os.path.dirname(sample.__file__))
    assert run.stdout.readline() == "step\n"
    run.send_signal(number)
    _, err = run.communicate(timeout=60)
    assert run.returncode == code and err.strip() == said


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
                 "--dtype=fp32", "--seed=4", "two", *([f"--system={system}"] if system else []), "words"])
    turns = [{"role": "system", "content": system}] if system else []
    prompt = tokenizer.chat([*turns, {"role": "user", "content": "two words"}])
    [expected] = generate(model, [prompt], n=3, max_new_tokens=9, temperature=1.5, seed=4, eos_id=tokenizer.end_ids,
                          n_ids=len(tokenizer))
    assert capsys.readouterr().out == "".join(tokenizer.decode(c.tokens) + ("\n" if c.finished else " …\n") for c in expected)


def test_log_probabilities_in_bf16(model):
    """In bf16 log-probabilities are those of a full forward in bf16, but for the order of its sums: prompts and own tokens,
    attended to apart, differ by less than bf16 does from fp32. The default dtype does not matter."""
    half = tiny().bfloat16()
    torch.set_default_dtype(torch.bfloat16)
    try:
        [rollouts] = generate(half, make(9), 8, LONG)
    finally:
        torch.set_default_dtype(torch.float32)
    [prompt], gaps = make(9), {}
    for name, other in (("bf16", half), ("fp32", model)):
        full = [other(torch.tensor([prompt + c.tokens]))[0, len(prompt) - 1:-1].log_softmax(-1) for c in rollouts]
        expected = [logp.gather(1, torch.tensor(c.tokens)[:, None])[:, 0] for logp, c in zip(full, rollouts)]
        gaps[name] = sum((e - torch.tensor(c.logprobs)).abs().mean().item() for e, c in zip(expected, rollouts)) / 8
    assert all(float(torch.tensor(c.logprobs[3]).bfloat16()) != c.logprobs[3] for c in rollouts)
    assert gaps["bf16"] < 0.5 * gaps["fp32"] < 0.1, gaps


@pytest.mark.parametrize("argv, said", [
    ([], "usage"), (["--checkpoint=/nowhere"], "usage"), (["--checkpoint=/nowhere", "hi"], "no checkpoint in '/nowhere'"),
    (["--chekpoint=x", "hi"], "--checkpoint"), (["--checkpoint={dir}", "hi", "--temperature=-1"], "temperature >= 0"),
    (["--checkpoint={dir}", "hi", "--top_p=0"], "top_p"), (["--checkpoint={dir}", "hi", "--dtype=fp8"], "bf16 and fp32"),
    (["--checkpoint={dir}", "hi", "--temperature=nan"], "temperature >= 0"),
    (["--checkpoint={dir}", "a b " * 300], "too many for this model")])
def test_the_program_says_what_is_wrong(argv, said, model, tmp_path):
    """No words, a missing checkpoint and a misspelt flag end the program with a message."""
    model.save_pretrained(str(tmp_path))
    tiny_tokenizer(["a b"]).save_pretrained(str(tmp_path))
    with pytest.raises(SystemExit, match=said):
        sample.main([word.format(dir=tmp_path) for word in argv])



# --------------------------------------------------------------------------------------------------------------------------------
# The benchmark


def test_the_bench_compares_with_the_same_weights(model):
    """transformers_model has our weights, and equal logits."""
    ids = torch.tensor(make(20, 20))
    torch.testing.assert_close(bench.transformers_model(model)(ids).logits, model(ids), rtol=1e-4, atol=1e-4)


def test_the_bench_ends_in_one_json_line(capsys, monkeypatch):
    """It times as many tokens as it says, beside whom it says."""
    monkeypatch.setitem(bench.SHAPES, "small", tiny().config)
    monkeypatch.setattr(bench, "copy_bandwidth", lambda device: 1e9)
    drawn = []
    monkeypatch.setattr(sample, "generate", lambda *args, **how: drawn.append(generate(*args, **how)) or drawn[-1])
    bench.sampler(rows="6,4", questions="2", prompt="20", new="9", rounds="1", dtype="fp32")
    results = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert [(r["rows"], r["questions"], r["prompt"], r["new"]) for r in results] == [(6, 2, 20, 9), (4, 2, 20, 9)]
    assert [[len(rollouts) for rollouts in out] for out in drawn[1:4]] == [[3, 3], [3, 3], [1] * 6]  # ours, its prefill, unshared
    assert {len(c.tokens) for out in (drawn[1], drawn[3]) for rollouts in out for c in rollouts} == {9}
    for result in results:
        assert min(value for value in result.values() if isinstance(value, float)) > 0
        assert {"times as fast as transformers", "times as fast as unshared"} < result.keys()
