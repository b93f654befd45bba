"""`fastserve completion`: what a shell is told, by click's protocol and by bash itself."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.shell_completion import CompletionItem, ShellComplete
from click.testing import CliRunner

from fastserve.cli import COMMANDS, main
from fastserve.cli.completion import SHELLS


def ask(*words: str) -> list[CompletionItem]:
    """Return what completes the last word of a command line."""
    return ShellComplete(main, {}, "fastserve", "").get_completions(list(words[:-1]), words[-1])


def values(*words: str) -> list[str]:
    return [item.value for item in ask(*words)]


@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_for_each_shell(shell: str) -> None:
    result = CliRunner().invoke(main, ["completion", shell])
    assert result.exit_code == 0, result.output
    assert f"_FASTSERVE_COMPLETE={shell}_complete" in result.output


def test_another_shell() -> None:
    result = CliRunner().invoke(main, ["completion", "tcsh"])
    assert (result.exit_code, "'bash', 'zsh', 'fish'" in result.output) == (2, True)


def test_commands_are_completed_without_importing_one() -> None:
    assert values("") == list(COMMANDS)
    assert {item.help for item in ask("se")} == {COMMANDS["serve"]}
    assert values("--v") == ["--version"]


def test_flags_common_ones_first_and_all_once_one_is_begun() -> None:
    common = values("serve", "--")
    assert "--http" in common
    assert "--limits-body-bytes" not in common
    assert values("serve", "--limits-body-by") == ["--limits-body-bytes", "--limits-body-bytes-per-s"]
    assert values("check", "--no-keep") == ["--no-keep-going"]
    (item,) = ask("run", "--drain-d")
    assert item.help == "Seconds after a stop signal in which it is not ready and still serves all."


def test_rare_flags_stay_rare_after_the_help_has_listed_them() -> None:
    common = values("serve", "--")
    told = CliRunner().invoke(main, ["serve", "--help-all"])
    assert "--limits-body-bytes" in told.output
    assert values("serve", "--") == common


def test_values_and_paths() -> None:
    assert values("serve", "--model-control", "") == ["none", "poll", "explicit"]
    assert values("serve", "--log-level", "w") == ["warning"]
    assert [(item.type, item.value) for item in ask("serve", "d")] == [("file", "d"), ("plain", "demo")]
    assert [item.type for item in ask("check", "models/x")] == ["file"]
    assert values("serve", "--frontends", "") == []


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_itself(tmp_path: Path) -> None:
    command = tmp_path / "fastserve"
    code = "import sys; from fastserve.cli import main; main(prog_name='fastserve')"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{code}" "$@"\n')
    command.chmod(0o755)
    typed = "COMP_WORDS=(fastserve serve --model-control e); COMP_CWORD=3"
    script = (
        f'source <(fastserve completion bash); {typed}; _fastserve_completion fastserve; echo "$COMPREPLY"'
    )
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": root}
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=environment, timeout=60)
    assert (done.stdout, done.stderr) == ("explicit\n", "")
