"""Units that died and units that live: the law that made them comes back, wear reaches the job, nonsense is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from outlast.cli import main


def made(path: Path, shape: float = 2.6, scale: float = 7.0, num: int = 1500) -> str:
    """Two batches watched for five years; the second lasts three times as long."""
    rng, lines = np.random.default_rng(2), ["age,dead,batch"]
    for batch, factor in (("old", 1.0), ("new", 3.0)):
        for life in rng.weibull(shape, num) * scale * factor:
            lines.append(f"{min(life, 5.0):.6f},{int(life < 5.0)},{batch}")
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def test_the_law_comes_back_and_wear_reaches_the_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = made(tmp_path / "units.csv")

    def told(years: float) -> dict:  # type: ignore[type-arg]
        words = ["plan", "lifetimes", path, "--group", "batch", "--years", str(years), "--json"]
        assert main(words) == 0
        return json.loads(capsys.readouterr().out)["groups"]  # type: ignore[no-any-return]

    young, worn = told(0.5), told(4.0)
    shape, low, high = young["old"]["laws"]["weibull"]["parameters"]["shape"]
    assert low < 2.6 < high
    assert shape == pytest.approx(2.6, rel=0.1)
    assert worn["old"]["failures"] == pytest.approx(1000 * ((4 + 30 / 365.25) ** 2.6 - 4**2.6) / 7**2.6, rel=0.15)
    assert worn["old"]["failures"] > 10 * young["old"]["failures"]
    assert worn["old"]["node_mtbf_h"] * worn["old"]["failures"] == pytest.approx(1000 * 720)
    assert worn["new"]["failures"] < worn["old"]["failures"] / 8
    assert main(["plan", "lifetimes", path, "--svg", str(tmp_path / "s.svg")]) == 0
    assert "Survival" in capsys.readouterr().out
    assert (tmp_path / "s.svg").read_text().startswith("<svg")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("age,dead\n1,maybe\n", "line 2: age '1', dead 'maybe'"), ("age,dead\n-1,1\n", "line 2"),
        ("age,dead\nx,1\n", "line 2"), ("age\n1\n", "no column 'dead'"), ("age,dead\n", "no units"),
        ("age,dead\n1,1\n2,0\n", "too few"),
    ],
)  # fmt: skip
def test_what_is_no_lifetime_is_refused(
    content: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "u.csv").write_text(content)
    assert main(["plan", "lifetimes", str(tmp_path / "u.csv")]) == 2
    assert said in capsys.readouterr().err
