"""On a GPU: graphs against plain steps, the bf16 sampler against a full forward, fp32 logits against double precision.

The order is that of first contact: what fails first is the likely cause of what fails after it."""
import copy
import gc
import json
import os
import re
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend

import sample
import train
from eval import load
from grpo import packed_logprobs, to_device
from model import Config, Qwen, write_tensors
from sample import generate
from workers import load_pool
from test_sample import PROMPTS, make, tiny

ROOT = os.path.dirname(os.path.abspath(train.__file__))
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
WIDE = dict(vocab_size=152064, num_hidden_layers=2)  # Qwen2.5-7B's widths, two layers of it: 1.6 B parameters


@pytest.fixture
def wide():
    torch.manual_seed(0)
    with torch.device("meta"):
        model = Qwen(Config(**WIDE))
    model = model.to_empty(device="cuda").bfloat16()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.fill_(1.0) if "norm" in name else p.normal_(std=0.02)
    yield model
    del model
    torch.cuda.empty_cache()


@pytest.fixture
def captures(monkeypatch):
    """The graphs that are captured."""
    graphs, capture = [], sample.capture

    def counting(decode, before):
        graphs.append(capture(decode, before))
        return graphs[-1]

    monkeypatch.setattr(sample, "capture", counting)
    return graphs


def same(a, b):
    """The same tokens. The first difference is shown with both log-probabilities: if these are nearly equal, kernels that round
    otherwise were chosen; if not, a graph read what is no longer there."""
    pairs = [pair for rollouts, others in zip(a, b) for pair in zip(rollouts, others)]
    for number, (c, d) in enumerate(pairs):
        for t, two in enumerate(zip(c.tokens, d.tokens)):
            assert two[0] == two[1], f"rollout {number} of {len(pairs)}, token {t}: {two}, {c.logprobs[t]} and {d.logprobs[t]}"
        assert len(c.tokens) == len(d.tokens) and c.finished == d.finished, f"rollout {number}: {len(c.tokens)}, {len(d.tokens)}"


# -------------------------------------------------------------------------------------------------------------
# model.py


@pytest.mark.parametrize("rows", [1, 8, 300])
def test_logits_are_fp32(rows, wide):
    """bf16 in, fp32 out: a hundred times nearer to double precision than logits that are rounded to bf16 (tensor cores cut off
    where they add, which costs some of a thousand); gradients too are those of double precision, rounded to bf16."""
    hidden = torch.randn(rows, 3584, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = wide.lm_head.weight
    logits = wide.logits(hidden)
    with torch.no_grad():
        exact = hidden.double() @ weight.double().T
    assert logits.dtype == torch.float32 and logits.shape == (rows, 152064)
    error = (logits - exact).abs().max()
    rounded = (exact.bfloat16() - exact).abs().max()
    assert error < 0.01 * rounded, f"error {error:.2g}, of bf16 logits {rounded:.2g}: is model.matmul_fp32's output fp32 inside?"
    direction = torch.randn_like(logits)
    by_hidden, by_weight = torch.autograd.grad(logits, (hidden, weight), direction)

    @torch.no_grad()
    def check(grad, double):
        assert grad.dtype == torch.bfloat16 and (grad - double).norm() < 0.01 * double.norm()

    check(by_hidden, direction.double() @ weight.detach().double())
    for grad, columns in zip(by_weight.split(8192), direction.split(8192, dim=1)):  # in pieces, for a GPU of 16 GB
        check(grad, columns.double().T @ hidden.detach().double())


@pytest.mark.parametrize("length", [2, 999, 1051])
def test_attention_runs_in_flash(length):
    """Of PyTorch's backends flash alone takes grouped heads in bf16 at any length without a plan for each, which is what cuDNN,
    the first choice on Hopper, needs up to a second for. (What this asks is a private function of PyTorch.)"""
    q, k, v = (torch.randn(1, heads, length, 128, device="cuda", dtype=torch.bfloat16) for heads in (28, 4, 4))
    chosen = torch._fused_sdp_choice(q, k, v, is_causal=True, enable_gqa=True)
    assert SDPBackend(chosen) == SDPBackend.FLASH_ATTENTION


# -------------------------------------------------------------------------------------------------------------
# sample.py


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("how", [dict(temperature=0.0), dict(), dict(top_p=0.9, top_k=7)], ids=str)
def test_graphs_equal_plain_steps(how, dtype, captures, monkeypatch):
    """The same rollouts with captured graphs as without, over several growths and compactions."""
    monkeypatch.setitem(sample.BUCKET, "cuda", 16)
    model = tiny().to("cuda", dtype)
    graphs = generate(model, PROMPTS, 6, 600, eos_id=3, **how)
    assert len(captures) > 1
    monkeypatch.setitem(sample.GRAPH, "cuda", False)
    same(graphs, generate(model, PROMPTS, 6, 600, eos_id=3, **how))


@pytest.mark.parametrize("lengths, rows", [((70,), 1), ((9, 70), 40)])
def test_a_large_vocabulary_is_sorted_in_a_graph(lengths, rows, wide, captures, monkeypatch):
    """152,064 ids are sorted and summed by other kernels than forty, and those of one row by others again."""
    prompts, how = make(*lengths, vocab=150_000), dict(top_p=0.9, top_k=50, temperature=0.7, n_ids=151_665)
    graphs = generate(wide, prompts, rows, 24, **how)
    assert captures
    monkeypatch.setitem(sample.GRAPH, "cuda", False)
    same(graphs, generate(wide, prompts, rows, 24, **how))
    assert all(logprob > -20 for rollouts in graphs for c in rollouts for logprob in c.logprobs)  # nothing that was cut away


def test_the_sampler_is_the_policy_of_a_full_forward(wide):
    """bf16 at 7B's widths, after growth and compaction: log-probabilities differ little from those of one full forward."""
    prompts = make(1051, 300, vocab=150_000)
    out = generate(wide, prompts, 16, 300, eos_id=list(range(400)), n_ids=151_000)
    gaps = []
    for prompt, rollouts in zip(prompts, out):
        for c in rollouts:
            ids = torch.tensor([prompt + c.tokens], device="cuda")
            with torch.no_grad():
                logp = wide(ids)[0, len(prompt) - 1:-1, :151_000].log_softmax(-1)
            gaps.append((logp.gather(1, ids[0, len(prompt):, None])[:, 0] - torch.tensor(c.logprobs, device="cuda")).abs())
    gaps = torch.cat(gaps)
    assert {c.finished for rollouts in out for c in rollouts} == {True, False}
    print(f"|sampler - full forward|: mean {gaps.mean():.5f}, largest {gaps.max():.5f} of {len(gaps)} tokens")
    assert gaps.mean() < 0.02 and gaps.max() < 0.3, "sample.attend_shared against model.causal; the positions; the fp32 logits"


def test_few_captures_an_iteration(captures):
    """4 prompts x 64 rollouts of up to 1,024 tokens: fewer than 10 graphs."""
    out = generate(tiny(vocab=300).to("cuda", torch.bfloat16), make(200, 150, 100, 64), 64, 1024, eos_id=[3, 4])
    assert len({len(c.tokens) for rollouts in out for c in rollouts}) > 50 and 4 <= len(captures) < 10


def test_other_threads_may_use_the_gpu(captures, monkeypatch):
    """A thread that calls CUDA all the while, as a worker's might, breaks no capture and changes no rollout. (It may not draw
    random numbers: CUDA's generator belongs to the capture meanwhile.)"""
    monkeypatch.setitem(sample.BUCKET, "cuda", 16)
    model = tiny().cuda()
    alone = generate(model, PROMPTS, 6, 600, eos_id=3)
    done, rounds, errors = threading.Event(), [], []

    def work():
        try:
            while not done.is_set():
                rounds.append(torch.arange(999, device="cuda").flip(0).sort()[0].sum().item())
        except Exception as e:
            errors.append(e)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        same(generate(model, PROMPTS, 6, 600, eos_id=3), alone)
    finally:
        done.set()
        thread.join()
    assert rounds and not errors and len(captures) > 2, errors


def test_ctrl_c_in_the_midst(captures):
    """An exception between replays comes out, and generation works again afterwards, with as much memory as before."""
    model = tiny().cuda()
    expected = generate(model, PROMPTS, 6, 600, eos_id=3)

    def memory():  # what is cached for a graph counts as reserved until the graph is gone
        captures.clear()
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

    before = memory()

    def stop(*_):
        if len(captures) > 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate(model, PROMPTS, 600, 600, eos_id=3, on_finish=stop)  # 2,400 rows of keys and values: 400 MB
    for now, then in zip(memory(), before):
        assert now < then + 100e6, "of the grid that was left, or of its graphs, something is still held"
    same(generate(model, PROMPTS, 6, 600, eos_id=3), expected)


# -------------------------------------------------------------------------------------------------------------
# grpo.py and train.py


def test_a_packed_row_on_a_gpu_is_that_of_a_cpu():
    """fp32: log-probabilities and gradients agree with the CPU's."""
    model, groups = tiny(), [([1, 2, 3], [[4, 5], [6]]), ([7], [[8, 9, 3]])]
    here, _ = packed_logprobs(model, groups)
    there_model = copy.deepcopy(model).cuda()
    there, _ = packed_logprobs(there_model, groups)
    torch.testing.assert_close(there.cpu(), here, rtol=0, atol=1e-4)
    (here.sum() + 0).backward()
    there.sum().backward()
    for a, b in zip(model.parameters(), there_model.parameters()):
        torch.testing.assert_close(b.grad.cpu(), a.grad, rtol=1e-3, atol=1e-4)


def test_nothing_can_be_moved_to_a_gpu():
    """A rank without rollouts of its own has empty arrays."""
    assert to_device(np.zeros((3, 0), dtype=np.float32), torch.device("cuda")).shape == (3, 0)


def run_train(*argv):
    """train.py on every GPU that is here, two at most: its output."""
    torch.cuda.empty_cache()  # what this process has cached others cannot have
    ranks = min(2, torch.cuda.device_count())
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", "train.py", *argv]
    end = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert end.returncode == 0, f"{' '.join(command)}\n{end.stdout}\n{end.stderr}"
    return end.stdout


def lines(out):
    with open(out / "metrics.jsonl") as f:
        return [json.loads(line) for line in f]


@pytest.fixture(scope="module")
def wide_checkpoint(tmp_path_factory):
    """Qwen2.5-7B's widths with two layers, a fifth of its vocabulary (three checkpoints shall fit on a disk) and the laptop world's
    tokenizer, in Hugging Face's layout."""
    folder = tmp_path_factory.mktemp("wide")
    torch.manual_seed(0)
    model = Qwen(Config(vocab_size=32_000, num_hidden_layers=2)).bfloat16()
    write_tensors(str(folder), model.config, model.named_parameters())
    problems, pool, s = load("laptop", "train", 200), load_pool("local", "http://127.0.0.1:9/v1"), train.Settings()
    train.tiny_conductor(s, problems, pool)[1].save_pretrained(str(folder))
    return folder


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_properties(0).total_memory < 23e9,
                    reason="train.estimate says 22 GiB for one process")
def test_seven_billions_widths_are_trained_saved_and_resumed(wide_checkpoint, tmp_path):
    """Two iterations with FSDP, bf16 computation, recomputed layers and a reference policy; two more after resuming, offloaded to
    the CPU: the sampler and the trainer agree, nothing is skipped, and the measured peak is what was estimated, or less.
    Random weights write no workflow, so no rollout differs from another in reward: it is the KL that makes them count."""
    out = tmp_path / "out"
    how = ["--preset=small", f"--init_from={wide_checkpoint}", "--style=short", f"--out={out}", "--questions=2", "--rollouts=32",
           "--max_new_tokens=256", "--token_budget=2048", "--save_every=2", "--eval_every=0", "--test=8", "--keep=1", "--beta=0.01"]
    said = run_train(*how, "--iterations=2")
    estimated = float(re.search(r"at most ([\d.]+) GiB a process", said)[1])
    run_train(*how, "--iterations=4", "--resume", "--offload")
    for line in lines(out):
        assert line["parsed"] == 0 and line["skipped"] == 0
        assert 0 < line["gap"] < 0.05, "the sampler's log-probabilities and grpo.packed_logprobs differ"
        assert line["entropy"] > 1 and line["kl"] < 0.1  # tokens were learned from, near the reference
    assert [line["iteration"] for line in lines(out)] == [0, 1, 2, 3]
    peaks = [round(line["memory"], 1) for line in lines(out)]
    print(f"GiB measured {peaks}, the last two with --offload; estimated without {estimated}; seconds {lines(out)[1]['seconds']}")
    assert 0.5 * estimated < peaks[1] < 1.2 * estimated, f"measured {peaks}, train.memory says {estimated}:\n{said}"
    assert peaks[3] < peaks[1], "with --offload weights and moments are not on the GPU"


def test_the_laptop_run_learns_on_a_gpu(tmp_path):
    """Sixty iterations, in fp32 as on a CPU: the reward rises. (On CPUs it has risen by 0.1 to 0.2 by then.)"""
    run_train("--preset=laptop", "--iterations=60", "--test=8", "--eval_every=0", f"--out={tmp_path}/out")
    rewards = [line["reward"] for line in lines(tmp_path / "out")]
    print(f"rewards {rewards[:5]} … {rewards[-5:]}, seconds of the last iteration {lines(tmp_path / 'out')[-1]['seconds']}")
    assert max(line["gap"] for line in lines(tmp_path / "out")) < 1e-3, "fp32: is TF32 switched on?"
    assert sum(rewards[-5:]) > sum(rewards[:5]) + 0.05 * 5, rewards
