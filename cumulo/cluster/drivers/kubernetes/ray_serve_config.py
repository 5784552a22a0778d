"""The configuration of Ray Serve that a RayService carries as text (serveConfigV2): YAML in YAML, which no schema
of KubeRay looks into. Called by the check. Fields are those of Ray Serve's REST API, Ray 2.50 to 2.60.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from cumulo.base.nearest import did_you_mean
from cumulo.cluster.drivers.kubernetes.manifest_source import Manifest

_PATH = ("spec", "serveConfigV2")
_TOP = (
    "proxy_location", "http_options", "grpc_options", "controller_options", "logging_config", "tracing_config",
    "applications", "target_capacity",
)  # fmt: skip
_APPLICATION = (
    "name", "route_prefix", "import_path", "runtime_env", "host", "port", "deployments", "autoscaling_policy",
    "args", "logging_config", "external_scaler_enabled",
)  # fmt: skip
_DEPLOYMENT = (
    "name", "num_replicas", "max_ongoing_requests", "max_queued_requests", "backpressure_config", "user_config",
    "autoscaling_config", "graceful_shutdown_wait_loop_s", "graceful_shutdown_timeout_s", "health_check_period_s",
    "health_check_timeout_s", "ray_actor_options", "placement_group_bundles", "placement_group_strategy",
    "placement_group_bundle_label_selector", "max_replicas_per_node", "logging_config", "request_router_config",
    "gang_scheduling_config", "deployment_actors", "rolling_update_percentage", "max_surge_percent",
)  # fmt: skip
_ACTOR = (
    "runtime_env", "num_cpus", "num_gpus", "memory", "resources", "accelerator_type", "label_selector",
    "fallback_strategy",
)  # fmt: skip
_SCALING = (
    "min_replicas", "initial_replicas", "max_replicas", "target_ongoing_requests", "metrics_interval_s",
    "look_back_period_s", "smoothing_factor", "upscale_smoothing_factor", "downscale_smoothing_factor",
    "upscaling_factor", "downscaling_factor", "downscale_delay_s", "downscale_to_zero_delay_s", "upscale_delay_s",
    "aggregation_function", "policy",
)  # fmt: skip


def check_serve_config(manifest: Manifest) -> None:
    text = manifest.value(*_PATH)
    if not isinstance(text, str) or not text.strip():
        manifest.blame(_PATH, "is required and missing: the applications that Ray Serve runs")
        return
    try:
        config = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark is not None else ""
        manifest.blame(_PATH, f"its text is not valid YAML{where}: {getattr(error, 'problem', error)}")
        return
    if not isinstance(config, dict):
        manifest.blame(_PATH, "its text must be a mapping with applications")
        return
    _check_fields(manifest, "", config, _TOP)
    applications = config.get("applications")
    if not isinstance(applications, list) or not applications:
        manifest.blame(_PATH, "applications is required and missing: a list, each with import_path")
        return
    _check_unlike(manifest, applications)
    for number, one in enumerate(applications):
        if isinstance(one, dict):
            _check_application(manifest, f"applications[{number}]", one)
        else:
            manifest.blame(_PATH, f"applications[{number}] must be a mapping with import_path")


def _check_unlike(manifest: Manifest, applications: Sequence[Any]) -> None:
    """Two applications of one name, or at one route, replace each other."""
    for field, otherwise in (("name", "default"), ("route_prefix", "/")):
        seen: set[str] = set()
        for one in applications:
            value = one.get(field, otherwise) if isinstance(one, dict) else None
            if value is not None and str(value) in seen:
                manifest.blame(_PATH, f"two applications have the {field} {value}; each needs its own")
            seen.add(str(value))


def _check_application(manifest: Manifest, where: str, one: Mapping[str, Any]) -> None:
    _check_fields(manifest, f"{where}.", one, _APPLICATION)
    path = one.get("import_path")
    if not isinstance(path, str) or not path:
        manifest.blame(_PATH, f"{where}.import_path is required and missing, such as module:application")
    elif ":" not in path and "." not in path:
        manifest.blame(_PATH, f"{where}.import_path must be module:application, got {path}")
    route = one.get("route_prefix")
    if isinstance(route, str) and not route.startswith("/"):
        manifest.blame(_PATH, f"{where}.route_prefix must begin with /, got {route}")
    for number, each in enumerate(one.get("deployments") or ()):
        here = f"{where}.deployments[{number}]"
        if isinstance(each, dict):
            _check_deployment(manifest, here, each)
        else:
            manifest.blame(_PATH, f"{here} must be a mapping with name")


def _check_deployment(manifest: Manifest, where: str, one: Mapping[str, Any]) -> None:
    _check_fields(manifest, f"{where}.", one, _DEPLOYMENT)
    if not one.get("name"):
        manifest.blame(_PATH, f"{where}.name is required and missing")
    for field, known in (("ray_actor_options", _ACTOR), ("autoscaling_config", _SCALING)):
        if isinstance(one.get(field), dict):
            _check_fields(manifest, f"{where}.{field}.", one[field], known)
    count, scaling = one.get("num_replicas"), one.get("autoscaling_config")
    if isinstance(count, int) and scaling:
        manifest.blame(_PATH, f"{where} has both num_replicas and autoscaling_config; remove one")
    if count is not None and count != "auto" and (not isinstance(count, int) or count < 1):
        manifest.blame(_PATH, f"{where}.num_replicas must be 1 or more, or auto; got {count}")
    low, high = (
        scaling.get(name) if isinstance(scaling, dict) else None for name in ("min_replicas", "max_replicas")
    )
    if isinstance(low, int) and isinstance(high, int) and low > high:
        manifest.blame(
            _PATH, f"{where}.autoscaling_config: min_replicas {low} is more than max_replicas {high}"
        )


def _check_fields(manifest: Manifest, where: str, given: Mapping[str, Any], known: Sequence[str]) -> None:
    for name in given:
        if name not in known:
            hint = did_you_mean(str(name), known) or f"; use one of {', '.join(known)}"
            manifest.blame(_PATH, f"{where}{name} is not a field of Ray Serve's configuration{hint}")
