"""Test each package except torch in the lowest version that requirements.txt allows.

With these versions and the installed torch, the seven main files must be importable, and a worker
of the local pool must answer.
"""

import os
import re
import subprocess
import sys

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PROGRAM = """
import sys
from importlib.metadata import version

for requirement in sys.argv[1:]:
    name, _, lowest = requirement.partition("==")
    assert version(name).startswith(lowest), f"{name} is {version(name)}"
import train, workers

pool = workers.load_pool("local")
chat = [{"role": "user", "content": "Question:\\nWhat is 6 * 7?\\n\\nYour task:\\nCalculate it."}]
print(pool[0].chat(chat).text)
"""


def test_the_lowest_versions_are_enough(tmp_path):
    with open(os.path.join(ROOT, "requirements.txt"), encoding="utf-8") as file:
        lowest = re.sub(">=", "==", file.read()).split()
    lowest = [requirement for requirement in lowest if not requirement.startswith("torch==")]
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-compile"]
    install += ["--target", tmp_path]
    installed = subprocess.run([*install, *lowest], capture_output=True, text=True, timeout=600)
    if installed.returncode:
        pytest.skip(f"pip cannot install them: {installed.stderr.strip()[-200:]}")
    answered = subprocess.run(
        [sys.executable, "-c", PROGRAM, *lowest],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert answered.stdout == "42\n", answered.stderr
