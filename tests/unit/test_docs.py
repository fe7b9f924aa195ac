"""Doctests run, in the package and on the site's pages; README and the site have the generated parts and true figures;
every error code has an entry."""

import ast
import doctest
import importlib
import importlib.util
import pkgutil
import re

import pytest
from gpucoll.bench import strategies

import gpucoll
from gpucoll import cli
from gpucoll.algorithms import registry
from gpucoll.core.collectives import COLLECTIVES
from gpucoll.lab.formula import total_sent
from gpucoll.simulator import simulate
from gpucoll.tuner import segments
from harness.sources import PAGES, ROOT, WRITTEN, files, nodes_of

README = (ROOT / "README.md").read_text()
MODULES = [module.name for module in pkgutil.walk_packages(gpucoll.__path__, "gpucoll.")
           if not module.name.endswith(("__main__", "executors.native", "device.cuda", "device.nccl",
                                        "device.local", "nccl.nccl_collectives", "communicator.windows"))  # MPI, CuPy
           and all(importlib.util.find_spec(needed) is not None or not module.name.startswith(f"gpucoll.{room}")
                   for room, needed in (("torch", "torch"), ("torch.torchft", "torchft"), ("dask", "distributed"),
                                        ("ray", "ray"), ("precheck.torch_", "torch"), ("emulation.torch_", "torch")))]
CODE = re.compile(r"GC-[A-Z0-9][A-Z0-9-]*")
MOST_CODES = 70  # a code tells apart what programs and people treat differently


def test_doctests(own_algorithms):
    modules = map(importlib.import_module, ("gpucoll", "harness.grids", *MODULES))
    assert not [module.__name__ for module in modules if doctest.testmod(module).failed]


@pytest.mark.parametrize("page", [page for page in PAGES if "```pycon" in page.read_text()], ids=lambda page: page.stem)
def test_doctests_of_the_pages(page, own_algorithms):
    """The blocks of a page run as one session, as typed by a reader."""
    if page.stem == "order":
        pytest.importorskip("gpucoll._engine", reason="threads are compared by the engine, which is not built")
    session = "\n".join(re.findall(r"```pycon\n(.*?)```", page.read_text(), re.DOTALL))
    test = doctest.DocTestParser().get_doctest(session, {"__name__": page.stem}, page.name, str(page), 0)
    assert doctest.DocTestRunner().run(test) == doctest.TestResults(0, session.count(">>> "))


def test_readme_is_short():
    assert len(README.splitlines()) <= 120


def test_the_table_of_costs_is_generated():
    """The table of collectives x algorithms comes from the registry, and the legend explains every word."""
    lines = ["| collective | algorithm | time (us) | total | rounds | bytes on the longest path | most bytes sent "
             "| received |", "|---|---|---|---|---|---|---|---|"]
    for collective in COLLECTIVES:
        rows = [(simulate(kind, name, 8, 1 << 20, segments=segments(kind, name, 1 << 20, 8)), found.cost[:4])
                for (kind, name), found in registry().items() if kind == collective]
        for row, formulas in sorted(rows, key=lambda one: (round(one[0].seconds, 9), one[0].algorithm)):
            total = float(total_sent(collective, row.algorithm, 8, row.segments))
            figures = " | ".join([f"{1e6 * row.seconds:.1f}", f"{total:g} N", *(f"`{one}`" for one in formulas)])
            lines.append(f"| {collective} | {row.algorithm} | {figures} |")
    table, page = "\n".join(lines), (ROOT / "docs/costs.md").read_text()
    assert table in page, f"put this into docs/costs.md:\n{table}"
    legend = "\n".join(re.findall(r"^\| (`.*?) \|", page.partition("| in a formula |")[2].partition("\n\n")[0], re.M))
    known = set(re.findall(r"`(\w+)(?:\(x\))?`", legend))
    formulas = " ".join(re.findall(r"`([^`]*)`", table))
    assert set(re.findall(r"[A-Za-z]\w*", formulas)) <= known


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.stem)
def test_what_a_page_shows_is_there_and_what_it_quotes_is_true(page):
    """Linked files exist; figures of the bench.strategies tables equal their formulas."""
    text = page.read_text()
    links = [name.partition("#")[0] for name in re.findall(r"\]\((?!http)([^)]*)\)", text)]
    assert all((page.parent / name).is_file() or "gallery/" in name for name in filter(None, links))
    names = {}
    for cells in ([cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()):
        if cells[0].startswith("P = "):
            names = {name: int(value.replace(",", "")) for name, value in re.findall(r"(\w) = ([\d,]*\d)", cells[0])}
        elif cells[0] in strategies.FORMULAS and len(cells) == 5:
            formulas = strategies.FORMULAS[cells[0]]
            assert cells[1:5:2] == [f"{eval(formula, dict(names)):,.0f}" for formula in formulas]
            assert cells[2:5:2] == [formula.replace(" *", "") for formula in formulas]


def test_the_page_of_own_algorithms_is_true(tmp_path, monkeypatch, capsys, own_algorithms):
    """The first block is the file named by the commands; tests/multirank/test_readme.py runs the blocks on ranks."""
    text = (ROOT / "docs/algorithms.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (tmp_path / "line.py").write_text(blocks[0])
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    monkeypatch.chdir(tmp_path)
    for block in blocks:
        exec(compile(block, "a block", "exec"), {"__name__": "page"})
    shown = "".join(re.findall(r"```sh\n(.*?)```", text, re.DOTALL))
    commands = [line.split() for line in shown.splitlines()]
    assert len(commands) >= 6
    for words in commands:
        assert (words[0], cli.main(words[1:])) == ("gpucoll", 0)
    assert "no faults" in capsys.readouterr().out


def codes_of(path):
    """Yield the error codes in a file, which are whole strings."""
    yield from (node.value for node in nodes_of(path) if isinstance(node, ast.Constant) and isinstance(node.value, str)
                and CODE.fullmatch(node.value))


def test_every_error_code_has_its_entry_with_cause_and_cure():
    raised = {code for path in files("gpucoll", "bench", "kernels") for code in codes_of(path)}
    page = (ROOT / "docs/errors.md").read_text()
    entries = dict(re.findall(r"^## (\S+)\n(.*?)(?=^## |\Z)", page, re.DOTALL | re.MULTILINE))
    assert set(entries) == raised
    listed = page.partition("{.codes}")[2].partition("\n\n")[0]
    assert list(entries) == sorted(entries) == re.findall(r"\[(GC-[A-Z0-9-]+)\]", listed)
    body = r"\n(`\w+`(, `\w+`)*|`gpucoll doctor`)\n\n\*\*Cause\.\*\* .{20,}?\n\n\*\*Cure\.\*\* .{9,}?\n+"
    for code, entry in entries.items():
        assert re.fullmatch(body, entry, re.DOTALL), code
        assert set(re.findall(r"^`(\w+Error|CollectiveTimeout)", entry, re.M)) <= {*dir(gpucoll), "ScheduleError"}


def test_every_error_code_is_raised_in_a_test():
    codes = re.findall(r"^## (GC-\S+)", (ROOT / "docs/errors.md").read_text(), re.M)
    tested = {code for path in files("tests") for code in CODE.findall(path.read_text())}
    assert len(codes) <= MOST_CODES
    assert set(codes) - tested == set()


def test_the_reference_has_every_public_name():
    api = {path.stem: path.read_text() for path in (ROOT / "docs/api").glob("*.md")}
    named = set(re.findall(r":: gpucoll\.(?:precheck\.)?(\w+)$", "".join(api.values()), re.M))
    assert set(gpucoll.__all__) <= named
    from gpucoll import distributed, training

    for module, page in ((training, "training"), (distributed, "distributed")):
        named = set(re.findall(rf":: {module.__name__}\.(\w+)$", api[page], re.M))
        public = {name for name in getattr(module, "__all__", dir(module)) if not name.startswith("_")
                  and getattr(getattr(module, name), "__module__", "").startswith(module.__name__)}
        assert public - named <= {"GroupMember", "group"}, module
    entries = set(re.findall(r":: gpucoll\.Communicator\.(\w+)$", api["communicator"], re.M))
    comm, = gpucoll.init_local(1)
    assert {name for name in dir(comm) if name[0].islower()} == entries
    comm.close()


def test_each_term_of_the_glossary_is_in_its_file():
    page = (ROOT / "docs/glossary.md").read_text()
    rows = re.findall(r"^\| (?!term)([^|]+) \| [^|]+ \| (.+) \|$", page, re.MULTILINE)
    terms = [term for row, _ in rows for term in row.split(", ")]
    assert len({*terms}) == len(terms) > 30
    for row, code in rows:
        *names, file = re.findall(r"`([^`]+)`", code)
        text = (ROOT / ("" if file.startswith("kernels/") else "gpucoll") / file).read_text()
        words = [name.rpartition(".")[2] for name in names]
        assert all(re.search(rf"(?:class |def |^ *){word}\b", text, re.MULTILINE) for word in words), row
        assert words or any(term in text.lower() for term in row.split(", ")), row


def test_each_page_links_its_first_busbw_to_the_one_definition():
    for page in WRITTEN:
        first = re.search(r"^[^#\n]*\b(algbw|busbw|bus bandwidth)\b.*", page.read_text(), re.MULTILINE)
        if first and page.name != "time.md" and page.parent.name != "changes.d":
            assert "time.md#algbw-and-busbw" in first[0], page
    assert (ROOT / "docs/guide/time.md").read_text().count("## algbw and busbw\n") == 1


def test_one_table_tells_where_a_change_belongs_and_three_pages_what_to_ignore():
    texts = [(ROOT / page).read_text() for page in ("CONTRIBUTING.md", "README.md", "docs/architecture.md")]
    ignored = [re.search(r"the doors to other.*?run(s) them", " ".join(text.split()))[0] for text in texts]
    assert len({*ignored}) == 1
    assert all("(CONTRIBUTING.md#where-a" in text or "(contributing.md#where-a" in text for text in texts[1:])
    table = texts[0].partition("| to change |")[2].partition("\n\n")[0]
    paths = [path for path in re.findall(r"`([\w./]+)`", table) if "/" in path]
    assert [path for path in paths if not any((ROOT / folder / path).exists() for folder in ("", "gpucoll"))] == []
    assert len(paths) > 30
