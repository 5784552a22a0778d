"""A draft model whose vocabulary is smaller or larger than that of the model that is served: published families
have such pairs, because sizes are rounded up and tokens are added."""

from pathlib import Path

import pytest

from cumulo import LLM
from tests.quant.folders import tiny_folder

PROMPTS = ["It was the best of times, it was the worst of times", "aaaaaaaa", "1 2 3 1 2 3"]


def tokens_of(folder: Path, **options: str) -> list[list[int]]:
    with LLM(str(folder), **options) as llm:
        params = llm.sampling(max_tokens=30, temperature=0, ignore_eos=True)
        return [one.samples[0].token_ids for one in llm.generate(PROMPTS, params)]


@pytest.mark.parametrize(("served", "draft"), [(320, 259), (259, 320)])
def test_a_draft_model_of_another_vocabulary_changes_no_token(
    served: int, draft: int, tmp_path: Path
) -> None:
    own = tiny_folder(tmp_path / "own", vocab_size=served)
    drafting = tiny_folder(tmp_path / "draft", vocab_size=draft)
    alone = tokens_of(own)
    assert max(map(max, alone)) >= 259 or served == 259  # the draft model does not know some of them
    assert tokens_of(own, speculate=str(drafting)) == alone
