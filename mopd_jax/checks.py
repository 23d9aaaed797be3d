"""What a config must fulfil before any device work: types first, then the values and the pairs.

Every rule yields `(field, why)`; `validate` collects all of them, so that one look at the message
is enough to repair a config.
"""

import dataclasses
import difflib
import enum
import functools
import math
import re
import typing
from collections.abc import Iterable, Iterator, Sequence

from mopd_jax.config import (
    MINIATURE,
    MODEL_FIELDS,
    SPLASH_TILE,
    Attention,
    Backend,
    Chain,
    Config,
    Kind,
    RunConfig,
    Schedule,
    Wording,
    Workflow,
)
from mopd_jax.objective_rules import ROLES, Finding, objectives
from mopd_jax.refusal import Refusal


class ConfigError(Refusal):
    """An experiment that cannot run, in words."""


def validate(config: Config | Chain, kind: Kind | None = None) -> None:
    """Refuses a config whose types, values or combinations make no sense.

    Args:
      config: one phase, or a chain of them.
      kind: what the config is to be used for, if that is not what it says itself: a single phase is
        checked for this use, of a chain the phases of this kind.

    Raises:
      ConfigError: lists every problem found, each with field, value and what is expected.
    """
    problems = list(_type_problems(config, "config"))
    if not problems:
        problems = list(_rule_problems(config, kind))
    refuse(problems)


def refuse(problems: Sequence[str]) -> None:
    """Raises `ConfigError` with the list of the problems, if there are any."""
    if problems:
        raise ConfigError("The config is refused:\n" + "\n".join(f"- {p}" for p in problems))


# ---------------------------------------------------------------- fields and types


def field_types(group: object) -> dict[str, type]:
    """Returns the annotated type of every field of a config dataclass, in order."""
    types = {f.name: f.type for f in dataclasses.fields(group)}
    if any(isinstance(t, str) for t in types.values()):
        name = type(group).__name__
        raise ConfigError(f"{name} has no types: remove `from __future__ import annotations` above it.")
    return types


def describe_type(annotation: type) -> str:
    """Returns how a value of this type is spelled, in words."""
    if dataclasses.is_dataclass(annotation):
        return f"a {annotation.__name__}"
    if typing.get_origin(annotation) is tuple:
        return _describe_tuple(*typing.get_args(annotation))
    if issubclass(annotation, enum.Enum):
        return "one of " + ", ".join(member.name.lower() for member in annotation)
    return _WORDS[annotation]


_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


def _describe_tuple(first: type, *rest: type) -> str:
    plural = _WORDS[first].removeprefix("a ") + "s"
    if rest == (Ellipsis,):
        return plural + (""", spelled '("a.jsonl","b.jsonl")'""" if first is str else ", spelled (1024,2048)")
    count = 1 + len(rest)
    return f"a tuple of {count} {plural}, spelled ({','.join('1' * count)})"


def unknown_field(group: object, name: str, path: str) -> str:
    """Returns the message for a field that `group` (found at `path`) does not have."""
    names = list(field_types(group))
    close = difflib.get_close_matches(name, names, n=1)
    hint = f" Did you mean {close[0]}?" if close else ""
    return f"{path} has no field {name!r}.{hint} Its fields: {', '.join(names)}."


def show(value: object) -> str:
    """Returns a field's value as the command line spells it."""
    return value.name.lower() if isinstance(value, enum.Enum) else repr(value)


def _type_problems(group: object, path: str) -> Iterator[str]:
    """Walks the dataclasses; also finds attributes that a config file set by mistake."""
    types = field_types(group)
    for name in sorted(vars(group).keys() - types.keys()):
        yield unknown_field(group, name, path)
    for name, annotation in types.items():
        value = getattr(group, name)
        if not _fits(value, annotation):
            yield f"{path}.{name} = {show(value)}: expected {describe_type(annotation)}."
        elif dataclasses.is_dataclass(value):
            yield from _type_problems(value, f"{path}.{name}")


def _fits(value: object, annotation: type) -> bool:
    if typing.get_origin(annotation) is tuple:
        return isinstance(value, tuple) and _elements_fit(value, typing.get_args(annotation))
    if annotation is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if annotation is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, annotation)


def _elements_fit(value: tuple, annotations: tuple) -> bool:
    if annotations[-1] is Ellipsis:
        annotations = annotations[:1] * len(value)
    return len(value) == len(annotations) and all(map(_fits, value, annotations))


# ---------------------------------------------------------------- values

POSITIVE = (
    "model.architecture.hidden_size model.architecture.intermediate_size model.architecture.num_layers "
    "model.architecture.num_heads model.architecture.num_kv_heads model.architecture.head_dim "
    "model.architecture.rope_theta mesh.rollout_tensor retrieval.k retrieval.timeout_s team.candidates "
    "team.leader_turns team.session_searches team.workflow_searches team.leader_tokens "
    "team.searcher_tokens team.answerer_tokens team.document_tokens team.row_tokens "
    "rollout.conversations rollout.requests rollout.prefill_rows rollout.prefill_tokens "
    "rollout.decode_steps learn.log_ratio_clamp learn.updates_per_batch learn.micro_batch_tokens "
    "learn.logit_chunk optim.eps optim.max_grad_norm train.questions train.workflows "
    "tree.expansions tree.leaves eval.validation_attempts eval.attempts checkpoint.every checkpoint.keep"
).split()
NOT_NEGATIVE = (
    "data.world_seed retrieval.cache retrieval.retries team.workflow_input_tokens rollout.parked learn.kl "
    "learn.beta learn.role_gradients_every optim.lr optim.weight_decay optim.warmup_steps train.steps "
    "eval.every tree.rounds eval.validation_questions eval.questions"
).split()


def _numbers(c: Config) -> Iterator[Finding]:
    yield from ((name, "must be above 0") for name in POSITIVE if _get(c, name) <= 0)
    yield from ((name, "must not be negative") for name in NOT_NEGATIVE if _get(c, name) < 0)
    for name in ("retrieval.max_aborted_share", "train.collapse_share"):
        if not 0 <= _get(c, name) <= 1:
            yield name, "is a share, 0 to 1"
    if not 0 < c.learn.clip < 1:
        yield "learn.clip", "must lie between 0 and 1"
    if c.learn.sampler_weight_cap and c.learn.sampler_weight_cap < 1:
        yield "learn.sampler_weight_cap", "must be at least 1 (less would shrink every weight), or 0 for none"
    for name in ("optim.b1", "optim.b2"):
        if not 0 <= _get(c, name) < 1:
            yield name, "must be at least 0 and below 1"
    yield from _run(c.run)


def _run(run: RunConfig) -> Iterator[Finding]:
    if not run.dir:
        yield "run.dir", "a run needs a folder"
    if run.dir.startswith("~"):
        yield "run.dir", "the shell left ~ as it is: spell the folder in full"
    if re.match(r"\w+:/(?!/)", run.dir):
        yield "run.dir", "did you mean two slashes, as in gs://bucket/run?"
    if not 0 <= run.seed < 2**32:
        yield "run.seed", "must lie between 0 and 2**32 - 1"
    first, last = run.profile_steps
    if run.profile_steps != (0, 0) and not 1 <= first <= last:
        yield "run.profile_steps", "must be (first, last), counted from 1, or (0, 0) for none"


def _sampling(c: Config) -> Iterator[Finding]:
    for name, neutral in (("temperature", 1), ("top_p", 1), ("top_k", 0)):
        if _get(c.rollout, name) != neutral:
            yield f"rollout.{name}", f"must be {neutral}: anything else biases the importance ratio"


# ---------------------------------------------------------------- sizes that belong together


def _architecture(c: Config) -> Iterator[Finding]:
    a = c.model.architecture
    if a.num_kv_heads > 0 and a.num_heads % a.num_kv_heads:
        yield "model.architecture.num_kv_heads", f"must divide num_heads = {a.num_heads}"
    if a.head_dim % 2:
        yield "model.architecture.head_dim", "must be even: rotary positions turn pairs"


def _mesh(c: Config) -> Iterator[Finding]:
    if min(c.mesh.shape) < 1:
        yield "mesh.shape", "each axis (data, fsdp, tensor) has at least 1 device"


def _lengths(c: Config) -> Iterator[Finding]:
    for name in ("leader_tokens", "searcher_tokens", "answerer_tokens", "document_tokens"):
        if _get(c.team, name) >= c.team.row_tokens:
            yield f"team.{name}", f"does not fit into a row of team.row_tokens = {c.team.row_tokens}"
    buckets = c.learn.row_buckets
    if not buckets or min(buckets) < 1 or list(buckets) != sorted(set(buckets)):
        yield "learn.row_buckets", "must be ascending lengths, e.g. (1024,2048)"
        return
    if buckets[-1] < c.team.row_tokens:
        yield "learn.row_buckets", f"the last must hold a row of team.row_tokens = {c.team.row_tokens}"
    if c.model.attention is Attention.SPLASH and any(bucket % SPLASH_TILE for bucket in buckets):
        yield (
            "learn.row_buckets",
            f"must be multiples of {SPLASH_TILE}: model.attention = splash works in tiles",
        )
    if c.learn.micro_batch_tokens < buckets[-1]:
        yield "learn.micro_batch_tokens", f"must hold one row of the longest bucket, {buckets[-1]}"


# ---------------------------------------------------------------- what a phase needs


def _model(c: Config, kind: Kind) -> Iterator[Finding]:
    if not c.model.init:
        yield "model.init", 'name a Hugging Face folder, a run folder, an earlier phase, or "random"'
    if c.model.init == "random":
        for name in _real_text(c, sources_read(c, kind)):
            yield "model.init", f"has the embedded world's vocabulary, but {name} names files of real text"
        if c.team.wording is Wording.FULL:
            yield "team.wording", 'must be miniature: model.init = "random" knows only those words'
    for name in MODEL_FIELDS[1:]:
        if _get(c.model, name) == "random":
            yield f"model.{name}", "a frozen model with random weights knows nothing"
        elif _get(c.model, name) and kind is Kind.SUPERVISED:
            yield f"model.{name}", "does nothing in a supervised phase: leave it empty"


def _data(c: Config, kind: Kind) -> Iterator[Finding]:
    read = sources_read(c, kind)
    for name in read:
        if not _get(c, name):
            yield name, f"train.kind = {show(kind)} with eval.every = {c.eval.every} reads it: name files"
    for name in ("data.train", "data.validation", "data.test", "data.demonstrations"):
        yield from _sources(name, _get(c, name))
    if c.retrieval.backend is Backend.MINIATURE:
        for name in _real_text(c, read):
            if name != "data.demonstrations":
                yield name, "retrieval.backend = miniature holds no documents for real questions"


def _choices(c: Config, kind: Kind) -> Iterator[Finding]:
    """How often each training set is drawn, and which questions are evaluated."""
    if c.data.weights and len(c.data.weights) != len(c.data.train):
        yield (
            "data.weights",
            f"must have one number for each of the {len(c.data.train)} entries of data.train",
        )
    if c.data.weights and min(c.data.weights) < 1:
        yield "data.weights", "must be whole numbers above 0: leave an unwanted set out of data.train"
    if kind is Kind.EVALUATE and c.data.manifest:
        if c.eval.questions:
            yield "eval.questions", "must be 0: data.manifest chooses the questions"
        if _is_miniature(c.data.test):
            yield "data.manifest", "the embedded world has none: leave it empty"


DEMONSTRATIONS = ("miniature:facts", "miniature:noisy", "miniature:facts+agent", "miniature:noisy+agent")
"""The streams of `data/miniature_experts.py`."""


def _sources(name: str, sources: tuple[str, ...]) -> Iterator[Finding]:
    embedded = DEMONSTRATIONS if name == "data.demonstrations" else (MINIATURE,)
    if "" in sources:
        yield name, "has an empty file name; no files at all are spelled ()"
    for source in sources:
        if source.partition(":")[0] == "miniature" and source not in embedded:
            yield name, f"knows only {', '.join(embedded)} of the embedded world"
    if _is_miniature(sources) and len(sources) > 1:
        yield name, "the embedded world stands alone: its vocabulary knows no other text"


def sources_read(c: Config, kind: Kind) -> list[str]:
    """Returns the fields of the data that a phase of this kind reads."""
    if kind is Kind.EVALUATE:
        return ["data.test"]
    main = "data.train" if kind is Kind.REINFORCE else "data.demonstrations"
    return [main, "data.validation"] if c.eval.every else [main]


def _real_text(c: Config, names: list[str]) -> list[str]:
    return [name for name in names if _get(c, name) and not _is_miniature(_get(c, name))]


def _is_miniature(sources: tuple[str, ...]) -> bool:
    return any(s.partition(":")[0] == "miniature" for s in sources)


def samples(c: Config, kind: Kind) -> bool:
    """Returns whether a phase of this kind lets the team play, and with it search."""
    return kind is not Kind.SUPERVISED or c.eval.every > 0


def _retrieval(c: Config, kind: Kind) -> Iterator[Finding]:
    if not samples(c, kind):
        return
    local = c.retrieval.backend in (Backend.BM25, Backend.DENSE)
    if local and not c.retrieval.corpus:
        yield "retrieval.corpus", f"retrieval.backend = {show(c.retrieval.backend)} needs a corpus file"
    if c.retrieval.backend is Backend.DENSE and not c.retrieval.index:
        yield "retrieval.index", "retrieval.backend = dense needs the folder that tools/build_index makes"
    if c.retrieval.index and not local:
        yield "retrieval.index", "only retrieval.backend = bm25 or dense reads an index: leave it empty"
    if c.retrieval.backend is Backend.HTTP and not c.retrieval.url.startswith(("http://", "https://")):
        yield "retrieval.url", "retrieval.backend = http needs an address, e.g. http://10.0.0.2:8000/retrieve"


def _team(c: Config, kind: Kind) -> Iterator[Finding]:
    if c.team.workflow is Workflow.HIERARCHY and c.team.leader_turns < 2:
        yield "team.leader_turns", "must be at least 2: the last turn is only for the answer request"
    if c.team.workflow is Workflow.HIERARCHY and c.rollout.conversations + c.rollout.parked < 2:
        yield "rollout.parked", "must be at least 1: a Leader keeps its cache while its Searcher works"
    if c.model.searcher and "searcher" not in ROLES[c.team.workflow]:
        yield "model.searcher", f"team.workflow = {show(c.team.workflow)} has no Searcher: leave it empty"


def _training(c: Config, kind: Kind) -> Iterator[Finding]:
    if kind is Kind.EVALUATE:
        return
    if c.train.steps < 1:
        yield "train.steps", f"a phase with train.kind = {show(kind)} takes at least 1 step"
    updates = c.train.steps * c.learn.updates_per_batch
    if c.optim.schedule is not Schedule.CONSTANT and c.optim.warmup_steps >= max(updates, 1):
        yield "optim.warmup_steps", f"leaves none of {updates} updates to a {show(c.optim.schedule)} schedule"


_RULES = (_numbers, _sampling, _architecture, _mesh, _lengths)
_PHASE_RULES = (_model, _data, _choices, _retrieval, _team, _training, objectives)


# ---------------------------------------------------------------- phases and chains


def _rule_problems(config: Config | Chain, kind: Kind | None) -> Iterator[str]:
    named = _phases_as_written(config)
    if not named:
        yield "config names no phase: a chain has one Config field per phase (is it a @dataclass?)."
    elif kind and isinstance(config, Chain) and kind not in (c.train.kind for c in named.values()):
        yield f"config has no phase with train.kind = {show(kind)} among {', '.join(named)}."
    if isinstance(config, Chain):
        yield from lines(config, "config", _run(config.run))
    yield from _shared_groups(named)
    for name, phase in named.items():
        if name and kind not in (None, phase.train.kind):
            continue
        findings = [f for rule in _RULES for f in rule(phase)]
        findings += [f for rule in _PHASE_RULES for f in rule(phase, kind or phase.train.kind)]
        findings += _hand_over(name, named)
        yield from lines(phase, f"config.{name}" if name else "config", findings)


def lines(config: Config | Chain, path: str, findings: Iterable[Finding]) -> Iterator[str]:
    """Returns a line for each finding in the config that is found at `path`."""
    return (f"{path}.{field} = {show(_get(config, field))}: {why}." for field, why in findings)


def _phases_as_written(config: Config | Chain) -> dict[str, Config]:
    """Unlike `config.phases`, names of phases are not yet replaced by folders."""
    if isinstance(config, Config):
        return {"": config}
    fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    return {name: phase for name, phase in fields.items() if isinstance(phase, Config)}


def _hand_over(name: str, named: dict[str, Config]) -> Iterator[Finding]:
    """Weights come from a phase that has run before and was trained."""
    order = list(named)
    for field in MODEL_FIELDS:
        source = _get(named[name].model, field)
        if not source or source not in named:
            continue
        if order.index(source) >= order.index(name):
            yield f"model.{field}", f"must name an earlier phase than {name}"
        elif named[source].train.kind is Kind.EVALUATE:
            yield f"model.{field}", f"phase {source} only evaluates and leaves no weights"


def _shared_groups(named: dict[str, Config]) -> Iterator[str]:
    """One object in two phases: an override of one would change the other without a word."""
    seen = {}
    for name, phase in named.items():
        for group in ("", *field_types(phase)):
            path = f"config.{name}.{group}".rstrip(".")
            first = seen.setdefault(id(getattr(phase, group) if group else phase), path)
            if first != path:
                yield f"{path} and {first} are one object: build a phase from another with copy.deepcopy."


def _get(group: object, dotted: str) -> typing.Any:
    return functools.reduce(getattr, dotted.split("."), group)
