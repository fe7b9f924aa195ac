"""The site: commands on the pages and in README exist with all options, pages build without a warning, links lead
somewhere, and a newcomer's questions are answered within two clicks."""

import contextlib
import functools
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib

import pytest
from gpucoll.bench import arguments

import pages
import schedulers
from browser.conftest import browser  # noqa: F401 (a fixture)
from gpucoll import cli
from harness.jobs import python
from harness.sources import ROOT, WRITTEN

EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
# Programs of others, not checked here.
THEIRS = {"module", "srun", "sbatch", "export", "pytest", "nvidia-smi"}
QUICK = {"bound", "convert", "draw", "explain", "simulate", "synthesize", "verify"}  # verbs run unchanged
# Fewer ranks for the tests; test_simulate.py has a million.
SMALLER = {"1..64": "2", "1..32": "2", "1..8": "2", "1000000": "64"}
USERS = {"example.py", "train.py", "program.py"}  # programs of the reader
ASSIGNED = re.compile(r"[A-Z_]+=\S*")


def commands():
    for page in WRITTEN:
        for block in re.findall(r"```sh\n(.*?)```", page.read_text(), re.DOTALL):
            for line in block.splitlines():
                words = shlex.split(line, comments=True)
                if words and page.name != "algorithms.md":  # test_docs.py runs the commands of algorithms.md
                    yield pytest.param(words, id=f"{page.stem}: {' '.join(words)}")


@functools.cache
def help_of(*program):
    """Return a program's help on its options."""
    if program[0] == "gpucoll":
        text = io.StringIO()
        with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
            cli.main([*program[1:], "--help"])
        return text.getvalue()
    job = python(*program, "--help", cwd=ROOT)
    return job.stdout + job.stderr


def check_options(words, text):
    for word in words:
        name = word.partition("=")[0]
        if re.match(r"--?[A-Za-z]", name):
            assert re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", text), f"{name} is no option"


# Options of torchrun with a value.
TORCHRUN = ("--nnodes", "--node-rank", "--nproc-per-node", "--master-addr", "--master-port", "--rdzv-backend",
            "--rdzv-endpoint", "--max-restarts")


def check(words):
    """Raise for an unknown command or option."""
    words = words[next(index for index, word in enumerate(words) if not ASSIGNED.fullmatch(word)):]
    program, *rest = words
    if program == "pip":
        asked = ",".join(re.findall(r"\[(.*?)\]", " ".join(rest))).split(",")
        assert {*filter(None, asked)} <= {*EXTRAS}
    elif program == "mpiexec":
        assert rest[0] == "-n"
        assert rest[1].isdecimal()
        check(rest[4:] if rest[2:4] == ["--with-ft", "ulfm"] else rest[2:])
    elif program == "torchrun":
        while rest[0] in TORCHRUN:
            rest = rest[2:]
        check(["python", *rest])
    elif program == "gpucoll":
        verb, *options = rest
        check_options(options[:1] if verb == "run" else options, help_of("gpucoll", verb))
    elif program == "python" and rest[0] == "-m":
        module = rest[1].removeprefix("gpucoll.")
        assert module.partition(".")[0] == "bench"
        if module == "bench":
            assert arguments.parse(rest[2:], {}).tests
    elif program == "python":
        assert rest[0] in USERS or (ROOT / rest[0]).is_file()
        if rest[0] == "scripts/train.py":
            check_options(rest[1:], help_of("scripts/train.py"))
    elif program == "scripts/cluster":
        assert rest[0] in schedulers.KINDS
        words = rest[1:]
        while words[0] in ("--hosts", "--rate"):
            words = words[2:]
        check(words)
    elif program.startswith("scripts/"):
        assert os.access(ROOT / program, os.X_OK)
        text = help_of("scripts/train.py") + " --ranks -k" if program == "scripts/train" else \
            (ROOT / program).read_text().partition('"""\n\n')[0] + " -k"
        check_options(rest, text)
    else:
        assert program in THEIRS


@pytest.mark.parametrize("words", [*commands()])
def test_a_command_exists_with_its_options_and_runs_where_that_is_quick(words, tmp_path, monkeypatch, capsys,
                                                                        own_algorithms):
    check(words)
    if words[0] == "gpucoll" and words[1] in QUICK:
        monkeypatch.chdir(tmp_path)
        assert cli.main([SMALLER.get(word, word) for word in words[1:]]) == 0


NO_MPI = {"MPI4PY_LIBMPI": "/dev/null/libmpi.so"}  # a library that mpi4py cannot load


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Yield the folder of the site, built where there is no MPI."""
    pytest.importorskip("sphinx", reason="the site needs the extra docs: scripts/docs brings it")
    folder = tmp_path_factory.mktemp("site")
    job = subprocess.run(pages.command(sys.executable, "html", str(folder)), cwd=ROOT, capture_output=True, text=True,
                         env={**os.environ, **NO_MPI})
    assert (job.returncode, job.stderr) == (0, "")
    return folder


@pytest.mark.slow
def test_the_site_builds_its_links_lead_somewhere_and_answers_are_two_clicks_away(site):
    assert pages.broken(site) == []
    from gpucoll.algorithms import registry

    for collective, name in registry():
        assert (site / "gallery" / f"{name}-{collective}.html").is_file()
        assert f'src="{name}-{collective}.svg"' in (site / "gallery" / f"{name}.html").read_text()
    start = pages.page(site / "index.html").links
    for first, place in [("start.html", "#install"), ("start.html", "#first-program"), ("clusters.html", ""),
                         ("gpus.html", ""), ("performance.html", "#why-is-it-slow"), ("errors.html", "#gc-mismatch"),
                         ("algorithms.html", "")]:
        assert first in start
        assert not place or place in pages.page(site / first).links


# The first pages that the search of the site finds, for each query, as the page of results lists them.
FOUND = """JSON.stringify(%s.map(query =>
    Search._performSearch(...Search._parseQuery(query)).reverse().slice(0, 3).map(result => result[0])))"""


@pytest.mark.slow
def test_the_search_finds_what_people_type(site, browser):  # noqa: F811 (the fixture)
    lines = [line.split(": ") for line in (ROOT / "docs/_ext/search_words.txt").read_text().splitlines()[1:]]
    wanted = [(word, page) for page, words in lines for word in words.split("; ")]
    browser.show(site / "search.html?q=busbw")
    browser.wait("ul.search a[href^='guide/time.html']")
    found = json.loads(browser.run(FOUND % json.dumps([word for word, _ in wanted])))
    assert [(word, page, first) for (word, page), first in zip(wanted, found, strict=True) if page not in first] == []
