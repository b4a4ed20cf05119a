"""Servers on raw sockets that answer, or misbehave, as a test tells them."""
import contextlib
import json
import re
import socket
import threading
import time

CHAT = [{"role": "user", "content": "Why?"}]
GOOD = {"choices": [{"message": {"role": "assistant", "content": "Because."}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 10, "completion_tokens": 2}}


def http(body, status=200, **headers):
    """A whole HTTP response as bytes; a body that is no bytes is sent as JSON."""
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    return f"HTTP/1.1 {status} Whatever\r\nContent-Length: {len(body)}\r\n{lines}\r\n".encode() + body


class OddServer:
    """play(n, conn) gets a request's number and returns bytes to send, or does worse to conn and returns
    None, which ends the connection. Bytes are always sent, a list in turn. .requests: (time, head, body)."""

    def __init__(self, play):
        answers = play if isinstance(play, list) else [play]
        self.play = play if callable(play) else lambda n, conn: answers[min(n, len(answers) - 1)]
        self.requests, self.running, self.most, self.lock = [], 0, 0, threading.Lock()
        self.over = threading.Event()  # for what a test lets wait
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}/v1"

    def __enter__(self):
        threading.Thread(target=self.accept, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.over.set()
        self.listener.close()

    def accept(self):
        with contextlib.suppress(OSError):  # It was closed.
            while True:
                conn, _ = self.listener.accept()
                threading.Thread(target=self.serve, args=(conn,), daemon=True).start()

    def serve(self, conn):
        with conn, conn.makefile("rb") as file, contextlib.suppress(OSError):  # The client gave up.
            while line := file.readline():
                while not line.endswith(b"\r\n\r\n"):
                    line += file.readline()
                head = line.decode()
                body = file.read(int(re.search(r"(?i)content-length: (\d+)", head)[1]))
                with self.lock:
                    n = len(self.requests)
                    self.requests.append((time.monotonic(), head, json.loads(body)))
                    self.running += 1
                    self.most = max(self.most, self.running)
                answer = self.play(n, conn)
                with self.lock:
                    self.running -= 1
                if answer is None:
                    return
                conn.sendall(answer)
