"""What a spec is worth on simulated workers, exactly.

The expected reward is over the replies' randomness, the task being given. Its cost term is certain: a
reply's tokens do not depend on what it says. Its success term is a sum over the joint states of the agents,
taken in order; an agent that nobody will read any more is summed out.
"""

from __future__ import annotations

from functools import lru_cache

from lemon_jax.backends import SealedTask, WorkerPool
from lemon_jax.backends.response_model import (
    Kind,
    Parameters,
    difficulty,
    is_relevant,
    level_of,
    load_parameters,
    p_right,
    situation,
    wrong_probabilities,
)
from lemon_jax.backends.simulated import COMPUTED, Form, output_words, prompt_tokens, write_reply
from lemon_jax.bench import Task, gdesigner, grade
from lemon_jax.errors import LemonError
from lemon_jax.runtime import Usage, call_cost, fixed_prefix
from lemon_jax.spec import CAPACITIES, ROLES, Agent, Spec, order
from lemon_jax.train.rewards import RewardConfig, reward
from lemon_jax.train.simulation import task_text

NOTHING, PLAN = -1, -2  # states of an agent beside the place of its answer
TOOL_WORDS = 2  # "Answer: 39", or "(no output)" where it has none
_BLOCK_WORDS = 6  # around an input: "<<output of a1 (NAME tag>>" without the name, and "<<end tag>>"

MOST_STATES = 200_000

State = int
Joint = dict[tuple[State, ...], float]


class Optimum:
    """Expected rewards on the simulated workers of a pool, under one reward and one rule of reading answers.

    Raises LemonError for other workers, and for a pool without tasks.
    """

    def __init__(self, pool: WorkerPool, rewards: RewardConfig, extractor: str = "lemon") -> None:
        if pool.world is None:
            raise LemonError("an optimum needs a pool of simulated workers that was given its tasks")
        self.pool, self.rewards, self.extractor = pool, rewards, extractor
        self.world = pool.world
        self.levels: dict[str, tuple[str, Parameters]] = {}
        for name, capacity in pool.config.capacities.items():
            model = pool.config.models[capacity.model]
            if model.backend != "simulated":
                raise LemonError(f"{pool.config.source}: capacities.{name}: not simulated, nothing is exact")
            self.levels[name] = model.level, load_parameters(model.parameters)
        self._correct: dict[tuple[str, str, State], bool] = {}

    def expected_reward(self, spec: Spec, task: Task) -> float:
        """The expected total reward of a valid spec on a task.

        Raises LemonError for a role without ability, and for more than MOST_STATES joint states.
        """
        bare = reward(self.rewards, spec, self.usage(spec, task), correct=False).total
        return bare + self.rewards.success * self.p_correct(spec, task)

    def usage(self, spec: Spec, task: Task) -> Usage:
        """What executing the spec uses, whatever the replies say."""
        total = Usage()
        for agent in spec.agents:
            if ROLES[agent.role].llm:
                parents = [a for a in spec.agents if a.id in agent.depends_on]
                words = sum(self.words_read(parent) for parent in parents)
                total += self.call_usage(agent, task, words)
        return total

    def words_read(self, parent: Agent) -> int:
        """Words that an input takes of its reader's prompt."""
        words = TOOL_WORDS
        if ROLES[parent.role].llm:
            level, parameters = self.levels[parent.capacity]
            words = output_words(parameters, level, self.world.roles[parent.role])
        return _BLOCK_WORDS + max(1, len(parent.name.split())) + words

    def call_usage(self, agent: Agent, task: Task, input_words: int) -> Usage:
        """Tokens and cost of one call whose inputs take so many words."""
        level, parameters = self.levels[agent.capacity]
        role = ROLES[agent.role]
        prefix = len(fixed_prefix(agent.role).split())
        words = prefix + len(agent.duty.split()) + _words(task_text(task, options=role.sees_options))
        words += input_words + len(role.cue.split())
        prompt = prompt_tokens(parameters, level, words)
        tokens = {
            "prompt_tokens": prompt,
            # The probe's user message is one word.
            "prefix_tokens": min(prompt, prompt_tokens(parameters, level, prefix + 1)),
            "generated_tokens": round(parameters.levels[level].tokens[agent.role]),
        }
        price = self.pool.capacity(agent.capacity).price
        if task.prices is not None:
            price = task.prices[CAPACITIES.index(agent.capacity)]
        return Usage(calls=1, cost=call_cost(price, self.pool.config.cost, **tokens), **tokens)

    def p_correct(self, spec: Spec, task: Task) -> float:
        """The probability that the spec's answer is graded as correct."""
        last_read = _last_readers(spec)
        levels: dict[str, int] = {}
        live: list[str] = []
        joint: Joint = {(): 1.0}
        for agent_id in last_read:
            agent = spec.agent(agent_id)
            levels[agent_id] = level_of([levels[p] for p in agent.depends_on]) if ROLES[agent.role].llm else 1
            # Inputs come in spec order, a tool's in the order of its dependencies.
            places = [live.index(p) for p in agent.depends_on]
            kept = [i for i, p in enumerate(live) if last_read[p] != agent_id]
            after: Joint = {}
            for states, weight in joint.items():
                read = tuple(states[i] for i in places)
                base = tuple(states[i] for i in kept)
                for state, p in self._states(agent, task, read, tuple(levels[q] for q in agent.depends_on)):
                    key = (*base, state)
                    after[key] = after.get(key, 0.0) + weight * p
            if len(after) > MOST_STATES:
                raise LemonError(
                    f"more than {MOST_STATES:,} joint states: a vote of so many is not summed exactly; "
                    "use fewer voters"
                )
            joint = after
            live = [live[i] for i in kept] + [agent_id]
        place = live.index(spec.output)
        role = spec.agent(spec.output).role
        return sum(w for states, w in joint.items() if self.correct(task, role, states[place]))

    def correct(self, task: Task, role: str, state: State) -> bool:
        """Whether an output agent of this role in this state is graded as correct."""
        form: Form = self.world.roles[role].form if ROLES[role].llm else "text"
        key = (task.id, form, state)
        if key not in self._correct:
            self._correct[key] = self._graded(task, form, state)
        return self._correct[key]

    def _graded(self, task: Task, form: Form, state: State) -> bool:
        if state == NOTHING:
            return False  # the executor hands on no text
        said = None if state == PLAN else self.sealed(task).written(form, state)
        text = write_reply(form, said, level=1, words=0)
        if form in COMPUTED:
            text = f"{text}\nAnswer: {said}"
        if self.extractor == "gdesigner":  # as `Grader.grade` reads it
            text = gdesigner.announced(text)
        return grade(task, text, self.extractor).correct

    def sealed(self, task: Task, *, options: bool = True) -> SealedTask:
        """The task as the workers know it."""
        return self.world.task(task_text(task, options=options))

    def _states(
        self, agent: Agent, task: Task, read: tuple[State, ...], levels: tuple[int, ...]
    ) -> list[tuple[State, float]]:
        if not ROLES[agent.role].llm:
            return [(tool_state(agent.role, read, choice=bool(task.options)), 1.0)]
        kinds = tuple(kind_of(state) for state in read)
        sealed = self.sealed(task, options=ROLES[agent.role].sees_options)
        p = self.p_right(agent, task, kinds, levels)
        _, parameters = self.levels[agent.capacity]
        return spread(self.world.roles[agent.role].form, sealed, parameters, p)

    def p_right(self, agent: Agent, task: Task, kinds: tuple[Kind, ...], levels: tuple[int, ...]) -> float:
        """The probability that a call means the right answer."""
        level, parameters = self.levels[agent.capacity]
        sealed = self.sealed(task, options=ROLES[agent.role].sees_options)
        return p_right(
            parameters,
            level,
            agent.role,
            situation(kinds, levels, relevant=is_relevant(agent.duty, sealed.question)),
            difficulty=_difficulty(parameters.digest, sealed, parameters),
            options=sealed.options,
        )


def spread(form: Form, sealed: SealedTask, parameters: Parameters, p: float) -> list[tuple[State, float]]:
    """The states of a reply that is right with probability `p`."""
    if form == "plan":
        return [(PLAN, 1.0)]
    shares = wrong_probabilities(parameters, len(sealed.answers) - 1)
    found: dict[State, float] = {}
    for place, weight in enumerate((p, *((1 - p) * share for share in shares))):
        state = place if sealed.written(form, place) is not None else NOTHING
        if weight:
            found[state] = found.get(state, 0.0) + weight
    return list(found.items())


def kind_of(state: State) -> Kind:
    """What a reader finds in an agent's output."""
    if state == PLAN:
        return "plan"
    return "nothing" if state == NOTHING else "right" if state == 0 else "wrong"


def tool_state(role: str, read: tuple[State, ...], *, choice: bool) -> State:
    """What a role that is a tool alone makes of its dependencies' answers, as `runtime.executor` does it."""
    answers = [state for state in read if state >= 0]
    if role == "nearest_option":
        return answers[-1] if answers and choice else NOTHING
    # max takes the first of equals: ties go to the earliest.
    return max(answers, key=answers.count) if answers else NOTHING


def _last_readers(spec: Spec) -> dict[str, str]:
    """The agents that the output depends on, itself too, in execution order; for each its last reader."""
    last = {spec.output: ""}
    for agent_id in reversed(order(spec)):
        if agent_id in last:
            for parent in spec.agent(agent_id).depends_on:
                last.setdefault(parent, agent_id)
    return {agent_id: last[agent_id] for agent_id in order(spec) if agent_id in last}


@lru_cache(maxsize=8192)
def _words(text: str) -> int:
    return len(text.split())


_DIFFICULTIES: dict[tuple[str, str, str], float] = {}


def _difficulty(digest: str, sealed: SealedTask, parameters: Parameters) -> float:
    key = (digest, sealed.bench, sealed.question)
    if key not in _DIFFICULTIES:
        _DIFFICULTIES[key] = difficulty(parameters, sealed.bench, sealed.question)
    return _DIFFICULTIES[key]
