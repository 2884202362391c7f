"""Add the notebooks (without outputs), their guide and the job scripts to the wheel.

They become `ogbnlib/course/`, from which `python -m ogbnlib notebooks` writes a working folder. All
else about the package stands in pyproject.toml.
"""

import runpy
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent


class BuildWithCourse(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return  # the files are read from the clone then
        module = runpy.run_path(str(ROOT / "ogbnlib" / "notebook" / "course.py"))
        course = Path(self.build_lib, "ogbnlib", "course")
        shutil.rmtree(course, ignore_errors=True)  # of an earlier build
        module["copy_course"](ROOT, course)


setup(cmdclass={"build_py": BuildWithCourse})
