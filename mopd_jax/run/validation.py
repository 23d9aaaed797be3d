"""The evaluation during training: it measures the team and keeps the best weights."""

from typing import Any

from etils import epath

from mopd_jax.config import Config
from mopd_jax.data.questions import select
from mopd_jax.run import hosts, parts
from mopd_jax.run.checkpoint import read_json, write_json
from mopd_jax.run.evaluation import evaluate_team
from mopd_jax.run.scores import MACRO, summarise

SHOWN = {"avg": "em", "searches": "searches", "no_search": "no_search", "recall": "recall"}


class Validation:
    """Asks the validation questions and exports the weights that answer them best.

    `best.json` says which step that was; `export/` holds its weights as a Hugging Face folder.
    """

    def __init__(self, config: Config, student: parts.Opened, team: parts.Team):
        every = parts.load_questions(config.data.validation, "validation", config)
        self._questions = select(every, config.eval.validation_questions)
        self._config, self._student, self._team = config, student, team
        self._workflow = parts.make_workflow(config.team, candidates=1)
        self._folder = epath.Path(config.run.dir)

    def run(self, step: int, params: Any) -> dict[str, float]:
        """Returns `eval/…` metrics, macro over datasets, of the weights after `step` steps."""
        self._team.engine.load(params)
        attempts = self._config.eval.validation_attempts
        result, _ = evaluate_team(
            "validation", self._config, self._team.driver, self._workflow, self._questions, attempts
        )
        self._team.engine.unload()
        self._team.engine.take_usage()  # a training step reports its own only
        self._team.retriever.take_counts()
        macro = summarise(result)[MACRO]
        self._keep_best(step, macro["avg"], params)
        return {f"eval/{name}": macro[metric] for metric, name in SHOWN.items()}

    def _keep_best(self, step: int, score: float, params: Any) -> None:
        best = hosts.of_first(lambda: read_json(self._folder / "best.json"))
        if best and (best["step"] == step or best["em"] >= score):
            return
        parts.export(self._folder / "export", self._student, params, self._config.team)
        if hosts.is_first():
            write_json(self._folder / "best.json", {"step": step, "em": score})
        print(f"Step {step} is the best so far on the validation questions: EM {score:.3f}.")
