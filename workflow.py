"""Workflows (§3): prompting, parsing, running, recursion, display and the server.

    python workflow.py "a question"            # the Conductor in assets/laptop/, local workers
    python workflow.py "a question" --pool=mine.json --checkpoint=DIR [--extra_rounds=1]
    python workflow.py "a question" --pool=mine.json --conductor=WORKER  # an LLM conducts
    python workflow.py serve [the same flags]  # an OpenAI-compatible server
    python workflow.py show FILE               # list the rollouts in one of a run's traces/*.jsonl
    python workflow.py show FILE N             # show the rollout on line N
    python workflow.py show --examples FILE …  # print few-shot examples for train.py --examples

The Conductor writes a workflow as three Python lists. `messages` builds the prompt that asks for
the lists, `parse` reads them, and `roll_out` runs the workflow. A `Rollout` records a question, the
workflow written for it, the workers' replies and the verdict. Workers, steps, rounds and lines of
files are counted from 0. Read grpo.py next.
"""

import ast
import collections
import contextlib
import functools
import itertools
import json
import os
import pathlib
import queue
import re
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, fields, replace

from model import Qwen, Tokenizer, configure, discard_output, fetch, flag, read_json, write_json
from sample import generate_each, load_sampler
from workers import (
    ASSETS,
    LIMITS,
    LOCAL,
    QUESTION,
    TASK,
    Handler,
    Refusal,
    Reply,
    Server,
    WorkerError,
    demand_budget,
    jitter,
    load_pool,
    name_of,
    one_line,
    read_pool,
)


class WorkflowError(ValueError):
    """Raised if a text contains no valid workflow. The message gives the reason."""


@dataclass
class Step:
    """One step of a workflow: a call to a worker."""

    worker: int  # the worker's number in the pool
    subtask: str  # what the worker is told to do
    access: list[int]  # numbers of the earlier steps whose subtasks and responses the worker sees
    # Whether the step's access list contains "all". In rounds after the first, "all" also shows the
    # worker the last subtask and the answer of the previous round (§3.2).
    wrote_all: bool = field(default=False, compare=False)


@dataclass
class Workflow:
    steps: list[Step]


@dataclass
class Rollout:
    """A question, the workflow that answers it, and the outcome.

    A rollout is lost if a call to the Conductor, a worker or the grader fails, if the prompt is too
    long for the Conductor, or if time runs out. A lost rollout has an `error`. It counts as neither
    right nor wrong, because nobody knows what the answer would have been.
    """

    # The question
    question: str
    pool: list = field(default_factory=list)  # the Workers; Step.worker is an index into this list
    workers: list[int] | None = None  # numbers of the workers that may be used (§3.2); None: all
    problem: object = None  # the eval.Problem that the answer is graded against
    problem_id: str = ""  # the id of the problem; set only if the rollout was read from a file
    # The turns before the question, each {"role": role, "content": text}. The role is "system",
    # "user" or "assistant".
    context: list[dict] = field(default_factory=list)
    previous: "Rollout | None" = None  # the round before this one (§3.2)
    number: int = 0  # distinguishes rollouts of the same question; part of the sampler's seed
    call_prefix: str = ""  # the prefix of the call ids that Replay looks up; "": no replay

    # What the Conductor wrote. Of the writers, only `model_writer` sets prompt_ids, tokens,
    # logprobs and finished.
    written: str = ""
    prompt_ids: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # each token's log-probability when sampled
    finished: bool = True  # False: cut off at max_new_tokens
    workflow: Workflow | None = None
    invalid: str = ""  # why `written` is not a valid workflow

    # What the workers replied
    names: list[str] = field(default_factory=list)  # the name of each step's worker
    # Each step's reply; None: the call failed, took too long or was not made.
    replies: list[Reply | None] = field(default_factory=list)
    error: str | None = None  # why the rollout is lost
    seconds: float = 0.0  # how long it took to run the workflow and judge its answer

    # The verdict
    right: bool | None = None  # False also if `written` is invalid; None: lost or not judged
    failure: str = ""  # what is wrong with the answer, in the grader's words
    # The reward of §3.1, set by train.py. None: the rollout is lost, or its cost is unknown
    # although --cost_weight is set.
    reward: float | None = None
    advantage: float = 0.0  # the advantage A in Eq. 1, set by grpo.py
    # The share of wrong rollouts in this rollout's GRPO group, not counting those without a reward;
    # set by grpo.py.
    wrong_share: float = 1.0

    @property
    def responses(self) -> list[str]:
        return [reply.text if reply else "" for reply in self.replies]

    @property
    def answer(self) -> str:
        """The last step's response, or the previous round's answer if there are no steps.

        "" if the rollout is lost or has no workflow.
        """
        if self.error or not self.workflow:
            return ""
        if self.replies:
            return self.responses[-1]
        return self.previous.answer if self.previous else ""

    def rounds(self) -> list["Rollout"]:
        """Return all rounds up to and including this one, oldest first."""
        return [*(self.previous.rounds() if self.previous else []), self]

    # The replies of all rounds, and their totals

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
        """The cost of all replies in dollars, or None if the cost of any reply is unknown."""
        costs = [reply.cost for reply in self.all_replies]
        return None if None in costs else sum(costs)


# ---- The format: one list for each part of a step ------------------------------------------------


@dataclass
class ListFormat:
    """The format of one of the lists that make up a workflow. Element i belongs to step i."""

    name: str  # as the prompt and `as_lists` spell it
    spellings: str  # a regular expression for the spellings that models use
    part: str  # what the prompt says about this part of a step
    elements: str  # what the prompt says about the list's elements
    write: Callable  # (step, its index) -> the element
    # (element, step's index, allowed workers) -> {field of Step: value}; raises WorkflowError if
    # the element is invalid
    read: Callable


def read_worker(element, i: int, workers: list[int]) -> dict:
    if type(element) is not int or element not in workers:
        raise WorkflowError(f"names {element!r:.20}; there are {workers}")
    return {"worker": element}


def read_subtask(element, i: int, workers: list[int]) -> dict:
    if type(element) is not str:
        raise WorkflowError(f"is no text: {element!r:.20}")
    return {"subtask": element}


def write_access(step: Step, i: int) -> list:
    sees_all_steps = i > 0 and len({*step.access}) == i
    return ["all"] if step.wrote_all or sees_all_steps else step.access


def read_access(element, i: int, workers: list[int]) -> dict:
    if element is None:
        return {"access": []}
    items = [element] if type(element) is str else element
    if type(items) is not list or not all(can_be_seen(item, i) for item in items):
        raise WorkflowError(f"reads {element!r:.40}, no list of earlier steps")
    if any(type(item) is str for item in items):
        return {"access": [*range(i)], "wrote_all": True}
    return {"access": sorted({*items})}


def can_be_seen(item, i: int) -> bool:
    """Return whether an item of an access list is "all" or the number of a step before step i."""
    if type(item) is str:
        return item.strip().lower() == "all"
    return type(item) is int and 0 <= item < i


# The lists of a workflow, in the order in which the prompt asks for them. To add a list, add a row
# here, and to Step a field with a default; the prompt, `as_lists` and `parse` need no change. Then
# edit three functions: `call_worker` decides what a worker sees of the new field, `view_step` shows
# the field to people, and eval.random_workflow draws its values for the warm start. A Conductor
# trained without the new list must be retrained, because a workflow that lacks a list is invalid.
LISTS = [
    ListFormat(
        name="model_id",
        spellings=r"model(?:\\?_|[ -])ids?",
        part="a model: the number of the model that does it",
        elements="the models' numbers",
        write=lambda step, i: step.worker,
        read=read_worker,
    ),
    ListFormat(
        name="subtasks",
        spellings=r"sub(?:\\?_|[ -])?tasks?",
        part="a subtask: what you tell that model, in plain words: to solve the question from "
        "scratch, to improve or check\n  an earlier response, to plan, to recall facts, or "
        "whatever else helps a later model",
        elements="strings",
        write=lambda step, i: step.subtask,
        read=read_subtask,
    ),
    ListFormat(
        name="access_list",
        spellings=r"access(?:\\?_|[ -])lists?",
        part="an access list: which earlier steps that model is shown",
        elements='for each step ["all"] to\nshow it all earlier steps, or [] to show it none',
        write=write_access,
        read=read_access,
    ),
]
NAMES = [form.name for form in LISTS]


def as_lists(workflow: Workflow) -> str:
    """Return a workflow as text in the format that Conductors write and `parse` reads."""
    lines = []
    for form in LISTS:
        elements = [form.write(step, i) for i, step in enumerate(workflow.steps)]
        lines.append(f"{form.name} = {json.dumps(elements, ensure_ascii=False)}")
    return "\n".join(lines)


def steps_of(lists: dict, workers: list[int], max_steps: int, allow_empty: bool) -> list[Step]:
    """Convert the lists of a workflow to its steps.

    Args:
        lists: Name -> the list, or a message that says why the list could not be read.
        workers: The numbers of the workers that may be used.
        max_steps: The maximum number of steps.
        allow_empty: Whether a workflow without steps is valid.

    Raises:
        WorkflowError: A list is missing or invalid, the lists differ in length, or the number of
            steps is not allowed.
    """
    for name in NAMES:
        if not isinstance(lists.get(name), list):
            raise WorkflowError(f"{name}: {lists.get(name, 'the list is missing')}")
    lengths = [len(lists[name]) for name in NAMES]
    n_steps = lengths[0]
    if len({*lengths}) > 1:
        raise WorkflowError(f"{', '.join(NAMES)} differ in length: {lengths}")
    if n_steps > max_steps or n_steps == 0 and not allow_empty:
        raise WorkflowError(f"{NAMES[0]}: {n_steps} steps, where 1 to {max_steps} are allowed")

    steps = []
    for i in range(n_steps):
        values = {}
        for form in LISTS:
            try:
                values |= form.read(lists[form.name][i], i, workers)
            except WorkflowError as e:
                raise WorkflowError(f"{form.name}: step {i} {e}") from None
        steps.append(Step(**values))
    return steps


# ---- The prompt (App. E) -------------------------------------------------------------------------


@dataclass
class Prompting:
    """How a Conductor is prompted. A checkpoint stores these fields in conductor.json."""

    # ood, in, mixed: few-shot examples from other tasks, the same tasks, or both (Table 4).
    # zero-shot: no examples. short: only the pool, max_steps and the question, without an
    # explanation of the format of a workflow, which a warm start must teach.
    prompt_style: str = "ood"
    max_steps: int = 5
    max_new_tokens: int = 1024
    # Whether the prompt shows each worker's note. If False, a Conductor knows workers only by their
    # numbers. `worker_writer` ignores this and always shows names and notes.
    notes: bool = False
    # The user's own few-shot examples, which replace those of prompt_style; see read_examples.
    examples: list[dict] = field(default_factory=list)


ROLE = """\
You conduct a team of language models. You never answer the question yourself: \
you write a workflow
by which they answer it.

A workflow has one to {max_steps} steps. Every step has these parts:
{parts}.
Each model gets the question, then the subtasks and responses of the steps it is shown, \
as past turns of a
chat, and then its own subtask, and nothing else. The models differ in what they are good at, \
and a model may
be used more than once. The response to the last step goes to the user as it is, \
so its subtask has to ask for
the whole answer in the form that the question wants.

First say in a sentence or two what the question needs and how you divide the work. \
Then write Python
lists of equal length: {lists}."""
AGAIN = """Your workflow ended in this response:

{answer}

If it should go to the user as it is, write all lists empty. If not, write a new workflow of up \
to {max_steps}
steps; "all" then shows a step this response too."""
SHORT_AGAIN = "Response: {answer}\nWrite a workflow, or empty lists to keep it."


def numbers_from(workers: int | list[int]) -> list[int]:
    """Return a list of workers' numbers, given either the list itself or how many workers exist."""
    return [*range(workers)] if isinstance(workers, int) else workers


def messages(
    question: str,
    workers: int | list[int],
    max_steps: int = 5,
    previous: Rollout | None = None,
    prompt_style: str = "ood",
    notes: list[str] | None = None,
    context: list[dict] | None = None,
    examples: list[dict] | None = None,
) -> list[dict]:
    """Return the chat that asks the Conductor for a workflow.

    Args:
        question: The question that the workers are to answer.
        workers: How many workers there are, or a list of the numbers of those that may be used.
        max_steps: The maximum number of steps.
        previous: The round before this one, whose answer the Conductor may keep (§3.2).
        prompt_style: See Prompting.
        notes: For each worker of the pool, a note on what it is good at. If None, the prompt shows
            only the workers' numbers, or their count if it is short and `workers` is an int.
        context: The chat turns before the question. The short prompt omits them.
        examples: See Prompting. The short prompt omits the examples, too.
    """
    numbers = numbers_from(workers)
    if prompt_style == "short":
        again = SHORT_AGAIN
        chat = [
            {"role": "system", "content": f"{short_pool(workers, notes)}, {max_steps} steps."},
            {"role": "user", "content": question},
        ]
    else:
        again = AGAIN
        parts = ",\n".join(f"- {form.part}" for form in LISTS)
        lists = "; ".join(f"{form.name}, {form.elements}" for form in LISTS)
        blocks = [ROLE.format(max_steps=max_steps, parts=parts, lists=lists)]
        examples = examples or read_json(os.path.join(ASSETS, "examples.json"))[prompt_style]
        blocks += example_blocks(examples, numbers, max_steps)
        if context:
            blocks.append("The conversation so far:")
            blocks += [f"{turn['role']}: {turn['content']}" for turn in context]
        blocks += [f"Question: {question}", full_pool(numbers, notes)]
        chat = [{"role": "user", "content": "\n\n".join(blocks)}]

    for rollout in previous.rounds() if previous else []:
        written = rollout.written or as_lists(rollout.workflow)
        chat.append({"role": "assistant", "content": written})
        text = again.format(answer=rollout.answer, max_steps=max_steps)
        chat.append({"role": "user", "content": text})
    return chat


def short_pool(workers: int | list[int], notes: list[str] | None) -> str:
    """Describe a pool for the short prompt, as "3 models", "Models 0 2" or "adder0, coder2".

    The second form is for a list of numbers, the third for any pool with notes. A worker's
    number follows its note without a space, because a tiny model learns to copy the token right
    after the note, but not one further away.
    """
    if notes:
        return ", ".join(f"{notes[number]}{number}" for number in numbers_from(workers))
    if isinstance(workers, int):
        return f"{workers} models"
    return f"Models {' '.join(map(str, workers))}"


def full_pool(numbers: list[int], notes: list[str] | None) -> str:
    """Describe a pool for the prompts that are not short. With notes, each worker gets a line."""
    if notes:
        return "\n".join(["Models:", *(f"Model {number}: {notes[number]}" for number in numbers)])
    return "Models: " + ", ".join(f"Model {number}" for number in numbers)


def example_blocks(examples: list[dict], numbers: list[int], max_steps: int) -> list[str]:
    """Return a text for each few-shot example: its question, plan and workflow.

    The examples' worker numbers are replaced with ones from `numbers`, the workers that may be
    used. Examples with more than max_steps steps are left out.
    """
    blocks = []
    for example in examples:
        steps = [Step(**values) for values in example["steps"]]
        for step in steps:
            step.worker = numbers[step.worker % len(numbers)]
        if len(steps) <= max_steps:
            lists = as_lists(Workflow(steps))
            blocks.append(f"Example question: {example['question']}\n\n{example['plan']}\n{lists}")
    return blocks


def conductor_chat(rollout: Rollout, prompting: Prompting, with_names: bool = False) -> list[dict]:
    """Return the chat that asks for a rollout's workflow.

    Args:
        rollout: Only its question, context, pool, allowed workers and previous rounds are used.
        prompting: How the Conductor is prompted.
        with_names: Whether to show each worker's name, followed by its note if it has one.
    """
    # If all workers may be used, pass their count, so that the short prompt says "3 models".
    is_subset = len(rollout.workers or rollout.pool) < len(rollout.pool)
    workers = rollout.workers if is_subset else len(rollout.pool)
    notes = None
    if with_names:
        notes = [", ".join(filter(None, [one.name, one.note])) for one in rollout.pool]
    elif prompting.notes:
        notes = [one.note for one in rollout.pool]
    return messages(
        rollout.question,
        workers,
        prompting.max_steps,
        rollout.previous,
        prompting.prompt_style,
        notes,
        rollout.context,
        prompting.examples,
    )


# ---- Parsing -------------------------------------------------------------------------------------

# Matches the name of a list and the text between the name and the opening bracket. This text
# contains "=" or ":", and may contain Markdown marks, quotes, a type annotation such as list[int],
# or a remark in parentheses.
NAME = (
    "(?<![A-Za-z0-9_])(?:"
    + "|".join(f"(?P<{form.name}>{form.spellings})" for form in LISTS)
    + r""")[\s*`"'\]]{0,20}
    (?::\s{0,4}[A-Za-z][\w.]{0,20}\s{0,4}(?:\[[^=\n]{0,60}\])?\s{0,4}(?==)|\([^()\n]{0,80}\))?
    [\s*`]{0,9}[:=：][\s*`]{0,20}(?:(?:python|json)\s)?(?=\[)"""
)
# Matches "Question:", "Next question:" or "Example question 2:" at the start of a line, perhaps in
# bold or as a Markdown heading.
HEADING = r"""(?P<heading>^[\s>#*]{0,8}(?P<example>example\ )?
    (?:\w{1,12}\ )?question(?:\ \d{1,3})?[* ]{0,4}:)"""
MARK = re.compile(f"{NAME}|{HEADING}", re.VERBOSE | re.IGNORECASE | re.MULTILINE)

# Matches one token of a list. A string may span several lines. If one of these lines begins another
# list, however, the string was never closed, and its match lacks the group `end`.
TOKEN = re.compile(
    rf"""(?P<atom>[][()]|[0-9.,]+)|\s+|\#[^\n]*|(?P<nothing>(?:none|null)\b)
    |(?P<raw>r?)(?P<quote>\"\"\"|'''|["']|(?P<curly>“))
     (?P<body>(?:[^"'”\\\n]+|(?!(?(curly)”|(?P=quote)))["'”]|\\.|\n(?![ *`"'-]{{0,8}}{NAME}))*)
     (?P<end>(?(curly)”|(?P=quote)))?
    |(?P<other>\w+|.)""",
    re.VERBOSE | re.IGNORECASE | re.DOTALL,
)


def parse(
    text: str, workers: int | list[int], max_steps: int = 5, allow_empty: bool = False
) -> Workflow:
    """Return the last valid workflow in a text.

    A model may make several attempts at a workflow, and some may be cut off. Consecutive lists, one
    of each name and in the order in which the prompt asks for them, always form an attempt.
    Otherwise an attempt ends when the name of one of its lists appears again. By these rules, the
    lists of two attempts seldom mix, even if one attempt is cut off. Examples that the model
    repeats from its prompt are ignored if a question follows them. If the model's own lists are
    followed by a question, everything from there on is ignored. Only the last 50,000 characters
    are read.

    Args:
        text: The text that a model wrote.
        workers: How many workers there are, or a list of the numbers of those that may be used.
        max_steps: The maximum number of steps.
        allow_empty: Whether a workflow of empty lists, which keeps the previous answer (§3.2), is
            valid.

    Raises:
        WorkflowError: There is no valid workflow. The message says what is wrong with the last
            attempt.

    Example: the second attempt in this text is cut off, so the first one is returned.

        Two models should do.
        subtasks: ["Solve it.", "Check it."]
        **model_id** = [1, 0]
        access_list = [[], ["all"]]
        Or: model_id = [2, 0]
        subtasks = ["Pl

    parse(text, workers=3) returns
    Workflow([Step(1, "Solve it.", []), Step(0, "Check it.", [0], wrote_all=True)]).
    """
    numbers = numbers_from(workers)
    text = text[-50_000:]
    workflow = None
    error = WorkflowError(f"{NAMES[0]}: the list is missing")
    recent = []  # the lists since the last heading, as (name, list or error message)
    attempt = {}  # name -> list or error message
    is_example = False  # whether the last heading introduces an example
    position = 0
    while mark := MARK.search(text, position):
        if mark["heading"]:
            # After their workflow, some models invent another question. Ignore what follows.
            if recent and not is_example:
                break
            workflow = None
            recent = []
            attempt = {}
            is_example = bool(mark["example"])
            position = mark.end()
            continue

        name = mark.lastgroup
        value, position = read_list(text, mark.end())
        recent.append((name, value))
        # Start a new attempt or extend the last one, as the docstring describes.
        neighbours = dict(recent[-len(LISTS) :])
        if [*neighbours] == NAMES:
            attempt = neighbours
        elif name in attempt:
            attempt = {name: value}
        else:
            attempt[name] = value
        try:
            workflow = Workflow(steps_of(attempt, numbers, max_steps, allow_empty))
        except WorkflowError as e:
            error = e
    if workflow is None:
        raise error
    return workflow


# Matches what follows a list that is only part of an expression, such as " * 6" in [0] * 6 or the
# second "[" in [0, 1][:1]. An asterisk that no factor follows is taken for Markdown, and does not
# match.
COMPUTED = re.compile(
    r"""\[|\.\w+\(|[ \t]*(?:\\?[*×][ \t]*(?:\d|\w+(?:\(|[ \t]*(?:[,\n]|$)))
    |\+[ \t]*[\w(\["']|if\b[^\n]{0,80}\belse\b)""",
    re.VERBOSE,
)


def read_list(text: str, start: int) -> tuple[list | str, int]:
    """Parse the list whose opening bracket is text[start].

    The list may contain only strings, numbers without a sign, None or null, brackets, parentheses,
    commas and comments.

    Returns:
        The list, or a str that says what is wrong with it; and the position from which the search
        for further lists should continue.
    """
    pieces = []
    depth = 0
    for token in TOKEN.finditer(text, start):
        if token["other"]:
            return f"{token[0]!r:.20} does not belong there", token.start()
        if token["quote"] and not token["end"]:
            return "a string is not closed", token.start("body")
        if token["quote"]:
            pieces.append(repr(string_value(token)))
        else:
            # Replace whitespace and comments with a space. Python rejects some whitespace, such as
            # a no-break space.
            pieces.append("None" if token["nothing"] else token["atom"] or " ")
        depth += (token[0] in "[(") - (token[0] in "])")
        if depth == 0 or depth > 3:
            break

    end = token.end()
    if depth:
        return "the list is not closed, or it is nested too deeply", end
    if COMPUTED.match(text, end):
        return "the list is computed; write it out", end
    try:
        return ast.literal_eval("".join(pieces)), end
    except (ValueError, SyntaxError):  # A comma is missing, for example.
        return "this is no Python list", end


# Matches a backslash in a string and the characters it applies to: the first character of a LaTeX
# command whose backslash was not escaped (latex), the hexadecimal code of a character (code), or a
# single character (plain). \n and \t count as LaTeX only if they begin a known command, and \r only
# if a letter follows.
ESCAPE = re.compile(
    r"""\\(?:(?P<latex>[^\\"'/nrtu\n]|u(?![0-9a-fA-F]{4})|r(?=[A-Za-z])
    |(?<![.:;!?]\\)n(?=(?:abla|e[gq]?|u|ot(?:in)?|mid|[gl]eq|exists|earrow|warrow|parallel|subseteq)
        (?![A-Za-z]|\.[a-z]))
    |t(?=(?:imes|heta|ext[a-z]*|frac|anh?|au|op?|ilde|riangle[a-z]*|herefore|binom|ag|iny)
        (?![A-Za-z])))
    |u(?P<code>[0-9a-fA-F]{4})|(?P<plain>.))""",
    re.VERBOSE | re.DOTALL,
)
CONTROL = {"n": "\n", "t": "\t", "r": "\r", "\n": ""}


def string_value(token: re.Match) -> str:
    r"""Return the text that a model means by a Python or JSON string literal.

    Models often forget to escape LaTeX, so \theta is kept instead of becoming a tab and "heta".
    """
    has_latex = any(escape["latex"] for escape in ESCAPE.finditer(token["body"]))

    def meaning(escape: re.Match) -> str:
        # In a string with unescaped LaTeX, keep two backslashes: they are LaTeX's line break.
        ends_latex_line = has_latex and escape["plain"] == "\\"
        if escape["latex"] or ends_latex_line:
            return escape[0]
        if escape["code"]:
            return chr(int(escape["code"], 16))
        return CONTROL.get(escape["plain"], escape["plain"])

    text = token["body"] if token["raw"] else ESCAPE.sub(meaning, token["body"])
    # JSON may spell an emoji as two surrogates. Join them into one character.
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


# ---- Running -------------------------------------------------------------------------------------


def call_worker(rollout: Rollout, i: int) -> Reply:
    """Call the worker of step i and return its reply.

    The worker gets a chat: the turns before the question, then two turns for each earlier step that
    the worker sees (that step's subtask and response), then a turn with the worker's own subtask.
    In a further round, "all" also shows the last step of the previous round, which comes first.
    The question is prepended to the first subtask in the chat.
    """
    steps = rollout.workflow.steps
    past = [(steps[j].subtask, rollout.replies[j].text) for j in steps[i].access]
    if steps[i].wrote_all and rollout.previous:  # Show the previous answer, too (§3.2).
        last = rollout.previous.workflow.steps[-1]
        past.insert(0, (last.subtask, rollout.previous.answer))

    chat = []
    for subtask, response in past:
        chat.append({"role": "user", "content": TASK + subtask})
        chat.append({"role": "assistant", "content": response})
    chat.append({"role": "user", "content": TASK + steps[i].subtask})
    chat[0]["content"] = f"{QUESTION}{rollout.question}\n\n{chat[0]['content']}"

    worker = rollout.pool[steps[i].worker]
    return worker.chat([*rollout.context, *chat], call_id=call_id(rollout, i))


def call_id(rollout: Rollout, step: int | str) -> str:
    """Return the id under which Replay looks up a call, or "" if the call is never replayed."""
    if not rollout.call_prefix:
        return ""
    round_number = len(rollout.rounds()) - 1
    return f"{rollout.call_prefix}/{rollout.number}/{round_number}/{step}"


class Threads:
    """A pool of threads that starts a thread only if no idle one can take a job.

    Neither of Python's own thread pools is suitable. multiprocessing's ThreadPool starts all its
    threads at once, so it fails if the system allows fewer. With concurrent.futures, a program
    cannot exit before the last call has been answered.
    """

    def __init__(self, limit: int):
        self.limit = limit  # the maximum number of threads
        self.started = 0
        self.idle = 0
        self.jobs = collections.deque()  # (function, arguments, tell), as passed to `run`
        self.changed = threading.Condition()

    def run(self, function, arguments: tuple, tell):
        """Call function(*arguments) in a thread, which then calls tell(result or exception)."""
        with self.changed:
            if len(self.jobs) >= self.idle and self.started < self.limit:
                try:
                    threading.Thread(target=self.work, daemon=True).start()
                    self.started += 1
                except RuntimeError:  # The system allows no more; a started thread takes the job.
                    if not self.started:
                        raise
            self.jobs.append((function, arguments, tell))
            self.changed.notify()

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
            except BaseException as error:  # Without a result, the caller would wait forever.
                result = RuntimeError(f"{function} raised {error!r}")
            tell(result)
            # Free these objects now. Otherwise they would stay in memory until this thread gets
            # its next job.
            del function, arguments, tell, result


# The threads that call workers and graders. A job must never wait for another job in this pool;
# otherwise all threads could end up waiting.
THREADS = Threads(512)


def carry_out(rollout: Rollout, max_steps: int, judge, edit, call):
    """Parse, run and judge a written rollout, as a generator whose caller runs the jobs.

    A job is a call to a worker or to `judge`. The generator yields a list of jobs that can start
    now, each as (step, function, arguments). Whenever a job is done, the caller sends
    (step, result), and the generator yields the next list, which may be empty. If a job raises an
    exception, the exception is the result. The judge's job has the step None. For example, if
    step 1 sees step 0:

        next(work)               # returns [(0, call, (rollout, 0))]
        work.send((0, reply))    # returns [(1, call, (rollout, 1))]
        work.send((1, reply))    # returns [(None, judge, (rollout.problem, "the answer"))]
        work.send((None, ""))    # raises StopIteration; rollout.right is True
    """
    # Parse.
    if rollout.error:
        return  # The rollout was lost before it had a workflow.
    if not rollout.workflow:
        workers = rollout.workers or len(rollout.pool)
        may_keep_answer = rollout.previous is not None
        try:
            rollout.workflow = parse(rollout.written, workers, max_steps, may_keep_answer)
        except WorkflowError as e:
            rollout.invalid = str(e)
            rollout.right = False if judge else None
            return
    if edit:
        rollout.workflow = edit(rollout.workflow)

    # Check workers and access lists. `parse` guarantees that they are valid, but a workflow may
    # also come from `edit` or from a caller.
    steps = rollout.workflow.steps
    for i, step in enumerate(steps):
        if step.worker not in range(len(rollout.pool)) or not {*step.access} <= {*range(i)}:
            raise ValueError(f"step {i} has no worker of the pool, or sees what is no earlier step")

    # Run. A step is ready as soon as all the steps that it sees have replies.
    rollout.names = [rollout.pool[step.worker].name for step in steps]
    rollout.replies = [None] * len(steps)
    waiting = [*range(len(steps))]
    n_running = 0
    while waiting or n_running:
        ready = [i for i in waiting if all(rollout.replies[j] for j in steps[i].access)]
        waiting = [i for i in waiting if i not in ready]
        n_running += len(ready)
        done, result = yield [(i, call, (rollout, i)) for i in ready]
        n_running -= 1
        if isinstance(result, Exception):
            failure = worker_error_behind(result)
            rollout.error = rollout.error or f"step {done}: {failure}"
            waiting = []  # The rollout is lost, so start no further steps.
        else:
            rollout.replies[done] = result

    # Judge.
    if judge and not rollout.error:
        _, verdict = yield [(None, judge, (rollout.problem, rollout.answer))]
        if isinstance(verdict, Exception):
            rollout.error = f"the grader: {worker_error_behind(verdict)}"
        else:
            rollout.failure = verdict
            rollout.right = not verdict


def worker_error_behind(error: Exception) -> WorkerError:
    """Return the WorkerError behind an exception, or raise the exception if there is none.

    The exception may be the WorkerError itself. But a grader that calls an LLM judge may wrap the
    judge's WorkerError in a different exception.
    """
    related = [error]
    for one in related:  # The list grows during the search.
        if isinstance(one, WorkerError):
            return one
        others = (one.__cause__, one.__context__, *getattr(one, "exceptions", ()))
        related += [other for other in others if other is not None and other not in related]
    raise error


def roll_out(
    rollouts: list[Rollout],
    write=None,
    max_steps: int = 5,
    judge=None,
    edit=None,
    call=call_worker,
    on_end=None,
    timeout: float = 1e9,
) -> list[Rollout]:
    """Write, parse, run and judge rollouts in place, and return them.

    Each workflow starts as soon as it is written, while other workflows are still being written.

    Args:
        rollouts: Rollouts whose questions and pools are set. A judge also needs their problems.
        write: A writer (see "Writers" below), or None if the workflows are already set.
        max_steps: The maximum number of steps; a longer workflow is invalid.
        judge: judge(problem, answer) returns what is wrong with an answer, or "" if it is right.
            Runs in a thread. If None, answers are not judged.
        edit: edit(workflow) returns the workflow to run instead, for ablations.
        call: call(rollout, i) calls the worker of step i and returns its reply. Runs in a thread.
        on_end: on_end(rollout) is called as soon as a rollout is finished.
        timeout: The number of seconds that a written rollout may take before it counts as lost.
            This is checked only after all workflows have been written.

    Raises:
        Any exception that `write`, `edit`, `call` or `judge` raises. But if a WorkerError caused an
            exception in `call` or `judge`, only its rollout is lost, and the others continue.
        ValueError: A given or edited workflow has an invalid worker or access list.
    """
    events = queue.SimpleQueue()  # from the threads: (rollout, (step, result or exception))
    running = {}  # id(rollout) -> (rollout, its generator, start time), oldest first

    def advance(rollout: Rollout, event: tuple | None = None):
        """Send a job's result to the rollout's generator, and start the jobs that it yields."""
        if id(rollout) not in running:
            return  # The rollout has already timed out, so this reply is too late.
        _, work, started = running[id(rollout)]
        try:
            jobs = work.send(event)
        except StopIteration:
            del running[id(rollout)]
            rollout.seconds = time.monotonic() - started
            if on_end:
                on_end(rollout)
            return
        for step, function, arguments in jobs:
            tell = lambda result, step=step: events.put((rollout, (step, result)))
            THREADS.run(function, arguments, tell)

    # Start each rollout when it is written, and handle events in between.
    for rollout in write(rollouts) if write else rollouts:
        work = carry_out(rollout, max_steps, judge, edit, call)
        running[id(rollout)] = (rollout, work, time.monotonic())
        advance(rollout)  # starts carry_out, which yields the first jobs
        while not events.empty():
            advance(*events.get())

    # Wait for events. The oldest rollout is the first to run out of time.
    while running:
        oldest, work, started = next(iter(running.values()))
        seconds_left = max(0.0, started + timeout - time.monotonic())
        try:
            advance(*events.get(timeout=seconds_left))
        except queue.Empty:
            oldest.error = oldest.error or f"it took longer than {timeout:g} s"
            work.close()  # so that `advance` finds the generator finished
            advance(oldest)
    return rollouts


def execute(
    workflow: Workflow, question: str, pool: list, previous: Rollout | None = None
) -> Rollout:
    """Run a given workflow on a question, and return the rollout."""
    return roll_out([Rollout(question, pool, previous=previous, workflow=workflow)])[0]


def conduct(
    write,
    rollouts: list[Rollout],
    extra_rounds: int = 0,
    max_steps: int = 5,
    tries: int = 3,
    **settings,
) -> list[Rollout]:
    """Answer questions. Return each question's last round with a workflow, or else its first round.

    The given rollouts are not changed.

    Args:
        write: A writer (see "Writers" below).
        rollouts: One rollout for each question, not yet written.
        extra_rounds: The maximum number of rounds after the first (§3.2). A question gets fewer if
            the Conductor keeps an answer by writing empty lists, if it writes no valid workflow, or
            if a round is lost.
        max_steps: The maximum number of steps; a longer workflow is invalid.
        tries: How many times per round the Conductor may try to write a valid workflow. Each
            further try increases `number` by 1, so that different tokens are sampled.
        settings: Further arguments for roll_out.
    """
    # Conduct one round. Try again if a workflow is invalid.
    last = [replace(rollout) for rollout in rollouts]
    for _ in range(tries):
        for i, rollout in enumerate(last):
            if rollout.invalid:
                last[i] = replace(rollouts[i], number=rollout.number + 1)
        pending = [rollout for rollout in last if not rollout.workflow and not rollout.error]
        if pending:
            roll_out(pending, write, max_steps, **settings)

    # Conduct further rounds for the questions that workers answered in this round. If the next
    # round has no valid workflow, keep this one.
    open_ended = [i for i, rollout in enumerate(last) if rollout.replies and not rollout.error]
    if extra_rounds and open_ended:
        asked = [replace(rollouts[i], previous=last[i]) for i in open_ended]
        further = conduct(write, asked, extra_rounds - 1, max_steps, tries, **settings)
        for i, rollout in zip(open_ended, further):
            if rollout.workflow:
                last[i] = rollout
    return last


# ---- Writers -------------------------------------------------------------------------------------

# A writer is a function write(rollouts) that asks a Conductor for each rollout's workflow. As soon
# as the Conductor has written a workflow or failed, the writer sets the rollout's `written` or
# `error`, and yields the rollout.

LONGEST_TOKEN = 16  # characters; the tokens of ordinary text are shorter on average


def model_writer(model: Qwen, tokenizer: Tokenizer, prompting: Prompting, temperature=1.0, seed=0):
    """Return a writer that samples workflows from a local model.

    A workflow depends on the seed, the prompt and the rollout's number, but not on rollouts with
    other prompts in the batch. If the same prompt occurs with two call prefixes, its rollouts form
    two groups. If the groups have the same size, their random draws differ, even for rollouts with
    the same number.
    """
    room = model.config.max_position_embeddings - prompting.max_new_tokens

    def write(rollouts):
        # Group rollouts that share a prompt, so that the model does not read the prompt anew for
        # every rollout.
        groups = collections.defaultdict(list)
        for rollout in rollouts:
            chat = conductor_chat(rollout, prompting)
            # Do not even tokenize a chat that is far too long.
            is_huge = len(str(chat)) > LONGEST_TOKEN * room
            if not is_huge:
                rollout.prompt_ids = tokenizer.chat(chat)
            if is_huge or len(rollout.prompt_ids) > room:
                rollout.error = f"the prompt has more tokens than the Conductor can read: {room:,}"
                yield rollout
            else:
                groups[rollout.call_prefix, tuple(rollout.prompt_ids)].append(rollout)

        # generate_each takes one n for all prompts, so sample groups of the same size together.
        for n in {len(group) for group in groups.values()}:
            batch = [group for group in groups.values() if len(group) == n]
            completions = generate_each(
                model,
                [group[0].prompt_ids for group in batch],
                n,
                prompting.max_new_tokens,
                temperature,
                tokenizer.end_ids,
                seed,
                len(tokenizer),
                [[rollout.number for rollout in group] for group in batch],
            )
            for i, j, completion in completions:
                rollout = batch[i][j]
                rollout.written = tokenizer.decode(completion.tokens)
                rollout.tokens = completion.tokens
                rollout.logprobs = completion.logprobs
                rollout.finished = completion.finished
                yield rollout

    return write


def worker_writer(worker, prompting: Prompting):
    """Return a writer that lets a worker act as the Conductor (Table 11).

    The worker was not trained with the pool, so its prompt shows the workers' names and notes. As
    in the paper, the worker's token limit, if it has one, is doubled, but to at most 8,192. A limit
    that already exceeds 8,192 is kept.
    """
    doubled = {
        name: max(limit, min(2 * limit, 8192))
        for name, limit in worker.params.items()
        if name in LIMITS
    }

    def write_one(rollout: Rollout) -> Rollout:
        chat = conductor_chat(rollout, prompting, with_names=True)
        try:
            rollout.written = worker.chat(chat, call_id(rollout, "conductor"), **doubled).text
        except WorkerError as e:
            rollout.error = str(e)
        return rollout

    return in_background(lambda rollout, tell: THREADS.run(write_one, (rollout,), tell))


def in_background(start):
    """Return a writer that lets other threads write.

    start(rollout, tell) must arrange for a thread to write the rollout and then call
    tell(rollout or exception). The writer raises the exception.
    """

    def write(rollouts):
        written = queue.SimpleQueue()
        for rollout in rollouts:
            start(rollout, written.put)
        for _ in rollouts:
            result = written.get()
            if isinstance(result, Exception):
                raise result
            yield result

    return write


# ---- Rollouts in files and on the screen ---------------------------------------------------------


def without_pools(rollout: Rollout, **changes) -> Rollout:
    """Return a copy of a rollout and its previous rounds without their pools and problems.

    Pools can neither be sent to other ranks nor be written to a file. Problems need not be: every
    rank has them, and a file names their ids. `changes` are new values for other fields, and apply
    to all rounds.
    """
    previous = rollout.previous and without_pools(rollout.previous, **changes)
    return replace(rollout, pool=[], problem=None, previous=previous, **changes)


def rollout_to_json(rollout: Rollout, with_tokens: bool = False) -> dict:
    """Return a rollout as a dict for json.dumps.

    The dict has the problem's id instead of the problem, and an empty pool. Token ids and
    log-probabilities are also empty unless `with_tokens`. For people who read the file, the dict
    also has the answer and the totals of calls, tokens and cost.
    """
    changes = {} if with_tokens else {"prompt_ids": [], "tokens": [], "logprobs": []}
    values = asdict(without_pools(rollout, **changes))
    del values["problem"]
    if rollout.problem:
        values["problem_id"] = rollout.problem.id
    for name in ("answer", "calls", "tokens_used", "cost"):
        values[name] = getattr(rollout, name)
    return values


def rollout_from_json(values: dict) -> Rollout:
    """Rebuild a rollout from the dict that rollout_to_json returned.

    Some keys may also have the names that they had in earlier versions of this program.
    """
    old_keys = {"name": "call_prefix", "prompt": "prompt_ids", "problem": "problem_id"}
    values = {old_keys.get(key, key): value for key, value in values.items()}
    rollout = Rollout(**{f.name: values[f.name] for f in fields(Rollout) if f.name in values})
    rollout.replies = [reply and Reply(**reply) for reply in rollout.replies]
    if rollout.workflow:
        rollout.workflow = Workflow([Step(**step) for step in rollout.workflow["steps"]])
    if rollout.previous:
        rollout.previous = rollout_from_json(rollout.previous)
    return rollout


def view(rollout: Rollout) -> str:
    """Describe a rollout as text: the steps of all rounds, the answer, totals and the verdict."""
    lines = [f"Question: {rollout.question}"]
    for number, one in enumerate(rollout.rounds()):
        if number:
            lines.append(f"\nRound {number}: {len(one.replies) or 'no'} steps")
        for i in range(len(one.replies)):
            lines += view_step(one, i)
        if one.error or one.invalid:
            lines.append(f"\nFailed: {one.error or one.invalid}")
        if one.invalid:
            lines.append(one.written)

    cost = "unknown" if rollout.cost is None else f"${rollout.cost:.4f}"
    seconds = sum(one.seconds for one in rollout.rounds())
    lines.append(f"\nAnswer: {rollout.answer}")
    lines.append(
        f"Calls: {rollout.calls}, tokens: {rollout.tokens_used}, cost: {cost}, {seconds:.1f} s"
    )
    if rollout.right is not None:
        lines.append(f"Right: {rollout.right}. {rollout.failure}{rollout.invalid}")
    return printable("\n".join(lines))


def view_step(rollout: Rollout, i: int) -> list[str]:
    step = rollout.workflow.steps[i]
    reply = rollout.replies[i]
    if step.wrote_all:
        sees = "all earlier results"
    else:
        sees = f"steps {step.access}" if step.access else "the question"
    text = (reply.text or f"(empty; it ended by {reply.finish!r})") if reply else "(none)"
    name = rollout.names[i]
    head = f"\nStep {i}: {name} (model {step.worker}) sees {sees} and is told: {step.subtask}"
    return [head, "    " + text.replace("\n", "\n    ")]


def printable(text: str) -> str:
    """Return a text with U+FFFD in place of each character that could do harm on a terminal.

    These are control characters (except tab and newline), characters that change the writing
    direction, and lone surrogates, which cannot be printed. CRLF becomes a newline.
    """
    commands = r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
    return re.sub(commands, "\ufffd", text.replace("\r\n", "\n"))


def show(file: str, number: int | str | None = None) -> str:
    """Return a summary of a JSON Lines file of rollouts, in which each rollout has one line.

    With `number`, return a view of the rollout on that line of the file instead, counting from 0.
    """
    rows = []
    for i, rollout in enumerate(read_rollouts(file)):
        if str(i) == str(number):
            return view(rollout)
        verdict = {True: "right", False: "wrong", None: "lost" if rollout.error else ""}
        workers = " > ".join(rollout.names) if rollout.workflow else "no workflow"
        question = " ".join(rollout.question.split())
        rows.append(f"{i:>5}  {verdict[rollout.right]:<7}{question:.60}  [{workers}]")
    if number is not None:
        raise ValueError(f"{file} has lines 0 to {len(rows) - 1}, and no line {number!r}")
    return printable("\n".join(rows))


def read_rollouts(file: str) -> Iterator[Rollout]:
    """Yield the rollouts in a JSON Lines file.

    Raises ValueError if the file is missing, empty or a folder, or if a line holds no rollout. In
    the latter case, the message names the line.
    """
    if not os.path.isfile(file) or not os.path.getsize(file):
        where = "a run's traces are in its folder traces/, such as traces/00000.jsonl"
        raise ValueError(f"there is no file {file}, or it is empty; {where}")
    with open(file, encoding="utf-8", errors="replace") as lines:
        for i, line in enumerate(lines):
            try:
                rollout = rollout_from_json(json.loads(line))
            except (ValueError, TypeError, LookupError, AttributeError) as e:
                raise ValueError(f"{file}, line {i}, holds no rollout: {e!r}") from None
            yield rollout


# ---- The user's own few-shot examples ------------------------------------------------------------

# A file of examples has the same format as assets/examples.json, {name of a set: [example, …]}.
# Each example is
# {"question": text, "plan": text, "steps": [{"worker": 0, "subtask": text, "access": []}, …]}.


def choose_examples(rollouts: list[Rollout], n: int = 4) -> list[dict]:
    """Return at most n few-shot examples, made from right rollouts of different questions.

    Rollouts that have a previous round or earlier chat turns are left out, because an example shows
    neither. To vary the workers, each choice is the first rollout whose sequence of workers has
    been chosen least often so far.
    """
    left = [
        rollout
        for rollout in rollouts
        if rollout.right and not rollout.previous and not rollout.context
    ]
    chosen = []
    while left and len(chosen) < n:
        workers = [rollout.names for rollout in chosen]
        best = min(left, key=lambda rollout: workers.count(rollout.names))
        chosen.append(best)
        left = [rollout for rollout in left if rollout.question != best.question]
    return [as_example(rollout) for rollout in chosen]


def as_example(rollout: Rollout) -> dict:
    """Convert a rollout to an example.

    The plan is the text in `written` before the first list or "Question:", without thoughts.
    """
    written = rollout.written.rpartition("</think>")[2]  # without the model's thoughts
    mark = MARK.search(written)
    plan = written[: mark.start()] if mark else ""
    # Drop the marks that open a code block, a JSON object, a list item or a bold name.
    plan = plan.partition("```")[0].strip(" \n*-#{\"'`")
    return {
        "question": rollout.question,
        "plan": plan,
        "steps": [asdict(step) for step in rollout.workflow.steps],
    }


def read_examples(file: str) -> list[dict]:
    """Return all examples in a JSON file as one list.

    Raises ValueError if the file holds no JSON object, or if an example is invalid.
    """
    examples = []
    try:
        for one_set in read_json(file).values():
            examples += one_set
        for block in example_blocks(examples, [*range(1000)], max_steps=100):
            parse(block, workers=1000, max_steps=100)
    except (AttributeError, TypeError, LookupError, ValueError) as e:
        right = "`workflow.py show --examples` writes right ones"
        raise ValueError(f"{file}: an example is wrong ({e!r}); {right}") from None
    return examples


# ---- Checkpoints ---------------------------------------------------------------------------------


def save_prompting(folder: str, prompting: Prompting, pool: str, names: list[str]):
    """Write the prompting, the pool's spec and the workers' names to a folder's conductor.json."""
    values = asdict(prompting) | {"pool": pool, "workers": names}
    write_json(os.path.join(folder, "conductor.json"), values)


def read_prompting(path: str) -> tuple[Prompting, str, list[str]]:
    """Return the prompting, the pool's spec and the workers' names from a checkpoint.

    A checkpoint without conductor.json, such as a base model, gives Prompting(), "" and [].
    """
    file = os.path.join(fetch(path, "conductor.json"), "conductor.json")
    if not os.path.exists(file):
        return Prompting(), "", []
    saved = read_json(file)
    if "prompt" in saved:  # the name of prompt_style in earlier versions
        saved["prompt_style"] = saved.pop("prompt")
    values = {f.name: saved[f.name] for f in fields(Prompting) if f.name in saved}
    needed = {"prompt_style", "max_steps", "max_new_tokens"}
    if not needed <= {*values} or saved["max_steps"] not in range(1, 101):
        raise ValueError(
            f"{file} is of an earlier format: it needs {', '.join(sorted(needed))} (from 1 to 100 "
            "steps); train the Conductor again"
        )
    return Prompting(**values), str(saved.get("pool", "")), saved.get("workers", [])


def load_conductor(path: str) -> tuple[Qwen, Tokenizer, Prompting]:
    """Load a checkpoint and return its model, its tokenizer and its Prompting.

    The model is on the GPU if there is one, otherwise on the CPU.
    """
    model, tokenizer = load_sampler(path)
    return model, tokenizer, read_prompting(path)[0]


def choose_pool(checkpoint: str, pool: str) -> str:
    """Return the spec of the pool to use with a Conductor.

    Args:
        checkpoint: The Conductor's folder, or its name on the Hugging Face hub.
        pool: The spec that the user has given. "": the local pool that the Conductor was trained
            with, or the pool `local` if the checkpoint names none.

    Raises:
        ValueError: There is no such checkpoint; or the Conductor cannot work with the pool; or no
            spec is given, although the Conductor was trained with a pool that is not local. Such a
            pool must be named by the user, so that a downloaded checkpoint cannot decide which
            hosts receive the questions and get paid.
    """
    try:
        prompting, trained_spec, names = read_prompting(checkpoint)
    except OSError as e:
        raise ValueError(
            f"{e}\ntrain.py trains a Conductor; workflow.py --conductor=WORKER needs none"
        )
    if not pool and trained_spec not in ("", *LOCAL):
        spec = printable(trained_spec)
        raise ValueError(f"say which workers to ask: this Conductor learned with --pool={spec}")

    spec = pool or trained_spec or "local"
    entries = read_pool(spec)
    present = [name_of(entry) for entry in entries]
    is_local = {trained_spec, spec} <= {*LOCAL}

    def places(names: list[str]) -> list[str]:
        # If both pools are local, compare only trades: a "tired coder" may replace a "coder".
        return [name.split()[-1] for name in names] if is_local else names

    # If the prompt shows notes, any workers that have notes will do. If not, the Conductor knows
    # workers only by their numbers, so the workers that its checkpoint names, if any, must be
    # present in the same order.
    if prompting.notes:
        silent = [name for name, entry in zip(present, entries) if not entry.get("note")]
        if silent:
            raise ValueError(
                f"{checkpoint} knows workers by their notes: give a note to {', '.join(silent)}"
            )
    elif names and places(names) != places(present):
        raise ValueError(
            f"{checkpoint} knows {printable(', '.join(names))}, in this order, and --pool={spec} "
            f"has {', '.join(present)}: name yours so, train a Conductor for them (train.py "
            "--preset=own; for a local pool --preset=laptop --pool=…), or let one of them conduct "
            "(--conductor; eval.py: --systems=seat)"
        )
    return spec


def numbers_of(names: str, pool: list) -> list[int]:
    """Return the numbers of the workers named in a comma-separated list ("coder,librarian")."""
    known = [worker.name for worker in pool]
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    if not {*wanted} <= {*known}:
        raise ValueError(f"no such worker: {names}; the pool has {', '.join(known)}")
    return sorted({known.index(name) for name in wanted})


# ---- The server ----------------------------------------------------------------------------------
#
# Several kinds of threads serve a request. The connection's own thread is the only one that writes
# to the client. It waits for a thread of Service.conducting, which runs `conduct`. That thread in
# turn waits for threads of THREADS, which call the workers, and for the thread of `share_batches`,
# if a checkpoint conducts. These threads wait for no other kind, so requests cannot deadlock.

CONDUCTING = 256  # the maximum number of requests that are conducted at the same time
WAITING = 1024  # the maximum number of further requests that wait for their turn
# Regular expression for the beginning of an error -> (HTTP status, OpenAI's error code). The first
# one that matches decides. An error never begins with a provider's words, because the name of the
# worker precedes them.
ERRORS = {
    r"(step \d+: )?the budget of \$": (402, "insufficient_quota"),
    "the prompt has more tokens than the Conductor": (400, "context_length_exceeded"),
    "": (502, None),  # any other error
}


@dataclass
class Service:
    """The objects and settings that all requests of a server share."""

    write: Callable  # a writer; up to CONDUCTING threads call it at the same time
    pool: list
    workers: list[int] | None = None  # numbers of the workers that may be used; None: all
    max_steps: int = 5  # the maximum number of steps; a longer workflow is invalid
    extra_rounds: int = 1  # for the model conductor-recursive: maximum rounds after the first
    silence: float = 15.0  # seconds without an event before a stream sends a keep-alive comment
    run: str = ""  # the folder of the training run that the page shows
    # Yields a different rollout number for each request, so that a repeated question gets new
    # samples. A request uses up to three numbers in a row, one for each try in `conduct`; steps of
    # 10 leave room for them.
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(step=10))
    conducting: Threads = field(default_factory=lambda: Threads(CONDUCTING))


# The files of a training run that the page may read.
RUN_FILE = re.compile(r"/run/((settings|test)\.json|metrics\.jsonl|traces/\d{5,9}\.jsonl)")
NOBODY_WAITS = "stopped, as nobody waits for the answer"


class ConductorHandler(Handler):
    """Answer chat requests by running workflows, and serve the web page."""

    models = ["conductor", "conductor-recursive"]
    public_paths = ("/",)

    def page(self, path: str):
        """Return the content at a path: the page, a file of its run, or what Handler serves."""
        service = self.server.service
        if path == "/":
            return pathlib.Path(ASSETS, "page.html").read_bytes()
        run_file = RUN_FILE.fullmatch(path)
        if service.run and run_file:
            return read_run_file(service.run, run_file[1])
        return super().page(path)

    def complete(self):
        """Answer the last user message of a chat, and log one line about the request."""
        started = time.monotonic()
        last = None
        outcome = "failed"
        try:
            asked = self.question()
            if len(self.server.service.conducting.jobs) >= WAITING:
                # Random seconds keep clients that are refused together from returning together. The
                # openai client ignores a Retry-After of more than 60 s.
                seconds = jitter.randint(1, 60)
                sentence = f"the server is full of requests: come again in {seconds} s"
                raise Refusal(503, sentence, headers={"Retry-After": seconds})
            last = self.conduct_and_stream(asked)
            self.answer_with(last)
            outcome = "answered"
        except Refusal as refusal:
            outcome = f"{refusal.status}, {refusal.message}"
            raise
        except (ConnectionError, TimeoutError):
            outcome = "the client hung up"
            raise
        finally:
            self.log(outcome, last, time.monotonic() - started)

    def question(self) -> Rollout:
        """Return a rollout for the last user message, with the other messages as its context.

        Assistant messages after the last user message are left out: they are the beginning of an
        answer, and the answer is written anew.
        """
        service = self.server.service
        messages = self.body["messages"]
        users = [i for i, message in enumerate(messages) if message["role"] == "user"]
        if not users or not messages[users[-1]]["content"].strip():
            reason = "there is no user message to answer, or the last user message is empty"
            raise Refusal(400, f"messages: {reason}")
        last = users[-1]
        later = [message for message in messages[last + 1 :] if message["role"] == "system"]
        return Rollout(
            messages[last]["content"],
            service.pool,
            service.workers,
            number=next(service.numbers),
            context=messages[:last] + later,
        )

    def conduct_and_stream(self, asked: Rollout) -> Rollout:
        """Conduct a question in another thread, and return the last round.

        If the client wants a stream, send it the steps while they run.
        """
        service = self.server.service
        # Receives an event when a step starts and when its reply comes, and finally the last round
        # or an exception.
        events = queue.SimpleQueue()

        def call(rollout, i):
            if self.hung_up():
                raise WorkerError(NOBODY_WAITS)
            events.put(event_of(rollout, i))
            reply = call_worker(rollout, i)
            events.put(event_of(rollout, i, reply))
            return reply

        def write(rollouts):
            if self.hung_up():
                for rollout in rollouts:
                    rollout.error = NOBODY_WAITS
                    yield rollout
            else:
                yield from service.write(rollouts)

        def conduct_question():
            extra_rounds = service.extra_rounds if self.body["model"] == self.models[1] else 0
            [last] = conduct(write, [asked], extra_rounds, service.max_steps, call=call)
            return last

        service.conducting.run(conduct_question, (), events.put)
        while True:
            try:
                event = events.get(timeout=service.silence)
            except queue.Empty:
                event = None
            if isinstance(event, Exception):
                raise event
            if isinstance(event, Rollout):
                return event
            if self.body.get("stream") and not self.hung_up():
                # Ignore a failed write: if the connection is lost, the operating system closes it,
                # and `hung_up` returns True from then on.
                with contextlib.suppress(OSError):
                    self.stream(event)

    def stream(self, event: dict | None):
        """Send an event as reasoning text, which front ends show, or a keep-alive for None."""
        if event is None:
            self.send_comment("the workers are busy")
        else:
            self.send_event({"reasoning_content": in_words(event)}, workflow_event=event)

    def answer_with(self, last: Rollout):
        """Send the answer of the last round that has one, or raise Refusal if no round does.

        Raises ConnectionAbortedError if the client has hung up.
        """
        if self.hung_up():
            raise ConnectionAbortedError
        answered = last
        if last.error and last.previous:  # The round before a lost round has an answer.
            answered = last.previous
        if answered.error or answered.invalid:
            sentence = answered.error or f"the Conductor wrote no workflow: {answered.invalid}"
            status, code = next(ERRORS[start] for start in ERRORS if re.match(start, sentence))
            raise Refusal(status, sentence, code)

        prompt_tokens = sum(reply.prompt_tokens for reply in last.all_replies)
        usage = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": last.tokens_used - prompt_tokens,
            "total_tokens": last.tokens_used,
            "cost": last.cost,  # dollars
        }
        workflow = []
        for one in last.rounds():
            for i, reply in enumerate(one.replies):
                if reply:
                    workflow.append(event_of(one, i) | event_of(one, i, reply))
        finish = "length" if answered.all_replies[-1].finish == "length" else "stop"
        self.reply(answered.answer, finish, usage, workflow=workflow)

    def log(self, outcome: str, last: Rollout | None, seconds: float):
        """Print a line about a request: model, outcome, steps, seconds, dollars, budget left.

        The line goes to stderr. It has no steps, seconds or dollars if nothing was conducted, and
        no budget if there is no limit.
        """
        parts = [f"{self.body['model']}: {outcome}"]
        if last:
            # The budget also pays for the calls of a worker that conducts. This cost excludes them.
            cost = "unknown cost" if last.cost is None else f"${last.cost:.4f} for the steps"
            parts += [f"{last.calls} steps", f"{seconds:.1f} s", cost]
        budget = self.server.service.pool[0].budget
        if budget:
            parts.append(f"${budget.left:.4f} left")
        line = one_line(", ".join(parts))  # an error may have several lines
        # Do not use `print`: it writes the newline separately, so two threads' lines could mix.
        sys.stderr.write(line + "\n")


def event_of(rollout: Rollout, i: int, reply: Reply | None = None) -> dict:
    """Return an event that reports the start of step i or, if there is a reply, that reply."""
    place = {"round": len(rollout.rounds()) - 1, "step": i}
    if reply:
        return place | {"reply": reply.text, "seconds": reply.seconds, "cost": reply.cost}
    step = rollout.workflow.steps[i]
    return place | {
        "worker": rollout.names[i],
        "subtask": step.subtask,
        "access": step.access,
    }


def in_words(event: dict) -> str:
    """Describe an event as text.

    The text names the step, because the events of parallel steps are interleaved in a stream.
    """
    step = f"Step {event['step']}" + (f" of round {event['round']}" if event["round"] else "")
    if "reply" in event:
        return f"{step}, answered in {event['seconds']:.1f} s:\n{event['reply']}\n\n"
    return f"{step}, {event['worker']} is told: {event['subtask']}\n\n"


def read_run_file(run: str, name: str) -> dict | list:
    """Return the content of a file in a run's folder: an object or, for .jsonl, a list.

    Raises Refusal if the file is missing or damaged.
    """
    # Read NaN and Infinity as null, because browsers' JSON parsers reject them.
    read = functools.partial(json.loads, parse_constant=lambda name: None)
    try:
        file = pathlib.Path(run, name).resolve()
        # In a folder that somebody else made, a link could lead to any file.
        if not file.is_file() or not file.is_relative_to(pathlib.Path(run).resolve()):
            raise Refusal(404, f"there is no {name} in this run's folder yet")
        text = file.read_text(encoding="utf-8")
        if name.endswith(".json"):
            return read(text)
        complete_lines = text.split("\n")[:-1]  # The run may still be writing the last line.
        return [read(line) for line in complete_lines]
    except (OSError, ValueError, RuntimeError) as e:
        raise Refusal(500, f"this run's {name} is damaged: {e}") from None


def share_batches(write):
    """Return a writer that many threads can call at once; it writes their rollouts in batches.

    A single background thread calls `write`, each time with all the rollouts that are waiting. What
    model_writer writes for a request does not depend on the other requests in the batch.
    """
    waiting = queue.SimpleQueue()  # (rollout, tell), as passed to in_background's `start`

    def write_batches():
        while True:
            batch = [waiting.get()]
            while not waiting.empty():
                batch.append(waiting.get())
            tellers = {id(rollout): tell for rollout, tell in batch}
            try:
                for rollout in write([rollout for rollout, _ in batch]):
                    tellers.pop(id(rollout))(rollout)
            except Exception as error:
                for tell in tellers.values():
                    tell(error)

    threading.Thread(target=write_batches, daemon=True).start()
    return in_background(lambda rollout, tell: waiting.put((rollout, tell)))


def conductor_server(
    service: Service, port: int, host: str = "127.0.0.1", api_key: str = ""
) -> Server:
    """Return an OpenAI-compatible server that is bound to its port, but not started."""
    server = Server(port, ConductorHandler, host, api_key)
    server.service = service
    return server


def serve(settings: "Settings", service: Service):
    """Serve a Conductor until Ctrl-C is pressed."""
    if settings.run and not os.path.exists(os.path.join(settings.run, "settings.json")):
        raise ValueError(f"--run={settings.run}: no training run wrote its settings.json there")
    # Each connection, to a client or to a worker, is an open file. Raise the limit, often 1,024, as
    # far as the system allows.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    key = os.environ.get("CONDUCTOR_API_KEY", "").strip()
    server = conductor_server(service, settings.port, settings.host, key)
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    url = f"http://{host}:{server.server_address[1]}"
    models = " and ".join(ConductorHandler.models)
    print(f"{url}/ shows workflows, {url}/v1 has the models {models}; Ctrl-C ends it", flush=True)
    server.serve_forever()


# ---- The command line ----------------------------------------------------------------------------


@dataclass
class Settings:
    checkpoint: str = flag(
        os.path.join(ASSETS, "laptop"),
        "the Conductor: a folder, or a model on the Hugging Face hub",
    )
    pool: str = flag(
        "",
        "the workers: local, a name in assets/pools/, or a JSON file; if empty, the local pool "
        "that the checkpoint was trained with or, with --conductor, local",
    )
    only: str = flag(
        "", "comma-separated names of the workers that may be used; if empty, all of them"
    )
    conductor: str = flag("", "the name of a worker that conducts instead of the checkpoint")
    budget: float = flag(0.0, "the maximum cost of all calls, in dollars; 0: no limit")
    extra_rounds: int = flag(
        0,
        "maximum rounds after the first, in which the Conductor may revise the answer (§3.2); with "
        "serve: those of the model conductor-recursive, which has at least 1",
    )
    temperature: float = flag(
        0.2, "the checkpoint's sampling temperature; 0: always take the most likely token"
    )
    port: int = flag(8400, "with serve: the port; 0: any free one")
    host: str = flag(
        "127.0.0.1",
        "with serve: the address to listen on; one that other machines can reach requires a key in "
        "$CONDUCTOR_API_KEY",
    )
    run: str = flag("", "with serve: the folder of a training run that the page shows")
    examples: bool = flag(False, "with show: print few-shot examples for train.py --examples=FILE")


USAGE = (
    'ask a question in quotes, python workflow.py "a question", or use a command, serve or show; '
    "--help shows what else there is"
)


def show_words(words: list[str], examples: bool) -> str:
    """Return what `workflow.py show` prints, given the command-line arguments after "show"."""
    if not words or len(words) > 2 and not examples:
        raise ValueError(f"show takes a FILE of traces and perhaps a line's number; {USAGE}")
    if examples:
        rollouts = [rollout for file in words for rollout in read_rollouts(file)]
        own = choose_examples(rollouts)
        if not own:
            raise ValueError("no rollout in these files is right, so none can be an example")
        return json.dumps({"own": own}, indent=1, ensure_ascii=False)
    return show(*words)


def question_of(words: list[str]) -> str:
    """Return the question: the only command-line argument or, if there is none, standard input.

    Flags do not count. An argument made up of the letters a to z, such as `server`, is more likely
    a misspelt command than a question, so it is refused.
    """
    question = ""
    if len(words) == 1 and not re.fullmatch("[A-Za-z]+", words[0]):
        question = words[0].strip()
    elif not words and sys.stdin and not sys.stdin.isatty():
        question = sys.stdin.read().strip()
    if not question:
        raise ValueError(USAGE)
    return question


def main(argv: list[str]):
    settings = Settings()
    words = configure(settings, argv)
    for name in ("budget", "extra_rounds", "temperature"):
        if getattr(settings, name) < 0:
            raise ValueError(f"--{name} is at least 0")
    if words[:1] == ["show"]:
        print(show_words(words[1:], settings.examples), flush=True)
        return
    is_server = words == ["serve"]
    question = "" if is_server else question_of(words)

    # Get the workers.
    spec = settings.pool or "local"
    if not settings.conductor:
        spec = choose_pool(settings.checkpoint, settings.pool)
    pool = load_pool(spec, budget=settings.budget)
    if is_server:
        demand_budget(pool, settings.budget, 1000, "serving")
    workers = numbers_of(settings.only, pool) or None
    if spec in LOCAL:
        print(
            'the workers are small programs for questions such as "What is 3 + 4?"; '
            "to ask language models, say --pool=FILE.json --conductor=WORKER",
            file=sys.stderr,
        )

    # Get the Conductor's writer.
    if settings.conductor:
        numbers = numbers_of(settings.conductor, pool)
        if len(numbers) != 1:
            raise ValueError(f"--conductor={settings.conductor}: name one worker")
        prompting = Prompting()
        write = worker_writer(pool[numbers[0]], prompting)
    else:
        model, tokenizer, prompting = load_conductor(settings.checkpoint)
        write = model_writer(model, tokenizer, prompting, settings.temperature)
        write = share_batches(write) if is_server else write

    if is_server:
        rounds = max(1, settings.extra_rounds)
        service = Service(write, pool, workers, prompting.max_steps, rounds, run=settings.run)
        serve(settings, service)
    else:
        asked = Rollout(question, pool, workers)
        answer(asked, write, prompting.max_steps, settings.extra_rounds)


def answer(asked: Rollout, write, max_steps: int, extra_rounds: int):
    """Answer a question, print its workflow and the total cost, and exit."""

    def write_aloud(rollouts):
        print("the Conductor writes a workflow …", file=sys.stderr)
        return write(rollouts)

    def call(rollout, i):
        print(f"step {i}: {rollout.names[i]} is asked …", file=sys.stderr)
        return call_worker(rollout, i)

    [rollout] = conduct(write_aloud, [asked], extra_rounds, max_steps, call=call)
    print(view(rollout), flush=True)
    calls = sum(worker.calls for worker in asked.pool)
    if calls > rollout.calls:  # A worker conducted. Print totals that include its calls.
        spent = [worker.spent for worker in asked.pool]
        cost = "unknown cost" if None in spent else f"${sum(spent):.4f}"
        print(f"with the Conductor's: {calls} calls, {cost}", flush=True)
    sys.exit("the workflow failed" if rollout.error or rollout.invalid else 0)


if __name__ == "__main__":
    # If a user's file imports workflow, give it this module and not a second copy.
    sys.modules["workflow"] = sys.modules["__main__"]
    try:
        main(sys.argv[1:])
    except BrokenPipeError:
        discard_output()
    except (OSError, ValueError, WorkerError, KeyboardInterrupt) as e:
        raise SystemExit(str(e) or "interrupted") from None
