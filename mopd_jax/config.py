"""The experiment as typed dataclasses: one phase is one `Config`, a chain names several.

Every field has its docstring below it. `[P]` marks a value the paper states, `[D]` a decision of
this project where the paper is silent. This module imports nothing heavy, so that `--help` and a
refused config cost a fraction of a second.
"""

import dataclasses
from dataclasses import dataclass, field

from mopd_jax.choices import (
    AgentReward,
    Alarm,
    Attention,
    Backend,
    Denominator,
    Kind,
    KLPlacement,
    Objective,
    PenaltyScope,
    Precision,
    Remat,
    Schedule,
    SearcherReward,
    Wording,
    Workflow,
)

MINIATURE = "miniature"
"""The embedded world, where a config names files."""
RANDOM = "random"
"""Random weights with the embedded world's tokenizer, where a config names a model."""
SCRIPTED = "scripted"
"""The embedded world's scripted judge, where a config names a judge."""
MODEL_FIELDS = ("init", "teacher", "reference", "judge", "searcher")
"""The fields of `ModelConfig` that name a model."""
SPLASH_TILE = 128
"""Rows of splash attention are a multiple of this many tokens, the width of a TPU's vectors."""


@dataclass
class RunConfig:
    dir: str = "runs/default"
    """Folder of everything the run writes, may be gs://; all processes of a run share it. A chain puts each
    phase in a folder inside."""
    seed: int = 0
    """Seed of the data order, of sampling and of random initial weights."""
    allow_changes: bool = False
    """Continue a run although its config or data differ from what it was started with."""
    profile_steps: tuple[int, int] = (0, 0)
    """First and last step, counted from 1, that the JAX profiler traces into `dir`/profile; (0, 0): none."""


@dataclass
class ArchitectureConfig:
    """Sizes of a model that starts from random weights (`model.init = "random"`)."""

    hidden_size: int = 96
    """Width of the residual stream."""
    intermediate_size: int = 192
    """Width of the SwiGLU layer."""
    num_layers: int = 3
    """Decoder layers."""
    num_heads: int = 4
    """Query heads."""
    num_kv_heads: int = 2
    """Key/value heads; divides `num_heads`."""
    head_dim: int = 48
    """Width of one head, even. A layer copies through `num_kv_heads` × `head_dim` values: with fewer than
    `hidden_size` the small model learns to read names much more slowly."""
    rope_theta: float = 100.0
    """Base of the rotary frequencies: small, since rows are short and the first thing to learn is to look at
    the token before."""
    tie_word_embeddings: bool = True
    """Use the embedding as the output head."""


@dataclass
class ModelConfig:
    init: str = ""
    """Where the weights start: a Hugging Face folder, a run folder (its export), the name of an earlier
    phase of the chain, or "random" (the embedded world's tokenizer, sizes from `architecture`)."""
    teacher: str = ""
    """Frozen model that scores distilled roles (same spellings as `init`); "" where no role is distilled."""
    reference: str = ""
    """Frozen model of the KL penalty, spelt alike, the teacher in stage 2; "" where `learn.kl` is 0."""
    judge: str = ""
    """Frozen model that scores the sessions of a Searcher with a critic, by default the base model [D], or
    "scripted", which judges by rule in the embedded world; "" where there is no critic."""
    searcher: str = ""
    """Frozen model that plays the Searcher in an evaluation (same spellings as `init`); "": the evaluated
    weights do."""
    architecture: ArchitectureConfig = field(default_factory=ArchitectureConfig)
    """Sizes for `init = "random"`."""
    compute: Precision = Precision.FLOAT32
    """Type of activations and matrix products (accumulated in float32) in learner and scorer."""
    frozen: Precision = Precision.FLOAT32
    """Type in which the weights of teacher, reference and judge are held."""
    rollout: Precision = Precision.FLOAT32
    """Type of the sampler's weights and caches."""
    remat: Remat = Remat.MINIMAL
    """Recompute whole layers in the backward pass (FULL), or keep the outputs of their projections and
    recompute the rest, i.e. attention, norms and activations (MINIMAL): more memory, less time."""
    attention: Attention = Attention.XLA
    """Attention of learner and scorer: plain XLA, or the TPU kernel that never holds the scores of a row
    (SPLASH; a CPU interprets it, slowly, for tests). Sampling has its own."""


@dataclass
class MeshConfig:
    shape: tuple[int, int, int] = (1, 1, 1)
    """Devices along (data, fsdp, tensor); the product is the number of devices of the whole run."""
    rollout_tensor: int = 1
    """Devices of one process over which its sampling engine splits heads and vocabulary; divides them."""


@dataclass
class DataConfig:
    train: tuple[str, ...] = ()
    """Questions that the team is trained on: FlashRAG JSONL files, sets that `tools/prepare_data` made,
    spelled FOLDER:SPLIT ("data/questions/nq:train"), or ("miniature",)."""
    weights: tuple[int, ...] = ()
    """Draws from each entry of `train` in every sum(weights) draws, e.g. (1,1): half of the questions from
    each of two; (): all questions alike, so that a larger set is drawn oftener [D]."""
    validation: tuple[str, ...] = ()
    """Questions for the evaluation during training, spelled as in `train`."""
    test: tuple[str, ...] = ()
    """Questions for `evaluate`, spelled as in `train`."""
    manifest: str = ""
    """Manifest of `tools/prepare_data`: exactly its questions of `test`, unchanged, are evaluated (the fixed
    5,000 [D]); "": `eval.questions` chooses."""
    demonstrations: tuple[str, ...] = ()
    """Conversation files (JSONL) of a supervised phase, ("miniature:facts",) or ("miniature:noisy",)."""
    world_seed: int = 0
    """Seed of the embedded world: its people, facts and questions."""


@dataclass
class RetrievalConfig:
    backend: Backend = Backend.HTTP
    """Which retriever answers."""
    corpus: str = ""
    """`{"id", "contents"}` JSONL file for BM25 and DENSE, on every host's own disk."""
    index: str = ""
    """Folder that `tools/build_index` made of `corpus`, for BM25 and DENSE. BM25 does without one too: it is
    then made at every start, which suits some ten thousand passages."""
    url: str = ""
    """Address of a Search-R1 server for HTTP, e.g. http://10.0.0.2:8000/retrieve."""
    k: int = 3
    """Documents per search [P]."""
    cache: int = 100_000
    """Queries whose results a process remembers; 0: none."""
    timeout_s: float = 30.0
    """Seconds one HTTP request may take."""
    retries: int = 4
    """Further tries after a failed request, with growing waits."""
    max_aborted_share: float = 0.2
    """Stop the run when more than this share of a step's workflows was aborted by failed searches."""


@dataclass
class TeamConfig:
    """Workflow, wording and limits of the team."""

    workflow: Workflow = Workflow.HIERARCHY
    """Cascade (Searcher → Answerer), hierarchy (Leader ⇄ Searcher → Answerer), or a single agent that
    searches and answers in one conversation (Search-R1)."""
    wording: Wording = Wording.FULL
    """Prompts in full sentences, or in the few words of the embedded world."""
    candidates: int = 5
    """Answers sampled per answer request in training [P]; an evaluation samples one."""
    leader_turns: int = 5
    """Turns of the Leader; the last one is only for the answer request, so one task fewer [D]."""
    session_searches: int = 4
    """Searches of one Searcher session; then only a summary is accepted. The single agent's too; then only an
    answer is accepted [D]."""
    workflow_searches: int = 12
    """Searches of one workflow; a Searcher at this cap is asked for its summary [D]."""
    workflow_input_tokens: int = 0
    """Input tokens of one workflow, summed over its model calls, after which nobody may search or give a
    sub-task any more; 0: no such cap [D]."""
    leader_tokens: int = 256
    """New tokens per Leader turn [D]."""
    searcher_tokens: int = 256
    """New tokens per turn of a Searcher or of the single agent [D]."""
    answerer_tokens: int = 64
    """New tokens per answer [D]."""
    document_tokens: int = 768
    """Tokens of all documents of one search; longer ones are shortened inside each document [D]."""
    row_tokens: int = 8192
    """Tokens of one conversation; a turn that would not fit ends it (truncated: context) [D]."""


@dataclass
class RolloutConfig:
    """The sampling engine of one process, or each of its two, where `model.searcher` has its own."""

    conversations: int = 64
    """Slots of the one-candidate lane: conversations that speak at once."""
    parked: int = 64
    """Further conversations whose caches are kept while others speak: a Leader whose Searcher works, a
    Searcher that waits for its documents. With about as many as `conversations` the slots stay busy [D]."""
    requests: int = 16
    """Slots of the candidate lane: answer requests that are answered at once."""
    prefill_rows: int = 8
    """Prompts extended per prefill call: about as many as end their turns in one dispatch, an eighth of
    `conversations`; more are computed in vain."""
    prefill_tokens: int = 512
    """Tokens per prompt and prefill call; longer prompts take several calls. One width only: XLA computes
    another one in other bits, and a prompt's would depend on what others have left of it in the cache [D]."""
    decode_steps: int = 16
    """Most tokens decoded per dispatch; it ends as soon as an eighth of the slots is free again."""
    temperature: float = 1.0
    """Must be 1: anything else biases the importance ratio."""
    top_p: float = 1.0
    """Must be 1, for the same reason."""
    top_k: int = 0
    """Must be 0, for the same reason."""


@dataclass
class LearnConfig:
    leader: Objective = Objective.GRPO
    """Objective of the Leader's rows."""
    searcher: Objective = Objective.OPD
    """Objective of the Searcher's rows: OPD in stage 2, GRPO in stage 1; CRITIC: GRPO on a judge's scores."""
    answerer: Objective = Objective.GRPO
    """Objective of the Answerer's rows."""
    agent: Objective = Objective.NONE
    """Objective of the single agent's rows."""
    searcher_reward: SearcherReward = SearcherReward.ACTIVITY
    """Reward of a GRPO-trained Searcher: 0.9 E + 0.1 activity [P], or E alone."""
    agent_reward: AgentReward = AgentReward.EXACT
    """Reward of the single agent: its own exact match and −1 for malformed output, or Tree-GRPO's graded
    one, which has no −1 [D]."""
    leader_bonus: bool = True
    """Leader reward 0.9 E + 0.1 search bonus [P], or E alone."""
    penalty_scope: PenaltyScope = PenaltyScope.ROW
    """Whether a malformed turn of a GRPO-trained Searcher costs −1 on its row or on all Searcher rows [D]."""
    kl: float = 1e-3
    """Coefficient of the KL penalty in the reward of GRPO roles [P]."""
    searcher_kl: bool = True
    """Whether a Searcher with a reward pays the KL penalty too, as in stage 1 [D]."""
    kl_placement: KLPlacement = KLPlacement.TOKEN
    """Per token after the outcome is normalised, or per sequence before [D]."""
    beta: float = 0.01
    """Weight of the teacher's log-ratio in OPD [P]."""
    log_ratio_clamp: float = 10.0
    """Bound of |log π_teacher − log π_old| in OPD [D]."""
    clip: float = 0.2
    """ε of the clipped ratio [D]."""
    sampler_weight_cap: float = 2.0
    """Cap of the weight exp(log π_old − log π_sampler); 0 turns the weight off [D]."""
    denominator: Denominator = Denominator.ALL
    """Divide by the generated tokens of all rows, or by each role's own [D]."""
    updates_per_batch: int = 1
    """Optimizer steps per batch of episodes [D]."""
    row_buckets: tuple[int, ...] = (1024, 2048, 4096, 8192)
    """Lengths of packed rows; a row goes into the shortest that holds it, or fills a longer one."""
    micro_batch_tokens: int = 65536
    """Tokens of one forward/backward over all devices; more are accumulated."""
    logit_chunk: int = 512
    """Positions whose logits are held at once on one data shard."""
    role_gradients_every: int = 0
    """Measure the gradient norm of each role every so many steps (one more backward per role); 0: never."""


@dataclass
class OptimConfig:
    lr: float = 1e-6
    """Peak learning rate [D]."""
    b1: float = 0.9
    """Adam's decay of the first moment."""
    b2: float = 0.95
    """Adam's decay of the second moment."""
    eps: float = 1e-8
    """Adam's ε."""
    weight_decay: float = 0.0
    """Decoupled weight decay of matrices; norms are spared."""
    max_grad_norm: float = 1.0
    """Global norm to which gradients are clipped."""
    schedule: Schedule = Schedule.CONSTANT
    """Learning rate after the warm-up."""
    warmup_steps: int = 0
    """Optimizer steps (`learn.updates_per_batch` per batch) over which the learning rate rises linearly."""


@dataclass
class TrainConfig:
    kind: Kind = Kind.REINFORCE
    """Supervised, reinforce, or evaluate only."""
    steps: int = 0
    """Batches of episodes (or of demonstrations)."""
    questions: int = 64
    """Draws of a question per step (demonstrations per step in a supervised phase)."""
    workflows: int = 5
    """G: workflows per question, as in GRPO; the number is ours [D]."""
    collapse_share: float = 0.05
    """A step of whose workflows a smaller share searches at all raises the alarm; 0: never [D]."""
    collapse_alarm: Alarm = Alarm.WARN
    """Whether that alarm is a warning or stops the run [D]."""


@dataclass
class TreeConfig:
    """Tree-GRPO: the single agent's chains branch (arXiv 2509.21240); numbers from public reports [D].

    `train.workflows` is the number of chains of a question, each of which starts a tree.
    """

    rounds: int = 0
    """How often each tree grows [D]; 0: chains do not branch."""
    expansions: int = 2
    """Nodes drawn per tree and round, each continued to the end as a new branch [D]."""
    leaves: int = 3
    """Leaves kept of each tree, at random [D]."""


@dataclass
class EvalConfig:
    every: int = 0
    """Evaluate on `data.validation` every so many steps, and at the end; 0: never."""
    validation_questions: int = 256
    """Questions of one such evaluation, spread evenly over the datasets; 0: all."""
    validation_attempts: int = 1
    """Attempts per question in such an evaluation."""
    questions: int = 0
    """Questions of the final evaluation, spread evenly over the datasets; 0: all."""
    attempts: int = 4
    """Attempts per question in the final evaluation [P]."""


@dataclass
class CheckpointConfig:
    every: int = 50
    """Save every so many steps; the last step and SIGTERM always save."""
    keep: int = 2
    """Latest checkpoints kept."""


@dataclass
class Config:
    """One phase: a training run or an evaluation."""

    run: RunConfig = field(default_factory=RunConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    tree: TreeConfig = field(default_factory=TreeConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    data: DataConfig = field(default_factory=DataConfig)
    retrieval: RetrievalConfig = field(default_factory=RetrievalConfig)
    team: TeamConfig = field(default_factory=TeamConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    learn: LearnConfig = field(default_factory=LearnConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)


@dataclass
class Chain:
    """Phases that run one after the other in the order of the fields.

    A subclass adds one `Config` field per phase. `model.init`, `teacher`, `reference`, `judge` and
    `searcher` of a phase may name an earlier one. `run.dir` is the parent of the phases' folders; the other
    fields of `run` replace each phase's own.
    """

    run: RunConfig = field(default_factory=RunConfig)


def phases(config: Config | Chain) -> dict[str, Config]:
    """Returns the phases in order, by name; a single `Config` is one phase with the name "".

    Where a phase of a chain names an earlier one as a model, that name becomes the phase's folder.
    """
    if isinstance(config, Config):
        return {"": config}
    named: dict[str, Config] = {}
    for f in dataclasses.fields(config):
        phase = getattr(config, f.name)
        if isinstance(phase, Config):
            run = dataclasses.replace(config.run, dir=f"{config.run.dir.rstrip('/')}/{f.name}")
            models = {key: getattr(phase.model, key) for key in MODEL_FIELDS}
            models = {key: named[spec].run.dir if spec in named else spec for key, spec in models.items()}
            named[f.name] = dataclasses.replace(
                phase, run=run, model=dataclasses.replace(phase.model, **models)
            )
    return named
