"""The documented box and how a plan deviates from it.

``data/documented.json`` is the record of one machine. Every setting that the record names and the plan has otherwise,
and every setting that the plan has and the record does not name, becomes one deviation with its reason and the variable
that takes it back.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

from .flags import DATA, text_of
from .settings import Setting

#: Values that set nothing.
NOTHING: tuple[Any, ...] = (None, "", [], ())


@functools.lru_cache(maxsize=1)
def record() -> dict[str, Any]:
    """The documented box."""
    with (DATA / "documented.json").open(encoding="utf-8") as stream:
        document: dict[str, Any] = json.load(stream)
    return document


def deviations(
    actual: Mapping[str, Mapping[str, Setting]], absent: Mapping[str, tuple[str, str]]
) -> list[dict[str, Any]]:
    """What differs from the record.

    ``actual`` maps ``flags``, ``env`` and ``unit`` to their settings by printed name. ``absent`` gives, for a setting
    that is not in the plan, the reason and the variable that brings it back.
    """
    document = record()
    found: list[dict[str, Any]] = []
    for kind, prefix in (("flags", ""), ("env", ""), ("unit", "unit.")):
        wanted: dict[str, Any] = document[kind]
        site = document["site"][kind]
        have = actual[kind]
        for name in [*wanted, *[name for name in have if name not in wanted]]:
            setting = have.get(name)
            if (
                name in site
                or (setting is None and name not in wanted)
                or (setting is not None and setting.value is None)
            ):
                continue
            if setting is not None and name in wanted and text_of(setting.value) == text_of(wanted[name]):
                continue
            if setting is not None and setting.value in NOTHING and wanted.get(name) in NOTHING:
                # Neither has it.
                continue
            label = prefix + name
            if setting is not None:
                reason, variable = document["explained"].get(label) or setting.reason, setting.variable
            else:
                default = ("the chosen profile does not set it", "deployment_profile")
                reason, variable = absent.get(label) or default
            found.append(
                {
                    "setting": label,
                    "documented": wanted.get(name),
                    "actual": setting.value if setting is not None else None,
                    "reason": reason,
                    "take_back": variable,
                }
            )
    return found
