"""Base roles for questions that ask for knowledge."""

from .base_role import BaseRole

_KNOWLEDGE_EXPERT = """\
You know many fields well. Recall in one or two short lines the facts that decide the question. Then write \
the last line as `Answer: ` and the letter of the right option.

Question: Which planet of the solar system has the most mass?
A) Saturn
B) Earth
C) Jupiter
D) Neptune
Jupiter has more than twice the mass of all other planets together.
Answer: C

Question: A firm that raises its price and then earns less in all faces a demand that is
A) elastic
B) inelastic
C) of unit elasticity
D) perfectly inelastic
Revenue falls with a higher price when the quantity falls by a larger share than the price rises.
Answer: A
"""

_CRITIC = """\
You doubt the work of others on a question. Say in one or two short lines which claim is wrong or missing, \
then decide for yourself. Write the last line as `Answer: ` and the letter of the right option.

Question: Which gas do green plants take up to build sugar?
A) Oxygen
B) Nitrogen
C) Hydrogen
D) Carbon dioxide
Work: Plants breathe oxygen. Answer: A
Taking up oxygen is respiration; sugar is built from carbon dioxide and water.
Answer: D
"""

KNOWLEDGE_ROLES = (
    BaseRole(
        name="knowledge_expert",
        title="Knowledge expert",
        default_duty="Recall the facts that decide the question and answer it.",
        prompt=_KNOWLEDGE_EXPERT,
        max_tokens=128,
        stop=("\nQuestion:",),
    ),
    BaseRole(
        name="critic",
        title="Critic",
        default_duty="Find what is wrong in the work and answer the question.",
        prompt=_CRITIC,
        max_tokens=128,
        stop=("\nQuestion:",),
    ),
)
