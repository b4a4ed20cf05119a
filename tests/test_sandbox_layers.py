"""The sandbox on systems that lack a layer, each made by a filter that refuses the layer's system calls to
the supervisor; and its table of system calls against the kernel's headers."""
import json
import os
import re
import secrets
import socket
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

import eval as evaluation
from eval import Linux, check_sandbox, own_cores, run_code, sandbox_lacks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has what the sandbox is built of")
PYTHON_IS_EVERYBODYS = all(os.stat(folder).st_mode & 1 for file in (os.__file__, np.__file__) for folder in Path(file).parents)
X86_64 = os.uname().machine == "x86_64"
HEADERS = ["/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "/usr/include/asm-generic/unistd.h"]

REFUSE = """
import ctypes, struct
def refuse(*calls):
    lines = [(0x20, 0, 0, 0)]
    for call in calls:
        lines += [(0x15, 0, 1, call), (0x06, 0, 0, 0x50000 | 1)]
    code = b"".join(struct.pack("HBBI", *line) for line in [*lines, (0x06, 0, 0, 0x7fff0000)])
    array = ctypes.create_string_buffer(code)
    libc = ctypes.CDLL(None)
    libc.prctl(38, 1, 0, 0, 0)
    assert libc.prctl(22, 2, struct.pack("H6xQ", len(code) // 8, ctypes.addressof(array)), 0, 0) == 0
"""
UNSHARE, MOUNT, LANDLOCK, SETSID = (272, 165, 444, 112) if X86_64 else (97, 40, 444, 157)
SYSTEMS = {  # what is refused, and what each says that it lacks
    "whole": ([], []),
    "no namespaces": ([UNSHARE], ["no namespaces"]),
    "no mounts": ([MOUNT], ["no namespaces ([Errno 1] mount: "]),
    "no Landlock": ([LANDLOCK], []),
    "neither": ([UNSHARE, LANDLOCK], ["no namespaces", "no Landlock"]),
}


@pytest.fixture(params=SYSTEMS)
def system(request, monkeypatch):
    """The name of a system; solutions run as they would there."""
    refused, _ = SYSTEMS[request.param]
    if request.param == "neither" and os.getuid() == 0 and not PYTHON_IS_EVERYBODYS:
        pytest.skip("there another user than root must read this Python, and cannot")
    if request.param == "no Landlock" and sandbox_lacks():
        pytest.skip("without namespaces that is the system that has neither")
    if request.param == "whole" and sandbox_lacks():
        pytest.skip("; ".join(sandbox_lacks()))
    if refused:
        monkeypatch.setattr(evaluation, "START", f"{REFUSE}\nrefuse(*{refused})\n{evaluation.START}")
    monkeypatch.setattr(warnings, "warn", lambda text, stacklevel: None)
    return request.param


def output(program, test=""):
    out, = run_code(program, None, [test], 60)
    return None if out is None else out.decode()


def test_each_says_what_it_lacks(system):
    lacks = sandbox_lacks.__wrapped__()
    expected = SYSTEMS[system][1]
    if system != "whole" and not sandbox_lacks():
        assert len(lacks) == len(expected) and all(any(e in text for text in lacks) for e in expected), lacks
    assert output("print(int(input()) + 1)", "1") == "2\n"
    assert run_code("def f(x):\n    return [x]", "f", ["1", "2"], 60) == [b"[1]", b"[2]"]
    assert output("import numpy\nimport decimal, subprocess\n"
                  "print(subprocess.check_output(['expr', '1', '+', '1'], text=True))") == "2\n\n"
    assert output("print(open('/dev/stdin').read())", "x") == "x\n"


def test_training_refuses_a_part(system, monkeypatch):
    monkeypatch.setattr(evaluation, "sandbox_lacks", sandbox_lacks.__wrapped__)
    check_sandbox(partial=True)
    if SYSTEMS[system][1]:
        with pytest.raises(RuntimeError, match="--sandbox=partial"):
            check_sandbox(partial=False)
    elif not sandbox_lacks():
        check_sandbox(partial=False)


def test_a_warning_says_so(monkeypatch):
    monkeypatch.setattr(evaluation, "START", f"{REFUSE}\nrefuse({UNSHARE})\n{evaluation.START}")
    with pytest.warns(UserWarning, match="no namespaces .*: it sees names"):
        assert run_code("print(1)", None, [""], 60) == [b"1\n"]


def test_what_fails_behind_the_namespaces_is_told_as_it_is(monkeypatch):
    """As with a /dev/null that is a plain file, no test can be shut in, and none runs."""
    monkeypatch.setattr(evaluation, "START", f"{REFUSE}\nrefuse({SETSID})\n{evaluation.START}")
    with pytest.raises(OSError, match=r"(?s)no sandbox .*PermissionError\(1, 'Operation not permitted'\)"):
        run_code("print(1)", None, [""], 60)


# -----------------------------------------------------------------------------------------------------------
# The filter of system calls


def rows(table):
    return {name: (x86_64, aarch64) for name, x86_64, aarch64 in (row.split() for row in table.split(","))}


TABLES = [Linux.UNKNOWN, Linux.CHECKED, Linux.DENIED, Linux.DENIED_WITHOUT_NAMESPACES]


@pytest.mark.parametrize("column", [0, 1])
def test_numbers_are_the_headers(column):
    """Of every call that this header knows; at least nine in ten."""
    if not os.path.exists(HEADERS[column]):
        pytest.skip("no " + HEADERS[column])
    with open(HEADERS[column]) as f:
        known = dict(re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", f.read()))
    found = compared = 0
    for table in TABLES:
        for name, numbers in rows(table).items():
            found += numbers[column] != "-"
            if name in known:
                assert numbers[column] == known[name], name
                compared += 1
            elif column == 0:
                assert numbers[0] not in known.values(), name
    assert found > 70 and compared >= 0.9 * found


CALLS = """
import ctypes, json
libc = ctypes.CDLL(None, use_errno=True)
refused = []
for name, number in json.loads(input()).items():
    ctypes.set_errno(0)
    minus = ctypes.c_long(-1)
    result = libc.syscall(ctypes.c_long(number), minus, minus, minus, minus, minus, minus)
    if result == -1 and ctypes.get_errno() == {error}:
        refused.append(name)
print(json.dumps(sorted(refused)))
"""


def test_denied_calls(system):
    """Each is refused whatever its arguments, by every system."""
    here = {name: numbers[not X86_64] for name, numbers in rows(Linux.DENIED).items()}
    denied = {name: int(number) for name, number in here.items() if number != "-"}
    assert len(denied) > 50
    assert json.loads(output(CALLS.format(error=1), json.dumps(denied))) == sorted(denied)
    later = {"clone3": 435, "not yet made": 463, "much later": 5000}
    if X86_64:
        later["of x32"] = 0x40000000 + 39
    assert json.loads(output(CALLS.format(error=38), json.dumps(later))) == sorted(later)


def test_checked_calls(system):
    """Calls that depend on an argument: what honest programs ask for is given."""
    clone, prlimit, user = (56, 302, 0x10000000) if X86_64 else (220, 261, 0x10000000)
    out = output(f"""
import ctypes, fcntl, mmap, os, resource, socket
libc = ctypes.CDLL(None, use_errno=True)
print(libc.syscall({clone}, {user} | 17, None, None, None, None), ctypes.get_errno())
print(libc.syscall({prlimit}, os.getppid(), 7, None, None), ctypes.get_errno())
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 0, len(mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE)))
for family in (40, 38, 16, 17, 44):
    try:
        socket.socket(family, socket.SOCK_RAW)
        print("made", family)
    except OSError:
        pass
a, b = socket.socketpair()
a.send(b"x")
print(b.recv(1))
for attempt, *arguments in (
        (a.setsockopt, 1, 26, bytes(16)), (a.setsockopt, 1, 50, 1), (a.setsockopt, 1, 51, bytes(16)),  # filters
        (a.setsockopt, 1, 7, 1 << 22), (a.setsockopt, 1, 8, 1 << 22), (a.setsockopt, 1, 32, 1 << 22),  # buffers
        (fcntl.fcntl, os.open(".", 0), 1024, 0), (fcntl.fcntl, os.open(".", 0), 1026, 1)):  # lease, watch
    try:
        attempt(*arguments)
        print(arguments)
    except PermissionError:
        pass
a.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
print(libc.prctl(22, 2, None), ctypes.get_errno(), libc.prctl(4, 1), libc.prctl(15, b"name"))
""")
    assert out == "-1 1\n-1 1\nTrue 4096\nb'x'\n-1 1 -1 0\n"


# -----------------------------------------------------------------------------------------------------------
# What holds on each of these systems


def test_nothing_listens(system):
    """Not on the machine's loopback, by TCP or UDP, nor by an abstract name."""
    name = b"\0" + secrets.token_hex(8).encode()
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(name)
        unix.listen()
        out = output(f"""
import socket
for family, address in ((socket.AF_INET, {tcp.getsockname()!r}), (socket.AF_UNIX, {name!r})):
    try:
        socket.socket(family).connect(address)
        print("connected")
    except OSError:
        pass
print("end")
""")
        assert out == "end\n"
        for s in (tcp, unix):
            s.setblocking(False)
            with pytest.raises(BlockingIOError):
                s.accept()


def test_no_datagram_leaves(system, tmp_path):
    """By one end of a pair of sockets, which belongs to the test and needs no permission."""
    tmp_path.chmod(0o777)
    name = b"\0" + secrets.token_hex(8).encode()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as by_path, \
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as by_name:
        by_path.bind(f"{tmp_path}/socket")
        os.chmod(f"{tmp_path}/socket", 0o777)
        by_name.bind(name)
        out = output(f"""
import socket
for kind in (socket.SOCK_DGRAM, socket.SOCK_STREAM, socket.SOCK_SEQPACKET):
    for address in ({f"{tmp_path}/socket"!r}, {name!r}):
        try:
            a, b = socket.socketpair(socket.AF_UNIX, kind)
            a.sendto(b"x", address)
            a.connect(address)
            a.send(b"x")
        except OSError:
            pass
a, b = socket.socketpair()
a.send(b"own")
print(b.recv(3))
""")
        assert out == "b'own'\n"
        for s in (by_path, by_name):
            s.setblocking(False)
            with pytest.raises(BlockingIOError):
                s.recv(1)


def test_no_signal_leaves(system):
    """Neither to this process nor to the supervisor, though the user may be the same."""
    out = output(f"""
import os, signal
try:
    os.kill(os.getppid(), signal.SIGINT)
except OSError:
    pass
for pid in ({os.getpid()}, os.getppid(), -1):
    try:
        if pid != -1 or {system in ("whole", "no Landlock")}:
            os.kill(pid, 0 if pid == -1 else signal.SIGURG)
            print("sent", pid) if pid == {os.getpid()} else None
    except OSError:
        pass
print("end")
""")
    assert out == "end\n"


BY_DESCRIPTOR = """
import array, fcntl, os, socket
for pid in (int(input()), os.getppid()):
    for arguments in ((fcntl.fcntl, 8, pid), (fcntl.fcntl, 15, array.array("i", [1, pid]).tobytes()),
                      (fcntl.ioctl, 0x8901, array.array("i", [pid])), (fcntl.ioctl, 0x8902, array.array("i", [pid]))):
        a, b = socket.socketpair()
        for change, command, value in (arguments, (fcntl.fcntl, 10, 9), (fcntl.fcntl, 4, 0x2800)):
            try:
                change(a, command, value)
            except OSError:
                pass
        b.send(b"x")
read, write = os.pipe()
os.set_blocking(read, False)
os.set_inheritable(read, True)
print(sys.stdout.isatty(), fcntl.fcntl(read, fcntl.F_GETFL) & os.O_NONBLOCK > 0)
"""


def test_no_signal_leaves_by_a_descriptor(system):
    """The kernel sends the owner of a descriptor the signal of one's choice, when something can be read."""
    victim = subprocess.Popen(["sleep", "300"])
    assert run_code(BY_DESCRIPTOR, None, [str(victim.pid)] * 2, 60) == [b"False True\n"] * 2
    assert victim.poll() is None
    victim.kill()
    victim.wait()


STAYING = """
import os, time
for _ in range(3):
    if os.fork() == 0:
        try:
            os.setsid()
        except OSError:
            pass
        if os.fork() == 0:
            os.execv("/bin/sleep", ["sleep", "{word}"])
        os._exit(0)
time.sleep(0.5)
print("left")
"""


def test_what_a_test_starts_ends_with_it(system):
    word = f"61.{secrets.randbelow(10**12):012}"  # seconds
    program = STAYING.format(word=word)
    assert run_code(program, None, ["", ""], 60) == [b"left\n"] * 2
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as f:
                assert word.encode() not in f.read()
        except OSError:
            continue


def test_files_are_guarded_by_one_layer_at_least(system, tmp_path):
    if system == "neither" or "Landlock" in " ".join(sandbox_lacks()):
        pytest.skip("it says that it does not")
    secret = tmp_path / "answers.json"
    secret.write_text("42")
    secret.chmod(0o666)
    tmp_path.chmod(0o777)
    out = output(f"""
for path in ({str(secret)!r}, "/proc/{os.getpid()}/environ", {evaluation.__file__!r}):
    for mode in ("r", "a"):
        try:
            open(path, mode).read(1)
            print("read", path)
        except OSError as e:
            pass
print("end")
""")
    assert out == "end\n" and secret.read_text() == "42"


def state(file):
    told = file.stat()
    return told.st_mode, told.st_mtime, told.st_ctime, told.st_uid


def test_modes_and_times_are_guarded(system, tmp_path):
    file = tmp_path / "answers.json"
    file.write_text("42")
    file.chmod(0o666)
    tmp_path.chmod(0o777)
    before = state(file)
    assert output(f"""
import os
file = {str(file)!r}
attempts = ((os.truncate, 0), (os.chmod, 0), (os.utime, (1, 1)), (os.setxattr, "user.x", b"x"), (os.chown, 1, 1))
for attempt, *arguments in attempts:
    try:
        attempt(file, *arguments)
        print(attempt)
    except OSError:
        pass
print("end")
""") == "end\n"
    assert state(file) == before


# -----------------------------------------------------------------------------------------------------------
# Slots


def test_slots_are_shared_by_ranks(monkeypatch):
    """Every core belongs to one rank, as long as there are enough; only those that this process may use."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5, 7, 8, 9})
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert own_cores() == [3, 5, 7, 8, 9]

    def shares(ranks):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        found = []
        for rank in range(ranks):
            monkeypatch.setenv("LOCAL_RANK", str(rank))
            found.append(own_cores())
        return found
    assert sorted(sum(shares(2), [])) == [3, 5, 7, 8, 9] and {len(share) for share in shares(2)} == {2, 3}
    assert shares(5) == [[3], [5], [7], [8], [9]]
    assert {len(share) for share in shares(8)} == {1}
