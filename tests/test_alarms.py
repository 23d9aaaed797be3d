"""The collapse alarm: when it is raised, and what it does."""

import pytest

from mopd_jax.config import Alarm, TrainConfig
from mopd_jax.run.alarms import SearchCollapse, check_collapse
from mopd_jax.run.episode_metrics import behaviour
from mopd_jax.team.episode import Role
from tests.fakes import make_episode, make_row


def searching(share: int, of: int = 100) -> dict[str, float]:
    """What is measured of workflows of which so many search."""
    return behaviour(
        [make_episode(make_row(Role.SEARCHER, "s", searches=2 * (i < share))) for i in range(of)]
    )


def test_a_run_whose_workflows_stopped_searching_is_stopped():
    stop = TrainConfig(collapse_alarm=Alarm.STOP)
    for share in (5, 6, 100):
        check_collapse(searching(share), stop)
    for share in (4, 0):
        with pytest.raises(
            SearchCollapse, match=f"{share}.0% of the step's workflows .*collapse_share is 5%"
        ):
            check_collapse(searching(share), stop)


def test_by_default_it_is_a_warning(caplog):
    check_collapse(searching(5), TrainConfig())
    assert caplog.text == ""
    check_collapse(searching(4), TrainConfig())
    assert "The search has collapsed: 4.0% of" in caplog.text


def test_a_share_of_0_never_warns(caplog):
    check_collapse(searching(0), TrainConfig(collapse_share=0.0, collapse_alarm=Alarm.STOP))
    assert caplog.text == ""


def test_a_step_of_aborted_workflows_says_nothing_about_searching(caplog):
    episode = make_episode()
    episode.aborted = True
    check_collapse(behaviour([episode]), TrainConfig(collapse_alarm=Alarm.STOP))
    assert caplog.text == ""
