"""The driver of each target. `cumulo launch` and `cumulo jobs` ask for it."""

from cumulo.cluster.drivers.driver import Driver
from cumulo.cluster.job_record import Target
from cumulo.cluster.job_store import JobStore


def driver_for(target: Target, store: JobStore) -> Driver:
    """Imported here, so that nobody needs the packages of a target that is not used."""
    if target == "local":
        from cumulo.cluster.drivers.local import LocalDriver

        return LocalDriver(store)
    if target == "slurm":
        from cumulo.cluster.drivers.slurm import SlurmDriver

        return SlurmDriver()
    if target == "ray":
        from cumulo.cluster.drivers.ray import RayDriver

        return RayDriver()
    from cumulo.cluster.drivers.kubernetes.driver import KubernetesDriver

    return KubernetesDriver()
