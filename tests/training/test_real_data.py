"""Real graphs through the raw writer and a conversion, trained as a user would train them."""

from pathlib import Path

import pytest
from real_graphs import real_config, write_graph

from ogbnlib.sources.convert import convert
from ogbnlib.training.train import train


@pytest.mark.slow
def test_graphsage_reaches_the_literatures_accuracy_on_photo(tmp_path: Path) -> None:
    write_graph("amazon_photo", tmp_path / "photo")
    store = convert(tmp_path / "photo", tmp_path / "store", undirected=True, progress=False)
    accuracy = train(real_config(store.path, 30), tmp_path / "run").history[-1]["test"]
    assert accuracy is not None
    assert accuracy >= 0.92
