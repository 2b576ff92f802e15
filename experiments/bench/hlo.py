"""What a compiled program moves: collectives and memory traffic, read from the text of its HLO.

XLA's own cost analysis counts the body of a loop once. Here every computation counts as often as it runs:
a loop's trips are the constant that its condition compares the counter with. Where that is no constant
(sampling ends early) the caller says how many trips to assume, by the shape of what the loop carries.

    # While loop of 24 trips around `bf16[152064,3584] all-gather(...)` on 16 chips
    # In:  its text         Out: Traffic(received={"all-gather": 24 * 1.09e9 * 15 / 16}, ...)
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

_BITS = {"pred": 8, "bf16": 16, "token": 0, "opaque": 0}
_SHAPE = re.compile(r"(pred|token|opaque|bf16|[suf](\d+)(?:e\w+)?)\[([\d,]*)\](?:\{[^}]*\})?")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%([\w.\-]+) = (.*?) ([a-z][\w\-]*)\(([^\n]*)$")
_CALLED = re.compile(
    r"(?:calls|to_apply|body|condition|called_computations|branch_computations)="
    r"\{?(%[^,}\s]+(?:, ?%[^,}\s]+)*)"
)
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
_FREE = {
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "while",
    "call",
    "conditional",
    "iota",
}


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """One line of HLO: `name = shape opcode(rest)`."""

    name: str
    shape: str
    opcode: str
    rest: str


@dataclass
class Traffic:
    """Per chip and run of the program, in bytes. `received` by kind of collective; `memory` is an estimate:
    what every instruction reads from and writes to the chip's main memory, but for what the compiler placed
    in the fast one."""

    received: dict[str, float] = field(default_factory=dict)
    memory: float = 0.0

    @property
    def collective(self) -> float:
        return sum(self.received.values())


def parse(text: str) -> tuple[dict[str, list[Instruction]], str]:
    """Computations by name, and the name of the entry."""
    computations: dict[str, list[Instruction]] = {}
    entry, lines = "", None
    for line in text.splitlines():
        if line and not line[0].isspace() and line.rstrip().endswith("{") and "%" in line[:8]:
            name = line.partition("%")[2].split(" ", 1)[0]
            entry = name if line.startswith("ENTRY") else entry
            lines = computations.setdefault(name, [])
        elif lines is not None and (found := _INSTRUCTION.match(line)):
            name, shape, opcode, rest = found.groups()
            lines.append(Instruction(name=name, shape=shape, opcode=opcode, rest=rest))
    return computations, entry


def size_of(shape: str, *, main_memory: bool = False) -> float:
    """Bytes of a shape or a tuple of shapes; with `main_memory`, without what lies in fast memory, S(1)."""
    total = 0.0
    for found in _SHAPE.finditer(shape):
        if main_memory and "S(" in found[0]:
            continue
        bits = _BITS.get(found[1], int(found[2] or 0))
        total += bits / 8 * math.prod(dimensions(found[0])[0])
    return total


def dimensions(shape: str) -> list[tuple[int, ...]]:
    """Those of each array of a shape or a tuple of shapes."""
    return [tuple(int(n) for n in found[3].split(",") if n) for found in _SHAPE.finditer(shape)]


def traffic(text: str, chips: int, *, open_trips: Callable[[str], float] = lambda shape: 1) -> Traffic:
    """Collectives and memory traffic of a program. `open_trips`: of a loop without a constant bound, by its
    shape."""
    computations, entry = parse(text)
    runs = _runs(computations, entry, open_trips)
    total = Traffic()
    seen: dict[
        str, tuple[str, float]
    ] = {}  # channel: a collective that overlaps compute is split over fusions
    for name, instructions in computations.items():
        for one in instructions:
            kind = one.opcode.removesuffix("-start")
            if kind in COLLECTIVES and runs[name]:
                channel = re.search(r"channel_id=(\d+)", one.rest)
                key = channel[1] if channel else f"{name}/{one.name}"
                size = runs[name] * _received(one, kind, chips)
                if key not in seen or size > seen[key][1]:
                    seen[key] = (kind, size)
    for kind, size in seen.values():
        total.received[kind] = total.received.get(kind, 0.0) + size
        total.memory += size  # where it arrives
    for name in _top_level(computations, entry):
        shapes = {one.name: one.shape for one in computations[name]}
        total.memory += runs[name] * sum(_memory(one, shapes, computations) for one in computations[name])
    return total


def _memory(one: Instruction, shapes: dict[str, str], computations: dict[str, list[Instruction]]) -> float:
    if one.opcode in _FREE or one.opcode.endswith("-done") or one.name.startswith("async-collective"):
        return 0.0
    operands = [shapes.get(name, "") for name in _operands(one)]
    if one.opcode == "fusion":
        return _fusion_memory(one, operands, computations)
    if one.opcode == "dynamic-update-slice":  # in place
        return 2 * size_of(operands[1], main_memory=True)
    if one.opcode == "dynamic-slice":
        return 2 * size_of(one.shape, main_memory=True)
    output = one.shape.partition(", u32[]")[0] if one.opcode == "copy-start" else one.shape
    read = 0.0 if one.opcode.endswith("-start") else sum(size_of(s, main_memory=True) for s in operands)
    return read + size_of(output, main_memory=True)


def _fusion_memory(
    one: Instruction, operands: list[str], computations: dict[str, list[Instruction]]
) -> float:
    """What a fusion reads and writes: of an operand that it only slices or gathers from what it takes, of an
    output that it updates in place the update. The buffers of a collective that is under way beside a fusion
    are handed through it untouched; what arrives is counted as received."""
    name = next(_called(one), "")
    inside = computations.get(name, [])
    outputs = [found[0] for found in _SHAPE.finditer(one.shape)]
    carried_in: set[int] = set()
    carried_out: set[int] = set()
    if "async" in name:
        pairs = re.findall(r"\{(\d+)\}: \((\d+), \{\}", one.rest)
        carried_out, carried_in = {int(out) for out, _ in pairs}, {int(operand) for _, operand in pairs}
    users: dict[str, list[Instruction]] = {}
    for each in inside:
        for operand in _operands(each):
            users.setdefault(operand, []).append(each)
    parameters = {int(i.rest.split(")")[0]): i.name for i in inside if i.opcode == "parameter"}
    total = 0.0
    for index, shape in enumerate(operands):
        size = size_of(shape, main_memory=True)
        if index not in carried_in and size:
            total += min(size, _read(parameters.get(index, ""), users, size))
    by_name = {each.name: each for each in inside}
    results = [inside[-1]] if inside else []
    if results and results[0].opcode == "tuple":
        results = [by_name[operand] for operand in _operands(results[0]) if operand in by_name]
    for index, shape in enumerate(outputs):
        size = size_of(shape, main_memory=True)
        if index not in carried_out:
            result = results[index] if len(results) == len(outputs) else None
            total += min(size, _written(result, by_name, size))
    return total


def _read(name: str, users: dict[str, list[Instruction]], size: float) -> float:
    """Bytes that a computation reads of its value `name` of `size` bytes."""
    total = 0.0
    for user in users.get(name, []):
        if user.opcode == "bitcast":
            total += _read(user.name, users, size)
        elif user.opcode in ("dynamic-slice", "gather") and _operands(user)[0] == name:
            total += size_of(user.shape)
        elif not (user.opcode == "dynamic-update-slice" and _operands(user)[0] == name):
            return size
    return total


def _written(result: Instruction | None, by_name: dict[str, Instruction], size: float) -> float:
    """Bytes of an output of `size` bytes that a computation writes."""
    while result is not None and result.opcode == "bitcast":
        result = by_name.get(_operands(result)[0])
    if result is None or result.opcode != "dynamic-update-slice":
        return size
    update = by_name.get(_operands(result)[1])
    return size if update is None else size_of(update.shape)


def _received(one: Instruction, kind: str, chips: int) -> float:
    """Bytes that each chip receives: at best, on a ring of its group (Thakur et al. 2005)."""
    group = _group_size(one.rest, chips)
    shape = one.shape
    if one.opcode.endswith("-start") and shape.startswith("("):  # (operand, result, contexts)
        parts = [found[0] for found in _SHAPE.finditer(shape)]
        shape = parts[1] if len(parts) > 1 else parts[0]
    size = size_of(shape)
    share = (group - 1) / group
    factor = {
        "all-gather": share,
        "all-reduce": 2 * share,
        "reduce-scatter": group - 1.0,  # `size` is that of the result, one of `group` pieces
        "all-to-all": share,
        "collective-permute": 1.0,
    }[kind]
    return factor * size


def _group_size(rest: str, chips: int) -> int:
    if found := re.search(r"replica_groups=\[(\d+),(\d+)\]", rest):
        return int(found[2])
    if found := re.search(r"replica_groups=mesh\[([^\]]*)\] ?\{([^}]*)\}", rest):
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", found[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'([^']+)'", found[2]) if axis in sizes)
    if found := re.search(r"replica_groups=\{\{([\d,]+)\}", rest):
        return found[1].count(",") + 1
    return chips


def _runs(
    computations: dict[str, list[Instruction]], entry: str, open_trips: Callable[[str], float]
) -> dict[str, float]:
    """How often each computation runs."""
    runs = dict.fromkeys(computations, 0.0)
    todo: list[tuple[str, float]] = [(entry, 1.0)]
    while todo:
        name, times = todo.pop()
        if name not in runs:
            continue
        runs[name] += times
        for one in computations[name]:
            trips = _trips(one, computations, open_trips) if one.opcode == "while" else 1
            todo += [(called, times * trips) for called in _called(one)]
    return runs


def _called(one: Instruction) -> Iterator[str]:
    for found in _CALLED.finditer(one.rest):
        yield from (name.strip().lstrip("%") for name in found[1].split(","))


def _trips(
    loop: Instruction, computations: dict[str, list[Instruction]], open_trips: Callable[[str], float]
) -> float:
    """The constant that the counter stays below, by what it grows with each trip; it begins at 0."""
    if known := re.search(r'known_trip_count"?[:=]\{"?n"?[:=]"?(\d+)', loop.rest):
        return int(known[1])
    found = re.search(r"condition=%([\w.\-]+), body=%([\w.\-]+)", loop.rest)
    condition, body = (computations.get(found[i], []) if found else [] for i in (1, 2))
    compares = [one for one in condition if one.opcode == "compare"]
    if len(compares) != 1 or condition[-1] is not compares[0]:
        return open_trips(loop.shape)
    operands = _operands(compares[0])
    bounds = [value for name in operands if (value := _constant(condition, name)) is not None]
    counters = [one for one in condition if one.name in operands and one.opcode == "get-tuple-element"]
    if len(bounds) != 1 or len(counters) != 1:
        return open_trips(loop.shape)
    index = int(re.findall(r"index=(\d+)", counters[0].rest)[0])
    return -(-bounds[0] // _step(body, index))


def _step(body: list[Instruction], index: int) -> int:
    """What a loop's body adds to element `index` of its state; 1 where that is not to be seen."""
    by_name = {one.name: one for one in body}
    state = _operands(body[-1]) if body else []
    grown = by_name.get(state[index]) if index < len(state) else None
    if grown is not None and grown.opcode == "add":
        steps = [value for name in _operands(grown) if (value := _constant(body, name)) is not None]
        return steps[0] if steps else 1
    return 1


def _operands(one: Instruction) -> list[str]:
    return re.findall(r"%([\w.\-]+)", one.rest.split("),", 1)[0])


def _constant(computation: list[Instruction], name: str) -> int | None:
    values = [
        found
        for one in computation
        if one.name == name and one.opcode == "constant" and (found := re.match(r"(\d+)\)", one.rest))
    ]
    return int(values[0][1]) if values else None


def _top_level(computations: dict[str, list[Instruction]], entry: str) -> list[str]:
    """The entry and the bodies of loops: what lies inside a fusion does not pass through memory."""
    bodies = [
        found[1]
        for instructions in computations.values()
        for one in instructions
        if one.opcode == "while" and (found := re.search(r"body=%([\w.\-]+)", one.rest))
    ]
    return [name for name in dict.fromkeys([entry, *bodies]) if name in computations]
