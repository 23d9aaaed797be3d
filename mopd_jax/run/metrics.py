"""What a run measures: one JSON line per step on disk, the seconds of every phase, a profiler's trace.

Names are `group/what`, e.g. `reward/leader`, `seconds/rollout`; every value is a number, or null
where it was not finite (a line is valid JSON whatever happened).
"""

import collections
import contextlib
import json
import math
import os
import statistics
import time
from collections.abc import Iterator, Mapping
from typing import SupportsFloat

import jax
from etils import epath

Metrics = Mapping[str, SupportsFloat | None]


class MetricsWriter:
    """Appends to `metrics.jsonl` of a folder, which may be gs://."""

    def __init__(self, folder: epath.PathLike, resume_step: int = 0):
        """Opens the file and cuts what a continued run will write again.

        Args:
          folder: made if absent.
          resume_step: the first step to be written; lines from it on, and a torn last line, go.
        """
        self._path = epath.Path(folder) / "metrics.jsonl"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._local = "://" not in str(self._path)
        self._lines = [line for line in self._old_lines() if json.loads(line)["step"] < resume_step]
        self._rewrite()

    def write(self, step: int, metrics: Metrics) -> None:
        """Adds the line of a step; a value that is not finite becomes null."""
        line = json.dumps({"step": step} | {name: _finite(value) for name, value in metrics.items()})
        if self._local:
            with self._path.open("a") as file:
                file.write(line + "\n")
        else:  # objects of a bucket cannot grow
            self._lines.append(line)
            self._rewrite()

    def _old_lines(self) -> list[str]:
        """Whole lines only: a killed run may leave half of one."""
        text = self._path.read_text() if self._path.exists() else ""
        return text[: text.rfind("\n") + 1].splitlines()

    def _rewrite(self) -> None:
        unfinished = self._path.parent / f"{self._path.name}.tmp"
        unfinished.write_text("".join(line + "\n" for line in self._lines))
        unfinished.replace(self._path)


def _finite(value: SupportsFloat | None) -> float | int | None:
    if value is None or not math.isfinite(float(value)):
        return None
    return value if isinstance(value, int) else float(value)


class Stopwatch:
    """Adds up the seconds of named phases: `with watch("rollout"): ...`."""

    def __init__(self):
        self._seconds = collections.defaultdict(float)

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Measures the block; arrays still being computed at its end count for whoever waits for them."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[phase] += time.perf_counter() - start

    def take(self) -> dict[str, float]:
        """Returns the seconds by phase since the last call, and starts anew."""
        seconds, self._seconds = dict(self._seconds), collections.defaultdict(float)
        return seconds


class Compilations:
    """Counts programs as they are compiled, or taken from the compilation cache, while it is open."""

    def __init__(self):
        self._seconds: list[float] = []

    def __enter__(self) -> "Compilations":
        jax.monitoring.register_event_duration_secs_listener(self._note)
        return self

    def __exit__(self, *_) -> None:
        jax.monitoring.unregister_event_duration_listener(self._note)

    def _note(self, event: str, seconds: float, **_) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            self._seconds.append(seconds)

    def take(self) -> Metrics:
        """Returns number and seconds since the last call, and starts anew."""
        seconds, self._seconds = self._seconds, []
        return {"compile/programs": len(seconds), "seconds/compile": sum(seconds)}


class Profile:
    """Traces a range of steps with the JAX profiler: `with profile.step(number): ...`."""

    def __init__(self, folder: epath.PathLike, steps: tuple[int, int]):
        """Takes the folder of the trace, which may be gs://, and the first and the last step; steps count
        from 1."""
        self._folder, (self._first, self._last) = os.fspath(folder), steps
        self._tracing = False

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Marks the block as a step of the trace if it is one that is wanted."""
        if self._first <= number <= self._last and not self._tracing:
            jax.profiler.start_trace(self._folder)
            self._tracing = True
        with jax.profiler.StepTraceAnnotation("step", step_num=number):
            yield
        if number == self._last:
            self.close()

    def close(self) -> None:
        """Writes what was traced, if anything was."""
        if self._tracing:
            jax.profiler.stop_trace()
            self._tracing = False


class Pace:
    """Foretells the remaining time of a loop from its latest steps."""

    def __init__(self, window: int = 20):
        self._seconds = collections.deque(maxlen=window)
        self._last = time.perf_counter()

    def tick(self) -> float:
        """Ends a step; returns its seconds."""
        now = time.perf_counter()
        self._seconds.append(now - self._last)
        self._last = now
        return self._seconds[-1]

    def remaining(self, steps: int) -> float:
        """Returns the seconds `steps` more will take, by the median: compiling is rare. NaN before any."""
        return statistics.median(self._seconds) * steps if self._seconds else math.nan
