"""Several processes as one run: how they meet, split local work and agree.

Every process runs the same program. Only sampling is local: a process takes its share of the questions
at its own pace, then all episodes go to all processes (`spread`), and from there on every process
computes the same and runs the same global programs in the same order. Whatever decides about a
collective (stop, resume, finished) is therefore made the same everywhere first. With one process
nothing here does anything.
"""

import os
import pickle
import sys
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils

from mopd_jax.refusal import Refusal
from mopd_jax.run.checkpoint import config_diff

Item = TypeVar("Item")
Result = TypeVar("Result")

FAREWELL_S = 60
"""Seconds that a process waits for the others at its end."""
_METADATA = "http://metadata.google.internal/computeMetadata/v1/instance/attributes/"


class HostError(Refusal):
    """Another process failed, or the processes do not fit together."""


# ---------------------------------------------------------------- how they meet


def initialize(coordinator: str = "", processes: int = 1, process: int = 0) -> None:
    """Makes the processes one run, before JAX touches a device; what all but the first print is dropped.

    Args:
      coordinator: HOST:PORT of process 0; "" on a TPU pod, which is found out, and for a single process.
      processes: how many there are.
      process: which one this is.

    Raises:
      HostError: the processes see different numbers of devices, or JAX found a pod that this did not.
    """
    # Its handler of SIGTERM would stand in the way of ours.
    jax.config.update("jax_enable_preemption_service", False)
    if coordinator:
        jax.distributed.initialize(coordinator, processes, process, shutdown_timeout_seconds=FAREWELL_S)
    elif tpu_hosts() > 1:
        jax.distributed.initialize(shutdown_timeout_seconds=FAREWELL_S)
    elif jax.process_count() > 1:
        raise HostError(
            f"JAX found {jax.process_count()} processes, but not how they meet: start each with "
            "--coordinator, --processes and --process."
        )
    if jax.device_count() != jax.process_count() * jax.local_device_count():
        raise HostError(
            f"{jax.process_count()} processes have {jax.device_count()} devices, {jax.local_device_count()} "
            "of them here: every process must have the same number."
        )
    if not is_first():
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (it lives as long as the process)


def tpu_hosts() -> int:
    """Returns over how many hosts the TPU slice of this machine extends; 1 where there is no TPU."""
    if "tpu" not in (jax.config.jax_platforms or ""):  # JAX sets it where it finds TPU chips
        return 1
    names = os.environ.get("TPU_PROCESS_ADDRESSES") or os.environ.get("TPU_WORKER_HOSTNAMES")  # on GKE
    return len((names or _metadata("worker-network-endpoints")).split(","))


def _metadata(name: str) -> str:
    """Returns what Google's metadata server says of a TPU VM, "" where there is none."""
    if os.environ.get("TPU_SKIP_MDS_QUERY"):
        return ""
    request = urllib.request.Request(_METADATA + name, headers={"Metadata-Flavor": "Google"})
    try:
        with urllib.request.urlopen(request, timeout=10) as reply:
            return reply.read().decode()
    except urllib.error.URLError:
        return ""


def is_first() -> bool:
    """Whether this process writes and speaks for all."""
    return jax.process_index() == 0


def check_shared(folder: epath.PathLike) -> None:
    """Refuses a folder in which the other processes do not find what the first one writes.

    Raises:
      HostError: names the processes that have another folder there.
    """
    if jax.process_count() == 1:
        return
    token = epath.Path(folder) / f"shared_{of_first(lambda: uuid.uuid4().hex)}"
    if is_first():
        token.parent.mkdir(parents=True, exist_ok=True)
        token.touch()
    wait()
    blind = [process for process, sees in enumerate(gather(token.exists())) if not sees]
    if is_first():
        token.unlink()
    if blind:
        raise HostError(
            f"Processes {blind} do not find what process 0 writes to run.dir = {folder}: take a folder that "
            "all of them share, on gs:// or a network file system."
        )


# ---------------------------------------------------------------- how they agree


def gather(value: Result) -> list[Result]:
    """Returns the values of all processes, by process. All of them call it at the same point."""
    if jax.process_count() == 1:
        return [value]
    data = np.frombuffer(pickle.dumps(value), np.uint8)
    sizes = multihost_utils.process_allgather(np.int32(len(data)))
    # Powers of two, so that few shapes are compiled.
    padded = np.zeros(1 << int(sizes.max() - 1).bit_length(), np.uint8)
    padded[: len(data)] = data
    rows = multihost_utils.process_allgather(padded)
    return [pickle.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]


def wait() -> None:
    """Returns when every process has come here."""
    gather(None)


def of_first(read: Callable[[], Result]) -> Result:
    """Returns on every process what `read` gives on the first, which alone calls it."""
    return gather(read() if is_first() else None)[0]


def any_of(flag: bool) -> bool:
    """Returns whether the flag is set on any process."""
    return any(gather(flag))


def agreed(work: Callable[[], dict]) -> dict:
    """Returns what `work` gives on every process.

    Raises:
      HostError: it gives different things, or fails on another process.
    """
    values = _everywhere(work)
    for process, value in enumerate(values):
        if changes := config_diff(values[0], value):
            listed = "".join(f"\n- {line}" for line in changes)
            raise HostError(
                f"Process {process} was started with other settings or files than process 0:{listed}"
            )
    return values[0]


def spread(work: Callable[[list[Item]], list[Result]], items: Sequence[Item], together: int) -> list[Result]:
    """Returns `work(items)`, done by all processes on parts of the items.

    Args:
      work: gives one result per item, in order; what it gives for an item does not depend on the others.
      items: the same on every process.
      together: so many neighbours stay in one process.

    Raises:
      HostError: the work failed on another process.
    """
    owners = [number // together % jax.process_count() for number in range(len(items))]
    mine = [item for item, owner in zip(items, owners, strict=True) if owner == jax.process_index()]
    shares = [iter(share) for share in _everywhere(lambda: work(mine))]
    return [next(shares[owner]) for owner in owners]


class _Failure(NamedTuple):
    """Stands for what a failed process would have given."""

    words: str


def _everywhere(work: Callable[[], Result]) -> list[Result]:
    """Returns what the work of every process gave. Where it failed on one it fails on all: the others
    would wait for that one in their next global program."""
    if jax.process_count() == 1:
        return [work()]
    try:
        outcome = work()
    except Exception as error:
        gather(_Failure(f"{type(error).__name__}: {error}"))
        raise
    outcomes = gather(outcome)
    for process, found in enumerate(outcomes):
        if isinstance(found, _Failure):
            raise HostError(f"Process {process} failed, its own log says where: {found.words}")
    return outcomes
