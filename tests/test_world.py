"""Tests of the laptop world (its workers' replies and its questions), and of assets/unseen.py.

Replies are compared with replies worked out by hand. How often a worker acts on a vague
instruction, or on one for a different trade, is compared with the world's constants.
"""

import importlib
import os
import random
import re

import pytest

import eval as evaluation
import workers
from workers import (
    KINDS,
    LOCAL,
    PHRASES,
    QUESTION,
    SOLVE_IT,
    TASK,
    TRADES,
    VAGUE,
    laptop_questions,
    specialist,
)

NOTHING = "I am a {}; I find nothing here to work on."
UNSURE = "I am a {}; I do not know what to do."
LOST = "I have lost the thread."
OWN = {trade: [*works] for trade, (_, works) in TRADES.items()}


def chat(question, subtask, *turns):
    """Return the messages that workflow.py sends for a subtask.

    turns: (subtask, response) of each earlier step that the worker sees.
    """
    said = []
    for past, response in turns:
        said.append({"role": "user", "content": TASK + past})
        said.append({"role": "assistant", "content": response})
    said.append({"role": "user", "content": TASK + subtask})
    said[0]["content"] = f"{QUESTION}{question}\n\n{said[0]['content']}"
    return said


EARLIER = [
    {"role": "system", "content": "Be brief."},
    *chat("What is 1 + 1?", "Calculate it."),
    {"role": "assistant", "content": "2"},
]
GREETING = [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Hello."}]


@pytest.mark.parametrize(
    "name, messages, reply",
    [
        ("calculator", chat("What is 6 * 7?", "Calculate it."), "42"),
        (
            "calculator",
            chat("What is 6 * 7?", "Calculate it.", ("Do.", "3 - 5 is left")),
            "-2 is left",
        ),
        ("calculator", chat("What is diez + 4?", "Calculate it."), NOTHING.format("calculator")),
        ("translator", chat("Find diez + 4.", "Please translate IT"), "Find 10 + 4."),
        (
            "librarian",
            chat("Find the capital of Cuba shouted.", "Look it up."),
            "Find Havana shouted.",
        ),
        ("librarian", chat("Give me element number 8.", "look it up!"), "oxygen"),
        # The coder obeys the subtask and ignores what the question asks for.
        ("coder", chat("Find Lima shouted.", "Reverse it."), "amiL"),
        ("coder", chat("Find Lima shouted.", "leave out the VOWELS"), "Lm"),
        ("coder", chat("Find Lima shouted.", "Translate it. Then write it in capitals."), "LIMA"),
        ("calculator", chat("What is 6 * 7?", "Recalculate it."), UNSURE.format("calculator")),
        ("calculator", chat("What is 6 * 7?", "Sing."), UNSURE.format("calculator")),
        ("junior librarian", chat("Find element number 6.", "Look it up."), "carbon"),
        ("tired translator", chat("Give me element number 8 shouted.", "Translate it."), LOST),
        ("generalist", [{"role": "user", "content": "What is 6 * 7?"}], "I think it is 20."),
        # The question is the user's last turn that begins with QUESTION.
        ("calculator", EARLIER + chat("What is 6 * 7?", "Calculate it."), "42"),
        ("calculator", EARLIER + chat("Tell me 6 * 7.", "Calculate it.", ("Do.", "3 + 4")), "7"),
        # If no turn begins with QUESTION, the question is the user's last turn.
        ("calculator", GREETING + [{"role": "user", "content": "What is 9 - 3?"}], "6"),
    ],
)
def test_what_specialists_say(name, messages, reply):
    """Each chat is sent twice: runs are repeatable only if equal chats get equal replies."""
    assert specialist(name, messages) == specialist(name, messages) == reply


def share_that_works(trade, subtask):
    """Return the share of 600 questions on which a trade's worker acts when given this subtask."""
    questions = {
        "calculator": "Find {} + 2.",
        "translator": "Find {} + dos.",
        "librarian": "Find {} + the capital of Cuba.",
        "coder": "Find x{} shouted.",
    }
    replies = [specialist(trade, chat(questions[trade].format(n), subtask)) for n in range(600)]
    assert {UNSURE.format(trade)} >= {reply for reply in replies if reply.startswith("I am")}
    return sum(not reply.startswith("I am") for reply in replies) / len(replies)


@pytest.mark.parametrize("trade", TRADES)
def test_a_worker_listens(trade):
    others = [phrase for phrase in PHRASES if phrase not in (*VAGUE, *OWN[trade])]
    assert len(others) == len(PHRASES) - len(OWN[trade]) - len(VAGUE)
    for subtask in (*OWN[trade], f"{others[0]} {OWN[trade][0]}"):
        assert share_that_works(trade, subtask) == 1
    for subtask in (*VAGUE, SOLVE_IT, ""):
        assert share_that_works(trade, subtask) == pytest.approx(workers.VAGUE_WORKS, abs=0.06)
    for subtask in others:
        assert share_that_works(trade, subtask) == pytest.approx(workers.OTHERS_WORK, abs=0.06)
    assert share_that_works(trade, "Write a poem.") == 0


def test_a_coder_guesses_which_order_is_meant():
    guesses = [specialist("coder", chat(f"Find ab{n}e shouted.", VAGUE[0])) for n in range(600)]
    shouts, drops = 0, 0
    for n, said in enumerate(guesses):
        shouts += said == f"AB{n}E"
        drops += said == f"b{n}"
    for count in (shouts, drops):
        assert count / 600 == pytest.approx(workers.VAGUE_WORKS / 3, abs=0.06)


def solve(kind, question, instructions):
    """Let a kind's specialists work in turn, each with its instruction; return the last answer."""
    turns = []
    for trade, instruction in zip(KINDS[kind][0], instructions, strict=True):
        turns.append((instruction, specialist(trade, chat(question, instruction, *turns))))
    return turns[-1][1]


@pytest.mark.parametrize("kind", KINDS)
def test_the_specialists_that_a_kind_needs_solve_it_and_fewer_do_not(kind):
    rows = [row for row in laptop_questions("train") + laptop_questions("test") if row[0] == kind]
    trades = KINDS[kind][0]
    for _, question, answer in random.Random(kind).sample(rows, 40):
        firsts = [OWN[trade][0] for trade in trades[:-1]]
        assert answer in [solve(kind, question, [*firsts, last]) for last in OWN[trades[-1]]]
        if len(trades) > 1:
            for name in LOCAL["local"][:-1]:
                alone = [specialist(name, chat(question, phrase)) for phrase in PHRASES]
                assert answer not in alone


def test_questions_are_split_by_their_expressions():
    train, test = laptop_questions("train"), laptop_questions("test")

    def expressions(questions):
        return {re.sub(r"^(What is|Find|Tell me|Give me) |[?.]$", "", row[1]) for row in questions}

    assert not expressions(train) & expressions(test)
    assert 0.2 < len(test) / len(train + test) < 0.3
    assert {kind for kind, _, _ in train} == {kind for kind, _, _ in test} == set(KINDS)
    assert ("foreign", "Find dos * tres.", "6") in train + test


# ---- assets/unseen.py ----------------------------------------------------------------------------

UNSEEN = os.path.join(evaluation.ASSETS, "unseen.py")


@pytest.fixture
def unseen(monkeypatch):
    monkeypatch.setattr(workers, "PHRASES", PHRASES)
    monkeypatch.setattr(workers, "TRADES", {**TRADES})
    return importlib.import_module("assets.unseen")


def test_an_unseen_pool_has_what_its_question_needs(unseen):
    pool = workers.load_pool("local")
    notes = [worker.note for worker in pool]
    fifth = workers.Worker("python", function=f"{UNSEEN}:sorter", note="a sorter")
    sizes = {"three workers": 3, "seven workers": 7}

    for test in unseen.TESTS:
        problems = evaluation.load("laptop", "test", 9)
        if test == "fifth trade":
            problems = unseen.sorting_problems()
        for problem in problems:
            drawn = unseen.pool_for(problem, test, pool, fifth)
            names = [worker.name for worker in drawn]
            assert len(drawn) == sizes.get(test, 5)
            assert {*unseen.KINDS[problem.kind][0]} <= {*names}
            again = unseen.pool_for(problem, test, pool, fifth)
            assert names == [worker.name for worker in again]
    assert notes == [worker.note for worker in pool]  # the pool's own workers are not reworded


def test_unseen_pools_are_measured_one_by_one(unseen, monkeypatch, capsys):
    monkeypatch.setattr(unseen, "N_HELD_OUT", 9)
    monkeypatch.setattr(unseen, "N_SORTING", 2)
    unseen.main([os.path.join(evaluation.ASSETS, "laptop")])
    printed = capsys.readouterr().out
    assert all(f"\n{test} " in printed for test in unseen.TESTS)
    assert "of 4 workflows ask the sorter" in printed


def test_a_sorter_listens_like_any_other_worker(unseen):
    unseen.add_the_fifth_trade()
    for question, reply in (("What is planet sorted?", "aelnpt"), ("Find Peru.", NOTHING)):
        assert unseen.sorter(chat(question, "Sort its letters.")) == reply.format("sorter")
    assert unseen.sorter(chat("What is planet sorted?", "Sing.")) == UNSURE.format("sorter")
