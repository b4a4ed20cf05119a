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
from functools import cache, lru_cache, partial
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
    Reply,
    WorkerError,
    demand_budget,
    laptop_questions,
    load_function,
    load_pool,
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

SOLVE_IT = "Solve the question."


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
    ask = GRADERS[problem.grader].ask
    if extra.get("function"):
        own = f"Write the Python function {extra['function']}. {BLOCK}"
        ask = GRADERS["unittest"].ask if "```python" in question else own
    if ask not in question and not re.search(r"\\boxed|<answer>", question):
        question += "\n\n" + ask
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


# ---- Graders -----------------------------------------------------------------------------------------------
# A grader finds what a response answers, brings it and the gold answer to one spelling, takes both apart, and
# compares the values of their parts. What has no sure reading equals only its own text. Nothing is ever run.

LONGEST = 1000  # characters of an answer: a longer one equals only its own text
IN_BRACES = ""
for _ in range(8):
    IN_BRACES = rf"(?:\\.|[^{{}}\\]|\{{{IN_BRACES}\}})*"
BOX = rf"(?s:\\[bf]?box(?:ed)?\s{{0,9}}(?:\{{({IN_BRACES})\}}|(\d)))"
BETWEEN = r"(?:[\s$*,;]|\\[(),; ]|\b(?:and|or)\b|\\text\{ *(?:and|or) *\}|\b[A-Za-z](?:_\d)? *=)*"
BOXES = re.compile(f"{BOX}(?:{BETWEEN}{BOX})*")
BEFORE = re.compile(  # what changes a box
    r"(?:(?:(?<!\n)-|[+/√^≠|]|\\(?:sqrt|ln|neq?|pm)|\b(?:not|minus)) ?[${]*|\d(?:\\,)?|\\frac\{)\Z"
)
AFTER = re.compile(
    r"[A-Za-z\d({|]|\)\^|[$ ]*(?:[!/×±+]|\.\d|[-,;*] ?[$\d]|\^(?!\{?\\circ)"
    r"|\\(?:cdot|times|pm|pi|ln|%)(?![a-z])|(?:\\text\{ *)?(?:\w+llion\b|(?:or|and)\b[ }]*[-$\d]))"
)
CLAIM = re.compile(
    r"(?im)\b(?:answer|(?:option|choice)(?! *\(?[A-J]\b))\b[^\n.:?]{0,40}?"
    r"(?:\b(?:is|(?:must|should|would) be)\b|:)[\s:*]*|\bfinal answer\b[* ]*\n\s*|^####\s"
)
DENIED = re.compile(
    r"(?i)(?:\b(?:not|never|if|whether|unless|wrong|false|doubt|unlikely)\b|n't\b)[^.!?\n]*$"
)


def boxed(response: str) -> str | None:
    """The content of the last \\boxed{} or <answer>, or of several with only "," or "and" between them; None
    without one; "" if the last does not close, or if something beside it changes it."""
    text = re.sub("(?i)<answer>", r"\\boxed{", response[-100 * LONGEST :])
    text = re.sub("(?i)</answer>", "}\n.\n", text).replace("**", " ")
    *_, last = [None, *BOXES.finditer(text)]
    if last is None or r"\boxed{" in text[last.end() :]:
        return "" if r"\boxed{" in text else None
    if BEFORE.search(text, 0, last.start()) or AFTER.match(text, last.end()):
        return ""
    parts = [braced or digit for braced, digit in re.findall(BOX, last[0])]
    return ", ".join(dict.fromkeys(parts)).replace(r"\boxed", "").strip()


def claims(response: str) -> list[str]:
    """What follows each "answer is" or "answer:" in its sentence, without a reason; "" where it is denied."""
    found = []
    for m in CLAIM.finditer(response[-5 * LONGEST :]):
        before, after = m.string[: m.start()], m.string[m.end() :]
        said = re.split(
            r"(?<=[^.])\.[*$]*\s+(?=[A-Z])|\n|[,;.]?\s(?:because|since)\b", after[:LONGEST]
        )[0]
        found.append("" if DENIED.search(before[-200:]) else said.strip("* "))
    return found


def final_answer(response: str) -> str:
    """The last \\boxed{} or <answer>, else the last claim, else the last line if it is short, else ""."""
    found = boxed(response)
    if found is None:
        last = response[-LONGEST:].strip().rpartition("\n")[2]
        *_, found = [last if len(last) < 100 else "", *claims(response)]
    return re.sub(r"(?<=[^.])\.$", "", found.strip("* ")).strip("* ")


def copied(answer: str, question: str, gold: str) -> bool:
    """Whether an answer repeats a formula of the question: \\sqrt{192} is no answer to "Simplify
    $\\sqrt{192}$". A policy can tell a worker to write that, so it does not pay."""
    operand = (
        r"\\(?!frac)[A-Za-z]+|(?![01](?:\.0*)?(?![\d.]))\d[\d.]*|(?<![A-Za-z])[^\W\d_](?![a-z])"
    )
    texts = [one_spelling(re.sub(r"^\s*\w\s*=", "", text)) for text in (answer, question, gold)]
    said, asked, wanted = [" ".join(["", *re.findall(operand, text), ""]) for text in texts]
    is_formula = said.count(" ") > 2 or "\\" in said
    return (
        is_formula
        and said in asked
        and said != wanted
        and re.search(r"[-+*/^\\]", answer) is not None
    )


# One spelling: a character for a sign, ⟦a&b,c&d⟧ for a matrix, ⦃...⦄ for a set, ∨ for "or", x∈[1,∞) for x≥1
SIGNS = {
    name.rstrip(";"): sign for name, sign in html5.items() if len(sign) == 1
}  # named as in LaTeX
SIGNS |= dict(
    pair.split("=")
    for pair in (
        r"cdot=* div=/ infty=∞ infinity=∞ leqslant=≤ geqslant=≥ neq=≠ emptyset=⦃⦄ varnothing=⦃⦄ degree=° lvert=| "
        r"rvert=| mid=| varphi=φ varepsilon=ε dfrac=\frac tfrac=\frac cfrac=\frac %=% $=＄ {=⦃ }=⦄ \=,"
    ).split()
)
SIGNS |= dict.fromkeys([*"!,;: ()[]", "quad", "displaystyle", "left", "right"], " ")
CHARACTERS = dict(zip("·⋅∗−–—÷µΩ’", "***---/μΩ'")) | {"√": r"\sqrt ", "½": r"\frac12", "∅": "⦃⦄"}
RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻₀₁₂₃₄₅₆₇₈₉", "0123456789+-0123456789")
LETTER = r"(?:(?!NO)[A-Z]{1,2}|[a-zα-ωΔℓ])(?:_\w{1,3}|_\{\w{1,3}\})?(?!\w)"
NAMED = re.compile(  # ∠ABC=, x=, f^{-1}(x)=, P(A|B)=, x∈(1,2), (x,y)=(1,2)
    rf"(?:m?[∠▵][A-Z]+|{LETTER}(?:\^\{{?-1\}}?|'+)?(?:\((?:[^()=A-Za-z]|[A-Za-z](?![A-Za-z]))*\))?)"
    r"(?:=|∈(?=[(\[⦃]))|\((?:x,y|x,y,z|a,b|a,b,c|m,n|p,q|r,θ)\)=(?=\()"
)


def as_interval(m: re.Match) -> str:
    """x∈[1,2) for 1≤x<2 and for 2>x≥1."""
    low, below, name, above, high = m.groups("")
    if {">", "≥"} & {below, above}:
        low, below, above, high = high, above, below, low
    opening, closing = "[" if below in ("≤", "≥") else "(", "]" if above in ("≤", "≥") else ")"
    return f"{name}∈{opening}{low or '-∞'},{high or '∞'}{closing}"


RULES = [
    (re.compile(pattern), new)
    for pattern, new in (  # in this order
        (rf"^\s*\{{({IN_BRACES})\}}\s*$", r"\1"),  # {5}
        (r"[⁰¹²³⁴-⁻]+", lambda m: "^{" + m[0].translate(RAISED) + "}"),  # x²
        (r"[₀-₉]+", lambda m: "_{" + m[0].translate(RAISED) + "}"),  # CO₂
        (r"(?<!\\)\$|(?<=[\w.,;)}{])~", " "),  # $x$, 5~cm
        (r"(?<=\d)(?:\\,|,?\s*\\!)\s*(?=\d{3})", ","),  # 1\,000
        (r"\\begin\{(?:[pb]?matrix|array)\}(?:\{[clr|\s]*\})?", "⟦"),
        (r"(?:\\\\\s*)?\\end\{(?:[pb]?matrix|array)\}", "⟧"),
        (
            r"(?<![\\A-Za-z])(sqrt|pi|infinity|(?:arc)?(?:sin|cos|tan)|exp|ln|log)(?![A-Za-z])",
            r"\\\1",
        ),
        (r"\\(sin|cos|tan)\s*\^\s*(?:\{\s*-1\s*\}|-1)", r"\\arc\1"),  # \sin^{-1} x
        (r"\^\s*(\{)?\s*(?:\\circ(?![A-Za-z])|°)(?(1)\s*\})", "°"),  # 60^{\circ}
        (r"\\([A-Za-z]+|.)", lambda m: SIGNS.get(m[1], m[0])),  # \cdot, \le, \,
        (
            rf"\\(?:(?:text|math)(?:rm|bf|it)?(?![A-Za-z])|mbox|boldsymbol)\s*\{{(?!\}})({IN_BRACES})\}}",
            r"\1",
        ),
        (
            r"(?<![\d.,(\[{⦃-])[1-9]\d{0,2}(?:(?:\{,\}|,)\d{3})+(?![\d)\]}⦄]|,\d)",  # 1{,}000
            lambda m: re.sub(r"\D", "", m[0]),
        ),
        (r"(?<=\d)\s*(?:[xX]\s*10\^\{?|[eE])([-+]?\d+)\}?", r"*10^{\1}"),  # 3 x 10^8, 3e8
        (r"(?<=\d) *million\b", "*1000000"),
        (r"＄ *([\d.*]*\d)", r"\1 dollars"),  # \$5 million
        (r" ?percent\b", "%"),
        (r" ?\bdegrees?\b", "°"),
        (r"° ?C(?:elsius)?\b", " celsius"),
        (r"(?<=\w) per (?=\w)", "/"),
        (r"\bsq(?:uare|\.)? (\w+)", r"\1^2"),  # square feet per day
        (r"(?i)^ *(?:the|an?) (?=\w\w)", ""),
        (r"<=", "≤"),
        (r">=", "≥"),
        (r",?\s*(?<!\\)\bor\b\s*", "∨"),
        (r",?\s*(?<!\\)\band\b\s*|;", ","),  # 1, 2 and 3
        (r"\|([^|]*)\|", r"\\abs{\1}"),
        (r"\\log_(\w|\{[^{}]*\})", r"\\frac{1}{\\ln{\1}}\\ln "),
        (r"\\sqrt *\[(\w+)\]", r"\\root{\1}"),
        (r"\\sqrt(?![a-z])", r"\\root2 "),  # \sqrt[3]{x}, \sqrt{x}
        (r"([_^])\{([-+\w])\}", r"\1\2 "),
        (r"\^(-\d+)", r"^{\1}"),  # x_{1}, 10^-3
        (r"\s+", " "),
        (r"(?<![A-Za-z0-9])\s|\s(?![A-Za-z0-9])", ""),  # only "5 cm" has one
        (r"(?:(?<!\.)\.|[\\,;])$", ""),  # a full stop
        (r"(?<=[^x=])≈-?\d*\.\d+\D*$|^(?:[a-z]=?)?≈(?=\d*\.)", ""),  # √2 ≈ 1.41, ≈ 1.41
        (r"\\frac(\d)", r"\\frac{\1}"),
        (r"(\\frac\{[^{}]*\})(\d)", r"\1{\2}"),  # \frac12
        (
            r"(?<![\d.^_}/])(\d+)(?: (\d+)/(\d+)|\\frac\{(\d+)\}\{(\d+)\})(?![\d/])",
            r"(\1+\2\4/\3\5)",
        ),  # 2 1/3
        (r"(?<![^,∨⦃⦄])([^,∨⦃⦄±]*)±([^,∨⦃⦄]*)", r"\1+\2,\1-1*\2"),  # 3±√2
        (
            rf"(?<![^,∨])(?=[^,∨]*[<>≤≥])(?:([^<>≤≥,∨]+)([<>≤≥]))?({LETTER})(?:([<>≤≥])([^<>≤≥,∨]+))?(?![^,∨])",
            as_interval,
        ),  # 1<x≤2
        (r"∨(?=\w∈[(\[])", "∪"),
        (r"(?<![a-z]{2})∨(?![a-z]{2})", ","),
        (r"[(\[](⟦[^⟦⟧]*⟧)[)\]]", r"\1"),
        (
            r"\b(?!M[^aeiouy]|Mohm|Pmol)[A-Z](?=[a-z]{2})|\b(?:In|Of|On|To|No)\b",
            lambda m: m[0].lower(),
        ),
        (r"^(?:[A-Z][a-z]?(?:_\{?\d+\}? ?)?){2,}$", lambda m: re.sub("[_{} ]", "", m[0])),  # CO_2
    )
]


def one_spelling(text: str) -> str:
    text = " ".join(text[: 2 * LONGEST].split()).translate(str.maketrans(CHARACTERS))
    for pattern, new in RULES:
        text = pattern.sub(new, text)
    return text


# An expression is read by recursive descent into its values at 12 points, which each letter takes in an order
# of its own. What is rational is a Fraction, which is exact; the rest are floats, complex or NaN.
POINTS = [Fraction(n, 8) for n in (1, 5, 9, 13, 15, 21, 29, 37, 75, 811, -11, -131)]
CONSTANTS = {"π": [math.pi] * 12, "e": [math.e] * 12, "i": [1j] * 12}


def apply(function: Callable, *columns: list) -> list:
    """The values of a function, point by point."""

    def at_point(*numbers):
        try:
            return function(*numbers)
        except (ArithmeticError, ValueError):
            return math.nan

    return [*map(at_point, *columns)]


def power(x, y):
    bits = (x.numerator * x.denominator).bit_length() if isinstance(x, Fraction) else 0
    if bits * abs(y) > 2000:
        raise OverflowError
    return x**y


FUNCTIONS = {
    r"\sin": cmath.sin,
    r"\cos": cmath.cos,
    r"\tan": cmath.tan,
    r"\exp": cmath.exp,
    r"\arcsin": cmath.asin,
    r"\arccos": cmath.acos,
    r"\arctan": cmath.atan,
    r"\ln": cmath.log,
    r"\log": cmath.log10,
    r"\abs": abs,
    r"\frac": operator.truediv,
    r"\root": lambda n, x: power(x, 1 / n),
}
OPERATORS = {  # how strongly each binds, and what it does: a product also before a bracket or a command
    "+": (1, operator.add),
    "-": (1, operator.sub),
    "/": (2, operator.truediv),
    "^": (4, power),
    **dict.fromkeys("*×(\\", (2, operator.mul)),
}
CLOSING = {"(": ")", "{": "}", "[": "]"}
VARIABLE = r"[A-Za-zα-ωΔℓ∞](?:_\{\w+\}|_\w)?'*"
TOKEN = re.compile(rf"\\[A-Za-z]+|\d+\.?\d*|\.\d+|{VARIABLE}|\S")
LONG = re.compile(r"\d{10}|\.\d{9}|10\^\{-(?:\d\d|9)")  # among floats: 1.41421356237 is not √2
UNSURE = re.compile(  # a word, but not ab or mgh; f(x), T(n/4), but not x(x+1); 3-2; A B, Q^{-1} A Q; v×u
    r"(?<![\\A-Za-z_{])(?!(?:[abcf-z][a-df-hj-np-tv-z]|[b-df-hj-np-tv-z]{3}|abc|xyz)(?![A-Za-z]))[A-Za-z]{2,}"
    r"|(?<![\\A-Za-z])[fg](?:_\w+)?'*(?:\^(?:\w|\{[^{}]*\}))?[(\[]"
    r"|(?<![\\A-Za-z_])[A-Za-zα-λν-ορ-ωΔℓ](?:_\w+)?'*\(-?[^-+()]*\)|^\(?[\d.]+(?:-[\d.]+)+(?:$|\))"
    r"|^(?:[A-Zα-λν-ορ-ω](?:\^\{?-?[\dT]\}?)?[ *-]*){2,}$|^[A-Za-z]×[A-Za-z]$"
)


class Reading:
    """An expression's letters, how many operands it has, and its values: none without a sure reading."""

    def __init__(self, text: str):
        self.tokens = [*TOKEN.findall(text), "end"]
        operands = [token for token in self.tokens[:-1] if re.match(r"[\w.∞]", token)]
        self.work = len(operands)
        self.letters = {token for token in operands if re.fullmatch(VARIABLE, token)} - {*CONSTANTS}
        self.known = CONSTANTS | {x: random.Random(x).sample(POINTS, 12) for x in self.letters}
        try:
            values = [] if self.work > 200 or UNSURE.search(text) else self.read(1)
        except (KeyError, ValueError, RecursionError):
            values = []
        self.values = values if self.tokens == ["end"] else []

    def take(self, tokens: str) -> bool:
        """Takes the next token if it is one of these."""
        return self.tokens[0] in tokens and bool(self.tokens.pop(0))

    def read(self, weakest: int) -> list:
        """The values of what comes next, up to an operator that binds more weakly."""
        is_signed = weakest == 1 and self.tokens[0] in "+-"
        value = [Fraction(0)] * 12 if is_signed else self.operand()
        last = ""
        while True:
            sign = self.tokens[0]
            beside = (3, operator.mul) if sign in self.known else (0, None)  # 2x, or the end
            strength, function = OPERATORS.get(sign[0], beside)
            if strength < weakest:
                return value
            if last == "/" and strength > 1 or last == sign == "^":
                raise ValueError("1/2x or 2^3^2")
            self.take("+-*×/^")
            value = apply(function, value, self.read(4 if sign == "/" else strength + 1))
            last = sign

    def operand(self) -> list:
        token = self.tokens.pop(0)
        if token in CLOSING:
            value = self.read(1)
            if not self.take(CLOSING[token]):
                raise ValueError("a bracket is missing")
        elif token in (r"\frac", r"\root"):
            value = apply(FUNCTIONS[token], self.operand(), self.operand())
        elif token in FUNCTIONS:  # \sin^2 2x is (\sin(2x))^2
            exponent = self.operand() if self.take("^") else [Fraction(1)] * 12
            value = self.operand() if self.tokens[0] in CLOSING else self.read(3)
            value = apply(power, apply(FUNCTIONS[token], value), exponent)
        else:
            value = [Fraction(token)] * 12 if token[0] in ".0123456789" else self.known[token]
        return apply(lambda x: x * math.pi / 180, value) if self.take("°") else value


UNITS = {}  # a unit is a factor times base units, which are letters
for pair in (
    "m g s mol K A V celsius degree person unit apple way outcome dollar cent=0.01*dollar people=person "
    "%=0.01 °=degree km=1000*m cm=0.01*m mm=0.001*m kg=1000*g mg=0.001*g L=0.001*m^3 mL=0.001*L "
    "N=kg*m/s^2 Pa=N/m^2 MPa=10^6*Pa J=N*m kJ=1000*J W=J/s meter=m kilometer=km centimeter=cm gram=g "
    "kilogram=kg second=s min=60*s minute=min h=60*min hour=h day=24*h in=0.0254*m inch=in ft=12*in "
    "foot=ft feet=ft yard=3*ft mi=1760*yard mile=mi"
).split():
    name, _, meaning = pair.partition("=")
    UNITS[name] = (
        f"({re.sub('[^-0-9.*/^{}()]+', lambda m: UNITS[m[0]], meaning) or 'u_{' + name + '}'})"
    )
SYMBOL = "(" + "|".join(sorted(UNITS, key=len, reverse=True)) + r")(?:(?<=\w\w)e?s)?(?![A-Za-z])"
QUANTITY = re.compile(  # not 5m, 5x m, \sin 5 m, 2π°, 5%%
    r"(?!.*π.*°|.*[%°].)((?:[^\\a-z]|\\frac|\\root)*[\d)}π])(?: |(?![A-Za-z](?:$|[^A-Za-z])))"
    rf"((?:{SYMBOL}(?: ?\^ ?\{{?-?\d\}}?|\d\b)?[ */()]*)+)"
)


def quantity(text: str) -> tuple:
    """A quantity without and with its unit. 20% is 0.2, or 20 if it was asked what percentage."""
    m = QUANTITY.fullmatch(text)
    if not m:
        return text, text
    number, units, _ = m.groups()
    units = re.sub("/(.*)", r"/(\1)", units)  # K too is below in J/mol K
    whole = f"({number})*" + re.sub(SYMBOL, lambda symbol: UNITS[symbol[1]], units)
    is_share = "%" in units and not re.fullmatch(r"-?[1-9][\d.]*", number)
    return whole if is_share else number, whole


def take_apart(text: str, separators: str = ",∪=∈<≤&") -> tuple[str, list]:
    """The kind of an answer and its parts: , for 1,2 and {1,2}; () for (1,2); = for x=1; "" if it is one."""
    depths = [*itertools.accumulate("([{⦃⟨⟦".count(sign) - ")]}⦄⟩⟧".count(sign) for sign in text)]
    for separator in separators:
        marked = ["\n" if pair == (separator, 0) else pair[0] for pair in zip(text, depths)]
        parts = "".join(marked).split("\n")
        if len(parts) > 1:
            return separator, parts
    kind = text[:1] + text[-1:]
    if separators == "," or kind not in "() [] [) (] ⟨⟩ ⟦⟧ ⦃⦄".split():
        return "", [text]
    inner, parts = take_apart(text[1:-1], ",")
    if kind == "⦃⦄":
        return ",", parts
    return (kind, parts) if inner or kind == "⟦⟧" else ("", [text])


def equal(x: str, y: str, tolerance: float) -> bool:
    """Whether two expressions have values at three points or more, and all agree.
    What is still to be worked out is no answer: the question often holds it."""
    mine, gold = Reading(x), Reading(y)
    differences = apply(operator.sub, mine.values, gold.values)
    is_exact = all(isinstance(x, Fraction) for x in differences)
    is_work = not gold.letters and mine.work > gold.work + 2
    if mine.letters != gold.letters or is_work or not is_exact and LONG.search(f"{x} {y}"):
        return False
    if any(not letter.startswith("u_") for letter in gold.letters):
        tolerance = 0.0
    error = Fraction(tolerance or (0 if is_exact else 1e-12))
    agree = [
        abs(x) <= error * abs(y)
        for x, y in zip(differences, gold.values)
        if is_exact or abs(x) < math.inf and 1e-9 < abs(y) < 1e9
    ]
    return len(agree) > 2 and all(agree)


def same(x: str, y: str, tolerance: float = 0.0) -> bool:
    """Whether two answers in one spelling mean the same."""
    if x == y:
        return x != ""
    (kind, parts), (gold_kind, gold) = take_apart(x), take_apart(y)
    if kind != gold_kind or len(parts) != len(gold) or len(parts) > 50:
        return False
    if not kind:
        (x, whole), (y, gold_whole) = quantity(x), quantity(y)
        is_bare = x == whole or y == gold_whole  # a unit may be missing on one side
        return is_bare and equal(x, y, tolerance) or equal(whole, gold_whole, tolerance)
    if kind not in ",∪=":
        return all(map(same, parts, gold))
    for part in parts:  # in any order
        found = [other for other in gold if same(part, other)]
        if not found:
            return False
        gold.remove(found[0])
    return True


def same_math(answer: str, gold: str, tolerance: float = 0.0) -> bool:
    """Whether two answers in LaTeX or plain text mean the same; "x =" and a unit may be missing on one side.
    Numbers are equal, or within the tolerance (a share) where the gold one has a decimal point."""
    if max(len(answer), len(gold)) > LONGEST:
        return answer.strip() == gold.strip() != ""
    texts = [one_spelling(answer), one_spelling(gold)]
    names = {m[0] for m in map(NAMED.match, texts) if m}
    bare = (
        [text.replace(*names, "") for text in texts] if len(names) == 1 else texts
    )  # 1,-3 for x=1,x=-3
    if "=" not in "".join(bare):
        texts = bare
    return same(*texts, tolerance if "." in texts[1] else 0.0)


def same_short(answer: str, gold: str) -> bool:
    """Whether a short free answer is the gold one (RLPR): the same words but for case, articles and marks, or
    the same mathematics, within 1% of a gold number with a decimal point, which was measured or rounded."""
    if re.fullmatch(
        r"[^\W\d_]{2}(?:[^\W\d_]|[-\s,.;:'\"“”])*", gold
    ):  # a is one only before all others
        mark = r"(?i)^\s*an?\s(?=\s*\w)|\bthe\s|\ban\s|[.,;:'\"“”*]"
        answer, gold = [
            re.sub(r"(?<=\w)-(?=\w)", " ", re.sub(mark, "", text)) for text in (answer, gold)
        ]
    return same_math(answer, gold, 0.01)


LETTERS = "ABCDEFGHIJ"  # of choices
CHOICE = re.compile(
    r"(?i)(?:(?:the|correct|final|best|answer|option|choice|is|so|thus|hence|therefore)\b[\s:,]*)*"
    r"[(\[\"'“*_]*([A-J])(?![^\W_])[)\]\"'”*_]*(?:[\s):,.;]|-(?=\s))*"
    r"(?:is (?:the )?(?:correct|right|best)(?: \w+)?$)?\(?(?:the |an? )?(.*?)"
)


def letter_of(text: str, choices: list) -> str | None:
    """The letter that a text is: "B", "(B)", "B. its own text", or the text of just one of the choices."""
    text = one_spelling(text[:LONGEST])
    m = CHOICE.fullmatch(text)
    letter, rest = (m[1].upper(), m[2]) if m else ("", "")
    found = [
        other
        for other, choice in zip(LETTERS, choices)
        if choice == text not in LETTERS
        or other == letter
        and rest in ("", choice, choice + ")", choice.lstrip("("))
    ]
    return found[0] if len(found) == 1 else None


def pick_letter(response: str, choices: list) -> str | None:
    """The letter that a response commits to: in its last \\boxed{} or <answer>, else in every claim, else in
    its last sentences; as the letter, as the text of one choice, or as both. None without one, or several."""
    choices = [one_spelling(choice) for choice in choices]
    found = boxed(response)
    said = claims(response)[-99:] if found is None else [found]
    said = [text for text in said if letter_of(text, choices) or re.search(r"\b[A-J]\b", text)]
    if found is None and not said:
        said = [
            text
            for text in re.split(r"[.!?]\s|\n", response[-LONGEST:])
            if letter_of(text, choices)
        ]
    picked = {letter_of(text, choices) for text in said}
    return picked.pop() if len(picked) == 1 else None


# The table of graders


class Grader(NamedTuple):
    ask: str  # what a question that does not say how to answer is told
    extra: tuple  # the fields that its problems have in `extra`
    check: Callable  # check(problem, response) -> "" if it is right, else what is wrong with it
    agree: (
        Callable  # agree(problem, one, other) -> whether two responses answer the same, for votes
    )


def text_grader(ask: str, read: Callable, same: Callable, extra: tuple = ()) -> Grader:
    """A grader that reads an answer, a text or None, by read(response, *extra), compares it by
    same(answer, gold), and refuses what repeats a formula of the question."""

    def answer(problem, response):
        return read(response, *[problem.extra[name] for name in extra]) or ""

    def check(problem, response):
        found = answer(problem, response)
        if not found or not same(found, problem.answer):
            return f"answered {found[:200]}" if found else "no answer found"
        return (
            "repeated the question's formula"
            if copied(found, problem.question, problem.answer)
            else ""
        )

    def agree(problem, one, other):
        found = answer(problem, one)
        return found != "" and same(found, answer(problem, other))

    return Grader(ask, extra, check, agree)


def own_grader(right: Callable) -> Grader:
    """The grader of a function right(problem, response) -> bool. Votes compare whole responses."""

    def check(problem, response):
        try:
            return "" if right(problem, response) else f"answered {response[-200:]}"
        except Exception as e:
            raise ValueError(f"the grader failed on {problem.id}: {type(e).__name__}: {e}") from e

    return Grader("", (), check, same_response)


def same_response(problem: Problem, one: str, other: str) -> bool:
    return one.strip() == other.strip() != ""


def spoken(response: str) -> str:
    """What the last \\boxed{} or <answer>, or else all says, in lower case, without marks at the ends."""
    found = boxed(response)
    text = " ".join((response if found is None else found).casefold().split())
    return text.strip(" .,;:!?'\"`*_$()“”‘’") or text


def check_program(problem: Problem, response: str) -> str:
    return find_wrong_test(extract_code(response), tests_of(problem), problem.extra["function"])


def check_solution(problem: Problem, response: str) -> str:
    return find_failed_unittest(
        extract_code(response), problem.extra["test"], problem.extra["code_prompt"]
    )


BLOCK = "Put all of it, imports included, in one ```python block."
GRADERS = {
    "exact": text_grader(
        "Put the final answer, and nothing else, in <answer> tags.",
        spoken,
        lambda answer, gold: answer == spoken(gold),
    ),
    "same": own_grader(
        lambda problem, response: response.strip() == problem.answer
    ),  # the laptop world's
    "math": text_grader("Put the final answer in \\boxed{}.", final_answer, same_math),
    "short": text_grader(
        "Put the final answer, as short as possible, in <answer> tags.", final_answer, same_short
    ),
    "letter": text_grader(
        "Put the letter of the right option in <answer> tags.",
        pick_letter,
        operator.eq,
        ("choices",),
    ),
    "code": Grader(
        f"Write a Python program from standard input to standard output. {BLOCK}",
        ("tests", "function"),
        check_program,
        same_response,
    ),
    "unittest": Grader(
        f"Complete the code above. {BLOCK}",
        ("test", "entry_point", "code_prompt"),
        check_solution,
        same_response,
    ),
}


def failure(problem: Problem, response: str) -> str:
    """ "" if a response answers the problem, else why it does not, in words for a trace."""
    return GRADERS[problem.grader].check(problem, response)


def grade(problem: Problem, response: str) -> bool:
    return failure(problem, response) == ""


def grade_once():
    """A `failure` that judges equal answers to one problem once: a group often writes the same program."""
    locks, known = {}, {}

    def judge(problem, response):
        key = problem.id, problem.answer, response
        with locks.setdefault(key, threading.Lock()):
            if key not in known:
                known[key] = failure(problem, response)
        return known[key]

    return judge


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


# ---- Running code ------------------------------------------------------------------------------------------
#
# Each test is one fresh Python behind bwrap (bubblewrap 0.8 or newer). The program sees Python and the
# system's libraries, read-only, a small empty /tmp, its input and its own processes: no network, no key, no
# file of yours. What it prints or returns is judged here, by expected outputs that never went in.

PREPARED = (
    "string",
    "re",
    "datetime",
    "collections",
    "heapq",
    "bisect",
    "copy",
    "math",
    "random",
    "statistics",
    "itertools",
    "functools",
    "operator",
    "io",
    "sys",
    "json",
)
# What LiveCodeBench puts before a program: import_string in its lcb_runner/evaluation/testing_util.py
PRELUDE = "\n".join(
    [
        *(f"from {module} import *" for module in (*PREPARED, "builtins", "typing")),
        f"import {', '.join(PREPARED)}",
        "sys.setrecursionlimit(50_000)",
        "sys.set_int_max_str_digits(50_000)",
    ]
)
FIRST_USER = (
    61184  # root becomes this user plus the core's number; systemd keeps these for passing services
)
SANDBOX = "bwrap"
REMEDY = """On Linux, install bubblewrap 0.8 or newer (apt-get install bubblewrap). Where it may not make
namespaces: on Ubuntu 24.04, sysctl -w kernel.apparmor_restrict_unprivileged_userns=0; in Docker, --cap-add
SYS_ADMIN and --security-opt seccomp=unconfined, apparmor=unconfined, systempaths=unconfined. In a container
that can be thrown away: --sandbox=none (root's programs run as another user, who has to read Python)."""

DRIVER = """
import contextlib, json, os, resource, sys, types

job_file, ready, output = map(int, sys.argv[1:])
job = json.load(open(job_file))
for limit, value in job["limits"].items():
    with contextlib.suppress(ValueError):        # where the hard limit is lower already
        resource.setrlimit(getattr(resource, "RLIMIT_" + limit), (value, value))
open("/proc/self/oom_score_adj", "w").write("1000")  # when memory runs out, the kernel ends this first
os.sched_setaffinity(0, [job["core"]])
if job["user"]:
    os.setgroups([])
    os.setgid(job["user"])
    os.setuid(job["user"])                       # with it go all capabilities

name = job["name"]
module = types.ModuleType("solution" if name else "__main__")
sys.modules[module.__name__] = module
sys.argv = ["solution.py"]
exec(job["prelude"], vars(module))
vars(module).pop(name, None)                     # the prelude's own gcd is no solution
os.eventfd_write(ready, 1)                       # from here on the time counts

lines = sys.stdin.buffer.read().split(b"\\n") if name else []
with contextlib.suppress(SystemExit):            # whatever its code, as in LiveCodeBench
    exec(compile(job["program"], "solution.py", "exec"), vars(module))
if name:
    owner = module.Solution() if hasattr(module, "Solution") else module
    value = getattr(owner, name)(*map(json.loads, lines))
    value = list(value) if isinstance(value, tuple) else value
    text = json.dumps(value, default=lambda scalar: scalar.item())  # numpy's scalars
    if json.loads(text) != value:                # tuples inside, keys that are no strings
        raise TypeError("JSON hides what this value is")
    os.write(output, text.encode())
    os._exit(0)
"""


def use_sandbox(name: str):
    """Choose how programs run: behind "bwrap", or with "none", where they have all that their user has."""
    global SANDBOX
    SANDBOX = name


def check_sandbox():
    """OSError says why no program can run here, and what to do."""
    try:
        run_code("", None, [""], 60.0)
    except (OSError, AttributeError) as e:  # systems other than Linux lack some functions of os
        raise OSError(f"{e}. {REMEDY}") from None


@cache
def free_cores() -> queue.SimpleQueue:
    """The cores on which this rank runs tests, one at a time on each: its share of the machine's."""
    rank, ranks = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    cores, free = sorted(os.sched_getaffinity(0)), queue.SimpleQueue()
    for core in cores[rank::ranks] or [cores[rank % len(cores)]]:
        free.put(core)
    return free


def bwrap() -> list[str]:
    """The command that runs another one in the sandbox."""
    shown = {"/bin", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/alternatives", "/etc/hosts"}
    python = os.path.dirname(os.path.dirname(os.path.realpath(sys.executable)))
    for prefix in ("/usr", "/usr/local", sys.prefix, sys.base_prefix, python):
        shown.update(f"{prefix}/{part}" for part in ("bin", "lib", "lib64", "share", "pyvenv.cfg"))
    users = ["--unshare-user"]
    if os.getuid() == 0:  # in a namespace of users the limit of root's processes would not count
        users = ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    command = [
        shutil.which("bwrap") or "bwrap",
        *users,
        "--unshare-pid",
        "--unshare-net",
        "--unshare-ipc",
        "--unshare-uts",
        "--new-session",
        "--die-with-parent",
        "--proc",
        "/proc",
        "--dev",
        "/dev",
    ]
    for folder in ("/tmp", "/dev/shm"):
        command += ["--perms", "1777", "--size", str(128 << 20), "--tmpfs", folder]
    for path in sorted(
        shown
    ):  # after /tmp, where Python may stand. --dir makes parents that all can enter
        command += ["--dir", os.path.dirname(path), "--ro-bind-try", path, path]
    return [*command, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp"]


def memory_file(stack: ExitStack, text: str) -> int:
    """A new file's descriptor. It takes no disk, and RLIMIT_FSIZE bounds what a program writes."""
    file = os.memfd_create("test")
    stack.callback(os.close, file)
    os.write(file, text.encode(errors="surrogatepass"))
    os.lseek(file, 0, os.SEEK_SET)
    return file


def run_test(
    program: str, name: str | None, test: str, seconds: float, memory: int, prelude: str = PRELUDE
):
    """Run a program on one test: see `run_code`. Return (what it printed or returned, its errors' last line);
    (None, the reason) if it crashed or took too long."""
    with ExitStack() as stack:
        core = free_cores().get()
        stack.callback(free_cores().put, core)
        user = FIRST_USER + core if os.getuid() == 0 else None
        command, folder, processes = bwrap(), "/tmp", 64
        if SANDBOX == "none":
            command, folder = [], tempfile.mkdtemp()
            stack.callback(subprocess.run, ["rm", "-rf", folder])
            os.chown(folder, user or -1, user or -1)
            processes = 64 if user else 10_000  # here all of this user's count
        limits = {
            "AS": memory << 30,
            "STACK": 64 << 20,
            "CPU": int(seconds) + 2,
            "FSIZE": 32 << 20,
            "NOFILE": 64,
            "NPROC": processes,
            "CORE": 1,
        }  # at 0 a program of the system's gets dumps
        job = dict(program=program, name=name, prelude=prelude, core=core, user=user, limits=limits)
        asked, given, output, errors = [
            memory_file(stack, text) for text in (json.dumps(job), test, "", "")
        ]
        ready = os.eventfd(0)
        stack.callback(os.close, ready)
        inherited = [asked, ready, output]
        process = subprocess.Popen(
            [*command, sys.executable, "-I", "-X", "utf8", "-c", DRIVER, *map(str, inherited)],
            cwd=folder,
            stdin=given,
            stdout=subprocess.DEVNULL if name else output,
            stderr=errors,
            pass_fds=inherited,
            start_new_session=True,  # and no variable of yours, which may be a key
            env=dict(
                PATH=os.defpath,
                HOME=folder,
                TMPDIR=folder,
                USER="me",
                TZ="UTC",
                OMP_NUM_THREADS="1",
            ),
        )
        end = os.pidfd_open(process.pid)
        stack.callback(os.close, end)
        poll = select.poll()
        poll.register(end, select.POLLIN)
        poll.register(ready, select.POLLIN)
        started = ready in dict(poll.poll(60_000))  # ms, on a machine however busy
        poll.unregister(ready)
        ended = poll.poll(1000 * seconds if started else 0)
        os.killpg(
            process.pid, signal.SIGKILL
        )  # bwrap and its first process, with which all others end
        process.wait()
        error = (
            os.pread(errors, 32 << 20, 0)[-4000:].decode(errors="replace").strip().split("\n")[-1]
        )
        if not started:
            raise OSError(
                f"no program can run here: {error or f'Python ended as {process.returncode}'}"
            )
        if not ended:
            return None, f"no end within {seconds:g} s"
        if process.returncode:
            return None, error or f"ended with status {process.returncode}"
        return os.pread(output, 32 << 20, 0), error


def run_code(
    program: str, name: str | None, tests: list[str], seconds: float, memory: int = 4
) -> list:
    """Run a program that nobody has read. Without a name it is __main__ and reads a test from standard input;
    else its function (or Solution's method) of that name gets a test's lines, JSON arguments. Returns what
    each test printed or, as JSON, returned (bytes); None from the first on that crashed, took over `seconds`,
    or needed over `memory` GiB in a process. OSError if no program can run here."""
    outputs = []
    while len(outputs) < len(tests) and None not in outputs:
        outputs.append(run_test(program, name, tests[len(outputs)], seconds, memory)[0])
    return outputs + [None] * (len(tests) - len(outputs))


def extract_code(response: str) -> str:
    """Return the last fenced block of a response that says it is Python, or else the last; its end may be
    missing. Without a block, what is in the last <answer> tag."""
    end = r"(?:^[ \t]*```(?!\w)|```[ \t]*(?:</answer>|\r?$)|\Z)"
    blocks = re.findall(r"```([\w+#.-]*)[ \t]*\r?\n(.*?)" + end, response, re.DOTALL | re.MULTILINE)
    _, tag, inside = response.rpartition("</answer>")[0].rpartition("<answer>")
    in_python = [code for language, code in blocks if re.fullmatch("(?i)py(thon)?3?", language)]
    in_any = [code for _, code in blocks]
    return textwrap.dedent((in_python or in_any or [inside if tag else ""])[-1]).strip("\n")


def same_output(out: bytes | None, expected: str, returned: bool) -> bool:
    """Judge by the rules of LiveCodeBench's lcb_runner/evaluation/testing_util.py: a returned value (JSON) by
    value; what is printed line by line, stripped, as text or as Decimal tokens."""
    most = 1000 + 10 * len(
        expected.encode(errors="surrogatepass")
    )  # bytes; 0.500000 is right for 0.5
    if out is None or len(out) > most:
        return False
    try:
        if returned:  # Python reads no int of more than 4,300 digits; a Decimal of it is as exact
            return json.loads(out, parse_int=Decimal) == json.loads(expected, parse_int=Decimal)
        printed, wanted = (
            text.strip().split("\n") for text in (out.decode(errors="replace"), expected)
        )
        for mine, theirs in zip(printed, wanted, strict=True):
            tokens = theirs.split()
            given = mine.split(None, len(tokens))  # one more, if there are more
            if mine.strip() != theirs.strip() and [*map(Decimal, given)] != [*map(Decimal, tokens)]:
                return False
        return True
    except (
        ValueError,
        RecursionError,
        InvalidOperation,
    ):  # other lines, no JSON, too deep, no numbers
        return False


def find_wrong_test(
    code: str, tests: list, fn_name: str | None = None, seconds: float = 6.0
) -> str:
    """Run a program on tests, [input, expected output] each, up to the first that is wrong; return what is
    wrong with it, or "". fn_name is LiveCodeBench's metadata["func_name"]; seconds are a test's."""
    require(
        tests, "a LiveCodeBench problem without tests: nothing can be graded by it, load it again"
    )
    if not code.strip():
        return "no code in the response"
    for number, (given, expected) in enumerate(tests, 1):
        out, error = run_test(code, fn_name, given, seconds, memory=4)
        if not same_output(out, expected, fn_name is not None):
            got = "" if out is None else f"got {out[:200].decode(errors='replace')!r}, "
            return f"test {number} of {len(tests)}: {got}expected {expected[:200]!r}. {error[:200]}".strip()
    return ""


def passes_livecodebench(
    code: str, tests: list, fn_name: str | None = None, seconds: float = 6.0
) -> bool:
    return not find_wrong_test(code, tests, fn_name, seconds)


# BigCodeBench's tests patch a solution's module and look into what it returns: they share its process
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


def find_failed_unittest(code: str, test: str, code_prompt: str, seconds: float = 240.0) -> str:
    """Run the class TestCases of a BigCodeBench problem on a solution; return why it fails, or "". As in
    bigcodebench/evaluate.py, code_prompt and `pass` stand before the solution, and all need the libraries of
    Requirements/requirements-eval.txt. No reward: a solution may patch unittest. seconds: of all tests."""
    given = json.dumps(f"{code_prompt}\n    pass\n{code}\n{test}")
    out, error = run_test(UNITTESTS, "run_unittests", given, seconds, memory=32, prelude="")
    return "" if out == b"true" else error[:400] or "not every test ran"


def passes_bigcodebench(
    code: str, test: str, entry_point: str, code_prompt: str, seconds=240.0
) -> bool:
    return not find_failed_unittest(code, test, code_prompt, seconds)


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
