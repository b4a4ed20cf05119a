"""Draw what train.py and eval.py have written (needs matplotlib: pip install matplotlib).

python assets/plot.py RUN         a training run, as RUN/curve.png: accuracy by kind beside the best
worker
                                  alone (Fig. 3), workers' shares of the steps (Fig. 7), steps (Fig. 8)
python assets/plot.py FILE.json   what eval.py wrote with --out, as FILE.png: cost and accuracy (Fig. 5),
                                  lengths of workflows (Fig. 8), workers' shares by round (Fig. 10)
"""

import json
import os
import sys


def smooth(values: list, span: int = 10) -> list:
    """Means of the last `span` values that are known; None where none is."""
    means = []
    for i in range(len(values)):
        first = max(0, i - span + 1)
        window = [value for value in values[first : i + 1] if value is not None]
        means.append(sum(window) / len(window) if window else None)
    return means


def best_single(run: str) -> tuple[str, float] | None:
    """Name and accuracy of the best worker alone on the held-out problems, once the run has ended."""
    file = os.path.join(run, "test.json")
    if not os.path.exists(file):
        return None
    with open(file) as f:
        rows = json.load(f)
    others = ("Conductor", "random workflows")
    alone = {
        name: row["all"] for name, row in rows.items() if "all" in row and name not in others
    }  # not all calls were lost
    return max(alone.items(), key=lambda item: item[1]) if alone else None


def draw_run(plt, run: str) -> str:
    with open(os.path.join(run, "metrics.jsonl")) as f:
        lines = [json.loads(line) for line in f]
    if not lines:
        raise ValueError(f"{run}/metrics.jsonl is empty: the run has not finished an iteration")
    figure, (top, steps, workers) = plt.subplots(
        3, figsize=(8, 9), height_ratios=(2, 1, 1), layout="constrained", sharex=True
    )
    iterations = [line["iteration"] for line in lines]
    for axes, key in ((top, "by_kind"), (steps, "steps_by_kind"), (workers, "workers")):
        missing = 0.0 if key == "workers" else None  # a worker who was not asked has no share
        for name in dict.fromkeys(name for line in lines for name in line[key]):
            axes.plot(
                iterations,
                smooth([line[key].get(name, missing) for line in lines]),
                linewidth=1.2,
                label=name,
            )
    top.plot(
        iterations, smooth([line["accuracy"] for line in lines]), color="black", linewidth=2.4, label="all"
    )
    best = best_single(run)
    if best:
        top.axhline(best[1], color="grey", linestyle="--", label=f"{best[0]} alone, on held-out problems")
    top.set(ylabel="accuracy of sampled workflows", ylim=(0, 1))
    steps.set(ylabel="steps, colours as above")
    workers.set(ylabel="share of the steps", ylim=(0, None), xlabel="iteration (mean of the last 10)")
    top.legend(fontsize=8)
    workers.legend(fontsize=8)
    file = os.path.join(run, "curve.png")
    figure.savefig(file, dpi=90)
    return file


def bars(axes, groups: dict[str, dict[str, float]], title: str):
    """Bars side by side: a group for each name, and in it the shares by key."""
    keys = sorted({key for shares in groups.values() for key in shares})
    width = 0.8 / max(len(groups), 1)
    for i, (name, shares) in enumerate(groups.items()):
        left = [k + i * width for k in range(len(keys))]
        heights = [shares.get(key, 0.0) for key in keys]
        axes.bar(left, heights, width, label=name)
    middle = (len(groups) - 1) * width / 2
    axes.set_xticks([k + middle for k in range(len(keys))], keys, rotation=20)
    axes.set(ylabel=title, ylim=(0, 1))
    axes.legend(fontsize=8)


def draw_evaluation(plt, path: str) -> str:
    with open(path) as f:
        rows = json.load(f)
    measured, lengths, by_round = {}, {}, {}
    for name, row in rows.items():
        if "tokens" in row and row["accuracy"] is not None:
            measured[name] = row
        if "lengths" in row:
            lengths[name] = row["lengths"]
        for key, shares in row.items():
            if key.startswith("workers, round"):
                by_round[name + key.removeprefix("workers")] = shares
    if not measured:
        raise ValueError(f"{path} is not what eval.py writes with --out")
    n = 3 if lengths else 1
    figure, panels = plt.subplots(n, figsize=(8, 1 + 3.5 * n), layout="constrained", squeeze=False)
    scatter = panels[0, 0]
    priced = all(row["cents"] for row in measured.values())
    for name, row in measured.items():
        x = row["cents" if priced else "tokens"]
        scatter.errorbar(x, row["accuracy"], row["95 % ±"], fmt="o")
        scatter.annotate(name, (x, row["accuracy"]), xytext=(4, 4), textcoords="offset points", fontsize=8)
    scatter.set(
        xlabel="cents a question" if priced else "workers' tokens a question",
        ylabel="accuracy, %, with its 95 % interval",
    )
    if lengths:
        bars(panels[1, 0], lengths, "share of the workflows")
        bars(panels[2, 0], by_round, "share of the steps")
    file = path.removesuffix(".json") + ".png"
    figure.savefig(file, dpi=120)
    return file


def main(argv):
    if len(argv) != 1 or argv[0].startswith("-"):
        raise SystemExit(__doc__)
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        raise SystemExit("drawing needs matplotlib: pip install matplotlib") from None
    plt.switch_backend("Agg")
    try:
        draw = draw_evaluation if argv[0].endswith(".json") else draw_run
        print(draw(plt, argv[0]))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as e:
        raise SystemExit(f"{argv[0]}: {type(e).__name__}: {e}") from None


if __name__ == "__main__":
    main(sys.argv[1:])
