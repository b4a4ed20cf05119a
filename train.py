"""Train a Conductor with GRPO.

    torchrun --nproc_per_node=2 train.py                   the laptop world on a CPU, in minutes; on two 80 GB GPUs the paper's run
    torchrun --nproc_per_node=2 train.py --preset=laptop   the laptop world anywhere
    python train.py --preset=small                         Qwen2.5-0.5B-Instruct in the laptop world, on one GPU of 16 GB
    python train.py --preset=paper --dry_run               what a run takes on this machine, and what it lacks

Every setting below is a flag, --key=value. A run writes into --out: metrics.jsonl (a line an iteration), traces/ (every
workflow with what its workers said) and checkpoints/ (checkpoint is the newest). Killed at any moment, it goes on with
--resume; on a CPU and with workers who say the same again, as if nothing had happened.
"""
import collections
import contextlib
import datetime
import glob
import importlib.util
import itertools
import json
import math
import os
import random
import resource
import shutil
import signal
import sys
import time
from dataclasses import asdict, dataclass, fields, replace

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer as BPE, decoders, models, pre_tokenizers, trainers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from tqdm import tqdm

import eval as evaluation
from eval import grade, load, random_completion
from grpo import HEAD_LOGITS, LOSSES, importance, set_advantages, update
from model import Config, Qwen, Tokenizer, compute_dtype, configure, fetch, read_json, write_json, write_tensors
from sample import PREFILL_TOKENS, Completion
from workers import Reply, WorkerError, load_pool
from workflow import READ_AT_ONCE, Prompting, Rollout, Task, Trace, Workflow, ask, conduct, parse, roll_out, sampled


@dataclass
class Settings:
    preset: str = ""  # laptop, small, paper, pairs, pools, recursive (PRESETS); "": paper on two 80 GB GPUs, else laptop
    out: str = "out/laptop"
    seed: int = 1
    init_from: str = ""  # a checkpoint folder or a model of the Hugging Face hub; "" makes a tiny model (warm_steps)
    data: str = "laptop"
    pool: str = "local"
    budget: float = 0.0  # dollars that the workers may cost; before it is passed the run stops. 0: no limit
    replay: str = ""  # a file that keeps the replies to rollouts: a run started again does not pay for them again
    # how the Conductor is asked (workflow.Prompting)
    style: str = "short"  # of the prompt: full (App. E), zero-shot, fine-grained, or short for the tiny model
    examples: str = "ood"  # the few-shot examples of a full prompt: ood, in, mixed
    subtasks: bool = True  # False: the prompt asks for none, and every worker is told to solve the question (App. B.7)
    named: bool = False  # the prompt gives each worker a letter, which stays its own in any subset of the pool
    max_steps: int = 5  # of a workflow
    max_new_tokens: int = 96
    access: bool = True  # False: access lists are forced empty
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
    temperature: float = 1.0
    # the objective (Eqs. 1 and 2) and AdamW, without weight decay
    lr: float = 0.0  # 0: 1e-3 for a model of less than 10 million parameters, else 1e-6
    beta2: float = 0.99
    warmup: float = 0.03  # share of the run over which lr rises; then it falls as a cosine
    clip: float = 0.2
    clip_high: float = 0.0  # another clip above 1; 0: the same
    std: bool = True  # False: advantages are only centred
    loss: str = "sequence"  # mean over tokens and then rollouts; "token", "constant": see grpo.update
    importance: float = 0.0  # cap of the weights that undo the difference between sampler and trainer; 0: no weights
    epochs: int = 1  # over an iteration's rollouts
    beta: float = 0.2  # weight of the KL to a reference policy; it fades to 0 over the run
    reference: str = ""  # the checkpoint folder of that policy; "": where the run starts
    minibatches: int = 4  # optimizer steps an iteration, each on its share of every group
    # the device
    dtype: str = ""  # of computation, bf16 or fp32; "": fp32 below 10 million parameters, else what the device is made for
    token_budget: int = 8192  # of a micro-batch, beside a prompt
    recompute: bool = False  # layers keep only their inputs for the backward pass: less memory, a third more work
    offload: bool = False  # weights, gradients and Adam's state of the trainer are in the CPU's memory
    # the tiny model, and the warm start that teaches it the format
    width: int = 128
    layers: int = 2
    warm_steps: int = 400
    warm_batch: int = 32
    warm_lr: float = 6e-3
    warm_second: float = 0.0  # share of its examples that are second rounds
    # what is measured and kept
    test: int = 224  # held-out problems, at the end
    test_data: str = ""  # where they are from; "": the test split of data
    eval_every: int = 40  # iterations between measurements on the first eval_problems of them; 0: none
    eval_problems: int = 64
    report: str = ""  # tensorboard or wandb also gets the metrics, if it is installed
    save_every: int = 40  # iterations between checkpoints
    keep: int = 2  # of the newest checkpoints; the best is kept too
    resume: bool = False  # go on from the newest checkpoint in out, if there is one
    dry_run: bool = False  # say what the run would take and what it lacks, and do nothing


# The two extensions live in a laptop world with two workers for each trade, and start from "pairs". Their KL is to the
# policy that "pairs" itself started from: that still tries every worker and length, where the trained one hardly explores.
PAIRS = dict(pool="local:pairs", named=True, warm_steps=1000, warm_second=0.2)
TUNE = dict(PAIRS, init_from="out/pairs/checkpoint", reference="out/pairs/reference", iterations=160, lr=3e-4, beta=0.05)
# What suits a pretrained model: the paper's numbers (App. A.1) as far as they fit.
PRETRAINED = dict(style="full", iterations=200, beta2=0.999, beta=0.0, minibatches=1, recompute=True)
PRESETS = {
    "laptop": {},
    "small": dict(PRETRAINED, out="out/small", init_from="Qwen/Qwen2.5-0.5B-Instruct", questions=8, rollouts=32,
                  max_new_tokens=384, lr=2e-6, save_every=20, eval_every=20),
    "paper": dict(PRETRAINED, out="out/paper", init_from="Qwen/Qwen2.5-7B", data="paper", pool="paper", questions=4,
                  rollouts=64, max_new_tokens=1024, lr=1e-6, save_every=10, eval_every=50),
    "pairs": dict(PAIRS, out="out/pairs", iterations=540),
    "pools": dict(TUNE, out="out/pools", subset=4),
    "recursive": dict(TUNE, out="out/recursive", pool="local:tired", recursion=True),
}
TINY = 10_000_000  # parameters below which a model is none that was pretrained


# -------------------------------------------------------------------------------------------------------------
# One iteration: first rounds, second rounds, reward, update


def first_rounds(s: Settings, problems, pool, iteration: int) -> list[Task]:
    """An iteration's questions, each with the whole pool or a random subset of it (§3.2), of a random size."""
    tasks = []
    for i in range(iteration * s.questions, (iteration + 1) * s.questions):
        problem = problems[i % len(problems)]
        rng = random.Random(f"{s.seed} {i}")
        size = rng.randint(s.subset or len(pool), len(pool))
        chosen = sorted(rng.sample(range(len(pool)), size))
        workers = [pool[worker] for worker in chosen]
        tasks.append(Task(problem.question, workers, problem=problem, name=f"{s.seed}/{i}"))
    return tasks


def second_rounds(s: Settings, groups: list[list[Rollout]], iteration: int) -> list[Task]:
    """Half of the questions again, in view of the answer of one first round, which is drawn by chance (§3.2)."""
    tasks = []
    for i, group in enumerate(groups):
        answered = [r for r in group if r.trace and r.right is not None]
        if (i // 2 + iteration) % 2 == 0 and answered:
            shown = random.Random(f"{s.seed} {iteration} {i}").choice(answered)
            tasks.append(replace(shown.task, previous=shown.trace))
    return tasks


def roll_out_on_all_ranks(sampler, tokenizer, tasks: list[Task], s: Settings, seed: int, clock, bar) -> list:
    """Roll out every task s.rollouts times, of which each rank does a share, and gather: all ranks return all
    rollouts, as [task][rollout]. They are the same on any number of ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    first, end = s.rollouts * rank // world, s.rollouts * (rank + 1) // world
    sample = sampled(sampler, tokenizer, prompting(s), s.temperature, seed)

    def write(*chats):
        sample(*chats)
        clock.lap("sampling")

    mine = [[] for _ in tasks]
    if tasks and end > first:
        mine = roll_out(write, tasks, end - first, prompting(s), grade, ablation(s), first, lambda r: bar.update())
    for rollout in itertools.chain(*mine):
        rollout.task = None  # it holds connections, which cannot be sent
    groups = [[] for _ in tasks]
    for part in everyone([mine]):
        for task, group, rollouts in zip(tasks, groups, part):
            group += [replace(rollout, task=task) for rollout in rollouts]
    clock.lap("workers")
    return groups


def prompting(s: Settings) -> Prompting:
    return Prompting(**{field.name: getattr(s, field.name) for field in fields(Prompting)})


def ablation(s: Settings):
    """What --access=False does to a workflow before it runs; None if nothing."""
    def blind(workflow):
        steps = [replace(step, access=[], sees_all=False) for step in workflow.steps]
        return replace(workflow, steps=steps)
    return None if s.access else blind


def reward(rollout: Rollout, s: Settings) -> float | None:
    """§3.1; a first round, where there are second ones, counts a quarter (§3.2). None: a worker was lost."""
    if rollout.right is None:
        return None
    value = s.no_workflow
    if rollout.trace:
        value = s.right if rollout.right else s.wrong
    if s.recursion and rollout.task.previous is None:
        value *= 0.25
    return value


def learn(model, optimizer, reference, groups: list[list[Rollout]], s: Settings, iteration: int, n_ids: int) -> list[dict]:
    """Eq. 1 in s.minibatches steps, each on its share of every group. Returns what `update` says of each step."""
    lr = s.lr * schedule(iteration, s.iterations, s.warmup)
    set_lr(optimizer, lr)
    beta = s.beta * (1 - iteration / s.iterations)
    how = dict(temperature=s.temperature, n_ids=n_ids, token_budget=s.token_budget)
    known = [[r for r in group if r.reward is not None] for group in groups]  # the others are lost, not bad
    gap = None
    if s.importance:
        gap = importance(model, my_share(itertools.chain(*known)), s.importance, **how)
    steps = []
    for _ in range(s.epochs):
        for m in range(s.minibatches):
            minibatch = my_share(itertools.chain(*(group[m::s.minibatches] for group in known)))
            steps.append(update(model, optimizer, minibatch, s.clip, beta, reference, clip_high=s.clip_high, loss=s.loss,
                                max_new_tokens=s.max_new_tokens, **how))
    if s.importance:
        steps[0]["gap"] = gap
    return [{**step, "lr": lr} for step in steps]


def my_share(rollouts) -> list[Rollout]:
    """This rank's part of some rollouts: neighbours, which share prompts, with about as many tokens as other ranks'."""
    rollouts = list(rollouts)
    ends = np.cumsum([len(r.completion.tokens) for r in rollouts])
    world = dist.get_world_size()
    return [r for r, end in zip(rollouts, ends) if (end - 1) * world // ends[-1] == dist.get_rank()]


def schedule(step: int, steps: int, warmup: float) -> float:
    """Linear warm-up over a share of the steps, then a cosine to 0 (App. A.1)."""
    warm = max(1, round(warmup * steps))
    if step < warm:
        return (step + 1) / warm
    return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


# -------------------------------------------------------------------------------------------------------------
# The run


def train(s: Settings, device: str):
    """The whole run, on every rank."""
    began = time.perf_counter()
    torch.manual_seed(s.seed)
    done = on_rank0(lambda: checkpoints(s.out)[-1:]) if s.resume else []
    start = done[0] if done else s.init_from  # "": from nothing
    first = int(os.path.basename(start)) if done else 0
    url, budget, config = on_rank0(lambda: preflight(s, start, device))
    if s.dry_run:
        return say("the run lacks nothing; without --dry_run it begins")
    choose_by_size(s, config)
    dtype = compute_dtype(device, s.dtype)
    pool = load_pool(s.pool, url, s.replay, budget, dist.get_world_size())  # one server of specialists for all ranks
    problems, test = load(s.data, "train"), load(s.test_data or s.data, "test", s.test)
    model, tokenizer, reference = load_models(s, start, problems, pool, device, dtype)
    # What was read may be of an earlier run in this very place.
    on_rank0(lambda: rewind(s, first) if done else make_room(s))
    say(f"{count(config):,} parameters on {dist.get_world_size()} x {device} in {str(dtype)[6:]}, lr {s.lr:g}, "
        f"{len(problems):,} problems, {len(pool)} workers: {', '.join(w.name for w in pool)}")
    if not start:
        warm_start(model, tokenizer, problems, pool, s)
        say(f"warm start: {s.warm_steps} steps of the format, {time.perf_counter() - began:.0f} s since the start")
    if s.beta and reference is None:
        reference = gather(model, device, dtype)
        save_for_use(s, os.path.join(s.out, "reference"), model, tokenizer, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=s.lr, betas=(0.9, s.beta2), weight_decay=0.0, fused=True)
    dry_step(model, optimizer, reference, s, len(tokenizer), device)
    if first:
        restore(model, optimizer, start)
    report = reporter(s)
    stopping = on_signals()
    share = s.questions * s.rollouts * (3 if s.recursion else 2) // 2 // dist.get_world_size()
    bar = tqdm(total=s.iterations * share, initial=first * share, desc="rollouts of rank 0", disable=quiet())

    in_a_row = 0  # steps skipped

    for iteration in range(first, s.iterations):
        clock = Clock()
        seed = s.seed * 1_000_000 + iteration
        sampler = gather(model, device, dtype)
        tasks = first_rounds(s, problems, pool, iteration)
        groups = roll_out_on_all_ranks(sampler, tokenizer, tasks, s, seed, clock, bar)
        if s.recursion:
            tasks = second_rounds(s, groups, iteration)
            groups += roll_out_on_all_ranks(sampler, tokenizer, tasks, s, seed + 500_000, clock, bar)
        del sampler  # it and the gradients would not fit beside one another
        for rollout in itertools.chain(*groups):
            rollout.reward = reward(rollout, s)                                                  # §3.1
        set_advantages(groups, s.std)                                                            # Eq. 2
        steps = learn(model, optimizer, reference, groups, s, iteration, len(tokenizer))         # Eq. 1
        clock.lap("training")
        held_out = None
        if s.eval_every and (iteration + 1) % s.eval_every == 0:
            traces = answer(gather(model, device, dtype), tokenizer, test[:s.eval_problems], pool, s)
            held_out = evaluation.accuracies(test[:s.eval_problems], traces).get("all")
            clock.lap("evaluation")
        write_traces(s, iteration, groups)
        log(s, metrics(iteration, groups, steps, clock.seconds, held_out, config, device), report)

        for step in steps:
            in_a_row = in_a_row + 1 if step["skipped"] else 0
            if in_a_row == 3:
                leave(f"three steps in a row had a gradient that is not finite; {newest(s)}")
        if pool[0].budget and pool[0].budget.refused:
            stopping.append("the budget is spent")
        reasons = everyone(stopping)  # of any rank: they leave together
        if reasons or (iteration + 1) % s.save_every == 0 or iteration + 1 == s.iterations:
            save(s, iteration + 1, model, tokenizer, optimizer, dtype)
            reasons = everyone(stopping)  # a signal may have come meanwhile
        if reasons:
            bill(pool)
            leave(f"{reasons[0]}: stopped after iteration {iteration + 1}; {newest(s)}")

    bar.close()
    bill(pool)
    say(f"trained for {time.perf_counter() - began:.0f} s; {newest(s)}")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sampler = gather(model, device, dtype)
    del model, optimizer, reference  # the evaluation shall have their memory
    finish(s, answer(sampler, tokenizer, test, pool, s), test, pool)
    say(f"{time.perf_counter() - began:.0f} s from start to end. Next: python workflow.py \"{test[-1].question}\" "
        f"--checkpoint={s.out}/checkpoint --pool={s.pool}")


def shard(model: Qwen, s: Settings, device: str, dtype: torch.dtype) -> Qwen:
    """FSDP2: fp32 master weights, gradients and Adam's state in equal parts on all ranks; computation in dtype."""
    mixed = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    offload = CPUOffloadPolicy(pin_memory=device == "cuda") if s.offload else OffloadPolicy()
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    model.recompute = s.recompute
    model.compute = torch.device(device) if s.offload else None
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=mixed, offload_policy=offload)
    return fully_shard(model, mesh=mesh, mp_policy=mixed, offload_policy=offload)


@torch.no_grad()
def gather(model: Qwen, device: str, dtype: torch.dtype) -> Qwen:
    """A whole copy of the sharded model in the dtype of computation, to sample with; every rank gets one."""
    with torch.device("meta"):
        whole = Qwen(model.config)
    state = {}
    for name, p in model.named_parameters():
        state[name] = p.to(device, dtype, copy=True).full_tensor()
    whole.load_state_dict(state, assign=True, strict=False)
    if model.config.tie_word_embeddings:
        whole.lm_head.weight = whole.model.embed_tokens.weight
    return whole


def answer(sampler: Qwen, tokenizer, problems, pool, s: Settings) -> list[Trace | None]:
    """The greedy Conductor's trace for each problem, None where it wrote no workflow. The ranks take turns at the
    problems, and all return all traces."""
    rank, world = dist.get_rank(), dist.get_world_size()
    tasks = [Task(p.question, pool, problem=p, name=f"test/{p.id}") for p in problems[rank::world]]
    write = sampled(sampler, tokenizer, prompting(s), 0.0)
    rollouts = conduct(write, tasks, int(s.recursion), prompting(s), tries=1, grade=grade, edit=ablation(s))
    shares = everyone([[r.trace for r in rollouts]])
    return [shares[i % world][i // world] for i in range(len(problems))]


def finish(s: Settings, traces: list[Trace | None], test, pool):
    """The final table on held-out problems, beside every worker and random workflows; what was learned for each kind."""
    if dist.get_rank():
        return
    systems = {"Conductor": traces, **evaluation.baselines(test, pool)}
    say("\n" + evaluation.table(test, systems))
    say("\n" + evaluation.learned(test, [trace and trace.rounds()[0] for trace in traces]))
    errors = [trace.error for trace in traces if trace and trace.error]
    if errors:
        say(f"{len(errors)} of the {len(test)} problems are left out of the Conductor's row: {errors[0]}")
    shares = {name: evaluation.accuracies(test, answered) for name, answered in systems.items()}
    write_json(os.path.join(s.out, "test.json"), shares)


def metrics(iteration: int, groups, steps: list[dict], seconds: dict, held_out, config: Config, device: str) -> dict:
    """A line of metrics.jsonl. Means are over first rounds; `again` is about second ones. None is unknown."""
    rollouts = [r for group in groups for r in group]
    first = [r for r in rollouts if r.task.previous is None]
    known = [r for r in first if r.right is not None]
    ran = [r for r in first if r.trace]
    second = [r for r in rollouts if r.task.previous is not None and r.right is not None]
    replies = [reply for r in rollouts if r.trace for reply in r.trace.replies if reply]
    costs = [reply.cost for reply in replies]
    names = collections.Counter(name for r in ran for name in r.trace.workers)
    lengths = [len(r.completion.tokens) for r in rollouts]
    flat = [len({r.reward for r in group if r.reward is not None}) < 2 for group in groups]

    def steps_of(rollouts):
        return mean(len(r.trace.workflow.steps) for r in rollouts)

    m = {
        "iteration": iteration,
        "reward": mean(r.reward for r in known),
        "accuracy": mean(r.right for r in known),
        "held_out": held_out,  # accuracy on problems that are not trained on
        "parsed": mean(r.trace is not None for r in first),
        "flat": mean(flat),  # groups without spread, which teach nothing
        "lost": sum(r.right is None for r in rollouts),
        "steps": steps_of(ran),
        "calls": len(replies),
        "cost": None if None in costs else sum(costs),  # dollars
        "tokens": mean(lengths),
        "longest": max(lengths),
        "cut": mean(not r.completion.finished for r in rollouts),  # share that reached max_new_tokens
        "lr": steps[0]["lr"],
        "gap": steps[0]["gap"],
        "skipped": sum(step["skipped"] for step in steps),
    }
    for key in ("approx_kl", "clipfrac", "kl", "entropy", "grad_norm"):
        m[key] = mean(step[key] for step in steps)
    m["by_kind"], m["steps_by_kind"] = {}, {}
    for kind in dict.fromkeys(r.task.problem.kind for r in first):
        m["by_kind"][kind] = mean(r.right for r in known if r.task.problem.kind == kind)
        m["steps_by_kind"][kind] = steps_of(r for r in ran if r.task.problem.kind == kind)
    m["workers"] = {name: names[name] / names.total() for name in sorted(names)}  # shares of the steps
    if second:
        right = [is_kept(r) for r in second if r.task.previous.right]
        wrong = [is_kept(r) for r in second if not r.task.previous.right]
        m["again"] = {"before": len(right) / len(second), "accuracy": mean(r.right for r in second),
                      "parsed": mean(r.trace is not None for r in second),
                      "kept_right": mean(right), "kept_wrong": mean(wrong)}
    m["seconds"] = seconds
    m["tokens_per_second"] = sum(lengths) / sum(seconds.values())
    m["mfu"] = utilisation(groups, seconds["training"], config, device)
    m["memory"] = peak_memory(device) / 2**30  # GiB of rank 0
    return m


def mean(values) -> float:
    values = list(values)
    return sum(values) / max(len(values), 1)


def is_kept(rollout: Rollout) -> bool:
    """The second round is three empty lists, so that the answer of the first is kept."""
    return rollout.trace is not None and not rollout.trace.workflow.steps


def log(s: Settings, m: dict, report):
    """Write a line of metrics to the screen, to metrics.jsonl and to whoever else gets them."""
    if dist.get_rank():
        return
    held_out = "" if m["held_out"] is None else f" held-out {m['held_out']:.3f}"
    mfu = "" if m["mfu"] is None else f" MFU {m['mfu']:.2f}"
    say(f"{m['iteration'] + 1:4d}/{s.iterations} reward {m['reward']:.3f} accuracy {m['accuracy']:.3f}{held_out} "
        f"parsed {m['parsed']:.3f} steps {m['steps']:.2f} calls {m['calls']} lost {m['lost']} tokens "
        f"{m['tokens']:.0f}/{m['longest']} cut {m['cut']:.2f} lr {m['lr']:.0e} |Δlogp| {m['gap']:.0e} "
        f"grad {m['grad_norm']:.2f} skipped {m['skipped']} entropy {m['entropy']:.2f} {m['memory']:.1f} GiB{mfu} "
        f"{m['tokens_per_second']:.0f} tokens/s, s: "
        + " ".join(f"{part} {seconds:.1f}" for part, seconds in m["seconds"].items()))
    if "again" in m:
        say(f"{'':9}second rounds: " + " ".join(f"{key} {value:.3f}" for key, value in m["again"].items()))
    for key, value in m.items():
        if isinstance(value, float) and not math.isfinite(value):
            m[key] = None  # JSON knows no NaN
    with open(os.path.join(s.out, "metrics.jsonl"), "a") as f:
        f.write(json.dumps(m) + "\n")
    report({key: value for key, value in m.items() if isinstance(value, int | float)})


# -------------------------------------------------------------------------------------------------------------
# The tiny Conductor: a tokenizer and a model made on the spot, and a warm start that teaches the format only


def tiny_tokenizer(texts: list[str]) -> Tokenizer:
    """A byte-level BPE like Qwen2.5's, of 900 tokens. Its pieces differ: a quoted subtask, a list's opening, an
    empty or "all" access list and three empty lists are one token each, so that choosing one is one decision."""
    pieces = (r'(?:\w+ = \[\]\n?){3}', r'\p{L}+\n', r'\n\w+ = \[', r',? ?"[^"\d\n]*"', r' ?\["all"\],?', r' ?\[\],?',
              r' ?\p{L}+', r' ?\d', r' ?[^\s\p{L}\d]+', r'\s+')
    bpe = BPE(models.BPE())
    split = pre_tokenizers.Split(Regex("|".join(pieces)), "isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([split, as_bytes])
    bpe.decoder = decoders.ByteLevel()
    names = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    special = [AddedToken(name, special=True, normalized=False) for name in names]
    bpe.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=900, special_tokens=special, show_progress=False,
                                                      initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return Tokenizer(bpe)


def random_lesson(problem, rng: random.Random, pool, s: Settings) -> tuple[list[dict], str]:
    """A chat and a completion in the right format. Where workers are named, the pool is a random subset. A share
    `warm_second` are second rounds: the chat holds an earlier workflow and some response, and the completion is by
    chance a new workflow or three empty lists."""
    if s.named:
        size = rng.randint(min(2, len(pool)), len(pool))
        pool = [pool[i] for i in sorted(rng.sample(range(len(pool)), size))]
    names = "".join(w.letter for w in pool) if s.named else ""
    completion = random_completion(problem.question, rng, len(pool), s.max_steps, names, s.subtasks)
    previous = None
    if rng.random() < s.warm_second:
        answers = (problem.answer, problem.question, "I have lost the thread.", "I find nothing here to work on.")
        reply = Reply(rng.choice(answers), 0, 0, 0.0, 0.0)
        workflow = parse(completion, len(pool), s.max_steps)
        previous = Trace(problem.question, workflow, [], [reply])
        completion = random_completion(problem.question, rng, len(pool), s.max_steps, names, s.subtasks)
        completion = rng.choice((completion, Workflow([]).text()))
    return ask(Task(problem.question, pool, previous), prompting(s)), completion


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
        if p.dim() > 1:  # wider than Qwen's 0.02: a model this narrow then learns to copy within a hundred steps
            torch.nn.init.normal_(p, std=0.1 if "embed" in name else 0.06)
    return model, tokenizer


def warm_start(model, tokenizer, problems, pool, s: Settings):
    """Supervised learning of random workflows in the right format. The question's own text enters the loss a
    little, so that the model learns to tell questions apart; what a good workflow is, nothing here says.

    The logits are divided by 1.5: at temperature 1 the model is then sharper than its data where the format leaves
    no choice, and still uniform where the data are."""
    rank, world = dist.get_rank(), dist.get_world_size()
    rng = random.Random(s.seed)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.0, fused=True)
    for step in tqdm(range(s.warm_steps), "warm start: the format", disable=quiet(), leave=False):
        rows = []
        for problem in rng.choices(problems, k=s.warm_batch):
            chat, completion = random_lesson(problem, rng, pool, s)
            prompt, written = tokenizer.chat(chat), tokenizer.encode(completion) + [tokenizer.eos_id]
            rows.append((prompt + written, [0.1] * len(prompt) + [1.0] * len(written)))
        total = sum(sum(weights) for _, weights in rows)
        rows = rows[rank::world]
        T = max(len(row) for row, _ in rows)
        ids = torch.tensor([row + [0] * (T - len(row)) for row, _ in rows], device=model.device)  # (B, T)
        weight = torch.tensor([w + [0.0] * (T - len(w)) for _, w in rows], device=model.device)   # (B, T)
        logits = model(ids)[:, :-1].transpose(1, 2) / 1.5                                         # (B, V, T-1)
        loss = F.cross_entropy(logits, ids[:, 1:], reduction="none")                              # (B, T-1)
        ((loss * weight[:, 1:]).sum() * world / total).backward()  # FSDP averages over ranks
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        set_lr(optimizer, s.warm_lr * schedule(step, s.warm_steps, 0.05))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


# -------------------------------------------------------------------------------------------------------------
# Appendix: ranks, signals, time and memory


def on_rank0(job):
    """Run `job` on rank 0 and return its result on every rank. What it raises ends all ranks, with one message."""
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


def everyone(mine: list) -> list:
    """The concatenation of every rank's list, on every rank."""
    lists = [None] * dist.get_world_size()
    dist.all_gather_object(lists, mine)
    return [item for items in lists for item in items]


def leave(why: str):
    """End the program on all ranks, which all call this, with a message on one."""
    raise SystemExit(why if dist.get_rank() == 0 else 1)


def say(line: str):
    if dist.get_rank() == 0:
        tqdm.write(line)


def quiet():
    """tqdm's `disable`: rank 0 alone shows a bar, and only in a terminal."""
    return True if dist.get_rank() else None


def on_signals() -> list:
    """From here on Ctrl-C and SIGTERM only append to the list that is returned, and the loop stops after its
    iteration, with a checkpoint. torchrun sends the signal a second time."""
    stopping = []

    def stop(*_):
        if not stopping and dist.get_rank() == 0:
            os.write(2, b"\nstopping after this iteration ...\n")  # print may be what was interrupted
        stopping.append("interrupted")

    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    return stopping


class Clock:
    """The seconds of an iteration, by part."""

    def __init__(self):
        self.seconds = {}
        self.last = time.perf_counter()

    def lap(self, part: str):
        """What has passed since the last lap was spent on `part`."""
        now = time.perf_counter()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self.last
        self.last = now


def set_lr(optimizer, lr: float):
    for group in optimizer.param_groups:
        group["lr"] = lr


def dry_step(model, optimizer, reference, s: Settings, n_ids: int, device: str):
    """A step as large as the largest, with a learning rate of 0: Adam's state and the peak of memory are there before
    anything is paid. After it weights and state are what they were: the state of no step is zeros."""
    size = s.token_budget if device == "cuda" else 64
    length = min(s.max_new_tokens, size)
    rollouts = []
    for i in range(max(1, size // length)):
        completion = Completion([i % n_ids] * length, [0.0] * length, True)
        rollouts.append(Rollout(None, "", [0], completion, advantage=1.0))
    set_lr(optimizer, 0.0)
    stats = update(model, optimizer, rollouts, beta=s.beta, reference=reference, n_ids=n_ids, token_budget=size)
    if stats["skipped"]:
        leave("the gradient of a first step is not finite: the weights to start from are damaged")
    for state in optimizer.state.values():
        for tensor in state.values():
            tensor.zero_()


def peak_memory(device: str) -> int:
    """The most bytes that this rank has had: of the GPU's memory, on a CPU of the machine's."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def reporter(s: Settings):
    """The function that gets the numbers of each line of metrics: TensorBoard's or wandb's, if --report names it."""
    if s.report == "tensorboard" and dist.get_rank() == 0:
        from torch.utils.tensorboard import SummaryWriter
        writer = SummaryWriter(os.path.join(s.out, "tensorboard"))

        def report(numbers):
            for key, value in numbers.items():
                writer.add_scalar(key, value, numbers["iteration"])
            writer.flush()
        return report
    if s.report == "wandb" and dist.get_rank() == 0:
        import wandb
        return wandb.init(project="conductor", config=asdict(s), dir=s.out).log
    return lambda numbers: None


def bill(pool):
    """Say what all ranks' calls have cost."""
    spent = everyone([(w.calls, w.spent, w.unpriced) for w in pool])
    calls, dollars, unknown = (sum(column) for column in zip(*spent))
    text = f"{calls:,} calls for ${dollars:.2f}"
    if unknown:
        text += f", and {unknown:,} of them at an unknown price"
    say(text)


# -------------------------------------------------------------------------------------------------------------
# Appendix: checkpoints. What is random follows from the seed and the iteration: weights and Adam's moments are all
# that resuming needs.

MOMENTS = ("exp_avg", "exp_avg_sq")


def load_models(s: Settings, start: str, problems, pool, device: str, dtype):
    """The model in its shards, its tokenizer, and the reference policy if one is named."""
    reference, named = None, reference_folder(s, start)
    try:
        if start:
            on_rank0(lambda: fetch(start, "*.json", "*.safetensors"))  # one rank downloads
            tokenizer = Tokenizer.from_pretrained(start)
            place = "cpu" if s.offload else device
            model = Qwen.from_pretrained(start, device=place, shard=lambda model: shard(model, s, device, dtype))
        else:
            model, tokenizer = tiny_conductor(s, problems, pool)
            shard(model, s, device, dtype)
        if s.beta and named:
            reference = Qwen.from_pretrained(named, dtype, device)
    except (OSError, ValueError) as e:
        leave(f"train.py: {e}")
    return model, tokenizer, reference


def reference_folder(s: Settings, start: str) -> str:
    """Where the reference policy is read from: what is named, or what the run to go on with wrote; "" if neither."""
    resumed = os.path.dirname(start) == os.path.join(s.out, "checkpoints")
    return s.reference or (os.path.join(s.out, "reference") if resumed else "")


def save(s: Settings, iteration: int, model, tokenizer, optimizer, dtype):
    """A checkpoint: Hugging Face's folder, for use, and in state/ the fp32 weights and moments, for resuming, of
    which each rank writes its own part. It is written beside and renamed. Older ones are tidied away."""
    rank, world = dist.get_rank(), dist.get_world_size()
    folder = os.path.join(s.out, "checkpoints", f"{iteration:05d}")
    new = folder + ".tmp"
    on_rank0(lambda: shutil.rmtree(new, ignore_errors=True))  # a killed run may have left one
    os.makedirs(os.path.join(new, "state"), exist_ok=True)
    part = {}
    for name, p in model.named_parameters():
        part[name] = p.detach()
        for moment in MOMENTS:
            part[f"{moment} {name}"] = optimizer.state[p][moment]
    part = {name: tensor.to_local().cpu().contiguous() for name, tensor in part.items()}
    save_file(part, os.path.join(new, "state", f"{rank:05d}-of-{world:05d}.safetensors"))
    del part
    save_for_use(s, new, model, tokenizer, dtype)
    dist.barrier()  # all parts are written
    if rank == 0:
        steps = int(next(iter(optimizer.state.values()))["step"])
        write_json(os.path.join(new, "training.json"), {"score": score(s), "optimizer_steps": steps})
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(new, folder)
        tidy(s)
    dist.barrier()


def save_for_use(s: Settings, folder: str, model, tokenizer, dtype):
    """Weights in the dtype of computation, tokenizer and how to ask, in Hugging Face's layout. Every rank takes part
    in gathering; rank 0 writes."""
    tensors = ((name, p.detach().to(dtype).full_tensor()) for name, p in model.named_parameters())
    if dist.get_rank() == 0:
        write_tensors(folder, model.config, tensors)
        tokenizer.save_pretrained(folder)
        write_json(os.path.join(folder, "conductor.json"), asdict(prompting(s)))  # for workflow.py and eval.py
    else:
        collections.deque(tensors, maxlen=0)


def score(s: Settings) -> float:
    """By which the best checkpoint is kept: the last held-out accuracy, or without any the mean accuracy in training
    since the checkpoint before."""
    with open(os.path.join(s.out, "metrics.jsonl")) as f:
        lines = [json.loads(line) for line in collections.deque(f, maxlen=max(s.save_every, s.eval_every))]
    held_out = [line["held_out"] for line in lines if line["held_out"] is not None]
    return held_out[-1] if held_out else mean(line["accuracy"] for line in lines[-s.save_every:])


@torch.no_grad()
def restore(model, optimizer, folder: str):
    """Weights and Adam's moments as `save` left them, also on another number of ranks: FSDP cuts a tensor into rows,
    and each rank reads its own rows from whatever parts hold them. ValueError if a part is missing."""
    files = sorted(glob.glob(os.path.join(glob.escape(folder), "state", "*.safetensors")))
    if not files or len(files) != int(files[0].removesuffix(".safetensors")[-5:]):
        raise ValueError(f"{folder}/state is not whole: it holds {len(files)} parts; remove this checkpoint to go on from an older one")
    parts = [safe_open(file, framework="pt") for file in files]
    steps = read_json(os.path.join(folder, "training.json"))["optimizer_steps"]
    rank, world = dist.get_rank(), dist.get_world_size()
    for name, p in model.named_parameters():
        state = optimizer.state[p]
        state["step"].fill_(steps)
        rows = -(-p.shape[0] // world)  # of each rank but the last ones, as torch.chunk cuts
        for key, tensor in ((name, p), *((f"{moment} {name}", state[moment]) for moment in MOMENTS)):
            mine = tensor.to_local()
            begin = 0  # of a part, in the whole tensor
            for part in parts:
                held = part.get_slice(key)
                end = begin + held.get_shape()[0]
                a, b = max(begin, rank * rows), min(end, rank * rows + len(mine))
                if a < b:
                    mine[a - rank * rows:b - rank * rows] = held[a - begin:b - begin].to(mine.device)
                begin = end


def checkpoints(out: str) -> list[str]:
    """The whole checkpoints of a run, oldest first: those being written have another name."""
    folders = glob.glob(os.path.join(glob.escape(out), "checkpoints", "*"))
    return sorted(folder for folder in folders if os.path.basename(folder).isdigit())


def newest(s: Settings) -> str:
    link = os.path.join(s.out, "checkpoint")
    return f"the checkpoint is in {link}" if os.path.exists(link) else "nothing had been saved"


def tidy(s: Settings):
    """Point out/checkpoint at the newest, and drop all but the newest few and the best."""
    link, folders = os.path.join(s.out, "checkpoint"), checkpoints(s.out)
    with contextlib.suppress(FileNotFoundError):  # a kill can leave one
        os.remove(link + ".tmp")
    os.symlink(os.path.join("checkpoints", os.path.basename(folders[-1])), link + ".tmp")
    os.replace(link + ".tmp", link)
    best = max(folders, key=lambda folder: read_json(os.path.join(folder, "training.json"))["score"])
    for folder in set(folders) - {*folders[-s.keep:], best}:
        shutil.rmtree(folder + ".old", ignore_errors=True)
        os.replace(folder, folder + ".old")  # what a kill leaves half removed has no number for a name
    for left in glob.glob(os.path.join(glob.escape(s.out), "checkpoints", "*.*")):  # by this or by a kill
        shutil.rmtree(left)


def make_room(s: Settings):
    """An earlier run in --out is kept, under the next free number."""
    if os.path.exists(os.path.join(s.out, "metrics.jsonl")):
        names = (f"{s.out}.{i}" for i in itertools.count(1))
        kept = next(name for name in names if not os.path.exists(name))
        os.rename(s.out, kept)
        say(f"the earlier run in {s.out} is now {kept}")
    os.makedirs(os.path.join(s.out, "traces"), exist_ok=True)
    write_json(os.path.join(s.out, "settings.json"), asdict(s))


def rewind(s: Settings, iteration: int):
    """Make the run's files what they were after so many iterations, and say which settings are new."""
    old = read_json(os.path.join(s.out, "settings.json"))
    changed = []
    for key, value in asdict(s).items():
        if value != old.get(key) and key != "resume":
            changed.append(f"{key} {old.get(key)} -> {value}")
    said = f"going on in {s.out} after iteration {iteration}"
    say(f"{said}, with changed settings: {', '.join(changed)}" if changed else said)
    file = os.path.join(s.out, "metrics.jsonl")
    with open(file) as f, open(file + ".tmp", "w") as new:
        new.writelines(itertools.islice(f, iteration))
    os.replace(file + ".tmp", file)
    for trace in glob.glob(os.path.join(glob.escape(s.out), "traces", "*")):
        if int(os.path.basename(trace)[:5]) >= iteration:
            os.remove(trace)
    write_json(os.path.join(s.out, "settings.json"), asdict(s))


def write_traces(s: Settings, iteration: int, groups):
    """traces/ITERATION.jsonl: every rollout with what its workers said."""
    if dist.get_rank():
        return
    file = os.path.join(s.out, "traces", f"{iteration:05d}.jsonl")
    with open(file + ".tmp", "w") as f:
        for r in itertools.chain(*groups):
            problem = r.task.problem
            told = {"trace": r.trace.to_json()} if r.trace else {"text": r.text}
            f.write(json.dumps({"problem": problem.id, "answer": problem.answer, "reward": r.reward, **told}) + "\n")
    os.replace(file + ".tmp", file)


# -------------------------------------------------------------------------------------------------------------
# Appendix: what a run takes

# Dense bf16 TFLOP/s and GB/s of memory, from the vendors' data sheets. What another device can do is unknown.
PEAKS = {"H200": (989, 4800), "H100 PCIe": (756, 2000), "H100": (989, 3350), "A100": (312, 1555), "L40S": (362, 864),
         "RTX 4090": (165, 1008), "RTX 3090": (71, 936)}
GiB = 1 << 30
RESERVE = {"cuda": 3 * GiB, "cpu": GiB // 2}  # beside what is estimated: context, graphs, fragments


def devices() -> tuple[str, int, str]:
    """The kind of device that this process and its neighbours compute on, the bytes that one has for each (of a
    CPU's memory a share), and its name."""
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # here, as torchrun says
    found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    if found and len(found) >= processes:
        return "cuda", min(gpu.total_memory for gpu in found[:processes]), found[0].name
    return "cpu", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // processes, "cpu"


def peaks() -> tuple[float, float] | None:
    """FLOP/s and bytes/s of the device; None if they are unknown."""
    name = devices()[2]
    for known, (tflops, gigabytes) in PEAKS.items():
        if known in name:
            return tflops * 1e12, gigabytes * 1e9
    return None


def sizes(config: Config) -> tuple[int, int]:
    """The parameters of a layer, and of all that is no layer."""
    C, kv = config.hidden_size, config.num_key_value_heads * config.head_dim
    attention = 2 * C * C + C + 2 * (C * kv + kv)
    layer = attention + 3 * C * config.intermediate_size + 2 * C
    tables = 1 if config.tie_word_embeddings else 2
    return layer, tables * config.vocab_size * C + C


def count(config: Config) -> int:
    """All parameters."""
    layer, others = sizes(config)
    return config.num_hidden_layers * layer + others


def flops_a_token(config: Config, context: float) -> tuple[float, float]:
    """FLOPs of a forward pass for one token: of the layers, where it attends to `context` tokens, and of the head."""
    layer = 2 * sizes(config)[0] + 4 * config.hidden_size * context
    return config.num_hidden_layers * layer, 2 * config.hidden_size * config.vocab_size


def utilisation(groups, seconds: float, config: Config, device: str) -> float | None:
    """MFU of an update: the FLOPs of forward and backward pass, each prompt once, over the most that the devices
    can do. What was computed twice to save memory does not count."""
    if peaks() is None:
        return None
    total = 0.0
    for group in groups:
        prompt, written = len(group[0].prompt), sum(len(r.completion.tokens) for r in group)
        layers, head = flops_a_token(config, prompt + written / len(group) / 2)
        total += 3 * ((prompt + written) * layers + written * head)
    return total / seconds / peaks()[0] / dist.get_world_size()


def memory(s: Settings, config: Config, world: int, prompt: int, device: str) -> dict[str, dict[str, float]]:
    """Estimated bytes of a rank, by phase and part. Parts that end in (CPU) are not in the device's memory."""
    C, L, V = config.hidden_size, config.num_hidden_layers, config.vocab_size
    N, (layer, others) = count(config), sizes(config)
    width = 2 if compute_dtype(device, s.dtype) == torch.bfloat16 else 4  # bytes of a number in computation
    place = " (CPU)" if s.offload else ""
    resident = {f"weights{place}": 4 * N / world, f"Adam's state{place}": 8 * N / world}
    if s.beta:
        resident["reference policy"] = width * N

    def generation(prompts, rows):
        a_token = 2 * config.num_key_value_heads * config.head_dim * L * width
        at_once = max(prompt, min(prompts * prompt, PREFILL_TOKENS))
        return {"copy to sample with": width * N,
                "keys and values": a_token * (prompts * prompt + rows * s.max_new_tokens),
                "prompts at work": at_once * (6 * C + 3 * config.intermediate_size) * width,
                "probabilities": 16 * rows * V}

    T = s.token_budget + prompt  # of a packed row
    a_layer = T * (10 * C + 5 * config.intermediate_size) * width
    training = {f"gradients{place}": 4 * N / world, "gathered weights": (2 * width + 4) * (others + 2 * layer),
                "logits": 16 * min(T * V, HEAD_LOGITS[device])}
    if s.recompute:
        training |= {"layers' inputs": L * T * C * width, "a layer at work": a_layer}
    else:
        training["activations"] = L * a_layer
    questions = math.ceil(min(s.test / world, max(1, READ_AT_ONCE // prompt)))
    return {"sampling": resident | generation(s.questions, s.questions * math.ceil(s.rollouts / world)),
            "training": resident | training,
            "evaluation": (resident if s.eval_every else {}) | generation(questions, questions)}


def peak(phases: dict) -> float:
    """The most bytes of the device's memory that any phase takes."""
    return max(sum(size for part, size in parts.items() if "(CPU)" not in part) for parts in phases.values())


def what_would_fit(s: Settings, config: Config, world: int, prompt: int, device: str, room: float) -> str:
    """Up to three ways in which the run would fit, the mildest first."""
    less = {"token_budget": s.token_budget // 4, "max_new_tokens": s.max_new_tokens // 2}
    ways = [({"recompute": True}, world), ({"token_budget": less["token_budget"]}, world), ({"offload": True}, world),
            ({}, 2 * world), ({}, 4 * world), ({"recompute": True, "offload": True}, world),
            ({"recompute": True, "offload": True, **less}, world)]
    fits = []
    for changes, ranks in ways:
        changed = replace(s, **changes)
        if (changed != s or ranks > world) and peak(memory(changed, config, ranks, prompt, device)) <= room:
            flags = [f"--{key}={value}" for key, value in changes.items() if value != getattr(s, key)]
            fits.append(" ".join(flags) or f"{ranks} processes")
    fits = list(dict.fromkeys(fits))[:3]
    return "it would fit with " + ", or with ".join(fits) if fits else "a smaller model is what would fit"


def estimate(s: Settings, config: Config, pool, device: str) -> tuple[str, str]:
    """What a run takes, as text with its assumptions, and what it lacks of the device's memory, "" if nothing."""
    world = dist.get_world_size()
    local = s.pool.startswith("local")
    chat = ask(Task("x" * (40 if local else 400), pool), prompting(s))
    prompt = longest = sum(len(turn["content"]) for turn in chat) // 4
    if s.recursion:
        longest += s.max_new_tokens + (100 if local else 4096)  # the first round and its answer
    written = min(250, s.max_new_tokens // 2)
    phases = memory(s, config, world, longest, device)
    there = devices()[1]
    lack = ""
    if peak(phases) + RESERVE[device] > there:
        lack = (f"memory: {(peak(phases) + RESERVE[device]) / GiB:.1f} GiB for each process, of which {there / GiB:.1f} are here; "
                + what_would_fit(s, config, world, longest, device, there - RESERVE[device]))

    rounds = 1.5 if s.recursion else 1.0
    workflows = s.questions * s.rollouts * rounds  # of an iteration
    layers, head = flops_a_token(config, prompt + written / 2)
    forward = (s.questions * rounds * prompt + workflows * written) * layers
    sampling = forward + workflows * written * head
    training = (4 if s.recompute else 3) * forward + 4 * workflows * written * head
    slots = min(w.concurrency for w in pool) * len(pool)
    latency = 0.01 if local else 20.0
    calls = STEPS * workflows
    seconds = f"workers {max(calls / slots, STEPS) * latency:.1f} ({calls:.0f} calls over {slots} slots, {latency:g} s each)"
    if peaks():
        flops, bandwidth = peaks()
        decoding = rounds * s.max_new_tokens * 2 * count(config) / bandwidth / 0.65
        seconds = (f"sampling {decoding:.0f} (at 65 % of the memory's bandwidth), training "
                   f"{training / flops / world / 0.5:.0f} (at half of the peak), {seconds}")
    else:
        seconds += "; how fast this device computes is unknown"
    evaluated = s.test
    if s.eval_every:
        evaluated += s.iterations // s.eval_every * s.eval_problems
    calls = STEPS * (s.iterations * workflows + evaluated)
    dollars = sum((w.price[0] * TOKENS_IN + w.price[1] * TOKENS_OUT) / 1e6 for w in pool if w.price) / len(pool) * calls
    unpriced = [w.name for w in pool if not w.price]
    unknown = f", and {len(unpriced)} workers of unknown price ({', '.join(unpriced)})" if unpriced else ""

    lines = [f"model     {count(config) / 1e9:.3f} billion parameters, computed in {compute_dtype(device, s.dtype)}",
             f"run       {s.iterations} iterations x {s.questions} questions x {s.rollouts} rollouts on {world} processes,"
             f" problems of {s.data!r}, {len(pool)} workers of {s.pool!r}",
             f"memory    at most {peak(phases) / GiB:.1f} GiB a process, and {RESERVE[device] / GiB:.1f} for what is not counted:"]
    for phase, parts in phases.items():
        told = ", ".join(f"{part} {size / GiB:.1f}" for part, size in parts.items())
        lines.append(f"            {phase}: {told}")
    return "\n".join(lines + [
        f"disk      {disk(config) / GiB:.1f} GiB a checkpoint, at most {s.keep + 2} of them at a time",
        f"work      an iteration: {sampling / 1e12:.3g} TFLOP to sample, {training / 1e12:.3g} to train, with prompts of "
        f"{prompt} tokens and completions of {written}",
        f"seconds   an iteration: {seconds}",
        f"calls     {calls:,.0f} with the evaluations, {STEPS} a workflow; with {TOKENS_IN} tokens in and {TOKENS_OUT} "
        f"out each, evenly over the pool, about ${dollars:,.0f}{unknown}"]), lack


STEPS, TOKENS_IN, TOKENS_OUT = 3, 1000, 700  # what a workflow and a call are assumed to be


def disk(config: Config) -> int:
    """Bytes of a checkpoint: the fp32 weights with two moments, and the weights for use."""
    return 16 * count(config)


# -------------------------------------------------------------------------------------------------------------
# Appendix: what a run lacks, and the command line


def choose_by_size(s: Settings, config: Config):
    """Set what depends on whether the model is a tiny one or was pretrained."""
    tiny = count(config) < TINY
    s.lr = s.lr or (1e-3 if tiny else 1e-6)
    s.dtype = s.dtype or ("fp32" if tiny else "")


def preflight(s: Settings, start: str, device: str):
    """What would fail late fails here, all of it at once. With --dry_run the estimate is said in any case, and every
    worker asked for a word. Returns the pool's address, the dollars left of the budget, and the model's shape."""
    check_settings(s, start)
    pool = load_pool(s.pool, replay=s.replay, budget=s.budget)
    if s.subset > len(pool):
        raise ValueError(f"--subset={s.subset}: the pool has {len(pool)} workers")
    lacks = []
    config = tiny_config(s)
    if start:
        try:
            config = Config.from_pretrained(start)
        except (OSError, ValueError) as e:
            lacks.append(f"a model to start from ({' '.join(str(e).split())})")
            if start == PRESETS["paper"]["init_from"]:
                config = Config()  # which has its shape
    choose_by_size(s, config)
    text, lack = estimate(s, config, pool, device)
    if s.dry_run or count(config) > TINY:
        say(text)
    lacks += [lack] if lack else []
    for check in (lacking_disk, lacking_reference, lacking_problems, lacking_keys, lacking_report):
        lacks += check(s, start, config, pool)
    if s.dry_run or not lacks:
        lacks += lacking_workers(pool)
    if lacks:
        raise SystemExit(f"the run lacks {'; '.join(lacks)}. The laptop world needs nothing: --preset=laptop")
    return pool[0].base_url, s.budget and max(pool[0].budget.left, 1e-9), config


def check_settings(s: Settings, start: str):
    """ValueError for values with which nothing can run."""
    may_be_0 = {"seed", "budget", "lr", "beta", "clip_high", "importance", "warmup", "warm_steps", "warm_second", "subset",
                "eval_every"}
    may_be_any = {"no_workflow", "wrong", "right"}
    for key, value in asdict(s).items():
        if type(value) in (int, float):
            good = 0 < value < math.inf or value == 0 and key in may_be_0
            if not good and not (key in may_be_any and math.isfinite(value)):
                raise ValueError(f"--{key}={value}: expected a number above 0")
    for key, known in (("loss", LOSSES), ("report", ("", "tensorboard", "wandb"))):
        if getattr(s, key) not in known:
            raise ValueError(f"--{key}={getattr(s, key)}: there are {', '.join(filter(None, known))}")
    if s.width % 8:
        raise ValueError(f"--width={s.width}: expected a multiple of 8, for 4 heads of an even size")
    if not start and s.warm_batch < dist.get_world_size():
        raise ValueError(f"--warm_batch={s.warm_batch}: expected at least one for each process")
    if s.data.endswith(".jsonl") and not s.test_data:
        raise ValueError(f"--data={s.data} has no test split: name other problems for the end with --test_data=FILE")
    if s.replay and os.path.abspath(s.replay).startswith(os.path.abspath(s.out) + os.sep):
        raise ValueError(f"--replay={s.replay}: a place outside of --out, please, which the next run moves")


def lacking_disk(s: Settings, start, config: Config, pool):
    there = os.path.abspath(s.out)
    while not os.path.exists(there):
        there = os.path.dirname(there)
    free = shutil.disk_usage(there).free
    needed = disk(config) * (s.keep + 2 - len(checkpoints(s.out) if s.resume else []))
    if free < needed:
        yield (f"{needed / GiB:.0f} GiB of disk for checkpoints in {s.out} (free are {free / GiB:.1f}; a smaller --keep "
               "takes less)")


def lacking_reference(s: Settings, start, config, pool):
    folder = reference_folder(s, start)
    if s.beta and folder and not os.path.exists(os.path.join(folder, "config.json")):
        yield (f"the reference policy for --beta={s.beta} in {folder} (a run without --beta writes none; name one with "
               "--reference=DIR)")


def lacking_problems(s: Settings, start, config, pool):
    try:
        problems = load(s.data, "train") + load(s.test_data or s.data, "test", s.test)
        if any(p.grader in ("code", "unittest") for p in problems):
            evaluation.run_code("pass", None, [""], 60)  # says what the sandbox lacks
    except (OSError, ValueError) as e:
        yield f"problems ({e})"


def lacking_keys(s: Settings, start, config, pool):
    for worker in pool:
        if worker.api_key_env and not os.environ.get(worker.api_key_env):
            yield f"${worker.api_key_env} for {worker.name}"


def lacking_report(s: Settings, start, config, pool):
    if s.report and not importlib.util.find_spec(s.report):
        yield f"{s.report} (pip install {s.report})"


def lacking_workers(pool):
    for worker in pool:
        if not worker.api_key_env or os.environ.get(worker.api_key_env):
            try:
                worker.chat([{"role": "user", "content": "Say hello."}])
            except WorkerError as e:
                yield f"a worker ({e})"


def settings_of(argv: list[str]) -> tuple[Settings, str]:
    """The settings of a command line and the kind of device. Without --preset it is the paper's on two GPUs of 80 GB
    with a process each, else the laptop's."""
    device, size, _ = devices()
    s = Settings()
    configure(s, argv)  # to know the preset
    if not s.preset:
        large = device == "cuda" and size > 75e9 and int(os.environ.get("WORLD_SIZE", "1")) > 1
        s.preset = "paper" if large else "laptop"
    if s.preset not in PRESETS:
        raise SystemExit(f"--preset={s.preset}: there are {', '.join(PRESETS)}")
    for key, value in PRESETS[s.preset].items():
        setattr(s, key, value)
    words = configure(s, argv)
    if words:
        raise SystemExit(f"train.py takes --key=value settings only, not {words[0]!r}")
    s.out = os.path.normpath(s.out)
    return s, device


def main(argv):
    s, device = settings_of(argv)
    alone = {} if "RANK" in os.environ else dict(store=dist.HashStore(), rank=0, world_size=1)  # torchrun sets RANK
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"  # offloaded weights meet over gloo
    # A rank may wait for another's slow workers much longer than the ten minutes that NCCL allows.
    dist.init_process_group(backend, timeout=datetime.timedelta(days=1), **alone)
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    code = None
    try:
        train(s, device)
    except SystemExit as e:  # on all ranks
        code = e.code
    except KeyboardInterrupt:
        code = f"interrupted; {newest(s)}" if dist.get_rank() == 0 else 1
    dist.destroy_process_group()  # not in a `finally`: after one rank's error NCCL would wait for the others
    if code is not None:
        raise SystemExit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
