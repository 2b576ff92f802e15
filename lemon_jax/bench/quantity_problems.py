"""Templates about motion, averages, work, areas, chance, sequences and counting."""

from fractions import Fraction
from math import comb
from random import Random

from lemon_jax.bench.problem import NAMES, Problem, Template, problem


def speed_distance(r: Random) -> Problem:
    v, quarters = r.randrange(20, 120, 4), r.randrange(2, 22)
    hours, minutes = divmod(quarters * 15, 60)
    spell = " and ".join(
        f"{n} {w}" for n, w in ((hours, "hours" if hours > 1 else "hour"), (minutes, "minutes")) if n
    )
    way = Fraction(v * quarters, 4)
    text = r.choice(
        [
            f"A {r.choice(['bus', 'lorry', 'van'])} drives at {v} km/h for {spell}. How far does it go?",
            f"Find the distance covered in {spell} at a steady speed of {v} kilometres per hour.",
        ]
    )
    return problem(text, way, v * (hours + 1), way + v, way - Fraction(v, 4), way * 2, unit="{} km")


def average_speed(r: Random) -> Problem:
    v1, v2 = r.choice(
        [(20, 30), (30, 60), (40, 60), (60, 90), (12, 24), (30, 45), (24, 40), (48, 80), (36, 45)]
    )
    way = 720 * r.randrange(1, 5) // r.choice([2, 4, 6])
    name = r.choice(NAMES)
    text = r.choice(
        [
            f"{name} travels {way} km to a town at {v1} km/h and comes back the same way at {v2} km/h. "
            "What is the average speed of the whole trip?",
            f"A courier rides {way} km out at {v1} km/h and returns at {v2} km/h. Find the mean speed for "
            "both ways.",
        ]
    )
    mean = Fraction(2 * v1 * v2, v1 + v2)
    return problem(text, mean, Fraction(v1 + v2, 2), v1, v2, mean + 2, mean - 3, unit="{} km/h")


def train_bridge(r: Random) -> Problem:
    speed, seconds = r.randrange(10, 35), r.randrange(12, 40)
    train = r.randrange(4, speed * seconds // 20) * 10
    bridge = speed * seconds - train
    text = r.choice(
        [
            f"A train {train} m long runs at {speed} m/s. How many seconds does it need to cross a bridge "
            f"of {bridge} m?",
            f"How long does a {train} metre train at {speed} metres per second take to pass fully through a "
            f"tunnel of {bridge} metres?",
        ]
    )
    wrong = (seconds + 4, seconds - 3, Fraction(bridge, speed), Fraction(train, speed), seconds * 2)
    return problem(text, seconds, *wrong, unit="{} s")


def average_new(r: Random) -> Problem:
    n, mean = r.randrange(4, 15), r.randrange(12, 60)
    shift = r.choice([-3, -2, -1, 1, 2, 3, 4])
    new = mean + shift * (n + 1)
    if new <= 0:
        return average_new(r)
    text = r.choice(
        [
            f"The average of {n} numbers is {mean}. One more number is added and the average becomes "
            f"{mean + shift}. What is the added number?",
            f"{n} players have a mean age of {mean} years. When a coach joins them, the mean is "
            f"{mean + shift} "
            "years. How old is the coach?",
        ]
    )
    return problem(text, new, mean + shift, mean + shift * n, new + n, new - shift, mean * 2)


def ages(r: Random) -> Problem:
    young, k, later = r.randrange(3, 16), r.randrange(3, 6), r.randrange(2, 12)
    old = k * young
    child, parent = r.sample(NAMES, 2)
    text = r.choice(
        [
            f"{parent} is {k} times as old as {child}. In {later} years their ages will add up to "
            f"{old + young + 2 * later}. How old is {child} now?",
            f"{child} is now {Fraction(1, k)} of the age of {parent}. The sum of their ages {later} years "
            "from now "
            f"is {old + young + 2 * later}. Find the present age of {child}.",
        ]
    )
    return problem(text, young, young + later, old, young + 1, young + 2, young - 1, unit="{} years")


def work_rate(r: Random) -> Problem:
    a, b = r.choice(
        [(3, 6), (6, 12), (4, 12), (10, 15), (12, 24), (20, 30), (12, 36), (15, 30), (9, 18), (8, 24)]
    )
    one, two = r.sample(NAMES, 2)
    job = r.choice(
        ["paint a fence", "dig a ditch", "type a report", "sort the stock", "lay a floor", "mow a park"]
    )
    text = r.choice(
        [
            f"{one} can {job} in {a} days and {two} in {b} days. In how many days do they finish it "
            "together?",
            f"Alone, {one} needs {a} days to {job}; {two} needs {b} days. How many days do both need side "
            "by side?",
        ]
    )
    both = Fraction(a * b, a + b)
    return problem(text, both, Fraction(a + b, 2), a + b, b - a, both + 1, both + 2, both - 1, unit="{} days")


def pipes(r: Random) -> Problem:
    a, b = r.choice([(4, 6), (6, 9), (10, 15), (3, 4), (5, 6), (8, 12), (12, 20), (6, 10), (9, 12), (2, 3)])
    text = r.choice(
        [
            f"A tap fills a tank in {a} hours, a leak empties it in {b} hours. With both open, when is it "
            "full?",
            f"An inlet can fill a pool in {a} hours and a drain can empty it in {b} hours. How long does "
            "filling "
            "take if the drain was left open?",
        ]
    )
    net = Fraction(a * b, b - a)
    return problem(text, net, Fraction(a * b, a + b), b - a, a + b, net + 2, net - 1, unit="{} hours")


def rectangle_area(r: Random) -> Problem:
    width, k = r.randrange(3, 30), r.randrange(2, 6)
    around = 2 * (width + k * width)
    place = r.choice(["garden", "hall", "field", "car park"])
    text = r.choice(
        [
            f"A {place} is {k} times as long as it is wide, and its perimeter is {around} m. What is its "
            "area?",
            f"The length of a rectangular {place} is {k} times its width. Walking once around it is "
            f"{around} m. "
            "Find the area.",
        ]
    )
    area = k * width * width
    return problem(text, area, around * width, width * width, area * 2, area + around, unit="{} m²")


def probability(r: Random) -> Problem:
    red, blue, green = (r.randrange(2, 9) for _ in range(3))
    total = red + blue + green
    text = r.choice(
        [
            f"A bag holds {red} red, {blue} blue and {green} green balls. One ball is drawn at random. What "
            "is the "
            "probability that it is not blue?",
            f"In a box are {red} ripe, {blue} rotten and {green} green plums. What is the chance that a "
            "plum taken "
            "blindly is not rotten?",
        ]
    )
    p = Fraction(red + green, total)
    return problem(
        text, p, 1 - p, Fraction(red, total), Fraction(green, total), Fraction(1, 3), Fraction(2, 5)
    )


def arithmetic_sequence(r: Random) -> Problem:
    first, step, n = r.randrange(1, 30), r.randrange(2, 15), r.randrange(8, 40)
    shown = ", ".join(str(first + step * i) for i in range(4))
    text = r.choice(
        [
            f"What is term number {n} of the sequence {shown}, ...?",
            f"The first row of a theatre has {first} seats and each further row {step} more. How many seats "
            f"has row {n}?",
        ]
    )
    value = first + step * (n - 1)
    return problem(text, value, value + step, value - step, step * n, value + first, first * n)


def sum_of_series(r: Random) -> Problem:
    n, k = r.randrange(8, 40), r.choice([1, 2, 3, 5])
    text = r.choice(
        [
            f"What is the sum of the first {n} positive multiples of {k}?",
            f"{r.choice(NAMES)} saves ${k} in week 1, ${2 * k} in week 2, ${3 * k} in week 3 and so on. How "
            "many "
            f"dollars are saved after {n} weeks?",
        ]
    )
    total = k * n * (n + 1) // 2
    return problem(text, total, k * n * (n - 1) // 2, k * n * n, total + k, total - n)


def rest_of_division(r: Random) -> Problem:
    size, full, rest = r.randrange(6, 25), r.randrange(8, 40), r.randrange(1, 6)
    n = size * full + rest
    thing = r.choice(["eggs", "bottles", "books", "tiles", "apples"])
    text = r.choice(
        [
            f"{n} {thing} are packed into boxes of {size}. How many {thing} are left over?",
            f"A worker fills crates with {size} {thing} each. Of {n} {thing}, how many do not fill a crate?",
        ]
    )
    return problem(text, rest, full, size - rest, rest + 1, rest + 2, size)


def committees(r: Random) -> Problem:
    n, k = r.randrange(5, 12), r.choice([2, 3])
    text = r.choice(
        [
            f"In how many ways can {k} people be chosen from a group of {n}?",
            f"A club of {n} members sends {k} of them to a meeting. How many different delegations are "
            "possible?",
        ]
    )
    ways = comb(n, k)
    return problem(text, ways, n * k, n**k, ways * 2, comb(n - 1, k), comb(n + 1, k))


def consecutive(r: Random) -> Problem:
    first, n = r.randrange(5, 90), r.choice([3, 4, 5])
    total = sum(range(first, first + n))
    text = r.choice(
        [
            f"The sum of {n} consecutive whole numbers is {total}. Which is the largest?",
            f"{n} tickets with consecutive numbers add up to {total}. What is the highest number?",
        ]
    )
    last = first + n - 1
    return problem(text, last, first, last + 1, last - 1, Fraction(total, n), last + n)


def fraction_left(r: Random) -> Problem:
    a, b = r.sample([2, 3, 4, 5, 6], 2)
    total = a * b * r.randrange(3, 20)
    left = total - total // a - (total - total // a) // b
    what = r.choice(["litres of oil", "kilograms of sand", "metres of cable", "sheets of paper"])
    text = r.choice(
        [
            f"Of {total} {what}, 1/{a} is used on Monday and 1/{b} of the rest on Tuesday. How much is left?",
            f"A store has {total} {what}. It sells 1/{a} of them, then 1/{b} of what remains. What is left?",
        ]
    )
    slips = (total - total // a - total // b, total - left, left + a, left - b, total // (a * b))
    return problem(text, left, *slips)


QUANTITY_TEMPLATES: tuple[Template, ...] = (
    speed_distance,
    average_speed,
    train_bridge,
    average_new,
    ages,
    work_rate,
    pipes,
    rectangle_area,
    probability,
    arithmetic_sequence,
    sum_of_series,
    rest_of_division,
    committees,
    consecutive,
    fraction_left,
)
