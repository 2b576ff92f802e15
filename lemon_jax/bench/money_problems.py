"""Templates about percentages, prices, shares, interest and mixtures."""

from fractions import Fraction
from random import Random

from lemon_jax.bench.problem import GOODS, NAMES, Problem, Template, problem


def percent_of(r: Random) -> Problem:
    p, n = r.randrange(5, 96, 5), r.randrange(40, 900, 20)
    text = r.choice(
        [
            f"What is {p}% of {n}?",
            f"A school has {n} pupils, and {p}% of them come by bus. How many pupils come by bus?",
            f"{r.choice(NAMES)} has read {p}% of a book of {n} pages. How many pages is that?",
        ]
    )
    part = Fraction(p * n, 100)
    return problem(text, part, n - part, part * 2, part / 2, part + p, n - p)


def discount(r: Random) -> Problem:
    price, p = r.randrange(40, 800, 20), r.randrange(5, 65, 5)
    thing = r.choice(GOODS)
    text = r.choice(
        [
            f"The price of {thing} is ${price}. It is sold at a discount of {p}%. What does the buyer pay?",
            f"A shop takes {p}% off {thing} that is marked ${price}. What is the sale price?",
            f"In a sale, {thing} marked at ${price} is reduced by {p} percent. Find the reduced price.",
        ]
    )
    off = Fraction(price * p, 100)
    return problem(text, price - off, off, price + off, price - p, price - off / 2, unit="${}")


def profit_percent(r: Random) -> Problem:
    cost, p = r.randrange(20, 500, 20), r.randrange(5, 85, 5)
    sold = cost + Fraction(cost * p, 100)
    name, thing = r.choice(NAMES), r.choice(GOODS)
    price = f"{float(sold):g}"
    text = r.choice(
        [
            f"{name} buys {thing} for ${cost} and sells it for ${price}. What is the profit in percent of "
            "the cost?",
            f"A trader paid ${cost} for {thing} and got ${price} for it. Find the gain per cent.",
        ]
    )
    return problem(text, p, sold - cost, p + 10, 100 - p, p - 5, p + 5, unit="{}%")


def reverse_percent(r: Random) -> Problem:
    base, p = r.randrange(40, 1200, 20), r.randrange(10, 80, 10)
    now = base * (100 + p) // 100
    text = r.choice(
        [
            f"After a rise of {p}%, the rent of a stall is ${now}. What was the rent before the rise?",
            f"A wage went up by {p} percent and is now ${now} a week. How much was it earlier?",
        ]
    )
    return problem(text, base, now - Fraction(now * p, 100), now - p, now + p, base + 20, unit="${}")


def ratio_share(r: Random) -> Problem:
    a, b = r.sample(range(2, 10), 2)
    part = r.randrange(6, 60)
    total = part * (a + b)
    one, two = r.sample(NAMES, 2)
    text = r.choice(
        [
            f"{one} and {two} share ${total} in the ratio {a}:{b}. How much does {one} receive?",
            f"${total} is divided between {one} and {two} so that for every ${a} of {one}, {two} gets ${b}. "
            f"What is the share of {one}?",
        ]
    )
    return problem(
        text, part * a, part * b, Fraction(total, 2), part * (a + 1), part, total - part, unit="${}"
    )


def simple_interest(r: Random) -> Problem:
    base, rate, years = r.randrange(200, 5000, 100), r.randrange(2, 13), r.randrange(2, 8)
    gain = Fraction(base * rate * years, 100)
    text = r.choice(
        [
            f"What simple interest does ${base} earn in {years} years at {rate}% a year?",
            f"{r.choice(NAMES)} lends ${base} at {rate} percent simple interest per year. How much interest "
            "is due "
            f"after {years} years?",
        ]
    )
    return problem(
        text, gain, base + gain, gain / years, gain + base * Fraction(rate, 100), gain * 2, unit="${}"
    )


def compound_interest(r: Random) -> Problem:
    base, rate = r.randrange(1000, 9000, 500), r.choice([4, 5, 6, 8, 10, 12, 20])
    full = Fraction(base * (100 + rate) ** 2, 10000)
    text = r.choice(
        [
            f"${base} is put in a bank at {rate}% a year, compounded yearly. What is it worth after two "
            "years?",
            f"Find the amount to which ${base} grows in 2 years at {rate} percent interest compounded every "
            "year.",
        ]
    )
    step = Fraction(base * rate, 100)
    return problem(text, full, base + 2 * step, base + step, full - base, full + step, unit="${}")


def change(r: Random) -> Problem:
    n, cents = r.randrange(2, 9), r.randrange(25, 480, 5)
    cost = Fraction(n * cents, 100)
    note = next(x for x in (5, 10, 20, 50) if x > cost)
    item = r.choice(["pens", "buns", "stamps", "plums", "cards", "candles"])
    each = f"${cents / 100:.2f}"
    text = r.choice(
        [
            f"{r.choice(NAMES)} buys {n} {item} at {each} each and pays with a ${note} note. What is the "
            "change?",
            f"One of a kind of {item} costs {each}. How much is left of ${note} after buying {n} of them?",
        ]
    )
    rest = note - cost
    return problem(text, rest, cost, rest + 1, rest + Fraction(cents, 100), rest + Fraction(1, 2), unit="${}")


def unit_price(r: Random) -> Problem:
    grams, more = r.sample([200, 250, 400, 500, 750, 1000, 1250, 1500], 2)
    cents_per_50g = r.randrange(10, 90, 4)
    price = Fraction(cents_per_50g * grams // 50, 100)
    other = Fraction(cents_per_50g * more // 50, 100)
    ware = r.choice(["rice", "coffee", "nuts", "cheese", "flour", "tea"])
    text = r.choice(
        [
            f"{grams} g of {ware} cost ${float(price):.2f}. At the same rate, what do {more} g cost?",
            f"If the price of {ware} is ${float(price):.2f} for {grams} grams, how much is a bag of {more} "
            "grams?",
        ]
    )
    return problem(
        text, other, price, other + 1, other * 2, other + price, other - Fraction(1, 10), unit="${}"
    )


def mixture(r: Random) -> Problem:
    litres, p = r.randrange(10, 80, 5), r.choice([10, 20, 30, 40, 50, 60])
    water = r.choice([w for w in range(5, 100, 5) if (litres * p) % (litres + w) == 0] or [litres])
    text = r.choice(
        [
            f"{water} litres of water are added to {litres} litres of a {p}% salt solution. What percent "
            "salt is the "
            "new mixture?",
            f"A can holds {litres} litres of juice that is {p} percent syrup. After {water} litres of water "
            "are poured "
            "in, what is the percentage of syrup?",
        ]
    )
    new = Fraction(litres * p, litres + water)
    return problem(text, new, Fraction(p, 2), p, Fraction(water * p, litres), new + 5, new + 2, unit="{}%")


MONEY_TEMPLATES: tuple[Template, ...] = (
    percent_of,
    discount,
    profit_percent,
    reverse_percent,
    ratio_share,
    simple_interest,
    compound_interest,
    change,
    unit_price,
    mixture,
)
