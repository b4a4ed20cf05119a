"""A workflow: ask the Conductor for it, parse it, run it on the workers, recurse; show and serve it (§3).

    python workflow.py "a question"                  # answered by assets/laptop/ and the local specialists
    python workflow.py "a question" --checkpoint=DIR --pool=mine.json [--extra_rounds=1] [--only=NAME,NAME]
    python workflow.py "a question" --conductor=WORKER --pool=mine.json      # an LLM of the pool conducts
    python workflow.py serve [the same flags]        # an OpenAI-compatible server on 127.0.0.1
    python workflow.py show FILE [N]                 # the lines of a run's traces/*.jsonl, or all of line N

The Conductor writes Python lists: `messages` asks for them, `parse` reads them, `roll_out` runs them. A
`Rollout` is the record of all that. Workers and steps are counted from 0. Read grpo.py next."""

import ast
import collections
import contextlib
import itertools
import json
import os
import queue
import re
import sys
import threading
import time
from dataclasses import asdict, dataclass, field, fields, replace

import torch

from model import Qwen, Tokenizer, compute_dtype, configure, fetch, read_json, write_json
from sample import generate_each
from workers import (
    LIMITS,
    LOCAL,
    QUESTION,
    TASK,
    Handler,
    Reply,
    WorkerError,
    load_pool,
    loopback_server,
    name_of,
    read_pool,
)

ASSETS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "assets")


class WorkflowError(ValueError):
    """A text is no workflow; the message says which list is wrong and why."""


@dataclass
class Step:
    worker: int
    subtask: str
    access: list[int]  # the earlier steps whose subtask and response the worker sees
    wrote_all: bool = field(
        default=False, compare=False
    )  # "all": in a further round the last answer too


@dataclass
class Workflow:
    steps: list[Step]


@dataclass
class Rollout:
    """A question, the workflow that a Conductor wrote for it, and what became of that."""

    question: str
    pool: list = field(default_factory=list)  # Workers; step.worker is an index of it
    workers: list[int] | None = None  # the numbers of those it may name (§3.2: a subset); None: all
    problem: object = None  # eval.py's Problem, for the grader
    problem_id: str = ""  # of a rollout that was read from a file
    # The turns before the question: {"role": "system", "user" or "assistant", "content": text}.
    context: list[dict] = field(default_factory=list)
    call_prefix: str = (
        ""  # prefix of its calls' ids, by which Replay knows them; "": they are not replayed
    )
    number: int = 0  # among the rollouts of its question: it seeds the draws
    previous: "Rollout | None" = None  # the round before (§3.2)
    written: str = ""  # by the Conductor
    prompt_ids: list[int] = field(
        default_factory=list
    )  # in tokens, if a model wrote; also the next two
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # of the tokens, when they were drawn
    finished: bool = True  # False: cut off at max_new_tokens
    workflow: Workflow | None = None
    invalid: str = ""  # why what was written is no workflow
    names: list[str] = field(default_factory=list)  # each step's worker
    replies: list[Reply | None] = field(
        default_factory=list
    )  # each step's; None: lost, or never asked
    error: str | None = None  # why there is no answer: the rollout is lost, which is not wrong
    seconds: float = 0.0  # from its writing to its judgement
    right: bool | None = None  # None: lost, or nobody graded; False also for what is no workflow
    failure: str = ""  # what is wrong with the answer, in the grader's words
    reward: float | None = None  # §3.1, by train.py; None: lost
    advantage: float = 0.0  # Eq. 2, by grpo.py
    wrong_share: float = 1.0  # of the answers to its question, by grpo.py, too

    @property
    def responses(self) -> list[str]:
        return [reply.text if reply else "" for reply in self.replies]

    @property
    def answer(self) -> str:
        """The last step's response; without steps the answer of the round before; "" where there is none."""
        if self.error or not self.workflow or not self.replies and not self.previous:
            return ""
        return self.responses[-1] if self.replies else self.previous.answer

    def rounds(self) -> list["Rollout"]:
        """The rounds before, the first one first, and this one. What follows counts all of them."""
        return [*(self.previous.rounds() if self.previous else []), self]

    @property
    def all_replies(self) -> list[Reply]:
        return [reply for rollout in self.rounds() for reply in rollout.replies if reply]

    @property
    def calls(self) -> int:
        return len(self.all_replies)

    @property
    def tokens_used(self) -> int:
        return sum(reply.prompt_tokens + reply.completion_tokens for reply in self.all_replies)

    @property
    def cost(self) -> float | None:
        """Dollars; None where the cost of a call is unknown."""
        costs = [reply.cost for reply in self.all_replies]
        return None if None in costs else sum(costs)


# ---- The prompt (App. E) ---------------------------------------------------------------------------------
@dataclass
class Prompting:
    """How a Conductor is asked for a workflow. conductor.json beside a checkpoint holds it."""

    prompt_style: str = (
        "ood"  # few-shot examples: ood, in, mixed (Table 4); zero-shot: none; short: the laptop's
    )
    max_steps: int = 5
    max_new_tokens: int = 1024
    # Whether it reads each worker's note. Without notes it knows workers by their numbers alone.
    notes: bool = False


ROLE = """You conduct a team of language models. You never answer the question yourself: you write a workflow
by which they answer it.

A workflow has one to {max_steps} steps. Every step has these parts:
- a model: the number of the model that does it,
- a subtask: what you tell that model, in plain words: to solve the question from scratch, to improve or check
  an earlier response, to plan, to recall facts, or whatever else helps a later model,
- an access list: which earlier steps that model is shown.
Each model gets the question, then the subtasks and responses of the steps it is shown, as past turns of a
chat, and then its own subtask, and nothing else. The models differ in what they are good at, and a model may
be used more than once. The response to the last step goes to the user as it is, so its subtask has to ask for
the whole answer in the form that the question wants.

First say in a sentence or two what the question needs and how you divide the work. Then write Python
lists of equal length: model_id, the models' numbers; subtasks, strings; access_list, for each step ["all"] to
show it all earlier steps, or [] to show it none."""
AGAIN = """Your workflow ended in this response:

{answer}

If it should go to the user as it is, write all lists empty. If not, write a new workflow of up to {max_steps}
steps; "all" then shows a step this response too."""
SHORT_AGAIN = "Response: {answer}\nWrite a workflow, or empty lists to keep it."


def messages(
    question: str,
    workers: int | list[int],
    max_steps: int = 5,
    previous: Rollout | None = None,
    prompt_style: str = "ood",
    notes: list[str] | None = None,
    context: list[dict] | None = None,
) -> list[dict]:
    """Return the chat that asks the Conductor for a workflow.

    Args:
        question: What the workers are to answer.
        workers: How many workers there are, or the numbers of those that may be named.
        max_steps: The largest number of steps that the Conductor may write.
        previous: The round before this one, whose answer the Conductor may keep (§3.2).
        prompt_style: See Prompting.
        notes: What each worker of the whole pool is good at, by its number; None shows numbers alone.
        context: The turns before the question. The short prompt leaves them out.
    """
    numbers = [*range(workers)] if isinstance(workers, int) else workers
    if prompt_style == "short":  # The format comes from the warm start.
        models = (
            f"{workers} models"
            if isinstance(workers, int)
            else f"Models {' '.join(map(str, numbers))}"
        )
        if (
            notes
        ):  # A tiny model finds a number only where it touches the note: "calculator0, coder1".
            models = ", ".join(f"{notes[number]}{number}" for number in numbers)
        chat = [
            {"role": "system", "content": f"{models}, {max_steps} steps."},
            {"role": "user", "content": question},
        ]
    else:
        known = {"zero-shot": [], **read_json(os.path.join(ASSETS, "examples.json"))}
        if prompt_style not in known:
            raise ValueError(
                f"prompt_style {prompt_style!r}: there are {', '.join(known)} and short"
            )
        parts = [ROLE.format(max_steps=max_steps)]
        for case in known[prompt_style]:
            steps = [Step(**step) for step in case["steps"]]
            workflow = Workflow(
                [replace(s, worker=numbers[s.worker % len(numbers)]) for s in steps]
            )
            if len(workflow.steps) <= max_steps:
                parts.append(
                    f"Example question: {case['question']}\n\n{case['plan']}\n{as_lists(workflow)}"
                )
        if context:
            turns = [f"{turn['role']}: {turn['content']}" for turn in context]
            parts.append("\n\n".join(["The conversation so far:", *turns]))
        if notes:
            models = "".join(f"\nModel {number}: {notes[number]}" for number in numbers)
        else:
            models = " " + ", ".join(f"Model {number}" for number in numbers)
        parts.append(f"Question: {question}\n\nModels:{models}")
        chat = [{"role": "user", "content": "\n\n".join(parts)}]
    again = SHORT_AGAIN if prompt_style == "short" else AGAIN
    for rollout in previous.rounds() if previous else []:
        chat += [
            {"role": "assistant", "content": rollout.written or as_lists(rollout.workflow)},
            {"role": "user", "content": again.format(answer=rollout.answer, max_steps=max_steps)},
        ]
    return chat


def conductor_chat(rollout: Rollout, prompting: Prompting) -> list[dict]:
    """The chat that asks for a rollout's workflow. A subset of all workers is no subset."""
    is_subset = len(rollout.workers or rollout.pool) < len(rollout.pool)
    workers = rollout.workers if is_subset else len(rollout.pool)
    notes = [worker.note for worker in rollout.pool] if prompting.notes else None
    return messages(
        rollout.question,
        workers,
        prompting.max_steps,
        rollout.previous,
        prompting.prompt_style,
        notes,
        rollout.context,
    )


def as_lists(workflow: Workflow) -> str:
    """The lists as a Conductor writes them, with ["all"] for all earlier steps; `parse` reads them."""
    steps = workflow.steps
    access = [
        ["all"] if s.wrote_all or 0 < i == len({*s.access}) else s.access
        for i, s in enumerate(steps)
    ]
    lists = zip(LISTS, ([s.worker for s in steps], [s.subtask for s in steps], access), strict=True)
    return "\n".join(f"{name} = {json.dumps(values, ensure_ascii=False)}" for name, values in lists)


# ---- Parse -----------------------------------------------------------------------------------------------
LISTS = {
    "model_id": r"model(?:\\?_|[ -])ids?",
    "subtasks": "sub-?tasks?",
    "access_list": r"access(?:\\?_|[ -])lists?",
}  # a step's parts, and how models write their names
# A list's name and what may stand around it: Markdown's or JSON's quotes, list[int], a remark in brackets.
NAME = (
    "(?<![A-Za-z0-9_])(?:"
    + "|".join(f"(?P<{name}>{LISTS[name]})" for name in LISTS)
    + r""")[\s*`"']{0,20}
    (?::\s{0,4}[A-Za-z][\w.]{0,20}\s{0,4}(?:\[[^=\n]{0,60}\])?\s{0,4}(?==)|\([^()\n]{0,80}\))?
    [\s*`]{0,9}[:=][\s*`]{0,20}(?:(?:python|json)\s)?(?=\[)"""
)
HEADING = r"(?P<heading>^[\s>#*]{0,8}(?P<example>example\ )?(?:\w{1,12}\ )?question(?:\ \d{1,3})?[* ]{0,4}:)"
MARK = re.compile(f"{NAME}|{HEADING}", re.VERBOSE | re.IGNORECASE | re.MULTILINE)
# In a list. A string may hold a newline, but not one before a list's name: such a string was never closed.
TOKEN = re.compile(
    rf"""(?P<atom>[][]|[0-9.,()\s]+)|\#[^\n]*
    |(?P<raw>r?)(?P<quote>\"\"\"|'''|["'])
     (?P<body>(?:[^"'\\\n]+|(?!(?P=quote))["']|\\.|\n(?![ *`"'-]{{0,8}}{re.sub("P<.*?>", ":", NAME)}))*)
     (?P<end>(?P=quote))?
    |(?P<other>\w+|.)""",
    re.VERBOSE | re.IGNORECASE | re.DOTALL,
)


def parse(
    text: str, workers: int | list[int], max_steps: int = 5, allow_empty: bool = False
) -> Workflow:
    """The last valid workflow in the last 50,000 characters: neighbouring lists, in any order. workers: as of
    `messages`. allow_empty: lists that are all empty are a workflow that keeps the answer (§3.2)."""
    numbers = [*range(workers)] if isinstance(workers, int) else workers
    workflow, error, window = None, WorkflowError("model_id: the list is missing"), []
    text, position, is_example = text[-50_000:], 0, False
    while mark := MARK.search(text, position):
        if mark["heading"]:  # of a question
            if (window or workflow) and not is_example:
                break  # Some models invent another question, whose workflow is none for this one.
            workflow, window, position = None, [], mark.end()
            is_example = bool(mark["example"])
            continue
        value, position = read_list(text, mark.end())
        window = [*window, (mark.lastgroup, value)][-len(LISTS) :]
        try:  # This raises until the window holds every list once.
            workflow = Workflow(steps_of(dict(window), numbers, max_steps, allow_empty))
        except WorkflowError as e:
            error = e
        else:  # In the prompt's order these lists end here: a later attempt that is cut off needs its own.
            window = [] if [*dict(window)] == [*LISTS] else window
    if workflow is None:
        raise error
    return workflow


def read_list(text: str, start: int) -> tuple[list | str, int]:
    """The list that opens at text[start], or what is wrong with it, and where to search on. Only digits,
    commas, brackets and strings are evaluated."""
    pieces, depth = [], 0
    for token in TOKEN.finditer(text, start):
        if token["other"]:
            return f"{token[0]!r:.20} does not belong there", token.start()
        if token["quote"] and not token["end"]:
            return "a string is not closed", token.start("body")
        pieces.append(repr(string_value(token)) if token["quote"] else token["atom"] or "")
        depth += (token[0] == "[") - (token[0] == "]")
        if depth == 0 or depth > 3:
            break
    try:
        value = "the list is not closed" if depth else ast.literal_eval("".join(pieces))
    except (ValueError, SyntaxError) as e:  # also for a number of thousands of digits
        value = getattr(e, "msg", str(e))
    return value, token.end()


# \n, \t and \r in a string are a newline, a tab and a return, or begin one of these commands of LaTeX.
ESCAPE = re.compile(
    r"""\\(?:(?P<latex>[^\\"'/nrtu\n]|u(?![0-9a-fA-F]{4})|r(?=[A-Za-z])
    |(?<![.:;!?]\\)n(?=(?:abla|e[gq]?|u|ot(?:in)?|mid|[gl]eq|exists|earrow|warrow|parallel|subseteq)
        (?![A-Za-z]|\.[a-z]))
    |t(?=(?:imes|heta|ext[a-z]*|frac|anh?|au|op?|ilde|riangle[a-z]*|herefore|binom|ag|iny)(?![A-Za-z])))
    |u(?P<code>[0-9a-fA-F]{4})|(?P<plain>.))""",
    re.VERBOSE | re.DOTALL,
)
CONTROL = {"n": "\n", "t": "\t", "r": "\r", "\n": ""}


def string_value(token) -> str:
    """What a string literal of Python or JSON says, also where LaTeX stands in it as it is."""
    is_latex = any(
        escape["latex"] for escape in ESCAPE.finditer(token["body"])
    )  # Then \\\\ ends a line.

    def meaning(escape):
        if escape["latex"] or is_latex and escape["plain"] == "\\":
            return escape[0]
        code, plain = escape["code"], escape["plain"]
        return chr(int(code, 16)) if code else CONTROL.get(plain, plain)

    text = token["body"] if token["raw"] else ESCAPE.sub(meaning, token["body"])
    return text.encode("utf-16", "surrogatepass").decode(
        "utf-16", "replace"
    )  # JSON writes 😀 in two halves.


def steps_of(lists: dict, numbers: list[int], max_steps: int, allow_empty: bool) -> list[Step]:
    """The steps that the lists describe. Instead of a list `read_list` may say, as a str, what is wrong."""
    for name in LISTS:
        if not isinstance(lists.get(name), list):
            raise WorkflowError(f"{name}: {lists.get(name, 'the list is missing')}")
    n, *others = lengths = [len(lists[name]) for name in LISTS]
    if {*others} != {n}:
        raise WorkflowError(f"{', '.join(LISTS)} differ in length: {lengths}")
    if n > max_steps or n == 0 and not allow_empty:
        raise WorkflowError(f"model_id: {n} steps, where 1 to {max_steps} are allowed")
    steps = []
    for i in range(n):
        worker, subtask, access = (lists[name][i] for name in LISTS)
        seen = ["all"] if access == "all" else access
        if type(worker) is not int or worker not in numbers:
            raise WorkflowError(f"model_id: step {i} names {worker!r:.20}; there are {numbers}")
        if type(subtask) is not str:
            raise WorkflowError(f"subtasks: step {i} is no text: {subtask!r:.20}")
        if type(seen) is not list or not all(j == "all" or type(j) is int and j < i for j in seen):
            raise WorkflowError(
                f"access_list: step {i} reads {access!r:.40}, no list of earlier steps"
            )
        steps.append(
            Step(worker, subtask, [*range(i)] if "all" in seen else sorted({*seen}), "all" in seen)
        )
    return steps


# ---- Run -------------------------------------------------------------------------------------------------
def call_worker(rollout: Rollout, i: int) -> Reply:
    """Make the call of step i: the turns before the question, the question, past turns of (subtask,
    response), and the step's own subtask."""
    steps = rollout.workflow.steps
    sees = [(steps[j], rollout.replies[j].text) for j in steps[i].access]
    if steps[i].wrote_all and rollout.previous:  # It also sees the last answer (§3.2).
        last = [r for r in rollout.previous.rounds() if r.replies][-1]
        sees.insert(0, (last.workflow.steps[-1], last.answer))
    texts = []
    for step, response in [*sees, (steps[i], "")]:
        texts += [TASK + step.subtask, response]
    texts[0] = f"{QUESTION}{rollout.question}\n\n{texts[0]}"
    roles = itertools.cycle(["user", "assistant"])
    chat = [{"role": role, "content": text} for role, text in zip(roles, texts[:-1])]
    chat = [*rollout.context, *chat]
    return rollout.pool[steps[i].worker].chat(chat, call_id=call_id(rollout, i))


def call_id(rollout: Rollout, step: int | str) -> str:
    """By which Replay knows a call of a rollout; "" where it has no name."""
    return (
        rollout.call_prefix
        and f"{rollout.call_prefix}/{rollout.number}/{len(rollout.rounds()) - 1}/{step}"
    )


class Threads:
    """Run jobs side by side, each in a thread, of which a new one starts where none is free.

    ThreadPool of multiprocessing starts all its threads at once, and breaks where the system allows
    fewer. That of concurrent.futures keeps a program from its end until the last call is answered.
    """

    def __init__(self, limit: int):
        self.limit = limit  # threads
        self.started = 0
        self.idle = 0
        self.jobs = collections.deque()  # (function, arguments, tell)
        self.changed = threading.Condition()

    def run(self, function, arguments: tuple, tell):
        """Call function(*arguments) in a thread, and there tell(its result, or its exception)."""
        with self.changed:
            self.jobs.append((function, arguments, tell))
            self.changed.notify()
            if len(self.jobs) <= self.idle or self.started == self.limit:
                return
            try:
                threading.Thread(target=self.work, daemon=True).start()
                self.started += 1
            except RuntimeError:  # The system allows no more threads: the job waits for one.
                if not self.started:
                    raise

    def work(self):
        while True:
            with self.changed:
                self.idle += 1
                self.changed.wait_for(lambda: self.jobs)
                self.idle -= 1
                function, arguments, tell = self.jobs.popleft()
            try:
                result = function(*arguments)
            except Exception as error:
                result = error
            tell(result)


# They call workers and graders. No job may wait for another one: all threads could wait so.
THREADS = Threads(512)


def carry_out(rollout: Rollout, prompting: Prompting, judge, edit, call):
    """Parse, run and judge one rollout that is written. A generator of what threads can do by now; it is sent
    each result or WorkerError. [(0, call, …)] -> (0, reply) -> [(1, call, …)] -> … (None, failure)."""
    if not rollout.workflow and not rollout.error:
        limits = (
            rollout.workers or len(rollout.pool),
            prompting.max_steps,
            rollout.previous is not None,
        )
        try:
            rollout.workflow = parse(rollout.written, *limits)
        except WorkflowError as e:
            rollout.invalid = str(e)
            rollout.right = False if judge else None
    if rollout.error or not rollout.workflow:
        return
    rollout.workflow = edit(rollout.workflow) if edit else rollout.workflow
    steps = rollout.workflow.steps
    for i, step in enumerate(steps):
        if step.worker not in range(len(rollout.pool)) or not {*step.access} <= {*range(i)}:
            raise ValueError(f"step {i} has no worker of the pool, or sees what is no earlier step")
    rollout.names = [rollout.pool[step.worker].name for step in steps]
    rollout.replies = [None] * len(steps)
    ready = [i for i, step in enumerate(steps) if not step.access]
    at_work = 0
    while ready or at_work:
        at_work += len(ready)
        done, result = yield [(i, call, (rollout, i)) for i in ready]
        at_work -= 1
        if isinstance(result, WorkerError):
            rollout.error = rollout.error or f"step {done}: {result}"
        else:
            rollout.replies[done] = result
        ready = [
            i
            for i, step in enumerate(steps)
            if done in step.access
            and not rollout.error
            and all(rollout.replies[j] for j in step.access)
        ]
    if judge and not rollout.error:
        _, rollout.failure = yield [(None, judge, (rollout.problem, rollout.answer))]
        rollout.right = not rollout.failure


def roll_out(
    rollouts: list[Rollout],
    write=None,
    prompting: Prompting = Prompting(),
    judge=None,
    edit=None,
    call=call_worker,
    on_end=None,
    timeout: float = 1e9,
) -> list[Rollout]:
    """Write, parse, run and judge rollouts in place, some while others are written, and return them.
    write: see the writers below; None: the workflows are there. judge(problem, answer) says what is wrong,
    or "". edit(workflow) -> workflow is for ablations. call(rollout, i) makes a step's call, in a thread. A
    WorkerError loses a rollout, as do `timeout` seconds after its writing. Any other error ends the run."""
    news = (
        queue.SimpleQueue()
    )  # (rollout, event) from threads; an event is (step, result or exception)
    running = {}  # by id, oldest first: (rollout, its generator, when it began)

    def go_on(rollout, event=None):
        """Let threads do what an event makes possible, and close the record of a rollout that is over."""
        if event and isinstance(event[1], Exception) and not isinstance(event[1], WorkerError):
            raise event[1]
        if id(rollout) not in running:
            return  # It was lost by its timeout.
        _, work, started = running[id(rollout)]
        try:
            for step, function, arguments in work.send(event):
                tell = lambda result, step=step: news.put((rollout, (step, result)))
                THREADS.run(function, arguments, tell)
        except StopIteration:
            del running[id(rollout)]
            rollout.seconds = time.monotonic() - started
            if on_end:
                on_end(rollout)

    for rollout in write(rollouts) if write else rollouts:
        running[id(rollout)] = (
            rollout,
            carry_out(rollout, prompting, judge, edit, call),
            time.monotonic(),
        )
        go_on(rollout)
        while not news.empty():
            go_on(*news.get())
    while running:
        oldest, work, started = next(iter(running.values()))
        try:
            go_on(*news.get(timeout=max(0.0, started + timeout - time.monotonic())))
        except queue.Empty:
            oldest.error = f"it took longer than {timeout:g} s"
            work.close()
            go_on(oldest)
    return rollouts


def execute(
    workflow: Workflow, question: str, pool: list, previous: Rollout | None = None
) -> Rollout:
    """Run a workflow that is there."""
    return roll_out([Rollout(question, pool, previous=previous, workflow=workflow)])[0]


def conduct(
    write,
    rollouts: list[Rollout],
    extra_rounds: int = 0,
    prompting: Prompting = Prompting(),
    tries: int = 3,
    **settings,
) -> list[Rollout]:
    """Answer questions, in use and evaluation, and return the last round of each.
    What is no workflow is written again, `tries` times in all, under the next numbers. Up to `extra_rounds` rounds
    more see the answer, until empty lists keep it (§3.2) or none is written. settings: as of roll_out."""
    last = [replace(rollout) for rollout in rollouts]  # copies: what was asked is asked again
    for _ in range(tries):
        last = [
            replace(rollouts[i], number=r.number + 1) if r.invalid else r
            for i, r in enumerate(last)
        ]
        roll_out([r for r in last if not r.workflow and not r.error], write, prompting, **settings)
    going = [i for i, r in enumerate(last) if r.workflow and r.workflow.steps and not r.error]
    if extra_rounds and going:
        asked = [replace(rollouts[i], previous=last[i]) for i in going]
        for i, rollout in zip(
            going, conduct(write, asked, extra_rounds - 1, prompting, tries, **settings)
        ):
            last[i] = rollout if rollout.workflow else last[i]
    return last


# ---- Writers: write(rollouts) sets .written or .error, and yields each rollout as soon as that is there ---
def model_writer(model: Qwen, tokenizer: Tokenizer, prompting: Prompting, temperature=1.0, seed=0):
    """A model as the Conductor. A draw depends on the seed, the prompt and the rollout's number alone."""
    room = model.config.max_position_embeddings - prompting.max_new_tokens
    one_at_a_time = threading.Lock()  # a server's clients share the model

    def write(rollouts):
        groups = {}  # of rollouts with the same prompt, which is computed once
        for rollout in rollouts:
            chat = conductor_chat(rollout, prompting)
            group = groups.setdefault((rollout.call_prefix, str(chat)), [])
            rollout.prompt_ids = group[0].prompt_ids if group else tokenizer.chat(chat)
            if len(rollout.prompt_ids) <= room:
                group.append(rollout)
                continue
            rollout.error = f"the prompt has {len(rollout.prompt_ids)} tokens, and the Conductor can read {room}"
            yield rollout
        for n in {len(group) for group in groups.values() if group}:
            batch = [group for group in groups.values() if len(group) == n]
            numbers = [[rollout.number for rollout in group] for group in batch]
            each = generate_each(
                model,
                [group[0].prompt_ids for group in batch],
                n,
                prompting.max_new_tokens,
                temperature,
                tokenizer.end_ids,
                seed,
                len(tokenizer),
                numbers,
            )
            with one_at_a_time:
                for i, j, completion in each:
                    rollout = batch[i][j]
                    rollout.written = tokenizer.decode(completion.tokens)
                    vars(rollout).update(vars(completion))  # tokens, logprobs, finished
                    yield rollout

    return write


def worker_writer(worker, prompting: Prompting):
    """A worker as the Conductor (Table 11). A limit of its tokens is doubled, to at most 8,192."""
    most = {name: max(n, min(2 * n, 8192)) for name, n in worker.params.items() if name in LIMITS}

    def write_one(rollout):
        try:
            rollout.written = worker.chat(
                conductor_chat(rollout, prompting), call_id(rollout, "conductor"), **most
            ).text
        except WorkerError as e:
            rollout.error = str(e)
        return rollout

    def write(rollouts):
        written = queue.SimpleQueue()
        for rollout in rollouts:
            THREADS.run(write_one, (rollout,), written.put)
        for _ in rollouts:
            rollout = written.get()
            if isinstance(rollout, Exception):
                raise rollout
            yield rollout

    return write


# ---- Rollouts and checkpoints in files -------------------------------------------------------------------
def strip(rollout: Rollout, **changes) -> Rollout:
    """A copy of all rounds without pool and problem, for other ranks and for files."""
    previous = rollout.previous and strip(rollout.previous, **changes)
    return replace(rollout, pool=[], problem=None, previous=previous, **changes)


def rollout_to_json(rollout: Rollout, with_tokens: bool = False) -> dict:
    """A dict for json.dumps and `rollout_from_json`: without pool and problem and, unless with_tokens, what
    the model read and drew, and with totals for readers of the file."""
    changes = {} if with_tokens else {"prompt_ids": [], "tokens": [], "logprobs": []}
    totals = {name: getattr(rollout, name) for name in ("answer", "calls", "tokens_used", "cost")}
    values = asdict(strip(rollout, **changes))
    del values["problem"]
    if rollout.problem:
        values["problem_id"] = rollout.problem.id
    return values | totals


def rollout_from_json(values: dict) -> Rollout:
    """The rollout of which rollout_to_json made these values."""
    old_keys = {"name": "call_prefix", "prompt": "prompt_ids", "problem": "problem_id"}
    values = {old_keys.get(key, key): value for key, value in values.items()}
    rollout = Rollout(**{f.name: values[f.name] for f in fields(Rollout) if f.name in values})
    rollout.replies = [reply and Reply(**reply) for reply in rollout.replies]
    rollout.workflow = rollout.workflow and Workflow(
        [Step(**step) for step in rollout.workflow["steps"]]
    )
    rollout.previous = rollout.previous and rollout_from_json(rollout.previous)
    return rollout


def view(rollout: Rollout) -> str:
    """All rounds for a terminal: which worker was told what, saw which steps, and answered what."""
    out = [f"Question: {rollout.question}"]
    for number, one in enumerate(rollout.rounds()):
        steps = one.workflow.steps if one.workflow else []
        out += [f"\nRound {number}: {len(steps) or 'no'} steps"] if number else []
        for i, (step, name, reply) in enumerate(zip(steps, one.names, one.replies)):
            sees = f"steps {step.access}" if step.access else "the question"
            sees = "all before" if step.wrote_all else sees
            text = reply.text or f"(empty; it ended by {reply.finish!r})" if reply else "(none)"
            out.append(f"\nStep {i}: {name} (model {step.worker}), sees {sees}: {step.subtask}")
            out.append("    " + text.replace("\n", "\n    "))
        if one.error or one.invalid:
            out.append(
                f"\nFailed: {one.error or one.invalid}\n{one.written if one.invalid else ''}"
            )
    cost = "unknown" if rollout.cost is None else f"${rollout.cost:.4f}"
    seconds = sum(one.seconds for one in rollout.rounds())
    out.append(f"\nAnswer: {rollout.answer}")
    out.append(
        f"Calls: {rollout.calls}, tokens: {rollout.tokens_used}, cost: {cost}, {seconds:.1f} s"
    )
    out += (
        []
        if rollout.right is None
        else [f"Right: {rollout.right}. {rollout.failure}{rollout.invalid}"]
    )
    return printable("\n".join(out))


def printable(text: str) -> str:
    """Without the characters by which a text could command the terminal, or turn its direction."""
    commands = r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
    return re.sub(commands, "\ufffd", text.replace("\r\n", "\n"))


def show(file: str, number: int | None = None) -> str:
    """The rollouts in a run's or an evaluation's JSON lines, a line each, or all of one."""
    with open(file, encoding="utf-8") as f:
        lines = f.readlines()
    out = []
    for i in range(len(lines)) if number is None else [number]:
        try:
            rollout = rollout_from_json(json.loads(lines[i]))
        except (ValueError, TypeError, LookupError, AttributeError) as e:
            raise ValueError(f"{file}, line {i}, holds no rollout: {e!r}") from None
        verdict = {True: "right", False: "wrong", None: "lost" if rollout.error else ""}[
            rollout.right
        ]
        workers = " > ".join(rollout.names) if rollout.workflow else "no workflow"
        out.append(f"{i:>5}  {verdict:<7}{' '.join(rollout.question.split()):.60}  [{workers}]")
    return printable("\n".join(out)) if number is None else view(rollout)


def save_prompting(folder: str, prompting: Prompting, pool: str, names: list[str]):
    """Write conductor.json: how this Conductor is asked, the pool of its training, and that pool's names."""
    write_json(
        os.path.join(folder, "conductor.json"), asdict(prompting) | {"pool": pool, "workers": names}
    )


def read_prompting(path: str) -> tuple[Prompting, str, list[str]]:
    """(prompting, pool, its workers' names) of a checkpoint; its conductor.json may be missing."""
    file = os.path.join(fetch(path, "conductor.json"), "conductor.json")
    saved = read_json(file) if os.path.exists(file) else {}
    saved = {"prompt_style" if key == "prompt" else key: value for key, value in saved.items()}
    prompting = Prompting(*(saved.get(f.name, f.default) for f in fields(Prompting)))
    if "style" in saved or prompting.max_steps not in range(1, 101):
        raise ValueError(
            f"{file} is of an earlier format, or its max_steps is no 1 to 100: train it again"
        )
    return prompting, str(saved.get("pool", "")), saved.get("workers", [])


def load_conductor(path: str) -> tuple[Qwen, Tokenizer, Prompting]:
    """The model and tokenizer of a checkpoint, and how it is asked. A CPU computes in fp32."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Qwen.from_pretrained(
        path, compute_dtype(device) if device == "cuda" else torch.float32, device
    )
    return model, Tokenizer.from_pretrained(path), read_prompting(path)[0]


# ---- The server and the command line ---------------------------------------------------------------------
def conductor_server(
    write,
    pool: list,
    workers: list[int] | None,
    prompting: Prompting,
    extra_rounds: int,
    port: int,
    silence: float = 15.0,
):
    """An OpenAI-compatible server on 127.0.0.1, bound but not started, of the models conductor (one round)
    and conductor-recursive (`extra_rounds` more). The question is the whole conversation; usage, with its cost in
    dollars, is the workers' together. After so many seconds of silence a stream says that they are busy."""
    numbers = itertools.count(step=10)  # A question that is asked again gets other draws.

    class ConductorHandler(Handler):
        models = {"conductor": 0, "conductor-recursive": extra_rounds}  # and their further rounds

        def call(self, rollout, i):
            if self.hung_up():
                raise WorkerError("stopped, as nobody waits for the answer")
            return call_worker(rollout, i)

        def complete(self, body):
            turns = [f"{turn['role']}: {turn['content']}" for turn in body["messages"]]
            text = "\n\n".join(turns) if turns[1:] else body["messages"][0]["content"]
            question = text.encode(errors="replace").decode()  # JSON can spell half an emoji.
            rollout = Rollout(question, pool, workers, number=next(numbers))
            ended = queue.SimpleQueue()  # gets the last round, or an exception

            def conduct_one():
                try:
                    extra = self.models[body["model"]]
                    ended.put(conduct(write, [rollout], extra, prompting, call=self.call)[0])
                except Exception as error:
                    ended.put(error)

            threading.Thread(target=conduct_one, daemon=True).start()
            last = None
            while last is None:
                if body.get("stream"):
                    self.send_comment("the workers are busy")
                with contextlib.suppress(queue.Empty):
                    last = ended.get(timeout=silence)
            if isinstance(last, Exception):
                raise last
            rollout = last
            while rollout.error and rollout.previous:  # The answer of the round before is paid.
                rollout = rollout.previous
            if rollout.error or rollout.invalid:
                why = rollout.error or f"the Conductor wrote no workflow: {rollout.invalid}"
                return self.fail(502, why, retry=False)
            n_in = sum(reply.prompt_tokens for reply in rollout.all_replies)
            usage = {
                "prompt_tokens": n_in,
                "completion_tokens": rollout.tokens_used - n_in,
                "total_tokens": rollout.tokens_used,
                "cost": rollout.cost,
            }
            steps = [
                {"round": number, "worker": name, "subtask": step.subtask, "access": step.access}
                for number, one in enumerate(rollout.rounds())
                for step, name in zip(one.workflow.steps, one.names)
            ]
            finish = "length" if rollout.all_replies[-1].finish == "length" else "stop"
            self.reply(rollout.answer, finish, usage, workflow=steps)

    return loopback_server(port, ConductorHandler)


@dataclass
class Settings:
    checkpoint: str = os.path.join(
        ASSETS, "laptop"
    )  # the Conductor: a folder, or a name on the hub
    pool: str = ""  # the workers: see workers.py; "": the local pool of the Conductor's training
    only: str = ""  # some of the pool's workers, by name, with commas between
    conductor: str = ""  # a worker of the pool that conducts, instead of a checkpoint
    budget: float = 0.0  # dollars that all calls may cost together; 0: no limit
    extra_rounds: int = 0  # further rounds in view of the answer (§3.2)
    temperature: float = 0.2
    port: int = 8400  # of serve


def numbers_of(names: str, pool: list) -> list[int]:
    """The numbers in the pool of workers named with commas between."""
    known = [worker.name for worker in pool]
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    if not {*wanted} <= {*known}:
        raise ValueError(f"no such worker: {names}; the pool has {', '.join(known)}")
    return sorted({known.index(name) for name in wanted})


def choose_pool(checkpoint: str, pool: str) -> str:
    """The pool to use with a Conductor. ValueError where it does not fit, or where the user has to name it:
    whose hosts read the questions and are paid is not for a checkpoint to say."""
    try:
        _, spec, names = read_prompting(checkpoint)
    except OSError as e:
        raise ValueError(
            f"{e}\ntrain.py trains one; with --conductor=WORKER an LLM of the pool conducts"
        )
    if (
        pool
        and names
        and not {spec, pool} <= {*LOCAL}
        and [*map(name_of, read_pool(pool))] != names
    ):
        raise ValueError(
            f"{checkpoint} knows {printable(', '.join(names))}, in this order: name yours so, "
            "train with --preset=own, or let one conduct (--conductor; eval.py: --systems=seat)"
        )
    if not pool and spec not in ("", *LOCAL):
        raise ValueError(
            f"say which workers to ask: this Conductor learned with --pool={printable(spec)}"
        )
    return pool or spec or "local"


def main(argv):
    settings = Settings()
    words = configure(settings, argv)
    question = (
        " ".join(words).encode(errors="replace").decode()
    )  # The shell may pass what is no UTF-8.
    if (
        not question.strip()
        or settings.extra_rounds < 0
        or words == ["show"]
        or words[0] == "serve"
        and words[1:]
    ):
        raise SystemExit(__doc__)
    if words[0] == "show":
        return print(show(words[1], *map(int, words[2:])))
    spec = (
        settings.pool or "local"
        if settings.conductor
        else choose_pool(settings.checkpoint, settings.pool)
    )
    pool = load_pool(spec, budget=settings.budget)
    workers = numbers_of(settings.only, pool) or None
    if settings.conductor:
        [seat], prompting = numbers_of(settings.conductor, pool), Prompting()
        write = worker_writer(pool[seat], prompting)
    else:
        model, tokenizer, prompting = load_conductor(settings.checkpoint)
        write = model_writer(model, tokenizer, prompting, settings.temperature)
    if question == "serve":
        server = conductor_server(
            write, pool, workers, prompting, settings.extra_rounds or 1, settings.port
        )
        url = f"http://127.0.0.1:{server.server_address[1]}/v1"
        print(f"{url} has the models conductor and conductor-recursive; Ctrl-C ends it", flush=True)
        server.serve_forever()

    def call(rollout, i):
        print(f"step {i}: {rollout.names[i]} is asked …", file=sys.stderr)
        return call_worker(rollout, i)

    [rollout] = conduct(
        write, [Rollout(question, pool, workers)], settings.extra_rounds, prompting, call=call
    )
    print(view(rollout))
    if settings.conductor:
        print(
            f"with the Conductor's: {sum(w.calls for w in pool)} calls, ${sum(w.spent for w in pool):.4f}"
        )
    sys.exit("the workflow failed" if rollout.error or rollout.invalid else 0)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (OSError, ValueError, WorkerError, KeyboardInterrupt) as e:
        raise SystemExit(str(e) or "interrupted") from None
