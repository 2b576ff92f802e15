"""The spec language: parse, check, repair, dump, edit.

`parse` gives both verdicts on a text, `dump` its canonical form, `applicable` the edits whose
contrasts train the policy, `order` and its kin the graph that the runtime executes.
"""

from .base_role import BaseRole, Family
from .baselines import DEFAULT_BASELINES, baseline_names, baselines
from .dag import descendants, edges, layers, order
from .dump import dump
from .edits import CHOICE_OF, FAMILIES, OPT_IN_FAMILIES, Edit, applicable
from .errors import Issue, format_issue, format_path
from .explain import explain
from .parse import Parsed, parse, parse_strict
from .reader import MAX_AGENTS, MAX_BYTES, MAX_DEPTH
from .roles import ROLES
from .schema import json_schema
from .types import CAPACITIES, CHOICES, VERSION, Agent, Spec

__all__ = [
    "CAPACITIES",
    "CHOICES",
    "CHOICE_OF",
    "DEFAULT_BASELINES",
    "FAMILIES",
    "MAX_AGENTS",
    "MAX_BYTES",
    "MAX_DEPTH",
    "OPT_IN_FAMILIES",
    "ROLES",
    "VERSION",
    "Agent",
    "BaseRole",
    "Edit",
    "Family",
    "Issue",
    "Parsed",
    "Spec",
    "applicable",
    "baseline_names",
    "baselines",
    "descendants",
    "dump",
    "edges",
    "explain",
    "format_issue",
    "format_path",
    "json_schema",
    "layers",
    "order",
    "parse",
    "parse_strict",
]
