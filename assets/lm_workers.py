"""Workers for a pool: a language model (SmolLM2-135M), a calculator, and a reverser of words.

assets/lm_pool.json lists the three workers. `last_word` grades their answers, and
assets/lm_questions.py prints the questions. assets/results-earlier.md says what a Conductor learned
with these workers.
"""

import functools
import re

import torch

from model import Qwen, Tokenizer
from sample import generate

NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
EXAMPLES = [
    {"role": "user", "content": "Spell the capital of Canada backwards."},
    {"role": "assistant", "content": "The capital of Canada is Ottawa."},
    {"role": "user", "content": "Which city is the capital of Brazil?"},
    {"role": "assistant", "content": "The capital of Brazil is Brasilia."},
]
SIGNS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}


def last_text(messages: list[dict]) -> str:
    """Return the last response that a worker is shown, or else the first line of the question."""
    responses = [message["content"] for message in messages if message["role"] == "assistant"]
    if responses:
        return responses[-1]
    return messages[0]["content"].removeprefix("Question:\n").split("\n")[0]


@functools.cache
def load():
    return Qwen.from_pretrained(NAME, torch.bfloat16), Tokenizer.from_pretrained(NAME)


@functools.cache
def complete(text: str) -> str:
    """Return the language model's greedy answer of at most 12 tokens, given the two examples."""
    model, tokenizer = load()
    prompt = tokenizer.chat(EXAMPLES + [{"role": "user", "content": text}])
    [[completion]] = generate(model, [prompt], 1, 12, 0.0, tokenizer.end_ids)
    return tokenizer.decode(completion.tokens).strip()


# ---- The workers


def smollm2(messages: list[dict]) -> str:
    return complete(last_text(messages))


def calculate(messages: list[dict]) -> str:
    found = re.search(r"(\d+) ([-+*]) (\d+)", last_text(messages))
    if not found:
        return "There is nothing to calculate."
    return str(SIGNS[found[2]](int(found[1]), int(found[3])))


def reverse(messages: list[dict]) -> str:
    words = re.findall(r"\w+", last_text(messages).replace(" backwards", ""))
    return words[-1][::-1] if words else "There is no word."


# ---- The grader


def last_word(problem, response: str) -> bool:
    return re.findall(r"-?\w+", response)[-1:] == [problem.answer]
