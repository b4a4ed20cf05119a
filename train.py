"""Train a Conductor with GRPO.

    torchrun --nproc_per_node=2 train.py       the laptop world on a CPU; on two 80 GB GPUs the paper's run
    python train.py --preset=small             Qwen2.5-0.5B-Instruct in the laptop world, on a GPU of 16 GB
    python train.py --preset=paper --dry_run   what a run takes on this machine, and what it lacks

Every field of Settings is a flag, --key=value. A run writes into --out: metrics.jsonl (a line per iteration),
traces/ (every rollout with what its workers said), checkpoints/, and a link `checkpoint` to the newest one.
If it is killed, the same command with --resume goes on from the newest checkpoint. On a CPU, with the same
replies, the weights become those of a run that was never killed.
"""
import collections
import contextlib
import ctypes
import datetime
import fcntl
import gc
import glob
import importlib.util
import itertools
import json
import math
import os
import random
import re
import resource
import shlex
import shutil
import signal
import sys
import time
from dataclasses import asdict, dataclass, fields, replace

import numpy as np
import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer as BPE, decoders, models, pre_tokenizers, trainers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from tqdm import tqdm

import eval as evaluation
from eval import grade, load, mean, progress, random_completion, shares_of
from grpo import HEAD_LOGITS, LOSSES, n_written, packed_logprobs, set_advantages, set_importance, update
from model import Config, Qwen, Tokenizer, compute_dtype, configure, fetch
from model import local_part, read_json, write_json, write_tensors
from sample import PREFILL_TOKENS, READ_AT_ONCE, Completion
from workers import LOCAL, Reply, WorkerError, load_pool, silent, unset_in
from workflow import Prompting, Rollout, Task, Trace, Workflow, as_lists, ask, model_conductor, parse
from workflow import prompting_of, roll_out, trace_to_json, warn_of_others

# ------------------------------------------------------------------------------------------------------------
# One iteration: first rounds, second rounds, reward, update. Then the run


@dataclass
class Run:
    """What the iterations need beside `s`, the Settings, which come first in the appendix: read them now."""
    begin: int  # the iteration to begin with
    pool: list  # of workers
    problems: list
    test: list  # held-out problems
    tokenizer: Tokenizer
    model: Qwen  # sharded (FSDP)
    optimizer: torch.optim.Optimizer
    reference: Qwen | None  # π_ref, of the KL
    skipped: int = 0  # steps in a row, up to now, whose gradient was not finite


def first_rounds(s: "Settings", problems, pool, iteration: int) -> list[Task]:
    """An iteration's questions: the next ones of the data, which begins again after its end. Each has the
    whole pool, or s.subset or more of its workers, drawn by chance (§3.2; the paper: exactly k)."""
    tasks = []
    for i in range(iteration * s.questions, (iteration + 1) * s.questions):
        problem = problems[i % len(problems)]
        rng = random.Random(f"{s.seed} {i}")
        size = rng.randint(s.subset or len(pool), len(pool))
        workers = [pool[k] for k in sorted(rng.sample(range(len(pool)), size))]
        tasks.append(Task(problem.question, workers, problem=problem, name=f"{s.seed}/{i}"))
    return tasks


def second_rounds(s: "Settings", groups: list[list[Rollout]], iteration: int) -> list[Task]:
    """Half of the questions again, each with the answer of one of its first rollouts, drawn by chance (§3.2).
    They come on top: with 4 questions (4 + 2) × 64 rollouts, 384 (the paper's A.1: 256)."""
    half = (0, 1) if iteration % 2 == 0 else (2, 3)  # of each four; every other one may be of one kind
    tasks = []
    for i, group in enumerate(groups):
        answered = [r for r in group if r.trace and r.right is not None]
        if i % 4 in half and answered:
            shown = random.Random(f"{s.seed} {iteration} {i}").choice(answered)
            tasks.append(replace(shown.task, previous=shown.trace))
    return tasks


def roll_out_on_all_ranks(sampler, tokenizer, tasks: list[Task], s: "Settings", seed: int, clock) -> list:
    """Roll out every task s.rollouts times. Each rank does a part of every task's rollouts, and all ranks get
    all of them, as [task][rollout]: the same on any number of ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    first = s.rollouts * rank // world
    n = s.rollouts * (rank + 1) // world - first
    conductor = model_conductor(sampler, tokenizer, prompting_from(s), s.temperature, seed)
    with progress("rollouts of rank 0", len(tasks) * n) as bar:
        mine = roll_out(timed(conductor, clock), tasks, n, prompting_from(s), grade=grade,
                        edit=ablation_edit(s), first=first, on_finish=lambda _: bar.update())
    groups = of_all_ranks(mine, tasks)
    clock.lap("workers")
    return groups


def reward(rollout: Rollout, s: "Settings") -> float | None:
    """§3.1: 0 without a workflow, 0.5 for a wrong answer, 1 for a right one (Settings may differ). With
    --recursion a first round counts a quarter (§3.2; see grpo.advantages). None: a call was lost."""
    if rollout.right is None:
        return None
    value = s.reward_no_workflow
    if rollout.trace:
        value = s.reward_right if rollout.right else s.reward_wrong
    if s.recursion and rollout.task.previous is None:
        value *= 0.25
    return value


def learn(run: Run, groups, s: "Settings", iteration: int) -> list[dict]:
    """Eq. 1: s.minibatches optimizer steps, each on its part of every group; s.epochs times over. From the
    second step on π is not the sampler's, and the clip acts. Returns what `update` says of each step."""
    lr = s.lr * schedule(iteration, s.iterations, s.warmup)
    set_lr(run.optimizer, lr)
    beta = s.beta * (1 - iteration / s.iterations)  # The KL's weight falls to 0 over the run.
    objective = dict(clip=s.clip, clip_high=s.clip_high, beta=beta, reference=run.reference, loss=s.loss,
                     max_new_tokens=s.max_new_tokens)
    forward = dict(temperature=s.temperature, n_ids=len(run.tokenizer), token_budget=s.token_budget)
    rewarded = [[r for r in group if r.reward is not None] for group in groups]  # the others were lost
    minibatches = []
    for m in range(s.minibatches):
        rollouts = [r for group in rewarded for r in group[m::s.minibatches]]
        minibatches.append(my_share(rollouts))  # this rank's
    gap = weigh_tokens(run, minibatches, s, forward)  # {} without --importance
    reports = []
    for minibatch in minibatches * s.epochs:
        report = update(run.model, run.optimizer, minibatch, **objective, **forward)
        reports.append(report | gap | {"lr": lr})
    return reports


def train(s: "Settings", device: str):
    """The whole run, on every rank."""
    began = time.perf_counter()
    run = set_up(s, device)  # loads the newest of `checkpoints` (--resume), or begins, with a `warm_start`
    if s.dry_run:
        return print0("the run lacks nothing; without --dry_run it begins")
    log_to = reporter(s, run.begin)  # TensorBoard or wandb
    reasons = on_signals()  # to stop: Ctrl-C appends one
    for iteration in range(run.begin, s.iterations):
        clock = Clock()
        sampler = whole_copy(run.model, s)  # FSDP splits the weights over the ranks.
        seed = s.seed * 1_000_000 + iteration  # for sampling; second rounds add 500,000
        tasks = first_rounds(s, run.problems, run.pool, iteration)
        groups = roll_out_on_all_ranks(sampler, run.tokenizer, tasks, s, seed, clock)
        if s.recursion:
            tasks = second_rounds(s, groups, iteration)
            groups += roll_out_on_all_ranks(sampler, run.tokenizer, tasks, s, seed + 500_000, clock)
        del sampler  # The sampler and the gradients do not both fit.
        for rollout in itertools.chain(*groups):
            rollout.reward = reward(rollout, s)                                                   # §3.1
        set_advantages(groups, s.std)                                                             # Eq. 2
        reports = learn(run, groups, s, iteration)                                                # Eq. 1
        clock.lap("training")

        held_out = None
        if s.eval_every and (iteration + 1) % s.eval_every == 0:
            held_out = accuracy_now(run, s, iteration)
            clock.lap("evaluation")
        write_traces(s, iteration, groups)
        log(s, metrics(s, iteration, groups, reports, clock.seconds, held_out, run.model.config), log_to)
        save_or_leave(run, s, iteration + 1, groups, reports, reasons)

    finish(run, s, reasons)
    bill(run.pool, "with the last evaluation")
    print0(f"{time.perf_counter() - began:.0f} s from start to end. Next: {try_it(run, s)}")


# ------------------------------------------------------------------------------------------------------------
# Appendix: settings and presets; before and after the loop; the tiny Conductor; what a run tells; ranks;
# checkpoints; what a run takes and lacks

@dataclass
class Settings:
    preset: str = ""  # one of PRESETS; "": paper on two 80 GB GPUs, else laptop: the values below
    out: str = "out/laptop"
    seed: int = 1
    init_from: str = ""  # a checkpoint folder or a name on Hugging Face's hub; "": a tiny model
    data: str = "laptop"  # the problems: a name that eval.py knows, or a file *.jsonl
    pool: str = "local"  # the workers: a name that workers.py knows, or a JSON file
    budget: float = 0.0  # dollars that the workers may cost; with --resume anew; 0: no limit
    replay: str = ""  # a file that keeps the replies: a run started again pays for none twice
    sandbox: str = ""  # partial: train on code although a part of the sandbox is missing
    # how the Conductor is asked (workflow.Prompting)
    style: str = "short"  # of the prompt: full (App. E), zero-shot, fine-grained, short
    examples: str = "ood"  # the few-shot examples of a full prompt: ood, in, mixed
    subtasks: bool = True  # False: the prompt asks for none (App. B.7)
    named: bool = False  # each worker has a letter in the prompt, the same in any subset of the pool
    max_steps: int = 5  # of a workflow
    max_new_tokens: int = 96
    access: bool = True  # False: access lists are forced empty
    # the two extensions (§3.2)
    subset: int = 0  # each question may use this many or more of the workers, drawn by chance; 0: all
    recursion: bool = False  # half of the questions get a second round; first ones' rewards count a quarter
    # the reward (§3.1): only differences within a group matter, and with std only their ratios, so that a
    # small penalty counts in full where all are wrong
    reward_no_workflow: float = 0.0
    reward_wrong: float = 0.5
    reward_right: float = 1.0
    # one iteration
    iterations: int = 360
    questions: int = 8
    rollouts: int = 64  # of each question
    temperature: float = 1.0
    # the objective (Eqs. 1 and 2) and AdamW, without weight decay
    lr: float = 0.0  # 0: 1e-3 for a model of less than 10 million parameters, else 1e-6
    beta2: float = 0.99
    warmup: float = 0.03  # share of the run in which lr rises; then it falls as a cosine
    clip: float = 0.2  # the paper's ε
    clip_high: float = 0.0  # another clip above 1; 0: the same
    std: bool = True  # False: advantages are only centred
    loss: str = "sequence"  # or token, constant: see grpo.per_token
    importance: float = 0.0  # cap of the tokens' weights π_trainer / π_sampler; 0: no weights
    epochs: int = 1  # over an iteration's rollouts
    beta: float = 0.1  # weight of the KL to a reference policy; it fades to 0 over the run
    reference: str = ""  # that policy's checkpoint folder; "": the policy after the warm start
    minibatches: int = 4  # optimizer steps per epoch, each on its part of every group
    # the device
    dtype: str = ""  # of computation, bf16 or fp32; "": fp32 for a tiny model, else as the device likes
    token_budget: int = 8192  # tokens of a micro-batch, as grpo.micro_batches counts
    recompute: bool = False  # layers keep only their inputs for the backward pass: a third more work
    offload: bool = False  # weights, gradients, Adam's state in the CPU's memory: wants large micro-batches
    # the tiny model, and the warm start that teaches the format
    width: int = 128
    layers: int = 2
    warm_steps: int = 400  # supervised updates; with --init_from the default is 0
    warm_batch: int = 32
    warm_lr: float = 0.0  # 0: 6e-3 for the tiny model, else 2e-4
    warm_second: float = 0.0  # share of the warm start's examples that are second rounds
    # what is measured and kept
    test: int = 225  # held-out problems, at the end
    test_data: str = ""  # where they are from; "": the test split of data
    eval_every: int = 40  # iterations between measurements on eval_problems held-out ones; 0: none
    eval_problems: int = 72
    report: str = ""  # tensorboard or wandb also gets the metrics, if it is installed
    save_every: int = 40  # iterations between checkpoints
    keep: int = 2  # of the newest checkpoints; the best is kept too
    resume: bool = False  # go on from the newest whole checkpoint in --out, if there is one
    dry_run: bool = False  # only ask each worker for a word, and say what the run takes and lacks


PAPER = dict(out="out/paper", init_from="Qwen/Qwen2.5-7B", data="paper", pool="paper", style="full",
             questions=4, rollouts=64, max_new_tokens=1024, iterations=200, lr=1e-6, beta=0.0, beta2=0.999,
             minibatches=1, recompute=True, warm_steps=0, save_every=10, eval_every=50)  # App. A.1

# The two extensions live in a laptop world with two workers for each trade, and start from "pairs". Their KL
# keeps them near the policy that "pairs" itself started from: it still explores all workers and lengths.
PAIRS = dict(pool="local:pairs", named=True, warm_steps=1000, warm_second=0.2)
TUNE = dict(PAIRS, init_from="out/pairs/checkpoint", reference="out/pairs/reference",
            warm_steps=0, iterations=160, lr=3e-4, beta=0.05)
PRESETS = {
    "laptop": {},
    "small": dict(out="out/small", init_from="Qwen/Qwen2.5-0.5B-Instruct", data="laptop:1",
                  test_data="laptop", max_steps=3, warm_steps=120, warm_batch=16, iterations=100, lr=5e-5,
                  token_budget=4096, recompute=True, save_every=10, eval_every=20),
    "paper": PAPER,
    "paper-recursive": dict(PAPER, out="out/paper-recursive", init_from="out/paper/checkpoint",
                            data="recursion", recursion=True, iterations=20, token_budget=4096),
    "pairs": dict(PAIRS, out="out/pairs", iterations=540),
    "pools": dict(TUNE, out="out/pools", subset=4),
    "recursive": dict(TUNE, out="out/recursive", pool="local:tired", recursion=True),
}


def set_up(s: Settings, device: str) -> Run | None:
    """All that the loop needs, on every rank, after a look at what the run lacks. None if s.dry_run."""
    if s.resume and os.path.isdir(s.out) and not s.dry_run:
        on_rank0(lambda: hold(s))  # first of all: another run there would write and remove checkpoints
    resumed = on_rank0(lambda: checkpoints(s.out)[-1:]) if s.resume else []
    start = resumed[0] if resumed else s.init_from  # "": from nothing
    begin = int(os.path.basename(start)) if resumed else 0
    url, budget, config = on_rank0(lambda: preflight(s, start))
    if s.dry_run:
        return None
    torch.manual_seed(s.seed)
    choose_by_size(s, config)
    if s.resume and not resumed:
        print0(f"there is nothing to resume in {s.out}: the run starts anew")
    if sizes(config)[1] < TINY and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # More would wait for one another, longest on a busy machine.
    if s.offload and device == "cuda":  # Adam runs on the CPU, where torchrun allows one thread.
        cores = len(os.sched_getaffinity(0))  # A batch system may give fewer than there are.
        torch.set_num_threads(max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    world = dist.get_world_size()
    if os.environ.get("GROUP_RANK", "0") != "0":
        url = None  # It is on another machine, whose loopback is not ours: each rank here has its own server.
    pool = load_pool(s.pool, url, s.replay, budget, world)  # The ranks of a machine share local specialists.
    if resumed:
        on_rank0(lambda: warn_of_others(prompting_of(start), pool))
    problems = load(s.data, "train")
    test = load(s.test_data or s.data, "test", s.test)
    model, tokenizer, reference = load_models(s, start, problems, pool, device)
    # What was read may be of an earlier run in this very place.
    on_rank0(lambda: rewind(s, begin) if resumed else make_room(s))
    print0(f"{sizes(model.config)[1]:,} parameters on {world} x {device} in {s.dtype}, lr {s.lr:g}, "
           f"{len(problems):,} problems, {len(pool)} workers: {', '.join(worker.name for worker in pool)}")
    if s.warm_steps and not resumed:
        print0(f"warm start: {s.warm_steps} steps of the format")
        warm_start(model, tokenizer, problems, pool, s)
    if s.beta and reference is None:
        reference = whole_copy(model, s)
        save_for_use(s, os.path.join(s.out, "reference"), model, tokenizer, pool)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, s.beta2), weight_decay=0.0, fused=True)
    dry_step(model, optimizer, reference, s, len(tokenizer))
    if resumed:
        restore(model, optimizer, start)
    return Run(begin, pool, problems, test, tokenizer, model, optimizer, reference)


def shard(model: Qwen, s: Settings, device: str) -> Qwen:
    """FSDP2: fp32 weights, gradients and Adam's state in equal parts on all ranks; computation in s.dtype."""
    mixed = MixedPrecisionPolicy(param_dtype=compute_dtype(device, s.dtype), reduce_dtype=torch.float32,
                                 cast_forward_inputs=False)
    offload = CPUOffloadPolicy(pin_memory=device == "cuda") if s.offload else OffloadPolicy()
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    model.recompute = s.recompute
    model.compute_device = torch.device(device) if s.offload else None
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=mixed, offload_policy=offload)
    return fully_shard(model, mesh=mesh, mp_policy=mixed, offload_policy=offload)


@torch.no_grad()
def whole_copy(model: Qwen, s: Settings) -> Qwen:
    """A whole copy of the sharded model in the dtype of computation, to sample with; every rank gets one."""
    with torch.device("meta"):
        whole = Qwen(model.config)
    dtype = compute_dtype(model.device, s.dtype)
    state = {name: p.to(model.device, dtype, copy=True).full_tensor()
             for name, p in model.named_parameters()}
    whole.load_state_dict(state, assign=True, strict=False)
    if model.config.tie_word_embeddings:
        whole.lm_head.weight = whole.model.embed_tokens.weight
    return whole


def answer(sampler: Qwen, tokenizer, problems, pool, s: Settings, name: str) -> list[Trace | None]:
    """The greedy Conductor's trace for each problem, None where it wrote no workflow. The ranks take turns at
    the problems, and all return all traces. name: of the evaluation, for --replay."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = problems[rank::world]
    conductor = model_conductor(sampler, tokenizer, prompting_from(s), 0.0)
    traces = evaluation.run_conductor(conductor, mine, [pool] * len(mine), name, int(s.recursion),
                                      prompting_from(s), edit=ablation_edit(s))
    shares = all_gather([traces])
    return [shares[i % world][i // world] for i in range(len(problems))]


def accuracy_now(run: Run, s: Settings, iteration: int) -> float | None:
    """The accuracy on the first of the held-out problems; None where all workers were lost."""
    some = run.test[:s.eval_problems]
    traces = answer(whole_copy(run.model, s), run.tokenizer, some, run.pool, s, f"test:{iteration}")
    return evaluation.accuracies(some, traces).get("all")


def save_or_leave(run: Run, s: Settings, done: int, groups, steps, reasons: list[str]):
    """After `done` iterations: a checkpoint if one is due, and the end if any rank has a reason for it."""
    for step in steps:
        run.skipped = run.skipped + 1 if step["skipped"] else 0
        if run.skipped == 3:
            leave(f"three gradients in a row were not finite; {where_saved(s)}")
    reasons += troubles(run.pool, groups)
    of_all = all_gather(reasons)  # They leave together.
    if of_all or done == s.iterations or done % s.save_every == 0:
        save(s, done, run)
        of_all = all_gather(reasons)  # A signal may have come meanwhile.
    if of_all:
        bill(run.pool, "in training")
        leave(f"{of_all[0]}: stopped after iteration {done}; {where_saved(s)}")


def finish(run: Run, s: Settings, reasons: list[str]):
    """The table on held-out problems, beside every worker and random workflows, and what was learned."""
    bill(run.pool, "in training")
    print0(f"the checkpoint is in {s.out}/checkpoint; {len(run.test)} held-out problems follow")
    sampler = whole_copy(run.model, s)
    del run.model, run.optimizer, run.reference
    gc.collect()  # The evaluation shall have their memory, and FSDP's modules hold one another.
    as_before(reasons)  # not earlier: Python loses an interrupt that comes amid what the collector calls
    traces = answer(sampler, run.tokenizer, run.test, run.pool, s, "test")
    if dist.get_rank():
        return
    test = run.test
    systems = {"Conductor": traces, **evaluation.baselines(test, run.pool)}
    shares = {name: evaluation.accuracies(test, answered) for name, answered in systems.items()}
    write_json(os.path.join(s.out, "test.json"), shares)
    print0("\n" + evaluation.table(test, systems))
    print0("\n" + evaluation.learned(test, [trace and trace.rounds()[0] for trace in traces]))
    for name, answered in systems.items():
        errors = [trace.error for trace in answered if trace and trace.error]
        if errors:
            print0(f"{name}: {len(errors)} of {len(test)} problems are not counted, as in {errors[0]}")


def try_it(run: Run, s: Settings) -> str:
    """The command that asks this Conductor a question."""
    question = min((problem.question for problem in run.test), key=len)
    words = [question, f"--checkpoint={s.out}/checkpoint"]
    if s.pool not in LOCAL:
        words.append(f"--pool={s.pool}")
    return f"python workflow.py {shlex.join(words)}"


def prompting_from(s: Settings) -> Prompting:
    known = {field.name for field in fields(Prompting)}
    return Prompting(**{key: value for key, value in asdict(s).items() if key in known})


def timed(conductor, clock):
    """The conductor with a lap when all is written: what follows is waiting for workers."""
    def with_lap(*arguments):
        yield from conductor(*arguments)
        clock.lap("sampling")
    return with_lap


def ablation_edit(s: Settings):
    """What --access=False does to a workflow before it runs; None if nothing."""
    def blind(workflow):
        return replace(workflow, steps=[replace(step, access=[], wrote_all=False) for step in workflow.steps])
    return None if s.access else blind


def of_all_ranks(mine: list[list[Rollout]], tasks: list[Task]) -> list[list[Rollout]]:
    """The rollouts of every rank, as [task][rollout], on every rank."""
    sent = [[replace(r, task=None) for r in group] for group in mine]  # A task's connections cannot be sent.
    by_rank = all_gather([sent])  # [rank][task][rollout]
    return [[replace(r, task=task) for part in parts for r in part] for task, *parts in zip(tasks, *by_rank)]


def my_share(rollouts: list[Rollout]) -> list[Rollout]:
    """This rank's part of some rollouts: neighbours, which share prompts, with as many tokens as others'."""
    ends = np.cumsum([len(r.completion.tokens) for r in rollouts])
    world = dist.get_world_size()
    owners = [(end - 1) * world // ends[-1] for end in ends]
    return [rollout for rollout, owner in zip(rollouts, owners) if owner == dist.get_rank()]


def weigh_tokens(run: Run, minibatches: list[list[Rollout]], s: Settings, forward: dict) -> dict:
    """With --importance, set the tokens' weights, and return the gap between trainer and sampler."""
    if not s.importance:
        return {}
    return {"gap": set_importance(run.model, [*itertools.chain(*minibatches)], s.importance, **forward)}


def schedule(step: int, steps: int, warmup: float) -> float:
    """Linear warm-up over a share of the steps, then a cosine to 0 (App. A.1)."""
    warm = max(1, round(warmup * steps))
    if step < warm:
        return (step + 1) / warm
    share = (step - warm) / max(1, steps - warm)  # of the way down
    return 0.5 * (1 + math.cos(math.pi * share))


# ------------------------------------------------------------------------------------------------------------
# The tiny Conductor: a tokenizer and a model made on the spot, and a warm start that teaches the format only.


def tiny_tokenizer(texts: list[str]) -> Tokenizer:
    """A byte-level BPE like Qwen2.5's, of 900 tokens. Its pieces differ: a quoted subtask, a list's opening,
    an empty or "all" access list and three empty lists are one token each: choosing one is one decision."""
    pieces = (r'(?:\b\w+ = \[\]\n?){2,3}', r'\p{L}+\n', r'\n\w+ = \[', r',? ?"[^"\d\n]*"', r' ?\["all"\],?',
              r' ?\[\],?', r' ?\p{L}+', r' ?\d', r' ?[^\s\p{L}\d]+', r'\s+')
    bpe = BPE(models.BPE())
    split = pre_tokenizers.Split(Regex("|".join(pieces)), "isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([split, as_bytes])
    bpe.decoder = decoders.ByteLevel()
    names = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    special = [AddedToken(name, special=True, normalized=False) for name in names]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=900, special_tokens=special,
                                                      initial_alphabet=alphabet, show_progress=False))
    return Tokenizer(bpe)


def random_lesson(problem, rng: random.Random, pool, s: Settings) -> tuple[list[dict], str]:
    """A chat and a completion in the right format. Where workers are named, the pool is a random subset. A
    share `warm_second` are second rounds: the chat holds an earlier workflow and some response, and the
    completion is by chance a new workflow or three empty lists."""
    if s.named:
        size = rng.randint(min(2, len(pool)), len(pool))
        chosen = sorted(rng.sample(range(len(pool)), size))
        pool = [pool[i] for i in chosen]
    names = "".join(w.letter for w in pool) if s.named else ""
    form = (len(pool), s.max_steps, names, s.subtasks, bool(s.init_from), evaluation.phrases_for(problem))
    completion = random_completion(problem.question, rng, *form)
    previous = None
    if rng.random() < s.warm_second:
        response = rng.choice((problem.answer, problem.question, "I have lost the thread.",
                               "I find nothing here to work on."))
        workflow = parse(completion, len(pool), s.max_steps, subtasks=s.subtasks)
        previous = Trace(problem.question, workflow, [], [Reply(response, 0, 0, 0.0, 0.0)])
        completion = random_completion(problem.question, rng, *form)
        completion = rng.choice((completion, as_lists(Workflow([]), s.subtasks)))
    return ask(Task(problem.question, pool, previous), prompting_from(s)), completion


def tiny_config(s: Settings, vocabulary: int = 900) -> Config:
    return Config(vocabulary, s.width, 3 * s.width, s.layers, num_attention_heads=4, num_key_value_heads=2,
                  rope_theta=100.0, tie_word_embeddings=True, max_position_embeddings=1024)


def tiny_conductor(s: Settings, problems, pool) -> tuple[Qwen, Tokenizer]:
    rng = random.Random(s.seed)
    texts = []
    for problem in problems[:4000]:
        chat, completion = random_lesson(problem, rng, pool, s)
        texts += [f"{turn['role']}\n{turn['content']}" for turn in chat]
        texts.append(f"assistant\n{completion}")
    tokenizer = tiny_tokenizer(texts)
    model = Qwen(tiny_config(s, len(tokenizer)))
    for name, p in model.named_parameters():
        if p.dim() > 1:  # wider than Qwen's 0.02: so narrow a model then learns to copy in a hundred steps
            torch.nn.init.normal_(p, std=0.1 if "embed" in name else 0.06)
    return model, tokenizer


def warm_start(model, tokenizer, problems, pool, s: Settings):
    """Supervised learning of random workflows in the right format. For the tiny model the question's own text
    enters the loss a little, so that it learns to tell questions apart; what a good workflow is, nothing here
    says.

    The logits are divided by 1.5 here and not in sampling: there the format is then nearly certain, while
    free choices, such as the worker, stay as even as in the data."""
    rank, world = dist.get_rank(), dist.get_world_size()
    rng = random.Random(s.seed)
    readable = [p for p in problems if len(p.question) < model.config.max_position_embeddings] or problems
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.0, fused=True)
    for step in tqdm(range(s.warm_steps), "warm start: the format", disable=rank > 0 or None, leave=False):
        rows, weights = [], []
        too_long = 0
        for problem in rng.choices(readable, k=max(s.warm_batch, world)):  # A rank without one would fail.
            chat, completion = random_lesson(problem, rng, pool, s)
            prompt = tokenizer.chat(chat)
            written = tokenizer.encode(completion) + [tokenizer.eos_id]
            learned = 0 if s.init_from else len(prompt) - 1  # tokens of the question that enter the loss
            known = len(prompt) - learned
            rows.append((prompt[:known], [prompt[known:] + written]))
            weights.append([0.1] * learned + [1.0] * len(written))
            too_long += len(written) > s.max_new_tokens
        if step == 0 and too_long > len(rows) / 2:
            leave("train.py: most of the warm start's lessons have more tokens than "
                  f"--max_new_tokens={s.max_new_tokens}: raise it, or ask shorter questions")
        total = sum(sum(row) for row in weights)
        logprobs, _ = packed_logprobs(model, rows[rank::world], 1.5)
        weight = torch.tensor([w for row in weights[rank::world] for w in row], device=model.device)
        loss = -(logprobs * weight).sum() * world / total  # FSDP averages gradients over ranks
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        set_lr(optimizer, s.warm_lr * schedule(step, s.warm_steps, 0.05))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


# ------------------------------------------------------------------------------------------------------------
# What a run tells


def metrics(s: Settings, iteration, groups, steps, seconds, held_out, config: Config) -> dict:
    """A line of metrics.jsonl. Means are over first rounds; `again` is about second ones. None is unknown."""
    rollouts = [*itertools.chain(*groups)]
    first = [r for r in rollouts if r.task.previous is None]
    known = [r for r in first if r.right is not None]
    written = [r for r in rollouts if r.completion]  # Too long a prompt gets no completion.
    ran = [r for r in first if r.trace and r.completion]
    replies = [reply for r in rollouts if r.trace for reply in r.trace.replies if reply]
    costs = [reply.cost for reply in replies]
    lengths = [*map(n_written, written)]
    computed = [[r for r in group if r.reward is not None and (r.advantage or s.beta)] for group in groups]
    m = {
        "iteration": iteration,
        "reward": mean([r.reward for r in known]),
        "accuracy": mean([r.right for r in known]),
        "held_out": held_out,  # accuracy on problems that are not trained on
        "parsed": mean([r.trace is not None for r in first if r.completion]),  # share that is a workflow
        "flat": mean([not any(r.advantage for r in group) for group in groups]),  # share that teaches nothing
        "lost": sum(r.right is None for r in rollouts),  # for want of a worker's reply
        "error": next((r.trace.error for r in rollouts if r.right is None), None),  # the first that lost one
        "steps": mean([*map(n_steps, ran)]),
        "calls": len(replies),
        "cost": None if None in costs else sum(costs),  # dollars
        "tokens": mean(lengths),  # of a completion
        "longest": max(lengths, default=0),
        "cut": mean([not r.completion.finished for r in written]),  # share that reached max_new_tokens
        "lr": steps[0]["lr"],
        "gap": steps[0]["gap"],  # see grpo.statistics, also for those below
        "skipped": sum(step["skipped"] for step in steps),
    }
    for key in ("approx_kl", "clipfrac", "kl", "entropy", "grad_norm"):
        m[key] = mean([step[key] for step in steps if step[key] is not None])
    m["tokens_per_second"] = round(sum(lengths) / sum(seconds.values()))
    m["mfu"] = utilisation([*filter(None, computed)] * s.epochs, seconds["training"], config)
    m["memory"] = memory_used() / GiB  # of rank 0
    m["seconds"] = seconds
    m |= {"by_kind": {}, "steps_by_kind": {}}
    for kind in dict.fromkeys(r.task.problem.kind for r in first):
        m["by_kind"][kind] = mean([r.right for r in known if r.task.problem.kind == kind])
        m["steps_by_kind"][kind] = mean([n_steps(r) for r in ran if r.task.problem.kind == kind])
    m["workers"] = shares_of(itertools.chain(*(r.trace.workers for r in ran)))  # of the steps
    second = [r for r in rollouts if r.task.previous is not None and r.right is not None]
    if second:
        keeps = [(r.task.previous.right, r.trace is not None and n_steps(r) == 0) for r in second]
        m["again"] = {
            "before": mean([r.task.previous.right for r in second]),
            "accuracy": mean([r.right for r in second]),
            "parsed": mean([r.trace is not None for r in second]),
            "kept_right": mean([kept for right, kept in keeps if right]),  # by empty lists
            "kept_wrong": mean([kept for right, kept in keeps if not right]),
        }
    return m


def n_steps(rollout: Rollout) -> int:
    return len(rollout.trace.workflow.steps)


ON_SCREEN = ("reward", "accuracy", "held_out", "parsed", "flat", "lost", "steps", "cost", "tokens", "cut",
             "gap", "kl", "grad_norm", "skipped", "mfu", "memory")


def log(s: Settings, m: dict, report):
    """Write metrics to metrics.jsonl, their numbers to `report`, and the most telling ones to the screen."""
    if dist.get_rank():
        return
    for key, value in m.items():
        if isinstance(value, float) and not math.isfinite(value):
            m[key] = None  # JSON knows no NaN
    with open(os.path.join(s.out, "metrics.jsonl"), "a") as f:
        f.write(json.dumps(m) + "\n")
    numbers = {key: value for key, value in m.items() if isinstance(value, int | float)}
    report(numbers)
    shown = {key: numbers[key] for key in ON_SCREEN if key in numbers}
    shown |= m["seconds"]  # how long each part took stands last
    print0(f"{m['iteration'] + 1:4d}/{s.iterations} {in_words(shown)}")
    if "again" in m:
        print0(f"{'':9}second rounds: {in_words(m['again'])}")
    if m["error"]:
        print0(f"{'':9}the first lost: {m['error']}")


def in_words(numbers: dict) -> str:
    """Names and numbers, those with a fraction to three digits."""
    return " ".join(f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {value}"
                    for key, value in numbers.items())


def reporter(s: Settings, begin: int):
    """The function that gets the numbers of each line: TensorBoard's, which drops what it had of iterations
    from `begin` on, or wandb's, if --report names it."""
    if not s.report or dist.get_rank():
        return lambda numbers: None
    if s.report == "wandb":
        import wandb
        return wandb.init(project="conductor", config=asdict(s), dir=s.out).log
    from torch.utils.tensorboard import SummaryWriter
    writer = SummaryWriter(os.path.join(s.out, "tensorboard"), purge_step=begin)

    def report(numbers):
        for key, value in numbers.items():
            writer.add_scalar(key, value, numbers["iteration"])
        writer.flush()
    return report


def write_traces(s: Settings, iteration: int, groups):
    """traces/ITERATION.jsonl: every rollout with what its workers said."""
    if dist.get_rank():
        return
    with open(os.path.join(s.out, "traces", f"{iteration:05d}.jsonl"), "w") as f:
        for r in itertools.chain(*groups):
            problem = r.task.problem
            told = {"trace": trace_to_json(r.trace)} if r.trace else {"text": r.written}
            row = {"problem": problem.id, "answer": problem.answer, "reward": r.reward, **told}
            f.write(json.dumps(row) + "\n")


def troubles(pool, groups):
    """Yield why a run would go on in vain."""
    if pool[0].budget and pool[0].budget.refused:
        yield "the budget is spent"
    errors = [r.trace.error for r in itertools.chain(*groups) if r.trace]
    if len(errors) >= 8 and all(errors):  # One or two may be chance.
        yield f"no workflow came to an answer ({errors[0]})"


def bill(pool, when: str):
    """Say what all ranks' calls have cost, those of --replay included."""
    spent = all_gather([(w.calls, w.spent, w.unpriced) for w in pool])
    calls, dollars, unknown = (sum(column) for column in zip(*spent))
    beside = f", and {unknown:,} of them at an unknown price" if unknown else ""
    print0(f"{when}: {calls:,} calls for ${dollars:.2f}{beside}")


def print0(line: str):
    """Print on rank 0. Nobody may read it any more: Ctrl-C also ends a `tee` behind a run."""
    if dist.get_rank() == 0:
        with contextlib.suppress(OSError):
            tqdm.write(line)
            sys.stdout.flush()


class Clock:
    """The seconds of an iteration, by part. What passes between two laps is spent on the second's part."""

    def __init__(self):
        self.seconds = collections.defaultdict(float)
        self.last = time.perf_counter()

    def lap(self, part: str):
        now = time.perf_counter()
        self.seconds[part] += now - self.last
        self.last = now


# ------------------------------------------------------------------------------------------------------------
# Ranks, signals, the optimizer


def on_rank0(job):
    """Run `job` on rank 0 and return its result on all ranks. What it raises ends all, with one message."""
    result = [None, None]
    if dist.get_rank() == 0:
        try:
            result[0] = job()
        except (OSError, ValueError, WorkerError, SystemExit) as e:
            result[1] = str(e)
    dist.broadcast_object_list(result)
    if result[1] is not None:
        leave(f"train.py: {result[1]}")
    return result[0]


def all_gather(mine: list) -> list:
    """The concatenation of every rank's list, on every rank."""
    lists = [None] * dist.get_world_size()
    dist.all_gather_object(lists, mine)
    return [*itertools.chain(*lists)]


def leave(why: str):
    """End the program on all ranks, which all call this, with a message on one."""
    raise SystemExit(why if dist.get_rank() == 0 else 1)


def on_signals() -> list:
    """From here on Ctrl-C, SIGTERM and a closed terminal (SIGHUP, unless nohup ignores it) only append to the
    list that is returned, and the loop stops after its iteration, with a checkpoint. torchrun sends signals
    twice."""
    reasons = []

    def stop(*_):
        if not reasons and dist.get_rank() == 0:
            told = "stopping after this iteration"
            if "TORCHELASTIC_RUN_ID" in os.environ:
                told += ", for which torchrun waits 30 s, or its --shutdown-timeout"
            with contextlib.suppress(OSError):  # Nobody may read it.
                os.write(2, f"\n{told}\n".encode())  # print may be what was interrupted
        reasons.append("interrupted")

    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signal.signal(signal.SIGHUP, stop)
    return reasons


def as_before(reasons: list[str]):
    """Signals end the program again, and so does one that came after the last look at `reasons`."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if reasons:
        raise KeyboardInterrupt


def set_lr(optimizer, lr: float):
    for group in optimizer.param_groups:
        group["lr"] = lr


def dry_step(model, optimizer, reference, s: Settings, n_ids: int):
    """The largest update once, with a learning rate of 0, so that an out-of-memory error comes before any
    worker is paid. Adam's state is zeros again after it."""
    size = s.token_budget if model.device.type == "cuda" else 64
    length = min(s.max_new_tokens, size)
    completion = Completion([0] * length, [0.0] * length, True)
    rollouts = [Rollout(None, "", [0], completion, advantage=1.0)] * (size // length)
    set_lr(optimizer, 0.0)
    how = dict(beta=s.beta, reference=reference, n_ids=n_ids, token_budget=size)
    if update(model, optimizer, rollouts, **how)["skipped"]:
        leave("the gradient of a first step is not finite: the weights to start from are damaged")
    for state in optimizer.state.values():
        for tensor in state.values():
            tensor.zero_()


# ------------------------------------------------------------------------------------------------------------
# Checkpoints. What is random follows from the seed and the iteration, so that weights and Adam's moments are
# all that resuming needs.


def load_models(s: Settings, start: str, problems, pool, device: str):
    """The model in its shards, its tokenizer, and the reference policy if one is named."""
    reference = None
    named = reference_folder(s, start)
    try:
        if start:
            on_rank0(lambda: fetch(start, "*.json", "*.safetensors"))  # one rank downloads
            tokenizer = Tokenizer.from_pretrained(start)
            model = Qwen.from_pretrained(start, device="cpu" if s.offload else device,
                                         shard=lambda whole: shard(whole, s, device))
        else:
            model, tokenizer = tiny_conductor(s, problems, pool)
            shard(model, s, device)
        if s.beta and named:
            reference = Qwen.from_pretrained(named, compute_dtype(device, s.dtype), device)
    except (OSError, ValueError) as e:
        leave(f"train.py: {e}")
    return model, tokenizer, reference


def reference_folder(s: Settings, start: str) -> str:
    """The named reference policy, or what the run to go on with wrote; "" if neither."""
    resumed = s.resume and os.path.dirname(start) == os.path.join(s.out, "checkpoints")
    return s.reference or (os.path.join(s.out, "reference") if resumed else "")


def save(s: Settings, iteration: int, run: Run):
    """A checkpoint: Hugging Face's folder, for use, and in state/ what resuming needs, of which each rank
    writes its own part. A folder with a number is whole."""
    rank, world = dist.get_rank(), dist.get_world_size()
    folder = os.path.join(s.out, "checkpoints", "unfinished")
    os.makedirs(os.path.join(folder, "state"), exist_ok=True)
    part = {key: tensor.to_local().cpu().contiguous() for key, tensor in trained(run.model, run.optimizer)}
    save_file(part, os.path.join(folder, "state", f"{rank:05d}.safetensors"))
    del part
    save_for_use(s, folder, run.model, run.tokenizer, run.pool)
    dist.barrier()  # all parts are written
    if rank == 0:
        steps = int(next(iter(run.optimizer.state.values()))["step"])
        facts = {"score": score(s), "optimizer_steps": steps, "parts": world}
        write_json(os.path.join(folder, "training.json"), facts)
        final = os.path.join(s.out, "checkpoints", f"{iteration:05d}")
        shutil.rmtree(final, ignore_errors=True)  # of somebody's, or half of a copy
        os.rename(folder, final)
        tidy(s)
    dist.barrier()


def trained(model, optimizer):
    """Yield the names and tensors that training changes: fp32 weights, and Adam's two moments of each."""
    for name, p in model.named_parameters():
        yield name, p.detach()
        for moment in ("exp_avg", "exp_avg_sq"):
            yield f"{moment} {name}", optimizer.state[p][moment]


def save_for_use(s: Settings, folder: str, model, tokenizer, pool):
    """Weights in the dtype of computation, tokenizer and how to ask, in Hugging Face's layout. Every rank
    takes part in gathering; rank 0 writes."""
    dtype = compute_dtype(model.device, s.dtype)
    tensors = ((name, p.detach().to(dtype).full_tensor()) for name, p in model.named_parameters())
    if dist.get_rank() == 0:
        write_tensors(folder, model.config, tensors)
        tokenizer.save_pretrained(folder)
        known = {"workers": [worker.name for worker in pool]}
        if os.path.isfile(s.pool):
            known["pool"] = os.path.abspath(s.pool)
        write_json(os.path.join(folder, "conductor.json"), {**asdict(prompting_from(s)), **known})
    else:
        collections.deque(tensors, maxlen=0)


def score(s: Settings) -> float:
    """By which the best checkpoint is kept: the last held-out accuracy, 0 before the first; where none is
    measured the mean accuracy in training since the checkpoint before."""
    key, last = ("held_out", 1) if s.eval_every else ("accuracy", s.save_every)
    with open(os.path.join(s.out, "metrics.jsonl")) as f:
        values = [json.loads(line)[key] for line in f]
    return mean([value for value in values if value is not None][-last:]) or 0.0


def restore(model, optimizer, folder: str):
    """What training changes, as `save` left it, also on another number of ranks: every rank puts a tensor's
    parts together, and takes its own of the whole."""
    facts = read_json(os.path.join(folder, "training.json"))
    files = [os.path.join(folder, "state", f"{rank:05d}.safetensors") for rank in range(facts["parts"])]
    try:
        parts = [safe_open(file, framework="pt") for file in files]
    except (FileNotFoundError, SafetensorError) as e:  # One is missing, or damaged.
        leave(f"train.py: {folder} is damaged ({e}); resuming needs all {len(files)} parts; if you remove it "
              "--resume takes the checkpoint before")
    for key, tensor in trained(model, optimizer):
        whole = torch.cat([part.get_tensor(key) for part in parts])
        tensor.copy_(local_part(whole, tensor, tensor.device))
    for state in optimizer.state.values():
        state["step"].fill_(facts["optimizer_steps"])


def checkpoints(out: str) -> list[str]:
    """The checkpoints of a run, oldest first, and nothing that a user has put beside them."""
    folders = sorted(glob.glob(os.path.join(glob.escape(out), "checkpoints", "[0-9]" * 5)))
    return [folder for folder in folders if os.path.exists(os.path.join(folder, "training.json"))]


def where_saved(s: Settings) -> str:
    """Where what was learned is, for a run that ends early."""
    link = os.path.join(s.out, "checkpoint")
    if os.path.exists(link):
        return f"the checkpoint is in {link}; the same command with --resume goes on"
    kept = earlier_runs(s.out)
    before = f"; the run before is in {kept[-1]}" if kept else ""
    return f"nothing had been saved{before}"


def tidy(s: Settings):
    """Point out/checkpoint at the newest, and drop all but the newest few and the best. A folder loses its
    number first: what a kill leaves of it counts for nothing, and goes the next time."""
    link = os.path.join(s.out, "checkpoint")
    folders = checkpoints(s.out)
    if os.path.lexists(link + ".new"):  # a kill can leave one
        os.remove(link + ".new")
    os.symlink(os.path.join("checkpoints", os.path.basename(folders[-1])), link + ".new")
    os.replace(link + ".new", link)
    best = max(folders, key=lambda folder: read_json(os.path.join(folder, "training.json"))["score"])
    unfinished = os.path.join(s.out, "checkpoints", "unfinished")
    if os.path.exists(unfinished):
        shutil.rmtree(unfinished)
    for folder in set(folders) - {*folders[-s.keep:], best}:
        os.rename(folder, unfinished)
        shutil.rmtree(unfinished)


def earlier_runs(out: str) -> list[str]:
    """What `make_room` has kept, the oldest first."""
    names = (f"{out}.{i}" for i in itertools.count(1))
    return [*itertools.takewhile(os.path.exists, names)]


held = []  # the open folder whose lock tells other processes that a run is going on there


def hold(s: Settings):
    """Lock --out while this process lives, or until its next run. OSError if another process has it."""
    while held:
        os.close(held.pop())
    os.makedirs(s.out, exist_ok=True)
    held.append(os.open(s.out, os.O_RDONLY))
    try:
        fcntl.flock(held[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise OSError(f"--out={s.out}: another run is writing there; give this one another --out") from None
    except OSError:  # The file system knows no locks.
        pass
    if os.fstat(held[0]).st_ino != os.stat(s.out).st_ino:  # Another run has moved what was opened.
        hold(s)


def refuse_links(s: Settings):
    """OSError if somebody has put links into --out, by which a run would write or remove things elsewhere."""
    ours = [os.path.join(s.out, name) for name in ("checkpoint", "checkpoint.new")]
    for folder, folders, files in os.walk(s.out):
        for entry in (os.path.join(folder, name) for name in folders + files):
            if os.path.islink(entry) and entry not in ours:
                raise OSError(f"{entry} is a link: what a run writes and removes is to be within --out")
        if folder == s.out and "wandb" in folders:
            folders.remove("wandb")  # It has links of its own.


def make_room(s: Settings):
    """An earlier run in --out is kept, under the next free number."""
    hold(s)
    if os.path.exists(os.path.join(s.out, "metrics.jsonl")):
        kept = f"{s.out}.{len(earlier_runs(s.out)) + 1}"
        os.rename(s.out, kept)
        tqdm.write(f"the earlier run in {s.out} is now {kept}")
        hold(s)
    refuse_links(s)
    os.makedirs(os.path.join(s.out, "traces"), exist_ok=True)
    link = os.path.join(s.out, "checkpoint.new")
    with contextlib.suppress(FileExistsError):  # A file system without links shall fail now, not at a save.
        os.symlink("checkpoints", link)
    os.remove(link)
    write_json(os.path.join(s.out, "settings.json"), asdict(s))


def rewind(s: Settings, iteration: int):
    """Cut metrics.jsonl after so many iterations, and say which settings are new. Those of the start, which
    is over, stay as they were. What a kill left untidy is tidied."""
    refuse_links(s)
    settings = os.path.join(s.out, "settings.json")
    old = read_json(settings)
    for key in ("width", "layers", "init_from", "warm_steps", "warm_batch", "warm_lr", "warm_second"):
        setattr(s, key, old.get(key, getattr(s, key)))
    changed = [f"{key} {old.get(key)} -> {value}" for key, value in asdict(s).items()
               if value != old.get(key) and key != "resume"]
    beside = f", with changed settings: {', '.join(changed)}" if changed else ""
    tqdm.write(f"going on in {s.out} after iteration {iteration}{beside}")
    file = os.path.join(s.out, "metrics.jsonl")
    with open(file) as f, open(file + ".tmp", "w") as new:
        new.writelines(itertools.islice(f, iteration))
    os.replace(file + ".tmp", file)
    write_json(settings, asdict(s))
    tidy(s)


# ------------------------------------------------------------------------------------------------------------
# What a run takes

# Dense bf16 TFLOP/s and GB/s of memory, from the vendors' data sheets. What another device can do is unknown.
SPEEDS = {"H200": (989, 4800), "H100 PCIe": (756, 2000), "H100": (989, 3350),
          "A100-SXM4-80GB": (312, 2039), "A100 80GB": (312, 1935), "A100": (312, 1555),
          "L40S": (362, 864), "RTX 4090": (165, 1008), "RTX 3090": (71, 936)}
GiB = 1 << 30
RESERVE = {"cuda": 3.0, "cpu": 0.5}  # GiB beside what is estimated: context, graphs, fragments
SHAPES = {  # of models that may not be here yet
    "Qwen/Qwen2.5-7B": Config(),
    "out/paper/checkpoint": Config(),
    "Qwen/Qwen2.5-0.5B-Instruct": Config(151936, 896, 4864, 24, 14, 2, tie_word_embeddings=True),
}
TINY = 10_000_000  # parameters below which a model is none that was pretrained
STEPS = 3  # of a workflow, as the estimate assumes
TOKENS_IN, TOKENS_OUT = 1000, 700  # of a call


def devices() -> tuple[str, int, str]:
    """The kind of device that this process and its neighbours compute on, the bytes that one has for each
    (of a CPU's memory a share), and its name."""
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # here, as torchrun says
    found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    if found and len(found) >= processes:
        return "cuda", min(gpu.total_memory for gpu in found[:processes]), found[0].name
    return "cpu", machine_memory() // processes, "cpu"


def machine_memory(cgroups: str = "/sys/fs/cgroup", own: str = "/proc/self/cgroup") -> int:
    """The bytes of this machine's own memory, or fewer where a container or a batch system allows fewer."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    groups = ""
    with contextlib.suppress(OSError), open(own) as f:
        groups = f.read()
    # as in 0::/slurm/job_7, or of version 1 in 4:memory:/slurm/job_7: a limit of any level holds
    for kind, root, name in (("", "", "memory.max"), ("memory", "memory", "memory.limit_in_bytes")):
        found = re.search(rf"^\d+:{kind}:/(.*)$", groups, re.M)
        levels = found[1].split("/") if found else []
        for i in range(len(levels) + 1):
            file = os.path.join(cgroups, root, *levels[:i], name)
            with contextlib.suppress(OSError, ValueError), open(file) as f:
                limits.append(int(f.read()))  # or "max", which is no number
    return min(limits)


def speeds() -> tuple[float, float] | None:
    """FLOP/s and bytes/s of the device; None if they are unknown."""
    for known, (tflops, gigabytes) in SPEEDS.items():
        if known in devices()[2]:
            return tflops * 1e12, gigabytes * 1e9
    return None


def memory_used() -> int:
    """The most bytes that this rank has had: of the GPU's memory, on a CPU of the machine's."""
    if devices()[0] == "cuda":
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def sizes(config: Config) -> tuple[int, int]:
    """The parameters of a layer, and of the whole model."""
    with torch.device("meta"):
        model = Qwen(replace(config, num_hidden_layers=1))
    layer = sum(p.numel() for p in model.model.layers[0].parameters())
    with_one = sum(p.numel() for p in model.parameters())
    return layer, with_one + (config.num_hidden_layers - 1) * layer


def forward_flops(config: Config, asked: float, written: float, context: float) -> float:
    """FLOPs of a forward pass over so many tokens of prompts and of completions. Each attends to `context`
    tokens; those that are written go through the head."""
    layer = 2 * sizes(config)[0] + 4 * config.hidden_size * context
    head = 2 * config.hidden_size * config.vocab_size
    return (asked + written) * config.num_hidden_layers * layer + written * head


def utilisation(groups, seconds: float, config: Config) -> float | None:
    """MFU of an update: the FLOPs of forward and backward pass, each prompt once, over the most that the
    devices can do. What was computed twice to save memory does not count."""
    if speeds() is None:
        return None
    total = 0.0
    for group in groups:
        prompt = len(group[0].prompt)
        written = sum(map(n_written, group))
        total += 3 * forward_flops(config, prompt, written, prompt + written / len(group) / 2)
    return total / (seconds * speeds()[0] * dist.get_world_size())


def memory(s: Settings, config: Config, world: int, prompt: int) -> dict[str, dict[str, float]]:
    """GiB of a rank, by phase and part, with prompts of so many tokens. Parts that end in (CPU) are not in
    the device's memory."""
    C, L, inner = config.hidden_size, config.num_hidden_layers, config.intermediate_size
    layer, N = sizes(config)
    width = 2 if s.dtype == "bf16" else 4  # bytes of a number in computation
    kv = 2 * config.num_key_value_heads * config.head_dim * L * width  # bytes of a token's keys and values
    T = s.token_budget + prompt  # tokens of a packed row
    place = " (CPU)" if s.offload and devices()[0] == "cuda" else ""
    scores = 0  # bytes of attention for a query and a key
    if width == 4 and devices()[0] == "cuda":  # before torch 2.14 no fused kernel takes grouped heads
        scores = 3 * width * config.num_attention_heads

    def generation(prompts, rows):
        at_once = max(prompt, min(prompts * prompt, PREFILL_TOKENS))
        return {"copy to sample with": width * N,
                "keys and values": kv * (prompts * prompt + rows * s.max_new_tokens),
                "prompts at work": at_once * ((6 * C + 3 * inner) * width + scores * prompt),
                "probabilities": 16 * rows * config.vocab_size}

    state = {f"weights{place}": 4 * N / world, f"Adam's state{place}": 8 * N / world}
    if s.beta:
        state["reference policy"] = width * N
    training = {f"gradients{place}": 4 * N / world,
                "gathered weights": (2 * width + 4) * (N - L * layer + 2 * layer),  # with their gradients
                "logits": (20 if s.beta else 16) * min(T * config.vocab_size, HEAD_LOGITS[devices()[0]])}
    a_layer = T * ((10 * C + 5 * inner) * width + scores * (prompt + s.max_new_tokens))
    if s.recompute:
        training |= {"layers' inputs": L * T * C * width, "a layer at work": a_layer}
    else:
        training["activations"] = L * a_layer
    at_once = max(1, READ_AT_ONCE // prompt)
    asked = min(s.questions, at_once)
    questions = math.ceil(min(s.test / world, at_once))
    phases = {"sampling": state | generation(asked, asked * math.ceil(s.rollouts / world)),
              "training": state | training,
              "evaluation": (state if s.eval_every else {}) | generation(questions, questions)}
    return {phase: {part: size / GiB for part, size in parts.items()} for phase, parts in phases.items()}


def peak(phases: dict) -> float:
    """The most GiB of the device's memory that any phase takes."""
    on_device = [[size for part, size in parts.items() if "(CPU)" not in part] for parts in phases.values()]
    return max(map(sum, on_device))


def what_would_fit(s: Settings, config: Config, prompt: int, room: float) -> str:
    """Up to three ways in which the run would fit into so many GiB, the mildest first."""
    ways = [{"recompute": True}, {"token_budget": s.token_budget // 4}, {"offload": True}, {"processes": 2},
            {"processes": 4}, {"recompute": True, "offload": True},
            {"offload": True, "token_budget": s.token_budget // 4, "max_new_tokens": s.max_new_tokens // 2}]
    if devices()[0] == "cpu":  # which has no other memory
        ways = ways[:2]
    fits = []
    for way in ways:
        world = way.pop("processes", 1) * dist.get_world_size()
        if peak(memory(replace(s, **way), config, world, prompt)) <= room:
            flags = " ".join(f"--{key}={value}" for key, value in way.items())
            fits.append(flags or f"{world} processes")
    return f"it would fit with {', or with '.join(fits[:3])}" if fits else "a smaller model is what would fit"


def estimate(s: Settings, config: Config, pool) -> tuple[str, str]:
    """What a run takes, with its assumptions, and what it lacks of the device's memory, "" if nothing."""
    local = s.pool in LOCAL
    chat = ask(Task("x" * (40 if local else 400), pool), prompting_from(s))
    prompt = sum(len(turn["content"]) for turn in chat) // 4
    if s.recursion:
        prompt += s.max_new_tokens + (100 if local else 4096)  # the first round and its answer
    world = dist.get_world_size()
    kind, present, _ = devices()
    phases = memory(s, config, world, prompt)
    needed = peak(phases) + RESERVE[kind]
    lack = ""
    if needed > present / GiB:
        instead = what_would_fit(s, config, prompt, present / GiB - RESERVE[kind])
        lack = f"memory: {needed:.1f} GiB for each process, of which {present / GiB:.1f} are here; {instead}"

    # The work of an iteration.
    rounds = 1.5 if s.recursion else 1.0
    workflows = s.questions * s.rollouts * rounds
    written = min(250, s.max_new_tokens // 2)
    flops = forward_flops(config, s.questions * rounds * prompt, workflows * written, prompt + written / 2)
    flops *= 4 if s.recompute else 3
    slots = sum(worker.concurrency for worker in pool)
    latency = 0.01 if local else 20.0
    waiting = max(STEPS * workflows / slots, STEPS) * latency
    seconds = f"workers {waiting:.1f} ({STEPS * workflows:.0f} calls over {slots} slots, {latency:g} s each)"
    if speeds():
        compute, bandwidth = speeds()
        sampling = rounds * s.max_new_tokens * 2 * sizes(config)[1] / (0.65 * bandwidth)
        training = flops / (0.5 * compute * world)
        seconds += (f", sampling {sampling:.0f} (at 65 % of the memory's bandwidth), "
                    f"training {training:.0f} (at half of the peak)")
    else:
        seconds += f", {flops / 1e12:.3g} TFLOP to train; how fast this device computes is unknown"

    # The calls of the whole run.
    graded = s.iterations * workflows + 2 * s.test  # At the end random workflows are measured, too,
    if s.eval_every:
        graded += s.iterations // s.eval_every * s.eval_problems
    calls = STEPS * graded + s.test * len(pool)  # and each worker alone.
    prices = [worker.price[0] * TOKENS_IN + worker.price[1] * TOKENS_OUT for worker in pool if worker.price]
    dollars = calls / len(pool) * sum(prices) / 1e6

    lines = [f"model     {sizes(config)[1] / 1e9:.3f} billion parameters, computed in {s.dtype}",
             f"memory    at most {peak(phases):.1f} GiB a process, and {RESERVE[kind]} that are not counted"]
    for phase, parts in phases.items():
        shown = [f"{part} {size:.1f}" for part, size in parts.items() if size >= 0.05]
        if shown:
            lines.append(f"          {phase}: {', '.join(shown)}")
    if disk(config) > 0.05:
        lines.append(f"disk      {disk(config):.1f} GiB a checkpoint, at most {s.keep + 2} of them at a time")
    lines += [
        f"seconds   of an iteration, prompts of {prompt} tokens and completions of {written}: {seconds}",
        f"calls     {calls:,.0f} with the evaluations, {STEPS} a workflow, evenly over the pool"]
    unknown = len(pool) - len(prices)
    if dollars or unknown:
        lines.append(f"dollars   about {dollars:,.0f} at {TOKENS_IN} tokens in and {TOKENS_OUT} out a call")
    if unknown:
        lines[-1] += f", without {unknown} workers whose price is unknown"
    return "\n".join(lines), lack


def disk(config: Config) -> float:
    """GiB of a checkpoint: the fp32 weights with two moments, and the weights for use."""
    return 16 * sizes(config)[1] / GiB


# ------------------------------------------------------------------------------------------------------------
# What a run lacks, and the command line


def preflight(s: Settings, start: str):
    """What would fail late fails here, all of it at once. With --dry_run the estimate is said in any case.
    Returns the pool's address, the dollars left of the budget, and the model's shape."""
    check_settings(s)
    pool = load_pool(s.pool, replay=s.replay, budget=s.budget)
    lacks = []
    config = tiny_config(s)
    if start:
        try:
            config = Config.from_pretrained(start)
        except (OSError, ValueError) as e:
            lacks.append(f"a model to start from ({' '.join(str(e).split())})")
            config = SHAPES.get(start)  # An estimate needs no more.
    if config:
        choose_by_size(s, config)
        text, lack = estimate(s, config, pool)
        if s.dry_run or sizes(config)[1] > TINY:
            print0(text)
        lacks += [*filter(None, [lack]), *room_lacking(s, config)]
    lacks += lacking(s, start, pool)
    if s.dry_run or not lacks:  # as it costs money
        lacks += silent(pool)
    if lacks:
        hint = "" if s.preset == "laptop" else "\nThe laptop world needs nothing: --preset=laptop"
        raise SystemExit("\n  ".join(["the run lacks", *lacks]) + hint)
    return pool[0].base_url, s.budget and max(pool[0].budget.left, 1e-9), config


def choose_by_size(s: Settings, config: Config):
    """Set what depends on whether the model is a tiny one or was pretrained."""
    tiny = sizes(config)[1] < TINY
    s.lr = s.lr or (1e-3 if tiny else 1e-6)
    s.warm_lr = s.warm_lr or (6e-3 if tiny else 2e-4)
    if tiny and not s.dtype:
        s.dtype = "fp32"
    s.dtype = "bf16" if compute_dtype(devices()[0], s.dtype) == torch.bfloat16 else "fp32"


def check_settings(s: Settings):
    """ValueError for values with which nothing can run."""
    may_be_0 = {"seed", "beta", "warmup", "warm_steps", "eval_every"}
    may_be_0 |= {field.name for field in fields(Settings) if field.default == 0}
    for key, value in asdict(s).items():
        if type(value) in (int, float) and not key.startswith("reward_"):
            if not 0 < value < 1e18 and not (value == 0 and key in may_be_0):
                raise ValueError(f"--{key}={value}: expected a number above 0, below 1e18")
        if key.startswith("reward_") and not math.isfinite(value):
            raise ValueError(f"--{key}={value}: expected a number")
    if s.beta2 >= 1:
        raise ValueError(f"--beta2={s.beta2}: expected a number between 0 and 1")
    if s.temperature < 1e-6:
        raise ValueError(f"--temperature={s.temperature}: rollouts would be greedy, and all the same")
    if s.iterations > 99_999:
        raise ValueError(f"--iterations={s.iterations}: checkpoints have five digits; at most 99,999")
    if s.max_steps > 100:
        raise ValueError(f"--max_steps={s.max_steps}: every step is paid; at most 100")
    names = {"loss": LOSSES, "report": ("", "tensorboard", "wandb"), "sandbox": ("", "partial"),
             "examples": ("ood", "in", "mixed")}
    for key, known in names.items():
        if getattr(s, key) not in known:
            raise ValueError(f"--{key}={getattr(s, key)}: there are {', '.join(filter(None, known))}")
    if s.rollouts < 2:
        raise ValueError(f"--rollouts={s.rollouts}: a group of one has no advantage; expected 2 or more")
    if s.width % 8:
        raise ValueError(f"--width={s.width}: expected a multiple of 8, for 4 heads of an even size")
    if os.path.isfile(s.out):
        raise ValueError(f"--out={s.out}: a file, where a folder is wanted")
    if s.data.endswith(".jsonl") and os.path.exists(s.data) and not s.test_data:
        raise ValueError(f"--data={s.data} has no test split: name other problems with --test_data=FILE")
    for key in ("replay", "data", "test_data", "pool"):
        path = getattr(s, key)
        within = os.path.abspath(path).startswith(os.path.abspath(s.out) + os.sep)
        if within and (key == "replay" or os.path.isfile(path)):
            raise ValueError(f"--{key}={path}: a place outside of --out, please, which the next run moves")


def room_lacking(s: Settings, config: Config):
    """Yield what the run lacks of positions, of memory beside the device's, and of disk."""
    if s.max_new_tokens >= config.max_position_embeddings:
        yield f"room for a prompt (--max_new_tokens={s.max_new_tokens} is all that the model can read)"
    # A checkpoint takes fp32 weights and Adam's two moments to the CPU. With --offload they are there anyway,
    # with gradients, and what is pinned is rounded up to powers of two.
    needed = (24 if s.offload else 12) * sizes(config)[1] / GiB
    if devices()[0] == "cuda" and needed > machine_memory() / GiB:
        yield f"{needed:.0f} GiB of RAM, and some more, for {'--offload' if s.offload else 'checkpoints'}"
    free = shutil.disk_usage(folder_of(s.out)).free / GiB
    present = len(checkpoints(s.out)) if s.resume else 0
    needed = disk(config) * (s.keep + 2 - present)
    if free < needed:
        yield f"{needed:.2f} GiB of disk in {s.out} (free are {free:.2f}; a smaller --keep takes less)"


def folder_of(path: str) -> str:
    """The path, or what exists above it."""
    path = os.path.abspath(path)
    return path if os.path.exists(path) else folder_of(os.path.dirname(path))


def lacking(s: Settings, start: str, pool):
    """Yield what the run lacks else."""
    if {"Conductor", "random workflows"} & {worker.name for worker in pool}:
        yield "other names for workers (Conductor and random workflows are rows of the last table)"
    if s.subset > len(pool):
        yield f"workers (--subset={s.subset}, and the pool has {len(pool)} workers)"
    if not os.access(folder_of(s.out), os.W_OK | os.X_OK):
        yield f"permission to write in {folder_of(s.out)} (--out={s.out})"

    reference = reference_folder(s, start)
    if s.beta and reference and not os.path.exists(os.path.join(reference, "config.json")):
        yield (f"the reference policy for --beta={s.beta} in {reference} (a run without --beta writes none; "
               "name one with --reference=DIR)")

    try:
        problems = load(s.data, "train")
        if any(problem.grader == "unittest" for problem in problems):
            yield "other problems to train on (solutions can cheat the grader unittest: use --test_data)"
        problems += load(s.test_data or s.data, "test", s.test)
        if any(problem.grader in ("code", "unittest") for problem in problems):
            evaluation.check_sandbox(s.sandbox == "partial")
    except (OSError, ValueError) as e:
        yield f"problems ({e})"
    except RuntimeError as e:
        yield f"a sandbox ({e})"

    yield from unset_in(pool)
    if s.report and not importlib.util.find_spec(s.report):
        yield f"{s.report} (pip install {s.report})"


def settings_of(argv: list[str]) -> tuple[Settings, str]:
    """The settings of a command line and the kind of device. Without --preset it is the paper's on two GPUs
    of 80 GB with a process each, else the laptop's."""
    device, size, _ = devices()
    s = Settings()
    configure(s, argv)  # to know the preset
    if not s.preset:
        ranks = int(os.environ.get("WORLD_SIZE", "1"))
        s.preset = "paper" if device == "cuda" and size > 75e9 and ranks > 1 else "laptop"
    if s.preset not in PRESETS:
        raise SystemExit(f"--preset={s.preset}: there are {', '.join(PRESETS)}")
    init_from = s.init_from
    s = Settings(preset=s.preset, **PRESETS[s.preset])
    if init_from:  # Another model gets a warm start where one is asked for.
        s.warm_steps = 0
    words = configure(s, argv)
    if words:
        raise SystemExit(f"train.py takes --key=value settings only, not {words[0]!r}")
    s.out = os.path.normpath(s.out)
    if os.path.islink(s.out):  # to another disk, say, where earlier runs shall be kept too
        s.out = os.path.realpath(s.out)
    return s, device


def main(argv):
    rank = int(os.environ.get("RANK", "0"))
    try:
        s, device = settings_of(argv)
    except SystemExit as e:  # Once is enough for what every rank finds.
        raise SystemExit(e.code if rank == 0 else 1) from None
    alone = {}
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":  # If torchrun is killed, end as well:
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    if "RANK" not in os.environ:  # which torchrun sets
        alone = dict(store=dist.HashStore(), rank=0, world_size=1)
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"  # offloaded weights meet over gloo
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    # A rank may wait for another's slow workers much longer than the ten minutes that NCCL allows.
    dist.init_process_group(backend, timeout=datetime.timedelta(days=1), **alone)
    code = None
    try:
        train(s, device)
    except SystemExit as e:  # on all ranks
        code = e.code
    except KeyboardInterrupt:
        code = f"interrupted; {where_saved(s)}" if dist.get_rank() == 0 else 1
    except (OSError, SafetensorError) as e:
        if not re.search("No space left|[Qq]uota exceeded", str(e)):
            raise
        raise SystemExit(f"train.py: {e}; {where_saved(s)}") from None  # torchrun ends the other ranks.
    dist.destroy_process_group()  # not in a `finally`: after one rank's error NCCL would wait for the others
    if code is not None:
        raise SystemExit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
