"""Scores a team on questions: `python -m mopd_jax.evaluate --config=FILE.py --config.model.init=CHECKPOINT`.

Any config will do: its workflow, limits, retriever and test questions are used, its training is not.
Prints and writes avg@k, pass@k, all@k and the costs, by dataset and macro.
"""

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from absl import app, logging

from mopd_jax import flags
from mopd_jax.config import Chain, Config, Kind, phases
from mopd_jax.refusal import in_words

if TYPE_CHECKING:
    from mopd_jax.run.results import Result


def main(config: Config | Chain, hosts: flags.Hosts = flags.ALONE) -> None:
    """Evaluates every evaluation phase of a chain, or the one phase there is. Raises as `train.main`."""
    from mopd_jax.run import preflight

    prepare(config, hosts)
    named = phases(config)
    chosen = {name: c for name, c in named.items() if len(named) == 1 or c.train.kind is Kind.EVALUATE}
    preflight.check(chosen, Kind.EVALUATE)
    write_report([evaluate(name, c) for name, c in chosen.items()], config)


def prepare(config: Config | Chain, others: flags.Hosts) -> None:
    """Settings of the process: its place among others, quiet libraries, and compiled programs kept in the
    run's folder.

    Phases of a chain share programs, and a run that goes on finds its own.
    """
    import jax

    from mopd_jax.run import checkpoint, hosts

    hosts.initialize(*others)
    if hosts.is_first():
        checkpoint.check_writable(config.run.dir)
    hosts.check_shared(config.run.dir)
    logging.set_verbosity(logging.WARNING)  # Orbax tells its every step otherwise
    if not jax.config.jax_compilation_cache_dir:
        jax.config.update("jax_compilation_cache_dir", f"{config.run.dir}/compiled")


def evaluate(name: str, config: Config) -> "Result":
    """Asks every test question `eval.attempts` times; writes `results.jsonl` and `episodes.jsonl`.

    A finished evaluation is read back, not run again.

    Raises:
      ResumeError: the folder holds an evaluation with other settings.
    """
    from etils import epath

    from mopd_jax.run import checkpoint, hosts, parts
    from mopd_jax.run.evaluation import evaluate_team, load_team, take_cache_hits, write_episodes
    from mopd_jax.run.results import read_result, write_result

    folder = epath.Path(config.run.dir)
    questions = parts.load_test(config)
    meta = hosts.agreed(lambda: checkpoint.resume_meta(config, parts.evaluated_on(config)))
    finished = hosts.of_first(lambda: checkpoint.read_json(folder / "evaluated.json"))
    if finished and not checkpoint.check_resume(finished, meta, config):
        print(f"{folder} is evaluated already.")
        return read_result(folder / "results.jsonl")

    team = load_team(config)
    own = f", Searcher {config.model.searcher}" if config.model.searcher else ""
    system = name or f"{config.team.workflow.value} {config.model.init}{own}"
    result, episodes = evaluate_team(
        system, config, team.driver, parts.make_workflow(config.team, 1), questions, config.eval.attempts
    )
    for share in take_cache_hits(team.retriever).values():
        print(f"{system}: {share:.1%} of the queries had been asked before")
    if hosts.is_first():
        folder.mkdir(parents=True, exist_ok=True)
        write_episodes(episodes, folder / "episodes.jsonl")
        write_result(result, folder / "results.jsonl")
        checkpoint.write_json(folder / "evaluated.json", meta)
    return result


def write_report(results: "Sequence[Result]", config: Config | Chain) -> None:
    """Prints one table of all results with the intervals of their differences; `report.md` holds it and
    the settings: where they depart from the paper, and which of them are ours."""
    from etils import epath

    from mopd_jax.run import hosts
    from mopd_jax.run.decisions import describe_decisions
    from mopd_jax.run.report import format_report

    text = format_report(results)
    path = epath.Path(config.run.dir) / "report.md"
    if hosts.is_first():
        path.write_text(f"{text}\n\n{describe_decisions(config)}\n")
    print(f"{text}\n\nThis table and the settings behind it: {path}")


def _run(_) -> None:
    with in_words():
        main(_CONFIG.value, _HOSTS())


if __name__ == "__main__":
    _CONFIG, _HOSTS = flags.define_config(), flags.define_hosts()
    app.run(_run, flags_parser=functools.partial(flags.parse, kind=Kind.EVALUATE))
