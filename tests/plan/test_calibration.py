"""Profiles from measurements."""

import pytest

from cumulo.bench import device_timer
from cumulo.errors import ConfigError
from cumulo.plan.time.calibration import Measurement, as_yaml, calibrated, product_constants
from cumulo.plan.time.compute import BACKWARD_ATTENTION, product_s, rates
from cumulo.plan.time.compute_profile import Profiles
from cumulo.spec import catalog

DEVICE = catalog.device("h100-sxm")
BASE = Profiles.load().named("megatron-core-2024-hopper")


def times_of(profile_name: str) -> list[Measurement]:
    """What a machine would measure on which the profile's constants were the truth."""
    profile = Profiles.load().named(profile_name)
    rate, bandwidth = rates(profile, DEVICE), DEVICE.memory_bytes_per_s
    found = [
        Measurement("matmul", product_s(rate, m, n, k), 2.0 * m * n * k, 2.0 * (m * k + k * n + m * n))
        for m in (1024, 8192)
        for n in (512, 4096)
        for k in (1024, 4096)
    ]
    flops = 1e12
    found.append(Measurement("attention", flops * rate.attention_flop_s, flops))
    found.append(
        Measurement("attention backward", BACKWARD_ATTENTION * flops * rate.attention_backward_flop_s, flops)
    )
    found.append(Measurement("elementwise", 1e9 * profile.elementwise_passes / bandwidth, 1e9))
    found.append(Measurement("loss", 1e8 * profile.logit_bytes / bandwidth, 1e8))
    found.append(Measurement("optimizer", 1e9 * profile.optimizer_bytes / bandwidth, 1e9))
    found.append(Measurement("launch", 12 * profile.launch_s, 12))
    return found


def test_calibration_finds_the_constants_that_made_the_times() -> None:
    truth = Profiles.load().named("fsdp-2023-hopper")
    found = calibrated(BASE, DEVICE, "bfloat16", times_of("fsdp-2023-hopper"), "mine", "measured")
    for name in (
        "matmul_efficiency",
        "matmul_traffic",
        "attention_forward_efficiency",
        "attention_backward_efficiency",
        "elementwise_passes",
        "logit_bytes",
        "optimizer_bytes",
        "launch_s",
    ):
        assert getattr(found, name) == pytest.approx(getattr(truth, name), rel=1e-6), name
    assert found.tensor_exposed == BASE.tensor_exposed  # what one device cannot show


def test_traffic_that_is_hidden_is_not_below_nothing() -> None:
    faster_when_thin = [Measurement("matmul", 1.0, 1e14, 1e9), Measurement("matmul", 0.4, 5e13, 1e10)]
    efficiency, share = product_constants(faster_when_thin, 1e15, 3e12)
    assert share == 0.0
    assert 0.1 <= efficiency <= 0.125


def test_a_written_profile_is_read_again(tmp_path) -> None:
    found = calibrated(BASE, DEVICE, "bfloat16", times_of("fsdp-2023-hopper"), "mine", "measured")
    path = tmp_path / "profile.yaml"
    path.write_text(as_yaml(found, "megatron-core-2024-hopper", BASE), "utf-8")
    profile, borrowed = Profiles.load(path).find(DEVICE, "bfloat16", "mine")
    assert borrowed == ()
    assert profile.matmul_efficiency == pytest.approx(found.matmul_efficiency, rel=5e-3)
    assert profile.devices == "h100-sxm"


def test_this_machine_is_measured_for_longer_than_a_disturbance_lasts(monkeypatch) -> None:
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 0.04 if now % 2 < 0.4 else 0.02  # another program takes half of the machine for 0.4 s
        return now

    monkeypatch.setattr(device_timer.time, "perf_counter", clock)
    monkeypatch.setattr(device_timer.torch.cuda, "is_available", lambda: False)
    found = device_timer.device_here()
    assert found.peak_flops["float32"] == pytest.approx(2 * 512**3 / 0.02)
    assert found.memory_bytes_per_s == pytest.approx(8 * 2**24 / 0.02)


def test_a_measurement_without_time_is_refused() -> None:
    with pytest.raises(ConfigError, match="above 0"):
        Measurement("matmul", 0.0, 1.0)


def test_a_file_without_profiles_is_refused(tmp_path) -> None:
    path = tmp_path / "empty.yaml"
    path.write_text("devices: {}\n", "utf-8")
    with pytest.raises(ConfigError, match="cumulo calibrate"):
        Profiles.load(path)


@pytest.mark.long
def test_the_command_measures_this_machine_and_writes_a_profile_that_is_read(tmp_path) -> None:
    import typer
    from typer.testing import CliRunner

    from cumulo.cli.calibrate import calibrate

    app, path = typer.Typer(), tmp_path / "profile.yaml"
    app.command()(calibrate)
    result = CliRunner().invoke(
        app, ["--out", str(path), "--device", "cpu", "--dtype", "float32", "--seconds", "0.01"]
    )
    assert result.exit_code == 0, result.output
    assert "matmul_efficiency" in result.output
    profile, borrowed = Profiles.load(path).find(catalog.device("cpu"), "float32", "measured-here")
    assert borrowed == ()
    assert profile.launch_s > 0
    assert profile.matmul_efficiency != Profiles.load().named("cumulo-2026-cpu").matmul_efficiency
