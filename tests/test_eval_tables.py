"""Measurement, tables, pictures and the command line, beside numbers worked out by hand and textbook values."""
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading

import pytest

import eval as evaluation
import workers
from eval import Problem, accuracies, average, columns, habits, in_the_paper, learned, measure, spread, students_t, table
from test_eval import Tap
from workers import Reply
from workflow import Step, Trace, Workflow

sys.path.insert(0, os.path.join(os.path.dirname(evaluation.__file__), "assets"))
import plot  # noqa: E402

@pytest.mark.parametrize("freedom, t", [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (9, 2.262), (10, 2.228), (19, 2.093), (29, 2.045),
                                        (120, 1.980), (10 ** 6, 1.960)])
def test_students_t_is_as_in_the_tables(freedom, t):
    """Two-sided, 95 %, for any number of files."""
    assert students_t(freedom) == pytest.approx(t, abs=6e-4)


def test_the_three_kinds_of_spread_by_hand():
    """Of 1, 2, 3, 4: deviation 1.291, the mean's error half of it, and 3.182 times that to either side. One value has none."""
    assert spread([1, 2, 3, 4]) == pytest.approx({"std. dev.": 1.29099, "std. error": 0.645497, "95 % ±": 2.05426}, rel=1e-4)
    assert spread([5]) == spread([]) == {"std. dev.": None, "std. error": None, "95 % ±": None}


def test_average_says_what_is_wrong_with_its_files(tmp_path):
    """One file, one that is not there, and two that share nothing."""
    for name, numbers in (("a", {"laptop, w": {"accuracy": 1.0}}), ("b", {"mmlu, w": {"accuracy": 1.0}})):
        (tmp_path / name).write_text(json.dumps(numbers))
    for files, told in (("a", "two files or more"), ("", "two files or more"), ("an", "No such file.*/n"), ("ab", "no number is in all of .*/a, .*/b")):
        with pytest.raises((ValueError, OSError), match=told):
            average([str(tmp_path / name) for name in files])


@pytest.mark.parametrize("system", ["best-single", "best-single,workers", "workers:coder,best-single"])
def test_the_best_single_worker_needs_no_other_system(system, capsys):
    """It measures every worker, in whatever order systems are named, and each once."""
    evaluation.main([f"--systems={system}", "--test=8", "--only=calculator,coder"])
    told = capsys.readouterr().out
    for row in ("calculator", "coder", "best-single calculator"):
        assert len(re.findall(rf"(?m)^{row} +0.125", told)) == 1


def test_what_is_learned_stands_beside_out(tmp_path, capsys):
    """A second run asks nobody for lessons; other workers are refused."""
    argv = ["--systems=router", "--test=8", f"--out={tmp_path}/x.json"]
    evaluation.main(argv)
    assert "router: trained with 1,280 calls" in capsys.readouterr().out
    first = json.loads((tmp_path / "x.json").read_text())
    evaluation.main(argv)
    assert "trained" not in capsys.readouterr().out and json.loads((tmp_path / "x.json").read_text()) == first
    with pytest.raises(SystemExit, match="x.json.router-laptop.npz is of other settings .*--seed=1.*translator"):
        evaluation.main([*argv, "--only=coder,calculator"])


@pytest.mark.parametrize("n, interval", [(2, "0.635"), (5, "0.196"), (12, "0.229")])
def test_average_by_hand(tmp_path, n, interval):
    """Mean and 95 % interval over any number of files, which the heading names; what is unknown in one of them is left out."""
    for i in range(n):
        numbers = {"laptop, w": {"accuracy": 0.5 + i / 10, "k" * 30: 1.0, "by kind": {"fact": 2, "sum": None if i else 1.0}}, "x": {"calls": i} if i else {}}
        (tmp_path / f"{i}.json").write_text(json.dumps(numbers))
    head, *lines = average([str(tmp_path / f"{i}.json") for i in range(n)]).splitlines()
    mean = f"{0.5 + (n - 1) / 20:.3f}"
    assert [re.split(r"\s{2,}", line)[:4] for line in lines] == [["laptop, w: accuracy", mean, interval, "0.500"],
                                                                ["laptop, w: " + "k" * 30, "1.000", "0.000", "1.000"],
                                                                ["laptop, w: by kind: fact", "2.000", "0.000", "2.000"]]
    assert re.search(rf"{n} files, by Student's t +mean +95 % ± +{tmp_path}/0.json", head)


def test_a_trace_is_graded_once(monkeypatch):
    """However many tables ask; as programs take minutes, side by side."""
    together, asked = threading.Barrier(2), []
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(evaluation, "grade", lambda p, answer: asked.append(answer) or together.wait(60) >= 0 and answer == p.answer)
    problems = [Problem(str(i), "?", "yes", "k") for i in range(3)]
    traces = [Trace("?", Workflow([Step(0, "", [])]), ["w"], [Reply(text, 1, 1, 0.0, 0.0)]) for text in ("yes", "no")] + [None]
    table(problems, {"some": traces})
    assert measure(problems, [traces])["accuracy"] == pytest.approx(100 / 3)
    assert sorted(asked) == ["no", "yes"]


def one(text, cost=0.01, n=1):
    return Trace("?", Workflow([Step(0, "", [])] * n), ["w"] * n, [Reply(text, 30, 10, cost, 1.0)] * n)


DOWN = Trace("?", Workflow([]), [], [], error="down")


def test_measure_by_hand():
    """Two repeats of two problems: spread over repeats, calls, tokens, cents, points a cent; unknown stays unknown, lost is lost."""
    problems = [Problem("1", "?", "yes", "k"), Problem("2", "?", "no", "k")]
    assert measure(problems, [[one("yes"), one("no")], [one("yes", n=3), None]]) == {
        "accuracy": 75.0, **spread([100, 50]), "calls": 5 / 4, "steps": 5 / 4, "tokens": 50.0, "cents": 1.25, "points/cent": 60.0, "lost": 0,
        "by kind": {"k": 75.0}}
    free = measure(problems, [[one("yes", None), one("yes", 0.0)]])
    assert (free["accuracy"], free["cents"], free["points/cent"], free["std. error"]) == (50.0, None, None, None)
    half = measure(problems, [[one("yes"), one("x")], [DOWN] * 2])
    assert (half["accuracy"], half["lost"], half["tokens"], half["cents"]) == (50.0, 2, 40, 1.0)  # of the two that were answered
    down = measure(problems, [[DOWN] * 2])
    assert (down["accuracy"], down["lost"], down["by kind"]) == (None, 2, {"k": None})


def test_columns_stand_under_their_heads():
    """Each with its digits; what is unknown is a ?, what a row does not have is blank."""
    text = columns({"a": {"x": 1.25, "longer head": None}, "a name of more than thirty letters": {"x": 10}}, {"x": 1, "longer head": 2}, "t")
    head, first, second = text.splitlines()
    assert head.split() == ["t", "x", "longer", "head"] and first.split() == ["a", "1.2", "?"] and second.endswith("letters  10.0")
    assert head.index("x") == first.index("1.2") + 2 == second.index("10.0") + 3 and first.index("?") == len(head) - 1


def test_the_papers_rows():
    """Tables 1, 2 and 7, as the paper has them, of one benchmark each; of the average those of Table 7."""
    assert in_the_paper("gpqa") == {f"Table {name}": {"accuracy": x} for name, x in {
        "1: gemma-3-27b-it": 38.4, "1: Qwen3-32B": 64.1, "1: Qwen3-32B thinking": 66.8, "1: R1-Distill-Qwen-32B": 58.1, "1: Claude Sonnet 4": 77.7,
        "1: Gemini 2.5 Pro": 84.8, "1: GPT-5": 82.3, "1: Conductor": 87.5, "2: best single worker": 75.25, "2: Conductor": 81.31,
        "2: Conductor, recursive": 82.32}.items()}
    assert in_the_paper("math500")["Table 7: Conductor"] == {"accuracy": 89.33} and len(in_the_paper("math500")) == 9
    assert in_the_paper("average")["Table 7: MoA"] == {"accuracy": 62.13} and len(in_the_paper("average")) == 7
    assert in_the_paper("laptop") == {}


def test_the_papers_rows_stand_beneath_ones_own(tmp_path, monkeypatch, capsys):
    """Of the same benchmark alone; and with the four of Table 7 their average, over systems that have all of them."""
    four = ["math500", "mmlu", "rlpr", "livecodebench"]
    monkeypatch.setattr(evaluation, "load", lambda data, split, n: [Problem("", f"What is {i} * 8?", str(8 * i), data) for i in range(3)])
    evaluation.main([f"--benchmarks={','.join(four)}", "--systems=workers:calculator,random", "--test=5", f"--out={tmp_path}/x.json"])
    told = capsys.readouterr().out
    assert "mmlu: 3 problems are all there are (--test=5)" in told
    part = told.split("mmlu: 3")[1]
    for name in ("Table 1: GPT-5", "Table 7: Conductor"):
        line = next(line for line in told.splitlines() if line.startswith(name))
        assert line.split()[-1] == {"Table 1: GPT-5": "99.00", "Table 7: Conductor": "89.33"}[name]
    numbers = json.loads((tmp_path / "x.json").read_text())
    assert numbers["average, calculator"]["accuracy"] == numbers["rlpr, calculator"]["accuracy"] == 100
    last = told.split("average of math500, mmlu, rlpr, livecodebench")[1]
    assert re.search(r"calculator +100.00", last) and re.search(r"Table 7: Gemini 2.5 Pro +64.14", last) and part


def test_an_evaluation_started_again_pays_for_nothing(tmp_path, capsys):
    """--replay: the second run asks no worker, and ends with the same numbers."""
    server = workers.Server(("127.0.0.1", 0), Tap)
    server.bodies = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    (tmp_path / "pool.json").write_text(json.dumps([{"protocol": "openai", "base_url": url, "model": m} for m in workers.LOCAL["local"]]))
    argv = [f"--pool={tmp_path}/pool.json", f"--replay={tmp_path}/replay", "--test=8", "--systems=workers,best-single,random,moa,reflect:coder,seat:coder",
            "--repeats=2"]
    evaluation.main([*argv, f"--out={tmp_path}/1.json"])
    asked = len(server.bodies)
    evaluation.main([*argv, f"--out={tmp_path}/2.json"])
    server.shutdown()
    server.server_close()
    assert len(server.bodies) == asked > 8 * 2 * (5 + 1 + 6 + 5 + 3) * 0.8
    one, two = (json.loads((tmp_path / f"{i}.json").read_text()) for i in (1, 2))
    assert one == two and one["laptop, calculator"]["accuracy"] == 100 / 8 and one["laptop, moa"]["calls"] == 6.0
    assert "points/cent" in capsys.readouterr().out


def trace(answer=None, error=None, who=("calculator",), access=((),), question="Q?", said=None):
    """A made-up trace; without an answer it is lost."""
    steps = [Step(0, f"Task {i}.", [*a]) for i, a in enumerate(access)]
    replies = [Reply(said or answer, 1, 1, 0.0, 0.1) for _ in who[1:]] + [Reply(answer, 1, 1, 0.0, 0.1) if not error else None]
    return Trace(question, Workflow(steps), [*who], replies, error=error)


def test_accuracies():
    """By hand: what does not parse is wrong; what was lost is in neither count; a kind that was lost wholly has no accuracy."""
    problems = [Problem("", "Q?", "1", kind) for kind in "aaaabbc"]
    traces = [trace("1"), trace("2"), None, trace(error="down"), trace("1"), trace("1"), trace(error="down")]
    assert accuracies(problems, traces) == {"all": 3 / 5, "a": 1 / 3, "b": 1.0}
    assert accuracies(problems[:1], [trace(error="down")]) == {}


def rows(text):
    """A table's lines as {name: numbers}, and its header's kinds."""
    head, *lines = text.splitlines()
    return head.split("calls")[1].split(), {re.split(r"\s{2,}", line)[0]: line[30:].split() for line in lines}


def test_table():
    """A row for each system: accuracy over all, mean calls, accuracy by kind, under the right heads."""
    problems = [Problem("", "Q?", "1", kind) for kind in ("arithmetic", "arithmetic", "fact", "fact")]
    two, wrong = trace("1", who=("a", "b"), access=((), (0,))), trace("2")
    kinds, lines = rows(table(problems, {"Conductor": [two, two, two, None], "some worker": [wrong, trace("1"), wrong, wrong]}))
    assert kinds == ["arithmetic", "fact"]
    assert lines == {"Conductor": ["0.750", "1.50", "1.00", "0.50"], "some worker": ["0.250", "1.00", "0.50", "0.00"]}


def test_a_worker_may_have_a_blank_name(capsys):
    """As a server that ignores the model may get."""
    trace = Trace("q", Workflow([Step(0, "Go.", [])]), [" "], [Reply("4", 1, 1, 0.0, 0.1)], right=True)
    assert evaluation.report("laptop", [Problem("0", "q", "4", "a")], {" ": [[trace]]}, {})[" "]["accuracy"] == 100


def test_a_system_that_was_lost_is_not_shown_as_wrong():
    """A worker that failed on all problems has no accuracy: a 0 would be a claim about what it can do."""
    problems = [Problem("", "Q?", "1", kind) for kind in "ab"]
    _, lines = rows(table(problems, {"down": [trace(error="down")] * 2, "half": [trace("1"), trace(error="down")]}))
    assert lines["half"][:3] == ["1.000", "1.00", "1.00"]
    for cell in [*lines["down"][:1], *lines["down"][2:], lines["half"][3]]:
        assert not re.fullmatch(r"[\d.]+", cell), lines
    row = measure(problems, [[trace(error="down")] * 2])
    assert {row[key] for key in ("accuracy", "calls", "steps", "tokens", "cents")} == {None}  # nor was it free


def test_learned():
    """For each kind the commonest shape, how often it was written, and one example with what every step saw and said."""
    problems = [Problem("", "Q?", "1", kind) for kind in ("one", "one", "one", "two", "two", "none")]
    pair = trace("1", who=("librarian", "coder", "coder"), access=((), (0,), (0, 1)), question="Which?", said="hm")
    text = learned(problems, [trace("1"), trace("2"), trace("3", who=("coder",)), pair, None, None])
    first, second = text.split("\ntwo: ")
    assert first.startswith("one: 1 step, ") and "67%" in first and "coder" not in first
    assert "calculator, told 'Task 0.': 1" in first
    head, *steps = second.splitlines()
    assert head.startswith("3 steps") and "Which?" in head
    assert [s.strip() for s in steps] == ["librarian, told 'Task 0.': hm", "coder, told 'Task 1.', seeing step 0: hm",
                                         "coder, told 'Task 2.', seeing steps 0 and 1: 1"]
    assert "none:" not in text


def test_habits_by_hand():
    """Lengths and workers' shares of the rounds that were written, and how often a second round kept an answer."""
    pair = trace("1", who=("librarian", "coder"), access=((), (0,)))
    first = trace("1")
    first.right = True
    kept = Trace("Q?", Workflow([]), [], [], previous=first)
    told = habits([trace("1"), pair, None, kept])
    assert told["lengths"] == pytest.approx({"1 step": 2 / 3, "2 steps": 1 / 3}) and sum(told["shapes"].values()) == pytest.approx(1)
    assert told["workers, round 1"] == {"calculator": 0.5, "coder": 0.25, "librarian": 0.25} and told["workers, round 2"] == {}
    assert told["kept"] == {"right": 1.0}
    assert habits([None]) == {"lengths": {}, "shapes": {}}


# -----------------------------------------------------------------------------------------------------------
# The command line (with a checkpoint: test_train.py)


@pytest.mark.parametrize("words, reason", [
    (["--chekpoint=x"], "--checkpoint"), (["--test=many"], "--test=many"), (["--systems=oracle"], "there are conductor"),
    (["--systems=best-singel"], "did you mean best-single"),
    (["--systems=seat:poet"], "the pool has calculator"), (["--systems=moa:coder"], "the pool has calculator"),
    (["--systems=one-worker:poet"], "the pool has calculator"), (["--repeats=0"], "from 1 on"), (["--rounds=-1"], "from 0 on"),
    (["average", __file__, __file__], "JSON|Expecting"), (["--systems=router", "--benchmarks={dir}/one.jsonl"], "--lessons=mmlu"),
    (["--systems=router", "--benchmarks=gpqa"], "gpqa has none"), (["--systems=router", "--lessons=aime25"], "aime25 has none"),
    (["--systems=router", "--lessons=maths"], "maths has none"), (["--examples=all"], "there are ood, in, mixed"),
    (["--subset=3"], "--systems=conductor"), (["--systems=conductor", "--subset=3", "--benchmarks=mmlu"], "--benchmarks=laptop"),
    (["--systems=conductor", "--subset=3", "--pool={dir}/good.json"], "local pools"), (["--systems=conductor", "--subset=6"], "pool has 5 workers"),
    (["--checkpoint={dir}/none"], "{dir}/none"), (["--benchmarks=laptot"], "laptop"), (["--out={dir}"], "{dir}: a folder"), (["--out=/dev/null"], "/dev/null: a folder or a device"),
    (["--out={dir}/new/"], "new/: a folder or"), (["--out={dir}/pool.json"], "pool.json is not a JSON object"), (["--budget=nan"], "--budget=nan"), (["--budget=-1"], "--budget=-1"),
    (["--out={dir}/one.jsonl/x.json"], "one.jsonl"), (["--pool={dir}/pool.json"], "random"), (["--only=poet"], "poet"),
    (["--pool=paper", "--budget=5"], "a budget needs"), (["prepare", "--pool={dir}/none.json"], "none.json"),
    (["prepare", "--pool=paper"], "GEMINI_API_KEY for Gemini 2.5 Pro.*OPEN_BASE_URL for .*Gemma"),
    (["--pool=paper", "--systems=random"], "GEMINI_API_KEY"), (["--benchmarks=mmlu,laptot", "--systems=random"], "no problems 'laptot'"),
    (["prepare", "now"], r"python eval\.py"), (["draw"], r"python eval\.py"), (["plot"], r"python eval\.py")])
def test_command_line_refuses(words, reason, tmp_path, monkeypatch):
    """A wrong flag, value, word or folder ends the program with one message that names it, before any worker is asked or data are fetched."""
    monkeypatch.setattr(evaluation, "play", lambda *args: 1 / 0)
    monkeypatch.setattr(evaluation, "session", lambda: 1 / 0)
    monkeypatch.setattr(evaluation, "DATA", str(tmp_path / "data"))
    for variable in ("GEMINI_API_KEY", "OPEN_BASE_URL"):
        monkeypatch.delenv(variable, raising=False)
    (tmp_path / "one.jsonl").write_text('{"question": "1+1?", "answer": "2", "kind": "sums"}')
    entry = {"protocol": "openai", "base_url": "http://127.0.0.1:9", "model": "m"}
    (tmp_path / "pool.json").write_text(json.dumps([{**entry, "name": "random"}]))
    (tmp_path / "good.json").write_text(json.dumps([entry]))
    with pytest.raises(SystemExit, match=reason.format(dir=tmp_path)):
        evaluation.main([w.format(dir=tmp_path) for w in words])


def test_the_router_keeps_what_it_learned_of_the_same_lessons_alone(tmp_path):
    """Other lessons under the same name are refused, and what it learned of calls that were lost is not kept."""
    lessons = tmp_path / "one.jsonl"
    argv = [f"--benchmarks={lessons}", "--systems=router", f"--lessons={lessons}", f"--out={tmp_path}/x.json"]
    lessons.write_text(json.dumps({"question": "What is 7 * 8?", "answer": "56", "kind": "sums"}))
    (tmp_path / "pool.json").write_text(json.dumps([{"protocol": "openai", "base_url": "http://127.0.0.1:9", "model": "m", "attempts": 1}]))
    with pytest.MonkeyPatch.context() as m, pytest.raises(SystemExit, match="most of the router's lessons were lost"):
        m.setattr(evaluation, "silent", lambda pool: [])
        evaluation.main([*argv, f"--pool={tmp_path}/pool.json"])
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".npz")]
    evaluation.main(argv)
    evaluation.main(argv)
    lessons.write_text(json.dumps({"question": "What is dos?", "answer": "2", "kind": "sums"}))
    with pytest.raises(SystemExit, match="is of other settings .*lessons"):
        evaluation.main(argv)


def test_the_router_learns_elsewhere_where_a_benchmark_has_no_train_problems(tmp_path, capsys):
    """--lessons names other problems, here a file."""
    line = {"question": "What is 7 * 8?", "answer": "56", "kind": "sums"}
    (tmp_path / "one.jsonl").write_text(json.dumps(line))
    evaluation.main([f"--benchmarks={tmp_path}/one.jsonl", "--systems=router", f"--lessons={tmp_path}/one.jsonl"])
    assert re.search(r"router +1.000 +1.00", capsys.readouterr().out)


@pytest.mark.parametrize("system", ["workers", "reflect"])
def test_ctrl_c_ends_it_at_once(tmp_path, system):
    """Neither what is asked nor what is queued is waited for."""
    asked, go_on = threading.Event(), threading.Event()

    class Slow(workers.Handler):
        def do_POST(self):
            asked.set()
            go_on.wait(60)

    server = workers.Server(("127.0.0.1", 0), Slow)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    (tmp_path / "pool.json").write_text(json.dumps([{"protocol": "openai", "base_url": f"http://127.0.0.1:{server.server_address[1]}", "model": "m"}]))
    process = subprocess.Popen([sys.executable, "eval.py", f"--pool={tmp_path}/pool.json", f"--systems={system}", "--test=100"],
                               cwd=os.path.dirname(evaluation.__file__), stderr=subprocess.PIPE, text=True)
    try:
        assert asked.wait(60)
        for _ in range(10):  # Python can miss one that comes just before it waits for a lock
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)  # the worker's timeout is 120 s
                break
        assert process.returncode == 1 and "interrupted" in process.stderr.read().strip().splitlines()[-1]
    finally:
        process.kill()
        go_on.set()
        server.shutdown()
        server.server_close()


def test_ctrl_c_keeps_the_systems_that_were_measured(tmp_path, monkeypatch):
    run_system = evaluation.run_system

    def interrupted(system, *rest):
        if system is evaluation.moa:
            raise KeyboardInterrupt
        return run_system(system, *rest)

    monkeypatch.setattr(evaluation, "run_system", interrupted)
    with pytest.raises(SystemExit, match="interrupted"):
        evaluation.main(["--systems=workers:coder,moa", "--test=9", f"--out={tmp_path}/numbers.json"])
    assert 0 <= json.loads((tmp_path / "numbers.json").read_text())["laptop, coder"]["accuracy"] <= 100


def test_a_worker_who_is_down_is_told_although_there_is_a_replay_file(tmp_path):
    """A new one, that is. And where all calls were lost, nobody takes the end for a good one."""
    (tmp_path / "pool.json").write_text(json.dumps([{"protocol": "openai", "base_url": "http://127.0.0.1:9", "model": "m", "attempts": 1}]))
    words = [f"--pool={tmp_path}/pool.json", "--systems=workers", "--test=2", f"--replay={tmp_path}/replies"]
    with pytest.raises(SystemExit, match="lacks a worker .m: the connection failed"):
        evaluation.main(words)
    line = b"\n%s %s" % (workers.Replay.key(["another call"]), b'{"text": "7"}')
    (tmp_path / "replies").write_bytes(line)
    with pytest.raises(SystemExit, match="calls were lost for every problem of laptop, m"):
        evaluation.main(words)


def test_plot(tmp_path, monkeypatch, capsys):
    """Pictures of a run and of an evaluation if matplotlib is there, else a message that names it."""
    lines = [{"iteration": i, "accuracy": i / 30, "by_kind": {"a": i / 30} | ({"b": 0.5} if i % 2 else {}), "workers": {"w": 1.0},
              "steps_by_kind": {"a": 2.0}} for i in range(30)]
    (tmp_path / "test.json").write_text(json.dumps({"Conductor": {"all": 1.0}, "w": {"all": 0.25}, "random workflows": {"all": 0.5}}))
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    row = measure([Problem("", "?", "yes", "k")], [[one("yes")], [one("no")]])
    told = {"laptop, w": row, "laptop, conductor": row | habits([one("yes", n=2), one("no")]), "laptop, conductor, 1 more": row | habits([one("yes")])}
    (tmp_path / "numbers.json").write_text(json.dumps(told))
    with monkeypatch.context() as m:
        m.setitem(sys.modules, "matplotlib", None)
        with pytest.raises(SystemExit, match="matplotlib"):
            plot.main([str(tmp_path)])
    assert plot.best_single(str(tmp_path)) == ("w", 0.25)  # Fig. 3's level is a worker's
    assert plot.smooth([1, None, 3], 2) == [1, 1, 3] and plot.smooth([None, 2]) == [None, 2]
    pytest.importorskip("matplotlib")
    plot.main([str(tmp_path)])
    plot.main([str(tmp_path / "numbers.json")])
    assert all(os.path.getsize(tmp_path / name) > 5000 for name in ("curve.png", "numbers.png"))
    with pytest.raises(SystemExit, match="none"):
        plot.main([str(tmp_path / "none")])
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(SystemExit, match="list.json: .*Error"):
        plot.main([str(tmp_path / "list.json")])
