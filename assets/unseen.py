"""Measure how well Conductors that read notes do with pools that they were not trained on.

    python train.py --preset=unseen
    python assets/unseen.py out/unseen/checkpoint      # or several checkpoints

The Conductors answer held-out questions of the laptop world or, in the last test, new questions.
Each question gets a pool of its own, in a random order. What a pool holds depends on the test:

* orders: the five workers of training, for comparison with the other tests;
* three workers: those that the question needs, and random others (training has four or five);
* seven workers: the five workers of training, and a second worker for each of two trades;
* reworded: the five workers of training, but with notes in other words;
* name first: the same five, with notes that give the worker's name first instead of last;
* fifth trade: the four trades and a sorter, whose note, instruction and questions are all new.

A Conductor that does not read notes sees only numbers, so it can only guess who is who.
"""

import argparse
import collections
import copy
import os
import random
import statistics
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import eval as evaluation  # noqa: E402
import workers  # noqa: E402
from workflow import load_conductor, model_writer  # noqa: E402

N_HELD_OUT = 225
N_SORTING = 25  # questions of each kind for the fifth trade
SORT = "Sort its letters."
KINDS = {
    **workers.KINDS,
    "sorting": (["sorter"], {}),
    "capital+sorting": (["librarian", "sorter"], {}),
}
WORDINGS = {  # test -> (the note of a worker with a trade, the note of the generalist)
    "reworded": ("When it hears {orders}, it obeys like any {name}", "It guesses like any {name}"),
    "name first": ("A {name}, who obeys {orders}", "A {name}, who guesses"),
}
TESTS = ("orders", "three workers", "seven workers", *WORDINGS, "fifth trade")


def add_the_fifth_trade():
    workers.PHRASES += (SORT,)
    workers.TRADES["sorter"] = (r"\b(\w+) sorted", {SORT: lambda m: in_order(m[1])})


def in_order(word: str) -> str:
    return "".join(sorted(word.lower()))


def sorter(messages: list[dict]) -> str:
    """Answer a chat as a worker of the laptop world whose trade is sorting."""
    return workers.specialist("sorter", messages)


def sorting_problems() -> list[evaluation.Problem]:
    """Return problems for the sorter alone, and problems for the librarian and then the sorter."""
    rng = random.Random(0)
    words = {word: word for word in workers.WORDS}
    problems = []
    for kind, values in (("sorting", words), ("capital+sorting", workers.CITIES)):
        for expression in rng.sample(sorted(values), N_SORTING):
            question = rng.choice(workers.FRAMES).format(f"{expression} sorted")
            answer = in_order(values[expression])
            problem_id = f"sorting/{expression}"
            problems.append(evaluation.Problem(problem_id, question, answer, "exact", kind))
    return problems


def reworded(worker: workers.Worker, test: str) -> workers.Worker:
    """Return a copy of a worker, with a note in the test's words."""
    for_trade, for_generalist = WORDINGS[test]
    orders = [f'"{order}"' for order in workers.TRADES.get(worker.name, ("", {}))[1]]
    wording = for_trade if orders else for_generalist
    worker = copy.copy(worker)
    worker.note = wording.format(orders=" or ".join(orders), name=worker.name)
    return worker


def pool_for(problem: evaluation.Problem, test: str, pool: list, fifth: workers.Worker) -> list:
    """Return the workers that a test gives to a problem, in a random but reproducible order."""
    rng = random.Random(f"{test} {problem.id}")
    if test == "three workers":
        needed = [worker for worker in pool if worker.name in KINDS[problem.kind][0]]
        others = [worker for worker in pool if worker not in needed]
        pool = needed + rng.sample(others, 3 - len(needed))
    elif test == "seven workers":
        pool = pool + rng.sample(pool[:-1], 2)  # pool[-1] is the generalist
    elif test == "fifth trade":
        pool = pool[:-1] + [fifth]
    elif test in WORDINGS:
        pool = [reworded(worker, test) for worker in pool]
    return rng.sample(pool, len(pool))


def steps_of(rollout) -> list[tuple[str, str]]:
    """Return (worker's name, subtask) for each step of a rollout's workflow."""
    steps = rollout.workflow.steps if rollout.workflow else []
    return [(rollout.pool[step.worker].name, step.subtask) for step in steps]


def print_habits(rollouts: list):
    """Print how many workflows ask the sorter, how many tell it to sort, and common last steps."""
    plans = [steps_of(rollout) for rollout in rollouts]
    asked = sum(any(name == "sorter" for name, _ in plan) for plan in plans)
    told = sum(("sorter", SORT) in plan for plan in plans)
    print(f"  {asked} of {len(plans)} workflows ask the sorter; {told} tell it to sort")
    last = collections.Counter(plan[-1] for plan in plans if plan)
    for (name, subtask), count in last.most_common(5):
        print(f"  {count:3} end with: {name}, {subtask}")


def main(checkpoints: list[str]):
    add_the_fifth_trade()
    pool = workers.load_pool("local")
    note = f'Tell it "{SORT}"; it is a sorter'
    fifth = workers.Worker("python", function=f"{__file__}:sorter", note=note)
    held_out = evaluation.load("laptop", "test", N_HELD_OUT)

    accuracies = collections.defaultdict(list)  # test -> the accuracy of each checkpoint, in %
    for checkpoint in checkpoints:
        print(checkpoint)
        model, tokenizer, prompting = load_conductor(checkpoint)
        write = model_writer(model, tokenizer, prompting, temperature=0.0)
        system = evaluation.conductor(write, prompting.max_steps)
        for test in TESTS:
            problems = sorting_problems() if test == "fifth trade" else held_out
            pools = [pool_for(problem, test, pool, fifth) for problem in problems]
            rollouts = system(problems, pools, test)
            row = evaluation.measure(rollouts)
            kinds = [f"{kind} {row[kind]:.0%}" for kind in dict.fromkeys(p.kind for p in problems)]
            print(f"{test:14} {row['accuracy']:6.1%}  {', '.join(kinds)}", flush=True)
            accuracies[test].append(100 * row["accuracy"])
            if test == "fifth trade":
                print_habits(rollouts)

    if len(checkpoints) > 1:
        print("mean and standard deviation over the checkpoints, in %")
        for test, values in accuracies.items():
            print(f"{test:14} {statistics.mean(values):6.1f} ± {statistics.stdev(values):.1f}")


if __name__ == "__main__":
    page = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=page)
    parser.add_argument("checkpoints", nargs="+", help="folders with trained Conductors")
    main(parser.parse_args().checkpoints)
