"""Tests that need a GPU.

Logits are compared with double precision, the sampler with full forward passes, kernels with plain
functions that compute the same, and packed rows with packed rows on a CPU. The tests proceed from
parts to short runs of train.py, so the first test that fails probably explains later failures.
"""

import copy
import json
import os
import subprocess
import sys

import pytest
import torch
from torch.nn.attention import SDPBackend

import grpo
import sample
from grpo import packed_logprobs
from model import Config, Qwen, Tokenizer
from sample import generate

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


def random_model(dtype, **shape) -> Qwen:
    torch.manual_seed(0)
    return Qwen(Config(**shape)).to("cuda", dtype)


@pytest.fixture(scope="module")
def wide():
    """Return a model with the widths of Qwen2.5-7B and two layers: 1.6 B parameters."""
    return random_model(torch.bfloat16, vocab_size=152064, num_hidden_layers=2)


@pytest.mark.parametrize("rows", [1, 8, 300])
def test_logits_are_fp32(rows, wide):
    """The largest error is less than 1 % of the largest error of exact logits rounded to bf16."""
    hidden = torch.randn(rows, 3584, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    logits = wide.logits(hidden)
    with torch.no_grad():
        exact = hidden.double() @ wide.lm_head.weight.double().T
    assert logits.dtype == torch.float32
    assert (logits - exact).abs().max() < 0.01 * (exact.bfloat16() - exact).abs().max()
    direction = torch.randn_like(logits)
    [grad] = torch.autograd.grad(logits, hidden, direction)
    double = direction.double() @ wide.lm_head.weight.detach().double()
    assert (grad - double).norm() < 0.01 * double.norm()


@pytest.mark.parametrize("length", [2, 999, 1051])
def test_attention_runs_in_flash(length):
    q, k, v = (
        torch.randn(1, h, length, 128, device="cuda", dtype=torch.bfloat16) for h in (28, 4, 4)
    )
    chosen = torch._fused_sdp_choice(q, k, v, is_causal=True, enable_gqa=True)
    assert SDPBackend(chosen) == SDPBackend.FLASH_ATTENTION


def test_the_sampler_is_the_policy_of_a_full_forward(wide):
    """The sampler's log-probabilities differ little from those of full forward passes.

    The sampler computes in bf16 with CUDA graphs, and twice drops finished rollouts (Grid.compact).
    """
    prompts = [torch.randint(150_000, (length,)).tolist() for length in (1051, 300)]
    out = generate(wide, prompts, 16, 300, eos_id=list(range(400)), n_ids=151_000)
    gaps = []
    for prompt, rollouts in zip(prompts, out):
        for c in rollouts:
            ids = torch.tensor([prompt + c.tokens], device="cuda")
            with torch.no_grad():
                logp = wide(ids)[0, len(prompt) - 1 : -1, :151_000].log_softmax(-1)
            drawn = logp.gather(1, ids[0, len(prompt) :, None])[:, 0]
            gaps.append((drawn - torch.tensor(c.logprobs, device="cuda")).abs())
    gaps = torch.cat(gaps)
    print(
        f"|sampler - full forward|: mean {gaps.mean():.5f}, largest {gaps.max():.5f} "
        f"of {len(gaps)} tokens"
    )
    assert gaps.mean() < 0.02 and gaps.max() < 0.3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("channels", [32, 64, 80, 128])
def test_the_kernels_of_a_step_attend_as_the_plain_function_does(channels, dtype):
    """Prompts differ in length. In the cache, NaN fills the places after a rollout's own tokens."""
    for Q, R, H, Hkv, own in ((4, 64, 28, 4, 130), (1, 1, 8, 8, 1), (2, 5, 6, 1, 63)):
        lengths = torch.tensor([211 - 70 * i for i in range(Q)], device="cuda").clamp(min=1)
        q = torch.randn(Q * R, H, 1, channels, device="cuda").to(dtype)
        prompt_kv = torch.randn(2, Q, Hkv, 256, channels, device="cuda").to(dtype)
        own_kv = torch.randn(2, Q * R + 3, Hkv, 192, channels, device="cuda").to(dtype)
        own_kv = own_kv[:, : Q * R, :, :160]  # not contiguous, as after Grid.compact
        own_kv[:, :, :, own:] = torch.nan
        t = torch.tensor([own], device="cuda")
        y = sample.attend_in_kernels(q, prompt_kv, lengths, own_kv, t)

        expected = sample.attend_plainly(q.float(), prompt_kv, lengths, own_kv.nan_to_num(), t)
        tolerance = 1e-4 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(y.float(), expected, rtol=0, atol=tolerance)


def test_a_packed_row_attends_in_one_kernel_as_it_does_in_turn():
    """varlen_attn and attend_in_turn have the same values and gradients, up to bf16's rounding."""
    prompts = [[1] * 300, [2] * 5]
    groups = [(prompt, [[3] * n for n in (1, 64, 200, 77)]) for prompt in prompts]
    *_, attend = grpo.pack(groups, torch.device("cuda"))
    T = sum(len(prompt) + 342 for prompt in prompts)
    results = []
    for dtype in (torch.bfloat16, torch.float32):  # with varlen_attn, with attend_in_turn
        torch.manual_seed(0)
        qkv = [torch.randn(1, h, T, 64, device="cuda").bfloat16() for h in (6, 2, 2)]
        qkv = [x.to(dtype).requires_grad_() for x in qkv]
        y = attend(0, *qkv)
        direction = torch.randn(y.shape, device="cuda")
        results.append([y, *torch.autograd.grad((y.float() * direction).sum(), qkv)])
    for x, exact in zip(*results):
        assert (x.float() - exact).norm() < 0.01 * exact.norm()


def test_a_joined_and_compiled_model_is_the_model(wide, monkeypatch):
    """With 7B's widths in bf16, log-probabilities differ by less than 0.02 on average."""
    ids = torch.randint(150_000, (2, 200), device="cuda")
    with torch.inference_mode():  # here, @fused compiles its functions for small tensors, too
        compiled = wide(ids).log_softmax(-1)
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    with torch.no_grad():
        plain = wide(ids).log_softmax(-1)
        joined = copy.deepcopy(wide).join()(ids).log_softmax(-1)
    for other in (compiled, joined):
        assert (other - plain).abs().mean() < 0.02


def test_a_packed_row_on_a_gpu_is_that_of_a_cpu():
    shape = dict(vocab_size=40, hidden_size=32, intermediate_size=64, num_hidden_layers=2)
    there = random_model(torch.float32, num_attention_heads=4, num_key_value_heads=2, **shape)
    here = copy.deepcopy(there).cpu()
    groups = [([1, 2, 3], [[4, 5], [6]]), ([7], [[8, 9, 3]])]
    a, _ = packed_logprobs(here, groups)
    b, _ = packed_logprobs(there, groups)
    torch.testing.assert_close(b.cpu(), a, rtol=0, atol=1e-4)
    a.sum().backward()
    b.sum().backward()
    for p, q in zip(here.parameters(), there.parameters()):
        torch.testing.assert_close(q.grad.cpu(), p.grad, rtol=1e-3, atol=1e-4)


def train(out, *flags) -> list[dict]:
    """Run train.py on at most two GPUs and return its metrics, one dict per iteration."""
    torch.cuda.empty_cache()  # train.py needs the memory that this process has cached
    ranks = min(2, torch.cuda.device_count())
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={ranks}",
    ]
    command = [*torchrun, "train.py", f"--out={out}", *flags]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    with open(f"{out}/metrics.jsonl") as file:
        return [json.loads(line) for line in file]


def test_seven_billions_widths_are_trained_saved_and_resumed(tmp_path):
    """Train for two iterations with FSDP in bf16, then resume with --offload for two more.

    A model with random weights writes no valid workflow. So all rewards are equal, and only the KL
    has a gradient.
    """
    torch.manual_seed(0)
    model = Qwen(Config(vocab_size=32_000, num_hidden_layers=2)).bfloat16()
    model.save_pretrained(str(tmp_path / "wide"))
    Tokenizer.from_pretrained(os.path.join(ROOT, "assets", "laptop")).save_pretrained(
        str(tmp_path / "wide")
    )
    flags = [
        "--preset=small",
        f"--init_from={tmp_path}/wide",
        "--n_questions=2",
        "--n_rollouts=32",
        "--beta=0.01",
        "--max_new_tokens=256",
        "--token_budget=2048",
        "--save_every=2",
        "--n_test=8",
        "--warm_steps=0",
    ]
    train(tmp_path / "out", *flags, "--iterations=2")
    lines = train(tmp_path / "out", *flags, "--iterations=4", "--resume", "--offload")
    assert [line["iteration"] for line in lines] == [0, 1, 2, 3]
    for line in lines:
        assert line["skipped"] == 0 and 0 < line["gap"] < 0.05 and line["kl"] < 0.1
    print(f"GiB {[round(line['memory'], 1) for line in lines]}, the last two with --offload")


def test_the_laptop_run_learns_on_a_gpu(tmp_path):
    lines = train(
        tmp_path / "out", "--preset=laptop", "--device=cuda", "--iterations=60", "--n_test=8"
    )
    rewards = [line["reward"] for line in lines]
    assert max(line["gap"] for line in lines) < 1e-3, "fp32: is TF32 switched on?"
    assert sum(rewards[-5:]) > sum(rewards[:5]) + 0.25, rewards
