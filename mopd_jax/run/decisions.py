"""Which settings are the paper's [P] and which are ours [D], read from the docstrings of config.py."""

import ast
import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any

import mopd_jax.config
from mopd_jax.checks import show
from mopd_jax.config import Chain, Config, phases


def marked_fields(mark: str) -> set[tuple[str, str]]:
    """Returns the (class, field) pairs whose docstring in config.py bears `mark`, e.g. "[D]"."""
    tree = ast.parse(inspect.getsource(mopd_jax.config))
    return {
        (group.name, field.target.id)
        for group in tree.body
        if isinstance(group, ast.ClassDef)
        for field, doc in zip(group.body, group.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign) and isinstance(doc, ast.Expr) and mark in doc.value.value
    }


def describe_decisions(config: Config | Chain) -> str:
    """Returns Markdown: where the run departs from the paper's values, and every value that is ours."""
    named = phases(config)
    departures = [
        f"- {phase}{name} = {show(value)}, in the paper {show(default)}"
        for phase, name, value, default in _values(named, marked_fields("[P]"))
        if value != default
    ]
    ours: dict[str, dict[str, list[str]]] = {}
    for phase, name, value, _ in _values(named, marked_fields("[D]")):
        ours.setdefault(name, {}).setdefault(show(value), []).append(phase.rstrip("."))
    lines = [f"- {name} = {_by_phase(values)}" for name, values in ours.items()]
    return "\n".join(
        [
            "## Departures from the paper [P]",
            "",
            *(departures or ["none"]),
            "",
            "## Values of ours [D]",
            "",
            *lines,
        ]
    )


def _values(named: dict[str, Config], fields: set[tuple[str, str]]) -> Iterator[tuple[str, str, Any, Any]]:
    """Yields (phase prefix, dotted field, value, default) of the given fields in every phase."""
    for phase, config in named.items():
        for group in dataclasses.fields(config):
            settings = getattr(config, group.name)
            defaults = type(settings)()
            for field in dataclasses.fields(settings):
                if (type(settings).__name__, field.name) in fields:
                    name = f"{group.name}.{field.name}"
                    yield (
                        f"{phase}." if phase else "",
                        name,
                        getattr(settings, field.name),
                        getattr(defaults, field.name),
                    )


def _by_phase(values: dict[str, list[str]]) -> str:
    if len(values) == 1:
        return next(iter(values))
    return "; ".join(f"{value} ({', '.join(found)})" for value, found in values.items())
