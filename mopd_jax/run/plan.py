"""A phase without weights, data or devices: what it would compile and hold on a pod.

The parts are the real ones (learner, scorer, engine), built over a mesh whose devices may not be there;
arrays are replaced by their shapes and layouts.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from etils import epath
from jax.sharding import AbstractMesh, Mesh
from jax.stages import Lowered

from mopd_jax.config import RANDOM, Config, Kind
from mopd_jax.data import miniature
from mopd_jax.learn.learner import Learner
from mopd_jax.learn.packing import Packed, micro_batch_shapes
from mopd_jax.learn.score import Frozen, Scorer
from mopd_jax.learn.streams import stream_shapes
from mopd_jax.model import hf, sharding
from mopd_jax.model.qwen3 import Qwen3, Qwen3Config
from mopd_jax.published import QWEN3
from mopd_jax.rollout.engine import Engine
from mopd_jax.rollout.sampler import SamplerState
from mopd_jax.run import parts
from mopd_jax.run.estimate import Lane, Rows, Work, decode_work, prefill_work, score_work, update_work

EOS_IDS = (151_643, 151_645)
"""Of Qwen3; any two ids make the same programs."""

MASTER, ADAM, GRADIENT = "master weights", "Adam moments", "gradient"
SAMPLED = "engine's weights"
SEARCHER = ", Searcher"
"""Behind the kinds and programs of the Searcher's engine, where it has its own."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model whose weights are not needed yet."""

    model: Qwen3Config
    source: str
    """Where they come from, in words."""


def find_sizes(spec: str, config: Config, earlier: Mapping[str, Sizes], assumed: Sizes) -> Sizes:
    """Returns the sizes behind a model's spelling.

    Args:
      spec: as `model.init`, names of earlier phases already replaced by their folders.
      config: gives the sizes of "random".
      earlier: sizes of the models that earlier phases will have left, by folder.
      assumed: where `spec` is none of these and no folder on this machine.
    """
    if spec == RANDOM:
        return Sizes(parts.random_sizes(config, miniature.vocabulary_size()), "model.architecture")
    if spec in earlier:
        return earlier[spec]
    for folder in (epath.Path(spec), epath.Path(spec) / "export"):
        if (folder / "config.json").exists():
            return Sizes(hf.read_config(folder), f"{folder}/config.json")
    return assumed


def assumed_sizes(name: str) -> Sizes:
    """Returns the sizes of a published checkpoint, e.g. "qwen3-4b"."""
    return Sizes(Qwen3Config(**QWEN3[name]), f"--sizes={name}")


def model_sizes(config: Config, earlier: Mapping[str, Sizes], assumed: Sizes) -> dict[str, Sizes]:
    """Returns the sizes of every model of a phase by its spelling in the config, see `find_sizes`."""
    model = config.model
    specs = [model.init, *parts.frozen_specs(config), *parts.judge_specs(config), model.searcher]
    return {spec: find_sizes(spec, config, earlier, assumed) for spec in dict.fromkeys(specs) if spec}


@dataclass(frozen=True)
class Plan:
    """The parts of a phase."""

    config: Config
    student: Qwen3
    mesh: Mesh | AbstractMesh
    """Of the learner."""
    learner: Learner | None
    """None in an evaluation."""
    frozen: dict[str, Frozen]
    """Teacher and reference; their weights are shapes with layouts."""
    judge: Frozen | None
    """None without one that is a model; its weights are shapes with layouts."""
    scorer: Scorer | None
    """None where nothing is scored."""
    engine: Engine | None
    """None where nothing is sampled."""
    searcher: Engine | None
    """Of the Searcher alone; None where `engine` samples for it too."""

    @property
    def engines(self) -> dict[str, Engine]:
        """The engines by what stands behind the names of their kinds of memory and their programs."""
        named = {"": self.engine, SEARCHER: self.searcher}
        return {whose: engine for whose, engine in named.items() if engine}

    @property
    def cache_itemsize(self) -> int:
        """Bytes of a number in the engine's weights and caches."""
        return parts.dtype(self.config.model.rollout).itemsize


def make_plan(
    config: Config, sizes: Mapping[str, Sizes], mesh: Mesh | AbstractMesh, rollout_mesh: Mesh | AbstractMesh
) -> Plan:
    """Returns the parts of a phase.

    Args:
      config: the phase.
      sizes: of its models, see `model_sizes`.
      mesh: of the learner.
      rollout_mesh: of one process's engine, `mesh.rollout_tensor` devices along its tensor axis.

    Raises:
      Refusal: the mesh does not divide an axis of the weights, which is named.
    """
    learn, kind = config.learn, config.train.kind
    student = parts.make_model(sizes[config.model.init].model, config.model)
    frozen = {
        spec: _frozen(sizes[spec].model, config, mesh)
        for spec in (parts.frozen_specs(config) if kind is Kind.REINFORCE else ())
    }
    updates = config.train.steps * learn.updates_per_batch
    samples = kind is not Kind.SUPERVISED or config.eval.every > 0
    candidates = 1 if kind is Kind.EVALUATE else config.team.candidates

    def engine(model: Qwen3, candidates: int) -> Engine:
        return parts.make_engine(config, model, EOS_IDS, candidates, rollout_mesh)

    searcher = config.model.searcher
    return Plan(
        config,
        student,
        mesh,
        learner=None if kind is Kind.EVALUATE else Learner(student, learn, config.optim, updates, mesh),
        frozen=frozen,
        judge=next((_frozen(sizes[spec].model, config, mesh) for spec in parts.judge_specs(config)), None),
        scorer=Scorer(student, frozen, learn.logit_chunk, mesh) if kind is Kind.REINFORCE else None,
        engine=engine(student, candidates) if samples else None,
        searcher=engine(parts.make_model(sizes[searcher].model, config.model), 1) if searcher else None,
    )


def _frozen(sizes: Qwen3Config, config: Config, mesh: Mesh | AbstractMesh) -> Frozen:
    model, stored = parts.make_model(sizes, config.model), parts.dtype(config.model.frozen)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, stored), sharding.abstract_params(model))
    return Frozen(model, sharding.laid_out(shapes, sharding.param_shardings(model, mesh)))


# ---------------------------------------------------------------- memory


def device_bytes(tree: Any) -> int:
    """Returns the bytes of a tree of laid-out shapes on one device."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def memory(plan: Plan) -> dict[str, int]:
    """Returns what the phase keeps on a device between programs, in bytes by kind.

    The engine's part is there while it samples, the gradient while an update runs, the rest always.
    """
    kinds = {}
    if plan.learner:
        state = plan.learner.abstract_state()
        kinds[MASTER] = kinds[GRADIENT] = device_bytes(state.params)
        kinds[ADAM] = device_bytes(state.opt_state)
    for spec, model in plan.frozen.items():
        kinds[f"frozen {spec}"] = device_bytes(model.params)
    if plan.judge:
        kinds["judge"] = device_bytes(plan.judge.params)
    for whose, engine in plan.engines.items():
        kinds[SAMPLED + whose] = device_bytes(engine.abstract_params())
        for candidates, state in engine.abstract_states().items():
            kinds[_cache(candidates) + whose] = device_bytes(state.cache)
    return kinds


def beside(plan: Plan, sampling: bool, arguments: set[str]) -> int:
    """Returns the bytes on a device that stay allocated while a program runs and are not its arguments.

    Args:
      plan: the phase.
      sampling: whether it is one of the engine's programs, during which there is no gradient; the others
        run when the engine holds nothing.
      arguments: kinds of `memory` that the program takes.
    """
    return sum(
        size
        for kind, size in memory(plan).items()
        if kind not in arguments and not (kind == GRADIENT if sampling else is_engines(kind))
    )


def is_engines(kind: str) -> bool:
    """Whether a kind of `memory` is there only while the engine samples."""
    return kind.startswith((SAMPLED, "cache"))


def _cache(candidates: int) -> str:
    return f"cache, {candidates} candidate{'s' if candidates > 1 else ''}"


# ---------------------------------------------------------------- programs


@dataclass(frozen=True)
class Program:
    """One device program, ready to be compiled."""

    name: str
    lowered: Lowered
    devices: int
    work: Work
    beside: int
    """Bytes on a device that it runs beside, see `beside`."""
    lane: Lane | None = None
    """Of one of an engine's programs."""
    model: Qwen3Config | None = None
    """Of one of an engine's programs."""


def lanes(engine: Engine) -> dict[int, Lane]:
    """Returns the capacities of an engine's caches by candidates."""
    return {c: _capacities(state) for c, state in engine.abstract_states().items()}


def _capacities(state: SamplerState) -> Lane:
    groups, candidates = state.inputs.shape
    _, places, _, history, _ = state.cache.history_k.shape
    return Lane(groups, candidates, history, state.cache.turn_k.shape[4], parked=places - groups)


def longest_rows(plan: Plan) -> Packed:
    """Returns the shapes of the largest micro-batch: the longest bucket, every position generated."""
    learn = plan.config.learn
    return micro_batch_shapes(learn.row_buckets[-1], learn.micro_batch_tokens, sharding.row_shards(plan.mesh))


def programs(plan: Plan) -> Iterator[Program]:
    """Yields the programs of a phase in the order in which a step runs them.

    An evaluation's, and those of the evaluation during training, are the one-candidate lane's.
    """
    if plan.engine and plan.learner:
        yield _cast_program(plan)
    for whose in plan.engines:
        yield from _sampling_programs(plan, whose)
    if plan.scorer:
        yield _score_program(plan)
    if plan.learner:
        yield from _update_programs(plan)


def _cast_program(plan: Plan) -> Program:
    lowered = plan.engine.lower_cast(plan.learner.abstract_state().params)
    around = beside(plan, sampling=False, arguments={MASTER, GRADIENT})
    return Program("hand-over: cast", lowered, plan.mesh.size, Work(0, 0), around)


def _sampling_programs(plan: Plan, whose: str) -> Iterator[Program]:
    rollout, engine = plan.config.rollout, plan.engines[whose]
    model, capacities = engine.model.config, lanes(engine)
    for (candidates, name), lowered in engine.lower().items():
        lane = capacities[candidates]
        work = {
            "prefill": prefill_work(model, rollout.prefill_rows, rollout.prefill_tokens, lane.history),
            "decode": decode_work(model, lane),
        }.get(name, Work(0, 0))
        weights = {SAMPLED + whose} if name in ("prefill", "decode") else set()
        around = beside(plan, sampling=True, arguments={_cache(candidates) + whose} | weights)
        title = f"{name}, {lane.groups} × {candidates}{whose}"
        yield Program(title, lowered, plan.config.mesh.rollout_tensor, work, around, lane, model)


def _rows(packed: Packed) -> Rows:
    return Rows(*packed.ids.shape, packed.source.shape[1])


def _score_program(plan: Plan) -> Program:
    packed = longest_rows(plan)
    lowered = plan.scorer.lower(plan.learner.abstract_state().params, packed)
    models = [plan.student, *(f.model for f in plan.frozen.values())]
    work = score_work([m.config for m in models], _rows(packed))
    taken = {MASTER} | {f"frozen {spec}" for spec in plan.frozen}
    around = beside(plan, sampling=False, arguments=taken | {GRADIENT})
    return Program("score", lowered, plan.mesh.size, work, around)


def _update_programs(plan: Plan) -> Iterator[Program]:
    packed = longest_rows(plan)
    streams = stream_shapes(packed, plan.config.learn, plan.config.train.kind is Kind.SUPERVISED)
    lowered = plan.learner.lower(packed, streams)
    work = update_work(plan.student.config, _rows(packed))
    around = beside(plan, sampling=False, arguments={MASTER, GRADIENT})
    yield Program("update: accumulate", lowered["accumulate"], plan.mesh.size, work, around)
    around = beside(plan, sampling=False, arguments={MASTER, GRADIENT, ADAM})
    yield Program("update: apply", lowered["apply"], plan.mesh.size, Work(0, 0), around)
