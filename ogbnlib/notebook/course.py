"""The course: notebooks, their guide and job scripts, which the wheel contains, too."""

import json
from pathlib import Path

from ..errors import InputError
from ..files import new_folder

_PATTERNS = (
    "notebooks/[0-9]*.ipynb",
    "notebooks/README.md",
    "notebooks/guide/*.md",
    "slurm/*.sbatch",
    "slurm/common.sh",
    "slurm/**/*.yaml",
    "environment.yml",
    "constraints.txt",
)
_README = """# A working folder of ogbnlib

```bash
papermill notebooks/00_quickstart.ipynb out.ipynb     # a run that is killed, a run that survives
jupyter lab notebooks/
sbatch --mem=16G slurm/notebook.sbatch 03_lazy_loaders -p batch_size 128
```

Start all of them in this folder: data go to `data/`, runs to `runs/`. The files are yours to change. Notebooks have no
outputs yet; `python -m ogbnlib notebooks NEW_FOLDER` writes fresh ones.

[The notebooks, as a course](notebooks/README.md) · [command line](notebooks/guide/command_line.md) ·
[Slurm](notebooks/guide/slurm.md) · [troubleshooting](notebooks/guide/troubleshooting.md)
"""


def _without_outputs(path: Path) -> bytes:  # the content of a file, of a notebook without outputs
    if path.suffix != ".ipynb":
        return path.read_bytes()
    book = json.loads(path.read_bytes())
    book["metadata"].pop("ogbnlib", None)  # describes the committed run
    for cell in book["cells"]:
        if cell["cell_type"] == "code":
            cell.update(outputs=[], execution_count=None)
    return (json.dumps(book, indent=1, ensure_ascii=False) + "\n").encode()


def write_course(folder: Path) -> None:
    """Write a working folder with the course, whole or not at all.

    The files come from the wheel or, with an editable installation, from the clone.

    Raises:
        InputError: The folder has content, or the installation has no notebooks.
    """
    package = Path(__file__).parents[1]  # the wheel's has the folder `course`
    source = package / "course" if (package / "course").is_dir() else package.parent
    if not (source / "notebooks" / "00_quickstart.ipynb").is_file():
        raise InputError(
            f"{source}: expected the folder notebooks, found none; install ogbnlib from its wheel, "
            "or a clone by `pip install -e .`"
        )
    with new_folder(folder) as part:  # renamed to `folder` at the end of the block
        for pattern in _PATTERNS:
            for path in source.glob(pattern):
                target = part / path.relative_to(source)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(_without_outputs(path))
        (part / "README.md").write_text(_README, encoding="utf-8")
