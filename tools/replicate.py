"""Trains and evaluates every system of a chain for several seeds, and reports what came out.

    python -m tools.replicate --config=configs/mini_systems.py --seeds=0,1 --out=runs/replication

Each seed runs the whole chain in a folder of its own, so that its systems share base and teacher. What is
finished is not run again and what was broken off goes on when the same command is given again. OUT/report
holds the report as it came out, with its figures: the paper's table beside ours, the order of its pairs with
intervals, learning curves, and which commit, command, machine and time made it. So that a commit says what
ran, a checkout with changes is refused, and so is one run with several commits.
"""

import dataclasses
import datetime
import os
import pathlib
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence

from absl import app
from absl import flags as absl_flags
from ml_collections import config_flags

from mopd_jax import flags
from mopd_jax.config import Chain, Config, Kind, phases
from mopd_jax.refusal import Refusal, in_words

CHECKOUT = pathlib.Path(__file__).resolve().parents[1]


def main(config: Config | Chain, file: str, seeds: Sequence[str], out: str) -> None:
    """Runs the chain once for each seed, then writes the report.

    Args:
      config: a chain with phases that learn from episodes and phases that evaluate.
      file: where it was read from; part of the checkout.
      seeds: whole numbers, as spelled.
      out: folder of everything.

    Raises:
      Refusal: the checkout has changes or is not the one this replication began with; `train.main`'s.
    """
    from mopd_jax import train
    from mopd_jax.run.replication import write_report

    chains = chains_of(config, seeds, out)
    begun = begin(out, clean_commit(CHECKOUT, file))
    for chain in chains:
        train.main(chain)
    print(f"\nThe report: {write_report(f'{out}/report', chains, made_by(begun, chains))}")


def chains_of(config: Config | Chain, seeds: Sequence[str], out: str) -> list[Chain]:
    """Returns the chain for every seed, each in its own folder of `out`.

    Raises:
      Refusal: there is nothing to compare in it, or the seeds are not distinct whole numbers.
    """
    kinds = {phase.train.kind for phase in phases(config).values()}
    if not isinstance(config, Chain) or not {Kind.REINFORCE, Kind.EVALUATE} <= kinds:
        raise Refusal(
            "A replication takes a chain with phases that reinforce and phases that evaluate, e.g. "
            f"configs/mini_systems.py; found {sorted(kind.value for kind in kinds)}."
        )
    if not all(seed.isdecimal() for seed in seeds) or len({*map(int, seeds)}) < max(1, len(seeds)):
        raise Refusal(f"--seeds={','.join(seeds)}: expected distinct whole numbers, e.g. --seeds=0,1,2.")
    runs = [dataclasses.replace(config.run, dir=f"{out}/seed_{int(s)}", seed=int(s)) for s in seeds]
    return [dataclasses.replace(config, run=run) for run in runs]


def clean_commit(checkout: pathlib.Path, file: str) -> str:
    """Returns the commit that a checkout stands at.

    Args:
      checkout: of this program.
      file: the config's.

    Raises:
      Refusal: it is no checkout, has changes, or does not hold the file.
    """
    if changes := _git(checkout, "status", "--porcelain"):
        raise Refusal(
            f"{checkout} has changes that no commit holds, so no report could name what ran:\n{changes}\n"
            "Commit them or take them back; folders of runs belong into runs/, which git ignores."
        )
    _git(checkout, "ls-files", "--error-unmatch", str(pathlib.Path(file).resolve()))
    return _git(checkout, "rev-parse", "HEAD")


def _git(checkout: pathlib.Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", checkout, *arguments], capture_output=True, text=True)
    if done.returncode:
        raise Refusal(
            f"git {shlex.join(arguments)} in {checkout}: {done.stderr.strip()}. A report names the commit "
            "of program and config: run it from a checkout that holds both."
        )
    return done.stdout.rstrip()


def begin(out: str, commit: str) -> dict:
    """Returns what is noted of this replication in `replication.json`: commit, first start, machines.

    Raises:
      Refusal: it began with another commit.
    """
    from mopd_jax.run.checkpoint import check_writable, read_json, write_json

    check_writable(out)
    path = f"{out}/replication.json"
    begun = read_json(path) or {"commit": commit, "started": time.time(), "machines": []}
    if begun["commit"] != commit:
        raise Refusal(
            f"{out} was begun with commit {begun['commit']}, the checkout stands at {commit}: check that one "
            "out again to go on, or take another --out."
        )
    begun["machines"] = sorted({*begun["machines"], machine()})
    write_json(path, begun)
    return begun


def machine() -> str:
    """Returns what this machine is, and the versions that decide about figures."""
    import jax

    devices = f"{jax.device_count()} × {jax.devices()[0].device_kind}"
    versions = f"Python {platform.python_version()}, jax {jax.__version__}"
    return f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, {devices}, {versions}"


def made_by(begun: dict, chains: Sequence[Chain]) -> dict[str, str]:
    """Returns commit, command, machines and time; a finished replication gives the same again."""
    from etils import epath

    every = [phase for chain in chains for phase in phases(chain).values()]
    evaluations = (phase for phase in every if phase.train.kind is Kind.EVALUATE)
    finished = max((epath.Path(phase.run.dir) / "evaluated.json").stat().mtime for phase in evaluations)
    return {
        "commit": begun["commit"],
        "command": f"python -m tools.replicate {shlex.join(sys.argv[1:])}",
        "machine": "; ".join(begun["machines"]),
        "time": f"started {_minute(begun['started'])}, last evaluation finished {_minute(finished)}",
    }


def _minute(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")


def _run(_) -> None:
    file = config_flags.get_config_filename(absl_flags.FLAGS["config"]).partition(":")[0]
    with in_words():
        main(_CONFIG.value, file, _SEEDS.value, _OUT.value.rstrip("/"))


if __name__ == "__main__":
    _CONFIG = flags.define_config()
    _SEEDS = absl_flags.DEFINE_list("seeds", ["0"], "Training seeds; they take the place of run.seed.")
    _OUT = absl_flags.DEFINE_string(
        "out", "runs/replication", "Folder of everything; it takes the place of run.dir."
    )
    app.run(_run, flags_parser=flags.parse)
