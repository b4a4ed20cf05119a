"""The house rules that a program can check: width, size, reading order, packages, one name for one thing, a linter's findings.
They are this repository's own: a fork that grows sets its own numbers below, or leaves this file out."""
import ast
import collections
import os
import re
import subprocess
import sys

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
ORDER = ["model", "sample", "workers", "workflow", "grpo", "eval", "train"]
PACKAGES = {"torch", "tokenizers", "safetensors", "numpy", "requests", "tqdm"}
BESIDE = {"model": {"huggingface_hub"},  # which tokenizers depends on
          "train": {"tensorboard", "wandb"}}
# No file grows beyond these lines, nor what a newcomer reads, above the folds together, unless somebody means it to.
MOST_LINES = {"model": 530, "sample": 380, "workers": 1416, "workflow": 1141, "grpo": 350, "eval": 3088, "train": 1436}
MOST_ABOVE_THE_FOLDS = 1128


def source(name):
    with open(os.path.join(ROOT, f"{name}.py"), encoding="utf-8") as f:
        return f.read()


def imported(name):
    """The packages and files that a file imports, anywhere."""
    for node in ast.walk(ast.parse(source(name))):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module.split(".")[0]


def readme():
    with open(os.path.join(ROOT, "README.md"), encoding="utf-8") as f:
        return f.read()


@pytest.mark.parametrize("name", ORDER)
def test_no_line_is_wider_than_110_columns(name):
    wide = [i for i, line in enumerate(source(name).split("\n"), 1) if len(line) > 110]
    assert not wide


@pytest.mark.parametrize("name", ORDER)
def test_no_file_grows(name):
    assert source(name).count("\n") <= MOST_LINES[name]


def test_what_stands_above_the_folds_is_read_in_an_evening():
    """And the README says which lines these are."""
    above = {name: source(name).partition("\n# Appendix: ")[0].count("\n") for name in ORDER}
    assert sum(above.values()) <= MOST_ABOVE_THE_FOLDS, above
    said = re.findall(r"\[`(\w+)\.py`\].* 1–(\d+) \|", readme())
    assert said == [(name, str(above[name])) for name in ORDER]
    total = sum(source(name).count("\n") for name in ORDER)
    assert f"in {sum(above.values()):,} lines of {total:,}." in readme()


def test_the_readme_has_at_most_1800_words():
    assert len(readme().split()) <= 1800


@pytest.mark.parametrize("name", ORDER)
def test_each_file_has_one_fold_and_says_what_to_read_next(name):
    assert len(re.findall(r"(?m)^# Appendix: ", source(name))) == 1
    following = ORDER[ORDER.index(name) + 1:][:1]
    for successor in following:
        assert f"{successor}.py" in ast.get_docstring(ast.parse(source(name)))


@pytest.mark.parametrize("name", ORDER)
def test_a_file_imports_only_files_above_it_and_the_six_packages(name):
    above = set(ORDER[:ORDER.index(name)])
    allowed = above | PACKAGES | BESIDE.get(name, set()) | set(sys.stdlib_module_names)
    assert set(imported(name)) <= allowed


TESTS = sorted(name for name in os.listdir(os.path.join(ROOT, "tests")) if name.endswith(".py"))


@pytest.mark.parametrize("file", TESTS)
def test_a_test_file_says_what_it_checks_against_and_is_short(file):
    text = source(f"tests/{file.removesuffix('.py')}")
    assert text.startswith('"""') and text.count("\n") <= 600


def test_no_two_files_define_the_same_name():
    places = collections.defaultdict(set)
    for name in ORDER:
        for node in ast.parse(source(name)).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name not in ("main", "Settings"):
                places[node.name].add(name)
    assert not {defined: where for defined, where in places.items() if len(where) > 1}


def test_the_linter_finds_nothing():
    files = [os.path.join(ROOT, part) for part in [*(f"{name}.py" for name in ORDER), "tests", "assets"]]
    settings = os.path.join(ROOT, "tests", "ruff.toml")
    run = subprocess.run([sys.executable, "-m", "ruff", "check", "--config", settings, *files],
                         capture_output=True, text=True)
    assert run.returncode == 0, run.stdout
