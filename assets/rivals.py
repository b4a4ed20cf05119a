"""Small versions of systems that learn to choose workers (§4 and arXiv 2512.04695).

    python eval.py --systems=assets/rivals.py:NAME     # NAME is router, masrouter or trinity

The systems learn from training problems (--lessons). --seed seeds their random draws. With
--replay=FILE, identical calls during learning are made only once.
"""

import math
import os
import random
import re
import zlib
from dataclasses import replace
from functools import lru_cache

import numpy as np
import torch

from eval import (
    AGGREGATE,
    REFLECT,
    SOLVE_IT,
    Setup,
    System,
    ask_bare,
    ask_each,
    grade_once,
    merge,
    new_rollouts,
    planned,
    progress,
)
from workflow import Rollout, Step, Workflow, call_worker, conduct, load_conductor, roll_out

LESSON = "lesson"  # the prefix of call ids during learning
BATCH = 32  # lessons per learning step
N_TRIGRAMS = 4096  # trigrams are hashed into this many buckets


def rewards(rollouts: list[Rollout]) -> np.ndarray:
    """Return an array of rewards: 1 if right, else 0, minus 0.02 per call; nan if lost."""
    right = np.array([rollout.right for rollout in rollouts], float)
    return right - 0.02 * np.array([rollout.calls for rollout in rollouts])


def trigrams(questions: list[str]) -> torch.Tensor:
    """Return each question's counts of hashed character trigrams, as a unit vector: (Q, 4096)."""
    counts = torch.zeros(len(questions), N_TRIGRAMS)
    for row, question in zip(counts, questions):
        for i in range(len(question) - 2):
            row[zlib.crc32(question[i : i + 3].casefold().encode()) % N_TRIGRAMS] += 1
    return torch.nn.functional.normalize(counts)


# ---- Router --------------------------------------------------------------------------------------


def learn_router(setup: Setup):
    """Train a router on the lessons, and return it as a system.

    The router asks the worker most likely to be right: ridge regression predicts each worker's
    success from the question's trigrams. RouterDC (NeurIPS 2024) also learns from each worker's
    success, but with a fine-tuned encoder and contrastive losses.
    """
    pools = [setup.pool] * len(setup.lessons)
    answered = ask_each(setup.lessons, pools, LESSON, range(len(setup.pool)))
    right = np.array([[rollout.right for rollout in group] for group in answered], np.float32)
    right = torch.from_numpy(right).nan_to_num(0.5)  # (P lessons, W workers); 0.5: lost
    x = trigrams([problem.question for problem in setup.lessons])  # (P, 4096)
    # Solve the ridge regression in its dual form, with a (P, P) matrix instead of (4096, 4096).
    weights = x.T @ torch.linalg.solve(x @ x.T + torch.eye(len(x)), right)  # (4096, W)

    def plan(rollout):
        best = int((trigrams([rollout.question]) @ weights).argmax())
        return Workflow([Step(best, rollout.question, [])])

    return planned(plan, ask_bare)


router = System(learn_router, ("lessons",), calls=1, calls_to_learn=2_000)

# ---- MasRouter -----------------------------------------------------------------------------------

STEPS = 500  # policy-gradient steps
DESIGNS = 8  # workflows sampled for each lesson in a step
AGENTS = 5  # the maximum number of agents in a shape of collaboration (see `shapes`)


def shapes() -> list[list[tuple[str, list[int]]]]:
    """Return all shapes: an agent alone, and chains, reflections and debates of 2 to AGENTS agents.

    A shape lists its agents in order. Each agent is a pair: its subtask, and the numbers of the
    earlier agents whose responses it sees.
    """
    found = [[(SOLVE_IT, [])]]
    for n in range(2, AGENTS + 1):
        before = [list(range(i)) for i in range(n)]
        chain = [(SOLVE_IT, seen[-1:]) for seen in before]
        reflection = [(REFLECT if seen else SOLVE_IT, seen) for seen in before]
        debate = [(SOLVE_IT, [])] * (n - 1) + [(AGGREGATE, before[-1])]
        found += [chain, reflection, debate]
    return found


SHAPES = shapes()


def build(choices: list[int]) -> Workflow:
    """Return the workflow that assigns workers to the agents of a shape.

    choices: The shape's index in SHAPES, then the pool numbers of AGENTS workers. Workers beyond
        the shape's number of agents are ignored.
    """
    shape, *workers = choices
    steps = []
    for worker, (subtask, access) in zip(workers, SHAPES[shape]):
        steps.append(Step(worker, subtask, access))
    return Workflow(steps)


def learn_masrouter(setup: Setup):
    """Train a small MasRouter (arXiv 2502.11133) on the lessons, and return it as a system.

    A linear policy on the question's trigrams chooses a shape and each agent's worker. The policy
    is trained by policy gradient on sampled choices. Afterwards, the likeliest choices are taken.
    The original encodes the question with a language model, gives the agents roles, makes each
    choice depend on the earlier choices, and penalizes tokens instead of calls.
    """
    rng = random.Random(setup.settings.seed)
    torch.manual_seed(setup.settings.seed)
    sizes = [len(SHAPES)] + [len(setup.pool)] * AGENTS
    n_agents = torch.tensor([len(shape) for shape in SHAPES])
    # The policy has one head for the shape, then one for each agent. The choice for agent i is used
    # only if the shape has more than i agents; the choice of the shape is always used.
    first_use = torch.tensor([0, *range(AGENTS)])[:, None, None]
    weights = torch.zeros(N_TRIGRAMS, sum(sizes), requires_grad=True)
    optimizer = torch.optim.Adam([weights], lr=0.05)

    for _ in progress("masrouter learns", range(STEPS)):
        # Sample T designs (workflows) for each of B lessons, and run them.
        batch = rng.sample(setup.lessons, min(BATCH, len(setup.lessons)))
        scores = trigrams([problem.question for problem in batch]) @ weights
        heads = [torch.distributions.Categorical(logits=part) for part in scores.split(sizes, -1)]
        choices = torch.stack([head.sample([DESIGNS]) for head in heads])  # (6, T, B)
        pools = [setup.pool] * len(batch) * DESIGNS
        rollouts = new_rollouts(batch * DESIGNS, pools, LESSON)
        for rollout, choice in zip(rollouts, choices.flatten(1).T.tolist()):
            rollout.workflow = build(choice)
        roll_out(rollouts, judge=grade_once())

        # Make choices likelier if their workflow earned more than the lesson's mean, and less
        # likely if it earned less.
        value = torch.tensor(rewards(rollouts)).view(DESIGNS, -1)  # (T, B)
        advantage = (value - value.nanmean(0)).nan_to_num()
        is_used = n_agents[choices[0]] > first_use  # (6, T, B)
        logp = torch.stack([head.log_prob(choice) for head, choice in zip(heads, choices)])
        entropy = torch.stack([head.entropy() for head in heads]).mean()
        loss = -(advantage * logp * is_used).mean() - 0.02 * entropy
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def plan(rollout):
        scores = trigrams([rollout.question])[0] @ weights
        return build([int(part.argmax()) for part in scores.split(sizes)])

    return planned(plan)


masrouter = System(learn_masrouter, ("lessons",), calls=2, calls_to_learn=15_000)

# ---- TRINITY -------------------------------------------------------------------------------------

# The folder of the model whose hidden states TRINITY reads. train.py --preset=laptop saves this
# model after the warm start.
CHECKPOINT = "out/laptop/reference"
GENERATIONS = 100
POPULATION = 32
ROLES = {
    "thinker": "Solve what comes first, and say how to go on from there.",
    "worker": SOLVE_IT,
    "verifier": "Check the last response. Say ACCEPT if it is right and whole, else what is wrong.",
}
# Matches a verifier's approval. The laptop world's specialists reply with the second phrase instead
# of ACCEPT.
ACCEPTS = re.compile(r"\bACCEPT\b|nothing here to work on")


def hidden_states():
    """Return a function: text -> the model's hidden state (C) at a chat's second-to-last token.

    The chat has an empty system turn, then the text as the user's turn.
    """
    if not os.path.exists(CHECKPOINT):
        raise ValueError(f"trinity needs {CHECKPOINT}: run train.py --preset=laptop first")
    model, tokenizer, _ = load_conductor(CHECKPOINT)

    @lru_cache(100_000)
    def state_of(text):
        ids = tokenizer.chat([{"role": "system", "content": ""}, {"role": "user", "content": text}])
        ids = torch.tensor([ids[-model.config.max_position_embeddings :]], device=model.device)
        with torch.no_grad():
            hidden = model(ids, head=lambda x: x[0, -2])  # (C)
        return hidden.float().cpu().numpy()

    return state_of


def principal_axes(states: np.ndarray) -> np.ndarray:
    """Return the first 24 principal axes of centered states (P, C), as columns (C, 24).

    Each axis is scaled so that the projections of the states onto it have a variance of about 1.
    """
    _, scale, axes = np.linalg.svd(states, full_matrices=False)
    return math.sqrt(len(states)) * axes[:24].T / (scale[:24] + 1e-3 * scale[0])


def learn_trinity(setup: Setup):
    """Train a small TRINITY (arXiv 2512.04695) on the lessons, and return it as a system.

    On each turn, a linear head on a small model's hidden state picks a worker and its role. The
    head is trained by an evolution strategy. In the original, the model has 0.6 B parameters and
    reads all turns, and a separable CMA-ES evolves some of its parameters together with the head.
    Here the head sees 24 principal components, the model and the workers see only the question and
    the newest turn, and each call lowers the reward.
    """
    state_of = hidden_states()
    states = np.stack([state_of(problem.question) for problem in setup.lessons])  # (P, C)
    center = states.mean(0)
    axes = principal_axes(states - center)  # (C, 24)

    def choose_turns(rollouts, heads):
        """Choose each rollout's next turn, and yield the rollout.

        The turn becomes the rollout's workflow of one step, and `written` holds the turn's role. If
        the last turn was a verifier's approval, the workflow is empty, which ends the rounds.
        """
        for rollout in rollouts:
            last = rollout.previous
            text = rollout.question + (f"\n{last.written}: {last.answer}" if last else "")
            # The features are 24 principal components and a 1 for the bias: (25).
            features = np.append((state_of(text) - center) @ axes, 1.0)
            for_worker, for_role = np.split(features @ heads[rollout.number], [-len(ROLES)])
            rollout.written = [*ROLES][for_role.argmax()]
            step = Step(int(for_worker.argmax()), ROLES[rollout.written], [], wrote_all=True)
            is_accepted = last and last.written == "verifier" and ACCEPTS.search(last.answer)
            rollout.workflow = Workflow([] if is_accepted else [step])
            yield rollout

    def take_turns(rollouts, heads):
        """Run up to five rounds (§3.2) of one step each; merge each rollout's rounds into one.

        The answer is the last response in the role "worker". If no turn had that role, the answer
        is the last response.

        heads: Heads of shape (25, W + 3). A rollout whose number is n uses heads[n].
        """
        final_rounds = conduct(
            lambda rollouts: choose_turns(rollouts, heads),
            rollouts,
            extra_rounds=4,
            tries=1,
            judge=grade_once(),
            # The number is part of a call's id. Use 0 for all heads, so that equal calls have equal
            # ids, and --replay makes them only once.
            call=lambda rollout, i: call_worker(replace(rollout, number=0), i),
        )
        merged = []
        for rollout in final_rounds:
            turns = [turn for turn in rollout.rounds() if turn.workflow.steps]
            by_worker = [i for i, turn in enumerate(turns) if turn.written == "worker"]
            merged.append(merge(turns, [len(turns) - 1, *by_worker][-1]))
        return merged

    # Evolve the head: in each generation, try random steps away from it, and move it by the mean of
    # the best quarter of the steps.
    rng = random.Random(setup.settings.seed)
    noise = np.random.default_rng(setup.settings.seed)
    head = np.zeros((axes.shape[1] + 1, len(setup.pool) + len(ROLES)))  # (25, W + 3)
    for _ in progress("trinity evolves", range(GENERATIONS)):
        batch = rng.sample(setup.lessons, min(BATCH, len(setup.lessons)))
        steps = noise.standard_normal((POPULATION, *head.shape))
        originals = new_rollouts(batch, [setup.pool] * len(batch), LESSON)
        rollouts = []
        for number in range(POPULATION):
            rollouts += [replace(rollout, number=number) for rollout in originals]
        fitness = rewards(take_turns(rollouts, head + steps)).reshape(POPULATION, -1)
        order = np.nan_to_num(fitness).mean(1).argsort()
        # Do not normalize the head: as it grows, later steps change its direction less.
        head += steps[order[-POPULATION // 4 :]].mean(0)
    return lambda problems, pools, prefix: take_turns(new_rollouts(problems, pools, prefix), [head])


trinity = System(learn_trinity, ("lessons",), calls=3, calls_to_learn=40_000)
