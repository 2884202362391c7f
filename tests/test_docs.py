"""Promises of the pages beside README: every command is there and does what the page says."""

import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
import typer
import write_reference
from web import Remote

from ogbnlib.__main__ import app
from ogbnlib.config import TrainConfig
from ogbnlib.forecast.fitting import FITS
from ogbnlib.forecast.planner import ladder, plan
from ogbnlib.parameters import parse_assignments, read_parameters
from ogbnlib.registry import MODELS, POLICIES
from ogbnlib.runs.diagnosis import explain_code, explain_text
from ogbnlib.sources.sizes import take_sizes
from ogbnlib.sources.synth import synthesize

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "notebooks" / "guide" / "papers100M.md"
SCALE = float(os.environ.get("OGBNLIB_PAGE_SCALE", "0.002"))  # 0.01 takes two minutes


@pytest.mark.slow
def test_papers100m_is_downloaded_converted_trained_and_read_as_the_page_says(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    remote, name = tmp_path_factory.mktemp("remote"), "papers100M-bin"
    synthesize(remote / name, scale=SCALE)
    archive = Path(shutil.make_archive(str(remote / name), "zip", remote, name)).read_bytes()
    shutil.copytree(ROOT / "slurm", tmp_path / "slurm")
    with Remote(archive) as server:
        proxy = server.url.rpartition("/")[0]
        env = {**os.environ, "http_proxy": proxy, "no_proxy": "", "PYTHONPATH": str(ROOT)}
        env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
        output = ""
        for block in re.findall(r"^```bash\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL):
            argv = ["bash", "-e", "-c", f"exec 2>&1\n{block}"]
            done = subprocess.run(argv, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True)
            output += done.stdout
            assert done.returncode == 0, f"{block}\n{output[-3000:]}"
    assert len(server.asked) == 1
    assert "data/papers100M: sound" in output
    assert "under 7.00 GB: FITS" in output
    assert "papers100M: Finished without an error" in output
    epochs = TrainConfig.load(tmp_path / "runs" / "papers100M" / "config.json").epochs
    assert (tmp_path / "runs" / "papers100M" / "metrics.csv").read_text().count("\n") == 1 + epochs
    assert (tmp_path / "classes.npy").stat().st_size > 0


@pytest.mark.parametrize("name", ["small", "large"])
def test_the_settings_beside_the_job_scripts_fit_their_limit_at_full_size(name: str) -> None:
    values = read_parameters(ROOT / "slurm" / f"{name}.yaml")
    book = nbformat.read(ROOT / "notebooks" / "07_full_training.ipynb", as_version=4)
    (cell,) = (cell.source for cell in book.cells if "parameters" in cell.metadata.get("tags", []))
    # papermill -f gives them to it
    assert set(values) <= {line.partition(":")[0] for line in cell.splitlines()}
    limit = values.pop("memory_limit")
    at_full = {"dataset": "ogbn-papers100M", "undirected": True, "feature_dtype": "float16"}
    assert plan(TrainConfig.create({**values, **at_full}), limit).verdict == FITS


def test_what_the_page_expects_is_what_plan_forecasts() -> None:
    rungs = ladder(undirected=True, spool="30 GB")
    row = r"^\| (\d+ GB) \| [^|]* \| \w+ \| \d \| ([\d.]+) GB \| (\d+) min"
    expected = re.findall(row, PAGE.read_text(), re.MULTILINE)
    assert [allocation for allocation, *_ in expected] == ["128 GB", "64 GB", "16 GB", "4 GB"]
    for allocation, gigabytes, minutes in expected:
        row = rungs.loc[allocation]
        assert float(gigabytes) == pytest.approx(row["peak GB"], rel=0.25)
        assert float(minutes) == pytest.approx(row["epoch min"], rel=0.25)


def commands(page: Path) -> list[list[str]]:
    """Every `python -m ogbnlib ...` of a page, in a block or in a line, without comments."""
    text = re.sub(r"\\\n", " ", page.read_text())
    lines = re.findall(r"python -m ogbnlib ([a-z][^\n`]*)", text)
    return [shlex.split(command, comments=True) for command in lines if " ..." not in command]


PAGES = [ROOT / "README.md", *sorted((ROOT / "notebooks" / "guide").glob("*.md"))]


def test_the_pages_are_short_and_their_links_lead_somewhere() -> None:
    assert len(PAGES[0].read_text().splitlines()) <= 120
    for page in PAGES:
        assert len(page.read_text().splitlines()) <= 160
        links = re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text())
        assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("name", write_reference.PAGES)
def test_the_reference_is_that_of_the_docstrings(name: str) -> None:
    written = (ROOT / "notebooks" / "guide" / f"{name}.md").read_text()
    assert written == write_reference.PAGES[name](), "run python tests/write_reference.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_that_a_page_names_is_there_with_its_options(page: Path) -> None:
    known = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for name, *arguments in commands(page):
        own = [*itertools.takewhile(lambda word: word not in ("&&", "|", ">"), arguments)]
        options = known[name].make_context(name, own).params if own else {}
        values = parse_assignments(options.get("set_") or [])
        take_sizes(values)
        TrainConfig.create({"dataset": "somewhere"} | values)


def test_the_guide_names_every_policy_and_model() -> None:
    text = "".join(page.read_text() for page in PAGES[1:])
    assert [name for name in (*POLICIES, *MODELS) if not re.search(rf"\b{name}\b", text)] == []


def test_what_troubleshooting_says_of_an_exit_code_is_what_diagnose_says() -> None:
    page = (ROOT / "notebooks" / "guide" / "troubleshooting.md").read_text()
    asked = re.findall(r"^## ([\d:]+).*?--exit-code ([\d:]+)", page, re.MULTILINE | re.DOTALL)
    assert [code for _, code in asked] == ["137", "1", "0:125", "0:53"]
    for heading, code in asked:
        assert heading == code
        assert "no fixed meaning" not in explain_code(code).text
    (message,) = re.findall(r'--text "(.*)"', page)
    assert explain_text(message).cause == "out of GPU memory"


def skeleton(page: Path) -> list[tuple[str, ...]]:
    """What a translation shares with its original, in order: levels of headings, and commands."""
    text = re.sub(r"\s+# .*", "", page.read_text())
    return re.findall(r"^(#+) |^```(\w+)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def test_a_figure_on_several_pages_is_that_of_its_source() -> None:
    guide = {page.stem: page.read_text() for page in PAGES[1:]}
    rows = write_reference._rows("full_size.csv")
    long = [row for row in rows if "epochs=20" in row["config"] and row["limit"] == "4 GB"]
    times = [float(row["seconds"]) for row in long]
    minutes = [f"{time / 60:g}" for time in (min(times), max(times))]
    maps = re.findall(r"8 `DataLoader` workers \| (\d+) \|", guide["out_of_core"])
    maps += re.findall(r"one whole epoch \| \*\*(\d+)\*\*", guide["out_of_core"])
    for page in (ROOT / "README.md", ROOT / "README.zh-CN.md"):
        lines = page.read_text().splitlines()
        (of_maps,) = [line for line in lines if "#why-not-a-memory-map" in line]
        assert set(maps) <= set(re.findall(r"\d+", of_maps))
        (of_disk,) = [line for line in lines if "guide/numbers.md" in line]
        assert set(minutes) <= set(re.findall(r"\d+", of_disk))
    for accuracy in ("0.49", "0.63"):
        assert accuracy in guide["papers100M"]
        assert accuracy in PAGES[0].read_text()
    (free,) = re.findall(r"needs (\d+) GB free", guide["papers100M"])
    assert int(free) >= max(map(int, re.findall(r"(\d+) GB while", guide["papers100M"])))


def test_the_chinese_readme_has_the_same_headings_and_commands() -> None:
    english, chinese = ROOT / "README.md", ROOT / "README.zh-CN.md"
    assert "](README.zh-CN.md)" in english.read_text().splitlines()[0]
    assert "](README.md)" in chinese.read_text().splitlines()[0]
    assert skeleton(english) == skeleton(chinese) != []
