"""Compiles every program over weights or caches of an experiment for a TPU pod, on a machine without TPUs.

    python -m tools.compile_for_pod --config=configs/stage2.py --topology=v5e:8x8

libtpu compiles ahead of time for the named topology (`pip install "jax[tpu]"`). The table says what each
program needs on a device and what it computes; a program that does not fit is refused, with what would
help, and the command fails. Nothing is loaded or downloaded: where model.init is no folder on this
machine, the sizes of `--sizes` are taken. Topologies are named like v5e:4x4, v5p:4x4x4, v6e:8x8. The compiler
takes 1 to 5 minutes for an update of 36 layers, seconds for the rest.
"""

import dataclasses
import importlib.util
import math
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from absl import app
from absl import flags as absl_flags

from mopd_jax import flags
from mopd_jax.config import Chain, Config, phases
from mopd_jax.published import CHIPS, Chip
from mopd_jax.refusal import Refusal, in_words

if TYPE_CHECKING:
    from mopd_jax.run.fit import Fit
    from mopd_jax.run.plan import Plan, Program, Sizes

HOST_ONLY = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
"""Environment in which libtpu compiles and looks for no device."""


def main(config: Config | Chain, topology: str, sizes: str) -> int:
    """Prints the tables of every phase; returns the exit code, 1 if a program does not fit."""
    if not importlib.util.find_spec("libtpu"):
        raise Refusal('libtpu is not installed, it is the compiler: pip install "jax[tpu]".')
    os.environ |= HOST_ONLY
    from mopd_jax.run import fit
    from mopd_jax.run.plan import assumed_sizes, model_sizes

    pod, assumed, earlier = open_pod(topology), assumed_sizes(sizes), {}
    fits = True
    for name, phase in phases(config).items():
        found = model_sizes(phase, earlier, assumed)
        earlier[phase.run.dir] = found[phase.model.init]
        print(f"# {name or phase.train.kind.value}\n")
        plan = plan_on(pod, on_pod(phase, len(pod.devices)), found)
        print(describe(plan, topology, found) + "\n", flush=True)
        results = compile_all(plan)
        print(fit.format_fits(results, pod.chip), *fit.format_sampling(results, plan, pod.chip), sep="\n")
        problems = fit.verdict(results, plan, pod.chip)
        print("\n" + "\n".join(problems or [f"Everything fits {topology}."]) + "\n", flush=True)
        fits &= not problems
    return 0 if fits else 1


def plan_on(pod: "Pod", phase: Config, sizes: "Mapping[str, Sizes]") -> "Plan":
    """Returns the phase's parts on the pod's devices."""
    from mopd_jax.model import sharding
    from mopd_jax.run.plan import make_plan

    tensor = phase.mesh.rollout_tensor
    mesh = sharding.make_mesh(phase.mesh.shape, pod.devices)
    return make_plan(phase, sizes, mesh, sharding.make_mesh((1, 1, tensor), pod.engine_devices(tensor)))


# ---------------------------------------------------------------- devices


@dataclass(frozen=True)
class Pod:
    """A topology that programs can be compiled for."""

    name: str
    chip: Chip
    devices: Sequence

    @property
    def host_devices(self) -> int:
        """Devices of one host."""
        return sum(d.process_index == self.devices[0].process_index for d in self.devices)

    def engine_devices(self, count: int) -> Sequence:
        """Returns so many devices of one host, as a topology of their own: ahead of time, the compiler takes
        no program for a part of a larger one.

        Raises:
          Refusal: a host has fewer, or they make no rectangle.
        """
        if count > self.host_devices or count not in HOST_BOUNDS:
            raise Refusal(
                f"mesh.rollout_tensor = {count}, a host has {self.host_devices} devices: choose one of "
                f"{', '.join(str(n) for n in HOST_BOUNDS if n <= self.host_devices)}."
            )
        generation, bounds = self.name.partition(":")[0], HOST_BOUNDS[count]
        return open_devices(f"{generation}:{'x'.join(map(str, bounds))}", chips_per_host_bounds=bounds)


HOST_BOUNDS = {1: (1, 1, 1), 2: (2, 1, 1), 4: (2, 2, 1), 8: (2, 4, 1)}
"""Devices → how they lie on a host."""


def open_pod(topology: str) -> Pod:
    """Returns the pod of that name.

    Raises:
      Refusal: there is none.
    """
    generation, _, bounds = topology.partition(":")
    if generation not in CHIPS or not re.fullmatch(r"\d+(x\d+){1,2}", bounds):
        raise Refusal(f"--topology={topology}: expected one of {', '.join(CHIPS)}, then e.g. :4x4 or :4x4x4.")
    return Pod(topology, CHIPS[generation], open_devices(topology))


def open_devices(topology: str, **settings) -> Sequence:
    """Returns the devices of a topology.

    Raises:
      Refusal: libtpu knows none of that name.
    """
    from jax.errors import JaxRuntimeError
    from jax.experimental import topologies

    if topology.startswith("v4"):
        settings["chip_config_name"] = "megacore"  # one device per chip, as on the machines
    try:
        return topologies.get_topology_desc(topology, "tpu", **settings).devices
    except JaxRuntimeError as error:
        raise Refusal(f"--topology={topology}: libtpu knows no such topology ({error}).") from error


def on_pod(config: Config, devices: int) -> Config:
    """Returns the phase with a mesh over so many devices: its own, or (1, devices, 1) if that is for another
    number, which is said."""
    if math.prod(config.mesh.shape) == devices:
        return config
    shape = (1, devices, 1)
    spelled = str(shape).replace(" ", "")
    print(
        f"Note: mesh.shape = {config.mesh.shape} is not for {devices} devices, so this is compiled for "
        f"{shape}. Train there with --config.mesh.shape={spelled}."
    )
    return dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, shape=shape))


# ---------------------------------------------------------------- compiling


def compile_all(plan: "Plan") -> "list[Fit]":
    """Compiles one program after the other."""
    from mopd_jax.run.fit import GB
    from mopd_jax.run.plan import programs

    fits = []
    for program in programs(plan):
        print(f"{program.name}: compiling …", file=sys.stderr, flush=True)
        fit = compile_program(program)
        peak = f"{fit.peak / GB:.2f} GB"
        print(f"{program.name}: {peak} after {fit.seconds:.0f} s", file=sys.stderr, flush=True)
        fits.append(fit)
    return fits


def compile_program(program: "Program") -> "Fit":
    """Returns how a program fits; one for which the compiler finds no memory is `refused`."""
    from jax.errors import JaxRuntimeError

    from mopd_jax.run.fit import Fit

    start = time.monotonic()
    try:
        compiled = program.lowered.compile()
    except JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return Fit(program, used_bytes(str(error)), time.monotonic() - start, refused=True)
    seconds, memory = time.monotonic() - start, compiled.memory_analysis()
    return Fit(
        program,
        peak=memory.peak_memory_in_bytes,
        seconds=seconds,
        arguments=memory.argument_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        kernels=compiled.as_text().count("tpu_custom_call"),
    )


def used_bytes(refusal: str) -> int:
    """Returns what a program would have used, out of the compiler's words; where they say nothing of it, they
    are raised.

    "… Used 20.30G of 15.75G hbm …", or "… memory required for … (20.30G) exceeds available HBM (15.75G)".
    """
    found = re.search(r"Used ([\d.]+)([KMGT]) of \S+ hbm|\(([\d.]+)([KMGT])\) exceeds available HBM", refusal)
    if not found:
        raise Refusal(refusal)
    number, unit = (x for x in found.groups() if x)
    return int(float(number) * 2 ** {"K": 10, "M": 20, "G": 30, "T": 40}[unit])


def describe(plan: "Plan", topology: str, sizes: dict) -> str:
    """Returns what is compiled: models, meshes and the shapes of the learner's rows."""
    from mopd_jax.run.estimate import parameters
    from mopd_jax.run.plan import longest_rows

    lines = [
        f"{spec}: Qwen3 with {parameters(found.model) / 1e9:.3f}e9 parameters, sizes from {found.source}"
        for spec, found in sizes.items()
    ]
    mesh, tensor = tuple(plan.mesh.shape.values()), plan.config.mesh.rollout_tensor
    lines.append(
        f"{topology}, mesh (data, fsdp, tensor) = {mesh}; each host's engine on {tensor} of its devices"
    )
    if plan.learner:
        rows, length = longest_rows(plan).ids.shape
        lines.append(
            f"update: {rows} rows × {length} tokens, attention = {plan.student.config.attention.value}"
        )
    return "\n".join(lines)


def _run(config: Config | Chain, topology: str, sizes: str) -> None:
    with in_words():
        sys.exit(main(config, topology, sizes))


if __name__ == "__main__":
    _CONFIG = flags.define_config()
    _TOPOLOGY = absl_flags.DEFINE_string(
        "topology", "v5e:8x8", "Pod to compile for, e.g. v5e:4x4 or v5p:4x4x4."
    )
    _SIZES = flags.define_sizes()
    app.run(lambda _: _run(_CONFIG.value, _TOPOLOGY.value, _SIZES.value), flags_parser=flags.parse)
