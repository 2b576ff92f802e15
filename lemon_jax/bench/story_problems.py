"""Templates of story problems of two or three steps, with a whole number as the answer."""

from collections.abc import Callable
from random import Random

from lemon_jax.bench.problem import NAMES

ITEMS = (
    "marbles",
    "stickers",
    "pencils",
    "shells",
    "buttons",
    "cookies",
    "coins",
    "badges",
    "postcards",
    "beads",
)
Story = Callable[[Random], tuple[str, int]]


def combine_and_lose(r: Random) -> tuple[str, int]:
    one, two = r.sample(NAMES, 2)
    a, b = r.randrange(8, 60), r.randrange(8, 60)
    c, item = r.randrange(2, a + b), r.choice(ITEMS)
    return (
        f"{one} had {a} {item} and {two} had {b}. They gave {c} away. How many {item} were left?",
        a + b - c,
    )


def packs_and_singles(r: Random) -> tuple[str, int]:
    name, item = r.choice(NAMES), r.choice(ITEMS)
    packs, size, singles = r.randrange(2, 10), r.randrange(3, 13), r.randrange(1, 20)
    return (
        f"{name} bought {packs} packs of {item} with {size} in each and {singles} single {item}. "
        f"How many {item} did {name} buy?",
        packs * size + singles,
    )


def share_after_loss(r: Random) -> tuple[str, int]:
    friends, each, lost = r.randrange(2, 10), r.randrange(2, 13), r.randrange(2, 25)
    name, item = r.choice(NAMES), r.choice(ITEMS)
    return (
        f"{name} had {friends * each + lost} {item} but lost {lost} of them. The rest were shared equally by "
        f"{friends} friends. How many did each friend get?",
        each,
    )


def two_prices(r: Random) -> tuple[str, int]:
    n, m, p, q = r.randrange(2, 9), r.randrange(2, 9), r.randrange(2, 15), r.randrange(2, 15)
    a, b = r.sample(["scarf", "plant", "game", "mug", "poster", "puzzle", "cap"], 2)
    question = (
        f"A {a} costs ${p} and a {b} costs ${q}. How many dollars do {n} {a}s and {m} {b}s cost together?"
    )
    return question, n * p + m * q


def earn_and_spend(r: Random) -> tuple[str, int]:
    name, rate, hours = r.choice(NAMES), r.randrange(5, 20), r.randrange(3, 12)
    spent = r.randrange(2, rate * hours)
    return (
        f"{name} earned ${rate} an hour for {hours} hours of work and then spent ${spent}. "
        "How many dollars remained?",
        rate * hours - spent,
    )


def groups_of_both(r: Random) -> tuple[str, int]:
    size, groups = r.randrange(2, 10), r.randrange(3, 12)
    boys = r.randrange(2, size * groups - 1)
    return (
        f"{boys} boys and {size * groups - boys} girls came to a camp. They were put in groups of {size}. "
        "How many groups were there?",
        groups,
    )


def shelves(r: Random) -> tuple[str, int]:
    a, b, n = r.randrange(2, 9), r.randrange(2, 9), r.randrange(3, 12)
    one, two = r.sample(["novels", "atlases", "comics", "cookbooks", "plays"], 2)
    return (
        f"A bookcase has {a} shelves of {one} and {b} shelves of {two}, and every shelf holds {n} books. "
        "How many books are in it?",
        (a + b) * n,
    )


def spoiled(r: Random) -> tuple[str, int]:
    rows, each, bad = r.randrange(3, 12), r.randrange(3, 12), r.randrange(1, 9)
    crop = r.choice(["tomato plants", "pumpkins", "rose bushes", "cabbages"])
    question = (
        f"A farmer set {rows} rows of {each} {crop}. {bad} of them dried up. How many {crop} were left?"
    )
    return question, rows * each - bad


def saving_up(r: Random) -> tuple[str, int]:
    name, weeks, rate, has = r.choice(NAMES), r.randrange(2, 15), r.randrange(3, 15), r.randrange(5, 60)
    return (
        f"{name} wants a game that costs ${has + weeks * rate} and has ${has}. Saving ${rate} a week, "
        "how many weeks does it take?",
        weeks,
    )


def pages_left(r: Random) -> tuple[str, int]:
    name, days, rate = r.choice(NAMES), r.randrange(2, 10), r.randrange(6, 40)
    rest = r.randrange(5, 150)
    return (
        f"A book has {days * rate + rest} pages. {name} read {rate} pages a day for {days} days. "
        "How many pages are still unread?",
        rest,
    )


NUMBER_TEMPLATES: tuple[Story, ...] = (
    combine_and_lose, packs_and_singles, share_after_loss, two_prices, earn_and_spend, groups_of_both,
    shelves, spoiled, saving_up, pages_left,
)  # fmt: skip
