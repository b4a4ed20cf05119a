"""Problems, graders, running code, systems, tables: how good is a Conductor, and what do others reach (§4)?

    python eval.py [--systems=conductor,workers,moa] [--benchmarks=math500,gpqa,mine.jsonl] [--pool=NAME]
    python eval.py prepare [--pool=NAME --budget=50]   # write the training problems of the paper's run

Everything here is a table with functions: a grader is a row of GRADERS, a benchmark of SOURCES, a system of
SYSTEMS. Read train.py next."""

import base64
import cmath
import csv
import itertools
import json
import math
import operator
import os
import queue
import random
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import zlib
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from functools import lru_cache, partial
from html.entities import html5
from typing import NamedTuple

import numpy as np
import requests
import torch
from huggingface_hub import hf_hub_download
from requests.adapters import HTTPAdapter
from requests.packages.urllib3.util.retry import Retry
from tqdm import tqdm

from model import configure, read_json, write_json
from workers import (
    LIMITS,
    PHRASES,
    SOLVE_IT,
    Reply,
    WorkerError,
    demand_budget,
    laptop_questions,
    load_function,
    load_pool,
    once,
)
from workflow import (
    ASSETS,
    Prompting,
    Rollout,
    Step,
    Workflow,
    call_id,
    call_worker,
    choose_pool,
    conduct,
    load_conductor,
    model_writer,
    numbers_of,
    roll_out,
    rollout_to_json,
    worker_writer,
)


@dataclass
class Problem:
    id: str
    question: str
    answer: str
    grader: str  # a row of GRADERS
    kind: str = ""  # what tables group by: the grader's name unless given
    level: int = 0  # the larger, the harder; 0: unknown
    extra: dict = field(default_factory=dict)  # what its grader needs besides

    def __post_init__(self):
        self.kind = self.kind or self.grader


def require(condition, otherwise: str):
    if not condition:
        raise ValueError(otherwise)


# ---- Problems: the laptop world's, benchmarks', your own ---------------------------------------------------

DATA = "data"  # in the current directory: what is fetched, and what `prepare` writes


def load(name: str, split: str, limit: int | None = None) -> list[Problem]:
    """Load at most `limit` problems of a split, "train" or "test", in an order that never changes.

    name: "laptop", a benchmark of SOURCES, a mix of MIXES ("train" is the file that `prepare` writes, "test"
    all tests of its parts), or FILE.jsonl, of which from 20 rows on every fifth is "test". ValueError says
    what there is, OSError what could not be fetched."""
    if name.endswith(".jsonl"):
        problems = read_problems(name)
        if len(problems) >= 20:
            problems = [p for i, p in enumerate(problems) if (i % 5 == 4) == (split == "test")]
        problems = interleave(problems, random.Random(0))  # A file may be sorted by kind.
    elif name == "laptop":
        problems = [
            Problem(f"laptop/{kind}/{question}", question, answer, "same", kind)
            for kind, question, answer in laptop_questions(split)
        ]
        problems = interleave(problems, random.Random(0), again=True)
    elif name in MIXES and split == "train":
        problems = read_problems(f"{DATA}/{name}.jsonl")
    elif name in MIXES:
        parts = itertools.chain(*(load(part, "test", limit) for part in MIXES[name]))
        problems = interleave(list(parts), random.Random(0))
    else:
        known = ", ".join(
            dict.fromkeys(["laptop", *MIXES, *(key.split("/")[0] for key in SOURCES)])
        )
        require(
            source_of(name, split),
            f"no problems {name!r} ({split}): there are {known}, files *.jsonl",
        )
        problems = benchmark(name, split, limit)
    return problems[:limit]


def interleave(problems: list[Problem], rng: random.Random, again: bool = False) -> list[Problem]:
    """Shuffle, with the kinds taking turns. again: a small kind starts again until the largest is through."""
    kinds = {}
    for problem in problems:
        kinds.setdefault(problem.kind, []).append(problem)
    for group in kinds.values():
        rng.shuffle(group)
    most = max(map(len, kinds.values()), default=0)
    turns = itertools.product(range(most), kinds.values())
    return [group[i % len(group)] for i, group in turns if again or i < len(group)]


def with_instructions(problem: Problem) -> Problem:
    """The problem whose question shows its options and says how to answer, where it did not."""
    question, extra = problem.question.strip(), problem.extra
    options = [f"{letter}. {choice}" for letter, choice in zip(LETTERS, extra.get("choices", []))]
    if options and not all(choice in question for choice in extra["choices"]):
        question += "\n\n" + "\n".join(options)
    instruction = GRADERS[problem.grader].instruction
    if extra.get("function"):
        own = f"Write the Python function {extra['function']}. {BLOCK}"
        instruction = GRADERS["unittest"].instruction if "```python" in question else own
    if instruction not in question and not re.search(r"\\boxed|<answer>", question):
        question += "\n\n" + instruction
    return replace(problem, question=question, answer=problem.answer.strip())


# Your own problems: a JSON object a line


def read_problems(file: str) -> list[Problem]:
    """Read problems from a JSONL file. A line has "question", "answer", "grader", "extra" where the grader
    needs it, and if wanted "kind" (what tables group by), "id" and "level":

        {"question": "Who wrote Emma?", "answer": "Jane Austen", "grader": "short"}

    ValueError says of every line what is missing or wrong."""
    if not os.path.exists(file):
        raise FileNotFoundError(
            f"{file} is missing (`python eval.py prepare` writes paper and recursion)"
        )
    problems, faults = [], []
    with open(file, "rb") as lines:
        for n, line in enumerate(lines, 1):
            try:
                if line.strip():
                    problems.append(own_problem(line, f"{os.path.basename(file)}/{n}"))
            except (ValueError, TypeError) as e:
                faults.append(f"{file}, line {n}: {e}")
    require(problems and not faults, "\n".join(faults[:20]) or f"{file} is empty")
    require(len({p.id for p in problems}) == len(problems), f"{file}: two lines have one id")
    return problems


def own_problem(line: bytes, id: str) -> Problem:
    """The problem of a line. ValueError says what is missing or wrong."""
    try:
        problem = Problem(**{"id": id, "grader": "own", **json.loads(line)})
    except (
        ValueError,
        TypeError,
        RecursionError,
    ) as e:  # not JSON, or a field is missing or unknown
        raise ValueError(
            f"expected an object of {', '.join(Problem.__annotations__)}: {e}"
        ) from None
    for key, kind in Problem.__annotations__.items():
        require(
            isinstance(getattr(problem, key), kind),
            f"{key} is of another type than {kind.__name__}",
        )
    known = f"grader has to be one of {', '.join(GRADERS)}; your own: --grader=mine.py:grade"
    require(problem.grader in GRADERS, known)
    extra, answer = problem.extra, problem.answer.strip()
    missing = [f'"{key}": …' for key in GRADERS[problem.grader].extra if key not in extra]
    require(not missing, f'the grader {problem.grader} needs "extra": {{{", ".join(missing)}}}')
    require(problem.question.strip(), "question: it has 0 characters")
    if problem.grader == "code":  # `prepare` writes the place of LiveCodeBench's tests instead
        pairs = isinstance(extra["tests"], dict) or all(
            are_texts(p) and len(p) == 2 for p in extra["tests"]
        )
        require(extra["tests"] and pairs, "tests are pairs of texts, [input, output]")
    elif problem.grader not in ("unittest", "own"):
        require(are_texts(extra.get("choices", [])), "choices are a list of texts")
        faulty = all(failure(problem, text) for text in (answer, f"<answer>{answer}</answer>"))
        require(
            answer and not faulty,
            f"answer: nothing equals {answer!r}; give it bare, a choice's letter",
        )
    return with_instructions(problem)


def are_texts(value) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


# ---- Systems -----------------------------------------------------------------------------------------------
#
# system(problems, pools, name) -> rollouts, one a problem, judged. pools are the problems' workers; name
# begins the calls' ids, by which --replay knows them, and seeds what is random.

REFLECT = "Check the last response for mistakes, correct them, and give the whole answer in its final form."
AGGREGATE = (
    "Compare the responses, decide which is right, and give the whole answer in its final form."
)


def begin(problems: list[Problem], pools: list, name: str) -> list[Rollout]:
    pairs = zip(problems, pools, strict=True)
    return [Rollout(p.question, pool, problem=p, call_prefix=f"{name}/{p.id}") for p, pool in pairs]


def run_and_judge(rollouts: list[Rollout], name: str, call=call_worker) -> list[Rollout]:
    """Run and judge rollouts whose workflow is there."""
    with progress(name, len(rollouts)) as bar:
        return roll_out(
            rollouts, judge=grade_once(), call=call, on_end=lambda rollout: bar.update()
        )


def planned(plan, call=call_worker):
    """The system that runs the workflow plan(rollout) on each problem."""

    def system(problems, pools, name):
        rollouts = begin(problems, pools, name)
        for rollout in rollouts:
            rollout.workflow = plan(rollout)
        return run_and_judge(rollouts, name, call)

    return system


# Workers without a Conductor see the bare question


def ask_bare(rollout: Rollout, i: int, times: int = 1, **overrides) -> Reply:
    """Call a step's worker with the question alone. It may write so many times its tokens."""
    worker = rollout.pool[rollout.workflow.steps[i].worker]
    overrides |= {key: times * n for key, n in worker.params.items() if key in LIMITS and times > 1}
    return worker.chat(
        [{"role": "user", "content": rollout.question}], call_id(rollout, i), **overrides
    )


def ask_each(problems, pools, name, workers: list[int], call=ask_bare) -> list[list[Rollout]]:
    """What each of these workers answers to the bare question: [problem][worker]."""
    groups = []
    for rollout in begin(problems, pools, name):
        steps = [Step(worker, rollout.question, []) for worker in workers]
        groups.append(
            [replace(rollout, number=i, workflow=Workflow([step])) for i, step in enumerate(steps)]
        )
    run_and_judge(list(itertools.chain(*groups)), name, call)
    return groups


def vote(rollouts: list[Rollout], chosen: int) -> Rollout:
    """Rollouts of one step each as one that costs what all cost and is lost where a call was. The chosen one
    stands last, and is the answer."""
    ordered = [*rollouts[:chosen], *rollouts[chosen + 1 :], rollouts[chosen]]
    errors = [rollout.error for rollout in ordered if rollout.error]
    return replace(
        ordered[-1],
        workflow=Workflow([rollout.workflow.steps[0] for rollout in ordered]),
        names=[rollout.names[0] for rollout in ordered],
        replies=[rollout.replies[0] for rollout in ordered],
        previous=None,
        error=errors[0] if errors else None,
        right=None if errors else ordered[-1].right,
    )


def elect(workers: list[int] | None, likeness=None, call=ask_bare):
    """These workers, or all, answer the bare question. The answer that is most like the others counts, by
    likeness(problem, one, other), else by the problem's grader."""

    def system(problems, pools, name):
        groups = ask_each(problems, pools, name, workers or range(len(pools[0])), call)
        scores = np.zeros((len(groups), len(groups[0])))  # (P, W)
        for row, problem, rollouts in zip(scores, problems, groups):
            like = likeness or GRADERS[problem.grader].agree
            for i, other in itertools.product(range(len(row)), rollouts):
                row[i] += like(problem, rollouts[i].answer, other.answer)
        return [vote(rollouts, int(row.argmax())) for rollouts, row in zip(groups, scores)]

    return system


def common_words(problem: Problem, one: str, other: str) -> float:
    """Smoothie (arXiv 2412.04692) compares sentence embeddings instead, over neighbouring questions too."""
    first, second = (set(re.findall(r"\w+", answer.casefold())) for answer in (one, other))
    return len(first & second) / max(len(first | second), 1)


# Workflows that nobody has learned


def reflect(worker: int):
    """A worker that reflects four times on what it has answered."""
    steps = [Step(worker, REFLECT if i else SOLVE_IT, list(range(i))) for i in range(5)]
    return planned(lambda rollout: Workflow(steps))


def propose_and_aggregate(rollout: Rollout) -> Workflow:
    """A Mixture of Agents of one layer: every worker proposes, and a random one aggregates."""
    everyone = list(range(len(rollout.pool)))
    aggregator = random.Random(rollout.call_prefix).choice(everyone)
    return Workflow(
        [*(Step(i, SOLVE_IT, []) for i in everyone), Step(aggregator, AGGREGATE, everyone)]
    )


def phrases_for(problem: Problem) -> tuple:
    """The subtasks of random workflows for a problem."""
    others = (SOLVE_IT, "Plan how to solve it.", REFLECT, AGGREGATE)
    return PHRASES if problem.id.startswith("laptop/") else others


def random_workflow(
    rng: random.Random, workers: list[int], max_steps: int = 5, phrases=PHRASES
) -> Workflow:
    """1 to max_steps steps, short workflows more often; each a random worker, a random phrase, and nine times
    in ten all that came before. A tiny Conductor's warm start is made of such workflows."""
    steps = []
    for i in range(min(rng.randint(1, max_steps), rng.randint(1, max_steps))):
        worker = rng.choice(workers)
        subtask = rng.choice(phrases)
        steps.append(Step(worker, subtask, list(range(i)) if rng.random() < 0.9 else []))
    return Workflow(steps)


def plan_at_random(rollout: Rollout) -> Workflow:
    workers = list(range(len(rollout.pool)))
    return random_workflow(
        random.Random(rollout.call_prefix), workers, phrases=phrases_for(rollout.problem)
    )


# The Conductor


def conductor(
    write, prompting: Prompting, extra_rounds: int = 0, edit=None, tries: int = 1, only: str = ""
):
    """The system of a Conductor that writes by `write` (workflow.py). extra_rounds: §3.2. edit(workflow) ->
    workflow takes something away. only: the workers that it may name (§3.2), with commas between."""

    def system(problems, pools, name):
        rollouts = begin(problems, pools, name)
        for rollout in rollouts:
            rollout.workers = numbers_of(only, rollout.pool) or None
        with progress(name, len(rollouts)) as bar:
            return conduct(
                write,
                rollouts,
                extra_rounds,
                prompting,
                tries,
                judge=grade_once(),
                edit=edit,
                on_end=lambda rollout: bar.update(rollout.previous is None and not rollout.number),
            )

    return system


# Systems that learn from lessons, which are train problems. All ask under one name: what is asked again is in
# the replay file.


def rewards(rollouts: list[Rollout]) -> np.ndarray:
    """1 for a right answer, less 0.02 for each of its calls; nan where a worker was lost."""
    right = np.array([rollout.right for rollout in rollouts], float)
    return right - 0.02 * np.array([rollout.calls for rollout in rollouts])


def trigrams(questions: list[str]) -> torch.Tensor:
    """How often each trigram stands in each question, hashed and normalized: (Q, 4096)."""
    counts = torch.zeros(len(questions), 4096)
    for row, question in zip(counts, questions):
        for i in range(len(question) - 2):
            row[zlib.crc32(question[i : i + 3].casefold().encode()) % 4096] += 1
    return torch.nn.functional.normalize(counts)


def router(setup):
    """The worker who is likeliest right, by ridge regression on trigrams. RouterDC (NeurIPS 2024) learns from
    each worker's success too, but by a fine-tuned encoder and contrastive losses."""
    asked = ask_each(
        setup.lessons, [setup.pool] * len(setup.lessons), "lesson", range(len(setup.pool))
    )
    right = np.array([[rollout.right for rollout in row] for row in asked], np.float32)
    right = torch.from_numpy(right).nan_to_num(0.5)  # (P, W); a call was lost where it is nan
    x = trigrams([problem.question for problem in setup.lessons])  # (P, 4096)
    weights = x.T @ torch.linalg.solve(x @ x.T + torch.eye(len(x)), right)  # (4096, W)

    def plan(rollout):
        best = int((trigrams([rollout.question]) @ weights).argmax())
        return Workflow([Step(best, rollout.question, [])])

    return planned(plan, ask_bare)


AGENTS = 5  # at most
SHAPES = [[(SOLVE_IT, [])]]  # (subtask, access) of each agent
for n in range(2, AGENTS + 1):
    before = [list(range(i)) for i in range(n)]
    SHAPES.append([(SOLVE_IT, seen[-1:]) for seen in before])  # a chain
    SHAPES.append([(REFLECT if seen else SOLVE_IT, seen) for seen in before])  # reflection
    SHAPES.append([(SOLVE_IT, [])] * (n - 1) + [(AGGREGATE, before[-1])])  # a debate
TRIES = 8  # designs of each lesson at a time


def masrouter(setup):
    """MasRouter (arXiv 2502.11133) in small: a shape of collaboration and each agent's worker, linear in the
    question's trigrams, by policy gradient. The original encodes the question with a language model, gives
    agents roles, makes each choice in view of those before, and counts tokens instead of calls."""
    rng = random.Random(setup.seed)
    torch.manual_seed(setup.seed)
    sizes = [len(SHAPES)] + [len(setup.pool)] * AGENTS
    n_agents = torch.tensor([len(shape) for shape in SHAPES])
    weights = torch.zeros(4096, sum(sizes), requires_grad=True)
    optimizer = torch.optim.Adam([weights], lr=0.05)

    def build(choices):
        agents = zip(choices[1:], SHAPES[choices[0]])
        return Workflow([Step(worker, subtask, access) for worker, (subtask, access) in agents])

    for _ in tqdm(range(setup.effort * 5), "masrouter learns", disable=None):
        batch = rng.sample(setup.lessons, min(32, len(setup.lessons)))
        scores = trigrams([problem.question for problem in batch]) @ weights
        heads = [torch.distributions.Categorical(logits=part) for part in scores.split(sizes, -1)]
        choices = torch.stack([head.sample([TRIES]) for head in heads])  # (6, T, B)
        rollouts = begin(batch * TRIES, [setup.pool] * len(batch) * TRIES, "lesson")
        for rollout, choice in zip(rollouts, choices.flatten(1).T.tolist()):
            rollout.workflow = build(choice)
        value = torch.tensor(rewards(roll_out(rollouts, judge=grade_once()))).view(
            TRIES, -1
        )  # (T, B)
        advantage = (value - value.nanmean(0)).nan_to_num()
        used = n_agents[choices[0]] > torch.tensor([0, *range(AGENTS)])[:, None, None]  # (6, T, B)
        logp = torch.stack(
            [head.log_prob(choice) for head, choice in zip(heads, choices)]
        )  # (6, T, B)
        entropy = torch.stack([head.entropy() for head in heads]).mean()
        optimizer.zero_grad()
        loss = -(advantage * logp * used).mean() - 0.02 * entropy
        loss.backward()
        optimizer.step()

    def plan(rollout):
        scores = trigrams([rollout.question])[0] @ weights
        return build([int(part.argmax()) for part in scores.split(sizes)])

    return planned(plan)


ROLES = {
    "thinker": "Solve what comes first, and say how to go on from there.",
    "worker": SOLVE_IT,
    "verifier": "Check the last response. Say ACCEPT if it is right and whole, else what is wrong.",
}
ACCEPTS = re.compile(r"\bACCEPT\b|nothing here to work on")  # the second is what a specialist says
POPULATION = 32


def trinity(setup):
    """TRINITY (arXiv 2512.04695) in small: turn by turn a linear head on a small model's hidden state picks a
    worker and its role, and is evolved on the reward. The original's model has 0.6 B parameters, some evolved
    too, by a separable CMA-ES, and all turns are read. Here the head sees 24 principal components, model and
    workers see the newest turn alone, and calls cost."""
    rng = random.Random(setup.seed)
    model, tokenizer, _ = load_conductor(setup.trinity)

    @lru_cache(100_000)
    def state_of(text):
        ids = tokenizer.chat([{"role": "system", "content": ""}, {"role": "user", "content": text}])
        ids = torch.tensor([ids[-model.config.max_position_embeddings :]], device=model.device)
        with torch.no_grad():
            hidden = model(ids, head=lambda x: x[0, -2])  # (C), at the last token but one
        return hidden.float().cpu().numpy()

    states = np.stack([state_of(problem.question) for problem in setup.lessons])  # (P, C)
    center = states.mean(0)
    _, scale, axes = np.linalg.svd(states - center, full_matrices=False)
    axes = (
        math.sqrt(len(states)) * axes[:24].T / (scale[:24] + 1e-3 * scale[0])
    )  # (C, 24), to variances of 1

    def take_turns(rollouts, heads):
        """Play up to five rounds (§3.2) of one step, until a verifier accepts. The last response in the role
        worker counts. heads: by a rollout's number, (25, W + 3)."""

        def write(rollouts):
            for rollout in rollouts:
                last = rollout.previous
                text = rollout.question + (f"\n{last.written}: {last.answer}" if last else "")
                features = np.append((state_of(text) - center) @ axes, 1.0)  # (25), with a bias
                for_worker, for_role = np.split(features @ heads[rollout.number], [-len(ROLES)])
                rollout.written = [*ROLES][for_role.argmax()]
                step = Step(int(for_worker.argmax()), ROLES[rollout.written], [], wrote_all=True)
                accepted = last and last.written == "verifier" and ACCEPTS.search(last.answer)
                rollout.workflow = Workflow([] if accepted else [step])
                yield rollout

        votes = []
        for rollout in conduct(
            write,
            rollouts,
            extra_rounds=4,
            tries=1,
            judge=grade_once(),
            call=lambda rollout, i: call_worker(replace(rollout, number=0), i),
        ):
            turns = [turn for turn in rollout.rounds() if turn.workflow.steps]
            by_worker = [i for i, turn in enumerate(turns) if turn.written == "worker"]
            votes.append(vote(turns, [len(turns) - 1, *by_worker][-1]))
        return votes

    head = np.zeros((axes.shape[1] + 1, len(setup.pool) + len(ROLES)))  # (25, W + 3)
    noise = np.random.default_rng(setup.seed)
    for _ in tqdm(range(setup.effort), "trinity evolves", disable=None):
        batch = rng.sample(setup.lessons, min(32, len(setup.lessons)))
        steps = noise.standard_normal((POPULATION, *head.shape))
        rollouts = begin(batch, [setup.pool] * len(batch), "lesson")
        rollouts = [replace(rollout, number=k) for k in range(POPULATION) for rollout in rollouts]
        found = rewards(take_turns(rollouts, head + steps)).reshape(POPULATION, -1)
        order = np.nan_to_num(found).mean(1).argsort()
        head += steps[order[-POPULATION // 4 :]].mean(
            0
        )  # The larger it grows, the less a step turns it.
    return lambda problems, pools, name: take_turns(begin(problems, pools, name), [head])


# The table: make(setup) -> system


class System(NamedTuple):
    make: Callable  # of the settings, with `pool`, `worker` (its number) and `lessons`
    needs: str = ""  # "worker": the pool's workers play in turn
    calls: float = 1  # a question, about; 0: one of each worker
    lessons: int = 0  # calls to learn, about, if none is made twice


def change_steps(workflow: Workflow, **changes) -> Workflow:
    return Workflow([replace(step, **changes) for step in workflow.steps])


ABLATIONS = {
    "": None,
    "subtasks": partial(change_steps, subtask=SOLVE_IT),  # App. B.7
    "access": partial(change_steps, access=[], wrote_all=False),
}


def from_checkpoint(setup, edit=None):
    """The Conductor, whose workflows are edited before they run."""
    model, tokenizer, prompting = load_conductor(setup.checkpoint)
    prompting = replace(prompting, prompt_style=setup.prompt_style or prompting.prompt_style)
    write = model_writer(model, tokenizer, prompting, temperature=0.0)
    return conductor(write, prompting, setup.extra_rounds, edit, only=setup.only)


def in_the_seat(setup):
    """A worker in the Conductor's seat, who tries the format ten times (in the paper without end)."""
    prompting = Prompting(prompt_style=setup.prompt_style or Prompting.prompt_style)
    return conductor(
        worker_writer(setup.pool[setup.worker], prompting), prompting, setup.extra_rounds, tries=10
    )


SYSTEMS = {
    "conductor": System(from_checkpoint, "checkpoint", 3),
    "no-subtasks": System(partial(from_checkpoint, edit=ABLATIONS["subtasks"]), "checkpoint", 3),
    "no-access": System(partial(from_checkpoint, edit=ABLATIONS["access"]), "checkpoint", 3),
    "one-worker": System(
        lambda setup: from_checkpoint(setup, partial(change_steps, worker=setup.worker)),
        "checkpoint, worker",
        3,
    ),
    "seat": System(in_the_seat, "worker", 4),
    "workers": System(lambda setup: elect([setup.worker]), "worker"),
    "context": System(
        lambda setup: elect([setup.worker], call=partial(ask_bare, times=5)), "worker"
    ),
    "consensus": System(lambda setup: elect([setup.worker] * 5), "worker", 5),
    "reflect": System(lambda setup: reflect(setup.worker), "worker", 5),
    "random": System(lambda setup: planned(plan_at_random), calls=2.2),
    "moa": System(lambda setup: planned(propose_and_aggregate), calls=0),
    "smoothie": System(lambda setup: elect(None, common_words), calls=0),
    "router": System(router, "lessons", 1, 2_000),
    "masrouter": System(masrouter, "lessons", 2, 15_000),
    "trinity": System(trinity, "lessons", 3, 40_000),
}

# ---- Measure, and tables -----------------------------------------------------------------------------------

COLUMNS = {  # of a row, with the digits behind the point; a row's other keys are kinds
    "accuracy": 1,
    "±": 1,
    "lost": 0,
    "calls": 2,
    "tokens": 0,
    "dollars": 5,
    "dollars/right": 5,
    "calls to learn": 0,
}


def measure(rollouts: list[Rollout]) -> dict:
    """What a system's rollouts come to, as one flat row: the share of right answers; ± its 95 % interval,
    over problems; how many were lost; the mean calls, tokens and dollars (None: unknown) of the others, and
    what a right answer costs; the share of right answers by kind. A Conductor's own cost is in none."""
    known = [rollout for rollout in rollouts if rollout.right is not None]
    right = [rollout.right for rollout in known]
    costs = [rollout.cost for rollout in known]
    priced = known and None not in costs
    by_problem = {}
    for rollout in known:
        by_problem.setdefault(rollout.problem.id, []).append(rollout.right)
    # Two right and two wrong ones more (Agresti & Coull): a few that are all right prove little.
    shares = [*map(mean, by_problem.values()), 0, 0, 1, 1]
    row = {
        "accuracy": mean(right),
        "±": 1.96 * float(np.std(shares)) / math.sqrt(len(shares)) if known else None,
        "lost": len(rollouts) - len(known),
        "calls": mean([rollout.calls for rollout in known]),
        "tokens": mean([rollout.tokens_used for rollout in known]),
        "dollars": mean(costs) if priced else None,
        "dollars/right": sum(costs) / sum(right) if priced and any(right) else None,
    }
    for kind in dict.fromkeys(rollout.problem.kind for rollout in rollouts):
        row.setdefault(
            kind, mean([rollout.right for rollout in known if rollout.problem.kind == kind])
        )
    return row


def mean(values: list) -> float | None:
    return sum(values) / len(values) if values else None


def table(rows: dict[str, dict], title: str = "") -> str:
    """Rows of `measure` under their heads, accuracies in %; "?" is unknown, a blank not there."""
    present = dict.fromkeys(key for row in rows.values() for key in row)
    heads = [head for head in COLUMNS if head in present] + [
        key for key in present if key not in COLUMNS
    ]
    lines = [[title, *heads]]
    for name, row in rows.items():
        lines.append([name])
        for head in heads:
            value = row.get(head, "")
            if isinstance(value, (int, float)):
                scale = 1 if head in COLUMNS and head not in ("accuracy", "±") else 100
                value = f"{scale * value:.{COLUMNS.get(head, 1)}f}"
            lines[-1].append("?" if value is None else value)
    widths = [max(map(len, column)) for column in zip(*lines)]
    texts = [
        "  ".join([name.ljust(widths[0]), *map(str.rjust, cells, widths[1:])])
        for name, *cells in lines
    ]
    return "\n".join(map(str.rstrip, texts))


def progress(what: str, total: int) -> tqdm:
    """A bar on a terminal (disable=None), of rank 0 only."""
    hidden = os.environ.get("RANK", "0") != "0" or None
    return tqdm(desc=what, total=total, disable=hidden, leave=False)


# ---- Graders ------------------------------------------------------------------------------------
#
# Grading takes four steps: find the answer in the response, bring it and the gold answer to one
# spelling, split both into parts, and compare the values of the parts. An answer without a certain
# reading equals only its own text. Answers are parsed, never executed.

LONGEST = 1000  # characters; a longer answer equals only its own text

# Step 1: find the answer in the response

# Text whose braces are balanced, up to eight levels deep: a{b{c}}
IN_BRACES = ""
for _ in range(8):
    IN_BRACES = rf"(?:\\.|[^{{}}\\]|\{{{IN_BRACES}\}})*"

# \boxed{5}, \fbox{5}, or \boxed 5, where only one digit is in the box
BOX = rf"(?s:\\[bf]?box(?:ed)?\s{{0,9}}(?:\{{({IN_BRACES})\}}|(\d)))"

# One answer in several boxes: \boxed{5} and $x_2 = \boxed{6}$
BETWEEN = r"(?:[\s$*,;]|\\[(),; ]|\b(?:and|or)\b|\\text\{ *(?:and|or) *\}|\b[A-Za-z](?:_\d)? *=)*"
BOXES = re.compile(f"{BOX}(?:{BETWEEN}{BOX})*")

# What stands before or after a box and makes the answer something else than the box's content
BEFORE = re.compile(
    r"""(?x)(?:
        (?: (?<!\n)-                # -\boxed{5}; at the start of a line, "-" marks an item
          | [+/√^≠|]                # 1/\boxed{5}
          | \\(?:sqrt|ln|neq?|pm)   # \sqrt{\boxed{5}}
          | \b(?:not|minus)         # not \boxed{5}
        )[ ]?[${]*
      | \d(?:\\,)?                  # 2\boxed{5}
      | \\frac\{                    # \frac{\boxed{5}}{2}
    )\Z"""
)
AFTER = re.compile(
    r"""(?x)
        [A-Za-z\d({|]                               # \boxed{5}x
      | \)\^                                        # (\boxed{5})^2
      | [$ ]*(?:
            [!/×±+]                                 # \boxed{5}!
          | \.\d                                    # \boxed{5}.5
          | [-,;*][ ]?[$\d]                         # \boxed{5}, 6
          | \^(?!\{?\\circ)                         # \boxed{5}^2, but not \boxed{5}^\circ
          | \\(?:cdot|times|pm|pi|ln|%)(?![a-z])    # \boxed{5} \times 10^3
          | (?:\\text\{[ ]*)?(?:
                \w+llion\b                          # \boxed{5} million
              | (?:or|and)\b[ }]*[-$\d]             # \boxed{5} or $6$
            )
        )"""
)

# "The answer is", "Answer:", "the right option should be", "#### " (GSM8K), a line "Final answer"
CLAIM = re.compile(
    r"""(?xim)
        \b(?:answer|(?:option|choice)(?![ ]*\(?[A-J]\b))\b[^\n.:?]{0,40}?
            (?:\b(?:is|(?:must|should|would)[ ]be)\b|:)[\s:*]*
      | \bfinal[ ]answer\b[* ]*\n\s*
      | ^\#\#\#\#\s"""
)

# "I doubt that ...": a claim in the rest of such a sentence does not count
DENIED = re.compile(
    r"(?i)(?:\b(?:not|never|if|whether|unless|wrong|false|doubt|unlikely)\b|n't\b)[^.!?\n]*$"
)

# Where a claim ends: at the end of its sentence or line, or where a reason begins
END_OF_CLAIM = re.compile(r"(?<=[^.])\.[*$]*\s+(?=[A-Z])|\n|[,;.]?\s(?:because|since)\b")


def boxed(response: str) -> str | None:
    r"""Return the content of the last \boxed{} or <answer>; None if the response has neither.

    Boxes with only "," or "and" between them are one answer: "\boxed{5} or \boxed{6}" -> "5, 6".
    Returns "" if the last box does not close, or if a neighbour changes it, as in "-\boxed{5}".
    """
    text = re.sub("(?i)<answer>", r"\\boxed{", response[-100 * LONGEST :])
    text = re.sub("(?i)</answer>", "}\n.\n", text).replace("**", " ")
    *_, last = [None, *BOXES.finditer(text)]
    if last is None or r"\boxed{" in text[last.end() :]:
        return "" if r"\boxed{" in text else None
    if BEFORE.search(text, 0, last.start()) or AFTER.match(text, last.end()):
        return ""
    contents = [in_braces or digit for in_braces, digit in re.findall(BOX, last[0])]
    return ", ".join(dict.fromkeys(contents)).replace(r"\boxed", "").strip()


def claims(response: str) -> list[str]:
    """Return what each claim says, without its reason; "" for a claim that is denied.

    "The answer is 5 because 2+3=5." -> ["5"];  "If x is 3, the answer is 4." -> [""]
    """
    found = []
    for match in CLAIM.finditer(response[-5 * LONGEST :]):
        before = match.string[: match.start()][-200:]
        after = match.string[match.end() :][:LONGEST]
        found.append("" if DENIED.search(before) else END_OF_CLAIM.split(after)[0].strip("* "))
    return found


def final_answer(response: str) -> str:
    r"""Return the text of the answer: the last \boxed{} or <answer>, else the last claim, else the
    last line if it is short, else ""."""
    answer = boxed(response)
    if answer is None:
        last_line = response[-LONGEST:].strip().rpartition("\n")[2]
        *_, answer = [last_line if len(last_line) < 100 else "", *claims(response)]
    return re.sub(r"(?<=[^.])\.$", "", answer.strip("* ")).strip("* ")


# Step 2: bring it to one spelling. A matrix is written as ⟦a&b,c&d⟧, a set as ⦃a,b⦄, "or" as ∨, and
# an inequality as an interval.


def normalize(text: str) -> str:
    r"""Bring an answer to one spelling: "$\left(\dfrac12,\; x²\right)$" -> "(\frac{1}{2},x^2 )"."""
    text = " ".join(text[: 2 * LONGEST].split()).translate(CHARACTERS)
    for pattern, replacement in RULES:
        text = pattern.sub(replacement, text)
    return text


def as_interval(match: re.Match) -> str:
    """Write an inequality as an interval: 2>x≥1 -> x∈[1,2)"""
    low, below, name, above, high = match.groups("")
    if {">", "≥"} & {below, above}:
        low, below, above, high = high, above, below, low
    opening = "[" if below in ("≤", "≥") else "("
    closing = "]" if above in ("≤", "≥") else ")"
    return f"{name}∈{opening}{low or '-∞'},{high or '∞'}{closing}"


# One character, from Unicode, for another
CHARACTERS = str.maketrans(
    dict(zip("·⋅∗−–—÷µΩ’", "***---/μΩ'")) | {"√": r"\sqrt ", "½": r"\frac12", "∅": "⦃⦄"}
)
RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻₀₁₂₃₄₅₆₇₈₉", "0123456789+-0123456789")

# The character that a LaTeX command stands for: \le is ≤. HTML names most of them as LaTeX does.
SIGNS = {name.rstrip(";"): sign for name, sign in html5.items() if len(sign) == 1}
SIGNS |= dict(
    pair.split("=")
    for pair in (
        r"cdot=* div=/ infty=∞ infinity=∞ leqslant=≤ geqslant=≥ neq=≠ emptyset=⦃⦄ varnothing=⦃⦄ "
        r"degree=° lvert=| rvert=| mid=| varphi=φ varepsilon=ε "
        r"dfrac=\frac tfrac=\frac cfrac=\frac %=% $=＄ {=⦃ }=⦄ \=,"
    ).split()
)
SIGNS |= dict.fromkeys([*"!,;: ()[]", "quad", "displaystyle", "left", "right"], " ")

# A variable, with or without a subscript: x, AB, θ, x_1
LETTER = r"(?:(?!NO)[A-Z]{1,2}|[a-zα-ωΔℓ])(?:_\w{1,3}|_\{\w{1,3}\})?(?!\w)"

# A name before an answer, which one side may omit: ∠ABC=, x=, f^{-1}(x)=, P(A|B)=, x∈, (x,y)=
NAMED = re.compile(
    rf"(?:m?[∠▵][A-Z]+|{LETTER}(?:\^\{{?-1\}}?|'+)?(?:\((?:[^()=A-Za-z]|[A-Za-z](?![A-Za-z]))*\))?)"
    r"(?:=|∈(?=[(\[⦃]))|\((?:x,y|x,y,z|a,b|a,b,c|m,n|p,q|r,θ)\)=(?=\()"
)

# A pattern and its replacement, in the order of their application. Comments show what each does.
# fmt: off
RULES = [
    # {5} -> 5
    (rf"^\s*\{{({IN_BRACES})\}}\s*$", r"\1"),
    # x² -> x^{2}
    (r"[⁰¹²³⁴-⁻]+", lambda m: "^{" + m[0].translate(RAISED) + "}"),
    # CO₂ -> CO_{2}
    (r"[₀-₉]+", lambda m: "_{" + m[0].translate(RAISED) + "}"),
    # $x$, 5~cm: dollar signs and ties are spaces
    (r"(?<!\\)\$|(?<=[\w.,;)}{])~", " "),
    # 1\,000 and 1,\!000 -> 1,000
    (r"(?<=\d)(?:\\,|,?\s*\\!)\s*(?=\d{3})", ","),
    # \begin{pmatrix} -> ⟦
    (r"\\begin\{(?:[pb]?matrix|array)\}(?:\{[clr|\s]*\})?", "⟦"),
    (r"(?:\\\\\s*)?\\end\{(?:[pb]?matrix|array)\}", "⟧"),
    # sqrt(2) -> \sqrt(2)
    (r"(?<![\\A-Za-z])(sqrt|pi|infinity|(?:arc)?(?:sin|cos|tan)|exp|ln|log)(?![A-Za-z])", r"\\\1"),
    # \sin^{-1} x -> \arcsin x
    (r"\\(sin|cos|tan)\s*\^\s*(?:\{\s*-1\s*\}|-1)", r"\\arc\1"),
    # 60^{\circ} -> 60°
    (r"\^\s*(\{)?\s*(?:\\circ(?![A-Za-z])|°)(?(1)\s*\})", "°"),
    # \le -> ≤
    (r"\\([A-Za-z]+|.)", lambda m: SIGNS.get(m[1], m[0])),
    # \text{cm} -> cm
    (rf"\\(?:(?:text|math)(?:rm|bf|it)?(?![A-Za-z])|mbox|boldsymbol)\s*\{{(?!\}})({IN_BRACES})\}}",
     r"\1"),
    # 1,000 and 1{,}000 -> 1000, but not in (1,000)
    (r"(?<![\d.,(\[{⦃-])[1-9]\d{0,2}(?:(?:\{,\}|,)\d{3})+(?![\d)\]}⦄]|,\d)",
     lambda m: re.sub(r"\D", "", m[0])),
    # 3 x 10^8 and 3e8 -> 3*10^{8}
    (r"(?<=\d)\s*(?:[xX]\s*10\^\{?|[eE])([-+]?\d+)\}?", r"*10^{\1}"),
    # 5 million -> 5*1000000
    (r"(?<=\d) *million\b", "*1000000"),
    # \$5 -> 5 dollars
    (r"＄ *([\d.*]*\d)", r"\1 dollars"),
    # 5 percent -> 5%
    (r" ?percent\b", "%"),
    # 5 degrees -> 5°
    (r" ?\bdegrees?\b", "°"),
    # 5°C -> 5 celsius
    (r"° ?C(?:elsius)?\b", " celsius"),
    # feet per day -> feet/day
    (r"(?<=\w) per (?=\w)", "/"),
    # square feet -> feet^2
    (r"\bsq(?:uare|\.)? (\w+)", r"\1^2"),
    # The cell -> cell
    (r"(?i)^ *(?:the|an?) (?=\w\w)", ""),
    # x<=1 -> x≤1
    (r"<=", "≤"),
    (r">=", "≥"),
    # 1 or 2 -> 1∨2
    (r",?\s*(?<!\\)\bor\b\s*", "∨"),
    # 1, 2 and 3 -> 1, 2,3
    (r",?\s*(?<!\\)\band\b\s*|;", ","),
    # |x| -> \abs{x}
    (r"\|([^|]*)\|", r"\\abs{\1}"),
    # \log_2 8 -> \frac{1}{\ln{2}}\ln 8
    (r"\\log_(\w|\{[^{}]*\})", r"\\frac{1}{\\ln{\1}}\\ln "),
    # \sqrt[3]{x} -> \root{3}{x}
    (r"\\sqrt *\[(\w+)\]", r"\\root{\1}"),
    # \sqrt{x} -> \root2 {x}
    (r"\\sqrt(?![a-z])", r"\\root2 "),
    # x_{1} -> x_1
    (r"([_^])\{([-+\w])\}", r"\1\2 "),
    # 10^-3 -> 10^{-3}
    (r"\^(-\d+)", r"^{\1}"),
    # Only spaces between letters or digits stay: 5 cm
    (r"\s+", " "),
    (r"(?<![A-Za-z0-9])\s|\s(?![A-Za-z0-9])", ""),
    # 5. -> 5
    (r"(?:(?<!\.)\.|[\\,;])$", ""),
    # √2 ≈ 1.41 -> √2, and ≈ 1.41 -> 1.41
    (r"(?<=[^x=])≈-?\d*\.\d+\D*$|^(?:[a-z]=?)?≈(?=\d*\.)", ""),
    # \frac12 -> \frac{1}{2}
    (r"\\frac(\d)", r"\\frac{\1}"),
    (r"(\\frac\{[^{}]*\})(\d)", r"\1{\2}"),
    # 2 1/3 and 2\frac{1}{3} -> (2+1/3)
    (r"(?<![\d.^_}/])(\d+)(?: (\d+)/(\d+)|\\frac\{(\d+)\}\{(\d+)\})(?![\d/])", r"(\1+\2\4/\3\5)"),
    # 3±√2 -> 3+√2,3-1*√2
    (r"(?<![^,∨⦃⦄])([^,∨⦃⦄±]*)±([^,∨⦃⦄]*)", r"\1+\2,\1-1*\2"),
    # 1<x≤2 -> x∈(1,2]
    (r"(?<![^,∨])(?=[^,∨]*[<>≤≥])(?:([^<>≤≥,∨]+)([<>≤≥]))?"
     rf"({LETTER})(?:([<>≤≥])([^<>≤≥,∨]+))?(?![^,∨])", as_interval),
    # x∈(1,2)∨x∈(3,4) -> x∈(1,2)∪x∈(3,4), and 1∨2 -> 1,2
    (r"∨(?=\w∈[(\[])", "∪"),
    (r"(?<![a-z]{2})∨(?![a-z]{2})", ","),
    # (⟦1&2⟧) -> ⟦1&2⟧
    (r"[(\[](⟦[^⟦⟧]*⟧)[)\]]", r"\1"),
    # Mitosis -> mitosis, but not MW or Mpa
    (r"\b(?!M[^aeiouy]|Mohm|Pmol)[A-Z](?=[a-z]{2})|\b(?:In|Of|On|To|No)\b", lambda m: m[0].lower()),
    # CO_2 -> CO2
    (r"^(?:[A-Z][a-z]?(?:_\{?\d+\}? ?)?){2,}$", lambda m: re.sub("[_{} ]", "", m[0])),
]
# fmt: on
RULES = [(re.compile(pattern), replacement) for pattern, replacement in RULES]

# Step 3: split it into parts


def split_parts(text: str, separators: str = ",∪=∈<≤&") -> tuple[str, list[str]]:
    """Return the kind of an answer, and its parts.

    1,2 and {1,2} -> (",", ["1", "2"])
    (1,2)         -> ("()", ["1", "2"])
    x=1           -> ("=", ["x", "1"])
    5             -> ("", ["5"])
    """
    # Split at the first of the separators that stands outside of all brackets.
    opened = itertools.accumulate("([{⦃⟨⟦".count(sign) - ")]}⦄⟩⟧".count(sign) for sign in text)
    depths = list(opened)
    for separator in separators:
        marked = ["\n" if pair == (separator, 0) else pair[0] for pair in zip(text, depths)]
        parts = "".join(marked).split("\n")
        if len(parts) > 1:
            return separator, parts

    # Else look into the brackets around it.
    kind = text[:1] + text[-1:]
    if separators == "," or kind not in "() [] [) (] ⟨⟩ ⟦⟧ ⦃⦄".split():
        return "", [text]
    inner_kind, parts = split_parts(text[1:-1], ",")
    if kind == "⦃⦄":
        return ",", parts
    return (kind, parts) if inner_kind or kind == "⟦⟧" else ("", [text])


# Step 4: compare values. Each letter of an expression takes the values of POINTS in an order of its
# own, so an expression has 12 values. Rational values are Fractions, which are exact; others are
# floats or complex numbers, and nan where the expression is undefined.

POINTS = [Fraction(n, 8) for n in (1, 5, 9, 13, 15, 21, 29, 37, 75, 811, -11, -131)]
CONSTANTS = {"π": [math.pi] * 12, "e": [math.e] * 12, "i": [1j] * 12}
VARIABLE = r"[A-Za-zα-ωΔℓ∞](?:_\{\w+\}|_\w)?'*"  # x, x_1, x_{12}, y'
TOKEN = re.compile(rf"\\[A-Za-z]+|\d+\.?\d*|\.\d+|{VARIABLE}|\S")

# Numbers that come so close to others that floats cannot tell them apart: 1.41421356237 is not √2
LONG = re.compile(r"\d{10}|\.\d{9}|10\^\{-(?:\d\d|9)")

# Texts without a certain reading
UNSURE = re.compile(
    r"""(?x)
        (?<![\\A-Za-z_{])                                        # a word, but not ab or mgh
        (?!(?:[abcf-z][a-df-hj-np-tv-z]|[b-df-hj-np-tv-z]{3}|abc|xyz)(?![A-Za-z]))[A-Za-z]{2,}
      | (?<![\\A-Za-z])[fg](?:_\w+)?'*(?:\^(?:\w|\{[^{}]*\}))?[(\[]    # f(x), g^2(x)
      | (?<![\\A-Za-z_])[A-Za-zα-λν-ορ-ωΔℓ](?:_\w+)?'*\(-?[^-+()]*\)   # T(n/4), but not x(x+1)
      | ^\(?[\d.]+(?:-[\d.]+)+(?:$|\))                           # 1914-1918
      | ^(?:[A-Zα-λν-ορ-ω](?:\^\{?-?[\dT]\}?)?[ *-]*){2,}$       # A^{-1}B, where AB is not BA
      | ^[A-Za-z]×[A-Za-z]$                                      # v×u"""
)


def at_each_point(function: Callable, *columns: list) -> list:
    """Apply a function to its arguments' values, point by point; nan where it is undefined."""

    def at_point(*numbers):
        try:
            return function(*numbers)
        except (ArithmeticError, ValueError):
            return math.nan

    return [*map(at_point, *columns)]


def power(x, y):
    """Return x**y. Raises OverflowError if the exact value had more than about 2,000 bits."""
    bits = (x.numerator * x.denominator).bit_length() if isinstance(x, Fraction) else 0
    if bits * abs(y) > 2000:
        raise OverflowError
    return x**y


class Expression:
    """An expression, parsed by recursive descent.

    values: its value at each of the 12 points; empty if it has no certain reading
    letters: its variables, units included
    n_operands: how many numbers and letters it holds
    """

    def __init__(self, text: str):
        self.tokens = [*TOKEN.findall(text), "end"]
        operands = [token for token in self.tokens[:-1] if re.match(r"[\w.∞]", token)]
        self.n_operands = len(operands)
        self.letters = {token for token in operands if re.fullmatch(VARIABLE, token)} - {*CONSTANTS}
        self.known = CONSTANTS | {x: random.Random(x).sample(POINTS, 12) for x in self.letters}
        try:
            values = [] if self.n_operands > 200 or UNSURE.search(text) else self.read(1)
        except (KeyError, ValueError, RecursionError):
            values = []
        self.values = values if self.tokens == ["end"] else []

    def take(self, tokens: str) -> bool:
        """Remove the next token if it is one of these; return whether it was."""
        if self.tokens[0] not in tokens:
            return False
        self.tokens.pop(0)
        return True

    def read(self, weakest: int) -> list:
        """Return the values of what comes next, up to an operator weaker than `weakest`."""
        is_signed = weakest == 1 and self.tokens[0] in "+-"
        value = [Fraction(0)] * 12 if is_signed else self.read_operand()
        last_sign = ""
        while True:
            sign = self.tokens[0]
            side_by_side = (3, operator.mul) if sign in self.known else (0, None)  # 2x, or the end
            strength, function = OPERATORS.get(sign[0], side_by_side)
            if strength < weakest:
                return value
            if last_sign == "/" and strength > 1 or last_sign == sign == "^":
                raise ValueError("1/2x and 2^3^2 have two readings")
            self.take("+-*×/^")
            value = at_each_point(function, value, self.read(4 if sign == "/" else strength + 1))
            last_sign = sign

    def read_operand(self) -> list:
        """Return the values of a number, a letter, a bracket, or a function and its argument."""
        token = self.tokens.pop(0)
        if token in CLOSING:
            value = self.read(1)
            if not self.take(CLOSING[token]):
                raise ValueError("a bracket is missing")
        elif token in (r"\frac", r"\root"):
            value = at_each_point(FUNCTIONS[token], self.read_operand(), self.read_operand())
        elif token in FUNCTIONS:  # \sin^2 2x is (\sin(2x))^2
            exponent = self.read_operand() if self.take("^") else [Fraction(1)] * 12
            argument = self.read_operand() if self.tokens[0] in CLOSING else self.read(3)
            value = at_each_point(power, at_each_point(FUNCTIONS[token], argument), exponent)
        elif token[0] in ".0123456789":
            value = [Fraction(token)] * 12
        else:
            value = self.known[token]
        return at_each_point(lambda x: x * math.pi / 180, value) if self.take("°") else value


# fmt: off
FUNCTIONS = {
    r"\sin": cmath.sin, r"\arcsin": cmath.asin, r"\exp": cmath.exp, r"\abs": abs,
    r"\cos": cmath.cos, r"\arccos": cmath.acos, r"\ln": cmath.log, r"\frac": operator.truediv,
    r"\tan": cmath.tan, r"\arctan": cmath.atan, r"\log": cmath.log10,
    r"\root": lambda n, x: power(x, 1 / n),
}
# fmt: on
# How strongly each operator binds, and its function. A bracket or a command after an operand
# multiplies: 2(x+1), 2\pi.
OPERATORS = {
    "+": (1, operator.add),
    "-": (1, operator.sub),
    "/": (2, operator.truediv),
    "^": (4, power),
    **dict.fromkeys("*×(\\", (2, operator.mul)),
}
CLOSING = {"(": ")", "{": "}", "[": "]"}

# A unit is a factor times base units, which are letters: UNITS["km"] is (1000*(u_{m}))
UNITS = {}
for pair in (
    "m g s mol K A V celsius degree person unit apple way outcome dollar cent=0.01*dollar "
    "people=person %=0.01 °=degree km=1000*m cm=0.01*m mm=0.001*m kg=1000*g mg=0.001*g L=0.001*m^3 "
    "mL=0.001*L N=kg*m/s^2 Pa=N/m^2 MPa=10^6*Pa J=N*m kJ=1000*J W=J/s meter=m kilometer=km "
    "centimeter=cm gram=g kilogram=kg second=s min=60*s minute=min h=60*min hour=h day=24*h "
    "in=0.0254*m inch=in ft=12*in foot=ft feet=ft yard=3*ft mi=1760*yard mile=mi"
).split():
    unit, _, meaning = pair.partition("=")
    in_base_units = re.sub("[^-0-9.*/^{}()]+", lambda m: UNITS[m[0]], meaning)
    UNITS[unit] = f"({in_base_units or 'u_{' + unit + '}'})"

# A unit, also in the plural; and a number with units: 5 cm, 9.8 m/s^2. Not a quantity: 5m, 5x m,
# \sin 5 m, 2π°, 5%%
UNIT = "(" + "|".join(sorted(UNITS, key=len, reverse=True)) + r")(?:(?<=\w\w)e?s)?(?![A-Za-z])"
QUANTITY = re.compile(
    r"(?!.*π.*°|.*[%°].)((?:[^\\a-z]|\\frac|\\root)*[\d)}π])(?: |(?![A-Za-z](?:$|[^A-Za-z])))"
    rf"((?:{UNIT}(?: ?\^ ?\{{?-?\d\}}?|\d\b)?[ */()]*)+)"
)


def split_unit(text: str) -> tuple[str, str]:
    """Return a quantity without its unit, and as an expression in base units.

    "5 km" -> ("5", "(5)*(1000*(u_{m}))");  "5" -> ("5", "5")
    20% is 20 as well as 0.2, because the question may ask for a percentage.
    """
    match = QUANTITY.fullmatch(text)
    if not match:
        return text, text
    number, units, _ = match.groups()
    units = re.sub("/(.*)", r"/(\1)", units)  # in J/mol K, the K too stands below
    in_base_units = f"({number})*" + re.sub(UNIT, lambda m: UNITS[m[1]], units)
    is_share = "%" in units and not re.fullmatch(r"-?[1-9][\d.]*", number)
    return in_base_units if is_share else number, in_base_units


def same_value(answer: str, gold: str, tolerance: float) -> bool:
    """Whether two expressions agree at three points or more, and at no point differ."""
    mine, theirs = Expression(answer), Expression(gold)
    if mine.letters != theirs.letters:
        return False
    # An expression that is still to be worked out is no answer: the question often contains it.
    if not theirs.letters and mine.n_operands > theirs.n_operands + 2:
        return False
    differences = at_each_point(operator.sub, mine.values, theirs.values)
    is_exact = all(isinstance(difference, Fraction) for difference in differences)
    if not is_exact and LONG.search(f"{answer} {gold}"):
        return False

    is_formula = any(not letter.startswith("u_") for letter in theirs.letters)
    rounding = 0 if is_exact else 1e-12
    error = Fraction(rounding if is_formula else tolerance or rounding)
    agree = [
        abs(difference) <= error * abs(value)
        for difference, value in zip(differences, theirs.values)
        if is_exact or abs(difference) < math.inf and 1e-9 < abs(value) < 1e9
    ]
    return len(agree) > 2 and all(agree)


def same_parts(answer: str, gold: str, tolerance: float = 0.0) -> bool:
    """Whether two normalized answers have the same kind and the same parts.

    The parts of lists, sets, unions and equations may stand in any order.
    """
    if answer == gold:
        return answer != ""
    kind, parts = split_parts(answer)
    gold_kind, gold_parts = split_parts(gold)
    if kind != gold_kind or len(parts) != len(gold_parts) or len(parts) > 50:
        return False

    if kind == "":
        number, whole = split_unit(answer)
        gold_number, gold_whole = split_unit(gold)
        may_drop_unit = number == whole or gold_number == gold_whole  # one of them has no unit
        return (may_drop_unit and same_value(number, gold_number, tolerance)) or same_value(
            whole, gold_whole, tolerance
        )
    if kind not in ",∪=":
        return all(map(same_parts, parts, gold_parts))
    for part in parts:
        equals = [other for other in gold_parts if same_parts(part, other)]
        if not equals:
            return False
        gold_parts.remove(equals[0])
    return True


def same_math(answer: str, gold: str, tolerance: float = 0.0) -> bool:
    r"""Whether two answers in LaTeX or plain text mean the same: "x = \frac12" and "0.5".

    A name ("x =") or a unit may be missing on one side. If the gold answer has a decimal point,
    numbers may differ by the tolerance, which is relative.
    """
    if max(len(answer), len(gold)) > LONGEST:
        return answer.strip() == gold.strip() != ""
    texts = [normalize(answer), normalize(gold)]

    # Drop the name, which is one on both sides: 1,-3 for x=1,x=-3
    names = {match[0] for match in map(NAMED.match, texts) if match}
    bare = [text.replace(*names, "") for text in texts] if len(names) == 1 else texts
    if not any("=" in text for text in bare):
        texts = bare
    return same_parts(*texts, tolerance if "." in texts[1] else 0.0)


def same_short(answer: str, gold: str) -> bool:
    """Whether a short free answer is the gold one (RLPR).

    Words may differ in case, articles and punctuation: "An increase." is "increase". Numbers may
    differ by 1 % if the gold one has a decimal point, for then it was measured or rounded.
    """
    is_words = re.fullmatch(r"[^\W\d_]{2}(?:[^\W\d_]|[-\s,.;:'\"“”])*", gold)
    if is_words:
        # "a" is an article only at the start; elsewhere it may be a name
        mark = r"(?i)^\s*an?\s(?=\s*\w)|\bthe\s|\ban\s|[.,;:'\"“”*]"
        answer, gold = [
            re.sub(r"(?<=\w)-(?=\w)", " ", re.sub(mark, "", text)) for text in (answer, gold)
        ]
    return same_math(answer, gold, 0.01)


def repeats_formula(answer: str, question: str, gold: str) -> bool:
    r"""Whether an answer repeats a formula of the question, as \sqrt{192} does for
    "Simplify $\sqrt{192}$".

    A policy can tell a worker to repeat the formula, so this must not pay. Only operands and
    commands are compared, without 0 and 1, which change nothing in x+0 and 1x.
    """
    operand = (
        r"\\(?!frac)[A-Za-z]+|(?![01](?:\.0*)?(?![\d.]))\d[\d.]*|(?<![A-Za-z])[^\W\d_](?![a-z])"
    )
    texts = [normalize(re.sub(r"^\s*\w\s*=", "", text)) for text in (answer, question, gold)]
    mine, asked, wanted = [" ".join(["", *re.findall(operand, text), ""]) for text in texts]
    is_formula = mine.count(" ") > 2 or "\\" in mine
    has_operator = re.search(r"[-+*/^\\]", answer) is not None
    return is_formula and has_operator and mine in asked and mine != wanted


# Letters of multiple-choice questions

LETTERS = "ABCDEFGHIJ"
# "So the answer is (B)", "**B**", "B is correct", "B. its text", "B (its text)".
# The groups are the letter and the text.
CHOICE = re.compile(
    r"""(?xi)
        (?:(?:the|correct|final|best|answer|option|choice|is|so|thus|hence|therefore)\b[\s:,]*)*
        [(\["'“*_]*([A-J])(?![^\W_])[)\]"'”*_]*(?:[\s):,.;]|-(?=\s))*
        (?:is[ ](?:the[ ])?(?:correct|right|best)(?:[ ]\w+)?$)?
        \(?(?:the[ ]|an?[ ])?(.*?)"""
)


def letter_of(text: str, choices: list[str]) -> str | None:
    """Return the letter that a text names, or None.

    The text is the letter, "B" or "(B)"; the letter with its choice, "B. the nucleus"; or the text
    of exactly one choice, "the nucleus".
    """
    text = normalize(text[:LONGEST])
    match = CHOICE.fullmatch(text)
    letter, rest = (match[1].upper(), match[2]) if match else ("", "")
    named = []
    for own_letter, choice in zip(LETTERS, choices):
        is_its_text = choice == text not in LETTERS
        own_texts = ("", choice, choice + ")", choice.lstrip("("))
        if is_its_text or (own_letter == letter and rest in own_texts):
            named.append(own_letter)
    return named[0] if len(named) == 1 else None


def pick_letter(response: str, choices: list[str]) -> str | None:
    r"""Return the letter that a response commits to; None if it names none, or several.

    It is read from the last \boxed{} or <answer>, else from all claims, else from the last
    sentences.
    """
    choices = [normalize(choice) for choice in choices]
    in_box = boxed(response)
    said = claims(response)[-99:] if in_box is None else [in_box]
    said = [text for text in said if letter_of(text, choices) or re.search(r"\b[A-J]\b", text)]
    if in_box is None and not said:
        sentences = re.split(r"[.!?]\s|\n", response[-LONGEST:])
        said = [text for text in sentences if letter_of(text, choices)]
    picked = {letter_of(text, choices) for text in said}
    return picked.pop() if len(picked) == 1 else None


# A grader


class Grader(NamedTuple):
    instruction: str  # appended to a question that does not specify an answer format
    extra: tuple  # the keys of Problem.extra that it reads
    check: Callable  # check(problem, response) -> "" if right, else what is wrong, for a trace
    agree: Callable  # agree(problem, one, other) -> whether two responses answer alike, for votes


def text_grader(instruction: str, read: Callable, same: Callable, extra: tuple = ()) -> Grader:
    """Return a grader that compares texts, and refuses to accept a formula of the question.

    Args:
        read: read(response, *values of extra) -> the answer, or None
        same: same(answer, gold) -> whether the answer is right
    """

    def read_answer(problem, response):
        return read(response, *[problem.extra[key] for key in extra]) or ""

    def check(problem, response):
        answer = read_answer(problem, response)
        if not answer:
            return "no answer found"
        if not same(answer, problem.answer):
            return f"answered {answer[:200]}"
        if repeats_formula(answer, problem.question, problem.answer):
            return "repeated the question's formula"
        return ""

    def agree(problem, one, other):
        answer = read_answer(problem, one)
        return answer != "" and same(answer, read_answer(problem, other))

    return Grader(instruction, extra, check, agree)


def own_grader(is_right: Callable) -> Grader:
    """Return the grader of a user's function is_right(problem, response) -> bool.

    In votes, two responses agree if they are the same text.
    """

    def check(problem, response):
        try:
            return "" if is_right(problem, response) else f"answered {response[-200:]}"
        except Exception as e:
            raise ValueError(f"the grader failed on {problem.id}: {type(e).__name__}: {e}") from e

    return Grader("", (), check, same_response)


def same_response(problem: Problem, one: str, other: str) -> bool:
    return one.strip() == other.strip() != ""


def bare_text(response: str) -> str:
    r"""Return the last \boxed{} or <answer>, else the whole response, in lower case and without
    punctuation at its ends."""
    found = boxed(response)
    text = " ".join((response if found is None else found).casefold().split())
    return text.strip(" .,;:!?'\"`*_$()“”‘’") or text


def check_program(problem: Problem, response: str) -> str:
    return find_wrong_test(extract_code(response), tests_of(problem), problem.extra["function"])


def check_solution(problem: Problem, response: str) -> str:
    test, code_prompt = problem.extra["test"], problem.extra["code_prompt"]
    return find_failed_unittest(extract_code(response), test, code_prompt)


def failure(problem: Problem, response: str) -> str:
    """Return "" if a response answers the problem, else the reason why it does not, for a trace."""
    return GRADERS[problem.grader].check(problem, response)


def grade(problem: Problem, response: str) -> bool:
    return failure(problem, response) == ""


def grade_once() -> Callable:
    """Return a `failure` that judges equal responses to a problem only once.

    The rollouts of a group often contain the same program.
    """
    locks, known = {}, {}

    def judge(problem, response):
        key = problem.id, problem.answer, response
        with locks.setdefault(key, threading.Lock()):
            if key not in known:
                known[key] = failure(problem, response)
        return known[key]

    return judge


BLOCK = "Put all of it, imports included, in one ```python block."
GRADERS = {
    "exact": text_grader(
        "Put the final answer, and nothing else, in <answer> tags.",
        bare_text,
        lambda answer, gold: answer == bare_text(gold),
    ),
    # The laptop world's, whose workers answer with nothing but the answer
    "same": own_grader(lambda problem, response: response.strip() == problem.answer),
    "math": text_grader("Put the final answer in \\boxed{}.", final_answer, same_math),
    "short": text_grader(
        "Put the final answer, as short as possible, in <answer> tags.", final_answer, same_short
    ),
    "letter": text_grader(
        "Put the letter of the right option in <answer> tags.",
        pick_letter,
        operator.eq,
        extra=("choices",),
    ),
    "code": Grader(
        f"Write a Python program from standard input to standard output. {BLOCK}",
        extra=("tests", "function"),
        check=check_program,
        agree=same_response,
    ),
    "unittest": Grader(
        f"Complete the code above. {BLOCK}",
        extra=("test", "entry_point", "code_prompt"),
        check=check_solution,
        agree=same_response,
    ),
}


# ---- Benchmarks --------------------------------------------------------------------------------------------

# A row of a data set, the n-th, becomes a problem:


def math_problem(row: dict, n: int) -> Problem:
    return Problem(f"{n}", row["problem"], str(row["answer"]), "math", level=row.get("level", 0))


def rlpr_problem(row: dict, n: int) -> Problem:
    question, answer = row["prompt"][1]["content"], row["reward_model"]["ground_truth"]
    return Problem(
        f"{n}", question, answer, "short", level=row["extra_info"]["reasoning_score"] or 0
    )


def choice_problem(row: dict, n: int) -> Problem:
    extra = {"choices": row["choices"]}
    return Problem(f"{n}", row["question"], LETTERS[row["answer"]], "letter", extra=extra)


def gpqa_problem(row: dict, n: int) -> Problem:
    names = ["Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3"]
    order = random.Random(n).sample(range(4), 4)
    choices = [row[names[i]].strip() for i in order]
    return choice_problem(
        {"question": row["Question"], "choices": choices, "answer": order.index(0)}, n
    )


def livecodebench_problem(row: dict, n: int) -> Problem:
    """Its tests, up to hundreds of MB, stay in their file until `tests_of` reads them."""
    question = row["question_content"]
    if row["starter_code"]:
        question += f"\n\n```python\n{row['starter_code'].strip()}\n```"
    level = ["easy", "medium", "hard"].index(row["difficulty"]) + 1
    extra = {"function": json.loads(row["metadata"]).get("func_name"), "tests": row["place"]}
    return Problem(row["question_id"], question, "", "code", level=level, extra=extra)


def bigcodebench_problem(row: dict, n: int) -> Problem:
    question = f"```python\n{row['complete_prompt'].strip()}\n```"
    extra = {column: row[column] for column in GRADERS["unittest"].extra}
    return Problem(row["task_id"], question, "", "unittest", extra=extra)


class Source(NamedTuple):
    """A data set on the Hugging Face hub: a JSONL or CSV file, or Parquet, by the hub's dataset viewer."""

    repository: str
    rows: str  # the file, or the viewer's config/split
    count: int
    licence: str
    problem: Callable  # problem(row, n) -> Problem
    drawn: bool = False  # it is large: pages come in a random order, and no more than are needed


SOURCES = {  # by NAME/SPLIT, or by NAME where a hash of the question divides it. [Counts of App. A.2]
    "math500": Source(
        "HuggingFaceH4/MATH-500", "test.jsonl", 500, "MIT", math_problem
    ),  # [300 and 100]
    "rlpr": Source(
        "openbmb/RLPR-Train-Dataset",
        "default/train",
        77687,
        "CC BY-NC 4.0",
        rlpr_problem,
        drawn=True,
    ),  # [46,620 and 15,540 of 77,700]
    "mmlu/train": Source(
        "cais/mmlu", "all/auxiliary_train", 99842, "MIT", choice_problem, drawn=True
    ),
    "mmlu/test": Source("cais/mmlu", "all/test", 14042, "MIT", choice_problem),  # [14,042]
    "livecodebench/train": Source(
        "livecodebench/code_generation_lite", "test.jsonl", 400, "CC", livecodebench_problem
    ),  # V1, up to March 2024 [V1]
    "livecodebench/test": Source(
        "livecodebench/code_generation_lite", "test6.jsonl", 175, "CC", livecodebench_problem
    ),  # what V6 added [V6]
    "aime25/test": Source(
        "yentinglin/aime_2025", "default/train", 30, "not said", math_problem
    ),  # [30]
    "bigcodebench/test": Source(
        "bigcode/bigcodebench-hard", "default/v0.1.4", 148, "Apache 2.0", bigcodebench_problem
    ),  # [148]
    "gpqa/test": Source(
        "Idavidrein/gpqa",
        "gpqa_diamond.csv",
        198,
        "CC BY 4.0; gated: accept its terms",
        gpqa_problem,
    ),  # [198]
}


def source_of(name: str, split: str) -> Source | None:
    return SOURCES.get(f"{name}/{split}") or SOURCES.get(name if "/" not in name else "")


def benchmark(name: str, split: str, limit: int | None = None) -> list[Problem]:
    """The first `limit` problems in a fixed random order; rows that are not in DATA are fetched. Of what has
    one source for both splits, a fifth is for testing, and three are for training."""
    source = source_of(name, split)
    rows = rows_of_file if source.rows.endswith((".jsonl", ".csv")) else rows_of_viewer
    problems = []
    try:
        for n, row in rows(source):
            problem = with_instructions(source.problem(row, n))
            fifth = zlib.crc32(problem.question.encode()) % 5
            if name not in SOURCES or (fifth == 0 if split == "test" else fifth > 1):
                problems.append(replace(problem, id=f"{name}/{problem.id}", kind=name))
            if source.drawn and len(problems) == limit:
                break
    except (OSError, LookupError, TypeError, ValueError, AttributeError) as e:
        page = f"https://huggingface.co/datasets/{source.repository}"
        raise OSError(
            f"{name}: not all {source.count:,} rows of {page} are there: {type(e).__name__}: {e}\n"
            "Try again to go on where it stopped. If that page asks to accept terms, do that and "
            f"set HF_TOKEN. If a file in {DATA}/{source.repository} is damaged, remove it."
        ) from e
    if not source.drawn:
        random.Random(0).shuffle(problems)
    return problems[:limit]


def hub_file(repository: str, file: str) -> str:
    """The path of a data set's file, which is fetched once; $HF_TOKEN opens gated ones."""
    folder, endpoint = f"{DATA}/{repository}", os.environ.get("HF_ENDPOINT") or None
    if not os.path.exists(f"{folder}/{file}"):
        hf_hub_download(repository, file, repo_type="dataset", local_dir=folder, endpoint=endpoint)
    return f"{folder}/{file}"


def rows_of_file(source: Source):
    """Yield (number, row); a JSONL row knows its own place."""
    path = hub_file(source.repository, source.rows)
    if path.endswith(".csv"):
        with open(path, newline="", encoding="utf-8") as file:
            yield from enumerate(csv.DictReader(file))
        return
    start = 0
    with open(path, "rb") as file:
        for n, line in enumerate(file):
            yield n, json.loads(line) | {"place": {"file": source.rows, "at": start}}
            start += len(line)


def rows_of_viewer(source: Source):
    """Yield (number, row), page by page; a page is fetched when its turn comes, and kept in a file. GET /rows
    (huggingface.co/docs/dataset-viewer/rows) gives {"rows": [{"row_idx", "row", "truncated_cells"}], …}."""
    viewer = os.environ.get("HF_ENDPOINT") or "https://datasets-server.huggingface.co"
    hub = requests.Session()
    retry = Retry(8, connect=2, backoff_factor=2, status_forcelist=(429, 500, 502, 503, 504))
    hub.adapters = {"http": HTTPAdapter(max_retries=retry)}  # A rate limit lasts five minutes.
    starts = list(range(0, source.count, 100))  # The viewer gives at most 100 rows.
    if source.drawn:
        random.Random(0).shuffle(starts)
    folder = f"{DATA}/{source.repository}/{source.rows}"
    os.makedirs(folder, exist_ok=True)
    for start in tqdm(starts, source.repository, disable=None, leave=False):
        file = f"{folder}/{start}.json"
        if not os.path.exists(file):
            config, split = source.rows.split("/")
            n = min(100, source.count - start)
            asked = dict(
                dataset=source.repository, config=config, split=split, offset=start, length=n
            )
            answer = hub.get(f"{viewer.rstrip('/')}/rows", params=asked, timeout=60)
            answer.raise_for_status()
            rows = answer.json()["rows"]
            whole = [row["row_idx"] for row in rows if not row["truncated_cells"]]
            require(whole == [*range(start, start + n)], f"{answer.url}: rows are missing")
            write_json(file, {"rows": [row["row"] for row in rows]})
        yield from enumerate(read_json(file)["rows"], start)


def tests_of(problem: Problem) -> list[list[str]]:
    """A program's tests, [input, output] each, which the problem has, or whose place in a file it has."""
    tests = problem.extra["tests"]
    return stored_tests(problem.id, **tests) if isinstance(tests, dict) else tests


@lru_cache(2)
def stored_tests(id: str, file: str, at: int) -> list[list[str]]:
    """The public and hidden tests of a LiveCodeBench problem. A function's input is its arguments, each a
    line of JSON. The hidden ones are JSON in a pickle in zlib in base64 (lcb_runner/benchmarks/
    code_generation.py of LiveCodeBench). The pickle is never run: the JSON is cut out of it."""
    path = hub_file(SOURCES["livecodebench/test"].repository, file)
    try:
        with open(path, "rb") as rows:
            rows.seek(at)
            row = json.loads(rows.readline())
        require(id == f"livecodebench/{row['question_id']}", f"there stands {row['question_id']}")
        hidden = row["private_test_cases"].encode()
        if not hidden.startswith(b"["):
            hidden = zlib.decompressobj().decompress(
                base64.b64decode(hidden), 1 << 29
            )  # 512 MiB at most
            hidden = hidden[hidden.index(b"[{") : hidden.rindex(b"}]") + 2]
        tests = json.loads(row["public_test_cases"]) + json.loads(hidden)
        return [[test["input"], test["output"]] for test in tests]
    except (LookupError, TypeError, ValueError, RecursionError, zlib.error) as e:
        raise ValueError(
            f"{path}, byte {at}: no tests of {id} ({type(e).__name__}: {e}); remove the file, "
            "and it is fetched again"
        ) from e


# What the paper's Conductor learns from (App. A.2: 960 problems, by "difficulty and diversity"), and what its
# further rounds are learned from: a part of these (App. A.1)

MIXES = {
    "paper": {"math500": 240, "mmlu": 240, "rlpr": 240, "livecodebench": 240},
    "recursion": {"livecodebench": 175, "rlpr": 175},
}
CANDIDATES = 600  # problems of each benchmark, at most, among which `prepare` chooses


def prepare(settings):
    """Write DATA/paper.jsonl and DATA/recursion.jsonl: of each benchmark the hardest candidates where levels
    are known, else the first; with a pool only such on which its workers differ."""
    os.makedirs(DATA, exist_ok=True)
    pool = []
    if settings.pool:
        pool = load_pool(
            settings.pool, replay=settings.replay or f"{DATA}/replies", budget=settings.budget
        )
        calls = CANDIDATES * len(MIXES["paper"]) * len(pool)
        demand_budget(pool, settings.budget, calls, "asking every worker every candidate")
    chosen, rng = {}, random.Random(0)
    for name, n in MIXES["paper"].items():
        source = source_of(name, "train")
        print(f"{name}: {source.repository}, licence: {source.licence}")
        found = [p for p in load(name, "train", CANDIDATES) if p.grader == "code" or p.answer]
        if pool:  # Where all workers agree, rewards hardly differ, and a group teaches nothing.
            asked = ask_each(found, [pool] * len(found), f"prepare {name}", range(len(pool)))
            broke = pool[0].budget and pool[0].budget.refused
            require(
                not broke,
                "the budget is spent: `prepare` goes on where it stopped with a larger one",
            )
            verdicts = [
                {rollout.right for rollout in rollouts} for rollouts in asked
            ]  # None: a lost call
            print(
                f"{name}: {verdicts.count({True})} solved by all, {verdicts.count({False})} by none"
            )
            found = [p for p, verdict in zip(found, verdicts) if verdict == {True, False}]
        chosen[name] = sorted(found, key=lambda problem: -problem.level)[
            :n
        ]  # Equals keep their order.
        print(f"{name}: {len(chosen[name])} problems taken of {len(found)}, {n} wanted")
    for mix, parts in MIXES.items():
        problems = []
        for name, n in parts.items():
            problems += rng.sample(chosen[name], min(n, len(chosen[name])))
        file = f"{DATA}/{mix}.jsonl"
        with open(file + ".tmp", "w") as out:
            out.writelines(
                json.dumps(asdict(problem)) + "\n" for problem in interleave(problems, rng)
            )
        os.replace(file + ".tmp", file)
        print(f"{file}: {len(problems)} problems")


# ---- Running code --------------------------------------------------------------------------------
#
# `run_code` runs a program on tests. The functions that judge follow: LiveCodeBench's programs are
# judged by what they print or return, BigCodeBench's by their unit tests.

SANDBOX = "bwrap"


def use_sandbox(name: str):
    """Choose how programs run: in "bwrap", or with "none", as any program of their user."""
    global SANDBOX
    SANDBOX = name


def check_sandbox():
    """Raise OSError, with a remedy, if no program can run here."""
    try:
        run_code("", None, [""], 60.0)
    except (OSError, AttributeError) as e:  # outside Linux, os lacks some functions
        raise OSError(f"{e}. {REMEDY}") from None


def run_code(
    program: str, name: str | None, tests: list[str], seconds: float, memory: int = 4
) -> list[bytes | None]:
    """Run a program that nobody has read on each test, every time in a fresh sandbox (bubblewrap).

    Args:
        name: the function, or method of Solution, to call with the test's lines, which are JSON;
            None for a program that is __main__ and reads the test from standard input
        seconds: time limit of a test
        memory: GiB of each process

    Returns what each test printed or, as JSON, returned. It is None for a test that crashed or took
    too long, and for all tests after it. Raises OSError if no program can run here.

    The sandbox protects against
        * reading or changing files: the program sees Python and the system's libraries, read-only,
          and an empty /tmp of 128 MiB
        * the network: there is only a loopback device of its own
        * stealing keys: it inherits no environment variable and no open file
        * looking up or forging answers: expected outputs never enter, and are compared out here
        * other processes: it sees and signals only its own, at most 64, and all end with the test
        * exhausting the machine: limits on time, memory, output, files, and one core for each test

    It does not protect against
        * faults of the kernel or of bubblewrap: there is no filter of system calls
        * memory that many processes fill together: the limit is a process's. When memory runs out,
          the kernel ends the program first.
        * a BigCodeBench solution that patches unittest, since its tests share its process
        * anything but the limits with --sandbox=none, where root's programs run as another user
    """
    outputs = []
    while len(outputs) < len(tests) and None not in outputs:
        output, _ = run_test(program, name, tests[len(outputs)], seconds, memory)
        outputs.append(output)
    return outputs + [None] * (len(tests) - len(outputs))


# What LiveCodeBench puts before a program (import_string in lcb_runner/evaluation/testing_util.py)
# fmt: off
PREPARED = (
    "string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random",
    "statistics", "itertools", "functools", "operator", "io", "sys", "json",
)
# fmt: on
PRELUDE = "\n".join(
    [
        *(f"from {module} import *" for module in (*PREPARED, "builtins", "typing")),
        f"import {', '.join(PREPARED)}",
        "sys.setrecursionlimit(50_000)",
        "sys.set_int_max_str_digits(50_000)",
    ]
)


def run_test(
    program: str, name: str | None, test: str, seconds: float, memory: int, prelude: str = PRELUDE
) -> tuple[bytes | None, str]:
    """Run a program on one test (see `run_code`), after the prelude, whose time does not count.

    Returns what it printed or returned, and the last line of its errors; or (None, reason) if it
    crashed or took too long.
    """
    with ExitStack() as stack:
        core = free_cores().get()
        stack.callback(free_cores().put, core)
        user = FIRST_USER + core if os.getuid() == 0 else None
        if SANDBOX == "none":
            command, folder = [], temporary_folder(stack, user)
        else:
            command, folder = sandbox_command(), "/tmp"

        # The files that the process inherits
        job = {
            "program": program,
            "name": name,
            "prelude": prelude,
            "core": core,
            "user": user,
            "limits": limits(seconds, memory, user),
        }
        job_file = memory_file(stack, json.dumps(job))
        stdin = memory_file(stack, test)
        output = memory_file(stack)
        errors = memory_file(stack)
        ready = os.eventfd(0)
        stack.callback(os.close, ready)
        inherited = [job_file, ready, output]

        python = [sys.executable, "-I", "-X", "utf8", "-c", DRIVER]
        process = subprocess.Popen(
            [*command, *python, *map(str, inherited)],
            cwd=folder,
            stdin=stdin,
            stdout=subprocess.DEVNULL if name else output,
            stderr=errors,
            pass_fds=inherited,
            start_new_session=True,
            env={
                "PATH": os.defpath,
                "HOME": folder,
                "TMPDIR": folder,
                "USER": "me",
                "TZ": "UTC",
                "OMP_NUM_THREADS": "1",
            },
        )
        started, ended = wait_and_kill(process, ready, seconds)

        error_text = os.pread(errors, MAX_OUTPUT, 0)[-4000:].decode(errors="replace")
        error = error_text.strip().split("\n")[-1]
        if not started:
            reason = error or f"Python ended as {process.returncode}"
            raise OSError(f"no program can run here: {reason}")
        if not ended:
            return None, f"no end within {seconds:g} s"
        if process.returncode:
            return None, error or f"ended with status {process.returncode}"
        return os.pread(output, MAX_OUTPUT, 0), error


def wait_and_kill(process: subprocess.Popen, ready: int, seconds: float) -> tuple[bool, bool]:
    """Wait until the driver is ready, then at most `seconds` for its end; then kill what is left.

    Returns whether the program started, and whether it ended in time.
    """
    end = os.pidfd_open(process.pid)
    poll = select.poll()
    poll.register(end, select.POLLIN)
    poll.register(ready, select.POLLIN)
    started = ready in dict(poll.poll(60_000))  # ms, enough for a busy machine
    poll.unregister(ready)
    ended = bool(poll.poll(1000 * seconds if started else 0))
    os.killpg(process.pid, signal.SIGKILL)  # bwrap and its init, with which all others end
    process.wait()
    os.close(end)
    return started, ended


def memory_file(stack: ExitStack, text: str = "") -> int:
    """Return the descriptor of a new file in memory, which RLIMIT_FSIZE bounds."""
    file = os.memfd_create("test")
    stack.callback(os.close, file)
    os.write(file, text.encode(errors="surrogatepass"))
    os.lseek(file, 0, os.SEEK_SET)
    return file


def temporary_folder(stack: ExitStack, user: int | None) -> str:
    """Make the working folder of a program without a sandbox; it belongs to the program's user."""
    folder = tempfile.mkdtemp()
    stack.callback(subprocess.run, ["rm", "-rf", folder])
    os.chown(folder, user or -1, user or -1)
    return folder


@once
def free_cores() -> queue.SimpleQueue:
    """Return the queue of idle cores, one test each: this rank's share of the machine's cores."""
    rank = int(os.environ.get("LOCAL_RANK", 0))
    n_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    cores = sorted(os.sched_getaffinity(0))
    free = queue.SimpleQueue()
    for core in cores[rank::n_ranks] or [cores[rank % len(cores)]]:
        free.put(core)
    return free


FIRST_USER = 61184  # root's programs run as this user plus the core; systemd's range for such users
MAX_OUTPUT = 32 << 20  # bytes


def limits(seconds: float, memory: int, user: int | None) -> dict[str, int]:
    """Return the resource limits of a program: RLIMIT_x by x."""
    counts_all_of_the_user = SANDBOX == "none" and not user
    return {
        "AS": memory << 30,
        "STACK": 64 << 20,
        "CPU": int(seconds) + 2,
        "FSIZE": MAX_OUTPUT,
        "NOFILE": 64,
        "NPROC": 10_000 if counts_all_of_the_user else 64,
        "CORE": 1,  # byte; at 0 a program that collects core dumps would get one
    }


def sandbox_command() -> list[str]:
    """Return the bwrap command that runs another command in the sandbox."""
    # Python and the system's libraries
    shown = {"/bin", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/alternatives", "/etc/hosts"}
    python = os.path.dirname(os.path.dirname(os.path.realpath(sys.executable)))
    for prefix in ("/usr", "/usr/local", sys.prefix, sys.base_prefix, python):
        shown.update(f"{prefix}/{part}" for part in ("bin", "lib", "lib64", "share", "pyvenv.cfg"))

    # Root stays in its user namespace: in a new one, RLIMIT_NPROC would not bound root's processes.
    users = ["--unshare-user"]
    if os.getuid() == 0:
        users = ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]

    command = [shutil.which("bwrap") or "bwrap", *users]
    command += ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"]
    command += ["--new-session", "--die-with-parent", "--proc", "/proc", "--dev", "/dev"]
    for folder in ("/tmp", "/dev/shm"):
        command += ["--perms", "1777", "--size", str(128 << 20), "--tmpfs", folder]
    for path in sorted(shown):  # after /tmp, where Python may be installed
        command += ["--dir", os.path.dirname(path)]  # makes parents that every user can enter
        command += ["--ro-bind-try", path, path]
    return [*command, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp"]


REMEDY = """On Linux, install bubblewrap 0.8 or newer (apt-get install bubblewrap). Where it may not
make namespaces: on Ubuntu 24.04, sysctl -w kernel.apparmor_restrict_unprivileged_userns=0; in
Docker, --cap-add SYS_ADMIN and --security-opt seccomp=unconfined, apparmor=unconfined,
systempaths=unconfined. In a container that can be thrown away: --sandbox=none (root's programs run
as another user, who has to read Python)."""

# What runs in the sandbox. Its arguments are the file descriptors of the job, of the event "ready",
# and of the output.
DRIVER = """
import contextlib, json, os, resource, sys, types

job_file, ready, output = map(int, sys.argv[1:])
job = json.load(open(job_file))
for limit, value in job["limits"].items():
    with contextlib.suppress(ValueError):  # the hard limit is lower already
        resource.setrlimit(getattr(resource, "RLIMIT_" + limit), (value, value))
open("/proc/self/oom_score_adj", "w").write("1000")  # the first to end when memory runs out
os.sched_setaffinity(0, [job["core"]])
if job["user"]:
    os.setgroups([])
    os.setgid(job["user"])
    os.setuid(job["user"])  # drops all capabilities

name = job["name"]
module = types.ModuleType("solution" if name else "__main__")
sys.modules[module.__name__] = module
sys.argv = ["solution.py"]
exec(job["prelude"], vars(module))
vars(module).pop(name, None)  # the prelude's own gcd is no solution
os.eventfd_write(ready, 1)  # the time limit begins here

lines = sys.stdin.buffer.read().split(b"\\n") if name else []
with contextlib.suppress(SystemExit):  # whatever its status, as in LiveCodeBench
    exec(compile(job["program"], "solution.py", "exec"), vars(module))
if name:
    owner = module.Solution() if hasattr(module, "Solution") else module
    value = getattr(owner, name)(*map(json.loads, lines))
    value = list(value) if isinstance(value, tuple) else value
    text = json.dumps(value, default=lambda scalar: scalar.item())  # numpy's scalars
    if json.loads(text) != value:  # tuples inside, keys that are not strings
        raise TypeError("JSON hides what this value is")
    os.write(output, text.encode())
    os._exit(0)
"""

# Judging: LiveCodeBench


def extract_code(response: str) -> str:
    """Return the last fenced block that says it is Python, else the last block, whose end may be
    missing; without a block, the content of the last <answer> tag.

    "So:\\n```python\\nprint(1)\\n```\\nIt prints:\\n```\\n1\\n```" -> "print(1)"
    """
    end = r"(?:^[ \t]*```(?!\w)|```[ \t]*(?:</answer>|\r?$)|\Z)"
    blocks = re.findall(r"```([\w+#.-]*)[ \t]*\r?\n(.*?)" + end, response, re.DOTALL | re.MULTILINE)
    _, tag, inside = response.rpartition("</answer>")[0].rpartition("<answer>")
    in_python = [code for language, code in blocks if re.fullmatch("(?i)py(thon)?3?", language)]
    in_any = [code for _, code in blocks]
    candidates = in_python or in_any or [inside if tag else ""]
    return textwrap.dedent(candidates[-1]).strip("\n")


def same_output(out: bytes | None, expected: str, returned: bool) -> bool:
    """Whether an output is the expected one (LiveCodeBench, lcb_runner/evaluation/testing_util.py).

    A returned value, in JSON, is compared by value. Printed lines are compared as stripped text, or
    token by token as decimal numbers: "1.0 2" equals "1 2.0".
    """
    longest = 1000 + 10 * len(expected.encode(errors="surrogatepass"))  # 0.500000 may stand for 0.5
    if out is None or len(out) > longest:
        return False
    try:
        if returned:  # Python refuses an int of over 4,300 digits; Decimal reads it, as exactly
            return json.loads(out, parse_int=Decimal) == json.loads(expected, parse_int=Decimal)
        lines = out.decode(errors="replace").strip().split("\n")
        expected_lines = expected.strip().split("\n")
        for line, expected_line in zip(lines, expected_lines, strict=True):
            expected_tokens = expected_line.split()
            tokens = line.split(None, len(expected_tokens))  # one more, if there are more
            is_same_text = line.strip() == expected_line.strip()
            if not is_same_text and [*map(Decimal, tokens)] != [*map(Decimal, expected_tokens)]:
                return False
        return True
    except (ValueError, RecursionError, InvalidOperation):
        return False  # another number of lines, no JSON, nested too deeply, no numbers


def find_wrong_test(
    code: str, tests: list, fn_name: str | None = None, seconds: float = 6.0
) -> str:
    """Run a program on its tests up to the first wrong one. Return what is wrong there, or "".

    Args:
        tests: [input, expected output] pairs
        fn_name: LiveCodeBench's metadata["func_name"]; None if the program prints
        seconds: time limit of each test
    """
    require(
        tests, "a LiveCodeBench problem without tests: nothing can be graded by it, load it again"
    )
    if not code.strip():
        return "no code in the response"
    for number, (test, expected) in enumerate(tests, 1):
        out, error = run_test(code, fn_name, test, seconds, memory=4)
        if not same_output(out, expected, returned=fn_name is not None):
            got = "" if out is None else f"got {out[:200].decode(errors='replace')!r}, "
            wrong = f"{got}expected {expected[:200]!r}. {error[:200]}"
            return f"test {number} of {len(tests)}: {wrong}".strip()
    return ""


def passes_livecodebench(
    code: str, tests: list, fn_name: str | None = None, seconds: float = 6.0
) -> bool:
    return not find_wrong_test(code, tests, fn_name, seconds)


# Judging: BigCodeBench. Its tests patch a solution's module and inspect what it returns, so both
# run in one process.


def find_failed_unittest(code: str, test: str, code_prompt: str, seconds: float = 240.0) -> str:
    """Run a BigCodeBench problem's class TestCases on a solution. Return why it fails, or "".

    As in bigcodebench/evaluate.py, code_prompt and `pass` stand before the solution, and the
    libraries of Requirements/requirements-eval.txt have to be installed. Do not train on it: a
    solution may patch unittest. seconds: time limit of all tests together.
    """
    source = json.dumps(f"{code_prompt}\n    pass\n{code}\n{test}")
    out, error = run_test(UNITTESTS, "run_unittests", source, seconds, memory=32, prelude="")
    return "" if out == b"true" else error[:400] or "not every test ran"


def passes_bigcodebench(
    code: str, test: str, entry_point: str, code_prompt: str, seconds: float = 240.0
) -> bool:
    return not find_failed_unittest(code, test, code_prompt, seconds)


UNITTESTS = r"""
import os, re, sys, types, unittest

def run_unittests(code):
    module = sys.modules["__test__"] = types.ModuleType("__test__")
    vars(module).update(sys=sys, os=os, environ=os.environ, __file__="__test__.py")
    exec(compile(code, "__test__.py", "exec"), vars(module))
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(module.TestCases).run(result)
    for case, trace in result.failures + result.errors:
        print(case, re.search(r"^(?!Traceback)\S.*", trace, re.MULTILINE)[0], file=sys.stderr)
    return result.testsRun > 0 and result.wasSuccessful() and not result.skipped
"""


# ---- The command line --------------------------------------------------------------------------------------


@dataclass
class Settings:
    systems: str = "conductor,workers,random"  # of SYSTEMS
    worker: str = ""  # the one that plays in systems of one worker; "": each in turn
    benchmarks: str = "laptop"  # laptop, names of SOURCES or FILE.jsonl, with commas between
    checkpoint: str = os.path.join(ASSETS, "laptop")  # the Conductor
    pool: str = (
        ""  # "": that of the Conductor's training if it is local; `prepare` then asks nobody
    )
    limit: int = 225  # problems of each benchmark, at most
    repeats: int = 1
    extra_rounds: int = 0  # further ones of a Conductor (§3.2)
    only: str = ""  # the workers that a Conductor may name, with commas between; "": all
    prompt_style: str = ""  # ood, in, mixed, zero-shot; "": as in the Conductor's training
    lessons: str = (
        ""  # whose train problems the learned systems learn from; "": the benchmark's own
    )
    trinity: str = "out/laptop/reference"  # the model whose hidden states the system trinity reads
    effort: int = 100  # of trinity's generations; five times as many steps of masrouter
    grader: str = ""  # mine.py:grade, for own problems that name none
    sandbox: str = "bwrap"  # or none: for a container that can be thrown away
    seed: int = 1  # of what masrouter and trinity draw
    budget: float = 0.0  # dollars that the workers may cost
    replay: str = (
        ""  # a file of replies, which are not asked for again; "": with a budget data/replies
    )
    out: str = (
        ""  # a file for the numbers, as JSON; FILE.jsonl gets the traces, for workflow.py show
    )


LESSONS = 256  # train problems that a learned system learns from


def compare_systems(settings: Settings):
    """Measure every chosen system on every benchmark, and print the tables."""
    names = [name.strip() for name in settings.systems.split(",")]
    unknown = ", ".join(name for name in names if name not in SYSTEMS)
    require(not unknown, f"--systems: there is no {unknown}, only {', '.join(SYSTEMS)}")
    require(settings.limit > 0 and settings.repeats > 0, "--limit and --repeats are from 1 on")
    needs = " ".join(SYSTEMS[name].needs for name in names)
    spec = (
        choose_pool(settings.checkpoint, settings.pool) if "checkpoint" in needs else settings.pool
    )
    replay = settings.replay or (
        f"{DATA}/replies" if settings.budget else ""
    )  # What is paid is kept.
    pool = load_pool(spec or "local", replay=replay, budget=settings.budget)
    workers = [worker.name for worker in pool]
    players = [i for i, worker in enumerate(workers) if settings.worker in ("", worker)]
    require(players, f"--worker={settings.worker}: the pool has only {', '.join(workers)}")
    chosen = {}  # what a table calls it: (system, the number of its worker)
    for name in names:
        by_worker = "worker" in SYSTEMS[name].needs
        for number in players if by_worker else [0]:
            chosen[f"{name} {workers[number]}" if by_worker else name] = SYSTEMS[name], number
    tests, lessons = {}, {}
    for data in settings.benchmarks.split(","):
        tests[data] = load(data, "test", settings.limit)
        lessons[data] = (
            load(settings.lessons or data, "train", LESSONS) if "lessons" in needs else []
        )
    if any(problem.grader in ("code", "unittest") for problem in itertools.chain(*tests.values())):
        check_sandbox()
    calls = sum(
        len(problems) * settings.repeats * (1 + settings.extra_rounds) * (system.calls or len(pool))
        + system.lessons
        for problems in tests.values()
        for system, _ in chosen.values()
    )
    demand_budget(pool, settings.budget, round(calls), "this evaluation")
    numbers, paper = (
        {},
        read_json(os.path.join(ASSETS, "paper.json")),
    )  # other questions and other models
    for data, problems in tests.items():
        rows = {}
        for label, (system, number) in chosen.items():
            before = sum(worker.calls for worker in pool)
            play = system.make(replace(settings, pool=pool, worker=number, lessons=lessons[data]))
            learned = sum(worker.calls for worker in pool) - before
            rollouts = []
            for repeat in range(settings.repeats):
                rollouts += play(problems, [pool] * len(problems), f"{data}/{label}/{repeat}")
            rows[label] = measure(rollouts) | ({"calls to learn": learned} if learned else {})
            errors = [rollout.error for rollout in rollouts if rollout.error]
            if errors:
                print(f"{label}: {len(errors)} lost, the first by: {errors[0]}")
            numbers[f"{data}, {label}"] = rows[label]
            if settings.out:
                write_results(settings.out, numbers, {"system": label, "benchmark": data}, rollouts)
        singles = [label for label in rows if label.startswith("workers ")]
        if singles:  # in hindsight, on the same questions
            best = max(singles, key=lambda label: rows[label]["accuracy"] or 0)
            rows[f"best single worker: {best.removeprefix('workers ')}"] = rows[best]
        print("\n" + table(rows | paper.get(data, {}), f"{data}, {len(problems)} problems, %"))
    if pool[0].budget and pool[0].budget.refused:
        raise SystemExit(
            f"the budget of ${settings.budget:g} is spent, and what came after is not counted: "
            "give a larger --budget, and nothing is paid twice"
        )


def write_results(out: str, numbers: dict, about: dict, rollouts: list[Rollout]):
    """Write all numbers to the file `out`, and rollouts behind the others beside it, for workflow.py show."""
    write_json(out, numbers)
    with open(out.removesuffix(".json") + ".jsonl", "a" if len(numbers) > 1 else "w") as file:
        for rollout in rollouts:
            row = about | rollout_to_json(rollout)
            file.write(json.dumps(row) + "\n")


def main(argv):
    settings = Settings()
    words = configure(settings, argv)
    try:
        use_sandbox(settings.sandbox)
        if settings.grader:
            GRADERS["own"] = own_grader(load_function(settings.grader))
        if words == ["prepare"]:
            prepare(settings)
        elif words:
            raise SystemExit(f"there is no command {' '.join(words)!r}\n\n{__doc__}")
        else:
            compare_systems(settings)
    except (OSError, ValueError, WorkerError) as e:
        raise SystemExit(str(e)) from None
    except KeyboardInterrupt:
        raise SystemExit(
            "interrupted; the same command goes on with the replies that it kept"
        ) from None


if __name__ == "__main__":
    main(sys.argv[1:])
