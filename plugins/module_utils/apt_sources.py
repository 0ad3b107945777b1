# Copyright (c) The gpuserve.sglang authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""APT's entries and keys as data: find one repository under all its spellings, and take entries and keys out of files.

Pure: text and bytes in, text and bytes out. Formats: sources.list(5), both styles, and OpenPGP (RFC 4880, RFC 9580).
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

ONE_LINE = re.compile(r"^\s*(?P<type>deb|deb-src)\s+(?:\[(?P<options>[^\]]*)\]\s*)?(?P<uri>\S+)\s+(?P<rest>.*?)\s*$")


@dataclass(frozen=True)
class Entry:
    """One repository in one place. C(line) counts from 1; in the style of stanzas it is the first line of one."""

    path: str
    line: int
    uri: str
    signed_by: str | None


def normal_uri(uri: str) -> str:
    """A repository's address without what makes no difference: slashes at the end, doubled ones, file:// and file:."""
    scheme, colon, rest = uri.partition(":")
    if not colon:
        return uri.rstrip("/")
    rest = re.sub(r"/{2,}", "/", rest).strip("/")
    return f"{scheme.lower()}:/{rest}"


def _stanzas(text: str) -> list[tuple[int, list[str]]]:
    """(first line, lines) of each stanza, the empty lines after it included."""
    found: list[tuple[int, list[str]]] = []
    current: list[str] = []
    start = 1
    ended = False
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        if line.strip() and ended:
            found.append((start, current))
            current, start, ended = [], number, False
        ended = ended or (not line.strip() and any(part.strip() for part in current))
        current.append(line)
    if current:
        found.append((start, current))
    return found


def _fields(lines: Sequence[str]) -> dict[str, str]:
    """Fields of a stanza by lower-case name; continuation lines joined, comments left out."""
    found: dict[str, str] = {}
    name = ""
    for line in lines:
        if line.startswith("#"):
            continue
        if line[:1] in (" ", "\t") and name:
            found[name] += "\n" + line.strip()
            continue
        key, colon, value = line.partition(":")
        if colon:
            name = key.strip().lower()
            found[name] = value.strip()
    return found


def entries(path: str, text: str) -> list[Entry]:
    """The repositories that a file switches on."""
    found = []
    if path.endswith(".sources"):
        for start, lines in _stanzas(text):
            fields = _fields(lines)
            if fields.get("enabled", "yes").lower() in ("no", "false", "0", "off", "without", "disable"):
                continue
            for uri in fields.get("uris", "").split():
                found.append(Entry(path, start, uri, fields.get("signed-by")))
        return found
    for number, line in enumerate(text.splitlines(), 1):
        match = ONE_LINE.match(line.partition("#")[0])
        if match:
            signed = re.search(r"signed-by=(\S+)", match["options"] or "")
            found.append(Entry(path, number, match["uri"], signed.group(1) if signed else None))
    return found


def without(path: str, text: str, unwanted: Callable[[Entry], bool]) -> tuple[str, list[Entry]]:
    """The text of a file without the entries that are unwanted, and those entries. A stanza with several addresses
    keeps the others."""
    gone = [entry for entry in entries(path, text) if unwanted(entry)]
    if not gone:
        return text, []
    if not path.endswith(".sources"):
        numbers = {entry.line for entry in gone}
        kept = [line for number, line in enumerate(text.splitlines(keepends=True), 1) if number not in numbers]
        return "".join(kept), gone
    result: list[str] = []
    for start, lines in _stanzas(text):
        here = {entry.uri for entry in gone if entry.line == start}
        left = [uri for uri in _fields(lines).get("uris", "").split() if uri not in here]
        if here and not left:
            continue
        if here:
            lines = _with_uris(lines, left)
        result += lines
    return "".join(result), gone


def _with_uris(lines: Sequence[str], uris: Sequence[str]) -> list[str]:
    kept: list[str] = []
    inside = False
    for line in lines:
        if inside and line[:1] in (" ", "\t"):
            continue
        inside = line.lower().startswith("uris:")
        kept.append(f"URIs: {' '.join(uris)}\n" if inside else line)
    return kept


def is_empty(path: str, text: str) -> bool:
    """Whether nothing but comments and white space is left."""
    return not any(line.strip() and not line.lstrip().startswith("#") for line in text.splitlines())


# ------------------------------------------------------------------------------------------------------------- keys
def dearmored(data: bytes) -> bytes:
    """The binary form of a key file, armoured or not."""
    if b"-----BEGIN PGP PUBLIC KEY BLOCK-----" not in data:
        return data
    result = b""
    for block in re.findall(
        rb"-----BEGIN PGP PUBLIC KEY BLOCK-----(.*?)-----END PGP PUBLIC KEY BLOCK-----", data, re.DOTALL
    ):
        body = block.replace(b"\r\n", b"\n").split(b"\n\n", 1)[-1]
        lines = [line.strip() for line in body.split(b"\n") if line.strip() and not line.startswith(b"=")]
        result += base64.b64decode(b"".join(lines))
    return result


def _packets(data: bytes) -> Iterable[tuple[int, int, bytes]]:
    """(tag, offset, body) of each packet. ValueError for what is no sequence of OpenPGP packets."""
    position = 0
    while position < len(data):
        start = position
        head = data[position]
        if not head & 0x80:
            raise ValueError(f"no OpenPGP packet at byte {position}")
        position += 1
        try:
            if head & 0x40:
                tag = head & 0x3F
                first = data[position]
                if first < 192:
                    length, position = first, position + 1
                elif first < 224:
                    length, position = ((first - 192) << 8) + data[position + 1] + 192, position + 2
                elif first == 255:
                    length, position = int.from_bytes(data[position + 1 : position + 5], "big"), position + 5
                else:
                    raise ValueError("a packet of unknown length")
            else:
                tag, size = (head >> 2) & 0x0F, head & 3
                if size == 3:
                    raise ValueError("a packet of unknown length")
                width = 1 << size
                length, position = int.from_bytes(data[position : position + width], "big"), position + width
        except IndexError:
            raise ValueError("a packet is cut off") from None
        if position + length > len(data):
            raise ValueError("a packet is cut off")
        yield tag, start, data[position : position + length]
        position += length


def fingerprint(body: bytes) -> str:
    """Fingerprint of a public key packet's body, in upper-case hexadecimal digits."""
    if body[:1] == b"\x04":
        return hashlib.sha1(b"\x99" + len(body).to_bytes(2, "big") + body, usedforsecurity=False).hexdigest().upper()
    return hashlib.sha256(b"\x9b" + len(body).to_bytes(4, "big") + body).hexdigest().upper()


def keys(data: bytes) -> list[tuple[str, bytes]]:
    """(fingerprint, packets) of each public key of a file. ValueError when it is no OpenPGP data (such as a keybox)."""
    binary = dearmored(data)
    starts: list[tuple[str, int]] = []
    for tag, offset, body in _packets(binary):
        if tag == 6:
            starts.append((fingerprint(body), offset))
    ends = [offset for _print, offset in starts[1:]] + [len(binary)] * bool(starts)
    return [(name, binary[begin:end]) for (name, begin), end in zip(starts, ends, strict=True)]


def without_keys(data: bytes, unwanted: Iterable[str]) -> tuple[bytes, list[str]]:
    """A key file without some keys, and the fingerprints that were taken out. Unchanged when none is there."""
    given = {name.upper().replace(" ", "") for name in unwanted}
    found = keys(data)
    gone = [name for name, _packets_of in found if name in given]
    if not gone:
        return data, []
    return b"".join(part for name, part in found if name not in given), gone
