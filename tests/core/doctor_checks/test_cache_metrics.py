"""What an engine's metrics page tells of its cache."""

import pytest

from kvlb.doctor.core.exposition import EngineMetrics, read_metrics

CONFIG_LINE = (
    'vllm:cache_config_info{block_size="32",enable_prefix_caching="False",'
    'kv_offloading_size="None",prefix_caching_hash_algo="sha256"} 1.0\n'
)


def test_metrics_page_tells_the_cache_settings() -> None:
    """Labels of vLLM's own gauge."""
    read = read_metrics("# TYPE vllm:cache_config_info gauge\n" + CONFIG_LINE)

    assert read == EngineMetrics(
        block_size=32, has_prefix_caching=False, hash_algorithm="sha256", offload=None
    )


@pytest.mark.parametrize(
    ("page", "seen"),
    [
        ('vllm:cache_config_info{kv_offloading_size="4.0"} 1.0\n', "kv_offloading_size=4.0"),
        ("vllm:kv_offload_load_bytes_total 0.0\n", "vllm:kv_offload_load_bytes_total"),
        (
            'vllm:prompt_tokens_cached_by_source_total{source="p2p"} 5.0\n',
            "tokens cached from a peer",
        ),
        (
            'vllm:prompt_tokens_cached_by_source_total{source="p2p"} 0.0\n',
            None,
        ),
    ],
)
def test_metrics_page_tells_of_shared_tiers(page: str, seen: str | None) -> None:
    """By a setting, by a connector's metrics, by what came from a peer."""
    assert read_metrics(page).offload == seen


@pytest.mark.parametrize(
    "page",
    [
        "",
        "no metrics {",
        'other{block_size="x"} 1\n',
        'vllm:cache_config_info{block_size="None"} 1\n',
    ],
)
def test_page_that_says_nothing_leaves_all_unknown(page: str) -> None:
    """Another program's page, or a broken one."""
    assert read_metrics(page) == EngineMetrics()
