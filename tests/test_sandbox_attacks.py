"""Attacks on the sandbox as this system can build it: what they reached for is looked at from outside."""
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import warnings

import pytest

import eval as evaluation
from eval import passes_livecodebench, run_code

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is made of what Linux has")
ALONE = False  # as root in its namespace, with no other user to become
if sys.platform == "linux" and os.getuid() == 0:
    with open("/proc/self/uid_map") as users:
        ALONE = int(users.read().split()[-1]) < 65536


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


# -----------------------------------------------------------------------------------------------------------
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
    "signal masking": "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\n"
                      "for s in (1, 2, 14, 15, 24):\n"
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
                         "    for file in os.listdir():", "        os.remove(file)", "    os.truncate(1, 0)",
                         "    os.lseek(1, 0, 0)", "    os.write(1, b'stopped')"])
    assert run_code(program, None, [""], 60, memory=1) == [b"stopped"]


@pytest.mark.parametrize("attack", ENDLESS)
def test_it_ends(attack, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert run_code(SELF_ENDING + ENDLESS[attack], None, ["", ""], 1) == [None, None]
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("body", ["return 'x' * 40_000_000", "a = []\n    a.append(a)\n"
                                                             "    return a", "return 10 ** 10_000",
                                  "a = []\n    for _ in range(100_000):\n        a = [a]\n"
                                  "    return a", "return ['x' * 1000] * 40_000"])
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
                            "        if os.fork():\n            os._exit(0)\n        os.setsid()\n"
                            "    except OSError:\n        pass",
    "waking one another": "while time.time() < end:\n    try:\n        os.fork()\n    except OSError:\n"
                          "        pass\n"
                          "    try:\n        os.kill(os.getppid(), 18)\n    except OSError:\n        pass",
}


def test_fork_bomb(monkeypatch, lacks):
    marked = "# " + secrets.token_hex(8)  # on the command line of all that stems from the supervisor
    monkeypatch.setattr(evaluation, "START", evaluation.START + marked)
    if ALONE:
        pytest.skip("the processes of a root alone in its namespace may have no limit")
    refused = ["stopped\n", None] if lacks else ["stopped\n"]  # where the user's others count too, it is ended
    assert output(FORKS) in refused  # mild: one generation that sleeps
    for bomb in BOMBS.values():  # they end by themselves, should the sandbox fail to end them
        run_code(f"import os\n{SELF_ENDING}{bomb}", None, [""], 1)
        assert not running(marked), "some live on"


def test_kill(victim, lacks):
    if "signal" in lacks:
        pytest.skip(lacks)
    pid, _ = victim
    out = output("import os\nfor pid in map(int, input().split()):\n    try:\n        os.kill(pid, 9)\n"
                 "        print('killed')\n"
                 "    except OSError:\n        pass", str(pid))
    assert out == ""
    # the supervisor cannot be made to say that a test passed
    for target, number in (("os.getppid()", 9), ("os.getppid()", 19), ("0", 9)):
        assert output(f"import os\nos.kill({target}, {number})", seconds=2) in (None, "")


def test_keys(victim, monkeypatch, lacks):
    if "Landlock" in lacks:
        pytest.skip(lacks)
    pid, key = victim
    monkeypatch.setenv("SECRET_KEY", key)
    out = output("""
import os
print(dict(os.environ))
try:
    seen = os.listdir("/proc")
except OSError:
    seen = []
for pid in {*filter(str.isdigit, seen), *input().split(), "self"}:
    for file in ("environ", "cmdline", "mem", "maps", "fd/0", "cwd/x", "root/x"):
        try:
            with open(f"/proc/{pid}/{file}", "rb") as f:
                own = pid in ("self", str(os.getpid()))
                print(pid, file, "" if own and file == "mem" else f.read(100_000))
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
    folders = ("/usr/src", "/usr/include", "/opt", "/srv", "/var", "/mnt", "/home", "/run")
    there = [p for p in folders if os.path.isdir(p) and not sys.base_prefix.startswith(p)]
    told = output("import os\nfor path in input().split():\n    try:\n        print(os.listdir(path))\n"
                  "    except OSError:\n        print('no')",
                  " ".join(there))
    assert there and told.split("\n") == [*["no"] * len(there), ""]


def test_files_outside(tmp_path, lacks):
    """What stands elsewhere (the answers, the project) is not read or written, nor what links lead to."""
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


CHANGES = """
import ctypes, os, socket
path = input()
def attempt(what):
    try:
        print(what())
    except OSError as e:
        print("refused")
attempt(lambda: os.chmod(path, 0))
attempt(lambda: os.utime(path, (1, 1)))
attempt(lambda: os.setxattr(path, "user.x", b"x"))
attempt(lambda: os.chown(path, os.getuid(), os.getgid()))
attempt(lambda: os.chmod(os.path.dirname(path), 0))
attempt(lambda: socket.socket(socket.AF_UNIX).connect(path + ".socket"))
attempt(lambda: socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b"x", path + ".socket"))
attempt(lambda: socket.socket(socket.AF_UNIX).bind(path + ".other"))
libc = ctypes.CDLL(None, use_errno=True)
watch = libc.inotify_init1(0)
print("refused" if watch < 0 or libc.inotify_add_watch(watch, path.encode(), 0xfff) < 0 else "watched")
"""


def test_what_landlock_does_not_ask_about(tmp_path, lacks):
    """Modes, times, attributes, watches and sockets by path, of files that are this very user's."""
    tmp_path.chmod(0o777)
    file = tmp_path / "answers.json"
    file.write_text("42")
    file.chmod(0o666)

    def state():
        told = file.stat()
        return told.st_mode, told.st_mtime, told.st_uid, tmp_path.stat().st_mode, os.listdir(tmp_path)

    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{file}.socket")
        os.chmod(f"{file}.socket", 0o777)
        server.listen()
        server.setblocking(False)
        before = state()
        assert output(CHANGES, str(file)) == "refused\n" * 9
        with pytest.raises(BlockingIOError):
            server.accept()
        assert state() == before


def test_the_tree_has_nothing_of_the_host(full, tmp_path):
    """Not even names: the root holds Python's folders and empty ones; a test writes into none but its own."""
    out = output("""
import os
print(os.path.exists(input()))
print(sorted(os.listdir("/tmp")), sorted(os.listdir("/dev")), sorted(os.listdir("/etc")))
for folder, _, _ in os.walk("/"):
    if not folder.startswith(("/proc", "/tmp")):
        for attempt in (lambda: os.mkdir(folder + "/made"), lambda: os.chmod(folder, 0o777),
                        lambda: os.utime(folder)):
            try:
                attempt()
                print("changed", folder)
            except OSError:
                pass
    if folder.count("/") > 3:
        break
try:
    os.open("/proc/self/exe", os.O_RDWR)
    print("opened")
except OSError:
    pass
print("end")
""", str(tmp_path))
    lines = out.split("\n")
    assert lines[0] == "False" and lines[2:] == ["end", ""], lines
    devices = ["fd", "null", "random", "shm", "stderr", "stdin", "stdout", "urandom"]
    shown = sorted({part.split("/")[2] for part in (sys.prefix, sys.base_prefix) if part.startswith("/tmp/")})
    assert lines[1].startswith(f"{shown} {devices} [") and "shadow" not in lines[1]


def test_descriptors():
    """A test has its own input, its output, and nowhere to write errors."""
    program = """
import fcntl, os
def f(*_):
    found = []
    for fd in range(1024):
        try:
            fcntl.fcntl(fd, fcntl.F_GETFD)
            found.append([fd, stat.S_IFMT(os.fstat(fd).st_mode) == stat.S_IFREG, os.fstat(fd).st_size])
        except OSError:
            pass
    return found
import stat
"""
    found = json.loads(run_code(program, "f", ["1"], 60)[0])
    assert found == [[0, True, 1], [1, False, 0], [2, False, 0], [3, True, 0]]
    found = output(program + "print(f())", "12345")
    assert found == "[[0, True, 5], [1, True, 0], [2, False, 0], [3, False, 0]]\n"


LEFT_BEHIND = """
import os, socket, subprocess, sys, time
first = input() == "first"
if first:
    open("note", "w").write("x")
    open(os.path.expanduser("~/.note"), "w").write("x")
    open("/dev/shm/note" if os.path.islink("/dev/shm") else "note", "w").write("x")
    read, write = os.pipe()
    for i in range(4):
        if os.fork() == 0:
            try:
                os.setsid()
            except OSError:
                pass
            if os.fork() == 0:
                os.write(write, b"x")
                time.sleep(60)
            os._exit(0)
    for i in range(4):
        os.read(read, 1)
    print("left")
else:
    print(os.listdir("."), os.path.exists("/dev/shm/note"))
    if os.access("/proc/self/status", os.R_OK):
        try:
            print(len([p for p in os.listdir("/proc") if p.isdigit()]))
        except PermissionError:
            pass
"""


def test_nothing_of_a_test_is_there_in_the_next(lacks):
    """Neither processes nor files."""
    first, second = run_code(LEFT_BEHIND, None, ["first\n", "second\n"], 30)
    assert first == b"left\n"
    assert second in (b"[] False\n2\n", b"[] False\n") or lacks and second.startswith(b"[] False\n")


def test_no_other_test_is_in_memory(full):
    """The word of the test before and of the test after are looked for in all of the memory."""
    words = [f"word{secrets.token_hex(12)}" for _ in range(3)]
    program = """
import ctypes, re
own = input()
found = set()
with open("/proc/self/maps") as maps:
    for line in maps:
        start, end = (int(x, 16) for x in line.split()[0].split("-"))
        if " rw" in line and end - start < 1 << 28:
            found.update(re.findall(b"word[0-9a-f]{24}", ctypes.string_at(start, end - start)))
print(len(found), own.encode() in found)
"""
    assert run_code(program, None, words, 60) == [b"1 True\n"] * 3


TOGETHER = """
import ctypes, os, threading, time
way, processes, megabytes = input().split()
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
read, write = os.pipe()

def fill():
    if way == "page-tables":  # of 8 KB for each page that stands alone
        for i in range(int(megabytes) * 128):
            page = libc.mmap(ctypes.c_void_p((1 << 40) + (i << 30)), 4096, 1, 0x100022, -1, 0)
            ctypes.string_at(page, 1)
    else:
        block = bytearray(int(megabytes) << 20)
        for i in range(0, len(block), 4096):
            block[i] = 1
    os.write(write, b"x")
    time.sleep(60)

for _ in range(int(processes)):
    if os.fork() == 0:
        if way == "orphans" and os.fork():
            os._exit(0)
        if way == "threads":
            threading.Thread(target=fill).start()
            libc.syscall({exit}, 0)  # of this thread alone, which is the process's first
        fill()
for _ in range(int(processes)):
    os.read(read, 1)
print("filled")
"""


@pytest.mark.parametrize("way", ["children", "orphans", "threads", "page-tables"])
def test_memory_of_all_processes(way, lacks):
    if "memory" in lacks:
        pytest.skip(lacks)
    program = TOGETHER.replace("{exit}", "60" if os.uname().machine == "x86_64" else "93")
    assert run_code(program, None, [f"{way} 3 100"], 60, memory=1) == [b"filled\n"]
    assert run_code(program, None, [f"{way} 6 400"], 60, memory=1) == [None]


MEMORY_OF_NOBODY = {
    "shared mapping": "import mmap\nmmap.mmap(-1, 1 << 20)",
    "memfd": "os.memfd_create('x')",
    "/dev/shm": "f = open('/dev/shm/x', 'wb')\nfor _ in range(31):\n    f.write(bytes(1 << 20))\n"
                "for i in range(8):\n    open(f'/dev/shm/{i}', 'wb').write(bytes(31 << 20))",
    "many small files": "for i in range(20_000):\n    open(str(i), 'w').close()",
    "/dev/zero": "import mmap\nmmap.mmap(os.open('/dev/zero', os.O_RDWR), 1 << 20)",
}


@pytest.mark.parametrize("kind", MEMORY_OF_NOBODY)
def test_memory_of_nobody(kind, full):
    body = "\n".join(f"    {line}" for line in MEMORY_OF_NOBODY[kind].split("\n"))
    assert output(f"import os\ntry:\n{body}\n    done = 'done'\nexcept OSError:\n    done = 'refused'\n"
                  f"print(done)") == "refused\n"


def test_one_core():
    """Busy processes slow the core that their solution has, and cannot leave it."""
    out = output("""
import os
try:
    os.sched_setaffinity(0, range(64))
    print("moved")
except OSError:
    pass
print(len(os.sched_getaffinity(0)))
""")
    assert out == "1\n"


def test_the_folder_is_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert output("import os\nos.symlink('/', 'root')\nos.mkdir('locked', 0)\nfor _ in range(2000):\n"
                  "    os.mkdir('d')\n    os.chdir('d')\n"
                  "print('made')") == "made\n"
    assert not os.listdir(tmp_path)


def test_sockets(full):
    """Nothing that listens on this machine is reached; BigCodeBench's programs, which start servers, have a
    loopback of their own."""
    name = b"\0" + secrets.token_hex(8).encode()
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix, \
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        udp.bind(("127.0.0.1", 0))
        unix.bind(name)
        unix.listen()
        for s in (tcp, udp, unix):
            s.setblocking(False)
        out = output(f"""
import socket
for kind, address in ((socket.SOCK_STREAM, {tcp.getsockname()!r}), (socket.SOCK_DGRAM, {udp.getsockname()!r}),
                      (0, {name!r})):
    try:
        with socket.socket(socket.AF_INET if kind else socket.AF_UNIX, kind or socket.SOCK_STREAM) as s:
            s.connect(address)
            s.send(b"x")
            print("sent", kind)
    except OSError as e:
        print(type(e).__name__)
with socket.create_server(("127.0.0.1", 8000)), socket.create_connection(("127.0.0.1", 8000)):
    print("own")
""", loopback=True)
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
print(libc.mount(b"none", b"/proc", b"tmpfs", 0, None), libc.setuid(0) if os.getuid() else -1)
print(libc.umount2(b"/proc", 2), libc.chroot(b"/"))
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
    "__eq__": "class E:\n    __eq__ = lambda *_: True\n    __ne__ = lambda *_: False\n    __hash__ = None\n"
              "def f(x):\n    return E()",
    "int with __eq__": "class E(int):\n    __eq__ = lambda *_: True\n    __hash__ = int.__hash__\n"
                       "def f(x):\n    return E(0)",
    "str with __eq__": "class E(str):\n    __eq__ = lambda *_: True\n    __hash__ = str.__hash__\n"
                       "def f(x):\n    return E()",
    "list with __eq__": "class E(list):\n    __eq__ = lambda *_: True\ndef f(x):\n    return E()",
    "ANY": "from unittest.mock import ANY\ndef f(x):\n    return ANY",
    "item": "class E:\n    def item(self):\n        return self\ndef f(x):\n    return E()",
    "json": "import json\njson.dumps = lambda *a, **k: 'true'\ndef f(x):\n    return 0",
    "builtins": "import builtins\nbuiltins.all = builtins.any = lambda *_: True\nbuiltins.list = tuple\n"
                "def f(x):\n    return 0",
    "descriptors": "import os\ndef f(x):\n    for fd in range(256):\n        try:\n"
                   "            os.write(fd, b'2\\n42\\n2\\n42')\n"
                   "        except OSError:\n            pass\n    return 0",
    "supervisor's descriptors": "import os\ndef f(x):\n    for fd in range(256):\n        try:\n"
                                "            file = open(f'/proc/{os.getppid()}/fd/{fd}', 'wb')\n"
                                "            file.write(b'2\\n42\\n' * 9)\n"
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
found += [o for o in gc.get_objects() if isinstance(o, str)]
found += [repr(vars(o)) for o in gc.get_objects() if type(o).__name__ == "module"]
for fd in range(256):
    try:
        os.lseek(fd, 0, 0)
        found.append(os.read(fd, 1 << 20).decode(errors="replace"))
    except OSError:
        pass
try:
    maps = open("/proc/self/maps")
except PermissionError:
    maps = []
for line in maps:
    start, end = (int(x, 16) for x in line.split()[0].split("-"))
    if " rw" in line and end - start < 1 << 28:
        found.append(ctypes.string_at(start, end - start).decode("latin-1"))
text = "\\n".join(found)
print(re.findall(half + "[0-9a-f]{16}", text)[:1], len(text) > 10_000, half in text)
"""
    assert passes(program, (word[:16], "[] True True"))
    assert not passes(program, (word[:16], word))


