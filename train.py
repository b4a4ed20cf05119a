"""Train a Conductor with GRPO.

    torchrun --nproc_per_node=2 train.py                      the laptop world on a CPU, in minutes; with two GPUs the paper's run
    torchrun --nproc_per_node=2 train.py --preset=laptop      the laptop world anywhere
    python train.py --iterations=20 --seed=2                  any setting below is a flag; one process works too

One iteration: sample workflows, run them over the workers, reward their answers, update. A run writes into --out: metrics.jsonl (a line
an iteration), traces/ (every workflow with what its workers said), checkpoints/ (Hugging Face's layout; checkpoint is the newest), and ends
with a table. Killed at any moment, it goes on with --resume; on a CPU and with workers who say the same again, as if nothing had happened.
"""
import collections
import contextlib
import datetime
import glob
import itertools
import json
import math
import os
import random
import shutil
import signal
import sys
import time
from dataclasses import asdict, dataclass, replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tokenizers import AddedToken, Regex, Tokenizer as BPE, decoders, models, pre_tokenizers, trainers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from tqdm import tqdm

import eval as evaluation
from eval import grade, load, random_completion
from grpo import HEAD_LOGITS, LOSSES, Episode, advantages, importance, packed_logprobs, update
from model import Config, Qwen, Tokenizer, configure, local_part, read_json, read_tensors, write_json, write_tensors
from sample import generate, timed
from workers import Reply, WorkerError, load_pool
from workflow import Prompting, Rollout, Task, Trace, Workflow, ask, messages, parse, roll_out, sampled, submit


@dataclass
class Settings:
    preset: str = ""  # laptop, paper, pairs, pools, recursive (PRESETS below); "": paper where each process has a GPU, else laptop
    out: str = "out/laptop"
    seed: int = 1
    init_from: str = ""  # a checkpoint folder; "" makes a tiny model and teaches it the format first (warm_steps)
    data: str = "laptop"
    pool: str = "local"
    budget: float = 0.0  # dollars that the workers may cost; before it is passed the run stops, with a checkpoint. 0: no limit
    replay: str = ""  # a file that keeps the replies to rollouts, so that a run started again does not pay for them again
    style: str = "short"  # of the Conductor's prompt: full (App. E), or short for models too small to read instructions
    named: bool = False  # the prompt gives each worker a letter besides its number; it stays its own in any subset of the pool
    max_steps: int = 5  # of a workflow
    # the two extensions (§3.2)
    subset: int = 0  # each question may use some of the workers, drawn by chance, this many or more; 0: all
    recursion: bool = False  # half of the questions get a second round; first rounds' rewards then count a quarter
    # the reward (§3.1)
    no_workflow: float = 0.0
    wrong: float = 0.5
    right: float = 1.0
    # one iteration (App. A.1)
    iterations: int = 360
    questions: int = 8
    rollouts: int = 64  # of each question
    max_new_tokens: int = 96
    temperature: float = 1.0
    # the objective (Eqs. 1 and 2) and AdamW
    lr: float = 1e-3
    beta2: float = 0.99  # of AdamW
    warmup: float = 0.03  # share of the run over which lr rises; then it falls as a cosine
    clip: float = 0.2
    clip_high: float = 0.0  # another clip above 1; 0: the same
    std: bool = True  # False: advantages are only centred
    loss: str = "sequence"  # mean over tokens and then rollouts, "token" over all tokens, "constant" by rollouts x max_new_tokens
    importance: float = 0.0  # cap of the weights that undo the difference between sampler and trainer; 0: no weights
    epochs: int = 1  # over an iteration's rollouts
    beta: float = 0.2  # weight of the KL to a reference policy; it fades to 0 over the run
    reference: str = ""  # the checkpoint folder of that policy; "": where the run starts
    minibatches: int = 4  # optimizer steps an iteration, each on its share of every group
    token_budget: int = 8192  # of a micro-batch
    recompute: bool = False  # layers keep only their inputs for the backward pass: less memory, a third more work
    offload: bool = False  # weights, gradients and Adam's state of the trainer are in the CPU's memory
    # the tiny model, and the warm start that teaches it the format
    width: int = 128
    layers: int = 2
    warm_steps: int = 400
    warm_batch: int = 32
    warm_lr: float = 6e-3
    warm_second: float = 0.0  # share of its examples that are second rounds (recursion)
    test: int = 224  # held-out problems, at the end
    test_data: str = ""  # where they are from; "": the test split of data
    # checkpoints
    save_every: int = 40  # iterations
    keep: int = 2  # of the newest; the best is kept too
    bench: bool = False  # time a group of 64 x 250 tokens over a prompt of 1000, shared and not, instead of a run
    dry_run: bool = False  # say what the run would take and what it lacks, and do nothing
    resume: bool = False  # go on from the newest checkpoint in out, if there is one
    # ablations (README)
    access: bool = True  # False: access lists are forced empty
    subtasks: bool = True  # False: every subtask reads "Solve the question."


# The two finetuning extensions (§3.2) live in a laptop world with two workers for each trade; "pairs" trains what they start from. Their KL is to
# the policy that "pairs" itself started from, its warm start: that still tries every worker and length, where the trained one hardly explores.
PAIRS = dict(pool="local:pairs", named=True, warm_steps=1000, warm_second=0.2)
TUNE = dict(PAIRS, init_from="out/pairs/checkpoint", reference="out/pairs/reference", iterations=160, lr=3e-4, beta=0.05)
PRESETS = {
    "laptop": {},
    "pairs": dict(PAIRS, out="out/pairs", iterations=540),
    "pools": dict(TUNE, out="out/pools", subset=4),
    "recursive": dict(TUNE, out="out/recursive", pool="local:tired", recursion=True),
    "paper": dict(out="out/paper", init_from="models/Qwen/Qwen2.5-7B", data="paper", pool="paper", style="full", iterations=200, questions=4,
                  rollouts=64, max_new_tokens=1024, lr=1e-6, beta2=0.999, beta=0.0, minibatches=1, token_budget=8192, recompute=True, save_every=10),
}
ZERO = ("seed", "budget", "beta", "clip_high", "importance", "warmup", "warm_steps", "warm_second", "subset")  # numbers that may be 0
REWARD = ("no_workflow", "wrong", "right")  # that may be any

# ---------------------------------------------------------------------------------------------------------------------------------
# The tiny Conductor: a tokenizer and a model made on the spot, and a warm start that teaches the format and nothing else


def tiny_tokenizer(texts: list[str]) -> Tokenizer:
    """A byte-level BPE like Qwen2.5's, of 900 tokens. Its pieces differ: a quoted subtask, a list's opening, an empty or "all" access list
    and three empty lists are one token each, so that choosing one is one decision."""
    pieces = (r'(?:\w+ = \[\]\n?){3}', r'\p{L}+\n', r'\n\w+ = \[', r',? ?"[^"\d\n]*"', r' ?\["all"\],?', r' ?\[\],?', r' ?\p{L}+', r' ?\d',
              r' ?[^\s\p{L}\d]+', r'\s+')
    bpe = BPE(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex("|".join(pieces)), "isolated"),
                                                 pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    bpe.decoder = decoders.ByteLevel()
    special = [AddedToken(t, special=True, normalized=False) for t in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")]
    bpe.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=900, special_tokens=special, show_progress=False,
                                                      initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return Tokenizer(bpe)


def random_lesson(problem, rng: random.Random, pool, s: Settings) -> tuple[list[dict], str]:
    """A prompt and a completion in the right format. Where workers are named, the pool is a random subset. A share `warm_second` are second rounds:
    the prompt holds an earlier workflow and some response, the completion is by chance a new workflow or three empty lists."""
    if s.named:
        pool = [pool[i] for i in sorted(rng.sample(range(len(pool)), rng.randint(min(2, len(pool)), len(pool))))]
    names, previous = "".join(w.letter for w in pool) if s.named else "", None
    completion = random_completion(problem.question, rng, len(pool), s.max_steps, names)
    if rng.random() < s.warm_second:
        response = rng.choice((problem.answer, problem.question, "I have lost the thread.", "I find nothing here to work on."))
        previous = Trace(problem.question, parse(completion, len(pool), s.max_steps), [], [Reply(response, 0, 0, 0.0, 0.0)])
        completion = random_completion(problem.question, rng, len(pool), s.max_steps, names)
        completion = rng.choice((completion, Workflow([]).text()))
    return ask(Task(problem.question, pool, previous), prompting_of(s)), completion


def tiny_conductor(s: Settings, problems, pool) -> tuple[Qwen, Tokenizer]:
    rng, texts = random.Random(s.seed), []
    for p in problems[:4000]:
        chat, completion = random_lesson(p, rng, pool, s)
        texts += [m["role"] + "\n" + m["content"] for m in chat] + ["assistant\n" + completion]
    tokenizer = tiny_tokenizer(texts)
    model = Qwen(Config(len(tokenizer), s.width, 3 * s.width, s.layers, num_attention_heads=4, num_key_value_heads=2, rope_theta=100.0,
                        tie_word_embeddings=True, max_position_embeddings=1024))
    for name, p in model.named_parameters():
        if p.dim() > 1:  # wider than Qwen's 0.02, so that a model this narrow learns to copy within a hundred steps
            torch.nn.init.normal_(p, std=0.1 if "embed" in name else 0.06)
    return model, tokenizer


def warm_start(model, tokenizer, problems, pool, s: Settings, rank: int, world: int):
    """Supervised learning of random workflows in the right format. The question's own text enters the loss a little, so that the model
    learns to tell questions apart; what a good workflow is, nothing here says.

    The logits are divided by 1.5: at temperature 1 the model is then sharper than its data where the format leaves no choice, and still
    uniform where the data are."""
    rng = random.Random(s.seed)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.0, fused=True)
    for step in tqdm(range(s.warm_steps), "warm start: the format", disable=None if rank == 0 else True, leave=False):
        rows = []
        for problem in rng.choices(problems, k=s.warm_batch):
            chat, completion = random_lesson(problem, rng, pool, s)
            prompt, completion = tokenizer.chat(chat), tokenizer.encode(completion) + [tokenizer.eos_id]
            rows.append((prompt + completion, [0.1] * len(prompt) + [1.0] * len(completion)))
        total = sum(sum(weights) for _, weights in rows)
        rows = rows[rank::world]
        T = max(len(row) for row, _ in rows)
        ids = torch.tensor([row + [0] * (T - len(row)) for row, _ in rows], device=model.device)  # (B, T)
        weight = torch.tensor([w + [0.0] * (T - len(w)) for _, w in rows], device=model.device)
        loss = F.cross_entropy(model(ids)[:, :-1].transpose(1, 2) / 1.5, ids[:, 1:], reduction="none")  # (B, T-1)
        ((loss * weight[:, 1:]).sum() * world / total).backward()  # FSDP averages over ranks
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        set_lr(optimizer, s.warm_lr * schedule(step, s.warm_steps, 0.05))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


# ---------------------------------------------------------------------------------------------------------------------------------
# One iteration's rollouts


def assign(problem, pool, s: Settings, index: int) -> Task:
    """Problem number `index` of the run, with the whole pool or a random subset of it (§3.2), of a random size."""
    rng = random.Random(f"{s.seed} {index}")
    chosen = rng.sample(range(len(pool)), rng.randint(s.subset or len(pool), len(pool)))
    return Task(problem.question, [pool[i] for i in sorted(chosen)], problem=problem, name=f"{s.seed}/{index}")


def prompting_of(s: Settings) -> Prompting:
    return Prompting(s.style, max_steps=s.max_steps, max_new_tokens=s.max_new_tokens, named=s.named)


def reward_of(r: Rollout, s: Settings) -> float | None:
    """§3.1; a first round, where there are second ones, counts a quarter (§3.2)."""
    if r.right is None:
        return None
    value = s.no_workflow if r.trace is None else s.right if r.right else s.wrong
    return 0.25 * value if s.recursion and r.task.previous is None else value


def collect(sampler: Qwen, tokenizer, tasks: list[Task], s: Settings, seed: int, bar) -> tuple[list[list[Rollout]], dict]:
    """Roll out every task s.rollouts times. Returns the rollouts as [task][rollout], and the seconds of sampling and of waiting for workers
    and graders after it."""
    if not tasks:
        return [], {"sampling": 0.0, "workers": 0.0}
    sample, sampled_at = sampled(sampler, tokenizer, prompting_of(s), s.temperature, seed), []

    def write(*how):
        sample(*how)
        sampled_at.append(time.perf_counter())

    begun = time.perf_counter()
    groups = roll_out(write, tasks, s.rollouts, prompting_of(s), grade, lambda workflow: ablate(workflow, s), on_finish=lambda _: bar.update())
    return groups, {"sampling": sampled_at[0] - begun, "workers": time.perf_counter() - sampled_at[0]}


def again(groups: list[list[Rollout]], seed: int) -> list[Task]:
    """Second rounds (§3.2): of each group one workflow, drawn by chance, whose answer the Conductor is shown."""
    ran = [[r for r in group if r.trace and r.right is not None] for group in groups]
    drawn = [random.Random(f"{seed} {group[0].task.name}").choice(group) for group in ran if group]
    return [replace(r.task, previous=r.trace) for r in drawn]


def ablate(workflow, s: Settings):
    for step in workflow.steps:
        if not s.access:
            step.access, step.sees_all = [], False
        if not s.subtasks:
            step.subtask = "Solve the question."
    return workflow


# ---------------------------------------------------------------------------------------------------------------------------------
# The run


def schedule(step: int, steps: int, warmup: float) -> float:
    """Linear warm-up over a share of the steps, then a cosine to 0 (App. A.1)."""
    warm = max(1, round(warmup * steps))
    return (step + 1) / warm if step < warm else 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


def set_lr(optimizer, lr: float):
    for group in optimizer.param_groups:
        group["lr"] = lr


def shard(model: Qwen, s: Settings, device: str) -> Qwen:
    """FSDP2: fp32 master weights, gradients and Adam state in equal parts on all ranks; computation in bf16 on CUDA."""
    mixed = dict(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False) if device == "cuda" else {}
    offload = CPUOffloadPolicy(pin_memory=device == "cuda") if s.offload else OffloadPolicy()
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    how = dict(mesh=mesh, mp_policy=MixedPrecisionPolicy(**mixed), offload_policy=offload)
    model.recompute = s.recompute
    model.compute = torch.device(device) if s.offload else None
    for layer in model.model.layers:
        fully_shard(layer, **how)
    return fully_shard(model, **how)


@torch.no_grad()
def gather(model: Qwen, device: str) -> Qwen:
    """A whole copy of the sharded model in the dtype of computation, to sample with (every rank takes part and gets one). It is not kept
    while there are gradients: neither would fit beside the other at 7B."""
    with torch.device("meta"):
        whole = Qwen(model.config)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    whole.load_state_dict({name: p.to(device, dtype, copy=True).full_tensor() for name, p in model.named_parameters()}, assign=True, strict=False)
    if model.config.tie_word_embeddings:
        whole.lm_head.weight = whole.model.embed_tokens.weight
    return whole


def on_rank0(job):
    """Run `job` on rank 0 and return its result on every rank. What it raises ends all ranks, with its text printed once."""
    result = [None, None]
    if dist.get_rank() == 0:
        try:
            result[0] = job()
        except (OSError, ValueError, WorkerError, SystemExit) as e:
            result[1] = str(e)
    dist.broadcast_object_list(result)
    if result[1] is not None:
        raise SystemExit(f"train.py: {result[1]}" if dist.get_rank() == 0 else 1)
    return result[0]


def everyone(mine: list) -> list:
    """The concatenation of every rank's list, on every rank."""
    lists = [None] * dist.get_world_size()
    dist.all_gather_object(lists, mine)
    return [item for items in lists for item in items]


def plan(s: Settings, pool) -> tuple[str, int]:
    """What a run takes: memory of a rank, work of an iteration, calls and dollars of the whole, as text, and the bytes of a checkpoint.
    Estimates; the assumptions are printed."""
    world = dist.get_world_size()
    big = torch.cuda.device_count() >= world or s.preset == "paper"
    here = os.path.exists(os.path.join(s.init_from, "config.json"))
    config = Config.from_pretrained(s.init_from) if here else Config() if s.init_from else Config(
        900, s.width, 3 * s.width, s.layers, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True)
    with torch.device("meta"):
        model = Qwen(config)
    N, layer = (sum(p.numel() for p in part.parameters()) for part in (model, model.model.layers[0]))
    root, C, V, I = N - len(model.model.layers) * layer, config.hidden_size, config.vocab_size, config.intermediate_size
    prompt = sum(len(m["content"]) for m in messages("x" * 400 if s.style != "short" else "x" * 40, len(pool), s.max_steps, style=s.style)) // 4
    tokens, rounds, width = min(250, s.max_new_tokens // 2), 1.5 if s.recursion else 1.0, 2 if big else 4  # bytes of a number in computation
    questions, rollouts = s.questions * rounds, s.questions * s.rollouts * rounds
    kv, T = 2 * config.num_key_value_heads * config.head_dim * config.num_hidden_layers * width, s.token_budget
    kept = config.num_hidden_layers * C * T * width if s.recompute else config.num_hidden_layers * T * (10 * C + 5 * I) * width
    always = {"weights, fp32": 4 * N / world, "Adam's state, fp32": 8 * N / world}
    sampling = {"copy to sample with": width * N,
                "keys and values": kv * math.ceil(s.questions / world) * (prompt + s.rollouts * s.max_new_tokens)}
    training = {"gradients, fp32": 4 * N / world, "layers' inputs" if s.recompute else "activations": kept,
                "a layer at work": T * (10 * C + 5 * I) * width, "gathered weights and their gradients": (2 * width + 4) * (root + 2 * layer),
                "logits": 4 * 4 * min(T * V, HEAD_LOGITS["cuda" if big else "cpu"])}
    if s.beta:
        always["reference policy"] = width * N
    if s.offload:
        moved = {"weights, fp32", "Adam's state, fp32", "gradients, fp32"}
        always, training = ({k + " (CPU)" * (k in moved): v for k, v in part.items()} for part in (always, training))

    def total(*parts):
        return sum(v for part in parts for k, v in part.items() if not k.endswith("(CPU)")) / 2**30

    linear, attention = config.num_hidden_layers * layer, 4 * C * config.num_hidden_layers * (prompt + tokens / 2)
    sample = questions * prompt * 2 * linear + rollouts * tokens * (2 * linear + 2 * C * V + attention)
    train = (questions * prompt + rollouts * tokens) * (4 if s.recompute else 3) * (2 * linear + attention) + rollouts * tokens * 8 * C * V
    workflows, n_in, n_out, steps = s.iterations * rollouts, 1000, 700, 3
    priced = [w for w in pool if w.price]
    dollars = sum((w.price[0] * n_in + w.price[1] * n_out) / 1e6 for w in priced) / len(pool) * workflows * steps
    others = [w.name for w in pool if not w.price]
    unknown = f", and {len(others)} workers of unknown price ({', '.join(others)})" if others else ""
    assumed = f" (Qwen2.5-7B's shape: {s.init_from} is not there)" if s.init_from and not here else ""
    lines = [f"model     {N / 1e9:.3f} billion parameters{assumed}",
             f"a run     {s.iterations} iterations x {s.questions} questions x {s.rollouts} rollouts on {world} processes, "
             f"problems of {s.data!r}, {len(pool)} workers of {s.pool!r}",
             "memory    GiB of a rank, estimated:"]
    for name, part in (("always", always), ("while sampling", sampling), ("while training", training)):
        lines += [f"            {name + ':':<16}" + ", ".join(f"{k} {v / 2**30:.1f}" for k, v in part.items())]
    return "\n".join(lines + [
        f"            peak while sampling {total(always, sampling):.1f}, while training {total(always, training):.1f}",
        f"disk      {12 * N / 2**30:.1f} GiB for a checkpoint with Adam's state; at most {s.keep + 2} at a time: the best, --keep={s.keep}, one being written",
        f"work      of an iteration, with prompts of {prompt} tokens and completions of {tokens}: {rollouts * tokens:,.0f} tokens sampled, "
        f"{sample / 1e12:.3g} TFLOP to sample, {train / 1e12:.3g} to train",
        f"workers   {workflows:,.0f} workflows of {steps} steps, evenly over the pool: {workflows * steps:,.0f} calls; "
        f"at {n_in} tokens in and {n_out} out about ${dollars:,.0f}{unknown}"]), 12 * N


def preflight(s: Settings):
    """What would fail late fails here, all of it at once, and every worker is asked for a word. Returns the pool's address, and the
    dollars that this has left of the budget. With --dry_run it says the plan, and that is all."""
    lacks = []
    messages("", 1, s.max_steps, style=s.style)  # knows the styles
    if s.replay and os.path.commonpath([os.path.abspath(s.replay), os.path.abspath(s.out)]) == os.path.abspath(s.out):
        raise SystemExit(f"--replay={s.replay}: a place outside of --out, please, which the next run moves")
    for key in ("questions", "warm_batch"):
        if getattr(s, key) < dist.get_world_size():
            raise SystemExit(f"--{key}={getattr(s, key)}: expected at least one for each of the {dist.get_world_size()} processes")
    if s.data.endswith(".jsonl") and not s.test_data:
        raise SystemExit(f"--data={s.data} is one file without a test split: name other problems for the end with --test_data=FILE")
    if s.width % 8:
        raise SystemExit(f"--width={s.width}: expected a multiple of 8, for 4 heads of an even size")
    if s.loss not in LOSSES:
        raise SystemExit(f"--loss={s.loss}: there are {', '.join(LOSSES)}")
    pool = load_pool(s.pool, replay=s.replay, budget=s.budget)
    if s.subset > len(pool):
        raise SystemExit(f"--subset={s.subset}: the pool has {len(pool)} workers")
    text, size = plan(s, pool)
    if s.dry_run or s.preset == "paper":
        tqdm.write(text)
    there = os.path.abspath(s.out)
    while not os.path.exists(there):
        there = os.path.dirname(there)
    free, room = shutil.disk_usage(there).free, size * (s.keep + 2 - len(checkpoints(s.out)) * s.resume)
    known = s.preset == "paper" or not s.init_from or os.path.exists(os.path.join(s.init_from, "config.json"))
    if known and free < room:
        lacks.append(f"{room / 2**30:.0f} GiB of disk for checkpoints in {s.out} (free are {free / 2**30:.1f}; a smaller --keep takes less)")
    if s.preset == "paper":
        gpus = [torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count())]
        if sum(memory > 75e9 for memory in gpus) < 2 or dist.get_world_size() < 2:
            lacks.append(f"2 GPUs of 80 GB and 2 processes (here: {len(gpus)} GPUs, {dist.get_world_size()} processes)")
    for key, folder in (("init_from", s.init_from), ("reference", s.reference)):
        if folder and not os.path.exists(os.path.join(folder, "config.json")):
            lacks.append(f"a checkpoint folder at --{key}={folder} (train it first, or fetch one: python model.py NAME)")
    if s.resume and s.beta and not s.reference and checkpoints(s.out) and not os.path.exists(os.path.join(s.out, "reference", "config.json")):
        lacks.append(f"the policy that {s.out} started from, for --beta={s.beta}: that run began without; name one with --reference=DIR")
    try:
        if any(p.grader in ("code", "unittest") for p in load(s.data, "train") + load(s.test_data or s.data, "test", s.test)):
            evaluation.run_code("pass", None, [""], 60)  # says what the sandbox lacks
    except (OSError, ValueError) as e:
        lacks.append(f"problems ({e})")
    keyless = [w for w in pool if w.api_key_env and not os.environ.get(w.api_key_env)]
    lacks += [f"${w.api_key_env} for {w.name}" for w in keyless]
    for worker in pool:
        if worker not in keyless and (s.dry_run or not lacks):
            try:
                worker.chat([{"role": "user", "content": "Say hello."}])
            except WorkerError as e:
                lacks.append(f"a worker ({e})")
    if lacks:
        raise SystemExit(f"the run lacks {'; '.join(lacks)}. The laptop world needs nothing: --preset=laptop")
    return pool[0].base_url, s.budget and max(pool[0].budget.left, 1e-9)


def make_room(s: Settings):
    """An earlier run in --out is kept, under the next free number."""
    s.out = os.path.normpath(s.out)
    if os.path.exists(os.path.join(s.out, "metrics.jsonl")):
        kept = next(f"{s.out}.{i}" for i in itertools.count(1) if not os.path.exists(f"{s.out}.{i}"))
        os.rename(s.out, kept)
        tqdm.write(f"the earlier run in {s.out} is now {kept}")
    os.makedirs(os.path.join(s.out, "traces"), exist_ok=True)
    write_json(os.path.join(s.out, "settings.json"), asdict(s))


def write_traces(s: Settings, it: int, rank: int, groups):
    """traces/ITERATION.RANK.jsonl: every rollout with what its workers said."""
    file = os.path.join(s.out, "traces", f"{it:05d}.{rank}.jsonl")
    with open(file + ".tmp", "w") as f:
        for r in itertools.chain(*groups):
            told = {"trace": r.trace.to_json()} if r.trace else {"text": r.text}
            problem = r.task.problem
            f.write(json.dumps({"problem": problem.id, "answer": problem.answer, "reward": reward_of(r, s), **told}) + "\n")
    os.replace(file + ".tmp", file)


def summary(s: Settings, group: list[Rollout]) -> list[dict]:
    """What the statistics need of each rollout; the round's own calls and dollars."""
    def costs(r):
        replies = [reply for reply in r.trace.replies if reply] if r.trace else []
        return {"calls": len(replies), "cost": None if any(x.cost is None for x in replies) else sum(x.cost for x in replies)}

    flat = len({reward_of(r, s) for r in group if r.right is not None}) < 2  # nothing to learn from: every advantage is 0
    return [{"kind": r.task.problem.kind, "flat": flat, "right": r.right, "reward": reward_of(r, s), "parsed": r.trace is not None,
             "tokens": len(r.completion.tokens),
             "steps": len(r.trace.workflow.steps) if r.trace else 0, "workers": r.trace.workers if r.trace else [], **costs(r),
             "before": r.task.previous and r.task.previous.right} for r in group]


def record(s: Settings, it: int, rollouts: list[dict], stats: list[dict], seconds: dict, say):
    """One line of metrics.jsonl and one on the screen, about all ranks' rollouts. Means are over first rounds; `again` is about second ones."""
    def mean(values):
        values = list(values)
        return sum(values) / max(len(values), 1)

    first, second = [r for r in rollouts if r["before"] is None], [r for r in rollouts if r["before"] is not None]
    known, kinds = [r for r in first if r["right"] is not None], dict.fromkeys(r["kind"] for r in rollouts)
    names = [name for r in first for name in r["workers"]]
    m = {"iteration": it, "reward": mean(r["reward"] for r in known), "accuracy": mean(r["right"] for r in known),
         "parsed": mean(r["parsed"] for r in first), "flat": mean(r["flat"] for r in rollouts),
         "lost": sum(r["right"] is None for r in rollouts),
         "steps": mean(r["steps"] for r in first if r["steps"]), "calls": sum(r["calls"] for r in rollouts),
         "cost": None if any(r["cost"] is None for r in rollouts) else sum(r["cost"] for r in rollouts),  # dollars; None: unknown
         "gap": stats[0]["gap"],
         **{key: mean(stat[key] for stat in stats) for key in ("approx_kl", "clipfrac", "kl", "entropy", "grad_norm")},
         "by_kind": {kind: mean(r["right"] for r in known if r["kind"] == kind) for kind in kinds},
         "workers": {name: n / max(len(names), 1) for name, n in sorted(collections.Counter(names).items())},  # shares of the steps
         "steps_by_kind": {kind: mean(r["steps"] for r in first if r["kind"] == kind and r["steps"]) for kind in kinds}}
    if second:
        asked = [r for r in second if r["right"] is not None]
        m["again"] = {"before": mean(r["before"] for r in asked), "accuracy": mean(r["right"] for r in asked),
                      "parsed": mean(r["parsed"] for r in second),
                      "kept_right": mean(r["parsed"] and not r["steps"] for r in asked if r["before"]),
                      "kept_wrong": mean(r["parsed"] and not r["steps"] for r in asked if not r["before"])}
    took, tokens = sum(seconds.values()), sum(r["tokens"] for r in rollouts)
    say(f"{it + 1:4d}/{s.iterations} reward {m['reward']:.3f} accuracy {m['accuracy']:.3f} parsed {m['parsed']:.3f} steps {m['steps']:.2f} "
        f"calls {m['calls']} lost {m['lost']} |Δlogp| {m['gap']:.0e} grad {m['grad_norm']:.2f} entropy {m['entropy']:.2f} "
        f"{tokens / took:.0f} tokens/s, s: {' '.join(f'{name} {t:.1f}' for name, t in seconds.items())}")
    if second:
        say(f"{'':9}second rounds: " + " ".join(f"{key} {value:.3f}" for key, value in m["again"].items()))
    if dist.get_rank() == 0:
        with open(os.path.join(s.out, "metrics.jsonl"), "a") as f:
            f.write(json.dumps({**m, "tokens_per_second": tokens / took, "seconds": seconds}) + "\n")
    return m["reward"]


# ---------------------------------------------------------------------------------------------------------------------------------
# Checkpoints. Weights and Adam's moments are all there is to save: whatever is random follows from the seed and the iteration.

MOMENTS = ("exp_avg", "exp_avg_sq")


def save(s: Settings, folder: str, model, tokenizer, optimizer=None, reward: float = 0.0):
    """Weights, and with an optimizer its moments, in Hugging Face's layout, written beside and renamed. Every rank takes part in gathering;
    rank 0 writes."""
    new, steps = folder + ".tmp", next((int(state["step"]) for state in optimizer.state.values()), 0) if optimizer else 0
    for key in ("", *MOMENTS) if steps else ("",):
        tensors = ((name, (optimizer.state[p][key] if key else p).full_tensor()) for name, p in model.named_parameters())
        if dist.get_rank() == 0:
            write_tensors(os.path.join(new, key), model.config, tensors)
        else:
            collections.deque(tensors, maxlen=0)
    if dist.get_rank() == 0:
        tokenizer.save_pretrained(new)
        write_json(os.path.join(new, "conductor.json"), asdict(prompting_of(s)))  # so that workflow.py asks as training asked
        write_json(os.path.join(new, "training.json"), {"reward": reward, "optimizer_steps": steps})
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(new, folder)


def checkpoints(out: str) -> list[str]:
    """The whole checkpoints of a run, oldest first: those being written have another name."""
    return sorted(folder for folder in glob.glob(os.path.join(glob.escape(out), "checkpoints", "*")) if os.path.basename(folder).isdigit())


def tidy(s: Settings):
    """Point out/checkpoint at the newest, and drop all but the newest few and the best."""
    def reward(folder):
        return read_json(os.path.join(folder, "training.json"))["reward"]

    link, folders = os.path.join(s.out, "checkpoint"), checkpoints(s.out)
    with contextlib.suppress(FileNotFoundError):  # a kill can leave one
        os.remove(link + ".tmp")
    os.symlink(os.path.join("checkpoints", os.path.basename(folders[-1])), link + ".tmp")
    os.replace(link + ".tmp", link)
    for folder in set(folders) - {*folders[-s.keep:], max(folders, key=reward)}:
        shutil.rmtree(folder + ".old", ignore_errors=True)
        os.replace(folder, folder + ".old")  # what a kill leaves half removed has no number for a name
    for left in glob.glob(os.path.join(glob.escape(s.out), "checkpoints", "*.*")):  # by this or by a kill
        shutil.rmtree(left)


def restore(optimizer, model, folder: str):
    """Adam's moments as `save` left them, each rank its part."""
    steps = read_json(os.path.join(folder, "training.json"))["optimizer_steps"]
    parameters = dict(model.named_parameters())
    for p in parameters.values() if steps else ():
        optimizer.state[p]["step"] = torch.tensor(float(steps), device=p.device)
    for key in MOMENTS if steps else ():
        for name, tensor in read_tensors(os.path.join(folder, key), model):
            p = parameters[name]
            optimizer.state[p][key] = local_part(tensor.to(p.device), p, p.device)


def rewind(s: Settings, iteration: int):
    """Make the run's files what they were after so many iterations, and say which settings are new."""
    old = read_json(os.path.join(s.out, "settings.json"))
    changed = [f"{key} {old.get(key)} -> {value}" for key, value in asdict(s).items() if value != old.get(key) and key != "resume"]
    tqdm.write(f"going on in {s.out} after iteration {iteration}" + (f", with changed settings: {', '.join(changed)}" if changed else ""))
    file = os.path.join(s.out, "metrics.jsonl")
    with open(file) as f, open(file + ".tmp", "w") as new:
        new.writelines(itertools.islice(f, iteration))
    os.replace(file + ".tmp", file)
    for trace in glob.glob(os.path.join(glob.escape(s.out), "traces", "*")):
        if int(os.path.basename(trace)[:5]) >= iteration:
            os.remove(trace)
    write_json(os.path.join(s.out, "settings.json"), asdict(s))


def finish(s: Settings, sampler, tokenizer, test, pool, say):
    """The final table on held-out problems, and what was learned for each kind. The Conductor is greedy here."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = test[rank::world]
    prompting = prompting_of(s)
    write = sampled(sampler, tokenizer, prompting, 0.0)
    traces = evaluation.run_conductor(write, mine, [pool] * len(mine), "test", int(s.recursion), prompting, edit=lambda w: ablate(w, s))
    shares = everyone([traces])  # share r holds the problems r, r + world, …
    traces = [shares[i % world][i // world] for i in range(len(test))]
    if rank == 0:
        systems = {"Conductor": traces, **evaluation.baselines(test, pool)}
        say("\n" + evaluation.table(test, systems))
        say("\n" + evaluation.learned(test, [t and t.rounds()[0] for t in traces]))
        if lost := sum(t is not None and t.error is not None for t in traces):
            say(f"{lost} of the {len(test)} problems are left out of the Conductor's row: {next(t.error for t in traces if t and t.error)}")
        write_json(os.path.join(s.out, "test.json"), {name: evaluation.accuracies(test, answered) for name, answered in systems.items()})


def bench(width: int = 512, layers: int = 4, vocabulary: int = 4096, prompt: int = 1000, n: int = 64, length: int = 250,
          budget: int = 9000):
    """One group, forward and backward in micro-batches of at most `budget` tokens: the prompt once in each against once for each rollout, on
    the same model in the same run; what each keeps for the backward pass of 16 rollouts; and how an iteration with local specialists divides.
    The last line is JSON."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Qwen(Config(vocabulary, width, 3 * width, layers, width // 64, max(1, width // 256))).to(device)
    asked, written = torch.randint(vocabulary, (prompt,)).tolist(), torch.randint(vocabulary, (n, length)).tolist()
    ways = {"shared": lambda completions: [(asked, completions)], "naive": lambda completions: [(asked, [c]) for c in completions]}

    def step(groups):
        return timed(lambda: torch.cat(packed_logprobs(model, groups)[0]).sum().backward(), model.device)

    def kept(groups):  # bytes
        sizes = {}

        def count(tensor):
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor
        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            alive = packed_logprobs(model, groups)
        del alive
        return sum(sizes.values())

    numbers = {f"kept_gigabytes_{name}": kept(way(written[:16])) / 1e9 for name, way in ways.items()}
    for name, way in ways.items():
        step(way(written[:2]))  # warms up
        numbers[f"seconds_{name}"] = 0.0
    at_once = {"naive": budget // (prompt + length), "shared": (budget - prompt) // length}
    turns = [(name, half[i:i + at_once[name]]) for half in (written[:n // 2], written[n // 2:]) for name in ways
             for i in range(0, n // 2, at_once[name])]  # they take turns, as a machine is not equally fast all the time
    for name, completions in tqdm(turns, leave=False, disable=None):
        numbers[f"seconds_{name}"] += step(ways[name](completions))
    numbers["times_as_fast"] = numbers["seconds_naive"] / numbers["seconds_shared"]
    numbers["times_less_kept"] = numbers["kept_gigabytes_naive"] / numbers["kept_gigabytes_shared"]

    pool, rng, begun = load_pool("local"), random.Random(0), time.perf_counter()
    [completions] = generate(model, [asked], n, length, seed=0)
    sampled = time.perf_counter()
    for future in [submit(evaluation.random_workflow(rng, len(pool)), Task("What is 6 * 7?", pool)) for _ in range(n)]:
        future.result()
    answered = time.perf_counter()
    update(model, torch.optim.AdamW(model.parameters(), fused=True), [Episode(asked, c.tokens, c.logprobs, rng.gauss(0, 1)) for c in completions],
           token_budget=budget)
    numbers |= {"seconds_sampling": sampled - begun, "seconds_workers": answered - sampled, "seconds_training": time.perf_counter() - answered}
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {n} rollouts of {length} tokens over a prompt of {prompt}, "
          f"{torch.get_num_threads()} threads on {device}")
    for name, value in numbers.items():
        print(f"{name:<28}{value:10.4g}")
    print(json.dumps(numbers))


def main(argv):
    s = Settings()
    configure(s, argv)
    gpus, processes = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # here, as torchrun says
    device = "cuda" if gpus >= processes else "cpu"
    s.preset = s.preset or ("paper" if device == "cuda" else "laptop")
    if s.preset not in PRESETS:
        raise SystemExit(f"--preset={s.preset}: there are {', '.join(PRESETS)}")
    for key, value in PRESETS[s.preset].items():
        setattr(s, key, value)
    if s.bench:
        return bench()
    if words := configure(s, argv):
        raise SystemExit(f"train.py takes --key=value settings only, not {words[0]!r}")
    for key, value in asdict(s).items():
        if type(value) in (int, float) and not (0 < value < math.inf or value == 0 and key in ZERO or key in REWARD and math.isfinite(value)):
            raise SystemExit(f"--{key}={value}: expected a number above 0")
    # A rank may wait for another's slow workers much longer than the ten minutes that NCCL allows. Offloaded weights meet over gloo.
    backend, patience = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", datetime.timedelta(days=1)
    alone = {} if "RANK" in os.environ else dict(store=dist.HashStore(), rank=0, world_size=1)  # torchrun sets RANK
    dist.init_process_group(backend, timeout=patience, **alone)
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    code = None
    try:
        train(s, device)
    except SystemExit as e:  # on all ranks
        code = e.code
    except KeyboardInterrupt:
        saved = os.path.join(s.out, "checkpoint")
        kept = f"the checkpoint is in {saved}" if os.path.exists(saved) else "nothing had been learned"
        code = f"interrupted; {kept}" if dist.get_rank() == 0 else 1
    dist.destroy_process_group()  # not in a `finally`: after one rank's error NCCL would wait for the others, and torchrun never hear of it
    if code is not None:
        raise SystemExit(code)


def train(s: Settings, device: str):
    rank, world, began = dist.get_rank(), dist.get_world_size(), time.perf_counter()
    say = tqdm.write if rank == 0 else lambda line: None
    torch.manual_seed(s.seed)
    url, budget = on_rank0(lambda: preflight(s))
    if s.dry_run:
        return say("the run lacks nothing; without --dry_run it begins")
    pool = load_pool(s.pool, url, s.replay, budget, world)  # one server of local specialists for all ranks
    problems, test = load(s.data, "train"), load(s.test_data or s.data, "test", s.test)
    done = on_rank0(lambda: checkpoints(s.out)[-1:]) if s.resume else []
    start = int(os.path.basename(done[0])) if done else 0
    source = done[0] if done else s.init_from
    try:
        if source:
            tokenizer = Tokenizer.from_pretrained(source)
            model = Qwen.from_pretrained(source, device="cpu" if s.offload else device, shard=lambda model: shard(model, s, device))
        else:
            model, tokenizer = tiny_conductor(s, problems, pool)
            shard(model, s, device)
        kept, reference = s.reference or os.path.join(s.out, "reference") if done else s.reference, None
        if s.beta and kept:
            reference = Qwen.from_pretrained(kept, torch.bfloat16 if device == "cuda" else torch.float32, device)
    except (OSError, ValueError) as e:
        raise SystemExit(f"train.py: {e}" if rank == 0 else 1) from None
    on_rank0(lambda: rewind(s, start) if done else make_room(s))  # only now: what was read may be of an earlier run in the same place
    say(f"{sum(p.numel() for p in model.parameters()):,} parameters on {world} x {device}, {len(problems):,} problems, "
        f"{len(pool)} workers: {', '.join(w.name for w in pool)}")
    if not source:
        warm_start(model, tokenizer, problems, pool, s, rank, world)
        say(f"warm start: {s.warm_steps} steps of the format, {time.perf_counter() - began:.0f} s since the start")
    if s.beta and not kept:
        reference = gather(model, device)
        save(s, os.path.join(s.out, "reference"), model, tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=s.lr, betas=(0.9, s.beta2), weight_decay=0.0, fused=True)

    if done:
        restore(optimizer, model, done[0])
    stopping, it = [], start - 1

    def stop(*_):  # after the iteration, with a checkpoint; torchrun sends the signal a second time
        if not stopping:
            say("stopping after this iteration …")
        stopping.append("interrupted")

    def bill():
        calls, dollars, unknown = map(sum, zip(*everyone([(w.calls, w.spent, w.unpriced) for w in pool])))
        say(f"{calls:,} calls for ${dollars:.2f}{f', and {unknown:,} of them at an unknown price' if unknown else ''}")

    handlers = {sig: signal.signal(sig, stop) for sig in (signal.SIGINT, signal.SIGTERM)}
    share = s.questions * s.rollouts // world * (3 if s.recursion else 2) // 2
    bar = tqdm(total=s.iterations * share, initial=start * share, desc="rollouts of rank 0", disable=None if rank == 0 else True)
    for it in range(start, s.iterations):
        mine, seed = range(it * s.questions + rank, (it + 1) * s.questions, world), s.seed * 1_000_000 + it
        sampler = gather(model, device)
        groups, seconds = collect(sampler, tokenizer, [assign(problems[i % len(problems)], pool, s, i) for i in mine], s, seed, bar)
        if s.recursion:
            half = [group for i, group in zip(mine, groups) if (i % s.questions // 2 + it) % 2 == 0]  # on any number of ranks the same
            more, longer = collect(sampler, tokenizer, again(half, seed), s, seed + 500_000, bar)
            groups, seconds = groups + more, {key: seconds[key] + longer[key] for key in seconds}
        del sampler
        begun = time.perf_counter()
        rewards = [[reward_of(r, s) for r in group] for group in groups]
        A = advantages([[x or 0.0 for x in row] for row in rewards], [[x is not None for x in row] for row in rewards], s.std,
                       of=[group[0].task.name for group in groups]).tolist()
        episodes = [[Episode(r.prompt, r.completion.tokens, r.completion.logprobs, a) for r, a in zip(group, row) if r.right is not None]
                    for group, row in zip(groups, A)]
        left = 1 - it / s.iterations
        set_lr(optimizer, s.lr * schedule(it, s.iterations, s.warmup))
        how = dict(temperature=s.temperature, n_ids=len(tokenizer), token_budget=s.token_budget)
        if s.importance:
            gap = importance(model, [e for group in episodes for e in group], s.importance, **how)
        stats = [update(model, optimizer, [e for group in episodes for e in group[m::s.minibatches]], s.clip, s.beta * left, reference,
                        clip_high=s.clip_high, loss=s.loss, max_new_tokens=s.max_new_tokens, **how)
                 for _ in range(s.epochs) for m in range(s.minibatches)]
        if s.importance:
            stats[0]["gap"] = gap
        seconds["training"] = time.perf_counter() - begun
        write_traces(s, it, rank, groups)
        reward = record(s, it, everyone([r for group in groups for r in summary(s, group)]), stats, seconds, say)
        if pool[0].budget and pool[0].budget.refused:
            stopping.append("the budget is spent")
        stopped = everyone(stopping[:1])  # on any rank: they leave together
        if stopped or (it + 1) % s.save_every == 0 or it + 1 == s.iterations:
            save(s, os.path.join(s.out, "checkpoints", f"{it + 1:05d}"), model, tokenizer, optimizer, reward)
            on_rank0(lambda: tidy(s))
        if stopped:
            break
    bar.close()
    for sig, handler in handlers.items():
        signal.signal(sig, handler)
    if stopped := everyone(stopping[:1]):  # a signal may also have come during the last save
        bill()
        raise SystemExit(f"{stopped[0]}: stopped after iteration {it + 1}; the checkpoint is in {s.out}/checkpoint" if rank == 0 else 1)
    finish(s, gather(model, device), tokenizer, test, pool, say)
    bill()
    say(f"{time.perf_counter() - began:.0f} s from start to end. "
        f"Next: python workflow.py \"{test[-1].question}\" --checkpoint={s.out}/checkpoint" + f" --pool={s.pool}" * (s.pool != "local"))


if __name__ == "__main__":
    main(sys.argv[1:])
