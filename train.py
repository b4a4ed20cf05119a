"""Train a Conductor with GRPO (§3).

    torchrun --nproc_per_node=2 train.py          the laptop world, free, with a model that fits the device
    torchrun --nproc_per_node=2 train.py --preset=paper --pool=today --budget=DOLLARS      the paper's run
    python train.py --preset=own --init_from=MODEL --pool=mine.json --data=mine.jsonl      your own everything
    python train.py --preset=NAME --dry_run       what a run takes on this machine, and all that it lacks

Every field of Settings is a flag, --key=value. A run writes into --out: metrics.jsonl (a line an iteration),
traces/ (every rollout with what its workers said), checkpoints/, and a link `checkpoint` to the newest one.
After a kill the same command with --resume goes on, with the rollouts that are on disk: none is paid
twice."""

import ctypes
import datetime
import itertools
import json
import math
import os
import random
import shutil
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path

# Sampling and learning want blocks of very different sizes, which segments that grow can serve in turn. torch
# reads this when it is imported, older versions under the second name.
for variable in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
    os.environ.setdefault(variable, "expandable_segments:True")

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tokenizers import Tokenizer as BPE, decoders, models, pre_tokenizers, trainers
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from tqdm import tqdm

import eval as evaluation
from eval import ABLATIONS, mean, measure, progress
from grpo import (
    HEAD_LOGITS,
    clipped_step,
    my_share,
    packed_logprobs,
    schedule,
    set_advantages,
    update,
)
from model import Config, Qwen, Tokenizer, compute_dtype, configure, fetch, write_json
from workers import (
    LOCAL,
    Reply,
    WorkerError,
    check_pool,
    demand_budget,
    ping_workers,
    load_function,
)
from workers import load_pool, probable_cost, read_pool
from workflow import Prompting, Rollout, Workflow, as_lists, messages, model_writer, roll_out
from workflow import rollout_from_json, rollout_to_json, save_prompting, strip


@dataclass
class Settings:
    preset: str = (
        ""  # one of PRESETS; "": what fits the device. The values below are those of laptop
    )
    out: str = ""  # the run's folder; "": out/PRESET
    seed: int = 1
    init_from: str = (
        ""  # a checkpoint's folder, or its name on Hugging Face's hub; "": a new tiny model
    )
    data: str = "laptop"  # the problems: a name that eval.py knows, or FILE.jsonl
    grader: str = ""  # FILE.py:NAME, for own problems that name none
    sandbox: str = "bwrap"  # or none: for a container that can be thrown away
    # the workers, and what they may cost
    pool: str = "local"  # a name that workers.py knows, or FILE.json
    budget: float = 0.0  # dollars, from this start of the run on; 0: no limit, where nothing costs
    workflow_timeout: float = 1800.0  # seconds after which a rollout is lost, not waited for
    # how the Conductor is asked, and what is done to its workflows
    prompt_style: str = "short"  # the laptop's line; ood, in, mixed: few-shot examples; zero-shot
    max_steps: int = 5
    max_new_tokens: int = 96
    ablate: str = ""  # subtasks: each becomes "Solve the question."; access: no step sees another
    subset: int = 0  # each question may use so many or more of the workers (§3.2); 0: all
    recursion: bool = False  # half of the questions get a second round (§3.2)
    # the objective (§3.1, Eqs. 1 and 2), and AdamW without weight decay
    cost_weight: float = (
        0.0  # advantage lost with each dollar above the mean of a question's rollouts
    )
    iterations: int = 160
    n_questions: int = 32  # of an iteration
    ask_solved_probability: float = (
        0.1  # chance to be asked of a question whose kind is always answered; 1: each in its turn
    )
    n_rollouts: int = 16  # of a question
    minibatches: int = 4  # optimizer steps of an iteration, each on its part of every group
    beta: float = (
        0.2  # weight of the KL to a reference policy, on a question that is never answered
    )
    lr: float = 7e-4
    beta2: float = 0.99
    # the device
    token_budget: int = 8192  # tokens of a micro-batch
    offload: bool = False  # weights, gradients and Adam's state in the CPU's memory
    # the warm start, which teaches the format
    warm_steps: int = (
        -1
    )  # -1: 400 for a new tiny model, 120 for one below 3B that is no Conductor, else 0
    warm_extensions: bool = (
        False  # its lessons name subsets of the workers, and some are second rounds
    )
    # what is measured and kept
    n_test: int = 225  # held-out problems at the end, and the first N_TEST_AT_CHECKPOINT of them at each checkpoint
    save_every: int = 40  # iterations between checkpoints
    wandb: bool = False  # wandb also gets the metrics
    resume: bool = False  # go on from the newest checkpoint in --out
    dry_run: bool = False  # say what the run takes and lacks, and do the largest update


# App. A.1. What is "" has to be said on the command line.
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
# The extensions of §3.2, in a laptop world with two workers for each trade. They start from "pairs", and
# their KL is to the policy that "pairs" started from, which still explores all workers and lengths.
PAIRS = dict(pool="local:pairs", warm_steps=1000, warm_extensions=True)
TUNE = dict(
    PAIRS, init_from="out/pairs/checkpoint", warm_steps=0, iterations=120, lr=3e-4, beta=0.05
)
PRESETS = {
    "laptop": {},
    "small": dict(
        init_from="Qwen/Qwen2.5-0.5B-Instruct",
        max_steps=3,
        n_questions=16,
        iterations=80,
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
}
RARELY_RIGHT = (
    0.8  # share of wrong answers to a question above which its right ones are in every minibatch
)
N_TEST_AT_CHECKPOINT = 72  # held-out problems, at each checkpoint


@dataclass
class Run:
    """What the iterations need beside the settings."""

    pool: list  # of workers
    problems: list
    test: list  # held-out problems
    tokenizer: Tokenizer
    model: Qwen  # sharded (FSDP)
    optimizer: torch.optim.Optimizer
    prompting: Prompting
    begin: int  # the iteration to begin with
    wrong_share: dict[str, torch.Tensor]  # the running share of wrong answers, by kind of question
    reference: Qwen | None = None  # π_ref, of the KL
    skipped: int = 0  # steps in a row, up to now, whose gradient was not finite


# ---- The run: each iteration rolls out first and second rounds, rewards them and learns --------------------


def train(settings: Settings, device: str):
    """The whole run, on every rank."""
    run = set_up(
        settings, device
    )  # It loads the newest checkpoint (--resume), or begins, with a warm start.
    for iteration in range(run.begin, settings.iterations):
        started = time.perf_counter()
        groups = read_rollouts(run, settings, iteration)  # of a run that was killed
        if groups is None:  # the usual case
            sampler = whole_copy(run.model)  # FSDP splits the weights over the ranks.
            seed = settings.seed * 1_000_000 + iteration  # for sampling; second rounds add 500,000
            asked = first_rounds(run, settings, iteration)
            groups = roll_out_on_all_ranks(sampler, run, asked, settings, seed)
            if settings.recursion:
                asked = second_rounds(groups, settings, iteration)
                groups += roll_out_on_all_ranks(sampler, run, asked, settings, seed + 500_000)
            del sampler  # The sampler and the gradients do not both fit.
            torch.cuda.empty_cache()  # Learning wants blocks of other sizes; and sampling again, below.
        for rollout in itertools.chain(*groups):
            rollout.reward = reward(rollout, settings)  # §3.1
        set_advantages(groups, settings.recursion, settings.cost_weight)  # Eq. 2
        write_rollouts(settings, iteration, groups)
        for group in (
            groups
        ):  # a running share of wrong answers, by which first_rounds asks solved kinds less
            if any(r.reward is not None for r in group):
                run.wrong_share[group[0].problem.kind].lerp_(
                    torch.tensor(group[0].wrong_share), 0.3
                )
        rolled_out = time.perf_counter()
        reports = learn(run, groups, settings, iteration)  # Eq. 1
        torch.cuda.empty_cache()
        seconds = {
            "rollout_s": rolled_out - started,
            "learning_s": time.perf_counter() - rolled_out,
        }

        done, held_out = iteration + 1, None
        is_due, is_last = done % settings.save_every == 0, done == settings.iterations
        if is_due and not is_last:
            answered = conduct_problems(
                run, run.test[:N_TEST_AT_CHECKPOINT], settings, f"test:{iteration}"
            )
            held_out = measure(answered)["accuracy"]
        log(settings, iteration, groups, reports, held_out, seconds)
        is_spent = any(all_gather([run.pool[0].budget and run.pool[0].budget.refused]))
        if is_due or is_last or is_spent:
            save(run, settings, done)
        if is_spent:
            leave(
                f"the budget is spent: stopped after iteration {done}, with a checkpoint; --resume with "
                "another --budget goes on"
            )
    print_results(run, settings)


def reward(rollout: Rollout, settings: Settings) -> float | None:
    """§3.1: 0 without a workflow, 0.5 for a wrong answer, 1 for a right one. None: a call was lost, or its
    cost would count (--cost_weight) and is unknown."""
    if rollout.right is None or settings.cost_weight and rollout.cost is None:
        return None
    if rollout.workflow is None:
        return 0.0
    return 1.0 if rollout.right else 0.5


def learn(run: Run, groups: list[list[Rollout]], settings: Settings, iteration: int) -> list[dict]:
    """Eq. 1: an optimizer step on each minibatch. What is rarely right is in all of them, else the KL of the
    other steps undoes what one of them has learned; this is not in the paper. From the second step on π is
    not the sampler's, and the clip acts. Returns what `update` says of each step."""
    run.optimizer.param_groups[0]["lr"] = settings.lr * schedule(
        iteration, settings.iterations, 0.03
    )
    rewarded = [
        [r for r in group if r.reward is not None] for group in groups
    ]  # The others were lost.
    reports = []
    for m in range(settings.minibatches):
        batch = my_share(
            [
                r
                for group in rewarded
                for i, r in enumerate(group)
                if i % settings.minibatches == m or (r.right and r.wrong_share > RARELY_RIGHT)
            ]
        )
        reports.append(
            update(
                run.model,
                run.optimizer,
                batch,
                beta=settings.beta,
                n_ids=len(run.tokenizer),
                reference=run.reference,
                token_budget=settings.token_budget,
            )
        )
        run.skipped = run.skipped + 1 if reports[-1]["skipped"] else 0
        if run.skipped == 3:
            leave(
                "three gradients in a row were not finite: try a smaller --lr from the last checkpoint on"
            )
    return reports


def first_rounds(run: Run, settings: Settings, iteration: int) -> list[Rollout]:
    """An iteration's questions: with ask_solved_probability=1 the next ones of the data, which begins again after its end;
    else drawn by chance, and passed over the likelier, the oftener their kind is answered. Each may use the
    whole pool, or settings.subset or more of its workers, drawn by chance (§3.2; the paper: exactly k)."""
    asked, everyone, rng = [], len(run.pool), random.Random(f"{settings.seed} {iteration}")
    for i in itertools.count(iteration * settings.n_questions):
        if len(asked) == settings.n_questions:
            return asked
        problem = (
            run.problems[i % len(run.problems)]
            if settings.ask_solved_probability == 1
            else rng.choice(run.problems)
        )
        if rng.random() < max(settings.ask_solved_probability, run.wrong_share[problem.kind]):
            workers = sorted(
                rng.sample(range(everyone), rng.randint(settings.subset or everyone, everyone))
            )
            name = f"{settings.seed}/{iteration}/{i}"
            asked.append(Rollout(problem.question, run.pool, workers, problem, call_prefix=name))


def second_rounds(groups: list[list[Rollout]], settings: Settings, iteration: int) -> list[Rollout]:
    """Half of the questions again, each with the answer of one of its first rollouts (§3.2)."""
    half = (
        (0, 1) if iteration % 2 == 0 else (2, 3)
    )  # of each four: data may alternate between two kinds
    asked = []
    for i, group in enumerate(groups):
        answered = [r for r in group if r.workflow and r.right is not None]
        if i % 4 in half and answered:
            r = random.Random(f"{settings.seed} {iteration} {i}").choice(answered)
            asked.append(
                Rollout(r.question, r.pool, r.workers, r.problem, r.call_prefix, previous=r)
            )
    return asked


def roll_out_on_all_ranks(
    sampler: Qwen, run: Run, asked: list[Rollout], settings: Settings, seed: int
):
    """Roll out every question settings.n_rollouts times. Each rank does a part of every question's, and all get
    all of them, as [question][rollout]: the same on any number of ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    numbers = range(settings.n_rollouts * rank // world, settings.n_rollouts * (rank + 1) // world)
    mine = [replace(question, number=number) for question in asked for number in numbers]
    write = model_writer(sampler, run.tokenizer, run.prompting, temperature=1.0, seed=seed)
    with progress("rollouts of rank 0", len(mine)) as bar:
        roll_out(
            mine,
            write,
            run.prompting,
            evaluation.grade_once(),
            ABLATIONS[settings.ablate],
            on_end=lambda rollout: bar.update(),
            timeout=settings.workflow_timeout,
        )
    everybodys = all_gather(
        [strip(r) for r in mine]
    )  # Connections and hidden tests cannot be sent.
    return [
        [
            replace(r, pool=question.pool, problem=question.problem, previous=question.previous)
            for r in everybodys
            if r.call_prefix == question.call_prefix
        ]
        for question in asked
    ]


# ---- The tiny Conductor, made on the spot, and the warm start, which teaches the format only ---------------

TINY = 10_000_000  # parameters below which a model is none that was pretrained
RECOMPUTED = (
    300_000_000  # parameters from which on the activations of all layers at a time would not fit
)
TINY_CONFIG = Config(
    900,
    128,
    384,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    rope_theta=100.0,
    tie_word_embeddings=True,
    max_position_embeddings=1024,
)


def tiny_conductor(problems: list, n_workers: int, settings: Settings) -> tuple[Qwen, Tokenizer]:
    """A Qwen2.5 of half a million parameters, and a byte-level BPE of 900 tokens made from random lessons."""
    bpe = BPE(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    rng, texts = random.Random(settings.seed), []
    for problem in problems[:4000]:
        chat, completion = random_lesson(problem, rng, n_workers, settings)
        texts += [f"{turn['role']}\n{turn['content']}" for turn in chat] + [
            f"assistant\n{completion}"
        ]
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=TINY_CONFIG.vocab_size,
            show_progress=False,
            special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    tokenizer = Tokenizer(bpe)
    model = Qwen(replace(TINY_CONFIG, vocab_size=len(tokenizer)))
    for name, p in model.named_parameters():
        if (
            p.dim() > 1
        ):  # wider than Qwen's 0.02: so narrow a model then learns to copy in a hundred steps
            torch.nn.init.normal_(p, std=0.1 if "embed" in name else 0.06)
    return model, tokenizer


def random_lesson(
    problem, rng: random.Random, n_workers: int, settings: Settings
) -> tuple[list[dict], str]:
    """A chat and a random workflow, which does not say what a good one is, behind a plan: a tiny Conductor's
    is how the question begins. With warm_extensions a fifth are second rounds: the chat holds an earlier
    workflow and some response; a new workflow or empty lists follow."""
    workers, previous = [*range(n_workers)], None
    if settings.warm_extensions:
        workers = sorted(rng.sample(workers, rng.randint(min(2, n_workers), n_workers)))
    phrases = evaluation.phrases_for(problem)
    plan = "" if settings.init_from else f"Plan: {' '.join(problem.question.split()[:12])}\n"
    workflow = evaluation.random_workflow(rng, workers, settings.max_steps, phrases)
    completion = plan + as_lists(workflow)
    if rng.random() < 0.2 * settings.warm_extensions:
        response = rng.choice(
            (
                problem.answer,
                problem.question,
                "I have lost the thread.",
                "I find nothing here to work on.",
            )
        )
        previous = Rollout(
            problem.question,
            written=completion,
            workflow=workflow,
            replies=[Reply(response, 0, 0, 0.0)],
        )
        another = evaluation.random_workflow(rng, workers, settings.max_steps, phrases)
        completion = rng.choice((plan + as_lists(another), as_lists(Workflow([]))))
    named = n_workers if len(workers) == n_workers else workers
    return messages(
        problem.question, named, settings.max_steps, previous, settings.prompt_style
    ), completion


def warm_start(run: Run, settings: Settings):
    """Learn to write random workflows in the right format; what a good one is, nothing here says. For the
    tiny model the question's text enters the loss a little, so that it learns to tell questions apart. The
    logits are divided by 1.5 here and not in sampling: there the format is then nearly certain, while free
    choices, such as the worker, stay as even as in the data."""
    is_tiny = not settings.init_from
    lr, batch = (6e-3, 32) if is_tiny else (2e-4, 16)
    rank, world = dist.get_rank(), dist.get_world_size()
    rng, optimizer = random.Random(settings.seed), adam(run.model, 0.98)
    for step in tqdm(
        range(settings.warm_steps), "warm start", disable=rank > 0 or None, leave=False
    ):
        rows, weights = (
            [],
            [],
        )  # lessons as packed_logprobs takes them; what their tokens count in the loss
        for problem in rng.choices(
            run.problems, k=-(-batch // world) * world
        ):  # as many for each rank
            chat, completion = random_lesson(problem, rng, len(run.pool), settings)
            prompt = run.tokenizer.chat(chat)
            written = run.tokenizer.encode(completion) + [run.tokenizer.eos_id]
            known = 1 if is_tiny else len(prompt)  # The tokens after these enter the loss.
            rows.append((prompt[:known], [prompt[known:] + written]))
            weights.append([0.1] * (len(prompt) - known) + [1.0] * len(written))
        total, longest = (
            sum(map(sum, weights)),
            max(len(begun) + len(rest) for begun, [rest] in rows),
        )
        stride = world * max(
            1, settings.token_budget // longest
        )  # lessons of a micro-batch, over all ranks
        for i in range(rank, len(rows), stride):
            logprobs, _ = packed_logprobs(run.model, rows[i : i + stride : world], 1.5)
            weight = torch.tensor(
                [*itertools.chain(*weights[i : i + stride : world])], device=run.model.device
            )
            (-(logprobs * weight).sum() * world / total).backward()  # FSDP averages over ranks.
        optimizer.param_groups[0]["lr"] = lr * schedule(step, settings.warm_steps, 0.05)
        clipped_step(run.model, optimizer, 1.0)


# ---- Before and after the loop -----------------------------------------------------------------------------


def set_up(settings: Settings, device: str) -> Run:
    """All that the loop needs, on every rank, after a look at what is lacking. --dry_run ends here."""
    states = sorted(Path(settings.out).glob("checkpoints/[0-9]*/state"))
    state = states[-1] if settings.resume and states else None  # None: the run begins
    start = str(state.parent) if state else settings.init_from  # "": a new tiny model
    begin = int(state.parent.name) if state else 0
    evaluation.use_sandbox(settings.sandbox)
    config, rows, lacking = on_rank0(lambda: preflight(settings, start, device))
    if settings.dry_run and config:
        try_largest_step(settings, config, device)
    if settings.dry_run or lacking:
        leave(lacking)
    n = count_parameters(config)
    if settings.warm_steps < 0:
        is_conductor = os.path.exists(f"{start}/conductor.json")
        settings.warm_steps = 400 if not start else 120 if n < 3e9 and not is_conductor else 0
    torch.manual_seed(settings.seed)
    if (
        settings.offload and device == "cuda"
    ):  # Adam runs on the CPU, where torchrun allows one thread.
        torch.set_num_threads(
            max(1, os.cpu_count() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        )
    problems, test = load_problems(settings)
    if start:
        on_rank0(lambda: fetch(start, "*.json", "*.safetensors"))  # One rank downloads.
        tokenizer = Tokenizer.from_pretrained(start)
        model = Qwen.from_pretrained(
            start,
            device="cpu" if settings.offload else device,
            shard=lambda whole: shard(whole, settings, device),
        )
    else:
        model, tokenizer = tiny_conductor(problems, len(rows), settings)
        shard(model, settings, device)
    prompting = Prompting(settings.prompt_style, settings.max_steps, settings.max_new_tokens)
    longest = max((problem.question for problem in problems + test), key=len)
    n_read = len(
        tokenizer.chat(
            messages(longest, len(rows), settings.max_steps, prompt_style=settings.prompt_style)
        )
    )
    if n_read + settings.max_new_tokens > model.config.max_position_embeddings:
        leave(
            f"the Conductor cannot read the {n_read} tokens of its prompt and write "
            f"--max_new_tokens={settings.max_new_tokens}: {longest:.60}"
        )
    on_rank0(lambda: open_folder(settings, begin))
    replay = "" if settings.pool in LOCAL else f"{settings.out}/replies"
    pool = load_pool(
        settings.pool, rows[0].get("base_url"), replay, settings.budget, dist.get_world_size()
    )
    wrong = {problem.kind: torch.ones(()) for problem in problems}
    run = Run(
        pool, problems, test, tokenizer, model, adam(model, settings.beta2), prompting, begin, wrong
    )
    print0(
        f"{n:,} parameters in {dtype_for(config, device)} on {dist.get_world_size()} x {device}, "
        f"{len(problems):,} problems, workers: {', '.join(worker.name for worker in pool)}"
    )
    if settings.warm_steps and not state:
        print0(f"warm start: {settings.warm_steps} steps of the format")
        warm_start(run, settings)
    if settings.beta:
        folder, earlier = (
            Path(settings.out, "reference"),
            Path(settings.init_from).parent / "reference",
        )
        if settings.init_from and earlier.exists():  # of the run that this one starts from
            folder = earlier
        elif not state:
            save_for_use(run, settings, folder)
        run.reference = Qwen.from_pretrained(folder, dtype_for(config, device), device)
    largest_step(model, run.optimizer, run.reference, settings)
    if state:
        dcp.load(trained(run), storage_reader=dcp.HuggingFaceStorageReader(state))
    return run


def load_problems(settings: Settings) -> tuple[list, list]:
    """The problems to train on, and the held-out ones."""
    if settings.grader:
        evaluation.GRADERS["own"] = evaluation.own_grader(load_function(settings.grader))
    return evaluation.load(settings.data, "train"), evaluation.load(
        settings.data, "test", settings.n_test
    )


def conduct_problems(run: Run, problems: list, settings: Settings, name: str) -> list[Rollout]:
    """The greedy Conductor's rollout for each problem, a part on each rank. name: of the replies."""
    rank, world = dist.get_rank(), dist.get_world_size()
    write = model_writer(whole_copy(run.model), run.tokenizer, run.prompting, temperature=0.0)
    system = evaluation.conductor(
        write, run.prompting, int(settings.recursion), ABLATIONS[settings.ablate]
    )
    mine = problems[len(problems) * rank // world : len(problems) * (rank + 1) // world]
    rollouts = all_gather([strip(r) for r in system(mine, [run.pool] * len(mine), name)])
    return [replace(rollout, problem=problem) for rollout, problem in zip(rollouts, problems)]


def print_results(run: Run, settings: Settings):
    """What eval.py says of the last checkpoint, beside every worker and random workflows, on rank 0."""
    print0(
        f"python workflow.py QUESTION --checkpoint={settings.out}/checkpoint asks it; a table follows"
    )
    run.optimizer = run.reference = None  # The evaluation shall have their memory.
    left = sum(all_gather([run.pool[0].budget.left if settings.budget else 0.0]))  # dollars
    if dist.get_rank() == 0 and settings.n_test:
        systems = f"{'no-' + settings.ablate if settings.ablate else 'conductor'},workers,random"
        evaluation.compare_systems(
            evaluation.Settings(
                systems=systems,
                benchmarks=settings.data,
                checkpoint=f"{settings.out}/checkpoint",
                budget=left,
                pool=settings.pool,
                limit=settings.n_test,
                extra_rounds=int(settings.recursion),
                replay=f"{settings.out}/replies",
                out=f"{settings.out}/test.json",
            )
        )


# ---- What a run needs --------------------------------------------------------------------------------------

PROMPT = 1000  # tokens of a prompt, as the estimate assumes
SHAPES = {  # of models that may not be here yet
    "Qwen/Qwen2.5-7B": Config(),
    "Qwen/Qwen2.5-0.5B-Instruct": Config(151936, 896, 4864, 24, 14, 2, tie_word_embeddings=True),
}
WORDS = {
    "ablate": [*ABLATIONS],
    "sandbox": ["bwrap", "none"],
    "prompt_style": ["ood", "in", "mixed", "zero-shot", "short"],
}
MINIMUM = {
    "n_rollouts": 2,
    "ask_solved_probability": 0.01,
    "warm_steps": -1,
    "n_test": 0,
    "subset": 0,
    "seed": 0,
}


def preflight(settings: Settings, start: str, device: str) -> tuple[Config | None, list[dict], str]:
    """The model's shape, the pool's rows, and all that would fail late, as a text; "" if nothing."""
    lacking = []

    def attempt(what, job, *arguments):
        """What a job returns; or None, and what is wrong is on the list."""
        try:
            return job(*arguments)
        except (OSError, ValueError, LookupError, TypeError) as e:
            lacking.append(f"{what}: {e}")

    for key, value in vars(settings).items():
        least = MINIMUM.get(key, int(type(value) is int))  # 1 for other whole numbers
        if type(value) in (int, float) and not least <= value < math.inf:
            lacking.append(f"--{key}={value}: expected {least} or more")
        if value not in WORDS.get(key, [value]):
            lacking.append(f"--{key}={value}: there are {', '.join(filter(None, WORDS[key]))}")
    if os.path.exists(f"{settings.out}/settings.json") != settings.resume:
        what = (
            "no run to resume"
            if settings.resume
            else "a run: --resume goes on with it; or choose another"
        )
        lacking.append(f"--out={settings.out} holds {what}")
    if settings.preset == "own" and not start:
        lacking.append(
            "--init_from is missing: a model's folder, or its name on Hugging Face's hub"
        )
    config = TINY_CONFIG
    if start:
        config = attempt(f"--init_from={start}", Config.from_pretrained, start) or SHAPES.get(start)
    if config:
        attempt("room", check_room, settings, config, device)
    problems, test = attempt(f"--data={settings.data}", load_problems, settings) or ([], [])
    if any(problem.grader in ("code", "unittest") for problem in problems + test):
        attempt("code", evaluation.check_sandbox)
    for problem in [problem for problem in problems if problem.grader == "own"][:1]:
        attempt(f"--grader={settings.grader}", evaluation.failure, problem, problem.answer)
    rows = attempt("workers", read_pool, settings.pool) or []
    lacking += check_pool(rows, settings.budget)
    if rows:
        attempt("money", check_money, settings, rows, len(test))
    if settings.subset > len(rows) > 0:
        lacking.append(f"workers: --subset={settings.subset}, and the pool has {len(rows)}")
    if not lacking and not (
        settings.dry_run and probable_cost(rows, 1)
    ):  # A dry run pays for no word.
        pool = load_pool(settings.pool, rows[0].get("base_url"), budget=settings.budget)
        lacking += [str(word) for word in ping_workers(pool) if isinstance(word, WorkerError)]
    return config, rows, "\n  ".join(["the run lacks", *lacking]) if lacking else ""


def check_money(settings: Settings, rows: list[dict], n_test: int):
    """Print the run's calls and what they cost. ValueError where a budget or a price is missing."""
    rollouts = settings.iterations * settings.n_questions * settings.n_rollouts
    rollouts += settings.recursion * rollouts // 2
    measured = (
        settings.iterations // settings.save_every * min(N_TEST_AT_CHECKPOINT, n_test) + 2 * n_test
    )
    calls = 3 * (rollouts + measured) + len(rows) * n_test
    cost = probable_cost(rows, calls)
    if cost == 0:
        print0(f"about {calls:,} calls, three a workflow, at no cost")
    demand_budget(rows, settings.budget, calls, "this run")
    if settings.cost_weight and cost is None:
        raise ValueError("--cost_weight weighs dollars, and a worker has no price")


def check_room(settings: Settings, config: Config, device: str):
    """Print what the run takes of memory and disk. ValueError where that is not there."""
    n, world, dtype = count_parameters(config), dist.get_world_size(), dtype_for(config, device)
    C, L, V, width = config.hidden_size, config.num_hidden_layers, config.vocab_size, dtype.itemsize
    T = settings.token_budget + PROMPT  # tokens of a packed row
    drawn = settings.n_questions * (
        PROMPT + settings.n_rollouts // world * settings.max_new_tokens
    )  # tokens
    cached = (
        2 * config.num_key_value_heads * config.head_dim * L * width
    )  # bytes of a token in the cache
    activations = (
        T * (L * C + (L if n < RECOMPUTED else 1) * (10 * C + 5 * config.intermediate_size)) * width
    )
    gathered = (2 * width + 4) * (
        2 * C * V + 2 * n / L
    )  # embedding, head, two layers, and their gradients
    state, reference = 16 * n / world * (not settings.offload), width * n * bool(settings.beta)
    sampling = width * n + cached * drawn
    learning = gathered + activations + 20 * min(T * V, HEAD_LOGITS[device])
    most = state + reference + max(sampling, learning)
    in_cpu = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    present = torch.cuda.mem_get_info()[1] if device == "cuda" else in_cpu
    saved = (
        24 + width * (settings.iterations // settings.save_every + 2)
    ) * n  # two states for a while
    free = shutil.disk_usage(
        next(filter(Path.exists, Path(settings.out, "new").absolute().parents))
    ).free
    if settings.dry_run or n >= TINY:
        print0(
            f"{n / 1e9:.3f} billion parameters, computed in {dtype} by {world} processes; GiB of each:"
        )
        print0(
            f"{state / GIB:9.1f} weights, gradients and Adam's state\n"
            f"{reference / GIB:9.1f} the reference policy of the KL\n"
            f"{sampling / GIB:9.1f} to sample: a whole copy, its keys and values\n"
            f"{learning / GIB:9.1f} to learn: gathered weights, activations, logits\n"
            f"{most / GIB:9.1f} at most at a time, of {present / GIB:.1f}\n"
            f"{saved / GIB:9.1f} of disk, of {free / GIB:.1f} that are free"
        )
    if most > present or saved > free:
        raise ValueError(
            f"{most / GIB:.1f} of {present / GIB:.1f} GiB of memory, {saved / GIB:.1f} of "
            f"{free / GIB:.1f} of disk; more GPUs, --offload or a smaller --token_budget help"
        )


def largest_step(model: Qwen, optimizer, reference: Qwen | None, settings: Settings):
    """The largest update once, with a learning rate of 0, so that an out-of-memory error comes before anybody
    is paid: two micro-batches, as gradients are there in the second. Adam's state is zeros again after it."""
    size, prompt = (settings.token_budget, PROMPT) if model.device.type == "cuda" else (64, 8)
    length = min(settings.max_new_tokens, size)
    rollout = Rollout(
        "", prompt_ids=[0] * prompt, tokens=[0] * length, logprobs=[0.0] * length, advantage=1.0
    )
    rollouts = [rollout] * (size // length) * 2
    update(model, optimizer, rollouts, beta=settings.beta, reference=reference, token_budget=size)
    for state in optimizer.state.values():
        for tensor in state.values():
            tensor.zero_()


def try_largest_step(settings: Settings, config: Config, device: str):
    """Do the largest step with random weights, which take what real ones take, and say what that is."""
    if device == "cpu" and count_parameters(config) > 1e8:
        return print0("the largest step was not tried: it takes a GPU")
    with torch.device("meta"):
        model = shard(Qwen(config), settings, device)
    model.to_empty(device="cpu" if settings.offload else device)
    for p in model.parameters():
        p.detach().to_local().normal_(std=0.02)
    started = time.perf_counter()
    largest_step(model, adam(model, 0.99), whole_copy(model) if settings.beta else None, settings)
    used = torch.cuda.max_memory_allocated() / GIB  # 0 without a GPU
    print0(
        f"the largest step took {time.perf_counter() - started:.1f} s and {used:.1f} GiB of GPU memory"
    )


# ---- Ranks, and the model on all of them (FSDP) ------------------------------------------------------------


def count_parameters(config: Config) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in Qwen(config).parameters())


def dtype_for(config: Config, device) -> torch.dtype:
    """In which a model computes; weights in training, gradients and Adam's moments are fp32."""
    return torch.float32 if count_parameters(config) < TINY else compute_dtype(device)


def shard(model: Qwen, settings: Settings, device: str) -> Qwen:
    """FSDP2: fp32 weights, gradients and Adam's state in equal parts on all ranks."""
    dtype = dtype_for(model.config, device)
    mixed = MixedPrecisionPolicy(dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    offload = CPUOffloadPolicy(pin_memory=device == "cuda") if settings.offload else OffloadPolicy()
    mesh = dist.init_device_mesh(device, (dist.get_world_size(),))
    model.recompute = count_parameters(model.config) >= RECOMPUTED
    model.compute_device = torch.device(device) if settings.offload else None
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh, mp_policy=mixed, offload_policy=offload)
    return model


@torch.no_grad()
def whole_copy(model: Qwen) -> Qwen:
    """A whole copy of the sharded model in the dtype of computation; every rank gets one."""
    with torch.device("meta"):
        whole = Qwen(model.config)
    dtype = dtype_for(model.config, model.device)
    state = {
        name: p.to(model.device, dtype, copy=True).full_tensor()
        for name, p in model.named_parameters()
    }
    whole.load_state_dict(state, assign=True, strict=False)
    if model.config.tie_word_embeddings:
        whole.lm_head.weight = whole.model.embed_tokens.weight
    return whole


def adam(model: Qwen, beta2: float):
    return torch.optim.AdamW(
        model.parameters(), lr=0.0, betas=(0.9, beta2), weight_decay=0.0, fused=True
    )


def on_rank0(job):
    """Run `job` on rank 0 and return its result on all ranks. What it raises ends all, with one message."""
    result = [None, None]
    if dist.get_rank() == 0:
        try:
            result[0] = job()
        except (OSError, ValueError, WorkerError) as e:
            result[1] = str(e)
    dist.broadcast_object_list(result)
    if result[1] is not None:
        leave(result[1])
    return result[0]


def leave(why: str):
    """End the program on all ranks, which all call this, with a message on one; "": all is well."""
    status = why if dist.get_rank() == 0 else 1
    dist.destroy_process_group()  # Else its threads may abort the program at its end.
    raise SystemExit(status if why else 0)


def all_gather(mine: list) -> list:
    """The concatenation of every rank's list, on every rank."""
    lists = [None] * dist.get_world_size()
    dist.all_gather_object(lists, mine)
    return [*itertools.chain(*lists)]


def print0(line: str):
    if dist.get_rank() == 0:
        print(line, flush=True)


# ---- What a run writes -------------------------------------------------------------------------------------
# What is random follows from the seed and the iteration: resuming needs no state of a generator.
GIB = 1 << 30


def log(
    settings: Settings, iteration: int, groups: list, reports: list[dict], held_out, seconds: dict
):
    """Write a line of metrics.jsonl, and its numbers to the screen. What is said of workflows is
    of first rounds, again_accuracy of second ones; flat, tokens, cut and sums of both. None is unknown."""
    if dist.get_rank():
        return
    rollouts = [*itertools.chain(*groups)]
    first = [r for r in rollouts if r.previous is None]
    known = [r for r in first if r.reward is not None]
    ran = [r for r in first if r.workflow]
    costs = [reply.cost for r in rollouts for reply in r.replies if reply]
    names = Counter(name for r in ran for name in r.names)
    m = {
        "iteration": iteration,
        "reward": mean([r.reward for r in known]),
        "accuracy": mean([r.right for r in known]),
        "held_out": held_out,  # accuracy on problems that are not trained on
        "parsed": mean(
            [r.workflow is not None for r in first if r.tokens]
        ),  # share that is a workflow
        "flat": mean(
            [not any(r.advantage for r in group) for group in groups]
        ),  # share that teaches nothing
        "lost": sum(r.reward is None for r in rollouts),  # for want of a worker's reply
        "error": next((r.error for r in rollouts if r.error), None),  # the first that lost one
        "steps": mean([len(r.workflow.steps) for r in ran]),
        "calls": len(costs),
        "cost": None if None in costs else sum(costs),  # dollars
        "tokens": mean([len(r.tokens) for r in rollouts]),  # of a completion
        "cut": mean([not r.finished for r in rollouts]),  # share that reached max_new_tokens
        "gap": reports[0]["gap"],  # see grpo.statistics, also for the last ones
        "memory": torch.cuda.max_memory_allocated() / GIB,  # of rank 0's GPU
        "workers": {name: n / names.total() for name, n in names.items()},  # shares of the steps
        "again_accuracy": mean([r.right for r in rollouts if r.previous and r.reward is not None]),
        **seconds,
        "by_kind": {},
        "steps_by_kind": {},
    }
    for key in ("approx_kl", "clipfrac", "kl", "entropy", "grad_norm", "skipped"):
        m[key] = mean([r[key] for r in reports if r[key] is not None and math.isfinite(r[key])])
    for kind in dict.fromkeys(r.problem.kind for r in first):
        m["by_kind"][kind] = mean([r.right for r in known if r.problem.kind == kind])
        m["steps_by_kind"][kind] = mean(
            [len(r.workflow.steps) for r in ran if r.problem.kind == kind]
        )
    with open(f"{settings.out}/metrics.jsonl", "a") as file:
        file.write(json.dumps(m) + "\n")
    if settings.wandb:
        sys.modules["wandb"].log(m)
    words = [f"{key} {value:.3g}" for key, value in m.items() if isinstance(value, (int, float))]
    lost = f", the first by: {m['error']}" if m["error"] else ""
    print0(f"{iteration + 1:4d}/{settings.iterations} {' '.join(words[1:])}{lost}")


def open_folder(settings: Settings, begin: int):
    """Begin to write in --out, or go on: metrics.jsonl is cut after so many iterations."""
    os.makedirs(f"{settings.out}/traces", exist_ok=True)
    write_json(f"{settings.out}/settings.json", asdict(settings))
    with open(f"{settings.out}/metrics.jsonl", "a+b") as file:
        file.seek(0)
        file.truncate(sum(map(len, itertools.islice(file, begin))))
    if begin:
        tidy(Path(settings.out))
    if settings.wandb:
        import wandb

        wandb.init(project="conductor", config=asdict(settings), dir=settings.out)


def write_rollouts(settings: Settings, iteration: int, groups: list[list[Rollout]]):
    """Write all rollouts of an iteration, with what their workers said and all that learning needs."""
    if dist.get_rank():
        return
    file = Path(settings.out, f"traces/{iteration:05d}.jsonl")
    with open(f"{file}.tmp", "w") as traces:
        for r in itertools.chain(*groups):
            row = rollout_to_json(r, with_tokens=True)
            traces.write(json.dumps(row | {"expected": r.problem.answer}) + "\n")
    os.replace(f"{file}.tmp", file)


def read_rollouts(run: Run, settings: Settings, iteration: int) -> list[list[Rollout]] | None:
    """What `write_rollouts` wrote of an iteration that no checkpoint holds; None if nothing."""
    file = Path(settings.out, f"traces/{iteration:05d}.jsonl")
    if not file.exists():
        return None
    problems = {problem.id: problem for problem in run.problems}
    rollouts = [rollout_from_json(json.loads(line)) for line in file.read_text().splitlines()]
    rollouts = [replace(r, pool=run.pool, problem=problems[r.problem_id]) for r in rollouts]
    return [
        rollouts[i : i + settings.n_rollouts] for i in range(0, len(rollouts), settings.n_rollouts)
    ]


def save(run: Run, settings: Settings, done: int):
    """A checkpoint after `done` iterations: weights for use, and in state/ what resuming needs, of which each
    rank writes its part. A folder has a number only while it is whole."""
    folder = Path(settings.out, "checkpoints/unfinished")
    save_for_use(run, settings, folder)
    writer = dcp.HuggingFaceStorageWriter(folder / "state", save_distributed=True)  # safetensors
    dcp.save(trained(run), storage_writer=writer)
    on_rank0(lambda: folder.rename(folder.with_name(f"{done:05d}")))
    on_rank0(lambda: tidy(Path(settings.out)))


def save_for_use(run: Run, settings: Settings, folder: Path):
    """Write weights in the dtype of computation, tokenizer and conductor.json, in Hugging Face's layout."""
    whole = whole_copy(run.model)

    def write():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        pool = os.path.abspath(settings.pool) if os.path.isfile(settings.pool) else settings.pool
        save_prompting(folder, run.prompting, pool, [worker.name for worker in run.pool])
        run.tokenizer.save_pretrained(folder)
        whole.save_pretrained(folder)

    on_rank0(write)


def trained(run: Run) -> dict[str, torch.Tensor]:
    """What training changes: fp32 weights, Adam's step and moments, and what is known of kinds."""
    state = {f"wrong {kind}": share for kind, share in run.wrong_share.items()}
    for name, p in run.model.named_parameters():
        state[name] = p.detach()
        state |= {f"{name} {key}": tensor for key, tensor in run.optimizer.state[p].items()}
    return state


def tidy(out: Path):
    """Point `checkpoint` at the newest one, which alone keeps its state/."""
    *earlier, newest = sorted(out.glob("checkpoints/[0-9]*"))
    link = out / "checkpoint.new"
    link.unlink(missing_ok=True)  # left by a kill
    link.symlink_to(newest.relative_to(out))
    link.replace(out / "checkpoint")
    for folder in earlier:
        shutil.rmtree(folder / "state", ignore_errors=True)


# ---- The command line --------------------------------------------------------------------------------------


def read_command(argv: list[str]) -> tuple[Settings, str]:
    """The settings of a command line, and the kind of device. It prints which preset it chose, and why."""
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # on this machine
    gpus = [
        torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count())
    ]
    device = "cuda" if len(gpus) >= processes else "cpu"
    preset, why = "small", "Qwen2.5-0.5B-Instruct, as there are GPUs, but not two of 80 GB"
    if device == "cpu":
        preset, why = "laptop", "a tiny Conductor, as there is no GPU for each process"
    elif processes > 1 and min(gpus) > 75e9:
        preset, why = "large", "Qwen2.5-7B, as there are GPUs of 80 GB"
    settings = Settings()
    words = configure(settings, argv)
    if not settings.preset and os.environ.get("RANK", "0") == "0":
        print(f"--preset={preset}, free of charge in the laptop world: {why}")
    preset = settings.preset or preset
    if preset not in PRESETS or words:
        raise SystemExit(
            f"expected --key=value, --preset one of {', '.join(PRESETS)}, not {words or preset}"
        )
    settings = Settings(**PRESETS[preset])
    configure(settings, argv)
    settings.preset, settings.out = preset, os.path.normpath(settings.out or f"out/{preset}")
    return settings, device


def main(argv: list[str]):
    settings, device = read_command(argv)
    own_store = dict(store=dist.HashStore(), rank=0, world_size=1)
    if "RANK" in os.environ:  # which torchrun sets
        own_store = {}
        ctypes.CDLL(None).prctl(
            1, 9
        )  # If torchrun is killed, so is its child (PR_SET_PDEATHSIG, SIGKILL).
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    # Objects go over gloo. A rank may wait for another's workers longer than NCCL's ten minutes.
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=datetime.timedelta(hours=3), **own_store)
    train(settings, device)
    dist.destroy_process_group()  # not after one rank's error: NCCL would wait for the others


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except KeyboardInterrupt:
        raise SystemExit("interrupted; the same command with --resume goes on") from None
