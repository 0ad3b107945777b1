# Copyright: The gpuserve.sglang authors
# Apache License 2.0 (see https://www.apache.org/licenses/LICENSE-2.0)
"""The unit as it was written, as it lies on disk, and as systemd has loaded it.

The text on disk is compared with the recorded one, and every drop-in is read. What both leave open (a property that was set at
run time, a unit that was not read again) shows in the properties that systemd has loaded: what the recorded unit says is the
expectation of each, so that a directive which the unit gains is compared without a word here. systemd shows its own rendering
(`30s` for 30, 2 for SIGINT, bytes for 2G); both sides are brought to one form.
"""

from __future__ import annotations

import difflib
import errno
import re
import shlex
import signal
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from . import flags
from .health import scrub
from .service import setting_changes, without_secrets
from .settings import SIZE_FACTORS
from .verify import Check, failed, listed, passed, unknown

#: Properties that systemctl is asked for in any case.
STATE = ("FragmentPath", "DropInPaths", "NeedDaemonReload", "UnitFileState", "ExecStart")
#: Directives of the unit that are not compared with what systemd has loaded, each with the reason. Drop-ins that set them are
#: found all the same, by their text.
NOT_COMPARED = {
    "After": "systemd adds units of its own, shows an alias by its other name, and lets no drop-in take one away",
    "Wants": "as After",
    "WantedBy": "what it does is the link that makes the unit start at boot: unit_enabled",
}
#: systemd adds paths of its own to these.
_GROWS = ("RequiresMountsFor",)
_YES, _NO = ("yes", "true", "on", "1", "y", "t"), ("no", "false", "off", "0", "n", "f")
#: Directives that decide about the environment.
ENVIRONMENT = ("Environment", "EnvironmentFile", "PassEnvironment", "UnsetEnvironment")
_SPANS = {
    "us": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "hr": 3600.0, "d": 86400.0,
    "day": 86400.0, "w": 604800.0, "week": 604800.0, "month": 2629800.0, "y": 31557600.0, "year": 31557600.0,
}  # fmt: skip
#: Where drop-ins of a unit lie, those first that win over the others.
FOLDERS = (
    "/etc/systemd/system.control", "/run/systemd/system.control", "/run/systemd/transient", "/etc/systemd/system",
    "/run/systemd/system", "/usr/local/lib/systemd/system", "/usr/lib/systemd/system",
)  # fmt: skip


@dataclass(frozen=True)
class Directive:
    """One assignment of a unit file; an empty value resets what was assigned before."""

    name: str
    value: str
    path: str

    def text(self, known: Collection[str] = ()) -> str:
        """For people. Of variables only those in ``known`` are shown with their values, and nothing that looks like a secret."""
        return f"{self.name}={without_values(self.name, self.value, known)}"


#: A word of a unit file with its quotes, which may begin anywhere in it.
_WORD = re.compile(r"""(?:"(?:[^"\\]|\\.)*(?:"|$)|'(?:[^'\\]|\\.)*(?:'|$)|\\.|[^\s"'\\])+""")
_VARIABLE = re.compile(r"[A-Za-z_]\w*")
#: What looks like a variable in a command: ``env NAME=value program``.
_IN_COMMAND = re.compile(r"(?<![\w-])([A-Z_][A-Z0-9_]*)=(\"(?:[^\"\\]|\\.)*\"|'[^']*'|[^\s\"']+)")


def variable_text(name: str, value: str, known: Collection[str]) -> str:
    """``NAME=value``; ``NAME=***`` unless the deployment itself has such a variable: who else sets one may keep a secret there."""
    text = f"{name}={value}"
    return text if name in known and flags.secret(name, value) is None and scrub(text) == text else f"{name}=***"


def without_values(directive: str, value: str, known: Collection[str]) -> str:
    """The value of a directive, or one line of it, for people: no value of a variable that is not ``known``, no secrets."""

    def word(match: re.Match[str]) -> str:
        quote = match.group()[0] if match.group()[0] in "\"'" else ""
        name, equals, rest = match.group().strip("\"'").partition("=")
        if not equals:
            # Without a name it is the rest of a value, except where names alone are listed.
            return match.group() if directive != "Environment" else "***"
        return match.group() if not variable_text(name, rest, known).endswith("=***") else f"{quote}{name}=***{quote}"

    if directive in ("Environment", "UnsetEnvironment"):
        return _WORD.sub(word, value)
    if directive.startswith("SetCredential"):
        return f"{value.partition(':')[0]}:***"
    if directive.startswith("Exec"):
        value = _IN_COMMAND.sub(lambda match: variable_text(match.group(1), match.group(2), known), value)
    return scrub(value)


def _lines_without_values(text: str, known: Collection[str]) -> list[str]:
    """The lines of a unit file, each for itself, as ``without_values`` shows them; comments too."""
    shown: list[str] = []
    directive = ""
    for line in text.splitlines():
        match = re.match(r"(\s*[#;]*\s*)([A-Za-z_]\w*)(\s*=\s*)(.*)", line)
        comment = line.lstrip()[:1] in ("#", ";")
        if comment and match and match.group(2) != match.group(2).upper():
            # A directive that was commented out.
            shown.append("".join(match.groups()[:3]) + without_values(match.group(2), match.group(4), known))
            continue
        if directive and not comment:
            shown.append(without_values(directive, line, known))
        elif match and re.fullmatch(r"[A-Z_][A-Z0-9_]*", match.group(2)):
            # No directive: a variable in a comment, or one at the wrong place.
            shown.append(f"{match.group(1)}{match.group(2)}=***")
        elif match:
            directive = match.group(2)
            shown.append("".join(match.groups()[:3]) + without_values(directive, match.group(4), known))
        else:
            shown.append(scrub(line))
        if not comment and not line.rstrip().endswith("\\"):
            directive = ""
    return shown


def directives(text: str, path: str) -> list[Directive]:
    """The assignments of a unit file in their order, continued lines joined."""
    found: list[Directive] = []
    open_line = ""
    for line in text.splitlines():
        stripped = line.strip()
        if not open_line and (not stripped or stripped[0] in "#;["):
            continue
        if open_line and stripped[:1] in ("#", ";"):
            continue
        open_line += stripped
        if open_line.endswith("\\"):
            open_line = open_line[:-1] + " "
            continue
        name, equals, value = open_line.partition("=")
        if equals:
            found.append(Directive(name.strip(), value.strip(), path))
        open_line = ""
    return found


def seconds(text: str) -> float | None:
    """A span of time as a unit file or systemctl writes it; None when it is none."""
    text = text.strip()
    if text == "infinity":
        return float("inf")
    if re.fullmatch(r"\d+(\.\d+)?", text):
        return float(text)
    pieces = re.findall(r"(\d+(?:\.\d+)?)\s*([a-z]+)", text)
    if not pieces or re.sub(r"(\d+(?:\.\d+)?)\s*([a-z]+)\s*", "", text):
        return None
    names = [(number, name if name in _SPANS else name.rstrip("s")) for number, name in pieces]
    if any(name not in _SPANS for _number, name in names):
        return None
    return sum(float(number) * _SPANS[name] for number, name in names)


def property_of(directive: str) -> str:
    """The property that shows a directive."""
    return re.sub(r"Sec$", "USec", directive)


def properties(recorded: str) -> str:
    """What systemctl is asked for, so that it shows what the recorded unit says."""
    written = [property_of(entry.name) for entry in directives(recorded, "") if entry.name not in NOT_COMPARED]
    return ",".join(dict.fromkeys([*STATE, *written]))


def effective(entries: Iterable[Directive]) -> dict[str, list[str]]:
    """What a unit says in the end: the values of each directive; an empty one takes away those before it."""
    found: dict[str, list[str]] = {}
    for entry in entries:
        before = [value for value in found.get(entry.name, []) if value]
        found[entry.name] = [*before, entry.value] if entry.value else [""]
    return {name: [value for value in values if value] or values for name, values in found.items()}


def _tokens(text: str) -> list[str]:
    """Words of a list, with the quotes taken away that systemctl puts around one that holds spaces."""
    found = re.findall(r'"(?:[^"\\]|\\.)*"|\S+', text)
    return [re.sub(r"\\(.)", r"\1", word[1:-1]) if len(word) > 1 and word[0] == '"' else word for word in found]


def _word(word: str) -> str:
    """One word of a list in one form: systemd simplifies paths, and shows capabilities in small letters."""
    if re.match(r"[-+]*/", word):
        return re.sub(r"/+", "/", word).rstrip("/") or "/"
    return word.lower() if word.upper().startswith("CAP_") else word


def _number(written: str, shown: str) -> int | None:
    """What systemctl shows as a number: a size, a signal, an error, a file mode; None when the text is no such thing."""
    size = re.fullmatch(r"(\d+)([KMGT]?)", written)
    if re.fullmatch(r"0[0-7]+", shown) and re.fullmatch(r"[0-7]+", written):
        return int(written, 8)
    if size:
        return int(size.group(1)) * SIZE_FACTORS[size.group(2)]
    if written in signal.Signals.__members__:
        return int(signal.Signals[written])
    return getattr(errno, written, None) if written.startswith("E") else None


def same(directive: str, written: str, shown: str) -> bool:
    """Whether a property shows what was written; true also where that cannot be told."""
    if "[unprintable]" in shown or re.search(r"%[A-Za-z]", written.replace("%%", "")):
        return True
    if directive.startswith("Exec"):
        return " ".join(_command(written)) == _argv(shown)
    if directive == "Environment":
        return assignments(written) == dict(word.split("=", 1) for word in _tokens(shown) if "=" in word)
    written = written.replace("%%", "%")
    if written == shown:
        return True
    if written.endswith("%"):
        # A share of the host's memory: systemd shows bytes.
        return True
    if directive.endswith("Sec"):
        return seconds(written) == seconds(shown)
    if shown in ("yes", "no"):
        return written.lower() in (_YES if shown == "yes" else _NO)
    if re.fullmatch(r"-?\d+", shown):
        number = _number(written, shown)
        return number is not None and number == int(shown, 8 if re.fullmatch(r"0[0-7]+", shown) else 10)
    if any(word.lstrip("~").startswith("@") for word in written.split()):
        # A group of system calls: systemd shows its members, which differ from version to version.
        return written.startswith("~") == shown.startswith("~")
    has, wants = {_word(word) for word in _tokens(shown)}, {_word(word) for word in _tokens(written)}
    return wants <= has if directive in _GROWS else wants == has


def _argv(shown: str) -> str:
    """The words of a command that systemctl shows, without quotes."""
    match = re.search(r"argv\[\]=(.*?) ; ignore_errors=", shown)
    return match.group(1) if match else ""


def _command(written: str) -> list[str]:
    """The words of a command as systemd keeps them: without quotes, and without the flags before the program."""
    try:
        words = shlex.split(written)
    except ValueError:
        return []
    return [word.replace("%%", "%") for word in [words[0].lstrip("@-:+!"), *words[1:]]] if words else []


def loaded_dropins(shown: str, unit: str, root: Path = Path("/")) -> list[str]:
    """Paths of the drop-ins that systemd has loaded (``DropInPaths``) and of those that lie there for the unit alone."""
    paths = shown.split()
    for folder in FOLDERS:
        for path in sorted((root / folder.lstrip("/") / f"{unit}.d").glob("*.conf")):
            name = f"{folder}/{unit}.d/{path.name}"
            if name not in paths:
                paths.append(name)
    return paths


@dataclass(frozen=True)
class UnitSeen:
    """The unit: recorded text, text on disk (None: no file), drop-ins by path, and what systemctl shows.

    ``own`` are directives in the operator's own words, which may be any that systemd knows: how it shows them is not known here.
    """

    name: str
    path: str
    recorded: str
    on_disk: str | None
    dropins: Mapping[str, str]
    shown: Mapping[str, str]
    own: Sequence[str] = ()
    #: Why a part of this could not be read; empty: all of it was.
    blind: str = ""

    @property
    def elsewhere(self) -> str:
        """The file that systemd takes instead of this one."""
        taken = self.shown.get("FragmentPath", "")
        # A unit that is masked lies there as well: it is an edited one.
        return taken if taken not in (self.path, "/dev/null") else ""

    def layers(self) -> list[Directive]:
        """Everything that is assigned, in the order in which systemd reads it."""
        return [*directives(self.on_disk or "", self.path), *self.of_dropins()]

    def of_dropins(self) -> list[Directive]:
        """The assignments of the drop-ins."""
        return [entry for path, text in self.dropins.items() for entry in directives(text, path)]

    def changed_by_dropins(self) -> list[Directive]:
        """Assignments of drop-ins by which the unit says something else in the end than the recorded one."""
        written, every = directives(self.recorded, self.path), self.of_dropins()
        before, after = effective(written), effective([*written, *every])
        found: list[Directive] = []
        for name in dict.fromkeys(entry.name for entry in every):
            old, new = before.get(name, []), after[name]
            if name == "Environment":
                alike = _variables(old) == _variables(new)
            else:
                # A list may be given in pieces; of a single value the last one counts.
                alike = set(old) == set(new) and old[-1:] == new[-1:]
            if not alike:
                mine = [entry for entry in every if entry.name == name]
                # An empty assignment that only clears the way for another one is not worth a word.
                new_ones = [entry for entry in mine if entry.value not in old and entry.value]
                found += new_ones or [entry for entry in mine if not entry.value] or mine[-1:]
        return [entry for entry in every if entry in found]

    def not_loaded(self, leave: Iterable[str] = ()) -> list[tuple[str, str]]:
        """Directives of the recorded unit that systemd does not have as written: the name, and words for people.

        ``leave`` are names that somebody else explains. A property that this version of systemd does not have is not compared.
        """
        found = []
        for name, values in effective(directives(self.recorded, self.path)).items():
            shown = self.shown.get(property_of(name))
            if shown is None or name in NOT_COMPARED or name in self.own or name in leave:
                continue
            if name == "Environment":
                if not same(name, " ".join(values), shown):
                    found.append((name, _differing(values, shown)))
            # A list may be given in pieces; of a single value the last one counts.
            elif not same(name, " ".join(values), shown) and not same(name, values[-1], shown):
                found.append((name, _unlike(name, values[-1], shown)))
        return found

    def environment(self) -> dict[str, str]:
        """The environment that the layers give a process that is started now."""
        found: dict[str, str] = {}
        for entry in self.layers():
            if entry.name == "Environment":
                if not entry.value:
                    found.clear()
                found.update(assignments(entry.value))
            elif entry.name == "UnsetEnvironment":
                for word in entry.value.split():
                    found.pop(word.partition("=")[0], None)
        return found

    def has_foreign_environment(self) -> bool:
        """Whether a layer takes variables from elsewhere, so that no list of them can be made here."""
        return any(entry.name in ("EnvironmentFile", "PassEnvironment") and entry.value for entry in self.layers())

    def start_words(self) -> str:
        """The command that a start would run now, as systemctl shows it: words without quotes."""
        return _argv(self.shown.get("ExecStart", ""))


def assignments(value: str) -> dict[str, str]:
    """``Environment=`` to its variables; what cannot be read is left out. ``%%`` is a per cent sign in a unit."""
    try:
        words = shlex.split(value)
    except ValueError:
        return {}
    return dict(word.replace("%%", "%").split("=", 1) for word in words if "=" in word)


def _variables(values: Iterable[str]) -> dict[str, str]:
    """The variables of all assignments of ``Environment=``."""
    return {name: value for entry in values for name, value in assignments(entry).items()}


def _differing(values: Iterable[str], shown: str) -> str:
    """Which variables of the environment are not as written, without secrets."""
    written = _variables(values)
    has = dict(word.split("=", 1) for word in _tokens(shown) if "=" in word)
    names = [name for name in dict.fromkeys([*written, *has]) if written.get(name) != has.get(name)]
    words = [
        f"{variable_text(name, has[name], written) if name in has else f'no {name}'} is loaded, written is "
        f"{variable_text(name, written[name], written) if name in written else 'no such variable'}"
        for name in names
    ]
    return f"Environment: {listed(words)}"


def _unlike(directive: str, written: str, shown: str) -> str:
    """What systemd has instead of what was written, without secrets."""
    if directive.startswith("Exec"):
        lines = setting_changes(" ".join(_command(written)).split(), {}, _argv(shown).split(), {})
        return f"{directive}: {listed(without_values(directive, line, ()) for line in lines) or 'another order'}"
    return f"{property_of(directive)} is {scrub(shown)}, written is {directive}={scrub(written)}"


def parse_shown(text: str) -> dict[str, str]:
    """`systemctl show` output to its properties."""
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)


def _where(entries: Sequence[Directive], unit: str) -> str:
    paths = list(dict.fromkeys(entry.path for entry in entries))
    remove = f"Remove {' and '.join(paths)}, `systemctl daemon-reload`, and run site.yml"
    names = secret_names(entries)
    return f"{remove}. {_no_secrets(names)}" if names else f"{remove}; or say it in the inventory ({unit})."


def secret_names(entries: Iterable[Directive]) -> list[str]:
    """Variables and options among the directives that look like secrets: no variable of the inventory takes those."""
    found: list[str] = []
    for entry in entries:
        if entry.name == "Environment":
            found += [name for name, value in assignments(entry.value).items() if flags.secret(name, value)]
        elif entry.name.startswith("Exec"):
            options = [word.partition("=")[0] for word in _command(entry.value) if word.startswith("--")]
            found += [option for option in options if flags.secret(option, "")]
            found += [match.group(1) for match in _IN_COMMAND.finditer(entry.value) if flags.secret(*match.groups())]
    return list(dict.fromkeys(found))


def _no_secrets(names: Sequence[str]) -> str:
    looks = "looks like a secret" if len(names) == 1 else "look like secrets"
    return f"{', '.join(names)} {looks}: the inventory takes none, authentication belongs in front of the engine (a proxy)."


def changed_lines(old: str, new: str) -> list[str]:
    """Lines that came and went, without secrets and without values of variables that the old text does not have."""
    known = _variables(entry.value for entry in directives(old, "") if entry.name == "Environment")
    before, after = _lines_without_values(old, known), _lines_without_values(new, known)
    lines: list[str] = []
    for tag, i1, i2, j1, j2 in difflib.SequenceMatcher(None, old.splitlines(), new.splitlines(), False).get_opcodes():
        if tag != "equal":
            lines += [f"-{line}" for line in before[i1:i2]] + [f"+{line}" for line in after[j1:j2]]
    return lines


#: Check, its subject, the variable of the inventory that changes it, and whether a directive is its business.
_GROUPS: tuple[tuple[str, str, str, Callable[[str], bool]], ...] = (
    ("unit_command", "command that the unit starts", "deployment_overrides", lambda name: name == "ExecStart"),
    ("unit_environment", "environment that the unit gives", "deployment_extra_env", lambda name: name in ENVIRONMENT),
    (
        "unit_properties",
        "other properties of the unit",
        "deployment_unit",
        lambda name: name != "ExecStart" and name not in ENVIRONMENT,
    ),
)


def check_unit(seen: UnitSeen, known: Sequence[str] = ()) -> list[Check]:
    """unit_file, unit_command, unit_environment, unit_properties, unit_enabled, unit_loaded. ``known`` drop-ins are expected."""
    expected = {entry.name for entry in seen.of_dropins() if entry.path in known}
    seen = replace(seen, dropins={path: text for path, text in seen.dropins.items() if path not in known})
    checks = [_check_file(seen)]
    edited = not checks[0].ok
    foreign = seen.changed_by_dropins()
    variables = _variables(entry.value for entry in directives(seen.recorded, "") if entry.name == "Environment")
    stale = seen.shown.get("NeedDaemonReload") == "yes"
    look = f"Look at `systemctl cat {seen.name}` on the host."
    # An edited file, or a drop-in, is said once: by the text.
    loaded = [] if edited else seen.not_loaded(expected | {entry.name for entry in foreign})
    # What differs because systemd has not read the files again is said by unit_loaded.
    unread = stale and not edited and not foreign
    for id_, subject, variable, mine in _GROUPS:
        entries = [entry for entry in foreign if mine(entry.name)]
        words = [f"{entry.path} sets {_words(entry, variables)}" for entry in entries]
        words += [text for name, text in loaded if mine(name) and not unread]
        if words:
            action = (
                _where(entries, variable)
                if entries
                else "`systemctl daemon-reload`, or `systemctl revert` after a set-property; then run verify again."
            )
            checks.append(failed(id_, subject, listed(words), "what the unit itself says", action))
        elif seen.blind:
            checks.append(unknown(id_, subject, scrub(seen.blind), look))
        else:
            checks.append(passed(id_, subject, "what the unit itself says"))
    state = seen.shown.get("UnitFileState", "")
    if state == "enabled":
        checks.append(passed("unit_enabled", "start at boot", "enabled"))
    elif not seen.shown and seen.blind:
        checks.append(unknown("unit_enabled", "start at boot", scrub(seen.blind), look))
    else:
        checks.append(
            failed(
                "unit_enabled",
                "start at boot",
                state or "unknown to systemd",
                "enabled",
                f"`systemctl enable {seen.name}` (or site.yml): after a reboot nothing would serve.",
            )
        )
    if unread:
        older = [text for _name, text in loaded]
        checks.append(
            failed(
                "unit_loaded",
                "unit as systemd has it in memory",
                "older than the files" + (f": {listed(older)}" if older else ""),
                "the files",
                "`systemctl daemon-reload`; the running server stays.",
            )
        )
    elif not seen.shown and seen.blind:
        checks.append(unknown("unit_loaded", "unit as systemd has it in memory", scrub(seen.blind), look))
    else:
        checks.append(
            passed("unit_loaded", "unit as systemd has it in memory", "the files" if not stale else "see above")
        )
    return checks


def changes(seen: UnitSeen, known: Sequence[str] = ()) -> list[str]:
    """What was changed of a unit beside the main one, each thing once: its file, its drop-ins, what systemd has of them.
    ``known`` drop-ins are expected."""
    if seen.on_disk is None:
        return [f"{seen.path} is gone or no text"]
    found = [f"{seen.path} is not read: {seen.elsewhere} is in its place"] if seen.elsewhere else []
    if seen.on_disk != seen.recorded:
        found.append(f"{seen.path} was edited: {listed(changed_lines(seen.recorded, seen.on_disk))}")
    foreign = [entry for entry in seen.changed_by_dropins() if entry.path not in known]
    found += [f"{entry.path} sets {entry.text()}" for entry in foreign]
    if not found and seen.shown.get("NeedDaemonReload") == "yes":
        found.append(f"systemd has not read the files of {seen.name} again (`systemctl daemon-reload`)")
    return found


def _words(entry: Directive, known: Collection[str]) -> str:
    text = entry.text(known)
    if entry.name != "ExecStart":
        return text
    try:
        return "ExecStart=" + " ".join(without_secrets(shlex.split(text.partition("=")[2])))
    except ValueError:
        return text


def _check_file(seen: UnitSeen) -> Check:
    subject = f"unit file {seen.path}"
    if seen.on_disk is None:
        return failed("unit_file", subject, "no file", "the text of the deployment", "Run site.yml.")
    if seen.elsewhere:
        return failed(
            "unit_file",
            subject,
            f"it is not read: {seen.elsewhere} is in its place",
            "the text of the deployment",
            f"Remove {seen.elsewhere}, `systemctl daemon-reload`, and run site.yml.",
        )
    if seen.on_disk == seen.recorded:
        return passed("unit_file", subject, "the text of the deployment")
    lines = changed_lines(seen.recorded, seen.on_disk)
    names = secret_names(directives(seen.on_disk, ""))
    stays = (
        _no_secrets(names)
        if names
        else "What must stay belongs in the inventory (deployment_unit, deployment_overrides, deployment_extra_env)."
    )
    return failed(
        "unit_file",
        subject,
        f"edited: {listed(lines)}",
        "the text of the deployment (deployments/last-good/unit)",
        f"Run site.yml: it writes the text anew. {stays}",
    )
