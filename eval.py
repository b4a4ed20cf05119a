"""Problems, graders, baselines and tables.

    python eval.py --checkpoint=DIR      the Conductor beside every single worker and random workflows, on held-out problems
    python eval.py plot RUN              draw a run's learning curve into RUN/curve.png (needs matplotlib)

The laptop world's problems are generated here: some need one of the local specialists (workers.py), some two, some three in the right
order and with the right access lists. Read train.py next.
"""
import json
import math
import os
import random
import re
import sys
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from tqdm import tqdm

from model import Qwen, Tokenizer, configure
from sample import generate
from workers import ARITHMETIC, CAPITALS, ELEMENTS, FACTS, SPANISH, SPELLING, WorkerError, load_pool
from workflow import Step, Trace, Workflow, WorkflowError, conductor_settings, messages, parse, submit

# ---------------------------------------------------------------------------------------------------------------------------------
# Problems


@dataclass
class Problem:
    id: str
    question: str
    answer: str
    kind: str  # how it is graded, and what tables group by


def laptop_expressions() -> dict[str, list[tuple[str, str]]]:
    """Every (expression, value) of the laptop world by kind, in a fixed order."""
    words = ("planet river garden window market silver dragon castle forest bridge winter summer orange yellow purple candle basket "
             "rocket guitar violin doctor farmer sailor pirate monkey rabbit turtle spider butter cheese pepper ginger cotton velvet marble "
             "copper bronze tunnel harbor island desert valley meadow canyon glacier volcano thunder shadow mirror").split()
    number = {e: FACTS[f"the atomic number of {e}"] for e in ELEMENTS}

    def apply(a, op, b):
        return str(ARITHMETIC[op](int(a), int(b)))

    return {
        # one specialist
        "arithmetic": [(f"{a} {op} {b}", apply(a, op, b)) for a in range(2, 40) for b in range(2, 40) for op in ARITHMETIC],
        "fact": list(FACTS.items()),
        "string": [(f"{w} {op}", f(w)) for w in words for op, f in SPELLING.items()],
        "number": list(SPANISH.items()),
        # two, each seeing the one before
        "foreign": [(f"{a} {op} {b}", apply(SPANISH[a], op, SPANISH[b])) for a in SPANISH for b in SPANISH for op in ARITHMETIC],
        "fact+arithmetic": [(f"the atomic number of {e} {op} {b}", apply(number[e], op, b))
                            for e in ELEMENTS for b in range(2, 40) for op in ARITHMETIC],
        "fact+string": [(f"the capital of {c} {op}", f(CAPITALS[c])) for c in CAPITALS for op, f in SPELLING.items()],
        # three
        "foreign+fact+arithmetic": [(f"the atomic number of {e} {op} {b}", apply(number[e], op, SPANISH[b]))
                                    for e in ELEMENTS for b in SPANISH for op in ARITHMETIC],
    }


def laptop_problems(split: str) -> list[Problem]:
    """The laptop world: a quarter of each kind's expressions is for "test", the others for "train", whatever the sentence around them."""
    problems = []
    for kind, pairs in laptop_expressions().items():
        for expression, value in pairs:
            if (zlib.crc32(expression.encode()) % 4 == 0) == (split == "test"):
                problems += [Problem(f"{kind}/{expression}/{i}", frame.format(expression), value, kind)
                             for i, frame in enumerate(("What is {}?", "Find {}.", "Tell me {}.", "Give me {}."))]
    return problems


def load(name: str, split: str, limit: int | None = None) -> list[Problem]:
    """Problems of a data set: "laptop" ("train" or "test"). They are shuffled by a fixed seed with the kinds taking turns, so that a
    slice of a multiple of the number of kinds holds each equally often."""
    if name != "laptop" or split not in ("train", "test"):
        raise ValueError(f"no problems {name!r}, split {split!r}: there is 'laptop' with 'train' and 'test'")
    return interleave(laptop_problems(split), random.Random(0))[:limit]


def interleave(problems: list[Problem], rng: random.Random) -> list[Problem]:
    """Shuffle, with the kinds taking turns for as long as the smallest lasts; a small kind starts again until the largest is through."""
    kinds = {}
    for p in problems:
        kinds.setdefault(p.kind, []).append(p)
    for group in kinds.values():
        rng.shuffle(group)
    most = max(map(len, kinds.values()))
    return [group[i % len(group)] for i in range(most) for group in kinds.values()]


# ---------------------------------------------------------------------------------------------------------------------------------
# Graders


def grade(problem: Problem, response: str) -> bool:
    """Whether a response answers the problem: what stands in its last <answer> tag, or all of it, is the answer to the letter."""
    tagged = re.findall(r"<answer>(.*?)</answer>", response, re.DOTALL)
    return (tagged[-1] if tagged else response).strip() == problem.answer


# ---------------------------------------------------------------------------------------------------------------------------------
# Random workflows: a baseline, and what the warm start of a tiny Conductor is made of

PHRASES = ("Work it out.", "Simplify it.", "Find the value.", "Rewrite the question.", "Process the text.", "Name the word.")


def random_workflow(rng: random.Random, n_workers: int, max_steps: int = 5) -> Workflow:
    """1 to max_steps steps, short ones more often; each a random worker, a random phrase, and nine times in ten all that came before."""
    steps = min(rng.randint(1, max_steps), rng.randint(1, max_steps))
    return Workflow([Step(rng.randrange(n_workers), rng.choice(PHRASES), list(range(i)) if rng.random() < 0.9 else [])
                     for i in range(steps)])


def random_completion(question: str, rng: random.Random, n_workers: int, max_steps: int = 5) -> str:
    """A completion in the Conductor's format that says nothing about which workflow is good: its plan is to answer the question.

    The number of steps stands behind the workers, where it follows from them and helps to write two more lists of that length. Whether
    another step is needed is thus decided worker by worker."""
    workflow = random_workflow(rng, n_workers, max_steps)
    workers, others = workflow.text().split("\n", 1)
    return f"Plan: {question}\n{workers} # {len(workflow.steps)} steps\n{others}"


# ---------------------------------------------------------------------------------------------------------------------------------
# Systems: everything that answers gives one trace a problem, or None where what it wrote is no workflow


def conduct(model: Qwen, tokenizer: Tokenizer, problems: list[Problem], pool, style: str, max_steps: int, max_new_tokens: int,
            change=lambda workflow: workflow) -> list[Trace | None]:
    """The Conductor's greedy workflow for each problem, run. `change` may rewrite a workflow before it runs (ablations)."""
    prompts, running = [tokenizer.chat(messages(p.question, len(pool), max_steps, style=style)) for p in problems], {}

    def start(i, _, completion):
        try:
            running[i] = submit(change(parse(tokenizer.decode(completion.tokens), len(pool), max_steps)), problems[i].question, pool)
        except WorkflowError:
            running[i] = None

    for first in tqdm(range(0, len(problems), 64), "the Conductor", disable=None, leave=False):
        generate(model, prompts[first:first + 64], 1, max_new_tokens, 0.0, eos_id=tokenizer.eos_id, n_ids=len(tokenizer),
                 on_finish=lambda i, *rest: start(first + i, *rest))
    return [running[i] and running[i].result() for i in range(len(problems))]


def alone(worker, problem: Problem) -> Trace:
    """The trace of a worker asked without a Conductor: one turn, the bare question."""
    trace = Trace(problem.question, Workflow([Step(0, problem.question, [])]), [worker.name], [None])
    try:
        trace.replies[0] = worker.chat([{"role": "user", "content": problem.question}])
    except WorkerError as e:
        trace.error = str(e)
    return trace


def baselines(problems: list[Problem], pool, max_steps: int = 5) -> dict[str, list[Trace]]:
    """Traces of every single worker and of random workflows."""
    rng, systems = random.Random(0), {}
    with ThreadPoolExecutor(16) as threads:
        for worker in tqdm(pool, "single workers", disable=None, leave=False):
            systems[worker.name] = list(threads.map(lambda p: alone(worker, p), problems))
    futures = [submit(random_workflow(rng, len(pool), max_steps), p.question, pool) for p in problems]
    return {**systems, "random workflows": [f.result() for f in futures]}


def accuracies(problems: list[Problem], traces: list[Trace | None]) -> dict[str, float]:
    """Share of right answers, over all and by kind. A problem whose workers were lost counts for nobody."""
    right = {}
    for p, t in zip(problems, traces):
        if not (t and t.error):
            for key in ("all", p.kind):
                right.setdefault(key, []).append(t is not None and grade(p, t.answer))
    return {key: sum(values) / len(values) for key, values in right.items()}


def table(problems: list[Problem], systems: dict[str, list[Trace | None]]) -> str:
    """A text table: accuracy over all and by kind, and mean calls, a row for each system."""
    kinds = list(dict.fromkeys(p.kind for p in problems))
    lines = [f"{f'accuracy, {len(problems)} problems':<24}{'all':>6}{'calls':>7}  " + "  ".join(kinds)]
    for name, traces in systems.items():
        share, calls = accuracies(problems, traces), sum(t.calls for t in traces if t) / len(traces)
        cells = [f"{share[k]:{len(k)}.2f}" if k in share else f"{'?':>{len(k)}}" for k in kinds]  # ?: all its calls were lost
        lines.append(f"{name:<24}{share['all'] if share else math.nan:6.3f}{calls:7.2f}  " + "  ".join(cells))
    return "\n".join(lines)


def learned(problems: list[Problem], traces: list[Trace | None]) -> str:
    """For each kind the workflow shape most often written (who, seeing what), its share, and one example."""
    lines, shapes = [], {}
    for p, t in zip(problems, traces):
        if t:
            shape = tuple(t.workers), tuple(tuple(step.access) for step in t.workflow.steps)
            shapes.setdefault(p.kind, {}).setdefault(shape, []).append(t)
    for kind, found in shapes.items():
        t, *others = max(found.values(), key=len)
        share = (1 + len(others)) / sum(p.kind == kind for p in problems)
        lines.append(f"{kind}: {len(t.workers)} step{'s'[:len(t.workers) > 1]}, written for {share:.0%}.  {t.question}")
        for step, worker, response in zip(t.workflow.steps, t.workers, t.responses):
            sees = f", seeing step{'s'[:len(step.access) > 1]} {' and '.join(str(i + 1) for i in step.access)}" if step.access else ""
            lines.append(f"    {worker}, told {step.subtask!r}{sees}: {response}")
    return "\n".join(lines)


def plot(folder: str):
    """Accuracy over a run's iterations, over all and by kind, into folder/curve.png."""
    with open(os.path.join(folder, "metrics.jsonl")) as f:
        lines = [json.loads(line) for line in f]
    if not lines:
        raise ValueError(f"{folder}/metrics.jsonl is empty: the run has not finished an iteration")
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        raise SystemExit("drawing needs matplotlib: pip install matplotlib") from None
    plt.switch_backend("Agg")

    def smooth(values, span=10):  # mean of the last `span`
        return [sum(values[max(0, i - span + 1):i + 1]) / len(values[max(0, i - span + 1):i + 1]) for i in range(len(values))]

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for kind in lines[0]["by_kind"]:
        axes.plot(smooth([line["by_kind"].get(kind, 0.0) for line in lines]), linewidth=1.2, label=kind)
    axes.plot(smooth([line["accuracy"] for line in lines]), color="black", linewidth=2.4, label="all")
    axes.set(xlabel="iteration", ylabel="accuracy of sampled workflows (mean of 10 iterations)", ylim=(0, 1))
    axes.legend(fontsize=8)
    figure.savefig(os.path.join(folder, "curve.png"), dpi=120)
    print(os.path.join(folder, "curve.png"))


@dataclass
class Settings:
    checkpoint: str = "out/laptop/checkpoint"
    data: str = "laptop"
    test: int = 224  # problems
    pool: str = "local"
    shuffle: bool = False  # every worker has another's number: what a Conductor knows of its workers is gone


def main(argv):
    s = Settings()
    words = configure(s, argv)
    try:
        if words[:1] == ["plot"] and len(words) == 2:
            return plot(words[1])
        if words:
            raise SystemExit(__doc__)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        problems, plan = load(s.data, "test", s.test), conductor_settings(s.checkpoint)
        tokenizer = Tokenizer.from_pretrained(s.checkpoint)
        model = Qwen.from_pretrained(s.checkpoint, torch.bfloat16 if device == "cuda" else torch.float32, device)
        pool = load_pool(s.pool)
        seated = pool[1:] + pool[:1] if s.shuffle else pool
        traces = conduct(model, tokenizer, problems, seated, plan["style"], plan["max_steps"], plan["max_new_tokens"])
        print(table(problems, {"Conductor": traces, **baselines(problems, pool, plan["max_steps"])}) + "\n\n" + learned(problems, traces))
    except (OSError, ValueError, WorkerError) as e:
        raise SystemExit(f"{type(e).__name__}: {e}") from None
    except KeyboardInterrupt:
        raise SystemExit("interrupted") from None


if __name__ == "__main__":
    main(sys.argv[1:])
