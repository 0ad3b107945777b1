"""Profiles as data: named sets of flags and environment, each value with its reason.

A profile is a mapping ``{title, base, flags, env}``. A value is written plainly (``0.9``) or with its story
(``{value: 0.9, reason: ..., source: ..., when: pcie}``). ``base`` names the profile that it extends; ``null`` takes a
value of the base away. Site profiles have the same shape and may extend the built-in ones.
"""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Mapping
from typing import Any

from .flags import DATA
from .settings import Problem, Setting, as_dict, show

#: Conditions that a value may name under ``when``; the planner decides them from host, model and patches.
CONDITIONS = {
    "remote_code": "the target model's directory ships code (auto_map)",
    "fusion_allowed": "topology, compute capability, toolkit and patches allow fused all-reduce",
    "pcie": "the GPUs are linked by PCIe only",
    "nvlink": "the GPUs are linked by NVLink",
}
#: Values that the planner computes from the host.
COMPUTED = {"all_gpus": "the number of GPUs of the host"}
_PROFILE_KEYS = {"title", "base", "flags", "env"}
_VALUE_KEYS = {"value", "compute", "when", "reason", "source"}
_STORY_KEYS = {"value", "compute", "when"}


@functools.lru_cache(maxsize=1)
def builtin() -> dict[str, Any]:
    """The profiles shipped with the collection. Names that begin with an underscore are only for ``base``."""
    with (DATA / "profiles.json").open(encoding="utf-8") as stream:
        document: dict[str, Any] = json.load(stream)
    return document


def names(site: Mapping[str, Any]) -> list[str]:
    """The profiles that can be chosen."""
    return sorted(name for name in {*builtin(), *map(str, site)} if not name.startswith("_"))


class Entry:
    """One value of a profile before conditions are decided."""

    __slots__ = ("compute", "setting", "when")

    def __init__(self, name: str, raw: Any, profile: str, variable: str, site: bool) -> None:
        story = as_dict(raw) if isinstance(raw, Mapping) and _STORY_KEYS & {str(key) for key in raw} else {"value": raw}
        self.when: str | None = story.get("when")
        self.compute: str | None = story.get("compute")
        default = f"set by the profile {profile}" + (" of this site" if site else "")
        self.setting = Setting(
            name,
            story.get("value"),
            str(story.get("reason") or default),
            str(story.get("source") or f"profile {profile}"),
            variable,
        )


def resolve(name: str, site: Mapping[str, Any]) -> tuple[dict[str, Entry], dict[str, Entry], list[Problem]]:
    """The flags and the environment of a profile with its bases, and what is wrong with it."""
    problems: list[Problem] = []
    chain: list[tuple[str, Mapping[str, Any], bool]] = []
    current: str | None = name
    variable = "deployment_profile"
    while current is not None:
        if current in [item[0] for item in chain]:
            loop = " -> ".join([item[0] for item in chain] + [current])
            problems.append(
                Problem(
                    "profile_loop",
                    f"deployment_profiles.{name}.base",
                    loop,
                    "a chain of bases that ends",
                    "Remove one base.",
                )
            )
            break
        in_site = current in site
        found = site[current] if in_site else builtin().get(current)
        hidden = not chain and current.startswith("_") and not in_site
        if found is None or hidden:
            longer = [item for item in names(site) if item.startswith(current)] if current else []
            near = longer or difflib.get_close_matches(current, names(site), n=1)
            hint = f"Did you mean {near[0]}?" if near else "Choose one of these, or define it in deployment_profiles."
            problems.append(
                Problem("profile_unknown", variable, show(current), "one of " + ", ".join(names(site)), hint)
            )
            break
        if in_site:
            problems += _shape_problems(current, found)
            if problems:
                break
        chain.append((current, as_dict(found), in_site))
        variable = f"deployment_profiles.{current}.base"
        base = as_dict(found).get("base")
        current = None if base is None else str(base)
    flags: dict[str, Entry] = {}
    env: dict[str, Entry] = {}
    for profile, content, in_site in reversed(chain):
        for target, key, prefix in ((flags, "flags", "deployment_overrides"), (env, "env", "deployment_extra_env")):
            for item, raw in as_dict(content.get(key)).items():
                where = f"deployment_profiles.{profile}.{key}.{item}" if in_site else f"{prefix}.{item}"
                target[item] = Entry(item, raw, profile, where, in_site)
    return flags, env, problems


def _shape_problems(name: str, profile: Any) -> list[Problem]:
    where = f"deployment_profiles.{name}"
    if not isinstance(profile, Mapping):
        expected = "a mapping with title, base, flags, env"
        return [
            Problem(
                "profile_shape", where, show(profile), expected, "Write it as the built-in ones in data/profiles.json."
            )
        ]
    problems = []
    for key in profile:
        if key not in _PROFILE_KEYS:
            expected = "one of " + ", ".join(sorted(_PROFILE_KEYS))
            action = f"Put engine fields under {where}.flags and variables under {where}.env."
            problems.append(Problem("profile_shape", f"{where}.{key}", show(key), expected, action))
    base = profile.get("base")
    if base is not None and not isinstance(base, str):
        problems.append(
            Problem("profile_shape", f"{where}.base", show(base), "the name of a profile", "Name one, or remove it.")
        )
    for key in ("flags", "env"):
        content = profile.get(key, {})
        if not isinstance(content, Mapping):
            problems.append(
                Problem("profile_shape", f"{where}.{key}", show(content), "a mapping", "Write name: value lines.")
            )
            continue
        for item, raw in content.items():
            problems += _value_problems(f"{where}.{key}.{item}", item, raw)
    return problems


def _value_problems(where: str, item: Any, raw: Any) -> list[Problem]:
    if not isinstance(item, str):
        return [Problem("profile_shape", where, show(item), "a name in text", "Put the name in quotes.")]
    if not isinstance(raw, Mapping) or not _STORY_KEYS & {str(key) for key in raw}:
        return []
    problems = []
    unknown = sorted(str(key) for key in raw if key not in _VALUE_KEYS)
    if unknown:
        expected = "only " + ", ".join(sorted(_VALUE_KEYS))
        problems.append(Problem("profile_shape", where, show(unknown), expected, "Remove the other keys."))
    when = raw.get("when")
    if when is not None and (not isinstance(when, str) or when not in CONDITIONS):
        expected = "one of " + ", ".join(sorted(CONDITIONS))
        problems.append(Problem("profile_shape", f"{where}.when", show(when), expected, "Choose one, or remove it."))
    compute = raw.get("compute")
    if compute is not None and (not isinstance(compute, str) or compute not in COMPUTED):
        expected = "one of " + ", ".join(sorted(COMPUTED))
        problems.append(
            Problem("profile_shape", f"{where}.compute", show(compute), expected, "Choose one, or give a value.")
        )
    return problems
