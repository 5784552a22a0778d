"""ModelSpec as plain data: what is written can be read, and what cannot be meant is refused by name."""

import json
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from cumulo.errors import ModelError
from cumulo.spec.from_huggingface import spec_from_config
from cumulo.spec.model import MLASpec, ModelSpec, MoESpec, RopeScaling
from cumulo.spec.model_file import from_dict, to_dict
from tests.spec import published

numbers = st.floats(0.01, 1e9)
counts = st.integers(1, 10**6)
specs = st.builds(
    ModelSpec,
    family=st.text(max_size=8), vocab_size=counts, hidden=counts, layers=counts, heads=counts,
    kv_heads=counts, head_dim=counts, ffn_hidden=counts, max_context=counts, norm_eps=numbers,
    rope_theta=numbers,
    rope_scaling=st.none() | st.builds(
        RopeScaling, kind=st.sampled_from(["linear", "llama3", "yarn", "factors"]), factor=numbers,
        original_context=counts, attention_factor=st.none() | numbers, truncate=st.booleans(),
        factors=st.lists(numbers, max_size=3).map(tuple),
    ),
    tied_embeddings=st.booleans(), sliding_window=st.none() | counts,
    windowed_layers=st.none() | st.lists(counts, max_size=3).map(tuple),
    moe=st.none() | st.builds(
        MoESpec, experts=counts, experts_per_token=counts, expert_hidden=counts,
        scoring=st.sampled_from(["softmax", "sigmoid"]), dense_layers=st.lists(counts, max_size=3).map(tuple),
    ),
    mla=st.none() | st.builds(
        MLASpec, q_rank=st.none() | counts, kv_rank=counts, nope_head_dim=counts, rope_head_dim=counts,
        value_head_dim=counts,
    ),
    bos_token_id=st.none() | counts, eos_token_ids=st.lists(counts, max_size=3).map(tuple),
)  # fmt: skip


@given(specs)
def test_a_spec_survives_json_and_yaml(spec: ModelSpec) -> None:
    assert from_dict(json.loads(json.dumps(to_dict(spec)))) == spec
    assert from_dict(yaml.safe_load(yaml.safe_dump(to_dict(spec)))) == spec


def test_defaults_are_left_out_so_that_a_plan_file_stays_readable() -> None:
    data = to_dict(spec_from_config(published.LLAMA_31_8B))
    assert "moe" not in data and data["rope_scaling"]["kind"] == "llama3"


def test_whole_numbers_are_taken_where_fractions_are_meant() -> None:
    data = to_dict(spec_from_config(published.LLAMA_31_8B)) | {"rope_theta": 500000}
    assert from_dict(data) == spec_from_config(published.LLAMA_31_8B)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hiden": 3}, "no setting 'hiden'; did you mean 'hidden'"),
        ({"hidden": "4096"}, "hidden must be a whole number, got '4096'"),
        ({"hidden": True}, "hidden must be a whole number, got True"),
        (
            {"rope_scaling": {"kind": "ntk", "factor": 1.0, "original_context": 1}},
            "rope_scaling.kind cannot be ntk",
        ),
        ({"rope_scaling": {"kind": "yarn"}}, "rope_scaling lacks factor, original_context"),
        ({"moe": 8}, "moe must be a table of settings, got 8"),
        ({"eos_token_ids": 2}, "eos_token_ids must be a list, got 2"),
    ],
)
def test_a_wrong_field_is_named(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        from_dict(to_dict(spec_from_config(published.LLAMA_31_8B)) | change)


def test_a_missing_field_is_named() -> None:
    with pytest.raises(ModelError, match="lacks vocab_size, hidden"):
        from_dict({"family": "llama", "layers": 1, "heads": 1, "kv_heads": 1, "head_dim": 2, "ffn_hidden": 1,
                   "max_context": 1})  # fmt: skip
