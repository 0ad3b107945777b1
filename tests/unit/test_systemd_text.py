"""Text for unit files: what systemd reads from it is what was put in.

Two readers check that: one written here from systemd.syntax(7) and systemd.service(5), and, where its library lies on
this machine, systemd's own.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from ansible.errors import AnsibleFilterError
from ansible_collections.gpuserve.sglang.plugins.filter import systemd_text as text_filter
from ansible_collections.gpuserve.sglang.plugins.module_utils.systemd_text import (
    UnitTextError,
    environment_lines,
    exec_line,
)
from hypothesis import example, given
from hypothesis import strategies as st

FILTERS = text_filter.FilterModule().filters()

# -- the reader of this file -------------------------------------------------------------------------------------------


def joined(text: str) -> str:
    """Lines that end in a backslash go on in the next one, comments between them are dropped."""
    whole: list[str] = []
    continued = False
    for line in text.split("\n"):
        if continued and line.lstrip().startswith(("#", ";")):
            continue
        piece = line[:-1] + " " if line.endswith("\\") else line
        if continued:
            whole[-1] += piece
        else:
            whole.append(piece)
        continued = line.endswith("\\")
    assert not continued, f"the text ends in the middle of a line: {text!r}"
    assert len(whole) == 1, f"more than one line: {text!r}"
    return whole[0]


def words_of(text: str) -> list[str]:
    """Words as systemd.syntax(7) tells: quotes of both kinds, C escapes, white space between."""
    words: list[str] = []
    word: str | None = None
    quote = ""
    characters = iter(text)
    for c in characters:
        if c == "\\":
            following = next(characters)
            assert following in "\\\"'", f"an escape that this text does not need: \\{following}"
            word = (word or "") + following
        elif quote:
            if c == quote:
                quote = ""
            else:
                word = (word or "") + c
        elif c in "\"'":
            quote, word = c, word or ""
        elif c in " \t":
            if word is not None:
                words.append(word)
            word = None
        else:
            word = (word or "") + c
    assert not quote, f"an open quote in {text!r}"
    return words if word is None else [*words, word]


def doubled(word: str, sign: str) -> str:
    """Specifiers and variables: a doubled sign stands for itself, a single one would be replaced."""
    pieces = word.split(sign * 2)
    assert not any(sign in piece for piece in pieces), f"a single {sign} in {word!r}"
    return sign.join(pieces)


def read_exec(text: str) -> list[str]:
    line = joined(text)
    # A semicolon on its own would start a second command; quoted it is a word.
    assert not any(raw == ";" for raw in line.split())
    first, *rest = [doubled(word, "%") for word in words_of(line)]
    assert first[0] == "/"
    return [first, *(doubled(word, "$") for word in rest)]


def read_environment(text: str) -> list[tuple[str, str]]:
    found = []
    for line in text.split("\n"):
        key, equals, value = line.partition("=")
        assert (key, equals) == ("Environment", "=")
        (assignment,) = [doubled(word, "%") for word in words_of(joined(value))]
        name, _equals, content = assignment.partition("=")
        found.append((name, content))
    return found


# -- systemd's own -----------------------------------------------------------------------------------------------------


_LOOKUP = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_char, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p
)


@_LOOKUP
def _refuse(*_arguments: object) -> int:
    return -1


class _Specifier(ctypes.Structure):
    _fields_ = [("specifier", ctypes.c_char), ("lookup", _LOOKUP), ("data", ctypes.c_void_p)]


class Systemd:
    """Calls what the manager itself calls for ExecStart= and Environment=, from its private library."""

    UNQUOTE = 1 << 5
    CUNESCAPE = 1 << 1

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        library.specifier_printf.argtypes = [
            ctypes.c_char_p,
            ctypes.c_size_t,
            ctypes.c_void_p,
            ctypes.c_char_p,
            ctypes.c_void_p,
            ctypes.POINTER(ctypes.c_char_p),
        ]
        library.replace_env_argv.restype = ctypes.POINTER(ctypes.c_char_p)

    def words(self, line: str) -> list[str]:
        position = ctypes.c_char_p(line.encode())
        words = []
        while True:
            word = ctypes.c_char_p()
            rc = self._library.extract_first_word(
                ctypes.byref(position), ctypes.byref(word), None, self.UNQUOTE | self.CUNESCAPE
            )
            assert rc >= 0, f"systemd cannot read {line!r}: {rc}"
            if rc == 0:
                return words
            words.append((word.value or b"").decode())

    def specifiers(self, word: str) -> str:
        """With every sign a specifier that cannot be expanded: a single % is an error."""
        found = ctypes.c_char_p()
        signs = [bytes([c]) for c in range(1, 128) if c != ord("%")]
        table = (_Specifier * (len(signs) + 1))(*[_Specifier(sign, _refuse, None) for sign in signs])
        rc = self._library.specifier_printf(word.encode(), 1 << 20, table, None, None, ctypes.byref(found))
        assert rc >= 0, f"systemd cannot expand {word!r}: {rc}"
        return (found.value or b"").decode()

    def variables(self, words: list[str]) -> list[str]:
        """With a variable HOME, which would show."""
        argv = (ctypes.c_char_p * (len(words) + 1))(*[word.encode() for word in words], None)
        environment = (ctypes.c_char_p * 2)(b"HOME=/expanded", None)
        found = self._library.replace_env_argv(argv, environment)
        result = []
        while found[len(result)] is not None:
            result.append(found[len(result)].decode())
        return result


@pytest.fixture(scope="module")
def systemd() -> Systemd:
    for path in sorted(Path("/usr/lib").glob("*/systemd/libsystemd-shared-*.so")) + sorted(
        Path("/usr/lib/systemd").glob("libsystemd-shared-*.so")
    ):
        try:
            reader = Systemd(ctypes.CDLL(str(path)))
            # Private functions: trusted only as far as they answer as the manual says.
            if (
                reader.words("""a "b c" 'd"' "\\\\x\\x41" """) == ["a", "b c", 'd"', "\\xA"]
                and reader.specifiers("50%%") == "50%"
                and reader.variables(["/a", "$$HOME", "${HOME}"]) == ["/a", "$HOME", "/expanded"]
            ):
                return reader
        except (OSError, AttributeError):
            continue
    pytest.skip("no library of systemd on this machine that has the functions")


# -- command lines -----------------------------------------------------------------------------------------------------

TEXT = st.text(
    st.one_of(
        st.sampled_from(list(" \"'\\%$;#=-{}[]&|<>!*~`@:+,")),
        st.characters(exclude_categories=["Cs", "Cc"]),
    ),
    max_size=20,
)
WORDS = st.lists(st.one_of(TEXT, TEXT.map("--{}".format)), max_size=6)
PROGRAM = TEXT.map(lambda text: "/" + "".join(c for c in text if c not in "$'\"\\"))


def _is_text(words: list[str]) -> bool:
    return not any(0xFDD0 <= ord(c) <= 0xFDEF or ord(c) & 0xFFFE == 0xFFFE for word in words for c in word)


@given(PROGRAM, WORDS)
@example("/opt/my engine/python", ["--a", "", ";", "--json", '{"a": "b c", "d": "50%"}', "$HOME", "${HOME}", "\\", "'"])
@example("/bin/100%", ["#no comment", "; nor this", "%%i", "$$", "x\\"])
def test_a_command_comes_back(program: str, words: list[str]) -> None:
    command = [program, *words]
    if _is_text(command):
        assert read_exec(exec_line(command)) == command
    else:
        with pytest.raises(UnitTextError):
            exec_line(command)


@given(PROGRAM, WORDS)
@example("/opt/my engine/python", ["--a", "", ";", "--json", '{"a": "b c", "d": "50%"}', "$HOME", "${HOME}", "\\", "'"])
@example("/bin/100%", ["#no comment", "; nor this", "%%i", "$$", "x\\"])
def test_systemd_reads_the_command(systemd: Systemd, program: str, words: list[str]) -> None:
    command = [program, *words]
    if _is_text(command):
        expanded = [systemd.specifiers(word) for word in systemd.words(joined(exec_line(command)))]
        assert systemd.variables(expanded) == command


def test_one_option_a_line() -> None:
    assert exec_line(["/opt/python", "-m", "engine", "--port", "8000", "--flag", "--label", "a b"]) == (
        '/opt/python -m engine \\\n  --port 8000 \\\n  --flag \\\n  --label "a b"'
    )


def test_words_that_need_no_quotes_have_none() -> None:
    assert exec_line(["/a-b_c/d.e", "x=y,z:1+2@3"]) == "/a-b_c/d.e x=y,z:1+2@3"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (['say "hi"'], '"say \\"hi\\""'),
        (["back\\slash"], '"back\\\\slash"'),
        (["50%"], '"50%%"'),
        (["$HOME"], '"$$HOME"'),
        ([""], '""'),
        ([";"], '";"'),
        (["it's"], '"it\'s"'),
        (["ü"], '"ü"'),
        ([8000], "8000"),
    ],
)
def test_quoting(words: list[str], line: str) -> None:
    assert exec_line(["/p", *words]) == f"/p {line}"


@pytest.mark.parametrize("character", ["\0", "\n", "\r", "\t", "\x1b", "\x7f"])
@pytest.mark.parametrize("write", [lambda v: exec_line(["/p", v]), lambda v: environment_lines({"A": v})])
def test_control_characters_are_refused(write: Callable[[str], str], character: str) -> None:
    with pytest.raises(UnitTextError, match="control character"):
        write(f"a{character}b")


@pytest.mark.parametrize("character", ["\ud800", "\udcff", "\ufdd0", "\ufffe", "\uffff", "\U0001fffe", "\U0010ffff"])
def test_what_systemd_takes_for_no_text_is_refused(character: str) -> None:
    with pytest.raises(UnitTextError, match="ignore the whole line"):
        environment_lines({"A": f"a{character}b"})


@pytest.mark.parametrize("character", ["\ufdcf", "\ufdf0", "\ufffd", "\U00010000"])
def test_their_neighbours_are_not(character: str) -> None:
    assert environment_lines({"A": character}) == f'Environment="A={character}"'


@pytest.mark.parametrize(
    "program", ["", "python3", "-/bin/true", "@/bin/true", "+/bin/true", "!/x", ":/x", "/a$b", "/a'b", '/a"b', "/a\\b"]
)
def test_a_program_that_systemd_would_read_otherwise_is_refused(program: str) -> None:
    with pytest.raises(UnitTextError, match="absolute path"):
        exec_line([program, "x"])


def test_no_command_is_refused() -> None:
    with pytest.raises(UnitTextError, match="absolute path"):
        exec_line([])


# -- environment -------------------------------------------------------------------------------------------------------

NAME = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True)


@given(st.dictionaries(NAME, TEXT, min_size=1, max_size=4))
@example({"A": "", "B": "a b", "C": "x=y", "D": "50%", "E": "$HOME", "F": 'say "hi"', "G": "end\\", "H": "'"})
def test_an_environment_comes_back_in_its_order(environment: dict[str, str]) -> None:
    if _is_text(list(environment.values())):
        assert read_environment(environment_lines(environment)) == list(environment.items())
    else:
        with pytest.raises(UnitTextError):
            environment_lines(environment)


@given(st.dictionaries(NAME, TEXT, min_size=1, max_size=4))
@example({"A": "", "B": "a b", "C": "x=y", "D": "50%", "E": "$HOME", "F": 'say "hi"', "G": "end\\", "H": "'"})
def test_systemd_reads_the_environment(systemd: Systemd, environment: dict[str, str]) -> None:
    if not _is_text(list(environment.values())):
        return
    found = []
    for line in environment_lines(environment).split("\n"):
        (assignment,) = systemd.words(line.removeprefix("Environment="))
        found.append(systemd.specifiers(assignment))
    assert found == [f"{name}={value}" for name, value in environment.items()]


def test_a_dollar_stays_single_in_an_environment() -> None:
    assert environment_lines({"A": "$B"}) == 'Environment="A=$B"'


@pytest.mark.parametrize("name", ["", "1A", "A-B", "A B", "A=B", "Ä", "A.B", "A\n"])
def test_names_that_systemd_would_ignore_are_refused(name: str) -> None:
    with pytest.raises(UnitTextError, match="no name of a variable"):
        environment_lines({"GOOD": "1", name: "x"})


def test_no_environment_is_no_text() -> None:
    assert environment_lines({}) == ""


# -- filters -----------------------------------------------------------------------------------------------------------


def test_filters_are_thin() -> None:
    assert FILTERS["systemd_exec"](["/p", "a b"]) == exec_line(["/p", "a b"])
    assert FILTERS["systemd_environment"]({"A": "a b"}) == environment_lines({"A": "a b"})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("systemd_exec", "/p --a", "systemd_exec: expected a list of words, got str"),
        ("systemd_exec", {"a": 1}, "systemd_exec: expected a list of words, got dict"),
        ("systemd_exec", None, "systemd_exec: expected a list of words, got NoneType"),
        ("systemd_environment", ["A=1"], "systemd_environment: expected a dictionary, got list"),
        ("systemd_environment", "A=1", "systemd_environment: expected a dictionary, got str"),
        (
            "systemd_exec",
            ["/p", "a\nb"],
            "systemd_exec: 'a\\nb' holds a control character, which a unit file cannot carry",
        ),
        (
            "systemd_environment",
            {"A": "\t"},
            "systemd_environment: 'A=\\t' holds a control character, which a unit file cannot carry",
        ),
    ],
)
def test_filter_errors_name_the_filter(name: str, value: object, message: str) -> None:
    with pytest.raises(AnsibleFilterError) as caught:
        FILTERS[name](value)
    assert str(caught.value) == message


@pytest.mark.parametrize("name", ["systemd_exec", "systemd_environment"])
def test_documentation(name: str) -> None:
    file = Path(text_filter.__file__).with_name(f"{name}.yml")
    document = yaml.safe_load(file.read_text())
    assert document["DOCUMENTATION"]["name"] == name
    assert name in FILTERS and document["EXAMPLES"] and document["RETURN"]["_value"]["type"] == "str"
