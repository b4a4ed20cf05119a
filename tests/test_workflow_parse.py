"""Tests that `parse` finds in a model's text the workflow that a careful reader would find."""

import json
import random
import time
from dataclasses import dataclass

import pytest

import workflow
from workflow import Step, Workflow, WorkflowError, as_lists, parse

TWO = [Step(1, "Solve it.", []), Step(0, "Check it.", [0])]
PLAIN = 'model_id = [1, 0]\nsubtasks = ["Solve it.", "Check it."]\naccess_list = [[], ["all"]]'
OTHER = 'model_id = [2]\nsubtasks = ["x"]\naccess_list = [[]]'

ACCEPTED = {
    "plain": PLAIN,
    "after a plan": "Two models should do. A check is cheap.\n\n"
    f"{PLAIN}\n\nThis ends the workflow.",
    "in a fence": f"```python\n{PLAIN}\n```",
    "single quotes": "model_id = [1, 0]\nsubtasks = ['Solve it.', 'Check it.']\n"
    "access_list = [[], ['all']]",
    "JSON": '{"model_id": [1, 0], "subtasks": ["Solve it.", "Check it."], '
    '"access_list": [[], ["all"]]}',
    "bold names": PLAIN.replace("access_list", "**access_list**").replace(
        "model_id", "**model_id**"
    ),
    "bullets": PLAIN.replace("model_id", "- `model_id`")
    .replace("subt", "- subt")
    .replace("acc", "* acc"),
    "remarks": PLAIN.replace("model_id =", "model_id (who):").replace(
        "access_list =", "access_list (sees):"
    ),
    "escaped for Markdown": PLAIN.replace("_", "\\_"),
    "annotated": PLAIN.replace(" =", ": list[int] =", 1).replace(
        "subtasks =", "subtasks: List[str] ="
    ),
    "plural and capitals": PLAIN.replace("model_id", "Model_IDs").replace(
        "access_list", "ACCESS_LISTS"
    ),
    "another spelling": PLAIN.replace("subtasks", "sub_tasks"),
    "two words": PLAIN.replace("subtasks", "Sub tasks"),
    "assigned to a dict": PLAIN.replace("model_id", "w['model_id']")
    .replace("subtasks", "w['subtasks']")
    .replace("access_list", 'w["access_list"]'),
    "typographic quotes": PLAIN.replace('"Solve it."', "“Solve it.”").replace('"all"', "“all”"),
    "a wide colon": PLAIN.replace(" =", "："),
    "bare all": PLAIN.replace('["all"]', '"all"'),
    "indices": PLAIN.replace('["all"]', "[0]"),
    "typographic spaces": PLAIN.replace(", ", ",\u202f").replace(" = ", "\u00a0=\u3000"),
    "another order": "\n".join(reversed(PLAIN.split("\n"))),
    "many lines": "model_id = [\n  1,  # one\n  0,\n]\n"
    'subtasks = [\n  "Solve it.",\n  "Check it.",\n]\n'
    'access_list = [\n  [],\n  ["all"],\n]',
    "a second attempt": f'model_id = [0]\nsubtasks = ["No."]\naccess_list = [[]]\nBetter:\n{PLAIN}',
    "a cut-off attempt before": f'model_id = [0, 1\nsubtasks = ["Sol\n\n{PLAIN}',
    "an attempt that breaks off before": f"model_id = [1, 0\n{PLAIN}",
    "a cut-off attempt behind": f'{PLAIN}\nOr:\nmodel_id = [3, 3]\nsubtasks = ["Do',
    "another question behind": f"{PLAIN}\n\nQuestion: What else?\n{OTHER}",
    "examples told again before": f"Example question: Why?\n{OTHER}\n\nQuestion: this one\n{PLAIN}",
}


@pytest.mark.parametrize("text", ACCEPTED.values(), ids=ACCEPTED)
def test_what_models_write_is_read(text):
    assert parse(text, 4).steps == TWO


def lists(model_id="[1, 0]", subtasks='["a", "b"]', access='[[], ["all"]]'):
    return f"model_id = {model_id}\nsubtasks = {subtasks}\naccess_list = {access}"


M = "model_id = [1]\n"
S = "subtasks = ['Solve it.']\n"
A = "access_list = [[]]\n"
M2 = "model_id = [2]\n"
S2 = "subtasks = ['Look it up.']\n"
A2 = "access_list = [['all']]\n"
FIRST = Step(1, "Solve it.", [])
SECOND = Step(2, "Look it up.", [])

# A description of two attempts -> (the text with their lists, the only step of the workflow that
# must be found in the text).
ATTEMPTS = {
    "the second is cut off, in the prompt's order": (S + M + A + M2 + S2, FIRST),
    "the second is cut off, in another order": (A + S + M + S2 + M2, FIRST),
    "both have the prompt's order, the second is cut off": (M + S + A + M2 + S2, FIRST),
    "the second is cut off within a list": (S + A + M + M2 + "subtasks = ['Look", FIRST),
    "the second is cut off after one list": (A + S + M + S2, FIRST),
    "the first is cut off, the second has the prompt's order": (S + M2 + S2 + A2, SECOND),
    "the first has two lists, the second the prompt's order": (A + S + M2 + S2 + A2, SECOND),
    "the first is cut off, the second has its order": (S + A + S2 + A2 + M2, SECOND),
    "the first is cut off within a list": ("model_id = [1\n" + M2 + S2 + A2, SECOND),
    "both are whole, in two orders": (S + M + A + M2 + A2 + S2, SECOND),
    "the second is whole and wrong": (M + S + A + S2 + "model_id = [9]\n" + A2, FIRST),
}


@pytest.mark.parametrize("text, step", ATTEMPTS.values(), ids=ATTEMPTS)
def test_an_attempt_that_is_cut_off_never_mixes_with_another(text, step):
    assert parse(text, 4).steps == [step]


NOT_WHOLE = [M + S + M2 + A2, S + M + S2, A + M + A2 + M2, M + M2 + S, S + A + S2 + A2]


@pytest.mark.parametrize("text", NOT_WHOLE, ids=range(len(NOT_WHOLE)))
def test_attempts_that_are_all_cut_off_make_no_workflow(text):
    with pytest.raises(WorkflowError, match="the list is missing"):
        parse(text, 4)


# The second element of access_list -> the steps that the second step sees, or WorkflowError if the
# element is invalid.
ACCESS = {
    '["All"]': [0],
    '["ALL"]': [0],
    '"ALL"': [0],
    "'All'": [0],
    "[' all ']": [0],
    '["all", 0]': [0],
    "null": [],
    "None": [],
    "[0, 0]": [0],
    "(0,)": WorkflowError,
    "0": WorkflowError,
    "[None]": WorkflowError,
    '["all", 1]': WorkflowError,
    '["all", "x"]': WorkflowError,
    '["none"]': WorkflowError,
    '["0"]': WorkflowError,
    "[1]": WorkflowError,
    "[0.0]": WorkflowError,
    "[[0]]": WorkflowError,
    '""': WorkflowError,
    "{}": WorkflowError,
    "true": WorkflowError,
    "[-1]": WorkflowError,
    "all": WorkflowError,
    "...": WorkflowError,
}


@pytest.mark.parametrize("element, sees", ACCESS.items(), ids=ACCESS)
def test_access_is_all_nothing_or_earlier_steps(element, sees):
    text = lists(access=f"[[], {element}]")
    if sees is WorkflowError:
        with pytest.raises(WorkflowError, match="access_list: .{10}") as caught:
            parse(text, 4)
        assert "object at" not in str(caught.value)
    else:
        assert parse(text, 4).steps[1].access == sees


COMPUTED = [
    "[0] * 6",
    "[0]*6",
    "[0]\\*6",
    "[0] * n",
    "[0] * len(subtasks)",
    "[0] + [1]",
    "[0] + rest",
    "[0][:1]",
    "[0].copy()",
    "[0] if hard else [1]",
    "[0, 1][0]",
]


@pytest.mark.parametrize("value", COMPUTED)
@pytest.mark.parametrize("name", ["model_id", "subtasks", "access_list"])
def test_a_list_that_would_have_to_be_computed_is_refused(name, value):
    text = M + S + A
    whole = {"model_id": "[1]", "subtasks": "['Solve it.']", "access_list": "[[]]"}[name]
    text = text.replace(whole, value.replace("[0]", whole).replace("[0, 1]", whole))
    with pytest.raises(WorkflowError, match=f"{name}: .*is computed"):
        parse(text, 4)


BEHIND = [
    "`",
    "**",
    "*",
    " ** these are the models",
    " * a remark",
    ", ",
    "  # 2 * 3",
    " (one)",
    ".",
]


@pytest.mark.parametrize("text", BEHIND)
def test_marks_and_remarks_may_follow_a_list(text):
    assert parse(PLAIN.replace("\n", f"{text}\n") + text, 4).steps == TWO


def test_another_list_is_one_more_row(monkeypatch):
    @dataclass
    class StepWithLimit(Step):
        limit: int = 100

    row = workflow.ListFormat(
        name="limits",
        spellings="limits?",
        part="a limit",
        elements="numbers",
        write=lambda step, i: step.limit,
        read=lambda element, i, workers: {"limit": element},
    )
    monkeypatch.setattr(workflow, "Step", StepWithLimit)
    monkeypatch.setattr(workflow, "LISTS", [*workflow.LISTS, row])
    text = as_lists(Workflow([StepWithLimit(1, "Solve it.", [], limit=7)]))
    assert text == 'model_id = [1]\nsubtasks = ["Solve it."]\naccess_list = [[]]\nlimits = [7]'
    assert "- a limit." in workflow.messages("q", 2)[0]["content"]


# Text -> a part of the error message.
REFUSED = {
    "I would ask model 0.": "model_id: the list is missing",
    f"model_id = [1]\nsubtasks = ['a'\n\nQuestion: Why?\n{OTHER}": "subtasks",
    f"model_id = [1]\nsubtasks = ['a\n\nQuestion: Why?\n{OTHER}": "subtasks",
    "model_id = [1, 0]\nsubtasks = ['a', 'b']": "access_list: the list is missing",
    lists(model_id="[1]"): "differ in length",
    lists("[]", "[]", "[]"): "0 steps",
    lists("[0] * 6", str(["a"] * 6), str([[]] * 6)): "model_id: the list is computed",
    lists(model_id="[4, 0]"): "step 0 names 4",
    lists(model_id='["1", 0]'): "step 0 names '1'",
    lists(model_id="[-1, 0]"): "model_id",
    lists(model_id="[one, 0]"): "does not belong there",
    lists(subtasks="[1, 2]"): "step 0 is no text",
    lists(access="[[], [1]]"): "step 1 reads [1], no list of earlier steps",
    lists(access="[[0], []]"): "step 0 reads [0]",
    lists(access="[[], 0]"): "step 1 reads 0",
    lists(subtasks='["a", "b'): "subtasks: a string is not closed",
    lists(subtasks='["a", __import__("os")]'): "does not belong there",
    lists(access="[[], [[[[]]]]]"): "access_list",
    lists(model_id="[" * 5000): "model_id",
    lists(model_id=f"[{'(1, ' * 199}{')' * 199}]"): "model_id",
    lists(model_id=f"[{'9' * 9000}, 0]"): "model_id",
}


@pytest.mark.parametrize("text, why", REFUSED.items(), ids=range(len(REFUSED)))
def test_what_is_no_workflow_is_refused_with_a_reason(text, why):
    with pytest.raises(WorkflowError, match=f"(?s).*{why.replace('[', '.').replace(']', '.')}"):
        parse(text, 4)


def test_steps_are_limited_and_workers_may_be_a_subset():
    six = lists("[0, 0, 0, 0, 0, 0]", str(["a"] * 6), str([[]] * 6))
    with pytest.raises(WorkflowError, match="6 steps, where 1 to 5"):
        parse(six, 4)
    assert len(parse(six, 4, max_steps=6).steps) == 6
    assert parse(PLAIN, [0, 1, 6]).steps == TWO
    with pytest.raises(WorkflowError, match="names 1"):
        parse(PLAIN, [0, 3, 5])


def test_empty_lists_keep_the_answer_only_in_a_further_round():
    assert parse(lists("[]", "[]", "[]"), 4, allow_empty=True) == Workflow([])


# What a model writes between double quotes -> the subtask that the model means.
STRINGS = {
    'Say \\"yes\\".': 'Say "yes".',
    "One line.\\nAnother.": "One line.\nAnother.",
    "a\\tb": "a\tb",
    "caf\\u00e9 \\ud83d\\ude00": "café 😀",
    "Compute \\frac{1}{2} + \\sqrt{3}.": "Compute \\frac{1}{2} + \\sqrt{3}.",
    "Is x \\neq y and \\theta \\times 2?": "Is x \\neq y and \\theta \\times 2?",
    "Take \\\\frac{1}{2}.": "Take \\frac{1}{2}.",
    # In a string with unescaped LaTeX, a double backslash is LaTeX's line break.
    "\\frac{a}{b} \\\\ c": "\\frac{a}{b} \\\\ c",
    "model_id = [3] is no list here": "model_id = [3] is no list here",
    "brackets ] and [ and # no comment": "brackets ] and [ and # no comment",
    "first\nsecond": "first\nsecond",
}


@pytest.mark.parametrize("written, said", STRINGS.items())
def test_strings_say_what_their_writer_meant(written, said):
    text = f'model_id = [0]\nsubtasks = ["{written}"]\naccess_list = [[]]'
    assert parse(text, 1).steps[0].subtask == said


def test_typographic_quotes_are_only_paired_with_each_other():
    text = lists("[0, 0]", "['“Yes” or “no', “Don't say \"x\", say \\frac12.”]", "[[], []]")
    said = [step.subtask for step in parse(text, 1).steps]
    assert said == ["“Yes” or “no", 'Don\'t say "x", say \\frac12.']
    with pytest.raises(WorkflowError, match="a string is not closed"):
        parse(lists(subtasks='[“a", "b"]'), 4)


def test_as_lists_is_read_back_whatever_the_subtask():
    rng = random.Random(0)
    characters = "ab \"'“”\\#[]{}=,:：\n\t$é😀"
    for _ in range(300):
        subtask = "".join(rng.choices(characters, k=rng.randint(0, 30)))
        steps = [Step(2, subtask, []), Step(0, "Go on.", [0]), Step(1, subtask, [1])]
        found = parse(as_lists(Workflow(steps)), 3).steps
        assert [(s.worker, s.access) for s in found] == [(2, []), (0, [0]), (1, [1])]
        if "\\" not in subtask:  # STRINGS tests backslashes.
            assert found[0].subtask == found[2].subtask == subtask
    subtasks = as_lists(Workflow(steps)).split("\n")[1].removeprefix("subtasks = ")
    assert json.loads(subtasks) == [steps[0].subtask, "Go on.", steps[2].subtask]


def test_any_text_is_parsed_or_refused():
    rng = random.Random(1)
    pieces = [
        "model_id",
        "subtasks",
        "access_list",
        " = ",
        ": ",
        "[",
        "]",
        "[]",
        '"',
        "'",
        '"all"',
        "0",
        "1",
        ",",
        "\n",
        "\\",
        "#",
        "'''",
        "Question:",
        "{",
        "}",
        "é",
        "ſubtasks = [",
        "“",
        "”",
    ]
    for _ in range(3000):
        text = "".join(rng.choices(pieces, k=rng.randint(0, 40)))
        try:
            workflow = parse(text, 2)
        except WorkflowError:
            continue
        assert 1 <= len(workflow.steps) <= 5


HOSTILE = [
    "model_id = [",
    '"' * 7,
    'model_id = ["\\',
    "access_list = [[[",
    "subtasks = ['a\n",
    "subtasks = [“a\n",
    "model_id (",
    "model_id: a[",
    "**model_id**:" + " " * 19,
    "Question: model_id = ",
    "\\n\\t\\frac",
    "model_id = [] if ",
    "model_id = [] * a",
    "model_id=[]" + " " * 19,
]


@pytest.mark.parametrize("piece", HOSTILE)
def test_the_cost_of_hostile_text_does_not_grow_with_its_length(piece):
    def seconds(n):
        started = time.process_time()
        with pytest.raises(WorkflowError):
            parse(piece * (n // len(piece)), 2)
        return time.process_time() - started

    seconds(60_000)
    assert seconds(2_000_000) < 20 * seconds(60_000) + 0.5  # only 50,000 characters are read
