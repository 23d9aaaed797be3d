"""How a program says no: refusals in words, bugs with their traceback."""

import pytest

from mopd_jax.checks import ConfigError
from mopd_jax.refusal import Refusal, in_words
from mopd_jax.run.checkpoint import CheckpointError, ResumeError
from mopd_jax.run.evaluation import TooManyAborted
from mopd_jax.run.hosts import HostError


@pytest.mark.parametrize(
    "refusal", [Refusal, ConfigError, ResumeError, CheckpointError, TooManyAborted, HostError]
)
def test_a_refusal_is_its_words_and_exit_code_2(refusal, capsys):
    with pytest.raises(SystemExit) as ended, in_words():
        raise refusal("what to change")
    assert ended.value.code == 2
    assert capsys.readouterr() == ("", "what to change\n")


@pytest.mark.parametrize("bug", [ValueError, KeyError, RuntimeError, FileNotFoundError])
def test_a_bug_keeps_its_traceback(bug, capsys):
    with pytest.raises(bug, match="a bug"), in_words():
        raise bug("a bug")
    assert capsys.readouterr() == ("", "")
