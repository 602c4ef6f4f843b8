"""What the command line says and returns."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

import rlsprune
from rlsprune.app.cli import main as cli
from rlsprune.app.cli import options
from rlsprune.app.cli.app import app
from rlsprune.app.cli.main import main
from rlsprune.app.config.experiment import make_config
from rlsprune.app.config.fit import make_fit_config
from rlsprune.app.run.folder import RunFolder

COMMANDS = [
    [],
    ["run"],
    ["fit"],
    ["report"],
    ["check"],
    ["compare"],
    ["sweep"],
    ["pareto"],
    ["data"],
    ["data", "get"],
    ["data", "list"],
]


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


def test_help_of_every_command_comes_without_torch() -> None:
    calls = "; ".join(f"assert main({[*command, '--help']!r}) == 0" for command in COMMANDS)
    result = python(
        f"import sys; from rlsprune.app.cli.main import main; {calls}; print('TORCH', 'torch' in sys.modules)"
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "TORCH False"


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_the_extra_it_says_what_to_install(missing: str) -> None:
    code = (
        f"import sys; sys.modules[{missing!r}] = None; from rlsprune.app.cli.main import main; sys.exit(main(['run']))"
    )
    result = python(code)
    assert result.returncode == 2
    assert 'pip install "rlsprune[cli]"' in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("missing", ["typer", "rich"])
@pytest.mark.parametrize(("arguments", "said"), [(["--version"], rlsprune.__version__), (["--help"], "smaller")])
def test_help_and_version_answer_without_the_extra(missing: str, arguments: list[str], said: str) -> None:
    result = python(
        f"import sys; sys.modules[{missing!r}] = None; from rlsprune.app.cli.main import main; "
        f"sys.exit(main({arguments!r}))"
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert said in result.stdout
    assert ('pip install "rlsprune[cli]"' in result.stdout) == (arguments == ["--help"])


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == rlsprune.__version__


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["run", "imagenet"], 2, "digits-fnn, mnist-fnn"),
        (["run", "--method", "magic"], 2, "choose one of rls"),
        (["run", "--device", "abacus"], 2, "--device abacus"),
        (["run", "--epochs", "many"], 2, "--epochs"),
        (["nonsense"], 2, "nonsense"),
        (["compare", "digits-fnn", "--methods", "rls,magic"], 2, "--methods magic"),
        (["compare", "digits-fnn", "--seeds", "a"], 2, "--seeds a"),
        (["data", "get", "imagenet"], 3, "no such data set"),
    ],
)
def test_mistakes_are_told_in_a_line_with_their_code(
    arguments: list[str],
    code: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == code
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error
    assert not list(tmp_path.rglob("config.json"))


def test_missing_data_set_is_an_error_that_says_how_to_get_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert main(["run", "mnist-fnn", "--data-dir", str(tmp_path), "--out", str(out)]) == 3
    assert "rlsprune data get mnist --data-dir" in capsys.readouterr().err
    assert not out.exists()


def test_debug_shows_the_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "mnist-fnn", "--data-dir", str(tmp_path), "--debug", "--out", str(tmp_path / "run")]) == 3
    assert "Traceback" in capsys.readouterr().err


def test_a_folder_that_holds_a_run_is_not_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert main(["run", "--out", str(tmp_path)]) == 2
    assert f"--resume {tmp_path}" in capsys.readouterr().err
    assert (tmp_path / "config.json").read_text() == "{}"


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_has_examples(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--help"]) == 0
    assert re.search(rf"Examples?: `rlsprune {' '.join(command)}", capsys.readouterr().out)


def test_help_and_page_tell_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    page = (Path(__file__).parents[3] / "docs" / "command-line.md").read_text(encoding="utf-8")
    for code in (0, cli.FAILED, cli.USAGE, cli.NO_DATA, cli.DIVERGED, cli.INTERRUPTED):
        assert re.search(rf"[:·] {code} \w", told), code
        assert re.search(rf"^\| {code} \|", page, re.MULTILINE), code


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("re", {"report"}),
        ("run digits", {"digits-fnn"}),
        ("run --method rls", {"rls", "rls-paper"}),
        ("run --log", {"--logger"}),
        ("compare mnist-fnn --methods rls,l1", {"rls,l1-norm"}),
    ],
)
def test_the_shell_completes(words: str, offered: set[str]) -> None:
    count = str(len(words.split()))
    completing = {"_RLSPRUNE_COMPLETE": "complete_bash", "COMP_WORDS": f"rlsprune {words}", "COMP_CWORD": count}
    result = subprocess.run(
        [sys.executable, "-m", "rlsprune"], env=os.environ | completing, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    assert set(result.stdout.split()) == offered


NAMED = {
    "run": "experiment method optimizer preset gate loss device on_fault",
    "fit": "optimizer gate loss augment device on_fault",
    "compare": "experiment methods preset gate loss device on_fault",
    "sweep": "experiment method preset gate loss device on_fault",
    "pareto": "device",
    "plan": "model device",
    "bench": "model device",
    "data get": "name",
}


@pytest.mark.parametrize("words", NAMED)
def test_every_option_that_takes_a_name_is_completed(words: str) -> None:
    command: Any = typer.main.get_command(app)
    for word in words.split():
        command = command.commands[word]
    parameters = {parameter.name: parameter for parameter in command.params}
    for name in NAMED[words].split():
        assert parameters[name].shell_complete(command.context_class(command), ""), name


def test_flags_are_shown_without_a_type(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ([], ["run"], ["fit"], ["compare"], ["data", "get"]):
        assert main([*command, "--help"]) == 0
        told = capsys.readouterr().out
        assert "--help" in told
        assert "bool" not in told.lower()


@pytest.mark.parametrize(
    ("load", "jobs", "threads"), [(0.2, 1, 8), (2.6, 1, 5), (30.0, 1, 1), (0.0, 4, 2), (30.0, 4, 1)]
)
def test_threads_are_the_cores_that_are_free(
    load: float, jobs: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0), raising=False)
    assert options.resolve("cpu", None, None, False, jobs)["threads"] == threads
    assert options.resolve("cpu", 6, None, False, jobs)["threads"] == 6


def test_no_threads_at_all_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--threads", "0", "--out", str(tmp_path / "run")]) == 2
    assert "'--threads'" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_each_command_resumes_its_own_runs_and_names_the_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    RunFolder(tmp_path).write_json("config", make_config("digits-fnn").to_dict())
    assert main(["fit", "--resume", str(tmp_path)]) == 2
    assert f"resume it with `rlsprune run --resume {tmp_path}`" in capsys.readouterr().err
    RunFolder(tmp_path).write_json("config", make_fit_config("nets:mlp", tmp_path).to_dict())
    assert main(["run", "--resume", str(tmp_path)]) == 2
    assert f"resume it with `rlsprune fit --resume {tmp_path}`" in capsys.readouterr().err


def test_data_list_tells_what_is_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "list", "--data-dir", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("digits") and "comes with" in line for line in lines)
    assert any(line.startswith("mnist") and "rlsprune data get mnist" in line for line in lines)


ESCAPE = "\x1b]0;owned\x07\x1b[2J\u202e"


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "--resume", ESCAPE],
        ["report", ESCAPE],
        ["pareto", ESCAPE],
        ["run", ESCAPE],
        ["fit", f"{ESCAPE}:f", "--data", ESCAPE],
        [ESCAPE],
        ["--debug", "report", ESCAPE],
    ],
)
def test_what_is_named_cannot_command_the_terminal(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) in (2, 3)
    said = capsys.readouterr()
    assert said.err
    assert not set("\x1b\x07\u202e") & set(said.out + said.err)


def test_what_is_written_and_warned_of_cannot_either(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = RunFolder(tmp_path / ESCAPE.replace("/", ""))
    arguments = ["run", "--epochs", "1", "--warmup-epochs", "0", "--out", str(folder.path), "--threads", "1"]
    assert main([*arguments, "--train-images", "100", "--test-images", "50"]) == 0
    assert main(["run", "--resume", str(folder.path)]) == 0
    assert main(["report", str(folder.path)]) == 0
    (folder.path / "summary.json").unlink()
    shutil.copytree(folder.path / "checkpoint" / "epoch-000001", folder.path / "checkpoint" / "epoch-000002")
    assert main(["run", "--resume", str(folder.path), "--quiet"]) == 1  # a warning, which is an error in the tests
    said = capsys.readouterr()
    assert "the checkpoint" in said.err
    assert cli._format_warning(UserWarning(ESCAPE), UserWarning, "file.py", 1).rstrip("\n").isprintable()
    assert not set("\x1b\x07\u202e") & set(said.out + said.err)
