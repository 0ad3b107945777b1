# Copyright: The gpuserve.sglang authors
# SPDX-License-Identifier: Apache-2.0
"""Holds the variables of an inventory against what the roles know: names first, then types and choices.

Ansible takes a misspelt variable for somebody else's, so that its role quietly works with the default, and answers a wrong
type with a page. Here each finding is one line: what was found, what was expected, what to do.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

#: The playbooks' own variables; every one is listed here and in the README.
PLAYBOOK_PREFIX = "gpuserve_"
PLAYBOOK_VARIABLES: Mapping[str, Mapping[str, Any]] = {
    "gpuserve_hosts": {"type": "raw", "description": "Hosts or groups that a playbook works on."},
    "gpuserve_cuda": {"type": "bool", "description": "Whether site.yml installs driver and toolkit.", "default": True},
    "gpuserve_allreduce_check": {
        "type": "bool",
        "description": "Whether site.yml proves the links between the GPUs before the service starts.",
        "default": False,
    },
    "gpuserve_other_variables": {
        "type": "list",
        "elements": "str",
        "description": "Variables of this site that begin like those of a role and are none of it.",
        "default": [],
    },
}
#: What Ansible takes for true and false, of text.
BOOLEANS = frozenset({"y", "yes", "on", "1", "true", "t", "n", "no", "off", "0", "false", "f"})
SECRET = re.compile(r"(?i)secret|token|passw|api_?key|credential")
SHOWN_LENGTH = 80
TYPE_NAMES = {
    "str": "text", "path": "a path", "int": "a whole number", "float": "a number", "bool": "true or false",
    "list": "a list", "dict": "a dictionary",
}  # fmt: skip

Option = Mapping[str, Any]


@dataclass(frozen=True)
class Known:
    """What the collection knows: the options of each role, and names that its roles make themselves (facts, results)."""

    roles: Mapping[str, Mapping[str, Option]]
    made: Collection[str] = ()
    playbook: Mapping[str, Option] = field(default_factory=lambda: PLAYBOOK_VARIABLES)

    def owner(self, name: str) -> str | None:
        """The role that a name belongs to by its prefix, the longest one; None for a name that is none of our business."""
        owners = [role for role in self.roles if name.startswith(f"{role}_")]
        return max(owners, key=len) if owners else None

    def option(self, name: str) -> Option | None:
        for options in (self.playbook, *self.roles.values()):
            if name in options:
                return options[name]
        return None

    def names(self) -> set[str]:
        return {*self.playbook, *(name for options in self.roles.values() for name in options)}


def is_ours(name: str, known: Known) -> bool:
    """Whether a variable begins like one of the collection's public ones."""
    return name.startswith(PLAYBOOK_PREFIX) or known.owner(name) is not None


def unknown_names(names: Collection[str], known: Known, others: Collection[str] = ()) -> list[str]:
    """One line for each name with a prefix of ours that nothing reads."""
    return [
        _unknown(name, known)
        for name in sorted(names)
        if is_ours(name, known) and known.option(name) is None and name not in known.made and name not in others
    ]


def _unknown(name: str, known: Known) -> str:
    role = known.owner(name)
    near = difflib.get_close_matches(name, known.names(), n=1, cutoff=0.75)
    if near:
        expected = f"{near[0]} perhaps"
    elif role:
        expected = f"one of roles/{role}/README.md"
    else:
        expected = f"one of {', '.join(sorted(known.playbook))}"
    reader = f"the role {role}" if role else "the playbooks"
    return (
        f"{name} is set but is no variable of {reader}, expected {expected}. "
        "Correct the name; a name of your own goes into gpuserve_other_variables."
    )


def missing_names(names: Collection[str], roles: Collection[str], known: Known) -> list[str]:
    """One line for each variable that one of the given roles cannot do without."""
    return [
        f"{name} is not set, expected {_expected(option)}{_note(option)}. Set it in the inventory."
        for role in roles
        for name, option in known.roles.get(role, {}).items()
        if option.get("required") and name not in names
    ]


def wrong_value(name: str, value: Any, known: Known) -> list[str]:
    """One line for each thing that is wrong with a value; none when it is right or when nothing is known about it."""
    option = known.option(name)
    if option is None or value is None:
        return []
    default = option.get("default")
    simple = isinstance(default, (str, int, float)) and default != ""
    away = f", or remove {name} for its default {shown(name, default)}" if simple else ""
    return [f"{finding}. Correct it{away}." for finding in _findings(name, value, option)]


def _findings(name: str, value: Any, option: Option) -> Iterator[str]:
    kind = str(option.get("type", "str"))
    if not FITS.get(kind, lambda _value: True)(value):
        yield f"{name} is {shown(name, value)}, expected {_expected(option)}{_note(option)}"
        return
    if kind == "path" and on_host(option) and value and not value.startswith("/"):
        yield f"{name} is {shown(name, value)}, expected {_expected(option)} that begins with /{_note(option)}"
        return
    choices = option.get("choices")
    if choices:
        given = value if kind == "list" else [value]
        for item in given:
            if str(item) not in {str(choice) for choice in choices}:
                near = difflib.get_close_matches(str(item), [str(c) for c in choices], n=1)
                hint = f" (did you mean {near[0]}?)" if near else ""
                yield f"{name} is {shown(name, item)}, expected one of {', '.join(str(c) for c in choices)}{hint}"
    inner = option.get("options")
    if kind == "list":
        elements = str(option.get("elements", "raw"))
        element: dict[str, Any] = {"type": elements, **({"options": inner} if inner else {})}
        if elements == "path":
            element["description"] = option.get("description", "")
        for place, item in enumerate(value):
            yield from _findings(f"{name}[{place}]", item, element)
    elif kind == "dict" and inner:
        yield from _entries(name, value, inner)


def _entries(name: str, value: Mapping[str, Any], options: Mapping[str, Option]) -> Iterator[str]:
    for key in value:
        if key not in options:
            near = difflib.get_close_matches(str(key), list(options), n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            yield f"{name} has the key {key}, expected only {', '.join(options)}{hint}"
    for key, option in options.items():
        if value.get(key) is None:
            if option.get("required"):
                yield f"{name} has no {key}, expected {_expected(option)}"
        else:
            yield from _findings(f"{name}.{key}", value[key], option)


def _is_int(value: Any) -> bool:
    if isinstance(value, str):
        return re.fullmatch(r"\s*[-+]?\d+\s*", value) is not None
    return (isinstance(value, int) and not isinstance(value, bool)) or (isinstance(value, float) and value.is_integer())


def _is_float(value: Any) -> bool:
    if isinstance(value, str):
        try:
            float(value)
        except ValueError:
            return False
        return True
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool) or (isinstance(value, (int, float, str)) and str(value).lower() in BOOLEANS)


#: Whether a value is of a type, as the roles can use it: text that stands for a number is one, since `-e name=1` gives text.
FITS: Mapping[str, Callable[[Any], bool]] = {
    "str": lambda value: isinstance(value, (str, int, float)),
    "path": lambda value: isinstance(value, str),
    "int": _is_int,
    "float": _is_float,
    "bool": _is_bool,
    "list": lambda value: isinstance(value, (list, tuple)),
    "dict": lambda value: isinstance(value, Mapping),
}


def shown(name: str, value: Any) -> str:
    """A value as an error may show it: no secrets, and not the whole of what is long."""
    if isinstance(value, Mapping):
        return f"a dictionary of {len(value)}"
    if isinstance(value, (list, tuple)):
        return f"a list of {len(value)}"
    if SECRET.search(name) or (isinstance(value, str) and (SECRET.search(value) or re.search(r"://[^/\s]*@", value))):
        return "a value that is not shown here"
    if isinstance(value, str):
        return f'"{value[:SHOWN_LENGTH]}{"..." if len(value) > SHOWN_LENGTH else ""}"'
    return str(value).lower() if isinstance(value, bool) else str(value)


def on_host(option: Option) -> bool:
    """Whether a path is one of the host, so that it must be absolute: nobody says where a relative one would begin there."""
    return "on the controller" not in " ".join(_sentences(option).split())


def _expected(option: Option) -> str:
    kind = str(option.get("type", "str"))
    text = "an absolute path" if kind == "path" and on_host(option) else TYPE_NAMES.get(kind, "a value")
    elements = option.get("elements")
    if kind == "list" and elements in ("str", "int", "float", "dict", "path"):
        text += {"str": " of texts", "int": " of whole numbers", "float": " of numbers", "path": " of paths"}.get(
            elements, " of dictionaries"
        )
    return text


def _note(option: Option) -> str:
    purpose = _purpose(option)
    return f" ({purpose[0].lower()}{purpose[1:]})" if purpose and "(" not in purpose else ""


def _sentences(option: Option) -> str:
    """An option's description as it is written."""
    text = option.get("description", "")
    return " ".join(str(part) for part in text) if isinstance(text, list) else str(text)


def _purpose(option: Option) -> str:
    """The first sentence of an option's description, without Ansible's markup."""
    line = _sentences(option)
    line = re.sub(r"\b[A-Z]\(((?:[^()]|\([^()]*\))*)\)", r"\1", re.sub(r"\s+", " ", line).strip())
    return re.split(r"(?<=[.;])\s", line, maxsplit=1)[0].rstrip(";.")
