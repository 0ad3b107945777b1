# Copyright (c) The gpuserve.sglang authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Prove on this GPU box what the collection says it does, and write a JSON report.

    make gpu-proof                                        a small model made here, the engine supervised by this script
    make gpu-proof PROFILE=production INVENTORY=inventories/mine
                                                          the deployment of an inventory: site.yml, verify, benchmark, stop, start, a
                                                          second deployment, rollback, with the collection's own playbooks

    python tests/gpu/proof.py [--profile small|production] [--out FILE] ...

small: everything goes through Ansible with a local connection - gpu_host_info, gpu_preflight, nccl, the plan for this host, the
gate, gpu_release -, and the real engine is started from the plan with models whose every answer is known. There need not be a
systemd: this script starts the server in its place, and the report says so. Needs ansible-core and jmespath for the Python that
runs it, and --python with SGLang and torch (default: the same). Root, since owners of device files must be seen.
  --device cpu   rehearses the same steps without a GPU; what needs one is skipped, with the reason
  --leave-host   skips the steps that change the host and take their change back (nccl)

Exit status: 0 all that was not skipped holds, 1 something does not (the report says what), 2 wrong call.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import datetime
import itertools
import json
import os
import pwd
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
COLLECTIONS = ROOT / "collections"
sys.path.insert(0, str(COLLECTIONS))

from ansible_collections.gpuserve.sglang.plugins.module_utils import health, host, metrics  # noqa: E402

SCHEMA = 1
PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
#: Reason of a step that Ctrl-C ended; the steps after it are skipped, and the report is written.
INTERRUPTED = "interrupted"
#: Also where ansible-core was unpacked without an installer that makes its commands.
ADHOC = (sys.executable, "-m", "ansible", "adhoc")
PLAYBOOK = (sys.executable, "-m", "ansible", "playbook")
SMI = ("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits")
#: Answers of so many tokens are compared token by token.
ANSWER_TOKENS = 64
#: A server that hangs must not hang the proof (s).
PLAY_TIMEOUT = 3600
VERSIONS = """
import importlib.metadata as m, json, os, sys
def version(name):
    try:
        return m.version(name)
    except m.PackageNotFoundError:
        return None
names = ("sglang", "torch", "flashinfer_python", "sglang-kernel", "sgl-kernel", "transformers", "triton")
found = {"python": "%d.%d.%d" % sys.version_info[:3], **{n: version(n) for n in names}}
import importlib.util as u
roots = set()
for name in ("sglang", "sgl_kernel"):
    spec = u.find_spec(name)
    if spec and spec.origin:
        roots.add(os.path.dirname(os.path.dirname(os.path.realpath(spec.origin))))
print(json.dumps({"versions": found, "roots": sorted(roots)}))
"""

#: What tools/proof_docs.py looks for.
ORPHAN_HELD = "an orphan was left holding the GPU"
ORPHAN_ENDED = "gpu_release ended it"
#: Memory that the orphan takes (MiB).
ORPHAN_MIB = 512
#: A worker that outlives its parent, as one does that a wedged driver keeps: SIGTERM does not end it, it holds memory of a GPU,
#: and it has a worker's title and a library of the release. Arguments: device, MiB, folders of the release.
ORPHAN = """
import glob, mmap, os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
device, mib, roots = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
if device == "cuda":
    import torch
    held = torch.zeros(mib << 20, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
found = (path for root in roots for path in glob.iglob(root + "/**/*.so*", recursive=True))
library = next((path for path in found if os.path.getsize(path) and os.path.realpath(path) == path), None)
if library is None:
    sys.exit("found no library below " + " ".join(roots) + ", expected those of the engine's packages")
with open(library, "rb") as file:
    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
import setproctitle
setproctitle.setproctitle("sglang::scheduler_TP0")
print("ready", os.getpid(), flush=True)
time.sleep(900)
"""
#: Starts the worker and waits for it: whom SIGKILL ends.
PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', *sys.argv[1:]])"


class ProofError(Exception):
    """Ends a step: what was found and what was expected."""


class Skip(Exception):
    """The step cannot run here; its text is the reason."""


# ------------------------------------------------------------------------------------------------------------ report
@dataclass
class Step:
    """One part of the proof. C(claims) are sentences with their truth; C(figures) is what was measured."""

    name: str
    title: str
    outcome: str = SKIPPED
    reason: str = ""
    seconds: float = 0.0
    claims: dict[str, bool] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "title": self.title,
            "outcome": self.outcome,
            "reason": self.reason,
            "seconds": round(self.seconds, 1),
            "claims": self.claims,
            "figures": self.figures,
        }


def run_step(step: Step, work: Callable[[Step], None], missing: str = "") -> Step:
    """Run C(work), or skip the step because of C(missing). A claim that does not hold fails the step."""
    began = time.monotonic()
    if missing:
        step.reason = missing
        return step
    try:
        work(step)
        wrong = [claim for claim, holds in step.claims.items() if not holds]
        step.outcome = FAILED if wrong else PASSED
        step.reason = "; ".join(f"does not hold: {claim}" for claim in wrong)
    except Skip as reason:
        step.outcome, step.reason = SKIPPED, str(reason)
    except KeyboardInterrupt:
        step.outcome, step.reason = FAILED, INTERRUPTED
    except (ProofError, OSError, subprocess.SubprocessError, ValueError, KeyError) as error:
        step.outcome, step.reason = FAILED, health.scrub(f"{type(error).__name__}: {error}")
    step.seconds = time.monotonic() - began
    return step


def commit() -> str:
    """Of this checkout; GPUSERVE_COMMIT names that of a tree that was copied without its history."""
    if given := os.environ.get("GPUSERVE_COMMIT"):
        return given
    words = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip() or "not a checkout"
    except OSError:
        return "not known: no git here"


def collection_version() -> str:
    found = re.search(r"^version:\s*(\S+)", (ROOT / "galaxy.yml").read_text(encoding="utf-8"), re.MULTILINE)
    return found.group(1) if found else ""


def make_report(
    profile: str,
    device: str,
    supervisor: str,
    host: Mapping[str, Any],
    versions: Mapping[str, Any],
    steps: Sequence[Step],
    deployment: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The report. C(proven) is true when no step failed and at least one passed."""
    outcomes = [step.outcome for step in steps]
    return {
        "schema": SCHEMA,
        "when": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "profile": profile,
        "device": device,
        "supervisor": supervisor,
        "collection": {"version": collection_version(), "commit": commit()},
        "host": dict(host),
        "versions": dict(versions),
        **({"deployment": dict(deployment)} if deployment else {}),
        "steps": [step.as_dict() for step in steps],
        "proven": FAILED not in outcomes and PASSED in outcomes,
    }


def host_summary(info: Mapping[str, Any]) -> dict[str, Any]:
    """What a report says about a machine: no addresses, no names, no serial numbers."""
    gpus = info.get("gpus") or []
    driver = info.get("driver") or {}
    return {
        "gpus": sorted({str(gpu["name"]) for gpu in gpus}),
        "gpu_count": len(gpus),
        "compute_capability": sorted({str(gpu["compute_cap"]) for gpu in gpus if gpu.get("compute_cap")}),
        "memory_mib": min((gpu["memory_total_mib"] for gpu in gpus if gpu.get("memory_total_mib")), default=None),
        "topology": (info.get("links") or {}).get("topology"),
        "driver": driver.get("loaded"),
        "toolkits": [str(entry.get("version")) for entry in info.get("toolkits") or []],
        "os": (info.get("os") or {}).get("pretty_name"),
        "systemd": info.get("init_system") == "systemd",
    }


# ----------------------------------------------------------------------------------------------------------- ansible
class Ansible:
    """Modules and playbooks of this checkout, on this machine or on the hosts of an inventory."""

    def __init__(self, work: Path, inventory: str = "localhost,") -> None:
        self.work, self.inventory = work, inventory
        self.local = inventory == "localhost,"
        self.environment = {
            **os.environ,
            "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
            "ANSIBLE_COLLECTIONS_PATH": str(COLLECTIONS),
            "ANSIBLE_NOCOLOR": "1",
            "LC_ALL": "C.UTF-8",
        }
        self._calls = 0

    def _where(self) -> list[str]:
        words = ["-i", self.inventory]
        if self.local:
            words += ["-c", "local", "-e", "ansible_become=false", "-e", f"ansible_python_interpreter={sys.executable}"]
        return words

    def module(self, name: str, hosts: str = "localhost", check: bool = False, **options: Any) -> dict[str, Any]:
        """The module's result, whether it failed or not."""
        self._calls += 1
        tree = self.work / f"call-{self._calls}"
        words = [*ADHOC, *self._where(), hosts, "-m", f"gpuserve.sglang.{name}"]
        # Ansible takes an empty dictionary for words.
        words += ["-a", json.dumps(options)] if options else []
        words += ["--tree", str(tree), *(["--check"] if check else [])]
        done = subprocess.run(
            words, env=self.environment, cwd=ROOT, capture_output=True, text=True, check=False, timeout=PLAY_TIMEOUT
        )
        files = sorted(tree.iterdir()) if tree.is_dir() else []
        if not files:
            raise ProofError(f"{name} gave no result: {(done.stdout + done.stderr).strip()[-800:]}")
        result: dict[str, Any] = json.loads(files[0].read_text(encoding="utf-8"))
        return result

    def play(self, playbook: str | Path, variables: Mapping[str, Any] | None = None, *more: str) -> Play:
        """Run a playbook; its exit status, time and counts."""
        self._calls += 1
        extra = self.work / f"extra-{self._calls}.json"
        extra.write_text(json.dumps(dict(variables or {})))
        began = time.monotonic()
        done = subprocess.run(
            [*PLAYBOOK, *self._where(), str(playbook), "-e", f"@{extra}", *more],
            env=self.environment, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
            timeout=PLAY_TIMEOUT,
        )  # fmt: skip
        return Play(done.returncode, time.monotonic() - began, done.stdout + done.stderr)


@dataclass
class Play:
    """How a playbook ended."""

    rc: int
    seconds: float
    output: str

    @property
    def counts(self) -> dict[str, int]:
        """Sums of the recap's numbers over its hosts."""
        found: dict[str, int] = {}
        for line in self.output.rpartition("PLAY RECAP")[2].splitlines():
            for name, number in re.findall(r"(\w+)=(\d+)", line):
                found[name] = found.get(name, 0) + int(number)
        return found

    def tail(self) -> str:
        words = [line for line in self.output.splitlines() if re.search(r"fatal|FAILED|ERROR|msg", line)]
        return health.scrub(" ".join((words or self.output.splitlines())[-6:]))[-1500:]


# ------------------------------------------------------------------------------------------------------------ server
@dataclass
class Server:
    """The engine, started from a plan in the place of systemd: its own session, its log in a file."""

    plan: Mapping[str, Any]
    log: Path
    environment: Mapping[str, str]
    extra: Sequence[str] = ()
    process: subprocess.Popen[bytes] | None = None
    began: float = 0.0
    phases: list[tuple[float, str]] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        words = [*self.plan["command"], *self.extra]
        given = {str(name): str(value) for name, value in self.plan["env"].items()}
        environment = {**os.environ, **given, **self.environment, "GPUSERVE_PLAN": str(self.plan["process_hash"])}
        self.began = time.monotonic()
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env=environment, cwd=self.log.parent,
                start_new_session=True,
            )  # fmt: skip
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        """When the log shows which phase: what the gate's progress would show."""
        while not self._stop.wait(0.5):
            phase = health.phase_name(str(health.parse_progress(self.lines())))
            if phase and (not self.phases or self.phases[-1][1] != phase):
                self.phases.append((round(time.monotonic() - self.began, 1), phase))

    def lines(self) -> list[str]:
        try:
            return self.log.read_text(encoding="utf-8", errors="replace").split("\n")
        except OSError:
            return []

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def kv_tokens(self) -> int | None:
        """The pool that the engine says it has."""
        found = re.findall(r"max_total_num_tokens=(\d+)", "\n".join(self.lines()))
        return int(found[-1]) if found else None

    def family(self) -> list[int]:
        return [self.pid, *sorted(health.descendants(self.pid))]

    def scheduler(self) -> int:
        """The worker that holds the model."""
        for pid in self.family():
            with contextlib.suppress(OSError):
                title = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if title.startswith("sglang::scheduler"):
                    return pid
        raise ProofError("no process calls itself sglang::scheduler, expected the engine's worker")

    def wait(self, seconds: float) -> int | None:
        """Exit status (negative: the signal); None when it still runs."""
        assert self.process is not None
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def end(self) -> None:
        """Whatever is left of what this script started; nothing else."""
        self._stop.set()
        if self.process is None:
            return
        for pid in reversed(self.family()):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)


def left_of(pids: Sequence[int]) -> list[int]:
    """Those of C(pids) that are there and are no zombies."""
    left = []
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            continue
        if state not in ("Z", "X"):
            left.append(pid)
    return left


def until(condition: Callable[[], bool], seconds: float) -> float | None:
    """Seconds until the condition came true; None when it did not."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > seconds:
            return None
        time.sleep(0.05)
    return round(time.monotonic() - began, 2)


@contextlib.contextmanager
def orphan(python: str, device: str, roots: Sequence[str], environment: Mapping[str, str], log: Path) -> Iterator[int]:
    """The number of a worker whose parent was killed with SIGKILL; gone afterwards."""
    with log.open("wb") as out:
        parent = subprocess.Popen(
            [python, "-c", PARENT, ORPHAN, device, str(ORPHAN_MIB), *roots], stdin=subprocess.DEVNULL, stdout=out,
            stderr=subprocess.STDOUT, env={**os.environ, **environment}, start_new_session=True,
        )  # fmt: skip

    def ready() -> list[str]:
        return re.findall(r"^ready (\d+)$", log.read_text(errors="replace"), re.MULTILINE)

    try:
        until(lambda: bool(ready()) or parent.poll() is not None, 300)
        if not ready():
            raise ProofError(f"the orphan did not start: {log.read_text(errors='replace').strip()[-600:]}")
        parent.kill()
        parent.wait()
        yield int(ready()[0])
    finally:
        # Before the parent is read it is there for its children to be found.
        family = health.descendants(parent.pid) if parent.returncode is None else {int(pid) for pid in ready()}
        for pid in left_of(sorted(family)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        parent.wait()


def gpu_memory() -> list[int]:
    """MiB in use on each GPU; empty where there is no nvidia-smi."""
    try:
        done = subprocess.run(SMI, capture_output=True, text=True, check=False, timeout=30)
    except OSError:
        return []
    return [int(line) for line in done.stdout.split() if line.isdigit()] if done.returncode == 0 else []


def ask(port: int, path: str, body: Mapping[str, Any] | None = None, timeout: float = 300) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", data=data, headers={"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return json.loads(answer.read() or b"null")
    except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
        raise ProofError(f"{path} of the server did not answer: {error}") from error


def free_port() -> int:
    """A port that nobody listens on. Some engines take port + 10000 as well, so it is none of the ephemeral ones."""
    for port in random.sample(range(20000, 30000), 50):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise ProofError("found no free port among 50 of 20000 to 29999, expected one")


# -------------------------------------------------------------------------------------------------- the small profile
#: Settings of the plan for a small model on one GPU. 0.5.11 and newer have a piecewise graph that costs minutes of compilation.
CUDA_OVERRIDES: dict[str, Any] = {
    "tp_size": 1,
    "attention_backend": "flashinfer",
    "cuda_graph_max_bs": 32,
    "max_running_requests": 32,
    "grammar_backend": "none",
    "enable_flashinfer_allreduce_fusion": False,
}
#: case: (model, profile on a GPU, memory fraction). Two models, two fractions.
CASES = {
    "baseline": ("large", "baseline", 0.85),
    "eagle3": ("small", "eagle3-topk1-v2", 0.7),
    "orphans": ("large", "eagle3-topk1-v2", 0.7),
    "stop": ("small", "baseline", 0.85),
}


@dataclass
class Small:
    """What the steps of the small profile share."""

    ansible: Ansible
    work: Path
    python: str
    device: str
    leave_host: bool
    environment: dict[str, str]
    ready_timeout: float
    bench_prompts: int
    #: From the command line; what a step needs to be itself wins over it.
    extra: Mapping[str, Any] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, Any] = field(default_factory=dict)
    roots: list[str] = field(default_factory=list)
    models: dict[str, Any] = field(default_factory=dict)
    idle: list[int] = field(default_factory=list)
    #: Processes of others that used a GPU before anything was started, such as a desktop: they stay.
    others: int = 0
    rates: dict[str, dict[str, float]] = field(default_factory=dict)
    server: Server | None = None
    port: int = 0

    # --- the host
    def host(self, step: Step) -> None:
        self.info = self.ansible.module("gpu_host_info", interpreters=[self.python], paths=[str(self.work)])
        if "gpus" not in self.info:
            raise ProofError(f"gpu_host_info: {self.info.get('msg')}")
        self.idle = gpu_memory()
        holders = self.ansible.module("gpu_release", unit="").get("holders") or []
        self.others = sum(1 for holder in holders if holder["kind"] == "foreign")
        step.figures = {**host_summary(self.info), "notes": self.info["notes"], "others_on_the_gpus": self.others}
        step.claims["gpu_host_info reads this host"] = True
        if self.device == "cuda":
            step.claims["it found GPUs with name, memory and compute capability"] = bool(self.info["gpus"]) and all(
                gpu["name"] and gpu["memory_total_mib"] and gpu["compute_cap"] for gpu in self.info["gpus"]
            )
            step.claims["it found the driver"] = bool((self.info.get("driver") or {}).get("loaded"))

    def preflight(self, step: Step) -> None:
        report = self.work / "preflight.json"
        gpus = self.info.get("gpus") or []
        variables = {
            "gpu_preflight_require_gpus": self.device == "cuda",
            "gpu_preflight_gpu_count": len(gpus),
            "gpu_preflight_interpreters": [self.python],
            "gpu_preflight_min_ram_mib": 4096,
            "gpu_preflight_min_disk_gib": 1,
            "gpu_preflight_ports": [],
            **self.extra,
            "gpuserve_hosts": "localhost",
            "gpu_preflight_report_file": str(report),
        }
        play = self.ansible.play("playbooks/preflight.yml", variables)
        if not report.exists():
            raise ProofError(f"the preflight gave no report: {play.tail()}")
        found = json.loads(report.read_text())
        names = (ROOT / "roles" / "gpu_preflight" / "vars" / "main.yml").read_text(encoding="utf-8")
        outcomes = collections.Counter(
            entry if isinstance(entry, str) else entry["id"]
            for key in ("passed", "failures", "warnings", "waived", "skipped")
            for entry in found[key]
        )
        step.figures = {
            "exit_status": play.rc,
            "passed": len(found["passed"]),
            "failures": {
                entry["id"]: health.scrub(entry["message"]).replace(socket.gethostname(), "HOST")
                for entry in found["failures"]
            },
            "warnings": [entry["id"] for entry in found["warnings"]],
        }
        # What it finds is about this box: a desktop, another driver or a narrow slot say nothing against the preflight.
        step.claims["it gives a report, and its exit status agrees"] = play.rc == (0 if found["ok"] else 2)
        step.claims["it is fit exactly when no check failed"] = found["ok"] == (not found["failures"])
        checks = re.findall(r"^  - id: (\S+)", names, re.MULTILINE)
        step.claims["every check has one outcome"] = bool(checks) and all(outcomes[name] == 1 for name in checks)

    def nccl(self, step: Step) -> None:
        if self.leave_host:
            raise Skip("writes this host's sitecustomize.py and takes it back; --leave-host was given")
        play = self.work / "nccl.yml"
        play.write_text(
            "- hosts: localhost\n  gather_facts: false\n  roles: [gpuserve.sglang.nccl]\n  post_tasks:\n"
            "    - ansible.builtin.copy: {content: '{{ nccl_result | to_json }}', dest: '{{ result_file }}', mode: '0644'}\n"
            "      check_mode: false\n"
        )

        def role(name: str, *more: str, **variables: Any) -> dict[str, Any]:
            file = self.work / f"nccl-{name}.json"
            done = self.ansible.play(
                play, {**self.extra, "nccl_interpreter": self.python, "result_file": str(file), **variables}, *more
            )
            if not file.exists():
                raise ProofError(f"the role nccl ({name}): {done.tail()}")
            result: dict[str, Any] = json.loads(file.read_text())
            return result

        def target() -> str:
            path = role("where", "--check")["path"]
            return Path(path).read_text(encoding="utf-8") if Path(path).exists() else ""

        before = target()
        try:
            first = role("first", nccl_topology="pcie")
            again = role("again", nccl_topology="pcie")
            seen = subprocess.run(
                [self.python, "-c", "import json, os; print(json.dumps(dict(os.environ)))"],
                capture_output=True, text=True, check=True,
                env={name: value for name, value in os.environ.items() if not name.startswith("NCCL_")},
            )  # fmt: skip
        finally:
            role("absent", nccl_state="absent")
        environment = json.loads(seen.stdout)
        wanted = {name: value for name, value in first["environment"].items() if name.startswith("NCCL_")}
        step.figures = {"variables": wanted}
        step.claims["the block is written once, and a second run changes nothing"] = (
            first["changed"] and not again["changed"]
        )
        step.claims["a new interpreter has the variables"] = bool(wanted) and all(
            environment.get(name) == value for name, value in wanted.items()
        )
        step.claims["taking it out restores the file"] = target() == before

    # --- the engine
    def engine(self, step: Step) -> None:
        done = subprocess.run(
            [self.python, "-c", VERSIONS], capture_output=True, text=True, check=False, timeout=300,
            env={**os.environ, **self.environment},
        )  # fmt: skip
        if done.returncode != 0:
            raise ProofError(f"{self.python}: {done.stderr.strip()[-600:]}")
        answer = json.loads(done.stdout)
        self.versions = {name: version for name, version in answer["versions"].items() if version}
        self.roots = answer["roots"]
        step.figures = self.versions
        step.claims["the interpreter has SGLang and torch"] = bool(
            self.versions.get("sglang") and self.versions.get("torch")
        )

    def make_models(self, step: Step) -> None:
        folder = self.work / "models"
        done = subprocess.run(
            [self.python, str(ROOT / "tests" / "gpu" / "make_models.py"), str(folder)],
            capture_output=True, text=True, check=False, timeout=600, env={**os.environ, **self.environment},
        )  # fmt: skip
        if done.returncode != 0:
            raise ProofError(f"make_models.py: {done.stderr.strip()[-600:]}")
        self.models = json.loads((folder / "models.json").read_text())
        step.figures = {
            name: {key: model[key] for key in ("weights_bytes", "acceptance", "share")}
            for name, model in self.models.items()
        }
        step.claims["two targets and their drafts were made"] = len(self.models) == 2

    def model_of(self, case: str) -> str:
        """Two models on a GPU; the smaller one does where only the steps are rehearsed."""
        return CASES[case][0] if self.device == "cuda" else "small"

    def plan_for(self, case: str) -> dict[str, Any]:
        """The plan that the collection makes for this host, through its own role and filter."""
        _name, profile, fraction = CASES[case]
        model = self.models[self.model_of(case)]
        cuda = self.device == "cuda"
        file = self.work / f"plan-{case}.json"
        self.port = free_port()
        overrides: dict[str, Any] = {**CUDA_OVERRIDES, "mem_fraction_static": fraction} if cuda else {}
        variables = {
            "sglang_torch_cuda": "13.0" if cuda else "none",
            "deployment_cache_dir": os.environ.get("GPUSERVE_PROOF_CACHE", str(self.work / "cache")),
            # The engine is started from here, not by the unit, and the models lie in a folder of this user's own.
            "deployment_unit": {"user": pwd.getpwuid(os.geteuid()).pw_name},
        }
        if toolkits := [entry["path"] for entry in self.info.get("toolkits") or [] if entry.get("nvcc")]:
            variables["deployment_cuda_home"] = toolkits[-1]
        variables |= self.extra
        variables |= {
            "gpuserve_hosts": "localhost",
            "deployment_profile": profile if cuda else "cpu",
            "deployment_model_path": model["target"],
            "deployment_draft_model_path": model["draft"] if cuda and profile != "baseline" else "",
            "deployment_served_model_name": "proof",
            "deployment_port": self.port,
            "deployment_python": self.python,
            "deployment_overrides": overrides,
            "deployment_state_dir": str(self.work / "state"),
            "plan_file": str(file),
        }
        play = self.ansible.play("playbooks/plan.yml", variables)
        if play.rc != 0 or not file.exists():
            raise ProofError(f"the plan ({case}): {play.tail()}")
        plan: dict[str, Any] = json.loads(file.read_text())
        return plan

    def launch(self, case: str, step: Step) -> Server:
        """Plan, start, gate. The server is left running in self.server."""
        plan = self.plan_for(case)
        for folder in (plan["paths"]["state"], plan["paths"]["cache"]):
            Path(folder).mkdir(parents=True, exist_ok=True)
        extra = []
        if self.device == "cuda" and version_of(self.versions.get("sglang", "0")) >= (0, 5, 10):
            extra = ["--disable-piecewise-cuda-graph"]
        server = self.server = Server(plan, self.work / f"server-{case}.log", self.environment, extra)
        server.start()
        gate = self.ansible.module(
            "health_gate", unit="", pid=server.pid, port=self.port, timeout=self.ready_timeout, generation_timeout=300
        )
        step.figures |= {
            "profile": plan["profile"],
            "flags": " ".join(plan["argv"]).replace(str(self.work), "WORK"),
            "added_by_this_script": extra,
            "seconds_to_ready": round(float(gate.get("elapsed") or 0), 1),
            "first_generation_s": (gate.get("generation") or {}).get("seconds"),
            "phases": [{"at_s": at, "phase": phase} for at, phase in server.phases],
        }
        step.claims["the gate says ready, with one sampled generation"] = gate.get("ready") is True
        if not gate.get("ready"):
            raise ProofError(f"the gate ended with {gate.get('state')}: {str(gate.get('msg'))[-1200:]}")
        self.answers(self.model_of(case), step)
        self.kv(plan, server, step)
        return server

    def answers(self, name: str, step: Step) -> None:
        """Every token of an answer is known: weights that were loaded wrong, or a bad kernel, cannot give it."""
        model = self.models[name]
        token = int(model["first"])
        wanted = []
        for _number in range(ANSWER_TOKENS):
            wanted.append(int(model["follows"][wanted[-1] if wanted else token]))
        sampling = {"temperature": 0, "max_new_tokens": ANSWER_TOKENS, "ignore_eos": True}
        answer = ask(self.port, "/generate", {"input_ids": [1, token], "sampling_params": sampling})
        found = answer.get("output_ids")
        right = sum(1 for one, two in zip(found or [], wanted, strict=False) if one == two)
        step.figures["known_tokens_right"] = f"{right} of {ANSWER_TOKENS}"
        step.claims["the answer is the known one, token by token"] = found == wanted

    def kv(self, plan: Mapping[str, Any], server: Server, step: Step) -> None:
        predicted, actual = plan["budget"]["kv_tokens"], server.kv_tokens
        step.figures["kv_tokens"] = {"planned": predicted, "engine": actual}
        if not predicted or not actual:
            step.claims["the engine logs its KV pool, and the plan has one"] = False
            return
        if self.device != "cuda":
            # On a CPU the pool is given, not computed.
            return
        off = predicted / actual - 1
        step.figures["kv_tokens"]["off_percent"] = round(off * 100, 2)
        step.claims["the planned KV pool is within 5 % of the engine's"] = abs(off) <= 0.05

    def bench(self, case: str, step: Step) -> None:
        """The engine's own benchmark, one line for each concurrency."""
        file = self.work / f"bench-{case}.jsonl"
        rates = {}
        for concurrency in (1, 8) if self.device == "cuda" else (1,):
            prompts = self.bench_prompts * (1 if concurrency == 1 else 4)
            words = [
                self.python, "-m", "sglang.bench_serving", "--backend", "sglang", "--host", "127.0.0.1", "--port", str(self.port),
                "--model", self.models[self.model_of(case)]["target"], "--dataset-name", "random-ids", "--random-input-len", "32",
                "--random-output-len", "128", "--random-range-ratio", "1", "--num-prompts", str(prompts),
                "--max-concurrency", str(concurrency), "--output-file", str(file), "--disable-tqdm",
            ]  # fmt: skip
            done = subprocess.run(
                words, capture_output=True, text=True, check=False, timeout=900, cwd=self.work,
                env={**os.environ, "HF_HUB_OFFLINE": "1", **self.environment},
            )  # fmt: skip
            if not file.exists():
                raise ProofError(f"bench_serving: {(done.stdout + done.stderr).strip()[-800:]}")
            line = json.loads(file.read_text().splitlines()[-1])
            step.claims[f"all requests of {concurrency} at a time completed"] = line["completed"] == prompts
            rates[str(concurrency)] = round(float(line["output_throughput"]), 1)
            step.figures["accept_length"] = line.get("accept_length")
        step.figures["output_tok_s"] = rates
        self.rates[case] = rates

    # --- release
    def released(
        self, step: Step, before: Sequence[int], servers: Sequence[Mapping[str, Any]] = ()
    ) -> list[dict[str, Any]]:
        """gpu_release ends what is left, and the device files and the memory are looked at without it. What was ended."""
        found = self.ansible.module(
            "gpu_release", state="released", unit="", roots=self.roots, servers=list(servers), term_timeout=30,
            foreign="leave" if self.others else "refuse",
        )  # fmt: skip
        step.figures["gpu_release"] = {
            "msg": found.get("msg"),
            "seconds": found.get("seconds"),
            "released": [
                {key: entry[key] for key in ("command", "kind", "reason", "signals")}
                for entry in found.get("released") or []
            ],
        }
        step.claims["gpu_release ends without a failure"] = not found.get("failed")
        step.claims["no process of the server is left"] = not left_of(before)
        if self.device == "cuda":
            now = gpu_memory()
            step.figures["memory_mib"] = {"idle": self.idle, "after": now}
            step.claims["the memory of every GPU is back"] = bool(now) and all(
                used <= idle + 512 for used, idle in zip(now, self.idle, strict=True)
            )
            holders = self.ansible.module("gpu_release", unit="", roots=self.roots)["holders"]
            step.claims["no device file is held by the server"] = not ({h["pid"] for h in holders} & set(before))
        if self.server is not None:
            with socket.socket() as probe:
                probe.settimeout(1)
                step.claims["the port is closed"] = probe.connect_ex(("127.0.0.1", self.port)) != 0
        ended: list[dict[str, Any]] = found.get("released") or []
        return ended

    def finish(self) -> None:
        if self.server is not None:
            self.server.end()
            self.server = None

    def running(self) -> Server:
        if self.server is None or self.server.wait(0) is not None:
            raise Skip("no server runs: the step before did not start one")
        return self.server

    def baseline(self, step: Step) -> None:
        self.launch("baseline", step)
        self.bench("baseline", step)

    def after_sigterm(self, step: Step) -> None:
        server = self.running()
        before = server.family()
        step.figures["memory_mib_serving"] = gpu_memory()
        server.process.send_signal(signal.SIGTERM)  # type: ignore[union-attr]
        step.figures["seconds_until_all_gone"] = until(lambda: server.wait(0) is not None and not left_of(before), 60)
        step.figures["exit_status"] = server.wait(0)
        step.claims["it is gone within 30 s of SIGTERM"] = (step.figures["seconds_until_all_gone"] or 99) <= 30
        self.released(step, before)
        self.finish()

    def eagle3(self, step: Step) -> None:
        self.launch("eagle3", step)
        self.bench("eagle3", step)
        wanted = self.models[self.model_of("eagle3")]["acceptance"]
        found = step.figures.get("accept_length")
        step.figures["accept_length_known"] = wanted
        log = "\n".join(self.server.lines()) if self.server else ""
        step.claims["speculation with overlap is on"] = "disable_overlap_schedule=False" in log
        step.claims["drafts are accepted as often as they are right (within 10 %)"] = (
            bool(found) and abs(float(found) / wanted - 1) <= 0.1
        )

    def after_dead_scheduler(self, step: Step) -> None:
        server = self.running()
        before = server.family()
        os.kill(server.scheduler(), signal.SIGKILL)
        alone = until(lambda: server.wait(0) is not None, 5)
        step.figures["seconds_until_main_follows"] = alone
        step.figures["exit_status"] = server.wait(0)
        # Older engines do not notice; the liveness timer does, and ends what is left.
        servers = [] if alone is not None else [{"pid": server.pid}]
        self.released(step, before, servers)
        self.finish()

    def after_dead_parent(self, step: Step) -> None:
        case = "orphans" if self.device == "cuda" else "baseline"
        server = self.launch(case, step)
        before = server.family()
        # Even a worker that stands still follows: the engine has the kernel kill it with its parent.
        worker = server.scheduler()
        os.kill(worker, signal.SIGSTOP)
        os.kill(server.pid, signal.SIGKILL)
        server.wait(5)
        time.sleep(1)
        step.figures["left_after_1_s"] = len(left_of(before))
        step.figures["scheduler_left"] = worker in left_of(before)
        self.released(step, before)
        self.finish()

    def after_orphan(self, step: Step) -> None:
        """A worker that does not follow its parent. Without a GPU it holds none, and the claims say so."""
        if unit := host.unit_of(os.getpid(), host.Roots()):
            raise Skip(f"this runs inside {unit}, whose processes are nobody's orphans; run it from a login")
        with orphan(self.python, self.device, self.roots, self.environment, self.work / "orphan.log") as pid:
            time.sleep(1)
            there = left_of([pid]) == [pid]
            if self.device == "cuda":
                now = gpu_memory()
                holders = self.ansible.module("gpu_release", unit="", roots=self.roots)["holders"]
                files = next((h["files"] for h in holders if h["pid"] == pid), [])
                step.figures["device_files"] = files
                step.figures["memory_mib_held"] = now
                more = any(used >= idle + ORPHAN_MIB for used, idle in zip(now, self.idle, strict=True))
                held = any(re.fullmatch(r"/dev/nvidia\d+", path) for path in files)
                step.claims[ORPHAN_HELD] = there and more and held
            else:
                step.claims["an orphan was left (it holds no GPU: there is none)"] = there
            signals = {entry["pid"]: entry["signals"] for entry in self.released(step, [pid])}.get(pid)
            step.claims[ORPHAN_ENDED] = signals == ["SIGTERM", "SIGKILL"] and not left_of([pid])

    def stopped(self, step: Step) -> None:
        """What systemctl stop does: the unit's stop signal while a request runs."""
        server = self.launch("stop" if self.device == "cuda" else "baseline", step)
        before = server.family()
        tokens = 3000 if self.device == "cuda" else 400
        body = {
            "input_ids": [1, int(self.models["small"]["first"])],
            "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
        }
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            answer = pool.submit(ask, self.port, "/generate", body)
            running = until(lambda: self.requests_running() > 0 or answer.done(), 30)
            server.process.send_signal(signal.SIGINT)  # type: ignore[union-attr]
            early = answer.done()
            found = answer.result(300).get("output_ids") or []
        step.figures["seconds_until_all_gone"] = until(lambda: server.wait(0) is not None and not left_of(before), 60)
        step.figures["exit_status"] = server.wait(0)
        step.claims["a request was running when the signal came"] = running is not None and not early
        step.claims["the running request was answered in full"] = len(found) == tokens
        step.claims["the exit status is 0, which a crash never has"] = server.wait(0) == 0
        self.released(step, before)
        self.finish()

    def requests_running(self) -> int:
        """As the scheduler says; the gauges of /metrics lag behind."""
        load = metrics.parse_loads(json.dumps(ask(self.port, "/v1/loads")))
        if load is None:
            raise ProofError("/v1/loads of the server gives no loads, expected the requests that run")
        return load.running


def version_of(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])


def extra_variables(words: Sequence[str]) -> dict[str, Any]:
    """NAME=VALUE of the command line; a value that is JSON is taken as such."""
    variables: dict[str, Any] = {}
    for word in words:
        name, _equals, value = word.partition("=")
        with contextlib.suppress(ValueError):
            value = json.loads(value)
        variables[name] = value
    return variables


def small(given: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Every step of the small profile, in order; a step that needs a GPU is skipped without one."""
    environment = dict(word.split("=", 1) for word in given.env)
    box = Small(
        Ansible(work),
        work,
        given.python,
        given.device,
        given.leave_host,
        environment,
        given.ready_timeout,
        given.bench_prompts,
        extra_variables(given.extra),
    )
    no_gpu = "needs a GPU: --device cpu was given" if given.device == "cpu" else ""
    plan: list[tuple[str, str, Callable[[Step], None], str]] = [
        ("host", "gpu_host_info", box.host, ""),
        ("preflight", "gpu_preflight", box.preflight, ""),
        ("nccl", "nccl", box.nccl, ""),
        ("engine", "the engine's interpreter", box.engine, ""),
        ("models", "random models with known answers", box.make_models, ""),
        ("baseline", "plan, start, gate, generation and benchmark without speculation", box.baseline, ""),
        ("sigterm", "GPU release after SIGTERM", box.after_sigterm, ""),
        ("eagle3", "plan, start, gate, generation and benchmark with EAGLE-3, topk 1, overlap", box.eagle3, no_gpu),
        ("scheduler-killed", "GPU release after SIGKILL of the scheduler", box.after_dead_scheduler, no_gpu),
        (
            "parent-killed",
            "GPU release after SIGKILL of the parent, which everything follows",
            box.after_dead_parent,
            "",
        ),
        ("orphan", "GPU release of an orphan: a worker that did not follow its parent", box.after_orphan, ""),
        ("stop", "GPU release after the unit's stop signal, with a request running", box.stopped, ""),
    ]
    steps = []
    broken = ""
    try:
        for name, title, work_of, missing in plan:
            step = run_step(Step(name, title), work_of, missing or broken)
            steps.append(say(step))
            # Without these nothing can be started.
            if name in ("host", "engine", "models") and step.outcome == FAILED:
                broken = f"the step {name} failed"
            if step.reason == INTERRUPTED:
                broken = INTERRUPTED
            if step.outcome == FAILED and name in ("baseline", "eagle3", "parent-killed", "stop"):
                box.finish()
    finally:
        box.finish()
        if given.keep:
            given.keep.mkdir(parents=True, exist_ok=True)
            for file in [*work.glob("server-*.log"), *work.glob("plan-*.json"), *work.glob("bench-*.jsonl")]:
                (given.keep / file.name).write_text(health.scrub(file.read_text(errors="replace")))
    if {"baseline", "eagle3"} <= set(box.rates):
        step = Step("speculation", "speculation against baseline (toy models: never a figure for real ones)", PASSED)
        step.figures = box.rates
        steps.append(say(step))
    supervisor = "this script starts and watches the server in the place of systemd"
    return make_report("small", given.device, supervisor, host_summary(box.info), box.versions, steps)


# --------------------------------------------------------------------------------------------- the production profile
#: Steps in their order: name, title, playbook (which an older checkout may lack).
PRODUCTION: tuple[tuple[str, str, str], ...] = (
    ("preflight", "the host is fit", "playbooks/preflight.yml"),
    ("site", "the deployment, from whatever is there", "site.yml"),
    ("site-again", "a second run changes nothing and restarts nothing", "site.yml"),
    ("plan", "what serves is what was planned", "playbooks/plan.yml"),
    ("verify", "the host is what was deployed", "playbooks/verify.yml"),
    ("benchmark", "the benchmark of the deployment", "playbooks/benchmark.yml"),
    ("stop", "a drained stop", "playbooks/stop.yml"),
    ("start", "a start until it serves", "playbooks/start.yml"),
    ("site-changed", "a second deployment, with one running request fewer", "site.yml"),
    ("rollback", "back to the deployment before this one", "playbooks/rollback.yml"),
    ("site-after-rollback", "the deployment of the inventory is left as it is", "site.yml"),
    ("verify-at-the-end", "the host is again what was deployed", "playbooks/verify.yml"),
)
#: What --no-rollback leaves out.
BACK = ("site-changed", "rollback", "site-after-rollback")
#: Writes the overrides that the inventory has: a second deployment is the first one with one of them changed.
OVERRIDES = """
- hosts: "{{ proof_hosts }}"
  gather_facts: false
  tasks:
    - ansible.builtin.copy:
        content: "{{ deployment_overrides | default({}) | to_json }}"
        dest: "{{ proof_file }}"
        mode: "0644"
      delegate_to: localhost
      become: false
      run_once: true
"""


def deployment_summary(plan: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
    """What a report says about a deployment: no paths, no names of models."""
    return {
        "profile": plan["profile"],
        "engine_version": plan["engine_version"],
        "patches": list(plan["patches"]),
        "tp_size": plan["args"].get("--tp-size"),
        "weights_bytes": model.get("weights_bytes"),
        "load_format": next(
            (value for flag, value in itertools.pairwise(plan["argv"]) if flag == "--load-format"), "auto"
        ),
    }


def changed_overrides(plan: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Overrides of a deployment that differs from the planned one without harm."""
    running = plan["args"].get("--max-running-requests")
    if not isinstance(running, int) or running < 2:
        raise Skip("the plan has no max_running_requests of 2 or more, of which a second deployment takes one")
    return {**overrides, "max_running_requests": running - 1}


def production(given: argparse.Namespace, work: Path) -> dict[str, Any]:
    """The collection's own playbooks on the box itself, or on the hosts of an inventory."""
    ansible = Ansible(work, given.inventory)
    hosts = given.hosts
    variables = extra_variables(given.extra)
    steps: dict[str, Step] = {}
    info: dict[str, Any] = {}
    plan: dict[str, Any] = {}
    deployment: dict[str, Any] = {}

    def look(step: Step) -> None:
        info.update(ansible.module("gpu_host_info", hosts=hosts))
        if "gpus" not in info:
            raise ProofError(f"gpu_host_info: {info.get('msg')}")
        step.figures = host_summary(info)
        step.claims["gpu_host_info reads the host"] = True

    def serving() -> tuple[int, str]:
        """Main process, and the hash of the plan that it was started with."""
        found = ansible.module("service_info", hosts=hosts)
        return int(found.get("main_pid") or 0), str(found.get("plan_hash") or "")

    def more_for(name: str, path: str) -> dict[str, Any]:
        """Variables of one step."""
        if path == "playbooks/verify.yml":
            return {"verify_json": str(work / f"{name}.json")}
        if name == "benchmark":
            return {"benchmark_controller_dir": str(work / "benchmark")}
        if name == "plan":
            return {"plan_file": str(work / "plan.json")}
        if name == "site-changed":
            playbook, file = work / "overrides.yml", work / "overrides.json"
            playbook.write_text(OVERRIDES)
            done = ansible.play(playbook, {**variables, "proof_hosts": hosts, "proof_file": str(file)})
            if done.rc != 0 or not file.exists():
                raise ProofError(f"the overrides of the inventory: {done.tail()}")
            return {"deployment_overrides": changed_overrides(plan, json.loads(file.read_text()))}
        return {}

    def passed(name: str) -> bool:
        return name in steps and steps[name].outcome == PASSED

    def play(name: str, path: str) -> Callable[[Step], None]:
        def work_of(step: Step) -> None:
            if not (ROOT / path).exists():
                raise Skip(f"this checkout has no {path}")
            if name in BACK and given.no_rollback:
                raise Skip("--no-rollback was given")
            if name == "site-changed" and not passed("plan"):
                raise Skip("the step plan did not pass, so that there is nothing to change")
            if name == "rollback" and not passed("site-changed"):
                raise Skip("the step site-changed did not pass, so that there is no second deployment to leave")
            before, _hash = serving()
            done = ansible.play(path, {**variables, **more_for(name, path)})
            after, digest = serving()
            changed = done.counts.get("changed", 0)
            step.figures = {"exit_status": done.rc, "seconds": round(done.seconds, 1), "changed": changed}
            if path == "playbooks/verify.yml":
                step.figures |= verdicts(work / f"{name}.json")
            if name == "benchmark":
                step.figures |= levels(work / "benchmark")
            step.claims[f"{path} ends with exit status 0"] = done.rc == 0
            if done.rc != 0:
                raise ProofError(done.tail())
            if name == "plan":
                plan.update(json.loads((work / "plan.json").read_text()))
                deployment.update(
                    deployment_summary(plan, ansible.module("model_info", hosts=hosts, path=plan["model"]["path"]))
                )
                step.figures |= deployment
                step.claims["the weights of the model were measured"] = bool(deployment["weights_bytes"])
            if name in ("plan", "rollback", "site-after-rollback"):
                step.claims["what serves was started with the plan of the inventory"] = digest == plan.get(
                    "process_hash"
                )
            if name == "site-again":
                step.claims["it changed nothing"] = changed == 0
                step.claims["the server was not restarted"] = before == after > 0
            if name == "site-changed":
                step.claims["another deployment serves"] = bool(digest) and digest != plan["process_hash"]
            if name == "site-after-rollback":
                step.claims["the server was not restarted"] = before == after > 0
            if name == "stop":
                step.claims["no server runs"] = after == 0
            if name in ("site", "start", "site-changed", "rollback", "site-after-rollback"):
                step.claims["a server runs"] = after > 0

        return work_of

    steps["host"] = say(run_step(Step("host", "gpu_host_info"), look))
    broken = "the host could not be read" if steps["host"].outcome == FAILED else ""
    for name, title, path in PRODUCTION:
        step = steps[name] = say(run_step(Step(name, title), play(name, path), broken))
        if step.outcome == FAILED and name in ("preflight", "site"):
            broken = f"the step {name} failed"
        if step.reason == INTERRUPTED:
            broken = INTERRUPTED
    supervisor = "systemd, through the unit of the role sglang_service"
    versions = engine_versions(ansible, hosts)
    # Whatever an nvidia-smi says: an engine that computes on the CPU proves nothing about a GPU.
    device = "cpu" if "+cpu" in str(versions.get("torch")) or not versions else "cuda"
    return make_report("production", device, supervisor, host_summary(info), versions, list(steps.values()), deployment)


def verdicts(file: Path) -> dict[str, Any]:
    """How many checks of verify.yml ended how, from its report; empty without one."""
    if not file.exists():
        return {}
    found = json.loads(file.read_text(encoding="utf-8"))
    return {"verify": {key: len(value) for key, value in found.items() if isinstance(value, list)}}


def levels(folder: Path) -> dict[str, Any]:
    """What benchmark.yml measured, by concurrency; empty without a result."""
    files = sorted(folder.glob("*.json")) if folder.is_dir() else []
    if not files:
        return {}
    found = json.loads(files[-1].read_text(encoding="utf-8"))
    keys = ("output_tok_s", "completed", "failed", "accept_length")
    return {
        "benchmark": {str(level["concurrency"]): {key: level.get(key) for key in keys} for level in found["levels"]}
    }


def engine_versions(ansible: Ansible, hosts: str) -> dict[str, Any]:
    """What the interpreter of the serving process has installed; empty when nothing serves."""
    command = ansible.module("service_info", hosts=hosts).get("command") or []
    if not command:
        return {}
    done = subprocess.run(
        [*ADHOC, *ansible._where(), hosts, "-m", "ansible.builtin.command", "-a", json.dumps({"argv": [command[0], "-c", VERSIONS]}),
         "--tree", str(ansible.work / "versions")],
        env=ansible.environment, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    files = sorted((ansible.work / "versions").glob("*")) if done.returncode == 0 else []
    if not files:
        return {}
    answer = json.loads(json.loads(files[0].read_text())["stdout"])
    return {name: version for name, version in answer["versions"].items() if version}


# ------------------------------------------------------------------------------------------------------- command line
def say(step: Step) -> Step:
    mark = {PASSED: "ok     ", FAILED: "FAILED ", SKIPPED: "skipped"}[step.outcome]
    print(
        f"{mark} {step.seconds:6.1f} s  {step.name}: {step.title}" + (f" - {step.reason}" if step.reason else ""),
        flush=True,
    )
    return step


@contextlib.contextmanager
def workspace(given: Path | None) -> Iterator[Path]:
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        yield given.resolve()
        return
    folder = Path(tempfile.mkdtemp(prefix="gpu-proof-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", choices=["small", "production"], default="small")
    parser.add_argument("--out", type=Path, default=ROOT / "tests" / "output" / "gpu-proof.json", help="the report")
    parser.add_argument("--keep", type=Path, help="folder for logs of the servers, plans and benchmark lines")
    parser.add_argument("--work", type=Path, help="folder to work in; a temporary one by default")
    parser.add_argument(
        "--extra", action="append", default=[], metavar="NAME=VALUE", help="variables for every playbook"
    )
    group = parser.add_argument_group("small")
    group.add_argument("--python", default=sys.executable, help="interpreter with SGLang")
    group.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    group.add_argument("--leave-host", action="store_true", help="skip what changes the host and takes it back")
    group.add_argument(
        "--env", action="append", default=[], metavar="NAME=VALUE", help="for the engine, such as PYTHONPATH"
    )
    group.add_argument("--ready-timeout", type=float, default=600, help="seconds until a server must answer (600)")
    group.add_argument("--bench-prompts", type=int, default=10, help="requests at concurrency 1 (10)")
    group = parser.add_argument_group("production")
    group.add_argument("--inventory", default="localhost,", help="inventory of the deployment")
    group.add_argument("--hosts", default="gpu_servers", help="its group of hosts")
    group.add_argument(
        "--no-rollback",
        action="store_true",
        help="leave out the second deployment and the rollback, which cost two loads of the model (some 20 minutes with 547 GB)",
    )
    given = parser.parse_args(words)
    if any("=" not in word for word in [*given.env, *given.extra]):
        parser.error("--env and --extra: expected NAME=VALUE")
    if given.profile == "production" and given.inventory == "localhost,":
        parser.error(
            "--profile production: expected --inventory with the deployment (make gpu-proof PROFILE=production INVENTORY=...)"
        )
    return given


def main(words: Sequence[str] | None = None) -> int:
    given = arguments(words)
    with workspace(given.work) as work:
        report = (small if given.profile == "small" else production)(given, work)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"{'proven' if report['proven'] else 'NOT proven'}; report: {given.out}")
    return 0 if report["proven"] else 1


if __name__ == "__main__":
    sys.exit(main())
