"""Words that all parts of the planner share: a setting with its reason, a problem with its way out."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

#: Characters that a unit file, a log line or a shell would read as something else than text.
CONTROL = re.compile(r"[\x00-\x1f\x7f\u0085\u2028\u2029]")


#: Unit settings that a process gets when it starts; systemd applies the others to the running unit, without a restart.
AT_START = ("user", "group", "working_directory", "limit_memlock", "limit_nofile", "oom_score_adjust", "hardening")

#: What a size of systemd ends with, and the bytes of one.
SIZE_FACTORS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}

#: Keys of the wanted deployment whose variable is not called ``deployment_<key>``.
_VARIABLES = {
    "load_budget_s": "deployment_load_budget",
    "drain_budget_s": "deployment_drain_budget",
    "torch_cuda": "sglang_torch_cuda",
}


def variable_of(key: str) -> str:
    """The role variable behind a key of the wanted deployment."""
    return _VARIABLES.get(key, f"deployment_{key}")


@dataclasses.dataclass(frozen=True)
class Setting:
    """One decided value.

    ``name`` is a field of the engine (``mem_fraction_static``), an environment variable, or a key of the unit.
    ``source`` says where the value comes from; ``variable`` is what the operator changes to get another value.
    """

    name: str
    value: Any
    reason: str
    source: str
    variable: str


@dataclasses.dataclass(frozen=True)
class Problem:
    """Why there is no plan: what was found, what was expected, what to do."""

    rule: str
    variable: str
    found: str
    expected: str
    action: str

    def line(self) -> str:
        """The problem as one line of text."""
        text = f"{self.variable}: found {self.found}, expected {self.expected}. {self.action} [{self.rule}]"
        return CONTROL.sub(" ", text)


@dataclasses.dataclass(frozen=True)
class Warning_:
    """Something the operator should know; the plan is made all the same."""

    id: str
    message: str

    def as_dict(self) -> dict[str, str]:
        """The shape in which a plan carries it."""
        return {"id": self.id, "message": self.message}


class PlanError(ValueError):
    """No plan can be made. ``problems`` holds every reason; the text has one line for each."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems: list[Problem] = list(dict.fromkeys(problems))
        super().__init__("\n".join(problem.line() for problem in self.problems))


def show(value: Any) -> str:
    """A value as text for messages: JSON where that is possible, with its type where that matters, never long."""
    if value is None:
        return "nothing"
    try:
        text = json.dumps(value, ensure_ascii=False, sort_keys=True)
    except (TypeError, ValueError):
        text = repr(value)
    if len(text) > 120:
        text = text[:117] + "..."
    return f"{text} ({type_name(value)})"


def type_name(value: Any) -> str:
    """The type of a value in the operator's words. Ansible's tagged strings are strings."""
    for kind, name in (
        (bool, "boolean"),
        (int, "integer"),
        (float, "number"),
        (str, "string"),
        (Mapping, "mapping"),
        ((list, tuple), "list"),
    ):
        if isinstance(value, kind):
            return name
    return type(value).__name__


def is_int(value: Any) -> TypeGuard[int]:
    """Whether a value is an integer; ``true`` is none."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> TypeGuard[int | float]:
    """Whether a value is an integer or a finite number; ``true`` is none."""
    return is_int(value) or (isinstance(value, float) and math.isfinite(value))


def as_dict(value: Any) -> dict[str, Any]:
    """A mapping as a dictionary with text keys; anything else as an empty one."""
    return {str(key): item for key, item in value.items()} if isinstance(value, Mapping) else {}


def as_list(value: Any) -> list[Any]:
    """A list as a list; anything else as an empty one."""
    return list(value) if isinstance(value, (list, tuple)) else []


def canonical(value: Any) -> str:
    """JSON with one spelling for equal values."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, default=str)
