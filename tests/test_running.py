"""Tests of running code: finding a response's program, the sandbox, and judging an output.

Outputs must be judged as the official graders of LiveCodeBench and BigCodeBench judge them. Honest
programs must pass. Hostile programs must fail to reach what they attack: a file, a process, a
server, a key, or an expected output.
"""

import contextlib
import glob
import os
import secrets
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from eval import (
    Problem,
    check_sandbox,
    extract_code,
    failure,
    passes_bigcodebench,
    passes_livecodebench,
    run_code,
    same_output,
    use_sandbox,
)


def refused():
    """Return why programs cannot run on this machine, or None if they can."""
    try:
        check_sandbox()
    except OSError as e:
        return str(e)


sandboxed = pytest.mark.skipif(refused() is not None, reason=str(refused()))


def output(program, test="", seconds=60.0, **more):
    """Return what a program prints when its input is `test`, or None if the program fails."""
    (out,) = run_code(program, None, [test], seconds, **more)
    return None if out is None else out.decode()


def passes(code, *tests, fn_name=None):
    """Return whether code passes all tests, each [input, output], by LiveCodeBench's rules."""
    return passes_livecodebench(code, tests, fn_name, 60)


# --------------------------------------------------------------------------------------------------
# Reading a response, judging an output


@pytest.mark.parametrize(
    "response, code",
    [
        ("So:\n```python\nprint(1)\n```\nDone.", "print(1)"),
        ("```python\nprint(1)\n```\nIt prints:\n```\n1\n```", "print(1)"),
        (
            "```python\nfirst\n```\n```Python3\nsecond\n```\nRun it:\n```bash\npython main.py\n```",
            "second",
        ),
        ("```python\nx = 1\n```\n<answer>B</answer>", "x = 1"),
        ("<answer>print(1)</answer> no, <answer>\nprint(2)\n</answer>", "print(2)"),
        ("<answer>```python\nprint(3)```</answer>", "print(3)"),
        ("cut off:\n```python\nfor x in y:\n    print(x)", "for x in y:\n    print(x)"),
        ("1. item\n   ```python\n   if x:\n       y()\n   ```", "if x:\n    y()"),
        ("```python\nprint('```')\n```", "print('```')"),
        ("`inline` only", ""),
        *(
            (f"{fence}\nprint(4)\n{fence[:3]}\nOutput:\n```\n4\n```", "print(4)")
            for fence in (
                "``` python",
                "```python title=x",
                "```python:a.py",
                '```python {linenos="table"}',
                "```{python}",
                "```{.python}",
                "```py",
                "~~~python",
            )
        ),
        ("````python\nprint('```\n```')\n````", "print('```\n```')"),
        ("```pycon\n>>> 1\n```\n```c++\nint x;\n```", "int x;"),
        ("```python\r\nprint(5)\r\n```\r\nDone.", "print(5)\r"),
    ],
)
def test_extract(response, code):
    assert extract_code(response) == code


PRINTED = [
    (b"1 2\n3\n", "1 2\n3", True),
    (b"  1 2  \n3", "1 2\n3\n\n", True),
    (b"1\n\n2", "1\n2", False),  # an empty line in the middle counts
    (b"a  b", "a b", False),  # between words, every space counts
    (b"1.0  2.50", "1 2.5", True),
    (b"50000000000000001", "50000000000000000", False),  # as floats they would be equal
    (b"yes 1.0", "yes 1", False),  # a line with a word is compared as text
    (b"NaN 1", "nan 1", False),
    (b"1", "", False),
    (None, "", False),
    (b"1 " * 100_000, "1", False),
]
RETURNED = [
    (b"[1, 2]", "[1,2]", True),
    (b"1.0", "1", True),
    (b"true", "1", True),  # True == 1, as in the official grader
    (b"0.30000000000000004", "0.3", False),
    (b'"0.5"', "0.5", False),
    (b"not JSON", "1", False),
    (b"[" * 100_000, '"' + "x" * 20_000 + '"', False),
    (b"1" * 5000, "1" * 5000, True),  # longer than the 4,300 digits that int() accepts
    (b"[" + b"1" * 5000 + b"]", "[" + "1" * 4999 + "2]", False),
    (b'{"a": 1, "b": [2]}', '{"b": [2], "a": 1.0}', True),
]


@pytest.mark.parametrize(
    "out, expected, same, returned",
    [(*row, False) for row in PRINTED] + [(*row, True) for row in RETURNED],
)
def test_same_output(out, expected, same, returned):
    assert same_output(out, expected, returned) == same


# --------------------------------------------------------------------------------------------------
# Honest programs

# Each program prints 6, the sum of its input's lines 1, 2 and 3. Some programs read no input.
SUMS = [
    "print(sum(int(line) for line in sys.stdin))",
    "print(sum(map(int, open('/dev/stdin'))))",
    "import os\nos.write(1, b'%d' % sum(map(int, os.read(0, 10**6).split())))",
    "total = int(input()) + int(input()) + int(input())\nprint(total)\nquit()\nprint('no')",
    "print(sum(map(int, sys.stdin)))\nsys.exit(1)",
    "def main():\n    print(sum(map(int, stdin)))\nif __name__ == '__main__':\n    main()",
    "def f(n):\n    return n and 1 + f(n - 1)\n"
    "print(sum(map(int, sys.stdin)) + f(20_000) - 20_000)",
    "class A:\n    pass\nimport pickle\npickle.loads(pickle.dumps(A()))\n"
    "print(sum(map(int, sys.stdin)))",
    "import concurrent.futures as c\n"
    "c.ThreadPoolExecutor(4).submit(lambda: print(sum(map(int, sys.stdin))))",
    "import multiprocessing as m\nwith m.Pool(2) as pool:\n"
    "    print(sum(pool.map(int, sys.stdin)))",
    "from multiprocessing import shared_memory as s\nm = s.SharedMemory(create=True, size=9)\n"
    "m.buf[0] = 6\nprint(m.buf[0])\nm.unlink()",
    "import subprocess\n"
    "print(subprocess.check_output([sys.executable, '-c', 'print(6)'], text=True))",
    "import os, tempfile\n"
    "with tempfile.NamedTemporaryFile('w', dir=os.path.expanduser('~')) as f:\n"
    "    f.write('6')\n    f.flush()\n    print(open(f.name).read())",
    "h: List[int] = []\nheappush(h, gcd(12, 18))\nprint(max(Counter(h)), end='')",
    "import numpy as np\nprint(np.array(sys.stdin.read().split(), dtype=int).sum())",
    "import socket\nwith socket.create_server(('localhost', 0)) as server:\n"
    "    with socket.create_connection(server.getsockname()):\n        print(6)",
    "import resource, threading\nresource.setrlimit(resource.RLIMIT_STACK, (1 << 28, -1))\n"
    "threading.stack_size(1 << 27)\nthreading.Thread(target=lambda: print(6)).start()",
]


@sandboxed
@pytest.mark.parametrize("program", SUMS)
def test_honest_programs(program):
    assert passes(program, ["1\n2\n3\n", "6\n"], ["1\n2\n3", "6"])


@sandboxed
@pytest.mark.parametrize(
    "program",
    [
        "print(6)\n1 / 0",
        "print(6",
        "import no_such_module",
        "print(6, flush=True)\nos._exit(3)",
        "print(6, flush=True)\nos.kill(os.getpid(), 9)",
        "print(7)",
        "",
        "\0",
        "'\ud800'",
    ],
)
def test_failing_programs(program):
    assert not passes("import os\n" + program, ["", "6"])


@sandboxed
@pytest.mark.parametrize(
    "code",
    [
        "class Solution:\n    def add(self, a: List[int], b: int) -> List[int]:\n"
        "        print('debugging', [9])\n        return tuple(x + b for x in a)",
        "def add(a, b):\n    return [x + b for x in a]\n"
        "if __name__ == '__main__':\n    raise SystemExit(1)",
        "import numpy as np\ndef add(a, b):\n    return [np.int64(x + b) for x in a]",
        "seen = []\ndef add(a, b):\n    seen.append(1)\n    assert len(seen) == 1\n"
        "    return [x + b for x in a]",  # each test runs in a new process
        "class Solution:\n    pass\ndef add(a, b):\n    return [x + b for x in a]",
    ],
)
def test_functions(code):
    assert passes(code, ["[1, 2]\n10", "[11, 12]"], ["[]\n1\n", "[]"], fn_name="add")


@sandboxed
@pytest.mark.parametrize(
    "value, expected, same",
    [
        ("(1, 2)", "[1, 2]", True),  # a tuple counts as a list, but only if it is the value itself
        ("[(1, 2)]", "[[1, 2]]", False),
        ("{1: 2}", '{"1": 2}', False),
        ("defaultdict(int, a=1)", '{"a": 1}', True),
        ("10 ** 6000 + n", "1" + "0" * 6000, True),
        ("[1, 2.0, True, None, 'x']", '[1, 2, 1, null, "x"]', True),
        ("{1}", "[1]", False),
        ("'x' * 40_000_000", '"x"', False),
    ],
)
def test_values_as_in_the_official_grader(value, expected, same):
    """Values are compared with the expected JSON as in lcb_runner/evaluation/testing_util.py."""
    assert passes(f"def f(n):\n    return {value}", ["0", expected], fn_name="f") == same


@sandboxed
def test_what_stands_before_a_program_is_no_solution():
    assert not passes("x = 1", ["1\n2", "1"], fn_name="gcd")  # the prelude imports math.gcd
    assert passes("def gcd(*numbers):\n    return len(numbers)", ["1\n2", "2"], fn_name="gcd")


@sandboxed
def test_many_at_once():
    """Run eight programs, up to four at a time; each sees only its own file in /tmp."""
    program = (
        "import os\nopen(input(), 'w').close()\nprint([n for n in os.listdir() if n.isdigit()])"
    )
    with ThreadPoolExecutor(4) as threads:
        outs = list(threads.map(lambda i: output(program, str(i)), range(8)))
    assert outs == [f"['{i}']\n" for i in range(8)]


# --------------------------------------------------------------------------------------------------
# What `failure` says about a wrong program


def livecodebench(code, *tests):
    problem = Problem("id", "question", "", "code", extra={"tests": [*tests], "function": None})
    return failure(problem, f"```python\n{code}\n```")


@sandboxed
def test_an_empty_function_name_means_a_program():
    assert passes("print('hi')", ["", "hi"], fn_name="")


@sandboxed
@pytest.mark.parametrize(
    "code, told",
    [
        ("print(int(input()) * 2)", ""),
        ("print(int(input()) + 1)", "test 2 of 3: got '3\\n', expected '4'."),
        ("print(12 // (2 - int(input())) // 6)", "ZeroDivisionError: "),
        (
            "n = input()\nprint(2 if n == '1' else undefined)",
            "test 2 of 3: expected '4'. NameError: ",
        ),
        ("import os\nos._exit(7)", "test 1 of 3: expected '2'. ended with status 7"),
        ("", "no code"),
    ],
)
def test_a_failure_names_the_first_wrong_test(code, told):
    why = livecodebench(code, ["1", "2"], ["2", "4"], ["3", "6"])
    assert told in why and bool(told) == bool(why) and len(why) < 700
    with pytest.raises(ValueError, match="without tests"):
        livecodebench(code)


PROMPT = "from collections import Counter\ndef task_func(words, n=2):\n"
RIGHT = (
    PROMPT
    + """    if n < 1:
        raise ValueError('n')
    return [w for w, _ in Counter(words).most_common(n)]"""
)
TESTS = """
import unittest
class TestCases(unittest.TestCase):
    def setUp(self):
        with open("words.txt", "w") as f:
            f.write("a b a")
    def test_case_1(self):
        self.assertEqual(task_func(open("words.txt").read().split()), ["a", "b"])
    def test_case_2(self):
        self.assertRaises(ValueError, task_func, [], 0)
    def test_case_4(self):
        for n in (1, 2):
            with self.subTest(n=n):
                self.assertEqual(len(task_func("abc", n)), n)
"""


@sandboxed
@pytest.mark.parametrize(
    "code, told",
    [
        (RIGHT, ""),
        # The prompt, which contains the import, is put before the code.
        (RIGHT.removeprefix("from collections import Counter\n"), ""),
        (RIGHT + "\nprint(task_func(['a']))\nif __name__ == '__main__':\n    1 / 0", ""),
        ("pass", "TypeError"),  # defines nothing, so the prompt's empty function is tested
        (RIGHT.replace("if n < 1", "if n < 0"), "test_case_2"),
        # one of two subtests fails
        (RIGHT.replace("most_common(n)", "most_common(2)"), "test_case_4"),
        (RIGHT + "\n)", "SyntaxError"),
        ("import sys\nsys.exit(0)", "not every test ran"),
        ("import os\ndef task_func(*_):\n    os._exit(0)", "not every test ran"),
        ("import sys\ndef task_func(*_):\n    sys.exit(0)", "SystemExit"),
        ("import unittest\ndef task_func(*_):\n    raise unittest.SkipTest", "not every test ran"),
    ],
)
def test_bigcodebench(code, told):
    assert passes_bigcodebench(code, TESTS, "task_func", PROMPT, 60) == (not told)
    extra = {"test": TESTS, "entry_point": "task_func", "code_prompt": PROMPT}
    why = failure(Problem("id", "question", "", "unittest", extra=extra), f"```python\n{code}\n```")
    assert told in why and bool(told) == bool(why)


# --------------------------------------------------------------------------------------------------
# Hostile programs


@pytest.fixture
def secret(tmp_path):
    """Return a file that every user may read and change, in a folder that every user may change."""
    for folder in tmp_path.parents[:2]:
        folder.chmod(0o755)
    tmp_path.chmod(0o777)
    file = tmp_path / "answers.json"
    file.write_text("42")
    file.chmod(0o666)
    return file


# Attacks on the file at `path` and on its `folder`, which every user may change; on the process
# `pid`; on a `server`; and on the system's files and user ids.
ATTEMPTS = [
    "open(path).read()",
    "open(path, 'w').write('x')",
    "open(path + '2', 'w').write('x')",
    "os.symlink(path, 'link'), open('link').read()",
    "os.listdir(folder)",
    "os.remove(path)",
    "open('/etc/passwd').read()",
    "os.mkdir('/usr/bin/made')",
    "os.chmod('/usr', 0o777)",
    "open('/proc/1/mem', 'rb').read(1)",
    "os.kill(pid, 9)",
    "socket.create_connection(server, timeout=5)",
    "os.setuid(0) if os.getuid() else os.setgroups([1])",
]


@sandboxed
@pytest.mark.parametrize("attempt", ATTEMPTS)
def test_nothing_of_yours(attempt, secret):
    victim = subprocess.Popen(["sleep", "300"])
    with socket.create_server(("127.0.0.1", 0)) as server:
        said = output(f"""
import os, socket
path = {str(secret)!r}
folder = {str(secret.parent)!r}
pid = {victim.pid}
server = {server.getsockname()!r}
try:
    print("done", {attempt})
except OSError:
    print("refused")
""")
    assert victim.poll() is None
    victim.kill()
    victim.wait()
    assert (
        said == "refused\n"
        and secret.read_text() == "42"
        and os.listdir(secret.parent) == [secret.name]
    )


@sandboxed
def test_no_key(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "planted")
    program = (
        "import glob, os\nprint(dict(os.environ))\nfor file in glob.glob('/proc/[0-9]*/environ'):\n"
        "    if os.access(file, os.R_OK):\n        print(open(file).read())"
    )
    out = output(program)
    assert "PATH" in out and "OPENAI" not in out and "planted" not in out


def running(word):
    """Return whether any running process has the word in its command line."""
    for line in glob.glob("/proc/[0-9]*/cmdline"):
        with contextlib.suppress(OSError), open(line) as f:
            if word in f.read():
                return True
    return False


@sandboxed
@pytest.mark.parametrize("end", ["print('left')", "time.sleep(600)"])
def test_what_a_program_starts_ends_with_it(end):
    word = f"600.{secrets.randbelow(10**12):012}"  # seconds; unique, so that `running` finds it
    program = (
        f"import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
        f"        os.execl('/bin/sleep', 'sleep', '{word}')\n    os._exit(0)\n{end}"
    )
    run_code(program, None, [""], 2)
    deadline = time.monotonic() + 60
    while running(word) and time.monotonic() < deadline:
        time.sleep(0.01)  # the kernel may still be ending the killed processes
    assert not running(word)


# Resource -> a program that takes more and more of the resource, and should be stopped by a limit.
LIMITED = {
    "processes": "for _ in range(1000):\n    if os.fork() == 0:\n"
    "        os.execl('/bin/sleep', 'x', '60')",
    "memory": "a = []\nfor _ in range(64):\n    a.append(bytes(1 << 25))",
    "shared memory": "import mmap\na = [mmap.mmap(-1, 1 << 28) for _ in range(16)]",
    "descriptors": "a = []\nwhile True:\n    a.append(os.dup(0))",
    "a large file": "with open('f', 'wb') as f:\n    for _ in range(64):\n"
    "        f.write(bytes(1 << 20))",
    "many files": "for i in range(16):\n    open(str(i), 'wb').write(bytes(16 << 20))",
    "/dev/shm": "for i in range(16):\n    open(f'/dev/shm/{i}', 'wb').write(bytes(16 << 20))",
    "output": "while True:\n    os.write(1, bytes(1 << 20))",
}


@sandboxed
@pytest.mark.parametrize("attack", LIMITED)
def test_limits(attack):
    body = "\n    ".join(LIMITED[attack].split("\n"))
    program = f"""
import os
try:
    {body}
except (MemoryError, OSError, RecursionError):
    a = None
    os.truncate(1, 0)
    os.lseek(1, 0, 0)
    os.write(1, b"stopped")
"""
    assert output(program, memory=1) == "stopped"


@sandboxed
@pytest.mark.parametrize(
    "program",
    [
        "while True:\n    pass",
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()",
        "import os\nos.kill(os.getpid(), 19)\nimport time\ntime.sleep(60)",
        "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass",
    ],
)
def test_it_ends(program):
    assert run_code(program, None, ["", ""], 1) == [None, None]


@sandboxed
@pytest.mark.parametrize(
    "program",
    [
        "import os\ndef f(x):\n    os._exit(0)",
        "import sys\ndef f(x):\n    sys.exit(0)",
        "def f(x):\n    print('PASS', True, '42')\n    return 0",
        "class E(int):\n    __eq__ = lambda *_: True\n    __hash__ = int.__hash__\n"
        "def f(x):\n    return E(0)",
        "from unittest.mock import ANY\ndef f(x):\n    return ANY",
        "import json\njson.dumps = lambda *a, **k: 'true'\ndef f(x):\n    return 0",
    ],
)
def test_forged_success(program):
    assert not passes(program, ["1", "42"], fn_name="f")


@sandboxed
def test_the_expected_output_is_not_there():
    """A program that has the first half of the expected output does not find the second half.

    The program searches its file descriptors, and the dicts, lists and tuples that the garbage
    collector tracks.
    """
    word = secrets.token_hex(16)
    program = """
import gc, os, re
half = input()
found = [repr(o) for o in gc.get_objects() if type(o) in (dict, list, tuple)]
for fd in range(64):
    try:
        found.append(os.pread(fd, 1 << 20, 0).decode(errors="replace"))
    except OSError:
        pass
text = "\\n".join(found)
print(re.findall(half + "[0-9a-f]{16}", text), half in text)
"""
    assert "got '[] True\\n'" in livecodebench(program, [word[:16], word])


# --------------------------------------------------------------------------------------------------
# bwrap without permission, and no sandbox at all


def test_a_bwrap_that_may_not_is_refused_in_its_words(tmp_path, monkeypatch):
    bwrap = tmp_path / "bwrap"
    bwrap.write_text(
        "#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n"
    )
    bwrap.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(
        OSError, match="bwrap: No permissions(?s:.*)apparmor_restrict_unprivileged_userns=0"
    ):
        check_sandbox()
    with pytest.raises(OSError, match="No permissions"):  # not False: the program was not judged
        passes_livecodebench("print(1)", [["", "1"]])


def test_no_sandbox(monkeypatch):
    """Without a sandbox, programs still see no key, and root's programs run as another user."""
    monkeypatch.setenv("OPENAI_API_KEY", "planted")
    use_sandbox("none")
    try:
        if refused():
            pytest.skip(refused())
        assert passes(SUMS[0], ["1\n2\n3", "6"]) and not passes("print(input())", ["1", "2"])
        assert run_code("while True:\n    pass", None, [""], 1) == [None]
        program = "import os\nprint(os.getcwd(), os.getuid(), 'OPENAI_API_KEY' in os.environ)"
        folder, user, key = output(program).split()
        assert not os.path.exists(folder) and user != "0" and key == "False"
    finally:
        use_sandbox("bwrap")
