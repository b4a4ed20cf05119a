"""Training with workers that fail: what is lost is counted and teaches nothing, the rest is trained on."""
import json
import math
import os
import re
import sys
import threading
import zlib

import pytest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import train
import workers
from model import Tokenizer
from train_runs import SHORT, in_pairs, metrics, recount, rollouts, runs, weights


class Moody(workers.Handler):
    """The specialists, who answer 400 to a share of what they are asked: at /30/v1 to 30 %, at /100/v1 to
    all, but to a hello."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        data, per_cent = json.loads(body), int(self.path.split("/")[1])
        self.server.asked.append((per_cent, data["messages"]))
        if data["messages"][-1]["content"] != "Say hello." and zlib.crc32(body) % 100 < per_cent:
            return self.answer(400, {"error": {"message": "not in the mood"}})
        text = workers.SPECIALISTS[data["model"]](data["messages"])
        self.answer(
            200,
            {
                "choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}],
                "usage": {}},
        )


@pytest.fixture(scope="module")
def moody(tmp_path_factory):
    """(folder with 30.json and 100.json, pools of workers that fail so often; what they were asked, as it
    grows)."""
    folder, server = tmp_path_factory.mktemp("moody"), workers.Server(("127.0.0.1", 0), Moody)
    server.asked = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for per_cent in (30, 100):
        url = f"http://127.0.0.1:{server.server_address[1]}/{per_cent}/v1"
        entries = [
            {"name": name, "protocol": "openai", "model": name, "base_url": url}
            for name in workers.LOCAL["local"]]
        (folder / f"{per_cent}.json").write_text(json.dumps(entries))
    yield folder, server.asked
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def faulty(checkpoint, moody):
    """(out at 30 %, out at 100 %, ends): runs from the checkpoint above. The second has no KL term, and the
    ablations."""
    folder, _ = moody
    def command(per_cent, *more):
        return [
            "train.py", "--preset=laptop", f"--init_from={checkpoint}", f"--pool={folder}/{per_cent}.json",
            f"--out={folder}/{per_cent}", "--questions=8", "--rollouts=8", "--test=8", "--max_new_tokens=64",
            *more]

    ends = in_pairs([
        command(30, "--iterations=3"),
        command(100, "--iterations=9", "--beta=0", "--importance=2", "--access=false", "--subtasks=false")])
    return f"{folder}/30", f"{folder}/100", ends


def test_lost_rollouts_are_counted_and_training_goes_on(faulty, checkpoint):
    """With 30 % of calls failing, rollouts are lost and counted, have no reward, and are in no mean; the
    weights are trained."""
    out, _, [end, _] = faulty
    for i, line in enumerate(metrics(out)):
        lost = [row for row in recount(out, i) if row["reward"] is None]
        assert (
            0 < len(lost) == line["lost"] < 64 and line["grad_norm"] > 0 and math.isfinite(line["grad_norm"]))
        assert all(
            "not in the mood" in row["trace"]["error"] and "(attempt 1," in row["trace"]["error"]
            for row in lost)
        assert f"lost {line['lost']} " in end.out
    assert len(metrics(out)) == 3 and weights(out) != weights(os.path.dirname(checkpoint))


def test_training_learns_the_same_with_failing_workers(trained, moody, tmp_path):
    """The short run from nothing, with 30 % of calls failing: lost rollouts are counted, and the reward rises
    as it does without."""
    [end] = runs(
        ["train.py", "--preset=laptop", f"--pool={moody[0]}/30.json", f"--out={tmp_path}/out", *SHORT])
    failing, sound = metrics(tmp_path / "out"), metrics(trained[0][0])
    assert all(0 < line["lost"] < 100 for line in failing)
    for key in ("reward", "parsed"):
        rise, same = (
            sum(line[key] for line in lines[-2:]) / 2 - sum(line[key] for line in lines[:2]) / 2
            for lines in (failing, sound))
        assert rise > same / 2 > 0.02, key


def test_what_is_lost_teaches_nothing(faulty, checkpoint):
    """With every call failing, what parses is lost and what does not is all alike: not one bit of the weights
    moves. The run stops after an iteration, and says why."""
    _, out, [_, end] = faulty
    assert end.status == 1 and len(metrics(out)) == 1
    assert re.search(r"no workflow came to an answer \(.+\): stopped after iteration 1; .*checkpoint", end.out + end.err), end
    for i, line in enumerate(metrics(out)):
        recount(out, i)
        assert (
            line["lost"] == round(line["parsed"] * 64) > 0
            and not line["reward"] and not line["accuracy"] and line["calls"] == 0)
    assert weights(out) == weights(os.path.dirname(checkpoint))


def test_what_is_trained_on(checkpoint, moody, monkeypatch, in_process):
    """Every rollout that was not lost is trained on once, as sampled, with its advantage among those of its
    group not lost."""
    folder, seen = moody[0], []

    def spy(model, optimizer, rollouts, *how, **more):
        seen.extend(r for r in rollouts if r.task)  # without the dry step's
        return update(model, optimizer, rollouts, *how, **more)

    update = train.update
    monkeypatch.setattr(train, "update", spy)
    train.main(
        [
            "--preset=laptop", f"--init_from={checkpoint}", f"--pool={folder}/30.json",
            f"--out={folder}/spied", "--iterations=1", "--questions=8", "--rollouts=10", "--minibatches=3",
            "--test=1", "--max_new_tokens=64"]
    )
    tokenizer, rows, expected = Tokenizer.from_pretrained(checkpoint), recount(f"{folder}/spied", 0), []
    for group in (rows[i:i + 10] for i in range(0, 80, 10)):
        rewards = [row["reward"] for row in group if row["reward"] is not None]
        mean = sum(rewards) / max(len(rewards), 1)
        std = (sum((r - mean) ** 2 for r in rewards) / max(len(rewards), 1)) ** 0.5
        expected += [
            (row["text"], (row["reward"] - mean) / std if std else 0.0) for row in group
            if row["reward"] is not None]
    texts, got = zip(*sorted((tokenizer.decode(r.completion.tokens), r.advantage) for r in seen))
    written, wanted = zip(*sorted(expected))
    assert 0 < len(seen) < 80 and texts == written and got == pytest.approx(wanted, abs=1e-5)
    assert sum(r.completion.tokens[-1] == tokenizer.eos_id for r in seen) > 40
    assert all(
        len(r.completion.tokens) == len(r.completion.logprobs)
        and r.written == tokenizer.decode(r.completion.tokens) for r in seen)


def test_ablations_reach_the_workers(faulty, moody):
    """With --access=false --subtasks=false every worker gets one turn, with the question and the general
    subtask."""
    (_, out, _), (_, asked) = faulty, moody
    chats = [
        chat for per_cent, chat in asked if per_cent == 100 and chat[-1]["content"].startswith("Question:")]
    steps = sum(
        len(row["trace"]["workflow"]["steps"]) for row in rollouts(out, 0) if row["trace"])
    told = [chat[-1]["content"].endswith("\n\nYour task:\nSolve the question.") for chat in chats]
    assert all(len(chat) == 1 for chat in chats[:steps]) and all(told[:steps]) and steps > 30
    assert any(len(chat) > 1 for per_cent, chat in asked if per_cent == 30)


def test_a_worker_with_the_name_of_a_row_is_refused(tmp_path, in_process):
    """Its row would stand in the place of the Conductor's."""
    (tmp_path / "pool.json").write_text(json.dumps([{"name": "Conductor", "protocol": "openai", "model": "m", "base_url": "http://127.0.0.1:9"}]))
    with pytest.raises(SystemExit, match="other names for workers"):
        train.main(["--preset=laptop", f"--out={tmp_path}/out", f"--pool={tmp_path}/pool.json"])
