"""module_utils/model_files.py: what it says about directories that are complete, and about each way not to be."""

from __future__ import annotations

import fcntl
import json
import os
import pwd
import time
from pathlib import Path
from typing import Any

import plan_cases
import pytest
import yaml
from ansible_collections.gpuserve.sglang.plugins.module_utils import file_access, model_files
from ansible_collections.gpuserve.sglang.plugins.module_utils.plan import launch_plan

ROOT = Path(__file__).resolve().parents[2]
DTYPE_BYTES = {"F32": 4, "BF16": 2, "I32": 4}


def safetensors(tensors: dict[str, tuple[str, list[int]]]) -> bytes:
    """A safetensors file, written down from the format's description and not with the code under test."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dtype, shape) in tensors.items():
        size = DTYPE_BYTES[dtype]
        for extent in shape:
            size *= extent
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    return len(raw).to_bytes(8, "little") + raw + bytes(offset)


SHARDS = {
    "model-00001-of-00002.safetensors": {"embed.weight": ("BF16", [10, 4]), "layer.0.weight": ("F32", [4, 4])},
    "model-00002-of-00002.safetensors": {"layer.1.weight": ("F32", [4, 4]), "head.weight": ("BF16", [10, 4])},
}
LAST = "model-00002-of-00002.safetensors"
TOTAL = 2 * (10 * 4 * 2 + 4 * 4 * 4)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A complete sharded model."""
    root = tmp_path / "model"
    root.mkdir()
    (root / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "hidden_size": 4}))
    (root / "generation_config.json").write_text(json.dumps({"temperature": 0.6}))
    (root / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {}}}))
    (root / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": "{{ x }}", "model_max_length": 4096})
    )
    for name, tensors in SHARDS.items():
        (root / name).write_bytes(safetensors(tensors))
    write_index(root)
    return root


def write_index(root: Path, total: int = TOTAL, **more: str) -> None:
    weight_map = {tensor: shard for shard, tensors in SHARDS.items() for tensor in tensors}
    (root / model_files.INDEX).write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": {**weight_map, **more}})
    )


def look(root: Path, **options: Any) -> dict[str, Any]:
    return model_files.inspect_model(str(root), **options)


def ids(info: dict[str, Any]) -> list[tuple[str, str]]:
    return [(problem["id"], problem["file"]) for problem in info["problems"]]


def test_complete_model(model: Path) -> None:
    info = look(model)
    assert info["problems"] == []
    assert info["warnings"] == []
    assert info["complete"] is True
    assert info["exists"] is True
    assert info["architectures"] == ["LlamaForCausalLM"]
    assert info["config"]["hidden_size"] == 4
    assert info["generation_config"] == {"temperature": 0.6}
    assert info["tokenizer"] == {
        "present": True,
        "required": True,
        "files": ["tokenizer.json", "tokenizer_config.json"],
        "class": "PreTrainedTokenizerFast",
        "chat_template": True,
        "model_max_length": 4096,
        "custom_code": [],
    }
    assert [(s["file"], s["tensors"]) for s in info["shards"]] == [(name, 2) for name in SHARDS]
    assert all(s["bytes"] == s["expected_bytes"] == (model / s["file"]).stat().st_size for s in info["shards"])
    assert info["weights_bytes"] == sum((model / name).stat().st_size for name in SHARDS)
    assert info["index_total_bytes"] == TOTAL
    assert info["bytes_by_dtype"] == {"BF16": 160, "F32": 128}
    assert info["parameters"] == 2 * (40 + 16)
    assert model_files.describe_problems(info) == ""


def test_agrees_with_the_safetensors_library(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    library = pytest.importorskip("safetensors.numpy")
    tensors = {"a": numpy.zeros((3, 5), numpy.float32), "b": numpy.zeros((7,), numpy.float16)}
    library.save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    size = (tmp_path / "model.safetensors").stat().st_size
    header = model_files.read_header(tmp_path / "model.safetensors", size)
    assert (header.expected_bytes, header.elements) == (size, 22)
    assert header.bytes_by_dtype == {"F32": 60, "F16": 14}


def test_single_file_draft_needs_no_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLMEagle3"]}))
    (tmp_path / "model.safetensors").write_bytes(safetensors({"fc.weight": ("BF16", [8, 8])}))
    assert look(tmp_path, kind="draft")["complete"] is True
    assert ids(look(tmp_path, kind="draft", require_tokenizer=True)) == ids(look(tmp_path))
    assert ids(look(tmp_path)) == [("tokenizer_missing", "tokenizer.json"), ("file_missing", "tokenizer_config.json")]


def test_packed_weights_count_as_what_they_hold(tmp_path: Path) -> None:
    quantization = {"config_groups": {"group_0": {"weights": {"num_bits": 4}}}, "format": "pack-quantized"}
    config = {"architectures": ["A"], "text_config": {"quantization_config": quantization}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = {"up.weight_packed": ("I32", [4, 2]), "up.weight_scale": ("BF16", [4, 1])}
    (tmp_path / "model.safetensors").write_bytes(safetensors(tensors))
    assert look(tmp_path, kind="draft")["parameters"] == 4 * 2 * 8 + 4


@pytest.mark.parametrize(
    ("files", "complete"),
    [
        (["tiktoken.model"], True),
        (["tokenizer.model"], True),
        (["vocab.json", "merges.txt"], True),
        (["qwen.tiktoken"], True),
        (["vocab.json"], False),
        ([], False),
    ],
)
def test_vocabularies(model: Path, files: list[str], complete: bool) -> None:
    (model / "tokenizer.json").unlink()
    for name in files:
        (model / name).write_text("x")
    assert look(model)["complete"] is complete


# --- every way not to be complete --------------------------------------------------------------------------------------


def cut(path: Path, size: int) -> None:
    with path.open("rb+") as handle:
        handle.truncate(size)


def damage_missing(root: Path) -> None:
    (root / LAST).unlink()


def damage_empty(root: Path) -> None:
    (root / LAST).write_bytes(b"")


def damage_truncated(root: Path) -> None:
    cut(root / LAST, (root / LAST).stat().st_size - 1)


def damage_truncated_in_header(root: Path) -> None:
    cut(root / LAST, 60)


def damage_truncated_in_length(root: Path) -> None:
    cut(root / LAST, 5)


def damage_oversized(root: Path) -> None:
    with (root / LAST).open("ab") as handle:
        handle.write(b"x")


def damage_html(root: Path) -> None:
    (root / LAST).write_text("<!DOCTYPE html><title>403 Forbidden</title>" * 9)


def damage_header_json(root: Path) -> None:
    (root / LAST).write_bytes((16).to_bytes(8, "little") + b"{" + b"x" * 15 + bytes(100))


def damage_header_shape(root: Path) -> None:
    raw = b'{"a": {"dtype": "F32"}}'
    (root / LAST).write_bytes(len(raw).to_bytes(8, "little") + raw)


def damage_lfs(root: Path) -> None:
    (root / LAST).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9126805504\n")


def damage_link(root: Path) -> None:
    (root / LAST).unlink()
    (root / LAST).symlink_to("../../blobs/abc")


def damage_directory(root: Path) -> None:
    (root / LAST).unlink()
    (root / LAST).mkdir()


def damage_revision(root: Path) -> None:
    (root / LAST).write_bytes(safetensors({"layer.1.weight": ("F32", [4, 4])}))


@pytest.mark.parametrize(
    ("damage", "id_", "found", "expected"),
    [
        (damage_missing, "file_missing", "no such file", "2 tensors"),
        (damage_empty, "file_empty", "0 bytes", "2 tensors"),
        (damage_truncated, "shard_truncated", " bytes", "bytes by its own header"),
        (damage_truncated_in_header, "shard_truncated", "60 bytes, less than the header alone", "safetensors"),
        (damage_truncated_in_length, "shard_truncated", "5 bytes", "safetensors"),
        (damage_oversized, "shard_oversized", " bytes", "bytes by its own header"),
        (damage_html, "shard_invalid", "a header length of", "safetensors"),
        (damage_header_json, "shard_invalid", "an unreadable header", "safetensors"),
        (damage_header_shape, "shard_invalid", "an unreadable header", "safetensors"),
        (damage_lfs, "lfs_pointer", "a Git LFS pointer", "9126805504 bytes"),
        (damage_link, "broken_link", "../../blobs/abc", "2 tensors"),
        (damage_directory, "file_not_regular", "not a regular file", "2 tensors"),
        (damage_revision, "shard_tensors_missing", "1 tensor(s) of the index", "2 tensors"),
    ],
)
def test_damaged_shard(model: Path, damage: Any, id_: str, found: str, expected: str) -> None:
    damage(model)
    info = look(model)
    assert ids(info) == [(id_, LAST)]
    assert info["complete"] is False
    problem = info["problems"][0]
    assert found in problem["found"]
    assert expected in problem["expected"]
    assert problem["todo"]
    text = model_files.describe_problems(info)
    assert str(model) in text
    assert all(problem[key] in text for key in ("file", "found", "expected", "todo", "id"))


def test_every_problem_is_listed_at_once(model: Path) -> None:
    (model / "config.json").write_text("{")
    (model / "tokenizer.json").unlink()
    damage_missing(model)
    assert ids(look(model)) == [
        ("json_invalid", "config.json"),
        ("tokenizer_missing", "tokenizer.json"),
        ("file_missing", LAST),
    ]


@pytest.mark.parametrize(
    ("content", "id_"),
    [
        ("[]", "json_invalid"),
        ("{}", "index_invalid"),
        ('{"weight_map": {}}', "index_invalid"),
        ('{"weight_map": {"a": 1}}', "index_invalid"),
        ('{"weight_map": {"a": "../other/model.safetensors"}}', "index_invalid"),
        ('{"weight_map": {"a": "/etc/passwd"}}', "index_invalid"),
    ],
)
def test_unusable_index(model: Path, content: str, id_: str) -> None:
    (model / model_files.INDEX).write_text(content)
    assert (id_, model_files.INDEX) in ids(look(model))


def test_shards_without_index(model: Path) -> None:
    (model / model_files.INDEX).unlink()
    damage_missing(model)
    info = look(model)
    assert ids(info) == [("index_missing", model_files.INDEX)]
    assert "1 .safetensors file(s) of 2" in info["problems"][0]["found"]


@pytest.mark.parametrize(("name", "todo"), [("", "Download"), ("pytorch_model.bin", "Convert")])
def test_no_weights(model: Path, name: str, todo: str) -> None:
    for file in [model_files.INDEX, *SHARDS]:
        (model / file).unlink()
    if name:
        (model / name).write_text("x")
    info = look(model)
    assert ids(info) == [("weights_missing", "model.safetensors")]
    assert name in info["problems"][0]["found"]
    assert info["problems"][0]["todo"].startswith(todo)


def test_total_size_of_the_index(model: Path) -> None:
    write_index(model, total=TOTAL - 16)
    info = look(model)
    assert info["complete"] is True
    assert [warning["id"] for warning in info["warnings"]] == ["total_size_mismatch"]
    # Some publishers count the files, headers included.
    write_index(model, total=sum((model / name).stat().st_size for name in SHARDS))
    assert look(model)["warnings"] == []


@pytest.mark.parametrize("content", ["{}", '{"model_type": "llama"}', '{"architectures": []}'])
def test_config_without_architecture(model: Path, content: str) -> None:
    (model / "config.json").write_text(content)
    assert ids(look(model)) == [("config_no_architecture", "config.json")]


def test_code_named_by_auto_map(model: Path) -> None:
    config = {"architectures": ["K"], "auto_map": {"AutoConfig": "configuration_k.KConfig", "AutoModel": "o/r--m.K"}}
    (model / "config.json").write_text(json.dumps(config))
    tokenizer = {"auto_map": {"AutoTokenizer": ["tokenization_k.KTokenizer", None]}}
    (model / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    assert ids(look(model)) == [("file_missing", "configuration_k.py"), ("file_missing", "tokenization_k.py")]
    (model / "configuration_k.py").write_text("pass")
    (model / "tokenization_k.py").write_text("pass")
    assert look(model)["tokenizer"]["custom_code"] == ["tokenization_k.py"]
    assert look(model)["complete"] is True


def test_images_without_processor(model: Path) -> None:
    (model / "config.json").write_text(json.dumps({"architectures": ["K"], "vision_config": {}}))
    assert [warning["id"] for warning in look(model)["warnings"]] == ["processor_missing"]
    (model / "preprocessor_config.json").write_text("{}")
    assert look(model)["warnings"] == []


# --- directories ------------------------------------------------------------------------------------------------------


def test_directories_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("nowhere")
    seen = {name: look(tmp_path / name) for name in ("gone", "file", "empty", "link")}
    assert {name: [p["id"] for p in info["problems"]] for name, info in seen.items()} == {
        "gone": ["directory_missing"],
        "file": ["not_a_directory"],
        "empty": ["directory_empty"],
        "link": ["directory_missing"],
    }
    assert {name: info["exists"] for name, info in seen.items()} == {
        "gone": False,
        "file": True,
        "empty": True,
        "link": True,
    }
    assert all(info["fingerprint"] == "" and info["complete"] is False for info in seen.values())


def test_bad_options() -> None:
    with pytest.raises(ValueError, match="model_path is 'models/kimi', expected an absolute path"):
        model_files.inspect_model("models/kimi")
    with pytest.raises(ValueError, match="kind is 'drat', expected one of target, draft"):
        model_files.inspect_model("/tmp", kind="drat")


# --- downloads --------------------------------------------------------------------------------------------------------


def test_hugging_face_cache(model: Path, tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "models--a--b"
    blobs, snapshot = repository / "blobs", repository / "snapshots" / "0123"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for file in model.iterdir():
        (blobs / f"sha-{file.name}").write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(f"../../blobs/sha-{file.name}")
    assert look(snapshot)["complete"] is True
    # An unfinished blob may be another revision's, unless something is missing here.
    (blobs / "other.incomplete").write_bytes(b"x")
    assert [warning["id"] for warning in look(snapshot)["warnings"]] == ["download_incomplete"]
    (blobs / f"sha-{LAST}").unlink()
    assert ids(look(snapshot)) == [("broken_link", LAST), ("download_incomplete", "../../blobs/other.incomplete")]


@pytest.mark.parametrize("folder", [".", ".cache/huggingface/download"])
def test_leftovers_of_a_download(model: Path, folder: str) -> None:
    (model / folder).mkdir(parents=True, exist_ok=True)
    # huggingface_hub never removes its lock files: one that nobody holds means nothing.
    lock = model / folder / "config.json.lock"
    lock.touch()
    assert look(model)["complete"] is True
    with lock.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        assert [problem["id"] for problem in look(model)["problems"]] == ["download_running"]
    (model / folder / f"{LAST}.incomplete").touch()
    assert [problem["id"] for problem in look(model)["problems"]] == ["download_incomplete"]


# --- fingerprint, speed -----------------------------------------------------------------------------------------------


def test_fingerprint_notices_what_matters(model: Path) -> None:
    seen = [look(model)["fingerprint"]]
    os.utime(model / LAST, (1, 1))
    (model / "README.md").write_text("x")
    assert look(model)["fingerprint"] == seen[0]
    write_index(model, total=1)
    seen.append(look(model)["fingerprint"])
    damage_oversized(model)
    seen.append(look(model)["fingerprint"])
    (model / "config.json").write_text(json.dumps({"architectures": ["Other"]}))
    seen.append(look(model)["fingerprint"])
    damage_missing(model)
    seen.append(look(model)["fingerprint"])
    assert len(set(seen)) == 5
    assert all(len(value) == 64 for value in seen)


def test_only_headers_are_read(tmp_path: Path) -> None:
    """64 sparse shards, 8 GiB each by their headers: reading the data would take minutes."""
    (tmp_path / "config.json").write_text('{"architectures": ["K"]}')
    weight_map = {}
    for number in range(1, 65):
        name = f"model-{number:05d}-of-00064.safetensors"
        header = json.dumps({f"t{number}": {"dtype": "BF16", "shape": [2**32], "data_offsets": [0, 2**33]}}).encode()
        with (tmp_path / name).open("wb") as handle:
            handle.write(len(header).to_bytes(8, "little") + header)
            handle.truncate(8 + len(header) + 2**33)
        weight_map[f"t{number}"] = name
    index = {"metadata": {"total_size": 64 * 2**33}, "weight_map": weight_map}
    (tmp_path / model_files.INDEX).write_text(json.dumps(index))
    # Of the processor, which a loaded machine does not lengthen.
    begin = time.process_time()
    info = look(tmp_path, kind="draft")
    assert time.process_time() - begin < 5
    assert info["complete"] is True
    assert info["bytes_by_dtype"] == {"BF16": 64 * 2**33}
    assert info["warnings"] == []


# --- who may read it ------------------------------------------------------------------------------------------------------

#: No machine has it, so only what everybody may do counts.
NOBODY_YET = "gpuserve-none-yet"


@pytest.fixture
def open_model(model: Path) -> Path:
    """The model in folders that everybody may search, whatever umask and pytest's own folder are like."""
    for folder in (model, *model.parents[:-1]):
        if folder.stat().st_uid == os.geteuid() and folder.is_relative_to(model.parents[2]):
            folder.chmod(0o755)
    for file in model.iterdir():
        file.chmod(0o644)
    return model


def refused(root: Path, **options: Any) -> list[dict[str, Any]]:
    """Problems of this model's own folders; that pytest's temporary folder is closed to others is no matter here."""
    info = look(root, **{"user": NOBODY_YET, **options})
    inside = str(root.parent)
    return [problem for problem in info["problems"] if problem["file"].startswith(inside)]


def test_a_model_that_everybody_may_read(open_model: Path) -> None:
    assert refused(open_model) == []


def test_weights_of_a_strict_umask_are_refused(open_model: Path) -> None:
    for file in open_model.iterdir():
        file.chmod(0o600)
    (problem,) = refused(open_model)
    count = len(list(open_model.iterdir()))
    assert problem["id"] == "file_no_access"
    assert problem["file"] == str(open_model / "config.json")
    assert problem["found"].startswith("mode 0600, owner ")
    assert f"and {count - 1} more file(s)" in problem["found"]
    assert f"readable for the user {NOBODY_YET}" in problem["expected"]
    assert f"`chmod -R o+rX {open_model}`" in problem["todo"]
    assert "deployment_unit" in problem["todo"]
    # A list cannot name a user that is not there yet.
    assert "setfacl" not in problem["todo"]


def test_without_a_user_and_for_root_nothing_is_asked(open_model: Path) -> None:
    (open_model / LAST).chmod(0o600)
    for user in ("", "root", "0"):
        assert look(open_model, user=user)["complete"] is True
    assert [problem["file"] for problem in refused(open_model)] == [str(open_model / LAST)]


@pytest.mark.parametrize("mode", [0o700, 0o750])
def test_a_closed_folder_above_is_refused(open_model: Path, mode: int) -> None:
    open_model.parent.chmod(mode)
    (problem,) = refused(open_model)
    assert (problem["id"], problem["file"]) == ("folder_no_access", str(open_model.parent))
    assert problem["found"].startswith(f"mode {mode:04o}, owner ")
    assert f"`chmod o+x {open_model.parent}`" in problem["todo"]


def test_the_model_folder_itself_is_listed_as_well(open_model: Path) -> None:
    open_model.chmod(0o711)
    (problem,) = refused(open_model)
    assert (problem["id"], problem["file"]) == ("folder_no_access", str(open_model))
    assert "readable and searchable" in problem["expected"]


def test_links_are_followed_into_their_folders(open_model: Path) -> None:
    """A Hugging Face cache: the snapshot is open, the blobs that it points to are not."""
    blobs = open_model.parent / "blobs"
    blobs.mkdir(mode=0o700)
    (open_model / LAST).rename(blobs / "abc")
    (open_model / LAST).symlink_to("../blobs/abc")
    (problem,) = refused(open_model)
    assert (problem["id"], problem["file"]) == ("folder_no_access", str(blobs))
    blobs.chmod(0o755)
    (blobs / "abc").chmod(0o640)
    (problem,) = refused(open_model)
    assert (problem["id"], problem["file"]) == ("file_no_access", str(blobs / "abc"))
    assert f"`chmod o+r {blobs / 'abc'}`" in problem["todo"]


def test_a_link_to_the_model_itself(open_model: Path) -> None:
    closed = open_model.parent / "closed"
    closed.mkdir()
    open_model.rename(closed / "model")
    open_model.symlink_to(closed / "model")
    closed.chmod(0o700)
    assert [problem["file"] for problem in refused(open_model)] == [str(closed)]


def test_files_that_the_engine_does_not_need_may_be_closed(open_model: Path) -> None:
    for name in ("README.md", ".gitattributes"):
        (open_model / name).touch(mode=0o600)
    assert refused(open_model) == []
    (open_model / "preprocessor_config.json").write_text("{}")
    (open_model / "preprocessor_config.json").chmod(0o600)
    assert [problem["id"] for problem in refused(open_model)] == ["file_no_access"]


def test_an_acl_is_believed(open_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (open_model / LAST).chmod(0o600)
    monkeypatch.setattr(os, "listxattr", lambda path: ["system.posix_acl_access"] if str(path).endswith(LAST) else [])
    assert refused(open_model) == []


def test_owner_group_and_supplementary_groups_count(open_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = (open_model / LAST).stat()
    (open_model / LAST).chmod(0o640)

    def engine(uid: int, gid: int, groups: list[int]) -> None:
        entry = pwd.struct_passwd(("engine", "x", uid, gid, "", "/", "/bin/false"))
        monkeypatch.setattr(pwd, "getpwnam", lambda name: entry)
        monkeypatch.setattr(os, "getgrouplist", lambda name, main: [main, *groups])

    other = info.st_gid + 4711
    engine(info.st_uid + 4711, other, [])
    (problem,) = refused(open_model, user="engine")
    assert f"`setfacl -m u:engine:r {open_model / LAST}`" in problem["todo"]
    engine(info.st_uid + 4711, other, [info.st_gid])
    assert refused(open_model, user="engine") == []
    # As in the kernel the first class that fits decides: the owner's bits, also where they allow less than the others'.
    engine(info.st_uid or 4711, other, [])
    if info.st_uid:
        (open_model / LAST).chmod(0o044)
        monkeypatch.setattr(model_files, "_head", lambda path, count=512: b"")
        assert [p["todo"].startswith("Run `chmod u+r") for p in refused(open_model, user="engine")][-1:] == [True]


def test_the_group_of_the_unit_counts_before_the_user_exists(open_model: Path) -> None:
    (open_model / LAST).chmod(0o640)
    group = str((open_model / LAST).stat().st_gid)
    assert refused(open_model, group=group) == []
    assert len(refused(open_model, group="gpuserve-no-group")) == 1


def test_the_text_says_that_the_files_are_right(open_model: Path) -> None:
    (open_model / LAST).chmod(0o600)
    text = model_files.describe_problems(look(open_model, user=NOBODY_YET))
    assert "which is a complete target model that the engine may not read" in text
    assert text.count(LAST) == 2


def test_each_folder_is_looked_at_once(open_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    real = os.lstat
    access = file_access.reader(NOBODY_YET)
    assert access is not None
    monkeypatch.setattr(os, "lstat", lambda path: seen.append(str(path)) or real(path))
    for file in open_model.iterdir():
        list(access.refusals(str(file)))
    assert len(seen) == len(set(seen))


def test_a_loop_of_links_ends(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    access = file_access.reader(NOBODY_YET)
    assert access is not None
    assert list(access.refusals(str(tmp_path / "a"))) == []


def test_the_roles_ask_for_the_user_of_the_plan() -> None:
    """They read the model before there is a plan, so its defaults are written down once more."""
    plan = launch_plan(plan_cases.wanted(), plan_cases.host(), plan_cases.models())
    for file, prefix in (("deployment/vars", "__deployment"), ("model/defaults", "model")):
        values = yaml.safe_load((ROOT / "roles" / file / "main.yml").read_text())
        for key in ("user", "group"):
            assert f"deployment_unit.{key} | default('{plan['unit'][key]}')" in values[f"{prefix}_{key}"]
    for role, prefix in (("deployment/tasks/inspect.yml", "__deployment"), ("model/tasks/check.yml", "model")):
        tasks = yaml.safe_load((ROOT / "roles" / role).read_text())
        calls = [task["gpuserve.sglang.model_info"] for task in tasks if "gpuserve.sglang.model_info" in task]
        assert len(calls) == 2
        for call in calls:
            assert (call["user"], call["group"]) == (f"{{{{ {prefix}_user }}}}", f"{{{{ {prefix}_group }}}}")
