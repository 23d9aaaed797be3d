"""What a training run watches beside its loss."""

from absl import logging

from mopd_jax.config import Alarm, TrainConfig
from mopd_jax.refusal import Refusal
from mopd_jax.run.episode_metrics import Metrics


class SearchCollapse(Refusal):
    """Hardly a workflow searches any more: the team has learnt to answer by heart."""


def check_collapse(behaviour: Metrics, train: TrainConfig) -> None:
    """Warns, or stops the run, if fewer than the share `train.collapse_share` of a step's workflows search.

    Raises:
      SearchCollapse: `train.collapse_alarm` is STOP; on every process, all of which see the same episodes.
    """
    searching = 1 - behaviour["no_search"]
    if not searching < train.collapse_share:  # NaN, when every workflow was aborted, is no collapse
        return
    text = (
        f"The search has collapsed: {searching:.1%} of the step's workflows search at all, "
        f"train.collapse_share is {train.collapse_share:.0%}. Go back to an earlier checkpoint and look at "
        "the Searcher's reward and its malformed turns; train.collapse_alarm = warn goes on all the same."
    )
    if train.collapse_alarm is Alarm.STOP:
        raise SearchCollapse(text)
    logging.warning(text)
