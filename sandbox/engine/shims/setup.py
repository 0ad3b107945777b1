"""Adds the .pth file, which pyproject.toml cannot name: it must lie beside the packages to run at start-up."""

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithPth(build_py):
    def run(self):
        super().run()
        self.copy_file("gpuserve-cpu-shims.pth", self.build_lib, preserve_mode=False)


setup(cmdclass={"build_py": BuildWithPth})
