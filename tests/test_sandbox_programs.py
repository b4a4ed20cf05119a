"""Generated code that means well: what honest programs need, and the rules of LiveCodeBench and BigCodeBench,
against answers worked out by hand."""
import json
import sys
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import pytest

import eval as evaluation
from eval import extract_code, passes_bigcodebench, passes_livecodebench, run_code, same_output

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has what the sandbox is built of")


def output(program, test="", seconds=60.0, **kwargs):
    out, = run_code(program, None, [test], seconds, **kwargs)
    return None if out is None else out.decode()


def passes(code, *pairs, fn_name=None):
    return passes_livecodebench(code, pairs, fn_name, 60)


@linux
def test_a_full_disk_costs_no_core(monkeypatch):
    """A core is taken only once there is a folder to work in, or the next solutions would wait for it for ever."""
    def full():
        raise OSError(28, "No space left on device")

    free = evaluation.FREE_CORES.qsize()
    with monkeypatch.context() as patched, pytest.raises(OSError, match="No space"):
        patched.setattr(evaluation.tempfile, "mkdtemp", full)
        output("print(1)")
    assert evaluation.FREE_CORES.qsize() == free > 0


# -----------------------------------------------------------------------------------------------------------
# Extraction


@pytest.mark.parametrize("response, code", [
    ("So:\n```python\nprint(1)\n```\nDone.", "print(1)"),
    ("```\nfirst\n```\nbetter:\n```py\nsecond\n```", "second"),
    ("```python\nprint(1)\n```\nIt prints:\n```\n1\n```", "print(1)"),
    ("```python\nfirst\n```\n```Python3\nsecond\n```\nRun it:\n```bash\npython main.py\n```", "second"),
    ("```cpp\nint x;\n```\n```\nx = 1\n```", "x = 1"),
    ("```python\nx = 1\n```\n<answer>B</answer>", "x = 1"),
    ("<answer>print(2)</answer>", "print(2)"),
    ("<answer>print(1)</answer> no, <answer>\nprint(2)\n</answer>", "print(2)"),
    ("<answer>\n```python\nprint(3)\n```\n</answer>", "print(3)"),
    ("<answer>\n```python\nprint(3)\n```</answer>", "print(3)"),
    ("```python\nprint(3)\n``` This prints 3.", "print(3)"),
    ("<answer>```python\nprint(3)```</answer>", "print(3)"),
    ("cut off:\n```python\nfor x in y:\n    print(x)", "for x in y:\n    print(x)"),
    ("1. item\n   ```python\n   if x:\n       y()\n   ```", "if x:\n    y()"),
    ("```python\r\na = 1\r\nb = 2\r\n```\r\n", "a = 1\r\nb = 2\r"),
    ("```python\nprint('```')\n```", "print('```')"),
    ("```python\nprint(1)```", "print(1)"),
    ("`inline` only", ""),
    ("", ""),
])
def test_extract(response, code):
    assert extract_code(response) == code


def test_extraction_is_linear():
    for hostile in ("```\n", "`" * 5, "<answer>", " " * 5, "```a"):
        extract_code("``` " + 200_000 * hostile)
        extract_code(200_000 * hostile)


# -----------------------------------------------------------------------------------------------------------
# LiveCodeBench


@pytest.mark.parametrize("out, expected, same", [
    (b"1 2\n3\n", "1 2\n3", True),
    (b"  1 2  \n3", "1 2\n3\n\n", True),
    (b"1\n\n2", "1\n2", False),  # an empty line in the middle counts
    (b"1  2", "1 2", True),
    (b"a  b", "a b", False),  # as text, spaces count
    (b"1.0 2.50", "1 2.5", True),
    (b"1e3", "1000", True),
    (b"50000000000000001", "50000000000000000", False),  # equal as floats
    (b"0.3333333", "0.33333333", False),
    (b"yes 1.0", "yes 1", False),  # a line is numbers or text
    (b"YES", "Yes", False),
    (b"nan", "nan", True),
    (b"sNaN", "1", False),
    (b"NaN 1", "nan 1", False),
    (b"1e999999999999", "1e999999999998", False),
    (b"", "", True),
    (b"1", "", False),
    (b"\xff", "1", False),
    (None, "", False),
    (b"1 " * 100_000, "1", False),
    (b"\n" * 100_000 + b"1", "1", False),
])
def test_printed(out, expected, same):
    assert same_output(out, expected, False) == same


@pytest.mark.parametrize("out, expected, same", [
    (b"[1, 2]", "[1,2]", True),
    (b"[2, 1]", "[1, 2]", False),
    (b"1.0", "1", True),
    (b"true", "1", True),  # True == 1, as in the official grader
    (b"0.30000000000000004", "0.3", False),
    (b'"a"', '"a"', True),
    (b"null", "null", True),
    (b"null", "false", False),
    (b'{"tuple": [1]}', "[1]", False),
    (b"", "null", False),
    (b"not JSON", "1", False),
    (b"[" * 900, "1", False),
    (b"[" * 100_000, '"' + "x" * 1000 + '"', False),
    (b"1" * 5000, "1" * 60, False),
    (b"1" * 5000, "1" * 5000, True),  # Python itself reads no int of more than 4,300 digits
    (b"[" + b"1" * 5000 + b"]", "[" + "1" * 4999 + "2]", False),
    (b'{"a": 1, "b": [2]}', '{"b": [2], "a": 1.0}', True),
    (b'{"a": 1}', '{"a": 1, "b": 2}', False),
    (b'"\\u00e9,["', '"\u00e9,["', True),
    (b'"a,b"', '["a","b"]', False),
    (b"[[], []]", "[[[]]]", False),
])
def test_returned(out, expected, same):
    assert same_output(out, expected, True) == same


@pytest.mark.parametrize("program", [
    "print(sum(int(line) for line in sys.stdin))",
    "import sys\nprint(sum(map(int, sys.stdin.buffer.read().split())))",
    "print(sum(map(int, open(0).read().split())))",
    "print(sum(map(int, open('/dev/stdin'))))",
    "import os\nprint(sum(map(int, os.read(0, 10**6).split())))",
    "total = 0\nfor _ in range(3):\n    total += int(input())\nprint(total)\nquit()\nprint('no')",
    "print(int(input()) + int(input()) + int(input()))\nsys.exit(1)",
    "print(sum(map(int, sys.stdin.readlines())))\nexit('done')",
    "global total\ntotal = 0\ndef add(x):\n    global total\n    total += x\nfor line in sys.stdin:\n"
    "    add(int(line))\nprint(total)",
    "def main():\n    print(sum(map(int, stdin)))\nif __name__ == '__main__':\n    main()",
    "from __future__ import annotations\nprint(sum(map(int, sys.stdin)))",
    "try:\n    total = 0\n    while True:\n        total += int(input())\nexcept EOFError:\n    print(total)",
    "import atexit\ntotal = sum(map(int, sys.stdin))\natexit.register(lambda: print(total))",
    "import threading\nthreading.stack_size(1 << 27)\n"
    "threading.Thread(target=lambda: print(sum(map(int, sys.stdin)))).start()",
    "sys.stdout.buffer.write(b'%d' % sum(map(int, sys.stdin.buffer)))",
    "import os\nos.write(1, b'%d' % sum(map(int, sys.stdin)))",
    "def f(n):\n    return n and 1 + f(n - 1)\nprint(sum(map(int, sys.stdin)) + f(20_000) - 20_000)",
    "len(str(10 ** 20_000))\nprint(sum(map(int, sys.stdin)))",
    "class A:\n    pass\nimport pickle\npickle.loads(pickle.dumps(A()))\nprint(sum(map(int, sys.stdin)))",
    "f = open(1, 'w')\nf.write(str(sum(map(int, sys.stdin))))",  # never closed
    "import io\nstdout = io.TextIOWrapper(io.FileIO(1, 'w', closefd=False))\n"
    "stdout.write(str(sum(map(int, sys.stdin))))",
    "class Out(io.IOBase):\n    text = ''\n    def write(self, s):\n        self.text += s\n"
    "    def flush(self):\n"
    "        os.write(1, self.text.encode())\n        self.text = ''\nimport os\nsys.stdout = Out()\n"
    "print(sum(map(int, sys.stdin)))",
    "import concurrent.futures as c\nc.ThreadPoolExecutor(4).submit(lambda: print(sum(map(int, sys.stdin))))",
    "import multiprocessing as m\nwith m.Pool(2) as pool:\n    print(sum(pool.map(int, sys.stdin)))",
    "from multiprocessing import shared_memory as s\nm = s.SharedMemory(create=True, size=9)\nm.buf[0] = 6\n"
    "print(m.buf[0])\nm.unlink()",
    "import tempfile\nwith tempfile.NamedTemporaryFile('w+') as f:\n    f.write('6')\n    f.seek(0)\n"
    "    print(f.read())",
    "import subprocess\nprint(subprocess.check_output([sys.executable, '-c', 'print(6)'], text=True))",
    "import os, time\n"
    "print(6 if os.path.expanduser('~') == os.getcwd() and time.localtime().tm_zone == 'UTC' else 0)",
    "with open('notes', 'w') as f:\n    f.write('6')\nprint(open('notes').read())",
    "h: List[int] = []\nheappush(h, gcd(12, 18))\nprint(max(Counter(h)), end='')",
    "import numpy as np\nprint(np.array(sys.stdin.read().split(), dtype=int).sum())",
    "import subprocess\n"
    "print(subprocess.run(['expr', '3', '+', '3'], capture_output=True, text=True).stdout)",
])
@linux
def test_honest_programs(program):
    if "multiprocessing" in program and evaluation.sandbox_lacks():
        pytest.skip("without namespaces no memory is shared")
    assert passes(program, ("1\n2\n3\n", "6\n"), ("1\n2\n3", "6"))


@pytest.mark.parametrize("program", ["print(6)\n"
                                     "raise ValueError", "print(6)\n"
                                                         "1 / 0", "print(6", "import no_such_module",
                                     "print(6)\n"
                                     "os._exit(3)", "print(6, flush=True)\n"
                                                    "os.kill(os.getpid(), 9)", "print(7)", "", "\0"])
@linux
def test_failing_programs(program):
    assert not passes("import os\n" + program, ("", "6"))


@pytest.mark.parametrize("code", [
    "class Solution:\n    def add(self, a: List[int], b: int) -> List[int]:\n"
    "        return [x + b for x in a]",
    "class Solution:\n    def add(self, a, b):\n        print('debugging', [9])\n"
    "        return tuple(x + b for x in a)",
    "def add(a, b):\n    return [x + b for x in a]",
    "import numpy as np\ndef add(a, b):\n    return [np.int64(x + b) for x in a]",
    "import dataclasses\n@dataclasses.dataclass\nclass P:\n    x: int\ndef add(a, b):\n"
    "    return [P(x + b).x for x in a]",
    "def add(a, b):\n    return [x + b for x in a]\nif __name__ == '__main__':\n    raise SystemExit(1)",
    "seen = []\ndef add(a, b):\n    seen.append(1)\n    assert len(seen) == 1\n"
    "    return [x + b for x in a]",  # each test starts afresh
])
@linux
def test_calls(code):
    assert passes(code, ("[1, 2]\n10", "[11, 12]"), ("[]\n1", "[]"), fn_name="add")


@linux
@pytest.mark.parametrize("name", ["gcd", "factorial", "max", "sorted", "mean"])
def test_what_stands_before_a_program_is_no_solution(name):
    """LiveCodeBench's prelude imports all of math, statistics and builtins; a program's own function counts."""
    assert not passes("", ("1\n2", "1"), fn_name=name) and not passes("x = 1", ("[3]", "3"), fn_name=name)
    assert passes(f"def {name}(*numbers):\n    return len(numbers)", ("1\n2", "2"), fn_name=name)


@linux
def test_all_tests_must_pass():
    add = "def add(a, b):\n    return a + b"
    assert passes(add, ("1\n2", "3"), ("3\n4", "7"), fn_name="add")
    assert not passes(add, ("1\n2", "3"), ("3\n4", "8"), fn_name="add")
    assert not passes(add, ("1\n2", "4"), ("3\n4", "7"), fn_name="add")
    assert not passes(add, ("1\n2", "3"), ("1\n[2]", "3"), fn_name="add")
    assert not passes(add, ("1\n2", "3"), fn_name="sub")
    assert not passes("print(6)", ("1", "6"), ("2", "7"))


@pytest.mark.parametrize("value, expected, same", [
    ("(1, 2)", "[1, 2]", True),  # at the top alone a tuple is a list
    ("[(1, 2)]", "[[1, 2]]", False),
    ("{'a': (1, 2)}", '{"a": [1, 2]}', False),
    ("{'a': [1, 2]}", '{"a": [1, 2]}', True),
    ("{1: 2}", '{"1": 2}', False),
    ("{None: 2}", '{"null": 2}', False),
    ("[{'a': {1: 2}}]", '[{"a": {"1": 2}}]', False),
    ("[{'tuple': [1]}]", '[{"tuple": [1]}]', True),
    ("defaultdict(int, a=1)", '{"a": 1}', True),
    ("Counter('aab')", '{"a": 2, "b": 1}', True),
    ("10 ** 6000", "1" + "0" * 6000, True),
    ("10 ** 6000 + 1", "1" + "0" * 6000, False),
    ("[1, 2.0, True, None, 'x']", '[1, 2, 1, null, "x"]', True),
    ("['1']", "[1]", False),
    ("'0.5'", "0.5", False),
])
@linux
def test_values_as_in_the_official_grader(value, expected, same):
    """lcb_runner/evaluation/testing_util.py: prediction == json.loads(expected), a tuple on top a list."""
    assert passes(f"def f(_):\n    return {value}", ("0", expected), fn_name="f") == same


@linux
def test_a_function_reads_large_integers():
    assert passes("def f(n):\n    return n + 1", ("9" * 6000, "1" + "0" * 6000), fn_name="f")


def peak(out, expected, returned):
    """Bytes that comparing takes beside the output itself."""
    tracemalloc.start()
    try:
        assert not same_output(out, expected, returned)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("returned", [False, True])
@pytest.mark.parametrize("piece", [b"1 ", b"1,", b"\n", b"[", b"1\n", b"\xff", b'"",', b"{", b"1"])
def test_a_wrong_output_costs_nothing(piece, returned):
    assert peak(piece * ((32 << 20) // len(piece)), "1", returned) < 1 << 20


@pytest.mark.parametrize("out, returned", [
    (b"1 " * 4_500_000, False),
    (b"1\n" * 4_500_000, False),
    (b"[" + b"1," * 4_500_000 + b"1]", True),
    (b"[" * 9_000_000, True),
    (b"[" + b'"",' * 3_000_000 + b'""]', True),
    (b"[" + b"{}," * 3_000_000 + b"{}]", True),
])
def test_a_wrong_output_costs_no_more_than_a_right_one(out, returned):
    """Ten times as long as expected, of as many tokens as fit: a list of them would take 250 MB and more."""
    expected = json.dumps("x" * 1_000_000) if returned else "1" + "0" * 1_000_000
    assert peak(out, expected, returned) < 40 << 20


@linux
def test_a_long_output_is_not_read():
    program = "print('x' * int(input()))"
    tests = ["10", "1000", "5"]
    first, second = b"x" * 10 + b"\n", b"x" * 1000 + b"\n"
    assert run_code(program, None, tests, 60, most=1001) == [first, second, b"x" * 5 + b"\n"]
    assert run_code(program, None, tests, 60, most=1000) == [first, None, None]


def test_a_program_cannot_tell_how_long_the_expected_output_is(monkeypatch):
    """Nothing that is sent with it depends on that: YES and NO would be known by their lengths."""
    jobs = []
    monkeypatch.setattr(evaluation, "run_code", lambda *job, **more: jobs.append((job, more)) or [None, None])
    for expected in ("YES", "NO"):
        passes_livecodebench("print('YES')", [["", expected], ["1", 100 * expected]])
    assert jobs[0] == jobs[1]


@pytest.mark.parametrize("value", ["[(1, 2)]", "{1: 2}.keys()", "range(3)", "object()", "lambda: 1", "{1}",
                                   "iter([1])", "b'1'", "1j", "None"])
@linux
def test_only_data_crosses(value):
    out, = run_code(f"def f(_):\n    return {value}", "f", ["0"], 60)
    for expected in ("[[1, 2]]", "[1]", "[0, 1, 2]", "1", '"1"', "false"):
        assert not same_output(out, expected, True)


def test_who_fails_is_not_run_further(monkeypatch):
    """No code runs nothing, a wrong program the first tests, a right one all, each once."""
    asked = []
    monkeypatch.setattr(evaluation, "run_code", lambda code, name, inputs, *_, **options: (asked.extend(inputs), run_code(
        code, name, inputs, *_, **options))[1])
    tests = [[str(i), str(i)] for i in range(20)]
    assert not passes_livecodebench(extract_code("I think so."), [["", ""]]) and not asked
    assert not passes_livecodebench("print(3)", tests) and len(asked) == evaluation.FIRST_TESTS < 20
    asked.clear()
    assert passes_livecodebench("print(input())", tests) and asked == [str(i) for i in range(20)]


def test_no_tests_is_an_error():
    with pytest.raises(ValueError, match="without tests"):
        passes_livecodebench("print(1)", [])


@linux
def test_many_at_once():
    with ThreadPoolExecutor(4) as threads:
        outs = list(threads.map(lambda i: output(f"import os\nopen('x', 'w').write('{i}')\n"
                                                 f"print(open('x').read(), os.listdir())"),
                                range(12)))
    assert outs == [f"{i} ['x']\n" for i in range(12)]


@linux
def test_a_python_that_does_not_start(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(OSError, match="no sandbox with .*false"):
        run_code("print(1)", None, [""], 5)


# -----------------------------------------------------------------------------------------------------------
# BigCodeBench

PROMPT = "import math\nfrom collections import Counter\ndef task_func(words, n=2):\n"
RIGHT = PROMPT + """    if n < 1:
        raise ValueError('n')
    return [w for w, _ in Counter(words).most_common(n)]"""
TESTS = """
import os
import unittest
from unittest.mock import patch
class TestCases(unittest.TestCase):
    def setUp(self):
        with open("words.txt", "w") as f:
            f.write("a b a")
    def tearDown(self):
        os.remove("words.txt")
    def test_case_1(self):
        self.assertEqual(task_func(open("words.txt").read().split()), ["a", "b"])
    def test_case_2(self):
        self.assertTrue(isinstance(task_func(["x"]), list))
        with self.assertRaises(ValueError):
            task_func([], 0)
    @patch("collections.Counter.most_common", return_value=[("z", 1)])
    def test_case_3(self, mock):
        self.assertEqual(task_func(["x"]), ["z"])
    def test_case_4(self):
        for n in (1, 2):
            with self.subTest(n=n):
                self.assertEqual(len(task_func("abc", n)), n)
"""


def bigcodebench(code, test=TESTS, prompt=PROMPT):
    return passes_bigcodebench(code, test, "task_func", prompt, 60)


@linux
def test_bigcodebench():
    assert bigcodebench(RIGHT)
    assert bigcodebench(RIGHT.replace("import math\n"
                                      "from collections import Counter\n", ""))  # calibrated
    assert bigcodebench(RIGHT + "\nprint(task_func(['a']))\nif __name__ == '__main__':\n    1 / 0")
    assert not bigcodebench("")  # the prompt's own function, with `pass`
    assert not bigcodebench(RIGHT.replace("if n < 1", "if n < 0"))
    assert not bigcodebench(RIGHT.replace("most_common(n)", "items()"))
    assert not bigcodebench(RIGHT.replace("most_common(n)", "most_common(2)"))  # one subtest of two
    assert not bigcodebench(RIGHT + "\n)")
    with pytest.raises(ValueError, match="no tests"):
        bigcodebench(RIGHT, "import unittest\nclass TestCases(unittest.TestCase):\n    pass")


STUB = """def task_func(words, n=2):  # passes tests 2 and 4
    if n < 1:
        raise ValueError
    {}
    return [0] * n
"""
FORGED_UNITTESTS = {  # the cheap cheats; patching unittest while it runs is none of them, and passes
    "exit": "import sys\nsys.exit(0)",
    "_exit": "import os\nos._exit(0)",
    "exit inside": "import os\n" + STUB.format("os._exit(0)"),
    "SystemExit inside": "import sys\n" + STUB.format("sys.exit(0)"),
    "atexit": "import atexit, os\natexit.register(os._exit, 0)\n" + STUB.format("pass"),
    "stdout": "print('OK')\nprint('[\"test_case_1\"]')\n" + STUB.format("print('Ran 4 tests in 0.001s')"),
    "skip": "import unittest\n" + STUB.format("raise unittest.SkipTest"),
    "failures are skips": "import unittest\n"
                          "unittest.TestCase.failureException = unittest.SkipTest\n" + STUB.format("pass"),
    "own unittest": "import sys, types\nu = types.ModuleType('unittest')\nu.TestCase = object\nu.mock = u\n"
                    "u.patch = lambda *a, **k: lambda f: f\n"
                    "sys.modules['unittest'] = sys.modules['unittest.mock'] = u\n"
                    + STUB.format("pass"),
}


@pytest.mark.parametrize("forgery", FORGED_UNITTESTS)
@linux
def test_forged_unittests(forgery):
    assert not bigcodebench(FORGED_UNITTESTS[forgery])


@linux
def test_libraries_compare_by_element():
    pytest.importorskip("numpy")
    test = ("import unittest\nimport numpy as np\nclass TestCases(unittest.TestCase):\n"
            "    def test_it(self):\n"
            "        np.testing.assert_array_equal(task_func(3), [0, 1, 2])\n"
            "        self.assertEqual(task_func(0).shape, (0,))")
    assert bigcodebench("import numpy as np\ndef task_func(n):\n"
                        "    return np.arange(n)", test, "def task_func(n):\n")
    assert not bigcodebench("import numpy as np\ndef task_func(n):\n"
                            "    return np.ones(n)", test, "def task_func(n):\n")


@linux
def test_the_benchmark(capsys):
    """What tests/bench.py times does pass, and its last line is JSON."""
    import bench
    bench.sandbox(solutions="3", tests="2", against=evaluation.__file__)
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["here"]["per_second"] > 0 and found["there"]["cpu_ms_per_test"] >= 0
