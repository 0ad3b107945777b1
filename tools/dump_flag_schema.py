#!/usr/bin/env python3
"""Dump the flags of an installed SGLang as the JSON that the planner checks spelling, arity, types and choices with.

Run it with the interpreter of the environment that holds the engine; no GPU and no Ansible are needed:

    /path/to/engine/bin/python tools/dump_flag_schema.py

writes ``plugins/module_utils/data/flags-<engine version>.json``. ``--output -`` prints instead, ``--check`` compares
with the file that is there and ends with status 1 when they differ.

What is read is the real ``argparse`` parser built by ``sglang.srt.server_args.ServerArgs.add_cli_args``. In addition
the engine's source is searched for every field of ``ServerArgs``: a field whose name is an attribute, a keyword or a
string nowhere outside its own declaration and its own parser entry is listed under ``never_read``.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import json
import pathlib
import sys
import types
from typing import Any

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
DATA = REPOSITORY / "plugins" / "module_utils" / "data"
_KEPT: list[Any] = []


class _Name:
    """A name of a compiled module: it has every attribute, and raises when it is called."""

    def __init__(self, path: str) -> None:
        self.__name__ = self.__qualname__ = path

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name(f"{self.__name__}.{name}")

    def __call__(self, *_args: Any, **_kwargs: Any) -> Any:
        raise RuntimeError(f"{self.__name__} needs the compiled kernels of a GPU build")


class _Stub(types.ModuleType):
    """A module that has every name."""

    __path__: list[str]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name(f"{self.__name__}.{name}")

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []


class _KernelFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname.split(".")[0] == "sgl_kernel":
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        return None


def make_importable() -> None:
    """Stand in for compiled parts that this environment lacks, so that the engine's Python can be imported.

    A complete environment is left as it is: each stand-in is used only where the real part does not load.
    """
    if importlib.util.find_spec("sgl_kernel") is None:
        sys.meta_path.append(_KernelFinder())
    torch = importlib.import_module("torch")
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "DEF")
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _KEPT.append(library)
        importlib.import_module("torchvision")


def plain(value: Any) -> Any:
    """A default as JSON; what JSON cannot hold becomes its text."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    return repr(value)


def kind_of(action: argparse.Action) -> str:
    name = type(action).__name__
    return {
        "_StoreAction": "value",
        "_StoreTrueAction": "switch",
        "_StoreFalseAction": "switch",
        "_HelpAction": "help",
        "_AppendAction": "value",
        "BooleanOptionalAction": "switch",
        "DeprecatedAction": "deprecated",
    }.get(name, "value")


def type_of(action: argparse.Action) -> str:
    name = getattr(action.type, "__name__", None)
    if name is None:
        return "str"
    return {"nullable_str": "str", "json_list_type": "json_list", "loads": "json"}.get(name, str(name))


def describe(action: argparse.Action) -> dict[str, Any]:
    """One flag. ``flag`` is the first long spelling, the others are ``aliases``."""
    long = [option for option in action.option_strings if option.startswith("--")]
    entry: dict[str, Any] = {
        "flag": long[0],
        "aliases": [option for option in action.option_strings if option != long[0]],
        "dest": action.dest,
        "kind": kind_of(action),
        "type": type_of(action),
        "nargs": action.nargs if kind_of(action) == "value" else 0,
        "choices": sorted(str(item) for item in action.choices) if action.choices else None,
        "default": plain(action.default) if action.default != argparse.SUPPRESS else None,
        "help": " ".join((action.help or "").split()) if action.help != argparse.SUPPRESS else "",
    }
    return entry


def names_in(tree: ast.AST, skip: set[ast.AST]) -> set[str]:
    """Every name a field could be read by: attributes that are loaded, keywords, strings."""
    found: set[str] = set()
    stack: list[ast.AST] = [tree]
    while stack:
        node = stack.pop()
        if node in skip:
            continue
        if isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.keyword) and node.arg:
            found.add(node.arg)
        elif isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            found.add(node.value)
        stack.extend(ast.iter_child_nodes(node))
    return found


def never_read(root: pathlib.Path, fields: set[str]) -> list[str]:
    """The fields of ServerArgs that no file of the engine mentions, apart from their declaration and their parser
    entry."""
    seen: set[str] = set()
    for path in sorted(root.rglob("*.py")):
        text = path.read_text(encoding="utf-8", errors="replace")
        candidates = {field for field in fields - seen if field in text}
        if not candidates:
            continue
        try:
            tree = ast.parse(text)
        except SyntaxError:
            seen |= candidates
            continue
        skip: set[ast.AST] = set()
        if path == root / "srt" / "server_args.py":
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef) and node.name == "ServerArgs":
                    skip |= {item for item in node.body if isinstance(item, ast.AnnAssign)}
                    skip |= {
                        item
                        for item in node.body
                        if isinstance(item, ast.FunctionDef) and item.name in ("add_cli_args", "from_cli_args")
                    }
        seen |= names_in(tree, skip) & candidates
    return sorted(fields - seen)


def dump() -> dict[str, Any]:
    """The schema of the installed engine."""
    make_importable()
    sglang = importlib.import_module("sglang")
    ServerArgs = importlib.import_module("sglang.srt.server_args").ServerArgs

    parser = argparse.ArgumentParser(allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    flags = [describe(action) for action in parser._actions if kind_of(action) != "help"]
    fields = {field.name for field in dataclasses.fields(ServerArgs)}
    for entry in flags:
        if entry["dest"] in fields:
            entry["field"] = entry["dest"]
        else:
            # from_cli_args maps the long names of the parallel sizes: tensor_parallel_size -> tp_size
            options = [option.lstrip("-").replace("-", "_") for option in [entry["flag"], *entry["aliases"]]]
            entry["field"] = next((option for option in options if option in fields), None)
    environ = importlib.import_module("sglang.srt.environ")

    environment = {
        name: {"type": type(item).__name__.removeprefix("Env").lower(), "default": plain(item.default)}
        for name, item in vars(type(environ.envs)).items()
        if isinstance(item, environ.EnvField)
    }
    return {
        "schema": 1,
        "engine": "sglang",
        "engine_version": importlib.metadata.version("sglang"),
        "source": "sglang.srt.server_args.ServerArgs.add_cli_args, dumped by tools/dump_flag_schema.py",
        "flags": sorted(flags, key=lambda entry: entry["flag"]),
        "environment": environment,
        "never_read": never_read(pathlib.Path(str(sglang.__file__)).parent, fields),
    }


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", default=None, help="file to write, - for standard output")
    parser.add_argument("--check", action="store_true", help="compare with the file that is there, write nothing")
    options = parser.parse_args(arguments)
    schema = dump()
    text = json.dumps(schema, indent=1, sort_keys=True) + "\n"
    target = pathlib.Path(options.output or DATA / f"flags-{schema['engine_version']}.json")
    if options.check:
        same = target.is_file() and target.read_text(encoding="utf-8") == text
        print(f"{target}: {'same' if same else 'differs from the installed engine'}")
        return 0 if same else 1
    if options.output == "-":
        sys.stdout.write(text)
        return 0
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text, encoding="utf-8")
    print(f"{target}: {len(schema['flags'])} flags, never read: {', '.join(schema['never_read']) or 'none'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
