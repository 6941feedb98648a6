"""What `python -m benchmarks decision` decides: prompts like those of a day, not one of them for ever."""

from collections.abc import Sequence

import pytest

from benchmarks import decision
from benchmarks.index_workload import prompt_of
from indexer.core.index import Prompt


async def test_no_prompt_is_decided_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was decided is predicted, and found everywhere: half as much to do as with new prompts."""
    prompts: list[tuple[int, ...]] = []

    def noted(token_ids: Sequence[int]) -> Prompt:
        prompts.append(tuple(token_ids))
        return prompt_of(token_ids)

    monkeypatch.setattr(decision, "prompt_of", noted)
    monkeypatch.setattr(decision, "ROUNDS", 10)
    taken_s = await decision.measure_s(ranks=2, tokens=256)

    assert len(taken_s) == 10
    assert len(set(prompts)) == len(prompts) == 10 + 2 * decision.LEGS_PER_RANK
    assert {len(each) for each in prompts} == {256}
