"""Tests of how problems of the laptop world, of benchmarks and of users' files are read.

Benchmarks come from a local server that imitates Hugging Face's hub and dataset viewer as their
documentation describes them.
"""

import base64
import json
import pickle
import re
import threading
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import pytest

import eval as evaluation
from eval import GRADERS, grade, load, own_grader, prepare, read_problems


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Yield a server that acts as the hub and its dataset viewer.

    The server has `rows`, {(data set, config, split): rows}, and `files`, {"data set/path": bytes}.
    It records requests in `seen`, and answers the next ones with the statuses in `faults`.
    """
    monkeypatch.chdir(tmp_path)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            url = urlsplit(self.path)
            hub.seen.append((self.command, self.path, self.headers["Authorization"]))
            if hub.faults:
                return self.answer(hub.faults.pop(0), b"busy", {"Retry-After": "0"})
            if url.path == "/rows":
                asked = {key: value for key, (value,) in parse_qs(url.query).items()}
                rows = hub.rows.get((asked["dataset"], asked["config"], asked["split"]))
                if rows is None:
                    return self.answer(404, b'{"error": "Not found."}')
                start, n = int(asked["offset"]), int(asked["length"])
                some = range(len(rows))[start : start + n]
                page = [{"row_idx": i, "row": rows[i], "truncated_cells": []} for i in some]
                return self.answer(
                    200, json.dumps({"rows": page, "num_rows_total": len(rows)}).encode()
                )
            body = hub.files.get(url.path.replace("/resolve/main", "").removeprefix("/datasets/"))
            if body is None:
                return self.answer(404, b"", {"X-Error-Code": "EntryNotFound"})
            self.answer(200, body, {"ETag": '"1"', "X-Repo-Commit": "c" * 40})

        do_HEAD = do_GET

        def answer(self, status, body, headers=()):
            self.send_response(status)
            for name, value in {**dict(headers), "Content-Length": len(body)}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, *arguments):
            pass

    hub = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.rows, hub.files, hub.seen, hub.faults = {}, {}, [], []
    threading.Thread(target=hub.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{hub.server_port}")
    monkeypatch.setattr(evaluation, "VIEWER", f"http://127.0.0.1:{hub.server_port}")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    yield hub
    hub.shutdown()
    hub.server_close()


def jsonl(rows) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


# The laptop world


def test_the_laptop_worlds_splits_share_no_expression():
    train, test = load("laptop", "train"), load("laptop", "test")

    def expressions(problems):
        return {
            re.fullmatch(r"(What is|Find|Tell me|Give me) (.*)[?.]", p.question)[2]
            for p in problems
        }

    assert not expressions(train) & expressions(test)
    assert {p.kind for p in train} == {p.kind for p in test} and len(
        {p.kind for p in test[:9]}
    ) == 9
    assert load("laptop", "test", 10) == test[:10]
    for problem in test[:50]:
        assert grade(problem, problem.answer) and not grade(problem, problem.answer + "0")


# Benchmarks


def test_math500_is_split_by_a_hash_of_its_questions(hub):
    rows = [
        {"problem": f"What is {i} + 1?", "answer": str(i + 1), "level": i % 5 + 1}
        for i in range(500)
    ]
    hub.files["HuggingFaceH4/MATH-500/test.jsonl"] = jsonl(rows)
    train, test = load("math500", "train"), load("math500", "test")
    assert 270 < len(train) < 330 and 70 < len(test) < 130
    assert not {p.question for p in train} & {p.question for p in test}
    problem = test[0]
    assert (
        problem.question.endswith(GRADERS["math"].instruction)
        and problem.kind == "math500"
        and problem.level > 0
    )
    assert grade(problem, f"So it is \\boxed{{{problem.answer}}}.") and not grade(
        problem, "\\boxed{-1}"
    )
    seen = len(hub.seen)
    assert (
        load("math500", "test") == test and len(hub.seen) == seen
    )  # from the file that is there now


def test_parquet_comes_by_the_viewers_pages_and_a_killed_fetch_goes_on(hub, monkeypatch):
    small = evaluation.SOURCES["mmlu/test"]._replace(count=950)
    monkeypatch.setitem(evaluation.SOURCES, "mmlu/test", small)
    rows = [
        {"question": f"q{i}", "choices": ["a", "b", "c", "d"], "answer": i % 4} for i in range(950)
    ]
    hub.rows["cais/mmlu", "all", "test"] = rows
    hub.faults = [429, 503]
    problems = load("mmlu", "test", 20)
    assert len(problems) == 20 and "A. a\nB. b" in problems[0].question
    assert grade(problems[0], f"<answer>{problems[0].answer}</answer>")
    seen = len(hub.seen)
    assert load("mmlu", "test", 20) == problems and len(hub.seen) == seen
    pages = sorted(evaluation.os.listdir("data/cais/mmlu/all/test"))
    evaluation.os.remove(f"data/cais/mmlu/all/test/{pages[3]}")
    assert load("mmlu", "test", 20) == problems and len(hub.seen) == seen + 1


def test_a_benchmark_that_changed_or_is_missing_is_an_error_that_says_what_to_do(hub):
    with pytest.raises(OSError, match="set HF_TOKEN"):
        load("gpqa", "test")
    hub.rows["yentinglin/aime_2025", "default", "train"] = [{"problem": "q", "answer": "1"}] * 29
    with pytest.raises(OSError, match="not all 30 rows"):
        load("aime25", "test")


def test_gpqa_shuffles_its_choices_by_a_fixed_seed(hub):
    head = "Question,Correct Answer,Incorrect Answer 1,Incorrect Answer 2,Incorrect Answer 3\n"
    lines = "".join(f'"What, {i}?",right,wrong,worse,worst\n' for i in range(198))
    hub.files["Idavidrein/gpqa/gpqa_diamond.csv"] = (head + lines).encode()
    problems = load("gpqa", "test")
    assert len(problems) == 198 and len({p.answer for p in problems}) == 4
    for problem in problems[:20]:
        assert f"{problem.answer}. right" in problem.question
        assert grade(problem, f"<answer>{problem.answer}</answer>")


def programs(n: int) -> list[dict]:
    hidden = json.dumps([{"input": "2", "output": "3", "testtype": "stdin"}])
    packed = base64.b64encode(zlib.compress(pickle.dumps(hidden))).decode()
    public = json.dumps([{"input": "1", "output": "2", "testtype": "stdin"}])
    row = {
        "starter_code": "",
        "difficulty": "hard",
        "metadata": "{}",
        "public_test_cases": public,
        "private_test_cases": packed,
    }
    return [{"question_id": f"{i}", "question_content": f"Add {i}.", **row} for i in range(n)]


def test_livecodebenchs_hidden_tests_stay_packed_until_they_are_used(hub):
    hub.files["livecodebench/code_generation_lite/test6.jsonl"] = jsonl(programs(175))
    problem = load("livecodebench", "test", 3)[0]
    assert {*problem.extra["tests"]} == {"file", "at"}
    assert evaluation.tests_of(problem) == [["1", "2"], ["2", "3"]]


def test_a_pickle_that_is_more_than_text_is_never_run(hub):
    class Bomb:
        def __reduce__(self):
            return open, ("boom", "w")

    rows = programs(175)
    for row in rows:
        row["private_test_cases"] = base64.b64encode(zlib.compress(pickle.dumps(Bomb()))).decode()
    hub.files["livecodebench/code_generation_lite/test6.jsonl"] = jsonl(rows)
    problem = load("livecodebench", "test", 1)[0]
    with pytest.raises(ValueError, match="no tests of"):
        evaluation.tests_of(problem)
    assert not evaluation.os.path.exists("boom")


def test_prepare_takes_the_hardest_and_load_reads_them(hub, capsys):
    math = [
        {"problem": f"What is {i} + 1?", "answer": str(i + 1), "level": i % 5 + 1}
        for i in range(500)
    ]
    hub.files["HuggingFaceH4/MATH-500/test.jsonl"] = jsonl(math)
    hub.files["livecodebench/code_generation_lite/test.jsonl"] = jsonl(programs(400))
    hub.rows["cais/mmlu", "all", "auxiliary_train"] = [
        {"question": f"q{i}", "choices": ["a", "b", "c", "d"], "answer": i % 4}
        for i in range(99842)
    ]
    hub.rows["openbmb/RLPR-Train-Dataset", "default", "train"] = [
        {
            "prompt": [{}, {"content": f"r{i}"}],
            "extra_info": {"reasoning_score": i % 7},
            "reward_model": {"ground_truth": str(i)},
        }
        for i in range(77687)
    ]
    prepare(evaluation.Settings())
    problems = load("paper", "train")
    kinds = [problem.kind for problem in problems]
    assert {kind: kinds.count(kind) for kind in kinds} == evaluation.MIXES["paper"]
    levels = sorted(p.level for p in load("math500", "train"))
    assert sorted(p.level for p in problems if p.kind == "math500") == levels[-240:]
    assert {p.kind for p in load("recursion", "train")} == {"livecodebench", "rlpr"}
    assert "licence" in capsys.readouterr().out


WORKERS = """
import collections, re, threading

lock, asked = threading.Lock(), collections.Counter()

def note(text):
    with lock, open("calls", "a") as file:
        file.write(text + "\\n")
    return text

def adder(messages):
    a, b = re.findall(r"[0-9]+", messages[0]["content"])[:2]
    return note(f"\\\\boxed{{{int(a) + int(b)}}}")

def lucky(messages):
    with lock:
        asked[str(messages)] += 1
    return adder(messages) if asked[str(messages)] == 1 else note("I was lucky before.")

def lost(messages):
    return note("I do not know.")
"""


def test_prepare_asks_twice_and_keeps_what_can_teach(hub, tmp_path, monkeypatch, capsys):
    """`prepare` selects problems that one worker solves both times and another worker neither time.

    It also stores paid replies, so that a second run pays only for the rest.
    """
    rows = [{"problem": f"What is {i} + 1?", "answer": str(i + 1)} for i in range(500)]
    hub.files["HuggingFaceH4/MATH-500/test.jsonl"] = jsonl(rows)
    monkeypatch.setattr(evaluation, "MIXES", {"paper": {"math500": 4}})
    monkeypatch.setattr(evaluation, "CANDIDATES", 6)
    monkeypatch.setattr(evaluation, "check_sandbox", lambda: None)
    (tmp_path / "tools.py").write_text(WORKERS)

    def pool(*names):
        row = {"protocol": "python", "price": [0, 1], "params": {"max_tokens": 1000}}
        rows = [{**row, "function": f"tools.py:{name}"} for name in names]
        (tmp_path / "pool.json").write_text(json.dumps(rows))
        return evaluation.Settings(pool="pool.json", budget=1.0, replay="data/replies")

    # The budget pays for a few calls. The next run makes only the remaining ones.
    settings = pool("adder", "lost")
    settings.budget = 0.0055
    with pytest.raises(SystemExit, match="the budget is spent, or .* larger --budget"):
        prepare(settings)
    paid = len((tmp_path / "calls").read_text().splitlines())
    assert 0 < paid < 24
    settings.budget = 1.0
    prepare(settings)
    assert len((tmp_path / "calls").read_text().splitlines()) == 6 * 2 * 2
    printed = capsys.readouterr().out
    assert re.search(
        r"best single worker in hindsight +100.0 .*\n.* by other half +100.0 .*\noracle +100.0\n",
        printed,
    )
    assert re.search(r"either of two workers +100.0\n.*two answers +50.0\n", printed)
    assert re.search(r"problems that can teach +100.0\n", printed)
    assert len(load("paper", "train")) == 4

    # One right answer in two tries counts as luck. No other worker is right here, so no problem can
    # teach.
    prepare(pool("lucky", "lost"))
    printed = capsys.readouterr().out
    assert re.search(
        r"best single worker in hindsight +50.0 .*\n.* by other half +50.0 .*\noracle +50.0\n",
        printed,
    )
    assert re.search(r"problems that can teach +0.0\n", printed)


def test_a_lost_call_teaches_nothing():
    nan = float("nan")
    right = evaluation.np.array([[[1, 1, nan, 1], [1, 1, 1, 0]], [[0, nan, 0, 0], [0, 0, 0, 0]]])
    assert evaluation.can_teach(right).tolist() == [True, False, False, False]


# Problems of a user's file


def write(tmp_path, *rows) -> str:
    file = tmp_path / "mine.jsonl"
    file.write_text(
        "".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows)
    )
    return str(file)


def test_an_own_question_is_told_how_to_answer_and_marked_by_its_grader(tmp_path):
    file = write(
        tmp_path,
        {"question": "What is 40 + 2?", "answer": "42", "grader": "math"},
        {
            "question": "Who wrote Emma?",
            "answer": "Jane Austen",
            "grader": "short",
            "kind": "books",
        },
        {
            "question": "A fruit?",
            "answer": "B",
            "grader": "letter",
            "extra": {"choices": ["stone", "apple"]},
        },
        {
            "question": "The capital of France? Answer in \\boxed{}.",
            "answer": "Paris",
            "grader": "exact",
        },
    )
    math, short, letter, exact = load(file, "test")
    assert (
        math.question.endswith("\\boxed{}.")
        and grade(math, "It is \\boxed{42}.")
        and math.kind == "math"
    )
    assert short.kind == "books" and grade(short, "<answer>jane austen</answer>")
    assert "A. stone\nB. apple" in letter.question and grade(letter, "<answer>B</answer>")
    assert exact.question.count("\\boxed") == 1 and grade(exact, "\\boxed{paris.}")
    assert not grade(exact, "\\boxed{Rome}")


def test_a_new_row_of_graders_may_read_what_it_likes(tmp_path, monkeypatch):
    """This grader reads a bare number, while most others look for tags or a box first."""
    monkeypatch.setitem(
        GRADERS, "number", own_grader(lambda p, said: float(said) == float(p.answer))
    )
    [problem] = read_problems(
        write(tmp_path, {"question": "2 + 2?", "answer": "4", "grader": "number"})
    )
    assert grade(problem, "4.0") and not grade(problem, "5")


def test_a_grader_that_asks_a_judge_is_not_called_when_a_file_is_read(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setitem(GRADERS, "judge", own_grader(lambda p, said: asked.append(said) or True))
    monkeypatch.setitem(GRADERS, "bare", GRADERS["code"]._replace(check=asked.append, extra=()))
    rows = [{"question": f"q{i}", "answer": "a", "grader": "judge"} for i in range(5)]
    read_problems(write(tmp_path, *rows, {**rows[0], "grader": "bare"}))
    assert asked == []
    assert grade(read_problems(write(tmp_path, *rows))[0], "x") and asked == ["x"]


def test_half_an_emoji_becomes_a_question_mark(tmp_path):
    half, whole = r"\ud83d", r"\ud83d\ude00"
    row = f'"question": "Pick {half}{whole}", "kind": "{half}", "answer": "A", "grader": "letter"'
    file = write(tmp_path, f'{{{row}, "extra": {{"choices": ["{half}", "b"]}}}}\n')
    [problem] = read_problems(file)
    text = json.dumps(problem.__dict__, ensure_ascii=False)
    assert text.encode() and "Pick ?😀" in problem.question and problem.kind == "?"


def test_two_rows_with_one_id_are_refused(tmp_path):
    row = {"question": "q", "answer": "a", "grader": "exact", "id": "one"}
    with pytest.raises(ValueError, match="line 2: two lines have one id, one"):
        read_problems(write(tmp_path, row, {**row, "question": "another"}))


def test_a_kind_that_would_break_a_table_is_refused(tmp_path):
    row = {"question": "q", "answer": "a", "grader": "exact", "kind": "a\nb"}
    with pytest.raises(ValueError, match="kind: 'a.*b' is not one line"):
        read_problems(write(tmp_path, row))


def questions_of(file: str, split: str) -> set[str]:
    return {problem.question for problem in load(file, split)}


def numbered(n: int, **more) -> list[dict]:
    return [{"question": f"q{i}", "answer": f"a{i}", "grader": "exact", **more} for i in range(n)]


def test_from_twenty_questions_on_about_a_fifth_is_held_out(tmp_path):
    rows = numbered(200)
    file = write(tmp_path, *rows)
    assert 20 < len(load(file, "test")) < 60
    assert len(load(file, "train")) + len(load(file, "test")) == 200
    file = write(tmp_path, *rows[:19])
    assert load(file, "train") == load(file, "test") and len(load(file, "test")) == 19
    file = write(tmp_path, *rows[:5] * 5)  # 25 lines, five questions
    assert load(file, "train") == load(file, "test") and len(load(file, "test")) == 25


def test_a_file_whose_hashes_are_all_high_still_holds_out_a_question(tmp_path):
    rows = [row for row in numbered(60) if evaluation.hash_of(row["question"]) > 0.2][:20]
    file = write(tmp_path, *rows)
    assert (len(load(file, "train")), len(load(file, "test"))) == (19, 1)


def test_a_question_stays_in_its_split_when_its_file_changes(tmp_path):
    """A line is inserted at the top, and the questions get another grader and other answers."""
    file = write(tmp_path, *numbered(100))
    train, test = questions_of(file, "train"), questions_of(file, "test")
    assert questions_of(write(tmp_path, *numbered(101)[::-1]), "test") >= test

    rows = [{**row, "grader": "short", "kind": "new"} for row in numbered(100)]
    assert {q.split()[0] for q in questions_of(write(tmp_path, *rows), "test")} == {
        q.split()[0] for q in test
    }
    assert not train & test


def test_equal_questions_are_in_one_split(tmp_path):
    file = write(tmp_path, *numbered(24), *numbered(24, kind="again"))
    train, test = questions_of(file, "train"), questions_of(file, "test")
    assert not train & test and len(train | test) == 24
    assert len(load(file, "test")) == 2 * len(test)


def test_kinds_take_turns_where_a_file_is_sorted_by_them(tmp_path):
    """Otherwise the first held-out problems, which checkpoints use, would all be of one kind."""
    rows = [
        {**row, "kind": kind} for row, kind in zip(numbered(60), "a" * 20 + "b" * 20 + "c" * 20)
    ]
    file = write(tmp_path, *rows)
    assert [p.kind for p in load(file, "test", 3)] == ["a", "b", "c"]
    assert [p.kind for p in load(file, "train", 6)] == ["a", "b", "c"] * 2
    assert load(file, "train") == load(file, "train")


# A row -> what the error says about it.
FAULTS = {
    '{"question": "q", "answer": "a"}': "grader has to be one of exact, same, math",
    '{"question": "q", "grader": "exact"}': '"answer" is missing',
    '{"question": "q", "answer": 42, "grader": "math"}': "answer has to be a text, not 42",
    '{"question": "q", "answer": "4", "grader": "math", "level": "5"}': 'a whole number, not "5"',
    '{"question": "q", "answer": "4", "grader": ["math"]}': 'grader has to be a text, not ["math"]',
    '{"question": "q", "answer": "B", "grader": "letter"}': '"choices"',
    '{"question": "q", "answer": "C", "grader": "letter", "extra": {"choices": ["a", "b"]}}': (
        "nothing equals 'C'"
    ),
    '{"question": "q", "answer": "C", "grader": "letter", "extra": {"choices": [1, 2]}}': (
        "choices: expected a list of texts, not [1, 2]"
    ),
    '{"question": "q", "answer": "C", "grader": "letter", "extra": []}': "an object, not []",
    '{"question": "q", "answer": "", "grader": "math"}': "nothing equals ''",
    '{"question": "q", "answer": "a", "grader": "exact", "colour": 1}': "no field 'colour'",
    '{"question": "", "answer": "a", "grader": "exact"}': "0 characters",
    '{"question": ': "expected a JSON object in UTF-8 (Expecting value",
    '["question"]': "expected a JSON object",
    "[" * 100_000: "expected a JSON object",
    "7": "expected a JSON object",
    '{"question": "q", "answer": "a", "grader": "exact", "kind": "calls"}': (
        "kind: 'calls' is the name of a table's column"
    ),
}
CODE = '{"question": "q", "answer": "", "grader": "code", "extra": {"function": null, "tests": %s}}'
for tests in ('"x"', "5", "[]", "[5]", '[["1"]]', '[["1", 2]]', '{"file": "a"}', "null"):
    FAULTS[CODE % tests] = "tests: expected pairs of texts, [input, output], not"


@pytest.mark.parametrize("row, why", FAULTS.items(), ids=range(len(FAULTS)))
def test_what_a_row_lacks_is_said_with_its_line(tmp_path, row, why):
    file = write(tmp_path, {"question": "q", "answer": "a", "grader": "exact"}, f"{row}\n")
    with pytest.raises(ValueError) as error:
        read_problems(file)
    assert "line 2" in str(error.value) and why in str(error.value)
    assert not re.search(r"Error|object is not|argument|__init__|NoneType", str(error.value))


def test_unknown_names_are_errors_that_list_what_there_is(tmp_path):
    for name in ("labtop", "gpqa/test"):  # gpqa/test must not be trained on
        with pytest.raises(ValueError, match="there are laptop"):
            load(name, "train")
    with pytest.raises(OSError, match="is missing"):
        load(str(tmp_path / "none.jsonl"), "test")
