# Copyright: The gpuserve.sglang authors
# Apache License 2.0 (see https://www.apache.org/licenses/LICENSE-2.0)
"""A delimited block of `os.environ.setdefault` lines in the sitecustomize.py that an interpreter really imports.

The interpreter itself is asked: which file it would import (virtual environments, Debian's link into /etc and
PYTHONPATH included), whether a text compiles in its own grammar, and what its environment looks like with a given text
in place of the file, before anything is written. Text is handled as bytes, so that what is outside the block stays as it is.
Standard library only. Only `write_file` and `remove_file` change anything.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
import shutil
import stat
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BEGIN = b"# BEGIN gpuserve.sglang environment"
END = b"# END gpuserve.sglang environment"
#: Notes in the BEGIN line that `absent` needs to restore the file byte for byte.
NOTE_CREATED = b"[file created]"
NOTE_NEWLINE = b"[newline added]"
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
#: Seconds an interpreter may take to start; far above any real start, so that a hanging hook ends the run.
TIMEOUT = 60
_SENTINEL = "gpuserve.sglang:"

# The programs that the interpreter runs; each prints one line that starts with _SENTINEL, whatever else a hook prints.
# -S keeps site, and with it a possibly broken sitecustomize, from running; then site does all of its work but that.
_PROBE = """
import json, site, sys
site.execsitecustomize = site.execusercustomize = lambda: None
site.main()
"""

_FIND = (
    _PROBE
    + """
import importlib.machinery, importlib.util, os, sysconfig
spec = importlib.machinery.PathFinder.find_spec("sitecustomize")
origin = (spec.origin if spec is not None else "") or ""
venv = sys.prefix != sys.base_prefix
folder = sysconfig.get_path("purelib") if venv else os.path.dirname(os.__file__)
path = origin or os.path.join(folder, "sitecustomize.py")
cached = importlib.util.cache_from_source(path) if path.endswith(".py") else ""
version = "%d.%d.%d" % sys.version_info[:3]
print("\\ngpuserve.sglang:" + json.dumps({"path": path, "cached": cached, "venv": venv, "version": version}))
"""
)

_COMPILE = """
import json, sys
error = ""
try:
    compile(sys.stdin.buffer.read(), sys.argv[1], "exec")
except Exception as exception:
    line = getattr(exception, "lineno", None)
    error = "%s: %s" % (type(exception).__name__, getattr(exception, "msg", None) or exception)
    error += " (line %d)" % line if line else ""
print("\\ngpuserve.sglang:" + json.dumps({"error": error}))
"""

_TRY = (
    _PROBE
    + """
import os, traceback
source, path = sys.stdin.buffer.read(), sys.argv[1]
error = ""
try:
    exec(compile(source, path, "exec"), {"__name__": "sitecustomize", "__file__": path, "__spec__": None})
except BaseException as exception:
    lines = [frame.lineno for frame in traceback.extract_tb(exception.__traceback__) if frame.filename == path]
    error = "%s: %s" % (type(exception).__name__, exception)
    error += " (line %d)" % lines[0] if lines else ""
print("\\ngpuserve.sglang:" + json.dumps({"environment": dict(os.environ), "error": error}))
"""
)

_ASK = """
import json, os, sys
file = getattr(sys.modules.get("sitecustomize"), "__file__", None) or ""
print("\\ngpuserve.sglang:" + json.dumps({"environment": dict(os.environ), "file": file}))
"""


class SitecustomizeError(Exception):
    """What was found, what was expected and what to do, in one text. Nothing has been written when it is raised."""


@dataclass(frozen=True)
class Target:
    """The file an interpreter imports as sitecustomize, or would if it were there."""

    interpreter: str
    path: str
    cached: str
    venv: bool
    version: str

    @property
    def real_path(self) -> str:
        """The file itself, links followed: on Debian the one below /etc."""
        return os.path.realpath(self.path)


@dataclass(frozen=True)
class Conflict:
    """A variable whose effective value is not the wanted one, and the hand-written line (0: unknown) that sets it."""

    name: str
    wanted: str
    effective: str
    line: int


# --- the text ---------------------------------------------------------------------------------------------------------


def normalize(variables: dict[str, Any]) -> dict[str, str]:
    """Wanted variables as text, sorted by name. Raises SitecustomizeError for a name or value no environment can hold."""
    result: dict[str, str] = {}
    for name in sorted(variables):
        value = variables[name]
        if not isinstance(name, str) or not NAME.match(name):
            raise SitecustomizeError(
                f"variables has the name {name!r}, expected letters, digits and _. Rename or remove it."
            )
        if isinstance(value, bool) or not isinstance(value, (str, int, float)):
            raise SitecustomizeError(
                f"variables.{name} is {value!r} ({type(value).__name__}), expected text or a number. "
                f"Put it in quotes as the program reads it, for example '1'."
            )
        text = str(value)
        if "\0" in text or "\n" in text:
            raise SitecustomizeError(f"variables.{name} is {text!r}, expected one line. Remove the line break or NUL.")
        result[name] = text
    return result


def render_block(variables: dict[str, str], created: bool = False, newline_added: bool = False) -> bytes:
    """The block, markers and final newline included; empty when there is nothing to set."""
    if not variables:
        return b""
    begin = BEGIN + b": managed by Ansible, changes between the markers are lost"
    begin += b" " + NOTE_CREATED if created else b""
    begin += b" " + NOTE_NEWLINE if newline_added else b""
    lines = [begin, b"import os", b""]
    lines += [f"os.environ.setdefault({n!a}, {v!a})".encode("ascii") for n, v in variables.items()]
    return b"\n".join([*lines, END]) + b"\n"


@dataclass(frozen=True)
class Parts:
    """A file cut at its block: what is before and after it, and the notes of the block."""

    before: bytes
    block: bytes
    after: bytes
    created: bool
    newline_added: bool


def split(content: bytes, path: str) -> Parts:
    """Cut `content` at its block. Raises SitecustomizeError when the markers do not pair."""
    lines = content.splitlines(keepends=True)
    begins = [number for number, line in enumerate(lines) if line.startswith(BEGIN)]
    ends = [number for number, line in enumerate(lines) if line.startswith(END)]
    if not begins and not ends:
        return Parts(content, b"", b"", False, False)
    if len(begins) != 1 or len(ends) != 1 or ends[0] < begins[0]:
        raise SitecustomizeError(
            f"{path} has {len(begins)} line(s) '{BEGIN.decode()}' and {len(ends)} line(s) '{END.decode()}', expected one "
            f"pair in this order. Remove the stray marker lines and what belongs to them by hand, then run again."
        )
    first, last = begins[0], ends[0] + 1
    head = lines[first]
    return Parts(
        b"".join(lines[:first]),
        b"".join(lines[first:last]),
        b"".join(lines[last:]),
        NOTE_CREATED in head,
        NOTE_NEWLINE in head,
    )


def merge(content: bytes | None, variables: dict[str, str], path: str) -> bytes | None:
    """The file's new content with the block for `variables`; None when the file should not exist.

    `content` is None when there is no file. Without variables the block is taken out and the file restored.
    """
    parts = split(content or b"", path)
    if variables:
        if parts.block:
            return parts.before + render_block(variables, parts.created, parts.newline_added) + parts.after
        newline = bool(content) and not parts.before.endswith((b"\n", b"\r"))
        return parts.before + (b"\n" if newline else b"") + render_block(variables, content is None, newline)
    if not parts.block:
        return content
    before = parts.before
    if parts.newline_added and not parts.after and before.endswith(b"\n"):
        before = before[:-1]
    rest = before + parts.after
    return None if parts.created and not rest.strip() else rest


def outside_assignments(content: bytes, path: str) -> dict[str, tuple[str, int]]:
    """Variables that lines outside the block set to a literal: name to (value, line), the last one of a name.

    Best effort, to name the line in a message; the effective value comes from the interpreter.
    """
    parts = split(content, path)
    # Blank lines in place of the block keep the line numbers.
    text = parts.before + b"\n" * parts.block.count(b"\n") + parts.after
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return {}

    def is_environ(node: ast.expr) -> bool:
        return (isinstance(node, ast.Attribute) and node.attr == "environ") or (
            isinstance(node, ast.Name) and node.id == "environ"
        )

    found: dict[str, tuple[str, int]] = {}
    for node in ast.walk(tree):
        pair: tuple[ast.expr, ast.expr] | None = None
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
            if is_environ(node.targets[0].value):
                pair = (node.targets[0].slice, node.value)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and len(node.args) == 2:
            call = node.func
            pair = (node.args[0], node.args[1]) if call.attr == "setdefault" and is_environ(call.value) else None
        if pair and isinstance(pair[0], ast.Constant) and isinstance(pair[0].value, str):
            value = pair[1].value if isinstance(pair[1], ast.Constant) else "an expression"
            line = getattr(node, "lineno", 0)
            if pair[0].value not in found or found[pair[0].value][1] < line:
                found[pair[0].value] = (str(value), line)
    return found


# --- the interpreter --------------------------------------------------------------------------------------------------


def resolve_interpreter(interpreter: str) -> str | None:
    """Absolute path of the interpreter (a bare name is looked up in PATH), None when there is none.

    Links are kept: a virtual environment is recognised by the path of its python.
    """
    if "/" not in interpreter:
        return shutil.which(interpreter)
    if not interpreter.startswith("/"):
        raise SitecustomizeError(
            f"interpreter is '{interpreter}', expected an absolute path or a bare name. "
            f"Set it to the python the engine runs with, for example /root/ml-env/bin/python."
        )
    return interpreter if os.access(interpreter, os.X_OK) and not os.path.isdir(interpreter) else None


def clean_environment(drop: list[str], extra: dict[str, str]) -> dict[str, str]:
    """This process's environment without what would bend the answer, plus `extra`.

    PYTHON* would change what is imported, and a wanted variable that is already set would hide what the file does.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "NCCL_")) and name not in drop and name != "__PYVENV_LAUNCHER__"
    }
    # Looking must not leave .pyc files behind.
    return {**kept, "PYTHONDONTWRITEBYTECODE": "1", **extra}


def _run(
    interpreter: str, code: str, flags: list[str], env: dict[str, str], arguments: list[str], source: bytes = b""
) -> dict[str, Any]:
    what = f"{interpreter} {' '.join([*flags, '-c', '...'])}"
    try:
        done = subprocess.run(
            [interpreter, *flags, "-c", code, *arguments],
            input=source,
            capture_output=True,
            env=env,
            cwd="/",
            timeout=TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise SitecustomizeError(
            f"{what} did not answer within {TIMEOUT} s, expected an interpreter that starts. "
            f"Look for a hanging sitecustomize.py or .pth file of {interpreter}."
        ) from error
    except OSError as error:
        raise SitecustomizeError(
            f"{interpreter} cannot be run ({error.strerror}), expected a working Python interpreter. Reinstall it."
        ) from error
    for line in reversed(done.stdout.decode("utf-8", "surrogateescape").splitlines()):
        if line.startswith(_SENTINEL):
            answer: dict[str, Any] = json.loads(line[len(_SENTINEL) :])
            return answer
    tail = done.stderr.decode("utf-8", "replace").strip().splitlines()[-3:]
    raise SitecustomizeError(
        f"{what} ended with status {done.returncode} and said '{' / '.join(tail)}', expected an answer. "
        f"Start {interpreter} by hand and repair what keeps it from starting."
    )


def find_target(interpreter: str, env: dict[str, str]) -> Target:
    """The file that `interpreter` imports as sitecustomize, or, when there is none, the one to create.

    The one to create lies in a virtual environment's site-packages, else in the standard library's folder, which every
    virtual environment made from this interpreter sees as well.
    """
    answer = _run(interpreter, _FIND, ["-S"], env, [])
    path = answer["path"]
    if not path.endswith(".py"):
        raise SitecustomizeError(
            f"{interpreter} imports sitecustomize from {path}, expected a .py file that a block can be added to. "
            f"Replace it with its source."
        )
    if os.path.lexists(path) and not os.path.isfile(path):
        raise SitecustomizeError(
            f"{path} is a dangling link or no regular file, expected a regular file or nothing. "
            f"Restore or remove it (Debian's package libpython3-minimal of that version owns it)."
        )
    return Target(interpreter, path, answer["cached"], answer["venv"], answer["version"])


def compile_error(target: Target, content: bytes, env: dict[str, str]) -> str:
    """Why `content` does not compile in the grammar of the target's interpreter; empty when it does."""
    return str(_run(target.interpreter, _COMPILE, ["-I", "-S"], env, [target.path], content)["error"])


def try_content(target: Target, content: bytes, env: dict[str, str]) -> tuple[dict[str, str], str]:
    """The interpreter's environment with `content` in place of the file, and the exception it ends with, if any."""
    answer = _run(target.interpreter, _TRY, ["-S"], env, [target.path], content)
    return answer["environment"], answer["error"]


def ask(target: Target, env: dict[str, str]) -> tuple[dict[str, str], str]:
    """The environment of the plainly started interpreter, and the sitecustomize file it has imported."""
    answer = _run(target.interpreter, _ASK, [], env, [])
    return answer["environment"], answer["file"]


# --- the file ---------------------------------------------------------------------------------------------------------


def write_file(target: Target, content: bytes) -> None:
    """Replace the target's content in one step, owner, group and mode kept; links are followed, never replaced."""
    path = Path(target.real_path)
    try:
        old = path.stat()
    except FileNotFoundError:
        old = None
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            if old:
                if (old.st_uid, old.st_gid) != (os.geteuid(), os.getegid()):
                    os.fchown(file.fileno(), old.st_uid, old.st_gid)
                os.fchmod(file.fileno(), stat.S_IMODE(old.st_mode))
            else:
                os.fchmod(file.fileno(), 0o644)
            file.flush()
            os.fsync(file.fileno())
        if old:
            # SELinux labels and access lists.
            for attribute in os.listxattr(path):
                with contextlib.suppress(OSError):
                    os.setxattr(name, attribute, os.getxattr(path, attribute))
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        raise
    _drop_cache(target)


def remove_file(target: Target) -> None:
    """Remove the file and its compiled copy."""
    os.unlink(target.real_path)
    _drop_cache(target)


def _drop_cache(target: Target) -> None:
    # A .pyc is trusted by size and whole seconds, which an edit such as 16 -> 32 may not change.
    if target.cached:
        with contextlib.suppress(OSError):
            os.unlink(target.cached)


# --- all of it --------------------------------------------------------------------------------------------------------


def _text(content: bytes | None) -> str:
    return (content or b"").decode("utf-8", "replace")


def _find_conflicts(
    target: Target, content: bytes, variables: dict[str, str], environment: dict[str, str]
) -> list[Conflict]:
    assignments = outside_assignments(content, target.path)
    return [
        Conflict(name, wanted, environment.get(name, ""), assignments.get(name, ("", 0))[1])
        for name, wanted in variables.items()
        if environment.get(name) != wanted
    ]


def _conflict_text(target: Target, conflict: Conflict) -> str:
    where = (
        f"line {conflict.line} of {target.path}" if conflict.line else f"something outside the block in {target.path}"
    )
    return (
        f"{conflict.name} is '{conflict.effective}' for {target.interpreter}, set by hand in {where}; expected "
        f"'{conflict.wanted}'. Remove it there, or set the same value in the variables of the role."
    )


def _check_before(target: Target, old: bytes | None, new: bytes | None, env: dict[str, str]) -> None:
    """Refuse before anything is written."""
    if old:
        error = compile_error(target, old, env)
        if error:
            raise SitecustomizeError(
                f"{target.path} does not compile for {target.interpreter}: {error}; expected valid Python, because a broken "
                f"file is ignored as a whole, this block included. It was left as it is: repair it or move it away."
            )
    if new:
        error = compile_error(target, new, env)
        if error:
            raise SitecustomizeError(
                f"{target.path} with the block does not compile for {target.interpreter}: {error}; expected valid Python. "
                f"Nothing was written: look at the end of the file, where the block goes."
            )


def apply(
    interpreter: str,
    variables: dict[str, Any],
    state: str = "present",
    extra_environment: dict[str, str] | None = None,
    check: bool = False,
) -> dict[str, Any]:
    """Bring the block into the wanted state and say what the interpreter's environment is afterwards.

    With `check` nothing is written; the environment is then the one the interpreter would have. Returns the module's
    result: changed, path, real_path, block, environment, created, removed, conflicts, warnings, diff. Raises
    SitecustomizeError before anything is written, or after the old content was put back.
    """
    wanted = normalize(variables)
    block_variables = wanted if state == "present" else {}
    result: dict[str, Any] = {
        "changed": False,
        "interpreter": interpreter,
        "version": "",
        "path": "",
        "real_path": "",
        "block": _text(render_block(block_variables)),
        "environment": {},
        "created": False,
        "removed": False,
        "conflicts": [],
        "warnings": [],
        "diff": {"before": "", "after": "", "before_header": "", "after_header": ""},
    }
    resolved = resolve_interpreter(interpreter)
    if resolved is None:
        if state == "absent":
            result["warnings"].append(f"interpreter '{interpreter}' does not exist: there is no block to remove.")
            return result
        if check:
            result["changed"] = bool(block_variables)
            result["environment"] = block_variables
            result["warnings"].append(
                f"interpreter '{interpreter}' does not exist yet, so the file it will import is unknown in check mode."
            )
            return result
        raise SitecustomizeError(
            f"interpreter is '{interpreter}', which does not exist or is not executable, expected the python the engine "
            f"runs with. Install it first, or set nccl_interpreter to the one that is there."
        )
    env = clean_environment(list(wanted), extra_environment or {})
    target = find_target(resolved, env)
    old = Path(target.path).read_bytes() if os.path.isfile(target.path) else None
    new = merge(old, block_variables, target.path)
    changed = new != old
    if block_variables:
        _check_before(target, old, new, env)
    shown = set(wanted) | set(re.findall(r"os\.environ\.setdefault\('([^']+)'", _text(old)))
    environment, error = try_content(target, new or b"", env)
    if error and block_variables:
        raise SitecustomizeError(
            f"{target.path} ends with {error} in {target.interpreter}, expected it to run to its end, because the block "
            f"would not be reached. Nothing was written: repair the line, then run again."
        )
    conflicts = _find_conflicts(target, new or b"", block_variables, environment)
    if changed and not check:
        _write_verified(target, old, new, env, block_variables, conflicts)
    if not check:
        environment, _file = ask(target, env)
    result.update(
        changed=changed,
        interpreter=resolved,
        version=target.version,
        path=target.path,
        real_path=target.real_path,
        block=_text(split(new or b"", target.path).block),
        environment={n: v for n, v in sorted(environment.items()) if n in shown or n.startswith("NCCL_")},
        created=changed and old is None,
        removed=changed and new is None,
        conflicts=[vars(conflict) for conflict in conflicts],
        diff={
            "before": _text(old),
            "after": _text(new),
            "before_header": target.real_path if old is not None else f"{target.real_path} (absent)",
            "after_header": target.real_path if new is not None else f"{target.real_path} (absent)",
        },
    )
    result["warnings"] += [_conflict_text(target, conflict) for conflict in conflicts]
    if error and not block_variables:
        result["warnings"].append(f"{target.path} ends with {error} in {target.interpreter}; it is not ours.")
    return result


def _write_verified(
    target: Target,
    old: bytes | None,
    new: bytes | None,
    env: dict[str, str],
    variables: dict[str, str],
    conflicts: list[Conflict],
) -> None:
    """Write, ask the interpreter, and put the old content back when it does not say what was predicted."""
    try:
        if new is None:
            remove_file(target)
        else:
            write_file(target, new)
    except OSError as error:
        raise SitecustomizeError(
            f"{target.real_path} cannot be written ({error.strerror}), expected a writable file system and the right to "
            f"write there. Run with become, or choose another interpreter."
        ) from error
    known = {conflict.name for conflict in conflicts}
    try:
        environment, file = ask(target, env)
        wrong = [n for n, v in variables.items() if n not in known and environment.get(n) != v]
        problem = f"has not set {', '.join(wrong)}" if wrong else ""
        if variables and os.path.realpath(file or "/") != target.real_path:
            problem = f"imports {file or 'no sitecustomize at all'}"
    except SitecustomizeError as error:
        problem = f"does not answer ({error})"
    if problem:
        if old is None:
            remove_file(target)
        else:
            write_file(target, old)
        raise SitecustomizeError(
            f"after writing {target.path} {target.interpreter} {problem}, expected it to import that file and to have the "
            f"block's variables. The old content was put back: look at the file and at PYTHONPATH and .pth files."
        )
