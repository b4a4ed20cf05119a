"""Train a Conductor with GRPO (section 3 of the paper).

    # The free laptop world, with a model that fits the device:
    torchrun --nproc_per_node=2 train.py
    # The paper's run:
    torchrun --nproc_per_node=2 train.py --preset=paper --pool=today --budget=DOLLARS
    # Your own model, workers and questions:
    python train.py --preset=own --init_from=MODEL --pool=FILE.json --data=FILE.jsonl --budget=5
    # Print what a run needs and everything that is missing:
    python train.py --preset=NAME --dry_run

A run writes these files into --out:

    settings.json      all flags
    metrics.jsonl      one line per iteration
    traces/            every training rollout, with its workers' replies
    replies            workers' replies; --resume reuses them, so each is paid for only once. Most
                       replies in the laptop world are not kept, because they cost nothing
    checkpoints/       the Conductor, saved every --save_every iterations and at the end; the newest
                       checkpoint also has the state of training, which --resume needs
    checkpoint         a link to the newest checkpoint
    reference/         the policy that the KL is measured against; absent if the run has no KL or
                       uses the reference of the run that it starts from
    test.json, .jsonl  eval.py's table of the finished run, and the rollouts behind it

To continue a run that was killed, repeat its command with --resume."""

import contextlib
import ctypes
import datetime
import errno
import fcntl
import functools
import importlib.util
import inspect
import itertools
import json
import math
import os
import random
import shutil
import signal
import socket
import sys
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":
    # While the program imports torch or waits for other ranks to start, Ctrl-C ends it silently.
    # Later, `main` installs `interrupted`, which prints how to resume.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

# Sampling and learning allocate GPU memory blocks of very different sizes; expandable segments can
# serve both. torch reads the setting when it is imported.
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tokenizers import Tokenizer as BPE, decoders, models, pre_tokenizers, trainers
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

import eval as evaluation
from grpo import (
    HEAD_LOGITS,
    clipped_step,
    packed_logprobs,
    set_advantages,
    set_wrong_shares,
    update,
)
from model import (
    TINY,
    Config,
    Qwen,
    Tokenizer,
    check_ids,
    configure,
    count_parameters,
    dtype_for,
    empty_model,
    fetch,
    flag,
    read_json,
    usage_error,
    write_json,
)
from sample import generate
from workers import (
    LOCAL,
    Reply,
    WorkerError,
    check_pool,
    demand_budget,
    load_function,
    load_pool,
    name_of,
    one_line,
    ping_workers,
    probable_cost,
    read_pool,
)
from workflow import (
    Prompting,
    Rollout,
    Workflow,
    as_lists,
    call_worker,
    conductor_chat,
    model_writer,
    read_examples,
    read_prompting,
    read_rollouts,
    roll_out,
    rollout_to_json,
    save_prompting,
    without_pools,
)


@dataclass
class Settings:
    preset: str = flag(
        "",
        "set of defaults for all other flags (this page shows the defaults of laptop): laptop, "
        "small, large, paper, paper-recursive, own, pairs, pools, recursive, unseen; default: "
        "laptop, small or large, depending on the GPUs",
    )
    out: str = flag("", "folder of the run; default: out/PRESET")
    seed: int = flag(1, "seed of all random choices")
    init_from: str = flag(
        "",
        "model to start from: a folder or a name on the Hugging Face hub; default: a new tiny "
        "model",
    )
    data: str = flag("laptop", "problems: the name of a data set (see eval.py), or FILE.jsonl")
    grader: str = flag(
        "", "FILE.py:NAME, a function that grades the problems in --data that do not name a grader"
    )
    sandbox: str = flag(
        "bwrap",
        "how to run programs that workers write: bwrap (in a sandbox), or none (unprotected; use "
        "it only in a disposable container)",
    )

    # The workers, and limits on their cost and time.
    pool: str = flag("local", "workers: the name of a pool (see workers.py), or FILE.json")
    budget: float = flag(
        0.0,
        "maximum number of dollars to spend, not counting what was spent before a --resume; 0: no "
        "limit, which is accepted only if all workers are free",
    )
    share_replies: bool = flag(
        False,
        "pay only once for identical calls made by different training rollouts; the rollouts of a "
        "question are then correlated, because they share each such reply, lucky or not",
    )
    workflow_timeout: float = flag(
        1800.0, "seconds that a workflow may run in training before its rollout is lost"
    )

    # The Conductor's prompt, and limits on its workflows.
    notes: bool = flag(
        False, "show the Conductor each worker's note, which says what the worker is good at"
    )
    shuffle: bool = flag(
        False,
        "give each question a pool of at least --subset random workers in random order, so that "
        "only their notes tell the workers apart",
    )
    examples: str = flag("", "FILE of few-shot examples that replace those of --prompt_style")
    prompt_style: str = flag(
        "short",
        "short: a brief prompt, for use with a warm start; ood, in, mixed: few-shot examples from "
        "other tasks, the same tasks, or both; zero-shot: no examples",
    )
    max_steps: int = flag(5, "maximum number of steps in a workflow")
    max_new_tokens: int = flag(96, "maximum number of tokens in a completion")
    ablate: str = flag(
        "",
        'part of each workflow to disable: subtasks (each becomes "Solve the question."), or '
        "access (no step sees another step); default: no ablation",
    )
    subset: int = flag(
        0,
        "let each question use a random subset of at least this many workers (section 3.2); 0: all "
        "workers",
    )
    recursion: bool = flag(
        False,
        "give half of the questions a second round, in which the Conductor may revise the answer "
        "(section 3.2)",
    )

    # The objective (section 3.1, equations 1 and 2), and the optimizer: AdamW without weight decay.
    reward: str = flag(
        "", "FILE.py:NAME, a function rollout -> float that replaces section 3.1's reward"
    )
    cost_weight: float = flag(
        0.0,
        "how much advantage a rollout loses for each dollar that it costs above the mean of its "
        "question's rollouts",
    )
    iterations: int = flag(160, "number of iterations")
    n_questions: int = flag(32, "number of questions in each iteration")
    ask_solved_probability: float = flag(
        0.1,
        "probability of asking a randomly drawn question if the Conductor always answers its kind "
        "correctly; 1: do not draw questions, but ask them in the order of the data",
    )
    n_rollouts: int = flag(16, "number of rollouts of each question")
    minibatches: int = flag(
        4, "optimizer steps in each iteration, each on a part of every question's rollouts"
    )
    beta: float = flag(
        0.1,
        "weight of the KL to the reference policy; for each question, it is multiplied by the "
        "share of wrong answers",
    )
    lr: float = flag(7e-4, "peak learning rate")
    beta2: float = flag(0.99, "AdamW's second beta")

    # The device.
    device: str = flag(
        "",
        "cuda or cpu; default: cuda if there is a GPU for each process and the model has at least "
        "10 million parameters, else cpu",
    )
    lora_rank: int = flag(
        0,
        "freeze the model and train LoRA matrices of this rank, by default with ten times the "
        "preset's learning rate; 0: train all weights",
    )
    token_budget: int = flag(
        8192, "maximum number of tokens in a micro-batch, not counting its first prompt"
    )
    offload: bool = flag(False, "keep weights, gradients and Adam's state in host memory")

    # The warm start: supervised training on the format of workflows, before the first iteration.
    warm_steps: int = flag(
        -1,
        "steps of the warm start; -1: 400 for a new tiny model, 0 for a trained Conductor or a "
        "model of 3B parameters or more, 120 for other models",
    )
    warm_extensions: bool = flag(
        False,
        "prepare for --subset and --recursion: the warm start's lessons offer subsets of the "
        "workers, and a fifth of the lessons are second rounds",
    )

    # Measuring, saving and resuming.
    n_test: int = flag(
        225,
        "number of held-out problems on which the Conductor is measured at the end; earlier "
        "checkpoints are measured on the first 72 only",
    )
    save_every: int = flag(40, "iterations between checkpoints")
    wandb: bool = flag(False, "also send the metrics to Weights & Biases")
    resume: bool = flag(
        False, "continue the run in --out, from its newest checkpoint if it has one"
    )
    dry_run: bool = flag(
        False,
        "do a trial update (on a GPU, one as large as any of the run's), print what the run needs "
        "and what is missing, and exit",
    )


# The paper's settings (Appendix A.1). "" marks a flag that the user must give.
PAPER = dict(
    init_from="Qwen/Qwen2.5-7B",
    data="paper",
    pool="",
    prompt_style="ood",
    iterations=200,
    lr=1e-6,
    max_new_tokens=1024,
    n_questions=4,
    n_rollouts=64,
    ask_solved_probability=1.0,
    minibatches=1,
    beta=0.0,
    beta2=0.999,
)
# Settings for the extensions of section 3.2, in a laptop world with two workers of each trade.
# Run the preset "pairs" first, because the presets made from TUNE continue from its Conductor.
# Their KL is measured against the reference policy of "pairs", because that policy still tries all
# workers, and workflows of all lengths.
# Smaller values of beta have not been tried with "pairs".
PAIRS = dict(pool="local:pairs", warm_steps=1000, warm_extensions=True, beta=0.2)
TUNE = dict(
    PAIRS, init_from="out/pairs/checkpoint", warm_steps=0, iterations=120, lr=3e-4, beta=0.05
)
PRESETS = {
    "laptop": {},
    "small": dict(
        init_from="Qwen/Qwen2.5-0.5B-Instruct",
        max_steps=3,
        n_questions=16,
        lr=5e-5,
        token_budget=4096,
        save_every=20,
    ),
    "large": dict(PAPER, data="laptop", pool="local"),
    "paper": PAPER,
    "paper-recursive": dict(
        PAPER,
        init_from="out/paper/checkpoint",
        data="recursion",
        recursion=True,
        iterations=20,
        token_budget=4096,
    ),
    "own": dict(PAPER, init_from="", data=""),
    "pairs": dict(PAIRS, iterations=240),
    "pools": dict(TUNE, subset=4),
    "recursive": dict(TUNE, pool="local:tired", recursion=True),
    "unseen": dict(
        notes=True,
        shuffle=True,
        subset=4,
        warm_steps=1600,
        max_new_tokens=112,
        iterations=240,
    ),
}


@dataclass
class Run:
    """Everything that the training loop works with, except the settings."""

    pool: list  # Workers
    problems: list  # eval.Problems to train on
    test: list  # held-out Problems
    tokenizer: Tokenizer
    model: Qwen  # sharded by FSDP
    optimizer: torch.optim.Optimizer
    prompting: Prompting
    first_iteration: int  # number of iterations before the newest checkpoint; 0 in a new run
    wrong_share: dict[str, torch.Tensor]  # kind of question -> running share of wrong answers
    reference: Qwen | None = None  # the policy that the KL is measured against
    skipped: int = 0  # length of the current streak of steps skipped for a non-finite gradient


class Call(NamedTuple):
    """The outcome of one call to a worker."""

    end: float  # when the call ended, in seconds since 1970
    worker: str  # the worker's name
    is_answered: bool


# The rollouts of an iteration, one list for each question. With recursion, the lists of the second
# rounds follow those of all first rounds.
Groups = list[list[Rollout]]

GO_ON = "--resume goes on, and asks only for what is missing."


# ---- The run ------------------------------------------------------------------------------------


def train(settings: Settings):
    """Train a Conductor, from the warm start to the final evaluation. Every rank calls this.

    The code in this file keeps a contract: random choices depend only on the seed, the iteration
    and the files on disk, and the whole state of a run consists of its newest checkpoint, the
    reference policy, the traces of later iterations, the workers' replies and settings.json. A run
    that is killed and resumed therefore ends with the same weights as an uninterrupted run with the
    same flags and number of ranks, if workers repeat the replies that were lost. With a different
    number of ranks, and on a GPU in any two runs, results are rounded differently, which now and
    then changes a sampled token.
    """
    run = set_up(settings)  # loads the newest checkpoint, or does the warm start
    # If the run was stopped between saving its newest checkpoint and measuring it, measure it now.
    measure_held_out(run, settings, run.first_iteration)
    recent = deque(maxlen=10)  # the durations of the last ten iterations, in seconds
    for iteration in range(run.first_iteration, settings.iterations):
        started = time.perf_counter()

        # If a killed run got through step 2 of this iteration, read the rollouts from disk.
        groups = on_all_ranks(lambda: read_trace(run, settings, iteration))
        if groups is None:
            # 1. Roll out: the Conductor writes workflows, workers run them, graders judge.
            groups, reason_to_stop = collect_rollouts(run, settings, iteration)
            torch.cuda.empty_cache()  # blocks cached by sampling have the wrong sizes for learning
            if reason_to_stop:
                save_and_leave(run, settings, iteration, reason_to_stop)

            # 2. Reward each rollout (section 3.1), and compare those of each question (Eq. 2).
            rollouts = list(itertools.chain(*groups))
            rewards = on_rank0(lambda: [reward(rollout, settings) for rollout in rollouts])
            for rollout, value in zip(rollouts, rewards):
                rollout.reward = value
            set_advantages(trajectories(groups), settings.cost_weight)
            set_wrong_shares(groups)
            on_rank0(lambda: write_trace(settings, iteration, groups))
        track_wrong_shares(run, groups)
        rolled_out = time.perf_counter()

        # 3. Update the policy (Eq. 1).
        reports = learn(run, groups, settings, iteration)
        torch.cuda.empty_cache()  # blocks cached by learning have the wrong sizes for sampling
        seconds = {
            "rollout_s": rolled_out - started,
            "learning_s": time.perf_counter() - rolled_out,
        }

        # 4. Log, save, evaluate.
        done = iteration + 1
        recent.append(time.perf_counter() - started)
        seconds_left = sum(recent) / len(recent) * (settings.iterations - done)
        metrics = metrics_of(iteration, groups, reports, seconds)
        on_rank0(lambda: log(settings, metrics, seconds_left))
        if done % settings.save_every == 0 or done == settings.iterations:
            save(run, settings, done)
            measure_held_out(run, settings, done)

    print_results(run, settings)


def collect_rollouts(run: Run, settings: Settings, iteration: int) -> tuple[Groups, str]:
    """Roll out the first rounds of an iteration and, with recursion, its second rounds.

    Returns the rollouts, and why the run must stop instead of learning from them ("" if it need not
    stop).
    """
    # Each rank's FSDP model has only a part of the weights, so sample from a whole copy.
    sampler = whole_copy(run.model, settings)
    calls = []  # this rank's calls to workers; begin_rollouts appends them
    questions = itertools.islice(first_rounds(run, settings, iteration), settings.n_questions)
    asked = [copies(question, settings) for question in questions]
    groups = []
    for extra_round in range(1 + settings.recursion):
        if extra_round:
            asked = second_rounds(groups, iteration)
        # The sampler's seed differs for each combination of --seed, iteration and round.
        seed = settings.seed * 1_000_000 + extra_round * 500_000 + iteration
        mine = on_all_ranks(lambda: begin_rollouts(sampler, run, asked, settings, seed, calls))
        groups += gather_rollouts(asked, mine)
        reason_to_stop = find_reason_to_stop(run, groups, calls)
        if reason_to_stop:
            break
    return groups, reason_to_stop


def find_reason_to_stop(run: Run, groups: Groups, calls: list[Call]) -> str:
    """Return why the run must stop instead of using these rollouts, or "".

    `calls` are this rank's calls. All ranks call this function. The run stops if the budget is
    spent, if a worker's last eight calls all failed, or if at least three quarters of the
    rollouts are lost, because the next iterations would fare no better. An occasional failed call
    does not stop the run, because it loses only one rollout.
    """
    failures = Counter()  # worker's name -> how many of its calls have failed since the last answer
    for call in sorted(all_gather(calls)):
        failures[call.worker] = 0 if call.is_answered else failures[call.worker] + 1
    gone = [name for name, count in failures.items() if count >= 8]
    rollouts = list(itertools.chain(*groups))
    errors = [r.error for r in rollouts if r.error]
    budget = run.pool[0].budget

    if any(all_gather([budget is not None and budget.refused])):  # on any rank
        reason_to_stop = (
            "the budget is spent (--resume may spend as much again, or another --budget=DOLLARS)"
        )
    elif gone:
        reason_to_stop = f"the last eight calls of {', '.join(gone)} all failed"
    elif len(errors) >= 0.75 * len(rollouts):
        reason_to_stop = f"{len(errors)} of {len(rollouts)} rollouts were lost"
    else:
        return ""
    return f"{reason_to_stop}, the first by: {errors[0]}" if errors else reason_to_stop


def save_and_leave(run: Run, settings: Settings, iteration: int, reason_to_stop: str):
    """Save a checkpoint, unless the last iteration did, and exit. --resume redoes this iteration.

    This iteration has no trace file, so --resume rolls it out again: it samples the same workflows,
    reuses the replies that are on disk, and calls workers only for the missing ones.
    """
    state = Path(settings.out, f"checkpoints/{iteration:05d}/state")
    if not on_rank0(state.exists):
        save(run, settings, iteration)
    leave(
        f"stopped in iteration {iteration + 1}, which is not learned, with a checkpoint: "
        f"{reason_to_stop}. {GO_ON}"
    )


def first_rounds(run: Run, settings: Settings, iteration: int) -> Iterator[Rollout]:
    """Yield questions for an iteration, endlessly, as rollouts that have no workflow yet.

    With ask_solved_probability=1, the questions come in the order of the data, over and over.
    Otherwise they are drawn at random, and the more often a kind of question is answered correctly,
    the more likely its questions are to be skipped.

    Each question may use the whole pool or, with settings.subset, a random subset of at least that
    many workers. (Section 3.2 of the paper draws k of n workers, but says neither what k is nor
    whether it varies.) With settings.shuffle, such a subset becomes the question's pool, and its
    workers are numbered in random order.
    """
    rng = random.Random(f"{settings.seed} {iteration}")
    in_order = settings.ask_solved_probability == 1
    pool_size = len(run.pool)
    for i in itertools.count(iteration * settings.n_questions):
        problem = run.problems[i % len(run.problems)] if in_order else rng.choice(run.problems)
        if rng.random() >= max(settings.ask_solved_probability, run.wrong_share[problem.kind]):
            continue
        n_workers = rng.randint(settings.subset or pool_size, pool_size)
        workers = sorted(rng.sample(range(pool_size), n_workers))
        pool = run.pool
        if settings.shuffle:
            pool = rng.sample(run.pool, n_workers)
            workers = list(range(n_workers))
        call_prefix = f"{settings.seed}/{iteration}/{i}"
        yield Rollout(problem.question, pool, workers, problem, call_prefix=call_prefix)


def copies(question: Rollout, settings: Settings) -> list[Rollout]:
    """Return n_rollouts copies of a question, numbered from 0, to be sampled differently."""
    return [replace(question, number=number) for number in range(settings.n_rollouts)]


def second_rounds(groups: Groups, iteration: int) -> Groups:
    """Return second rounds, still without workflows, for half of the questions (section 3.2).

    Each answered rollout of such a question is continued once. A question without an answered
    rollout gets no second round. Even iterations take the first two of every four questions and odd
    iterations the last two. So if two kinds of question alternate in the data, both kinds get
    second rounds.
    """
    half = (0, 1) if iteration % 2 == 0 else (2, 3)  # of every four questions
    asked = []
    for i, group in enumerate(groups):
        answered = [r for r in group if r.workflow and r.right is not None]
        if i % 4 in half and answered:
            asked.append([second_round(r) for r in answered])
    return asked


def second_round(first: Rollout) -> Rollout:
    return Rollout(
        first.question,
        first.pool,
        first.workers,
        first.problem,
        previous=first,
        number=first.number,
        call_prefix=first.call_prefix,
    )


def begin_rollouts(
    sampler: Qwen,
    run: Run,
    asked: Groups,
    settings: Settings,
    seed: int,
    calls: list[Call],
) -> list[Rollout]:
    """Roll out this rank's part of each question's rollouts, and return that part as one list.

    What is sampled for a rollout depends on the seed and the rollout's number, not on the rank. A
    record of every call to a worker is appended to `calls`.

    This function does not wait for other ranks, so a modified version of this file may run it in a
    thread while the model learns. That version must not sample ahead across a checkpoint, because
    a checkpoint does not hold the older policy that drew those samples.
    """

    def call(rollout: Rollout, step: int) -> Reply:
        is_answered = False
        try:
            reply = call_worker(rollout, step)
            is_answered = True
            return reply
        finally:
            calls.append(Call(time.time(), rollout.names[step], is_answered))

    mine = [*itertools.chain(*map(my_part, asked))]
    write = model_writer(sampler, run.tokenizer, run.prompting, temperature=1.0, seed=seed)
    with evaluation.progress("rollouts of rank 0", mine) as bar:
        return roll_out(
            mine,
            write,
            run.prompting.max_steps,
            judge=evaluation.grade_once(),
            edit=evaluation.ABLATIONS[settings.ablate],
            call=call,
            on_end=lambda rollout: bar.update(),
            timeout=settings.workflow_timeout,
        )


def my_part(items: list) -> list:
    """Return this rank's part of a list: consecutive items, about equally many on each rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    return items[len(items) * rank // world : len(items) * (rank + 1) // world]


def gather_rollouts(asked: Groups, mine: list[Rollout]) -> Groups:
    """Return the rollouts of all ranks, on every rank, grouped and ordered like `asked`."""
    # Pools cannot be sent to other ranks, and problems need not be. Every rank has both in `asked`.
    done = {(r.call_prefix, r.number): r for r in all_gather([without_pools(r) for r in mine])}
    groups = [[done[r.call_prefix, r.number] for r in group] for group in asked]
    for r, question in zip(itertools.chain(*groups), itertools.chain(*asked)):
        r.pool = question.pool
        r.problem = question.problem
        r.previous = question.previous
    return groups


def reward(rollout: Rollout, settings: Settings) -> float | None:
    """Return the reward: 0 without a workflow, 0.5 for a wrong answer, 1 for a right one (§3.1).

    The reward is None if the rollout was lost, or if --cost_weight is set and the cost is unknown.
    With --reward=FILE.py:NAME, the user's function computes the reward. Such a function should not
    give small bonuses: Eq. 2 divides by the standard deviation of a question's rewards, so if all
    rollouts are right and one gets 0.01 more, its advantage is as large as that of a single right
    answer among wrong ones.
    """
    if rollout.right is None:
        return None
    if settings.cost_weight and rollout.cost is None:
        return None
    if settings.reward:
        return own_reward(rollout, settings.reward)
    if rollout.workflow is None:
        return 0.0
    return 1.0 if rollout.right else 0.5


load_reward = functools.cache(load_function)  # keep the function, even if its file is edited
LARGEST_REWARD = 1e15  # Eq. 2 squares rewards in fp32, whose largest number is 3e38


def own_reward(rollout: Rollout, function: str) -> float:
    """Return the reward that the user's function FILE.py:NAME gives to a rollout.

    Raises ValueError if the function fails or does not return a number within ±LARGEST_REWARD.
    """
    try:
        value = float(load_reward(function)(rollout))
        if not abs(value) <= LARGEST_REWARD:
            raise ValueError(f"it returned {value}")
    except Exception as e:
        raise ValueError(
            f"--reward={function} failed on a rollout of {rollout.problem.id}: "
            f"{type(e).__name__}: {e}. Once the function is mended, {GO_ON}"
        ) from e
    return value


def check_reward(function: str):
    """Raise ValueError or TypeError if FILE.py:NAME is not a function of one rollout."""
    loaded = load_reward(function)
    with contextlib.suppress(ValueError):  # Python cannot tell the parameters of some functions.
        inspect.signature(loaded).bind("rollout")


def trajectories(groups: Groups) -> list[Groups]:
    """Return each question's trajectories: first rounds, each with its second round, if any."""
    questions = {}  # call_prefix -> {number: the rounds with this number}
    for r in itertools.chain(*groups):
        questions.setdefault(r.call_prefix, {}).setdefault(r.number, []).append(r)
    return [list(rounds.values()) for rounds in questions.values()]


def track_wrong_shares(run: Run, groups: Groups):
    """Update the running share of wrong answers for each kind of question.

    `first_rounds` uses these shares to draw questions. A group in which no rollout has a reward
    changes nothing.
    """
    for group in groups:
        if any(rollout.reward is not None for rollout in group):
            kind = group[0].problem.kind
            run.wrong_share[kind].lerp_(torch.tensor(group[0].wrong_share), 0.3)


# If more than this share of a question's answers is wrong, its right rollouts are part of every
# minibatch.
RARELY_RIGHT = 0.8


def learn(run: Run, groups: Groups, settings: Settings, iteration: int) -> list[dict]:
    """Take one optimizer step on each minibatch (Eq. 1); return the statistics of each `update`.

    After the first step, the policy is no longer the one that sampled the rollouts, so the clip in
    Eq. 1 begins to matter. If `update` skips three steps in a row, the program ends.

    If the share of wrong answers to a question exceeds RARELY_RIGHT, every minibatch contains all
    right rollouts of that question. If each were in only one minibatch, the KL penalty in the other
    steps would undo what the policy learned from it. The paper does not repeat rollouts.
    """
    factor = schedule(iteration, settings.iterations, 0.03)
    run.optimizer.param_groups[0]["lr"] = settings.lr * factor

    rewarded = [[r for r in group if r.reward is not None] for group in groups]
    reports = []
    for m in range(settings.minibatches):
        batch = []
        for group in rewarded:
            for i, r in enumerate(group):
                is_rare = r.right and r.wrong_share > RARELY_RIGHT
                if i % settings.minibatches == m or is_rare:
                    batch.append(r)
        report = update(
            run.model,
            run.optimizer,
            my_share(batch),
            beta=settings.beta,
            n_ids=len(run.tokenizer),
            reference=run.reference,
            token_budget=settings.token_budget,
        )
        reports.append(report)

        run.skipped = run.skipped + 1 if report["skipped"] else 0
        if run.skipped == 3:
            leave(
                "three gradients in a row were not finite: start another run, with its own --out "
                f"and a smaller --lr; --init_from={settings.out}/checkpoint begins with what this "
                "one had learned at its last checkpoint"
            )
    return reports


def schedule(step: int, steps: int, warmup: float) -> float:
    """Return the factor by which to multiply the learning rate at a step (Appendix A.1).

    The factor rises linearly to 1 during the first part of the steps, then falls towards 0 along a
    cosine. `warmup` is the size of that first part as a share of all steps.
    """
    warm = max(1, round(warmup * steps))
    if step < warm:
        return (step + 1) / warm
    return 0.5 * (1 + math.cos(math.pi * ((step - warm) / (steps - warm))))


def my_share(rollouts: list[Rollout]) -> list[Rollout]:
    """Return the consecutive rollouts that this rank passes to `update`.

    All ranks get about the same number of completion tokens. The rollouts are consecutive because
    neighbours often share a prompt, which fewer ranks then have to compute.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    ends = list(itertools.accumulate(len(r.tokens) for r in rollouts))
    return [r for r, end in zip(rollouts, ends) if (end - 1) * world // ends[-1] == rank]


# ---- The tiny Conductor, and the warm start that teaches the format -----------------------------

# A model with fewer parameters than this is gathered by FSDP all at once instead of layer by layer.
SMALL = 300_000_000
TINY_CONFIG = Config(
    vocab_size=900,
    hidden_size=128,
    intermediate_size=384,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    rope_theta=100.0,
    tie_word_embeddings=True,
    max_position_embeddings=1024,
)


def tiny_conductor(
    problems: list, pool: list, prompting: Prompting, settings: Settings
) -> tuple[Qwen, Tokenizer]:
    """Return a new model of about half a million parameters, and a tokenizer of up to 900 tokens.

    The tokenizer is a byte-level BPE, which is trained here on lessons like the warm start's.
    """
    rng = random.Random(settings.seed)
    texts = []
    for problem in problems[:4000]:
        chat, completion = random_lesson(problem, rng, pool, prompting, settings)
        texts += [f"{turn['role']}\n{turn['content']}" for turn in chat]
        texts.append(f"assistant\n{completion}")

    bpe = BPE(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([digits, to_bytes])
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TINY_CONFIG.vocab_size,
        show_progress=False,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    bpe.train_from_iterator(texts, trainer)
    tokenizer = Tokenizer(bpe)

    model = Qwen(replace(TINY_CONFIG, vocab_size=len(tokenizer)))
    for name, p in model.named_parameters():
        if p.dim() > 1:
            # With Qwen's std of 0.02, such a narrow model takes much longer to learn to copy.
            torch.nn.init.normal_(p, std=0.1 if "embed" in name else 0.06)
    return model, tokenizer


def random_lesson(
    problem, rng: random.Random, pool: list, prompting: Prompting, settings: Settings
) -> tuple[list[dict], str]:
    """Return a chat that asks for a workflow, and the answer to learn: a random workflow.

    A random workflow teaches the format without favouring any choice of workers or subtasks. A new
    tiny Conductor's answer begins with a plan, which repeats the first words of the question;
    learning to copy these words teaches the model to read the question.

    Args:
        problem: The problem whose question the chat asks.
        pool: The Workers.
        prompting: How the Conductor is prompted.
        settings: With warm_extensions, the chat allows a random subset of the workers, and a fifth
            of the lessons are second rounds: the chat continues with a first workflow and its
            response, and the answer is either a new workflow or empty lists, which keep that
            response. With shuffle, the lesson's pool is a random subset of at least `subset`
            workers (0: all), numbered in random order. With notes, the plan also names each step's
            worker by the last word of the worker's note and the worker's number: "Use translator3,
            coder0". This teaches the model to look up the number that belongs to a note.
    """
    phrases = evaluation.phrases_for(problem)
    if settings.shuffle:
        pool = rng.sample(pool, rng.randint(settings.subset or len(pool), len(pool)))
    workers = list(range(len(pool)))
    if settings.warm_extensions:
        workers = sorted(rng.sample(workers, rng.randint(min(2, len(pool)), len(pool))))
    lesson = Rollout(problem.question, pool, workers)

    def answer_with(workflow: Workflow) -> str:
        if settings.init_from:
            return as_lists(workflow)
        plan = f"Plan: {' '.join(problem.question.split()[:12])}\n"
        if settings.notes:
            named = [f"{pool[s.worker].note.split()[-1]}{s.worker}" for s in workflow.steps]
            plan += f"Use {', '.join(named)}\n"
        return plan + as_lists(workflow)

    workflow = evaluation.random_workflow(rng, workers, settings.max_steps, phrases)
    completion = answer_with(workflow)
    if rng.random() < 0.2 * settings.warm_extensions:
        lost = ("I have lost the thread.", "I find nothing here to work on.")
        reply = Reply(rng.choice((problem.answer, problem.question, *lost)), 0, 0, 0.0)
        lesson.previous = Rollout(
            problem.question, written=completion, workflow=workflow, replies=[reply]
        )
        another = evaluation.random_workflow(rng, workers, settings.max_steps, phrases)
        completion = rng.choice((answer_with(another), as_lists(Workflow([]))))
    return conductor_chat(lesson, prompting), completion


def warm_start(run: Run, settings: Settings):
    """Teach the model the format of a workflow, on random lessons.

    The loss divides the logits by 1.5, but sampling does not, so the model samples from a sharper
    distribution than the one it was taught: the format becomes nearly certain, while a choice among
    equally likely options, such as the workers, stays even.
    """
    lr, batch_size = (2e-4, 16) if settings.init_from else (6e-3, 32)
    rank, world = dist.get_rank(), dist.get_world_size()
    optimizer = adam(run.model, 0.98)
    rng = random.Random(settings.seed)
    n_lessons = math.ceil(batch_size / world) * world  # so that every rank gets the same number

    n_steps = settings.warm_steps
    for step in evaluation.progress("warm start", range(n_steps)):
        chosen = rng.choices(run.problems, k=n_lessons)
        rows, weights = zip(*[lesson_row(run, problem, rng, settings) for problem in chosen])
        total = sum(sum(row_weights) for row_weights in weights)
        longest = max(len(prompt) + len(completion) for prompt, [completion] in rows)
        # Deal the lessons to the ranks in turn. All ranks together process `stride` lessons at a
        # time, so that no rank exceeds the token budget, unless a single lesson does.
        stride = world * max(1, settings.token_budget // longest)
        for i in range(rank, n_lessons, stride):
            mine = slice(i, i + stride, world)
            logprobs, _ = packed_logprobs(run.model, rows[mine], 1.5)
            weight = torch.tensor([*itertools.chain(*weights[mine])], device=run.model.device)
            loss = -(logprobs * weight).sum() / total
            (loss * world).backward()  # this factor cancels FSDP's averaging over ranks
        optimizer.param_groups[0]["lr"] = lr * schedule(step, n_steps, 0.05)
        clipped_step(run.model, optimizer)


def lesson_row(run: Run, problem, rng: random.Random, settings: Settings) -> tuple[tuple, list]:
    """Return a lesson as token ids (prompt, [completion]), and each completion token's loss weight.

    A new tiny model also learns to predict the chat itself, with a tenth of the weight, because
    this teaches the model to tell questions apart. The prompt in its rows is therefore only the
    first token of the chat.
    """
    chat, answer = random_lesson(problem, rng, run.pool, run.prompting, settings)
    prompt = run.tokenizer.chat(chat)
    answer_ids = run.tokenizer.encode(answer) + [run.tokenizer.eos_id]
    start = len(prompt) if settings.init_from else 1
    weights = [0.1] * (len(prompt) - start) + [1.0] * len(answer_ids)
    return (prompt[:start], [prompt[start:] + answer_ids]), weights


# ---- Before and after the loop ------------------------------------------------------------------


def set_up(settings: Settings) -> Run:
    """Prepare everything that the loop in `train` needs, including the warm start of a new run."""
    # Find the model to start from, and check what the run needs.
    if not settings.dry_run:
        lock_on_all_machines(Path(settings.out, "lock"))
    checkpoint = on_rank0(lambda: newest_checkpoint(settings))
    first_iteration = int(checkpoint.name) if checkpoint else 0
    if first_iteration > settings.iterations:
        leave(f"--iterations={settings.iterations}: the run has already done {first_iteration}")
    start = str(checkpoint or settings.init_from)  # "" for a new tiny model
    check_or_leave(settings, start)

    # Load problems, workers and model.
    torch.manual_seed(settings.seed)
    problems, test = on_all_ranks(lambda: load_problems(settings))
    if test and test == problems[: len(test)]:  # The file is too small to be split.
        print0("fewer than 20 different questions: none is held out, held_out is of all of them")
    pool = on_all_ranks(lambda: open_pool(settings))
    prompting = on_all_ranks(lambda: choose_prompting(settings))
    if checkpoint:
        on_all_ranks(lambda: check_unchanged(checkpoint, prompting, pool))
    model, tokenizer = load_start(start, problems, pool, prompting, settings)
    run = Run(
        pool=pool,
        problems=problems,
        test=test,
        tokenizer=tokenizer,
        model=model,
        optimizer=adam(model, settings.beta2),
        prompting=prompting,
        first_iteration=first_iteration,
        wrong_share={problem.kind: torch.ones(()) for problem in problems},
    )
    n_prompt = on_all_ranks(
        lambda: check_longest_prompt(model.config, tokenizer, problems + test, pool, prompting)
    )
    on_rank0(lambda: open_folder(settings, first_iteration))
    print0(
        f"{count_parameters(model.config):,} parameters in "
        f"{dtype_for(model.config, settings.device)} on "
        f"{dist.get_world_size()} x {settings.device}, {len(problems):,} problems, workers: "
        f"{', '.join(worker.name for worker in pool)}"
    )

    # Do the warm start, and load the reference policy for the KL, if there are any.
    if settings.resume and not checkpoint:
        print0("there is no checkpoint yet: the run starts again, with the rollouts on disk")
    if settings.warm_steps < 0:
        settings.warm_steps = default_warm_steps(start, model.config)
    if settings.warm_steps and not checkpoint:
        print0(f"warm start: {settings.warm_steps} steps of the format")
        warm_start(run, settings)
    if settings.beta:
        run.reference = load_reference(run, settings, is_new=not checkpoint)

    # Find out whether the largest update fits into memory. The trial zeroes Adam's state, so do it
    # before loading the checkpoint's state.
    largest_step(model, run.optimizer, run.reference, settings, n_prompt)
    if checkpoint:
        load_state(run, checkpoint)
    return run


def check_or_leave(settings: Settings, start: str):
    """End the program if anything is missing that the run needs.

    A dry run always ends here, after `try_run` if the model's shape is known. `start` is the
    model that the run starts from, "" for a new tiny one.
    """
    evaluation.use_sandbox(settings.sandbox)
    config, entries, missing = on_rank0(lambda: preflight(settings, start))
    if settings.dry_run and config:
        try_run(settings, config, [] if missing else entries)
    if settings.dry_run or missing:
        leave(missing)


def default_warm_steps(start: str, config: Config) -> int:
    """Return the number of warm-start steps for the model `start` ("": a new tiny model).

    Trained Conductors and large models need no warm start, because they can follow the format.
    """
    if not start:
        return 400
    is_conductor = os.path.exists(f"{start}/conductor.json")
    return 0 if is_conductor or count_parameters(config) >= 3e9 else 120


def load_start(
    start: str, problems: list, pool: list, prompting: Prompting, settings: Settings
) -> tuple[Qwen, Tokenizer]:
    """Load and shard the model `start`, and load its tokenizer.

    If `start` is "", a new tiny model and its tokenizer are created instead.

    With LoRA, the frozen weights always come from --init_from, because this run's checkpoints hold
    rounded weights, with LoRA's matrices already merged into them.
    """
    if settings.offload and settings.device == "cuda":
        # Adam then runs on the CPU. Divide all cores among the ranks; by default, torchrun gives
        # each rank one thread.
        torch.set_num_threads(max(1, os.cpu_count() // ranks_here()))
    if not start:
        model, tokenizer = tiny_conductor(problems, pool, prompting, settings)
        return shard(model, settings), tokenizer

    weights = settings.init_from if settings.lora_rank else start

    def load() -> tuple[Qwen, Tokenizer]:
        dtype = torch.float32
        if settings.lora_rank:
            dtype = dtype_for(Config.from_pretrained(weights), settings.device)
        model = Qwen.from_pretrained(
            weights,
            dtype,
            device="cpu" if settings.offload else settings.device,
            shard=lambda whole: shard(whole, settings),
            lora_rank=settings.lora_rank,
        )
        return model, Tokenizer.from_pretrained(start)

    on_rank0(lambda: fetch(weights, "*.json", "*.safetensors"))  # so that not all ranks download
    return on_all_ranks(load)


def open_pool(settings: Settings) -> list:
    """Return the workers, with this rank's part of the budget.

    They reuse the replies on disk, if the run keeps any. Each rank starts its own process for the
    workers of the laptop world.
    """
    is_kept = settings.share_replies or settings.pool not in LOCAL  # local replies cost nothing
    return load_pool(
        settings.pool,
        replay=f"{settings.out}/replies" if is_kept else "",
        budget=settings.budget,
        ranks=dist.get_world_size(),
        # Share replies among training calls, whose ids begin with the seed, but not among calls for
        # held-out problems.
        share=f"{settings.seed}/" if settings.share_replies else "",
    )


def load_reference(run: Run, settings: Settings, is_new: bool) -> Qwen:
    """Return the reference policy, against which the KL is measured.

    The reference is the policy before the first iteration, which a new run writes to
    --out/reference. A run that starts from another run's `checkpoint` link uses that run's
    reference, if there is one.
    """
    folder = Path(settings.out, "reference")
    earlier = Path(settings.init_from).parent / "reference"
    if settings.init_from and (earlier / "conductor.json").exists():
        folder = earlier
    elif is_new:
        save_for_use(run, settings, folder)

    def load():
        advice = f"Delete {settings.out}/checkpoints, and --resume starts again, with all rollouts"
        with remedy(folder, advice):
            dtype = dtype_for(run.model.config, settings.device)
            return Qwen.from_pretrained(folder, dtype, settings.device)

    return on_all_ranks(load)


def load_problems(settings: Settings) -> tuple[list, list]:
    """Make --grader known to eval.py; return the problems to train on and the held-out problems."""
    if settings.grader:
        evaluation.GRADERS["own"] = evaluation.own_grader(load_function(settings.grader))
    train = evaluation.load(settings.data, "train")
    return train, evaluation.load(settings.data, "test", settings.n_test)


def choose_prompting(settings: Settings) -> Prompting:
    """Return how the Conductor is prompted.

    Raises ValueError if --examples is wrong, or if all its examples have too many steps.
    """
    examples = read_examples(settings.examples) if settings.examples else []
    if settings.examples and all(len(one["steps"]) > settings.max_steps for one in examples):
        raise ValueError(f"none has at most --max_steps={settings.max_steps} steps")
    return Prompting(
        settings.prompt_style,
        settings.max_steps,
        settings.max_new_tokens,
        settings.notes,
        examples,
    )


def check_unchanged(checkpoint: Path, prompting: Prompting, pool: list):
    """Raise ValueError if the workers or the examples are not those of the checkpoint.

    Both come from files, which may have been edited. A worker may get a different URL, key or
    price, but not a different name or place in the pool.
    """
    saved, _, names = read_prompting(str(checkpoint))
    if saved != prompting or names != [worker.name for worker in pool]:
        raise ValueError(
            f"--resume goes on with the workers {', '.join(names)}, in this order, and with the "
            f"--examples in {checkpoint}/conductor.json: restore them, or choose another --out"
        )


def check_longest_prompt(
    config: Config, tokenizer: Tokenizer, problems: list, pool: list, prompting: Prompting
) -> int:
    """Return the number of tokens in the longest question's prompt.

    The question with the most bytes counts as the longest, because counting all questions' tokens
    would take seconds. The longer prompts of second rounds are not checked.

    Raises ValueError if the model's context does not hold this prompt and max_new_tokens more.
    """
    questions = [problem.question for problem in problems]
    longest = max(questions, key=lambda question: len(question.encode()))
    chat = conductor_chat(Rollout(longest, pool), prompting)
    n_read = len(tokenizer.chat(chat))
    n_written = prompting.max_new_tokens
    if n_read + n_written > config.max_position_embeddings:
        raise ValueError(
            f"the Conductor cannot read the {n_read} tokens of its prompt and write "
            f"--max_new_tokens={n_written}, as its context has {config.max_position_embeddings}; "
            f"--prompt_style=short is the shortest prompt. The question is {one_line(longest):.60}"
        )
    return n_read


# The maximum number of held-out problems on which a checkpoint before the last is measured.
N_TEST_AT_CHECKPOINT = 72


def measure_held_out(run: Run, settings: Settings, done: int):
    """Measure the held-out accuracy of the checkpoint after `done` iterations, and log it.

    The accuracy is stored as `held_out` in the last line of metrics.jsonl. Does nothing if it is
    already there, if no checkpoint is due after `done` iterations, or if there are no held-out
    problems. Also does nothing after the last iteration, because `print_results` measures the last
    checkpoint. If the budget is spent or at least three quarters of the answers are lost, the run
    stops, and --resume measures the checkpoint again.
    """
    file = Path(settings.out, "metrics.jsonl")
    *lines, last = on_rank0(lambda: file.read_text().splitlines()) or ["{}"]
    metrics = json.loads(last)
    is_missing = metrics.get("iteration") == done - 1 and metrics["held_out"] is None
    is_due = done % settings.save_every == 0 and done < settings.iterations
    if not (is_missing and is_due and run.test):
        return
    problems = run.test[:N_TEST_AT_CHECKPOINT]
    answered = conduct_problems(run, problems, settings, f"test:{done - 1}")
    reason_to_stop = find_reason_to_stop(run, [answered], [])
    if reason_to_stop:
        leave(f"stopped after iteration {done}: {reason_to_stop}. {GO_ON}")
    metrics["held_out"] = evaluation.measure(answered)["accuracy"]
    on_rank0(lambda: replace_file(file, [*lines, json.dumps(metrics)]))
    if settings.wandb and dist.get_rank() == 0:
        sys.modules["wandb"].log({"held_out": metrics["held_out"]}, step=done - 1)
    print0(f"held out: {count_right(answered)}")


def count_right(answered: list[Rollout]) -> str:
    known = [r.right for r in answered if r.right is not None]
    return f"{sum(known)} of {len(known)} problems are right"


def conduct_problems(run: Run, problems: list, settings: Settings, name: str) -> list[Rollout]:
    """Return one rollout per problem, sampled greedily. All ranks call this and share the work.

    Args:
        name: The prefix of all call ids. If replies are kept on disk, they are found by these ids.
    """
    model = whole_copy(run.model, settings)
    write = model_writer(model, run.tokenizer, run.prompting, temperature=0.0)
    system = evaluation.conductor(
        write,
        run.prompting.max_steps,
        extra_rounds=int(settings.recursion),
        edit=evaluation.ABLATIONS[settings.ablate],
    )
    mine = my_part(problems)
    pools = [run.pool] * len(mine)
    if settings.shuffle:  # Each problem gets the whole pool, in a random order seeded by its id.
        pools = [random.Random(p.id).sample(run.pool, len(run.pool)) for p in mine]
    answered = on_all_ranks(lambda: system(mine, pools, name))
    rollouts = all_gather([without_pools(r) for r in answered])
    return [replace(rollout, problem=problem) for rollout, problem in zip(rollouts, problems)]


def print_results(run: Run, settings: Settings):
    """Print how to ask the Conductor a question, then eval.py's table of results.

    The table compares the Conductor, each worker alone and random workflows. With --shuffle, the
    Conductor's accuracy with shuffled pools is printed before the table. With --n_test=0, nothing
    is measured. All ranks call this.
    """
    pool = "" if settings.pool in LOCAL else f" --pool={settings.pool}"
    print0(f"python workflow.py QUESTION --checkpoint={settings.out}/checkpoint{pool} asks it")
    if not settings.n_test:
        return
    run.optimizer = run.reference = None  # free their memory for the evaluation
    if settings.shuffle:
        answered = conduct_problems(run, run.test, settings, "test:shuffled")
        print0(f"each with a pool in an order of its own: {count_right(answered)}")
    dollars_left = sum(all_gather([run.pool[0].budget.left if settings.budget else 0.0]))
    system = f"no-{settings.ablate}" if settings.ablate else "conductor"
    measured = evaluation.Settings(
        systems=f"{system},workers,random",
        benchmarks=settings.data,
        checkpoint=f"{settings.out}/checkpoint",
        budget=dollars_left,
        pool=settings.pool,
        limit=settings.n_test,
        extra_rounds=int(settings.recursion),
        replay=f"{settings.out}/replies",
        out=f"{settings.out}/test.json",
    )
    on_rank0(lambda: evaluation.compare_systems(measured))


# ---- What a run needs ---------------------------------------------------------------------------

GIB = 1 << 30
PROMPT = 1000  # tokens of a typical few-shot prompt, for the estimates below
SHAPES = {  # the Configs of models that may not have been downloaded yet
    "Qwen/Qwen2.5-7B": Config(),
    "Qwen/Qwen2.5-0.5B-Instruct": Config(151936, 896, 4864, 24, 14, 2, tie_word_embeddings=True),
}
CHOICES = {
    "device": ["", "cuda", "cpu"],
    "ablate": [*evaluation.ABLATIONS],
    "sandbox": ["bwrap", "none"],
    "prompt_style": ["ood", "in", "mixed", "zero-shot", "short"],
}
# The smallest values that numeric flags accept. For flags that are not listed, the minimum is 1 if
# they are integers, and 0 otherwise.
MINIMUM = {
    "n_rollouts": 2,
    "ask_solved_probability": 0.01,
    "warm_steps": -1,
    "n_test": 0,
    "subset": 0,
    "lora_rank": 0,
    "seed": 0,
}
# The largest values that numeric flags accept. For flags that are not listed, there is no maximum.
MAXIMUM = {"ask_solved_probability": 1, "beta2": 0.9999, "max_steps": 100}


def preflight(settings: Settings, start: str) -> tuple[Config | None, list[dict], str]:
    """Before anything expensive starts, look for reasons why the run would fail later.

    Returns:
        The model's Config, or None if it is unknown; the entries of the pool; and a text that lists
        everything that is missing or wrong, "" if nothing is.
    """
    missing = []

    def attempt(what: str, job: Callable, *arguments):
        """Return job(*arguments). If it fails, add "what: reason" to `missing`, and return None."""
        try:
            return job(*arguments)
        except (OSError, ValueError, LookupError, TypeError) as e:
            missing.append(f"{what}: {e}")

    # The run's folder.
    is_run = os.path.exists(f"{settings.out}/settings.json")
    if is_run and not settings.resume:
        missing.append(f"--out={settings.out} holds a run: --resume goes on; or choose another")
    if settings.resume and not is_run:
        missing.append(f"--out={settings.out} holds no run to resume")

    # The model, and the memory and disk space for it.
    config = None
    if start:
        config = attempt(f"--init_from={start}", read_shape, start) or SHAPES.get(start)
    elif settings.preset == "own":
        missing.append("--init_from: a model's folder, or its name on Hugging Face's hub")
    else:
        config = TINY_CONFIG
    if config:
        attempt("room", check_room, settings, config)

    # The problems, and how they are graded.
    problems, test = attempt(f"--data={settings.data}", load_problems, settings) or ([], [])
    if any(problem.grader in ("code", "unittest") for problem in problems + test):
        attempt("code", evaluation.check_sandbox)
    own = [problem for problem in problems if problem.grader == "own"]
    if own:
        attempt(f"--grader={settings.grader}", evaluation.failure, own[0], own[0].answer)

    # The user's own examples and reward.
    attempt("--examples", choose_prompting, settings)
    if settings.reward:
        attempt("--reward", check_reward, settings.reward)

    # The workers, and the money for them.
    entries = attempt("workers", read_pool, settings.pool) or []
    if entries:
        missing += check_workers(settings, entries)
        attempt("money", check_money, settings, entries, len(test))
    # If nothing else is missing, try the longest prompt. (A new tiny model has no tokenizer yet.)
    if start and not missing:
        tokenizer = Tokenizer.from_pretrained(start)
        pool = load_pool(settings.pool, budget=settings.budget)
        prompting = choose_prompting(settings)
        attempt("prompt", check_longest_prompt, config, tokenizer, problems + test, pool, prompting)
    # If nothing is missing, call each worker once, except in a dry run if calls may cost money.
    if not missing and not (settings.dry_run and probable_cost(entries, 1) != 0.0):
        pool = load_pool(settings.pool, budget=settings.budget)
        missing += [str(word) for word in ping_workers(pool) if isinstance(word, WorkerError)]
    return config, entries, "\n  ".join(["the run lacks", *missing]) if missing else ""


def check_flags(settings: Settings) -> list[str]:
    """Return a message for each flag whose value is invalid or conflicts with another flag."""
    faults = []
    for key, value in vars(settings).items():
        smallest = MINIMUM.get(key, int(type(value) is int))
        largest = MAXIMUM.get(key, sys.float_info.max)
        if type(value) in (int, float) and not smallest <= value <= largest:
            most = f", at most {largest}" if key in MAXIMUM else ""
            faults.append(f"--{key}={value}: expected {smallest} or more{most}")
        choices = CHOICES.get(key, [value])
        if value not in choices:
            faults.append(f"--{key}={value}: there are {', '.join(filter(None, choices))}")
    if settings.lora_rank and not settings.init_from:
        faults.append("--lora_rank: there is no pretrained model to freeze without --init_from")
    if settings.examples and settings.prompt_style == "short":
        faults.append("--examples: --prompt_style=short shows none; choose zero-shot")
    if "," in settings.data:
        faults.append(
            "--data: eval.py, which measures the Conductor, splits names at commas; rename the file"
        )
    if settings.shuffle and not settings.notes:
        faults.append("--shuffle: without --notes nothing tells who is who")
    if settings.wandb and importlib.util.find_spec("wandb") is None:
        faults.append("--wandb: the package wandb is not installed (pip install wandb)")
    return faults


def check_workers(settings: Settings, entries: list[dict]) -> list[str]:
    """Return a sentence for each fault of the pool and each conflict of the pool with a flag."""
    faults = check_pool(entries, settings.budget)
    if settings.notes:
        without = [name_of(entry) for entry in entries if not entry.get("note")]
        faults += [f"workers: --notes, and {name} has no note" for name in without]
    if settings.subset > len(entries):
        faults.append(f"workers: --subset={settings.subset}, and the pool has {len(entries)}")
    return faults


def check_money(settings: Settings, entries: list[dict], n_test: int):
    """Print an estimate of how many calls the run makes and what they cost.

    Raises ValueError if a run that may cost money has no --budget, or if --cost_weight is set and a
    worker has no price.
    """
    rollouts = settings.iterations * settings.n_questions * settings.n_rollouts
    if settings.recursion:
        rollouts += rollouts // 2
    n_checkpoints = (settings.iterations - 1) // settings.save_every  # all but the last one
    rollouts += n_checkpoints * min(N_TEST_AT_CHECKPOINT, n_test)
    # At the end, the Conductor and random workflows are measured on all held-out problems. With
    # --shuffle, the Conductor is measured twice.
    rollouts += (2 + settings.shuffle) * n_test
    calls = 3 * rollouts + len(entries) * n_test
    cost = probable_cost(entries, calls)
    if cost == 0:
        print0(f"about {calls:,} calls, three a workflow, at no cost")
    demand_budget(entries, settings.budget, calls, "this run")
    if settings.cost_weight and cost is None:
        raise ValueError("--cost_weight weighs dollars, and a worker has no price")


def bytes_for(settings: Settings, config: Config, recompute: bool) -> float:
    """Estimate the peak memory of a process on its device, in bytes.

    What torch itself takes, such as the CUDA context and unused cached blocks, is not counted.

    Args:
        recompute: Whether the backward pass computes activations again, so that only the input of
            every layer, and the values inside one layer at a time, are in memory.
    """
    n, world = count_parameters(config), dist.get_world_size()
    n_trained = count_parameters(config, settings.lora_rank)
    width = dtype_for(config, settings.device).itemsize
    hidden, layers, vocab = config.hidden_size, config.num_hidden_layers, config.vocab_size
    kv = 2 * config.num_key_value_heads * config.head_dim * width  # bytes per token and layer

    # At all times: this rank's share of the trained weights and of Adam's two moments, in fp32 (12
    # bytes for each weight), and of the weights that LoRA freezes; and a whole reference.
    share = 0 if settings.offload else 1 / world
    frozen = width * n if settings.lora_rank else 0
    weights = share * (12 * n_trained + frozen)
    reference = width * n if settings.beta else 0

    # While sampling: a whole copy of the model, and the keys and values of this process's rollouts.
    n_tokens = settings.n_questions * (
        PROMPT + settings.n_rollouts // world * settings.max_new_tokens
    )
    cache = layers * kv * n_tokens
    if settings.device == "cuda":
        cache = min(cache, device_bytes("cuda") / 5)  # the limit that sample.grid_shape sets

    # While learning: gradients, the layers that FSDP has gathered (with their gradients),
    # activations, and logits.
    row = settings.token_budget + PROMPT  # tokens of a packed row
    alive = 1 if recompute else layers  # layers whose activations are kept
    gathered = (2 * width + 4) * (2 * hidden * vocab + 2 * n / layers)
    # For each token: the input of every layer, and the values inside the layers that are alive.
    n_activations = layers * hidden + alive * (10 * hidden + 5 * config.intermediate_size)
    # Keys and values: each of a prompt's completions gets a copy of the prompt's.
    n_seen = settings.n_rollouts * PROMPT + settings.token_budget
    copies = alive * kv * n_seen
    logits = 20 * min(row * vocab, HEAD_LOGITS[settings.device])
    learning = share * 4 * n_trained + gathered + row * width * n_activations + copies + logits
    return weights + reference + max(width * n + cache, learning)


def device_bytes(device: str) -> int:
    """Return the size of a GPU's memory, or of a process's share of the host's memory, in bytes."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[1]
    return host_bytes() // ranks_here()


def host_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def needs_recompute(settings: Settings, config: Config) -> bool:
    """Return whether the device lacks the memory to keep the activations of all layers."""
    return bytes_for(settings, config, recompute=False) > 0.9 * device_bytes(settings.device)


def check_room(settings: Settings, config: Config):
    """Check that memory and disk space suffice for the run. In a dry run, also print the sizes.

    Raises ValueError, naming what is lacking, if memory or disk space is too small.
    """
    n, world = count_parameters(config), dist.get_world_size()
    n_trained = count_parameters(config, settings.lora_rank)
    # The size of the Conductor's weights in a checkpoint, in bytes
    whole = dtype_for(config, settings.device).itemsize * n
    peak = bytes_for(settings, config, needs_recompute(settings, config))

    # In host memory: while saving a checkpoint, rank 0 holds a whole copy of the weights, and each
    # rank holds two copies of the state file that it is writing.
    host = whole + ranks_here() * 2 * min(STATE_FILE, 12 * n_trained / world)
    if settings.offload:
        host += ranks_here() * 16 * n / world
    if settings.device == "cpu":
        host += ranks_here() * peak
    # On disk: the weights of every checkpoint and of the reference, and up to two states, because
    # the previous checkpoint's state is deleted only after the newest one is written.
    n_checkpoints = math.ceil(settings.iterations / settings.save_every)
    disk = whole * (n_checkpoints + 1) + 12 * n_trained * min(2, n_checkpoints)
    # --out may not exist yet; its nearest parent that exists is on the same disk.
    existing = next(filter(Path.exists, Path(settings.out, "new").absolute().parents))

    if settings.dry_run:
        print0(f"{n / 1e9:.3f} billion parameters, trained by {world} x {settings.device}, need")
    lacking = []
    for needed, present, where in (
        (peak, device_bytes(settings.device), f"of each process's {settings.device} memory"),
        (host, host_bytes(), "of the machine's memory"),
        (disk, shutil.disk_usage(existing).free, "of disk"),
    ):
        sentence = f"{needed / GIB:.1f} GiB {where} (there are {present / GIB:.1f})"
        if needed > present:
            lacking.append(sentence)
        if settings.dry_run:
            print0(f"  {sentence}")
    if lacking:
        raise ValueError(
            f"the run needs {', '.join(lacking)}. More GPUs, --lora_rank, --offload, fewer "
            "--n_questions or a smaller --token_budget take less memory; a larger --save_every "
            "takes less disk"
        )


def blank_rollout(n_prompt: int, n_written: int) -> Rollout:
    """Return a dummy rollout for a trial update, with these lengths of prompt and completion."""
    tokens = dict(prompt_ids=[0] * n_prompt, tokens=[0] * n_written, logprobs=[0.0] * n_written)
    return Rollout("", advantage=1.0, **tokens)


def largest_step(
    model: Qwen, optimizer, reference: Qwen | None, settings: Settings, n_prompt: int = PROMPT
):
    """Do one update that takes as much memory as any of the run's; reset Adam's state to zeros.

    If memory is too small for the run's updates, the run thus fails here, before workers are paid
    for rollouts. The optimizer's learning rate must still be 0, as `adam` sets it, so that no
    weight changes. A micro-batch takes the most memory if the completions of one long prompt fill
    the token budget, because attention copies the prompt's keys and values for each of them. Two
    such micro-batches are run, because memory peaks in the second one, when the first one's
    gradients are in memory as well. On a CPU, a small update is done instead, just to create Adam's
    state.

    Args:
        n_prompt: The number of tokens in the longest prompt.
    """
    size, n_prompt = (settings.token_budget, n_prompt) if model.device.type == "cuda" else (64, 8)
    n_written = min(settings.max_new_tokens, max(1, size // settings.n_rollouts))
    rollouts = [blank_rollout(n_prompt, n_written)] * (size // n_written) * 2
    update(model, optimizer, rollouts, beta=settings.beta, reference=reference, token_budget=size)
    for state in optimizer.state.values():
        for tensor in state.values():
            tensor.zero_()


def try_run(settings: Settings, config: Config, entries: list[dict]):
    """Do the update of `largest_step` with random weights, and print how long it takes.

    If the pool's `entries` are given and all workers are free, also prints an estimate of how long
    the whole run takes. On a CPU, a model of more than 100 million parameters is not tried.
    """
    if settings.device == "cpu" and count_parameters(config) > 1e8:
        return print0("no update was tried: a model of this size takes a GPU")
    model = shard(empty_model(config, settings.lora_rank), settings)
    model.to_empty(device="cpu" if settings.offload else settings.device)
    for p in model.parameters():
        p.detach().to_local().normal_(std=0.02)

    optimizer = adam(model, settings.beta2)
    reference = whole_copy(model, settings) if settings.beta else None
    seconds = seconds_of(lambda: largest_step(model, optimizer, reference, settings))
    memory = f" and {torch.cuda.max_memory_allocated() / GIB:.1f} GiB of GPU memory"
    print0(f"the trial update took {seconds:.1f} s{memory if settings.device == 'cuda' else ''}")
    if entries and probable_cost(entries, 1) == 0.0:
        print_duration(model, optimizer, reference, settings)
    elif entries:
        print0("how long the run takes depends on its workers: the first iteration tells")


def print_duration(model: Qwen, optimizer, reference: Qwen | None, settings: Settings):
    """Estimate from short measurements how long the run takes, and print the estimate.

    The measurements time the sampling of one iteration, the learning from one question, and one
    call to each worker.
    """
    n_prompt = 50 if settings.prompt_style == "short" else PROMPT
    n_written = settings.max_new_tokens // 2
    n_rollouts = max(1, settings.n_rollouts // dist.get_world_size())
    prompts = [[i] * n_prompt for i in range(settings.n_questions)]
    rollouts = [blank_rollout(n_prompt, n_written)] * n_rollouts
    print0("timing the sampler, an update, and one call of each worker …")
    sampler = whole_copy(model, settings)
    pool = load_pool(settings.pool)
    ping_workers(pool)  # opens the connections, so that the timed pings need not
    sampling = seconds_of(lambda: generate(sampler, prompts, n_rollouts, n_written))
    learning = settings.n_questions * seconds_of(
        lambda: update(
            model,
            optimizer,
            rollouts,
            beta=settings.beta,
            reference=reference,
            token_budget=settings.token_budget,
        )
    )
    n_calls = 3 * settings.n_questions * settings.n_rollouts
    calling = n_calls / len(pool) * seconds_of(lambda: ping_workers(pool))
    total = settings.iterations * (sampling + learning + calling)
    print0(
        f"the run takes about {as_duration(total)}, with completions of {n_written} tokens: "
        f"{settings.iterations} iterations of {sampling:.1f} s to sample, {calling:.1f} s to call "
        f"workers and {learning:.1f} s to learn; a warm start and held-out problems come on top"
    )


def seconds_of(job: Callable) -> float:
    started = time.perf_counter()
    job()
    return time.perf_counter() - started


# ---- Ranks, and the model on all of them (FSDP) -------------------------------------------------


def read_shape(start: str) -> Config:
    """Return the Config of the model `start`.

    Raises ValueError if the tokenizer has ids for which the model has no embedding.
    """
    config = Config.from_pretrained(start)
    check_ids(Tokenizer.from_pretrained(start), config)
    return config


def shard(model: Qwen, settings: Settings) -> Qwen:
    """Divide weights, gradients and Adam's state among the ranks (FSDP2); return the same model.

    Trained weights stay in fp32. With LoRA, the frozen weights are converted to the dtype that the
    model computes in. Also sets the model's `recompute` and `compute_device`.
    """
    mesh = dist.init_device_mesh(settings.device, (dist.get_world_size(),))
    dtype = dtype_for(model.config, settings.device)
    mixed = MixedPrecisionPolicy(dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    offload = (
        CPUOffloadPolicy(pin_memory=settings.device == "cuda")
        if settings.offload
        else OffloadPolicy()
    )
    for p in model.parameters():
        if not p.requires_grad:
            p.data = p.data.to(dtype)
    model.recompute = needs_recompute(settings, model.config)
    model.compute_device = torch.device(settings.device) if settings.offload else None
    layers = model.model.layers if count_parameters(model.config) >= SMALL else []
    for module in (*layers, model):
        fully_shard(module, mesh=mesh, mp_policy=mixed, offload_policy=offload)
    return model


@torch.no_grad()
def whole_copy(model: Qwen, settings: Settings) -> Qwen:
    """Gather an unsharded copy of the model on every rank, in the dtype that the model computes in.

    With LoRA, the copy has LoRA matrices, too. Merged into weights of 16 bits, a small update would
    be rounded away, and the copy would not sample from the policy that is being trained. All ranks
    call this.
    """
    whole = empty_model(model.config, settings.lora_rank)
    dtype = dtype_for(model.config, model.device)
    state = {
        name: p.to(model.device, dtype, copy=True).full_tensor()
        for name, p in model.named_parameters()
    }
    whole.load_state_dict(state, assign=True, strict=False)
    if model.config.tie_word_embeddings:
        whole.lm_head.weight = whole.model.embed_tokens.weight
    state.clear()  # so that `join` can free the weights that it joins
    can_join = whole.device.type == "cuda" and not settings.lora_rank
    return whole.join() if can_join else whole


def adam(model: Qwen, beta2: float) -> torch.optim.AdamW:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=0.0, betas=(0.9, beta2), weight_decay=0.0, fused=True)


def on_all_ranks(job: Callable):
    """Run a job on every rank, and return this rank's result.

    If the job fails with one of the errors below on any rank, the program ends and prints the error
    of the lowest such rank. All ranks call this.
    """
    result = None
    errors = []
    try:
        result = job()
    except (OSError, ValueError, WorkerError, SystemExit) as e:
        is_full = getattr(e, "errno", None) == errno.ENOSPC
        errors = [f"the disk is full: {e}. Free some of it; {GO_ON}" if is_full else str(e)]
    errors = all_gather(errors)
    if errors:
        leave(errors[0])
    return result


def on_rank0(job: Callable):
    """Run a job on rank 0, and return its result on all ranks.

    If the job fails, the program ends. All ranks call this.
    """
    outcome = [on_all_ranks(job if dist.get_rank() == 0 else lambda: None)]
    dist.broadcast_object_list(outcome)
    return outcome[0]


def leave(message: str):
    """End the program. All ranks call this.

    Rank 0 prints the message, and every rank exits with status 1. With an empty message, nothing is
    printed and the status is 0.
    """
    status = message if dist.get_rank() == 0 else 1
    dist.destroy_process_group()  # otherwise the group's threads may crash the exiting program
    raise SystemExit(status if message else 0)


def all_gather(mine: list) -> list:
    """Return the concatenation of all ranks' lists, on every rank."""
    lists = [None] * dist.get_world_size()
    dist.all_gather_object(lists, mine)
    return [*itertools.chain(*lists)]


def ranks_here() -> int:
    """Return the number of this run's processes on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def print0(line: str):
    """Print a line on rank 0; other ranks print nothing."""
    if os.environ.get("RANK", "0") == "0":  # set by torchrun
        print(line, flush=True)


# ---- What a run writes --------------------------------------------------------------------------


def metrics_of(iteration: int, groups: Groups, reports: list[dict], seconds: dict) -> dict:
    """Return an iteration's line of metrics.jsonl as a dict, in which None means "no value".

    reward, accuracy, parsed, steps, workers, by_kind and steps_by_kind cover first rounds only, and
    again_accuracy covers second rounds only. All other metrics of rollouts cover both.
    """
    rollouts = [*itertools.chain(*groups)]
    first = [r for r in rollouts if r.previous is None]
    known = [r for r in first if r.reward is not None]
    ran = [r for r in first if r.workflow]
    again = [r for r in rollouts if r.previous and r.reward is not None]
    costs = [reply.cost for r in rollouts for reply in r.replies if reply]
    names = Counter(name for r in ran for name in r.names)
    kinds = dict.fromkeys(r.problem.kind for r in first)
    mean = evaluation.mean
    metrics = {
        "iteration": iteration,
        "reward": mean([r.reward for r in known]),
        "accuracy": mean([r.right for r in known]),
        # Accuracy on held-out problems. `measure_held_out` fills it in at each checkpoint but the
        # last.
        "held_out": None,
        # Share of completions that contain a valid workflow.
        "parsed": mean([r.workflow is not None for r in first if r.tokens]),
        # Share of groups whose rewards teach nothing, because the advantages are all 0.
        "flat": mean([not any(r.advantage for r in group) for group in groups]),
        # The number of rollouts without a reward, and the error of the first lost rollout.
        "lost": sum(r.reward is None for r in rollouts),
        "error": next((r.error for r in rollouts if r.error), None),
        "steps": mean([len(r.workflow.steps) for r in ran]),
        "calls": len(costs),
        # What the calls cost, in dollars.
        "cost": None if None in costs else sum(costs),
        # Mean length of a completion, and the share of completions that max_new_tokens cut off.
        "tokens": mean([len(r.tokens) for r in rollouts]),
        "cut": mean([not r.finished for r in rollouts]),
        # Mean absolute difference between the sampler's and the first update's log-probabilities.
        "gap": reports[0]["gap"],
        # Peak memory of rank 0's GPU so far, in GiB.
        "memory": torch.cuda.max_memory_allocated() / GIB,
        # Worker's name -> its share of all steps.
        "workers": {name: n / names.total() for name, n in names.items()},
        "again_accuracy": mean([r.right for r in again]),
        **seconds,
        "by_kind": {k: mean([r.right for r in known if r.problem.kind == k]) for k in kinds},
        "steps_by_kind": {
            k: mean([len(r.workflow.steps) for r in ran if r.problem.kind == k]) for k in kinds
        },
    }
    # Means over the iteration's updates, without values that are missing or not finite
    for key in ("approx_kl", "clipfrac", "kl", "entropy", "grad_norm", "skipped"):
        values = [report[key] for report in reports if report[key] is not None]
        metrics[key] = mean([value for value in values if math.isfinite(value)])
    return metrics


def log(settings: Settings, metrics: dict, seconds_left: float):
    """Append a line to metrics.jsonl, send it to W&B if wanted, and print its numbers and the ETA.

    Only rank 0 calls this.
    """
    with open(f"{settings.out}/metrics.jsonl", "a") as file:
        file.write(json.dumps(metrics) + "\n")
    if settings.wandb:
        sys.modules["wandb"].log(metrics, step=metrics["iteration"])
    numbers = [
        f"{key} {value:.3g}"
        for key, value in metrics.items()
        if key != "iteration" and isinstance(value, (int, float))
    ]
    lost = f", the first by: {metrics['error']}" if metrics["error"] else ""
    done = f"{metrics['iteration'] + 1:4d}/{settings.iterations}"
    print0(f"{done} {' '.join(numbers)} ETA {as_duration(seconds_left)}{lost}")
    if metrics["parsed"] == 0:
        print0(
            f"no completion was a valid workflow; {trace_file(settings, metrics['iteration'])} has "
            "them. --warm_steps, another --prompt_style or more --max_new_tokens may help"
        )


def as_duration(seconds: float) -> str:
    """Format seconds as hours:minutes:seconds."""
    return str(datetime.timedelta(seconds=round(seconds)))


LOCKS = []  # keeps lock files open: closing one would release its lock


def lock(file: Path) -> str:
    """Lock --out against other runs until this process ends, and return the lock file's text.

    Raises ValueError if another run, which the message names, holds the lock, or if --out cannot
    be written. If the file system cannot lock files, prints a warning and continues.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        held = open(file, "a+")  # "w" would erase the text of a run that holds the lock
    except OSError as e:
        raise ValueError(f"--out={file.parent} cannot be written: {e.strerror}") from None
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(
            f"--out={file.parent} is in use by a run with {file.read_text().strip()}"
        ) from None
    except OSError as e:
        print0(f"--out={file.parent} is not locked, as its file system cannot do that: {e}")
    held.truncate(0)
    held.write(f"pid {os.getpid()} on {socket.gethostname()} since {datetime.datetime.now()}\n")
    held.flush()
    os.fsync(held.fileno())  # so that other machines see the text
    LOCKS.append(held)
    return file.read_text()


def lock_on_all_machines(file: Path):
    """Lock --out on rank 0, and end the program if any rank does not see rank 0's lock file."""
    text = on_rank0(lambda: lock(file))
    is_shared = file.exists() and file.read_text() == text
    hosts = all_gather([] if is_shared else [socket.gethostname()])
    if hosts:
        leave(
            f"--out={file.parent} on {', '.join({*hosts})} is not the folder of rank 0: all "
            "machines need one that they share"
        )


def discard_empty(out: Path):
    """Clean up after a command that locked --out, but ended before its run began.

    Removes the lock and an empty file of replies, and then --out, if nothing else is in it.
    """
    if LOCKS and not (out / "settings.json").exists():
        (out / "lock").unlink(missing_ok=True)
        replies = out / "replies"
        if replies.exists() and not replies.stat().st_size:
            replies.unlink()
        with contextlib.suppress(OSError):  # The folder is not empty.
            out.rmdir()


def open_folder(settings: Settings, first_iteration: int):
    """Prepare --out for the iterations from first_iteration on, and start W&B if it is wanted.

    Writes settings.json, drops the metrics of iterations that will be repeated and, if iterations
    follow, the measurement of the last checkpoint. Tidies the checkpoints, in case the run was
    killed before it did so.
    """
    os.makedirs(f"{settings.out}/traces", exist_ok=True)
    if settings.wandb:
        start_wandb(settings)
    write_json(f"{settings.out}/settings.json", asdict(settings))
    file = Path(settings.out, "metrics.jsonl")
    lines = read_metrics(file) if file.exists() else []
    replace_file(file, [line for line in lines if json.loads(line)["iteration"] < first_iteration])
    if first_iteration < settings.iterations:
        for file in evaluation.output_files(f"{settings.out}/test.json"):
            Path(file).unlink(missing_ok=True)
    if first_iteration:
        tidy(Path(settings.out))


def start_wandb(settings: Settings):
    """Start a run on Weights & Biases. Raises ValueError if it fails to start."""
    try:
        import wandb

        wandb.init(project="conductor", config=asdict(settings), dir=settings.out, resume="auto")
    except Exception as e:
        raise ValueError(f"--wandb: {reason(e)}") from None


def read_metrics(file: Path) -> list[str]:
    """Return the lines of metrics.jsonl, except a last line that was cut short by a kill.

    Raises ValueError, naming the line, if any other line is damaged.
    """
    *lines, _ = file.read_text(errors="replace").split("\n")
    for number, line in enumerate(lines, 1):
        with remedy(f"{file}, line {number},", "Delete the line; only the curves will lack it"):
            json.loads(line)["iteration"]
    return lines


def replace_file(file: Path, lines: Iterable[str]):
    """Write a file atomically: a kill or a power cut leaves either its old or its new content."""
    unfinished = Path(f"{file}.tmp")
    unfinished.write_text("".join(f"{line}\n" for line in lines))
    sync(unfinished)
    unfinished.replace(file)
    sync(file.parent)


def sync(path: Path):
    """Flush a file's contents, or a folder's list of names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def trace_file(settings: Settings, iteration: int) -> Path:
    return Path(settings.out, f"traces/{iteration:05d}.jsonl")


def write_trace(settings: Settings, iteration: int, groups: Groups):
    """Write all rollouts of an iteration to its trace file, with everything that `learn` needs."""
    rows = []
    for r in itertools.chain(*groups):
        about = {"expected": r.problem.answer, "kind": r.problem.kind}
        if settings.shuffle:
            about["pool_names"] = [worker.name for worker in r.pool]
        rows.append(json.dumps(rollout_to_json(r, with_tokens=True) | about))
    replace_file(trace_file(settings, iteration), rows)


@contextlib.contextmanager
def remedy(file: Path | str, advice: str):
    """Turn any error in the `with` block, which reads `file`, into a ValueError with `advice`."""
    try:
        yield
    except (Exception, CheckpointException) as e:  # the latter is a BaseException
        raise ValueError(f"{file} is damaged: {reason(e)}. {advice}") from None


def reason(e: BaseException) -> str:
    """Return an error's class and text, as in "KeyError: 'x'"."""
    if isinstance(e, CheckpointException):  # holds the errors of several ranks; report the first
        e, _ = next(iter(e.failures.values()))
    return f"{type(e).__name__}: {e}"


def read_trace(run: Run, settings: Settings, iteration: int) -> Groups | None:
    """Return an iteration's rollouts from its trace file, or None if there is no file.

    Raises ValueError if the file is damaged or incomplete, or if one of its questions is not in
    --data.
    """
    file = trace_file(settings, iteration)
    if not file.exists():
        return None
    problems = {(problem.id, problem.question): problem for problem in run.problems}
    groups = {}  # (a question's call_prefix, whether this is its second round) -> rollouts

    def labels(groups: Iterable[list[Rollout]]) -> list:
        return [(r.call_prefix, r.number) for r in itertools.chain(*groups)]

    with remedy(file, "Delete it, and --resume rolls out again; replies are not paid for twice"):
        for r in read_rollouts(str(file)):
            if (r.problem_id, r.question) not in problems:
                raise ValueError(f"--data={settings.data} no longer has {r.problem_id}, as asked")
            r.pool = run.pool
            r.problem = problems[r.problem_id, r.question]
            groups.setdefault((r.call_prefix, r.previous is not None), []).append(r)
        # Check that no rollout is missing: n_questions groups, each of them complete and in order,
        # and then the second rounds that continue them.
        first = [group for group in groups.values() if group[0].previous is None]
        asked = [copies(group[0], settings) for group in first]
        if settings.recursion:
            asked += second_rounds(first, iteration)
        if len(first) != settings.n_questions or labels(groups.values()) != labels(asked):
            raise ValueError("rollouts are missing")
    return list(groups.values())


NUMBERED = "checkpoints/[0-9][0-9][0-9][0-9][0-9]"  # excludes, for example, 00040.backup
RELEARN = "Delete this folder, and --resume learns its iterations again, from the rollouts on disk"


def newest_checkpoint(settings: Settings) -> Path | None:
    """Return the folder of the checkpoint to resume from, or None to start from the beginning.

    Raises ValueError, naming the folder, if this checkpoint is damaged or any other one has no
    weights.
    """
    if not settings.resume:
        return None
    newest = None
    for folder in sorted(Path(settings.out).glob(NUMBERED)):
        with remedy(folder, RELEARN):
            (folder / "model.safetensors").stat()
        if (folder / "state").exists():
            newest = folder
    if newest:
        with remedy(newest, RELEARN):
            check_sums(newest)
    return newest


def check_sums(folder: Path):
    """Raise ValueError if any file of a checkpoint has changed or vanished since it was saved."""
    file = folder / "checksums.json"
    if file.exists():  # this program's third edition wrote no checksums
        found = checksums(folder)
        written = read_json(file)
        changed = [name for name, crc in written.items() if found.get(name) != crc]
        if changed:
            raise ValueError(f"{', '.join(changed)} changed or vanished")


def checksums(folder: Path) -> dict[str, int]:
    """Return {path inside the folder: CRC-32} for all files in a folder except checksums.json.

    Reads about 2 GB/s, so a 7B model's checkpoint with its state takes about a minute.
    """
    sums = {}
    for file in sorted(folder.rglob("*")):
        if file.is_dir() or file.name == "checksums.json":
            continue
        crc = 0
        with open(file, "rb") as f:
            for block in iter(lambda: f.read(1 << 20), b""):
                crc = zlib.crc32(block, crc)
        sums[str(file.relative_to(folder))] = crc
    return sums


def save(run: Run, settings: Settings, done: int):
    """Write a checkpoint after `done` iterations.

    The checkpoint holds the Conductor and, in state/, what --resume needs; each rank writes its
    part of the state. The folder is named "unfinished" until it is complete. It is then renamed to
    `done` in five digits, such as 00040.
    """
    folder = Path(settings.out, "checkpoints/unfinished")
    save_for_use(run, settings, folder)
    state = trained(run)
    writer = dcp.HuggingFaceStorageWriter(
        folder / "state", fqn_to_index_mapping=files_of(state), save_distributed=True
    )
    try:
        dcp.save(state, storage_writer=writer)  # also flushes each file to the disk
    except CheckpointException as e:  # raised on all ranks
        leave(f"the checkpoint could not be written: {reason(e)}. {GO_ON}")

    def finish():
        replace_file(folder / "checksums.json", [json.dumps(checksums(folder))])
        finished = folder.with_name(f"{done:05d}")
        # This folder may already exist, without its state, if later checkpoints were deleted.
        shutil.rmtree(finished, ignore_errors=True)
        sync(folder / "state")
        sync(folder)
        folder.rename(finished)
        sync(finished.parent)
        tidy(Path(settings.out))

    on_rank0(finish)


def load_state(run: Run, checkpoint: Path):
    """Load the weights, Adam's state and the shares of wrong answers from a checkpoint.

    If --data has kinds of question that the checkpoint does not know, their shares stay 1.
    """
    reader = dcp.HuggingFaceStorageReader(checkpoint / "state")
    wanted = trained(run)

    def load():
        with remedy(checkpoint, RELEARN):
            saved = reader.read_metadata().state_dict_metadata
            new = [name for name in wanted if name.startswith("wrong ") and name not in saved]
            for name in new:
                del wanted[name]
            dcp.load(wanted, storage_reader=reader)

    on_all_ranks(load)


def save_for_use(run: Run, settings: Settings, folder: Path):
    """Write the Conductor in Hugging Face's file layout, in the dtype that it computes in.

    Also writes conductor.json, which tells other commands how to prompt the Conductor.
    """
    whole = whole_copy(run.model, settings)

    def write():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        pool = os.path.abspath(settings.pool) if os.path.isfile(settings.pool) else settings.pool
        save_prompting(folder, run.prompting, pool, [worker.name for worker in run.pool])
        try:
            run.tokenizer.save_pretrained(folder)
            whole.save_pretrained(folder)
        except Exception as e:  # tokenizers and safetensors raise errors other than OSError
            raise OSError(f"{folder} could not be written: {e}. {GO_ON}") from None
        for file in folder.iterdir():
            sync(file)

    on_rank0(write)


def trained(run: Run) -> dict[str, torch.Tensor]:
    """Return {name: tensor} for all tensors that training changes.

    These are the trained weights in fp32, Adam's state, and the shares of wrong answers.
    """
    state = {f"wrong {kind}": share for kind, share in run.wrong_share.items()}
    for name, p in run.model.named_parameters():
        if p.requires_grad:
            state[name] = p.detach()
            state |= {f"{name} {key}": tensor for key, tensor in run.optimizer.state[p].items()}
    return state


STATE_FILE = 1 << 28  # maximum bytes of a file in state/; a larger tensor gets a file to itself


def files_of(state: dict[str, torch.Tensor]) -> dict[str, int]:
    """Assign each tensor to a numbered file, counting from 1: name -> number.

    A rank holds two copies of a file in memory while writing it, so files are kept small.
    """
    files = {}
    number, size = 1, 0
    for name, tensor in state.items():
        n_bytes = tensor.numel() * tensor.element_size() // dist.get_world_size()
        if size and size + n_bytes > STATE_FILE:
            number += 1
            size = 0
        files[name] = number
        size += n_bytes
    return files


def tidy(out: Path):
    """Link `checkpoint` to the newest checkpoint, and delete state/ in all earlier ones."""
    folders = sorted(out.glob(NUMBERED))
    *earlier, newest = [folder for folder in folders if (folder / "state").exists()]
    link = out / "checkpoint.new"
    link.unlink(missing_ok=True)  # a run that was killed here may have left the link
    link.symlink_to(newest.relative_to(out))
    link.replace(out / "checkpoint")
    for folder in earlier:
        shutil.rmtree(folder / "state", ignore_errors=True)


# ---- The command line ---------------------------------------------------------------------------


def read_command(argv: list[str]) -> Settings:
    """Parse a command line into Settings.

    Without --preset, the GPUs determine the preset, and a new run prints which one and why.
    With --resume, flags that are not given keep the values that the run has in its settings.json.
    Without --device, a new run uses GPUs if each process has one and the model is not tiny.
    """
    processes = ranks_here()
    gpu_bytes = [
        torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count())
    ]
    has_gpus = len(gpu_bytes) >= processes
    given = Settings()
    words = configure(given, argv)

    # Find the preset.
    preset = given.preset
    if not preset:
        has_use = has_gpus and given.device != "cpu"
        preset, why = default_preset(processes, gpu_bytes if has_use else [])
        if not given.resume:
            print0(f"--preset={preset}, free of charge in the laptop world: {why}")
    if preset not in PRESETS or words:
        usage_error(
            f"expected --key=value, --preset one of {', '.join(PRESETS)}, not {words or preset}"
        )

    # Let the given flags override the preset's defaults or, with --resume, the run's settings.
    settings = Settings(**PRESETS[preset], preset=preset)
    if given.lora_rank:
        settings.lr *= 10
    configure(settings, argv)
    settings.out = os.path.normpath(settings.out or f"out/{preset}")
    file = os.path.join(settings.out, "settings.json")
    if settings.resume and os.path.exists(file):
        settings = resumed_settings(file, settings.out, argv)
    faults = check_flags(settings)
    if faults:
        usage_error("\n  ".join(faults))

    # Choose the device.
    if settings.device == "cuda" and not has_gpus:
        usage_error(f"--device=cuda: there are {len(gpu_bytes)} GPUs for {processes} processes")
    if not settings.device:
        use_gpus = has_gpus and not is_tiny(settings.init_from)
        settings.device = "cuda" if use_gpus else "cpu"
    return settings


def is_tiny(init_from: str) -> bool:
    """Return whether a model is so small that a CPU trains it faster than a GPU.

    A model that is not in a local folder counts as larger, whether downloaded or not.
    """
    if not init_from:
        return True
    is_here = os.path.exists(f"{init_from}/config.json")
    return is_here and count_parameters(Config.from_pretrained(init_from)) < TINY


# Flags that may be changed with --resume, because the run remains the same experiment.
MAY_CHANGE = {
    "budget",
    "device",
    "dry_run",
    "iterations",
    "n_test",
    "offload",
    "out",
    "resume",
    "save_every",
    "token_budget",
    "wandb",
    "workflow_timeout",
}
# Old name of a flag -> present name. Runs of the third edition, which used the old names, can still
# be resumed.
OLD_FLAGS = {
    "prompt": "prompt_style",
    "questions": "n_questions",
    "review": "ask_solved_probability",
    "rollouts": "n_rollouts",
    "test": "n_test",
}
# Flags that the third edition did not have. Add the name of every new flag; otherwise older runs,
# whose settings.json lacks it, cannot be resumed.
NEW_FLAGS = {"device", "examples", "lora_rank", "notes", "reward", "share_replies", "shuffle"}


def resumed_settings(file: str, out: str, argv: list[str]) -> Settings:
    """Return the settings in a run's settings.json, updated with the flags of the command line.

    A flag that changes a setting not in MAY_CHANGE is a usage error, because the run would become a
    different experiment.
    """
    try:
        values = {OLD_FLAGS.get(key, key): value for key, value in read_json(file).items()}
        if not values.get("recursion"):
            values.pop("recursion_rewards", None)  # a removed flag, which only recursion used
        saved = Settings(**values)
    except (ValueError, TypeError) as e:
        raise SystemExit(
            f"{file} cannot be read: {e}. Delete it, and start the run again, with all its flags "
            "and without --resume: its replies and rollouts are used again"
        ) from None
    absent = sorted({*vars(saved)} - {*values} - NEW_FLAGS)
    if absent:
        raise SystemExit(f"{file} does not say {', '.join(absent)}: it is of another train.py")

    settings = replace(saved)
    configure(settings, argv)
    settings.out = out
    changed = [
        f"--{key}={value} (the run has {getattr(saved, key)!r})"
        for key, value in vars(settings).items()
        if value != getattr(saved, key) and key not in MAY_CHANGE
    ]
    if changed:
        usage_error(
            f"--resume goes on with the run in {out}, and this would be another experiment: "
            f"{', '.join(changed)}. Leave these flags out, or choose another --out."
        )
    if settings.iterations != saved.iterations:
        print0(
            f"--iterations={settings.iterations} instead of {saved.iterations}: from now on the "
            "learning rate's cosine ends there"
        )
    return settings


def default_preset(processes: int, gpu_bytes: list[int]) -> tuple[str, str]:
    """Return the preset that suits the GPUs, and the reason as a phrase to print.

    gpu_bytes lists the memory of each GPU. It is empty if the run cannot use GPUs.
    """
    if not gpu_bytes:
        return "laptop", "a tiny Conductor, as there is no GPU for each process"
    if processes > 1 and min(gpu_bytes) > 75e9:
        return "large", "Qwen2.5-7B, as there are GPUs of 80 GB"
    return "small", "Qwen2.5-0.5B-Instruct, as there are GPUs, but not two of 80 GB"


def interrupted(settings: Settings):
    """Handle Ctrl-C: end the program immediately, without waiting for workers' replies.

    A run that has begun leaves the same files as after a kill, so --resume can continue it.
    """
    if os.environ.get("RANK", "0") == "0":
        can_resume = os.path.exists(f"{settings.out}/settings.json") and not settings.dry_run
        more = "; the same command with --resume goes on" if can_resume else ""
        os.write(2, f"interrupted{more}\n".encode())  # `print` fails if a `print` was interrupted
        discard_empty(Path(settings.out))
    os._exit(130)


def main(argv: list[str]):
    """Run this program with the command-line arguments `argv`.

    The exit status is 0 if the run is complete or a dry run finds nothing missing, 1 if the run was
    refused or has stopped early, 2 if the command line is wrong, and 130 after Ctrl-C. torchrun
    turns every nonzero status into 1.
    """
    settings = read_command(argv)
    own_store = dict(store=dist.HashStore(), rank=0, world_size=1)  # for a run without torchrun
    if "RANK" in os.environ:  # set by torchrun, which has a store for all ranks
        own_store = {}
        # Have the kernel kill this process if torchrun dies (PR_SET_PDEATHSIG = 1, SIGKILL = 9).
        ctypes.CDLL(None).prctl(1, 9)
    if settings.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    # gloo carries Python objects between ranks. The timeout is long because ranks wait for each
    # other's workers. With slow workers, rank 0's final table alone takes hours.
    backend = "cpu:gloo,cuda:nccl" if settings.device == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=datetime.timedelta(days=1), **own_store)
    signal.signal(signal.SIGINT, lambda *_: interrupted(settings))
    try:
        train(settings)
    finally:
        discard_empty(Path(settings.out))
    dist.destroy_process_group()  # not after an error: NCCL would wait for the other ranks


if __name__ == "__main__":
    # If a user's file imports train, give it this module instead of a second copy.
    sys.modules["train"] = sys.modules["__main__"]
    main(sys.argv[1:])
