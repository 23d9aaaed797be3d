"""Metrics on disk and on the console: one line per step, valid JSON, nothing doubled after a restart."""

import io
import json
import math
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mopd_jax.run import console
from mopd_jax.run.metrics import Compilations, MetricsWriter, Pace, Profile, Stopwatch
from tests.fixtures import read_metrics


def reject_constant(name):
    raise AssertionError(f"{name} is not JSON")


# ---------------------------------------------------------------- the file


def test_values_come_back(tmp_path):
    writer = MetricsWriter(tmp_path / "run")
    writer.write(0, {"loss": 0.5, "tokens/in": 12, "em": np.float32(0.25), "kl": jnp.float32(2)})
    writer.write(1, {"loss": -1})
    assert read_metrics(tmp_path / "run") == [
        {"step": 0, "loss": 0.5, "tokens/in": 12, "em": 0.25, "kl": 2.0},
        {"step": 1, "loss": -1},
    ]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, np.float32("nan"), jnp.inf, None])
def test_what_is_not_finite_is_null(tmp_path, value):
    MetricsWriter(tmp_path).write(3, {"kl": value, "em": 1.0})
    line = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(line, parse_constant=reject_constant) == {"step": 3, "kl": None, "em": 1.0}


def test_a_continued_run_doubles_no_step(tmp_path):
    first = MetricsWriter(tmp_path)
    for step in range(5):
        first.write(step, {"run": 1})
    again = MetricsWriter(tmp_path, resume_step=3)
    assert [line["step"] for line in read_metrics(tmp_path)] == [0, 1, 2]
    for step in range(3, 6):
        again.write(step, {"run": 2})
    assert [(line["step"], line["run"]) for line in read_metrics(tmp_path)] == [
        (0, 1),
        (1, 1),
        (2, 1),
        (3, 2),
        (4, 2),
        (5, 2),
    ]


def test_half_a_line_of_a_killed_run_goes(tmp_path):
    MetricsWriter(tmp_path).write(0, {"em": 0.5})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1, "em"')
    MetricsWriter(tmp_path, resume_step=2).write(2, {"em": 0.75})
    assert [line["step"] for line in read_metrics(tmp_path)] == [0, 2]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_new_run_starts_with_an_empty_file(tmp_path):
    MetricsWriter(tmp_path).write(0, {"em": 0.5})
    MetricsWriter(tmp_path)
    assert read_metrics(tmp_path) == []


# ---------------------------------------------------------------- time


@pytest.fixture
def clock(monkeypatch):
    """A clock that moves only when told: `clock(seconds)`."""
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def move(seconds: float) -> None:
        now[0] += seconds

    return move


def test_a_stopwatch_adds_up_by_phase(clock):
    watch = Stopwatch()
    for _ in range(2):
        with watch("rollout"):
            clock(2)
            with watch("search"):
                clock(0.5)
    clock(9)
    with pytest.raises(KeyError), watch("update"):
        clock(1)
        raise KeyError
    assert watch.take() == {"rollout": 5.0, "search": 1.0, "update": 1.0}
    assert watch.take() == {}


def test_programs_are_counted_as_they_are_compiled():
    with Compilations() as compiled:
        assert compiled.take() == {"compile/programs": 0, "seconds/compile": 0}
        double = jax.jit(lambda x: 2 * x)
        double(np.ones(3))
        double(np.zeros(3))
        first = compiled.take()
        double(np.ones(4))
        assert compiled.take()["compile/programs"] == 1
    assert first["compile/programs"] == 1 and first["seconds/compile"] > 0
    double(np.ones(5))
    assert compiled.take()["compile/programs"] == 0, "it is closed"


def test_remaining_time_follows_the_median_step(clock):
    pace = Pace(window=3)
    assert math.isnan(pace.remaining(5))
    seconds = []
    for step in (60, 2, 4, 3):  # the first compiles
        clock(step)
        seconds.append(pace.tick())
    assert seconds == [60, 2, 4, 3]
    assert pace.remaining(10) == 30.0
    assert pace.remaining(0) == 0.0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0s"),
        (59.6, "1m00s"),
        (125, "2m05s"),
        (3600, "1h00m"),
        (90061, "25h01m"),
        (math.nan, "?"),
        (None, "?"),
    ],
)
def test_durations(seconds, text):
    assert console.duration(seconds) == text


# ---------------------------------------------------------------- the console

METRICS = {
    "reward/leader": 0.4,
    "reward/answerer": -0.125,
    "em": 0.311,
    "searches": 2.94,
    "no_search": 0.03,
    "malformed/searcher": 0.118,
    "kl/leader": 1.2e-3,
    "log_ratio/searcher": math.nan,
    "grad_norm": 0.8123,
    "unknown": 3,
    "tokens_per_s/rollout": 1234.5,
    "tokens_per_s/update": 45678,
    "seconds/remaining": 125,
}


def test_the_line_of_a_step():
    assert console.step_line("stage2", 7, 60, METRICS) == (
        "stage2  7/60 | R L 0.40 A-0.12 | EM 0.31 | searches  2.9 | none   3% | bad S 12% | KL L 1e-03 "
        "| ratio S     - | grad   0.81 | sampled/s  1234 | trained/s  45678 | 2m05s left"
    )


def test_lines_are_aligned_and_the_name_may_be_empty():
    later = METRICS | {"em": 1.0, "grad_norm": 12.0, "malformed/searcher": 1.0, "reward/leader": -0.9}
    lines = [console.step_line("", 7, 60, METRICS), console.step_line("", 60, 60, later)]
    assert lines[0].startswith(" 7/60 | ")
    assert [i for i, c in enumerate(lines[0]) if c == "|"] == [i for i, c in enumerate(lines[1]) if c == "|"]


def test_a_row_is_shown_as_it_stands():
    out = io.StringIO()
    spans = [("[red]Task[/red]: who?\n", False), ("<search>who</search>", True)]
    console.show_row("searcher [b]1[/b]", spans, out)
    text = out.getvalue()
    assert "searcher [b]1[/b]" in text
    assert "[red]Task[/red]: who?" in text
    assert "<search>who</search>" in text
    assert "\x1b" not in text


def test_generated_text_is_coloured_on_a_terminal(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    out = io.StringIO()
    console.show_row("row", [("asked", False), ("answered", True)], out)
    assert "\x1b[2masked\x1b[0m\x1b[32manswered\x1b[0m" in out.getvalue()


# ---------------------------------------------------------------- a trace


def test_the_chosen_steps_are_traced_and_no_other(tmp_path):
    profile = Profile(tmp_path, (2, 3))
    for number in range(1, 5):
        with profile.step(number):
            jnp.zeros(3).block_until_ready()
        assert bool(list(tmp_path.rglob("*.xplane.pb"))) == (number >= 3)
    profile.close()
    (trace,) = tmp_path.rglob("*.xplane.pb")
    assert b"step" in trace.read_bytes()


def test_a_run_that_stops_early_keeps_what_was_traced(tmp_path):
    profile = Profile(tmp_path, (1, 9))
    with profile.step(5):  # a run that was continued after the first
        pass
    profile.close()
    assert len(list(tmp_path.rglob("*.xplane.pb"))) == 1


def test_no_step_is_traced_by_default(tmp_path):
    profile = Profile(tmp_path, (0, 0))
    with profile.step(1):
        pass
    profile.close()
    assert not list(tmp_path.iterdir())
