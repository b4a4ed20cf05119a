"""Draw what train.py and eval.py have written (needs matplotlib: pip install matplotlib).

    python assets/plot.py RUN              accuracy, steps and workers (Figs. 3, 7, 8): RUN/curve.png
    python assets/plot.py RUN RUN …        the accuracy of several runs: accuracy.png
    python assets/plot.py workflows RUN    what the Conductor wrote, at four points of a run: RUN/workflows.png
    python assets/plot.py FILE.json        cost and accuracy, from eval.py --out=FILE.json: FILE.png

RUN is the folder that train.py calls --out. With --out=FILE.png or FILE.svg the picture goes there."""
import glob
import itertools
import json
import math
import os
import sys
import textwrap
from collections import Counter

try:
    import matplotlib.pyplot as plt
    import numpy as np
    from matplotlib.patches import FancyBboxPatch
except ImportError:
    raise SystemExit("drawing needs matplotlib: pip install matplotlib") from None

INKS = ["#2166ac", "#c1512d", "#2e8555", "#8e5aa8", "#a87b00", "#3a8fb0", "#c2528b"]
DARK, GREY, GREEN, RED = "#222222", "#808080", "#2e8555", "#b3261e"
STYLE = {"font.size": 10, "axes.titlesize": 10, "axes.titleweight": "bold", "axes.titlelocation": "left",
         "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": GREY, "text.color": DARK,
         "text.parse_math": False, "savefig.dpi": 150}
ITERATION = "iteration (means of the last ten)"
DOT = dict(marker="o", markersize=7, markeredgecolor="white", clip_on=False, zorder=3)

def read_rows(file: str) -> list[dict]:
    """The lines of a file that train.py writes, which must have some."""
    if not os.path.exists(file) or not os.path.getsize(file):
        raise ValueError(f"{file} is missing or empty; train.py writes it when an iteration has ended")
    with open(file, encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]

def rolling_mean(values: list) -> list[float]:
    """For each value the mean of the last ten that are known, that is not None; NaN where none is yet."""
    means, known = [], []
    for value in values:
        known = (known + [value])[-10:] if value is not None else known
        means.append(sum(known) / len(known) if known else float("nan"))
    return means

def label(axes, points: list[tuple[float, float, str, str]]):
    """Write the text of each point, (x, y, text, ink), at the right of the axes, with a line to it. Texts are
    moved apart: up from the lowest one on, but not above the axes."""
    axes.figure.draw_without_rendering()  # which lays out the axes
    low, high = axes.get_ylim()
    heights = np.array([(y - low) / (high - low) for _, y, _, _ in points])
    order = heights.argsort()
    offsets = 0.17 * axes.figure.dpi / axes.get_window_extent().height * np.arange(len(points))
    pushed = np.maximum.accumulate(heights[order] - offsets)
    pushed = np.minimum(pushed, 1 - offsets[-1]) + offsets
    for i, height in zip(order, pushed):
        x, y, text, ink = points[i]
        line = dict(arrowstyle="-", color=ink, linewidth=0.5, shrinkA=2, shrinkB=6)
        axes.annotate(text, (x, y), (1.02, height), textcoords="axes fraction", color=ink, va="center",
                      arrowprops=line)

# ---- Runs --------------------------------------------------------------------------------------------------

def draw_accuracy(axes, rows: list[dict], name: str, ink: str) -> tuple:
    """Draw a run's accuracy: sampled as a line, held-out as dots. Returns the label of the line."""
    iterations = [row["iteration"] + 1 for row in rows]
    means = rolling_mean([row["accuracy"] for row in rows])
    axes.plot(iterations, means, color=ink, linewidth=2)
    for iteration, row in zip(iterations, rows):
        if row["held_out"] is not None:
            axes.plot(iteration, row["held_out"], color=ink, **DOT)
    axes.set(ylim=(0, 1), title="Accuracy: sampled in training (line), on held-out questions (dots)")
    axes.margins(x=0)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.yaxis.set_major_formatter("{x:.0%}")
    return iterations[-1], means[-1], f"{means[-1]:.0%} {name}", ink

def compare_runs(runs: list[str]) -> str:
    axes = plt.figure(figsize=(8, 4), layout="constrained").add_subplot(xlabel=ITERATION)
    labels = []
    for run, ink in zip(runs, itertools.cycle(INKS)):
        name = os.path.basename(os.path.normpath(run))
        labels.append(draw_accuracy(axes, read_rows(f"{run}/metrics.jsonl"), name, ink))
    label(axes, labels)
    return "accuracy.png"

def draw_run(run: str) -> str:
    rows = read_rows(f"{run}/metrics.jsonl")
    band = 0.3 + 0.2 * len({kind for row in rows for kind in row["by_kind"]})  # inches
    figure, (top, right, steps, shares) = plt.subplots(4, figsize=(8, 4.2 + 2 * band), layout="constrained",
                                                       height_ratios=(2.2, band, band, 1.6), sharex=True)
    labels = [draw_accuracy(top, rows, "all kinds", DARK)]
    end = rows[-1]["iteration"] + 1
    if os.path.exists(f"{run}/test.json"):
        with open(f"{run}/test.json", encoding="utf-8") as file:
            accuracy = {name: row["accuracy"] or 0 for name, row in json.load(file).items()}
        top.plot(end, accuracy.pop("Conductor"), color=DARK, **DOT)
        best = max(accuracy, key=accuracy.get)
        top.axhline(accuracy[best], color=GREY, linestyle="--", linewidth=1.2)
        labels.append((end, accuracy[best], f"{accuracy[best]:.0%} {best} alone", GREY))
    draw_bands(right, rows, "by_kind", "Accuracy by kind of question", "Blues", 1, "{:.0%}")
    draw_bands(steps, rows, "steps_by_kind", "Steps of a workflow", "Greys", 4, "{:.1f}")
    label(top, labels)
    draw_workers(shares, rows)
    return f"{run}/curve.png"

def draw_bands(axes, rows: list[dict], key: str, title: str, shades: str, most: int, form: str):
    """Draw a band for each kind of question, the darker the larger the metric."""
    kinds = list(dict.fromkeys(kind for row in rows for kind in row[key]))
    means = [rolling_mean([row[key].get(kind) for row in rows]) for kind in kinds]
    first, end = rows[0]["iteration"] + 0.5, rows[-1]["iteration"] + 1.5
    axes.imshow(means, shades, aspect="auto", interpolation="nearest", vmin=-0.08 * most, vmax=1.2 * most,
                extent=(first, end, len(kinds) - 0.5, -0.5))
    axes.hlines([i + 0.5 for i in range(len(kinds))], first, end, "white", linewidth=2)
    axes.set_yticks(range(len(kinds)), kinds)
    axes.set_title(title)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    label(axes, [(end, i, form.format(mean[-1]), DARK) for i, mean in enumerate(means)])

def draw_workers(axes, rows: list[dict]):
    inks = worker_inks(rows)
    means = [rolling_mean([row["workers"].get(name, 0) for row in rows]) for name in inks]
    iterations = [row["iteration"] + 1 for row in rows]
    axes.stackplot(iterations, means, colors=inks.values(), alpha=0.75, edgecolor="white")
    axes.set(ylim=(0, 1), title="Workers' shares of the steps", xlabel=ITERATION)
    axes.yaxis.set_major_formatter("{x:.0%}")
    labels, top = [], 0
    for name, mean in zip(inks, means):
        top += mean[-1]
        labels.append((iterations[-1], top - mean[-1] / 2, f"{mean[-1]:.0%} {name}", inks[name]))
    label(axes, labels)

def worker_inks(rows: list[dict]) -> dict[str, str]:
    return dict(zip(sorted({name for row in rows for name in row["workers"]}), itertools.cycle(INKS)))

# ---- Workflows ---------------------------------------------------------------------------------------------

def read_kinds(file: str) -> dict[str, list[dict]]:
    """An iteration's first rounds by kind of question, which is its problem's id without the last part."""
    kinds = {}
    for rollout in read_rows(file):
        if not rollout["previous"]:
            kinds.setdefault(rollout["problem"].rpartition("/")[0], []).append(rollout)
    return kinds

def draw_workflows(run: str) -> str:
    """Draw the most frequent workflow for one kind of question, that of most steps in the end, at four points
    of a run. As most changes are early, these are: of 1000 iterations the 1st, 10th, 100th and last."""
    inks = worker_inks(read_rows(f"{run}/metrics.jsonl"))
    files = sorted(glob.glob(f"{run}/traces/*.jsonl")) or [f"{run}/traces/00000.jsonl"]
    last = read_kinds(files[-1])
    kind = max(last, key=lambda kind: sum(len(r["names"]) for r in last[kind]) / len(last[kind]))
    found = {}
    for share in (0, 1 / 3, 2 / 3, 1):
        nearest = sorted(range(len(files)), key=lambda i: abs(i + 1 - len(files) ** share))
        for i in nearest:  # Not every iteration has such a question.
            rollouts = read_kinds(files[i]).get(kind, [])
            if any(r["workflow"] for r in rollouts):
                found[i] = rollouts
                break
    axes = plt.figure().add_axes((0, 0, 1, 1))  # in inches
    title = f"The most frequent workflow for questions of the kind {kind.rpartition('/')[2]}"
    axes.text(0.25, 0.25, title, weight="bold")
    ends = []
    for column, i in enumerate(found):
        number = int(os.path.basename(files[i]).removesuffix(".jsonl")) + 1
        axes.text(2 * column + 1, 0.65, f"iteration {number}", weight="bold", ha="center")
        ends.append(draw_workflow(axes, 2 * column + 1, found[i], inks))
    axes.figure.set_size_inches(2 * len(found), max(ends))
    axes.set(xlim=(0, 2 * len(found)), ylim=(max(ends), 0))
    axes.axis("off")
    return f"{run}/workflows.png"

def most_frequent(rollouts: list[dict], key) -> list[dict]:
    """Those that share the most frequent key(rollout)."""
    [(value, _)] = Counter(map(key, rollouts)).most_common(1)
    return [rollout for rollout in rollouts if key(rollout) == value]

def graph(rollout: dict) -> tuple:
    return tuple((step["worker"], *step["access"]) for step in rollout["workflow"]["steps"])

def draw_workflow(axes, x: float, rollouts: list[dict], inks: dict[str, str]) -> float:
    """Draw the graph that most rollouts share, with the texts of one of them, and return where it ends."""
    alike = most_frequent([r for r in rollouts if r["workflow"]], graph)
    shown = most_frequent(alike, lambda r: str((r["workflow"], r["right"])))[0]
    boxes = [("question", GREY, wrap(shown["question"], 4), [])]
    for name, step, reply in zip(shown["names"], shown["workflow"]["steps"], shown["replies"]):
        lines = wrap(step["subtask"], 4) + wrap("→ " + (reply["text"] if reply else "nothing"), 2)
        boxes.append((name, inks[name], lines, [i + 1 for i in step["access"]] or [0]))
    name, ink = ("right", GREEN) if shown["right"] else ("wrong", RED)
    boxes.append((name, ink, wrap(shown["answer"], 2), [len(boxes) - 1]))
    axes.text(x, 0.82, f"{len(alike) / len(rollouts):.0%} of all workflows", ha="center", fontsize=9)
    end, middles = 0.7, []
    for name, ink, lines, sources in boxes:
        top, end = end + 0.27, end + 0.55 + 0.17 * len(lines)
        middles.append((top + end) / 2)
        style = "round,pad=0,rounding_size=0.06"
        axes.add_patch(FancyBboxPatch((x - 0.75, top), 1.5, end - top, style, facecolor="white", edgecolor=ink))
        axes.text(x, top + 0.06, name, weight="bold", color=ink, ha="center", va="top", fontsize=9)
        axes.text(x, top + 0.23, "\n".join(lines), ha="center", va="top", fontsize=9, linespacing=1.3)
        for source in sources:
            if source == len(middles) - 2:
                draw_arrow(axes, (x, top - 0.27), (x, top))
            else:  # around the boxes between, on the left from the question
                side = x + 0.75 if source else x - 0.75
                draw_arrow(axes, (side, middles[source]), (side, middles[-1]), 0.4 if source else -0.4)
    right = sum(bool(r["right"]) for r in alike) / len(alike)
    axes.text(x, end + 0.2, f"{right:.0%} of these are right", ha="center", fontsize=9)
    return end + 0.35

def draw_arrow(axes, start: tuple, tip: tuple, width: float = 0.0):
    bend = f"arc3,rad={width / (start[1] - tip[1])}"
    look = dict(arrowstyle="-|>", color=GREY, shrinkA=0, shrinkB=0, connectionstyle=bend)
    axes.annotate("", tip, start, arrowprops=look)

def wrap(text: str, most: int) -> list[str]:
    return textwrap.wrap(" ".join(text.split()), 22, max_lines=most, placeholder=" …")

# ---- An evaluation -----------------------------------------------------------------------------------------

def draw_evaluation(path: str) -> str:
    """Draw a panel for each benchmark: a system's cost, its accuracy and the interval of that."""
    with open(path, encoding="utf-8") as file:
        numbers = json.load(file)
    benchmarks = {}
    for name, row in numbers.items():
        benchmark, _, system = name.rpartition(", ")
        if row.get("calls") and not system.startswith("best single worker"):  # It has a point of its own.
            benchmarks.setdefault(benchmark, {})[system.removeprefix("workers ")] = row
    columns = min(len(benchmarks), 2)
    n_rows = math.ceil(len(benchmarks) / columns)
    figure = plt.figure(figsize=(8, 3.6 * n_rows), layout="constrained")
    for i, (benchmark, rows) in enumerate(benchmarks.items(), 1):
        draw_systems(figure.add_subplot(n_rows, columns, i, title=benchmark, ylabel="accuracy"), rows)
    return path.removesuffix(".json") + ".png"

def draw_systems(axes, rows: dict[str, dict]):
    costs = {key: [row[key] for row in rows.values()] for key in ("dollars", "tokens", "calls")}
    cost = next(key for key, values in costs.items() if None not in values and any(values))
    labels = []
    for name, row in rows.items():
        x, y, margin = row[cost], row["accuracy"], row["±"] or 0
        ink = INKS[0] if name.lower() == "conductor" else DARK
        axes.vlines(x, max(y - margin, 0), min(y + margin, 1), ink)
        axes.plot(x, y, color=ink, **DOT)
        labels.append((x, y, name, ink))
    axes.set_xlabel(f"{cost} a question")
    axes.set_xlim(left=0)
    axes.yaxis.set_major_formatter("{x:.0%}")
    label(axes, labels)

def main(argv: list[str]):
    words = [word for word in argv if not word.startswith("--out=")]
    out = [word.removeprefix("--out=") for word in argv if word.startswith("--out=")]
    if not words or any(word.startswith("-") for word in words):
        raise SystemExit(__doc__)
    plt.rcParams.update(STYLE)
    try:
        if words[0] == "workflows" and len(words) == 2:
            file = draw_workflows(words[1])
        elif words[0].endswith(".json") and len(words) == 1:
            file = draw_evaluation(words[0])
        else:
            file = compare_runs(words) if words[1:] else draw_run(words[0])
        file = out[-1] if out else file
        plt.savefig(file)
    except (OSError, ValueError) as e:
        raise SystemExit(f"{' '.join(words)} cannot be drawn: {e}") from None
    except (LookupError, TypeError, AttributeError) as e:
        raise SystemExit(f"{' '.join(words)} is not what train.py or eval.py writes today: {e!r}") from None
    print(file)

if __name__ == "__main__":
    main(sys.argv[1:])
