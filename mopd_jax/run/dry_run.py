"""What a run would hold and how long a step would take, without data, weights or devices."""

from collections.abc import Iterator

from mopd_jax.config import Chain, Config, Kind, phases
from mopd_jax.learn.packing import micro_batch_rows
from mopd_jax.model import sharding
from mopd_jax.model.qwen3 import Qwen3Config
from mopd_jax.published import CHIPS, Chip
from mopd_jax.rollout.driver import alive_workflows
from mopd_jax.run.estimate import (
    PROMPT_TOKENS,
    USED,
    Rows,
    Work,
    decode_bytes,
    layer_weights,
    parameters,
    score_work,
    update_work,
    workflow_rows,
)
from mopd_jax.run.plan import (
    GRADIENT,
    Plan,
    Sizes,
    assumed_sizes,
    is_engines,
    lanes,
    make_plan,
    memory,
    model_sizes,
)

HOST_DEVICES = 4
"""Devices of a host, as of most TPU hosts."""
FLOPS_SHARE, BANDWIDTH_SHARE = 0.4, 0.6
"""Share of a chip's peak and of its bandwidth that the estimate reckons with [D]: usual for models of this
size, not measured here."""
GB = 1e9


def dry_run(config: Config | Chain, sizes: str, chip: str) -> Iterator[str]:
    """Yields the lines to show, phase by phase.

    Args:
      config: the experiment.
      sizes: name of the published sizes of models that are no folder on this machine.
      chip: key of `CHIPS`, the kind of device.
    """
    assumed, earlier = assumed_sizes(sizes), {}
    for name, phase in phases(config).items():
        found = model_sizes(phase, earlier, assumed)
        earlier[phase.run.dir] = found[phase.model.init]
        mesh = sharding.abstract_mesh(phase.mesh.shape)
        rollout_mesh = sharding.abstract_mesh((1, 1, phase.mesh.rollout_tensor))
        plan = make_plan(phase, found, mesh, rollout_mesh)
        yield f"== {name or phase.train.kind.value}"
        yield from _models(found)
        yield from _shapes(plan)
        yield from _memory(plan, chip)
        yield from _time(plan, CHIPS[chip])
        yield ""
    yield _assumptions(chip)


def _models(sizes: dict[str, Sizes]) -> Iterator[str]:
    for spec, found in sizes.items():
        c = found.model
        yield (
            f"model   {spec}: {parameters(c):,} parameters, {c.num_layers} layers of width {c.hidden_size}, "
            f"vocabulary {c.vocab_size:,} (sizes from {found.source})"
        )


def _shapes(plan: Plan) -> Iterator[str]:
    shape, learn = tuple(plan.mesh.shape.values()), plan.config.learn
    yield f"mesh    (data, fsdp, tensor) = {shape}, {plan.mesh.size} devices"
    if plan.learner:
        shards = sharding.row_shards(plan.mesh)
        rows = [micro_batch_rows(n, learn.micro_batch_tokens, shards) for n in learn.row_buckets]
        shapes = ", ".join(f"{b} × {n:,}" for b, n in zip(rows, learn.row_buckets, strict=True))
        yield f"rows    {shapes} tokens in a micro-batch, by the length of the rows"
    if plan.engine:
        rollout = plan.config.rollout
        for lane in lanes(plan.engine).values():
            parked = f"; {lane.parked} parking places" if lane.parked else ""
            yield (
                f"cache   {lane.groups} groups of {lane.history:,} tokens, "
                f"each with {lane.candidates} × {lane.turn:,} of its own turn{parked}"
            )
        yield (
            f"engine  {plan.config.mesh.rollout_tensor} devices of each process; prefill "
            f"{rollout.prefill_rows} × {rollout.prefill_tokens:,}, decode up to {rollout.decode_steps} "
            "per dispatch"
        )


def _memory(plan: Plan, chip: str) -> Iterator[str]:
    kinds = memory(plan)
    for kind, size in kinds.items():
        when = "sampling" if is_engines(kind) else "updating" if kind == GRADIENT else "always"
        yield f"memory  {size / GB:8.3f} GB per device  {kind} ({when})"
    sampling = sum(size for kind, size in kinds.items() if kind != GRADIENT)
    updating = sum(size for kind, size in kinds.items() if not is_engines(kind))
    limit = CHIPS[chip].memory / GB
    yield (
        f"memory  {sampling / GB:8.3f} GB while sampling, {updating / GB:.3f} GB while updating, before what "
        f"programs need for themselves; {chip} has {limit:.1f} GB"
    )


def _time(plan: Plan, chip: Chip) -> Iterator[str]:
    unit, count = _unit(plan.config)
    seconds = {}
    if plan.engine and plan.config.train.kind is not Kind.SUPERVISED:
        seconds |= _sampling_seconds(plan, chip, _workflows(plan.config))
    if plan.learner:
        seconds |= _learning_seconds(plan, chip, _training_rows(plan.config))
    parts = ", ".join(f"{part} {s:.3g}" for part, s in seconds.items())
    yield f"time    {sum(seconds.values()):.3g} s for {count} {unit} ({parts})"


def _unit(config: Config) -> tuple[str, int]:
    if config.train.kind is Kind.SUPERVISED:
        return "demonstrations, one step", config.train.questions
    return "workflows" + (", one step" if config.train.kind is Kind.REINFORCE else ""), _workflows(config)


def _workflows(config: Config) -> int:
    """Of a step, every leaf of a tree, or of an evaluation (of 1,000 questions where it asks all)."""
    if config.train.kind is Kind.EVALUATE:
        return (config.eval.questions or 1000) * config.eval.attempts
    leaves = min(config.tree.leaves, 1 + config.tree.rounds * config.tree.expansions)
    return config.train.questions * config.train.workflows * leaves


def _training_rows(config: Config) -> list[Rows]:
    rows = workflow_rows(config.team, config.team.candidates)
    if config.train.kind is Kind.SUPERVISED:
        searching = rows.get("searcher") or rows["agent"]
        return [Rows(config.train.questions, searching.length, searching.generated)]
    return [Rows(r.count * _workflows(config), r.length, r.generated) for r in rows.values()]


def _learning_seconds(plan: Plan, chip: Chip, rows: list[Rows]) -> dict[str, float]:
    speed = plan.mesh.size * chip.flops * FLOPS_SHARE
    models = [plan.student.config, *(f.model.config for f in plan.frozen.values())]
    score = sum((score_work(models, r) for r in rows), Work(0, 0))
    update = sum((update_work(plan.student.config, r) for r in rows), Work(0, 0))
    seconds = {"update": plan.config.learn.updates_per_batch * update.model / speed}
    return {"score": score.model / speed} | seconds if plan.scorer else seconds


def _sampling_seconds(plan: Plan, chip: Chip, workflows: int) -> dict[str, float]:
    """Prefill is bound by products; decode by reading the weights and a full cache once per step. An engine
    of the Searcher's own takes a step whenever the other does."""
    team, model, capacities = plan.config.team, plan.student.config, lanes(plan.engine)
    candidates = max(capacities)
    rows = workflow_rows(team, candidates)
    answer = rows.pop("answerer", Rows(0, 0, 0))
    prompts = {role: r.count * (r.length - r.generated) for role, r in rows.items()}
    prompts["answerer"] = answer.length - answer.generated
    products = sum(2 * layer_weights(_speaker(plan, role)) * tokens for role, tokens in prompts.items())
    each = max(1, workflows * HOST_DEVICES / max(HOST_DEVICES, plan.mesh.size))
    # One conversation of a workflow decodes at a time.
    speaking = min(
        capacities[1].groups, alive_workflows(plan.config.rollout, team.workflow, plan.searcher is not None)
    )
    turns = sum(r.count * r.generated for r in rows.values())
    turn_steps = max(1, each / speaking) * turns
    steps = [
        (model, capacities[1], turn_steps),
        (model, capacities[candidates], max(1, each / capacities[candidates].groups) * answer.generated),
    ]
    if plan.searcher:
        steps.append((plan.searcher.model.config, lanes(plan.searcher)[1], turn_steps))
    read = sum(count * decode_bytes(c, lane, plan.cache_itemsize) for c, lane, count in steps)
    devices = plan.config.mesh.rollout_tensor
    return {
        "prefill": products * each / (devices * chip.flops * FLOPS_SHARE),
        "decode": read / (devices * chip.bandwidth * BANDWIDTH_SHARE),
    }


def _speaker(plan: Plan, role: str) -> Qwen3Config:
    """Returns the sizes of the model that plays a role."""
    return plan.searcher.model.config if plan.searcher and role == "searcher" else plan.student.config


def _assumptions(chip: str) -> str:
    return (
        f"Times are formulas, nothing was run: {chip} at {FLOPS_SHARE:.0%} of its peak FLOP/s and "
        f"{BANDWIDTH_SHARE:.0%} of its bandwidth, hosts of {HOST_DEVICES} devices; a workflow uses "
        f"{USED:.0%} of the team's limits, prompts have {PROMPT_TOKENS} tokens, a demonstration is like a "
        "Searcher's session; no time for searches, start-up and the hand-over of weights. Whether the "
        "programs fit beside what is counted here, tools.compile_for_pod says."
    )
