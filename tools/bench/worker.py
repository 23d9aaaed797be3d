"""One contestant in a process of its own, so that its peak memory is its own.

`python -m tools.bench.worker JOB` (JSON) warms up and writes one line; then, for every line that it reads,
it does one repetition and writes one more. A line holds seconds, the process' peak memory in bytes, and
what the work found. Whatever libraries print goes to the error stream.
"""

import importlib
import json
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tools.bench.cases import OURS, STEP, TRANSFORMERS, TUNIX, Job

STEPS = "tools.bench.miniature"
MODULES = {
    OURS: "tools.bench.ours",
    TRANSFORMERS: "tools.bench.torch_peer",
    TUNIX: "tools.bench.tunix_peer",
}


def main() -> None:
    job = Job.from_json(sys.argv[1])
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # Before the libraries are imported: they make as many threads as there are cores to run on.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: job.threads])
    contestant = importlib.import_module(STEPS if job.work == STEP else MODULES[job.contestant])
    run = contestant.DO[job.work](job)
    print(json.dumps(_timed(run) | {"versions": contestant.VERSIONS}), file=replies, flush=True)
    for _ in sys.stdin:
        print(json.dumps(_timed(run)), file=replies, flush=True)


def _timed(run: Callable[[], dict]) -> dict:
    started = time.perf_counter()
    found = run()
    return {"seconds": time.perf_counter() - started, "peak": _peak()} | found


def _peak() -> int:
    """Returns the most resident memory that this process has had, in bytes."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", status)[1])


if __name__ == "__main__":
    main()
