"""Generated code: what honest programs need, twenty-odd attacks, and the rules of LiveCodeBench and BigCodeBench."""
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest

import eval as evaluation
from eval import extract_code, passes_bigcodebench, passes_livecodebench, run_code, same_output

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the attacks and what holds against them are Linux's")
ALONE = sys.platform == "linux" and os.getuid() == 0 and int(open("/proc/self/uid_map").read().split()[-1]) < 65536


@pytest.fixture(scope="module")
def lacks():
    """What the sandbox says this system lacks."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert run_code("print(1)", None, [""], 60) == [b"1\n"]
    return " ".join(str(w.message) for w in said)


@pytest.fixture
def full(lacks):
    if lacks:
        pytest.skip(lacks)


@pytest.fixture
def victim():
    """A process of the same user, with a key in its environment."""
    key = "key-" + secrets.token_hex(8)
    process = subprocess.Popen(["sleep", "300"], env={"SECRET_KEY": key})
    yield process.pid, key
    assert process.poll() is None, "killed"
    process.kill()
    process.wait()


def output(program, test="", seconds=60.0, **kwargs):
    out, = run_code(program, None, [test], seconds, **kwargs)
    return None if out is None else out.decode()


def passes(code, *pairs, fn_name=None):
    return passes_livecodebench(code, pairs, fn_name, 60)


def running(*words):
    """Numbers of the processes that have all the words on their command line."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as f:
                line = f.read()
        except OSError:
            continue
        if all(word.encode() in line for word in words):
            found.append(int(pid))
    return found


# ---------------------------------------------------------------------------------------------------------------------------------
# Extraction


@pytest.mark.parametrize("response, code", [
    ("So:\n```python\nprint(1)\n```\nDone.", "print(1)"),
    ("```\nfirst\n```\nbetter:\n```py\nsecond\n```", "second"),
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
    for hostile in ("```\n" * 200_000, "`" * 1_000_000, "<answer>" * 100_000, "``` " + " " * 1_000_000, "```a" * 200_000):
        extract_code(hostile)


# ---------------------------------------------------------------------------------------------------------------------------------
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
    "global total\ntotal = 0\ndef add(x):\n    global total\n    total += x\nfor line in sys.stdin:\n    add(int(line))\nprint(total)",
    "def main():\n    print(sum(map(int, stdin)))\nif __name__ == '__main__':\n    main()",
    "from __future__ import annotations\nprint(sum(map(int, sys.stdin)))",
    "try:\n    total = 0\n    while True:\n        total += int(input())\nexcept EOFError:\n    print(total)",
    "import atexit\ntotal = sum(map(int, sys.stdin))\natexit.register(lambda: print(total))",
    "import threading\nthreading.stack_size(1 << 27)\nthreading.Thread(target=lambda: print(sum(map(int, sys.stdin)))).start()",
    "sys.stdout.buffer.write(b'%d' % sum(map(int, sys.stdin.buffer)))",
    "import os\nos.write(1, b'%d' % sum(map(int, sys.stdin)))",
    "def f(n):\n    return n and 1 + f(n - 1)\nprint(sum(map(int, sys.stdin)) + f(20_000) - 20_000)",
    "len(str(10 ** 20_000))\nprint(sum(map(int, sys.stdin)))",
    "class A:\n    pass\nimport pickle\npickle.loads(pickle.dumps(A()))\nprint(sum(map(int, sys.stdin)))",
    "with open('notes', 'w') as f:\n    f.write('6')\nprint(open('notes').read())",
    "h: List[int] = []\nheappush(h, gcd(12, 18))\nprint(max(Counter(h)), end='')",
    "import numpy as np\nprint(np.array(sys.stdin.read().split(), dtype=int).sum())",
    "import subprocess\nprint(subprocess.run(['expr', '3', '+', '3'], capture_output=True, text=True).stdout)",
])
def test_honest_programs(program):
    assert passes(program, ("1\n2\n3\n", "6\n"), ("1\n2\n3", "6"))


@pytest.mark.parametrize("program", ["print(6)\nraise ValueError", "print(6)\n1 / 0", "print(6", "import no_such_module",
                                     "print(6)\nos._exit(3)", "print(6, flush=True)\nos.kill(os.getpid(), 9)", "print(7)", "", "\0"])
def test_failing_programs(program):
    assert not passes("import os\n" + program, ("", "6"))


@pytest.mark.parametrize("code", [
    "class Solution:\n    def add(self, a: List[int], b: int) -> List[int]:\n        return [x + b for x in a]",
    "class Solution:\n    def add(self, a, b):\n        print('debugging', [9])\n        return tuple(x + b for x in a)",
    "def add(a, b):\n    return [x + b for x in a]",
    "import numpy as np\ndef add(a, b):\n    return [np.int64(x + b) for x in a]",
    "import dataclasses\n@dataclasses.dataclass\nclass P:\n    x: int\ndef add(a, b):\n    return [P(x + b).x for x in a]",
    "def add(a, b):\n    return [x + b for x in a]\nif __name__ == '__main__':\n    raise SystemExit(1)",
    "seen = []\ndef add(a, b):\n    seen.append(1)\n    assert len(seen) == 1\n    return [x + b for x in a]",  # each test starts afresh
])
def test_calls(code):
    assert passes(code, ("[1, 2]\n10", "[11, 12]"), ("[]\n1", "[]"), fn_name="add")


def test_all_tests_must_pass():
    add = "def add(a, b):\n    return a + b"
    assert passes(add, ("1\n2", "3"), ("3\n4", "7"), fn_name="add")
    assert not passes(add, ("1\n2", "3"), ("3\n4", "8"), fn_name="add")
    assert not passes(add, ("1\n2", "4"), ("3\n4", "7"), fn_name="add")
    assert not passes(add, ("1\n2", "3"), ("1\n[2]", "3"), fn_name="add")
    assert not passes(add, ("1\n2", "3"), fn_name="sub")
    assert not passes("print(6)", ("1", "6"), ("2", "7"))


@pytest.mark.parametrize("value", ["[(1, 2)]", "{1: 2}.keys()", "range(3)", "object()", "lambda: 1", "{1}", "iter([1])", "b'1'", "1j",
                                   "None"])
def test_only_data_crosses(value):
    out, = run_code(f"def f(_):\n    return {value}", "f", ["0"], 60)
    assert not any(same_output(out, expected, True) for expected in ("[[1, 2]]", "[1]", "[0, 1, 2]", "1", '"1"', "false"))


def test_no_tests_is_an_error():
    with pytest.raises(ValueError, match="without tests"):
        passes_livecodebench("print(1)", [])


def test_many_at_once():
    with ThreadPoolExecutor(4) as threads:
        outs = list(threads.map(lambda i: output(f"import os\nopen('x', 'w').write('{i}')\nprint(open('x').read(), os.listdir())"),
                                range(12)))
    assert outs == [f"{i} ['x']\n" for i in range(12)]


def test_a_python_that_does_not_start(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(OSError, match="no sandbox with .*false"):
        run_code("print(1)", None, [""], 5)


# ---------------------------------------------------------------------------------------------------------------------------------
# Attacks, the mildest first

LIMITED = {  # each says "stopped" when it is refused more
    "recursion": "def f():\n    f()\nf()",
    "deep source": "eval('(' * 100_000 + ')' * 100_000)",
    "a large file": "with open('f', 'wb') as f:\n    for _ in range(64):\n        f.write(bytes(1 << 20))",
    "many files": "for i in range(16):\n    with open(str(i), 'wb') as f:\n        f.write(bytes(16 << 20))",
    "many descriptors": "a = []\nwhile True:\n    a.append(os.fdopen(os.dup(0)))",
    "memory bomb": "a = []\nfor _ in range(64):\n    a.append(bytes(1 << 25))",
    "shared memory bomb": "import mmap\na = [mmap.mmap(-1, 1 << 28) for _ in range(16)]",
    "endless output": "while True:\n    os.write(1, bytes(1 << 20))",
}
SELF_ENDING = "import time\nend = time.time() + 20\n"  # should nothing else end it
ENDLESS = {
    "sleep": "import time\ntime.sleep(60)",
    "loop": "while time.time() < end:\n    pass",
    "signal masking": "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\nfor s in (1, 2, 14, 15, 24):\n"
                      "    signal.signal(s, signal.SIG_IGN)\nwhile time.time() < end:\n    pass",
    "endless errors": "import sys\nwhile time.time() < end:\n    sys.stderr.write('x' * 100_000)",
    "a thread that stays": "import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()",
    "stopping itself": "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
}


@pytest.mark.parametrize("attack", LIMITED)
def test_limits(attack, lacks):
    if attack == "many files" and "namespaces" in lacks:
        pytest.skip(lacks)
    program = "\n".join(["import os", "try:", *(f"    {line}" for line in LIMITED[attack].split("\n")),
                         "except (MemoryError, OSError, RecursionError, SyntaxError):", "    a = None",
                         "    for file in os.listdir():", "        os.remove(file)", "    os.truncate(1, 0)", "    os.lseek(1, 0, 0)",
                         "    os.write(1, b'stopped')"])
    assert run_code(program, None, [""], 60, memory=1) == [b"stopped"]


@pytest.mark.parametrize("attack", ENDLESS)
def test_it_ends(attack, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert run_code(SELF_ENDING + ENDLESS[attack], None, ["", ""], 1) == [None, None]
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("body", ["return 'x' * 40_000_000", "a = []\n    a.append(a)\n    return a", "return 10 ** 10_000",
                                  "a = []\n    for _ in range(100_000):\n        a = [a]\n    return a", "return ['x' * 1000] * 40_000"])
def test_huge_return(body):
    assert not passes(f"def f(_):\n    {body}", ("0", "[]"), fn_name="f")


FORKS = """
import os, time
try:
    for made in range(5000):
        if os.fork() == 0:
            time.sleep(30)
            os._exit(0)
except BlockingIOError:
    print("stopped")
"""
BOMBS = {
    "generations": "while time.time() < end:\n    try:\n        os.fork()\n    except OSError:\n        pass",
    "sessions and orphans": "for _ in range(9):\n    os.fork()\nwhile time.time() < end:\n    try:\n"
                            "        if os.fork():\n            os._exit(0)\n        os.setsid()\n    except OSError:\n        pass",
    "waking one another": "while time.time() < end:\n    try:\n        os.fork()\n    except OSError:\n        pass\n"
                          "    try:\n        os.kill(os.getppid(), 18)\n    except OSError:\n        pass",
}


def test_fork_bomb(monkeypatch):
    marked = "# " + secrets.token_hex(8)  # on the command line of all that stems from the supervisor
    source = evaluation.supervisor_source() + marked
    monkeypatch.setattr(evaluation, "supervisor_source", lambda: source)
    if ALONE:
        pytest.skip("a root alone in its namespace has no other user to become, and its processes may have no limit")
    assert output(FORKS) == "stopped\n"  # mild: one generation that sleeps
    for bomb in BOMBS.values():  # they end by themselves, should the sandbox fail to end them
        run_code(f"import os\n{SELF_ENDING}{bomb}", None, [""], 1)
        assert not running(marked), "some live on"


DAEMON = """
import os, sys
read, write = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv("/bin/sleep", ["sleep", input()])  # closes its end of the pipe
    os._exit(0)
os.close(write)
os.read(read, 1)
print("started")
"""


def test_a_daemon_ends_with_it():
    word = f"61.{secrets.randbelow(10**12):012}"  # seconds
    assert output(DAEMON, word) == "started\n"
    assert not running("sleep", word)


def test_kill(victim, lacks):
    if "signal" in lacks:
        pytest.skip(lacks)
    pid, _ = victim
    out = output("import os\nfor pid in map(int, input().split()):\n    try:\n        os.kill(pid, 9)\n        print('killed')\n"
                 "    except OSError:\n        pass", str(pid))
    assert out == ""
    for target, number in (("os.getppid()", 9), ("os.getppid()", 19), ("0", 9)):  # the supervisor cannot be made to say a test passed
        assert output(f"import os\nos.kill({target}, {number})", seconds=2) in (None, "")


def test_keys(victim, monkeypatch, lacks):
    if "environment" in lacks:
        pytest.skip(lacks)
    pid, key = victim
    monkeypatch.setenv("SECRET_KEY", key)
    out = output("""
import os
print(dict(os.environ))
for pid in {*filter(str.isdigit, os.listdir("/proc")), *input().split(), "self"}:
    for file in ("environ", "cmdline", "mem", "maps", "fd/0", "cwd/x", "root/x"):
        try:
            with open(f"/proc/{pid}/{file}", "rb") as f:
                print(pid, file, f.read(100_000) if file != "mem" or pid not in ("self", str(os.getpid())) else "")
        except OSError as e:
            pass
print("end")
""", f"{pid} {os.getpid()}")
    assert out.endswith("end\n") and key not in out and "SECRET" not in out
    assert f"\n{pid} environ" not in out and f"\n{pid} mem" not in out and f"\n{os.getpid()} mem" not in out


OUTSIDE = """
import os
path = input()
def attempt(what):
    try:
        print(what())
    except OSError as e:
        print(type(e).__name__)
os.symlink(path, "link")
attempt(lambda: open(path).read())
attempt(lambda: open("link").read())
attempt(lambda: os.listdir(os.path.dirname(path)))
attempt(lambda: open(path, "a").write("x"))
attempt(lambda: open("link", "w").write("x"))
attempt(lambda: open(path + "2", "w").write("x"))
attempt(lambda: os.remove(path))
attempt(lambda: os.rename(path, path + "3"))
attempt(lambda: os.link(path, "hard"))
attempt(lambda: os.mkdir(os.path.dirname(path) + "/d"))
attempt(lambda: os.truncate(path, 0))
"""


def test_folders_outside(lacks):
    """A project may stand anywhere, also in /usr/src/app, and its data hold the answers."""
    if "Landlock" in lacks:
        pytest.skip(lacks)
    there = [p for p in ("/usr/src", "/usr/include", "/opt", "/srv", "/var", "/mnt", "/etc") if os.path.isdir(p) and not sys.base_prefix.startswith(p)]
    told = output("import os\nfor path in input().split():\n    try:\n        print(os.listdir(path))\n    except PermissionError:\n        print('no')",
                  " ".join(there))
    assert there and told.split("\n") == [*["no"] * len(there), ""]


def test_files_outside(tmp_path, lacks):
    """Neither what stands elsewhere (the answers, the project) is read nor anything written; what links lead to stays."""
    if "Landlock" in lacks:
        pytest.skip(lacks)
    for folder in (tmp_path, *tmp_path.parents[:3]):
        assert os.access(folder, os.X_OK)
    secret = tmp_path / "answers.json"
    secret.write_text("42")
    secret.chmod(0o666)
    tmp_path.chmod(0o777)
    lines = output(OUTSIDE, str(secret)).split()
    assert len(lines) == 11 and all(line.endswith("Error") for line in lines), lines
    assert os.listdir(tmp_path) == ["answers.json"] and secret.read_text() == "42"
    assert output(f"import os\nprint(open({evaluation.__file__!r}).read())") is None


def test_the_folder_is_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert output("import os\nos.symlink('/', 'root')\nos.mkdir('locked', 0)\nfor _ in range(2000):\n    os.mkdir('d')\n    os.chdir('d')\n"
                  "print('made')") == "made\n"
    assert not os.listdir(tmp_path)


def test_sockets(full):
    """Nothing that listens on this machine is reached; a program's own loopback works (BigCodeBench starts servers there)."""
    name = b"\0" + secrets.token_hex(8).encode()
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp, \
            socket.socket(socket.AF_UNIX) as unix:
        udp.bind(("127.0.0.1", 0))
        unix.bind(name)
        unix.listen()
        for s in (tcp, udp, unix):
            s.setblocking(False)
        out = output(f"""
import socket
for kind, address in ((socket.SOCK_STREAM, {tcp.getsockname()!r}), (socket.SOCK_DGRAM, {udp.getsockname()!r}), (0, {name!r})):
    try:
        with socket.socket(socket.AF_INET if kind else socket.AF_UNIX, kind or socket.SOCK_STREAM) as s:
            s.connect(address)
            s.send(b"x")
            print("sent", kind)
    except OSError as e:
        print(type(e).__name__)
with socket.create_server(("127.0.0.1", 8000)) as server, socket.create_connection(("127.0.0.1", 8000)) as client:
    print("own")
""")
        assert out and "sent 1\n" not in out and "sent 0\n" not in out and out.endswith("own\n")
        for s in (tcp, unix):
            with pytest.raises(BlockingIOError):
                s.accept()
        with pytest.raises(BlockingIOError):
            udp.recv(1)


def test_privileges(full):
    out = output("""
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
print(libc.mount(b"none", b"/proc", b"tmpfs", 0, None), libc.setuid(0) if os.getuid() else -1, libc.umount2(b"/proc", 2), libc.chroot(b"/"))
print(libc.ptrace(16, os.getppid(), 0, 0), os.getuid())
for line in open("/proc/self/status"):
    if line.startswith(("CapEff", "NoNewPrivs")):
        print(line.split()[1])
""").split()
    assert out[:5] == ["-1"] * 5 and out[7] == "1"
    assert out[5] != "0" or ALONE
    assert int(out[6], 16) & ~6 == 0  # nothing but, for root, reading files


FORGERIES = {
    "exit code": "import os\ndef f(x):\n    os._exit(0)",
    "exit": "import sys\nsys.exit(0)",
    "exit inside": "import sys\ndef f(x):\n    sys.exit(0)",
    "atexit": "import atexit, os\ndef f(x):\n    return 0\natexit.register(os._exit, 0)",
    "markers": "def f(x):\n    print('PASS', 'passed', True, '42')\n    return 0",
    "__eq__": "class E:\n    __eq__ = lambda *_: True\n    __ne__ = lambda *_: False\n    __hash__ = None\ndef f(x):\n    return E()",
    "int with __eq__": "class E(int):\n    __eq__ = lambda *_: True\n    __hash__ = int.__hash__\ndef f(x):\n    return E(0)",
    "str with __eq__": "class E(str):\n    __eq__ = lambda *_: True\n    __hash__ = str.__hash__\ndef f(x):\n    return E()",
    "list with __eq__": "class E(list):\n    __eq__ = lambda *_: True\ndef f(x):\n    return E()",
    "ANY": "from unittest.mock import ANY\ndef f(x):\n    return ANY",
    "item": "class E:\n    def item(self):\n        return self\ndef f(x):\n    return E()",
    "json": "import json\njson.dumps = lambda *a, **k: 'true'\ndef f(x):\n    return 0",
    "builtins": "import builtins\nbuiltins.all = builtins.any = lambda *_: True\nbuiltins.list = tuple\ndef f(x):\n    return 0",
    "descriptors": "import os\ndef f(x):\n    for fd in range(256):\n        try:\n            os.write(fd, b'2\\n42\\n2\\n42')\n"
                   "        except OSError:\n            pass\n    return 0",
    "supervisor's descriptors": "import os\ndef f(x):\n    for fd in range(256):\n        try:\n"
                                "            open(f'/proc/{os.getppid()}/fd/{fd}', 'wb').write(b'2\\n42\\n' * 9)\n"
                                "        except OSError:\n            pass\n    return 0",
    "nan": "def f(x):\n    return float('nan')",
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_forged_success(forgery):
    assert not passes(FORGERIES[forgery], ("1", "42"), ("2", "42"), fn_name="f")


def test_the_expected_output_is_not_there():
    """Looked for in every frame, every object that gc knows, every descriptor and the process's memory."""
    word = secrets.token_hex(16)
    program = """
import ctypes, gc, os, re, sys
half = input()
found, frame = [], sys._getframe()
while frame:
    found += [repr(v) for v in frame.f_locals.values()]
    found += [repr(v) for v in frame.f_globals.values()]
    frame = frame.f_back
found += [o for o in gc.get_objects() if isinstance(o, str)] + [repr(vars(o)) for o in gc.get_objects() if type(o).__name__ == "module"]
for fd in range(256):
    try:
        os.lseek(fd, 0, 0)
        found.append(os.read(fd, 1 << 20).decode(errors="replace"))
    except OSError:
        pass
with open("/proc/self/maps") as maps:
    for line in maps:
        start, end = (int(x, 16) for x in line.split()[0].split("-"))
        if " rw" in line and end - start < 1 << 28:
            found.append(ctypes.string_at(start, end - start).decode("latin-1"))
text = "\\n".join(found)
print(re.findall(half + "[0-9a-f]{16}", text)[:1], len(text) > 10_000, half in text)
"""
    assert passes(program, (word[:16], "[] True True"))
    assert not passes(program, (word[:16], word))


# ---------------------------------------------------------------------------------------------------------------------------------
# BigCodeBench

PROMPT = "import math\nfrom collections import Counter\ndef task_func(words, n=2):\n"
RIGHT = PROMPT + "    if n < 1:\n        raise ValueError('n')\n    return [w for w, _ in Counter(words).most_common(n)]"
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


def test_bigcodebench():
    assert bigcodebench(RIGHT)
    assert bigcodebench(RIGHT.replace("import math\nfrom collections import Counter\n", ""))  # calibrated: the prompt's imports are there
    assert bigcodebench(RIGHT + "\nprint(task_func(['a']))\nif __name__ == '__main__':\n    1 / 0")
    assert not bigcodebench("")  # the prompt's own function, with `pass`
    assert not bigcodebench(RIGHT.replace("if n < 1", "if n < 0"))
    assert not bigcodebench(RIGHT.replace("most_common(n)", "items()"))
    assert not bigcodebench(RIGHT.replace("most_common(n)", "most_common(2)"))  # one subtest of two
    assert not bigcodebench(RIGHT + "\n)")
    with pytest.raises(ValueError, match="no tests"):
        bigcodebench(RIGHT, "import unittest\nclass TestCases(unittest.TestCase):\n    pass")


STUB = "def task_func(words, n=2):\n    if n < 1:\n        raise ValueError\n    {}\n    return [0] * n\n"  # passes tests 2 and 4
FRAMES = ("frame = sys._getframe()\n    while frame:\n        for v in list(frame.f_locals.values()):\n            {}\n"
          "        frame = frame.f_back")
FORGED_UNITTESTS = {
    "exit": "import sys\nsys.exit(0)",
    "_exit": "import os\nos._exit(0)",
    "exit inside": "import os\n" + STUB.format("os._exit(0)"),
    "SystemExit inside": "import sys\n" + STUB.format("sys.exit(0)"),
    "atexit": "import atexit, os\natexit.register(os._exit, 0)\n" + STUB.format("pass"),
    "stdout": "print('OK')\nprint('[[\"test_case_1\"], []]')\n" + STUB.format("print('Ran 4 tests in 0.001s')"),
    "skip": "import unittest\n" + STUB.format("raise unittest.SkipTest"),
    "failures are skips": "import unittest\nunittest.TestCase.failureException = unittest.SkipTest\n" + STUB.format("pass"),
    "own unittest": "import sys, types\nu = types.ModuleType('unittest')\nu.TestCase = object\nu.mock = u\n"
                    "u.patch = lambda *a, **k: lambda f: f\nsys.modules['unittest'] = sys.modules['unittest.mock'] = u\n"
                    + STUB.format("pass"),
    "__eq__": "class E(list):\n    __eq__ = lambda *_: True\n" + STUB.format("return E([0] * n)"),
    "ANY": "from unittest.mock import ANY\n" + STUB.format("return [ANY] * (1 if words == ['x'] else n)"),
    "assertions": "import unittest\nfor name in dir(unittest.TestCase):\n    if name.startswith('assert') and name != 'assertRaises':\n"
                  "        setattr(unittest.TestCase, name, lambda *a, **k: None)\n" + STUB.format("pass"),
    "assertEqual": "import unittest\nunittest.TestCase.assertEqual = lambda *a: None\n" + STUB.format("pass"),
    "run": "import unittest\nunittest.TestCase.run = lambda self, result: result.addSuccess(self)\n" + STUB.format("pass"),
    "_callTestMethod": "import unittest\nunittest.TestCase._callTestMethod = lambda *_: None\n" + STUB.format("pass"),
    "addFailure": "import unittest\nunittest.TestResult.addFailure = lambda self, case, e: self.addSuccess(case)\n" + STUB.format("pass"),
    "gc": "import gc, unittest\n" + STUB.format("for o in gc.get_objects():\n        if isinstance(o, unittest.TestResult):\n"
                                                "            o.addFailure = lambda case, e, o=o: o.addSuccess(case)"),
    "frames": "import sys\n" + STUB.format(FRAMES.format(
        "if hasattr(v, 'assertEqual'):\n                v.assertEqual.__func__.__code__ = (lambda self, a, b, msg=None: None).__code__")),
    "result in frames": "import sys\n" + STUB.format(FRAMES.format(
        "if hasattr(v, 'failures'):\n                v.addFailure = lambda case, e, v=v: v.addSuccess(case)")),
    "descriptors": "import os\n" + STUB.format(
        "for fd in range(3, 256):\n        try:\n            os.write(fd, b'[[\"test_case_1\", \"test_case_2\", \"test_case_3\", '\n"
        "                     b'\"test_case_4\"], []]')\n        except OSError:\n            pass\n    os._exit(0)"),
}


@pytest.mark.parametrize("forgery", FORGED_UNITTESTS)
def test_forged_unittests(forgery):
    assert not bigcodebench(FORGED_UNITTESTS[forgery])


def test_libraries_compare_by_element():
    pytest.importorskip("numpy")
    test = ("import unittest\nimport numpy as np\nclass TestCases(unittest.TestCase):\n    def test_it(self):\n"
            "        np.testing.assert_array_equal(task_func(3), [0, 1, 2])\n        self.assertEqual(task_func(0).shape, (0,))")
    assert bigcodebench("import numpy as np\ndef task_func(n):\n    return np.arange(n)", test, "def task_func(n):\n")
    assert not bigcodebench("import numpy as np\ndef task_func(n):\n    return np.ones(n)", test, "def task_func(n):\n")


def test_bench_runs_what_it_times(capsys):
    """The programs pass, and the last line is JSON."""
    evaluation.bench(4)
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["passed"] == found["solutions"] == 4 and found["per_second"] > 0
