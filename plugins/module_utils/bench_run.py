# Copyright: The gpuserve.sglang authors
# SPDX-License-Identifier: Apache-2.0
"""Runs a benchmark on the host: a worker of its own, which the controller starts and then asks how far it is.

The worker is a session leader that adopts every orphan below it, so the whole tree of a bench_serving that hangs can be
killed, also what called setsid. It stops by itself when nobody asks any more: a controller that died must not leave load
on a server. Raw output, which holds the server's secrets for a moment, lies in a folder that only root and the user of
bench_serving can read, and is gone with the worker.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pwd
import re
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from . import benchmark
from .benchmark import BenchmarkError
from .health_host import descendants
from .health_http import HttpAnswer, HttpRequest
from .health_text import scrub
from .metrics import FINISHED, GENERATED, Load, Metrics, parse_loads
from .record import RecordError, owned_folder
from .record import document as shown_document

RUNS = Path("/run/gpuserve-sglang")
PREFIX = "benchmark-"
#: Nobody has asked for so long: the controller is gone.
ABANDONED_AFTER = 60.0
#: The scheduler must be empty before a level: time for a probe or a request that was cut off to end.
DRAIN_TIMEOUT = 30.0
HTTP_TIMEOUT = 10.0
BEGIN_TIMEOUT = 30.0
KEPT = 20
_PR_SET_CHILD_SUBREAPER = 36


# ----------------------------------------------------------------------------------------------------- the server


def _ask(host: str, port: int, method: str, path: str, timeout: float = HTTP_TIMEOUT) -> HttpAnswer:
    answer = HttpRequest(host, port, method, path, None, timeout).wait(timeout + 1)
    return answer or HttpAnswer(error="timeout", seconds=timeout)


@dataclass(frozen=True)
class Server:
    """Looks at the engine that is measured."""

    host: str
    port: int

    def load(self) -> Load | None:
        """Requests in the scheduler now; None when the engine does not say."""
        answer = _ask(self.host, self.port, "GET", "/v1/loads?include=core")
        return parse_loads(answer.body) if answer.status == 200 else None

    def metrics(self) -> Metrics:
        """Empty when metrics are off."""
        answer = _ask(self.host, self.port, "GET", "/metrics")
        return Metrics.parse(answer.body) if answer.status == 200 else Metrics([])

    def answers(self) -> str:
        """Empty when the engine is there, else what came instead."""
        answer = _ask(self.host, self.port, "GET", "/v1/models")
        return "" if answer.status == 200 else answer.text()

    def accept_length(self) -> float | None:
        """The cumulative figure; of the rest of the answer nothing is kept, because it holds secrets."""
        answer = _ask(self.host, self.port, "GET", "/get_server_info")
        try:
            return float(json.loads(answer.body)["internal_states"][0]["avg_spec_accept_length"])
        except (ValueError, KeyError, IndexError, TypeError):
            return None

    def flush(self) -> bool:
        """Empty the prefix cache, which also begins a new count of the acceptance length; refused while requests run."""
        return _ask(self.host, self.port, "POST", "/flush_cache", 30.0).status == 200

    def look(self) -> tuple[int | None, float | None]:
        """For `benchmark.served_others`."""
        load = self.load()
        return (load.total if load else None), self.metrics().total(GENERATED)

    def watch(self, seconds: float, pause: float = 1.0) -> str:
        """Whether somebody else is served during the next seconds: empty, or what was seen."""
        seen = [self.look()]
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            time.sleep(min(pause, max(0.0, until - time.monotonic())))
            seen.append(self.look())
        if all(load is None and generated is None for load, generated in seen):
            return "neither /v1/loads nor /metrics answers, so whether it serves others cannot be seen"
        return benchmark.served_others(seen)

    def drained(self, seconds: float = DRAIN_TIMEOUT) -> bool:
        """Wait until the scheduler is empty."""
        until = time.monotonic() + seconds
        while True:
            load = self.load()
            if load is None or load.total == 0:
                return True
            if time.monotonic() >= until:
                return False
            time.sleep(0.5)


# ----------------------------------------------------------------------------------------------------- processes


def adopt_orphans() -> None:
    """Become the parent of every descendant that loses its own, whatever session it is in. Linux only."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def kill_below(patience: float = 10.0) -> list[int]:
    """Kill everything below this process until nothing is left; returns what would not go."""
    own = os.getpid()
    until = time.monotonic() + patience
    while True:
        left = sorted(descendants(own) - {own})
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        left = sorted(descendants(own) - {own})
        if not left or time.monotonic() >= until:
            return left
        time.sleep(0.05)


@dataclass(frozen=True)
class Ended:
    """How a command ended; `why` is empty when it ended by itself."""

    rc: int
    tail: str
    why: str = ""


def run_watched(
    argv: Sequence[str],
    timeout: float,
    on_output: Callable[[str], None],
    stop: Callable[[], str],
    **options: Any,
) -> Ended:
    """Run a command in a group of its own; output goes to `on_output` as it comes. The whole tree dies on timeout, and
    when `stop` gives a reason."""
    until = time.monotonic() + timeout
    tail = b""
    why = ""
    process = subprocess.Popen(
        list(argv),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        **options,
    )
    if process.stdout is None:
        raise AssertionError("Popen with PIPE has a stdout")
    stream = process.stdout.fileno()
    while not why:
        if select.select([stream], [], [], 0.5)[0]:
            piece = os.read(stream, 65536)
            if not piece:
                break
            tail = (tail + piece)[-20000:]
            on_output(tail.decode("utf-8", "replace"))
        elif process.poll() is not None:
            # Its end closes the pipe; when it does not, a child that lives on holds it.
            break
        why = stop() or (f"killed after {timeout:.0f} s" if time.monotonic() > until else "")
    if not why:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, min(30.0, until - time.monotonic())))
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    rc = process.wait()
    kill_below()
    process.stdout.close()
    return Ended(rc, tail.decode("utf-8", "replace"), why)


# ----------------------------------------------------------------------------------------------------- the worker


def _identity(user: str) -> dict[str, Any]:
    """Popen's arguments for running as a user; empty for the user that this is anyway."""
    if not user or os.geteuid() != 0 or user == "root":
        return {}
    try:
        entry = pwd.getpwnam(user)
    except KeyError:
        raise BenchmarkError(f"there is no user {user} on this host, expected the user of the service") from None
    return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}


def _environment(given: Mapping[str, str], home: str) -> dict[str, str]:
    """What bench_serving gets: the plan's variables, no proxy, no GPU, nothing that is fetched."""
    names = ("PATH", "LANG")
    env = {name: os.environ[name] for name in names if name in os.environ}
    env |= {str(name): str(value) for name, value in given.items()}
    return env | {
        "HOME": home,
        "HF_HOME": home,
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONUNBUFFERED": "1",
        "no_proxy": "*",
    }


def last_words(text: str) -> str:
    """The last line of a program's output that is no progress bar, without secrets."""
    lines = [line.rsplit("\r", 1)[-1].strip() for line in text.splitlines()]
    good = [line for line in lines if line and not benchmark.progress_bar(line) and set(line) - set("=-")]
    return scrub(good[-1])[:300] if good else ""


class Worker:
    """Measures all levels one after the other. ``order`` is what the module was given, see its documentation."""

    def __init__(self, order: Mapping[str, Any], folder: Path) -> None:
        self.order, self.folder = order, folder
        self.method: dict[str, Any] = dict(order["method"])
        self.server = Server(str(order["server"]["host"]), int(order["server"]["port"]))
        self.runs: list[tuple[int, dict[str, Any], dict[str, Any]]] = []
        self.asked = [
            benchmark.requests_at(level, self.method["requests"], self.method["fill"]) for __, level in self._plan
        ]

    @property
    def _plan(self) -> list[tuple[int, int]]:
        return benchmark.schedule(self.method["levels"], self.method["repeats"])

    def report(self, at: int, done: int, doing: str) -> None:
        """Write down how far this is."""
        repeat, concurrency = self._plan[at]
        levels = self.method["levels"]
        write_json(
            self.folder / "progress.json",
            {
                "level": levels.index(concurrency) + 1, "levels": len(levels), "concurrency": concurrency, "repeat": repeat,
                "repeats": self.method["repeats"], "done": done, "requests": self.asked[at], "doing": doing,
            },
        )  # fmt: skip

    def abandoned(self) -> str:
        """A reason when nobody asks for this run any more."""
        try:
            quiet = time.time() - (self.folder / "asked").stat().st_mtime
        except OSError:
            return "its folder was removed"
        return "the controller does not ask any more" if quiet > ABANDONED_AFTER else ""

    def run(self) -> dict[str, Any]:
        """Measure everything; the result is stored before this returns. Raises BenchmarkError."""
        prompts = benchmark.read_prompts(str(self.order["prompts"]), int(self.method["max_prompt_chars"]))
        self.method["prompts"] = f"{len(prompts)} ({benchmark.fingerprint(prompts)})"
        stopped = ""
        for at, (__, concurrency) in enumerate(self._plan):
            seen, record = self.level(at, concurrency, prompts)
            self.runs.append((concurrency, seen, record))
            if not seen["completed"]:
                why = "; ".join(seen["errors"]) or "no record was written"
                stopped = f"no request was answered at {concurrency} concurrent ones: {why}"
                break
            if why := self.abandoned():
                raise BenchmarkError(why)
        when = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        document = benchmark.result(when, self.order["plan"], self.method, self.runs, stopped)
        return store(
            Path(self.order["state_dir"]), document, [run[2] for run in self.runs], self.order["latest"] and not stopped
        )

    def level(self, at: int, concurrency: int, prompts: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
        """One repeat of one level, as (measured, record)."""
        self.report(at, 0, "waiting for an idle server")
        asked = self.asked[at]
        if not self.server.drained() and not self.order["allow_others"]:
            raise BenchmarkError("somebody else's requests run on the server; nothing was measured over them")
        before = self.server.accept_length()
        flushed = self.server.flush()
        finished = self.server.metrics().total(FINISHED)
        identity = _identity(str(self.order["user"]))
        with tempfile.TemporaryDirectory(prefix="run-", dir=self.folder) as name:
            folder = Path(name)
            (folder / "home").mkdir(mode=0o700)
            (folder / "dataset.jsonl").write_text(
                benchmark.dataset(benchmark.choose_prompts(prompts, asked, self.method["seed"]))
            )
            files = {"dataset": str(folder / "dataset.jsonl"), "output": str(folder / "output.jsonl")}
            if identity:
                for path in (folder, *folder.iterdir()):
                    os.chown(path, identity["user"], identity["group"])
            argv = benchmark.command(self.order["python"], self.order["server"], self.method, concurrency, asked, files)
            self.report(at, 0, "starting")

            def show(text: str) -> None:
                # Before the first bar it loads the tokenizer and warms up.
                done = benchmark.progress_bar(text)
                self.report(at, done[0] if done else 0, "measuring" if done else "warming up")

            env = _environment(self.order["environment"], str(folder / "home"))
            ended = run_watched(
                argv,
                float(self.method["level_timeout"]),
                show,
                self.abandoned,
                env=env,
                cwd=folder,
                umask=0o077,
                **identity,
            )
            output = folder / "output.jsonl"
            text = output.read_text("utf-8", "replace") if output.exists() else ""
            record = benchmark.parse_record(text, int(self.method["output_tokens"]))
        problem = ended.why
        if not problem and record is None:
            problem = f"bench_serving ended with status {ended.rc}: {last_words(ended.tail)}"
        others = None
        after = self.server.metrics().total(FINISHED)
        if finished is not None and after is not None and record is not None:
            others = max(0, int(after - finished) - asked - self.method["warmup"])
        measured = benchmark.measure(record, asked, before, flushed, problem, others)
        return measured, {"concurrency": concurrency, "plan_hash": self.order["plan"]["hash"], **(record or {})}


# ----------------------------------------------------------------------------------------------------- files


def write_json(path: Path, document: Any, mode: int = 0o600) -> None:
    """Write a document at once or not at all."""
    write_text(path, json.dumps(document, indent=1) + "\n", mode)


def write_text(path: Path, text: str, mode: int = 0o600) -> None:
    """Write a file at once or not at all."""
    new = path.with_name(f".{path.name}.new")
    new.unlink(missing_ok=True)
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w", encoding="utf-8") as stream:
        stream.write(text)
    new.chmod(mode)
    new.replace(path)


def read_json(path: Path) -> Any:
    """None when there is no such file or no JSON in it."""
    try:
        return json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return None


def store(
    state_dir: Path, document: dict[str, Any], records: Sequence[Mapping[str, Any]], good: bool
) -> dict[str, Any]:
    """Keep a result and its records; a good one becomes `latest.json`. Returns result, previous and paths.

    The state directory is the service's own: what is written goes into a folder of root's, through no link.
    """
    shown = state_dir / "benchmarks"
    shown.mkdir(mode=0o755, parents=True, exist_ok=True)
    try:
        with owned_folder(shown) as at:
            previous = shown_document(shown / "latest.json")[0] or None
            name = _keep(Path(f"/proc/self/fd/{at}"), document, records, good)
    except RecordError as error:
        raise BenchmarkError(str(error)) from error
    return {"result": document, "previous": previous, "path": str(shown / f"{name}.json"), "id": name}


def _keep(folder: Path, document: dict[str, Any], records: Sequence[Mapping[str, Any]], good: bool) -> str:
    """Write what is kept; its name."""
    stamp = re.sub(r"[-:]", "", document["when"])
    name, more = stamp, 1
    while (folder / f"{name}.json").exists():
        more += 1
        name = f"{stamp}-{more}"
    write_text(folder / f"{name}.jsonl", "".join(json.dumps(record) + "\n" for record in records), 0o644)
    write_json(folder / f"{name}.json", document, 0o644)
    if good:
        link = folder / ".latest.new"
        link.unlink(missing_ok=True)
        link.symlink_to(f"{name}.json")
        link.replace(folder / "latest.json")
    for old in sorted(folder.glob("[0-9]*.json"), reverse=True)[KEPT:]:
        for path in folder.glob(f"{old.stem}.*"):
            path.unlink()
    return name


# ----------------------------------------------------------------------------------------------------- start and poll


def alive(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (OSError, IndexError):
        return False


def clear_stale(runs: Path = RUNS) -> None:
    """Remove what killed workers left behind: raw records hold secrets. A worker that still runs refuses a second one."""
    for folder in runs.glob(f"{PREFIX}*"):
        pid = read_json(folder / "worker.json") or {}
        if alive(int(pid.get("pid", 0))) and not (folder / "result.json").exists():
            raise BenchmarkError(
                f"a benchmark runs on this host already (pid {pid['pid']}); wait for its end. One that nobody follows any more "
                f"ends by itself after {ABANDONED_AFTER:.0f} s"
            )
        shutil.rmtree(folder, ignore_errors=True)


def start(order: Mapping[str, Any], runs: Path = RUNS) -> str:
    """Fork the worker and return the folder of the run."""
    runs.mkdir(mode=0o755, parents=True, exist_ok=True)
    clear_stale(runs)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=runs))
    # bench_serving's user must reach its own folder inside; only root can list this one.
    folder.chmod(0o711)
    (folder / "asked").write_text(f"{time.time()}\n")
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return str(folder)
    _work(order, folder)
    os._exit(0)


def _work(order: Mapping[str, Any], folder: Path) -> None:
    """The worker's life; never returns."""
    try:
        os.setsid()
        # The first child ends, so that whoever started it does not wait for the second.
        if os.fork():
            os._exit(0)
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(null, stream)
        # The pipes of whoever started this must not stay open for as long as a benchmark takes.
        os.closerange(3, 4096)
        adopt_orphans()
        write_json(folder / "worker.json", {"pid": os.getpid()})
        try:
            answer: dict[str, Any] = Worker(order, folder).run()
        except BenchmarkError as error:
            answer = {"error": str(error)}
        except Exception as error:
            answer = {"error": scrub(f"{type(error).__name__}: {error}")}
        kill_below()
        if folder.exists():
            write_json(folder / "result.json", answer)
    finally:
        os._exit(0)


def _began(folder: Path) -> bool:
    """Whether the worker may still be on its way."""
    try:
        return time.time() - float((folder / "asked").read_text()) < BEGIN_TIMEOUT
    except (OSError, ValueError):
        return False


def step(progress: Mapping[str, Any]) -> str:
    """Which run of which level it is: what a reader wants to hear of at once."""
    return f"{progress['repeat']}/{progress['level']}" if progress else ""


def poll(folder: Path, window: float, known: str = "") -> dict[str, Any]:
    """Wait at most so long, or until another step than the known one begins.

    Returns `{state: running, progress}`, `{state: done, ...}` or `{state: failed, error}`.
    """
    if not re.fullmatch(rf"{PREFIX}\w+", folder.name):
        raise BenchmarkError(f"{folder} is no folder of a benchmark")
    until = time.monotonic() + window
    while True:
        with contextlib.suppress(OSError):
            os.utime(folder / "asked")
        worker = read_json(folder / "worker.json") or {}
        lives = alive(int(worker.get("pid", 0)))
        answer = read_json(folder / "result.json")
        if answer is not None:
            shutil.rmtree(folder, ignore_errors=True)
            return {"state": "failed" if "error" in answer else "done", **answer}
        if worker and not lives:
            shutil.rmtree(folder, ignore_errors=True)
            return {"state": "failed", "error": "the benchmark's process died on the host; nothing was stored"}
        if not worker and not _began(folder):
            return {
                "state": "failed",
                "error": "the benchmark did not begin, or its folder is gone from the host; run it again",
            }
        progress = read_json(folder / "progress.json") or {}
        if time.monotonic() >= until or step(progress) != known:
            return {"state": "running", "progress": progress}
        time.sleep(0.25)
