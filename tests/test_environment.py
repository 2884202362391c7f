"""Promise of `environment`: each variable of the package has one name, in one file."""

from pathlib import Path

import ogbnlib
from ogbnlib import environment

PACKAGE = Path(ogbnlib.__file__).parent


def test_no_other_module_spells_the_name_of_a_variable() -> None:
    names = [value for value in vars(environment).values() if str(value).startswith("OGBNLIB_")]
    assert len(set(names)) == len(names) > 5
    for path in PACKAGE.rglob("*.py"):
        if path.name != "environment.py":
            assert not [name for name in names if name in path.read_text()], path
