"""An update on 1, 2 and 3 ranks against that of one process: real processes, gloo, fully_shard."""
import datetime
import functools
import math
import os
import sys
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

here = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [os.path.dirname(here), here]

from grpo import STATISTICS, set_importance, update
from test_grpo import flat, groups, near, tiny
from train_runs import fork_server

# The groups of each rank: uneven, one of them empty
SHARES = {1: [[0, 1, 2, 3]], 2: [[1], [3, 0, 2]], 3: [[0, 1, 2], [], [3]]}
# And weights of importance, and layers computed again
RUNS = {  # what is updated, and how
    "plain": dict(token_budget=20, max_grad_norm=1e9),
    "clipped-with-kl": dict(token_budget=10_000, max_grad_norm=0.05, beta=0.3, temperature=0.9, n_ids=37),
    "no-spread": dict(token_budget=20),
    "options": dict(token_budget=20, loss="token", clip_high=0.3),
    "not-finite": dict(token_budget=20),  # one rollout of one rank
}


def outcome(run, share, shard=lambda model: model):
    """Two updates in a row on these groups: weights by name, statistics, and the number of forwards."""
    model, how = tiny(tie_word_embeddings=run != "plain"), dict(RUNS[run])
    if "beta" in how:
        how["reference"] = shard(near(model))
    all_groups = groups(model)
    model.recompute = run == "options"
    optimizer, forwards = torch.optim.SGD(shard(model).parameters(), lr=0.1, momentum=0.9), []
    model.register_forward_pre_hook(lambda *_: forwards.append(1))
    for seed in (0, 1):
        episodes = flat(all_groups[i] for i in share)
        for e in episodes:
            e.advantage = 0.0 if run == "no-spread" else e.advantage * (1 - 0.5 * seed)
        if run == "not-finite" and 3 in share:
            all_groups[3][0].advantage = math.inf
        if run == "options":
            set_importance(model, episodes, 1.2, token_budget=20)
            forwards.clear()
        stats = update(model, optimizer, episodes, **how)
    weights = {
        k: p.detach().full_tensor() if hasattr(p, "full_tensor") else p.detach()
        for k, p in model.named_parameters()}
    return weights, stats, len(forwards)


def shard(model):
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def one_rank(rank, folder):
    """Every run in worlds of 3, 2 and 1; the ranks in each write what they saw."""
    os.dup2(os.open(f"{folder}/said-{rank}", os.O_WRONLY | os.O_CREAT), 2)
    for world in (3, 2, 1):
        if rank < world:
            dist.init_process_group(
                "gloo", f"file://{folder}/store{world}", datetime.timedelta(seconds=30), world, rank)
            torch.save(
                {run: outcome(run, SHARES[world][rank], shard) for run in RUNS}, f"{folder}/{world}-{rank}.pt"
            )
            dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """{(world, rank): {run: outcome}} of real processes; a hang ends the test, not the session."""
    folder = tmp_path_factory.mktemp("ranks")
    processes = [fork_server().Process(target=one_rank, args=(rank, str(folder))) for rank in range(3)]
    for process in processes:
        process.start()
    end = time.monotonic() + 120
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
    status = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert status == [0, 0, 0], "\n".join(file.read_text() for file in folder.glob("said-*"))
    return {
        (world, rank): torch.load(folder / f"{world}-{rank}.pt") for world in SHARES for rank in range(world)}


@functools.cache
def alone(run, share):
    """The outcome in this process, which shards nothing."""
    return outcome(run, share)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("world", SHARES)
def test_any_number_of_ranks_gives_the_same_update(world, run, ranks):
    """Weights and statistics after two updates equal those of one unsharded process, with uneven groups and
    an empty rank."""
    weights, stats, _ = alone(run, (0, 1, 2, 3))
    start = dict(tiny(tie_word_embeddings=run != "plain").named_parameters())
    assert all(torch.equal(weights[k], start[k]) == (run in ("no-spread", "not-finite")) for k in weights)
    for rank in range(world):
        got, got_stats, _ = ranks[world, rank][run]
        assert got.keys() == weights.keys()
        for k in weights:
            torch.testing.assert_close(got[k], weights[k], rtol=0, atol=1e-6)
        unknown = [k for k, v in got_stats.items() if v is None]
        assert unknown == (list(STATISTICS) if run == "no-spread" else [])
        known = {k: v for k, v in stats.items() if k not in unknown}
        assert {k: got_stats[k] for k in known} == pytest.approx(known, rel=1e-4, abs=1e-7, nan_ok=True)
        assert got_stats["skipped"] == (run == "not-finite")


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("world", SHARES)
def test_every_rank_runs_as_many_forwards_as_the_fullest_needs(world, run, ranks):
    """The empty rank keeps the others company, and none does more than that."""
    most = max(alone(run, tuple(share))[2] for share in SHARES[world])
    assert [ranks[world, rank][run][2] for rank in range(world)] == [most] * world
    assert (
        most > 2 if run in ("plain", "options", "not-finite")
        else most == {"clipped-with-kl": 2, "no-spread": 0}[run])
