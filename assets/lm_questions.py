"""Print questions about capitals, sums and words for the pool of assets/lm_workers.py.

    python assets/lm_questions.py > questions.jsonl

train.py and eval.py hold out about a fifth of the questions. A question is left out if it would be
held out while the first question for the same expression is not, or the reverse. So no held-out
question is a trained one in other words.
"""

import json
import os
import random
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from eval import hash_of
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

    rows = []
    for kind, answers in kinds.items():
        # There are only 36 capitals, so each question about one is printed five times.
        repeats = 5 if len(answers) < 99 else 1
        for name, answer in answers.items():
            questions = [frame.format(name) for frame in FRAMES]
            for question in questions * repeats:
                # Hashes up to 0.2 are held out (eval.split_of_file).
                if (hash_of(question) <= 0.2) == (hash_of(questions[0]) <= 0.2):
                    rows.append({"question": question, "answer": answer, "kind": kind})
    rng.shuffle(rows)
    for row in rows:
        print(json.dumps(row))


if __name__ == "__main__":
    main()
