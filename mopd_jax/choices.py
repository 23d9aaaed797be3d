"""What a field of the config may choose from."""

import enum


class Kind(enum.Enum):
    """What a phase does."""

    SUPERVISED = "supervised"
    REINFORCE = "reinforce"
    EVALUATE = "evaluate"


class Workflow(enum.Enum):
    """Who talks to whom."""

    CASCADE = "cascade"
    HIERARCHY = "hierarchy"
    SINGLE = "single"


class Wording(enum.Enum):
    """Which prompts the roles get."""

    FULL = "full"
    MINIATURE = "miniature"


class Objective(enum.Enum):
    """What a role's tokens learn from."""

    GRPO = "grpo"
    OPD = "opd"
    CRITIC = "critic"
    NONE = "none"


class KLPlacement(enum.Enum):
    """Where the KL penalty enters the reward."""

    TOKEN = "token"
    SEQUENCE = "sequence"


class Denominator(enum.Enum):
    """What the loss is divided by."""

    ALL = "all"
    ROLE = "role"


class PenaltyScope(enum.Enum):
    """Which Searcher rows a malformed Searcher turn costs."""

    ROW = "row"
    WORKFLOW = "workflow"


class SearcherReward(enum.Enum):
    """What a GRPO-trained Searcher is rewarded for."""

    ACTIVITY = "activity"
    OUTCOME = "outcome"


class AgentReward(enum.Enum):
    """What the single agent is rewarded for."""

    EXACT = "exact"
    GRADED = "graded"


class Backend(enum.Enum):
    """Which retriever answers the searches."""

    MINIATURE = "miniature"
    BM25 = "bm25"
    DENSE = "dense"
    HTTP = "http"
    NONE = "none"


class Alarm(enum.Enum):
    """What an alarm does."""

    WARN = "warn"
    STOP = "stop"


class Schedule(enum.Enum):
    """How the learning rate moves after its warm-up."""

    CONSTANT = "constant"
    COSINE = "cosine"
    LINEAR = "linear"


class Precision(enum.Enum):
    """A floating-point type."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class Remat(enum.Enum):
    """What the backward pass computes again: what lies between a layer's projections, or whole layers."""

    MINIMAL = "minimal"
    FULL = "full"


class Attention(enum.Enum):
    """What computes attention over packed rows."""

    XLA = "xla"
    SPLASH = "splash"
