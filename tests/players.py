"""Workers without a server, for tests of the code that calls them."""

from workers import Reply, WorkerError


class Player:
    """A worker whose answer is a function of its messages, and which records every call."""

    note = ""

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
