# Copyright: The gpuserve.sglang authors
# Apache License 2.0 (see https://www.apache.org/licenses/LICENSE-2.0)
"""What a model directory holds, and what is missing before a ten-minute load can succeed.

Only names, sizes, small JSON files and the *headers* of the weight files are read, so 64 shards with 547 GB take about a
second. Standard library only; nothing here writes. Sources: the safetensors format
(https://github.com/huggingface/safetensors#format), the Git LFS pointer format
(https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md), the layout of huggingface_hub's cache and of its `--local-dir`.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import stat
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ansible_collections.gpuserve.sglang.plugins.module_utils.file_access import Access, Refusal, reader

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
#: One of these holds the vocabulary; a tuple is a set of files that belong together.
VOCABULARIES: tuple[tuple[str, ...], ...] = (
    ("tokenizer.json",),
    ("tokenizer.model",),
    ("tiktoken.model",),
    ("vocab.json", "merges.txt"),
)
LFS_MAGIC = b"version https://git-lfs.github.com/spec/"
#: Bytes; the safetensors library itself refuses a longer header.
MAX_HEADER_BYTES = 100_000_000
#: Bytes; far above any real config, tokenizer or index (Kimi-K2.5's index has about 20 MB).
MAX_JSON_BYTES = 512 * 1024 * 1024
SHARD_OF_MANY = re.compile(r"-(\d+)-of-(\d+)\.safetensors$")
KINDS = ("target", "draft")
#: What the engine may read beside the files that are checked by name: processors, further templates, code.
READ_BY_ENGINE = (".json", ".jinja", ".py", ".model", ".tiktoken", ".txt")
#: Problems that say nothing about what the files hold.
ACCESS_PROBLEMS = ("folder_no_access", "file_no_access")


@dataclass(frozen=True)
class Problem:
    """One reason why the directory is not a complete model: what was found, what was expected, what to do."""

    id: str
    file: str
    found: str
    expected: str
    todo: str


@dataclass
class Shard:
    """A weight file: its real size in bytes, the size its own header implies, and how many tensors it holds."""

    file: str
    bytes: int | None = None
    expected_bytes: int | None = None
    tensors: int | None = None


@dataclass
class Header:
    """The part of a safetensors header that is of use here; sizes in bytes."""

    expected_bytes: int
    data_bytes: int
    names: set[str]
    bytes_by_dtype: dict[str, int]
    elements: int


@dataclass
class _Scan:
    """What accumulates while one directory is read."""

    root: Path
    kind: str
    problems: list[Problem] = field(default_factory=list)
    warnings: list[Problem] = field(default_factory=list)
    #: Names of the files that the model needs, wherever they are below the root.
    checked: set[str] = field(default_factory=set)

    def add(self, id_: str, file: str, found: str, expected: str, todo: str) -> None:
        self.problems.append(Problem(id_, file, found, expected, todo))

    def warn(self, id_: str, file: str, found: str, expected: str, todo: str) -> None:
        self.warnings.append(Problem(id_, file, found, expected, todo))


class _HeaderError(ValueError):
    """The file does not start with a readable safetensors header; `truncated` when it merely ends too early."""

    def __init__(self, text: str, truncated: bool = False) -> None:
        super().__init__(text)
        self.truncated = truncated


def path_error(path: str, name: str = "model_path") -> str | None:
    """Return the error text when `path` is not an absolute path, else None."""
    if not path.startswith("/"):
        return (
            f"{name} is '{path}', expected an absolute path, because a relative one resolves where nobody expects. "
            f"Set {name} to the directory that holds config.json, for example /data/kimi-k2.5."
        )
    return None


def lfs_pointer_size(head: bytes) -> int | None:
    """Size in bytes of the real file when `head` starts a Git LFS pointer (0 when the pointer names none), else None."""
    if not head.startswith(LFS_MAGIC):
        return None
    match = re.search(rb"^size (\d+)\s*$", head, re.MULTILINE)
    return int(match.group(1)) if match else 0


def read_header(path: Path, size: int, pack_factor: int = 1) -> Header:
    """Read the header of a safetensors file of `size` bytes.

    `pack_factor` is the number of weights that one element of a `*.weight_packed` tensor stands for.
    Raises _HeaderError when the header is cut off or is none, OSError when the file cannot be read.
    """
    if size < 8:
        raise _HeaderError(f"{size} bytes", truncated=True)
    with path.open("rb") as handle:
        length = int.from_bytes(handle.read(8), "little")
        if not 2 <= length <= MAX_HEADER_BYTES:
            raise _HeaderError(f"a header length of {length} bytes")
        if 8 + length > size:
            raise _HeaderError(f"{size} bytes, less than the header alone ({8 + length})", truncated=True)
        raw = handle.read(length)
    if not raw.startswith(b"{"):
        raise _HeaderError("a header that is not a JSON object")
    try:
        entries = json.loads(raw)
        tensors = {name: entry for name, entry in entries.items() if name != "__metadata__"}
        by_dtype: dict[str, int] = {}
        elements = data_bytes = 0
        for name, entry in tensors.items():
            begin, end = entry["data_offsets"]
            if not 0 <= begin <= end:
                raise ValueError(f"offsets {begin}..{end} of tensor {name}")
            data_bytes = max(data_bytes, end)
            by_dtype[str(entry["dtype"])] = by_dtype.get(str(entry["dtype"]), 0) + end - begin
            count = 1
            for extent in entry["shape"]:
                count *= extent
            elements += count * (pack_factor if name.endswith(".weight_packed") else 1)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _HeaderError(f"an unreadable header ({type(error).__name__}: {error})") from error
    return Header(8 + length + data_bytes, data_bytes, set(tensors), by_dtype, elements)


def _head(path: Path, count: int = 512) -> bytes:
    with path.open("rb") as handle:
        return handle.read(count)


def _check_file(scan: _Scan, name: str, what: str) -> int | None:
    """Size of `name` when it is a usable regular file; otherwise None, the reason noted as a problem.

    Not there at all is the caller's business only when it asks beforehand; here it is a problem.
    """
    path = scan.root / name
    scan.checked.add(name)
    fetch = f"Download {name} again into {scan.root}."
    try:
        info = path.stat()
    except FileNotFoundError:
        if path.is_symlink():
            scan.add(
                "broken_link",
                name,
                f"a symbolic link to {os.readlink(path)}, which does not exist",
                what,
                f"{fetch} (In a Hugging Face cache copy the blobs folder too, or copy with `cp -rL`.)",
            )
        else:
            scan.add("file_missing", name, "no such file", what, fetch)
        return None
    except OSError as error:
        scan.add("file_unreadable", name, str(error.strerror), what, f"Make {path} readable for the engine's user.")
        return None
    if not stat.S_ISREG(info.st_mode):
        scan.add("file_not_regular", name, "not a regular file", what, f"Remove {path}. {fetch}")
        return None
    if info.st_size == 0:
        scan.add("file_empty", name, "0 bytes", what, fetch)
        return None
    try:
        real = lfs_pointer_size(_head(path))
    except OSError as error:
        scan.add("file_unreadable", name, str(error.strerror), what, f"Make {path} readable for the engine's user.")
        return None
    if real is not None:
        scan.add(
            "lfs_pointer",
            name,
            f"a Git LFS pointer of {info.st_size} bytes instead of the content",
            f"the file itself{f', {real} bytes' if real else ''}",
            f"Run `git lfs install && git lfs pull` in {scan.root}, or download {name} with `hf download`.",
        )
        return None
    return info.st_size


def _present(scan: _Scan, name: str) -> bool:
    """Whether the directory has an entry of that name, a dangling link included."""
    return os.path.lexists(scan.root / name)


def _read_json(scan: _Scan, name: str, what: str) -> tuple[dict[str, Any] | None, bytes]:
    """Parsed object and raw bytes of a JSON file; no object, and a problem noted, when that is not possible."""
    size = _check_file(scan, name, what)
    if size is None:
        return None, b""
    todo = f"Download {name} again into {scan.root}."
    if size > MAX_JSON_BYTES:
        scan.add("json_invalid", name, f"{size} bytes", f"{what} of at most {MAX_JSON_BYTES} bytes", todo)
        return None, b""
    try:
        raw = (scan.root / name).read_bytes()
    except OSError as error:
        scan.add("file_unreadable", name, str(error.strerror), what, f"Make {scan.root / name} readable.")
        return None, b""
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        scan.add("json_invalid", name, f"invalid JSON ({error})", what, todo)
        return None, raw
    if not isinstance(value, dict):
        scan.add("json_invalid", name, f"JSON of type {type(value).__name__}", f"{what}: a JSON object", todo)
        return None, raw
    return value, raw


def _check_code(scan: _Scan, name: str, document: dict[str, Any]) -> list[str]:
    """Python files that `auto_map` of a config names; a missing one is a problem."""
    files: set[str] = set()
    auto_map = document.get("auto_map")
    for value in auto_map.values() if isinstance(auto_map, dict) else []:
        for reference in value if isinstance(value, (list, tuple)) else [value]:
            # "other/repository--module.Class" lives elsewhere: nothing to look for here.
            if isinstance(reference, str) and "." in reference and "--" not in reference:
                files.add(reference.rsplit(".", 1)[0].replace(".", "/") + ".py")
    for file in sorted(files):
        _check_file(scan, file, f"the code that {name} names in auto_map (needs trust_remote_code)")
    return sorted(files)


def _read_config(scan: _Scan) -> tuple[dict[str, Any], bytes, list[str]]:
    found, raw = _read_json(scan, "config.json", "the model's configuration")
    config = found or {}
    architectures = config.get("architectures")
    names = [str(name) for name in architectures] if isinstance(architectures, list) else []
    if found is not None and not names:
        scan.add(
            "config_no_architecture",
            "config.json",
            f"architectures: {json.dumps(architectures)}",
            "a list with the name of the model's class",
            "Take config.json from the model's publisher; the engine picks its model class by that name.",
        )
    _check_code(scan, "config.json", config)
    processors = ("preprocessor_config.json", "processor_config.json")
    if scan.kind == "target" and "vision_config" in config and not any(_present(scan, name) for name in processors):
        scan.warn(
            "processor_missing",
            processors[0],
            "no such file, while config.json has a vision_config",
            " or ".join(processors),
            f"Download it into {scan.root}; without it images cannot be processed.",
        )
    return config, raw, names


def _read_tokenizer(scan: _Scan, required: bool) -> dict[str, Any]:
    vocabulary = next((group for group in VOCABULARIES if any(_present(scan, name) for name in group)), ())
    # Any other *.tiktoken file is a vocabulary as well (Qwen).
    if not vocabulary:
        vocabulary = tuple(sorted(path.name for path in scan.root.glob("*.tiktoken"))[:1])
    has_config = _present(scan, "tokenizer_config.json")
    result: dict[str, Any] = {
        "present": False,
        "required": required,
        "files": [],
        "class": "",
        "chat_template": False,
        "model_max_length": None,
        "custom_code": [],
    }
    before = len(scan.problems)
    if required and not vocabulary:
        scan.add(
            "tokenizer_missing",
            "tokenizer.json",
            "no vocabulary file",
            "tokenizer.json, tokenizer.model or tiktoken.model",
            f"Download the tokenizer's files into {scan.root}.",
        )
    for name in vocabulary:
        if name == "tokenizer.json":
            _read_json(scan, name, "the tokenizer's vocabulary")
        else:
            _check_file(scan, name, "the tokenizer's vocabulary")
    config: dict[str, Any] = {}
    if has_config or required:
        config = _read_json(scan, "tokenizer_config.json", "the tokenizer's configuration")[0] or {}
        result["custom_code"] = _check_code(scan, "tokenizer_config.json", config)
    result["class"] = str(config.get("tokenizer_class") or "")
    limit = config.get("model_max_length")
    # Tokenizers without a limit carry 1e30.
    result["model_max_length"] = limit if isinstance(limit, int) and 0 < limit < 2**53 else None
    templates = [name for name in ("chat_template.jinja", "chat_template.json") if _present(scan, name)]
    for name in templates:
        _check_file(scan, name, "the chat template")
    result["chat_template"] = bool(config.get("chat_template") or templates)
    result["files"] = [*vocabulary, *(["tokenizer_config.json"] if has_config else []), *templates]
    result["present"] = bool(vocabulary) and has_config and len(scan.problems) == before
    return result


def _read_index(scan: _Scan) -> tuple[dict[str, set[str]], int | None, bytes]:
    """Tensor names by shard, the total the index claims (bytes), and its raw content."""
    index, raw = _read_json(scan, INDEX, "the list of tensors and the shards that hold them")
    if index is None:
        return {}, None, raw
    weight_map = index.get("weight_map")
    by_shard: dict[str, set[str]] = {}
    for tensor, shard in weight_map.items() if isinstance(weight_map, dict) else []:
        if not isinstance(shard, str) or not shard or shard.startswith("/") or ".." in shard.split("/"):
            by_shard = {}
            break
        by_shard.setdefault(shard, set()).add(tensor)
    if not by_shard:
        scan.add(
            "index_invalid",
            INDEX,
            "no usable weight_map",
            "weight_map: {tensor: shard file below the model directory}",
            f"Download {INDEX} again into {scan.root}.",
        )
    metadata = index.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    return by_shard, int(total) if isinstance(total, (int, float)) and total > 0 else None, raw


def _find_shards(scan: _Scan) -> tuple[dict[str, set[str]], int | None, bytes]:
    """As _read_index, for a directory with an index, one weight file, or neither."""
    if _present(scan, INDEX):
        return _read_index(scan)
    if _present(scan, SINGLE):
        return {SINGLE: set()}, None, b""
    found = sorted(path.name for path in scan.root.glob("*.safetensors"))
    if len(found) == 1 and not SHARD_OF_MANY.search(found[0]):
        return {found[0]: set()}, None, b""
    if found:
        match = SHARD_OF_MANY.search(found[-1])
        scan.add(
            "index_missing",
            INDEX,
            f"{len(found)} .safetensors file(s){f' of {int(match.group(2))}' if match else ''}, but no index",
            f"{INDEX}, which says which shards belong to the model",
            f"Download {INDEX} (and the shards that are missing) into {scan.root}.",
        )
        return {name: set() for name in found}, None, b""
    other = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf") for path in scan.root.glob(pattern))
    scan.add(
        "weights_missing",
        SINGLE,
        f"no .safetensors file{f', only {other[0]} and the like ({len(other)})' if other else ''}",
        f"{INDEX} with its shards, or {SINGLE}",
        f"Convert the weights to safetensors in {scan.root}." if other else f"Download the weights into {scan.root}.",
    )
    return {}, None, b""


def _pack_factor(config: dict[str, Any]) -> int:
    """How many weights one 32-bit element of a `weight_packed` tensor holds (compressed-tensors, pack-quantized)."""
    candidates = [config.get("quantization_config")]
    if isinstance(config.get("text_config"), dict):
        candidates.append(config["text_config"].get("quantization_config"))
    for quantization in candidates:
        if not isinstance(quantization, dict):
            continue
        groups = quantization.get("config_groups")
        for group in groups.values() if isinstance(groups, dict) else []:
            weights = group.get("weights") if isinstance(group, dict) else None
            bits = weights.get("num_bits") if isinstance(weights, dict) else None
            if isinstance(bits, int) and 0 < bits <= 32:
                return 32 // bits
    return 1


def _read_shard(scan: _Scan, name: str, wanted: set[str], pack_factor: int) -> tuple[Shard, Header | None]:
    shard = Shard(name)
    size = _check_file(scan, name, f"a weight file{f' with {len(wanted)} tensors' if wanted else ''}")
    if size is None:
        try:
            shard.bytes = (scan.root / name).stat().st_size
        except OSError:
            shard.bytes = None
        return shard, None
    shard.bytes = size
    todo = f"Delete {scan.root / name} and download it again."
    try:
        header = read_header(scan.root / name, size, pack_factor)
    except _HeaderError as error:
        id_ = "shard_truncated" if error.truncated else "shard_invalid"
        scan.add(id_, name, str(error), "a safetensors file: 8 bytes of header length, JSON header, data", todo)
        return shard, None
    except OSError as error:
        scan.add("file_unreadable", name, str(error.strerror), "a weight file", f"Make {scan.root / name} readable.")
        return shard, None
    shard.expected_bytes = header.expected_bytes
    shard.tensors = len(header.names)
    if size != header.expected_bytes:
        scan.add(
            "shard_truncated" if size < header.expected_bytes else "shard_oversized",
            name,
            f"{size} bytes",
            f"{header.expected_bytes} bytes by its own header",
            todo,
        )
    missing = sorted(wanted - header.names)
    if missing:
        scan.add(
            "shard_tensors_missing",
            name,
            f"{len(missing)} tensor(s) of the index are not in it, first {missing[0]}",
            f"the {len(wanted)} tensors that {INDEX} places there",
            f"Index and shard are of different revisions: download {INDEX} and {name} of the same one.",
        )
    return shard, header


def _is_locked(path: Path) -> bool:
    """Whether a process holds the lock file. huggingface_hub leaves its .lock files behind: one alone says nothing."""
    try:
        with path.open("rb") as handle:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _check_downloads(scan: _Scan) -> None:
    """Leftovers of an interrupted download, and downloads that are running now."""
    own = [scan.root, scan.root / ".cache" / "huggingface" / "download"]
    folders = list(own)
    if scan.root.parent.name == "snapshots":
        # A snapshot in Hugging Face's cache; its blobs folder is shared with other revisions.
        repository = scan.root.parent.parent
        folders += [repository / "blobs", repository.parent / ".locks" / repository.name]
    for folder in folders:
        try:
            names = sorted(os.listdir(folder))
        except OSError:
            continue
        leftovers = [name for name in names if name.endswith(".incomplete")]
        locked = [name for name in names if name.endswith(".lock") and _is_locked(folder / name)]
        if locked:
            scan.add(
                "download_running",
                os.path.relpath(folder / locked[0], scan.root),
                f"{len(locked)} lock file(s) held by a running process",
                "no download into the model directory",
                "Wait until the download has ended, then run again.",
            )
        if leftovers:
            # Beside other revisions an .incomplete file may belong to one of them.
            note = scan.add if folder in own or scan.problems else scan.warn
            note(
                "download_incomplete",
                os.path.relpath(folder / leftovers[0], scan.root),
                f"{len(leftovers)} unfinished download(s)",
                "no *.incomplete file",
                f"Run the download again until it ends without error, or delete {folder}/*.incomplete if it did.",
            )


def _fingerprint(config: bytes, index: bytes, shards: list[Shard]) -> str:
    digest = hashlib.sha256()
    for part in (config, index, json.dumps([[shard.file, shard.bytes] for shard in shards]).encode()):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def inspect_model(
    path: str, kind: str = "target", require_tokenizer: bool | None = None, user: str = "", group: str = ""
) -> dict[str, Any]:
    """Everything a plan, a preflight and a verification need to know about the model directory `path`.

    `require_tokenizer` defaults to true for a target; a draft uses the target's tokenizer. `user` and `group` are those
    that the engine will run as; no user and root: who may read the files is not looked at. Never raises because of what
    the directory holds: `problems` says what is wrong. Raises ValueError for a relative path or an unknown kind.
    """
    error = path_error(path)
    if error:
        raise ValueError(error)
    if kind not in KINDS:
        raise ValueError(f"kind is '{kind}', expected one of {', '.join(KINDS)}. Use the one that fits.")
    scan = _Scan(Path(path), kind)
    result: dict[str, Any] = {
        "path": path,
        "kind": kind,
        "exists": False,
        "complete": False,
        "problems": [],
        "warnings": [],
        "config": {},
        "architectures": [],
        "generation_config": {},
        "tokenizer": {},
        "shards": [],
        "weights_bytes": 0,
        "index_total_bytes": None,
        "bytes_by_dtype": {},
        "parameters": 0,
        "fingerprint": "",
    }
    required = kind == "target" if require_tokenizer is None else require_tokenizer
    result["exists"] = os.path.lexists(path)
    if _check_directory(scan):
        _inspect(scan, required, result)
        access = reader(user, group)
        if access:
            _check_access(scan, access)
    result["problems"] = [asdict(problem) for problem in scan.problems]
    result["warnings"] = [asdict(problem) for problem in scan.warnings]
    result["complete"] = not scan.problems
    return result


def _check_directory(scan: _Scan) -> bool:
    where = str(scan.root)
    expected = f"the directory of the {scan.kind} model, with config.json and its weights"
    todo = "Correct the path, or download the model to it."
    try:
        names = os.listdir(scan.root)
    except FileNotFoundError:
        found = "a dangling symbolic link" if scan.root.is_symlink() else "no such directory"
        scan.add("directory_missing", where, found, expected, todo)
    except NotADirectoryError:
        scan.add("not_a_directory", where, "a file", expected, "Give the directory, not a file in it.")
    except OSError as error:
        scan.add("directory_unreadable", where, str(error.strerror), expected, f"Make {where} readable.")
    else:
        if names:
            return True
        scan.add("directory_empty", where, "an empty directory", expected, todo)
    return False


def _check_access(scan: _Scan, access: Access) -> None:
    """What root can read and the engine's user cannot. One problem for each folder, since files come by the dozen."""
    names = {name for name in os.listdir(scan.root) if name.endswith(READ_BY_ENGINE)} | scan.checked
    blocked: dict[str, Refusal] = {}
    files: dict[str, dict[str, Refusal]] = {}
    for refusal in access.refusals(str(scan.root)):
        blocked.setdefault(refusal.path, refusal)
    for name in sorted(names):
        for refusal in access.refusals(str(scan.root / name)):
            if refusal.folder:
                blocked.setdefault(refusal.path, refusal)
            else:
                files.setdefault(os.path.dirname(refusal.path), {}).setdefault(refusal.path, refusal)
    who = f"the user {access.user}, as whom the engine runs (deployment_unit.user)"
    for refusal in blocked.values():
        verb = "readable and searchable" if "r" in refusal.wanted else "searchable"
        scan.add(
            "folder_no_access",
            refusal.path,
            refusal.found,
            f"a folder that is {verb} for {who}",
            access.advice(refusal, refusal.path, recursive=False),
        )
    for folder, refused in sorted(files.items()):
        first = next(iter(refused.values()))
        more = f" (and {len(refused) - 1} more file(s) in {folder})" if len(refused) > 1 else ""
        scan.add(
            "file_no_access",
            first.path,
            f"{first.found}{more}",
            f"a file that is readable for {who}",
            access.advice(first, folder if more else first.path, recursive=bool(more)),
        )


def _inspect(scan: _Scan, require_tokenizer: bool, result: dict[str, Any]) -> None:
    config, config_raw, architectures = _read_config(scan)
    result["config"] = config
    result["architectures"] = architectures
    if _present(scan, "generation_config.json"):
        result["generation_config"] = _read_json(scan, "generation_config.json", "the sampling defaults")[0] or {}
    result["tokenizer"] = _read_tokenizer(scan, require_tokenizer)

    by_shard, total, index_raw = _find_shards(scan)
    shards: list[Shard] = []
    headers: list[Header] = []
    by_dtype: dict[str, int] = {}
    pack_factor = _pack_factor(config)
    for name in sorted(by_shard):
        shard, header = _read_shard(scan, name, by_shard[name], pack_factor)
        shards.append(shard)
        if header:
            headers.append(header)
            for dtype, count in header.bytes_by_dtype.items():
                by_dtype[dtype] = by_dtype.get(dtype, 0) + count
    result["shards"] = [asdict(shard) for shard in shards]
    result["weights_bytes"] = sum(shard.bytes or 0 for shard in shards)
    result["index_total_bytes"] = total
    result["bytes_by_dtype"] = dict(sorted(by_dtype.items()))
    result["parameters"] = sum(header.elements for header in headers)
    result["fingerprint"] = _fingerprint(config_raw, index_raw, shards)
    data = sum(header.data_bytes for header in headers)
    if total is not None and len(headers) == len(shards) and total not in (data, result["weights_bytes"]):
        # No loader reads total_size, and published indexes with a wrong one exist: worth a word, no reason to refuse.
        scan.warn(
            "total_size_mismatch",
            INDEX,
            f"the shards hold {data} bytes of tensors",
            f"{total} bytes by metadata.total_size of the index",
            "If all files are of one revision the index itself is wrong and nothing is to do; else download it again.",
        )
    _check_downloads(scan)


def describe_problems(info: dict[str, Any], name: str = "model_path") -> str:
    """One text for all problems of what inspect_model returned; empty when there is none."""
    problems = info.get("problems") or []
    if not problems:
        return ""
    what = f"is not a complete {info['kind']} model"
    if all(problem["id"] in ACCESS_PROBLEMS for problem in problems):
        what = f"is a complete {info['kind']} model that the engine may not read"
    lines = [f"{name} is '{info['path']}', which {what} ({len(problems)} problem(s)):"]
    lines += [f"- {p['file']}: found {p['found']}; expected {p['expected']}. {p['todo']} [{p['id']}]" for p in problems]
    return "\n".join(lines)
