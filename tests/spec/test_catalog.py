"""The catalogue against published numbers: the configurations and the parameter counts of the models' makers."""

import dataclasses
from pathlib import Path

import pytest

from cumulo.errors import ConfigError, ModelError
from cumulo.models.decoder import Decoder
from cumulo.spec import catalog
from cumulo.spec.catalog import Catalog
from cumulo.spec.cluster import Cluster
from cumulo.spec.counting import parameter_count
from cumulo.spec.from_huggingface import spec_from_config
from tests.spec import published
from tests.spec.active import active_parameter_count

# What does not change a size: stretched positions, special tokens, and how rotated pairs are stored.
_NOT_SIZES = {"rope_scaling", "bos_token_id", "eos_token_ids", "max_context", "rope_interleaved", "dtype"}


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("llama-2-7b", published.LLAMA_2_7B),
        ("llama-3.1-8b", published.LLAMA_31_8B),
        ("qwen3-0.6b", published.QWEN3_06B),
        ("qwen3-30b-a3b", published.QWEN3_30B_A3B),
        ("mixtral-8x7b", published.MIXTRAL_8X7B),
        ("deepseek-v2-lite", published.DEEPSEEK_V2_LITE),
        ("deepseek-v3", published.DEEPSEEK_V3),
    ],
)
def test_a_model_of_the_catalogue_is_the_one_its_maker_published(
    name: str, config: dict[str, object]
) -> None:
    ours, theirs = catalog.model(name), spec_from_config(config)
    for field in dataclasses.fields(ours):
        if field.name not in _NOT_SIZES:
            assert getattr(ours, field.name) == getattr(theirs, field.name), field.name


@pytest.mark.parametrize(
    ("name", "billions", "active_billions"),
    [  # as the papers and model cards print them
        ("gpt3-6.7b", 6.7, None),
        ("gpt3-175b", 174.6, None),
        ("gpt-530b", 529.6, None),
        ("gpt-1t", 1008.0, None),
        ("llama-65b", 65.2, None),
        ("llama-2-70b", 69.0, None),
        ("llama-3.1-405b", 405.0, None),
        ("qwen2-72b", 72.71, None),
        ("qwen3-235b-a22b", 235.0, 22.0),
        ("mixtral-8x7b", 46.7, 12.9),
        ("mixtral-8x22b", 141.0, 39.0),
        ("deepseek-v2", 236.0, 21.0),
        ("deepseek-v3", 671.0, 37.0),
        ("kimi-k2", 1040.0, 32.0),
    ],
)
def test_parameter_counts_are_the_published_ones(
    name: str, billions: float, active_billions: float | None
) -> None:
    spec = catalog.model(name)
    assert parameter_count(spec) / 1e9 == pytest.approx(billions, rel=0.015)
    if active_billions is not None:
        assert active_parameter_count(spec) / 1e9 == pytest.approx(active_billions, rel=0.03)


def test_a_gpt_counts_its_parameters_by_the_formula_of_megatron() -> None:
    """Narayanan et al. 2021, equation 2: 12 l h² (1 + 13/12h + (V + s)/12lh); it leaves out the final norm's 2h."""
    spec = catalog.model("gpt-175b")
    layers, hidden, vocabulary, context = 96, 12288, 51200, 2048
    formula = 12 * layers * hidden**2 + 13 * layers * hidden + (vocabulary + context) * hidden
    assert parameter_count(spec) == formula + 2 * hidden


def test_everything_in_the_catalogue_can_be_built() -> None:
    shipped = catalog.shipped()
    for kind, build in (("devices", shipped.device), ("nodes", shipped.node), ("fabrics", shipped.fabric)):
        assert [build(name).name for name in shipped.names(kind)] == shipped.names(kind)
    assert all(shipped.cluster(2, device=name).gpus == 2 for name in shipped.names("devices"))
    assert all(shipped.model(name).layers for name in shipped.names("models"))


def test_the_devices_that_were_promised_are_there() -> None:
    promised = (
        "a100-40gb a100-80gb a800 h100-sxm h100-pcie h100-nvl h200 h800 b200 b300 gb200 gb300 mi300x l40s rtx-4090 "
        "rtx-5090 cpu"
    )
    assert set(promised.split()) <= set(catalog.shipped().names("devices"))


def test_an_a800_is_an_a100_whose_nvlink_has_400_gb_s_both_ways() -> None:
    a100, a800 = catalog.device("a100-80gb"), catalog.device("a800")
    assert 2 * a800.link_bytes_per_s == 400e9
    own = {field: getattr(a800, field) for field in ("name", "year", "link_bytes_per_s", "source")}
    assert a800 == dataclasses.replace(a100, **own)
    assert catalog.cluster(16, "a800").node.name == "hgx-a800"


def test_a_rate_that_a_device_lacks_is_that_of_the_next_wider_format() -> None:
    a100 = catalog.device("a100-80gb")
    assert a100.flops("float8") == a100.flops("bfloat16") == 312e12
    with pytest.raises(ConfigError, match="no rate for 'float7'"):
        a100.flops("float7")


def test_an_unknown_name_gets_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean h100-sxm"):
        catalog.device("h100-smx")
    with pytest.raises(ConfigError, match=r"did you mean llama-3.1-405b"):
        catalog.model("llama-3.1-450b")


def test_a_users_file_goes_on_top(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text(
        "nodes:\n  box: {device: h200, gpus: 4, nic_bytes_per_s: 1.25e+9, power_w: 500}\n"
        "fabrics:\n  slow: {kind: fat-tree, transport: ethernet, switch_ports: 32, oversubscription: [4]}\n"
    )
    cluster = Catalog.load(mine).cluster(8, node="box", fabric="slow")
    assert (cluster.nodes, cluster.scale_up_gpus, cluster.fabric.oversubscription_of(3)) == (2, 4, 4.0)
    assert cluster.device == catalog.device("h200")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("device: {}", "unknown table 'device'; did you mean devices"),
        ("devices: {x: {year: 2020}}", "device x lacks generation"),
        ("nodes: {x: {device: h200, gpus: 0, nic_bytes_per_s: 1.0, power_w: 1}}", "gpus must be more than 0"),
        (
            "nodes: {x: {device: h200, gpus: 8, nic_bytes_per_s: -1.0, power_w: 1}}",
            "nic_bytes_per_s must be more",
        ),
        (
            "nodes: {x: {device: h200, gpus: 8, scale_up_gpus: 3, nic_bytes_per_s: 1.0, power_w: 1}}",
            "multiple",
        ),
        ("- a list", "must be a table"),
        ("a: [", "not valid YAML"),
    ],
)
def test_a_wrong_catalogue_is_refused_with_the_reason(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=reason):
        found = Catalog.load(path)
        found.device("x") if "devices" in text else found.node("x")


def test_a_cluster_is_of_whole_nodes() -> None:
    with pytest.raises(ConfigError, match=r"12 GPUs do not fill whole nodes of 8 .* use 8 or 16"):
        catalog.cluster(12, device="h100-sxm")
    with pytest.raises(ConfigError, match="1 or more GPUs, got 0"):
        catalog.cluster(0, device="h100-sxm")
    part = catalog.cluster(4, device="h100-sxm")
    assert (part.nodes, part.scale_up_gpus) == (1, 4)
    assert isinstance(part, Cluster)


def test_a_model_that_only_can_be_planned_is_not_run() -> None:
    with pytest.raises(ModelError, match=r"gpt model .* can be planned, but not run"):
        Decoder(catalog.model("gpt3-125m"), device="meta")
