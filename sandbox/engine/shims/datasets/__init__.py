"""Importable stand-in for Hugging Face datasets, which bench_serving imports at module level."""


def load_dataset(*args, **kwargs):
    raise NotImplementedError("the sandbox downloads no datasets: give bench_serving a local --dataset-path")
