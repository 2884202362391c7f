"""Real graphs through the raw writer and a conversion, trained as a user would train them."""

from pathlib import Path

from real_graphs import real_config, write_graph

from ogbnlib.training.train import train


def test_graphsage_reaches_the_accuracy_of_the_literature_on_amazon_photo(tmp_path: Path) -> None:
    write_graph("amazon_photo", tmp_path / "photo")
    accuracy = train(real_config(tmp_path / "photo", 30), tmp_path / "run").history[-1]["test"]
    assert accuracy is not None
    assert accuracy >= 0.92
    print(f"amazon_photo: test accuracy {accuracy:.4f}")


def test_coauthor_cs_reaches_it_too_and_bfloat16_comes_within_a_hundredth(tmp_path: Path) -> None:
    write_graph("coauthor_cs", tmp_path / "cs")
    exact, half = (
        train(real_config(tmp_path / "cs", 5, device="cpu", precision=precision)).history[-1]["test"]
        for precision in ("fp32", "bf16")
    )
    assert exact is not None
    assert half is not None
    assert exact >= 0.91
    assert abs(exact - half) <= 0.01
    print(f"coauthor_cs: test accuracy {exact:.4f} in fp32, {half:.4f} in bf16")
