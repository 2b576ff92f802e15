import re
from collections import Counter
from fractions import Fraction

import pytest

from lemon_jax.bench import LETTERS, Task, generate, sample
from lemon_jax.bench.sample import CHOICE_TEMPLATES
from lemon_jax.numbers import parse_number

# An independent reading of question texts: pattern -> value from its numbers.
CHECKS = [
    (r"What is (\d+)% of (\d+)\?", lambda p, n: Fraction(p * n, 100)),
    (r"takes (\d+)% off .* marked \$(\d+)\.", lambda p, n: n * (1 - Fraction(p, 100))),
    (r"buys .* for \$(\d+) and sells it for \$(\d+)\.", lambda a, b: Fraction(100 * (b - a), a)),
    (r"rise of (\d+)%, the rent of a stall is \$(\d+)", lambda p, n: n / (1 + Fraction(p, 100))),
    (r"share \$(\d+) in the ratio (\d+):(\d+)", lambda n, a, b: Fraction(n * a, a + b)),
    (r"(\d+) m long runs at (\d+) m/s\. .* bridge of (\d+) m", lambda t, v, b: Fraction(t + b, v)),
    (r"(\d+) km to a town at (\d+) km/h and comes back the same way at (\d+)",
     lambda s, a, b: 2 * s / (Fraction(s, a) + Fraction(s, b))),
    (r"in (\d+) days and \w+ in (\d+) days", lambda a, b: 1 / (Fraction(1, a) + Fraction(1, b))),
    (r"tank in (\d+) hours, a leak empties it in (\d+)", lambda a, b: 1 / (Fraction(1, a) - Fraction(1, b))),
    (r"does \$(\d+) earn in (\d+) years at (\d+)%", lambda n, y, p: Fraction(n * y * p, 100)),
    (r"\$(\d+) is put in a bank at (\d+)% a year", lambda n, p: n * (1 + Fraction(p, 100)) ** 2),
    (r"holds (\d+) litres of juice that is (\d+) percent syrup. After (\d+)",
     lambda n, p, w: Fraction(n * p, n + w)),
    (r"(\d+) red, (\d+) blue and (\d+) green balls", lambda r, b, g: Fraction(r + g, r + b + g)),
    (r"average of (\d+) numbers is (\d+)\..* becomes (\d+)\.", lambda n, m, k: (n + 1) * k - n * m),
    (r"first (\d+) positive multiples of (\d+)", lambda n, k: sum(k * i for i in range(1, n + 1))),
    (r"(\d+) \w+ are packed into boxes of (\d+)", lambda n, k: n % k),
    (r"(\d+) times as long as it is wide, and its perimeter is (\d+)",
     lambda k, p: k * Fraction(p, 2 * k + 2) ** 2),
]  # fmt: skip


@pytest.fixture(scope="module")
def choices():
    return generate("choice", 800, 7)


def test_golds_agree_with_an_independent_reading(choices):
    checked = set()
    for task in choices:
        for pattern, solve in CHECKS:
            if match := re.search(pattern, task.question):
                gold = task.options[LETTERS.index(task.gold)]
                assert parse_number(gold) == solve(*map(int, match.groups())), task
                checked.add(pattern)
    assert len(checked) == len(CHECKS)


def test_options_are_five_distinct_positive_values_in_one_style(choices):
    for task in choices:
        values = [parse_number(option) for option in task.options]
        assert len(set(values)) == len(set(task.options)) == 5, task
        assert all(value is not None and value > 0 for value in values), task
        assert len({re.sub(r"[\d./]+", "#", option) for option in task.options}) == 1, task


def test_choice_tasks_are_diverse_and_golds_uniform(choices):
    assert len(CHOICE_TEMPLATES) >= 16
    assert len({re.sub(r"[\d.]+", "#", task.question) for task in choices}) > 150
    counts = Counter(task.gold for task in choices)
    assert min(counts[letter] for letter in LETTERS[:5]) > 800 / 5 * 0.7


@pytest.mark.parametrize("kind", ["choice", "number"])
def test_deterministic_and_train_apart_from_test(kind):
    train, test = generate(kind, 300, 0), generate(kind, 300, 1, split="test")
    assert generate(kind, 300, 0) == train
    assert generate(kind, 300, 1) != train
    assert generate(kind, 30, 0) == train[:30]
    questions = [task.question for task in (*train, *test)]
    assert len(set(questions)) == 600


def test_number_golds_are_positive_whole_numbers():
    for task in generate("number", 200, 3):
        assert task.options == ()
        assert int(task.gold) > 0, task


def test_asking_for_too_many_fails_instead_of_looping(monkeypatch):
    monkeypatch.setattr(sample, "NUMBER_TEMPLATES", (lambda rng: (f"What is {rng.randrange(9)}?", 1),))
    with pytest.raises(ValueError, match="were asked for"):
        generate("number", 20, 0)


def test_prompt_shows_one_option_a_line():
    task = Task(id="t", bench="b", question="2 + 2?", options=("3", "4"), gold="B", kind="choice")
    assert task.prompt() == "2 + 2?\nA) 3\nB) 4"
    assert Task(id="t", bench="b", question="2 + 2?", gold="4", kind="number").prompt() == "2 + 2?"
