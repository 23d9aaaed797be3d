"""From a config to the parts of a phase: data, retriever, models, engine, driver."""

import dataclasses
import hashlib
import json
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from etils import epath
from jax.sharding import Mesh

from mopd_jax.checks import samples, sources_read
from mopd_jax.config import (
    MINIATURE,
    RANDOM,
    SCRIPTED,
    Backend,
    Config,
    Kind,
    ModelConfig,
    Precision,
    TeamConfig,
    Wording,
)
from mopd_jax.data import miniature, questions
from mopd_jax.data.demonstrations import FileDemonstrations, read_conversations
from mopd_jax.data.manifest import pick
from mopd_jax.data.miniature_experts import Demonstrations
from mopd_jax.learn.score import Frozen
from mopd_jax.model import hf, hf_save, sharding
from mopd_jax.model.qwen3 import Qwen3, Qwen3Config
from mopd_jax.model.tokens import Tokens, check_compatible, files_fingerprint
from mopd_jax.objective_rules import ROLES
from mopd_jax.refusal import Refusal
from mopd_jax.retrieval import corpus
from mopd_jax.retrieval.bm25 import BM25Search
from mopd_jax.retrieval.cache import CachedSearch
from mopd_jax.retrieval.dense import DenseSearch
from mopd_jax.retrieval.http import HTTPSearch
from mopd_jax.retrieval.index import META
from mopd_jax.retrieval.miniature import MiniatureSearch
from mopd_jax.retrieval.search import NoSearch, Retriever
from mopd_jax.rollout.driver import Driver, WorkflowFactory, alive_workflows
from mopd_jax.rollout.engine import Engine
from mopd_jax.rollout.render import Renderer
from mopd_jax.run import hosts, weights
from mopd_jax.run.checkpoint import read_json
from mopd_jax.team.episode import Message, Question
from mopd_jax.team.roles import Prompts
from mopd_jax.team.workflows import WORKFLOWS

LANGUAGE_FILE = "team.json"


@dataclass(frozen=True)
class Opened:
    """A checkpoint whose sizes and tokenizer are known and whose weights are not loaded yet."""

    spec: str
    folder: epath.Path
    """Where tokenizer, template and generation files lie."""
    tokens: Tokens
    model: Qwen3


def dtype(precision: Precision) -> jnp.dtype:
    """Returns the JAX type of a config's precision."""
    return jnp.dtype(precision.value)


def open_questions(sources: Sequence[str], split: str, config: Config) -> list[Sequence[Question]]:
    """Returns the questions of each source, or, as the only one, those of the embedded world's `split`."""
    if tuple(sources) == (MINIATURE,):
        return [miniature.World(config.data.world_seed).questions(split)]
    return questions.open_sets(sources)


def load_questions(sources: Sequence[str], split: str, config: Config) -> list[Question]:
    """Returns the questions of all sources, one after the other."""
    return [question for found in open_questions(sources, split, config) for question in found]


def load_test(config: Config) -> list[Question]:
    """Returns the questions of the final evaluation: those of `data.manifest`, or a choice of
    `eval.questions`."""
    found = load_questions(config.data.test, "test", config)
    if config.data.manifest:
        return pick(found, config.data.manifest)
    return questions.select(found, config.eval.questions)


def question_source(config: Config) -> questions.QuestionSource:
    """Returns the draws of training questions: `batch(step, count)`."""
    sets = open_questions(config.data.train, "train", config)
    return questions.QuestionSource(sets, config.run.seed, config.data.weights)


def load_demonstrations(config: Config) -> FileDemonstrations | Demonstrations:
    """Returns the source of a supervised phase: `batch(step, count)` gives conversations."""
    paths = config.data.demonstrations
    if len(paths) == 1 and paths[0].startswith(f"{MINIATURE}:"):
        return Demonstrations(paths[0].removeprefix(f"{MINIATURE}:"), config.team, config.run.seed)
    return FileDemonstrations([c for path in paths for c in read_conversations(path)], config.run.seed)


def trained_on(config: Config) -> dict[str, str]:
    """Returns fingerprints of everything that a training phase reads, by name."""
    return _fingerprints(config, config.train.kind)


def evaluated_on(config: Config) -> dict[str, str]:
    """Returns fingerprints of everything that an evaluation reads, by name."""
    return _fingerprints(config, Kind.EVALUATE)


def _fingerprints(config: Config, kind: Kind) -> dict[str, str]:
    folders = {field: find_folder(spec) for field, spec in models_read(config, kind)}
    return (
        {path: file_fingerprint(path) for _, path in files_read(config, kind)}
        | {f"weights of {field}": hf.fingerprint(folder) for field, folder in folders.items()}
        | {f"tokenizer of {field}": files_fingerprint(folder) for field, folder in folders.items()}
    )


def file_fingerprint(source: str) -> str:
    """Returns a hash (hex) of a file or of a prepared question set (see `corpus.fingerprint`)."""
    digest = hashlib.sha256()
    for file in questions.files_of(source):
        digest.update(corpus.fingerprint(file).encode())
    return digest.hexdigest()[:16]


def files_read(config: Config, kind: Kind) -> Iterator[tuple[str, str]]:
    """Yields (field, source) for every file of questions, conversations or passages that a phase reads."""
    for field in sources_read(config, kind):
        paths = operator.attrgetter(field)(config)
        yield from ((field, path) for path in paths if path.partition(":")[0] != MINIATURE)
    if kind is Kind.EVALUATE and config.data.manifest:
        yield "data.manifest", config.data.manifest
    r = config.retrieval
    if samples(config, kind) and r.backend in (Backend.BM25, Backend.DENSE):
        yield "retrieval.corpus", r.corpus
        if r.index:
            yield "retrieval.index", f"{r.index}/{META}"


def models_read(config: Config, kind: Kind) -> Iterator[tuple[str, str]]:
    """Yields (field, spelling) for every model that a phase does not draw at random."""
    trained = ("init", "teacher", "reference", "judge")
    for name in ("init", "searcher") if kind is Kind.EVALUATE else trained:
        spec = getattr(config.model, name)
        if spec not in ("", RANDOM, SCRIPTED):
            yield f"model.{name}", spec


def make_retriever(config: Config) -> CachedSearch:
    """Returns the configured search backend, which remembers its results."""
    return CachedSearch(_make_backend(config), config.retrieval.cache)


def _make_backend(config: Config) -> Retriever:
    r = config.retrieval
    match r.backend:
        case Backend.MINIATURE:
            return MiniatureSearch(miniature.World(config.data.world_seed).passages)
        case Backend.BM25:
            return BM25Search(r.corpus, r.index)
        case Backend.DENSE:
            return DenseSearch(r.corpus, r.index)
        case Backend.HTTP:
            return HTTPSearch(r.url, timeout_s=r.timeout_s, retries=r.retries)
        case Backend.NONE:
            return NoSearch()


def make_prompts(team: TeamConfig) -> Prompts:
    """Returns the wording of the roles' prompts."""
    return miniature.PROMPTS if team.wording is Wording.MINIATURE else Prompts()


def make_workflow(team: TeamConfig, candidates: int) -> WorkflowFactory:
    """Returns what starts the configured workflow on a question, with so many answer candidates."""
    start, prompts = WORKFLOWS[team.workflow], make_prompts(team)
    return lambda question: start(question, team, prompts, candidates)


def _folder(spec: str, config: Config) -> epath.Path:
    """Returns the Hugging Face folder that a model's spelling stands for."""
    if spec == RANDOM:
        folder = epath.Path(config.run.dir) / "tokenizer"
        if hosts.is_first() and not (folder / "generation_config.json").exists():
            folder.mkdir(parents=True, exist_ok=True)
            miniature.save_tokenizer(folder)
        hosts.wait()
        return folder
    return find_folder(spec)


def find_folder(spec: str) -> epath.Path:
    """Returns the Hugging Face folder of a model that lies on a disk or in a bucket.

    Raises:
      Refusal: it is neither such a folder nor a finished run.
    """
    folder = epath.Path(spec)
    if (folder / "config.json").exists():
        return folder
    if not (folder / "export" / "config.json").exists():
        raise Refusal(
            f"{spec!r} is neither a Hugging Face folder (no config.json) nor a run with weights "
            "(no export/config.json)."
        )
    if not (folder / "finished.json").exists():
        raise Refusal(
            f"The run {spec!r} is not finished. Wait for it, or name {spec}/export, its best weights so far."
        )
    return folder / "export"


def open_model(spec: str, config: Config) -> Opened:
    """Reads a checkpoint's sizes and tokenizer.

    Args:
      spec: as `model.init`: a Hugging Face folder, a run folder, or "random".
      config: gives precision, rematerialisation and attention and, for "random", sizes.

    Raises:
      Refusal: what is missing or does not fit, named.
    """
    folder = _folder(spec, config)
    tokens = Tokens.from_folder(folder)
    sizes = random_sizes(config, tokens.vocab_size) if spec == RANDOM else hf.read_config(folder)
    return Opened(spec, folder, tokens, make_model(sizes, config.model))


def make_model(sizes: Qwen3Config, model: ModelConfig) -> Qwen3:
    """Returns the network of these sizes that computes as the config says."""
    network = dataclasses.replace(
        sizes,
        dtype=dtype(model.compute),
        remat=model.remat,
        attention=model.attention,
    )
    return Qwen3(network)


def load_params(opened: Opened, mesh: Mesh, stored: Precision, seed: int) -> Any:
    """Returns the weights laid out on the mesh, in the type `stored`; random ones come from `seed`."""
    if opened.spec == RANDOM:
        return sharding.init_params(opened.model, jax.random.key(seed), mesh, dtype(stored))
    if weights.has_orbax(opened.folder):
        step = weights.find_step(opened.folder)
        return weights.load(opened.folder, step, opened.model, mesh, dtype(stored))
    layout = sharding.param_shardings(opened.model, mesh)
    return hf.load_params(opened.folder, opened.model.config, layout, dtype(stored))


def frozen_specs(config: Config) -> list[str]:
    """Returns the spellings of teacher and reference, each once."""
    return sorted({config.model.teacher, config.model.reference} - {""})


def judge_specs(config: Config) -> list[str]:
    """Returns the judge's spelling if it is a model, else nothing."""
    return [spec for spec in (config.model.judge,) if spec not in ("", SCRIPTED)]


def load_frozen(config: Config, student: Opened, mesh: Mesh) -> dict[str, Frozen]:
    """Returns teacher and reference by their spelling in the config; one that is both is loaded once.

    Raises:
      Refusal: see `open_beside`.
    """
    opened = {spec: open_beside(student, spec, config, "teacher") for spec in frozen_specs(config)}
    precision, seed = config.model.frozen, config.run.seed
    return {spec: Frozen(o.model, load_params(o, mesh, precision, seed)) for spec, o in opened.items()}


def open_beside(student: Opened, spec: str, config: Config, name: str) -> Opened:
    """Returns a model that scores the student's ids or plays in its team; `name` says which, in refusals.

    Raises:
      Refusal: its tokenizer, template, stop tokens, vocabulary or team differ from the student's.
    """
    opened = open_model(spec, config)
    sizes = student.model.config.vocab_size, opened.model.config.vocab_size
    check_compatible(student.tokens, opened.tokens, *sizes, name)
    check_language(opened.folder, config.team)
    return opened


def export(folder: epath.PathLike, student: Opened, params: Any, team: TeamConfig) -> None:
    """Writes weights as a Hugging Face folder, with the student's tokenizer and the team's language.

    Every process calls it, the first one writes.
    """
    hf_save.save(folder, student.model.config, params, student.folder, notes(team))


def notes(team: TeamConfig) -> dict[str, str]:
    """Returns the files, by name, that tell another run what language exported weights were trained in."""
    return {LANGUAGE_FILE: json.dumps(language(team), indent=2) + "\n"}


def language(team: TeamConfig) -> dict[str, str]:
    """Returns the wordings that a distilled Searcher and its teacher must share."""
    prompts = make_prompts(team)
    names = ("searcher", "task", "ask_summary", "documents", "document")
    return {name: getattr(prompts, name) for name in names}


def check_language(folder: epath.Path, team: TeamConfig) -> None:
    """Refuses a teacher or Searcher that was trained with another Searcher prompt or tool format.

    A folder that no run of ours wrote says nothing about it, and passes.

    Raises:
      Refusal: names the wording, both texts.
    """
    for name, theirs in (read_json(folder / LANGUAGE_FILE) or {}).items():
        ours = language(team).get(name)
        if ours != theirs:
            raise Refusal(
                f"{folder} was trained with another wording of {name!r}: {theirs!r}, here it is {ours!r}. "
                "It must know the Searcher's prompt and tool format: set team.wording as it was there."
            )


def random_sizes(config: Config, vocab_size: int) -> Qwen3Config:
    """Returns the sizes of a model that starts from random weights."""
    sizes = vars(config.model.architecture)
    length = config.team.row_tokens
    return Qwen3Config(**sizes, vocab_size=vocab_size, max_position_embeddings=length)


@dataclass(frozen=True)
class Team:
    """What plays the roles: an engine on devices of this process, or two, and the driver over them."""

    engine: Engine
    retriever: CachedSearch
    driver: Driver
    mesh: Mesh
    """Of the engines."""
    searcher: Engine | None = None
    """Plays the Searcher; None: `engine` does."""


def make_team(config: Config, policy: Opened, candidates: int, searcher: Opened | None = None) -> Team:
    """Returns the team without weights: `load` of its engines gives it some.

    Args:
      config: sizes of lanes and rows, retriever, seed.
      policy: its network, computed in `model.rollout` precision, and its tokens.
      candidates: answers per request in training (1 for evaluation alone).
      searcher: plays the Searcher with weights of its own; its tokens are the policy's.

    Raises:
      Refusal: rows are longer than a model's positions, or too short for a role's first turn.
    """
    for opened in (policy, searcher) if searcher else (policy,):
        check_positions(config.team, opened)
    _check_openings(config, make_renderer(config, policy.tokens))
    mesh = sharding.local_mesh(config.mesh.rollout_tensor)
    eos_ids = policy.tokens.eos_ids
    engine = make_engine(config, policy.model, eos_ids, candidates, mesh)
    own = make_engine(config, searcher.model, eos_ids, 1, mesh) if searcher else None
    retriever = make_retriever(config)
    return Team(engine, retriever, make_driver(config, engine, policy.tokens, retriever, own), mesh, own)


def check_positions(team: TeamConfig, opened: Opened) -> None:
    """Refuses a model that samples and has fewer positions than a row may be long."""
    positions = opened.model.config.max_position_embeddings
    if team.row_tokens > positions:
        raise Refusal(
            f"team.row_tokens = {team.row_tokens}, the model takes {positions} (max_position_embeddings): "
            "lower team.row_tokens."
        )


def make_driver(
    config: Config, engine: Engine, tokens: Tokens, retriever: Retriever, searcher: Engine | None = None
) -> Driver:
    """Returns what runs workflows over engines of `make_engine`, see `Driver`, and one retriever."""
    return Driver(
        engine,
        retriever,
        make_renderer(config, tokens),
        tokens,
        searcher=searcher,
        k=config.retrieval.k,
        row_tokens=config.team.row_tokens,
        alive=alive_workflows(config.rollout, config.team.workflow, searcher is not None),
        seed=config.run.seed,
    )


def _check_openings(config: Config, renderer: Renderer) -> None:
    """Refuses rows in which a role could never speak: its first prompt leaves no room, even without data."""
    prompts, team = make_prompts(config.team), config.team
    openings = {
        "leader": (prompts.leader, prompts.to_asked(""), "leader_tokens"),
        "searcher": (prompts.searcher, prompts.to_searcher(""), "searcher_tokens"),
        "answerer": (prompts.answerer, prompts.to_answerer("", ()), "answerer_tokens"),
        "agent": (prompts.agent, prompts.to_asked(""), "searcher_tokens"),
    }
    for role in ROLES[team.workflow]:
        system, user, limit = openings[role]
        prompt = len(renderer.open([Message("system", system), Message("user", user)]))
        turn = getattr(team, limit)
        if prompt + turn > team.row_tokens:
            raise Refusal(
                f"team.row_tokens = {team.row_tokens}: the {role}'s first prompt alone takes {prompt} and "
                f"team.{limit} = {turn} more, so it could never speak. Raise team.row_tokens."
            )


def make_engine(
    config: Config, model: Qwen3, eos_ids: tuple[int, ...], candidates: int, mesh: Mesh
) -> Engine:
    """Returns an engine without weights that samples from `model` in `model.rollout` precision."""
    sampled = dataclasses.replace(model.config, dtype=dtype(config.model.rollout))
    return Engine(Qwen3(sampled), eos_ids, config.team, candidates, config.rollout, mesh)


def make_renderer(config: Config, tokens: Tokens) -> Renderer:
    """Returns what turns the environment's messages into ids."""
    return Renderer(tokens, make_prompts(config.team), config.team.document_tokens)
