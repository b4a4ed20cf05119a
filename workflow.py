"""A workflow: ask the Conductor for it, parse it, run it on the workers, recurse; show and serve it (§3).

    python workflow.py "a question" --checkpoint=DIR [--pool=NAME] [--rounds=1]      NAME: see workers.py
    python workflow.py serve --checkpoint=DIR   # the Conductor as an OpenAI-compatible model on 127.0.0.1
    python workflow.py show FILE [N]            # the traces in a run's traces/*.jsonl, or number N of them

The Conductor writes three Python lists: who (`model_id`), what (`subtasks`), and which earlier steps each may
see (`access_list`). `messages` asks for them, `parse` reads them, `submit` runs them, a `Trace` is what
happened, and `roll_out` does all of it for many questions. A further round shows the Conductor the answer
and asks again (§3.2): in use that is `conduct`, in the appendix, in training train.second_rounds. Workers and
steps are counted from 0. Read grpo.py next."""
import ast
import difflib
import itertools
import json
import os
import queue
import re
import sys
import textwrap
import threading
import time
import traceback
import unicodedata
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from http.server import BaseHTTPRequestHandler
from multiprocessing.pool import ThreadPool

import torch

from model import Qwen, Tokenizer, compute_dtype, configure, fetch, read_json
from sample import Completion, generate_each
from workers import (LIMITS, LOCAL, WISHES, Handler, Reply, Server, WorkerError, load_pool, loopback_server,
                     unset_in, warn)


class WorkflowError(ValueError):
    """A text is no workflow; the message says which list is wrong and why."""


@dataclass
class Step:
    worker: int
    subtask: str
    access: list[int]  # the earlier steps whose subtask and response the worker sees
    wrote_all: bool = field(default=False, compare=False)  # in a further round it also sees the last answer


@dataclass
class Workflow:
    steps: list[Step]
    written: str = field(default="", compare=False, repr=False)  # all that the Conductor wrote


# ------------------------------------------------------------------------------------------------------------
# The prompt (App. E). The laptop's is only "5 models, 5 steps." and the question (`short_chat`): there the
# format comes from the warm start. That, examples and the texts of further rounds are in the appendix.

@dataclass
class Prompting:
    """How a Conductor is asked for a workflow; conductor.json beside a checkpoint remembers it."""
    style: str = "full"  # or zero-shot, fine-grained (App. B.8), short (the laptop world's)
    examples: str = "ood"  # few-shot examples: "ood", unlike the training's tasks; "in"; "mixed" (Table 4)
    subtasks: bool = True  # False: there are none, and every worker is to solve the question (App. B.7)
    max_steps: int = 5
    max_new_tokens: int = 1024
    named: bool = False  # each worker has a letter beside its number
    # what else conductor.json says
    dtype: str = ""  # for computation: bf16, fp32, or "": as the device likes
    pool: str = ""  # --pool in training; if it is a local one, also in use
    workers: list[str] = field(default_factory=list)  # that pool's names, in the order of their numbers


ROLE = """You conduct a team of language models. You never answer the question yourself: you write a workflow
by which they answer it.

A workflow has one to {max_steps} steps. Every step has three parts:
- a model: the number of the model that does it,
- a subtask: what you tell that model, in plain words: to solve the question from scratch, to improve or check
  an earlier response, to plan, to recall facts, or whatever else helps a later model,
- an access list: which earlier steps that model is shown.
Each model gets the question, then the subtasks and responses of the steps it is shown, as past turns of a
chat, and then its own subtask, and nothing else. The models differ in what they are good at, and a model may
be used more than once. The response to the last step goes to the user as it is, so its subtask has to ask for
the whole answer in the form that the question wants.

First say in a sentence or two what the question needs and how you divide the work. Then write three Python
lists of equal length: model_id, the models' numbers; subtasks, strings; access_list, for each step ["all"] to
show it all earlier steps, {indices}or [] to show it none."""  # indices: FINE_GRAINED or ""


def messages(question: str, n_workers: int, max_steps: int = 5, previous: "Trace | None" = None,
             prompting: Prompting = Prompting(), letters: str = "") -> list[dict]:
    """The chat that asks the Conductor for a workflow, or, after the round `previous`, for one more (§3.2).

    prompting: its style, examples and subtasks. letters: one for each model, or "". In a subset of the pool
    (§3.2) numbers change, but letters do not."""
    is_short = prompting.style == "short"
    first_turns = short_chat if is_short else full_chat
    again = SHORT_AGAIN if is_short else AGAIN
    chat = first_turns(question, n_workers, max_steps, prompting, letters)
    for trace in (previous.rounds() if previous else []):
        written = trace.workflow.written or as_lists(trace.workflow, prompting.subtasks)
        chat += [{"role": "assistant", "content": written},
                 {"role": "user", "content": again.format(answer=trace.answer, max_steps=max_steps)}]
    return chat


# ------------------------------------------------------------------------------------------------------------
# Parse. How lists are found and read, and what makes lists a workflow: in the appendix.

def parse(text: str, n_workers: int, max_steps: int = 5, allow_empty: bool = False,
          subtasks: bool = True) -> Workflow:
    """The last valid workflow in a Conductor's completion: three lists in a row, in any order.

    allow_empty: three empty lists mean to keep the answer (§3.2). subtasks=False: there are two lists, and
    every subtask is to solve the question."""
    names = ["model_id", "subtasks", "access_list"] if subtasks else ["model_id", "access_list"]
    workflow = Workflow([], written=text)
    for i, (worker, subtask, access) in enumerate(last_rows(text, names, n_workers, max_steps, allow_empty)):
        wrote_all = "all" in access
        indices = [*range(i)] if wrote_all else sorted(set(access))
        workflow.steps.append(Step(worker, subtask, indices, wrote_all))
    return workflow


# ------------------------------------------------------------------------------------------------------------
# Run

@dataclass
class Task:
    """What the Conductor is asked, and how the answer is wanted."""
    question: str
    pool: list  # the workers it may use: objects with name, letter and chat(messages, call_id, **options)
    previous: "Trace | None" = None  # the round before
    problem: object = None  # eval.py's Problem, which the grader gets
    name: str = ""  # prefix of its calls' ids, in all rounds; "": no --replay
    # for the server and the command line
    last_call: dict = field(default_factory=dict)  # options of the last step's call: on_text, max_tokens, …
    before_step: object = lambda i, name: None  # called before step i; its WorkerError ends the workflow


@dataclass
class Trace:
    """One workflow as it ran. calls, tokens and cost include earlier rounds."""
    question: str
    workflow: Workflow
    workers: list[str]  # each step's worker, by name
    replies: list[Reply | None]  # None: the call failed, or a failure came before it
    seconds: float = 0.0  # wall time of this round
    error: str | None = None  # why there is no answer; then the rollout is left out of training
    previous: "Trace | None" = None  # the round before
    right: bool | None = None  # what the grader says of the answer; None: nobody graded, or a call was lost
    bad_request: bool = False  # the error is the fault of who asks: HTTP 400

    @property
    def responses(self) -> list[str]:
        return [reply.text if reply else "" for reply in self.replies]

    @property
    def answer(self) -> str:
        """The last step's response; without steps, the answer of the round before; "" after an error."""
        if self.error:
            return ""
        return self.replies[-1].text if self.replies else self.previous.answer

    def rounds(self) -> list["Trace"]:
        """This trace and those before it, the first round first."""
        return [*(self.previous.rounds() if self.previous else []), self]

    # What it took

    @property
    def all_replies(self) -> list[Reply]:
        return [reply for trace in self.rounds() for reply in trace.replies if reply]

    @property
    def calls(self) -> int:
        return len(self.all_replies)

    @property
    def tokens(self) -> int:
        return sum(reply.prompt_tokens + reply.completion_tokens for reply in self.all_replies)

    @property
    def cost(self) -> float | None:
        """Dollars; None where one of the calls has an unknown cost."""
        costs = [reply.cost for reply in self.all_replies]
        return None if None in costs else sum(costs)


def worker_chat(question: str, turns: list[tuple[str, str]], subtask: str) -> list[dict]:
    """What a worker sees: the question, past turns of (subtask, response), its own subtask."""
    chat = []
    for past_subtask, response in turns:
        chat += [{"role": "user", "content": f"Your task:\n{past_subtask}"},
                 {"role": "assistant", "content": response}]
    chat.append({"role": "user", "content": f"Your task:\n{subtask}"})
    chat[0]["content"] = f"Question:\n{question}\n\n{chat[0]['content']}"
    return chat


def submit(workflow: Workflow, task: Task, number: int = 0, is_stopped=lambda: False,
           on_end=lambda trace: trace) -> Future:
    """Start a workflow. Its steps run in threads, each after the steps that it sees. A WorkerError becomes
    Trace.error, after which, or once is_stopped(), no further step starts. The calls that run are awaited, so
    that their cost is counted.

    Returns a future of on_end(trace), by default the trace; it raises any other exception, which is a bug.
    number: the rollout's, for calls' ids."""
    check_steps(workflow, task)
    steps = workflow.steps
    names = [task.pool[step.worker].name for step in steps]
    trace = Trace(task.question, workflow, names, [None] * len(steps), previous=task.previous)
    begun = time.monotonic()
    futures = []  # of the steps

    def run_step(i):
        step = steps[i]
        wait_for_all([futures[j] for j in step.access])
        if trace.error or is_stopped():
            trace.error = trace.error or "stopped, as something else has failed"
            return
        turns = [(steps[j].subtask, trace.replies[j].text) for j in step.access]
        if step.wrote_all:
            turns = last_turn(task.previous) + turns
        chat = worker_chat(task.question, turns, step.subtask)
        is_last = i == len(steps) - 1
        options = task.last_call if is_last else {}
        try:
            task.before_step(i, names[i])
            worker = task.pool[step.worker]
            trace.replies[i] = worker.chat(chat, call_id=id_of_call(trace, task.name, number, i), **options)
        except WorkerError as e:
            trace.error = f"step {i}: {e}"
            trace.bad_request = e.bad_request and is_last  # Only this call has a client's options.

    def end():
        wait_for_all(futures)
        trace.seconds = time.monotonic() - begun
        return on_end(trace)

    for i in range(len(steps)):
        futures.append(in_thread(run_step, i))
    return in_thread(end)


# ------------------------------------------------------------------------------------------------------------
# Roll out: question → prompt → completion → workflow → answer → right or wrong

@dataclass
class Rollout:
    """One completion and all that becomes of it, from its tokens to its advantage."""
    task: Task
    written: str  # what the Conductor wrote
    prompt: list[int] = field(default_factory=list)  # empty unless a model wrote it
    completion: Completion | None = None  # the tokens of `written`; None unless a model wrote it
    trace: Trace | None = None  # None: what was written is no workflow
    invalid: str = ""  # why it is none
    reward: float | None = None  # set in train.py (§3.1); None: a call was lost
    advantage: float = 0.0  # set in grpo.py (Eq. 2)
    importance: list[float] | None = None  # weights of the tokens (grpo.set_importance), an option

    @property
    def right(self) -> bool | None:
        """Whether the answer is right; False without a workflow; None if a call was lost or nobody graded."""
        return self.trace.right if self.trace else False


# A `conductor`, in small letters, is a generator: conductor(chats, n, first) writes n completions a chat. As
# soon as one has ended it yields the number i of its chat, its number j (0 … n-1), and then
#     text, prompt ids, Completion    if a model wrote it (`model_conductor`)
#     text                            if a worker did (`worker_conductor`), or anything else
#     WorkerError                     if it could not be written
# It is rollout number first + j: of 64 on two ranks, the second writes n = 32 from first = 32 on.


def model_conductor(model: Qwen, tokenizer: Tokenizer, prompting: Prompting, temperature=1.0, seed=0):
    """A model as the `conductor` of roll_out. A prompt that is too long fails alone."""
    room = model.config.max_position_embeddings - prompting.max_new_tokens

    def conductor(chats, n, first):
        prompts = [tokenizer.chat(chat) for chat in chats]
        fits = [i for i, prompt in enumerate(prompts) if len(prompt) <= room]
        yield from too_long(prompts, room, n)
        if fits:
            each = generate_each(model, [prompts[i] for i in fits], n, prompting.max_new_tokens, temperature,
                                 eos_id=tokenizer.end_ids, seed=seed, n_ids=len(tokenizer), first=first)
            for k, j, completion in each:
                yield fits[k], j, tokenizer.decode(completion.tokens), prompts[fits[k]], completion
    return conductor


def roll_out(conductor, tasks: list[Task], n: int = 1, prompting: Prompting = Prompting(), grade=None,
             edit=None, first: int = 0, on_finish=None) -> list[list[Rollout]]:
    """n rollouts of each task, as [task][rollout]. A workflow runs as soon as it is written, and is graded as
    soon as it has run, while others are being written.

    conductor: see above. grade(task.problem, answer) -> bool; without it no answer is right or wrong.
    edit(workflow) -> workflow, for ablations. first: the number of each task's first rollout.
    on_finish(rollout) is called from any thread. Any exception but a WorkerError stops everything."""
    groups = [[None] * n for _ in tasks]
    if not tasks or not n:
        return groups

    def complete(rollout, trace):
        rollout.trace = trace
        if trace and grade and not trace.error:
            trace.right = grade(rollout.task.problem, trace.answer)
        if on_finish:
            on_finish(rollout)

    chats = [ask(task, prompting) for task in tasks]  # by `messages`
    with Running() as running:  # Its end waits for all. Once anything has raised, no further step starts.
        for i, j, written, *by_model in once_each(conductor(chats, n, first), groups):
            if running.failed.is_set():
                break
            task = tasks[i]
            rollout = groups[i][j] = Rollout(task, written, *by_model)
            if isinstance(written, WorkerError):
                complete(rollout, unwritten(rollout))
                continue
            try:
                workflow = parse(written, len(task.pool), prompting.max_steps, subtasks=prompting.subtasks,
                                 allow_empty=task.previous is not None)
            except WorkflowError as e:
                rollout.invalid = str(e)
                complete(rollout, None)
                continue
            if edit:
                workflow = edit(workflow)
            on_end = partial(complete, rollout)
            running.add(submit(workflow, task, first + j, running.failed.is_set, on_end))
    check_whole(groups)
    return groups


# ------------------------------------------------------------------------------------------------------------
# Appendix: further rounds, a worker as the Conductor, threads, reading lists, few-shot examples, views, the
# server, the command line

def ask(task: Task, prompting: Prompting) -> list[dict]:
    """The chat that asks a Conductor, in the way it knows, for a workflow."""
    letters = "".join(worker.letter for worker in task.pool) if prompting.named else ""
    return messages(task.question, len(task.pool), prompting.max_steps, task.previous, prompting, letters)


def too_long(prompts: list[list[int]], room: int, n: int):
    """Yield what a conductor says of prompts of more than `room` tokens."""
    for i, prompt in enumerate(prompts):
        if len(prompt) > room:
            why = f"the prompt has {len(prompt)} tokens, and the Conductor can read {room}"
            for j in range(n):
                yield i, j, WorkerError(why, bad_request=True)


def unwritten(rollout: Rollout) -> Trace:
    """The trace of a rollout whose text is the WorkerError with which the conductor failed."""
    error, rollout.written = rollout.written, ""
    task = rollout.task
    return Trace(task.question, Workflow([]), [], [], error=str(error), previous=task.previous,
                 bad_request=error.bad_request)


def last_turn(previous: Trace | None) -> list[tuple[str, str]]:
    """[(subtask, response)] of the answer of the round before, which steps with "all" see first; or []."""
    rounds = previous.rounds() if previous else []
    with_steps = [trace for trace in rounds if trace.replies]  # of which the first round always has some
    return [(trace.workflow.steps[-1].subtask, trace.answer) for trace in with_steps[-1:]]


def id_of_call(trace: Trace, name: str, number: int, step: int) -> str:
    """By which --replay knows a call; "" without a name."""
    return f"{name}/{number}/{len(trace.rounds()) - 1}/{step}" if name else ""


def check_steps(workflow: Workflow, task: Task):
    """ValueError for a workflow, made by hand, that `parse` would not have let pass."""
    if not workflow.steps and task.previous is None:
        raise ValueError("a workflow without steps keeps the previous answer, but there is none")
    for i, step in enumerate(workflow.steps):
        if not 0 <= step.worker < len(task.pool) or not {*step.access} <= {*range(i)}:
            raise ValueError(f"step {i} has no worker of the pool, or sees what is no earlier step: {step}")


def once_each(written, groups: list[list]):
    """What a conductor yields, which the caller puts into groups[i][j]. ValueError for a completion that it
    wrote twice, or unasked."""
    for i, j, *rest in written:
        if not 0 <= i < len(groups) or not 0 <= j < len(groups[i]) or groups[i][j]:
            raise ValueError(f"the conductor wrote completion {j} of chat {i} twice, or unasked")
        yield i, j, *rest


def check_whole(groups: list[list]):
    """ValueError where the conductor left completions out."""
    missing = [(i, j) for i, group in enumerate(groups) for j, rollout in enumerate(group) if not rollout]
    if missing:
        raise ValueError(f"the conductor has not written (chat, completion) {missing[:9]}")


def execute(workflow: Workflow, question: str, pool: list, previous=None, name="") -> "Trace":
    """Run a workflow and wait for its trace: see `submit`. name: as in Task."""
    return submit(workflow, Task(question, pool, previous, name=name)).result()


def conduct(conductor, tasks: list[Task], rounds: int = 0, prompting: Prompting = Prompting(), tries: int = 3,
            grade=None, edit=None, on_finish=None, hung_up=lambda: False) -> list[Rollout]:
    """One rollout a task, and up to `rounds` more in view of the answer, until empty lists keep it (§3.2).

    Text that does not parse is drawn again, `tries` times in all, under the next rollout numbers. A task that
    then still has no workflow ends with the round before, and in the first round without a trace. Once
    hung_up(), as nobody waits for the answer, no try and no round begins. The rest is as in roll_out."""
    asked = tasks
    if rounds > 0:  # Only the last round's answer is told as it comes.
        asked = [replace(task, last_call={**task.last_call, "on_text": None}) for task in tasks]
    rollouts = [None] * len(tasks)
    left = range(len(tasks))  # the tasks without a workflow
    for attempt in range(tries):
        groups = roll_out(conductor, [asked[i] for i in left], 1, prompting, grade, edit, attempt, on_finish)
        for i, [rollout] in zip(left, groups):
            rollouts[i] = rollout
        left = [i for i in left if not rollouts[i].trace and not hung_up()]

    going = [i for i, r in enumerate(rollouts) if r.trace and r.trace.workflow.steps and not r.trace.error]
    if rounds > 0 and going and not hung_up():
        again = [replace(tasks[i], previous=rollouts[i].trace) for i in going]
        later = conduct(conductor, again, rounds - 1, prompting, tries, grade, edit, on_finish, hung_up)
        for i, rollout in zip(going, later):
            trace = rollout.trace
            if trace and (trace.workflow.steps or not trace.error):  # no call for it was lost
                rollouts[i] = rollout
    return rollouts


def worker_conductor(worker, name: str = ""):
    """A worker as the Conductor of `roll_out` (Table 11). A small limit of its tokens is doubled, as in the
    paper, to at most 8,192. There are no ids, and a lost call is an error. name: as in Task."""
    limits = {key: max(n, min(2 * n, 8192)) for key, n in worker.params.items() if key in LIMITS and n}

    def conductor(chats, n, first):
        def call(which):
            i, j = which
            try:
                return i, j, worker.chat(chats[i], call_id=name and f"{name}/{first + j}", **limits).text
            except WorkerError as e:
                return i, j, e

        calls = [*itertools.product(range(len(chats)), range(n))]
        with ThreadPool(min(worker.concurrency, len(calls))) as threads:  # its own: `jobs` are the steps'
            yield from threads.imap_unordered(call, calls)
    return conductor


# The calls of all workflows are made by up to 1,024 threads; how many a worker gets at a time is its
# `concurrency`. They are daemons, unlike a ThreadPoolExecutor's: a program that ends does not wait for calls.
# Jobs begin in the order in which they came, so a job may wait for earlier ones, and for no later one.
jobs = queue.SimpleQueue()  # of (future, function, arguments)
idle, unborn = threading.Semaphore(0), threading.Semaphore(1024)  # threads that wait; that may still start


def in_thread(function, *arguments) -> Future:
    """Run a function in one of the threads; the future gets what it returns or raises."""
    future = Future()
    jobs.put((future, function, arguments))
    if not idle.acquire(blocking=False) and unborn.acquire(blocking=False):
        threading.Thread(target=work, daemon=True).start()
    return future


def work():
    while True:
        future, function, arguments = jobs.get()
        try:
            future.set_result(function(*arguments))
        except BaseException as e:
            future.set_exception(e)
        idle.release()


class Running:
    """The workflows of a `with`, which at its end, unless it has raised, waits for them and raises what one
    has raised. `failed` is set as soon as one has, or the block itself."""
    def __init__(self):
        self.futures = []
        self.failed = threading.Event()

    def add(self, future: Future):
        self.futures.append(future)
        future.add_done_callback(lambda ended: ended.exception() and self.failed.set())

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        try:
            if kind is None:
                wait_for_all(self.futures)
        finally:
            self.failed.set()  # After a good end nothing is left to stop.


def wait_for_all(futures: list):
    """Wait, and raise the first exception as soon as there is one."""
    done, _ = wait(futures, return_when=FIRST_EXCEPTION)
    for future in done:
        future.result()


# Reading lists. One tokeniser passes over the text once and never gives a token up, and every repetition in a
# name is bounded, so hostile text costs linear time. Only flat lists of strings and numbers are evaluated.

NAME = r"""(?<![A-Za-z0-9_])(?P<name>model\\?_id|subtasks|access\\?_list)[\s*`"'”’]{0,20}
    # JSON and Markdown quote it; some annotate it: model_id: list[int] = …
    (?:[:：]\s{0,4}[A-Za-z][\w.]{0,20}\s{0,4}(?:\[[^=\n]{0,60}\])?\s{0,4}(?==))?
    [:=：＝][\s*`]{0,20}(?=[\[［])"""
UNNAMED = NAME.replace("?P<name>", "?:")
# A string may hold a raw newline, but not one before a list's name: such a string was never closed.
NEWLINE = r"\n(?![ *`\"'-]{0,8}" + UNNAMED + ")"
TRIPLE = "|".join(rf"{q * 3}(?:[^{q}\\\0]+|\\.|{q}(?!{q * 2}))*" for q in "\"'")
PLAIN = "|".join(rf"{q}(?:[^{q}\\\n\0]+|\\.|{NEWLINE})*" for q in "\"'")
SMART = "|".join(rf"[{q}](?:[^{q}\\\n\0]+|\\.|{NEWLINE}|[{q}](?!\s{{0,8}}[],，］]))*" for q in ("“”", "‘’"))
TOKEN = re.compile(rf"""(?P<atom>[][,［］，]|(?:\d+(?:\.\d*)?(?:[eE]\d+)?|True|False|None)(?!\w))
    |(?P<next>(?={UNNAMED}))
    |(?P<string>(?P<raw>[rR]?)(?:(?:{TRIPLE})(?P<end3>\"\"\"|\'\'\')?|(?:{PLAIN}|{SMART})(?P<end>["'“”‘’])?))
    |(?P<comment>(?:\#|//)[^\n]*)
    |(?P<other>-?\w+|\S)""", re.DOTALL | re.VERBOSE)
LIST_BEGINS = re.compile(NAME, re.VERBOSE)
MORE = re.compile(r"[ \t]*(?:\*[ \t]*\w|\+|\[|\.\w+\()")  # makes an expression of a list: [0]*6, [0].pop()
# Some models go on to invent a further question, and its workflow is none for this one.
NEXT_QUESTION = re.compile(r"^[\s>#*]{0,8}(?:\w{1,12} )?[Qq]uestion(?: \d{1,3})?[* ]{0,4}[:：]", re.MULTILINE)


def lists_in(text: str):
    """Yield the name of each list in the text, and its value or in words what is wrong with it, up to a next
    question."""
    position = 0
    while begin := LIST_BEGINS.search(text, position):
        if position and NEXT_QUESTION.search(text, position, begin.start()):
            return
        value, position = read_list(text, begin.end())
        yield begin["name"].replace("\\", ""), value


def read_list(text: str, start: int) -> tuple[list | str, int]:
    """The list that opens at text[start], or what is wrong with it, and where the reading ended."""
    pieces, depth = [], 0
    for token in TOKEN.finditer(text, start):
        kind, piece = token.lastgroup, token[0]
        if kind == "atom":
            piece = unicodedata.normalize("NFKC", piece)  # full-width punctuation and digits
            depth += (piece == "[") - (piece == "]")
            pieces.append(piece)
        elif kind == "next":
            return "the list is not closed", token.end()
        elif kind == "string" and (token["end"] or token["end3"]):
            pieces.append(repr(string_value(token)))
        elif kind == "string":
            return "a string is not closed", token.end()
        if kind == "other" or depth > 2:
            return f"{piece!r:.20} does not belong there", token.end()
        if depth == 0:
            break
    else:
        return "the list is not closed", len(text)
    end = token.end()
    if MORE.match(text, end):
        return f"{text[end:end + 8].strip()!r} follows the list, which has to be written out", end
    try:
        return ast.literal_eval(" ".join(pieces)), end
    except (ValueError, SyntaxError) as e:  # also of numbers of thousands of digits
        return getattr(e, "msg", str(e)), end


def last_rows(text: str, names: list[str], n_workers: int, max_steps: int, allow_empty: bool) -> list[tuple]:
    """(worker, subtask, access list) of each step of the last valid workflow. WorkflowError without any."""
    rows = None
    error = "model_id: the list is missing"
    window = []  # the last len(names) lists, as (name, value): together they may be a workflow
    for name, value in lists_in(text):
        if name not in names:
            continue
        window = [*window, (name, value)][-len(names):]
        try:  # This raises until the window holds every list once.
            rows = checked_rows(dict(window), names, n_workers, max_steps, allow_empty)
        except WorkflowError as e:
            error = str(e)
            continue
        # In the prompt's order access_list is the last list: clear the window, so that a following workflow
        # that is cut off cannot use these lists too. In any other order the end is unknown: keep the window.
        if [name for name, _ in window] == names:
            window = []
    if rows is None:
        raise WorkflowError(error)
    return rows


def checked_rows(found: dict, names: list[str], n_workers: int, max_steps: int, allow_empty: bool):
    """(worker, subtask, access list) of each step. found: by name, each list or in words why it is none.
    WorkflowError if they are not all there, or make no workflow."""
    for name in names:
        value = found.get(name, "the list is missing")
        if type(value) is str:
            raise WorkflowError(f"{name}: {value}")
    sizes = {name: len(found[name]) for name in names}
    n = sizes["model_id"]
    if {*sizes.values()} != {n}:
        raise WorkflowError(f"the lists differ in length: {sizes}")
    if n > max_steps or n == 0 and not allow_empty:
        raise WorkflowError(f"model_id: {n} steps, where 1 to {max_steps} are allowed")
    accesses = [["all"] if access == "all" else access for access in found["access_list"]]
    rows = list(zip(found["model_id"], found.get("subtasks", [SOLVE_IT] * n), accesses))
    for i, (worker, subtask, access) in enumerate(rows):
        if type(worker) is not int or not 0 <= worker < n_workers:
            raise WorkflowError(f"model_id: step {i} names {worker!r:.20}, not one of 0 to {n_workers - 1}")
        if type(subtask) is not str:
            raise WorkflowError(f"subtasks: step {i} is no text: {subtask!r:.20}")
        if type(access) is not list:
            raise WorkflowError(f"access_list: step {i} reads {access!r:.20}, no list")
        for j in access:
            if j != "all" and (type(j) is not int or not 0 <= j < i):
                raise WorkflowError(f"access_list: step {i} reads {j!r:.20}, no earlier step")
    return rows


def as_lists(workflow: Workflow, subtasks: bool = True) -> str:
    """The lists as a Conductor writes them, with ["all"] for all earlier steps. What was parsed is parsed
    alike again."""
    steps = workflow.steps
    access = []
    for i, step in enumerate(steps):
        everything = step.wrote_all or (i > 0 and step.access == [*range(i)])
        access.append('["all"]' if everything else str(step.access))
    lines = [f"model_id = {[step.worker for step in steps]}"]
    if subtasks:
        lines.append(f"subtasks = [{', '.join(quoted(step.subtask) for step in steps)}]")
    return "\n".join([*lines, f"access_list = [{', '.join(access)}]"])


def quoted(text: str) -> str:
    """A string literal that Python, JSON and `string_value` read alike."""
    def escaped(m):
        return "\\" + m[0] if m[0] in '"\\' else f"\\u{ord(m[0]):04x}"
    return '"' + re.sub(r'["\\\x00-\x1f]', escaped, text) + '"'


# In a string that a model wrote, \n, \t and \r are Python's newline, tab and return, or begin a command of
# LaTeX. After \r a letter follows in LaTeX only. LaTeX's commands with n and t are these; what follows a
# newline or tab in other text never completes one, but for the few in LIKE_WORDS ("\nless" may be a newline
# and "less"). They count as LaTeX within $…$ and where a relation or a symbol can stand: at the beginning,
# and after a word and a space.
COMMAND = re.compile(r"""r[A-Za-z]+
    |n(?:abla|at(?:ural|nums)|cong|e|earrow|eg(?:(?:med|thick|thin)space)?|eq|exists|[gl]eqq?|[gl]eqslant|gtr
      |ew(?:command|environment|line|page)|i|icefrac|[lL]eft(?:right)?arrow|[rR]ightarrow|less|mid|oindent
      |obreak(?:space)?|olimits|onumber|orm|ormalsize|ot|otag|otin|otni|parallel|prec(?:eq)?|sim|succ(?:eq)?
      |short(?:mid|parallel)|su[bp]set(?:eqq?)?|triangle(?:left|right)(?:eq)?|u|ull|[vV][dD]ash|warrow)
    |t(?:ag|anh?|au|binom|ext[a-z]*|frac|g|h|herefore|heta|hetasym|hick(?:approx|sim|space)|hinspace|ilde|imes
      |iny|o|oggle|op|r|riangle[a-z]*|t|wohead(?:left|right)arrow)""", re.VERBOSE)
LIKE_WORDS = {"ne", "nexists", "ni", "nless", "nmid", "nparallel", "nsim", "nsubset", "nu"}
RELATION_FITS = re.compile(r"^$|[\w)}\]$] $|[&({_^=+|]$")
HEX = r"u[0-9a-fA-F]{4}|U000[0-9a-fA-F]{5}|x(?=.?\d)[0-9a-fA-F]{2}"
ESCAPE = re.compile(rf"\\((?P<hex>{HEX})|[A-Za-z]+|.)|\$", re.DOTALL)
CONTROL = {"n": "\n", "t": "\t", "r": "\r"}


def string_value(token) -> str | None:
    """What a closed string token says, without its escapes, but with its LaTeX; None where it holds half of a
    surrogate pair, which is no text."""
    quotes = 3 if token["end3"] else 1
    text = token["string"][len(token["raw"]) + quotes:-quotes]
    commands = [m[1] for m in ESCAPE.finditer(text) if m[1] and m[1].isalpha()]
    sure = [c for c in commands if c[0] not in CONTROL or COMMAND.fullmatch(c) and c not in LIKE_WORDS]
    in_math = False

    def unescaped(m):
        nonlocal in_math
        what = m[1]
        if what is None:
            in_math = not in_math
        elif m["hex"]:
            return chr(int(what[1:], 16))
        elif what[0] in CONTROL:
            latex = COMMAND.fullmatch(what)
            if latex and what in LIKE_WORDS:
                latex = in_math or RELATION_FITS.search(text[max(0, m.start() - 2):m.start()])
            if not latex:
                return CONTROL[what[0]] + what[1:]
        elif what == "\n":
            return ""
        elif what in "\"'/" or what == "\\" and not sure:  # In LaTeX written as it is, \\ is a line break.
            return what
        return m[0]

    value = text if token["raw"] else ESCAPE.sub(unescaped, text)
    try:
        return value.encode("utf-16", "surrogatepass").decode("utf-16")  # joins the pairs that JSON writes
    except UnicodeDecodeError:
        return None


# Few-shot examples (Table 4): question, plan, steps. Those of tasks that no training set holds ("ood") are
# the default: nearer ones are copied, not explored beyond.
TAGS = "Reason inside <idea> tags and put the result inside <answer> tags."
MEDICINE = (
    "A heavy drinker is confused, with jerking eyes and low blood sugar. What must precede the glucose?",
    "One clinical rule decides. Two models recall it without seeing each other, and a third settles it.",
    (4, f"Name the syndrome that fits these findings and the deficiency behind it. {TAGS}", []),
    (1, f"Explain what glucose alone could do to this patient, and what prevents it. {TAGS}", []),
    (6, "Resolve any conflict between both responses and give the treatment inside <answer> tags.", "all"))
COUNTDOWN = (
    "Using each of 3, 7, 8 and 25 once, with + - * / and parentheses, write an expression that equals 76.",
    "The search is small enough for one careful model.",
    (2, f"Try products near 76 first, and verify the arithmetic before you answer. {TAGS}", []))
LIMIT = (
    "Find the limit of n(e - (1 + 1/n)^n) as n goes to infinity.",
    "An expansion solves it, but signs go wrong easily, so another model should check it numerically.",
    (0, f"Expand (1 + 1/n)^n in powers of 1/n up to the first order and derive the limit. {TAGS}", []),
    (5, f"Test the limit at n = 1000, correct the derivation if they disagree, and give it. {TAGS}", "all"))
LONG_COUNTDOWN = (
    "Using each of 2, 4, 6, 11 and 75 at most once, with + - * /, write an expression that equals 437.",
    "One model lays out routes and another follows them, a third searches alone, and a last one verifies.",
    (3, "Do not solve it. List three products close to 437 and the difference that each leaves.", []),
    (6, f"Follow the routes above until one works out with the numbers left. {TAGS}", "all"),
    (0, f"Search for an expression in your own way, starting from the largest number. {TAGS}", []),
    (4, "Recompute every expression and put one that uses no number twice inside <answer> tags.", "all"))
COMPETITION = (  # like MATH
    "How many positive divisors of 2^5 * 3^4 * 5 are multiples of 12?",
    "Counting exponents settles it. One model counts, and another confirms the count in a second way.",
    (2, f"Count the allowed exponents of each prime and multiply. {TAGS}", []),
    (5, f"Count again after dividing by 12, settle any difference, and give the number. {TAGS}", "all"))
CHOICE = (  # like MMLU
    "Which gas makes up most of the atmosphere of Mars?\nA. nitrogen\nB. carbon dioxide\nC. argon\nD. oxygen",
    "This is a single fact that one model recalls.",
    (1, f"Recall the composition of the atmosphere and give the letter of the right option. {TAGS}", []))
SHORT_ANSWER = (  # like RLPR
    "A firm has fixed costs of 1200 and sells at 20 a unit what costs it 14. Where does it break even?",
    "Profit and margin are easily mixed up: two models work alone and a third decides.",
    (3, f"Write down revenue and cost as functions of the quantity and set them equal. {TAGS}", []),
    (6, f"Find the contribution of a unit and divide the fixed costs by it. {TAGS}", []),
    (0, "Compare both results, correct what is wrong, and give the quantity inside <answer> tags.", "all"))
PROGRAM = (  # like LiveCodeBench
    "Read n and a list of n integers. Print the length of the longest run of equal neighbours.",
    "A plan with the edge cases first, then the program, then tests; a last model hands it in.",
    (4, "Do not write code. Describe a pass in constant memory, and list the edge cases.", []),
    (2, "Write the whole Python program by this plan, reading from standard input.", "all"),
    (5, "Go through the program by hand for the edge cases, and say which line fails, if any.", "all"),
    (6, "Give the corrected program as one block of Python, and nothing else.", "all"))
EXAMPLES = {
    "ood": (MEDICINE, COUNTDOWN, LIMIT, LONG_COUNTDOWN),
    "in": (SHORT_ANSWER, CHOICE, COMPETITION, PROGRAM),
    "mixed": (MEDICINE, COUNTDOWN, COMPETITION, PROGRAM),
}


def shown_examples(style: str, which: str, n_workers: int, max_steps: int, subtasks: bool) -> list[str]:
    """The few-shot examples that keep to the limits of the prompt they stand in."""
    if style not in ("full", "zero-shot", "fine-grained"):
        raise ValueError(f"style {style!r}: there are full, zero-shot, fine-grained and short")
    if which not in EXAMPLES:
        raise ValueError(f"examples {which!r}: there are {', '.join(EXAMPLES)}")
    shown = []
    for question, plan, *rows in EXAMPLES[which]:
        if len(rows) <= max_steps and style != "zero-shot":
            steps = [Step(worker % n_workers, subtask, [], sees == "all") for worker, subtask, sees in rows]
            shown.append(f"Example question: {question}\n\n{plan}\n{as_lists(Workflow(steps), subtasks)}")
    return shown


def full_chat(question: str, n_workers: int, max_steps: int, prompting: Prompting, letters: str):
    style, subtasks = prompting.style, prompting.subtasks
    role = ROLE if subtasks else ROLE_WITHOUT_SUBTASKS
    parts = [role.format(max_steps=max_steps, indices=FINE_GRAINED if style == "fine-grained" else "")]
    parts += shown_examples(style, prompting.examples, n_workers, max_steps, subtasks)
    models = [f"Model {i} ({letters[i]})" if letters else f"Model {i}" for i in range(n_workers)]
    parts.append(f"Question: {question}\n\nModels: {', '.join(models)}")
    return [{"role": "user", "content": "\n\n".join(parts)}]


def short_chat(question: str, n_workers: int, max_steps: int, prompting: Prompting, letters: str):
    models = f"{n_workers} models"
    if letters:
        models = "Models " + " ".join(f"{letter} {i}" for i, letter in enumerate(letters))
    return [{"role": "system", "content": f"{models}, {max_steps} steps."},
            {"role": "user", "content": question}]


# Only the style fine-grained offers lists of indices; `parse` always takes them.
FINE_GRAINED = "a list such as [0, 2] to show it those steps, counted from 0, "
AGAIN = """Your workflow ended in this response:

{answer}

If it should go to the user as it is, write all lists empty. If not, write a new workflow of up to {max_steps}
steps; "all" then shows a step this response too."""
SHORT_AGAIN = "Response: {answer}\nWrite a workflow, or empty lists to keep it."
SOLVE_IT = "Solve the question."  # every worker's subtask where the Conductor is asked for none
ROLE_WITHOUT_SUBTASKS = """You conduct a team of language models. You never answer the question yourself: you
write a workflow by which they answer it.

A workflow has one to {max_steps} steps. Every step has two parts:
- a model: the number of the model that does it,
- an access list: which earlier steps that model is shown.
Each model gets the question, then the responses of the steps it is shown, as past turns of a chat, and is
told to solve the question, and nothing else. The models differ in what they are good at, and a model may be
used more than once. The response to the last step goes to the user as it is.

First say in a sentence or two what the question needs and how you divide the work. Then write two Python
lists of equal length: model_id, the models' numbers; access_list, for each step ["all"] to show it all
earlier steps, {indices}or [] to show it none."""

# Views

def shape(workflow: Workflow) -> str:
    """One shot; chain: every step sees the one before; fan-out: the last step sees all others, which see
    nothing; or mixed. "no steps" keeps the answer of the round before."""
    seen = [step.access for step in workflow.steps]
    n = len(seen)
    if n < 2:
        return "one shot" if n else "no steps"
    if all(i - 1 in seen[i] for i in range(1, n)):
        return "chain"
    if seen[-1] == [*range(n - 1)] and not any(seen[:-1]):
        return "fan-out"
    return "mixed"


def view(trace: Trace) -> str:
    """All rounds for a terminal: who was told what, saw which steps, and answered what."""
    out = [f"Question: {trace.question}"]
    for number, turn in enumerate(trace.rounds()):
        if number:
            out.append(f"\nRound {number}")
        for i, (step, name, reply) in enumerate(zip(turn.workflow.steps, turn.workers, turn.replies)):
            sees = f"steps {step.access}" if step.access else "the question"
            if step.wrote_all:
                sees = "all before"
            out.append(f"\nStep {i}: {name} (model {step.worker}), sees {sees}: {step.subtask}")
            text = "(none)"
            if reply:
                text = reply.text if reply.text.strip() else f"(empty; it ended by {reply.finish!r})"
            out.append(textwrap.indent(text, "    "))
        if turn.error:
            out.append(f"\nFailed: {turn.error}")
        elif not turn.replies:
            out.append("\nThe answer is kept.")
    calls = "1 call" if trace.calls == 1 else f"{trace.calls} calls"
    cost = "unknown cost" if trace.cost is None else f"${trace.cost:.4f}"
    seconds = sum(turn.seconds for turn in trace.rounds())
    tokens = trace.tokens or ("unknown" if trace.calls else 0)
    out.append(f"\nAnswer: {trace.answer}\n{calls}, {tokens} tokens, {cost}, {seconds:.1f} s")
    return printable("\n".join(out))


def printable(text: str) -> str:
    """Without the characters by which a text could command the terminal, or turn its direction."""
    commands = r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
    return re.sub(commands, "\ufffd", text.replace("\r\n", "\n"))


def trace_to_json(trace: Trace) -> dict:
    """A dict for json.dumps; `trace_from` makes an equal trace of it."""
    return {**asdict(trace), "answer": trace.answer, "calls": trace.calls, "tokens": trace.tokens,
            "cost": trace.cost}


def trace_from(d: dict) -> Trace:
    """The trace of which trace_to_json made d."""
    workflow = Workflow([Step(**step) for step in d["workflow"]["steps"]], d["workflow"]["written"])
    replies = [reply and Reply(**reply) for reply in d["replies"]]
    previous = d["previous"] and trace_from(d["previous"])
    own = {key: d.get(key) for key in ("question", "workers", "seconds", "error", "right", "bad_request")}
    return Trace(**own, workflow=workflow, replies=replies, previous=previous)


def show(file: str, number: int | None = None) -> str:
    """The traces in a run's or an evaluation's JSON lines, a line each, or all of one."""
    with open(file, encoding="utf-8") as f:
        lines = f.readlines()
    out = []
    for i in range(len(lines)) if number is None else [number]:
        if i >= len(lines):
            raise ValueError(f"{file} has no line {i}, counted from 0")
        try:
            row = json.loads(lines[i])
            found = row if "workflow" in row else row.get("trace")
            trace = found and trace_from(found)
            if number is not None:
                told = view(trace) if trace else printable(f"no workflow:\n{row['text']}")
                return told + (f"\nReward: {row['reward']:g}" if row.get("reward") is not None else "")
            worth = f"reward {row['reward']:g}" if row.get("reward") is not None else ""
            state = shape(trace.workflow) if trace else "no workflow"
            said = " ".join((trace.question if trace else row["text"]).split())
            names = f"  [{' > '.join(trace.workers)}]" if trace else ""
            out.append(f"{i:>5}  {worth:<12}{state:<14}{said:.60}{names}")
        except (ValueError, TypeError, KeyError, AttributeError) as e:
            raise ValueError(f"{file}, line {i}, holds no trace: {e!r}") from None
    return printable("\n".join(out))


# The server

NEUTRAL = {"presence_penalty": 0, "frequency_penalty": 0, "logit_bias": {}}  # Some clients always send these.
SILENCE = 15.0  # seconds after which a stream says that the workers are still busy


def conductor_server(conductor, pool: list, prompting: Prompting, rounds: int, port: int) -> Server:
    """An OpenAI-compatible server on 127.0.0.1, bound but not started, of the models conductor (one round)
    and conductor-recursive (`rounds` more). conductor is called from many threads.

    The question is the whole conversation. A stream brings the last step's text as it comes where that is the
    answer for sure, else whole. usage is the workers' together, usage.cost in dollars (null where unknown). A
    workflow that fails is a 502 that says not to try, and pay, again; a 400 where the client asked for what
    the last worker cannot do. A client that hangs up stops it."""
    further = {"conductor": 0, "conductor-recursive": rounds}

    class ConductorHandler(Handler):
        models = [*further]
        log_message = BaseHTTPRequestHandler.log_message  # a line a request

        def complete(self, body):
            said = body["messages"]
            question = said[0]["content"]
            if len(said) > 1:
                question = "\n\n".join(f"{message['role']}: {message['content']}" for message in said)
            question = question.encode(errors="replace").decode()  # JSON can spell half an emoji.
            wishes = {key: body[key] for key in WISHES if body.get(key) not in (None, NEUTRAL.get(key))}
            if "max_completion_tokens" in wishes:  # a younger name for the same
                wishes["max_tokens"] = wishes.pop("max_completion_tokens")
            told = queue.SimpleQueue()  # pieces of the answer, then the Rollout or the exception
            stream = body.get("stream")

            def before_step(i, name):
                if self.hung_up():
                    raise WorkerError("stopped, as nobody waits for the answer")

            last_call = {"on_text": told.put, **wishes} if stream else wishes
            task = Task(question, pool, last_call=last_call, before_step=before_step)

            def run():
                try:
                    told.put(*conduct(conductor, [task], further[body["model"]], prompting,
                                      hung_up=self.hung_up))
                except Exception as bug:
                    told.put(bug)

            threading.Thread(target=run, daemon=True).start()
            streamed = False
            item = ""
            while isinstance(item, str):
                try:
                    item = told.get(timeout=SILENCE if stream else None)
                except queue.Empty:
                    self.send_piece(": the workers are busy\n\n")  # a comment, which clients pass over
                    continue
                if isinstance(item, str):
                    self.send_chunk({"content": item})
                    streamed = True
            if isinstance(item, Exception):
                raise item
            trace = item.trace
            if trace is None:
                return self.fail(502, f"the Conductor wrote no workflow: {item.invalid}", retry=False)
            while trace.error and trace.previous and not streamed:  # The answer of the round before is paid.
                trace = trace.previous
            if trace.error:
                is_clients = trace.bad_request and (wishes or not trace.workflow.steps)
                return self.fail(400 if is_clients else 502, trace.error, retry=False)
            n_in = sum(reply.prompt_tokens for reply in trace.all_replies)
            usage = {"prompt_tokens": n_in, "completion_tokens": trace.tokens - n_in,
                     "total_tokens": trace.tokens, "cost": trace.cost}
            finish = "length" if trace.all_replies[-1].finish == "length" else "stop"
            if not streamed:
                return self.reply(trace.answer, finish, usage)
            self.end_stream(finish, usage)

    return loopback_server(port, ConductorHandler)


def from_one_thread(conductor):
    """(ask_for, work_on): ask_for is a conductor of one chat for many threads; work_on does what it is asked,
    for ever, in the thread that calls it. What is asked while a batch is being written becomes the next.

    The main thread is to call work_on: torch aborts a program that ends while a daemon thread is in it."""
    asked = queue.SimpleQueue()  # of (chat, future of what is written)

    def ask_for(chats, n, first):
        written = Future()
        asked.put((chats[0], written))
        yield 0, 0, *written.result()

    def work_on():
        for number in itertools.count():  # A chat that is asked again draws other numbers.
            batch = [asked.get()]
            while len(batch) < 64 and not asked.empty():
                batch.append(asked.get())
            chats, futures = zip(*batch)
            waiting = dict(enumerate(futures))
            bug = ValueError("the conductor left out this chat")
            try:
                for i, _, *written in conductor(chats, 1, number):
                    waiting.pop(i).set_result(written)
            except Exception as e:
                warn(traceback.format_exc())
                bug = e.with_traceback(None)  # which would keep the grid, gigabytes of a GPU's memory
            for future in waiting.values():
                future.set_exception(bug)
    return ask_for, work_on


# The command line

def prompting_of(path: str) -> Prompting:
    """How the Conductor in a folder, or a repository of the Hugging Face hub, is asked: train.py tells it in
    conductor.json."""
    file = os.path.join(fetch(path, "conductor.json"), "conductor.json")
    known = read_json(file) if os.path.exists(file) else {}
    prompting = Prompting(**{f.name: known[f.name] for f in fields(Prompting) if f.name in known})
    for f in fields(Prompting):
        if type(getattr(prompting, f.name)) is not type(getattr(Prompting(), f.name)):
            raise ValueError(f"{file}: {f.name} is {getattr(prompting, f.name)!r}")
    if not all(isinstance(name, str) for name in prompting.workers):
        raise ValueError(f"{file}: workers are names, not {prompting.workers!r}")
    if not 1 <= prompting.max_steps <= 100:  # Every step is paid.
        raise ValueError(f"{file}: max_steps is {prompting.max_steps}, and may be 1 to 100")
    return prompting


def pool_of(checkpoint: str) -> str:
    """The local pool with which the Conductor in a folder was trained. ValueError if it was another: whose
    hosts read the questions and are paid is for the user to say, and not for whoever made the folder."""
    known = prompting_of(checkpoint).pool if os.path.isdir(checkpoint) else ""
    if known and known not in LOCAL:
        raise ValueError(f"say which workers to ask: this Conductor learned with --pool={printable(known)}")
    return known or "local"


def warn_of_others(prompting: Prompting, pool: list):
    """Say so where the workers are not those whose numbers, or letters, a Conductor has learned."""
    names = [worker.name for worker in pool]
    others = names != prompting.workers
    if prompting.named:  # Letters stay the same in a subset.
        others = not {*names} <= {*prompting.workers}
    if others and prompting.workers:
        known, here = ", ".join(prompting.workers), ", ".join(names)
        print(printable(f"the Conductor learned with {known}, and takes {here} for these"), file=sys.stderr)


def load_conductor(path: str) -> tuple[Qwen, Tokenizer, Prompting]:
    """The model and tokenizer of such a folder or repository, and how it is asked."""
    prompting = prompting_of(path)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Qwen.from_pretrained(path, compute_dtype(device, prompting.dtype), device)
    return model, Tokenizer.from_pretrained(path), prompting


def subset(pool: list, only: str) -> list:
    """The workers of a pool whose names stand in `only`, with commas between; all of them for ""."""
    wanted = [name.strip() for name in only.split(",") if name.strip()]
    known = [worker.name for worker in pool]
    for name in wanted:
        if name not in known:
            raise ValueError(f"no worker {name!r}; the pool has {', '.join(known)}")
    return [worker for worker in pool if worker.name in wanted or not wanted]


@dataclass
class Settings:
    checkpoint: str = "out/laptop/checkpoint"  # the Conductor
    pool: str = ""  # "": that of the Conductor's training, which must be given if it was not a local one
    only: str = ""  # some of its workers, by name, with commas between: the others are not to be used
    conductor: str = ""  # a worker of the pool in the Conductor's seat instead (Table 11), on no bill
    budget: float = 0.0  # dollars that the workers may cost together; 0: no limit
    rounds: int = 0  # recursion rounds after the first workflow
    temperature: float = 0.2
    port: int = 8400


def main(argv):
    s = Settings()
    words = configure(s, argv)
    if not "".join(words).strip():
        raise SystemExit(__doc__)
    near = difflib.get_close_matches(" ".join(words), ["serve", "show"], cutoff=0.7)
    if near and words[0] not in near:
        raise SystemExit(f"{words[0]!r} is no question; did you mean {near[0]}?")
    try:
        if words[0] == "show":
            if len(words) not in (2, 3) or not words[-1].isdecimal() and len(words) == 3:
                raise SystemExit("usage: python workflow.py show FILE [N], where N counts traces from 0")
            return print(show(words[1], *map(int, words[2:])))
        if words[0] == "serve" and words[1:] or s.rounds < 0:
            raise SystemExit("usage: python workflow.py serve, with --rounds=0 or more, and no other words")
        everyone = load_pool(s.pool or ("local" if s.conductor else pool_of(s.checkpoint)), budget=s.budget)
        pool = subset(everyone, s.only)
        for lack in unset_in(pool):
            print(f"not set in the environment: {lack}", file=sys.stderr)
        if s.conductor:
            seat = subset(everyone, s.conductor)
            if len(seat) > 1:
                raise ValueError(f"--conductor={s.conductor}: one worker, please")
            conductor = worker_conductor(*seat)
            prompting = Prompting()
        else:
            model, tokenizer, prompting = load_conductor(s.checkpoint)
            warn_of_others(prompting, pool)
            conductor = model_conductor(model, tokenizer, prompting, s.temperature)
        if words == ["serve"]:
            return serve_until_interrupted(conductor, pool, prompting, s)
        question = " ".join(words).encode(errors="replace").decode()  # The shell may pass what is no UTF-8.
        task = Task(question, pool)
        if sys.stderr.isatty():
            task.before_step = lambda i, name: sys.stderr.write(f"step {i}: {name} is asked …\n")
        [rollout] = conduct(conductor, [task], s.rounds, prompting)
        if rollout.trace is None:
            hint = "It knows the workers of its training by their numbers: is --pool theirs?"
            raise SystemExit(f"the Conductor wrote no workflow, in the last of 3 tries: {rollout.invalid}\n"
                             + (printable(rollout.written) if s.conductor else hint))
        print(view(rollout.trace))
        sys.exit(rollout.trace.error and "the workflow failed")
    except (OSError, ValueError, WorkerError) as e:
        raise SystemExit(str(e)) from None
    except KeyboardInterrupt:
        raise SystemExit("interrupted") from None


def serve_until_interrupted(conductor, pool, prompting, s: Settings):
    """Clients wait in threads of their own; the main thread writes their workflows, unless a worker does."""
    wait_for_ever = threading.Event().wait
    if not s.conductor:
        conductor, wait_for_ever = from_one_thread(conductor)
    server = conductor_server(conductor, pool, prompting, s.rounds or 1, s.port)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    print(f"{url} has the models conductor and conductor-recursive; Ctrl-C ends it", flush=True)
    wait_for_ever()


if __name__ == "__main__":
    main(sys.argv[1:])
