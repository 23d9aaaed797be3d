"""The command line: `--config=FILE.py --config.group.field=value`, refused in words where it is wrong.

`ml_collections` loads the file and applies the overrides. Around it stand the checks that it does
not make: unknown fields, the spelling of tuples, and everything of `checks.validate`. Importing this
costs a fraction of a second: no JAX.
"""

import ast
import dataclasses
import enum
import pathlib
import re
import runpy
import traceback
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import absl.flags
from ml_collections import config_flags

import mopd_jax.config
from mopd_jax.checks import ConfigError, describe_type, field_types, unknown_field, validate
from mopd_jax.config import Chain, Config, Kind
from mopd_jax.published import QWEN3
from mopd_jax.refusal import in_words

absl.flags.disclaim_key_flags()

_SCALARS = {
    int: absl.flags.IntegerParser(),
    float: absl.flags.FloatParser(),
    bool: absl.flags.BooleanParser(),
    str: absl.flags.ArgumentParser(),
}

_OVERRIDE = re.compile(r"--?(no)?config\.(?P<path>[^=]+)(=(?P<value>.*))?", re.DOTALL)


def define_config(
    flag_values: absl.flags.FlagValues = absl.flags.FLAGS, argv: Sequence[str] | None = None
) -> absl.flags.FlagHolder:
    """Defines `--config`; its value after parsing is the `Config` or `Chain`.

    Args:
      flag_values: registry of the flag.
      argv: the whole command line with the program's name, if it is not `sys.argv`.
    """
    return config_flags.DEFINE_config_file(
        "config",
        help_string="Experiment file, e.g. configs/mini.py; --config.group.field=value overrides a field.",
        flag_values=flag_values,
        lock_config=False,
        sys_argv=None if argv is None else list(argv),
    )


class Hosts(NamedTuple):
    """Which process of a run on several machines this one is."""

    coordinator: str
    processes: int
    process: int


ALONE = Hosts("", 1, 0)
"""A single process, or a TPU pod, whose hosts find each other."""


def define_hosts(flag_values: absl.flags.FlagValues = absl.flags.FLAGS) -> Callable[[], Hosts]:
    """Defines the flags of a run on several machines; the result gives their values after parsing."""
    coordinator = absl.flags.DEFINE_string(
        "coordinator",
        ALONE.coordinator,
        "HOST:PORT at which process 0 is reached by the others; not needed on a TPU pod.",
        flag_values=flag_values,
    )
    processes = absl.flags.DEFINE_integer(
        "processes", ALONE.processes, "Processes of the run, with --coordinator.", flag_values=flag_values
    )
    process = absl.flags.DEFINE_integer(
        "process", ALONE.process, "Which of them this is, from 0.", flag_values=flag_values
    )
    return lambda: Hosts(coordinator.value, processes.value, process.value)


def _check_hosts(hosts: Hosts) -> None:
    """Refuses three flags that do not describe one process of several."""
    coordinator, processes, process = hosts
    found = f"--coordinator={coordinator} --processes={processes} --process={process}"
    if hosts == ALONE:
        return
    if processes < 2 or not coordinator:
        raise ConfigError(
            f"Found {found}: a run of several processes needs all three, e.g. "
            "--coordinator=10.0.0.2:8476 --processes=2 --process=0; a TPU pod and a single process, none."
        )
    if not re.fullmatch(r".+:\d+", coordinator):
        raise ConfigError(f"Found {found}: the coordinator is spelled HOST:PORT, e.g. 10.0.0.2:8476.")
    if not 0 <= process < processes:
        raise ConfigError(f"Found {found}: --process lies between 0 and {processes - 1}.")


def define_sizes(flag_values: absl.flags.FlagValues = absl.flags.FLAGS) -> absl.flags.FlagHolder:
    """Defines `--sizes`, the model to plan with where `model.init` is no folder on this machine."""
    text = "Sizes of the model where model.init is no folder on this machine."
    return absl.flags.DEFINE_enum("sizes", "qwen3-4b", list(QWEN3), text, flag_values=flag_values)


def parse(
    argv: Sequence[str], kind: Kind | None = None, flag_values: absl.flags.FlagValues = absl.flags.FLAGS
) -> list[str]:
    """Parses and validates the command line: the `flags_parser` of `absl.app.run`.

    Args:
      argv: command line with the program's name.
      kind: what the config is to be used for (see `validate`).
      flag_values: registry in which `define_config` defined its flag.

    Returns:
      The program's name in a list: nothing else may be left over.

    Raises:
      SystemExit: with code 2 after printing what is wrong.
    """
    with in_words():
        return _parse(argv, kind, flag_values)


def load(arguments: Sequence[str], kind: Kind | None = None) -> Config | Chain:
    """Returns the validated config that these command-line arguments describe.

    Raises:
      ConfigError: what is wrong, in words.
    """
    argv = ["load", *arguments]
    flag_values = absl.flags.FlagValues()
    holder = define_config(flag_values, argv)
    _parse(argv, kind, flag_values)
    return holder.value


def _parse(argv: Sequence[str], kind: Kind | None, flag_values: absl.flags.FlagValues) -> list[str]:
    try:
        return _parse_flags(argv, kind, flag_values)
    except absl.flags.Error as error:
        raise ConfigError(str(error)) from error


def _parse_flags(argv: Sequence[str], kind: Kind | None, flag_values: absl.flags.FlagValues) -> list[str]:
    expanded = flag_values.read_flags_from_files(list(argv), force_gnu=False)
    file = _config_file(expanded)
    if file:
        _check_overrides(_read_config(file), expanded)
    rest = flag_values(_last_of_each(argv))  # --help prints and exits here
    if not file:
        raise ConfigError("No experiment is named: pass --config=FILE.py, e.g. --config=configs/mini.py.")
    if len(rest) > 1:
        raise ConfigError(f"Unexpected argument {rest[1]!r}: every argument is a flag, --name=value.")
    if "coordinator" in flag_values:
        _check_hosts(Hosts(*(flag_values[name].value for name in Hosts._fields)))
    validate(flag_values["config"].value, kind)
    return rest


def _config_file(argv: Sequence[str]) -> str:
    """The last value of --config, "" where there is none."""
    file = ""
    for argument, following in zip(argv, [*argv[1:], ""], strict=True):
        if match := re.fullmatch(r"--?config(=(?P<value>.*))?", argument):
            file = match["value"] if match[1] else following
    return file


def _read_config(flag: str) -> Config | Chain:
    """Loads the file as it stands, without overrides, to know which fields there are."""
    file, *argument = flag.split(":", 1)
    if not pathlib.Path(file).is_file():
        raise ConfigError(f"Config file {file!r} is not found from {pathlib.Path.cwd()}.")
    try:
        config = _run_config(file)(*argument)
    except ConfigError:
        raise
    except Exception as error:  # whatever the user's own code may raise
        raise ConfigError(_explain(file, error)) from error
    if not isinstance(config, Config | Chain):
        raise ConfigError(
            f"get_config() of {file} returned {type(config).__name__}, expected Config or Chain."
        )
    return config


def _run_config(file: str) -> Callable[..., Config | Chain]:
    module = runpy.run_path(file)
    if "get_config" not in module:
        raise ConfigError(f"{file} defines no get_config(), which returns the Config or Chain.")
    return module["get_config"]


def _explain(file: str, error: Exception) -> str:
    """Names and shows the line of the config file, and the fields where a dataclass got an unknown one."""
    places = [(f.lineno, f.line) for f in traceback.extract_tb(error.__traceback__) if f.filename == file]
    if isinstance(error, SyntaxError) and error.filename == file:
        places.append((error.lineno, error.text))
    number, line = places[-1] if places else ("?", None)
    message = f"{file}, line {number}: {type(error).__name__}: {error}."
    message += f"\n    {line.strip()}" if line else ""
    unknown = re.match(r"(\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'", str(error))
    group = getattr(mopd_jax.config, unknown[1], None) if unknown else None
    return f"{message}\n{unknown_field(group(), unknown[2], unknown[1])}" if group else message


def _check_overrides(config: Config | Chain, argv: Sequence[str]) -> None:
    problems = []
    for path, text, joined in _overrides(argv):
        problems += _override_problem(config, path, text, joined)
    if problems:
        raise ConfigError("\n".join(problems))


def _overrides(argv: Sequence[str]) -> Iterator[tuple[str, str, bool]]:
    """Yields field and text of every override, and whether the text is joined to it by "="."""
    for argument, following in zip(argv, [*argv[1:], ""], strict=True):
        if argument == "--":
            return
        if match := _OVERRIDE.fullmatch(argument):
            joined = match["value"] is not None
            yield match["path"], match["value"] if joined else following, joined


def _last_of_each(argv: Sequence[str]) -> list[str]:
    """Leaves out what a later override of the same field replaces: two tuples would be joined into one."""
    matches = [_OVERRIDE.fullmatch(argument) for argument in argv]
    last = {match["path"]: number for number, match in enumerate(matches) if match}
    return [
        argument
        for number, (argument, match) in enumerate(zip(argv, matches, strict=True))
        if not (match and match["value"] is not None) or last[match["path"]] == number
    ]


def _override_problem(config: Config | Chain, path: str, text: str, joined: bool) -> list[str]:
    """Walks to the field; returns at most one message."""
    group, where = config, "config"
    for name in path.split("."):
        if not dataclasses.is_dataclass(group):
            return [f"{where} is a single field, so --config.{path} names nothing."]
        if name not in field_types(group):
            return [unknown_field(group, name, where)]
        annotation = field_types(group)[name]
        group, where = getattr(group, name), f"{where}.{name}"
    if dataclasses.is_dataclass(annotation):
        return [f"{where} is a group of fields, set one of them: {', '.join(field_types(group))}."]
    switch = annotation is bool and not joined  # --config.run.allow_changes or --noconfig.run.allow_changes
    if not switch and not _is_spelled(text, annotation):
        return [f"{where} got {text!r}: expected {describe_type(annotation)}."]
    return []


def _is_spelled(text: str, annotation: type) -> bool:
    """Whether the text can be a value of this type; `a,b` would silently be one element of a tuple."""
    if typing.get_origin(annotation) is tuple:
        parse = ast.literal_eval if re.search(r"^\s*[(\[]|,", text) else str  # one element needs no quotes
    elif issubclass(annotation, enum.Enum):
        return text.lower() in (member.name.lower() for member in annotation)
    else:
        parse = _SCALARS[annotation].parse
    try:
        parse(text)
    except (ValueError, SyntaxError):
        return False
    return True
