"""The production install path from a local index and a local repository with the documented names: no box, no network.

The role's own default steps run; only their addresses are those of a server in this process, which can be told to fail.
The tests that share a root run in the order written.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT, Box, Run

sys.path.insert(0, str(ROOT / "collections"))
from ansible_collections.gpuserve.sglang.plugins.module_utils.release import check_installed

KERNEL = "sgl_kernel-0.3.21+cu130-cp310-abi3-manylinux2014_x86_64.whl"
MODULES_ON_THE_CONTROLLER = {"set_fact", "include_tasks", "include_role", "debug", "assert", "validate_argument_spec"}
SERIES = yaml.safe_load((ROOT / "patches/sglang/0.5.9/series.yml").read_text())
PATCHED = "sglang/srt/models/kimi_k25.py"


def default_steps() -> list[dict[str, Any]]:
    steps: list[dict[str, Any]] = yaml.safe_load((ROOT / "roles/sglang/defaults/main.yml").read_text())["sglang_steps"]
    return steps


NEWER = {"sglang_steps": default_steps(), "sglang_patches": []}
NEWER["sglang_steps"][1].update({"requirements": ["sglang==0.5.99"], "overrides": []})


class Server(http.server.ThreadingHTTPServer):
    """The folder of sandbox/index/build over HTTP; ``trouble`` maps a part of a path to what happens to it."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        self.folder, self.trouble, self.asked = folder, dict[str, str](), list[str]()
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @contextlib.contextmanager
    def failing(self, part: str, how: str) -> Iterator[None]:
        self.trouble[part] = how
        try:
            yield
        finally:
            del self.trouble[part]


class Handler(http.server.SimpleHTTPRequestHandler):
    server: Server

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments, directory=str(arguments[2].folder))

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        how = next((how for part, how in self.server.trouble.items() if part in self.path), "")
        if how == "drop":
            self.connection.close()
        elif how == "stall":
            for __ in range(600):
                if not self.server.trouble:
                    break
                time.sleep(0.1)
            self.connection.close()
        elif how == "other bytes":
            body = Path(self.translate_path(self.path)).read_bytes() + b"\0"
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        else:
            super().do_GET()

    def log_message(self, *_arguments: object) -> None:
        pass


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("index") / "index"
    subprocess.run([sys.executable, ROOT / "sandbox/index/build", folder], check=True)
    with Server(folder) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


class Here:
    """This machine as the host, with the role's defaults and the index's addresses."""

    def __init__(self, index: Server, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        inventory = folder / "inventory"
        inventory.mkdir()
        host = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
        (inventory / "hosts.yml").write_text(yaml.safe_dump({"all": {"hosts": {"here": host}}}))
        environment = {
            # A cache of its own: what other tests have in theirs must not stand in for the index.
            "UV_CACHE_DIR": str(folder / "uv-cache"), "PIP_CACHE_DIR": str(folder / "pip-cache"),
            "PIP_RETRIES": "0", "UV_HTTP_RETRIES": "0", "NO_PROXY": "127.0.0.1",
        }  # fmt: skip
        play = {"hosts": "all", "gather_facts": False, "environment": environment, "roles": ["gpuserve.sglang.sglang"]}
        self.playbook = folder / "play.yml"
        self.playbook.write_text(yaml.safe_dump([play]))
        self.root, self.index, self.box = folder / "root", index, Box("here", inventory)
        kernel = hashlib.sha256((index.folder / "kernel" / KERNEL).read_bytes()).hexdigest()
        self.variables: dict[str, Any] = {
            # The addresses; everything else is the role's default.
            "sglang_index_url": f"{index.url}/pypi/simple/",
            "sglang_torch_index_url": f"{index.url}/cu130/simple/",
            "sglang_kernel_wheel": f"{index.url}/kernel/{KERNEL.replace('+', '%2B')}#sha256={kernel}",
            # This machine: where it builds, its interpreter, and that its packages are none of the role's business.
            "sglang_root": str(self.root),
            "sglang_base_python": str(Path(sys.executable).resolve()),
            "sglang_system_packages": [],
            "sglang_min_free_gb": 0.1,
        }

    def play(self, *arguments: str, **extra: Any) -> Run:
        return self.box.play(str(self.playbook), *arguments, **{**self.variables, **extra})

    def releases(self) -> list[Path]:
        return [
            path for path in sorted((self.root / "releases").glob("[0-9a-f]*")) if (path / "manifest.json").exists()
        ]


def result(run: Run) -> dict[str, Any]:
    """What engine_release returned last."""
    found = [
        e["event_data"]["res"] for e in run.of("runner_on_ok") if "engine_release" in e["event_data"]["task_action"]
    ]
    return dict(found[-1])


def executions(run: Run) -> list[str]:
    """The tasks that ran a module on the host."""
    done = [e["event_data"] for kind in ("runner_on_ok", "runner_on_failed") for e in run.of(kind)]
    return [d["task"] for d in done if d["task_action"].split(".")[-1] not in MODULES_ON_THE_CONTROLLER]


@pytest.fixture(scope="module")
def here(index: Server, tmp_path_factory: pytest.TempPathFactory) -> Here:
    return Here(index, tmp_path_factory.mktemp("here"))


@pytest.fixture
def fresh(index: Server, tmp_path: Path) -> Here:
    """A host on which nothing was built."""
    return Here(index, tmp_path / "fresh")


def site(release: Path) -> Path:
    return next(release.glob("venv/lib/python3*/site-packages"))


def resulting(path: str) -> set[str]:
    """The checksums that a file has with every patch of the series that touches it."""
    last = [sums["files"][path] for sums in SERIES["checksums"].values() if path in sums["files"]][-1]
    return {entry["resulting"] for entry in last if len(entry["after"]) == max(len(e["after"]) for e in last)}


def test_the_documented_stack(here: Here) -> None:
    """Three steps in their order, from their indexes, with the override, the checked wheel and both patch series."""
    run = here.play()
    assert run.rc == 0, run.failure
    manifest = result(run)["manifest"]
    packages = manifest["packages"]
    assert {name: packages[name] for name in ("torch", "torchvision", "torchaudio", "sglang", "sgl-kernel")} == {
        "torch": "2.9.1+cu130", "torchvision": "0.24.1+cu130", "torchaudio": "2.9.1+cu130", "sglang": "0.5.9",
        "sgl-kernel": "0.3.21+cu130",
    }  # fmt: skip
    assert packages["flashinfer-python"] == packages["flashinfer-cubin"] == "0.6.4"
    assert (manifest["installer"], manifest["torch_cuda"]) == ("uv", "13.0")
    assert manifest["patches"] == [patch["id"] for patch in SERIES["patches"]] + ["sm120-comm-arch"]
    (release,) = here.releases()
    touched = {path for sums in SERIES["checksums"].values() for path in sums["files"]}
    for path in touched:
        found = hashlib.sha256((site(release) / path).read_bytes()).hexdigest()
        assert found in resulting(path)
        assert found == manifest["files"][path]["sha256"]
    assert manifest["files"]["flashinfer/jit/comm.py"]["patches"] == ["sm120-comm-arch"]
    assert "set_eagle3_layers_to_capture" in (site(release) / PATCHED).read_text()


def test_a_second_run_is_one_module_execution_and_changes_nothing(here: Here) -> None:
    here.index.asked.clear()
    run = here.play()
    assert run.rc == 0, run.failure
    assert executions(run) == ["Look at the release"]
    assert run.changed == []
    assert result(run)["release_state"] == "present" and result(run)["drift"] == []
    assert here.index.asked == []


def test_drift_is_named_and_repaired(here: Here) -> None:
    """pip install --upgrade inside the release, a hand-edited patched file, and one that no patch touches."""
    (release,) = here.releases()
    before = json.loads((release / "manifest.json").read_text())
    pip = [release / "venv/bin/python", "-m", "pip", "install", "--quiet", "--upgrade", "tinydep==1.0"]
    subprocess.run([*pip, f"--index-url={here.index.url}/pypi/simple/"], check=True, env={"PATH": os.environ["PATH"]})
    patched, other = site(release) / PATCHED, site(release) / "flashinfer" / "__init__.py"
    for path in (patched, other):
        # In place: the file may be a hard link into uv's cache.
        with path.open("a") as file:
            file.write("# by hand\n")
    found = hashlib.sha256(patched.read_bytes()).hexdigest()
    looked = here.play("--check")
    assert looked.rc == 0, looked.failure
    message = result(looked)["message"]
    assert "tinydep: 1.0, expected 1.1" in message
    expected = before["files"][PATCHED]["sha256"]
    assert f"{patched} of sglang: sha256 {found}, expected {expected}" in message
    assert f"{other} of flashinfer-python: sha256" in message
    assert len(message.splitlines()) == 3
    assert "tinydep: 1.0, expected 1.1" in looked.stdout
    assert patched.read_text().endswith("# by hand\n"), "check mode repairs nothing"
    run = here.play()
    assert run.rc == 0, run.failure
    assert "Build the release, or find it complete" in run.changed
    after = result(run)["manifest"]
    assert {key: after[key] for key in ("packages", "files")} == {key: before[key] for key in ("packages", "files")}
    assert "by hand" not in patched.read_text() + other.read_text()
    assert here.play().changed == []


def test_every_file_is_checked_and_repaired_when_asked(here: Here) -> None:
    """What the quick look of each run leaves out: other packages, what is no Python, and the installers themselves."""
    (release,) = here.releases()
    assert check_installed(release) == []
    packages = site(release)
    changed = [packages / "torch/version.py", packages / "pip/__init__.py", release / "venv/bin/uv"]
    for path in changed:
        # A file of its own: the one that is there may be a link into uv's cache, or be running.
        path.chmod(0o755)
        copy = path.with_name("copy")
        shutil.copy(path, copy)
        with copy.open("a") as file:
            file.write("# by hand\n")
        copy.replace(path)
    gone = next(packages.glob("tinydep-*.dist-info/METADATA"))
    gone.unlink()
    extra = packages / "extra.pth"
    extra.write_text("import os\n")
    findings = check_installed(here.root / "releases" / release.name)
    subjects = [finding["subject"] for finding in findings]
    assert [subject.rpartition(" of ")[2] for subject in subjects[:-1]] == ["uv", "pip", "tinydep", "torch"]
    assert [Path(subject.split(" of ")[0]).resolve() for subject in subjects[:-1]] == [
        path.resolve() for path in (changed[2], changed[1], gone, changed[0])
    ]
    assert subjects[-1] == str(extra) and findings[2]["found"] == "absent"
    extra.unlink()
    run = here.play()
    assert run.rc == 0 and run.changed == [], run.failure
    run = here.play(sglang_check_all_files=True)
    assert run.rc == 0, run.failure
    assert "Build the release, or find it complete" in run.changed
    assert check_installed(release) == []
    assert here.play(sglang_check_all_files=True).changed == []


def test_a_changed_patch_is_refused_before_anything_happens(here: Here, tmp_path: Path) -> None:
    """The series beside the playbook comes first: one whose patch was edited."""
    copy = here.playbook.parent / "patches/sglang/0.5.9"
    shutil.copytree(ROOT / "patches/sglang/0.5.9", copy)
    patch = copy / SERIES["patches"][0]["file"]
    patch.write_text(patch.read_text().replace("+", "+ ", 1))
    found = hashlib.sha256(patch.read_bytes()).hexdigest()
    try:
        run = here.play()
    finally:
        shutil.rmtree(here.playbook.parent / "patches")
    assert run.rc != 0 and executions(run) == []
    assert patch.name in run.failure and found in run.failure
    assert SERIES["checksums"][SERIES["patches"][0]["id"]]["patch"] in run.failure


def test_a_newer_engine_without_patches_by_variables_only(here: Here) -> None:
    """Built beside the first release, of which no file changes while something runs in it."""
    (old,) = here.releases()
    before = {path: path.stat().st_mtime_ns for path in old.rglob("*") if path.is_file()}
    busy = subprocess.Popen([old / "venv/bin/python", "-c", "import time; time.sleep(600)"])
    try:
        run = here.play(**NEWER, sglang_keep_releases=1)
        assert run.rc == 0, run.failure
        assert {path: path.stat().st_mtime_ns for path in old.rglob("*") if path.is_file()} == before
    finally:
        busy.kill()
        busy.wait()
    manifest = result(run)["manifest"]
    assert manifest["packages"]["sglang"] == "0.5.99" and manifest["packages"]["flashinfer-python"] == "0.7.0"
    assert manifest["patches"] == [] and manifest["files"] == {}
    assert result(run)["pruned"] == [], "something runs in it"
    (new,) = [release for release in here.releases() if release != old]

    def compiled(release: Path, module: str) -> Path:
        return next((site(release) / module).parent.glob(f"__pycache__/{Path(module).stem}.*.pyc"))

    assert compiled(old, "torch/version.py").samefile(compiled(new, "torch/version.py")), "the same file, compiled once"
    other = "sglang/launch_server.py"
    assert not compiled(old, other).samefile(compiled(new, other))
    assert len(here.releases()) == 2


def test_links(here: Here) -> None:
    """current and last-good, and a documented path as a link below current; a second run changes nothing."""
    link = here.root.parent / "ml-env"
    includes = [
        {"ansible.builtin.include_role": {"name": "gpuserve.sglang.sglang", "tasks_from": name}}
        for name in ("identify", "activate", "mark_good")
    ]
    play = here.root.parent / "links.yml"
    play.write_text(yaml.safe_dump([{"hosts": "all", "gather_facts": False, "tasks": includes}]))
    variables = {**here.variables, "sglang_links": {str(link): "venv"}}
    first = here.box.play(str(play), **variables)
    assert first.rc == 0, first.failure
    assert len(first.changed) == 3
    (wanted,) = [path for path in here.releases() if json.loads((path / "manifest.json").read_text())["patches"]]
    for path in (here.root / "current", here.root / "last-good", link.parent / "ml-env"):
        assert path.is_symlink()
    assert (here.root / "current").resolve() == (here.root / "last-good").resolve() == wanted
    assert link.resolve() == wanted / "venv"
    assert here.box.play(str(play), **variables).changed == []
    # The switch to another release is one changed link; the documented path follows.
    assert here.box.play(str(play), **{**variables, **NEWER}).changed == [
        "Point current to the release",
        "Point last-good to the release",
    ]
    assert (here.root / "current").resolve() != wanted
    assert link.resolve() == (here.root / "current").resolve() / "venv"


# -- failures, each of which the next run recovers from ------------------------------------------------------------------


def test_the_wrong_order_is_a_wrong_cuda(fresh: Here) -> None:
    steps = default_steps()
    steps[1]["extra_index_urls"] = []
    run = fresh.play(sglang_steps=[steps[1], steps[0], steps[2]])
    assert run.rc != 0
    assert "was built for CUDA 12.8, expected 13.0 (sglang_torch_cuda)" in run.failure
    assert "order" in run.failure
    assert fresh.releases() == []
    run = fresh.play()
    assert run.rc == 0, run.failure
    assert len(list((fresh.root / "releases").glob("[0-9a-f]*"))) == 1, "the rest of the failed build is gone"


def test_another_wheel_than_the_one_that_is_named(fresh: Here) -> None:
    with fresh.index.failing("/kernel/", "other bytes"):
        run = fresh.play()
    assert run.rc != 0
    assert "install the step 'kernel'" in run.failure
    assert "another checksum than the requirement, expected the same bytes" in run.failure
    assert fresh.releases() == []
    run = fresh.play()
    assert run.rc == 0, run.failure


def test_the_network_is_lost_half_way(fresh: Here) -> None:
    with fresh.index.failing("/pypi/files/flashinfer", "drop"):
        run = fresh.play()
    assert run.rc != 0
    assert "install the step 'engine'" in run.failure
    assert "did not answer, expected it to" in run.failure
    assert "The release that serves is untouched; the next run starts over" in run.failure
    assert fresh.releases() == []
    run = fresh.play()
    assert run.rc == 0, run.failure


def test_killed_half_way(fresh: Here, index: Server) -> None:
    """SIGKILL to the play and its module while a wheel comes in; the installer that stays behind is waited for."""
    command = [sys.executable, "-m", "ansible", "playbook"]
    command = [
        str(Path(sys.executable).with_name("ansible-playbook")),
        "-i",
        str(fresh.box.inventory),
        str(fresh.playbook),
    ]
    environment = {**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "ANSIBLE_NOCOLOR": "1"}
    with index.failing("/kernel/", "stall"):
        play = subprocess.Popen(
            [*command, "-e", json.dumps(fresh.variables)], env=environment, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, start_new_session=True, cwd=ROOT,
        )  # fmt: skip
        deadline = time.monotonic() + 120
        index.asked.clear()
        while not any("/kernel/" in path for path in index.asked):
            assert time.monotonic() < deadline and play.poll() is None
            time.sleep(0.1)
        uv = [pid for pid in descendants(play.pid) if command_line(pid)[0].endswith("/bin/uv")]
        others = [pid for pid in descendants(play.pid) if pid not in uv]
        for pid in [play.pid, *others]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        play.wait()
        assert uv, "the installer runs"
        run = fresh.play()
        assert run.rc != 0
        assert "another play builds a release below" in run.failure
        for pid in uv:
            os.kill(pid, signal.SIGKILL)
    (rest,) = (fresh.root / "releases").glob("[0-9a-f]*")
    assert not (rest / "manifest.json").exists()
    run = fresh.play()
    assert run.rc == 0, run.failure
    (looked,) = [e["event_data"] for e in run.of("runner_on_ok") if e["event_data"]["task"] == "Look at the release"]
    assert looked["res"]["release_state"] == "incomplete"


def descendants(pid: int) -> list[int]:
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for known in found:
        found += [child for child, parent in parents.items() if parent == known]
    return found[1:]


def command_line(pid: int) -> list[str]:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0") or [""]
    return [""]


def test_a_full_disk(fresh: Here) -> None:
    """A file system that fills up during the build is left empty again; with room the next run builds."""
    fresh.root.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=50m", "tmpfs", fresh.root], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip(f"this user cannot mount a file system: {mounted.stderr.decode()}")
    try:
        refused = fresh.play()
        assert refused.rc != 0
        assert re.search(
            r"has 0\.\d GB free, expected at least 0\.1 GB for a release \(sglang_min_free_gb\)", refused.failure
        )
        run = fresh.play(sglang_min_free_gb=0)
        assert run.rc != 0
        assert "is full (" in run.failure and "expected room for a release" in run.failure
        assert list((fresh.root / "releases").glob("[0-9a-f]*")) == []
        subprocess.run(["mount", "-o", "remount,size=500m", fresh.root], check=True)
        run = fresh.play()
        assert run.rc == 0, run.failure
    finally:
        subprocess.run(["umount", "--lazy", fresh.root], check=True)


# -- other sources -------------------------------------------------------------------------------------------------------


def from_git(here: Here, commit: str) -> list[dict[str, Any]]:
    steps = default_steps()
    url = (here.index.folder / "git/sglang.git").as_uri()
    source = {"package": "sglang", "url": url, "ref": "v0.5.9", "commit": commit, "subdirectory": "python"}
    steps[1] = {**steps[1], "requirements": [], "git": source}
    return steps


def test_from_git_at_one_commit(fresh: Here) -> None:
    """The tag must be the commit; the patches go into the tree, and what is installed is built from it."""
    commit = (fresh.index.folder / "git/commit").read_text().strip()
    wrong = fresh.play(sglang_steps=from_git(fresh, "bbe9c7eeb"))
    assert wrong.rc != 0
    assert (
        f"v0.5.9 of file://{fresh.index.folder}/git/sglang.git is commit {commit}, expected bbe9c7eeb" in wrong.failure
    )
    assert fresh.releases() == []
    steps = from_git(fresh, commit[:9])
    run = fresh.play(sglang_steps=steps)
    assert run.rc == 0, run.failure
    manifest = result(run)["manifest"]
    assert manifest["packages"]["sglang"] == "0.5.9" and manifest["commits"] == {"engine": commit}
    (release,) = fresh.releases()
    installed, tree = site(release) / PATCHED, release / "source/engine/python" / PATCHED
    assert installed.read_bytes() == tree.read_bytes()
    assert manifest["files"][PATCHED]["sha256"] in resulting(PATCHED)
    assert executions(fresh.play(sglang_steps=steps)) == ["Look at the release"]
    installed.write_text("# by hand\n")
    shutil.move(fresh.index.folder / "git/sglang.git", fresh.index.folder / "git/away.git")
    try:
        # The tree lies in the release: a repair needs no repository.
        run = fresh.play(sglang_steps=steps)
    finally:
        shutil.move(fresh.index.folder / "git/away.git", fresh.index.folder / "git/sglang.git")
    assert run.rc == 0, run.failure
    assert installed.read_bytes() == tree.read_bytes()


def test_a_lock_file_with_hashes(fresh: Here, tmp_path: Path) -> None:
    """One command writes it; a release is built from it, and a wheel with other bytes is refused."""
    variables = tmp_path / "vars.yml"
    variables.write_text(yaml.safe_dump(fresh.variables))
    lock = tmp_path / "locks"
    python = "{}.{}".format(*sys.version_info[:2])
    command = [ROOT / "tools/lock_requirements.py", "--vars", variables, "--python-version", python, lock]
    environment = {**os.environ, "UV_CACHE_DIR": str(tmp_path / "uv-cache"), "NO_PROXY": "127.0.0.1"}
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in lock.iterdir()) == ["engine.txt", "kernel.txt", "torch.txt"]
    torch = (lock / "torch.txt").read_text()
    assert "torch==2.9.1+cu130" in torch and "--hash=sha256:" in torch
    assert "flashinfer-python==0.6.4" in (lock / "engine.txt").read_text(), "the override holds"
    steps = default_steps()
    for step in steps:
        text = (lock / f"{step['name']}.txt").read_text()
        step.update({"requirements": text.split("\n"), "no_deps": True, "overrides": []})
    with fresh.index.failing("/pypi/files/tinydep", "other bytes"):
        wrong = fresh.play(sglang_steps=steps)
    assert wrong.rc != 0
    assert "another checksum than the requirement" in wrong.failure
    # Without torch, which the others ask for: what the file does not name must not come.
    text = re.sub(r"^torch==.*\\\n +--hash\S+$", "", torch, flags=re.MULTILINE)
    assert "torch==" in torch and "torch==" not in text
    wrong = fresh.play(sglang_steps=[{**steps[0], "no_deps": False, "requirements": [text]}, *steps[1:]])
    assert wrong.rc != 0
    assert "needed has no hash in the step, expected one for each" in wrong.failure
    run = fresh.play(sglang_steps=steps)
    assert run.rc == 0, run.failure
    assert result(run)["manifest"]["packages"]["sgl-kernel"] == "0.3.21+cu130"
