"""workflow.parse: what parses, what does not and why; LaTeX and newlines in strings, against real LaTeX;
hostile text. `WORKFLOW_FUZZ=100000 python -m pytest tests/test_workflow_parse.py -k fuzz` is the long run."""
import json
import os
import random
import re
import subprocess
import sys
import time

import pytest

import workflow as wf
from workflow import Step, Workflow, WorkflowError, as_lists, messages, parse

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
GOOD = ('I would ask two.\nmodel_id = [1, 0]\nsubtasks = ["Solve it.", "Check it."]\n'
        'access_list = [[], ["all"]]')
CHECKED = Workflow([Step(1, "Solve it.", []), Step(0, "Check it.", [0])])


def lists(ids="[1, 0]", subtasks='["Solve it.", "Check it."]', access='[[], ["all"]]'):
    return f"model_id = {ids}\nsubtasks = {subtasks}\naccess_list = {access}"


def task(text):
    """The only subtask of a one-step workflow whose string literal is `text`."""
    return parse(lists("[0]", f"[{text}]", "[[]]"), 1).steps[0].subtask


@pytest.mark.parametrize("text", [
    GOOD,
    "```python\n" + lists() + "\n```\nThat should do.",
    '{"model_id": [1, 0], "subtasks": ["Solve it.", "Check it."], "access_list": [[], ["all"]]}',
    "```json\n{\n  \"model_id\": [\n    1,\n    0\n  ],\n"
    "  \"subtasks\": [\n    \"Solve it.\",\n    \"Check it.\"\n  ],\n"
    "  \"access_list\": [\n    [],\n    [\"all\"]\n  ]\n}\n```",
    "access_list=[[],'all',]\nsubtasks=['Solve it.','Check it.',]\nmodel_id=[1,0,]",
    "`model_id` = [1, 0]\n**subtasks**: not these\n"
    "'subtasks' : ['Solve it.', \"Check it.\"]\naccess_list:\n[[], [0]]",
    "model_id = [1,  # the strong one, ]\n 0]  # [7]\n"
    "subtasks = ['Solve it.', # \"quote\n 'Check it.'] // end\naccess_list = [[], // none\n ['all']]",
    lists("[5, 5]", '["a", "b"]', "[[], []]") + "\nNo, rather:\n" + lists(),
    lists() + "\nOr even model_id = [3, 2, ",  # the last list that is closed counts
    "model_id = [9, \nOnce more.\n" + lists(),
    # a draft of one list, and then all in another order
    "At first model_id = [0, 1, 0]\nsubtasks = ['Solve it.', 'Check it.']\naccess_list = [[], ['all']]\nmodel_id = [1, 0]",
    lists(access='["all", "all"]'), lists(access="[['all'], [0, 0]]"),
    lists(subtasks='["Solve " "it.", """Check it."""]'),
    "\0 \ud800 the model's plan [ ( { \" ' \n" + lists(),
    lists().replace("\n", "\r\n"),
    "my_model_id = [4]\nmodel_ids = [4]\n" + lists()])
def test_parse_takes_what_models_write(text):
    assert parse(text, 2) == CHECKED


@pytest.mark.parametrize("literal, subtask", [
    (r'"Show \frac{1}{2} \times \theta \neq \nu, \xi \in \Upsilon \to \beta."',
     r"Show \frac{1}{2} \times \theta \neq \nu, \xi \in \Upsilon \to \beta."),
    (r'"Show \\frac{1}{2} \\times \\nu."', r"Show \frac{1}{2} \times \nu."),
    (r'r"Show \frac{1}{2} \times."', r"Show \frac{1}{2} \times."),
    (r'"\(x\) and \[y\]\nThen\tgo on \\ stop"', "\\(x\\) and \\[y\\]\nThen\tgo on \\ stop"),
    (r'"caf\u00e9 \x41 😀"', "café A 😀"), (r'"\ud83d\ude00 \U0001F600"', "😀 😀"), ("'a\nb'", "a\nb"),
    (r'"60 km\/h"', "60 km/h"),
    (r'"\begin{matrix} 1 \\ 2 \end{matrix}"', r"\begin{matrix} 1 \\ 2 \end{matrix}"),
    (r'"\xcancel{x} \xi \underline{u}"', r"\xcancel{x} \xi \underline{u}"),
    ("“He said \"no\", the “fool””", "He said \"no\", the “fool”"), ("‘the model’s own’", "the model’s own"),
    ('"lists [1, ] and ] # no comment, // nor here, model_id = [3]"',
     "lists [1, ] and ] # no comment, // nor here, model_id = [3]"),
    ('"model_id = [3]"', "model_id = [3]"), ("'It\\'s \"so\"'", "It's \"so\""),
    ('"the model\'s"', "the model's"),
    ('"""two\nlines with "quotes\" """', 'two\nlines with "quotes" '), ('""', ""), ('"日本語"', "日本語")])
def test_parse_strings(literal, subtask):
    assert task(literal) == subtask


@pytest.mark.parametrize("text, reason", [
    ("", "model_id: the list is missing"), ("I cannot.", "model_id: the list is missing"),
    (lists().replace("subtasks", "tasks"), "subtasks: the list is missing"),
    ("model_id = [0]\nsubtasks = ['a'", "subtasks: the list is not closed"),
    (lists("[1]"), "differ in length"), (lists(access="[[]]"), "differ in length"),
    (lists(subtasks="['a', 'b', 'c']"), "differ in length"),
    (lists("[]", "[]", "[]"), "model_id: 0 steps"),
    (lists("[0]*6"), "model_id"), (lists(str([0] * 6), str(["a"] * 6), str([[]] * 6)), "model_id: 6 steps"),
    (lists("[2, 0]"), "step 0 names 2"), (lists("[0, -1]"), "-1"), (lists("[True, 0]"), "step 0 names True"),
    (lists("[1.0, 0]"), "step 0 names 1.0"), (lists("['1', 0]"), "step 0 names '1'"),
    (lists("[None, 0]"), "step 0 names None"),
    (lists("[[1], 0]"), r"step 0 names \[1\]"), (lists("[" + "9" * 5000 + ", 0]"), "model_id"),
    (lists(subtasks="['a', 1]"), "subtasks: step 1"), (lists(subtasks="['a', ['b']]"), "subtasks: step 1"),
    (lists(subtasks="['a', None]"), "subtasks"),
    (lists(access="[[], [1]]"), "step 1 reads 1"), (lists(access="[[0], []]"), "step 0 reads 0"),
    (lists(access="[[], [-1]]"), "access_list"),
    (lists(access="[[], [True]]"), "step 1 reads True"), (lists(access="[[], 0]"), "step 1 reads 0"),
    (lists(access="[[], ['none']]"), "reads 'none'"),
    (lists(access="[[], [[0]]]"), "access_list"), (lists(access="[[], None]"), "reads None"),
    (lists(access="[[], ['all', 5]]"), "reads 5"),
    (lists("[f(), 0]"), "model_id: 'f'"), (lists("[0 for i in range(2)]"), "model_id"),
    (lists("[1 0]"), "model_id"), (lists("[, 1, 0]"), "model_id"),
    (lists(subtasks="['a', f'{1}']"), "subtasks: 'f'"), (lists(subtasks="['a', b'b']"), "subtasks: 'b'"),
    (lists(subtasks="['a', 'b]"), "subtasks"),
    (lists("[...]"), "model_id"), (lists("(1, 0)"), "model_id: the list is missing"),
    (lists(subtasks="['a', 'b' + 'c']"), r"subtasks: '\+'"),
    (lists(subtasks="['a', 'half \\ud83d']"), "step 1 is no text"),
    (lists(subtasks="['a', 'half \ud83d']"), "subtasks"), (lists(subtasks="['a', 'nul \0']"), "subtasks"),
    (lists("[x, y]"), "model_id: 'x'")])
def test_parse_refuses_and_says_why(text, reason):
    with pytest.raises(WorkflowError, match=reason):
        parse(text, 2)


def test_parse_limits():
    assert parse(lists("[]", "[]", "[]"), 2, allow_empty=True).steps == []
    assert len(parse(lists(str([0] * 7), str(["a"] * 7), str([[]] * 7)), 1, max_steps=7).steps) == 7
    with pytest.raises(WorkflowError, match="2 steps, where 1 to 1"):
        parse(GOOD, 2, max_steps=1)
    w = parse(lists("[0, 0, 0, 0]", str(["a"] * 4), '[["all"], "all", [1, 0], [2]]'), 1)
    assert [s.access for s in w.steps] == [[], [0], [0, 1], [2]]
    assert [s.wrote_all for s in w.steps] == [True, True, False, False]
    assert parse(GOOD, 2).written == GOOD


def test_parse_evaluates_nothing(tmp_path):
    evil = f"__import__('os').system('touch {tmp_path}/pwned')"
    for text in (lists(f"[{evil}, 0]"), lists(subtasks=f"['a', {evil}]"),
                 lists(subtasks=f"['a', f'{{{evil}}}']"), lists(access=f"[[], {evil}]"),
                 f"model_id = [0]\n{evil}", f"model_id: [0].append({evil})"):
        with pytest.raises(WorkflowError):
            parse(text, 2)
    assert not os.listdir(tmp_path)


# ------------------------------------------------------------------------------------------------------------
# What a sensible reader takes, and what not


@pytest.mark.parametrize("text", [
    lists().replace("model_id", "**model_id**").replace("subtasks", "**subtasks**").replace(
        "access_list", "**access_list**"),
    "**model_id:** [1, 0]\n**subtasks:** ['Solve it.', 'Check it.']\n**access_list:** [[], ['all']]",
    "**model_id = [1, 0]**\n**subtasks = ['Solve it.', 'Check it.']**\n**access_list = [[], ['all']]**",
    lists().replace("model_id", r"model\_id").replace("access_list", r"access\_list"),
    r"- **model\_id** = [1, 0]"
    "\n- **subtasks** = ['Solve it.', 'Check it.']\n" + r"- **access\_list** = [[], ['all']]",
    lists().replace("model_id", "model_id: list[int]").replace("subtasks", "subtasks: List[str]").replace(
        "access_list", 'access_list: list[list[int] | Literal["all"]]'),
    "`model_id = [1, 0]`\n`subtasks = ['Solve it.', 'Check it.']`\n`access_list = [[], ['all']]`",
    "`model_id`: `[1, 0]`\n`subtasks`: `['Solve it.', 'Check it.']`\n`access_list`: `[[], ['all']]`",
    "model_id = [1, 0]\nsubtasks = [“Solve it.”, “Check it.”]\naccess_list = [[], [“all”]]",
    "model_id = [1, 0]\nsubtasks = [‘Solve it.’, ’Check it.’]\naccess_list = [[], [‘all’]]",
    "model_id＝［1，0］\nsubtasks：[\"Solve it.\"，\"Check it.\"]\naccess_list ＝ ［［］，［\"all\"］］",
    "model_id = [１, ０]\n" + lists().split("\n", 1)[1],
    "工作流如下model_id = [1, 0]\n子任务subtasks = ['Solve it.', 'Check it.']\n可见access_list = [[], ['all']]",
    lists() + "\nWith access_list = [] the second would see nothing.",
    lists() + "\naccess_list = [[], []] would hide the first.",
    "First I thought of access_list = [], which is short.\n" + lists(),
    "With access_list = [[], [1]] it fails, so:\n" + lists(),
    lists() + "\n" + lists("[x, y]"), lists() + "\n\nAgain: model_id = [0, 0]",
    lists() + "\n\nOnce more:\nmodel_id = [0, 0]\nsubtasks = [\"Solve",
    lists("[0]*6") + "\nWritten out:\n" + lists(),
    lists("[7, 8]") + "\nThere are two models only.\n" + lists(),
    lists(subtasks="['Solve it., 'Check it.']") + "\nA quote is missing.\n" + lists(),
    lists(subtasks="['Solve it.', 'Check it.") + "\n" + lists(),
    "Question: Why?\n" + lists() + "\n\nQuestion: And why not?\n\nI would.\n" + lists("[0]", "['No.']",
                                                                                      "[[]]"),
    lists() + "\n\n**Example question 2:** And why not?\n" + lists("[0, 0]"),
    lists() + "\n### Next question:\n" + lists("[0, 0]")])
def test_parse_takes_what_a_sensible_reader_takes(text):
    assert parse(text, 2) == CHECKED


@pytest.mark.parametrize("text, reason", [
    (lists("[0] * 2"), r"model_id: '\* 2"), (lists("[0] + [1]"), r"model_id: '\+ \[1\]"),
    (lists("[1, 0, 3][:2]"), "written out"),
    (lists("[0].append(1)"), "written out"), (lists(access="[[]] * 2"), "access_list"),
    # the next question's are not this one's
    (lists("[7, 8]") + "\n\nQuestion: And why not?\n\nI would.\n" + lists(), "step 0 names 7"),
    (lists().split("\n")[0] + "\n\nQuestion: Why?\n" + lists(), "subtasks: the list is missing"),
    ("Question: Why?\n\nI cannot.", "missing")])
def test_parse_refuses_what_is_no_plan_for_this_question(text, reason):
    with pytest.raises(WorkflowError, match=reason):
        parse(text, 2)


def test_the_prompt_without_subtasks():
    """Two lists make a workflow (App. B.7); a third is passed over, and every worker is told the same."""
    told = Workflow([Step(1, wf.SOLVE_IT, []), Step(0, wf.SOLVE_IT, [0])])
    assert parse(as_lists(told, subtasks=False), 2, subtasks=False) == parse(GOOD, 2, subtasks=False) == told
    assert "subtasks" not in as_lists(told, subtasks=False)
    with pytest.raises(WorkflowError, match="access_list: the list is missing"):
        parse("model_id = [1]", 2, subtasks=False)


# ------------------------------------------------------------------------------------------------------------
# LaTeX and newlines. The commands are KaTeX's list of what TeX knows (katex.org/docs/support_table) that
# begins with n, r or t.

COMMANDS = r"""nabla natural ncong ne nearrow neg negmedspace negthickspace negthinspace neq
newcommand newenvironment newline nexists ngeq ngeqq ngeqslant ngtr ni nleftarrow nLeftarrow
nLeftrightarrow nleftrightarrow nleq nleqq nleqslant nless nmid nobreak nobreakspace nolimits
normalsize not notag notin notni nparallel nprec npreceq nRightarrow nrightarrow nshortmid
nshortparallel nsim nsubseteq nsubseteqq nsucc nsucceq nsupseteq nsupseteqq ntriangleleft
ntrianglelefteq ntriangleright ntrianglerighteq nu nVDash nVdash nvDash nvdash nwarrow raise
raisebox rang rangle rarr rArr rbrace rbrack rceil real reals ref relax renewcommand require
restriction rfloor rgroup rhd rho right rightarrow rightarrowtail rightharpoondown rightharpoonup
rightleftarrows rightleftharpoons rightrightarrows rightsquigarrow rightthreetimes risingdotseq rlap
rm rmoustache root rotatebox rq rtimes rule rVert rvert tag tan tanh tau tbinom text textbf
textcolor textit textnormal textrm textsc textsf textstyle texttt tfrac tg th therefore theta
thetasym thickapprox thicksim thickspace thinspace tilde times tiny to toggle top triangle
triangledown triangleleft trianglelefteq triangleq triangleright trianglerighteq tt twoheadleftarrow
twoheadrightarrow""".split()
SAMPLE = os.environ.get("MATH_SAMPLE", os.path.join(ROOT, "..", "shared", "data", "math_test_sample.jsonl"))


@pytest.mark.parametrize("around", ["Show that a \\{} b.", "Simplify $x\\{} y$.", "\\{} is what it is.",
                                    "Take (\\{}{{x}}).", "Use $\\{}$, then\\nstop."])
def test_commands_keep_their_backslash(around):
    texts = [around.format(command) for command in COMMANDS]
    assert [task(f'"{text}"') for text in texts] == [text.replace("\\nstop", "\nstop") for text in texts]


WORDS = """a above and any are as at be because both by calculate check compute else end every
exists false find for from give go greater i if in into is it its less let line list mid move must
name next no nor not now number of on one only open or other output parallel plus print range read
real report rest result return right root round row rule say show sim so solve some state step sum
take tell test text than that the then there they this time times title to top total true try turn
under up use value we what when where which with write yes you""".split()


def test_newlines_and_tabs_before_words():
    """Before every word, small or capital, after the end of a sentence, a word, a bracket or a formula."""
    for word in [*WORDS, *(word.capitalize() for word in WORDS), "1.", "- so", "    return x"]:
        for before in ("First.", "First:", "f(x)", "$x$", "x = 1", "first", "Take \\frac{1}{2}."):
            assert task(f'"{before}\\n{word} more"') == f"{before}\n{word} more"
            assert task(f'"{before}\\r\\n{word} more"') == f"{before}\r\n{word} more"
    for word in ("return x", "Name", "print(1)", "1", "if x", "else", "value"):
        assert task(f'"a:\\n\\t{word}"') == f"a:\n\t{word}"


@pytest.mark.skipif(not os.path.exists(SAMPLE), reason="real LaTeX is not at hand")
def test_real_latex():
    """1,000 texts of MATH, as a model may write them into a list: with LaTeX as it is and quotes escaped,
    newlines raw or escaped too; and as Python and JSON write them. All come back as they were. (`\\left\\{`
    and its like are in hundreds of them.)"""
    with open(SAMPLE) as f:
        rows = [json.loads(line) for line in f]
    texts = [row[key] for row in rows for key in ("problem", "solution")]
    raw = [text.replace('"', '\\"') for text in texts]
    written = {"raw": [f'"{text}"' for text in raw],
               "raw, newlines escaped": ['"' + text.replace("\n", "\\n") + '"' for text in raw],
               "Python's": [repr(text) for text in texts], "JSON's": [json.dumps(text) for text in texts]}
    wrong = {way: sum(task(literal) != text for literal, text in zip(literals, texts)) for way,
             literals in written.items()}
    assert len(texts) == 1000 and wrong == dict.fromkeys(written, 0)


PIECES = ['"', "'", "\\", "\n", "\\nu", "\n" + "u = 1", "\t", "]", "[", ",", "#", "//", "model_id = [",
          "subtasks", '"""', "\\frac", "é", "😀", " ", "a",
          "all", "\x00", "\r", "\x7f", "\u2028", "ight", "\\u0041", "{", "}", "r", "9"]


def test_text_is_parsed_back():
    rng = random.Random(0)
    for _ in range(500):
        steps = [Step(rng.randrange(9), "".join(rng.choices(PIECES, k=rng.randrange(12))),
                      sorted(rng.sample(range(i), rng.randrange(i + 1))))
                 for i in range(rng.randrange(6))]
        assert parse("Plan.\n" + as_lists(Workflow(steps)), 9,
                     allow_empty=True) == Workflow(steps), as_lists(Workflow(steps))


def test_fuzz():
    """Whatever the text, parse returns a workflow that can be run, or raises WorkflowError."""
    rng, parsed = random.Random(1), 0
    seeds = [GOOD, lists("[1,\n0,]", r'["\frac{1}{2}", r"\d", """x""", ]', '[[], ["all"], [0, 1]]'),
             "```json\n{" + lists().replace(" =", ":") + "}\n```",
             lists("[]", "[]", "[]"), messages("?", 7)[0]["content"]]
    tokens = PIECES + ["[[", "]]", "\ud800", "1e9", "-1", "True", "None", "=", ":", "[0]", "b'", "f'{", "(",
                       "lambda:", "9" * 50, "access_list", "`"]
    for _ in range(int(os.environ.get("WORKFLOW_FUZZ", 5000))):
        text = rng.choice(seeds)
        for _ in range(rng.randrange(1, 6)):
            i, j = sorted(rng.randrange(len(text) + 1) for _ in range(2))
            j = min(j, i + rng.choice([0, 1, 2, 30]))
            text = text[:i] + rng.choice([lambda: "", lambda: rng.choice(tokens), lambda: text[i:j] * 2,
                                          lambda: chr(rng.randrange(0x250))])() + text[j:]
        try:
            w = parse(text, 7, allow_empty=True)
        except WorkflowError as e:
            assert re.match("(model_id|subtasks|access_list|the lists differ)", str(e))
            continue
        parsed += 1
        assert len(w.steps) <= 5 and parse(as_lists(w), 7, allow_empty=True) == w
        for i, s in enumerate(w.steps):
            assert type(s.worker) is int
            assert 0 <= s.worker < 7 and s.subtask.encode() is not None and all(0 <= j < i for j in s.access)
    assert parsed > 100  # the mutations are mild enough to reach the end of the parser, too


HOSTILE = {  # name -> text of about n characters
    "deep": lambda n: "model_id = " + "[" * n,
    "names": lambda n: "model_id = [" * (n // 12),
    "lists": lambda n: "model_id = [1]" * (n // 14),
    "spaces": lambda n: "model_id" + " " * n,
    "bare names": lambda n: "model_id " * (n // 9),
    "bold names": lambda n: "**model_id**" * (n // 12),
    "colons": lambda n: "model_id:" * (n // 9),
    "annotations": lambda n: "model_id: list[int " * (n // 19),
    "an annotation": lambda n: "model_id: list[" + "[" * n,
    "quotes escaped": lambda n: 'subtasks = ["' + '\\"' * (n // 2),
    "commands": lambda n: 'subtasks = ["' + "\\a" * (n // 2),
    "commands or words": lambda n: 'subtasks = ["' + "\\ne" * (n // 3) + '"]',
    "one command": lambda n: 'subtasks = ["\\' + "n" * n + '"]',
    "dollars": lambda n: 'subtasks = ["' + "$" * n + '"]',
    "surrogates": lambda n: 'subtasks = ["' + "\\ud83d" * (n // 6) + '"]',
    "wide escapes": lambda n: 'subtasks = ["' + "\\U0001F600" * (n // 10) + '"]',
    "quotes and backslashes": lambda n: "subtasks = [" + '"\\' * (n // 2),
    "quotes in turn": lambda n: "subtasks = [" + "'\"" * (n // 2),
    "triple quotes": lambda n: "subtasks = [" + '"""\\' * (n // 4),
    "triple quotes and two": lambda n: "subtasks = [" + "\'\'\'" + "''\\'" * (n // 4),
    "smart quotes": lambda n: "subtasks = [" + "“" * n,
    "smart quotes and spaces": lambda n: "subtasks = [" + "”     " * (n // 6),
    "smart strings": lambda n: "subtasks = [" + "“a”" * (n // 3),
    "adjacent strings": lambda n: "subtasks = [" + '"a" ' * (n // 4) + "]",
    "comments": lambda n: "subtasks = [" + "#" * n,
    "quotes and newlines": lambda n: "subtasks = [" + "'\n" * (n // 2),
    "newlines": lambda n: 'subtasks = ["' + "\n" * n,
    "names in a string": lambda n: 'subtasks = ["' + "\n        model_id   " * (n // 20),
    "digits": lambda n: "model_id = [" + "1" * n,
    "numbers": lambda n: "model_id = [" + "1," * (n // 2) + "]",
    "powers": lambda n: "model_id = [" + "1e1" * (n // 3) + "]",
    "minus": lambda n: "model_id = [" + "-" * n,
    "lists in a list": lambda n: "access_list = [" + "[]," * (n // 3),
    "letters": lambda n: "x" * n, "nul": lambda n: "\0" * n, "halves": lambda n: "\ud800" * n,
           "ticks": lambda n: "`" * n,
    "a word": lambda n: "model_id = [" + "a" * n + "]",
    "prefixes": lambda n: "subtasks = [" + "r" * n + '"' * n,
    "questions": lambda n: "model_id = [0]\n" + "Question " * (n // 9),
    "headings": lambda n: "model_id = [0]\n" + "#" * n,
    "a long subtask read again": lambda n:
        f'subtasks = ["{"a" * min(n // 3, 90_000)}"]\nmodel_id = [0]' + "\naccess_list = [[4]]" * (n // 30),
    "no text, read again": lambda n:
        f'subtasks = ["{"a" * min(n // 3, 90_000)}\\ud800"]'
        + "\nmodel_id = [0]\naccess_list = [[]]" * (n // 40),
}


def test_hostile_text_costs_linear_time():
    """240 KB of anything within two seconds (0.2 on an idle machine), and at most 30 times what an eighth of
    it takes: linear is 8 times, quadratic 64. In a process of its own, as a crash would be one of this one; one of three tries, in
    CPU time, as a machine has other things to do."""
    code = (f"import sys; sys.path[:0] = {[ROOT, os.path.dirname(__file__)]}; "
            "import test_workflow_parse as t; t.time_the_hostile()")
    subprocess.run([sys.executable, "-W", "error::SyntaxWarning", "-c", code], check=True, timeout=300)


def time_the_hostile():
    for name, text in HOSTILE.items():
        for _ in range(3):
            few, many = seconds_to_refuse(text(30_000)), seconds_to_refuse(text(240_000))
            if many < 2.0 and many < 30 * max(few, 0.002):
                break
        else:
            raise AssertionError((name, few, many))


def seconds_to_refuse(text):
    begun = time.process_time()
    with pytest.raises(WorkflowError) as e:
        parse(text, 7)
    assert len(str(e.value)) < 200
    return time.process_time() - begun
