"""Tests that assets/plot.py draws runs and evaluations, and explains errors in a sentence."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("matplotlib")
SCRIPT = os.path.join(
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "assets", "plot.py"
)


@pytest.fixture
def plot(tmp_path):
    """Return a function that runs the script in a folder of made-up runs and evaluations."""
    step = {"worker": 0, "subtask": "Think.", "access": []}
    rollout = {
        "question": "What is $x$?",
        "problem_id": "mine/1",
        "previous": None,
        "right": True,
        "names": ["a", "b"],
        "answer": "6",
        "replies": [{"text": "between $5 and $6"}, {"text": "6"}],
        "workflow": {"steps": [step, step | {"access": [0]}]},
    }
    failed = rollout | {"right": False, "workflow": None, "names": [], "replies": []}
    row = {"accuracy": 0.5, "±": 0.1, "calls": 1.0, "tokens": 9.0, "dollars": None}
    metrics = {
        "iteration": 0,
        "accuracy": None,
        "held_out": 0.5,
        "by_kind": {"exact": 0.5},
        "steps_by_kind": {"exact": None},
        "workers": {"a": 0.5, "b": 0.5},
    }
    (tmp_path / "run/traces").mkdir(parents=True)
    files = {
        "run/metrics.jsonl": [
            metrics,
            metrics | {"iteration": 1, "held_out": None, "accuracy": 0.5},
        ],
        "run/traces/00000.jsonl": [failed],
        "run/traces/00001.jsonl": [failed, rollout],
        "run/test.json": [{"x, conductor": row, "x, workers a": row}],
        "lr=0.1/metrics.jsonl": [metrics | {"held_out": None}],  # not measured yet
        "old/metrics.jsonl": [{"iteration": 0}],
        "n.json": [{"x, conductor": row, "y, conductor": row, "y, workers a": row}],
    }
    (tmp_path / "old").mkdir()
    (tmp_path / "lr=0.1").mkdir()
    for file, rows in files.items():
        (tmp_path / file).write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "cut.json").write_text('{"x, conductor": {')
    return lambda *words: subprocess.run(
        [sys.executable, SCRIPT, *words], cwd=tmp_path, capture_output=True
    )


@pytest.mark.parametrize(
    "words, file",
    [
        ("run", "run/curve.png"),
        ("run run/ --out=both.svg", "both.svg"),
        ("lr=0.1", "lr=0.1/curve.png"),
        ("best=lr=0.1", "lr=0.1/curve.png"),
        ("lr=0.1 one=lr=0.1 --out=unmeasured.png", "unmeasured.png"),
        ("workflows run", "run/workflows.png"),
        ("subtasks run", "run/subtasks.png"),
        ("n.json", "n.png"),
        ("n.json tests=run/test.json --out=all.svg", "all.svg"),
    ],
)
def test_a_picture_comes_out(plot, tmp_path, words, file):
    done = plot(*words.split())
    assert (done.returncode, done.stderr) == (0, b"") and done.stdout.decode().endswith(file + "\n")
    assert (b"mean 50.0%" in done.stdout) == ("run run/" in words)
    if file == "all.svg":  # Labels name each Conductor after its file, or by NAME in NAME=FILE.
        drawn = (tmp_path / file).read_bytes()
        assert b"<!-- n -->" in drawn and b"<!-- tests -->" in drawn
    assert b"lowest kind" not in done.stdout  # its only kind was not tested
    assert (tmp_path / file).read_bytes()[:5] == (
        b"<?xml" if file.endswith("svg") else b"\x89PNG\r"
    )


@pytest.mark.parametrize(
    "words, error",
    [
        ("none", b"none/metrics.jsonl is missing"),
        ("old", b"by_kind"),
        ("cut.json", b"cut.json is damaged"),
        ("--typo run", b"unknown flag: --typo"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(plot, words, error):
    done = plot(*words.split())
    assert done.returncode == 1 and error in done.stderr and b"Traceback" not in done.stderr
