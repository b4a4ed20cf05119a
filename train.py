"""Train a Conductor with GRPO.

    torchrun --nproc_per_node=2 train.py                      the laptop world on a CPU, in minutes; with CUDA the paper's run
    torchrun --nproc_per_node=2 train.py --preset=laptop      the laptop world anywhere
    python train.py --iterations=20 --seed=2                  any setting below is a flag; one process works too

One iteration: sample workflows, run them over the workers, reward their answers, update. A run writes into --out: metrics.jsonl (a line
an iteration), traces/ (every workflow with what its workers said), checkpoints/ (Hugging Face's layout; checkpoint is the newest), and ends
with a table. Killed at any moment, it goes on with --resume as if nothing had happened.
"""
import collections
import contextlib
import glob
import itertools
import json
import math
import os
import random
import shutil
import signal
import sys
import time
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tokenizers import AddedToken, Regex, Tokenizer as BPE, decoders, models, pre_tokenizers, trainers
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import distribute_tensor
from tqdm import tqdm

import eval as evaluation
from eval import grade, load, random_completion
from grpo import Episode, advantages, update
from model import Config, Qwen, Tokenizer, configure, read_tensors, write_json, write_tensors
from sample import generate
from workers import WorkerError, load_pool
from workflow import WorkflowError, messages, parse, submit


@dataclass
class Settings:
    preset: str = ""  # laptop or paper; the default is laptop without CUDA, paper with it
    out: str = "out/laptop"
    seed: int = 1
    init_from: str = ""  # a checkpoint folder; "" makes a tiny model and teaches it the format first (warm_steps)
    data: str = "laptop"
    pool: str = "local"
    budget: float = 0.0  # dollars that the workers may cost; before it is passed the run stops, with a checkpoint. 0: no limit
    replay: str = ""  # a file that keeps the replies to rollouts, so that a run started again does not pay for them again
    style: str = "short"  # of the Conductor's prompt: full (App. E), or short for models too small to read instructions
    max_steps: int = 5  # of a workflow
    # one iteration (App. A.1)
    iterations: int = 360
    questions: int = 8
    rollouts: int = 64  # of each question
    max_new_tokens: int = 96
    temperature: float = 1.0
    # the objective (Eqs. 1 and 2) and AdamW
    lr: float = 1e-3
    beta2: float = 0.99  # of AdamW
    warmup: float = 0.03  # share of the run over which lr rises; then it falls as a cosine
    clip: float = 0.2
    beta: float = 0.2  # weight of the KL to the policy the run started from; it fades to 0 over the run
    minibatches: int = 4  # optimizer steps an iteration, each on its share of every group
    token_budget: int = 8192  # of a micro-batch
    # the tiny model, and the warm start that teaches it the format
    width: int = 128
    layers: int = 2
    warm_steps: int = 400
    warm_batch: int = 32
    warm_lr: float = 6e-3
    test: int = 224  # held-out problems, at the end
    # checkpoints
    save_every: int = 40  # iterations
    keep: int = 2  # of the newest; the best is kept too
    resume: bool = False  # go on from the newest checkpoint in out, if there is one
    # ablations (README)
    access: bool = True  # False: access lists are forced empty
    subtasks: bool = True  # False: every subtask reads "Solve the question."
    shuffle: bool = False  # True: at the final evaluation every worker has another's number


PRESETS = {
    "laptop": {},
    "paper": dict(out="out/paper", init_from="models/Qwen/Qwen2.5-7B", data="paper", pool="paper", style="full", iterations=200, questions=4,
                  rollouts=64, max_new_tokens=1024, lr=1e-6, beta2=0.999, beta=0.0, minibatches=1, token_budget=16384),
}


# ---------------------------------------------------------------------------------------------------------------------------------
# The tiny Conductor: a tokenizer and a model made on the spot, and a warm start that teaches the format and nothing else


def tiny_tokenizer(texts: list[str]) -> Tokenizer:
    """A byte-level BPE like Qwen2.5's, of 900 tokens. Its pieces differ: a quoted subtask, a list's opening and an empty or "all" access
    list are one token each, so that choosing one is one decision."""
    pieces = (r'\p{L}+\n', r'\n\w+ = \[', r',? ?"[^"\d\n]*"', r' ?\["all"\],?', r' ?\[\],?', r' ?\p{L}+', r' ?\d', r' ?[^\s\p{L}\d]+',
              r'\s+')
    bpe = BPE(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex("|".join(pieces)), "isolated"),
                                                 pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    bpe.decoder = decoders.ByteLevel()
    special = [AddedToken(t, special=True, normalized=False) for t in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")]
    bpe.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=900, special_tokens=special, show_progress=False,
                                                      initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return Tokenizer(bpe)


def tiny_conductor(s: Settings, problems, n_workers: int) -> tuple[Qwen, Tokenizer]:
    rng, texts = random.Random(s.seed), []
    for p in problems[:4000]:
        texts += [m["role"] + "\n" + m["content"] for m in messages(p.question, n_workers, s.max_steps, style=s.style)]
        texts += ["assistant\n" + random_completion(p.question, rng, n_workers, s.max_steps)]
    tokenizer = tiny_tokenizer(texts)
    model = Qwen(Config(len(tokenizer), s.width, 3 * s.width, s.layers, num_attention_heads=4, num_key_value_heads=2, rope_theta=100.0,
                        tie_word_embeddings=True, max_position_embeddings=1024))
    for name, p in model.named_parameters():
        if p.dim() > 1:  # wider than Qwen's 0.02, so that a model this narrow learns to copy within a hundred steps
            torch.nn.init.normal_(p, std=0.1 if "embed" in name else 0.06)
    return model, tokenizer


def warm_start(model, tokenizer, problems, n_workers: int, s: Settings, rank: int, world: int):
    """Supervised learning of random workflows in the right format. The question's own text enters the loss a little, so that the model
    learns to tell questions apart; what a good workflow is, nothing here says.

    The logits are divided by 1.5: at temperature 1 the model is then sharper than its data where the format leaves no choice, and still
    uniform where the data are."""
    rng = random.Random(s.seed)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.0, fused=True)
    for step in tqdm(range(s.warm_steps), "warm start: the format", disable=None if rank == 0 else True, leave=False):
        rows = []
        for problem in rng.choices(problems, k=s.warm_batch):
            prompt = tokenizer.chat(messages(problem.question, n_workers, s.max_steps, style=s.style))
            completion = tokenizer.encode(random_completion(problem.question, rng, n_workers, s.max_steps)) + [tokenizer.eos_id]
            rows.append((prompt + completion, [0.1] * len(prompt) + [1.0] * len(completion)))
        total = sum(sum(weights) for _, weights in rows)
        rows = rows[rank::world]
        T = max(len(row) for row, _ in rows)
        ids = torch.tensor([row + [0] * (T - len(row)) for row, _ in rows], device=model.device)  # (B, T)
        weight = torch.tensor([w + [0.0] * (T - len(w)) for _, w in rows], device=model.device)
        loss = F.cross_entropy(model(ids)[:, :-1].transpose(1, 2) / 1.5, ids[:, 1:], reduction="none")  # (B, T-1)
        ((loss * weight[:, 1:]).sum() * world / total).backward()  # FSDP averages over ranks
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        set_lr(optimizer, s.warm_lr * schedule(step, s.warm_steps, 0.05))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


# ---------------------------------------------------------------------------------------------------------------------------------
# One iteration's rollouts


@dataclass
class Rollout:
    problem: evaluation.Problem
    prompt: list[int]
    completion: object  # sample.Completion
    text: str
    trace: object = None  # workflow.Trace; None: the text is no workflow
    reward: float | None = 0.0  # §3.1; None: a worker was lost on the way, so nobody knows


def collect(sampler: Qwen, tokenizer, problems, pool, s: Settings, seed: int, bar) -> tuple[list[list[Rollout]], dict]:
    """Roll out every problem s.rollouts times. A workflow runs over the workers as soon as it is written, while others are being sampled.

    Returns the rollouts as [problem][rollout], and the seconds of sampling and of waiting for workers after it."""
    prompts = [tokenizer.chat(messages(p.question, len(pool), s.max_steps, style=s.style)) for p in problems]
    running = {}

    def start(i, j, completion):
        bar.update()
        with contextlib.suppress(WorkflowError):
            workflow = ablate(parse(tokenizer.decode(completion.tokens), len(pool), s.max_steps), s)
            running[i, j] = submit(workflow, problems[i].question, pool, nonce=f"{seed}/{problems[i].id}/{j}")

    begun = time.perf_counter()
    groups = generate(sampler, prompts, s.rollouts, s.max_new_tokens, s.temperature, eos_id=tokenizer.eos_id, seed=seed,
                      n_ids=len(tokenizer), on_finish=start)
    sampled = time.perf_counter()
    rollouts = [[Rollout(p, prompt, c, tokenizer.decode(c.tokens)) for c in group] for p, prompt, group in zip(problems, prompts, groups)]
    for (i, j), future in running.items():
        r = rollouts[i][j]
        r.trace = future.result()
        r.reward = None if r.trace.error else 1.0 if grade(r.problem, r.trace.answer) else 0.5
    return rollouts, {"sampling": sampled - begun, "workers": time.perf_counter() - sampled}


def ablate(workflow, s: Settings):
    for step in workflow.steps:
        if not s.access:
            step.access, step.sees_all = [], False
        if not s.subtasks:
            step.subtask = "Solve the question."
    return workflow


# ---------------------------------------------------------------------------------------------------------------------------------
# The run


def schedule(step: int, steps: int, warmup: float) -> float:
    """Linear warm-up over a share of the steps, then a cosine to 0 (App. A.1)."""
    warm = max(1, round(warmup * steps))
    return (step + 1) / warm if step < warm else 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


def set_lr(optimizer, lr: float):
    for group in optimizer.param_groups:
        group["lr"] = lr


def shard(model: Qwen, device: str) -> Qwen:
    """FSDP2: fp32 master weights, gradients and Adam state in equal parts on all ranks; computation in bf16 on CUDA."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False) if device == "cuda" else MixedPrecisionPolicy()
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


@torch.no_grad()
def gather(whole: Qwen, model: Qwen):
    """Copy the sharded weights into a whole model, in its dtype (every rank takes part)."""
    for mine, part in zip(whole.parameters(), model.parameters()):
        mine.copy_(part.full_tensor())


def on_rank0(job):
    """Run `job` on rank 0 and return its result on every rank. What it raises ends all ranks, with its text printed once."""
    result = [None, None]
    if dist.get_rank() == 0:
        try:
            result[0] = job()
        except (OSError, ValueError, WorkerError, SystemExit) as e:
            result[1] = str(e)
    dist.broadcast_object_list(result)
    if result[1] is not None:
        raise SystemExit(f"train.py: {result[1]}" if dist.get_rank() == 0 else 1)
    return result[0]


def everyone(mine: list) -> list:
    """The concatenation of every rank's list, on every rank."""
    lists = [None] * dist.get_world_size()
    dist.all_gather_object(lists, mine)
    return [item for items in lists for item in items]


def preflight(s: Settings):
    """What would fail late fails here, all of it at once, and every worker is asked for a word. Returns the pool's address, and the
    dollars that this has left of the budget."""
    lacks = []
    messages("", 1, s.max_steps, style=s.style)  # knows the styles
    if s.preset == "paper":
        gpus = [torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count())]
        if sum(memory > 75e9 for memory in gpus) < 2 or dist.get_world_size() < 2:
            lacks.append(f"2 GPUs of 80 GB and 2 processes (here: {len(gpus)} GPUs, {dist.get_world_size()} processes)")
    if s.init_from and not os.path.exists(os.path.join(s.init_from, "config.json")):
        lacks.append(f"a checkpoint folder at --init_from={s.init_from} (python model.py NAME fetches one)")
    try:
        load(s.data, "train")
    except ValueError as e:
        lacks.append(f"problems ({e})")
    if s.replay and os.path.commonpath([os.path.abspath(s.replay), os.path.abspath(s.out)]) == os.path.abspath(s.out):
        raise SystemExit(f"--replay={s.replay}: a place outside of --out, please, which the next run moves")
    pool = load_pool(s.pool, replay=s.replay, budget=s.budget)
    lacks += [f"${w.api_key_env} for {w.name}" for w in pool if w.api_key_env and not os.environ.get(w.api_key_env)]
    if lacks:
        raise SystemExit(f"the run lacks {'; '.join(lacks)}. The laptop world needs nothing: --preset=laptop")
    for key in ("questions", "warm_batch"):
        if getattr(s, key) < dist.get_world_size():
            raise SystemExit(f"--{key}={getattr(s, key)}: expected at least one for each of the {dist.get_world_size()} processes")
    if s.width % 8:
        raise SystemExit(f"--width={s.width}: expected a multiple of 8, for 4 heads of an even size")
    for worker in pool:
        worker.chat([{"role": "user", "content": "Say hello."}])
    return pool[0].base_url, s.budget and max(pool[0].budget.left, 1e-9)


def make_room(s: Settings):
    """An earlier run in --out is kept, under the next free number."""
    s.out = os.path.normpath(s.out)
    if os.path.exists(os.path.join(s.out, "metrics.jsonl")):
        kept = next(f"{s.out}.{i}" for i in itertools.count(1) if not os.path.exists(f"{s.out}.{i}"))
        os.rename(s.out, kept)
        tqdm.write(f"the earlier run in {s.out} is now {kept}")
    os.makedirs(os.path.join(s.out, "traces"), exist_ok=True)
    write_json(os.path.join(s.out, "settings.json"), asdict(s))


def write_traces(s: Settings, it: int, rank: int, groups):
    """traces/ITERATION.RANK.jsonl: every rollout with what its workers said."""
    file = os.path.join(s.out, "traces", f"{it:05d}.{rank}.jsonl")
    with open(file + ".tmp", "w") as f:
        for r in itertools.chain(*groups):
            told = {"trace": r.trace.to_json()} if r.trace else {"text": r.text}
            f.write(json.dumps({"problem": r.problem.id, "answer": r.problem.answer, "reward": r.reward, **told}) + "\n")
    os.replace(file + ".tmp", file)


def summary(group: list[Rollout]) -> list[tuple]:
    """What the statistics need of each rollout: kind, reward, steps, calls, dollars, tokens."""
    return [(r.problem.kind, r.reward, *((len(r.trace.workflow.steps), r.trace.calls, r.trace.cost) if r.trace else (0, 0, 0.0)),
             len(r.completion.tokens)) for r in group]


def record(s: Settings, it: int, rollouts: list[tuple], stats: list[dict], seconds: dict, say):
    """One line of metrics.jsonl and one on the screen, about all ranks' rollouts."""
    def mean(values):
        values = list(values)
        return sum(values) / max(len(values), 1)

    kinds, rewards, steps, calls, costs, tokens = zip(*rollouts)
    known = [(kind, reward) for kind, reward in zip(kinds, rewards) if reward is not None]
    m = {"iteration": it, "reward": mean(r for _, r in known), "accuracy": mean(r == 1 for _, r in known),
         "parsed": mean(n > 0 for n in steps), "lost": len(rewards) - len(known), "steps": mean(n for n in steps if n), "calls": sum(calls),
         "cost": None if None in costs else sum(costs),  # dollars; None: unknown
         "gap": stats[0]["gap"],
         **{key: mean(stat[key] for stat in stats) for key in ("approx_kl", "clipfrac", "kl", "entropy", "grad_norm")},
         "by_kind": {kind: mean(r == 1 for k, r in known if k == kind) for kind in dict.fromkeys(kinds)},
         "steps_by_kind": {kind: mean(n for k, n in zip(kinds, steps) if k == kind and n) for kind in dict.fromkeys(kinds)}}
    took = sum(seconds.values())
    say(f"{it + 1:4d}/{s.iterations} reward {m['reward']:.3f} accuracy {m['accuracy']:.3f} parsed {m['parsed']:.3f} steps {m['steps']:.2f} "
        f"calls {m['calls']} lost {m['lost']} |Δlogp| {m['gap']:.0e} grad {m['grad_norm']:.2f} entropy {m['entropy']:.2f} "
        f"{sum(tokens) / took:.0f} tokens/s, s: {' '.join(f'{name} {t:.1f}' for name, t in seconds.items())}")
    if dist.get_rank() == 0:
        with open(os.path.join(s.out, "metrics.jsonl"), "a") as f:
            f.write(json.dumps({**m, "tokens_per_second": sum(tokens) / took, "seconds": seconds}) + "\n")
    return m["reward"]


# ---------------------------------------------------------------------------------------------------------------------------------
# Checkpoints. Weights and Adam's moments are all there is to save: whatever is random follows from the seed and the iteration.

MOMENTS = ("exp_avg", "exp_avg_sq")


def save(s: Settings, folder: str, model, tokenizer, n_workers: int, optimizer=None, reward: float = 0.0):
    """Weights, and with an optimizer its moments, in Hugging Face's layout, written beside and renamed. Every rank takes part in gathering;
    rank 0 writes."""
    new, steps = folder + ".tmp", next((int(state["step"]) for state in optimizer.state.values()), 0) if optimizer else 0
    for key in ("", *MOMENTS) if steps else ("",):
        tensors = ((name, (optimizer.state[p][key] if key else p).full_tensor()) for name, p in model.named_parameters())
        if dist.get_rank() == 0:
            write_tensors(os.path.join(new, key), model.config, tensors)
        else:
            collections.deque(tensors, maxlen=0)
    if dist.get_rank() == 0:
        tokenizer.save_pretrained(new)
        write_json(os.path.join(new, "conductor.json"), {  # what workflow.py needs to ask as training asked
            "style": s.style, "max_steps": s.max_steps, "max_new_tokens": s.max_new_tokens, "n_workers": n_workers})
        write_json(os.path.join(new, "training.json"), {"reward": reward, "optimizer_steps": steps})
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(new, folder)


def checkpoints(out: str) -> list[str]:
    """The whole checkpoints of a run, oldest first: those being written have another name."""
    return sorted(folder for folder in glob.glob(os.path.join(glob.escape(out), "checkpoints", "*")) if os.path.basename(folder).isdigit())


def tidy(s: Settings):
    """Point out/checkpoint at the newest, and drop all but the newest few and the best."""
    def reward(folder):
        with open(os.path.join(folder, "training.json")) as f:
            return json.load(f)["reward"]

    link, folders = os.path.join(s.out, "checkpoint"), checkpoints(s.out)
    os.symlink(os.path.join("checkpoints", os.path.basename(folders[-1])), link + ".tmp")
    os.replace(link + ".tmp", link)
    for folder in set(folders) - {*folders[-s.keep:], max(folders, key=reward)}:
        shutil.rmtree(folder)


def restore(optimizer, model, folder: str):
    """Adam's moments as `save` left them, each rank its part."""
    with open(os.path.join(folder, "training.json")) as f:
        steps = json.load(f)["optimizer_steps"]
    parameters = dict(model.named_parameters())
    for p in parameters.values() if steps else ():
        optimizer.state[p]["step"] = torch.tensor(float(steps), device=p.device)
    for key in MOMENTS if steps else ():
        for name, tensor in read_tensors(os.path.join(folder, key), model):
            p = parameters[name]
            optimizer.state[p][key] = distribute_tensor(tensor.to(p.device), p.device_mesh, p.placements, src_data_rank=None).clone()


def rewind(s: Settings, iteration: int):
    """Make the run's files what they were after so many iterations, and say which settings are new."""
    with open(os.path.join(s.out, "settings.json")) as f:
        old = json.load(f)
    changed = [f"{key} {old.get(key)} -> {value}" for key, value in asdict(s).items() if value != old.get(key) and key != "resume"]
    tqdm.write(f"going on in {s.out} after iteration {iteration}" + (f", with changed settings: {', '.join(changed)}" if changed else ""))
    file = os.path.join(s.out, "metrics.jsonl")
    with open(file) as f, open(file + ".tmp", "w") as new:
        new.writelines(itertools.islice(f, iteration))
    os.replace(file + ".tmp", file)
    for trace in glob.glob(os.path.join(glob.escape(s.out), "traces", "*")):
        if int(os.path.basename(trace)[:5]) >= iteration:
            os.remove(trace)
    write_json(os.path.join(s.out, "settings.json"), asdict(s))


def finish(s: Settings, sampler, tokenizer, test, pool, say):
    """The final table on held-out problems, and what was learned for each kind. The Conductor is greedy here."""
    rank, world = dist.get_rank(), dist.get_world_size()
    traces = evaluation.conduct(sampler, tokenizer, test[rank::world], pool[1:] + pool[:1] if s.shuffle else pool, s.style, s.max_steps,
                                s.max_new_tokens, lambda workflow: ablate(workflow, s))
    shares = everyone([traces])  # share r holds the problems r, r + world, …
    traces = [shares[i % world][i // world] for i in range(len(test))]
    if rank == 0:
        say("\n" + evaluation.table(test, {"Conductor": traces, **evaluation.baselines(test, pool, s.max_steps)}))
        say("\n" + evaluation.learned(test, traces))
        if lost := sum(t is not None and t.error is not None for t in traces):
            say(f"{lost} of the {len(test)} problems are left out of the Conductor's row: {next(t.error for t in traces if t and t.error)}")
        write_json(os.path.join(s.out, "test.json"), {"accuracy": evaluation.accuracies(test, traces)})


def main(argv):
    s = Settings()
    configure(s, argv)
    s.preset = s.preset or ("paper" if torch.cuda.is_available() else "laptop")
    if s.preset not in PRESETS:
        raise SystemExit(f"--preset={s.preset}: there are {', '.join(PRESETS)}")
    for key, value in PRESETS[s.preset].items():
        setattr(s, key, value)
    if words := configure(s, argv):
        raise SystemExit(f"train.py takes --key=value settings only, not {words[0]!r}")
    for key, value in asdict(s).items():
        if type(value) in (int, float) and not (0 < value < math.inf or value == 0 and key in ("seed", "budget", "beta", "warmup", "warm_steps")):
            raise SystemExit(f"--{key}={value}: expected a number above 0")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if "RANK" in os.environ:  # set by torchrun
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
    else:
        dist.init_process_group("nccl" if device == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    try:
        train(s, device)
    except KeyboardInterrupt:
        saved = os.path.join(s.out, "checkpoint")
        kept = f"the checkpoint is in {saved}" if os.path.exists(saved) else "nothing had been learned"
        raise SystemExit(f"interrupted; {kept}" if dist.get_rank() == 0 else 1) from None
    finally:
        dist.destroy_process_group()


def train(s: Settings, device: str):
    rank, world, began = dist.get_rank(), dist.get_world_size(), time.perf_counter()
    say = tqdm.write if rank == 0 else lambda line: None
    torch.manual_seed(s.seed)
    url, budget = on_rank0(lambda: preflight(s))
    pool = load_pool(s.pool, url, s.replay, budget / world)  # one server of local specialists for all ranks
    problems, test = load(s.data, "train"), load(s.data, "test", s.test)
    done = on_rank0(lambda: checkpoints(s.out)[-1:]) if s.resume else []
    start = int(os.path.basename(done[0])) if done else 0
    source = done[0] if done else s.init_from
    try:
        if source:
            tokenizer = Tokenizer.from_pretrained(source)
            model = Qwen.from_pretrained(source, device=device, shard=lambda model: shard(model, device))
        else:
            model, tokenizer = tiny_conductor(s, problems, len(pool))
            shard(model, device)
    except (OSError, ValueError) as e:
        raise SystemExit(f"train.py: {e}" if rank == 0 else 1) from None
    on_rank0(lambda: rewind(s, start) if done else make_room(s))  # only now: init_from may be an earlier run in the same place
    config = model.config
    say(f"{sum(p.numel() for p in model.parameters()):,} parameters on {world} x {device}, {len(problems):,} problems, "
        f"{len(pool)} workers: {', '.join(w.name for w in pool)}")
    if not source:
        warm_start(model, tokenizer, problems, len(pool), s, rank, world)
        say(f"warm start: {s.warm_steps} steps of the format, {time.perf_counter() - began:.0f} s since the start")
    with torch.device(device):
        torch.set_default_dtype(torch.bfloat16 if device == "cuda" else torch.float32)
        sampler, reference = Qwen(config), Qwen(config) if s.beta else None
        torch.set_default_dtype(torch.float32)
    if reference and done:
        reference.load_state_dict(Qwen.from_pretrained(os.path.join(s.out, "reference"), sampler.lm_head.weight.dtype, device).state_dict())
    elif reference:
        gather(reference, model)
        save(s, os.path.join(s.out, "reference"), model, tokenizer, len(pool))
    optimizer = torch.optim.AdamW(model.parameters(), lr=s.lr, betas=(0.9, s.beta2), weight_decay=0.0, fused=True)

    if done:
        restore(optimizer, model, done[0])
    stopping, stopped = [], []

    def stop(*_):  # after the iteration, with a checkpoint; torchrun sends the signal a second time
        if not stopping:
            say("stopping after this iteration …")
        stopping.append("interrupted")

    def bill():
        calls, dollars, unknown = map(sum, zip(*everyone([(w.calls, w.spent, w.unpriced) for w in pool])))
        say(f"{calls:,} calls for ${dollars:.2f}{f', and {unknown:,} of them at an unknown price' if unknown else ''}")

    handlers = {sig: signal.signal(sig, stop) for sig in (signal.SIGINT, signal.SIGTERM)}
    share = s.questions * s.rollouts // world
    bar = tqdm(total=s.iterations * share, initial=start * share, desc="rollouts of rank 0", disable=None if rank == 0 else True)
    for it in range(start, s.iterations):
        batch = [problems[i % len(problems)] for i in range(it * s.questions, (it + 1) * s.questions)]
        gather(sampler, model)
        groups, seconds = collect(sampler, tokenizer, batch[rank::world], pool, s, s.seed * 1_000_000 + it, bar)
        begun = time.perf_counter()
        known = [[r.reward is not None for r in group] for group in groups]
        A = advantages([[r.reward or 0.0 for r in group] for group in groups], known).tolist()
        episodes = [[Episode(r.prompt, r.completion.tokens, r.completion.logprobs, a) for r, a in zip(group, row) if r.reward is not None]
                    for group, row in zip(groups, A)]
        left = 1 - it / s.iterations
        set_lr(optimizer, s.lr * schedule(it, s.iterations, s.warmup))
        stats = [update(model, optimizer, [e for group in episodes for e in group[m::s.minibatches]], s.clip, s.beta * left, reference,
                        s.temperature, len(tokenizer), s.token_budget) for m in range(s.minibatches)]
        seconds["training"] = time.perf_counter() - begun
        write_traces(s, it, rank, groups)
        reward = record(s, it, everyone([r for group in groups for r in summary(group)]), stats, seconds, say)
        if pool[0].budget and pool[0].budget.refused:
            stopping.append("the budget is spent")
        stopped = everyone(stopping[:1])  # on any rank: they leave together
        if stopped or (it + 1) % s.save_every == 0 or it + 1 == s.iterations:
            save(s, os.path.join(s.out, "checkpoints", f"{it + 1:05d}"), model, tokenizer, len(pool), optimizer, reward)
            on_rank0(lambda: tidy(s))
        if stopped:
            break
    bar.close()
    for sig, handler in handlers.items():
        signal.signal(sig, handler)
    if stopped:
        bill()
        raise SystemExit(f"{stopped[0]}: stopped after iteration {it + 1}; the checkpoint is in {s.out}/checkpoint" if rank == 0 else 1)
    gather(sampler, model)
    finish(s, sampler, tokenizer, test, pool, say)
    bill()
    say(f"{time.perf_counter() - began:.0f} s from start to end. "
        f"Next: python workflow.py \"{test[-1].question}\" --checkpoint={s.out}/checkpoint")


if __name__ == "__main__":
    main(sys.argv[1:])
