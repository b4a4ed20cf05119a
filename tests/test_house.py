"""Tests of the house rules that a program can check.

These rules concern layout, lint, the order of imports, the allowed packages, unsafe constructs, and
the names that other code relies on."""

import ast
import dataclasses
import glob
import importlib
import inspect
import os
import re
import subprocess
import sys

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# The main files. Each may import only those main files that precede it in this list.
ORDER = ["model", "sample", "workers", "workflow", "grpo", "eval", "train"]
PACKAGES = {
    "torch",
    "triton",
    "tokenizers",
    "safetensors",
    "numpy",
    "requests",
    "tqdm",
    "huggingface_hub",
    "wandb",
}
FOLDERS = ("*.py", "tests/*.py", "assets/*.py")
FILES = sorted(file for folder in FOLDERS for file in glob.glob(folder, root_dir=ROOT))


def read(name: str) -> str:
    with open(os.path.join(ROOT, name), encoding="utf-8") as f:
        return f.read()


def ruff(*words) -> subprocess.CompletedProcess:
    settings = os.path.join(ROOT, "tests", "ruff.toml")
    command = [sys.executable, "-m", "ruff", *words, "--config", settings, *FILES]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_ruff_lays_out_all_code():
    run = ruff("format", "--check")
    assert run.returncode == 0, run.stdout


def test_the_linter_finds_nothing():
    run = ruff("check")
    assert run.returncode == 0, run.stdout


@pytest.mark.parametrize("file", FILES)
def test_comments_and_docstrings_fit_100_columns(file):
    """ruff wraps no comments or strings. Rows of tables, which are marked by ¦, may be longer."""
    lines = enumerate(read(file).split("\n"), 1)
    assert not [number for number, line in lines if len(line) > 100 and "¦" not in line]


@pytest.mark.parametrize("name", ORDER)
def test_a_file_imports_only_files_before_it_and_the_packages(name):
    imported = set()
    for node in ast.walk(ast.parse(read(f"{name}.py"))):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module.split(".")[0])
    assert imported <= {*ORDER[: ORDER.index(name)], *PACKAGES, *sys.stdlib_module_names}


@pytest.mark.parametrize("name", ORDER)
def test_nothing_is_evaluated_unpickled_or_caught_blindly(name):
    for node in ast.walk(ast.parse(read(f"{name}.py"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in ("eval", "exec"), f"line {node.lineno}"
        if isinstance(node, ast.Import):
            assert "pickle" not in [alias.name for alias in node.names]
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None, f"line {node.lineno}: a bare except"


# File -> the names that other code may rely on, each with parameters that it must accept.
NAMES = {
    "model": [
        "Config.from_pretrained(path)",
        "Qwen(config)",
        "Qwen.from_pretrained(path, dtype, device)",
        "Qwen.save_pretrained(self, path)",
        "Tokenizer.from_pretrained(path)",
        "Tokenizer.encode(self, text)",
        "Tokenizer.decode(self, ids)",
        "Tokenizer.chat(self, messages)",
    ],
    "sample": [
        "Completion(tokens, logprobs, finished)",
        "generate(model, prompts, n, max_new_tokens, temperature, eos_id, seed, n_ids)",
    ],
    "workers": [
        "Reply(text, prompt_tokens, completion_tokens, cost, seconds)",
        "WorkerError()",
        "Worker(protocol, base_url, model, attempts, timeout)",
        "Worker.chat(self, messages)",
        "Replay(path)",
        "load_pool(spec)",
    ],
    "workflow": [
        "Step(worker, subtask, access)",
        "Workflow(steps)",
        "WorkflowError()",
        "parse(text, workers, max_steps, allow_empty)",
        "messages(question, workers, max_steps, previous)",
        "execute(workflow, question, pool)",
    ],
    "grpo": ["advantages(rewards, mask)", "token_logprobs(model, prompt, completions)"],
    "eval": [
        "Problem(id, question, answer, grader, kind)",
        "load(name, split, limit)",
        "grade(problem, response)",
        "same_math(answer, gold)",
        "same_short(answer, gold)",
        "pick_letter(response, choices)",
        "final_answer(response)",
        "run_code(program, name, tests, seconds, memory)",
        "passes_livecodebench(code, tests, fn_name, seconds)",
        "extract_code(response)",
        "passes_bigcodebench(code, test, entry_point, code_prompt, seconds)",
        "same_output(out, expected, returned)",
    ],
}


@pytest.mark.parametrize(
    "call", [f"{file}.{call}" for file, calls in NAMES.items() for call in calls]
)
def test_the_names_that_other_code_relies_on(call):
    path, parameters = re.fullmatch(r"([\w.]+)\((.*)\)", call).groups()
    file, *names = path.split(".")
    found = importlib.import_module(file)
    for name in names:
        found = getattr(found, name)
    wanted = [name for name in parameters.split(", ") if name]
    has = [*inspect.signature(found).parameters] if wanted else []
    # sample.generate passes **settings on to generate_each, which has the remaining parameters.
    assert set(wanted) <= set(has) or "settings" in has


def test_a_rollout_says_what_a_workflow_came_to():
    from workflow import Rollout

    known = {field.name for field in dataclasses.fields(Rollout)} | set(dir(Rollout))
    assert known >= {"answer", "responses", "cost", "calls"}
