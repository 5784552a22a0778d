"""All faults that a text names, the most specific first. `diagnose` asks here after it has judged the numbers."""

from cumulo.plan.diagnose.named.bindings import binding_faults
from cumulo.plan.diagnose.named.fabric_faults import fabric_faults
from cumulo.plan.diagnose.named.fault import Fault
from cumulo.plan.diagnose.named.gpu_table import gpu_faults
from cumulo.plan.diagnose.named.host_faults import host_faults
from cumulo.plan.diagnose.named.paths import path_faults
from cumulo.plan.diagnose.named.plain_faults import plain_faults
from cumulo.plan.diagnose.named.ports import port_faults
from cumulo.plan.diagnose.named.settings import setting_faults


def named_faults(text: str) -> list[Fault]:
    return [
        *path_faults(text),
        *fabric_faults(text),
        *port_faults(text),
        *gpu_faults(text),
        *plain_faults(text),
        *host_faults(text),
        *binding_faults(text),
        *setting_faults(text),
    ]
