"""Patches, git sources, hashes, file checksums and pruning of engine releases, without a build where none is needed."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jinja2.nativetypes
import pytest
import yaml
from ansible.errors import AnsibleFilterError
from ansible_collections.gpuserve.sglang.plugins.filter.release_patches import FilterModule
from ansible_collections.gpuserve.sglang.plugins.module_utils import release as release_module
from ansible_collections.gpuserve.sglang.plugins.module_utils.record import Records
from ansible_collections.gpuserve.sglang.plugins.module_utils.release import (
    MANIFEST,
    ReleaseBuilder,
    ReleaseError,
    canonical_spec,
    changed_files,
    check_installed,
    explain_drift,
    load_patches,
    release_id,
)

ROOT = Path(__file__).resolve().parents[2]
SERIES = yaml.safe_load((ROOT / "patches/sglang/0.5.9/series.yml").read_text())
IDS = [patch["id"] for patch in SERIES["patches"]]
PATCHES = FilterModule().filters()["release_patches"]
GIT = {"package": "sglang", "url": "https://host/sglang", "ref": "v0.5.9", "commit": "bbe9c7eeb"}


def spec(**changes: Any) -> dict[str, Any]:
    step = {"name": "engine", "requirements": ["tiny==1.0"]}
    return {"python": "/usr/bin/python3", "steps": [{**step, **changes.pop("step", {})}], **changes}


def series(*ids: str) -> list[dict[str, Any]]:
    return PATCHES([{"series": "sglang/0.5.9", "patches": list(ids) or "all"}])


# -- patches -------------------------------------------------------------------------------------------------------------


def test_patches_are_part_of_the_id() -> None:
    found = [
        release_id(spec(patches=patches))
        for patches in (
            [],
            series("logprobs-crash"),
            series("kimi-k25-eagle3"),
            series(),
            PATCHES([{"series": "flashinfer/0.6.4"}]),
        )
    ]
    assert len(set(found)) == len(found)
    assert found[0] == release_id(spec()), "releases without patches keep their id"


def test_a_changed_text_is_another_release_and_a_changed_word_about_it_is_not() -> None:
    (entry,) = series("logprobs-crash")
    (number,) = [n for n, patch in enumerate(SERIES["patches"]) if patch["id"] == "logprobs-crash"]
    file = SERIES["patches"][number]["file"]
    other = json.loads(json.dumps(entry))
    other["definition"]["patches"][number]["title"] = "Another title"
    other["series"] = "/elsewhere"
    assert release_id(spec(patches=[other])) == release_id(spec(patches=[entry]))
    other["texts"][file] = entry["texts"][file].replace("Risk:", "risk:", 1)
    assert other["texts"][file] != entry["texts"][file]
    with pytest.raises(ReleaseError, match=f"{file} has sha256 .*, series.yml expects") as caught:
        release_id(spec(patches=[other]))
    digest = hashlib.sha256(other["texts"][file].encode()).hexdigest()
    assert digest in str(caught.value)
    other["definition"]["checksums"]["logprobs-crash"]["patch"] = digest
    assert release_id(spec(patches=[other])) != release_id(spec(patches=[entry]))


def test_the_filter_names_the_ids_in_their_order() -> None:
    (entry,) = series()
    assert entry["patches"] == IDS
    (entry,) = series("sm120-symm-mem", "symm-mem-in-place")
    assert entry["patches"] == ["symm-mem-in-place", "sm120-symm-mem"]
    assert [item.ids for item in load_patches([entry])] == [["symm-mem-in-place", "sm120-symm-mem"]]
    assert PATCHES([]) == []
    assert load_patches(series("logprobs-crash") + PATCHES([{"series": "flashinfer/0.6.4", "patches": []}]))[0].ids


def test_the_filter_looks_beside_the_playbook_first(tmp_path: Path) -> None:
    folder = tmp_path / "patches/sglang/0.5.9"
    folder.parent.mkdir(parents=True)
    folder.symlink_to(ROOT / "patches/flashinfer/0.6.4")
    (entry,) = PATCHES([{"series": "sglang/0.5.9"}], str(tmp_path))
    assert entry["patches"] == ["sm120-comm-arch"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("sglang/0.5.9", "sglang_patches is a str, expected a list"),
        ([{"patches": "all"}], "sglang_patches[0] names no series"),
        ([{"series": "sglang/0.5.9", "patch": []}], "sglang_patches[0] has the unknown keys patch"),
        ([{"series": "sglang/0.5.9", "patches": "some"}], "sglang_patches[0].patches is 'some', expected a list"),
        ([{"series": "sglang/0.4.0"}], "there is no patch series 'sglang/0.4.0'"),
        (
            [{"series": "sglang/0.5.9", "patches": ["nothing"]}],
            "names the patches nothing, expected all or some of kimi",
        ),
        ([{"series": "sglang/0.5.9", "patches": ["sm120-symm-mem"]}], "sm120-symm-mem without symm-mem-in-place"),
    ],
)
def test_wrong_patches(wrong: Any, message: str) -> None:
    with pytest.raises(AnsibleFilterError) as caught:
        PATCHES(wrong)
    assert message in str(caught.value)


def test_two_series_of_one_package() -> None:
    with pytest.raises(ReleaseError, match="a second series for sglang, expected one"):
        release_id(spec(patches=series("logprobs-crash") + series("kimi-k25-eagle3")))


@pytest.mark.parametrize("wrong", [["sglang/0.5.9"], [{"series": "sglang/0.5.9"}], "x"])
def test_patches_without_their_texts(wrong: Any) -> None:
    with pytest.raises(ReleaseError, match="expected"):
        release_id(spec(patches=wrong))


# -- requirements and git ------------------------------------------------------------------------------------------------


def requirements(*lines: str) -> list[str]:
    found: list[str] = canonical_spec(spec(step={"requirements": list(lines)}))["steps"][0]["requirements"]
    return found


def test_lines_of_a_lock_file() -> None:
    text = "a==1 \\\n    --hash=sha256:00 \\\n    --hash=sha256:11\n    # via b\n# by uv\nb @ https://h/b.whl#sha256=22 \\\n  --hash=sha256:22\nc==1"
    joined = ["a==1 --hash=sha256:00 --hash=sha256:11", "b @ https://h/b.whl#sha256=22 --hash=sha256:22", "c==1"]
    assert requirements(*text.split("\n")) == requirements(text) == joined
    assert requirements("a==1 \\") == ["a==1"]


@pytest.mark.parametrize("option", ["--global-option=x", "--hash=md5:00", "--config-settings x=y"])
def test_other_options_behind_a_requirement(option: str) -> None:
    with pytest.raises(ReleaseError, match=r"behind a==1, expected at most --hash=sha256"):
        requirements(f"a==1 {option}")


def test_a_step_from_git() -> None:
    step = canonical_spec(spec(step={"requirements": [], "git": GIT}))["steps"][0]
    assert step["git"]["version"] == "0.5.9" and step["git"]["subdirectory"] == ""
    assert "git" not in canonical_spec(spec())["steps"][0]
    ids = [
        release_id(spec(step={"git": {**GIT, key: value}}))
        for key, value in {"commit": "0" * 40, "ref": "v1", "url": "/x"}.items()
    ]
    assert len({*ids, release_id(spec(step={"git": GIT})), release_id(spec())}) == 5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"commit": ""}, "commit is '', expected 7 to 40 hexadecimal digits"),
        ({"commit": "v0.5.9"}, "commit is 'v0.5.9', expected 7 to 40"),
        ({"ref": "--upload-pack=x"}, "ref is '--upload-pack=x', expected a tag"),
        ({"url": "--x"}, "url is '--x', expected the address"),
        ({"url": "https://user:s3cret@host/x"}, "url holds credentials, expected none"),
        ({"package": ""}, "package is '', expected the name"),
        ({"subdirectory": "../x"}, "subdirectory is '../x', expected a folder inside"),
        ({"branch": "x"}, "unknown keys branch"),
    ],
)
def test_wrong_git(change: dict[str, str], message: str) -> None:
    with pytest.raises(ReleaseError) as caught:
        release_id(spec(step={"git": {**GIT, **change}}))
    assert message in str(caught.value) and "s3cret" not in str(caught.value)


# -- files ---------------------------------------------------------------------------------------------------------------


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def installed(site: Path, name: str, files: dict[str, str]) -> None:
    info = site / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    lines = ""
    for path, text in files.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(text)
        lines += (
            f"{path},sha256={base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip('=')},1\n"
        )
    (info / "RECORD").write_text(lines + f"{info.name}/RECORD,,\n")


def test_changed_files(tmp_path: Path) -> None:
    site = tmp_path / "lib/python3.11/site-packages"
    installed(site, "My_Engine", {"engine/a.py": "a", "engine/b.py": "b", "engine/c.py": "c", "engine/data.txt": "d"})
    installed(site, "other", {"other.py": "o"})
    (site / "engine/a.py").write_text("patched")
    patched = {"engine/a.py": {"package": "my-engine", "sha256": sha256("patched")}}
    assert changed_files(tmp_path, patched, ["my.engine"]) == []
    (site / "engine/a.py").write_text("by hand")
    (site / "engine/b.py").unlink()
    (site / "engine/data.txt").write_text("not Python")
    (site / "other.py").write_text("not guarded")
    found = changed_files(tmp_path, patched, ["my.engine"])
    assert found == [
        {"package": "my-engine", "file": str(site / "engine/a.py"), "expected": sha256("patched"), "found": sha256("by hand")},
        {"package": "my-engine", "file": str(site / "engine/b.py"), "expected": sha256("b"), "found": None},
    ]  # fmt: skip
    assert [entry["file"] for entry in changed_files(tmp_path, patched, [])] == [str(site / "engine/a.py")]
    said = explain_drift([{"package": "torch", "expected": "1", "found": "2"}, *found]).split("\n")
    assert said[0] == "torch: 2, expected 1"
    assert said[1] == f"{site}/engine/a.py of my-engine: sha256 {sha256('by hand')}, expected {sha256('patched')}"
    assert said[2].endswith(f"sha256 absent, expected {sha256('b')}")


def test_a_file_makes_a_release_drift_but_not_beside_another_version_of_its_package(tmp_path: Path) -> None:
    builder = ReleaseBuilder(tmp_path, spec(), guard=["engine"])
    installed(builder.venv / "lib/python3.11/site-packages", "engine", {"engine.py": "x"})
    builder.python.parent.mkdir(parents=True)
    builder.python.symlink_to(sys.executable)
    (builder.path / MANIFEST).write_text(json.dumps({"packages": {"engine": "1.0"}}))
    assert builder.state() == ("present", [])
    (builder.venv / "lib/python3.11/site-packages/engine.py").write_text("y")
    state, found = builder.state()
    assert state == "drifted" and [entry["found"] for entry in found] == [sha256("y")]
    (builder.path / MANIFEST).write_text(json.dumps({"packages": {"engine": "2.0"}}))
    assert builder.state()[1] == [{"package": "engine", "expected": "2.0", "found": "1.0"}]


# -- what tools say ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "remedy"),
    [
        ("error: failed to write: No space left on device (os error 28)", "is full ("),
        ("OSError: [Errno 28] No space left on device", "is full ("),
        ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE.", "another checksum than"),
        ("  cause: Hash mismatch for `x`", "another checksum than"),
        (
            "  Caused by: dns error: failed to lookup address information: Temporary failure in name resolution",
            "did not answer",
        ),
        ("Failed to establish a new connection: [Errno 111] Connection refused", "did not answer"),
        ("fatal: unable to access 'https://h/': Could not resolve host: h", "did not answer"),
    ],
)
def test_causes(tmp_path: Path, said: str, remedy: str) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\ncat >&2 <<'END'\n{said}\nEND\nexit 1\n")
    python.chmod(0o755)
    builder = ReleaseBuilder(tmp_path, {**spec(), "python": str(python)})
    with pytest.raises(ReleaseError) as caught:
        builder.ensure()
    assert remedy in str(caught.value) and "expected" in str(caught.value)
    assert str(caught.value).endswith(f"What it said:\n{said.strip()}")
    # A full file system is not left full.
    assert builder.path.exists() == ("full" not in remedy)


def test_what_an_installer_leaves_running_keeps_the_lock(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nsleep 60 >/dev/null 2>&1 &\necho $! >&2\nexit 1\n")
    python.chmod(0o755)
    builder = ReleaseBuilder(tmp_path, {**spec(), "python": str(python)})
    with pytest.raises(ReleaseError) as caught:
        builder.ensure()
    left = int(str(caught.value).rsplit("\n", 1)[-1])
    try:
        with pytest.raises(ReleaseError, match="another play builds a release below"):
            builder.ensure()
    finally:
        os.kill(left, 9)


# -- what is installed, all of it ------------------------------------------------------------------------------------------


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """A finished release, and a link to it."""
    release = tmp_path / "releases" / ("0" * 12)
    site = release / "venv/lib/python3.11/site-packages"
    installed(site, "engine", {"engine/a.py": "a", "engine/kernel.so": "k", "engine/data.txt": "d", "shared.txt": "e"})
    installed(site, "other", {"other.py": "o", "shared.txt": "o"})
    installed(site, "third", {"third/__init__.py": ""})
    (site / "engine/a.py").write_text("patched")
    python = release / "venv/bin/python"
    python.parent.mkdir()
    python.symlink_to(sys.executable)
    entry = {"package": "engine", "sha256": sha256("patched"), "patches": ["first", "second"]}
    manifest = {
        "spec": {"python": sys.executable},
        "packages": {"engine": "1.0", "other": "1.0", "third": "1.0"},
        "files": {"engine/a.py": entry},
        "records": release_module._records(release / "venv"),
    }
    (release / MANIFEST).write_text(json.dumps(manifest))
    (tmp_path / "current").symlink_to(release)
    return tmp_path / "current"


def test_an_untouched_release_has_no_findings(finished: Path) -> None:
    """A file that two packages install may be that of either; compiled files and the role nccl's are not findings."""
    site = finished / "venv/lib/python3.11/site-packages"
    (site / "engine/__pycache__").mkdir()
    (site / "engine/__pycache__/a.cpython-311.pyc").write_text("")
    (site / "sitecustomize.py").write_text("")
    assert check_installed(finished) == check_installed(str(finished)) == []


def test_findings_name_what_is_there_and_what_was_expected(finished: Path) -> None:
    site = finished.resolve() / "venv/lib/python3.11/site-packages"
    (site / "engine/a.py").write_text("by hand")
    (site / "engine/kernel.so").write_text("another")
    (site / "engine/data.txt").unlink()
    (site / "shared.txt").write_text("of neither")
    (site / "other-1.0.dist-info").rename(site / "other-2.0.dist-info")
    (site / "other.py").write_text("of 2.0")
    (site / "third/__init__.py").write_text("x")
    (site / "third-1.0.dist-info/RECORD").write_text(
        "third/__init__.py,sha256=LXEWQrcmsEQBYnyp-6wy9chTD7GQPMTbAiWHF5IaSIE,1\n"
    )
    (site / "stray.pth").write_text("import os")
    findings = check_installed(finished)
    assert all(set(finding) == {"subject", "found", "expected", "action"} for finding in findings)
    assert [tuple(finding.values())[:3] for finding in findings] == [
        ("package other", "2.0", "1.0"),
        ("package third", "another build of the same version", "the build that was installed"),
        (
            f"{site}/engine/a.py of engine",
            f"sha256 {sha256('by hand')}",
            f"sha256 {sha256('patched')} (with first, second)",
        ),
        (f"{site}/engine/data.txt of engine", "absent", f"sha256 {sha256('d')}"),
        (f"{site}/engine/kernel.so of engine", f"sha256 {sha256('another')}", f"sha256 {sha256('k')}"),
        (f"{site}/stray.pth", "a file that no package installed", "absent"),
    ]
    assert "installs other as it was" in findings[0]["action"]
    assert all("sglang_check_all_files=true" in finding["action"] for finding in findings[1:5])


def test_a_shared_file_that_is_of_no_package(finished: Path) -> None:
    (finished / "venv/lib/python3.11/site-packages/shared.txt").write_text("of neither")
    (finding,) = check_installed(finished)
    assert finding["found"] == f"sha256 {sha256('of neither')}"


def test_a_lost_interpreter_and_no_release(finished: Path, tmp_path: Path) -> None:
    (finished / "venv/bin/python").unlink()
    (finding,) = check_installed(finished)
    assert (finding["found"], finding["expected"]) == ("absent", f"a link to {sys.executable}")
    (finished / MANIFEST).unlink()
    (finding,) = check_installed(finished)
    assert (finding["subject"], finding["found"]) == (str(finished), "no finished release")
    (finding,) = check_installed(tmp_path / "nothing")
    assert finding["found"] == "absent" and "site.yml" in finding["action"]


def test_a_builder_that_guards_everything(tmp_path: Path) -> None:
    """What the Python files of guarded packages do not show."""
    quick, thorough = ReleaseBuilder(tmp_path, spec()), ReleaseBuilder(tmp_path, spec(), guard=None)
    installed(quick.venv / "lib/python3.11/site-packages", "engine", {"engine.so": "x"})
    quick.python.parent.mkdir(parents=True)
    quick.python.symlink_to(sys.executable)
    (quick.path / MANIFEST).write_text(json.dumps({"packages": {"engine": "1.0"}}))
    (quick.venv / "lib/python3.11/site-packages/engine.so").write_text("y")
    assert quick.state()[0] == "present"
    state, found = thorough.state()
    assert state == "drifted" and [entry["package"] for entry in found] == ["engine"]


# -- old releases --------------------------------------------------------------------------------------------------------


@pytest.fixture
def machine(tmp_path: Path) -> ReleaseBuilder:
    """Six releases, the first the oldest, the rest of a build, and what must not be touched."""
    for folder in ("proc/1", "units", "cache"):
        (tmp_path / folder).mkdir(parents=True)
    for number in range(6):
        folder = tmp_path / "root/releases" / (str(number) * 12)
        folder.mkdir(parents=True)
        (folder / MANIFEST).write_text(json.dumps({"built_at": f"2026-01-0{number + 1}"}))
        (tmp_path / "cache" / folder.name / "triton").mkdir(parents=True)
    (tmp_path / "root/releases" / ("a" * 12)).mkdir()
    (tmp_path / "root/releases/notes").mkdir()
    return ReleaseBuilder(
        tmp_path / "root",
        spec(),
        keep=2,
        caches=[tmp_path / "cache"],
        state_dirs=[tmp_path / "state", tmp_path / "none"],
        units=tmp_path / "units",
        proc=tmp_path / "proc",
    )


def left(builder: ReleaseBuilder) -> str:
    return "".join(sorted(path.name[0] for path in builder.releases.iterdir()))


def test_prune(machine: ReleaseBuilder) -> None:
    """The newest one and the wanted one, which is not built yet here."""
    machine._prune()
    assert left(machine) == "5n"
    assert sorted(machine.pruned) == sorted([*(str(n) * 12 for n in range(5)), "a" * 12])
    assert [path.name for path in machine._caches[0].iterdir()] == ["5" * 12]


@pytest.mark.parametrize("how", ["cmdline", "environ", "maps", "unit", "current", "last-good"])
def test_what_serves_is_never_pruned(machine: ReleaseBuilder, tmp_path: Path, how: str) -> None:
    old = machine.releases / ("0" * 12)
    if how == "unit":
        (tmp_path / "units/x.service").write_text(f"[Service]\nExecStart={old}/venv/bin/python -m sglang\n")
    elif how in ("current", "last-good"):
        (machine.root / how).symlink_to(f"releases/{old.name}")
    else:
        texts = {
            "cmdline": f"{old}/venv/bin/python\0-m\0sglang\0",
            "environ": f"A=b\0VIRTUAL_ENV={old}/venv\0",
            "maps": f"7f00-7f01 r-xp 00000000 08:01 1 {old}/venv/lib/x.so\n",
        }
        (tmp_path / "proc/1" / how).write_text(texts[how])
    assert old.name in machine.kept()
    machine._prune()
    assert left(machine) == "05n"


def test_what_can_be_put_back_is_never_pruned(machine: ReleaseBuilder, tmp_path: Path) -> None:
    """Of the deployments on record, as far as they can be trusted: nobody else decides what stays."""
    records = Records(tmp_path / "state")
    for number in (0, 1, 2):
        python = machine.releases / (str(number) * 12) / "venv/bin/python"
        records.keep("unit", {"hash": "", "process_hash": str(number) * 64, "command": [str(python), "-m", "sglang"]})
    (records.root / ("1" * 12)).chmod(0o777)
    assert machine.kept()["0" * 12] == f"of deployment {'0' * 12} on record in {tmp_path / 'state'}"
    machine._prune()
    assert left(machine) == "025n"


def test_a_process_of_this_machine_keeps_its_release(machine: ReleaseBuilder) -> None:
    real = ReleaseBuilder(machine.root, spec(), keep=1, units=machine._units)
    python = machine.releases / ("0" * 12) / "python"
    python.symlink_to("/bin/sleep")
    with subprocess.Popen([python, "60"]) as process:
        assert "0" * 12 in real.kept()
        process.kill()
    assert "0" * 12 not in real.kept()


def test_nothing_is_pruned_without_being_asked(machine: ReleaseBuilder) -> None:
    ReleaseBuilder(machine.root, spec(), units=machine._units, proc=machine._proc)._prune()
    assert left(machine) == "012345an"


def test_old_releases_make_room(machine: ReleaseBuilder, monkeypatch: pytest.MonkeyPatch) -> None:
    machine._min_free_bytes = 10**18
    with pytest.raises(ReleaseError, match="expected at least"):
        machine._check_disk()
    assert left(machine) == "5n"


def test_each_release_has_its_own_folder_of_compiled_kernels() -> None:
    """The folder that goes with a release when it is pruned is the one that the plan of that release names."""
    wanted = yaml.safe_load((ROOT / "roles/deployment/vars/main.yml").read_text())["__deployment_wanted"]["cache_dir"]
    caches = yaml.safe_load((ROOT / "roles/sglang/vars/main.yml").read_text())["__sglang_caches"]
    known = {"deployment_cache_dir": "/cache", "deployment_python": ""}
    template = jinja2.nativetypes.NativeEnvironment().from_string
    folders = [template(wanted).render(**known, sglang_release={"id": name}) for name in ("0" * 12, "1" * 12)]
    assert folders == ["/cache/" + "0" * 12, "/cache/" + "1" * 12]
    assert [str(Path(folder).parent) for folder in folders] == template(caches).render(**known) * 2


@pytest.mark.parametrize("keep", [0, -1])
def test_a_wrong_number_of_releases(tmp_path: Path, keep: int) -> None:
    with pytest.raises(ReleaseError, match=f"sglang_keep_releases is {keep}, expected 1 or more"):
        ReleaseBuilder(tmp_path, spec(), keep=keep)
