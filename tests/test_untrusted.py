"""What was downloaded: checkpoints, runs, pools, problems and replies whose makers mean harm."""
import json
import os

import pytest
from rogue import CHAT, always, worker
from test_workflow import Wire, pool_of
from test_workflow_serve import byte_tokenizer, checkpoint, said_by_main  # noqa: F401 (checkpoint is a fixture)
from tokenizers import Tokenizer as BPE

import eval as evaluation
import train
import workflow as wf
from model import Config, Tokenizer
from workers import Budget, Worker
from workflow import Step, Trace, Workflow

TERMINAL = "\x1b]52;c;aGFybQ==\x07\x1b[2J"  # sets the clipboard and clears the screen


def test_no_checkpoint_says_who_gets_the_questions_and_the_keys(checkpoint, tmp_path, capsys):  # noqa: F811
    """Its maker could name a host of his own."""
    with Wire(lambda model, chat: f"{model} says so") as wire:
        pool_of(tmp_path, wire.url, "a")
        facts = {"style": "short", "max_new_tokens": 80, "pool": f"{tmp_path}/pool.json"}
        folder = tmp_path / "theirs"
        folder.mkdir()
        for name in os.listdir(checkpoint):
            (folder / name).symlink_to(os.path.join(checkpoint, name))
        (folder / "conductor.json").unlink()
        (folder / "conductor.json").write_text(json.dumps(facts))
        words = ["Why?", f"--checkpoint={folder}", "--temperature=0"]
        with pytest.raises(SystemExit, match=f"learned with --pool={tmp_path}/pool.json"):
            wf.main(words)
        assert not wire.seen
        shown, _ = said_by_main(capsys, *words, f"--pool={tmp_path}/pool.json")
    assert "a says so\n1 call, " in shown


@pytest.mark.parametrize("facts, pool", [
    ({}, "local"), ({"pool": "local:pairs"}, "local:pairs"), ({"pool": "today"}, None), ({"pool": ["local"]}, None),
    ({"max_steps": 10**9}, None), ({"max_steps": "5"}, None), ({"workers": "all"}, None), ({"workers": [1]}, None)])
def test_what_a_checkpoint_may_say_of_its_prompt(facts, pool, tmp_path):
    (tmp_path / "conductor.json").write_text(json.dumps(facts))
    if pool:
        assert wf.pool_of(str(tmp_path)) == pool
    else:
        pytest.raises(ValueError, wf.pool_of, str(tmp_path))


@pytest.mark.parametrize("name, value", [
    ("num_attention_heads", 0), ("hidden_size", -64), ("hidden_size", 64.0), ("num_hidden_layers", 10**18),
    ("vocab_size", True), ("rms_norm_eps", float("nan")), ("rope_theta", float("inf")), ("tie_word_embeddings", 1)])
def test_a_config_has_sensible_numbers(name, value, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", **vars(Config()), name: value}))
    with pytest.raises(ValueError, match=f"config.json lacks {name}, or has no sensible number there"):
        Config.from_pretrained(str(tmp_path))


def test_a_tokenizer_neither_makes_control_tokens_of_text_nor_cuts_it():
    bpe = byte_tokenizer().bpe
    bpe.enable_truncation(4)
    bpe.enable_padding(length=9)
    assert len(Tokenizer(bpe).encode("A longer text")) == 13
    bpe.enable_padding(length=512, pad_id=bpe.token_to_id("<|im_end|>"), pad_token="<|im_end|>")
    assert Tokenizer(bpe).encode("A") == Tokenizer(byte_tokenizer().bpe).encode("A")
    ordinary = bpe.to_str().replace('"special":true', '"special":false')
    with pytest.raises(ValueError, match="control tokens"):
        Tokenizer(BPE.from_str(ordinary))


def test_a_run_writes_and_removes_nothing_by_links(tmp_path):
    """A run that was unpacked from elsewhere, and is to be resumed."""
    mine = tmp_path / "mine" / "00001"
    mine.mkdir(parents=True)
    for link, to in [("checkpoints", tmp_path / "mine"), ("metrics.jsonl.tmp", tmp_path / "tool.py"),
                     ("traces/00001.jsonl.tmp", tmp_path / "tool.py")]:
        out = tmp_path / f"run of {os.path.basename(link)}"
        os.makedirs(out / os.path.dirname(link))
        (out / link).symlink_to(to)
        (out / "checkpoint").symlink_to("checkpoints/00001")  # which every run has
        with pytest.raises(OSError, match="is a link"):
            train.refuse_links(train.Settings(out=str(out)))
    assert mine.exists() and not (tmp_path / "tool.py").exists()


@pytest.mark.parametrize("url", ["http://evil.example/v1/$AWS_SECRET", "http://$AWS_SECRET.evil.example", "$A/$AWS_SECRET",
                                 "$A.evil.example/v1", "${A}/v1"])
def test_a_pools_url_sends_no_variables_elsewhere(url, monkeypatch):
    monkeypatch.setenv("A", "http://good.example")
    assert Worker("openai", "$A/v1", "m").url == "http://good.example/v1"
    with pytest.raises(ValueError, match="base_url must be"):
        Worker("openai", url, "m")


@pytest.mark.parametrize("tests", [{"file": "/dev/zero", "at": 0}, {"file": "data/../secret", "at": 0}, {"file": "data/x", "at": "0"},
                                   {"at": 0}, {"boo": 1}, {}])
def test_a_file_of_problems_opens_no_other_file(tests, tmp_path):
    row = {"question": "Add.", "answer": "", "kind": "code", "grader": "code", "extra": {"function": None, "tests": tests}}
    (tmp_path / "theirs.jsonl").write_text(json.dumps(row))
    with pytest.raises(ValueError, match="tests"):
        evaluation.read_problems(str(tmp_path / "theirs.jsonl"))


@pytest.mark.parametrize("text, n_in, price, known", [
    ("four words of text", 0, [2, 10], False), ("four words of text", 9, [2, 10], False), ("", 0, [2, 10], False),
    ("", 9, [2, 10], True), ("four words of text", 0, [0, 0], True)])
def test_words_of_no_tokens_have_an_unknown_cost(text, n_in, price, known):
    """A gateway that fills in zeros is not free of charge: the budget keeps what the call could cost."""
    said = {"choices": [{"message": {"content": text}}], "usage": {"prompt_tokens": n_in, "completion_tokens": 0}}
    budget = Budget(1.0)
    with always(said) as server:
        reply = worker(server, price=price, params={"max_tokens": 64}, budget=budget).chat(CHAT)
    assert (reply.cost is not None) == known and (reply.cost or 0.0) <= 1.0 - budget.left + 1e-9
    assert known or budget.left < 1.0


def test_nothing_printed_commands_the_terminal(capsys):
    problem = evaluation.Problem("1", "Why?" + TERMINAL, "", "kind" + TERMINAL)
    workflow = Workflow([Step(0, "Do it." + TERMINAL, [])])
    trace = Trace(problem.question, workflow, ["w" + TERMINAL], [wf.Reply("Because" + TERMINAL, 0, 0, 0.0, 0.0)], right=True)
    wf.warn_of_others(wf.Prompting(workers=["w" + TERMINAL]), [])
    shown = capsys.readouterr().err + evaluation.table([problem], {"all" + TERMINAL: [trace]}) + evaluation.learned([problem], [trace])
    assert "Because" in shown and "the Conductor learned with" in shown and not {"\x1b", "\x07"} & {*shown}


def test_the_tiny_conductor_reads_a_long_number():
    """Its tokenizer took hours for a megabyte of digits."""
    text = "1" * 200_000
    tokenizer = train.tiny_tokenizer(["Add 1 and 1.", "model_id = []\nsubtasks = []\naccess_list = []"])
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_no_training_on_problems_whose_solutions_can_cheat(tmp_path, in_process):
    """A BigCodeBench solution shares a process with its tests: a policy would learn to patch them."""
    problem = evaluation.Problem("code/0", "Write f.", "", "code", "unittest", extra={
        "test": "import unittest\nclass TestCases(unittest.TestCase):\n    def test_f(self): f()", "entry_point": "f", "code_prompt": "def f():"})
    evaluation.write_problems(f"{tmp_path}/code.jsonl", [problem] * 2)
    argv = ["--preset=laptop", f"--out={tmp_path}/out", "--sandbox=partial", "--dry_run", f"--test_data={tmp_path}/code.jsonl"]
    train.main(argv)
    with pytest.raises(SystemExit, match="other problems to train on .*unittest"):
        train.main([*argv, f"--data={tmp_path}/code.jsonl"])
