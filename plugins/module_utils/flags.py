"""The engine's flags, as its own parser defines them: spelling, arity, types, choices, rendering.

The schema is data (``data/flags-<version>.json``), dumped from the real parser by ``tools/dump_flag_schema.py``.
"""

from __future__ import annotations

import decimal
import difflib
import functools
import json
import pathlib
import re
from collections.abc import Mapping
from typing import Any

from .settings import CONTROL, Problem, is_int, is_number, show

DATA = pathlib.Path(__file__).resolve().parent / "data"

#: Fields whose value is a secret: a command line is readable by every user of the machine, and the engine repeats it in
#: its first log line, in /server_info and in every bench_serving record.
SECRET_FIELD = re.compile(
    r"^token$|(^|_)(api_?key|secret|password|passwd|passphrase|credentials?|bearer"
    r"|(access|auth|hf|hub|api|session|private|secret|github|refresh)_?(token|key))$",
    re.IGNORECASE,
)
#: Values that look like a secret whatever the field is called.
SECRET_VALUE = re.compile(
    r"(^|[^A-Za-z0-9])(hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|AKIA[0-9A-Z]{16}"
    r"|xox[abprs]-[A-Za-z0-9-]{10,}|eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}\.|Bearer\s+\S{8,})"
    r"|://[^/\s:@]+:[^/\s@]+@|-----BEGIN [A-Z ]*PRIVATE KEY"
)


class Flag:
    """One flag of the engine."""

    __slots__ = ("aliases", "choices", "default", "dest", "field", "flag", "help", "kind", "nargs", "type")

    def __init__(self, entry: Mapping[str, Any]) -> None:
        self.flag: str = entry["flag"]
        self.aliases: list[str] = list(entry["aliases"])
        self.dest: str = entry["dest"]
        self.field: str | None = entry["field"]
        self.kind: str = entry["kind"]
        self.type: str = entry["type"]
        self.nargs: Any = entry["nargs"]
        self.choices: list[str] | None = entry["choices"]
        self.default: Any = entry["default"]
        self.help: str = entry["help"]

    @property
    def takes_json(self) -> bool:
        """Whether the text of this flag is JSON that the engine parses later."""
        return self.type == "str" and self.dest.endswith(
            ("_extra_config", "_override_args", "_events_config", "deepep_config")
        )

    @property
    def spelling(self) -> str:
        """The option text to render: the one that equals the field's name, or the parser's first."""
        named = "--" + (self.field or "").replace("_", "-")
        return named if named in (self.flag, *self.aliases) else self.flag


class Schema:
    """All flags of one engine version."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self.engine_version: str = document["engine_version"]
        self.never_read: frozenset[str] = frozenset(document["never_read"])
        self.environment: dict[str, dict[str, Any]] = dict(document.get("environment", {}))
        self.flags: list[Flag] = [Flag(entry) for entry in document["flags"]]
        self.by_option: dict[str, Flag] = {}
        self.by_field: dict[str, Flag] = {}
        for flag in self.flags:
            for option in (flag.flag, *flag.aliases):
                self.by_option[option] = flag
            self.by_field[flag.field or flag.dest] = flag

    def find(self, name: str) -> Flag | None:
        """The flag for an option (``--tp-size``, ``tp-size``) or a field (``tp_size``); no abbreviations."""
        if name in self.by_field:
            return self.by_field[name]
        option = "--" + name.lstrip("-").replace("_", "-")
        return self.by_option.get(name) or self.by_option.get(option)

    def complaint(self, variable: str, name: str, patched: Mapping[str, str]) -> Problem:
        """Why a name is no flag, with the nearest real one."""
        bare = name.lstrip("-").replace("_", "-")
        if name in patched or bare.replace("-", "_") in patched:
            patch = patched.get(name) or patched[bare.replace("-", "_")]
            return Problem(
                "unknown_flag",
                variable,
                show(name),
                f"a flag of SGLang {self.engine_version}; this one exists only with the patch {patch}",
                f"Apply the patch (add {patch} to deployment_patches) or remove the setting.",
            )
        options = sorted(self.by_option)
        longer = [option for option in options if option.startswith("--" + bare)]
        if longer:
            return Problem(
                "abbreviated_flag",
                variable,
                show(name),
                "the whole name: an abbreviation means another flag as soon as a release adds one",
                f"Write {_field_or_option(self, longer[0])} ({', '.join(longer[:4])}).",
            )
        names = {option: option for option in options}
        near = difflib.get_close_matches("--" + bare, names, n=1, cutoff=0.5)
        hint = f"Did you mean {_field_or_option(self, near[0])} ({near[0]})?" if near else "No flag has a similar name."
        return Problem(
            "unknown_flag",
            variable,
            show(name),
            f"a flag of SGLang {self.engine_version}",
            f"{hint} All flags: plugins/module_utils/data/flags-{self.engine_version}.json.",
        )


def _field_or_option(schema: Schema, option: str) -> str:
    flag = schema.by_option[option]
    return flag.field or option


def versions() -> list[str]:
    """The engine versions whose schema is shipped."""
    return sorted(path.name[len("flags-") : -len(".json")] for path in DATA.glob("flags-*.json"))


@functools.lru_cache(maxsize=4)
def load(engine_version: str) -> Schema:
    """The schema of an engine version. Raises FileNotFoundError when it is not shipped."""
    with (DATA / f"flags-{engine_version}.json").open(encoding="utf-8") as stream:
        return Schema(json.load(stream))


def check_value(flag: Flag, value: Any, variable: str) -> Problem | None:
    """Whether the parser would take ``value`` for ``flag`` and mean the same by it. ``None`` when it would."""
    if flag.kind == "deprecated":
        return Problem(
            "deprecated_flag",
            variable,
            show(value),
            "nothing: the engine only prints that this flag is gone",
            "Remove it.",
        )
    if flag.kind == "switch":
        if isinstance(value, bool):
            return None
        return Problem(
            "flag_type",
            variable,
            show(value),
            "true or false: it is a switch",
            "Write true without quotes, or remove it.",
        )
    many = flag.nargs in ("+", "*")
    if isinstance(value, (list, tuple)) and flag.type not in ("json", "json_list"):
        if not many:
            return Problem("flag_arity", variable, show(value), f"one {_word(flag)}", "Give one value, not a list.")
        if flag.nargs == "+" and not value:
            return Problem(
                "flag_arity", variable, show(value), "at least one value", "Give a value or remove the setting."
            )
        for item in value:
            problem = _check_one(flag, item, variable)
            if problem:
                return problem
        return None
    return _check_one(flag, value, variable)


def _word(flag: Flag) -> str:
    return {"int": "integer", "float": "number", "json": "mapping (JSON)", "json_list": "list (JSON)"}.get(
        flag.type, "string"
    )


def _check_one(flag: Flag, value: Any, variable: str) -> Problem | None:
    def refuse(expected: str, action: str, rule: str = "flag_type") -> Problem:
        return Problem(rule, variable, show(value), expected, action)

    if flag.type == "int":
        if not is_int(value):
            return refuse("an integer", "Write the number without quotes and without a decimal point.")
    elif flag.type == "float":
        if not is_number(value):
            return refuse("a number", "Write the number without quotes.")
    elif flag.type in ("json", "json_list"):
        return _check_json(flag, value, refuse)
    else:
        if isinstance(value, Mapping) and flag.takes_json:
            return None
        if not isinstance(value, str):
            return refuse("a string", "Put the value in quotes.")
        if value == "":
            return refuse("a string that is not empty", "Give a value, or null to leave it to the engine.")
        if value != value.strip():
            return refuse(
                "a string without spaces around it", "Remove them: the engine strips some values and not others."
            )
        if value.startswith("-"):
            return refuse("a value that does not begin with a dash", "The parser would read it as another flag.")
        if CONTROL.search(value):
            return refuse(
                "text without control characters",
                "Remove line breaks and other control characters.",
                "control_characters",
            )
    if flag.choices is not None and str(value) not in flag.choices:
        near = difflib.get_close_matches(str(value), flag.choices, n=1)
        hint = f"Did you mean {near[0]}?" if near else "Choose one of these."
        return refuse("one of " + ", ".join(flag.choices), hint, "flag_choice")
    return None


def _check_json(flag: Flag, value: Any, refuse: Any) -> Problem | None:
    wanted: Any = list if flag.type == "json_list" else (dict, list)
    parsed = value
    if isinstance(value, str):
        try:
            parsed = json.loads(value)
        except ValueError:
            problem: Problem = refuse(f"a {_word(flag)}", "Write it as YAML, or as valid JSON in quotes.")
            return problem
        if CONTROL.search(value):
            return Problem(
                "control_characters",
                refuse("", "").variable,
                show(value),
                "JSON on one line",
                "Write it as YAML, without quotes.",
            )
    if not isinstance(parsed, wanted):
        other: Problem = refuse(f"a {_word(flag)}", "Write it as YAML.")
        return other
    return None


def normal(flag: Flag, value: Any) -> Any:
    """A checked value in one form: a flag that takes several values always has a list, which later readers rely on."""
    if flag.nargs in ("+", "*") and value is not None and flag.type not in ("json", "json_list"):
        return list(value) if isinstance(value, (list, tuple)) else [value]
    return value


def text_of(value: Any) -> str:
    """A value as the parser will read it."""
    if isinstance(value, bool):
        return "True" if value else "False"
    if isinstance(value, (Mapping, list, tuple)):
        return json.dumps(value, separators=(",", ":"), sort_keys=True, ensure_ascii=True)
    if isinstance(value, float):
        text = repr(float(value))
        # argparse takes -0.5 for a value and -5e-07 for an option
        return format(decimal.Decimal(text), "f") if "e" in text and value < 0 else text
    return str(value)


def render(flag: Flag, value: Any) -> list[str]:
    """The words of the command line for one flag; none for a switch that is off or a value left to the engine."""
    if value is None or (value is False and flag.kind == "switch"):
        return []
    if flag.kind == "switch":
        return [flag.spelling]
    if flag.nargs in ("+", "*") and isinstance(value, (list, tuple)) and flag.type not in ("json", "json_list"):
        return [flag.spelling, *[text_of(item) for item in value]]
    return [flag.spelling, text_of(value)]


def secret(name: str, value: Any) -> str | None:
    """Why a setting looks like a secret, or nothing."""
    bare = name.lstrip("-").replace("-", "_")
    if SECRET_FIELD.search(bare):
        return "its name says that it is a secret"
    for text in _texts(value):
        if SECRET_VALUE.search(text):
            return "its value has the form of a secret"
    return None


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        found = [text for item in value.values() for text in _texts(item)]
        return found + [f"Bearer {'x' * 8}" for key in value if SECRET_FIELD.search(str(key))]
    if isinstance(value, (list, tuple)):
        return [text for item in value for text in _texts(item)]
    return []
