"""On a GPU: graphs against plain steps, the bf16 sampler against a full forward, fp32 logits against double precision."""
import copy
import json
import os
import re
import subprocess
import sys
import threading

import pytest
import torch

import sample
import train
from eval import load
from grpo import packed_logprobs
from model import Config, Qwen, write_tensors
from sample import generate
from workers import load_pool
from test_sample import PROMPTS, make, tiny

ROOT = os.path.dirname(os.path.abspath(train.__file__))
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
WIDE = dict(vocab_size=152064, num_hidden_layers=2)  # Qwen2.5-7B's widths, two layers of it: 1.6 B parameters


@pytest.fixture(scope="module")
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
    assert [[(c.tokens, c.finished) for c in rollouts] for rollouts in a] == [[(c.tokens, c.finished) for c in rollouts] for rollouts in b]


# -------------------------------------------------------------------------------------------------------------
# model.py


@pytest.mark.parametrize("rows", [1, 8, 300])
def test_logits_are_fp32(rows, wide):
    """bf16 in, fp32 out: a thousand times nearer to double precision than logits that are rounded to bf16; gradients too are
    those of double precision, rounded to bf16."""
    hidden = torch.randn(rows, 3584, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = wide.lm_head.weight
    logits = wide.logits(hidden)
    exact = hidden.double() @ weight.double().T
    assert logits.dtype == torch.float32 and logits.shape == (rows, 152064)
    error = (logits - exact).abs().max()
    assert error < 1e-3 * (exact.bfloat16() - exact).abs().max(), error
    direction = torch.randn_like(logits)
    grads = torch.autograd.grad(logits, (hidden, weight), direction)
    expected = direction.double() @ weight.double(), direction.double().T @ hidden.double()
    for grad, double in zip(grads, expected):
        assert grad.dtype == torch.bfloat16 and (grad - double).norm() < 0.01 * double.norm()


# -------------------------------------------------------------------------------------------------------------
# sample.py


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("how", [dict(temperature=0.0), dict(), dict(top_p=0.9, top_k=7)], ids=str)
def test_graphs_equal_plain_steps(how, dtype, captures, monkeypatch):
    """The same rollouts with captured graphs as without."""
    model = tiny().to("cuda", dtype)
    graphs = generate(model, PROMPTS, 6, 600, eos_id=3, **how)
    assert captures
    monkeypatch.setitem(sample.GRAPH, "cuda", False)
    same(graphs, generate(model, PROMPTS, 6, 600, eos_id=3, **how))


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
    assert gaps.mean() < 0.02 and gaps.max() < 0.3


def test_few_captures_an_iteration(captures):
    """4 prompts x 64 rollouts of up to 1,024 tokens: fewer than 10 graphs."""
    out = generate(tiny(vocab=300).to("cuda", torch.bfloat16), make(200, 150, 100, 64), 64, 1024, eos_id=[3, 4])
    assert len({len(c.tokens) for rollouts in out for c in rollouts}) > 50 and 4 <= len(captures) < 10


def test_other_threads_may_use_the_gpu(captures):
    """A thread that calls CUDA all the while, as a worker's might, breaks no capture and changes no rollout."""
    model = tiny().cuda()
    alone = generate(model, PROMPTS, 6, 600, eos_id=3)
    done = threading.Event()

    def work():
        while not done.is_set():
            torch.randn(999, device="cuda").sort()[0].sum().item()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        same(generate(model, PROMPTS, 6, 600, eos_id=3), alone)
    finally:
        done.set()
        thread.join()


def test_ctrl_c_in_the_midst(captures):
    """An exception between replays comes out, and generation works again afterwards, with as much memory as before."""
    model = tiny().cuda()
    expected = generate(model, PROMPTS, 6, 600, eos_id=3)
    before = torch.cuda.memory_allocated()

    def stop(*_):
        if len(captures) > 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        captures.clear()
        generate(model, PROMPTS, 600, 600, eos_id=3, on_finish=stop)
    captures.clear()
    assert torch.cuda.memory_allocated() <= before
    same(generate(model, PROMPTS, 6, 600, eos_id=3), expected)


# -------------------------------------------------------------------------------------------------------------
# grpo.py and train.py


def run_train(*argv):
    """train.py on every GPU that is here, two at most: its output."""
    ranks = min(2, torch.cuda.device_count())
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", "train.py", *argv]
    end = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert end.returncode == 0, end.stdout + end.stderr
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


def test_seven_billions_widths_are_trained_saved_and_resumed(wide_checkpoint, tmp_path):
    """Two iterations with FSDP, bf16 computation and recomputed layers; two more after resuming: the sampler and the trainer agree,
    nothing is skipped, and the measured peak is what was estimated, or less, within a fifth."""
    out = tmp_path / "out"
    how = ["--preset=small", f"--init_from={wide_checkpoint}", "--style=short", f"--out={out}", "--questions=2", "--rollouts=32",
           "--max_new_tokens=256", "--save_every=2", "--eval_every=0", "--test=8", "--keep=1"]
    said = run_train(*how, "--iterations=2")
    estimated = float(re.search(r"at most ([\d.]+) GiB a process", said)[1])
    run_train(*how, "--iterations=4", "--resume")
    for line in lines(out):
        assert line["gap"] < 0.05 and line["skipped"] == 0 and line["parsed"] == 0  # random weights write no workflow
    assert [line["iteration"] for line in lines(out)] == [0, 1, 2, 3]
    assert 0.5 * estimated < lines(out)[1]["memory"] < 1.2 * estimated


def test_the_laptop_run_learns_on_a_gpu(tmp_path):
    """Twenty iterations, in fp32 as on a CPU: the reward rises."""
    run_train("--preset=laptop", "--iterations=20", "--test=8", "--eval_every=0", f"--out={tmp_path}/out")
    rewards = [line["reward"] for line in lines(tmp_path / "out")]
    assert sum(rewards[-5:]) > sum(rewards[:5]) + 0.05 * 5, rewards
    assert max(line["gap"] for line in lines(tmp_path / "out")) < 1e-3


def test_a_packed_row_on_a_gpu_is_that_of_a_cpu():
    """fp32: log-probabilities and gradients agree with the CPU's."""
    model, groups = tiny(), [([1, 2, 3], [[4, 5], [6]]), ([7], [[8, 9, 3]])]
    here = torch.cat(packed_logprobs(model, groups)[0])
    there_model = copy.deepcopy(model).cuda()
    there = torch.cat(packed_logprobs(there_model, groups)[0])
    torch.testing.assert_close(there.cpu(), here, rtol=0, atol=1e-4)
    (here.sum() + 0).backward()
    there.sum().backward()
    for a, b in zip(model.parameters(), there_model.parameters()):
        torch.testing.assert_close(b.grad.cpu(), a.grad, rtol=1e-3, atol=1e-4)
