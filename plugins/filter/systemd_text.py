"""Filters: command lines and environments as text of a systemd unit file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.gpuserve.sglang.plugins.module_utils.systemd_text import (
    UnitTextError,
    environment_lines,
    exec_line,
)


def _checked(name: str, function: Callable[[Any], str], kind: type, expected: str) -> Callable[[Any], str]:
    def filter_function(value: Any) -> str:
        if not isinstance(value, kind) or isinstance(value, str):
            raise AnsibleFilterError(f"{name}: expected {expected}, got {type(value).__name__}")
        try:
            return function(value)
        except UnitTextError as error:
            raise AnsibleFilterError(f"{name}: {error}") from error

    return filter_function


class FilterModule:
    """The filters under their fully qualified names."""

    def filters(self) -> dict[str, Any]:
        return {
            "systemd_exec": _checked("systemd_exec", exec_line, Sequence, "a list of words"),
            "systemd_environment": _checked("systemd_environment", environment_lines, Mapping, "a dictionary"),
        }
