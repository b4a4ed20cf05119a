"""Benchmarks and training mixes, against a local server that answers as the documentation of the hub and of its dataset viewer says."""
import base64
import json
import os
import pickle
import random
import shutil
import threading
import time
import zlib
from collections import Counter
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from urllib.parse import parse_qs, urlsplit

import pytest
import urllib3.util.retry

import eval as evaluation
import workers
from eval import ASK, Problem, grade, load, prepare, read_problems, stored_tests, write_problems


class Hub:
    """The hub (0) and its CDN (1). `rows`: (data set, config, split) -> rows, served as /rows does; `files`: path below /resolve/main/ ->
    bytes, redirected to the CDN as files in LFS are, which says 416 where nothing is left. `seen`: (server, path, Range, Authorization) of each request.
    `faults`: of the next answers (status, headers, bytes after which the body ends or None); None: no fault. `gated`: data sets for which
    the token must be hf_secret."""

    def __init__(self):
        self.rows, self.files, self.seen, self.faults, self.gated = {}, {}, [], [], set()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                server, url = hub.servers.index(self.server), urlsplit(self.path)
                hub.seen.append((server, self.path, self.headers["Range"], self.headers["Authorization"]))
                status, headers, self.cut = (hub.faults.pop(0) if hub.faults else None) or (0, {}, None)
                if status:
                    return self.answer(status, headers, b'{"error": "as told"}')
                if url.path == "/rows":
                    return self.answer(*hub.page({key: value for key, (value,) in parse_qs(url.query).items()}, self.headers))
                body = hub.files.get(url.path.removeprefix("/cdn"))
                if body is None:
                    return self.answer(404, {"X-Error-Code": "EntryNotFound"})
                if server == 0:
                    return self.answer(302, {"Location": f"{hub.url(1)}/cdn{url.path}"})
                if self.headers["Range"] is None:
                    return self.answer(200, {}, body)
                start = int(self.headers["Range"][6:-1])
                self.answer(206 if start < len(body) else 416, {}, body[start:])

            def answer(self, status, headers, body=b""):
                self.send_response(status)
                for name, value in {**headers, "Content-Length": len(body)}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body[:self.cut])
                self.close_connection = self.cut is not None

            def log_message(self, *args):
                pass

        self.servers = [ThreadingHTTPServer(("127.0.0.1", 0), Handler) for _ in range(2)]
        for server in self.servers:
            threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def url(self, i):
        return f"http://127.0.0.1:{self.servers[i].server_port}"

    def page(self, asked, headers):
        """huggingface.co/docs/dataset-viewer/rows; the errors are those of its openapi.json."""
        if asked["dataset"] in self.gated and headers["Authorization"] != "Bearer hf_secret":
            return 401, {"X-Error-Code": "ExternalUnauthenticatedError"}, json.dumps({"error":
                "The dataset does not exist, or is not accessible without authentication (private or gated)."}).encode()
        rows, start, n = self.rows.get((asked["dataset"], asked["config"], asked["split"])), int(asked["offset"]), int(asked["length"])
        if rows is None:
            return 404, {"X-Error-Code": "ResponseNotFound"}, b'{"error": "Not found."}'
        if n > 100:
            return 422, {}, b'{"error": "Parameter \'length\' must not be greater than 100"}'
        page = [{"row_idx": start + i, "row": row, "truncated_cells": []} for i, row in enumerate(rows[start:start + n])]
        features = [{"feature_idx": i, "name": name, "type": {"dtype": "string", "_type": "Value"}} for i, name in enumerate(rows[0])]
        return 200, {}, json.dumps({"features": features, "rows": page, "num_rows_total": len(rows), "num_rows_per_page": 100,
                                    "partial": False}).encode()

    def offsets(self):
        return [int(parse_qs(urlsplit(path).query)["offset"][0]) for _, path, _, _ in self.seen]


def packed(tests, text=None):
    """LiveCodeBench's hidden tests as they are published."""
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(tests) if text is None else text))).decode()


def lcb(i, difficulty="hard", starter="", function=None, id="abc300_{}", content="Add the two numbers of line {}."):
    kind = "functional" if starter else "stdin"
    return {"question_title": "Sum", "question_content": content.format(i), "platform": "atcoder", "question_id": id.format(i),
            "contest_id": "abc300", "contest_date": "2023-05-20T00:00:00", "starter_code": starter, "difficulty": difficulty,
            "metadata": json.dumps({"func_name": function} if function else {}),
            "public_test_cases": json.dumps([{"input": f"1 {i}\n", "output": str(1 + i), "testtype": kind}]),
            "private_test_cases": packed([{"input": f"2 {i}\n", "output": str(2 + i), "testtype": kind}])}


ROWS = {  # as the data sets have them
    ("HuggingFaceH4/MATH-500", "default", "test"): [
        {"problem": f"What is $1/{i}$?", "solution": "", "answer": f"\\frac{{1}}{{{i}}}", "subject": "Algebra", "level": i % 5 + 1,
         "unique_id": f"test/algebra/{i}.json"} for i in range(1, 501)],
    ("cais/mmlu", "all", "auxiliary_train"): [
        {"question": f"Which is {i}?", "subject": "", "choices": [str(i + k) for k in range(4)], "answer": 0} for i in range(2020)],
    ("cais/mmlu", "all", "test"): [
        {"question": "All of the above?\n", "subject": "anatomy", "choices": ["x", "y", "z", f"{i}"], "answer": i % 4} for i in range(8)],
    ("openbmb/RLPR-Train-Dataset", "default", "train"): [
        {"data_source": "WebInstruct-verified", "ability": "Business", "reward_model": {"ground_truth": f"{i}%", "style": "rule"},
         "prompt": [{"role": "system", "content": "Think."}, {"role": "user", "content": f"What costs {i}?"}],
         "extra_info": {"answer_type": "Percentage", "category": "Business", "difficulty": "University",
                        "reasoning_score": None if i % 3 == 0 else i % 3 + 2}} for i in range(2030)],
    ("yentinglin/aime_2025", "default", "train"): [
        {"id": i, "problem": f"Find the sum of the digits of {i}.", "answer": f"{i}", "solution": ""} for i in range(30)],
    ("bigcode/bigcodebench-hard", "default", "v0.1.4"): [
        {"task_id": f"BigCodeBench/{13 + i}", "complete_prompt": 'import os\n\ndef task_func():\n    """Say 7."""\n', "instruct_prompt": "",
         "canonical_solution": "    return 7", "code_prompt": "import os\ndef task_func():\n", "test": "import unittest\n...",
         "entry_point": "task_func", "libs": "['os']"} for i in range(148)],
    ("Idavidrein/gpqa", "gpqa_diamond", "train"): [
        {"Question": f"Which spin has {i}?", "Correct Answer": f"right {i}\n", "Record ID": f"rec{i}",
         **{f"Incorrect Answer {k}": f"wrong {k}" for k in (1, 2, 3)}} for i in range(198)],
}
METHOD = "class Solution:\n    def add(self, a: int, b: int) -> int:\n        "
V1 = [lcb(1000 + i, ("easy", "medium", "hard")[i % 3]) for i in range(250)]
V6 = [lcb(0), lcb(1, "easy", METHOD, "add", "3{}", "Add two numbers.")]


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub with small data sets, an empty current directory, and waits that are only noted."""
    hub = Hub()
    hub.rows.update(ROWS)
    lines = {"test.jsonl": V1, "test6.jsonl": V6}
    hub.files.update({f"/datasets/livecodebench/code_generation_lite/resolve/main/{name}":
                      b"".join(json.dumps(row).encode() + b"\n" for row in rows) for name, rows in lines.items()})
    hub.gated.add("Idavidrein/gpqa")
    for name, source in list(evaluation.SOURCES.items()):
        rows = ROWS[source.repository, *source.what.split("/")] if "/" in source.what else lines[source.what]
        monkeypatch.setitem(evaluation.SOURCES, name, replace(source, rows=len(rows)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_ENDPOINT", hub.url(0) + "/")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    hub.waits = []
    monkeypatch.setattr(urllib3.util.retry, "time", SimpleNamespace(sleep=hub.waits.append, time=time.time))
    stored_tests.cache_clear()
    yield hub
    for server in hub.servers:
        server.shutdown()
        server.server_close()


def by_id(name, split="test"):
    found = load(name, split)
    assert len({p.id for p in found}) == len(found) and {p.kind for p in found} == {name}
    return {p.id: p for p in found}


def test_mathematics_comes_as_problems_that_ask_for_a_box(hub):
    """As in App. A.2: 300 of the 500 are for training, 100 others for testing, whatever the order of the rows."""
    train, test = by_id("math500", "train"), by_id("math500", "test")
    assert (len(train), len(test)) == (300, 100) and not train.keys() & test.keys()
    p = (train | test)[next(id for id in train | test if id.endswith("6"))]
    i = int(p.id.split("/")[1]) + 1
    assert p == Problem(f"math500/{i - 1}", f"What is $1/{i}$?\n\nPut the final answer in \\boxed{{}}.", f"\\frac{{1}}{{{i}}}", "math500",
                        "math", i % 5 + 1)
    assert by_id("aime25")["aime25/12"] == Problem(
        "aime25/12", "Find the sum of the digits of 12.\n\nPut the final answer in \\boxed{}.", "12", "aime25", "math")
    hub.rows["HuggingFaceH4/MATH-500", "default", "test"] = ROWS["HuggingFaceH4/MATH-500", "default", "test"][::-1]
    shutil.rmtree("data")
    assert {p.question for p in load("math500", "test")} == {p.question for p in test.values()}


def test_choices_stand_in_the_question_with_letters(hub):
    found = by_id("mmlu")
    assert found["mmlu/6"] == Problem(
        "mmlu/6", "All of the above?\n\nA. x\nB. y\nC. z\nD. 6\n\nPut the letter of the right option in <answer> tags.",
        "C", "mmlu", "letter", 0, {"choices": ["x", "y", "z", "6"]})
    train = by_id("mmlu", "train")
    assert len(train) == 2020 and train["mmlu/2019"].question.startswith("Which is 2019?\n\nA. 2019\nB. 2020")


def test_gpqa_is_shuffled_by_a_fixed_seed(hub):
    """The letter follows the right option, all letters occur about equally often, and a second run gives the same."""
    first = by_id("gpqa")
    letters = []
    for p in first.values():
        right = p.extra["choices"].index(f"right {p.id.split('/')[1]}")
        assert p.answer == "ABCD"[right] and f"\n{p.answer}. right" in p.question
        assert sorted(p.extra["choices"])[1:] == ["wrong 1", "wrong 2", "wrong 3"]
        letters.append(p.answer)
    assert len(first) == 198 and all(30 < letters.count(letter) < 70 for letter in "ABCD")
    assert by_id("gpqa") == first


def test_rlpr_has_one_split_for_all(hub):
    """About three fifths are for training, a fifth for testing, by the question: equal ones are never on both sides."""
    train, test = load("rlpr", "train"), load("rlpr", "test")
    assert len(hub.seen) == 41 and 0.55 < len(train) / 2030 < 0.65 and 0.17 < len(test) / 2030 < 0.23
    assert not {p.question for p in train} & {p.question for p in test} and len({p.id for p in train + test}) == len(train + test)
    p = next(p for p in train + test if "costs 4?" in p.question)
    assert (p.answer, p.grader, p.level) == ("4%", "short", 3) and {q.level for q in train} == {0, 3, 4}
    assert p.question == "What costs 4?\n\nPut the final answer, as short as possible, in <answer> tags."
    hub.rows["openbmb/RLPR-Train-Dataset", "default", "train"] = ROWS["openbmb/RLPR-Train-Dataset", "default", "train"][::-1]
    shutil.rmtree("data")
    assert {p.question for p in load("rlpr", "test")} == {p.question for p in test}


@pytest.mark.parametrize("name, split, share", [("mmlu", "train", 1), ("rlpr", "train", 3 / 5), ("rlpr", "test", 1 / 5)])
def test_of_a_large_data_set_only_what_is_drawn_is_fetched(hub, name, split, share):
    """Slices of 50 from all over the data set, until there is enough; a larger draw begins with the smaller one and fetches the rest."""
    few = load(name, split, 80)
    asked = len(hub.seen)
    assert len(few) == 80 and asked * 50 * share < 2 * 80 + 50 and all("length=50" in path for _, path, _, _ in hub.seen)
    assert load(name, split, 60) == few[:60] and len(hub.seen) == asked
    more = load(name, split, 160)
    assert more[:80] == few and len(more) == 160 and asked < len(hub.seen) < 3 * asked and len(set(hub.offsets())) == len(hub.seen)
    numbers = [int(p.id.split("/")[1]) for p in load(name, split)]
    assert len(numbers) == len(set(numbers)) and numbers != sorted(numbers) and len(set(hub.offsets())) == len(hub.seen) == 41
    assert sorted(hub.offsets())[-1] == 2000  # and that slice is shorter


def test_bigcodebench_has_what_its_unit_tests_need(hub):
    p = by_id("bigcodebench")["bigcodebench/BigCodeBench/13"]
    row = ROWS["bigcode/bigcodebench-hard", "default", "v0.1.4"][0]
    assert (p.grader, p.extra) == ("unittest", {"test": row["test"], "entry_point": "task_func", "code_prompt": row["code_prompt"]})
    assert p.question == f"```python\n{row['complete_prompt'].strip()}\n```\n\n{ASK['unittest']}" and "```python block" in p.question


def test_livecodebench_keeps_its_hidden_tests_in_the_file(hub):
    """V1 to train, V6 to test; a program reads standard input, a function has its name; the tests are public and hidden ones."""
    assert len(by_id("livecodebench", "train")) == 250
    found = by_id("livecodebench")
    program, method = found["livecodebench/abc300_0"], found["livecodebench/31"]
    assert program.grader == method.grader == "code" and (program.level, method.level) == (3, 1)
    assert program.question == f"Add the two numbers of line 0.\n\n{ASK['code']}" and "standard input" in ASK["code"]
    assert method.question == f"Add two numbers.\n\n```python\n{METHOD.strip()}\n```\n\n{ASK['unittest']}"
    assert (program.extra["function"], method.extra["function"]) == (None, "add")
    assert stored_tests(program.id, **program.extra["tests"]) == [["1 0\n", "1"], ["2 0\n", "2"]]
    assert stored_tests(method.id, **method.extra["tests"]) == [["1 1\n", "2"], ["2 1\n", "3"]]
    write_problems("some.jsonl", list(found.values()))
    assert os.path.getsize("some.jsonl") < 3000 and "2 0" not in open("some.jsonl").read()


def test_hidden_tests_of_another_problem_are_not_taken(hub):
    p = by_id("livecodebench")["livecodebench/abc300_0"]
    file = p.extra["tests"]["file"]
    with open(file, "rb") as f:
        lines = f.readlines()
    with open(file, "wb") as f:
        f.writelines(lines[::-1])
    with pytest.raises(ValueError, match="byte 0: no tests of livecodebench/abc300_0 .*there stands 31"):
        stored_tests(p.id, **p.extra["tests"])


def test_tests_that_are_plain_json_are_read_too(tmp_path):
    file = tmp_path / "plain.jsonl"
    file.write_text(json.dumps({**lcb(5), "private_test_cases": '[{"input": "a", "output": "b", "testtype": "stdin"}]'}) + "\n")
    assert stored_tests("livecodebench/abc300_5", str(file), 0)[1] == ["a", "b"]


class Runs:
    def __reduce__(self):
        return os.mkdir, ("ran",)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_hidden_tests_are_cut_out_of_their_pickle_which_never_runs(protocol, tmp_path, monkeypatch):
    """Of every protocol and size, with brackets in the tests; and beside something that would run, or alone."""
    monkeypatch.chdir(tmp_path)
    stored_tests.cache_clear()
    for text in ("a", "x" * 100_000, "[{[1, 2]}]", "ä" * 200):
        for wrapped in (lambda tests: tests, lambda tests: [tests, Runs()]):
            tests = json.dumps([{"input": text, "output": text, "testtype": "stdin"}])
            row = lcb(5) | {"private_test_cases": base64.b64encode(zlib.compress(pickle.dumps(wrapped(tests), protocol))).decode()}
            with open("row.jsonl", "w") as f:
                f.write(json.dumps(row) + "\n")
            assert stored_tests("livecodebench/abc300_5", "row.jsonl", 0)[1:] == [[text, text]]
            stored_tests.cache_clear()
    alone = base64.b64encode(zlib.compress(pickle.dumps(Runs(), protocol))).decode()
    with open("row.jsonl", "w") as f:
        f.write(json.dumps(lcb(5) | {"private_test_cases": alone}) + "\n")
    with pytest.raises(ValueError, match="no tests of livecodebench/abc300_5"):
        stored_tests("livecodebench/abc300_5", "row.jsonl", 0)
    assert os.listdir() == ["row.jsonl"]


def test_what_unpacks_beyond_the_bound_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(evaluation, "TESTS_MAX", 1 << 16)
    (tmp_path / "row.jsonl").write_text(json.dumps(lcb(5) | {"private_test_cases": packed([{"input": "x" * 10_000_000}])}))
    with pytest.raises(ValueError, match="cut off, or more than 65,536 bytes"):
        stored_tests("livecodebench/abc300_5", str(tmp_path / "row.jsonl"), 0)


@pytest.mark.parametrize("hidden", ["!", "AAAA", packed(None, "no json"), packed(None, "[" * 100_000), packed({"input": 1}),
                                    packed([["a", "b"]]), packed(None, "whole")[:-8], None])
def test_damaged_hidden_tests_are_an_error_that_says_where(hidden, tmp_path):
    file = tmp_path / "damaged.jsonl"
    file.write_text(json.dumps({**lcb(5), "private_test_cases": hidden}) + "\n")
    with pytest.raises(ValueError, match=r"damaged.jsonl, byte 0: no tests of livecodebench/abc300_5 \("):
        stored_tests("livecodebench/abc300_5", str(file), 0)


def test_pages_of_a_hundred_are_asked_for_once(hub):
    load("math500", "train")
    assert hub.offsets() == [0, 100, 200, 300, 400] and "length=100" in hub.seen[0][1] and not hub.waits
    load("math500", "test")
    assert len(hub.seen) == 5


def test_limits_and_server_errors_are_waited_for(hub):
    """Retry-After is obeyed, 5xx are tried again with growing waits, and nothing is asked twice after all."""
    told = [(429, "0"), None, (429, "7"), (500, ""), (429, ""), (502, ""), (503, "")]
    hub.faults = [t and (t[0], {"Retry-After": t[1]} if t[1] else {"RateLimit": '"api";r=0;t=55'}, None) for t in told]
    assert len(load("math500", "train")) == 300
    assert hub.offsets() == [0, 0, 100, 100, 100, 100, 100, 100, 200, 300, 400]
    assert hub.waits[0] == 7 and hub.waits[1:] == sorted(hub.waits[1:]) and len(hub.waits) == 5


def test_a_server_that_stays_down_ends_the_patience_after_five_minutes(hub):
    hub.faults = [None] + [(500, {"X-Error-Code": "UnexpectedApiError"}, None)] * 99
    with pytest.raises(OSError, match="lacks rows of https://huggingface.co/datasets/HuggingFaceH4/MATH-500"):
        load("math500", "train")
    assert 300 < sum(hub.waits) < 600
    hub.faults, before = [], len(hub.seen)
    assert len(load("math500", "train")) == 300 and hub.offsets()[before:] == [100, 200, 300, 400]


def test_a_torn_page_is_not_kept_and_the_next_run_goes_on(hub):
    hub.faults = [None, (0, {}, 2000)]
    with pytest.raises(OSError, match="Try again to go on where it stopped"):
        load("math500", "train")
    seen = len(hub.seen)
    assert len({p.question for p in load("math500", "train")}) == 300 and hub.offsets()[seen:] == [100, 200, 300, 400]


@pytest.mark.parametrize("change", [
    lambda page: page.update(num_rows_total=501), lambda page: page["rows"].pop(), lambda page: page["rows"][7].update(row_idx=8),
    lambda page: page["rows"][7]["truncated_cells"].append("problem"), lambda page: page.pop("rows"), lambda page: page.update(rows=7)])
def test_pages_that_are_not_what_was_asked_for_are_not_taken(hub, change, monkeypatch):
    page = hub.page

    def changed(asked, headers):
        status, told, body = page(asked, headers)
        body = json.loads(body)
        change(body)
        return status, told, json.dumps(body).encode()
    monkeypatch.setattr(hub, "page", changed)
    with pytest.raises(OSError, match="lacks rows of .*MATH-500"):
        load("math500", "train")
    assert os.listdir("data/HuggingFaceH4/MATH-500/default/test") == []


def test_a_large_file_goes_on_in_the_next_run_until_nothing_is_left(hub):
    hub.faults = [None, (0, {}, 100_000)]  # the redirect, then the CDN's body
    size = len(hub.files["/datasets/livecodebench/code_generation_lite/resolve/main/test.jsonl"])
    with pytest.raises(OSError, match="(?s)test.jsonl lacks rows .*Try again to go on.*code_generation_lite/resolve/main/test.jsonl there"):
        load("livecodebench", "train")
    assert len(load("livecodebench", "train")) == 250
    first, second, last = [int(asked[6:-1]) for server, _, asked, _ in hub.seen if server == 1]
    assert first == 0 and 0 < second <= 100_000 and last == size
    assert os.path.getsize("data/livecodebench/code_generation_lite/test.jsonl") == size
    seen = len(hub.seen)
    load("livecodebench", "train")
    assert len(hub.seen) == seen


def test_a_file_of_another_length_is_refused(hub):
    hub.files["/datasets/livecodebench/code_generation_lite/resolve/main/test6.jsonl"] += b"{}\n"
    with pytest.raises(ValueError, match="test6.jsonl has not the 2 rows"):
        load("livecodebench", "test")


def test_the_token_goes_to_the_hub_alone(hub):
    load("livecodebench", "test")
    load("gpqa", "test")
    assert {(server, token) for server, _, _, token in hub.seen} == {(0, "Bearer hf_secret"), (1, None)}
    assert "hf_secret" not in "".join(path for _, path, _, _ in hub.seen)
    written = b"".join(open(os.path.join(folder, name), "rb").read() for folder, _, names in os.walk("data") for name in names)
    assert b"right 7" in written and b"hf_secret" not in written


@pytest.mark.parametrize("token", [None, "hf_other", "hf_se\ncret", "hf_sec…ret"])
def test_what_is_gated_says_what_to_do_and_no_token(hub, token, monkeypatch, capfd):
    monkeypatch.setenv("HF_TOKEN", token) if token else monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(OSError) as e:
        load("gpqa", "test")
    told = str(e.value)
    assert "https://huggingface.co/datasets/Idavidrein/gpqa" in told and "accept terms" in told and "HF_TOKEN" in told
    assert "data/Idavidrein/gpqa/gpqa_diamond/train" in told and "hf_" not in told + "".join(capfd.readouterr())
    assert len(hub.seen) == (token in (None, "hf_other")) and ("401" in told) == (len(hub.seen) == 1)


def test_what_cannot_be_had_can_be_put_there_by_hand(hub):
    """The error names page and place of a file; one that is put there is taken without a request."""
    lines = hub.files.pop("/datasets/livecodebench/code_generation_lite/resolve/main/test6.jsonl")
    with pytest.raises(OSError, match="HTTP 404(?s:.*)code_generation_lite/resolve/main/test6.jsonl there. If"):
        load("livecodebench", "test")
    with open("data/livecodebench/code_generation_lite/test6.jsonl", "wb") as f:
        f.write(lines)
    asked = len(hub.seen)
    assert len(load("livecodebench", "test")) == 2 and len(hub.seen) == asked


@pytest.mark.parametrize("rows", ['{"rows": [{"problem": "?"}]}', '{"rows": [{"problem": 1, "answer": 2}]}', '{"rows": [7]}', '{"rows": 7}', "{}", "[]", "7",
                                  '{"rows": [{"problem": "?", "answer": "1"}', "[" * 100_000])
def test_rows_of_another_form_are_an_error_that_names_file_and_page(hub, rows):
    os.makedirs("data/yentinglin/aime_2025/default/train")
    with open("data/yentinglin/aime_2025/default/train/0.json", "w") as f:
        f.write(rows)
    with pytest.raises(ValueError, match="default/train has not the 30 rows that https://huggingface.co/datasets/yentinglin/aime_2025 had"):
        load("aime25", "test")


def test_the_order_is_shuffled_and_fixed(hub):
    first = load("math500", "train")
    numbers = [int(p.id.split("/")[1]) for p in first]
    assert first == load("math500", "train") and sorted(numbers) != numbers and load("math500", "train", 5) == first[:5]


def test_what_is_written_is_read(tmp_path):
    problems = [Problem("a/1", "Wie groß?\u2028\n", "ä", "own", "math", 3, {"x": [1, None]}), Problem("b", "", "-", "math"),
                Problem("c", "?", "1", "any", "code", 0, {"function": None, "tests": [["1\n", "2\n"]]})]
    file = str(tmp_path / "some.jsonl")
    write_problems(file, problems)
    assert read_problems(file) == problems == load(file, "train") == load(file, "test")


def test_blanks_around_an_answer_mean_nothing(tmp_path):
    file = tmp_path / "mine.jsonl"
    file.write_text(json.dumps({**GOOD, "answer": " Paris\n"}))
    [problem] = load(str(file), "test")
    assert problem.answer == "Paris" and grade(problem, "<answer>Paris</answer>")


def test_a_users_file_needs_three_fields(tmp_path):
    file = tmp_path / "mine.jsonl"
    file.write_text('{"question": "1+1?", "answer": "2", "kind": "sums"}\n{"question": "2*2?", "answer": "4", "kind": "math", "id": "x"}\n'
                    '{"question": "3?", "answer": "B", "kind": "math", "grader": "letter", "level": 2, "extra": {"choices": ["3", "4"]}}')
    assert load(str(file), "test") == [Problem("mine.jsonl/1", "1+1?", "2", "sums"), Problem("x", "2*2?", "4", "math", "math"),
                                       Problem("mine.jsonl/3", "3?", "B", "math", "letter", 2, {"choices": ["3", "4"]})]


GOOD = {"question": "1+1?", "answer": "2", "kind": "sums"}


@pytest.mark.parametrize("line, told", [
    *((json.dumps({k: v for k, v in GOOD.items() if k != key}), f"{key} missing or not a string") for key in GOOD),
    *((json.dumps({**GOOD, key: wrong}), f"{key} missing or not a string") for key in ("answer", "id", "kind") for wrong in (2, None)),
    ('{"answer": "2"}', "question, kind missing"), (json.dumps({**GOOD, "choises": []}), "choises"),
    (json.dumps({**GOOD, "kind": "letter"}), "letter needs .extra.: {.choices.: …}"), (json.dumps({**GOOD, "grader": "code"}), "needs .extra.: {.function.: …, .tests.: …}"),
    *((json.dumps({**GOOD, "kind": "letter", "answer": answer, "extra": {"choices": choices}}), told) for answer, choices, told in (
        ("B", [1, 2], "choices .* texts"), ("B", "xyz", "choices .* texts"), ("(b)", ["x", "y"], "'\\(b\\)' is none of A, B"),
        ("C", ["x", "y"], "'C' is none"), ("L", ["x"] * 12, "choices .* texts"), ("AB", ["x", "y"], "'AB' is none"))),
    *((json.dumps({**GOOD, "kind": "code", "extra": {"function": None, "tests": tests}}), "tests .* pairs") for tests in (
        [], [["1"]], [[1, 2]], [{"input": "1", "output": "2"}], "12", 7)),
    *((json.dumps({**GOOD, "kind": "code", "extra": {"function": function, "tests": tests}}), told) for function, tests, told in (
        ("", [["1", "2"]], "a name, or null"), (5, [["1", "2"]], "a name, or null"), ("f(x)", [["1", "2"]], "a name, or null"),
        ("f", [["abc", "2"]], "JSON, not 'abc'"), ("f", [["1", "True"]], "JSON, not 'True'"), ("f", [["1 2", "3"]], "JSON, not '1 2'"),
        (None, [["ab", ""], ["c", "\n"]], "expect no output"))),
    (json.dumps({**GOOD, "kind": "sum", "extra": {"function": None, "tests": [["1", "2"]]}}), "tests need .grader.: .code."),
    (json.dumps({**GOOD, "kind": "letter", "extra": ["choices"]}), "extra is not an object"),
    (json.dumps({**GOOD, "question": "\ud83d?"}), "surrogates not allowed"),
    (json.dumps({**GOOD, "kind": "Math"}), r"kind 'Math': did you mean \['math'\]. Else say .grader.: .exact."),
    (json.dumps({**GOOD, "grader": "maths"}), "no grader 'maths'"), (json.dumps({**GOOD, "grader": ["math"]}), "no grader"),
    *((json.dumps({**GOOD, "kind": kind, "grader": grader, "answer": answer}), "give the bare answer") for kind, grader, answer in (
        ("sums", "exact", ""), ("sums", "exact", " \n"), ("sums", "math", "\\boxed{2}"), ("sums", "short", ""))),
    (json.dumps({**GOOD, "kind": "all"}), "'all' is a column"), (json.dumps({**GOOD, "kind": "calls"}), "'calls' is a column"),
    (json.dumps({**GOOD, "kind": "multiple-choice", "extra": {"choices": ["1", "2"]}}), 'choices need "grader": "letter"'),
    ("[1]", ""), ("7", ""), ("{", ""), ("[" * 100_000, ""), ('{"question": "\xff', "")])
def test_a_users_file_with_a_fault_names_line_and_field(tmp_path, line, told):
    file = tmp_path / "mine.jsonl"
    file.write_bytes(json.dumps(GOOD).encode() + b"\n" + line.encode("latin-1") + b"\n" + json.dumps(GOOD).encode())
    with pytest.raises(ValueError, match=f"mine.jsonl, line 2: .*{told}"):
        load(str(file), "test")


@pytest.mark.parametrize("name, split", [("laptop", "dev"), ("aime25", "train"), ("nothing", "test"), ("", "train"), ("paper", "dev")])
def test_an_unknown_name_or_split_lists_what_there_is(hub, name, split):
    with pytest.raises(ValueError, match="there are laptop, laptop:1, laptop:2, paper, recursion, .*aime25 .test., .*jsonl"):
        load(name, split)
    assert not hub.seen and not os.listdir()


def test_a_missing_file_is_named(hub):
    with pytest.raises(FileNotFoundError, match=r"data/paper.jsonl is missing; python eval.py prepare"):
        load("paper", "train")
    with pytest.raises(FileNotFoundError, match=r"mine.jsonl is missing; write it: a line is"):
        load("mine.jsonl", "test")


def test_prepare_writes_both_mixes_without_what_is_tested(hub, capsys):
    """The counts, the hardest first, nothing of a test, the kinds by turns, the same bytes again, and what the program prints; the second
    mix is a part of the first; and of the large data sets no more is fetched than the candidates take."""
    evaluation.main(["prepare"])
    told, paper, recursion = capsys.readouterr().out, load("paper", "train"), load("recursion", "train")
    assert len([1 for _, path, _, _ in hub.seen if "/rows" in path]) < 5 + 13 + 25  # of 5 + 41 + 41
    assert len(paper) == 960 and len({p.id for p in paper}) == 960 and len({p.id for p in recursion}) == 350
    assert [p.kind for p in paper[:4]] == [p.kind for p in paper[-4:]] == ["math500", "mmlu", "rlpr", "livecodebench"]
    assert [sum(p.kind == kind for p in recursion) for kind in ("livecodebench", "rlpr")] == [175, 175]
    assert {p.id for p in recursion} < {p.id for p in paper} and all(p in paper for p in recursion)
    tested = {p.question for kind in ("math500", "mmlu", "rlpr", "livecodebench") for p in load(kind, "test")}
    assert not tested & {p.question for p in paper}
    for kind in ("math500", "rlpr", "livecodebench"):
        chosen = [p.level for p in paper if p.kind == kind]
        assert sorted(chosen) == sorted(p.level for p in load(kind, "train", evaluation.CANDIDATES))[-240:]
    assert "data/paper.jsonl: 960 problems" in told and "data/recursion.jsonl: 350 problems" in told
    assert "rlpr: 240 problems taken of 600, 240 wanted" in told
    before = {name: open(f"data/{name}", "rb").read() for name in ("paper.jsonl", "recursion.jsonl")}
    asked = len(hub.seen)
    random.seed(5)
    prepare([])
    assert before == {name: open(f"data/{name}", "rb").read() for name in before} and len(hub.seen) == asked
    p = next(p for p in paper if p.kind == "livecodebench")
    assert len(stored_tests(p.id, **p.extra["tests"])) == 2  # a mix knows where its hidden tests are


class Knows(workers.SpecialistHandler):
    """A worker that knows the answers to questions about numbers which some divisor divides, and what they cost is said by the pool."""
    models = ["2", "3", "5"]

    def complete(self, body):
        self.server.asked.append(body["model"])
        question = body["messages"][0]["content"]
        number = int("".join(c for c in question.split("?")[0].split("/")[-1] if c.isdigit()))
        if self.server.down(body["model"], number):
            return self.fail(500, "down", retry=False)
        knows = number % int(body["model"]) == 0
        self.reply(f"<answer>{number}%</answer>" if knows else "I do not know.", "stop", {"prompt_tokens": 50, "completion_tokens": 100})


@pytest.fixture
def knowing(monkeypatch, tmp_path):
    """A server of three workers, its pool file, and a mix of one benchmark."""
    server = workers.Server(("127.0.0.1", 0), Knows)
    server.asked, server.down = [], lambda model, number: False
    threading.Thread(target=server.serve_forever, daemon=True).start()
    pool = [{"protocol": "openai", "base_url": f"http://127.0.0.1:{server.server_address[1]}/v1", "model": m, "price": [1, 10], "attempts": 1,
             "params": {"max_tokens": 100}} for m in Knows.models]
    (tmp_path / "pool.json").write_text(json.dumps(pool))
    monkeypatch.setattr(evaluation, "MIXES", {"paper": {"rlpr": 100}, "recursion": {"rlpr": 30}})
    yield server
    server.shutdown()
    server.server_close()


def test_prepare_leaves_out_what_all_workers_solve_or_none(hub, knowing, capsys):
    """Each is asked once for every candidate; counts and cost are told; started again it pays for nothing; a lost worker decides nothing."""
    evaluation.main(["prepare", "--pool=pool.json"])
    told, mix = capsys.readouterr().out, load("paper", "train")
    numbers = [int(p.answer[:-1]) for p in mix]
    assert len(mix) == 100 and all(1 <= sum(n % d == 0 for d in (2, 3, 5)) <= 2 for n in numbers)
    assert Counter(knowing.asked) == {m: 600 for m in Knows.models}
    candidates = [int(p.answer[:-1]) for p in load("rlpr", "train", 600)]
    by_all, by_none = (sum(all((n % d == 0) == right for d in (2, 3, 5)) for n in candidates) for right in (True, False))
    assert f"{by_all} as all solve it" in told and f"{by_none} as none solves it" in told and "1,800 calls for $1.89" in told
    assert f"rlpr: 2 solves {sum(n % 2 == 0 for n in candidates)} of 600 candidates" in told
    assert {p.id for p in load("recursion", "train")} < {p.id for p in mix} and len(load("recursion", "train")) == 30
    evaluation.main(["prepare", "--pool=pool.json"])
    assert len(knowing.asked) == 1800 and load("paper", "train") == mix  # data/replies knows them all
    os.remove("data/replies")
    knowing.down = lambda model, number: model == "3" and number % 7 == 0
    evaluation.main(["prepare", "--pool=pool.json"])
    assert f"{sum(n % 7 == 0 for n in candidates)} as a worker was lost" in capsys.readouterr().out
    assert all(int(p.answer[:-1]) % 7 for p in load("paper", "train"))


def test_prepare_with_a_spent_budget_writes_nothing_and_goes_on_later(hub, knowing):
    with pytest.raises(SystemExit, match="budget is spent"):
        evaluation.main(["prepare", "--pool=pool.json", "--budget=0.5"])
    assert not os.path.exists("data/paper.jsonl") and 100 < len(knowing.asked) <= 480
    evaluation.main(["prepare", "--pool=pool.json", "--budget=100"])
    assert len(knowing.asked) == 1800 and len(load("paper", "train")) == 100


def test_prepare_with_too_few_candidates_takes_what_there_is_and_says_so(hub, knowing, capsys, monkeypatch):
    monkeypatch.setattr(evaluation, "CANDIDATES", 50)
    evaluation.main(["prepare", "--pool=pool.json"])
    n = len(load("paper", "train"))
    assert 10 < n < 50 and f"rlpr: {n} problems taken of {n}, 100 wanted" in capsys.readouterr().out


def test_a_mix_is_tested_by_its_parts(hub):
    """By turns, and by no problem twice: when a part has no more, the others go on."""
    found = load("recursion", "test", 20)
    assert [p.kind for p in found] == ["livecodebench", "rlpr"] * 2 + ["rlpr"] * 16 and len({p.id for p in found}) == 20


def test_a_mix_of_unequal_parts_has_each_problem_once(hub, monkeypatch, capsys):
    monkeypatch.setattr(evaluation, "MIXES", {"paper": {"math500": 9, "mmlu": 3}, "recursion": {"math500": 4, "mmlu": 2}})
    evaluation.main(["prepare"])
    kinds = [p.kind for p in load("paper", "train")]
    assert kinds == ["math500", "mmlu"] * 3 + ["math500"] * 6 and "data/paper.jsonl: 12 problems" in capsys.readouterr().out
    assert len({p.id for p in load("paper", "train")}) == 12 and len(load("recursion", "train")) == 6
