"""A server on raw sockets that misbehaves as told, for the tests of workers.py."""
import contextlib
import json
import socket
import threading
import time

import pytest

import workers
from workers import Worker

CHAT = [{"role": "user", "content": "Why?"}]
GOOD = {"choices": [{"message": {"role": "assistant", "content": "Because."}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 10, "completion_tokens": 2}}
KEY = "sk-planted-0123456789"


def http(body, status=200, **headers):
    """A whole HTTP response as bytes; any other body is sent as JSON. A list's header comes several times."""
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = ""
    for name, values in headers.items():
        for value in values if isinstance(values, list) else [values]:
            lines += f"{name.replace('_', '-')}: {value}\r\n"
    return f"HTTP/1.1 {status} Whatever\r\nContent-Length: {len(body)}\r\n{lines}\r\n".encode() + body


class Rogue:
    """play(n, conn) gets the request's number and returns bytes to send, or does worse to conn and gives
    None, which ends the connection. .requests holds what came over the wire: (time, head, body)."""

    def __init__(self, play):
        self.play = play
        self.requests = []
        self.connections, self.open, self.most = 0, 0, 0
        self.lock = threading.Lock()
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}/v1"

    def __enter__(self):
        threading.Thread(target=self.accept, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.listener.close()

    def accept(self):
        while True:
            try:
                conn, _ = self.listener.accept()
            except OSError:
                return
            self.connections += 1
            threading.Thread(target=self.serve, args=(conn,), daemon=True).start()

    def serve(self, conn):
        with conn, conn.makefile("rb") as file, contextlib.suppress(OSError):  # the client gave up
            while line := file.readline():
                head = line
                while line not in (b"\r\n", b""):
                    line = file.readline()
                    head += line
                fields = dict(h.lower().split(": ", 1) for h in head.decode().strip().split("\r\n")[1:])
                body = file.read(int(fields.get("content-length", 0)))
                with self.lock:
                    n = len(self.requests)
                    self.requests.append((time.monotonic(), head.decode(), json.loads(body)))
                    self.open += 1
                    self.most = max(self.most, self.open)
                answer = self.play(n, conn)
                with self.lock:
                    self.open -= 1
                if answer is None:
                    return
                conn.sendall(answer)


def always(body, status=200, **headers):
    return Rogue(lambda n, conn: http(body, status, **headers))


def worker(server, **fields):
    return Worker(**{"protocol": "openai", "base_url": server.url, "model": "m", "timeout": 20, **fields})


def entry(server, **fields):
    return {"protocol": "openai", "base_url": server.url, "model": "m", **fields}


def pool_file(tmp_path, entries):
    path = tmp_path / "pool.json"
    path.write_text(json.dumps(entries))
    return str(path)


def drip(start, piece=b" "):
    def play(n, conn):
        conn.sendall(start)
        for _ in range(400):
            conn.sendall(piece)
            time.sleep(0.05)
    return play


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Backoff in milliseconds, no proxies."""
    monkeypatch.setattr(workers, "BACKOFF", 0.004)
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
def waits(monkeypatch):
    """The waits between attempts: the clock goes on by them at once. jitter draws the longest."""
    class Clock:
        waits, monotonic, time = [], staticmethod(lambda: time.monotonic() + sum(Clock.waits)), time.time

        @staticmethod
        def sleep(seconds):
            Clock.waits.append(seconds)

    monkeypatch.setattr(workers, "time", Clock)
    monkeypatch.setattr(workers, "BACKOFF", 2.0)
    monkeypatch.setattr(workers.jitter, "uniform", lambda low, high: high)
    return Clock.waits