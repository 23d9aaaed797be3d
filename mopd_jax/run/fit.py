"""How compiled programs fit a chip: tables, and what to change where they do not."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mopd_jax.config import Attention, Precision, Remat
from mopd_jax.model.sharding import row_shards
from mopd_jax.published import Chip
from mopd_jax.run.estimate import cache_bytes, copied_cache_bytes, decode_bytes
from mopd_jax.run.plan import Plan, Program, longest_rows

GB = 1e9


@dataclass(frozen=True)
class Fit:
    """What the compiler says of a program; bytes on one device."""

    program: Program
    peak: int
    seconds: float
    arguments: int = 0
    temporaries: int = 0
    kernels: int = 0
    """Hand-written kernels in the compiled text."""
    refused: bool = False
    """The compiler gave up: `peak` is what it would have used."""

    @property
    def total(self) -> int:
        """Bytes used while the program runs, with what stays allocated beside it."""
        return self.peak + self.program.beside


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a Markdown table whose columns are aligned: the first to the left, the others to the right."""
    lines = [list(header), ["---", *["--:"] * (len(header) - 1)], *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]

    def show(line: list[str]) -> str:
        cells = [line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))]
        return f"| {' | '.join(cells)} |"

    return "\n".join(map(show, lines))


def format_fits(fits: Sequence[Fit], chip: Chip) -> str:
    """Returns the table of all programs."""
    header = (
        "program",
        "arguments, GB",
        "peak, GB",
        "with what stays beside",
        f"of {chip.memory / GB:.1f}",
        "model TFLOP",
        "s at 100 %",
        "MFU ceiling",
        "kernels",
        "compiled in, s",
    )
    return table(header, (_fit_row(fit, chip) for fit in fits))


def _fit_row(fit: Fit, chip: Chip) -> list[str]:
    work = fit.program.work
    flops = ["–", "–", "–"]
    if work.model:
        seconds = work.model / (fit.program.devices * chip.flops)
        flops = [f"{work.model / 1e12:.3g}", f"{seconds:.3g}", f"{work.ceiling:.0%}"]
    return [
        fit.program.name,
        "–" if fit.refused else f"{fit.arguments / GB:.2f}",
        f"{fit.peak / GB:.2f}",
        f"{fit.total / GB:.2f}",
        "fits" if fit.total <= chip.memory else "refused" if fit.refused else "too much",
        *flops,
        "–" if fit.refused else str(fit.kernels),
        f"{fit.seconds:.0f}",
    ]


def format_sampling(fits: Sequence[Fit], plan: Plan, chip: Chip) -> list[str]:
    """Returns a line per decode program: temporaries against the cache, the bytes that a step reads at least,
    and what candidates save by sharing their prefix."""
    lines, itemsize = [], plan.cache_itemsize
    for fit in fits:
        if fit.program.lane is None or fit.refused or not fit.program.name.startswith("decode"):
            continue
        lane, model, devices = fit.program.lane, fit.program.model, fit.program.devices
        cache, copies = (f(model, lane, itemsize) / devices for f in (cache_bytes, copied_cache_bytes))
        floor = decode_bytes(model, lane, itemsize) / devices
        lines.append(
            f"{fit.program.name}: cache {cache / GB:.2f} GB on a device, temporaries "
            f"{fit.temporaries / 1e6:.1f} MB ({fit.temporaries / cache:.2%}); a step over a full cache reads "
            f"at least {floor / GB:.2f} GB, {1e3 * floor / chip.bandwidth:.1f} ms at 100 % of the bandwidth"
        )
        if lane.candidates > 1:
            lines.append(
                f"{lane.candidates} candidates share their prefix: {cache / GB:.2f} GB on a device, "
                f"{copies / GB:.2f} GB with a copy for each"
            )
    return lines


# ---------------------------------------------------------------- what does not fit


def verdict(fits: Sequence[Fit], plan: Plan, chip: Chip) -> list[str]:
    """Returns a line for every program that does not fit, by how much, and then what to change; nothing
    where all fit."""
    unfit = [fit for fit in fits if fit.total > chip.memory]
    helped: dict[tuple[str, ...], list[str]] = {}
    for fit in unfit:
        helped.setdefault(advice(fit, plan, chip), []).append(fit.program.name)
    changes = [f"For {'; '.join(names)}: {'; '.join(change)}." for change, names in helped.items()]
    return [_excess(fit, chip) for fit in unfit] + (["What would help:", *changes] if changes else [])


def _excess(fit: Fit, chip: Chip) -> str:
    used = f"{fit.peak / GB:.2f} GB on a device"
    if fit.program.beside:
        used += f" beside {fit.program.beside / GB:.2f} GB that stay allocated"
    excess = f"{(fit.total - chip.memory) / GB:.2f} GB too much"
    return f"{fit.program.name} does not fit: {used}, the limit is {chip.memory / GB:.2f} GB, {excess}."


def advice(fit: Fit, plan: Plan, chip: Chip) -> tuple[str, ...]:
    """Returns the changes that would lower a program's memory or that beside it, the cheapest first."""
    if fit.program.lane:
        changes = _sampling_changes(fit, plan, chip)
    else:
        changes = (_learning_changes(plan) if fit.program.work.model else {}) | _mesh_changes(plan)
    return tuple(change for change, helps in changes.items() if helps)


def _sampling_changes(fit: Fit, plan: Plan, chip: Chip) -> dict[str, bool]:
    lane, tensor = fit.program.lane, fit.program.devices
    groups, parked = "rollout.conversations" if lane.candidates == 1 else "rollout.requests", lane.parked
    return {
        "model.rollout = bfloat16": plan.config.model.rollout is Precision.FLOAT32,
        f"fewer {groups} (now {lane.groups})": True,
        f"fewer rollout.parked (now {parked})": parked > 0,
        "a shorter team.row_tokens": True,
        f"a larger mesh.rollout_tensor (now {tensor}), if a host has more devices": True,
        f"more devices (now {plan.mesh.size}), which hold less of the weights and moments each": (
            fit.program.beside > chip.memory / 2
        ),
    }


def _learning_changes(plan: Plan) -> dict[str, bool]:
    model, (rows, length), shards = plan.config.model, longest_rows(plan).ids.shape, row_shards(plan.mesh)
    one_row = f"learn.micro_batch_tokens = {shards * length}, one row on a device (now {rows // shards})"
    return {
        "model.attention = splash": model.attention is Attention.XLA,
        "model.remat = full": model.remat is Remat.MINIMAL,
        "model.compute = bfloat16": model.compute is Precision.FLOAT32,
        "model.frozen = bfloat16": bool(plan.frozen) and model.frozen is Precision.FLOAT32,
        one_row: rows > shards,
        "shorter rows (team.row_tokens, learn.row_buckets)": True,
    }


def _mesh_changes(plan: Plan) -> dict[str, bool]:
    fsdp, devices = plan.mesh.shape["fsdp"], plan.mesh.size
    return {
        f"a larger fsdp axis (mesh.shape is {plan.config.mesh.shape})": fsdp < devices,
        f"more devices (now {devices})": True,
    }
