"""Declares torchvision's operators where its compiled part does not load.

torchvision from a CUDA build beside a CPU torch raises "operator torchvision::nms does not exist" on import. A finder
that only watches for the name ``torchvision`` costs nothing at start-up and leaves a working torchvision alone.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from pathlib import Path

_NMS_ARGUMENTS = "Tensor dets, Tensor scores, float iou_threshold"


class _TorchvisionOps(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path=None, target=None):
        if fullname != "torchvision":
            return None
        sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _TorchvisionOps)]
        spec = importlib.machinery.PathFinder.find_spec(fullname)
        if spec is not None and spec.submodule_search_locations:
            _declare_missing_ops(Path(list(spec.submodule_search_locations)[0]))
        return spec


def _declare_missing_ops(package: Path) -> None:
    import torch

    for library in package.glob("_C*.so"):
        try:
            torch.ops.load_library(str(library))
            return
        except OSError:
            continue
    # The operators for which torchvision registers a fake without asking whether its compiled part is there.
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            torch.library.define(f"torchvision::{name}", f"({_NMS_ARGUMENTS}) -> Tensor")


def install() -> None:
    sys.meta_path.insert(0, _TorchvisionOps())
