# Copyright: The gpuserve.sglang authors
# SPDX-License-Identifier: Apache-2.0
"""Reads a patch series on the controller and runs the module patch_series with its content, once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase

MODULE = "gpuserve.sglang.patch_series"
COLLECTION = Path(__file__).resolve().parents[2]


def find_series(name: str, beside: Path) -> Path:
    """The folder of a series: a path, or a name below ``patches/`` beside the playbook or in the collection."""
    given = Path(name).expanduser()
    candidates = (
        [given] if given.is_absolute() else [beside / "patches" / given, COLLECTION / "patches" / given, beside / given]
    )
    for folder in candidates:
        if (folder / "series.yml").is_file():
            return folder
    looked = ", ".join(f"{folder}/series.yml" for folder in candidates)
    have = sorted(
        str(path.parent.relative_to(COLLECTION / "patches")) for path in COLLECTION.glob("patches/*/*/series.yml")
    )
    raise AnsibleActionFail(
        f"there is no patch series {name!r}: looked for {looked}, expected one of them. The collection has "
        f"{', '.join(have)}; "
        "correct series."
    )


def read_series(folder: Path) -> dict[str, Any]:
    """The definition of a series and the texts of the patch files that it names."""
    try:
        definition = yaml.safe_load((folder / "series.yml").read_text(encoding="utf-8"))
        texts = {path.name: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.patch"))}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise AnsibleActionFail(
            f"the patch series in {folder} cannot be read ({error}), expected YAML and text."
        ) from error
    if not isinstance(definition, dict):
        raise AnsibleActionFail(f"{folder}/series.yml holds a {type(definition).__name__}, expected a mapping.")
    return {"definition": definition, "texts": texts}


class ActionModule(ActionBase):
    """See the module of the same name."""

    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Send the content of the series instead of its name."""
        super().run(tmp, task_vars)
        arguments = dict(self._task.args)
        name = arguments.get("series")
        if not isinstance(name, str) or not name:
            raise AnsibleActionFail(f"series is {name!r}, expected the name of a patch series such as sglang/0.5.9.")
        arguments["series"] = read_series(find_series(name, Path(self._loader.get_basedir())))
        result = self._execute_module(module_name=MODULE, module_args=arguments, task_vars=task_vars)
        if "module_args" in result.get("invocation", {}):
            # The texts of all patches help nobody in a log.
            result["invocation"]["module_args"]["series"] = name
        return dict(result)
