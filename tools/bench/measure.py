"""Starts the contestants' processes and lets them work in turn."""

import contextlib
import json
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tools.bench.cases import OURS, ROOT, Job, variants


class Failed(RuntimeError):
    """A contestant's process ended; says with what."""


class Worker(contextlib.AbstractContextManager):
    """A contestant's process, warmed up.

    Raises:
      Failed: it ended instead of replying.
    """

    def __init__(self, job: Job, python: str):
        self.job, self._log = job, job.file.with_suffix(".log")
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [python, "-m", "tools.bench.worker", job.as_json()],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self.first = self._reply()

    def repeat(self) -> dict:
        """Lets it do one repetition; returns its reply."""
        print(file=self._process.stdin, flush=True)
        return self._reply()

    def _reply(self) -> dict:
        line = self._process.stdout.readline()
        if not line:
            last = (self._log.read_text().strip().splitlines() or ["no message"])[-1]
            raise Failed(f"{self.job.title}: exit code {self._process.wait()}, {last} (see {self._log})")
        return json.loads(line)

    def __exit__(self, *_) -> None:
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


@dataclass
class Line:
    """What one contestant did."""

    job: Job
    first: dict = field(default_factory=dict)
    """The reply to the warm-up."""
    replies: list[dict] = field(default_factory=list)
    failure: str = ""

    def values(self, name: str) -> list[float]:
        """Returns one value of all repetitions."""
        return [reply[name] for reply in self.replies]

    def median(self, name: str) -> float:
        """Returns the median over the repetitions."""
        return statistics.median(self.values(name))

    @property
    def speeds(self) -> list[float]:
        """Tokens per second of every repetition."""
        return [reply["tokens"] / reply["seconds"] for reply in self.replies]

    @property
    def speed(self) -> float:
        """Median of `speeds`."""
        return statistics.median(self.speeds)

    @property
    def peak(self) -> int:
        """Bytes."""
        return max(self.values("peak"))


def compete(
    bases: Sequence[Job], beside: Sequence[Worker], repetitions: int, pythons: Mapping[str, str]
) -> tuple[list[Line], list[Line]]:
    """Lets every contestant do its repetitions, one after the other in each round.

    Args:
      bases: one job per contestant; all its recipes take part, each with the fastest micro-batch.
      beside: warm workers that take part too (they measure the machine).
      repetitions: rounds.
      pythons: interpreter by contestant.

    Returns:
      The lines of the contestants, and those of `beside`. That of a peer which cannot do the work says why.

    Raises:
      Failed: ours cannot.
    """
    lines = [_chosen(jobs, pythons) for base in bases for jobs in variants(base)]
    around = [Line(worker.job, worker.first) for worker in beside]
    with contextlib.ExitStack() as stack:
        running = list(zip(around, beside, strict=True))
        for line in lines:
            if not line.failure and (worker := _started(line, pythons, stack)):
                running.append((line, worker))
        for number in range(repetitions):
            # Every round begins with another contestant: none always works on a machine warmed by the same.
            turn = number % len(running)
            for line, worker in running[turn:] + running[:turn]:
                line.replies.append(worker.repeat())
    return lines, around


def _started(line: Line, pythons: Mapping[str, str], stack: contextlib.ExitStack) -> Worker | None:
    _say(f"{line.job.title}, {line.job.work}: warms up")
    try:
        worker = stack.enter_context(Worker(line.job, pythons[line.job.contestant]))
    except Failed as error:
        if line.job.contestant == OURS:
            raise
        line.failure = str(error)
        return None
    line.first = worker.first
    return worker


def _chosen(jobs: Sequence[Job], pythons: Mapping[str, str]) -> Line:
    """Returns the fastest of the jobs, each tried once in a process of its own."""
    if len(jobs) == 1:
        return Line(jobs[0])
    seconds, failure = {}, ""
    for job in jobs:
        try:
            with Worker(job, pythons[job.contestant]) as worker:
                seconds[job] = worker.repeat()["seconds"]
        except Failed as error:
            failure = str(error)
            continue
        _say(f"{job.title}, {job.work}: {seconds[job]:.2f} s with {job.micro_batch} rows per micro-batch")
    return Line(min(seconds, key=seconds.get)) if seconds else Line(jobs[0], failure=failure)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
