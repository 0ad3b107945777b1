"""Importable stand-in for the CUDA-only sgl_kernel: every name exists, and raises when it is called.

SGLang imports kernels by name at module level even when it then runs on the CPU. Nothing here computes: a code path
that would need a kernel fails loudly instead of returning a wrong number.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types

__version__ = "0.3.21"


class _MissingKernel:
    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *args, **kwargs):
        raise NotImplementedError(f"{self._name} needs a CUDA GPU; the sandbox runs SGLang on the CPU")

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return _MissingKernel(f"{self._name}.{name}")


class _Submodule(types.ModuleType):
    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return _MissingKernel(f"{self.__name__}.{name}")


class _SubmoduleFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname, path=None, target=None):
        if fullname.startswith(__name__ + "."):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Submodule(spec.name)

    def exec_module(self, module):
        return None


sys.meta_path.append(_SubmoduleFinder())


def __getattr__(name: str):
    if name.startswith("__"):
        raise AttributeError(name)
    return _MissingKernel(f"{__name__}.{name}")
