"""The public cases of ../shared/cases, which are not in this repository: converted or refused."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ogbnlib import InputError, convert

CASES = Path(__file__).resolve().parents[3] / "shared" / "cases"
# by case and folder: the number of edges, or what the refusal names
EXPECTED: dict[tuple[str, str], int | str] = {
    ("01_snap", "renamed"): 2400,
    ("01_snap", "."): "wrote the draft",
    ("02_cora_content", "."): "wrote the draft",
    ("09_pt_data", "mine"): r"Store.from_data\(torch.load",
    ("12_multilabel", "."): "wrote the draft",
    ("13_ogb_csv", "ogbn_mine"): 2400,
    ("13_ogb_csv", "ogbn_mine/raw"): 2400,
    ("14_sharded_spark", "g"): 6000,
    ("14_sharded_spark", "g2"): 6000,
    ("17_label_leak", "."): "wrote the draft",
    ("32_decimal_comma", "one"): "nodes.csv, column 'score', row 0: ",
    ("32_decimal_comma", "one_from_5"): "nodes.csv, column 'score', row 1: ",
    ("32_decimal_comma", "three"): "nodes.csv, column 'a', row 0: ",
    ("32_decimal_comma", "list"): "nodes.csv, column 'emb', row 0: ",
    ("32_decimal_comma", "thousands"): "nodes.csv, column 'amount', row 0: ",
    ("33_label_noise", "typed"): 900,
    ("33_label_noise", "floats"): 900,
    ("33_label_noise", "half"): "nodes.csv, column 'label', row 0: ",
    ("33_label_noise", "minus"): "drop_unlabelled",
    ("34_dataset_saver", "submission*/**/raw"): 900,
    ("38_arrays_beside_shuffled_ids", "labels"): "labels.npy has rows only",
    ("38_arrays_beside_shuffled_ids", "features"): "features.npy has rows only",
    ("38_arrays_beside_shuffled_ids", "masks"): "train.npy has rows only",
    ("38_arrays_beside_shuffled_ids", "ids"): 800,
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    if not CASES.is_dir():
        pytest.skip(f"{CASES} is not here: public cases are not part of this repository")
    folders = {}
    for name in {name for name, _ in EXPECTED}:
        folders[name] = Path(shutil.copytree(CASES / name, tmp_path_factory.mktemp("case") / name))
        env = {**os.environ, "PYTHONPATH": str(CASES)}
        argv = [sys.executable, "make.py"]
        subprocess.run(argv, cwd=folders[name], env=env, check=True, stdout=subprocess.DEVNULL)
    return folders


@pytest.mark.parametrize(("case", "folder"), EXPECTED)
def test_a_public_case_is_right(
    case: str, folder: str, made: dict[str, Path], tmp_path: Path
) -> None:
    (source,) = made[case].glob(folder) if folder != "." else [made[case]]
    expected = EXPECTED[case, folder]
    if isinstance(expected, int):
        assert convert(source, tmp_path / "store", progress=False).num_edges == expected
        return
    with pytest.raises(InputError, match=f"(?s){expected}"):
        convert(source, tmp_path / "store", progress=False)
