#!/usr/bin/python
# Copyright: The gpuserve.sglang authors
# Apache License 2.0 (see https://www.apache.org/licenses/LICENSE-2.0)
"""Inspect a model directory; the work is in module_utils/model_files.py."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: model_info
short_description: Inspect a model directory and say what is missing
version_added: "0.1.0"
author:
  - The gpuserve.sglang authors (@gpuserve)
description:
  - Reads C(config.json), the tokenizer's files, the index and the header of every weight file, never the weights
    themselves, so that 64 shards with 547 GB take about a second.
  - Finds missing, empty, truncated and oversized shards, shards of another revision than the index, dangling symbolic
    links (Hugging Face cache), Git LFS pointers in place of files, and downloads that are unfinished or still running.
  - With O(user), finds what that user could not read, such as weights that root downloaded under a strict umask.
  - An incomplete or absent model is no failure of this module. It returns what it found; the play decides.
options:
  path:
    description:
      - Absolute path of the directory that holds C(config.json).
    type: str
    required: true
  kind:
    description:
      - What the model is used for. A V(draft) needs no tokenizer of its own.
    type: str
    choices: [target, draft]
    default: target
  require_tokenizer:
    description:
      - Whether a missing tokenizer is a problem.
      - By default it is for O(kind=target) and is not for O(kind=draft).
    type: bool
  user:
    description:
      - Name of the user that the engine will run as. It need not exist yet; then only what everybody may do counts.
      - Files that this user could not read, and folders up to C(/) that it could not search, are problems. A POSIX ACL that
        could let it in is believed.
      - When not given, and for C(root), nobody's rights are looked at.
    type: str
    default: ""
  group:
    description:
      - Name of the group that the engine will run as; by default the one that O(user) has.
    type: str
    default: ""
attributes:
  check_mode:
    description: Can run in check mode and return what it would have returned.
    support: full
  diff_mode:
    description: Returns details on what has changed in diff mode.
    support: none
    details: The module changes nothing.
  idempotent:
    description: A second run does the same as the first.
    support: full
  platform:
    description: The systems it runs on.
    platforms: posix
    support: full
seealso:
  - name: The safetensors format
    description: Layout of the header that is read.
    link: https://github.com/huggingface/safetensors#format
"""

EXAMPLES = r"""
- name: Look at the target model
  gpuserve.sglang.model_info:
    path: /data/kimi-k2.5
    user: sglang
    group: sglang
  register: target

- name: Refuse an incomplete one
  ansible.builtin.assert:
    that: target.complete
    fail_msg: "{{ target.message }}"

- name: Look at the draft model
  gpuserve.sglang.model_info:
    path: /data/eagle3/output_100k_sglang/4
    kind: draft
  register: draft
"""

RETURN = r"""
path:
  description:
    - The directory that was inspected.
    - Ansible adds owner, group, mode, size and state of every returned path by itself; they are no part of the contract.
  returned: always
  type: str
  sample: /data/kimi-k2.5
kind:
  description: The option O(kind).
  returned: always
  type: str
  sample: target
exists:
  description: Whether there is anything at the path.
  returned: always
  type: bool
complete:
  description: Whether the model can be loaded as far as names, sizes and headers tell, that is, RV(problems) is empty.
  returned: always
  type: bool
message:
  description: All problems in one text; empty when RV(complete) is true.
  returned: always
  type: str
problems:
  description: What keeps the model from being complete.
  returned: always
  type: list
  elements: dict
  contains:
    id:
      description:
        - A stable name of the kind of problem.
        - One of C(directory_missing), C(directory_empty), C(directory_unreadable), C(not_a_directory), C(file_missing),
          C(file_empty), C(file_unreadable), C(file_not_regular), C(broken_link), C(lfs_pointer), C(json_invalid),
          C(config_no_architecture), C(tokenizer_missing), C(index_missing), C(index_invalid), C(weights_missing),
          C(shard_truncated), C(shard_oversized), C(shard_invalid), C(shard_tensors_missing), C(download_incomplete),
          C(download_running), C(folder_no_access), C(file_no_access).
      type: str
    file:
      description: The file, relative to RV(path); for a problem of a directory, or of who may read it, the whole path.
      type: str
    found:
      description: What is there.
      type: str
    expected:
      description: What should be there.
      type: str
    todo:
      description: What to do about it.
      type: str
  sample:
    - id: shard_truncated
      file: model-00007-of-00064.safetensors
      found: 1048576 bytes
      expected: 9126805504 bytes by its own header
      todo: Delete /data/kimi-k2.5/model-00007-of-00064.safetensors and download it again.
warnings_found:
  description:
    - Same shape as RV(problems), for what does not keep the engine from loading the model.
    - C(total_size_mismatch), C(processor_missing), or C(download_incomplete) in a cache shared with other revisions.
  returned: always
  type: list
  elements: dict
config:
  description: Content of C(config.json); empty when it cannot be read.
  returned: always
  type: dict
architectures:
  description: The model classes that C(config.json) names.
  returned: always
  type: list
  elements: str
  sample: [KimiK25ForConditionalGeneration]
generation_config:
  description: Content of C(generation_config.json); empty when there is none.
  returned: always
  type: dict
tokenizer:
  description: The tokenizer; empty when the directory could not be read.
  returned: always
  type: dict
  contains:
    present:
      description: Whether vocabulary and C(tokenizer_config.json) are there and usable.
      type: bool
    required:
      description: Whether a missing one counts as a problem.
      type: bool
    files:
      description: The files it consists of.
      type: list
      elements: str
    class:
      description: C(tokenizer_class) of C(tokenizer_config.json).
      type: str
    chat_template:
      description: Whether there is a chat template.
      type: bool
    model_max_length:
      description: Greatest number of tokens; null when unlimited or unknown.
      type: int
    custom_code:
      description: Python files that the tokenizer needs (trust_remote_code).
      type: list
      elements: str
shards:
  description: The weight files in the order of their names.
  returned: always
  type: list
  elements: dict
  contains:
    file:
      description: Name relative to RV(path).
      type: str
    bytes:
      description: Real size in bytes; null when missing.
      type: int
    expected_bytes:
      description: Size in bytes by the file's own header; null when it has no readable one.
      type: int
    tensors:
      description: Number of tensors; null when unknown.
      type: int
weights_bytes:
  description: Sum of the sizes of all shards that are there, in bytes.
  returned: always
  type: int
  sample: 587340000000
index_total_bytes:
  description: C(metadata.total_size) of the index, in bytes; null without one.
  returned: always
  type: int
bytes_by_dtype:
  description: Bytes of tensor data by data type, as the headers name them.
  returned: always
  type: dict
  sample: {BF16: 24000000000, I32: 523000000000}
parameters:
  description:
    - Number of elements of all tensors. In pack-quantized models (compressed-tensors) an element of C(weight_packed)
      counts as the weights it holds, eight for INT4; scales count as elements too.
  returned: always
  type: int
fingerprint:
  description:
    - sha256 over C(config.json), the index, and name and size of every shard, so that a later look notices a change.
    - Empty when the directory cannot be read.
  returned: always
  type: str
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpuserve.sglang.plugins.module_utils.model_files import (
    describe_problems,
    inspect_model,
    path_error,
)


def main() -> None:
    """Entry point."""
    module = AnsibleModule(
        argument_spec={
            # No type path: it would expand ~ and variables, and a relative path has to be seen as given.
            "path": {"type": "str", "required": True},
            "kind": {"type": "str", "choices": ["target", "draft"], "default": "target"},
            "require_tokenizer": {"type": "bool"},
            "user": {"type": "str", "default": ""},
            "group": {"type": "str", "default": ""},
        },
        supports_check_mode=True,
    )
    path = module.params["path"]
    name = "model_path" if module.params["kind"] == "target" else "model_draft_path"
    error = path_error(path, name)
    if error:
        module.fail_json(msg=error)
    info = inspect_model(
        path,
        module.params["kind"],
        module.params["require_tokenizer"],
        user=module.params["user"],
        group=module.params["group"],
    )
    # Ansible shows a top-level key "warnings" to the user by itself and takes it out of the result.
    info["warnings_found"] = info.pop("warnings")
    for warning in info["warnings_found"]:
        where = f"{path}/{warning['file']}"
        module.warn(f"{where}: found {warning['found']}; expected {warning['expected']}. {warning['todo']}")
    info["message"] = describe_problems(info, name)
    module.exit_json(changed=False, **info)


if __name__ == "__main__":
    main()
