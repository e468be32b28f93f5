"""The command line itself: help, versions, errors in one line, options from YAML."""

from __future__ import annotations

import gc
import inspect
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bunkbed
from bunkbed import _native
from bunkbed.cli import main
from bunkbed.cli.commands import train as train_command
from bunkbed.cli.shared.train_fit import Session
from bunkbed.cli.shared.train_options import OptimizerName, Ranking, RecipeName
from bunkbed.train.settings.auto import AUTO, RECIPES
from bunkbed.train.settings.config import TrainConfig
from bunkbed.train.settings.option import option_of

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What ``bunkbed train`` would start, without starting it."""
    calls: list[dict[str, Any]] = []

    def start(_: Session, file: Path, reading: Any, features: Any, out: Path, config: TrainConfig, given: Any) -> None:
        calls.append({"file": file, "out": out, "config": config, **given, **reading, **features})

    monkeypatch.setattr(train_command, "_start", start)
    for name in ("fit_again", "conclude"):
        monkeypatch.setattr(train_command, name, lambda *_: 0)
    return calls


def test_version(cli: Run) -> None:
    assert cli("--version") == (0, f"bunkbed {bunkbed.__version__}\n", "")


def test_verbose_version_says_what_a_report_of_a_defect_needs(cli: Run) -> None:
    code, out, err = cli("--version", "--verbose")
    assert (code, err) == (0, "")
    first, *lines = out.splitlines()
    assert first == f"bunkbed {bunkbed.__version__}"
    facts = dict(line.split(maxsplit=1) for line in lines)
    assert facts["kernels"].startswith(_native.simd())
    assert facts["threads"] == str(bunkbed.get_num_threads())
    assert facts["tables"] == "format 1"
    assert facts["numpy"] == np.__version__
    assert {"built", "reads", "Python", "system"} <= facts.keys()
    assert cli("--verbose")[0] == 2
    assert "goes with --version" in cli("--verbose", "train")[2]


def test_help_lists_every_command(cli: Run) -> None:
    code, out, _ = cli("--help")
    assert code == 0
    commands = "demo train eval recommend compare info report check import export snapshots"
    for name in commands.split():
        assert name in out
        code, help_text, _ = cli(name, "--help")
        assert code == 0 and f"bunkbed {name}" in help_text
    assert cli() == (0, out, "")


def test_help_loads_nothing_heavy() -> None:
    program = (
        "import sys\n"
        "from bunkbed.cli import main\n"
        "try:\n    main(['train', '--help'])\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'pyarrow', 'matplotlib', 'yaml', 'keras', 'tensorflow'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, timeout=60)


def test_a_call_from_a_program_leaves_its_collector_alone(cli: Run) -> None:
    before = gc.get_threshold(), gc.get_freeze_count()
    assert cli("--version")[0] == 0
    assert (gc.get_threshold(), gc.get_freeze_count()) == before


def test_python_dash_m() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "bunkbed", "--version"], check=True, capture_output=True, text=True, timeout=60
    )
    assert result.stdout == f"bunkbed {bunkbed.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["trian"], 2, "no such command 'trian'"),
        (["train"], 2, "give a FILE of interactions, or --resume RUN"),
        (["train", "a.csv", "--resume", "runs/a"], 2, "give either FILE or --resume RUN, not both"),
        (["train", "a.csv", "--dmi", "3"], 2, "no such option: --dmi"),
        (["train", "a.csv", "--dim", "many"], 2, "'--dim'"),
        (["train", "a.csv", "--dim", "0"], 2, "option dim must be at least 1, got 0"),
        (["train", "a.csv", "--ram", "lots"], 2, "option ram: cannot read the size 'lots'"),
        (["train", "a.csv", "--model", "ncf"], 2, "'--model'"),
        (["train", "a.csv"], 1, "a.csv: no such file or directory"),
        (["train", "--resume", "runs/a"], 1, "runs/a: no such run"),
        (["train", "a.csv", "--config", "a.yaml"], 1, "a.yaml: no such file or directory"),
        (["recommend", "runs/a", "--user", "3"], 1, "runs/a: no such run"),
        (["recommend", "runs/a"], 2, "give one of --user ID, --users FILE, --history FILE and --all"),
        (["eval", "runs/a"], 1, "runs/a: no such run"),
        (["info", "tables/a"], 1, "tables/a: no such table or run"),
        (["check", "tables/a"], 1, "tables/a: no such table or run"),
        (["snapshots", "tables/a"], 1, "tables/a: no such table or run"),
        (["import", "tables/a", "a.npy"], 2, "there is no table at tables/a; give --dim to create it"),
    ],
)
def test_errors_are_one_line(arguments: list[str], code: int, message: str, cli: Run) -> None:
    found, out, err = cli(*arguments)
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err
    assert out == ""
    assert found == code


def test_a_missing_file_names_its_neighbour(cli: Run, tmp_path: Path) -> None:
    (tmp_path / "ratings.csv").write_text("1,2\n")
    assert cli("train", "rating.csv")[2] == "error: rating.csv: no such file or directory; did you mean ratings.csv\n"


def test_debug_shows_the_traceback(cli: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments in (["--debug", "train", "a.csv"], ["train", "a.csv", "--debug"]):
        with pytest.raises(FileNotFoundError):
            main(arguments)
    monkeypatch.setenv("BUNKBED_DEBUG", "1")
    with pytest.raises(FileNotFoundError):
        main(["train", "a.csv"])


def test_missing_packages_say_how_to_install(cli: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = train_command.need.__globals__["importlib"].util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: None if name == "torch" else real(name, *rest))
    (tmp_path / "a.csv").write_text("1,2\n")
    for arguments, command in ((["train", "a.csv"], "train"), (["demo"], "demo")):
        code, _, err = cli(*arguments)
        assert code == 1
        assert err == f'error: bunkbed {command} needs torch; install with: pip install "bunkbed[train]"\n'


def test_every_field_is_an_option() -> None:
    known = inspect.signature(train_command.train).parameters
    for field in fields(TrainConfig):
        assert known[field.name].default == (None if field.name in AUTO else field.default)


def test_shared_choices_are_those_of_the_configuration() -> None:
    choices = {field.name: option_of(field).choices for field in fields(TrainConfig)}
    assert tuple(OptimizerName) == choices["optimizer"]
    assert tuple(Ranking) == choices["ranking"]
    assert tuple(RecipeName) == tuple(RECIPES)


def test_defaults_are_those_of_the_configuration(cli: Run, started: list[dict[str, Any]]) -> None:
    assert cli("train", "a.csv")[0] == 0
    assert TrainConfig.from_dict(started[0]["given"]) == started[0]["config"] == TrainConfig()
    assert started[0]["recipe"] == "default" and not set(AUTO) & set(started[0]["given"])
    assert started[0]["header"] == "auto" and started[0]["layout"] == "auto"
    assert (started[0]["item_features"], started[0]["feature_kinds"]) == (None, {})


def test_options_from_yaml_and_flags_win(cli: Run, started: list[dict[str, Any]], tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(
        "file: a.csv\ndim: 32\nlr: 1e-2\nbatch-size: 100\nmodel: gmf\nloss: bce\nheader: false\nbias: true\n"
        "ram: 2GiB\nvalid: 0.1\nuser_col: who\nout: runs/x\n"
    )
    code, _, err = cli("train", "--config", "a.yaml", "--dim", "8", "--header", "--seed", "7")
    assert (code, err) == (0, "")
    call = started[0]
    assert (call["file"], call["out"], call["user_col"], call["header"]) == (
        Path("a.csv"),
        Path("runs/x"),
        "who",
        True,
    )
    assert {"dim", "lr", "batch_size", "loss"} == set(AUTO) & set(call["given"])
    assert TrainConfig.from_dict(call["given"]) == TrainConfig(
        dim=8, lr=1e-2, batch_size=100, model="gmf", loss="bce", bias=True, ram="2GiB", valid="0.1", seed=7
    )
    cli("train", "b.csv", "--config", "a.yaml")
    assert started[1]["file"] == Path("b.csv")
    assert started[1]["header"] is False


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dmi: 3\n", "error: a.yaml: unknown option 'dmi'; did you mean 'dim'\n"),
        ("batch_sise: 3\n", "error: a.yaml: unknown option 'batch_sise'; did you mean 'batch_size'\n"),
        ("xyzzy: 3\n", "error: a.yaml: unknown option 'xyzzy'; the options are "),
        ("- 3\n", "error: a.yaml: expected options as 'key: value' lines, found list\n"),
        ("dim: {a: 3}\n", "error: a.yaml: dim must be a plain value, found a mapping\n"),
        ("dim: 3\nlr: [\n", "error: a.yaml line 3: is not YAML ("),
        ("dim: many\n", "error: invalid value for '--dim'"),
    ],
)
def test_bad_yaml(text: str, message: str, cli: Run, started: list[dict[str, Any]], tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(text)
    code, _, err = cli("train", "a.csv", "--config", "a.yaml")
    assert code == 2
    assert err.startswith(message)
    assert started == []


def test_an_empty_yaml_changes_nothing(cli: Run, started: list[dict[str, Any]], tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("# nothing\n")
    assert cli("train", "a.csv", "--config", "a.yaml")[0] == 0
    assert TrainConfig.from_dict(started[0]["given"]) == TrainConfig()
