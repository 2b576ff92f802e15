"""Small run directories, made up but in the shape that a run writes."""

import json
import random
from pathlib import Path

FAMILIES = ("delete_dependency", "restore_duty", "lower_capacity")


def make_run(folder: Path, *, steps: int = 6, tasks: int = 6, methods=("lemon", "vanilla", "cot")) -> Path:
    """A finished run; returns its directory."""
    rng = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    manifest = {
        "git_sha": "0123abc",
        "seed": 0,
        "config": {"train": {"steps": steps, "lr": 1e-4}},
        "device": "cpu",
    }
    write_object(folder / "manifest.json", manifest)
    write_lines(folder / "metrics.jsonl", [metric(step, steps, rng) for step in range(1, steps + 1)])
    timing = [
        {"step": s, "sample_s": 2.0, "execute_s": 5 + 3 / s, "update_s": 1.5} for s in range(1, steps + 1)
    ]
    write_lines(folder / "timings.jsonl", timing)
    trained = [
        execution("train", "lemon", s, f"t{i}", rng, s / steps) for s in range(1, steps + 1) for i in range(4)
    ]
    evaluated = [
        execution("eval", method, steps, f"e{i}", rng, 0.5) for method in methods for i in range(tasks)
    ]
    write_lines(folder / "executions.jsonl", trained + evaluated)
    write_object(folder / "summary.json", summary(evaluated, steps))
    return folder


def metric(step: int, steps: int, rng: random.Random) -> dict:
    part = step / steps
    row = {
        "step": step,
        "reward": 1 + 0.3 * part + rng.gauss(0, 0.06),
        "accuracy": min(1.0, max(0.0, 0.45 + 0.2 * part + rng.gauss(0, 0.08))),
        "invalid_rate": max(0.0, 0.06 * (1 - part)),
        "cost_per_task": 340 - 120 * part + rng.gauss(0, 15),
        "worker_tokens": 5200 - 1800 * part + rng.gauss(0, 200),
        "frac_reward_zero_std": rng.random() * 0.5,
        "agents_per_spec": 3 - part,
        "dependencies_per_spec": 2.4 - part,
        "entropy": 0.9 - 0.5 * part + rng.gauss(0, 0.02),
        "kl": 0.004 * part,
    }
    for i, family in enumerate(FAMILIES):
        row[f"edit_prob/{family}"] = 1 / 3 + (i - 1) * 0.2 * part
        row[f"contrast/{family}"] = None if rng.random() < 0.3 else abs(rng.gauss(0.1 * (i + 1), 0.03))
    return row


def execution(phase: str, method: str, step: int, task: str, rng: random.Random, part: float) -> dict:
    roles = [rng.choice(["math_solver", "inspector", "chain"]) if rng.random() > part else "equation_writer"]
    agents = [
        {
            "id": f"a{i + 1}",
            "role": role,
            "capacity": "small" if rng.random() < part else "medium",
            "status": "OK",
            "answer": str(rng.randint(1, 40)),
            "prompt_tokens": 180,
            "prefix_tokens": 120,
            "generated_tokens": 60,
            "cost": 78.0 if method == "lemon" else 90.0,
        }
        for i, role in enumerate([*roles, "option_chooser"])
    ]
    correct = rng.random() < (0.7 if method == "lemon" else 0.45)
    total = 1.2 * correct + rng.random() * 0.2 - 0.05
    return {
        "phase": phase,
        "method": method,
        "step": step,
        "task": task,
        "spec": SPEC.format(n=rng.randint(1, 99)),
        "valid": True,
        "errors": [],
        "agents": agents,
        "answer": "B",
        "correct": correct,
        "infra_failed": False,
        "reward": {
            "total": total,
            "success": 1.0 * correct,
            "efficiency": 0.12,
            "structure": -0.05,
            "invalid": 0,
        },
    }


def summary(evaluated: list[dict], steps: int) -> dict:
    rows = []
    for method in dict.fromkeys(e["method"] for e in evaluated):
        mine = [e for e in evaluated if e["method"] == method]
        accuracy = sum(e["correct"] for e in mine) / len(mine)
        row = {"method": method, "bench": "aqua", "split": "test", "n": len(mine), "seed": 0}
        row |= {"extractor": "lemon", "protocol": "full", "accuracy": accuracy}
        row |= {"ci95": [max(0, accuracy - 0.13), min(1, accuracy + 0.13)], "prompt_tokens_per_task": 360.5}
        row |= {
            "generated_tokens_per_task": 120.2,
            "cost_per_task": sum(a["cost"] for a in mine[0]["agents"]),
        }
        rows.append(row | {"no_answer": 0, "infra_failed": 0, "wall_s": 61.0})
    data = {"source": "official", "split": "test", "n": 254, "sha256": "ab" * 32}
    train = {"cached_calls": 512, "recorded_calls": 300, "reward_first": 1.02, "reward_last": 1.31}
    run = {
        "bench": "aqua",
        "workers": "embedded",
        "policy": "compact",
        "seed": 0,
        "steps": steps,
        "wall_s": 512.3,
    }
    return run | {"data": data, "train": train, "eval": rows}


def write_object(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def write_lines(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


SPEC = """version: 1
agents:
  - id: a1
    name: Ratio analyst
    role: equation_writer
    duty: "Write the speed ratio as an equation and solve it. ({n})"
    capacity: small
    depends_on: []
  - id: a2
    name: Option chooser
    role: option_chooser
    duty: "Choose the option that is nearest to the value."
    capacity: small
    depends_on: [a1]
output: a2
"""
