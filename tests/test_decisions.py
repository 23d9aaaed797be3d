"""Which settings a report lists as departures from the paper, and which as decisions of our own."""

import dataclasses

import pytest

from mopd_jax import config as config_module
from mopd_jax.config import Chain, Config, EvalConfig, LearnConfig, RetrievalConfig
from mopd_jax.run.decisions import describe_decisions, marked_fields


@dataclasses.dataclass
class TwoPhases(Chain):
    """A chain without departures until a test makes some."""

    first: Config = dataclasses.field(default_factory=Config)
    second: Config = dataclasses.field(default_factory=Config)


def parts(text: str) -> tuple[list[str], list[str]]:
    """The lines of departures and those of our own values."""
    head, rest = text.split("## Values of ours [D]")
    departures = head.removeprefix("## Departures from the paper [P]").strip().splitlines()
    return departures, rest.strip().splitlines()


@pytest.mark.parametrize("mark", ["[P]", "[D]"])
def test_marked_fields_are_fields_of_the_config(mark):
    found = marked_fields(mark)
    assert len(found) >= 5
    for group, field in found:
        assert field in {f.name for f in dataclasses.fields(getattr(config_module, group))}


def test_marks_are_read_from_the_docstring_below_the_field():
    paper, ours = marked_fields("[P]"), marked_fields("[D]")
    assert {("RetrievalConfig", "k"), ("LearnConfig", "kl"), ("TeamConfig", "candidates")} <= paper
    assert {("LearnConfig", "clip"), ("LearnConfig", "denominator"), ("OptimConfig", "lr")} <= ours
    assert not {("RunConfig", "dir"), ("OptimConfig", "eps"), ("CheckpointConfig", "keep")} & (paper | ours)
    assert ("LearnConfig", "clip") not in paper and ("RetrievalConfig", "k") not in ours


def test_defaults_depart_nowhere():
    assert parts(describe_decisions(Config()))[0] == ["none"]
    assert parts(describe_decisions(TwoPhases()))[0] == ["none"]


def test_a_departure_names_field_and_both_values():
    config = Config(
        retrieval=RetrievalConfig(k=5), learn=LearnConfig(kl=0.0, clip=0.3), eval=EvalConfig(attempts=1)
    )
    departures, ours = parts(describe_decisions(config))
    assert departures == [
        "- retrieval.k = 5, in the paper 3",
        "- learn.kl = 0.0, in the paper 0.001",
        "- eval.attempts = 1, in the paper 4",
    ]
    assert "- learn.clip = 0.3" in ours, "a value of ours is no departure"
    assert "- learn.denominator = all" in ours, "spelled as on the command line"


def test_a_chain_names_the_phase_and_lists_each_value_once():
    chain = TwoPhases()
    chain.second.learn.beta = 0.5
    chain.second.learn.clip = 0.1
    departures, ours = parts(describe_decisions(chain))
    assert departures == ["- second.learn.beta = 0.5, in the paper 0.01"]
    assert "- learn.clip = 0.2 (first); 0.1 (second)" in ours
    assert "- learn.log_ratio_clamp = 10.0" in ours
    assert len({line.partition(" = ")[0] for line in ours}) == len(ours) == len(marked_fields("[D]"))
