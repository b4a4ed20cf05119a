"""Tests of generation, compared with transformers, with full forward passes that use no cache, and
with the probabilities from which a plain sampler would draw.

Further tests are about seeds, memory, attention, compilation and the command line.
"""

import copy
import functools
import gc
import math
import os
import runpy
import subprocess
import sys
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen2ForCausalLM

import model as model_file
import sample
from model import Config, Qwen, Tokenizer, add_lora, merge_lora
from sample import Completion, generate, generate_each
from test_model import bpe

torch.set_num_threads(1)
LONG = 80  # tokens of a completion: more than fit into two buckets of the cache


def tiny(vocab=40, **changes):
    """Return a random model whose next token depends on all tokens before it.

    The next token is neither certain nor uniformly distributed.
    """
    torch.manual_seed(0)
    shape = dict(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        rope_theta=1000.0,
        tie_word_embeddings=True,
    )
    model = Qwen(Config(**shape | changes))
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.uniform_(0.5, 1.5) if "norm" in name else p.normal_(std=0.25)
    return model


MODEL = tiny()


def make(*lengths, vocab=40):
    """Return random prompts of these lengths."""
    g = torch.Generator().manual_seed(0)
    return [torch.randint(vocab, (n,), generator=g).tolist() for n in lengths]


PROMPTS = make(5, 1, 17, 70)  # of mixed lengths; one is a single token


@torch.no_grad()
def full_logprobs(model, prompt, tokens, temperature=1.0, n_ids=None):
    """Return the log-probabilities (len(tokens), V) of all ids at the place of each token.

    One full forward pass computes them. Without tokens, returns those of the first place, (1, V).
    """
    logits = model(torch.tensor([prompt + tokens]))[0, len(prompt) - 1 :, :n_ids]
    return (logits.double() / temperature).log_softmax(-1)[: len(tokens) or None]


def check_logprobs(model, prompt, completion, tolerance=2e-4, **settings):
    expected = full_logprobs(model, prompt, completion.tokens, **settings)
    expected = expected.gather(1, torch.tensor(completion.tokens)[:, None])[:, 0].tolist()
    assert completion.logprobs == pytest.approx(expected, abs=tolerance)


def close(a, b):
    """Assert that two lists of completions are equal, up to rounding in the log-probabilities."""
    assert [(c.tokens, c.finished) for c in a] == [(c.tokens, c.finished) for c in b]
    for x, y in zip(a, b):
        assert x.logprobs == pytest.approx(y.logprobs, abs=1e-4)


def widths(model, *args, **settings):
    """Return generate's result, and the shape of the ids in each forward pass."""
    shapes = []
    with model.register_forward_pre_hook(lambda _, args: shapes.append(tuple(args[0].shape))):
        return generate(model, *args, **settings), shapes


# ---- What is drawn ------------------------------------------------------------------------------
@pytest.mark.parametrize("heads, kv, tied", [(4, 2, True), (4, 4, False), (4, 1, True)])
def test_greedy_equals_transformers(heads, kv, tied, tmp_path):
    """A batch of prompts of mixed lengths gets the tokens that transformers' generate chooses.

    This holds with and without end tokens.
    """
    model = tiny(num_attention_heads=heads, num_key_value_heads=kv, tie_word_embeddings=tied)
    model.save_pretrained(str(tmp_path))
    theirs = Qwen2ForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    free = generate(model, PROMPTS, max_new_tokens=LONG, temperature=0)
    for eos in ([], [free[0][0].tokens[12], free[3][0].tokens[66]]):
        ours = generate(model, PROMPTS, max_new_tokens=LONG, temperature=0, eos_id=eos)
        for prompt, [c] in zip(PROMPTS, ours):
            ids = torch.tensor([prompt])
            out = theirs.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                pad_token_id=0,
                max_new_tokens=LONG,
                eos_token_id=eos or None,
            )
            assert c.tokens == out[0, len(prompt) :].tolist() and c.finished == (
                c.tokens[-1] in eos
            )
            check_logprobs(model, prompt, c)
    assert len({len(c.tokens) for [c] in ours}) > 1  # completions end at different times


@pytest.mark.parametrize(
    "settings", [dict(), dict(temperature=0.7), dict(temperature=1.3, n_ids=30)]
)
def test_logprobs_are_those_of_a_full_forward(settings):
    """Some rollouts outlive others by more than two buckets of the cache.

    In bf16, the log-probabilities agree up to bf16's rounding.
    """
    for model, tolerance in ((MODEL, 2e-4), (tiny().bfloat16(), 0.1)):
        out = generate(model, PROMPTS, n=8, max_new_tokens=2 * LONG, eos_id=9, seed=6, **settings)
        lengths = [len(c.tokens) for rollouts in out for c in rollouts]
        assert min(lengths) < 8 and max(lengths) > LONG
        for prompt, rollouts in zip(PROMPTS, out):
            for c in rollouts:
                check_logprobs(model, prompt, c, tolerance, **settings)


@pytest.mark.parametrize(
    "settings", [dict(), dict(temperature=2.0), dict(temperature=0.5, n_ids=7)], ids=str
)
def test_frequencies_fit_a_plain_sampler(settings):
    """Each pair of tokens occurs about as often as its probability predicts.

    So the random draws are independent across steps and rollouts.
    """
    model, [prompt] = tiny(vocab=9), make(4, vocab=9)
    [rollouts] = generate(model, [prompt], n=4000, max_new_tokens=2, seed=3, **settings)
    first = full_logprobs(model, prompt, [], **settings)[0].exp().tolist()
    second = [
        full_logprobs(model, [*prompt, a], [], **settings)[0].exp().tolist()
        for a in range(len(first))
    ]
    expected = {
        (a, b): first[a] * second[a][b] for a in range(len(first)) for b in range(len(first))
    }
    counts = Counter(tuple(c.tokens) for c in rollouts)
    assert counts.keys() <= expected.keys()
    for pair, p in expected.items():
        assert abs(counts[pair] - 4000 * p) <= 5 * math.sqrt(4000 * p * (1 - p)) + 1, pair


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_ids_beyond_the_tokenizer_never_appear(temperature):
    """With n_ids, ids that the tokenizer lacks are not drawn, even if they are the likeliest."""
    model, prompts = tiny(tie_word_embeddings=False), make(5, 1, vocab=30)
    with torch.no_grad():
        model.lm_head.weight[30:] *= 8
    for n_ids, reached in ((None, True), (30, False)):
        out = generate(model, prompts, 16, 20, temperature, n_ids=n_ids)
        assert (max(t for rollouts in out for c in rollouts for t in c.tokens) >= 30) == reached
        check_logprobs(model, prompts[0], out[0][0], n_ids=n_ids)


@pytest.mark.parametrize("V", [7, 512, 1300])
def test_a_pick_in_blocks_is_a_pick(V):
    """pick_in_blocks, used on a GPU, picks what pick does, except where rounding decides."""
    g = torch.Generator().manual_seed(V)
    mass = torch.randn(4000, V, generator=g).mul(3).softmax(-1)
    mass[torch.rand(mass.shape, generator=g) < 0.3] = 0.0
    mass[:, V // 2] += 1e-3
    share = torch.randint(2**23, (4000, 1), generator=g) / 2**23
    share[:50] = 0.0
    share[50:100] = 1 - 2**-23
    one, other = (how(mass, share) for how in (sample.pick, sample.pick_in_blocks))
    assert mass.gather(1, other).all()
    assert (one == other).float().mean() > 0.99
    mass = mass.double() / mass.double().sum(-1, True)
    end = mass.cumsum(-1).gather(1, other)
    assert (end > share - 1e-6).all()
    assert (end - mass.gather(1, other) < share + 1e-6).all()


# ---- Seeds --------------------------------------------------------------------------------------
def test_a_draw_depends_on_seed_prompt_and_number_alone():
    """Other prompts, the order, n, and the ends of other rollouts change nothing.

    A prompt that is listed twice gets two different sets of rollouts.
    """
    settings = dict(max_new_tokens=LONG, eos_id=[3, 4], seed=5)
    a, b, c, d = PROMPTS
    [alone] = generate(MODEL, [a], n=8, **settings)
    assert len({len(x.tokens) for x in alone}) > 3
    close(generate(MODEL, [d, b, a, c], n=8, **settings)[2], alone)
    close(generate(MODEL, [a, c], n=3, **settings)[0], alone[:3])
    long = {tuple(x.tokens) for x in alone if len(x.tokens) > 4}
    twice = generate(MODEL, [a, a], n=8, **settings)
    close(twice[0], alone)
    for others in (twice[1], generate(MODEL, [a], n=8, **settings | {"seed": 6})[0]):
        assert not long & {tuple(x.tokens) for x in others}


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_numbered_rollouts_are_those_of_one_call(ranks):
    """However the numbers are divided among ranks, each rollout equals that of a single call."""
    a, b = PROMPTS[0], PROMPTS[2]
    settings = dict(max_new_tokens=20, eos_id=[3], seed=9)
    whole = generate(MODEL, [a, b], n=8, **settings)
    for i in range(ranks):
        mine, others = range(i, 8, ranks), range(i, 8, ranks)[::-1]
        parts = generate(MODEL, [a, b], n=len(mine), numbers=[mine, others], **settings)
        close(parts[0], [whole[0][number] for number in mine])
        close(parts[1], [whole[1][number] for number in others])


# ---- Ends, and the cells of a grid --------------------------------------------------------------
@pytest.mark.parametrize("eos", [3, [3, 4, 11]], ids=str)
def test_a_rollout_ends_with_its_end_token(eos):
    """A finished rollout has one end token, its last.

    A rollout that was cut off has the full length and no end token.
    """
    ends = {eos} if isinstance(eos, int) else set(eos)
    out = [c for rollouts in generate(MODEL, PROMPTS, 16, 30, eos_id=eos, seed=2) for c in rollouts]
    assert {c.tokens[-1] for c in out if c.finished} == ends and {c.finished for c in out} == {
        True,
        False,
    }
    for c in out:
        assert len(c.tokens) == len(c.logprobs) and not ends & set(c.tokens[:-1])
        assert (
            c.tokens[-1] in ends if c.finished else len(c.tokens) == 30 and c.tokens[-1] not in ends
        )


def test_an_end_at_the_very_last_token_counts_as_finished():
    [[c]] = generate(MODEL, PROMPTS[:1], max_new_tokens=20, temperature=0)
    k = c.tokens.index(c.tokens[9]) + 1
    [[end]] = generate(MODEL, PROMPTS[:1], max_new_tokens=k, temperature=0, eos_id=c.tokens[k - 1])
    assert end == Completion(c.tokens[:k], pytest.approx(c.logprobs[:k], abs=1e-4), True)


def test_each_rollout_is_yielded_once_soon_after_its_end():
    """The loop that receives the rollouts is not in inference mode; the forward passes are."""
    forwards, seen = [], []
    with MODEL.register_forward_pre_hook(
        lambda *_: forwards.append(torch.is_inference_mode_enabled())
    ):
        for i, j, c in generate_each(MODEL, PROMPTS, 8, LONG, eos_id=[3, 4], seed=1):
            assert not torch.is_inference_mode_enabled()
            assert len(c.tokens) <= len(forwards) < len(c.tokens) + sample.CHECK
            seen.append((i, j))
    assert all(forwards) and sorted(seen) == [(i, j) for i in range(4) for j in range(8)] != seen


def test_one_prefill_per_prompt_and_finished_cells_leave():
    """One forward pass computes all prompts; each further pass adds one token per cell.

    The number of cells falls as rollouts end, and the passes stop soon after all have ended.
    """
    out, shapes = widths(MODEL, PROMPTS, 16, 500, eos_id=[3, 4, 11], seed=2)
    assert shapes[:2] == [(4, 70), (64, 1)] and {length for _, length in shapes[1:]} == {1}
    cells = [count for count, _ in shapes[1:]]
    assert cells == sorted(cells, reverse=True) and cells[-1] <= 16
    longest = max(len(c.tokens) for rollouts in out for c in rollouts)
    assert longest < 500 and longest - 1 <= len(cells) < longest + sample.CHECK


def test_many_prompts_are_computed_in_pieces():
    """30 prompts of up to 1,000 tokens need several forward passes.

    Each rollout equals the one from a call with its prompt alone.
    """
    prompts = make(*[300] * 29, 1000)
    out, shapes = widths(MODEL, prompts, 2, 12)
    assert all(count * length <= 8192 for count, length in shapes) and shapes[-1] == (60, 1)
    for i in (0, 15, 29):
        close(out[i], generate(MODEL, prompts[i : i + 1], 2, 12)[0])


def test_the_bytes_of_keys_and_values_cap_the_cells_of_a_grid():
    """200 cells of 100,000 tokens exceed the limit, so they form several grids, one at a time.

    The rollouts equal those of a run whose cells fit.
    """
    settings = dict(eos_id=[3, 4, 5, 6, 7, 8, 9], seed=1)
    few = generate(MODEL, PROMPTS[2:], 100, 200, **settings)
    grids = []

    def count(_, args):
        if args[0].shape[1] > 1:  # a prefill
            grids.append(sum(type(thing) is sample.Grid for thing in gc.get_objects()))

    with MODEL.register_forward_pre_hook(count):
        many, shapes = widths(MODEL, PROMPTS[2:], 100, 100_000, **settings)
    count(MODEL, [torch.zeros(1, 2)])
    assert grids == [1] * (len(grids) - 1) + [0] and max(cells for cells, _ in shapes) < 100
    for mine, theirs in zip(many, few):
        close(mine, theirs)


# ---- Attention ----------------------------------------------------------------------------------
# (prompts, cells per prompt, query heads, key-value heads, channels per head, the prompts' lengths,
# own tokens in each cell)
ATTENTION = [
    (2, 3, 4, 2, 16, [5, 40], 9),
    (1, 1, 2, 2, 8, [7], 1),  # fewer channels than a kernel's tile, one own token
    (3, 12, 6, 1, 32, [80, 1, 17], 70),  # more queries and keys than fit in a tile
    (2, 4, 8, 2, 24, [64, 3], 1),  # a number of channels that is no power of two
]


# Half precision is float16 here, because Triton's interpreter cannot multiply bf16 matrices.
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("function", ["attend_plainly", "attend_in_kernels"])
@pytest.mark.parametrize("shape", ATTENTION, ids=str)
def test_attention_to_a_shared_prompt(shape, function, dtype):
    """Each cell attends to its prompt and its own tokens, but to nothing stored after them."""
    if function == "attend_in_kernels" and not sample.triton:
        pytest.skip("needs Triton")
    Q, R, H, Hkv, D, lengths, t = shape
    P, T = max(lengths) + 3, t + 5
    g = torch.Generator().manual_seed(0)
    q, prompt_kv, own_kv = (
        torch.randn(size, generator=g).to(dtype)
        for size in ((Q * R, H, 1, D), (2, Q, Hkv, P, D), (2, Q * R, Hkv, T, D))
    )

    expected = torch.empty(q.shape)
    for cell in range(Q * R):
        length = lengths[cell // R]
        for head in range(H):
            prompt = prompt_kv[:, cell // R, head * Hkv // H, :length]
            k, v = torch.cat((prompt, own_kv[:, cell, head * Hkv // H, :t]), 1).float()
            weights = (k @ q[cell, head, 0].float() / math.sqrt(D)).softmax(0)
            expected[cell, head, 0] = weights @ v

    cached = torch.cat((own_kv, own_kv), 1)[:, : Q * R]  # strided, as after Grid.compact
    attend = getattr(sample, function)
    y = attend(q, prompt_kv, torch.tensor(lengths), cached, torch.tensor([t]))
    tolerance = 1e-5 if dtype == torch.float32 else 2e-3
    assert y.dtype == dtype
    torch.testing.assert_close(y.float(), expected, rtol=0, atol=tolerance)


# ---- What a GPU does differently -----------------------------------------------------------------
SHAPES = {
    "qwen2": {},
    "qwen3": dict(model_type="qwen3", head_dim=16),
    "llama": dict(model_type="llama", tie_word_embeddings=False),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_joined_matrices_are_the_same_model(shape, tmp_path):
    """The parameters keep their names, shapes and values, and are stored once.

    A merged LoRA can be joined as well.
    """
    model = tiny(**SHAPES[shape])
    trained = copy.deepcopy(model)
    add_lora(trained, rank=3)
    with torch.no_grad():
        for name, p in trained.named_parameters():
            if ".lora_B" in name:
                p.normal_(std=0.1)
    merged = tiny(**SHAPES[shape])
    merged.load_state_dict(merge_lora(trained.state_dict()))
    for separate, lora in ((model, model), (merged, trained)):
        joined = copy.deepcopy(separate).join()
        for (name, p), (same_name, q) in zip(
            separate.named_parameters(), joined.named_parameters(), strict=True
        ):
            assert name == same_name and torch.equal(p, q)
        ids = torch.tensor([PROMPTS[2]])
        assert torch.allclose(joined(ids), lora(ids), atol=1e-5)
        close(generate(joined, PROMPTS, 2, 20)[3], generate(separate, PROMPTS, 2, 20)[3])

        attention = joined.model.layers[0].self_attn
        whole, bias = attention.joined
        assert (
            attention.v_proj.weight.data_ptr() == whole[-attention.v_proj.out_features :].data_ptr()
        )
        assert (bias is None) == (attention.v_proj.bias is None)
        joined.save_pretrained(str(tmp_path))
        assert torch.equal(Qwen.from_pretrained(str(tmp_path))(ids), separate(ids))


@pytest.mark.parametrize("shape", SHAPES)
def test_compiled_functions_are_those_as_written(shape, monkeypatch, capsys):
    """Compiled functions return what the plain functions do.

    A fourth size causes no further compilation, and only the first compilation prints a line. The
    code path that compiles, which is for bf16 on CUDA, runs on the CPU here.
    """
    monkeypatch.setattr(model_file, "in_bf16_on_gpu", lambda x: x.dtype == torch.bfloat16)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    for name in ("compiled", "announce_compilation"):  # with empty caches
        function = getattr(model_file, name).__wrapped__
        monkeypatch.setattr(model_file, name, functools.cache(function))
    torch._dynamo.reset()
    model = tiny(**SHAPES[shape]).bfloat16()
    prompts = torch.randint(40, (5, 9), generator=torch.Generator().manual_seed(0))

    def results(ids):
        logits = model(ids)
        gradients = torch.autograd.grad(logits.float().square().mean(), list(model.parameters()))
        with torch.inference_mode():
            return [logits.detach(), model(ids), *gradients]

    compiled = [results(prompts[:n, :m]) for n, m in ((3, 5), (4, 9), (2, 7))]
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    compiled.append(results(prompts))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs > 0
    assert capsys.readouterr().err.count("compiling kernels") == 1

    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    monkeypatch.setattr(model_file, "compiled", None)
    for ours, (n, m) in zip(compiled, ((3, 5), (4, 9), (2, 7), (5, 9))):
        for x, y in zip(ours, results(prompts[:n, :m])):
            assert torch.equal(x, y)


class NothingWaits(TorchDispatchMode):
    """A mode that forbids operations that move data to or from the host, as CUDA's capture does."""

    waits = ("item", "_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "lift_fresh")

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert function.overloadpacket.__name__ not in self.waits, function
        return function(*args, **(kwargs or {}))


@torch.inference_mode()
def test_a_step_can_be_captured_as_a_graph():
    """A step never waits for the device, and its tensors stay at their addresses."""
    seeds = torch.arange(8).view(4, 2)
    grid = sample.Grid(
        MODEL, PROMPTS, seeds, 20, lambda logits, u: sample.draw(logits, u, 0.7, 30), [3]
    )
    grid.prefill()
    places = {name: x.data_ptr() for name, x in vars(grid).items() if isinstance(x, torch.Tensor)}
    with NothingWaits():
        for _ in range(5):
            grid.decode()
    assert {name: getattr(grid, name).data_ptr() for name in places} == places and int(grid.t) == 6


@pytest.mark.parametrize(
    "prompts, settings",
    [
        ([], {}),
        ([[1], []], {}),
        ([[1]], dict(n=0)),
        ([[1]], dict(max_new_tokens=0)),
        ([[1]], dict(temperature=-1.0)),
        ([[1]], dict(temperature=math.nan)),
    ],
    ids=str,
)
def test_nothing_to_sample_is_an_error(prompts, settings):
    with pytest.raises(ValueError, match="generate needs"):
        generate(MODEL, prompts, **settings)


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_damaged_weights_are_an_error(value, temperature):
    model = tiny()
    model.model["layers"][0].mlp.up_proj.weight.data[0, 0] = value
    with pytest.raises(ValueError, match="logits are not finite"):
        generate(model, PROMPTS, max_new_tokens=3, temperature=temperature)


def test_the_seeds_of_thousands_of_prompts_take_no_time():
    """Prompts that begin alike are not compared with each other. Equal prompts' seeds differ."""

    class Token(int):
        compared = 0

        def __eq__(self, other):
            Token.compared += 1
            return int(self) == int(other)

        __hash__ = int.__hash__

    prompts = [[Token(1)] * 20 + [i] for i in range(300)]
    seeds = sample.rollout_seeds(prompts, [[0]] * 300, 0)
    assert len({first for [first] in seeds}) == 300 and Token.compared < 300 * 20
    [[first], [second]] = sample.rollout_seeds([[1, 2], [1, 2]], [[0]] * 2, 0)
    assert first != second


def test_a_large_vocabulary_limits_the_cells_of_a_grid():
    """The logits of 20,000 cells and what is computed from them would take 48 GB."""
    model = tiny(vocab=150_000)
    Q, R = sample.grid_shape(model, 10, 4, 20_000)
    assert Q == 1 and 500 < R < 1000


@pytest.mark.parametrize("largest_tiny, dtype", [(10**7, torch.float32), (10, torch.bfloat16)])
def test_a_loaded_sampler_computes_as_training_does(largest_tiny, dtype, folder, monkeypatch):
    """If the hardware has units for bf16, only tiny models compute in fp32."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(model_file, "compute_dtype", lambda device: torch.bfloat16)
    monkeypatch.setattr(model_file, "TINY", largest_tiny)
    model, tokenizer = sample.load_sampler(folder)
    assert model.lm_head.weight.dtype == dtype and len(tokenizer) <= model.config.vocab_size


# ---- The program --------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("checkpoint"))
    Tokenizer(bpe()).save_pretrained(path)
    tiny(vocab=310).save_pretrained(path)
    return path


@pytest.fixture
def program(monkeypatch, capsys):
    """Return a function that runs sample.py in this process, as `python sample.py WORDS` would.

    The function returns the exit status, the output and the errors.
    """
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["sample.py", *words])
        status = 0
        try:
            runpy.run_path(sample.__file__, run_name="__main__")
        except SystemExit as end:
            status = end.code
        out, err = capsys.readouterr()
        # Python prints a message that is given to SystemExit, and exits with status 1.
        return (1, out, f"{err}{status}\n") if isinstance(status, str) else (status, out, err)

    return run


def test_the_program_answers_from_a_checkpoint(folder, program):
    """sample.py prints n answers to the command's words; equal seeds give equal answers."""
    command = f"--checkpoint={folder}", "--n=3", "--max_new_tokens=9", "two", "words"
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    run = subprocess.run(
        [sys.executable, sample.__file__, *command],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0 and " …\n" in run.stdout, run.stderr
    assert program(*command)[1] == run.stdout != program(*command, "--seed=5")[1]


def test_an_answer_ends_where_the_context_does(tmp_path, program):
    tokenizer = Tokenizer(bpe())
    tokenizer.save_pretrained(str(tmp_path))
    context = len(tokenizer.chat([{"role": "user", "content": "hi"}])) + 4
    tiny(vocab=310, max_position_embeddings=context).save_pretrained(str(tmp_path))
    command = f"--checkpoint={tmp_path}", "--n=9", "hi"
    assert program(*command, "--max_new_tokens=10000000000") == program(
        *command, "--max_new_tokens=4"
    )


def test_a_tokenizer_of_another_model_is_refused(tmp_path, program):
    Tokenizer(bpe()).save_pretrained(str(tmp_path))
    tiny(vocab=300).save_pretrained(str(tmp_path))
    status, _, error = program(f"--checkpoint={tmp_path}", "hi")
    assert status == 1 and "ids up to" in error and "Traceback" not in error


@pytest.mark.parametrize(
    "words, said",
    [
        (["--checkpoint=x"], "usage"),
        (["--checkpoint=/nowhere", "hi"], "/nowhere is no folder"),
        (["--chekpoint=x", "hi"], "did you mean --checkpoint?"),
        (["--checkpoint={}", "hi", "--n=0"], "n and"),
        (["--checkpoint={}", "hi " * 40_000], "does not fit into the model's context of 32768"),
    ],
)
def test_the_program_says_what_is_wrong(words, said, folder, program):
    status, _, error = program(*(word.format(folder) for word in words))
    assert status and said in error and "Traceback" not in error
