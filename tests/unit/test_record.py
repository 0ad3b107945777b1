"""What a rollback can put back: records are whole, the links name the two last good ones, old ones go."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import plan_cases as cases
import pytest
import yaml
from ansible.module_utils.testing import patch_module_args
from ansible_collections.gpuserve.sglang.plugins.module_utils.health import UnitStatus
from ansible_collections.gpuserve.sglang.plugins.module_utils.plan import launch_plan
from ansible_collections.gpuserve.sglang.plugins.module_utils.record import (
    KEPT,
    LAST,
    PREVIOUS,
    PROVEN,
    RecordError,
    Records,
    Tuning,
    document,
    files_of,
    settings_files,
    write_document,
)
from ansible_collections.gpuserve.sglang.plugins.module_utils.service import process_started
from ansible_collections.gpuserve.sglang.plugins.modules import (
    deployment_history,
    deployment_record,
    service_info,
)

ROLES = Path(__file__).resolve().parents[2] / "roles"


def plan(number: int) -> dict:
    return {"hash": str(number), "process_hash": f"{number:064x}"[::-1], "env": {"A": str(number)}}


@pytest.fixture
def records(tmp_path: Path) -> Records:
    return Records(tmp_path)


def test_nothing_is_on_record_at_first(records: Records) -> None:
    assert records.read(LAST) is None
    assert records.read(PREVIOUS) is None
    assert not records.is_recorded("unit", plan(1))


def test_the_two_last_good_ones_are_named(records: Records) -> None:
    for number in (1, 2, 3):
        records.keep(f"unit {number}", plan(number))
    shown = {"unit": "unit 3", "plan": plan(3), "settings": {}, "proven": None}
    assert records.read(LAST) == {"id": plan(3)["process_hash"][:12], **shown}
    previous = records.read(PREVIOUS)
    assert previous is not None and previous["unit"] == "unit 2"
    assert records.is_recorded("unit 3", plan(3))
    assert not records.is_recorded("unit 3 edited", plan(3))
    assert not records.is_recorded("unit 3", plan(2))


def test_a_new_unit_text_of_the_same_plan_is_no_new_generation(records: Records) -> None:
    records.keep("unit 1", plan(1))
    records.keep("unit 2", plan(2))
    records.keep("unit 2, other comment", plan(2))
    assert records.read(LAST)["unit"] == "unit 2, other comment"  # type: ignore[index]
    assert records.read(PREVIOUS)["unit"] == "unit 1"  # type: ignore[index]


def test_files_that_were_never_started_do_not_replace_those_that_were(records: Records) -> None:
    """They are in place, and what is put back are those of the last start that passed; a start with them makes them these."""
    etc = {"/etc/engine.json": "1"}
    records.keep("unit 1", plan(1), etc)
    for number in (2, 3):
        changed = {**plan(1), "hash": f"1.{number}"}
        records.keep(f"unit 1.{number}", changed, {"/etc/engine.json": str(number)}, proven=False)
        found = records.read(LAST)
        assert found is not None and (found["unit"], found["plan"]["hash"]) == (f"unit 1.{number}", f"1.{number}")
        assert found["proven"] == {"unit": "unit 1", "plan": plan(1), "settings": etc}
        assert files_of(found, "/u") == {"/u": "unit 1", **etc}
        assert files_of(found, "/u", recorded=True) == {"/u": f"unit 1.{number}", "/etc/engine.json": str(number)}
    now = ("unit 1.3", {**plan(1), "hash": "1.3"}, {"/etc/engine.json": "3"})
    assert records.is_recorded(*now, proven=False) and not records.is_recorded(*now)
    assert sorted(path.name for path in records.root.iterdir()) == sorted([LAST, plan(1)["process_hash"][:12]])
    records.keep(*now)
    assert records.is_recorded(*now)
    found = records.read(LAST)
    assert found is not None and found["proven"] is None


def test_files_that_come_back_are_the_proven_ones(records: Records) -> None:
    records.keep("unit 1", plan(1))
    records.keep("unit 1, other limits", plan(1), proven=False)
    records.keep("unit 1", plan(1), proven=False)
    found = records.read(LAST)
    assert found is not None and found["proven"] is None


def test_without_an_earlier_start_what_serves_is_all_there_is(records: Records) -> None:
    records.keep("unit 1", plan(1), proven=False)
    found = records.read(LAST)
    assert found is not None and (found["unit"], found["proven"]) == ("unit 1", None)


def test_what_is_seen_to_run_by_the_files_is_proven(
    records: Records, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is older than its unit says nothing about it; one that is younger, and whose start has passed, does."""
    unit, status = (
        tmp_path / "engine.service",
        UnitStatus("engine.service", active_state="active", main_pid=os.getpid()),
    )
    monkeypatch.setattr(deployment_record, "observe_unit", lambda name: status)
    started = process_started(os.getpid())
    assert started is not None
    given = {"state_dir": str(tmp_path), "unit_file": str(unit), "plan": plan(1), "settings_dir": str(tmp_path / "etc")}

    def seen(text: str, mtime: float, **more: Any) -> tuple[bool, str]:
        unit.write_text(text)
        os.utime(unit, (mtime, mtime))
        found = record(capsys, **given, **more)
        return found["changed"], (found["last_good"]["proven"] or {"unit": "itself"})["unit"]

    start = {"seconds_to_ready": 3.0}
    monkeypatch.setattr(deployment_record, "record_start", lambda *given: {})
    assert seen("unit 1", started + 60, start=start) == (True, "itself")
    assert seen("unit 2", started + 60) == (True, "unit 1")
    assert seen("unit 2", started + 60) == (False, "unit 1"), "a second run has nothing to do"
    assert seen("unit 2", started + 0.5) == (False, "unit 1"), "not for sure"
    assert seen("unit 2", started - 60) == (True, "itself")
    assert seen("unit 2", started - 60) == (False, "itself")
    assert seen("unit 3", started + 60) == (True, "unit 2")
    status = UnitStatus("engine.service", active_state="activating", main_pid=os.getpid())
    assert seen("unit 3", started - 60) == (False, "unit 2")
    assert seen("unit 3", started + 60, start=start) == (True, "itself")


def test_settings_files_are_part_of_it(records: Records, tmp_path: Path) -> None:
    folder = tmp_path / "etc"
    folder.mkdir()
    for name in ("engine.json", "engine.plan.json", "engine2.json", "engine.txt"):
        (folder / name).write_text("{}")
    assert [path.name for path in settings_files("engine.service", folder)] == ["engine.json", "engine.plan.json"]
    settings = {str(folder / "engine.json"): "{}"}
    records.keep("unit", plan(1), settings)
    assert records.is_recorded("unit", plan(1), settings)
    assert not records.is_recorded("unit", plan(1), {})
    assert records.read(LAST)["settings"] == settings  # type: ignore[index]


def test_a_record_of_an_earlier_release_has_no_settings(records: Records) -> None:
    records.keep("unit", plan(1))
    (records.root / records.linked(LAST) / "settings.json").unlink()
    assert records.read(LAST)["settings"] == {}  # type: ignore[index]


def test_old_records_go_and_linked_ones_stay(records: Records) -> None:
    for number in range(KEPT + 4):
        records.keep(f"unit {number}", plan(number))
        os.utime(records.root / records.linked(LAST), (1000 + number, 1000 + number))
    folders = [p for p in records.root.iterdir() if p.is_dir() and not p.is_symlink()]
    assert len(folders) <= KEPT + 1
    assert records.read(LAST) is not None and records.read(PREVIOUS) is not None


def test_a_damaged_record_is_named(records: Records) -> None:
    records.keep("unit", plan(1))
    (records.root / records.linked(LAST) / "plan.json").write_text("{")
    with pytest.raises(RecordError, match=r"last-good names .* cannot be read .*expected a unit and a plan"):
        records.read(LAST)
    assert not records.is_recorded("unit", plan(1))


def test_an_interrupted_record_is_written_again(records: Records) -> None:
    left = records.root / f".{plan(1)['process_hash'][:12]}.new"
    left.mkdir(parents=True)
    (left / "rest").write_text("x")
    records.keep("unit", plan(1))
    assert json.loads((records.root / records.linked(LAST) / "plan.json").read_text()) == plan(1)
    assert sorted(p.name for p in (records.root / records.linked(LAST)).iterdir()) == [
        "plan.json",
        "settings.json",
        "unit",
    ]


def test_a_plan_comes_back_in_its_own_order(records: Records) -> None:
    """A unit that is rendered from it again must be the same text."""
    ordered = {**plan(1), "env": {"B": "1", "A": "2", "C": "3"}}
    records.keep("unit", ordered)
    found = records.read(LAST)
    assert found is not None and list(found["plan"]["env"]) == ["B", "A", "C"]
    assert list(found["plan"]) == list(ordered)


# --- what the service's user can do in its state directory --------------------------------------------------------------


def entry_of(records: Records) -> Path:
    return records.root / records.linked(LAST)


def swap(records: Records, into: str) -> None:
    """What the owner of the state directory can do to root's folder: rename it, and put something of the same name there."""
    other = records.root.with_name("renamed")
    records.root.rename(other)
    if into == "link":
        records.root.symlink_to(other)
    else:
        records.root.write_text("")


def foreign(path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    os.chown(path, 65534, -1, follow_symlinks=False)


SWAPPED = {
    "a link": (lambda r: swap(r, "link"), "deployments is a link or no folder, expected a folder of root's"),
    "a file": (lambda r: swap(r, "file"), "deployments is a link or no folder, expected a folder of root's"),
    "folder of another": (lambda r: foreign(r.root), "deployments belongs to uid 65534, expected root"),
    "folder for all": (
        lambda r: r.root.chmod(0o777),
        "deployments has mode 0777, expected one without write permission",
    ),
    "folder for the group": (lambda r: r.root.chmod(0o775), "deployments has mode 0775, expected one without"),
}
ALTERED = {
    "entry of another": (lambda r: foreign(entry_of(r)), "belongs to uid 65534, expected root"),
    "entry for all": (lambda r: entry_of(r).chmod(0o757), "has mode 0757, expected one without write permission"),
    "unit of another": (lambda r: foreign(entry_of(r) / "unit"), "/unit belongs to uid 65534, expected root"),
    "plan for the group": (lambda r: (entry_of(r) / "plan.json").chmod(0o664), "/plan.json has mode 0664, expected"),
    "proven for all": (lambda r: (entry_of(r) / PROVEN).chmod(0o757), "/proven has mode 0757, expected one without"),
    "proven unit for all": (lambda r: (entry_of(r) / PROVEN / "unit").chmod(0o646), "/proven/unit has mode 0646"),
    "proven without a unit": (lambda r: (entry_of(r) / PROVEN / "unit").unlink(), "cannot be read .*expected a unit"),
    "settings of another": (lambda r: foreign(entry_of(r) / "settings.json"), "/settings.json belongs to uid 65534"),
}


@pytest.mark.parametrize("case", [*SWAPPED, *ALTERED])
def test_a_record_that_others_can_change_is_not_read(records: Records, case: str) -> None:
    records.keep("unit", plan(1))
    records.keep("unit 1", plan(1), proven=False)
    change, words = {**SWAPPED, **ALTERED}[case]
    change(records)
    with pytest.raises(RecordError, match=words) as refused:
        records.read(LAST)
    assert re.search("site.yml|deploy again", str(refused.value))
    assert not records.is_recorded("unit 1", plan(1))


def test_all_plans_that_can_be_trusted(records: Records) -> None:
    assert records.plans() == {}
    for number in (1, 2, 3):
        records.keep(f"unit {number}", plan(number))
    ids = {number: plan(number)["process_hash"][:12] for number in (1, 2, 3)}
    assert records.plans() == {ids[number]: plan(number) for number in (1, 2, 3)}
    (records.root / ids[2]).chmod(0o777)
    assert set(records.plans()) == {ids[1], ids[3]}
    records.root.chmod(0o777)
    assert records.plans() == {}


@pytest.mark.parametrize("case", SWAPPED)
def test_nothing_is_recorded_in_a_folder_that_is_not_ours(records: Records, tmp_path: Path, case: str) -> None:
    records.keep("unit 1", plan(1))
    change, words = SWAPPED[case]
    change(records)
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    with pytest.raises(RecordError, match=words):
        records.keep("unit 2", plan(2))
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before


@pytest.mark.parametrize("target", ["/etc", "../renamed", ".", "..", "a/b"])
def test_a_link_names_an_entry_beside_it(records: Records, target: str) -> None:
    records.keep("unit 1", plan(1))
    (records.root / LAST).unlink()
    (records.root / LAST).symlink_to(target)
    with pytest.raises(RecordError, match=f"last-good names {target}, expected the name of a folder beside it"):
        records.read(LAST)
    assert records.linked(LAST) == ""
    records.keep("unit 2", plan(2))
    assert units(records) == ["unit 2"]


def test_files_of_an_entry_are_no_links(records: Records, tmp_path: Path) -> None:
    records.keep("unit 1", plan(1))
    (tmp_path / "mine").write_text("[Service]\nUser=root\n")
    (entry_of(records) / "unit").unlink()
    (entry_of(records) / "unit").symlink_to(tmp_path / "mine")
    with pytest.raises(RecordError, match="cannot be read"):
        records.read(LAST)


def test_a_record_can_be_read_again_whatever_the_umask_is(records: Records) -> None:
    before = os.umask(0)
    try:
        records.keep("unit 1", plan(1))
    finally:
        os.umask(before)
    assert units(records) == ["unit 1"]


@pytest.mark.parametrize("kept", [True, False])
def test_a_tuning_ends_over_no_record_that_others_can_change(
    records: Records, tuning: Tuning, tmp_path: Path, kept: bool
) -> None:
    (tuning.folder / "deployments" if kept else records.root).chmod(0o777)
    with pytest.raises(RecordError, match="deployments has mode 0777"):
        tuning.end(tmp_path)
    assert tuning.read()["token"] == "t1"


# --- documents in the state directory, which are only shown -----------------------------------------------------------


def test_a_document_is_read(tmp_path: Path) -> None:
    file = tmp_path / "last-start.json"
    assert document(file) == document(tmp_path / "none" / "x.json") == ({}, "")
    file.write_text('{"when": 1}')
    assert document(file) == ({"when": 1}, "")
    (tmp_path / "latest.json").symlink_to("last-start.json")
    assert document(tmp_path / "latest.json") == ({"when": 1}, "")


@pytest.mark.parametrize("content", ["", "{", "[]", "\udcff"])
def test_a_broken_document_is_none_and_named(tmp_path: Path, content: str) -> None:
    file = tmp_path / "last-start.json"
    file.write_bytes(content.encode("utf-8", "surrogateescape"))
    found, why = document(file)
    assert found == {}
    assert why.startswith(f"{file} cannot be read (") and why.endswith("it counts as none on record. Remove it.")


def test_no_document_is_read_through_a_link_or_from_a_pipe(tmp_path: Path) -> None:
    secret = tmp_path / "secret" / "s.json"
    secret.parent.mkdir()
    secret.write_text('{"token": "hunter2"}')
    state = tmp_path / "state"
    state.mkdir()
    (state / "a.json").symlink_to(secret)
    (state / "b.json").symlink_to("a.json")
    os.mkfifo(state / "c.json")
    (state / "benchmarks").symlink_to(secret.parent)
    for path in (state / "a.json", state / "b.json", state / "c.json", state / "benchmarks" / "s.json"):
        found, why = document(path)
        assert found == {}
        assert f"{path} cannot be read" in why


def test_a_document_is_written_through_no_link(tmp_path: Path) -> None:
    other, file = tmp_path / "other", tmp_path / "last-start.json"
    other.write_text("keep")
    for name in ("last-start.json", ".last-start.json.new"):
        (tmp_path / name).symlink_to(other)
    write_document(file, "{}")
    assert (file.read_text(), file.is_symlink(), file.stat().st_mode & 0o777) == ("{}", False, 0o644)
    assert other.read_text() == "keep"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last-start.json", "other"]


def test_the_history_is_read_and_written_through_no_link(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its folder is the service's own: a link there must neither show nor replace another file of root's."""
    secret, state = tmp_path / "shadow", tmp_path / "state"
    secret.write_text("root:hunter2\n")
    state.mkdir()
    file = state / "history.md"

    def enter() -> dict[str, Any]:
        whole = launch_plan(cases.wanted(), cases.host(), cases.models())
        arguments = {"path": str(file), "plan": whole, "state_dir": str(state)}
        with patch_module_args({**arguments, "_ansible_diff": True}), pytest.raises(SystemExit):
            deployment_history.main()
        return dict(json.loads(capsys.readouterr().out))

    file.symlink_to(secret)
    found = enter()
    assert found["failed"] and "no link" in found["msg"] and "hunter2" not in json.dumps(found)
    file.unlink()
    (state / ".history.md.new").symlink_to(secret)
    assert enter()["changed"]
    assert secret.read_text() == "root:hunter2\n"
    assert file.read_text().startswith("# History") and not file.is_symlink()
    assert not enter()["changed"]


def test_a_broken_last_start_is_none_with_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the handbook is made with: a host that has served has a record, be it readable or not."""
    warned: list[str] = []
    monkeypatch.setattr(service_info.AnsibleModule, "warn", lambda self, text, **more: warned.append(text))
    files = [tmp_path / "last-start.json", tmp_path / "benchmarks" / "latest.json"]

    def info() -> tuple[Any, ...]:
        warned.clear()
        with patch_module_args({"unit": "none.service", "state_dir": str(tmp_path)}), pytest.raises(SystemExit):
            service_info.main()
        found = json.loads(capsys.readouterr().out)
        return found["last_start"], found["benchmark"], found["served"]

    assert info() == ({}, {}, False)
    assert not warned
    files[1].parent.mkdir()
    for file in files:
        file.write_text("")
    assert info() == ({}, {}, True)
    assert [text.partition(" cannot be read")[0] for text in warned] == [str(file) for file in files]
    for file in files:
        file.write_text('{"when": 2}')
    assert info() == ({"when": 2}, {"when": 2}, True)
    assert not warned


def test_the_service_s_facts_say_whether_the_record_can_be_trusted(records: Records) -> None:
    assert service_info.last_good(records.root.parent, records.root.parent / "engine.service") is None
    records.keep("unit 1", plan(1))

    def seen() -> tuple[bool, bool]:
        found = service_info.last_good(records.root.parent, records.root.parent / "engine.service")
        assert found is not None
        return bool(found["error"]), found["untrusted"]

    assert seen() == (False, False)
    (entry_of(records) / "plan.json").write_text("{")
    assert seen() == (True, False), "a damaged one is made anew by a deployment"
    records.root.chmod(0o777)
    assert seen() == (True, True)


def test_files_that_are_not_in_place_as_recorded_are_named(records: Records, tmp_path: Path) -> None:
    unit, other = tmp_path / "engine.service", tmp_path / "engine.json"

    def seen() -> tuple[list[str], bool]:
        found = service_info.last_good(tmp_path, unit)
        assert found is not None
        return found["differing"], found["unproven"]

    records.keep("unit 1", plan(1), {str(other): "{}"})
    assert seen() == ([str(unit), str(other)], False)
    unit.write_text("unit 1")
    other.write_text("{}")
    assert seen() == ([], False)
    records.keep("unit 2", plan(1), {str(other): "{}"}, proven=False)
    assert seen() == ([str(unit)], True)
    unit.write_text("unit 2")
    assert seen() == ([], True)


# --- a tuning, and who deploys meanwhile ------------------------------------------------------------------------------


@pytest.fixture
def tuning(tmp_path: Path, records: Records) -> Tuning:
    """Deployment 2 served (1 before it); the profiles 3 and 4 were tried since, and nobody has put 2 back."""
    for number in (1, 2):
        records.keep(f"unit {number}", plan(number))
    folder = tmp_path / "tune"
    shutil.copytree(records.root, folder / "deployments", symlinks=True)
    session = {"token": "t1", "began": "2026-01-02T03:04:05Z", "state_dir": str(tmp_path), "plan": plan(2)}
    (folder / "session.json").write_text(json.dumps(session))
    for number in (3, 4):
        records.keep(f"unit {number}", plan(number))
    return Tuning(folder)


def record(capsys: pytest.CaptureFixture[str], check_mode: bool = False, **arguments: Any) -> dict[str, Any]:
    with patch_module_args({**arguments, "_ansible_check_mode": check_mode}), pytest.raises(SystemExit) as ended:
        deployment_record.main()
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert not ended.value.code, found
    return found


def units(records: Records) -> list[str]:
    return [found["unit"] for link in (LAST, PREVIOUS) if (found := records.read(link)) is not None]


def test_a_tuning_s_session_is_read_and_stays(
    records: Records, tuning: Tuning, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = record(capsys, state_dir=str(tmp_path), tuning=str(tuning.folder))
    assert (found["tuning"]["token"], found["changed"]) == ("t1", False)
    assert units(records) == ["unit 4", "unit 3"]
    assert tuning.read()["token"] == "t1"


@pytest.mark.parametrize("number", [2, 4, 5], ids=["what served before", "what is tried now", "another one"])
def test_whoever_deploys_ends_it_and_what_was_tried_is_off_the_record(
    records: Records, tuning: Tuning, tmp_path: Path, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    """Also the very profile that is tried at this moment, which is on record already: the tuning must not put 2 back over it."""
    unit = tmp_path / "engine.service"
    unit.write_text(f"unit {number}")
    given = {
        "state_dir": str(tmp_path), "unit_file": str(unit), "plan": plan(number), "settings_dir": str(tmp_path / "etc"), "tuning": str(tuning.folder),
    }  # fmt: skip
    predicted = record(capsys, check_mode=True, **given)
    assert (predicted["tuning"]["token"], predicted["changed"]) == ("t1", True)
    assert tuning.read()
    found = record(capsys, **given)
    assert (found["tuning"]["began"], found["changed"]) == ("2026-01-02T03:04:05Z", True)
    assert units(records) == ([f"unit {number}", "unit 2"] if number != 2 else ["unit 2", "unit 1"])
    assert not tuning.folder.exists()
    again = record(capsys, **given)
    assert (again["tuning"], again["changed"]) == ({}, False)


def test_a_tuning_s_own_record_and_that_of_another_service_leave_it(
    records: Records, tuning: Tuning, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unit = tmp_path / "engine.service"
    unit.write_text("unit 5")
    given = {"unit_file": str(unit), "plan": plan(5), "settings_dir": str(tmp_path / "etc")}
    assert record(capsys, state_dir=str(tmp_path), **given)["tuning"] == {}
    assert record(capsys, state_dir=str(tmp_path / "other"), tuning=str(tuning.folder), **given)["tuning"] == {}
    assert tuning.read()["token"] == "t1"
    assert units(records) == ["unit 5", "unit 4"]


@pytest.mark.parametrize("content", ["", "{", "[]"])
def test_a_session_that_cannot_be_read_ends_nobody_s_deployment(
    records: Records, tuning: Tuning, tmp_path: Path, content: str
) -> None:
    (tuning.folder / "session.json").write_text(content)
    assert tuning.read() == tuning.of(tmp_path) == {}
    assert Tuning(tmp_path / "nowhere").read() == {}


def test_an_end_without_kept_records_leaves_those_that_are_there(
    records: Records, tuning: Tuning, tmp_path: Path
) -> None:
    shutil.rmtree(tuning.folder / "deployments")
    tuning.end(tmp_path)
    assert units(records) == ["unit 4", "unit 3"]
    assert not tuning.folder.exists()


def test_both_roles_mean_the_same_folder() -> None:
    folders = {
        yaml.safe_load((ROLES / role / "vars/main.yml").read_text())[name]
        for role, name in (("tune", "__tune_folder"), ("sglang_service", "__sglang_service_tuning_folder"))
    }
    assert folders == {"/var/lib/gpuserve-sglang/tune"}
