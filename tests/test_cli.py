"""The command line: help that teaches, one sentence for bad input, and nothing destroyed."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import processes
import pytest

import sgdol
from sgdol import cli
from sgdol.paper.configuration import DEFAULT_HORIZON, QUICK_HORIZON
from sgdol.paper.publish import Publication
from sgdol.paper.verdict import Claim, Part

INTERRUPTED = "sgdol: interrupted; the same command continues where it stopped"


def run(*arguments, blocked=()):
    block = f"import sys; sys.modules.update(dict.fromkeys({list(blocked)!r})); "
    program = f"{block}sys.argv[0] = 'sgdol'; from sgdol.__main__ import main; main()"
    environment = os.environ | {"COLUMNS": "100", "NO_COLOR": "1", "JAX_PLATFORMS": "cpu"}
    return processes.run([sys.executable, "-c", program, *arguments], env=environment)


def call(monkeypatch, capsys, *arguments):
    """The same without a new process: status, stdout and stderr."""
    monkeypatch.setattr(sys, "argv", ["sgdol", *map(str, arguments)])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    captured = capsys.readouterr()
    return stopped.value.code, captured.out, captured.err


def contents(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_the_version_is_that_of_the_package(monkeypatch, capsys):
    status, out, _ = call(monkeypatch, capsys, "--version")
    assert (status, out.strip()) == (0, f"sgdol {sgdol.__version__}")


OPTIONS = {
    "reproduce": "--figure --horizon --repeats --out --quick --data --seed --noise --method --adagrad",
    "claims": "--out",
    "report": "--out",
    "data": "--export",
    "env": "",
    "": "--version --show-completion",
}


@pytest.mark.parametrize("command", OPTIONS)
def test_every_command_explains_every_option(command, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "100")
    status, out, _ = call(monkeypatch, capsys, *command.split(), "--help")
    assert status == 0
    text = " ".join(out.replace("│", " ").split())
    assert "<bool>" not in text
    assert all(option in text for option in OPTIONS[command].split())
    if command == "reproduce":
        assert text.lower().count("default") >= 7
        assert f"({QUICK_HORIZON})" in text
        assert f"Default: {DEFAULT_HORIZON}" in text


BAD = [
    (["reproduce", "--figure", "7"], "figures must be among 1, 2, 3 and 4, got 7"),
    (["reproduce", "--horizon", "0"], "horizon must be an integer from 10"),
    (["reproduce", "--horizon", "many"], "--horizon"),
    (["reproduce", "--repeats", "0"], "repeats must be an integer from 1"),
    (["reproduce", "--noise", "pink"], "noise_model must be one of"),
    (["reproduce", "--data", "{folder}/none"], "there is no file"),
    (["reproduce", "--figure", "1", "--data", "{folder}/truncated"], "truncated"),
    (["reproduce", "--out", "{folder}/file"], "file"),
    (["reproduce", "--out", "{folder}/file/deeper"], "file"),
    (["reproduce", "--out", "{folder}/older"], "holds results of sgdol 0.0.1 and this is sgdol"),
    (["reproduce", "--out", "{folder}/other"], "holds results of another configuration"),
    (["reproduce", "--method", "Nesterov"], "method must be one of SGDOL Global, "),
    (["reproduce", "--adagrad", "sometimes"], "adagrad_form must be one of"),
    (["claims", "--out", "{folder}/nothing"], "holds no results"),
    (["report", "--out", "{folder}/nothing"], "holds no results"),
    (["data", "--export", "mnist", "{folder}/x"], "the data set that can be exported is a9a"),
    (["data", "--export", "a9a", "{folder}/file"], "was left alone"),
    (["data", "--check", "{folder}/truncated"], "truncated"),
    (["reprodcue"], "No such command"),
]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "file").write_text("precious\n")
    (tmp_path / "truncated").write_text("+1 3:1 11:1\n-1 3:1 1")
    for name, change in (("older", {"version": "0.0.1"}), ("other", {"seed": 5})):
        from sgdol.paper.results import Configuration

        configuration = Configuration()
        entries = {"configuration": {"figures": [1], "only": []}, "identity": configuration.identity() | change}
        (tmp_path / name).mkdir()
        (tmp_path / name / "configuration.json").write_text(json.dumps(entries))
        (tmp_path / name / "summary.csv").write_text("precious\n")
    return tmp_path


@pytest.mark.parametrize(("arguments", "sentence"), BAD, ids=[" ".join(arguments) for arguments, _ in BAD])
def test_bad_input_gets_one_sentence_and_destroys_nothing(arguments, sentence, folder, monkeypatch, capsys):
    before = contents(folder)
    monkeypatch.chdir(folder)
    status, out, err = call(monkeypatch, capsys, *(word.format(folder=folder) for word in arguments))
    wrong_usage = not ("{folder}" in "".join(arguments) and "--method" not in arguments)
    assert status == (2 if wrong_usage else 1)
    assert sentence in err
    assert len(err.strip().splitlines()) == 1
    assert err.startswith("sgdol: ")
    assert out == ""
    assert contents(folder) == before


def test_an_error_of_ours_keeps_its_traceback(monkeypatch):
    def broken(*_):
        raise ValueError("a bug")

    monkeypatch.setattr("sgdol.paper.data.describe", broken)
    monkeypatch.setattr(sys, "argv", ["sgdol", "data"])
    with pytest.raises(ValueError, match="a bug"):
        cli.main()


@pytest.mark.parametrize("module", ["rich.console", "jax._src.lax.special", "h5py.h5f"])
def test_an_interrupt_ends_in_one_line_while_modules_are_imported(module, tmp_path):
    """The signal is sent when Python says that it has imported this module."""
    program = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a background job ignores it
        "from sgdol.__main__ import main; main()"
    )
    command = [sys.executable, "-X", "importtime", "-c", program, "reproduce", "--quick", "--out", str(tmp_path)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        ends = threading.Timer(300, process.kill)
        ends.start()
        assert any(line.rpartition("|")[2].strip() == module for line in process.stderr), "it was not imported"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
        ends.cancel()
    said = [line for line in err.splitlines() if not line.startswith("import time:")]
    assert (process.returncode, said, out) == (130, [INTERRUPTED], "")


def test_an_interrupt_ends_in_one_line_while_experiments_run(tmp_path):
    program = (
        "import os, signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "import sgdol.paper.reproduce as module\n"
        "run = module.tune\n"
        "def interrupted(*arguments, **options):\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"  # in a thread, before a compiled run
        "    return run(*arguments, **options)\n"
        "module.tune = interrupted\n"
        "from sgdol.__main__ import main; main()"
    )
    command = [sys.executable, "-c", program, "reproduce", "--quick", "--horizon", "50", "--out", str(tmp_path)]
    stopped = processes.run(command)
    assert (stopped.returncode, stopped.stderr.splitlines()) == (130, [INTERRUPTED])


def test_an_interrupt_that_the_parent_ignores_is_ignored():
    program = (
        "import os, signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "import sgdol.paper.data as data; describe = data.describe\n"
        "data.describe = lambda: (os.kill(os.getpid(), signal.SIGINT), describe())[1]\n"
        "from sgdol.__main__ import main; main()"
    )
    went_on = processes.run([sys.executable, "-c", program, "data"])
    assert (went_on.returncode, went_on.stderr) == (0, "")
    assert "32,561 rows" in went_on.stdout


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_the_extra_it_says_which_to_install(missing):
    stopped = run("reproduce", blocked=[missing])
    assert stopped.returncode == 1
    assert stopped.stderr.strip().splitlines()[-1].endswith("pip install 'sgdol[paper]'")
    assert "Traceback" not in stopped.stderr


def test_without_jax_only_what_needs_it_asks_for_it(tmp_path):
    stopped = run("reproduce", "--out", str(tmp_path), blocked=["jax"])
    assert stopped.returncode == 1
    assert stopped.stderr.strip() == cli.EXTRA.replace("{}", "jax").join(["sgdol: ", ""])
    assert run("--version", blocked=["jax"]).returncode == 0


def test_data_describes_exports_and_checks(monkeypatch, capsys, tmp_path):
    _, out, _ = call(monkeypatch, capsys, "data")
    assert "32,561 rows" in out
    assert "CC BY 4.0" in out
    path = tmp_path / "a9a"
    status, out, _ = call(monkeypatch, capsys, "data", "--export", "a9a", path)
    assert (status, out.strip()) == (0, str(path))
    from sgdol.paper.data import A9A_SHA256

    assert hashlib.sha256(path.read_bytes()).hexdigest() == A9A_SHA256
    _, out, _ = call(monkeypatch, capsys, "data", "--check", path)
    assert "15,682 rows, 124 features" in out


def test_python_m_sgdol_is_the_same_program():
    assert processes.output([sys.executable, "-m", "sgdol", "--version"]) == f"sgdol {sgdol.__version__}\n"


def test_env_prints_versions_for_a_bug_report_and_no_path(monkeypatch, capsys):
    status, out, _ = call(monkeypatch, capsys, "env")
    assert status == 0
    found = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert found["sgdol"] == sgdol.__version__
    for name in ("Python", "numpy", "torch", "jax", "optax", "xarray", "h5py", "typer", "machine", "cores"):
        assert found[name]
    assert str(Path.home()) not in out


def test_env_needs_no_extra():
    whole, bare = run("env"), run("env", blocked=["typer", "rich", "jax", "matplotlib"])
    assert (bare.returncode, bare.stderr) == (0, "")
    assert bare.stdout == whole.stdout


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        (["re"], {"reproduce", "report"}),
        (["reproduce", "--noise", ""], {"coordinate", "total"}),
        (["reproduce", "--method", "SGD"], {"SGDOL Global", "SGDOL Coordinate", "SGD", "SGD GL"}),
    ],
    ids=["command", "choice", "method"],
)
def test_a_shell_can_complete_words(words, completed, monkeypatch, capsys):
    monkeypatch.setenv("_SGDOL_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", " ".join(["sgdol", *words]))
    monkeypatch.setenv("COMP_CWORD", str(len(words)))
    _, out, _ = call(monkeypatch, capsys)
    assert set(out.split("\n")) - {""} == completed


def piped(stdout=subprocess.PIPE, **environment):
    """The program with much to print, its output going elsewhere."""
    program = (
        "import sys; import sgdol.paper.data as data; from sgdol import cli\n"
        "data.describe = lambda *_: 'E‖∇f‖² under σ: “1.2 × 10⁻⁷” (≤ 2) ☃\\n' * 5000\n"
        "sys.argv = ['sgdol', 'data']; cli.main()"
    )
    environment = os.environ | environment
    return processes.run([sys.executable, "-c", program], stdout=stdout, env=environment, text=False)


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_output_into_a_file_of_any_encoding_is_spelled_out(encoding):
    done = piped(PYTHONIOENCODING=encoding)
    assert done.returncode == 0, done.stderr
    line = done.stdout.decode(encoding).splitlines()[0]
    plain = {"ascii": 'E||grad f||^2 under sigma: "1.2 x 10^-7" (<= 2) ?'}
    assert line == plain.get(encoding, "E||grad f||² under sigma: “1.2 × 10^-7” (<= 2) ?")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_output_onto_a_full_disk_is_one_sentence():
    with open("/dev/full", "wb") as full:
        done = piped(stdout=full)
    assert done.returncode == 1
    assert done.stderr.decode().strip() == "sgdol: cannot write the output: No space left on device"


def test_output_that_nobody_reads_to_its_end_is_no_error():
    reading, writing = os.pipe()
    os.close(reading)
    done = piped(stdout=writing)
    os.close(writing)
    assert done.stderr == b""


CLAIM = Claim("phi", "It is so.", "Section 7", "a check", "a reason", (Part("a [number]", 1.0, "<=", 2.0),))


def test_report_says_what_it_wrote(tmp_path, monkeypatch, capsys):
    paths = [tmp_path / name for name in ("figure2.png", "claims.json", "report.html")]
    monkeypatch.setattr("sgdol.paper.publish.publish", lambda *_: Publication([], paths[:1], *paths[1:]))
    status, out, _ = call(monkeypatch, capsys, "report", "--out", tmp_path)
    assert status == 0
    assert out.split() == [str(path) for path in paths]


def test_claims_are_shown_as_a_table_one_by_one_and_in_markdown(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sgdol.paper.publish.publish_claims", lambda *_: [CLAIM])
    status, out, _ = call(monkeypatch, capsys, "claims", "--out", tmp_path)
    assert status == 0
    assert "phi" in out
    assert "a [number]: 1 (≤ 2)" in out
    assert "findings: 1 holds" in out
    _, out, _ = call(monkeypatch, capsys, "claims", "--out", tmp_path, "--id", "phi")
    assert all(words in out for words in ("It is so.", "Section 7", "a check", "a reason", "a [number]: 1 (≤ 2)"))
    _, out, _ = call(monkeypatch, capsys, "claims", "--out", tmp_path, "--markdown")
    assert out.startswith("| verdict |")
    status, _, err = call(monkeypatch, capsys, "claims", "--out", tmp_path, "--id", "nonsense")
    assert status == 2
    assert "there is no claim 'nonsense': the ids are phi" in err


def test_help_and_version_need_no_extra():
    """It was an error: "sgdol's command line needs the extra"."""
    shown = run("--help", blocked=["typer", "rich", "jax", "matplotlib"])
    assert shown.returncode == 0
    assert "pip install 'sgdol[paper]'" in shown.stdout
    assert run("--version", blocked=["typer"]).stdout == run("--version").stdout


def test_a_pipe_as_a_results_file_is_named_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "configuration.json")
    told = run("claims", "--out", str(tmp_path))
    assert told.returncode == 1
    assert "configuration.json: it is not an ordinary file" in told.stderr
