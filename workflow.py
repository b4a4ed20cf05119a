"""A workflow: prompt the Conductor for it, parse it, run it on the workers, show it, recurse, serve (§3.1, §3.2, App. E).

    python workflow.py "a question" --checkpoint=DIR [--pool=local|paper|FILE] [--rounds=2] [--conductor=WORKER]
    python workflow.py serve --checkpoint=DIR        # the Conductor as an OpenAI-compatible model on 127.0.0.1

The Conductor writes three Python lists: who (`model_id`), what (`subtasks`), and which earlier steps each may see (`access_list`).
`messages` asks for them, `parse` reads them, `submit` runs them, a `Trace` is what happened. Read grpo.py next.
"""
import ast
import json
import os
import queue
import re
import sys
import textwrap
import threading
import time
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import asdict, dataclass, field, fields, replace

import torch

from model import Qwen, Tokenizer, configure, read_json
from sample import Completion, generate
from workers import Handler, Reply, Server, WorkerError, load_pool


class WorkflowError(ValueError):
    """The text is no workflow; the message says which list is wrong and why."""


@dataclass
class Step:
    worker: int
    subtask: str
    access: list[int]  # the earlier steps whose subtask and response the worker sees
    sees_all: bool = field(default=False, compare=False)  # it was written "all": in a recursion round that includes the previous answer


@dataclass
class Workflow:
    steps: list[Step]
    completion: str = field(default="", compare=False, repr=False)  # all that the Conductor wrote, prose included

    def text(self) -> str:
        """The three lists as a Conductor writes them: parse(w.text(), …) == w."""
        def quote(s):
            return '"' + re.sub(r'["\\\x00-\x1f\x7f]', lambda m: "\\" + m[0] if m[0] in '"\\' else f"\\u{ord(m[0]):04x}", s) + '"'
        access = ['["all"]' if s.sees_all or s.access and s.access == [*range(i)] else str(s.access) for i, s in enumerate(self.steps)]
        return (f"model_id = {[s.worker for s in self.steps]}\nsubtasks = [{', '.join(quote(s.subtask) for s in self.steps)}]\n"
                f"access_list = [{', '.join(access)}]")


# Parse. One tokeniser passes over the text once, so hostile text costs linear time, and only flat literals are ever evaluated.
NAME = re.compile(r"""(?<!\w)(["'`]?)(model_id|subtasks|access_list)\1\s*[:=]\s*\[""")
TOKEN = re.compile(NAME.pattern + r'''
    |(?P<string>[rR]?(?:"""[^"\\]*(?:(?:\\.|"(?!""))[^"\\]*)*(?:""")?      # An unclosed string runs as far as it can: no token is
                     |\'\'\'[^'\\]*(?:(?:\\.|'(?!''))[^'\\]*)*(?:\'\'\')?  # ever tried and given up, so none is scanned twice.
                     |"[^"\\\n]*(?:\\.[^"\\\n]*)*"?
                     |'[^'\\\n]*(?:\\.[^'\\\n]*)*'?))
    |(?P<comment>(?:\#|//)[^\n]*)
    |(?P<atom>[][,]|(?:\d+(?:\.\d*)?(?:[eE]\d+)?|True|False|None)(?!\w))
    |(?P<bad>-?\w+|\S)''', re.DOTALL | re.VERBOSE)
# A backslash of LaTeX is no escape: \frac, \xi, but also \nu, \times and \right, which Python reads as a newline, a tab and a return.
ESCAPE = re.compile(r"""\\(?!(?:n(?:abla|eq?|eg|u|otin|ot|mid)|t(?:ext\w*|imes|heta|an|anh|au|o|op|riangle\w*|ilde)|r(?:ight\w*|angle|ho))
    (?![a-zA-Z]))(?:[\\"'\nnrt]|u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2})|\\""", re.VERBOSE)


def parse(text: str, n_workers: int, max_steps: int = 5, allow_empty: bool = False) -> Workflow:
    """The workflow in a Conductor's completion. Of a list written more than once, the last that is closed counts.

    allow_empty: three empty lists are a workflow of no steps (§3.2: keep the previous answer). Linear in the text's length.
    Raises WorkflowError, which says which list is wrong and why."""
    def need(ok, why):
        if not ok:
            raise WorkflowError(why)

    found, pos, lists = {}, 0, {}  # found: a list's name -> its text without comments, and what is wrong with it
    while m := NAME.search(text, pos):
        name, depth, pieces, bad = m[2], 0, [], ""
        for t in TOKEN.finditer(text, m.end() - 1):
            pos, kind = t.end(), t.lastgroup
            if kind is None:  # a list begins inside this one, which therefore was never closed
                pos = t.start()
                break
            depth += (t[0] == "[") - (t[0] == "]")
            if kind == "bad" or depth > 2:
                bad = bad or f"{t[0]!r:.20} does not belong there"
            elif kind != "comment":
                pieces.append(ESCAPE.sub(lambda e: e[0] if e[0][1:] else r"\\", t[0]) if t[0][0] in "\"'" else t[0])
            if depth == 0:
                found[name] = " ".join(pieces), bad
                break
        found.setdefault(name, ("", "the list is not closed"))
    for name in ("model_id", "subtasks", "access_list"):
        literal, bad = found.get(name, ("", "the list is missing"))
        need(not bad and len(literal) < 100_000, f"{name}: {bad or 'longer than 100,000 characters'}")
        try:
            lists[name] = ast.literal_eval(literal)
        except (ValueError, SyntaxError) as e:  # also of NULs, lone surrogates, unclosed strings, numbers of thousands of digits
            raise WorkflowError(f"{name}: {getattr(e, 'msg', e)}") from None
    n, *others = sizes = [len(items) for items in lists.values()]
    need(others == [n, n], f"the lists differ in length: {dict(zip(lists, sizes))}")
    need(0 < n <= max_steps or n == 0 and allow_empty, f"model_id: {n} steps, where 1 to {max_steps} are allowed")
    steps = []
    for i, (worker, task, sees) in enumerate(zip(*lists.values())):
        need(type(worker) is int and 0 <= worker < n_workers, f"model_id: step {i} names {worker!r:.20}, not one of 0 to {n_workers - 1}")
        need(type(task) is str and not re.search("[\ud800-\udfff]", task), f"subtasks: step {i} is no text: {task!r:.20}")
        sees = ["all"] if sees == "all" else sees
        for j in sees if type(sees) is list else [sees]:
            need(sees is not j and (j == "all" or type(j) is int and 0 <= j < i), f"access_list: step {i} reads {j!r:.20}, no earlier step")
        steps.append(Step(worker, task, [*range(i)] if "all" in sees else sorted(set(sees)), "all" in sees))
    return Workflow(steps, text)


# The Conductor's prompt (App. E)
ROLE = """You conduct a team of language models. You never answer the question yourself: you write a workflow by which they answer it.

A workflow has one to {max_steps} steps. Every step has three parts:
- a model: the number of the model that does it,
- a subtask: what you tell that model, in plain words: to solve the question from scratch, to improve or check an earlier response, to plan,
  to recall facts, or whatever else helps a later model,
- an access list: which earlier steps that model is shown.
Each model gets the question, then the subtasks and responses of the steps it is shown, as past turns of a chat, and then its own subtask,
and nothing else. The models differ in what they are good at, and a model may be used more than once. The response to the last step goes to
the user as it is, so its subtask has to ask for the whole answer in the form that the question wants.

First say in a sentence or two what the question needs and how you divide the work. Then write three Python lists of equal length: model_id,
the models' numbers; subtasks, strings; access_list, for each step ["all"] to show it all earlier steps, {indices}or [] to show it none."""
TAGS = "Reason inside <idea> tags and put the result inside <answer> tags."
EXAMPLES = [  # question, plan, steps; of tasks that no training set holds: nearer examples are copied, not explored beyond (Table 4)
    ("A heavy drinker of 58 is confused, with jerking eye movements, an unsteady gait and low blood sugar. What must precede the glucose?",
     "This hangs on recalling one clinical rule. Two models that do not see each other can recall it, and a third settles it.",
     [(4, f"Name the syndrome that fits these findings and the deficiency behind it. {TAGS}", []),
      (1, f"Explain what glucose alone could do to this patient, and what prevents it. {TAGS}", []),
      (6, "Compare both responses, resolve any conflict, and give the treatment with its reason in one line inside <answer> tags.", "all")]),
    ("Using each of 3, 7, 8 and 25 exactly once, with + - * / and parentheses, write an expression that equals 76.",
     "The search is small enough for one careful model.",
     [(2, f"Find such an expression. Try products near 76 first, and verify the arithmetic before you answer. {TAGS}", [])]),
    ("Find the limit of n(e - (1 + 1/n)^n) as n goes to infinity.",
     "An expansion solves it but signs go wrong easily, so another model should check it numerically before the answer goes out.",
     [(0, f"Expand (1 + 1/n)^n in powers of 1/n up to the first order and derive the limit. {TAGS}", []),
      (5, f"Test the derived limit at n = 1000, correct the derivation if they disagree, and give the exact limit. {TAGS}", "all")]),
    ("Using each of 2, 4, 6, 11 and 75 at most once, with + - * /, write an expression that equals 437.",
     "I would have one model lay out promising routes and another follow them, a third search alone, and a last one verify.",
     [(3, "Do not solve it. List three products or sums close to 437 and, for each, the difference that is still to be made.", []),
      (6, f"Follow the routes above, one after the other, until one works out with the numbers left. {TAGS}", "all"),
      (0, f"Search for an expression in your own way, starting from the largest number. {TAGS}", []),
      (4, "Recompute every proposed expression, check that no number is used twice, and put a correct one inside <answer> tags.", "all")])]


def messages(question: str, n_workers: int, max_steps: int = 5, previous: "Trace | None" = None, style: str = "full",
             names: str = "") -> list[dict]:
    """The chat that asks the Conductor for a workflow. previous: the last round's trace, to ask for one more round (§3.2).

    style: "full"; "zero-shot", without the examples; "fine-grained", which also offers step numbers in access lists (App. B.8);
    "short", for a Conductor too small to be prompted into the format. names: the models' letters, which unlike their numbers stay their
    own in any subset of the pool (§3.2); "" leaves them out."""
    if style == "short":
        models = "Models " + " ".join(f"{name} {i}" for i, name in enumerate(names)) if names else f"{n_workers} models"
        chat = [{"role": "system", "content": f"{models}, {max_steps} steps."}, {"role": "user", "content": question}]
        again = "Response: {answer}\nWrite a workflow, or empty lists to keep it."
    else:
        if style not in ("full", "zero-shot", "fine-grained"):
            raise ValueError(f"style {style!r}: there are full, zero-shot, fine-grained and short")
        indices = "a list such as [0, 2] to show it those steps, counted from 0, " if style == "fine-grained" else ""
        parts = [ROLE.format(max_steps=max_steps, indices=indices)]
        for asked, plan, steps in EXAMPLES if style != "zero-shot" else []:
            if len(steps) <= max_steps:  # an example keeps to the limits of the prompt it stands in
                workflow = Workflow([Step(worker % n_workers, subtask, [], access == "all") for worker, subtask, access in steps])
                parts.append(f"Example question: {asked}\n\n{plan}\n{workflow.text()}")
        models = [f"Model {i}" + (f" ({names[i]})" if names else "") for i in range(n_workers)]
        parts.append(f"Question: {question}\n\nModels: {', '.join(models)}")
        chat = [{"role": "user", "content": "\n\n".join(parts)}]
        again = ("Your workflow ended in this response:\n\n{answer}\n\nIf it should go to the user as it is, write the three lists empty. "
                 f"If not, write a new workflow of up to {max_steps} steps; \"all\" then shows a step this response too.")
    for trace in previous.rounds() if previous else []:
        chat += [{"role": "assistant", "content": trace.workflow.completion or trace.workflow.text()},
                 {"role": "user", "content": again.replace("{answer}", trace.answer)}]
    return chat


@dataclass
class Trace:
    """One workflow as it ran. calls, tokens and cost (dollars; None where unknown) are what the answer took, earlier rounds included."""
    question: str
    workflow: Workflow
    workers: list[str]  # each step's worker, by name
    replies: list[Reply | None]  # None: not reached before a failure, or the failure itself
    seconds: float = 0.0  # wall time of this round
    error: str | None = None  # an infrastructure failure, never the model's fault: training masks it
    previous: "Trace | None" = None  # the round before
    right: bool | None = None  # what a grader said of the answer (eval.py); None: it was not asked

    responses = property(lambda self: [r.text if r else "" for r in self.replies])
    used = property(lambda self: [r for t in self.rounds() for r in t.replies if r])
    calls = property(lambda self: len(self.used))
    tokens = property(lambda self: sum(r.prompt_tokens + r.completion_tokens for r in self.used))
    cost = property(lambda self: None if any(r.cost is None for r in self.used) else sum(r.cost for r in self.used))

    @property
    def answer(self) -> str:
        """The last step's response; that of the round before if this one has no steps; empty after a failure."""
        return "" if self.error else self.replies[-1].text if self.replies else self.previous.answer

    def rounds(self) -> list["Trace"]:
        """This trace and those before it, the first round first."""
        return [*(self.previous.rounds() if self.previous else []), self]

    def to_json(self) -> dict:
        """A dict for json.dumps, of which from_json makes an equal trace; the derived values are there for other readers."""
        return {**asdict(self), **{key: getattr(self, key) for key in ("answer", "calls", "tokens", "cost")}}

    @classmethod
    def from_json(cls, d: dict) -> "Trace":
        workflow = Workflow([Step(**step) for step in d["workflow"]["steps"]], d["workflow"]["completion"])
        return cls(d["question"], workflow, d["workers"], [r and Reply(**r) for r in d["replies"]], d["seconds"], d["error"],
                   d["previous"] and cls.from_json(d["previous"]), d.get("right"))

    def view(self) -> str:
        """All rounds for a terminal: who was told what, saw which steps, and answered what. Control characters are masked."""
        out = [f"Question: {self.question}"]
        for t in self.rounds():
            for step, name, reply in zip(t.workflow.steps, t.workers, t.replies):
                sees = "all before" if step.sees_all else f"steps {step.access}" if step.access else "the question"
                out += [f"\n{name}, model {step.worker}, sees {sees}: {step.subtask}", textwrap.indent(reply.text if reply else "(none)", "    ")]
            out += ["\nThe answer is kept."] * (not t.replies) + [f"\nFailed: {t.error}"] * bool(t.error)
        cost = "unknown cost" if self.cost is None else f"${self.cost:.4f}"
        out.append(f"\nAnswer: {self.answer}\n{self.calls} calls, {self.tokens} tokens, {cost}, {sum(t.seconds for t in self.rounds()):.1f} s")
        return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in "\n".join(out))

    def mermaid(self) -> str:
        """All rounds as a flow chart, which GitHub draws inside a ```mermaid fence."""
        def label(text):  # entity codes for all but letters and digits, so that no text can leave its label
            return re.sub(r"[^\w ]|_", lambda m: f"#{ord(m[0])};" * m[0].isprintable(), textwrap.shorten(text, 90)) or "#160;"
        lines, last = ["flowchart TD", f'question(["{label(self.question)}"])'], "question"
        for r, t in enumerate(self.rounds()):
            for i, step in enumerate(t.workflow.steps):
                lines.append(f'r{r}s{i}["{label(t.workers[i])}<br/>{label(step.subtask)}"]')
                seen = [last] * (r > 0 and step.sees_all) + [f"r{r}s{j}" for j in step.access]
                lines += [f"{source} --> r{r}s{i}" for source in seen or ["question"]]
            last = f"r{r}s{len(t.replies) - 1}" if t.replies else last
        return "\n    ".join([*lines, f'{last} --> answer(["{label(self.answer)}"])'])


@dataclass
class Prompting:
    """How a Conductor is asked for a workflow. conductor.json beside a checkpoint remembers how it was trained to be asked."""
    style: str = "full"  # full (App. E), zero-shot, fine-grained (App. B.8), short
    examples: str = "ood"  # the few-shot examples: ood, in, mixed (Table 4)
    subtasks: bool = True  # False: the prompt asks for none, and every worker is told to solve the question (App. B.7)
    max_steps: int = 5
    max_new_tokens: int = 1024
    named: bool = False  # each worker has a letter beside its number, which stays its own in any subset of the pool (§3.2)


@dataclass
class Task:
    """What the Conductor is asked, and how the answer is wanted."""
    question: str
    pool: list  # the workers it may use
    previous: Trace | None = None  # the round before
    problem: object = None  # eval.py's Problem, which the grader gets
    name: str = ""  # names the task within a run, for the replay file; "": nothing is replayed
    overrides: dict = field(default_factory=dict)  # of the last step's call, named as in OpenAI's API: max_tokens, stop, ...
    on_text: object = None  # on_text(piece) is called with the last step's text as it comes
    hung_up: object = lambda: False  # hung_up() is true once nobody waits for the answer: no further step starts then

    def __post_init__(self):
        self.question = self.question.encode(errors="replace").decode()  # half an emoji, as JSON can spell it, is no text


@dataclass
class Rollout:
    """One completion and all that becomes of it, from its tokens to its advantage."""
    task: Task
    text: str  # what the Conductor wrote
    prompt: list[int] = field(default_factory=list)  # empty where a worker sits in the Conductor's seat
    completion: Completion | None = None
    trace: Trace | None = None  # None: the text is no workflow
    invalid: str = ""  # and why it is none
    right: bool | None = False  # set by roll_out alone; None: nobody knows, as a worker was lost or nobody grades
    reward: float | None = None  # set in train.py (§3.1); None: masked
    advantage: float = 0.0  # set in grpo.py (Eq. 2)
    weights: list[float] | None = None  # of the tokens, against the gap between sampler and trainer (grpo.py)


# The calls of all workflows are made by up to 512 threads; how many a worker gets at a time is its pool entry's `concurrency`.
jobs = queue.SimpleQueue()  # of (future, function, arguments)
idle, unborn = threading.Semaphore(0), threading.Semaphore(512)  # how many threads wait for a job, how many more may be started


def in_thread(function, *arguments) -> Future:
    """Run a function in one of the threads. What it returns or raises is the future's."""
    future = Future()
    jobs.put((future, function, arguments))
    if not idle.acquire(blocking=False) and unborn.acquire(blocking=False):
        threading.Thread(target=work, daemon=True).start()
    return future


def work():
    """A thread's life. It is a daemon, unlike a ThreadPoolExecutor's: a program that ends, by Ctrl-C or an error, shall neither wait
    nor pay for the calls that are still queued."""
    while True:
        future, function, arguments = jobs.get()
        try:
            future.set_result(function(*arguments))
        except BaseException as e:
            future.set_exception(e)
        idle.release()


def worker_chat(question: str, turns: list[tuple[str, str]], subtask: str) -> list[dict]:
    """What a worker sees: the question, the (subtask, response) pairs that it may see as past turns, and its own subtask."""
    chat = []
    for earlier, response in turns:
        chat.append({"role": "user", "content": f"Your task:\n{earlier}"})
        chat.append({"role": "assistant", "content": response})
    chat.append({"role": "user", "content": f"Your task:\n{subtask}"})
    chat[0]["content"] = f"Question:\n{question}\n\n{chat[0]['content']}"
    return chat


def submit(workflow: Workflow, task: Task, number: int = 0, stopped=lambda: False, then=lambda trace: trace) -> Future:
    """Start a workflow for a task. The future's result is then(trace), which runs in the thread of the step that ended last.

    A step starts when the steps that it reads have ended; no thread waits for another. A WorkerError sets Trace.error: no further
    step starts, and the trace is done when the running steps are, so that no cost is lost. The same happens once stopped() or
    task.hung_up() is true. An empty or cut-off reply is a reply. Any other exception is a bug, and the future's.
    number: the rollout's, by which, with task.name, the pool's replay file knows this run of the workflow."""
    steps, previous = workflow.steps, task.previous
    if not steps and previous is None:
        raise ValueError("a workflow without steps keeps the previous answer, but there is no previous round")
    trace = Trace(task.question, workflow, [task.pool[s.worker].name for s in steps], [None] * len(steps), previous=previous)
    nonce = f"{task.name}/{number}/{len(trace.rounds()) - 1}" if task.name else None
    waiting, running = set(range(len(steps))), set()
    done, lock, begun = Future(), threading.Lock(), time.monotonic()
    earlier_rounds = []
    if previous is not None:  # of these "all" sees the answer, under the subtask that it answers
        answered = [t for t in previous.rounds() if t.replies][-1]
        earlier_rounds = [(answered.workflow.steps[-1].subtask, previous.answer)]

    def take(i):
        """A thread's work: step i if there is one, and then to start what can follow."""
        try:
            if i is not None and not trace.error:
                if stopped() or task.hung_up():
                    trace.error = "stopped, as nobody waits for the answer"
                else:
                    call(i)
            start_next(i)
        except Exception as bug:  # Step i stays in `running`, so that no other thread takes the trace for done.
            with lock:
                trace.error = f"step {i}: {bug!r}"
                if not done.done():
                    done.set_exception(bug)

    def call(i):
        step = steps[i]
        turns = [(steps[j].subtask, trace.replies[j].text) for j in step.access]
        if step.sees_all:
            turns = earlier_rounds + turns
        wishes = {}
        if i == len(steps) - 1:
            wishes = {"on_text": task.on_text, **task.overrides}
        try:
            chat = worker_chat(task.question, turns, step.subtask)
            trace.replies[i] = task.pool[step.worker].chat(chat, nonce=nonce and f"{nonce}/{i}", **wishes)
        except WorkerError as e:
            trace.error = f"step {i}: {e}"

    def start_next(ended):
        with lock:
            running.discard(ended)
            ready = []
            if not trace.error:
                ready = [i for i in sorted(waiting) if all(trace.replies[j] is not None for j in steps[i].access)]
            waiting.difference_update(ready)
            running.update(ready)
            over = not running
        for i in ready:
            in_thread(take, i)
        if over:
            trace.seconds = time.monotonic() - begun
            done.set_result(then(trace))

    done.set_running_or_notify_cancel()  # From here on it cannot be cancelled, so that a result can always be set.
    in_thread(take, None)
    return done


def execute(workflow: Workflow, question: str, pool: list, previous: Trace | None = None, name: str = "") -> Trace:
    """Run a workflow and wait for its trace: see `submit`."""
    return submit(workflow, Task(question, pool, previous, name=name)).result()


def ask(task: Task, prompting: Prompting) -> list[dict]:
    """The chat that asks a Conductor, in the way it knows, for a workflow."""
    names = "".join(w.letter for w in task.pool) if prompting.named else ""
    return messages(task.question, len(task.pool), prompting.max_steps, task.previous, prompting.style, names)


def roll_out(write, tasks: list[Task], n: int = 1, prompting: Prompting = Prompting(), grade=None, edit=None, first: int = 0,
             on_finish=None) -> list[list[Rollout]]:
    """n rollouts of each task, as [task][rollout]. A workflow runs over the workers as soon as it is written, and is graded as
    soon as it has run, while others are being written.

    write: see `sampled` and `seated`. grade(task.problem, answer) -> bool; without it every `right` is None. edit(workflow) ->
    workflow changes what was written before it runs, for ablations. first: the number of each task's first rollout, so that calls
    which share a task's rollouts can take different numbers. on_finish(rollout) is called, from any thread, as each is complete.

    What write, grade, edit or on_finish raise is raised here: no further step starts then, and no running call is waited for."""
    groups, running, failed = [[None] * n for _ in tasks], [], threading.Event()

    def written(i, j, text, prompt=(), completion=None, error=None):
        for future in running:  # A bug in a worker or a grader ends the writing, too.
            if future.done():
                future.result()
        task = tasks[i]
        rollout = groups[i][j] = Rollout(task, text, list(prompt), completion)
        if error is not None:  # the Conductor's own call was lost
            return complete(rollout, Trace(task.question, Workflow([]), [], [], error=error, previous=task.previous))
        try:
            workflow = parse(text, len(task.pool), prompting.max_steps, allow_empty=task.previous is not None)
        except WorkflowError as e:
            rollout.invalid = str(e)
            return complete(rollout, None)
        if edit:
            workflow = edit(workflow)
        running.append(submit(workflow, task, first + j, failed.is_set, lambda trace: complete(rollout, trace)))

    def complete(rollout, trace):
        rollout.trace = trace
        if trace:
            rollout.right = None
            if grade and not trace.error:
                rollout.right = trace.right = grade(rollout.task.problem, trace.answer)
        if on_finish:
            on_finish(rollout)

    try:
        if tasks:
            write([ask(task, prompting) for task in tasks], n, first, written)
        done, _ = wait(running, return_when=FIRST_EXCEPTION)
        for future in done:
            future.result()
    except BaseException:
        failed.set()
        raise
    return groups


def conduct(write, tasks: list[Task], rounds: int = 0, prompting: Prompting = Prompting(), tries: int = 3, grade=None,
            edit=None) -> list[Rollout]:
    """One rollout a task, and up to `rounds` further ones in view of the answer (§3.2), until three empty lists keep it.

    Text that does not parse is drawn again, `tries` times in all, each time under the next rollout number. A task whose last try
    does not parse ends without a trace in the first round, and with the round before it in a later one."""
    latest, going_on = [None] * len(tasks), range(len(tasks))
    for turn in range(rounds + 1):
        asked = {}
        for i in going_on:
            on_text = tasks[i].on_text if turn == rounds else None  # Before the last round nobody knows whether this is the answer.
            previous = latest[i].trace if turn else tasks[i].previous
            asked[i] = replace(tasks[i], previous=previous, on_text=on_text)
        for number in range(tries):
            groups = roll_out(write, list(asked.values()), 1, prompting, grade, edit, number)
            drawn = dict(zip(asked, [rollout for [rollout] in groups]))
            for i, rollout in drawn.items():
                if rollout.trace or not turn:
                    latest[i] = rollout
            asked = {i: asked[i] for i, rollout in drawn.items() if rollout.trace is None and not tasks[i].hung_up()}
        going_on = [i for i in going_on if i not in asked and latest[i].trace]
        going_on = [i for i in going_on if latest[i].trace.workflow.steps and not latest[i].trace.error]
    return latest


READ_AT_ONCE = 1 << 15  # tokens of prompts that a model reads at a time: a batch of long ones needs gigabytes


def sampled(model: Qwen, tokenizer: Tokenizer, prompting: Prompting, temperature: float = 1.0, seed: int = 0):
    """A model in the Conductor's seat, as a function write(chats, n, first, on_text) for `roll_out` and `conduct`.

    It writes n completions of each chat, numbered from `first` on, and calls on_text(chat's index, completion's index, text,
    prompt's ids, Completion) as each is finished. ValueError where there is more to read than the model can."""
    def write(chats, n, first, on_text):
        prompts = [tokenizer.chat(chat) for chat in chats]
        longest, most = max(map(len, prompts)), model.config.max_position_embeddings
        if longest + prompting.max_new_tokens > most:
            raise ValueError(f"{longest} tokens to read and {prompting.max_new_tokens} to write are more than the Conductor's {most}")
        size = max(1, READ_AT_ONCE // longest)
        for start in range(0, len(prompts), size):
            batch = prompts[start:start + size]

            def finished(i, j, completion):
                on_text(start + i, j, tokenizer.decode(completion.tokens), batch[i], completion)

            generate(model, batch, n, prompting.max_new_tokens, temperature, eos_id=tokenizer.end_ids, seed=seed,
                     n_ids=len(tokenizer), on_finish=finished, first=first)
    return write


def seated(worker, nonce: str | None = None):
    """A worker in the Conductor's seat (Table 11), as a function like that of `sampled`: with twice its output, as in the paper.

    on_text gets no ids, and where the worker was lost an error. nonce names the run for the pool's replay file."""
    limits = {key: 2 * worker.params[key] for key in ("max_tokens", "max_completion_tokens") if key in worker.params}

    def write(chats, n, first, on_text):
        def call(i, j):
            try:
                reply = worker.chat(chats[i], nonce=nonce and f"{nonce}/{first + j}", **limits)
            except WorkerError as e:
                return on_text(i, j, "", error=str(e))
            on_text(i, j, reply.text)

        calls = [in_thread(call, i, j) for i in range(len(chats)) for j in range(n)]
        done, _ = wait(calls, return_when=FIRST_EXCEPTION)
        for future in done:
            future.result()
    return write


def subset(pool: list, only: str) -> list:
    """The workers of a pool whose names stand in `only`, with commas between; all of them for ""."""
    wanted, known = [name.strip() for name in only.split(",") if name.strip()], [w.name for w in pool]
    if unknown := set(wanted) - set(known):
        raise ValueError(f"--only={only}: no worker {sorted(unknown)[0]!r}; the pool has {', '.join(known)}")
    return [w for w in pool if w.name in wanted or not wanted]


def load_conductor(path: str) -> tuple[Qwen, Tokenizer, Prompting]:
    """A checkpoint's model, tokenizer and Prompting: what train.py wrote into its conductor.json, the defaults for any other model."""
    file, known = os.path.join(path, "conductor.json"), {}
    if os.path.exists(file):
        known = read_json(file)
    cuda = torch.cuda.is_available()
    model = Qwen.from_pretrained(path, torch.bfloat16 if cuda else torch.float32, "cuda" if cuda else "cpu")
    return model, Tokenizer.from_pretrained(path), Prompting(
        **{f.name: known[f.name] for f in fields(Prompting) if f.name in known})


def one_at_a_time(write):
    """A write() that many threads may call: what is asked while one batch is being written becomes the next."""
    asked = queue.SimpleQueue()

    def batches():
        while True:
            batch = [asked.get()]
            while not asked.empty() and len(batch) < 64:
                batch.append(asked.get())
            for number in {number for _, number, _, _ in batch}:
                same = [(chat, on_text, future) for chat, k, on_text, future in batch if k == number]
                try:
                    write([chat for chat, _, _ in same], 1, number, lambda i, j, *text: same[i][1](0, j, *text))
                    for _, _, future in same:
                        future.set_result(None)
                except Exception as e:
                    for _, _, future in same:
                        future.set_exception(e)

    def ask_for(chats, n, first, on_text):
        [chat], future = chats, Future()
        asked.put((chat, first, on_text, future))
        future.result()

    threading.Thread(target=batches, daemon=True).start()
    return ask_for


def serve(answer, models: dict[str, int], port: int) -> Server:
    """An OpenAI-compatible server on 127.0.0.1, bound but not started. models: name -> rounds; answer(question, rounds) -> Trace.

    The question is the whole conversation. Sampling parameters are ignored, as workers have their pool's. A stream brings the answer in
    one piece, since only the last step writes it. usage is the workers' together, usage.cost in dollars (null where unknown)."""
    class Conductor(Handler):
        def do_GET(self):
            if self.path != "/v1/models":
                return self.fail(404, "there are GET /v1/models and POST /v1/chat/completions")
            self.answer(200, {"object": "list", "data": [{"id": m, "object": "model", "created": 0, "owned_by": "conductor"} for m in models]})

        def do_POST(self):
            try:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                if self.headers.get_content_type() != "application/json":  # what any page in the user's browser can send here unasked
                    return self.fail(415, "expected Content-Type: application/json")
                body = json.loads(body)
                said = [(m["role"], c if type(c := m["content"]) is str else "".join(part["text"] for part in c)) for m in body["messages"]]
                question = "\n\n".join(f"{role}: {text}" for role, text in said) if said[1:] else said[0][1]
                if body.get("tools") or body.get("n") not in (None, 1) or type(body["model"]) is not str:
                    raise ValueError("tools and n > 1 are not supported, and model is a name")
                model, stream, with_usage = body["model"], body.get("stream"), (body.get("stream_options") or {}).get("include_usage")
            except (ValueError, KeyError, TypeError, AttributeError, IndexError) as e:
                return self.fail(400, f"expected a chat of text: {e!r}")
            if self.path != "/v1/chat/completions" or model not in models:
                return self.fail(404, f"no such model or path; the models are {', '.join(models)}")
            try:
                trace = answer(question, models[model])
            except (WorkflowError, WorkerError) as e:
                return self.fail(502, f"the Conductor wrote no workflow: {e}")
            except ValueError as e:  # a conversation too long
                return self.fail(400, str(e))
            except Exception as e:  # say, no memory left
                return self.fail(500, f"{type(e).__name__}: {e}")
            if trace.error:
                return self.fail(502, trace.error)
            prompt, completion = (sum(getattr(r, f"{kind}_tokens") for r in trace.used) for kind in ("prompt", "completion"))
            usage = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion, "cost": trace.cost}
            reply = {"id": f"chatcmpl-{time.time_ns()}", "created": int(time.time()), "model": model}
            message = {"role": "assistant", "content": trace.answer}
            end = {"index": 0, "finish_reason": "length" if trace.used[-1].finish == "length" else "stop"}
            if not stream:
                return self.answer(200, {**reply, "object": "chat.completion", "choices": [{**end, "message": message}], "usage": usage})
            chunks = [{"choices": [{**end, "delta": message, "finish_reason": None}]}, {"choices": [{**end, "delta": {}}]}]
            chunks += [{"choices": [], "usage": usage}] * bool(with_usage)
            events = [json.dumps({**reply, "object": "chat.completion.chunk", **chunk}) for chunk in chunks] + ["[DONE]"]
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write("".join(f"data: {event}\n\n" for event in events).encode())

        def fail(self, status, message):
            self.answer(status, {"error": {"message": message, "type": "invalid_request_error" if status < 500 else "server_error"}})

    return Server(("127.0.0.1", port), Conductor)


@dataclass
class Settings:
    checkpoint: str = "out/laptop/checkpoint"  # the Conductor
    pool: str = "local"
    only: str = ""  # some of its workers, by name, with commas between: the others are not to be used
    conductor: str = ""  # a worker of the pool in the Conductor's seat instead (Table 11)
    budget: float = 0.0  # dollars that the workers may cost together; 0: no limit
    rounds: int = 0  # recursion rounds after the first workflow
    temperature: float = 0.2
    show: str = "view"  # or json, mermaid
    port: int = 8400


def main(argv):
    settings = Settings()
    words = configure(settings, argv)
    show = {"view": Trace.view, "mermaid": Trace.mermaid, "json": lambda trace: json.dumps(trace.to_json())}.get(settings.show)
    if not show:
        raise SystemExit(f"--show={settings.show}: there are view, mermaid, json")
    if not words:
        raise SystemExit(__doc__)
    try:
        pool = subset(load_pool(settings.pool, budget=settings.budget), settings.only)
        if settings.conductor:
            worker = next((w for w in pool if w.name == settings.conductor), None)
            if worker is None:
                raise SystemExit(f"--conductor={settings.conductor}: the pool has {', '.join(w.name for w in pool)}")
            write, prompting = seated(worker), Prompting()
        else:
            model, tokenizer, prompting = load_conductor(settings.checkpoint)
            write = one_at_a_time(sampled(model, tokenizer, prompting, settings.temperature))

        def answer(question, rounds):
            [rollout] = conduct(write, [Task(question, pool)], rounds, prompting)
            if rollout.trace is None:
                raise WorkflowError(f"{rollout.invalid}, in the last of 3 tries")
            return rollout.trace

        if words == ["serve"]:
            try:
                server = serve(answer, {"conductor": 0, "conductor-recursive": settings.rounds or 1}, settings.port)
            except (OSError, OverflowError) as e:
                raise SystemExit(f"cannot serve on 127.0.0.1:{settings.port}: {e}. Choose another with --port=N (0: any free one).") from None
            print(f"http://127.0.0.1:{server.server_address[1]}/v1 has the models conductor and conductor-recursive; Ctrl-C ends it", flush=True)
            server.serve_forever()
        trace = answer(" ".join(words), settings.rounds)
        print(show(trace))
        sys.exit(trace.error and "the workflow failed")
    except (OSError, ValueError, WorkerError) as e:
        raise SystemExit(f"{type(e).__name__}: {e}") from None
    except KeyboardInterrupt:
        raise SystemExit("interrupted") from None


if __name__ == "__main__":
    main(sys.argv[1:])
