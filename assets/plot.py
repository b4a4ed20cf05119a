"""Draw the results of train.py and eval.py. Needs matplotlib: pip install matplotlib.

    python assets/plot.py RUN            RUN/curve.png: accuracy, steps, workers (Figs. 3, 7, 8)
    python assets/plot.py RUN RUN ...    accuracy.png: the accuracy of several runs
    python assets/plot.py workflows RUN  RUN/workflows.png: the commonest workflow in 4 iterations
    python assets/plot.py subtasks RUN   RUN/subtasks.png: the share of each worker's usual subtasks
    python assets/plot.py FILE.json ...  FILE.png: cost and accuracy, from eval.py --out=FILE.json

RUN is the --out folder of a train.py run. With several RUNs or FILEs, NAME=RUN or NAME=FILE.json
sets the name shown in the picture. --out=PICTURE.png or --out=PICTURE.svg writes the picture to
that file instead."""

import glob
import itertools
import json
import math
import os
import sys
import textwrap
from collections import Counter
from statistics import mean, mode, stdev

if __name__ == "__main__" and {"-h", "--help"} & {*sys.argv[1:]}:
    raise SystemExit(print(__doc__))

try:
    import matplotlib.pyplot as plt
    from matplotlib.patches import FancyBboxPatch
except ImportError:
    raise SystemExit("drawing needs matplotlib: pip install matplotlib") from None

INKS = [
    "#2166ac",
    "#d07a1f",
    "#8e5aa8",
    "#a08a00",
    "#3a8fb0",
    "#c2528b",
    "#7a5c48",
]  # the colours of workers and of runs; among evaluated systems, Conductors have the first one
DARK, GREY = "#222222", "#808080"
RIGHT, WRONG = "#1f7a4d", "#b3261e"  # these colours are not in INKS, so no worker has them
STYLE = {
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "text.color": DARK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "text.parse_math": False,
    "savefig.dpi": 150,
    "savefig.bbox": "tight",  # so that no text is cut off at an edge
    "savefig.pad_inches": 0.15,
    "backend": "agg",
}
DOT = dict(marker="o", markersize=7, markeredgecolor="white", clip_on=False, zorder=3)


def read(file: str):
    """Return the value in a JSON file, or a list of the values on the lines of a JSONL file."""
    if not os.path.exists(file) or not os.path.getsize(file):
        raise ValueError(f"{file} is missing or empty; a run writes it after its first iteration")
    with open(file, encoding="utf-8") as f:
        try:
            return json.load(f) if file.endswith(".json") else [json.loads(line) for line in f]
        except ValueError as e:
            raise ValueError(f"{file} is damaged, or still being written: {e}") from None


def named(word: str) -> tuple[str, str]:
    """Split NAME=PATH into (name, path). By default, the name comes from the path's last part.

    A word that is an existing path, such as out/lr=0.1, has no NAME=.

    >>> named("out/laptop.json")
    ('laptop', 'out/laptop.json')
    """
    is_path = "=" not in word or os.path.exists(word)
    name, _, path = ("", "", word) if is_path else word.partition("=")
    return name or os.path.splitext(os.path.basename(os.path.normpath(path)))[0], path


def rolling_mean(values: list) -> list[float]:
    """Return, for each value, the mean of the last ten known values up to it. None means unknown.

    >>> rolling_mean([None, 0.0, 1.0])
    [nan, 0.0, 0.5]
    """
    means, known = [], []
    for value in values:
        if value is not None:
            known.append(value)
        means.append(mean(known[-10:] or [math.nan]))
    return means


def label(axes, ends: list[tuple[float, float, str, str]]):
    """Write texts to the right of the axes, each joined to its point by a thin line.

    `ends` holds (y, x, text, ink) for each point. The texts are placed from the bottom up, each at
    the height of its point. If the text below is too close, a text goes higher; if the texts above
    would not fit below the top of the axes, it goes lower."""
    axes.figure.draw_without_rendering()  # lays out the axes, so that their height is known
    # The height of a line of text. Heights are fractions of the axes' height.
    gap = 0.17 * axes.figure.dpi / axes.get_window_extent().height
    low, high = axes.get_ylim()

    ordered = sorted(ends, key=lambda end: (end[0], -end[1]))  # so that the lines do not cross
    height = -1.0
    for n_above, (y, x, text, ink) in zip(reversed(range(len(ends))), ordered):
        height = max(height + gap, (y - low) / (high - low))
        height = min(height, 1 - n_above * gap)
        line = dict(arrowstyle="-", color=ink, linewidth=0.5, shrinkA=2, shrinkB=6, relpos=(0, 0.5))
        axes.annotate(
            text, (x, y), (1.02, height), "data", "axes fraction", line, color=ink, va="center"
        )


# ---- Runs


def held_out_curve(run: str, rows: list[dict]) -> tuple[list[int], list[float]]:
    """Return (iterations at which held-out accuracy is known, accuracies).

    The last point of a finished run is the accuracy in test.json, which train.py also prints in its
    final table."""
    points = {row["iteration"] + 1: row["held_out"] for row in rows if row["held_out"] is not None}
    if os.path.exists(f"{run}/test.json"):
        conductor = next(iter(read(f"{run}/test.json").values()))
        points[rows[-1]["iteration"] + 1] = conductor["accuracy"]
    return [*points], [*points.values()]


def draw_accuracy(axes, run: str, rows: list[dict], name: str, ink: str) -> list[tuple]:
    """Draw a run's held-out accuracy (bold) and training accuracy (thin).

    Return a list with one label for the curve, in the form that `label` takes."""
    training = [row["iteration"] + 1 for row in rows]
    sampled = rolling_mean([row["accuracy"] for row in rows])
    axes.plot(training, sampled, color=ink, linewidth=1, alpha=0.6)

    axes.set(
        xmargin=0, ylim=(0, 1), title="Accuracy: on held-out questions (bold), in training (thin)"
    )
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.yaxis.set_major_formatter("{x:.0%}")

    iterations, accuracies = held_out_curve(run, rows)
    if not iterations:
        return [(sampled[-1], training[-1], f"{name} {sampled[-1]:.0%} in training", ink)]
    axes.plot(iterations, accuracies, color=ink, linewidth=3, **DOT)
    return [(accuracies[-1], iterations[-1], f"{name} {accuracies[-1]:.1%}", ink)]


def draw_run(run: str) -> str:
    """Draw a run's accuracy, accuracy by kind of question, steps by kind, and workers' shares.

    Return the default name of the picture's file; `main` saves the picture."""
    rows = read(f"{run}/metrics.jsonl")
    kinds = {kind for row in rows for kind in row["by_kind"]}
    band = 0.3 + 0.2 * len(kinds)  # inches
    heights = (2.2, band, band, 1.6)
    figure = plt.figure(figsize=(8, sum(heights)), layout="constrained")
    top, right, steps, bottom = figure.subplots(4, sharex=True, height_ratios=heights)

    ends = draw_accuracy(top, run, rows, "all kinds", DARK)
    if os.path.exists(f"{run}/test.json"):
        ends += draw_best_worker(top, read(f"{run}/test.json"), rows[-1]["iteration"] + 1)
    draw_bands(right, rows, "by_kind", "Accuracy by kind of question", "Blues", 1, "{:.0%}")
    draw_bands(steps, rows, "steps_by_kind", "Steps of a workflow", "Greys", 4, "{:.1f}")
    label(top, ends)
    draw_worker_shares(bottom, rows)
    return f"{run}/curve.png"


def draw_best_worker(axes, tested: dict, last: int) -> list[tuple]:
    """Draw the accuracy of the best single worker as a dashed line.

    Return a list with a label for the line, in the form that `label` takes. If no worker was
    measured alone, draw nothing and return []."""
    alone = {
        name.rpartition(", workers ")[2]: row["accuracy"] or 0
        for name, row in tested.items()
        if ", workers " in name
    }
    if not alone:
        return []
    best = max(alone, key=alone.get)
    axes.axhline(alone[best], color=GREY, linestyle="--", linewidth=1.2)
    return [(alone[best], last, f"{best} alone {alone[best]:.1%}", GREY)]


def draw_bands(axes, rows: list[dict], key: str, title: str, shades: str, most: float, form: str):
    """Draw a band for each kind of question, with the band's last value written to its right.

    Each value is a mean of the last ten known values. A larger value is drawn darker.

    key: The metric to draw, a dict from kind to value in each row of metrics.jsonl.
    most: The value that gets almost the darkest shade.
    form: The format of the last value."""
    kinds = list(dict.fromkeys(kind for row in rows for kind in row[key]))
    means = [rolling_mean([row[key].get(kind) for row in rows]) for kind in kinds]
    start, end = rows[0]["iteration"], rows[-1]["iteration"] + 1
    axes.imshow(
        means,
        shades,
        aspect="auto",
        interpolation="nearest",
        vmin=-0.08 * most,
        vmax=1.2 * most,
        extent=(start + 0.5, end + 0.5, len(kinds) - 0.5, -0.5),
    )
    axes.set_title(title)
    axes.set_yticks(range(len(kinds)), kinds)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    for i, values in enumerate(means):
        axes.axhline(i + 0.5, color="white", linewidth=2)
        text = form.format(values[-1]).replace("nan", "?")
        axes.annotate(text, (1.02, i), xycoords=("axes fraction", "data"), va="center")


def draw_worker_shares(axes, rows: list[dict]):
    """Draw each worker's share of all steps, stacked."""
    iterations = [row["iteration"] + 1 for row in rows]
    inks = worker_inks(rows)
    shares = [rolling_mean([row["workers"].get(name, 0) for row in rows]) for name in inks]
    if inks:  # empty if the run never wrote a valid workflow
        axes.stackplot(iterations, shares, colors=inks.values(), alpha=0.75, edgecolor="white")
    axes.set(
        ylim=(0, 1),
        title="Workers' shares of the steps",
        xlabel="iteration (means of the last ten)",
    )
    axes.yaxis.set_major_formatter("{x:.0%}")

    ends, height = [], 0
    for name, (*_, share) in zip(inks, shares):
        ends.append((height + share / 2, iterations[-1], f"{name} {share:.0%}", inks[name]))
        height += share
    label(axes, ends)


def worker_inks(rows: list[dict]) -> dict[str, str]:
    names = sorted({name for row in rows for name in row["workers"]})
    return dict(zip(names, itertools.cycle(INKS)))


def compare_runs(words: list[str]) -> str:
    """Draw the accuracies of several runs in one picture, and print the results of finished runs.

    Return the default name of the picture's file; `main` saves the picture."""
    axes = plt.figure(figsize=(8, 4), layout="constrained").add_subplot()
    ends = []
    for (name, run), ink in zip(map(named, words), itertools.cycle(INKS)):
        ends += draw_accuracy(axes, run, read(f"{run}/metrics.jsonl"), name, ink)
    axes.set_xlabel("iteration (thin lines: means of the last ten)")
    label(axes, ends)
    print_ends(words)
    return "accuracy.png"


def print_ends(words: list[str]):
    """Print the results of finished runs, and the mean and standard deviation of their accuracy.

    The mean and the standard deviation are printed only if at least two runs are finished."""
    accuracies = []
    for name, run in map(named, words):
        if not os.path.exists(f"{run}/test.json"):
            continue
        row = next(iter(read(f"{run}/test.json").values()))
        kinds = {kind for line in read(f"{run}/metrics.jsonl") for kind in line["by_kind"]}
        by_kind = [row[kind] for kind in kinds if row.get(kind) is not None]
        lowest = f", lowest kind {min(by_kind):.0%}" if by_kind else ""
        print(f"{name}: {row['accuracy']:.1%}{lowest}, {row['calls']:.2f} calls")
        accuracies.append(row["accuracy"])
    if len(accuracies) > 1:
        print(f"mean {mean(accuracies):.1%}, standard deviation {stdev(accuracies):.1%}")


# ---- Traces


def trace_files(run: str) -> list[str]:
    """Return the files that hold a run's rollouts, one file per iteration, oldest first.

    If there are none yet, return the name that the first one will have, so that `read` reports that
    this file is missing."""
    return sorted(glob.glob(f"{run}/traces/*.jsonl")) or [f"{run}/traces/00000.jsonl"]


def read_kinds(file: str) -> dict[str, list[dict]]:
    """Return {kind of question: rollouts}, for the judged first rounds in an iteration's file."""
    kinds = {}
    for rollout in read(file):
        if rollout["previous"] is None and rollout["right"] is not None:
            kind = rollout.get("kind") or rollout["problem_id"].rpartition("/")[0]
            kinds.setdefault(kind, []).append(rollout)
    return kinds


def draw_subtasks(run: str) -> str:
    """Draw, for each worker, the share of its steps that have one of its usual subtasks.

    A subtask is usual for a worker if at least a tenth of the worker's steps in the last iteration
    have it. Workers with less than a hundredth of all steps in the last iteration are left out.
    Return the default name of the picture's file; `main` saves the picture."""
    files = trace_files(run)
    iterations = [int(os.path.basename(file).removesuffix(".jsonl")) + 1 for file in files]
    told = [subtasks_by_worker(file) for file in files]
    n_steps = sum(counts.total() for counts in told[-1].values())
    axes = plt.figure(figsize=(8, 4), layout="constrained").add_subplot()

    ends = []
    for name, ink in worker_inks(read(f"{run}/metrics.jsonl")).items():
        last = told[-1].get(name, Counter())
        if last.total() < n_steps / 100:
            continue
        usual = [subtask for subtask, n in last.items() if n >= last.total() / 10]
        shares = []
        for by_worker in told:
            counts = by_worker.get(name, Counter())
            n_usual = sum(counts[subtask] for subtask in usual)
            shares.append(n_usual / counts.total() if counts else None)
        means = rolling_mean(shares)
        axes.plot(iterations, means, color=ink, linewidth=2)
        words = f"{len(usual)} subtasks" if len(usual) > 1 else textwrap.shorten("".join(usual), 32)
        ends.append((means[-1], iterations[-1], f"{name}: {words}", ink))

    axes.set(
        xmargin=0,
        ylim=(0, 1),
        title="Share of a worker's steps that have its usual subtasks",
        xlabel="iteration (means of the last ten)",
    )
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.yaxis.set_major_formatter("{x:.0%}")
    label(axes, ends)
    return f"{run}/subtasks.png"


def subtasks_by_worker(file: str) -> dict[str, Counter]:
    """Return {worker's name: Counter of the subtasks that the worker got in one iteration}."""
    counts = {}
    for rollout in read(file):
        if rollout["workflow"]:
            for name, step in zip(rollout["names"], rollout["workflow"]["steps"]):
                counts.setdefault(name, Counter())[step["subtask"]] += 1
    return counts


# ---- Workflows

# In inches: the gap between two boxes, the height of a line of text, half the width of a box
GAP, LINE, HALF = 0.27, 0.17, 0.8


def draw_workflows(run: str) -> str:
    """Draw the most common workflow for one kind of question, at up to four points of a run.

    The kind is the one whose rollouts have the most steps on average in the last iteration. Most
    changes come early, so the points are spaced logarithmically: of 1,000 iterations, they are the
    1st, 10th, 100th and last. If the kind has no valid workflow in one of these iterations, the
    nearest iteration with one is shown.

    Return the default name of the picture's file; `main` saves the picture."""
    inks = worker_inks(read(f"{run}/metrics.jsonl"))
    files = trace_files(run)
    last = read_kinds(files[-1])
    n_steps = {kind: mean(len(r["names"]) for r in rollouts) for kind, rollouts in last.items()}
    kind = max(n_steps, key=n_steps.get, default="")

    chosen = {}  # file -> its rollouts of this kind
    for share in (0, 1 / 3, 2 / 3, 1):
        target = len(files) ** share - 1
        for i in sorted(range(len(files)), key=lambda i: abs(i - target)):
            rollouts = read_kinds(files[i]).get(kind, [])
            if any(rollout["workflow"] for rollout in rollouts):
                chosen[files[i]] = rollouts
                break
    if not chosen:
        raise ValueError(f"{files[-1]} has no workflow that was judged")

    axes = plt.figure().add_axes((0, 0, 1, 1))  # fill the figure; a unit is an inch
    title = f"The commonest workflow for questions of the kind {kind.rpartition('/')[2]}"
    axes.text(0.2, 0.25, title, weight="bold")
    height = 0
    for x, (file, rollouts) in zip((1, 3, 5, 7), chosen.items()):
        iteration = int(os.path.basename(file).removesuffix(".jsonl")) + 1
        axes.text(x, 0.65, f"iteration {iteration}", weight="bold", ha="center")
        height = max(height, draw_workflow(axes, x, rollouts, inks) + 0.15)
    axes.figure.set_size_inches(8, height)
    axes.set(xlim=(0, 8), ylim=(height, 0))
    axes.axis("off")
    return f"{run}/workflows.png"


def graph(rollout: dict) -> tuple:
    """Return a key of a workflow: each step's worker and access list, without the subtasks."""
    return tuple((step["worker"], *step["access"]) for step in rollout["workflow"]["steps"])


def draw_workflow(axes, x: float, rollouts: list[dict], inks: dict[str, str]) -> float:
    """Draw the most common workflow among the rollouts, with the texts of one rollout that has it.

    Workflows that differ only in their subtasks count as the same. Return how far down the drawing
    reaches, in inches."""
    ran = [rollout for rollout in rollouts if rollout["workflow"]]
    common = mode(map(graph, ran))
    alike = [rollout for rollout in ran if graph(rollout) == common]
    alike.sort(key=lambda rollout: rollout["right"])
    shown = alike[len(alike) // 2]  # the median: right if at least half of them are right
    share = len(alike) / len(rollouts)
    right = mean(rollout["right"] for rollout in alike)
    axes.text(x, 0.82, f"{share:.0%} of all rollouts", ha="center", fontsize=9)

    spans = []
    draw_box(axes, x, spans, [], "question", GREY, wrap(shown["question"], 4))
    for name, step, reply in zip(shown["names"], shown["workflow"]["steps"], shown["replies"]):
        sources = [i + 1 for i in step["access"]] or [0]
        lines = wrap(step["subtask"], 4) + wrap("→ " + reply["text"], 2)
        draw_box(axes, x, spans, sources, name, inks[name], lines)
    ink = RIGHT if shown["right"] else WRONG
    draw_box(axes, x, spans, [len(spans) - 1], f"{right:.0%} right", ink, wrap(shown["answer"], 2))
    return spans[-1][1]


def wrap(text: str, most: int) -> list[str]:
    return textwrap.wrap(" ".join(text.split()), 20, max_lines=most, placeholder=" …")


def draw_box(
    axes, x: float, spans: list[tuple], sources: list[int], name: str, ink: str, lines: list[str]
):
    """Draw a box below the earlier boxes, add its span to `spans`, and draw arrows to the box.

    spans: (top, bottom) of each box, in inches.
    sources: The indices in `spans` of the boxes from which arrows come. The arrow from the box
        directly above is straight. An arrow from a step further up bends around the boxes in
        between on the right, and an arrow from the question does so on the left."""
    top = spans[-1][1] + GAP if spans else 0.95
    height = 0.12 + LINE * (1 + len(lines))
    spans.append((top, top + height))
    style = "round,pad=0,rounding_size=0.06"
    axes.add_patch(
        FancyBboxPatch((x - HALF, top), 2 * HALF, height, style, facecolor="white", edgecolor=ink)
    )
    look = dict(ha="center", va="top", fontsize=9, linespacing=1.3)
    axes.text(x, top + 0.06, f"{name:.20}", weight="bold", color=ink, **look)
    axes.text(x, top + 0.06 + LINE, "\n".join(lines), **look)

    for source in sources:
        start = (x, top - GAP)
        tip = (x, top)
        bend = 0
        if source < len(spans) - 2:
            side = HALF if source else -HALF
            start = (x + side, mean(spans[source]))
            tip = (x + side, mean(spans[-1]))
            bend = 0.4 * side / (start[1] - tip[1])
        arrow = dict(
            arrowstyle="-|>", color=GREY, shrinkA=0, shrinkB=0, connectionstyle=f"arc3,rad={bend}"
        )
        axes.annotate("", tip, start, arrowprops=arrow)


# ---- Evaluations


def read_evaluations(words: list[str]) -> tuple[dict[str, dict], set[str]]:
    """Return ({benchmark: {system: row}}, names of the systems that are Conductors) for all files.

    With several files, each Conductor is named after its file, or by the NAME in NAME=FILE."""
    benchmarks, conductors = {}, {"conductor"}
    for name, path in map(named, words):
        for key, row in read(path).items():
            benchmark, _, system = key.rpartition(", ")
            if row.get("calls") is None:  # not measured: derived from other rows, or all lost
                continue
            if system == "conductor" and len(words) > 1:
                system = name
                conductors.add(name)
            benchmarks.setdefault(benchmark, {})[system.removeprefix("workers ")] = row
    if not benchmarks:
        raise ValueError("it has no system that was measured")
    return benchmarks, conductors


def draw_evaluations(words: list[str]) -> str:
    """Plot each system's accuracy, with a 95 % interval, against its cost per question.

    Each benchmark gets a plot. Its costs are in dollars if the dollars of every system are known
    and not all 0, else in tokens on the same condition, else in calls.

    Return the default name of the picture's file; `main` saves the picture."""
    benchmarks, conductors = read_evaluations(words)
    columns = min(2, len(benchmarks))
    height = math.ceil(len(benchmarks) / columns)
    figure = plt.figure(figsize=(8, 3.6 * height), layout="constrained")
    for number, (benchmark, rows) in enumerate(benchmarks.items(), 1):
        cost = "calls"
        for key in ("tokens", "dollars"):
            values = [row[key] for row in rows.values()]
            if None not in values and any(values):
                cost = key
        title = named(benchmark)[0]  # for a user's file, its name without the folder
        axes = figure.add_subplot(height, columns, number, title=title, xlabel=f"{cost} a question")
        ends = []
        for name, row in rows.items():
            x, y, margin = row[cost], row["accuracy"], row["±"] or 0
            ink = INKS[0] if name in conductors else DARK
            axes.vlines(x, max(0, y - margin), min(1, y + margin), ink)
            axes.plot(x, y, color=ink, **DOT)
            ends.append((y, x, name, ink))
        axes.set(xlim=(0, None), ylabel="accuracy")
        axes.locator_params("y", steps=(1, 2, 5, 10))
        axes.yaxis.set_major_formatter("{x:.0%}")
        label(axes, ends)
    return os.path.splitext(named(words[0])[1])[0] + ".png"


def draw(words: list[str]) -> str:
    """Draw what the command line asks for, and return the default name of the picture's file."""
    commands = {"workflows": draw_workflows, "subtasks": draw_subtasks}
    if words[0] in commands and len(words) == 2:
        return commands[words[0]](words[1])
    if all(word.endswith(".json") for word in words):
        return draw_evaluations(words)
    if len(words) == 1:
        return draw_run(named(words[0])[1])
    return compare_runs(words)


def main(argv: list[str]):
    words = [word for word in argv if not word.startswith("--out=")]
    out = [word.removeprefix("--out=") for word in argv if word.startswith("--out=")]
    unknown = [f"unknown flag: {word}\n\n" for word in words if word.startswith("-")]
    if unknown or not words:
        raise SystemExit("".join(unknown) + __doc__)

    plt.rcParams.update(STYLE)
    try:
        file = draw(words)
        file = out[-1] if out else file
        plt.savefig(file)
    except (OSError, ValueError) as e:
        raise SystemExit(f"{' '.join(words)} cannot be drawn: {e}") from None
    except (LookupError, TypeError, AttributeError) as e:
        raise SystemExit(
            f"{' '.join(words)} is not what train.py or eval.py writes today: {e!r}"
        ) from None
    print(file)


if __name__ == "__main__":
    main(sys.argv[1:])
