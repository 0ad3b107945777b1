"""The proof on real GPUs, as far as it can be tested without one: its steps, its report, its payload, and docs/proof.md."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import plan_cases as cases
import pytest
from ansible_collections.gpuserve.sglang.plugins.module_utils import gpu, gpu_release
from ansible_collections.gpuserve.sglang.plugins.module_utils import host as hosts
from ansible_collections.gpuserve.sglang.plugins.module_utils.plan import launch_plan

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "gpu"))
sys.path.insert(0, str(ROOT / "tools"))

import make_models  # noqa: E402
import payload  # noqa: E402
import proof  # noqa: E402
import proof_docs  # noqa: E402
import read_logs  # noqa: E402
from proof import FAILED, PASSED, SKIPPED, Skip, Step, run_step  # noqa: E402

REPORTS = ROOT / "tests" / "gpu" / "reports"
LOG = ROOT / "tests" / "unit" / "fixtures" / "health" / "cuda-0.5.11-eagle3-start.log"


# ------------------------------------------------------------------------------------------------------------- steps
def claiming(**claims: bool) -> Any:
    def work(step: Step) -> None:
        step.claims |= claims

    return work


def test_a_step_passes_when_all_its_claims_hold() -> None:
    assert run_step(Step("a", "A"), claiming(one=True)).outcome == PASSED
    failed = run_step(Step("a", "A"), claiming(one=True, two=False))
    assert (failed.outcome, failed.reason) == (FAILED, "does not hold: two")


def test_a_step_that_breaks_fails_with_what_was_found_and_without_secrets() -> None:
    def work(step: Step) -> None:
        raise proof.ProofError("no answer to --api-key hunter2")

    step = run_step(Step("a", "A"), work)
    assert step.outcome == FAILED
    assert "no answer" in step.reason
    assert "hunter2" not in step.reason


def test_an_interrupted_step_fails_and_the_run_goes_on_to_its_report() -> None:
    def work(step: proof.Step) -> None:
        raise KeyboardInterrupt

    step = proof.run_step(proof.Step("one", "title"), work)
    assert (step.outcome, step.reason) == (proof.FAILED, proof.INTERRUPTED)


def test_a_step_is_skipped_with_its_reason() -> None:
    def work(step: Step) -> None:
        raise Skip("one deployment only")

    assert run_step(Step("a", "A"), work).as_dict()["reason"] == "one deployment only"
    step = run_step(Step("a", "A"), claiming(one=True), "needs a GPU")
    assert (step.outcome, step.reason, step.claims) == (SKIPPED, "needs a GPU", {})


@pytest.mark.parametrize(
    ("outcomes", "proven"),
    [([PASSED, SKIPPED], True), ([PASSED, FAILED], False), ([SKIPPED], False), ([], False)],
)
def test_a_report_is_proven_when_nothing_failed_and_something_passed(outcomes: list[str], proven: bool) -> None:
    steps = [Step(f"s{n}", "S", outcome) for n, outcome in enumerate(outcomes)]
    assert proof.make_report("small", "cpu", "x", {}, {}, steps)["proven"] is proven


def test_a_report_names_no_machine() -> None:
    gpu = {
        "name": "NVIDIA H200", "uuid": "GPU-1234", "compute_cap": "9.0", "memory_total_mib": 143771, "pci_bus_id": "0:1",
    }  # fmt: skip
    summary = proof.host_summary({"gpus": [gpu, gpu], "driver": {"loaded": "580"}, "os": {"pretty_name": "Ubuntu"}})
    assert summary["gpu_count"] == 2
    assert (summary["gpus"], summary["compute_capability"]) == (["NVIDIA H200"], ["9.0"])
    assert "GPU-1234" not in json.dumps(summary)
    assert proof.host_summary({})["gpu_count"] == 0


def test_a_module_without_options_gets_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ansible takes an empty dictionary for words, and refuses it."""
    called: list[list[str]] = []

    def run(words: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        called.append(words)
        folder = Path(words[words.index("--tree") + 1])
        folder.mkdir()
        (folder / "box").write_text('{"main_pid": 7}')
        return subprocess.CompletedProcess(words, 0, "", "")

    monkeypatch.setattr(proof.subprocess, "run", run)
    ansible = proof.Ansible(tmp_path)
    assert ansible.module("service_info") == {"main_pid": 7}
    ansible.module("service_info", unit="x.service")
    assert ["-a" in words for words in called] == [False, True]


def test_the_recap_is_read() -> None:
    text = "x\nPLAY RECAP *****\nbox : ok=69 changed=10 unreachable=0 failed=0\ntwo : ok=1 changed=2\n"
    assert proof.Play(0, 1.0, text).counts == {"ok": 70, "changed": 12, "unreachable": 0, "failed": 0}


def test_wrong_calls_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--profile", "production"], ["--env", "PYTHONPATH"]):
        with pytest.raises(SystemExit) as ended:
            proof.arguments(words)
        assert ended.value.code == 2
    assert "expected NAME=VALUE" in capsys.readouterr().err


def test_versions_are_compared_as_numbers() -> None:
    assert proof.version_of("0.5.11") >= (0, 5, 10) > proof.version_of("0.5.9")
    assert proof.version_of("0.5.12.post1") == (0, 5, 12)


@pytest.mark.parametrize("case", proof.CASES)
def test_the_plan_of_each_case_is_one_that_the_planner_makes_for_an_h200(case: str, tmp_path: Path) -> None:
    """What the proof asks for on a GPU is refused nowhere, and its memory fits."""
    name, profile, fraction = proof.CASES[case]
    shape = make_models.SHAPES[name]
    target = make_models._config(shape, 366, shape[1], architectures=["LlamaForCausalLM"])
    draft = make_models._config(shape, 366, 1, architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=366)
    speculative = profile != "baseline"
    wanted = {
        "profile": profile,
        "model_path": "/m/target",
        "draft_model_path": "/m/draft" if speculative else "",
        "served_model_name": "proof",
        "overrides": {**proof.CUDA_OVERRIDES, "mem_fraction_static": fraction},
        "python": "/venv/bin/python",
        "patches": [],
    }
    models = {"target": cases.model(target, 300_000_000, "/m/target")}
    if speculative:
        models["draft"] = cases.model(draft, 30_000_000, "/m/draft")
    plan = launch_plan(wanted, cases.h200(1), models)
    assert plan["argv"][plan["argv"].index("--mem-fraction-static") + 1] == str(fraction)
    assert ("--speculative-algorithm" in plan["argv"]) is speculative
    assert plan["budget"]["kv_tokens"] > 100_000
    assert plan["command"][0] == "/venv/bin/python"


# ----------------------------------------------------------------------------------------- steps of the small profile
class FakeAnsible:
    """Answers as given; keeps what it was asked for."""

    def __init__(self, report: dict[str, Any] | None = None, rc: int = 0, **modules: dict[str, Any]) -> None:
        self.report, self.rc, self.modules = report, rc, modules
        self.asked: list[dict[str, Any]] = []

    def play(self, playbook: str, variables: dict[str, Any], *more: str) -> proof.Play:
        self.asked.append(variables)
        if self.report is not None:
            Path(variables["gpu_preflight_report_file"]).write_text(json.dumps(self.report))
        return proof.Play(self.rc, 1.0, "")

    def module(self, name: str, **options: Any) -> dict[str, Any]:
        self.asked.append({"module": name, **options})
        return self.modules[name]


def small(folder: Path, ansible: Any, device: str = "cuda", **more: Any) -> proof.Small:
    return proof.Small(ansible, folder, sys.executable, device, False, {}, 1, 1, **more)


def preflight_report(failed: str = "", lost: str = "") -> dict[str, Any]:
    text = (ROOT / "roles" / "gpu_preflight" / "vars" / "main.yml").read_text()
    names = [name for name in re.findall(r"- id: (\S+)", text) if name not in (failed, lost)]
    failures = [{"id": failed, "message": f"{failed}: found x, expected y"}] if failed else []
    lists: dict[str, Any] = {"failures": failures, "warnings": [{"id": names.pop()}], "waived": [], "skipped": []}
    return {"ok": not failures, "error": None, "passed": names, **lists}


@pytest.mark.parametrize("failed", ["gpu_processes", "driver_supported", "pcie_width", "init_system", ""])
def test_what_the_preflight_finds_on_a_box_is_shown_and_fails_nothing(tmp_path: Path, failed: str) -> None:
    box = small(tmp_path, FakeAnsible(preflight_report(failed), 2 if failed else 0))
    step = run_step(Step("preflight", "P"), box.preflight)
    assert (step.outcome, step.reason) == (PASSED, "")
    assert step.figures["failures"] == ({failed: f"{failed}: found x, expected y"} if failed else {})


@pytest.mark.parametrize(
    ("report", "rc"),
    [
        (preflight_report("pcie_width"), 0),
        (preflight_report(), 2),
        ({**preflight_report("pcie_width"), "ok": True}, 0),
        (preflight_report(lost="pcie_width"), 0),
    ],
)
def test_a_preflight_that_contradicts_itself_fails(tmp_path: Path, report: dict[str, Any], rc: int) -> None:
    assert run_step(Step("preflight", "P"), small(tmp_path, FakeAnsible(report, rc)).preflight).outcome == FAILED


def test_variables_of_the_command_line_reach_the_small_profile(tmp_path: Path) -> None:
    given = proof.arguments(["--extra", "gpu_preflight_min_ram_mib=512", "--extra", "gpuserve_hosts=all"])
    ansible = FakeAnsible(preflight_report())
    box = small(tmp_path, ansible, extra=proof.extra_variables(given.extra))
    box.preflight(Step("preflight", "P"))
    (asked,) = ansible.asked
    assert (asked["gpu_preflight_min_ram_mib"], asked["gpuserve_hosts"]) == (512, "localhost")


#: Writes its title where the arguments were, as the real one does.
SETPROCTITLE = """
import ctypes
def setproctitle(title):
    with open("/proc/self/stat") as file:
        start, end = map(int, file.read().rpartition(")")[2].split()[45:47])
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, title.encode(), len(title))
"""


def test_the_orphan_outlives_its_parent_and_sigterm_and_is_known_by_its_libraries(tmp_path: Path) -> None:
    if hosts.unit_of(os.getpid(), hosts.Roots()):
        pytest.skip("the tests run inside a service, whose processes are no orphans")
    release, modules = tmp_path / "release", tmp_path / "modules"
    for folder in (release, modules):
        folder.mkdir()
    (release / "common_ops.abi3.so").write_bytes(b"x" * 4096)
    (modules / "setproctitle.py").write_text(SETPROCTITLE)
    roots = [str(release)]
    with proof.orphan(sys.executable, "cpu", roots, {"PYTHONPATH": str(modules)}, tmp_path / "log") as pid:
        assert hosts.argv_of(pid, hosts.Roots()) == ["sglang::scheduler_TP0"]
        os.kill(pid, signal.SIGTERM)
        time.sleep(0.2)
        assert proof.left_of([pid]) == [pid]
        scene = gpu_release.look(hosts.Roots(), None, lambda argv: gpu.ToolResult(1, ""), roots)
        kinds = {holder.process.pid: holder.kind for holder in gpu_release.judge(scene, "").holders}
        assert kinds[pid] == "own"
    assert proof.until(lambda: not proof.left_of([pid]), 5) is not None


def test_an_orphan_that_cannot_start_says_why(tmp_path: Path) -> None:
    with (
        pytest.raises(proof.ProofError, match="found no library below"),
        proof.orphan(sys.executable, "cpu", [str(tmp_path)], {}, tmp_path / "log"),
    ):
        raise AssertionError("not reached")


@pytest.mark.parametrize(
    ("alive", "memory", "files", "signals", "outcome"),
    [
        (True, 1000, ["/dev/nvidia0"], ["SIGTERM", "SIGKILL"], PASSED),
        # It died with its parent, as the engine's workers do: nothing was left to be ended.
        (False, 0, [], None, FAILED),
        (True, 0, ["/dev/nvidia0"], ["SIGTERM", "SIGKILL"], FAILED),
        (True, 1000, ["/dev/nvidiactl"], ["SIGTERM", "SIGKILL"], FAILED),
        (True, 1000, ["/dev/nvidia0"], None, FAILED),
    ],
)
def test_the_orphan_is_proven_when_it_held_the_gpu_and_gpu_release_ended_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alive: bool, memory: int, files: list[str], signals: list[str] | None, outcome: str
) -> None:  # fmt: skip
    gone = [4242] if alive else []

    @contextlib.contextmanager
    def orphan(*words: Any) -> Iterator[int]:
        yield 4242

    def left_of(pids: list[int]) -> list[int]:
        # Alive at the first look.
        return [gone.pop()] if gone else []

    used = [[memory], [0]]
    entry = {"pid": 4242, "command": "x", "kind": "own", "reason": "y", "signals": signals}
    answers = [
        {"holders": [{"pid": 4242, "files": files}]},
        {"released": [entry] if signals else []},
        {"holders": []},
    ]
    ansible = FakeAnsible()
    monkeypatch.setattr(ansible, "module", lambda name, **options: answers.pop(0))
    monkeypatch.setattr(proof, "orphan", orphan)
    monkeypatch.setattr(proof, "left_of", left_of)
    monkeypatch.setattr(proof, "gpu_memory", lambda: used.pop(0))
    monkeypatch.setattr(proof.host, "unit_of", lambda pid, roots: None)
    monkeypatch.setattr(proof.time, "sleep", lambda seconds: None)
    step = run_step(Step("orphan", "O"), small(tmp_path, ansible, idle=[0]).after_orphan)
    assert step.outcome == outcome, step.reason
    assert {proof.ORPHAN_HELD, proof.ORPHAN_ENDED} <= set(step.claims)


def test_without_a_gpu_the_orphan_claims_to_hold_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "orphan", lambda *words: contextlib.nullcontext(4242))
    monkeypatch.setattr(proof, "left_of", lambda pids: [])
    monkeypatch.setattr(proof.host, "unit_of", lambda pid, roots: None)
    step = run_step(Step("orphan", "O"), small(tmp_path, FakeAnsible(gpu_release={}), "cpu").after_orphan)
    assert proof.ORPHAN_HELD not in step.claims
    monkeypatch.setattr(proof.host, "unit_of", lambda pid, roots: "ci.service")
    step = run_step(Step("orphan", "O"), small(tmp_path, FakeAnsible(), "cpu").after_orphan)
    assert (step.outcome, "ci.service" in step.reason) == (SKIPPED, True)


def test_a_desktop_that_was_there_before_stays(tmp_path: Path) -> None:
    gpu_of = {"name": "NVIDIA RTX", "memory_total_mib": 1, "compute_cap": "8.9"}
    info = {"gpus": [gpu_of], "notes": [], "driver": {"loaded": "575"}}
    holders = [{"pid": 1, "kind": "foreign"}, {"pid": 2, "kind": "monitor"}]
    ansible = FakeAnsible(gpu_host_info=info, gpu_release={"holders": holders})
    box = small(tmp_path, ansible, "cpu")
    box.host(Step("host", "H"))
    box.released(Step("x", "X"), [])
    assert ansible.asked[-1]["foreign"] == "leave"


# --------------------------------------------------------------------------------------------- the production profile
class FakeBox:
    """A box on which the collection's playbooks do what they say: what serves, and what served before."""

    def __init__(self, folder: Path, fails: str = "", running: int | None = 48) -> None:
        self.fails, self.running = fails, running
        self.played: list[tuple[str, dict[str, Any]]] = []
        self.serves, self.before, self.pid, self.inventory = "", "", 0, "localhost,"

    def __call__(self, work: Path, inventory: str) -> FakeBox:
        return self

    def module(self, name: str, **options: Any) -> dict[str, Any]:
        if name == "service_info":
            return {"main_pid": self.pid, "plan_hash": self.serves if self.pid else ""}
        if name == "model_info":
            return {"weights_bytes": 547}
        return {"gpus": [], "links": {"topology": "pcie"}}

    def play(self, playbook: str | Path, variables: dict[str, Any], *more: str) -> proof.Play:
        name = Path(playbook).stem
        self.played.append((name, variables))
        if name == self.fails:
            return proof.Play(2, 1.0, "fatal: x")
        if name == "site":
            wanted = json.dumps(variables.get("deployment_overrides", "inventory"))
            changed = wanted != self.serves
            if changed:
                self.before, self.serves, self.pid = self.serves, wanted, self.pid + 1
            return proof.Play(0, 1.0, f"PLAY RECAP\nbox : changed={int(changed)}\n")
        if name == "rollback":
            self.before, self.serves, self.pid = self.serves, self.before, self.pid + 1
        if name == "stop":
            self.stopped, self.pid = self.pid, 0
        if name == "start":
            self.pid = self.stopped + 1
        if name == "overrides":
            Path(variables["proof_file"]).write_text('{"schedule_policy": "lpm"}')
        if name == "plan":
            args = {"--tp-size": 8, **({"--max-running-requests": self.running} if self.running else {})}
            plan = {
                "process_hash": '"inventory"', "profile": "p", "engine_version": "0.5.9", "patches": ["a"], "args": args,
                "argv": ["--tp-size", "8"], "model": {"path": "/m"},
            }  # fmt: skip
            Path(variables["plan_file"]).write_text(json.dumps(plan))
        return proof.Play(0, 1.0, "")


def produced(folder: Path, monkeypatch: pytest.MonkeyPatch, box: FakeBox, *words: str) -> dict[str, Any]:
    monkeypatch.setattr(proof, "Ansible", box)
    monkeypatch.setattr(proof, "engine_versions", lambda ansible, hosts: {"sglang": "0.5.9", "torch": "2.9"})
    given = proof.arguments(["--profile", "production", "--inventory", "mine", *words])
    made = proof.production(given, folder)
    made["steps"] = {step["name"]: step for step in made["steps"]}
    return made


def test_a_fresh_box_proves_its_rollback_by_a_second_deployment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = FakeBox(tmp_path)
    made = produced(tmp_path, monkeypatch, box)
    assert {name: step["reason"] for name, step in made["steps"].items() if step["outcome"] != PASSED} == {}
    # The inventory's own overrides stay; one of them differs.
    (second,) = [given for name, given in box.played if name == "site" and "deployment_overrides" in given]
    assert second["deployment_overrides"] == {"schedule_policy": "lpm", "max_running_requests": 47}
    names = list(made["steps"])
    assert names.index("benchmark") < names.index("site-changed") < names.index("rollback")
    assert box.serves == '"inventory"', "the box is left with what its inventory asks for"
    assert made["deployment"] == {
        "profile": "p", "engine_version": "0.5.9", "patches": ["a"], "tp_size": 8, "weights_bytes": 547, "load_format": "auto",
    }  # fmt: skip
    assert made["host"]["topology"] == "pcie"


def test_no_rollback_leaves_the_second_deployment_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    box = FakeBox(tmp_path)
    made = produced(tmp_path, monkeypatch, box, "--no-rollback")
    skipped = {name for name, step in made["steps"].items() if step["outcome"] == SKIPPED}
    assert skipped == {"site-changed", "rollback", "site-after-rollback"}
    assert [name for name, _given in box.played].count("site") == 2
    with pytest.raises(SystemExit):
        proof.arguments(["--help"])
    assert "two loads of the model" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("box", [{"fails": "overrides"}, {"running": None}, {"fails": "plan"}])
def test_without_a_second_deployment_there_is_no_rollback_to_something_older(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, box: dict[str, Any]
) -> None:
    there = FakeBox(tmp_path, **box)
    made = produced(tmp_path, monkeypatch, there)
    assert made["steps"]["rollback"]["outcome"] == SKIPPED
    assert "rollback" not in [name for name, _given in there.played]
    assert made["steps"]["verify-at-the-end"]["outcome"] == PASSED


def test_a_plan_that_is_not_what_serves_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = produced(tmp_path, monkeypatch, FakeBox(tmp_path), "--extra", 'deployment_overrides={"x": 1}')
    assert "started with the plan of the inventory" in made["steps"]["plan"]["reason"]


# ------------------------------------------------------------------------------------------------------------ models
def test_the_next_token_is_known_and_all_tokens_are_one_ring() -> None:
    follows = make_models.next_tokens(40, 6, np.random.default_rng(1))
    seen = make_models.chain(follows, 10, 34)
    assert sorted(seen) == list(range(6, 40))
    assert seen[-1] == 10
    assert all(follows[token] >= 6 for token in range(6))


@pytest.mark.parametrize(("share", "expected"), [(1.0, 2.0), (0.0, 1.0)])
def test_the_acceptance_length_follows_from_the_share(share: float, expected: float) -> None:
    follows = make_models.next_tokens(40, 6, np.random.default_rng(1))
    assert make_models.acceptance(follows, np.full(40, bool(share)), 6) == expected


def test_the_models_answer_as_they_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The residual stream carries the embedding: target and draft, computed by hand from the files."""
    from safetensors.numpy import load_file

    monkeypatch.setattr(make_models, "SHAPES", {"small": (256, 2, 4, 2, 64, 512)})
    made = make_models.make_all(tmp_path)["small"]
    target = load_file(Path(made["target"]) / "model-00001-of-00001.safetensors")
    draft = load_file(Path(made["draft"]) / "model-00001-of-00001.safetensors")

    def normed(hidden: np.ndarray) -> np.ndarray:
        return hidden / np.sqrt(np.mean(hidden**2, axis=1, keepdims=True))

    embedding = target["model.embed_tokens.weight"].astype(np.float32)
    answers = (normed(embedding) @ target["lm_head.weight"].astype(np.float32).T).argmax(axis=1)
    assert answers.tolist() == made["follows"]
    # Three hidden states side by side, as EAGLE-3 hands them over; only the first may count.
    states = np.concatenate([embedding, embedding[::-1], embedding[::-1]], axis=1)
    guesses = (
        normed(states @ draft["fc.weight"].astype(np.float32).T) @ draft["lm_head.weight"].astype(np.float32).T
    ).argmax(1)
    follows = np.array(made["follows"])
    right = guesses == follows[follows]
    assert np.mean(right) == pytest.approx(made["share"], abs=0.03)
    assert made["acceptance"] == pytest.approx(make_models.acceptance(follows, right, made["first"]), abs=0.05)
    index = json.loads((Path(made["target"]) / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(target)


# ----------------------------------------------------------------------------------------------------------- payload
def wheel(folder: Path, name: str, files: dict[str, bytes]) -> Path:
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for member, content in files.items():
            archive.writestr(member, content)
    return path


def test_the_payload_holds_what_is_needed_and_every_dist_info(tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    kept = {"sgl_kernel/sm90/common_ops.abi3.so": b"x", "sglang_kernel-0.4.2.dist-info/METADATA": b"x"}
    left = {
        "sgl_kernel/flash_ops.abi3.so": b"x",
        "sgl_kernel/sm100/common_ops.abi3.so": b"x",
        "sgl_kernel/tests/test_a.py": b"x",
    }
    wheel(wheels, "sglang_kernel", {**kept, **left})
    data = {"other-1.0.data/purelib/other/a.py": b"x", "other-1.0.data/scripts/other": b"x", "other/b.py": b"x"}
    wheel(wheels, "other", data)
    # Ansible's own plug-ins, not its tests.
    plugin = "ansible/plugins/test/core.py"
    wheel(wheels, "ansible_core", {plugin: b"x"})
    wheel(wheels, "sglang", {"sglang/utils.py": b"x", "sglang/test/run_eval.py": b"x"})
    out = tmp_path / "payload.tar.xz"
    assert payload.build(wheels, out) == out.stat().st_size
    with tarfile.open(out) as archive:
        names = {member.name.removeprefix("gpu-payload/") for member in archive if member.isfile()}
    shims = {f"{name.replace('.', '/')}/__init__.py" for name in payload.SHIMS}
    assert names == {*kept, "other/a.py", "other/b.py", plugin, "sglang/utils.py", *shims}


def test_a_payload_that_is_too_large_names_what_makes_it_so(tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    wheel(wheels, "big", {"big/kernels.so": bytes(np.random.default_rng(1).bytes(200_000))})
    with pytest.raises(payload.PayloadError, match=r"expected 0.1 at most[\s\S]*big/kernels.so"):
        payload.build(wheels, tmp_path / "out.tar.xz", limit_mib=0.1)


def test_a_wheel_that_would_write_elsewhere_is_refused(tmp_path: Path) -> None:
    bad = wheel(tmp_path, "bad", {"../../etc/x": b"x"})
    with pytest.raises(payload.PayloadError, match="expected one inside the wheel"):
        payload.unpack(bad, tmp_path / "folder")


def test_every_wheel_of_the_payload_is_pinned() -> None:
    lines = payload.requirements((ROOT / "tests" / "gpu" / "payload.txt").read_text())
    assert len(lines) > 40
    assert [line for line in lines if line.count("==") != 1] == []
    for pinned in ("setproctitle==1.3.8", "sglang==0.5.11", "sglang-kernel==0.4.2", "transformers==5.6.0"):
        assert pinned in lines


# -------------------------------------------------------------------------------------------------- logs and the page
def test_a_log_is_read(tmp_path: Path) -> None:
    found = read_logs.read(LOG)
    assert found["phases"][0] == "distributed init"
    assert found["phases"][-1] == "draft CUDA graphs"
    path = tmp_path / "server.log"
    path.write_text(
        "[2026-11-29 10:00:00] server_args=ServerArgs(model_path='/m', mem_fraction_static=0.75, max_total_tokens=None, "
        "speculative_algorithm='EAGLE3', speculative_eagle_topk=1, disable_overlap_schedule=False)\n"
        "[2026-11-29 10:00:05] Load weight begin. avail mem=139.13 GB\n"
        "[2026-11-29 10:00:06] Load weight end. elapsed=0.56 s, type=L, avail mem=137.63 GB, mem usage=1.50 GB.\n"
        "[2026-11-29 10:00:07] KV Cache is allocated. #tokens: 1684715, K size: 51.41 GB, V size: 51.41 GB\n"
    )
    found = read_logs.read(path)
    wanted = {
        "mem_fraction_static": 0.75,
        "max_total_tokens": None,
        "speculative_algorithm": "EAGLE3",
        "disable_overlap_schedule": False,
    }
    assert {name: found["settings"][name] for name in wanted} == wanted
    assert (found["date"], found["available_gib"], found["weights_gib"]) == ("2026-11-29", 139.13, 1.5)
    assert (found["kv_tokens"], found["kv_gib"], found["ready_line"]) == (1684715, 102.82, False)
    assert found["phases"] == ["starting", "weights", "KV cache"]


def test_the_stored_logs_hold_the_budget_within_five_percent() -> None:
    """Every start whose pool the engine chose: three fractions with speculation, one without, one beside another process."""
    report = proof_docs.load(REPORTS / "h200-engine-logs.json")
    rows = proof_docs.pools(report)
    assert len({row["fraction"] for row in rows}) >= 3
    assert len(rows) >= 6
    assert max(abs(row["off"]) for row in rows) < 0.05


def test_the_page_is_what_the_reports_say() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "proof_docs.py"), "--check"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout


def report(**changes: Any) -> dict[str, Any]:
    steps = [
        Step("sigterm", "GPU release after SIGTERM", PASSED, claims={"gone": True}, figures={"seconds": 3.3}).as_dict()
    ]
    host = {"gpus": ["NVIDIA H200"], "gpu_count": 1, "compute_capability": ["9.0"], "driver": "580"}
    given = proof.make_report("small", "cuda", "this script", host, {"sglang": "0.5.11"}, [])
    return {**given, "when": "2026-12-01T00:00:00Z", "steps": steps, "proven": True, **changes}


def loaded(folder: Path, data: dict[str, Any]) -> proof_docs.Report:
    path = folder / "report.json"
    path.write_text(json.dumps(data))
    return proof_docs.load(path)


def row(title: str, reports: list[proof_docs.Report]) -> str:
    (line,) = [line for line in proof_docs.areas(reports) if title in line]
    return line


def test_a_stored_report_proves_its_steps(tmp_path: Path) -> None:
    title = "GPU release after SIGTERM"
    assert "**not proven**" in row(title, [])
    assert "1 x NVIDIA H200, 2026-12-01" in row(title, [loaded(tmp_path, report())])
    # A rehearsal on a CPU, a failed step and a missing one prove nothing.
    assert "**not proven**" in row(title, [loaded(tmp_path, report(device="cpu"))])
    failed = report()
    failed["steps"][0] |= {"outcome": "failed", "claims": {"gone": False}, "reason": "x"}
    assert "**not proven**" in row(title, [loaded(tmp_path, failed)])
    assert "**not proven**" in row("SIGKILL of the scheduler", [loaded(tmp_path, report())])


def done(*names: str, **more: Any) -> list[dict[str, Any]]:
    """Steps that passed."""
    return [Step(name, name, PASSED, claims={"ok": True}, **more).as_dict() for name in names]


def documented_box() -> dict[str, Any]:
    """The report of a run on the documented box, of which nothing is missing."""
    host = {
        "gpus": ["NVIDIA RTX PRO 6000 Blackwell Server Edition"], "gpu_count": 8, "compute_capability": ["12.0"],
        "topology": "pcie", "driver": "590", "systemd": True,
    }  # fmt: skip
    plan = launch_plan(
        cases.wanted(patches=[p["id"] for p in proof_docs.SERIES["patches"]]), cases.host(), cases.models()
    )
    steps = done("host", *(name for name, _title, _path in proof.PRODUCTION))
    for step in steps:
        if step["name"] == "benchmark":
            step["figures"] = {"benchmark": {str(level): {"failed": 0} for level in (1, 5, 30, 100, 250)}}
    deployment = proof.deployment_summary(plan, {"weights_bytes": 547_000_000_000})
    return report(profile="production", host=host, versions={"sglang": "0.5.9"}, steps=steps, deployment=deployment)


PRODUCTION_ROWS = {
    "systemd": "the unit of systemd on a real GPU",
    "serves": "serves on compute capability 12.0",
    "tp8": "tensor parallel 8 over PCIe",
    "benchmark": "the benchmark of the documented deployment",
    "rollback": "rollback on the documented box",
}


def proven_rows(folder: Path, data: dict[str, Any]) -> set[str]:
    stored = [loaded(folder, data)]
    return {name for name, title in PRODUCTION_ROWS.items() if "**not proven**" not in row(title, stored)}


def test_a_whole_run_on_the_documented_box_proves_every_row_of_it(tmp_path: Path) -> None:
    assert proven_rows(tmp_path, documented_box()) == set(PRODUCTION_ROWS)


def test_one_gpu_of_the_same_generation_proves_nothing_of_the_documented_box(tmp_path: Path) -> None:
    """As it was rendered as proof once: an RTX 5090 with a newer engine, where the stop and the second run had failed."""
    data = documented_box()
    data["host"] |= {"gpus": ["NVIDIA GeForce RTX 5090"], "gpu_count": 1, "topology": "none"}
    data["versions"] = {"sglang": "0.5.11"}
    data.pop("deployment")
    for step in data["steps"]:
        if step["name"] in ("site-again", "stop"):
            step |= {"outcome": "failed", "claims": {"ok": False}, "reason": "x"}
    assert proven_rows(tmp_path, data) == set()


@pytest.mark.parametrize(
    ("part", "change", "lost"),
    [
        ("host", {"compute_capability": ["9.0"]}, {"serves", "tp8", "benchmark", "rollback"}),
        ("host", {"compute_capability": ["12.0", "9.0"]}, {"serves", "tp8", "benchmark", "rollback"}),
        ("host", {"gpu_count": 4}, {"tp8", "benchmark", "rollback"}),
        ("host", {"topology": "nvlink"}, {"tp8", "benchmark", "rollback"}),
        ("host", {"systemd": False}, {"systemd"}),
        ("versions", {"sglang": "0.5.11"}, {"serves", "tp8", "benchmark", "rollback"}),
        ("deployment", {"engine_version": "0.5.11"}, {"serves", "tp8", "benchmark", "rollback"}),
        ("deployment", {"patches": ["kimi-k25-eagle3"]}, {"serves", "tp8", "benchmark", "rollback"}),
        ("deployment", {"tp_size": 4}, {"tp8", "benchmark", "rollback"}),
        ("deployment", {"weights_bytes": 300_000_000}, {"tp8", "benchmark", "rollback"}),
        ("deployment", {"weights_bytes": None}, {"tp8", "benchmark", "rollback"}),
        ("deployment", {"load_format": "dummy"}, {"tp8", "benchmark", "rollback"}),
        ("deployment", {"profile": "baseline"}, {"benchmark"}),
    ],
)
def test_what_a_report_does_not_say_it_does_not_prove(
    tmp_path: Path, part: str, change: dict[str, Any], lost: set[str]
) -> None:
    data = documented_box()
    data[part] |= change
    assert proven_rows(tmp_path, data) == set(PRODUCTION_ROWS) - lost


@pytest.mark.parametrize(
    ("name", "lost"),
    [
        ("site", set(PRODUCTION_ROWS)),
        ("site-again", {"systemd"}),
        ("stop", {"systemd"}),
        ("plan", {"serves", "tp8", "benchmark", "rollback"}),
        ("verify", {"serves", "tp8"}),
        ("benchmark", {"benchmark"}),
        ("site-changed", {"rollback"}),
        ("rollback", {"rollback"}),
    ],
)
def test_every_step_of_a_row_must_have_passed_in_one_report(tmp_path: Path, name: str, lost: set[str]) -> None:
    data = documented_box()
    without = {**data, "steps": [step for step in data["steps"] if step["name"] != name]}
    assert proven_rows(tmp_path, without) == set(PRODUCTION_ROWS) - lost
    # Another report that has just this step does not fill the gap.
    other = loaded(tmp_path, {**data, "steps": done(name)})
    half = loaded(tmp_path, without)
    assert all("**not proven**" in row(PRODUCTION_ROWS[title], [half, other]) for title in lost)


@pytest.mark.parametrize("figures", [{}, {"benchmark": {"1": {"failed": 0}}}])
def test_a_short_benchmark_is_not_that_of_the_record(tmp_path: Path, figures: dict[str, Any]) -> None:
    data = documented_box()
    next(step for step in data["steps"] if step["name"] == "benchmark")["figures"] = figures
    assert proven_rows(tmp_path, data) == set(PRODUCTION_ROWS) - {"benchmark"}


def test_the_stored_reports_prove_no_orphan_and_nccl_only_where_nccl_ran(tmp_path: Path) -> None:
    orphan, taken = "an orphan that still holds the GPU", "taken by NCCL"
    stored = proof_docs.stored()
    assert "**not proven**" in row(orphan, stored)
    assert "h200-small" in row("(everything follows)", stored)
    assert "`nccl-h200-x2.json` |" in row(taken, stored)
    assert "h200-small" not in row(taken, stored)
    assert "h200-small" in row("seen by a new interpreter", stored)
    one_gpu = json.loads((ROOT / "docs" / "data" / "nccl-h200-x2.json").read_text())
    one_gpu["claims"].pop("NCCL's own log names every variable of the block")
    assert "**not proven**" in row(taken, [loaded(tmp_path, one_gpu)])
    claims = {proof.ORPHAN_HELD: True, proof.ORPHAN_ENDED: True}
    step = Step("orphan", "O", PASSED, claims=claims).as_dict()
    assert "2026-12-01" in row(orphan, [loaded(tmp_path, report(steps=[step]))])
    step["claims"].pop(proof.ORPHAN_HELD)
    assert "**not proven**" in row(orphan, [loaded(tmp_path, report(steps=[step]))])


def test_a_parent_that_left_something_is_no_proof_that_everything_follows(tmp_path: Path) -> None:
    (step,) = done("parent-killed", figures={"gpu_release": {"released": [{"command": "sglang::scheduler"}]}})
    assert "**not proven**" in row("(everything follows)", [loaded(tmp_path, report(steps=[step]))])


def test_figures_and_hashes_are_on_the_page(tmp_path: Path) -> None:
    stored = loaded(tmp_path, report())
    assert stored.digest in "\n".join(proof_docs.files([stored]))
    assert "seconds: 3.3" in "\n".join(proof_docs.steps([stored]))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schema": 2}, "schema 1"),
        ({"profile": "large"}, "unknown kind"),
        ({"steps": [{**Step("a", "A", PASSED).as_dict(), "claims": {"x": False}}]}, "claim that does not hold"),
        ({"steps": [Step("a", "A", "done").as_dict()]}, "outcome 'done'"),
        ({"steps": [Step("a", "A", SKIPPED).as_dict()]}, "without a reason"),
    ],
)
def test_a_report_that_is_none_is_refused(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    with pytest.raises(proof_docs.DocsError, match=words):
        loaded(tmp_path, report(**change))
    (tmp_path / "text.json").write_text("no")
    with pytest.raises(proof_docs.DocsError, match="found no JSON"):
        proof_docs.load(tmp_path / "text.json")
