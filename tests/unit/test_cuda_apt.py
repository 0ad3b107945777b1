"""One entry, no stray keys, right holds: APT's files below a made-up root."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

import pytest
from ansible_collections.gpuserve.sglang.plugins.module_utils import apt_guard, apt_sources

URI = "https://developer.download.nvidia.com/compute/cuda/repos/ubuntu2404/x86_64/"
RING = "/usr/share/keyrings/cuda-archive-keyring.gpg"
LIST = "/etc/apt/sources.list.d/cuda-ubuntu2404-x86_64.list"
GOOD = f"deb [signed-by={RING}] {URI} /\n"


def packet(tag: int, body: bytes, new: bool = True) -> bytes:
    if new:
        assert len(body) < 192
        return bytes([0xC0 | tag, len(body)]) + body
    return bytes([0x80 | tag << 2 | 1]) + len(body).to_bytes(2, "big") + body


def key(seed: str, new: bool = True) -> tuple[bytes, str]:
    """A key as packets (public key, user ID) and its fingerprint."""
    body = b"\x04" + bytes(4) + b"\x01" + seed.encode() * 3
    digest = hashlib.sha1(b"\x99" + len(body).to_bytes(2, "big") + body).hexdigest().upper()
    return packet(6, body, new) + packet(13, seed.encode(), new), digest


PRESENT, PRESENT_PRINT = key("present")
RETIRED, RETIRED_PRINT = key("retired", new=False)
OTHER, OTHER_PRINT = key("somebody else")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for folder in (
        "etc/apt/sources.list.d",
        "etc/apt/trusted.gpg.d",
        "etc/apt/keyrings",
        "usr/share/keyrings",
        "var/lib/dpkg/info",
    ):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / RING[1:]).write_bytes(PRESENT)
    (tmp_path / LIST[1:]).write_text(GOOD)
    (tmp_path / "var/lib/dpkg/info/cuda-keyring.list").write_text(f"/.\n{LIST}\n{RING}\n")
    (tmp_path / "var/lib/dpkg/status").write_text(
        "Package: nvidia-open\nStatus: hold ok installed\nVersion: 590.48.01-1\n\n"
        "Package: cuda-toolkit-13-0\nStatus: install ok installed\nVersion: 13.0.1-1\n\n"
        "Package: gone\nStatus: deinstall ok config-files\nVersion: 1\n"
    )
    return tmp_path


def wanted(root: Path, **changes: object) -> apt_guard.Wanted:
    given = {
        "uri": URI,
        "keyring": RING,
        "pattern": "/compute/cuda/repos/|/var/cuda-repo-",
        "retired_keys": (RETIRED_PRINT,),
        "root": str(root),
    }
    return apt_guard.Wanted(**{**given, **changes})  # type: ignore[arg-type]


def test_nothing_to_do(root: Path) -> None:
    result = apt_guard.apply(wanted(root), check=False)
    assert result["changed"] is False and result["configured"] is True and result["diff"] == []
    assert result["packages"] == {"cuda-toolkit-13-0": "13.0.1-1", "nvidia-open": "590.48.01-1"}
    assert result["residual"] == ["gone"]


def test_duplicates_go_and_the_packages_own_entry_stays(root: Path) -> None:
    folder = root / "etc/apt/sources.list.d"
    (folder / "a-by-hand.list").write_text(f"# by hand\ndeb [signed-by={RING}] {URI} /\n")
    (folder / "nvidia.sources").write_text(f"Types: deb\nURIs: {URI.rstrip('/')}\nSuites: /\nSigned-By: /x.gpg\n")
    main = root / "etc/apt/sources.list"
    main.write_text(
        f"deb http://archive.ubuntu.com/ubuntu noble main\ndeb file:/var/cuda-repo-13-0-local /\n#deb {URI} /\n"
    )
    before = sorted(folder.iterdir())
    dry = apt_guard.apply(wanted(root), check=True)
    assert sorted(folder.iterdir()) == before and "cuda-repo" in main.read_text()
    result = apt_guard.apply(wanted(root), check=False)
    assert {**result, "configured": None} == {**dry, "configured": None}
    assert [path.name for path in sorted(folder.iterdir())] == [Path(LIST).name]
    assert main.read_text() == f"deb http://archive.ubuntu.com/ubuntu noble main\n#deb {URI} /\n"
    assert len(result["entries_removed"]) == 3 and result["sources_changed"] is True
    assert apt_guard.apply(wanted(root), check=False)["changed"] is False


def test_a_stanza_keeps_its_other_addresses(root: Path) -> None:
    path = root / "etc/apt/sources.list.d/all.sources"
    path.write_text(
        f"# mine\nTypes: deb\nURIs: {URI}\n https://example.org/debs\nSuites: /\n\n"
        f"Types: deb\nURIs: https://example.org/two\nSuites: x\nComponents: main\n\n"
        f"Enabled: no\nTypes: deb\nURIs: {URI}\nSuites: /\n"
    )
    apt_guard.apply(wanted(root), check=False)
    text = path.read_text()
    assert "URIs: https://example.org/debs\nSuites" in text and "https://example.org/two" in text
    assert text.count(URI) == 1, "what is switched off stays as it is"


def test_a_mirror_gets_its_entry_and_the_vendors_goes(root: Path) -> None:
    mirror = "https://mirror.example.org/compute/cuda/repos/ubuntu2404/x86_64/"
    result = apt_guard.apply(wanted(root, uri=mirror), check=False)
    assert result["added"] == [f"deb [signed-by={RING}] {mirror} /"] and result["configured"] is False
    assert (root / "etc/apt/sources.list.d/gpuserve-cuda.list").read_text() == f"deb [signed-by={RING}] {mirror} /\n"
    assert (root / LIST[1:]).read_text() == "", "a file of a package is emptied, not removed"
    assert apt_guard.apply(wanted(root, uri=mirror), check=False)["changed"] is False


def test_before_the_keyring_nothing_is_added(root: Path) -> None:
    (root / RING[1:]).unlink()
    (root / LIST[1:]).unlink()
    assert apt_guard.apply(wanted(root), check=False)["added"] == []


def test_keys(root: Path) -> None:
    trusted = root / "etc/apt/trusted.gpg.d"
    (trusted / "cuda.gpg").write_bytes(PRESENT)
    (trusted / "mixed.gpg").write_bytes(OTHER + RETIRED)
    (trusted / "other.gpg").write_bytes(OTHER)
    armoured = b"-----BEGIN PGP PUBLIC KEY BLOCK-----\nComment: x\n\n" + base64.b64encode(RETIRED + OTHER)
    (trusted / "mixed.asc").write_bytes(armoured + b"\n=abcd\n-----END PGP PUBLIC KEY BLOCK-----\n")
    (trusted / "odd.gpg").write_bytes(b"KBXf: a keybox")
    (root / "etc/apt/keyrings/nvidia.gpg").write_bytes(RETIRED)
    (root / "etc/apt/keyrings/present.gpg").write_bytes(PRESENT)
    result = apt_guard.apply(wanted(root), check=False)
    assert not (trusted / "cuda.gpg").exists() and not (root / "etc/apt/keyrings/nvidia.gpg").exists()
    assert (trusted / "mixed.gpg").read_bytes() == OTHER
    assert (trusted / "other.gpg").read_bytes() == OTHER
    assert (root / "etc/apt/keyrings/present.gpg").exists(), "a keyring is trusted only where an entry names it"
    assert (root / RING[1:]).read_bytes() == PRESENT
    assert len(result["keys_removed"]) == 3
    assert {note.partition(":")[0] for note in result["notes"]} == {
        "/etc/apt/trusted.gpg.d/mixed.asc",
        "/etc/apt/trusted.gpg.d/odd.gpg",
    }


def test_a_packages_key_is_left_alone(root: Path) -> None:
    path = root / "usr/share/keyrings/old.gpg"
    path.write_bytes(RETIRED)
    with (root / "var/lib/dpkg/info/old.list").open("w") as listing:
        listing.write("/usr/share/keyrings/old.gpg\n")
    apt_guard.apply(wanted(root), check=False)
    assert path.exists()


def test_holds(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[str, bool]] = []
    monkeypatch.setattr(apt_guard, "set_selections", lambda chosen: told.append(dict(chosen)))
    want = wanted(root, uri="", hold=("*-13-0",), unhold=("nvidia-*", "cuda-*"))
    assert apt_guard.apply(want, check=True)["held"] == ["cuda-toolkit-13-0"] and told == []
    result = apt_guard.apply(want, check=False)
    assert result["released"] == ["nvidia-open"]
    assert told == [{"cuda-toolkit-13-0": True, "nvidia-open": False}]


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (URI, URI.rstrip("/"), True),
        ("file:/srv/apt/x/", "file:///srv/apt//x", True),
        (URI, URI.replace("2404", "2204"), False),
        (URI, URI.replace("https", "http"), False),
    ],
)
def test_addresses(one: str, other: str, same: bool) -> None:
    assert (apt_sources.normal_uri(one) == apt_sources.normal_uri(other)) is same


@pytest.mark.parametrize("data", [b"\xc6", b"\xc6\x20short", b"plain text", b"\x9b\x00"])
def test_broken_keys(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"packet|OpenPGP"):
        apt_sources.keys(data)


def test_no_keys_at_all() -> None:
    assert apt_sources.keys(b"") == []
    assert apt_sources.without_keys(OTHER, [RETIRED_PRINT]) == (OTHER, [])
    assert apt_sources.without_keys(RETIRED, [RETIRED_PRINT.lower()]) == (b"", [RETIRED_PRINT])
    assert OTHER_PRINT != PRESENT_PRINT
