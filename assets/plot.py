"""Draw what train.py and eval.py have written (needs matplotlib: pip install matplotlib).

    python assets/plot.py RUN              accuracy, steps, workers (Figs. 3, 7, 8): RUN/curve.png
    python assets/plot.py RUN RUN …        the accuracy of several runs: accuracy.png, and the mean in the end
    python assets/plot.py workflows RUN    what the Conductor wrote in the course of a run: RUN/workflows.png
    python assets/plot.py FILE.json …      cost and accuracy, of eval.py --out=FILE.json: FILE.png; of several
                                           files, whose Conductors are called as the files are

RUN is the folder that train.py calls --out. With --out=FILE.png or FILE.svg the picture goes there."""

import glob
import itertools
import json
import math
import os
import sys
import textwrap
from statistics import mean, mode, stdev

try:
    import matplotlib.pyplot as plt
    from matplotlib.patches import FancyBboxPatch
except ImportError:
    raise SystemExit("drawing needs matplotlib: pip install matplotlib") from None

INKS = ["#2166ac", "#c1512d", "#2e8555", "#8e5aa8", "#a87b00", "#3a8fb0", "#c2528b"]
DARK, GREY, GREEN, RED = "#222222", "#808080", "#2e8555", "#b3261e"
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
    "backend": "agg",
}
DOT = dict(marker="o", markersize=7, markeredgecolor="white", clip_on=False, zorder=3)


def read(file: str):
    """What a JSON file holds, or a list of what the lines of a JSONL file hold."""
    if not os.path.exists(file) or not os.path.getsize(file):
        raise ValueError(
            f"{file} is missing or empty; a run writes it when its first iteration has ended"
        )
    with open(file, encoding="utf-8") as f:
        try:
            return json.load(f) if file.endswith(".json") else [json.loads(line) for line in f]
        except ValueError as e:
            raise ValueError(f"{file} is damaged, or still being written: {e}") from None


def rolling_mean(values: list) -> list[float]:
    """For each value the mean of the last ten that are known (not None); NaN where none is yet."""
    means, known = [], []
    for value in values:
        if value is not None:
            known.append(value)
        means.append(mean(known[-10:] or [math.nan]))
    return means


def label(axes, ends: list[tuple[float, float, str, str]]):
    """Write texts, (y, x, text, ink) each, at the right of the axes, with a line to its point. They are moved
    apart: up from the lowest one on, but not above the axes."""
    axes.figure.draw_without_rendering()  # which lays out the axes
    gap = 0.17 * axes.figure.dpi / axes.get_window_extent().height
    low, high = axes.get_ylim()
    ordered = sorted(ends, key=lambda end: (end[0], -end[1]))  # so that lines do not cross
    height = -1.0
    for n_above, (y, x, text, ink) in zip(reversed(range(len(ends))), ordered):
        height = max(height + gap, (y - low) / (high - low))
        height = min(height, 1 - n_above * gap)
        line = dict(arrowstyle="-", color=ink, linewidth=0.5, shrinkA=2, shrinkB=6, relpos=(0, 0.5))
        axes.annotate(
            text, (x, y), (1.02, height), "data", "axes fraction", line, color=ink, va="center"
        )


# ---- Runs --------------------------------------------------------------------------------------------------


def draw_accuracy(axes, rows: list[dict], name: str, ink: str) -> tuple:
    """Draw a run's accuracy: sampled as a line, held-out as dots. Returns the label of the line's end."""
    for row in rows:
        if row["held_out"] is not None:
            axes.plot(row["iteration"] + 1, row["held_out"], color=ink, **DOT)
    iterations = [row["iteration"] + 1 for row in rows]
    means = rolling_mean([row["accuracy"] for row in rows])
    axes.plot(iterations, means, color=ink, linewidth=2)
    axes.set(
        xmargin=0, ylim=(0, 1), title="Accuracy: in training (line), on held-out questions (dots)"
    )
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.yaxis.set_major_formatter("{x:.0%}")
    end = means[-1]
    return end, iterations[-1], f"{name} {end:.0%}", ink


def draw_run(run: str) -> str:
    rows = read(f"{run}/metrics.jsonl")
    iterations = [row["iteration"] + 1 for row in rows]
    kinds = {kind for row in rows for kind in row["by_kind"]}
    band = 0.3 + 0.2 * len(kinds)  # inches
    heights = (2.2, band, band, 1.6)
    figure = plt.figure(figsize=(8, sum(heights)), layout="constrained")
    top, right, steps, bottom = figure.subplots(4, sharex=True, height_ratios=heights)
    ends = [draw_accuracy(top, rows, "all kinds", DARK)]
    if os.path.exists(f"{run}/test.json"):
        tested = read(f"{run}/test.json")
        accuracy = {name.split(", ")[-1]: row["accuracy"] or 0 for name, row in tested.items()}
        best = max((name for name in accuracy if name.startswith("workers ")), key=accuracy.get)
        top.plot(iterations[-1], [*accuracy.values()][0], color=DARK, **DOT)
        top.axhline(accuracy[best], color=GREY, linestyle="--", linewidth=1.2)
        text = f"{best.removeprefix('workers ')} alone {accuracy[best]:.0%}"
        ends.append((accuracy[best], iterations[-1], text, GREY))
    draw_bands(right, rows, "by_kind", "Accuracy by kind of question", "Blues", 1, "{:.0%}")
    draw_bands(steps, rows, "steps_by_kind", "Steps of a workflow", "Greys", 4, "{:.1f}")
    label(top, ends)

    inks = worker_inks(rows)
    shares = [rolling_mean([row["workers"].get(name, 0) for row in rows]) for name in inks]
    if inks:  # There are none where nothing was a workflow.
        bottom.stackplot(iterations, shares, colors=inks.values(), alpha=0.75, edgecolor="white")
    bottom.set(
        ylim=(0, 1),
        title="Workers' shares of the steps",
        xlabel="iteration (means of the last ten)",
    )
    bottom.yaxis.set_major_formatter("{x:.0%}")
    ends, height = [], 0
    for name, (*_, share) in zip(inks, shares):
        ends.append((height + share / 2, iterations[-1], f"{name} {share:.0%}", inks[name]))
        height += share
    label(bottom, ends)
    return f"{run}/curve.png"


def draw_bands(axes, rows: list[dict], key: str, title: str, shades: str, most: float, form: str):
    """Draw a band for each kind of question, the darker the larger a metric, with its last mean beside it."""
    kinds = list(dict.fromkeys(kind for row in rows for kind in row[key]))
    means = [rolling_mean([row[key].get(kind) for row in rows]) for kind in kinds]
    begin, end = rows[0]["iteration"], rows[-1]["iteration"] + 1
    axes.imshow(
        means,
        shades,
        aspect="auto",
        interpolation="nearest",
        vmin=-0.08 * most,
        vmax=1.2 * most,
        extent=(begin + 0.5, end + 0.5, len(kinds) - 0.5, -0.5),
    )
    axes.set_title(title)
    axes.set_yticks(range(len(kinds)), kinds)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    for i, values in enumerate(means):
        axes.axhline(i + 0.5, color="white", linewidth=2)
        text = form.format(values[-1]).replace("nan", "?")
        axes.annotate(text, (1.02, i), xycoords=("axes fraction", "data"), va="center")


def worker_inks(rows: list[dict]) -> dict[str, str]:
    names = sorted({name for row in rows for name in row["workers"]})
    return dict(zip(names, itertools.cycle(INKS)))


def compare_runs(runs: list[str]) -> str:
    axes = plt.figure(figsize=(8, 4), layout="constrained").add_subplot()
    ends = []
    for run, ink in zip(runs, itertools.cycle(INKS)):
        name = os.path.basename(os.path.normpath(run))
        ends.append(draw_accuracy(axes, read(f"{run}/metrics.jsonl"), name, ink))
    axes.set_xlabel("iteration (means of the last ten)")
    label(axes, ends)
    print_ends(runs)
    return "accuracy.png"


def print_ends(runs: list[str]):
    """Say how each run that has ended answers held-out questions, and the mean over runs."""
    shares = []
    for run in filter(lambda run: os.path.exists(f"{run}/test.json"), runs):
        row = next(iter(read(f"{run}/test.json").values()))
        kinds = {kind for line in read(f"{run}/metrics.jsonl") for kind in line["by_kind"]}
        worst = min(row.get(kind) or 0 for kind in kinds)
        print(f"{run}: {row['accuracy']:.1%}, the worst kind {worst:.0%}, {row['calls']:.2f} calls")
        shares.append(row["accuracy"])
    if len(shares) > 1:
        print(f"mean {mean(shares):.1%}, standard deviation {stdev(shares):.1%}")


# ---- Workflows ---------------------------------------------------------------------------------------------

GAP, LINE, HALF = 0.27, 0.17, 0.8  # inches: between boxes, of a line of text, of a box's width


def read_kinds(file: str) -> dict[str, list[dict]]:
    """An iteration's judged first rounds by kind of question: their problem's id without the last part."""
    kinds = {}
    for rollout in read(file):
        if rollout["previous"] is None and rollout["right"] is not None:
            kinds.setdefault(rollout["problem_id"].rpartition("/")[0], []).append(rollout)
    return kinds


def draw_workflows(run: str) -> str:
    """Draw the most frequent workflow for one kind of question, that of most steps in the end, at four points
    of a run. As most changes are early, these are: of 1000 iterations the 1st, 10th, 100th and last."""
    inks = worker_inks(read(f"{run}/metrics.jsonl"))
    files = sorted(glob.glob(f"{run}/traces/*.jsonl")) or [f"{run}/traces/00000.jsonl"]
    last = read_kinds(files[-1])
    kind = max(
        last, key=lambda kind: mean(len(rollout["names"]) for rollout in last[kind]), default=""
    )
    found = {}
    for share in (0, 1 / 3, 2 / 3, 1):
        target = len(files) ** share - 1
        for i in sorted(range(len(files)), key=lambda i: abs(i - target)):
            rollouts = read_kinds(files[i]).get(kind, [])
            if any(rollout["workflow"] for rollout in rollouts):
                found[files[i]] = rollouts  # of the nearest iteration that has such a question
                break
    if not found:
        raise ValueError(f"{files[-1]} has no workflow that was judged")
    axes = plt.figure().add_axes((0, 0, 1, 1))  # in inches
    name = kind.rpartition("/")[2]
    axes.text(
        0.2, 0.25, f"The most frequent workflow for questions of the kind {name}", weight="bold"
    )
    height = 0
    for x, (file, rollouts) in zip((1, 3, 5, 7), found.items()):
        iteration = int(os.path.basename(file).removesuffix(".jsonl")) + 1
        axes.text(x, 0.65, f"iteration {iteration}", weight="bold", ha="center")
        height = max(height, draw_workflow(axes, x, rollouts, inks) + 0.15)
    axes.figure.set_size_inches(8, height)
    axes.set(xlim=(0, 8), ylim=(height, 0))
    axes.axis("off")
    return f"{run}/workflows.png"


def graph(rollout: dict) -> tuple:
    """Whom a workflow asks, and who sees which steps."""
    return tuple((step["worker"], *step["access"]) for step in rollout["workflow"]["steps"])


def draw_workflow(axes, x: float, rollouts: list[dict], inks: dict[str, str]) -> float:
    """Draw the graph that most workflows share, with the texts of one of them. Returns where it ends."""
    ran = [rollout for rollout in rollouts if rollout["workflow"]]
    common = mode(map(graph, ran))
    alike = [rollout for rollout in ran if graph(rollout) == common]
    alike.sort(key=lambda rollout: rollout["right"])
    shown = alike[len(alike) // 2]  # right if most of them are
    share = len(alike) / len(rollouts)
    right = mean(rollout["right"] for rollout in alike)
    axes.text(x, 0.82, f"{share:.0%} of all workflows", ha="center", fontsize=9)
    spans = []
    draw_box(axes, x, spans, [], "question", GREY, wrap(shown["question"], 4))
    for name, step, reply in zip(shown["names"], shown["workflow"]["steps"], shown["replies"]):
        sources = [i + 1 for i in step["access"]] or [0]
        lines = wrap(step["subtask"], 4) + wrap("→ " + reply["text"], 2)
        draw_box(axes, x, spans, sources, name, inks[name], lines)
    ink = GREEN if shown["right"] else RED
    draw_box(axes, x, spans, [len(spans) - 1], f"{right:.0%} right", ink, wrap(shown["answer"], 2))
    return spans[-1][1]


def wrap(text: str, most: int) -> list[str]:
    return textwrap.wrap(" ".join(text.split()), 22, max_lines=most, placeholder=" …")


def draw_box(
    axes, x: float, spans: list[tuple], sources: list[int], name: str, ink: str, lines: list[str]
):
    """Draw a box under others and add it to their spans, (top, bottom) each. An arrow comes from each source,
    straight from the box above, else around those between: on the right, from the question on the left."""
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


# ---- An evaluation -----------------------------------------------------------------------------------------


def draw_evaluations(paths: list[str]) -> str:
    """Draw each benchmark's systems: what a question costs, and the accuracy with its 95 % interval."""
    benchmarks, conductors = {}, {"conductor"}
    for path in paths:
        for name, row in read(path).items():
            benchmark, _, system = name.rpartition(", ")
            if system == "conductor" and len(paths) > 1:
                system = path.removesuffix(".json")
                conductors.add(system)
            if (
                row.get("calls") is not None and "best single worker" not in name
            ):  # It is there already.
                benchmarks.setdefault(benchmark, {})[system.removeprefix("workers ")] = row
    if not benchmarks:
        raise ValueError("it has no system that was measured")
    columns = min(2, len(benchmarks))
    height = math.ceil(len(benchmarks) / columns)
    figure = plt.figure(figsize=(8, 3.6 * height), layout="constrained")
    for number, (benchmark, rows) in enumerate(benchmarks.items(), 1):
        cost = "calls"
        for key in ("tokens", "dollars"):
            values = [row[key] for row in rows.values()]
            if None not in values and any(values):
                cost = key
        axes = figure.add_subplot(
            height, columns, number, title=benchmark, xlabel=f"{cost} a question"
        )
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
    return paths[0].removesuffix(".json") + ".png"


def main(argv: list[str]):
    words = [word for word in argv if not word.startswith("--out=")]
    out = [word.removeprefix("--out=") for word in argv if word.startswith("--out=")]
    if not words or any(word.startswith("-") for word in words):
        raise SystemExit(__doc__)
    plt.rcParams.update(STYLE)
    try:
        if words[0] == "workflows" and len(words) == 2:
            file = draw_workflows(words[1])
        elif all(word.endswith(".json") for word in words):
            file = draw_evaluations(words)
        else:
            file = draw_run(*words) if len(words) == 1 else compare_runs(words)
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
