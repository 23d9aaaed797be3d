"""What makes each system of the comparison, at every scale; no experiment itself.

A function takes the settings that all systems share and the models of that scale, changes what is its own
and returns the same config. `configs/NAME.py` is the system NAME at full scale,
`configs/mini_systems.py:NAME` in the embedded world.
"""

from dataclasses import dataclass

from mopd_jax.config import (
    AgentReward,
    Backend,
    Config,
    Kind,
    Objective,
    PenaltyScope,
    SearcherReward,
    Workflow,
)


@dataclass(frozen=True)
class Models:
    """How the models that systems start from and are compared with are spelt, as in `model.init`."""

    base: str
    stage1: str
    stage2: str
    judge: str


# ---------------------------------------------------------------- the two stages


def stage1(config: Config, models: Models) -> Config:
    """C-MAS + RL, the teacher: Searcher and Answerer by GRPO, KL to the base policy."""
    config.model.init = config.model.reference = models.base
    config.team.workflow = Workflow.CASCADE
    config.learn.leader = Objective.NONE
    config.learn.searcher = Objective.GRPO
    return config


def stage2(config: Config, models: Models) -> Config:
    """MultiAgent-OPD: Leader and Answerer by GRPO, the Searcher distilled from stage 1, from the base."""
    config.model.init = models.base
    config.model.teacher = config.model.reference = models.stage1
    return config


# ---------------------------------------------------------------- without a team


def search_r1(config: Config, models: Models) -> Config:
    """Search-R1: one agent searches and answers, GRPO on its own exact match, KL to the base policy."""
    config.model.init = config.model.reference = models.base
    config.team.workflow = Workflow.SINGLE
    config.team.candidates = 1
    config.learn.leader = config.learn.searcher = config.learn.answerer = Objective.NONE
    config.learn.agent = Objective.GRPO
    return config


def tree_grpo(config: Config, models: Models) -> Config:
    """Tree-GRPO: the single agent's two chains branch twice each, six leaves for about four chains' cost."""
    config = search_r1(config, models)
    config.train.workflows = 2
    config.tree.rounds = 1
    config.learn.agent_reward = AgentReward.GRADED
    return config


# ---------------------------------------------------------------- another signal for the Searcher


def prompted_critic(config: Config, models: Models) -> Config:
    """The Searcher learns from a judge's score of each of its sessions; KL as in stage 2: none on it [D]."""
    config = no_searcher_loss(config, models)
    config.learn.searcher = Objective.CRITIC
    config.learn.searcher_kl = False
    config.model.judge = models.judge
    return config


def searcher_grpo(config: Config, models: Models) -> Config:
    """No distillation: the Searcher learns from the final answer alone, without a KL penalty."""
    config = no_searcher_loss(config, models)
    config.learn.searcher = Objective.GRPO
    config.learn.searcher_reward = SearcherReward.OUTCOME
    config.learn.searcher_kl = False
    return config


def searcher_grpo_workflow(config: Config, models: Models) -> Config:
    """The same, and a malformed Searcher turn costs all Searcher rows of its workflow −1."""
    config = searcher_grpo(config, models)
    config.learn.penalty_scope = PenaltyScope.WORKFLOW
    return config


def base_teacher(config: Config, models: Models) -> Config:
    """Distilled from the base model, which is the reference too."""
    config = stage2(config, models)
    config.model.teacher = config.model.reference = models.base
    return config


def no_searcher_loss(config: Config, models: Models) -> Config:
    """The Searcher changes only through the weights that it shares with Leader and Answerer."""
    config = stage2(config, models)
    config.model.teacher = ""
    config.learn.searcher = Objective.NONE
    return config


# ---------------------------------------------------------------- one part less


def leader_only(config: Config, models: Models) -> Config:
    """Of the outcome objectives the Leader's alone; the Searcher is distilled."""
    config = stage2(config, models)
    config.learn.answerer = Objective.NONE
    return config


def answerer_only(config: Config, models: Models) -> Config:
    """Of the outcome objectives the Answerer's alone; the Searcher is distilled."""
    config = stage2(config, models)
    config.learn.leader = Objective.NONE
    return config


def no_bonus(config: Config, models: Models) -> Config:
    """The Leader's reward is E, without the bonus for searches."""
    config = stage2(config, models)
    config.learn.leader_bonus = False
    return config


# ---------------------------------------------------------------- evaluations of what is there


def c_mas(config: Config, models: Models) -> Config:
    """The untrained cascade."""
    return evaluated(config, models.base, Workflow.CASCADE)


def h_mas(config: Config, models: Models) -> Config:
    """The untrained hierarchy."""
    return evaluated(config, models.base, Workflow.HIERARCHY)


def stage1_in_hierarchy(config: Config, models: Models) -> Config:
    """The teacher's weights in the full team, in which they were not trained."""
    return evaluated(config, models.stage1, Workflow.HIERARCHY)


def teacher_as_searcher(config: Config, models: Models) -> Config:
    """Stage 2's Leader and Answerer with the teacher itself as their Searcher: as if it had been distilled
    without loss [D]. The slots of the Searcher's engine take the memory of the parking places, of which two
    engines need none."""
    config = evaluated(config, models.stage2, Workflow.HIERARCHY)
    config.model.searcher = models.stage1
    config.rollout.parked = 0
    return config


def matched_budget(config: Config, models: Models) -> Config:
    """Stage 2 with no more searches per workflow than the cascade may make; `team.workflow_input_tokens` caps
    what is read instead."""
    config = evaluated(config, models.stage2, Workflow.HIERARCHY)
    config.team.workflow_searches = config.team.session_searches
    return config


def no_retriever(config: Config, models: Models) -> Config:
    """Stage 2 whose searches find nothing: what the team knows by heart."""
    config = evaluated(config, models.stage2, Workflow.HIERARCHY)
    config.retrieval.backend = Backend.NONE
    return config


def evaluated(config: Config, init: str, workflow: Workflow) -> Config:
    """Weights that are evaluated in a workflow, and not trained."""
    config.train.kind = Kind.EVALUATE
    config.model.init = init
    config.team.workflow = workflow
    return config
