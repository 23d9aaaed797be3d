"""Package metadata; settings of the tools are in pyproject.toml."""

import pathlib

from setuptools import find_packages, setup

README = pathlib.Path(__file__).parent / "README.md"

setup(
    name="mopd_jax",
    version="0.1.0",
    description="MultiAgent-OPD in JAX: hierarchical teams of language-model agents, trained on policy.",
    long_description=README.read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["mopd_jax", "mopd_jax.*", "tools", "tools.*"]),
    install_requires=[
        "absl-py",
        "array_record",  # tensorflow-datasets reads through it without TensorFlow
        "bm25s",
        "etils[epath]",
        "flax>=0.12.8",
        "importlib_resources",  # tensorflow-datasets imports it without naming it
        "jax>=0.10",
        "jinja2",  # transformers renders chat templates with it
        "matplotlib",
        "ml_collections>=1.1",
        "numpy>=2",
        "optax",
        "orbax-checkpoint>=0.11",
        "psutil",
        "pyarrow",
        "PyStemmer",
        "rich",
        "safetensors",
        "tensorflow-datasets>=4.9.10",
        "tokenizers",
        "transformers>=5",
    ],
    extras_require={
        # dashscope: Qwen's vocabulary; faiss-cpu: what exact search is compared with
        "test": ["dashscope", "faiss-cpu", "hypothesis", "pytest", "pytest-xdist", "ruff"],
        "parity": ["torch==2.13.0"],
        "tpu": ["jax[tpu]"],
    },
)
