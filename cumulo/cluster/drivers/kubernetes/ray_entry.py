"""What KubeRay's RayService imports inside the cluster: the two Ray Serve applications of a service, built from the
`args` of serveConfigV2. Named in the manifests, and imported nowhere else.
"""

import os
from typing import Any

from cumulo.cluster.drivers.ray_serve import engine_application, front_application

FRONT = "front"


def front(args: dict[str, Any]) -> Any:
    return front_application(os.environ["CUMULO_FLEET_KEY"], str(args.get("router", "prefix-aware")))


def engines(args: dict[str, Any]) -> Any:
    resources = {"num_gpus": args["gpus"]} if args["gpus"] else {"num_cpus": 1}
    key = os.environ["CUMULO_FLEET_KEY"]
    return engine_application(list(args["arguments"]), key, FRONT, int(args["replicas"]), resources, None)
