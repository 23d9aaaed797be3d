"""The command line and the checks: what is accepted, what is refused, and in which words."""

import copy
import dataclasses
import pathlib
import subprocess
import sys
import textwrap

import pytest

from mopd_jax import checks, flags
from mopd_jax.checks import ConfigError, validate
from mopd_jax.config import Attention, Backend, Chain, Config, Kind, Objective, Schedule, Wording, Workflow

ROOT = pathlib.Path(__file__).resolve().parents[1]

EXPERIMENT = """
from mopd_jax.config import *

def get_config(steps="3"):
    config = Config()
    config.train.steps = int(steps)
    config.model.init = config.model.teacher = config.model.reference = "base"
    config.data.train = ("nq.jsonl",)
    config.retrieval.url = "http://host:8000/retrieve"
    return config
"""


def stage2() -> Config:
    """A sound config of the hierarchy."""
    config = Config()
    config.train.steps = 3
    config.model.init = config.model.teacher = config.model.reference = "base"
    config.data.train = ("nq.jsonl",)
    config.retrieval.url = "http://host:8000/retrieve"
    return config


def stage1() -> Config:
    """A sound config of the cascade."""
    config = stage2()
    config.team.workflow = Workflow.CASCADE
    config.learn.leader, config.learn.searcher = Objective.NONE, Objective.GRPO
    config.model.teacher = ""
    return config


def alone() -> Config:
    """A sound config of the single agent."""
    config = stage2()
    config.team.workflow, config.team.candidates = Workflow.SINGLE, 1
    config.learn.leader = config.learn.searcher = config.learn.answerer = Objective.NONE
    config.learn.agent = Objective.GRPO
    config.model.teacher = ""
    return config


def judged() -> Config:
    """A sound config of the hierarchy with a critic."""
    config = stage2()
    config.learn.searcher = Objective.CRITIC
    config.model.teacher, config.model.judge = "", "base"
    return config


def warmup() -> Config:
    """A sound supervised config."""
    config = Config()
    config.train.kind, config.train.steps = Kind.SUPERVISED, 3
    config.model.init = "base"
    config.data.demonstrations = ("talks.jsonl",)
    return config


def evaluation() -> Config:
    """A sound config that only evaluates."""
    config = Config()
    config.train.kind = Kind.EVALUATE
    config.model.init = "base"
    config.data.test = ("nq.jsonl",)
    config.retrieval.url = "http://host:8000/retrieve"
    return config


def set_field(config: Config, dotted: str, value) -> Config:
    *groups, name = dotted.split(".")
    group = config
    for g in groups:
        group = getattr(group, g)
    setattr(group, name, value)
    return config


@pytest.fixture
def experiment(tmp_path) -> str:
    path = tmp_path / "experiment.py"
    path.write_text(EXPERIMENT)
    return f"--config={path}"


# ---------------------------------------------------------------- the command line


def test_overrides_of_every_type_arrive(experiment):
    config = flags.load(
        [
            experiment,
            "--config.optim.lr=2e-5",
            "--config.train.steps",
            "7",
            "--noconfig.learn.leader_bonus",
            "--config.run.allow_changes",
            "--config.learn.penalty_scope=workflow",
            "--config.mesh.shape=(1,4,2)",
            "--config.learn.row_buckets=4096,8192",
            """--config.data.train=("a.jsonl","b,c.jsonl")""",
            "--config.data.validation=dev.jsonl",
            "--config.run.dir=gs://bucket/run",
        ]
    )
    assert config.optim.lr == 2e-5
    assert config.train.steps == 7
    assert (config.learn.leader_bonus, config.run.allow_changes) == (False, True)
    assert config.learn.penalty_scope.value == "workflow"
    assert config.mesh.shape == (1, 4, 2)
    assert config.learn.row_buckets == (4096, 8192)
    assert config.data.train == ("a.jsonl", "b,c.jsonl")
    assert config.data.validation == ("dev.jsonl",)
    assert config.run.dir == "gs://bucket/run"
    assert config.retrieval.k == 3


def test_the_last_of_two_overrides_of_a_field_counts(experiment):
    twice = ["--config.learn.row_buckets=(4096,8192)", "--config.optim.lr=1e-4"]
    config = flags.load([experiment, *twice, "--config.learn.row_buckets=(8192,)", "--config.optim.lr=1e-5"])
    assert config.learn.row_buckets == (8192,)
    assert config.optim.lr == 1e-5


def test_a_config_file_may_take_an_argument(experiment):
    assert flags.load([experiment + ":11"]).train.steps == 11


def test_overrides_reach_one_phase_of_a_chain(tmp_path):
    path = tmp_path / "chain.py"
    path.write_text("from tests.test_flags import chain as get_config\n")
    config = flags.load([f"--config={path}", "--config.stage2.optim.lr=0.5", "--config.run.seed=3"])
    assert (config.stage1.optim.lr, config.stage2.optim.lr, config.run.seed) == (1e-6, 0.5, 3)
    with pytest.raises(ConfigError, match=r"config\.stage2\.optim has no field 'lrr'"):
        flags.load([f"--config={path}", "--config.stage2.optim.lrr=0.5"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optim.lrr=1", "config.optim has no field 'lrr'. Did you mean lr? Its fields: lr, b1, b2, eps,"),
        ("optimm.lr=1", "config has no field 'optimm'. Did you mean optim? Its fields: run, train, tree,"),
        ("optim.lr.peak=1", "config.optim.lr is a single field, so --config.optim.lr.peak names nothing."),
        ("optim=1", "config.optim is a group of fields, set one of them: lr, b1,"),
        ("optim.lr=fast", "config.optim.lr got 'fast': expected a number."),
        ("optim.lr=nan", "config.optim.lr = nan: expected a number."),
        ("train.steps=1.5", "config.train.steps got '1.5': expected a whole number."),
        ("run.allow_changes=maybe", "config.run.allow_changes got 'maybe': expected true or false."),
        ("learn.searcher=sft", "config.learn.searcher got 'sft': expected one of grpo, opd, critic, none."),
        (
            "mesh.shape=(1,2)",
            "config.mesh.shape = (1, 2): expected a tuple of 3 whole numbers, spelled (1,1,1)",
        ),
        ("mesh.shape=(1,2,1.0)", "config.mesh.shape = (1, 2, 1.0): expected a tuple of 3 whole numbers"),
        ("data.train=nq,hotpotqa", """got 'nq,hotpotqa': expected texts, spelled '("a.jsonl","b.jsonl")'."""),
        ("data.train=", "config.data.train = ('',): has an empty file name; no files at all are spelled ()."),
        ("data.train=(a.jsonl,)", """got '(a.jsonl,)': expected texts, spelled '("a.jsonl","b.jsonl")'."""),
        ("data.train=[a.jsonl", "got '[a.jsonl': expected texts"),
        ("data.train=5", "config.data.train = (5,): expected texts"),
        (
            "learn.row_buckets=x",
            "config.learn.row_buckets = ('x',): expected whole numbers, spelled (1024,2048)",
        ),
    ],
)
def test_a_wrong_override_is_refused_in_words(experiment, override, message):
    """Kind 21: an unknown field among them."""
    with pytest.raises(ConfigError) as refusal:
        flags.load([experiment, f"--config.{override}"])
    assert message in str(refusal.value)


def test_all_wrong_overrides_are_named_at_once(experiment):
    with pytest.raises(ConfigError) as refusal:
        flags.load([experiment, "--config.optim.lrr=1", "--config.train.steps=x"])
    assert "'lrr'" in str(refusal.value)
    assert "config.train.steps got 'x'" in str(refusal.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "No experiment is named: pass --config=FILE.py"),
        (["--config=absent.py"], "Config file 'absent.py' is not found"),
        (["{experiment}", "more"], "Unexpected argument 'more'"),
        (["{experiment}", "--stepz=1"], "Unknown command line flag 'stepz'"),
        (["--config.train.steps=1", "{experiment}"], "before a value for --config"),
    ],
)
def test_a_wrong_command_line_is_refused_in_words(experiment, arguments, message):
    with pytest.raises(ConfigError) as refusal:
        flags.load([a.format(experiment=experiment) for a in arguments])
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return Config(learn=LearnConfig(betta=1.0))", "Did you mean beta? Its fields: leader, searcher,"),
        (
            "c = Config(); c.learn.betta = 1.0; return c",
            "config.learn has no field 'betta'. Did you mean beta?",
        ),
        ("return {}", "returned dict, expected Config or Chain"),
        ("return Config(train=3)", "config.train = 3: expected a TrainConfig"),
    ],
)
def test_a_wrong_config_file_is_refused_in_words(tmp_path, body, message):
    path = tmp_path / "wrong.py"
    path.write_text(f"from mopd_jax.config import *\n\ndef get_config():\n    {body}\n")
    with pytest.raises(ConfigError) as refusal:
        flags.load([f"--config={path}"])
    assert message in str(refusal.value)


def test_the_line_of_an_unknown_field_is_named(tmp_path):
    path = tmp_path / "wrong.py"
    path.write_text("from mopd_jax.config import *\n\ndef get_config():\n    return Config(lerning=1)\n")
    with pytest.raises(ConfigError, match=r"(?s)wrong\.py, line 4: .*'lerning'.*Did you mean learn\?"):
        flags.load([f"--config={path}"])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("    return Config(", "wrong.py, line 4: SyntaxError: '(' was never closed"),
        ("    return Confg()", "wrong.py, line 4: NameError: name 'Confg' is not defined"),
        ("    import mopd", "wrong.py, line 4: ModuleNotFoundError: No module named 'mopd'"),
        (
            "    return Config().lern",
            "wrong.py, line 4: AttributeError: 'Config' object has no attribute 'lern'",
        ),
        ("    return {}['steps']", "wrong.py, line 4: KeyError: 'steps'"),
    ],
)
def test_an_error_of_a_config_file_is_told_with_its_line(tmp_path, line, message):
    path = tmp_path / "wrong.py"
    path.write_text(f"from mopd_jax.config import *\n\ndef get_config():\n{line}\n")
    with pytest.raises(ConfigError) as refusal:
        flags.load([f"--config={path}"])
    told, shown = str(refusal.value).splitlines()
    assert message in told and shown == line


def test_annotations_as_text_are_refused(tmp_path):
    path = tmp_path / "wrong.py"
    path.write_text(
        textwrap.dedent("""
            from __future__ import annotations
            import dataclasses
            from mopd_jax.config import *

            @dataclasses.dataclass
            class Mini(Chain):
                only: Config = dataclasses.field(default_factory=Config)

            def get_config():
                return Mini()
        """)
    )
    with pytest.raises(ConfigError, match="remove `from __future__ import annotations`"):
        flags.load([f"--config={path}", "--config.only.train.steps=1"])


def run_program(*arguments: str) -> subprocess.CompletedProcess:
    program = """
        import sys
        from absl import app
        from mopd_jax import flags
        CONFIG = flags.define_config()
        def main(argv):
            print(CONFIG.value.train.steps, sorted({"jax", "orbax", "transformers"} & sys.modules.keys()))
        app.run(main, flags_parser=flags.parse)
    """
    command = [sys.executable, "-c", textwrap.dedent(program), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_a_program_starts_without_heavy_imports(experiment):
    done = run_program(experiment, "--config.train.steps=9")
    assert done.stdout == "9 []\n"
    assert done.returncode == 0


def test_a_refusal_is_exit_code_2_without_a_traceback(experiment):
    done = run_program(experiment, "--config.train.stepz=9")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("config.train has no field 'stepz'. Did you mean steps?")
    assert "Traceback" not in done.stderr


def test_help_names_the_config_flag():
    done = run_program("--help")
    assert "--config" in done.stdout
    assert "Traceback" not in done.stderr


# ---------------------------------------------------------------- the checks


@pytest.mark.parametrize("config", [stage1(), stage2(), alone(), judged(), warmup(), evaluation()])
def test_sound_configs_pass(config):
    before = copy.deepcopy(config)
    validate(config)
    assert config == before


def test_a_searcher_without_the_kl_penalty_needs_no_reference_for_it():
    config = judged()
    config.learn.leader = config.learn.answerer = Objective.NONE
    config.model.reference = ""
    with pytest.raises(ConfigError, match=r"model\.reference = '': learn.kl = 0.001 needs a reference"):
        validate(config)
    config.learn.searcher_kl = False
    validate(config)


def test_every_number_has_a_bound():
    bounded = {*checks.POSITIVE, *checks.NOT_NEGATIVE}
    by_hand = {
        "run.seed",
        "retrieval.max_aborted_share",
        "train.collapse_share",
        "learn.clip",
        "learn.sampler_weight_cap",
        "optim.b1",
        "optim.b2",
        "rollout.temperature",
        "rollout.top_p",
        "rollout.top_k",
    }

    def numbers(group, prefix=""):
        for name, annotation in checks.field_types(group).items():
            if dataclasses.is_dataclass(annotation):
                yield from numbers(getattr(group, name), f"{prefix}{name}.")
            elif annotation in (int, float):
                yield prefix + name

    assert set(numbers(Config())) == bounded | by_hand
    for name in by_hand:
        with pytest.raises(ConfigError, match=rf"config\.{name} = -1"):
            validate(set_field(stage2(), name, -1))


@pytest.mark.parametrize(
    ("make", "changes", "message"),
    [
        # numbers
        (stage2, {"retrieval.k": 0}, "config.retrieval.k = 0: must be above 0."),
        (stage2, {"optim.lr": -1e-3}, "config.optim.lr = -0.001: must not be negative."),
        (stage2, {"train.questions": True}, "config.train.questions = True: expected a whole number."),
        (stage2, {"learn.clip": 1.0}, "config.learn.clip = 1.0: must lie between 0 and 1."),
        (stage2, {"learn.sampler_weight_cap": 0.5}, "must be at least 1"),
        (stage2, {"run.dir": ""}, "config.run.dir = '': a run needs a folder."),
        (stage2, {"run.dir": "~/runs"}, "spell the folder in full"),
        (stage2, {"run.dir": "gs:/bucket/run"}, "did you mean two slashes"),
        # the importance ratio
        (stage2, {"rollout.temperature": 0.7}, "config.rollout.temperature = 0.7: must be 1:"),
        (stage2, {"rollout.top_p": 0.9}, "config.rollout.top_p = 0.9: must be 1:"),
        (stage1, {"rollout.top_k": 20}, "config.rollout.top_k = 20: must be 0:"),
        # sizes
        (stage2, {"model.architecture.num_kv_heads": 3}, "must divide num_heads = 4"),
        (stage2, {"model.architecture.head_dim": 25}, "must be even"),
        (stage2, {"mesh.shape": (1, 0, 1)}, "config.mesh.shape = (1, 0, 1): each axis"),
        (stage2, {"learn.row_buckets": (2048, 1024, 8192)}, "must be ascending lengths"),
        (stage2, {"learn.row_buckets": ()}, "must be ascending lengths"),
        (stage2, {"learn.row_buckets": (1024, 4096)}, "the last must hold a row of team.row_tokens = 8192"),
        (
            stage2,
            {"model.attention": Attention.SPLASH, "learn.row_buckets": (1000, 8192)},
            "config.learn.row_buckets = (1000, 8192): must be multiples of 128: model.attention = splash",
        ),
        (stage2, {"learn.micro_batch_tokens": 4096}, "must hold one row of the longest bucket, 8192"),
        (stage2, {"team.searcher_tokens": 8192}, "does not fit into a row of team.row_tokens = 8192"),
        (stage2, {"team.leader_turns": 1}, "must be at least 2"),
        (
            stage2,
            {"rollout.conversations": 1, "rollout.parked": 0},
            "config.rollout.parked = 0: must be at least 1: a Leader keeps its cache",
        ),
        (stage2, {"train.steps": 0}, "a phase with train.kind = reinforce takes at least 1 step"),
        (
            stage2,
            {"optim.schedule": Schedule.COSINE, "optim.warmup_steps": 3},
            "config.optim.warmup_steps = 3: leaves none of 3 updates to a cosine schedule.",
        ),
        # objectives
        (
            stage2,
            {"train.workflows": 1},
            "learn.leader = grpo compares workflows of one question: at least 2",
        ),
        (stage1, {"train.workflows": 1}, "learn.searcher = grpo compares workflows of one question"),
        (stage1, {"team.candidates": 1}, "learn.answerer = grpo compares candidates of one answer request"),
        (stage2, {"model.teacher": ""}, "learn.searcher = opd needs a teacher"),
        (stage1, {"model.teacher": "base"}, "no role is distilled"),
        (stage2, {"model.reference": ""}, "learn.kl = 0.001 needs a reference; 0 turns the penalty off"),
        (stage2, {"learn.beta": 0.0}, "config.learn.beta = 0.0: must be above 0"),
        (stage2, {"learn.leader": Objective.OPD}, "config.learn.leader = opd: must be grpo or none"),
        (stage2, {"learn.answerer": Objective.OPD}, "config.learn.answerer = opd: must be grpo or none"),
        (stage1, {"learn.leader": Objective.GRPO}, "must be none: team.workflow = cascade has no leader"),
        (
            stage1,
            {"learn.searcher": Objective.NONE, "learn.answerer": Objective.NONE},
            "no role has an objective",
        ),
        (stage2, {"learn.agent": Objective.GRPO}, "must be none: team.workflow = hierarchy has no agent"),
        (alone, {"learn.leader": Objective.GRPO}, "must be none: team.workflow = single has no leader"),
        (alone, {"learn.agent": Objective.NONE}, "config.learn.agent = none: no role has an objective"),
        (alone, {"learn.agent": Objective.OPD}, "only the Searcher is distilled or judged"),
        (alone, {"team.candidates": 5}, "config.team.candidates = 5: must be 1: the single agent"),
        (alone, {"train.workflows": 1}, "learn.agent = grpo compares workflows of one question"),
        (alone, {"model.reference": ""}, "learn.kl = 0.001 needs a reference"),
        (stage2, {"tree.rounds": 1}, "config.tree.rounds = 1: must be 0: only the single agent"),
        (judged, {"model.judge": ""}, "learn.searcher = critic needs a judge: name a model"),
        (
            judged,
            {"model.judge": "scripted"},
            "config.model.judge = 'scripted': knows only the embedded world",
        ),
        (judged, {"model.judge": "random"}, "a frozen model with random weights knows nothing"),
        (judged, {"train.workflows": 1}, "learn.searcher = critic compares workflows of one question"),
        (judged, {"model.reference": ""}, "learn.kl = 0.001 needs a reference"),
        (stage2, {"model.judge": "base"}, "no role learns from a judge (critic)"),
        # models
        (stage2, {"model.init": ""}, "config.model.init = '': name a Hugging Face folder"),
        (stage2, {"model.teacher": "random"}, "a frozen model with random weights knows nothing"),
        (warmup, {"model.teacher": "base"}, "does nothing in a supervised phase"),
        (evaluation, {"model.searcher": "random"}, "a frozen model with random weights knows nothing"),
        (warmup, {"model.searcher": "base"}, "config.model.searcher = 'base': does nothing in a supervised"),
        (stage2, {"model.searcher": "base"}, "config.model.searcher = 'base': plays in an evaluation only"),
        (
            evaluation,
            {"model.searcher": "base", "team.workflow": Workflow.SINGLE},
            "config.model.searcher = 'base': team.workflow = single has no Searcher",
        ),
        (stage2, {"model.init": "random"}, "but data.train names files of real text"),
        (stage2, {"model.init": "random"}, "config.team.wording = full: must be miniature"),
        # data and retrieval
        (
            stage2,
            {"data.train": ()},
            "config.data.train = (): train.kind = reinforce with eval.every = 0 reads it",
        ),
        (
            stage2,
            {"eval.every": 10},
            "config.data.validation = (): train.kind = reinforce with eval.every = 10",
        ),
        (warmup, {"data.demonstrations": ()}, "config.data.demonstrations = ()"),
        (evaluation, {"data.test": ()}, "config.data.test = ()"),
        (stage2, {"data.weights": (1, 1)}, "must have one number for each of the 1 entries of data.train"),
        (stage2, {"data.weights": (0,)}, "config.data.weights = (0,): must be whole numbers above 0"),
        (evaluation, {"data.manifest": "m", "eval.questions": 9}, "eval.questions = 9: must be 0"),
        (evaluation, {"data.manifest": "m", "data.test": ("miniature",)}, "the embedded world has none"),
        (stage2, {"data.train": ("miniature", "nq.jsonl")}, "the embedded world stands alone"),
        (stage2, {"data.train": ("miniature:facts",)}, "knows only miniature of the embedded world"),
        (warmup, {"data.demonstrations": ("miniature",)}, "knows only miniature:facts, miniature:noisy, "),
        (stage2, {"retrieval.backend": Backend.BM25}, "retrieval.backend = bm25 needs a corpus file"),
        (stage2, {"retrieval.backend": Backend.DENSE}, "retrieval.backend = dense needs a corpus file"),
        (
            stage2,
            {"retrieval.backend": Backend.DENSE, "retrieval.corpus": "c.jsonl"},
            "config.retrieval.index = '': retrieval.backend = dense needs the folder that tools/build_index",
        ),
        (stage2, {"retrieval.index": "index"}, "only retrieval.backend = bm25 or dense reads an index"),
        (stage2, {"retrieval.cache": -1}, "config.retrieval.cache = -1: must not be negative"),
        (stage2, {"retrieval.url": "host:8000"}, "needs an address, e.g. http://"),
        (stage2, {"retrieval.backend": Backend.MINIATURE}, "holds no documents for real questions"),
        (warmup, {"eval.every": 1, "data.validation": ("dev.jsonl",)}, "config.retrieval.url = ''"),
    ],
)
def test_a_senseless_config_is_refused(make, changes, message):
    """Kind 14: another temperature, top-p or top-k to train with among them."""
    config = make()
    for name, value in changes.items():
        set_field(config, name, value)
    with pytest.raises(ConfigError) as refusal:
        validate(config)
    assert message in str(refusal.value)


def test_all_problems_are_named_at_once():
    config = set_field(set_field(stage2(), "retrieval.k", 0), "model.teacher", "")
    with pytest.raises(ConfigError) as refusal:
        validate(config)
    assert str(refusal.value).splitlines() == [
        "The config is refused:",
        "- config.retrieval.k = 0: must be above 0.",
        "- config.model.teacher = '': learn.searcher = opd needs a teacher.",
    ]


def test_the_embedded_world_passes():
    config = stage2()
    config.model.init, config.team.wording = "random", Wording.MINIATURE
    config.data.train, config.retrieval.backend, config.retrieval.url = ("miniature",), Backend.MINIATURE, ""
    validate(config)


def test_a_training_config_can_be_checked_for_evaluation_only():
    config = stage2()
    config.data.train, config.data.test, config.model.teacher, config.train.steps = (), ("nq.jsonl",), "", 0
    config.model.searcher = "base"
    validate(config, Kind.EVALUATE)
    with pytest.raises(ConfigError, match=r"data\.train"):
        validate(config)


# ---------------------------------------------------------------- chains


@dataclasses.dataclass
class Mini(Chain):
    """A chain as configs write it."""

    warmup: Config = dataclasses.field(default_factory=warmup)
    stage1: Config = dataclasses.field(default_factory=stage1)
    stage2: Config = dataclasses.field(default_factory=stage2)
    exam: Config = dataclasses.field(default_factory=evaluation)


def chain() -> Mini:
    config = Mini()
    config.stage1.model.init = config.stage1.model.reference = config.stage2.model.init = "warmup"
    config.stage2.model.teacher = config.stage2.model.reference = "stage1"
    config.exam.model.init = "stage2"
    return config


def test_a_sound_chain_passes():
    validate(chain())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"stage1.model.init": "stage2"},
            "config.stage1.model.init = 'stage2': must name an earlier phase than stage1",
        ),
        (
            {"stage2.model.teacher": "stage2"},
            "config.stage2.model.teacher = 'stage2': must name an earlier phase",
        ),
        (
            {"stage1.train.kind": Kind.EVALUATE},
            "config.stage2.model.teacher = 'stage1': phase stage1 only evaluates",
        ),
        ({"exam.model.searcher": "exam"}, "config.exam.model.searcher = 'exam': must name an earlier phase"),
        ({"stage2.retrieval.k": 0}, "config.stage2.retrieval.k = 0: must be above 0."),
        ({"run.seed": -1}, "config.run.seed = -1: must lie between"),
        ({"run.profile_steps": (3, 2)}, "config.run.profile_steps = (3, 2): must be (first, last)"),
        ({"exam.data.test": ["nq.jsonl"]}, "config.exam.data.test = ['nq.jsonl']: expected texts"),
    ],
)
def test_a_senseless_chain_is_refused(changes, message):
    config = chain()
    for name, value in changes.items():
        set_field(config, name, value)
    with pytest.raises(ConfigError) as refusal:
        validate(config)
    assert message in str(refusal.value)


def test_phases_that_share_an_object_are_refused():
    config = chain()
    config.stage2.team = config.exam.team
    with pytest.raises(ConfigError, match=r"config\.exam\.team and config\.stage2\.team are one object"):
        validate(config)


def test_of_a_chain_only_the_evaluations_are_checked_for_evaluation():
    config = chain()
    config.stage1.retrieval.k = 0
    validate(config, Kind.EVALUATE)
    config.exam.retrieval.k = 0
    with pytest.raises(ConfigError, match=r"refused:\n- config\.exam\.retrieval\.k = 0: must be above 0\.$"):
        validate(config, Kind.EVALUATE)


def test_a_chain_without_a_phase_of_the_wanted_kind_is_refused():
    config = chain()
    config.exam.train.kind = Kind.SUPERVISED
    with pytest.raises(ConfigError, match=r"no phase with train\.kind = evaluate among warmup, stage1"):
        validate(config, Kind.EVALUATE)


def test_a_chain_without_phases_is_refused():
    with pytest.raises(ConfigError, match="names no phase"):
        validate(Chain())
