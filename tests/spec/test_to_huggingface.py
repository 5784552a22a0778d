"""A config.json written from a spec is read back as that spec, by us and as a model by `transformers`."""

import dataclasses

import pytest

from cumulo.errors import ModelError
from cumulo.spec.from_huggingface import spec_from_config
from cumulo.spec.model import RopeScaling
from cumulo.spec.to_huggingface import config_from_spec
from tests import peers
from tests.models import tiny


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_a_spec_survives_its_config_and_transformers(name: str) -> None:
    model_type, changes = tiny.FAMILIES[name]
    spec = spec_from_config(
        peers.transformers.AutoConfig.for_model(model_type, **{**tiny._SIZE, **changes}).to_dict()
    )
    written = config_from_spec(spec)
    assert spec_from_config(written) == spec
    own = {key: value for key, value in written.items() if key not in ("model_type", "architectures")}
    assert spec_from_config(peers.transformers.AutoConfig.for_model(model_type, **own).to_dict()) == spec


def test_what_has_no_form_is_refused() -> None:
    spec = spec_from_config(peers.transformers.AutoConfig.for_model("llama", **tiny._SIZE).to_dict())
    with pytest.raises(ModelError, match=r"has no config\.json"):
        config_from_spec(dataclasses.replace(spec, family="unheard"))
    with pytest.raises(ModelError, match="rotary factors"):
        factors = RopeScaling("factors", 1.0, 512, factors=(1.0,) * (spec.head_dim // 2))
        config_from_spec(dataclasses.replace(spec, rope_scaling=factors))
    with pytest.raises(ModelError, match="cannot express"):
        config_from_spec(dataclasses.replace(spec, qk_norm=True))
