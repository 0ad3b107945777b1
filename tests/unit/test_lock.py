"""One play at a time: two that come together, a dead holder, a lease that is over."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuserve.sglang.plugins.module_utils import lock as locks
from ansible_collections.gpuserve.sglang.plugins.module_utils.lock import (
    Lock,
    describe,
    holder,
    is_dead,
    process_start,
)

NOW = 1_800_000_000.0


@pytest.fixture
def lock(tmp_path: Path) -> Lock:
    return Lock(tmp_path / "run" / "deployment.lock")


def play(pid: int, controller: str = "here", **more: Any) -> dict[str, Any]:
    known = {"token": f"t{pid}", "controller": controller, "name": "ops-1", "pid": pid, "started": f"s{pid}"}
    return {**known, "user": "ada", "command": "ansible-playbook site.yml", **more}


def test_the_second_one_learns_who_has_it_and_since_when(lock: Lock) -> None:
    assert lock.take(play(1), 600, NOW) == (True, {})
    taken, found = lock.take(play(2), 600, NOW + 60)
    assert not taken
    text = describe(found, NOW + 60)
    assert "ansible-playbook site.yml (process 1, user ada) on ops-1 since 2027-01-15 08:00:00 UTC (60 s ago)" in text
    assert "at most until 2027-01-15 08:10:00 UTC" in text
    assert lock.read()["pid"] == 1


def test_a_dead_holder_s_lock_is_broken_and_no_other_s(lock: Lock) -> None:
    lock.take(play(1), 600, NOW)
    assert not lock.take(play(2), 600, NOW, dead="t7")[0]
    taken, broken = lock.take(play(2), 600, NOW, dead="t1")
    assert taken and broken["pid"] == 1
    assert lock.read()["pid"] == 2


def test_a_lease_that_is_over_binds_nobody(lock: Lock) -> None:
    lock.take(play(1), 600, NOW)
    assert not lock.take(play(2), 600, NOW + 599)[0]
    assert lock.take(play(2), 600, NOW + 600)[0]
    # Who comes back too late must not go on working.
    assert not lock.renew("t1", 600, NOW + 601)
    assert not lock.release("t1")
    assert lock.read()["pid"] == 2


def test_renewing_keeps_it_and_never_shortens_it(lock: Lock) -> None:
    lock.take(play(1), 600, NOW)
    assert lock.renew("t1", 600, NOW + 500)
    assert not lock.take(play(2), 600, NOW + 1000)[0]
    assert lock.renew("t1", 1, NOW + 600)
    assert lock.read()["until"] == NOW + 1100


def test_the_same_play_takes_it_again(lock: Lock) -> None:
    lock.take(play(1), 600, NOW)
    assert lock.take(play(1, token="again"), 600, NOW + 1) == (True, {})
    assert not lock.release("t1")
    assert lock.release("again")
    assert not lock.path.exists()


def test_nothing_is_released_or_renewed_without_the_token(lock: Lock) -> None:
    assert not lock.release("") and not lock.renew("", 1, NOW)
    assert not lock.path.exists()
    lock.take(play(1), 600, NOW)
    assert not lock.release("") and not lock.renew("", 600, NOW)
    assert lock.read()["pid"] == 1


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"token": ""}', '{"token": "t1", "until": "soon"}'])
def test_a_torn_file_is_nobody_s(lock: Lock, content: str) -> None:
    lock.path.parent.mkdir()
    lock.path.write_text(content)
    assert lock.take(play(2), 600, NOW)[0]


def test_of_many_at_the_same_moment_one_gets_it(lock: Lock) -> None:
    won: list[int] = []
    start = threading.Barrier(8)

    def run(number: int) -> None:
        start.wait()
        for __ in range(20):
            if lock.take(play(number), 600, NOW)[0]:
                won.append(number)
                assert lock.read()["pid"] == number
                assert lock.release(f"t{number}")

    threads = [threading.Thread(target=run, args=(number,)) for number in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert won
    assert not lock.path.exists()


def test_a_holder_is_dead_when_its_process_is_another_or_gone() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        who = holder(child.pid, ["/usr/bin/ansible-playbook", "-e", "token=s3cret", "site.yml"])
        assert who["command"] == "ansible-playbook site.yml"
        assert set(who) == set(locks.KEYS)
        assert not is_dead(who)
        # Its number was given to a later process.
        assert is_dead({**who, "started": "1"})
        # Nobody can tell from another controller.
        assert not is_dead({**who, "controller": "elsewhere", "started": "1"})
        child.kill()
        child.wait()
        assert is_dead(who)
    assert is_dead({"controller": locks.controller_id(), "pid": "none"}) is False


def test_a_zombie_holds_nothing() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert process_start(child.pid) == ""
    child.wait()


def test_where_there_is_no_proc_ps_tells_the_start(tmp_path: Path) -> None:
    assert process_start(os.getpid(), tmp_path) == process_start(os.getpid(), tmp_path) != ""
    assert locks.controller_id(tmp_path) != locks.controller_id()


def test_a_record_that_nobody_can_read_is_still_described() -> None:
    assert describe({"token": "x"}, NOW) == "somebody unknown"
