"""Compare a Conductor with its workers and with other systems (§4).

    python eval.py [--systems=conductor,workers,moa] [--benchmarks=gpqa,mine.jsonl] [--pool=NAME]
    python eval.py --systems=assets/rivals.py:masrouter   # a system from a file, such as your own
    python eval.py prepare [--pool=NAME --budget=50]      # write training problems like the paper's

Read the first three sections: problems, systems, measurements. Use the next three for reference:
graders, benchmarks, running code. The tables SYSTEMS, GRADERS and SOURCES list the systems, the
graders and the data sets. Read train.py next.

The exit status is 0 on success, 1 on failure, and 2 if a flag, a file or a name you gave is wrong.
"""

import base64
import cmath
import csv
import hashlib
import itertools
import json
import math
import operator
import os
import queue
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import textwrap
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from functools import lru_cache, partial
from html.entities import html5
from multiprocessing.connection import wait
from typing import NamedTuple

import numpy as np
import requests
from huggingface_hub import hf_hub_download
from requests.adapters import HTTPAdapter, Retry
from tqdm import tqdm

from model import configure, discard_output, flag, read_json, usage_error, write_json
from workers import (
    LIMITS,
    PHRASES,
    SOLVE_IT,
    TEXT,
    Reply,
    WorkerError,
    demand_budget,
    fits,
    laptop_questions,
    load_function,
    load_name,
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
    """A question, and what its grader needs to judge responses."""

    id: str
    question: str
    answer: str
    grader: str  # a key of GRADERS
    # If there are several kinds, tables show the accuracy of each. Defaults to the grader's name.
    kind: str = ""
    level: int = 0  # the difficulty: higher is harder, 0 means unknown
    # What else the grader needs, such as {"choices": ["a", "b"]}
    extra: dict = field(default_factory=dict)

    def __post_init__(self):
        self.kind = self.kind or self.grader


def require(condition, otherwise: str):
    """Raise ValueError(otherwise) unless the condition holds."""
    if not condition:
        raise ValueError(otherwise)


# ---- Problems: from the laptop world, from benchmarks, and your own ------------------------------

# The folder for downloaded data sets, prepared problems and, by default, the replies that are kept
# for --replay. The path is relative to the current directory.
DATA = "data"


def load(name: str, split: str, limit: int | None = None) -> list[Problem]:
    """Return at most `limit` problems of a split. The same arguments always give the same list.

    Args:
        name: "laptop", a benchmark listed in SOURCES, a mix listed in MIXES (several benchmarks
            combined), or FILE.jsonl with your own problems. The train split of a mix is the file
            that `prepare` writes. The test split of a mix combines the test splits of its
            benchmarks.
        split: "train" or "test".
        limit: The maximum number of problems; None returns all of them.

    Raises:
        ValueError: If there is no such name, if it has no such split, or if the file is invalid.
        OSError: If the file is missing, or a data set cannot be downloaded or read.
    """
    if name.endswith(".jsonl"):
        problems = split_of_file(name, split)
    elif name == "laptop":
        problems = laptop_problems(split)
    elif name in MIXES and split == "train":
        problems = read_problems(f"{DATA}/{name}.jsonl")
    elif name in MIXES:
        parts = [load(part, "test", limit) for part in MIXES[name]]
        problems = interleave(list(itertools.chain(*parts)))
    elif f"{name}/{split}" in SOURCES:
        problems = benchmark(name, split, limit)
    else:
        known = ", ".join(BENCHMARKS)
        raise ValueError(f"no problems {name!r} ({split}): there are {known}, or FILE.jsonl")
    return problems[:limit]


def laptop_problems(split: str) -> list[Problem]:
    """Return the laptop world's problems, repeating small kinds until all are equally large."""
    problems = [
        Problem(f"laptop/{kind}/{question}", question, answer, "same", kind)
        for kind, question, answer in laptop_questions(split)
    ]
    return interleave(problems, repeat=True)


def interleave(problems: list[Problem], repeat: bool = False) -> list[Problem]:
    """Shuffle the problems of each kind, then alternate between the kinds: a, b, c, a, b, c, ….

    With `repeat`, smaller kinds start over until the largest kind is used up.
    """
    kinds = {}
    for problem in problems:
        kinds.setdefault(problem.kind, []).append(problem)
    rng = random.Random(0)
    for group in kinds.values():
        rng.shuffle(group)
    largest = max(map(len, kinds.values()), default=0)
    turns = itertools.product(range(largest), kinds.values())
    return [group[i % len(group)] for i, group in turns if repeat or i < len(group)]


def with_instructions(problem: Problem) -> Problem:
    r"""Return the problem with its options and an answer instruction appended to the question.

    The options are not appended if the question already contains all of them. The instruction is
    not appended if the question contains it, or mentions \boxed or <answer>. White space around the
    question and around the answer is removed.
    """
    question = problem.question.strip()
    choices = problem.extra.get("choices", [])
    if not all(choice in question for choice in choices):
        options = [f"{letter}. {choice}" for letter, choice in zip(LETTERS, choices)]
        question += "\n\n" + "\n".join(options)

    function = problem.extra.get("function")
    instruction = GRADERS[problem.grader].instruction
    if function and "```python" in question:  # the question gives code to complete
        instruction = GRADERS["unittest"].instruction
    elif function:
        instruction = f"Write the Python function {function}. {BLOCK}"
    if instruction not in question and not re.search(r"\\boxed|<answer>", question):
        question += "\n\n" + instruction
    return replace(problem, question=question, answer=problem.answer.strip())


# Problems from a user's file, with one JSON object per line


def split_of_file(file: str, split: str) -> list[Problem]:
    """Return the train or test split of the problems in a user's file.

    If the file has at least 20 different questions, a hash of a question's text decides its split:
    about a fifth are test questions, and editing the file seldom moves a question to the other
    split. A smaller file serves as both splits. The problems are interleaved (see `interleave`),
    since the file may be sorted by kind.
    """
    problems = read_problems(file)
    hashes = {hash_of(problem.question) for problem in problems}
    if len(hashes) >= 20:
        # Always hold out the question with the lowest hash, so that the test split is not empty.
        highest = max(0.2, min(hashes))
        is_test = split == "test"
        problems = [p for p in problems if (hash_of(p.question) <= highest) == is_test]
    return [with_instructions(problem) for problem in interleave(problems)]


def hash_of(question: str) -> float:
    """Return a hash of a question's text, from 0 to 1."""
    return zlib.crc32(question.strip().encode()) / 2**32


def read_problems(file: str) -> list[Problem]:
    """Return the problems of a JSONL file.

    Each line is blank, or a JSON object with "question", "answer", "grader" (optional with
    --grader) and, if the grader needs it, "extra". "kind", "id" and "level" are optional. Example:

        {"question": "Who wrote Emma?", "answer": "Jane Austen", "grader": "short", "kind": "books"}

    A problem without an "id" is named after its line, for example "mine.jsonl/7".

    Raises:
        FileNotFoundError: If the file is missing.
        ValueError: If the file is empty, or if lines are invalid or have the id of an earlier line.
            The message lists the first 20 of them.
    """
    if not os.path.exists(file):
        is_mix = file in [f"{DATA}/{name}.jsonl" for name in MIXES]
        hint = ": `python eval.py prepare` writes it" if is_mix else ""
        raise FileNotFoundError(f"{file} is missing{hint}")
    problems = {}  # id -> problem
    faults = []
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                problem = parse_problem(line, f"{os.path.basename(file)}/{number}")
                require(problem.id not in problems, f"two lines have one id, {problem.id}")
                problems[problem.id] = problem
            except ValueError as e:
                faults.append(f"{file}, line {number}: {e}")
    require(not faults, "\n".join(faults[:20]))
    require(problems, f"{file} is empty")
    return [*problems.values()]


def parse_problem(line: bytes, default_id: str) -> Problem:
    """Return the problem that a line of JSON describes.

    If the line has no "id", the problem gets `default_id`.

    Raises:
        ValueError: If the line is invalid.
    """
    try:
        values = json.loads(line)
        # JSON can hold half an emoji, "\ud83d", which cannot be sent in UTF-8. Replace it with "?".
        values = json.loads(json.dumps(values, ensure_ascii=False).encode(errors="replace"))
    except (ValueError, RecursionError) as e:
        raise ValueError(f"expected a JSON object in UTF-8 ({e})") from None
    require(isinstance(values, dict), "expected a JSON object")
    fields = Problem.__annotations__
    for key in values:
        require(key in fields, f"there is no field {key!r:.50}, only {', '.join(fields)}")
    for key in ("question", "answer"):
        require(key in values, f'"{key}" is missing')
    problem = Problem(**{"id": default_id, "grader": "own", **values})
    check_problem(problem)
    return problem


def check_problem(problem: Problem):
    """Raise ValueError if a field is invalid, or the gold answer would be judged wrong.

    The gold answer is judged only if Grader.must_accept_gold is True.
    """
    for key, kind in Problem.__annotations__.items():
        value = getattr(problem, key)
        require(type(value) is kind, f"{key} has to be {IN_WORDS[kind]}, not {shown(value)}")
    known = ", ".join(GRADERS)
    message = f"grader has to be one of {known}; your own: --grader=mine.py:grade"
    require(problem.grader in GRADERS, message)
    require(problem.question.strip(), "question: it has 0 characters")
    message = f"kind: {problem.kind!r} is the name of a table's column; choose another"
    require(problem.kind not in COLUMNS, message)
    require(problem.kind.splitlines() == [problem.kind], f"kind: {problem.kind!r} is not one line")

    # Check the contents of "extra".
    missing = [f'"{key}": …' for key in GRADERS[problem.grader].extra if key not in problem.extra]
    message = f'the grader {problem.grader} needs "extra": {{{", ".join(missing)}}}'
    require(not missing, message)
    for key, value in problem.extra.items():
        form, meaning = FORMS.get(key, (".*", "anything"))
        message = f"{key}: expected {meaning}, not {shown(value)}"
        require(fits(value, form), message)

    # Make sure that the grader accepts the gold answer, either bare or in a tag. If it accepts
    # neither, it would probably reject every response.
    if GRADERS[problem.grader].must_accept_gold:
        answer = problem.answer.strip()
        is_recognised = any(grade(problem, x) for x in (answer, f"<answer>{answer}</answer>"))
        message = f"answer: nothing equals {answer!r}; give it bare, a choice's letter"
        require(is_recognised, message)


IN_WORDS = {str: "a text", int: "a whole number", dict: "an object"}
PAIR = rf"\[{TEXT}, {TEXT}\]"
PLACE = rf'\{{"file": {TEXT}, "at": \d+\}}'
# Key of "extra" -> (regular expression for its value in JSON, what the error message says is
# expected). The tests of a program may also be given by their position in a benchmark's file.
FORMS = {
    "choices": (rf"\[({TEXT}(, {TEXT})*)?\]", "a list of texts"),
    "tests": (rf"\[{PAIR}(, {PAIR})*\]|{PLACE}", "pairs of texts, [input, output]"),
}


def shown(value) -> str:
    """Return a value as JSON, cut to 50 characters."""
    return json.dumps(value, ensure_ascii=False)[:50]


# ---- Systems -------------------------------------------------------------------------------------
#
# A system is a function system(problems, pools, prefix) -> rollouts. It lets the workers of
# pools[i] answer problems[i], and returns a list with one rollout for each problem, judged unless
# it is lost. `prefix` seeds the system's random draws, and begins its call ids, by which a replay
# file recognises calls.

REFLECT = (
    "Check the last response for mistakes, correct them, and give the whole answer in its final "
    "form."
)
AGGREGATE = (
    "Compare the responses, decide which is right, and give the whole answer in its final form."
)


def new_rollouts(problems: list[Problem], pools: list, prefix: str) -> list[Rollout]:
    rollouts = []
    repeats = Counter()  # question -> how many of the problems ask it so far
    for problem, pool in zip(problems, pools, strict=True):
        name = problem.id
        repeats[problem.question] += 1
        if re.fullmatch(r".*\.jsonl/\d+", name):
            # The problem is named after its line, which changes when the file is edited. Use the
            # question instead, so that a replay file still recognises its calls.
            digest = hashlib.sha256(problem.question.encode()).hexdigest()
            name = f"{digest}/{repeats[problem.question]}"
        call_prefix = f"{prefix}/{name}"
        rollouts.append(Rollout(problem.question, pool, problem=problem, call_prefix=call_prefix))
    return rollouts


def conductor(
    write,
    max_steps: int = 5,
    extra_rounds: int = 0,
    edit=None,
    tries: int = 1,
    only: str = "",
    call=call_worker,
):
    """Return a system that runs the workflows a Conductor writes.

    Args:
        write: A function that asks the Conductor for workflows; see "Writers" in workflow.py.
        max_steps: The maximum number of steps; a longer workflow is invalid.
        extra_rounds: The maximum number of rounds after the first, in which the Conductor may
            revise the answer (§3.2).
        edit: edit(workflow) returns a changed workflow to run instead, for ablations.
        tries: The maximum number of attempts at a valid workflow in each round.
        only: Comma-separated names of the workers the Conductor may use (§3.2); "" allows all.
        call: call(rollout, i) makes the call of step i.
    """

    def system(problems, pools, prefix):
        rollouts = new_rollouts(problems, pools, prefix)
        for rollout in rollouts:
            rollout.workers = numbers_of(only, rollout.pool) or None
        with progress(prefix, rollouts) as bar:
            return conduct(
                write,
                rollouts,
                extra_rounds,
                max_steps,
                tries,
                judge=grade_once(),
                edit=edit,
                call=call,
                # Count each question once: further rounds and tries do not advance the bar.
                on_end=lambda rollout: bar.update(rollout.previous is None and not rollout.number),
            )

    return system


def planned(plan, call=call_worker):
    """Return a system that runs the workflow plan(rollout) for every problem."""

    def write(rollouts):
        for rollout in rollouts:
            rollout.workflow = plan(rollout)
        return rollouts

    return conductor(write, call=call)


# Systems whose workers see only the question


def ask_bare(rollout: Rollout, i: int, times: int = 1) -> Reply:
    """Send the worker of step i only the question, and return the worker's reply.

    times: The factor by which to multiply the worker's token limit, if it has one.
    """
    worker = rollout.pool[rollout.workflow.steps[i].worker]
    limits = {key: times * value for key, value in worker.params.items() if key in LIMITS}
    chat = [{"role": "user", "content": rollout.question}]
    return worker.chat(chat, call_id(rollout, i), **limits)


def ask_each(problems, pools, prefix, workers: Sequence[int], call=ask_bare) -> list[list[Rollout]]:
    """Let each of `workers` answer every question. Return a list of rollouts for each problem.

    Args:
        workers: The pool numbers of the workers. The rollouts of a problem are in this order.
        call: call(rollout, i) makes the call of step i. By default, the worker sees only the
            question.
    """
    groups = []
    for rollout in new_rollouts(problems, pools, prefix):
        workflows = [Workflow([Step(worker, rollout.question, [])]) for worker in workers]
        groups.append([replace(rollout, number=i, workflow=w) for i, w in enumerate(workflows)])
    rollouts = list(itertools.chain(*groups))
    with progress(prefix, rollouts) as bar:
        roll_out(rollouts, judge=grade_once(), call=call, on_end=lambda rollout: bar.update())
    return groups


def merge(rollouts: list[Rollout], chosen: int) -> Rollout:
    """Merge rollouts of one step each into one rollout with all their steps.

    The step of rollouts[chosen] comes last, so that its response is the answer. The merged rollout
    costs as much as all of them together, and it is lost if any of them is.
    """
    ordered = [*rollouts]
    ordered.append(ordered.pop(chosen))
    error = next((rollout.error for rollout in ordered if rollout.error), None)
    return replace(
        ordered[-1],
        workflow=Workflow([rollout.workflow.steps[0] for rollout in ordered]),
        names=[rollout.names[0] for rollout in ordered],
        replies=[rollout.replies[0] for rollout in ordered],
        previous=None,
        error=error,
        right=None if error else ordered[-1].right,
    )


def vote(workers: Sequence[int], likeness=None, call=ask_bare):
    """Return a system that asks workers and picks the answer most like the others.

    Example with the grader "math": among the answers "41", "42" and "42.0", "41" agrees only with
    itself, while "42" and "42.0" also agree with each other. The earlier of these two, "42", wins.

    Args:
        workers: The pool numbers of the workers to ask. A worker that is listed several times is
            asked several times.
        likeness: likeness(problem, answer, other) -> how alike two answers are, as a number. By
            default, 1 if the problem's grader considers them the same, else 0.
        call: call(rollout, i) makes the call of step i.
    """

    def system(problems, pools, prefix):
        groups = ask_each(problems, pools, prefix, workers, call)
        return [elect(problem, rollouts) for problem, rollouts in zip(problems, groups)]

    def elect(problem, rollouts):
        like = likeness or GRADERS[problem.grader].agree
        answers = [rollout.answer for rollout in rollouts]
        scores = [sum(like(problem, answer, other) for other in answers) for answer in answers]
        return merge(rollouts, scores.index(max(scores)))

    return system


def common_words(problem: Problem, answer: str, other: str) -> float:
    """Return how many words two answers share, as a fraction of all distinct words in the two.

    The system "smoothie" uses this. The original Smoothie (arXiv 2412.04692) compares embeddings of
    the answers instead, and takes other questions into account.
    """
    first, second = (set(re.findall(r"\w+", text.casefold())) for text in (answer, other))
    return len(first & second) / max(len(first | second), 1)


# Systems with fixed or random workflows


def reflect(worker: int):
    """Return a system in which one worker answers and then revises its answer four times."""
    steps = [Step(worker, REFLECT if i else SOLVE_IT, list(range(i))) for i in range(5)]
    return planned(lambda rollout: Workflow(steps))


def propose_and_aggregate(rollout: Rollout) -> Workflow:
    """Plan a one-layer Mixture of Agents: every worker proposes, then a random one aggregates."""
    everyone = list(range(len(rollout.pool)))
    proposals = [Step(worker, SOLVE_IT, []) for worker in everyone]
    aggregator = random.Random(rollout.call_prefix).choice(everyone)
    return Workflow([*proposals, Step(aggregator, AGGREGATE, everyone)])


def phrases_for(problem: Problem) -> tuple:
    """Return the subtasks that may occur in a random workflow for this problem."""
    general = (SOLVE_IT, "Plan how to solve it.", REFLECT, AGGREGATE)
    return PHRASES if problem.id.startswith("laptop/") else general


def random_workflow(
    rng: random.Random, workers: list[int], max_steps: int = 5, phrases=PHRASES
) -> Workflow:
    """Return a random workflow of 1 to max_steps steps; shorter workflows are likelier.

    Each step has a random worker, and a random phrase as its subtask. With probability 0.9, a step
    sees the responses of all earlier steps; otherwise it sees no response. train.py's warm start
    uses such workflows to teach a small Conductor the format.
    """
    steps = []
    for i in range(min(rng.randint(1, max_steps), rng.randint(1, max_steps))):
        worker = rng.choice(workers)
        subtask = rng.choice(phrases)
        steps.append(Step(worker, subtask, list(range(i)) if rng.random() < 0.9 else []))
    return Workflow(steps)


def plan_at_random(rollout: Rollout) -> Workflow:
    rng = random.Random(rollout.call_prefix)
    workers = list(range(len(rollout.pool)))
    return random_workflow(rng, workers, phrases=phrases_for(rollout.problem))


# Ablations of the Conductor


def change_steps(workflow: Workflow, **changes) -> Workflow:
    return Workflow([replace(step, **changes) for step in workflow.steps])


ABLATIONS = {
    "": None,
    "subtasks": partial(change_steps, subtask=SOLVE_IT),  # App. B.7
    "access": partial(change_steps, access=[], wrote_all=False),
}


# The table of systems


@dataclass
class Setup:
    """The argument of System.make: everything that a system may need."""

    settings: "Settings"
    pool: list  # Workers
    worker: int = 0  # the pool number of the worker, for a system that uses a single one
    lessons: list[Problem] = field(default_factory=list)  # training problems to learn from
    # Row label -> rollouts, for the systems that have already run on this benchmark.
    played: dict[str, list[Rollout]] = field(default_factory=dict)


class System(NamedTuple):
    """An entry of SYSTEMS: how to make a system, what it needs, and how many calls it makes."""

    make: Callable  # make(setup) -> system
    # What the system needs: any of "checkpoint", "lessons" and "worker". With "worker", the system
    # uses a single worker. It is run with one worker after another, each in its own table row.
    needs: tuple = ()
    calls: float = 1  # the estimated calls per question; 0: as many as the pool has workers
    calls_to_learn: int = 0  # the estimated calls to learn, for each benchmark
    after: tuple = ()  # names of the systems that must run before this one


# Load a checkpoint once, and share the model between all systems that use it.
shared_conductor = lru_cache(1)(load_conductor)


def trained_conductor(setup: Setup, edit=None):
    """Return a system that runs the workflows of the Conductor in --checkpoint."""
    settings = setup.settings
    model, tokenizer, prompting = shared_conductor(settings.checkpoint)
    prompting = replace(prompting, prompt_style=settings.prompt_style or prompting.prompt_style)
    write = model_writer(model, tokenizer, prompting, temperature=0.0)
    return conductor(write, prompting.max_steps, settings.extra_rounds, edit, only=settings.only)


def as_conductor(setup: Setup):
    """Return a system in which a worker, an untrained LLM, acts as the Conductor (Table 11).

    This worker reads the names and notes of the workers that it may use. In each round, it gets ten
    attempts at a valid workflow; the paper sets no limit.
    """
    settings = setup.settings
    prompting = Prompting(prompt_style=settings.prompt_style or Prompting.prompt_style)
    write = worker_writer(setup.pool[setup.worker], prompting)
    return conductor(
        write, prompting.max_steps, settings.extra_rounds, tries=10, only=settings.only
    )


def best_of_n(setup: Setup):
    """Return a system that takes a vote over n answers of the best single worker.

    n is the number of answers that cost as much as one of the Conductor's, rounded up. The worker
    is the most accurate one on these same questions, which favours this system over the Conductor.
    """
    alone = workers_alone(setup.played)
    best = best_worker(alone)
    n = answers_for_the_same(measure(setup.played["conductor"]), measure(alone[best]))
    number = [f"workers {worker.name}" for worker in setup.pool].index(best)
    return vote([number] * n)


def answers_for_the_same(conductor_row: dict, worker_row: dict) -> int:
    """Return how many answers of a worker cost as much as one of the Conductor's, rounded up.

    Example: if a question costs the Conductor $0.005 and the worker $0.002, return 3. If either
    cost is unknown or 0, the numbers of calls per question are compared instead.
    """
    unit = "dollars" if conductor_row["dollars"] and worker_row["dollars"] else "calls"
    ratio = (conductor_row[unit] or 1.0) / (worker_row[unit] or 1.0)
    return max(1, math.ceil(ratio - 1e-9))


SYSTEMS = {
    "conductor": System(trained_conductor, ("checkpoint",), 3),
    "no-subtasks": System(
        partial(trained_conductor, edit=ABLATIONS["subtasks"]), ("checkpoint",), 3
    ),
    "no-access": System(partial(trained_conductor, edit=ABLATIONS["access"]), ("checkpoint",), 3),
    "one-worker": System(
        lambda setup: trained_conductor(setup, partial(change_steps, worker=setup.worker)),
        ("checkpoint", "worker"),
        3,
    ),
    "seat": System(as_conductor, ("worker",), 4),
    # A vote with a single voter
    "workers": System(lambda setup: vote([setup.worker]), ("worker",)),
    "context": System(
        lambda setup: vote([setup.worker], call=partial(ask_bare, times=5)), ("worker",)
    ),
    "consensus": System(lambda setup: vote([setup.worker] * 5), ("worker",), 5),
    "reflect": System(lambda setup: reflect(setup.worker), ("worker",), 5),
    "random": System(lambda setup: planned(plan_at_random), calls=2.2),
    "moa": System(lambda setup: planned(propose_and_aggregate), calls=0),
    "smoothie": System(lambda setup: vote(range(len(setup.pool)), common_words), calls=0),
    "best-of-n": System(best_of_n, calls=3, after=("conductor", "workers")),
}


def named_systems(names: str) -> dict[str, System]:
    """Return {name: entry} for the systems that --systems lists.

    Each is listed as a key of SYSTEMS or as FILE.py:NAME.
    """
    systems = {}
    for word in names.split(","):
        spec = word.strip()
        path, _, name = spec.rpartition(":")
        entry = load_name(spec) if path else SYSTEMS.get(name)
        known = f"only {', '.join(SYSTEMS)}, and FILE.py:NAME, an eval.System"
        require(isinstance(entry, System), f"--systems: there is no {spec}, {known}")
        require(name not in systems, f"--systems: two systems are named {name}")
        systems[name] = entry
    return systems


# ---- Measurements --------------------------------------------------------------------------------

# Column -> number format. Further columns hold the accuracy of each kind of question.
COLUMNS = {
    "accuracy": ".1%",
    "standard error": ".1%",  # only in the paper's rows
    "±": ".1%",
    "vs best": ".1%",
    "from": ".1%",
    "to": ".1%",
    "shows": ".1%",
    "lost": ".0f",
    "calls": ".2f",
    "seconds": ".2f",
    "dollars": ".5f",
    "tokens": ".0f",
    "calls to learn": ".0f",
}
WIDTH = 120  # the maximum width of a printed table, in characters
LESSONS = 256  # the maximum number of training problems that a system learns from


def measure(rollouts: list[Rollout]) -> dict:
    """Return a system's table row, a dict of {column: number} and {kind: share of right answers}.

    "lost" is the number of lost rollouts, which all other columns ignore. "±" is half the width of
    the accuracy's 95 % confidence interval. "calls", "tokens" and "dollars" are means per rollout,
    "seconds" is the median; all four cover the workers only, not the Conductor. "dollars" is None
    if the cost of any call is unknown. A number is None if no rollout counts towards it.
    """
    known = [rollout for rollout in rollouts if rollout.right is not None]
    costs = [rollout.cost for rollout in known]
    row = {
        "accuracy": mean([rollout.right for rollout in known]),
        "±": margin(known),
        "lost": len(rollouts) - len(known),
        "calls": mean([rollout.calls for rollout in known]),
        "seconds": statistics.median(map(latency, known)) if known else None,
        "tokens": mean([rollout.tokens_used for rollout in known]),
        "dollars": None if None in costs else mean(costs),
    }
    for kind in dict.fromkeys(rollout.problem.kind for rollout in rollouts):
        of_kind = [rollout.right for rollout in known if rollout.problem.kind == kind]
        row[kind] = mean(of_kind)
    return row


def mean(values: list) -> float | None:
    return sum(values) / len(values) if values else None


def latency(rollout: Rollout) -> float:
    """Return how many seconds the workers take to answer, assuming that no call waits or fails.

    A step starts when all the steps that it sees have ended. Example: steps 0 and 1 take 2 s and
    3 s, and step 2, which sees both, takes 4 s; the latency is 7 s. A reply from a replay file
    counts with the seconds of the original call.
    """
    seconds = 0.0
    for one_round in rollout.rounds():
        ends = []
        for i, reply in enumerate(one_round.replies):
            access = one_round.workflow.steps[i].access
            start = max([ends[j] for j in access], default=0.0)
            ends.append(start + (reply.seconds if reply else 0.0))
        seconds += max(ends, default=0.0)
    return seconds


def right_by_problem(rollouts: list[Rollout]) -> dict[str, float]:
    """Return {problem id: share of right answers}. Lost rollouts are ignored."""
    answers = {}
    for rollout in rollouts:
        if rollout.right is not None:
            answers.setdefault(rollout.problem.id, []).append(rollout.right)
    return {id: mean(right) for id, right in answers.items()}


def margin(rollouts: list[Rollout]) -> float | None:
    """Return half the width of the accuracy's 95 % confidence interval; None without rollouts.

    Two solved and two unsolved problems are added first (Agresti and Coull, 1998). Without them,
    the interval for five right answers out of five would have zero width.
    """
    shares = [*right_by_problem(rollouts).values(), 0, 0, 1, 1]
    return 1.96 * float(np.std(shares)) / math.sqrt(len(shares)) if rollouts else None


def paired_difference(rollouts: list[Rollout], others: list[Rollout]) -> dict:
    """Compare two systems on the problems that both answered.

    Returns a dict:
        "vs best": The first system's accuracy minus the second's, averaged over these problems. In
            the tables, the second is the best single worker.
        "from", "to": The 95 % confidence interval of "vs best", by bootstrap over problems.
        "shows": 2.8 standard errors of the difference. With these problems, a true difference of
            that size is detected with a probability of 80 %.

    If the difference is the same on all problems, "from", "to" and "shows" are None, because they
    are estimated from the spread of the differences. Without common problems, all four are None.

    Example: the first system solves problems a, b and c, the second only a. The differences are 0,
    1 and 1, with a mean of 0.67 and a standard error of 0.33, so "shows" is 0.93.
    """
    shares = right_by_problem(rollouts)
    other_shares = right_by_problem(others)
    common = [id for id in shares if id in other_shares]
    differences = np.array([shares[id] - other_shares[id] for id in common])
    row = dict.fromkeys(["vs best", "from", "to", "shows"])
    if common:
        row["vs best"] = float(differences.mean())
    if np.unique(differences).size > 1:
        rng = np.random.default_rng(0)
        means = [rng.choice(differences, len(common)).mean() for _ in range(2000)]
        row["from"], row["to"] = map(float, np.percentile(means, [2.5, 97.5]))
        row["shows"] = 2.8 * float(differences.std(ddof=1)) / math.sqrt(len(common))
    return row


# How accurate the workers are without a Conductor


def workers_alone(played: dict[str, list[Rollout]]) -> dict[str, list[Rollout]]:
    """Return {row label: rollouts} for the rows in which one worker answers on its own."""
    return {label: rollouts for label, rollouts in played.items() if label.startswith("workers ")}


def best_worker(alone: dict[str, list[Rollout]]) -> str:
    return max(alone, key=lambda label: measure(alone[label])["accuracy"] or 0)


def best_by_other_half(alone: dict[str, list[Rollout]]) -> list[Rollout]:
    """Return each half's rollouts by the worker that is best on the other half of the problems.

    If the same answers both choose a worker and measure its accuracy, that accuracy is partly luck.
    So the worker that is measured on one half is chosen on the other. A hash of a problem's id
    decides which half the problem is in.
    """
    chosen = []
    for half in (0, 1):
        others = {
            label: [rollout for rollout in rollouts if half_of(rollout) != half]
            for label, rollouts in alone.items()
        }
        best = best_worker(others)
        chosen += [rollout for rollout in alone[best] if half_of(rollout) == half]
    return chosen


def half_of(rollout: Rollout) -> int:
    return hashlib.sha256(rollout.problem.id.encode()).digest()[0] % 2


def right_answers(alone: dict[str, list[Rollout]], repeats: int) -> np.ndarray:
    """Return an array with 1 for each right answer, 0 for each wrong one and nan for each lost one.

    Its shape is (workers, repeats, problems).
    """
    right = [[rollout.right for rollout in rollouts] for rollouts in alone.values()]
    return np.array(right, float).reshape(len(alone), repeats, -1)


def headroom(right: np.ndarray) -> dict[str, dict]:
    """Return {label: table row}: the accuracy that a perfect choice between answers would have.

    "oracle" is the share of problems that at least one worker solves, a mean over all repeats. Part
    of it is luck: a single worker also solves more problems if it may answer twice. So compare
    "either of two workers" (the mean over all pairs) with "either of one worker's two answers" (the
    mean over all workers), which needs several repeats. Workers complement each other only if the
    former is higher.

    Args:
        right: The result of `right_answers`. Problems with a lost answer are left out. If no
            problem is left, the dict is empty.
    """
    right = right[:, :, ~np.isnan(right).any((0, 1))]
    if right.size == 0:
        return {}
    by_repeat = right.swapaxes(0, 1)  # (repeats, workers, problems)
    solved = {
        "oracle": [right.max(0)],
        "either of two workers": either_of_two(right),
        "either of one worker's two answers": either_of_two(by_repeat),
    }
    return {label: {"accuracy": float(np.mean(x))} for label, x in solved.items() if x}


def either_of_two(answers: np.ndarray) -> list[np.ndarray]:
    return [np.maximum(one, other) for one, other in itertools.combinations(answers, 2)]


def compare_with_workers(rows: dict[str, dict], played: dict[str, list[Rollout]], repeats: int):
    """Add comparisons with single workers to a benchmark's rows, if the system "workers" was run.

    The row of every system except the best worker also shows the system's `paired_difference` to
    that worker. New rows show the best worker in hindsight, `best_by_other_half` and, if there are
    several workers, the `headroom`.
    """
    alone = workers_alone(played)
    if not alone:
        return
    best = alone[best_worker(alone)]
    rows["best single worker in hindsight"] = measure(best)
    by_other_half = best_by_other_half(alone)
    rows["best single worker by other half"] = measure(by_other_half)

    compared = played | {"best single worker by other half": by_other_half}
    for label, rollouts in compared.items():
        if rollouts is not best:
            rows[label] |= paired_difference(rollouts, best)
    if len(alone) > 1:
        rows |= headroom(right_answers(alone, repeats))


# The comparison


def compare_systems(settings: "Settings"):
    """Measure every chosen system on every benchmark, and print tables for each benchmark.

    Wrong settings and missing files are reported before any worker is called. The files of --out
    appear only when the evaluation is complete.
    """
    # Load the systems and the pool.
    systems = named_systems(settings.systems)
    needs = set(itertools.chain(*(entry.needs for entry in systems.values())))
    pool_name = settings.pool or "local"
    if "checkpoint" in needs:
        pool_name = choose_pool(settings.checkpoint, settings.pool)
        shared_conductor(settings.checkpoint)
    pool = load_pool(pool_name, replay=settings.replay, budget=settings.budget)
    numbers_of(settings.only, pool)  # raises ValueError if a name is not in the pool
    players = label_players(systems, pool, settings.worker)

    # Load the problems.
    names = [name.strip() for name in settings.benchmarks.split(",")]
    tests = {name: load(name, "test", settings.limit) for name in names}
    if any(problem.grader in ("code", "unittest") for problem in itertools.chain(*tests.values())):
        check_sandbox()
    lessons = {}
    if "lessons" in needs:
        lessons = {name: load(settings.lessons or name, "train", LESSONS) for name in tests}

    # Print what the calls will probably cost, and demand a budget unless they are free.
    n_questions = sum(map(len, tests.values())) * settings.repeats * (1 + settings.extra_rounds)
    n_calls = 0.0
    for entry, _ in players.values():
        n_calls += n_questions * (entry.calls or len(pool)) + len(tests) * entry.calls_to_learn
    demand_budget(pool, settings.budget, round(n_calls), "this evaluation")

    # Run the systems, and print and save the results.
    numbers = {}
    traces = []  # (which system and benchmark, rollout)
    for name, problems in tests.items():
        setup = Setup(settings, pool, lessons=lessons.get(name, []))
        rows = play_all(setup, players, name, problems)
        try:
            print_with_legend(table(rows, f"{name}, {len(problems)} problems, in %"))
            print_paper(name, pool)
            sys.stdout.flush()
        except BrokenPipeError:
            if not settings.out:
                raise
            discard_output()  # nobody reads the tables any more, but --out keeps the results
        numbers |= {f"{name}, {label}": row for label, row in rows.items()}
        for label, rollouts in setup.played.items():
            about = {"system": label, "benchmark": name}
            traces += [(about, rollout) for rollout in rollouts]
    stop_if_lost([rollout for _, rollout in traces], pool)
    if settings.out:
        write_results(settings.out, numbers, traces)


def write_results(out: str, numbers: dict[str, dict], traces: list[tuple[dict, Rollout]]):
    """Write the two files of --out. Neither ever exists half-written."""
    numbers_file, rollouts_file = output_files(out)
    unfinished = f"{rollouts_file}.tmp"
    with open(unfinished, "w") as file:
        for about, rollout in traces:
            file.write(json.dumps(about | rollout_to_json(rollout)) + "\n")
    os.replace(unfinished, rollouts_file)
    write_json(numbers_file, numbers)


def output_files(out: str) -> list[str]:
    """Return the two files of --out.

    "ev", "ev.json" and "ev.jsonl" all give ["ev.json", "ev.jsonl"].
    """
    stem = re.sub(r"\.jsonl?$", "", out)
    return [f"{stem}.json", f"{stem}.jsonl"]


def stop_if_lost(rollouts: list[Rollout], pool: list):
    """Exit with status 1 if a call was refused for lack of budget, or if every rollout was lost."""
    if pool[0].budget and pool[0].budget.refused:
        raise SystemExit(
            "the budget is spent, or too small for a call, and calls that it refused are not "
            "counted: to go on, run it again with a larger --budget (train.py: and with --resume)"
        )
    errors = [rollout.error for rollout in rollouts]
    if errors and all(errors):
        raise SystemExit(f"every answer was lost, the first by: {errors[0]}")


def label_players(systems: dict, pool: list, workers: str) -> dict[str, tuple[System, int]]:
    """Return the players, {row label: (entry, pool number of its worker)}, in the order to run.

    The entries are those of named_systems. The number is 0 if the system does not need a "worker".

    workers: The comma-separated names of workers. A system that uses a single worker gets one entry
        for each of them; "" means all workers.
    """
    numbers = numbers_of(workers, pool) or range(len(pool))
    players = {}
    # Systems that need the rows of other systems run last.
    for name, entry in sorted(systems.items(), key=lambda item: bool(item[1].after)):
        missing = ", ".join(other for other in entry.after if other not in systems)
        require(not missing, f"--systems: {name} needs the rows of {missing}, too")
        if "worker" in entry.needs:
            players |= {f"{name} {pool[number].name}": (entry, number) for number in numbers}
        else:
            players[name] = (entry, 0)
    return players


def play_all(
    setup: Setup, players: dict, benchmark_name: str, problems: list[Problem]
) -> dict[str, dict]:
    """Let all players answer the problems --repeats times, and return the table: {row label: row}.

    The players' rollouts are added to `setup.played`.
    """
    rows = {}
    for label, (entry, number) in players.items():
        # Make the system, and count the calls that it needs to learn.
        calls_before = sum(worker.calls for worker in setup.pool)
        system = entry.make(replace(setup, worker=number))
        calls_to_learn = sum(worker.calls for worker in setup.pool) - calls_before

        rollouts = []
        name = f"{os.path.basename(benchmark_name)}/{label}"  # part of the key of kept replies
        for repeat in range(setup.settings.repeats):
            answered = system(problems, [setup.pool] * len(problems), f"{name}/{repeat}")
            counts = f"{len(answered)} rollouts for {len(problems)} problems"
            message = f"{name}: {counts}; a system has to return one for each"
            require(len(answered) == len(problems), message)
            rollouts += answered
        print_faults(name, rollouts)

        setup.played[label] = rollouts
        rows[label] = measure(rollouts)
        if calls_to_learn:
            rows[label]["calls to learn"] = calls_to_learn
    compare_with_workers(rows, setup.played, setup.settings.repeats)
    return rows


def print_faults(name: str, rollouts: list[Rollout]):
    """Print a warning if rollouts are lost.

    Print another if rollouts have several responses, but no rollout has two different ones.
    """
    errors = [rollout.error for rollout in rollouts if rollout.error]
    if errors:
        print(f"{name}: {len(errors)} lost, the first by: {errors[0]}")
    responses = [[reply.text for reply in rollout.all_replies] for rollout in rollouts]
    several = [texts for texts in responses if len(texts) > 1]
    if several and all(len(set(texts)) == 1 for texts in several):
        print(f"{name} is degenerate: all calls for a question return the same")


# Tables and files


LEGEND = {  # label of a row or a column, or "?" -> what it means
    "no-subtasks": f'the Conductor\'s workflows; each subtask is replaced by "{SOLVE_IT}"',
    "no-access": "the Conductor's workflows; no step sees the response of another",
    "one-worker": "the Conductor's workflows; this worker does every step",
    "seat": "a prompted, untrained LLM conducts; its own calls are not in its row",
    "context": "the worker's token limit, if it has one, is multiplied by five",
    "consensus": "a vote over five answers of the worker",
    "reflect": "the worker revises its answer four times",
    "random": "random workflows",
    "moa": "a Mixture of Agents: every worker answers, and a random one aggregates the answers",
    "smoothie": "of one answer of each worker, the one most like the others",
    "best-of-n": "a vote over answers of the best single worker in hindsight, as many as the "
    "Conductor's spend pays for (see calls)",
    "best single worker in hindsight": "the one with the highest accuracy on these questions",
    "best single worker by other half": "each half of the questions is answered by the worker that "
    "is best on the other half",
    "oracle": "right if any worker is right; luck is part of it, as --repeats=2 shows",
    "either of two workers": "right if one of the two is right, a mean over all pairs",
    "either of one worker's two answers": "the same for two answers of one worker, a mean over all "
    "workers: what luck alone gives",
    "share of problems that can teach": "one worker is right twice and another one wrong twice",
    "±": "half of the width of the accuracy's 95 % confidence interval (Agresti and Coull)",
    "vs best": "the accuracy minus that of the best single worker in hindsight, on the same "
    "questions, with its 95 % confidence interval (from, to)",
    "shows": "the smallest true difference that so many questions reveal in four cases of five",
    "lost": "answers that are missing because a call failed; no other column counts them",
    "seconds": "how long the workers take to answer, a median over all answers, without waits and "
    "retries; calls, dollars and tokens are means",
    "?": "unknown, for instance because a worker has no price, because all answers are lost, or "
    "because there is no spread to estimate from",
}


def print_with_legend(text: str):
    """Print a table, followed by the entries of LEGEND for its rows, its columns and "?"."""
    print(f"\n{text}\n")
    for name, meaning in LEGEND.items():
        if re.search(rf"(?m)(?:^|  ){re.escape(name)}(?: |$)", text):
            print(textwrap.fill(f"{name}: {meaning}", WIDTH, subsequent_indent="  "))


def table(rows: dict[str, dict], title: str = "") -> str:
    """Return rows of `measure` as a text table of at most WIDTH characters per line.

    "?" stands for None. A cell is blank if its row lacks the column. Columns that do not fit go
    into further tables, as does the accuracy of each kind if there are several. Rows that would be
    blank are left out.
    """
    present = dict.fromkeys(itertools.chain(*rows.values()))
    kinds = [key for key in present if key not in COLUMNS]
    heads = [head for head in COLUMNS if head in present]
    if len(kinds) > 1:
        heads += kinds
    names = [name[:60] for name in (title, *rows)]
    name_width = max(map(len, names))

    tables = []  # each table is a list of lines, which grow by one column after another
    for head in heads:
        # Start a new table if the column does not fit, and before the first kind.
        cells = [head[:50], *(cell(row, head) for row in rows.values())]
        width = 2 + max(map(len, cells))
        if not tables or len(tables[-1][0]) + width > WIDTH or head in kinds[:1]:
            tables.append([name.ljust(name_width) for name in names])
        tables[-1] = [line + text.rjust(width) for line, text in zip(tables[-1], cells)]

    texts = []
    for lines in tables:
        texts.append("\n".join(line.rstrip() for line in lines if line[name_width:].strip()))
    return "\n\n".join(texts)


def cell(row: dict, head: str) -> str:
    if row.get(head) is None:
        return "?" if head in row else ""
    return format(row[head], COLUMNS.get(head, ".1%")).removesuffix("%")


def print_paper(benchmark_name: str, pool: list):
    """Print the paper's results on a benchmark in the pool's setting, if there are any.

    The paper measured constrained workers, limited to 4,096 tokens, and unconstrained workers. The
    pool counts as constrained unless one of its workers has a higher limit.
    """
    limits = [worker.params.get(name) for worker in pool for name in LIMITS]
    is_constrained = all(limit <= 4096 for limit in limits if isinstance(limit, int))
    setting = "constrained" if is_constrained else "unconstrained"
    paper = read_json(os.path.join(ASSETS, "paper.json"))
    rows = paper.get(benchmark_name, {}).get(setting)
    if rows:
        title = f"the paper, {setting} workers, in %"
        print("\n" + table(rows, title) + "\nOther models answered, and in part other questions.")


LINE_EVERY = 30.0  # seconds between two lines of progress if stderr is not a terminal


def progress(what: str, items: Sequence) -> tqdm:
    """Return a tqdm iterator over the items. Only rank 0 shows the progress, on stderr.

    On a terminal it shows a bar. Otherwise it prints a line roughly every LINE_EVERY seconds.
    """
    look = {}
    if not sys.stderr.isatty():
        look = {"delay": LINE_EVERY, "mininterval": LINE_EVERY, "miniters": 1}
        look["bar_format"] = "{desc}: {n_fmt} of {total_fmt}, ETA {remaining}\n"
    return tqdm(items, what, leave=False, disable=os.environ.get("RANK", "0") != "0", **look)


# ---- Graders ------------------------------------------------------------------------------------
#
# The math and short graders take four steps: find the answer in the response, normalize the
# spelling of the answer and of the gold answer, split both into parts, and compare the values of
# the parts. An answer that can be read in several ways is right only if its normalized spelling is
# that of the gold answer. Of the built-in graders, only code and unittest run code from responses.
# They run it in the sandbox, unless --sandbox=none.

LONGEST = 1000  # characters; a longer math or short answer is compared only as text

# Step 1: find the answer in the response

# Matches text whose braces are balanced, up to seven levels deep: a{b{c}}
IN_BRACES = ""
for _ in range(8):
    IN_BRACES = rf"(?:\\.|[^{{}}\\]|\{{{IN_BRACES}\}})*"

# Matches a box, as in \boxed{5}, \fbox{5} or \boxed 5. Without braces, LaTeX boxes only one digit.
BOX = rf"(?s:\\[bf]?box(?:ed)?\s{{0,9}}(?:\{{({IN_BRACES})\}}|(\d)))"

# BETWEEN matches what may separate two boxes of one answer. BOXES matches all boxes of an answer,
# as in "\boxed{5} and $x_2 = \boxed{6}$", and the percent sign after the last box, if there is one.
BETWEEN = (
    r"(?:[\s$*,;]|\\q?quad|\\[(),; ]|\b(?:and|or)\b|\\text\{ *(?:and|or) *\}"
    r"|\b[A-Za-z](?:_\d)? *=)*"
)
BOXES = re.compile(rf"{BOX}(?:{BETWEEN}{BOX})*(?:[ $]*\\?%)?")

# Match text that changes the value of the box next to it, as in -\boxed{5} or \boxed{5}x. The
# content of such a box alone is not the answer.
BEFORE = re.compile(
    r"""(?x)(?:
        (?: (?<!\n)-                # -\boxed{5}; but after a newline, "-" marks an item
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
          | [-,;*][ ]?(?:\d|\$[-\\\d])              # \boxed{5}, 6
          | \^(?!\{?\\circ)                         # \boxed{5}^2, but not \boxed{5}^\circ
          | \\(?:cdot|times|pm|pi|ln)(?![a-z])      # \boxed{5} \times 10^3
          | (?:\\text\{[ ]*)?(?:
                (?:\w+llion|thousand|hundred|dozen)\b   # \boxed{5} million
              | (?:or|and)\b[ }]*[-$\d]                # \boxed{5} or $6$
            )
        )"""
)

# Matches words that introduce an answer: "The answer is", "Answer:", "the right option should be",
# "#### " (GSM8K), or a line "Final answer". These words and the text after them form a claim.
CLAIM = re.compile(
    r"""(?xim)(?:
        \b(?:answer|(?:option|choice)(?![ ]*\(?[A-J]\b))\b[^\n.:?]{0,40}?
            (?:\b(?:is|(?:must|should|would)[ ]be)\b|:)
      | \bfinal[ ]answer\b[* ]*\n
      | ^\#\#\#\#\s
    )
    (?:
        [\s:*$]|\\[\[(]
      | (?:most|likely|probably|clearly|definitely|actually|indeed|simply|therefore|thus)\b
    )*"""
)

# Matches the beginning of a list of all options. If such a list follows words that CLAIM matches,
# as in "Let me check each option:", these words do not introduce an answer.
OPTIONS = re.compile(r"\W*A[).:][^\n]*\n\s*\W*B[).:]")

# Matches words that cancel the claim after them: a condition or a doubt ("If x is 3, the answer
# is"), or a negation. A word such as "so" ends a negation, so the claim in "A is not possible, so
# the answer is B" counts.
DENIED = re.compile(
    r"""(?xi)(?:
        \b(?:if|whether|unless|doubt|unlikely)\b [^.!?\n]*
      | (?:\b(?:not|never|wrong|false|incorrect)\b|n't\b)
        (?:(?!\b(?:so|thus|hence|therefore)\b)[^.!?\n])*
    )\Z"""
)

# REASON matches the beginning of a reason or explanation. END matches the end of a claim: the end
# of its sentence, the beginning of a reason, or ", not", as in "B, not A".
REASON = re.compile(r"[,;.]?\s(?:because|since)\b|,\s(?:as|where|so)\b")
END = re.compile(rf"(?<=[^.])\.[*$]*\s+(?=[A-Z])|,\snot\b|{REASON.pattern}")

# Matches the start of a line that solves for an unknown: "x =", "- $x_1 =", "Case 1: x ="
UNKNOWN = re.compile(r"(?:Case )?[\W\d]*([A-Za-z])(?:_\w+|_\{\w+\})? *= *")


def boxed(response: str) -> str | None:
    r"""Return the content of the last \boxed{} or <answer>; None if the response has neither.

    Boxes with only ",", "and", "or", "x =" or marks such as "$" between them are one answer:
    "\boxed{5} or \boxed{6}" -> "5, 6". A percent sign after the last box is kept. Empty boxes are
    skipped. Returns "" if all boxes are empty, if the last one is not closed, or if adjacent text
    changes its value: "-\boxed{5}".
    """
    # Treat <answer> as a box. A full stop after it keeps it apart from any box that follows.
    text = re.sub("(?i)<answer>", r"\\boxed{", response[-100 * LONGEST :])
    text = re.sub("(?i)</answer>", "}\n.\n", text).replace("**", " ")
    filled = re.sub(r"\\boxed\{\s*\}", "", text)  # drops empty boxes: "Put your answer in \boxed{}"
    *_, last = [None, *BOXES.finditer(filled)]
    if last is None or r"\boxed{" in filled[last.end() :]:
        return "" if r"\boxed{" in text else None
    if BEFORE.search(filled, 0, last.start()) or AFTER.match(filled, last.end()):
        return ""
    contents = [in_braces or digit for in_braces, digit in re.findall(BOX, last[0])]
    percent = r"\%" if last[0].endswith("%") else ""
    return ", ".join(dict.fromkeys(contents)).replace(r"\boxed", "").strip() + percent


def claims(response: str) -> list[str]:
    """Return a list with the text of each claim, which follows "The answer is" or similar words.

    The text is what `solutions` returns for the lines after these words. A negation, a condition or
    a doubt before a claim cancels it, so that its text is "". Only the last 5,000 characters of the
    response are read.
    "The answer is 5 because 2+3=5." -> ["5 because 2+3=5."];  "If x is 3, the answer is 4." -> [""]
    """
    found = []
    for match in CLAIM.finditer(response[-5 * LONGEST :]):
        before = match.string[: match.start()][-200:]
        after = match.string[match.end() :][:LONGEST]
        if not OPTIONS.match(after):
            found.append("" if DENIED.search(before) else solutions(after.split("\n")))
    return found


def solutions(lines: list[str]) -> str:
    """Return the first line with content, plus values that the next lines give for its unknown.

    ["x = 5", "x = 3", "So we get"] -> "x = 5, x=3";  ["x = 5", "x = 2 + 3"] -> "x = 5"
    """
    lines = [line for line in lines if re.search(r"\w", re.sub(r"\b(?:and|or)\b", "", line))]
    answer = "".join(lines[:1])
    unknown = UNKNOWN.match(answer)
    for line in lines[1:]:
        other = UNKNOWN.match(line)
        if not unknown or not other or other[1] != unknown[1]:
            break
        value = re.sub(r"[\s,;.$]*(?:\b(?:or|and))?\s*$", "", line[other.end() :])
        number = Expression(normalize(value))
        if not number.values or number.letters:  # x = 2y is a step of the derivation
            break
        if not same_math(value, answer):
            answer = f"{answer.rstrip(' ,;.$')}, {unknown[1]}={value}"
    return answer


def commitments(response: str) -> tuple[str | None, list[str]]:
    r"""Return (content of the last box or None, texts that a response commits to).

    With a box, the only such text is the last claim inside it, or else its whole content. Without a
    box, every claim is one.
    "<answer>The answer is 5.</answer>" -> ("The answer is 5.", ["5."]);  "I doubt it" -> (None, [])
    """
    content = boxed(response)
    if content is None:
        return None, claims(response)
    return content, [content, *claims(content)][-1:]


def final_answer(response: str) -> str:
    r"""Return the text of the answer, up to the first match of END and without a full stop.

    It is the last text that the response commits to (see commitments). Without any, it is the last
    line and what the lines above give for its unknown (see solutions), or "" if that is 100
    characters or longer.
    """
    _, texts = commitments(response)
    if not texts:
        last_line = solutions(response[-LONGEST:].split("\n")[::-1])
        texts = [last_line if len(last_line) < 100 else ""]
    answer = END.split(texts[-1].strip("* "))[0]
    return re.sub(r"(?<=[^.])\.$", "", answer.strip("* ")).strip("* ")


# Step 2: normalize the spelling of an answer. A matrix becomes ⟦a&b,c&d⟧, a set inside an answer
# becomes ⦃a,b⦄, "or" between words becomes ∨, and an inequality such as x>1 becomes an interval.


def normalize(text: str) -> str:
    r"""Normalize an answer's spelling: "$\left(\dfrac12,\; x²\right)$" -> "(\frac{1}{2},x^2)"."""
    text = " ".join(text[: 2 * LONGEST].split()).translate(CHARACTERS)
    for pattern, replacement in RULES:
        text = re.sub(pattern, replacement, text)
    return text


def as_interval(match: re.Match) -> str:
    """Return a matched inequality as an interval: 2>x≥1 -> x∈[1,2)"""
    low, below, name, above, high = match.groups("")
    if {">", "≥"} & {below, above}:
        low, below, above, high = high, above, below, low
    opening = "[" if below in ("≤", "≥") else "("
    closing = "]" if above in ("≤", "≥") else ")"
    return f"{name}∈{opening}{low or '-∞'},{high or '∞'}{closing}"


def repeating_decimal(match: re.Match) -> str:
    r"""Return a matched repeating decimal as a fraction: 0.1\overline{6} -> (15/90)"""
    fixed = match[1] + match[2]
    repeated = match[3] or match[4]
    numerator = int(fixed + repeated) - int(fixed or 0)
    return f"({numerator}/{'9' * len(repeated)}{'0' * len(match[2])})"


# Words that multiply a number (5 million), and words for the base of a number (25_{eight})
MULTIPLES = {
    "dozen": 12,
    "hundred": 100,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
}
BASES = dict(
    zip("two three four five six seven eight nine ten eleven twelve".split(), range(2, 13))
)

# Unicode characters and their replacements
CHARACTERS = str.maketrans(
    dict(zip("·⋅∗−–—÷⁄∕µΩ’", "***---///μΩ'"))
    | {"½": r"\frac12", "⅓": r"\frac13", "⅔": r"\frac23", "¼": r"\frac14", "¾": r"\frac34"}
    | {"√": r"\sqrt ", "∛": r"\sqrt[3] ", "∅": "⦃⦄", "¢": " cents"}
)
# Superscript digits and signs, subscript digits, and their replacements
SCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻₀₁₂₃₄₅₆₇₈₉", "0123456789+-0123456789")

# LaTeX command without its backslash -> its replacement, mostly a single character: "le" -> "≤".
# Most rows come from Python's table of HTML entities, whose names are mostly the same as LaTeX's.
SIGNS = {name.rstrip(";"): sign for name, sign in html5.items() if len(sign) == 1}
SIGNS |= dict(
    pair.split("=")
    for pair in (
        r"cdot=* div=/ infty=∞ infinity=∞ inf=∞ leqslant=≤ geqslant=≥ neq=≠ emptyset=⦃⦄ "
        r"varnothing=⦃⦄ lor=∨ lbrace=⦃ rbrace=⦄ degree=° lvert=| rvert=| mid=| varphi=φ "
        r"varepsilon=ε dfrac=\frac tfrac=\frac cfrac=\frac nicefrac=\frac %=% $=＄ {=⦃ }=⦄ \=,"
    ).split()
)
SIGNS |= dict.fromkeys([*"!,;: ()[]", "quad", "displaystyle", "left", "right"], " ")

# Matches a variable, with or without a subscript: x, AB, θ, x_1
LETTER = r"Δ?(?:(?!NO)[A-Z]{1,2}|[a-zα-ωΔℓ])(?:_\w{1,3}|_\{\w{1,3}\})?(?!\w)"

# Matches a left-hand side naming what was asked for, which an answer may leave out: x=, ∠ABC=,
# f^{-1}(x)=, P(A|B)=, ΔH=, x∈, (x,y)=
NAMED = re.compile(
    rf"(?:m?[∠▵][A-Z]+|{LETTER}(?:\^\{{?-1\}}?|'+|°)?"
    r"(?:\((?:[^()=A-Za-z]|[A-Za-z](?![A-Za-z]))*\))?)(?:=|∈(?=[(\[⦃]))"
    r"|\((?:x,y|x,y,z|x_1,x_2|a,b|a,b,c|a,b,c,d|m,n|p,q|p,q,r|r,s|u,v|h,k|A,B|r,θ|r,θ,z|ρ,θ,φ)\)"
    r"=(?=\()"
)

# Patterns and their replacements, in the order in which they are applied. The comment above a
# pattern, or above a group of patterns, shows the effect.
# fmt: off
RULES = [
    # Fractions: {7 \over 4} -> \frac{7}{4}
    (r"\{([^{}]*)\\over(?![a-z])([^{}]*)\}", r"\\frac{\1}{\2}"),
    # Braces around the answer: {5} -> 5
    (rf"^\s*\{{({IN_BRACES})\}}\s*$", r"\1"),
    # Superscripts: x² -> x^{2} and 10⁻³ -> 10^{-3}
    (r"[⁰¹²³⁴-⁻]+", lambda m: "^{" + m[0].translate(SCRIPTS) + "}"),
    # Subscripts: CO₂ -> CO_{2}
    (r"[₀-₉]+", lambda m: "_{" + m[0].translate(SCRIPTS) + "}"),
    # Dollar signs and ties become spaces: $x$, 5~cm
    (r"(?<!\\)\$|(?<=[\w.,;)}{])~", " "),
    # Repeating decimals: 0.1\overline{6} -> (15/90)
    (r"(\d*)\.(\d*)\\(?:overline|bar|dot)(?:\{(\d+)\}|(\d))", repeating_decimal),
    # Spaces in thousands: 1\,000 and 1,\!000 -> 1,000
    (r"(?<=\d)(?:\\,|,?\s*\\!)\s*(?=\d{3})", ","),
    # Matrices: \begin{pmatrix}1\\[2pt]2\end{pmatrix} -> ⟦1\\2⟧
    (r"\\begin\{(?:[pb]?matrix|array)\}(?:\{[clr|\s]*\})?", "⟦"),
    (r"\\\\\[\w+\]", r"\\\\"),
    (r"(?:\\\\\s*)?\\end\{(?:[pb]?matrix|array)\}", "⟧"),
    # Functions without a backslash: sqrt(2) -> \sqrt(2)
    (r"(?<![\\A-Za-z])(sqrt|pi|inf(?:inity)?|(?:arc)?(?:sin|cos|tan)|csc|cot|exp|ln|log"
     r"|sec(?=[ ^]*[\w(\\]))(?![A-Za-z])", r"\\\1"),
    # Inverse functions: \sin^{-1} x -> \arcsin x
    (r"\\(sin|cos|tan)\s*\^\s*(?:\{\s*-1\s*\}|-1)", r"\\arc\1"),
    # Degrees: 60^{\circ} -> 60°
    (r"\^\s*(\{)?\s*(?:\\circ(?![A-Za-z])|°)(?(1)\s*\})", "°"),
    # Sizes of brackets: \big( -> (
    (r"\\[bB]igg?[lr]?(?![A-Za-z])", ""),
    # Commands in SIGNS: \le -> ≤
    (r"\\([A-Za-z]+|.)", lambda m: SIGNS.get(m[1], m[0])),
    # Text and fonts: \text{cm} -> cm
    (rf"\\(?:(?:text|math)(?:rm|bf|it|sf|tt|cal)?(?![A-Za-z])|mbox|boldsymbol|operatorname|vec|ce)"
     rf"\s*\{{(?!\}})({IN_BRACES})\}}", r"\1"),
    # Spaces: 5 \text{ cm} -> 5 cm
    (r"\s+", " "),
    # Commas and spaces in thousands: -1,000 -> -1000, 1{,}000 -> 1000 and 10 000 -> 10000, but
    # (1,000) is a pair
    (r"(?<![\d.,(\[{⦃-])(?:- ?)?[1-9]\d{0,2}(?:(?:\{,\}|,)\d{3})+(?![\d)\]}⦄]|,\d)"
     r"|^-?[1-9]\d{0,2}(?: \d{3})+$", lambda m: re.sub(r"[^\d-]", "", m[0])),
    # Decimal commas in LaTeX: 3{,}14 -> 3.14
    (r"(?<=\d)\{,\}(?=\d)(?!\d{3}(?!\d))", "."),
    # Powers of ten: 3 x 10^8 and 3e8 -> 3*10^{8}
    (r"(?<=\d)\s*(?:[xX]\s*10\^\{?|[eE])([-+]?\d+)\}?", r"*10^{\1}"),
    # Words that multiply: 5 million -> 5*1000000
    (rf"(?<=\d) *({'|'.join(MULTIPLES)})\b", lambda m: f"*{MULTIPLES[m[1]]}"),
    # Dollars: \$5 -> 5 dollars
    (r"(?:(?:US ?)?＄|\bUSD) *([\d.*]*\d)", r"\1 dollars"),
    # Percent: 5 percent -> 5%
    (r" ?per ?cent\b", "%"),
    # Degrees: 5 degrees -> 5°
    (r" ?\bdegrees?\b", "°"),
    # Temperatures: 5°C -> 5 celsius
    (r"° ?C(?:elsius)?\b|℃", " celsius"),
    # Units: feet per day -> feet/day
    (r"(?<=\w) per (?=\w)", "/"),
    # Units: square feet -> feet^2, cubic feet -> feet^3
    (r"\bsq(?:uare|\.)? (\w+)", r"\1^2"),
    (r"\bcubic (\w+)", r"\1^3"),
    # Times: 1:03 p.m. -> 1:03 PM
    (r"(?i)(?<=:\d\d) ?([ap])\.?m\b\.?", lambda m: f" {m[1].upper()}M"),
    # Articles: The cell -> cell, but the A of "A and B" is not an article
    (r"(?i)^ *(?:the|an?) (?!(?:and|or)\b)(?=\w\w)", ""),
    # Signs and words before a number: = 5 -> 5, about 5.3 -> 5.3, but about 5 stays
    (r"^ *=|^ *(?:~ ?|(?:about|around|roughly|approx(?:imately|\.)?) )(?=\d*\.\d)", ""),
    # Real numbers: \mathbb{R} -> (-∞,∞)
    (r"^ *(?:\w *∈ *)?(?:all real numbers|ℝ|\\(?:mathbb|Bbb) ?(?:R|\{R\})) *$", "(-∞,∞)"),
    # Unions: (1,2) U (3,4) -> (1,2)∪(3,4)
    (r"(?<=[)\]]) *U *(?=[(\[])", "∪"),
    # Bases: (25)_8, 25 base 8 and 25_{eight} -> 25_8
    (r"\((\d+)\)(?=_)", r"\1"),
    (r" \(?base (\d+)\)?$", r"_\1"),
    (r"_\{ *(?:base )?(\w+) *\}$", lambda m: f"_{{{BASES.get(m[1], m[1])}}}"),
    # Comparisons: x<=1 -> x≤1
    (r"<=", "≤"),
    (r">=", "≥"),
    # Alternatives: 1 or 2 -> 1∨2
    (r",?\s*(?<!\\)\bor\b\s*", "∨"),
    # Lists: 1, 2 and 3 -> 1, 2,3
    (r",?\s*(?<!\\)\band\b\s*|;", ","),
    # Absolute values: |x| -> \abs{x}
    (r"\|([^|]*)\|", r"\\abs{\1}"),
    # Logarithms: \log_2 8 -> \frac{1}{\ln{2}}\ln 8
    (r"\\log_(\w|\{[^{}]*\})", r"\\frac{1}{\\ln{\1}}\\ln "),
    # Roots: \sqrt[3]{x} -> \root{3}{x}
    (r"\\sqrt *\[(\w+)\]", r"\\root{\1}"),
    # Square roots: \sqrt{x} -> \root{2}{x}
    (r"\\sqrt(?![a-z])", r"\\root{2}"),
    # Short exponents and indices: x_{1} -> x_1
    (r"([_^])\{([-+\w])\}", r"\1\2 "),
    # Negative exponents: 10^-3 -> 10^{-3}
    (r"\^(-\d+)", r"^{\1}"),
    # Spaces: removed, except between words, numbers and units, as in 5 cm and \frac{1}{2} cm
    (r"(?<![A-Za-z0-9})π])\s|(?<=[})π])\s(?![A-Za-z])|\s(?![A-Za-z0-9])", ""),
    # Marks at the end: "5." -> "5" and "5," -> "5", but "5..." stays
    (r"(?:(?<!\.)\.|[\\,;])$", ""),
    # Approximations: √2 ≈ 1.41 -> √2, but ≈ 1.41 alone -> 1.41
    (r"(?<=[^x=])≈-?\d*\.\d+\D*$|^(?:[a-z]=?)?≈(?=\d*\.)", ""),
    # Fractions without braces: \frac12 -> \frac{1}{2}
    (r"\\frac ?(\d)", r"\\frac{\1}"),
    (r"(\\frac\{[^{}]*\}) ?(\d)", r"\1{\2}"),
    # Mixed numbers: 2 1/3 and 2\frac{1}{3} -> (2+1/3)
    (r"(?<![\d.^_}/])(\d+)(?: (\d+)/(\d+)|\\frac\{(\d+)\}\{(\d+)\})(?![\d/])", r"(\1+\2\4/\3\5)"),
    # Two values: 3±2 -> 3+2,3-1*2, with "1*" because UNSURE would take 3-2 for a range
    (r"(?<![^,∨⦃⦄])([^,∨⦃⦄±]*)±([^,∨⦃⦄]*)", r"\1+\2,\1-1*\2"),
    # Inequalities: 1<x≤2 -> x∈(1,2]
    (r"(?<![^,∨])(?=[^,∨]*[<>≤≥])(?:([^<>≤≥,∨]+)([<>≤≥]))?"
     rf"({LETTER})(?:([<>≤≥])([^<>≤≥,∨]+))?(?![^,∨])", as_interval),
    # Alternatives, now that inequalities are intervals: x∈(1,2)∨x∈(3,4) -> x∈(1,2)∪x∈(3,4)
    # and 1∨2 -> 1,2
    (r"∨(?=\w∈[(\[])", "∪"),
    (r"(?<![a-z]{2})∨(?![a-z]{2})", ","),
    # Brackets around a matrix: (⟦1&2⟧) -> ⟦1&2⟧
    (r"[(\[](⟦[^⟦⟧]*⟧)[)\]]", r"\1"),
    # Capitals of words: Mitosis -> mitosis, but units such as Mohm stay
    (r"\b(?!M[^aeiouy]|Mohm|Pmol)[A-Z](?=[a-z]{2})|\b(?:In|Of|On|To|No)\b", lambda m: m[0].lower()),
    # Molecules: CO_2 -> CO2
    (r"^(?:[A-Z][a-z]?(?:_\{?\d+\}? ?)?){2,}$", lambda m: re.sub("[_{} ]", "", m[0])),
    # Sets: x∈⦃1,2⦄ -> x=1,2 and ⦃1⦄ -> 1
    (r"∈⦃([^⦃⦄]+)⦄$", r"=\1"),
    (r"^⦃([^⦃⦄]+)⦄$", r"\1"),
]
# fmt: on

# Step 3: split the answer into parts


def split_parts(text: str) -> tuple[str, list[str]]:
    """Return the kind of a normalized answer (a list, a pair, an equation, ...) and its parts.

    1,2 and ⦃1,2⦄ -> (",", ["1", "2"])
    (1,2)         -> ("()", ["1", "2"])
    x=1           -> ("=", ["x", "1"])
    5             -> ("", ["5"])
    """
    for separator in ",∪=∈<≤&":
        parts = split_outside_brackets(text, separator)
        if len(parts) > 1:
            return separator, parts

    kind = text[:1] + text[-1:]
    parts = split_outside_brackets(text[1:-1], ",")
    if kind == "⦃⦄":
        return ",", parts
    if kind == "⟦⟧" or len(parts) > 1 and kind in ("()", "[]", "[)", "(]", "⟨⟩"):
        return kind, parts
    return "", [text]


def split_outside_brackets(text: str, separator: str) -> list[str]:
    parts = [""]
    depth = 0
    for sign in text:
        depth += (sign in "([{⦃⟨⟦") - (sign in ")]}⦄⟩⟧")
        if sign == separator and depth == 0:
            parts.append("")
        else:
            parts[-1] += sign
    return parts


# Step 4: compare values. An expression is evaluated at 12 points, so it has 12 values. Over the
# points, a letter takes every value in POINTS once, in a random order that depends on the letter.
# Arithmetic with rational numbers is exact and gives Fractions. Roots, constants and most functions
# give floats or complex numbers. A value is nan if it is undefined or too large.

POINTS = [Fraction(n, 8) for n in (1, 5, 9, 13, 15, 21, 29, 37, 75, 811, -11, -131)]
CONSTANTS = {"π": math.pi, "e": math.e, "i": 1j}
VARIABLE = r"[A-Za-zα-ωΔℓ∞](?:_\{\w+\}|_\w)?'*"  # x, x_1, x_{12}, y'
TOKEN = re.compile(rf"\\[A-Za-z]+|\d+\.?\d*|\.\d+|{VARIABLE}|\S")

# Matches long numbers and tiny powers of ten. An answer that contains one, and is compared as a
# float, could pass for a nearby value: 1.4142135623731 is not √2.
LONG = re.compile(r"\d{10}|\.\d{9}|10\^\{-(?:\d\d|9)")

# Matches texts that can be read in several ways
UNSURE = re.compile(
    r"""(?x)
        (?<![\\A-Za-z_{])                                        # a word, but not ab or mgh
        (?!(?:[abcf-z][a-df-hj-np-tv-z]|[b-df-hj-np-tv-z]{3}|abc|xyz)(?![A-Za-z]))[A-Za-z]{2,}
      | (?<![\\A-Za-z])[fg](?:_\w+)?'*(?:\^(?:\w|\{[^{}]*\}))?[(\[]    # f(x), g^2(x)
      | (?<![\\A-Za-z_])[A-Za-zα-λν-ορ-ωΔℓ](?:_\w+)?'*\(-?[^-+()]*\)   # T(n/4), but not x(x+1)
      | ^\(?[\d.]+(?:-[\d.]+)+(?:$|\))                           # 1914-1918
      | ^(?:[A-Zα-λν-ορ-ω](?:\^\{?-?[\dT]\}?)?[ *-]*){2,}$       # A^{-1}B, where AB is not BA
      | ^[A-Za-z]×[A-Za-z]$                                      # v×u
      | \\frac\{d[^{}]*\}\{d[A-Za-z]|d[a-z]/d[a-z]               # \frac{dy}{dx}"""
)


def factorial(x) -> Fraction:
    """Return x!, exactly. Raises ValueError unless x is a whole number from 0 to 100."""
    if x not in range(101):
        raise ValueError
    return Fraction(math.factorial(int(x)))


def power(x, y):
    """Return x**y. Raises OverflowError if an exact value might have more than 2,000 bits."""
    grows = isinstance(x, Fraction) and abs(x) != 1
    if grows and (x.numerator * x.denominator).bit_length() * abs(y) > 2000:
        raise OverflowError
    return x**y


class Unreadable(Exception):
    """The expression is malformed, or can be read in several ways."""


class Expression:
    """An expression, parsed and evaluated by recursive descent once for each of the 12 points.

    values: its value at each point; empty if the text is unreadable, ambiguous or too long
    letters: its variables, including units
    n_operands: how many numbers and letters it contains
    """

    def __init__(self, text: str):
        tokens = TOKEN.findall(text)
        operands = [token for token in tokens if re.match(r"[\w.∞]", token)]
        self.n_operands = len(operands)
        self.letters = {token for token in operands if re.fullmatch(VARIABLE, token)} - {*CONSTANTS}
        self.values = []
        if self.n_operands > 200 or UNSURE.search(text):
            return
        orders = [random.Random(letter).sample(POINTS, 12) for letter in self.letters]
        try:
            for *point, _ in zip(*orders, POINTS):  # 12 times, even if there are no letters
                self.known = CONSTANTS | dict(zip(self.letters, point))
                self.values.append(self.evaluate(tokens))
        except (Unreadable, RecursionError):
            self.values = []

    def evaluate(self, tokens: list[str]):
        """Return the expression's value at the point in `self.known`.

        The value is nan if it is undefined or too large. Raises Unreadable if the expression is
        found to be malformed or ambiguous.
        """
        self.tokens = [*tokens, "end"]
        try:
            value = self.read(1)
            abs(value)  # raises OverflowError if a complex value is too large
        except (ArithmeticError, ValueError):  # undefined or too large at this point
            return math.nan
        if self.tokens != ["end"]:
            raise Unreadable
        return value

    def take(self, tokens: str) -> bool:
        """If the next token is one of `tokens`, remove it. Return whether it was removed."""
        if self.tokens[0] not in tokens:
            return False
        self.tokens.pop(0)
        return True

    def read(self, weakest: int):
        """Read tokens until an operator is weaker than `weakest` or the expression ends.

        Return the value of these tokens.
        """
        # Read a leading sign as an operator after 0: -x is 0-x.
        is_signed = weakest == 1 and self.tokens[0] in "+-"
        value = Fraction(0) if is_signed else self.read_operand()
        if self.take("!"):
            value = factorial(value)
        last_sign = ""
        while True:
            sign = self.tokens[0]
            # A letter, "(" or command that follows directly multiplies: 2x, 2(x), 2\sqrt{x}.
            # OPERATORS lists "(" and "\", too. Any other token ends the expression.
            side_by_side = (3, operator.mul) if sign in self.known else (0, None)
            strength, function = OPERATORS.get(sign[0], side_by_side)
            if strength < weakest:
                return value
            if last_sign == "/" and strength > 1 or last_sign == sign == "^":
                raise Unreadable("1/2x and 2^3^2 have two readings")
            self.take("+-*×/^")  # a letter, "(" or command stays: it begins the next operand
            value = function(value, self.read(4 if sign == "/" else strength + 1))
            last_sign = sign

    def read_operand(self):
        """Read an operand and return its value.

        An operand is a number, a letter, a bracketed expression, or a function with its arguments,
        perhaps followed by a degree sign.
        """
        token = self.tokens.pop(0)
        if token in CLOSING:
            value = self.read(1)
            if not self.take(CLOSING[token]):
                raise Unreadable("a bracket is missing")
        elif token in (r"\frac", r"\root"):
            value = FUNCTIONS[token](self.read_operand(), self.read_operand())
        elif token in FUNCTIONS:  # \sin^2 2x is (\sin(2x))^2
            exponent = self.read_operand() if self.take("^") else 1
            argument = self.read_operand() if self.tokens[0] in CLOSING else self.read(3)
            value = power(FUNCTIONS[token](argument), exponent)
        elif token[0] in ".0123456789":
            value = Fraction(token)
        elif token in self.known:
            value = self.known[token]
        else:
            raise Unreadable
        return value * math.pi / 180 if self.take("°") else value


# fmt: off
FUNCTIONS = {
    r"\sin": cmath.sin, r"\csc": lambda x: 1 / cmath.sin(x), r"\arcsin": cmath.asin,
    r"\cos": cmath.cos, r"\sec": lambda x: 1 / cmath.cos(x), r"\arccos": cmath.acos,
    r"\tan": cmath.tan, r"\cot": lambda x: 1 / cmath.tan(x), r"\arctan": cmath.atan,
    r"\exp": cmath.exp, r"\ln": cmath.log, r"\log": cmath.log10, r"\abs": abs,
    r"\frac": operator.truediv, r"\root": lambda n, x: power(x, 1 / n),
}
# fmt: on

# Operator -> (how strongly it binds, its function). A parenthesis or a command directly after an
# operand multiplies that operand: 2(x+1), 2\sin x.
OPERATORS = {
    "+": (1, operator.add),
    "-": (1, operator.sub),
    "/": (2, operator.truediv),
    "^": (4, power),
    **dict.fromkeys("*×(\\", (2, operator.mul)),
}
CLOSING = {"(": ")", "{": "}", "[": "]"}

# Unit -> the unit as an expression whose variables are base units: UNITS["km"] is (1000*(u_{m}))
UNITS = {}
for pair in (
    "m g s mol K A V celsius degree rad month year lb ounce gallon quart pint cup unit dollar "
    "person child man woman student boy girl team player game match point side vertex edge way "
    "time outcome solution integer number value digit factor divisor handshake marble card "
    "ball book page question problem letter word triangle ticket coin cookie apple house car old=1 "
    "arrangement combination permutation sequence subset set piece item seat tree egg vote row "
    "step turn term root zero region line diagonal function ton "
    "people=person children=child men=man women=woman vertices=vertex radian=rad cent=0.01*dollar "
    "%=0.01 °=degree deg=degree km=1000*m cm=0.01*m mm=0.001*m kg=1000*g mg=0.001*g L=0.001*m^3 "
    "mL=0.001*L liter=L milliliter=mL N=kg*m/s^2 Pa=N/m^2 MPa=10^6*Pa J=N*m kJ=1000*J W=J/s "
    "meter=m kilometer=km centimeter=cm millimeter=mm gram=g kilogram=kg second=s sec=s min=60*s "
    "minute=min h=60*min hr=h hour=h day=24*h week=7*day yr=year in=0.0254*m inch=in ft=12*in "
    "foot=ft feet=ft yard=3*ft yd=yard mi=1760*yard mile=mi mph=mi/h kph=km/h pound=lb oz=ounce "
    "acre=4840*yd^2 eV keV=1000*eV MeV=10^6*eV GeV=10^9*eV cal kcal=1000*cal kW=1000*W MW=10^6*W "
    "mW=0.001*W Hz=1/s kHz=1000*Hz MHz=10^6*Hz GHz=10^9*Hz kPa=1000*Pa atm=101325*Pa bar=10^5*Pa "
    "mV=0.001*V kV=1000*V mA=0.001*A Ω ohm=Ω kΩ=1000*Ω nm=10^{-9}*m μm=10^{-6}*m ms=0.001*s "
    "μs=10^{-6}*s ns=10^{-9}*s kmol=1000*mol mmol=0.001*mol dB rpm "
    "M=mol/L mM=0.001*M μM=10^{-6}*M newton=N pascal=Pa kilopascal=kPa joule=J kilojoule=kJ watt=W "
    "volt=V ampere=A amp=A kelvin=K hertz=Hz mole=mol USD=dollar litre=L ml=mL metre=m "
    "kilometre=km centimetre=cm millimetre=mm"
).split():
    unit, _, meaning = pair.partition("=")
    in_base_units = re.sub("[^-0-9.*/^{}()]+", lambda m: UNITS[m[0]], meaning)
    UNITS[unit] = f"({in_base_units or 'u_{' + unit + '}'})"

# UNIT matches a unit, singular or plural. QUANTITY matches a number with units, such as 5 cm and
# 9.8 m/s^2, but not 5m, 5x m or \sin 5 m, whose m may be a variable, and not 2π° or 5%%.
UNIT = "(" + "|".join(sorted(UNITS, key=len, reverse=True)) + r")(?:(?<=\w\w)e?s)?(?![A-Za-z])"
QUANTITY = re.compile(
    r"(?!.*π.*°|.*[%°].)((?:[^\\a-z]|\\frac|\\root)*[\d)}π])(?: |(?![A-Za-z](?:$|[^A-Za-z])))"
    rf"((?:{UNIT}(?: ?\^ ?\{{?-?\d\}}?|\d\b)?[ */()]*)+)"
)
# Matches a number and a word that may be a unit outside UNITS: 5 furlongs
OTHER_UNIT = re.compile(r"(.*\d[)}]?) ?([A-Za-z]{2}\S*)")


def split_unit(text: str) -> tuple[str, str]:
    """Return a quantity in two forms: without its unit, and as an expression in base units.

    "5 km" -> ("5", "(5)*(1000*(u_{m}))");  "5" -> ("5", "5")
    20% without its unit is 20, not 0.2, because the question may ask for a percentage. This
    applies only to plain numbers that are at least 1 in absolute value: 0.5% is 0.005 in both
    forms, so that it never equals 0.5.
    """
    match = QUANTITY.fullmatch(text)
    if not match:
        return text, text
    number, units, _ = match.groups()
    units = re.sub("/(.*)", r"/(\1)", units)  # J/mol K is J/(mol K)
    in_base_units = f"({number})*" + re.sub(UNIT, lambda m: UNITS[m[1]], units)
    is_share = "%" in units and not re.fullmatch(r"-?[1-9][\d.]*", number)
    return in_base_units if is_share else number, in_base_units


def same_value(answer: str, gold: str, tolerance: float) -> bool:
    """Whether an answer counts as equal to the gold answer.

    Their values have to agree at all points where they can be compared, and there have to be at
    least three such points.

    tolerance: The relative error that is allowed if the gold answer has no variables except units.
    """
    mine, theirs = Expression(answer), Expression(gold)
    if mine.letters != theirs.letters:
        return False
    # If the gold answer is a number, reject an answer with at least three more operands: it is not
    # worked out yet, and often copied from the question.
    if not theirs.letters and mine.n_operands > theirs.n_operands + 2:
        return False
    pairs = [*zip(mine.values, theirs.values)]
    is_exact = all(isinstance(value, Fraction) for pair in pairs for value in pair)
    if not is_exact and LONG.search(f"{answer} {gold}"):
        return False

    # x^{2/3} and \sqrt[3]{x^2} count as equal, although only one of them is real at a negative x.
    # So compare only the points at which both are real, if there are enough. With \ln, compare all
    # points: \ln x and \ln |x| do not count as equal, but differ only where \ln x is not real.
    real_pairs = [pair for pair in pairs if all(map(is_real, pair))]
    if len(real_pairs) > 2 and r"\ln" not in answer + gold:
        pairs = real_pairs

    is_formula = any(not letter.startswith("u_") for letter in theirs.letters)
    rounding = 0 if is_exact else 1e-12
    error = Fraction(rounding if is_formula else tolerance or rounding)
    agree = [
        abs(x - y) <= error * abs(y)
        for x, y in pairs
        if is_exact or abs(x) < 1e99 and 1e-9 < abs(y) < 1e9  # false if x or y is nan
    ]
    return len(agree) > 2 and all(agree)


def is_real(value) -> bool:
    return not isinstance(value, complex) or abs(value.imag) <= 1e-12 * abs(value.real)


def same_quantity(answer: str, gold: str, tolerance: float) -> bool:
    """Whether two numbers or formulas are equal. One of the two may lack its unit."""
    # If both have the same unit, and it cannot be read as an expression, compare the numbers.
    mine, theirs = OTHER_UNIT.fullmatch(answer), OTHER_UNIT.fullmatch(gold)
    if mine and theirs and mine[2] == theirs[2] and not Expression(mine[2]).values:
        return same_value(mine[1], theirs[1], tolerance)

    number, whole = split_unit(answer)
    gold_number, gold_whole = split_unit(gold)
    pairs = {(whole, gold_whole)}
    # Also compare the numbers without units if one of the two has no unit that can be removed.
    if number == whole or gold_number == gold_whole:
        pairs.add((number, gold_number))
    if "°" not in answer + gold:  # letters may be variables, not units, as g in \frac{1}{2} g
        pairs.add((answer, gold))
    return any(same_value(*pair, tolerance) for pair in pairs)


def same_equation(sides: list[str], gold_sides: list[str]) -> bool:
    """Whether two equations differ at most by terms moved to the other side: 2x+4y=3, 2x+4y-3=0.

    Returns False if the gold equation is solved for a letter (y=2x+3), because then the answer must
    be solved for that letter, too.
    """
    if any(re.fullmatch(LETTER, side) for side in gold_sides):
        return False
    difference, gold_difference = (f"{left}-({right})" for left, right in (sides, gold_sides))
    swapped = f"-({difference})"
    return any(same_value(each, gold_difference, 0.0) for each in (difference, swapped))


def same_parts(answer: str, gold: str, tolerance: float = 0.0) -> bool:
    """Whether two normalized answers have the same kind and the same parts.

    The parts of lists, sets, unions and equations may be in any order. The tolerance applies only
    to single values.
    """
    if answer == gold:
        return answer != ""
    kind, parts = split_parts(answer)
    gold_kind, gold_parts = split_parts(gold)
    if kind == "=" and gold_kind == "":  # in \frac{3}{4}=0.75, both sides must equal the gold value
        return all(same_parts(part, gold, tolerance) for part in parts)
    if kind != gold_kind or len(parts) != len(gold_parts) or len(parts) > 50:
        return False

    if kind == "":
        return same_quantity(answer, gold, tolerance)
    if kind not in ",∪=":
        return all(map(same_parts, parts, gold_parts))
    if kind == "=" and len(parts) == 2 and same_equation(parts, gold_parts):
        return True
    for part in parts:
        equals = [other for other in gold_parts if same_parts(part, other)]
        if not equals:
            return False
        gold_parts.remove(equals[0])
    return True


def same_math(answer: str, gold: str, tolerance: float = 0.0) -> bool:
    r"""Whether two answers in LaTeX or plain text mean the same: "x = \frac12" and "0.5".

    A name ("x =") or a unit may be missing on one side. If the gold answer is a single number, and
    has a decimal point, the answer may differ by the relative tolerance.
    """
    if max(len(answer), len(gold)) > LONGEST:
        return answer.strip() == gold.strip() != ""
    texts = [normalize(answer), normalize(gold)]

    # If the gold answer does not name an unknown, remove two things from the answer: the name of a
    # sum (m+n=5 -> 5), and subscripts that number solutions (x_1=1,x_2=-3 -> x=1,x=-3).
    if "=" not in texts[1]:
        texts[0] = re.sub(r"^[a-z](?:[+-][a-z])+=", "", texts[0])
        texts[0] = re.sub(r"(^|,)([a-z])_\w ?=", r"\1\2=", texts[0])
    # Remove the name of an unknown from both answers (x=1,x=-3 -> 1,-3), unless they name different
    # unknowns or the gold answer names a further one (x=1,y=2).
    names = {match[0] for match in map(NAMED.match, texts) if match}
    bare = [text.replace(*names, "") for text in texts] if len(names) == 1 else texts
    if "=" not in bare[1]:
        texts = bare
    return same_parts(*texts, tolerance if "." in texts[1] else 0.0)


def same_short(answer: str, gold: str) -> bool:
    """Whether a short free-form answer matches the gold answer (RLPR).

    Words may differ in articles, in punctuation and in the case of the first letter: "An Increase."
    matches "increase". A number may differ by 1 % if the gold answer has a decimal point, because a
    decimal number has probably been measured or rounded.
    """
    is_words = re.fullmatch(r"[^\W\d_]{2}(?:[^\W\d_]|[-\s,.;:'\"“”])*", gold)
    if is_words:
        # Remove "a" only at the start. Inside an answer, it may be a name: "vitamins a and c".
        mark = r"(?i)^\s*an?\s(?=\s*\w)|\bthe\s|\ban\s|[.,;:'\"“”*]"
        answer, gold = [
            re.sub(r"(?<=\w)-(?=\w)", " ", re.sub(mark, "", text)) for text in (answer, gold)
        ]
    return same_math(answer, gold, 0.01)


def repeats_formula(answer: str, question: str, gold: str) -> bool:
    r"""Whether an answer repeats a formula of the question, as \sqrt{192} does for
    "Simplify $\sqrt{192}$".

    A Conductor can learn to tell a worker to repeat the formula, so repeating must not be rewarded
    unless the gold answer is the same formula. Only operands and commands are compared. \frac, 0
    and 1 are ignored, because adding them can disguise a copy: x+0, 1x.
    """
    operand = (
        r"\\(?!frac)[A-Za-z]+|(?![01](?:\.0*)?(?![\d.]))\d[\d.]*!?|(?<![A-Za-z])[^\W\d_](?![a-z])"
    )
    texts = [normalize(re.sub(r"^\s*\w\s*=", "", text)) for text in (answer, question, gold)]
    mine, asked, wanted = [" ".join(["", *re.findall(operand, text), ""]) for text in texts]
    # Only an answer with an operator counts as a formula, and only if it has at least two operands,
    # a command or a factorial.
    is_formula = mine.count(" ") > 2 or re.search(r"[\\!]", mine)
    has_operator = re.search(r"[-+*/^\\!]", answer)
    return bool(is_formula and has_operator) and mine in asked and mine != wanted


# Letters of multiple-choice questions

LETTERS = "ABCDEFGHIJ"
# Matches a letter, perhaps with its option's text after it: "So the answer is (B)", "**B**",
# "B is correct", "B, not A", "B. its text", "B (its text)"
LETTER_FIRST = re.compile(
    r"""(?xi)
        \{?(?:(?:the|correct|final|best|answer|option|choice|is|so|thus|hence|therefore|it|must|be|i
            |choose|pick)\b[\s:,]*)*
        [(\[{"'“`*_]*(?P<letter>[A-J])(?![^\W_])[)\]}"'”`*_]*(?:[\s):,.;!]|[-–—](?=\s))*
        (?:is[ ](?:the[ ])?(?:correct|right|best|answer)(?:[ ]\w+)?$)?
        (?:(?:not|rather[ ]than|instead[ ]of)(?:[\s,()]|(?:[A-J]|or|nor|and)\b)+$)?
        (?P<text>.*)"""
)
# Matches the text of an option followed by its letter: "photosynthesis (B)"
LETTER_LAST = re.compile(
    r"(?i)(?P<text>.*?)[\s,:-]*\((?:option |choice )?(?P<letter>[A-J])\)[\s.]*"
)


def letter_of(text: str, choices: list[str]) -> str | None:
    """Return the letter of the choice that a text names; None if it names no choice or several.

    The text may be the letter, "B" or "So it is (B)"; the letter with its choice, "B. the nucleus";
    or the text of exactly one choice, "the nucleus". Each of `choices` must be a result of
    `bare_choice`.
    """
    text = re.sub(r"\*\*|\$|\\(?:text|math)(?:bf|rm|it)?(?![a-z])", "", text[:LONGEST]).strip(" .")
    whole = bare_choice(text)
    own_text = dict(zip(LETTERS, choices))
    named = {letter for letter, choice in own_text.items() if choice == whole not in LETTERS}
    for match in filter(None, [LETTER_FIRST.fullmatch(text), LETTER_LAST.fullmatch(text)]):
        letter = match["letter"].upper()
        if letter in own_text and bare_choice(match["text"]) in ("", own_text[letter]):
            named.add(letter)
    return named.pop() if len(named) == 1 else None


def bare_choice(text: str) -> str:
    """Return a choice's text, normalized, without surrounding brackets, quotes and full stops."""
    return normalize(text.replace("**", "").strip("() \"'“”")).strip("(){}.")


def pick_letter(response: str, choices: list[str]) -> str | None:
    r"""Return the letter that a response commits to; None if it commits to no letter or several.

    The letter is read from the last \boxed{} or <answer>, else from all claims, else from the last
    sentences.
    """
    choices = [bare_choice(choice) for choice in choices]
    in_box, texts = commitments(response)
    picked = set()

    # If a text contains a lone capital from A to J, but does not name a choice, the response is
    # ambiguous. So add None to the picked letters. "The answer is not A" commits to nothing.
    end = END if in_box is None else REASON
    for text in texts[-99:]:
        letter = letter_of(text, choices) or letter_of(end.split(text)[0], choices)
        if letter or re.search(r"(?s)^(?!not\b).*\b[A-J]\b", text):
            picked.add(letter)

    # If there is no box, and the claims neither name a letter nor are ambiguous, read the sentences
    # at the end, but skip questions. The full stop after a lone letter, as in "B. the nucleus",
    # does not end a sentence.
    if in_box is None and not picked:
        for text in re.split(r"(?<!\b[A-J])[.!]\s|\n|[^.!?\n]*\?", response[-LONGEST:]):
            letter = letter_of(text, choices)
            if letter or re.match(r"\W*[A-J][).:]", text):
                picked.add(letter)
    return picked.pop() if len(picked) == 1 else None


# Graders, and functions that make them


def same_response(problem: Problem, one: str, other: str) -> bool:
    return one.strip() == other.strip() != ""


class Grader(NamedTuple):
    instruction: str  # appended to a question that does not specify an answer format
    extra: tuple  # the keys of Problem.extra that it reads
    check: Callable  # check(problem, response) -> "" if right, else what is wrong, shown in traces
    # agree(problem, one, other) -> whether two responses give the same answer; used in votes
    agree: Callable = same_response
    # True: check_problem refuses a problem whose gold answer the grader rejects. Keep False for
    # functions that may call a model, and for programs, which have no gold answer.
    must_accept_gold: bool = False


def text_grader(instruction: str, read: Callable, same: Callable, extra: tuple = ()) -> Grader:
    """Return a grader that reads an answer from the response and compares it with the gold answer.

    It also rejects an answer that repeats a formula of the question (see repeats_formula), unless
    the gold answer is that formula.

    Args:
        read: read(response, *values of extra) -> the answer; "" or None if there is none
        same: same(answer, gold) -> whether the answer is right
        extra: the keys of Problem.extra whose values `read` needs
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

    return Grader(instruction, extra, check, agree, must_accept_gold=True)


def own_grader(is_right: Callable) -> Grader:
    """Return a grader that calls a function is_right(problem, response) -> bool.

    In votes, two responses agree if they are the same text, which must not be blank.
    """

    def check(problem, response):
        try:
            verdict = is_right(problem, response)
            if not isinstance(verdict, bool | np.bool_):  # "wrong" and 0.5 would count as True
                raise TypeError(f"it returned {verdict!r:.40}, expected True or False")
        except Exception as e:
            raise ValueError(f"the grader failed on {problem.id}: {type(e).__name__}: {e}") from e
        return "" if verdict else f"answered {response[-200:]}"

    return Grader("", (), check)


def bare_text(response: str) -> str:
    r"""Return the content of the last \boxed{} or <answer>, else the whole response.

    It is returned in lower case, with single spaces, and without punctuation at its ends. A text
    that is all punctuation stays as it is.
    """
    found = boxed(response)
    text = " ".join((response if found is None else found).casefold().split())
    return text.strip(" .,;:!?'\"`*_$()“”‘’") or text


def check_program(problem: Problem, response: str) -> str:
    return find_wrong_test(extract_code(response), tests_of(problem), problem.extra["function"])


def check_solution(problem: Problem, response: str) -> str:
    test, code_prompt = problem.extra["test"], problem.extra["code_prompt"]
    return find_failed_unittest(extract_code(response), test, code_prompt)


def failure(problem: Problem, response: str) -> str:
    """Return "" if a response is right, else what is wrong with it. Traces show this text."""
    return GRADERS[problem.grader].check(problem, response)


def grade(problem: Problem, response: str) -> bool:
    return failure(problem, response) == ""


def grade_once() -> Callable:
    """Return a version of `failure` that judges equal responses to a problem only once.

    This saves time, because several rollouts of a problem often give the same response.
    """
    verdicts = {}

    def judge(problem, response):
        key = problem.id, problem.answer, response
        verdict = verdicts.setdefault(key, once(lambda: failure(problem, response)))
        return verdict()

    return judge


BLOCK = "Put all of it, imports included, in one ```python block."
GRADERS = {
    "exact": text_grader(
        "Put the final answer, and nothing else, in <answer> tags.",
        bare_text,
        lambda answer, gold: answer == bare_text(gold),
    ),
    # For the laptop world, whose workers reply with nothing but the answer
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
    ),
    "unittest": Grader(
        f"Complete the code above. {BLOCK}",
        extra=("test", "code_prompt"),
        check=check_solution,
    ),
}


# ---- Benchmarks ----------------------------------------------------------------------------------
#
# The functions below whose names end in _problem turn row n of a data set into a problem. Each
# docstring shows an example of a row, shortened.


def math_problem(row: dict, n: int) -> Problem:
    """MATH-500: {"problem": "What is $2+2$?", "answer": "4", "level": 1}. AIME has no level."""
    return Problem(f"{n}", row["problem"], str(row["answer"]), "math", level=row.get("level", 0))


def rlpr_problem(row: dict, n: int) -> Problem:
    """RLPR: {"prompt": [{"role": "system", …}, {"role": "user", "content": "The unit of force?"}],
    "reward_model": {"ground_truth": "newton"}, "extra_info": {"reasoning_score": 3}}
    """
    question = row["prompt"][1]["content"]
    answer = row["reward_model"]["ground_truth"]
    level = row["extra_info"]["reasoning_score"] or 0
    return Problem(f"{n}", question, answer, "short", level=level)


def choice_problem(row: dict, n: int) -> Problem:
    """MMLU: {"question": "A fruit?", "choices": ["stone", "apple", "tin", "tar"], "answer": 1}"""
    extra = {"choices": row["choices"]}
    return Problem(f"{n}", row["question"], LETTERS[row["answer"]], "letter", extra=extra)


def gpqa_problem(row: dict, n: int) -> Problem:
    """GPQA: {"Question": "A fruit?", "Correct Answer": "apple", "Incorrect Answer 1": "stone", …}

    The order of the four choices depends only on n.
    """
    names = ["Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3"]
    names = random.Random(n).sample(names, 4)
    choices = [row[name].strip() for name in names]
    answer = names.index("Correct Answer")
    return choice_problem({"question": row["Question"], "choices": choices, "answer": answer}, n)


def livecodebench_problem(row: dict, n: int) -> Problem:
    """LiveCodeBench: {"question_id": "abc301_a", "question_content": "Print the sum.",
    "starter_code": "", "difficulty": "easy", "metadata": "{}", "public_test_cases": "[…]",
    "private_test_cases": "…"}

    Tests can take hundreds of MB, so the problem holds only their position in the file.
    """
    question = row["question_content"]
    if row["starter_code"]:
        question += f"\n\n```python\n{row['starter_code'].strip()}\n```"
    level = ["easy", "medium", "hard"].index(row["difficulty"]) + 1
    extra = {"function": json.loads(row["metadata"]).get("func_name"), "tests": row["place"]}
    return Problem(row["question_id"], question, "", "code", level=level, extra=extra)


def bigcodebench_problem(row: dict, n: int) -> Problem:
    """BigCodeBench: {"task_id": "BigCodeBench/13", "complete_prompt": "def task_func(path): …",
    "code_prompt": "def task_func(path):", "test": "class TestCases …", "entry_point": "task_func"}
    """
    question = f"```python\n{row['complete_prompt'].strip()}\n```"
    extra = {column: row[column] for column in GRADERS["unittest"].extra}
    return Problem(row["task_id"], question, "", "unittest", extra=extra)


# Reading the rows

VIEWER = "https://datasets-server.huggingface.co"  # the API of the hub's dataset viewer


class Source(NamedTuple):
    """A data set on the Hugging Face hub."""

    repository: str
    rows: str  # a JSONL or CSV file, or CONFIG/SPLIT of the hub's dataset viewer
    count: int  # the number of rows
    licence: str
    problem: Callable  # problem(row, n) -> Problem
    is_sampled: bool = False  # for a large set: read its pages in random order, only as needed


def benchmark(name: str, split: str, limit: int | None) -> list[Problem]:
    """Return a benchmark's problems in a random but fixed order.

    If the source is sampled, only its pages are in random order, and only the first `limit`
    problems are returned. Rows that are needed and not in DATA yet are downloaded.

    If one data set serves both splits, a hash of the question divides it: about one fifth is for
    testing, three fifths are for training, and one is unused.
    """
    source = SOURCES[f"{name}/{split}"]
    serves_both_splits = [*SOURCES.values()].count(source) == 2
    fifths = [0] if split == "test" else [2, 3, 4]
    rows = rows_of_file if source.rows.endswith((".jsonl", ".csv")) else rows_of_viewer
    problems = []
    try:
        for n, row in rows(source):
            problem = with_instructions(source.problem(row, n))
            if not serves_both_splits or zlib.crc32(problem.question.encode()) % 5 in fifths:
                problems.append(replace(problem, id=f"{name}/{problem.id}", kind=name))
            if source.is_sampled and len(problems) == limit:
                break
    except (OSError, LookupError, TypeError, ValueError, AttributeError) as e:
        page = f"https://huggingface.co/datasets/{source.repository}"
        raise OSError(
            f"{name}: not all {source.count:,} rows of {page} are there: {type(e).__name__}: {e}\n"
            "Try again to go on where it stopped. If that page asks to accept terms, do that and "
            f"set HF_TOKEN. If a file in {DATA}/{source.repository} is damaged, remove it."
        ) from e
    if not source.is_sampled:
        random.Random(0).shuffle(problems)
    return problems


def hub_file(repository: str, file: str) -> str:
    """Return the local path of a data set's file, after downloading it if it is missing.

    To download a gated data set, set HF_TOKEN in the environment.
    """
    folder = f"{DATA}/{repository}"
    endpoint = os.environ.get("HF_ENDPOINT") or None
    if not os.path.exists(f"{folder}/{file}"):
        hf_hub_download(repository, file, repo_type="dataset", local_dir=folder, endpoint=endpoint)
    return f"{folder}/{file}"


def rows_of_file(source: Source):
    """Yield (number, row) for the rows of a CSV or JSONL file.

    A JSONL row also gets a "place": its file, and the byte at which the row begins, so that
    `stored_tests` can read the row again later.
    """
    path = hub_file(source.repository, source.rows)
    if path.endswith(".csv"):
        with open(path, newline="", encoding="utf-8") as file:
            yield from enumerate(csv.DictReader(file))
        return
    with open(path, "rb") as file:
        for n, line in enumerate(file):
            place = {"file": source.rows, "at": file.tell() - len(line)}
            yield n, json.loads(line) | {"place": place}


def rows_of_viewer(source: Source):
    """Yield (number, row) for the rows of a data set, from the hub's dataset viewer.

    Each page of rows is fetched when it is first needed, and then kept in a file.
    """
    starts = list(range(0, source.count, 100))  # The viewer returns at most 100 rows at a time.
    if source.is_sampled:
        random.Random(0).shuffle(starts)
    folder = f"{DATA}/{source.repository}/{source.rows}"
    os.makedirs(folder, exist_ok=True)
    hub = requests.Session()
    # The waits between tries (0, 4, 8, …, 120 and 120 s) outlast a rate limit of five minutes.
    retry = Retry(8, connect=2, backoff_factor=2, status_forcelist=(429, 500, 502, 503, 504))
    hub.mount(VIEWER, HTTPAdapter(max_retries=retry))
    for start in progress(source.repository, starts):
        file = f"{folder}/{start}.json"
        if not os.path.exists(file):
            write_json(file, {"rows": fetch_page(hub, source, start)})
        yield from enumerate(read_json(file)["rows"], start)


def fetch_page(hub: requests.Session, source: Source, start: int) -> list[dict]:
    """Return the 100 rows from row number `start` on, or fewer at the end of the split.

    GET /rows (huggingface.co/docs/dataset-viewer/rows) returns
    {"rows": [{"row_idx": 0, "row": {…}, "truncated_cells": []}, …], …}.
    """
    config, split = source.rows.split("/")
    length = min(100, source.count - start)
    query = {
        "dataset": source.repository,
        "config": config,
        "split": split,
        "offset": start,
        "length": length,
    }
    response = hub.get(f"{VIEWER}/rows", params=query, timeout=60)
    response.raise_for_status()
    rows = response.json()["rows"]
    whole = [row["row_idx"] for row in rows if not row["truncated_cells"]]
    require(whole == [*range(start, start + length)], f"{response.url}: rows are missing")
    return [row["row"] for row in rows]


# The tests of programs


def tests_of(problem: Problem) -> list[list[str]]:
    """Return the tests of a programming problem as [input, output] pairs.

    If the problem holds only their place in a file of the benchmark, they are read from there.
    """
    tests = problem.extra["tests"]
    return stored_tests(problem.id, **tests) if isinstance(tests, dict) else tests


@lru_cache(2)
def stored_tests(id: str, file: str, at: int) -> list[list[str]]:
    """Return the public and hidden tests of the LiveCodeBench problem at byte `at` of a file.

    Each test is an [input, output] pair. If the solution is a function, the input holds one line of
    JSON for each argument. Hidden tests are JSON, or JSON that was pickled, compressed with zlib
    and encoded in base64 (lcb_runner/benchmarks/code_generation.py of LiveCodeBench). Loading a
    pickle could run code, so the JSON is cut out of the pickle's bytes instead.
    """
    path = hub_file(SOURCES["livecodebench/test"].repository, file)
    try:
        with open(path, "rb") as rows:
            rows.seek(at)
            row = json.loads(rows.readline())
        require(id == f"livecodebench/{row['question_id']}", "another problem's row")
        hidden = row["private_test_cases"].encode()
        if not hidden.startswith(b"["):  # not plain JSON
            packed = base64.b64decode(hidden)
            pickled = zlib.decompressobj().decompress(packed, 1 << 29)  # 512 MiB at most
            hidden = pickled[pickled.index(b"[{") : pickled.rindex(b"}]") + 2]
        tests = json.loads(row["public_test_cases"]) + json.loads(hidden)
        return [[test["input"], test["output"]] for test in tests]
    except (LookupError, TypeError, ValueError, RecursionError, zlib.error) as e:
        remedy = "remove the file, and it is fetched again"
        raise ValueError(f"{path}, byte {at}: no tests of {id}; {remedy}") from e


# The table of benchmarks, NAME/SPLIT -> Source. Comments that begin with "The paper:" say how many
# or which problems the paper used (App. A.2).
# fmt: off
MATH500 = Source("HuggingFaceH4/MATH-500", "test.jsonl", 500, "MIT", math_problem)
RLPR = Source(
    "openbmb/RLPR-Train-Dataset", "default/train", 77687, "CC BY-NC 4.0", rlpr_problem, True)
SOURCES = {
    "math500/train": MATH500,  # The paper: 300
    "math500/test": MATH500,  # The paper: 100
    "rlpr/train": RLPR,  # The paper: 46,620 of 77,700
    "rlpr/test": RLPR,  # The paper: 15,540
    "mmlu/train": Source("cais/mmlu", "all/auxiliary_train", 99842, "MIT", choice_problem, True),
    "mmlu/test": Source("cais/mmlu", "all/test", 14042, "MIT", choice_problem),  # The paper: all
    # Training uses release V1, up to March 2024; testing uses the problems that release V6 added.
    # The paper: V1 and V6
    "livecodebench/train": Source(
        "livecodebench/code_generation_lite", "test.jsonl", 400, "CC", livecodebench_problem),
    "livecodebench/test": Source(
        "livecodebench/code_generation_lite", "test6.jsonl", 175, "CC", livecodebench_problem),
    # The paper: all
    "aime25/test": Source("yentinglin/aime_2025", "default/train", 30, "not said", math_problem),
    # The paper: all
    "bigcodebench/test": Source(
        "bigcode/bigcodebench-hard", "default/v0.1.4", 148, "Apache 2.0", bigcodebench_problem),
    # The paper: all
    "gpqa/test": Source(
        "Idavidrein/gpqa", "gpqa_diamond.csv", 198, "CC BY 4.0; gated: accept its terms",
        gpqa_problem),
}
# fmt: on

# Training problems like those of the paper's run

MIXES = {
    # The paper: 960 problems, chosen by "difficulty and diversity" (App. A.2)
    "paper": {"math500": 240, "mmlu": 240, "rlpr": 240, "livecodebench": 240},
    # The paper: 350 of these 960 problems, on which the Conductor learns to revise (App. A.1)
    "recursion": {"livecodebench": 175, "rlpr": 175},
}
# The names that --benchmarks accepts, besides files
BENCHMARKS = ["laptop", *MIXES, *dict.fromkeys(key.split("/")[0] for key in SOURCES)]
CANDIDATES = 600  # `prepare` chooses from at most this many problems of each benchmark


def prepare(settings: "Settings"):
    """Write training problems like the paper's to DATA/paper.jsonl and DATA/recursion.jsonl.

    From each benchmark, the hardest candidates are taken if levels are known, else the first ones.
    With a pool, only candidates that can teach (see `can_teach`) are taken, so there may be fewer
    problems than the paper had.
    """
    # Choose the problems from each benchmark.
    pool = []
    if settings.pool:
        check_sandbox()
        pool = load_pool(settings.pool, replay=settings.replay, budget=settings.budget)
        n_calls = 2 * CANDIDATES * len(MIXES["paper"]) * len(pool)
        demand_budget(pool, settings.budget, n_calls, "asking every worker every candidate twice")
    chosen = {}
    for name, wanted in MIXES["paper"].items():
        source = SOURCES[f"{name}/train"]
        print(f"{name}: {source.repository}, licence: {source.licence}")
        problems = load(name, "train", CANDIDATES)
        candidates = [p for p in problems if p.grader == "code" or p.answer]
        if pool:
            candidates = those_that_teach(name, candidates, pool)
        hardest_first = sorted(candidates, key=lambda problem: -problem.level)
        chosen[name] = hardest_first[:wanted]
        print(f"{name}: {len(chosen[name])} problems taken of {len(candidates)}, {wanted} wanted")

    # Write the mixes.
    rng = random.Random(0)
    for mix, parts in MIXES.items():
        problems = []
        for name, wanted in parts.items():
            problems += rng.sample(chosen[name], min(wanted, len(chosen[name])))
        with open(f"{DATA}/{mix}.jsonl", "w") as file:
            for problem in interleave(problems):
                file.write(json.dumps(asdict(problem)) + "\n")
        print(f"{file.name}: {len(problems)} problems")


def those_that_teach(name: str, problems: list[Problem], pool: list) -> list[Problem]:
    """Return those problems that can teach, after asking every worker each problem twice.

    Prints the workers' results on all the problems, and their headroom (see `headroom`).
    """
    played = {}
    pools = [pool] * len(problems)
    for repeat in range(2):
        answered = ask_each(problems, pools, f"prepare {name}/{repeat}", range(len(pool)))
        for worker, rollouts in zip(pool, zip(*answered)):
            played.setdefault(f"workers {worker.name}", []).extend(rollouts)
    stop_if_lost([*itertools.chain(*played.values())], pool)

    rows = {label: measure(rollouts) for label, rollouts in played.items()}
    compare_with_workers(rows, played, 2)
    teaches = can_teach(right_answers(played, 2))
    rows["share of problems that can teach"] = {"accuracy": float(teaches.mean())}
    print_with_legend(table(rows, f"{name}, {len(problems)} candidates, in %"))
    return list(itertools.compress(problems, teaches))


def can_teach(right: np.ndarray) -> np.ndarray:
    """Return a bool for each problem: True if one worker is always right and another always wrong.

    On any other problem, any differences between workers may be luck, so the problem teaches little
    about which worker to choose.

    Args:
        right: The result of `right_answers`.
    """
    is_always_right = (right == 1).all(1)  # (workers, problems)
    is_always_wrong = (right == 0).all(1)
    return is_always_right.any(0) & is_always_wrong.any(0)


# ---- Running code --------------------------------------------------------------------------------
#
# `run_code` runs a program on tests. The functions that judge programs come last: a solution to a
# LiveCodeBench problem is judged by what it prints or returns, and a solution to a BigCodeBench
# problem by unit tests.

SANDBOX = "bwrap"


def use_sandbox(name: str):
    """Choose how programs run: "bwrap" (in a sandbox) or "none" (as ordinary processes)."""
    global SANDBOX
    SANDBOX = name


def check_sandbox():
    """Raise OSError, with a remedy, if programs cannot run on this machine."""
    try:
        run_code("", None, [""], 60.0)
    except (OSError, AttributeError) as e:  # outside Linux, os lacks some functions
        raise OSError(f"{e}. {REMEDY}") from None


def run_code(
    program: str, name: str | None, tests: list[str], seconds: float, memory: int = 4
) -> list[bytes | None]:
    """Run an untrusted program on tests, each time in a fresh sandbox (bubblewrap).

    Args:
        name: the function, or method of the class Solution, to call; each line of a test is an
            argument in JSON. If None, the program runs as __main__, with the test as its standard
            input
        seconds: time limit of each test
        memory: memory limit of each process, in GiB

    Returns a list with an entry for each test: what the program printed or, as JSON, what the
    function returned. If the program crashes on a test or takes too long, the entries of this test
    and of all tests after it are None. Raises OSError if programs cannot run on this machine.

    The sandbox protects against
        * reading or changing files: the program sees Python and the system's programs and
          libraries, read-only, and empty folders /tmp and /dev/shm of 128 MiB each
        * using the network: the sandbox has only its own loopback device
        * stealing keys: the program inherits none of your environment variables or open files
        * looking up or forging expected outputs: these never enter the sandbox, and outputs are
          compared outside
        * touching other processes: the program sees only those in its sandbox, at most 64, which
          are killed at the end of the test
        * exhausting the machine: time, memory, output and open files are limited, and the program
          starts on one core, which honest programs do not leave

    It does not protect against
        * bugs in the kernel or in bubblewrap: system calls are not filtered
        * many processes that use much memory together, because the limit is per process; but if
          memory runs out, the kernel kills the program before other processes
        * a BigCodeBench solution that reads its tests or patches unittest, since these run in the
          same process
        * access to files, the network and other processes with --sandbox=none, which keeps the
          limits and, if you are root, the switch to a different user
    """
    outputs = []
    for test in tests:
        has_failed = None in outputs
        outputs.append(None if has_failed else run_test(program, name, test, seconds, memory)[0])
    return outputs


# PRELUDE runs before a program, except BigCodeBench's. Like LiveCodeBench's (import_string in
# lcb_runner/evaluation/testing_util.py), it imports these modules and raises two limits.
PRELUDE = """
from string import *
from re import *
from datetime import *
from collections import *
from heapq import *
from bisect import *
from copy import *
from math import *
from random import *
from statistics import *
from itertools import *
from functools import *
from operator import *
from io import *
from sys import *
from json import *
from builtins import *
from typing import *
import string, re, datetime, collections, heapq, bisect, copy, math, random
import statistics, itertools, functools, operator, io, sys, json
sys.setrecursionlimit(50_000)
sys.set_int_max_str_digits(50_000)
"""


def run_test(
    program: str, name: str | None, test: str, seconds: float, memory: int, prelude: str = PRELUDE
) -> tuple[bytes | None, str]:
    """Run the prelude, then a program on one test (see `run_code`). Only the program is timed.

    Returns (output, last line of stderr), or (None, reason) if the program crashed or took too
    long. The output is what the program printed or returned.
    """
    with ExitStack() as stack:
        core = free_cores().get()
        stack.callback(free_cores().put, core)
        # If you are root, run the program as an unprivileged user, a different one for each core.
        user = FIRST_USER + core if os.getuid() == 0 else None
        if SANDBOX == "none":
            command = []
            folder = tempfile.mkdtemp()
            # The program may nest folders more deeply than shutil.rmtree can follow.
            stack.callback(subprocess.run, ["rm", "-rf", folder])
            os.chown(folder, user or -1, user or -1)
        else:
            command = sandbox_command()
            folder = "/tmp"

        # Create the files that the process inherits.
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

        # Start the program, and wait until it ends or its time is up.
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

        # Return the output, or the reason why there is none.
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
    """Wait until the driver is ready, give it `seconds` to end, then kill its process group.

    Returns (whether the driver was ready within 60 s, whether it ended in time).
    """
    end = os.pidfd_open(process.pid)
    started = ready in wait([end, ready], 60)  # seconds, enough for a busy machine
    ended = bool(wait([end], seconds if started else 0))
    # With bwrap, this also ends all processes in the sandbox.
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    os.close(end)
    return started, ended


def memory_file(stack: ExitStack, text: str = "") -> int:
    """Return the descriptor of a new file in memory that holds `text`.

    A program's output goes to such a file, not to a pipe, so that RLIMIT_FSIZE limits its size.
    """
    file = os.memfd_create("test")
    stack.callback(os.close, file)
    os.pwrite(file, text.encode(errors="surrogatepass"), 0)
    return file


@once
def free_cores() -> queue.SimpleQueue:
    """Return the queue of this rank's idle cores, from which a test takes one while it runs."""
    rank = int(os.environ.get("LOCAL_RANK", 0))
    n_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    cores = sorted(os.sched_getaffinity(0))
    free = queue.SimpleQueue()
    for core in cores[rank % len(cores) :: n_ranks]:
        free.put(core)
    return free


# Root runs a program as user FIRST_USER + core. systemd reserves these user ids for services, so
# they do not belong to people.
FIRST_USER = 61184
MAX_OUTPUT = 32 << 20  # bytes


def limits(seconds: float, memory: int, user: int | None) -> dict[str, int]:
    """Return the resource limits of a program: {name without RLIMIT_: limit}."""
    # RLIMIT_NPROC counts all processes of the user who runs the program. If that is you, and there
    # is no sandbox, your other processes count, too, so the limit is higher.
    counts_all_of_the_user = SANDBOX == "none" and not user
    return {
        "AS": memory << 30,
        "STACK": 64 << 20,
        "CPU": int(seconds) + 2,
        "FSIZE": MAX_OUTPUT,
        "NOFILE": 64,
        "NPROC": 10_000 if counts_all_of_the_user else 64,
        "CORE": 1,  # byte; at 0, the kernel would still pass core dumps to the system's collector
    }


def sandbox_command() -> list[str]:
    """Return the bwrap command that runs another command in the sandbox."""
    # List the parts of this machine that are visible in the sandbox: the system's programs and
    # libraries, Python, and a few files that they need.
    shown = {"/bin", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/alternatives", "/etc/hosts"}
    python = os.path.dirname(os.path.dirname(os.path.realpath(sys.executable)))
    for prefix in ("/usr", "/usr/local", sys.prefix, sys.base_prefix, python):
        shown.update(f"{prefix}/{part}" for part in ("bin", "lib", "lib64", "share", "pyvenv.cfg"))

    # If you are root, make no user namespace: in a new one, RLIMIT_NPROC would not limit the number
    # of processes. The driver needs the two capabilities to switch to another user.
    users = "--unshare-user"
    if os.getuid() == 0:
        users = "--cap-drop ALL --cap-add CAP_SETUID --cap-add CAP_SETGID"

    options = (
        f"{users} --unshare-pid --unshare-net --unshare-ipc --unshare-uts --new-session "
        "--die-with-parent --proc /proc --dev /dev"
    )
    command = [shutil.which("bwrap") or "bwrap", *options.split()]
    for folder in ("/tmp", "/dev/shm"):
        command += ["--perms", "1777", "--size", str(128 << 20), "--tmpfs", folder]
    for path in sorted(shown):  # mounted after /tmp, because Python may be installed in /tmp
        # Create the parent folder explicitly, so that every user can enter it: if you are root, the
        # program runs as another user.
        command += ["--dir", os.path.dirname(path)]
        command += ["--ro-bind-try", path, path]
    return command + "--remount-ro /dev --remount-ro / --chdir /tmp".split()


REMEDY = """On Linux, install bubblewrap 0.8 or newer (apt-get install bubblewrap). Where it may not
make namespaces: on Ubuntu 24.04, sysctl -w kernel.apparmor_restrict_unprivileged_userns=0; in
Docker, --cap-add SYS_ADMIN and --security-opt seccomp=unconfined, apparmor=unconfined,
systempaths=unconfined. In a container that can be thrown away: --sandbox=none (root's programs run
as another user, who has to read Python)."""

# The script that runs in the sandbox. Its arguments are three file descriptors: one to read the job
# from (JSON), an eventfd that it signals just before it starts the program under test, and one to
# write a function's result to.
DRIVER = """
import contextlib, json, os, resource, sys, types

job_file, ready, output = map(int, sys.argv[1:])
job = json.load(open(job_file))
for name, value in job["limits"].items():
    limit = getattr(resource, "RLIMIT_" + name)
    hard = resource.getrlimit(limit)[1] if name == "STACK" else value  # honest programs raise it
    with contextlib.suppress(ValueError):  # the hard limit is lower already
        resource.setrlimit(limit, (value, hard))
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
arguments = [json.loads(line) for line in lines if line.strip()]
with contextlib.suppress(SystemExit):  # whatever its status, as in LiveCodeBench
    exec(compile(job["program"], "solution.py", "exec"), vars(module))
if name:
    solution = getattr(module, "Solution", None)
    owner = solution() if hasattr(solution, name) else module
    value = getattr(owner, name)(*arguments)
    value = list(value) if isinstance(value, tuple) else value
    text = json.dumps(value, default=lambda scalar: scalar.item())  # numpy's scalars
    if json.loads(text) != value:  # tuples inside, keys that are not strings
        raise TypeError("JSON hides what this value is")
    os.write(output, text.encode())
    os._exit(0)
"""

# Judging: LiveCodeBench


def extract_code(response: str) -> str:
    """Return a response's program: the last fenced block that is marked as Python, else the last
    block, else the content of the last <answer> tag, else "". The last block's closing fence may be
    missing.

    "So:\\n```python\\nprint(1)\\n```\\nIt prints:\\n```\\n1\\n```" -> "print(1)"
    """
    _, tag, inside = response.rpartition("</answer>")[0].rpartition("<answer>")
    blocks = [*FENCED.finditer(response)]
    in_python = [block for block in blocks if IS_PYTHON.match(block["info"])]
    *_, code = [inside if tag else "", *(block["code"] for block in blocks + in_python)]
    return textwrap.dedent(code).strip("\n")


IS_PYTHON = re.compile(r"(?i)\W*py(?:thon)?3?\b")
# Matches a block between fences, ``` or ~~~, or one whose closing fence is missing. The opening
# fence may be followed by more than the language, as in ```python:a.py.
FENCED = re.compile(
    r"""(?xsm)
        (?P<fence>`{3,}|~{3,}) [ \t]* (?P<info>[^\n`]*) \n
        (?P<code>.*?)
        (?: ^[ \t]*(?P=fence)(?!\w) | (?P=fence)[ \t]*(?:</answer>|\r?$) | \Z )"""
)


def same_output(out: bytes | None, expected: str, returned: bool) -> bool:
    """Whether an output matches the expected one (lcb_runner/evaluation/testing_util.py).

    Returned values are parsed from JSON, then compared. Two printed lines match if their stripped
    texts are equal, or if their tokens are equal as decimal numbers: "1.0 2" matches "1 2.0".
    """
    longest = 1000 + 10 * len(expected)  # in bytes: 0.5 may be printed as 0.500000
    if out is None or len(out) > longest:
        return False
    try:
        if returned:  # Decimal reads any number of digits exactly; int() refuses more than 4,300
            return json.loads(out, parse_int=Decimal) == json.loads(expected, parse_int=Decimal)
        lines = out.decode(errors="replace").strip().split("\n")
        expected_lines = expected.strip().split("\n")
        return all(
            line.strip() == expected_line.strip()
            or [*map(Decimal, line.split())] == [*map(Decimal, expected_line.split())]
            for line, expected_line in zip(lines, expected_lines, strict=True)
        )
    except (ValueError, RecursionError, InvalidOperation):
        return False  # line counts differ, JSON is invalid or too deep, or a token is not a number


def find_wrong_test(
    code: str, tests: list, fn_name: str | None = None, seconds: float = 6.0
) -> str:
    """Run a program on its tests until it fails one. Return why it failed, or "" if it passed all.

    Args:
        tests: [input, expected output] pairs
        fn_name: LiveCodeBench's metadata["func_name"]; None if the program prints its answer
        seconds: time limit of each test
    """
    require(
        tests, "a LiveCodeBench problem without tests: nothing can be graded by it, load it again"
    )
    if not code.strip():
        return "no code in the response"
    for number, (test, expected) in enumerate(tests, 1):
        out, error = run_test(code, fn_name, test, seconds, memory=4)
        if not same_output(out, expected, returned=bool(fn_name)):
            got = "" if out is None else f"got {out[:200].decode(errors='replace')!r}, "
            wrong = f"{got}expected {expected[:200]!r}. {error[:200]}"
            return f"test {number} of {len(tests)}: {wrong}".strip()
    return ""


def passes_livecodebench(
    code: str, tests: list, fn_name: str | None = None, seconds: float = 6.0
) -> bool:
    return not find_wrong_test(code, tests, fn_name, seconds)


# Judging: BigCodeBench. Its tests patch a solution's module and inspect returned objects, so a
# solution and its tests run in one process.


def find_failed_unittest(code: str, test: str, code_prompt: str, seconds: float = 240.0) -> str:
    """Run a BigCodeBench problem's unit tests on a solution. Return the failure, or "" if none.

    As in bigcodebench/evaluate.py, code_prompt and `pass` come before the solution, and the
    libraries listed in BigCodeBench's Requirements/requirements-eval.txt must be installed. Do not
    train on BigCodeBench, because a solution could patch unittest.

    Args:
        seconds: time limit of all tests together
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


# ---- The command line ----------------------------------------------------------------------------


@dataclass
class Settings:
    systems: str = flag(
        "conductor,workers,random",
        f"comma-separated: any of {', '.join(SYSTEMS)}, or FILE.py:NAME, where NAME is an "
        "eval.System",
    )
    worker: str = flag(
        "",
        "comma-separated names: run each system that uses a single worker once with each of these "
        "workers; by default with every worker in the pool",
    )
    benchmarks: str = flag(
        "laptop",
        f"comma-separated: any of {', '.join(BENCHMARKS)}, or FILE.jsonl with your own problems",
    )
    checkpoint: str = flag(os.path.join(ASSETS, "laptop"), "the Conductor's folder")
    pool: str = flag(
        "",
        "the workers: a name or a file, see workers.py. By default, a comparison uses `local` or "
        "the local pool that its Conductor was trained with, and `prepare` calls no workers",
    )
    limit: int = flag(225, "the maximum number of problems of each benchmark")
    repeats: int = flag(1, "how many times each system answers each problem")
    extra_rounds: int = flag(
        0, "maximum rounds after the first, in which a Conductor may revise the answer (§3.2)"
    )
    only: str = flag("", "the workers that a Conductor may use, comma-separated; by default all")
    prompt_style: str = flag(
        "",
        "ood, in or mixed (few-shot examples), zero-shot or short; by default as in training, "
        'or ood for the system "seat"',
    )
    lessons: str = flag(
        "",
        "the benchmark with the training problems that systems may learn from; by default the one "
        "tested",
    )
    grader: str = flag(
        "",
        "FILE.py:NAME, a function (problem, response) -> bool for problems that name no grader",
    )
    sandbox: str = flag(
        "bwrap", "how programs run: bwrap, or none, which is for disposable containers only"
    )
    seed: int = flag(1, "the random seed of systems that learn")
    budget: float = flag(0.0, "the maximum cost of all calls, in dollars; 0: only free workers")
    replay: str = flag(
        "",
        f"a file that keeps replies, so that no call is paid for twice; by default {DATA}/replies "
        "if you give a budget or run `prepare` with a pool, otherwise none",
    )
    out: str = flag(
        "",
        "NAME or NAME.json: when the evaluation is complete, write its numbers to NAME.json and "
        "its rollouts to NAME.jsonl (for workflow.py show); neither file may exist yet",
    )


CHOICES = {  # flag -> the values it accepts
    "prompt_style": ["", "ood", "in", "mixed", "zero-shot", "short"],
    "sandbox": ["bwrap", "none"],
}


def check_flags(settings: Settings, words: list[str]):
    """Raise ValueError, naming the fault, if the settings or words of a command line are wrong.

    The names of systems, workers and benchmarks are checked later.
    """
    require(words in ([], ["prepare"]), f"there is no command {' '.join(words)!r}, only prepare")
    for name, choices in CHOICES.items():
        value = getattr(settings, name)
        message = f"--{name}={value}: there are {', '.join(filter(None, choices))}"
        require(value in choices, message)
    for name, value in vars(settings).items():
        smallest = int(name in ("limit", "repeats"))
        is_large_enough = isinstance(value, str) or value >= smallest
        require(is_large_enough, f"--{name} is from {smallest} on, not {value}")

    if settings.out:
        folder, name = os.path.split(settings.out)
        can_write = name and os.access(folder or ".", os.W_OK)
        require(can_write, f"--out={settings.out}: expected a name in a folder you can write to")
        for file in output_files(settings.out):
            message = f"{file} exists; choose another name, or move the file away"
            require(not os.path.exists(file), f"--out={settings.out}: {message}")

    if words == ["prepare"]:
        for name, value in vars(settings).items():
            is_used = name in ("pool", "budget", "replay", "sandbox")
            is_default = value == getattr(Settings, name)
            require(is_used or is_default, f"prepare does not use --{name}")


def main(argv: list[str]):
    """Run a command. Exit with status 1 if it fails, or 2 if something the user named is wrong."""
    settings = Settings()
    words = configure(settings, argv)
    try:
        check_flags(settings, words)
        costs_money = settings.budget or (words and settings.pool)
        if costs_money and not settings.replay:
            settings.replay = f"{DATA}/replies"
        use_sandbox(settings.sandbox)
        if settings.grader:
            GRADERS["own"] = own_grader(load_function(settings.grader))
        command = prepare if words else compare_systems
        command(settings)
        sys.stdout.flush()
    except (ValueError, FileNotFoundError, IsADirectoryError) as e:
        usage_error(str(e))
    except (BrokenPipeError, KeyboardInterrupt) as e:
        kept = f"the same command goes on with the replies in {settings.replay}"
        lost = "no replies are kept; --replay=FILE would keep them"
        remedy = kept if settings.replay else lost
        if isinstance(e, KeyboardInterrupt):
            raise SystemExit(f"interrupted: {remedy}") from None
        discard_output()
        raise SystemExit(f"--out was not written: {remedy}" if settings.out else 1) from None
    except (OSError, WorkerError) as e:
        raise SystemExit(str(e)) from None


if __name__ == "__main__":
    # Let a user's file that imports eval get this module instead of a second copy.
    sys.modules["eval"] = sys.modules["__main__"]
    main(sys.argv[1:])
