"""Print questions about capitals, sums and words for the pool of assets/lm_workers.py.

    python assets/lm_questions.py > questions.jsonl

The lines come in blocks of five. train.py and eval.py hold out the last line of each block. All
questions about the same capital, sum or word are at the same position in their blocks, so
they are either all held out or all trained on.
"""

import json
import os
import random
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from workers import CITIES, DIGITS, FRAMES, sums

CONSONANTS, VOWELS = "bdfgklmnprst", "aeiou"


def draw_word(rng: random.Random) -> str:
    n_syllables = rng.choice((2, 3))
    return "".join(rng.choice(CONSONANTS) + rng.choice(VOWELS) for _ in range(n_syllables))


def main():
    rng = random.Random(0)
    triples = dict(rng.sample([*sums(DIGITS, DIGITS).items()], 500))
    words = [draw_word(rng) for _ in range(500)]
    kinds = {  # kind -> {expression: answer}
        "capital": CITIES,
        "sum": triples,
        "word backwards": {f"{word} backwards": word[::-1] for word in words},
        "capital backwards": {f"{name} backwards": city[::-1] for name, city in CITIES.items()},
    }

    blocks = []
    for kind, answers in kinds.items():
        names = [*answers]
        # There are only 36 capitals, so each of their blocks is printed five times.
        repeats = 5 if len(names) < 99 else 1
        for start in range(0, len(names) // 5 * 5, 5):
            for frame in FRAMES * repeats:
                blocks.append(
                    [
                        {"question": frame.format(name), "answer": answers[name], "kind": kind}
                        for name in names[start : start + 5]
                    ]
                )
    rng.shuffle(blocks)
    for block in blocks:
        for row in block:
            print(json.dumps(row))


if __name__ == "__main__":
    main()
