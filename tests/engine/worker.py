"""Runs inside the engine's own interpreter: one JSON question a line in, one JSON answer a line out.

``argv``: level 1, the words through the real parser without abbreviations.
``construct``: level 2, the whole ``ServerArgs`` construction and ``check_server_args``, with the few CUDA queries
replaced. The source is sent over standard input, so that the interpreter may live in a container.
"""

import argparse
import contextlib
import io
import json
import logging
import os
import sys
import warnings

OUT = sys.stdout
sys.stdout = sys.stderr
warnings.simplefilter("ignore")
logging.disable(logging.CRITICAL)

make_importable()  # noqa: F821 - from tools/dump_flag_schema.py, sent along

import sglang.srt.server_args as module  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402

PARSER = argparse.ArgumentParser(allow_abbrev=False)
ServerArgs.add_cli_args(PARSER)


def parse(argv):
    """The parser's answer: the fields, or its error text."""
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            namespace = PARSER.parse_args(argv)
    except SystemExit:
        return None, errors.getvalue().strip().splitlines()[-1]
    except Exception as error:  # a type function may raise what argparse does not catch
        return None, f"{type(error).__name__}: {error}"
    return namespace, None


def plain(value):
    """A value as JSON, or as text."""
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return repr(value)
    return value


def fields(namespace):
    """The namespace under the names of ServerArgs' fields."""
    values = dict(vars(namespace))
    for field, dest in (
        ("tp_size", "tensor_parallel_size"),
        ("pp_size", "pipeline_parallel_size"),
        ("dp_size", "data_parallel_size"),
        ("ep_size", "expert_parallel_size"),
        ("attn_cp_size", "attention_context_parallel_size"),
        ("moe_dp_size", "moe_data_parallel_size"),
    ):
        values[field] = values[dest]
    return {name: plain(value) for name, value in values.items()}


@contextlib.contextmanager
def pretend(gpu):
    """Answer the CUDA queries of ServerArgs as a machine with this GPU would."""
    major = int(str(gpu["compute_cap"]).split(".")[0])
    answers = {
        "get_device": lambda *a, **k: "cuda",
        "get_device_memory_capacity": lambda *a, **k: gpu["memory_total_mib"],
        "get_device_name": lambda *a, **k: gpu["name"],
        "is_cuda": lambda: True,
        "is_sm90_supported": lambda *a, **k: major == 9,
        "is_sm100_supported": lambda *a, **k: major == 10,
        "is_sm120_supported": lambda *a, **k: major == 12,
        "is_blackwell_supported": lambda *a, **k: major in (10, 12),
        "is_hopper_with_cuda_12_3": lambda *a, **k: major == 9,
        "is_flashinfer_available": lambda *a, **k: True,
    }
    saved = {name: getattr(module, name) for name in answers if hasattr(module, name)}
    for name in saved:
        setattr(module, name, answers[name])
    try:
        yield
    finally:
        for name, value in saved.items():
            setattr(module, name, value)


def construct(question):
    """Level 2: every field after the engine has had its way, or what it raised."""
    namespace, error = parse(question["argv"])
    if namespace is None:
        return {"ok": False, "error": error}
    before = dict(os.environ)
    os.environ.update(question["env"])
    try:
        with pretend(question["gpu"]):
            args = ServerArgs.from_cli_args(namespace)
            args.check_server_args()
        names = set(question["fields"])
        return {"ok": True, "fields": {name: plain(getattr(args, name, None)) for name in names}}
    except (Exception, SystemExit) as error:
        return {"ok": False, "error": f"{type(error).__name__}: {error}"}
    finally:
        os.environ.clear()
        os.environ.update(before)


def answer(question):
    """One answer."""
    if question["do"] == "version":
        import sglang

        return {"version": sglang.__version__}
    if question["do"] == "argv":
        namespace, error = parse(question["argv"])
        return {"ok": namespace is not None, "error": error, "fields": fields(namespace) if namespace else None}
    if question["do"] == "schema":
        return {"schema": dump()}  # noqa: F821 - from tools/dump_flag_schema.py, sent along
    if question["do"] == "write":
        for path, text in question["files"].items():
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "w", encoding="utf-8") as stream:
                stream.write(text)
        return {"ok": True}
    return construct(question)


for line in sys.stdin:
    OUT.write(json.dumps(answer(json.loads(line))) + "\n")
    OUT.flush()
