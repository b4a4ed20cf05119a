"""Workers without a server, for tests of who asks them."""

from workers import Reply, WorkerError


class Player:
    """A worker that is a function of its messages; it remembers what it was asked, and how."""

    def __init__(self, name, answer, **params):
        self.name, self.answer, self.params, self.note = name, answer, params, ""
        self.asked, self.ids, self.overrides = [], [], []

    def chat(self, messages, call_id="", **overrides):
        self.asked.append(messages)
        self.ids.append(call_id)
        self.overrides.append(overrides)
        return Reply(self.answer(messages), 10, 2, 0.5, 0.0)


def lost(messages):
    raise WorkerError("nobody answers")
