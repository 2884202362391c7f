"""Execute the notebooks at their default parameters and write them back, as they are committed.

python tests/execute_notebooks.py           # those whose code has changed since then
python tests/execute_notebooks.py 03 05     # these
"""

import base64
import hashlib
import io
import shutil
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

import nbformat
import papermill
from matplotlib.image import imread

from ogbnlib.files import write_atomically

README_PICTURE = Path(__file__).parents[1] / ".github" / "killed_and_survived.png"
NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


def code_hash(book: nbformat.NotebookNode) -> str:
    """Of the code cells: prose may change without another execution."""
    code = "\0".join(cell.source for cell in book.cells if cell.cell_type == "code")
    return hashlib.sha256(code.encode()).hexdigest()


def readme_picture(book: nbformat.NotebookNode) -> bytes:
    """The picture of the cell with the tag "readme-picture", PNG; b"" if there is none."""
    cells = [cell for cell in book.cells if "readme-picture" in cell.metadata.get("tags", [])]
    outputs = [output for cell in cells for output in cell.outputs]
    pictures = [output.data["image/png"] for output in outputs if "data" in output]
    return base64.b64decode("".join(pictures[:1]))


def is_transparent(output: nbformat.NotebookNode) -> bool:
    """Whether a picture shows the page behind it, and JupyterLab adds no background."""
    picture = imread(io.BytesIO(base64.b64decode(output.data["image/png"])))
    has_alpha = picture.shape[-1] == 4
    corners = picture[[0, 0, -1, -1], [0, -1, 0, -1], -1]
    return has_alpha and not corners.any() and "needs_background" not in output.metadata


def is_stale(book: nbformat.NotebookNode) -> bool:
    """Whether the outputs are not those of this code."""
    return book.metadata.get("ogbnlib", {}).get("code_sha256") != code_hash(book)


def mark_committed(book: nbformat.NotebookNode, date: str) -> None:
    """Say below the first output of a notebook whose outputs these are, until a reader runs it."""
    cell = next(cell for cell in book.cells if "begin_notebook()" in cell.source)
    text = f"outputs of the committed run of {date}, until you run the cells\n"
    cell.outputs.append(nbformat.v4.new_output("stream", name="stdout", text=text))


def execute(path: Path, folder: Path) -> None:
    """Execute a notebook in `folder` and write it back, unless a cell fails."""
    shutil.rmtree(folder / "runs", ignore_errors=True)
    book, begin = nbformat.read(path, as_version=4), time.monotonic()
    how = {"engine_name": "ogbnlib", "kernel_name": "python3", "cwd": folder, "progress_bar": False}
    done = papermill.execute_notebook(path, folder / "out.ipynb", **how)
    for cell, executed in zip(book.cells, done.cells, strict=True):
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = executed.outputs, executed.execution_count
    today = f"{datetime.now(UTC):%Y-%m-%d}"
    mark_committed(book, today)
    book.metadata["ogbnlib"] = {
        "code_sha256": code_hash(book),
        "date": today,
        "seconds": round(time.monotonic() - begin),
    }
    write_atomically(path, lambda file: file.write(nbformat.writes(book).encode() + b"\n"))
    picture = readme_picture(book)
    if picture:
        write_atomically(README_PICTURE, lambda file: file.write(picture))
    print(
        f"{path.name}: {book.metadata.ogbnlib.seconds} s, {path.stat().st_size / 1000:.0f} kB",
        flush=True,
    )


if __name__ == "__main__":
    prefixes = tuple(sys.argv[1:])
    chosen = [path for path in NOTEBOOKS if path.name.startswith(prefixes or ("",))]
    with tempfile.TemporaryDirectory() as scratch:
        # as in the repository's own folder
        shutil.copytree(NOTEBOOKS[0].parent, Path(scratch, "notebooks"))
        for each in chosen:
            if prefixes or is_stale(nbformat.read(each, as_version=4)):
                execute(each, Path(scratch))
