"""Helpers that several tests share: workers that are Python functions, and a scripted Conductor."""

import contextlib
import threading

from workers import Reply, WorkerError
from workflow import Service, conductor_server


class Player:
    """A worker that replies with answer(messages), and records every call."""

    note = ""
    budget = None

    def __init__(self, name, answer, **params):
        self.name = name
        self.answer = answer
        self.params = params
        self.asked = []  # the messages of each call
        self.ids = []  # the call_id of each call
        self.overrides = []  # the overrides of each call

    def chat(self, messages, call_id="", **overrides):
        self.asked.append(messages)
        self.ids.append(call_id)
        self.overrides.append(overrides)
        return Reply(self.answer(messages), 10, 2, 0.5, 0.0)


def lost(messages):
    raise WorkerError("nobody answers")


@contextlib.contextmanager
def served(pool, *texts, write=None, api_key="", **settings):
    """Yield the URL of a server whose Conductor writes these texts in turn, then repeats the last.

    Args:
        write: a function to use as the Conductor instead; see `write_texts` for its signature.
        api_key: the key that clients must send; "": no key is needed.
        settings: further fields of Service.
    """
    left = list(texts)

    def write_texts(rollouts):
        for rollout in rollouts:
            rollout.written = left.pop(0) if len(left) > 1 else left[0]
            yield rollout

    server = conductor_server(Service(write or write_texts, pool, **settings), 0, api_key=api_key)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
