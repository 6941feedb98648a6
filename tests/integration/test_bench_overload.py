"""Overload in virtual time: the line keeps a fleet's goodput, and the command says so."""

from rich.console import Console

from kvlb.bench.overload import OverloadJob, OverloadOptions, bench_overload, run_overload


def test_a_line_keeps_goodput_that_is_lost_without_one() -> None:
    """Half more than the fleet can serve: everybody is late, or some are refused."""
    with_line, without = (
        run_overload(
            OverloadJob(
                workload="arxiv", engines=4, load=150, seed=0, promise_s=2.0, has_line=has_line
            )
        )
        for has_line in (True, False)
    )

    assert with_line.good_per_s > 1.1 * without.good_per_s
    assert with_line.ttft_p99_s < without.ttft_p99_s / 2
    assert 0 < with_line.refused < 0.35
    assert without.refused == 0


def test_the_table_says_what_is_kept() -> None:
    """Each load with and without a line, and the verdict in words."""
    console = Console(width=150, record=True)
    options = OverloadOptions(workloads=("weka",), loads=(100, 150), seeds=1)
    is_kept = bench_overload(options, console)
    text = console.export_text()

    assert is_kept
    assert "weka: " in text
    assert "kept" in text
    assert text.count("150 %") >= 2
