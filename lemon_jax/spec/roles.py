"""The base roles: for each a prompt, a default duty, and what it may do with its reply.

A spec names a base role and customises its duty; the prompts, the worked examples and the tools are
fixed here, so that a learned spec stays comparable across tasks and worker models. All examples are
written for this library; none is taken from a benchmark.
"""

from __future__ import annotations

from .base_role import BaseRole
from .code_roles import CODE_ROLES
from .knowledge_roles import KNOWLEDGE_ROLES

_EQUATION_WRITER = """\
You turn a word problem into one arithmetic expression. Reply with the expression alone: numbers, + - * / \
and parentheses, no words. Put each step in parentheses of its own.

Question: Mia baked 24 muffins and ate 4 of them. She packs the rest into boxes of 5. How many boxes does \
she need?
Expression: ((24 - 4) / 5)

Question: A farmer picked 36 pears on Monday and 27 on Tuesday, then sold 40 of them. How many pears are left?
Expression: ((36 + 27) - 40)

Question: Tom bought 6 packs with 8 cards each and his brother gave him 9 cards. How many cards does he have?
Expression: ((6 * 8) + 9)

Question: A room has 7 rows of 9 chairs and 5 rows of 4 chairs. How many chairs are there?
Expression: ((7 * 9) + (5 * 4))

Question: Sara had 50 stickers, gave away 2 and shared the others equally among 8 friends. How many did each \
friend get?
Expression: ((50 - 2) / 8)

Question: Each ride costs 6 tickets. Ben has 19 tickets and buys 11 more. How many rides can he take?
Expression: ((19 + 11) / 6)

Question: A shop had 9 boxes of 12 pens and sold 4 boxes. How many pens are left?
Expression: ((9 - 4) * 12)

Question: Lena earns 7 dollars an hour. She worked 5 hours on Friday and 3 hours on Sunday. How much did she \
earn?
Expression: (7 * (5 + 3))
"""

_PROGRAMMING_EXPERT = """\
You write a very short Python program that computes the answer. Use plain variables, no functions, no \
prints, no comments. The last line sets `answer` to a number.

Question: A shirt costs 40 dollars after a discount of 20 percent. What was the price before?
Program:
price = 40 / (1 - 20 / 100)
answer = price

Question: A train of 150 m passes a post in 9 seconds. What is its speed in km/hr?
Program:
speed = 150 / 9
answer = speed * 3600 / 1000

Question: A does a job in 12 days and B in 6 days. In how many days do they finish it together?
Program:
rate = 1 / 12 + 1 / 6
answer = 1 / rate

Question: In how many ways can 2 of 5 books be chosen?
Program:
from math import comb
answer = comb(5, 2)
"""

_MATH_SOLVER = """\
You are a careful math solver. Think in a few short steps, one short line each. Then write the last line as \
`Answer: ` and the final value, or the letter if options are given.

Question: Mia baked 24 muffins and ate 4 of them. She packs the rest into boxes of 5. How many boxes does \
she need?
24 - 4 = 20 muffins are left.
20 / 5 = 4 boxes.
Answer: 4

Question: A shirt costs 40 dollars after a discount of 20 percent. What was the price before?
A) 45
B) 48
C) 50
D) 52
E) 60
40 is 80 percent of the price.
40 / 0.8 = 50.
Answer: C
"""

_ANALYST = """\
You are a mathematical analyst. Name the quantities and write the relation that gives the answer, in two or \
three short lines. Do not compute the final value.

Question: A shirt costs 40 dollars after a discount of 20 percent. What was the price before?
price before = p, discount = 20 percent of p
p * (1 - 20 / 100) = 40
p = 40 / (1 - 20 / 100)
"""

_INSPECTOR = """\
You inspect the work of others on a math problem. Recompute it in one to three short lines, mend what is \
wrong, and write the last line as `Answer: ` and the final value, or the letter if options are given.

Question: Mia baked 24 muffins and ate 4 of them. She packs the rest into boxes of 5. How many boxes does \
she need?
Work: 24 / 5 = 4.8, so 5 boxes.
24 - 4 = 20 muffins are left, not 24.
20 / 5 = 4 boxes.
Answer: 4
"""

_ANSWERER = """\
You answer directly. Reply with `Answer: ` and the final value, or the letter if options are given, and \
nothing else.
"""

_OPTION_CHOOSER = """\
You choose the right option of a multiple-choice problem, using the work of others where it is given. Reply \
with `Answer: ` and one letter, and nothing else.
"""

_MATH_ROLES = (
    BaseRole(
        name="answerer",
        title="Answerer",
        default_duty="Give the final answer only.",
        prompt=_ANSWERER,
        max_tokens=24,
        stop=("\n",),
    ),
    BaseRole(
        name="math_solver",
        title="Math solver",
        default_duty="Solve the problem step by step.",
        prompt=_MATH_SOLVER,
        max_tokens=256,
        stop=("\nQuestion:",),
    ),
    BaseRole(
        name="mathematical_analyst",
        title="Mathematical analyst",
        default_duty="Name the quantities and the relations between them.",
        prompt=_ANALYST,
        max_tokens=96,
        stop=("\nQuestion:",),
    ),
    BaseRole(
        name="equation_writer",
        title="Equation writer",
        default_duty="Write one expression for the calculator.",
        tool="calculator",
        prompt=_EQUATION_WRITER,
        cue="Expression:",
        sees_options=False,
        max_tokens=48,
        stop=("\n",),
    ),
    BaseRole(
        name="programming_expert",
        title="Programming expert",
        default_duty="Write a short program that computes the answer.",
        tool="program",
        prompt=_PROGRAMMING_EXPERT,
        cue="Program:",
        sees_options=False,
        max_tokens=160,
        stop=("\n\n", "Question:"),
    ),
    BaseRole(
        name="inspector",
        title="Inspector",
        default_duty="Check the work and correct the answer.",
        prompt=_INSPECTOR,
        max_tokens=256,
        stop=("\nQuestion:",),
    ),
    BaseRole(
        name="option_chooser",
        title="Option chooser",
        default_duty="Choose the best option.",
        prompt=_OPTION_CHOOSER,
        max_tokens=12,
        stop=("\n",),
    ),
    BaseRole(
        name="nearest_option",
        title="Nearest option",
        default_duty="Choose the option nearest to the value.",
        llm=False,
        tool="nearest_option",
    ),
    BaseRole(
        name="majority_vote",
        title="Majority vote",
        default_duty="Take the most frequent answer.",
        llm=False,
        tool="majority_vote",
    ),
)

ROLES: dict[str, BaseRole] = {role.name: role for role in (*_MATH_ROLES, *KNOWLEDGE_ROLES, *CODE_ROLES)}
"""Every base role by the name that a spec writes."""
