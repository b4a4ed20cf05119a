"""workflow.py: the prompt, who sees what (read off the wire of a real server), the modes of App. F, rollouts,
recursion."""
import contextlib
import itertools
import json
import queue
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

import workflow as wf
from sample import Completion
from test_workflow_parse import GOOD, lists
from workers import SPECIALISTS, Reply, WorkerError, load_pool
from workflow import Prompting, Step, Task, Workflow, as_lists, execute, messages, parse, submit

# ------------------------------------------------------------------------------------------------------------
# The prompt


@pytest.mark.parametrize("n_workers, max_steps", [(7, 5), (3, 5), (1, 5), (5, 2)])
def test_the_examples_are_workflows(n_workers, max_steps):
    [turn] = messages("Why {question}?", n_workers, max_steps)
    examples = turn["content"].split("Example question: ")[1:]
    workflows = [parse(e, n_workers, max_steps) for e in examples]
    assert len(workflows) == (4 if max_steps == 5 else 2)
    assert len({len(w.steps) for w in workflows}) == len(workflows)
    assert "Question: Why {question}?\n" in turn["content"]
    assert turn["content"].endswith(f"Model {n_workers - 1}")
    if (n_workers, max_steps) == (7, 5):
        # no worker is favoured by being left out
        assert {s.worker for w in workflows for s in w.steps} == set(range(7))
        assert any(s.access == [] for w in workflows for s in w.steps[1:])
        assert any(len(s.access) > 1 for w in workflows for s in w.steps)
        assert turn["content"].count("<idea>") >= 4 and turn["content"].count("<answer>") >= 4


@pytest.mark.parametrize("examples", ["ood", "in", "mixed"])
def test_few_shot_examples_to_choose(examples):
    """Four workflows of different lengths that use every model; the mix is half of each (Table 4)."""
    shown = messages("Why?", 7, prompting=Prompting(examples=examples))[0]["content"].split("Example question: ")[1:]
    workflows = [parse(text, 7) for text in shown]
    assert sorted(len(w.steps) for w in workflows) == [1, 2, 3, 4]
    if examples == "mixed":
        ood, near = (messages("Why?", 7, prompting=Prompting(examples=which))[0]["content"] for which in ("ood", "in"))
        assert [sum(text.split("\n")[0] in prompt for text in shown) for prompt in (ood, near)] == [2, 2]
    else:
        assert {s.worker for w in workflows for s in w.steps} == set(range(7))
    with pytest.raises(ValueError, match="examples 'far': there are ood, in, mixed"):
        messages("Why?", 3, prompting=Prompting(examples="far"))


def test_a_prompt_without_subtasks():
    """App. B.7: neither the instructions nor the examples nor an earlier round speak of subtasks, and all
    else is as before."""
    pool = [Local("a", lambda chat: chat[-1]["content"])]
    first = execute(Workflow([Step(0, wf.SOLVE_IT, [])]), "Why?", pool)
    chat = wf.ask(Task("Why?", pool * 3, first), Prompting(subtasks=False))
    assert "subtask" not in json.dumps(chat) and "model_id = [0]\naccess_list = [[]]" == chat[1]["content"]
    examples = chat[0]["content"].split("Example question: ")[1:]
    assert [len(parse(text, 3, subtasks=False).steps) for text in examples] == [3, 1, 2, 4]
    [[rollout]] = wf.roll_out(says(lambda i, j: "model_id = [0]\naccess_list = [[]]"), [Task("Why?", pool)],
                              1, Prompting(subtasks=False))
    assert rollout.trace.answer == "Question:\nWhy?\n\nYour task:\nSolve the question."


def test_styles():
    assert messages("Why?", 3, 4, prompting=Prompting("short")) == [{"role": "system", "content": "3 models, 4 steps."},
                                                     {"role": "user", "content": "Why?"}]
    named = messages("Why?", 3, 4, prompting=Prompting("short"), letters="ACH")
    assert named[0]["content"] == "Models A 0 C 1 H 2, 4 steps."
    content = messages("Why?", 3, letters="ACH")[0]["content"]
    assert content.endswith("\n\nModels: Model 0 (A), Model 1 (C), Model 2 (H)")
    full, zero, fine = (messages("Why?", 3, prompting=Prompting(s))[0]["content"]
                        for s in ("full", "zero-shot", "fine-grained"))
    assert "Example question" not in zero
    assert zero.split("\n\n")[0] == full.split("\n\n")[0]
    assert "such as [0, 2]" in fine and "such as" not in full
    with pytest.raises(ValueError, match="style 'shrot'"):
        messages("Why?", 3, prompting=Prompting("shrot"))


# ------------------------------------------------------------------------------------------------------------
# Execute: real HTTP, chats read off the wire


class Wire:
    """An OpenAI-compatible server whose answers are answer(model, chat) -> text or HTTP status; it keeps
    every (model, chat)."""

    def __init__(self, answer):
        self.seen, self.limits, wire = [], set(), self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_):
                pass

            def handle(self):
                with contextlib.suppress(ConnectionError):  # Ctrl-C took who asked.
                    super().handle()

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                wire.seen.append((body["model"], body["messages"]))
                wire.limits.add((body["model"], body.get("max_tokens", body.get("max_completion_tokens"))))
                text = answer(body["model"], body["messages"])
                self.send_response(text if type(text) is int else 200)
                self.send_header("Content-Type", "application/json")
                self.end_headers()
                self.wfile.write(json.dumps({
                    "object": "chat.completion", "model": body["model"],
                    "usage": {"prompt_tokens": 10, "completion_tokens": 2, "total_tokens": 12},
                    "choices": [{"index": 0, "message": {"role": "assistant", "content": text},
                                 "finish_reason": "stop"}]}).encode())

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.socket.listen(256)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/v1"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def chat_of(self, model):
        """The only chat that this model saw."""
        [chat] = [chat for name, chat in self.seen if name == model]
        return chat

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()


def pool_of(tmp_path, url, names, price=(1.0, 10.0), **more):
    file = tmp_path / "pool.json"
    entry = {"protocol": "openai", "base_url": url, "timeout": 30,
             **({"price": list(price)} if price else {}), **more}
    file.write_text(json.dumps([{**entry, "name": f"worker-{name}", "model": name} for name in names]))
    return load_pool(str(file))


def user(text):
    return {"role": "user", "content": text}


def said(text):
    return {"role": "assistant", "content": text}


def test_access_lists_as_workers_saw_them(tmp_path):
    with Wire(lambda model, chat: f"{model} says") as wire:
        pool = pool_of(tmp_path, wire.url, "abcde")
        trace = execute(Workflow([Step(0, "One.", []), Step(1, "Two.", [0]), Step(2, "Three.", []),
                                  Step(3, "Four.", [0, 2]),
                                  Step(4, "Five.", [0, 1, 2, 3])]), "Why?", pool)
    assert wire.chat_of("a") == [user("Question:\nWhy?\n\nYour task:\nOne.")]
    assert wire.chat_of("b") == [user("Question:\nWhy?\n\nYour task:\nOne."), said("a says"),
                                 user("Your task:\nTwo.")]
    assert wire.chat_of("c") == [user("Question:\nWhy?\n\nYour task:\nThree.")]
    assert wire.chat_of("d") == [user("Question:\nWhy?\n\nYour task:\nOne."), said("a says"),
                                 user("Your task:\nThree."), said("c says"),
                                 user("Your task:\nFour.")]
    assert wire.chat_of("e") == [user("Question:\nWhy?\n\nYour task:\nOne."), said("a says"),
                                 user("Your task:\nTwo."), said("b says"),
                                 user("Your task:\nThree."), said("c says"), user("Your task:\nFour."),
                                 said("d says"), user("Your task:\nFive.")]
    assert trace.responses == [f"{m} says" for m in "abcde"]
    assert trace.answer == "e says" and trace.error is None
    assert trace.calls == 5
    assert trace.tokens == 60
    assert trace.cost == pytest.approx(5 * (10 * 1 + 2 * 10) / 1e6) and trace.seconds > 0


def test_steps_that_do_not_see_each_other_run_at_the_same_time(tmp_path):
    together, order = threading.Barrier(3), []

    def answer(model, chat):
        if model != "z":
            together.wait(timeout=60)  # raises unless all three are in flight
        order.append(model)
        return model

    with Wire(answer) as wire:
        pool = pool_of(tmp_path, wire.url, "abcz")
        trace = execute(Workflow([Step(0, "A.", []), Step(1, "B.", []), Step(2, "C.", []),
                                  Step(3, "Z.", [0, 1, 2])]), "Why?", pool)
    assert trace.answer == "z" and order[-1] == "z" and set(order) == set("abcz")


class Local:
    """A worker without a network: .chat is answer(chat)."""

    def __init__(self, name, answer):
        self.name, self.answer = name, answer

    def chat(self, chat, **_):
        return Reply(self.answer(chat), 1, 1, 0.0, 0.0)


def test_hundreds_of_workflows_share_a_few_threads(monkeypatch):
    """No thread waits for another: with four of them, 300 chains and diamonds all get through."""
    monkeypatch.setattr(wf, "jobs", queue.SimpleQueue())
    monkeypatch.setattr(wf, "idle", threading.Semaphore(0))
    monkeypatch.setattr(wf, "unborn", threading.Semaphore(4))
    pool = [Local(str(i), lambda chat, i=i: f"{i}:{len(chat)}") for i in range(3)]
    diamond = Workflow([Step(0, "A", []), Step(1, "B", [0]), Step(2, "C", [0]), Step(0, "D", [1, 2]),
                        Step(1, "E", [0, 3])])
    futures = [submit(diamond, Task(f"Question {i}", pool)) for i in range(300)]
    assert [f.result(timeout=60).responses for f in futures] == [["0:1", "1:3", "2:3", "0:5", "1:5"]] * 300


def test_a_lost_worker_is_infrastructure(tmp_path):
    with Wire(lambda model, chat: 400 if model == "b" else model) as wire:
        pool = pool_of(tmp_path, wire.url, "abc")
        trace = execute(Workflow([Step(0, "A.", []), Step(1, "B.", []), Step(2, "C.", [0, 1])]), "Why?", pool)
    assert trace.error.startswith("step 1: worker-b: ") and trace.answer == ""
    # what the others cost is known
    assert trace.responses == ["a", "", ""] and trace.calls == 1 and trace.cost > 0
    assert [m for m, _ in wire.seen if m == "c"] == [] and "Failed: step 1" in wf.view(trace)


def test_an_empty_reply_is_the_models_own(tmp_path):
    with Wire(lambda model, chat: "") as wire:
        trace = execute(Workflow([Step(0, "A.", []), Step(0, "B.", [])]), "Why?",
                        pool_of(tmp_path, wire.url, "a"))
    assert trace.error is None and trace.answer == "" and trace.calls == 2


def test_a_bug_is_not_swallowed():
    def broken(chat):
        raise KeyError("a bug")
    with pytest.raises(KeyError, match="a bug"):
        execute(Workflow([Step(0, "A.", []), Step(0, "B.", [])]), "Why?", [Local("broken", broken)])
    with pytest.raises(ValueError, match="there is none"):
        execute(Workflow([]), "Why?", [])


def test_unknown_cost_is_unknown(tmp_path):
    with Wire(lambda model, chat: "yes") as wire:
        trace = execute(Workflow([Step(0, "A.", [])]), "Why?", pool_of(tmp_path, wire.url, "a", price=None))
    assert trace.cost is None and trace.tokens == 12 and "unknown cost" in wf.view(trace)


def test_traces_round_trip_and_replay(tmp_path):
    with Wire(lambda model, chat: f"{model}{len(chat)}") as wire:
        pool = pool_of(tmp_path, wire.url, "ab")
        first = execute(parse(GOOD, 2), "Why?", pool)
        second = execute(parse(GOOD, 2), "Why?", pool, first)
        second.bad_request = True  # every field comes back
        again = wf.trace_from(json.loads(json.dumps(wf.trace_to_json(second))))
        assert again == second
        assert again.rounds()[0].workflow.written == GOOD and again.workflow.steps[1].wrote_all
        before, _ = list(wire.seen), wire.seen.clear()
        assert execute(again.workflow, again.question, pool, again.previous).responses == second.responses
        assert wire.seen == before[2:]


def test_views(tmp_path):
    nasty = 'a "quoted" <b> `tick` #hash;\n1. _x_ \x1b[31m]end'
    pool = [Local("w_1", lambda chat: nasty), Local("w2", lambda chat: "fine")]
    trace = execute(Workflow([Step(0, nasty, []), Step(1, "Two.", [0], True)]), "Why?", pool)
    trace = execute(Workflow([Step(1, "Three.", [], True), Step(0, "Four.", [0])]), "Why?", pool, trace)
    view = wf.view(trace)
    assert "\x1b" not in view
    assert all(word in view for word in ("Why?", "w_1", "w2", "Two.", "Three.", "4 calls", "8 tokens",
                                         "$0.0000"))
    silent = execute(Workflow([Step(0, "One.", [])]), "Why?", [Local("w", lambda chat: " ")])
    assert "    (empty; it ended by 'stop')\n\nAnswer:" in wf.view(silent)


def test_steps_are_told_as_they_begin():
    told = []
    task = wf.Task("Why?", [Local("a", lambda chat: "1"), Local("b", lambda chat: "2")],
                   before_step=lambda i, name: told.append((i, name)))
    wf.submit(Workflow([Step(1, "One.", []), Step(0, "Two.", [0])]), task).result()
    assert told == [(0, "b"), (1, "a")]


# ------------------------------------------------------------------------------------------------------------
# The five modes of App. F. Each answer depends on what its worker was shown, so a wrong access list also ends
# in a wrong answer.


def heard(chat):
    """A worker's chat as (question, the (subtask, response) pairs it was shown, its own subtask)."""
    question, rest = chat[0]["content"].removeprefix("Question:\n").split("\n\nYour task:\n", 1)
    tasks = [rest] + [m["content"].removeprefix("Your task:\n") for m in chat[2::2]]
    return question, list(zip(tasks, [m["content"] for m in chat[1::2]])), tasks[-1]


CATORCE = "Find catorce + quince."
IRON = "What is the atomic number of iron * tres?"
PERU = "Find the capital of Peru turned around."


def test_some_of_a_pool():
    """--only: by name, in the pool's order; their letters are those of the whole pool, their numbers are
    new."""
    pool = load_pool("local", "http://127.0.0.1:9/v1")
    some = wf.subset(pool, "coder, translator")
    assert [w.name for w in some] == ["translator", "coder"] and wf.subset(pool, "") == pool
    [system, _] = wf.ask(Task("Why?", some), Prompting("short", named=True))
    assert system["content"] == "Models B 0 D 1, 5 steps."
    assert wf.ask(Task("Why?", some), Prompting()) == messages("Why?", 2)
    with pytest.raises(ValueError, match="no worker 'poet'; the pool has calculator, translator"):
        wf.subset(pool, "coder,poet")


@pytest.mark.parametrize("question, steps, responses", [
    pytest.param(IRON, [("translator", "Simplify the question.", []),
                        ("librarian", "Look up what it takes.", [0]), ("calculator", "Work it out.", [1]),
                        ("calculator", "Compute it again, to check.", [1])],
                 ["What is the atomic number of iron * 3?", "What is 26 * 3?", "78", "78"],
                 id="planner, executor, checker"),
    pytest.param(CATORCE, [("calculator", "Work it out.", []), ("translator", "Translate it.", []),
                           ("calculator", "Calculate from both.", "all")],
                 ["I am a calculator; I find nothing here to work on.", "Find 14 + 15.", "29"],
                 id="independent attempts, aggregated"),
    pytest.param("Find the atomic number of iron + the atomic number of zinc.", [
        ("librarian", "Recall the first.", []), ("librarian", "Recall the second.", []),
        ("calculator", "Find the sum.", "all")],
        ["Find 26 + 30."] * 2 + ["56"], id="independent recall of facts"),
    pytest.param(IRON, [("librarian", "Recall the number.", []), ("translator", "Translate the rest.", [0]),
                        ("calculator", "Work it out.", [1])],
                 ["What is 26 * tres?", "What is 26 * 3?", "78"], id="a chain, step by step"),
    pytest.param(PERU, [("librarian", "Tell the others what to do.", []),
                        ("librarian", "Look up the city.", []), ("coder", "Reverse it.", [1])],
                 ["Find Lima turned around."] * 2 + ["amiL"],
                 id="abdication, to one who will not plan")])
def test_the_five_modes_of_the_local_specialists(question, steps, responses, tmp_path):
    names = list(SPECIALISTS)
    workflow = Workflow([Step(names.index(m), task, [*range(i)] if sees == "all" else sees, sees == "all")
                         for i, (m, task, sees) in enumerate(steps)])
    with Wire(lambda model, chat: SPECIALISTS[model](chat)) as wire:
        trace = execute(parse(as_lists(workflow), len(names)), question, pool_of(tmp_path, wire.url, names))
    assert trace.error is None and trace.responses == responses and len(wire.seen) == len(steps)
    for (model, task, _), step in zip(steps, workflow.steps):
        [chat] = [chat for m, chat in wire.seen if m == model and heard(chat)[2] == task]
        assert heard(chat) == (question, [(steps[j][1], responses[j]) for j in step.access], task)


def test_a_run_again_is_replayed(tmp_path):
    """With a call_id and a replay file a second run of the same workflow asks nobody; another call_id or no file
    asks again."""
    with Wire(lambda model, chat: f"{model}{len(wire.seen)}") as wire:
        pool_of(tmp_path, wire.url, "ab")

        def run(call_id, replay=str(tmp_path / "replies")):
            trace = execute(parse(GOOD, 2), "Why?", load_pool(str(tmp_path / "pool.json"), replay=replay),
                            name=call_id)
            return trace.responses, len(wire.seen)

        first = run("1/q/0")
        assert run("1/q/0") == first and first[1] == 2
        assert run("1/q/1")[1] == 4 and run("1/q/0", "")[1] == 6 and run("1/q/1")[1] == 6


# ------------------------------------------------------------------------------------------------------------
# Recursion (§3.2)


def test_the_second_round_is_asked_for_and_sees_the_first(tmp_path):
    with Wire(lambda model, chat: f"{model}'s answer") as wire:
        pool = pool_of(tmp_path, wire.url, "abc")
        first = execute(parse("Plan A.\n" + lists(), 3), "Why?", pool)
        chat = messages("Why?", 3, previous=first)
        wire.seen.clear()
        second = execute(parse(lists("[0, 1, 2]", '["One.", "Two.", "Three."]', '["all", [], ["all"]]'), 3),
                         "Why?", pool, first)
    assert chat[:1] == messages("Why?", 3)
    assert chat[1] == said("Plan A.\n" + lists()) and "a's answer" in chat[2]["content"] and len(chat) == 3
    old = [user("Question:\nWhy?\n\nYour task:\nCheck it."), said("a's answer")]
    assert wire.chat_of("a") == [*old, user("Your task:\nOne.")]
    assert wire.chat_of("b") == [user("Question:\nWhy?\n\nYour task:\nTwo.")]
    assert wire.chat_of("c") == [*old, user("Your task:\nOne."), said("a's answer"),
                                 user("Your task:\nTwo."), said("b's answer"), user("Your task:\nThree.")]
    kept = execute(Workflow([]), "Why?", [], second)
    assert kept.answer == second.answer == "c's answer" and kept.cost == second.cost
    assert len(messages("Why?", 3, previous=kept)) == 7 and [t.calls for t in kept.rounds()] == [2, 5, 5]
    third = execute(Workflow([Step(0, "Go on.", [], True)]), "Why?",
                    [Local("x", lambda chat: json.dumps(chat))], kept)
    assert json.loads(third.answer)[:2] == [user("Question:\nWhy?\n\nYour task:\nThree."), said("c's answer")]


def one_step(text):
    return lists("[0]", f'["{text}"]', '["all"]')


def test_conduct_rounds_and_tries():
    pool = [Local("echo", lambda chat: chat[-1]["content"].split("Your task:\n")[1])]

    def writer(*texts):
        texts, asked = list(texts), []

        def write(chats, n, first):
            asked.append(chats[0])
            yield 0, 0, texts.pop(0)
        write.asked = asked
        return write

    def conduct(question, pool, write, rounds=0):
        return wf.conduct(write, [Task(question, pool)], rounds)[0].trace

    write = writer(one_step("first"), one_step("second"), one_step("third"))
    # the depth is capped
    assert conduct("Why?", pool, write, rounds=1).answer == "second" and len(write.asked) == 2
    write = writer(one_step("first"), lists("[]", "[]", "[]"), one_step("third"))
    trace = conduct("Why?", pool, write, rounds=5)
    assert trace.answer == "first" and len(write.asked) == 2 and trace.calls == 1  # three empty lists end it
    write = writer("gibberish", one_step("first"), "gibberish", "gibberish", "gibberish")
    assert conduct("Why?", pool, write, rounds=3).answer == "first" and len(write.asked) == 5
    [lost] = wf.conduct(writer("gibberish", lists("[]", "[]", "[]"), "gibberish"), [Task("Why?", pool)], 3)
    assert lost.trace is None and "missing" in lost.invalid

    def down(chat):
        raise WorkerError("down")
    trace = conduct("Why?", [Local("down", down)], writer(one_step("first"), one_step("second")), rounds=1)
    assert trace.error == "step 0: down" and trace.previous is None

    def cannot_read(chats, n, first):  # a second prompt, which is longer than the first
        yield 0, 0, WorkerError("too long") if len(chats[0]) > 1 else one_step("first")
    assert conduct("Why?", pool, cannot_read, rounds=2).answer == "first"


# ------------------------------------------------------------------------------------------------------------
# Rollouts


def says(text):
    """A write() that writes text(i, number) as rollout `number` of task i."""
    def write(chats, n, first):
        for i in range(len(chats)):
            for j in range(n):
                yield i, j, text(i, first + j), [i], Completion([first + j], [0.0], True)
    return write


def test_rollouts_are_run_and_graded_while_others_are_written():
    """The second is written only once the first has been graded; text that is no workflow is wrong, a lost
    worker nobody's fault."""
    graded, finished = threading.Event(), []

    def text(i, number):
        assert number == 0 or graded.wait(60)
        return [one_step("right"), one_step("wrong"), "I cannot.", lists("[1]", '["A."]', "[[]]")][number]

    def grade(problem, answer):
        graded.set()
        return problem == "P" and answer.endswith("right")

    def down(chat):
        raise WorkerError("down")

    pool = [Local("echo", lambda chat: chat[-1]["content"]), Local("down", down)]
    tasks = [Task("Why?", pool, problem="P"), Task("How?", pool, problem="Q")]
    groups = wf.roll_out(says(text), tasks, 4, grade=grade, on_finish=finished.append)
    assert [[r.right for r in group] for group in groups] == [[True, False, False, None],
                                                              [False, False, False, None]]
    assert [r.trace is None for r in groups[0]] == [False, False, True, False]
    assert "model_id" in groups[0][2].invalid
    assert [(r.task, r.prompt, r.completion.tokens) for r in groups[1]] == [(tasks[1], [1], [j])
                                                                            for j in range(4)]
    assert groups[0][3].trace.error == "step 0: down"
    assert groups[0][0].trace.right is True and len(finished) == 8
    assert [r.right for r in wf.roll_out(says(text), tasks[:1], 3)[0]] == [None, None, False]  # nobody grades
    assert wf.roll_out(says(text), [], 3) == []


def test_rollout_numbers_name_the_calls(tmp_path):
    """Two calls that share a task's rollouts ask what one would: with the first one's replies on file nothing
    is asked again. Rounds are told apart, and a task without a name is never replayed."""
    with Wire(lambda model, chat: f"{len(wire.seen)}") as wire:
        pool_of(tmp_path, wire.url, "a")
        pool = load_pool(str(tmp_path / "pool.json"), replay=str(tmp_path / "replies"))
        write = says(lambda i, number: one_step("Go."))
        [whole] = wf.roll_out(write, [Task("Why?", pool, name="1/7")], 4)
        assert len(wire.seen) == 4
        pool = load_pool(str(tmp_path / "pool.json"), replay=str(tmp_path / "replies"))
        [[a, b], [c, d]] = [wf.roll_out(write, [Task("Why?", pool, name="1/7")], 2, first=first)[0]
                            for first in (0, 2)]
        assert [r.trace.answer for r in (a, b, c, d)] == [r.trace.answer for r in whole]
        assert len(wire.seen) == 4
        wf.roll_out(write, [Task("Why?", pool, name="1/7", previous=a.trace)], 1)
        wf.roll_out(write, [Task("Why?", pool)], 1)
        wf.roll_out(write, [Task("Why?", pool)], 1)
        assert len(wire.seen) == 7


@pytest.mark.parametrize("where", ["write", "grade", "edit", "worker", "on_finish"])
def test_what_fails_is_raised_at_once(where):
    """A bug ends the rollouts without waiting for a call that hangs, and no step that had not begun
    begins."""
    begun, hang, calls = threading.Event(), threading.Event(), []

    def slow(chat):
        calls.append(chat[-1]["content"])
        begun.set()
        hang.wait(60)
        return "late"

    def fail_at(place):
        if place == where:
            assert begun.wait(60)
            raise ZeroDivisionError(place)

    def quick(chat):
        fail_at("worker")
        return "quick"

    def grade(problem, answer):
        fail_at("grade")
        return True

    def edit(workflow):
        if workflow.steps[0].worker:
            fail_at("edit")
        return workflow

    def on_finish(rollout):
        fail_at("on_finish")

    def write(chats, n, first):
        yield 0, 0, lists("[0, 0]", '["A.", "B."]', "[[], [0]]")
        assert begun.wait(60)
        yield 0, 1, lists("[1]", '["C."]', "[[]]")
        fail_at("write")

    with pytest.raises(ZeroDivisionError, match=where):
        wf.roll_out(write, [Task("Why?", [Local("slow", slow), Local("quick", quick)])], 2, grade=grade,
                    edit=edit, on_finish=on_finish)
    hang.set()
    jobs = [wf.in_thread(int) for _ in range(wf.threading.active_count())]
    assert [job.result(60) for job in jobs] == [0] * len(jobs) and len(calls) == 1  # B. was not asked for


def test_a_task_that_nobody_waits_for_stops():
    gone = threading.Event()

    def before_step(i, name):
        if gone.is_set():
            raise WorkerError("stopped")

    pool = [Local("a", lambda chat: gone.set() or "A"), Local("b", lambda chat: 1 / 0)]
    [rollout] = wf.conduct(says(lambda i, number: lists("[0, 1]", '["A.", "B."]', "[[], [0]]")),
                           [Task("Why?", pool, before_step=before_step)], 3, hung_up=gone.is_set)
    assert "stopped" in rollout.trace.error and rollout.trace.calls == 1 and rollout.trace.previous is None


def test_a_worker_in_the_seat_that_is_lost(tmp_path):
    """Its tasks end with an error, neither right nor wrong; the others go on."""
    with Wire(lambda model, chat: 400 if "Why?" in chat[0]["content"] else one_step("Go.")
              if "You conduct" in chat[0]["content"] else "gone") as wire:
        [worker] = pool_of(tmp_path, wire.url, "a")
        worker.params["max_tokens"] = None  # "null" in the pool's file: the provider's own
        lost, fine = wf.conduct(wf.worker_conductor(worker), [Task("Why?", [worker]), Task("How?", [worker])],
                                grade=lambda problem, answer: True)
    assert lost.right is None
    assert "HTTP 400" in lost.trace.error and (fine.right, fine.trace.answer) == (True, "gone")


@pytest.mark.parametrize("access, name", [
    ([], "no steps"), ([[]], "one shot"), ([[], [0]], "chain"), ([[], [0], [0, 1]], "chain"),
    ([[], [], [0, 1]], "fan-out"),
    ([[], [], [], [0, 1, 2]], "fan-out"), ([[], []], "mixed"), ([[], [0], [0]], "mixed"),
    ([[], [], [1]], "mixed"), ([[], [], [0, 1], [2]], "mixed")])
def test_shapes(access, name):
    assert wf.shape(Workflow([Step(0, "", seen) for seen in access])) == name


def test_a_worker_in_the_seat_leaves_the_threads_to_the_steps(tmp_path):
    """Its workflows run while it still writes others, however many there are; small limits are doubled for it."""
    ran, calls = threading.Event(), itertools.count()

    def answer(model, chat):
        if "You conduct" in chat[0]["content"]:
            assert next(calls) < 300 or ran.wait(60)
            return one_step("Go.")
        ran.set()
        return "gone"

    with Wire(answer) as wire:
        [seat, worker] = pool_of(tmp_path, wire.url, "ab")
        seat.params.update(max_tokens=4096)
        wf.conduct(wf.worker_conductor(seat), [Task(f"Why {i}?", [worker]) for i in range(600)])
        written = ["You conduct" in chat[0]["content"] for _, chat in wire.seen]
        assert (sum(written), len(written)) == (600, 1200)
        assert wire.limits == {("a", 8192), ("b", None)}
        seat.params = {"max_completion_tokens": 128_000}
        wf.conduct(wf.worker_conductor(seat), [Task("Why?", [worker])])
        assert ("a", 128_000) in wire.limits and len(wire.limits) == 3


def test_what_is_printed_commands_no_terminal():
    """Escape sequences, bidirectional overrides and half characters go; spaces and letters of any script stay."""
    assert wf.printable("10\u202fkm, \u00a0\u3000👨\u200d👩\u200d👧\r\nنعم\t") == "10\u202fkm, \u00a0\u3000👨\u200d👩\u200d👧\nنعم\t"
    assert wf.printable("\x1b[2J\x9b1m\u202eevil\ud800\r\x7f") == "\ufffd[2J\ufffd1m\ufffdevil\ufffd\ufffd\ufffd"
