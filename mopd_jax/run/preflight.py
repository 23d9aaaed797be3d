"""What phases need besides their config, looked for before the first of them costs anything."""

import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping

import jax
from etils import epath

from mopd_jax.checks import Finding, lines, refuse, samples
from mopd_jax.config import Backend, Config, Kind, RetrievalConfig
from mopd_jax.data.questions import files_of
from mopd_jax.refusal import Refusal
from mopd_jax.retrieval.index import META, unseal
from mopd_jax.retrieval.search import SearchError
from mopd_jax.run import hosts, parts


def check(named: Mapping[str, Config], kind: Kind | None = None) -> None:
    """Refuses phases that miss a file, a model, devices or a search server; all processes call it.

    Args:
      named: the phases that are to run, in order; the folder of one may be a model of a later one.
      kind: what they are used for, if that is not what they say themselves.

    Raises:
      ConfigError: lists every problem that any process found.
    """
    found = hosts.gather(list(_problems(named, kind)))
    refuse(list(dict.fromkeys(problem for problems in found for problem in problems)))


def _problems(named: Mapping[str, Config], kind: Kind | None) -> Iterator[str]:
    made, asked = set(), set()
    for name, phase in named.items():
        does = kind or phase.train.kind
        missing = [*missing_inputs(phase, does, made)]
        findings = [*(missing or _misfits(phase, does, made)), *_devices(phase, does)]
        retrieval = phase.retrieval
        if samples(phase, does) and retrieval.backend is Backend.HTTP and retrieval.url not in asked:
            findings += _server(phase)
            asked.add(retrieval.url)
        if samples(phase, does):
            findings += _index(retrieval)
        yield from lines(phase, f"config.{name}" if name else "config", findings)
        made.add(phase.run.dir)


def missing_inputs(config: Config, kind: Kind, made: Collection[str]) -> Iterator[Finding]:
    """Yields what a phase reads and does not find; `made` will have been made by then."""
    for field, path in parts.files_read(config, kind):
        if path not in made and not any(file.is_file() for file in files_of(path)):
            yield field, f"found no file {path}"
    for field, spec in parts.models_read(config, kind):
        if spec.removesuffix("/export") not in made:
            yield from _complaint(field, functools.partial(parts.find_folder, spec))


def _misfits(config: Config, kind: Kind, made: Collection[str]) -> Iterator[Finding]:
    """Looks at teacher, reference and Searcher beside the policy, unless a run has yet to make either."""
    models = parts.models_read(config, kind)
    there = {field: spec for field, spec in models if spec.removesuffix("/export") not in made}
    if "model.init" not in there:
        return
    names = {"model.teacher": "teacher", "model.reference": "teacher", "model.searcher": "Searcher"}
    for field, name in names.items():
        if field in there:
            yield from _complaint(field, functools.partial(_open_pair, config, there[field], name))


def _open_pair(config: Config, spec: str, name: str) -> None:
    parts.open_beside(parts.open_model(config.model.init, config), spec, config, name)


def _devices(config: Config, kind: Kind) -> Iterator[Finding]:
    size, all_devices, own = math.prod(config.mesh.shape), jax.device_count(), jax.local_device_count()
    if kind is not Kind.EVALUATE and size != all_devices:
        yield "mesh.shape", f"takes {size} devices, found {all_devices}: its product must be their number"
    if samples(config, kind) and own % config.mesh.rollout_tensor:
        yield "mesh.rollout_tensor", f"must divide the devices of a process, here {own}"


def _server(config: Config) -> Iterator[Finding]:
    """Asks one query: an evaluation would otherwise notice after its last workflow that nobody answers."""
    return _complaint("retrieval.url", lambda: parts.make_retriever(config).search(["question"], 1))


def _index(retrieval: RetrievalConfig) -> Iterator[Finding]:
    """An index must be whole and of its corpus; whether both are there is looked at before."""
    index, corpus = retrieval.index, retrieval.corpus
    if index and epath.Path(corpus).is_file() and epath.Path(index, META).is_file():
        yield from _complaint("retrieval.index", lambda: unseal(index, retrieval.backend.value, corpus))


def _complaint(field: str, look: Callable[[], object]) -> Iterator[Finding]:
    try:
        look()
    except (Refusal, SearchError) as problem:
        yield field, str(problem).rstrip(".")
