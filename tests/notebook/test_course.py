"""Promises of `python -m ogbnlib notebooks`: a whole working folder, apart from the checkout."""

import re
from pathlib import Path

import nbformat
import pytest
from conftest import cli, tree

from ogbnlib.errors import InputError
from ogbnlib.notebook.course import write_course

ROOT = Path(__file__).parents[2]


def test_it_has_the_checkouts_files_and_links_that_work(tmp_path: Path) -> None:
    course = tmp_path / "mine"
    write_course(course)
    files = {path for path in (ROOT / "slurm").rglob("*") if path.is_file()}
    files |= {*(ROOT / "notebooks").rglob("*.md"), ROOT / "environment.yml"}
    for path in (*files, ROOT / "constraints.txt"):
        assert (course / path.relative_to(ROOT)).read_bytes() == path.read_bytes()
    committed = sorted((ROOT / "notebooks").glob("*.ipynb"))
    assert len(tree(course)) == len(files) + len(committed) + 2  # constraints.txt and README.md
    for path in committed:
        book = nbformat.read(course / path.relative_to(ROOT), as_version=4)
        nbformat.validate(book)
        original = nbformat.read(path, as_version=4)
        assert "ogbnlib" in original.metadata
        assert "ogbnlib" not in book.metadata  # of the committed run
        for cell, first in zip(book.cells, original.cells, strict=True):
            assert (cell.id, cell.source, cell.metadata) == (first.id, first.source, first.metadata)
            assert cell.get("outputs", []) == []
            assert cell.get("execution_count") is None
    for page in course.rglob("*.md"):
        links = re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text())
        assert [link for link in links if not (page.parent / link).exists()] == []


def test_an_empty_folder_is_filled_but_no_working_or_full_one(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    thesis = tmp_path / "mine" / "thesis.ipynb"
    thesis.write_text("{}")
    with pytest.raises(InputError, match="mine: "):
        write_course(tmp_path / "mine")
    assert tree(tmp_path) == {"mine/thesis.ipynb": b"{}"}
    thesis.unlink()
    done = cli("notebooks", ".", cwd=tmp_path / "mine")
    assert done.returncode == 2
    assert f"{tmp_path / 'mine'}: " in done.stderr
    assert not tree(tmp_path)
    assert cli("notebooks", "mine", cwd=tmp_path).returncode == 0
    assert (tmp_path / "mine" / "notebooks" / "00_quickstart.ipynb").is_file()
