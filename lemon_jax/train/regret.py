"""The best spec of a finite space on simulated workers, and how much less another spec is worth.

The space: every spec of at most three agents of which each is read on the way to the output, and every
majority vote over three agents that read nobody. Roles are those of number and choice tasks, capacities any,
names one word, duties the role's own or one word, which is of the question where that helps. The search is
exhaustive: all specs of one shape at once, as arrays over the classes of agents. Regret is measured against
this space: a larger spec may exceed it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from lemon_jax.backends.response_model import Kind, relevant_word
from lemon_jax.bench import Prices, Task
from lemon_jax.errors import LemonError
from lemon_jax.spec import CAPACITIES, ROLES, Agent, Parsed, Spec
from lemon_jax.spec.code_roles import CODE_ROLES
from lemon_jax.train.optimum import NOTHING, PLAN, Optimum, kind_of, spread, tool_state
from lemon_jax.train.rewards import counted, efficiency, invalid_reward, structure

KINDS: tuple[Kind, ...] = ("right", "wrong", "nothing", "plan")
_STATE: dict[Kind, int] = {"right": 0, "wrong": 1, "nothing": NOTHING, "plan": PLAN}
_NAME, _ANY_DUTY = "Worker", "Solve"

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Best:
    """The best spec of the space for one task, and its expected reward."""

    spec: Spec
    reward: float


class Regret:
    """Searches the best spec once for each task and its prices, and compares others with it."""

    def __init__(self, optimum: Optimum) -> None:
        self.optimum = optimum
        self._best: dict[tuple[str, Prices | None], Best] = {}

    def best_spec(self, task: Task) -> Best:
        """The best spec of the space (see the module)."""
        key = task.id, task.prices
        if key not in self._best:
            spec = _Search(self.optimum, task).best()
            self._best[key] = Best(spec=spec, reward=self.optimum.expected_reward(spec, task))
        return self._best[key]

    def of(self, parsed: Parsed, task: Task, *, valid: bool = True) -> float:
        """The optimum less the expected reward of this spec; `valid` as in `rewards.reward_of`.

        NaN for a spec of too many joint states; below 0 for one outside the space that exceeds it.
        """
        if parsed.spec is None or not valid:
            return self.best_spec(task).reward - invalid_reward(self.optimum.rewards).total
        try:
            got = self.optimum.expected_reward(parsed.spec, task)
        except LemonError:
            return math.nan
        return self.best_spec(task).reward - got


def search_roles() -> list[str]:
    """The LLM roles of the space."""
    return [role.name for role in ROLES.values() if role.llm and role not in CODE_ROLES]


def duties(role: str, question: str, optimum: Optimum) -> tuple[str, ...]:
    """The duties of the space: the role's own, and one word."""
    word = relevant_word(question)
    helps = all(p.effects["relevant_duty"] >= 0 for _, p in optimum.levels.values())
    return ROLES[role].default_duty, word if word and helps else _ANY_DUTY


class _Search:
    """One task's space as arrays. C runs over classes of LLM agents, then tools; k, l over KINDS.

    `_first` [C, k]: what an agent without inputs hands on.
    `_second` [C, k, l]: what one hands on whose input, at level 1, carries k.
    `_right0` [C], `_right1` [level, C, k], `_right2` [level, C, k, l]: P(graded as correct) of an output
    agent, by the highest level of its inputs and what they carry.
    """

    def __init__(self, optimum: Optimum, task: Task) -> None:
        self._optimum, self._task = optimum, task
        self._llm = [
            Agent(id="a1", name=_NAME, role=role, duty=duty, capacity=capacity)
            for role in search_roles()
            for capacity in CAPACITIES
            for duty in duties(role, task.question, optimum)
        ]
        tools = [role for role in ROLES.values() if not role.llm]
        self._tools = [
            Agent(id="a1", name=_NAME, role=r.name, duty=r.default_duty, capacity="small") for r in tools
        ]
        # A tool's answer depends on the order in which it reads: the second copy reads backwards.
        self._all = [*self._llm, *self._tools, *self._tools]
        self._backwards = len(self._llm) + len(self._tools)
        n, m = len(self._llm), len(self._all)
        self._places = np.zeros((n, self._states()))
        self._first = np.zeros((n, 4))
        self._second = np.zeros((m, 4, 4))
        self._right0 = np.zeros(n)
        self._right1 = np.zeros((2, m, 4))
        self._right2 = np.zeros((2, m, 4, 4))
        for c in range(n):
            self._fill_llm(c)
        for c in range(n, m):
            self._fill_tool(c)
        self._read = np.array([optimum.words_read(agent) for agent in self._all])
        self._level = np.array([2 if ROLES[a.role].llm else 1 for a in self._all])

    def best(self) -> Spec:
        """The first of the best over all shapes."""
        found: tuple[float, Spec] | None = None
        for rewards, build in self._shapes():
            index = np.unravel_index(int(np.argmax(rewards)), rewards.shape)
            if found is None or rewards[index] > found[0]:
                found = float(rewards[index]), build(*(int(i) for i in index))
        assert found is not None  # there are shapes
        return found[1]

    def _shapes(self) -> Iterator[tuple[Floats, _Build]]:
        """Expected rewards of all specs of one shape, and what builds one from its index."""
        n, read = len(self._llm), self._read
        first, second = self._first, self._second
        alone = self._size(np.zeros(1, int))[:, 0]  # [C]
        after = self._size(read[:n])  # [C, a]: one input
        yield self._reward(self._right0, alone[:n], 1, 0), self._build([()])
        p = np.einsum("ak,bk->ab", first, self._right1[0])
        yield self._reward(p, alone[:n, None] + after.T, 2, 1), self._build([(), (0,)])
        both = read[:n, None] + read[None, :]  # [a, b]: two inputs
        after2 = self._size(both.ravel()).reshape(-1, *both.shape).transpose(1, 2, 0)  # [a, b, c]
        # a and b are read by c.
        p = np.einsum("ak,bl,ckl->abc", first, first, self._right2[0], optimize=True)
        size = alone[:n, None, None] + alone[None, :n, None] + after2[:, :n]
        yield self._reward(p, size, 3, 2), self._build([(), (), (0, 1)])
        # b reads a, c reads b, or both.
        pair = np.einsum("ak,bkl->abkl", first, second)
        middle = self._level - 1  # a tool stands at level 1
        after1 = self._size(read)  # [c, b]
        p1 = np.zeros((n, len(self._all), len(self._all)))
        p2 = np.zeros_like(p1)
        for level in (0, 1):
            b = np.flatnonzero(middle == level)
            p1[:, b] = np.einsum("abkl,cl->abc", pair[:, b], self._right1[level], optimize=True)
            p2[:, b] = np.einsum("abkl,ckl->abc", pair[:, b], self._right2[level], optimize=True)
        size = alone[:n, None, None] + after.T[:, :, None]
        yield self._reward(p1, size + after1.T[None], 3, 2), self._build([(), (0,), (1,)])
        yield self._reward(p2, size + after2, 3, 3), self._build([(), (0,), (0, 1)])
        p = self._votes()
        size = alone[:n, None, None] + alone[None, :n, None] + alone[None, None, :n]
        yield self._reward(p, size, 4, 3), self._build([(), (), ()], vote=True)

    def _build(self, parents: list[tuple[int, ...]], *, vote: bool = False) -> _Build:
        return _Build(search=self, parents=tuple(parents), vote=vote)

    def agent(self, index: int) -> tuple[Agent, bool]:
        """The class at an index, and whether it reads backwards."""
        return self._all[index], index >= self._backwards

    def _reward(self, p: Floats, size: Floats, agents: int, dependencies: int) -> Floats:
        config = self._optimum.rewards
        return config.success * p + efficiency(config, size) + structure(config, agents, dependencies)

    def _size(self, words: NDArray[np.int64]) -> Floats:
        """What the efficiency term counts of one call of each class, by its inputs' words: [C, words]."""
        known, back = np.unique(words, return_inverse=True)
        out = np.zeros((len(self._all), len(known)))
        for c, agent in enumerate(self._llm):
            for i, count in enumerate(known):
                usage = self._optimum.call_usage(agent, self._task, int(count))
                out[c, i] = counted(self._optimum.rewards, usage)
        return out[:, back]

    def _states(self) -> int:
        return len(self._optimum.sealed(self._task).answers) + 2

    def _fill_llm(self, c: int) -> None:
        agent, task, optimum = self._llm[c], self._task, self._optimum
        sealed = optimum.sealed(task, options=ROLES[agent.role].sees_options)
        _, parameters = optimum.levels[agent.capacity]
        form = optimum.world.roles[agent.role].form
        # All is linear in P(right): one row for a right call, one for a wrong one.
        hands_on, correct = np.zeros((2, 4)), np.zeros(2)
        places = np.zeros((2, self._places.shape[1]))
        for row, p in enumerate((1.0, 0.0)):
            for state, weight in spread(form, sealed, parameters, p):
                hands_on[row, KINDS.index(kind_of(state))] += weight
                places[row, state] += weight  # NOTHING and PLAN come last
                correct[row] += weight * optimum.correct(task, agent.role, state)

        def mix(p: float, rows: Floats) -> Floats:
            return p * rows[0] + (1 - p) * rows[1]

        p0 = optimum.p_right(agent, task, (), ())
        self._places[c], self._first[c] = mix(p0, places), mix(p0, hands_on)
        self._right0[c] = mix(p0, correct)
        for k, kind in enumerate(KINDS):
            for level in (1, 2):
                p1 = optimum.p_right(agent, task, (kind,), (level,))
                self._right1[level - 1, c, k] = mix(p1, correct)
                if level == 1:
                    self._second[c, k] = mix(p1, hands_on)
                for other, second in enumerate(KINDS):
                    p2 = optimum.p_right(agent, task, (kind, second), (1, level))
                    self._right2[level - 1, c, k, other] = mix(p2, correct)

    def _fill_tool(self, c: int) -> None:
        agent, backwards = self.agent(c)
        choice = bool(self._task.options)
        for k, kind in enumerate(KINDS):
            state = tool_state(agent.role, (_STATE[kind],), choice=choice)
            self._second[c, k, KINDS.index(kind_of(state))] = 1.0
            self._right1[:, c, k] = self._optimum.correct(self._task, agent.role, state)
            for other, second in enumerate(KINDS):
                read = (_STATE[kind], _STATE[second])
                state = tool_state(agent.role, read[::-1] if backwards else read, choice=choice)
                self._right2[:, c, k, other] = self._optimum.correct(self._task, agent.role, state)

    def _votes(self) -> Floats:
        """P(correct) of a majority vote over three agents that read nobody [C, C, C]."""
        s = self._states()
        states = [*range(s - 2), PLAN, NOTHING]  # as columns of `_places`
        right = np.zeros((s, s, s))
        for i, a in enumerate(states):
            for j, b in enumerate(states):
                for k, d in enumerate(states):
                    state = tool_state("majority_vote", (a, b, d), choice=bool(self._task.options))
                    right[i, j, k] = self._optimum.correct(self._task, "majority_vote", state)
        places = self._places
        return np.einsum("ai,bj,ck,ijk->abc", places, places, places, right, optimize=True)


@dataclass(frozen=True, kw_only=True)
class _Build:
    """Makes the spec of an index of a shape's array."""

    search: _Search
    parents: tuple[tuple[int, ...], ...]
    vote: bool

    def __call__(self, *index: int) -> Spec:
        agents = []
        for number, (c, reads) in enumerate(zip(index, self.parents, strict=True), start=1):
            agent, backwards = self.search.agent(c)
            depends_on = tuple(f"a{i + 1}" for i in (reads[::-1] if backwards else reads))
            agents.append(replace(agent, id=f"a{number}", depends_on=depends_on))
        if self.vote:
            role = ROLES["majority_vote"]
            agents.append(
                Agent(
                    id=f"a{len(agents) + 1}",
                    name=_NAME,
                    role=role.name,
                    duty=role.default_duty,
                    capacity="small",
                    depends_on=tuple(agent.id for agent in agents),
                )
            )
        return Spec(agents=tuple(agents), output=agents[-1].id)
