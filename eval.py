"""Problems, graders, systems and tables (§4).

    python eval.py --checkpoint=DIR     the Conductor beside every single worker and random workflows
    python eval.py --benchmarks=A,B --systems=C,D        other problems, other systems (README)
    python eval.py prepare [--pool=P]   fetch 1.3 GB of training data, write data/{paper,recursion}.jsonl
    python eval.py average FILE FILE …  means and 95 % intervals of what several evaluations wrote with --out

The laptop world's problems are generated here: some need one of the local specialists (workers.py), some two,
some three in the right order and with the right access lists. Public benchmarks, their graders and the
sandbox stand in the appendix. `SYSTEMS` lists what can be compared, `measure` says how well each
does. assets/plot.py draws what is written here. Read train.py next.
"""
import ast
import base64
import cmath
import contextlib
import functools
import itertools
import json
import math
import operator
import os
import pickletools
import random
import re
import statistics
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import warnings
import zlib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from multiprocessing.pool import ThreadPool

import numpy as np
import requests
import torch
from requests.adapters import HTTPAdapter, Retry
from tqdm import tqdm

from model import configure, read_json, write_json
from workers import (ARITHMETIC, CAPITALS, ELEMENTS, FACTS, LOCAL, SKILL, SPANISH, SPELLING, WorkerError,
                     load_pool)
from workflow import (SOLVE_IT, Prompting, Step, Task, Trace, Workflow, conduct, execute, load_conductor,
                      sampled, seated, shape, subset)

# -----------------------------------------------------------------------------------------------------------
# Problems, and the laptop world's


@dataclass
class Problem:
    id: str
    question: str
    answer: str
    kind: str  # what tables group by
    grader: str = "exact"  # a key of ASK
    level: int = 0  # the larger, the harder; 0: unknown
    extra: dict = field(default_factory=dict)  # what its grader needs besides: EXTRA


WORDS = (
    "planet river garden window market silver dragon castle forest bridge winter summer orange yellow purple "
    "candle basket rocket guitar violin doctor farmer sailor pirate monkey rabbit turtle spider butter "
    "cheese pepper ginger cotton velvet marble copper bronze tunnel harbor island desert valley meadow "
    "canyon glacier volcano thunder shadow mirror").split()
FRAMES = ("What is {}?", "Find {}.", "Tell me {}.", "Give me {}.")
NEEDS = {  # whom a kind of problem needs
    "arithmetic": ["calculator"],
    "fact": ["librarian"],
    "string": ["coder"],
    "number": ["translator"],
    "foreign": ["translator", "calculator"],
    "fact+arithmetic": ["librarian", "calculator"],
    "fact+string": ["librarian", "coder"],
    "foreign+fact+arithmetic": ["librarian", "translator", "calculator"],
}


def laptop_expressions() -> dict[str, list[tuple[str, str]]]:
    """Every (expression, value) of the laptop world by kind, in a fixed order."""
    number = {element: FACTS[f"the atomic number of {element}"] for element in ELEMENTS}
    atomic = {element: f"the atomic number of {element}" for element in ELEMENTS}
    capital = {f"the capital of {country}": city for country, city in CAPITALS.items()}
    digits = {str(n): str(n) for n in range(2, 40)}

    def sums(names, values, b_values):
        """{the name of a} op {the name of b}, for all a and b."""
        found = []
        for a in values:
            for b, op in itertools.product(b_values, ARITHMETIC):
                value = ARITHMETIC[op](int(values[a]), int(b_values[b]))
                found.append((f"{names[a]} {op} {b}", str(value)))
        return found

    def spelled(values):
        pairs = itertools.product(values.items(), SPELLING.items())
        return [(f"{name} {op}", spell(value)) for (name, value), (op, spell) in pairs]

    return {
        # one specialist
        "arithmetic": sums(digits, digits, digits),
        "fact": list(FACTS.items()),
        "string": spelled({word: word for word in WORDS}),
        "number": list(SPANISH.items()),
        # two, each seeing the one before
        "foreign": sums({word: word for word in SPANISH}, SPANISH, SPANISH),
        "fact+arithmetic": sums(atomic, number, digits),
        "fact+string": spelled(capital),
        # three
        "foreign+fact+arithmetic": sums(atomic, number, SPANISH),
    }


def laptop_problems(split: str) -> list[Problem]:
    """A quarter of each kind's expressions is for "test", the others for "train", whatever the sentence
    around them."""
    problems = []
    for kind, pairs in laptop_expressions().items():
        for expression, value in pairs:
            held_out = zlib.crc32(expression.encode()) % 4 == 0
            if held_out == (split == "test"):
                for i, frame in enumerate(FRAMES):
                    question = frame.format(expression)
                    problems.append(Problem(f"{kind}/{expression}/{i}", question, value, kind))
    return problems


def possible(problem: Problem, pool: list) -> float:
    """How often the best workflow over these local specialists answers a laptop problem right: always, where
    each trade that it needs has one who never gives up."""
    chance = 1.0
    for trade in NEEDS[problem.kind]:
        able = [w.name.removesuffix(trade).strip() for w in pool if w.name.endswith(trade)]
        chance *= max((SKILL[kind] for kind in able), default=0.0)
    return chance


def draw_pool(problem: Problem, pool: list, k: int, rng: random.Random) -> list:
    """k of the local specialists by chance, in the pool's order, among which are some who can solve the
    problem."""
    able = [team for team in itertools.combinations(pool, min(k, len(pool))) if possible(problem, team)]
    if not able:
        raise ValueError(f"no {k} of {', '.join(w.name for w in pool)} can solve {problem.question!r}")
    return list(rng.choice(able))


def interleave(problems: list[Problem], rng: random.Random) -> list[Problem]:
    """Shuffle, with the kinds taking turns for as long as the smallest lasts; a small kind starts again until
    the largest is through."""
    kinds = {}
    for p in problems:
        kinds.setdefault(p.kind, []).append(p)
    for group in kinds.values():
        rng.shuffle(group)
    most = max(map(len, kinds.values()))
    return [group[i % len(group)] for i in range(most) for group in kinds.values()]


def has_split(name: str, split: str) -> bool:
    """Whether `load` knows these problems; they need not have been fetched."""
    anywhere = name == "laptop" or name in MIXES or name.endswith(".jsonl")
    return split in ("train", "test") and (anywhere or (name, split) in SOURCES)


def load(name: str, split: str, limit: int | None = None) -> list[Problem]:
    """Problems of "laptop", a benchmark in SOURCES, a mix in MIXES or a JSONL file (see read_problems).

    split is "train" or "test". limit: so many at most, and no more is fetched than they take. Their order is
    random but fixed, with the kinds taking turns, so that a slice of a multiple of the number of kinds holds
    each equally often; but a JSONL file keeps its order and has one split. A mix is what `prepare` wrote, and
    is tested by its parts' tests. OSError tells what was not fetched and how to bring it, ValueError what is
    wrong where."""
    if not has_split(name, split):
        known = ["laptop", *MIXES, *(f"{n} ({s})" for n, s in SOURCES), "files *.jsonl"]
        raise ValueError(f"no problems {name!r}, split {split!r}: there are {', '.join(known)}")
    if name.endswith(".jsonl"):
        return read_problems(name)[:limit]
    if name in MIXES and split == "train":
        return read_problems(os.path.join(DATA, name + ".jsonl"))[:limit]
    if (name, split) in SOURCES:
        return benchmark(name, split, limit)
    if name == "laptop":
        problems = laptop_problems(split)
    else:
        problems = []
        for part in MIXES[name]:
            problems += load(part, split, limit)
    return interleave(problems, random.Random(0))[:limit]


def grade(problem: Problem, response: str) -> bool:
    """Whether a response answers the problem, by the problem's grader. What it cannot read is wrong."""
    gold = problem.answer
    extra = problem.extra
    if problem.grader == "code":
        tests = extra["tests"]
        if isinstance(tests, dict):  # the place in a file where they stand
            tests = stored_tests(problem.id, **tests)
        return passes_livecodebench(extract_code(response), tests, extra["function"])
    if problem.grader == "unittest":
        code = extract_code(response)
        return passes_bigcodebench(code, extra["test"], extra["entry_point"], extra["code_prompt"])
    if problem.grader == "letter":
        return pick_letter(response, extra["choices"]) == gold
    if problem.grader == "math":
        return same_math(final_answer(response), gold)
    if problem.grader == "short":
        return same_short(final_answer(response), gold)
    return tagged(response) == gold


def tagged(response: str) -> str:
    """What stands in the last <answer> tag, or else the whole response, without blanks around it."""
    head, end, _ = response.rpartition("</answer>")
    if end and "<answer>" in head:
        response = head.rpartition("<answer>")[2]
    return response.strip()


# -----------------------------------------------------------------------------------------------------------
# Random workflows: a baseline, and what the warm start of a tiny Conductor is made of

PHRASES = ("Work it out.", "Simplify it.", "Find the value.", "Rewrite the question.", "Process the text.",
           "Name the word.")


def random_workflow(rng: random.Random, n_workers: int, max_steps: int = 5) -> Workflow:
    """1 to max_steps steps, short workflows more often; each a random worker, a random phrase, and nine times
    in ten all that came before."""
    n_steps = min(rng.randint(1, max_steps), rng.randint(1, max_steps))
    steps = []
    for i in range(n_steps):
        worker, phrase = rng.randrange(n_workers), rng.choice(PHRASES)
        sees_all = rng.random() < 0.9
        steps.append(Step(worker, phrase, list(range(i)) if sees_all else []))
    return Workflow(steps)


def random_completion(question: str, rng: random.Random, n_workers: int, max_steps: int = 5, names: str = "",
                      subtasks: bool = True) -> str:
    """A completion in the Conductor's format that says nothing about which workflow is good: its plan is the
    question. Where the workers have names, the plan names those of the workflow. subtasks=False leaves that
    list out (App. B.7).

    The number of steps stands behind the workers, where it follows from them and helps to write two more
    lists of that length. Whether another step is needed is thus decided worker by worker. In the plan a comma
    says so: if the next name did, sharpening the policy (train.warm_start) would favour the end, which is one
    token, over the names, which are many."""
    workflow = random_workflow(rng, n_workers, max_steps)
    workers, others = workflow.text(subtasks).split("\n", 1)
    plan = question
    if names:
        plan += " " + ", ".join(f"{names[step.worker]} {step.worker}" for step in workflow.steps)
    return f"Plan: {plan}\n{workers} # {len(workflow.steps)} steps\n{others}"


# -----------------------------------------------------------------------------------------------------------
# Systems (§4, App. A.3): each turns a problem into a trace. `k` is the worker of the pool that plays the
# part, where one does; `name` names the calls for the replay file and seeds whatever is random.

REFLECT = "Check the last response for mistakes, correct them, and give the whole answer in its final form."
AGGREGATE = "Compare the responses, decide which is right, and give the whole answer in its final form."
# The local specialists act on certain verbs only, each on others: these hold one for each.
LAPTOP = {
    SOLVE_IT: "Find the answer: work it out, simplify, rewrite or process whatever that takes.",
    REFLECT: "Find what may be wrong with the last response, work it out again, and process it all.",
    AGGREGATE: "Find out which response is right, work it out again where they differ, and process it.",
}


def worded(problem: Problem, subtask: str) -> str:
    return LAPTOP[subtask] if problem.kind in NEEDS else subtask


def alone(problem: Problem, pool: list, k: int, name: str | None = None, **overrides) -> Trace:
    """A worker asked without a Conductor: one turn, the bare question."""
    trace = Trace(problem.question, Workflow([Step(k, problem.question, [])]), [pool[k].name], [None])
    try:
        trace.replies[0] = pool[k].chat([{"role": "user", "content": problem.question}], name, **overrides)
        trace.seconds = trace.replies[0].seconds
    except WorkerError as e:
        trace.error = str(e)
    return trace


def poll(problem: Problem, pool: list, chosen: list[int], name: str | None, choose) -> Trace:
    """Chosen workers asked alone. The response at choose(problem, responses) is the answer, and stands
    last."""
    asked = [alone(problem, pool, k, name and f"{name}/{i}") for i, k in enumerate(chosen)]
    errors = [t.error for t in asked if t.error]
    if not errors:
        best = choose(problem, [t.answer for t in asked])
        asked.append(asked.pop(best))
    steps = [t.workflow.steps[0] for t in asked]
    names = [t.workers[0] for t in asked]
    replies = [t.replies[0] for t in asked]
    return Trace(problem.question, Workflow(steps), names, replies, error=errors[0] if errors else None)


def majority(problem: Problem, responses: list[str]) -> int:
    """Where the first answer stands with which most responses agree, as the problem's grader sees it."""
    votes = [sum(same_meaning(problem, answer, other) for other in responses) for answer in responses]
    return votes.index(max(votes))


def same_meaning(problem: Problem, answer: str, other: str) -> bool:
    if problem.grader == "letter":
        choices = problem.extra["choices"]
        return pick_letter(answer, choices) == pick_letter(other, choices)
    if problem.grader in ("code", "unittest"):
        return extract_code(answer) == extract_code(other)
    gold = tagged(answer) if problem.grader == "exact" else final_answer(answer)
    return grade(replace(problem, answer=gold), other)


def central(problem: Problem, responses: list[str]) -> int:
    """Where the response stands that is most like the others: Smoothie (arXiv 2412.04692) judges likeness by
    sentence embeddings and over neighbouring questions too, this by the words that two responses share."""
    words = [set(re.findall(r"\w+", response.casefold())) for response in responses]

    def shared(a, b):
        return len(a & b) / max(len(a | b), 1)

    likeness = [sum(shared(a, b) for b in words) for a in words]
    return likeness.index(max(likeness))


def context(problem: Problem, pool: list, k: int, name: str) -> Trace:
    """One call with five times the tokens."""
    limits = ("max_tokens", "max_completion_tokens")
    longer = {key: 5 * value for key, value in pool[k].params.items() if key in limits}
    return alone(problem, pool, k, name, **longer)


def consensus(problem: Problem, pool: list, k: int, name: str) -> Trace:
    return poll(problem, pool, [k] * 5, name, majority)


def reflect(problem: Problem, pool: list, k: int, name: str) -> Trace:
    """Five turns of self-reflection."""
    steps = [Step(k, worded(problem, SOLVE_IT), [])]
    steps += [Step(k, worded(problem, REFLECT), list(range(i))) for i in range(1, 5)]
    return execute(Workflow(steps), problem.question, pool, name=name)


def moa(problem: Problem, pool: list, k: int, name: str) -> Trace:
    """A Mixture of Agents of one layer: every worker proposes, and a random one aggregates."""
    steps = [Step(i, worded(problem, SOLVE_IT), []) for i in range(len(pool))]
    aggregator = random.Random(name).randrange(len(pool))
    steps.append(Step(aggregator, worded(problem, AGGREGATE), list(range(len(pool)))))
    return execute(Workflow(steps), problem.question, pool, name=name)


def smoothie(problem: Problem, pool: list, k: int, name: str) -> Trace:
    return poll(problem, pool, list(range(len(pool))), name, central)


def at_random(problem: Problem, pool: list, k: int, name: str) -> Trace:
    return execute(random_workflow(random.Random(name), len(pool)), problem.question, pool, name=name)


def trigrams(question: str) -> torch.Tensor:
    """How often each trigram stands in a question, hashed: (4096)."""
    counts = torch.zeros(4096)
    for i in range(len(question) - 2):
        trigram = question[i:i + 3].casefold()
        counts[zlib.crc32(trigram.encode()) % 4096] += 1
    return counts / counts.norm().clamp(min=1)


def train_router(pool: list, lessons: list[Problem], asked: list[list[Trace]]):
    """A system: the worker who is likeliest right alone, by a logistic regression on traces [worker][lesson].
    Like RouterDC (NeurIPS 2024) it learns from each worker's success, but with trigrams instead of a
    fine-tuned encoder and contrastive losses."""
    x = torch.stack([trigrams(p.question) for p in lessons])  # (P, 4096)
    right = [grades(lessons, traces) for traces in asked]
    y = torch.tensor([[float(bool(r)) for r in row] for row in right]).T  # (P, W)
    known = torch.tensor([[float(r is not None) for r in row] for row in right]).T  # (P, W)
    weights = torch.zeros(4096, len(pool), requires_grad=True)
    optimizer = torch.optim.Adam([weights], lr=0.1, weight_decay=1e-4)
    for _ in range(300):
        optimizer.zero_grad()
        torch.nn.functional.binary_cross_entropy_with_logits(x @ weights, y, known).backward()
        optimizer.step()

    def router(problem: Problem, pool: list, k: int, name: str) -> Trace:
        scores = trigrams(problem.question) @ weights  # (W)
        return alone(problem, pool, int(scores.argmax()), name)
    return router


BY_ONE = {"workers": alone, "context": context, "consensus": consensus, "reflect": reflect}
BY_ALL = {"random": at_random, "moa": moa, "smoothie": smoothie}
CONDUCTORS = {  # how a Conductor is asked otherwise than it was in training
    "conductor": {},
    "no-few-shot": {"style": "zero-shot"},  # Table 10
    "fine-grained": {"style": "fine-grained"},  # Table 9
    "no-subtasks": {"subtasks": False},  # App. B.7
    "one-worker": {},  # one worker does every step
    "shuffled": {},  # every worker has another's number
}
SYSTEMS = [*CONDUCTORS, "seat", *BY_ONE, *BY_ALL, "router", "best-single"]


def run_system(system, problems: list[Problem], pool: list, k: int, name: str) -> list[Trace]:
    """A system's trace of every problem, 64 at a time. Its threads are daemons: Ctrl-C shall neither wait nor
    pay."""
    with ThreadPool(64) as threads:
        traces = threads.imap(lambda p: system(p, pool, k, f"{name}/{p.id}"), problems)
        return list(tqdm(traces, name, total=len(problems), disable=None, leave=False))


def run_conductor(write, problems: list[Problem], pools: list[list], name: str, rounds: int = 0,
                  prompting: Prompting = Prompting(), tries: int = 1, edit=None) -> list[Trace | None]:
    """The trace of every problem, None where what was written is no workflow. Problem i has the workers
    pools[i]."""
    tasks = [Task(p.question, pool, problem=p, name=f"{name}/{p.id}") for p, pool in zip(problems, pools)]
    return [rollout.trace for rollout in conduct(write, tasks, rounds, prompting, tries, grade, edit)]


def everyone_alone(pool: list, problems: list[Problem], name: str) -> list[list[Trace]]:
    """Traces [worker][problem] of every single worker, all at a time."""
    def ask(k):
        return run_system(alone, problems, pool, k, f"{name}:{pool[k].name}")

    with ThreadPool(len(pool)) as threads:
        return threads.map(ask, range(len(pool)))


def baselines(problems: list[Problem], pool: list) -> dict[str, list[Trace]]:
    """Traces of every single worker and of random workflows."""
    traces = dict(zip([worker.name for worker in pool], everyone_alone(pool, problems, "workers")))
    return {**traces, "random workflows": run_system(at_random, problems, pool, 0, "random:/0")}


# -----------------------------------------------------------------------------------------------------------
# Measurement and tables


def grades(problems: list[Problem], traces: list[Trace | None]) -> list[bool | None]:
    """Whether each trace is right; None where its workers were lost. A trace is graded once, however many
    tables ask."""
    def graded(p, t):
        if t is None:
            return False
        if t.right is None and not t.error:
            t.right = grade(p, t.answer)
        return t.right

    with ThreadPoolExecutor(os.cpu_count()) as threads:  # as programs take minutes to grade
        return list(threads.map(graded, problems, traces))


def accuracies(problems: list[Problem], traces: list[Trace | None]) -> dict[str, float]:
    """Share of right answers, over all and by kind. A problem whose workers were lost counts for nobody."""
    found = {}
    for p, right in zip(problems, grades(problems, traces)):
        if right is not None:
            found.setdefault("all", []).append(right)
            found.setdefault(p.kind, []).append(right)
    return {key: statistics.fmean(values) for key, values in found.items()}


def spread(values: list[float]) -> dict:
    """Of repeats or seeds: standard deviation, standard error of the mean, and the mean's 95 % interval, as ±
    around it, by Student's t. None where there are fewer than two."""
    if len(values) < 2:
        return {"std. dev.": None, "std. error": None, "95 % ±": None}
    deviation = statistics.stdev(values)
    error = deviation / math.sqrt(len(values))
    return {"std. dev.": deviation, "std. error": error, "95 % ±": students_t(len(values) - 1) * error}


def measure(problems: list[Problem], repeats: list[list[Trace | None]]) -> dict:
    """What a system's traces [repeat][problem] come to: accuracy in %, over repeats; and means a question of
    calls, steps of the last round, tokens, cents (None: unknown) and accuracy divided by cents
    ("cost-adjusted performance", Tables 5 and 6). Questions whose workers were lost are in none of them, and
    counted."""
    shares = [accuracies(problems, traces) for traces in repeats]
    values = [100 * share["all"] for share in shares if share]
    everything = [t for traces in repeats for t in traces]
    lost = [t for t in everything if t and t.error]
    ran = [t for t in everything if t and not t.error]
    asked = max(len(everything) - len(lost), 1)
    row = {"accuracy": statistics.fmean(values) if values else None, **spread(values)}
    row["calls"] = sum(t.calls for t in ran) / asked
    row["steps"] = sum(len(t.workflow.steps) for t in ran) / asked
    row["tokens"] = sum(t.tokens for t in ran) / asked
    row["cents"] = None
    if all(t.cost is not None for t in ran):
        row["cents"] = 100 * sum(t.cost for t in ran) / asked
    row["points/cent"] = None
    if row["cents"] and values:
        row["points/cent"] = row["accuracy"] / row["cents"]
    row["lost"] = len(lost)
    row["by kind"] = {}
    for kind in dict.fromkeys(p.kind for p in problems):
        known = [100 * share[kind] for share in shares if kind in share]
        row["by kind"][kind] = statistics.fmean(known) if known else None
    return row


MEASURED = {"accuracy": 2, "std. dev.": 2, "std. error": 2, "95 % ±": 2, "calls": 2, "steps": 2, "tokens": 0,
            "cents": 4, "points/cent": 1}  # columns, and how many digits each has behind the point


def columns(rows: dict[str, dict], heads: dict[str, int], title: str = "") -> str:
    """Rows of numbers under their heads, each with so many digits behind the point: "?" for None, and blank
    where a row does not have it."""
    wide = max(30, len(title), *map(len, rows))
    lines = [f"{name:<{wide}}" for name in [title, *rows]]
    for head, digits in heads.items():
        cells = [head]
        for row in rows.values():
            cell = f"{row[head]:.{digits}f}" if row.get(head) is not None else "?"
            cells.append(cell if head in row else "")
        width = 2 + max(map(len, cells))
        lines = [line + f"{cell:>{width}}" for line, cell in zip(lines, cells)]
    return "\n".join(line.rstrip() for line in lines)


# -----------------------------------------------------------------------------------------------------------
# Appendix: graders of text, the sandbox, public benchmarks and the training mixes, more tables, the command
# line

# ---------------------------------------------------------------------------------------------------------------------------------
# Graders of text: mathematics, letters, short answers. What they read was written by a model, and none of it is run.

LETTERS = "ABCDEFGHIJ"  # of the choices
LONGEST, BITS = 1000, 1000  # characters of an answer, bits of a number: beyond, only text is compared (sympy hangs at 5^{5^{5^5}})
LEVELS = {",": 0, "∪": 1, "=": 2, **dict.fromkeys("+-±∓", 3), "*": 4, "/": 4, "^": 5}  # of precedence
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
TOKEN = re.compile(r"(?:\d+(?:\.\d+)?|\.\d+)(?:_\w+)?|\\[A-Za-z]+|#[^#]*#|[A-Za-z]{4,}|[A-Za-z](?:_\w+)?'*|\S")  # 11_2 is a symbol
FUNCTIONS = {"\\" + f.__name__: f for f in (cmath.sin, cmath.cos, cmath.tan, cmath.sinh, cmath.cosh, cmath.tanh, cmath.exp, abs)} | {
    r"\ln": cmath.log, r"\log": cmath.log10, r"\arcsin": cmath.asin, r"\arccos": cmath.acos, r"\arctan": cmath.atan,
    r"\cot": lambda z: 1 / cmath.tan(z), r"\sec": lambda z: 1 / cmath.cos(z), r"\csc": lambda z: 1 / cmath.sin(z)}
CONSTANTS = {"e": math.e, "i": 1j, "π": math.pi, "∞": math.inf}
UNICODE = str.maketrans(dict(zip("×·÷−–²³√&~$#", ["*", "*", "/", "-", "-", "^2", "^3", r"\sqrt ", ",", " ", "", ""])))
SIGNS = {**dict.fromkeys("left right big Big displaystyle overline angle triangle ! ( ) [ ]".split(), ""),
         **dict.fromkeys([",", ";", ":", " ", "quad", "qquad"], " "), **dict.fromkeys(["dfrac", "tfrac", "cfrac"], r"\frac"),
         **dict(zip("\\ cdot times div pi infty infinity cup pm mp le leq ge geq lt gt in % { } emptyset varnothing".split(),
                    "),( * * / π ∞ ∞ ∪ ± ∓ ≤ ≤ ≥ ≥ < > ∈ % { } {} {}".split()))}
UNITS = dict(pair.split("=") for pair in (
    "foot=ft feet=ft inche=in inch=in mile=mi meter=m metre=m gram=g pound=lb lbs=lb second=s sec=s minute=min hour=h hr=h year=yr yrs=yr liter=L "
    "litre=L newton=N joule=J watt=W volt=V ampere=A amp=A ohm=Ω hertz=Hz pascal=Pa kelvin=K celsiu=C fahrenheit=F mole=mol percent=% dollar=$ "
    "cent=¢ square=2 sq=2 cubic=3 per= unit= degree= way= outcome= different= total=").split())  # without plural; what counts is no unit
PREFIXES = dict(kilo="k", centi="c", milli="m", micro="μ", nano="n", mega="M", giga="G")
COUNTS = {"dozen": 12, "hundred": 100, "thousand": 10 ** 3, "million": 10 ** 6, "billion": 10 ** 9, "trillion": 10 ** 12}


def committed(response: str) -> str | None:
    """What stands in the last \\boxed{} (as in MATH) or <answer>, whichever opens later; "" if it does not close, None without either."""
    response = re.sub(r"\\boxed\s+(\d+)", r"\\boxed{\1}", response)  # as two solutions of MATH have it
    tag, box = response.rfind("<answer>"), max((m.end() for m in re.finditer(r"\\(?:boxed|fbox)\s*\{", response)), default=-1)
    if tag >= box:
        found, end, _ = response[tag + 8:].partition("</answer>")
        return None if tag < 0 else found.strip() if end else ""
    depth = 1
    for m in re.finditer(r"(?s)\\.|[{}]", response[box:]):  # \{ is no brace
        depth += (m[0] == "{") - (m[0] == "}")
        if not depth:
            return response[box:box + m.start()].strip()
    return ""


def final_answer(response: str) -> str:
    """What a response commits to: its last \\boxed{} or <answer>, else what follows its last "answer is" or "answer:", else all of it."""
    found = committed(response)
    said = [response, *re.findall(r"(?i)\banswer\s*(?:is\b|:)[\s:*]*([^\n]*)", response)]
    return (said[-1] if found is None else found).strip("* \n")


def same_math(answer: str, gold: str, tolerance: float = 0.0) -> bool:
    """Whether two answers in LaTeX or plain text mean the same: lists and sets in any order; tuples, intervals and matrices in theirs;
    "x =" and a unit may be missing on one side. Numbers are equal, or real ones within a relative tolerance."""
    a, b = answer.strip(), gold.strip()
    if a == b or max(len(a), len(b)) > LONGEST:
        return a == b != ""
    a, b = tidy(a), tidy(b)
    if ("=" in a) != ("=" in b):
        a = a if "," in a or re.search(r"=\s*0$", a) else a.rpartition("=")[2]  # m + n = 10 + 7 = 17
        name = r"\\?[A-Za-z]+(?:_\w+)?"
        a, b = (re.sub(rf"(^|,)\s*(?:{name}(?:\^\{{-1\}}|'+)?(?:\([^()=]*\))?|\(\s*{name}(?:\s*,\s*{name})+\s*\))\s*=", r"\1", text)
                for text in (a, b))
    x, y = (re.sub(r"#|(?<!\d)\s+|\s+(?!\d)", "", text) for text in (a, b))
    if x == y or re.search(r"#|(?<![\\A-Za-z])[A-Za-z]{3}", a + b) and x.casefold() == y.casefold():
        return x != ""
    (a, u, more), (b, v, others) = quantity(a), quantity(b)
    pairs = [(a, b)]
    if not re.search(r"[(\[{]", a + b):  # commas between thousands, not in a list
        pairs.append([re.sub(r"(?<![\d.,])\d{1,3}(,\d{3})+(?!\d|,\d)", lambda m: m[0].replace(",", ""), text) for text in (a, b)])
    if ["%"] in (u, v) and u != v:  # 20% is 0.2, but the answer to "what percentage?" may be 20
        pairs += [(f"({x})/100", y) if u else (x, f"({y})/100") for x, y in pairs]
    alike = u == v and (more <= others or others <= more) or not (u or more) or not (v or others)
    return alike and any(agree(read(x), read(y), tolerance) for x, y in pairs)


def quantity(text: str) -> tuple[str, list[str], set[str]]:
    """A tidy text without what it counts, the unit of that, and its other words: "5 square miles north" is "5", ["2", "mi"] and {"north"}."""
    def symbol(word):
        prefix, base = re.fullmatch(rf"({'|'.join(PREFIXES)})?(.*)", word).groups()
        return PREFIXES[prefix] + UNITS[base] if prefix and base in UNITS else UNITS.get(word, word)

    word = r"(?:#[^#]*#|%|(?<![A-Za-z])(?:[A-Za-z]{4,}|mm|cm|km|in|ft|mi|kg|mg|sec|min|hr|mph|per)(?![A-Za-z]))"
    m = re.search(rf"(?<=[\w)}}\]])(?:\s*(?:[*/]\s*)?{word}(?:\^\{{?-?\d\}}?)?)+$", text)
    words = [w if len(w) < 4 else w.lower().rstrip("s") for w in re.findall(r"[^\W\d_]+|[%23]", m[0])] if m else []
    words = [*filter(None, map(symbol, words))]
    return text[:m.start()] if m else text, sorted(w for w in words if len(w) < 4), {w for w in words if len(w) > 3}


def tidy(text: str) -> str:
    """LaTeX and plain text in one spelling: one character a sign, #...# for \\text{...}, a matrix as [(row),(row)]."""
    text = text.rstrip(". ").replace(r"\$", "").translate(UNICODE)
    for pattern, new in (
            (r"\^\s*\{?\s*(?:\\circ|°)\s*\}?|\\degree|°", ""), (r"(?<=\d)(?:\{,\}|,\s*\\!)\s*(?=\d{3})", ""),  # thousands
            (r"\\begin\{[pb]matrix\}", "[("), (r"(\\\\)?\s*\\end\{[pb]matrix\}", ")]"),
            (r"\\(?:text\w*|mbox|math(?:rm|bf|it))\s*\{([^{}]*)\}",
             lambda m: m[1] if m[1] in ("e", "i") or not re.search("[A-Za-z]", m[1]) else f"#{m[1].strip()}#"),
            (r"\\([A-Za-z]+|.)", lambda m: SIGNS.get(m[1], m[0])),
            (r"(?<![\\A-Za-z])(sqrt|pi|infinity|(?:arc)?(?:sin|cos|tan)|(?:sin|cos|tan)h|exp|ln|log)(?![A-Za-z])",
             lambda m: SIGNS.get(m[1], "\\" + m[1])),
            (rf"(?<=[\d}}])\s*(#?)\s*({'|'.join(COUNTS)})\b\s*", lambda m: f"*{COUNTS[m[2]]}{m[1]}"), ("##", ""),
            (r",?\s*(?:#(?:and|or)#|\b(?:and|or)\b)|;", ","), (r"_\{(\w*)\}", r"_\1"), (r"^#?\(([A-Z])\)#?$", r"\1"),
            (r"^\s*\\?\w+\s*∈", ""), (r"\|([^|]*)\|", r"\\abs{\1}"), (r"(?<=\d) (?=\d{3}(?!\d))", ""),
            (r"(?<=\d)\s+(\d+)/(\d+)", r"\\frac{\1}{\2}"), (r"\\frac\s*(\d)", r"\\frac{\1}"), (r"(\\frac\{[^{}]*\})\s*(\d)", r"\1{\2}"),
            (r"(?<![\d.^_}])(\d+)\s*\\frac\s*\{(\d+)\}\s*\{(\d+)\}",  # a mixed number
             lambda m: f"({m[1]}+{m[2]}/{m[3]})" if int(m[2]) < int(m[3]) else m[0])):
        text = re.sub(pattern, new, text)
    return text.strip()


def read(text: str) -> Fraction | float | complex | list | None:
    """The value of a tidy text, exact while rational, its variables at a fixed complex point; or [kind, part, ...] of kind "," "{}" "±" "="
    "∪" (in any order) "()" "[)" ... None if it is no mathematics, has no value, or is too large. By precedence climbing."""
    tokens = TOKEN.findall(text)[::-1]

    def expression(level=0, ends=()):
        sign = tokens.pop() if tokens[-1] in ("+", "-", "±", "∓") else ""
        node = infix(sign, Fraction(0), expression(max(level, 4))) if sign else atom()
        while tokens and tokens[-1] not in (")", "]", "}"):
            op = tokens[-1] if tokens[-1] in LEVELS else "*"
            if LEVELS[op] < level or tokens[-1 - (op == tokens[-1])] in ends:
                break
            if op == tokens[-1]:
                tokens.pop()
            elif re.match(r"\d|#|[A-Za-z]{4}", tokens[-1]):
                raise ValueError("numbers or words side by side")
            node = infix(op, node, expression(LEVELS[op] + (op != "^")))
        return node

    def atom():
        token = tokens.pop()
        if token in ("(", "[", "{"):
            node, kind = expression(), token + tokens.pop()
            return [kind, *node[1:]] if isinstance(node, list) and node[0] == "," else node
        if token == r"\frac":
            return infix("/", atom(), atom())
        if token == r"\sqrt":
            n = atom() if tokens[-1] == "[" else 2
            return infix("^", atom(), 1 / Fraction(n))
        if token in FUNCTIONS:  # \sin 2x is \sin(2x), \sin^2 x is (\sin x)^2, \sin^{-1} x is \arcsin x
            power = atom() if tokens[-1] == "^" and tokens.pop() else None
            function = FUNCTIONS[token.replace("\\", r"\arc") if power == -1 else token]
            value = function(complex(atom() if tokens[-1] in ("(", "{") else expression(4, FUNCTIONS)))
            return value if power in (None, -1) else infix("^", value, power)
        if token[0] in ".0123456789" and "_" not in token:
            return infix("+", Fraction(0), Fraction(token))
        if token in CONSTANTS:
            return CONSTANTS[token]
        if token[0].isalnum() or token[0] in "#\\" and "binom" not in token:
            random = zlib.crc32((token.strip("#").casefold() if len(token) > 3 else token).encode()) / 2 ** 32
            return cmath.rect(2 + random, 0.1 + 0.2 * (random * 997 % 1))  # about a positive number: sqrt(xy) = sqrt(x) sqrt(y)
        raise ValueError("no mathematics")

    try:
        node = expression() if text.count("±") + text.count("∓") < 5 else None
        return None if tokens else node
    except (ValueError, TypeError, ArithmeticError, LookupError, RecursionError):
        return None


def infix(op: str, x, y):
    """What an operator makes of two values or lists. ValueError or TypeError where it makes nothing, or too large a number."""
    xs, ys = (node[1:] if isinstance(node, list) and node[0] in "±" + op * (op in ",∪") else [node] for node in (x, y))
    if op in ",∪":
        return [op, *xs, *ys]
    if op in "±∓" or len(xs) * len(ys) > 1:
        return ["±", *(infix(sign, p, q) for sign in ("+-" if op in "±∓" else op) for p in xs for q in ys)]
    if isinstance(x, list) or isinstance(y, list):
        raise ValueError("no arithmetic on lists")
    if op == "=":
        return [op, infix("-", x, y), infix("-", y, x)]
    if op == "^" and not (isinstance(x, Fraction) and isinstance(y, Fraction) and y.denominator == 1):
        return complex(x) ** complex(y)
    if op == "^" and math.log2(max(abs(x.numerator), x.denominator)) * abs(y) > BITS:
        raise ValueError("too large")
    result = x ** int(y) if op == "^" else OPERATORS[op](x, y)
    if isinstance(result, Fraction) and max(abs(result.numerator), result.denominator) >> BITS:
        raise ValueError("too large")
    return result


def agree(x, y, tolerance: float) -> bool:
    """Whether what `read` made of two texts is the same."""
    if isinstance(x, list) and isinstance(y, list):
        if len(x) != len(y) or x[0] != y[0] and not {x[0], y[0]} <= {",", "{}", "±"}:
            return False
        if x[0] in ("()", "[]", "(]", "[)"):
            return all(agree(p, q, tolerance) for p, q in zip(x[1:], y[1:]))
        rest = y[1:]
        return all(any(agree(p, q, tolerance) and rest.remove(q) is None for q in rest) for p in x[1:])
    if x is None or y is None or isinstance(x, list) or isinstance(y, list):
        return False
    if isinstance(x, Fraction) and isinstance(y, Fraction) and not tolerance:
        return x == y
    real = complex(x).imag == complex(y).imag == 0
    return cmath.isclose(x, y, rel_tol=(tolerance or 1e-12) if real else 1e-9, abs_tol=1e-14 * (x == 0 or y == 0))


def pick_letter(response: str, choices: list[str]) -> str | None:
    """The letter that a response commits to: in its last \\boxed{} or <answer>, else wherever it says "answer is" or "Answer:", else in its
    last line or sentence; as the letter, as the text of exactly one choice, or both. None if there is none, or more than one."""
    def normal(text):
        text = " ".join(re.sub(r"\\(?:text|math)\w*|\\[()]|[*_`${}\"'“”;]|\[|\]", " ", text).split()).rstrip(".")
        return re.sub(r"(?i)^(?:(?:the|correct|final|best|answer|option|choice|is|so|therefore)\b[\s:,]*)+", "", text)

    def bare(text):
        return normal(text.strip("() ")).casefold()

    letters, texts, found = LETTERS[:len(choices)], [normal(choice).casefold() for choice in choices], committed(response)
    response, picked = response[-10 * LONGEST:].strip(), set()
    said = re.findall(r"(?i)\b(?:answer|option|choice)\b[^\n.:]{0,40}?(?:\bis\b|:)[\s:*]*(?=([^\n]{0,300}))", response)
    last = re.split(r"\n|[.!?]\s", response)[-1], response.rpartition("\n")[2]
    for i, text in enumerate(map(normal, [found[:LONGEST]] if found is not None else [*last, *said])):
        text, loose = text.upper() if len(text) < 4 else text, found is not None or i > 1
        # both: a letter, then perhaps its choice's text; m, stricter, since "A" may be a word: a capital, what sets it apart, the rest
        both = re.match(rf"(?i)\(?([{letters}])\b(?:[\s):,.]|[-–—](?=\s))*(.*)", text)
        m = re.match(rf"\(?([{letters}])\b(\s*[):,]|\s+[-–—](?=\s)|\.(?!\w)|)\s*(.*)", text)
        if texts.count(text.casefold()) == 1 and not (m and len(text) == 1):
            picked.add(letters[texts.index(text.casefold())])
        elif both and bare(both[2]) == bare(texts[letters.index(both[1].upper())]):
            picked.add(both[1].upper())
        elif m and not m[3]:
            picked.add(m[1])
        elif m and (loose and m[2] or re.match(r"because|since|as\b|is (?:the )?(?:correct|right|best|answer)", m[3])):
            rest = re.split(r"(?i)\b(?:because|since|as)\b|[.;]", m[3])[0].strip()
            other = re.search(rf"(?:^|\b(?:or|and)|[&/,])\s*(?:option )?\(?[{letters}]\b", rest) or normal(rest).casefold() in texts
            picked.add("?" if other else m[1])
    return picked.pop() if len(picked) == 1 and "?" not in picked else None


def same_short(answer: str, gold: str) -> bool:
    """Whether a short free-form answer is the gold one (RLPR, from WebInstruct-verified): the same words but for case, articles and
    punctuation, or mathematics within 1%; plain integers must be equal. RLPR's own rules (github.com/OpenBMB/RLPR) allow 0.01%, also of
    100 times or a 100th of it, and ask a judge model besides, as WebInstruct-verified does (arXiv 2505.14652)."""
    def words(text):
        return re.sub(r"(?<=\w)-(?=\w)|[\s_*`$\"',.;:!?()]+|\b(?:a|an|the)\s", " ", text.casefold()).split()

    def spelled(text):  # 3 x 10^8 m/s and 3e8 m/s as 3*10^8\text{m/s}
        text = re.sub(r"(?<=\d)[eE]([-+]?\d+)", r"*10^{\1}", text.strip().rstrip("."))
        text = re.sub(r"(?<=\d)\s*(?:[xX×]|\\times|\\cdot)\s*(?=10\b)", "*", text)
        unit = r"((?:[A-Za-zµμΩ°]{2}|[msghNJWVAKCFLTΩ](?![A-Za-z]))(?:[A-Za-zµμΩ°\s/^.·*-]|(?<=\S)\d)*)"
        return re.sub(rf"^([-+\d.,*^{{}}()\s]*[\d}}])\s*{unit}$", r"\1\\text{\2}", text)

    if len(answer) > LONGEST or not re.search(r"[\d\\=^+*/()<>]", gold):
        return words(answer[:LONGEST]) == words(gold) != []
    integers = all(re.fullmatch(r"\s*[-+]?[\d,]+\D*", text) for text in (answer, gold))
    return same_math(spelled(answer), spelled(gold), 0 if integers else 0.01)


# ---------------------------------------------------------------------------------------------------------------------------------
# Code: a generated program runs in a sandbox; what it prints or returns leaves it as data, and this process compares

# What LiveCodeBench puts before a program, in its order (import_string in lcb_runner/evaluation/testing_util.py)
MODULES = "string re datetime collections heapq bisect copy math random statistics itertools functools operator io sys json".split()
PRELUDE = "\n".join([*(f"from {m} import *" for m in [*MODULES, "builtins", "typing"]), f"import {', '.join(MODULES)}",
                     "sys.setrecursionlimit(50_000)"])
SANDBOXES = threading.Semaphore(os.cpu_count() or 1)  # no more at a time than there are cores, as their time is limited
MAX_OUTPUT = 32 << 20  # bytes that all tests of a program together may print or return

# The supervisor: it builds the prison, forks a process for each test and reports. It is given the tests' inputs, never their outputs.
# Its numbers are those of linux/{sched,mount,sockios,prctl,capability,landlock}.h and of Landlock's calls, on every architecture the same.
SUPERVISOR = r'''
import contextlib, ctypes, gc, json, os, resource, signal, struct, sys, tempfile, types

job, report, folder = json.load(open(0, closefd=False)), os.fdopen(os.dup(1), "wb", 0), os.getcwd()
linux, libc, gid = sys.platform == "linux", ctypes.CDLL(None), os.getgid()
root = os.getuid() == 0 and not (linux and int(open("/proc/self/uid_map").read().split()[-1]) < 65536)  # one with other users beside it
uid = 61184 + os.getpid() % 4336 if root else os.getuid()  # limits do not bind root: one of systemd's users for passing services
if linux:
    libc.prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG: it ends with who asked
    open("/proc/self/oom_score_adj", "wb", 0).write(b"1000")  # when memory runs out, the kernel takes this first
spaces = linux and libc.unshare(0x68020000 | (0x10000000, 0)[root]) == 0  # mounts, IPC, processes, network; users too, without root
if spaces:
    for file, text in () if root else (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        open(f"/proc/self/{file}", "wb", 0).write(text.encode())
    if os.fork():
        os.wait()
        os._exit(0)
    libc.mount(b"none", b"/", None, 0x44000, None)  # MS_REC | MS_PRIVATE
    libc.mount(b"proc", b"/proc", b"proc", 14, None)
    libc.mount(b"tmpfs", folder.encode(), b"tmpfs", 6, b"size=128m,mode=700,uid=%d" % uid)
    libc.ioctl(libc.socket(2, 1, 0), 0x8914, struct.pack("16sH22x", b"lo", 1))  # a loopback of its own
os.chdir(folder)
abi = libc.syscall(444, None, 0, 1) if linux else 0
if abi > 0:  # Landlock, for the tests: Python and the system's libraries to read, the folder to write, no signal to the outside
    rights = (1 << (16 if abi > 4 else min(12 + abi, 15))) - 1
    rules = libc.syscall(444, struct.pack("QQQ", rights, 3 * (abi > 3 and not spaces), 3 * (abi > 5)), 24, 0)
    read = {sys.prefix, sys.base_prefix, *"/lib /lib64 /bin /proc /dev/zero /dev/random /dev/urandom /sys/devices/system/cpu /etc/ld.so.cache "
            "/etc/localtime /etc/passwd /usr/bin /usr/lib /usr/lib64 /usr/libexec /usr/local /usr/share".split()} - {"/usr"}  # /usr/src/app is a project
    for path, access in [(folder, rights), ("/dev/null", 6), *((p, 13) for p in read if os.path.exists(p))]:
        beneath = struct.pack("=Qi", access if os.path.isdir(path) else access & 7, os.open(path, os.O_PATH))
        libc.syscall(445, rules, 1, beneath, 0)
if root:
    os.chown(folder, uid, uid)
    linux and libc.prctl(8, 1, 0, 0, 0)  # PR_SET_KEEPCAPS, to read a Python that stands in /root
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)
if linux:
    keep = (4 * root, 2 * (root and abi > 0), 0)  # CAP_DAC_READ_SEARCH, else CAP_DAC_OVERRIDE, else nothing
    any(libc.capset(struct.pack("Ii", 0x20080522, 0), struct.pack("6I", k, k, 0, 0, 0, 0)) == 0 for k in keep)
    # PR_SET_: PDEATHSIG again; DUMPABLE, no test looks into this process; CHILD_SUBREAPER, orphans become its children; NO_NEW_PRIVS
    for option, value in ((1, signal.SIGKILL), (4, 0), (36, 1), (38, 1)):
        libc.prctl(option, value, 0, 0, 0)
others = 0  # processes count by user, since Linux 5.14 apart in each namespace
for process in filter(str.isdigit, os.listdir("/proc") if linux and not (root or spaces and abi > 1) else ()):
    with contextlib.suppress(OSError):
        others += len(os.listdir(f"/proc/{process}/task")) if os.stat(f"/proc/{process}").st_uid == uid else 0
prelude = compile(job["prelude"], "prelude", "exec")
exec(prelude, {})  # imports once what every test imports again
gc.freeze()
report.write(json.dumps([text for holds, text in (
    (spaces, "no namespaces: the network is cut for TCP alone" if abi > 3 else "no namespaces: the network is open to it"),
    (abi > 0, "no Landlock: files are open to it as they are to you"),
    (spaces or root or abi > 5, "no Landlock of Linux 6.12: it may signal your processes" + " and read their environment" * (abi < 1)),
    (linux, "not Linux: no limit on memory and processes, and a daemon survives")) if not holds]).encode() + b"\n")

def send(pids, number):
    for p in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(p, number)

signal.signal(signal.SIGALRM, lambda *_: send([pid], signal.SIGKILL))
for test in job["tests"]:
    source, out = tempfile.TemporaryFile(), tempfile.TemporaryFile(buffering=0)
    source.write(b"" if job["name"] else test.encode())
    source.seek(0)
    pid = os.fork()
    if pid == 0:
        break
    signal.setitimer(signal.ITIMER_REAL, job["seconds"])
    status = os.waitpid(pid, 0)[1]
    signal.setitimer(signal.ITIMER_REAL, 0)
    data = os.pread(out.fileno(), job["max_output"], 0)
    job["max_output"] -= len(data)
    if status or job["max_output"] == 0:
        break  # all tests must pass: the others do not matter
    report.write(b"%d\n" % len(data) + data)
if pid:  # in a namespace all end with this process; elsewhere all are stopped before any is killed, or forks would fill the gaps
    below, before = [], None
    while linux and not spaces and below != before:
        before, below = below, [os.getpid()]
        for parent in below:  # grows underway
            with contextlib.suppress(OSError):
                for thread in os.listdir(f"/proc/{parent}/task"):
                    below += map(int, open(f"/proc/{parent}/task/{thread}/children").read().split())
        send(below[1:], signal.SIGSTOP)
    send(below[1:], signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while linux and not spaces:
            os.wait()
    os._exit(0)

# From here on a test's process
os.setsid()
signal.signal(signal.SIGALRM, signal.SIG_DFL)
report.close()
null = os.open("/dev/null", os.O_RDWR)
for fd, to in ((source.fileno(), 0), (null if job["name"] else out.fileno(), 1), (null, 2)):
    os.dup2(fd, to)
limits = {"CPU": int(job["seconds"]) + 1, "FSIZE": 32 << 20, "NOFILE": 256, "CORE": 0}
if linux:
    limits |= {"NPROC": 64 + others, "AS": job["memory"] << 30, "DATA": 4 << 30, "STACK": 64 << 20}
    libc.prctl(1, signal.SIGKILL, 0, 0, 0)
for name, value in limits.items():
    what, hard = getattr(resource, "RLIMIT_" + name), resource.getrlimit(getattr(resource, "RLIMIT_" + name))[1]
    resource.setrlimit(what, (value if hard < 0 else min(value, hard),) * 2)
if abi > 0 and libc.syscall(446, rules, 0):
    os._exit(1)
sys.argv, main = ["solution.py"], types.ModuleType("solution" if job["name"] else "__main__")
sys.modules[main.__name__] = main
exec(prelude, vars(main))
with contextlib.suppress(SystemExit):  # whatever its code, as in LiveCodeBench
    exec(compile(job["program"], "solution.py", "exec"), vars(main))
if job["name"]:
    def plain(v):
        return [*map(plain, v)] if isinstance(v, list) else {"tuple": [*map(plain, v)]} if isinstance(v, tuple) else v
    value = getattr(main.Solution() if hasattr(main, "Solution") else main, job["name"])(*map(json.loads, test.split("\n")))
    value = plain(list(value) if isinstance(value, tuple) else value)
    out.write(json.dumps(value, default=lambda v: v.item()).encode())  # item(): numpy's scalars
    os._exit(0)
'''


def run_code(program: str, name: str | None, tests: list[str], seconds: float, memory: int = 4) -> list:
    """Run a program that nobody has read in a sandbox. Without a name it is __main__ and reads a test from its standard input; else its
    function (or Solution's method) of that name gets a test's lines as JSON arguments. Returns what each test printed or, as JSON, returned
    (bytes); None from the first test on that crashed, took over `seconds` of wall time or with which all wrote MAX_OUTPUT.

    The child has a session, folder and environment of its own, limits on CPU, memory (`memory` GiB of addresses for each of 64 processes),
    files and cores, and as far as the kernel allows: namespaces (no network; all that it started ends with it) and Landlock
    (docs.kernel.org/userspace-api/landlock.html: it reads Python's and the system's libraries alone, and writes in its folder alone). For
    root it is another user. A warning says what the system lacks, OSError that it allows nothing. The kernel's own flaws stay open."""
    job = dict(program=program, name=name, tests=tests, seconds=seconds, memory=memory, prelude=PRELUDE, max_output=MAX_OUTPUT)
    folder, child = tempfile.mkdtemp(), None
    try:
        with SANDBOXES, tempfile.TemporaryFile() as asked, tempfile.TemporaryFile() as told:
            asked.write(json.dumps(job).encode())
            asked.seek(0)
            with contextlib.suppress(subprocess.TimeoutExpired):  # only where a test can stop its supervisor
                child = subprocess.run(
                    [sys.executable, "-I", "-X", "utf8", "-X", "int_max_str_digits=50000", "-c", SUPERVISOR], cwd=folder, start_new_session=True,
                    env={"PATH": os.defpath, "HOME": folder, "TMPDIR": folder, "TZ": "UTC", "OMP_NUM_THREADS": "1"},
                    stdin=asked, stdout=told, stderr=subprocess.PIPE, timeout=(seconds + 1) * len(tests) + 30)
            told.seek(0)
            lost, outputs = told.readline(), []
            while size := told.readline():
                outputs.append(told.read(int(size)))
    finally:
        subprocess.run(["rm", "-rf", folder])  # trees too deep for shutil
    if not lost:
        why = child.stderr.decode(errors="replace").strip() if child else "it did not start in time"
        raise OSError(f"no sandbox with {sys.executable}: {why}")
    if json.loads(lost):
        warnings.warn("the sandbox of generated code holds only in part here; " + "; ".join(json.loads(lost)))
    return outputs + [None] * (len(tests) - len(outputs))


def extract_code(response: str) -> str:
    """The last fenced block of a response, though its end is missing; else what stands in its last <answer> tag; else nothing."""
    blocks = re.findall(r"```[\w+#.-]*[ \t]*\r?\n(.*?)(?:^[ \t]*```(?!\w)|```[ \t]*(?:</answer>|\r?$)|\Z)", response, re.DOTALL | re.MULTILINE)
    tagged = response.rpartition("</answer>")[0].rpartition("<answer>")
    return textwrap.dedent(blocks[-1] if blocks else tagged[2] if tagged[1] else "").strip("\n")


def same_output(out: bytes | None, expected: str, returned: bool) -> bool:
    """The rules of LiveCodeBench's lcb_runner/evaluation/testing_util.py: a returned value (JSON) by value; what is printed line by line,
    stripped, as text or as Decimal tokens. Something a hundred times as long as expected is not read."""
    if out is None or len(out) > 1000 + 100 * len(expected):
        return False
    try:
        if returned:
            return json.loads(out) == json.loads(expected)
        printed, wanted = ([line.strip() for line in text.strip().split("\n")] for text in (out.decode(errors="replace"), expected))
        return len(printed) == len(wanted) and all(
            a == b or [*map(Decimal, a.split())] == [*map(Decimal, b.split())] for a, b in zip(printed, wanted))
    except (ValueError, RecursionError, InvalidOperation):  # no JSON, too deep, no numbers
        return False


def passes_livecodebench(code: str, tests: list[list[str]], fn_name: str | None = None, seconds: float = 6.0) -> bool:
    """Whether a program passes all tests of a LiveCodeBench problem, [input, output] as in stored_tests; fn_name is metadata["func_name"];
    seconds are a test's. A returned tuple stands for a list at the top alone."""
    if not tests:
        raise ValueError("a LiveCodeBench problem without tests: nothing can be graded by it, load it again")
    outputs = run_code(code, fn_name, [given for given, _ in tests], seconds)
    return all(same_output(out, wanted, fn_name is not None) for out, (_, wanted) in zip(outputs, tests))


def bench(n: int = 100):
    """Small solutions a second through the sandbox, with as many at a time as there are cores. The last line is JSON."""
    program = ("def count(words):\n    seen = {}\n    for w in words:\n        seen[w] = seen.get(w, 0) + 1\n"
               "    return [list(pair) for pair in sorted(seen.items())]\n")
    tests = [[json.dumps(words), json.dumps(sorted(map(list, Counter(words).items())))]
             for words in ([], ["a"], ["a", "b", "a"], ["x"] * 50, [*"abracadabra"], [*"mississippi"], ["", " "])]
    begun = time.perf_counter()
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        passed = sum(threads.map(lambda _: passes_livecodebench(program, tests, "count"), range(n)))
    seconds = time.perf_counter() - begun
    print(json.dumps({"solutions": n, "tests_of_each": len(tests), "passed": passed, "cores": os.cpu_count(),
                      "per_second": round(n / seconds, 1)}))


# BigCodeBench's tests patch a solution's module and look into what it returns: they must share its process. So tests that nothing can pass
# are mixed in: who switches off the judge passes those too.
IMPOSSIBLE = ("fail()", "assertEqual(0, 1)", "assertEqual([0], [1])", "assertTrue(0)", "assertFalse(1)", "assertIn(0, ())",
              "assertIsNone(0)", "assertIsInstance(0, str)", "assertAlmostEqual(0, 1)", "assertGreater(0, 1)", "assertRaises(OSError, int)")
UNITTESTS = r'''
import contextlib, functools, os, sys, types, unittest

def run(code, tests, name):
    module = sys.modules["__test__"] = types.ModuleType("__test__")
    vars(module).update(sys=sys, os=os, environ=os.environ, __file__="__test__.py")
    exec(compile(code, "__test__.py", "exec"), vars(module))
    solve = getattr(module, name)
    @functools.wraps(solve)
    def honest(*args, **kwargs):
        value = solve(*args, **kwargs)
        for v in [value, *(value if isinstance(value, (list, tuple)) else ())]:
            with contextlib.suppress(TypeError, ValueError):  # numpy and pandas compare by element
                if v == object():
                    raise AssertionError("a result that equals everything")
        return value
    setattr(module, name, honest)
    exec(compile(tests, "__test__.py", "exec"), vars(module))
    passed, result = [], unittest.TestResult()
    result.addSuccess = lambda case: passed.append(case.id().split(".")[-1])
    unittest.defaultTestLoader.loadTestsFromTestCase(module.TestCases).run(result)
    return [sorted(passed), sorted({case.id().split(".")[-1] for case, _ in result.failures + result.errors})]
'''


def passes_bigcodebench(code: str, test: str, entry_point: str, code_prompt: str, seconds: float = 240.0) -> bool:
    """Whether a solution passes every method of the class TestCases of a BigCodeBench problem's `test`. It is "calibrated" as in
    bigcodebench/evaluate.py: code_prompt and `pass` stand before it. seconds are the whole class's. Without the libraries of
    BigCodeBench's Requirements/requirements-eval.txt honest solutions fail.

    Exiting, printing, patching unittest, skipping, results that equal everything, and what frames or gc show do not make a solution pass.
    One written against this very scheme could: it shares a process with the tests and can read them there."""
    names = sorted({f.name for c in ast.parse(test).body if isinstance(c, ast.ClassDef) and c.name == "TestCases" for f in c.body
                    if isinstance(f, (ast.FunctionDef, ast.AsyncFunctionDef)) and f.name.startswith("test")})
    if not names:
        raise ValueError("a BigCodeBench problem whose TestCases has no tests: nothing can be graded by it, load it again")
    traps = {f"test_zz_{os.urandom(8).hex()}": f"self.{names[i % len(names)]}(), self.{wrong}" for i, wrong in enumerate(IMPOSSIBLE)}
    test = "\n".join([test, *(f"TestCases.{name} = lambda self: ({body})" for name, body in traps.items())])
    arguments = "\n".join(map(json.dumps, (f"{code_prompt}\n    pass\n{code}", test, entry_point)))
    out, = run_code(UNITTESTS, "run", [arguments], seconds, 32)
    return same_output(out, json.dumps([names, sorted(traps)]), True)


# -----------------------------------------------------------------------------------------------------------
# Benchmarks: rows of public data sets on the Hugging Face hub, of which only those that are needed are
# fetched
#
# What is taken, with the numbers of App. A.2 in brackets. Where the paper does not say, the choice is ours.
#
#   math500        train: 300 of MATH-500 [300]; test: 100 others [100]; by a hash of the question
#   mmlu           train: auxiliary_train, 99,842 [99,842], from other exams; test: 14,042 [14,042]
#   rlpr           train: three fifths of 77,687 [46,620 of 77,700]; test: one fifth [15,540]; by such a hash
#   livecodebench  train: V1, 400 problems up to March 2024 [V1]; test: the 175 of 2025 that V6 added [V6]
#   aime25, bigcodebench (hard, complete), gpqa (diamond): all 30 [30], 148 [148], 198 [198] are for testing
#   paper          240 of each of the first four [960 together, by "difficulty and diversity"]: the hardest of
#                  the candidates where levels are known, else the first; `prepare --pool=…` leaves out what
#                  all workers solve, or none. Candidates: 600 random rows of mmlu and rlpr, of others all.
#   recursion      175 problems of livecodebench and 175 of rlpr, by chance from "paper" [the same]


@dataclass
class Source:
    repository: str  # a data set on the hub
    what: str  # config/split, fetched in slices, or a JSONL file of it
    rows: int
    megabytes: float
    drawn: bool = False  # True: its slices come in a random order, and no more of them than are needed


DATA = "data"  # in the current directory. Not to be passed on: RLPR's licence is CC BY-NC 4.0
MATH = Source("HuggingFaceH4/MATH-500", "default/test", 500, 0.6)
RLPR = Source("openbmb/RLPR-Train-Dataset", "default/train", 77687, 200, drawn=True)
SOURCES = {
    ("math500", "train"): MATH,
    ("math500", "test"): MATH,
    ("mmlu", "train"): Source("cais/mmlu", "all/auxiliary_train", 99842, 161, drawn=True),
    ("mmlu", "test"): Source("cais/mmlu", "all/test", 14042, 9),
    ("rlpr", "train"): RLPR,
    ("rlpr", "test"): RLPR,
    ("livecodebench", "train"): Source("livecodebench/code_generation_lite", "test.jsonl", 400, 1253),
    ("livecodebench", "test"): Source("livecodebench/code_generation_lite", "test6.jsonl", 175, 134),
    ("aime25", "test"): Source("yentinglin/aime_2025", "default/train", 30, 0.1),  # as in Lighteval
    ("bigcodebench", "test"): Source("bigcode/bigcodebench-hard", "default/v0.1.4", 148, 1.4),
    ("gpqa", "test"): Source("Idavidrein/gpqa", "gpqa_diamond/train", 198, 1.4),  # as in Lighteval; gated
}
MIXES = {
    "paper": {"math500": 240, "mmlu": 240, "rlpr": 240, "livecodebench": 240},
    "recursion": {"livecodebench": 175, "rlpr": 175},
}
CANDIDATES = 600  # rows of a drawn data set among which `prepare` chooses
SLICE = 50  # rows of a drawn data set that are fetched together; of others 100, the most there is
GRADERS = {"math500": "math", "aime25": "math", "rlpr": "short", "mmlu": "letter", "gpqa": "letter",
           "livecodebench": "code", "bigcodebench": "unittest"}
BLOCK = "Put all of it, imports included, in one ```python block."
ASK = {  # what a question asks for, by grader
    "exact": "",
    "math": "Put the final answer in \\boxed{}.",
    "letter": "Put the letter of the right option in <answer> tags.",
    "short": "Put the final answer, as short as possible, in <answer> tags.",
    "code": f"Write a Python program that reads from standard input and writes to standard output. {BLOCK}",
    "unittest": f"Complete the code above. {BLOCK}",
}
EXTRA = {  # what a grader needs in Problem.extra
    "letter": ["choices"],
    "code": ["function", "tests"],
    "unittest": ["test", "entry_point", "code_prompt"],
}
TESTS_MAX = 1 << 29  # bytes of one problem's hidden tests, unpacked


def benchmark(name: str, split: str, limit: int | None = None) -> list[Problem]:
    """The first `limit` problems of a benchmark in a fixed random order; rows that are not here are
    fetched."""
    source = SOURCES[name, split]
    page = f"https://huggingface.co/datasets/{source.repository}"
    file = os.path.join(DATA, source.repository, source.what.replace("/", "-"))
    rows, by_hand = rows_of_file, f", or put {page}/resolve/main/{source.what} there"
    if "/" in source.what:
        rows, by_hand, file = rows_in_slices, "", file + ".jsonl"
    problems = []
    try:
        for n, at, row in rows(source, file):
            problem = problem_from(name, n, row, {"file": file, "at": at})
            if name != "rlpr" or in_split(problem, split):
                problems.append(problem)
            if source.drawn and len(problems) == limit:
                break
    except OSError as e:
        raise OSError(f"{file} lacks rows of {page} ({source.rows:,}, {source.megabytes} MB): {e}\nTry again "
                      f"to go on where it stopped{by_hand}. If the page asks to accept terms, do that and "
                      "set HF_TOKEN.") from e
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as e:
        raise ValueError(f"{file} has not the {source.rows:,} rows that {page} had ({type(e).__name__}: "
                         f"{e}): remove it, try again") from e
    if name == "math500":
        problems.sort(key=hashed)
        problems = problems[:300] if split == "train" else problems[-100:]
    if not source.drawn:
        random.Random(0).shuffle(problems)
    return problems[:limit]


def hashed(problem: Problem) -> int:
    """A number that is equal for equal questions, whatever the order of the rows."""
    return zlib.crc32(problem.question.encode())


def in_split(problem: Problem, split: str) -> bool:
    """RLPR has one split for all. Here a fifth of it is for "test", three for "train", one for nobody (App.
    A.2)."""
    fifth = hashed(problem) % 5
    return fifth == 0 if split == "test" else fifth > 1


def problem_from(name: str, n: int, row: dict, place: dict) -> Problem:
    """The n-th row, which stands at `place`, as a problem. Columns are as the data sets' cards tell, for RLPR
    as the card of CohleM/rlpr_exp, which keeps them."""
    problem = Problem(f"{name}/{n}", "", "", name, GRADERS[name])
    code = ""
    if problem.grader == "math":
        problem.question = row["problem"]
        problem.answer = str(row["answer"])
        problem.level = row.get("level", 0)
    elif name == "rlpr":
        problem.question = row["prompt"][1]["content"]
        problem.answer = row["reward_model"]["ground_truth"]
        problem.level = row["extra_info"]["reasoning_score"] or 0
    elif name == "mmlu":
        problem.question = row["question"]
        problem.answer = "ABCD"[row["answer"]]
        problem.extra = {"choices": row["choices"]}
    elif name == "gpqa":  # its right answer is the first of four, which are shuffled by a fixed seed
        options = [row["Correct Answer"], *(row[f"Incorrect Answer {i}"] for i in (1, 2, 3))]
        order = random.Random(n).sample(range(4), 4)
        problem.question = row["Question"]
        problem.answer = "ABCD"[order.index(0)]
        problem.extra = {"choices": [options[i].strip() for i in order]}
    elif name == "bigcodebench":
        problem.id = f"{name}/{row['task_id']}"
        problem.extra = {column: row[column] for column in EXTRA["unittest"]}
        code = row["complete_prompt"].strip()
    else:
        problem.id = f"{name}/{row['question_id']}"
        problem.question = row["question_content"]
        problem.level = ["easy", "medium", "hard"].index(row["difficulty"]) + 1
        problem.extra = {"function": json.loads(row["metadata"]).get("func_name"), "tests": place}
        code = row["starter_code"].strip()
    parts = [problem.question.strip()]
    choices = zip("ABCD", problem.extra.get("choices", []))
    parts.append("\n".join(f"{letter}. {choice}" for letter, choice in choices))
    if code:
        parts += [f"```python\n{code}\n```", ASK["unittest"]]
    else:
        parts.append(ASK[problem.grader])
    problem.question = "\n\n".join(filter(None, parts))
    return problem


def session() -> requests.Session:
    """It bears $HF_TOKEN, which requests drops where a redirect leaves the host, and it has patience: a rate
    limit of the hub is over in five minutes (huggingface.co/docs/hub/rate-limits), and so long it is
    tried."""
    hub = requests.Session()
    token = os.environ.get("HF_TOKEN", "").strip()
    if not re.fullmatch("[!-~]*", token):  # what a header can hold; requests would print it
        raise OSError("HF_TOKEN is no token: it has blanks or characters beyond ASCII")
    if token:
        hub.headers["Authorization"] = f"Bearer {token}"
    hub.headers["Accept-Encoding"] = "identity"  # a part of a compressed body is of no use
    patience = Retry(8, connect=2, backoff_factor=2, status_forcelist=(429, 500, 502, 503, 504))
    for scheme in ("https://", "http://"):
        hub.mount(scheme, HTTPAdapter(max_retries=patience))
    return hub


def endpoint() -> str:
    return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def rows_in_slices(source: Source, file: str):
    """Yield (number, place in the file, row) of a data set's rows. A slice that is not in the file is fetched
    when its turn comes; the file grows over retries and runs."""
    size = SLICE if source.drawn else 100
    starts = list(range(0, source.rows, size))
    if source.drawn:
        random.Random(0).shuffle(starts)
    os.makedirs(os.path.dirname(file), exist_ok=True)
    open(file, "ab").close()
    with open(file, "r+b") as f, session() as hub, tqdm(desc=file, unit=" rows", disable=None) as bar:
        for start in starts:
            at = f.tell()
            lines = [f.readline() for _ in range(start, min(start + size, source.rows))]
            if not lines[-1].endswith(b"\n"):  # it is not there, or torn by a kill
                rows = fetch_slice(hub, source, start, len(lines))
                lines = [json.dumps(row).encode() + b"\n" for row in rows]
                f.seek(at)
                f.truncate()
                f.writelines(lines)
                f.flush()
                bar.update(len(lines))
            for n, line in enumerate(lines, start):
                yield n, at, json.loads(line)
                at += len(line)


def fetch_slice(hub: requests.Session, source: Source, start: int, n: int) -> list[dict]:
    """GET /rows?dataset=&config=&split=&offset=&length= (huggingface.co/docs/dataset-viewer/rows) gives
    {"rows": [{"row_idx", "row", "truncated_cells"}], "num_rows_total", "features", …}, or {"error"} with a
    status."""
    config, split = source.what.split("/")
    viewer = endpoint().replace("https://", "https://datasets-server.")
    asked = {"dataset": source.repository, "config": config, "split": split, "offset": start, "length": n}
    answer = hub.get(f"{viewer}/rows", params=asked, timeout=60)
    if not answer.ok:
        raise OSError(f"{answer.url}: HTTP {answer.status_code} {answer.text[:300]}")
    try:
        page = answer.json()
        numbers = [row["row_idx"] for row in page["rows"]]
        cut_off = any(row["truncated_cells"] for row in page["rows"])
        if page["num_rows_total"] != source.rows or numbers != [*range(start, start + n)] or cut_off:
            raise ValueError(f"other rows than asked for, or not of {source.rows:,}")
        return [row["row"] for row in page["rows"]]
    except (KeyError, TypeError, ValueError) as e:
        raise OSError(f"{answer.url}: {type(e).__name__}: {e}") from e


def rows_of_file(source: Source, file: str):
    """Yield (number, place in the file, row) of a data set that is one JSONL file, which is fetched first."""
    if not os.path.exists(file):
        fetch_file(f"{endpoint()}/datasets/{source.repository}/resolve/main/{source.what}", file)
    n = at = 0
    with open(file, "rb") as f:
        for line in f:
            yield n, at, json.loads(line)
            n += 1
            at += len(line)
    if n != source.rows:
        raise ValueError(f"{n:,} rows")


def fetch_file(url: str, file: str):
    """Bring a large file of the hub. FILE.part grows over retries and runs, until there is nothing left to
    ask for: status 416. Five failures in a row without a new byte are final."""
    os.makedirs(os.path.dirname(file), exist_ok=True)
    failures = 0
    with open(file + ".part", "ab") as f, session() as hub, tqdm(desc=file, unit="B", unit_scale=True) as bar:
        while failures < 5:
            have = f.tell()
            try:
                with hub.get(url, headers={"Range": f"bytes={have}-"}, stream=True, timeout=60) as answer:
                    if answer.status_code == 416:
                        break
                    if answer.status_code != 206:
                        raise OSError(f"{url}: HTTP {answer.status_code} {answer.reason}")
                    for chunk in answer.iter_content(1 << 16):
                        bar.update(f.write(chunk))
            except requests.RequestException as e:
                failures = 1 if f.tell() > have else failures + 1
                if failures == 5:
                    raise
                tqdm.write(f"{file}: {e}; trying again")
                time.sleep(2 ** failures)
    os.replace(file + ".part", file)


@functools.lru_cache(2)
def stored_tests(id: str, file: str, at: int) -> list[list[str]]:
    """[input, output] of each test of a LiveCodeBench problem, read from its row when they are needed: those
    of one problem can take hundreds of MB. Where the problem has a function, input is its arguments, each a
    line of JSON, and output its result."""
    try:
        with open(file, "rb") as f:
            f.seek(at)
            row = json.loads(f.readline())
        if id != f"livecodebench/{row['question_id']}":
            raise ValueError(f"there stands {row['question_id']}")
        hidden = row["private_test_cases"]
        if not hidden.startswith("["):
            hidden = unpack(hidden)
        tests = json.loads(row["public_test_cases"]) + json.loads(hidden)
        return [[test["input"], test["output"]] for test in tests]
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError, zlib.error) as e:
        raise ValueError(f"{file}, byte {at}: no tests of {id} ({type(e).__name__}: {e}); remove {DATA}/ and "
                         "fetch it again") from e


def unpack(text: str) -> str:
    """The string in base64 of zlib of pickle (lcb_runner/benchmarks/code_generation.py of LiveCodeBench). The
    pickle is not run but taken apart: besides one string and the marks around it nothing is admitted."""
    unzip = zlib.decompressobj()
    data = unzip.decompress(base64.b64decode(text, validate=True), TESTS_MAX)
    if not unzip.eof:
        raise ValueError(f"cut off, or more than {TESTS_MAX:,} bytes")
    marks = {op.name: value for op, value, _ in itertools.islice(pickletools.genops(data), 8)}
    strings = marks.keys() - {"PROTO", "FRAME", "MEMOIZE", "BINPUT", "LONG_BINPUT", "STOP"}
    known = strings < {"SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"}
    if len(strings) != 1 or not known or "STOP" not in marks:
        raise ValueError(f"a pickle of {', '.join(marks)}, not of one string")
    return marks[strings.pop()]


# -----------------------------------------------------------------------------------------------------------
# Problems in files, and the training mixes


def read_problems(file: str) -> list[Problem]:
    """A line is a JSON object with the strings question, answer, kind, and if wanted Problem's other fields;
    a kind named like a grader is graded by it."""
    if not os.path.exists(file):
        made = "; python eval.py prepare writes it" if file.startswith(DATA + os.sep) else ""
        raise FileNotFoundError(f"{file} is missing{made}")
    problems = []
    with open(file, "rb") as f:
        for n, line in enumerate(f, 1):
            try:
                problems.append(checked({"id": f"{os.path.basename(file)}/{n}", **json.loads(line)}))
            except (ValueError, TypeError, RecursionError) as e:
                raise ValueError(f"{file}, line {n}: {e}") from None
    if not problems:
        raise ValueError(f"{file} is empty")
    return problems


def checked(row: dict) -> Problem:
    """The problem that a line describes. ValueError or TypeError says what is wrong with it."""
    wrong = [key for key in ("id", "question", "answer", "kind") if not isinstance(row.get(key), str)]
    if wrong:
        raise ValueError(f"{', '.join(wrong)} missing or not a string")
    if row["kind"] in ASK:
        row.setdefault("grader", row["kind"])
    problem = Problem(**row)
    grader, extra = problem.grader, problem.extra
    if grader not in list(ASK):  # a list, as what stands there may not be hashable
        raise ValueError(f"no grader {grader!r}, there are {', '.join(ASK)}")
    if not isinstance(extra, dict):
        raise ValueError("extra is not an object")
    lacks = [key for key in EXTRA.get(grader, []) if key not in extra]
    if lacks:
        raise ValueError(f"the grader {grader} needs {', '.join(lacks)} in extra")
    if grader == "letter":
        choices = extra["choices"]
        if not texts(choices) or not 2 <= len(choices) <= len(LETTERS):
            raise ValueError(f"choices are 2 to {len(LETTERS)} texts")
        letters = list(LETTERS[:len(choices)])
        if problem.answer not in letters:
            raise ValueError(f"the answer {problem.answer!r} is none of the letters A to {letters[-1]}")
    if grader == "code" and not isinstance(extra["tests"], dict):
        tests = extra["tests"]
        pairs = isinstance(tests, list) and all(texts(test) and len(test) == 2 for test in tests)
        if not tests or not pairs:
            raise ValueError("tests are a list of pairs of texts, [input, output]")
    return problem


def texts(value) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def write_problems(file: str, problems: list[Problem]):
    """Write what read_problems reads, whole or not at all."""
    os.makedirs(os.path.dirname(file) or ".", exist_ok=True)
    with open(file + ".tmp", "w") as f:
        f.writelines(json.dumps(asdict(problem)) + "\n" for problem in problems)
    os.replace(file + ".tmp", file)


def prepare(pool: list):
    """Write the mixes (see the table above). With a pool, what gives no gradient is left out. No split has
    what another has."""
    candidates = {name: load(name, "train", CANDIDATES) for name in MIXES["paper"]}
    mix = []
    for name, n in MIXES["paper"].items():
        found = with_spread(name, candidates[name], pool) if pool else candidates[name]
        found = sorted(found, key=lambda problem: -problem.level)  # equals keep their order
        print(f"{name}: {min(n, len(found))} problems taken of {len(found)}, {n} wanted")
        mix += found[:n]
    if not mix:
        raise ValueError("no candidate is left: was every worker lost?")
    rng = random.Random(0)
    second = []
    for name, n in MIXES["recursion"].items():
        ours = [problem for problem in mix if problem.kind == name]
        second += rng.sample(ours, min(n, len(ours)))
    for name, problems in (("paper", mix), ("recursion", second)):
        file = os.path.join(DATA, name + ".jsonl")
        write_problems(file, interleave(problems, rng))
        print(f"{file}: {len(problems)} problems")
        levels = Counter(f"{p.kind}, level {p.level or 'unknown'}" for p in problems)
        for level, count in sorted(levels.items()):
            print(f"{count:7} {level}")


def with_spread(name: str, candidates: list[Problem], pool: list) -> list[Problem]:
    """The candidates that some of the workers solve alone and others do not: where all agree, no workflow's
    reward differs from another's by whom it asks. What a worker was lost on is left out too. ValueError once
    the budget is spent: nothing is written then, and what was answered is in the replay file."""
    print(f"{name}: asking {len(pool)} workers {len(candidates)} questions each")
    calls, spent = sum(w.calls for w in pool), sum(w.spent for w in pool)
    asked = everyone_alone(pool, candidates, "prepare")
    right = [grades(candidates, traces) for traces in asked]  # [worker][problem]
    if pool[0].budget and pool[0].budget.refused:
        raise ValueError("the budget is spent; with more of it, prepare goes on where it stopped")
    for worker, answers in zip(pool, right):
        print(f"{name}: {worker.name} solves {answers.count(True)} of {len(candidates)} candidates")
    kept, left_out = [], Counter()
    for problem, answers in zip(candidates, zip(*right)):
        if None in answers:
            left_out["a worker was lost"] += 1
        elif all(answers):
            left_out["all solve it"] += 1
        elif not any(answers):
            left_out["none solves it"] += 1
        else:
            kept.append(problem)
    why = ", ".join(f"{n} as {reason}" for reason, n in left_out.items())
    calls, spent = sum(w.calls for w in pool) - calls, sum(w.spent for w in pool) - spent
    unpriced = sum(w.unpriced for w in pool)
    print(f"{name}: left out {why or 'none'}; {calls:,} calls for ${spent:.2f}"
          f"{f', and {unpriced:,} so far at an unknown price' if unpriced else ''}")
    return kept


# -----------------------------------------------------------------------------------------------------------
# More tables


def students_t(freedom: int) -> float:
    """95 % of Student's t distribution lie within ± this. Where t = sqrt(freedom) tan(angle), the angle's
    density is cos(angle) ^ (freedom - 1), which is summed here."""
    width = math.pi / 2 / 200_000
    angles = (np.arange(200_000) + 0.5) * width
    mass = np.cumsum(np.cos(angles) ** (freedom - 1))
    angle = np.interp(0.95, mass / mass[-1], angles + width / 2)
    return math.sqrt(freedom) * math.tan(angle)


def table(problems: list[Problem], systems: dict[str, list[Trace | None]]) -> str:
    """A row for each system: the share of right answers over all and by kind, and mean calls."""
    rows = {}
    for name, traces in systems.items():
        counted = [t.calls if t else 0 for t in traces if not t or not t.error]
        calls = statistics.fmean(counted) if counted else None
        unknown = dict.fromkeys(["all", *(p.kind for p in problems)])
        rows[name] = {**unknown, **accuracies(problems, traces), "calls": calls}
    heads = {"all": 3, "calls": 2} | {p.kind: 2 for p in problems}
    return columns(rows, heads, f"accuracy, {len(problems)} problems")


def learned(problems: list[Problem], traces: list[Trace | None]) -> str:
    """For each kind the workflow most often written (who, seeing what), its share, and one example."""
    lines = []
    for kind in dict.fromkeys(p.kind for p in problems):
        asked = [t for p, t in zip(problems, traces) if p.kind == kind]
        found = {}
        for t in asked:
            if t:
                same = str((t.workers, [step.access for step in t.workflow.steps]))
                found.setdefault(same, []).append(t)
        if not found:
            continue
        commonest = max(found.values(), key=len)
        t = commonest[0]
        share = len(commonest) / len(asked)
        lines.append(f"{kind}: {counted(len(t.workers))}, written for {share:.0%}.  {t.question}")
        for step, worker, response in zip(t.workflow.steps, t.workers, t.responses):
            seen = " and ".join(str(i + 1) for i in step.access)
            sees = f", seeing step{'s' if len(step.access) > 1 else ''} {seen}" if seen else ""
            lines.append(f"    {worker}, told {step.subtask!r}{sees}: {response}")
    return "\n".join(lines)


def habits(traces: list[Trace | None]) -> dict:
    """Of a Conductor's workflows: the shares of their lengths and shapes in the first round (Fig. 8), and
    each worker's share of the steps by round (Figs. 7 and 10)."""
    rounds = [t.rounds() for t in traces if t]
    firsts = [found[0].workflow for found in rounds]
    numbers = {"lengths": shares_of([counted(len(workflow.steps)) for workflow in firsts]),
               "shapes": shares_of([shape(workflow) for workflow in firsts])}
    for r in range(max(map(len, rounds), default=0)):
        played = [found[r] for found in rounds if len(found) > r]
        names = itertools.chain(*(t.workers for t in played))
        numbers[f"workers, round {r + 1}"] = shares_of(names)
        if r == 1:  # how often three empty lists kept an answer
            numbers["kept"] = {}
            for was, told in ((True, "right"), (False, "wrong")):
                empty = [not t.replies for t in played if t.previous.right is was]
                if empty:
                    numbers["kept"][told] = statistics.fmean(empty)
    return numbers


def counted(steps: int) -> str:
    return "1 step" if steps == 1 else f"{steps} steps"


def shares_of(items) -> dict:
    counts = Counter(items)
    return {item: n / counts.total() for item, n in sorted(counts.items())}


# -----------------------------------------------------------------------------------------------------------
# The paper's numbers, and the command line

# Accuracy in %. Table 1: workers without limits; 2 and 7: workers of 4,096 tokens and least reasoning.
# average: of the first four.
PAPER = """
                               math500  mmlu   rlpr  livecodebench  aime25  bigcodebench  gpqa  average
Table 1: gemma-3-27b-it           39.8   81.3  16.67         13.14    20.7         14.86  38.4        -
Table 1: Qwen3-32B                73.5   83.5  31.00         21.21    20.0         30.41  64.1        -
Table 1: Qwen3-32B thinking       80.7   84.1  37.25         25.86    72.9         28.38  66.8        -
Table 1: R1-Distill-Qwen-32B      82.5   84.4  33.50         26.86    63.0         33.07  58.1        -
Table 1: Claude Sonnet 4          96.0   91.4  36.70         46.54    74.3         37.16  77.7        -
Table 1: Gemini 2.5 Pro           96.0   92.4  40.55         67.24    78.3         37.51  84.8        -
Table 1: GPT-5                    99.0   93.5  42.20         82.90    90.8         32.75  82.3        -
Table 1: Conductor                99.4   94.1  44.75         83.93    93.3         37.86  87.5        -
Table 2: best single worker          -      -      -             -   46.67         35.8  75.25        -
Table 2: Conductor                   -      -      -             -   66.67         37.8  81.31        -
Table 2: Conductor, recursive        -      -      -             -   66.67         40.0  82.32        -
Table 7: RouterDC                    -      -      -             -       -            -      -    52.41
Table 7: Smoothie                    -      -      -             -       -            -      -    56.48
Table 7: MASRouter                   -      -      -             -       -            -      -    56.89
Table 7: MoA                         -      -      -             -       -            -      -    62.13
Table 7: Gemini 2.5 Pro              -      -      -             -       -            -      -    64.14
Table 7: GPT-5, 5 reflections        -      -      -             -       -            -      -    64.52
Table 7: Conductor               89.33  93.14  42.63         64.29       -            -      -    72.35
"""


def in_the_paper(benchmark: str) -> dict[str, dict]:
    """The paper's rows about a benchmark, for `columns`."""
    head, *lines = PAPER.strip("\n").splitlines()
    names = head.split()
    rows = {}
    for line in lines:
        *words, cells = line[:30], line[30:].split()
        found = dict(zip(names, cells)).get(benchmark, "-")
        if found != "-":
            rows[words[0].strip()] = {"accuracy": float(found)}
    return rows


def average(files: list[str]) -> str:
    """The numbers that several evaluations wrote with --out, line by line: mean ± 95 % interval over the
    files."""
    runs = [read_json(file) for file in files]
    if not all(isinstance(row, dict) for numbers in runs for row in numbers.values()):
        raise ValueError("these are not what eval.py writes with --out")
    lines = [f"{'':<66}{'mean':>9} ± 95 % interval of the mean over {len(files)} files, by Student's t"]
    for system in runs[0]:
        found = [dict(flat(run.get(system, {}))) for run in runs]
        for key in found[0]:
            values = [numbers.get(key) for numbers in found]
            if None not in values:  # else it is unknown, or not in every file
                mean, interval = statistics.fmean(values), spread(values)["95 % ±"]
                told = "  ".join(f"{v:.3f}" for v in values)
                lines.append(f"{system:<40}{key:<26}{mean:9.3f} ± {interval:.3f}   {told}")
    return "\n".join(lines)


def flat(numbers: dict, before: str = ""):
    """Yield (path, number or None) of all that a dict of dicts holds."""
    for key, value in numbers.items():
        if isinstance(value, dict):
            yield from flat(value, f"{before}{key}: ")
        else:
            yield before + key, value


LESSONS = 256  # train problems that the system router learns from


@dataclass
class Settings:
    checkpoint: str = "out/laptop/checkpoint"
    benchmarks: str = "laptop"  # or files, with commas between
    test: int = 224  # problems of each, or all that there are
    systems: str = "conductor,workers,random"  # of SYSTEMS; NAME:WORKER or conductor:DIR for one only
    repeats: int = 1
    pool: str = ""  # "": local; and `prepare` asks nobody
    only: str = ""  # some of its workers, by name, with commas between
    subset: int = 0  # each problem has its own workers, so many who can solve it (laptop world)
    one_worker: str = ""  # who does every step in the system one-worker; "" is the first
    examples: str = ""  # few-shot examples: ood, in, mixed (Table 4); "": as the Conductor was trained
    lessons: str = ""  # whose train problems the system router learns from; "": those of the benchmark itself
    rounds: int = 0  # of recursion, after the first workflow
    budget: float = 0.0  # dollars that the workers may cost; 0: no limit
    replay: str = ""  # a file that keeps the replies, so that nobody pays twice for what is started again
    out: str = ""  # a file for the numbers, as JSON


cached_conductor = functools.lru_cache(1)(load_conductor)


def play(s: Settings, data: str, name: str, who: str, problems: list, pools: list[list], repeat: int) -> list:
    """One repeat of a system on a benchmark: its trace of every problem. who: the checkpoint of a Conductor,
    else the worker who plays."""
    pool = pools[0]
    k = next((i for i, w in enumerate(pool) if w.name == who), 0)
    tag = f"{name}:{who}/{repeat}"
    examples = {"examples": s.examples} if s.examples else {}
    if name == "seat":  # where the format is wrong, the paper tries again without end
        write, prompting = seated(pool[k], f"{tag}/seat"), Prompting(**examples)
        return run_conductor(write, problems, pools, tag, s.rounds, prompting, tries=10)
    if name == "router":
        lessons = load(s.lessons or data, "train", LESSONS)
        asked = everyone_alone(pool, lessons, tag)
        return run_system(train_router(pool, lessons, asked), problems, pool, 0, tag)
    if name not in CONDUCTORS:
        return run_system((BY_ONE | BY_ALL)[name], problems, pool, k, tag)
    model, tokenizer, prompting = cached_conductor(who or s.checkpoint)
    prompting = replace(prompting, **examples, **CONDUCTORS[name])
    if name == "shuffled":
        pools = [team[1:] + team[:1] for team in pools]
    only = next((i for i, w in enumerate(pool) if w.name == s.one_worker), 0)

    def by_one_worker(workflow):
        return Workflow([replace(step, worker=only) for step in workflow.steps], workflow.completion)

    write = sampled(model, tokenizer, prompting, 0.0)
    edit = by_one_worker if name == "one-worker" else None
    return run_conductor(write, problems, pools, tag, s.rounds, prompting, edit=edit)


def check(s: Settings, names: list[str]) -> list[tuple[str, str]]:
    """What would fail late fails here, before any worker is asked. Returns the systems that are wanted, as
    (name, who)."""
    if min(s.test, s.repeats) < 1 or min(s.rounds, s.subset, s.budget) < 0:
        raise ValueError("--test and --repeats are from 1 on, --rounds, --subset and --budget from 0 on")
    if os.path.isdir(s.out):
        raise ValueError(f"--out={s.out}: a folder, where a file's name is wanted")
    os.makedirs(os.path.dirname(s.out) or ".", exist_ok=True)
    if s.one_worker not in ("", *names):
        raise ValueError(f"--one_worker={s.one_worker}: the pool has {', '.join(names)}")
    if s.examples not in ("", "ood", "in", "mixed"):
        raise ValueError(f"--examples={s.examples}: there are ood, in, mixed")
    if s.subset and (s.benchmarks != "laptop" or (s.pool or "local") not in LOCAL):
        raise ValueError("--subset is for --benchmarks=laptop and local pools, whose skills are known")
    taken = {*names} & {*SYSTEMS, "random workflows"}
    if taken:
        raise ValueError(f"a worker of the pool has a system's name, {taken.pop()}: rename it")
    for data in s.benchmarks.split(","):
        if not has_split(data, "test"):
            load(data, "test")  # which says what there is
    wanted = []
    for word in s.systems.split(","):
        name, _, who = word.strip().partition(":")
        by_one = name in BY_ONE or name == "seat"
        if name not in SYSTEMS:
            raise ValueError(f"--systems={word}: there are {', '.join(SYSTEMS)}")
        if who and name not in CONDUCTORS and not (by_one and who in names):
            raise ValueError(f"--systems={word}: the pool has {', '.join(names)}")
        if s.subset and (name not in CONDUCTORS or name == "one-worker"):
            raise ValueError(f"--subset is for the Conductor (--systems=conductor), not for {name}")
        if name == "best-single" and not {("workers", w) for w in names} <= {*wanted}:
            raise ValueError("best-single is the best of workers, which must have answered before: "
                             "--systems=workers,best-single")
        if name == "router":
            for data in [s.lessons] if s.lessons else s.benchmarks.split(","):
                is_test = data.endswith(".jsonl") and not s.lessons
                if is_test or not has_split(data, "train"):
                    raise ValueError(f"router learns from train problems, and {data} has none: name others, "
                                     "say --lessons=mmlu or --lessons=FILE.jsonl")
        wanted += [(name, w) for w in names] if by_one and not who else [(name, who)]
    for name, who in wanted:
        folder = who or s.checkpoint
        if name in CONDUCTORS and not os.path.exists(os.path.join(folder, "config.json")):
            raise FileNotFoundError(f"no checkpoint in {folder}: train.py makes one, or name another with "
                                    "--checkpoint=DIR")
    return wanted


def after(traces: list[Trace | None], rounds: int) -> list[Trace | None]:
    """What the traces were after so many further rounds, or as many as there were."""
    found = []
    for trace in traces:
        if trace:
            turns = trace.rounds()
            trace = turns[min(rounds, len(turns) - 1)]
        found.append(trace)
    return found


def run_wanted(s: Settings, data: str, problems: list[Problem], pools: list, wanted: list) -> dict[str, list]:
    """Traces [repeat][problem] of every wanted system, under the names that tables show."""
    runs = {}
    for name, who in wanted:
        if name == "best-single":  # in hindsight
            scores = {w.name: measure(problems, runs[w.name])["accuracy"] or 0.0 for w in pools[0]}
            best = max(scores, key=scores.get)
            runs[f"best-single {best}"] = runs[best]
            continue
        repeats = [play(s, data, name, who, problems, pools, i) for i in range(s.repeats)]
        label = {"workers": who, "random": "random workflows"}.get(name, f"{name} {who}".strip())
        recursive = name in CONDUCTORS or name == "seat"
        for r in range(s.rounds + 1 if recursive else 1):
            runs[f"{label}, {r} more" if r else label] = [after(traces, r) for traces in repeats]
    return runs


def report(data: str, problems: list[Problem], runs: dict[str, list], beside: dict) -> dict[str, dict]:
    """Print what a benchmark's runs come to, above rows to compare with. Returns name -> numbers."""
    rows = {name: measure(problems, repeats) for name, repeats in runs.items()}
    first_repeat = {name: repeats[0] for name, repeats in runs.items()}
    print(table(problems, first_repeat), end="\n\n")
    print(columns(rows | beside, MEASURED, data), end="\n\n")
    for name, repeats in runs.items():
        lost = [t.error for traces in repeats for t in traces if t and t.error]
        if lost:
            print(f"{name}: {len(lost)} not counted, as their workers were lost: {lost[0]}")
    most_rounds = {re.sub(r", \d+ more$", "", name): traces for name, traces in first_repeat.items()}
    for name, traces in most_rounds.items():
        if name.split()[0] in (*CONDUCTORS, "seat"):
            found = habits(traces)
            rows[name] |= found
            for key, shares in found.items():
                told = [f"{item} {share:.0%}" for item, share in shares.items()]
                print(f"{name}, {key}: {', '.join(told)}")
    if "conductor" in runs:
        print(learned(problems, first_repeat["conductor"]), end="\n\n")
    return rows


def evaluate(s: Settings, pool: list):
    """Measure every wanted system on every benchmark, and print the tables."""
    wanted = check(s, [w.name for w in pool])
    tests = {data: load(data, "test", s.test) for data in s.benchmarks.split(",")}
    for data, problems in tests.items():
        if ("router", "") in wanted:
            load(s.lessons or data, "train", LESSONS)
        if len(problems) < s.test:
            print(f"{data}: {len(problems)} problems are all there are (--test={s.test})")
    if any(p.grader in ("code", "unittest") for problems in tests.values() for p in problems):
        run_code("pass", None, [""], 60)  # says what the sandbox lacks
    numbers = {}
    for data, problems in tests.items():
        rng = random.Random(0)
        pools = [draw_pool(p, pool, s.subset, rng) if s.subset else pool for p in problems]
        beside = in_the_paper(data)
        if data == "laptop" and (s.pool or "local") in LOCAL:
            best = statistics.fmean(map(possible, problems, pools))
            beside = {"best workflows": {"accuracy": 100 * best}}
        rows = report(data, problems, run_wanted(s, data, problems, pools, wanted), beside)
        numbers |= {f"{data}, {name}": row for name, row in {**rows, **beside}.items()}
        if s.out:  # here and at the end
            write_json(s.out, numbers)
    four = list(MIXES["paper"])
    means = {}
    for name in rows:  # Table 7
        found = [numbers.get(f"{data}, {name}", {}).get("accuracy") for data in four]
        if None not in found:
            means[name] = {"accuracy": statistics.fmean(found)}
    if means:
        numbers |= {f"average, {name}": row for name, row in means.items()}
        print(columns(means | in_the_paper("average"), {"accuracy": 2}, f"average of {', '.join(four)}"))
    if s.out:
        write_json(s.out, numbers)


def main(argv):
    s = Settings()
    words = configure(s, argv)
    try:
        if words[:1] == ["average"] and len(words) > 2:
            return print(average(words[1:]))
        if words not in ([], ["prepare"]):
            raise SystemExit(__doc__)
        pool = []
        if words and s.pool:
            os.makedirs(DATA, exist_ok=True)
            s.replay = s.replay or os.path.join(DATA, "replies")
        if not words or s.pool:
            pool = subset(load_pool(s.pool or "local", replay=s.replay, budget=s.budget), s.only)
        lacks = [f"${w.api_key_env} for {w.name}" for w in pool if
                 w.api_key_env and not os.environ.get(w.api_key_env)]
        lacks += [f"{w.url} for {w.name}" for w in pool if w.url.startswith("$")]
        if lacks:
            raise ValueError(f"--pool={s.pool}: set {', '.join(lacks)} in the environment")
        if words:
            prepare(pool)
        else:
            evaluate(s, pool)
        if pool and pool[0].budget and pool[0].budget.refused:
            raise SystemExit(f"the budget of ${s.budget:g} is spent: what came after is not counted above")
    except (OSError, ValueError, WorkerError) as e:
        raise SystemExit(f"{type(e).__name__}: {e}") from None
    except KeyboardInterrupt:
        raise SystemExit("interrupted") from None


if __name__ == "__main__":
    main(sys.argv[1:])
