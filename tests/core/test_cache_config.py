"""The size of an engine's cache, read from its metrics."""

import pytest

from balancer.core.fleet.cache_config import parse_cache_tokens

LINE = (
    'vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="0",'
    'gpu_memory_utilization="0.92",num_gpu_blocks="27845"} 1.0\n'
)


def test_blocks_of_all_ranks_times_their_size() -> None:
    """Among thousands of other lines."""
    text = "# TYPE vllm:cache_config_info gauge\nvllm:num_requests_running 0.0\n" + LINE

    assert parse_cache_tokens(text) == 27845 * 16


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("", id="empty"),
        pytest.param('vllm:cache_config_info{block_size="16"} 1.0', id="no-blocks"),
        pytest.param(LINE.replace("27845", "None"), id="no-number"),
        pytest.param(LINE.replace("27845", "0"), id="none-at-all"),
        pytest.param("# " + LINE, id="comment"),
    ],
)
def test_what_is_not_said_is_not_known(text: str) -> None:
    """None, not 0."""
    assert parse_cache_tokens(text) is None
